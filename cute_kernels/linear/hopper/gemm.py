# SPDX-License-Identifier: Apache-2.0
"""GEMM for many rows on Hopper: out[t, n] = sum over 128-column chunks c of a_scale[t, c] b_scale[n / 128, c]
dot(a[t, c], b[n, c]), by groups; or, of bf16 operands, a plain product.

A persistent CTA walks over work tiles of [rows, columns] results. Two producer warps bring chunks of the tile's rows of
`a` and of `b` by bulk tensor copies into a ring of stages. Consumer warpgroups multiply: the tensor cores sum a
chunk with about 14 bits, its products are scaled and added to fp32 totals (promoted). While one warpgroup promotes, the
tensor cores work for another, or on the next of its own `depth` chunks. Scales, which may lie anywhere, go from memory
to the registers of those who promote.

    warps 0 .. 4 W - 1    W consumer warpgroups: wgmma, promotion, epilogue. Warpgroup w has the 64 rows from 64 w on
    warp 4 W              producer of `b`, a constant operand, which with PDL comes before the kernel ahead has ended
    warp 4 W + 1          producer of `a`, behind its griddepcontrol.wait: where there is nothing to wait for, both come
                          at the same pace, and the first rows do not queue behind a ring full of `b`
    (two more warps complete the warpgroup, whose registers the consumers get)

    stage                 a [rows, 128 bytes of K], b [columns, 128 bytes of K], both with the 128-byte swizzle

    barrier     full                                  empty                              waits for full, for empty
    ring        a chunk of a and b (TMA bytes)        consumer warps' products are done  consumers, producers
    received    all splits' shares (with splits)      none: one work tile a cluster      consumers

    epilogue    what a consumer does with the totals in its registers
    bf16, fp32  --> gmem
    staged      --stmatrix--> smem --bulk tensor store--> gmem; smem is written again when that store has read it
    splits      --> smem of the share's CTA; shares are added up --registers--> gmem
    e4m3        rounded to bf16, largest magnitude over the quad that has a row's 128 columns --> scale, codes --> gmem

bf16 operands have no scales: the tensor cores add up all chunks, of 64 columns, in one fp32 accumulator.

What binds is shared memory, which moves 128 bytes a clock, then the power of the chip. A product of 64 x 128 reads 24
KB of it in the 256 clocks that it takes, and the copies of the operands write (rows + columns) * 128 bytes in
rows * columns / 32 clocks. To multiply all the time a tile of 128 x 128 would need 160 bytes a clock, a smaller one
more: so tiles are large.

Where there are fewer work tiles than multiprocessors K is cut (`splits`): the CTAs of a cluster have a split of one
work tile each, and send their totals to each other. Each adds up a share of the tile, split by split, and stores it:

    share of CTA r        of every 16 rows the first 8 (r even) or the others (r odd); of the columns, with 4 splits,
                          the first half (r < 2) or the other one
    received              [split, 16 bytes of the share, thread] 16 bytes, for each consumer warpgroup

Rows beyond the last one are filled with zeros by the copy, one at a time, which takes longer than to bring rows that
are there. So where there are as many rows as a work tile has, the last one is moved back until it ends with the last
row (rounded up to a multiple of 4), and rows that it shares with the one before have the same results twice. Where
there are fewer, boxes of 64 rows (what a copy of `a` brings) that reach further are moved back across the one before.

Every key without splits adds the chunks of a row in the same order, so a row's bits do not depend on what else is in
the batch. With splits they depend on how K is cut. A cluster meets once, before sums are sent.

Split-K through distributed shared memory is known from DeepGEMM and CUTLASS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, convert, ptx, wgmma
from cute_kernels.dsl.reduce import exchange_in_quad, over_quad
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import round_up
from cute_kernels.kv_cache.query_norm import sum_of_quad
from cute_kernels.linear.params import Strided
from cute_kernels.linear.scales import ROW_ALIGNMENT
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.runtime.compile import KernelKey

WARP = 32
CHUNK_BYTES = 128
"""Of K in a stage: 64 bf16 numbers, or the 128 e4m3 ones that share a scale."""

SCALE_BLOCK = 128
"""Outputs that share a scale of b, and of an e4m3 result."""

BAND_ROWS = 2048
"""Rows that the CTAs work on together: they pass all columns before the next rows, so b is read from memory once for so
many rows. More would not stay in L2, and a round of CTAs would take more different rows and columns (perf/log/gemm.md).
"""

REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160)}
"""Of a thread of the producers' and of a consumer's warpgroup, by consumer warpgroups: in steps of 8, all 64 K of a
multiprocessor. One consumer warpgroup needs no other split than the even one."""


SHARED_BYTES = 226 * 1024
"""Of a multiprocessor, for two CTAs: each takes 1 KB more for the system."""

WITHIN_QUAD = 0x1C1F
"""Lanes that a shuffle reads: those of the own four neighbours."""

HALVES = range(wgmma.STEPS // 2), range(wgmma.STEPS // 2, wgmma.STEPS)
"""Of a chunk's product: the steps of each."""

QUARTER = 32
"""Of the outputs that share a scale: columns of work tiles with scales are multiples of it."""

SCALED_CHUNKS = 4
"""Chunks whose scales a quad of lanes loads at a time, each lane those of one."""

BOX_ROWS = 64
"""Of `a`: what a copy brings at a time."""

HALF_ROWS = BOX_ROWS // 2

SWIZZLED_ROWS = 8
"""Rows that the swizzle goes over: where in shared memory a box may begin."""

STAGED_ROWS, STAGED_COLUMNS = 16, 64
"""Of a bf16 result: what a warp copies out at a time, 128 bytes of each row."""


