"""Kernel of mqa_logits and paged_mqa_logits for MXFP4 on Hopper: e2m1 codes multiplied as e4m3 ones.

A block's warps, in order:

    12 or 16   warpgroups that decode, multiply, add up and store, each its own tiles (mxfp4_scores)
    3 or 4     bring them keys and queries, one warp per warpgroup (logits_walk)
    1          writes -inf where a row sees no key, if that is wanted (logits_fill)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.indexer import mxfp4_codes
from cute_kernels.indexer.logits_fill import Fill
from cute_kernels.indexer.logits_plan import KEYS, WARP, Groups, Windows
from cute_kernels.indexer.logits_sm90 import LogitsKernel, LogitsKey, fake_arguments
from cute_kernels.indexer.logits_walk import Keys
from cute_kernels.indexer.mxfp4_plan import Mxfp4Plan
from cute_kernels.indexer.mxfp4_scores import Mxfp4Scores
from cute_kernels.indexer.mxfp4_walk import Mxfp4Walk


@dataclass(frozen=True)
class Mxfp4LogitsKey(LogitsKey):
    """As LogitsKey."""

    kernel_name: ClassVar[str] = "indexer.hopper.logits_mxfp4"

    @property
    def plan(self) -> Mxfp4Plan:
        return Mxfp4Plan(self.heads, self.rows, self.box)

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "mma.sync"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return Mxfp4LogitsKernel(self), fake_arguments(has_head_scales=True)


class Places(NamedTuple):
    """Addresses in shared memory."""

    notes: Any
    scales: Any
    weights: Any
    windows: Any
    sums: Any
    ready_scales: Any
    walks: Any
    head_scales: Any
    table: Any
    keys: Any
    queries: Any


class Mxfp4LogitsKernel(LogitsKernel):
    """Entry point: as LogitsKernel, and before the number of blocks the address of the queries' scales and their
    strides in bytes, by request and row."""

    def __init__(self, key: Mxfp4LogitsKey) -> None:
        self.plan, self.paged, self.shares = key.plan, key.paged, key.plan.registers
        self.walk = self.bringer = Mxfp4Walk(key.plan, key.paged)
        self.fill = Fill(key.paged)
        self.scores = Mxfp4Scores(key.plan, key.paged, self.walk)
        kind = f"paged_mqa_logits_mxfp4_b{key.box}" if key.paged else "mqa_logits_mxfp4"
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
        query_tiles, key_tiles = (
            cute.make_layout((rows, width, count), stride=(width, 1, rows * width))
            for rows, count in ((plan.heads, plan.buffers * plan.rows), (plan.box, plan.stages * plan.boxes))
        )
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_view, query_tiles, (plan.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_view, key_tiles, (plan.box, width))
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            wgmma.swizzled_tiles(Float8E4M3FN, plan.columns, plan.warpgroups),
            *(wgmma.make_mma_of_registers(Float8E4M3FN, plan.columns) for _ in range(2)),
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
        kernel.launch(grid=[blocks, 1, 1], block=[plan.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        query_copy: cute.CopyAtom,
        query_source: cute.Tensor,
        key_copy: cute.CopyAtom,
        query_tiles: cute.Layout,
        query_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
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
        rings = barriers.Ring.allocate(smem, plan.stages), barriers.Ring.allocate(smem, plan.buffers)
        ready = barriers.Ring.allocate(smem, plan.stages)
        words = [
            smem.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16) for count in plan.words.values()
        ]
        q = smem.allocate_tensor(Float8E4M3FN, query_layout.outer, byte_alignment=1024, swizzle=query_layout.inner)
        packed_keys = smem.allocate_tensor(
            Float8E4M3FN, cute.make_layout(plan.stages * KEYS * plan.row_bytes), byte_alignment=128
        )
        packed_queries = smem.allocate_tensor(Float8E4M3FN, query_tiles, byte_alignment=128)
        at = Places(*(tensor.iterator.toint() for tensor in (*words, packed_keys, packed_queries)))
        walk_warp, fill_warp = plan.warpgroups * 4, plan.warpgroups * 5
        if warp == walk_warp:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if thread == fill_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that uses a stage lets go of it
            rings[0].initialize(1 if self.paged else 1 + WARP, 4)
            rings[1].initialize(1 + WARP, 4)
            ready.initialize(1, 4)
            mxfp4_codes.fill_table(at.table)
        if const_expr(self.paged):
            self.walk.warm(warp, groups, windows, keys)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if groups.total() > WARP:
            self.walk.count(warp, groups, windows, at.sums)
            cute.arch.sync_threads()

        wgmma.overwrite(mma)
        wgmma.accumulate(mma_more)
        if warp >= walk_warp:
            if const_expr(len(self.shares) > 0):
                cute.arch.setmaxregister_decrease(self.shares[0])
            if warp < fill_warp:
                role = cute.arch.make_warp_uniform(warp - walk_warp)
                key_part = ptx.tensor_map(key_copy), at.keys
                query_part = self.partition(query_copy, query_source, packed_queries, query_tiles, plan.heads)
                queries = (*query_part, head_scales)
                others = groups, windows, keys, weights, weights_stride, key_part, queries
                self.bringer.run_all(role, ready, rings, at, others)
            elif (warp == fill_warp) & (clean != 0):
                number, warps = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
                self.fill.run(number, warps, groups, windows, out, out_stride)
        else:
            if const_expr(len(self.shares) > 0):
                cute.arch.setmaxregister_increase(self.shares[1])
            self.scores.run(thread, groups, windows, rings, ready, at, (mma, mma_more), q, out, out_stride)
