# SPDX-License-Identifier: Apache-2.0
"""The least time that a kernel can take on a GPU that nobody measured: clocks per tile on memory, tensor cores and
shared memory, and which of them binds.

A kernel states what a tile costs: `work()` of `cute_kernels/<package>/blackwell/<kernel>.py` returns
`cute_kernels.runtime.work.Work`s (bytes from memory, operations of the MMA instructions, bytes through shared memory,
useful operations, the tiles of standard shapes). Whatever such file has the function is found and reported; nothing is
registered elsewhere. `python -m perf compiled` keeps the figures, `python -m perf report` shows them, apart from
everything measured.

The rates are NVIDIA's for a B200, not measurements. Left out, because nobody here knows them: the path from L2, the
rate at which gather4 is issued, latencies, what a launch costs. So a time is a bound from below, never a prediction.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import cute_kernels
from cute_kernels.runtime.work import Shape, Work


@dataclass(frozen=True)
class Machine:
    """What one multiprocessor can do in a clock.

    mma    kind -> floating-point operations
    smem   bytes of shared memory, read or written
    hbm    bytes per second of the whole GPU
    """

    name: str
    multiprocessors: int
    clock: float
    mma: dict[str, int]
    smem: int
    hbm: float

    @property
    def hbm_per_clock(self) -> float:
        """One multiprocessor's share of memory's bandwidth, in bytes."""
        return self.hbm / self.multiprocessors / self.clock


B200 = Machine("B200", 148, 1.85e9, {"bf16": 8192, "e4m3": 16384, "e2m1": 32768}, 128, 8e12)


@dataclass(frozen=True)
class Bound:
    """Clocks of a tile on each resource, and the one that takes longest."""

    hbm: float
    mma: float
    smem: float
    threads: float = 0.0

    @property
    def clocks(self) -> float:
        return max(self.hbm, self.mma, self.smem, self.threads)

    @property
    def binding(self) -> str:
        found = {"memory": self.hbm, "tensor cores": self.mma, "shared memory": self.smem, "threads": self.threads}
        return max(found, key=lambda name: found[name])


def bound(work: Work, machine: Machine = B200) -> Bound:
    """Clocks of one tile."""
    return Bound(
        hbm=work.hbm / machine.hbm_per_clock,
        mma=sum(flops / machine.mma[kind] for kind, flops in work.mma.items()),
        smem=sum(work.smem.values()) / machine.smem,
        threads=sum(work.threads.values()),
    )


def tflops(work: Work, machine: Machine = B200) -> float:
    """Useful operations per second, in 10^12, if the binding resource never waits."""
    units = machine.multiprocessors // work.blocks
    return work.flops * work.blocks / bound(work, machine).clocks * units * machine.clock / 1e12


def microseconds(work: Work, shape: Shape, machine: Machine = B200) -> float:
    """The least time of a call: its tiles on the binding resource, all multiprocessors equally busy, or its bytes."""
    units = machine.multiprocessors // work.blocks
    seconds = max(shape.tiles / units * bound(work, machine).clocks / machine.clock, shape.bytes / machine.hbm)
    return seconds * 1e6


def kernel_modules() -> list[str]:
    """Modules of Blackwell's kernels that may state it."""
    root = Path(cute_kernels.__file__).parent
    files = sorted(root.glob("*/blackwell/*.py"))
    return [".".join(("cute_kernels", *path.relative_to(root).with_suffix("").parts)) for path in files]


def all_work(modules: Iterable[str] | None = None) -> list[Work]:
    """What kernels state. Imports them, and with them CuTe DSL."""
    found: list[Work] = []
    for name in kernel_modules() if modules is None else modules:
        declare = getattr(importlib.import_module(name), "work", None)
        found += declare() if declare is not None else ()
    return found
