"""How a warp holds one head of 512 bf16 columns, turns its rope back, and quantizes it.

A lane has two runs of eight columns, 16 bytes each:

    lane                 0 .. 15    16 .. 23     24 .. 31
    columns 8 * lane     chunk 0    chunk 1      chunk 1
    columns 256 + ...    chunk 2    chunk 3      chunk 3, rope

A chunk of 128 columns is sixteen lanes wide, in both halves of a head, so one sequence of four shuffles finds two
scales. Every lane rounds its own maximum up to a power of two first: the largest of these is the chunk's scale, and a
power of two fits into half a word, whatever fp32 number the maximum was.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, range_constexpr

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import lanes_max_bf16x2
from cute_kernels.dsl.rope import rotate_pair_back
from cute_kernels.formats import HEAD_DIM
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR

HALF_ROW = 512
"""Bytes from a lane's first run of bf16 columns to its second."""

ROPE_LANE = 24
"""First lane whose second run of columns is rope."""


@cute.jit
def turn_back(lane: Any, words: Any, cos: Any, sin: Any) -> Any:
    """fp32 values of a lane's second run of columns, turned back where they are rope."""
    is_rope = lane >= ROPE_LANE
    values = []
    for i in range_constexpr(4):
        even, odd = convert.bf16_low(words[i]), convert.bf16_high(words[i])
        turned_even, turned_odd = rotate_pair_back(even, odd, cos[i].bitcast(Float32), sin[i].bitcast(Float32))
        values += [turned_even if is_rope else even, turned_odd if is_rope else odd]
    return values


@cute.jit
def rounded(lane: Any, words: Any, turned: Any) -> Any:
    """bf16 of a lane's second run of columns. What is not rope keeps its bits."""
    is_rope = lane >= ROPE_LANE
    result = []
    for i in range_constexpr(4):
        pair = ptx.bf16x2(turned[2 * i], turned[2 * i + 1])
        result.append(pair if is_rope else words[i])
    return result


@cute.jit
def scale_pair(first: Any, turned: Any, arch: cutlass.Constexpr) -> Any:
    """Scales of the two chunks that a lane has columns of, as bf16: that of its first run in the low half."""
    pairs = convert.absmax_bf16x2(*first)
    largest = ptx.max_f32(convert.bf16_low(pairs), convert.bf16_high(pairs))
    largest_turned = ptx.abs_f32(turned[0])
    for value in turned[1:]:
        largest_turned = ptx.max_f32(largest_turned, ptx.abs_f32(value))
    low, high = convert.ue8m0_from_absmax_each((largest, largest_turned), E4M3_MAX, OUTPUT_FLOOR, arch)
    return lanes_max_bf16x2(low << 7 | high << 23, lanes=16)


def store_codes(start: Any, first: Any, turned: Any, pair: Any, is_stored: Any, arch: str) -> None:
    """Store a lane's codes; `start` is where its first eight belong."""
    factor = convert.ue8m0_inverse(pair >> 7 & 0xFF)
    low = convert.e4m3_from_bf16x4(first[0], first[1], factor, arch)
    high = convert.e4m3_from_bf16x4(first[2], first[3], factor, arch)
    ptx.store_global_64(start, low, high, is_stored)
    factor = convert.ue8m0_inverse(pair >> 23)
    scaled = [value * factor for value in turned]
    ptx.store_global_64(start + HEAD_DIM // 2, ptx.e4m3x4(*scaled[:4]), ptx.e4m3x4(*scaled[4:]), is_stored)


@cute.jit
def scale_word(lane: Any, pair: Any) -> Any:
    """The four scales of a head as exponent bytes, in every lane."""
    mine = pair >> 7  # bytes 0 and 2
    other = cute.arch.shuffle_sync_bfly(mine, 16)
    is_upper = lane >= 16
    low = other if is_upper else mine
    high = mine if is_upper else other
    return ptx.permute_bytes(low, high, 0x6240)
