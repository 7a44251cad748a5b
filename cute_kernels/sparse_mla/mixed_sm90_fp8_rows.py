"""The warpgroup of Hopper's mixed kernel over e4m3 caches that asks for rows and makes them f16.

A warp does 16 rows of every tile and of every item's queries, alone from the caches to the stages of the ring. It has
all of their codes copied to the stage that they will fill, at once, and makes them f16 slab by slab as they come.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.mixed_sm90_fp8_plan import CodeBarriers
from cute_kernels.sparse_mla.mixed_sm90_rows import MixedRows
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    AHEAD,
    END,
    HEADING,
    HELD,
    LAST,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    STAGES,
    Places,
    Query,
    Work,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import AT_ONCE, ROW_BYTES, own_lane

CHUNK = 16
"""Columns, and bytes, of a lane's copy: two chunks of 16 bytes as f16."""

PAIR = 2
"""Slabs whose codes lie where one slab will, 128 bytes of each row."""

PAIRS = SLABS // PAIR

GROUP = 8
"""Rows of a group of copies, and of what all lanes convert at a time, each lane 16 columns of a slab: even and odd rows
lie in other banks before as behind."""

HELD_SLABS = HELD // SLAB

READ_AHEAD = 1
"""Steps of a conversion, a group's rows of a slab each, whose codes are read before one is stored; two spill."""


