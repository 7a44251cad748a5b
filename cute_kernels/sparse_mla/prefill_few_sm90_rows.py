"""The two warpgroups of Hopper's prefill kernel for few heads that ask for rows: an item's tiles of kv, unit by unit.

A warp does 8 rows of every tile, 4 at a time: 8 lanes copy the 128 bytes of a slab's row. Rows that nobody selects
become zeros. It asks for the indices of its rows three tiles ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedRows
from cute_kernels.sparse_mla.prefill_few_sm90_plan import (
    HEADING,
    HEADINGS,
    MARK_AT,
    PARTS,
    ROWS_WARPS,
    UNIT_BYTES,
    UNIT_SLABS,
    UNITS,
    Barriers,
    Places,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import AHEAD, END, SLAB_BYTES, Query, Work
from cute_kernels.sparse_mla.prefill_sm90_rows import AT_ONCE, ROW_BYTES, Rows, own_lane


class FewRows(Rows):
    """As `Rows`, but no queries."""

    warps = ROWS_WARPS

    @cute.jit
    def run(self, work: Work, q: Query, sources: Any, ready: Any, at: Any) -> None:
        """Fill the ring. By two warpgroups."""
        self.look_ahead(work.first, work, sources, at)
        self.set_walk(work.first, Int32(0), Int32(0), Int32(0), at)
        for _ in range_constexpr(AHEAD):
            self.ask_for_indices(work, sources, at)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

        mark, tile = Int32(0), Int32(0)
        unit, phase = barriers.start()
        while mark & END == 0:
            cute.arch.cp_async_wait_group(AHEAD - 1)
            cute.arch.sync_warp()
            index, mark = self.look_up(sources, at)
            self.tell(index, mark, tile & HEADINGS - 1, at)
            row, place = self.place()
            chosen = []
            for i in range_constexpr(self.own_rows // AT_ONCE):
                own = cute.arch.shuffle_sync(index, AT_ONCE * i + (own_lane() >> 3))
                source = self.address(own, row + AT_ONCE * i, mark, sources) + (own_lane() & 7) * 16
                chosen.append((source, Int32(16) if own >= 0 else Int32(0)))
            for part in range_constexpr(PARTS):
                ready.units.wait_empty(unit, phase)
                self.ask_for_part(chosen, part, at.units + unit * UNIT_BYTES + place)
                self.announce(unit, ready)
                unit, phase = barriers.advance(unit, phase, UNITS)
            self.ask_for_indices(work, sources, at)
            cute.arch.cp_async_commit_group()
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def tell(self, index: Any, mark: Any, number: Any, at: Places) -> None:
        """Write the warp's part of a heading."""
        there = cute.arch.vote_ballot_sync(index >= 0)
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
