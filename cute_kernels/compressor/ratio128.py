# SPDX-License-Identifier: Apache-2.0
"""Kernel of the compressor with ratio 128: a cluster of two, four or eight CTAs computes an entry.

    a row of the state     512 x fp32 kv                             512 x fp32 score
    slice s                columns 64 * s .. + 63                    the same columns
    a CTA                  eight slices over the size of the cluster, one after another
    consumer thread        4 * (thread % 16) .. + 3, in both halves, of the rows thread / 16 + 0, 16, 32 ... 112

Warps:

    0 .. 7     consumers. A thread copies what it needs of a work tile's slice to shared memory, 64 KB a CTA, while it
               works on the slice before: it saves rows, and reduces an entry's 128 rows to a largest score, a sum of
               weights and a sum of weighted values per column and warp
    8 .. 11    producers: find out which rows to move, ahead of the others
    12         epilogue: adds those up, exchanges the sums of squares with the other CTAs and stores the columns, while
               the consumers are at the next work tile

A work tile is a table of 128 rows in shared memory. Each has an address it is read from, one it is saved to, and the
row of the bias to add on the way; an address of 0 means that nothing is read, or saved. There are two kinds:

    ENTRY    the window of an entry, its 128 rows in order
    SAVE     rows that are saved and belong to no entry

Producers look at 128 tokens of the cluster at a time, a thread at one, and then have a thread for each row of a window
that these close. In a call with many tokens, rows are saved where an entry reads them, so that they come from memory
once; only those that no entry reads make work tiles of their own (`Step.by_entries`). With few tokens every row is
saved by its own cluster: it need not find out about entries, and the second read comes from L2.

A consumer warp has 16 rows of the CTA's 64 columns, two lanes with eight rows each per four columns. It makes them a
part: per column the largest score, the sum of weights relative to that, and the sum of weighted values. The epilogue
warp merges the parts of eight consumer warps, and adds up the squares of all CTAs of the cluster. All sums have a fixed
order, so that an entry has the same bits wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.compressor import epilogue
from cute_kernels.compressor.call import CompressCall, FusedCall
from cute_kernels.dsl import ptx, reduce
from cute_kernels.dsl.convert import FP32_MAX
from cute_kernels.dsl.tensor import address, length
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, PLAIN_BF16, PLAIN_FP8, round_up
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import LARGE_CLUSTERS, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

# ---- config

RATIO = 128
"""Rows of a window, and of a table."""

ROW_BYTES = 2 * HEAD_DIM * 4
HALF_ROW = HEAD_DIM * 4

SLICES = 8
"""Of an entry's columns; and the most CTAs that every GPU with clusters can schedule as one."""

COLUMNS = HEAD_DIM // SLICES
CONSUMER_WARPS = 8

PRODUCER_WARPS = RATIO // 32
"""A thread per row."""

EPILOGUE_WARP = CONSUMER_WARPS + PRODUCER_WARPS
WARPS = EPILOGUE_WARP + 1

ROWS = 8
"""Rows of a window that a lane has."""

GROUPS = RATIO // ROWS

TABLES = 3
"""That are in use at a time: of the work tile worked on, of the next, and of the one that is listed."""

PARTS = 2
"""Entries under way between consumer warps and epilogue warp."""

COPIES = 2
"""Work tiles' rows in shared memory: one is worked on, one arrives."""

THREADS = (CONSUMER_WARPS + 1) * 32
"""That meet at a barrier between consumer warps and epilogue warp."""

CLUSTERS = (8, 4, 2)
"""CTAs that share an entry in calls of few, some and many tokens. Few entries need many multiprocessors each, many
entries need clusters that leave no multiprocessor empty: perf/log/compressor_ratio128.md."""

FEW_TOKENS = 1024
MANY_TOKENS = 4096

BY_ENTRIES_TOKENS = 64
"""Tokens per cluster from which on entries save the rows they read."""


# ---- shared memory and barriers

ROWS_ALIGNMENT = 128

TABLE_BYTES = TABLES * (RATIO * (8 + 8 + 4) + 4 * 8) + RATIO * 4 * 8 + PRODUCER_WARPS * 4
"""Of shared memory, for `Tables`."""

PART_FLOATS = PARTS * CONSUMER_WARPS * 3 * COLUMNS
MEAN_BYTES = PART_FLOATS * 4 + PARTS * (SLICES * 4 + 8)


def copy_bytes(fused: bool) -> int:
    """Of a work tile's rows: scores, values and, in the fused op, bias."""
    return (3 if fused else 2) * RATIO * COLUMNS * 4


def smem_bytes(fused: bool) -> int:
    return round_up(TABLE_BYTES, ROWS_ALIGNMENT) + COPIES * copy_bytes(fused) + MEAN_BYTES


END, SAVE, ENTRY = range(3)
"""Kinds of work tiles. END is not one: it says that none follows."""


class Tables(NamedTuple):
    """Shared memory: work tiles, TABLES of them, and the tokens of a chunk that close entries.

    source, target, bias   [TABLES * RATIO]
    head                   [TABLES * 4]: kind, slot of the entry, position of its first row
    closers                [RATIO * 4]: token, position, slot of the entry, request; 32 places for each producer warp
    closing                [PRODUCER_WARPS]: how many of a warp's places are taken
    """

    source: Any
    target: Any
    bias: Any
    head: Any
    closers: Any
    closing: Any


def allocate_tables(memory: Any) -> Tables:
    def array(element: Any, length: int) -> Any:
        return memory.allocate_tensor(element, cute.make_layout(length), byte_alignment=16)

    rows = TABLES * RATIO
    return Tables(
        array(Int64, rows),
        array(Int64, rows),
        array(Int32, rows),
        array(Int64, 4 * TABLES),
        array(Int64, 4 * RATIO),
        array(Int32, PRODUCER_WARPS),
    )


