"""The warpgroup of Hopper's mixed kernel over e4m3 caches that asks for rows and makes them f16.

A warp does 16 rows of every tile and of every item's queries, alone from the caches to the halves of the ring. It goes
by quarters of their columns: it makes one f16, and asks for the one that comes three quarters later in its place.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.mixed_sm90_fp8_plan import (
    HALF_BYTES,
    HALVES,
    LINE,
    QUARTERS,
    RAW_QUARTER,
    RAW_QUARTERS,
    HalfBarriers,
)
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedRows
from cute_kernels.sparse_mla.prefill_sm90_plan import AHEAD, END, HEADING, LAST, SLAB, SLAB_BYTES, Places, Query, Work
from cute_kernels.sparse_mla.prefill_sm90_rows import AT_ONCE, own_lane

SLAB_ROW = SLAB * 2

CONVERTED_ROWS = 8
"""Of a slab, by all lanes at a time, each lane 16 columns: even and odd rows lie in other banks before as behind."""


class CodeRows(MixedRows):
    @cute.jit
    def run(self, work: Work, q: Query, sources: Any, ready: HalfBarriers, at: Places) -> None:
        """Fill the ring. By a warpgroup."""
        self.look_ahead(work.first, work, sources, at)
        self.set_walk(work.first, Int32(0), Int32(0), Int32(0), at)
        for _ in range_constexpr(AHEAD):
            self.ask_for_indices(work, sources, at)
        self.set_item(work.first, Int32(1), at)
        # where the lane's next chunks are, of rows of the tile or queries that are asked for, and which rows are there
        chunks = cute.make_rmem_tensor((self.own_rows // AT_ONCE,), Int64)
        there, asked_mark = self.aim_at_queries(chunks, work, q, at), Int32(0)
        for quarter in range_constexpr(RAW_QUARTERS):
            self.ask(chunks, there, Int32(quarter), at)
            cute.arch.cp_async_commit_group()

        half, phase = barriers.start()
        raw = Int32(0)
        is_query, mark = Int32(1), Int32(0)
        while mark & END == 0:
            for quarter in cutlass.range(QUARTERS, unroll=1):
                # all but what was asked for last is there
                cute.arch.cp_async_wait_group(RAW_QUARTERS - 1)
                cute.arch.sync_warp()
                if quarter & 1 == 0:
                    ready.stages.wait_empty(half, phase)
                if quarter == 0:
                    if is_query == 0:
                        mark = asked_mark
                        self.tell_mask(there, mark, half, at)
                    elif (self.own_warp() == 0) & (own_lane() == 0):
                        ptx.store_shared_s32(at.heading + half * HEADING, self.own_item(at))
                first = at.stages + half * HALF_BYTES + (quarter & 1) * (2 * SLAB_BYTES)
                second = first + SLAB_BYTES
                if (is_query != 0) & (quarter >= 2):
                    # the item before is done with what it kept
                    ptx.wait_mbarrier(ready.kept.toint(), ptx.load_shared_s32(self.walk_at(at) + 20))
                    first = first if quarter == 2 else at.kept + SLAB_BYTES
                    second = at.kept if quarter == 2 else at.kept + 2 * SLAB_BYTES
                self.convert(raw, first, second, at)
                if quarter & 1 != 0:
                    # tensor cores read what this thread has stored
                    cute.arch.fence_view_async_shared()
                    cute.arch.sync_warp()
                    if own_lane() == 0:
                        cute.arch.mbarrier_arrive(ready.stages.full(half))
                    half, phase = barriers.advance(half, phase, HALVES)
                cute.arch.sync_warp()
                if quarter == 1:
                    if mark & LAST == 0:
                        there, asked_mark = self.aim_at_rows(chunks, sources, at)
                    elif mark & END == 0:
                        there = self.aim_at_queries(chunks, work, q, at)
                if (quarter == 0) | (mark & END == 0):
                    self.ask(chunks, there, raw, at)
                if (quarter == 0) & (is_query == 0):
                    self.ask_for_indices(work, sources, at)
                cute.arch.cp_async_commit_group()
                raw = Int32(0) if raw == RAW_QUARTERS - 1 else raw + 1
            if is_query != 0:
                item, turn = ptx.load_shared_64(self.walk_at(at) + 16)
                self.set_item(item + work.step, turn ^ 1, at)
            is_query = mark & LAST
            mark = mark & END
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def aim_at_rows(self, chunks: cute.Tensor, sources: Any, at: Places) -> tuple[Any, Any]:
        """Find the warp's rows of the tile AHEAD before the walk: which are there, a bit each, and the tile's mark."""
        index, mark = self.look_up(sources, at)
        row = own_lane() >> 3
        for i in range_constexpr(self.own_rows // AT_ONCE):
            own = cute.arch.shuffle_sync(index, AT_ONCE * i + row)
            source = self.address(own, self.own_warp() * self.own_rows + AT_ONCE * i + row, mark, sources)
            chunks[i] = source + (own_lane() & 7) * 16
        return cute.arch.vote_ballot_sync(index >= 0), mark

    @cute.jit
    def aim_at_queries(self, chunks: cute.Tensor, work: Work, q: Query, at: Places) -> Any:
        """Find the warp's share of the next item's queries: which heads are there, a bit each."""
        query, first = work.place(self.own_item(at))
        row = self.own_warp() * self.own_rows + (own_lane() >> 3)
        source = q.base + Int64(query) * q.row + Int64(first + row) * q.head + (own_lane() & 7) * 16
        for i in range_constexpr(self.own_rows // AT_ONCE):
            chunks[i] = source
            source = source + AT_ONCE * q.head
        rest = q.heads - (first + self.own_warp() * self.own_rows)
        return (Int32(1) << cutlass.min(cutlass.max(rest, 0), self.own_rows)) - 1

    @cute.jit
    def ask(self, chunks: cute.Tensor, there: Any, raw: Any, at: Places) -> None:
        """Start to copy a quarter of the warp's rows, zeros where there is none, and aim at the next quarter."""
        row = own_lane() >> 3
        swapped = (own_lane() & 7) ^ ((row & 1) << 2)
        target = at.raw + raw * RAW_QUARTER + (self.own_warp() * self.own_rows + row) * LINE + swapped * 16
        own = there >> row
        for i in range_constexpr(self.own_rows // AT_ONCE):
            read = Int32(16) if own & (1 << AT_ONCE * i) != 0 else Int32(0)
            ptx.copy_async_or_zero(target + i * (AT_ONCE * LINE), chunks[i], 16, read)
            chunks[i] += Int64(LINE)

    @cute.jit
    def convert(self, raw: Any, first: Any, second: Any, at: Places) -> None:
        """Store a quarter of the warp's rows as f16, a slab at `first` and one at `second`."""
        row, chunk = own_lane() >> 2, own_lane() & 3
        own = self.own_warp() * self.own_rows + row
        source = at.raw + raw * RAW_QUARTER + own * LINE + (((row & 1) << 2) ^ chunk) * 16
        place = own * SLAB_ROW + ((2 * chunk) ^ row) * 16
        places = [(slab, i) for slab in range(2) for i in range(self.own_rows // CONVERTED_ROWS)]
        found = [ptx.load_shared_128((source ^ (64 * slab)) + i * (CONVERTED_ROWS * LINE)) for slab, i in places]
        targets = first + place, second + place
        for number in range_constexpr(len(places)):
            slab, i = places[number]
            words = [word for four in found[number] for word in ptx.f16x2_of_e4m3x4(four)]
            target = targets[slab] + i * (CONVERTED_ROWS * SLAB_ROW)
            ptx.store_shared_128(target, words[:4])
            ptx.store_shared_128(target ^ 16, words[4:])

    def compressed_columns(self, sources: Any) -> Any:
        # computed anew: the loop over quarters has no register to spare
        return ptx.again(sources.columns) - sources.window_size
