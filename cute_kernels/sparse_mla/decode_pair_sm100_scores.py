"""Scores of Blackwell's decode kernel for pairs of blocks: those of one block, whose scores come in two parts.

A lane of tensor memory has half of its head's Q, and of all scores what comes of these columns. A thread gives away
those of half of the keys and gets the other part of those it keeps.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla import decode_pair_sm100_plan
from cute_kernels.sparse_mla.decode_pair_sm100_plan import (
    Q_COLUMN,
    Q_COLUMNS,
    S_COLUMN,
    S_COLUMNS,
    SIDE,
    SLABS,
    PairBarriers,
    places,
    trade_offset,
)
from cute_kernels.sparse_mla.decode_sm100_plan import HEADS, PAIR_THREADS, SLAB, Places, chunk_offset
from cute_kernels.sparse_mla.decode_sm100_scores import CHUNKS, Scores
from cute_kernels.sparse_mla.params import Query, TileScheduler

KEPT = S_COLUMNS // 2
FOUR = PAIR_THREADS * 16
"""Bytes from four scores of a thread to the next four."""


class PairScores(Scores):
    plan = decode_pair_sm100_plan

    def load_scores(self, buffer: Any, thread: Any, lanes: Any, at: Places) -> tuple[Any, ...]:
        """The place is free: of the tile before the other warp has used what it got, before it told its maxima."""
        first = lanes + S_COLUMN + buffer * S_COLUMNS
        pair, half, lane = thread // 32 % 2, thread // HEADS, thread % 32
        given = ptx.load_tensor_memory(first + (half ^ 1) * KEPT, KEPT)
        given_at = at.q + trade_offset(pair, half, lane)
        for i in range(0, KEPT, 4):
            words = [value.bitcast(Int32) for value in given[i : i + 4]]
            ptx.store_shared_128(given_at + i // 4 * FOUR, words)
        kept = ptx.load_tensor_memory(first + half * KEPT, KEPT)
        self.meet(thread)
        others_at = at.q + trade_offset(pair, half ^ 1, lane)
        got = [word for i in range(0, KEPT, 4) for word in ptx.load_shared_128(others_at, offset=i // 4 * FOUR)]
        return tuple(mine + word.bitcast(Float32) for mine, word in zip(kept, got, strict=True))

    @cute.jit
    def load_queries(
        self, item: Any, thread: Any, lanes: Any, items: TileScheduler, queries: Query, ready: PairBarriers, at: Places
    ) -> None:
        """Store half of an item's Q, that of the thread's head in its lane of tensor memory, by way of the place where
        warps trade. Of heads beyond the last, the last one's."""
        if item < items.end:
            # found out again: during tiles there is no register for them
            thread, at = ptx.thread_again(), places(ptx.again(at.v))
            batch, token, _, head_block = items.coords(item)
            lane, half = thread % 32, thread // HEADS
            first = head_block * HEADS + thread % HEADS // 32 * 32
            row = queries.at(batch, token, first) + Int64(half * (SIDE * 2) + thread % CHUNKS * 16)
            last = queries.heads - 1 - first
            # the other warp has its half of their place
            slab_at = at.q + thread // 32 % 2 * decode_pair_sm100_plan.TRADE_BYTES + half * (32 * SLAB * 2)
            lines = [slab_at + chunk_offset(4 * i + lane // CHUNKS, lane % CHUNKS) for i in range(2)]
            ahead = cute.make_rmem_tensor((4 * CHUNKS,), Int32)
            self.load_slab(ahead, row, thread, last, queries)
            for slab in cutlass.range(SLABS, unroll=1):
                for i in range_constexpr(CHUNKS):
                    words = [ahead[4 * i + word] for word in range(4)]
                    ptx.store_shared_128(lines[i % 2] + i // 2 * (8 * SLAB * 2), words)
                if slab < SLABS - 1:
                    row = row + SLAB * 2
                    self.load_slab(ahead, row, thread, last, queries)
                cute.arch.sync_warp()
                self.move_slab(slab_at, lane, lanes + Q_COLUMN + slab * Q_COLUMNS)
                cute.arch.sync_warp()
            # scores come to both halves only when all warps' queries are there
            ptx.wait_tensor_stores()
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread % 32 == 0:
                ready.arrive(ready.queries)
