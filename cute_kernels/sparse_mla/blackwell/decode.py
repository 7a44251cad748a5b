# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode on Blackwell (sm_100a, sm_103a): both products by tcgen05, KV dequantized on its way to them.

Compiled, inspected and run in a model of the GPU; nobody has run it on one.

A CTA takes work tiles (params.TileScheduler): a split of a query row's KV, a head group of 64 heads or fewer. (Of more
heads a cluster of two CTAs has a work tile: decode_2cta.py.) Warps of a CTA:

    0 .. 3   Q, softmax, correction of O, epilogue            Softmax, Epilogue
    4 .. 7   dequantizers: codes become bf16, K and V         Dequantizer
    8        MMA: one thread starts S = Q K^T and O += P V    Mma
    9, 10    KV loaders: codes; rotary columns                KVLoader
    11       index loader: which rows a tile is made of       IndexLoader

    indices  gmem --> index loader --rows, headings [4 slots]--> KV loaders
    KV       gmem --TMA gather4, codes--> raw [2 tiles] --dequantizers--> stages [2 tiles, bf16, swizzled] --> MMA
                  --TMA gather4, rotary columns-------------------------> last slab of a stage
    scales   gmem --cp.async, index loader--> scales [4 slots] --> dequantizers
    Q        gmem --> shared memory --> slabs 0 to 5 in tensor memory, 6 and 7 in shared memory
    S        tensor memory [2 buffers] --softmax--> P, shared memory [2 buffers] --> MMA
    O        tensor memory, all 512 columns of 64 heads --(rescaled where a maximum moves)--> shared memory --> gmem

A tile is 64 keys. Its 512 columns are cut into slabs of 64: a slab is [64 keys, 128 bytes] of bf16 in the layout of the
128-byte swizzle, 16-byte chunk c of row r at chunk c ^ (r % 8). A tile is the second operand of both products: of S = Q
K^T with keys as rows, K-major, and of O += P V with columns as rows, MN-major, from the same bytes.

Products have M = 64 and the weight-stationary form, which fills all 128 lanes of tensor memory: lane h and lane 64 + h
are both head h. The first half of a product's columns is in lanes 0 to 63, the second half in lanes 64 to 127. A first
operand in tensor memory is there twice, in both halves of the lanes.
perf/notes/blackwell_decode.md has why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, umma
from cute_kernels.dsl.convert import bf16_pairs_of_e4m3x4
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.dsl.tensor import gathered_rows, length, stride_bytes
from cute_kernels.dsl.umma import Operand
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, NOPE_DIM
from cute_kernels.runtime.work import Shape, Work
from cute_kernels.sparse_mla.kernel_args import DecodeArgs, DecodeKernelKey, fake_decode
from cute_kernels.sparse_mla.params import (
    EXTRA,
    NEG_MAX,
    RESCALE_THRESHOLD,
    KVCache,
    Output,
    Query,
    TileScheduler,
    live_of_both,
    out_scale_of,
)
from cute_kernels.sparse_mla.schedule import GROUP_HEADS, TILE

# ---- config

KEYS, SLAB = TILE, 64
SLAB_BYTES = KEYS * SLAB * 2

FIRST, LAST, END, SECOND = 1, 2, 4, 8
"""Marks of a tile. Those of Hopper's; and its rows are of the second cache."""

BLOCKS = 1
"""That share a work tile."""

HEADS = GROUP_HEADS[-1]
"""Of a CTA: what products take. Rows of heads that nobody has are computed and not stored."""

SLABS = HEAD_DIM // SLAB
LAST_SLAB = SLABS - 1
"""The rotary columns."""

STAGE_BYTES, STAGES = SLABS * SLAB_BYTES, 2

FP8_STAGES = 2
"""Tiles whose codes are on their way from memory."""

RAW_BYTES = KEYS * NOPE_DIM

BUFFERS = 2
"""Of S in tensor memory, and of P."""

SLOTS = 4
"""Tiles that the index loader may be ahead of the softmax."""

ROW_BYTES = FP8_DS_MLA.data_bytes
"""Of a row of the tensors that copies gather from: pages lie multiples of it apart."""

GATHERED = 4
"""Rows of a gathering copy."""

CODES = NOPE_DIM
"""Of a row that a CTA gathers, in one piece."""

DEQUANT_WARP, MMA_WARP, CODES_WARP, ROPE_WARP, WARPS = 4, 8, 9, 10, 12
"""The first of each role. The scores begin, the index loader is the last."""

THREADS = WARPS * 32

PAIR_BARRIER, PAIR_THREADS = 1, 64
"""Named barriers of the two warps that share heads, and their threads."""

O_COLUMN, Q_COLUMN, S_COLUMN = 0, 256, 448
"""In tensor memory, all of which is taken: O, slabs 0 to 5 of Q, two buffers of S."""

Q_SLABS = 6
"""Of Q, in tensor memory. There is room for no more: the others are in shared memory."""

S_COLUMNS, O_COLUMNS = KEYS // 2, HEAD_DIM // 2
Q_COLUMNS = SLAB // 2
"""Of a slab: two bf16 in a column."""

FORM = {"weight_stationary": True}
"""Of products, as ptx.tensor_mma takes it."""

SCORES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", HEADS, KEYS)
VALUES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", HEADS, HEAD_DIM // 2, b_is_mn_major=True)

KEY_ROWS = umma.k_major(16)
"""A slab with keys, heads or rows of P as rows; P's summed dimension is keys."""

VALUE_ROWS = umma.mn_major(16, SLAB_BYTES)
"""Slabs with their columns as rows."""

WORD, SCALE_BYTES = 4, FP8_DS_MLA.scale_bytes

LINE = 128
"""Bytes that L2 fetches, and that a row has in shared memory on its way out."""

CHUNKS = LINE // 16
"""16-byte chunks of a line: of a slab's row, and of a row of O on its way out."""

LINES = 32 // CHUNKS
"""That a warp stores at a time."""


# ---- shared memory


HEADING = 16
"""Bytes of a heading: marks, work tile, and which of keys 0 to 31 and 32 to 63 are there."""

RINGS = {"headings": SLOTS, "fp8": FP8_STAGES, "stages": STAGES}


def barriers_of(rings: dict[str, int]) -> int:
    """How many there are with rings of these depths."""
    return 2 * sum(rings.values()) + rings["headings"] + BUFFERS + BUFFERS + 1


