"""Calls that the kernels of this room are verified with: edge cases of values, sizes, strides and slots."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cute_kernels.compressor.examples_entries import compress, fused
from cute_kernels.formats import HEAD_DIM, INDEX_DIM, compressor_state
from cute_kernels.runtime.verify import Example, raw_memory

_POISON = 0xA5


def save() -> Iterator[Example]:
    """save_partial_states(kv, score, ape, positions, state_cache, slot_mapping, block_size, compress_ratio)"""
    cases = (
        (HEAD_DIM, 4, 1, 4, 0),
        (HEAD_DIM, 4, 1023, 4, 576),
        (HEAD_DIM, 128, 517, 8, 64),
        (INDEX_DIM, 4, 300, 4, 16),
        (INDEX_DIM, 128, 130, 8, 0),
        (HEAD_DIM, 4, 0, 4, 0),
        # rows enough for the kernels of long calls
        (HEAD_DIM, 4, 2051, 4, 576),
        (HEAD_DIM, 128, 4099, 8, 64),
        (INDEX_DIM, 4, 16387, 4, 16),
    )
    for dim, ratio, rows, block_size, extra in cases:
        g = torch.Generator().manual_seed(dim + ratio + rows)
        fmt = compressor_state(dim, ratio)
        columns = torch.randn(rows + 3, 2 * fmt.width, generator=g)
        for column, value in enumerate((float("inf"), float("-inf"), float("nan"), -0.0, 3.4e38, 1e-45)):
            columns[:, column * 7 :: 97] = value
        kv, score = columns.chunk(2, dim=1)
        blocks = -(-rows // block_size) + 2
        pool = fmt.allocate(blocks, block_size, page_stride=fmt.page_bytes(block_size) + extra)
        raw_memory(pool).fill_(_POISON)
        capacity = blocks * block_size
        slots = torch.randperm(capacity, generator=g)[:rows]
        slots[3::4] = torch.tensor([-1, capacity, 2**33, -(2**62)]).repeat(rows)[: len(slots[3::4])]
        positions = torch.randint(0, 2**20, (rows + 1,), generator=g)
        ape = torch.randn(ratio, fmt.width, generator=g)
        yield Example(
            f"ratio {ratio}, {dim} columns, {rows} rows, {extra} bytes between pages",
            (kv, score, ape, positions, pool, slots, block_size, ratio),
        )


def slots() -> Iterator[Example]:
    """get_compressed_slot_mapping(out, query_start_loc, seq_lens, block_table, slot_mapping, num_tokens, block_size,
    compress_ratio)"""
    for requests, longest, ratio, page_rows, first, has_own in (
        (1, 1, 4, 64, 0, True),
        (64, 1, 4, 64, 0, True),
        (31, 40, 128, 2, 0, False),
        (33, 700, 4, 64, 0, True),
        (3000, 2, 4, 3, 7, False),
        (1, 5000, 1, 5, 0, True),
        (0, 0, 4, 64, 0, False),
    ):
        g = torch.Generator().manual_seed(requests + longest)
        queries = torch.randint(0, longest + 1, (requests,), generator=g)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), queries.cumsum(0)]) + first
        seq_lens = queries + torch.randint(-1, 5000, (requests,), generator=g)
        seq_lens[5::11] = torch.tensor([2**31 - 1, 0, -(2**31)]).repeat(requests)[: (requests + 5) // 11]
        table = torch.randint(-1, 2**22, (requests, 3000 // page_rows), generator=g)
        table[:, 7::9] = -1_000_000
        rows = int(starts[-1]) + 3
        own = torch.randint(-2, 9, (rows + 1,), generator=g)
        yield Example(
            f"{requests} requests of at most {longest} rows, ratio {ratio}, pages of {page_rows}",
            (
                torch.full((rows + 70,), 77),
                *(starts.int(), seq_lens.int(), table.int()[:, 1:-1], own if has_own else None),
                *(rows, page_rows * ratio, ratio),
            ),
        )


EXAMPLES = {
    "compress_norm_rope_store": compress,
    "fused_compress_norm_rope_store": fused,
    "get_compressed_slot_mapping": slots,
    "save_partial_states": save,
}
