"""The middle of Blackwell's decode kernel: the queries of an item, softmax of a tile, and the results of an item.

A thread has a head, thread % 64, and half of a tile's keys: 32 scores in its lane of tensor memory. The two warps that
share heads ask each other once a tile whether a maximum has to move. It does only when a head's scores outgrow it by
2^8, and then both, the sums and O follow. What a head's maximum is does not depend on other heads.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.sparse_mla import decode_sm100_plan
from cute_kernels.sparse_mla.decode_sm100_back import Back
from cute_kernels.sparse_mla.decode_sm100_plan import (
    BUFFERS,
    END,
    FIRST,
    HEADING,
    HEADS,
    LAST,
    PAIR_BARRIER,
    PAIR_THREADS,
    Q_COLUMN,
    Q_COLUMNS,
    Q_SLABS,
    S_COLUMN,
    S_COLUMNS,
    SLAB,
    SLAB_BYTES,
    SLABS,
    Barriers,
    Places,
    chunk_offset,
    places,
)
from cute_kernels.sparse_mla.params import Output, Query, TileScheduler
from cute_kernels.sparse_mla.softmax import GROWTH, LEAST


def maximum(values: list[Any]) -> Any:
    """Of numbers, three at a time."""
    while len(values) > 2:
        rest = len(values) // 3 * 3
        values = [ptx.max3_f32(*values[i : i + 3]) for i in range(0, rest, 3)] + values[rest:]
    return ptx.max_f32(*values)


CHUNKS = 8
"""16-byte chunks of a slab's row."""


