"""When Blackwell's own kernels take a call, as far as its tensors go; mma_sync's take the others."""

from __future__ import annotations

from typing import Any

from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL

MAP_STRIDE = 2**40
"""Strides of a tensor that copies know by a descriptor are smaller, in bytes."""

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


def unmapped(name: str, tensor: Any, axes: tuple[int, ...]) -> str:
    """Why no descriptor can tell of a tensor with dense rows and those other axes, or nothing."""
    strides = [tensor.stride(axis) * tensor.element_size() for axis in axes]
    if tensor.numel() == 0:
        return f"{name} must have elements"
    if tensor.data_ptr() % 16 or any(stride % 16 or not 0 < stride < MAP_STRIDE for stride in strides):
        return (
            f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
            f"{tuple(tensor.stride())}"
        )
    return ""


def is_own(op: str, arch: str, device_index: int, why_not: str) -> bool:
    """Whether the own kernel runs. why_not: what `unmapped` or `ungathered` say of the call's tensors."""
    return arch in BLACKWELL and not why_not and trust.is_trusted(op, device_index)
