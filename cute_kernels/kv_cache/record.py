# SPDX-License-Identifier: Apache-2.0
"""fp8_ds_mla rows as a warp holds them: pieces of a record, from bf16 rows to records and back; V4.1's own records.

A lane has two runs of eight columns, and so 16 bytes of bf16 in each half of a 1024-byte row:

    lane                 0 .. 7     8 .. 15    16 .. 23    24 .. 31
    columns 8 * lane     block 0    block 1    block 2     block 3
    columns 256 + ...    block 4    block 5    block 6     rope

A record is moved in three pieces of eight bytes a lane, because the pages of a pool without padding are only that well
aligned (one row: 584 bytes):

    first     codes of the columns 8 * lane
    second    lanes 0 .. 23: codes of the columns 256 + 8 * lane; lanes 24 .. 31: the first half of each 64 rope bytes
    third     lanes 24 .. 31: the other half of them; a lane below: the eight scale bytes

The rope lanes move half of each run of 64 bytes at a time, so that every piece is made of whole 32-byte sectors: the
memory system handles a sector at a time, and stores that cover a part of one cost it more than their bytes. The lanes
whose number has bit 1 clear, and their neighbours two lanes up, trade eight bytes for that.

A quantization block of 64 columns is eight lanes wide, in both halves of a row, so one sequence of three shuffles finds
the maxima of two blocks. Lane 0 collects the eight scale bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import convert, ptx
from cute_kernels.formats import FORMATS, FP8_DS_MLA, NOPE_DIM, Mxfp8V41Format
from cute_kernels.numerics import CACHE_FLOOR, E4M3_MAX

ROPE_LANE = 24
"""First lane whose second run of columns is rope, which is stored as it is."""

HALF_CODES = 256
"""Bytes from a lane's first run of codes to its second."""

HALF_ROW = 512
"""Bytes from a lane's first run of bf16 columns to its second."""


# ---- pieces


@cute.jit
def second_offset(lane: Any) -> Any:
    """Where a lane's second piece lies in the record, in bytes."""
    return _rope_offset(lane) if lane >= ROPE_LANE else HALF_CODES + lane * 8


def third_offset(lane: Any) -> Any:
    """Where a rope lane's third piece lies in the record, in bytes."""
    return _rope_offset(lane) + 32


def _rope_offset(lane: Any) -> Any:
    # eights 0 2 1 3 | 8 10 9 11 of the rope's sixteen: for eight lanes, two whole sectors twice
    return NOPE_DIM + (lane - ROPE_LANE) * 16 - (lane & 2) * 12


@cute.jit
def rope_pieces(lane: Any, words: Any) -> Any:
    """From a rope lane's four words to the two of its second piece and the two of its third.

    All lanes of the warp must call; what the others get means nothing.
    """
    is_upper = (lane & 2) != 0
    got_0 = cute.arch.shuffle_sync_bfly(words[0] if is_upper else words[2], 2)
    got_1 = cute.arch.shuffle_sync_bfly(words[1] if is_upper else words[3], 2)
    return (
        got_0 if is_upper else words[0],
        got_1 if is_upper else words[1],
        words[2] if is_upper else got_0,
        words[3] if is_upper else got_1,
    )


@cute.jit
def rope_words(lane: Any, second: Any, third: Any) -> Any:
    """From the two words each of a rope lane's second and third piece to its four words, the inverse of rope_pieces."""
    is_upper = (lane & 2) != 0
    got_0 = cute.arch.shuffle_sync_bfly(second[0] if is_upper else third[0], 2)
    got_1 = cute.arch.shuffle_sync_bfly(second[1] if is_upper else third[1], 2)
    return (
        got_0 if is_upper else second[0],
        got_1 if is_upper else second[1],
        third[0] if is_upper else got_0,
        third[1] if is_upper else got_1,
    )


# ---- from a bf16 row to its record


@cute.jit
def encode(lane: Any, first: Any, second: Any, rope: Any, arch: cutlass.Constexpr) -> Any:
    """What a lane stores of a row whose words it has: its codes of both halves, its rope pieces, the scale bytes. All
    lanes of the warp must call; whether the row is stored may then depend on its slot.

    first, second    words of both halves; a rope lane's second ones mean nothing
    rope             a rope lane's words of the second half
    arch             compile target
    """
    byte_first, byte_second = _scale_bytes(first, second, arch)
    scales = _collected(byte_first | (Int32(0) if lane >= ROPE_LANE else byte_second) << 16)
    codes = _codes(first, byte_first, arch)
    codes_second = _codes(second, byte_second, arch)
    return codes, codes_second, rope_pieces(lane, rope), scales


@cute.jit
def store_encoded(lane: Any, start: Any, row: Any, block_size: Any, pieces: Any) -> None:
    """Store what `encode` made as row `row` of the page at address `start`."""
    codes, codes_second, rope, scales = pieces
    data = start + Int64(row) * FP8_DS_MLA.data_bytes
    scale = start + Int64(block_size) * FP8_DS_MLA.data_bytes + Int64(row) * FP8_DS_MLA.scale_bytes
    is_rope = lane >= ROPE_LANE
    ptx.store_global_64(data + Int64(lane * 8), *codes)
    ptx.store_global_64(
        data + Int64(second_offset(lane)),
        rope[0] if is_rope else codes_second[0],
        rope[1] if is_rope else codes_second[1],
    )
    if is_rope or lane == 0:
        ptx.store_global_64(
            data + Int64(third_offset(lane)) if is_rope else scale,
            rope[2] if is_rope else scales[0],
            rope[3] if is_rope else scales[1],
        )


