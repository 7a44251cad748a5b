"""Which caches Blackwell's gathering copies can address: their pages have to be one tensor of equally long rows."""

from __future__ import annotations

from typing import Any

MAP_ROWS = 2**31
"""Rows that copies gather from have int32 numbers."""


def ungathered(name: str, cache: Any, row_elements: int) -> str:
    """Why rows of so many elements cannot be gathered from a cache [pages, rows, ...], or nothing.

    Its pages have to begin where a row could that is as long as theirs, and may not overlap. Of a single page, too, the
    stride counts: it tells how many rows there are.
    """
    step = cache.stride(0)
    if cache.numel() == 0:
        return f"{name} must have rows, got shape {tuple(cache.shape)}"
    if cache.data_ptr() % 16:
        return f"{name} must be 16-byte aligned, got address {cache.data_ptr():#x}"
    least = cache.shape[1] * row_elements
    if step % row_elements or step < least:
        return f"{name}: expected a page stride that is a multiple of {row_elements} and at least {least}, got {step}"
    rows = cache.shape[0] * (step // row_elements)
    if rows >= MAP_ROWS:
        return f"{name} must be less than 2^31 rows of {row_elements} long, got {rows}"
    return ""
