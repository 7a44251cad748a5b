"""The warpgroup of Hopper's mixed kernel over e4m3 caches that asks for rows and makes them f16.

A warp does 16 rows of every tile and of every item's queries, alone from the caches to the stages of the ring. It has
all of their codes copied to the stage that they will fill, at once, and makes them f16 slab by slab as they come. Of
each slab a lane copies 16 columns of two rows, which it converts itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Constexpr, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
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
from cute_kernels.sparse_mla.prefill_sm90_rows import ROW_BYTES, own_lane

CHUNK = 16
"""Columns, and bytes, of a lane's copy: two chunks of 16 bytes as f16."""

AT_ONCE = 8
"""Rows of a copy of all lanes: even and odd ones are stored in different banks."""

OWN = 2
"""Rows that a lane has."""

PAIR = 2
"""Slabs whose codes lie where one slab will: a group of copies."""

PAIRS = SLABS // PAIR

HELD_SLABS = HELD // SLAB


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
        stage, phase = barriers.start()
        while mark & END == 0:
            ready.stages.wait_empty(stage, phase)
            self.ask_for_heads(self.own_item(at), stage, work, q, at)
            if (self.own_warp() == 0) & (own_lane() == 0):
                ptx.store_shared_s32(at.heading + stage * HEADING, self.own_item(at))
            self.convert(stage, range(HELD_SLABS), at.stages + stage * STAGE_BYTES, 0, at)
            # the item before is done with what it kept
            ptx.wait_mbarrier(ready.kept.toint(), ptx.load_shared_s32(self.walk_at(at) + 20))
            self.convert(stage, range(HELD_SLABS, SLABS), at.kept, 0, at)
            self.announce(stage, ready)
            stage, phase = barriers.advance(ptx.again(stage), ptx.again(phase), STAGES)
            item, turn = ptx.load_shared_64(self.walk_at(at) + 16)
            self.set_item(item + work.step, turn ^ 1, at)
            mark = Int32(0)
            while mark & LAST == 0:
                # what it has asked for behind rows two tiles before is there
                cute.arch.sync_warp()
                index, mark = self.look_up(sources, at)
                ready.stages.wait_empty(stage, phase)
                self.tell(index, mark, stage, at)
                self.ask_for_rows(index, mark, stage, sources, at)
                self.ask_for_indices(work, sources, at)
                cute.arch.cp_async_commit_group()
                self.convert(stage, range(SLABS), at.stages + stage * STAGE_BYTES, 1, at)
                self.announce(stage, ready)
                stage, phase = barriers.advance(stage, phase, STAGES)
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def ask_for_rows(self, index: Any, mark: Any, stage: Any, sources: Any, at: Places) -> None:
        """Start to copy the codes of the warp's rows of a tile."""
        chunks, reads = [], []
        for i in range_constexpr(OWN):
            number = AT_ONCE * i + (own_lane() >> 2)
            own = cute.arch.shuffle_sync(index, number)
            source = self.address(own, self.own_warp() * self.own_rows + number, mark, sources)
            chunks.append(source + (own_lane() & 3) * CHUNK)
            reads.append(Int32(CHUNK) if own >= 0 else Int32(0))
        self.ask(chunks, reads, stage, at)

    @cute.jit
    def ask_for_heads(self, item: Any, stage: Any, work: Work, q: Query, at: Places) -> None:
        """Start to copy the codes of the warp's share of an item's queries."""
        query, first = work.place(item)
        source = q.base + Int64(query) * q.row + (own_lane() & 3) * CHUNK
        chunks, reads = [], []
        for i in range_constexpr(OWN):
            # found for each row by itself: there is no register for what they have in common
            head = ptx.again(first + self.own_warp() * self.own_rows + AT_ONCE * i + (own_lane() >> 2))
            chunks.append(source + Int64(head) * q.head)
            # nothing is read of heads that are not there
            reads.append(Int32(CHUNK) if head < q.heads else Int32(0))
        self.ask(chunks, reads, stage, at)

    def ask(self, chunks: Sequence[Any], reads: Sequence[Any], stage: Any, at: Places) -> None:
        """Start to copy the lane's codes, a group for each pair of slabs.

        chunks  where those of the first slab are, of each row
        reads   how much of them is read; all else are zeros
        """
        target = self.codes_at(stage, at)
        for slab in range(SLABS):
            for i in range(OWN):
                ptx.copy_async_or_zero(target + self.offset(slab, i), chunks[i] + slab * SLAB, CHUNK, reads[i])
            if slab % PAIR == PAIR - 1:
                cute.arch.cp_async_commit_group()

    def codes_at(self, stage: Any, at: Places) -> Any:
        """Where the lane's codes lie: in the second half of the slabs that they become, each warp's where its rows
        will be. The first half can be filled at once, and what another slab takes the place of has been read."""
        own = self.own_warp() * (self.own_rows * ROW_BYTES) + own_lane() * CHUNK
        return at.stages + stage * STAGE_BYTES + PAIRS * SLAB_BYTES + own

    def offset(self, slab: int, i: int) -> int:
        """Of the codes of one of the lane's rows."""
        return slab // PAIR * SLAB_BYTES + (slab % PAIR * OWN + i) * (32 * CHUNK)

    @cute.jit
    def convert(self, stage: Any, slabs: Constexpr, target: Any, behind: Constexpr, at: Places) -> None:
        """Make some slabs of the warp's rows f16.

        target  where the first of them goes, in the stage itself or elsewhere
        behind  groups of copies that follow those of codes
        """
        source = self.codes_at(stage, at)
        row, chunk = own_lane() >> 2, own_lane() & 3
        place = target + (self.own_warp() * self.own_rows + row) * ROW_BYTES + ((2 * chunk) ^ row) * 16
        for slab in range_constexpr(slabs.start, slabs.stop):
            if const_expr(slab % PAIR == 0):
                cute.arch.cp_async_wait_group(behind + PAIRS - 1 - slab // PAIR)
            found = [ptx.load_shared_128_in_order(source + self.offset(slab, i)) for i in range(OWN)]
            if const_expr(slab >= PAIRS):
                # all lanes have read what lies where this slab goes
                cute.arch.sync_warp()
            for i in range_constexpr(OWN):
                words = [word for four in found[i] for word in ptx.f16x2_of_e4m3x4(four)]
                offset = (slab - slabs.start) * SLAB_BYTES + i * (AT_ONCE * ROW_BYTES)
                ptx.store_shared_128(place + offset, words[:4])
                ptx.store_shared_128((place ^ 16) + offset, words[4:])

    @cute.jit
    def announce(self, stage: Any, ready: CodeBarriers) -> None:
        """The warp has stored its rows of a stage."""
        # tensor cores read what this thread has stored
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(ready.stages.full(stage))

    # Computed anew, as few registers are left.

    def compressed_columns(self, sources: Any) -> Any:
        return ptx.again(sources.columns) - sources.window_size

    def walk_at(self, at: Places) -> Any:
        return super().walk_at(at._replace(walk=ptx.again(at.walk)))
