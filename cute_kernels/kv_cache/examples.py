"""Calls that the kernels of this room are verified with: edge cases of values, sizes, strides, slots and lengths."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.kv_cache import examples_qnorm
from cute_kernels.runtime.verify import Example, raw_memory

_POISON = 0xA5
_WRONG_SLOTS = (-1, -7, -(2**62), 2**31, 2**32 + 1, 2**62)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _pool(num_blocks: int, block_size: int, extra: int) -> torch.Tensor:
    """A pool full of poison whose pages lie `extra` bytes further apart than they must."""
    pool = FP8_DS_MLA.allocate(num_blocks, block_size, page_stride=FP8_DS_MLA.page_bytes(block_size) + extra)
    raw_memory(pool).fill_(_POISON)
    return pool


def _slots(rows: int, capacity: int, seed: int) -> torch.Tensor:
    """Distinct slots in random order, every fourth replaced by one that names no row of the cache."""
    slots = torch.randperm(capacity, generator=_generator(seed))[:rows]
    wrong = torch.tensor([*_WRONG_SLOTS, capacity, capacity + 1])
    for number, row in enumerate(range(3, rows, 4)):
        slots[row] = wrong[number % len(wrong)]
    return slots


def _rows(rows: int, seed: int) -> torch.Tensor:
    """Normal values of very different magnitudes, zeros among them."""
    g = _generator(seed)
    magnitudes = torch.exp2(torch.randint(-24, 24, (rows, HEAD_DIM // 64, 1), generator=g).float())
    values = (torch.randn(rows, HEAD_DIM // 64, 64, generator=g) * magnitudes).reshape(rows, HEAD_DIM)
    values[torch.rand(values.shape, generator=g) < 0.05] = 0.0
    return values.bfloat16()


def insert() -> Iterator[Example]:
    """quantize_and_insert_k_cache(k, k_cache, slot_mapping, block_size, kv_format)"""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(128, HEAD_DIM)
    yield Example(
        "every bf16 number, infinities and NaN", (patterns, _pool(2, 64, 0), _slots(128, 128, 0), 64, FP8_DS_MLA.id)
    )
    for rows, block_size, extra in ((0, 64, 0), (1, 64, 64), (7, 1, 8), (257, 3, 576), (1025, 64, 64), (4099, 256, 0)):
        blocks = -(-rows // block_size) + 2
        slots = _slots(rows, blocks * block_size, rows)
        name = f"{rows} rows, pages of {block_size} and {extra} bytes between them"
        yield Example(name, (_rows(rows, rows), _pool(blocks, block_size, extra), slots, block_size, FP8_DS_MLA.id))
    wide = _rows(3 * 40, 1).view(40, 3 * HEAD_DIM)[:, HEAD_DIM : 2 * HEAD_DIM]
    yield Example(
        "columns of a wider tensor, rows beyond the slots",
        (wide, _pool(1, 64, 0), _slots(33, 64, 2), 64, FP8_DS_MLA.id),
    )


def gather() -> Iterator[Example]:
    """dequantize_and_gather_k_cache(out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, kv_format)"""
    for block_size, extra, offset, tails in (
        (64, 64, 0, True),
        (64, 0, 5, False),
        (2, 8, 0, False),
        (100, 576, 1, True),
        # rows enough for the kernel with bulk copies, in pages that it can take and in pages that it cannot
        (400, 16, 2, True),
        (400, 0, 0, False),
        (400, 8, 3, True),
    ):
        yield Example(
            f"pages of {block_size} and {extra} bytes between them, from row {offset}, {'tails' if tails else 'all'}",
            _gather_arguments(block_size, extra, offset, tails),
        )


def _gather_arguments(block_size: int, extra: int, offset: int, tails: bool) -> tuple[object, ...]:
    g = _generator(block_size + offset)
    num_blocks, width = 37, 9
    pool = _pool(num_blocks, block_size, extra)
    pages = FP8_DS_MLA.pages(pool, block_size)
    pages[:] = torch.randint(0, 256, pages.shape, generator=g, dtype=torch.uint8)
    scales = pages[:, block_size * FP8_DS_MLA.data_bytes :]
    scales[:] = scales % 60 + 90
    limit = width * block_size
    seq_lens = torch.tensor([limit, 0, 1, limit - 3, -5, block_size + 1, limit + 2 * block_size, 3], dtype=torch.int32)
    gather_lens = torch.tensor([7, 3, 1, limit, 4, 2 * block_size, block_size, -1], dtype=torch.int32)
    table = torch.randint(0, num_blocks, (len(seq_lens), width + 2), generator=g, dtype=torch.int32)[:, 1:-1]
    table[3, 1], table[3, 2] = -1, num_blocks
    out = torch.full((len(seq_lens) + 1, limit // 2 + offset + 3, HEAD_DIM + 8), 7.0, dtype=torch.bfloat16)
    return (
        out[:, :, :HEAD_DIM], pool, seq_lens, gather_lens if tails else None, table, block_size, offset, FP8_DS_MLA.id
    )  # fmt: skip


EXAMPLES = {
    "quantize_and_insert_k_cache": insert,
    "dequantize_and_gather_k_cache": gather,
    **examples_qnorm.EXAMPLES,
}
