"""Kernel of mqa_logits and paged_mqa_logits on Blackwell: e4m3 or MXFP4 products on tensor cores, from codes as they
are stored.

A block's warps, in order:

    8   two warpgroups that add up and store (logits_sm100_scores)
    1   brings keys and queries (logits_walk)
    1   starts products (logits_sm100_products)
    1   puts the scales of MXFP4 in order (the same)
    1   writes -inf where a row sees no key, if that is wanted (logits_fill)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.indexer.logits_fill import Fill
from cute_kernels.indexer.logits_plan import WARP, Groups, Windows
from cute_kernels.indexer.logits_sm90 import LogitsKernel, fake_arguments
from cute_kernels.indexer.logits_sm100_plan import ALIGNMENT, BUFFERS, MANY_WEIGHTS, PAGE_BOX, TILE, BlackwellPlan
from cute_kernels.indexer.logits_sm100_products import Products
from cute_kernels.indexer.logits_sm100_scores import BlackwellScores
from cute_kernels.indexer.logits_walk import Keys, ScaledWalk, Walk
from cute_kernels.runtime.compile import KernelKey

REGISTERS = 56, 224
"""Per thread of a kernel with MANY_WEIGHTS, of the warps beside and of those that add up: together what three
warpgroups are launched with, 3 x 168."""

SUMS_DONE = 1
"""Barrier of the warps that use tensor memory."""


@dataclass(frozen=True)
class BlackwellLogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row: a multiple of 16, at most 64
    rows    of a group, at most logits_sm100_plan.most_rows
    paged   whether keys lie in pages, of a multiple of 64
    mxfp4   whether queries and keys are MXFP4, else they are FP8
    """

    kernel_name: ClassVar[str] = "indexer.blackwell.logits"
    heads: int = 64
    rows: int = 4
    paged: bool = False
    mxfp4: bool = False

    @property
    def plan(self) -> BlackwellPlan:
        return BlackwellPlan(self.heads, self.rows, PAGE_BOX if self.paged else TILE, self.mxfp4)

    @property
    def smem_bytes(self) -> int:
        return self.plan.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = ["tcgen05.mma", "tcgen05.ld", "tma.load", "cp.async", "mbarrier", "griddepcontrol"]
        return (*used, *["bulk.load"] * self.paged, *["tcgen05.cp"] * self.mxfp4)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return BlackwellLogitsKernel(self), fake_arguments(has_head_scales=True)


class Places(NamedTuple):
    """Addresses in shared memory."""

    notes: Any
    scales: Any
    weights: Any
    windows: Any
    sums: Any
    tensor: Any
    head_scales: Any = None


