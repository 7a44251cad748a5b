# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode on Hopper (fp8_ds_mla caches): both products by wgmma, KV dequantized on its way to them.

A cluster of two CTAs takes work tiles (params.TileScheduler): a split of a query row's KV, a head group. CTA r of it
has columns 256 r ... 256 r + 255 of Q, K, V and O, so nothing is loaded, converted or multiplied twice; K and V are the
same matrix, the dequantized rows. S = Q K^T needs both: the CTAs send each other their part of S, each does the softmax
of half of the heads, and they send each other those rows of P. Where rows may be of unequal length (DecodeKey.dealt),
all threads of a CTA first run planner.py, which decides on the cluster's work tiles. Warpgroups of a CTA:

    0, 1   QK and softmax, ping-pong    copy Q, S = Q K^T, exchange of S, softmax, exchange of P      QkSoftmax
    2      PV and epilogue              O += P V, out                                                 PvEpilogue
    3, 4   dequantizers, ping-pong      fp8 -> bf16, K and V at once                                  Dequantizer
    5      producer                     indices -> rows, their copies                                 Producer

    indices  gmem --> producer (index, then page and row of each key of a tile)
    rows     gmem --bulk copy--> fp8 ring [4 stages of 32 keys] --+--dequantizers--> KV ring [4 tiles, bf16, swizzled]
    scales   gmem --cp.async---> scale, same stages --------------+                     |                     |
    Q        gmem --cp.async--> q --------------------------------------------wgmma--> S of 256 columns       |
                                      other CTA <-- s_partial (its 8 of 16 heads) <--- |                      |
                                                                                       v softmax              |
                                      other CTA <-- p, factor -------------------------+                      |
                                      own P  --> s_partial, factor --------------------+--> P in registers --wgmma--> O
                                                                                                              |
    out      gmem <--------------------------- by way of the last tile's KV stage ----------------------------+

A tile is 64 keys. Its 256 columns are cut into slabs of 64; a slab of a tile is [64 keys, 128 bytes] of bf16, in the
layout of the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8). perf/notes/decode.md has why,
perf/log/decode.md what was tried.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.convert import bf16_high, bf16_low, bf16_pairs_of_e4m3
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.dsl.tensor import length
from cute_kernels.dsl.transforms import HALF_TABLE_BYTES, rotate_pair
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache.query_norm import inverse_rms
from cute_kernels.sparse_mla.early import prefetch_first
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
)
from cute_kernels.sparse_mla.schedule import MOST_DEALT, TILE

# ---- config

CLUSTER = 2
"""CTAs that share a work tile."""

KEYS = TILE
DIM = 512 // CLUSTER
"""Columns of a CTA."""

SLAB = 64
SLABS = DIM // SLAB
LAST_SLAB = SLABS - 1
"""In CTA 1, the rotary columns."""

ROWS = 64
"""Rows of S, P and O, whatever the heads: what tensor cores take. Fewer heads leave rows of P that are zero and rows of
O that nobody stores; the tensor cores' time for them is there, since dequantization takes longer."""

OWN_HEADS = 8
"""Of every 16 heads: CTA r of the cluster does the softmax of the r-th 8."""

PING_PONG = 2
"""Warpgroups that dequantize, and that do QK and softmax: they take tiles in turn."""

FP8_STAGES, KV_STAGES, P_STAGES = 4, 4, 2
"""32 keys of a tile as the cache has them; tiles of bf16; tiles of P."""

HEADERS = 8
"""At least the tiles that can be on their way from the producer to the softmax."""

FIRST_PV_THREAD, FIRST_DEQUANT_THREAD, FIRST_PRODUCER_THREAD = 256, 384, 640
SOFTMAX_BARRIER, EPILOGUE_BARRIER = 1, 3

SOFTMAX_REGISTERS, PV_REGISTERS, DEQUANT_REGISTERS, PRODUCER_REGISTERS = 72, 176, 64, 32
"""Per thread, in steps of 8; all six warpgroups together have 480, what they are launched with."""


# ---- shared memory

