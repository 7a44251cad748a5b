# SPDX-License-Identifier: Apache-2.0
"""FP8 scores on Hopper (mqa_logits, paged_mqa_logits): e4m3 products by wgmma, heads summed in registers.

A persistent CTA takes work tiles (params.TileScheduler): a group of one to four query rows of a request, and a share
of the keys that they see. Operands are swapped: wgmma's first one is keys (M = 64 of them, a tile), its second one
queries (N = heads times rows of the group, a tile's columns), so that a key's products of all heads lie in four lanes.

    warps 0 ..     2 to 4 consumer warpgroups: wgmma, epilogue; each has every second (third, fourth) tile of the CTA
    then 2 to 4    producer warps, one for each consumer warpgroup (producer.py)
    then 1         fill warp: writes -inf where a row sees no key, if that is wanted (params.Fill)

    keys      gmem --TMA--> ring of keys [stages][64 keys, 128 bytes] -----------+
                                                                                 +--wgmma--> [64 keys, columns] in fp32
    queries   gmem --TMA--> ring of queries [query stages][columns, 128 bytes] --+              | relu, weights, sums
    scales    gmem ----> ring of keys                                                           v
    weights   gmem ----> ring of queries                               scores, one key and every second row a lane

    ring      full                                              empty                      waits for full, for empty
    keys      codes, scales and header of a tile are there      consumer warps used them   consumer, producer warp
    queries   codes, weights and windows of a group are there   all are done with it       consumer, last producer warp

A stage of keys always belongs to the same consumer warpgroup and its producer warp: 8 to 12 stages (STAGES), which
consumers have in turn. Queries are those of all consumers, and the last producer warp brings them: copies of their own
would be asked of the same lines of L2 by all consumers of all CTAs at once. What comes ahead of the first keys decides
how long a call of few requests takes (perf/notes/logits.md), so producer warps begin with the lengths.

Products of four rows are in two accumulators. While the tensor cores multiply one, the threads add up the other, from
tile to tile; but products that are under way must not cross the end of a loop (see dsl.wgmma), so a round of the
mainloop takes two or three tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer.hopper.epilogue import Epilogue, RowState
from cute_kernels.indexer.params import (
    COUNTERS,
    KEY_TILE,
    LAST_OF_ALL,
    WARP,
    Fill,
    KeyCache,
    RowGroups,
    TileScheduler,
    Windows,
    fake_arguments,
)
from cute_kernels.indexer.producer import (
    HEADER,
    SHARED_QUERY_STAGES,
    KeyTile,
    Producer,
    QueryCopy,
    advance,
    ask_for_ends,
    code_rows,
    prefetch_lengths,
    release,
    shared_query_stage,
    wait_key_tile,
)
from cute_kernels.runtime.compile import KernelKey

STAGES = {1: 12, 2: 8, 3: 8, 4: 8}
"""Of the ring of keys, by the rows of a group, or a few more, so that a stage is always of the same warpgroup. Why so
many: perf/notes/logits.md."""

TILES_OF_ROUND = 3
"""Of the mainloop for two accumulators where keys lie in pages. At a round's end the warpgroup has nothing to multiply.
For contiguous keys, of which the assembler makes other code, two in one function are faster."""

MANY_COLUMNS = 192
"""Of products, from which on a thread needs more registers than its share of a multiprocessor's."""

REGISTERS, REGISTERS_BESIDE_MORE = (40, 232), (56, 224)
"""Per thread where there are MANY_COLUMNS, of producer and fill warps and of consumers; the second pair where the
former have more to do: small boxes, and heads that are no power of two. Three warpgroups may have no more together than
they are launched with, 3 x 168, or one of them waits for ever."""


