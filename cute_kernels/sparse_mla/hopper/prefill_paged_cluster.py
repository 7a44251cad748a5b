# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill_paged on Hopper for few query rows: the rows' keys are split, that all multiprocessors have some.

The CTAs of a cluster have a split of one work tile each, do what prefill_paged.py does, and combine their results
through each other's shared memory: no workspace, and no second launch. There may be more CTAs in a cluster than splits.

    1 (PV)       prologue: the row lists of the CTA's first tiles, one a warp                      Prologue
    all          as in prefill_paged.py, for the tiles of the split
    0            leaves row_max, row_sum and max_logit of each head where its queries were
    1, 2         leave the other CTAs' columns of O, fp32 and relative to their own row_max, where the KV ring was
                 ---- the cluster meets ----                                                       CombineEpilogue
    1, 2         add up the CTA's own columns of O over all CTAs, store them

perf/notes/prefill_paged_cluster.md has why, perf/log/prefill_paged_cluster.md what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx, wgmma
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.paging import visible_entries
from cute_kernels.dsl.tensor import length
from cute_kernels.sparse_mla.hopper.prefill_paged import (
    HALVES,
    HELD,
    LINE,
    NO_TILE,
    PRODUCER,
    PRODUCER_REGISTERS,
    PRODUCER_WARPS,
    PV,
    PV_BARRIER,
    PV_REGISTERS,
    THREADS,
    TILE_AT,
    Bars,
    IndexLoader,
    PagedKey,
    Producer,
    PvEpilogue,
    QkSoftmax,
    Smem,
    lane_idx,
    smem_parts,
    warp_idx,
)
from cute_kernels.sparse_mla.hopper.prefill_softmax import (
    KEYS,
    ROWS,
    SIDE,
    own_head,
    smem_layouts,
    thread_idx,
    tiled_mmas,
)
from cute_kernels.sparse_mla.kernel_args import PagedArgs, fake_paged
from cute_kernels.sparse_mla.params import PagedKV, PrefillOutput, PrefillQuery, PrefillScheduler, out_scale_of
from cute_kernels.sparse_mla.schedule import CLUSTERS

# ---- shared memory

UNIT = 32
"""Columns that a CTA adds up at a time: of each 8 a thread has two neighbouring ones in two rows, one load."""

UNITS = SIDE // UNIT
LOADS = UNIT // 8
LOAD_BYTES = 128 * 16
"""What a PV warpgroup's threads load at once."""

SIDE_BYTES = ROWS * SIDE * 4
"""Of the rows of O of one PV warpgroup."""

SUMMARY = 16
"""Bytes of what a head's softmax came to: row_max, row_sum, max_logit."""

assert smem_parts()["kv"] >= 2 * SIDE_BYTES
assert smem_parts()["q"] >= ROWS * SUMMARY


# ---- prologue


