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

_CONTIGUOUS = (
    (1, 64, 200, 0, False),
    (70, 64, 1300, 0, False),
    (33, 32, 515, 0, False),
    (30, 64, 700, 260, False),
    (21, 24, 333, 0, False),
    (70, 64, 1300, 0, True),
    (30, 16, 700, 260, True),
)
"""(rows, heads, keys, columns of the compressed form, whether it is MXFP4)"""

_FP8, _MXFP4, _WIDE = (fmt.id for fmt in (INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE))
_PAGED = (
    (1, 1, 64, 64, _FP8),
    (5, 1, 64, 64, _FP8),
    (3, 2, 64, 128, _FP8),
    (4, 3, 48, 16, _FP8),
    (2, 4, 64, 64, _FP8),
    (3, 7, 16, 8, _FP8),
    (4, 2, 64, 12, _FP8),
    (5, 1, 64, 64, _MXFP4),
    (3, 4, 64, 64, _MXFP4),
    (4, 2, 32, 20, _WIDE),
)
"""(requests, rows of each, heads, keys of a page, format)"""

_MANY = ((2000, 1, 16, 64, _FP8), (3600, 1, 16, 64, _MXFP4))
"""The same, with few keys each, and so many that blocks have more tiles than stages."""


def _codes(g: torch.Generator, mxfp4: bool, *shape: int) -> torch.Tensor:
    """Of queries or keys."""
    if mxfp4:
        return torch.randint(0, 256, (*shape, INDEX_DIM // 2), generator=g, dtype=torch.uint8)
    return (torch.randn(*shape, INDEX_DIM, generator=g) * 30).clamp(-448, 448).to(torch.float8_e4m3fn)


def _scales(g: torch.Generator, mxfp4: bool, *shape: int) -> torch.Tensor:
    """Of keys or, of MXFP4, queries."""
    if mxfp4:
        return torch.randint(105, 135, (*shape, 4), generator=g, dtype=torch.uint8).view(torch.int32)[..., 0]
    return torch.exp2(torch.randint(-9, 9, shape, generator=g).float())


def _poisoned(rows: int, columns: int) -> torch.Tensor:
    out = torch.empty(rows + 1, columns + 6)
    raw_memory(out).fill_(_POISON)
    return out[:rows, 3:-3]


def contiguous() -> Iterator[Example]:
    """mqa_logits(q, q_scale, k, k_scale, weights, start, end, clean_logits, max_seqlen_k, out)"""
    for rows, heads, keys, columns, mxfp4 in _CONTIGUOUS:
        for clean in (False, True):
            g = torch.Generator().manual_seed(rows + keys)
            start = torch.randint(-9, keys + 9, (rows,), generator=g)
            end = start + torch.randint(-9, keys + 9, (rows,), generator=g)
            start[0], end[0] = 0, keys
            windows = start.int(), end.int()
            q, q_scale = _codes(g, mxfp4, rows, heads), _scales(g, True, rows, heads) if mxfp4 else None
            inputs = q, q_scale, _codes(g, mxfp4, keys), _scales(g, mxfp4, keys)
            out = _poisoned(rows, columns or keys)
            name = f"{rows} rows, {heads} heads, {keys} keys, {columns} columns" + ", MXFP4" * mxfp4 + ", clean" * clean
            arguments = (*inputs, torch.randn(rows, heads, generator=g), *windows, clean, columns, out)
            yield Example(name, arguments, _agree_contiguous)


def paged() -> Iterator[Example]:
    """paged_mqa_logits(q, q_scale, kv_cache, weights, context_lens, block_tables, max_model_len, clean_logits,
    kv_format, out)"""
    for requests, next_n, heads, page_rows, kv_format in _PAGED + _MANY:
        fmt, mxfp4 = FORMATS[kv_format], kv_format != INDEXER_FP8.id
        are_many = requests >= _MANY[0][0]
        for clean in (False,) if are_many else (False, True):
            g = torch.Generator().manual_seed(requests + next_n)
            pages, columns, width = (40, 20, 1) if are_many else (40, 700, 600 // page_rows)
            pool = fmt.allocate(pages, page_rows)
            slots = torch.arange(pages * page_rows)
            scale = _scales(g, mxfp4, len(slots))[:, None].view(torch.uint8)
            fmt.write_fields(pool, page_rows, slots, _codes(g, mxfp4, len(slots)).view(torch.uint8), scale)
            table = torch.randint(-2, pages + 2, (requests, width), generator=g).int()
            lens = torch.randint(-9, columns + 9, (requests, next_n), generator=g).int()
            lens[0, 0] = 640
            q = _codes(g, mxfp4, requests, next_n, heads)
            q_scale = _scales(g, True, requests, next_n, heads) if mxfp4 else None
            weights = torch.randn(requests * next_n, heads, generator=g)
            name = f"{requests} requests of {next_n} rows, {heads} heads, pages of {page_rows}, {kv_format}"
            inputs = q, q_scale, pool, weights, lens, table, columns, clean, kv_format
            arguments = (*inputs, _poisoned(requests * next_n, columns))
            yield Example(name + ", clean" * clean, arguments, _agree_paged)


def _agree_contiguous(got: Sequence[Any], want: Sequence[Any]) -> str:
    q, q_scale, k, scale, weights, start = want[:6]
    magnitude = _magnitude(q, q_scale, k, scale, weights)
    if want[8]:
        key = start.long()[:, None] + torch.arange(want[9].shape[1])
        magnitude = magnitude.gather(1, key.clamp(0, k.shape[0] - 1))
    return _agree(got, want, magnitude)


def _agree_paged(got: Sequence[Any], want: Sequence[Any]) -> str:
    q, q_scale, pool, weights, _, table, columns, _, kv_format = want[:9]
    page_rows, next_n = pool.shape[1], q.shape[1]
    magnitude = torch.zeros(weights.shape[0], columns, dtype=torch.float64)
    for r in range(q.shape[0]):
        entries = torch.arange(columns)
        slots = entries_to_slots(entries, torch.full_like(entries, r), table, page_rows)
        slots = slots.clamp(0, pool.shape[0] * page_rows - 1)
        codes, scale = (t.contiguous() for t in FORMATS[kv_format].read_fields(pool, page_rows, slots))
        own = slice(r * next_n, (r + 1) * next_n)
        if q_scale is None:
            keys, scale = codes.view(torch.float8_e4m3fn), scale.view(torch.float32)[:, 0]
            magnitude[own] = _magnitude(q[r], None, keys, scale, weights[own])
        else:
            magnitude[own] = _magnitude(q[r], q_scale[r], codes, scale.view(torch.int32)[:, 0], weights[own])
    return _agree(got, want, magnitude)


def _magnitude(
    q: torch.Tensor, q_scale: torch.Tensor | None, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """float64 [rows, keys]: what scores are made of, all signs positive."""
    if q_scale is None:
        dots = q.double().abs() @ k.double().abs().T * scale.double().abs()
    else:
        values = (
            numerics.dequantize_e2m1(codes, words[..., None].contiguous().view(torch.uint8)).abs()
            for codes, words in ((q, q_scale), (k, scale))
        )
        dots = next(values) @ next(values).T
    return (dots * weights.double().abs()[:, :, None]).sum(1)


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
