# SPDX-License-Identifier: Apache-2.0
"""Picks of several ranks: the best of their best keys are the best of all entries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_kernels.indexer.ops import merge_top_k_keys, top_k_keys, top_k_per_row_decode
from cute_kernels.indexer.reference import score_keys
from tests.helpers import check_op

EMPTY = -(2**63)
PAGE_ROWS = 4
VALUES = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 3.0e38, 0.5]


def key_of(score: float, entry: int) -> int:
    """By the definition, from the bytes of the score."""
    bits = int(torch.tensor(score).view(torch.int32))
    bits = 0 if score == 0 else bits
    order = bits if bits >= 0 else -(2**31) + (2**31 - 1 - (bits + 2**31))
    order = -(2**31) if math.isnan(score) else order
    return order * 2**32 + (2**32 - 1 - entry)


def local_keys(scores: torch.Tensor, ranks: int, k: int, g: torch.Generator) -> torch.Tensor:
    """Of each rank the k best of its own pages' entries, in random order, empty where it has fewer."""
    rows, entries = scores.shape
    keys = torch.full((ranks, rows, k), 77)
    for rank in range(ranks):
        own = torch.tensor([e for e in range(entries) if e // PAGE_ROWS % ranks == rank], dtype=torch.int64)
        mine, picks = scores[:, own], torch.empty(rows, k, dtype=torch.int32)
        lengths = torch.full((rows, 1), len(own), dtype=torch.int32)
        top_k_per_row_decode(mine, 1, lengths, picks, rows, mine.stride(0), 1, k)
        top_k_keys(mine, picks, entries_per_page=PAGE_ROWS, ranks=ranks, rank=rank, out=keys[rank])
        keys[rank] = keys[rank][:, torch.randperm(k, generator=g)]
    return keys


def test_keys_follow_their_definition() -> None:
    entries = torch.arange(len(VALUES)) + 2**24
    keys = score_keys(torch.tensor(VALUES), entries)
    assert keys.tolist() == [key_of(score, entry) for score, entry in zip(VALUES, entries.tolist(), strict=True)]
    assert (keys > EMPTY).all()


def test_keys_of_picks() -> None:
    """Picks that are no columns are empty, as are entries that int32 cannot name."""
    scores = torch.tensor([VALUES, VALUES[::-1]])
    picks = torch.tensor([[3, 0, 7, -1, 4], [11, 12, 5, 5, -(2**31)]], dtype=torch.int32)
    got = top_k_keys(scores, picks, entries_per_page=4, ranks=3, rank=2)
    entry = {0: 8, 3: 11, 4: 20, 5: 21, 7: 23, 11: 35}
    for row, (values, chosen) in enumerate(((VALUES, [3, 0, 7, None, 4]), (VALUES[::-1], [11, None, 5, 5, None]))):
        assert got[row].tolist() == [EMPTY if x is None else key_of(values[x], entry[x]) for x in chosen]
    far = top_k_keys(scores, picks, entries_per_page=2**30, ranks=2, rank=1)
    assert far[0].tolist() == [key_of(VALUES[x], 2**30 + x) if x >= 0 else EMPTY for x in picks[0].tolist()]
    assert (top_k_keys(scores, picks, entries_per_page=2**30, ranks=3, rank=2) == EMPTY).all()
    assert (top_k_keys(scores[:, :0], picks) == EMPTY).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16, 64])
