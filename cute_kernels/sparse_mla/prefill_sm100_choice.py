"""When Blackwell's own kernels of prefill's ops take a call; the portable ones take the others."""

from __future__ import annotations

from typing import Any

from cute_kernels.runtime import trust
from cute_kernels.runtime.arch import BLACKWELL

MAP_STRIDE = 2**40
"""Strides of a tensor that copies know by a descriptor are smaller, in bytes."""


def is_own(op: str, arch: str, device_index: int, why_not: str) -> bool:
    """Whether the own kernel runs. why_not: what `unmapped` or `gathered.ungathered` say of the call's tensors."""
    return arch in BLACKWELL and not why_not and trust.is_trusted(op, device_index)


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
