"""MXFP4 rows as e4m3 codes for Hopper's tensor cores.

An e2m1 number times 2^6 to 2^-8 is an e4m3 number. So a row, which is a key or a query head, becomes e4m3 codes times
one power of two, if its blocks' scales are at most 14 binary orders below the largest: that one's codes are taken times
2^6, and the row counts 2^-6 times its scale. Rows with smaller scales ("far" ones) have all their codes taken times
2^6; how far each block is below the largest remains to be applied to its products.

Signs are opposite in all of it, keys and queries alike.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, range_constexpr

from cute_kernels.dsl import convert, ptx
from cute_kernels.indexer.mxfp4_plan import RAISED

BLOCKS = 4
"""Of a row, with a scale each; lane i of every four has block i % 4."""

_BYTES = 0x00FF00FF
_ONE = 0x00010001
_MANY = 0x01F001F0
"""Bits of a number of at most 256 that is at least 16, in both halves of a word."""


class Rows(NamedTuple):
    """What a lane knows of rows r and r + 8 of a warp's 16, r = lane // 4, the former in the low half of each word:

    largest   ue8m0 byte of the largest scale
    far       all bits set if a block is too far below
    below     if so, how far the lane's block is, else 0
    """

    largest: Any
    far: Any
    below: Any


@cute.jit
def decode(words: Any, codes: Any, entries: tuple[Any, Any], sign: Any) -> None:
    """Decode 16 rows of packed codes at an address of shared memory. By one warp.

    entries   addresses of the codes that the lane's blocks of rows r and r + 8 take
    sign      sign_of(table)
    words     16 registers: of pieces 0 to 3, eight columns of the lane's block each, the words (row r, columns 0 to 3),
              (row r + 8, the same), (row r, columns 4 to 7), (row r + 8, the same)
    """
    lane = cute.arch.lane_idx()
    for row in range_constexpr(2):
        packed = ptx.load_shared_128(codes + row * 512 + lane * 16)
        low, high = ptx.load_shared_64(entries[row])
        for piece in range_constexpr(4):
            first, second = convert.e4m3_from_e2m1x8(packed[piece], low, high, sign)
            words[piece * 4 + row], words[piece * 4 + 2 + row] = first, second


@cute.jit
def look_at(scales: Any, table: Any) -> tuple[Rows, tuple[Any, Any]]:
    """What the scales of 16 rows say, at an address of shared memory, and addresses of the codes that the lane's blocks
    of rows r and r + 8 take. By one warp."""
    lane = cute.arch.lane_idx()
    own = ptx.load_shared_u8(scales + lane) | (ptx.load_shared_u8(scales + 32 + lane) << 16)
    largest = own
    for distance in (1, 2):
        largest = ptx.max_u16x2(largest, cute.arch.shuffle_sync_bfly(largest, distance))
    below = largest - own
    far, rest = Int32(0), Int32(0)
    is_many = (below + _ONE) & _MANY
    if cute.arch.vote_any_sync(is_many != 0):
        for distance in (1, 2):
            is_many |= cute.arch.shuffle_sync_bfly(is_many, distance)
        far = (Int32(0x0000FFFF) if is_many & 0xFFFF != 0 else Int32(0)) | (
            Int32(-0x10000) if is_many & -0x10000 != 0 else Int32(0)
        )
        rest, below = below & far, below & ~far
    return Rows(largest, far, rest), (table + (below & 0xFFFF) * 8, table + (below >> 16) * 8)


@cute.jit
def ready_row(word: Any) -> tuple[Any, Any, Any]:
    """Of a row's four scales: for each block a byte, how far from the table's begin its codes are; what the row's e4m3
    codes count; and whether the row is far."""
    pairs = word & _BYTES, (word >> 8) & _BYTES
    largest = ptx.max_u16x2(*pairs)
    largest = cutlass.max(largest & 0xFFFF, largest >> 16)
    below = largest * 0x01010101 - word
    is_far = ((below & _BYTES) + _ONE | (below >> 8 & _BYTES) + _ONE) & _MANY != 0
    return (Int32(0) if is_far else below << 3), row_scale(largest), is_far


@cute.jit
def decode_into(line: Any, codes: Any, scales: Any, table: Any) -> Rows:
    """As `decode`, into rows of 128 bytes of shared memory, where the swizzle of the products' operands has them.

    line   address of row r: of the 16, a multiple of 8 rows after a multiple of 1024 bytes
    """
    lane = cute.arch.lane_idx()
    sign = sign_of(table)
    rows, entries = look_at(scales, table)
    for row in range_constexpr(2):
        packed = ptx.load_shared_128(codes + row * 512 + lane * 16)
        low, high = ptx.load_shared_64(entries[row])
        for piece in range_constexpr(4):
            found = convert.e4m3_from_e2m1x8(packed[piece], low, high, sign)
            for i in range_constexpr(2):
                ptx.store_shared_s32(line + row * 1024 + place(lane, piece, i) + lane % 4 * 4, found[i])
    return rows


def place(lane: Any, piece: Any, i: Any) -> Any:
    """Where four columns of each block are, in row lane // 4 of 8: words `i` of piece `piece`, as of `decode`."""
    return (piece * 2 + i ^ lane // 4) * 16


@cute.jit
def decode_heads(line: Any, codes: Any, scales: Any, below: Any, weights: Any, table: Any) -> Any:
    """As decode_into, of heads, whose weights are at an address of shared memory, and get what the heads' codes count.
    What these lack in far rows goes to another, a byte for each block. By one warp; 1 if a head is far, else 0."""
    lane = cute.arch.lane_idx()
    rows = decode_into(line, codes, scales, table)
    for row in range_constexpr(2):
        ptx.store_shared_8(below + row * 32 + lane, rows.below >> (16 * row))
        if lane % 4 == 0:
            weight = weights + (row * 8 + lane // 4) * 4
            scale = row_scale(half(rows.largest, 16 * row))
            ptx.store_shared_f32(weight, ptx.load_shared_f32(weight) * scale)
    return Int32(1) if cute.arch.vote_any_sync(rows.far != 0) else Int32(0)


def half(word: Any, shift: Any) -> Any:
    """The 16 bits of a word that belong to row r (shift 0) or r + 8 (shift 16)."""
    return (word >> shift) & 0xFFFF


def row_scale(largest: Any) -> Any:
    """What a row's e4m3 codes count: fp32."""
    return convert.ue8m0_value(largest) * Float32(RAISED)


def power_below(exponent: Any) -> Any:
    """fp32 2^-exponent, 0 from 127 on."""
    return (cutlass.max(Int32(127) - exponent, Int32(0)) << 23).bitcast(Float32)


def sign_of(table: Any) -> Any:
    """E2M1_SIGN, in a register: the compiler would make sixteen of a number that it knows."""
    return ptx.load_shared_s32(table + 2 * len(convert.E2M1_IN_E4M3) * 4)


def fill_table(table: Any) -> None:
    """Write the e4m3 codes, and E2M1_SIGN behind them, to shared memory. By one thread."""
    numbers = [int.from_bytes(bytes(row[i : i + 4]), "little") for row in convert.E2M1_IN_E4M3 for i in (0, 4)]
    numbers += [convert.E2M1_SIGN] * (-len(numbers) % 4)
    for i in range(0, len(numbers), 4):
        ptx.store_shared_128(table + i * 4, numbers[i : i + 4])
