# SPDX-License-Identifier: Apache-2.0
"""FP8 GEMM for every architecture from sm_80 on, by groups: out[t, n] = sum over 128-column chunks c of a_scale[t, c]
b_scale[n, c] dot(a[t, c], b[n, c]), with f16 products by mma.sync that are summed in fp32.

A persistent CTA walks over work tiles of [rows, columns] results, neighbouring columns first, so that CTAs that run
together read the same rows of `a`. All of its warps do the same: they copy chunks of the tile's rows, and their scales,
to a ring of stages as far ahead as it reaches, and multiply a chunk, whose products they scale and add to their totals
(promote). Every key sums in the same order, so a row's bits do not depend on what else is in the batch.

The CTA's warps share the tile; a warp has [16 row_tiles, 8 column_tiles] of it. Lane l = 4 r + c has, of every 16 rows,
rows r and r + 8, and of the warp's columns, lane_columns = 2 column_tiles neighbouring ones from c lane_columns on:
number n of the 8 columns of a product `j` is column lane_columns (n / 2) + 2 j + n % 2 of the warp. So it stores its
results of a row at once, without an exchange. Of a row of codes it has four neighbouring ones, 4 c and on, of every 16
that a product sums.

    stage     a [rows, 128] e4m3          16-byte vector i of a row lies at i ^ `row_swizzle` of it
              b [columns, 128] e4m3       likewise, at i ^ `column_swizzle`
              scales                      4 bytes for each of the rows, then for each of the columns, or for all of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, mma_sync, ptx
from cute_kernels.dsl.tensor import length
from cute_kernels.formats import round_up
from cute_kernels.linear.params import CHUNK, CHUNKS_PER_WORD, WARP, Strided, TileScheduler, fake_arguments
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number
from cute_kernels.runtime.compile import KernelKey

# ---- config

VECTOR = 16
"""Bytes that are copied, and of a row that a matrix of operands has, at a time: one product sums as many codes."""

VECTORS = CHUNK // VECTOR
COLUMN_WARPS = 4

MOST_STAGES = 9
"""More are of no use: those of the smallest tile are 90 KB, enough for the memory's latency."""

STEPS = VECTORS // 2
"""Of a chunk: two products each, whose operands are loaded together."""

E4M3_ARCH = 89
"""First architecture that converts e4m3."""


