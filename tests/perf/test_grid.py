# SPDX-License-Identifier: Apache-2.0
"""Shapes beside the tuned ones: the same in every run, and spread as they say."""

from __future__ import annotations

import math

import pytest

from perf import grid
from perf.bench import Case


def test_points_are_the_same_in_every_run_and_in_every_piece_of_their_range() -> None:
    points = grid.draw("something", 8, rows=(2, 250), columns=(1024, 65536, 64))
    assert points == grid.draw("something", 8, rows=(2, 250), columns=(1024, 65536, 64))
    assert points != grid.draw("something else", 8, rows=(2, 250), columns=(1024, 65536, 64))
    assert all(2 <= point["rows"] <= 250 and point["columns"] % 64 == 0 for point in points)
    pieces = sorted(int(8 * math.log(point["columns"] / 1024, 64)) for point in points)
    assert all(abs(piece - i) <= 1 for i, piece in enumerate(pieces)), "one in each, but for rounding to 64"


def test_rows_between_are_none_of_the_tuned_ones() -> None:
    tuned = (1, 2, 3, 4, 5, 6, 7, 8)
    assert not set(grid.draw_rows("few", tuned, 8)) & set(tuned)
    found = grid.draw_rows("many", (1, 64, 8192), 6)
    assert len(found) == 6
    assert list(found) == sorted(found)
    assert 1 < found[0] < 64 < found[-1] < 8192


def test_cells_between_say_so() -> None:
    (marked,) = grid.mark([Case("T=3", 3, lambda seed: (), {"k": 4})])
    assert (marked.name, marked.shape) == ("T=3 between", {"k": 4, "group": "between"})
    facts = grid.facts_between({"case": "b3", "T": 3, "group": "another"})
    assert facts == {"case": "b3 between", "T": 3, "group": "between"}


@pytest.mark.parametrize("count", [1, 16, 48, 192])
def test_lengths(count: int) -> None:
    assert grid.lengths("", count, 1536) == [1536] * count
    for kind in grid.LENGTHS:
        found = grid.lengths(kind, count, 1536)
        assert found == grid.lengths(kind, count, 1536)
        assert len(found) == count
        assert all(0 <= length <= 1536 for length in found)
    assert sorted(grid.lengths(grid.ONE_LONG, count, 1536))[:-1] == [96] * (count - 1)
    assert max(grid.lengths(grid.ONE_LONG, count, 1536)) == 1536
    assert sorted(grid.lengths(grid.ZIPF, count, 1536), reverse=True) == [1536 // (i + 1) for i in range(count)]


def test_uniform_lengths_go_from_none_to_all() -> None:
    found = sorted(grid.lengths(grid.UNIFORM, 192, 1536))
    assert found[0] < 60
    assert found[-1] > 1476
    assert abs(sum(found) / 192 - 768) < 100


def test_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one of one-long, uniform, zipf, got 'normal'"):
        grid.lengths("normal", 4, 8)
