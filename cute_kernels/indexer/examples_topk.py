"""Calls that the kernels of the picks of a row are verified with."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cute_kernels.runtime.verify import Example

_POISON = -77_777

_SHAPES = ((3, 100, 512), (7, 3001, 512), (5, 8192, 1024), (3, 20000, 2048), (2, 32768, 1), (3, 70000, 512))
"""(rows, columns, k)."""


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
    return torch.full((rows + 1, k + 3), _POISON, dtype=torch.int32)


def _name(rows: int, columns: int, k: int) -> str:
    return f"{k} of {columns} columns, {rows} rows"


def prefill() -> Iterator[Example]:
    """top_k_per_row_prefill(logits, row_starts, row_ends, out, num_rows, k)"""
    for rows, columns, k in _SHAPES:
        starts = torch.arange(rows, dtype=torch.int32) * 5 - 2
        ends = torch.tensor([columns, columns - 1, columns + 9, k + 3, columns // 2, -1, 2**31 - 1])[:rows].int()
        yield Example(_name(rows, columns, k), (_scores(rows, columns), starts, ends, _out(rows, k), rows, k))


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


def decode() -> Iterator[Example]:
    """top_k_per_row_decode(logits, seq_lens, out, num_rows, k, slot_block_table, slot_rows_per_page)"""
    for rows, columns, k in _SHAPES:
        lengths = torch.tensor([columns, columns - 1, columns // 2, k + 1, 0, columns + 5, -7, 1]).int().view(4, 2)
        for page_rows in (0, 64, 3):
            table = _table(4, columns, page_rows) if page_rows else None
            results = _out(rows, k), rows, k
            name = _name(rows, columns, k) + f", pages of {page_rows}" * (page_rows > 0)
            yield Example(name, (_scores(rows, columns), lengths, *results, table, page_rows))


EXAMPLES = {"all_visible_entries": all_visible, "top_k_per_row_prefill": prefill, "top_k_per_row_decode": decode}