@dataclass(frozen=True)
class GemmConfig:
    """Sizes of a kernel: rows and columns of a work tile, and whether each column has scales of its own."""

    arch: str
    rows: int
    columns: int
    packed: bool

    @property
    def row_warps(self) -> int:
        """Along the rows of a tile: two wherever that leaves a warp two products of 16 rows."""
        return max(1, min(2, self.rows // WARP))

    @property
    def threads(self) -> int:
        return self.row_warps * COLUMN_WARPS * WARP

    @property
    def row_tiles(self) -> int:
        """Products of a warp along its rows."""
        return self.rows // self.row_warps // 16

    @property
    def column_tiles(self) -> int:
        """Products of a warp along its columns: an even number, as two are loaded at a time."""
        return self.columns // COLUMN_WARPS // 8

    @property
    def lane_columns(self) -> int:
        return 2 * self.column_tiles

    @property
    def rows_at_once(self) -> int:
        """Rows that the threads copy a chunk of at a time."""
        return self.threads // VECTORS

    # ---- shared memory, in bytes

    @property
    def b_at(self) -> int:
        """In a stage."""
        return self.rows * CHUNK

    @property
    def scales_at(self) -> int:
        """In a stage."""
        return self.b_at + self.columns * CHUNK

    @property
    def scale_count(self) -> int:
        """Of a stage."""
        return self.rows + (self.columns if self.packed else 1)

    @property
    def scales_of_thread(self) -> int:
        """That it copies, of every stage."""
        return -(-self.scale_count // self.threads)

    @property
    def stage_bytes(self) -> int:
        return self.scales_at + round_up(self.scale_count * 4, CHUNK)

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, SMEM_BYTES[self.arch] // self.stage_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes


def row_swizzle(row: Any) -> Any:
    """Of a row of `a`. Also of a traced one."""
    return row & 7


def column_swizzle(column: Any, lane_columns: int) -> Any:
    """Of a row of `b`: different ones for those that a product's lanes read together. Also of a traced one."""
    return (column & 1) | ((column // lane_columns & 3) << 1)


def column_of(n: Any, j: Any, lane_columns: int) -> Any:
    """Which of a warp's columns is number n of product j. Also of traced numbers."""
    return (n >> 1) * lane_columns + 2 * j + (n & 1)


# ---- producer


class Operands(NamedTuple):
    """What is multiplied, its numbers of rows and columns, and of 128-column chunks."""

    a: Strided
    a_scale: Strided
    b: Strided
    b_scale: Strided
    rows: Any
    columns: Any
    chunks: Any


class Cursor(NamedTuple):
    """What a thread copies next: number of a work tile, and a chunk; addresses of the thread's first vector of the
    tile's `a` and `b` and of its scales, all of chunk 0; and how many rows and columns there are from these vectors'
    own on, and from each scale's own on."""

    number: Any
    chunk: Any
    a: Any
    b: Any
    rows: Any
    columns: Any
    scales: tuple[Any, ...]
    scales_left: tuple[Any, ...]


class Producer:
    """All threads. A thread copies the same 16 bytes of every `rows_at_once`-th row of both operands, and one or two
    scales. Rows and columns that do not exist are left out: what is in shared memory in their place leads to results
    that nobody stores."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    def seek(self, number: Any, work: TileScheduler, operands: Operands, thread: Any) -> Cursor:
        """The first chunk of a tile."""
        config = self.config
        group, row_tile, column_tile = work.coords(number)
        first_row, first_column = row_tile * config.rows, column_tile * config.columns
        own, vector = thread // VECTORS, Int64(thread % VECTORS * VECTOR)
        row, column = first_row + own, first_column + own
        a, b = operands.a.at(row, group) + vector, operands.b.at(group, column) + vector
        found = [
            self.seek_scale(first_row, first_column, group, operands, thread + i * config.threads)
            for i in range(config.scales_of_thread)
        ]
        scales, left = (tuple(part) for part in zip(*found, strict=True))
        return Cursor(number, Int32(0), a, b, operands.rows - row, operands.columns - column, scales, left)

    @cute.jit
    def seek_scale(self, first_row: Any, first_column: Any, group: Any, operands: Operands, number: Any) -> Any:
        """Address of a tile's scale by number, rows' first, and how many there are from it on."""
        config = self.config
        row, column = first_row + number, first_column + number - config.rows
        scale, left = operands.a_scale.at(row, group), operands.rows - row
        if number >= config.rows:
            if const_expr(config.packed):
                scale, left = operands.b_scale.at(group, column), operands.columns - column
            else:
                scale, left = operands.b_scale.at(group, first_column // CHUNK), config.scale_count - number
        if number >= config.scale_count:
            left = Int32(0)
        return scale, left

    @cute.jit
    def copy(self, stage: Any, cursor: Cursor, work: TileScheduler, operands: Operands, thread: Any) -> Cursor:
        """Have a chunk copied to a stage, if there is one left. What comes next."""
        config = self.config
        own, vector = thread // VECTORS, thread % VECTORS
        offset = Int64(cursor.chunk) * CHUNK
        a, b = cursor.a + offset, cursor.b + offset
        for row in range_constexpr(0, config.rows, config.rows_at_once):
            target = stage + (own + row) * CHUNK + (vector ^ row_swizzle(own + row)) * VECTOR
            ptx.copy_async_128_once(target, a + operands.a.strides[0] * row, row < cursor.rows)
        for row in range_constexpr(0, config.columns, config.rows_at_once):
            swizzle = column_swizzle(own + row, config.lane_columns)
            target = stage + config.b_at + (own + row) * CHUNK + (vector ^ swizzle) * VECTOR
            ptx.copy_async_128_once(target, b + operands.b.strides[1] * row, row < cursor.columns)
        place = Int64(cursor.chunk // CHUNKS_PER_WORD if const_expr(config.packed) else cursor.chunk)
        for i in range_constexpr(config.scales_of_thread):
            number = thread + i * config.threads
            stride = operands.a_scale.strides[2] if number < config.rows else operands.b_scale.strides[2]
            target = stage + config.scales_at + number * 4
            ptx.copy_async_32(target, cursor.scales[i] + place * stride, cursor.scales_left[i] > 0)
        cute.arch.cp_async_commit_group()
        return self.advance(cursor, work, operands, thread)

    @cute.jit
    def advance(self, cursor: Cursor, work: TileScheduler, operands: Operands, thread: Any) -> Cursor:
        """The next chunk, of the same tile or of the CTA's next one. Beyond the last tile nothing is there."""
        cursor = cursor._replace(chunk=cursor.chunk + 1)
        if cursor.chunk == operands.chunks:
            cursor = self.seek(cursor.number + work.step, work, operands, thread)
            if cursor.number >= work.end:
                nothing = (Int32(0),) * self.config.scales_of_thread
                cursor = cursor._replace(rows=Int32(0), columns=Int32(0), scales_left=nothing)
        return cursor


# ---- MMA, promotion and epilogue


class Offsets(NamedTuple):
    """Where a lane's operands lie in a stage; the first of its rows and of its columns, in a tile; where the scales of
    these lie in a stage."""

    a: Any
    b: Any
    row: Any
    column: Any
    row_scales: Any
    column_scales: Any


class Consumer:
    """What a warp computes of a work tile.

    converts   whether the GPU converts e4m3 to f16; else bits are moved, and operands are 2^-8 of their values
    """

    def __init__(self, config: GemmConfig, converts: bool) -> None:
        self.config, self.converts = config, converts
        self.factor = 1.0 if converts else 2.0**16

    @property
    def words(self) -> int:
        """Of codes that a lane has for a step."""
        return 4 * self.config.row_tiles + 2 * self.config.column_tiles

    @property
    def sums(self) -> int:
        """Of a lane."""
        return 4 * self.config.row_tiles * self.config.column_tiles

    def offsets(self, warp: Any, lane: Any) -> Offsets:
        config = self.config
        first_row = warp // COLUMN_WARPS * (16 * config.row_tiles)
        first_column = warp % COLUMN_WARPS * (8 * config.column_tiles)
        # a: matrices of 8 rows and 16 codes, rows first; b: vectors first, then the next product
        a_row, a_vector = first_row + (lane & 15), lane >> 4
        b_row = first_column + column_of(lane & 7, lane >> 4, config.lane_columns)
        b_vector = (lane >> 3) & 1
        row, column = first_row + (lane >> 2), first_column + (lane & 3) * config.lane_columns
        return Offsets(
            a_row * CHUNK + (a_vector ^ row_swizzle(a_row)) * VECTOR,
            config.b_at + b_row * CHUNK + (b_vector ^ column_swizzle(b_row, config.lane_columns)) * VECTOR,
            row,
            column,
            config.scales_at + row * 4,
            config.scales_at + (config.rows + (column if config.packed else 0)) * 4,
        )

    def load(self, words: Any, stage: Any, offsets: Offsets, step: int) -> None:
        """The lane's words of a step."""
        config = self.config
        found: list[Any] = []
        a, b = ((stage + place) ^ (step * 2 * VECTOR) for place in (offsets.a, offsets.b))
        for i in range(config.row_tiles):
            found += ptx.load_matrices(a + i * (16 * CHUNK))
        for j in range(0, config.column_tiles, 2):
            found += ptx.load_matrices(b + 2 * j * CHUNK)
        for i, word in enumerate(found):
            words[i] = word

    def none(self) -> list[Any]:
        return [()] * (self.config.row_tiles * self.config.column_tiles)

    def pairs(self, word: Any) -> list[Any]:
        return list(ptx.f16x2_of_e4m3x4(word) if self.converts else convert.f16x2_of_e4m3x4_by_bits(word))

    def multiply(self, sums: list[Any], words: list[Any]) -> list[Any]:
        """Sums of products, [row_tiles][column_tiles] of four, with those of a step."""
        config = self.config
        sums = list(sums)
        for k in range(2):
            # words of `a`: both halves of the rows for the first product, then for the second one
            rows = [[self.pairs(words[4 * i + 2 * k + half]) for half in range(2)] for i in range(config.row_tiles)]
            columns = [self.pairs(words[4 * config.row_tiles + 2 * j + k]) for j in range(config.column_tiles)]
            for i, (low, high) in enumerate(rows):
                a = (low[0], high[0], low[1], high[1])
                for j, b in enumerate(columns):
                    number = i * config.column_tiles + j
                    sums[number] = mma_sync.multiply_by(a, b, sums[number], is_f16=True)
        return sums

    def load_factors(self, stage: Any, offsets: Offsets, chunk: Any) -> tuple[list[Any], list[Any]]:
        """Scales of the lane's rows and columns in a chunk: of all columns one, or each its own."""
        config = self.config
        rows = [stage + offsets.row_scales + 32 * i for i in range(2 * config.row_tiles)]
        columns = stage + offsets.column_scales
        if not config.packed:
            own = [ptx.load_shared_f32(columns)]
            return [ptx.mul_rn(ptx.load_shared_f32(row), own[0]) for row in rows], []
        shift = chunk % CHUNKS_PER_WORD * 8
        words = [word for i in range(0, config.lane_columns, 4) for word in ptx.load_shared_128(columns + 4 * i)]
        row_tiles, column_tiles = (
            [convert.ue8m0_value((word >> shift) & 0xFF) for word in found]
            for found in ([ptx.load_shared_s32(row) for row in rows], words)
        )
        return row_tiles, column_tiles

    def add(self, totals: cute.Tensor, sums: list[Any], factors: tuple[list[Any], list[Any]]) -> None:
        """totals += scaled sums. A lane's totals are in the order of its columns: of 16 rows, r's come first."""
        config = self.config
        row_tiles, column_tiles = factors
        for i in range(config.row_tiles):
            for half in range(2):
                for column in range(config.lane_columns):
                    factor = row_tiles[2 * i + half]
                    if column_tiles:
                        factor = ptx.mul_rn(factor, column_tiles[column])
                    value = sums[i * config.column_tiles + column // 2][2 * half + column % 2].bitcast(Float32)
                    if self.factor != 1.0:
                        value = ptx.mul_rn(value, Float32(self.factor))
                    place = (2 * i + half) * config.lane_columns + column
                    totals[place] = ptx.fma_rn(value, factor, totals[place])

    @cute.jit
    def store(self, totals: cute.Tensor, out: Strided, tile: Any, offsets: Offsets, rows: Any, columns: Any) -> None:
        """Store the totals as bf16 where there are rows and columns."""
        config = self.config
        group, row_tile, column_tile = tile
        row, column = row_tile * config.rows + offsets.row, column_tile * config.columns + offsets.column
        target = out.at(row, group) + Int64(column) * 2
        for i in range_constexpr(2 * config.row_tiles):
            own = [totals[i * config.lane_columns + j] for j in range(config.lane_columns)]
            words = convert.bf16_words(own)
            exists = (row + 8 * i < rows) & (column < columns)
            address = target + out.strides[0] * (8 * i)
            if const_expr(len(words) == 4):
                ptx.store_global_128(address, words, exists)
            else:
                ptx.store_global_64(address, words[0], words[1], exists)


# ---- kernel


class PortableGemmKernel:
    """Entry point: (a, a_scale, b, b_scale, out, number of CTAs, stream)."""

    def __init__(self, key: PortableGemmKey) -> None:
        self.config = key.config
        number = arch_number(key.arch)
        self.producer = Producer(key.config)
        self.consumer = Consumer(self.config, number >= E4M3_ARCH)
        self.has_dependency = number >= ptx.DEPENDENT_LAUNCH_ARCH
        kind = "_packed" if key.packed else ""
        self.name = f"deepseek_v4_fp8_einsum_portable_{key.rows}x{key.columns}{kind}"

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
            *(Strided.of(tensor) for tensor in (a, a_scale, b, b_scale, out)),
            length(out, 0),
            length(out, 1),
            length(out, 2),
            length(a, 2) // CHUNK,
        )
        kernel.launch(grid=[ctas, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        a: Strided,
        a_scale: Strided,
        b: Strided,
        b_scale: Strided,
        out: Strided,
        rows: Int32,
        groups: Int32,
        columns: Int32,
        chunks: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(config.smem_bytes), byte_alignment=CHUNK)
        ring = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        row_tiles = cute.ceil_div(rows, config.rows)
        column_tiles = cute.ceil_div(columns, config.columns)
        work = TileScheduler(cta, groups * row_tiles * column_tiles, ctas, row_tiles, column_tiles)
        operands = Operands(a, a_scale, b, b_scale, rows, columns, chunks)
        cursor = self.producer.seek(work.first, work, operands, thread)
        for i in cutlass.range(config.stages, unroll=1):
            cursor = self.producer.copy(ring + i * config.stage_bytes, cursor, work, operands, thread)
        cute.arch.cp_async_wait_group(config.stages - 1)
        cute.arch.sync_threads()

        lane = cute.arch.lane_idx()
        offsets = self.consumer.offsets(cute.arch.make_warp_uniform(thread // WARP), lane)
        words = cute.make_rmem_tensor((self.consumer.words,), Int32)
        totals = cute.make_rmem_tensor((self.consumer.sums,), Float32)
        self.consumer.load(words, ring, offsets, 0)
        index = Int32(0)
        for number in cutlass.range(work.first, work.end, work.step, unroll=1):
            totals.fill(0.0)
            for chunk in cutlass.range(chunks, unroll=1):
                stage = ring + index * config.stage_bytes
                index = Int32(0) if index + 1 == config.stages else index + 1
                sums = self.consumer.none()
                factors = self.consumer.load_factors(stage, offsets, chunk)
                for step in range_constexpr(STEPS):
                    own = [words[i] for i in range(self.consumer.words)]
                    if const_expr(step < STEPS - 1):
                        self.consumer.load(words, stage, offsets, step + 1)
                    else:
                        # all warps have what they need of this stage, and the next one is there
                        cute.arch.cp_async_wait_group(config.stages - 2)
                        cute.arch.sync_threads()
                        self.consumer.load(words, ring + index * config.stage_bytes, offsets, 0)
                        cursor = self.producer.copy(stage, cursor, work, operands, thread)
                    sums = self.consumer.multiply(sums, own)
                self.consumer.add(totals, sums, factors)
            self.consumer.store(totals, out, work.coords(number), offsets, rows, columns)
        cute.arch.cp_async_wait_group(0)


# ---- key


@dataclass(frozen=True)
class PortableGemmKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    rows      of a work tile: 16, 32, 64 or 128
    columns   of a work tile: 64 or 128, so that they share a scale
    packed    whether scales are four ue8m0 bytes in a word and each column has its own, else they are fp32
    """

    kernel_name: ClassVar[str] = "output.mma_sync.einsum"
    rows: int = 128
    columns: int = 128
    packed: bool = False

    @property
    def config(self) -> GemmConfig:
        return GemmConfig(self.arch, self.rows, self.columns, self.packed)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "mma.sync", "ldmatrix", "cp.async"
        return (*used, "cvt.e4m3") if arch_number(self.arch) >= E4M3_ARCH else used

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return PortableGemmKernel(self), fake_arguments(Int32 if self.packed else Float32)
