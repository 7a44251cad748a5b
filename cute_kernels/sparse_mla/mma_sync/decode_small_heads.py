# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode for up to 16 heads and fp8_ds_mla caches, by mma.sync: a work tile's KV is split in the CTA.

A CTA of four warps takes work tiles (params.TileScheduler): a split of a query row's KV, a head group of 8 or 16. A KV
group is one warp (8 heads) or two (16), so there are four or two KV groups; group g of G takes steps g, g + G ... of 16
keys each. Within a group each warp has as many of the 512 columns, in both products. All warps have the same role:

    1. copies    its columns of the keys of a later step, by cp.async, to a ring that is its own
    2. S         multiplies its columns of K with those of Q, and adds the other warps' parts of S
    3. softmax   of all of them
    4. O         adds P V to its columns of O, in registers

    indices  gmem --> lanes, an entry each --> row of the cache --+
    KV       gmem --cp.async--> warp's ring [stages][16 keys] e4m3, bf16, scales --+--f16--> S^T = K Q^T --softmax--> P
    Q        gmem --> registers --f16, bf16--> queries --------------------------- +                                |
                                                               ring (again), transposed --f16--> O^T = V^T P^T <----+
    O        of all KV groups --> maxima, results (shared memory) --sum--> gmem

No warp loads or converts what another one has. The warps of a KV group wait for one another once a step, and for the
other groups at the end of a work tile alone: then all agree on the maxima, each stores what it has of O, by its
factors, where others find it, some columns at a time, and each adds up some heads of the columns of its rank over all
groups.

Keys are the M side of S^T = K Q^T, and what is summed in O^T = V^T P^T; heads are the N side of both. Lane l has, with
r = l // 4 and c = l % 4:

    q       columns 16 c .. + 15 of each block, of head r of each group of 8 heads: operand b
    scores  of keys r and r + 8 with heads 2 c and 2 c + 1 of each group
    o       operand d of the same heads: see first_column

Both products take codes as f16, which hardware converts. The first product's sums of each block are scaled; in the
second one P is. That is done as long as a work tile's scales are of the usual kind (LEAST_SCALE); from the first step
on that has others, `wide` is not 0, and the second product takes codes as bf16 and scales them.

Shared memory, in this order:

    rings     [4 warps][stages] what the warp's columns of a step are copied to:
                [blocks of 64 columns][16 keys][64] e4m3, the last one's rotated columns [16 keys][64] bf16 behind them,
                and at the end [16 keys][8] scale bytes
    partials  [2][4 warps][heads / 8][32 lanes] four fp32: a warp's part of Q K^T, if there are others in its KV group
    queries   [ranks][blocks][4 products][heads / 8 groups][32 lanes] two words, four of a lane side by side: Q as
              operand b, see above
    peaks     [4 warps][heads] words: largest magnitudes of a block of Q, for those who convert the others
    results   [4 warps][heads][width] fp32 and a gap: some of a warp's columns of O, of a KV group's part of a work tile
    maxima    [KV groups][heads] two fp32: maximum and sum of weights
    cursors   [4 warps][16] words: where each warp is in its KV group's steps
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, mma_sync, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import lanes_max_bf16x2
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, NOPE_DIM
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla.early import prefetch_first
from cute_kernels.sparse_mla.kernel_args import DecodeArgs, DecodeKernelKey, fake_decode
from cute_kernels.sparse_mla.params import EXTRA, KVCache, Output, Query, TileScheduler
from cute_kernels.sparse_mla.quant_output import SCALED, codes_of_lanes, load_two_angles, turn_two

# ---- config

WARPS, LANES = 4, 32
CTAS_PER_SM = 2
"""While one CTA begins or ends a work tile, the other one multiplies."""

KEYS = 16
"""Of a step: the M side of the product with Q, what is summed in the product with P."""

GROUP = 8
"""Heads that an instruction takes: the N side of both products."""

BLOCK = 64
"""Columns with a scale of their own."""

assert NOPE_DIM + BLOCK == HEAD_DIM

