# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of this package are verified with: edge cases of values, sizes, strides and slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, MXFP8_FORMATS, V41_FORMATS
from cute_kernels.runtime.verify import Example, compare_arguments, raw_memory

_POISON = 0xA5
_WRONG_SLOTS = (-1, -7, -(2**62), 2**31, 2**32 + 1, 2**62)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _pool(num_blocks: int, block_size: int, extra: int, fmt: formats.KVFormat = FP8_DS_MLA) -> torch.Tensor:
    """A pool full of poison whose pages lie `extra` bytes further apart than they must."""
    pool = fmt.allocate(num_blocks, block_size, page_stride=fmt.page_bytes(block_size) + extra)
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
    for fmt in V41_FORMATS:
        for block_size, extra, offset, tails in ((64, 64, 0, True), (7, 8, 5, False)):
            name = f"{fmt.id}, pages of {block_size}, from row {offset}, {'tails' if tails else 'all'}"
            yield Example(name, _gather_arguments(block_size, extra, offset, tails, fmt))


def _gather_arguments(
    block_size: int, extra: int, offset: int, tails: bool, fmt: formats.KVFormat = FP8_DS_MLA
) -> tuple[object, ...]:
    g = _generator(block_size + offset)
    num_blocks, width = 37, 9
    pool = _pool(num_blocks, block_size, extra, fmt)
    pages = fmt.pages(pool, block_size)
    pages[:] = torch.randint(0, 256, pages.shape, generator=g, dtype=torch.uint8)
    if fmt == FP8_DS_MLA:
        scales = pages[:, block_size * FP8_DS_MLA.data_bytes :]
        scales[:] = scales % 60 + 90
    limit = width * block_size
    seq_lens = torch.tensor([limit, 0, 1, limit - 3, -5, block_size + 1, limit + 2 * block_size, 3], dtype=torch.int32)
    gather_lens = torch.tensor([7, 3, 1, limit, 4, 2 * block_size, block_size, -1], dtype=torch.int32)
    table = torch.randint(0, num_blocks, (len(seq_lens), width + 2), generator=g, dtype=torch.int32)[:, 1:-1]
    table[3, 1], table[3, 2] = -1, num_blocks
    out = torch.full((len(seq_lens) + 1, limit // 2 + offset + 3, HEAD_DIM + 8), 7.0, dtype=torch.bfloat16)
    return (
        out[:, :, :HEAD_DIM], pool, seq_lens, gather_lens if tails else None, table, block_size, offset, fmt.id
    )  # fmt: skip


# ---- norm and rotation of queries, insertion of keys

_WRONG_NUMBERS = (-1, -7, -(2**62), 2**31, 2**32 + 1, 2**62)
_POSITIONS = 300


def query_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """Why queries are not what they should be, or "": their norm may be rounded in another order.

    A number may be off by one step of its dtype, or by the last bits of the row's largest where the products of its
    rotation cancel; and only one in 1000 may be off at all.
    """
    off = (_steps(got) - _steps(want)).abs()
    least = want.float().abs().amax(dim=-1, keepdim=True) * 2.0**-19 if want.numel() else 0.0
    wrong = int(((off > 1) & ~((got.float() - want.float()).abs() <= least)).sum())
    if wrong:
        return f"queries: {wrong} of {off.numel()} numbers differ by more than a step"
    changed = int((off != 0).sum())
    return f"queries: {changed} of {off.numel()} numbers differ" if changed > off.numel() // 1000 + 8 else ""


def _steps(x: torch.Tensor) -> torch.Tensor:
    """Numbers of an 8 or 16 bit float as integers, neighbours one apart; NaN equals itself only."""
    integer = torch.int16 if x.dtype == torch.bfloat16 else torch.int8
    bits = x.contiguous().view(integer).int()
    return torch.where(x.float().isnan(), 2**20, torch.where(bits < 0, torch.iinfo(integer).min - bits, bits))


def agree_but_for_queries(queries: int, got: Sequence[Any], want: Sequence[Any]) -> str:
    """Argument number `queries` holds the right queries, normed, with nothing written between; the rest is equal."""
    difference = query_difference(got[queries], want[queries])
    if difference:
        return difference
    g = got[queries]
    raw = raw_memory(g).clone()
    same = torch.empty(0, dtype=g.dtype).set_(raw.untyped_storage(), g.storage_offset(), g.shape, g.stride())
    same.copy_(want[queries])
    names = [str(number) for number in range(len(got))]
    return compare_arguments(names, [*got[:queries], same, *got[queries + 1 :]], want)


def _agree(queries: int, got: Sequence[Any], want: Sequence[Any]) -> str:
    """The same of a call that may have no norm, the third argument from the end: rotation alone has one result, so
    that all is equal."""
    if not got[-3]:
        return compare_arguments([str(number) for number in range(len(got))], got, want)
    return agree_but_for_queries(queries, got, want)


def _arguments(
    fmt: Any, rows: int, heads: int, block_size: int, extra: int, slots: int, *, norm: bool = True, use_pdl: bool
) -> tuple[Any, ...]:
    """Arguments in the schema's order. extra: bytes between pages; slots: rows of kv that are stored."""
    g = torch.Generator().manual_seed(rows * 131 + heads)

    def values(*shape: int) -> torch.Tensor:
        magnitudes = torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), generator=g).float())
        x = torch.randn(shape, generator=g) * magnitudes
        x[torch.rand(shape, generator=g) < 0.05] = 0.0
        return x.bfloat16()

    blocks = rows // block_size + 2
    pool = fmt.allocate(blocks, block_size, page_stride=fmt.page_bytes(block_size) + extra)
    raw_memory(pool).fill_(_POISON)
    q = torch.full((rows, heads + 1, 512 + 8), 7.0, dtype=torch.bfloat16)[:, 1:, 8:]
    q.copy_(values(rows, heads, 512))
    kv = values(rows, 512)
    kv[slots:] = torch.nan
    capacity = blocks * block_size
    slot_mapping = torch.randperm(capacity, generator=g)[:slots]
    positions = torch.randint(0, _POSITIONS, (rows,), generator=g)
    wrong = torch.tensor([*_WRONG_NUMBERS, capacity])
    for number, row in enumerate(range(3, rows, 4)):
        positions[row] = wrong[number % len(wrong)]
        if row - 1 < slots:
            slot_mapping[row - 1] = wrong[number % len(wrong)]
    angles = torch.rand(_POSITIONS, 32, generator=g) * 6.3
    where = slot_mapping, positions, torch.cat([angles.cos(), angles.sin()], dim=1)
    if fmt is not formats.PLAIN_FP8:
        return q, kv, pool, *where, 1e-6, block_size, norm, fmt.id, use_pdl
    q_fp8 = torch.zeros(rows, heads, 512, dtype=fmt.dtype)
    raw_memory(q_fp8).fill_(_POISON)
    return (
        q,
        kv,
        q_fp8,
        pool,
        *where,
        torch.tensor([0.3]),
        torch.tensor([17.0]),
        1e-6,
        block_size,
        norm,
        fmt.id,
        use_pdl,
    )


