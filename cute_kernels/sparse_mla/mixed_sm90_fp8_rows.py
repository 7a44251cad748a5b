"""The warpgroup of Hopper's mixed kernel over e4m3 caches that asks for rows and makes them f16.

A warp does 16 rows of every tile and of every item's queries, alone from the caches to the stages of the ring. A lane
has two of them: it loads 16 of a slab's columns, stores them as 32 bytes of f16, and loads those that come IN_FLIGHT
loads later into the same registers. It does so in a straight line from tile to tile, as nothing else waits for codes.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.mixed_sm90_fp8_plan import HALF_BYTES, HALVES, HELD, HalfBarriers
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedRows
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    AHEAD,
    END,
    HEADING,
    LAST,
    SLAB,
    SLAB_BYTES,
    SLABS,
    Places,
    Query,
    Work,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import ROW_BYTES, own_lane

ENDED = -(1 << 31)
"""Of the mark of an item's last tile, once queries are loaded."""

AT_ONCE = 8
"""Rows of a load of all lanes: even and odd ones are stored in different banks."""

OWN = 2
"""Rows that a lane has."""

LOADS = SLABS * OWN
"""Of a tile, by a lane: each row of a slab, then those of the next one."""

HALF = LOADS // 2
"""Of them, those of half the columns."""

FIRST_KEPT = HELD // SLAB * OWN
"""The first load of queries that stay in shared memory."""

IN_FLIGHT = int(__import__("os").environ.get("INF", "4"))
"""Loads whose registers wait to be converted."""


