"""The scout of Blackwell's decode kernel: finds out which rows of the caches a tile is made of; and the warps that have
them copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.decode_sm100_plan import (
    CODES_BYTES,
    END,
    FIRST,
    GATHERED,
    HEADING,
    HEADS,
    KEYS,
    LAST,
    ROPE_BYTES,
    ROW_BYTES,
    SECOND,
    Barriers,
    Places,
    raw_offset,
    rope_offset,
)
from cute_kernels.sparse_mla.params import Query, TileScheduler

SCALE_BYTES = FP8_DS_MLA.scale_bytes
LINE = 128

LIST, COLUMN, LIST_END, NEXT_COLUMN, NEXT_END, BATCH, TOKEN, WORDS = range(8)
"""Of a walk: which list the tile is of, its first column, the end of the item's columns in that list; the same two of
the second list, while the walk is in the first; the item's batch and token."""


@dataclass(frozen=True)
class Scout:
    """A walk over the tiles of a block's items, by a warp. Behind the last item comes one tile marked END. Lane i has
    keys i and 32 + i.

    caches, lists   two of each
    pitches         of each cache, from page to page in rows of the tensor that copies gather from
    """

    second: str
    items: TileScheduler
    caches: Any
    pitches: Any
    lists: Any
    queries: Query

    @cute.jit
    def run(self, lane: Any, ready: Barriers, at: Places) -> None:
        """Tell of every tile."""
        walk, asked = (cute.make_rmem_tensor((count,), Int32) for count in (WORDS, 2))
        item = self.items.first
        self.enter(walk, item, lane)
        self.look(walk, asked, lane)
        tile, mark, is_first = Int32(0), Int32(0), Int32(FIRST)
        while mark & END == 0:
            is_last = self.is_last(walk)
            mark = is_first | (Int32(LAST) if is_last else Int32(0)) | walk[LIST] * SECOND
            if item >= self.items.end:
                mark = Int32(END)
            heading = mark, item
            is_first = Int32(FIRST) if is_last else Int32(0)
            rows, scales, is_there = self.locate(walk, asked, lane)
            if is_last:
                item = item + self.items.step
                self.enter(walk, item, lane)
            else:
                self.step(walk)
            # on their way while this tile is told of
            self.look(walk, asked, lane)
            self.tell(heading, rows, scales, is_there, tile, lane, ready, at)
            tile = tile + 1

    @cute.jit
    def is_last(self, walk: Any) -> Any:
        """Whether no tile of the item comes behind this one."""
        return walk[COLUMN] + KEYS >= walk[LIST_END] and walk[NEXT_COLUMN] >= walk[NEXT_END]

    @cute.jit
    def step(self, walk: Any) -> None:
        """To the item's next tile."""
        walk[COLUMN] = walk[COLUMN] + KEYS
        if walk[COLUMN] >= walk[LIST_END]:
            self.go_to_second(walk)

    @cute.jit
    def go_to_second(self, walk: Any) -> None:
        walk[LIST] = Int32(1)
        walk[COLUMN] = walk[NEXT_COLUMN]
        walk[LIST_END] = walk[NEXT_END]
        walk[NEXT_END] = Int32(0)

    @cute.jit
    def enter(self, walk: Any, item: Any, lane: Any) -> None:
        """To an item's first tile. One that attends to nothing has a tile without keys."""
        walk.fill(0)
        if item < self.items.end:
            batch, token, part, head_block = self.items.coords(item)
            used, used_second = self.lists[0].live(batch, token), Int32(0)
            if const_expr(self.second != "none"):
                used_second = self.lists[1].live(batch, token)
            self.ask_for_queries(batch, token, head_block, lane)
            walk[BATCH], walk[TOKEN] = batch, token
            columns = self.items.columns(part, used, used_second)
            walk[COLUMN], walk[LIST_END], walk[NEXT_COLUMN], walk[NEXT_END] = columns
            if walk[COLUMN] >= walk[LIST_END] and walk[NEXT_COLUMN] < walk[NEXT_END]:
                self.go_to_second(walk)
            self.ask_for_lists(item + self.items.step, lane)

    @cute.jit
    def ask_for_queries(self, batch: Any, token: Any, head_block: Any, lane: Any) -> None:
        """L2 has the item's queries by the time they are wanted."""
        lines, head = const_expr(1024 // LINE), head_block * HEADS
        for line in cutlass.range(lane, self.queries.left(head, HEADS) * lines, 32, unroll=1):
            row = self.queries.at(batch, token, head + line // lines)
            ptx.prefetch_l2(row + line % lines * LINE, None)

    @cute.jit
    def ask_for_lists(self, item: Any, lane: Any) -> None:
        """L2 has the lengths and the first columns of an item by the time they are wanted."""
        if item < self.items.end:
            batch, token, _, _ = self.items.coords(item)
            for i in range_constexpr(1 if self.second == "none" else 2):
                lists = self.lists[i]
                columns = lists.columns
                if const_expr(i == 1 and self.second == "dense"):
                    columns, _ = divmod(columns, self.caches[1].rows)
                ptx.prefetch_l2(lists.row(batch, token) + lane * LINE, lane * (LINE // 4) < columns)
                offset = Int64(batch) * Int64(lists.lengths_batch) + Int64(token) * Int64(lists.lengths_token)
                ptx.prefetch_l2(lists.lengths + offset * 4, lists.lengths != 0 and lane == 0)

    @cute.jit
    def look(self, walk: Any, asked: Any, lane: Any) -> None:
        """Load the indices of the lane's keys, of a dense list their pages; -1 where there is none."""
        row = self.lists[0].row(walk[BATCH], walk[TOKEN])
        if const_expr(self.second != "none"):
            second = self.lists[1].row(walk[BATCH], walk[TOKEN])
            row = row if walk[LIST] == 0 else second
        for half in range_constexpr(2):
            column = walk[COLUMN] + 32 * half + lane
            place = column
            if const_expr(self.second == "dense"):
                page, _ = divmod(column, self.caches[1].rows)
                place = column if walk[LIST] == 0 else page
            asked[half] = ptx.load_global_s32_where(column < walk[LIST_END], row + Int64(place) * 4)

    @cute.jit
    def locate(self, walk: Any, asked: Any, lane: Any) -> tuple[Any, Any, Any]:
        """Of the lane's keys: numbers of their rows or -1, addresses of their scales, whether they are there."""
        rows, scales, is_there = [], [], []
        for half in range_constexpr(2):
            index = asked[half]
            cache, pitch = self.caches[0], self.pitches[0]
            known = cutlass.max(index, Int32(0))
            page, inside = divmod(known, cache.rows)
            base, stride, pages, page_rows = cache.base, cache.page_stride, cache.pages, cache.rows.divisor
            if const_expr(self.second != "none"):
                is_first, other = walk[LIST] == 0, self.caches[1]
                if const_expr(self.second == "dense"):
                    second_page = known
                    _, second_inside = divmod(walk[COLUMN] + 32 * half + lane, other.rows)
                else:
                    second_page, second_inside = divmod(known, other.rows)
                page, inside = (page if is_first else second_page), (inside if is_first else second_inside)
                base, stride = (base if is_first else other.base), (stride if is_first else other.page_stride)
                pages, pitch = (pages if is_first else other.pages), (pitch if is_first else self.pitches[1])
                page_rows = page_rows if is_first else other.rows.divisor
            exists = index >= 0 and page < pages
            rows.append(page * pitch + inside if exists else Int32(-1))
            offset = Int64(page) * stride + Int64(page_rows * ROW_BYTES + inside * SCALE_BYTES)
            scales.append(base + (offset if exists else Int64(0)))
            is_there.append(exists)
        return rows, scales, is_there

    @cute.jit
    def tell(
        self,
        heading: Any,
        rows: Any,
        scales: Any,
        is_there: Any,
        tile: Any,
        lane: Any,
        ready: Barriers,
        at: Places,
    ) -> None:
        """Store a tile's heading and rows, and start to copy its scales."""
        slots = ready.headings.stages
        slot = tile % slots
        mark, item = heading
        ready.headings.wait_empty(slot, tile // slots & 1)
        there = [cute.arch.vote_ballot_sync(is_there[half]) for half in range(2)]
        if lane == 0:
            ptx.store_shared_128(at.heading + slot * HEADING, (mark, item, *there))
        if mark & END == 0:
            for half in range_constexpr(2):
                key = slot * KEYS + 32 * half + lane
                ptx.store_shared_s32(at.rows + key * 4, rows[half])
                read = Int32(SCALE_BYTES) if is_there[half] else Int32(0)
                ptx.copy_async_or_zero(at.scales + key * SCALE_BYTES, scales[half], SCALE_BYTES, read)
            cute.arch.cp_async_mbarrier_arrive_noinc(ready.scales + slot)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ready.headings.full(slot))


class Gather:
    """Copies of a tile's rows, four at a time, by a warp: codes into the ring of raw tiles, or rotary columns into the
    tile itself. Where there is no row zeros arrive, and no address is formed."""

    def __init__(self, is_rope: bool, second: str) -> None:
        self.is_rope, self.second = is_rope, second

    @cute.jit
    def run(self, maps: Any, ready: Barriers, at: Places) -> None:
        """Fill the ring.

        maps   tensor maps of both caches
        """
        ring = ready.stages if self.is_rope else ready.raws
        for source in maps:
            ptx.prefetch_tensor_map(source)
        tile, mark = Int32(0), Int32(0)
        while mark & END == 0:
            slot, stage = tile % ready.headings.stages, tile % ring.stages
            mark = marks(slot, tile, ready, at)
            if mark & END == 0:
                ring.wait_empty(stage, tile // ring.stages & 1)
                # all threads have read the marks
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    source = maps[0]
                    if const_expr(self.second != "none"):
                        source = maps[0] if mark & SECOND == 0 else maps[1]
                    self.ask(stage, source, at.rows + slot * (KEYS * 4), ring.full(stage), at)
                    cute.arch.mbarrier_arrive(ready.headings.empty(slot))
            tile = tile + 1

    @cute.jit
    def ask(self, stage: Any, source: Any, rows_at: Any, full: Any, at: Places) -> None:
        """Start a tile's copies. By a thread."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, ROPE_BYTES if self.is_rope else CODES_BYTES)
        if const_expr(self.is_rope):
            self.gather(lambda row: at.v + rope_offset(stage, row), source, 0, rows_at, full.toint())
        else:
            self.gather(lambda row: at.raw + raw_offset(stage, row), source, 0, rows_at, full.toint())

    def gather(
        self, place: Callable[[int], Any], source: Any, column: Any, rows_at: Any, barrier: Any, blocks: int = 1
    ) -> None:
        """From a column on. place: of rows, four at a time."""
        for row in range(0, KEYS, GATHERED):
            four = ptx.load_shared_128(rows_at, offset=row * 4)
            ptx.gather_rows(place(row), source, column, four, barrier, blocks=blocks)


@cute.jit
def marks(slot: Any, tile: Any, ready: Barriers, at: Places) -> Any:
    """A tile's marks, once it has been told of. By a warp."""
    ready.headings.wait_full(slot, tile // ready.headings.stages & 1)
    return cute.arch.make_warp_uniform(ptx.load_shared_s32(at.heading + slot * HEADING))
