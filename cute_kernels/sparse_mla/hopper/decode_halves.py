# SPDX-License-Identifier: Apache-2.0
"""Long rows in halves, by hopper/decode.py (DecodeKey.halves), where a call has fewer work tiles than there are
clusters: what binds then is its longest row, and clusters without a row can take a part of it.

A row of `schedule.LEAST_HALVED` tiles or more is cut in two halves, each with a maximum, a sum and an O of its own.
What is summed where follows from the row's own length; who does it from the lengths of all rows:

    cluster < work tiles   has a row of its own. It does the first half, keeps it in the workspace, and does the second
                           one, too, unless it has a helper: rows get one if there is one for each row of as many tiles
                           or more, so that none is wasted on rows which would not be the last ones
    others, helpers        the r-th of them does the second half of the r-th longest row. It waits for what the first
                           half has left, so its row's cluster, which comes before it in the grid, waits for nobody

Whoever does the second half joins both ahead of P V of the row's last tile but one, where PV has time to spare, and the
place of the factor that makes results of O is still free for that of the first half's O. The running maximum moves to
that of both halves there. O of the first half comes back in a bulk copy to the stage of KV behind the last tile.

A cluster has one work tile at most, so roles have no way from one to the next: Producer.run_row. Flags of tiles, and
what is waited for:

    KEEP     a first half's last tile: softmax keeps maxima and sums, PV keeps O as bf16
    STOP     ... and the cluster's: PV publishes a mark behind all that is kept
    JOIN     a second half's last tile but one: softmax adds sums, PV adds O
    RANKED   a warp of PV: it is known whether the cluster's row has a helper          the producer waits, at KEEP
    THERE    the producer has found the mark                                           a helper's softmax waits, at JOIN
    COPIED   the bulk copy of O                                                        PV waits, at JOIN

A mark is a word of the workspace, which nobody clears ahead of a call: 64 bits that are no pair of numbers which a
kernel stores, and whoever joins halves clears it, so the next call finds none.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import bf16_high, bf16_low
from cute_kernels.dsl.reduce import over_quad
from cute_kernels.sparse_mla.hopper.decode_smem import (
    CLUSTER,
    DIM,
    EPILOGUE_BARRIER,
    FIRST_PV_THREAD,
    KV_STAGE_BYTES,
    ROWS,
    WORDS_BYTES,
    Bars,
    Smem,
    pv_thread,
)
from cute_kernels.sparse_mla.hopper.planner import lists_of, tiles_of_row
from cute_kernels.sparse_mla.params import NEG_MAX, KVSources, TileScheduler
from cute_kernels.sparse_mla.schedule import KEPT_BYTES, LEAST_HALVED, MOST_RANKED

KEEP, JOIN, STOP = 32, 64, 128
"""Flags of a tile, besides decode_smem's."""

RANKED, THERE, COPIED = 0, 1, 2
"""Of bars.q_done, of which queries have no need where there is one work tile."""

MARK = 0x7FA51DE5_FFB21E55
"""Two NaN with payloads that no arithmetic makes."""

SOFTMAX_BYTES = 8
"""Of a head: maximum and sum, fp32."""

VECTORS = ROWS * DIM // 128 // 8
"""Of 16 bytes, of O of a thread of PV in bf16."""

NUMBER_BITS = MOST_RANKED.bit_length() - 1


def first_half(tiles: Any) -> Any:
    """Tiles of a row's first half, or 0 if the row is not cut."""
    return cutlass.select_(tiles >= LEAST_HALVED, (tiles >> 1) - 1, Int32(0))


