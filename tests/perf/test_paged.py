# SPDX-License-Identifier: Apache-2.0
"""The shapes that paged prefill is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from perf.measure import kind_of
from perf.paged import GATHERED, PAGE_ROWS, PEER, PORTABLE, SHAPES, TOPK, WHOLE, WINDOW
from perf.peers import PACKAGES


def test_each_row_sees_as_many_entries_as_it_picks() -> None:
    for shape in SHAPES:
        assert shape.rows + WINDOW <= shape.context
        if shape.ratio == 4:
            assert (shape.context - shape.rows) // shape.ratio >= TOPK


def test_contexts_fill_their_pages() -> None:
    for shape in SHAPES:
        assert shape.ratio == 0 or shape.context // shape.ratio % PAGE_ROWS[shape.ratio] == 0


def test_cases_have_names_of_their_own() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


def test_three_other_sides_are_ours() -> None:
    assert kind_of(GATHERED) == kind_of(WHOLE) == kind_of(PORTABLE) == "variant"
    assert kind_of(PEER) == "peer"
    assert PEER in PACKAGES
