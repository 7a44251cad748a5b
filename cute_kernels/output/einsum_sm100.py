"""Kernel of deepseek_v4_fp8_einsum on Blackwell: products on tensor cores, summed in fp32 every 128 columns.

As on Hopper (linear/hopper/gemm.py), a block walks over tiles of results, neighbouring columns first, and what it
copies is in a ring of stages; scales have a ring of their own. Products are in tensor memory, in two buffers: while a
chunk is multiplied, the one before it is scaled and added to totals in registers. A block's warps, in order:

    8   two warpgroups that add up and store, each half of the columns
    1   copies operands
    1   copies scales
    1   starts products
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, convert, ptx, wgmma
from cute_kernels.dsl.tensor import length
from cute_kernels.output.einsum_sm100_plan import ROWS, WARPGROUPS, BlackwellPlan
from cute_kernels.output.einsum_tiles import CHUNK, WARP, Strided, Tiles, fake_arguments
from cute_kernels.runtime.compile import KernelKey

REGISTERS = 56, 224
"""Per thread of the warps beside and of those that add up: together what three warpgroups are launched with, 3 x 168.
"""

MANY_TOTALS = 64
"""Of a thread, beyond which it needs more registers than its share of a multiprocessor's."""

LANE_SHIFT = 16
"""Of an address in tensor memory: bits of the column."""

SUMS_DONE = 1
"""Barrier of the warps that use tensor memory."""


