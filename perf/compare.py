# SPDX-License-Identifier: Apache-2.0
"""Two sets of records of the same ops: how our times changed from the first to the second.

The two were taken in different runs, so a ratio near 1 says nothing. The control is the mean change of the peers' times
in the same cell: where it moves as ours does, the machine changed and not the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.records import Cell, RecordError, files, load, usable

Key = tuple[str, str, str]
"""GPU, op, case."""


@dataclass(frozen=True)
class Change:
    """One cell in both. ratio: second over first, of our times. control: the same of the peers' times."""

    key: Key
    before: float
    after: float
    control: float | None

    @property
    def ratio(self) -> float:
        return self.after / self.before

    def regressed(self, threshold: float) -> bool:
        return self.ratio > 1 + threshold


@dataclass(frozen=True)
class Comparison:
    changes: tuple[Change, ...]
    only_before: tuple[Key, ...]
    only_after: tuple[Key, ...]
    rejected: tuple[str, ...]

    def regressions(self, threshold: float) -> list[Change]:
        """Cells whose time grew by more than the share `threshold`, worst first."""
        return sorted((c for c in self.changes if c.regressed(threshold)), key=lambda c: -c.ratio)


def compare(before: Path, after: Path) -> Comparison:
    """Compare two record files, or folders of them. RecordError if they cannot be read or share no cell."""
    first, bad_first = _cells(before)
    second, bad_second = _cells(after)
    common = [key for key in first if key in second]
    if not common:
        raise RecordError(f"{before} and {after} have no cell in common")
    return Comparison(
        tuple(Change(k, first[k].ours.us, second[k].ours.us, _control(first[k], second[k])) for k in common),
        tuple(key for key in first if key not in second),
        tuple(key for key in second if key not in first),
        (*bad_first, *bad_second),
    )


def _cells(path: Path) -> tuple[Mapping[Key, Cell], Sequence[str]]:
    if not path.exists():
        raise RecordError(f"{path}: no such file or folder")
    found: dict[Key, Cell] = {}
    rejected = []
    for file in files(path):
        record, bad = usable(load(file))
        rejected += [f"{file}: {line}" for line in bad]
        for cell in record.cells:
            key = record.gpu, cell.op, cell.case
            if key in found:
                raise RecordError(f"{file}: {' '.join(key)} stands in another file of {path} too")
            found[key] = cell
    return found, rejected


def _control(first: Cell, second: Cell) -> float | None:
    then = {row.name: row.us for row in first.of_kind("peer")}
    ratios = [row.us / then[row.name] for row in second.of_kind("peer") if row.name in then]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
