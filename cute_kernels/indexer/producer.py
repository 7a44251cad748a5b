# SPDX-License-Identifier: Apache-2.0
"""Producer warps of Hopper's and Blackwell's score kernels: they bring keys and queries, and say what they are.

One warp goes through the CTA's share (params.TileScheduler). For every tile of keys it fills a stage of the ring of
keys: codes, scales and a header; for every group a stage of the ring of queries: codes, weights and windows. On Hopper
every consumer warpgroup has a producer warp of its own, which brings its tiles. Codes come by TMA, what is not aligned
for it by cp.async.

Keys lie in pages, one after the other, a page's scales behind them or elsewhere. Contiguous keys are those of a single
page.

    ring of keys       full: one arrival with the bytes to come and, of contiguous keys, one of every lane, whose
                       scales come by cp.async. empty: one of every warp that reads the stage
    ring of queries    full: one arrival with the bytes to come, one of every lane. empty: one of every warp of the
                       consumers; where all consumers share it the last producer warp fills it, and arrives for
                       consumers that have no tile of the group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync

from cute_kernels.dsl import barriers, ptx
from cute_kernels.indexer.params import (
    KEY_TILE,
    LAST_OF_GROUP,
    WARP,
    KeyCache,
    RowGroups,
    TileScheduler,
    Windows,
    WorkTile,
    divide,
)

QUERY_STAGES = 2
"""Groups whose queries a consumer has in shared memory: the one in use, and the next."""

SHARED_QUERY_STAGES = 4
"""The same of all consumers of a CTA together, where they share them: a power of two. A consumer that keeps its tile
until the next one's queries are there (hopper/logits.py, two accumulators) may wait for those of as many work tiles
further on as there are consumers, so these must be fewer."""

HEADER = 4
"""int32 that say what a stage holds: the group, or END where a consumer has no more tiles; the first key, a multiple of
the tile, plus LAST_OF_GROUP and LAST_OF_ALL; which TMA boxes of keys exist, a bit each; the turn of the work tile,
where consumers share queries."""

END = -1

LINE = 128
"""Bytes that L2 fetches."""

MOST_LINES = 128
"""Of a request's block table that are fetched ahead."""


def shared_query_stage(turn: Any) -> Any:
    """Stage of a work tile's queries, and their phase there."""
    return turn & (SHARED_QUERY_STAGES - 1), divide(turn, SHARED_QUERY_STAGES) & 1


class KeyTile(NamedTuple):
    """A tile in the ring of keys: its stage, and what its header says."""

    stage: Any
    group: Any
    tagged_key: Any
    boxes: Any
    turn: Any = None

    @property
    def first_key(self) -> Any:
        return self.tagged_key & -KEY_TILE


@cute.jit
def wait_key_tile(ring: barriers.Ring, headers: Any, stage: Any, phase: Any) -> KeyTile:
    """What comes in a stage, when it is there. By a consumer."""
    ring.wait_full(stage, phase)
    group, *others = ptx.load_shared_128(headers + stage * (HEADER * 4))
    return KeyTile(stage, cute.arch.make_warp_uniform(group), *others)


@cute.jit
def release(bars: Any, tile: KeyTile, query_stage: Any, lane: Any) -> None:
    """Of a tile whose header, scales and keys have been used, and of the queries if it was the last with them. By a
    consumer warp."""
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(bars.keys.empty(tile.stage))
        if tile.tagged_key & LAST_OF_GROUP != 0:
            cute.arch.mbarrier_arrive(bars.queries.empty(query_stage))


@cute.jit
def advance(stage: Any, phase: Any, config: cutlass.Constexpr) -> Any:
    """To the next stage of the same producer warp."""
    following = stage + config.producers
    is_end = following >= config.stages
    return (following - config.stages if is_end else following), (phase ^ 1 if is_end else phase)


def code_rows(address: Any, row_bytes: int, shape: tuple[Any, ...], strides: tuple[Any, ...]) -> Any:
    """Rows of codes in memory; the codes of a row are the second axis."""
    pointer = cute.make_ptr(Float8E4M3FN, address, cutlass.AddressSpace.gmem, assumed_align=16)
    first, *others = (cute.assume(stride, divby=16) for stride in strides)
    layout = cute.make_layout((shape[0], row_bytes, *shape[1:]), stride=(first, 1, *others))
    return cute.make_tensor(pointer, layout)


