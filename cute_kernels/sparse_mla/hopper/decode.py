# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode on Hopper (fp8_ds_mla caches, V4.1's own): both products by wgmma, KV dequantized on its way.

A cluster of two CTAs takes work tiles (params.TileScheduler): a split of a query row's KV, a head group. CTA r of it
has columns 256 r ... 256 r + 255 of Q, K, V and O, so nothing is loaded, converted or multiplied twice; K and V are the
same matrix, the dequantized rows. S = Q K^T sums over the columns of both CTAs: they send each other their partial S,
each does the softmax of half of the heads, and they send each other those rows of P. Where rows may be of unequal
length (DecodeKey.dealt) all threads first run planner.py, which deals work tiles to clusters. Warpgroups of a CTA:

    0, 1   QK and softmax, ping-pong    copy Q, partial S, exchange of S, softmax, exchange of P      QkSoftmax
    2      PV and epilogue              O += P V, out                                                 PvEpilogue
    3, 4   dequantizers, ping-pong      fp8 -> bf16, K and V at once                                  Dequantizer
    5      producer                     indices -> rows, their copies                                 Producer

    indices  gmem --> producer (index, then page and row of each key of a tile)
    rows     gmem --bulk copy--> fp8 ring [4 stages of 32 keys] --+--dequantizers--> KV ring [4 tiles, bf16, swizzled]
    scales   gmem --cp.async---> scale, same stages --------------+                     |                     |
    Q        gmem --cp.async--> q -------------wgmma--> partial S [64 heads, 64 keys] of 256 of 512 columns   |
                           other CTA <-- partial S of its heads, to s_partial <--- |                          |
                                                                                   v + other's part, softmax  |
                           other CTA <-- P, rescale factors of O, to p, factor <---+                          |
                           the same to s_partial, whose S has been read, factor <--+--> P in registers --wgmma--> O
    out      gmem <--- bf16: through the memory of the last tile's KV stage; fp32, codes: from registers <----+

    barrier     full                                          empty                     waits for full, for empty
    fp8         rows and scales of 32 keys, a tile's header   dequantizers loaded it    dequantizers, producer
    kv          dequantizers stored a tile                    PV is done with it        softmax, dequantizers
    p           P, factors and target of both CTAs' softmax   PV of both CTAs took P    PV, softmax before it sends S
    s_partial   the other CTA's partial S                     none: p's                 softmax
    q           a work tile's queries                         q_done: its last Q K^T    softmax, softmax
    row_max     a tile's running maxima (row_sum: sums), for which the softmax warpgroups take turns, warp by warp

