"""The warpgroup of Hopper's paged prefill kernel that finds weights: prefill's, but for how the queries come.

It copies them itself, a half of the columns after the other, into the same memory: those that come first go on into
registers. Copies of an item's first ones are under way while the last tile's softmax of the item before goes on.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import ptx
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.paged_sm90_plan import HELD, OWN_ROWS, Barriers
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    LAST,
    P_BUFFERS,
    SLAB,
    SLAB_BYTES,
    Places,
    Query,
    Work,
    uniform_tile,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import AT_ONCE, ROW_BYTES
from cute_kernels.sparse_mla.prefill_sm90_scores import STEP, Scores, own_number

QUERIES_BARRIER = 1

LINE = 128
"""Bytes that come to L2 at a time."""


class PagedScores(Scores):
    @cute.jit
    def begin(self, work: Work, q: Query, at: Places) -> None:
        self.ask(work.first, range(HELD // SLAB), work, q, at)
        self.announce(work.first, work, q)

    @cute.jit
    def take(
        self,
        held: Any,
        item: Any,
        stage: Any,
        phase: Any,
        work: Work,
        q: Query,
        ready: Barriers,
        at: Places,
    ) -> tuple[Any, Any, Any]:
        item = item + work.step
        # a warp's products have the heads that it has copied
        self.settle()
        self.load(held, at.kept)
        cute.arch.sync_warp()
        # waited for when they are needed
        self.ask(item, range(HELD // SLAB, HEAD_DIM // SLAB), work, q, at)
        if item + work.step < work.end:
            self.announce(item + work.step, work, q)
        return item, stage, phase

    @cute.jit
    def let_go(
        self, is_first: Any, before: Any, mark: Any, item: Any, work: Work, q: Query, ready: Barriers, at: Places
    ) -> None:
        if mark & LAST != 0:
            # all products with the queries are done
            cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=128)
            if item + work.step < work.end:
                self.ask(item + work.step, range(HELD // SLAB), work, q, at)

    @cute.jit
    def multiply(
        self,
        qk: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        part: Any,
        scores: Any,
        held: Any,
        tile: tuple[Any, Any],
        is_first: Any,
        waiting: tuple[Any, Any],
        q: Query,
        ready: Barriers,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
        at: Places,
    ) -> None:
        """As Scores', half by half."""
        k_layout, kept_layout = layouts
        keys = self.keys(qk, part, tile, k_layout, at)
        warpgroup.fence()
        for step in range_constexpr(HELD // STEP):
            chosen = qk[0] if const_expr(step == 0) else qk[1]
            cute.gemm(chosen, scores, held[None, None, step], keys[None, None, step], scores)
        self.publish(waiting[0], ready, waiting[1] == 0)
        warpgroup.commit_group()
        ready.stages.wait_full(*tile)
        if is_first:
            # the other half of the queries
            self.settle()
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=128)
        cute.arch.fence_view_async_shared()
        keys = self.keys(qk, part, tile, k_layout, at)
        kept = qk[2].make_fragment_A(part.partition_A(uniform_tile(at.kept, kept_layout, self.dtype)))
        warpgroup.fence()
        for step in range_constexpr((HEAD_DIM - HELD) // STEP):
            cute.gemm(qk[2], scores, kept[None, None, step], keys[None, None, HELD // STEP + step], scores)
        warpgroup.commit_group()

    def publish(self, tile: Any, ready: Barriers, predicate: Any = None) -> None:
        """As Scores', by all lanes, which do not wait for each other then, and where there is a predicate, if it holds:
        a branch among products would have their descriptors come from registers of lanes."""
        cute.arch.fence_view_async_shared()
        ptx.arrive_mbarrier(ready.weights.full(tile & P_BUFFERS - 1).toint(), predicate)

    @cute.jit
    def announce(self, item: Any, work: Work, q: Query) -> None:
        """Have an item's queries on their way to L2, from which they come sooner."""
        query, first = work.place(item)
        for i in cutlass.range(OWN_ROWS // 8, unroll=1):
            row = first + (own_number() >> 5) * OWN_ROWS + (own_number() >> 2 & 7) + 8 * i
            source = q.base + Int64(query) * q.row + Int64(row) * q.head + (own_number() & 3) * LINE
            for line in range_constexpr(HEAD_DIM * 2 // (4 * LINE)):
                ptx.prefetch_l2(source + line * (4 * LINE), row < q.heads)

    @cute.jit
    def settle(self) -> None:
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    @cute.jit
    def ask(self, item: Any, slabs: cutlass.Constexpr, work: Work, q: Query, at: Places) -> None:
        """Start to copy some slabs of the warp's heads of an item's queries."""
        query, first = work.place(item)
        lane = own_number() & 31
        row = (own_number() >> 5) * OWN_ROWS + (lane >> 3)
        source = q.base + Int64(query) * q.row + Int64(first + row) * q.head + (lane & 7) * 16
        for i in range_constexpr(OWN_ROWS // AT_ONCE):
            # nothing is read of heads that are not there
            read = Int32(16) if first + row + AT_ONCE * i < q.heads else Int32(0)
            place = (row + AT_ONCE * i) * ROW_BYTES + ((lane & 7) ^ (row + AT_ONCE * i & 7)) * 16
            for slab in slabs:
                to = at.kept + (slab - slabs[0]) * SLAB_BYTES + place
                ptx.copy_async_or_zero(to, source + slab * ROW_BYTES, 16, read)
            source = source + AT_ONCE * q.head
