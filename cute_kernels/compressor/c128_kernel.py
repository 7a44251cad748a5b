"""Kernel of the compressor with ratio 128: a cluster of two, four or eight blocks computes an entry.

    a row of the state     512 x fp32 kv                             512 x fp32 score
    slice s                columns 64 * s .. + 63                    the same columns
    a block                eight slices over the size of the cluster, one after another
    thread of a mover      4 * (thread % 16) .. + 3, in both halves, of the rows thread / 16 + 0, 16, 32 ... 112

Three kinds of warps work on units (c128_tables.py):

    listers   four warps find out which rows to move, ahead of the others
    movers    eight warps. A thread copies what it needs of a unit's slice to shared memory, 64 KB a block, while it
              works on the slice before: it saves rows, and reduces an entry's 128 rows to a largest score, a sum of
              weights and a sum of weighted values per column and warp
    finisher  one warp adds those up, exchanges the sums of squares with the other blocks and stores the columns, while
              the movers are at the next unit

All sums have a fixed order, so that an entry has the same bits wherever it is computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.compressor import entry
from cute_kernels.compressor.c128_mean import (
    COLUMNS,
    MEMORY_BYTES,
    MOVERS,
    PARTS,
    ROWS,
    SLICES,
    Mean,
    Memory,
    allocate_memory,
)
from cute_kernels.compressor.c128_tables import (
    END,
    ENTRY,
    LISTERS,
    RATIO,
    TABLE_BYTES,
    TABLES,
    Handover,
    Tables,
    allocate_tables,
)
from cute_kernels.compressor.c128_units import State, Step, Tokens, Units
from cute_kernels.dsl import ptx, reduce
from cute_kernels.dsl.tensor import address, length
from cute_kernels.formats import HEAD_DIM, round_up

HALF_ROW = HEAD_DIM * 4
FINISHER = MOVERS + LISTERS
WARPS = FINISHER + 1
GROUPS = RATIO // ROWS

COPIES = 2
"""Units in shared memory: one is worked on, one arrives."""

ROWS_ALIGNMENT = 128

# Named barriers; 0 is that of the whole block.
LISTED, HEADED, TAKEN, WRITTEN = (1 + TABLES * i for i in range(4))
READ = WRITTEN + PARTS
MEETING = READ + PARTS


class Shared(NamedTuple):
    """Shared memory: lists of units, copies of their rows [COPIES * copy_bytes / 4], parts of entries."""

    tables: Tables
    rows: Any
    memory: Memory


def copy_bytes(fused: bool) -> int:
    """Of a unit's rows: scores, values and, in the fused op, bias."""
    return (3 if fused else 2) * RATIO * COLUMNS * 4


def smem_bytes(fused: bool) -> int:
    return round_up(TABLE_BYTES, ROWS_ALIGNMENT) + COPIES * copy_bytes(fused) + MEMORY_BYTES