@dataclass(frozen=True)
class GemmKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    operands     "e4m3" (with scales) or "bf16", which has no squares
    output       "bf16", "fp32" or "e4m3" (with a scale for each row and 128 columns)
    rows         of a work tile: 64 * warpgroups
    columns      of a work tile: 32, 64, 96 or 128; 80 of bf16 operands, for an fp32 result; 128 for an e4m3 one
    warpgroups   that multiply: 1 to 3
    stages       of the ring
    depth        chunks whose products a warpgroup has under way together
    splits       of K: CTAs of a cluster, 1, 2 or 4; 2 for an e4m3 result, whose scales are those of whole rows. More
                 than one: not staged, and a cluster for each work tile
    unrolled     chunks of the mainloop's body, of e4m3 operands: 4 or 8. Where it goes round, products are waited for
    interleaved  the oldest product is promoted when half of the next one has been started, not all of it
    staged       a bf16 result goes out through shared memory, while the next work tile is multiplied
    squares      the sums of the squares of a staged result are stored as well, for each row and 128 columns
    halves       for calls of fewer rows than the work tile's 64 and more than half as many: it consists of their first
                 32 and of their last ones, so that there are none beyond. Not of an e4m3 result, which has scales there
    """

    kernel_name: ClassVar[str] = "linear.hopper.gemm"
    tuning: ClassVar[tuple[str, ...]] = ("stages", "depth", "unrolled", "interleaved", "staged")
    operands: str = "e4m3"
    output: str = "bf16"
    rows: int = 128
    columns: int = 128
    warpgroups: int = 2
    stages: int = 4
    depth: int = 1
    splits: int = 1
    unrolled: int = SCALED_CHUNKS
    interleaved: bool = False
    staged: bool = False
    squares: bool = False
    halves: bool = False

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * wgmma.WARPGROUP

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * CHUNK_BYTES

    @property
    def result_bytes(self) -> int:
        """Of a work tile, on its way out through shared memory."""
        return self.rows * self.columns * 2 if self.staged else 0

    @property
    def received_bytes(self) -> int:
        """Of one consumer warpgroup: a share from each split."""
        return wgmma.ROWS * self.columns * 4 if self.splits > 1 else 0

    @property
    def smem_bytes(self) -> int:
        bars = self.stages * barriers.BYTES_PER_STAGE + (self.warpgroups * 8 if self.splits > 1 else 0)
        received = self.warpgroups * self.received_bytes
        return round_up(bars, 1024) + self.stages * self.stage_bytes + self.result_bytes + received

    @property
    def ctas_per_multiprocessor(self) -> int:
        """Two where shared memory holds them; then a thread has at most half of the registers."""
        return 2 if 2 * self.smem_bytes <= SHARED_BYTES else 1

    @property
    def instructions(self) -> tuple[str, ...]:
        together = ("barrier.cluster",) if self.splits > 1 else ()
        return "wgmma", "tma.load", *together, "mbarrier", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def tensor(dtype: Any, divisibility: int, align: int, dense: bool = True) -> Any:
            stride = [cute.sym_int64(divisibility=divisibility) for _ in range(2)]
            last = 1 if dense else cute.sym_int64()
            shape = tuple(cute.sym_int() for _ in range(3))
            return make_fake_tensor(dtype, shape, stride=(*stride, last), assumed_align=align)

        is_fp8 = self.operands == "e4m3"
        operand, unit = (Float8E4M3FN, 16) if is_fp8 else (BFloat16, 8)
        a, b = (tensor(operand, unit, 16) for _ in range(2))
        a_scale, b_scale = (tensor(Float32, 1, 4, dense=False) if is_fp8 else None for _ in range(2))
        dtype, divisibility = {"bf16": (BFloat16, 8), "fp32": (Float32, 4), "e4m3": (Float8E4M3FN, 16)}[self.output]
        out = tensor(dtype, divisibility, 16)
        out_scale = None
        if self.output == "e4m3":
            out_scale = make_fake_tensor(
                Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1), assumed_align=4
            )
        call = Int32(1), Boolean(False), make_fake_stream(use_tvm_ffi_env_stream=True)
        if not self.squares:
            return GemmKernel(self), (a, a_scale, b, b_scale, out, out_scale, *call)
        shape = cute.sym_int(), cute.sym_int()
        squares = make_fake_tensor(Float32, shape, stride=(cute.sym_int64(), 1), assumed_align=4)
        return SquaresGemmKernel(self), (a, a_scale, b, b_scale, out, squares, *call)


class Squares(NamedTuple):
    """Sums of squares fp32 [rows, blocks of 128 columns]: address, stride in bytes, how many blocks have them."""

    address: Any
    row_bytes: Any
    blocks: Any

    @cute.jit
    def store(self, words: Any, first: Any, block: Any, lane: Any, rows: Any) -> None:
        """Store those of a thread's two rows, `first` and the one 8 below, of which it has so many pairs each."""
        if block < self.blocks:
            for half in range_constexpr(2):
                total = sum_of_quad(words[half])
                row = first + 8 * half
                target = self.address + Int64(row) * self.row_bytes + block * 4
                ptx.store_global_s32(target, total.bitcast(Int32), lane % 4 == 0 and row < rows)


