"""The front of Hopper's decode kernel: rows of the caches become bf16 in shared memory, which are both K and V.

A thread holds a tile's raw rows in registers from one tile to the next: its share of two rows, 8 apart, is 7 words of
16 fp8 columns each and 32 rotary columns. While a slab is converted, the slab two behind is loaded of the tile that
follows. The converted words are, as they are, what stmatrix stores.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.ptx import bf16x2_of_codes, multiply_bf16x2
from cute_kernels.sparse_mla.decode_sm90_plan import (
    ENTRY,
    HEADING,
    KEYS,
    LAST,
    ROPE_SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    STAGES,
    TABLES,
    Places,
    Rings,
    Work,
)

CHUNKS = 9
"""16-byte loads of a thread per row: 7 of fp8 columns, 2 of rotary ones."""

DELAY = 2
"""Slabs by which the loads for the next tile follow the conversion."""

LOOK_UP = 1
"""The slab behind which the next tile's table is looked up."""

ONES = 0x7F7F7F7F
"""Scale bytes that say 1."""

LEAST_POWER, NAN = 0x0040, 0x7FC0
"""bf16 bits of 2^-127, which is subnormal, and of a NaN: scale bytes 0 and 255."""


class Front:
    @cute.jit
    def run(self, thread: Any, work: Work, rings: Rings, at: Places) -> None:
        """Fill stages. By a warpgroup."""
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        quad, member = lane // 4, lane % 4
        row = warp * 16 + quad
        raw = cute.make_rmem_tensor((2 * CHUNKS * 4,), Int32)
        scales = cute.make_rmem_tensor((4,), Int32)
        masks = cute.make_rmem_tensor((2,), Int32)
        words = cute.make_rmem_tensor((16,), Int32)
        # where the lane's row of its stmatrix lies: matrices are rows 0-7 and 8-15 of a chunk, then of the next chunk
        matrix = lane // 8
        v_at = at.v + (warp * 16 + matrix % 2 * 8 + lane % 8) * 128 + (((matrix // 2) ^ (lane % 8)) << 4)

        slot, table_phase = barriers.start()
        stage, phase = barriers.start()
        sources = self.look_up(slot, table_phase, row, member, rings, at)
        self.load(raw, 0, CHUNKS, sources)
        is_last, is_large = self.take(slot, row, lane, scales, masks, at)
        slot, table_phase = barriers.advance(slot, table_phase, TABLES)
        item = work.first
        while item < work.end:
            rings.stages.wait_empty(stage, phase)
            targets = [(v_at + stage * STAGE_BYTES) ^ (32 * step) for step in range(4)]
            for slab in range_constexpr(SLABS):
                self.convert(words, raw, scales, masks, slab)
                for step in range_constexpr(4):
                    ptx.store_matrices(targets[step] + slab * SLAB_BYTES, [words[4 * step + i] for i in range(4)])
                if const_expr(slab >= DELAY):
                    self.load(raw, slab - DELAY, slab - DELAY + 1, sources)
                if const_expr(slab == LOOK_UP):
                    sources = self.look_up(slot, table_phase, row, member, rings, at)
                elif const_expr(slab % 2 == 1 and slab < SLABS - 1):
                    # passed already; a branch, across which the assembler does not sink the loads
                    rings.stages.wait_empty(stage, phase)
            self.load(raw, SLABS - DELAY, CHUNKS, sources)
            if is_large:
                self.scale_again(targets, row, at)
            # whoever lets tensor cores read the stage fences: here the fence would wait for the loads
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(rings.stages.full(stage))
            if is_last != 0:
                item = item + work.step
            is_last, is_large = self.take(slot, row, lane, scales, masks, at)
            slot, table_phase = barriers.advance(slot, table_phase, TABLES)
            stage, phase = barriers.advance(stage, phase, STAGES)

    @cute.jit
    def convert(self, words: Any, raw: Any, scales: Any, masks: Any, slab: cutlass.Constexpr) -> None:
        """A slab of the thread's two rows: chunk c of row half is word 2 c + half."""
        for half in range_constexpr(2):
            if const_expr(slab == ROPE_SLAB):
                for chunk in range_constexpr(8):
                    words[2 * chunk + half] = raw[4 * CHUNKS * half + 4 * slab + chunk] & masks[half]
            else:
                factor = ptx.bf16x2_of_ue8m0(scales[2 * half + slab // 4], slab % 4)
                for word in range_constexpr(4):
                    codes = raw[4 * CHUNKS * half + 4 * slab + word]
                    for odd in range_constexpr(2):
                        values = bf16x2_of_codes(codes, 0 if odd else 8)
                        words[2 * (2 * word + odd) + half] = multiply_bf16x2(values, factor)

    @cute.jit
    def look_up(self, slot: Any, phase: Any, row: Any, member: Any, rings: Rings, at: Places) -> Any:
        """Where to read this thread's share of its two rows of a table."""
        rings.tables.wait_full(slot, phase)
        sources = []
        for half in range_constexpr(2):
            low, high = ptx.load_shared_64(at.table + (slot * KEYS + row + 8 * half) * ENTRY)
            sources.append(ptx.pair(low, high & Int32(0x7FFFFFFF)) + Int64(member * 16))
        return sources

    @cute.jit
    def take(self, slot: Any, row: Any, lane: Any, scales: Any, masks: Any, at: Places) -> tuple[Any, Any]:
        """A table's tile becomes the current one: whether it is the last of its item, whether it has large scales."""
        table = at.table + slot * (KEYS * ENTRY)
        # of other rows, so that all warps find the same
        some = [ptx.load_shared_64(table + (lane + 32 * i) * ENTRY + 8) for i in range(2)]
        large = (some[0][0] | some[1][0]) & Int32(-0x7F7F7F80) | (some[0][1] | some[1][1]) & Int32(0x00808080)
        is_large = cute.arch.vote_any_sync(large != 0)
        for half in range_constexpr(2):
            entry = ptx.load_shared_128(table + (row + 8 * half) * ENTRY)
            masks[half] = ~(entry[1] >> 31)
            for word in range_constexpr(2):
                scales[2 * half + word] = entry[2 + word]
        if is_large:
            for half in range_constexpr(2):
                ptx.store_shared_64(at.scale + (row + 8 * half) * 8, scales[2 * half], scales[2 * half + 1])
            scales.fill(ONES)
        return ptx.load_shared_s32(at.heading + slot * HEADING) & LAST, is_large

    @cute.jit
    def scale_again(self, targets: Any, row: Any, at: Places) -> None:
        """A tile with scales of 2 or more, too large for one product in bf16: it was converted with scales of 1. Scale
        what lies in the stage."""
        cute.arch.sync_warp()
        for slab in cutlass.range(SLABS, unroll=1):
            factors = []
            for half in range_constexpr(2):
                four = ptx.load_shared_s32(at.scale + (row + 8 * half) * 8 + slab // 4 * 4)
                byte = Int32(127) if slab == ROPE_SLAB else (four >> (slab % 4 * 8)) & 0xFF
                power = Int32(LEAST_POWER) if byte == 0 else byte << 7
                factors.append((Int32(NAN) if byte == 255 else power) * 0x00010001)
            for step in range_constexpr(4):
                target = targets[step] + slab * SLAB_BYTES
                found = ptx.load_matrices(target)
                ptx.store_matrices(target, [multiply_bf16x2(found[i], factors[i % 2]) for i in range(4)])

    @cute.jit
    def load(self, raw: Any, first: cutlass.Constexpr, end: cutlass.Constexpr, sources: Any) -> None:
        """Chunks first ... end - 1 of both rows."""
        for half in range_constexpr(2):
            for chunk in range_constexpr(first, end):
                words = ptx.load_global_128_in_order(sources[half] + chunk * 64)
                for word in range_constexpr(4):
                    raw[4 * (CHUNKS * half + chunk) + word] = words[word]
