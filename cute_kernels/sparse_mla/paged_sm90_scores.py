"""The warpgroup of Hopper's paged prefill kernel that finds weights: prefill's, but for how the queries come.

It loads them itself, some columns into registers and the others into memory of their own, while the last tile's softmax
of the item before goes on.
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


class PagedScores(Scores):
    @cute.jit
    def begin(self, held: Any, work: Work, q: Query, at: Places) -> None:
        self.ask(held, work.first, work, q, at)

    @cute.jit
    def take(
        self, held: Any, item: Any, stage: Any, phase: Any, work: Work, q: Query, ready: Barriers, at: Places
    ) -> tuple[Any, Any, Any]:
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=128)
        return item + work.step, stage, phase

    @cute.jit
    def let_go(
        self,
        held: Any,
        is_first: Any,
        before: Any,
        mark: Any,
        item: Any,
        work: Work,
        q: Query,
        ready: Barriers,
        at: Places,
    ) -> None:
        if mark & LAST != 0:
            # all products with the queries are done
            cute.arch.barrier(barrier_id=QUERIES_BARRIER, number_of_threads=128)
            if item + work.step < work.end:
                self.ask(held, item + work.step, work, q, at)

    @cute.jit
    def ask(self, held: Any, item: Any, work: Work, q: Query, at: Places) -> None:
        """Start to copy an item's queries. In place of heads that are not there registers have the last one's."""
        query, first = work.place(item)
        lane = own_number() & 31
        head = (own_number() >> 5) * OWN_ROWS + (lane >> 2)
        words = cute.recast_tensor(held, Int32)
        for half in range_constexpr(2):
            own = cutlass.min(first + head + 8 * half, q.heads - 1)
            source = q.base + Int64(query) * q.row + Int64(own) * q.head + (lane & 3) * 4
            for i in range_constexpr(HELD // 8):
                words[2 * i + half] = ptx.load_global_s32_again(source + 16 * i)

        row = (own_number() >> 5) * OWN_ROWS + (lane >> 3)
        source = q.base + Int64(query) * q.row + Int64(first + row) * q.head + (HELD * 2 + (lane & 7) * 16)
        for i in range_constexpr(OWN_ROWS // AT_ONCE):
            # nothing is read of heads that are not there
            read = Int32(16) if first + row + AT_ONCE * i < q.heads else Int32(0)
            place = (row + AT_ONCE * i) * ROW_BYTES + ((lane & 7) ^ (row + AT_ONCE * i & 7)) * 16
            for slab in range_constexpr((HEAD_DIM - HELD) // SLAB):
                ptx.copy_async_or_zero(at.kept + slab * SLAB_BYTES + place, source + slab * ROW_BYTES, 16, read)
            source = source + AT_ONCE * q.head
        cute.arch.cp_async_commit_group()
