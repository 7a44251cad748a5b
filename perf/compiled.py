# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs that nobody here has, as far as a compiler can tell: registers, spills, shared and tensor memory,
instructions, and what their plans state for perf.roofline.

`python -m perf compiled` compiles Blackwell's own kernels of the deployments below and writes the file; `python -m perf
report` reads it, so that a report needs no compiler. tests/compile compares what it compiles anyway with it.
"""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cute_kernels.runtime.arch import BLACKWELL
from cute_kernels.runtime.work import Shape, Work

FILE = Path("perf/compiled/blackwell.json")
"""Below the root of the repository."""

ARCHS = BLACKWELL
TP_SIZES = (1, 8)
"""Of every model: what tests/compile compiles."""

MARK = ".blackwell."
"""In the names of Blackwell's own kernels."""


@dataclass(frozen=True)
class Kernel:
    """One compiled key.

    ops              that it is of
    key              its class and fields but the architecture
    spills           bytes, loads and stores
    smem             bytes of shared memory
    tensor_columns   of tensor memory
    instructions     family (runtime.report.INSTRUCTIONS) -> occurrences in the PTX
    """

    ops: tuple[str, ...]
    key: str
    arch: str
    registers: int
    spills: int
    smem: int
    tensor_columns: int
    instructions: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What the file holds. versions: of what compiled."""

    versions: dict[str, str]
    kernels: tuple[Kernel, ...]
    work: tuple[Work, ...]


def own_keys(archs: Sequence[str] = ARCHS) -> dict[Any, tuple[str, ...]]:
    """Keys of Blackwell's own kernels in all deployments, and their ops. Imports CuTe DSL."""
    from cute_kernels.models import MODELS
    from cute_kernels.runtime.registry import ops_with_kernels

    found: dict[Any, tuple[str, ...]] = {}
    for op in ops_with_kernels():
        declare = op.load_kernel().deployment_keys
        for arch in archs:
            for key in [key for model in MODELS.values() for tp in TP_SIZES for key in declare(model, tp, arch)]:
                if MARK in key.kernel_name:
                    found[key] = tuple(dict.fromkeys((*found.get(key, ()), op.name)))
    return found


def name_of(key: Any) -> str:
    """Class and fields of a key, without its architecture."""
    fields = ", ".join(f"{name}={value!r}" for name, value in vars(key).items() if name != "arch")
    return f"{type(key).__name__}({fields})"


def tensor_columns(ptx: str) -> int:
    """Columns of tensor memory that a kernel asks for."""
    return max((int(n) for n in re.findall(r"tcgen05\.alloc\.\S+\s+\[[^\]]+\],\s*(\d+);", ptx)), default=0)


def kernel_of(key: Any, ops: Iterable[str], report: Any, columns: int) -> Kernel:
    """What a report says of a key, and the columns of tensor memory that it asks for."""
    return Kernel(
        tuple(ops),
        name_of(key),
        key.arch,
        report.registers,
        report.spill_stores + report.spill_loads,
        report.smem,
        columns,
        dict(report.instructions),
    )


def compile_all(keys: dict[Any, tuple[str, ...]], workers: int | None = None) -> Iterator[Kernel]:
    """Compile the keys, in as many processes as there are cores unless told otherwise, in their order."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, context) as pool:
        yield from pool.map(_compile, keys, keys.values())


def _compile(key: Any, ops: tuple[str, ...]) -> Kernel:
    from cute_kernels.runtime.compile import compile_report

    report = compile_report(key)
    return kernel_of(key, ops, report, tensor_columns(report.ptx))


def to_json(found: Compiled) -> str:
    return json.dumps(asdict(found), indent=1) + "\n"


def read(root: Path) -> Compiled | None:
    """What is in the file, or None if there is none. ValueError if it is odd."""
    try:
        raw = json.loads((root / FILE).read_bytes())
        kernels = tuple(Kernel(**{**k, "ops": tuple(k["ops"])}) for k in raw["kernels"])
        work = tuple(Work(**{**w, "shapes": tuple(Shape(**s) for s in w["shapes"])}) for w in raw["work"])
        return Compiled(raw["versions"], kernels, work)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{FILE}: {error!r}") from error


def differences(known: Compiled | None, compiled: Iterable[Kernel]) -> list[str]:
    """What of the kernels is not as in the file, in words."""
    there = {} if known is None else {(k.key, k.arch): k for k in known.kernels}
    return [
        f"{FILE} is out of date on {kernel.key} for {kernel.arch}: run python -m perf compiled"
        for kernel in compiled
        if there.get((kernel.key, kernel.arch)) != kernel
    ]


def make(workers: int | None = None) -> Compiled:
    """All that the file should hold: compiles."""
    from cute_kernels.runtime.cache import environment
    from perf.roofline import all_work

    here = environment()
    versions = {name: here[name] for name in ("dsl", "toolkit")}
    return Compiled(versions, tuple(compile_all(own_keys(), workers)), tuple(all_work()))
