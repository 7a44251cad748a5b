# SPDX-License-Identifier: Apache-2.0
"""Attention's output as the projection behind it takes it: rotary columns turned back, e4m3 codes, power-of-two scales.

What `fused_inv_rope_fp8_quant` would make of the bf16 results, byte for byte, without their way through memory: results
are rounded to bf16, their last 64 columns are rotated back by the row's position, and each 128 columns get a scale.

A thread of a warpgroup has its results as tensor cores leave them (dsl/wgmma.py): of a side of 256 columns, two of
every 8 columns in two rows. The 128 columns of a scale are in the registers of four lanes, and so is what they become:

    total[4 i + 2 half + j]    column 8 i + 2 (lane % 4) + j of row lane // 4 + 8 half
    word m of 64 columns       codes of its columns 16 m + 2 (lane % 4) + {0, 1, 8, 9}
    after the exchange         16 neighbouring codes, one store
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import exchange_in_quad, lanes_max, over_quad
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.dsl.transforms import HALF_TABLE_BYTES, rotate_pair_back, table_row
from cute_kernels.formats import HEAD_DIM, ROPE_DIM
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR

SCALED = 128
"""Columns that share a scale."""

HEAD_SCALES = HEAD_DIM // SCALED

SIDE = 256
"""Columns that a warpgroup has of a head."""

ROPE = SIDE - ROPE_DIM
"""First rotary column of the second side."""

BLOCK = 64
"""Columns whose codes four lanes exchange at a time."""


class Rotation(NamedTuple):
    """The angles of each token.

    positions, position_stride         int64 of each token: address, stride in bytes
    table, table_stride, table_rows    rows of 32 cosines and 32 sines: address, stride in bytes, number
    """

    positions: Any
    position_stride: Any
    table: Any
    table_stride: Any
    table_rows: Any

    @classmethod
    def of(cls, positions: cute.Tensor, table: cute.Tensor) -> Rotation:
        """On the host's side of the launch."""
        return cls(
            address(positions), stride_bytes(positions, 0), address(table), stride_bytes(table, 0), length(table, 0)
        )

    @cute.jit
    def angles_at(self, token: Any) -> Any:
        """Address of a token's cosines."""
        # a kernel before may write positions, nobody the table
        position = ptx.load_global_s64_in_order(self.positions + Int64(token) * self.position_stride)
        return self.table + table_row(position, self.table_rows) * self.table_stride