class MeanSmem(NamedTuple):
    """Shared memory between consumers and epilogue, and between the CTAs of a cluster.

    parts      [PARTS * CONSUMER_WARPS * 3 * COLUMNS]: largest score, sum of weights, sum of weighted values
    squares    [PARTS * SLICES]: sums of squares of the slices' columns
    arrived    [PARTS] mbarriers: all squares are there
    """

    parts: Any
    squares: Any
    arrived: Any


def allocate_mean(memory: Any) -> MeanSmem:
    return MeanSmem(
        memory.allocate_tensor(Float32, cute.make_layout(PART_FLOATS), byte_alignment=16),
        memory.allocate_tensor(Float32, cute.make_layout(PARTS * SLICES), byte_alignment=16),
        memory.allocate_array(Int64, PARTS),
    )


class Smem(NamedTuple):
    """Shared memory: lists of work tiles, copies of their rows [COPIES * copy_bytes / 4], parts of entries."""

    tables: Tables
    rows: Any
    memory: MeanSmem


# Named barriers; 0 is that of the whole CTA.
LISTED, HEADED, TAKEN, WRITTEN = (1 + TABLES * i for i in range(4))
READ = WRITTEN + PARTS
PRODUCERS = READ + PARTS


class Bars:
    """Tables are written by the producer warps, a thread per row, and read by the consumer warps; their heads are read
    by the epilogue warp too. It has barriers of its own, or the consumer warps could not begin a work tile before it
    has ended with the last one. Of the producer warps one waits for the others and hands over, once all producer warps
    have met.

    listed, headed, taken   the first of TABLES named barriers each: a table is written, its head is, both were read
    producers               named barrier of the producer warps
    consumers               threads; the first producer thread has this number
    fused                   whether rows are saved
    """

    def __init__(self, listed: int, headed: int, taken: int, producers: int, consumers: int, fused: bool) -> None:
        self.listed = listed
        self.headed = headed
        self.taken = taken
        self.producers = producers
        self.consumers = consumers
        self.table_threads = consumers + 32
        self.head_threads = 64
        self.taken_threads = consumers + 64
        self.fused = fused

    def row(self) -> Any:
        """The producer thread's, of each table."""
        thread, _, _ = cute.arch.thread_idx()
        return thread - self.consumers

    def wait_producers(self) -> None:
        """All producer warps wait for each other."""
        cute.arch.barrier(barrier_id=self.producers, number_of_threads=RATIO)

    def any_row(self, condition: Any) -> Boolean:
        """Whether the condition holds for one of the producer threads; it waits for all."""
        return ptx.any_of_group(self.producers, RATIO, condition) != 0

    def write(self, tables: Tables, tile: Any, source: Any, target: Any, bias: Any) -> None:
        """A producer thread's row of the table of `tile`."""
        index = tile % TABLES * RATIO + self.row()
        tables.source[index] = source
        if self.fused:
            tables.target[index] = target
            tables.bias[index] = bias

    @cute.jit
    def acquire(self, tile: Int32) -> None:
        """Wait until the table of `tile` may be written."""
        if tile >= TABLES:
            if self.row() < 32:
                cute.arch.barrier(barrier_id=self.taken + tile % TABLES, number_of_threads=self.taken_threads)
            self.wait_producers()

    @cute.jit
    def publish(self, tables: Tables, tile: Int32, kind: Int32, entry_slot: Int64, position: Int64) -> None:
        """Hand out the table of `tile`."""
        stage = tile % TABLES
        self.wait_producers()
        if self.row() < 32:
            if self.row() == 0:
                tables.head[stage * 4] = Int64(kind)
                tables.head[stage * 4 + 1] = entry_slot
                tables.head[stage * 4 + 2] = position
            cute.arch.barrier_arrive(barrier_id=self.listed + stage, number_of_threads=self.table_threads)
            cute.arch.barrier_arrive(barrier_id=self.headed + stage, number_of_threads=self.head_threads)

    @cute.jit
    def wait_table(self, tables: Tables, tile: Int32) -> Int32:
        """For consumer warps: the kind of `tile`, once its table is written."""
        stage = tile % TABLES
        cute.arch.barrier(barrier_id=self.listed + stage, number_of_threads=self.table_threads)
        return Int32(tables.head[stage * 4])

    @cute.jit
    def wait_head(self, tables: Tables, tile: Int32) -> Int32:
        """For the epilogue warp: the kind of `tile`, once its head is written."""
        stage = tile % TABLES
        cute.arch.barrier(barrier_id=self.headed + stage, number_of_threads=self.head_threads)
        return Int32(tables.head[stage * 4])

    @cute.jit
    def release(self, tile: Int32) -> None:
        """Table and head of `tile` have been read."""
        cute.arch.barrier_arrive(barrier_id=self.taken + tile % TABLES, number_of_threads=self.taken_threads)


# ---- producer: which rows


class Tokens(NamedTuple):
    """Addresses of what a call says about its tokens, and how it deals them out."""

    positions: Int64
    requests: Int64
    slots: Int64
    entry_slots: Int64
    total: Int32
    per_cluster: Int32


class Token(NamedTuple):
    """What a call says about one token."""

    position: Any
    slot: Any
    entry_slot: Any
    request: Any


class Request(NamedTuple):
    """What the fused op says about one request: its first token, and its min_restart where that counts."""

    start: Any
    restart: Any


class State(NamedTuple):
    """The state cache and its block table; strides in bytes.

    known        positions below it have a column in the table
    requests     rows of the table
    cycle        columns of the table, which come round again in the kernel for cyclic tables
    """

    pool: Int64
    page_stride: Int64
    pages: Int32
    capacity: Int32
    divisor: cute.FastDivmodDivisorV2
    table: Int64
    table_stride: Int64
    known: Int32
    requests: Int32
    cycle: cute.FastDivmodDivisorV2


class Step(NamedTuple):
    """What the fused op has besides; strides in bytes.

    restart      address of min_restart, or 0
    window       whether only rows that a later step can read are saved
    by_entries   whether entries save the rows they read
    """

    kv_score: Int64
    kv_stride: Int64
    ape: Int64
    ape_stride: Int64
    starts: Int64
    restart: Int64
    window: Int32
    by_entries: Int32


