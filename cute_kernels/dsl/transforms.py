# SPDX-License-Identifier: Apache-2.0
"""Rotation of column pairs and the Sylvester-Hadamard transform of 128 columns on the device, bit for bit what
numerics.rotate and numerics.hadamard define."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int64

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


# ---- Hadamard

COLUMNS = 128
SCALE = COLUMNS**-0.5


def hadamard(values: list[Any], lane: Any, run: int | None = None) -> list[Any]:
    """Transformed fp32 columns of a lane, where 128 / n neighbouring lanes hold a row and each has n of its columns.

    Butterflies of stride 1, 2, ... 64, each sum rounded by itself, then one multiply. All lanes of the warp must call.

    values   n of them, a power of two from 4 to 128
    lane     number of the thread in its warp
    run      how many columns of a lane are neighbours, a power of two: lane l of a row has columns l * run .. and the
             next, the same 128 / n * run columns further on, and so forth. None: all n are neighbours
    """
    run = len(values) if run is None else run
    lanes = COLUMNS // len(values)
    stride = 1
    while stride < COLUMNS:
        if stride < run:
            values = _within_a_lane(values, stride)
        elif stride < run * lanes:
            values = _between_lanes(values, lane, stride // run)
        else:
            values = _within_a_lane(values, stride // lanes)
        stride *= 2
    return [ptx.mul_rn(value, Float32(SCALE)) for value in values]


def _within_a_lane(values: list[Any], step: int) -> list[Any]:
    return [
        ptx.sub_rn(values[i - step], value) if i & step else ptx.add_rn(value, values[i + step])
        for i, value in enumerate(values)
    ]


def _between_lanes(values: list[Any], lane: Any, step: int) -> list[Any]:
    """The lower lane keeps the sum, the upper one lower - upper. The product with 1 or -1 is exact: it rounds once."""
    sign = (((lane & step) << (32 - step.bit_length())) | 0x3F800000).bitcast(Float32)
    return [ptx.fma_rn(value, sign, cute.arch.shuffle_sync_bfly(value, step)) for value in values]
