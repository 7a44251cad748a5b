"""The scout of Hopper's decode kernel: finds out, ahead of the others, which rows of the caches a tile is made of."""

from __future__ import annotations

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
    TABLES,
    Cache,
    Lengths,
    Places,
    Query,
    Rings,
    Sources,
    Work,
)

ROW_BYTES = FP8_DS_MLA.data_bytes
LINES = 5
"""128-byte lines that a row may lie in."""


class Scout:
    def __init__(self, heads: int, second: str) -> None:
        self.heads, self.second = heads, second

    @cute.jit
    def run(self, thread: Any, work: Work, q: Query, sources: Sources, rings: Rings, at: Places) -> None:
        """Two halves of 64 threads, one for each key of a tile, take turns at the tiles. By a warpgroup."""
        half = cute.arch.make_warp_uniform(thread // KEYS)
        key = thread % KEYS
        self.ask_for_queries(thread, work, work.first, q)
        before = Int32(0)  # tiles of the items before
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            batch, token, part, head_block = work.place(item)
            queries = q.of(batch, token, head_block * self.heads)
            row0 = self.row(sources.list0, batch, token)
            row1 = self.row(sources.list1, batch, token)
            live0 = self.live(sources.lengths0, sources.list0.columns, batch, token)
            live1 = Int32(0)
            if const_expr(self.second == "listed"):
                live1 = self.live(sources.lengths1, sources.list1.columns, batch, token)
            if const_expr(self.second == "dense"):
                live1 = self.live(sources.lengths1, sources.list1.columns * sources.cache1.rows, batch, token)
            tiles0 = (live0 + (KEYS - 1)) // KEYS
            tiles = tiles0 + (live1 + (KEYS - 1)) // KEYS
            start = tiles * part // work.parts
            end = tiles * (part + 1) // work.parts
            if work.part_tiles != 0:
                start = cutlass.min(part * work.part_tiles, tiles)
                end = cutlass.min(start + work.part_tiles, tiles)
            end = cutlass.max(end, start + 1)  # nothing to attend to is a tile of skipped keys
            begin = start + ((half ^ before) & 1)
            index = self.fetch(begin, end, tiles0, key, live0, row0, live1, row1, sources.cache1.rows)
            for tile in cutlass.range(begin, end, 2, unroll=1):
                number = before + tile - start
                mark = Int32(LAST) if tile == end - 1 else Int32(0)
                if tile < tiles0:
                    page = index // sources.cache0.rows
                    inside = index - page * sources.cache0.rows
                    self.note(index, page, inside, sources.cache0, key, queries, rings, number, mark, at)
                else:
                    page, inside = index, Int32(0)
                    if const_expr(self.second == "dense"):
                        inside = ((tile - tiles0) * KEYS + key) % sources.cache1.rows
                    else:
                        page = index // sources.cache1.rows
                        inside = index - page * sources.cache1.rows
                    self.note(index, page, inside, sources.cache1, key, queries, rings, number, mark, at)
                index = self.fetch(tile + 2, end, tiles0, key, live0, row0, live1, row1, sources.cache1.rows)
                if tile == begin and item + work.step < work.end:
                    self.ask_for_queries(thread, work, item + work.step, q)
            before = before + end - start
        # the front looks one tile ahead
        if (before & 1) == half:
            slot = before % TABLES
            rings.tables.wait_empty(slot, (before // TABLES) & 1)
            ptx.store_shared_128(at.table + (slot * KEYS + key) * ENTRY, self.skipped(q.base))
            cute.arch.mbarrier_arrive(rings.tables.full(slot))
            cute.arch.mbarrier_arrive(rings.tables.full(slot))

    @cute.jit
    def ask_for_queries(self, thread: Any, work: Work, item: Any, q: Query) -> None:
        """By the time the front wants the item's queries, L2 has them."""
        batch, token, _, head_block = work.place(item)
        source = q.of(batch, token, head_block * self.heads)
        lines = cutlass.min(q.heads - head_block * self.heads, self.heads) * 8
        for line in cutlass.range(thread, lines, 2 * KEYS, unroll=1):
            ptx.prefetch_l2(source + Int64(line // 8) * q.head + line % 8 * 128, None)

    def row(self, columns: Any, batch: Any, token: Any) -> Any:
        return columns.base + Int64(batch) * columns.batch + Int64(token) * columns.token

    @cute.jit
    def live(self, lengths: Lengths, columns: Any, batch: Any, token: Any) -> Any:
        """How many columns count."""
        count = columns
        if lengths.base != 0:
            place = Int64(batch) * lengths.batch + Int64(token) * lengths.token
            count = cutlass.max(cutlass.min(ptx.load_global_s32_in_order(lengths.base + place * 4), columns), 0)
        return count

    @cute.jit
    def fetch(
        self, tile: Any, end: Any, tiles0: Any, key: Any, live0: Any, row0: Any, live1: Any, row1: Any, page_rows: Any
    ) -> Any:
        """A key's index, of a dense list its page; -1 where there is none."""
        is_first = tile < tiles0
        column = (tile if is_first else tile - tiles0) * KEYS + key
        place = column
        if const_expr(self.second == "dense"):
            place = column if is_first else column // page_rows
        is_live = tile < end and column < (live0 if is_first else live1)
        return ptx.load_global_s32_where(is_live, (row0 if is_first else row1) + Int64(place) * 4)

    @cute.jit
    def note(
        self,
        index: Any,
        page: Any,
        inside: Any,
        cache: Cache,
        key: Any,
        queries: Any,
        rings: Rings,
        number: Any,
        mark: Any,
        at: Places,
    ) -> None:
        """Write the table's entry of a key, row `inside` of a page, and ask for the row."""
        page_at = cache.base + Int64(page) * cache.page_stride
        row_at = page_at + Int64(inside) * ROW_BYTES
        slot = number % TABLES
        entry = at.table + (slot * KEYS + key) * ENTRY
        rings.tables.wait_empty(slot, (number // TABLES) & 1)
        if index >= 0 and page < cache.pages:
            ptx.copy_async_64(entry + 8, page_at + (Int64(cache.rows) * ROW_BYTES + inside * 8))
            for line in range_constexpr(LINES):
                ptx.prefetch_l2(row_at + line * 128, None)
            ptx.store_shared_64(entry, *self.words(row_at))
        else:
            ptx.store_shared_128(entry, self.skipped(queries))
        if key == 0:
            ptx.store_shared_128(at.heading + slot * HEADING, (mark, Int32(0), *self.words(queries)))
        cute.arch.mbarrier_arrive(rings.tables.full(slot))
        cute.arch.cp_async_mbarrier_arrive_noinc(rings.tables.full(slot))

    def skipped(self, readable: Any) -> Any:
        """Entry of a key that does not count: anything readable stands in for its row."""
        low, high = self.words(readable)
        return low, high | Int32(-(2**31)), Int32(0), Int32(0)

    def words(self, address: Any) -> tuple[Any, Any]:
        return Int32(address), Int32(address >> 32)
