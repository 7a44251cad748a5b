"""The warpgroup of Hopper's prefill kernel for few heads that finds weights: S^T = K Q^T of a tile, and softmax.

A warp has 16 keys of all heads, as tensor cores give them: a thread has two keys of two or four heads. Maxima move
only when a head's outgrow theirs by 2^8: sums and O are relative to them, and until they move no warp asks what the
others' are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.sparse_mla.prefill_few_sm90_plan import (
    EXCHANGE_WORDS,
    HEADING,
    HEADINGS,
    MARK_AT,
    P_BUFFERS,
    PARTS,
    SCORES_BARRIER,
    UNIT_BYTES,
    UNIT_COLUMNS,
    UNITS,
    Barriers,
    Places,
    Plan,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    KEYS,
    LABEL,
    LAST,
    SLABS,
    Output,
    Query,
    Work,
    uniform_tile,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import ROW_BYTES
from cute_kernels.sparse_mla.softmax import GROWTH, LEAST, share

STEP = 16
"""Columns that an instruction multiplies."""

ALL_KEYS = 0xFF
"""Of a word of a heading: all of a warp's are there."""


class FewScores:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.own = range(plan.heads // 4)
        """Heads of a thread: 8 (j // 2) + 2 (lane % 4) + j % 2."""

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
        qk: tuple[cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
        at: Places,
    ) -> None:
        """Give away the weights of all tiles. By a warpgroup.

        qk        the first product of a tile, and the others
        layouts   of a unit and of queries
        """
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        part_of = qk[0].get_slice(thread)
        shape = part_of.partition_shape_C((KEYS, self.plan.heads))
        products, scores = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))

        scale = ptx.abs_f32(scale_log2)
        tile, number = Int32(0), Int32(0)
        unit, phase = barriers.start()
        item = work.first
        for ahead in range_constexpr(self.plan.query_buffers):
            self.ask_for_queries(item + ahead * work.step, Int32(ahead), lane, warp, work, q, at)
        while item < work.end:
            cute.arch.cp_async_wait_group(self.plan.query_buffers - 1)
            # tensor cores read them
            cute.arch.fence_view_async_shared()
            self.meet()
            held = number % self.plan.query_buffers
            queries_at = at.queries + held * self.plan.query_bytes
            tops = [Float32(LEAST) for _ in self.own]
            most = [Float32(-Float32.inf) for _ in self.own]
            sums = [Float32(0.0) for _ in self.own]

            unit, phase, there, mark = self.start(
                qk, part_of, products, tile, unit, phase, queries_at, layouts, ready, at
            )
            warpgroup.wait_group(0)
            self.take(products, scores, scale_log2, there, lane)
            while mark & LAST == 0:
                buffer = tile % P_BUFFERS
                ready.weights.wait_empty(buffer, tile // P_BUFFERS & 1)
                own_mark = mark
                if self.is_late(unit, phase, ready):
                    tops, most, sums = self.softmax(scores, scale, tops, most, sums, own_mark, buffer, lane, warp, at)
                    self.publish(buffer, lane, ready)
                    unit, phase, there, mark = self.start(
                        qk, part_of, products, tile + 1, unit, phase, queries_at, layouts, ready, at
                    )
                    warpgroup.wait_group(0)
                else:
                    # softmax goes on while tensor cores multiply the next tile
                    unit, phase, there, mark = self.start(
                        qk, part_of, products, tile + 1, unit, phase, queries_at, layouts, ready, at
                    )
                    tops, most, sums = self.softmax(scores, scale, tops, most, sums, own_mark, buffer, lane, warp, at)
                    self.publish(buffer, lane, ready)
                    warpgroup.wait_group(0)
                tile = tile + 1
                self.take(products, scores, scale_log2, there, lane)

            buffer = tile % P_BUFFERS
            logit = Int32(0)
            if sink != 0:
                logit = ptx.load_global_s32_where(thread < q.heads, sink + Int64(thread) * 4)
            ready.weights.wait_empty(buffer, tile // P_BUFFERS & 1)
            tops, most, sums = self.softmax(scores, scale, tops, most, sums, mark, buffer, lane, warp, at)
            # all warps are done with the products of this item's queries
            behind = item + self.plan.query_buffers * work.step
            self.ask_for_queries(behind, held, lane, warp, work, q, at)
            self.gather(sums, most, tops, lane, warp, at)
            if thread < self.plan.heads:
                own_share = self.finish(thread, item, logit, sink, q, out, at)
                ptx.store_shared_f32(at.shares + buffer * self.plan.note_bytes + thread * 4, own_share)
            self.publish(buffer, lane, ready)
            tile = tile + 1
            item, number = item + work.step, number + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def start(
        self,
        qk: tuple[cute.TiledMma, cute.TiledMma],
        part_of: Any,
        products: Any,
        tile: Any,
        unit: Any,
        phase: Any,
        queries_at: Any,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
        ready: Barriers,
        at: Places,
    ) -> tuple[Any, Any, Any, Any]:
        """Start products = K Q^T of the tile that begins at a unit, once it is there. Returns where the next begins,
        which of the warp's keys are there, and the tile's marks."""
        # made anew: held in registers, descriptors would have to be moved to uniform ones, between two products
        queries = qk[0].make_fragment_B(part_of.partition_B(uniform_tile(ptx.again(queries_at), layouts[1], BFloat16)))
        keys = []
        for _ in range_constexpr(PARTS):
            ready.units.wait_full(unit, phase)
            rows = uniform_tile(at.units + unit * UNIT_BYTES, layouts[0], BFloat16)
            keys.append(qk[0].make_fragment_A(part_of.partition_A(rows)))
            unit, phase = barriers.advance(unit, phase, UNITS)
        # no proxy fence for what cp.async has brought, see prefill_sm90_scores
        warpgroup.fence()
        steps = UNIT_COLUMNS // STEP
        for i in range_constexpr(PARTS * steps):
            chosen = qk[0] if const_expr(i == 0) else qk[1]
            cute.gemm(chosen, products, keys[i // steps][None, None, i % steps], queries[None, None, i], products)
        warpgroup.commit_group()
        heading = at.heading + (tile & HEADINGS - 1) * HEADING
        there = ptx.load_shared_64(heading + (ptx.thread_again() >> 5) * 8)
        return unit, phase, there, ptx.load_shared_s32(heading + MARK_AT)

    @cute.jit
    def is_late(self, unit: Any, phase: Any, ready: Barriers) -> Any:
        """Whether the tile that begins at a unit is not there for all warps."""
        missing = Int32(0)
        for _ in range_constexpr(PARTS):
            missing = missing | (ready.units.is_full(unit, phase) ^ 1)
            unit, phase = barriers.advance(unit, phase, UNITS)
        return ptx.any_of_group(SCORES_BARRIER, 128, missing) != 0

    @cute.jit
    def take(self, products: Any, scores: Any, scale_log2: Any, there: Any, lane: Any) -> None:
        """scores = products, with the sign of the scale, -inf where a key is not there."""
        for i in range_constexpr(cute.size(scores)):
            scores[i] = products[i]
        if scale_log2 < Float32(0.0):
            for i in range_constexpr(cute.size(scores)):
                scores[i] = -scores[i]
        if (there[0] & there[1]) != ALL_KEYS:
            for i in range_constexpr(cute.size(scores)):
                bit = there[i // 2 % 2] >> (lane >> 2)
                scores[i] = scores[i] if bit & 1 != 0 else Float32(-Float32.inf)

    @cute.jit
    def softmax(
        self,
        scores: Any,
        scale: Any,
        tops: Any,
        most: Any,
        sums: Any,
        mark: Any,
        buffer: Any,
        lane: Any,
        warp: Any,
        at: Places,
    ) -> tuple[Any, Any, Any]:
        """Store a tile's weights, and what the back has to know. Returns the item's maxima, largest logits and sums."""
        largest = [ptx.max_f32(scores[_index(j, 0)], scores[_index(j, 1)]) * scale for j in self.own]
        most = [ptx.max_f32(most[j], largest[j]) for j in self.own]
        growth = [largest[j] - tops[j] for j in self.own]
        has_grown = Int32(1) if pairwise(growth, ptx.max_f32) > Float32(GROWTH) else Int32(0)
        has_factors = ptx.any_of_group(SCORES_BARRIER, 128, has_grown)
        factors = [Float32(1.0) for _ in self.own]
        if has_factors != 0:
            found = self.exchange(largest, lane, warp, at)
            for j in range_constexpr(len(self.own)):
                moved = found[j] if found[j] - tops[j] > Float32(GROWTH) else tops[j]
                # there is nothing before an item's first tile
                is_new = tops[j] == Float32(LEAST)
                factors[j] = Float32(1.0) if is_new else ptx.exp2(tops[j] - moved)
                tops[j] = moved
            if (warp == 0) & (lane < 4):
                self.store_pairs(at.factors + buffer * self.plan.note_bytes, factors, lane)
        for i in range_constexpr(cute.size(scores)):
            scores[i] = ptx.exp2(ptx.fma_rn(scores[i], scale, -tops[i // 4 * 2 + i % 2]))
        sums = [sums[j] * factors[j] + (scores[_index(j, 0)] + scores[_index(j, 1)]) for j in self.own]
        self.store_weights(scores, at.p + buffer * self.plan.p_bytes, lane, warp)
        if (warp == 0) & (lane == 0):
            ptx.store_shared_64(at.label + buffer * LABEL, mark, has_factors)
        return tops, most, sums

    @cute.jit
    def publish(self, buffer: Any, lane: Any, ready: Barriers) -> None:
        """Let the back have a tile's weights."""
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ready.weights.full(buffer))

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=SCORES_BARRIER, number_of_threads=128)

    @cute.jit
    def ask_for_queries(self, item: Any, buffer: Any, lane: Any, warp: Any, work: Work, q: Query, at: Places) -> None:
        """Start to copy an item's queries, if there is such an item. A warp does two slabs, 4 heads at a time."""
        if item < work.end:
            source = q.base + Int64(item) * q.row + (lane & 7) * 16
            target = at.queries + buffer * self.plan.query_bytes
            for i in range_constexpr(self.plan.heads // 4):
                head = 4 * i + (lane >> 3)
                # nothing is read of heads that are not there
                read = Int32(16) if head < q.heads else Int32(0)
                row = source + Int64(cutlass.min(head, q.heads - 1)) * q.head
                to = target + head * ROW_BYTES + ((lane & 7) ^ (head & 7)) * 16
                for j in range_constexpr(SLABS // 4):
                    slab = warp * (SLABS // 4) + j
                    ptx.copy_async_or_zero(
                        to + slab * (self.plan.heads * ROW_BYTES), row + Int64(slab * ROW_BYTES), 16, read
                    )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def store_pairs(self, address: Any, numbers: Any, lane: Any) -> None:
        """Store an fp32 of each of the lane's heads. By 4 lanes."""
        for i in range_constexpr(len(self.own) // 2):
            pair = [number.bitcast(Int32) for number in numbers[2 * i : 2 * i + 2]]
            ptx.store_shared_64(address + (8 * i + (lane & 3) * 2) * 4, *pair)

    @cute.jit
    def exchange(self, largest: Any, lane: Any, warp: Any, at: Places) -> list[Any]:
        """The heads' largest scores of the tile."""
        of_warp = [_over_keys(number, ptx.max_f32) for number in largest]
        if lane < 4:
            self.store_pairs(at.largest + warp * (self.plan.heads * 4), of_warp, lane)
        self.meet()
        found = []
        for i in range_constexpr(len(self.own) // 2):
            pairs_at = at.largest + (8 * i + (lane & 3) * 2) * 4
            pairs = [ptx.load_shared_f32x2(pairs_at + other * (self.plan.heads * 4)) for other in range(4)]
            found += [pairwise([pair[j] for pair in pairs], ptx.max_f32) for j in range(2)]
        return found

    @cute.jit
    def store_weights(self, weights: Any, p_at: Any, lane: Any, warp: Any) -> None:
        """Store a tile's weights, a head's keys next to each other."""
        blocks = self.plan.heads // 8
        words = [ptx.bf16x2(weights[2 * i], weights[2 * i + 1]) for i in range(2 * blocks)]
        chunk = 2 * warp + (lane >> 3 & 1)
        for i in range_constexpr(0, blocks, 2):
            head = 8 * (i + (lane >> 4)) + (lane & 7)
            place = p_at + head * ROW_BYTES + (chunk ^ (lane & 7)) * 16
            ptx.store_matrices_transposed(place, words[2 * i : 2 * i + 4])

    @cute.jit
    def gather(self, sums: Any, most: Any, tops: Any, lane: Any, warp: Any, at: Places) -> None:
        """Have the first warp know what all warps know of the heads."""
        amounts = [_over_keys(number, operator.add) for number in sums]
        largest = [_over_keys(number, ptx.max_f32) for number in most]
        if lane < 4:
            for j in range_constexpr(len(self.own)):
                head = 8 * (j // 2) + 2 * lane + j % 2
                known = [number.bitcast(Int32) for number in (amounts[j], largest[j], tops[j], Float32(0.0))]
                place = at.amounts + (warp * self.plan.heads + head) * (EXCHANGE_WORDS * 4)
                ptx.store_shared_128(place, known)
        self.meet()

    @cute.jit
    def finish(self, head: Any, item: Any, logit: Any, sink: Any, q: Query, out: Output, at: Places) -> Any:
        """Store what a head's logits come to. Returns what to multiply its row of O with."""
        known = []
        for warp in range_constexpr(4):
            words = ptx.load_shared_128(at.amounts + (warp * self.plan.heads + head) * (EXCHANGE_WORDS * 4))
            known.append([word.bitcast(Float32) for word in words])
        amount = pairwise([one[0] for one in known], operator.add)
        most = pairwise([one[1] for one in known], ptx.max_f32)
        top = known[0][2]
        lse = (top + ptx.log2(amount)) * Float32(ptx.LN_2)
        lse = Float32(Float32.inf) if amount == Float32(0.0) else lse
        if const_expr(out.max_logits is not None):
            out.max_logits.store((item, head), most * Float32(ptx.LN_2), head < q.heads)
        out.lse.store((item, head), lse, head < q.heads)
        return share(amount, top, logit, sink)


def _index(head: int, half: int) -> int:
    """Where the score is of one of the thread's heads and one of its two keys."""
    return head // 2 * 4 + half * 2 + head % 2


def _over_keys(value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """What the lanes have that have the same heads, combined, in each of them. All lanes must call."""
    for offset in (4, 8, 16):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value