SLAB_BYTES = KEYS * SLAB * 2
SLAB_ROW_BYTES = SLAB * 2
KV_STAGE_BYTES = SLABS * SLAB_BYTES

FP8_KEYS = KEYS // 2
"""Of a piece of a tile, which is a stage of the fp8 ring."""

FP8_PITCH = DIM + SLAB
"""Bytes of a CTA's part of a row, as the cache has it, in CTA 0 and a gap that keeps banks apart; in CTA 1, whose
rotary columns are bf16 already, none."""

FP8_STAGE_BYTES = FP8_KEYS * FP8_PITCH

HEADER = 32
"""Bytes of a tile's header: flags and, from HEADS_BIT on, heads of its work tile; the work tile; address of its
queries. Of every 16 keys, which are skipped."""

HEADS_BIT = 8

FIRST, LAST, END, ODD = 1, 2, 4, 8
"""Flags of a tile: it begins a work tile; it ends one; there is no such tile; its work tile is the cluster's second,
fourth ..."""

CURSOR = 64
"""Bytes of a producer warp's cursor, see Producer."""

FACTOR = 8
"""Bytes of a head's factors: what to multiply O with before a tile, and what behind a work tile's last one."""

TARGET = 16
"""Bytes of a tile's target: flags; of a work tile's last tile, heads that are there, address of their rows of O, or
where codes are stored, the query row and the first head."""

S_PARTIAL_BYTES = ROWS // 2 * KEYS * 4
P_BYTES = ROWS // 2 * KEYS * 2
WORDS_BYTES = 128 * 16
"""Four words of each thread of a warpgroup."""

BARRIERS = 2 * (FP8_STAGES + KV_STAGES + P_STAGES) + PING_PONG + 1 + 4 + 4 + 4


class Smem(NamedTuple):
    """Addresses in shared memory, 32 bits wide; by default sizes in bytes, see smem_parts.
    The first two are 1024-byte aligned.

    q            [4 slabs][64 heads][64] bf16
    kv           [4 stages][4 slabs][64 keys][64] bf16: K, and V
    p            [2 stages][2][128 threads][8] bf16: P of the other CTA's heads, as the threads hold it
    s_partial    [2 warpgroups][4][128 threads][4] fp32: the other CTA's part of S, as the threads hold it;
                 then, where half of it was, P of this CTA's heads, as in p
    fp8          [4][32 keys][FP8_PITCH] parts of rows, as the caches have them
    scale        [4][32 keys] 4 scale bytes
    header       [8] headers of tiles
    cursor       [4 producer warps] where it is
    factor       [2 stages][2 CTAs][4 warps][8] factors
    target       [2 stages] targets
    row_max      [4 warps][8 heads] running maxima
    row_sum      [128 threads] running sums
    dealt        [16] the cluster's work tiles, see TileScheduler
    """

    q: Any = ROWS * DIM * 2
    kv: Any = KV_STAGES * KV_STAGE_BYTES
    p: Any = P_STAGES * P_BYTES
    s_partial: Any = PING_PONG * S_PARTIAL_BYTES
    fp8: Any = FP8_STAGES * FP8_STAGE_BYTES
    scale: Any = FP8_STAGES * FP8_KEYS * 4
    header: Any = HEADERS * HEADER
    cursor: Any = 4 * CURSOR
    factor: Any = P_STAGES * ROWS * FACTOR
    target: Any = P_STAGES * TARGET
    row_max: Any = ROWS // 2 * 4
    row_sum: Any = 128 * 4
    dealt: Any = (1 + MOST_DEALT) * 4


def smem_parts() -> dict[str, int]:
    """Bytes of everything but the barriers, in order."""
    return Smem()._asdict()


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