class Scales(NamedTuple):
    """What a thread's products are multiplied with: for each of its rows, the row's scale times that of the columns. A
    quad of lanes has the same rows; of every four chunks, lane i of it has the factors of number i. Work tiles of 96
    columns lie in two blocks that share a scale of b, where each begins with another quarter of one.

    a, b      where all scales are
    factors   of four chunks, by rows, then blocks
    loaded    of the next four: the rows' scales, then those of the blocks
    sources   address of each of these, of chunk 0
    quarters  (with two blocks) of the work tile's columns that lie in the first one
    """

    a: Strided
    b: Strided
    factors: Any
    loaded: Any
    sources: Any
    quarters: Any

    @classmethod
    def of_rows(cls, a: Strided, b: Strided, count: int, blocks: int = 1) -> Scales:
        loaded, sources = (cute.make_rmem_tensor((count + blocks,), dtype) for dtype in (Float32, Int64))
        factors = cute.make_rmem_tensor((count * blocks,), Float32)
        return cls(a, b, factors, loaded, sources, cute.make_rmem_tensor((1,), Int32) if blocks > 1 else None)

    @property
    def blocks(self) -> int:
        return 1 if self.quarters is None else 2

    @property
    def rows(self) -> int:
        return int(cute.size(self.factors)) // self.blocks

    @cute.jit
    def start(self, work: Any, group: Any, rows: Any, blocks: Any, quarters: Any) -> None:
        """Begin a work tile: load the scales of its first four chunks."""
        for i in range_constexpr(len(rows)):
            self.sources[i] = self.a.at(rows[i], group)
        for i in range_constexpr(len(blocks)):
            self.sources[len(rows) + i] = self.b.at(group, blocks[i])
        if const_expr(self.blocks > 1):
            self.quarters[0] = quarters
        self.load(work, Int32(0))

    @cute.jit
    def load(self, work: Any, first: Any) -> None:
        # beyond the last chunk there is nothing to load, and nobody asks for it
        local = cutlass.min(first + cute.arch.lane_idx() % SCALED_CHUNKS, work.chunks - 1)
        chunk = Int64(work.first_chunk + local)
        for i in range_constexpr(self.rows + self.blocks):
            stride = self.b.strides[2] if const_expr(i >= self.rows) else self.a.strides[2]
            self.loaded[i] = ptx.load_global_f32_weak(self.sources[i] + chunk * stride)

    @cute.jit
    def advance(self, work: Any, first: Any) -> None:
        """Go on to the four chunks from `first` on, and load the scales of those behind them."""
        for i in range_constexpr(self.rows):
            for block in range_constexpr(self.blocks):
                self.factors[i * self.blocks + block] = self.loaded[i] * self.loaded[self.rows + block]
        following = first + SCALED_CHUNKS
        if const_expr(self.blocks > 1):
            # beyond the end, too: the assembler keeps nothing in uniform registers across a branch around so many loads
            self.load(work, following)
        else:
            if following < work.chunks:
                self.load(work, following)

    @cute.jit
    def of_chunk(self, number: Any) -> list[Any]:
        """The factors of the rows, of one of the four chunks: of each by quarters of a block."""
        found = [
            cute.arch.shuffle_sync(self.factors[i], number, mask_and_clamp=WITHIN_QUAD)
            for i in range(self.rows * self.blocks)
        ]
        factors: list[Any] = []
        for row in range_constexpr(self.rows):
            if const_expr(self.blocks == 1):
                factors.append([found[row]] * (SCALE_BLOCK // QUARTER))
            else:
                first, second = found[2 * row], found[2 * row + 1]
                factors.append([first if quarter < self.quarters[0] else second for quarter in range(3)])
        return factors


class TileGrid(NamedTuple):
    """The work tiles of a call, counted by rows within a band of tiles, then columns, then bands, then groups. Made on
    the host, whose divisors take a CTA a few instructions each, not a division.

    count       of all of them
    row_tiles   of a group
    last_row    that one of these may begin with
    group       how many a group has
    band        how many a band has that is whole
    last_band   rows of tiles of the last band
    """

    count: Any
    row_tiles: Any
    last_row: Any
    group: Any
    band: Any
    last_band: Any

    @classmethod
    def of(cls, out: Any, rows: int, columns: int) -> TileGrid:
        """Of results [rows, groups, columns]. On the host's side of the launch."""
        divisor, height = cute.fast_divmod_create_divisor_v2, BAND_ROWS // rows
        row_tiles, column_tiles = cute.ceil_div(length(out, 0), rows), cute.ceil_div(length(out, 2), columns)
        per_group = row_tiles * column_tiles
        return cls(
            length(out, 1) * per_group,
            row_tiles,
            cutlass.max(cute.ceil_div(length(out, 0), ROW_ALIGNMENT) * ROW_ALIGNMENT - rows, 0),
            divisor(per_group),
            divisor(height * column_tiles),
            divisor((row_tiles - 1) % height + 1),
        )

    @cute.jit
    def coords(self, number: Any, rows: cutlass.Constexpr) -> tuple[Any, Any, Any]:
        """Group, first row of so many and tile of columns."""
        height = const_expr(BAND_ROWS // rows)
        group, number = divmod(number, self.group)
        band, number = divmod(number, self.band)
        column, row = divmod(number, self.last_band)
        if (band + 1) * height <= self.row_tiles:
            column, row = number // height, number % height
        return group, cutlass.min((band * height + row) * rows, self.last_row), column


class TileScheduler(NamedTuple):
    """The work tiles of a CTA: of `tiles` numbers first, first + step ... below the end; and its chunks of K."""

    tiles: TileGrid
    first: Any
    step: Any
    first_chunk: Any
    chunks: Any


class GemmKernel:
    """Entry point: (a, a_scale, b, b_scale, out, memory of out's scales or None, number of CTAs, whether to launch as a
    dependent of the kernel before, stream). With splits the number of CTAs is that of the work tiles' splits."""

    def __init__(self, key: GemmKey) -> None:
        self.key = key
        self.is_fp8 = key.operands == "e4m3"
        self.operand: Any = Float8E4M3FN if self.is_fp8 else BFloat16
        self.chunk = CHUNK_BYTES * 8 // self.operand.width
        self.rows, self.columns, self.stages, self.depth = key.rows, key.columns, key.stages, key.depth
        self.warpgroups, self.splits = key.warpgroups, key.splits
        self.name = (
            f"gemm_{key.operands}_{key.output}_{key.rows}x{key.columns}_w{key.warpgroups}s{key.stages}d{key.depth}k{key.splits}"
            + "_squares" * key.squares
            + "_halves" * key.halves
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor | None,
        b: cute.Tensor,
        b_scale: cute.Tensor | None,
        out: cute.Tensor,
        out_scale: cute.Tensor | None,
        ctas: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        result_scale = (Int64(0), Int64(0), Int32(0))
        if const_expr(self.key.output == "e4m3"):
            result_scale = (address(out_scale), stride_bytes(out_scale, 0), length(out_scale, 1))
        self.launch((a, a_scale, b, b_scale, out), result_scale, None, ctas, use_pdl, stream)

    @cute.jit
    def launch(
        self, tensors: Any, result_scale: Any, squares: Any, ctas: Int32, use_pdl: Boolean, stream: cuda.CUstream
    ) -> None:
        a, a_scale, b, b_scale, out = tensors
        nothing = Strided(Int64(0), (Int64(0), Int64(0), Int64(0)))
        scales = [Strided.of(s) if const_expr(self.is_fp8) else nothing for s in (a_scale, b_scale)]
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            *self.tma_atoms(a, b),
            *(self.result_atom(out) if const_expr(self.key.staged) else (None, None, None)),
            *(wgmma.make_mma(self.operand, self.warpgroups, self.columns) for _ in range(2)),
            *scales,
            Strided.of(out),
            *result_scale,
            length(out, 0),
            length(out, 2),
            TileGrid.of(out, self.rows, self.columns),
            cute.ceil_div(length(a, 2), self.chunk),
            squares,
        )
        kernel.launch(
            grid=[ctas, 1, 1],
            block=[self.key.threads, 1, 1],
            # a cluster of one CTA takes longer to start than none
            cluster=[self.splits, 1, 1] if const_expr(self.splits > 1) else None,
            min_blocks_per_mp=self.key.ctas_per_multiprocessor,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=use_pdl,
        )

    def tma_atoms(self, a: Any, b: Any) -> tuple[Any, ...]:
        """Of each operand the copy and what it reads, then of each where it writes."""
        a_tiles = wgmma.swizzled_tiles(self.operand, self.rows, self.stages)
        b_tiles = wgmma.swizzled_tiles(self.operand, self.columns, self.stages)
        # both as [rows, K, groups]
        b_view = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
        load = cpasync.CopyBulkTensorTileG2SOp()
        box = wgmma.swizzled_tiles(self.operand, BOX_ROWS, 1)
        a_copy, a_source = cpasync.make_tiled_tma_atom(load, self.rows_of(a), box, (BOX_ROWS, self.chunk))
        b_copy, b_source = cpasync.make_tiled_tma_atom(load, b_view, b_tiles, (self.columns, self.chunk))
        return a_copy, a_source, b_copy, b_source, a_tiles, b_tiles

    def rows_of(self, a: Any) -> Any:
        """`a` as [rows, K, groups]. Halves of a work tile that lie across each other are what a copy finds at a stride
        that is no multiple of the rows'."""
        if not self.key.halves:
            return cute.make_tensor(a.iterator, cute.select(a.layout, mode=[0, 2, 1]))
        row, group, _ = a.stride
        shape = (HALF_ROWS, 2), length(a, 2), length(a, 1)
        apart = row * cutlass.max(length(a, 0) - HALF_ROWS, 1)
        return cute.make_tensor(a.iterator, cute.make_layout(shape, stride=((row, apart), 1, group)))

    def result_atom(self, out: Any) -> tuple[Any, ...]:
        """The copy of a warp's 16 rows of 64 columns, where it writes, and what it reads."""
        boxes = self.rows // STAGED_ROWS * (self.columns // STAGED_COLUMNS)
        tiles = wgmma.swizzled_tiles(BFloat16, STAGED_ROWS, boxes)
        # as [rows, columns, groups]
        view = cute.make_tensor(out.iterator, cute.select(out.layout, mode=[0, 2, 1]))
        copy, target = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), view, tiles, (STAGED_ROWS, STAGED_COLUMNS)
        )
        return copy, target, tiles

    def partition(self, copy: Any, source: Any, tile: Any, rows: int) -> Any:
        """What a bulk copy writes, by tile in shared memory, and reads, by tile, chunk and group."""
        grid = cute.local_tile(source, (rows, self.chunk), (None, None, None))
        return cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(grid, 0, 2)
        )

    # ---- producer

    def row_copies(self, copy: Any, source: Any, a: Any, rows: Any) -> tuple[Any, ...]:
        """The copy of a box of `a`, what it reads, where to, and the first row of a work tile's last box."""
        whole = cute.ceil_div(rows, SWIZZLED_ROWS) * SWIZZLED_ROWS
        return copy, source, a, cutlass.max(cutlass.min(whole, self.rows) - BOX_ROWS, 0)

    @cute.jit
    def load_rows(self, work: Any, ring: Any, tile: Any, a: Any) -> None:
        """Fill the ring with `a` of all work tiles' chunks. By one warp. tile: place of the first one."""
        copy, source, memory, last_box = a
        stage, phase = barriers.start()
        cute.arch.griddepcontrol_wait()
        for number in cutlass.range(work.first, work.tiles.count, work.step, unroll=1):
            group, first_row, _ = tile
            for chunk in cutlass.range(work.chunks, unroll=1):
                ring.wait_empty(stage, phase)
                full = ring.full(stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.rows * CHUNK_BYTES)
                for number_of_box in range_constexpr(self.rows // BOX_ROWS):
                    row = cutlass.min(Int32(number_of_box * BOX_ROWS), last_box)
                    place = cute.assume((stage * self.rows + row) * self.chunk, SWIZZLED_ROWS * self.chunk)
                    box = cute.make_tensor(
                        memory.iterator + place, wgmma.swizzled_tiles(self.operand, BOX_ROWS, 1).outer
                    )
                    rows = source
                    if const_expr(not self.key.halves):
                        rows = cute.domain_offset((first_row + row, 0, 0), source)
                    target, found = self.partition(copy, rows, box, BOX_ROWS)
                    cute.copy(copy, found[None, 0, work.first_chunk + chunk, group], target[None, 0], tma_bar_ptr=full)
                stage, phase = barriers.advance(stage, phase, self.stages)
            tile = work.tiles.coords(number + work.step, self.rows)

    @cute.jit
    def load_weight(self, work: Any, ring: Any, tile: Any, b: Any) -> None:
        """The same of `b`: by another warp, which does not wait for the kernel ahead."""
        copy, target, source = b
        stage, phase = barriers.start()
        for number in cutlass.range(work.first, work.tiles.count, work.step, unroll=1):
            group, _, column_tile = tile
            for chunk in cutlass.range(work.chunks, unroll=1):
                ring.wait_empty(stage, phase)
                full = ring.full(stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.columns * CHUNK_BYTES)
                cute.copy(
                    copy,
                    source[None, column_tile, work.first_chunk + chunk, group],
                    target[None, stage],
                    tma_bar_ptr=full,
                )
                stage, phase = barriers.advance(stage, phase, self.stages)
            tile = work.tiles.coords(number + work.step, self.rows)

    # ---- mainloop

    @cute.jit
    def own_row(self, thread: Any, rows: Any) -> Any:
        """A consumer thread's first row, counted from that of the work tile."""
        row = thread // WARP * 16 + thread % WARP // 4
        if const_expr(self.key.halves):
            row += rows - BOX_ROWS if row >= HALF_ROWS else 0
        return row

    def start_scales(self, scales: Scales, work: Any, tile: Any, own_row: Any, rows: Any, columns: Any) -> None:
        """Load a consumer thread's first scales of a work tile. Rows and columns beyond the last have none of their
        own; their results are not stored."""
        group, first_row, column_tile = tile
        of_rows = [cutlass.min(first_row + own_row + 8 * half, rows - 1) for half in range(2)]
        column, last = column_tile * self.columns, columns - 1
        blocks = [cutlass.min(column, last) // SCALE_BLOCK]
        quarters = None
        if scales.blocks > 1:
            blocks.append(cutlass.min(column + self.columns - 1, last) // SCALE_BLOCK)
            quarters = (SCALE_BLOCK - column % SCALE_BLOCK) // QUARTER
        scales.start(work, group, of_rows, blocks, quarters)

    @cute.jit
    def consume(
        self, mma: Any, ring: Any, operands: Any, scales: Scales, totals: Any, place: Any, work: Any
    ) -> tuple[Any, Any]:
        """totals = this thread's results of a work tile. By a consumer warpgroup. Returns its next place in the ring.

        operands   the memory of `a` and of `b`, by stages, and whose rows of `a`: the number of the warpgroup
        """
        products = [wgmma.accumulators(mma[0], self.rows, self.columns) for _ in range(self.depth)]
        stage, phase = place
        totals.fill(0.0)
        if work.chunks > 0:
            ring.wait_full(stage, phase)
        whole = Int32(0)
        for size in range_constexpr(self.key.unrolled, 0, -SCALED_CHUNKS):
            begin, whole = whole, work.chunks // size * size
            for first in cutlass.range(begin, whole, size, unroll=1):
                chunks = [(first + number, Int32(number % SCALED_CHUNKS)) for number in range(size)]
                stage, phase = self.add_chunks(
                    mma, ring, operands, scales, totals, products, (stage, phase), chunks, work
                )
        if whole < work.chunks:
            scales.advance(work, whole)
            for chunk in cutlass.range(whole, work.chunks, 1, unroll=1):
                chunks = [(chunk, chunk - whole)]
                stage, phase = self.add_chunks(
                    mma, ring, operands, scales, totals, products[:1], (stage, phase), chunks, work
                )
        return stage, phase

    @cute.jit
    def consume_bf16(self, mma: Any, ring: Any, operands: Any, totals: Any, place: Any, chunks: Any) -> tuple[Any, Any]:
        """The same of bf16 operands: the tensor cores add up all chunks."""
        lane = cute.arch.thread_idx()[0] % WARP
        a, b, consumer = operands
        mma, mma_more = mma
        sums = wgmma.accumulators(mma, self.rows, self.columns)
        sums.fill(0.0)
        stage, phase = place
        oldest = stage
        most = const_expr(self.depth - 1)
        for number in cutlass.range(chunks, unroll=1):
            ring.wait_full(stage, phase)
            wgmma.multiply(mma_more, mma_more, sums, consumer, a, b, stage)
            # a chunk stays under way where the loop goes round, and the tensor cores have no pause
            wgmma.wait(most)
            if number >= most:
                self.release(ring, oldest, lane)
                oldest, _ = barriers.advance(oldest, phase, self.stages)
            stage, phase = barriers.advance(stage, phase, self.stages)
        if const_expr(most > 0):
            wgmma.wait(0)
            for _ in cutlass.range(cutlass.min(chunks, most), unroll=1):
                self.release(ring, oldest, lane)
                oldest, _ = barriers.advance(oldest, phase, self.stages)
        for i in range_constexpr(self.columns // 2):
            totals[i] = sums[i]
        return stage, phase

    @cute.jit
    def add_chunks(
        self,
        mma: Any,
        ring: Any,
        operands: Any,
        scales: Scales,
        totals: Any,
        products: Any,
        place: Any,
        chunks: Any,
        work: Any,
    ) -> tuple[Any, Any]:
        """Add chunks to the totals: as many as there are `products` are under way together. Their first one has been
        waited for, and in the end so has the one behind them.

        chunks   of each its number, and which of four it is
        """
        lane = cute.arch.thread_idx()[0] % WARP
        a, b, consumer = operands
        stage, phase = place
        depth = const_expr(len(products))
        under_way: list[Any] = []
        for i in range_constexpr(len(chunks)):
            chunk, number = chunks[i]
            if const_expr(len(under_way) > 0):
                ring.wait_full(stage, phase)
            sums = products[i % depth]
            is_halved = const_expr(self.key.interleaved and 0 < len(under_way) == depth - 1)
            if const_expr(is_halved):
                wgmma.multiply(*mma, sums, consumer, a, b, stage, steps=HALVES[0])
                self.promote_oldest(ring, lane, totals, under_way, 1)
                wgmma.multiply(*mma, sums, consumer, a, b, stage, steps=HALVES[1])
            else:
                wgmma.multiply(*mma, sums, consumer, a, b, stage)
            if const_expr(i % SCALED_CHUNKS == 0 and len(chunks) >= SCALED_CHUNKS):
                # the scales are waited for while there is a product under way
                scales.advance(work, chunk)
            under_way.append((stage, sums, scales.of_chunk(number), 2 if is_halved else 1))
            stage, phase = barriers.advance(stage, phase, self.stages)
            is_last = const_expr(i == len(chunks) - 1)
            for _ in range_constexpr(len(under_way) if is_last else int(len(under_way) == depth)):
                # the next chunk is waited for while there is a product under way
                is_alone = const_expr(len(under_way) == 1)
                if const_expr(is_alone and not is_last) or (const_expr(is_alone) and chunk + 1 < work.chunks):
                    ring.wait_full(stage, phase)
                self.promote_oldest(ring, lane, totals, under_way, 0)
        return stage, phase

    def promote_oldest(self, ring: Any, lane: Any, totals: Any, under_way: list[Any], started: int) -> None:
        """Wait for the oldest of the products under way, and promote it. Each has a stage, its sums, factors and how
        many groups it was started in. started: groups of a later one."""
        stage, sums, factors, _ = under_way.pop(0)
        wgmma.wait(started + sum(groups for *_, groups in under_way))
        self.release(ring, stage, lane)
        self.promote(totals, sums, factors)

    @cute.jit
    def release(self, ring: Any, stage: Any, lane: Any) -> None:
        # one lane arrives for all: products that it has waited for are those of its warp
        if lane == 0:
            cute.arch.mbarrier_arrive(ring.empty(stage))

    @cute.jit
    def promote(self, totals: cute.Tensor, products: cute.Tensor, factors: Any) -> None:
        """Add a chunk's scaled products to the fp32 totals."""
        for i in range_constexpr(self.columns // 2):
            totals[i] = totals[i] + factors[i // 2 % 2][i * 2 // QUARTER] * products[i]

    # ---- epilogue

    @cute.jit
    def store(self, totals: Any, lane: Any, row: Any, tile: Any, result: Any, rows: Any, columns: Any) -> None:
        """Store the 64 x columns totals of a warpgroup. row: the thread's first."""
        out = result[0]
        group, _, column_tile = tile
        column = column_tile * self.columns
        if const_expr(self.key.output == "bf16"):
            target = out.at(row, group) + Int64(column) * 2
            wgmma.store_bf16(totals, lane, target, out.strides[0], rows - row, columns - column, self.columns)
        elif const_expr(self.key.output == "fp32"):
            target = out.at(row, group) + Int64(column + lane % 4 * 2) * 4
            for i in range_constexpr(0, self.columns // 2, 2):
                at, half = i // 4 * 8, i // 2 % 2
                is_inside = 8 * half < rows - row and column + at + lane % 4 * 2 < columns
                low, high = (totals[i + j].bitcast(Int32) for j in range(2))
                ptx.store_global_64(target + out.strides[0] * (8 * half) + at * 4, low, high, is_inside)
        else:
            for half in range_constexpr(2):
                own = row + 8 * half
                pairs = [ptx.bf16x2(totals[i], totals[i + 1]) for i in range(2 * half, SCALE_BLOCK // 2, 4)]
                self.store_codes(pairs, lane, own, tile, result, rows, columns)

    @cute.jit
    def store_codes(self, pairs: Any, lane: Any, own: Any, tile: Any, result: Any, rows: Any, columns: Any) -> None:
        """Quantize and store a quad's row `own` of 128 columns; a lane has a pair of every 8."""
        out, out_scale, scale_row, padded_rows = result
        group, _, column_tile = tile
        column = column_tile * self.columns
        halves = convert.absmax_bf16x2(*pairs)
        largest = ptx.max_f32(convert.bf16_low(halves), convert.bf16_high(halves))
        byte = convert.ue8m0_from_absmax(over_quad(largest, ptx.max_f32), E4M3_MAX, OUTPUT_FLOOR)
        factor = convert.ue8m0_inverse(byte)
        for part in range_constexpr(2):
            first = [8 * part + 2 * i for i in range(4)]
            words = [convert.e4m3_from_bf16x4(pairs[i], pairs[i + 1], factor) for i in first]
            # of 16 neighbouring columns, a word has two of the first 8 and two of the others
            words = exchange_in_quad(lane, words)
            codes = [ptx.permute_bytes(words[i], words[i + 1], order) for order in (0x5410, 0x7632) for i in (0, 2)]
            target = out.at(own, group) + Int64(column + part * 64 + lane % 4 * 16)
            ptx.store_global_128(target, codes, own < rows and column < columns)
        # the rows between the last one and the padded length get zeros
        scale = byte << 23 if own < rows else Int32(0)
        scale_block = group * (columns // SCALE_BLOCK) + column_tile
        target = out_scale + Int64(scale_block) * scale_row + Int64(own) * 4
        ptx.store_global_s32(target, scale, lane % 4 == 0 and own < padded_rows and column < columns)

    @cute.jit
    def combine(self, totals: Any, rank: Any, warp: Any, lane: Any, received: Any, full: Any) -> None:
        """Send each CTA of the cluster its share of the totals, and put the sums of this one's at the front of
        `totals`. By one warpgroup, with memory and a barrier of its own."""
        words_per_share = const_expr(self.columns // 2 // self.splits)
        share_bytes = const_expr(words_per_share * 4 * wgmma.WARPGROUP)
        row_bytes = const_expr(16 * wgmma.WARPGROUP)
        place = received + (warp % 4 * WARP + lane) * 16
        if warp % 4 == 0 and lane == 0:
            ptx.expect_bytes(full, (self.splits - 1) * share_bytes)
        for share in range_constexpr(self.splits):
            words = [totals[i].bitcast(Int32) for i in self.share_of(share)]
            own = place + rank * share_bytes
            if rank == share:
                for i in range_constexpr(0, words_per_share, 4):
                    ptx.store_shared_128_in_order(own + i // 4 * row_bytes, words[i : i + 4])
            else:
                target, bar = ptx.map_shared(own, share), ptx.map_shared(full, share)
                for i in range_constexpr(0, words_per_share, 4):
                    ptx.store_remote_128(target + i // 4 * row_bytes, words[i : i + 4], bar)
        ptx.wait_mbarrier_cluster(full, 0)
        for i in range_constexpr(0, words_per_share, 4):
            sums: Any = None
            for split in range_constexpr(self.splits):
                found = ptx.load_shared_128_in_order(place + split * share_bytes + i // 4 * row_bytes)
                values = [word.bitcast(Float32) for word in found]
                sums = values if const_expr(split == 0) else [a + b for a, b in zip(sums, values, strict=True)]
            for j in range_constexpr(4):
                totals[i + j] = sums[j]

    def share_of(self, rank: int) -> list[int]:
        """Which of a thread's totals CTA `rank` of the cluster adds up: pairs of every 8 columns of one of its rows."""
        blocks = self.columns // 8 // (self.splits // 2)
        first = rank // 2 * blocks
        return [4 * block + rank % 2 * 2 + i for block in range(first, first + blocks) for i in range(2)]

    @cute.jit
    def store_share(
        self, sums: Any, lane: Any, rank: Any, own: Any, tile: Any, result: Any, rows: Any, columns: Any
    ) -> None:
        """Store a thread's sums, pairs of every 8 columns of its row `own`."""
        out = result[0]
        group, _, column_tile = tile
        across = const_expr(self.columns // (self.splits // 2))
        column = column_tile * self.columns + rank // 2 * across
        pairs = [(sums[2 * i], sums[2 * i + 1]) for i in range(across // 8)]
        if const_expr(self.key.output == "fp32"):
            for i in range_constexpr(across // 8):
                at = column + 8 * i + lane % 4 * 2
                low, high = (value.bitcast(Int32) for value in pairs[i])
                ptx.store_global_64(out.at(own, group) + Int64(at) * 4, low, high, own < rows and at < columns)
        else:
            words = [ptx.bf16x2(*pair) for pair in pairs]
            if const_expr(self.key.output == "e4m3"):
                self.store_codes(words, lane, own, tile, result, rows, columns)
            else:
                for i in range_constexpr(0, across // 8, 4):
                    # a lane gets all of one of four blocks of 8 columns
                    at = column + 8 * i + lane % 4 * 8
                    found = exchange_in_quad(lane, words[i : i + 4])
                    ptx.store_global_128(out.at(own, group) + Int64(at) * 2, found, own < rows and at < columns)

    @cute.jit
    def store_staged(
        self, totals: Any, warp: Any, lane: Any, tile: Any, staging: Any, squares: Any, rows_end: Any
    ) -> None:
        """Write a warp's rows to shared memory and have them copied out while the next work tile is multiplied."""
        copy, results, out = staging
        memory = results.iterator.toint()
        group, first_row, column_tile = tile
        across = const_expr(self.columns // STAGED_COLUMNS)
        # what it wrote of the work tile before has been read: the lane that had it copied waits
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        of_rows: tuple[list[Any], list[Any]] = ([], [])
        for half in range_constexpr(across):
            box = warp * across + half
            row = lane % 8 + lane // 8 % 2 * 8
            for pair in range_constexpr(4):
                first = half * 32 + pair * 8
                words = [ptx.bf16x2(totals[first + i], totals[first + i + 1]) for i in range(0, 8, 2)]
                piece = (pair * 2 + lane // 16) ^ (lane % 8)
                ptx.store_matrices(memory + box * 2048 + row * 128 + piece * 16, words)
                for i in range_constexpr(4):
                    of_rows[i % 2].append(words[i])
        if const_expr(self.key.squares):
            squares.store(of_rows, first_row + warp * STAGED_ROWS + lane // 4, column_tile, lane, rows_end)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        boxes = cute.local_tile(
            cute.domain_offset((first_row, 0, 0), out), (STAGED_ROWS, STAGED_COLUMNS), (None, None, None)
        )
        written, read = cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(results, 0, 2), cute.group_modes(boxes, 0, 2)
        )
        with cute.arch.elect_one():
            for half in range_constexpr(across):
                box = written[None, warp * across + half]
                cute.copy(copy, box, read[None, warp, column_tile * across + half, group])
            cute.arch.cp_async_bulk_commit_group()

    # ---- kernel

    @cute.kernel
    def kernel(
        self,
        a_copy: cute.CopyAtom,
        a_source: cute.Tensor,
        b_copy: cute.CopyAtom,
        b_source: cute.Tensor,
        a_tiles: cute.ComposedLayout,
        b_tiles: cute.ComposedLayout,
        out_copy: Any,
        out_target: Any,
        out_tiles: Any,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        a_scale: Strided,
        b_scale: Strided,
        out: Strided,
        out_scale: Int64,
        scale_row: Int64,
        padded_rows: Int32,
        rows: Int32,
        columns: Int32,
        tiles: TileGrid,
        chunks: Int32,
        squares: Any,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        lane = thread % WARP
        rank = Int32(0)
        if const_expr(self.splits > 1):
            rank = cute.arch.make_warp_uniform(cta % self.splits)

        smem = SmemAllocator()
        ring = barriers.Ring.allocate(smem, self.stages)
        bars: Any = None
        if const_expr(self.splits > 1):
            bars = smem.allocate_array(Int64, self.warpgroups)
        a = smem.allocate_tensor(self.operand, a_tiles.outer, byte_alignment=1024, swizzle=a_tiles.inner)
        b = smem.allocate_tensor(self.operand, b_tiles.outer, byte_alignment=1024, swizzle=b_tiles.inner)
        staging = None
        if const_expr(self.key.staged):
            results = smem.allocate_tensor(BFloat16, out_tiles.outer, byte_alignment=1024, swizzle=out_tiles.inner)
            staging = out_copy, results, out_target
        received = Int32(0)
        if const_expr(self.splits > 1):
            words = cute.make_layout(self.warpgroups * self.key.received_bytes // 4)
            received = smem.allocate_tensor(Int32, words, byte_alignment=128).iterator.toint()
        if warp == self.warpgroups * 4:
            for copy in (a_copy, b_copy):
                cpasync.prefetch_descriptor(copy)
        # found while the barriers are made: it is on the way to the first copy
        first_chunk = rank * chunks // self.splits
        end_chunk = (rank + 1) * chunks // self.splits
        work = TileScheduler(tiles, cta // self.splits, ctas // self.splits, first_chunk, end_chunk - first_chunk)
        tile = tiles.coords(work.first, self.rows)
        if thread == 0:
            # one arrival announces the bytes of either operand; every warp that uses a stage releases it
            ring.initialize(2, self.warpgroups * 4)
            if const_expr(self.splits > 1):
                for group in range_constexpr(self.warpgroups):
                    cute.arch.mbarrier_init(bars + group, 1)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if const_expr(self.splits > 1):
            # nobody sends to a CTA whose barriers are not there yet: waited for behind the mainloop
            cute.arch.cluster_arrive_relaxed()
        cute.arch.griddepcontrol_launch_dependents()

        wgmma.accumulate(mma_more)
        if const_expr(self.key.unrolled > SCALED_CHUNKS and not self.key.staged):
            # what the others find when they run, and are no slower for
            wgmma.overwrite(mma)
        if warp >= self.warpgroups * 4:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_decrease(REGISTERS[self.warpgroups][0])
            if warp == self.warpgroups * 4:
                self.load_weight(work, ring, tile, (b_copy, *self.partition(b_copy, b_source, b, self.columns)))
            elif warp == self.warpgroups * 4 + 1:
                self.load_rows(work, ring, tile, self.row_copies(a_copy, a_source, a, rows))
            if const_expr(self.splits > 1):
                cute.arch.cluster_wait()
        else:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_increase(REGISTERS[self.warpgroups][1])
            consumer = wgmma.number_of_warpgroup(thread) if const_expr(self.warpgroups > 1) else Int32(0)
            operands = a, b, consumer
            totals = cute.make_rmem_tensor((self.columns // 2,), Float32)
            place = barriers.start()
            scales: Any = None
            own_row = self.own_row(thread, rows)
            if const_expr(self.is_fp8):
                scales = Scales.of_rows(a_scale, b_scale, 2, 2 if SCALE_BLOCK % self.columns else 1)
                cute.arch.griddepcontrol_wait()
                if work.chunks > 0 and work.first < work.tiles.count:
                    self.start_scales(scales, work, tile, own_row, rows, columns)
            for number in cutlass.range(work.first, work.tiles.count, work.step, unroll=1):
                following = work.tiles.coords(number + work.step, self.rows)
                if const_expr(self.is_fp8):
                    place = self.consume((mma, mma_more), ring, operands, scales, totals, place, work)
                    if work.chunks > 0 and number + work.step < work.tiles.count:
                        self.start_scales(scales, work, following, own_row, rows, columns)
                else:
                    place = self.consume_bf16((mma, mma_more), ring, operands, totals, place, work.chunks)
                result = out, out_scale, scale_row, padded_rows
                row = tile[1] + own_row
                if const_expr(self.key.staged):
                    self.store_staged(totals, warp, lane, tile, staging, squares, rows)
                elif const_expr(self.splits > 1):
                    # a CTA ends when all have sent to it
                    cute.arch.cluster_wait()
                    own_received = received + consumer * self.key.received_bytes
                    self.combine(totals, rank, warp, lane, own_received, bars.toint() + consumer * 8)
                    self.store_share(totals, lane, rank, row + rank % 2 * 8, tile, result, rows, columns)
                else:
                    self.store(totals, lane, row, tile, result, rows, columns)
                tile = following
            if const_expr(self.key.staged):
                cute.arch.cp_async_bulk_wait_group(0, read=True)


class SquaresGemmKernel:
    """Entry point with `squares`: (a, a_scale, b, b_scale, out, sums of squares, number of CTAs, whether to launch as a
    dependent of the kernel before, stream). Columns of out beyond those that have sums get none."""

    def __init__(self, key: GemmKey) -> None:
        self.gemm = GemmKernel(key)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        squares: cute.Tensor,
        ctas: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        sums = Squares(address(squares), stride_bytes(squares, 0), length(squares, 1))
        no_scale = Int64(0), Int64(0), Int32(0)
        self.gemm.launch((a, a_scale, b, b_scale, out), no_scale, sums, ctas, use_pdl, stream)
