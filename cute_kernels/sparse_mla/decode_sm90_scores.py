"""The middle of Hopper's decode kernel: the queries of an item, Q K^T of a tile, and softmax.

Each block of a pair multiplies the columns it has. Of every 16 heads it finds the weights of 8: it sends the other
block its part of the scores of the other 8, adds what it gets of its own 8, and sends the weights. A warp has 16 heads,
as tensor cores give them: a thread then has 16 keys of one head.

Two warpgroups take tiles in turn, and hand the running maxima and sums to each other, warp by warp. Maxima move only
when a head's outgrow theirs by 2^8: sums and O are relative to them, and until they move no thread asks what the
others' are.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.sparse_mla.decode_sm90_plan import (
    END,
    FIRST,
    HALF,
    HEADING,
    HEADINGS,
    HEADS_BIT,
    KEYS,
    LABEL,
    LAST,
    NOTE,
    ODD,
    P_BUFFERS,
    P_BYTES,
    PARTIAL_BYTES,
    ROWS,
    SCORES_BARRIER,
    SIDE,
    SLAB,
    STAGES,
    TURNS,
    WORDS_BYTES,
    Barriers,
    Output,
    Places,
    Query,
    Work,
    busy_warps,
)
from cute_kernels.sparse_mla.softmax import GROWTH, LEAST, share

ROW_BYTES = SLAB * 2
"""Of a slab's row."""

HELD = HALF * KEYS // 32
"""Scores of a tile that a thread finds weights for: of every 8 keys, two."""


