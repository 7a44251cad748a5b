# SPDX-License-Identifier: Apache-2.0
"""Shapes beside those that kernels are tuned for: sizes between them, and requests of unequal lengths."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from perf.bench import Case

T = TypeVar("T")

SEED = 4
BETWEEN = "between"
"""What the names of cells between the tuned ones end with, and the group that the report sums them up in."""

ONE_LONG, UNIFORM, ZIPF = "one-long", "uniform", "zipf"
LENGTHS = (ONE_LONG, UNIFORM, ZIPF)
"""Kinds of unequal lengths, and what the names of their cells end with."""

SHORT = 16
"""Where one length is the longest, the others are this part of it."""


def draw(what: str, count: int, **ranges: tuple[int, int] | tuple[int, int, int]) -> list[dict[str, int]]:
    """`count` points, always the same for the same `what`: of each name a number of its range (least, most), or a
    multiple of the third number. All magnitudes alike: the range's logarithm is cut into `count` pieces, and each has a
    point (a Latin hypercube)."""
    numbers = random.Random(f"{SEED} {what}")
    columns = {}
    for name, (least, most, *multiple) in ranges.items():
        step, ratio = multiple[0] if multiple else 1, most / least
        values = [least * ratio ** ((piece + numbers.random()) / count) for piece in range(count)]
        numbers.shuffle(values)
        columns[name] = [min(max(round(value / step), -(-least // step)), most // step) * step for value in values]
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def draw_rows(what: str, tuned: Iterable[int], count: int = 3, multiple: int = 1) -> tuple[int, ...]:
    """Different numbers of rows between the least and the most of `tuned`, in order."""
    known = set(tuned)
    rows = {point["rows"] for point in draw(what, count, rows=(min(known), max(known), multiple))}
    return tuple(sorted(rows - known))


def of_rows(
    shapes: Iterable[T], rows: Sequence[int] | None, rows_of: Callable[[T], int] = attrgetter("rows")
) -> list[T]:
    """The shapes with so many rows, or all."""
    return [shape for shape in shapes if rows is None or rows_of(shape) in rows]


def facts_between(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says of a cell between the tuned ones."""
    return {**facts, "case": f"{facts['case']} {BETWEEN}", "group": BETWEEN}


def mark(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The same cases as cells between the tuned ones."""
    return tuple(replace(c, name=f"{c.name} {BETWEEN}", shape={**c.shape, "group": BETWEEN}) for c in cases)


def lengths(kind: str, count: int, most: int) -> list[int]:
    """Lengths of `count` requests, `most` at most, the same for every call: all alike (""), one among short ones,
    spread over 0 to `most`, or falling with the rank (Zipf)."""
    numbers = random.Random(f"{SEED} {kind} {count}")
    if not kind:
        return [most] * count
    if kind == ONE_LONG:
        found = [max(1, most // SHORT)] * count
        found[numbers.randrange(count)] = most
    elif kind == UNIFORM:
        found = [numbers.randint(0, most) for _ in range(count)]
    elif kind == ZIPF:
        found = [max(1, most // rank) for rank in range(1, count + 1)]
        numbers.shuffle(found)
    else:
        raise ValueError(f"lengths: kind: expected one of {', '.join(LENGTHS)}, got {kind!r}")
    return found
