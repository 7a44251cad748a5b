"""Kernel of deepseek_v4_fp8_einsum on Hopper: products on tensor cores, summed in fp32 every 128 columns.

A block walks over tiles of [rows, columns] results, neighbouring columns first, so that blocks that run together read
the same rows of `a`. Per 128-column chunk, one warp brings the tile's rows of `a` and of `b` by bulk tensor copies, and
another their scales, which may lie anywhere, by asynchronous ones, into a ring of stages. A warpgroup for every 64 rows
multiplies a chunk, which the tensor cores sum with about 14 bits, scales the products and adds them to its fp32 totals.
Every key adds the chunks of a row in the same order, so a row's bits do not depend on what else is in the batch.

A stage in shared memory:

    a        [rows, 128] e4m3         swizzled as the copy writes and the tensor cores read it
    b        [columns, 128] e4m3      likewise
    scales   fp32 of the rows, then that of the columns
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import length
from cute_kernels.formats import round_up
from cute_kernels.output.einsum_tiles import CHUNK, WARP, Strided, Tiles, fake_arguments
from cute_kernels.runtime.compile import KernelKey

SCALE_ROOM = 4
"""fp32 numbers after the scales of a stage's rows: one for its columns, and the next stage is 16-byte aligned again."""

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
"""Per thread of a block of three warpgroups: all 64 K registers of a multiprocessor, in steps of 8."""


