"""The back of Hopper's decode kernel: softmax, O += P V, and the results of an item.

Two warpgroups do the softmax of a tile together, a thread for heads / 4 keys of one head, and then multiply P, which
lies in shared memory, with 256 columns of V each. Maxima are running ones that move only when a head's outgrow
theirs by 2^8: sums and O are relative to them, and until they move nobody asks what the others' are.

Products have 64 rows whatever the heads. Fewer heads leave rows of P that are zero and rows of O that nobody stores;
the tensor cores' time for them is there, since the front takes longer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import ptx
from cute_kernels.dsl.ptx import again
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.sparse_mla.decode_sm90_plan import (
    BACK_BARRIER,
    BACK_THREADS,
    DIM,
    FIRST_BACK_THREAD,
    KEYS,
    LAST,
    LEAST,
    ROWS,
    SKIPS,
    SLAB,
    STAGES,
    Output,
    Places,
    Rings,
    Work,
    score_pitch,
    sum_parts,
)

GROWTH = 8.0
"""By how much, in powers of two, scores may exceed their running maximum."""

SIDE = DIM // 2
"""Columns of O of a warpgroup."""


class Back:
    def __init__(self, heads: int, out_fp32: bool) -> None:
        self.heads, self.out_fp32 = heads, out_fp32
        self.keys = heads // 4
        self.pitch = score_pitch(heads) * 4
        self.parts = sum_parts(heads)

    @cute.jit
    def run(
        self,
        thread: Any,
        work: Work,
        rings: Rings,
        pv: cute.TiledMma,
        p_tile: cute.Tensor,
        v_tile: cute.Tensor,
        out: Output,
        sink: Any,
        scale_log2: Any,
        at: Places,
    ) -> None:
        side = cute.arch.make_warp_uniform(thread // 128)
        lane = thread % 32
        part = pv.get_slice(thread % 128)
        transposed = cute.composition(v_tile, cute.make_layout((DIM, KEYS, STAGES), stride=(KEYS, 1, DIM * KEYS)))
        p_parts = pv.make_fragment_A(part.partition_A(p_tile))
        v_parts = pv.make_fragment_B(part.partition_B(cute.local_tile(transposed, (SIDE, KEYS, STAGES), (side, 0, 0))))
        total = cute.make_rmem_tensor(part.partition_shape_C((ROWS, SIDE)), Float32)
        scores = cute.make_rmem_tensor((self.keys,), Float32)
        head, group = thread % self.heads, thread // self.heads
        scores_at = at.scores + group * self.keys * self.pitch + head * 4
        if const_expr(self.heads < ROWS):
            for i in range_constexpr(2):
                ptx.store_shared_128(at.p + thread * 32 + 16 * i, [Int32(0)] * 4)
        tile = Int32(0)
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            total.fill(0.0)
            top, amount, mark, _ = self.softmax(
                scores, scores_at, tile, Float32(LEAST), Float32(0.0), scale_log2, lane, rings, at
            )
            self.store_weights(scores, at)
            while mark & LAST == 0:
                self.meet()
                self.multiply(pv, total, p_parts, v_parts, tile % STAGES)
                warpgroup.wait_group(0)
                self.let_go(rings, tile % STAGES, lane)
                tile = tile + 1
                # in it all warps wait for each other: they are done with P
                top, amount, mark, grows = self.softmax(
                    scores, scores_at, tile, top, amount, scale_log2, lane, rings, at
                )
                if grows != 0:
                    self.rescale(total, at)
                self.store_weights(scores, at)
            self.meet()
            self.multiply(pv, total, p_parts, v_parts, tile % STAGES)
            warpgroup.wait_group(0)
            self.let_go(rings, tile % STAGES, lane)
            tile = tile + 1
            self.weigh(item, work, amount, top, out, sink, at)
            self.store(item, work, total, out, at)

    def meet(self) -> None:
        """The warps of the back wait for each other, and tensor cores may read what all of them, and the front, stored
        in the ordinary way."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=BACK_THREADS)

    @cute.jit
    def multiply(self, pv: cute.TiledMma, total: Any, p_parts: Any, v_parts: Any, stage: Any) -> None:
        """Start total += P V."""
        warpgroup.fence()
        for step in range_constexpr(KEYS // 16):
            cute.gemm(pv, total, p_parts[None, None, step], v_parts[None, None, step, stage], total)
        warpgroup.commit_group()

    @cute.jit
    def let_go(self, rings: Rings, stage: Any, lane: Any) -> None:
        if lane == 0:
            cute.arch.mbarrier_arrive(rings.stages.empty(stage))

    @cute.jit
    def softmax(
        self,
        scores: Any,
        scores_at: Any,
        tile: Any,
        top: Any,
        amount: Any,
        scale_log2: Any,
        lane: Any,
        rings: Rings,
        at: Places,
    ) -> tuple[Any, Any, Any, Any]:
        """The thread's weights of the next tile, in `scores`: its running maximum and sum, the tile's mark, and whether
        a maximum has moved, and O is to follow."""
        rings.scores.wait_full(Int32(0), tile & 1)
        mark = self.read_scores(scores, scores_at, scale_log2, at)
        largest = pairwise([scores[i] for i in range(self.keys)], ptx.max_f32)
        grows = ptx.any_of_group(BACK_BARRIER, BACK_THREADS, largest - top > GROWTH)
        if lane == 0:
            cute.arch.mbarrier_arrive(rings.scores.empty(Int32(0)))
        if grows != 0:
            top, amount = self.grow(largest, top, amount, at)
        amount = amount + self.weights(scores, top)
        return top, amount, mark, grows

    @cute.jit
    def read_scores(self, scores: Any, scores_at: Any, scale_log2: Any, at: Places) -> Any:
        """The thread's scores in powers of two; the tile's mark."""
        marks = ptx.load_shared_128(at.mark)
        for i in range_constexpr(self.keys):
            scores[i] = ptx.load_shared_f32(scores_at + i * self.pitch)
        mark = marks[0] | marks[1] | marks[2] | marks[3]
        if mark & SKIPS != 0:
            # -inf times a scale that is not positive would count
            for i in range_constexpr(self.keys):
                is_skipped = scores[i] == Float32(-Float32.inf)
                scores[i] = scores[i] if is_skipped else scores[i] * scale_log2
        else:
            for i in range_constexpr(self.keys):
                scores[i] = scores[i] * scale_log2
        return mark

    @cute.jit
    def weights(self, scores: Any, top: Any) -> Any:
        """scores become P; their sum."""
        for i in range_constexpr(self.keys):
            scores[i] = ptx.exp2(scores[i] - top)
        return pairwise([scores[i] for i in range(self.keys)], operator.add)

    @cute.jit
    def store_weights(self, weights: Any, at: Places) -> None:
        """P in bf16: heads / 4 neighbouring keys of a head."""
        thread = own_number()
        head, byte = thread % self.heads, thread // self.heads * (self.keys * 2)
        p_at = at.p + head * 128 + (((byte // 16) ^ (head % 8)) << 4) + byte % 16
        words = [ptx.bf16x2(weights[2 * i], weights[2 * i + 1]) for i in range(self.keys // 2)]
        if const_expr(len(words) == 1):
            ptx.store_shared_s32(p_at, words[0])
        elif const_expr(len(words) == 2):
            ptx.store_shared_64(p_at, *words)
        else:
            for i in range_constexpr(len(words) // 4):
                ptx.store_shared_128(p_at ^ (16 * i), words[4 * i : 4 * i + 4])

    def over_lanes(self, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """Combine what the lanes of the same head have."""
        step = self.heads
        while step < 32:
            value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=step))
            step *= 2
        return value

    @cute.jit
    def grow(self, largest: Any, top: Any, amount: Any, at: Places) -> tuple[Any, Any]:
        """Move the maxima of the heads that outgrew theirs: the thread's new maximum and sum."""
        thread = own_number()
        head = thread % self.heads
        own = self.over_lanes(largest, ptx.max_f32)
        place = at.top + head * 4
        ptx.store_shared_f32(place + thread // max(self.heads, 32) * (self.heads * 4), own)
        cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=BACK_THREADS)
        for i in range_constexpr(self.parts):
            own = ptx.max_f32(own, ptx.load_shared_f32(place + i * (self.heads * 4)))
        moved = own if own - top > Float32(GROWTH) else top
        factor = ptx.exp2(top - moved)
        if thread < self.heads:
            ptx.store_shared_f32(at.rescale + head * 4, factor)
        cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=BACK_THREADS)
        return moved, amount * factor

    @cute.jit
    def rescale(self, total: Any, at: Places) -> None:
        """Have O follow the maxima that moved."""
        row = own_row(own_number())
        factors = [ptx.load_shared_f32(at.rescale + self.clamp(row + 8 * half) * 4) for half in range(2)]
        for i in range_constexpr(SIDE // 2):
            total[i] = total[i] * factors[i // 2 % 2]

    def clamp(self, row: Any) -> Any:
        """A row of O that is there."""
        return row if self.heads == ROWS else cutlass.min(row, self.heads - 1)

    @cute.jit
    def weigh(self, item: Any, work: Work, amount: Any, top: Any, out: Output, sink: Any, at: Places) -> None:
        """Store an item's log-sum-exps, and leave what to multiply rows of O with where every warp finds it."""
        thread = own_number()
        head = thread % self.heads
        amount = self.over_lanes(amount, operator.add)
        place = at.sum + head * 4
        ptx.store_shared_f32(place + thread // max(self.heads, 32) * (self.heads * 4), amount)
        cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=BACK_THREADS)
        if thread < self.heads:
            total = ptx.load_shared_f32(place)
            for i in range_constexpr(1, self.parts):
                total = total + ptx.load_shared_f32(place + i * (self.heads * 4))
            batch, token, piece, head_block = work.place(item)
            number = head_block * self.heads + head
            share = total
            if sink != 0:
                logit = ptx.load_global_s32_where(number < out.heads, sink + Int64(number) * 4).bitcast(Float32)
                share = total + ptx.exp2(logit * Float32(ptx.LOG2_E) - top)
            is_empty = total == Float32(0.0)
            factor = Float32(0.0) if is_empty else ptx.reciprocal(share)
            ptx.store_shared_f32(at.rescale + head * 4, factor)
            lse = Float32(Float32.inf) if is_empty else (top + ptx.log2(total)) * Float32(ptx.LN_2)
            if number < out.heads:
                row = ((piece * out.batches + batch) * out.heads + number) * work.tokens + token
                ptx.store_global_s32(out.lse + Int64(row) * 4, lse.bitcast(Int32))
        cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=BACK_THREADS)

    @cute.jit
    def store(self, item: Any, work: Work, total: Any, out: Output, at: Places) -> None:
        """Store an item's rows of O."""
        thread = own_number()
        side, row = cute.arch.make_warp_uniform(thread // 128), own_row(thread)
        batch, token, piece, head_block = work.place(item)
        head = head_block * self.heads + row
        size = const_expr(4 if self.out_fp32 else 2)
        member = thread % 4
        target = out.base + Int64(piece) * out.strides[0] + Int64(batch) * out.strides[1]
        target = target + Int64(token) * out.strides[2] + Int64(head) * out.strides[3]
        target = target + Int64((side * SIDE + member * 16) * size)
        for half in range_constexpr(2):
            if row + 8 * half < self.heads and head + 8 * half < out.heads:
                factor = ptx.load_shared_f32(at.rescale + (row + 8 * half) * 4)
                row_at = target + out.strides[3] * (8 * half)
                for slab in range_constexpr(SIDE // SLAB - 1):
                    self.store_slab(total, factor, slab, half, False, row_at, 8 * size)
                # where the rotary slab is; computed anew, to save registers
                thread = own_number()
                is_rope = thread >= 128
                back = thread % 4 * (8 * size) if is_rope else Int32(0)
                step = Int32(32 * size) if is_rope else Int32(8 * size)
                self.store_slab(total, factor, SIDE // SLAB - 1, half, is_rope, row_at - Int64(back), Int64(step))

    @cute.jit
    def store_slab(
        self,
        total: Any,
        factor: Any,
        slab: cutlass.Constexpr,
        half: cutlass.Constexpr,
        is_rope: Any,
        row_at: Any,
        step: Any,
    ) -> None:
        """Twice 8 neighbouring columns, `step` bytes apart."""
        size = const_expr(4 if self.out_fp32 else 2)
        for i in range_constexpr(2):
            values = []
            for chunk in range_constexpr(4 * i, 4 * i + 4, 2):
                a, b, c, d = (factor * total[32 * slab + 4 * chunk + 2 * half + place] for place in (0, 4, 1, 5))
                if const_expr(is_rope is not False):
                    b, c = (c if is_rope else b), (b if is_rope else c)
                values += [a, b, c, d]
            target = row_at + slab * (SLAB * size) + step * i
            if const_expr(self.out_fp32):
                for j in range_constexpr(2):
                    words = [value.bitcast(Int32) for value in values[4 * j : 4 * j + 4]]
                    ptx.store_global_128(target + 16 * j, words)
            else:
                words = [ptx.bf16x2(values[2 * j], values[2 * j + 1]) for j in range(4)]
                ptx.store_global_128(target, words)


def own_number() -> Any:
    """The thread's number in the back, computed anew: the loop over tiles has no register to spare."""
    return again(cute.arch.thread_idx()[0]) - FIRST_BACK_THREAD


def own_row(thread: Any) -> Any:
    """The first of the two rows of O that a thread has a share of; the other is 8 below."""
    return thread % 128 // 32 * 16 + thread % 32 // 4
