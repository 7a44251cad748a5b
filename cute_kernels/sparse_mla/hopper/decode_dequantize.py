# SPDX-License-Identifier: Apache-2.0
"""The dequantizers of hopper/decode.py: records of a cache, as its copies left them in the fp8 ring, become bf16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.dsl import barriers, convert, ptx
from cute_kernels.sparse_mla.hopper.decode_smem import (
    END,
    EXTRA,
    FP8_KEYS,
    FP8_PITCH,
    FP8_STAGE_BYTES,
    HEADER,
    HEADERS,
    KV_STAGE_BYTES,
    LAST_SLAB,
    PING_PONG,
    SLAB,
    SLAB_BYTES,
    SLABS,
    WARP_KEYS,
    Bars,
    RecordPart,
    Smem,
)

# ---- dequantization

CHUNKS = SLABS + 1
"""16-byte loads of a thread per row: one of each fp8 slab, two of the rotary one."""

STAGE_SLAB_BYTES = FP8_KEYS * SLAB * 2
"""Of 32 keys: from a thread's first row to its second, 32 keys further."""

ONES = 0x7F7F7F7F
"""Scale bytes that say 1."""

LARGE = (-0x7F7F7F80, 0x00808080)
"""Of the scale bytes of a CTA's slabs, the bits that make a scale 2 or more."""

LEAST_POWER, NAN = 0x0040, 0x7FC0
"""bf16 bits of 2^-127, which is subnormal, and of a NaN: scale bytes 0 and 255."""


E2M1_WORDS = 12
"""Of a row in NVFP4: four words of scales, then two words of codes of each slab."""

E2M1_SHIFT = 8
"""Rows in NVFP4 are dequantized to 2^-8 of their values: an e2m1 code as bf16 is 2^-126 of its value, and the other
factor, with the scale in it, has to be a bf16. The softmax knows: scores of such tiles are multiplied with 2^8, and so
is P."""

E4M3_TO_E2M1 = 0x7B007B00
"""2^119 in both halves of a word, as bf16: twice that makes of 2^-120 of a scale 2^118 of it, which belongs to codes
2^-126 of their value for 2^-8 of the product."""

NAN_CODES, NAN_LOW, NAN_HIGH = 0x7F7F7F7F, 0x7FC0, 0x7FC00000