class Loaded(NamedTuple):
    """What a producer thread knows about its token of the chunk: the token's number, what the call says about it, and
    in the fused op about its request, and about the token that closes its group."""

    token: Any
    own: Token
    request: Request
    closer: Token


class Producer:
    """The warps that list work tiles. Its methods are traced into the kernel.

    fused      whether rows of the step come from kv_score, and are saved
    bars       how they reach the other warps
    cyclic     whether columns of the block table come round again
    raw        whether it has scores without their bias
    """

    def __init__(self, fused: bool, bars: Bars, cyclic: bool = False, raw: bool = False) -> None:
        self.fused = fused
        self.bars = bars
        self.cyclic = cyclic
        self.raw = raw

    @cute.jit
    def run(self, tokens: Tokens, state: State, step: Step, entries: Int32, tables: Tables, first: Int32) -> None:
        """All work tiles of the tokens from `first` on. `entries`: rows of the entry cache."""
        last = cutlass.min(first + tokens.per_cluster, tokens.total)
        tile = Int32(0)
        for chunk in cutlass.range(first, last, RATIO, unroll=1):
            loaded = self.load_token_of(tokens, state, step, chunk, last)
            self.publish_closers(state, entries, tables, loaded, last)
            self.bars.wait_producers()
            for warp in cutlass.range(PRODUCER_WARPS, unroll=1):
                for place in cutlass.range(tables.closing[warp], unroll=1):
                    tile = self.entry(tokens, state, step, tables, tile, (warp * 32 + place) * 4)
            if const_expr(self.fused):
                tile = self.save_chunk(tokens, state, step, entries, tables, tile, last, loaded)
            # the next chunk's closers overwrite these
            self.bars.wait_producers()
        self.bars.acquire(tile)
        self.bars.publish(tables, tile, Int32(END), Int64(-1), Int64(0))

    @cute.jit
    def load_token_of(self, tokens: Tokens, state: State, step: Step, chunk: Int32, last: Int32) -> Loaded:
        """Ask for all about this thread's token of a chunk; a token past the end has the numbers of the last one."""
        token = chunk + self.bars.row()
        own = self.load_token(tokens, Int64(cutlass.min(token, last - 1)))
        self.prefetch(tokens, chunk + RATIO, last)
        request, closer = Request(Int32(0), Int32(0)), own
        if const_expr(self.fused):
            is_known = own.request >= 0 and own.request < state.requests
            request = self.load_request(step, own.request if is_known else Int32(0), is_known)
            at = token + self.ahead(own)
            exists = step.by_entries != 0 and at < tokens.total
            closer = self.load_token(tokens, Int64(at if exists else Int32(0)), exists)
        return Loaded(token, own, request, closer)

    @cute.jit
    def prefetch(self, tokens: Tokens, chunk: Int32, last: Int32) -> None:
        """Ask for the numbers of the next chunk: threads 0 to 23 for eight times 16 int64 each, 24 to 27 for four times
        32 int32."""
        thread = self.bars.row()
        array = tokens.positions if thread < 8 else (tokens.slots if thread < 16 else tokens.entry_slots)
        at = array + Int64(chunk + thread % 8 * 16) * 8
        at = at if thread < 24 else tokens.requests + Int64(chunk + thread % 8 * 32) * 4
        exists = thread < 28 and chunk + thread % 8 * (16 if thread < 24 else 32) < last
        ptx.prefetch_l2(at, exists)

    @cute.jit
    def publish_closers(self, state: State, entries: Int32, tables: Tables, loaded: Loaded, last: Int32) -> None:
        """Write down the tokens of a chunk that close entries, each warp its own."""
        lane = cute.arch.lane_idx()
        warp = self.bars.row() // 32
        closes = loaded.token < last and self.closes(state, entries, loaded.own)
        mask = cute.arch.vote_ballot_sync(closes)
        place = (warp * 32 + cute.arch.popc(mask & ((Int32(1) << lane) - 1))) * 4
        if closes:
            tables.closers[place] = Int64(loaded.token)
            tables.closers[place + 1] = loaded.own.position
            tables.closers[place + 2] = loaded.own.entry_slot
            tables.closers[place + 3] = Int64(loaded.own.request)
        if lane == 0:
            tables.closing[warp] = cute.arch.popc(mask)

    def load_token(self, tokens: Tokens, at: Any, condition: Any = True) -> Token:
        """What the call says about a token, -1 where the condition fails."""
        return Token(
            ptx.load_global_s64_where(condition, tokens.positions + at * 8),
            ptx.load_global_s64_where(condition, tokens.slots + at * 8),
            ptx.load_global_s64_where(condition, tokens.entry_slots + at * 8),
            ptx.load_global_s32_where(condition, tokens.requests + at * 4),
        )

    @cute.jit
    def closes(self, state: State, entries: Int32, token: Token) -> Boolean:
        """Whether a token with these numbers closes an entry."""
        ends = token.position >= 0 and (Int32(token.position) & (RATIO - 1)) == RATIO - 1
        has_slots = self.is_row(token.slot, state.capacity) and self.is_row(token.entry_slot, entries)
        return ends and has_slots and token.request >= 0 and token.request < state.requests

    @cute.jit
    def is_row(self, slot: Int64, capacity: Int32) -> Boolean:
        return slot >= 0 and slot < Int64(capacity)

    @cute.jit
    def entry(self, tokens: Tokens, state: State, step: Step, tables: Tables, tile: Int32, place: Int32) -> Int32:
        """The work tile of a closer if all its rows can be read, else of the rows to save if there are such. Returns
        the number of the next work tile."""
        token = Int32(tables.closers[place])
        position = tables.closers[place + 1]
        entry_slot = tables.closers[place + 2]
        request = Int32(tables.closers[place + 3])
        row = self.bars.row()
        behind = (RATIO - 1) - row
        at = position - Int64(behind)
        is_known = at < Int64(state.known)
        column, offset = divmod(Int32(at if is_known else Int64(0)), state.divisor)
        if const_expr(self.cyclic):
            _, column = divmod(column, state.cycle)
        table = state.table + Int64(request) * state.table_stride
        page = ptx.load_global_s32_where(is_known, table + Int64(column) * 4)
        target, bias, is_saved = Int64(0), Int32(-1), Boolean(False)
        own, facts = Token(Int64(-1), Int64(-1), Int64(-1), Int32(-1)), Request(Int32(0), Int32(0))
        if const_expr(self.fused):
            own = self.load_token(tokens, Int64(cutlass.max(token - behind, 0)), step.by_entries != 0)
            facts = self.load_request(step, request, True)
        is_cached = page >= 0 and page < state.pages
        source = state.pool + Int64(page) * state.page_stride + Int64(offset) * ROW_BYTES
        source = source if is_cached else Int64(0)
        if const_expr(self.fused):
            number = token - behind
            is_new = number >= cutlass.max(facts.start, 0)
            source = step.kv_score + Int64(number) * step.kv_stride if is_new else source
            belongs = own.position == at and own.request == request
            is_kept = self.is_row(own.slot, state.capacity) and at >= self.oldest(step, facts, position, token)
            is_saved = is_new and belongs and is_kept
            target = self.state_row(state, own.slot, is_saved)
            bias = row if is_new or self.raw else Int32(-1)
        kind = Int32(ENTRY)
        if self.bars.any_row(source == 0):
            kind = Int32(SAVE) if self.bars.any_row(is_saved) else Int32(END)
        if kind != END:
            self.bars.acquire(tile)
            self.bars.write(tables, tile, source, target, bias)
            self.bars.publish(tables, tile, kind, entry_slot, position - (RATIO - 1))
            tile += 1
        return tile

    @cute.jit
    def save_chunk(
        self,
        tokens: Tokens,
        state: State,
        step: Step,
        entries: Int32,
        tables: Tables,
        tile: Int32,
        last: Int32,
        loaded: Loaded,
    ) -> Int32:
        """The work tile of a chunk's rows that are saved and not by entries, if there are such. Returns the number of
        the next work tile."""
        token, own, closer = loaded.token, loaded.own, loaded.closer
        is_known = own.request >= 0 and own.request < state.requests
        follows = closer.position == own.position + Int64(self.ahead(own)) and closer.request == own.request
        by_entry = follows and token >= loaded.request.start and self.closes(state, entries, closer)
        is_kept = is_known and own.position >= self.oldest(step, loaded.request, own.position, token)
        is_kept = is_kept or step.window == 0
        is_saved = token < last and self.is_row(own.slot, state.capacity) and is_kept and not by_entry
        if self.bars.any_row(is_saved):
            source = step.kv_score + Int64(token) * step.kv_stride
            self.bars.acquire(tile)
            self.bars.write(
                tables,
                tile,
                source if is_saved else Int64(0),
                self.state_row(state, own.slot, is_saved),
                Int32(own.position) & (RATIO - 1),
            )
            self.bars.publish(tables, tile, Int32(SAVE), Int64(-1), Int64(0))
            tile += 1
        return tile

    def ahead(self, own: Token) -> Any:
        """How many tokens after one with these numbers its group is closed."""
        return (RATIO - 1) - (Int32(own.position) & (RATIO - 1))

    @cute.jit
    def load_request(self, step: Step, request: Int32, exists: Any) -> Request:
        """What a call says about a request."""
        at = Int64(request) * 4
        has_restart = exists and step.window != 0 and step.restart != 0
        return Request(
            ptx.load_global_s32_where(exists, step.starts + at),
            ptx.load_global_s32_where(has_restart, step.restart + at),
        )

    @cute.jit
    def oldest(self, step: Step, request: Request, position: Int64, token: Int32) -> Int64:
        """First position of a request that is saved; `position` is that of its `token`."""
        first = position - (Int64(token) - Int64(request.start))
        first = Int64(request.restart) if step.restart != 0 else first
        return first & Int64(-RATIO) if step.window != 0 else Int64(-(2**63))

    @cute.jit
    def state_row(self, state: State, slot: Int64, exists: Boolean) -> Int64:
        """Address of a row of the state cache, 0 if it does not exist."""
        page, row = divmod(Int32(slot if exists else Int64(0)), state.divisor)
        address = state.pool + Int64(page) * state.page_stride + Int64(row) * ROW_BYTES
        return address if exists else Int64(0)


