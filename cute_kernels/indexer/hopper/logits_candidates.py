# SPDX-License-Identifier: Apache-2.0
"""FP8 scores of candidate blocks on Hopper (score_candidates_decode): the mainloop and epilogue of logits.py, with keys
that a row's candidates name.

    warps 0 ..     4 consumer warpgroups: wgmma, epilogue (logits.py)
    then 4         producer warps, one for each consumer warpgroup (producer.py)
    then 1         counts the keys in each row's candidates, for the kernel that picks

    candidates    gmem ---> block of eight keys ---> page of the block table ---> TMA box of codes, bulk copy of scales

Rows have candidates of their own, so a group is one row. Keys are counted in the order of the candidates: tile t has
candidates 8 t to 8 t + 7, and score 8 m + i is that of key i of candidate m. Scores are compact: a row has eight for
each of its candidates, and behind them, in column `columns`, how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer.chunks import CANDIDATE_BLOCK
from cute_kernels.indexer.hopper.epilogue import Epilogue
from cute_kernels.indexer.hopper.logits import Bars, Consumer, LogitsConfig, Smem
from cute_kernels.indexer.params import (
    KEY_TILE,
    WARP,
    CandidateCache,
    CandidateWindows,
    KeyCache,
    RowGroups,
    TileScheduler,
)
from cute_kernels.indexer.producer import Producer, QueryCopy, code_rows
from cute_kernels.runtime.compile import KernelKey


@cute.jit
def count_keys(groups: RowGroups, windows: CandidateWindows, out: Int64, out_stride: Int64) -> None:
    """Write how many keys each row's candidates have. By one warp of each CTA, a row a lane."""
    cta, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
    column = Int64(windows.columns) * 4
    rows = groups.requests * groups.count
    for row in cutlass.range(cta * WARP + cute.arch.lane_idx(), rows, ctas * WARP, unroll=1):
        end = ptx.load_global_s32_in_order(windows.end_address(row // groups.count, row % groups.count))
        ptx.store_global_s32(out + Int64(row) * out_stride + column, windows.keys(end))


class CandidateLogitsKernel:
    """Entry point: (weights, address of the queries and their strides in bytes, by request, row and head;
    requests, rows of a request; addresses of key 0 and its scale, page stride in bytes, keys of
    a page, pages; address of the block table, its stride in bytes and its columns; address and row stride of the
    candidates, blocks of a row; address of the lengths, their stride by request in bytes, keys that count, keys up to
    which a row is not scored; address and row stride of the scores; CTAs; stream)."""

    def __init__(self, key: CandidateLogitsKey) -> None:
        self.config = key.config
        self.name = f"candidate_logits_h{key.heads}"

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
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        config, width = self.config, self.config.row_bytes
        query_rows = code_rows(q, width, (Int32(config.heads), row_count, requests), (q_head, q_row, q_request))
        key_rows = code_rows(keys, width, (page_rows, pages), (Int64(width), page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(page_rows // config.box)
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles = wgmma.swizzled_tiles(Float8E4M3FN, config.heads, config.query_stages)
        key_tiles = wgmma.swizzled_tiles(Float8E4M3FN, config.box, config.stages * config.boxes)
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_rows, query_tiles, (config.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_rows, key_tiles, (config.box, width))
        in_pages = KeyCache(scales, page_stride, boxes, pages, Int32(0), table, table_stride, table_columns)
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            wgmma.swizzled_tiles(Float8E4M3FN, config.columns, config.query_stages),
            wgmma.swizzled_tiles(Float8E4M3FN, KEY_TILE, config.stages),
            *(wgmma.make_mma(Float8E4M3FN, 1, config.columns) for _ in range(2)),
            RowGroups.of(requests, row_count, config.rows, ctas),
            CandidateWindows(Int64(0), ends, end_request, limit, blocks * CANDIDATE_BLOCK, Int32(0), skip),
            CandidateCache(in_pages, candidates, candidates_stride),
            address(weights),
            stride_bytes(weights, 0),
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
        query_tiles: cute.ComposedLayout,
        query_layout: cute.ComposedLayout,
        key_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
        groups: RowGroups,
        windows: CandidateWindows,
        cache: CandidateCache,
        weights: Int64,
        weights_stride: Int64,
        out: Int64,
        out_stride: Int64,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        allocator = SmemAllocator()
        bars = Bars(*(barriers.Ring.allocate(allocator, count) for count in (config.stages, config.query_stages)))
        words = [
            allocator.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16)
            for count in config.words.values()
        ]
        smem = Smem(*(tensor.iterator.toint() for tensor in words))
        k, q = (
            allocator.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (key_layout, query_layout)
        )
        producer_warp, count_warp = config.warpgroups * 4, config.warpgroups * 5
        if warp == producer_warp:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if thread == count_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that uses a stage releases it
            bars.keys.initialize(1, 4)
            bars.queries.initialize(1 + WARP, 4)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        scheduler = TileScheduler(config.rows, config.threads // WARP, True, config.keys, groups, windows, smem.counts)
        if groups.total() > WARP:
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()

        wgmma.accumulate(mma_more)
        if warp >= producer_warp:
            if warp < count_warp:
                role = cute.arch.make_warp_uniform(warp - producer_warp)
                key_part = ptx.tensor_map(key_copy), k.iterator.toint()
                query_part = QueryCopy.of(
                    query_copy, query_source, q, query_tiles.outer, config.heads, config.row_bytes
                )
                context = scheduler, groups, windows, cache, smem, bars, (weights, weights_stride)
                producer = Producer(config, True, *context, key_part, query_part, looks_ahead=True)
                producer.run(role)
            elif warp == count_warp:
                count_keys(groups, windows, out, out_stride)
        else:
            lane = thread % WARP
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            own = thread % wgmma.WARPGROUP // WARP * 16 + lane // 4 + (lane & 2) * 4
            epilogue = Epilogue(config, True, groups, windows, smem, out, out_stride, lane, own)
            consumer = Consumer(config, warpgroup, bars, smem, epilogue, (mma, mma_more), k, q)
            consumer.run()


@dataclass(frozen=True)
class CandidateLogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another: the heads of a query row, a multiple of 16, at most 64."""

    kernel_name: ClassVar[str] = "indexer.hopper.logits_candidates"
    heads: int = 32

    @property
    def config(self) -> LogitsConfig:
        return LogitsConfig(self.heads, 1, CANDIDATE_BLOCK)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "tma.load", "bulk.load", "cp.async", "mbarrier", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        weights = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        queries = (weights, *(Int64(0) for _ in range(4)), Int32(1), Int32(1))
        pages = Int64(0), Int64(0), Int64(0), Int32(8), Int32(1)
        tables = Int64(0), Int64(0), Int32(0), Int64(0), Int64(0), Int32(1)
        windows = Int64(0), Int64(0), Int32(0), Int32(0)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return CandidateLogitsKernel(self), (*queries, *pages, *tables, *windows, Int64(0), Int64(0), Int32(1), stream)
