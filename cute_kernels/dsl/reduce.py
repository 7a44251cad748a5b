# SPDX-License-Identifier: Apache-2.0
"""Reductions over the lanes of a warp, in a fixed order: the same inputs give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.dsl import ptx


def square_sum(values: Any) -> Any:
    """fp32 sum of the squares of a lane's values, one after the other, each product fused with its sum."""
    total = ptx.mul_rn(values[0], values[0])
    for value in values[1:]:
        total = ptx.fma_rn(value, value, total)
    return total


def pairwise(values: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """One of a lane's values, a power of two of them, combined by pairs."""
    while len(values) > 1:
        values = [combine(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def over_quad(value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """What the four neighbouring lanes have that share a row of a tensor core's result, combined, in each of them. All
    lanes must call."""
    for offset in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@cute.jit
def exchange_in_quad(lane: Any, words: Sequence[Any]) -> Any:
    """Word j of lane i of four neighbours becomes word i of lane j."""
    words = list(words)
    for bit in range_constexpr(2):
        distance = 1 << bit
        is_upper = lane & distance != 0
        for low in range_constexpr(4):
            if const_expr(low & distance == 0):
                high = low + distance
                sent = words[low] if is_upper else words[high]
                got = cute.arch.shuffle_sync_bfly(sent, offset=distance)
                words[low], words[high] = (got if is_upper else words[low]), (words[high] if is_upper else got)
    return tuple(words)


def lanes_sum(value: Any, lanes: int = 32) -> Any:
    """fp32 sum over groups of `lanes` neighbouring lanes (a power of two), in every lane. All lanes must call."""
    step = 1
    while step < lanes:
        value = ptx.add_rn(value, cute.arch.shuffle_sync_bfly(value, step))
        step *= 2
    return value


@cute.jit
def halve_sums(values: Sequence[Any], lane: Any, bit: cutlass.Constexpr, apart: cutlass.Constexpr) -> Any:
    """fp32 sums of this lane's values and those of the lane whose number differs in `bit`, half of them: of two that
    are `apart`, the first in the lanes where that bit is clear, and the second in the others. All lanes must call."""
    is_upper = lane & (1 << bit) != 0
    kept = []
    for k in range_constexpr(len(values)):
        if const_expr(k // apart % 2 == 0):
            sent = values[k] if is_upper else values[k + apart]
            mine = values[k + apart] if is_upper else values[k]
            kept.append(ptx.add_rn(mine, cute.arch.shuffle_sync_bfly(sent, 1 << bit)))
    return kept


@cute.jit
def lanes_prefix(number: Any) -> Any:
    """int32 sum over this lane and those before it. All lanes must call."""
    lane = cute.arch.lane_idx()
    for step in (1, 2, 4, 8, 16):
        before = cute.arch.shuffle_sync_up(number, step, mask_and_clamp=0)
        number += before if lane >= step else Int32(0)
    return number


def lanes_max(value: Any, lanes: int = 32) -> Any:
    """fp32 maximum over groups of `lanes` neighbouring lanes, in every lane; NaN loses against a number."""
    step = 1
    while step < lanes:
        value = ptx.max_f32(value, cute.arch.shuffle_sync_bfly(value, step))
        step *= 2
    return value


def lanes_max_bf16x2(value: Any, lanes: int = 32) -> Any:
    """Maxima of both halves of a bf16 pair over groups of `lanes` neighbouring lanes, in every lane."""
    step = 1
    while step < lanes:
        value = ptx.max_bf16x2(value, cute.arch.shuffle_sync_bfly(value, step))
        step *= 2
    return value
