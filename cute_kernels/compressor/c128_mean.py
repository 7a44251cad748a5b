"""From the rows of a window to the columns of an entry: a softmax-weighted mean of each, and the sum of their squares.

A mover's warp has 16 rows of the block's 64 columns, two lanes with eight rows each per four columns. It makes them a
part: per column the largest score, the sum of weights relative to that, and the sum of weighted values. The finisher
merges the parts of eight movers, and adds up the squares of all blocks of the cluster. The order of every sum is fixed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import FP32_MAX
from cute_kernels.formats import HEAD_DIM

SLICES = 8
"""Of an entry's columns; and the most blocks that every GPU with clusters can schedule as one."""

COLUMNS = HEAD_DIM // SLICES
MOVERS = 8
ROWS = 8
"""Rows of a window that a lane has."""

PARTS = 2
"""Entries under way between movers and finisher."""

THREADS = (MOVERS + 1) * 32
"""That meet at a barrier between movers and finisher."""

PART_FLOATS = PARTS * MOVERS * 3 * COLUMNS
MEMORY_BYTES = PART_FLOATS * 4 + PARTS * (SLICES * 4 + 8)


class Memory(NamedTuple):
    """Shared memory.

    parts      [PARTS * MOVERS * 3 * COLUMNS]: largest score, sum of weights, sum of weighted values
    squares    [PARTS * SLICES]: sums of squares of the slices' columns
    arrived    [PARTS] mbarriers: all squares are there
    """

    parts: Any
    squares: Any
    arrived: Any


def allocate_memory(smem: Any) -> Memory:
    return Memory(
        smem.allocate_tensor(Float32, cute.make_layout(PART_FLOATS), byte_alignment=16),
        smem.allocate_tensor(Float32, cute.make_layout(PARTS * SLICES), byte_alignment=16),
        smem.allocate_array(Int64, PARTS),
    )


class Mean:
    """Its methods are traced into the kernel.

    written, read   the first of PARTS named barriers each: an entry's parts are written, have been read
    """

    def __init__(self, written: int, read: int) -> None:
        self.written = written
        self.read = read

    @cute.jit
    def start(self, memory: Memory) -> None:
        """For the finisher of each block, before any block sends squares."""
        if cute.arch.lane_idx() == 0:
            for stage in range_constexpr(PARTS):
                cute.arch.mbarrier_init(memory.arrived + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    @cute.jit
    def add_part(self, memory: Memory, number: Int32, scores: Any, values: Any) -> None:
        """For movers: scores and values of a lane's rows (words), to one part of entry `number` of this cluster."""
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
                memory.parts.iterator.toint() + ((stage * MOVERS + thread // 32) * 3 * COLUMNS + thread % 16 * 4) * 4
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
    def combine(self, memory: Memory, number: Int32) -> Any:
        """For the finisher: a lane's four columns of entry `number`, once all parts are there. Half a warp merges the
        parts of four movers; both halves get the same columns."""
        lane = cute.arch.lane_idx()
        stage = number % PARTS
        cute.arch.barrier(barrier_id=self.written + stage, number_of_threads=THREADS)
        place = memory.parts.iterator.toint() + (
            ((stage * MOVERS + lane // 16 * (MOVERS // 2)) * 3 * COLUMNS + lane % 16 * 4) * 4
        )
        parts = [
            [ptx.load_shared_128(place + (warp * 3 + k) * COLUMNS * 4) for k in range(3)] for warp in range(MOVERS // 2)
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
    def exchange(self, memory: Memory, number: Int32, squares: Any, rank: Int32, blocks: int) -> Float32:
        """For the finisher: the sum over all slices of an entry, in their order; `squares` are those of this block."""
        lane = cute.arch.lane_idx()
        stage = number % PARTS
        arrived = memory.arrived + stage
        here = memory.squares.iterator + (stage * SLICES + rank * len(squares))
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, SLICES * 4)
        if lane < blocks:
            for i in range_constexpr(len(squares)):
                cute.arch.store_async_dsmem(here + i, squares[i].bitcast(Int32), arrived, lane)
        cute.arch.mbarrier_wait(arrived, number // PARTS % 2)
        total = Float32(0)
        for i in range_constexpr(SLICES):
            total = ptx.add_rn(total, memory.squares[stage * SLICES + i])
        return total
