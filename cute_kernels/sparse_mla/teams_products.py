"""What a warp of the decode kernel of teams computes in a step: part of the scores, their softmax, columns of O.

Keys are the M side of S^T = K Q^T, and what is summed in O^T = V^T P^T; heads are the N side of both. Lane l has, with
r = l // 4 and c = l % 4:

    q       see teams_query.py
    scores  of keys r and r + 8 with heads 2 c and 2 c + 1 of each group
    o       operand d of the same heads: see teams_plan.first_column

Both take codes as f16, which hardware converts. The first product's sums of each block are scaled; in the second one P
is. That is done as long as an item's scales are of the usual kind (teams_plan.LEAST_SCALE); from the first step on that
has others, `wide` is not 0, and the second product takes codes as bf16 and scales them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from cute_kernels.dsl import convert, mma_sync, ptx
from cute_kernels.sparse_mla.teams_plan import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK,
    KEYS,
    LANES,
    NO_SCALES,
    SHIFT,
    code_place,
    rope_place,
)
from cute_kernels.sparse_mla.teams_query import Query
from cute_kernels.sparse_mla.teams_source import Own

GROWTH = 7.0
"""A head's maximum moves when a score, in log2 units, is more than this above it: O is rarely rescaled, and P is
at most 2^7, so that it fits f16 times 2^SHIFT."""

LEAST = -3.0e38
"""The maximum of nothing."""

ODD_BITS = -0x0F0F0F10
"""The upper halves of all bytes: where usual scales, counted from the least, have nothing."""

F16_OF_SCALE = (15 - 127 + SHIFT) * 1024
"""Added to 1024 times a scale byte: bits of the scale times 2^SHIFT as f16."""


def scale_words(stage: Any, key: Any, own: Own, plan: Any) -> list[Any]:
    """Words of scale bytes of a key's e4m3 columns that the warp has, the first block's lowest; others are usual."""
    at = stage + plan.scales_at + key * 8
    others = ~own.mask & NO_SCALES
    if plan.team == 1:
        low, high = ptx.load_shared_64(at)
        return [low, high & own.mask | others]
    word = ptx.load_shared_s32(at + own.scales)
    return [word & own.mask | others]


def scale_of(words: list[Any], block: int) -> Any:
    """fp32 scale of a key's block; byte 255 gives infinity."""
    word, number = words[block // 4], block % 4
    shifted = word << (23 - 8 * number) if number < 3 else word >> 1
    return cutlass.max(shifted & 0x7F800000, Int32(0x00400000)).bitcast(Float32)


def byte_of(words: list[Any], block: int) -> Any:
    return words[block // 4] >> 8 * (block % 4) & 0xFF


def are_odd(words: list[Any]) -> Any:
    """Whether a scale of any of the warp's keys is not of the usual ones. words: of keys r and r + 8."""
    bits = words[0] - NO_SCALES
    for word in words[1:]:
        bits = bits | (word - NO_SCALES)
    return cute.arch.vote_any_sync(bits & ODD_BITS != 0)


@cute.jit
def score(
    parts: Any,
    q: Query,
    factors: Any,
    scales: list[Any],
    is_odd: Any,
    stage: Any,
    own: Own,
    lane: Any,
    plan: cutlass.Constexpr,
) -> None:
    """The warp's part of the scores.

    parts    registers: four for each group
    scales   words of keys r and r + 8
    stage    address of the step's
    """
    r, c = lane >> 2, lane & 3
    at = stage + code_place(r, c)
    for i in range_constexpr(4 * plan.groups):
        parts[i] = Float32(0.0)
    for block in range_constexpr(plan.codes):
        score_codes(parts, q, scales, at, block, plan)
    rope = stage + plan.rope_at + rope_place(r, 2 * c)
    if own.is_last:
        score_rope(parts, q, factors, rope, plan)
    else:
        score_codes(parts, q, scales, at, plan.codes, plan)
        for i in range_constexpr(4 * plan.groups):
            parts[i] = parts[i] * factors[i // 4 * 2 + i % 2]
    if is_odd:
        for side in range_constexpr(2):
            is_nan = byte_of(scales[side], 0) == 0xFF
            for block in range_constexpr(1, plan.blocks):
                is_nan = is_nan | (byte_of(scales[side], block) == 0xFF)
            for i in range_constexpr(2 * plan.groups):
                place = i // 2 * 4 + 2 * side + i % 2
                parts[place] = Float32(Float32.nan) if is_nan else parts[place]


def products(q: Query, words: list[Any], block: int, is_f16: bool, plan: Any) -> list[Any]:
    """Sums of a block's four products by group. words: four of operand a for each."""
    first = plan.query(block, 0, 0)
    near: list[Any] = []
    if block >= plan.resident:
        for i in range(2 * plan.groups):
            near += ptx.load_shared_128(q.at + (first // 4 + i) * (LANES * 16))
    sums: list[Any] = [()] * plan.groups
    for product in range(4):
        for group in range(plan.groups):
            place = plan.query(block, product, group)
            b = near[place - first : place - first + 2] if near else q.words.two(place)
            sums[group] = mma_sync.multiply_by(words[product], b, sums[group], is_f16)
    return [word.bitcast(Float32) for four in sums for word in four]


def score_codes(parts: Any, q: Query, scales: list[Any], at: Any, block: int, plan: Any) -> None:
    """Add a block of e4m3 columns."""
    near, far = (ptx.load_shared_128(at + block * BLOCK_BYTES + 8 * side * BLOCK) for side in range(2))
    words = []
    for i in range(4):
        pairs = ptx.f16x2_of_e4m3x4(near[i]), ptx.f16x2_of_e4m3x4(far[i])
        words.append((pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]))
    factors = [scale_of(scales[side], block) for side in range(2)]
    for i, value in enumerate(products(q, words, block, True, plan)):
        parts[i] = ptx.fma_rn(value, factors[i % 4 // 2], parts[i])


def score_rope(parts: Any, q: Query, factors: Any, at: Any, plan: Any) -> None:
    """Multiply what there is so far with the heads' factors, and add the rotated columns."""
    rows = []
    for side in range(2):
        row = at + 8 * side * (2 * BLOCK)
        rows.append([*ptx.load_shared_128(row), *ptx.load_shared_128(row ^ CHUNK)])
    near, far = rows
    words = [(near[2 * i], far[2 * i], near[2 * i + 1], far[2 * i + 1]) for i in range(4)]
    for i, value in enumerate(products(q, words, plan.codes, False, plan)):
        parts[i] = ptx.fma_rn(parts[i], factors[i // 4 * 2 + i % 2], value)


@cute.jit
def weigh(parts: Any, tops: Any, amounts: Any, o: Any, alive: Any, scale_log2: Any, plan: cutlass.Constexpr) -> None:
    """Softmax of a step.

    parts           scores, unscaled; then P
    tops, amounts   registers: the lane's two heads' of each group; maxima, and its part of the sums of weights
    alive           bits 0 and 8: whether there are keys r and r + 8
    """
    grows = cutlass.Boolean(False)
    for i in range_constexpr(4 * plan.groups):
        # not added: the score of a key that is not there is NaN if the query is
        is_there = alive & (1 << 8 * (i % 4 // 2)) != 0
        parts[i] = parts[i] * scale_log2 if is_there else Float32(-Float32.inf)
    for i in range_constexpr(4 * plan.groups):
        grows = grows | (parts[i] > tops[i // 4 * 2 + i % 2] + Float32(GROWTH))
    if cute.arch.vote_any_sync(grows):
        grow(parts, tops, amounts, o, plan)
    for i in range_constexpr(4 * plan.groups):
        head = i // 4 * 2 + i % 2
        parts[i] = ptx.exp2(parts[i] - tops[head])
        amounts[head] = amounts[head] + parts[i]


@cute.jit
def grow(parts: Any, tops: Any, amounts: Any, o: Any, plan: cutlass.Constexpr) -> None:
    """Move the maxima of heads of which a score is far above, and have O and the sums follow them."""
    for group in range_constexpr(plan.groups):
        for i in range_constexpr(2):
            head = 2 * group + i
            largest = ptx.max_f32(parts[4 * group + i], parts[4 * group + 2 + i])
            for step in (4, 8, 16):
                largest = ptx.max_f32(largest, cute.arch.shuffle_sync_bfly(largest, step))
            before = tops[head]
            after = largest if largest > before + Float32(GROWTH) else before
            factor = ptx.exp2(before - after)
            tops[head] = after
            amounts[head] = amounts[head] * factor
            sums = [plan.sums(block, chunk, group) + i for block in range(plan.blocks) for chunk in range(4)]
            o.scale([first + j for first in sums for j in (0, 2)], factor)


def widen(o: Any, first: int, end: int, plan: Any) -> None:
    """Count O of some blocks in ones from here on, not in 2^-SHIFT."""
    o.scale(range(plan.sums(first, 0, 0), plan.sums(end, 0, 0)), Float32(2.0**-SHIFT))


@cute.jit
def accumulate(
    o: Any, parts: Any, is_odd: Any, wide: Any, stage: Any, own: Own, lane: Any, plan: cutlass.Constexpr
) -> None:
    """Add P V to the warp's columns of O. parts: P. wide: register."""
    c = lane & 3
    if is_odd and wide[0] == 0:
        wide[0] = Int32(1)
        widen(o, 0, plan.codes, plan)
        if not own.is_last:
            widen(o, plan.codes, plan.blocks, plan)
    keys = [scale_words(stage, 2 * c + 8 * (i // 2) + i % 2, own, plan) for i in range(4)]
    # four 8 x 8 matrices of pairs of columns: keys 8 (m % 2) .. and chunk m / 2 in matrix m
    matrix, key = lane >> 3, lane & 7
    at = stage + (matrix & 1) * (8 * BLOCK) + code_place(key, matrix >> 1)
    # of columns: keys 8 (m / 2) .. and chunk m % 2
    rope = stage + plan.rope_at + (matrix >> 1) * (8 * 2 * BLOCK) + rope_place(key, matrix & 1)
    if wide[0] != 0:
        p = operands(parts, ptx.bf16x2, plan)
        for block in range_constexpr(plan.codes):
            add_large(o, p, keys, at, block, plan)
        if not own.is_last:
            add_large(o, p, keys, at, plan.codes, plan)
    else:
        p = operands(parts, ptx.f16x2, plan)
        for block in range_constexpr(plan.codes):
            add_codes(o, p, keys, at, block, plan)
        if not own.is_last:
            add_codes(o, p, keys, at, plan.codes, plan)
    if own.is_last:
        add_rope(o, operands(parts, ptx.bf16x2, plan), rope, plan)


def operands(parts: Any, pair: Any, plan: Any) -> list[Any]:
    """P as operand b, two words for each group. pair: of two fp32 numbers makes a word."""
    pairs = [pair(parts[2 * i], parts[2 * i + 1]) for i in range(2 * plan.groups)]
    return [ptx.transpose_matrix(word) for word in pairs]


def add(o: Any, block: int, chunk: int, a: Any, p: Any, plan: Any, is_f16: bool = False) -> None:
    for group in range(plan.groups):
        mma_sync.accumulate(o.four(plan.sums(block, chunk, group)), a, (p[2 * group], p[2 * group + 1]), is_f16)


def add_codes(o: Any, p: Any, keys: list[Any], at: Any, block: int, plan: Any) -> None:
    """Add P V of a block of e4m3 columns with usual scales, times 2^SHIFT. p: f16."""
    number = block % 4
    # bytes below 128 are continued with zeros
    selector = number | (8 | number) << 4 | (4 + number) << 8 | (12 + number) << 12
    pairs = []
    for i in range(2):
        bytes_ = ptx.permute_bytes(keys[2 * i][block // 4], keys[2 * i + 1][block // 4], selector)
        pairs.append(bytes_ * 1024 + F16_OF_SCALE * 0x00010001)
    scaled = [ptx.multiply_f16x2(word, pairs[i % 2]) for i, word in enumerate(p)]
    for two in range(2):
        words = ptx.load_matrices_transposed((at ^ 2 * CHUNK * two) + block * BLOCK_BYTES)
        for half in range(2):
            # an even and an odd column of two keys: first the even one of both
            near, far = (ptx.permute_bytes(word, word, 0x3120) for word in words[2 * half : 2 * half + 2])
            a = (*ptx.f16x2_of_e4m3x4(near), *ptx.f16x2_of_e4m3x4(far))
            add(o, block, 2 * two + half, a, scaled, plan, True)


def columns_of(words: Any, half: int) -> list[Any]:
    """Operand a of a chunk, times 2^-120: its even and odd columns of keys 0 to 7, and of the others."""
    return [ptx.bf16x2_of_codes(words[2 * half + i // 2], 0 if i % 2 else 8) for i in range(4)]


def add_large(o: Any, p: Any, keys: list[Any], at: Any, block: int, plan: Any) -> None:
    """Add P V of a block of e4m3 columns with any scales. p: bf16."""
    pairs = []
    for i in range(2):
        low, high = (byte_of(keys[2 * i + j], block) for j in range(2))
        most = Int32(convert.LARGEST_SINGLE_SCALE)
        first = convert.scale_pair(cutlass.min(low, most), cutlass.min(high, most))
        pairs.append((first, convert.excess_pair(low, high)))
    for two in range(2):
        words = ptx.load_matrices_transposed((at ^ 2 * CHUNK * two) + block * BLOCK_BYTES)
        for half in range(2):
            a = columns_of(words, half)
            for factor in range(2):
                a = [ptx.multiply_bf16x2(word, pairs[i // 2][factor]) for i, word in enumerate(a)]
            add(o, block, 2 * two + half, a, p, plan)


def add_rope(o: Any, p: Any, at: Any, plan: Any) -> None:
    """Add P V of the rotated columns."""
    for chunk in range(4):
        a = ptx.load_matrices_transposed(at ^ 2 * CHUNK * chunk)
        add(o, plan.codes, chunk, a, p, plan)


assert KEYS == 16
