# SPDX-License-Identifier: Apache-2.0
"""The shapes that mixed attention is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from perf import mixed
from perf.measure import kind_of
from perf.mixed import CONVERTED, DIRECT, FORMATS, GATHERED, OVER_BF16, PAGE_ROWS, REQUESTS, WINDOW
from perf.prefill import PORTABLE, SHAPES


def test_shapes_can_be_cut() -> None:
    """kv into pages of both caches, query rows into requests."""
    for shape in SHAPES:
        assert shape.kv_rows // 4 % PAGE_ROWS == 0
        assert shape.rows % REQUESTS == 0
        assert shape.topk >= WINDOW


def test_the_other_sides_are_ours() -> None:
    assert {kind_of(name) for name in (GATHERED, OVER_BF16, DIRECT, CONVERTED)} == {"variant"}


def test_cases_of_both_formats_have_names_of_their_own() -> None:
    assert len(set(FORMATS.values())) == len(FORMATS) == 2


def test_over_fp8_caches_the_same_over_bf16_ones_is_measured_too() -> None:
    assert set(mixed._variants(False, 64)) == {GATHERED, PORTABLE}
    assert set(mixed._variants(True, 32)) == {GATHERED, PORTABLE, OVER_BF16}
    assert set(mixed._variants(True, 64)) == {GATHERED, PORTABLE, OVER_BF16, DIRECT, CONVERTED}
    assert [bool(prefix) for prefix in FORMATS.values()] == [False, True]
