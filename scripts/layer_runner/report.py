"""The table of what ran: one row per op and implementation, in order of first appearance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from cute_kernels.runtime.record import Call


@dataclass(frozen=True)
class Ceiling:
    """What a GPU was measured to reach: bytes per second from memory, bf16 FLOPs per second."""

    bytes_per_second: float
    flops_per_second: float


CEILINGS = {"NVIDIA H200": Ceiling(4.28e12, 790e12)}
"""By device name, as torch.cuda.get_device_name gives it."""


@dataclass
class Row:
    """All calls of one op by one implementation."""

    op: str
    implementation: str
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    flops: int = 0

    def of_ceiling(self, ceiling: Ceiling | None) -> float | None:
        """The larger of the fractions of the memory and of the arithmetic ceiling; None when nothing is known."""
        if ceiling is None or self.seconds <= 0 or not (self.bytes or self.flops):
            return None
        return max(self.bytes / ceiling.bytes_per_second, self.flops / ceiling.flops_per_second) / self.seconds

    def as_json(self, ceiling: Ceiling | None, on_gpu: bool) -> dict[str, Any]:
        """The row as written by --json."""
        values: dict[str, Any] = {
            "op": self.op,
            "implementation": self.implementation,
            "calls": self.calls,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "flops": self.flops,
        }
        if on_gpu and self.seconds > 0:
            values["gb_per_second"] = self.bytes / self.seconds * 1e-9
            values["tflops"] = self.flops / self.seconds * 1e-12
            values["of_ceiling"] = self.of_ceiling(ceiling)
        return values


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


def _bytes(count: int) -> str:
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def render(rows: Sequence[Row], title: str, ceiling: Ceiling | None, on_gpu: bool) -> Table:
    """A rich table; the speed columns appear for GPUs, the last one only for a GPU with known ceilings."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("op", overflow="fold")
    table.add_column("by", no_wrap=True)
    headers = ["calls", "ms", "bytes"]
    if on_gpu:
        headers += ["GB/s", "TFLOPS"]
    if on_gpu and ceiling is not None:
        headers.append("% of ceiling")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        cells = [row.op, row.implementation, str(row.calls), f"{row.seconds * 1e3:.2f}", _bytes(row.bytes)]
        if on_gpu:
            seconds = row.seconds or float("inf")
            cells += [f"{row.bytes / seconds * 1e-9:.0f}", f"{row.flops / seconds * 1e-12:.1f}"]
        if on_gpu and ceiling is not None:
            fraction = row.of_ceiling(ceiling)
            cells.append("" if fraction is None else f"{fraction * 100:.1f}")
        table.add_row(*cells)
    return table