@dataclass(frozen=True)
class Bars:
    """Two CTAs' mbarriers, and what completes their phases.

    fp8         full: all bytes of 32 keys' rows and scales, and the tile's header are there. empty: dequantizer
                warps have loaded them
    kv          full: dequantizer warps have stored a tile. empty: PV warps are done with it
    p           full: softmax warps have stored their rows of P and their factors, and all bytes of the other CTA's are
                there. empty: both CTAs' PV warps are done with them
    s_partial   of each softmax warpgroup: all bytes of the other CTA's part of S are there
    q           a work tile's queries are there
    q_done      of each softmax warp: a work tile's last Q K^T is done, and another work tile follows
    row_max     of each softmax warp: the running maxima are a tile's
    row_sum     of each softmax warp: the running sums are a tile's
    """

    fp8: barriers.Ring
    kv: barriers.Ring
    p: barriers.Ring
    s_partial: Any
    q: Any
    q_done: Any
    row_max: Any
    row_sum: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        rings = (barriers.Ring.allocate(smem, stages) for stages in (FP8_STAGES, KV_STAGES, P_STAGES))
        return cls(*rings, *(smem.allocate_array(Int64, count) for count in (PING_PONG, 1, 4, 4, 4)))

    def initialize(self) -> None:
        """By one thread; the cluster synchronizes afterwards."""
        # of each producer warp that has keys in it one thread, and the copies of scales
        self.fp8.initialize(2 + FP8_KEYS, 4)
        self.kv.initialize(4, 4)
        self.p.initialize(4, 4 * CLUSTER)
        barriers.initialize(self.s_partial, PING_PONG, 1)
        barriers.initialize(self.q, 1, 128)
        for of_warps in (self.q_done, self.row_max, self.row_sum):
            barriers.initialize(of_warps, 4, 1)
        cute.arch.mbarrier_init_fence()


# ---- producer

WARP_KEYS = 16
"""Of a tile, by a producer warp."""

