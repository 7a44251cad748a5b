"""What a warp of the portable decode kernel computes in a step: its share of the scores, their softmax, columns of O.

Lane l of a warp has, with r = l // 4 and c = l % 4:

    q[m][s]    operand a of rows 16 m .. and columns 16 c + 4 s .. + 3 of the warp's 64: as a lane finds 16 neighbouring
               columns in a row of Q, and 16 bytes in a row of e4m3, the columns are summed in that order
    o[m][j]    eight sums: rows 16 m + r and 8 further, columns 16 j + 4 c .. + 3; of two products, of even columns and
               of odd ones, as a word of a transposed matrix of bytes has two columns

A warp's columns of a step are e4m3 codes with a scale for all 64 of them, or bf16. Only the loads of the operand that
comes from them differ: those are in a branch of their own, and the products of both kinds are the same instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.formats import FP8_DS_MLA, NOPE_DIM
from cute_kernels.sparse_mla.portable_plan import LANES, ROPE_BYTES, WARPS, fp8_chunk, wide_chunk

GROWTH = 8.0
"""A head's maximum moves when a score, in log2 units, is more than this above it: O is rarely rescaled, and P is
at most 2^8."""

EVEN_HALVES, ODD_HALVES = 0x5410, 0x7632
"""Of two words: both low halves, both high halves."""

LOW_CODES, HIGH_CODES = 0x1404, 0x3424
"""Of a word and 0: the two lower bytes, or the two higher ones, as the high bytes of two halves."""


LOW_HALF, HIGH_HALF = 0x1010, 0x3232
"""Of a word: its low half twice, its high half twice."""


class Columns(NamedTuple):
    """A warp's columns of a step.

    at         address of those of key 0, e4m3 or bf16
    is_wide    whether they are bf16
    key_bytes  from one key's to the next one's
    bytes      address of the scale bytes of key 0
    scales     of lane l: bf16 pair of the scales of keys 2 l and 2 l + 1, times 2^120 as far as that is finite
    is_large   whether it is not
    """

    at: Any
    is_wide: Any
    key_bytes: Any
    bytes: Any
    scales: Any
    is_large: Any


def read_scales(bytes_: Any, warp: Any, lane: Any, keys: int) -> tuple[Any, Any]:
    """Scale bytes of e4m3 columns, keys 2 lane and 2 lane + 1."""
    at = bytes_ + (lane & (keys // 2 - 1)) * (2 * FP8_DS_MLA.scale_bytes) + (warp & 4)
    shift = (warp & 3) * 8
    words = (ptx.load_shared_s32(at + i * FP8_DS_MLA.scale_bytes) for i in range(2))
    low, high = ((word >> shift) & 0xFF for word in words)
    return low, high


@cute.jit
def prepare_scales(bytes_: Any, warp: Any, lane: Any, keys: cutlass.Constexpr) -> tuple[Any, Any]:
    """(scales, is_large) of e4m3 columns."""
    low, high = read_scales(bytes_, warp, lane, keys)
    most = Int32(mma_sync.LARGEST_SINGLE_SCALE)
    is_large = Int32(cute.arch.vote_any_sync(low > most or high > most))
    return mma_sync.scale_pair(cutlass.min(low, most), cutlass.min(high, most)), is_large


def scale(b: Any, pair: Any, owners: Any, selector: Any) -> None:
    factors = [cute.arch.shuffle_sync(pair, owner) for owner in owners]
    if selector is not None:
        factors = [mma_sync.permute(factor, selector) for factor in factors]
    for i in range(8):
        b[i] = mma_sync.multiply_bf16x2(b[i], factors[i % len(factors)])


@cute.jit
def convert(
    b: Any, columns: Columns, owners: Any, selector: Any, warp: Any, lane: Any, keys: cutlass.Constexpr
) -> None:
    """Multiply what b[i] holds, bf16 pairs of codes times 2^-120, with the scales in lane owners[i % their number].

    selector   which halves of those; None: as they are
    """
    scale(b, columns.scales, owners, selector)
    if columns.is_large != 0:
        excess = mma_sync.excess_pair(*read_scales(columns.bytes, warp, lane, keys))
        scale(b, excess, owners, selector)


@cute.jit
def load_keys(b: Any, columns: Columns, at: Any, n: Any, warp: Any, lane: Any, plan: cutlass.Constexpr) -> None:
    """Operand b of keys 8 n .. + 7, for the products s = 0 to 3 with Q: b[2 s], b[2 s + 1]. at: where a lane reads."""
    if const_expr(plan.is_plain):
        load_wide_keys(b, at)
    else:
        if columns.is_wide:
            load_wide_keys(b, at)
        else:
            words = ptx.load_shared_128(at)
            for i in range_constexpr(8):
                pair = ptx.permute_bytes(words[i // 2], Int32(0), HIGH_CODES if i % 2 else LOW_CODES)
                b[i] = mma_sync.bf16x2_of_codes(pair, 0)
            selector = Int32(LOW_HALF) + (lane >> 2 & 1) * (HIGH_HALF - LOW_HALF)
            convert(b, columns, [n * 4 + (lane >> 3)], selector, warp, lane, plan.keys)


def load_wide_keys(b: Any, at: Any) -> None:
    for half in range(2):
        words = ptx.load_shared_128(at ^ (16 * half))
        for i in range(4):
            b[4 * half + i] = words[i]


@cute.jit
def load_values(
    b: Any,
    columns: Columns,
    at: Any,
    p: Any,
    half: cutlass.Constexpr,
    warp: Any,
    lane: Any,
    plan: cutlass.Constexpr,
) -> None:
    """Operand b of keys 16 p .. + 15 as summed ones, for the products j = 2 half, 2 half + 1 and even, odd columns with
    P: b[4 (j % 2) + 2 odd + g], of keys 8 g .. + 7 of those. at: where the lane reads."""
    if const_expr(plan.is_plain):
        load_wide_values(b, at, half)
    else:
        if columns.is_wide:
            load_wide_values(b, at, half)
        else:
            words = mma_sync.load_matrices_transposed(at ^ (32 * half))
            for i in range_constexpr(8):
                b[i] = mma_sync.bf16x2_of_codes(words[i // 4 * 2 + i % 2], 0 if i % 4 // 2 else 8)
            convert(b, columns, [p * 8 + 4 * g + (lane & 3) for g in range(2)], None, warp, lane, plan.keys)


def load_wide_values(b: Any, at: Any, half: int) -> None:
    for g in range(2):
        even = at + g * (8 * ROPE_BYTES)
        odd = even + ROPE_BYTES
        for j in range(2):
            chunk = 64 * half + 32 * j
            pair = ptx.load_shared_s32(even ^ chunk), ptx.load_shared_s32(odd ^ (chunk + 16))
            b[4 * j + g] = ptx.permute_bytes(*pair, EVEN_HALVES)
            b[4 * j + 2 + g] = ptx.permute_bytes(*pair, ODD_HALVES)


@cute.jit
def share_scores(q: Any, target: Any, columns: Columns, warp: Any, lane: Any, plan: cutlass.Constexpr) -> None:
    """Store the warp's share of Q K^T for a step.

    q        the lane's operands, [m][s][4]
    target   where the lane stores its share of row group 0 and keys 0 to 7
    """
    tiles = const_expr(plan.rows // 16)
    r, c = lane >> 2, lane & 3
    at = columns.at + (wide_chunk(r, 2 * c) if columns.is_wide else fp8_chunk(r, c))
    b = cute.make_rmem_tensor((8,), Int32)
    for n in cutlass.range(plan.keys // 8, unroll=1):
        load_keys(b, columns, at, n, warp, lane, plan)
        sums: list[Any] = [()] * tiles
        for s in range_constexpr(4):
            for m in range_constexpr(tiles):
                sums[m] = mma_sync.multiply(q.four((m * 4 + s) * 4), (b[2 * s], b[2 * s + 1]), sums[m])
        for m in range_constexpr(tiles):
            for side in range_constexpr(2):
                ptx.store_shared_64(target + (2 * m + side) * plan.group_bytes, *sums[m][2 * side : 2 * side + 2])
        at += columns.key_bytes * 8
        target += LANES * 8


@cute.jit
def accumulate(o: Any, weights: Any, columns: Columns, warp: Any, lane: Any, plan: cutlass.Constexpr) -> None:
    """o += P V for the warp's columns.

    o         [m][j][even or odd][4]
    weights   where the lane finds its words of P for rows 0 to 15 and keys 0 to 15
    """
    tiles = const_expr(plan.rows // 16)
    r, c = lane >> 2, lane & 3
    # of e4m3: where the lane's row of four 8 x 8 matrices is: keys 8 (i % 2) .. and chunk i / 2 in matrix i
    matrix = lane >> 3
    codes = (matrix & 1) * (8 * NOPE_DIM) + fp8_chunk(lane & 7, matrix >> 1)
    wide = wide_chunk(2 * c, r >> 2) + (r & 3) * 4
    at = columns.at + (wide if columns.is_wide else codes)
    b = cute.make_rmem_tensor((8,), Int32)
    for p in cutlass.range(plan.keys // 16, unroll=1):
        a = [
            [ptx.load_shared_s32(weights + (m * (plan.keys // 16) * 4 + i) * (LANES * 4)) for i in range(4)]
            for m in range(tiles)
        ]
        for half in range_constexpr(2):
            load_values(b, columns, at, p, half, warp, lane, plan)
            for i in range_constexpr(4):
                for m in range_constexpr(tiles):
                    mma_sync.accumulate(o.four((m * 8 + half * 4 + i) * 4), a[m], (b[2 * i], b[2 * i + 1]))
        at += columns.key_bytes * 16
        weights += LANES * 16


@cute.jit
def weigh(
    shares: Any,
    weights: Any,
    mask: Any,
    factor: Any,
    scale_log2: Any,
    state: Any,
    lane: Any,
    plan: cutlass.Constexpr,
) -> Any:
    """Softmax of the warp's row group: P of a step from all warps' shares. Whether a maximum has moved.

    shares    where the lane finds warp 0's share for the group's keys 0 to 7
    weights   where it stores its words of P for keys 0 to 15
    mask      address of the masks of the lane's keys among the first 8
    factor    where it stores what its row of O is multiplied with
    state     address of the lane's row: its maximum, and the sum of the weights that the lane has stored
    """
    scores = []
    for n in range_constexpr(plan.keys // 8):
        low, high = ptx.load_shared_f32x2(shares + n * (LANES * 8))
        for other in range_constexpr(1, WARPS):
            one = ptx.load_shared_f32x2(shares + other * plan.share_bytes + n * (LANES * 8))
            low, high = low + one[0], high + one[1]
        masks = ptx.load_shared_f32x2(mask + n * 32)
        scores += [low * scale_log2 + masks[0], high * scale_log2 + masks[1]]
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
    total = total * rescale + pairwise_sum(scores)
    ptx.store_shared_64(state, after.bitcast(Int32), total.bitcast(Int32))
    for p in range_constexpr(plan.keys // 16):
        for i in range_constexpr(2):
            word = ptx.bf16x2(scores[4 * p + 2 * i], scores[4 * p + 2 * i + 1])
            ptx.store_shared_s32(weights + (p * 4 + 2 * i) * (LANES * 4), word)
    ptx.store_shared_f32(factor, rescale, lane & 3 == 0)
    return grows


def pairwise_sum(values: Any) -> Any:
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]
