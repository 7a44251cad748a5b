"""The front of Blackwell's decode kernel: codes of the caches become bf16, which are both K and V.

Rotary columns are bf16 already: copies put them where they belong. A thread has two rows of a tile, 32 apart, and of
each slab 16 neighbouring columns: one 16-byte load gives two chunks. Loads and stores are free of bank conflicts, since
rows of codes are 448 = 3.5 * 128 bytes apart.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import bf16_pairs_of_e4m3x4
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.decode_sm100_plan import (
    END,
    KEYS,
    LAST_SLAB,
    SLAB,
    Barriers,
    Places,
    raw_offset,
    stage_offset,
)
from cute_kernels.sparse_mla.decode_sm100_scout import marks

ROWS_APART = KEYS // 2
SCALE_BYTES = FP8_DS_MLA.scale_bytes


class Front:
    @cute.jit
    def run(self, thread: Any, ready: Barriers, at: Places) -> None:
        """Convert every tile. By a warpgroup."""
        row, member = thread // 4, thread % 4
        tile, mark = Int32(0), Int32(0)
        while mark & END == 0:
            slots, raws, stages = ready.headings.stages, ready.raws.stages, ready.stages.stages
            slot, raw, stage = tile % slots, tile % raws, tile % stages
            mark = marks(slot, tile, ready, at)
            if mark & END == 0:
                ptx.wait_mbarrier((ready.scales + slot).toint(), tile // slots & 1)
                scales = self.load_scales(at.scales + (slot * KEYS + row) * SCALE_BYTES)
                ready.raws.wait_full(raw, tile // raws & 1)
                ready.stages.wait_empty(stage, tile // stages & 1)
                self.convert_rows(raw, stage, row, member, scales, at)
                # whoever lets tensor cores read what is stored fences; no loads from memory are in flight to wait for
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if thread % 32 == 0:
                    ready.arrive(ready.stages.full(stage))
                    cute.arch.mbarrier_arrive(ready.raws.empty(raw))
                    cute.arch.mbarrier_arrive(ready.headings.empty(slot))
            tile = tile + 1

    def load_scales(self, scales_at: Any) -> list[Any]:
        """Those of the thread's rows."""
        return [ptx.load_shared_64(scales_at + half * ROWS_APART * SCALE_BYTES) for half in range(2)]

    def convert_rows(self, raw: Any, stage: Any, row: Any, member: Any, scales: list[Any], at: Places) -> None:
        """Store the thread's columns of its rows, `row` and one more."""
        source = at.raw + raw_offset(raw, row) + member * 16
        target = at.v + stage_offset(stage, 0, row, 2 * member)
        for half in range(2):
            for slab in range(LAST_SLAB):
                self.convert(source, target, scales[half], half, slab)

    @cute.jit
    def convert(self, source: Any, target: Any, scales: Any, half: cutlass.Constexpr, slab: cutlass.Constexpr) -> None:
        """Store the thread's columns of a slab of one of its rows."""
        pair = ptx.bf16x2_of_ue8m0x2(scales[slab // 4], slab % 4 // 2)
        factor = ptx.permute_bytes(pair, pair, 0x3232 if slab % 2 else 0x1010)
        words = ptx.load_shared_128(source, offset=raw_offset(0, half * ROWS_APART) + slab * SLAB)
        # rows that are 32 apart, and slabs, have their chunks in the same order
        place = target + stage_offset(0, slab, half * ROWS_APART, 0)
        self.store(place, words, factor)

    def store(self, place: Any, words: Any, factor: Any) -> None:
        """Store codes in four words as two neighbouring chunks, each times the factor."""
        for chunk in range(2):
            pairs = [pair for word in words[2 * chunk : 2 * chunk + 2] for pair in bf16_pairs_of_e4m3x4(word)]
            ptx.store_shared_128(place ^ (16 * chunk), [ptx.multiply_bf16x2(pair, factor) for pair in pairs])
