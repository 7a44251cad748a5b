"""Calls that the kernels of the indexer's scores are verified with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels import numerics
from cute_kernels.formats import FORMATS, INDEX_DIM, INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE
from cute_kernels.paging import entries_to_slots
from cute_kernels.runtime.verify import Example, clone_arguments, raw_memory

_POISON = 0xA5

SHARE = 2.0**-12
"""Of what a score is made of, the sum of its products' magnitudes times weights and scale, that it may differ by:
Hopper's tensor cores keep about 14 bits of a sum of e4m3 products."""

_CONTIGUOUS = ((1, 64, 200, 0), (70, 64, 1300, 0), (33, 32, 515, 0), (30, 64, 700, 260))
"""(rows, heads, keys, columns of the compressed form)"""

_PAGED = ((1, 1, 64, 64), (5, 1, 64, 64), (3, 2, 64, 128), (4, 3, 48, 16), (2, 4, 64, 64), (3, 7, 16, 8))
"""(requests, rows of each, heads, keys of a page)"""


def _codes(g: torch.Generator, *shape: int) -> torch.Tensor:
    return (torch.randn(shape, generator=g) * 30).clamp(-448, 448).to(torch.float8_e4m3fn)


_MXFP4 = ((33, 64, 515, 0), (30, 48, 700, 260))
_PAGED_MXFP4 = ((5, 1, 64, 64, INDEXER_MXFP4), (3, 3, 64, 64, INDEXER_MXFP4), (2, 2, 32, 8, INDEXER_MXFP4_WIDE))
"""As _CONTIGUOUS and _PAGED, and the format."""


