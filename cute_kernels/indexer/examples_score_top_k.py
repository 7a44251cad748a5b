"""Calls that the kernels of scores and picks in one are verified with.

Codes, weights and scales are small powers of two and zero, so that scores are exact however they are summed, and most
of them equal others: the picks must be the reference's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from cute_kernels.formats import INDEX_DIM, INDEXER_FP8
from cute_kernels.indexer.chunks import row_bytes
from cute_kernels.runtime.verify import Example, raw_memory

_POISON = -77_777

_OUT = 8
"""Position of the picks in both schemas."""

_CONTIGUOUS = ((1, 64, 900, 0, 512, 1), (37, 64, 1300, 0, 512, 9), (30, 32, 700, 300, 7, 4), (9, 64, 400, 0, 512, 0))
"""(rows, heads, keys, columns of the compressed form, k, rows that fit into the workspace)"""

_PAGED = ((1, 1, 64, 64, 64, 1), (9, 1, 64, 64, 100, 4), (5, 2, 64, 128, 512, 2), (4, 3, 48, 16, 1, 4))
"""(requests, rows of each, heads, keys of a page, k, requests that fit into the workspace)"""


def _choice(g: torch.Generator, values: list[float], *shape: int) -> torch.Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), shape, generator=g)]


def _codes(g: torch.Generator, *shape: int) -> torch.Tensor:
    return _choice(g, [0.0, 0.0, 0.0, 1.0, -1.0, 2.0], *shape).to(torch.float8_e4m3fn)


def _results(rows: int, k: int, size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = torch.full((rows + 1, k + 3), _POISON, dtype=torch.int32)[:rows, 1 : k + 1]
    return out, torch.full((size // 4,), torch.nan) if size else None


def contiguous() -> Iterator[Example]:
    """score_top_k_prefill(q, q_scale, k, k_scale, weights, start, end, max_seqlen_k, out, workspace)"""
    for rows, heads, keys, columns, k, fit in _CONTIGUOUS:
        g = torch.Generator().manual_seed(rows + keys)
        scale = _choice(g, [0.5, 1.0, 2.0], keys)
        start = torch.randint(-9, keys + 9, (rows,), generator=g)
        end = start + torch.randint(-9, keys + 9, (rows,), generator=g)
        start[0], end[0] = 0, keys
        inputs = _codes(g, rows, heads, INDEX_DIM), None, _codes(g, keys, INDEX_DIM), scale
        weights = _choice(g, [0.0, 1.0, -1.0, 0.5], rows, heads)
        results = _results(rows, k, fit * row_bytes(columns or keys))
        name = f"{rows} rows, {heads} heads, {k} of {keys} keys, {columns} columns"
        yield Example(name, (*inputs, weights, start.int(), end.int(), columns, *results), _agree)


def paged() -> Iterator[Example]:
    """score_top_k_decode(q, q_scale, kv_cache, weights, context_lens, block_tables, max_model_len, kv_format, out,
    workspace, slot_block_table, slot_rows_per_page)"""
    for requests, next_n, heads, page_rows, k, fit in _PAGED:
        g = torch.Generator().manual_seed(requests + next_n)
        pages, columns = 40, 700
        pool = INDEXER_FP8.allocate(pages, page_rows)
        slots = torch.arange(pages * page_rows)
        scale = _choice(g, [0.5, 1.0, 2.0], len(slots), 1).view(torch.uint8)
        INDEXER_FP8.write_fields(pool, page_rows, slots, _codes(g, len(slots), INDEX_DIM).view(torch.uint8), scale)
        table = torch.randint(-2, pages + 2, (requests, 600 // page_rows), generator=g).int()
        lens = torch.randint(-9, columns + 9, (requests, next_n), generator=g).int()
        lens[0, 0] = 640
        inputs = _codes(g, requests, next_n, heads, INDEX_DIM), None, pool
        weights = _choice(g, [0.0, 1.0, -1.0, 0.5], requests * next_n, heads)
        places: tuple[Any, int] = (table.flip(1) + 7, page_rows // 2) if next_n == 2 else (None, 0)
        results = _results(requests * next_n, k, fit * next_n * row_bytes(columns))
        name = f"{requests} requests of {next_n} rows, {heads} heads, {k} picks, pages of {page_rows}"
        yield Example(name, (*inputs, weights, lens, table, columns, INDEXER_FP8.id, *results, *places), _agree)


def _agree(got: Sequence[Any], want: Sequence[Any]) -> str:
    """ "", or which row of picks differs. The workspace may hold anything."""
    picks, expected = got[_OUT], want[_OUT]
    if torch.equal(raw_memory(picks), raw_memory(expected)):
        return ""
    rows = (picks != expected).any(1).nonzero()[:, 0].tolist()
    return f"out: other picks in rows {rows[:5]}" if rows else "memory outside of the picks was written"


EXAMPLES = {"score_top_k_prefill": contiguous, "score_top_k_decode": paged}
