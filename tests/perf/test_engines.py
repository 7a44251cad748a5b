# SPDX-License-Identifier: Apache-2.0
"""Steps, block tables and caches that vLLM's own layers are given; without vLLM."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cute_kernels import formats
from perf import engine_layers, engines
from perf.engine_layers import Batch

MAX_LEN = 4096
SPECS = [
    SimpleNamespace(block_size=64, sliding_window=128),
    SimpleNamespace(block_size=256, sliding_window=None),
    SimpleNamespace(block_size=4, sliding_window=8),
    SimpleNamespace(block_size=8, sliding_window=128),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec.block_size))
@pytest.mark.parametrize("batch", [*engines.steps(0), *engines.steps(2)], ids=lambda batch: batch.name)
def test_block_tables_name_every_page_that_a_step_touches(batch: Batch, spec: SimpleNamespace) -> None:
    table = engine_layers.block_table(batch, spec, MAX_LEN)
    assert table.shape == (len(batch.requests) + batch.padding, MAX_LEN // spec.block_size)
    for pages, (rows, before) in zip(table, batch.requests, strict=False):
        first = max(before - (spec.sliding_window or before), 0)
        assert (pages[first // spec.block_size : (before + rows - 1) // spec.block_size + 1] > 0).all()
        assert not pages[(before + rows - 1) // spec.block_size + 1 :].any()
    used = table[table > 0]
    assert used.unique().numel() == used.numel() == engine_layers.page_count(batch, spec)
    assert used.max() == used.numel()
    assert not table[len(batch.requests) :].any()


def test_padding_has_rows_like_the_first_request() -> None:
    batch = Batch("", ((3, 10), (3, 20)), padding=2)
    assert (batch.live, batch.rows, batch.longest) == (6, 12, 23)


def test_pages_hold_valid_records() -> None:
    for fmt, rows in ((formats.FP8_DS_MLA, 64), (formats.FP8_DS_MLA, 2), (formats.INDEXER_FP8, 64)):
        cache = fmt.allocate(5, rows, torch.device("cpu"))
        flat = cache.as_strided((5, rows * fmt.row_elements), (cache.stride(0), 1))
        engine_layers.fill_pages(flat, rows, fmt.row_elements, 0)
        values = fmt.read(cache, rows, torch.arange(5 * rows))
        assert values.isfinite().all()
        assert 0.05 < values.std() < 5
    states = torch.zeros(3, 4 * 16)
    engine_layers.fill_pages(states, 4, 16, 0)
    assert states.std() > 0.5


def test_what_differs_is_measured() -> None:
    one = torch.tensor([3.0, 4.0])
    assert engines.distance(one, one) == 0
    assert engines.distance(one + torch.tensor([0.0, 0.5]), one) == pytest.approx(0.1)
    assert engines.distance(one * torch.nan, one) == float("inf")
    picks = torch.tensor([[0, 1, 2, -1], [5, 4, -1, -1]])
    assert engines.picks_apart(picks.flip(1), picks) == 0
    assert engines.picks_apart(torch.tensor([[0, 1, 7, -1], [5, 4, -1, -1]]), picks) == pytest.approx(0.2)
    assert engines.picks_apart(torch.full_like(picks, -1), picks) == 1


def test_layers_in_a_row_are_held_to_what_the_engine_does_by_itself() -> None:
    away = "theirs, same picks, input one bf16 step away"
    apart = {"theirs again": 0.19, "theirs, same picks": 0.0, away: 0.11, "ours": 0.18, "ours, same picks": 0.1}
    assert engines.chain_faults(apart) == []
    assert engines.chain_faults(apart | {"theirs, same picks": 0.01}) == [
        "the engine differs from itself with the same picks"
    ]
    assert engines.chain_faults(apart | {"ours, same picks": 0.17}) == ["ours with the same picks"]
    assert engines.chain_faults(apart | {"ours": 0.3}) == ["ours"]
    assert len(engines.chain_faults(dict.fromkeys(apart, float("nan")))) == 3


def test_picks_of_an_earlier_step_take_the_place_of_the_indexers() -> None:
    op = torch.nn.Identity()
    layer = SimpleNamespace(indexer=SimpleNamespace(indexer_op=op), topk_indices_buffer=torch.full((4, 2), -1))
    with engines._given_picks(layer, torch.tensor([[5, 6], [7, 8]])):
        op(torch.zeros(1))
    assert layer.topk_indices_buffer.tolist() == [[5, 6], [7, 8], [-1, -1], [-1, -1]]
    assert op(3) == 3
    with engines._given_picks(SimpleNamespace(indexer=None), torch.zeros(1)):
        pass


def test_names_tell_cells_and_units_apart() -> None:
    names = [case.name(part) for case in engines.cases() for part in engines.PARTS]
    assert len(set(names)) == len(names) == 120
    assert len(list(itertools.groupby(case.layers for case in engines.cases()))) == 15, "layers are made once"
    between = [(case.kind, case.new > 0) for case in engines.cases_between()]
    assert between == list(itertools.product(engines.KINDS, (False, True)))
    assert [name.endswith(" between") for name in names].count(True) == 12
    drawn = next(engines.cases_between())
    assert (drawn.group("whole"), replace(drawn, is_between=False).group("whole")) == ("between whole", "whole")
    for case in engines.cases():
        assert (case.step.rows, len(case.step.requests)) == ((case.new, 1) if case.new else (case.batch, case.batch))
        assert case.step.longest <= case.layers[2]
    units = [engines.unit_name(*unit) for unit in engines.UNITS]
    assert len(set(units)) == len(units)


def test_products_of_a_rank() -> None:
    assert len(engines.products_of("swa", 8, 1)) == 4
    whole, part = engines.products_of("c4a", 8, 1), engines.products_of("c4a", 8, 8)
    assert (whole[1].outputs, part[1].outputs, whole[2].groups, part[2].groups) == (32768, 4096, 8, 1)
