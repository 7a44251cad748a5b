"""The two warpgroups of Hopper's prefill kernel for few heads that ask for rows: an item's tiles of kv, unit by unit.

A warp does 8 rows of every tile, 4 at a time: 8 lanes copy the 128 bytes of a slab's row. Rows that nobody selects
become zeros. It asks for the indices of its rows four tiles ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedRows
from cute_kernels.sparse_mla.prefill_few_sm90_plan import (
    AHEAD,
    HEADING,
    HEADINGS,
    LISTS,
    MARK_AT,
    PARTS,
    ROWS_WARPS,
    UNDER_WAY,
    UNIT_BYTES,
    UNIT_SLABS,
    UNITS,
    Barriers,
    Places,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import END, KEYS, LAST, SLAB_BYTES, WALK_ITEMS, Query, Work
from cute_kernels.sparse_mla.prefill_sm90_rows import AT_ONCE, ROW_BYTES, Rows, own_lane


class FewRows(Rows):
    """As `Rows`, but no queries."""

    warps = ROWS_WARPS

    @cute.jit
    def run(self, work: Work, q: Query, sources: Any, ready: Any, at: Any) -> None:
        """Fill the ring. By two warpgroups.

        What shared memory answers comes behind the copies that were asked for before, and those wait for L2. So what
        the next tile needs is asked for among this one's copies, and the walk is in registers.
        """
        self.look_ahead(work.first, work, sources, at)
        item, column, number, tile = work.first, Int32(0), Int32(0), Int32(0)
        count = ptx.load_shared_s32(self.counts_at(at))
        for _ in range_constexpr(AHEAD):
            item, column, number, count = self.ask_for_list(item, column, number, count, tile, work, sources, at)
            tile = tile + 1
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()
        index, mark = self.read_list(Int32(0), at)
        own, chosen = self.aim(index, mark, sources)

        tile, is_end = Int32(0), Int32(0)
        unit, phase = barriers.start()
        while is_end == 0:
            self.tell(own, mark, tile & HEADINGS - 1, at)
            is_end = mark & END
            _, place = self.place()
            for part in range_constexpr(PARTS):
                ready.units.wait_empty(unit, phase)
                cute.arch.cp_async_wait_group(UNDER_WAY - 1)
                self.ask_for_part(chosen, part, at.units + unit * UNIT_BYTES + place)
                self.announce(unit, ready)
                if const_expr(part == 0):
                    # what was asked for before the last tile is there
                    cute.arch.sync_warp()
                    index, new_mark = self.read_list(tile + 1, at)
                elif const_expr(part == PARTS // 2):
                    new_own, new_chosen = self.aim(index, new_mark, sources)
                elif const_expr(part == PARTS - 1):
                    item, column, number, count = self.ask_for_list(
                        item, column, number, count, tile + AHEAD, work, sources, at
                    )
                cute.arch.cp_async_commit_group()
                unit, phase = barriers.advance(unit, phase, UNITS)
            own, mark, chosen = new_own, new_mark, new_chosen
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    def list_of(self, tile: Any, at: Any) -> Any:
        return self.list_at(tile & LISTS - 1, at)

    @cute.jit
    def ask_for_list(
        self, item: Any, column: Any, number: Any, count: Any, tile: Any, work: Work, sources: Any, at: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Start to copy the indices of the warp's rows of a tile, and walk on: item, first column in its list, and the
        number and value of the item's count."""
        list_at = self.list_of(tile, at)
        if own_lane() < self.own_rows:
            index_at = list_at + self.own_row() * 4
            own = column + self.own_row()
            if (item < work.end) & (own < self.total(count)):
                query, _ = work.place(item)
                own = self.column(own, count, sources)
                ptx.copy_async_32(index_at, sources.lists + Int64(query) * sources.list_row + Int64(own) * 4)
            else:
                ptx.store_shared_s32(index_at, Int32(-1))
        mark = self.mark(column, count)
        column = column + KEYS
        if column >= self.total(count):
            item, column, number = item + work.step, Int32(0), number + 1
            mark = mark | (Int32(LAST) if item < work.end else Int32(LAST | END))
            if number == WALK_ITEMS:
                self.look_ahead(item, work, sources, at)
                number = Int32(0)
            count = ptx.load_shared_s32(self.counts_at(at) + number * 4)
        if own_lane() == 0:
            ptx.store_shared_s32(list_at + KEYS * 4 + self.own_warp() * 4, mark)
        return item, column, number, count

    @cute.jit
    def read_list(self, tile: Any, at: Any) -> tuple[Any, Any]:
        """The index of the lane's row of a tile, and the tile's mark."""
        list_at = self.list_of(tile, at)
        index = ptx.load_shared_s32(list_at + self.own_row() * 4)
        return index, ptx.load_shared_s32(list_at + KEYS * 4 + self.own_warp() * 4)

    @cute.jit
    def aim(self, index: Any, mark: Any, sources: Any) -> tuple[Any, Any]:
        """Where the lane's row is, -1 if there is none; where the lane's chunks come from, and how many bytes of them
        are read."""
        own = self.find(index, mark, sources)
        row, _ = self.place()
        chosen = []
        for i in range_constexpr(self.own_rows // AT_ONCE):
            place = cute.arch.shuffle_sync(own, AT_ONCE * i + (own_lane() >> 3))
            source = self.address(place, row + AT_ONCE * i, mark, sources) + (own_lane() & 7) * 16
            chosen.append((source, Int32(16) if place >= 0 else Int32(0)))
        return own, tuple(chosen)

    @cute.jit
    def tell(self, own: Any, mark: Any, number: Any, at: Places) -> None:
        """Write the warp's part of a heading."""
        there = cute.arch.vote_ballot_sync(own >= 0)
        if own_lane() == 0:
            heading = at.heading + number * HEADING
            ptx.store_shared_s32(heading + self.own_warp() * 4, there & (1 << self.own_rows) - 1)
            if self.own_warp() == 0:
                ptx.store_shared_s32(heading + MARK_AT, mark)
        cute.arch.sync_warp()

    @cute.jit
    def announce(self, unit: Any, ready: Barriers) -> None:
        """The unit is full when this warp's copies are there."""
        full = ready.units.full(unit)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def ask_for_part(self, chosen: Any, part: cutlass.Constexpr, target: Any) -> None:
        """Start to copy the warp's rows of a unit; target: where the lane's first chunk goes."""
        for i in range_constexpr(self.own_rows // AT_ONCE):
            source, read = chosen[i]
            to = (target ^ (i % 2 * 64)) + i * (AT_ONCE * ROW_BYTES)
            for slab in range_constexpr(UNIT_SLABS):
                column = (part * UNIT_SLABS + slab) * ROW_BYTES
                ptx.copy_async_or_zero(to + slab * SLAB_BYTES, source + column, 16, read)


class FewMixedRows(MixedRows, FewRows):
    """Rows of two paged caches."""