class Halves(NamedTuple):
    """What first halves leave, at an address of the workspace: KEPT_BYTES for each work tile,

    [2 CTAs][16][128 threads of PV][8] bf16 O, [2 CTAs][32 heads][maximum, sum] fp32, [2 CTAs] marks of 8 bytes
    """

    base: Any

    def o_at(self, work_tile: Any, rank: Any) -> Any:
        return self.base + Int64(work_tile) * KEPT_BYTES + rank * KV_STAGE_BYTES

    def softmax_at(self, work_tile: Any, rank: Any, head: Any) -> Any:
        """head: of those that the CTA does the softmax of"""
        return self.o_at(work_tile, 0) + CLUSTER * KV_STAGE_BYTES + (rank * (ROWS // CLUSTER) + head) * SOFTMAX_BYTES

    def _mark_at(self, work_tile: Any, rank: Any) -> Any:
        return self.softmax_at(work_tile, CLUSTER, 0) + rank * 8

    # ---- by softmax

    @cute.jit
    def keep(self, flags: Any, work_tile: Any, rank: Any, head: Any, row_max: Any, row_sum: Any) -> None:
        """Keep the maximum and the sum of a first half, whose last tile this is, of the quad's head, a lane's sum each.
        head: as of softmax_at"""
        if flags & KEEP != 0:
            row_sum = over_quad(row_sum, operator.add)
            if ptx.thread_again() % 4 == 0:
                kept_at = self.softmax_at(work_tile, rank, head)
                ptx.store_global_64(kept_at, row_max.bitcast(Int32), row_sum.bitcast(Int32))

    @cute.jit
    def load(
        self, flags: Any, work_tile: Any, rank: Any, head: Any, bars: Bars, scheduler: TileScheduler
    ) -> tuple[Any, Any]:
        """Them, where both halves meet, the sum for one lane of the quad; else those of no keys. A cluster that does
        both need not wait: since the last tile of the first half softmax warpgroups have taken turns twice."""
        row_max, row_sum = Float32(NEG_MAX), Float32(0.0)
        if flags & JOIN != 0:
            if self.is_helper(scheduler):
                ptx.wait_mbarrier((bars.q_done + THERE).toint(), Int32(0))
            words = ptx.load_global_64_in_order(self.softmax_at(work_tile, rank, head))
            row_max, row_sum = (word.bitcast(Float32) for word in words)
            row_sum = row_sum if ptx.thread_again() % 4 == 0 else Float32(0.0)
        return row_max, row_sum

    # ---- by PV

    @cute.jit
    def keep_o(self, o: Any, flags: Any, work_tile: Any) -> None:
        """Keep O of a first half; tell a helper, if there is one, of all that is kept."""
        rank = ptx.rank_again()
        kept_at = self.o_at(work_tile, rank) + pv_thread() * 16
        for i in range_constexpr(VECTORS):
            words = [ptx.bf16x2(o[8 * i + 2 * j], o[8 * i + 2 * j + 1]) for j in range(4)]
            ptx.store_global_128(kept_at + i * WORDS_BYTES, words)
        if flags & STOP != 0:
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=128)
            if pv_thread() == 0:
                ptx.store_global_s64_release(self._mark_at(work_tile, rank), Int64(MARK))

    @cute.jit
    def add_o(self, o: Any, factors: Any, stage_at: Any, work_tile: Any, bars: Bars) -> None:
        """Add O of the first half, times a factor for each of the thread's rows, from where it has been copied to, and
        clear the mark."""
        ptx.wait_mbarrier((bars.q_done + COPIED).toint(), Int32(0))
        kept_at = stage_at + pv_thread() * 16
        for i in range_constexpr(VECTORS):
            words = ptx.load_shared_128(kept_at + i * WORDS_BYTES)
            for j in range_constexpr(4):
                element = 8 * i + 2 * j
                o[element] = o[element] + bf16_low(words[j]) * factors[j % 2]
                o[element + 1] = o[element + 1] + bf16_high(words[j]) * factors[j % 2]
        if pv_thread() == 0:
            ptx.store_global_s64(self._mark_at(work_tile, ptx.rank_again()), Int64(0))

    # ---- by the producer

    @cute.jit
    def copy_async(
        self, work_tile: Any, rank: Any, scheduler: TileScheduler, bars: Bars, smem: Smem, tiles: Any
    ) -> None:
        """By one thread, behind the cluster's `tiles` tiles, which end a row in halves: start to copy its first O
        half to the stage of KV behind them, when what that half has left is there."""
        if self.is_helper(scheduler):
            ptx.wait_global_s64(self._mark_at(work_tile, rank), Int64(MARK))
            cute.arch.mbarrier_arrive(bars.q_done + THERE)
        stage, phase = bars.kv.place(tiles)
        bars.kv.wait_empty(stage, phase)
        # of what PV's threads have stored in the ordinary way, here or in another cluster
        cute.arch.fence_proxy("async")
        copied = bars.q_done + COPIED
        cute.arch.mbarrier_arrive_and_expect_tx(copied, KV_STAGE_BYTES)
        target = smem.kv + stage * KV_STAGE_BYTES
        ptx.copy_bulk(target, self.o_at(work_tile, rank), KV_STAGE_BYTES, copied.toint())

    # ---- before warps take their roles

    def is_helper(self, scheduler: TileScheduler) -> Any:
        """Whether the cluster has no row of its own."""
        return ptx.block_again() >= scheduler.end * CLUSTER

    @cute.jit
    def assign(
        self, scheduler: TileScheduler, sources: KVSources, second: cutlass.Constexpr, bars: Bars, found_at: Any
    ) -> Any:
        """The cluster's work tile, none for a helper of no row. One of PV's warps, which have time, tells the producer
        at `found_at` whether the cluster's own row has a helper: then it arrives at RANKED."""
        thread, _, _ = cute.arch.thread_idx()
        is_ranking = cute.arch.make_warp_uniform(thread // 32) == FIRST_PV_THREAD // 32
        first = scheduler.first
        if self.is_helper(scheduler):
            if is_ranking:
                found = rank_rows(scheduler, sources, second, first - scheduler.end)
                if thread % 32 == 0:
                    ptx.store_shared_s32(found_at, found)
                # its lengths and lists are wanted next
                lists = sources.indices, sources.extra_indices
                scheduler.prefetch(found, lists, sources.extra_cache, second, thread % 32)
            cute.arch.sync_threads()
            first = cute.arch.make_warp_uniform(ptx.load_shared_s32(found_at))
        elif is_ranking:
            is_helped = rank_rows(scheduler, sources, second, Int32(-1))
            if thread % 32 == 0:
                ptx.store_shared_s32(found_at, is_helped)
                cute.arch.mbarrier_arrive(bars.q_done + RANKED)
        return first


@cute.jit
def rank_rows(scheduler: TileScheduler, sources: KVSources, second: cutlass.Constexpr, helper: Any) -> Any:
    """By a warp: which work tile that helper has, or one that there is not; of helper -1, a cluster with a row, 1 if
    it is helped and 0 if not."""
    lists, end, lane = lists_of(sources, second), scheduler.end, ptx.thread_again() % 32
    weights = [weight_of(scheduler, lists, lane + 32 * i) for i in range(MOST_RANKED // 32)]
    low, high = weights
    heaviest = weight_of(scheduler, lists, scheduler.first)
    if helper >= 0:
        for _ in cutlass.range(helper, unroll=1):
            heaviest = Int32(cute.arch.warp_redux_sync(cutlass.max(low, high), "max"))
            low, high = (cutlass.select_(weight == heaviest, Int32(0), weight) for weight in (low, high))
        heaviest = Int32(cute.arch.warp_redux_sync(cutlass.max(low, high), "max"))
    tiles = heaviest >> NUMBER_BITS
    longer = [cute.arch.popc(cute.arch.vote_ballot_sync(weight >> NUMBER_BITS >= tiles)) for weight in weights]
    clusters = scheduler.step
    is_helped = tiles >= LEAST_HALVED and longer[0] + longer[1] <= clusters - end
    number = MOST_RANKED - 1 - (heaviest & (MOST_RANKED - 1))
    return (number if is_helped else end) if helper >= 0 else (Int32(1) if is_helped else Int32(0))


def weight_of(scheduler: TileScheduler, lists: Any, number: Any) -> Any:
    """A work tile's tiles, then its number, the first ones being heavier; 0 where there is none."""
    batch, token, _, _ = scheduler.coords(cutlass.min(number, scheduler.end - 1))
    weight = (tiles_of_row(lists, batch, token) << NUMBER_BITS) + (MOST_RANKED - 1 - number)
    return cutlass.select_(number < scheduler.end, weight, Int32(0))
