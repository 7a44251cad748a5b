"""Calls that the kernels of the fused query norm, rotation and KV insert are verified with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.verify import Example, compare_arguments, raw_memory

_POISON = 0xA5
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
    """Argument number `queries` holds the right queries, with nothing written between them; the rest is equal."""
    g, w = got[queries], want[queries]
    difference = query_difference(g, w)
    if difference:
        return difference
    raw = raw_memory(g).clone()
    same = torch.empty(0, dtype=g.dtype).set_(raw.untyped_storage(), g.storage_offset(), g.shape, g.stride())
    same.copy_(w)
    names = [str(number) for number in range(len(got))]
    return compare_arguments(names, [*got[:queries], same, *got[queries + 1 :]], want)


def _arguments(
    fmt: Any, rows: int, heads: int, block_size: int, extra: int, slots: int, *, norm: bool = True
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
    if fmt is formats.FP8_DS_MLA:
        return q, kv, pool, *where, 1e-6, block_size, norm, fmt.id, False
    if fmt is formats.PLAIN_BF16:
        return q, kv, pool, *where, 1e-6, block_size, fmt.id, False
    q_fp8 = torch.zeros(rows, heads, 512, dtype=fmt.dtype)
    raw_memory(q_fp8).fill_(_POISON)
    return q, kv, q_fp8, pool, *where, torch.tensor([0.3]), torch.tensor([17.0]), 1e-6, block_size, fmt.id, False


def _examples(fmt: Any) -> Iterator[Example]:
    agree = partial(agree_but_for_queries, 2 if fmt is formats.PLAIN_FP8 else 0)
    step = 8 if fmt is formats.FP8_DS_MLA else 512
    for rows, heads, block_size, extra, slots in (
        (0, 8, 64, 0, 0),
        (1, 1, 1, step, 1),
        (3, 0, 64, 0, 3),
        (5, 128, 64, 2 * step, 5),
        (70, 13, 3, step, 61),
        (300, 2, 64, 0, 0),
        (300, 8, 256, 0, 300),
    ):
        name = f"{rows} rows, {slots} of them stored, {heads} heads, pages of {block_size} and {extra} bytes between"
        yield Example(name, _arguments(fmt, rows, heads, block_size, extra, slots), agree)
    if fmt is formats.FP8_DS_MLA:
        yield Example("queries rotated only", _arguments(fmt, 60, 5, 64, 0, 60, norm=False))


_NAME = "fused_deepseek_v4_qnorm_rope_kv_rope_"
EXAMPLES: dict[str, Callable[[], Iterator[Example]]] = {
    f"{_NAME}quant_insert": partial(_examples, formats.FP8_DS_MLA),
    f"{_NAME}full_cache_bf16_insert": partial(_examples, formats.PLAIN_BF16),
    f"{_NAME}full_cache_fp8_insert": partial(_examples, formats.PLAIN_FP8),
}