def _examples(fmt: Any) -> Iterator[Example]:
    agree = partial(_agree, 2 if fmt is formats.PLAIN_FP8 else 0)
    step = 8 if fmt is formats.FP8_DS_MLA else 512
    for rows, heads, block_size, extra, slots, use_pdl in (
        (0, 8, 64, 0, 0, False),
        (1, 1, 1, step, 1, True),
        (3, 0, 64, 0, 3, False),
        (5, 128, 64, 2 * step, 5, True),
        (70, 13, 3, step, 61, True),
        (300, 2, 64, 0, 0, False),
        (300, 8, 256, 0, 300, False),
    ):
        name = f"{rows} rows, {slots} of them stored, {heads} heads, pages of {block_size} and {extra} bytes between"
        name += ", a dependent launch" * use_pdl
        yield Example(name, _arguments(fmt, rows, heads, block_size, extra, slots, use_pdl=use_pdl), agree)
    yield Example("queries rotated only", _arguments(fmt, 60, 5, 64, 0, 60, norm=False, use_pdl=True), agree)


def _quant_inserts() -> Iterator[Example]:
    """Into records of V4's windows, and of V4.1's, whose queries have no norm."""
    yield from _examples(formats.FP8_DS_MLA)
    for fmt in MXFP8_FORMATS:
        arguments = _arguments(fmt, 70, 13, 3, 528, 61, norm=False, use_pdl=True)
        yield Example(f"V4.1's own records, {fmt.id}", arguments, partial(_agree, 0))


_NAME = "fused_deepseek_v4_qnorm_rope_kv_rope_"
_QNORM_EXAMPLES: dict[str, Callable[[], Iterator[Example]]] = {
    f"{_NAME}quant_insert": _quant_inserts,
    f"{_NAME}full_cache_bf16_insert": partial(_examples, formats.PLAIN_BF16),
    f"{_NAME}full_cache_fp8_insert": partial(_examples, formats.PLAIN_FP8),
}


def _packed(is_unpack: bool) -> Iterator[Example]:
    """pack_records(cache, slots, kv_format, out, use_pdl) or unpack_records(records, cache, slots, kv_format,
    use_pdl)"""
    for fmt in formats.RECORD_FORMATS.values():
        long = ((0, 64, 0), (1, 64, 64), (1029, 64, 0)) if fmt is FP8_DS_MLA else ((52, 64, 0),)
        for rows, block_size, extra in (*long, (39, 3, 16)):
            blocks = -(-rows // block_size) + 2
            size = fmt.dtype.itemsize
            stride = fmt.page_stride(block_size) + extra
            pool = fmt.allocate(blocks, block_size, page_stride=stride - stride % size)
            raw = raw_memory(pool)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=_generator(rows), dtype=torch.uint8))
            records = torch.randint(0, 256, (rows, fmt.record_bytes + extra), generator=_generator(1)).byte()
            records = records[:, : fmt.record_bytes]
            slots = _slots(rows, blocks * block_size, rows)
            name = f"{fmt.id}, {rows} records, pages of {block_size} and {extra} bytes between them"
            given = (records, pool, slots, fmt.id) if is_unpack else (pool, slots, fmt.id, records)
            yield Example(name, (*given, rows == 39))


EXAMPLES = {
    "pack_records": partial(_packed, False),
    "unpack_records": partial(_packed, True),
    "quantize_and_insert_k_cache": insert,
    "dequantize_and_gather_k_cache": gather,
    **_QNORM_EXAMPLES,
}