class Scores:
    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.warps = busy_warps(heads)

    @cute.jit
    def run(
        self,
        thread: Any,
        number: Any,
        rank: Any,
        work: Work,
        q: Query,
        out: Output,
        sink: Any,
        scale_log2: Any,
        ready: Barriers,
        qk: cute.TiledMma,
        qk_more: cute.TiledMma,
        q_tile: cute.Tensor,
        k_tile: cute.Tensor,
        at: Places,
    ) -> None:
        """Give away the weights of every second tile, from `number` on. By a warpgroup."""
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        part = qk.get_slice(thread)
        q_parts = qk.make_fragment_A(part.partition_A(q_tile))
        k_parts = qk.make_fragment_B(part.partition_B(k_tile))
        sums = cute.make_rmem_tensor(part.partition_shape_C((ROWS, KEYS)), Float32)
        scores = cute.make_rmem_tensor((HELD,), Float32)
        if number == 0:
            batch, token, _, head_block = work.place(work.first)
            first = head_block * self.heads
            queries = q.of(batch, token, first) + rank * (SIDE * 2)
            self.ask_for_q(queries, cutlass.min(q.heads - first, self.heads), warp, lane, q, ready, at)
        tile = number
        mark, item, low, high = self.heading(tile, ready, at)
        while mark & END == 0:
            if mark & FIRST != 0 and tile > 0:
                # the queries before have served: all warps are past their products
                ptx.wait_mbarrier((ready.products + warp).toint(), Int32(0) if mark & ODD != 0 else Int32(1))
                cute.arch.barrier(barrier_id=SCORES_BARRIER + number, number_of_threads=128)
                self.ask_for_q(ptx.pair(low, high), mark >> HEADS_BIT, warp, lane, q, ready, at)
            ptx.wait_mbarrier(ready.queries.toint(), Int32(1) if mark & ODD != 0 else Int32(0))
            self.multiply(qk, qk_more, sums, q_parts, k_parts, tile % STAGES)
            is_used_up = mark & LAST != 0 and item + work.step < work.end
            self.send(sums, scores, tile, is_used_up, thread, warp, rank, ready, at)
            self.softmax(scores, tile, mark, item, thread, rank, work, out, sink, scale_log2, ready, at)
            tile = tile + TURNS
            mark, item, low, high = self.heading(tile, ready, at)

    @cute.jit
    def heading(self, tile: Any, ready: Barriers, at: Places) -> Any:
        """A tile's heading, once the tile is there."""
        ready.stages.wait_full(tile % STAGES, tile // STAGES & 1)
        return ptx.load_shared_128(at.heading + tile % HEADINGS * HEADING)

    @cute.jit
    def multiply(
        self, qk: cute.TiledMma, qk_more: cute.TiledMma, sums: Any, q_parts: Any, k_parts: Any, stage: Any
    ) -> None:
        """Start sums = Q K^T of this block's columns."""
        # of what a front stored in the ordinary way
        cute.arch.fence_view_async_shared()
        warpgroup.fence()
        for step in range_constexpr(SIDE // 16):
            chosen = qk if const_expr(step == 0) else qk_more
            cute.gemm(chosen, sums, q_parts[None, None, step], k_parts[None, None, step, stage], sums)
        warpgroup.commit_group()

    @cute.jit
    def send(
        self,
        sums: Any,
        scores: Any,
        tile: Any,
        is_used_up: Any,
        thread: Any,
        warp: Any,
        rank: Any,
        ready: Barriers,
        at: Places,
    ) -> None:
        """Once a tile's sums are there keep those of this block's heads, and send the other block those of its own.

        is_used_up   the item's queries are, and there is an item behind it
        """
        warpgroup.wait_group(0)
        if is_used_up and thread % 32 == 0:
            cute.arch.mbarrier_arrive(ready.products + warp)
        buffer = tile % TURNS
        barrier = ready.partials + buffer
        # where it goes the other block's back has found weights
        ready.weights.wait_empty(tile % P_BUFFERS, tile // P_BUFFERS & 1)
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.warps * 32 * HELD * 4)
        if warp < self.warps:
            target = ptx.map_shared(at.partial + buffer * PARTIAL_BYTES + thread * 16, rank ^ 1)
            counter = ptx.map_shared(barrier.toint(), rank ^ 1)
            for i in range_constexpr(HELD // 4):
                words = []
                for j in range_constexpr(4):
                    first, second = (sums[8 * i + 4 * (j // 2) + 2 * half + j % 2] for half in range(2))
                    scores[4 * i + j] = first if rank == 0 else second
                    words.append((second if rank == 0 else first).bitcast(Int32))
                ptx.store_remote_128(target + i * WORDS_BYTES, words, counter)

    @cute.jit
    def softmax(
        self,
        scores: Any,
        tile: Any,
        mark: Any,
        item: Any,
        thread: Any,
        rank: Any,
        work: Work,
        out: Output,
        sink: Any,
        scale_log2: Any,
        ready: Barriers,
        at: Places,
    ) -> None:
        """Give both backs a tile's weights of this block's heads."""
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        buffer = tile % P_BUFFERS
        full = ready.weights.full(buffer)
        if warp < self.warps:
            logit, lse_at = Int32(0), Int64(0)
            if mark & LAST != 0:
                logit, lse_at = self.prepare(item, buffer, thread, warp, rank, work, out, sink, at)
            self.add(scores, tile, thread, scale_log2, ready, at)
            top, factor = self.follow(scores, tile, mark, thread, warp, ready, at)
            for i in range_constexpr(HELD):
                scores[i] = ptx.exp2(scores[i] - top)
            amount = self.total(scores, tile, mark, factor, thread, warp, ready, at)
            last = Float32(0.0)
            if mark & LAST != 0:
                amount = over_quad(amount, operator.add)
                last = share(amount, top, logit, sink)
            counter = ptx.map_shared(full.toint(), rank ^ 1)
            own_at = at.partial + tile % TURNS * PARTIAL_BYTES + thread * 16
            other_at = ptx.map_shared(at.p + buffer * P_BYTES + thread * 16, rank ^ 1)
            for i in range_constexpr(2):
                words = [ptx.bf16x2(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]) for j in range(4)]
                ptx.store_remote_128(other_at + i * WORDS_BYTES, words, counter)
                ptx.store_shared_128(own_at + i * WORDS_BYTES, words)
            if lane % 4 == 0:
                note_at = at.note + ((buffer * 2 + rank) * (ROWS // 2) + warp * HALF + lane // 4) * NOTE
                # there is nothing before an item's first tile
                note = [(Float32(1.0) if mark & FIRST != 0 else factor).bitcast(Int32), last.bitcast(Int32)]
                ptx.store_remote_64(ptx.map_shared(note_at, rank ^ 1), note, counter)
                ptx.store_shared_64(note_at, *note)
            if lse_at != 0:
                lse = (top + ptx.log2(amount)) * Float32(ptx.LN_2)
                lse = Float32(Float32.inf) if amount == Float32(0.0) else lse
                ptx.store_global_s32(lse_at, lse.bitcast(Int32))
            cute.arch.sync_warp()
        else:
            # nor do warps without heads run ahead of the others
            self.wait_turn(ready.tops + warp, tile)
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(ready.tops + warp)
        if thread == 0:
            ptx.store_shared_s32(at.label + buffer * LABEL, mark)
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.warps * (P_BYTES // 4 + HALF * NOTE))
        elif lane == 0:
            cute.arch.mbarrier_arrive(full)

    def wait_turn(self, turn: Any, tile: Any) -> None:
        """Until the tile before has had its turn."""
        ptx.wait_mbarrier(turn.toint(), (tile & 1) ^ 1)

    @cute.jit
    def add(
        self,
        scores: Any,
        tile: Any,
        thread: Any,
        scale_log2: Any,
        ready: Barriers,
        at: Places,
    ) -> None:
        """Both blocks' parts make the scores, in powers of two."""
        buffer = tile % TURNS
        ptx.wait_mbarrier((ready.partials + buffer).toint(), tile // TURNS & 1)
        for i in range_constexpr(HELD // 4):
            words = ptx.load_shared_128(at.partial + buffer * PARTIAL_BYTES + thread * 16 + i * WORDS_BYTES)
            for j in range_constexpr(4):
                scores[4 * i + j] = (scores[4 * i + j] + words[j].bitcast(Float32)) * scale_log2
        skipped = ptx.load_shared_128(at.heading + tile % HEADINGS * HEADING + 16)
        if ((skipped[0] | skipped[1] | skipped[2] | skipped[3]) & 0xFFFF) != 0:
            for i in range_constexpr(HELD):
                bit = (skipped[i // 4] >> (thread % 4 * 2)) & (1 << (i // 2 % 2 * 8 + i % 2))
                scores[i] = Float32(-Float32.inf) if bit != 0 else scores[i]

    @cute.jit
    def follow(
        self, scores: Any, tile: Any, mark: Any, thread: Any, warp: Any, ready: Barriers, at: Places
    ) -> tuple[Any, Any]:
        """The running maximum of the thread's head, and what to multiply with what is relative to the last one."""
        lane = thread % 32
        largest = pairwise([scores[i] for i in range(HELD)], ptx.max_f32)
        top_at = at.top + (warp * HALF + lane // 4) * 4
        turn = ready.tops + warp
        self.wait_turn(turn, tile)
        top = ptx.load_shared_f32(top_at)
        top = Float32(LEAST) if mark & FIRST != 0 else top
        factor = Float32(1.0)
        if mark & FIRST != 0 or cute.arch.vote_any_sync(largest - top > GROWTH):
            largest = over_quad(largest, ptx.max_f32)
            moved = largest if largest - top > Float32(GROWTH) else top
            factor = ptx.exp2(top - moved)
            top = moved
            if lane % 4 == 0:
                ptx.store_shared_f32(top_at, top)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(turn)
        return top, factor

    @cute.jit
    def total(
        self, weights: Any, tile: Any, mark: Any, factor: Any, thread: Any, warp: Any, ready: Barriers, at: Places
    ) -> Any:
        """The running sum of the thread's keys."""
        own = pairwise([weights[i] for i in range(HELD)], operator.add)
        amount_at = at.amount + thread * 4
        turn = ready.amounts + warp
        self.wait_turn(turn, tile)
        before = ptx.load_shared_f32(amount_at)
        own = own if mark & FIRST != 0 else own + before * factor
        ptx.store_shared_f32(amount_at, own)
        cute.arch.sync_warp()
        if thread % 32 == 0:
            cute.arch.mbarrier_arrive(turn)
        return own

    @cute.jit
    def prepare(
        self,
        item: Any,
        buffer: Any,
        thread: Any,
        warp: Any,
        rank: Any,
        work: Work,
        out: Output,
        sink: Any,
        at: Places,
    ) -> tuple[Any, Any]:
        """Of an item's last tile: the sink's logit of the thread's head, and the address of its log-sum-exp if the
        thread stores it, else 0. Labels the tile with where rows of O belong."""
        lane = thread % 32
        batch, token, piece, head_block = work.place(item)
        first = head_block * self.heads
        head = warp * 16 + rank * HALF + lane // 4
        heads = cutlass.min(out.heads - first, self.heads)
        logit, lse_at = Int32(0), Int64(0)
        if sink != 0:
            logit = ptx.load_global_s32_where(head < heads, sink + Int64(first + head) * 4)
        if lane % 4 == 0 and head < heads and out.lse.base != 0:
            lse_at = out.lse.of(piece, batch, first + head, token)
        if thread == 0:
            if const_expr(out.quant is not None):
                row = batch * work.tokens.divisor + token
                ptx.store_shared_128(at.label + buffer * LABEL, (Int32(0), heads, row, first))
            else:
                rows = out.base + Int64(piece) * out.strides[0] + Int64(batch) * out.strides[1]
                rows = rows + Int64(token) * out.strides[2] + Int64(first) * out.strides[3]
                ptx.store_shared_128(at.label + buffer * LABEL, (Int32(0), heads, *ptx.halves(rows)))
        return logit, lse_at

    @cute.jit
    def ask_for_q(self, queries: Any, heads: Any, warp: Any, lane: Any, q: Query, ready: Barriers, at: Places) -> None:
        """Start to copy an item's queries. A warp does a slab, 4 heads at a time."""
        for number in cutlass.range(self.warps * 4, unroll=4):
            head = number * 4 + lane // 8
            source = queries + Int64(cutlass.min(head, heads - 1)) * q.head + warp * ROW_BYTES
            target = at.q + (warp * ROWS + head) * ROW_BYTES
            ptx.copy_async_128_once(target + ((lane % 8) ^ (head % 8)) * 16, source + lane % 8 * 16)
        cute.arch.cp_async_mbarrier_arrive_noinc(ready.queries)
