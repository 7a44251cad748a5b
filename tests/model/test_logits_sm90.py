# SPDX-License-Identifier: Apache-2.0
"""The FP8 score kernels of Hopper, run by the model of the GPU as the op launches them, against float64."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import INDEXER_FP8
from cute_kernels.indexer.hopper.logits import LogitsKey
from tests.model.logits_calls import Scores
from tests.model.test_logits_sm100 import (
    Paged,
    check_contiguous,
    check_many_tiles,
    check_paged,
    check_pages,
    paged_call,
    program,
)

CONTIGUOUS = LogitsKey("sm_90a", 64, 4, False, 64)
PAGED = [LogitsKey("sm_90a", 64, rows, True, 64) for rows in range(1, 5)]


@pytest.mark.parametrize("width", [0, 70])
def test_contiguous(width: int) -> None:
    """Groups that are not full, ranges of all kinds, NaN in a key and in a query; every column is written once."""
    check_contiguous(CONTIGUOUS, width, 1, program(CONTIGUOUS))


@pytest.mark.parametrize("key", PAGED, ids=str)
def test_pages(key: LogitsKey) -> None:
    """Lengths that differ between rows, are none, negative, or longer than the table and the columns; pages that are
    not there."""
    check_pages(key, INDEXER_FP8, 64, key.rows % 2 == 0, key.rows)


def test_groups_that_are_not_full() -> None:
    """Two of five rows, three and two."""
    check_pages(LogitsKey("sm_90a", 64, 3, True, 64), INDEXER_FP8, 64, True, 9, next_n=5)


@pytest.mark.parametrize(("heads", "rows"), [(64, 4), (48, 2)])
def test_small_boxes(heads: int, rows: int) -> None:
    check_pages(LogitsKey("sm_90a", heads, rows, True, 8), INDEXER_FP8, 24, True, 3)


@pytest.mark.parametrize("key", PAGED, ids=str)
def test_many_tiles_in_one_block(key: LogitsKey) -> None:
    """All rings go round, with as many groups as have to be counted first; rows that see few keys are not scored. In
    other orders, too, nothing hangs, and nothing meets that has to be kept apart."""
    check_many_tiles(key, INDEXER_FP8)


def test_groups_of_one_tile() -> None:
    """Of four rows, for each warpgroup in a block: wherever in a round a tile is, it begins and ends a group. Queries
    go round three times."""
    key, rng = PAGED[3], np.random.default_rng(5)
    lens = np.full((12, 4), 128, np.int32) - np.arange(4, dtype=np.int32)
    paged = Paged.make(rng, INDEXER_FP8, 64, lens, 130)
    args, q, weights = paged_call(rng, paged, INDEXER_FP8, key.heads, 130, False)
    call = Scores.of("paged_mqa_logits", args, 1, key.arch)
    assert call.key == key
    got, written = call.run(program(key), seed=2)
    check_paged(got, written, paged, q, weights, False)
