"""Which rows Hopper's paged prefill kernel needs: a warp's walk over the tiles of its block's items.

The keys of a query row are numbered: compressed entries first, then the window's positions. What a tile is made of
becomes known in three steps, a tile's time apart, so that nobody waits for memory: entries, their pages, and places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import visible_entries
from cute_kernels.sparse_mla.paged_sm90_plan import (
    LIST_WARP,
    LISTS,
    OWN_ROWS,
    RAW_ROW,
    RECORD,
    SCALES,
    WALK,
    WALK_ITEMS,
    Sources,
    own_warp,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import END, KEYS, LAST, Places, Work
from cute_kernels.sparse_mla.prefill_sm90_rows import own_lane


@dataclass(frozen=True)
class Walk:
    """By a warp, each for itself. Lanes i and i + 16 have row i of the warp's: one its record, one its scales."""

    work: Work
    sources: Sources
    at: Places

    @property
    def home(self) -> Any:
        return self.at.walk + own_warp() * WALK

    def list_of(self, tile: Any) -> Any:
        return self.at.list + (own_warp() * LISTS + (tile & LISTS - 1)) * LIST_WARP

    @property
    def row(self) -> Any:
        """The lane's, in a tile."""
        return own_warp() * OWN_ROWS + (own_lane() & OWN_ROWS - 1)

    @cute.jit
    def begin(self) -> None:
        self.look_ahead(self.work.first)
        self.go_to(self.work.first, Int32(0), Int32(0))

    @cute.jit
    def look_ahead(self, item: Any) -> None:
        """Have the records of that item and the 31 behind it: each in its time would take a long wait each time."""
        own = item + own_lane() * self.work.step
        query, _ = self.work.place(own)
        is_item = own < self.work.end
        batch = self.sources.batch
        request = batch.search(query, is_item)
        position = batch.position(query, request) if is_item else Int32(-1)
        visible = visible_entries(position, self.sources.ratio)
        compressed = cutlass.min(visible, self.sources.columns)
        table = self.sources.window
        first = cutlass.max(position + 1 - self.sources.window_size, 0)
        end = cutlass.min(position + 1, ptx.again(table.columns) * table.rows.divisor)
        record_at = self.home + 16 + own_lane() * RECORD
        cute.arch.sync_warp()
        ptx.store_shared_128(record_at, (request, visible, compressed, compressed + cutlass.max(end - first, 0)))
        ptx.store_shared_s32(record_at + 16, first)
        cute.arch.sync_warp()

    @cute.jit
    def go_to(self, item: Any, column: Any, number: Any) -> None:
        # all lanes have read where the walk is
        cute.arch.sync_warp()
        if own_lane() == 0:
            ptx.store_shared_128(self.home, (item, column, number, Int32(0)))
        cute.arch.sync_warp()

    @cute.jit
    def ask_for_entries(self, tile: Any) -> None:
        """Start to copy, or write, the entries of the warp's rows of a tile, and walk on."""
        sources = self.sources
        item, column, number, _ = ptx.load_shared_128(self.home)
        record_at = self.home + 16 + number * RECORD
        request, visible, compressed, total = ptx.load_shared_128(record_at)
        first = ptx.load_shared_s32(record_at + 16)
        list_at = self.list_of(tile)
        own = column + self.row
        if own_lane() < OWN_ROWS:
            entry_at = list_at + own_lane() * 4
            if (own < compressed) & (sources.lists != 0):
                query, _ = self.work.place(item)
                ptx.copy_async_32(entry_at, sources.lists + Int64(query) * sources.list_row + Int64(own) * 4)
            else:
                entry = own if own < compressed else own - compressed + first
                ptx.store_shared_s32(entry_at, entry if own < total else Int32(-1))
        rest = compressed - column
        column, mark = column + KEYS, Int32(0)
        if column >= total:
            item, column, number = item + self.work.step, Int32(0), number + 1
            mark = Int32(LAST) if item < self.work.end else Int32(LAST | END)
        if own_lane() == 0:
            ptx.store_shared_128(list_at + OWN_ROWS * 8, (mark, rest, request, visible))
        self.go_on(item, column, number)

    @cute.jit
    def go_on(self, item: Any, column: Any, number: Any) -> None:
        if number == WALK_ITEMS:
            self.look_ahead(item)
            number = Int32(0)
        self.go_to(item, column, number)

    @cute.jit
    def ask_for_pages(self, tile: Any) -> None:
        """Start to copy the pages of a tile's entries, once these are there, and write where in them the rows are."""
        list_at = self.list_of(tile)
        _, rest, request, visible = ptx.load_shared_128(list_at + OWN_ROWS * 8)
        own_at = list_at + (own_lane() & OWN_ROWS - 1) * 4
        entry = ptx.load_shared_s32(own_at)
        if own_lane() < OWN_ROWS:
            window, compressed = self.sources.window, self.sources.compressed
            is_compressed = self.row < rest
            known = cutlass.max(entry, Int32(0))
            column, _ = divmod(known, window.rows)
            other, _ = divmod(known, compressed.rows)
            column = other if is_compressed else column
            rows = compressed.rows.divisor if is_compressed else window.rows.divisor
            ptx.store_shared_s32(own_at, known - column * rows)
            columns = compressed.columns if is_compressed else window.columns
            base = compressed.table if is_compressed else window.table
            stride = compressed.table_row if is_compressed else window.table_row
            is_named = (entry >= 0) & (column < columns)
            if is_compressed:
                is_named = is_named & (entry < visible)
            if is_named:
                ptx.copy_async_32(own_at + OWN_ROWS * 4, base + Int64(request) * stride + Int64(column) * 4)
            else:
                ptx.store_shared_s32(own_at + OWN_ROWS * 4, Int32(-1))

    @cute.jit
    def locate(self, tile: Any) -> None:
        """Find out whether the lane's row of a tile is there, and where its record is, or its scales, once its page is
        known. All of it is kept in memory, as few registers are left."""
        list_at = self.list_of(tile)
        rest = ptx.load_shared_s32(list_at + OWN_ROWS * 8 + 4)
        own_at = list_at + (own_lane() & OWN_ROWS - 1) * 4
        inside, page = ptx.load_shared_s32(own_at), ptx.load_shared_s32(own_at + OWN_ROWS * 4)
        window, compressed = self.sources.window, self.sources.compressed
        is_compressed = self.row < rest
        rows = compressed.rows.divisor if is_compressed else window.rows.divisor
        base = compressed.base if is_compressed else window.base
        stride = compressed.page_stride if is_compressed else window.page_stride
        pages = compressed.pages if is_compressed else window.pages
        is_there = (page >= 0) & (page < pages)
        there = cute.arch.vote_ballot_sync(is_there) & (1 << OWN_ROWS) - 1
        if own_lane() == 0:
            ptx.store_shared_s32(list_at + OWN_ROWS * 8 + 16, there)
        within = inside * RAW_ROW if own_lane() < OWN_ROWS else rows * RAW_ROW + inside * SCALES
        source = base + Int64(page) * stride + Int64(within)
        source = source if is_there else Int64(0)
        ptx.store_shared_64(self.sources_at + own_lane() * 8, *ptx.halves(source))
        cute.arch.sync_warp()

    @property
    def sources_at(self) -> Any:
        return self.home + 16 + WALK_ITEMS * RECORD

    def sources_of(self, row: Any) -> tuple[Any, Any]:
        """Of a row of the warp's, of the tile that was located last, the addresses of its record and of its scales; 0
        if it is not there."""
        place = self.sources_at + row * 8
        return ptx.pair(*ptx.load_shared_64(place)), ptx.pair(*ptx.load_shared_64(place + OWN_ROWS * 8))

    def mark(self, tile: Any) -> Any:
        return ptx.load_shared_s32(self.list_of(tile) + OWN_ROWS * 8)

    def there(self, tile: Any) -> Any:
        """Which of the warp's rows of a tile that has been located are there, as bits."""
        return ptx.load_shared_s32(self.list_of(tile) + OWN_ROWS * 8 + 16)

    def wanted(self, tile: Any) -> tuple[Any, Any]:
        """Those of them that this block attends to, and the other one."""
        there = self.there(tile)
        return there, there
