"""The warpgroup of Hopper's prefill kernel that finds weights: Q K^T of a tile, and softmax.

A warp has 16 heads, as tensor cores give them: a thread has 16 keys of each of two. Maxima move only when a head's
outgrow theirs by 2^8: sums and O are relative to them, and until they move no thread asks what the others' are.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.convert import bf16_high, bf16_low
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.dsl.rope import rotate_pair
from cute_kernels.formats import HEAD_DIM, ROPE_DIM
from cute_kernels.kv_cache.query_norm import inverse_rms
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    END,
    HEADING,
    KEYS,
    LABEL,
    LAST,
    NOTE,
    P_BITS,
    P_BUFFERS,
    P_BYTES,
    ROWS,
    SLAB,
    SLAB_BYTES,
    STAGE_BYTES,
    Barriers,
    Output,
    Places,
    Plan,
    Query,
    Work,
    uniform_tile,
)
from cute_kernels.sparse_mla.softmax import GROWTH, LEAST, LEAST_SCALE, share

STEP = 16
"""Columns that an instruction multiplies."""

OWN_SCORES = ROWS * KEYS // 128

NAN_PAIR = 0x7FFF7FFF
"""Two bf16."""


class Scores:
    def __init__(self, plan: Plan) -> None:
        self.plan, self.dtype, self.held = plan, plan.dtype, plan.held
        self.pair = ptx.bf16x2 if plan.dtype is BFloat16 else ptx.f16x2

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
        qk: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        k_layout: cute.ComposedLayout,
        kept_layout: cute.ComposedLayout,
        at: Places,
    ) -> None:
        """Give away the weights of all tiles. By a warpgroup.

        qk   the products of queries in registers, the first and the others, and of those in shared memory
        """
        part = qk[2].get_slice(thread)
        held = cute.make_rmem_tensor(qk[0].get_slice(thread).partition_shape_A((ROWS, self.held)), self.dtype)
        scores = cute.make_rmem_tensor(part.partition_shape_C((ROWS, KEYS)), Float32)

        scale = ptx.abs_f32(scale_log2)
        tile = Int32(0)
        stage, phase = barriers.start()
        mark, item = Int32(0), work.first - work.step
        norm = None
        if const_expr(q.norm_eps is not None):
            norm = self.ask_for_norm(work.first, work, q, out)
        self.begin(work, q, at)
        while mark & END == 0:
            before = stage
            item, stage, phase = self.take(held, item, stage, phase, work, q, ready, at)
            scales = [scale, scale]
            if const_expr(q.norm_eps is not None):
                scales = self.rotate(held, scale, norm, q.norm_eps)

            tops = [Float32(LEAST), Float32(LEAST)]
            most = [Float32(-Float32.inf), Float32(-Float32.inf)]
            sums = [Float32(0.0), Float32(0.0)]
            mark = Int32(0)
            is_first, is_public = True, Int32(1)
            while mark & LAST == 0:
                if (is_public == 0) & (ready.stages.has_tile(stage, phase) == 0):
                    self.publish(tile - 1, ready)
                    is_public = Int32(1)
                ready.stages.wait_tile(stage, phase)
                if const_expr(self.plan.readers_fence):
                    cute.arch.fence_view_async_shared()
                self.multiply(
                    qk,
                    part,
                    scores,
                    held,
                    (stage, phase),
                    is_first,
                    (tile - 1, is_public),
                    q,
                    ready,
                    (k_layout, kept_layout),
                    at,
                )
                heading = at.heading + stage * HEADING
                there = ptx.load_shared_128(heading)
                mark = ptx.load_shared_s32(heading + 16)
                logits = [Int32(0), Int32(0)]
                if mark & LAST != 0:
                    logits = [self.logit(sink, self.head(item, half, work), q) for half in range(2)]
                warpgroup.wait_group(0)
                self.let_go(is_first, before, mark, item, work, q, ready, at)
                is_first, is_public = False, Int32(0)
                if scale_log2 < Float32(0.0):
                    for i in range_constexpr(OWN_SCORES):
                        scores[i] = -scores[i]
                if (there[0] & there[1] & there[2] & there[3]) != 0xFFFF:
                    for i in range_constexpr(OWN_SCORES):
                        bit = there[i // 8] >> ((own_number() & 3) * 2 + (8 * (i // 4 % 2) + i % 2))
                        scores[i] = scores[i] if bit & 1 != 0 else Float32(-Float32.inf)
                factors = [Float32(1.0), Float32(1.0)]
                largest = [self.reduce(scores, half, ptx.max_f32) * scales[half] for half in range(2)]
                most = [ptx.max_f32(most[half], largest[half]) for half in range(2)]
                grown = [largest[half] - tops[half] > Float32(GROWTH) for half in range(2)]
                if cute.arch.vote_any_sync(grown[0] | grown[1]):
                    for half in range_constexpr(2):
                        found = over_quad(largest[half], ptx.max_f32)
                        moved = found if found - tops[half] > Float32(GROWTH) else tops[half]
                        # there is nothing before an item's first tile
                        is_new = tops[half] == Float32(LEAST)
                        factors[half] = Float32(1.0) if is_new else ptx.exp2(tops[half] - moved)
                        tops[half] = moved
                for i in range_constexpr(OWN_SCORES):
                    scores[i] = ptx.exp2(ptx.fma_rn(scores[i], scales[i // 2 % 2], -tops[i // 2 % 2]))
                for half in range_constexpr(2):
                    sums[half] = sums[half] * factors[half] + self.reduce(scores, half, operator.add)

                buffer = tile & P_BUFFERS - 1
                ready.weights.wait_empty(buffer, tile >> P_BITS & 1)
                lane, warp = own_number() & 31, own_number() >> 5
                p_at = at.p + buffer * P_BYTES + (warp * 16 + (lane & 15)) * (KEYS * 2)
                for i in range_constexpr(KEYS // STEP):
                    words = [self.pair(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]) for j in range(4)]
                    ptx.store_matrices(p_at + ((2 * i + (lane >> 4)) ^ (lane & 7)) * 16, words)
                shares = [Float32(0.0), Float32(0.0)]
                if mark & LAST != 0:
                    for half in range_constexpr(2):
                        sums[half] = over_quad(sums[half], operator.add)
                        shares[half] = share(sums[half], tops[half], logits[half], sink)
                if (lane & 3) == 0:
                    for half in range_constexpr(2):
                        note_at = at.note + (buffer * ROWS + warp * 16 + (lane >> 2) + 8 * half) * NOTE
                        ptx.store_shared_64(note_at, factors[half].bitcast(Int32), shares[half].bitcast(Int32))
                if own_number() == 0:
                    ptx.store_shared_64(at.label + buffer * LABEL, mark, item)
                stage, phase = ready.stages.advance(stage, phase)
                tile = tile + 1

            if const_expr(q.norm_eps is not None):
                # on their way while this item is finished
                norm = self.ask_for_norm(item + work.step, work, q, out)
            self.publish(tile - 1, ready)
            for half in range_constexpr(2):
                largest_of_all = over_quad(most[half], ptx.max_f32)
                self.store(item, half, largest_of_all, tops[half], sums[half], work, q, out, at)

    # How the queries come. Here they go through the ring.

    @cute.jit
    def begin(self, work: Work, q: Query, at: Places) -> None:
        """Before the first item."""

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
        """Have the queries of the item behind `item`, and its number; what stage and phase are then."""
        ready.stages.wait_tile(stage, phase)
        self.load(held, at.stages + stage * STAGE_BYTES)
        item = ptx.load_shared_s32(at.heading + stage * HEADING)
        stage, phase = ready.stages.advance(stage, phase)
        return item, stage, phase

    @cute.jit
    def let_go(
        self, is_first: Any, before: Any, mark: Any, item: Any, work: Work, q: Query, ready: Barriers, at: Places
    ) -> None:
        """Once a tile is multiplied, an item's first or another; before: the stage before the item's tiles."""
        if own_number() & 31 == 0:
            if is_first:
                # its queries are in registers, since they have been multiplied
                ready.stages.let_go_of_queries(before)
            if mark & LAST != 0:
                cute.arch.mbarrier_arrive(ready.kept)

    @cute.jit
    def publish(self, tile: Any, ready: Barriers) -> None:
        """Let the backs have a tile's weights. The next tile's products have begun before, if it is there: tensor cores
        then have P V to do while softmax of that tile goes on, and nobody waits for the fence."""
        # tensor cores read the weights
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if own_number() & 31 == 0:
            cute.arch.mbarrier_arrive(ready.weights.full(tile & P_BUFFERS - 1))

    def head(self, item: Any, half: int, work: Work) -> Any:
        """The thread's first or second head."""
        _, first = work.place(item)
        return first + (own_number() >> 5) * 16 + (own_number() >> 2 & 7) + 8 * half

    @cute.jit
    def store(
        self,
        item: Any,
        half: cutlass.Constexpr,
        most: Any,
        top: Any,
        amount: Any,
        work: Work,
        q: Query,
        out: Output,
        at: Places,
    ) -> None:
        """Store what a head's logits come to."""
        row, _ = work.place(item)
        head = self.head(item, half, work)
        lse = (top + ptx.log2(amount)) * Float32(ptx.LN_2)
        lse = Float32(Float32.inf) if amount == Float32(0.0) else lse
        is_own = (own_number() & 3 == 0) & (head < q.heads)
        if const_expr(out.max_logits is not None):
            out.max_logits.store((row, head), most * Float32(ptx.LN_2), is_own)
        out.lse.store((row, head), lse, is_own)

    @cute.jit
    def logit(self, sink: Any, head: Any, q: Query) -> Any:
        found = Int32(0)
        if sink != 0:
            found = ptx.load_global_s32_again_where(head < q.heads, sink + Int64(head) * 4)
        return found

    @cute.jit
    def load(self, held: cute.Tensor, place: Any) -> None:
        """An item's queries, as many columns as it holds: lane i gives the address of row i % 8 of matrix i // 8."""
        lane, warp = own_number() & 31, own_number() >> 5
        row_at = place + (warp * 16 + (lane & 15)) * (SLAB * 2)
        words = cute.recast_tensor(held, Int32)
        for step in range_constexpr(self.held // STEP):
            chunk = (2 * (step % 4) + (lane >> 4)) ^ (lane & 7)
            four = ptx.load_matrices(row_at + step // 4 * SLAB_BYTES + chunk * 16)
            for i in range_constexpr(4):
                words[4 * step + i] = four[i]

    @cute.jit
    def rotate(self, held: cute.Tensor, scale: Any, norm: tuple[Any, Any], eps: Any) -> list[Any]:
        """Rotate an item's raw queries, and return what to multiply the scores of the thread's two heads with: the
        norm is one factor for a whole head, and has no place in its columns.

        held    of every four words, of 16 columns, the first and the third are of the first head
        norm    as ask_for_norm has it
        """
        angles, squares = norm
        words = cute.recast_tensor(held, Int32)
        for run in range_constexpr(ROPE_DIM // 8):
            number = run * 4 + (own_number() & 3)
            cos, sin = (cute.arch.shuffle_sync(angle, number).bitcast(Float32) for angle in angles)
            for half in range_constexpr(2):
                i = (self.held - ROPE_DIM) // STEP * 4 + run * 2 + half
                pair = rotate_pair(bf16_low(words[i]), bf16_high(words[i]), cos, sin)
                words[i] = ptx.bf16x2(*pair)
        factors = [self.factor(four, eps) for four in squares]
        for half in range_constexpr(2):
            # keys that are not attended to have the score -inf, which neither NaN nor 0 may be multiplied with: a head
            # whose sums are NaN has NaN for a query instead
            words[half] = words[half] if factors[half] == factors[half] else Int32(NAN_PAIR)
        return [ptx.max_f32(scale * factor, Float32(LEAST_SCALE)) for factor in factors]

    @cute.jit
    def ask_for_norm(self, item: Any, work: Work, q: Query, out: Output) -> tuple[Any, Any]:
        """Of an item, or of the last one if there are fewer: cosine and sine of pair number `lane`, and the sums of
        squares of the thread's heads; as words."""
        item = cutlass.min(item, work.end - 1)
        angles = out.quant.angles(work.place(item)[0], own_number() & 31)
        return angles, tuple(self.squares(item, half, work, q) for half in range(2))

    @cute.jit
    def squares(self, item: Any, half: int, work: Work, q: Query) -> Any:
        """The four sums of squares of the thread's first or second head; of one that is not there, of another."""
        row, _ = work.place(item)
        head = cutlass.min(self.head(item, half, work), q.heads - 1)
        return ptx.load_global_128_in_order(q.squares + Int64(row) * q.squares_row + Int64(head) * 16)

    def factor(self, squares: Any, eps: Any) -> Any:
        """1 / rms of a head."""
        first, second, third, fourth = (word.bitcast(Float32) for word in squares)
        return inverse_rms(ptx.add_rn(ptx.add_rn(first, second), ptx.add_rn(third, fourth)), eps)

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
        """Start scores = Q K^T of a tile, and publish what is waiting.

        part      the thread's of the product of queries in shared memory
        tile      (stage, phase)
        is_first  whether it is the item's first
        waiting   number of the tile before, and whether it is public
        layouts   of a tile, and of the queries that stay in shared memory
        """
        k_layout, kept_layout = layouts
        # no proxy fence for what cp.async has brought, here and in the backs: other kernels that multiply such rows
        # have none either, and tests that repeat calls stand guard; fences cost 2%
        keys = self.keys(qk, part, tile, k_layout, at)
        steps = [slab * (SLAB // STEP) + i for slab in q.slabs for i in range(SLAB // STEP)]
        kept = qk[2].make_fragment_A(part.partition_A(uniform_tile(at.kept, kept_layout, self.dtype)))
        warpgroup.fence()
        for step in range_constexpr(self.held // STEP):
            chosen = qk[0] if const_expr(step == 0) else qk[1]
            cute.gemm(chosen, scores, held[None, None, step], keys[None, None, steps[step]], scores)
        for step in range_constexpr((HEAD_DIM - self.held) // STEP):
            some = keys[None, None, steps[self.held // STEP + step]]
            cute.gemm(qk[2], scores, kept[None, None, step], some, scores)
        warpgroup.commit_group()
        if waiting[1] == 0:
            self.publish(waiting[0], ready)

    def keys(self, qk: Any, part: Any, tile: Any, k_layout: cute.ComposedLayout, at: Places) -> Any:
        rows = uniform_tile(at.stages + tile[0] * STAGE_BYTES, k_layout, self.dtype)
        return qk[2].make_fragment_B(part.partition_B(rows))

    def reduce(self, scores: Any, half: int, combine: Any) -> Any:
        """Of the thread's scores of one of its heads."""
        own = [scores[i] for i in range(OWN_SCORES) if i // 2 % 2 == half]
        return pairwise(own, combine)


def own_number() -> Any:
    """The thread's number in the warpgroup, computed anew: the loop over tiles has no register to spare."""
    return ptx.thread_again() & 127