class BlackwellLogitsKernel(LogitsKernel):
    """Entry point: as Mxfp4LogitsKernel. Queries that are FP8 have no scales."""

    plan: BlackwellPlan

    def __init__(self, key: BlackwellLogitsKey) -> None:
        self.plan, self.paged = key.plan, key.paged
        self.walk, self.fill = (ScaledWalk if key.mxfp4 else Walk)(key.plan, key.paged), Fill(key.paged)
        self.products, self.scores = Products(key.plan), BlackwellScores(key.plan, key.paged)
        self.has_many_weights = self.plan.held * self.plan.heads > MANY_WEIGHTS
        kind = ("paged_" if key.paged else "") + "mqa_logits_sm100" + ("_mxfp4" if key.mxfp4 else "")
        self.name = f"{kind}_h{key.heads}r{key.rows}"

    @cute.jit
    def __call__(
        self,
        weights: cute.Tensor,
        out: cute.Tensor,
        q: Int64,
        q_request: Int64,
        q_row: Int64,
        q_head: Int64,
        requests: Int32,
        row_count: Int32,
        keys: Int64,
        scales: Int64,
        key_stride: Int64,
        page_stride: Int64,
        page_rows: Int32,
        pages: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        starts: Int64,
        ends: Int64,
        end_request: Int64,
        limit: Int32,
        shifts: Int32,
        skip: Int32,
        clean: Int32,
        head_scales: Int64,
        head_scales_request: Int64,
        head_scales_row: Int64,
        blocks: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        plan, width = self.plan, self.plan.row_bytes
        query_view = self.view(q, (Int32(plan.heads), row_count, requests), (q_head, q_row, q_request))
        key_view = self.view(keys, (page_rows, pages), (key_stride, page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(cute.ceil_div(page_rows, plan.box))
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles = self.tiles(plan.heads, plan.buffers * plan.rows)
        key_tiles = self.tiles(plan.box, plan.stages * plan.boxes)
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_view, query_tiles, (plan.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_view, key_tiles, (plan.box, width))
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            self.tiles(TILE, plan.stages),
            Groups.of(requests, row_count, plan.rows, blocks),
            Windows(starts, ends, end_request, limit, length(out, 1), shifts, skip),
            Keys(scales, page_stride, boxes, pages, limit, table, table_stride, table_columns),
            address(weights),
            stride_bytes(weights, 0),
            (head_scales, head_scales_request, head_scales_row),
            address(out),
            stride_bytes(out, 0),
            clean,
        )
        kernel.launch(grid=[blocks, 1, 1], block=[plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    def tiles(self, rows: int, count: int) -> Any:
        """Shared-memory layout of so many tiles of rows of codes, as plan.operand has them."""
        kinds = tcgen05.SmemLayoutAtomKind
        atom = tcgen05.make_smem_layout_atom(kinds.K_SW64 if self.plan.mxfp4 else kinds.K_SW128, Float8E4M3FN)
        return cute.tile_to_shape(atom, (rows, self.plan.row_bytes, count), (0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        query_copy: cute.CopyAtom,
        query_source: cute.Tensor,
        key_copy: cute.CopyAtom,
        query_tiles: cute.ComposedLayout,
        key_tiles: cute.ComposedLayout,
        groups: Groups,
        windows: Windows,
        keys: Keys,
        weights: Int64,
        weights_stride: Int64,
        head_scales: tuple[Int64, Int64, Int64],
        out: Int64,
        out_stride: Int64,
        clean: Int32,
    ) -> None:
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        rings = [barriers.Ring.allocate(smem, count) for count in (plan.stages, plan.buffers, BUFFERS)]
        ordered: Any = smem.allocate_array(Int64, plan.stages) if const_expr(plan.mxfp4) else None
        words = {
            name: smem.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=ALIGNMENT)
            for name, count in plan.words.items()
        }
        at = Places(**{name: tensor.iterator.toint() for name, tensor in words.items()})
        k, q = (
            smem.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (key_tiles, query_tiles)
        )
        walk_warp = plan.warpgroups * 4
        start_warp, order_warp, fill_warp = walk_warp + 1, walk_warp + 2, walk_warp + 3
        if warp == walk_warp:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if warp == start_warp:
            ptx.allocate_tensor_memory(at.tensor, plan.tensor_columns)
            ptx.relinquish_tensor_memory()
        if thread == fill_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that adds up lets go of a stage, and
            # the one that starts products lets go of its note
            rings[0].initialize(1 if self.paged else 1 + WARP, plan.warpgroups * 4 + 1)
            rings[1].initialize(1 + WARP, plan.warpgroups * 4)
            rings[2].initialize(1, plan.parts * 4)
            if const_expr(plan.mxfp4):
                for stage in range_constexpr(plan.stages):
                    cute.arch.mbarrier_init(ordered + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        tensor = ptx.load_shared_s32(at.tensor)
        if const_expr(self.paged):
            self.walk.warm(warp, groups, windows, keys)
        if groups.total() > WARP:
            self.walk.count(warp, groups, windows, at.sums)
            cute.arch.sync_threads()

        sharers = (plan.warpgroups * 4 + 1) * WARP
        if warp >= walk_warp:
            if const_expr(self.has_many_weights):
                cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == walk_warp:
                key_part = ptx.tensor_map(key_copy), k.iterator.toint()
                query_part = self.partition(query_copy, query_source, q, query_tiles.outer, plan.heads)
                queries = (*query_part, head_scales)
                self.walk.run(Int32(0), groups, windows, keys, weights, weights_stride, key_part, queries, rings, at)
            elif warp == start_warp:
                self.products.start(rings, ordered, at, k.iterator.toint(), q.iterator.toint(), tensor)
                cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)
                ptx.free_tensor_memory(tensor, plan.tensor_columns)
            elif warp == order_warp:
                if const_expr(plan.mxfp4):
                    self.products.order_scales(rings, ordered, at)
            elif clean != 0:
                self.fill.run(cute.arch.block_idx()[0], cute.arch.grid_dim()[0], groups, windows, out, out_stride)
        else:
            if const_expr(self.has_many_weights):
                cute.arch.setmaxregister_increase(REGISTERS[1])
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            own = thread % wgmma.WARPGROUP
            rest = groups, windows, rings, at, tensor, out, out_stride
            if const_expr(plan.rows % plan.parts == 0):
                part = warpgroup if const_expr(plan.parts > 1) else Int32(0)
                self.scores.run(warpgroup, part, plan.held, own, *rest)
            else:
                for part in range_constexpr(plan.parts):
                    if warpgroup == part:
                        self.scores.run(warpgroup, Int32(part), plan.rows_of_part(part), own, *rest)
            cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)
