# SPDX-License-Identifier: Apache-2.0
"""Tensor arguments as plain numbers, for kernels that compute their addresses themselves, in 64 bits."""

from __future__ import annotations

from typing import Any

from cutlass import Int64


def address(tensor: Any) -> Any:
    """Address of the first element, int64."""
    return tensor.iterator.toint()


def stride_bytes(tensor: Any, axis: int) -> Any:
    """Bytes from one index of `axis` to the next, int64."""
    return Int64(tensor.stride[axis]) * (tensor.element_type.width // 8)


def length(tensor: Any, axis: int) -> Any:
    """Size of `axis`."""
    return tensor.shape[axis]
