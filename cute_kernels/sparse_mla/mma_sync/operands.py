# SPDX-License-Identifier: Apache-2.0
"""What the mma.sync kernels share: columns of a step as operands, softmax of a row group, places in shared memory.

A warp's columns are e4m3 codes with a scale for all 64 of them, or bf16. Words are loaded as they are in shared memory,
well before they are needed, and become operand b of the products when they are: see mma_sync.py. Of Q and K, a lane
l = 4 r + c has 16 neighbouring columns 16 c .. of row r, so that is the order in which columns are summed; of V, a word
of a transposed matrix of bytes has an even and an odd column, so those belong to different products.

Copies are in chunks of 16 bytes. Chunks of different keys that a warp reads at a time lie in different banks: those of
64 e4m3 columns at chunk ^ (key // 2 % 4), where keys are 448 bytes apart, and those of 64 bf16 columns at
chunk ^ (key % 8).
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.formats import FP8_DS_MLA, NOPE_DIM, PLAIN_BF16, ROPE_DIM
from cute_kernels.sparse_mla.params import RESCALE_THRESHOLD

WARPS = 8
LANES = 32
WARP_COLUMNS = 64
CHUNK = 16

ROPE_BYTES = 2 * ROPE_DIM

ROW_STATE = 8 * LANES
"""Shared memory of a row group of 8 heads: of each lane its row's maximum and its part of the sum of P."""

FLAG_BYTES = 4 * WARPS

EVEN_HALVES, ODD_HALVES = 0x5410, 0x7632
"""Of two words: both low halves, both high halves."""

LOW_HALF, HIGH_HALF = 0x1010, 0x3232
"""Of a word: its low half twice, its high half twice."""

WIDE, CODES, LARGE = range(3)
"""Kinds of a warp's columns: bf16; e4m3; e4m3 where a scale times 2^120 is no finite bf16."""


class Columns(NamedTuple):
    """A warp's columns of a step.

    at       address of those of key 0
    kind     one of the kinds above
    bytes    of e4m3 columns: address of the scale bytes of key 0
    scales   of e4m3 columns, lane l: bf16 pair of the scales of keys 2 l and 2 l + 1, times 2^120 if that is finite
    """

    at: Any
    kind: Any
    bytes: Any
    scales: Any