@pytest.mark.parametrize("kind", ["normal", "levels", "special"])
def test_as_picked_from_all_scores(ranks: int, kind: str) -> None:
    """Ties across ranks, more ranks than pages, ranks without entries, fewer entries than picks."""
    g = torch.Generator().manual_seed(ranks)
    for entries, k in ((3, 5), (57, 7), (130, 64), (40, 40)):
        scores = torch.randn(3, entries, generator=g)
        if kind == "levels":
            scores = torch.randint(0, 3, scores.shape, generator=g).float()
        elif kind == "special":
            scores = torch.tensor(VALUES)[torch.randint(0, len(VALUES), scores.shape, generator=g)]
        lengths = torch.full((3, 1), entries, dtype=torch.int32)
        want = torch.empty(3, k, dtype=torch.int32)
        top_k_per_row_decode(scores, 1, lengths, want, 3, scores.stride(0), 1, k)
        keys = local_keys(scores, ranks, k, g)
        got = merge_top_k_keys(keys)
        assert torch.equal(got, want)
        assert torch.equal(merge_top_k_keys(keys[torch.randperm(ranks, generator=g)]), want)
        # in two levels
        halves = [merge_top_k_keys(part) for part in (keys[: ranks // 2], keys[ranks // 2 :]) if len(part)]
        known = [
            score_keys(scores.gather(1, picks.clamp(min=0).long()), picks).masked_fill(picks < 0, EMPTY)
            for picks in halves
        ]
        assert torch.equal(merge_top_k_keys(torch.stack(known)), want)
        check_slots(keys, want, ranks)


def check_slots(keys: torch.Tensor, picks: torch.Tensor, ranks: int) -> None:
    """Slots of all ranks together are those of the picks in the whole table, each in the order of entries."""
    rows, k = picks.shape
    pages = -(-130 // PAGE_ROWS)
    whole = torch.randperm(rows * pages).view(rows, pages).int()
    found: list[list[int]] = [[] for _ in range(rows)]
    for rank in range(ranks):
        table = whole[:, rank::ranks].contiguous()
        slots, lens = merge_top_k_keys(keys, block_table=table, rows_per_page=PAGE_ROWS, ranks=ranks, rank=rank)
        for row in range(rows):
            own = [e for e in picks[row].tolist() if e >= 0 and e // PAGE_ROWS % ranks == rank]
            want = [int(whole[row, e // PAGE_ROWS]) * PAGE_ROWS + e % PAGE_ROWS for e in own]
            assert slots[row].tolist() == want + [-1] * (k - len(want))
            assert lens[row] == len(want)
            found[row] += own
    assert [sorted(own) for own in found] == [[e for e in row if e >= 0] for row in picks.tolist()]


def test_slots_without_a_page_are_left_out() -> None:
    keys = score_keys(torch.ones(1, 8), torch.arange(8)[None])[None]
    table = torch.tensor([[5, -1, 2**30, 7]], dtype=torch.int32)
    slots, lens = merge_top_k_keys(keys, block_table=table, rows_per_page=2)
    assert slots.tolist() == [[10, 11, 14, 15, -1, -1, -1, -1]]
    assert lens.tolist() == [4]
    slots, lens = merge_top_k_keys(keys, block_table=table[:, :1], rows_per_page=2)
    assert slots.tolist() == [[10, 11, *[-1] * 6]]
    assert lens.tolist() == [2]


def test_bad_keys_are_harmless() -> None:
    """Entries that int32 cannot name count as empty; a key that comes twice is picked twice."""
    keys = score_keys(torch.tensor([[3.0, 2.0, 1.0, 1.0]]), torch.tensor([[2**31, 7, 2**31 - 1, 2**32 - 1]]))[None]
    assert merge_top_k_keys(keys).tolist() == [[7, 2**31 - 1, -1, -1]]
    assert merge_top_k_keys(keys[:, :, :2].repeat(2, 1, 1)).tolist() == [[7, 7]]


def test_strides_and_what_is_not_asked_for() -> None:
    memory = torch.full((3, 2, 5, 11), 2**62)
    keys = memory[:, 1, 1:4, 2:9].copy_(torch.full((3, 3, 7), EMPTY))
    keys[1, 2, 3] = key_of(0.5, 70)
    out = torch.full((4, 9), -77, dtype=torch.int32)
    assert merge_top_k_keys(keys, out=out[:3, 1:8]).data_ptr() == out[:, 1:].data_ptr()
    assert out.tolist() == [*[[-77, *[-1] * 7, -77]] * 2, [-77, 70, *[-1] * 6, -77], [-77] * 9]
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    lens = torch.empty(3, dtype=torch.int32)
    slots, got = merge_top_k_keys(
        keys, out=out[1:, :7], block_table=table, rows_per_page=4, ranks=2, rank=1, out_lens=lens
    )
    assert out[3].tolist() == [70, *[-1] * 6, -77, -77]
    assert got is lens
    assert lens.tolist() == [0, 0, 1]
    assert slots[2].tolist() == [28 * 4 + 2, *[-1] * 6]


def test_op_check() -> None:
    keys = torch.randint(-(2**62), 2**62, (3, 4, 5))
    out, lens = torch.empty(4, 5, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    picks = torch.randint(-1, 9, (4, 5), dtype=torch.int32)
    check_op("top_k_keys", torch.randn(4, 9), picks, 4, 2, 1, keys[0])
    check_op("merge_top_k_keys", keys, out, None, 0, 1, 0, None, None)
    check_op("merge_top_k_keys", keys, None, torch.zeros(2, 9, dtype=torch.int32), 64, 3, 1, out, lens)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": torch.zeros(2, 4, dtype=torch.int64)}, "keys: expected"),
        ({"keys": torch.zeros(0, 4, 6, dtype=torch.int64)}, "keys: expected at least one part"),
        ({"out": torch.zeros(4, 7, dtype=torch.int32)}, "out: expected"),
        ({"out_lens": torch.zeros(4, dtype=torch.int32)}, "out_lens: expected None without block_table"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, "divides 4 rows, got 3"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "rows_per_page: expected 1 to"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32), "rows_per_page": 4, "rank": 1}, "rank: expected 0 to"),
        (
            {"block_table": torch.zeros(2, 1, dtype=torch.int32), "rows_per_page": 4, "ranks": 0},
            "ranks: expected a pos",
        ),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"merge_top_k_keys: .*{message}"):
        merge_top_k_keys(**{"keys": torch.zeros(2, 4, 6, dtype=torch.int64), **changed})
