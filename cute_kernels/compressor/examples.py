"""Calls that the kernels of this room are verified with: edge cases of values, sizes, strides and slots."""

from __future__ import annotations

from collections.abc import Iterator

import torch

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


EXAMPLES = {"save_partial_states": save}