ROW_BYTES = FP8_DS_MLA.data_bytes
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
    """

    config: DecodeKey
    bars: Bars
    smem: Smem
    rank: Any
    scheduler: TileScheduler
    q: Query
    sources: KVSources
    thread: Any
    cursor: Any

    @cute.jit
    def run(self) -> None:
        """Fill the FP8 ring."""
        self.copy_lengths_async(self.scheduler.begin())
        self.enter(self.scheduler.begin(), Int32(0))
        index = self.load_index()
        number, ends = Int32(0), Int32(0)
        while ends < PING_PONG:
            tile, end, tiles0, work_tile = ptx.load_shared_128(self.cursor)
            first = ptx.load_shared_s32(self.cursor + 28)
            heads, _, low, high = ptx.load_shared_128(self.cursor + 48)
            odd = Int32(ODD) if first < 0 else Int32(0)
            flags = odd | (Int32(FIRST) if tile == first & 0x7FFFFFFF else Int32(0))
            flags = flags | (Int32(LAST) if tile == end - 1 else Int32(0))
            if end == NEVER:
                flags = Int32(END)
                ends = ends + 1
            if tile == end - 1:
                self.enter(self.scheduler.after(work_tile), odd ^ ODD)
            else:
                cute.arch.sync_warp()
                ptx.store_shared_s32(self.cursor, tile + 1)
                cute.arch.sync_warp()
            is_valid, source = self.resolve_row(index, tile, tiles0)
            # on its way while rows are copied; into the register just served, as a move would wait for it
            index = self.load_index()
            self.copy_tile_async(is_valid, source, (flags | heads << HEADS_BIT, work_tile, low, high), number)
            number = number + 1

    @cute.jit
    def enter(self, work_tile: Any, odd: Any) -> None:
        """Go to a work tile's first tile."""
        scheduler, sources = self.scheduler, self.sources
        tile, end, tiles0, live0, live1, heads = (Int32(number) for number in (0, NEVER, 0, 0, 0, 0))
        row0, row1, queries = self.q.base, self.q.base, self.q.base
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
            tiles0 = (live0 + (KEYS - 1)) // KEYS
            tiles = tiles0 + (live1 + (KEYS - 1)) // KEYS
            tile, end = scheduler.tiles(split_idx, tiles)
            if end <= tile:
                # nothing to attend to is a tile of skipped keys
                end = tile + 1
                live0, live1 = Int32(0), Int32(0)
        cute.arch.sync_warp()
        ptx.store_shared_128(self.cursor, (tile, end, tiles0, work_tile))
        first = tile | (Int32(-(2**31)) if odd != 0 else Int32(0))
        ptx.store_shared_128(self.cursor + 16, (live0, live1, Int32(0), first))
        ptx.store_shared_128(self.cursor + 32, (*ptx.halves(row0), *ptx.halves(row1)))
        ptx.store_shared_128(self.cursor + 48, (heads, Int32(0), *ptx.halves(queries)))
        cute.arch.sync_warp()
        self.copy_lengths_async(scheduler.after(work_tile))

    @cute.jit
    def prefetch_queries(self, queries: Any, heads: Any) -> None:
        """L2 has this CTA's part of the work tile's queries by the time they are wanted."""
        for line in cutlass.range(self.thread, heads * 4, 128, unroll=1):
            ptx.prefetch_l2(queries + Int64(line // 4) * self.q.head + line % 4 * 128, None)

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
        row = inside * ROW_BYTES + self.rank * DIM
        scales = rows * ROW_BYTES + inside * 8 + self.rank * 4
        return is_valid, base + Int64(page) * stride + Int64(row if self.has_row else scales)

    @property
    def has_row(self) -> Any:
        """Of a key's two threads, one has its row copied, the other its scales."""
        return self.thread % 32 < WARP_KEYS

    @cute.jit
    def copy_tile_async(self, is_valid: Any, source: Any, header: Any, number: Any) -> None:
        """Start to copy the cluster's tile of that number, once its stages are empty."""
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        piece = 2 * number + warp // 2
        stage, key = piece % FP8_STAGES, self.key % FP8_KEYS
        full = self.bars.fp8.full(stage)
        self.bars.fp8.wait_empty(stage, piece // FP8_STAGES & 1)
        row_bytes = DIM + self.rank * SLAB
        valid = cute.arch.vote_ballot_sync(is_valid) & (2**WARP_KEYS - 1)
        if self.thread % 32 == 0:
            header_at = self.smem.header + number % HEADERS * HEADER
            ptx.store_shared_s32(header_at + 16 + warp * 4, ~valid)
            if warp == 0:
                ptx.store_shared_128(header_at, header)
            cute.arch.mbarrier_arrive_and_expect_tx(full, cute.arch.popc(valid) * row_bytes)
        if self.has_row:
            if is_valid:
                target = self.smem.fp8 + stage * FP8_STAGE_BYTES + key * FP8_PITCH
                ptx.copy_bulk(target, source, row_bytes, full.toint())
        else:
            source = source if is_valid else self.sources.cache.base
            target = self.smem.scale + (stage * FP8_KEYS + key) * 4
            ptx.copy_async_or_zero(target, source, 4, Int32(4) if is_valid else Int32(0))
            cute.arch.cp_async_mbarrier_arrive_noinc(full)


# ---- dequantization

CHUNKS = SLABS + 1
"""16-byte loads of a thread per row: one of each fp8 slab, two of the rotary one."""

STAGE_SLAB_BYTES = FP8_KEYS * SLAB * 2
"""Of 32 keys: from a thread's first row to its second, 32 keys further."""

ONES = 0x7F7F7F7F
"""Scale bytes that say 1."""

LARGE = (-0x7F7F7F80, 0x00808080)
"""Of the scale bytes of a CTA's slabs, the bits that make a scale 2 or more."""

LEAST_POWER, NAN = 0x0040, 0x7FC0
"""bf16 bits of 2^-127, which is subnormal, and of a NaN: scale bytes 0 and 255."""


@dataclass(frozen=True)
class Dequantizer:
    """A dequantizer warpgroup: converts every second tile, from `warpgroup` on, to bf16.

    A thread has a share of two rows of a tile, 32 keys apart: of each, 16 neighbouring fp8 columns of every slab,
    which become two chunks of 16 bytes, or twice 8 rotary ones, which are chunks already.
    """

    bars: Bars
    smem: Smem
    rank: Any
    thread: Any
    warpgroup: Any

    @cute.jit
    def run(self) -> None:
        """Fill every second stage of the KV ring."""
        bars, smem = self.bars, self.smem
        lane = self.thread % 32
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        quad, member = lane // 4, lane % 4
        row = warp * 8 + quad
        raw = cute.make_rmem_tensor((2 * CHUNKS * 4,), Int32)
        scales = cute.make_rmem_tensor((2,), Int32)
        exact = cute.make_rmem_tensor((2,), Int32)
        # where the thread's first chunk lies, if it has 2 m and 2 m + 1, or m and m + 4
        row_at = smem.kv + row * (SLAB * 2)
        fp8_at, rope_at = row_at + ((2 * member ^ quad) << 4), row_at + ((member ^ quad) << 4)
        raw_at, scale_at = smem.fp8 + row * FP8_PITCH + member * 16, smem.scale + row * 4

        # of both pieces of a tile
        fp8_stages = [2 * self.warpgroup, 2 * self.warpgroup + 1]
        tile, flags = self.warpgroup, Int32(0)
        while flags & END == 0:
            for piece in range_constexpr(2):
                bars.fp8.wait_full(fp8_stages[piece], tile // PING_PONG & 1)
                exact[piece] = ptx.load_shared_s32(scale_at + fp8_stages[piece] * (FP8_KEYS * 4))
                self.load(raw, piece, raw_at + fp8_stages[piece] * FP8_STAGE_BYTES)
            stage = tile % KV_STAGES
            header_at = smem.header + tile % HEADERS * HEADER
            bars.kv.wait_empty(stage, tile // KV_STAGES & 1)
            flags = ptx.load_shared_s32(header_at)
            if flags & END == 0:
                skipped = [ptx.load_shared_s32(header_at + 16 + (warp // 2 + 2 * piece) * 4) for piece in range(2)]
                is_large = self.set_scales(scales, exact)
                # the last slab first: once its words, which were loaded last, can be stored, all others are there too;
                # an arrival alone does not wait for loads whose values nobody has used
                last_at = stage * KV_STAGE_BYTES + LAST_SLAB * SLAB_BYTES
                if self.rank != 0:
                    self.move(raw, LAST_SLAB, rope_at + last_at, [word >> (row % WARP_KEYS) for word in skipped])
                else:
                    self.convert(raw, scales, LAST_SLAB, fp8_at + last_at)
                self.release(fp8_stages, lane)
                for slab in range_constexpr(LAST_SLAB):
                    self.convert(raw, scales, slab, fp8_at + stage * KV_STAGE_BYTES + slab * SLAB_BYTES)
                if is_large:
                    self.scale_again(fp8_at + stage * KV_STAGE_BYTES, exact)
                cute.arch.sync_warp()
            # whoever lets tensor cores read the stage fences; where there is no tile the softmax finds the flag
            if lane == 0:
                cute.arch.mbarrier_arrive(bars.kv.full(stage))
            tile = tile + PING_PONG

    @cute.jit
    def release(self, fp8_stages: Any, lane: Any) -> None:
        """The producer may overwrite what the warp has loaded."""
        cute.arch.sync_warp()
        if lane == 0:
            for stage in fp8_stages:
                cute.arch.mbarrier_arrive(self.bars.fp8.empty(stage))

    @cute.jit
    def load(self, raw: Any, piece: cutlass.Constexpr, raw_at: Any) -> None:
        """This thread's share of a row."""
        # in CTA 0 there is no fifth chunk: any will do
        for chunk in (SLABS, *range(SLABS)):
            found = ptx.load_shared_128(raw_at + chunk * SLAB)
            for word in range_constexpr(4):
                raw[4 * (CHUNKS * piece + chunk) + word] = found[word]

    @cute.jit
    def set_scales(self, scales: Any, exact: Any) -> Any:
        """Scale bytes to convert with: those of the rows, or ones if the warp has large ones. Whether it has."""
        for piece in range_constexpr(2):
            scales[piece] = exact[piece]
        large = (scales[0] | scales[1]) & (Int32(LARGE[0]) if self.rank == 0 else Int32(LARGE[1]))
        is_large = cute.arch.vote_any_sync(large != 0)
        if is_large:
            scales.fill(ONES)
        return is_large

    @cute.jit
    def convert(self, raw: Any, scales: Any, slab: cutlass.Constexpr, target: Any) -> None:
        """Store a slab's fp8 columns of the thread's two rows as bf16."""
        for piece in range_constexpr(2):
            factor = ptx.bf16x2_of_ue8m0(scales[piece], slab)
            for chunk in range_constexpr(2):
                first = 4 * (CHUNKS * piece + slab) + 2 * chunk
                words = bf16_pairs_of_e4m3([raw[first + word] for word in range(2)], [factor])
                ptx.store_shared_128((target ^ (16 * chunk)) + piece * STAGE_SLAB_BYTES, words)

    @cute.jit
    def move(self, raw: Any, slab: cutlass.Constexpr, target: Any, skipped: Any) -> None:
        """Store the rotary columns of the thread's two rows."""
        for piece in range_constexpr(2):
            # where nothing was loaded there may be NaN
            mask = (skipped[piece] & 1) - 1
            for chunk in range_constexpr(2):
                words = [raw[4 * (CHUNKS * piece + slab + chunk) + word] & mask for word in range(4)]
                ptx.store_shared_128((target ^ (64 * chunk)) + piece * STAGE_SLAB_BYTES, words)

    @cute.jit
    def scale_again(self, target: Any, exact: Any) -> None:
        """A tile with scales of 2 or more, too large for one product in bf16: it was converted with scales of 1. Scale
        what the thread has stored."""
        for slab in cutlass.range(SLABS - self.rank, unroll=1):
            for piece in range_constexpr(2):
                byte = (exact[piece] >> (slab * 8)) & 0xFF
                power = Int32(LEAST_POWER) if byte == 0 else byte << 7
                factor = (Int32(NAN) if byte == 255 else power) * 0x00010001
                for chunk in range_constexpr(2):
                    words_at = ((target + slab * SLAB_BYTES) ^ (16 * chunk)) + piece * STAGE_SLAB_BYTES
                    words = ptx.load_shared_128(words_at)
                    ptx.store_shared_128(words_at, [ptx.multiply_bf16x2(word, factor) for word in words])


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
            if flags & FIRST != 0 and tile > 0:
                # the queries before have served: all warps are past their products
                ptx.wait_mbarrier((bars.q_done + warp).toint(), Int32(0) if flags & ODD != 0 else Int32(1))
                cute.arch.barrier(barrier_id=SOFTMAX_BARRIER + self.warpgroup, number_of_threads=128)
                self.copy_q_async(ptx.pair(low, high), flags >> HEADS_BIT, work_tile, warp, lane)
            square = None
            if const_expr(q.norm is not None):
                square = self.load_square(work_tile, flags >> HEADS_BIT, warp, lane)
            ptx.wait_mbarrier(bars.q.toint(), Int32(1) if flags & ODD != 0 else Int32(0))
            self.multiply(s, q_parts, k_parts, tile % KV_STAGES)
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
        self.bars.kv.wait_full(tile % KV_STAGES, tile // KV_STAGES & 1)
        return ptx.load_shared_128(self.smem.header + tile % HEADERS * HEADER)

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

        is_q_done   the work tile's queries have served, and there is a work tile behind it
        """
        bars = self.bars
        warpgroup.wait_group(0)
        if is_q_done and self.thread % 32 == 0:
            cute.arch.mbarrier_arrive(bars.q_done + warp)
        buffer = tile % PING_PONG
        barrier = bars.s_partial + buffer
        # where it goes the other CTA's PV has found P
        bars.p.wait_empty(tile % P_STAGES, tile // P_STAGES & 1)
        if self.thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.config.warps * 32 * HELD * 4)
        if warp < self.config.warps:
            target = ptx.map_shared(self.smem.s_partial + buffer * S_PARTIAL_BYTES + self.thread * 16, self.rank ^ 1)
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
        stage = tile % P_STAGES
        full = bars.p.full(stage)
        if warp < self.config.warps:
            logit, lse_at = Int32(0), Int64(0)
            if flags & LAST != 0:
                logit, lse_at = self.load_sink_and_publish_target(work_tile, stage, warp)
            scale = self.scale_log2
            if const_expr(square is not None):
                scale = scale * inverse_rms(over_quad(square.bitcast(Float32), ptx.add_rn), self.q.norm.eps)
            self.add_s(scores, tile, scale)
            row_max, factor = self.update_row_max(scores, tile, flags, warp)
            for i in range_constexpr(HELD):
                scores[i] = ptx.exp2(scores[i] - row_max)
            row_sum = self.update_row_sum(scores, tile, flags, factor, warp)
            out_scale = Float32(0.0)
            if flags & LAST != 0:
                row_sum = over_quad(row_sum, operator.add)
                out_scale = out_scale_of(row_sum, row_max, logit, self.sink)
            counter = ptx.map_shared(full.toint(), rank ^ 1)
            own_at = smem.s_partial + tile % PING_PONG * S_PARTIAL_BYTES + thread * 16
            other_at = ptx.map_shared(smem.p + stage * P_BYTES + thread * 16, rank ^ 1)
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
        buffer = tile % PING_PONG
        ptx.wait_mbarrier((self.bars.s_partial + buffer).toint(), tile // PING_PONG & 1)
        for i in range_constexpr(HELD // 4):
            words_at = self.smem.s_partial + buffer * S_PARTIAL_BYTES + self.thread * 16 + i * WORDS_BYTES
            words = ptx.load_shared_128(words_at)
            for j in range_constexpr(4):
                scores[4 * i + j] = (scores[4 * i + j] + words[j].bitcast(Float32)) * scale
        skipped = ptx.load_shared_128(self.smem.header + tile % HEADERS * HEADER + 16)
        if ((skipped[0] | skipped[1] | skipped[2] | skipped[3]) & 0xFFFF) != 0:
            for i in range_constexpr(HELD):
                bit = (skipped[i // 4] >> (self.thread % 4 * 2)) & (1 << (i // 2 % 2 * 8 + i % 2))
                scores[i] = Float32(-Float32.inf) if bit != 0 else scores[i]

    @cute.jit
    def update_row_max(self, scores: Any, tile: Any, flags: Any, warp: Any) -> tuple[Any, Any]:
        """The running maximum of the thread's head, and what to multiply with what is relative to the last one."""
        lane = self.thread % 32
        largest = pairwise([scores[i] for i in range(HELD)], ptx.max_f32)
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
    def update_row_sum(self, p: Any, tile: Any, flags: Any, factor: Any, warp: Any) -> Any:
        """The running sum of the thread's keys."""
        own = pairwise([p[i] for i in range(HELD)], operator.add)
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
            o.fill(0.0)
            flags = Int32(0)
            while flags & LAST == 0:
                buffer, stage = tile % P_STAGES, tile % KV_STAGES
                bars.p.wait_full(buffer, tile // P_STAGES & 1)
                flags = ptx.load_shared_s32(smem.target + buffer * TARGET)
                factors = self.load_factors(buffer * ROWS + pv_thread() // 32 * OWN_HEADS + pv_thread() % 32 // 4)
                if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
                    wgmma.scale_rows(o, factors)
                words = cute.recast_tensor(p, Int32)
                own_at = smem.s_partial + tile % PING_PONG * S_PARTIAL_BYTES + pv_thread() * 16
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
                for step in range_constexpr(KEYS // 16):
                    cute.gemm(pv, o, p[None, None, step], v_parts[None, None, step, stage], o)
                warpgroup.commit_group()
                if flags & LAST == 0:
                    # it is in registers
                    self.release_p(buffer)
                warpgroup.wait_group(0)
                if flags & LAST != 0:
                    self.store(o, angles, buffer, stage)
                    self.release_p(buffer)
                cute.arch.sync_warp()
                if pv_thread() % 32 == 0:
                    cute.arch.mbarrier_arrive(bars.kv.empty(stage))
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


def pv_thread() -> Any:
    """The thread's number in the PV warpgroup, computed anew."""
    return ptx.thread_again() - FIRST_PV_THREAD


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
            (*qk, pv),
            (wgmma.swizzled(BFloat16, ROWS, DIM), wgmma.swizzled(BFloat16, KEYS, DIM, KV_STAGES)),
        )
        clusters = cutlass.min(args.ctas // CLUSTER, work_tiles)
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
        lists, caches = (sources.indices, sources.extra_indices), (sources.cache, sources.extra_cache)
        is_idle = (group == FIRST_PV_THREAD // 128) & (rank == 0)
        prefetch_first(scheduler, lists, caches, config.second, thread % 128, is_idle)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        for one in mma[1:]:
            wgmma.accumulate(one)
        if const_expr(config.dealt):
            planner = Planner(config.heads, config.second, smem.fp8, dealt, rank, scheduler, sources, out, thread)
            if planner.has_room():
                planner.run()
        if group < FIRST_PV_THREAD // 128:
            cute.arch.setmaxregister_decrease(SOFTMAX_REGISTERS)
            QkSoftmax(
                config, bars, smem, rank, scheduler, q, out, sink, scale_log2, thread % 128, group, mma[:2], q_tile, kv
            ).run()
        elif group < FIRST_DEQUANT_THREAD // 128:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            PvEpilogue(config, bars, smem, scheduler, out, thread % 128, mma[2], kv).run()
        elif group < FIRST_PRODUCER_THREAD // 128:
            cute.arch.setmaxregister_decrease(DEQUANT_REGISTERS)
            number = cute.arch.make_warp_uniform(group - FIRST_DEQUANT_THREAD // 128)
            Dequantizer(bars, smem, rank, thread % 128, number).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            cursor = smem.cursor + cute.arch.make_warp_uniform(thread % 128 // 32) * CURSOR
            Producer(config, bars, smem, rank, scheduler, q, sources, thread % 128, cursor).run()
        # nobody leaves while the other CTA may still reach for its barriers
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


# ---- key


@dataclass(frozen=True)
class DecodeKey(DecodeKernelKey):
    """What distinguishes one compiled kernel from another. Both caches are fp8_ds_mla.

    heads       of a CTA: 16, 32 or 64; more heads make several head groups, and those of the last may be fewer
    second      how the extra list (list1) names its rows: "none" (there is none), "listed" by slot, "dense" by page
    out_fp32    results are fp32, not bf16
    quantized   results are turned back and become e4m3 codes, see quant_output; not with out_fp32
    raw         queries are normed and rotated, see params.QueryNorm; with out_fp32 or quantized
    dealt       work tiles of unequal length are dealt by the planner; with a second list
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.decode"
    tuning: ClassVar[tuple[str, ...]] = ("dealt",)
    ctas_per_work_tile: ClassVar[int] = CLUSTER
    heads: int = 64
    second: str = "listed"
    out_fp32: bool = False
    quantized: bool = False
    raw: bool = False
    dealt: bool = False

    @property
    def warps(self) -> int:
        """Of a warpgroup whose rows of S, P and O are not all padding."""
        return -(-self.heads // 16)

    @property
    def name(self) -> str:
        kind = "_raw" * self.raw + "_fp32" * self.out_fp32 + "_quant" * self.quantized + "_dealt" * self.dealt
        return f"sparse_mla_decode_h{self.heads}_{self.second}{kind}"

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        own = () if self.out_fp32 else ("cvt.e4m3",) if self.quantized else ("stmatrix",)
        return "wgmma", "bulk.load", "st.async", "barrier.cluster", "mbarrier", "setmaxnreg", *own

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        fakes = fake_decode(self.out_fp32, quantized=self.quantized, raw=self.raw)
        return entry_point(DecodeKernel(self).launch, fakes)
