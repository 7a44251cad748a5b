# SPDX-License-Identifier: Apache-2.0
"""The tables of a run: one row per op and implementation in order of first appearance; on a GPU what a step takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from cute_kernels.runtime.record import Call
from layer_runner.timing import StepTimes
from perf.layer import floor_us

CEILINGS: Mapping[str, Mapping[str, float]] = {"NVIDIA H200": {"copy": 4280.0, "e4m3": 1348.0}}
"""By device name, as torch.cuda.get_device_name gives it: GB/s and TFLOPS that the GPU was measured to reach."""

BAR_WIDTH = 16
"""Characters of a bar that is everything."""

LONGEST_NAME = 50
"""Characters of a kernel's name that a table shows."""


@dataclass
class Row:
    """All calls of one op by one implementation."""

    op: str
    implementation: str
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0

    def as_json(self, on_gpu: bool) -> dict[str, Any]:
        """The row as written by --json. On a GPU it has no time: an op's own, each waited for, do not add up to a
        layer's."""
        values: dict[str, Any] = {
            "op": self.op,
            "implementation": self.implementation,
            "calls": self.calls,
            "bytes": self.bytes,
            "flops": self.flops,
        }
        return values if on_gpu else values | {"seconds": self.seconds}


def summarize(calls: Sequence[Call]) -> list[Row]:
    """Rows in order of first appearance."""
    rows: dict[tuple[str, str], Row] = {}
    for call in calls:
        row = rows.setdefault((call.op, call.implementation), Row(call.op, call.implementation))
        row.calls += 1
        row.seconds += call.seconds
        row.bytes += call.cost.bytes
        row.flops += call.cost.flops
    return list(rows.values())


def format_bytes(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def render(rows: Sequence[Row], title: str, on_gpu: bool) -> Table:
    """A rich table of ops: their bytes, on a CPU their times, and their share of the times, on a GPU of the bytes."""
    table = _table(title, ["op", "by"], ["calls", *([] if on_gpu else ["ms"]), "bytes"])
    table.add_column("of bytes" if on_gpu else "of time", no_wrap=True)
    parts = [row.bytes if on_gpu else row.seconds for row in rows]
    for row, part in zip(rows, parts, strict=True):
        time = [] if on_gpu else [f"{row.seconds * 1e3:.2f}"]
        share = bar(part / (sum(parts) or 1))
        table.add_row(row.op, row.implementation, str(row.calls), *time, format_bytes(row.bytes), share)
    table.add_section()
    calls, total = sum(row.calls for row in rows), sum(row.bytes for row in rows)
    time = [] if on_gpu else [f"{sum(parts) * 1e3:.2f}"]
    table.add_row("all", "", str(calls), *time, format_bytes(total), "")
    return table


def render_exchanged(exchanged: Sequence[Sequence[Mapping[str, Any]]]) -> Table:
    """A line per rank and collective. Times are with what a rank waits for the others."""
    table = _table("collectives", ["rank", "collective", "over"], ["calls", "received", "ms", "us a call"])
    for rank, rows in enumerate(exchanged):
        for row in rows:
            ms, us = row["seconds"] * 1e3, row["seconds"] * 1e6 / row["calls"]
            numbers = str(row["calls"]), format_bytes(row["bytes"]), f"{ms:.2f}", f"{us:.1f}"
            table.add_row(str(rank), row["collective"], row["over"], *numbers)
    return table


def bar(share: float) -> str:
    """A share in percent and as a bar."""
    return f"{100 * share:3.0f}% " + "█" * round(BAR_WIDTH * share)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, header in enumerate(left):
        table.add_column(header, overflow="fold", no_wrap=number > 0)
    for header in right:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def share_of_floor(times: StepTimes, roofs: Mapping[str, float] | None) -> float | None:
    """The least time of the step's work over the time that it took; None for a GPU whose ceilings nobody knows."""
    return None if not roofs else floor_us(times.least, roofs, "e4m3") / times.us


def render_steps(steps: Sequence[StepTimes], roofs: Mapping[str, float] | None) -> Table:
    """A line per step: what a layer takes."""
    headers = ["graph us", "eager us", "host us", "launches", "gaps us", *(["% of floor"] if roofs else [])]
    table = _table("a step of the layer", ["step"], headers)
    for step in steps:
        share = share_of_floor(step, roofs)
        cells = ["" if step.graph_us is None else f"{step.graph_us:.1f}", f"{step.eager_us:.1f}", f"{step.host_us:.1f}"]
        cells += [str(len(step.timeline.launches)), f"{step.timeline.gaps:.1f}"]
        table.add_row(step.name, *cells, *([] if share is None else [f"{100 * share:.1f}"]))
    return table


def render_launches(times: StepTimes) -> Table:
    """A line per launch of a step, in order: how long it took, and what it added to those before it."""
    table = _table(f"launches: {times.name}", ["launch", "what"], ["from us", "us", "adds us"])
    table.add_column("of what is added", no_wrap=True)
    total = sum(times.timeline.added()) or 1.0
    first = times.timeline.launches[0].start if times.timeline.launches else 0.0
    for launch, added in zip(times.timeline.launches, times.timeline.added(), strict=True):
        name = launch.name if len(launch.name) <= LONGEST_NAME else launch.name[: LONGEST_NAME - 3] + "..."
        numbers = (f"{us:.2f}" for us in (launch.start - first, launch.us, added))
        table.add_row(escape(name), launch.kind, *numbers, bar(added / total))
    return table


def step_as_json(times: StepTimes, roofs: Mapping[str, float] | None) -> dict[str, Any]:
    """A step as written by --json, in microseconds."""
    added = times.timeline.added()
    return {
        "step": times.name,
        "graph_us": times.graph_us,
        "eager_us": times.eager_us,
        "host_us": times.host_us,
        "gaps_us": times.timeline.gaps,
        "least_bytes": times.least.bytes,
        "least_flops": times.least.flops,
        "of_floor": share_of_floor(times, roofs),
        "launches": [
            {"name": launch.name, "kind": launch.kind, "us": launch.us, "adds_us": adds}
            for launch, adds in zip(times.timeline.launches, added, strict=True)
        ],
    }