@dataclass(frozen=True)
class LogitsConfig:
    """Sizes of one kernel: `heads` of a query row, at most `rows` of them in a group, keys copied by TMA boxes of
    `box`."""

    heads: int
    rows: int
    box: int

    keys: ClassVar[int] = KEY_TILE
    row_bytes: ClassVar[int] = INDEX_DIM
    shares_queries: ClassVar[bool] = True
    query_stages: ClassVar[int] = SHARED_QUERY_STAGES
    fences_keys: ClassVar[bool] = False
    """Whether threads, not TMA, write the keys that tensor cores read."""

    @property
    def columns(self) -> int:
        """Of a tile's products."""
        return self.heads * self.rows

    @property
    def accumulators(self) -> int:
        """That a tile's products are in, so that one is multiplied while the other is added up."""
        return 2 if self.rows == 4 else 1

    @property
    def warpgroups(self) -> int:
        """Of consumers: as many as there are registers for."""
        return {1: 4, 2: 3}.get(self.rows, 2)

    @property
    def producers(self) -> int:
        """Warps, one for each consumer warpgroup."""
        return self.warpgroups

    @property
    def stages(self) -> int:
        """Of the ring of keys."""
        return round_up(STAGES[self.rows], self.warpgroups)

    @property
    def warps_beside(self) -> int:
        """Producer warps and the fill warp."""
        return self.producers + 1

    @property
    def threads(self) -> int:
        """Of a CTA: whole warpgroups."""
        return round_up(self.warpgroups * 4 + self.warps_beside, 4) * WARP

    @property
    def boxes(self) -> int:
        """Of a tile."""
        return self.keys // self.box

    # ---- shared memory

    @property
    def words(self) -> dict[str, int]:
        """What shared memory holds besides operands and barriers, in words."""
        return {
            "headers": self.stages * HEADER,
            "scales": self.stages * self.keys,
            "weights": self.query_stages * self.columns,
            "windows": self.query_stages * 2 * self.rows,
            "counts": COUNTERS,
        }

    @property
    def smem_bytes(self) -> int:
        small = (self.stages + self.query_stages) * barriers.BYTES_PER_STAGE
        small += sum(round_up(count * 4, 16) for count in self.words.values())
        return round_up(small, 1024) + (self.stages * KEY_TILE + self.query_stages * self.columns) * INDEX_DIM


class Smem(NamedTuple):
    """Addresses in shared memory: LogitsConfig.words."""

    headers: Any
    scales: Any
    weights: Any
    windows: Any
    counts: Any


@dataclass(frozen=True)
class Bars:
    """Rings of keys and queries."""

    keys: barriers.Ring
    queries: barriers.Ring


