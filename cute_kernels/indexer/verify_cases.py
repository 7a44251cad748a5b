# SPDX-License-Identifier: Apache-2.0
"""Calls that the kernels of this package are verified with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels import numerics
from cute_kernels.formats import FORMATS, INDEX_DIM, INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE, ROPE_DIM
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK, block_row_bytes, candidate_columns, row_bytes
from cute_kernels.indexer.reference import score_keys
from cute_kernels.numerics import CACHE_FLOOR, E2M1_FLOOR, E2M1_ROUNDINGS
from cute_kernels.paging import entries_to_slots
from cute_kernels.runtime.verify import Example, clone_arguments, raw_memory, same_bytes

# ---- queries, keys gathered

_POISON = 0xA5
_POSITIONS = 500


def _poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    raw_memory(tensor).fill_(_POISON)
    return tensor


def _inputs(tokens: int, heads: int, bf16_table: bool, bf16_weights: bool) -> tuple[torch.Tensor, ...]:
    """(positions, queries, table, weights): every bf16 number, at positions inside and outside the table."""
    g = torch.Generator().manual_seed(tokens + heads)
    q = torch.randint(-(2**15), 2**15, (tokens, heads, INDEX_DIM), generator=g, dtype=torch.int16).view(torch.bfloat16)
    q[1::2] = torch.randn(q[1::2].shape, generator=g).bfloat16()
    positions = torch.randint(-9, _POSITIONS + 9, (tokens,), generator=g)
    positions[3::11] = torch.tensor([2**40, -(2**62)]).repeat(tokens)[: len(positions[3::11])]
    angles = torch.rand(_POSITIONS, ROPE_DIM // 2, generator=g) * 6.3
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    weights = torch.randn(tokens, heads + 3, generator=g)[:, 1:-2]
    return (
        positions,
        q,
        table.bfloat16() if bf16_table else table,
        weights.bfloat16() if bf16_weights else weights,
    )


_QUERIES = (
    (1, 64, False, True),
    (37, 5, True, False),
    (150, 64, False, True),
    (9, 64, False, False),
    (0, 64, False, True),
)
"""(tokens, heads, whether the table is bf16, whether the weights are)"""


def query_fp8() -> Iterator[Example]:
    """fused_indexer_q_rope_quant_fp8(positions, index_q, table, weights, 2 factors, hadamard, q_quant, weights_out,
    round_weights, use_pdl)"""
    for tokens, heads, *are_bf16 in _QUERIES:
        for hadamard in (False, True):
            codes = _poisoned(tokens, heads, INDEX_DIM + 16, dtype=torch.float8_e4m3fn)[..., :INDEX_DIM]
            out = _poisoned(tokens, heads + 4, dtype=torch.float32)[:, :heads]
            inputs = _inputs(tokens, heads, *are_bf16)
            name = f"{tokens} tokens, {heads} heads" + ", Hadamard" * hadamard
            yield Example(name, (*inputs, 0.3, 0.7, hadamard, codes, out, hadamard, hadamard))


def query_mxfp4() -> Iterator[Example]:
    """fused_indexer_q_rope_quant_mxfp4(positions, index_q, table, weights, 2 factors, rounding, floor, hadamard, 3
    outputs, round_weights, use_pdl)"""
    for tokens, heads, *are_bf16 in _QUERIES:
        for rounding in E2M1_ROUNDINGS:
            for hadamard in (False, True):
                codes = _poisoned(tokens, heads, INDEX_DIM // 2 + 4, dtype=torch.uint8)[..., : INDEX_DIM // 2]
                scales = _poisoned(tokens, heads + 4, dtype=torch.int32)[:, :heads]
                out = _poisoned(tokens, heads + 4, dtype=torch.bfloat16 if are_bf16[0] else torch.float32)[:, :heads]
                inputs = _inputs(tokens, heads, *are_bf16)
                name = f"{tokens} tokens, {heads} heads, {rounding}" + ", Hadamard" * hadamard
                codes_of = rounding, E2M1_FLOOR if rounding == "ties_to_even" and not hadamard else CACHE_FLOOR
                results = codes, scales, out
                yield Example(name, (*inputs, 0.3, 0.7, *codes_of, hadamard, *results, not hadamard, hadamard))


def gather() -> Iterator[Example]:
    """cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens, kv_format)"""
    for fmt in (INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE):
        for block_size, extra, lens in (
            (64, 0, [130, 0, 1, 640]),
            (64, 64, [70000]),
            (3, 4, [9, 1] * 40),
        ):
            name = f"{fmt.id}, {len(lens)} requests, pages of {block_size} and {extra} bytes between them"
            yield Example(name, _gather_arguments(fmt, block_size, extra, lens))


def _gather_arguments(fmt: Any, block_size: int, extra: int, lens: list[int]) -> tuple[Any, ...]:
    g = torch.Generator().manual_seed(block_size + len(lens))
    pages = 23
    pool = fmt.allocate(pages, block_size, page_stride=fmt.page_stride(block_size) + extra)
    raw = raw_memory(pool)
    raw.copy_(torch.randint(0, 256, raw.shape, generator=g, dtype=torch.uint8))
    width = -(-max(lens) // block_size) + 1
    table = torch.randint(0, pages, (len(lens), width), generator=g, dtype=torch.int32)
    table[0, :1] = pages
    table[-1, 1:2] = -1
    bounds = torch.tensor([2, *lens]).cumsum(0).int()
    (_, code_bytes), (_, scale_bytes) = fmt.fields(block_size)
    total = int(bounds[-1]) - 1
    codes = _poisoned(total, code_bytes + 16, dtype=torch.uint8)[:, :code_bytes]
    scales = _poisoned(total, scale_bytes + 4, dtype=torch.uint8)[:, :scale_bytes]
    return pool, codes, scales, table, bounds, fmt.id


# ---- picks

_POISON_INDEX = -77_777

_TOP_K = ((3, 100, 512), (7, 3001, 512), (5, 8192, 1024), (3, 20000, 2048), (2, 32768, 1), (3, 70000, 512))
"""(rows, columns, k)."""

_MANY_TOP_K = (
    (3, 900, 512),
    (3, 1500, 512),
    (3, 5000, 512),
    (3, 6000, 512),
    (3, 8000, 512),
    (3, 12000, 512),
    (3, 16000, 512),
    (3, 24000, 512),
    (3, 100000, 512),
    (3, 530000, 512),
    (130, 700, 512),
    (130, 1500, 512),
    (130, 3000, 512),
    (130, 6000, 512),
    (130, 8000, 700),
    (130, 9000, 700),
    (130, 13000, 700),
    (140, 17000, 2100),
    (140, 33000, 512),
    (264, 700, 512),
    (264, 1500, 512),
    (264, 4100, 512),
    (264, 5300, 512),
    (264, 9000, 512),
    (17, 40000, 512),
    (17, 140000, 1024),
    (31, 25000, 1024),
    (31, 40000, 512),
    (31, 270000, 512),
    (1030, 300, 512),
)
"""The same, for kernels that others are too few or too narrow for."""


def _scores(rows: int, columns: int) -> torch.Tensor:
    """Random scores, every bit pattern, few levels, nothing but NaN: each in some row."""
    g = torch.Generator().manual_seed(columns)
    scores = torch.randn(rows, columns + 1, generator=g)[:, 1:]
    bits = torch.randint(-(2**31), 2**31, scores[1::4].shape, generator=g, dtype=torch.int64)
    scores[1::4] = bits.int().view(torch.float32)
    scores[2::4] = torch.randint(-1, 3, scores[2::4].shape, generator=g) * 1.0
    scores[3::4] = torch.nan
    return scores


def _out(rows: int, k: int) -> torch.Tensor:
    return torch.full((rows + 1, k + 3), _POISON_INDEX, dtype=torch.int32)


def _name(rows: int, columns: int, k: int) -> str:
    return f"{k} of {columns} columns, {rows} rows"


def top_k_prefill() -> Iterator[Example]:
    """top_k_per_row_prefill(logits, row_starts, row_ends, out, num_rows, k, use_pdl)"""
    for rows, columns, k in _TOP_K + _MANY_TOP_K:
        starts = torch.arange(rows, dtype=torch.int32) * 5 - 2
        ends = torch.tensor([columns, columns - 1, columns + 9, k + 3, columns // 2, -1, 2**31 - 1]).int()
        ends = ends.repeat(-(-rows // 7))[:rows]
        results = _out(rows, k), rows, k
        yield Example(_name(rows, columns, k), (_scores(rows, columns), starts, ends, *results, rows % 2 == 0))


def soak_top_k() -> Iterator[Example]:
    """top_k_per_row_prefill of rows that clusters share: as many as run at a time, and more."""
    for rows, columns, k in ((14, 50000, 1024), (30, 40000, 512), (20, 530000, 512)):
        starts = torch.arange(rows, dtype=torch.int32) * 5
        ends = torch.full((rows,), columns, dtype=torch.int32)
        yield Example(_name(rows, columns, k), (_scores(rows, columns), starts, ends, _out(rows, k), rows, k, True))


def _table(requests: int, columns: int, page_rows: int) -> torch.Tensor:
    """Too narrow for the last columns, with pages that do not exist or whose rows int32 cannot number."""
    width = max(columns * 4 // 5 // page_rows, 1)
    g = torch.Generator().manual_seed(columns)
    table = torch.randint(-2, 2**31 // page_rows, (requests, width + 2), generator=g)[:, 1:-1].int()
    table[:, ::5] = 2**31 - 1
    return table


def all_visible() -> Iterator[Example]:
    """all_visible_entries(visible, out, slot_block_table, slot_rows_per_page)"""
    visible = torch.tensor([0, 512, 3, -5, 600, 511, 77, 2**31 - 1], dtype=torch.int32).view(4, 2)
    for k in (512, 7):
        for page_rows in (0, 64, 3):
            table = _table(4, 512, page_rows) if page_rows else None
            yield Example(f"{k} columns, pages of {page_rows}", (visible, _out(8, k)[:8, 1:-2], table, page_rows))


def top_k_decode() -> Iterator[Example]:
    """top_k_per_row_decode(logits, seq_lens, out, num_rows, k, slot_block_table, slot_rows_per_page, use_pdl)"""
    for rows, columns, k in _TOP_K:
        lengths = torch.tensor([columns, columns - 1, columns // 2, k + 1, 0, columns + 5, -7, 1]).int().view(4, 2)
        for page_rows in (0, 64, 3):
            table = _table(4, columns, page_rows) if page_rows else None
            results = _out(rows, k), rows, k
            name = _name(rows, columns, k) + f", pages of {page_rows}" * (page_rows > 0)
            yield Example(name, (_scores(rows, columns), lengths, *results, table, page_rows, page_rows != 3))


def picked_keys() -> Iterator[Example]:
    """top_k_keys(scores, picks, entries_per_page, ranks, rank, out)"""
    for rows, columns, k, page_rows, ranks in (
        (4, 700, 512, 64, 8),
        (9, 301, 77, 3, 2),
        (3, 40, 1, 1, 1),
        (2, 9, 9, 2**30, 3),
    ):
        g = torch.Generator().manual_seed(k)
        picks = torch.randint(-1, columns + 1, (rows, k + 3), generator=g).int()[:, 1:-2]
        picks[0, 0] = -(2**31)
        out = torch.full((rows + 1, k + 3), 77, dtype=torch.int64)[:rows, 1:-2]
        name = f"{rows} x {k} picks of {columns} columns, pages of {page_rows}"
        yield Example(name, (_scores(rows, columns), picks, page_rows, ranks, ranks // 2, out))


_MERGED = (
    (1, 3, 512, 0, "scores"),
    (2, 4, 512, 64, "levels"),
    (8, 6, 512, 64, "scores"),
    (8, 6, 512, 0, "bits"),
    (16, 4, 512, 0, "levels"),
    (64, 2, 512, 64, "bits"),
    (8, 2, 1024, 48, "scores"),
    (3, 2, 1024, 64, "bits"),
    (17, 2, 1024, 0, "levels"),
    (9, 2, 2048, 64, "bits"),
    (5, 4, 7, 3, "scores"),
    (5, 4, 7, 0, "levels"),
    (3, 2, 1, 64, "bits"),
)
"""(parts, rows, k, rows of a page or 0: no slots, kind of scores)"""


def merge_keys() -> Iterator[Example]:
    """merge_top_k_keys(keys, out, block_table, rows_per_page, ranks, rank, out_slots, out_lens)"""
    for parts, rows, k, page_rows, kind in _MERGED:
        keys, name = _merged_keys(parts, rows, k, kind), f"{parts} parts of {k} keys, {rows} rows, {kind}"
        out = _out(rows, k)[:rows, 1:-2]
        local: tuple[Any, ...] = None, 0, 1, 0, None, None
        if page_rows:
            table, slots, lens = _table(2, 4 * k, page_rows), _out(rows, k)[:rows, 1:-2], _out(0, rows)[0, 1:-2]
            local = table, page_rows, parts, parts // 2, slots, lens
            name += f", slots in pages of {page_rows}"
        yield Example(name, (keys, None if parts == 8 and page_rows else out, *local))


def _merged_keys(parts: int, rows: int, k: int, kind: str) -> torch.Tensor:
    """Keys of different entries, some of them empty, in every row; a row of few keys, and one of none."""
    g = torch.Generator().manual_seed(parts * k)
    shape = (rows, parts * k)
    entries = torch.rand(rows, 4 * parts * k, generator=g).argsort(dim=1)[:, : parts * k]
    scores = torch.randn(shape, generator=g)
    if kind == "levels":
        scores = torch.randint(-1, 2, shape, generator=g) * 0.5
    if kind == "bits":
        scores = torch.randint(-(2**31), 2**31, shape, generator=g).int().view(torch.float32)
        scores[:, ::5], scores[:, 1::5] = torch.nan, -torch.inf
        entries = entries + (2**31 - 4 * parts * k)
    keys = score_keys(scores, entries)
    empty = torch.iinfo(torch.int64).min
    keys[:, ::7] = empty
    # entries that int32 cannot name, and a key that is there twice
    keys[:, 3::31] = keys[:, 3::31] & ~(1 << 31)
    keys[:, 1::37] = keys[:, :1] if kind == "scores" else empty
    keys[1 % rows, max(k // 2, 1) :] = empty
    keys[rows - 1] = empty if kind == "levels" else keys[rows - 1]
    keys = keys.view(rows, parts, k).transpose(0, 1)
    wide = torch.full((parts, rows + 1, k + 2), 2**62, dtype=torch.int64)[:, :rows, :k]
    return wide.copy_(keys)


# ---- scores

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
    (33, 32, 515, 0, True),
)
"""(rows, heads, keys, columns of the compressed form, whether it is MXFP4)"""

_FP8, _MXFP4, _WIDE = (fmt.id for fmt in (INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE))

_PAGED = (
    (1, 1, 64, 64, _FP8),
    (5, 1, 64, 64, _FP8),
    (3, 2, 64, 128, _FP8),
    (4, 3, 48, 16, _FP8),
    (3, 3, 64, 64, _FP8),
    (2, 4, 64, 64, _FP8),
    (3, 7, 16, 8, _FP8),
    (4, 2, 64, 12, _FP8),
    (5, 1, 64, 64, _MXFP4),
    (3, 2, 64, 64, _MXFP4),
    (2, 3, 64, 64, _MXFP4),
    (3, 4, 64, 64, _MXFP4),
    (4, 2, 32, 20, _WIDE),
    *((2, rows, 32, 64, fmt) for rows in (1, 2, 3, 4) for fmt in (_FP8, _MXFP4)),
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


def _poisoned_scores(rows: int, columns: int) -> torch.Tensor:
    out = torch.empty(rows + 1, columns + 6)
    raw_memory(out).fill_(_POISON)
    return out[:rows, 3:-3]


def logits() -> Iterator[Example]:
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
            out = _poisoned_scores(rows, columns or keys)
            name = f"{rows} rows, {heads} heads, {keys} keys, {columns} columns" + ", MXFP4" * mxfp4 + ", clean" * clean
            arguments = (*inputs, torch.randn(rows, heads, generator=g), *windows, clean, columns, out)
            yield Example(name, arguments, _agree_contiguous)


def paged_logits() -> Iterator[Example]:
    """paged_mqa_logits(q, q_scale, kv_cache, weights, context_lens, block_tables, max_model_len, clean_logits,
    kv_format, out, use_pdl)"""
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
            arguments = (*inputs, _poisoned_scores(requests * next_n, columns), clean)
            yield Example(name + ", clean, a dependent launch" * clean, arguments, _agree_paged)


def _agree_contiguous(got: Sequence[Any], want: Sequence[Any]) -> str:
    q, q_scale, k, scale, weights, start = want[:6]
    magnitude = _magnitude(q, q_scale, k, scale, weights)
    if want[8]:
        key = start.long()[:, None] + torch.arange(want[9].shape[1])
        magnitude = magnitude.gather(1, key.clamp(0, k.shape[0] - 1))
    return _agree_scores(got, want, magnitude)


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
    return _agree_scores(got, want, magnitude)


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


def _agree_scores(got: Sequence[Any], want: Sequence[Any], magnitude: torch.Tensor) -> str:
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
    same = all(same_bytes(raw_memory(x[9]), raw_memory(y[9])) for x, y in [cleared])
    return "" if same else "memory outside of the scores was written"


# ---- scores and picks in one

# codes, weights and scales are small powers of two and zero, so that scores are exact however they are summed, and most
# of them equal others: the picks must be the reference's
_OUT = 8
"""Position of the picks in both schemas."""

_SCORE_PREFILL = ((1, 64, 900, 0, 512, 1), (37, 64, 1300, 0, 512, 9), (30, 32, 700, 300, 7, 4), (9, 64, 400, 0, 512, 0))
"""(rows, heads, keys, columns of the compressed form, k, rows that fit into the workspace)"""

_SCORE_DECODE = ((1, 1, 64, 64, 64, 1), (9, 1, 64, 64, 100, 4), (5, 2, 64, 128, 512, 2), (4, 3, 48, 16, 1, 4))
"""(requests, rows of each, heads, keys of a page, k, requests that fit into the workspace)"""


def _choice(g: torch.Generator, values: list[float], *shape: int) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), shape, generator=g)]


def _small_codes(g: torch.Generator, *shape: int) -> torch.Tensor:
    return _choice(g, [0.0, 0.0, 0.0, 1.0, -1.0, 2.0], *shape).to(torch.float8_e4m3fn)


def _results(rows: int, k: int, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = torch.full((rows + 1, k + 3), _POISON_INDEX, dtype=torch.int32)[:rows, 1 : k + 1]
    return out, torch.full((size // 4,), torch.nan) if size else None


def score_top_k_prefill() -> Iterator[Example]:
    """score_top_k_prefill(q, q_scale, k, k_scale, weights, start, end, max_seqlen_k, out, workspace)"""
    for rows, heads, keys, columns, k, fit in _SCORE_PREFILL:
        g = torch.Generator().manual_seed(rows + keys)
        scale = _choice(g, [0.5, 1.0, 2.0], keys)
        start = torch.randint(-9, keys + 9, (rows,), generator=g)
        end = start + torch.randint(-9, keys + 9, (rows,), generator=g)
        start[0], end[0] = 0, keys
        inputs = _small_codes(g, rows, heads, INDEX_DIM), None, _small_codes(g, keys, INDEX_DIM), scale
        weights = _choice(g, [0.0, 1.0, -1.0, 0.5], rows, heads)
        results = _results(rows, k, fit * row_bytes(columns or keys))
        name = f"{rows} rows, {heads} heads, {k} of {keys} keys, {columns} columns"
        yield Example(name, (*inputs, weights, start.int(), end.int(), columns, *results), _agree_indices)


def score_top_k_decode() -> Iterator[Example]:
    """score_top_k_decode(q, q_scale, kv_cache, weights, context_lens, block_tables, max_model_len, kv_format, out,
    workspace, slot_block_table, slot_rows_per_page)"""
    for requests, next_n, heads, page_rows, k, fit in _SCORE_DECODE:
        g = torch.Generator().manual_seed(requests + next_n)
        pages, columns = 40, 700
        pool = INDEXER_FP8.allocate(pages, page_rows)
        slots = torch.arange(pages * page_rows)
        scale = _choice(g, [0.5, 1.0, 2.0], len(slots), 1).view(torch.uint8)
        INDEXER_FP8.write_fields(
            pool, page_rows, slots, _small_codes(g, len(slots), INDEX_DIM).view(torch.uint8), scale
        )
        table = torch.randint(-2, pages + 2, (requests, 600 // page_rows), generator=g).int()
        lens = torch.randint(-9, columns + 9, (requests, next_n), generator=g).int()
        lens[0, 0] = 640
        inputs = _small_codes(g, requests, next_n, heads, INDEX_DIM), None, pool
        weights = _choice(g, [0.0, 1.0, -1.0, 0.5], requests * next_n, heads)
        places: tuple[Any, int] = (table.flip(1) + 7, page_rows // 2) if next_n == 2 else (None, 0)
        results = _results(requests * next_n, k, fit * next_n * row_bytes(columns))
        name = f"{requests} requests of {next_n} rows, {heads} heads, {k} picks, pages of {page_rows}"
        yield Example(name, (*inputs, weights, lens, table, columns, INDEXER_FP8.id, *results, *places), _agree_indices)


def _agree_indices(got: Sequence[Any], want: Sequence[Any]) -> str:
    return _agree_picks(got[_OUT], want[_OUT])


def _agree_picks(picks: torch.Tensor, expected: torch.Tensor) -> str:
    """ "", or which row of picks differs. The workspace may hold anything."""
    if same_bytes(raw_memory(picks), raw_memory(expected)):
        return ""
    rows = (picks != expected).any(1).nonzero()[:, 0].tolist()
    return f"out: other picks in rows {rows[:5]}" if rows else "memory outside of the picks was written"


# ---- candidate blocks

_BLOCKS = (
    (1, 1, 1300, 64),
    (5, 2, 9000, 256),
    (7, 1, 40000, 2048),
    (3, 1, 500, 256),
    (70, 1, 20000, 512),
    (16, 1, 530_000, 2048),
)
"""(requests, rows of each, columns, blocks)"""


def select_blocks() -> Iterator[Example]:
    """select_candidate_blocks(logits, seq_lens, out, workspace)"""
    for requests, next_n, columns, blocks in _BLOCKS:
        rows = requests * next_n
        g = torch.Generator().manual_seed(rows + columns)
        lens = torch.randint(-9, columns + 9, (requests, next_n), generator=g).int()
        lens[0, 0] = columns - 3
        workspace = torch.full((rows * block_row_bytes(columns) // 4,), torch.nan)
        name = f"{blocks} blocks of {columns} columns, {rows} rows"
        scores = torch.full((rows, columns // 4 * 4 + 8), torch.inf)[:, :columns].copy_(_scores(rows, columns))
        yield Example(name, (scores, lens, _out(rows, blocks)[:rows, 1:-2], workspace), _agree_blocks)


def _agree_blocks(got: Sequence[Any], want: Sequence[Any]) -> str:
    return _agree_picks(got[2], want[2])


def candidates_of(g: torch.Generator, lengths: torch.Tensor, blocks: int) -> torch.Tensor:
    """int32 [rows, blocks]: random blocks of rows that see so many keys, the newest among them."""
    found = torch.full((lengths.numel(), blocks), -1, dtype=torch.int32)
    for row, length in enumerate(lengths.clamp(min=0).reshape(-1).tolist()):
        count = -(-length // CANDIDATE_BLOCK)
        if count:
            some = torch.randperm(count - 1, generator=g)[: blocks - 1]
            found[row, : some.shape[0] + 1] = torch.cat([some.sort().values, torch.tensor([count - 1])]).int()
    return found


_CANDIDATES_DECODE = (
    (1, 1, 32, 64, 20, 16, 1, _FP8),
    (9, 1, 32, 64, 100, 32, 4, _FP8),
    (5, 2, 64, 32, 512, 80, 2, _FP8),
    (4, 6, 32, 16, 16, 8, 4, _FP8),
    (40, 1, 32, 64, 64, 128, 40, _FP8),
    (9, 1, 32, 64, 100, 32, 4, _MXFP4),
    (4, 6, 64, 32, 64, 48, 4, _MXFP4),
)
"""(requests, rows of each, heads, keys of a page, k, candidate blocks, requests that fit into the workspace, format)"""


def _small_mxfp4(g: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 0, 1, -1 and 2, and scales 1/2, 1 and 2."""
    codes = torch.tensor([0, 0, 0, 2, 10, 4], dtype=torch.uint8)[torch.randint(0, 6, (*shape, INDEX_DIM), generator=g)]
    scales = torch.randint(126, 129, (*shape, 4), generator=g, dtype=torch.uint8)
    return numerics.pack_nibbles(codes), scales.view(torch.int32)[..., 0]