BLOCK_BYTES, ROPE_BYTES = KEYS * BLOCK, 2 * KEYS * BLOCK
SCALES_BYTES = KEYS * FP8_DS_MLA.scale_bytes
CHUNK, CURSOR_BYTES, MOST_STAGES = 16, 64, 4
HEADS = (8, 16)
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""They convert e4m3 to f16, and have the shared memory."""

LEAST_SCALE, SCALES = 112, 16
"""Scale bytes from which on, and how many, the product with P takes in f16: 2^-15 to 1."""

NO_SCALES = LEAST_SCALE * 0x01010101
"""Scale bytes of keys that are not there: any, of those."""

SHIFT = 8
"""O of such blocks is counted in 2^-SHIFT, so that f16 loses less of P times small scales."""

RESERVED = 1024
"""Bytes of shared memory that the system takes from a multiprocessor for each CTA."""

GAP = 16
"""Bytes between two rows of results: lanes that store columns of four pairs of heads do not meet in a bank."""


@dataclass(frozen=True)
class SmallHeadsConfig:
    """Sizes of a CTA. heads: of a work tile, one of HEADS."""

    arch: str
    heads: int

    def __post_init__(self) -> None:
        if self.heads not in HEADS:
            raise ValueError(f"heads: expected one of {HEADS}, got {self.heads}")
        if self.arch not in ARCHS:
            raise ValueError(f"arch: expected one of {', '.join(ARCHS)}, got {self.arch!r}")

    @property
    def ranks(self) -> int:
        """Warps of a KV group."""
        return self.heads // GROUP

    groups = ranks  # of heads: as many

    @property
    def kv_groups(self) -> int:
        return WARPS // self.ranks

    @property
    def width(self) -> int:
        """Columns of a warp that go out at a time, so that shared memory has room for them."""
        return {1: 128, 2: 64}[self.ranks]

    @property
    def shares(self) -> int:
        """Blocks of its columns of Q that a warp converts for its KV group's others."""
        return self.blocks // self.kv_groups

    @property
    def columns(self) -> int:
        """Of a warp."""
        return HEAD_DIM // self.ranks

    @property
    def blocks(self) -> int:
        """Of a warp, rotated columns included."""
        return self.columns // BLOCK

    @property
    def codes(self) -> int:
        """Blocks of e4m3 columns of a KV group's last warp; the others have one more."""
        return self.blocks - 1

    @property
    def rope_at(self) -> int:
        """In a stage: the last warp's rotated columns, the others' last block."""
        return self.codes * BLOCK_BYTES

    @property
    def scales_at(self) -> int:
        return self.rope_at + ROPE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.scales_at + SCALES_BYTES

    @property
    def stages(self) -> int:
        free = (SMEM_BYTES[self.arch] + RESERVED) // CTAS_PER_SM - RESERVED - sum(self.parts(0).values())
        return min(free // (WARPS * self.stage_bytes), MOST_STAGES)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def resident(self) -> int:
        """Blocks of Q that a warp keeps in registers, for a work tile; it reads the others in each step. With more, the
        assembler spills."""
        return {1: 0, 2: 2}[self.ranks]

    # ---- of a warp, in bytes ----

    @property
    def partial_bytes(self) -> int:
        return self.groups * LANES * 16

    @property
    def query_bytes(self) -> int:
        return self.groups * self.columns * GROUP * 2

    @property
    def peak_bytes(self) -> int:
        return self.heads * 4

    @property
    def pitch(self) -> int:
        """From head to head of a warp's results."""
        return self.width * 4 + GAP

    @property
    def result_bytes(self) -> int:
        return self.heads * self.pitch

    def parts(self, stages: int) -> dict[str, int]:
        """Bytes of everything in shared memory, in order."""
        return {
            "rings": WARPS * stages * self.stage_bytes,
            "partials": 2 * WARPS * self.partial_bytes if self.ranks > 1 else 0,
            "queries": self.ranks * self.query_bytes,
            "peaks": WARPS * self.peak_bytes,
            "results": WARPS * self.result_bytes,
            "maxima": self.kv_groups * self.heads * 8,
            "cursors": WARPS * CURSOR_BYTES,
        }

    @property
    def smem_bytes(self) -> int:
        return sum(self.parts(self.stages).values())

    def place(self, part: str) -> int:
        """Where it begins."""
        names = itertools.takewhile(lambda name: name != part, parts := self.parts(self.stages))
        return sum(parts[name] for name in names)

    # ---- words and registers of a lane: numbers of the first of several ----

    def query(self, block: int, product: int, group: int) -> int:
        """Two words of Q: columns 16 c + 4 product .. of a block, if the lane is 4 r + c, and head r of a group."""
        return ((block * 4 + product) * self.groups + group) * 2

    def sums(self, block: int, chunk: int, group: int) -> int:
        """Four sums of O: see first_column."""
        return ((block * 4 + chunk) * self.groups + group) * 4


def code_place(key: int, chunk: int) -> int:
    """Place of 16 of a key's 64 e4m3 columns in a block: of eight keys, and of two, no two chunks share banks."""
    return key * BLOCK + (chunk ^ (key >> 1 & 3)) * CHUNK


def rope_place(key: int, chunk: int) -> int:
    """The same of 8 rotated columns."""
    return key * (2 * BLOCK) + (chunk ^ (key & 7)) * CHUNK


def first_column(is_rope: bool, r: int) -> tuple[int, int]:
    """Columns, of the 16 of a chunk, of the sums that lane 4 r + c has: the first two of the first one, for heads 2 c
    and 2 c + 1 of a group, the others of the second one."""
    return (r, r + 8) if is_rope else (2 * r, 2 * r + 1)


class Own(NamedTuple):
    """What tells the warps of a KV group apart.

    kv_group, rank   numbers
    is_last          whether the warp has the rotated columns
    column           its first one
    scales           byte of a key's eight from which on a word has the scales of its blocks
    mask             which bits of it mean something; of a warp alone, in the second word
    """

    kv_group: Any
    rank: Any
    is_last: Any
    column: Any
    scales: Any
    mask: Any


@cute.jit
def own_of(warp: Any, config: cutlass.Constexpr) -> Own:
    """What the warp of that number has."""
    rank = warp % config.ranks
    is_last = rank == config.ranks - 1
    block = rank * config.blocks
    masks = [Int32(-1 if blocks % 4 == 0 else (1 << 8 * (blocks % 4)) - 1) for blocks in (config.blocks, config.codes)]
    mask = masks[1] if is_last else masks[0]
    return Own(warp // config.ranks, rank, is_last, block * BLOCK, block, mask)


@dataclass(frozen=True)
class Warp:
    """Where the code of a warp runs: address of shared memory, what the warp has, the thread's lane."""

    config: SmallHeadsConfig
    smem: Any
    own: Own
    lane: Any


def warp_of(config: SmallHeadsConfig, smem: Any) -> Warp:
    """Found out again, so that it is not kept in registers."""
    thread = ptx.thread_again()
    own = own_of(cute.arch.make_warp_uniform(thread >> (LANES.bit_length() - 1)), config)
    return Warp(config, smem, own, thread & (LANES - 1))


# ---- producer

ITEM, STEP, STEPS, STEPS_FIRST, COLUMN, END, COLUMN_SECOND, END_SECOND = range(8)
ROW, ROW_SECOND, WORDS = 8, 10, 12
LOADED_LIST, LOADED_COLUMN, CURRENT = range(12, 15)
"""Words of a warp's cursor, in shared memory, as O and Q leave no registers: work tile, the step that is fetched, the
work tile's steps, those of its first list; of either list, column of its first step and end of the work tile's columns;
two words each, addresses of the rows of both lists; list (-1: none) and first column of the step that is fetched and
not yet copied; the work tile whose products are under way."""


def steps_of(first: Any, end: Any) -> Any:
    return cutlass.max(end - first + (KEYS - 1), Int32(0)) >> (KEYS.bit_length() - 1)


@dataclass(frozen=True)
class Producer:
    """A warp's walk through the steps of its KV group, and the copies of its columns of them.

    cursor    address of its words in shared memory
    ring      address of its stages
    index     register: what the lane has loaded, the entry of key lane % 16 of the step that is fetched
    valid     register: whether there are keys r and r + 8 of a stage, bits of its number and 8 further
    """

    config: Any
    second: str
    scheduler: Any
    caches: Any
    lists: Any
    queries: Query
    own: Own
    cursor: Any
    ring: Any
    index: Any
    valid: Any

    @cute.jit
    def start(self, warp: Any, lane: Any) -> None:
        """Go to the first work tile."""
        words = cute.make_rmem_tensor((WORDS,), Int32)
        words.fill(0)
        words[ITEM] = self.scheduler.first - self.scheduler.step
        self.valid[0] = Int32(0)
        self.store_cursor(words, lane)
        self.load_indices(warp, lane)

    @cute.jit
    def store_cursor(self, words: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            for i in range_constexpr(WORDS // 4):
                ptx.store_shared_128(self.cursor + 16 * i, [words[4 * i + j] for j in range(4)])
        cute.arch.sync_warp()

    @cute.jit
    def load_indices(self, warp: Any, lane: Any) -> None:
        """Go to the KV group's next step, and ask for its entries."""
        work_tile, step, steps, steps_first = ptx.load_shared_128(self.cursor)
        step = step + self.config.kv_groups
        if step >= steps and work_tile < self.scheduler.end:
            work_tile, step, steps, steps_first = self.next_work_tile(work_tile, warp, lane)
        exists = work_tile < self.scheduler.end
        row_low, row_high, second_low, second_high = ptx.load_shared_128(self.cursor + 4 * ROW)
        first, end, first_second, end_second = ptx.load_shared_128(self.cursor + 4 * COLUMN)
        which = Int32(0)
        if const_expr(self.second != "none"):
            is_second = step >= steps_first
            which = Int32(1) if is_second else Int32(0)
            row_low, row_high = (second_low if is_second else row_low), (second_high if is_second else row_high)
            first, end = (first_second if is_second else first), (end_second if is_second else end)
            first = first - (steps_first * KEYS if is_second else Int32(0))
        first = first + step * KEYS
        column = first + (lane & (KEYS - 1))
        is_live = exists and column < end
        if const_expr(self.second == "dense"):
            page, _ = divmod(column, self.caches[1].rows)
            column = page if which == 1 else column
        self.index[0] = ptx.load_global_s32_where(is_live, ptx.pair(row_low, row_high) + Int64(column) * 4)
        cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_128(self.cursor, (work_tile, step, steps, steps_first))
            ptx.store_shared_64(self.cursor + 4 * LOADED_LIST, which if exists else Int32(-1), first)
        cute.arch.sync_warp()

    @cute.jit
    def next_work_tile(self, work_tile: Any, warp: Any, lane: Any) -> tuple[Any, Any, Any, Any]:
        """Go to the next work tile that has steps for the KV group: it, the KV group's first step, its steps, its first
        list's. Behind the last work tile there is none, and nothing else changes."""
        words = cute.make_rmem_tensor((WORDS,), Int32)
        words.fill(0)
        words[ITEM] = work_tile
        words[STEP] = Int32(0)
        while words[STEP] >= words[STEPS] and words[ITEM] < self.scheduler.end:
            words[ITEM] = words[ITEM] + self.scheduler.step
            words[STEP] = self.own.kv_group
            words[STEPS] = Int32(0)
            if words[ITEM] < self.scheduler.end:
                batch, token, split_idx, head_group = self.scheduler.coords(words[ITEM])
                words[ROW], words[ROW + 1] = ptx.halves(self.lists[0].row(batch, token))
                if const_expr(self.second != "none"):
                    words[ROW_SECOND], words[ROW_SECOND + 1] = ptx.halves(self.lists[1].row(batch, token))
                self.prefetch_queries(batch, token, head_group)
                self.prefetch_lists(words[ITEM] + self.scheduler.step, warp, lane)
                columns = self.scheduler.columns_of(self.lists, self.second, batch, token, split_idx)
                words[COLUMN], words[END], words[COLUMN_SECOND], words[END_SECOND] = columns
                words[STEPS_FIRST] = steps_of(*columns[:2])
                words[STEPS] = words[STEPS_FIRST] + steps_of(*columns[2:])
        self.store_cursor(words, lane)
        return words[ITEM], words[STEP], words[STEPS], words[STEPS_FIRST]

    @cute.jit
    def prefetch_queries(self, batch: Any, token: Any, head_group: Any) -> None:
        """L2 has the work tile's queries by the time they are wanted: a line or two from each thread."""
        lines, threads = const_expr(2 * HEAD_DIM // 128), const_expr(WARPS * LANES)
        head, thread = head_group * self.config.heads, ptx.thread_again()
        for first in range_constexpr(0, self.config.heads * lines, threads):
            line = first + thread
            row = self.queries.at(batch, token, head + line // lines)
            ptx.prefetch_l2(row + line % lines * 128, line < self.queries.left(head, self.config.heads) * lines)

    @cute.jit
    def prefetch_lists(self, work_tile: Any, warp: Any, lane: Any) -> None:
        is_wanted = work_tile < self.scheduler.end and warp == 0
        self.scheduler.prefetch(work_tile, self.lists, self.caches[1], self.second, lane, is_wanted)

    @cute.jit
    def copy_async(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the warp's columns of the fetched step copied to a stage, zeros where there is no key; a group of its
        own. Load the indices of the next one."""
        which = ptx.load_shared_s32(self.cursor + LOADED_LIST * 4)
        if const_expr(self.second == "none"):
            if which >= 0:
                self.copy_rows_async(stage, lane, 0)
        elif which == 0:
            self.copy_rows_async(stage, lane, 0)
        elif which == 1:
            self.copy_rows_async(stage, lane, 1)
        cute.arch.cp_async_commit_group()
        self.load_indices(warp, lane)

    @cute.jit
    def copy_rows_async(self, stage: Any, lane: Any, which: cutlass.Constexpr) -> None:
        config, cache, entry = self.config, self.caches[which], self.index[0]
        lane = ptx.again(lane)
        r, chunk, key = lane >> 2, lane & 3, lane & (KEYS - 1)
        target = self.ring + stage * config.stage_bytes
        known = cutlass.max(entry, Int32(0))
        page, inside = divmod(known, cache.rows)
        if const_expr(which == 1 and self.second == "dense"):
            page = known
            _, inside = divmod(ptx.load_shared_s32(self.cursor + LOADED_COLUMN * 4) + key, cache.rows)
        is_there = entry >= 0 and page < cache.pages
        start = cache.base + (Int64(page) * cache.page_stride if is_there else Int64(0))
        inside = inside if is_there else Int32(0)
        if lane < KEYS:
            scales = start + Int64(cache.rows.divisor) * FP8_DS_MLA.data_bytes
            scales = scales + Int64(inside) * FP8_DS_MLA.scale_bytes
            bytes_at = target + config.scales_at + key * FP8_DS_MLA.scale_bytes
            if is_there:
                ptx.copy_async_or_zero(bytes_at, scales, FP8_DS_MLA.scale_bytes, FP8_DS_MLA.scale_bytes)
            else:
                ptx.store_shared_64(bytes_at, NO_SCALES, NO_SCALES)
        rows = ptx.halves(start + Int64(inside) * FP8_DS_MLA.data_bytes)
        there = (cute.arch.vote_ballot_sync(is_there) >> r) & 0x0101
        self.valid[0] = (self.valid[0] & ~(Int32(0x0101) << stage)) | (there << stage)
        offset = self.own.column + chunk * CHUNK
        for side in range_constexpr(2):
            low, high = (cute.arch.shuffle_sync(half, 8 * side + r) for half in rows)
            data = ptx.pair(low, high) + Int64(offset)
            read = (there >> 8 * side & 1) * CHUNK
            # keys r and r + 8 have their chunks in the same order
            place = target + 8 * side * BLOCK + code_place(r, chunk)
            for i in range_constexpr(config.codes):
                ptx.copy_async_or_zero(place + i * BLOCK_BYTES, data + i * BLOCK, CHUNK, read)
            if self.own.is_last:
                for i in range_constexpr(2):
                    rope = target + config.rope_at + 8 * side * (2 * BLOCK) + rope_place(r, chunk + 4 * i)
                    ptx.copy_async_or_zero(rope, data + (config.codes + i) * BLOCK, CHUNK, read)
            else:
                ptx.copy_async_or_zero(place + config.rope_at, data + config.codes * BLOCK, CHUNK, read)


# ---- queries

# All warps of a CTA convert the queries of a work tile, and share them: e4m3 columns as f16, by a power of two that
# brings the largest one that a head has in the columns of a rank to 2^7 ... 2^8, rotated columns as bf16. f16 then
# holds exactly what is at least 2^-24 of the largest one, and the rest to 2^-32 of it.

QUERY_EXPONENT = 7


class Operand(NamedTuple):
    """Q: Registers of the resident blocks, and where the lane finds all of them."""

    words: Any
    at: Any


@cute.jit
def load_query(query: Any, head_bytes: Any, heads: Any, warp: Warp) -> tuple[Any, ...]:
    """Load the warp's share of a work tile's queries: the KV group's blocks of its rank's columns. Heads that do not
    exist are zeros.

    query   address of the work tile's first head
    """
    config, own, lane = warp.config, warp.own, warp.lane
    r, c = lane >> 2, lane & 3
    at = query + Int64(r) * head_bytes + Int64(own.column + own.kv_group * (config.shares * BLOCK) + 16 * c) * 2
    words = []
    for share in range_constexpr(config.shares):
        for group in range_constexpr(config.groups):
            exists = group * GROUP + r < heads
            place = at + head_bytes * (group * GROUP) + share * (BLOCK * 2)
            for half in range_constexpr(2):
                four = ptx.load_global_128_where(exists, place + 16 * half)
                words += [word if exists else Int32(0) for word in four]
    return tuple(words)


@cute.jit
def convert_query(q: Any, factors: Any, given: Any, warp: Warp) -> None:
    """Convert a work tile's queries and put them where all warps find them; by all warps of the CTA.

    q         Registers for the resident blocks, see SmallHeadsConfig.query
    factors   the lane's two of each group: what products of e4m3 columns are multiplied with
    given     of load_query
    """
    config, smem, own, lane = warp.config, warp.smem, warp.own, warp.lane
    r, c = lane >> 2, lane & 3
    words = list(given)
    peaks = smem + config.place("peaks") + own.rank * config.peak_bytes + r * 4
    mine = peaks + own.kv_group * (config.ranks * config.peak_bytes)
    are_rope = [own.is_last & (own.kv_group * config.shares + share == config.codes) for share in range(config.shares)]
    for group in range_constexpr(config.groups):
        peak = Int32(0)
        for share in range_constexpr(config.shares):
            first = const_expr(8 * (share * config.groups + group))
            largest = lanes_max_bf16x2(convert.absmax_bf16x2(*words[first : first + 8]), 4)
            largest = cutlass.max(largest & 0x7FFF, largest >> 16)
            peak = cutlass.max(peak, Int32(0) if are_rope[share] else largest)
        ptx.store_shared_s32(mine + group * (GROUP * 4), peak)
    cute.arch.sync_threads()
    target = query_at(warp) + own.kv_group * (config.shares * config.groups * 1024)
    for group in range_constexpr(config.groups):
        largest = Int32(0)
        for kv_group in range_constexpr(config.kv_groups):
            peak = ptx.load_shared_s32(peaks + kv_group * (config.ranks * config.peak_bytes) + group * (GROUP * 4))
            largest = cutlass.max(largest, peak)
        # of 2^(QUERY_EXPONENT + 127 - exponent), so that neither it nor its inverse is subnormal
        field = cutlass.min(QUERY_EXPONENT + 254 - (largest >> 7), Int32(253))
        factor = (field << 23).bitcast(Float32)
        inverse = ((254 - field) << 23).bitcast(Float32)
        for i in range_constexpr(2):
            factors[2 * group + i] = cute.arch.shuffle_sync(inverse, 8 * c + 4 * i)
        for share in range_constexpr(config.shares):
            first = const_expr(8 * (share * config.groups + group))
            for i in range_constexpr(first, first + 8):
                word = words[i]
                scaled = ptx.f16x2(convert.bf16_low(word) * factor, convert.bf16_high(word) * factor)
                words[i] = word if are_rope[share] else scaled
    for share in range_constexpr(config.shares):
        mine = words[8 * config.groups * share : 8 * config.groups * (share + 1)]
        pairs = [mine[8 * group + 2 * i : 8 * group + 2 * i + 2] for i in range(4) for group in range(config.groups)]
        for i in range_constexpr(2 * config.groups):
            place = target + (share * 2 * config.groups + i) * (LANES * 16)
            ptx.store_shared_128(place, pairs[2 * i] + pairs[2 * i + 1])
    cute.arch.sync_threads()
    for i in range_constexpr(config.resident * config.groups * 2):
        four = ptx.load_shared_128(query_at(warp) + i * (LANES * 16))
        for j in range_constexpr(4):
            q.put(4 * i + j, four[j])


def query_at(warp: Warp) -> Any:
    """Where a lane finds its first words of the warp's columns of Q."""
    config, smem, own, lane = warp.config, warp.smem, warp.own, warp.lane
    return smem + config.place("queries") + own.rank * config.query_bytes + lane * 16


# ---- dequantization, MMA and softmax

RESCALE_THRESHOLD = 7.0
"""A head's maximum moves when a score, in log2 units, is more than this above it: O is rarely rescaled, and P is
at most 2^7, so that it fits f16 times 2^SHIFT."""

NEG_MAX = -3.0e38
"""The maximum of nothing."""

ODD_BITS = -0x0F0F0F10
"""The upper halves of all bytes: where usual scales, counted from the least, have nothing."""

F16_OF_SCALE = (15 - 127 + SHIFT) * 1024
"""Added to 1024 times a scale byte: bits of the scale times 2^SHIFT as f16."""


def scale_words(stage: Any, key: Any, own: Own, config: Any) -> list[Any]:
    """Words of scale bytes of a key's e4m3 columns that the warp has, the first block's lowest; others are usual."""
    at = stage + config.scales_at + key * 8
    others = ~own.mask & NO_SCALES
    if config.ranks == 1:
        low, high = ptx.load_shared_64(at)
        return [low, high & own.mask | others]
    word = ptx.load_shared_s32(at + own.scales)
    return [word & own.mask | others]


def scale_of(words: list[Any], block: int) -> Any:
    """fp32 scale of a key's block; byte 255 gives infinity."""
    word, number = words[block // 4], block % 4
    shifted = word << (23 - 8 * number) if number < 3 else word >> 1
    return cutlass.max(shifted & 0x7F800000, Int32(0x00400000)).bitcast(Float32)


def byte_of(words: list[Any], block: int) -> Any:
    return words[block // 4] >> 8 * (block % 4) & 0xFF


def are_odd(words: list[Any]) -> Any:
    """Whether a scale of any of the warp's keys is not of the usual ones. words: of keys r and r + 8."""
    bits = words[0] - NO_SCALES
    for word in words[1:]:
        bits = bits | (word - NO_SCALES)
    return cute.arch.vote_any_sync(bits & ODD_BITS != 0)


@cute.jit
def multiply_qk(scores: Any, q: Operand, factors: Any, scales: list[Any], is_odd: Any, stage: Any, warp: Warp) -> None:
    """The warp's part of S.

    scores    registers: four for each group
    scales   words of keys r and r + 8
    stage    address of the step's
    """
    config, own, lane = warp.config, warp.own, warp.lane
    r, c = lane >> 2, lane & 3
    at = stage + code_place(r, c)
    for i in range_constexpr(4 * config.groups):
        scores[i] = Float32(0.0)
    for block in range_constexpr(config.codes):
        multiply_codes(scores, q, scales, at, block, config)
    rope = stage + config.rope_at + rope_place(r, 2 * c)
    if own.is_last:
        multiply_rope(scores, q, factors, rope, config)
    else:
        multiply_codes(scores, q, scales, at, config.codes, config)
        for i in range_constexpr(4 * config.groups):
            scores[i] = scores[i] * factors[i // 4 * 2 + i % 2]
    if is_odd:
        for side in range_constexpr(2):
            is_nan = byte_of(scales[side], 0) == 0xFF
            for block in range_constexpr(1, config.blocks):
                is_nan = is_nan | (byte_of(scales[side], block) == 0xFF)
            for i in range_constexpr(2 * config.groups):
                place = i // 2 * 4 + 2 * side + i % 2
                scores[place] = Float32(Float32.nan) if is_nan else scores[place]


def products(q: Operand, words: list[Any], block: int, is_f16: bool, config: Any) -> list[Any]:
    """Sums of a block's four products by group. words: four of operand a for each."""
    first = config.query(block, 0, 0)
    near: list[Any] = []
    if block >= config.resident:
        for i in range(2 * config.groups):
            near += ptx.load_shared_128(q.at + (first // 4 + i) * (LANES * 16))
    sums: list[Any] = [()] * config.groups
    for product in range(4):
        for group in range(config.groups):
            place = config.query(block, product, group)
            b = near[place - first : place - first + 2] if near else q.words.two(place)
            sums[group] = mma_sync.multiply_by(words[product], b, sums[group], is_f16)
    return [word.bitcast(Float32) for four in sums for word in four]


def multiply_codes(scores: Any, q: Operand, scales: list[Any], at: Any, block: int, config: Any) -> None:
    """Add a block of e4m3 columns."""
    near, far = (ptx.load_shared_128(at + block * BLOCK_BYTES + 8 * side * BLOCK) for side in range(2))
    words = []
    for i in range(4):
        pairs = ptx.f16x2_of_e4m3x4(near[i]), ptx.f16x2_of_e4m3x4(far[i])
        words.append((pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]))
    factors = [scale_of(scales[side], block) for side in range(2)]
    for i, value in enumerate(products(q, words, block, True, config)):
        scores[i] = ptx.fma_rn(value, factors[i % 4 // 2], scores[i])


def multiply_rope(scores: Any, q: Operand, factors: Any, at: Any, config: Any) -> None:
    """Multiply what there is so far with the heads' factors, and add the rotated columns."""
    rows = []
    for side in range(2):
        row = at + 8 * side * (2 * BLOCK)
        rows.append([*ptx.load_shared_128(row), *ptx.load_shared_128(row ^ CHUNK)])
    near, far = rows
    words = [(near[2 * i], far[2 * i], near[2 * i + 1], far[2 * i + 1]) for i in range(4)]
    for i, value in enumerate(products(q, words, config.codes, False, config)):
        scores[i] = ptx.fma_rn(scores[i], factors[i // 4 * 2 + i % 2], value)


@cute.jit
def softmax(
    scores: Any, row_max: Any, row_sum: Any, o: Any, valid: Any, scale_log2: Any, config: cutlass.Constexpr
) -> None:
    """Softmax of a step.

    scores           scores, unscaled; then P
    row_max, row_sum   registers: the lane's two heads' of each group; maxima, and its part of the sums of weights
    valid           bits 0 and 8: whether there are keys r and r + 8
    """
    grows = cutlass.Boolean(False)
    for i in range_constexpr(4 * config.groups):
        # not added: the score of a key that is not there is NaN if the query is
        is_there = valid & (1 << 8 * (i % 4 // 2)) != 0
        scores[i] = scores[i] * scale_log2 if is_there else Float32(-Float32.inf)
    for i in range_constexpr(4 * config.groups):
        grows = grows | (scores[i] > row_max[i // 4 * 2 + i % 2] + Float32(RESCALE_THRESHOLD))
    if cute.arch.vote_any_sync(grows):
        rescale(scores, row_max, row_sum, o, config)
    for i in range_constexpr(4 * config.groups):
        head = i // 4 * 2 + i % 2
        scores[i] = ptx.exp2(scores[i] - row_max[head])
        row_sum[head] = row_sum[head] + scores[i]


@cute.jit
def rescale(scores: Any, row_max: Any, row_sum: Any, o: Any, config: cutlass.Constexpr) -> None:
    """Move the maxima of heads of which a score is far above, and have O and the sums follow them."""
    for group in range_constexpr(config.groups):
        for i in range_constexpr(2):
            head = 2 * group + i
            largest = ptx.max_f32(scores[4 * group + i], scores[4 * group + 2 + i])
            for step in (4, 8, 16):
                largest = ptx.max_f32(largest, cute.arch.shuffle_sync_bfly(largest, step))
            before = row_max[head]
            after = largest if largest > before + Float32(RESCALE_THRESHOLD) else before
            factor = ptx.exp2(before - after)
            row_max[head] = after
            row_sum[head] = row_sum[head] * factor
            sums = [config.sums(block, chunk, group) + i for block in range(config.blocks) for chunk in range(4)]
            o.scale([first + j for first in sums for j in (0, 2)], factor)


def widen(o: Any, first: int, end: int, config: Any) -> None:
    """Count O of some blocks in ones from here on, not in 2^-SHIFT."""
    o.scale(range(config.sums(first, 0, 0), config.sums(end, 0, 0)), Float32(2.0**-SHIFT))


@cute.jit
def multiply_pv(o: Any, scores: Any, is_odd: Any, wide: Any, stage: Any, warp: Warp) -> None:
    """Add P V to the warp's columns of O. scores: P. wide: register."""
    config, own, lane = warp.config, warp.own, warp.lane
    c = lane & 3
    if is_odd and wide[0] == 0:
        wide[0] = Int32(1)
        widen(o, 0, config.codes, config)
        if not own.is_last:
            widen(o, config.codes, config.blocks, config)
    keys = [scale_words(stage, 2 * c + 8 * (i // 2) + i % 2, own, config) for i in range(4)]
    # four 8 x 8 matrices of pairs of columns: keys 8 (m % 2) .. and chunk m / 2 in matrix m
    matrix, key = lane >> 3, lane & 7
    at = stage + (matrix & 1) * (8 * BLOCK) + code_place(key, matrix >> 1)
    # of columns: keys 8 (m / 2) .. and chunk m % 2
    rope = stage + config.rope_at + (matrix >> 1) * (8 * 2 * BLOCK) + rope_place(key, matrix & 1)
    if wide[0] != 0:
        add_blocks(add_large, o, operands(scores, ptx.bf16x2, config), keys, at, own, config)
    else:
        add_blocks(add_codes, o, operands(scores, ptx.f16x2, config), keys, at, own, config)
    if own.is_last:
        add_rope(o, operands(scores, ptx.bf16x2, config), rope, config)


@cute.jit
def add_blocks(
    add_block: cutlass.Constexpr, o: Any, p: Any, keys: Any, at: Any, own: Own, config: cutlass.Constexpr
) -> None:
    """Add P V of the warp's e4m3 columns."""
    for block in range_constexpr(config.codes):
        add_block(o, p, keys, at, block, config)
    if not own.is_last:
        add_block(o, p, keys, at, config.codes, config)


def operands(scores: Any, pair: Any, config: Any) -> list[Any]:
    """P as operand b, two words for each group. pair: of two fp32 numbers makes a word."""
    pairs = [pair(scores[2 * i], scores[2 * i + 1]) for i in range(2 * config.groups)]
    return [ptx.transpose_matrix(word) for word in pairs]


def add(o: Any, block: int, chunk: int, a: Any, p: Any, config: Any, is_f16: bool = False) -> None:
    for group in range(config.groups):
        mma_sync.accumulate(o.four(config.sums(block, chunk, group)), a, (p[2 * group], p[2 * group + 1]), is_f16)


def add_codes(o: Any, p: Any, keys: list[Any], at: Any, block: int, config: Any) -> None:
    """Add P V of a block of e4m3 columns with usual scales, times 2^SHIFT. p: f16."""
    number = block % 4
    # bytes below 128 are continued with zeros
    selector = number | (8 | number) << 4 | (4 + number) << 8 | (12 + number) << 12
    pairs = []
    for i in range(2):
        bytes_ = ptx.permute_bytes(keys[2 * i][block // 4], keys[2 * i + 1][block // 4], selector)
        pairs.append(bytes_ * 1024 + F16_OF_SCALE * 0x00010001)
    scaled = [ptx.multiply_f16x2(word, pairs[i % 2]) for i, word in enumerate(p)]
    for two in range(2):
        words = ptx.load_matrices_transposed((at ^ 2 * CHUNK * two) + block * BLOCK_BYTES)
        for half in range(2):
            # an even and an odd column of two keys: first the even one of both
            near, far = (ptx.permute_bytes(word, word, 0x3120) for word in words[2 * half : 2 * half + 2])
            a = (*ptx.f16x2_of_e4m3x4(near), *ptx.f16x2_of_e4m3x4(far))
            add(o, block, 2 * two + half, a, scaled, config, True)


def columns_of(words: Any, half: int) -> list[Any]:
    """Operand a of a chunk, times 2^-120: its even and odd columns of keys 0 to 7, and of the others."""
    return [ptx.bf16x2_of_codes(words[2 * half + i // 2], 0 if i % 2 else 8) for i in range(4)]


def add_large(o: Any, p: Any, keys: list[Any], at: Any, block: int, config: Any) -> None:
    """Add P V of a block of e4m3 columns with any scales. p: bf16."""
    pairs = []
    for i in range(2):
        low, high = (byte_of(keys[2 * i + j], block) for j in range(2))
        most = Int32(convert.LARGEST_SINGLE_SCALE)
        first = convert.scale_pair(cutlass.min(low, most), cutlass.min(high, most))
        pairs.append((first, convert.excess_pair(low, high)))
    for two in range(2):
        words = ptx.load_matrices_transposed((at ^ 2 * CHUNK * two) + block * BLOCK_BYTES)
        for half in range(2):
            a = columns_of(words, half)
            for factor in range(2):
                a = [ptx.multiply_bf16x2(word, pairs[i // 2][factor]) for i, word in enumerate(a)]
            add(o, block, 2 * two + half, a, p, config)


def add_rope(o: Any, p: Any, at: Any, config: Any) -> None:
    """Add P V of the rotated columns."""
    for chunk in range(4):
        a = ptx.load_matrices_transposed(at ^ 2 * CHUNK * chunk)
        add(o, config.codes, chunk, a, p, config)


# ---- epilogue


@cute.jit
def epilogue(
    out: Output, place: Any, o: Any, wide: Any, row_max: Any, row_sum: Any, warp: Warp, is_fp32: cutlass.Constexpr
) -> None:
    """Store the results of a work tile.

    place           split_idx, batch, token and first head
    row_max, row_sum   registers: the KV group's maxima, and the lane's part of its sums, lost
    """
    config, lane = warp.config, warp.lane
    if const_expr(out.quant is not None):
        # index for early: the position is waited for
        _, batch, token, _ = place
        angles_at = out.quant.angles_at(batch * out.tokens + token) + Int64(lane % 16 * 8)
        held = cute.make_rmem_tensor((config.heads // config.kv_groups * (config.width // 4) // LANES * 2,), Int32)
    combine_maxima(out, place, row_max, row_sum, warp)
    for number in range_constexpr(config.columns // config.width):
        if const_expr(number > 0):
            cute.arch.sync_threads()
        store_o_shared(o, wide, row_sum, number, warp)
        cute.arch.sync_threads()
        if const_expr(out.quant is not None):
            store_codes(out, place, number, held, angles_at, warp)
        else:
            store_out(out, place, number, warp, is_fp32)


@cute.jit
def combine_maxima(out: Output, place: Any, row_max: Any, row_sum: Any, warp: Warp) -> None:
    """Store the log-sum-exps, and put what the warp's O is multiplied with where its sums were."""
    config, smem, own, lane = warp.config, warp.smem, warp.own, warp.lane
    split_idx, batch, token, first = place
    r, c = lane >> 2, lane & 3
    # index for together, and early
    logits = cute.make_rmem_tensor((2 * config.groups,), Float32)
    logits.fill(-Float32.inf)
    if out.sink != 0:
        for i in range_constexpr(2 * config.groups):
            head = first + i // 2 * GROUP + 2 * c + i % 2
            word = ptx.load_global_s32_where(head < out.heads, out.sink + Int64(head) * 4, is_shared=True)
            logits[i] = word.bitcast(Float32)
    for step in (4, 8, 16):
        for i in range_constexpr(2 * config.groups):
            row_sum[i] = row_sum[i] + cute.arch.shuffle_sync_bfly(row_sum[i], step)
    maxima = smem + config.place("maxima") + 2 * c * 8
    if own.rank == 0 and r == 0:
        for group in range_constexpr(config.groups):
            words = [value[2 * group + i].bitcast(Int32) for i in range(2) for value in (row_max, row_sum)]
            ptx.store_shared_128(maxima + (own.kv_group * config.heads + group * GROUP) * 8, words)
    # the results of the work tile before have been read, too
    cute.arch.sync_threads()
    for group in range_constexpr(config.groups):
        mine = maxima + group * (GROUP * 8)
        found = [ptx.load_shared_128(mine + kv_group * (config.heads * 8)) for kv_group in range(config.kv_groups)]
        for i in range_constexpr(2):
            head = first + group * GROUP + 2 * c + i
            exists = head < out.heads
            largest = row_max[2 * group + i]
            for four in found:
                largest = ptx.max_f32(largest, four[2 * i].bitcast(Float32))
            total = Float32(0.0)
            for four in found:
                total = total + four[2 * i + 1].bitcast(Float32) * ptx.exp2(four[2 * i].bitcast(Float32) - largest)
            is_empty = total == Float32(0.0)  # and not where it is NaN
            with_sink = total + ptx.exp2(logits[2 * group + i] * Float32(ptx.LOG2_E) - largest)
            factor = ptx.exp2(row_max[2 * group + i] - largest) * ptx.reciprocal(with_sink)
            row_sum[2 * group + i] = Float32(0.0) if is_empty else factor
            lse = Float32(Float32.inf) if is_empty else (largest + ptx.log2(total)) * Float32(ptx.LN_2)
            is_chosen = exists and r == 0 and own.rank == 0 and own.kv_group == 0
            out.lse.store((split_idx, batch, head, token), lse, is_chosen)


@cute.jit
def store_o_shared(o: Any, wide: Any, factors: Any, number: cutlass.Constexpr, warp: Warp) -> None:
    """Store some of the warp's columns of O."""
    config, smem, own, lane = warp.config, warp.smem, warp.own, warp.lane
    r, c = lane >> 2, lane & 3
    unit = Float32(2.0**-SHIFT) if wide[0] == 0 else Float32(1.0)
    scaled = [factors[i] * unit for i in range(2 * config.groups)]
    results = smem + config.place("results") + (own.kv_group * config.ranks + own.rank) * config.result_bytes
    results = results + 2 * c * config.pitch
    chunks, codes = const_expr(config.width // CHUNK), const_expr(config.codes * BLOCK // CHUNK)
    for i in range_constexpr(chunks):
        chunk, at = const_expr(number * chunks + i), results + i * (CHUNK * 4)
        if const_expr(chunk < codes):
            store_chunk(o, scaled, chunk, False, at, r, config)
        elif own.is_last:
            store_chunk(o, factors, chunk, True, at, r, config)
        else:
            store_chunk(o, scaled, chunk, False, at, r, config)


def store_chunk(o: Any, factors: Any, chunk: int, is_rope: bool, at: Any, r: Any, config: Any) -> None:
    near, far = first_column(is_rope, r)
    for group in range(config.groups):
        first = config.sums(chunk // 4, chunk % 4, group)
        words = o.get([first + i for i in range(4)])
        words = [(words[i].bitcast(Float32) * factors[2 * group + i % 2]).bitcast(Int32) for i in range(4)]
        for i in range(2):
            row = at + (group * GROUP + i) * config.pitch
            if is_rope:
                ptx.store_shared_s32(row + near * 4, words[i])
                ptx.store_shared_s32(row + far * 4, words[2 + i])
            else:
                ptx.store_shared_64(row + near * 4, words[i], words[2 + i])


@cute.jit
def store_out(out: Output, place: Any, number: cutlass.Constexpr, warp: Warp, is_fp32: cutlass.Constexpr) -> None:
    """Add up what the warps of this rank have handed over, of as many heads as there are for each KV group."""
    config, smem, own, lane = warp.config, warp.smem, warp.own, warp.lane
    split_idx, batch, token, first = place
    size = const_expr(4 if is_fp32 else 2)
    quads, heads = const_expr(config.width // 4), const_expr(config.heads // config.kv_groups)
    start = out.base + Int64(split_idx) * out.strides[0] + Int64(batch) * out.strides[1] + Int64(token) * out.strides[2]
    start = start + Int64(own.column + number * config.width) * size
    results = smem + config.place("results") + own.rank * config.result_bytes
    for i in range_constexpr(heads * quads // LANES):
        number = i * LANES + lane
        row, quad = own.kv_group * heads + number // quads, number % quads
        at = results + row * config.pitch + quad * 16
        total = sum_kv_groups(at, config)
        exists = first + row < out.heads
        target = start + Int64(first + row) * out.strides[3] + quad * (4 * size)
        if const_expr(is_fp32):
            ptx.store_global_128(target, [value.bitcast(Int32) for value in total], exists)
        else:
            ptx.store_global_64(target, ptx.bf16x2(total[0], total[1]), ptx.bf16x2(total[2], total[3]), exists)


def sum_kv_groups(at: Any, config: Any) -> list[Any]:
    """Four neighbouring columns of what the warps of a rank have handed over."""
    total = [Float32(0.0)] * 4
    for kv_group in range(config.kv_groups):
        four = ptx.load_shared_128(at + kv_group * (config.ranks * config.result_bytes))
        total = [total[j] + four[j].bitcast(Float32) for j in range(4)]
    return total


@cute.jit
def store_codes(out: Output, place: Any, number: cutlass.Constexpr, held: Any, angles_at: Any, warp: Warp) -> None:
    """As store_out, for codes. The 128 columns of a scale come in one turn, or in two.

    held        registers for bf16 pairs of columns that come in the first of two turns
    angles_at   address of the cosines of the lane's pairs, if its columns are rotary
    """
    config, smem, own, lane = warp.config, warp.smem, warp.own, warp.lane
    _, batch, token, first = place
    turns = const_expr(SCALED // config.width)
    quads, heads = const_expr(config.width // 4), const_expr(config.heads // config.kv_groups)
    column = own.column + number * config.width
    token = batch * out.tokens + token
    results = smem + config.place("results") + own.rank * config.result_bytes
    is_last = const_expr(number == config.columns // config.width - 1)
    if const_expr(is_last):
        angles = load_two_angles(angles_at)
    for i in range_constexpr(heads * quads // LANES):
        row, quad = own.kv_group * heads + (i * LANES + lane) // quads, lane % quads
        pairs = convert.bf16_words(sum_kv_groups(results + row * config.pitch + quad * 16, config))
        if const_expr(number % turns < turns - 1):
            held[2 * i], held[2 * i + 1] = pairs
        else:
            values = convert.bf16_floats(pairs)
            if const_expr(is_last):
                values = turn_two(values, angles, own.is_last & (quad >= quads - 16))
            if const_expr(turns > 1):
                values = convert.bf16_floats([held[2 * i], held[2 * i + 1]]) + values
            byte, codes = codes_of_lanes(values, quads)
            exists = first + row < out.heads
            out.quant.store_scale(byte, token, first + row, column // SCALED, quad, exists)
            target = out.quant.codes_at(token, first + row) + (column - (turns - 1) * config.width + quad * 4)
            for turn in range_constexpr(turns):
                ptx.store_global_s32(target + turn * config.width, codes[turn], exists)


# ---- kernel

FIRST_BARRIER = 1


class SmallHeadsDecodeKernel:
    """See kernel_args.DecodeArgs. Where results become codes a row is one split."""

    def __init__(self, key: SmallHeadsDecodeKey) -> None:
        self.config, self.second, self.out_fp32 = key.config, key.second, key.out_fp32
        self.name = f"sparse_mla_decode_teams_h{key.heads}_{key.second}" + ("_fp32" if key.out_fp32 else "")
        self.name += "_quant" if key.quantized else ""

    @cute.jit
    def launch(self, args: DecodeArgs) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        scheduler = TileScheduler.of(args.q, self.config.heads, args.splits, args.split_tiles, args.ctas)
        caches = KVCache.of(args.cache0), KVCache.of(args.cache1)
        kernel = self.kernel(
            Query.of(args.q), caches, args.lists(self.second), args.output(), args.scale_log2, scheduler
        )
        kernel.launch(
            grid=[cutlass.min(args.ctas, scheduler.end), 1, 1],
            block=[WARPS * LANES, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self, queries: Query, caches: Any, lists: Any, out: Output, scale_log2: Float32, scheduler: TileScheduler
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread & (LANES - 1)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        config = self.config
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(config.smem_bytes), byte_alignment=128)
        smem = memory.iterator.toint()
        scheduler = scheduler._replace(first=cta)
        prefetch_first(scheduler, lists, caches, self.second, thread, True)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        own = own_of(warp, config)
        ring = smem + warp * config.ring_bytes
        index, valid, wide = (cute.make_rmem_tensor((1,), Int32) for _ in range(3))
        cursor = smem + config.place("cursors") + warp * CURSOR_BYTES
        producer = Producer(config, self.second, scheduler, caches, lists, queries, own, cursor, ring, index, valid)
        producer.start(warp, lane)
        for early in range_constexpr(config.stages):
            producer.copy_async(Int32(early), warp, lane)

        q = mma_sync.Registers("q", config.groups * max(config.resident, 1) * 8)
        o = mma_sync.Registers("o", config.groups * config.blocks * 16)
        q.declare()
        o.declare()
        factors, row_max, row_sum = (cute.make_rmem_tensor((2 * config.groups,), Float32) for _ in range(3))
        stage: Any = Int32(0)
        turn: Any = Int32(0)
        work_tile = cta
        while work_tile < scheduler.end:
            batch, token, split_idx, head_group = scheduler.coords(work_tile)
            head = head_group * config.heads
            if lane == 0:
                ptx.store_shared_s32(producer.cursor + 4 * CURRENT, work_tile)
            query = queries.at(batch, token, head)
            words = load_query(query, queries.head, queries.left(head, config.heads), warp_of(config, smem))
            columns = scheduler.columns_of(lists, self.second, batch, token, split_idx)
            steps = steps_of(*columns[:2]) + steps_of(*columns[2:])
            left = cutlass.max(steps - own.kv_group + (config.kv_groups - 1), Int32(0)) // config.kv_groups
            convert_query(q, factors, words, warp_of(config, smem))
            o.clear()
            wide.fill(0)
            row_max.fill(NEG_MAX)
            row_sum.fill(0.0)
            while left > 0:
                cute.arch.cp_async_wait_group(config.stages - 1)
                cute.arch.sync_warp()
                self.step(producer, q, factors, o, wide, row_max, row_sum, smem, stage, turn, scale_log2)
                cute.arch.sync_warp()
                producer.copy_async(stage, warp, lane)
                left = left - 1
                turn = turn ^ 1
                stage = Int32(0) if stage + 1 == config.stages else stage + 1
            work_tile = ptx.load_shared_s32(producer.cursor + 4 * CURRENT)
            batch, token, split_idx, head_group = scheduler.coords(work_tile)
            place = split_idx, batch, token, head_group * config.heads
            epilogue(out, place, o, wide, row_max, row_sum, warp_of(config, smem), self.out_fp32)
            work_tile = work_tile + scheduler.step

    @cute.jit
    def step(
        self,
        producer: Producer,
        q: Any,
        factors: Any,
        o: Any,
        wide: Any,
        row_max: Any,
        row_sum: Any,
        smem: Any,
        stage: Any,
        turn: Any,
        scale_log2: Any,
    ) -> None:
        """Both products and the softmax of a step whose rows are in a stage."""
        config = self.config
        warp = warp_of(config, smem)
        at = producer.ring + stage * config.stage_bytes
        scales = [scale_words(at, (warp.lane >> 2) + 8 * side, warp.own, config) for side in range(2)]
        is_odd = are_odd([word for words in scales for word in words])
        scores = cute.make_rmem_tensor((4 * config.groups,), Float32)
        query = Operand(q, query_at(warp))
        multiply_qk(scores, query, factors, scales, is_odd, at, warp)
        if const_expr(config.ranks > 1):
            self.exchange(scores, turn, warp)
        softmax(scores, row_max, row_sum, o, producer.valid[0] >> stage, scale_log2, config)
        multiply_pv(o, scores, is_odd, wide, at, warp)

    @cute.jit
    def exchange(self, scores: Any, turn: Any, warp: Warp) -> None:
        """Add up the parts of the scores that the warps of a KV group have, in the order of their ranks."""
        config, smem, own, lane = warp.config, warp.smem, warp.own, warp.lane
        number = turn * WARPS + own.kv_group * config.ranks
        group_at = smem + config.place("partials") + number * config.partial_bytes + lane * 16
        mine = group_at + own.rank * config.partial_bytes
        for group in range_constexpr(config.groups):
            words = [scores[4 * group + i].bitcast(Int32) for i in range(4)]
            ptx.store_shared_128(mine + group * (LANES * 16), words)
        cute.arch.barrier(barrier_id=FIRST_BARRIER + own.kv_group, number_of_threads=config.ranks * LANES)
        for group in range_constexpr(config.groups):
            for rank in range_constexpr(config.ranks):
                four = ptx.load_shared_128(group_at + rank * config.partial_bytes + group * (LANES * 16))
                for i in range_constexpr(4):
                    value = four[i].bitcast(Float32)
                    scores[4 * group + i] = value if const_expr(rank == 0) else scores[4 * group + i] + value


# ---- key


@dataclass(frozen=True)
class SmallHeadsDecodeKey(DecodeKernelKey):
    """What distinguishes one compiled kernel from another. Both caches are fp8_ds_mla.

    heads     of a work work tile: 8 or 16
    second    the second list: "none", "listed" (indices) or "dense" (a block table)
    out_fp32  whether out is fp32, else it is bf16
    quantized results are turned back and become e4m3 codes, see quant_output; not with out_fp32
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.decode_small_heads"
    ctas_per_sm: ClassVar[int] = CTAS_PER_SM
    heads: int = 8
    second: str = "listed"
    out_fp32: bool = False
    quantized: bool = False

    def __post_init__(self) -> None:
        if self.second not in EXTRA:
            raise ValueError(f"second: expected one of {EXTRA}, got {self.second!r}")

    @property
    def config(self) -> SmallHeadsConfig:
        return SmallHeadsConfig(self.arch, self.heads)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "mma.sync", "cp.async", "ldmatrix", "cvt.e4m3", "ex2", "ld.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        fakes = fake_decode(self.out_fp32, quantized=self.quantized)
        return entry_point(SmallHeadsDecodeKernel(self).launch, fakes)
