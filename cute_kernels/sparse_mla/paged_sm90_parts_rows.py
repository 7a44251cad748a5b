"""Which keys of a query row are a part of it, in Hopper's paged prefill kernel for rows that are cut into parts.

A block has one part of one item. What its walk begins with is one trip to memory then, and L2 is asked for the lists of
the whole row before it is known which of them the part needs.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import visible_entries
from cute_kernels.sparse_mla.paged_sm90_plan import TILE, WARPS, own_warp
from cute_kernels.sparse_mla.paged_sm90_rows import PagedRows
from cute_kernels.sparse_mla.paged_sm90_walk import HALVES, LANES, NO_TILE, Walk
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS
from cute_kernels.sparse_mla.prefill_sm90_rows import own_lane

LINE = 128
"""Bytes that L2 is asked for at a time."""


class PartWalk(Walk):
    def begin(self) -> None:
        """Another warpgroup prepares it."""

    @cute.jit
    def prepare(self) -> None:
        """Write the lists of the first tiles, one a warp, and where the walk of the warp of that number goes on. By a
        warpgroup that has nothing else to do yet, and registers for it."""
        item, sources = self.work.first, self.sources
        query, _ = self.work.place(item)
        # a row most often has all that it may have: its entries are asked for before it is known
        guess, _ = self.part((sources.columns + sources.window_size + (KEYS - 1)) // KEYS)
        listed = self.listed(query, (guess + own_warp()) * KEYS, sources.columns)
        self.ask_for_lists(query)
        request, position, seq_len, _ = sources.batch.find(query, sources.batch.seq_lens)
        # starts that do not ascend may lead to any other
        position = position if (position >= 0) & (position < seq_len) else Int32(-1)
        self.ask_for_pages_of(request, position)
        visible = visible_entries(position, sources.ratio)
        compressed = cutlass.min(visible, sources.columns)
        first = cutlass.max(position + 1 - sources.window_size, 0)
        end = cutlass.min(position + 1, sources.window.columns * sources.window.rows.divisor)
        total = compressed + cutlass.max(end - first, 0)
        start, stop = self.part((total + (KEYS - 1)) // KEYS)
        total = cutlass.min(total, stop * KEYS)

        tile = own_warp()
        column = (start + tile) * KEYS
        is_tile = (tile == 0) | (column < total)
        mark = self.marks(item, column + KEYS >= total) if is_tile else Int32(NO_TILE)
        if own_lane() == 0:
            ptx.store_shared_64(self.list_of(tile) + TILE, mark, compressed - column)
        # behind the part there are no tiles
        self.look_ahead(self.work.end)
        if own_lane() == 0:
            ptx.store_shared_128(self.record(Int32(0)), (request, visible, compressed, total))
            ptx.store_shared_s32(self.record(Int32(0)) + 16, first)
            after, is_item = column + WARPS * KEYS, column + WARPS * KEYS < total
            goes_on = (item, after, Int32(0), Int32(0)) if is_item else (self.work.end, Int32(0), Int32(1), Int32(0))
            ptx.store_shared_128(self.home, goes_on)
        cute.arch.sync_warp()
        if is_tile:
            if start != guess:
                listed = self.listed(query, column, compressed)
            self.enter_tile(tile, column, listed, request, visible, compressed, first, total)

    @cute.jit
    def enter_tile(
        self, tile: Any, column: Any, listed: Any, request: Any, visible: Any, compressed: Any, first: Any, total: Any
    ) -> None:
        """Write a tile's list at once, and tell all. listed: as of `listed`."""
        list_at = self.list_of(tile)
        rows = [own_lane() + half * LANES for half in range(HALVES)]
        entries = [
            self.entry_of(column + row, entry, compressed, first, total)
            for row, entry in zip(rows, listed, strict=True)
        ]
        places = []
        for row, entry in zip(rows, entries, strict=True):
            is_named, inside, named_by = self.page_of(entry, row < compressed - column, visible)
            places.append((ptx.load_global_s32_where(is_named, named_by.place(request)), inside))
        found = zip(rows, places, strict=True)
        self.tell(tile, [self.enter_row(list_at, row, *place, compressed - column) for row, place in found])

    def listed(self, query: Any, column: Any, count: Any) -> list[Any]:
        """What a query row's list has for the lane's rows of the tile that begins with that column; anything where
        there is none."""
        sources = self.sources
        found = []
        for half in range(HALVES):
            own = column + own_lane() + half * LANES
            at = sources.lists + Int64(query) * sources.list_row + Int64(own) * 4
            found.append(ptx.load_global_s32_where((own < count) & (sources.lists != 0), at))
        return found

    @cute.jit
    def entry_of(self, own: Any, listed: Any, compressed: Any, first: Any, total: Any) -> Any:
        """Of a key of the row; -1 behind the part's last one."""
        entry = own if own < compressed else own - compressed + first
        entry = entry if own < total else Int32(-1)
        return listed if (own < compressed) & (self.sources.lists != 0) else entry

    @cute.jit
    def step(self, tile: Any) -> None:
        # before there is nothing left to do for the warp's first tile
        if tile >= own_warp():
            Walk.step(self, tile)

    @cute.jit
    def look_ahead(self, item: Any) -> None:
        """Have records of 32 items without tiles."""
        cute.arch.sync_warp()
        ptx.store_shared_128(self.record(own_lane()), [Int32(0)] * 4)
        cute.arch.sync_warp()

    @cute.jit
    def part(self, tiles: Any) -> tuple[Any, Any]:
        """Tiles [first, end) of the block's part of a row of so many; behind the last one if it has none."""
        sources, part = self.sources, ptx.rank_again()
        begin = tiles * part // sources.parts
        stop = tiles * (part + 1) // sources.parts
        if sources.part_tiles != 0:
            begin = cutlass.min(part, tiles) * sources.part_tiles
            stop = begin + sources.part_tiles
        # there may be more blocks than parts
        stop = cutlass.min(stop, tiles)
        begin = begin if begin < stop else tiles
        return begin, cutlass.max(begin, stop)

    @cute.jit
    def ask_for_lists(self, query: Any) -> None:
        line = own_warp() * 32 + own_lane()
        at = self.sources.lists + Int64(query) * self.sources.list_row + Int64(line) * LINE
        ptx.prefetch_l2(at, (self.sources.lists != 0) & (line * (LINE // 4) < self.sources.columns))

    @cute.jit
    def ask_for_pages_of(self, request: Any, position: Any) -> None:
        """L2 has the pages of the request's entries, and those of the window, when they are wanted."""
        compressed, window = self.sources.compressed, self.sources.window
        line = own_warp() * 32 + own_lane()
        is_known = position >= 0
        at = compressed.table + Int64(request) * compressed.table_row + Int64(line) * LINE
        is_wanted = is_known & (self.sources.columns != 0) & (line * (LINE // 4) < compressed.columns)
        ptx.prefetch_l2(at, is_wanted)
        page, _ = divmod(cutlass.max(position - own_lane() * (LINE // 4), 0), window.rows)
        at = window.table + Int64(request) * window.table_row + Int64(page) * 4
        ptx.prefetch_l2(at, is_known & (own_lane() < 2 * KEYS // (LINE // 4)) & (page < window.columns))


class PartRows(PagedRows):
    walk = PartWalk
