# SPDX-License-Identifier: Apache-2.0
"""FP8 GEMM on Blackwell, by groups: out[t, n] = sum over 128-column chunks c of a_scale[t, c] b_scale[n, c]
dot(a[t, c], b[n, c]), with products by tcgen05.mma.

A persistent CTA walks over work tiles of [128 rows, columns] results, neighbouring columns first: rows on the side that
has 128 lanes of tensor memory, so that a thread has results of one row, which it stores side by side. What it copies is
in a ring of stages; scales have a ring of their own.

    warps 0 .. 7    two consumer warpgroups: promotion and epilogue, each of half of the columns
    warp 8          producer: operands by TMA
    warp 9          scales
    warp 10         MMA: starts the products; allocates and frees tensor memory
    (another warp completes the warpgroup, whose registers the consumers get)

    operands        gmem --TMA--> ring in shared memory --tcgen05.mma--> tensor memory, buffers of products
    fp32 scales     gmem --cp.async--> ring --> registers of the consumers
    packed scales   gmem --cp.async--> ring --tcgen05.cp--> tensor memory

With fp32 scales there are two buffers of products: while a chunk is multiplied, the one before it is scaled and added
to fp32 totals in registers (promoted).

With packed scales tensor cores multiply with them, and the products of all chunks of a tile are summed in tensor
memory, in fp32. A word has the bytes of four chunks, so it is copied, as it is, to shared memory and on to tensor
memory once for these four; a product says which byte it takes. The rows' words lie as umma.scale_offset has them, then
those of the columns, 128 at a time.

Two CTAs of a cluster may work as a pair (fp32 scales, 256 columns; experimental, no call is given to it): each has 128
rows, and copies half of the columns' operand for both. CTA 0's MMA warp multiplies for both, and what it waits for are
barriers of CTA 0.

No Blackwell has run these kernels yet: the host model of tests/model has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, convert, ptx, umma, wgmma
from cute_kernels.dsl.tensor import length
from cute_kernels.formats import round_up
from cute_kernels.linear.params import CHUNK, CHUNKS_PER_WORD, WARP, Strided, TileScheduler, fake_arguments
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.work import Shape, Work

# ---- config

ROWS = 128
"""Of a work tile: lanes of tensor memory."""

COLUMNS = (64, 128, 256)
"""Of a work tile."""

STAGE_BYTES = 192 * 1024
"""Of the ring of operands."""

MOST_STAGES = 8

SCALE_ROOM = 4
"""fp32 numbers after the scales of a stage's rows, for those of its columns: a multiple of 16 bytes."""

SCALE_COLUMNS = 4
"""Of tensor memory, for the words of 128 rows of an operand."""

WARPGROUPS = 2
"""Of consumers, each with half of the columns."""

WARPS_BESIDE = 4
"""Producer, scales, MMA, and one that does nothing."""

REGISTERS = 56, 224
"""Per thread of the warps beside, and of consumers with MANY_TOTALS: together what three warpgroups are launched with,
3 x 168."""

MANY_TOTALS = 64
"""Of a thread, beyond which it needs more registers than its share of a multiprocessor's."""

LANE_SHIFT = 16
"""Of an address in tensor memory: bits of the column."""

SUMS_DONE = 1
"""Barrier of the warps that use tensor memory."""

BEHIND = 2
"""Stages of scales that are on their way while the next one is asked for."""

BLOCK_BYTES = ROWS * 4
"""Of the words of 128 rows or columns."""


