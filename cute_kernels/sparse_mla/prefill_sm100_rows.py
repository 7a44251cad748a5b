"""The warps of Blackwell's prefill kernel that know and ask for rows.

One warp finds out which rows tiles are made of, up to LISTS tiles ahead. A thread of each of two others has them
gathered, straight to where tensor cores read them: an item's queries, then its tiles of kv. A row that nobody selects
is row -1, which arrives as zeros and without an address.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    END,
    HELD,
    KEYS,
    LAST,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    STAGES,
    Sources,
    Work,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import Rows as HopperRows
from cute_kernels.sparse_mla.prefill_sm100_plan import (
    GROUP,
    HALF_KEYS,
    LIST,
    LISTS,
    MARK_AT,
    ROWS_WARPS,
    SECOND,
    THERE_AT,
    Barriers,
    Places,
    group_place,
)

LANES = 32


class Lists:
    """Rows of one buffer, by their numbers. What another way to name them needs is in the methods from `count` on."""

    named: Any = HopperRows()
    """How Hopper's kernel names the same rows."""

    @cute.jit
    def run(self, work: Work, sources: Any, ready: Barriers, at: Places) -> None:
        """Write the lists of all tiles. By a warp."""
        slot, phase = barriers.start()
        item, number, counts = Int32(work.first), Int32(0), Int32(0)
        while item < work.end:
            if number == 0:
                # asking for each item's count in its time would take a long wait each time
                counts = self.count(item + cute.arch.lane_idx() * work.step, work, sources)
            count = cute.arch.shuffle_sync(counts, number)
            tiles = self.tiles(count)
            tile = Int32(0)
            while tile < tiles:
                ready.lists.wait_empty(slot, phase)
                self.write(item, tile, count, work, sources, at.lists + slot * LIST)
                if cute.arch.lane_idx() == 0:
                    mark = self.mark(tile, count)
                    if tile + 1 == tiles:
                        mark = mark | (Int32(LAST) if item + work.step < work.end else Int32(LAST | END))
                    ptx.store_shared_s32(at.lists + slot * LIST + MARK_AT, mark)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(ready.lists.full(slot))
                slot, phase = barriers.advance(slot, phase, LISTS)
                tile = tile + 1
            item, number = item + work.step, (number + 1) & LANES - 1

    @cute.jit
    def write(self, item: Any, tile: Any, count: Any, work: Work, sources: Any, list_at: Any) -> None:
        """Where a tile's rows are, and which are there."""
        query, _ = work.place(item)
        lane = cute.arch.lane_idx()
        rows = [self.row(query, tile, half * HALF_KEYS + lane, count, sources) for half in range(KEYS // LANES)]
        for half in range_constexpr(KEYS // LANES):
            ptx.store_shared_s32(list_at + (half * HALF_KEYS + lane) * 4, rows[half])
            there = cute.arch.vote_ballot_sync(rows[half] >= 0)
            if lane == 0:
                ptx.store_shared_s32(list_at + THERE_AT + half * 4, there)

    def count(self, item: Any, work: Work, sources: Any) -> Any:
        """Of an item's columns that count; of what is no item, anything."""
        return self.named.count(item, work, sources)

    def tiles(self, count: Any) -> Any:
        """Of an item, at least one."""
        return cutlass.max((count + (KEYS - 1)) // KEYS, 1)

    def mark(self, tile: Any, count: Any) -> Any:
        """What to remember of a tile, beside LAST and END."""
        return Int32(0)

    @cute.jit
    def row(self, query: Any, tile: Any, number: cutlass.Constexpr, count: Any, sources: Sources) -> Any:
        """Which row of kv a tile's row of that number is, -1 if none."""
        column = tile * KEYS + number
        place = sources.lists + Int64(query) * sources.list_row + Int64(column) * 4
        index = ptx.load_global_s32_where(column < count, place)
        return index if (index >= 0) & (index < sources.kv_rows) else Int32(-1)


class Rows:
    """maps: addresses of the descriptors of q and of the sources of rows."""

    stages, stage_bytes, slabs, columns = STAGES, STAGE_BYTES, SLABS, SLAB
    """Of the ring that is filled; columns: of a slab."""

    def ring(self, ready: Any, at: Places) -> tuple[barriers.Ring, Any]:
        """Its barriers and its address."""
        return ready.stages, at.stages

    @cute.jit
    def run(self, part: Any, work: Work, maps: Any, ready: Any, at: Places) -> None:
        """Fill the ring: half of each stage. By a thread of each of ROWS_WARPS warps; part: its number."""
        ring, ring_at = self.ring(ready, at)
        stage, phase = barriers.start()
        slot, turn = barriers.start()
        item, before, mark = Int32(work.first), Int32(1), Int32(0)
        while mark & END == 0:
            ring.wait_empty(stage, phase)
            stage_at, full = ring_at + stage * self.stage_bytes, ring.full(stage)
            self.ask_for_queries(part, item, before, stage_at, full, work, maps[0], ready, at)
            item, before = item + work.step, before ^ 1
            stage, phase = barriers.advance(stage, phase, self.stages)
            mark = Int32(0)
            while mark & LAST == 0:
                ready.lists.wait_full(slot, turn)
                list_at = at.lists + slot * LIST
                mark = ptx.load_shared_s32(list_at + MARK_AT)
                ring.wait_empty(stage, phase)
                self.ask_for_rows(part, mark, list_at, ring_at + stage * self.stage_bytes, maps, ring.full(stage))
                cute.arch.mbarrier_arrive(ready.lists.empty(slot))
                stage, phase = barriers.advance(stage, phase, self.stages)
                slot, turn = barriers.advance(slot, turn, LISTS)

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
        ready: Any,
        at: Places,
    ) -> None:
        """Start to copy half of an item's queries; before: parity of the phase of `kept` that has to be complete."""
        query, first = work.place(item)
        cute.arch.mbarrier_arrive_and_expect_tx(full, SLABS // ROWS_WARPS * SLAB_BYTES)
        held, kept = HELD // SLAB // ROWS_WARPS, (SLABS - HELD // SLAB) // ROWS_WARPS
        for i in range_constexpr(held):
            slab = part * held + i
            ptx.copy_bulk_tensor(stage_at + slab * SLAB_BYTES, queries, (slab * SLAB, first, query), full.toint())
        # the item before is done with what it kept
        ptx.wait_mbarrier(ready.kept.toint(), before)
        for i in range_constexpr(kept):
            slab = part * kept + i
            columns = (slab + HELD // SLAB) * SLAB
            ptx.copy_bulk_tensor(at.kept + slab * SLAB_BYTES, queries, (columns, first, query), full.toint())

    @cute.jit
    def ask_for_rows(self, part: Any, mark: Any, list_at: Any, stage_at: Any, maps: Any, full: Any) -> None:
        """Start to gather half of a tile's rows."""
        source = maps[1]
        if const_expr(len(maps) > 2):
            source = maps[2] if mark & SECOND != 0 else maps[1]
        own_rows = KEYS // ROWS_WARPS
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.slabs * SLAB_BYTES // ROWS_WARPS)
        own_at = stage_at + part * group_place(own_rows // GROUP, 0)
        for group in range_constexpr(own_rows // GROUP):
            rows = ptx.load_shared_128(list_at + part * (own_rows * 4) + group * (GROUP * 4))
            for slab in range_constexpr(self.slabs):
                place = own_at + group_place(group, slab)
                ptx.gather_rows(place, source, slab * self.columns, rows, full.toint())