class QuantOutput(NamedTuple):
    """Where codes and scales go, and what the rotation needs.

    codes, token_stride, group_stride  e4m3 [tokens, groups, heads of a group * 512]: address, strides in bytes
    scales, scale_group, scale_row     fp32 [groups, heads of a group * 4, padded tokens]: address, strides in bytes
    tokens, padded_tokens              numbers of them
    group_heads                        divisor by the heads of a group
    """

    rotation: Rotation
    codes: Any
    token_stride: Any
    group_stride: Any
    scales: Any
    scale_group: Any
    scale_row: Any
    tokens: Any
    padded_tokens: Any
    group_heads: Any

    def angles_at(self, token: Any) -> Any:
        """Address of a token's cosines."""
        return self.rotation.angles_at(token)

    @cute.jit
    def angles(self, token: Any, lane: Any) -> tuple[Any, Any]:
        """Cosine and sine of a token's pair number `lane`, of 32, as words."""
        at = self.angles_at(token) + lane * 4
        return ptx.load_global_s32_again(at), ptx.load_global_s32_again(at + HALF_TABLE_BYTES)

    @cute.jit
    def store_scale(self, byte: Any, token: Any, head: Any, chunk: Any, lane: Any, condition: Any) -> None:
        """Store a scale, by four lanes of whom the first three after it store zeros behind the last token's.

        byte    its exponent, in each of them
        chunk   of the head's four
        lane    0 to 3; more do nothing
        """
        group, offset = divmod(head, self.group_heads)
        row = Int64(offset * HEAD_SCALES + chunk)
        at = self.scales + Int64(group) * self.scale_group + row * self.scale_row + Int64(token + lane) * 4
        is_padding = (token + 1 == self.tokens) & (token + lane < self.padded_tokens) & (lane < 4)
        word = byte << 23 if lane == 0 else Int32(0)
        ptx.store_global_s32(at, word, condition & ((lane == 0) | is_padding))

    @cute.jit
    def codes_at(self, token: Any, head: Any) -> Any:
        """Address of the codes of a head."""
        group, offset = divmod(head, self.group_heads)
        return self.codes + Int64(token) * self.token_stride + Int64(group) * self.group_stride + offset * HEAD_DIM

    @cute.jit
    def store(
        self,
        total: cute.Tensor,
        factors: Any,
        angles: Any,
        token: Any,
        head: Any,
        rows: Any,
        side: Any,
        lane: Any,
    ) -> None:
        """Store a side of the results of a warpgroup's 64 heads. All lanes of a warp.

        total     registers, lost: the thread's results
        factors   what those of its two rows are multiplied with first
        angles    of the token's pair number `lane`, needed by the second side
        head      number of the thread's first row's
        rows      how many heads there are from it on
        """
        for half in range_constexpr(2):
            is_there = 8 * half < rows
            target = self.codes_at(token, head + 8 * half) + side * SIDE + (lane & 3) * 16
            for chunk in range_constexpr(SIDE // SCALED):
                self.round(total, factors[half], half, chunk)
                if const_expr(chunk == SIDE // SCALED - 1):
                    self.turn(total, angles, half, side, lane)
                byte = self.scale_of(total, half, chunk)
                number = side * (SIDE // SCALED) + chunk
                self.store_scale(byte, token, head + 8 * half, number, lane & 3, is_there)
                factor = convert.ue8m0_inverse(byte)
                for block in range_constexpr(chunk * (SCALED // BLOCK), (chunk + 1) * (SCALED // BLOCK)):
                    own = exchange_in_quad(lane, self.codes_of(total, half, block, factor))
                    sixteen = [
                        ptx.permute_bytes(own[2 * (i % 2)], own[2 * (i % 2) + 1], 0x7632 if i // 2 else 0x5410)
                        for i in range(4)
                    ]
                    ptx.store_global_128(target + block * BLOCK, sixteen, is_there)

    @cute.jit
    def round(self, total: cute.Tensor, factor: Any, half: cutlass.Constexpr, chunk: cutlass.Constexpr) -> None:
        """What 128 columns of one of the thread's rows are as bf16."""
        for block in range_constexpr(chunk * (SCALED // 8), (chunk + 1) * (SCALED // 8)):
            i = 4 * block + 2 * half
            pair = ptx.bf16x2(total[i] * factor, total[i + 1] * factor)
            total[i], total[i + 1] = convert.bf16_low(pair), convert.bf16_high(pair)

    def turn(self, total: cute.Tensor, angles: Any, half: int, side: Any, lane: Any) -> None:
        """Turn the rotary columns of one of the thread's rows back; the second side has them. The first side does the
        same and keeps what it had: behind a branch the old and the new columns would need registers at once."""
        for block in range(ROPE // 8, SIDE // 8):
            number = (block - ROPE // 8) * 4 + (lane & 3)
            cos, sin = (cute.arch.shuffle_sync(angle, number).bitcast(Float32) for angle in angles)
            i = 4 * block + 2 * half
            for j, turned in enumerate(rotate_pair_back(total[i], total[i + 1], cos, sin)):
                total[i + j] = cutlass.select_(side == 1, turned, total[i + j])

    @cute.jit
    def scale_of(self, total: cute.Tensor, half: cutlass.Constexpr, chunk: cutlass.Constexpr) -> Any:
        """Exponent byte of the scale of 128 columns."""
        largest = Float32(0.0)
        for block in range_constexpr(chunk * (SCALED // 8), (chunk + 1) * (SCALED // 8)):
            for j in range_constexpr(2):
                largest = ptx.max_f32(largest, ptx.abs_f32(total[4 * block + 2 * half + j]))
        return convert.ue8m0_from_absmax(over_quad(largest, ptx.max_f32), E4M3_MAX, OUTPUT_FLOOR)

    def codes_of(self, total: cute.Tensor, half: int, block: int, factor: Any) -> list[Any]:
        """The thread's codes of 64 columns."""
        words = []
        for m in range(BLOCK // 16):
            first = [4 * (block * (BLOCK // 8) + 2 * m + i) + 2 * half for i in range(2)]
            words.append(ptx.e4m3x4(*(total[i + j] * factor for i in first for j in range(2))))
        return words


def codes_of_lanes(values: list[Any], lanes: int) -> tuple[Any, list[Any]]:
    """Exponent byte of the scale and the lane's codes of 128 columns that so many neighbouring lanes have; all call.

    values   the lane's columns, a multiple of four
    """
    largest = Float32(0.0)
    for value in values:
        largest = ptx.max_f32(largest, ptx.abs_f32(value))
    byte = convert.ue8m0_from_absmax(lanes_max(largest, lanes), E4M3_MAX, OUTPUT_FLOOR)
    factor = convert.ue8m0_inverse(byte)
    return byte, convert.e4m3_words([value * factor for value in values])


@cute.jit
def turn_two(values: list[Any], angles: Any, is_rope: Any) -> list[Any]:
    """Four neighbouring columns, turned back if they are rotary. angles: words, the cosines and sines of their pairs"""
    turned = []
    for i in range_constexpr(2):
        cos, sin = (words[i].bitcast(Float32) for words in angles)
        pair = rotate_pair_back(values[2 * i], values[2 * i + 1], cos, sin)
        turned += [pair[j] if is_rope else values[2 * i + j] for j in range(2)]
    return turned


def load_two_angles(at: Any) -> list[Any]:
    """The cosines and sines of a pair and the one behind it, as words; at: address of the first cosine."""
    return [ptx.load_global_64_again(at + half * HALF_TABLE_BYTES) for half in range(2)]


def fake_quant() -> tuple[Any, ...]:
    """What a kernel is compiled for: codes, and what quant_of takes behind them."""

    def strides(count: int, multiple: int = 1) -> tuple[Any, ...]:
        return tuple(cute.sym_int64(divisibility=multiple) for _ in range(count))

    def sizes(count: int) -> tuple[Any, ...]:
        return tuple(cute.sym_int() for _ in range(count))

    return (
        make_fake_tensor(Float8E4M3FN, sizes(3), stride=(*strides(2, 16), 1), assumed_align=16),
        make_fake_tensor(Float32, sizes(3), stride=(*strides(2), 1)),
        make_fake_tensor(Int64, sizes(1), stride=strides(1)),
        make_fake_tensor(Float32, (cute.sym_int(), ROPE_DIM), stride=(*strides(1), 1)),
    )


def quant_of(codes: cute.Tensor, scales: cute.Tensor, positions: cute.Tensor, table: cute.Tensor) -> QuantOutput:
    """The kernel's argument. On the host's side of the launch."""
    return QuantOutput(
        Rotation.of(positions, table),
        address(codes),
        stride_bytes(codes, 0),
        stride_bytes(codes, 1),
        address(scales),
        stride_bytes(scales, 0),
        stride_bytes(scales, 1),
        length(codes, 0),
        length(scales, 2),
        cute.fast_divmod_create_divisor_v2(length(codes, 2) // HEAD_DIM),
    )
