# SPDX-License-Identifier: Apache-2.0
"""The FP8 score kernels of Hopper, run by the model of the GPU as the op launches them, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import INDEXER_FP8
from cute_kernels.indexer.hopper.logits import LogitsKey
from tests.model.logits_calls import Scores
from tests.model.test_logits_sm100 import (
    Paged,
    Rows,
    assert_near,
    check_contiguous,
    check_many_tiles,
    check_paged,
    check_pages,
    paged_call,
    program,
    scores,
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


@pytest.mark.parametrize("first_is_nan", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_nan_and_large_weights_beside_good_rows(rows: int, first_is_nan: bool) -> None:
    """NaN of a query's head stays in its row and gets lost in none, also where the first keys are NaN; so does a weight
    that is NaN, and large ones are weights as any other."""
    key, rng, columns = PAGED[rows - 1], np.random.default_rng(rows), 300
    lens, last = np.full((5, rows), columns, np.int32), rows - 1
    paged = Paged.make(rng, INDEXER_FP8, 64, lens, columns)
    paged.table[paged.table == 8] = 7
    paged.table[0, 0] = 8  # of no other request
    args, q, weights = paged_call(rng, paged, INDEXER_FP8, key.heads, columns, False)
    q.codes[3, 0], q.codes[3, 0, :, 0] = 0, 1  # whose weights are large
    exact, size = scores(Rows(q.codes.reshape(5 * rows, key.heads, -1), q.scales, False), paged.keys, weights)
    q_codes, given = args["q"].view(torch.uint8), args["weights"]
    if first_is_nan:
        paged.pool.as_strided((len(paged.pool), 64 * 128), (paged.pool.stride(0), 1))[8] = 0x7F
    q_codes[0, 0, 4, 7], q_codes[1, last, 5, 0], q_codes[2, 0, 63, 127] = 0x7F, 0xFF, 0x7F
    large = 2.0**103
    given[3 * rows] *= large
    given[4 * rows, 10] = np.nan
    call = Scores.of("paged_mqa_logits", args, 1, key.arch)
    assert call.key == key
    got, written = call.run(program(key), seed=3)
    assert (written == 1).all()
    for row in range(5 * rows):
        request = row // rows
        places = np.array([paged.place(request, n) for n in range(columns)], np.int64)
        assert (places >= 0).all()
        is_bad = np.full(columns, row in (0, rows + last, 2 * rows, 4 * rows))
        is_bad[:64] |= first_is_nan and request == 0
        assert np.array_equal(np.isnan(got[row]), is_bad), row
        factor, good = large if row == 3 * rows else 1.0, ~is_bad
        want, bound = exact[row, places[good]], size[row, places[good]]
        assert_near(got[row, good].astype(np.float64) / factor, want, bound)


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
