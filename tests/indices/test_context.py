# SPDX-License-Identifier: Apache-2.0
"""The owner rule of context groups, against a walk over all tokens; and what ops make of a rank's block table."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.compressor.ops import get_compressed_slot_mapping
from cute_kernels.indexer.ops import merge_top_k_keys
from cute_kernels.indexer.reference import score_keys
from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from cute_kernels.paging import context_local_lens, expand_block_table, own_entries, whole_entries

RANKS = (1, 2, 3, 4, 7, 8, 16, 64)
TOKENS = 256
"""Of a page, as the owner rule says it."""


def owned(entries: int, ratio: int, ranks: int, rank: int) -> list[int]:
    """Entries that lie in the rank's pages: an entry is where its tokens are."""
    return [e for e in range(entries) if e * ratio // TOKENS % ranks == rank]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("ratio", [4, 128, 256])
def test_own_entries_are_dense_and_in_order(ratio: int, ranks: int) -> None:
    page = TOKENS // ratio
    entries = 2 * ranks * page + page + 1
    shares = []
    for rank in range(ranks):
        own = owned(entries, ratio, ranks, rank)
        numbers = own_entries(torch.arange(-1, entries), page, ranks, rank)
        assert numbers[0] == -1
        assert [e for e, number in enumerate(numbers[1:].tolist()) if number >= 0] == own
        assert numbers[numbers >= 0].tolist() == list(range(len(own)))
        # back from a rank's number to the request's entry
        assert whole_entries(torch.arange(-1, len(own)), page, ranks, rank).tolist() == [-1, *own]
        shares.append(len(own))
    assert sum(shares) == entries


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("ratio", [4, 128])
def test_local_lens_count_own_entries(ratio: int, ranks: int) -> None:
    page = TOKENS // ratio
    lens = [-5, 0, 1, page - 1, page, page + 1, ranks * page - 1, ranks * page, 2 * ranks * page + page + 1]
    lens += torch.randint(0, 3 * ranks * page, (11,), generator=torch.Generator().manual_seed(ranks)).tolist()
    tensor = torch.tensor(lens, dtype=torch.int32).view(4, 5)
    for rank in range(ranks):
        got = context_local_lens(tensor, ratio, ranks, rank)
        assert got.dtype == torch.int32
        assert got.flatten().tolist() == [len(owned(n, ratio, ranks, rank)) for n in lens]


@pytest.mark.parametrize("ranks", RANKS)
def test_tables_of_all_ranks_are_the_whole_table(ranks: int) -> None:
    whole = torch.randint(0, 2**31 - 1, (3, 19), dtype=torch.int32)
    found = torch.full_like(whole, -1)
    for rank in range(ranks):
        local = whole[:, rank::ranks]
        table = expand_block_table(local, ranks, rank, 19)
        assert ((table == whole) | (table == -1)).all()
        assert (table >= 0).sum() == local.numel()
        found = torch.maximum(found, table)
        assert torch.equal(expand_block_table(local, ranks, rank, 7), table[:, :7])
        assert (expand_block_table(local, ranks, rank, 90)[:, local.shape[1] * ranks :] == -1).all()
    assert torch.equal(found, whole)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ops_with_a_ranks_table_see_its_own_entries(ranks: int) -> None:
    """Only own entries are stored, and picks become the slots that the merge of keys gives: of one rule."""
    page, requests, k = TOKENS // 4, 2, 64
    pages = 2 * ranks + 1
    tokens = pages * TOKENS
    whole = torch.randperm(requests * pages).view(requests, pages).int()
    entries = torch.stack([torch.randperm(pages * page)[:k] for _ in range(requests)])
    picks = entries.sort(dim=1).values.int()
    rows, valid = torch.arange(requests, dtype=torch.int32), torch.ones(requests, dtype=torch.bool)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    for rank in range(ranks):
        local = whole[:, rank::ranks].contiguous()
        table = expand_block_table(local, ranks, rank, pages)
        stored = get_compressed_slot_mapping(
            tokens, starts, torch.tensor([tokens], dtype=torch.int32), table[:1], TOKENS, 4
        )
        assert (stored >= 0).sum() == context_local_lens(torch.tensor([pages * page]), 4, ranks, rank)

        slots, lens = compute_global_topk_indices_and_lens(picks, rows, table, page, valid)
        own, own_lens = merge_top_k_keys(
            score_keys(torch.randn(requests, k), entries)[None],
            block_table=local,
            rows_per_page=page,
            ranks=ranks,
            rank=rank,
        )
        assert torch.equal(own, slots)
        assert torch.equal(own_lens, lens)


def test_refused() -> None:
    lens, table = torch.tensor([3], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    for ranks, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(ValueError, match="context_local_lens: rank: expected one of the context group's"):
            context_local_lens(lens, 4, ranks, rank)
        with pytest.raises(ValueError, match="expand_block_table: rank: expected one of"):
            expand_block_table(table, ranks, rank, 1)
    with pytest.raises(ValueError, match="compress_ratio: expected a divisor of 256, got 3"):
        context_local_lens(lens, 3, 2, 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("ratio", [4, 128])
def test_pages_are_an_engines_that_interleaves_256_tokens(ratio: int, ranks: int) -> None:
    """vLLM with block_size = cp_kv_cache_interleave_size = 256 has on each rank the tokens, and the slots of its own
    block table, that the owner rule says."""
    lens = torch.randint(0, 6 * ranks * TOKENS, (50,), generator=torch.Generator().manual_seed(ranks))
    tokens = 3 * ranks * TOKENS + 300
    position = torch.arange(tokens)
    for rank in range(ranks):
        rounds, rest = lens // (TOKENS * ranks), lens % (TOKENS * ranks)
        local_tokens = rounds * TOKENS + (rest - rank * TOKENS).clamp(0, TOKENS)
        own = context_local_lens((lens // ratio).int(), ratio, ranks, rank)
        assert torch.equal(own, (local_tokens // ratio).int())

        local = torch.randperm(40)[: -(-tokens // (TOKENS * ranks)) + 1].view(1, -1).int()
        is_own = position % (TOKENS * ranks) // TOKENS == rank
        token_slots = local[0, position // (TOKENS * ranks)] * TOKENS + position % TOKENS
        closes = is_own & (position % ratio == ratio - 1)
        wanted = torch.where(closes, token_slots.long() // ratio, -1)
        table = expand_block_table(local, ranks, rank, local.shape[1] * ranks)
        starts, seq = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
        assert torch.equal(get_compressed_slot_mapping(tokens, starts, seq, table, TOKENS, ratio), wanted)
