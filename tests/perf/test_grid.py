# SPDX-License-Identifier: Apache-2.0
"""Shapes beside the tuned ones: the same in every run, and spread as they say."""

from __future__ import annotations

import importlib
import math
from operator import itemgetter
from types import SimpleNamespace

import pytest

from perf import cli, grid
from perf.bench import Bench, Case


def test_points_are_the_same_in_every_run_and_in_every_piece_of_their_range() -> None:
    points = grid.draw("something", 8, rows=(2, 250), columns=(1024, 65536, 64))
    assert points == grid.draw("something", 8, rows=(2, 250), columns=(1024, 65536, 64))
    assert points != grid.draw("something else", 8, rows=(2, 250), columns=(1024, 65536, 64))
    assert all(2 <= point["rows"] <= 250 and point["columns"] % 64 == 0 for point in points)
    pieces = sorted(int(8 * math.log(point["columns"] / 1024, 64)) for point in points)
    assert all(abs(piece - i) <= 1 for i, piece in enumerate(pieces)), "one in each, but for rounding to 64"


def test_points_are_in_their_range_where_its_ends_are_no_multiples() -> None:
    values = [point["rows"] for point in grid.draw("ends", 16, rows=(70, 330, 64))]
    assert set(values) == {128, 192, 256, 320}


def test_rows_between_are_none_of_the_tuned_ones() -> None:
    assert not set(grid.draw_rows("few", range(1, 9), 8)) & set(range(1, 9))
    assert all(rows % 64 == 0 for rows in grid.draw_rows("multiples", (64, 8192), 5, 64))
    found = grid.draw_rows("many", (1, 64, 8192), 6)
    assert len(found) == 6
    assert list(found) == sorted(found)
    assert 1 < found[0] < 64 < found[-1] < 8192


def benches_in(value: object) -> list[Bench]:
    if isinstance(value, tuple):
        return [bench for part in value for bench in benches_in(part)]
    return [value] if isinstance(value, Bench) else []


def test_every_sweep_has_cells_between_the_tuned_ones() -> None:
    for op, module in cli.MODULES.items():
        room = importlib.import_module(module)
        benches = [bench for value in vars(room).values() for bench in benches_in(value) if bench.op == op]
        if benches:
            tuned = {case.name for bench in benches for case in bench.cases}
            names = {case.name for bench in benches for case in bench.between}
            assert names, op
            assert all(name.endswith(" between") and name.removesuffix(" between") not in tuned for name in names), op
        else:
            assert any(name.startswith("BETWEEN") and value for name, value in vars(room).items()), op


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


def test_shapes_are_chosen_by_their_rows() -> None:
    shapes = [(1, 5), (2, 5), (1, 7)]
    assert grid.of_rows(shapes, None, itemgetter(0)) == shapes
    assert grid.of_rows(shapes, (1,), itemgetter(0)) == [(1, 5), (1, 7)]
    assert grid.of_rows(shapes, (2, 3), itemgetter(0)) == [(2, 5)]
    assert grid.of_rows(shapes, (), itemgetter(0)) == []
    assert grid.of_rows([SimpleNamespace(rows=4), SimpleNamespace(rows=5)], (5,)) == [SimpleNamespace(rows=5)]
