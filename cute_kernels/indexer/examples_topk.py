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


def decode() -> Iterator[Example]:
    """top_k_per_row_decode(logits, seq_lens, out, num_rows, k)"""
    for rows, columns, k in _SHAPES:
        lengths = torch.tensor([columns, columns - 1, columns // 2, k + 1, 0, columns + 5, -7, 1]).int().view(4, 2)
        yield Example(_name(rows, columns, k), (_scores(rows, columns), lengths, _out(rows, k), rows, k))


EXAMPLES = {"top_k_per_row_prefill": prefill, "top_k_per_row_decode": decode}