def read_scales(bytes_: Any, warp: Any, lane: Any, keys: int) -> tuple[Any, Any]:
    """Scale bytes of e4m3 columns, keys 2 lane and 2 lane + 1."""
    at = bytes_ + (lane & (keys // 2 - 1)) * (2 * FP8_DS_MLA.scale_bytes) + (warp & 4)
    shift = (warp & 3) * 8
    words = (ptx.load_shared_s32(at + i * FP8_DS_MLA.scale_bytes) for i in range(2))
    low, high = ((word >> shift) & 0xFF for word in words)
    return low, high


@cute.jit
def columns_of(stage: Any, is_second: Any, warp: Any, lane: Any, plan: cutlass.Constexpr) -> Columns:
    """A warp's columns of the step in a stage. is_second: whether it is of the second list, if their formats differ."""
    at, kind, scale_bytes, scales = stage + warp * plan.plain_bytes, Int32(WIDE), stage + plan.scales_at, Int32(0)
    if const_expr(FP8_DS_MLA.id in plan.formats):
        # of rows without scales, these mean nothing
        low, high = read_scales(scale_bytes, warp, lane, plan.keys)
        most = Int32(convert.LARGEST_SINGLE_SCALE)
        scales = convert.scale_pair(cutlass.min(low, most), cutlass.min(high, most))
        kind = Int32(LARGE) if cute.arch.vote_any_sync(low > most or high > most) else Int32(CODES)
        rope, is_wide = stage + plan.rope_at, warp == WARPS - 1
        if const_expr(PLAIN_BF16.id in plan.formats):
            is_plain = is_second == (plan.formats[-1] == PLAIN_BF16.id)
            is_wide = is_wide or is_plain
            rope = at if is_plain else rope
        at = rope if is_wide else stage + warp * WARP_COLUMNS
        kind = Int32(WIDE) if is_wide else kind
    return Columns(at, kind, scale_bytes, scales)


def codes_times(codes: list[Any], factors: list[Any], owners: list[Any], selector: Any) -> list[Any]:
    """Codes as bf16 pairs times 2^-120, multiplied with each of the factors: codes[i] with what lane owners[i % their
    number] has of it.

    selector   which halves of the factor; None: as they are
    """
    for factor in factors:
        pairs = [cute.arch.shuffle_sync(factor, owner) for owner in owners]
        if selector is not None:
            pairs = [ptx.permute_bytes(pair, pair, selector) for pair in pairs]
        codes = [ptx.multiply_bf16x2(code, pairs[i % len(pairs)]) for i, code in enumerate(codes)]
    return codes


def factors_of(columns: Columns, kind: int, warp: Any, lane: Any, keys: int) -> list[Any]:
    """What a lane has of the factors that turn codes times 2^-120 into values."""
    if kind != LARGE:
        return [columns.scales]
    return [columns.scales, convert.excess_pair(*read_scales(columns.bytes, warp, lane, keys))]


@cute.jit
def of_its_kind(work: cutlass.Constexpr, columns: Columns, plan: cutlass.Constexpr) -> None:
    """work(kind), for the kind of the columns. The kinds' code is apart, as no instruction is moved past a branch."""
    if const_expr(plan.is_plain):
        work(WIDE)
    elif columns.kind == CODES:
        work(CODES)
    elif columns.kind == WIDE:
        work(WIDE)
    else:
        work(LARGE)


def key_bytes(kind: int) -> int:
    """From one key's columns to the next one's."""
    return ROPE_BYTES if kind == WIDE else NOPE_DIM


def registers(kind: int) -> Any:
    """For what load_keys or load_values gives."""
    return cute.make_rmem_tensor((8 if kind == WIDE else 4,), Int32)


def put(registers: Any, words: list[Any]) -> None:
    for i, word in enumerate(words):
        registers[i] = word


def keys_at(lane: Any, kind: int) -> Any:
    """Where a lane reads of keys 0 to 7, from the warp's columns of key 0: the first 16 bytes of its 16 columns."""
    r, c = lane >> 2, lane & 3
    return wide_chunk(r, 2 * c) if kind == WIDE else fp8_chunk(r, c)


def paired(words: Any, plan: Any) -> list[Any]:
    """Neighbouring columns of a row of bf16, two in a word, paired as the products with Q have them: the odd ones of
    four and the even ones of four, if codes are to be paired with them, which come out of their words like that."""
    if plan.is_plain:
        return list(words)
    pairs = [(words[i & ~1], words[i | 1], EVEN_HALVES if i % 2 else ODD_HALVES) for i in range(len(words))]
    return [ptx.permute_bytes(*pair) for pair in pairs]


def load_keys(at: Any, kind: int) -> list[Any]:
    """What a lane needs of 8 keys, as it is in shared memory. at: see keys_at."""
    if kind == WIDE:
        return [*ptx.load_shared_128(at), *ptx.load_shared_128(at ^ 16)]
    return list(ptx.load_shared_128(at))


def key_operands(words: Any, kind: int, factors: list[Any], n: Any, lane: Any, plan: Any) -> list[Any]:
    """Operand b of keys 8 n .. + 7, for the products s = 0 to 3 with Q: two words each, of what load_keys gives."""
    if kind == WIDE:
        return paired([words[i] for i in range(8)], plan)
    selector = Int32(LOW_HALF) + (lane >> 2 & 1) * (HIGH_HALF - LOW_HALF)
    codes = [ptx.bf16x2_of_codes(words[i // 2], 8 * (i % 2)) for i in range(8)]
    return codes_times(codes, factors, [n * 4 + (lane >> 3)], selector)


def values_at(lane: Any, kind: int) -> Any:
    """Where a lane reads of keys 0 to 15 and the first half of the warp's columns, from those of key 0."""
    r, c = lane >> 2, lane & 3
    if kind == WIDE:
        return wide_chunk(2 * c, r >> 2) + (r & 3) * 4
    # a row of four 8 x 8 matrices: keys 8 (i % 2) .. and chunk i / 2 in matrix i
    matrix = lane >> 3
    return (matrix & 1) * (8 * NOPE_DIM) + fp8_chunk(lane & 7, matrix >> 1)


def other_half(kind: int) -> int:
    """Which bits of that place are others for the other half of the columns."""
    return WARP_COLUMNS if kind == WIDE else WARP_COLUMNS // 2


def load_values(at: Any, kind: int) -> list[Any]:
    """What a lane needs of 16 keys and half of the warp's columns, as it is in shared memory. at: see values_at."""
    if kind != WIDE:
        return list(ptx.load_matrices_transposed(at))
    # keys 2 c and 2 c + 1, then those 8 further; 8 bytes of each, 32 bytes apart
    rows = [at + g * (8 * ROPE_BYTES) + odd * ROPE_BYTES for g in range(2) for odd in range(2)]
    return [ptx.load_shared_s32(rows[i // 2] ^ (32 * (i % 2) + 16 * (i // 2 % 2))) for i in range(8)]


def value_operands(words: Any, kind: int, factors: list[Any], p: Any, lane: Any) -> list[Any]:
    """Operand b of keys 16 p .. + 15 as summed ones, for the products j = 0, 1 of half of the columns and their even
    and odd ones with P: number 4 j + 2 odd + g, of keys 8 g .. + 7 of those; of what load_values gives."""
    if kind == WIDE:
        pairs = [(words[4 * (i % 2) + i // 4], words[4 * (i % 2) + 2 + i // 4]) for i in range(8)]
        return [ptx.permute_bytes(*pairs[i], ODD_HALVES if i // 2 % 2 else EVEN_HALVES) for i in range(8)]
    codes = [ptx.bf16x2_of_codes(words[i // 4 * 2 + i % 2], 0 if i % 4 // 2 else 8) for i in range(8)]
    return codes_times(codes, factors, [p * 8 + 4 * g + (lane & 3) for g in range(2)], None)


def fp8_chunk(key: int, chunk: int) -> int:
    """Place of 16 of a key's e4m3 columns, from the warp's first ones of key 0. Also of a traced key and chunk."""
    return key * NOPE_DIM + (chunk ^ (key >> 1 & 3)) * CHUNK


def wide_chunk(key: int, chunk: int) -> int:
    """The same of 8 bf16 columns."""
    return key * ROPE_BYTES + (chunk ^ (key & 7)) * CHUNK


# ---- softmax


@cute.jit
def softmax(
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
    grows = largest > before + Float32(RESCALE_THRESHOLD)
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
