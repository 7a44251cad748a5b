# SPDX-License-Identifier: Apache-2.0
"""The shapes that paged prefill is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

import pytest

from perf import paged
from perf.measure import kind_of
from perf.paged import GATHERED, PAGE_ROWS, PAGED, PEER, PORTABLE, SHAPES, TOPK, WHOLE, WINDOW
from perf.peers import PACKAGES


def test_each_row_sees_as_many_entries_as_it_picks() -> None:
    for shape in SHAPES:
        assert shape.rows + WINDOW <= shape.context
        if shape.ratio == 4:
            assert (shape.context - shape.rows) // shape.ratio >= TOPK


def test_columns_that_name_entries() -> None:
    assert [paged.Shape(64, 16500, 64, ratio).topk for ratio in (0, 4, 128)] == [0, TOPK, 128]


def test_contexts_fill_their_pages() -> None:
    for shape in SHAPES:
        assert shape.ratio == 0 or shape.context // shape.ratio % PAGE_ROWS[shape.ratio] == 0


def test_cases_have_names_of_their_own() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


def test_four_other_sides_are_ours() -> None:
    assert kind_of(GATHERED) == kind_of(PAGED) == kind_of(WHOLE) == kind_of(PORTABLE) == "variant"
    assert kind_of(PEER) == "peer"
    assert PEER in PACKAGES


def test_who_is_measured_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "load_peer", lambda name, load: "not here")
    for rows, is_few, is_cut in ((64, True, True), (65, True, False), (256, True, False), (257, False, False)):
        for heads, has_decode in ((64, True), (63, False)):
            theirs = {PEER} | {paged.DECODE_PEER for _ in range(is_few and has_decode)}
            ours = {GATHERED, PAGED, PORTABLE} | {WHOLE for _ in range(is_cut)}
            for peers in (False, True):
                for variants in (False, True):
                    want = (theirs if peers else set()) | (ours if variants else set())
                    assert set(paged._candidates(paged.Shape(rows, 4096, heads, 4), peers, variants)) == want
