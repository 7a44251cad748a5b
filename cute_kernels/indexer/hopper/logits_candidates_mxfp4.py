# SPDX-License-Identifier: Apache-2.0
"""MXFP4 scores of candidate blocks on Hopper (score_candidates_decode): what logits_candidates.py does for FP8, with
the scales' preparation, the mainloop and the epilogue of logits_mxfp4.py.

    warps 0 ..     3 consumer warpgroups: dequantization, wgmma, epilogue
    then 3         producer warps, one for each consumer warpgroup; of keys that have come they prepare the scales
    then 1         counts the keys in each row's candidates, for the kernel that picks

A tile has sixteen candidates. Counts and the order of scores are those of logits_candidates.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK
from cute_kernels.indexer.hopper.epilogue import Epilogue
from cute_kernels.indexer.hopper.logits_candidates import count_keys
from cute_kernels.indexer.hopper.logits_mxfp4 import (
    STRIP,
    Bars,
    Consumer,
    Mxfp4Config,
    ScalePreparer,
    Smem,
    fill_table,
    sign_of,
)
from cute_kernels.indexer.params import (
    WARP,
    CandidateCache,
    CandidateWindows,
    KeyCache,
    RowGroups,
    TileScheduler,
)
from cute_kernels.indexer.producer import Producer, QueryCopy, code_rows
from cute_kernels.runtime.compile import KernelKey


class CandidateMxfp4Kernel:
    """Entry point: as that of logits_candidates.py, and before the number of CTAs the address of the queries' scales
    and their strides in bytes, by request and row."""

    def __init__(self, key: CandidateMxfp4Key) -> None:
        self.config = key.config
        self.name = f"candidate_logits_mxfp4_h{key.heads}"

    @cute.jit
    def __call__(
        self,
        weights: cute.Tensor,
        q: Int64,
        q_request: Int64,
        q_row: Int64,
        q_head: Int64,
        requests: Int32,
        row_count: Int32,
        keys: Int64,
        scales: Int64,
        page_stride: Int64,
        page_rows: Int32,
        pages: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        candidates: Int64,
        candidates_stride: Int64,
        blocks: Int32,
        ends: Int64,
        end_request: Int64,
        limit: Int32,
        skip: Int32,
        out: Int64,
        out_stride: Int64,
        q_scales: Int64,
        q_scales_request: Int64,
        q_scales_row: Int64,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        config, width = self.config, self.config.row_bytes
        query_rows = code_rows(q, width, (Int32(config.heads), row_count, requests), (q_head, q_row, q_request))
        key_rows = code_rows(keys, width, (page_rows, pages), (Int64(width), page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(page_rows // config.box)
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles, key_tiles = (
            cute.make_layout((rows, width, count), stride=(width, 1, rows * width))
            for rows, count in ((config.heads, config.query_stages), (config.box, config.stages * config.boxes))
        )
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_rows, query_tiles, (config.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_rows, key_tiles, (config.box, width))
        in_pages = KeyCache(scales, page_stride, boxes, pages, Int32(0), table, table_stride, table_columns)
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            wgmma.swizzled_tiles(Float8E4M3FN, config.columns, config.warpgroups),
            *(wgmma.make_mma_of_registers(Float8E4M3FN, config.columns) for _ in range(2)),
            RowGroups.of(requests, row_count, config.rows, ctas),
            CandidateWindows(Int64(0), ends, end_request, limit, blocks * CANDIDATE_BLOCK, Int32(0), skip),
            CandidateCache(in_pages, candidates, candidates_stride),
            address(weights),
            stride_bytes(weights, 0),
            (q_scales, q_scales_request, q_scales_row),
            out,
            out_stride,
        )
        kernel.launch(grid=[ctas, 1, 1], block=[config.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True)

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
        groups: RowGroups,
        windows: CandidateWindows,
        cache: CandidateCache,
        weights: Int64,
        weights_stride: Int64,
        q_scales: tuple[Int64, Int64, Int64],
        out: Int64,
        out_stride: Int64,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        allocator = SmemAllocator()
        stages = config.stages, config.query_stages, config.stages
        bars = Bars(*(barriers.Ring.allocate(allocator, count) for count in stages))
        words = [
            allocator.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16)
            for count in config.words.values()
        ]
        q = allocator.allocate_tensor(Float8E4M3FN, query_layout.outer, byte_alignment=1024, swizzle=query_layout.inner)
        packed_keys = allocator.allocate_tensor(
            Float8E4M3FN, cute.make_layout(config.stages * config.keys * config.row_bytes), byte_alignment=128
        )
        packed_queries = allocator.allocate_tensor(Float8E4M3FN, query_tiles, byte_alignment=128)
        smem = Smem(*(tensor.iterator.toint() for tensor in (*words, packed_keys, packed_queries)))
        producer_warp, count_warp = config.warpgroups * 4, config.warpgroups * 5
        if warp == producer_warp:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if thread == count_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that uses a stage releases it
            bars.keys.initialize(1, 4)
            bars.queries.initialize(1 + WARP, 4)
            bars.prepared.initialize(1, 4)
            fill_table(smem.table)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        scheduler = TileScheduler(config.rows, config.threads // WARP, True, config.keys, groups, windows, smem.counts)
        if groups.total() > WARP:
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()

        wgmma.overwrite(mma)
        wgmma.accumulate(mma_more)
        if warp >= producer_warp:
            if warp < count_warp:
                role = cute.arch.make_warp_uniform(warp - producer_warp)
                preparer = ScalePreparer(config, bars, smem, smem.progress + role * 8)
                key_part = ptx.tensor_map(key_copy), smem.keys
                query_part = QueryCopy.of(
                    query_copy, query_source, packed_queries, query_tiles, config.heads, config.row_bytes
                )
                context = scheduler, groups, windows, cache, smem, bars, (weights, weights_stride)
                copies = key_part, query_part, q_scales, preparer
                producer = Producer(config, True, *context, *copies, looks_ahead=True)
                preparer.start(role)
                producer.run(role)
                preparer.finish()
            elif warp == count_warp:
                count_keys(groups, windows, out, out_stride)
        else:
            lane = thread % WARP
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            own_warp = cute.arch.make_warp_uniform(thread % wgmma.WARPGROUP // WARP)
            sign = sign_of(smem.table)
            own = own_warp * STRIP + lane // 4 + (lane & 2) * 4
            epilogue = Epilogue(config, True, groups, windows, smem, out, out_stride, lane, own)
            consumer = Consumer(config, warpgroup, own_warp, bars, smem, epilogue, (mma, mma_more), q, sign)
            consumer.run()


@dataclass(frozen=True)
class CandidateMxfp4Key(KernelKey):
    """What distinguishes one compiled kernel from another: the heads of a query row, a multiple of 16, at most 64."""

    kernel_name: ClassVar[str] = "indexer.hopper.logits_candidates_mxfp4"
    heads: int = 32

    @property
    def config(self) -> Mxfp4Config:
        return Mxfp4Config(self.heads, 1, CANDIDATE_BLOCK)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "tma.load", "bulk.load", "cp.async", "mbarrier", "griddepcontrol", "mma.sync"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        weights = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        queries = (weights, *(Int64(0) for _ in range(4)), Int32(1), Int32(1))
        pages = Int64(0), Int64(0), Int64(0), Int32(8), Int32(1)
        tables = Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int32(1)
        windows = Int64(0), Int64(0), Int32(0), Int32(0)
        scores = Int64(0), Int64(0), Int64(0), Int64(0), Int64(0)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return CandidateMxfp4Kernel(self), (*queries, *pages, *tables, *windows, *scores, Int32(1), stream)