class C128Kernel:
    """Entry point: (slots, the other fields of Tokens, State, Step and entry.Cache, stream)."""

    def __init__(self, name: str, fused: bool, cluster: int, store: entry.EntryStore) -> None:
        self.name = name
        self.fused = fused
        self.cluster = cluster
        self.slices = SLICES // cluster
        self.copy_bytes = copy_bytes(fused)
        self.store = store
        self.handover = Handover(LISTED, HEADED, TAKEN, MEETING, MOVERS * 32, fused)
        self.units = Units(fused, self.handover)
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
            block_table_columns * state_page_rows,
            block_table_rows,
        )
        step = Step(kv_score, kv_stride, ape, ape_stride, starts, restart, window, by_entries)
        cache = entry.make_cache(
            pool, page_stride, page_rows, capacity, weight, table, table_stride, table_rows, fp8_scale, eps
        )
        self.kernel(tokens, state, step, cache).launch(
            grid=[cute.ceil_div(count, per_cluster) * self.cluster, 1, 1],
            block=[WARPS * 32, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=use_pdl,
        )

    @cute.kernel
    def kernel(self, tokens: Tokens, state: State, step: Step, cache: entry.Cache) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, _, _ = cute.arch.block_idx()
        rank = cute.arch.block_idx_in_cluster()
        smem = SmemAllocator()
        shared = Shared(
            allocate_tables(smem),
            smem.allocate_tensor(Int32, cute.make_layout(COPIES * self.copy_bytes // 4), byte_alignment=ROWS_ALIGNMENT),
            allocate_memory(smem),
        )
        if warp == FINISHER:
            self.mean.start(shared.memory)
        # every block's mbarriers are ready before any block sends: awaited by the finishers, much later
        cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if warp < MOVERS:
            if const_expr(self.fused):
                self.warm(tokens, state, step, rank)
            self.move(step, shared, rank)
            cute.arch.cluster_wait()
        elif warp < FINISHER:
            first = block // self.cluster * tokens.per_cluster
            self.units.list_all(tokens, state, step, cache.capacity, shared.tables, first)
            cute.arch.cluster_wait()
        else:
            cute.arch.cluster_wait()
            self.finish(cache, shared, rank)

    @cute.jit
    def warm(self, tokens: Tokens, state: State, step: Step, rank: Int32) -> None:
        """In a call with few tokens, movers that wait for the first unit ask for what it is likely to need."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # the block's columns are this many times 128 bytes, in each half of a row
        lines = 2 * self.slices
        column = Int64(rank * (lines * 128) + thread % lines * 128)
        token = block // self.cluster * tokens.per_cluster + thread // (2 * lines)
        is_own = thread // (2 * lines) < tokens.per_cluster and token < tokens.total and step.by_entries == 0
        row = step.kv_score + Int64(token) * step.kv_stride
        ptx.prefetch_l2(row + column + thread // lines % 2 * HALF_ROW, is_own)
        # what all clusters need is asked for by the first
        is_first = block < self.cluster and step.by_entries == 0
        at_once = MOVERS * 32 // lines
        for i in range_constexpr(RATIO // at_once):
            ptx.prefetch_l2(step.ape + Int64(thread // lines + i * at_once) * step.ape_stride + column, is_first)
        request = (block * (MOVERS * 32) + thread) * 32
        is_first = is_first and request < state.requests
        ptx.prefetch_l2(step.starts + Int64(request) * 4, is_first)
        ptx.prefetch_l2(step.restart + Int64(request) * 4, is_first and step.restart != 0)

    @cute.jit
    def move(self, step: Step, shared: Shared, rank: Int32) -> None:
        """A mover's warp: ask for the next slice of rows, then save and reduce those of the last."""
        thread, _, _ = cute.arch.thread_idx()
        first = Int64(rank * (self.slices * COLUMNS * 4) + thread % 16 * 16)
        unit, slice_, copy, parts = Int32(0), Int32(0), Int32(0), Int32(0)
        kind = self.handover.await_table(shared.tables, unit)
        if kind != END:
            self.ask(step, shared, unit, first, copy)
        cute.arch.cp_async_commit_group()
        while kind != END:
            next_unit, next_slice, next_kind = unit, slice_ + 1, kind
            if next_slice == self.slices:
                next_unit, next_slice = unit + 1, Int32(0)
                next_kind = self.handover.await_table(shared.tables, next_unit)
            if next_kind != END:
                self.ask(step, shared, next_unit, first + Int64(next_slice * (COLUMNS * 4)), copy + 1)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(1)
            place = self.place(shared, copy)
            scores = [[w.bitcast(Float32) for w in ptx.load_shared_128(place + self.slot(0, i))] for i in range(ROWS)]
            values = [ptx.load_shared_128(place + self.slot(1, i)) for i in range(ROWS)]
            if const_expr(self.fused):
                column = first + Int64(slice_ * (COLUMNS * 4))
                table = unit % TABLES * RATIO + thread // 16
                for i in range_constexpr(ROWS):
                    bias = ptx.load_shared_128(place + self.slot(2, i))
                    scores[i] = self.biased(scores[i], bias, shared.tables.bias[table + i * GROUPS])
                    target = shared.tables.target[table + i * GROUPS]
                    words = [score.bitcast(Int32) for score in scores[i]]
                    ptx.store_global_128(target + column, values[i], target != 0)
                    ptx.store_global_128(target + column + HALF_ROW, words, target != 0)
            if next_unit != unit:
                self.handover.release(unit)
            if kind == ENTRY:
                self.mean.add_part(shared.memory, parts, scores, values)
                parts += 1
            unit, slice_, kind = next_unit, next_slice, next_kind
            copy += 1

    @cute.jit
    def ask(self, step: Step, shared: Shared, unit: Int32, column: Int64, copy: Int32) -> None:
        """Start the copies of a thread's rows of `unit` to shared memory. Nobody else reads what they bring."""
        thread, _, _ = cute.arch.thread_idx()
        place = self.place(shared, copy)
        table = unit % TABLES * RATIO + thread // 16
        # all at once: nothing is read from shared memory between two copies into it
        sources = [shared.tables.source[table + i * GROUPS] for i in range(ROWS)]
        rows = [shared.tables.bias[table + i * GROUPS] for i in range(ROWS if self.fused else 0)]
        for i in range_constexpr(ROWS):
            ptx.copy_async_128_once(place + self.slot(0, i), sources[i] + column + HALF_ROW, sources[i] != 0)
            ptx.copy_async_128_once(place + self.slot(1, i), sources[i] + column, sources[i] != 0)
            if const_expr(self.fused):
                bias = step.ape + Int64(rows[i]) * step.ape_stride + column
                ptx.copy_async_128(place + self.slot(2, i), bias, rows[i] >= 0)

    def place(self, shared: Shared, copy: Any) -> Any:
        """Where a thread's rows of a unit's slice lie in shared memory; copies are counted."""
        thread, _, _ = cute.arch.thread_idx()
        return shared.rows.iterator.toint() + copy % COPIES * self.copy_bytes + thread * 16

    def slot(self, part: int, row: int) -> int:
        """Offset of a thread's scores (part 0), values or bias of its row `row`."""
        return (part * ROWS + row) * MOVERS * 32 * 16

    @cute.jit
    def biased(self, score: Any, bias: Any, row: Int32) -> Any:
        """Scores with their bias; those from the state cache, with row -1, already have theirs."""
        return [a + b.bitcast(Float32) if row >= 0 else a for a, b in zip(score, bias, strict=True)]

    @cute.jit
    def finish(self, cache: entry.Cache, shared: Shared, rank: Int32) -> None:
        """The finisher: from the movers' parts of each entry to stored columns. Both halves of the warp have the same
        columns; the upper one stores nothing."""
        lane = cute.arch.lane_idx()
        columns = [(rank * self.slices + i) * COLUMNS + lane % 16 * 4 for i in range(self.slices)]
        unit, entries = Int32(0), Int32(0)
        kind = self.handover.await_head(shared.tables, unit)
        while kind != END:
            head = unit % TABLES * 4
            slot, position = shared.tables.head[head + 1], shared.tables.head[head + 2]
            self.handover.release(unit)
            if kind == ENTRY:
                loaded = [self.store.load(cache, column, position) for column in columns]
                x, squares = [], []
                for i in range_constexpr(self.slices):
                    x.append(self.mean.combine(shared.memory, entries * self.slices + i))
                    squares.append(reduce.lanes_sum(reduce.square_sum(x[i]), 16))
                total = self.mean.exchange(shared.memory, entries, squares, rank, self.cluster)
                slot = slot if lane < 16 else Int64(-1)
                factor = self.store.factor(cache, total)
                for i in range_constexpr(self.slices):
                    self.store.finish(cache, loaded[i], columns[i], x[i], factor, slot)
                entries += 1
            unit += 1
            kind = self.handover.await_head(shared.tables, unit)
