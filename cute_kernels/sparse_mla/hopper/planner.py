# SPDX-License-Identifier: Apache-2.0
"""Which work tiles each cluster of hopper/decode.py takes, and in which order, where rows are of unequal length.

The host asks `schedule.is_dealt` by shapes alone. Where it says no, a kernel without a planner runs (DecodeKey.dealt),
and cluster c takes work tiles c, c + clusters, ... as they come. Where it says yes, all threads of every CTA run the
planner once, when the kernel ahead is done and before warps take their roles: `Planner.run` goes through the lengths of
all rows and leaves the cluster's list in shared memory, which its TileScheduler reads from then on. Fewer or more work
tiles than can be dealt (`has_room`) are taken as they come by that kernel, too.

    weigh            lengths --> a weight for each work tile, sums of each warp; if all are as long, as they come
    count_heavier    how many work tiles are heavier than one: its rank
    deal             ranks --> whose each one is, and at which turn

perf/notes/decode.md has what it costs and wins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.params import FIRST_DEALT, IndexList, KVSources, Output, TileScheduler, tiles_of
from cute_kernels.sparse_mla.schedule import MOST_DEALT, MOST_PLANNED

THREADS = 768
"""Of a CTA."""

PLANNED_WARPS = MOST_PLANNED // 32

MOST_COUNTED = 1 << 20
"""Tiles of a work tile that are told from more."""

AROUND = 2
"""Tiles that the beginning and the end of a work tile take as long as."""

LINES = 64
"""Of 128 bytes, of a work tile's list, that are asked for early."""


def lists_of(sources: KVSources, extra: str) -> list[tuple[IndexList, Any]]:
    """Lists of a call with an extra one, and how many columns they have room for."""
    page_rows = sources.extra_cache.rows.divisor if extra == "dense" else 1
    return [
        (sources.indices, sources.indices.columns),
        (sources.extra_indices, sources.extra_indices.columns * page_rows),
    ]


def tiles_of_row(lists: list[tuple[IndexList, Any]], batch: Any, token: Any) -> Any:
    """Of such lists."""
    words = [indices.load_length(batch, token) for indices, _ in lists]
    counts = [indices.live_of(word, columns) for (indices, columns), word in zip(lists, words, strict=True)]
    return sum(tiles_of(count) for count in counts)


