"""The warpgroup of Hopper's paged prefill kernel that finds weights: prefill's, but for how the queries come.

It copies them itself, a half of the columns after the other, into the same memory: those that come first go on into
registers. Copies of an item's first ones are under way while the last tile's softmax of the item before goes on.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.paged_sm90_plan import HELD, OWN_ROWS, Barriers
from cute_kernels.sparse_mla.prefill_sm90_plan import LAST, SLAB, SLAB_BYTES, Places, Query, Work
from cute_kernels.sparse_mla.prefill_sm90_rows import AT_ONCE, ROW_BYTES
from cute_kernels.sparse_mla.prefill_sm90_scores import Scores, own_number

QUERIES_BARRIER = 1

FIRST, LATER = range(HELD // SLAB), range(HELD // SLAB, HEAD_DIM // SLAB)
"""Slabs of an item's queries: those that are held in registers, and the others."""

LINE = 128
"""Bytes that come to L2 at a time."""


class PagedScores(Scores):
    @cute.jit
    def begin(self, work: Work, q: Query, at: Places) -> None:
        self.ask(at.coming, work.first, FIRST, work, q)
        self.ask(at.kept, work.first, LATER, work, q)

    @cute.jit
    def take(
        self, held: Any, item: Any, stage: Any, phase: Any, work: Work, q: Query, ready: Barriers, at: Places
    ) -> tuple[Any, Any, Any]:
        item = item + work.step
        # a warp's products have the heads that it has copied
        self.settle()
        self.load(held, [at.coming])
        cute.arch.sync_warp()
        if item + work.step < work.end:
            self.ask(at.coming, item + work.step, FIRST, work, q)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=128)
        return item, stage, phase

    @cute.jit
    def let_go(
        self, is_first: Any, before: Any, mark: Any, item: Any, work: Work, q: Query, ready: Barriers, at: Places
    ) -> None:
        if is_first & (item + work.step < work.end):
            self.announce(item + work.step, work, q)
        if mark & LAST != 0:
            # all products with the queries are done
            cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=128)
            if item + work.step < work.end:
                self.ask(at.kept, item + work.step, LATER, work, q)

    @cute.jit
    def announce(self, item: Any, work: Work, q: Query) -> None:
        """Have the columns that are asked for last on their way to L2, from which they come sooner."""
        query, first = work.place(item)
        for i in cutlass.range(OWN_ROWS // 8, unroll=1):
            row = first + (own_number() >> 5) * OWN_ROWS + (own_number() >> 2 & 7) + 8 * i
            source = q.base + Int64(query) * q.row + Int64(row) * q.head
            ptx.prefetch_l2(source + (HELD * 2 + (own_number() & 3) * LINE), row < q.heads)

    @cute.jit
    def settle(self) -> None:
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    @cute.jit
    def ask(self, target: Any, item: Any, slabs: cutlass.Constexpr, work: Work, q: Query) -> None:
        """Start to copy some slabs of the warp's heads of an item's queries; target: where the first one goes."""
        query, first = work.place(item)
        lane = own_number() & 31
        row = (own_number() >> 5) * OWN_ROWS + (lane >> 3)
        source = q.base + Int64(query) * q.row + Int64(first + row) * q.head + (lane & 7) * 16
        for i in range_constexpr(OWN_ROWS // AT_ONCE):
            # nothing is read of heads that are not there
            read = Int32(16) if first + row + AT_ONCE * i < q.heads else Int32(0)
            place = (row + AT_ONCE * i) * ROW_BYTES + ((lane & 7) ^ (row + AT_ONCE * i & 7)) * 16
            for slab in slabs:
                to = target + (slab - slabs[0]) * SLAB_BYTES + place
                ptx.copy_async_or_zero(to, source + slab * ROW_BYTES, 16, read)
            source = source + AT_ONCE * q.head
