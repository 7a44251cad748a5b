"""The warpgroup of Hopper's prefill kernel that asks for rows: an item's queries, then its tiles of kv.

A warp does 16 rows of every stage, 4 at a time: 8 lanes copy the 128 bytes of a slab's row, all slabs one after the
other. Rows that nobody selects become zeros. It asks for the indices of its rows three tiles ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    AHEAD,
    END,
    HEADING,
    HELD,
    KEYS,
    LAST,
    LISTS,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    STAGES,
    WALK,
    WALK_ITEMS,
    Barriers,
    Places,
    Query,
    Work,
)

AT_ONCE = 4
"""Rows of a copy of all lanes."""

ROW_BYTES = SLAB * 2
"""Of a slab's row."""


class Where(NamedTuple):
    """Where a walk along tiles is: an item, its first column of the tile, the tile's list; number of the item's count,
    and the count."""

    item: Any
    column: Any
    slot: Any
    number: Any
    count: Any


class Rows:
    """Rows of one buffer, by their numbers. What another way to name them needs is in the methods from `count` on."""

    warps = 4
    """That ask for rows; their threads are the block's last ones."""

    @property
    def own_rows(self) -> int:
        """Of a stage, by a warp."""
        return KEYS // self.warps

    def own_warp(self) -> Any:
        """The warp's number among them, computed anew, as `own_lane`."""
        return (ptx.thread_again() & self.warps * 32 - 1) >> 5

    def own_row(self) -> Any:
        """The row of a tile whose index the lane has."""
        return self.own_warp() * self.own_rows + (own_lane() & self.own_rows - 1)

    def list_at(self, slot: Any, at: Places) -> Any:
        """Indices of a tile, then its mark, once for each warp."""
        return at.list + slot * (KEYS * 4 + self.warps * 4)

    @cute.jit
    def run(self, work: Work, q: Query, sources: Any, ready: Barriers, at: Places) -> None:
        """Fill the ring. By a warpgroup."""
        self.look_ahead(work.first, work, sources, at)
        self.set_walk(work.first, Int32(0), Int32(0), Int32(0), at)
        for _ in range_constexpr(AHEAD):
            self.ask_for_indices(work, sources, at)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

        self.set_item(work.first, Int32(1), at)
        mark = Int32(0)
        stage, phase = barriers.start()
        while mark & END == 0:
            ready.stages.wait_empty(stage, phase)
            self.ask_for_queries(at.stages + stage * STAGE_BYTES, q.slabs[: HELD // SLAB], work, q, at)
            # the item before is done with what it kept
            ptx.wait_mbarrier(ready.kept.toint(), ptx.load_shared_s32(self.walk_at(at) + 20))
            self.ask_for_queries(at.kept, q.slabs[HELD // SLAB :], work, q, at)
            item, turn = ptx.load_shared_64(self.walk_at(at) + 16)
            if (self.own_warp() == 0) & (own_lane() == 0):
                ptx.store_shared_s32(at.heading + stage * HEADING, item)
            self.announce(stage, ready)
            self.set_item(item + work.step, turn ^ 1, at)
            stage, phase = barriers.advance(stage, phase, STAGES)
            mark = Int32(0)
            while mark & LAST == 0:
                cute.arch.cp_async_wait_group(AHEAD - 1)
                cute.arch.sync_warp()
                index, mark = self.look_up(sources, at)
                ready.stages.wait_empty(stage, phase)
                self.tell(index, mark, stage, at)
                self.ask_for_rows(index, mark, stage, sources, at)
                self.ask_for_indices(work, sources, at)
                self.announce(stage, ready)
                stage, phase = barriers.advance(stage, phase, STAGES)
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def look_up(self, sources: Any, at: Places, before: cutlass.Constexpr = AHEAD) -> tuple[Any, Any]:
        """Of the tile `before` the walk: where a row of the warp's is, -1 if there is no such row, and the mark."""
        return self.look_up_in(ptx.load_shared_s32(self.walk_at(at) + 8), before, sources, at)

    @cute.jit
    def look_up_in(self, slot: Any, before: cutlass.Constexpr, sources: Any, at: Places) -> tuple[Any, Any]:
        """`look_up`, with the list of the tile where the walk is."""
        list_at = self.list_at((slot + LISTS - before) & LISTS - 1, at)
        index = ptx.load_shared_s32(list_at + self.own_row() * 4)
        mark = ptx.load_shared_s32(list_at + KEYS * 4 + self.own_warp() * 4)
        return self.find(index, mark, sources), mark

    @cute.jit
    def tell(self, index: Any, mark: Any, stage: Any, at: Places) -> None:
        """Write the warp's part of a stage's heading."""
        self.tell_mask(cute.arch.vote_ballot_sync(index >= 0), mark, stage, at)

    @cute.jit
    def tell_mask(self, there: Any, mark: Any, stage: Any, at: Places) -> None:
        """`tell`, with the warp's rows that are there in the low 16 bits of a mask."""
        if own_lane() == 0:
            heading = at.heading + stage * HEADING
            ptx.store_shared_s32(heading + self.own_warp() * 4, there & 0xFFFF)
            if self.own_warp() == 0:
                ptx.store_shared_s32(heading + 16, mark)

    @cute.jit
    def announce(self, stage: Any, ready: Barriers) -> None:
        """The stage is full when this warp's copies are there."""
        full = ready.stages.full(stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(full)
        cute.arch.cp_async_commit_group()

    def place(self) -> tuple[Any, Any]:
        """The row of the lane's first chunk of a stage, and where it lies. 4 rows further another bit of the swizzle is
        set, 8 further the same."""
        row = self.own_warp() * self.own_rows + (own_lane() >> 3)
        return row, row * ROW_BYTES + ((own_lane() & 7) ^ (own_lane() >> 3)) * 16

    @cute.jit
    def ask_for_rows(self, index: Any, mark: Any, stage: Any, sources: Any, at: Places) -> None:
        """Start to copy the warp's rows of a tile."""
        row, place = self.place()
        target = at.stages + stage * STAGE_BYTES + place
        for i in range_constexpr(self.own_rows // AT_ONCE):
            own = cute.arch.shuffle_sync(index, AT_ONCE * i + (own_lane() >> 3))
            source = self.address(own, row + AT_ONCE * i, mark, sources) + (own_lane() & 7) * 16
            read = Int32(16) if own >= 0 else Int32(0)
            to = (target ^ (i % 2 * 64)) + i * (AT_ONCE * ROW_BYTES)
            for slab in range_constexpr(SLABS):
                ptx.copy_async_or_zero(to + slab * SLAB_BYTES, source + slab * ROW_BYTES, 16, read)

    @cute.jit
    def ask_for_queries(self, target: Any, slabs: cutlass.Constexpr, work: Work, q: Query, at: Places) -> None:
        """Start to copy the warp's share of some slabs of the item's queries; target: where the first one goes."""
        query, first = work.place(self.own_item(at))
        source = q.base + Int64(query) * q.row
        row, place = self.place()
        source = source + Int64(first + row) * q.head + (own_lane() & 7) * 16
        rest = q.heads - (first + row)
        for i in range_constexpr(self.own_rows // AT_ONCE):
            # nothing is read of heads that are not there
            read = Int32(16) if AT_ONCE * i < rest else Int32(0)
            to = target + (place ^ (i % 2 * 64)) + i * (AT_ONCE * ROW_BYTES)
            for place_of_slab in range_constexpr(len(slabs)):
                slab_at, offset = to + place_of_slab * SLAB_BYTES, slabs[place_of_slab] * ROW_BYTES
                ptx.copy_async_or_zero(slab_at, source + offset, 16, read, is_read_once=True)
            source = source + AT_ONCE * q.head

    @cute.jit
    def ask_for_indices(self, work: Work, sources: Any, at: Places) -> None:
        """Start to copy the indices of the warp's rows of the tile where the walk is, and walk on."""
        self.ask_for_indices_of(self.where(at), work, sources, at)
        # read anew, as few registers are left
        self.walk_on(self.where(at), work, sources, at)

    def where(self, at: Places) -> Where:
        """Where the walk is."""
        item, column, slot, number = ptx.load_shared_128(self.walk_at(at))
        return Where(item, column, slot, number, ptx.load_shared_s32(self.counts_at(at) + number * 4))

    @cute.jit
    def ask_for_indices_of(self, where: Where, work: Work, sources: Any, at: Places) -> None:
        """Start to copy the indices of the warp's rows of the tile there."""
        item, column, slot, _, count = where
        if own_lane() < self.own_rows:
            index_at = self.list_at(slot, at) + (self.own_warp() * self.own_rows + own_lane()) * 4
            own = column + self.own_warp() * self.own_rows + own_lane()
            if (item < work.end) & (own < self.total(count)):
                query, _ = work.place(item)
                own = self.column(own, count, sources)
                ptx.copy_async_32(index_at, sources.lists + Int64(query) * sources.list_row + Int64(own) * 4)
            else:
                ptx.store_shared_s32(index_at, Int32(-1))

    @cute.jit
    def walk_on(self, where: Where, work: Work, sources: Any, at: Places) -> None:
        """Write the mark of the tile there, and walk on from it."""
        item, column, slot, number, count = where
        mark = self.mark(column, count)
        column = column + KEYS
        if column >= self.total(count):
            item, column, number = item + work.step, Int32(0), number + 1
            mark = mark | (Int32(LAST) if item < work.end else Int32(LAST | END))
            if number == WALK_ITEMS:
                self.look_ahead(item, work, sources, at)
                number = Int32(0)
        cute.arch.sync_warp()
        if own_lane() == 0:
            ptx.store_shared_s32(self.list_at(slot, at) + KEYS * 4 + self.own_warp() * 4, mark)
        self.set_walk(item, column, (slot + 1) & LISTS - 1, number, at)

    def walk_at(self, at: Places) -> Any:
        return at.walk + self.own_warp() * WALK

    def counts_at(self, at: Places) -> Any:
        """Of the columns that count of 32 items, from the one on that number 0 of the walk belongs to."""
        return self.walk_at(at) + WALK - WALK_ITEMS * 4

    @cute.jit
    def set_walk(self, item: Any, column: Any, slot: Any, number: Any, at: Places) -> None:
        """Of the tile to ask for the indices of: its item, its first column, its list, and the number of the item's
        count."""
        if own_lane() == 0:
            ptx.store_shared_128(self.walk_at(at), (item, column, slot, number))
        cute.arch.sync_warp()

    def own_item(self, at: Places) -> Any:
        """The item whose queries come next, read anew, as few registers are left."""
        return ptx.load_shared_s32(self.walk_at(at) + 16)

    @cute.jit
    def set_item(self, item: Any, turn: Any, at: Places) -> None:
        """The item whose queries come next, and the parity of the phase that has to be complete for those it keeps."""
        cute.arch.sync_warp()
        if own_lane() == 0:
            ptx.store_shared_64(self.walk_at(at) + 16, item, turn)
        cute.arch.sync_warp()

    @cute.jit
    def look_ahead(self, item: Any, work: Work, sources: Any, at: Places) -> None:
        """Have the counts of that item and the 31 behind it: asking for each in its time would take a long wait each
        time."""
        count = self.count(item + own_lane() * work.step, work, sources)
        cute.arch.sync_warp()
        ptx.store_shared_s32(self.counts_at(at) + own_lane() * 4, count)
        cute.arch.sync_warp()

    @cute.jit
    def count(self, item: Any, work: Work, sources: Any) -> Any:
        """Of an item's columns that count; of what is no item, anything."""
        count = sources.columns
        if sources.lengths != 0:
            query, _ = work.place(item)
            found = ptx.load_global_s32_where(item < work.end, sources.lengths + Int64(query) * 4)
            count = cutlass.max(cutlass.min(found, count), 0)
        return count

    def total(self, count: Any) -> Any:
        """The number of columns that `count` says count."""
        return count

    def column(self, number: Any, count: Any, sources: Any) -> Any:
        """Where the column is of that number among those that count."""
        return number

    def mark(self, number: Any, count: Any) -> Any:
        """What to remember of a tile whose first column has that number, beside LAST and END."""
        return Int32(0)

    @cute.jit
    def find(self, index: Any, mark: Any, sources: Any) -> Any:
        """Where the row of an index is that `look_up` reads, a number >= 0, or -1 if there is none."""
        return index if (index >= 0) & (index < sources.kv_rows) else Int32(-1)

    def address(self, place: Any, row: Any, mark: Any, sources: Any) -> Any:
        """Address of what `find` found for a row of the tile; of -1, any."""
        return sources.kv + Int64(cutlass.max(place, 0)) * sources.kv_row


def own_lane() -> Any:
    """Computed anew: the loop over tiles has no registers to spare."""
    return ptx.thread_again() & 31
