"""The warps that bring the score kernel its keys and queries, and tell the others what they are.

One warp goes through the block's share (logits_shares.py), and brings its tiles, each with a note, and the queries,
weights and windows of the groups. On Hopper every warpgroup has one, which brings it its own tiles. Codes come by bulk
tensor copies, what is not aligned for them by asynchronous ones.

Keys lie in pages, one after the other, a page's scales behind them or elsewhere. Contiguous keys are those of a single
page. What is to be known of another record format is in here and in how the products are formed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.indexer.logits_plan import END, NOTE, QUERIES, WARP, Plan
from cute_kernels.indexer.logits_shares import Part, Shares

LINE = 128
"""Bytes that L2 fetches."""


class Keys(NamedTuple):
    """Where keys are, as far as bulk tensor copies do not know it: `scales` is the address of the scale of key 0 of
    page 0, `page_boxes` the keys of a page in boxes, as a divisor, `count` the number of contiguous keys, which have
    no table."""

    scales: Any
    page_stride: Any
    page_boxes: Any
    pages: Any
    count: Any
    table: Any
    table_stride: Any
    table_columns: Any


class Walk(Shares):
    """The producers' part."""

    def __init__(self, plan: Plan, paged: bool) -> None:
        super().__init__(plan.rows, plan.threads // WARP, paged, plan.keys)
        self.plan = plan

    @cute.jit
    def run(
        self,
        role: Any,
        groups: Any,
        windows: Any,
        keys: Any,
        weights: Any,
        weights_stride: Any,
        key_copy: Any,
        query_copy: Any,
        rings: Any,
        at: Any,
    ) -> None:
        """Go through the block's share, for warpgroup number `role`. By one warp.

        key_copy     (address of the keys' descriptor, address of their stages)
        query_copy   (atom, source, target)
        """
        lane = cute.arch.lane_idx()

        def bring(part: Part, state: Any) -> Any:
            stage, phase, turn = state
            pages, boxes = self.look_up(keys, part, Int32(0))
            buffer, use = role * QUERIES + turn % QUERIES, turn // QUERIES & 1
            self.bring_queries(windows, groups, weights, weights_stride, query_copy, rings[1], at, part, buffer, use)
            if self.paged:
                stage, phase = self.bring_pages(keys, key_copy, rings[0], at, part, pages, boxes, stage, phase)
            else:
                stage, phase = self.bring_keys(keys, key_copy, rings[0], at, part, stage, phase)
            return stage, phase, turn + 1

        start = role, Int32(0), Int32(0)
        stage, phase, _ = self.each_part(role, self.plan.walkers, groups, windows, at.sums, bring, start)
        rings[0].wait_empty(stage, phase)
        if lane == 0:
            self.announce(rings[0].full(stage), at, stage, END, 0, 0, 0)
        if const_expr(not self.paged):
            cute.arch.cp_async_mbarrier_arrive_noinc(rings[0].full(stage))
        # no lane ends with copies under way
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def advance(self, stage: Any, phase: Any) -> Any:
        """To the warpgroup's next stage."""
        for _ in range_constexpr(self.plan.walkers):
            stage, phase = barriers.advance(stage, phase, self.plan.stages)
        return stage, phase

    def announce(self, full: Any, at: Any, stage: Any, group: Any, mark: Any, boxes: Any, size: Any) -> None:
        """Write a stage's note and arrive, with so many bytes to come. By one thread."""
        ptx.store_shared_128(at.notes + stage * (NOTE * 4), [Int32(group), Int32(mark), Int32(boxes), Int32(0)])
        cute.arch.mbarrier_arrive_and_expect_tx(full, size)

    @cute.jit
    def bring_queries(
        self,
        windows: Any,
        groups: Any,
        weights: Any,
        weights_stride: Any,
        query_copy: Any,
        ring: Any,
        at: Any,
        part: Any,
        buffer: Any,
        phase: Any,
    ) -> None:
        """What belongs to the rows of a part's group, into a buffer."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        request, first_row = part.request, part.first_row
        rows = cutlass.min(Int32(plan.rows), groups.count - first_row)
        copy, source, target = query_copy[:3]
        full = ring.full(buffer)
        ring.wait_empty(buffer, phase)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * (plan.heads * plan.row_bytes))
        for i in range_constexpr(plan.rows):
            if i < rows:
                place = target[None, buffer * plan.rows + i]
                cute.copy(copy, source[None, 0, 0, first_row + i, request], place, tma_bar_ptr=full)
        row0 = request * groups.count + first_row
        for i in range_constexpr(-(-plan.columns // WARP)):
            number = i * WARP + lane
            row, head = number // plan.heads, number % plan.heads
            if row < rows:
                place = at.weights + (buffer * plan.columns + number) * 4
                ptx.copy_async_32(place, weights + Int64(row0 + row) * weights_stride + Int64(head) * 4)
        self.bring_scales(query_copy, at, request, first_row, rows, buffer)
        if lane < rows:
            place = at.windows + (buffer * 2 * plan.rows + lane) * 4
            ptx.copy_async_32(place + plan.rows * 4, windows.end_address(request, first_row + lane))
            if const_expr(not self.paged):
                ptx.copy_async_32(place, windows.start_address(first_row + lane))
        cute.arch.cp_async_mbarrier_arrive_noinc(full)

    def bring_scales(self, query_copy: Any, at: Any, request: Any, first_row: Any, rows: Any, buffer: Any) -> None:
        """Of the queries: FP8 ones have them in their weights."""

    @cute.jit
    def bring_keys(self, keys: Any, key_copy: Any, ring: Any, at: Any, part: Any, stage: Any, phase: Any) -> Any:
        """The warpgroup's tiles of a part of contiguous keys, which are those of one page; scales may lie anywhere.
        Returns its next stage and phase."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        copy, target = key_copy
        key = part.first_key + part.own * plan.keys
        scale = keys.scales + Int64(key + lane) * 4
        for tile in cutlass.range(part.own, part.count, part.step, unroll=1):
            ring.wait_empty(stage, phase)
            full = ring.full(stage)
            if lane == 0:
                self.announce(full, at, stage, part.group, part.mark(tile), 1, plan.keys * plan.row_bytes)
                ptx.copy_bulk_3d(target + stage * (plan.keys * plan.row_bytes), copy, (0, key, 0), full.toint())
            place = at.scales + (stage * plan.keys + lane) * 4
            for i in range_constexpr(0, plan.keys, WARP):
                ptx.copy_async_32(place + i * 4, scale + i * 4, key + lane + i < keys.count)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
            key, scale = key + part.step * plan.keys, scale + part.step * plan.keys * 4
            stage, phase = self.advance(stage, phase)
        return stage, phase

    @cute.jit
    def bring_pages(
        self, keys: Any, key_copy: Any, ring: Any, at: Any, part: Any, pages: Any, boxes: Any, stage: Any, phase: Any
    ) -> Any:
        """As bring_keys, of keys in pages whose scales follow each other there; the pages of the part's first boxes
        have been looked up."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        copy, target = key_copy
        # a lane looks up every `step`th tile's boxes only
        per_look = WARP // plan.boxes
        taken = (part.count - part.own + part.step - 1) // part.step
        for start in cutlass.range(0, taken, per_look, unroll=1):
            if start > 0:
                pages, boxes = self.look_up(keys, part, start)
            are_there = cute.arch.vote_ballot_sync(pages >= 0)
            for i in cutlass.range(cutlass.min(Int32(per_look), taken - start), unroll=1):
                tile = part.own + (start + i) * part.step
                lead = i * plan.boxes
                full = ring.full(stage)
                if lane == 0:
                    mask = are_there >> lead & ((1 << plan.boxes) - 1)
                    ring.wait_empty(stage, phase)
                    size = cute.arch.popc(mask) * (plan.box * (plan.row_bytes + 4))
                    self.announce(full, at, stage, part.group, part.mark(tile), mask, size)
                for j in range_constexpr(plan.boxes):
                    page, box = (cute.arch.shuffle_sync(held, lead + j) for held in (pages, boxes))
                    if (lane == 0) & (page >= 0):
                        number = stage * plan.boxes + j
                        codes, scales = (
                            target + number * (plan.box * plan.row_bytes),
                            at.scales + number * (plan.box * 4),
                        )
                        source = keys.scales + Int64(page) * keys.page_stride + Int64(box) * (plan.box * 4)
                        ptx.copy_bulk_3d(codes, copy, (0, box * plan.box, page), full.toint(), is_read_once=True)
                        ptx.copy_bulk(scales, source, plan.box * 4, full.toint())
                stage, phase = self.advance(stage, phase)
        return stage, phase

    @cute.jit
    def look_up(self, keys: Any, part: Any, start: Any) -> tuple[Any, Any]:
        """Page, negative if there is none, and place in it of a box for each lane: those of the warpgroup's tiles from
        its number `start` on. Nothing is read beyond the keys' end."""
        plan = self.plan
        page, place = Int32(0), Int32(0)
        if const_expr(self.paged):
            number = cute.arch.lane_idx()
            tile = part.own + (start + number // plan.boxes) * part.step
            box = part.first_key // plan.box + tile * plan.boxes + number % plan.boxes
            column, place = divmod(box, keys.page_boxes)
            is_wanted = (tile < part.count) & (box * plan.box < part.stop) & (column < keys.table_columns)
            address = keys.table + Int64(part.request) * keys.table_stride + Int64(column) * 4
            page = ptx.load_global_s32_where(is_wanted, address, is_shared=True)
            page = page if page < keys.pages else Int32(-1)
        return page, place

    @cute.jit
    def warm(self, warp: Any, keys: Any, requests: Any) -> None:
        """Have L2 fetch the block table while the lengths are on their way: of a call with few requests, all of it. By
        all warps, of which the last asks for a line per lane."""
        block, _, _ = cute.arch.block_idx()
        per_row = cute.ceil_div(keys.table_columns, LINE // 4)
        number = block * WARP + cute.arch.lane_idx()
        row, line = number // per_row, number % per_row
        address = keys.table + Int64(row) * keys.table_stride + Int64(line) * LINE
        ptx.prefetch_l2(address, (row < requests) & (warp == self.warps - 1))


class ScaledWalk(Walk):
    """A walk that brings scales of queries, too, a word each, of MXFP4. The fourth element of what it knows about
    queries: address of the scales of the first head, and strides in bytes, by request and row."""

    def bring_scales(self, query_copy: Any, at: Any, request: Any, first_row: Any, rows: Any, buffer: Any) -> None:
        plan = self.plan
        source, by_request, by_row = query_copy[3]
        source = source + Int64(request) * by_request + Int64(first_row) * by_row
        lane = cute.arch.lane_idx()
        for i in range(-(-plan.columns // WARP)):
            number = i * WARP + lane
            row, head = number // plan.heads, number % plan.heads
            place = at.head_scales + (buffer * plan.scale_rows + number) * 4
            ptx.copy_async_32(place, source + Int64(row) * by_row + Int64(head) * 4, row < rows)