@cute.jit
def _scale_bytes(first: Any, second: Any, arch: cutlass.Constexpr) -> Any:
    """ue8m0 bytes of the two blocks a lane has columns of."""
    a = convert.absmax_bf16x2(*first)
    b = convert.absmax_bf16x2(*second)
    # one word per lane: maximum of the first half's block below, of the second half's above
    both = ptx.max_bf16x2(ptx.permute_bytes(a, b, 0x5410), ptx.permute_bytes(a, b, 0x7632))
    for step in range_constexpr(3):
        both = ptx.max_bf16x2(both, cute.arch.shuffle_sync_bfly(both, 1 << step))
    halves = (half(both) for half in (convert.bf16_low, convert.bf16_high))
    low, high = convert.ue8m0_from_absmax_each(halves, E4M3_MAX, CACHE_FLOOR, arch)
    return low, high


@cute.jit
def _collected(pair: Any) -> Any:
    """The eight scale bytes as two words, right in lane 0. Bytes 0 and 2 of `pair` belong to the lane's blocks."""
    pair = ptx.permute_bytes(pair, cute.arch.shuffle_sync_bfly(pair, 8), 0x6240)  # blocks 0 1 4 5
    other = cute.arch.shuffle_sync_bfly(pair, 16)  # blocks 2 3 6 7
    return ptx.permute_bytes(pair, other, 0x5410), ptx.permute_bytes(pair, other, 0x7632)


def _codes(words: Any, byte: Any, arch: str) -> Any:
    """A lane's eight codes, as two words."""
    factor = convert.ue8m0_inverse(byte)
    return (
        convert.e4m3_from_bf16x4(words[0], words[1], factor, arch),
        convert.e4m3_from_bf16x4(words[2], words[3], factor, arch),
    )


# ---- from a record to its bf16 row


class Loaded(NamedTuple):
    """What a lane has loaded of a record: two words of each of its pieces, of a rope lane both second ones are rope."""

    codes: Any
    second: Any
    third: Any


class Offsets(NamedTuple):
    """Of a lane's second and third piece in a record, int64."""

    second: Any
    third: Any

    @classmethod
    def of(cls, lane: Any) -> Offsets:
        return cls(Int64(second_offset(lane)), Int64(third_offset(lane)))


def load(data: Any, scales: Any, lane: Any, offsets: Offsets) -> Loaded:
    """Load a lane's share of the record whose codes and scales are at these addresses."""
    codes = ptx.load_global_64_in_order(data + Int64(lane * 8))
    second = ptx.load_global_64_in_order(data + offsets.second)
    third = cutlass.select_(lane >= ROPE_LANE, data + offsets.third, scales)
    return Loaded(codes, second, ptx.load_global_64_in_order(third))


def store_loaded(target: Any, lane: Any, loaded: Loaded, predicate: Any, arch: str) -> None:
    """Store a lane's columns of a loaded record as bf16, the row's first column at `target`, where predicate holds. All
    lanes of the warp must call."""
    rope = rope_words(lane, loaded.second, loaded.third)
    # lanes with rope have no scales: they need those of block 3 for their first columns
    low = cute.arch.shuffle_sync(loaded.third[0], lane % ROPE_LANE)
    store_decoded(target, lane, loaded.codes, loaded.second, rope, (low, loaded.third[1]), predicate, arch)


@cute.jit
def store_decoded(
    target: Any,
    lane: Any,
    codes: Any,
    codes_second: Any,
    rope: Any,
    scales: Any,
    predicate: Any,
    arch: cutlass.Constexpr,
) -> None:
    """Store a lane's eight columns of each half of a row whose first column belongs at `target`, where predicate holds.

    codes, codes_second   two words each; what a rope lane has in the second ones does not matter
    rope                  a rope lane's four words; what others have does not matter
    scales                the eight scale bytes as two words, in every lane
    arch                  compile target
    """
    shift = lane // 8 * 8
    factor = convert.ue8m0_value((scales[0] >> shift) & 0xFF)
    factor_second = convert.ue8m0_value((scales[1] >> shift) & 0xFF)
    words = _values(codes, factor, arch)
    words_second = _values(codes_second, factor_second, arch)
    start = target + Int64(lane * 16)
    ptx.store_global_128(start, words, predicate)
    words_second = _choose(lane >= ROPE_LANE, rope, words_second)
    ptx.store_global_128(start + HALF_ROW, words_second, predicate)


def store_zeros(target: Any, lane: Any, predicate: Any) -> None:
    """As store_decoded: a row that no page has."""
    start = target + Int64(lane * 16)
    for half in (0, HALF_ROW):
        ptx.store_global_128(start + half, (Int32(0),) * 4, predicate)