@dataclass(frozen=True)
class Prologue:
    """The first row lists of the CTA's split, which takes one trip to memory: L2 is asked for the lists of the whole
    row before it is known which of them the split needs. By a warpgroup that has registers, and nothing else to do."""

    index: IndexLoader

    @cute.jit
    def run(self) -> None:
        """Write the row lists of the first tiles, one a warp, and where the producer warp of that number goes on."""
        index, kv = self.index, self.index.kv
        work_tile = index.scheduler.first
        query, _ = index.scheduler.coords(work_tile)
        # a row most often has all that it may have: its entries are asked for before it is known
        guess, _ = self.split_range((kv.columns + kv.window_size + (KEYS - 1)) // KEYS)
        listed = self.load_entries(query, (guess + warp_idx()) * KEYS, kv.columns)
        self.prefetch_lists(query)
        request, position, seq_len, _ = kv.batch.find(query, kv.batch.seq_lens)
        # starts that do not ascend may lead to any other
        position = position if (position >= 0) & (position < seq_len) else Int32(-1)
        self.prefetch_pages(request, position)
        visible = visible_entries(position, kv.ratio)
        compressed = cutlass.min(visible, kv.columns)
        first = cutlass.max(position + 1 - kv.window_size, 0)
        end = cutlass.min(position + 1, kv.window.columns * kv.window.rows.divisor)
        total = compressed + cutlass.max(end - first, 0)
        start, stop = self.split_range((total + (KEYS - 1)) // KEYS)
        total = cutlass.min(total, stop * KEYS)

        tile = warp_idx()
        column = (start + tile) * KEYS
        is_tile = (tile == 0) | (column < total)
        flags = index.flags_of(work_tile, column + KEYS >= total) if is_tile else Int32(NO_TILE)
        if lane_idx() == 0:
            ptx.store_shared_64(index.row_list(tile) + TILE_AT, flags, compressed - column)
        # behind the split there are no tiles
        index.look_ahead(index.scheduler.end)
        if lane_idx() == 0:
            ptx.store_shared_128(index.record(Int32(0)), (request, visible, compressed, total))
            ptx.store_shared_s32(index.record(Int32(0)) + 16, first)
            after, goes_on = column + PRODUCER_WARPS * KEYS, column + PRODUCER_WARPS * KEYS < total
            behind = index.scheduler.end
            cursor = (work_tile, after, Int32(0), Int32(0)) if goes_on else (behind, Int32(0), Int32(1), Int32(0))
            ptx.store_shared_128(index.cursor, cursor)
        cute.arch.sync_warp()
        if is_tile:
            if start != guess:
                listed = self.load_entries(query, column, compressed)
            self.enter_tile(tile, column, listed, request, visible, compressed, first, total)

    @cute.jit
    def enter_tile(
        self, tile: Any, column: Any, listed: Any, request: Any, visible: Any, compressed: Any, first: Any, total: Any
    ) -> None:
        """Write a tile's row list at once, and publish it. listed: as of `load_entries`."""
        index = self.index
        list_at = index.row_list(tile)
        rows = [lane_idx() + half * 32 for half in range(HALVES)]
        entries = [
            self.entry_of(column + row, entry, compressed, first, total)
            for row, entry in zip(rows, listed, strict=True)
        ]
        places = []
        for row, entry in zip(rows, entries, strict=True):
            is_named, inside, named_by = index.resolve_page(entry, row < compressed - column, visible)
            places.append((ptx.load_global_s32_where(is_named, named_by.address(request)), inside))
        found = zip(rows, places, strict=True)
        index.publish(tile, [index.enter_row(list_at, row, *place, compressed - column) for row, place in found])

    def load_entries(self, query: Any, column: Any, count: Any) -> list[Any]:
        """What a query row's list has for the lane's rows of the tile that begins with that column; anything where
        there is none."""
        kv = self.index.kv
        found = []
        for half in range(HALVES):
            own = column + lane_idx() + half * 32
            at = kv.lists + Int64(query) * kv.list_row + Int64(own) * 4
            found.append(ptx.load_global_s32_where((own < count) & (kv.lists != 0), at))
        return found

    @cute.jit
    def entry_of(self, own: Any, listed: Any, compressed: Any, first: Any, total: Any) -> Any:
        """Of a key of the row; -1 behind the split's last one."""
        entry = own if own < compressed else own - compressed + first
        entry = entry if own < total else Int32(-1)
        return listed if (own < compressed) & (self.index.kv.lists != 0) else entry

    @cute.jit
    def split_range(self, tiles: Any) -> tuple[Any, Any]:
        """Tiles [first, end) of the CTA's split of a row of so many; behind the last one if it has none."""
        kv, split_idx = self.index.kv, ptx.rank_again()
        begin = tiles * split_idx // kv.splits
        stop = tiles * (split_idx + 1) // kv.splits
        if kv.split_tiles != 0:
            begin = cutlass.min(split_idx, tiles) * kv.split_tiles
            stop = begin + kv.split_tiles
        # there may be more CTAs than splits
        stop = cutlass.min(stop, tiles)
        begin = begin if begin < stop else tiles
        return begin, cutlass.max(begin, stop)

    @cute.jit
    def prefetch_lists(self, query: Any) -> None:
        kv = self.index.kv
        line = warp_idx() * 32 + lane_idx()
        at = kv.lists + Int64(query) * kv.list_row + Int64(line) * LINE
        ptx.prefetch_l2(at, (kv.lists != 0) & (line * (LINE // 4) < kv.columns))

    @cute.jit
    def prefetch_pages(self, request: Any, position: Any) -> None:
        """L2 has the pages of the request's entries, and those of the window, when they are wanted."""
        kv, compressed, window = self.index.kv, self.index.kv.compressed, self.index.kv.window
        line = warp_idx() * 32 + lane_idx()
        is_known = position >= 0
        at = compressed.table + Int64(request) * compressed.table_row + Int64(line) * LINE
        is_wanted = is_known & (kv.columns != 0) & (line * (LINE // 4) < compressed.columns)
        ptx.prefetch_l2(at, is_wanted)
        page, _ = divmod(cutlass.max(position - lane_idx() * (LINE // 4), 0), window.rows)
        at = window.table + Int64(request) * window.table_row + Int64(page) * 4
        ptx.prefetch_l2(at, is_known & (lane_idx() < 2 * KEYS // (LINE // 4)) & (page < window.columns))


# ---- epilogue

CTAS_AT_ONCE = 2
"""CTAs whose rows of O a thread asks for at a time, while it adds up what it asked for before."""


@cute.jit
def meet() -> None:
    """Have all CTAs of the cluster see what the others have stored before. All threads."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@dataclass(frozen=True)
class CombineEpilogue:
    """Results of a cluster's splits are combined, and stored: a CTA has every so-manieth unit of 32 columns."""

    ctas: int
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput

    @cute.jit
    def store_lse(self, work_tile: Any, half: cutlass.Constexpr, max_logit: Any, row_max: Any, row_sum: Any) -> None:
        """Leave what a head's logits come to."""
        head = own_head(0, half)
        if thread_idx() & 3 == 0:
            words = row_max.bitcast(Int32), row_sum.bitcast(Int32), max_logit.bitcast(Int32), Int32(0)
            ptx.store_shared_128(self.smem.q + head * SUMMARY, words)

    @cute.jit
    def store_out(self, o: Any, out_scales: Any, work_tile: Any, side: Any, own_row: Any, lane: Any) -> None:
        """Leave the CTA's rows of O, and store the columns of the results that are the CTA's."""
        out = self.out
        row, first = self.scheduler.coords(work_tile)
        count = self.q.left(first) - own_row
        # KV is no more needed once all products are done
        cute.arch.barrier(barrier_id=PV_BARRIER, number_of_threads=256)
        own_at = self.smem.kv + side * SIDE_BYTES + thread_idx() * 16
        for unit in range_constexpr(UNITS):
            if unit % self.ctas != ptx.rank_again():
                for i in range_constexpr(unit * LOADS, (unit + 1) * LOADS):
                    words = [o[4 * i + j].bitcast(Int32) for j in range(4)]
                    ptx.store_shared_128(own_at + i * LOAD_BYTES, words)
        self.keep_own(o)
        logits = [self.load_sink(first + own_row + 8 * half, 8 * half < count) for half in range(2)]
        meet()

        asked = self.load_unit(0, 0, o, own_at)
        factors = self.factors_and_lse(logits, row, first, count, side, own_row, lane)
        target = out.base + Int64(row) * out.row + Int64(first + own_row) * out.head + side * (SIDE * 2)
        sums = cute.make_rmem_tensor((UNIT // 2,), Float32)
        for i in range_constexpr(UNITS // self.ctas):
            sums.fill(0.0)
            for rank in range_constexpr(0, self.ctas, CTAS_AT_ONCE):
                found = asked
                number, behind = (i, rank + CTAS_AT_ONCE) if rank + CTAS_AT_ONCE < self.ctas else (i + 1, 0)
                if const_expr(number < UNITS // self.ctas):
                    asked = self.load_unit(number, behind, o, own_at)
                self.add_up(sums, factors, found, rank)
            for j in range_constexpr(UNIT // 2):
                # -0 would become 0 by an empty split, and by none must do so as well
                sums[j] = ptx.add_rn(sums[j], Float32(0.0))
            unit = ptx.rank_again() + i * self.ctas
            wgmma.store_bf16(sums, lane, target + unit * (UNIT * 2), out.head, count, Int32(UNIT), UNIT)

    @cute.jit
    def factors_and_lse(
        self, logits: Any, row: Any, first: Any, count: Any, side: Any, own_row: Any, lane: Any
    ) -> list[list[Any]]:
        """What to multiply each CTA's O with, for the thread's two rows. Stores max_logits and lse.

        logits   of the sink
        """
        out = self.out
        summaries = [ptx.map_shared(self.smem.q + own_row * SUMMARY, rank) for rank in range(self.ctas)]
        is_own = (side == 0) & (lane & 3 == 0) & (ptx.rank_again() == 0)
        factors = []
        for half in range_constexpr(2):
            known = [ptx.load_cluster_128(place + half * (8 * SUMMARY)) for place in summaries]
            row_maxes, row_sums, max_logits = ([four[i].bitcast(Float32) for four in known] for i in range(3))
            row_max, max_logit, row_sum = row_maxes[0], max_logits[0], Float32(0.0)
            for i in range_constexpr(1, self.ctas):
                row_max, max_logit = ptx.max_f32(row_max, row_maxes[i]), ptx.max_f32(max_logit, max_logits[i])
            weights = [ptx.exp2(one - row_max) for one in row_maxes]
            for i in range_constexpr(self.ctas):
                row_sum = ptx.fma_rn(weights[i], row_sums[i], row_sum)
            whole = out_scale_of(row_sum, row_max, logits[half], out.sink)
            factors.append([weight * whole for weight in weights])
            lse = (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
            lse = Float32(Float32.inf) if row_sum == Float32(0.0) else lse
            # a branch, since addresses found before it would be spilled
            if is_own & (8 * half < count):
                place = row, first + own_row + 8 * half
                out.max_logits.store(place, max_logit * Float32(ptx.LN_2), True)
                out.lse.store(place, lse, True)
        return factors

    @cute.jit
    def keep_own(self, o: Any) -> None:
        """Put the sums of the CTA's own units first."""
        for i in range_constexpr(UNITS // self.ctas):
            for rank in range_constexpr(self.ctas):
                if ptx.rank_again() == rank:
                    for j in range_constexpr(UNIT // 2):
                        o[i * (UNIT // 2) + j] = o[(i * self.ctas + rank) * (UNIT // 2) + j]

    def load_unit(self, number: int, first: int, o: Any, own_at: Any) -> list[Any]:
        """A thread's sums of one of the CTA's units, from some CTAs: its own are in registers."""
        unit_at = own_at + (ptx.rank_again() + number * self.ctas) * (LOADS * LOAD_BYTES)
        found: list[Any] = []
        for rank in range(first, first + CTAS_AT_ONCE):
            place = ptx.map_shared(unit_at, rank)
            for i in range(LOADS):
                own = [o[number * (UNIT // 2) + 4 * i + j].bitcast(Int32) for j in range(4)]
                found += ptx.load_cluster_128_or(ptx.rank_again() != rank, place + i * LOAD_BYTES, own)
        return found

    @cute.jit
    def add_up(self, sums: Any, factors: Any, found: Any, first: cutlass.Constexpr) -> None:
        """Add a thread's columns of a unit, of some CTAs in order."""
        for rank in range_constexpr(CTAS_AT_ONCE):
            for i in range_constexpr(UNIT // 2):
                value = found[rank * (UNIT // 2) + i].bitcast(Float32)
                sums[i] = ptx.fma_rn(value, factors[i // 2 % 2][first + rank], sums[i])

    @cute.jit
    def load_sink(self, head: Any, is_there: Any) -> Any:
        found = Int32(0)
        if self.out.sink != 0:
            found = ptx.load_global_s32_again_where(is_there, self.out.sink + Int64(head) * 4)
        return found


# ---- kernel


class PagedClusterKernel:
    """See kernel_args.PagedArgs, with splits, at most as many as a cluster has CTAs."""

    def __init__(self, ctas: int) -> None:
        self.ctas = ctas

    @cute.jit
    def launch(self, args: PagedArgs) -> None:
        name = f"sparse_mla_prefill_paged_parts{self.ctas}"
        self.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        group_bits = Int32(1) if length(args.q, 1) > ROWS else Int32(0)
        work_tiles = length(args.q, 0) << group_bits
        kernel = self.kernel(
            PrefillQuery.of(args.q),
            args.sources(),
            args.output(args.sink),
            # a split is without the sink
            Int64(0),
            args.scale_log2,
            work_tiles,
            group_bits,
            tiled_mmas(BFloat16),
            smem_layouts(BFloat16, HELD),
        )
        kernel.launch(
            # a CTA has a split of one work tile, and there is none behind it
            grid=[work_tiles, self.ctas, 1],
            block=[THREADS, 1, 1],
            cluster=[1, self.ctas, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: PrefillQuery,
        kv: PagedKV,
        out: PrefillOutput,
        sink: Int64,
        scale_log2: Float32,
        work_tiles: Int32,
        group_bits: Int32,
        mma: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        allocator = SmemAllocator()
        smem, bars = Smem.allocate(allocator), Bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for one in mma[1:]:
            wgmma.accumulate(one)
        k_layout, v_layout, q_layout, p_layout = layouts
        scheduler = PrefillScheduler(ptx.block_again(), work_tiles, ctas, group_bits)
        epilogue = CombineEpilogue(self.ctas, smem, scheduler, q, out)
        own = thread % wgmma.WARPGROUP
        if group < PV:
            QkSoftmax(bars, smem, scheduler, q, epilogue, sink, scale_log2, own, mma[:3], (k_layout, q_layout)).run()
        elif group < PRODUCER:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            side = cute.arch.make_warp_uniform(group - PV)
            if side == 0:
                Prologue(IndexLoader(scheduler, kv, bars, smem)).run()
            PvEpilogue(bars, smem, scheduler, q, out, epilogue, own, side, mma[3], (p_layout, v_layout)).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            scheduler = PrefillScheduler(ptx.block_again(), work_tiles, ctas, group_bits)
            Producer(bars, smem, IndexLoader(scheduler, kv, bars, smem)).run()
        # PV has met the others
        if (group < PV) | (group >= PRODUCER):
            meet()
        # nobody leaves while another CTA may still read its results; nobody waits for what is on its way to memory
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


# ---- key


@dataclass(frozen=True)
class PagedClusterKey(PagedKey):
    """What distinguishes one compiled kernel from another.

    blocks   CTAs of a cluster: 2, 4 or 8
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_paged_cluster"
    blocks: int = 2

    def __post_init__(self) -> None:
        if self.blocks not in CLUSTERS:
            raise ValueError(f"blocks: expected one of {CLUSTERS}, got {self.blocks!r}")

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "barrier.cluster"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PagedClusterKernel(self.blocks).launch, fake_paged(split=True))