class QueryCopy(NamedTuple):
    """The TMA copy of the queries of one row: atom, what it reads, what it writes."""

    atom: Any
    source: Any
    target: Any

    @classmethod
    def of(cls, atom: Any, source: Any, tile: Any, tiles: Any, rows: int, row_bytes: int) -> QueryCopy:
        """Of `rows` heads to each of the `tiles` in shared memory that begin with `tile`."""
        target = cute.make_tensor(tile.iterator, tiles)
        tail = [None] * (cute.rank(source) - 2)
        grid = cute.local_tile(source, (rows, row_bytes), (None, None, *tail))
        write, read = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), cute.group_modes(grid, 0, 2)
        )
        return cls(atom, read, write)


@dataclass(frozen=True)
class Producer:
    """A producer warp.

    config           rows, heads, columns, keys (of a tile), box, boxes, row_bytes, stages, producers, q_scale_words
    smem             headers, scales, weights, windows and, with q_scales, q_scales
    bars             keys and queries: rings
    weights          address, stride of rows in bytes
    key_copy         address of the TMA descriptor, address of the stages of keys
    q_scales         None, or of MXFP4: address of the first head's, strides in bytes by request and row
    scale_preparer   None, or what Hopper's MXFP4 producers do to scales that have come
    """

    config: Any
    paged: bool
    scheduler: TileScheduler
    groups: RowGroups
    windows: Windows
    cache: Any
    smem: Any
    bars: Any
    weights: tuple[Any, Any]
    key_copy: tuple[Any, Any]
    query_copy: QueryCopy
    q_scales: tuple[Any, Any, Any] | None = None
    scale_preparer: Any = None

    @property
    def lanes_copy_keys(self) -> bool:
        """Whether all lanes arrive when a stage's keys have come, since they copy some of what belongs to these."""
        return not self.paged

    @cute.jit
    def run(self, consumer: Any) -> None:
        """Bring all that consumer number `consumer` of the CTA uses. By one warp."""
        lane = cute.arch.lane_idx()

        def bring(work_tile: WorkTile, state: Any) -> Any:
            stage, phase, turn = state
            pages, boxes = self.load_pages(work_tile, Int32(0))
            if const_expr(not shared):
                query_stage, use = consumer * QUERY_STAGES + turn % QUERY_STAGES, turn // QUERY_STAGES & 1
                self.copy_queries_async(work_tile, query_stage, use)
            elif brings_queries:
                query_stage, use = shared_query_stage(work_tile.turn)
                self.copy_queries_async(work_tile, query_stage, use)
                # consumers without a tile of the work tile will not release its queries
                absent = self.config.producers - work_tile.count
                if (absent > 0) & (lane == 0):
                    cute.arch.mbarrier_arrive(self.bars.queries.empty(query_stage), arrive_count=absent * 4)
            stage, phase = self.copy_tiles_async(work_tile, pages, boxes, stage, phase)
            return stage, phase, turn + 1

        start = consumer, Int32(0), Int32(0)
        shared = const_expr(self.config.shares_queries)
        brings_queries = (consumer == self.config.producers - 1) & shared
        stage, phase, _ = self.scheduler.for_each(consumer, self.config.producers, bring, start, brings_queries)
        self.bars.keys.wait_empty(stage, phase)
        if lane == 0:
            self.publish_header(stage, END, 0, 0, 0, 0)
        if const_expr(self.lanes_copy_keys):
            cute.arch.cp_async_mbarrier_arrive_noinc(self.bars.keys.full(stage))
        # no lane ends with copies under way
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    def publish_header(self, stage: Any, group: Any, tagged_key: Any, boxes: Any, turn: Any, size: Any) -> None:
        """Write a stage's header and arrive, with so many bytes to come. By one thread."""
        header = [Int32(group), Int32(tagged_key), Int32(boxes), Int32(turn)]
        full = self.bars.keys.full(stage)
        ptx.store_shared_128(self.smem.headers + stage * (HEADER * 4), header)
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    @cute.jit
    def copy_queries_async(self, work_tile: WorkTile, query_stage: Any, phase: Any) -> None:
        """What belongs to the rows of a work tile's group, into a stage of queries."""
        config, smem, ring = self.config, self.smem, self.bars.queries
        if const_expr(self.scale_preparer is not None):
            self.scale_preparer.catch_up_unless(ring.is_empty(query_stage, phase))
        lane = cute.arch.lane_idx()
        request, first_row = work_tile.request, work_tile.first_row
        rows = cutlass.min(Int32(config.rows), self.groups.count - first_row)
        copy, source, target = self.query_copy
        full = ring.full(query_stage)
        ring.wait_empty(query_stage, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * (config.heads * config.row_bytes))
        for i in range_constexpr(config.rows):
            if i < rows:
                place = target[None, query_stage * config.rows + i]
                cute.copy(copy, source[None, 0, 0, first_row + i, request], place, tma_bar_ptr=full)
        row0 = request * self.groups.count + first_row
        weights, weights_stride = self.weights
        for i in range_constexpr(-(-config.columns // WARP)):
            number = i * WARP + lane
            row, head = number // config.heads, number % config.heads
            if row < rows:
                place = smem.weights + (query_stage * config.columns + number) * 4
                ptx.copy_async_32(place, weights + Int64(row0 + row) * weights_stride + Int64(head) * 4)
        if const_expr(self.q_scales is not None):
            self.copy_q_scales_async(request, first_row, rows, query_stage)
        if lane < rows:
            place = smem.windows + (query_stage * 2 * config.rows + lane) * 4
            ptx.copy_async_32(place + config.rows * 4, self.windows.end_address(request, first_row + lane))
            if const_expr(not self.paged):
                ptx.copy_async_32(place, self.windows.start_address(first_row + lane))
        cute.arch.cp_async_mbarrier_arrive_noinc(full)

    def copy_q_scales_async(self, request: Any, first_row: Any, rows: Any, query_stage: Any) -> None:
        """Scales of the queries of MXFP4, a word for each head. FP8 queries have theirs in their weights."""
        config = self.config
        assert self.q_scales is not None
        source, by_request, by_row = self.q_scales
        source = source + Int64(request) * by_request + Int64(first_row) * by_row
        lane = cute.arch.lane_idx()
        for i in range(-(-config.columns // WARP)):
            number = i * WARP + lane
            row, head = number // config.heads, number % config.heads
            place = self.smem.q_scales + (query_stage * config.q_scale_words + number) * 4
            ptx.copy_async_32(place, source + Int64(row) * by_row + Int64(head) * 4, row < rows)

    @cute.jit
    def copy_tiles_async(self, work_tile: WorkTile, pages: Any, boxes: Any, stage: Any, phase: Any) -> Any:
        """The consumer's tiles of a work tile, of whose first boxes the pages have been loaded. Returns its next stage
        and phase."""
        if const_expr(self.paged):
            stage, phase = self.copy_pages_async(work_tile, pages, boxes, stage, phase)
        else:
            stage, phase = self.copy_keys_async(work_tile, stage, phase)
        return stage, phase

    @cute.jit
    def copy_keys_async(self, work_tile: WorkTile, stage: Any, phase: Any) -> Any:
        """As copy_tiles_async, of contiguous keys, which are those of one page; scales may lie anywhere."""
        config, ring = self.config, self.bars.keys
        lane = cute.arch.lane_idx()
        copy, target = self.key_copy
        key = work_tile.first_key + work_tile.own * config.keys
        scale = self.cache.scales + Int64(key + lane) * 4
        for tile in cutlass.range(work_tile.own, work_tile.count, work_tile.step, unroll=1):
            ring.wait_empty(stage, phase)
            full = ring.full(stage)
            if lane == 0:
                size = config.keys * config.row_bytes
                self.publish_header(stage, work_tile.group, work_tile.tagged_key(tile), 1, work_tile.turn, size)
                ptx.copy_bulk_3d(target + stage * size, copy, (0, key, 0), full.toint())
            place = self.smem.scales + (stage * config.keys + lane) * 4
            for i in range_constexpr(0, config.keys, WARP):
                ptx.copy_async_32(place + i * 4, scale + i * 4, key + lane + i < self.cache.count)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
            key, scale = key + work_tile.step * config.keys, scale + work_tile.step * config.keys * 4
            stage, phase = advance(stage, phase, config)
            if const_expr(self.scale_preparer is not None):
                self.scale_preparer.follow()
        return stage, phase

    @cute.jit
    def copy_pages_async(self, work_tile: WorkTile, pages: Any, boxes: Any, stage: Any, phase: Any) -> Any:
        """As copy_tiles_async, of keys in pages whose scales follow each other there."""
        config, ring = self.config, self.bars.keys
        lane = cute.arch.lane_idx()
        copy, target = self.key_copy
        # a lane loads the pages of every `step`th tile's boxes only
        per_load = WARP // config.boxes
        taken = work_tile.taken
        for start in cutlass.range(0, taken, per_load, unroll=1):
            if start > 0:
                pages, boxes = self.load_pages(work_tile, start)
            are_there = cute.arch.vote_ballot_sync(pages >= 0)
            for i in cutlass.range(cutlass.min(Int32(per_load), taken - start), unroll=1):
                tile = work_tile.own + (start + i) * work_tile.step
                lead = i * config.boxes
                full = ring.full(stage)
                if lane == lead:
                    mask = are_there >> lead & ((1 << config.boxes) - 1)
                    ring.wait_empty(stage, phase)
                    size = cute.arch.popc(mask) * (config.box * (config.row_bytes + 4))
                    self.publish_header(stage, work_tile.group, work_tile.tagged_key(tile), mask, work_tile.turn, size)
                # lanes wait in the order of their tiles, and each copies the box whose page it has
                cute.arch.sync_warp()
                if (lane >= lead) & (lane < lead + config.boxes) & (pages >= 0):
                    number = stage * config.boxes + (lane - lead)
                    codes = target + number * (config.box * config.row_bytes)
                    scales = self.smem.scales + number * (config.box * 4)
                    source = self.cache.scales + Int64(pages) * self.cache.page_stride + Int64(boxes) * (config.box * 4)
                    at = 0, boxes * config.box, pages
                    ptx.copy_bulk_3d(codes, copy, at, full.toint(), is_read_once=True)
                    ptx.copy_bulk(scales, source, config.box * 4, full.toint())
                stage, phase = advance(stage, phase, config)
                if const_expr(self.scale_preparer is not None):
                    self.scale_preparer.follow()
        return stage, phase

    @cute.jit
    def load_pages(self, work_tile: WorkTile, start: Any) -> tuple[Any, Any]:
        """Page, negative if there is none, and place in it of a TMA box for each lane: those of the consumer's tiles
        from its number `start` on. Nothing is read beyond the keys' end."""
        page, place = Int32(0), Int32(0)
        if const_expr(self.paged):
            page, place = self.cache.locate(work_tile.request, *self.own_box(work_tile, start))
        return page, place

    @cute.jit
    def own_box(self, work_tile: WorkTile, start: Any) -> tuple[Any, Any]:
        """A lane's TMA box among those of the consumer's tiles from its number `start` on: the number of the box, and
        whether there is one."""
        config, number = self.config, cute.arch.lane_idx()
        tile = work_tile.own + (start + divide(number, config.boxes)) * work_tile.step
        box = divide(work_tile.first_key, config.box) + tile * config.boxes + number % config.boxes
        return box, (tile < work_tile.count) & (box * config.box < work_tile.stop)


@cute.jit
def ask_for_ends(is_wanted: Any, groups: RowGroups, windows: Windows, rows: cutlass.Constexpr) -> list[Any]:
    """TileScheduler.ends, asked for when the kernel ahead has ended, where they are wanted. What a warp does next need
    not wait for them."""
    ends = [Int32(-1)] * rows
    if is_wanted:
        cute.arch.griddepcontrol_wait()
        ends = windows.load_ends(groups, cute.arch.lane_idx(), rows)
    return ends


@cute.jit
def prefetch_lengths(warp: Any, warps: cutlass.Constexpr, groups: RowGroups, windows: Windows, cache: KeyCache) -> None:
    """Have L2 fetch lengths and, of as many requests as there are CTAs, block tables as far as they say of MOST_LINES *
    32 pages: wide tables of many requests would push keys out of it. That reads nothing, so the kernel before may still
    be writing them. By all `warps` warps, of which the last asks."""
    if warp == warps - 1:
        (cta, _, _), lane = cute.arch.block_idx(), cute.arch.lane_idx()
        number = cta * WARP + lane
        ptx.prefetch_l2(windows.end_address(number, 0), number < groups.requests)
        lines = cutlass.min(cute.ceil_div(cache.table_columns, LINE // 4), MOST_LINES)
        table = cache.table + Int64(cta) * cache.table_stride
        for line in cutlass.range(lane, lines, WARP, unroll=1):
            ptx.prefetch_l2(table + Int64(line) * LINE, cta < groups.requests)