# ---- MMA


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup's mainloop.

    mma   the product of an accumulator, and the one that adds
    k     [64 keys, 128, stages]
    q     [columns of an accumulator, 128, accumulators of all query stages]
    """

    config: LogitsConfig
    warpgroup: Any
    bars: Bars
    smem: Smem
    epilogue: Epilogue
    mma: tuple[Any, Any]
    k: Any
    q: Any

    @cute.jit
    def run(self) -> None:
        """Score the warpgroup's tiles."""
        config, bars, epilogue, mma, k, q = self.config, self.bars, self.epilogue, self.mma, self.k, self.q
        lane = epilogue.lane
        columns = config.columns // config.accumulators
        products = [wgmma.accumulators(mma[0], KEY_TILE, columns) for _ in range(config.accumulators)]
        rows: RowState = epilogue.allocate()
        stage, phase, group = self.warpgroup, Int32(0), Int32(-1)
        is_running = Int32(1)
        while is_running != 0:
            tile = wait_key_tile(bars.keys, self.smem.headers, stage, phase)
            if const_expr(config.fences_keys):
                cute.arch.fence_view_async_shared()
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != group:
                    group = tile.group
                    self.epilogue.load_rows(rows, group, self.wait_queries(tile))
                query_stage, _ = shared_query_stage(tile.turn)
                if const_expr(config.accumulators == 1):
                    scale = self.load_scale(stage)
                    wgmma.multiply(*mma, products[0], 0, k, q, stage, query_stage)
                    wgmma.wait(0)
                    self.epilogue.store_products(0, products[0], rows, tile, scale)
                    release(bars, tile, query_stage, lane)
                    stage, phase = advance(stage, phase, config)
                    if const_expr(epilogue.paged and not config.fences_keys):
                        # where lanes copy keys, they still arrive behind them
                        is_running = Int32(1) if tile.tagged_key & LAST_OF_ALL == 0 else Int32(0)
                else:
                    scale = self.load_scale(stage)
                    for i in range_constexpr(2):
                        wgmma.multiply(*mma, products[i], 0, k, q, stage, query_stage * 2 + i)
                    stage, phase = advance(stage, phase, config)
                    if const_expr(epilogue.paged):
                        state = group, stage, phase
                        is_running, group, stage, phase = self.score_chain(
                            TILES_OF_ROUND - 1, products, rows, tile, scale, query_stage, *state
                        )
                    else:
                        after = wait_key_tile(bars.keys, self.smem.headers, stage, phase)
                        if after.group < 0:
                            is_running = Int32(0)
                            self.finish(products, rows, tile, scale, query_stage)
                        else:
                            group, next_query_stage, next_scale = self.step(
                                products, rows, tile, scale, query_stage, after, group, stage
                            )
                            self.finish(products, rows, after, next_scale, next_query_stage)
                            stage, phase = advance(stage, phase, config)

    @cute.jit
    def score_chain(
        self,
        left: cutlass.Constexpr,
        products: Any,
        rows: RowState,
        tile: KeyTile,
        scale: Any,
        query_stage: Any,
        group: Any,
        stage: Any,
        phase: Any,
    ) -> tuple[Any, Any, Any, Any]:
        """Add up a tile that is being multiplied, and while that is done multiply the next one, which then counts as
        the tile, `left` times. Returns whether there may be more tiles, the last one's group, and where the next one
        comes: stage and phase, which are those of the one after `tile` at first."""
        is_running = Int32(1)
        after = wait_key_tile(self.bars.keys, self.smem.headers, stage, phase)
        if after.group < 0:
            is_running = Int32(0)
            self.finish(products, rows, tile, scale, query_stage)
        else:
            group, next_query_stage, next_scale = self.step(
                products, rows, tile, scale, query_stage, after, group, stage
            )
            stage, phase = advance(stage, phase, self.config)
            if const_expr(left > 1):
                is_running, group, stage, phase = self.score_chain(
                    left - 1, products, rows, after, next_scale, next_query_stage, group, stage, phase
                )
            else:
                self.finish(products, rows, after, next_scale, next_query_stage)
        return is_running, group, stage, phase

    @cute.jit
    def step(
        self,
        products: Any,
        rows: RowState,
        tile: KeyTile,
        scale: Any,
        query_stage: Any,
        after: KeyTile,
        group: Any,
        stage: Any,
    ) -> tuple[Any, Any, Any]:
        """Add up a tile that is being multiplied, and meanwhile multiply the one after it, which lies in `stage`.
        Returns the group of the latter, the stage of its queries, and its scale."""
        is_new = after.group != group
        if is_new:
            self.wait_queries(after)
        next_query_stage, _ = shared_query_stage(after.turn)
        next_scale = self.load_scale(stage)
        for i in range_constexpr(2):
            wgmma.wait(1)
            self.epilogue.store_products(i, products[i], rows, tile, scale)
            wgmma.multiply(*self.mma, products[i], 0, self.k, self.q, stage, next_query_stage * 2 + i)
        release(self.bars, tile, query_stage, self.epilogue.lane)
        if is_new:
            group = after.group
            self.epilogue.load_rows(rows, group, next_query_stage)
        return group, next_query_stage, next_scale

    @cute.jit
    def finish(self, products: Any, rows: RowState, tile: KeyTile, scale: Any, query_stage: Any) -> None:
        """Add up a tile that is being multiplied."""
        for i in range_constexpr(2):
            wgmma.wait(1 - i)
            self.epilogue.store_products(i, products[i], rows, tile, scale)
        release(self.bars, tile, query_stage, self.epilogue.lane)

    def load_scale(self, stage: Any) -> Any:
        """That of the thread's key of a tile."""
        return ptx.load_shared_f32(self.smem.scales + (stage * KEY_TILE + self.epilogue.own) * 4)

    @cute.jit
    def wait_queries(self, tile: KeyTile) -> Any:
        """The stage with the queries of a tile's group, when they are there."""
        query_stage, phase = shared_query_stage(tile.turn)
        self.bars.queries.wait_full(query_stage, phase)
        return query_stage


# ---- kernel


