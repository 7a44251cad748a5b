"""What a warp of the decode kernel of teams multiplies in a step: part of the scores, and columns of O.

Keys are the M side of S^T = K Q^T, and what is summed in O^T = V^T P^T; heads are the N side of both. Lane l has, with
r = l // 4 and c = l % 4:

    q       see teams_query.py
    scores  of keys r and r + 8 of each piece with heads 2 c and 2 c + 1 of each group
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
    CHUNK,
    LANES,
    NO_SCALES,
    PIECE,
    SHIFT,
    code_place,
    rope_place,
)
from cute_kernels.sparse_mla.teams_query import factors_of, query_at
from cute_kernels.sparse_mla.teams_softmax import Weights
from cute_kernels.sparse_mla.teams_source import Own

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
    return [(word if plan.team == 2 else word >> own.shift) & own.mask | others]


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
    base: Any,
    stage: Any,
    piece: cutlass.Constexpr,
    own: Own,
    lane: Any,
    plan: cutlass.Constexpr,
) -> Any:
    """The warp's part of a piece's scores. Returns whether scales of its are unusual.

    parts    registers: four for each group
    base     address of shared memory
    stage    address of the step's
    """
    r, c = lane >> 2, lane & 3
    scales = [scale_words(stage, r + (PIECE * piece + 8 * side), own, plan) for side in range(2)]
    is_odd = are_odd([word for words in scales for word in words])
    q = query_at(base, own, lane, plan)
    at = stage + code_place(r, c) + piece * (PIECE * BLOCK)
    for i in range_constexpr(4 * plan.groups):
        parts[i] = Float32(0.0)
    for block in range_constexpr(plan.codes):
        score_codes(parts, q, scales, at, block, plan)
    rope = stage + plan.rope_at + rope_place(r, 2 * c) + piece * (PIECE * 2 * BLOCK)
    if own.is_last:
        score_rope(parts, q, factors_of(base, own, lane, plan), rope, plan)
    else:
        score_codes(parts, q, scales, at, plan.codes, plan)
        factors = factors_of(base, own, lane, plan)
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
    return is_odd


def products(q: Any, words: list[Any], block: int, is_f16: bool, plan: Any) -> list[Any]:
    """Sums of a block's four products by group. words: four of operand a for each."""
    found: list[Any] = []
    for group in range(plan.groups):
        b: list[Any] = []
        for i in range(2):
            b += ptx.load_shared_128(q + ((block * plan.groups + group) * 2 + i) * (LANES * 16))
        sums: Any = ()
        for product in range(4):
            sums = mma_sync.multiply_by(words[product], b[2 * product : 2 * product + 2], sums, is_f16)
        found += sums
    return [word.bitcast(Float32) for word in found]


def score_codes(parts: Any, q: Any, scales: list[Any], at: Any, block: int, plan: Any) -> None:
    """Add a block of e4m3 columns."""
    near, far = (ptx.load_shared_128(at + block * plan.block_bytes + 8 * side * BLOCK) for side in range(2))
    words = []
    for i in range(4):
        pairs = ptx.f16x2_of_codes(near[i]), ptx.f16x2_of_codes(far[i])
        words.append((pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]))
    factors = [scale_of(scales[side], block) for side in range(2)]
    for i, value in enumerate(products(q, words, block, True, plan)):
        parts[i] = ptx.fma_rn(value, factors[i % 4 // 2], parts[i])


def score_rope(parts: Any, q: Any, factors: Any, at: Any, plan: Any) -> None:
    """Multiply what there is so far with the heads' factors, and add the rotated columns."""
    rows = []
    for side in range(2):
        row = at + 8 * side * (2 * BLOCK)
        rows.append([*ptx.load_shared_128(row), *ptx.load_shared_128(row ^ CHUNK)])
    near, far = rows
    words = [(near[2 * i], far[2 * i], near[2 * i + 1], far[2 * i + 1]) for i in range(4)]
    for i, value in enumerate(products(q, words, plan.codes, False, plan)):
        parts[i] = ptx.fma_rn(parts[i], factors[i // 4 * 2 + i % 2], value)


def widen(o: Any, first: int, end: int, plan: Any) -> None:
    """Count O of some blocks in ones from here on, not in 2^-SHIFT."""
    o.scale(range(plan.sums(first, 0, 0), plan.sums(end, 0, 0)), Float32(2.0**-SHIFT))


@cute.jit
def accumulate(
    o: Any, weights: Weights, is_odd: Any, wide: Any, stage: Any, own: Own, lane: Any, plan: cutlass.Constexpr
) -> None:
    """Add P V to the warp's columns of O. wide: register."""
    if is_odd and wide[0] == 0:
        wide[0] = Int32(1)
        widen(o, 0, plan.codes, plan)
        if not own.is_last:
            widen(o, plan.codes, plan.blocks, plan)
    for piece in range_constexpr(plan.pieces):
        accumulate_piece(o, weights, wide, stage, piece, own, lane, plan)


@cute.jit
def accumulate_piece(
    o: Any, weights: Weights, wide: Any, stage: Any, piece: cutlass.Constexpr, own: Own, lane: Any,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    c, first = lane & 3, PIECE * piece
    keys = [scale_words(stage, 2 * c + (first + 8 * (i // 2) + i % 2), own, plan) for i in range(4)]
    # four 8 x 8 matrices of pairs of columns: keys 8 (m % 2) .. and chunk m / 2 in matrix m
    matrix, key = lane >> 3, lane & 7
    at = stage + (matrix & 1) * (8 * BLOCK) + code_place(key, matrix >> 1) + first * BLOCK
    # of columns: keys 8 (m / 2) .. and chunk m % 2
    rope = stage + plan.rope_at + (matrix >> 1) * (8 * 2 * BLOCK) + rope_place(key, matrix & 1) + first * (2 * BLOCK)
    if wide[0] != 0:
        p = weights.operand(piece, False, plan)
        for block in range_constexpr(plan.codes):
            add_large(o, p, keys, at, block, plan)
        if not own.is_last:
            add_large(o, p, keys, at, plan.codes, plan)
    else:
        p = weights.operand(piece, True, plan)
        for block in range_constexpr(plan.codes):
            add_codes(o, p, keys, at, block, plan)
        if not own.is_last:
            add_codes(o, p, keys, at, plan.codes, plan)
    if own.is_last:
        add_rope(o, weights.operand(piece, False, plan), rope, plan)


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
        words = ptx.load_matrices_transposed((at ^ 2 * CHUNK * two) + block * plan.block_bytes)
        for half in range(2):
            # an even and an odd column of two keys: first the even one of both
            near, far = (ptx.permute_bytes(word, word, 0x3120) for word in words[2 * half : 2 * half + 2])
            a = (*ptx.f16x2_of_codes(near), *ptx.f16x2_of_codes(far))
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
        words = ptx.load_matrices_transposed((at ^ 2 * CHUNK * two) + block * plan.block_bytes)
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