@dataclass(frozen=True)
class GemmConfig:
    """Sizes of a kernel: `columns` of a work tile; whether scales are words of four; CTAs that share a work tile, which
    has ROWS rows for each."""

    columns: int
    packed: bool = False
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.columns not in COLUMNS:
            raise ValueError(f"columns: expected one of {COLUMNS}, got {self.columns}")

    @property
    def copied_columns(self) -> int:
        """By a CTA."""
        return self.columns // self.blocks

    @property
    def threads(self) -> int:
        return (4 * WARPGROUPS + WARPS_BESIDE) * WARP

    @property
    def width(self) -> int:
        """Columns of a warpgroup: they share an fp32 scale."""
        return self.columns // WARPGROUPS

    @property
    def has_many_totals(self) -> bool:
        return self.width > MANY_TOTALS and not self.packed

    @property
    def loaded(self) -> int:
        """Columns of tensor memory that a thread loads at a time."""
        return 16 if self.has_many_totals else 32

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, STAGE_BYTES // ((ROWS + self.copied_columns) * CHUNK))

    # ---- scales

    @property
    def column_scales(self) -> int:
        """Of a chunk: an fp32 for 128 columns. Of four chunks: blocks of words for 128 columns."""
        return -(-self.columns // CHUNK)

    @property
    def scale_stages(self) -> int:
        """Of the ring of scales: each a chunk's, or words for four chunks."""
        return 4 if self.packed else 8

    @property
    def scales(self) -> int:
        """Numbers or words of a stage of scales."""
        return ROWS + (self.column_scales * CHUNK if self.packed else SCALE_ROOM)

    @property
    def scale_users(self) -> int:
        """Who releases a stage of scales: tensor cores that copy words, or the consumers' warps."""
        return 1 if self.packed else WARPGROUPS * 4

    # ---- tensor memory, in columns: results, then buffers of words

    @property
    def buffers(self) -> int:
        """Of results: those of a chunk, or, where words are multiplied along, of a tile."""
        return 1 if self.packed and self.columns == COLUMNS[-1] else 2

    @property
    def scale_width(self) -> int:
        """Of a buffer of words."""
        return SCALE_COLUMNS * (1 + self.column_scales)

    @property
    def scale_buffers(self) -> int:
        """So many that a buffer's products are done when it is copied to again: when a stage is full, those that read
        the stage before are done, so all but the last `stages` chunks are."""
        return 1 + -(-self.stages // 4)

    @property
    def scales_at(self) -> int:
        return self.buffers * self.columns

    @property
    def tensor_columns(self) -> int:
        """That the kernel asks for: a power of two."""
        used = self.scales_at + (self.scale_buffers * self.scale_width if self.packed else 0)
        return 1 << (used - 1).bit_length()

    @property
    def smem_bytes(self) -> int:
        small = (self.stages + self.scale_stages + self.buffers) * barriers.BYTES_PER_STAGE
        small = round_up(small, 128) + self.scale_stages * self.scales * 4 + 16
        return round_up(small, 1024) + self.stages * (ROWS + self.copied_columns) * CHUNK

    # ---- products

    @property
    def operand(self) -> umma.Operand:
        """Rows of `a` or of `b`, as tensor copies leave them."""
        return umma.k_major(8, CHUNK)

    @property
    def instruction(self) -> int:
        return umma.instruction("f8f6f4", "e4m3", "e4m3", self.blocks * ROWS, self.columns)

    def scaled_instruction(self, byte: int) -> int:
        """Of the chunk that this byte of its words is for."""
        return umma.scaled_instruction("mxf8f6f4", "e4m3", "e4m3", ROWS, self.columns, byte, byte)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of a chunk's product: bytes to add to the start of both operands."""
        return tuple(self.operand.step(k) for k in range(0, CHUNK, umma.K_BYTES))


class Results(NamedTuple):
    """Where results go, and how many rows and columns there are."""

    out: Strided
    rows: Any
    columns: Any


class Smem(NamedTuple):
    """Addresses in shared memory: the stages of both operands, and of scales."""

    a: Any
    b: Any
    scales: Any


@dataclass(frozen=True)
class Bars:
    """Rings of operands, of scales, and of buffers of products in tensor memory."""

    operands: barriers.Ring
    scales: barriers.Ring
    products: barriers.Ring

    blocks: ClassVar[int] = 1

    def initialize(self, config: GemmConfig) -> None:
        """By one thread. One arrival announces bytes, and one says that products are done with them; one per lane its
        scales; every warp that adds up releases products."""
        self.operands.initialize(1, 1)
        self.scales.initialize(WARP, config.scale_users)
        self.products.initialize(1, WARPGROUPS * 4 * self.blocks)

    def release_products(self, buffer: Any) -> None:
        """By a thread of each consumer warp."""
        cute.arch.mbarrier_arrive(self.products.empty(buffer))

    def expect(self, full: Any, size: Any) -> None:
        """Have a stage of operands wait for so many bytes of each CTA. By a thread."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    def wait(self, barrier: Any, phase: Any) -> None:
        """By the MMA warp."""
        ptx.wait_mbarrier(barrier.toint(), phase)

    def commit(self, barrier: Any) -> None:
        """Arrive when the products that this thread has started are done."""
        ptx.commit_tensor(barrier.toint())


class BarsOf2(Bars):
    """Of a CTA of a pair."""

    blocks = 2

    def release_products(self, buffer: Any) -> None:
        cute.arch.mbarrier_arrive(self.products.empty(buffer), 0)

    @cute.jit
    def expect(self, full: Any, size: Any) -> None:
        """CTA 0's barriers count both CTAs' bytes: its thread tells of them."""
        if ptx.rank_again() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, self.blocks * size)

    def wait(self, barrier: Any, phase: Any) -> None:
        ptx.wait_mbarrier_cluster(barrier.toint(), phase)

    def commit(self, barrier: Any) -> None:
        ptx.commit_tensor_multicast(barrier.toint(), (1 << self.blocks) - 1)


# ---- producer: operands


@dataclass(frozen=True)
class Producer:
    """The warp that brings chunks of both operands."""

    config: GemmConfig
    bars: Bars

    @cute.jit
    def run(self, work: TileScheduler, a: Any, b: Any, chunks: Any) -> None:
        """Fill the ring with the chunks of all work tiles. a, b: a copy, what it reads, and the stages."""
        ring, rows, columns = self.bars.operands, ROWS, self.config.copied_columns
        a_copy, b_copy = a[0], b[0]
        a_to, a_from = self.partition(a, rows)
        b_to, b_from = self.partition(b, columns)
        stage, phase = barriers.start()
        for number in cutlass.range(work.first, work.end, work.step, unroll=1):
            group, row_tile, column_tile = work.coords(number)
            if const_expr(self.config.blocks > 1):
                column_tile = column_tile * self.config.blocks + ptx.rank_again()
            for chunk in cutlass.range(chunks, unroll=1):
                ring.wait_empty(stage, phase)
                full = ring.full(stage)
                with cute.arch.elect_one():
                    self.bars.expect(full, (rows + columns) * CHUNK)
                cute.copy(a_copy, a_from[None, row_tile, chunk, group], a_to[None, stage], tma_bar_ptr=full)
                cute.copy(b_copy, b_from[None, column_tile, chunk, group], b_to[None, stage], tma_bar_ptr=full)
                stage, phase = barriers.advance(stage, phase, self.config.stages)

    def partition(self, operand: Any, rows: int) -> Any:
        """What a bulk copy writes, by stage, and reads, by tile, chunk and group."""
        copy, source, tile = operand
        grid = cute.local_tile(source, (rows, CHUNK), (None, None, None))
        return cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(grid, 0, 2)
        )


# ---- producer: scales


@dataclass(frozen=True)
class ScaleLoader:
    """The warp that brings the scales of all work tiles.

    memory   address of the stages
    """

    config: GemmConfig
    bars: Bars
    memory: Any
    a_scale: Strided
    b_scale: Strided
    rows: Any
    columns: Any

    @cute.jit
    def run(self, work: TileScheduler, chunks: Any) -> None:
        """fp32: a stage has the scales of a chunk."""
        config, ring = self.config, self.bars.scales
        lane = cute.arch.lane_idx()
        stage, phase = barriers.start()
        for number in cutlass.range(work.first, work.end, work.step, unroll=1):
            group, row_tile, column_tile = work.coords(number)
            # rows and columns beyond the last have no scales of their own; their results are not stored
            first = row_tile * ROWS + lane
            own = [cutlass.min(first + i * WARP, self.rows - 1) for i in range(ROWS // WARP)]
            sources = [self.a_scale.at(row, group) for row in own]
            block = column_tile * config.columns // CHUNK
            # of columns beyond the last there is no scale block either
            last = range(1, config.column_scales)
            blocks = [block, *(cutlass.min(block + i, (self.columns - 1) // CHUNK) for i in last)]
            block_sources = [self.b_scale.at(group, number) for number in blocks]
            for chunk in cutlass.range(chunks, unroll=1):
                ring.wait_empty(stage, phase)
                target = self.memory + (stage * config.scales + lane) * 4
                for i in range_constexpr(ROWS // WARP):
                    ptx.copy_async_32(target + i * WARP * 4, sources[i] + Int64(chunk) * self.a_scale.strides[2])
                for i in range_constexpr(config.column_scales):
                    if lane == i:
                        ptx.copy_async_32(target + ROWS * 4, block_sources[i] + Int64(chunk) * self.b_scale.strides[2])
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.full(stage))
                stage, phase = barriers.advance(stage, phase, ring.stages)
        # no lane ends with copies under way
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def run_packed(self, work: TileScheduler, chunks: Any) -> None:
        """Words: a stage has those of four chunks."""
        config, ring = self.config, self.bars.scales
        lane = cute.arch.lane_idx()
        stage, phase = barriers.start()
        arriving, count = Int32(0), Int32(0)
        for number in cutlass.range(work.first, work.end, work.step, unroll=1):
            group, row_tile, column_tile = work.coords(number)
            # rows and columns beyond the last have no words of their own; their results are not stored
            first_row, first_column = row_tile * ROWS + lane, column_tile * config.columns + lane
            own_rows = [cutlass.min(first_row + i, self.rows - 1) for i in range(0, ROWS, WARP)]
            own_columns = [
                cutlass.min(first_column + i, self.columns - 1) for i in range(0, config.column_scales * CHUNK, WARP)
            ]
            sources = [self.a_scale.at(row, group) for row in own_rows]
            sources += [self.b_scale.at(group, column) for column in own_columns]
            for index in cutlass.range(chunks // CHUNKS_PER_WORD, unroll=1):
                ring.wait_empty(stage, phase)
                for i in range_constexpr(len(sources)):
                    stride = self.a_scale.strides[2] if const_expr(i < ROWS // WARP) else self.b_scale.strides[2]
                    target = self.memory + stage * (config.scales * 4) + i // 4 * BLOCK_BYTES + lane * 16 + i % 4 * 4
                    ptx.copy_async_32(target, sources[i] + Int64(index) * stride)
                cute.arch.cp_async_commit_group()
                count += 1
                if count > BEHIND:
                    cute.arch.cp_async_wait_group(BEHIND)
                    arriving = self.publish(arriving)
                stage, phase = barriers.advance(stage, phase, config.scale_stages)
        cute.arch.cp_async_wait_group(0)
        for _ in cutlass.range(cutlass.min(count, BEHIND), unroll=1):
            arriving = self.publish(arriving)

    @cute.jit
    def publish(self, stage: Any) -> Any:
        """Say that the lane's words are in a stage. The next one."""
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(self.bars.scales.full(stage))
        return barriers.advance(stage, Int32(0), self.config.scale_stages)[0]


# ---- MMA


@dataclass(frozen=True)
class MmaWarp:
    """The warp that starts the products of the chunks in the ring.

    tensor   address of the tensor memory
    """

    config: GemmConfig
    bars: Bars
    smem: Smem
    tensor: Any

    @cute.jit
    def run(self, work: TileScheduler, chunks: Any) -> None:
        """fp32 scales: a buffer of products is a chunk's."""
        config, bars = self.config, self.bars
        stage, phase = barriers.start()
        buffer, use = barriers.start()
        form = const_expr({"kind": "f8f6f4", "blocks": config.blocks})
        for _ in cutlass.range(work.first, work.end, work.step, unroll=1):
            for _ in cutlass.range(chunks, unroll=1):
                bars.wait(bars.products.empty(buffer), use ^ 1)
                bars.wait(bars.operands.full(stage), phase)
                ptx.fence_tensor_after()
                with cute.arch.elect_one():
                    rows = ptx.descriptor_at(config.operand, self.smem.a + stage * (ROWS * CHUNK))
                    weights = ptx.descriptor_at(config.operand, self.smem.b + stage * (config.copied_columns * CHUNK))
                    target = self.tensor + buffer * config.columns
                    for number, step in enumerate(config.steps):
                        operands = rows + (step >> 4), weights + (step >> 4)
                        ptx.tensor_mma(target, *operands, config.instruction, min(number, 1), **form)
                    bars.commit(bars.operands.empty(stage))
                    bars.commit(bars.products.full(buffer))
                stage, phase = barriers.advance(stage, phase, config.stages)
                buffer, use = barriers.advance(buffer, use, config.buffers)

    @cute.jit
    def run_packed(self, work: TileScheduler, chunks: Any) -> None:
        """Words: a buffer of products is a work tile's, and tensor cores multiply with the scales."""
        config, bars = self.config, self.bars
        stage, phase = barriers.start()
        scale_stage, scale_phase = barriers.start()
        buffer, use = barriers.start()
        scale_buffer = Int32(0)
        for _ in cutlass.range(work.first, work.end, work.step, unroll=1):
            bars.products.wait_empty(buffer, use)
            for index in cutlass.range(chunks // CHUNKS_PER_WORD, unroll=1):
                bars.scales.wait_full(scale_stage, scale_phase)
                ptx.fence_tensor_after()
                scales = self.tensor + config.scales_at + scale_buffer * config.scale_width
                with cute.arch.elect_one():
                    for block in range_constexpr(1 + config.column_scales):
                        source = self.smem.scales + scale_stage * (config.scales * 4) + block * BLOCK_BYTES
                        ptx.copy_scales(scales + block * SCALE_COLUMNS, ptx.descriptor_at(umma.SCALES, source))
                    ptx.commit_tensor(bars.scales.empty(scale_stage).toint())
                for byte in range_constexpr(CHUNKS_PER_WORD):
                    bars.operands.wait_full(stage, phase)
                    ptx.fence_tensor_after()
                    with cute.arch.elect_one():
                        rows = ptx.descriptor_at(config.operand, self.smem.a + stage * (ROWS * CHUNK))
                        weights = ptx.descriptor_at(config.operand, self.smem.b + stage * (config.columns * CHUNK))
                        for number, step in enumerate(config.steps):
                            ptx.tensor_mma_scaled(
                                self.tensor + buffer * config.columns,
                                rows + (step >> 4),
                                weights + (step >> 4),
                                config.scaled_instruction(byte),
                                scales,
                                scales + SCALE_COLUMNS,
                                index if byte + number == 0 else 1,
                                kind="mxf8f6f4",
                            )
                        ptx.commit_tensor(bars.operands.empty(stage).toint())
                    stage, phase = barriers.advance(stage, phase, config.stages)
                scale_buffer = barriers.advance(scale_buffer, Int32(0), config.scale_buffers)[0]
                scale_stage, scale_phase = barriers.advance(scale_stage, scale_phase, config.scale_stages)
            with cute.arch.elect_one():
                ptx.commit_tensor(bars.products.full(buffer).toint())
            buffer, use = barriers.advance(buffer, use, config.buffers)


# ---- promotion and epilogue


@dataclass(frozen=True)
class Consumer:
    """The warpgroups that store results: a thread has a row, and half of the work tile's columns.

    thread   of the CTA
    scales   address of the stages of scales
    tensor   address of the tensor memory
    """

    config: GemmConfig
    bars: Bars
    thread: Any
    scales: Any
    tensor: Any
    results: Results

    @cute.jit
    def run(self, work: TileScheduler, chunks: Any) -> None:
        """fp32 scales: scale the products of all chunks and add them up (promote) before they are stored."""
        config, bars = self.config, self.bars
        lane = self.thread % WARP
        own_row, own_column, products = self.share()
        totals = cute.make_rmem_tensor((config.width,), Float32)
        stage, phase = barriers.start()
        buffer, use = barriers.start()
        for number in cutlass.range(work.first, work.end, work.step, unroll=1):
            totals.fill(0.0)
            for _ in cutlass.range(chunks, unroll=1):
                bars.scales.wait_full(stage, phase)
                factors = self.scales + stage * (config.scales * 4)
                column_scale = ptx.load_shared_f32(factors + (ROWS + own_column // CHUNK) * 4)
                factor = ptx.load_shared_f32(factors + own_row * 4) * column_scale
                bars.products.wait_full(buffer, use)
                ptx.fence_tensor_after()
                self.promote(totals, products + buffer * config.columns, factor)
                ptx.fence_tensor_before()
                # one lane arrives for all: they must have read their scales and their products
                cute.arch.sync_warp()
                if lane == 0:
                    bars.release_products(buffer)
                    cute.arch.mbarrier_arrive(bars.scales.empty(stage))
                stage, phase = barriers.advance(stage, phase, config.scale_stages)
                buffer, use = barriers.advance(buffer, use, config.buffers)
            target, left = self.own_results(work.coords(number), own_row, own_column)
            self.store([totals[i] for i in range(config.width)], target, left)

    @cute.jit
    def run_packed(self, work: TileScheduler, chunks: Any) -> None:
        """Words: a buffer has the sums of all chunks."""
        config, bars = self.config, self.bars
        own_row, own_column, products = self.share()
        buffer, use = barriers.start()
        for number in cutlass.range(work.first, work.end, work.step, unroll=1):
            target, left = self.own_results(work.coords(number), own_row, own_column)
            bars.products.wait_full(buffer, use)
            ptx.fence_tensor_after()
            for first in range_constexpr(0, config.width, config.loaded):
                words = ptx.load_tensor_memory(products + (buffer * config.columns + first), config.loaded, Float32)
                self.store(list(words), target + first * 2, left - first)
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if self.thread % WARP == 0:
                cute.arch.mbarrier_arrive(bars.products.empty(buffer))
            buffer, use = barriers.advance(buffer, use, config.buffers)

    def share(self) -> tuple[Any, Any, Any]:
        """The thread's row and first column of a work tile, and where their product is in tensor memory."""
        row = self.thread % ROWS
        column = cute.arch.make_warp_uniform(self.thread // wgmma.WARPGROUP) * self.config.width
        return row, column, self.tensor + (row // WARP * WARP << LANE_SHIFT) + column

    @cute.jit
    def own_results(self, coords: Any, own_row: Any, own_column: Any) -> tuple[Any, Any]:
        """Address of the thread's first result of a work tile, and how many columns there are from it on."""
        group, row_tile, column_tile = coords
        row, column = row_tile * ROWS + own_row, column_tile * self.config.columns + own_column
        left = self.results.columns - column if row < self.results.rows else Int32(0)
        return self.results.out.at(row, group) + Int64(column) * 2, left

    @cute.jit
    def promote(self, totals: cute.Tensor, products: Any, factor: Any) -> None:
        """Add scaled products, which begin at an address, to totals. Some are loaded while others are added."""
        count = const_expr(self.config.loaded)
        coming = ptx.start_tensor_load(products, count)
        for first in range_constexpr(0, self.config.width, count):
            words = ptx.wait_tensor_loads(coming)
            if const_expr(first + count < self.config.width):
                coming = ptx.start_tensor_load(products + (first + count), count)
            for i in range_constexpr(0, count, 2):
                pair = [words[i + j].bitcast(Float32) for j in range(2)]
                before = [totals[first + i + j] for j in range(2)]
                low, high = ptx.fma_f32x2(pair, (factor, factor), before)
                totals[first + i], totals[first + i + 1] = low, high

    def store(self, values: list[Any], target: Any, left: Any) -> None:
        """Neighbouring results as bf16, as far as there are columns `left`."""
        for first in range(0, len(values), 8):
            ptx.store_global_128(target + first * 2, convert.bf16_words(values[first : first + 8]), first < left)


# ---- kernel


class SchedulerOf2(TileScheduler):
    """Of a pair. The tile of rows is a CTA's; the last one's may be beyond the last row, where nothing is stored."""

    def coords(self, number: Any) -> tuple[Any, Any, Any]:
        group, row_tile, column_tile = super().coords(number)
        return group, row_tile * BarsOf2.blocks + ptx.rank_again(), column_tile


class BlackwellGemmKernel:
    """Entry point: (a, a_scale, b, b_scale, out, number of CTAs, stream)."""

    def __init__(self, key: BlackwellGemmKey) -> None:
        config = self.config = key.config
        self.bars = Bars if config.blocks == 1 else BarsOf2
        self.name = f"deepseek_v4_fp8_einsum_sm100_{key.rows}x{key.columns}" + "_packed" * key.packed

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            *self.tma_atoms(a, b),
            Strided.of(a_scale),
            Strided.of(b_scale),
            Strided.of(out),
            length(out, 0),
            length(out, 1),
            length(out, 2),
            length(a, 2) // CHUNK,
        )
        blocks = const_expr(self.config.blocks)
        kernel.launch(
            grid=[ctas // blocks * blocks, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[blocks, 1, 1] if const_expr(blocks > 1) else None,
            min_blocks_per_mp=1,
            stream=stream,
        )

    def tma_atoms(self, a: Any, b: Any) -> tuple[Any, ...]:
        """Of each operand the copy and what it reads, then of each where it writes."""
        columns, stages = self.config.copied_columns, self.config.stages
        a_tiles = wgmma.swizzled_tiles(Float8E4M3FN, ROWS, stages)
        b_tiles = wgmma.swizzled_tiles(Float8E4M3FN, columns, stages)
        # both as [rows, K, groups]
        a_view = cute.make_tensor(a.iterator, cute.select(a.layout, mode=[0, 2, 1]))
        b_view = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup(self.config.blocks))
        a_copy, a_source = cpasync.make_tiled_tma_atom(load, a_view, a_tiles, (ROWS, CHUNK))
        b_copy, b_source = cpasync.make_tiled_tma_atom(load, b_view, b_tiles, (columns, CHUNK))
        return a_copy, a_source, b_copy, b_source, a_tiles, b_tiles

    @cute.kernel
    def kernel(
        self,
        a_copy: cute.CopyAtom,
        a_source: cute.Tensor,
        b_copy: cute.CopyAtom,
        b_source: cute.Tensor,
        a_tiles: cute.ComposedLayout,
        b_tiles: cute.ComposedLayout,
        a_scale: Strided,
        b_scale: Strided,
        out: Strided,
        rows: Int32,
        groups: Int32,
        columns: Int32,
        chunks: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        memory = SmemAllocator()
        depths = config.stages, config.scale_stages, config.buffers
        bars = self.bars(*(barriers.Ring.allocate(memory, count) for count in depths))
        scales = memory.allocate_tensor(
            Int32, cute.make_layout(config.scales * config.scale_stages), byte_alignment=128
        )
        word = memory.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
        a = memory.allocate_tensor(Float8E4M3FN, a_tiles.outer, byte_alignment=1024, swizzle=a_tiles.inner)
        b = memory.allocate_tensor(Float8E4M3FN, b_tiles.outer, byte_alignment=1024, swizzle=b_tiles.inner)
        scale = scales.iterator.toint()
        producer_warp = const_expr(WARPGROUPS * 4)
        scale_warp, mma_warp = const_expr(producer_warp + 1), const_expr(producer_warp + 2)
        if warp == producer_warp:
            for copy in (a_copy, b_copy):
                cpasync.prefetch_descriptor(copy)
        if const_expr(config.blocks > 1):
            # a pair's allocation wants both CTAs to be running
            self.synchronize()
        if warp == mma_warp:
            ptx.allocate_tensor_memory(word.iterator.toint(), config.tensor_columns, config.blocks)
            ptx.relinquish_tensor_memory(config.blocks)
        if thread == 0:
            bars.initialize(config)
        self.synchronize()
        cute.arch.griddepcontrol_wait()
        tensor = ptx.load_shared_s32(word.iterator.toint())

        sharers = const_expr((WARPGROUPS * 4 + 1) * WARP)
        if warp >= producer_warp:
            if const_expr(config.has_many_totals):
                cute.arch.setmaxregister_decrease(REGISTERS[0])
            work = self.work(rows, groups, columns)
            if warp == producer_warp:
                Producer(config, bars).run(work, (a_copy, a_source, a), (b_copy, b_source, b), chunks)
            if warp == scale_warp:
                loader = ScaleLoader(config, bars, scale, a_scale, b_scale, rows, columns)
                if const_expr(config.packed):
                    loader.run_packed(work, chunks)
                else:
                    loader.run(work, chunks)
            if warp == mma_warp:
                mma = MmaWarp(config, bars, Smem(a.iterator.toint(), b.iterator.toint(), scale), tensor)
                if const_expr(config.packed):
                    mma.run_packed(work, chunks)
                elif const_expr(config.blocks > 1):
                    if ptx.rank_again() == 0:
                        mma.run(work, chunks)
                else:
                    mma.run(work, chunks)
                if const_expr(config.blocks == 1):
                    cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)
                    ptx.free_tensor_memory(tensor, config.tensor_columns)
        else:
            if const_expr(config.has_many_totals):
                cute.arch.setmaxregister_increase(REGISTERS[1])
            work = self.work(rows, groups, columns)
            consumer = Consumer(config, bars, thread, scale, tensor, Results(out, rows, columns))
            if const_expr(config.packed):
                consumer.run_packed(work, chunks)
            else:
                consumer.run(work, chunks)
            if const_expr(config.blocks == 1):
                cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)
        if const_expr(config.blocks > 1):
            self.synchronize()
            if warp == mma_warp:
                ptx.free_tensor_memory(tensor, config.tensor_columns, config.blocks)

    def synchronize(self) -> None:
        """All threads that share work tiles."""
        if const_expr(self.config.blocks > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def work(self, rows: Any, groups: Any, columns: Any) -> TileScheduler:
        """The CTA's work tiles. Counted by each role for itself: what all share, the assembler spills."""
        blocks = const_expr(self.config.blocks)
        row_tiles = cute.ceil_div(rows, blocks * ROWS)
        column_tiles = cute.ceil_div(columns, self.config.columns)
        ctas, _, _ = cute.arch.grid_dim()
        block, tiles = ptx.block_again(), groups * row_tiles * column_tiles
        if const_expr(blocks > 1):
            return SchedulerOf2(block // blocks, tiles, ctas // blocks, row_tiles, column_tiles)
        return TileScheduler(block, tiles, ctas, row_tiles, column_tiles)


# ---- key


@dataclass(frozen=True)
class BlackwellGemmKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    columns   of a work tile: 64, 128 or 256
    packed    whether scales are four ue8m0 bytes in a word and each column has its own, else they are fp32
    """

    kernel_name: ClassVar[str] = "output.blackwell.einsum"
    columns: int = 256
    packed: bool = False

    @property
    def rows(self) -> int:
        return ROWS

    @property
    def config(self) -> GemmConfig:
        return GemmConfig(self.columns, self.packed)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "tcgen05.mma", "tcgen05.ld", "tma.load", "cp.async", "mbarrier", "st.global.128", "griddepcontrol"
        return (*used, "tcgen05.cp") if self.packed else used

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return BlackwellGemmKernel(self), fake_arguments(Int32 if self.packed else Float32)


@dataclass(frozen=True)
class BlackwellPairGemmKey(BlackwellGemmKey):
    """As BlackwellGemmKey. A pair of CTAs has a work tile of 256 rows and 256 columns; scales are fp32."""

    kernel_name: ClassVar[str] = "output.blackwell.einsum_2cta"

    def __post_init__(self) -> None:
        if self.packed or self.columns != COLUMNS[-1]:
            raise ValueError(
                f"expected {COLUMNS[-1]} columns and fp32 scales, got {self.columns}, packed={self.packed}"
            )

    @property
    def rows(self) -> int:
        return self.config.blocks * ROWS

    @property
    def config(self) -> GemmConfig:
        return GemmConfig(self.columns, blocks=BarsOf2.blocks)

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "barrier.cluster"


# ---- what a work tile takes

GROUPS, RANK, WIDTH = 8, 1024, 4096

CALLS = (1, 512, 8192)
"""Rows of a call."""

LANES = 128
"""fp32 additions of a multiprocessor in a clock."""


def work() -> tuple[Work, ...]:
    """What perf/roofline.py makes times of."""
    kinds = [GemmConfig(columns, packed) for packed in (False, True) for columns in COLUMNS]
    return tuple(_work(config) for config in (*kinds, GemmConfig(COLUMNS[-1], blocks=BarsOf2.blocks)))


def _work(config: GemmConfig) -> Work:
    """Of a work tile, in one of its CTAs."""
    columns, packed, blocks = config.columns, config.packed, config.blocks
    chunks = WIDTH // CHUNK
    scales = chunks * config.scales * 4 // (4 if packed else 1)
    operands = (ROWS + config.copied_columns) * WIDTH
    products = 2 * ROWS * columns * WIDTH
    shapes = []
    for rows in CALLS:
        tiles = GROUPS * -(-rows // (blocks * ROWS)) * (RANK // columns)
        moved = GROUPS * (RANK * WIDTH + rows * (WIDTH + WIDTH // CHUNK * 4 + RANK * 2))
        shapes.append(Shape(f"G={GROUPS} T={rows}", tiles, moved))
    return Work(
        op="deepseek_v4_fp8_einsum",
        kernel=f"{columns} columns" + ", packed scales" * packed + ", pair of blocks" * (blocks > 1),
        tile=f"{blocks * ROWS} rows, {columns} columns, K = {WIDTH}",
        blocks=blocks,
        hbm=0,
        mma={"e4m3": products},
        smem={"copies": operands, "operands": operands, "scales": 2 * scales},
        flops=products,
        shapes=tuple(shapes),
        threads={} if packed else {"additions": ROWS * columns * chunks / LANES},
    )
