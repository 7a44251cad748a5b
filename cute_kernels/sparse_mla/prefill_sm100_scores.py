"""The warpgroup of Blackwell's prefill kernel that finds weights: softmax of the scores of a tile.

Two threads have a head, half of a tile's keys each. Maxima move only when a head's outgrow theirs by 2^8: sums and O
are relative to them, and until they move nobody asks what the other half's are. When they do, O is multiplied here.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.sparse_mla.blackwell.decode import (
    O_BLOCK,
    O_COLUMN,
    O_COLUMNS,
    PAIR_BARRIER,
    PAIR_THREADS,
    S_COLUMN,
    S_COLUMNS,
    chunk_offset,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    END,
    LAST,
    P_BITS,
    P_BUFFERS,
    P_BYTES,
    ROWS,
    Output,
    Query,
    Work,
)
from cute_kernels.sparse_mla.prefill_sm100_plan import (
    LANE,
    LIST,
    LISTS,
    MARK_AT,
    THERE_AT,
    Barriers,
    Places,
    Plan,
)
from cute_kernels.sparse_mla.softmax import GROWTH, LEAST, share

CHUNK = 8
"""Weights that a thread stores at a time."""

ALL = -1
"""Of the keys of a lane: all are there."""


class Scores:
    def __init__(self, plan: Plan) -> None:
        self.pair = ptx.bf16x2 if plan.dtype == "bf16" else ptx.f16x2

    @cute.jit
    def run(
        self,
        thread: Any,
        work: Work,
        q: Query,
        out: Output,
        sink: Any,
        scale_log2: Any,
        ready: Barriers,
        at: Places,
    ) -> None:
        """Give away the weights of all tiles. By a warpgroup."""
        head, half = thread % ROWS, thread // ROWS
        lanes = (thread >> 5) * (32 * LANE)
        scale = ptx.abs_f32(scale_log2)
        item, mark, tile = Int32(work.first), Int32(0), Int32(0)
        slot, turn = barriers.start()
        _, phase = barriers.start()
        while mark & END == 0:
            row, first = work.place(item)
            logit = self.logit(sink, first + head, q)
            top, most, amount = Float32(LEAST), Float32(-Float32.inf), Float32(0.0)
            mark, is_first = Int32(0), Int32(1)
            while mark & LAST == 0:
                buffer, its_phase = tile & P_BUFFERS - 1, tile >> P_BITS & 1
                ready.lists.wait_full(slot, turn)
                there = ptx.load_shared_s32(at.lists + slot * LIST + THERE_AT + half * 4)
                mark = ptx.load_shared_s32(at.lists + slot * LIST + MARK_AT)
                ptx.wait_mbarrier((ready.scores + buffer).toint(), its_phase)
                ptx.fence_tensor_after()
                scores = list(ptx.load_tensor_memory(lanes + S_COLUMN + buffer * S_COLUMNS, S_COLUMNS))
                cute.arch.sync_warp()
                if thread & 31 == 0:
                    cute.arch.mbarrier_arrive(ready.lists.empty(slot))
                slot, turn = barriers.advance(slot, turn, LISTS)
                scores = self.mask(scores, there, scale_log2)
                largest = self.largest(scores) * scale
                most = ptx.max_f32(most, largest)
                # P V of the tile before last, which had this buffer
                ready.weights.wait_empty(buffer, its_phase)
                is_grown = largest - top > Float32(GROWTH)
                if ptx.any_of_group(PAIR_BARRIER + (head >> 5), PAIR_THREADS, is_grown) != 0:
                    # the vote was after what was exchanged before had been read
                    found = ptx.max_f32(largest, self.others(largest, thread, at))
                    moved = found if found - top > Float32(GROWTH) else top
                    # there is nothing before an item's first tile
                    factor = Float32(1.0) if is_first != 0 else ptx.exp2(top - moved)
                    top, amount = moved, amount * factor
                    if is_first == 0:
                        ready.weights.wait_empty(buffer ^ 1, (tile + 1 >> P_BITS) & 1)
                        self.multiply(lanes, factor)
                weights = [ptx.exp2(ptx.fma_rn(score, scale, -top)) for score in scores]
                amount = amount + pairwise(weights, operator.add)
                for chunk in range_constexpr(S_COLUMNS // CHUNK):
                    own = weights[CHUNK * chunk : CHUNK * (chunk + 1)]
                    words = [self.pair(own[2 * i], own[2 * i + 1]) for i in range(CHUNK // 2)]
                    place = chunk_offset(head, half * (S_COLUMNS // CHUNK) + chunk)
                    ptx.store_shared_128(at.p + buffer * P_BYTES + place, words)
                # tensor cores read the weights, and the next scores come where these were
                cute.arch.fence_view_async_shared()
                ptx.fence_tensor_before()
                cute.arch.sync_warp()
                if thread & 31 == 0:
                    cute.arch.mbarrier_arrive(ready.weights.full(buffer))
                is_first, tile = Int32(0), tile + 1

            amount = self.of_both(amount, thread, operator.add, at)
            most = self.of_both(most, thread, ptx.max_f32, at)
            ready.total.wait_empty(0, phase)
            if half == 0:
                ptx.store_shared_f32(at.note + head * 4, share(amount, top, logit, sink))
                self.store(row, first + head, most, top, amount, q, out)
            if thread == 0:
                ptx.store_shared_s32(at.label, mark)
            cute.arch.sync_warp()
            if thread & 31 == 0:
                cute.arch.mbarrier_arrive(ready.total.full(0))
            item, phase = item + work.step, phase ^ 1

    @cute.jit
    def mask(self, scores: cutlass.Constexpr, there: Any, scale_log2: Any) -> Any:
        """The scores of keys that are there, -inf for the others; negative if the scale is."""
        found = list(scores)
        if scale_log2 < Float32(0.0):
            found = [-score for score in found]
        if there != ALL:
            found = [found[i] if there >> i & 1 != 0 else Float32(-Float32.inf) for i in range(S_COLUMNS)]
        return found

    def largest(self, scores: Any) -> Any:
        """Of the thread's scores."""
        found = scores[0]
        for i in range(1, len(scores) - 1, 2):
            found = ptx.max3_f32(found, scores[i], scores[i + 1])
        return ptx.max_f32(found, scores[-1])

    @cute.jit
    def of_both(self, value: Any, thread: Any, combine: cutlass.Constexpr, at: Places) -> Any:
        """A head's two threads' values, combined, in both. By the warps that have its 32 heads."""
        # what was exchanged before has been read
        self.meet(thread)
        return combine(value, self.others(value, thread, at))

    @cute.jit
    def others(self, value: Any, thread: Any, at: Places) -> Any:
        """The value of the thread that has the other keys of this one's head."""
        ptx.store_shared_f32(at.exchange + thread * 4, value)
        self.meet(thread)
        return ptx.load_shared_f32(at.exchange + (thread ^ ROWS) * 4)

    def meet(self, thread: Any) -> None:
        """Wait for the other warp that has the thread's head."""
        barrier = PAIR_BARRIER + (thread % ROWS >> 5)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=PAIR_THREADS)

    @cute.jit
    def multiply(self, lanes: Any, factor: Any) -> None:
        """O of the thread's lane. P V of the tile before is done."""
        ptx.fence_tensor_after()
        for number in cutlass.range(O_COLUMNS // O_BLOCK, unroll=1):
            place = lanes + O_COLUMN + number * O_BLOCK
            found = ptx.load_tensor_memory(place, O_BLOCK)
            ptx.store_tensor_memory(place, [one * factor for one in found])
        ptx.wait_tensor_stores()

    @cute.jit
    def logit(self, sink: Any, head: Any, q: Query) -> Any:
        found = Int32(0)
        if sink != 0:
            found = ptx.load_global_s32_again_where(head < q.heads, sink + Int64(head) * 4)
        return found

    @cute.jit
    def store(self, row: Any, head: Any, most: Any, top: Any, amount: Any, q: Query, out: Output) -> None:
        """Store what a head's logits come to."""
        lse = (top + ptx.log2(amount)) * Float32(ptx.LN_2)
        lse = Float32(Float32.inf) if amount == Float32(0.0) else lse
        if const_expr(out.max_logits is not None):
            out.max_logits.store((row, head), most * Float32(ptx.LN_2), head < q.heads)
        out.lse.store((row, head), lse, head < q.heads)
