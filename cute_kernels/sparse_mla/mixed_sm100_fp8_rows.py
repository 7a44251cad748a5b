"""The warps of Blackwell's mixed kernel over e4m3 caches that ask for rows, and those that make them f16."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.mixed_sm100_plan import (
    CODE_SLAB,
    CODE_SLABS,
    LANES_ROWS,
    OWN_ROWS,
    RAW_BYTES,
    RAWS,
    STAGES,
    FrontBarriers,
    code_place,
    lane_row,
    stage_place,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import END, HELD, LAST, SLAB, SLAB_BYTES, SLABS, STAGE_BYTES, Work
from cute_kernels.sparse_mla.prefill_sm100_plan import LIST, LISTS, MARK_AT, ROWS_WARPS, Places
from cute_kernels.sparse_mla.prefill_sm100_rows import Rows

HELD_SLABS = HELD // SLAB


class CodeRows(Rows):
    stages, stage_bytes, slabs, columns = RAWS, RAW_BYTES, CODE_SLABS, CODE_SLAB

    def ring(self, ready: FrontBarriers, at: Places) -> tuple[barriers.Ring, Any]:
        return ready.raws, at.raw

    @cute.jit
    def ask_for_queries(
        self,
        part: Any,
        item: Any,
        before: Any,
        stage_at: Any,
        full: Any,
        work: Work,
        queries: Any,
        ready: FrontBarriers,
        at: Places,
    ) -> None:
        query, first = work.place(item)
        cute.arch.mbarrier_arrive_and_expect_tx(full, RAW_BYTES // ROWS_WARPS)
        own = CODE_SLABS // ROWS_WARPS
        for i in range_constexpr(own):
            slab = part * own + i
            ptx.copy_bulk_tensor(stage_at + slab * SLAB_BYTES, queries, (slab * CODE_SLAB, first, query), full.toint())


class Front:
    @cute.jit
    def run(self, thread: Any, work: Work, ready: FrontBarriers, at: Places) -> None:
        """Convert an item's queries, then its tiles, of all items. By a warpgroup."""
        raw, raw_phase = barriers.start()
        stage, phase = barriers.start()
        slot, turn = barriers.start()
        before, mark = Int32(1), Int32(0)
        while mark & END == 0:
            ready.raws.wait_full(raw, raw_phase)
            ready.stages.wait_empty(stage, phase)
            raw_at, stage_at = at.raw + raw * RAW_BYTES, at.stages + stage * STAGE_BYTES
            for slab in range_constexpr(HELD_SLABS):
                self.convert(thread, raw_at, stage_at, slab, slab)
            # the item before is done with what it kept
            ptx.wait_mbarrier(ready.kept.toint(), before)
            for slab in range_constexpr(HELD_SLABS, SLABS):
                self.convert(thread, raw_at, at.kept, slab, slab - HELD_SLABS)
            self.let_go(thread, raw, stage, ready)
            raw, raw_phase = barriers.advance(raw, raw_phase, RAWS)
            stage, phase = barriers.advance(stage, phase, STAGES)
            before, mark = before ^ 1, Int32(0)
            while mark & LAST == 0:
                ready.lists.wait_full(slot, turn)
                mark = ptx.load_shared_s32(at.lists + slot * LIST + MARK_AT)
                ready.raws.wait_full(raw, raw_phase)
                ready.stages.wait_empty(stage, phase)
                raw_at, stage_at = at.raw + raw * RAW_BYTES, at.stages + stage * STAGE_BYTES
                for slab in range_constexpr(SLABS):
                    self.convert(thread, raw_at, stage_at, slab, slab)
                self.let_go(thread, raw, stage, ready)
                if thread & 31 == 0:
                    cute.arch.mbarrier_arrive(ready.lists.empty(slot))
                raw, raw_phase = barriers.advance(raw, raw_phase, RAWS)
                stage, phase = barriers.advance(stage, phase, STAGES)
                slot, turn = barriers.advance(slot, turn, LISTS)

    @cute.jit
    def convert(self, thread: Any, raw_at: Any, target: Any, slab: cutlass.Constexpr, place: cutlass.Constexpr) -> None:
        """Store the thread's share of a slab, as slab `place` of what begins at the target."""
        row = (thread >> 5) * OWN_ROWS + lane_row(thread & 31)
        member = thread & 3
        for i in range_constexpr(OWN_ROWS // LANES_ROWS):
            own = row + i * LANES_ROWS
            four = ptx.load_shared_128(raw_at + code_place(own, slab, member))
            words = [word for codes in four for word in ptx.f16x2_of_e4m3x4(codes)]
            for chunk in range_constexpr(2):
                ptx.store_shared_128(target + stage_place(own, place, member, chunk), words[4 * chunk : 4 * chunk + 4])

    @cute.jit
    def let_go(self, thread: Any, raw: Any, stage: Any, ready: FrontBarriers) -> None:
        """Of what has been converted."""
        # tensor cores read what this thread has stored
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if thread & 31 == 0:
            cute.arch.mbarrier_arrive(ready.stages.full(stage))
            cute.arch.mbarrier_arrive(ready.raws.empty(raw))
