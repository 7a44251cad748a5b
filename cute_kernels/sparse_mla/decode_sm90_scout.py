"""The scout of Hopper's decode kernel: finds out, ahead of the others, which rows of the caches a tile is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.decode_sm90_plan import (
    ENTRY,
    HEADING,
    KEYS,
    LAST,
    Lengths,
    Lists,
    Places,
    Query,
    Rings,
    Sources,
    Work,
)

ROW_BYTES = FP8_DS_MLA.data_bytes
LINES = 5
"""128-byte lines that a row may lie in."""

NEVER = 2**30


@dataclass(frozen=True)
class Scout:
    """A walk over the tiles of a block's items, a step per tile, by the warpgroup that computes the scores.

    Two threads have a key: both load its index, one writes its address, the other copies its scales. Behind the last
    item come tiles without keys, as the front looks ahead.

    When a tile's scores are stored it writes the table of the tile AHEAD of it. What it overwrites belonged to the tile
    before, whose scores the back has let go of: all warps have read that table, and so has the front.

    Each warp keeps where it is in shared memory, at `home`, since registers are scarce:

        tile, end (of the item), tiles of the first list, item
        live columns of both lists, address of the item's queries
        addresses of the item's rows of both lists
        heads of the item
    """

    heads: int
    second: str
    work: Work
    q: Query
    sources: Sources
    thread: Any
    home: Any

    @cute.jit
    def enter(self, item: Any) -> None:
        """Go to the first tile of an item."""
        work, sources = self.work, self.sources
        tile, end = Int32(0), Int32(NEVER)
        tiles0, live0, live1 = Int32(0), Int32(0), Int32(0)
        queries, row0, row1, heads = self.q.base, self.q.base, self.q.base, Int32(0)
        if item < work.end:
            batch, token, part, head_block = work.place(item)
            queries = self.q.of(batch, token, head_block * self.heads)
            heads = cutlass.min(self.q.heads - head_block * self.heads, self.heads)
            row0 = self.row(sources.list0, batch, token)
            self.ask_for_list(row0, sources.list0, 0)
            if const_expr(self.second != "none"):
                row1 = self.row(sources.list1, batch, token)
                self.ask_for_list(row1, sources.list1, KEYS)
            live0 = self.live(sources.lengths0, sources.list0.columns, batch, token)
            if const_expr(self.second != "none"):
                columns = sources.list1.columns
                if const_expr(self.second == "dense"):
                    columns = columns * sources.cache1.rows
                live1 = self.live(sources.lengths1, columns, batch, token)
            for line in cutlass.range(self.thread, heads * 8, 2 * KEYS, unroll=1):
                ptx.prefetch_l2(queries + Int64(line // 8) * self.q.head + line % 8 * 128, None)
            tiles0 = (live0 + (KEYS - 1)) // KEYS
            tiles = tiles0 + (live1 + (KEYS - 1)) // KEYS
            tile = tiles * part // work.parts
            end = tiles * (part + 1) // work.parts
            if work.part_tiles != 0:
                tile = cutlass.min(part * work.part_tiles, tiles)
                end = cutlass.min(tile + work.part_tiles, tiles)
            if end <= tile:
                # nothing to attend to is a tile of skipped keys
                end = tile + 1
                live0, live1 = Int32(0), Int32(0)
        cute.arch.sync_warp()
        ptx.store_shared_128(self.home, (tile, end, tiles0, item))
        ptx.store_shared_128(self.home + 16, (live0, live1, *ptx.halves(queries)))
        ptx.store_shared_128(self.home + 32, (*ptx.halves(row0), *ptx.halves(row1)))
        ptx.store_shared_s32(self.home + 48, heads)
        cute.arch.sync_warp()

    @cute.jit
    def ask_for_list(self, row: Any, columns: Lists, first_thread: cutlass.Constexpr) -> None:
        """L2 has the item's first columns by the time they are wanted, one after the other."""
        line = self.thread - first_thread
        ptx.prefetch_l2(row + Int64(line) * 128, line >= 0 and line < KEYS and line * 32 < columns.columns)

    def row(self, columns: Lists, batch: Any, token: Any) -> Any:
        return columns.base + Int64(batch) * columns.batch + Int64(token) * columns.token

    @cute.jit
    def live(self, lengths: Lengths, columns: Any, batch: Any, token: Any) -> Any:
        """How many columns count."""
        count = columns
        if lengths.base != 0:
            place = Int64(batch) * lengths.batch + Int64(token) * lengths.token
            count = cutlass.max(cutlass.min(ptx.load_global_s32_in_order(lengths.base + place * 4), columns), 0)
        return count

    def queries(self) -> tuple[Any, Any]:
        """Heads and address of the item's queries."""
        _, _, *words = ptx.load_shared_128(self.home + 16)
        return ptx.load_shared_s32(self.home + 48), ptx.pair(*words)

    @cute.jit
    def look(self) -> Any:
        """Load the key's index in the next tile, of a dense list its page; -1 where there is none."""
        tile, _, tiles0, _ = ptx.load_shared_128(self.home)
        live, live1, _, _ = ptx.load_shared_128(self.home + 16)
        low, high, low1, high1 = ptx.load_shared_128(self.home + 32)
        column = tile * KEYS + self.thread % KEYS
        place = column
        if const_expr(self.second != "none"):
            is_first = tile < tiles0
            column = column if is_first else column - tiles0 * KEYS
            live, low, high = (live if is_first else live1), (low if is_first else low1), (high if is_first else high1)
            place = column
            if const_expr(self.second == "dense"):
                place = column if is_first else column // self.sources.cache1.rows
        return ptx.load_global_s32_where(column < live, ptx.pair(low, high) + Int64(place) * 4)

    @cute.jit
    def step(self, index: Any, slot: Any, rings: Rings, at: Places) -> None:
        """Write a table's entry of the key that has this index, ask L2 for its row, and go on to the next tile."""
        tile, end, tiles0, item = ptx.load_shared_128(self.home)
        _, _, *queries = ptx.load_shared_128(self.home + 16)
        key = self.thread % KEYS
        base, stride, pages, rows = self.sources.cache0
        if const_expr(self.second != "none"):
            is_first = tile < tiles0
            other = self.sources.cache1
            base, stride = (base if is_first else other.base), (stride if is_first else other.page_stride)
            pages, rows = (pages if is_first else other.pages), (rows if is_first else other.rows)
        number = index
        if const_expr(self.second == "dense"):
            number = index if is_first else (tile - tiles0) * KEYS + key
        page = number // rows
        inside = number - page * rows
        if const_expr(self.second == "dense"):
            page = page if is_first else index
        is_there = index >= 0 and page < pages
        page_at = base + Int64(page) * stride
        row_at = page_at + Int64(inside) * ROW_BYTES
        entry = at.table + (slot * KEYS + key) * ENTRY
        full = rings.tables.full(slot)
        if cute.arch.make_warp_uniform(self.thread // KEYS) != 0:
            if is_there:
                ptx.copy_async_64(entry + 8, page_at + (Int64(rows) * ROW_BYTES + inside * 8))
                for line in range_constexpr(LINES // 2):
                    ptx.prefetch_l2(row_at + line * 128, None)
            else:
                ptx.store_shared_64(entry + 8, Int32(0), Int32(0))
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
        else:
            if is_there:
                for line in range_constexpr(LINES // 2, LINES):
                    ptx.prefetch_l2(row_at + line * 128, None)
                ptx.store_shared_64(entry, *ptx.halves(row_at))
            else:
                # anything readable stands in for the row
                ptx.store_shared_64(entry, queries[0], queries[1] | Int32(-(2**31)))
            if key == 0:
                mark = Int32(LAST) if tile == end - 1 else Int32(0)
                heads = ptx.load_shared_s32(self.home + 48)
                ptx.store_shared_128(at.heading + slot * HEADING, (mark, heads, *queries))
        cute.arch.mbarrier_arrive(full)
        if tile + 1 == end:
            self.enter(item + self.work.step)
        else:
            cute.arch.sync_warp()
            ptx.store_shared_s32(self.home, tile + 1)
            cute.arch.sync_warp()
