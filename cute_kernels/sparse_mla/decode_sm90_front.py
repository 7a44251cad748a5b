"""The fronts of Hopper's decode kernel: rows of the caches become bf16, which are both K and V.

Two warpgroups take tiles in turn.
A thread has a share of two rows of a tile, one of each half: of each, 16 neighbouring fp8 columns of every slab, which
become two chunks of 16 bytes, or twice 8 rotary ones, which are chunks already.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import bf16_pairs_of_e4m3
from cute_kernels.dsl.ptx import multiply_bf16x2
from cute_kernels.sparse_mla.decode_sm90_plan import (
    END,
    HEADING,
    HEADINGS,
    LAST_SLAB,
    OWN_KEYS,
    RAW_BYTES,
    RAW_KEYS,
    RAW_PITCH,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    STAGES,
    TURNS,
    Barriers,
    Places,
)

CHUNKS = SLABS + 1
"""16-byte loads of a thread per row: one of each fp8 slab, two of the rotary one."""

HALF_BYTES = RAW_KEYS * SLAB * 2
"""From a thread's first row to its second."""

ONES = 0x7F7F7F7F
"""Scale bytes that say 1."""

LARGE = (-0x7F7F7F80, 0x00808080)
"""Of the scale bytes of a block's slabs, the bits that make a scale 2 or more."""

LEAST_POWER, NAN = 0x0040, 0x7FC0
"""bf16 bits of 2^-127, which is subnormal, and of a NaN: scale bytes 0 and 255."""


class Front:
    @cute.jit
    def run(self, thread: Any, number: Any, rank: Any, ready: Barriers, at: Places) -> None:
        """Convert every second tile, from `number` on. By a warpgroup."""
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        quad, member = lane // 4, lane % 4
        row = warp * 8 + quad
        raw = cute.make_rmem_tensor((2 * CHUNKS * 4,), Int32)
        scales = cute.make_rmem_tensor((2,), Int32)
        exact = cute.make_rmem_tensor((2,), Int32)
        # where the thread's first chunk lies, if it has 2 m and 2 m + 1, or m and m + 4
        row_at = at.v + row * (SLAB * 2)
        fp8_at, rope_at = row_at + ((2 * member ^ quad) << 4), row_at + ((member ^ quad) << 4)
        raw_at, scale_at = at.raw + row * RAW_PITCH + member * 16, at.scale + row * 4

        # of each half of a tile
        slots = [2 * number, 2 * number + 1]
        tile, mark = number, Int32(0)
        while mark & END == 0:
            for half in range_constexpr(2):
                ready.raws.wait_full(slots[half], tile // TURNS & 1)
                exact[half] = ptx.load_shared_s32(scale_at + slots[half] * (RAW_KEYS * 4))
                self.load(raw, half, raw_at + slots[half] * RAW_BYTES)
            stage = tile % STAGES
            heading = at.heading + tile % HEADINGS * HEADING
            ready.stages.wait_empty(stage, tile // STAGES & 1)
            mark = ptx.load_shared_s32(heading)
            if mark & END == 0:
                skipped = [ptx.load_shared_s32(heading + 16 + (warp // 2 + 2 * half) * 4) for half in range(2)]
                is_large = self.set_scales(scales, exact, rank)
                # the last slab first: once its words, which were loaded last, can be stored, all others are there too;
                # an arrival alone does not wait for loads whose values nobody has used
                last_at = stage * STAGE_BYTES + LAST_SLAB * SLAB_BYTES
                if rank != 0:
                    self.move(raw, LAST_SLAB, rope_at + last_at, [word >> (row % OWN_KEYS) for word in skipped])
                else:
                    self.convert(raw, scales, LAST_SLAB, fp8_at + last_at)
                self.let_go(slots, lane, ready)
                for slab in range_constexpr(LAST_SLAB):
                    self.convert(raw, scales, slab, fp8_at + stage * STAGE_BYTES + slab * SLAB_BYTES)
                if is_large:
                    self.scale_again(fp8_at + stage * STAGE_BYTES, exact, rank)
                cute.arch.sync_warp()
            # whoever lets tensor cores read the stage fences; where there is no tile the scores find the mark
            if lane == 0:
                cute.arch.mbarrier_arrive(ready.stages.full(stage))
            tile = tile + TURNS

    @cute.jit
    def let_go(self, slots: Any, lane: Any, ready: Barriers) -> None:
        """The scout may overwrite what the warp has loaded."""
        cute.arch.sync_warp()
        if lane == 0:
            for slot in slots:
                cute.arch.mbarrier_arrive(ready.raws.empty(slot))

    @cute.jit
    def load(self, raw: Any, half: cutlass.Constexpr, raw_at: Any) -> None:
        """This thread's share of a row."""
        # in the first block there is no fifth chunk: any will do
        for chunk in (SLABS, *range(SLABS)):
            found = ptx.load_shared_128(raw_at + chunk * SLAB)
            for word in range_constexpr(4):
                raw[4 * (CHUNKS * half + chunk) + word] = found[word]

    @cute.jit
    def set_scales(self, scales: Any, exact: Any, rank: Any) -> Any:
        """Scale bytes to convert with: those of the rows, or ones if the warp has large ones. Whether it has."""
        for half in range_constexpr(2):
            scales[half] = exact[half]
        large = (scales[0] | scales[1]) & (Int32(LARGE[0]) if rank == 0 else Int32(LARGE[1]))
        is_large = cute.arch.vote_any_sync(large != 0)
        if is_large:
            scales.fill(ONES)
        return is_large

    @cute.jit
    def convert(self, raw: Any, scales: Any, slab: cutlass.Constexpr, target: Any) -> None:
        """Store a slab's fp8 columns of the thread's two rows as bf16."""
        for half in range_constexpr(2):
            factor = ptx.bf16x2_of_ue8m0(scales[half], slab)
            for chunk in range_constexpr(2):
                first = 4 * (CHUNKS * half + slab) + 2 * chunk
                words = bf16_pairs_of_e4m3([raw[first + word] for word in range(2)], [factor])
                ptx.store_shared_128((target ^ (16 * chunk)) + half * HALF_BYTES, words)

    @cute.jit
    def move(self, raw: Any, slab: cutlass.Constexpr, target: Any, skipped: Any) -> None:
        """Store the rotary columns of the thread's two rows."""
        for half in range_constexpr(2):
            # where nothing was loaded there may be NaN
            mask = (skipped[half] & 1) - 1
            for chunk in range_constexpr(2):
                words = [raw[4 * (CHUNKS * half + slab + chunk) + word] & mask for word in range(4)]
                ptx.store_shared_128((target ^ (64 * chunk)) + half * HALF_BYTES, words)

    @cute.jit
    def scale_again(self, target: Any, exact: Any, rank: Any) -> None:
        """A tile with scales of 2 or more, too large for one product in bf16: it was converted with scales of 1. Scale
        what the thread has stored."""
        for slab in cutlass.range(SLABS - rank, unroll=1):
            for half in range_constexpr(2):
                byte = (exact[half] >> (slab * 8)) & 0xFF
                power = Int32(LEAST_POWER) if byte == 0 else byte << 7
                factor = (Int32(NAN) if byte == 255 else power) * 0x00010001
                for chunk in range_constexpr(2):
                    place = ((target + slab * SLAB_BYTES) ^ (16 * chunk)) + half * HALF_BYTES
                    words = ptx.load_shared_128(place)
                    ptx.store_shared_128(place, [multiply_bf16x2(word, factor) for word in words])
