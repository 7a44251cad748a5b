"""Argument checks that the index builders share."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.formats import round_up
from cute_kernels.runtime.checks import Checker

POSITION_DTYPES = (torch.int64, torch.int32)


def check_rows(c: Checker, argument: str, value: Any, dtype: torch.dtype, rows: Any, optional: bool = False) -> None:
    """A per-token vector that may be longer than the rows of this call (the step's whole vector)."""
    c.tensor(argument, value, dtype, (None,), optional=optional)
    if value is not None:
        c.require(value.shape[0] >= rows, argument, f"at least {rows} elements", value.shape[0])


def check_pages(c: Checker, table: str, block_table: Any, size: str, block_size: int, optional: bool = False) -> None:
    """A block table and the rows of its pages."""
    c.tensor(table, block_table, torch.int32, (None, None), optional=optional)
    if block_table is not None:
        c.require(block_size > 0, size, "a positive number", block_size)


def check_window(c: Checker, window_size: int, compress_ratio: int, topk: int) -> None:
    """Window size, ratio and top-k; without top-k the ratio does not matter."""
    c.require(window_size > 0, "window_size", "a positive number", window_size)
    c.require(topk >= 0, "topk", "a number >= 0", topk)
    c.require(compress_ratio >= 0, "compress_ratio", "a number >= 0", compress_ratio)
    c.require(compress_ratio > 0 or topk == 0, "compress_ratio", "a positive number where topk > 0", compress_ratio)


def check_batch(c: Checker, query_start_loc: Any, seq_lens: Any) -> None:
    """The row range and the context length of R requests."""
    c.tensor("seq_lens", seq_lens, torch.int32, ("R",))
    c.tensor("query_start_loc", query_start_loc, torch.int32, (None,))
    have, want = query_start_loc.shape[0], seq_lens.shape[0] + 1
    c.require(have == want, "query_start_loc", f"R + 1 = {want} elements, R as in seq_lens", have)


def combined_width(topk: int, window_size: int) -> int:
    """Columns of a combined row: what sparse prefill attention reads has a multiple of 128 columns."""
    return round_up(max(topk, 0) + max(window_size, 0), 128)


def mixed_width(window_size: int, topk: int, decode_compressed_indices: torch.Tensor | None) -> int:
    """Columns of a mixed row: the window, then room for both kinds of compressed indices in multiples of 16 bytes."""
    decode_width = 0 if decode_compressed_indices is None else decode_compressed_indices.shape[-1]
    return max(window_size, 0) + round_up(max(topk, decode_width, 0), 4)
