"""Which rows Hopper's paged prefill kernel needs: a walk over the tiles of its block's items, by four warps in turn.

The keys of a query row are numbered: compressed entries first, then the window's positions. What a tile is made of
becomes known in three steps, a tile's time apart, so that nobody waits for memory: entries, their pages, and places.
A warp takes them for every fourth tile, two rows a lane, and tells the others by the tile's list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import visible_entries
from cute_kernels.sparse_mla.paged_sm90_plan import (
    DELTAS,
    LIST,
    LISTS,
    RAW_ROW,
    RECORD,
    SCALES,
    THERE,
    TILE,
    WALK,
    WALK_ITEMS,
    WARPS,
    Barriers,
    Sources,
    own_warp,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import END, KEYS, LAST, Places, Work
from cute_kernels.sparse_mla.prefill_sm90_rows import own_lane

LANES = 32
HALVES = KEYS // LANES
"""Rows of a lane: lane i has rows i and i + 32."""

NO_TILE = -1
"""Mark of a list behind the block's last tile."""


@cute.jit
def selected(item: Any, work: Work, sources: Sources) -> tuple[Any, Any, Any, Any, Any]:
    """Of an item's query row: its request, visible entries, how many of them count, the first position of its window
    and the end of it. What is no item has none."""
    query, _ = work.place(item)
    is_item = item < work.end
    batch = sources.batch
    request = batch.search(query, is_item)
    position = batch.position(query, request) if is_item else Int32(-1)
    visible = visible_entries(position, sources.ratio)
    compressed = cutlass.min(visible, sources.columns)
    table = sources.window
    first = cutlass.max(position + 1 - sources.window_size, 0)
    end = cutlass.min(position + 1, ptx.again(table.columns) * table.rows.divisor)
    return request, visible, compressed, first, end


class TableColumn(NamedTuple):
    """Of a block table: address, bytes from row to row, the column."""

    base: Any
    row: Any
    column: Any

    def place(self, request: Any) -> Any:
        """Of the page that a request has there."""
        return self.base + Int64(request) * self.row + Int64(self.column) * 4