s_partial[i] is written by the other CTA (partial S of tile t), then by this one (P of tile t), which PV reads: S of
tile t + 2 may come when PV of both CTAs has P of tile t in registers (of a work tile's last tile: has stored O), which
is p.empty of the same parity. PV does not wait for kv.full: p.full implies it. Headers need no empty: that of tile t is
written over by tile t + 8, and at most 6 tiles are on their way, 2 in the fp8 ring and 4 in the KV ring, as
dequantizers wait for a free stage of the latter before they release one of the former.

Scales of V4.1's own records lie behind their columns in the fp8 ring. A tile is 64 keys, and of 256 columns four slabs:
[64 keys, 128 bytes] of bf16, in the layout of the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
Geometry, shared memory and barriers are in decode_smem.py, the dequantizers in decode_dequantize.py. perf/notes has why
and perf/log what was tried: decode.md.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.convert import bf16_high, bf16_low
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.dsl.tensor import length
from cute_kernels.dsl.transforms import HALF_TABLE_BYTES, rotate_pair
from cute_kernels.formats import FP8_DS_MLA, label_of
from cute_kernels.kv_cache.query_norm import inverse_rms
from cute_kernels.sparse_mla.early import prefetch_first
from cute_kernels.sparse_mla.hopper.decode_dequantize import E2M1_SHIFT, Dequantizer
from cute_kernels.sparse_mla.hopper.decode_halves import JOIN, KEEP, RANKED, STOP, Halves, first_half
from cute_kernels.sparse_mla.hopper.decode_smem import (
    CLUSTER,
    CURSOR,
    DEQUANT_REGISTERS,
    DIM,
    END,
    EPILOGUE_BARRIER,
    EXTRA,
    FACTOR,
    FIRST,
    FIRST_DEQUANT_THREAD,
    FIRST_PRODUCER_THREAD,
    FIRST_PV_THREAD,
    FP8_KEYS,
    HEADER,
    HEADERS,
    HEADS_BIT,
    KEYS,
    KV_STAGE_BYTES,
    KV_STAGES,
    LAST,
    LAST_SLAB,
    ODD,
    OWN_HEADS,
    P_BYTES,
    P_STAGES,
    PARTS,
    PING_PONG,
    PRODUCER_REGISTERS,
    PV_REGISTERS,
    ROWS,
    S_PARTIAL_BYTES,
    SLAB_ROW_BYTES,
    SOFTMAX_BARRIER,
    SOFTMAX_REGISTERS,
    TARGET,
    WARP_KEYS,
    WORDS_BYTES,
    Bars,
    RecordPart,
    Smem,
    pv_thread,
    smem_bytes,
    smem_parts,
)
from cute_kernels.sparse_mla.hopper.planner import THREADS, Planner
from cute_kernels.sparse_mla.kernel_args import DecodeArgs, DecodeKernelKey, fake_decode
from cute_kernels.sparse_mla.params import (
    NEG_MAX,
    RESCALE_THRESHOLD,
    IndexList,
    KVSources,
    Output,
    Query,
    TileScheduler,
    out_scale_of,
    tiles_of,
)

# ---- producer

NEVER = 2**30


@dataclass(frozen=True)
class Producer:
    """The producer warpgroup: goes through the tiles of the cluster's work tiles, finds the row of each key and has it
    copied. Behind the last work tile come two tiles marked END.

    Two threads have a key: both load its index, then one has its row copied, the other its scales.

    Each warp keeps where it is in shared memory, at `cursor`, since registers are scarce:

        tile, end (of the work tile), tiles of the first list, work tile
        live columns of both lists, length of the next work tile's first list, first tile of the work tile, ODD in the
        sign bit
        addresses of the work tile's rows of both lists
        heads of the work tile, length of the next one's extra list, address of the work tile's queries

    config   DecodeKey or what else has heads, second, parts and has_two_formats: decode_swap_ab.py has its records
             copied by this role, too
    constant_lists
             as of DecodeArgs: if it is not 0, the role begins before the kernel ahead has ended
    """

    config: Any
    bars: Any
    smem: Any
    rank: Any
    scheduler: TileScheduler
    q: Query
    sources: KVSources
    thread: Any
    cursor: Any
    constant_lists: Any = 0
    halves: Any = None

    @cute.jit
    def run(self) -> None:
        """Fill the FP8 ring."""
        scheduler = self.scheduler
        self.copy_lengths_async(scheduler.begin())
        self.enter(scheduler.begin(), Int32(0))
        self.copy_lengths_async(scheduler.after(scheduler.begin()))
        if const_expr(self.config.second != "none"):
            self.wait_for_index()
        index = self.load_index()
        if const_expr(not self.config.has_two_formats):
            # rows may be the kernel ahead's
            cute.arch.griddepcontrol_wait()
        number, ends = Int32(0), Int32(0)
        while ends < PING_PONG:
            tile, end, tiles0, work_tile = ptx.load_shared_128(self.cursor)
            first = ptx.load_shared_s32(self.cursor + 28)
            heads, _, low, high = ptx.load_shared_128(self.cursor + 48)
            odd = Int32(ODD) if first < 0 else Int32(0)
            flags = odd | (Int32(FIRST) if tile == first & 0x7FFFFFFF else Int32(0))
            flags = flags | (Int32(LAST) if tile == end - 1 else Int32(0))
            is_first = tile < tiles0
            if const_expr(self.config.has_two_formats):
                flags = flags if is_first else flags | EXTRA
            if end == NEVER:
                flags = Int32(END)
                ends = ends + 1
            if tile == end - 1:
                self.enter(scheduler.after(work_tile), odd ^ ODD)
            else:
                cute.arch.sync_warp()
                ptx.store_shared_s32(self.cursor, tile + 1)
                cute.arch.sync_warp()
            is_valid, source = self.resolve_row(index, tile, tiles0)
            if const_expr(self.config.has_two_formats):
                if number == 0:
                    self.wait_for_index()
            # on its way while rows are copied; into the register just served, as a move would wait for it
            index = self.load_index()
            header = flags | heads << HEADS_BIT, work_tile, low, high
            self.copy_tile_async(is_valid, source, header, number, is_first)
            if flags & LAST != 0:
                self.copy_lengths_async(scheduler.after(scheduler.after(work_tile)))
            number = number + 1

    @cute.jit
    def run_row(self) -> None:
        """Fill the FP8 ring, where a cluster has one work tile, or a half of one: see decode_halves.py. Of the cursor,
        24 is the tile that a second half begins with, or 0."""
        self.copy_lengths_async(self.scheduler.begin())
        self.enter(self.scheduler.begin(), Int32(0))
        if const_expr(self.config.second != "none"):
            self.wait_for_index()
        index = self.load_index()
        cute.arch.griddepcontrol_wait()
        number, ends = Int32(0), Int32(0)
        while ends < PING_PONG:
            tile, end, tiles0, work_tile = ptx.load_shared_128(self.cursor)
            half = ptx.load_shared_s32(self.cursor + 24)
            heads, _, low, high = ptx.load_shared_128(self.cursor + 48)
            flags = Int32(FIRST) if tile == 0 or tile == half else Int32(0)
            flags = flags | (Int32(LAST) if tile == end - 1 else Int32(0))
            if half != 0:
                flags = flags | (Int32(JOIN) if tile == end - 2 else Int32(0))
                if tile == half - 1:
                    ptx.wait_mbarrier((self.bars.q_done + RANKED).toint(), Int32(0))
                    is_helped = ptx.load_shared_s32(self.smem.dealt) != 0
                    flags = flags | (Int32(KEEP | STOP) if is_helped else Int32(KEEP))
            if end == NEVER:
                flags = Int32(END)
                ends = ends + 1
            cute.arch.sync_warp()
            if flags & (LAST | STOP) != 0:
                ptx.store_shared_64(self.cursor, tile + 1, Int32(NEVER))
                ptx.store_shared_64(self.cursor + 16, Int32(0), Int32(0))
                if flags & STOP != 0:
                    ptx.store_shared_s32(self.cursor + 24, Int32(0))
            else:
                ptx.store_shared_s32(self.cursor, tile + 1)
            cute.arch.sync_warp()
            is_valid, source = self.resolve_row(index, tile, tiles0)
            index = self.load_index()
            header = flags | heads << HEADS_BIT, work_tile, low, high
            self.copy_tile_async(is_valid, source, header, number, tile < tiles0)
            number = number + 1
        if self.thread == 0 and ptx.load_shared_s32(self.cursor + 24) != 0:
            work_tile = ptx.load_shared_s32(self.cursor + 12)
            self.halves.copy_async(work_tile, self.rank, self.scheduler, self.bars, self.smem, number - PING_PONG)
        cute.arch.sync_warp()

    @cute.jit
    def wait_for_index(self) -> None:
        """Wait for the kernel ahead, unless the next tile's list is a constant one."""
        tile, _, tiles0, _ = ptx.load_shared_128(self.cursor)
        if self.constant_lists < 2 and tile >= tiles0:
            cute.arch.griddepcontrol_wait()

    @cute.jit
    def enter(self, work_tile: Any, odd: Any) -> None:
        """Go to a work tile's first tile."""
        scheduler, sources = self.scheduler, self.sources
        tile, end, tiles0, live0, live1, heads = (Int32(number) for number in (0, NEVER, 0, 0, 0, 0))
        row0, row1, queries = self.q.base, self.q.base, self.q.base
        half = Int32(0)
        if scheduler.has(work_tile):
            batch, token, split_idx, head_group = scheduler.coords(work_tile)
            first = head_group * self.config.heads
            queries = self.q.at(batch, token, first) + self.rank * (DIM * 2)
            heads = cutlass.min(self.q.heads - first, self.config.heads)
            row0, row1 = sources.indices.row(batch, token), sources.extra_indices.row(batch, token)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            live0 = self.live(sources.indices, sources.indices.columns, 24)
            if const_expr(self.config.second != "none"):
                columns = sources.extra_indices.columns
                if const_expr(self.config.second == "dense"):
                    columns = columns * sources.extra_cache.rows.divisor
                live1 = self.live(sources.extra_indices, columns, 52)
            self.prefetch_queries(queries, heads)
            tiles0 = tiles_of(live0)
            tiles = tiles0 + tiles_of(live1)
            tile, end = Int32(0), tiles
            if scheduler.splits.divisor != 1:
                tile, end = scheduler.tiles(split_idx, tiles)
            if end <= tile:
                # nothing to attend to is a tile of skipped keys
                end = tile + 1
                live0, live1 = Int32(0), Int32(0)
            if const_expr(self.halves is not None):
                half = first_half(tiles)
                tile = half if self.halves.is_helper(scheduler) else tile
        cute.arch.sync_warp()
        ptx.store_shared_128(self.cursor, (tile, end, tiles0, work_tile))
        first = tile | (Int32(-(2**31)) if odd != 0 else Int32(0))
        ptx.store_shared_128(self.cursor + 16, (live0, live1, half, first))
        ptx.store_shared_128(self.cursor + 32, (*ptx.halves(row0), *ptx.halves(row1)))
        ptx.store_shared_128(self.cursor + 48, (heads, Int32(0), *ptx.halves(queries)))
        cute.arch.sync_warp()

    @cute.jit
    def prefetch_queries(self, queries: Any, heads: Any) -> None:
        """L2 has this CTA's part of the work tile's queries by the time they are wanted."""
        for line in cutlass.range(self.thread, heads * 4, 128, unroll=1):
            ptx.prefetch_l2(queries + Int64(line >> 2) * self.q.head + (line & 3) * 128, None)

    @cute.jit
    def copy_lengths_async(self, work_tile: Any) -> None:
        """Start to copy how many columns a work tile has; L2 has the first of them by the time they are wanted."""
        scheduler, sources = self.scheduler, self.sources
        if scheduler.has(work_tile):
            batch, token, _, _ = scheduler.coords(work_tile)
            self.copy_length_async(sources.indices, batch, token, 0, 24)
            if const_expr(self.config.second != "none"):
                self.copy_length_async(sources.extra_indices, batch, token, KEYS, 52)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_length_async(
        self, indices: IndexList, batch: Any, token: Any, first_thread: cutlass.Constexpr, offset: cutlass.Constexpr
    ) -> None:
        """Of a list, to that offset of the cursor. A thread of 64 from the first on asks for a line of its columns."""
        row = indices.row(batch, token)
        line = self.thread - first_thread
        ptx.prefetch_l2(row + Int64(line) * 128, line >= 0 and line < KEYS and line * 32 < indices.columns)
        if indices.lengths != 0 and self.thread % 32 == 0:
            element = Int64(batch) * indices.lengths_batch + Int64(token) * indices.lengths_token
            ptx.copy_async_32(self.cursor + offset, indices.lengths + element * 4)

    @cute.jit
    def live(self, indices: IndexList, columns: Any, offset: cutlass.Constexpr) -> Any:
        """How many columns count."""
        count = columns
        if indices.lengths != 0:
            count = cutlass.max(cutlass.min(ptx.load_shared_s32(self.cursor + offset), columns), 0)
        return count

    @property
    def key(self) -> Any:  # the thread's, in a tile
        return self.thread // 32 * WARP_KEYS + self.thread % WARP_KEYS

    @cute.jit
    def load_index(self) -> Any:
        """Load the key's index in the next tile, of a dense list its page; -1 where there is none."""
        tile, _, tiles0, _ = ptx.load_shared_128(self.cursor)
        live, live1 = ptx.load_shared_64(self.cursor + 16)
        low, high, low1, high1 = ptx.load_shared_128(self.cursor + 32)
        column = tile * KEYS + self.key
        element = column
        if const_expr(self.config.second != "none"):
            is_first = tile < tiles0
            column = column if is_first else column - tiles0 * KEYS
            live, low, high = (live if is_first else live1), (low if is_first else low1), (high if is_first else high1)
            element = column
            if const_expr(self.config.second == "dense"):
                page, _ = divmod(column, self.sources.extra_cache.rows)
                element = column if is_first else page
        return ptx.load_global_s32_where(column < live, ptx.pair(low, high) + Int64(element) * 4)

    @cute.jit
    def resolve_row(self, index: Any, tile: Any, tiles0: Any) -> tuple[Any, Any]:
        """Whether there is a key of this index, and where the thread's share of it is: its row or its scales."""
        cache = self.sources.cache
        base, stride, pages = cache.base, cache.page_stride, cache.pages
        known = cutlass.max(index, Int32(0))
        page, inside = divmod(known, cache.rows)
        rows = cache.rows.divisor
        if const_expr(self.config.second != "none"):
            is_first, extra = tile < tiles0, self.sources.extra_cache
            base, stride = (base if is_first else extra.base), (stride if is_first else extra.page_stride)
            pages, rows = (pages if is_first else extra.pages), (rows if is_first else extra.rows.divisor)
            if const_expr(self.config.second == "dense"):
                known = (tile - tiles0) * KEYS + self.key
            extra_page, extra_inside = divmod(known, extra.rows)
            if const_expr(self.config.second == "dense"):
                extra_page = index
            page, inside = (page if is_first else extra_page), (inside if is_first else extra_inside)
        is_valid = index >= 0 and page < pages
        parts = self.config.parts
        row, scales = parts[0].offsets(inside, rows, self.rank)
        if const_expr(self.config.has_two_formats):
            is_first = tile < tiles0
            extra_row, extra_scales = parts[1].offsets(inside, rows, self.rank)
            row, scales = (row if is_first else extra_row), (scales if is_first else extra_scales)
        return is_valid, base + Int64(page) * stride + Int64(row if self.has_row else scales)

    @property
    def has_row(self) -> Any:
        """Of a key's two threads, one has its row copied, the other its scales."""
        return self.thread % 32 < WARP_KEYS

    @cute.jit
    def copy_tile_async(self, is_valid: Any, source: Any, header: Any, number: Any, is_first: Any) -> None:
        """Start to copy the cluster's tile of that number, once its stages are empty. is_first: of the first list"""
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        piece = 2 * number + warp // 2
        (stage, phase), key = self.bars.fp8.place(piece), self.key % FP8_KEYS
        full = self.bars.fp8.full(stage)
        self.bars.fp8.wait_empty(stage, phase)
        parts = self.config.parts
        row_bytes = parts[0].row_bytes(self.rank)
        if const_expr(self.config.has_two_formats):
            row_bytes = row_bytes if is_first else parts[1].row_bytes(self.rank)
        valid = cute.arch.vote_ballot_sync(is_valid) & (2**WARP_KEYS - 1)
        if self.thread % 32 == 0:
            header_at = self.smem.header + (number & HEADERS - 1) * HEADER
            ptx.store_shared_s32(header_at + 16 + warp * 4, ~valid)
            if warp == 0:
                ptx.store_shared_128(header_at, header)
            cute.arch.mbarrier_arrive_and_expect_tx(full, cute.arch.popc(valid) * row_bytes)
        if const_expr(self.config.has_two_formats):
            if number == 0:
                # Not ahead of the loop: the compiler would keep more in registers than there are.
                cute.arch.griddepcontrol_wait()
            if is_first:
                self.copy_share_async(parts[0], is_valid, source, stage, key, row_bytes, full)
            else:
                self.copy_share_async(parts[1], is_valid, source, stage, key, row_bytes, full)
        else:
            self.copy_share_async(parts[0], is_valid, source, stage, key, row_bytes, full)

    @cute.jit
    def copy_share_async(
        self,
        part: cutlass.Constexpr,
        is_valid: Any,
        source: Any,
        stage: Any,
        key: Any,
        row_bytes: Any,
        full: Any,
    ) -> None:
        """Start to copy the thread's share of a key: its row or its scales."""
        if self.has_row:
            if is_valid:
                target = self.smem.fp8 + stage * part.stage + key * part.pitch
                ptx.copy_bulk(target, source, row_bytes, full.toint())
        elif const_expr(part.scale_bytes == 0):
            cute.arch.mbarrier_arrive(full)
        else:
            source = source if is_valid else self.sources.cache.base
            size = const_expr(part.scale_bytes)
            target = part.scales_at(self.smem, stage, key)
            ptx.copy_async_or_zero(target, source, size, Int32(size) if is_valid else Int32(0))
            cute.arch.cp_async_mbarrier_arrive_noinc(full)


# ---- MMA and softmax

HELD = OWN_HEADS * KEYS // 32
"""Scores of a tile that a thread does the softmax of: of every 8 keys, two."""


@dataclass(frozen=True)
class QkSoftmax:
    """A QK and softmax warpgroup: takes every second tile, from `warpgroup` on.

    A warp has 16 heads, as tensor cores give them, and does the softmax of 8: a thread then has 16 keys of one head.

    The two warpgroups hand the running maxima and sums to each other, warp by warp. Maxima move only when a head's
    outgrow theirs by 2^8: sums and O are relative to them, and until they move no thread asks what the others' are.

    mma   Q K^T, and the one that adds
    k     [64 keys, 256, stages]
    """

    config: DecodeKey
    bars: Bars
    smem: Smem
    rank: Any
    scheduler: TileScheduler
    q: Query
    out: Output
    sink: Any
    scale_log2: Any
    thread: Any
    warpgroup: Any
    mma: tuple[Any, Any]
    q_tile: Any
    k: Any
    halves: Any = None

    @cute.jit
    def run(self) -> None:
        """Give both CTAs' PV the P of every second tile."""
        config, bars, scheduler, q = self.config, self.bars, self.scheduler, self.q
        lane = self.thread % 32
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        part = self.mma[0].get_slice(self.thread)
        q_parts = self.mma[0].make_fragment_A(part.partition_A(self.q_tile))
        k_parts = self.mma[0].make_fragment_B(part.partition_B(self.k))
        s = cute.make_rmem_tensor(part.partition_shape_C((ROWS, KEYS)), Float32)
        scores = cute.make_rmem_tensor((HELD,), Float32)
        if self.warpgroup == 0 and scheduler.has(scheduler.begin()):
            batch, token, _, head_group = scheduler.coords(scheduler.begin())
            first = head_group * config.heads
            queries = q.at(batch, token, first) + self.rank * (DIM * 2)
            self.copy_q_async(queries, cutlass.min(q.heads - first, config.heads), scheduler.begin(), warp, lane)
        tile = self.warpgroup
        flags, work_tile, low, high = self.wait_header(tile)
        while flags & END == 0:
            if const_expr(self.halves is None):
                if flags & FIRST != 0 and tile > 0:
                    # the queries before have served: all warps are past their products
                    ptx.wait_mbarrier((bars.q_done + warp).toint(), Int32(0) if flags & ODD != 0 else Int32(1))
                    cute.arch.barrier(barrier_id=SOFTMAX_BARRIER + self.warpgroup, number_of_threads=128)
                    self.copy_q_async(ptx.pair(low, high), flags >> HEADS_BIT, work_tile, warp, lane)
            square = None
            if const_expr(q.norm is not None):
                square = self.load_square(work_tile, flags >> HEADS_BIT, warp, lane)
            is_q_done = None
            if const_expr(self.halves is None):
                ptx.wait_mbarrier(bars.q.toint(), Int32(1) if flags & ODD != 0 else Int32(0))
            else:
                ptx.wait_mbarrier(bars.q.toint(), Int32(0))
            self.multiply(s, q_parts, k_parts, tile & KV_STAGES - 1)
            if const_expr(self.halves is None):
                is_q_done = flags & LAST != 0 and scheduler.has(scheduler.after(work_tile))
            self.send_s(s, scores, tile, is_q_done, warp)
            self.softmax(scores, tile, flags, work_tile, square)
            tile = tile + PING_PONG
            flags, work_tile, low, high = self.wait_header(tile)

    @cute.jit
    def copy_q_async(self, queries: Any, heads: Any, work_tile: Any, warp: Any, lane: Any) -> None:
        """Start to copy a work tile's queries. Here a warp does a slab, 4 heads at a time."""
        if const_expr(self.q.norm is not None):
            self.copy_raw_q(queries, heads, work_tile)
        else:
            for number in cutlass.range(self.config.warps * 4, unroll=4):
                head = number * 4 + lane // 8
                source = queries + Int64(cutlass.min(head, heads - 1)) * self.q.head + warp * SLAB_ROW_BYTES
                target = self.smem.q + (warp * ROWS + head) * SLAB_ROW_BYTES
                ptx.copy_async_128_once(target + ((lane % 8) ^ (head % 8)) * 16, source + lane % 8 * 16)
            cute.arch.cp_async_mbarrier_arrive_noinc(self.bars.q)

    @cute.jit
    def copy_raw_q(self, queries: Any, heads: Any, work_tile: Any) -> None:
        """Copy a work tile's queries, and rotate their rotary columns, which come first. A thread has the same chunk of
        every 16th head, of each slab, so that all that it rotates has the same four angles."""
        head, chunk = self.thread // 8, self.thread % 8
        target = self.smem.q + head * SLAB_ROW_BYTES + (chunk ^ (head % 8)) * 16
        row, _ = self.scheduler.row(work_tile)
        angles_at = self.q.norm.rotation.angles_at(row) + chunk * 16
        sources = [
            queries + Int64(cutlass.min(head + 16 * i, heads - 1)) * self.q.head + chunk * 16
            for i in range(self.config.warps)
        ]
        for slab in (LAST_SLAB, *range(LAST_SLAB)):
            for i in range_constexpr(self.config.warps):
                source_at = sources[i] + slab * SLAB_ROW_BYTES
                ptx.copy_async_128_once(target + (slab * ROWS + 16 * i) * SLAB_ROW_BYTES, source_at)
            if const_expr(slab == LAST_SLAB):
                cute.arch.cp_async_commit_group()
        cute.arch.cp_async_commit_group()
        if self.rank != 0:
            self.rotate_q(target + LAST_SLAB * ROWS * SLAB_ROW_BYTES, angles_at)
        cute.arch.cp_async_wait_group(0)
        # whoever lets tensor cores read the queries fences
        cute.arch.mbarrier_arrive(self.bars.q)

    @cute.jit
    def rotate_q(self, chunks_at: Any, angles_at: Any) -> None:
        """Rotate the thread's chunks of the rotary columns, while other slabs are still on their way. All of them have
        the same columns, and their angles are at `angles_at`."""
        cosines = ptx.load_global_128_again(angles_at)
        sines = ptx.load_global_128_again(angles_at + HALF_TABLE_BYTES)
        cute.arch.cp_async_wait_group(1)
        for i in range_constexpr(self.config.warps):
            chunk_at = chunks_at + 16 * i * SLAB_ROW_BYTES
            words = ptx.load_shared_128(chunk_at)
            rotated = []
            for j in range_constexpr(4):
                angle = cosines[j].bitcast(Float32), sines[j].bitcast(Float32)
                rotated.append(ptx.bf16x2(*rotate_pair(bf16_low(words[j]), bf16_high(words[j]), *angle)))
            ptx.store_shared_128(chunk_at, rotated)

    @cute.jit
    def load_square(self, work_tile: Any, heads: Any, warp: Any, lane: Any) -> Any:
        """Load one of the four sums of squares of the thread's head, of which each lane of a quad has one; for every
        tile anew: a register less than to keep what they come to."""
        norm = self.q.norm
        row, head_group = self.scheduler.row(work_tile)
        head = cutlass.min(warp * 16 + self.rank * OWN_HEADS + lane // 4, heads - 1)
        square_at = norm.squares + Int64(row) * norm.row_stride
        square_at = square_at + (head_group * self.config.heads + head) * 16 + lane % 4 * 4
        return ptx.load_global_s32_in_order(square_at, is_shared=True)

    @cute.jit
    def wait_header(self, tile: Any) -> Any:
        """A tile's header, once the tile is there."""
        self.bars.kv.wait_full(*self.bars.kv.place(tile))
        return ptx.load_shared_128(self.smem.header + (tile & HEADERS - 1) * HEADER)

    @cute.jit
    def multiply(self, s: Any, q_parts: Any, k_parts: Any, stage: Any) -> None:
        """Start s = Q K^T of this CTA's columns."""
        if const_expr(self.config.raw):
            # the first product does not read s, which the assembler does not know: without it 32 registers would be
            # taken all the time, and some numbers spilled
            s.fill(0.0)
        # of what a dequantizer stored in the ordinary way
        cute.arch.fence_view_async_shared()
        warpgroup.fence()
        for step in range_constexpr(DIM // 16):
            chosen = self.mma[0 if const_expr(step == 0) else 1]
            cute.gemm(chosen, s, q_parts[None, None, step], k_parts[None, None, step, stage], s)
        warpgroup.commit_group()

    @cute.jit
    def send_s(self, s: Any, scores: Any, tile: Any, is_q_done: Any, warp: Any) -> None:
        """Once S of a tile is there keep that of this CTA's heads, and send the other CTA that of its own.

        is_q_done   the work tile's queries have served, and there is a work tile behind it; None: there is none
        """
        bars = self.bars
        warpgroup.wait_group(0)
        if const_expr(is_q_done is not None):
            if is_q_done and self.thread % 32 == 0:
                cute.arch.mbarrier_arrive(bars.q_done + warp)
        buffer = tile & PING_PONG - 1
        barrier = bars.s_partial + buffer
        # where it goes the other CTA's PV has found P
        bars.p.wait_empty(*bars.p.place(tile))
        if self.thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.config.warps * 32 * HELD * 4)
        if warp < self.config.warps:
            target = ptx.map_shared(self.smem.s_partial + buffer * S_PARTIAL_BYTES + pv_thread() * 16, self.rank ^ 1)
            counter = ptx.map_shared(barrier.toint(), self.rank ^ 1)
            for i in range_constexpr(HELD // 4):
                words = []
                for j in range_constexpr(4):
                    first, second = (s[8 * i + 4 * (j // 2) + 2 * half + j % 2] for half in range(2))
                    scores[4 * i + j] = first if self.rank == 0 else second
                    words.append((second if self.rank == 0 else first).bitcast(Int32))
                ptx.store_remote_128(target + i * WORDS_BYTES, words, counter)

    @cute.jit
    def softmax(self, scores: Any, tile: Any, flags: Any, work_tile: Any, square: Any) -> None:
        """Give both CTAs' PV a tile's P of this CTA's heads. square: of raw queries, what load_square found."""
        thread, rank, bars, smem = self.thread, self.rank, self.bars, self.smem
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        stage = tile & P_STAGES - 1
        full = bars.p.full(stage)
        if warp < self.config.warps:
            logit, lse_at = Int32(0), Int64(0)
            if flags & LAST != 0:
                logit, lse_at = self.load_sink_and_publish_target(work_tile, stage, warp)
            scale = self.scale_log2
            if const_expr(square is not None):
                scale = scale * inverse_rms(over_quad(square.bitcast(Float32), ptx.add_rn), self.q.norm.eps)
            is_e2m1 = False
            if const_expr(self.config.has_e2m1):
                is_e2m1 = flags & EXTRA != 0
                scale = scale * Float32(2.0**E2M1_SHIFT) if is_e2m1 else scale
            kept: Any = None
            if const_expr(self.halves is not None):
                head = warp * OWN_HEADS + lane // 4
                kept = self.halves.load(flags, work_tile, rank, head, bars, self.scheduler)
            self.add_s(scores, tile, scale)
            row_max, factor = self.update_row_max(scores, tile, flags, warp, kept)
            base = row_max
            if const_expr(self.config.has_e2m1):
                base = row_max - Float32(E2M1_SHIFT) if is_e2m1 else row_max
            for i in range_constexpr(HELD):
                scores[i] = ptx.exp2(scores[i] - base)
            out_scale, more = Float32(0.0), None
            if const_expr(kept is not None):
                # where both halves meet it is what PV multiplies O of the first one with
                out_scale = ptx.exp2(kept[0] - row_max)
                more = kept[1] * out_scale
            row_sum = self.update_row_sum(scores, tile, flags, factor, warp, more)
            if flags & LAST != 0:
                row_sum = over_quad(row_sum, operator.add)
                out_scale = out_scale_of(row_sum, row_max, logit, self.sink)
            if const_expr(kept is not None):
                self.halves.keep(flags, work_tile, rank, warp * OWN_HEADS + lane // 4, row_max, row_sum)
            counter = ptx.map_shared(full.toint(), rank ^ 1)
            own_at = smem.s_partial + (tile & PING_PONG - 1) * S_PARTIAL_BYTES + pv_thread() * 16
            other_at = ptx.map_shared(smem.p + stage * P_BYTES + pv_thread() * 16, rank ^ 1)
            for i in range_constexpr(2):
                words = [ptx.bf16x2(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]) for j in range(4)]
                ptx.store_remote_128(other_at + i * WORDS_BYTES, words, counter)
                ptx.store_shared_128(own_at + i * WORDS_BYTES, words)
            if lane % 4 == 0:
                factor_at = smem.factor + ((stage * 2 + rank) * (ROWS // 2) + warp * OWN_HEADS + lane // 4) * FACTOR
                # there is nothing before a work tile's first tile
                factors = [(Float32(1.0) if flags & FIRST != 0 else factor).bitcast(Int32), out_scale.bitcast(Int32)]
                ptx.store_remote_64(ptx.map_shared(factor_at, rank ^ 1), factors, counter)
                ptx.store_shared_64(factor_at, *factors)
            if lse_at != 0:
                lse = (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
                lse = Float32(Float32.inf) if row_sum == Float32(0.0) else lse
                ptx.store_global_s32(lse_at, lse.bitcast(Int32))
            cute.arch.sync_warp()
        else:
            # nor do warps without heads run ahead of the others
            ptx.wait_mbarrier((bars.row_max + warp).toint(), (tile & 1) ^ 1)
            barriers.arrive_warp(lane, bars.row_max + warp)
        if thread == 0:
            ptx.store_shared_s32(smem.target + stage * TARGET, flags)
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.config.warps * (P_BYTES // 4 + OWN_HEADS * FACTOR))
        elif lane == 0:
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def add_s(self, scores: Any, tile: Any, scale: Any) -> None:
        """Both CTAs' parts make S, in powers of two."""
        buffer, phase = barriers.place(tile, PING_PONG)
        ptx.wait_mbarrier((self.bars.s_partial + buffer).toint(), phase)
        for i in range_constexpr(HELD // 4):
            words_at = self.smem.s_partial + buffer * S_PARTIAL_BYTES + pv_thread() * 16 + i * WORDS_BYTES
            words = ptx.load_shared_128(words_at)
            for j in range_constexpr(4):
                scores[4 * i + j] = (scores[4 * i + j] + words[j].bitcast(Float32)) * scale
        skipped = ptx.load_shared_128(self.smem.header + (tile & HEADERS - 1) * HEADER + 16)
        if ((skipped[0] | skipped[1] | skipped[2] | skipped[3]) & 0xFFFF) != 0:
            for i in range_constexpr(HELD):
                bit = (skipped[i // 4] >> (self.thread % 4 * 2)) & (1 << (i // 2 % 2 * 8 + i % 2))
                scores[i] = Float32(-Float32.inf) if bit != 0 else scores[i]

    @cute.jit
    def update_row_max(self, scores: Any, tile: Any, flags: Any, warp: Any, kept: Any) -> tuple[Any, Any]:
        """The running maximum of the thread's head, and what to multiply with what is relative to the last one. kept:
        as of Halves.load"""
        lane = self.thread % 32
        largest = pairwise([scores[i] for i in range(HELD)], ptx.max_f32)
        if const_expr(kept is not None):
            largest = ptx.max_f32(largest, kept[0])
        max_at = self.smem.row_max + (warp * OWN_HEADS + lane // 4) * 4
        turn = self.bars.row_max + warp
        # until the tile before has had its turn
        ptx.wait_mbarrier(turn.toint(), (tile & 1) ^ 1)
        row_max = ptx.load_shared_f32(max_at)
        row_max = Float32(NEG_MAX) if flags & FIRST != 0 else row_max
        factor = Float32(1.0)
        if flags & FIRST != 0 or cute.arch.vote_any_sync(largest - row_max > RESCALE_THRESHOLD):
            largest = over_quad(largest, ptx.max_f32)
            moved = largest if largest - row_max > Float32(RESCALE_THRESHOLD) else row_max
            factor = ptx.exp2(row_max - moved)
            row_max = moved
            if lane % 4 == 0:
                ptx.store_shared_f32(max_at, row_max)
        barriers.arrive_warp(lane, turn)
        return row_max, factor

    @cute.jit
    def update_row_sum(self, p: Any, tile: Any, flags: Any, factor: Any, warp: Any, more: Any) -> Any:
        """The running sum of the thread's keys. more: what else belongs to it, or None"""
        own = pairwise([p[i] for i in range(HELD)], operator.add)
        if const_expr(self.config.has_e2m1):
            own = own * Float32(2.0**-E2M1_SHIFT) if flags & EXTRA != 0 else own
        if const_expr(more is not None):
            own = own + more
        sum_at = self.smem.row_sum + self.thread * 4
        turn = self.bars.row_sum + warp
        ptx.wait_mbarrier(turn.toint(), (tile & 1) ^ 1)
        before = ptx.load_shared_f32(sum_at)
        own = own if flags & FIRST != 0 else own + before * factor
        ptx.store_shared_f32(sum_at, own)
        barriers.arrive_warp(self.thread % 32, turn)
        return own

    @cute.jit
    def load_sink_and_publish_target(self, work_tile: Any, stage: Any, warp: Any) -> tuple[Any, Any]:
        """Of a work tile's last tile: the sink's logit of the thread's head, and the address of its log-sum-exp if the
        thread stores it, else 0. Tells the epilogue where rows of O belong."""
        out, scheduler = self.out, self.scheduler
        lane = self.thread % 32
        batch, token, split_idx, head_group = scheduler.coords(work_tile)
        first = head_group * self.config.heads
        head = warp * 16 + self.rank * OWN_HEADS + lane // 4
        heads = cutlass.min(out.heads - first, self.config.heads)
        logit, lse_at = Int32(0), Int64(0)
        if self.sink != 0:
            logit = ptx.load_global_s32_where(head < heads, self.sink + Int64(first + head) * 4)
        if lane % 4 == 0 and head < heads and out.lse.base != 0:
            lse_at = out.lse.of(split_idx, batch, first + head, token)
        if self.thread == 0:
            if const_expr(out.quant is not None):
                row = batch * scheduler.tokens.divisor + token
                ptx.store_shared_128(self.smem.target + stage * TARGET, (Int32(0), heads, row, first))
            else:
                rows = out.base + Int64(split_idx) * out.strides[0] + Int64(batch) * out.strides[1]
                rows = rows + Int64(token) * out.strides[2] + Int64(first) * out.strides[3]
                ptx.store_shared_128(self.smem.target + stage * TARGET, (Int32(0), heads, *ptx.halves(rows)))
        return logit, lse_at


# ---- PV and epilogue

OWN_ROWS = 16
"""Of O, by a warp."""


@dataclass(frozen=True)
class PvEpilogue:
    """The PV and epilogue warpgroup: O += P V, and the results of a work tile.

    Numbers that cost a register while the mainloop runs are computed anew (pv_thread, ptx.rank_again).

    v   [64 keys, 256, stages]
    """

    config: DecodeKey
    bars: Bars
    smem: Smem
    scheduler: TileScheduler
    out: Output
    thread: Any
    pv: Any
    v: Any
    halves: Any = None

    @cute.jit
    def run(self) -> None:
        """Store results."""
        bars, smem, scheduler, out, pv = self.bars, self.smem, self.scheduler, self.out, self.pv
        part = pv.get_slice(self.thread)
        transposed = cute.composition(self.v, cute.make_layout((DIM, KEYS, KV_STAGES), stride=(KEYS, 1, DIM * KEYS)))
        v_parts = pv.make_fragment_B(part.partition_B(transposed))
        p = cute.make_rmem_tensor(part.partition_shape_A((ROWS, KEYS)), BFloat16)
        o = cute.make_rmem_tensor(part.partition_shape_C((ROWS, DIM)), Float32)
        tile, work_tile = Int32(0), scheduler.begin()
        while scheduler.has(work_tile):
            angles = (Int32(0), Int32(0))
            if const_expr(out.quant is not None):
                # there is time: the first tile's P is not there yet
                batch, token, _, _ = scheduler.coords(work_tile)
                angles = out.quant.angles(batch * scheduler.tokens.divisor + token, pv_thread() % 32)
            if const_expr(self.halves is None):
                o.fill(0.0)
            flags, lasts = Int32(0), const_expr(LAST if self.halves is None else LAST | STOP)
            while flags & lasts == 0:
                (buffer, phase), stage = bars.p.place(tile), tile & KV_STAGES - 1
                bars.p.wait_full(buffer, phase)
                flags = ptx.load_shared_s32(smem.target + buffer * TARGET)
                factors = self.load_factors(buffer * ROWS + pv_thread() // 32 * OWN_HEADS + pv_thread() % 32 // 4)
                if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
                    wgmma.scale_rows(o, factors)
                if const_expr(self.halves is not None):
                    if flags & JOIN != 0:
                        place = buffer * ROWS + pv_thread() // 32 * OWN_HEADS + pv_thread() % 32 // 4
                        stage_at = smem.kv + ((tile + 2) & KV_STAGES - 1) * KV_STAGE_BYTES
                        self.halves.add_o(o, self.load_factors(place, 4), stage_at, work_tile, bars)
                words = cute.recast_tensor(p, Int32)
                own_at = smem.s_partial + (tile & PING_PONG - 1) * S_PARTIAL_BYTES + pv_thread() * 16
                other_at = smem.p + buffer * P_BYTES + pv_thread() * 16
                rank = ptx.rank_again()
                for half in range_constexpr(2):
                    half_at = own_at if rank == half else other_at
                    for i in range_constexpr(2):
                        four = ptx.load_shared_128(half_at + i * WORDS_BYTES)
                        for j in range_constexpr(4):
                            words[8 * i + 2 * j + half] = four[j]
                # of what the dequantizers stored in the ordinary way
                cute.arch.fence_view_async_shared()
                warpgroup.fence()
                if const_expr(self.halves is not None):
                    # of a row or a half of it: nothing is to be cleared then, and cleared registers would be moved
                    pv.set(warpgroup.Field.ACCUMULATE, flags & FIRST == 0)
                for step in range_constexpr(KEYS // 16):
                    cute.gemm(pv, o, p[None, None, step], v_parts[None, None, step, stage], o)
                    pv.set(warpgroup.Field.ACCUMULATE, True)
                warpgroup.commit_group()
                if flags & LAST == 0:
                    # it is in registers
                    self.release_p(buffer)
                warpgroup.wait_group(0)
                if flags & LAST != 0:
                    self.store(o, angles, buffer, stage)
                    if const_expr(self.halves is None):
                        self.release_p(buffer)
                cute.arch.sync_warp()
                if pv_thread() % 32 == 0:
                    cute.arch.mbarrier_arrive(bars.kv.empty(stage))
                if const_expr(self.halves is not None):
                    if flags & KEEP != 0:
                        self.halves.keep_o(o, flags, work_tile)
                tile = tile + 1
            work_tile = scheduler.after(work_tile)

    @cute.jit
    def release_p(self, buffer: Any) -> None:
        cute.arch.sync_warp()
        if pv_thread() % 32 == 0:
            for cta in range_constexpr(CLUSTER):
                cute.arch.mbarrier_arrive(self.bars.p.empty(buffer), cta)

    def load_factors(self, place: Any, offset: int = 0) -> list[Any]:
        """Of the thread's two rows, by the place of the first: before a tile, or at 4 behind a work tile's last one."""
        factor_at = self.smem.factor + place * FACTOR + offset
        return [ptx.load_shared_f32(factor_at + half * (ROWS // 2 * FACTOR)) for half in range(2)]

    @cute.jit
    def store(self, o: Any, angles: Any, buffer: Any, stage: Any) -> None:
        """Store this CTA's columns of a work tile's rows of O, or what they are as codes."""
        smem, out = self.smem, self.out
        lane = pv_thread() % 32
        warp = cute.arch.make_warp_uniform(pv_thread() // 32)
        _, heads, low, high = ptx.load_shared_128(smem.target + buffer * TARGET)
        first, size = warp * OWN_ROWS, const_expr(4 if self.config.out_fp32 else 2)
        own = first + lane // 4
        if const_expr(out.quant is None):
            head_stride = out.strides[3]
            target = ptx.pair(low, high) + Int64(first) * head_stride + ptx.rank_again() * (DIM * size)
        factors = self.load_factors(buffer * ROWS + warp * OWN_HEADS + lane // 4, 4)
        if const_expr(out.quant is not None):
            if first < heads:
                out.quant.store(o, factors, angles, low, high + own, heads - own, ptx.rank_again(), lane)
        elif const_expr(self.config.out_fp32):
            for half in range_constexpr(2):
                row = lane // 4 + 8 * half
                row_at = target + Int64(row) * head_stride + lane % 4 * 8
                for i in range_constexpr(DIM // 8):
                    low, high = ((o[4 * i + 2 * half + j] * factors[half]).bitcast(Int32) for j in range(2))
                    ptx.store_global_64(row_at + i * 32, low, high, first + row < heads)
        else:
            # the tile's stage of KV has served: rows are put together there, so that a warp stores a row at a time
            cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=128)
            rows_at = smem.kv + stage * KV_STAGE_BYTES + warp * (OWN_ROWS * DIM * 2)
            matrix_at = rows_at + (lane % 16) * (DIM * 2)
            for pair in range_constexpr(DIM // 16):
                two = []
                for i in range_constexpr(4):
                    element, half = 8 * pair + 4 * (i // 2) + 2 * (i % 2), i % 2
                    two.append(ptx.bf16x2(*(o[element + j] * factors[half] for j in range(2))))
                chunk = (2 * pair + lane // 16) ^ (lane % 8)
                ptx.store_matrices(matrix_at + chunk * 16, two)
            cute.arch.sync_warp()
            for row in cutlass.range(cutlass.min(heads - first, OWN_ROWS), unroll=8):
                eight = ptx.load_shared_128(rows_at + row * (DIM * 2) + (lane ^ (row % 8)) * 16)
                ptx.store_global_128(target + Int64(row) * head_stride + lane * 16, eight)


# ---- kernel


class DecodeKernel:
    """See kernel_args.DecodeArgs."""

    def __init__(self, config: DecodeKey) -> None:
        self.config = config

    @cute.jit
    def launch(self, args: DecodeArgs) -> None:
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        q = args.q
        head_groups = (length(q, 2) + (self.config.heads - 1)) // self.config.heads
        work_tiles = length(q, 0) * length(q, 1) * head_groups * args.splits
        qk = [wgmma.make_mma(BFloat16, 1, KEYS) for _ in range(2)]  # one will accumulate
        # by 64 columns: an instruction with more would need more registers than a thread has before setmaxnreg
        pv = wgmma.make_mma(BFloat16, 1, 64, columns_lie=True, a_source=warpgroup.OperandSource.RMEM)
        kernel = self.kernel(
            args.query(),
            args.sources(),
            args.output()._replace(sink=None, tokens=None),
            args.sink,
            args.scale_log2,
            tuple(cute.fast_divmod_create_divisor_v2(number) for number in (head_groups, args.splits, length(q, 1))),
            args.split_tiles,
            work_tiles,
            args.constant_lists,
            args.halves,
            (*qk, pv),
            (wgmma.swizzled(BFloat16, ROWS, DIM), wgmma.swizzled(BFloat16, KEYS, DIM, KV_STAGES)),
        )
        # of rows that are cut in halves each has a cluster of its own, and others help
        bound = cutlass.max if const_expr(self.config.halves) else cutlass.min
        clusters = bound(args.ctas // CLUSTER, work_tiles)
        kernel.launch(
            grid=[clusters * CLUSTER, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[CLUSTER, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: Query,
        sources: KVSources,
        out: Output,
        sink: Int64,
        scale_log2: Float32,
        divisors: tuple[Any, Any, Any],
        split_tiles: Int32,
        work_tiles: Int32,
        constant_lists: Int32,
        kept_at: Int64 | None,
        mma: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // 128)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        allocator = SmemAllocator()
        q_tile, kv = (
            allocator.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in layouts
        )
        parts = smem_parts()
        others = [
            allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=16)
            for size in list(parts.values())[2:]
        ]
        smem = Smem(*(tensor.iterator.toint() for tensor in (q_tile, kv, *others)))
        bars = Bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
            ptx.store_shared_s32(smem.dealt, Int32(0))
        # of heads that nobody has
        for start, size in ((smem.p, parts["p"] + parts["s_partial"]), (smem.factor, parts["factor"])):
            for i in cutlass.range(thread * 16, size, 16 * THREADS, unroll=1):
                ptx.store_shared_128(start + i, [Int32(0)] * 4)
        config, dealt = self.config, smem.dealt if const_expr(self.config.dealt) else None
        scheduler = TileScheduler(cta // CLUSTER, work_tiles, ctas // CLUSTER, *divisors, split_tiles, dealt)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if const_expr(config.format0 == FP8_DS_MLA.id):
            lists, caches = (sources.indices, sources.extra_indices), (sources.cache, sources.extra_cache)
            is_idle = (group == FIRST_PV_THREAD // 128) & (rank == 0)
            prefetch_first(scheduler, lists, caches, config.second, thread % 128, is_idle)
        qk, pv = mma[:2], mma[2]
        for one in mma[1:]:
            wgmma.accumulate(one)
        if const_expr(config.halves):
            wgmma.overwrite(mma[0])
        if constant_lists == 0:
            cute.arch.griddepcontrol_wait()
        if const_expr(config.dealt):
            planner = Planner(config.heads, config.second, smem.fp8, dealt, rank, scheduler, sources, out, thread)
            if planner.has_room():
                planner.run()
        kept = None
        if const_expr(config.halves):
            kept = Halves(kept_at)
            first = kept.assign(scheduler, sources, config.second, bars, smem.dealt)
            scheduler = scheduler._replace(first=first)
        if group < FIRST_PRODUCER_THREAD // 128:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if group < FIRST_PV_THREAD // 128:
            cute.arch.setmaxregister_decrease(SOFTMAX_REGISTERS)
            QkSoftmax(
                config, bars, smem, rank, scheduler, q, out, sink, scale_log2, thread % 128, group, qk, q_tile, kv, kept
            ).run()
        elif group < FIRST_DEQUANT_THREAD // 128:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            PvEpilogue(config, bars, smem, scheduler, out, thread % 128, pv, kv, kept).run()
        elif group < FIRST_PRODUCER_THREAD // 128:
            cute.arch.setmaxregister_decrease(DEQUANT_REGISTERS)
            number = cute.arch.make_warp_uniform(group - FIRST_DEQUANT_THREAD // 128)
            Dequantizer(config.parts, bars, smem, rank, thread % 128, number).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            cursor = smem.cursor + cute.arch.make_warp_uniform(thread % 128 // 32) * CURSOR
            producer = Producer(
                config, bars, smem, rank, scheduler, q, sources, thread % 128, cursor, constant_lists, kept
            )
            if const_expr(config.halves):
                producer.run_row()
            else:
                producer.run()
        # nobody leaves while the other CTA may still reach for its barriers
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


# ---- key


@dataclass(frozen=True)
class DecodeKey(DecodeKernelKey):
    """What distinguishes one compiled kernel from another.

    heads       of a CTA: 16, 32 or 64; more heads make several head groups, and those of the last may be fewer
    second      how the extra list (list1) names its rows: "none" (there is none), "listed" by slot, "dense" by page
    out_fp32    results are fp32, not bf16
    quantized   results are turned back and become e4m3 codes, see quant_output; not with out_fp32
    raw         queries are normed and rotated, see params.QueryNorm; with out_fp32 or quantized
    dealt       work tiles of unequal length are dealt by the planner; with a second list
    halves      long rows are cut in halves, see decode_halves.py; not with out_fp32 or dealt, over fp8_ds_mla/1
    format0     record format of the first cache: fp8_ds_mla/1, or mxfp8_v41/1 or its split form
    format1     of the second one: also nvfp4_v41/1 or its split form
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.decode"
    tuning: ClassVar[tuple[str, ...]] = ("dealt",)
    ctas_per_work_tile: ClassVar[int] = CLUSTER
    takes_constant_lists: ClassVar[bool] = True
    heads: int = 64
    second: str = "listed"
    out_fp32: bool = False
    quantized: bool = False
    raw: bool = False
    dealt: bool = False
    halves: bool = False
    format0: str = FP8_DS_MLA.id
    format1: str = FP8_DS_MLA.id

    @property
    def parts(self) -> tuple[RecordPart, RecordPart]:
        """Of both caches' records."""
        return PARTS[self.format0], PARTS[self.format1]

    @property
    def has_two_formats(self) -> bool:
        return self.format0 != self.format1

    @property
    def has_e2m1(self) -> bool:
        return PARTS[self.format1].is_e2m1

    @property
    def warps(self) -> int:
        """Of a warpgroup whose rows of S, P and O are not all padding."""
        return -(-self.heads // 16)

    @property
    def name(self) -> str:
        kind = "_raw" * self.raw + "_fp32" * self.out_fp32 + "_quant" * self.quantized + "_dealt" * self.dealt
        kind += "_halves" * self.halves
        if {self.format0, self.format1} != {FP8_DS_MLA.id}:
            kind += "".join(f"_{label_of(kv_format)}" for kv_format in (self.format0, self.format1))
        return f"sparse_mla_decode_h{self.heads}_{self.second}{kind}"

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        own = () if self.out_fp32 else ("cvt.e4m3",) if self.quantized else ("stmatrix",)
        return "wgmma", "bulk.load", "st.async", "barrier.cluster", "mbarrier", "setmaxnreg", *own

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        fakes = fake_decode(
            self.out_fp32, self.format0, self.format1, self.quantized, self.raw, self.takes_constant_lists, self.halves
        )
        return entry_point(DecodeKernel(self).launch, fakes)