@dataclass(frozen=True)
class BlackwellEinsumKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    columns   of a tile: 64, 128 or 256
    packed    whether scales are four ue8m0 bytes in a word and each column has its own, else they are fp32
    """

    kernel_name: ClassVar[str] = "output.blackwell.einsum"
    columns: int = 256
    packed: bool = False

    @property
    def rows(self) -> int:
        return ROWS

    @property
    def plan(self) -> BlackwellPlan:
        return BlackwellPlan(self.columns, self.packed)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "tcgen05.mma", "tcgen05.ld", "tma.load", "cp.async", "mbarrier", "st.global.128", "griddepcontrol"
        return (*used, "tcgen05.cp") if self.packed else used

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        if self.packed:
            from cute_kernels.output.einsum_sm100_packed import PackedEinsumKernel

            return PackedEinsumKernel(self), fake_arguments(Int32)
        return BlackwellEinsumKernel(self), fake_arguments()


class Results(NamedTuple):
    """Where results go, and how many rows and columns there are."""

    out: Strided
    rows: Any
    columns: Any


class BlackwellEinsumKernel:
    """Entry point: (a, a_scale, b, b_scale, out, number of blocks, stream)."""

    def __init__(self, key: BlackwellEinsumKey) -> None:
        plan = self.plan = key.plan
        self.rows, self.columns, self.stages = ROWS, plan.columns, plan.stages
        self.scales, self.column_scales = plan.scales, plan.column_scales
        self.has_many_totals = plan.width > MANY_TOTALS and not key.packed
        self.piece = 16 if self.has_many_totals else 32
        """Columns of tensor memory that a thread loads at a time."""
        self.name = f"deepseek_v4_fp8_einsum_sm100_{ROWS}x{key.columns}" + "_packed" * key.packed

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        a_scale: cute.Tensor,
        b: cute.Tensor,
        b_scale: cute.Tensor,
        out: cute.Tensor,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            *self.operand_copies(a, b),
            Strided.of(a_scale),
            Strided.of(b_scale),
            Strided.of(out),
            length(out, 0),
            length(out, 1),
            length(out, 2),
            length(a, 2) // CHUNK,
        )
        kernel.launch(grid=[blocks, 1, 1], block=[self.plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

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
        a_scale: Strided,
        b_scale: Strided,
        out: Strided,
        rows: Int32,
        groups: Int32,
        columns: Int32,
        chunks: Int32,
    ) -> None:
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        rings = [barriers.Ring.allocate(smem, count) for count in (plan.stages, plan.scale_stages, plan.buffers)]
        scales = smem.allocate_tensor(Int32, cute.make_layout(plan.scales * plan.scale_stages), byte_alignment=128)
        word = smem.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16)
        a = smem.allocate_tensor(Float8E4M3FN, a_tiles.outer, byte_alignment=1024, swizzle=a_tiles.inner)
        b = smem.allocate_tensor(Float8E4M3FN, b_tiles.outer, byte_alignment=1024, swizzle=b_tiles.inner)
        scale = scales.iterator.toint()
        copy_warp = const_expr(WARPGROUPS * 4)
        scale_warp, start_warp = const_expr(copy_warp + 1), const_expr(copy_warp + 2)
        if warp == copy_warp:
            for copy in (a_copy, b_copy):
                cpasync.prefetch_descriptor(copy)
        if warp == start_warp:
            ptx.allocate_tensor_memory(word.iterator.toint(), plan.tensor_columns)
            ptx.relinquish_tensor_memory()
        if thread == 0:
            # one arrival announces bytes, and one says that products are done with them; one per lane its scales; every
            # warp that adds up lets go of products
            rings[0].initialize(1, 1)
            rings[1].initialize(WARP, plan.scale_users)
            rings[2].initialize(1, WARPGROUPS * 4)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        tensor = ptx.load_shared_s32(word.iterator.toint())

        sharers = const_expr((WARPGROUPS * 4 + 1) * WARP)
        if warp >= copy_warp:
            if const_expr(self.has_many_totals):
                cute.arch.setmaxregister_decrease(REGISTERS[0])
            tiles = self.tiles(rows, groups, columns)
            if warp == copy_warp:
                copies = (a_copy, a_source, a), (b_copy, b_source, b)
                self.copy_operands(tiles, rings[0], copies, chunks)
            if warp == scale_warp:
                self.copy_scales(tiles, rings[1], scale, a_scale, b_scale, rows, columns, chunks)
            if warp == start_warp:
                self.start_products(tiles, rings, scale, a.iterator.toint(), b.iterator.toint(), tensor, chunks)
                cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)
                ptx.free_tensor_memory(tensor, plan.tensor_columns)
        else:
            if const_expr(self.has_many_totals):
                cute.arch.setmaxregister_increase(REGISTERS[1])
            tiles = self.tiles(rows, groups, columns)
            self.consume_products(thread, tiles, rings, scale, tensor, Results(out, rows, columns), chunks)
            cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)

    def tiles(self, rows: Any, groups: Any, columns: Any) -> Tiles:
        """The block's. Counted by each role for itself: what all share, the assembler spills."""
        of_rows = cute.ceil_div(rows, ROWS)
        of_columns = cute.ceil_div(columns, self.plan.columns)
        blocks, _, _ = cute.arch.grid_dim()
        return Tiles(ptx.block_again(), groups * of_rows * of_columns, blocks, of_rows, of_columns)

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
    def start_products(self, tiles: Any, rings: Any, scale: Any, a: Any, b: Any, tensor: Any, chunks: Any) -> None:
        """Multiply the chunks in the ring. By one warp.

        rings         of operands, scales and products
        scale, a, b   addresses of the stages
        """
        plan = self.plan
        ring, _, product_ring = rings
        stage, phase = barriers.start()
        buffer, use = barriers.start()
        for _ in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            for _ in cutlass.range(chunks, unroll=1):
                product_ring.wait_empty(buffer, use)
                ring.wait_full(stage, phase)
                ptx.fence_tensor_after()
                with cute.arch.elect_one():
                    rows = ptx.descriptor_at(plan.operand, a + stage * (ROWS * CHUNK))
                    weights = ptx.descriptor_at(plan.operand, b + stage * (plan.columns * CHUNK))
                    target = tensor + buffer * plan.columns
                    for number, step in enumerate(plan.steps):
                        operands = rows + (step >> 4), weights + (step >> 4)
                        ptx.tensor_mma(target, *operands, plan.instruction, min(number, 1), kind="f8f6f4")
                    ptx.commit_tensor(ring.empty(stage).toint())
                    ptx.commit_tensor(product_ring.full(buffer).toint())
                stage, phase = barriers.advance(stage, phase, plan.stages)
                buffer, use = barriers.advance(buffer, use, plan.buffers)

    @cute.jit
    def consume_products(
        self, thread: Any, tiles: Any, rings: Any, scale: Any, tensor: Any, results: Results, chunks: Any
    ) -> None:
        """Scale the products of all chunks, add them up and store the tiles' results. By two warpgroups: a thread has a
        row, and half of the tile's columns."""
        plan = self.plan
        _, scale_ring, product_ring = rings
        lane = thread % WARP
        own_row, own_column, products = self.own_place(thread, tensor)
        totals = cute.make_rmem_tensor((plan.width,), Float32)
        stage, phase = barriers.start()
        buffer, use = barriers.start()
        for number in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            totals.fill(0.0)
            for _ in cutlass.range(chunks, unroll=1):
                scale_ring.wait_full(stage, phase)
                factors = scale + stage * (plan.scales * 4)
                column_scale = ptx.load_shared_f32(factors + (ROWS + own_column // CHUNK) * 4)
                factor = ptx.load_shared_f32(factors + own_row * 4) * column_scale
                product_ring.wait_full(buffer, use)
                ptx.fence_tensor_after()
                self.add_products(totals, products + buffer * plan.columns, factor)
                ptx.fence_tensor_before()
                # one lane arrives for all: they must have read their scales and their products
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(product_ring.empty(buffer))
                    cute.arch.mbarrier_arrive(scale_ring.empty(stage))
                stage, phase = barriers.advance(stage, phase, plan.scale_stages)
                buffer, use = barriers.advance(buffer, use, plan.buffers)
            target, left = self.own_results(tiles.place(number), own_row, own_column, results)
            self.store([totals[i] for i in range(plan.width)], target, left)

    def own_place(self, thread: Any, tensor: Any) -> tuple[Any, Any, Any]:
        """A thread's row and first column of a tile, and where their product is in tensor memory."""
        row = thread % ROWS
        column = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP) * self.plan.width
        return row, column, tensor + (row // WARP * WARP << LANE_SHIFT) + column

    @cute.jit
    def own_results(self, place: Any, own_row: Any, own_column: Any, results: Results) -> tuple[Any, Any]:
        """Address of a thread's first result of the tile at `place`, and how many columns there are from it on."""
        group, row_tile, column_tile = place
        row, column = row_tile * ROWS + own_row, column_tile * self.plan.columns + own_column
        left = results.columns - column if row < results.rows else Int32(0)
        return results.out.at(row, group) + Int64(column) * 2, left

    @cute.jit
    def add_products(self, totals: cute.Tensor, products: Any, factor: Any) -> None:
        """Add scaled products, which begin at an address, to totals. Some are loaded while others are added."""
        coming = ptx.start_tensor_load(products, self.piece)
        for first in range_constexpr(0, self.plan.width, self.piece):
            words = ptx.wait_tensor_loads(coming)
            if const_expr(first + self.piece < self.plan.width):
                coming = ptx.start_tensor_load(products + (first + self.piece), self.piece)
            for i in range_constexpr(0, self.piece, 2):
                pair = [words[i + j].bitcast(Float32) for j in range(2)]
                before = [totals[first + i + j] for j in range(2)]
                low, high = ptx.fma_f32x2(pair, (factor, factor), before)
                totals[first + i], totals[first + i + 1] = low, high

    def store(self, values: list[Any], target: Any, left: Any) -> None:
        """Neighbouring results as bf16, as far as there are columns `left`."""
        for first in range(0, len(values), 8):
            ptx.store_global_128(target + first * 2, convert.bf16_words(values[first : first + 8]), first < left)
