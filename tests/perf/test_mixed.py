# SPDX-License-Identifier: Apache-2.0
"""The shapes that mixed attention is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from perf.measure import kind_of
from perf.mixed import FORMATS, GATHERED, OVER_BF16, PAGE_ROWS, REQUESTS, WINDOW
from perf.prefill import SHAPES


def test_shapes_can_be_cut() -> None:
    """kv into pages of both caches, query rows into requests."""
    for shape in SHAPES:
        assert shape.kv_rows // 4 % PAGE_ROWS == 0
        assert shape.rows % REQUESTS == 0
        assert shape.topk >= WINDOW


def test_the_other_sides_are_ours() -> None:
    assert {kind_of(GATHERED), kind_of(OVER_BF16)} == {"variant"}


def test_cases_of_both_formats_have_names_of_their_own() -> None:
    assert len(set(FORMATS.values())) == len(FORMATS) == 2
