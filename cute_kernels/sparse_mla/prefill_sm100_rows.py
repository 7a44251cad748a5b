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
from cute_kernels.sparse_mla.blackwell.decode import GATHERED
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
    Work,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import Rows as HopperRows
from cute_kernels.sparse_mla.prefill_sm100_plan import (
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
HALVES = KEYS // LANES


class Lists:
    """Rows of one buffer, by their numbers. What another way to name them needs is in the methods from `count` on."""

    named: Any = HopperRows()
    """How Hopper's kernel names the same rows."""

    numbers = 1
    """That `count` knows of an item."""

    @cute.jit
    def run(self, work: Work, sources: Any, ready: Barriers, at: Places) -> None:
        """Write the lists of all tiles. By a warp."""
        slot, phase = barriers.start()
        item, number, counts = Int32(work.first), Int32(0), (Int32(0),) * self.numbers
        while item < work.end:
            if number == 0:
                # asking for each item's count in its time would take a long wait each time
                counts = self.count(item + cute.arch.lane_idx() * work.step, work, sources)
            count = tuple(cute.arch.shuffle_sync(one, number) for one in counts)
            tiles = cutlass.max(self.tiles(count), 1)
            tile = Int32(0)
            while tile < tiles:
                ready.lists.wait_empty(slot, phase)
                self.write(item, tile, count, slot, work, sources, ready, at)
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
    def write(
        self, item: Any, tile: Any, count: Any, slot: Any, work: Work, sources: Any, ready: Barriers, at: Places
    ) -> None:
        """Where a tile's rows are, and which are there. Of a lane's two rows, all loads are under way at once."""
        query, _ = work.place(item)
        places = [self.place(tile, half * LANES + cute.arch.lane_idx(), count, sources) for half in range(HALVES)]
        found = [self.entry(query, place, sources) for place in places]
        rows = [self.row(place, entry, sources) for place, entry in zip(places, found, strict=True)]
        self.store(rows, at.lists + slot * LIST)

    @cute.jit
    def store(self, rows: Any, list_at: Any) -> None:
        for half in range_constexpr(HALVES):
            lane = cute.arch.lane_idx()
            ptx.store_shared_s32(list_at + (half * LANES + lane) * 4, rows[half])
            there = cute.arch.vote_ballot_sync(rows[half] >= 0)
            if lane == 0:
                ptx.store_shared_s32(list_at + THERE_AT + half * 4, there)

    @cute.jit
    def count(self, item: Any, work: Work, sources: Any) -> tuple[Any, ...]:
        """What there is to know of an item; of what is no item, anything."""
        return (self.named.count(item, work, sources),)

    def tiles(self, count: Any) -> Any:
        """Of an item. One that has none gets one without rows."""
        return (count[0] + (KEYS - 1)) // KEYS

    def mark(self, tile: Any, count: Any) -> Any:
        """What to remember of a tile, beside LAST and END."""
        return Int32(0)

    @cute.jit
    def place(self, tile: Any, number: Any, count: Any, sources: Any) -> tuple[Any, Any]:
        """Where a tile's row of that number is named: column, and whether it counts."""
        column = tile * KEYS + number
        return column, column < count[0]

    @cute.jit
    def entry(self, query: Any, place: Any, sources: Any) -> Any:
        """What is named there, -1 if nothing is."""
        column, is_named = place
        return ptx.load_global_s32_where(is_named, sources.lists + Int64(query) * sources.list_row + Int64(column) * 4)

    @cute.jit
    def row(self, place: Any, entry: Any, sources: Any) -> Any:
        """Which row of its source that is, -1 if none."""
        return entry if (entry >= 0) & (entry < sources.kv_rows) else Int32(-1)


@cute.jit
def choose(maps: Any, mark: Any) -> Any:
    """The descriptor of the source that a tile's rows come from, of one or two."""
    source = maps[0]
    if const_expr(len(maps) > 1):
        source = maps[1] if mark & SECOND != 0 else maps[0]
    return source


class Rows:
    """maps: addresses of the descriptors of q and of the sources of rows."""

    stages, stage_bytes, slabs, columns, parts = STAGES, STAGE_BYTES, SLABS, SLAB, ROWS_WARPS
    """Of the ring that is filled; columns: of a slab; parts: of a stage, by a thread each."""

    def ring(self, ready: Any, at: Places) -> tuple[barriers.Ring, Any]:
        """Its barriers and its address."""
        return ready.stages, at.stages

    @cute.jit
    def run(self, part: Any, work: Work, maps: Any, ready: Any, at: Places) -> None:
        """Fill the ring, a part of each stage. By a thread of each of ROWS_WARPS warps; part: its number."""
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
        """Start to copy a part of an item's queries; before: parity of the phase of `kept` that has to be complete."""
        query, first = work.place(item)
        cute.arch.mbarrier_arrive_and_expect_tx(full, SLABS // self.parts * SLAB_BYTES)
        held, kept = HELD // SLAB // self.parts, (SLABS - HELD // SLAB) // self.parts
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
        """Start to gather a part of a tile's rows."""
        source = choose(maps[1:], mark)
        own_rows = KEYS // self.parts
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.slabs * SLAB_BYTES // self.parts)
        own_at = stage_at + part * group_place(own_rows // GATHERED, 0)
        for group in range_constexpr(own_rows // GATHERED):
            rows = ptx.load_shared_128(list_at + part * (own_rows * 4) + group * (GATHERED * 4))
            for slab in range_constexpr(self.slabs):
                place = own_at + group_place(group, slab)
                ptx.gather_rows(place, source, slab * self.columns, rows, full.toint())
