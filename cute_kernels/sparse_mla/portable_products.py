"""What a warp of the portable decode kernel computes in a step: its share of the scores, their softmax, columns of O.

Lane l of a warp has, with r = l // 4 and c = l % 4:

    q[m][s]    operand a of rows 16 m .. and columns 16 c + 4 s .. + 3 of the warp's 64, as `paired` has them
    o[m][j]    eight sums: rows 16 m + r and 8 further, columns 16 j + 4 c .. + 3; of two products, of even columns and
               of odd ones

See portable_operands.py on why.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.sparse_mla import portable_operands as operands
from cute_kernels.sparse_mla.portable_operands import Columns
from cute_kernels.sparse_mla.portable_plan import LANES
from cute_kernels.sparse_mla.softmax import GROWTH


@cute.jit
def share_scores(
    q: Any,
    target: Any,
    columns: Columns,
    kind: cutlass.Constexpr,
    warp: Any,
    lane: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Store the warp's share of Q K^T for a step.

    q        the lane's operands, [m][s][4]
    target   where the lane stores its share of row group 0 and keys 0 to 7
    kind     of the columns
    """
    tiles = const_expr(plan.rows // 16)
    at = columns.at + operands.keys_at(lane, kind)
    factors = operands.factors_of(columns, kind, warp, lane, plan.keys)
    words = operands.registers(kind)
    operands.put(words, operands.load_keys(at, kind))
    # two at a time are 1% faster on an H200, and spill
    for n in cutlass.range(plan.keys // 8, unroll=1):
        b = operands.key_operands(words, kind, factors, n, lane, plan)
        # ahead of the stores below, which loads do not overtake; behind the last keys there is something, too
        at += 8 * operands.key_bytes(kind)
        operands.put(words, operands.load_keys(at, kind))
        sums: list[Any] = [()] * tiles
        for s in range_constexpr(4):
            for m in range_constexpr(tiles):
                sums[m] = mma_sync.multiply(q.four((m * 4 + s) * 4), (b[2 * s], b[2 * s + 1]), sums[m])
        for m in range_constexpr(tiles):
            for side in range_constexpr(2):
                place = target + (2 * m + side) * plan.group_bytes
                ptx.store_shared_64(place, *sums[m][2 * side : 2 * side + 2])
        target += LANES * 8


@cute.jit
def accumulate(
    o: Any,
    weights: Any,
    columns: Columns,
    kind: cutlass.Constexpr,
    warp: Any,
    lane: Any,
    plan: cutlass.Constexpr,
) -> None:
    """o += P V for the warp's columns.

    o         [m][j][even or odd][4]
    weights   where the lane finds its words of P for rows 0 to 15 and keys 0 to 15
    kind      of the columns
    """
    tiles = const_expr(plan.rows // 16)
    at = columns.at + operands.values_at(lane, kind)
    factors = operands.factors_of(columns, kind, warp, lane, plan.keys)
    words = operands.registers(kind)
    operands.put(words, operands.load_values(at, kind))
    # two at a time make the kernel 3% faster on an H200
    for p in cutlass.range(plan.keys // 16, unroll=2):
        a = [ptx.load_shared_128(weights + m * (plan.keys // 16) * (LANES * 16)) for m in range(tiles)]
        for half in range_constexpr(2):
            b = operands.value_operands(words, kind, factors, p, lane)
            at = (at ^ operands.other_half(kind)) + half * (16 * operands.key_bytes(kind))
            operands.put(words, operands.load_values(at, kind))
            for i in range_constexpr(4):
                for m in range_constexpr(tiles):
                    mma_sync.accumulate(o.four((m * 8 + half * 4 + i) * 4), a[m], (b[2 * i], b[2 * i + 1]))
        weights += LANES * 16


@cute.jit
def weigh(
    shares: Any,
    weights: Any,
    mask: Any,
    factor: Any,
    flag: Any,
    scale_log2: Any,
    state: Any,
    lane: Any,
    plan: cutlass.Constexpr,
    top: Any = None,
) -> None:
    """Softmax of the warp's row group: P of a step from all warps' shares.

    shares    where the lane finds warp 0's share for the group's keys 0 to 7
    weights   where it stores its words of P for keys 0 to 15
    mask      address of the masks of the lane's keys among the first 8
    factor    where it stores what its row of O is multiplied with
    flag      where the warp stores whether a maximum has moved, and such a factor is not 1
    state     address of the lane's row: its maximum, and the sum of the weights that the lane has stored
    top       address of the lane's row: its largest score, as maxima do not always move; None: nobody asks
    """
    known = ptx.load_shared_f32(top) if const_expr(top is not None) else None
    scores = []
    for n in range_constexpr(plan.keys // 8):
        low, high = ptx.load_shared_f32x2(shares + n * (LANES * 8))
        for other in range_constexpr(1, plan.shares):
            one = ptx.load_shared_f32x2(shares + other * plan.share_bytes + n * (LANES * 8))
            low, high = low + one[0], high + one[1]
        # not added: the score of a masked key is NaN if the query is
        masks = ptx.load_shared_64(mask + n * 32)
        scores += [
            score * scale_log2 if is_valid != 0 else Float32(-Float32.inf)
            for score, is_valid in ((low, masks[0]), (high, masks[1]))
        ]
    largest = scores[0]
    for score in scores[1:]:
        largest = ptx.max_f32(largest, score)
    for step in (1, 2):
        largest = ptx.max_f32(largest, cute.arch.shuffle_sync_bfly(largest, step))
    before, total = ptx.load_shared_f32x2(state)
    grows = largest > before + Float32(GROWTH)
    after = largest if grows else before
    base = Float32(0.0) if after == -Float32.inf else after
    rescale = ptx.exp2(before - base) if grows else Float32(1.0)
    scores = [ptx.exp2(score - base) for score in scores]
    total = total * rescale + pairwise(scores, operator.add)
    ptx.store_shared_64(state, after.bitcast(Int32), total.bitcast(Int32))
    for p in range_constexpr(plan.keys // 16):
        words = [ptx.bf16x2(scores[4 * p + 2 * i], scores[4 * p + 2 * i + 1]) for i in range(2)]
        for i in range_constexpr(2):
            ptx.store_shared_s32(weights + p * (LANES * 16) + 8 * i, words[i])
    ptx.store_shared_f32(factor, rescale, lane & 3 == 0)
    any_grows = Int32(cute.arch.vote_any_sync(grows))
    if lane == 0:
        ptx.store_shared_s32(flag, any_grows)
    if const_expr(top is not None):
        ptx.store_shared_f32(top, ptx.max_f32(known, largest))


@cute.jit
def rescale(o: Any, factors: Any, lane: Any, tiles: cutlass.Constexpr) -> None:
    """Multiply the rows of O with their factors. tiles: of 16 rows."""
    own = const_expr(o.count // tiles)
    for m in range_constexpr(tiles):
        for side in range_constexpr(2):
            factor = ptx.load_shared_f32(factors + (16 * m + 8 * side + (lane >> 2)) * 4)
            o.scale([m * own + i // 2 * 4 + 2 * side + i % 2 for i in range(own // 2)], factor)


def any_grows(flags: Any, groups: int) -> Any:
    """0 if the maximum of no row group has moved."""
    result = Int32(0)
    for i in range(groups):
        result = result | ptx.load_shared_s32(flags + 4 * i)
    return result
