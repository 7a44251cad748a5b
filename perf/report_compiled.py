# SPDX-License-Identifier: Apache-2.0
"""The report's section on kernels that nobody has run: what a compiler says of them, and bounds of their times."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cute_kernels.runtime.work import Work
from perf.compiled import Compiled, Kernel
from perf.roofline import B200, bound, microseconds, tflops
from perf.tables import table

TITLE = "## Compiled, not run"

WHAT = (
    "Blackwell's own kernels (sm_100a, sm_103a). Nobody here has such a GPU: they are compiled, inspected and run in "
    "the model of tests/model, never on hardware, and they run for a user only where `python -m cute_kernels verify` "
    "has passed them (docs/bringing_up_a_new_gpu.md). Nothing below is a measurement."
)

BOUNDS = (
    f"Clocks of a tile on each resource if that one never waits, with NVIDIA's figures for a {B200.name}: "
    f"{B200.multiprocessors} multiprocessors at {B200.clock / 1e9:g} GHz, {B200.hbm / 1e12:g} TB/s of memory, "
    f"{B200.mma['bf16']} bf16 operations and {B200.smem} bytes of shared memory per clock and multiprocessor. The "
    "largest binds; nothing stands where rows come from L2, or threads have little to do. What these leave out "
    "(latencies, L2, the issue of gathered copies, launches) only adds to a time: they are bounds, not predictions."
)


def render(found: Compiled) -> list[str]:
    """Lines of the section."""
    versions = f"CuTe DSL {found.versions['dsl']}, CUDA toolkit {found.versions['toolkit']}."
    lines = [TITLE, "", *_wrap(f"{WHAT} Compiled by {versions}"), "", "### Code", "", *_code(found.kernels)]
    if found.work:
        lines += ["", "### The least time of a tile", "", *_wrap(BOUNDS), "", *_tiles(found.work)]
        lines += ["", "### The least time of a call", "", *_calls(found.work)]
    return lines


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _code(kernels: Sequence[Kernel]) -> list[str]:
    """One line per kernel and what is the same for several architectures."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for k in kernels:
        instructions = ", ".join(f"{count} {name}" for name, count in k.instructions.items())
        figures = (str(k.registers), str(k.spills), str(k.smem), str(k.tensor_columns), instructions)
        rows.setdefault((", ".join(k.ops), f"`{k.key}`", *figures), []).append(k.arch)
    header = (
        "op",
        "kernel",
        "for",
        "registers",
        "bytes spilled",
        "shared memory",
        "tensor columns",
        "in the PTX",
    )
    lines = [(op, key, ", ".join(archs), *figures) for (op, key, *figures), archs in rows.items()]
    return table(header, lines, (3, 4, 5, 6)) if lines else ["None."]


def _tiles(work: Sequence[Work]) -> list[str]:
    rows = []
    for w in work:
        found = bound(w)
        clocks = [f"{value:.0f}" if value else "" for value in (found.hbm, found.mma, found.smem, found.threads)]
        rows.append([w.op, w.kernel, w.tile, *clocks, found.binding, f"{tflops(w):.0f}"])
    header = ("op", "kernel", "tile", "memory", "tensor cores", "shared memory", "threads", "binds", "TFLOPS at best")
    return table(header, rows, (3, 4, 5, 6, 8))


def _calls(work: Sequence[Work]) -> list[str]:
    rows = []
    for w in work:
        for shape in w.shapes:
            moving = shape.bytes / B200.hbm * 1e6
            times = [f"{microseconds(w, shape):.1f}", f"{moving:.1f}"]
            rows.append([w.op, w.kernel, shape.name, f"{shape.tiles:.0f}", *times])
    return table(("op", "kernel", "case", "tiles", "at least µs", "its bytes alone µs"), rows, (3, 4, 5))