class CodeRows(MixedRows):
    @cute.jit
    def run(self, work: Work, q: Query, sources: Any, ready: HalfBarriers, at: Places) -> None:
        """Fill the ring. By a warpgroup."""
        self.look_ahead(work.first, work, sources, at)
        self.set_walk(work.first, Int32(0), Int32(0), Int32(0), at)
        for _ in range_constexpr(AHEAD):
            self.ask_for_indices(work, sources, at)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

        self.set_item(work.first, Int32(1), at)
        # the lane's rows, which of the warp's are there, and the tile's mark: of what is loaded
        rows = cute.make_rmem_tensor((OWN,), Int64)
        there, mark = self.aim_at_queries(rows, work, q, at), Int32(0)
        codes = cute.make_rmem_tensor((4 * IN_FLIGHT,), Int32)
        for number in range_constexpr(IN_FLIGHT):
            self.load(codes, number, rows, there)
        half, phase = barriers.start()
        while mark & END == 0:
            place = Int32(0)
            for number in range_constexpr(LOADS):
                if const_expr(number % HALF == 0):
                    ready.stages.wait_empty(half, phase)
                    place = at.stages + half * HALF_BYTES + self.own_place()
                if const_expr(number == 0):
                    if (self.own_warp() == 0) & (own_lane() == 0):
                        ptx.store_shared_s32(at.heading + half * HEADING, self.own_item(at))
                if const_expr(number == FIRST_KEPT):
                    # the item before is done with what it kept
                    ptx.wait_mbarrier(ready.kept.toint(), ptx.load_shared_s32(self.walk_at(at) + 20))
                    place = at.kept + self.own_place() - FIRST_KEPT % HALF // OWN * SLAB_BYTES
                self.convert(codes, number, place)
                if const_expr(number == LOADS - IN_FLIGHT):
                    there, mark = self.aim_at_rows(rows, sources, at)
                    place = at.kept + self.own_place() - FIRST_KEPT % HALF // OWN * SLAB_BYTES
                self.load(codes, (number + IN_FLIGHT) % LOADS, rows, there)
                if const_expr(number % HALF == HALF - 1):
                    half, phase = self.announce_half(half, phase, ready)
            item, turn = ptx.load_shared_64(self.walk_at(at) + 16)
            self.set_item(item + work.step, turn ^ 1, at)
            while mark & ENDED == 0:
                for number in range_constexpr(LOADS):
                    if const_expr(number % HALF == 0):
                        ready.stages.wait_empty(half, phase)
                        place = at.stages + half * HALF_BYTES + self.own_place()
                    if const_expr(number == 0):
                        self.tell_mask(there, mark, half, at)
                    self.convert(codes, number, place)
                    if const_expr(number == LOADS - IN_FLIGHT):
                        self.ask_for_indices(work, sources, at)
                        cute.arch.cp_async_commit_group()
                        if mark & LAST == 0:
                            there, mark = self.aim_at_rows(rows, sources, at)
                        else:
                            # behind the block's last item there is nothing
                            there = self.aim_at_queries(rows, work, q, at)
                            there = there if mark & END == 0 else Int32(0)
                            mark = mark | ENDED
                        place = at.stages + half * HALF_BYTES + self.own_place()
                    self.load(codes, (number + IN_FLIGHT) % LOADS, rows, there)
                    if const_expr(number % HALF == HALF - 1):
                        half, phase = self.announce_half(half, phase, ready)
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    def own_place(self) -> Any:
        """Where the first chunk of the lane's first row lies in a slab."""
        row, chunk = own_lane() >> 2, own_lane() & 3
        return (self.own_warp() * self.own_rows + row) * ROW_BYTES + ((2 * chunk) ^ row) * 16

    @cute.jit
    def load(self, codes: cute.Tensor, number: cutlass.Constexpr, rows: cute.Tensor, there: Any) -> None:
        """Ask for the lane's codes of that number, zeros where there is no row."""
        slab, i = number // OWN, number % OWN
        is_there = there >> (own_lane() >> 2) & (1 << AT_ONCE * i)
        found = ptx.load_global_128_or_zero(is_there, rows[i] + slab * SLAB)
        for word in range_constexpr(4):
            codes[number % IN_FLIGHT * 4 + word] = found[word]

    @cute.jit
    def convert(self, codes: cute.Tensor, number: cutlass.Constexpr, place: Any) -> None:
        """Store the lane's codes of that number as f16."""
        slab, i = number % HALF // OWN, number % OWN
        four = [codes[number % IN_FLIGHT * 4 + word] for word in range(4)]
        words = [word for some in four for word in ptx.f16x2_of_e4m3x4(some)]
        offset = slab * SLAB_BYTES + i * (AT_ONCE * ROW_BYTES)
        ptx.store_shared_128(place + offset, words[:4])
        ptx.store_shared_128((place ^ 16) + offset, words[4:])

    @cute.jit
    def announce_half(self, half: Any, phase: Any, ready: HalfBarriers) -> tuple[Any, Any]:
        """The warp has stored its rows of a half; who reads them makes sure that tensor cores see them. Returns where
        the next half goes."""
        cute.arch.sync_warp()
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(ready.stages.full(half))
        return barriers.advance(half, phase, HALVES)

    @cute.jit
    def aim_at_rows(self, rows: cute.Tensor, sources: Any, at: Places) -> tuple[Any, Any]:
        """Find the lane's rows of the tile AHEAD before the walk; which of the warp's are there, and the tile's mark."""
        cute.arch.cp_async_wait_group(AHEAD - 1)
        cute.arch.sync_warp()
        index, mark = self.look_up(sources, at)
        for i in range_constexpr(OWN):
            number = AT_ONCE * i + (own_lane() >> 2)
            own = cute.arch.shuffle_sync(index, number)
            source = self.address(own, self.own_warp() * self.own_rows + number, mark, sources)
            rows[i] = source + (own_lane() & 3) * 16
        return cute.arch.vote_ballot_sync(index >= 0) & 0xFFFF, mark

    @cute.jit
    def aim_at_queries(self, rows: cute.Tensor, work: Work, q: Query, at: Places) -> Any:
        """Find the lane's share of the next item's queries: which of the warp's heads are there, a bit each."""
        query, first = work.place(self.own_item(at))
        row = self.own_warp() * self.own_rows + (own_lane() >> 2)
        source = q.base + Int64(query) * q.row + Int64(first + row) * q.head + (own_lane() & 3) * 16
        for i in range_constexpr(OWN):
            rows[i] = source
            source = source + AT_ONCE * q.head
        rest = q.heads - (first + self.own_warp() * self.own_rows)
        return (Int32(1) << cutlass.min(cutlass.max(rest, 0), self.own_rows)) - 1

    def compressed_columns(self, sources: Any) -> Any:
        # computed anew: the loop over tiles has no register to spare
        return ptx.again(sources.columns) - sources.window_size