def score_candidates_decode() -> Iterator[Example]:
    """score_candidates_decode(q, q_scale, kv_cache, weights, context_lens, block_tables, candidates, max_model_len,
    kv_format, out, workspace)"""
    for requests, next_n, heads, page_rows, k, blocks, fit, kv_format in _CANDIDATES_DECODE:
        g = torch.Generator().manual_seed(requests + next_n)
        pages, columns = 40, 1500
        fmt = FORMATS[kv_format]
        pool = fmt.allocate(pages, page_rows)
        slots = torch.arange(pages * page_rows)
        q: tuple[torch.Tensor, torch.Tensor | None]
        if kv_format == _FP8:
            q = _small_codes(g, requests, next_n, heads, INDEX_DIM), None
            codes = _small_codes(g, len(slots), INDEX_DIM).view(torch.uint8)
            scale = _choice(g, [0.5, 1.0, 2.0], len(slots), 1).view(torch.uint8)
        else:
            q = _small_mxfp4(g, requests, next_n, heads)
            codes, words = _small_mxfp4(g, len(slots))
            scale = words[:, None].view(torch.uint8)
        fmt.write_fields(pool, page_rows, slots, codes, scale)
        table = torch.randint(-2, pages + 2, (requests, 1400 // page_rows), generator=g).int()
        lens = torch.randint(-9, columns + 9, (requests, next_n), generator=g).int()
        lens[0, 0] = 1203
        candidates = candidates_of(g, lens.clamp(max=columns), blocks)
        weights = _choice(g, [0.0, 1.0, -1.0, 0.5], requests * next_n, heads)
        results = _results(requests * next_n, k, fit * next_n * row_bytes(candidate_columns(blocks)))
        rows = f"{requests} requests of {next_n} rows"
        name = f"{rows}, {heads} heads, {k} picks of {blocks} blocks, pages of {page_rows}, {kv_format}"
        arguments = (*q, pool, weights, lens, table, candidates, columns, kv_format, *results)
        yield Example(name, arguments, _agree_candidates)


_CANDIDATES_PREFILL = (
    (1, 32, 900, 0, 64, 16, 1, _FP8),
    (37, 64, 1300, 0, 100, 40, 37, _FP8),
    (9, 32, 700, 300, 7, 4, 9, _FP8),
    (50, 32, 1500, 900, 60, 64, 13, _FP8),
    (37, 32, 1300, 0, 100, 40, 37, _MXFP4),
    (9, 64, 700, 300, 20, 16, 4, _MXFP4),
)
"""(rows, heads, keys, columns of the compressed form, k, candidate blocks, rows that fit into the workspace, format)"""


def score_candidates_prefill() -> Iterator[Example]:
    """score_candidates_prefill(q, q_scale, k, k_scale, weights, start, end, candidates, max_seqlen_k, out,
    workspace)"""
    for rows, heads, keys, columns, k, blocks, fit, kv_format in _CANDIDATES_PREFILL:
        g = torch.Generator().manual_seed(rows + keys)
        start = torch.randint(0, keys // 2, (rows,), generator=g)
        end = start + torch.randint(-9, keys + 9, (rows,), generator=g)
        start[0], end[0] = 0, keys
        start[-1] -= 13 * (rows > 1)
        lengths = end.clamp(max=keys) - start
        candidates = candidates_of(g, lengths.clamp(max=columns) if columns else lengths, blocks)
        inputs: tuple[torch.Tensor | None, ...]
        if kv_format == _FP8:
            scale = _choice(g, [0.5, 1.0, 2.0], keys)
            inputs = _small_codes(g, rows, heads, INDEX_DIM), None, _small_codes(g, keys, INDEX_DIM), scale
        else:
            inputs = *_small_mxfp4(g, rows, heads), *_small_mxfp4(g, keys)
        weights = _choice(g, [0.0, 1.0, -1.0, 0.5], rows, heads)
        results = _results(rows, k, fit * row_bytes(candidate_columns(blocks)))
        name = (
            f"{rows} rows, {heads} heads, {k} picks of {blocks} blocks of {keys} keys, {columns} columns, {kv_format}"
        )
        arguments = (*inputs, weights, start.int(), end.int(), candidates, columns, *results)
        yield Example(name, arguments, _agree_candidates)


def _agree_candidates(got: Sequence[Any], want: Sequence[Any]) -> str:
    return _agree_picks(got[9], want[9])


SOAK = {"top_k_per_row_prefill": soak_top_k}

EXAMPLES = {
    "fused_indexer_q_rope_quant_fp8": query_fp8,
    "fused_indexer_q_rope_quant_mxfp4": query_mxfp4,
    "cp_gather_indexer_k_quant_cache": gather,
    "all_visible_entries": all_visible,
    "top_k_per_row_prefill": top_k_prefill,
    "top_k_per_row_decode": top_k_decode,
    "top_k_keys": picked_keys,
    "merge_top_k_keys": merge_keys,
    "mqa_logits": logits,
    "paged_mqa_logits": paged_logits,
    "score_candidates_decode": score_candidates_decode,
    "score_candidates_prefill": score_candidates_prefill,
    "score_top_k_prefill": score_top_k_prefill,
    "score_top_k_decode": score_top_k_decode,
    "select_candidate_blocks": select_blocks,
}