def _values(codes: Any, factor: Any, arch: str) -> Any:
    return convert.bf16x4_from_e4m3(codes[0], factor, arch) + convert.bf16x4_from_e4m3(codes[1], factor, arch)


@cute.jit
def _choose(condition: Any, a: Any, b: Any) -> Any:
    return (
        a[0] if condition else b[0],
        a[1] if condition else b[1],
        a[2] if condition else b[2],
        a[3] if condition else b[3],
    )


# ---- V4.1's own records: every lane has both runs of columns in codes, and a scale for each


class LoadedRow(NamedTuple):
    """What a lane has loaded of a record: words of codes and one with the scale among its bytes, of both runs."""

    codes: Any
    codes_second: Any
    scales: Any
    scales_second: Any


class Places(NamedTuple):
    """Where a record's codes are, and its scales: so many bytes behind an address."""

    codes: Any
    scales: Any
    behind: int


def places_v41(page: Any, row: Any, page_rows: Any, kv_format: str) -> Places:
    """Of row `row` of the page at that address, which has so many rows."""
    fmt = FORMATS[kv_format]
    if not fmt.is_split:
        record = page + Int64(row) * fmt.row_elements
        return Places(record, record, fmt.data_bytes)
    scales = page + Int64(page_rows) * fmt.data_bytes
    return Places(page + Int64(row) * fmt.data_bytes, scales + Int64(row) * fmt.scale_bytes, 0)


def load_v41(places: Places, lane: Any, kv_format: str) -> LoadedRow:
    """Load a lane's share of the record there."""
    fmt, record = FORMATS[kv_format], places.codes
    scales, half_scales = places.scales + places.behind, fmt.scale_bytes // 2
    codes: list[Any]
    if isinstance(fmt, Mxfp8V41Format):
        codes = [ptx.load_global_64_in_order(record + Int64(lane * 8) + first) for first in (0, HALF_CODES)]
        first_scale = lane // 16 * 4
    else:
        codes = [(ptx.load_global_s32_in_order(record + Int64(lane * 4) + first),) for first in (0, HALF_CODES // 2)]
        first_scale = lane // 8 * 4
    words = [ptx.load_global_s32_in_order(scales + Int64(first_scale) + first) for first in (0, half_scales)]
    return LoadedRow(*codes, *words)


@cute.jit
def store_decoded_v41(
    target: Any, lane: Any, row: LoadedRow, predicate: Any, kv_format: cutlass.Constexpr, arch: cutlass.Constexpr
) -> None:
    """As store_decoded, of what load_v41 has loaded."""
    fmt = const_expr(FORMATS[kv_format])
    lanes = const_expr(fmt.quant_block // 8)
    shift = lane // lanes % 4 * 8
    start = target + Int64(lane * 16)
    for half in range_constexpr(2):
        byte = (row[2 + half] >> shift) & 0xFF
        if const_expr(isinstance(fmt, Mxfp8V41Format)):
            words = _values(row[half], convert.ue8m0_value(byte), arch)
        else:
            scale = convert.bf16x2_of_e4m3(byte)
            words = [ptx.multiply_bf16x2(pair, scale) for pair in convert.bf16_of_e2m1(*row[half])]
        ptx.store_global_128(start + half * HALF_ROW, words, predicate)


@cute.jit
def store_v41(
    lane: Any, places: Places, words: Any, predicate: Any, kv_format: cutlass.Constexpr, arch: cutlass.Constexpr
) -> None:
    """Quantize a lane's columns and store them in the record there, where predicate holds. All lanes of the warp must
    call. words: four of each half"""
    fmt = const_expr(FORMATS[kv_format])
    lanes = const_expr(fmt.quant_block // 8)
    for half in range_constexpr(2):
        own = words[4 * half : 4 * half + 4]
        largest = convert.magnitude_or_nan(own, lanes)
        is_nan, absmax = largest > 0x7F80, (largest << 16).bitcast(Float32)
        codes_at = places.codes + Int64(half * (fmt.data_bytes // 2))
        if const_expr(isinstance(fmt, Mxfp8V41Format)):
            scale = convert.ue8m0_from_absmax(absmax, E4M3_MAX, CACHE_FLOOR)
            low, high = _codes(own, scale, arch)
            low, high = (Int32(0x7F7F7F7F) if is_nan else low), (Int32(0x7F7F7F7F) if is_nan else high)
            scale = Int32(0xFF) if is_nan else scale
            ptx.store_global_64(codes_at + Int64(lane * 8), low, high, predicate)
        else:
            scale, factor = convert.nvfp4_scale(absmax)
            # of quotients, by way of their f16, see convert.nvfp4_scale: not by Blackwell's instruction
            codes = convert.e2m1_from_bf16s(own, factor, "ties_to_even")
            scale = Int32(0x7F) if is_nan else scale
            ptx.store_global_s32(codes_at + Int64(lane * 4), Int32(0) if is_nan else codes, predicate)
        scale_at = places.scales + Int64(places.behind + half * (fmt.scale_bytes // 2) + lane // lanes)
        ptx.store_global_8(scale_at, scale, predicate & (lane % lanes == 0))