class Scores:
    """plan: a module, that says what is where in tensor memory."""

    plan: Any = decode_sm100_plan

    def __init__(self, out_fp32: bool) -> None:
        self.back = Back(out_fp32, self.plan)

    @cute.jit
    def run(
        self,
        thread: Any,
        items: TileScheduler,
        queries: Query,
        out: Output,
        scale_log2: Any,
        ready: Barriers,
        at: Places,
    ) -> None:
        """Give away the weights of every tile, and store results. By a warpgroup."""
        lanes = cute.arch.make_warp_uniform(thread // 32) << 21
        scores = cute.make_rmem_tensor((S_COLUMNS,), Float32)
        self.load_queries(items.first, thread, lanes, items, queries, ready, at)
        top, amount = Float32(LEAST), Float32(0.0)
        tile = Int32(0)
        mark, item, there = self.heading(tile, thread, ready, at)
        while mark & END == 0:
            buffer = tile % BUFFERS
            ptx.wait_mbarrier((ready.sums + buffer).toint(), tile // BUFFERS & 1)
            ptx.fence_tensor_after()
            found = self.load_scores(buffer, thread, lanes, at)
            for i in range_constexpr(S_COLUMNS):
                scores[i] = found[i] * scale_log2
            if there != -1:
                for i in range_constexpr(S_COLUMNS):
                    scores[i] = scores[i] if (there >> i) & 1 != 0 else Float32(-Float32.inf)
            if mark & FIRST != 0:
                top, amount = Float32(LEAST), Float32(0.0)
            top, amount = self.follow(scores, top, amount, tile, mark, thread, lanes, ready, at)
            amount = amount + self.weigh(scores, top, buffer, thread, at)
            cute.arch.fence_view_async_shared()
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread % 32 == 0:
                ready.arrive(ready.weights + buffer)
                cute.arch.mbarrier_arrive(ready.headings.empty(tile % ready.headings.stages))
            if mark & LAST != 0:
                # all products with the item's queries are done: the next one's come while P V is under way
                self.load_queries(item + items.step, thread, lanes, items, queries, ready, at)
                self.finish(item, top, amount, tile, thread, lanes, items, out, ready, at)
            tile = tile + 1
            mark, item, there = self.heading(tile, thread, ready, at)

    @cute.jit
    def heading(self, tile: Any, thread: Any, ready: Barriers, at: Places) -> tuple[Any, Any, Any]:
        """A tile's marks, its item, and which of the thread's keys are there; once it has been told of."""
        slots = ready.headings.stages
        slot = tile % slots
        ready.headings.wait_full(slot, tile // slots & 1)
        mark, item, low, high = ptx.load_shared_128(at.heading + slot * HEADING)
        return mark, item, low if thread < HEADS else high

    def load_scores(self, buffer: Any, thread: Any, lanes: Any, at: Places) -> tuple[Any, ...]:
        """The thread's scores."""
        return ptx.load_tensor_memory(lanes + S_COLUMN + buffer * S_COLUMNS, S_COLUMNS)

    @cute.jit
    def follow(
        self,
        scores: Any,
        top: Any,
        amount: Any,
        tile: Any,
        mark: Any,
        thread: Any,
        lanes: Any,
        ready: Barriers,
        at: Places,
    ) -> tuple[Any, Any]:
        """The running maximum of the thread's head, and its running sum relative to it."""
        largest = maximum([scores[i] for i in range(S_COLUMNS)])
        pair = PAIR_BARRIER + thread // 32 % 2
        if ptx.any_of_group(pair, PAIR_THREADS, largest - top > Float32(GROWTH)) != 0:
            largest = ptx.max_f32(largest, self.others(largest, 0, thread, at))
            moved = largest if largest - top > Float32(GROWTH) else top
            factor = ptx.exp2(top - moved)
            top = moved
            amount = amount * factor
            if mark & FIRST == 0:
                self.wait_values(tile - 1, ready)
                self.back.rescale(lanes, factor)
        return top, amount

    @cute.jit
    def weigh(self, scores: Any, top: Any, buffer: Any, thread: Any, at: Places) -> Any:
        """Store the thread's weights; their sum.

        The buffer is free: S of this tile is done, and so P V of the tile two before, which had been started.
        """
        for i in range_constexpr(S_COLUMNS):
            scores[i] = ptx.exp2(scores[i] - top)
        # of the four chunks the first: the others differ from it in two bits of their number
        first_at = at.p + buffer * SLAB_BYTES + chunk_offset(thread % HEADS, thread // HEADS * (CHUNKS // 2))
        for chunk in range_constexpr(CHUNKS // 2):
            words = [ptx.bf16x2(scores[i], scores[i + 1]) for i in range(8 * chunk, 8 * chunk + 8, 2)]
            ptx.store_shared_128(first_at ^ (16 * chunk), words)
        return pairwise([scores[i] for i in range(S_COLUMNS)], operator.add)

    @cute.jit
    def finish(
        self,
        item: Any,
        top: Any,
        amount: Any,
        tile: Any,
        thread: Any,
        lanes: Any,
        items: TileScheduler,
        out: Output,
        ready: Barriers,
        at: Places,
    ) -> None:
        """Store an item's results."""
        whole = amount + self.others(amount, 1, thread, at)
        thread = ptx.thread_again()
        batch, token, part, head_block = items.coords(item)
        first = head_block * HEADS + thread % HEADS // 32 * 32
        lane, half = thread % 32, thread // HEADS
        factor = self.back.close((part, batch, token, first + lane), half == 0, top, whole, out)
        self.wait_values(tile, ready)
        # of both buffers of P, which have served, the rows that no other warps write
        rows_at = at.p + half * SLAB_BYTES + thread % HEADS // 32 * (SLAB_BYTES // 2)
        # before products overwrite O, this warp says that it has stored weights, and fences
        self.back.store((part, batch, token, first), factor, lane, half, lanes, rows_at, out)

    @cute.jit
    def others(self, value: Any, which: int, thread: Any, at: Places) -> Any:
        """The value of the thread that has the other keys of this one's head."""
        values_at = at.exchange + which * (2 * HEADS * 4)
        ptx.store_shared_f32(values_at + thread * 4, value)
        self.meet(thread)
        return ptx.load_shared_f32(values_at + (thread ^ HEADS) * 4)

    @cute.jit
    def wait_values(self, tile: Any, ready: Barriers) -> None:
        """Until P V of a tile is done. Of no later one: that waits for this thread's weights."""
        stages = ready.stages.stages
        ptx.wait_mbarrier(ready.stages.empty(tile % stages).toint(), tile // stages & 1)
        ptx.fence_tensor_after()

    @cute.jit
    def load_queries(
        self, item: Any, thread: Any, lanes: Any, items: TileScheduler, queries: Query, ready: Barriers, at: Places
    ) -> None:
        """Store an item's Q: its first slabs in the thread's lane of tensor memory, the last two in shared memory, and
        on the way there whole lines of all. Of heads beyond the last, the last one's.

        The two warps that share heads load a slab each.
        """
        if item < items.end:
            # found out again: during tiles there is no register for them
            thread, at = ptx.thread_again(), places(ptx.again(at.v))
            batch, token, _, head_block = items.coords(item)
            pair, side = thread % HEADS // 32 * 32, thread // HEADS
            first = head_block * HEADS + pair
            row = queries.at(batch, token, first) + Int64(side * (SLAB * 2) + thread % CHUNKS * 16)
            last = queries.heads - 1 - first
            # of every eight rows of a slab, the chunks of two lie differently
            lines = [chunk_offset(pair + 4 * i + thread % 32 // CHUNKS, thread % CHUNKS) for i in range(2)]
            ahead = cute.make_rmem_tensor((4 * CHUNKS,), Int32)
            self.load_slab(ahead, row, thread, last, queries)
            for slab in cutlass.range(0, SLABS, 2, unroll=1):
                for i in range_constexpr(CHUNKS):
                    place = at.q + side * SLAB_BYTES + lines[i % 2] + i // 2 * (8 * SLAB * 2)
                    ptx.store_shared_128(place, [ahead[4 * i + word] for word in range(4)])
                if slab < Q_SLABS:
                    row = row + 2 * (SLAB * 2)
                    self.load_slab(ahead, row, thread, last, queries)
                    self.meet(thread)
                    for i in range_constexpr(2):
                        self.move_slab(at.q + i * SLAB_BYTES, thread, lanes + Q_COLUMN + (slab + i) * Q_COLUMNS)
                    self.meet(thread)
            ptx.wait_tensor_stores()
            cute.arch.fence_view_async_shared()
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread % 32 == 0:
                ready.arrive(ready.queries)

    def load_slab(self, words: Any, row: Any, thread: Any, last: Any, queries: Query) -> None:
        """Chunks of a slab of 32 heads: every fourth head's, of those up to `last`. row: the first one's chunk."""
        for i in range(CHUNKS):
            head = cutlass.min(4 * i + thread % 32 // CHUNKS, last)
            for word, found in enumerate(ptx.load_global_128_again(row + Int64(head) * queries.head)):
                words[4 * i + word] = found

    def move_slab(self, slab_at: Any, thread: Any, column: Any) -> None:
        """The thread's head's row of a slab to tensor memory, 16 columns at a time, as registers are scarce."""
        for half in range(2):
            row_at = slab_at + ptx.again(chunk_offset(thread % HEADS, 0))
            chunks = [row_at ^ (16 * chunk) for chunk in range(4 * half, 4 * half + 4)]
            words = [word for chunk_at in chunks for word in ptx.load_shared_128_in_order(chunk_at)]
            ptx.store_tensor_memory(column + Q_COLUMNS // 2 * half, words)

    def meet(self, thread: Any) -> None:
        """Wait for the other warp that has the thread's head."""
        cute.arch.barrier(barrier_id=PAIR_BARRIER + thread // 32 % 2, number_of_threads=PAIR_THREADS)