@dataclass(frozen=True)
class EinsumKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    rows      of a tile: 64 or 128
    columns   of a tile: 32, 64 or 128, so that they share a scale
    stages    of the ring
    depth     chunks whose products a warpgroup has under way together; it divides the number of chunks
    """

    kernel_name: ClassVar[str] = "output.hopper.einsum"
    rows: int = 128
    columns: int = 128
    stages: int = 6
    depth: int = 1

    @property
    def smem_bytes(self) -> int:
        before = self.stages * (barriers.BYTES_PER_STAGE + (self.rows + SCALE_ROOM) * 4)
        return round_up(before, 1024) + self.stages * (self.rows + self.columns) * CHUNK

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "tma.load", "cp.async", "mbarrier", "st.global.128", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        *arguments, stream = fake_arguments()
        return EinsumKernel(self), (*arguments, Boolean(False), stream)


class EinsumKernel:
    """Entry point: (a, a_scale, b, b_scale, out, number of blocks, whether to launch as a dependent of the kernel
    before, stream)."""

    def __init__(self, key: EinsumKey) -> None:
        self.rows, self.columns, self.stages, self.depth = key.rows, key.columns, key.stages, key.depth
        self.warpgroups = key.rows // wgmma.ROWS
        self.scales, self.column_scales = key.rows + SCALE_ROOM, 1
        self.name = f"deepseek_v4_fp8_einsum_{key.rows}x{key.columns}s{key.stages}d{key.depth}"

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        blocks: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            *self.operand_copies(a, b),
            *(wgmma.make_mma(Float8E4M3FN, self.warpgroups, self.columns) for _ in range(2)),
            Strided.of(a_scale),
            Strided.of(b_scale),
            Strided.of(out),
            length(out, 0),
            length(out, 1),
            length(out, 2),
            length(a, 2) // CHUNK,
        )
        threads = (self.warpgroups + 1) * wgmma.WARPGROUP
        kernel.launch(grid=[blocks, 1, 1], block=[threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=use_pdl)

    def operand_copies(self, a: Any, b: Any) -> tuple[Any, ...]:
        """Of each operand the copy and what it reads, then of each where it writes."""
        a_tiles = wgmma.swizzled_tiles(Float8E4M3FN, self.rows, self.stages)
        b_tiles = wgmma.swizzled_tiles(Float8E4M3FN, self.columns, self.stages)
        # both as [rows, K, groups]
        a_view = cute.make_tensor(a.iterator, cute.select(a.layout, mode=[0, 2, 1]))
        b_view = cute.make_tensor(b.iterator, cute.select(b.layout, mode=[1, 2, 0]))
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_copy, a_source = cpasync.make_tiled_tma_atom(load, a_view, a_tiles, (self.rows, CHUNK))
        b_copy, b_source = cpasync.make_tiled_tma_atom(load, b_view, b_tiles, (self.columns, CHUNK))
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
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        a_scale: Strided,
        b_scale: Strided,
        out: Strided,
        rows: Int32,
        groups: Int32,
        columns: Int32,
        chunks: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        ring = barriers.Ring.allocate(smem, self.stages)
        scales = smem.allocate_tensor(Float32, cute.make_layout(self.scales * self.stages), byte_alignment=16)
        a = smem.allocate_tensor(Float8E4M3FN, a_tiles.outer, byte_alignment=1024, swizzle=a_tiles.inner)
        b = smem.allocate_tensor(Float8E4M3FN, b_tiles.outer, byte_alignment=1024, swizzle=b_tiles.inner)
        scale = scales.iterator.toint()
        if warp == self.warpgroups * 4:
            for copy in (a_copy, b_copy):
                cpasync.prefetch_descriptor(copy)
        if thread == 0:
            # one arrival announces the bytes, one per lane its scales; every warp that uses a stage lets go of it
            ring.initialize(1 + WARP, self.warpgroups * 4)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        of_rows = cute.ceil_div(rows, self.rows)
        of_columns = cute.ceil_div(columns, self.columns)
        tiles = Tiles(block, groups * of_rows * of_columns, blocks, of_rows, of_columns)
        wgmma.accumulate(mma_more)
        if warp >= self.warpgroups * 4:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == self.warpgroups * 4:
                copies = (a_copy, a_source, a), (b_copy, b_source, b)
                self.copy_operands(tiles, ring, copies, chunks)
            if warp == self.warpgroups * 4 + 1:
                self.copy_scales(tiles, ring, scale, a_scale, b_scale, rows, columns, chunks)
        else:
            if const_expr(self.warpgroups > 1):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self.consume(thread, tiles, ring, mma, mma_more, a, b, scale, out, rows, columns, chunks)

    @cute.jit
    def copy_operands(self, tiles: Any, ring: Any, copies: Any, chunks: Any) -> None:
        """Fill the ring with the chunks of all tiles. By one warp."""
        (a_copy, a_source, a), (b_copy, b_source, b) = copies
        a_to, a_from = self.partition(a_copy, a_source, a, self.rows)
        b_to, b_from = self.partition(b_copy, b_source, b, self.columns)
        stage, phase = barriers.start()
        for number in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            group, row_tile, column_tile = tiles.place(number)
            for chunk in cutlass.range(chunks, unroll=1):
                ring.wait_empty(stage, phase)
                full = ring.full(stage)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, (self.rows + self.columns) * CHUNK)
                cute.copy(a_copy, a_from[None, row_tile, chunk, group], a_to[None, stage], tma_bar_ptr=full)
                cute.copy(b_copy, b_from[None, column_tile, chunk, group], b_to[None, stage], tma_bar_ptr=full)
                stage, phase = barriers.advance(stage, phase, self.stages)

    @cute.jit
    def copy_scales(
        self, tiles: Any, ring: Any, scale: Any, a_scale: Any, b_scale: Any, rows: Any, columns: Any, chunks: Any
    ) -> None:
        """Fill the ring with the scales of the chunks of all tiles. By one warp."""
        lane = cute.arch.lane_idx()
        stage, phase = barriers.start()
        for number in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            group, row_tile, column_tile = tiles.place(number)
            # rows and columns beyond the last have no scales of their own; their results are not stored
            first = row_tile * self.rows + lane
            own = [cutlass.min(first + i * WARP, rows - 1) for i in range(self.rows // WARP)]
            sources = [a_scale.at(row, group) for row in own]
            block = column_tile * self.columns // CHUNK
            # of columns beyond the last there is no block either
            blocks = [block, *(cutlass.min(block + i, (columns - 1) // CHUNK) for i in range(1, self.column_scales))]
            block_sources = [b_scale.at(group, number) for number in blocks]
            for chunk in cutlass.range(chunks, unroll=1):
                ring.wait_empty(stage, phase)
                target = scale + (stage * self.scales + lane) * 4
                for i in range_constexpr(self.rows // WARP):
                    ptx.copy_async_32(target + i * WARP * 4, sources[i] + Int64(chunk) * a_scale.strides[2])
                for i in range_constexpr(self.column_scales):
                    if lane == i:
                        ptx.copy_async_32(target + self.rows * 4, block_sources[i] + Int64(chunk) * b_scale.strides[2])
                cute.arch.cp_async_mbarrier_arrive_noinc(ring.full(stage))
                stage, phase = barriers.advance(stage, phase, ring.stages)
        # no lane ends with copies under way
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    def partition(self, copy: Any, source: Any, tile: Any, rows: int) -> Any:
        """What a bulk copy writes, by stage, and reads, by tile, chunk and group."""
        grid = cute.local_tile(source, (rows, CHUNK), (None, None, None))
        return cpasync.tma_partition(
            copy, 0, cute.make_layout(1), cute.group_modes(tile, 0, 2), cute.group_modes(grid, 0, 2)
        )

    @cute.jit
    def consume(
        self,
        thread: Any,
        tiles: Any,
        ring: Any,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        a: cute.Tensor,
        b: cute.Tensor,
        scale: Any,
        out: Any,
        rows: Any,
        columns: Any,
        chunks: Any,
    ) -> None:
        """Multiply the chunks in the ring and store the tiles' results. By all threads of the other warpgroups."""
        lane = thread % WARP
        own_row = thread // WARP * 16 + lane // 4
        warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        products = [wgmma.accumulators(mma, self.rows, self.columns) for _ in range(self.depth)]
        totals = cute.make_rmem_tensor((self.columns // 2,), Float32)
        stage, phase = barriers.start()
        for number in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            group, row_tile, column_tile = tiles.place(number)
            totals.fill(0.0)
            for _ in cutlass.range(chunks // self.depth, unroll=1):
                under_way = []
                for i in range_constexpr(self.depth):
                    ring.wait_full(stage, phase)
                    # loads queue behind the operands that tensor cores read: they come first
                    factors = self.load_factors(scale + stage * (self.scales * 4), own_row)
                    wgmma.multiply(mma, mma_more, products[i], warpgroup, a, b, stage)
                    under_way.append((stage, factors))
                    stage, phase = barriers.advance(stage, phase, self.stages)
                for i in range_constexpr(self.depth):
                    wgmma.wait(self.depth - 1 - i)
                    used, factors = under_way[i]
                    self.let_go(ring, used, lane)
                    self.add(totals, products[i], factors)
            row = row_tile * self.rows + own_row
            column = column_tile * self.columns
            target = out.at(row, group) + Int64(column) * 2
            wgmma.store_bf16(totals, lane, target, out.strides[0], rows - row, columns - column, self.columns)

    def load_factors(self, scales: Any, own_row: Any) -> tuple[Any, Any]:
        """What the products of the thread's two rows are multiplied with."""
        column_scale = ptx.load_shared_f32(scales + self.rows * 4)
        low, high = (ptx.load_shared_f32(scales + (own_row + 8 * half) * 4) for half in range(2))
        return low * column_scale, high * column_scale

    @cute.jit
    def let_go(self, ring: Any, stage: Any, lane: Any) -> None:
        # one lane arrives for all: they must have read their scales
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ring.empty(stage))

    @cute.jit
    def add(self, totals: cute.Tensor, products: cute.Tensor, factors: Any) -> None:
        for i in range_constexpr(self.columns // 2):
            totals[i] = totals[i] + factors[i // 2 % 2] * products[i]