BARRIERS = barriers_of(RINGS)


class Smem(NamedTuple):
    """Addresses in shared memory, 32 bits wide; by default sizes in bytes, see smem_parts.
    The first four are 1024-byte aligned.

    kv             [2 stages][8 slabs][64 keys][64] bf16
    q              [2 slabs][64 heads][64] bf16: slabs 6 and 7
    p              [2 buffers][64 heads][64 keys] bf16
    raw            [2][64 keys][448] codes
    rows           [4 slots][64] numbers of rows in the tensor of rows, -1 where there is none
    scales         [4 slots][64] 8 scale bytes, 0 where there is no row
    heading        [4 slots] headings
    exchange       [2][128 threads] maxima and sums
    tensor_memory  where it begins
    """

    kv: Any = STAGES * STAGE_BYTES
    q: Any = (SLABS - Q_SLABS) * SLAB_BYTES
    p: Any = BUFFERS * SLAB_BYTES
    raw: Any = FP8_STAGES * RAW_BYTES
    rows: Any = SLOTS * KEYS * 4
    scales: Any = SLOTS * KEYS * FP8_DS_MLA.scale_bytes
    heading: Any = SLOTS * HEADING
    exchange: Any = 2 * 4 * 32 * 4
    tensor_memory: Any = 16


def smem_parts() -> dict[str, int]:
    """Bytes of everything but the barriers, in order."""
    return Smem()._asdict()


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


def smem_at(base: Any) -> Smem:
    """In shared memory that begins at a 1024-byte aligned address."""
    return in_order(base, smem_parts())


def in_order(base: Any, parts: dict[str, int]) -> Smem:
    """Parts of so many bytes, one after the other."""
    found, offset = [], 0
    for size in parts.values():
        found.append(base + offset)
        offset += size
    return Smem(*found)


def chunk_offset(row: Any, chunk: Any) -> Any:
    """Of 16-byte chunk `chunk` of a row, in a slab."""
    return row * (SLAB * 2) + ((chunk ^ (row & 7)) << 4)


def stage_offset(stage: Any, slab: Any, row: Any, chunk: Any) -> Any:
    """Of a chunk of a key, in kv."""
    return stage * STAGE_BYTES + slab * SLAB_BYTES + chunk_offset(row, chunk)


def raw_offset(raw: Any, row: Any) -> Any:
    """Of a key's codes, in raw."""
    return raw * RAW_BYTES + row * NOPE_DIM


def rope_offset(stage: Any, row: Any) -> Any:
    """Of a key's rotary columns, in kv: where a gathering copy of rows from `row` on, a multiple of 4, begins. It
    swizzles by the address."""
    return stage * STAGE_BYTES + LAST_SLAB * SLAB_BYTES + row * (SLAB * 2)


class Step(NamedTuple):
    """One of the products that S or O of a tile take.

    d      column in tensor memory of the result; of S that of its first buffer
    a      where the first operand begins: a column in tensor memory, or bytes into q or p
    is_resident   whether it is in tensor memory
    b      bytes into a stage where the second one begins
    is_first      of those with the same result
    """

    d: int
    a: int
    is_resident: bool
    b: int
    is_first: bool


def scores_steps() -> Iterator[Step]:
    """S = Q K^T of 64 heads and 64 keys, 16 columns at a time."""
    for slab in range(SLABS):
        for k in range(0, SLAB, 16):
            is_resident = slab < Q_SLABS
            a = Q_COLUMN + slab * Q_COLUMNS + k // 2
            if not is_resident:
                a = (slab - Q_SLABS) * SLAB_BYTES + KEY_ROWS.step(k)
            yield Step(S_COLUMN, a, is_resident, slab * SLAB_BYTES + KEY_ROWS.step(k), slab + k == 0)