@cute.jit
def e2m1_factors(words: Any, member: Any, masks: Any = None) -> Any:
    """Factors of the codes of slabs, four of each four words, which are their scales: bf16, two in a word, 2^118 of the
    scales of the thread's columns. masks: None, or of each four words what to keep of its scales"""
    # of each slab's four scales that of the thread's 16 columns
    chosen = 0x40 + member * 0x11
    factors, nans = [], []
    for i in range_constexpr(0, len(words), 4):
        halves = [ptx.permute_bytes(words[i + j], words[i + j + 1], chosen) for j in (0, 2)]
        codes = ptx.permute_bytes(halves[0], halves[1], 0x5410)
        if const_expr(masks is not None):
            codes = codes & masks[i // 4]
        factors += convert.bf16_pairs_of_e4m3([codes], [ptx.again(E4M3_TO_E2M1)] * 2)
        nans.append((codes & NAN_CODES) + 0x01010101)
    has_nan = nans[0]
    for nan in nans[1:]:
        has_nan = has_nan | nan
    if has_nan & 0x80808080 != 0:
        for i in range_constexpr(len(nans)):
            nan, low, high = nans[i], factors[2 * i], factors[2 * i + 1]
            low = low | (Int32(NAN_LOW) if nan & 0x80 != 0 else Int32(0))
            low = low | (Int32(NAN_HIGH) if nan & 0x8000 != 0 else Int32(0))
            high = high | (Int32(NAN_LOW) if nan & 0x800000 != 0 else Int32(0))
            high = high | (Int32(NAN_HIGH) if nan < 0 else Int32(0))
            factors[2 * i], factors[2 * i + 1] = low, high
    return factors


@dataclass(frozen=True)
class RowConverter:
    """What a thread does with its shares of two rows once it has loaded them: of columns of CTA `rank` of the
    cluster."""

    rank: Any

    @cute.jit
    def set_scales(self, part: cutlass.Constexpr, scales: Any, exact: Any) -> Any:
        """Scale bytes to convert with: those of the rows, or ones if the warp has large ones. Whether it has."""
        for piece in range_constexpr(2):
            scales[piece] = exact[piece]
        if const_expr(part.rotary != 0):
            large = (scales[0] | scales[1]) & (Int32(LARGE[0]) if self.rank == 0 else Int32(LARGE[1]))
        else:
            large = (scales[0] | scales[1]) & LARGE[0]
        is_large = cute.arch.vote_any_sync(large != 0)
        if is_large:
            scales.fill(ONES)
        return is_large

    @cute.jit
    def convert(self, raw: Any, scales: Any, slab: cutlass.Constexpr, target: Any) -> None:
        """Store a slab's fp8 columns of the thread's two rows as bf16."""
        for piece in range_constexpr(2):
            factor = ptx.bf16x2_of_ue8m0(scales[piece], slab)
            for chunk in range_constexpr(2):
                first = 4 * (CHUNKS * piece + slab) + 2 * chunk
                words = convert.bf16_pairs_of_e4m3([raw[first + word] for word in range(2)], [factor])
                ptx.store_shared_128((target ^ (16 * chunk)) + piece * STAGE_SLAB_BYTES, words)

    @cute.jit
    def move(self, raw: Any, slab: cutlass.Constexpr, target: Any, skipped: Any) -> None:
        """Store the rotary columns of the thread's two rows."""
        for piece in range_constexpr(2):
            # where nothing was loaded there may be NaN
            mask = (skipped[piece] & 1) - 1
            for chunk in range_constexpr(2):
                words = [raw[4 * (CHUNKS * piece + slab + chunk) + word] & mask for word in range(4)]
                ptx.store_shared_128((target ^ (64 * chunk)) + piece * STAGE_SLAB_BYTES, words)

    @cute.jit
    def scale_again(self, part: cutlass.Constexpr, target: Any, exact: Any) -> None:
        """A tile with scales of 2 or more, too large for one product in bf16: it was converted with scales of 1. Scale
        what the thread has stored."""
        slabs = SLABS - self.rank if const_expr(part.rotary != 0) else Int32(SLABS)
        for slab in cutlass.range(slabs, unroll=1):
            for piece in range_constexpr(2):
                byte = (exact[piece] >> (slab * 8)) & 0xFF
                power = Int32(LEAST_POWER) if byte == 0 else byte << 7
                factor = (Int32(NAN) if byte == 255 else power) * 0x00010001
                for chunk in range_constexpr(2):
                    words_at = ((target + slab * SLAB_BYTES) ^ (16 * chunk)) + piece * STAGE_SLAB_BYTES
                    words = ptx.load_shared_128(words_at)
                    ptx.store_shared_128(words_at, [ptx.multiply_bf16x2(word, factor) for word in words])

    # ---- NVFP4

    @cute.jit
    def convert_e2m1(self, raw: Any, factors: Any, slab: cutlass.Constexpr, target: Any) -> None:
        """Store a slab's columns of the thread's two rows as bf16, 2^-8 of their values."""
        for piece in range_constexpr(2):
            half = const_expr(0x1010 if slab % 2 == 0 else 0x3232)
            factor = ptx.permute_bytes(factors[piece][slab // 2], factors[piece][slab // 2], half)
            for chunk in range_constexpr(2):
                pairs = convert.bf16_pairs_of_e2m1(raw[E2M1_WORDS * piece + 4 + 2 * slab + chunk])
                words = [ptx.multiply_bf16x2(pair, factor) for pair in pairs]
                ptx.store_shared_128((target ^ (16 * chunk)) + piece * STAGE_SLAB_BYTES, words)


@dataclass(frozen=True)
class Dequantizer:
    """A dequantizer warpgroup: converts every second tile, from `warpgroup` on, to bf16.

    A thread has a share of two rows of a tile, 32 keys apart: of each, 16 neighbouring columns of every slab, which
    become two chunks of 16 bytes, or twice 8 rotary ones in bf16, which are chunks already.

    parts   of both caches' records; what a thread has loaded of a row, in `raw`, and of its scales, in `exact`, is
            fp8_ds_mla/1   CHUNKS chunks of codes and rotary columns; a scale byte for each slab
            mxfp8_v41/1    as many, the last of them nothing; a scale byte for each slab, which is that of its half
            nvfp4_v41/1    E2M1_WORDS words; exact means nothing
    """

    parts: tuple[RecordPart, RecordPart]
    bars: Bars
    smem: Smem
    rank: Any
    thread: Any
    warpgroup: Any

    @cute.jit
    def run(self) -> None:
        """Fill every second stage of the KV ring."""
        bars, smem = self.bars, self.smem
        lane = self.thread % 32
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        quad, member = lane // 4, lane % 4
        row = warp * 8 + quad
        raw = cute.make_rmem_tensor((2 * CHUNKS * 4,), Int32)
        scales = cute.make_rmem_tensor((2,), Int32)
        exact = cute.make_rmem_tensor((2,), Int32)
        # where the thread's first chunk lies, if it has 2 m and 2 m + 1, or m and m + 4
        row_at = smem.kv + row * (SLAB * 2)
        fp8_at, rope_at = row_at + ((2 * member ^ quad) << 4), row_at + ((member ^ quad) << 4)

        raw_at, scale_at = smem.fp8 + row * FP8_PITCH + member * 16, smem.scale + row * 4

        # of both pieces of a tile
        fp8_stages = [2 * self.warpgroup, 2 * self.warpgroup + 1]
        tile, flags = self.warpgroup, Int32(0)
        while flags & END == 0:
            header_at = smem.header + (tile & HEADERS - 1) * HEADER
            _, phase = barriers.place(tile, PING_PONG)
            for piece in range_constexpr(2):
                bars.fp8.wait_full(fp8_stages[piece], phase)
                is_extra = False
                if const_expr(self.has_two):
                    is_extra = ptx.load_shared_s32(header_at) & EXTRA != 0
                places = raw_at, scale_at, row, member
                if is_extra:
                    self.load(self.parts[1], raw, exact, piece, fp8_stages[piece], *places)
                else:
                    self.load(self.parts[0], raw, exact, piece, fp8_stages[piece], *places)
            stage, phase = bars.kv.place(tile)
            bars.kv.wait_empty(stage, phase)
            flags = ptx.load_shared_s32(header_at)
            if flags & END == 0:
                skipped = [ptx.load_shared_s32(header_at + 16 + (warp // 2 + 2 * piece) * 4) for piece in range(2)]
                is_extra = False
                if const_expr(self.has_two):
                    is_extra = flags & EXTRA != 0
                targets = fp8_at, rope_at, stage * KV_STAGE_BYTES
                if is_extra:
                    self.convert_tile(self.parts[1], raw, scales, exact, skipped, targets, fp8_stages, row, member)
                else:
                    self.convert_tile(self.parts[0], raw, scales, exact, skipped, targets, fp8_stages, row, member)
                cute.arch.sync_warp()
            # whoever lets tensor cores read the stage fences; where there is no tile the softmax finds the flag
            if lane == 0:
                cute.arch.mbarrier_arrive(bars.kv.full(stage))
            tile = tile + PING_PONG

    @property
    def has_two(self) -> bool:
        return self.parts[0] != self.parts[1]

    @cute.jit
    def convert_tile(
        self,
        part: cutlass.Constexpr,
        raw: Any,
        scales: Any,
        exact: Any,
        skipped: Any,
        targets: Any,
        fp8_stages: Any,
        row: Any,
        member: Any,
    ) -> None:
        """Store the thread's shares of a tile's rows as bf16, and let go of where they came from. targets: where its
        first chunk lies of slabs of codes, and of the rotary one, in the first stage; from there to the tile's."""
        fp8_at, rope_at, stage_at = targets
        own = RowConverter(self.rank)
        lane = self.thread % 32
        # the last slab first: once its words, which were loaded last, can be stored, all others are there too; an
        # arrival alone does not wait for loads whose values nobody has used yet
        last_at = stage_at + LAST_SLAB * SLAB_BYTES
        if const_expr(part.is_e2m1):
            factors = [
                e2m1_factors([raw[E2M1_WORDS * piece + word] for word in range(4)], member) for piece in range(2)
            ]
            own.convert_e2m1(raw, factors, LAST_SLAB, fp8_at + last_at)
            self.release(fp8_stages, lane)
            for slab in range_constexpr(LAST_SLAB):
                own.convert_e2m1(raw, factors, slab, fp8_at + stage_at + slab * SLAB_BYTES)
        else:
            is_large = own.set_scales(part, scales, exact)
            if const_expr(part.rotary != 0):
                if self.rank != 0:
                    own.move(raw, LAST_SLAB, rope_at + last_at, [word >> (row % WARP_KEYS) for word in skipped])
                else:
                    own.convert(raw, scales, LAST_SLAB, fp8_at + last_at)
            else:
                own.convert(raw, scales, LAST_SLAB, fp8_at + last_at)
            self.release(fp8_stages, lane)
            for slab in range_constexpr(LAST_SLAB):
                own.convert(raw, scales, slab, fp8_at + stage_at + slab * SLAB_BYTES)
            if is_large:
                own.scale_again(part, fp8_at + stage_at, exact)

    @cute.jit
    def release(self, fp8_stages: Any, lane: Any) -> None:
        """The producer may overwrite what the warp has loaded."""
        cute.arch.sync_warp()
        if lane == 0:
            for stage in fp8_stages:
                cute.arch.mbarrier_arrive(self.bars.fp8.empty(stage))

    @cute.jit
    def load(
        self,
        part: cutlass.Constexpr,
        raw: Any,
        exact: Any,
        piece: cutlass.Constexpr,
        stage: Any,
        raw_at: Any,
        scale_at: Any,
        row: Any,
        member: Any,
    ) -> None:
        """This thread's share of a row and of its scales. raw_at, scale_at: where they are in the first stage, of rows
        that are FP8_PITCH apart and of scales beside them."""
        if const_expr(part.is_e2m1):
            first = const_expr(E2M1_WORDS * piece)
            row_at = self.smem.fp8 + row * part.pitch + stage * FP8_STAGE_BYTES
            found = ptx.load_shared_128(row_at + part.columns)
            for word in range_constexpr(4):
                raw[first + word] = found[word]
            for slab in range_constexpr(SLABS):
                codes = ptx.load_shared_64(row_at + member * 8 + slab * (SLAB // 2))
                raw[first + 4 + 2 * slab], raw[first + 5 + 2 * slab] = codes
        else:
            if const_expr(part.is_mxfp8):
                # of the two bytes of each slab, that of the thread's half
                low, high = ptx.load_shared_64(raw_at + stage * FP8_STAGE_BYTES + (part.columns - member * 16))
                exact[piece] = ptx.permute_bytes(low, high, 0x6420 + (member // 2) * 0x1111)
            else:
                exact[piece] = ptx.load_shared_s32(scale_at + stage * (FP8_KEYS * 4))
            # in CTA 0 there is no fifth chunk: any will do
            for chunk in (*((SLABS,) if part.rotary else ()), *range(SLABS)):
                found = ptx.load_shared_128(raw_at + stage * FP8_STAGE_BYTES + chunk * SLAB)
                for word in range_constexpr(4):
                    raw[4 * (CHUNKS * piece + chunk) + word] = found[word]