# ---- softmax-weighted mean


class Mean:
    """Its methods are traced into the kernel.

    written, read   the first of PARTS named barriers each: an entry's parts are written, have been read
    """

    def __init__(self, written: int, read: int) -> None:
        self.written = written
        self.read = read

    @cute.jit
    def start(self, memory: MeanSmem) -> None:
        """For the epilogue warp of each CTA, before any CTA sends squares."""
        if cute.arch.lane_idx() == 0:
            for stage in range_constexpr(PARTS):
                cute.arch.mbarrier_init(memory.arrived + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def add_part(self, memory: MeanSmem, number: Int32, scores: Any, values: Any) -> None:
        """For consumer warps: scores and values of a lane's rows (words), to one part of entry `number` of this
        cluster."""
        thread, _, _ = cute.arch.thread_idx()
        largest, weights, sums = [], [], []
        for c in range_constexpr(4):
            # not -inf, even if all scores are: their difference would be NaN
            most = Float32(-FP32_MAX)
            for i in range_constexpr(ROWS):
                most = ptx.max_f32(most, scores[i][c])
            weight, total = Float32(0), Float32(0)
            for i in range_constexpr(ROWS):
                e = ptx.exp2((scores[i][c] - most) * ptx.LOG2_E)
                weight = ptx.add_rn(weight, e)
                total = ptx.fma_rn(e, values[i][c].bitcast(Float32), total)
            other = [cute.arch.shuffle_sync_bfly(x, 16) for x in (most, weight, total)]
            both = self.merge([(most, weight, total), other])
            largest.append(both[0])
            weights.append(both[1])
            sums.append(both[2])
        stage = number % PARTS
        if number >= PARTS:
            cute.arch.barrier(barrier_id=self.read + stage, number_of_threads=THREADS)
        if thread % 32 < 16:
            place = (
                memory.parts.iterator.toint()
                + ((stage * CONSUMER_WARPS + thread // 32) * 3 * COLUMNS + thread % 16 * 4) * 4
            )
            for k in range_constexpr(3):
                words = [x.bitcast(Int32) for x in (largest, weights, sums)[k]]
                ptx.store_shared_128(place + k * COLUMNS * 4, words)
        cute.arch.barrier_arrive(barrier_id=self.written + stage, number_of_threads=THREADS)

    def merge(self, parts: Any) -> Any:
        """(largest score, sum of weights, sum of weighted values) of disjoint rows, in one."""
        most = parts[0][0]
        for part in parts[1:]:
            most = ptx.max_f32(most, part[0])
        weight, total = Float32(0), Float32(0)
        for part in parts:
            e = ptx.exp2((part[0] - most) * ptx.LOG2_E)
            weight = ptx.fma_rn(part[1], e, weight)
            total = ptx.fma_rn(part[2], e, total)
        return most, weight, total

    @cute.jit
    def combine(self, memory: MeanSmem, number: Int32) -> Any:
        """For the epilogue warp: a lane's four columns of entry `number`, once all parts are there. Half a warp merges
        the parts of four consumer warps; both halves get the same columns."""
        lane = cute.arch.lane_idx()
        stage = number % PARTS
        cute.arch.barrier(barrier_id=self.written + stage, number_of_threads=THREADS)
        place = memory.parts.iterator.toint() + (
            ((stage * CONSUMER_WARPS + lane // 16 * (CONSUMER_WARPS // 2)) * 3 * COLUMNS + lane % 16 * 4) * 4
        )
        parts = [
            [ptx.load_shared_128(place + (warp * 3 + k) * COLUMNS * 4) for k in range(3)]
            for warp in range(CONSUMER_WARPS // 2)
        ]
        cute.arch.barrier_arrive(barrier_id=self.read + stage, number_of_threads=THREADS)
        x = []
        for c in range_constexpr(4):
            own = self.merge([[words[c].bitcast(Float32) for words in part] for part in parts])
            other = [cute.arch.shuffle_sync_bfly(y, 16) for y in own]
            # the lower half's rows first, in both halves
            is_lower = lane < 16
            first = [a if is_lower else b for a, b in zip(own, other, strict=True)]
            second = [b if is_lower else a for a, b in zip(own, other, strict=True)]
            _, weight, total = self.merge([first, second])
            x.append(ptx.div_rn(total, weight))
        return x[0], x[1], x[2], x[3]

    @cute.jit
    def exchange(self, memory: MeanSmem, number: Int32, squares: Any, rank: Int32, ctas: int) -> Float32:
        """For the epilogue warp: the sum over all slices of an entry, in their order; `squares` are those of this
        CTA."""
        lane = cute.arch.lane_idx()
        stage = number % PARTS
        arrived = memory.arrived + stage
        here = memory.squares.iterator + (stage * SLICES + rank * len(squares))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, SLICES * 4)
        if lane < ctas:
            for i in range_constexpr(len(squares)):
                cute.arch.store_async_dsmem(here + i, squares[i].bitcast(Int32), arrived, lane)
        cute.arch.mbarrier_wait(arrived, number // PARTS % 2)
        total = Float32(0)
        for i in range_constexpr(SLICES):
            total = ptx.add_rn(total, memory.squares[stage * SLICES + i])
        return total


# ---- kernel


class C128Kernel:
    """Entry point: (slots, the other fields of Tokens, State, Step and entry.Cache, stream)."""

    threads = WARPS * 32
    has_dependency = True

    def __init__(
        self, name: str, fused: bool, cluster: int, store: epilogue.EntryStore, cyclic: bool = False, raw: bool = False
    ) -> None:
        self.name = name
        self.fused = fused
        self.cluster = cluster
        self.slices = SLICES // cluster
        self.copy_bytes = copy_bytes(fused)
        self.store = store
        self.bars = Bars(LISTED, HEADED, TAKEN, PRODUCERS, CONSUMER_WARPS * 32, fused)
        self.producer = Producer(fused, self.bars, cyclic, raw)
        self.cyclic, self.raw = cyclic, raw
        self.mean = Mean(WRITTEN, READ)

    @cute.jit
    def __call__(
        self,
        slots: cute.Tensor,
        positions: Int64,
        requests: Int64,
        entry_slots: Int64,
        per_cluster: Int32,
        state_pool: Int64,
        state_page_stride: Int64,
        state_pages: Int32,
        state_page_rows: Int32,
        block_table: Int64,
        block_table_stride: Int64,
        block_table_columns: Int32,
        block_table_rows: Int32,
        kv_score: Int64,
        kv_stride: Int64,
        ape: Int64,
        ape_stride: Int64,
        starts: Int64,
        restart: Int64,
        window: Int32,
        by_entries: Int32,
        pool: Int64,
        page_stride: Int64,
        page_rows: Int32,
        capacity: Int32,
        weight: Int64,
        table: Int64,
        table_stride: Int64,
        table_rows: Int32,
        fp8_scale: Int64,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        count = length(slots, 0)
        tokens = Tokens(positions, requests, address(slots), entry_slots, count, per_cluster)
        state = State(
            state_pool,
            state_page_stride,
            state_pages,
            state_pages * state_page_rows,
            cute.fast_divmod_create_divisor_v2(state_page_rows),
            block_table,
            block_table_stride,
            Int32(2**31 - 1) if const_expr(self.cyclic) else block_table_columns * state_page_rows,
            block_table_rows,
            cute.fast_divmod_create_divisor_v2(cutlass.max(block_table_columns, 1)),
        )
        step = Step(kv_score, kv_stride, ape, ape_stride, starts, restart, window, by_entries)
        cache = epilogue.make_cache(
            pool, page_stride, page_rows, capacity, weight, table, table_stride, table_rows, fp8_scale, eps
        )
        self.kernel(tokens, state, step, cache).launch(
            grid=[self.ctas(count, per_cluster), 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1] if const_expr(self.cluster > 1) else None,
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    def ctas(self, count: Any, per_cluster: Any) -> Any:
        """Of the grid, in a call of `count` tokens."""
        return cute.ceil_div(count, per_cluster) * self.cluster

    @cute.kernel
    def kernel(self, tokens: Tokens, state: State, step: Step, cache: epilogue.Cache) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta, _, _ = cute.arch.block_idx()
        rank = cute.arch.block_idx_in_cluster()
        memory = SmemAllocator()
        smem = Smem(
            allocate_tables(memory),
            memory.allocate_tensor(
                Int32, cute.make_layout(COPIES * self.copy_bytes // 4), byte_alignment=ROWS_ALIGNMENT
            ),
            allocate_mean(memory),
        )
        if warp == EPILOGUE_WARP:
            self.mean.start(smem.memory)
        # every CTA's mbarriers are ready before any CTA sends: awaited by the epilogue warps, much later
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < CONSUMER_WARPS:
            if const_expr(self.fused):
                self.prefetch(tokens, state, step, rank)
            self.consume(step, smem, rank)
            cute.arch.cluster_wait()
        elif warp < EPILOGUE_WARP:
            first = cta // self.cluster * tokens.per_cluster
            self.producer.run(tokens, state, step, cache.capacity, smem.tables, first)
            cute.arch.cluster_wait()
        else:
            cute.arch.cluster_wait()
            self.store_entries(cache, smem, rank)

    @cute.jit
    def prefetch(self, tokens: Tokens, state: State, step: Step, rank: Int32) -> None:
        """In a call with few tokens, consumer warps that wait for the first work tile ask for what it is likely to
        need."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        # the CTA's columns are this many times 128 bytes, in each half of a row
        lines = 2 * self.slices
        column = Int64(rank * (lines * 128) + thread % lines * 128)
        token = cta // self.cluster * tokens.per_cluster + thread // (2 * lines)
        is_own = thread // (2 * lines) < tokens.per_cluster and token < tokens.total and step.by_entries == 0
        row = step.kv_score + Int64(token) * step.kv_stride
        ptx.prefetch_l2(row + column + thread // lines % 2 * HALF_ROW, is_own)
        # what all clusters need is asked for by the first
        is_first = cta < self.cluster and step.by_entries == 0
        at_once = CONSUMER_WARPS * 32 // lines
        for i in range_constexpr(RATIO // at_once):
            ptx.prefetch_l2(step.ape + Int64(thread // lines + i * at_once) * step.ape_stride + column, is_first)
        request = (cta * (CONSUMER_WARPS * 32) + thread) * 32
        is_first = is_first and request < state.requests
        ptx.prefetch_l2(step.starts + Int64(request) * 4, is_first)
        ptx.prefetch_l2(step.restart + Int64(request) * 4, is_first and step.restart != 0)

    @cute.jit
    def consume(self, step: Step, smem: Smem, rank: Int32) -> None:
        """A consumer warp: ask for the next slice of rows, then save and reduce those of the last."""
        thread, _, _ = cute.arch.thread_idx()
        first = Int64(rank * (self.slices * COLUMNS * 4) + thread % 16 * 16)
        tile, slice_, copy, parts = Int32(0), Int32(0), Int32(0), Int32(0)
        kind = self.bars.wait_table(smem.tables, tile)
        if kind != END:
            self.copy_rows_async(step, smem, tile, first, copy)
        cute.arch.cp_async_commit_group()
        while kind != END:
            next_tile, next_slice, next_kind = tile, slice_ + 1, kind
            if next_slice == self.slices:
                next_tile, next_slice = tile + 1, Int32(0)
                next_kind = self.bars.wait_table(smem.tables, next_tile)
            if next_kind != END:
                self.copy_rows_async(step, smem, next_tile, first + Int64(next_slice * (COLUMNS * 4)), copy + 1)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(1)
            place = self.place(smem, copy)
            scores = [[w.bitcast(Float32) for w in ptx.load_shared_128(place + self.slot(0, i))] for i in range(ROWS)]
            values = [ptx.load_shared_128(place + self.slot(1, i)) for i in range(ROWS)]
            if const_expr(self.fused):
                column = first + Int64(slice_ * (COLUMNS * 4))
                table = tile % TABLES * RATIO + thread // 16
                for i in range_constexpr(ROWS):
                    bias = ptx.load_shared_128(place + self.slot(2, i))
                    kept = scores[i]
                    scores[i] = self.biased(scores[i], bias, smem.tables.bias[table + i * GROUPS])
                    kept = kept if self.raw else scores[i]
                    target = smem.tables.target[table + i * GROUPS]
                    words = [score.bitcast(Int32) for score in kept]
                    ptx.store_global_128(target + column, values[i], target != 0)
                    ptx.store_global_128(target + column + HALF_ROW, words, target != 0)
            if next_tile != tile:
                self.bars.release(tile)
            if kind == ENTRY:
                self.mean.add_part(smem.memory, parts, scores, values)
                parts += 1
            tile, slice_, kind = next_tile, next_slice, next_kind
            copy += 1

    @cute.jit
    def copy_rows_async(self, step: Step, smem: Smem, tile: Int32, column: Int64, copy: Int32) -> None:
        """Start the copies of a thread's rows of `tile` to shared memory. Nobody else reads what they bring."""
        thread, _, _ = cute.arch.thread_idx()
        place = self.place(smem, copy)
        table = tile % TABLES * RATIO + thread // 16
        # all at once: nothing is read from shared memory between two copies into it
        sources = [smem.tables.source[table + i * GROUPS] for i in range(ROWS)]
        rows = [smem.tables.bias[table + i * GROUPS] for i in range(ROWS if self.fused else 0)]
        for i in range_constexpr(ROWS):
            ptx.copy_async_128_once(place + self.slot(0, i), sources[i] + column + HALF_ROW, sources[i] != 0)
            ptx.copy_async_128_once(place + self.slot(1, i), sources[i] + column, sources[i] != 0)
            if const_expr(self.fused):
                bias = step.ape + Int64(rows[i]) * step.ape_stride + column
                ptx.copy_async_128(place + self.slot(2, i), bias, rows[i] >= 0)

    def place(self, smem: Smem, copy: Any) -> Any:
        """Where a thread's rows of a work tile's slice lie in shared memory; copies are counted."""
        thread, _, _ = cute.arch.thread_idx()
        return smem.rows.iterator.toint() + copy % COPIES * self.copy_bytes + thread * 16

    def slot(self, part: int, row: int) -> int:
        """Offset of a thread's scores (part 0), values or bias of its row `row`."""
        return (part * ROWS + row) * CONSUMER_WARPS * 32 * 16

    @cute.jit
    def biased(self, score: Any, bias: Any, row: Int32) -> Any:
        """Scores with their bias; those from the state cache, with row -1, already have theirs."""
        return [a + b.bitcast(Float32) if row >= 0 else a for a, b in zip(score, bias, strict=True)]

    @cute.jit
    def store_entries(self, cache: epilogue.Cache, smem: Smem, rank: Int32) -> None:
        """The epilogue warp: from the consumer warps' parts of each entry to stored columns. Both halves of the warp
        have the same columns; the upper one stores nothing."""
        lane = cute.arch.lane_idx()
        columns = [(rank * self.slices + i) * COLUMNS + lane % 16 * 4 for i in range(self.slices)]
        tile, entries = Int32(0), Int32(0)
        kind = self.bars.wait_head(smem.tables, tile)
        while kind != END:
            head = tile % TABLES * 4
            slot, position = smem.tables.head[head + 1], smem.tables.head[head + 2]
            self.bars.release(tile)
            if kind == ENTRY:
                loaded = [self.store.load(cache, column, position) for column in columns]
                x, squares = [], []
                for i in range_constexpr(self.slices):
                    x.append(self.mean.combine(smem.memory, entries * self.slices + i))
                    squares.append(reduce.lanes_sum(reduce.square_sum(x[i]), 16))
                total = self.mean.exchange(smem.memory, entries, squares, rank, self.cluster)
                slot = slot if lane < 16 else Int64(-1)
                factor = self.store.factor(cache, total)
                for i in range_constexpr(self.slices):
                    self.store.finish(cache, loaded[i], columns[i], x[i], factor, slot)
                entries += 1
            tile += 1
            kind = self.bars.wait_head(smem.tables, tile)


# ---- key


@dataclass(frozen=True)
class C128Key(KernelKey):
    """What distinguishes one compiled kernel from another.

    fused     whether rows of the step come from kv_score and are saved
    cluster   CTAs that share an entry: 2, 4 or 8
    cyclic    whether columns of the block table come round again
    raw       whether it has scores without their bias
    others    see entry.EntryStore
    """

    kernel_name: ClassVar[str] = "compressor.ratio128"
    tuning: ClassVar[tuple[str, ...]] = ("cluster",)
    kv_format: str = FP8_DS_MLA.id
    fp32_weight: bool = False
    fused: bool = False
    cluster: int = CLUSTERS[0]
    cyclic: bool = False
    raw: bool = False

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.fused)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "cp.async", "ex2", "st.async", "barrier.cluster", "mbarrier", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,))
        tokens = (Int64(0), Int64(0), Int64(0), Int32(1))
        state = (Int64(0), Int64(0), Int32(0), Int32(1), Int64(0), Int64(0), Int32(0), Int32(0))
        step = (*(Int64(0) for _ in range(6)), Int32(0), Int32(0))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        op = "fused_compress" if self.fused else "compress"
        weight = "_fp32_weight" if self.fp32_weight else ""
        name = f"{op}_norm_rope_store_c128x{self.cluster}_{self.kv_format.split('/')[0]}{weight}"
        name += "_cyclic" * self.cyclic + "_raw" * self.raw
        store = epilogue.EntryStore(self.kv_format, self.fp32_weight, "", False, self.arch)
        return self.make_kernel(name, store), (
            slots,
            *tokens,
            *state,
            *step,
            *epilogue.fake_numbers(),
            Boolean(False),
            stream,
        )

    def make_kernel(self, name: str, store: epilogue.EntryStore) -> Callable[..., None]:
        return C128Kernel(name, self.fused, self.cluster, store, self.cyclic, self.raw)


def key_for(
    arch: str, kv_format: str, fp32_weight: bool, fused: bool, cluster: int, cyclic: bool = False, raw: bool = False
) -> C128Key:
    """The kernel with clusters of so many CTAs, or the portable one, which has none."""
    # it is made of parts of this module
    from cute_kernels.compressor.ratio128_portable import PortableC128Key

    if runs_on(arch):
        return C128Key(arch, kv_format, fp32_weight, fused, cluster, cyclic, raw)
    return PortableC128Key(arch, kv_format, fp32_weight, fused, cyclic=cyclic, raw=raw)


def deployment_keys(config: ModelConfig, tp: int, arch: str, fused: bool) -> list[C128Key]:
    """For a model that has layers with ratio 128: a kernel per size of cluster, in every format of the layers, which
    fuse, and in the usual one if not fused."""
    if RATIO not in config.compress_ratios:
        return []
    formats = (FP8_DS_MLA, PLAIN_BF16, PLAIN_FP8) if fused else (FP8_DS_MLA,)
    return list(dict.fromkeys(key_for(arch, fmt.id, False, fused, size) for fmt in formats for size in CLUSTERS))


def runs_on(arch: str) -> bool:
    """Whether an architecture has what kernels with clusters need."""
    return arch in LARGE_CLUSTERS


def ctas_per_entry(count: int) -> int:
    """How many CTAs share an entry in a call of `count` tokens."""
    few, some, many = CLUSTERS
    return few if count <= FEW_TOKENS else some if count < MANY_TOKENS else many


def tokens_per_cluster(count: int, multiprocessors: int, cluster: int) -> int:
    """How many tokens a cluster looks at in a call of `count`: so many that all clusters run at once."""
    room = multiprocessors // cluster
    # the CTAs of a cluster are neighbours on the chip: where there are more than two, some places stay empty
    at_once = room if cluster == 2 else room * 9 // 10
    return -(-count // max(1, at_once))


@cache
def _key(
    device_index: int,
    kv_format: str,
    fp32_weight: bool,
    fused: bool,
    cluster: int,
    cyclic: bool = False,
    raw: bool = False,
) -> C128Key:
    return key_for(arch_of(device_index), kv_format, fp32_weight, fused, cluster, cyclic, raw)


# ---- launch


def _aligned(matrix: Any) -> bool:
    return matrix.data_ptr() % 16 == 0 and (matrix.shape[0] <= 1 or matrix.stride(0) % 4 == 0)


def _unaligned(what: str, matrix: Any) -> str:
    return f"{what} must be 16-byte aligned, got address {matrix.data_ptr():#x} and strides {tuple(matrix.stride())}"


def why_not(call: CompressCall | FusedCall) -> str:
    """Why the kernel cannot take a (checked) call; empty if it can."""
    if isinstance(call, FusedCall):
        for name, matrix in (("kv_score", call.kv_score), ("ape", call.ape)):
            if not _aligned(matrix):
                return _unaligned(f"rows of {name}", matrix)
    if call.state_cache.shape[2] != 2 * HEAD_DIM:
        columns = call.state_cache.shape[2] // 2
        return f"ratio {RATIO} needs entries of {HEAD_DIM} columns, {call.kv_format} has {columns}"
    if not _aligned(call.state_cache):
        return _unaligned("pages of state_cache", call.state_cache)
    for what, rows in (("state_cache", call.state_cache.shape[0]), ("block_table", call.block_table.shape[1])):
        if rows * call.state_cache.shape[1] >= 2**31:
            return f"{what} must name fewer than 2^31 rows, got {rows} pages of {call.state_cache.shape[1]}"
    return epilogue.why_not(call.kv_cache, call.cos_sin_cache, call.rms_norm_weight, call.kv_format)


def _state(state_cache: Any, block_table: Any) -> tuple[int, ...]:
    pages, page_rows, _ = state_cache.shape
    requests, columns = block_table.shape
    page_stride, table_stride = state_cache.stride(0) * 4, block_table.stride(0) * 4
    return (
        state_cache.data_ptr(),
        page_stride,
        pages,
        page_rows,
        block_table.data_ptr(),
        table_stride,
        columns,
        requests,
    )


def launch_compress(call: CompressCall, per_cluster: int | None = None, cluster: int | None = None) -> None:
    """Run compress_norm_rope_store on the current stream.

    per_cluster   tokens that a cluster looks at, and
    cluster       CTAs that share an entry, instead of what is best; the result is the same
    """
    count = call.slot_mapping.shape[0]
    if count == 0:
        return
    device_index = call.state_cache.device.index
    key = _key(
        device_index,
        call.kv_format,
        call.rms_norm_weight.element_size() == 4,
        False,
        cluster or ctas_per_entry(count),
    )
    launch_key(
        key,
        device_index,
        call.slot_mapping,
        call.positions.data_ptr(),
        call.token_to_req_indices.data_ptr(),
        call.kv_slot_mapping.data_ptr(),
        per_cluster or tokens_per_cluster(count, multiprocessors(device_index), key.cluster),
        *_state(call.state_cache, call.block_table),
        *(0, 0, 0, 0, 0, 0, 0, 0),
        *epilogue.numbers(call.kv_cache, call.cos_sin_cache, call.rms_norm_weight, call.fp8_scale, call.rms_norm_eps),
        False,
    )


def launch_fused(call: FusedCall, per_cluster: int | None = None, cluster: int | None = None) -> None:
    """Run fused_compress_norm_rope_store on the current stream.

    keep_every makes no difference: at a multiple of it nothing of the group before is read again.

    per_cluster   tokens that a cluster looks at, and
    cluster       CTAs that share an entry, instead of what is best; the result is the same
    """
    count = call.slot_mapping.shape[0]
    if count == 0:
        return
    device_index = call.state_cache.device.index
    key = _key(
        device_index,
        call.kv_format,
        call.rms_norm_weight.element_size() == 4,
        True,
        cluster or ctas_per_entry(count),
        call.cyclic_table,
        call.raw_scores,
    )
    per_cluster = per_cluster or tokens_per_cluster(count, multiprocessors(device_index), key.cluster)
    launch_key(
        key,
        device_index,
        call.slot_mapping,
        call.positions.data_ptr(),
        call.token_to_req_indices.data_ptr(),
        call.kv_slot_mapping.data_ptr(),
        per_cluster,
        *_state(call.state_cache, call.block_table),
        call.kv_score.data_ptr(),
        call.kv_score.stride(0) * 4,
        call.ape.data_ptr(),
        call.ape.stride(0) * 4,
        call.query_start_loc.data_ptr(),
        0 if call.min_restart is None else call.min_restart.data_ptr(),
        int(call.persist == "window"),
        int(per_cluster >= BY_ENTRIES_TOKENS),
        *epilogue.numbers(call.kv_cache, call.cos_sin_cache, call.rms_norm_weight, call.fp8_scale, call.rms_norm_eps),
        call.use_pdl,
    )
