# SPDX-License-Identifier: Apache-2.0
"""Candidate blocks of V4.1: against a sort, and scores and picks among them against those of all keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer.ops import (
    score_top_k_decode,
    score_top_k_prefill,
    select_candidate_blocks,
)
from cute_kernels.indexer.verify_cases import candidates_of
from cute_kernels.runtime.ops import OPS
from tests.indexer.meaning import INT, Case, paged, top_k

FORMATS = (formats.INDEXER_FP8, formats.INDEXER_MXFP4)
LARGEST = float(np.finfo(np.float32).max)


def ids(fmt: Any) -> str:
    return str(fmt.id)


def selected(row: list[float], blocks: int) -> list[int]:
    """The candidate blocks of the scores that a row sees."""
    maxima = []
    for first in range(0, len(row), 8):
        numbers = [min(x, LARGEST) for x in row[first : first + 8] if x == x]
        maxima.append(max(numbers, default=float("nan")))
    if maxima:
        maxima[-1] = float("inf")
    found = sorted(top_k(maxima, min(blocks, len(maxima))))
    return [*found, *[-1] * (blocks - len(found))]


@pytest.mark.parametrize("blocks", [1, 5, 16, 64])
def test_blocks(blocks: int) -> None:
    columns = 130
    g = torch.Generator().manual_seed(blocks)
    scores = torch.randn(9, columns + 3, generator=g)[:, 1:-2]
    scores[1] = torch.randint(-1, 2, (columns,), generator=g).float()
    scores[2] = torch.nan
    scores[3, ::3] = torch.nan
    scores[3, 16:40] = torch.nan
    scores[4] = torch.inf
    scores[5, 8:100] = -torch.inf
    scores[6] = torch.tensor([-0.0, 0.0]).repeat(columns // 2)
    scores[7, 3] = torch.inf
    scores[7, 30] = LARGEST
    lens = torch.tensor([130, 129, 130, 121, 128, 1000, 8, -3, 0], dtype=INT).view(3, 3)
    got = select_candidate_blocks(scores, lens, blocks)
    for row, length in enumerate(lens.reshape(-1).tolist()):
        assert got[row].tolist() == selected(scores[row, : max(length, 0)].tolist(), blocks), row


def restricted(scores: np.ndarray, candidates: list[int], k: int) -> list[int]:
    """The k best of the scores that a row sees, in candidate blocks."""
    keys = [key for key in range(len(scores)) if key // 8 in candidates]
    found = sorted(keys[i] for i in top_k([float(scores[key]) for key in keys], min(k, len(keys))))
    return [*found, *[-1] * (k - len(found))]


@pytest.mark.parametrize("next_n", [1, 6])
@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_decode(fmt: Any, next_n: int) -> None:
    lengths, blocks, columns = [70, 0, 9, 130, 21], 5, 120
    case = Case(fmt.id, next_n * len(lengths), 4, sum(lengths))
    pool, table = paged(case, fmt, lengths, 16)
    lens = torch.tensor([[length - j for j in range(next_n)] for length in lengths], dtype=INT)
    candidates = candidates_of(torch.Generator().manual_seed(1), lens.clamp(max=columns), blocks)
    first = np.cumsum([0, *lengths])
    query = case.query(slice(None), len(lengths), next_n)
    args = query, pool, case.w(), lens, table, columns
    for k in (3, 16, 100):
        got = score_top_k_decode(*args, k, kv_format=fmt.id, candidates=candidates)
        for row in range(next_n * len(lengths)):
            b, j = divmod(row, next_n)
            count = min(max(int(lens[b, j]), 0), columns)
            scores = case.scores[row, first[b] : first[b] + count]
            assert got[row].tolist() == restricted(scores, candidates[row].tolist(), k), (k, row)


@pytest.mark.parametrize("width", [0, 80])
@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_prefill(fmt: Any, width: int) -> None:
    rows, keys, blocks, k = 11, 150, 5, 12
    case = Case(fmt.id, rows, 4, keys)
    start = torch.arange(rows, dtype=INT) * 9
    end = start + torch.arange(rows, dtype=INT).flip(0) * 16 - 5
    lengths = end.clamp(max=keys) - start
    lengths = lengths.clamp(max=width) if width else lengths
    candidates = candidates_of(torch.Generator().manual_seed(2), lengths, blocks)
    got = score_top_k_prefill(
        case.query(), case.kv(), case.w(), start, end, k, max_seqlen_k=width, candidates=candidates
    )
    for row in range(rows):
        first = int(start[row])
        scores = case.scores[row, first : first + max(int(lengths[row]), 0)]
        assert got[row].tolist() == restricted(scores, candidates[row].tolist(), k), row


def test_all_blocks_as_candidates_change_nothing() -> None:
    case = Case("indexer_fp8/1", 3, 4, 200)
    pool, table = paged(case, formats.INDEXER_FP8, [100, 60, 40], 8)
    lens = torch.tensor([[100], [60], [40]], dtype=INT)
    args = case.query(slice(None), 3, 1), pool, case.w(), lens, table, 100, 16
    candidates = select_candidate_blocks(torch.zeros(3, 100), lens, 13)
    assert torch.equal(score_top_k_decode(*args, candidates=candidates), score_top_k_decode(*args))


def test_bad_candidates_are_refused_or_harmless() -> None:
    case = Case("indexer_fp8/1", 2, 4, 100)
    pool, table = paged(case, formats.INDEXER_FP8, [60, 40], 8)
    lens = torch.tensor([[60], [40]], dtype=INT)
    args = case.query(slice(None), 2, 1), pool, case.w(), lens, table, 100, 9
    bad = torch.tensor([[-1, 2**28, 2**31 - 1], [3, 2, -5]], dtype=INT)
    picks = score_top_k_decode(*args, candidates=bad)
    assert picks.shape == (2, 9)
    for wrong in (bad[:1], bad[:, :0], bad.long()):
        with pytest.raises((ValueError, TypeError), match="score_top_k_decode: candidates: expected"):
            score_top_k_decode(*args, candidates=wrong)
    with pytest.raises(ValueError, match="slot_block_table: expected None with candidates"):
        score_top_k_decode(*args, candidates=bad, slot_block_table=table, slot_rows_per_page=8)
    op = OPS["score_candidates_decode"]
    assert op.validate is not None
    given = case.query(slice(None), 2, 1), None, pool, case.w(), lens, table
    rest = 100, "indexer_fp8/1", picks, torch.empty(2 * 256)
    op.validate(*given, candidates_of(torch.Generator().manual_seed(3), lens, 3), *rest)
    for blocks in ([[0, 1, 2], [0, 1, 4]], [[1, 0, 7], [0, 1, 4]], [[0, 5, 7], [0, 4, -1]]):
        with pytest.raises(ValueError, match=r"candidates\[\d, \d\]: expected blocks of"):
            op.validate(*given, torch.tensor(blocks, dtype=INT), *rest)
