"""Which keys of a query row are a part of it, in Hopper's paged prefill kernel for rows that are cut into parts.

A block has one part of one item. What its walk begins with is one trip to memory then, and L2 is asked for the lists of
the whole row before it is known which of them the part needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import visible_entries
from cute_kernels.sparse_mla.paged_sm90_plan import own_warp
from cute_kernels.sparse_mla.paged_sm90_rows import PagedRows
from cute_kernels.sparse_mla.paged_sm90_walk import Walk
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS
from cute_kernels.sparse_mla.prefill_sm90_rows import own_lane

LINE = 128
"""Bytes that L2 is asked for at a time."""

FIRST_COLUMN = 20
"""Where in a record of the walk is with which column the item begins."""


class PartSources(NamedTuple):
    """As the plan's Sources; parts of a row; tiles in a part, or 0: see schedule.part_range."""

    window: Any
    compressed: Any
    window_size: Any
    lists: Any
    list_row: Any
    columns: Any
    ratio: Any
    batch: Any
    parts: Any
    part_tiles: Any


class PartWalk(Walk):
    @cute.jit
    def look_ahead(self, item: Any) -> None:
        """Have the record of the block's part, if that is the item, and of no tiles behind it."""
        sources = self.sources
        query, _ = self.work.place(item)
        self.ask_for_lists(query)
        request, position, _, _ = sources.batch.find(query, sources.batch.seq_lens)
        self.ask_for_pages_of(request, position)
        visible = visible_entries(position, sources.ratio)
        compressed = cutlass.min(visible, sources.columns)
        first = cutlass.max(position + 1 - sources.window_size, 0)
        end = cutlass.min(position + 1, sources.window.columns * sources.window.rows.divisor)
        total = compressed + cutlass.max(end - first, 0)
        begin, stop = self.part((total + (KEYS - 1)) // KEYS)
        is_own = (own_lane() == 0) & (item < self.work.end)
        record_at = self.record(own_lane())
        cute.arch.sync_warp()
        known = cutlass.min(total, stop * KEYS) if is_own else Int32(0)
        ptx.store_shared_128(record_at, (request, visible, compressed, known))
        ptx.store_shared_64(record_at + 16, first, begin * KEYS if is_own else Int32(0))
        cute.arch.sync_warp()

    def first_column(self) -> Any:
        return ptx.load_shared_s32(self.record(Int32(0)) + FIRST_COLUMN)

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