@dataclass(frozen=True)
class Walk:
    work: Work
    sources: Sources
    ready: Barriers
    at: Places

    @property
    def home(self) -> Any:
        return self.at.walk + own_warp() * WALK

    def list_of(self, tile: Any) -> Any:
        return self.at.list + (tile & LISTS - 1) * LIST

    @cute.jit
    def begin(self) -> None:
        """Have the first tiles' lists on their way."""
        self.look_ahead(self.work.first)
        self.go_to(self.work.first, Int32(0), Int32(0))
        self.go_on(own_warp())
        if own_lane() == 0:
            ptx.store_shared_s32(self.list_of(own_warp() - WARPS) + TILE, Int32(NO_TILE))
        cute.arch.sync_warp()
        for tile in cutlass.range(-WARPS, 0, 1, unroll=1):
            self.step(tile)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()

    @cute.jit
    def step(self, tile: Any) -> None:
        """What the warp does while that tile is converted. What it asked for in its last step is there."""
        turn = (tile - own_warp()) & WARPS - 1
        if turn == 0:
            self.ask_for_entries(tile + 4)
        elif turn == 1:
            self.ask_for_pages(tile + 3)
        elif turn == 2:
            self.locate(tile + 2)

    @cute.jit
    def look_ahead(self, item: Any) -> None:
        """Have the records of that item and the 31 behind it: each in its time would take a long wait each time."""
        own = item + own_lane() * self.work.step
        request, visible, compressed, first, end = selected(own, self.work, self.sources)
        record_at = self.record(own_lane())
        cute.arch.sync_warp()
        ptx.store_shared_128(record_at, (request, visible, compressed, compressed + cutlass.max(end - first, 0)))
        ptx.store_shared_s32(record_at + 16, first)
        cute.arch.sync_warp()

    def record(self, number: Any) -> Any:
        return self.home + 16 + number * RECORD

    @cute.jit
    def tiles(self, number: Any) -> Any:
        """Of an item, by its record."""
        return (ptx.load_shared_s32(self.record(number) + 12) + (KEYS - 1)) // KEYS

    @cute.jit
    def go_to(self, item: Any, column: Any, number: Any) -> None:
        # all lanes have read where the walk is
        cute.arch.sync_warp()
        if own_lane() == 0:
            ptx.store_shared_128(self.home, (item, column, number, Int32(0)))
        cute.arch.sync_warp()

    @cute.jit
    def go_on(self, steps: Any) -> None:
        """Walk over so many tiles; an item has one at least."""
        item, column, number, _ = ptx.load_shared_128(self.home)
        left = cutlass.max(self.tiles(number) - column // KEYS, 1)
        while steps >= left:
            steps = steps - left
            item, column, number = item + self.work.step, Int32(0), number + 1
            if number == WALK_ITEMS:
                self.look_ahead(item)
                number = Int32(0)
            left = cutlass.max(self.tiles(number), 1)
        self.go_to(item, column + steps * KEYS, number)

    @cute.jit
    def ask_for_entries(self, tile: Any) -> None:
        """Start to copy, or write, the entries of a tile, and walk on."""
        item, column, number, _ = ptx.load_shared_128(self.home)
        list_at = self.list_of(tile)
        mark = Int32(NO_TILE)
        if item < self.work.end:
            mark = self.enter(list_at, item, column, number)
        if own_lane() == 0:
            ptx.store_shared_s32(list_at + TILE, mark)
        self.go_on(Int32(WARPS))

    @cute.jit
    def enter(self, list_at: Any, item: Any, column: Any, number: Any) -> Any:
        """The entries of an item's tile that begins with that column; its marks."""
        sources, record_at = self.sources, self.record(number)
        request, visible, compressed, total = ptx.load_shared_128(record_at)
        first = ptx.load_shared_s32(record_at + 16)
        query, _ = self.work.place(item)
        for half in range_constexpr(HALVES):
            row = own_lane() + half * LANES
            own, entry_at = column + row, list_at + DELTAS + row * 4
            if (own < compressed) & (sources.lists != 0):
                ptx.copy_async_32(entry_at, sources.lists + Int64(query) * sources.list_row + Int64(own) * 4)
            else:
                entry = own if own < compressed else own - compressed + first
                ptx.store_shared_s32(entry_at, entry if own < total else Int32(-1))
        if own_lane() == 0:
            ptx.store_shared_s32(list_at + TILE + 4, compressed - column)
            ptx.store_shared_64(list_at + TILE + 8, request, visible)
        return self.marks(item, column + KEYS >= total)

    @cute.jit
    def marks(self, item: Any, is_last: Any) -> Any:
        """Of an item's tile, which may be its last one."""
        last = Int32(LAST) if item + self.work.step < self.work.end else Int32(LAST | END)
        return last if is_last else Int32(0)

    @cute.jit
    def ask_for_pages(self, tile: Any) -> None:
        """Start to copy the pages of a tile's entries, and write where in them the rows are."""
        list_at = self.list_of(tile)
        mark, rest, request, visible = ptx.load_shared_128(list_at + TILE)
        if mark >= 0:
            for half in range_constexpr(HALVES):
                row = own_lane() + half * LANES
                entry_at, page_at = list_at + DELTAS + row * 4, list_at + row * 4
                entry = ptx.load_shared_s32(entry_at)
                is_named, inside, named_by = self.page_of(entry, row < rest, visible)
                ptx.store_shared_s32(entry_at, inside)
                if is_named:
                    ptx.copy_async_32(page_at, named_by.place(request))
                else:
                    ptx.store_shared_s32(page_at, Int32(-1))

    @cute.jit
    def page_of(self, entry: Any, is_compressed: Any, visible: Any) -> tuple[Any, Any, TableColumn]:
        """Whether there may be a page of an entry, which row of it the entry is, and where a table names it."""
        window, compressed = self.sources.window, self.sources.compressed
        known = cutlass.max(entry, Int32(0))
        column, _ = divmod(known, window.rows)
        other, _ = divmod(known, compressed.rows)
        column = other if is_compressed else column
        rows = compressed.rows.divisor if is_compressed else window.rows.divisor
        inside = known - column * rows
        columns = compressed.columns if is_compressed else window.columns
        base = compressed.table if is_compressed else window.table
        stride = compressed.table_row if is_compressed else window.table_row
        is_named = (entry >= 0) & (column < columns)
        if is_compressed:
            is_named = is_named & (entry < visible)
        return is_named, inside, TableColumn(base, stride, column)

    @cute.jit
    def locate(self, tile: Any) -> None:
        """Write where a tile's rows are, and tell all."""
        list_at = self.list_of(tile)
        mark, rest = ptx.load_shared_64(list_at + TILE)
        if mark >= 0:
            places = [list_at + (own_lane() + half * LANES) * 4 for half in range(HALVES)]
            pages = [ptx.load_shared_s32(place) for place in places]
            insides = [ptx.load_shared_s32(place + DELTAS) for place in places]
            # pages lie where addresses will
            cute.arch.sync_warp()
            places = list(zip(pages, insides, strict=True))
            there = [self.enter_row(list_at, own_lane() + i * LANES, *place, rest) for i, place in enumerate(places)]
            self.tell(tile, there)

    @cute.jit
    def tell(self, tile: Any, there: Any) -> None:
        """Tell all where a tile's rows are, now that they are in its list."""
        if own_lane() == 0:
            ptx.store_shared_64(self.list_of(tile) + THERE, *there)
        cute.arch.sync_warp()
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(self.ready.lists + (tile & LISTS - 1))

    @cute.jit
    def enter_row(self, list_at: Any, row: Any, page: Any, inside: Any, rest: Any) -> Any:
        """Write where a lane's row is; a bit of each lane says whether it is there."""
        window, compressed = self.sources.window, self.sources.compressed
        is_compressed = row < rest
        rows = compressed.rows.divisor if is_compressed else window.rows.divisor
        base = compressed.base if is_compressed else window.base
        stride = compressed.page_stride if is_compressed else window.page_stride
        count = compressed.pages if is_compressed else window.pages
        is_there = (page >= 0) & (page < count)
        there = cute.arch.vote_ballot_sync(is_there)
        source = base + Int64(page) * stride + Int64(inside * RAW_ROW)
        source = source if is_there else Int64(0)
        ptx.store_shared_64(list_at + row * 8, *ptx.halves(source))
        ptx.store_shared_s32(list_at + DELTAS + row * 4, rows * RAW_ROW + inside * (SCALES - RAW_ROW))
        return there

    def wait(self, tile: Any) -> None:
        """Until a tile's list says where its rows are."""
        ptx.wait_mbarrier((self.ready.lists + (tile & LISTS - 1)).toint(), tile // LISTS & 1)

    def sources_of(self, tile: Any, row: Any) -> tuple[Any, Any]:
        """Of a row of a tile, the addresses of its record and of its scales. That of its record is 0 if it is not
        there."""
        source = self.source_of(tile, row)
        return source, source + Int64(ptx.load_shared_s32(self.list_of(tile) + DELTAS + row * 4))

    def source_of(self, tile: Any, row: Any) -> Any:
        """Of a row of a tile, the address of its record, 0 if it is not there."""
        return ptx.pair(*ptx.load_shared_64(self.list_of(tile) + row * 8))

    def mark(self, tile: Any) -> Any:
        return ptx.load_shared_s32(self.list_of(tile) + TILE)

    def there(self, tile: Any) -> tuple[Any, Any]:
        """Which of a tile's rows are there, as bits in two words."""
        return ptx.load_shared_64(self.list_of(tile) + THERE)
