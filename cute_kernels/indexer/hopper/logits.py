# SPDX-License-Identifier: Apache-2.0
"""FP8 scores on Hopper (mqa_logits, paged_mqa_logits): e4m3 products by wgmma, heads summed in registers.

    warps 0 ..     4 consumer warpgroups in 2 or 4 teams: wgmma, epilogue; each team has every second (fourth) tile of
                   the CTA, and the two warpgroups of a team share the tile: 64 of its keys each, or half of the rows
    then 2 or 4    producer warps, one for each team: keys (producer.py)
    then 1         query warp: queries of all teams (producer.py)
    then 1         fill warp: writes -inf where a row sees no key, if that is wanted (params.Fill)

    keys      gmem --TMA--> ring of keys [stages][keys, 128 bytes] --------------+
                                                                                 +--wgmma--> [64 keys, columns] in fp32
    queries   gmem --TMA--> ring of queries [query stages][columns, 128 bytes] --+              | relu, weights, sums
    scales    gmem ----> ring of keys                                                           v
    weights   gmem ----> ring of queries                               scores, one key and every second row a lane

A warpgroup's columns are the heads of its rows. It multiplies, waits, adds up, and only then turns to the next tile:
other warpgroups keep the tensor cores busy meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer.hopper.epilogue import Epilogue, RowState
from cute_kernels.indexer.params import (
    COUNTERS,
    KEY_TILE,
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
    QUERY_STAGES,
    Producer,
    QueryCopy,
    advance,
    code_rows,
    prefetch_lengths,
    release,
    wait_key_tile,
)
from cute_kernels.runtime.compile import KernelKey


class Shape(NamedTuple):
    """How the warpgroups of a CTA share its work.

    teams       take the CTA's tiles in turns
    halves      of a tile of 128 keys, one for each warpgroup of a team; 1: the tile has 64 keys
    parts       of the group's rows, one for each warpgroup of a team
    stages      of the ring of keys
    registers   per thread, of producer, query and fill warps and of consumers, where they have different ones: together
                they have what they were launched with, or a warpgroup waits for ever
    """

    teams: int
    halves: int
    parts: int
    stages: int
    registers: tuple[int, ...] = ()


SHAPES = {
    1: Shape(4, 1, 1, 12),
    2: Shape(2, 2, 1, 6, (64, 104)),
    4: Shape(2, 1, 2, 8, (64, 104)),
}
"""By the rows of a group: three take the kernel of four. Why so: perf/notes/logits.md."""


@dataclass(frozen=True)
class LogitsConfig:
    """Sizes of one kernel: `heads` of a query row, at most `rows` of them in a group, keys copied by TMA boxes of
    `box`."""

    heads: int
    rows: int
    box: int

    row_bytes: ClassVar[int] = INDEX_DIM
    shares_queries: ClassVar[bool] = True
    query_stages: ClassVar[int] = QUERY_STAGES

    @property
    def shape(self) -> Shape:
        return SHAPES[self.rows]

    @property
    def keys(self) -> int:
        """Of a tile."""
        return KEY_TILE * self.shape.halves

    @property
    def columns(self) -> int:
        """Of a tile's products."""
        return self.heads * self.rows

    @property
    def parts(self) -> int:
        """Of a group's rows."""
        return self.shape.parts

    @property
    def part_columns(self) -> int:
        """Of a warpgroup's products."""
        return self.columns // self.parts

    @property
    def team_warpgroups(self) -> int:
        return self.shape.halves * self.shape.parts

    @property
    def warpgroups(self) -> int:
        """Of consumers."""
        return self.shape.teams * self.team_warpgroups

    @property
    def producers(self) -> int:
        """Warps, one for each team."""
        return self.shape.teams

    @property
    def stages(self) -> int:
        """Of the ring of keys. A stage is always of the same team."""
        return self.shape.stages

    @property
    def warps_beside(self) -> int:
        """Producer warps, the query warp and the fill warp."""
        return self.producers + 2

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
        return round_up(small, 1024) + (self.stages * self.keys + self.query_stages * self.columns) * INDEX_DIM


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

    team, half   the warpgroup's, and which 64 keys of a tile are its; the epilogue knows its part of the rows
    mma          the product, and the one that adds
    k, q         addresses of the stages
    k_layout     [64 keys, 128, 1]
    q_layout     [columns of a part, 128, 1]
    """

    config: LogitsConfig
    team: Any
    half: Any
    bars: Bars
    smem: Smem
    epilogue: Epilogue
    mma: tuple[Any, Any]
    k: Any
    q: Any
    k_layout: Any
    q_layout: Any

    @cute.jit
    def run(self) -> None:
        """Score the team's tiles."""
        config, bars, epilogue = self.config, self.bars, self.epilogue
        products = wgmma.accumulators(self.mma[0], KEY_TILE, config.part_columns)
        rows: RowState = epilogue.allocate()
        stage, phase, turn, query_stage, queries = self.team, Int32(0), Int32(-1), Int32(0), Int32(0)
        tile = wait_key_tile(bars.keys, self.smem.headers, stage, phase)
        while tile.group >= 0:
            if tile.turn != turn:
                turn = self.skip_queries(turn + 1, tile.turn)
                query_stage = self.wait_queries(turn)
                queries = self.q + (query_stage * config.parts + epilogue.part) * (config.part_columns * INDEX_DIM)
                epilogue.load_rows(rows, tile.group, query_stage)
            half = stage * config.shape.halves + self.half
            k = wgmma.uniform_tile(self.k + half * (KEY_TILE * INDEX_DIM), self.k_layout, Float8E4M3FN)
            q = wgmma.uniform_tile(queries, self.q_layout, Float8E4M3FN)
            wgmma.multiply(*self.mma, products, 0, k, q, 0)
            wgmma.wait(0)
            sums = epilogue.add_heads(products, rows.weights)
            scale = ptx.load_shared_f32(self.smem.scales + (half * KEY_TILE + epilogue.own) * 4)
            if const_expr(config.box < KEY_TILE):
                # takes no register beside the products
                boxes = ptx.load_shared_s32(self.smem.headers + stage * (HEADER * 4) + 8)
                epilogue.store(sums, rows, tile._replace(boxes=boxes), scale, half=self.half)
            else:
                epilogue.store(sums, rows, tile, scale, half=self.half)
            release(bars, tile, query_stage, epilogue.lane)
            stage, phase = advance(stage, phase, config)
            tile = wait_key_tile(bars.keys, self.smem.headers, stage, phase)
        self.skip_queries(turn + 1, tile.turn)

    @cute.jit
    def skip_queries(self, turn: Any, until: Any) -> Any:
        """Release the queries of the CTA's work tiles `turn` to `until` - 1, of which the team has no tiles. Returns
        `until`."""
        for skipped in cutlass.range(turn, until, 1, unroll=1):
            query_stage = self.wait_queries(skipped)
            cute.arch.sync_warp()
            if self.epilogue.lane == 0:
                cute.arch.mbarrier_arrive(self.bars.queries.empty(query_stage))
        return until

    @cute.jit
    def wait_queries(self, turn: Any) -> Any:
        """The stage with the queries of the CTA's work tile number `turn`, when they are there."""
        query_stage = turn % QUERY_STAGES
        self.bars.queries.wait_full(query_stage, turn // QUERY_STAGES & 1)
        return query_stage


# ---- kernel


class LogitsKernel:
    """Entry point: (weights, out;
    address of the queries and their strides in bytes, by request, row and head; requests, rows of a request;
    addresses of key 0 and its scale, strides of keys and pages in bytes; keys of a page, pages; address of the block
    table, its stride in bytes and its columns;
    addresses of starts and ends, stride of the ends by request in bytes; number of keys, whether a row's columns begin
    at its start (-1) or not (0), keys up to which a row is not scored, whether to write -inf where there are no scores,
    CTAs; stream).
    """

    def __init__(self, key: LogitsKey) -> None:
        self.config, self.paged = key.config, key.paged
        self.box = key.box if key.paged else self.config.keys
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
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        config, width = self.config, self.config.row_bytes
        query_rows = code_rows(q, width, (Int32(config.heads), row_count, requests), (q_head, q_row, q_request))
        key_rows = code_rows(keys, width, (page_rows, pages), (key_stride, page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(cute.ceil_div(page_rows, config.box))
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles = wgmma.swizzled_tiles(Float8E4M3FN, config.heads, config.query_stages * config.rows)
        key_tiles = wgmma.swizzled_tiles(Float8E4M3FN, self.box, config.stages * (config.keys // self.box))
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_rows, query_tiles, (config.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_rows, key_tiles, (self.box, width))
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            key_tiles,
            wgmma.swizzled_tiles(Float8E4M3FN, config.part_columns, 1),
            wgmma.swizzled_tiles(Float8E4M3FN, KEY_TILE, 1),
            *(wgmma.make_mma(Float8E4M3FN, 1, config.part_columns) for _ in range(2)),
            RowGroups.of(requests, row_count, config.rows, ctas),
            Windows(starts, ends, end_request, limit, length(out, 1), shifts, skip),
            KeyCache(scales, page_stride, boxes, pages, limit, table, table_stride, table_columns),
            address(weights),
            stride_bytes(weights, 0),
            address(out),
            stride_bytes(out, 0),
            clean,
        )
        kernel.launch(grid=[ctas, 1, 1], block=[config.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        query_copy: cute.CopyAtom,
        query_source: cute.Tensor,
        key_copy: cute.CopyAtom,
        query_tiles: cute.ComposedLayout,
        key_tiles: cute.ComposedLayout,
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
            for layout in (key_tiles, query_tiles)
        )
        registers = config.shape.registers
        producer_warp = config.warpgroups * 4
        query_warp = producer_warp + config.producers
        fill_warp = query_warp + 1
        if warp == producer_warp:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if thread == fill_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every warp that uses a stage releases it
            bars.keys.initialize(1 if self.paged else 1 + WARP, 4 * config.team_warpgroups)
            bars.queries.initialize(1 + WARP, 4 * config.warpgroups)
        if const_expr(self.paged):
            prefetch_lengths(warp, config.threads // WARP, groups, windows, cache)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        scheduler = TileScheduler(
            config.rows, config.threads // WARP, self.paged, config.keys, groups, windows, smem.counts
        )
        if groups.total() > WARP:
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()

        wgmma.overwrite(mma)
        wgmma.accumulate(mma_more)
        if warp >= producer_warp:
            if const_expr(len(registers) > 0):
                cute.arch.setmaxregister_decrease(registers[0])
            if warp < fill_warp:
                role = cute.arch.make_warp_uniform(warp - producer_warp)
                key_part = ptx.tensor_map(key_copy), k.iterator.toint()
                query_part = QueryCopy.of(
                    query_copy, query_source, q, query_tiles.outer, config.heads, config.row_bytes
                )
                context = scheduler, groups, windows, cache, smem, bars, (weights, weights_stride)
                producer = Producer(config, self.paged, *context, key_part, query_part)
                if warp < query_warp:
                    producer.run(role)
                else:
                    producer.run_queries()
            elif (warp == fill_warp) & (clean != 0):
                fill = Fill(self.paged, groups, windows, out, out_stride)
                fill.run(cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
        else:
            if const_expr(len(registers) > 0):
                cute.arch.setmaxregister_increase(registers[1])
            lane = thread % WARP
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            team, member = warpgroup // config.team_warpgroups, warpgroup % config.team_warpgroups
            half = member if const_expr(config.shape.halves > 1) else 0
            part = member if const_expr(config.parts > 1) else 0
            own = thread % wgmma.WARPGROUP // WARP * 16 + lane // 4 + (lane & 2) * 4
            epilogue = Epilogue(config, self.paged, groups, windows, smem, out, out_stride, lane, own, part)
            places = k.iterator.toint(), q.iterator.toint()
            consumer = Consumer(
                config, team, half, bars, smem, epilogue, (mma, mma_more), *places, key_layout, query_layout
            )
            consumer.run()


# ---- key


@dataclass(frozen=True)
class LogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row: a multiple of 16, at most 64
    rows    of a group: 1, 2 or 4
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
        return LogitsKernel(self), fake_arguments()