class LogitsKernel:
    """Entry point: (weights, out;
    address of the queries and their strides in bytes, by request, row and head; requests, rows of a request;
    addresses of key 0 and its scale, strides of keys and pages in bytes; keys of a page, pages; address of the block
    table, its stride in bytes and its columns;
    addresses of starts and ends, stride of the ends by request in bytes; number of keys, whether a row's columns begin
    at its start (-1) or not (0), keys up to which a row is not scored, whether to write -inf where there are no scores;
    whether the launch is a dependent of the kernel before; CTAs; stream).
    """

    def __init__(self, key: LogitsKey) -> None:
        self.config, self.paged = key.config, key.paged
        self.registers = REGISTERS if key.box == KEY_TILE and key.heads == 64 else REGISTERS_BESIDE_MORE
        self.has_many_columns = self.config.columns >= MANY_COLUMNS
        kind = f"paged_mqa_logits_b{key.box}" if key.paged else "mqa_logits"
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
        use_pdl: Boolean,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        config, width = self.config, self.config.row_bytes
        columns = config.columns // config.accumulators
        query_rows = code_rows(q, width, (Int32(config.heads), row_count, requests), (q_head, q_row, q_request))
        key_rows = code_rows(keys, width, (page_rows, pages), (key_stride, page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(cute.ceil_div(page_rows, config.box))
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles = wgmma.swizzled_tiles(Float8E4M3FN, config.heads, config.query_stages * config.rows)
        key_tiles = wgmma.swizzled_tiles(Float8E4M3FN, config.box, config.stages * config.boxes)
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_rows, query_tiles, (config.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_rows, key_tiles, (config.box, width))
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            wgmma.swizzled_tiles(Float8E4M3FN, columns, config.query_stages * config.accumulators),
            wgmma.swizzled_tiles(Float8E4M3FN, KEY_TILE, config.stages),
            *(wgmma.make_mma(Float8E4M3FN, 1, columns) for _ in range(2)),
            RowGroups.of(requests, row_count, config.rows, ctas),
            Windows(starts, ends, end_request, limit, length(out, 1), shifts, skip),
            KeyCache(scales, page_stride, boxes, pages, limit, table, table_stride, table_columns),
            address(weights),
            stride_bytes(weights, 0),
            address(out),
            stride_bytes(out, 0),
            clean,
        )
        kernel.launch(
            grid=[ctas, 1, 1], block=[config.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=use_pdl
        )

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
        windows: Windows,
        cache: KeyCache,
        weights: Int64,
        weights_stride: Int64,
        out: Int64,
        out_stride: Int64,
        clean: Int32,
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
        producer_warp, fill_warp = config.warpgroups * 4, config.warpgroups * 5
        ends: Any = None
        if const_expr(self.paged):
            ends = ask_for_ends((warp >= producer_warp) & (warp < fill_warp), groups, windows, config.rows)
        # by consumers, which have nothing else to do yet. One arrival announces bytes, one per lane what lanes copy;
        # every warp that uses a stage releases it
        for i in range_constexpr(config.warpgroups):
            if thread == i * wgmma.WARPGROUP:
                bars.keys.initialize(1 if self.paged else 1 + WARP, 4, i, config.warpgroups)
        if thread == WARP:
            bars.queries.initialize(1 + WARP, 4 * config.warpgroups)
        if warp == 2:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if const_expr(self.paged):
            prefetch_lengths(warp, config.threads // WARP, groups, windows, cache)
        cute.arch.griddepcontrol_wait()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        scheduler = TileScheduler(
            config.rows, config.threads // WARP, self.paged, config.keys, groups, windows, smem.counts, ends
        )
        if scheduler.is_counted():
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()

        wgmma.accumulate(mma_more)
        if warp >= producer_warp:
            if const_expr(self.has_many_columns):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if warp < fill_warp:
                role = cute.arch.make_warp_uniform(warp - producer_warp)
                key_part = ptx.tensor_map(key_copy), k.iterator.toint()
                query_part = QueryCopy.of(
                    query_copy, query_source, q, query_tiles.outer, config.heads, config.row_bytes
                )
                context = scheduler, groups, windows, cache, smem, bars, (weights, weights_stride)
                producer = Producer(config, self.paged, *context, key_part, query_part)
                producer.run(role)
            elif (warp == fill_warp) & (clean != 0):
                fill = Fill(self.paged, groups, windows, out, out_stride)
                fill.run(cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
        else:
            if const_expr(self.has_many_columns):
                cute.arch.setmaxregister_increase(self.registers[1])
            lane = thread % WARP
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            own = thread % wgmma.WARPGROUP // WARP * 16 + lane // 4 + (lane & 2) * 4
            epilogue = Epilogue(config, self.paged, groups, windows, smem, out, out_stride, lane, own)
            consumer = Consumer(config, warpgroup, bars, smem, epilogue, (mma, mma_more), k, q)
            consumer.run()


# ---- key


@dataclass(frozen=True)
class LogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row: a multiple of 16, at most 64
    rows    of a group, at most 256 / heads
    paged   whether keys lie in pages
    box     keys that a copy brings, 64 or 8: pages have a multiple of it
    """

    kernel_name: ClassVar[str] = "indexer.hopper.logits"
    heads: int = 64
    rows: int = 4
    paged: bool = False
    box: int = KEY_TILE

    @property
    def config(self) -> LogitsConfig:
        return LogitsConfig(self.heads, self.rows, self.box)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "wgmma", "tma.load", "cp.async", "mbarrier", "griddepcontrol"
        return (*used, "bulk.load") if self.paged else used

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return LogitsKernel(self), fake_arguments(has_pdl=True)