@dataclass(frozen=True)
class Planner:
    """Deals the work tiles of a call to its clusters, where there are more of them than clusters: the longest first,
    to the clusters in turn, there and back; but those whose first one is longer than what a cluster has on average get
    no other. Splits behind a row's last tile are left out: they are marked empty at once. What is summed where does
    not depend on any of it.

    Every CTA goes through all lengths by itself, so nobody waits for a kernel ahead or shares memory with another call.

    heads, extra   DecodeKey's heads and second; there is an extra list
    scratch        address of shared memory that is free until rows are copied (the ring of copies), for

        weights   [384] of work tiles, all different: tiles, then number; -1 if it is left out
        heavier   [768 threads] how many work tiles, of a share of them, have more weight than one, which is the
                  thread's modulo a period: fewer work tiles have a shorter period and smaller shares
        sums      [12 warps] of their work tiles: those that have work, tiles of these
        longest   [12 warps] tiles of the longest of them
        longer    [12 warps] how many of them are longer than average

    dealt          address of the cluster's list, see TileScheduler, which `run` writes
    """

    heads: int
    extra: str
    scratch: Any
    dealt: Any
    rank: Any
    scheduler: TileScheduler
    sources: KVSources
    out: Output
    thread: Any

    def has_room(self) -> Any:
        """Whether clusters have several work tiles, and as many as can be dealt."""
        work_tiles, clusters = self.scheduler.end, self.scheduler.step
        return (work_tiles > clusters) & (work_tiles <= MOST_PLANNED) & (work_tiles <= clusters * MOST_DEALT)

    @property
    def lists(self) -> list[tuple[IndexList, Any]]:
        return lists_of(self.sources, self.extra)

    @property
    def heavier(self) -> Any:
        return self.scratch + MOST_PLANNED * 4

    @property
    def sums(self) -> Any:
        return self.heavier + THREADS * 4

    @property
    def longest(self) -> Any:
        return self.sums + PLANNED_WARPS * 8

    @property
    def longer(self) -> Any:
        return self.longest + PLANNED_WARPS * 4

    @property
    def parts(self) -> Any:
        """Threads that have a work tile in common."""
        end = self.scheduler.end
        return cutlass.select_(end <= THREADS // 6, Int32(6), cutlass.select_(end <= THREADS // 3, Int32(3), Int32(2)))

    @cute.jit
    def run(self) -> None:
        """Deal, unless all work tiles are as long."""
        # of the warps that have work tiles
        of_warp = cutlass.min(self.thread % 32, PLANNED_WARPS - 1)
        self.prefetch_lists()
        weight = self.weigh()
        cute.arch.sync_threads()
        count, load = (self.over_warps(number) for number in ptx.load_shared_64(self.sums + of_warp * 8))
        longest = Int32(cute.arch.warp_redux_sync(ptx.load_shared_s32(self.longest + of_warp * 4), "max"))
        if count < self.scheduler.end or load != count * longest:
            end = FIRST_DEALT + self.deal(weight, count, load, of_warp)
            if self.thread == 0:
                ptx.store_shared_s32(self.dealt, end)
        # before bulk copies write where this was read
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()

    @cute.jit
    def deal(self, weight: Any, count: Any, load: Any, of_warp: Any) -> Any:
        """How many work tiles the cluster has. A barrier follows."""
        thread, clusters = self.thread, self.scheduler.step
        lane = thread % 32
        is_long = weight >= 0 and (weight // MOST_PLANNED + AROUND) * clusters > load
        longer = cute.arch.popc(cute.arch.vote_ballot_sync(is_long))
        if lane == 0 and thread < MOST_PLANNED:
            ptx.store_shared_s32(self.longer + thread // 32 * 4, longer)
        parts = self.parts
        period = THREADS // parts
        self.count_heavier(parts, period)
        cute.arch.sync_threads()
        longer = ptx.load_shared_s32(self.longer + of_warp * 4)
        closed = self.over_warps(longer)
        rest = cutlass.max(count - clusters, Int32(0))
        if (clusters - closed) * (MOST_DEALT - 1) < rest:
            closed = Int32(0)
        others = clusters - closed
        own = self.scheduler.first - closed
        if weight >= 0:
            ahead = -clusters
            for number in cutlass.range(thread, THREADS, period, unroll=1):
                ahead += ptx.load_shared_s32(self.heavier + number * 4)
            turn = ahead // others
            place = ahead - turn * others
            place = place if turn % 2 != 0 else others - 1 - place
            if ahead < 0:
                turn, place = Int32(-1), ahead + others
            if place == own:
                ptx.store_shared_s32(self.dealt + (turn + 2) * 4, thread)
        turns = rest // others
        place = own if turns % 2 != 0 else others - 1 - own
        turns = turns + Int32(place < rest - turns * others)
        return Int32(self.scheduler.first < count) + (turns if own >= 0 else Int32(0))

    def over_warps(self, number: Any) -> Any:
        """Sum over the first lanes' numbers, each of a warp that has work tiles."""
        number = cutlass.select_(self.thread % 32 < PLANNED_WARPS, number, Int32(0))
        return Int32(cute.arch.warp_redux_sync(number, "add"))

    @cute.jit
    def prefetch_lists(self) -> None:
        """L2 has the first columns of every cluster's share of the work tiles while their lengths are on their way."""
        scheduler, line = self.scheduler, self.thread % LINES
        work_tile = scheduler.first + self.thread // LINES * scheduler.step
        if work_tile < scheduler.end:
            batch, token, _, _ = scheduler.coords(work_tile)
            for indices, _ in self.lists:
                ptx.prefetch_l2(indices.row(batch, token) + Int64(line) * 128, line * 32 < indices.columns)

    @cute.jit
    def weigh(self) -> Any:
        """Weight of the thread's work tile, which is stored with the warp's sums. A barrier follows."""
        scheduler, thread = self.scheduler, self.thread
        weight, load = Int32(-1), Int32(0)
        if thread < scheduler.end:
            batch, token, split_idx, head_group = scheduler.coords(thread)
            first, end = scheduler.tiles(split_idx, self.tiles(batch, token))
            if end > first or split_idx == 0:
                tiles = cutlass.min(end - first, Int32(MOST_COUNTED))
                weight = tiles * MOST_PLANNED + (MOST_PLANNED - 1 - thread)
                load = tiles + AROUND
            elif thread % scheduler.step == scheduler.first and self.rank == 0:
                self.mark_empty(batch, token, split_idx, head_group)
        if thread < MOST_PLANNED:
            ptx.store_shared_s32(self.scratch + thread * 4, weight)
            longest = cute.arch.warp_redux_sync(load, "max")
            load = cute.arch.warp_redux_sync(load, "add")
            count = cute.arch.popc(cute.arch.vote_ballot_sync(weight >= 0))
            if thread % 32 == 0:
                ptx.store_shared_64(self.sums + thread // 32 * 8, count, load)
                ptx.store_shared_s32(self.longest + thread // 32 * 4, longest)
        return weight

    @cute.jit
    def count_heavier(self, parts: Any, period: Any) -> None:
        """Compare one work tile with a share of all. A barrier follows."""
        end = self.scheduler.end
        part = self.thread // period
        number = self.thread - part * period
        share = (end + 4 * parts - 1) // (4 * parts) * 4
        weight, heavier = ptx.load_shared_s32(self.scratch + number * 4), Int32(0)
        stop = cutlass.min((part + 1) * share, end)
        for other in cutlass.range(part * share, stop, 4, unroll=4):
            for other_weight in ptx.load_shared_128(self.scratch + other * 4):
                heavier += Int32(other_weight > weight)
        ptx.store_shared_s32(self.heavier + self.thread * 4, heavier)

    def tiles(self, batch: Any, token: Any) -> Any:
        """Of a row."""
        return tiles_of_row(self.lists, batch, token)

    @cute.jit
    def mark_empty(self, batch: Any, token: Any, split_idx: Any, head_group: Any) -> None:
        """Store the log-sum-exps of a split without keys, which a combination ahead may still read."""
        cute.arch.griddepcontrol_wait()
        first = head_group * self.heads
        for head in cutlass.range(first, cutlass.min(first + self.heads, self.out.heads), 1, unroll=1):
            at = self.out.lse.of(split_idx, batch, head, token)
            ptx.store_global_s32(at, Float32(Float32.inf).bitcast(Int32))