class CodeRows(MixedRows):
    @cute.jit
    def run(self, work: Work, q: Query, sources: Any, ready: CodeBarriers, at: Places) -> None:
        """Fill the ring. By a warpgroup."""
        self.look_ahead(work.first, work, sources, at)
        self.set_walk(work.first, Int32(0), Int32(0), Int32(0), at)
        for _ in range_constexpr(AHEAD):
            self.ask_for_indices(work, sources, at)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

        self.set_item(work.first, Int32(1), at)
        mark = Int32(0)
        turn = Int32(0)
        while mark & END == 0:
            stage = turn & 3
            ready.stages.wait_empty(stage, turn >> 2)
            self.ask_for_heads(self.own_item(at), stage, work, q, at)
            if (self.own_warp() == 0) & (own_lane() == 0):
                ptx.store_shared_s32(at.heading + stage * HEADING, self.own_item(at))
            self.convert(stage, range(HELD_SLABS), at.stages + stage * STAGE_BYTES, 0, at)
            # the item before is done with what it kept
            ptx.wait_mbarrier(ready.kept.toint(), ptx.load_shared_s32(self.walk_at(at) + 20))
            self.convert(stage, range(HELD_SLABS, SLABS), at.kept, 0, at)
            self.announce(stage, ready)
            turn = self.advance(turn)
            item, parity = ptx.load_shared_64(self.walk_at(at) + 16)
            self.set_item(item + work.step, parity ^ 1, at)
            mark = Int32(0)
            while mark & LAST == 0:
                # what it has asked for behind rows two tiles before is there
                cute.arch.sync_warp()
                where = self.where(at)
                index, mark = self.look_up_in(where.slot, AHEAD, sources, at)
                stage = turn & 3
                ready.stages.wait_empty(stage, turn >> 2)
                self.tell(index, mark, stage, at)
                self.ask_for_rows(index, mark, stage, sources, at)
                self.ask_for_indices_of(where, work, sources, at)
                self.walk_on(where, work, sources, at)
                cute.arch.cp_async_commit_group()
                self.convert(stage, range(SLABS), at.stages + stage * STAGE_BYTES, 1, at)
                self.announce(stage, ready)
                turn = self.advance(turn)
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def advance(self, turn: Int32) -> Any:
        """The next stage and its phase, in one number: there is no register for two."""
        following = turn + 1
        return following ^ 7 if following & 3 == STAGES else following

    @cute.jit
    def ask_for_rows(self, index: Any, mark: Any, stage: Any, sources: Any, at: Places) -> None:
        """Start to copy the codes of the warp's rows of a tile."""
        target = self.copied_at(stage, at)
        for i in range_constexpr(self.own_rows // AT_ONCE):
            number = AT_ONCE * i + (own_lane() >> 3)
            own = cute.arch.shuffle_sync(index, number)
            source = self.address(own, self.own_warp() * self.own_rows + number, mark, sources)
            self.ask(i, source, own >= 0, target)

    @cute.jit
    def ask_for_heads(self, item: Any, stage: Any, work: Work, q: Query, at: Places) -> None:
        """Start to copy the codes of the warp's share of an item's queries."""
        query, first = work.place(item)
        source = q.base + Int64(query) * q.row
        target = self.copied_at(stage, at)
        for i in range_constexpr(self.own_rows // AT_ONCE):
            # found for each row by itself: there is no register for what they have in common
            head = ptx.again(first + self.own_warp() * self.own_rows + AT_ONCE * i + (own_lane() >> 3))
            # nothing is read of heads that are not there
            self.ask(i, source + Int64(head) * q.head, head < q.heads, target)

    @cute.jit
    def ask(self, i: Constexpr, source: Any, is_there: Any, target: Any) -> None:
        """Start to copy the codes of AT_ONCE rows, of which the lane has the one at `source`, or zeros."""
        read = Int32(CHUNK) if is_there else Int32(0)
        source = source + (own_lane() & 7) * CHUNK
        for pair in range_constexpr(PAIRS):
            to = target + pair * SLAB_BYTES + i * (AT_ONCE * ROW_BYTES)
            ptx.copy_async_or_zero(to, source + pair * ROW_BYTES, CHUNK, read)
        if const_expr((i + 1) * AT_ONCE % GROUP == 0):
            cute.arch.cp_async_commit_group()

    def codes_at(self, stage: Any, at: Places) -> Any:
        """Where the warp's codes lie: in the second half of the slabs that they become, where its rows will be. The
        first half can be filled at once, and what another slab takes the place of has been read. Odd rows have the
        halves of their 128 bytes swapped."""
        return at.stages + stage * STAGE_BYTES + PAIRS * SLAB_BYTES + self.own_warp() * (self.own_rows * ROW_BYTES)

    def copied_at(self, stage: Any, at: Places) -> Any:
        """Where the lane's first chunk goes."""
        row, chunk = own_lane() >> 3, own_lane() & 7
        return self.codes_at(stage, at) + row * ROW_BYTES + (chunk ^ ((row & 1) << 2)) * CHUNK

    def convert(self, stage: Any, slabs: range, target: Any, behind: int, at: Places) -> None:
        """Make some slabs of the warp's rows f16.

        target  where the first of them goes, in the stage itself or elsewhere
        behind  groups of copies that follow those of codes
        """
        row, chunk = own_lane() >> 2, own_lane() & 3
        source = self.codes_at(stage, at) + row * ROW_BYTES + (chunk ^ ((row & 1) << 2)) * CHUNK
        place = target + (self.own_warp() * self.own_rows + row) * ROW_BYTES + ((2 * chunk) ^ row) * 16
        steps = [(first, slab) for first in range(0, self.own_rows, GROUP) for slab in slabs]
        loaded: list[Any] = []
        for number in range(len(steps)):
            # some are on their way while others are converted
            while len(loaded) < min(number + 1 + READ_AHEAD, len(steps)):
                first, slab = steps[len(loaded)]
                if slab == slabs.start:
                    self.settle(behind + (self.own_rows - first) // GROUP - 1)
                from_ = (source ^ (slab % PAIR * SLAB)) + slab // PAIR * SLAB_BYTES + first * ROW_BYTES
                loaded.append(ptx.load_shared_128_in_order(from_))
            first, slab = steps[number]
            if slab >= PAIRS:
                # all lanes have read what lies where this slab goes
                cute.arch.sync_warp()
            words = [word for four in loaded[number] for word in ptx.f16x2_of_e4m3x4(four)]
            offset = (slab - slabs.start) * SLAB_BYTES + first * ROW_BYTES
            ptx.store_shared_128(place + offset, words[:4])
            ptx.store_shared_128((place ^ 16) + offset, words[4:])

    def settle(self, behind: int) -> None:
        """Until all copies of the warp but those of the last groups are there."""
        cute.arch.cp_async_wait_group(behind)
        cute.arch.sync_warp()

    @cute.jit
    def announce(self, stage: Any, ready: CodeBarriers) -> None:
        """The warp has stored its rows of a stage; who reads them makes sure that tensor cores see them."""
        cute.arch.sync_warp()
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(ready.stages.full(stage))

    # Computed anew, as few registers are left.

    def compressed_columns(self, sources: Any) -> Any:
        return ptx.again(sources.columns) - sources.window_size

    def walk_at(self, at: Places) -> Any:
        return super().walk_at(at._replace(walk=ptx.again(at.walk)))
