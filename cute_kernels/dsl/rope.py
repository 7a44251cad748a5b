# SPDX-License-Identifier: Apache-2.0
"""Rotation of column pairs on the device, bit for bit what numerics.rotate defines."""

from __future__ import annotations

from typing import Any

from cutlass import Int64

from cute_kernels.dsl import ptx

HALF_TABLE_BYTES = 128
"""From a position's cosines to its sines: 32 fp32."""


def rotate_pair(even: Any, odd: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """(even * cos - odd * sin, odd * cos + even * sin): products and sums rounded one by one, never fused."""
    return (
        ptx.sub_rn(ptx.mul_rn(even, cos), ptx.mul_rn(odd, sin)),
        ptx.add_rn(ptx.mul_rn(odd, cos), ptx.mul_rn(even, sin)),
    )


def rotate_pair_back(even: Any, odd: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """The inverse rotation: (even * cos + odd * sin, odd * cos - even * sin)."""
    return (
        ptx.add_rn(ptx.mul_rn(even, cos), ptx.mul_rn(odd, sin)),
        ptx.sub_rn(ptx.mul_rn(odd, cos), ptx.mul_rn(even, sin)),
    )


def table_row(position: Any, rows: Any) -> Any:
    """int64 row of a table of `rows` rows for an int64 position: a position outside takes its nearest row."""
    top = Int64(rows) - 1
    bounded = ptx.min_s64(position, top)
    return ptx.max_s64(bounded, Int64(0))