def _mxfp4(g: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes [..., 64] and their scales, int32 [...]: every seventh row has them from 2^-30 to 2^10."""
    packed = torch.randint(0, 256, (*shape, INDEX_DIM // 2), generator=g, dtype=torch.uint8)
    near = torch.randint(112, 127, (*shape, 4), generator=g, dtype=torch.uint8)
    far = torch.randint(97, 138, (*shape, 4), generator=g, dtype=torch.uint8)
    is_far = torch.randint(0, 7, (*shape, 1), generator=g) == 0
    return packed, torch.where(is_far, far, near).view(torch.int32)[..., 0]


def _poisoned(rows: int, columns: int) -> torch.Tensor:
    out = torch.empty(rows + 1, columns + 6)
    raw_memory(out).fill_(_POISON)
    return out[:rows, 3:-3]


def contiguous() -> Iterator[Example]:
    """mqa_logits(q, q_scale, k, k_scale, weights, start, end, clean_logits, max_seqlen_k, out)"""
    for rows, heads, keys, columns in _CONTIGUOUS:
        for clean in (False, True):
            g = torch.Generator().manual_seed(rows + keys)
            scale = torch.exp2(torch.randint(-9, 9, (keys,), generator=g).float())
            start = torch.randint(-9, keys + 9, (rows,), generator=g)
            end = start + torch.randint(-9, keys + 9, (rows,), generator=g)
            start[0], end[0] = 0, keys
            windows = start.int(), end.int()
            inputs = _codes(g, rows, heads, INDEX_DIM), None, _codes(g, keys, INDEX_DIM), scale
            out = _poisoned(rows, columns or keys)
            name = f"{rows} rows, {heads} heads, {keys} keys, {columns} columns" + ", clean" * clean
            arguments = (*inputs, torch.randn(rows, heads, generator=g), *windows, clean, columns, out)
            yield Example(name, arguments, _agree_contiguous)
    for rows, heads, keys, columns in _MXFP4:
        g = torch.Generator().manual_seed(rows + keys)
        start = torch.randint(-9, keys + 9, (rows,), generator=g)
        windows = start.int(), (start + torch.randint(-9, keys + 9, (rows,), generator=g)).int()
        data = *_mxfp4(g, rows, heads), *_mxfp4(g, keys), torch.randn(rows, heads, generator=g)
        out = _poisoned(rows, columns or keys)
        name = f"{rows} rows, {heads} heads, {keys} keys, {columns} columns, mxfp4, clean"
        yield Example(name, (*data, *windows, True, columns, out), _agree_contiguous)


def paged() -> Iterator[Example]:
    """paged_mqa_logits(q, q_scale, kv_cache, weights, context_lens, block_tables, max_model_len, clean_logits,
    kv_format, out)"""
    for requests, next_n, heads, page_rows in _PAGED:
        for clean in (False, True):
            g = torch.Generator().manual_seed(requests + next_n)
            pages, columns = 40, 700
            pool = INDEXER_FP8.allocate(pages, page_rows)
            slots = torch.arange(pages * page_rows)
            scale = torch.exp2(torch.randint(-9, 9, (len(slots), 1), generator=g).float()).view(torch.uint8)
            INDEXER_FP8.write_fields(pool, page_rows, slots, _codes(g, len(slots), INDEX_DIM).view(torch.uint8), scale)
            table = torch.randint(-2, pages + 2, (requests, 600 // page_rows), generator=g).int()
            lens = torch.randint(-9, columns + 9, (requests, next_n), generator=g).int()
            lens[0, 0] = 640
            q = _codes(g, requests, next_n, heads, INDEX_DIM)
            weights = torch.randn(requests * next_n, heads, generator=g)
            name = f"{requests} requests of {next_n} rows, {heads} heads, pages of {page_rows}" + ", clean" * clean
            inputs = q, None, pool, weights, lens, table, columns, clean, INDEXER_FP8.id
            yield Example(name, (*inputs, _poisoned(requests * next_n, columns)), _agree_paged)
    for requests, next_n, heads, page_rows, fmt in _PAGED_MXFP4:
        g = torch.Generator().manual_seed(requests + next_n)
        pages, columns = 40, 700
        pool, slots = fmt.allocate(pages, page_rows), torch.arange(pages * page_rows)
        codes, scale = _mxfp4(g, len(slots))
        fmt.write_fields(pool, page_rows, slots, codes, scale[:, None].contiguous().view(torch.uint8))
        table = torch.randint(-2, pages + 2, (requests, 600 // page_rows), generator=g).int()
        lens = torch.randint(-9, columns + 9, (requests, next_n), generator=g).int()
        weights = torch.randn(requests * next_n, heads, generator=g)
        data = *_mxfp4(g, requests, next_n, heads), pool, weights, lens, table, columns, True, fmt.id
        name = f"{requests} requests of {next_n} rows, {heads} heads, pages of {page_rows}, {fmt.id}, clean"
        yield Example(name, (*data, _poisoned(requests * next_n, columns)), _agree_paged)


def _agree_contiguous(got: Sequence[Any], want: Sequence[Any]) -> str:
    q, q_scale, k, scale, weights, start = want[:6]
    magnitude = _magnitude(_values(q, q_scale), *_keys(k, scale), weights)
    if want[8]:
        key = start.long()[:, None] + torch.arange(want[9].shape[1])
        magnitude = magnitude.gather(1, key.clamp(0, k.shape[0] - 1))
    return _agree(got, want, magnitude)


def _agree_paged(got: Sequence[Any], want: Sequence[Any]) -> str:
    q, q_scale, pool, weights, _, table, columns = want[:7]
    queries, fmt = _values(q, q_scale), FORMATS[want[8]]
    page_rows, next_n = pool.shape[1], q.shape[1]
    magnitude = torch.zeros(weights.shape[0], columns, dtype=torch.float64)
    for r in range(q.shape[0]):
        entries = torch.arange(columns)
        slots = entries_to_slots(entries, torch.full_like(entries, r), table, page_rows)
        slots = slots.clamp(0, pool.shape[0] * page_rows - 1)
        codes, scale = (field.contiguous() for field in fmt.read_fields(pool, page_rows, slots))
        own = slice(r * next_n, (r + 1) * next_n)
        if q_scale is None:
            keys = _keys(codes.view(torch.float8_e4m3fn), scale.view(torch.float32)[:, 0])
        else:
            keys = _keys(codes, scale.view(torch.int32)[:, 0])
        magnitude[own] = _magnitude(queries[r], *keys, weights[own])
    return _agree(got, want, magnitude)


def _values(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """float64 [..., 128] of e4m3 codes, or of MXFP4 codes with their scales."""
    if scale is None:
        return codes.double()
    return numerics.dequantize_e2m1(codes, scale[..., None].contiguous().view(torch.uint8))


def _keys(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and the factor of their scores."""
    if scale.dtype == torch.int32:
        return _values(codes, scale), torch.ones(len(codes))
    return _values(codes, None), scale


def _magnitude(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """float64 [rows, keys]: what scores are made of, all signs positive."""
    dots = q.double().abs() @ k.double().abs().T
    return (dots * weights.double().abs()[:, :, None]).sum(1) * scale.double().abs()


def _agree(got: Sequence[Any], want: Sequence[Any], magnitude: torch.Tensor) -> str:
    """ "", or how far the scores are off; everything else in memory must be the same."""
    is_number = want[9].isfinite()
    if not torch.equal(is_number, got[9].isfinite()):
        return "out: -inf in other places"
    excess = (got[9].double() - want[9].double()).abs() - SHARE * magnitude
    if bool((excess[is_number] > 0).any()):
        return f"out: off by {excess[is_number].max().item():.3g} more than the tensor cores' sums explain"
    cleared = [clone_arguments(arguments, torch.device("cpu")) for arguments in (got, want)]
    for arguments in cleared:
        arguments[9][is_number] = 0.0
    same = all(torch.equal(raw_memory(x[9]), raw_memory(y[9])) for x, y in [cleared])
    return "" if same else "memory outside of the scores was written"


EXAMPLES = {"mqa_logits": contiguous, "paged_mqa_logits": paged}