def values_steps(slabs: int = SLABS) -> Iterator[Step]:
    """O += P V, of half of a CTA's slabs of columns and 16 keys at a time."""
    for half in range(2):
        for k in range(0, KEYS, 16):
            b = half * (slabs // 2) * SLAB_BYTES + VALUE_ROWS.step(k)
            yield Step(O_COLUMN + half * (O_COLUMNS // 2), KEY_ROWS.step(k), False, b, k == 0)


O_BLOCK = 32
"""Columns of O that a thread takes at a time."""


def o_dim(half: Any, block: Any) -> Any:
    """Column of the result that block `block` (0 to 7) of O begins with, in lanes 64 * half to 64 * half + 63."""
    return block // 4 * (HEAD_DIM // 2) + half * (HEAD_DIM // 4) + block % 4 * O_BLOCK


class OneCta:
    """What decode_2cta.py has otherwise, under the same names."""

    BLOCKS = BLOCKS
    CODES = CODES
    STAGE_BYTES = STAGE_BYTES
    S_COLUMNS = S_COLUMNS
    SCORES_INSTRUCTION = SCORES_INSTRUCTION
    VALUES_INSTRUCTION = VALUES_INSTRUCTION
    FORM = FORM
    smem_parts = staticmethod(smem_parts)
    smem_at = staticmethod(smem_at)
    o_dim = staticmethod(o_dim)
    scores_steps = staticmethod(scores_steps)
    values_steps = staticmethod(values_steps)


# ---- barriers

HEADING_READERS = WARPS - 1
"""A thread of each warp but the index loader."""


@dataclass(frozen=True)
class Bars:
    """mbarriers, and what completes their phases.

    headings   full: the index loader has stored a tile's heading and row numbers. empty: the warps of all other roles
               are done with them, and the dequantizers with the scales
    fp8        full: all bytes of a tile's codes are there. empty: dequantizer warps have loaded them
    stages     full: dequantizer warps have stored a tile, and all bytes of its rotary columns are there. empty: P V of
               it is done, and so S before
    scales     of each slot: all bytes of a tile's scales are there
    sums       of each buffer: S is there, and P V of the tile two before is done
    weights    of each buffer: softmax warps have loaded S and stored P; at a work tile's beginning, they have loaded
               O of the work tile before
    queries    softmax warps have stored a work tile's Q
    """

    headings: barriers.Ring
    fp8: barriers.Ring
    stages: barriers.Ring
    scales: Any
    sums: Any
    weights: Any
    queries: Any

    depths: ClassVar[dict[str, int]] = RINGS
    blocks: ClassVar[int] = BLOCKS

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        rings = (barriers.Ring.allocate(smem, stages) for stages in cls.depths.values())
        counts = cls.depths["headings"], BUFFERS, BUFFERS, 1
        return cls(*rings, *(smem.allocate_array(Int64, count) for count in counts))

    def initialize(self, readers: Any = HEADING_READERS) -> None:
        """By one thread; all blocks synchronize afterwards. readers: of headings"""
        warps = 4 * self.blocks
        self.headings.initialize(1, readers)
        self.fp8.initialize(1, 4)
        # the dequantizer's warps, and one thread that expects rotary columns
        self.stages.initialize(warps + 1, 1)
        rest = (self.scales, self.depths["headings"], 32), (self.sums, BUFFERS, 1)
        for first, count, arrivals in (*rest, (self.weights, BUFFERS, warps), (self.queries, 1, warps)):
            for i in range(count):
                cute.arch.mbarrier_init(first + i, arrivals)
        cute.arch.mbarrier_init_fence()

    def arrive(self, barrier: Any) -> None:
        """At one of those that the MMA warp waits for. By a thread."""
        cute.arch.mbarrier_arrive(barrier)

    def wait(self, barrier: Any, phase: Any) -> None:
        """For one of these."""
        ptx.wait_mbarrier(barrier.toint(), phase)

    def commit(self, barrier: Any) -> None:
        """Arrive when the products that this thread has started are done."""
        ptx.commit_tensor(barrier.toint())


CODES_BYTES = KEYS * NOPE_DIM
ROPE_BYTES = KEYS * SLAB * 2
"""What the barriers of a tile's copies expect."""


# ---- producer: index loader and KV loaders

LIST, COLUMN, LIST_END, NEXT_COLUMN, NEXT_END, BATCH, TOKEN, WORDS = range(8)
"""Of a cursor: which list the tile is of, its first column, the end of the work tile's columns in that list; the same
two of the second list, while the cursor is in the first; the work tile's batch and token."""


@dataclass(frozen=True)
class IndexLoader:
    """A warp goes through the KV tiles of a CTA's work tiles. Behind the last work tile comes one tile marked END.
    Lane i has keys i and 32 + i.

    caches, lists   two of each
    pitches         of each cache, from page to page in rows of the tensor that copies gather from
    """

    second: str
    scheduler: TileScheduler
    caches: Any
    pitches: Any
    lists: Any
    queries: Query

    @cute.jit
    def run(self, lane: Any, bars: Bars, at: Smem) -> None:
        """Tell of every tile."""
        cursor, asked = (cute.make_rmem_tensor((count,), Int32) for count in (WORDS, 2))
        work_tile = self.scheduler.first
        self.enter(cursor, work_tile, lane)
        self.load_index(cursor, asked, lane)
        tile, mark, is_first = Int32(0), Int32(0), Int32(FIRST)
        while mark & END == 0:
            # no tile of the work tile comes behind this one
            is_last = cursor[COLUMN] + KEYS >= cursor[LIST_END] and cursor[NEXT_COLUMN] >= cursor[NEXT_END]
            mark = is_first | (Int32(LAST) if is_last else Int32(0)) | cursor[LIST] * SECOND
            if work_tile >= self.scheduler.end:
                mark = Int32(END)
            heading = mark, work_tile
            is_first = Int32(FIRST) if is_last else Int32(0)
            rows, scales, is_there = self.resolve_row(cursor, asked, lane)
            if is_last:
                work_tile = work_tile + self.scheduler.step
                self.enter(cursor, work_tile, lane)
            else:
                self.step(cursor)
            # on their way while this tile is told of
            self.load_index(cursor, asked, lane)
            self.publish(heading, rows, scales, is_there, tile, lane, bars, at)
            tile = tile + 1

    @cute.jit
    def step(self, cursor: Any) -> None:
        """To the work tile's next tile."""
        cursor[COLUMN] = cursor[COLUMN] + KEYS
        if cursor[COLUMN] >= cursor[LIST_END]:
            self.go_to_second(cursor)

    @cute.jit
    def go_to_second(self, cursor: Any) -> None:
        cursor[LIST] = Int32(1)
        cursor[COLUMN] = cursor[NEXT_COLUMN]
        cursor[LIST_END] = cursor[NEXT_END]
        cursor[NEXT_END] = Int32(0)

    @cute.jit
    def enter(self, cursor: Any, work_tile: Any, lane: Any) -> None:
        """To a work tile's first tile. One that attends to nothing has a tile without keys."""
        cursor.fill(0)
        if work_tile < self.scheduler.end:
            batch, token, split_idx, head_group = self.scheduler.coords(work_tile)
            live = live_of_both(self.lists, self.second, batch, token)
            self.prefetch_queries(batch, token, head_group, lane)
            cursor[BATCH], cursor[TOKEN] = batch, token
            columns = self.scheduler.columns(split_idx, *live)
            cursor[COLUMN], cursor[LIST_END], cursor[NEXT_COLUMN], cursor[NEXT_END] = columns
            if cursor[COLUMN] >= cursor[LIST_END] and cursor[NEXT_COLUMN] < cursor[NEXT_END]:
                self.go_to_second(cursor)
            coming = work_tile + self.scheduler.step
            self.scheduler.prefetch(coming, self.lists, self.caches[-1], self.second, lane)

    @cute.jit
    def prefetch_queries(self, batch: Any, token: Any, head_group: Any, lane: Any) -> None:
        """L2 has the work tile's queries by the time they are wanted."""
        lines, head = const_expr(1024 // LINE), head_group * HEADS
        for line in cutlass.range(lane, self.queries.left(head, HEADS) * lines, 32, unroll=1):
            row = self.queries.at(batch, token, head + line // lines)
            ptx.prefetch_l2(row + line % lines * LINE, None)

    @cute.jit
    def load_index(self, cursor: Any, asked: Any, lane: Any) -> None:
        """Load the indices of the lane's keys, of a dense list their pages; -1 where there is none."""
        row = self.lists[0].row(cursor[BATCH], cursor[TOKEN])
        if const_expr(self.second != "none"):
            second = self.lists[1].row(cursor[BATCH], cursor[TOKEN])
            row = row if cursor[LIST] == 0 else second
        for half in range_constexpr(2):
            column = cursor[COLUMN] + 32 * half + lane
            place = column
            if const_expr(self.second == "dense"):
                page, _ = divmod(column, self.caches[1].rows)
                place = column if cursor[LIST] == 0 else page
            asked[half] = ptx.load_global_s32_where(column < cursor[LIST_END], row + Int64(place) * 4)

    @cute.jit
    def resolve_row(self, cursor: Any, asked: Any, lane: Any) -> tuple[Any, Any, Any]:
        """Of the lane's keys: numbers of their rows or -1, addresses of their scales, whether they are there."""
        rows, scales, is_there = [], [], []
        for half in range_constexpr(2):
            index = asked[half]
            cache, pitch = self.caches[0], self.pitches[0]
            known = cutlass.max(index, Int32(0))
            page, inside = divmod(known, cache.rows)
            base, stride, pages, page_rows = cache.base, cache.page_stride, cache.pages, cache.rows.divisor
            if const_expr(self.second != "none"):
                is_first, other = cursor[LIST] == 0, self.caches[1]
                if const_expr(self.second == "dense"):
                    second_page = known
                    _, second_inside = divmod(cursor[COLUMN] + 32 * half + lane, other.rows)
                else:
                    second_page, second_inside = divmod(known, other.rows)
                page, inside = (page if is_first else second_page), (inside if is_first else second_inside)
                base, stride = (base if is_first else other.base), (stride if is_first else other.page_stride)
                pages, pitch = (pages if is_first else other.pages), (pitch if is_first else self.pitches[1])
                page_rows = page_rows if is_first else other.rows.divisor
            exists = index >= 0 and page < pages
            rows.append(page * pitch + inside if exists else Int32(-1))
            offset = Int64(page) * stride + Int64(page_rows * ROW_BYTES + inside * SCALE_BYTES)
            scales.append(base + (offset if exists else Int64(0)))
            is_there.append(exists)
        return rows, scales, is_there

    @cute.jit
    def publish(
        self, heading: Any, rows: Any, scales: Any, is_there: Any, tile: Any, lane: Any, bars: Bars, at: Smem
    ) -> None:
        """Store a tile's heading and rows, and start to copy its scales."""
        slots = bars.headings.stages
        slot = tile % slots
        mark, work_tile = heading
        bars.headings.wait_empty(slot, tile // slots & 1)
        there = [cute.arch.vote_ballot_sync(is_there[half]) for half in range(2)]
        if lane == 0:
            ptx.store_shared_128(at.heading + slot * HEADING, (mark, work_tile, *there))
        if mark & END == 0:
            for half in range_constexpr(2):
                key = slot * KEYS + 32 * half + lane
                ptx.store_shared_s32(at.rows + key * 4, rows[half])
                read = Int32(SCALE_BYTES) if is_there[half] else Int32(0)
                ptx.copy_async_or_zero(at.scales + key * SCALE_BYTES, scales[half], SCALE_BYTES, read)
            cute.arch.cp_async_mbarrier_arrive_noinc(bars.scales + slot)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(bars.headings.full(slot))


class KVLoader:
    """Copies of a tile's rows, four at a time, by a warp: codes into the ring of raw tiles, or rotary columns into the
    tile itself. Where there is no row zeros arrive, and no address is formed."""

    def __init__(self, is_rope: bool, second: str) -> None:
        self.is_rope, self.second = is_rope, second

    @cute.jit
    def run(self, maps: Any, bars: Bars, at: Smem) -> None:
        """Fill the ring.

        maps   tensor maps of both caches
        """
        ring = bars.stages if self.is_rope else bars.fp8
        for source in maps:
            ptx.prefetch_tensor_map(source)
        tile, mark = Int32(0), Int32(0)
        while mark & END == 0:
            slot, stage = tile % bars.headings.stages, tile % ring.stages
            mark = marks(slot, tile, bars, at)
            if mark & END == 0:
                ring.wait_empty(stage, tile // ring.stages & 1)
                # all threads have read the marks
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    source = maps[0]
                    if const_expr(self.second != "none"):
                        source = maps[0] if mark & SECOND == 0 else maps[1]
                    self.copy_async(stage, source, at.rows + slot * (KEYS * 4), ring.full(stage), at)
                    cute.arch.mbarrier_arrive(bars.headings.empty(slot))
            tile = tile + 1

    @cute.jit
    def copy_async(self, stage: Any, source: Any, rows_at: Any, full: Any, at: Smem) -> None:
        """Start a tile's copies. By a thread."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, ROPE_BYTES if self.is_rope else CODES_BYTES)
        place, offset = (at.kv, rope_offset) if self.is_rope else (at.raw, raw_offset)
        self.gather(lambda row: place + offset(stage, row), source, 0, rows_at, full.toint())

    def gather(
        self, place: Callable[[int], Any], source: Any, column: Any, rows_at: Any, barrier: Any, blocks: int = 1
    ) -> None:
        """From a column on. place: of rows, four at a time."""
        for row in range(0, KEYS, GATHERED):
            four = ptx.load_shared_128(rows_at, offset=row * 4)
            ptx.gather_rows(place(row), source, column, four, barrier, blocks=blocks)


@cute.jit
def marks(slot: Any, tile: Any, bars: Bars, at: Smem) -> Any:
    """A tile's marks, once it has been told of. By a warp."""
    bars.headings.wait_full(slot, tile // bars.headings.stages & 1)
    return cute.arch.make_warp_uniform(ptx.load_shared_s32(at.heading + slot * HEADING))


# ---- dequantization

ROWS_APART = KEYS // 2


class Dequantizer:
    @cute.jit
    def run(self, thread: Any, bars: Bars, at: Smem) -> None:
        """Convert every tile. By a warpgroup."""
        row, member = thread // 4, thread % 4
        tile, mark = Int32(0), Int32(0)
        while mark & END == 0:
            slots, fp8_stages, stages = bars.headings.stages, bars.fp8.stages, bars.stages.stages
            slot, raw, stage = tile % slots, tile % fp8_stages, tile % stages
            mark = marks(slot, tile, bars, at)
            if mark & END == 0:
                ptx.wait_mbarrier((bars.scales + slot).toint(), tile // slots & 1)
                scales = self.load_scales(at.scales + (slot * KEYS + row) * SCALE_BYTES)
                bars.fp8.wait_full(raw, tile // fp8_stages & 1)
                bars.stages.wait_empty(stage, tile // stages & 1)
                self.convert_rows(raw, stage, row, member, scales, at)
                # whoever lets tensor cores read what is stored fences; no loads from memory are in flight to wait for
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if thread % 32 == 0:
                    bars.arrive(bars.stages.full(stage))
                    cute.arch.mbarrier_arrive(bars.fp8.empty(raw))
                    cute.arch.mbarrier_arrive(bars.headings.empty(slot))
            tile = tile + 1

    def load_scales(self, scales_at: Any) -> list[Any]:
        """Those of the thread's rows."""
        return [ptx.load_shared_64(scales_at + half * ROWS_APART * SCALE_BYTES) for half in range(2)]

    def convert_rows(self, raw: Any, stage: Any, row: Any, member: Any, scales: list[Any], at: Any) -> None:
        """Store the thread's columns of its rows, `row` and one more."""
        source = at.raw + raw_offset(raw, row) + member * 16
        target = at.kv + stage_offset(stage, 0, row, 2 * member)
        for half in range(2):
            for slab in range(LAST_SLAB):
                self.convert(source, target, scales[half], half, slab)

    @cute.jit
    def convert(self, source: Any, target: Any, scales: Any, half: cutlass.Constexpr, slab: cutlass.Constexpr) -> None:
        """Store the thread's columns of a slab of one of its rows."""
        pair = ptx.bf16x2_of_ue8m0x2(scales[slab // 4], slab % 4 // 2)
        factor = ptx.permute_bytes(pair, pair, 0x3232 if slab % 2 else 0x1010)
        words = ptx.load_shared_128(source, offset=raw_offset(0, half * ROWS_APART) + slab * SLAB)
        # rows that are 32 apart, and slabs, have their chunks in the same order
        place = target + stage_offset(0, slab, half * ROWS_APART, 0)
        self.store(place, words, factor)

    def store(self, place: Any, words: Any, factor: Any) -> None:
        """Store codes in four words as two neighbouring chunks, each times the factor."""
        for chunk in range(2):
            pairs = [pair for word in words[2 * chunk : 2 * chunk + 2] for pair in bf16_pairs_of_e4m3x4(word)]
            ptx.store_shared_128(place ^ (16 * chunk), [ptx.multiply_bf16x2(pair, factor) for pair in pairs])


# ---- MMA


class Mma:
    """plan: what products are made of, a module."""

    plan: Any = OneCta

    @cute.jit
    def run(self, bars: Bars, at: Smem) -> None:
        """Multiply every tile. By a warp."""
        tile, mark, scheduler = Int32(0), Int32(0), Int32(0)
        while mark & END == 0:
            slot, buffer, stage = tile % bars.headings.stages, tile % BUFFERS, tile % bars.stages.stages
            mark = marks(slot, tile, bars, at)
            if mark & END == 0:
                if mark & FIRST != 0:
                    bars.wait(bars.queries, scheduler & 1)
                    scheduler = scheduler + 1
                    self.start_scores(tile, bars, at)
                if mark & LAST == 0:
                    self.start_scores(tile + 1, bars, at)
                bars.wait(bars.weights + buffer, tile // BUFFERS & 1)
                ptx.fence_tensor_after()
                # all threads have read the marks
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    adds = Int32(0) if mark & FIRST != 0 else Int32(1)
                    self.multiply_values(at.p + buffer * SLAB_BYTES, at.kv + stage * self.plan.STAGE_BYTES, adds)
                    bars.commit(bars.stages.empty(stage))
                    cute.arch.mbarrier_arrive(bars.headings.empty(slot))
            tile = tile + 1

    @cute.jit
    def start_scores(self, tile: Any, bars: Bars, at: Smem) -> None:
        """S of a tile, once it is there. The buffer is free: P of the tile two before has been waited for."""
        buffer, stage = tile % BUFFERS, tile % bars.stages.stages
        bars.wait(bars.stages.full(stage), tile // bars.stages.stages & 1)
        ptx.fence_tensor_after()
        with cute.arch.elect_one():
            self.multiply_keys(Int32(buffer * self.plan.S_COLUMNS), at.q, at.kv + stage * self.plan.STAGE_BYTES)
            bars.commit(bars.sums + buffer)

    def multiply_keys(self, column: Any, q: Any, stage: Any) -> None:
        """S = Q K^T."""
        queries, keys = descriptor(KEY_ROWS, q), descriptor(KEY_ROWS, stage)
        for step in self.plan.scores_steps():
            ptx.tensor_mma(
                column + step.d,
                step.a if step.is_resident else queries + step.a // 16,
                keys + step.b // 16,
                self.plan.SCORES_INSTRUCTION,
                int(not step.is_first),
                a_in_tensor_memory=step.is_resident,
                **self.plan.FORM,
            )

    def multiply_values(self, p: Any, stage: Any, adds: Any) -> None:
        """O += P V, or O = P V."""
        weights, values = descriptor(KEY_ROWS, p), descriptor(VALUE_ROWS, stage)
        for step in self.plan.values_steps():
            ptx.tensor_mma(
                step.d,
                weights + step.a // 16,
                values + step.b // 16,
                self.plan.VALUES_INSTRUCTION,
                adds if step.is_first else 1,
                **self.plan.FORM,
            )


def descriptor(operand: Operand, address: Any) -> Any:
    """In a register."""
    wide: Any = Int64(address)
    return operand.at(wide)


# ---- epilogue, and correction


@cute.jit
def rescale(lanes: Any, factor: Any) -> None:
    """Have O of the thread's lane follow a maximum that moved."""
    for block in cutlass.range(O_COLUMNS // O_BLOCK, unroll=1):
        place = lanes + O_COLUMN + block * O_BLOCK
        values = ptx.load_tensor_memory(place, O_BLOCK)
        ptx.store_tensor_memory(place, [value * factor for value in values])
    ptx.wait_tensor_stores()


class Epilogue:
    """plan: a module, that says which columns are where."""

    def __init__(self, out_fp32: bool, plan: Any) -> None:
        self.out_fp32, self.plan = out_fp32, plan

    @cute.jit
    def close(self, place: Any, is_first: Any, row_max: Any, whole: Any, out: Output) -> Any:
        """Store a head's log-sum-exp; what to multiply its row of O with.

        place      split_idx, batch, token and head
        is_first   of the two threads that have the head
        """
        split_idx, batch, token, head = place
        logit = Int32(0)
        if out.sink != 0:
            logit = ptx.load_global_s32_where(head < out.heads, out.sink + Int64(head) * 4)
        lse = (row_max + ptx.log2(whole)) * Float32(ptx.LN_2)
        lse = Float32(Float32.inf) if whole == Float32(0.0) else lse
        out.lse.store((split_idx, batch, head, token), lse, is_first and head < out.heads)
        return out_scale_of(whole, row_max, logit, out.sink)

    @cute.jit
    def store(self, place: Any, factor: Any, lane: Any, half: Any, lanes: Any, rows_at: Any, out: Output) -> None:
        """Store the warp's half of 32 heads' rows of O, each multiplied with its factor, as whole lines.

        place     split_idx, batch, token and first head
        rows_at   4 KB of shared memory
        """
        split_idx, batch, token, first = place
        size = const_expr(4 if self.out_fp32 else 2)
        blocks = const_expr(LINE // (O_BLOCK * size))
        row = out.base + Int64(split_idx) * out.strides[0] + Int64(batch) * out.strides[1]
        row = row + Int64(token) * out.strides[2] + Int64(first) * out.strides[3]
        for block in cutlass.range(0, O_COLUMNS // O_BLOCK, blocks, unroll=1):
            words: list[Any] = []
            for i in range_constexpr(blocks):
                found = ptx.load_tensor_memory(lanes + O_COLUMN + (block + i) * O_BLOCK, O_BLOCK)
                words += self.words([value * factor for value in found])
            cute.arch.sync_warp()
            for chunk in range_constexpr(CHUNKS):
                ptx.store_shared_128(rows_at + chunk_offset(lane, chunk), words[4 * chunk : 4 * chunk + 4])
            cute.arch.sync_warp()
            target = row + Int64(self.plan.o_dim(half, block) * size + lane % CHUNKS * 16)
            for i in range_constexpr(32 // LINES):
                head = LINES * i + lane // CHUNKS
                four = ptx.load_shared_128(rows_at + chunk_offset(head, lane % CHUNKS))
                ptx.store_global_128(target + Int64(head) * out.strides[3], four, first + head < out.heads)

    def words(self, values: list[Any]) -> list[Any]:
        """As they are stored."""
        if self.out_fp32:
            return [value.bitcast(Int32) for value in values]
        return [ptx.bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]


# ---- softmax


def maximum(values: list[Any]) -> Any:
    """Of numbers, three at a time."""
    while len(values) > 2:
        rest = len(values) // 3 * 3
        values = [ptx.max3_f32(*values[i : i + 3]) for i in range(0, rest, 3)] + values[rest:]
    return ptx.max_f32(*values)


class Softmax:
    """plan: a module, that says what is where in tensor memory."""

    plan: Any = OneCta

    def __init__(self, out_fp32: bool) -> None:
        self.back = Epilogue(out_fp32, self.plan)

    @cute.jit
    def run(
        self, thread: Any, scheduler: TileScheduler, queries: Query, out: Output, scale_log2: Any, bars: Bars, at: Smem
    ) -> None:
        """Give away the weights of every tile, and store results. By a warpgroup."""
        lanes = cute.arch.make_warp_uniform(thread // 32) << 21
        scores = cute.make_rmem_tensor((S_COLUMNS,), Float32)
        self.load_queries(scheduler.first, thread, lanes, scheduler, queries, bars, at)
        row_max, row_sum = Float32(NEG_MAX), Float32(0.0)
        tile = Int32(0)
        mark, work_tile, there = self.heading(tile, thread, bars, at)
        while mark & END == 0:
            buffer = tile % BUFFERS
            ptx.wait_mbarrier((bars.sums + buffer).toint(), tile // BUFFERS & 1)
            ptx.fence_tensor_after()
            found = self.load_scores(buffer, thread, lanes, at)
            for i in range_constexpr(S_COLUMNS):
                scores[i] = found[i] * scale_log2
            if there != -1:
                for i in range_constexpr(S_COLUMNS):
                    scores[i] = scores[i] if (there >> i) & 1 != 0 else Float32(-Float32.inf)
            if mark & FIRST != 0:
                row_max, row_sum = Float32(NEG_MAX), Float32(0.0)
            row_max, row_sum = self.update_row_max(scores, row_max, row_sum, tile, mark, thread, lanes, bars, at)
            row_sum = row_sum + self.store_p(scores, row_max, buffer, thread, at)
            cute.arch.fence_view_async_shared()
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread % 32 == 0:
                bars.arrive(bars.weights + buffer)
                cute.arch.mbarrier_arrive(bars.headings.empty(tile % bars.headings.stages))
            if mark & LAST != 0:
                # all products with the work tile's queries are done: the next one's come while P V is under way
                self.load_queries(work_tile + scheduler.step, thread, lanes, scheduler, queries, bars, at)
                self.finish(work_tile, row_max, row_sum, tile, thread, lanes, scheduler, out, bars, at)
            tile = tile + 1
            mark, work_tile, there = self.heading(tile, thread, bars, at)

    @cute.jit
    def heading(self, tile: Any, thread: Any, bars: Bars, at: Smem) -> tuple[Any, Any, Any]:
        """A tile's marks, its work tile, and which of the thread's keys are there; once it has been told of."""
        slots = bars.headings.stages
        slot = tile % slots
        bars.headings.wait_full(slot, tile // slots & 1)
        mark, work_tile, low, high = ptx.load_shared_128(at.heading + slot * HEADING)
        return mark, work_tile, low if thread < HEADS else high

    def load_scores(self, buffer: Any, thread: Any, lanes: Any, at: Smem) -> tuple[Any, ...]:
        """The thread's scores."""
        return ptx.load_tensor_memory(lanes + S_COLUMN + buffer * S_COLUMNS, S_COLUMNS)

    @cute.jit
    def update_row_max(
        self,
        scores: Any,
        row_max: Any,
        row_sum: Any,
        tile: Any,
        mark: Any,
        thread: Any,
        lanes: Any,
        bars: Bars,
        at: Smem,
    ) -> tuple[Any, Any]:
        """The running maximum of the thread's head, and its running sum relative to it."""
        largest = maximum([scores[i] for i in range(S_COLUMNS)])
        pair = PAIR_BARRIER + thread // 32 % 2
        if ptx.any_of_group(pair, PAIR_THREADS, largest - row_max > Float32(RESCALE_THRESHOLD)) != 0:
            largest = ptx.max_f32(largest, self.others(largest, 0, thread, at))
            moved = largest if largest - row_max > Float32(RESCALE_THRESHOLD) else row_max
            factor = ptx.exp2(row_max - moved)
            row_max = moved
            row_sum = row_sum * factor
            if mark & FIRST == 0:
                self.wait_values(tile - 1, bars)
                rescale(lanes, factor)
        return row_max, row_sum

    @cute.jit
    def store_p(self, scores: Any, row_max: Any, buffer: Any, thread: Any, at: Smem) -> Any:
        """Store the thread's weights; their sum.

        The buffer is free: S of this tile is done, and so P V of the tile two before, which had been started.
        """
        for i in range_constexpr(S_COLUMNS):
            scores[i] = ptx.exp2(scores[i] - row_max)
        # of the four chunks the first: the others differ from it in two bits of their number
        first_at = at.p + buffer * SLAB_BYTES + chunk_offset(thread % HEADS, thread // HEADS * (CHUNKS // 2))
        for chunk in range_constexpr(CHUNKS // 2):
            words = [ptx.bf16x2(scores[i], scores[i + 1]) for i in range(8 * chunk, 8 * chunk + 8, 2)]
            ptx.store_shared_128(first_at ^ (16 * chunk), words)
        return pairwise([scores[i] for i in range(S_COLUMNS)], operator.add)

    @cute.jit
    def finish(
        self,
        work_tile: Any,
        row_max: Any,
        row_sum: Any,
        tile: Any,
        thread: Any,
        lanes: Any,
        scheduler: TileScheduler,
        out: Output,
        bars: Bars,
        at: Smem,
    ) -> None:
        """Store a work tile's results."""
        whole = row_sum + self.others(row_sum, 1, thread, at)
        thread = ptx.thread_again()
        batch, token, split_idx, head_group = scheduler.coords(work_tile)
        first = head_group * HEADS + thread % HEADS // 32 * 32
        lane, half = thread % 32, thread // HEADS
        factor = self.back.close((split_idx, batch, token, first + lane), half == 0, row_max, whole, out)
        self.wait_values(tile, bars)
        # of both buffers of P, which have served, the rows that no other warps write
        rows_at = at.p + half * SLAB_BYTES + thread % HEADS // 32 * (SLAB_BYTES // 2)
        # before products overwrite O, this warp says that it has stored weights, and fences
        self.back.store((split_idx, batch, token, first), factor, lane, half, lanes, rows_at, out)

    @cute.jit
    def others(self, value: Any, which: int, thread: Any, at: Smem) -> Any:
        """The value of the thread that has the other keys of this one's head."""
        values_at = at.exchange + which * (2 * HEADS * 4)
        ptx.store_shared_f32(values_at + thread * 4, value)
        self.pair_barrier(thread)
        return ptx.load_shared_f32(values_at + (thread ^ HEADS) * 4)

    @cute.jit
    def wait_values(self, tile: Any, bars: Bars) -> None:
        """Until P V of a tile is done. Of no later one: that waits for this thread's weights."""
        stages = bars.stages.stages
        ptx.wait_mbarrier(bars.stages.empty(tile % stages).toint(), tile // stages & 1)
        ptx.fence_tensor_after()

    @cute.jit
    def load_queries(
        self, work_tile: Any, thread: Any, lanes: Any, scheduler: TileScheduler, queries: Query, bars: Bars, at: Smem
    ) -> None:
        """Store a work tile's Q: its first slabs in the thread's lane of tensor memory, the last two in shared memory,
        and on the way there whole lines of all. Of heads beyond the last, the last one's.

        The two warps that share heads load a slab each.
        """
        if work_tile < scheduler.end:
            # found out again: during tiles there is no register for them
            thread, at = ptx.thread_again(), smem_at(ptx.again(at.kv))
            batch, token, _, head_group = scheduler.coords(work_tile)
            pair, side = thread % HEADS // 32 * 32, thread // HEADS
            first = head_group * HEADS + pair
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
                    self.pair_barrier(thread)
                    for i in range_constexpr(2):
                        self.move_slab(at.q + i * SLAB_BYTES, thread, lanes + Q_COLUMN + (slab + i) * Q_COLUMNS)
                    self.pair_barrier(thread)
            ptx.wait_tensor_stores()
            cute.arch.fence_view_async_shared()
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread % 32 == 0:
                bars.arrive(bars.queries)

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

    def pair_barrier(self, thread: Any) -> None:
        """Wait for the other warp that has the thread's head."""
        cute.arch.barrier(barrier_id=PAIR_BARRIER + thread // 32 % 2, number_of_threads=PAIR_THREADS)


# ---- kernel


class DecodeKernel:
    """See kernel_args.DecodeArgs.

    plan, barriers   which sizes and addresses its roles agree on, and their barriers
    roles            of all warps but the index loader's
    """

    name = "sparse_mla_decode_blackwell"
    plan: Any = OneCta
    barriers: type[Bars] = Bars
    roles: Any = (Dequantizer, Mma, Softmax, KVLoader)

    def __init__(self, key: BlackwellDecodeKey) -> None:
        self.second = key.second
        dequantizer, products, scores, gather = self.roles
        self.dequantizer, self.products, self.scores = dequantizer(), products(), scores(key.out_fp32)
        self.codes, self.rope = (gather(is_rope, key.second) for is_rope in (False, True))
        self.name = f"{self.name}_{key.second}{'_fp32' if key.out_fp32 else ''}"

    @cute.jit
    def launch(self, args: DecodeArgs) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        blocks = const_expr(self.plan.BLOCKS)
        scheduler = TileScheduler.of(args.q, blocks * HEADS, args.splits, args.split_tiles, args.ctas // blocks)
        caches = (args.cache0,) if const_expr(self.second == "none") else (args.cache0, args.cache1)
        kernel = self.kernel(
            tuple(codes_copy(cache, self.plan.CODES) for cache in caches),
            tuple(rope_copy(cache) for cache in caches),
            Query.of(args.q),
            tuple(KVCache.of(cache) for cache in caches),
            tuple(pitch_of(cache) for cache in caches),
            args.lists(self.second),
            args.output(),
            args.scale_log2,
            scheduler,
        )
        kernel.launch(
            grid=[cutlass.min(scheduler.step, scheduler.end) * blocks, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[blocks, 1, 1] if const_expr(blocks > 1) else None,
            min_blocks_per_mp=1,
            stream=args.stream,
        )

    @cute.kernel
    def kernel(
        self,
        codes_copies: Any,
        rope_copies: Any,
        queries: Query,
        caches: Any,
        pitches: Any,
        lists: Any,
        out: Output,
        scale_log2: Float32,
        scheduler: TileScheduler,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        size = const_expr(sum(self.plan.smem_parts().values()))
        memory = smem.allocate_tensor(Uint8, cute.make_layout(size), byte_alignment=1024)
        at = self.plan.smem_at(memory.iterator.toint())
        bars = self.barriers.allocate(smem)
        if thread == 0:
            bars.initialize()
        if const_expr(self.plan.BLOCKS > 1):
            # a pair's allocation wants both CTAs to be running
            self.synchronize()
        if warp == MMA_WARP:
            # all of it, so it begins at address 0
            ptx.allocate_tensor_memory(at.tensor_memory, ptx.COLUMNS, self.plan.BLOCKS)
            ptx.relinquish_tensor_memory(self.plan.BLOCKS)
        self.synchronize()
        ptx.fence_tensor_after()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        scheduler = self.own(scheduler, block)
        if warp < DEQUANT_WARP:
            self.scores.run(thread, scheduler, queries, out, scale_log2, bars, at)
        elif warp < MMA_WARP:
            self.dequantizer.run(thread - DEQUANT_WARP * 32, bars, at)
        else:
            if warp == MMA_WARP:
                self.products.run(bars, at)
            elif warp == CODES_WARP:
                self.codes.run(tuple(ptx.tensor_map(copy) for copy in codes_copies), bars, at)
            elif warp == ROPE_WARP:
                self.rope.run(tuple(ptx.tensor_map(copy) for copy in rope_copies), bars, at)
            else:
                IndexLoader(self.second, scheduler, caches, pitches, lists, queries).run(lane, bars, at)
        ptx.fence_tensor_before()
        self.synchronize()
        if warp == MMA_WARP:
            ptx.free_tensor_memory(ptx.load_shared_s32(at.tensor_memory), ptx.COLUMNS, self.plan.BLOCKS)

    def own(self, scheduler: TileScheduler, block: Any) -> TileScheduler:
        """A CTA's work tiles."""
        return scheduler._replace(first=block)

    def synchronize(self) -> None:
        """All threads that share work tiles."""
        cute.arch.sync_threads()


def pitch_of(cache: cute.Tensor) -> Any:
    """Rows of 576 bytes from page to page. On the host's side of the launch, as all below."""
    return Int32(stride_bytes(cache, 0) // ROW_BYTES)


def rows_of(cache: cute.Tensor) -> Any:
    """Rows of 576 bytes in all pages, data and scales alike."""
    return length(cache, 0) * pitch_of(cache)


def codes_copy(cache: cute.Tensor, codes: int = NOPE_DIM) -> Any:
    """Of so many of a row's codes, as words, one row after the other."""
    stride, width = ROW_BYTES // WORD, NOPE_DIM // WORD
    return gathered_rows(cache.iterator, Int32, rows_of(cache), codes // WORD, stride, width=width)


def rope_copy(cache: cute.Tensor) -> Any:
    """Of the rotary columns, as tensor cores want them."""
    start: Any = cache.iterator
    return gathered_rows(start + NOPE_DIM, BFloat16, rows_of(cache), SLAB, ROW_BYTES // 2, swizzle=128)


# ---- key


@dataclass(frozen=True)
class BlackwellDecodeKey(DecodeKernelKey):
    """What distinguishes one compiled kernel from another. Both caches are fp8_ds_mla, whose pages a gathering copy can
    address; any number of heads.

    second     the second list: "none", "listed" (indices) or "dense" (a block table)
    out_fp32   whether out is fp32, else it is bf16
    """

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.decode"
    second: str = "listed"
    out_fp32: bool = False

    def __post_init__(self) -> None:
        if self.second not in EXTRA:
            raise ValueError(f"second: expected one of {EXTRA}, got {self.second!r}")

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        return "tcgen05.mma", "tcgen05.ld", "tma.gather4", "cp.async", "ex2", "mbarrier", "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(DecodeKernel(self).launch, fake_decode(self.out_fp32))


# ---- what a tile takes

ROWS = (64, 256)
"""Of calls that are reckoned up."""


def shapes(heads: int) -> tuple[Shape, ...]:
    """Calls with 128 and 512 columns, and so many heads, all of one work tile."""
    found = []
    for rows in ROWS:
        moved = rows * ((128 + 512) * FP8_DS_MLA.row_elements + 2 * heads * HEAD_DIM * 2)
        found.append(Shape(f"b{rows} h{heads} 128+512", rows * (128 + 512) // KEYS, moved))
    return tuple(found)


def work() -> tuple[Work, ...]:
    """Of a tile, whatever its heads: 64 of them are computed."""
    products = 2 * 2 * HEADS * KEYS * HEAD_DIM
    return (
        Work(
            op="sparse_mla_decode",
            kernel="64 heads",
            tile=f"{KEYS} keys, {HEADS} heads",
            blocks=1,
            hbm=KEYS * FP8_DS_MLA.row_elements,
            mma={"bf16": products},
            smem={
                "codes in and out": 2 * RAW_BYTES,
                "bf16 in": STAGE_BYTES,
                "Q K^T": STAGE_BYTES + (SLABS - Q_SLABS) * SLAB_BYTES,
                "P": 3 * SLAB_BYTES,
                "P V": STAGE_BYTES,
            },
            flops=products,
            shapes=shapes(HEADS),
            # instructions of a warp of each, which share a scheduler. CUDA 12's assembler moves the bits of codes;
            # that of CUDA 13.2 converts them in 325
            threads={"codes to bf16": 780, "softmax": 290, "all else": 60},
        ),
    )
