"""The scout of Hopper's decode kernel: finds out which rows of the caches a tile is made of, and has them copied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.decode_sm90_plan import (
    END,
    FIRST,
    HEADING,
    HEADINGS,
    HEADS_BIT,
    KEYS,
    LAST,
    ODD,
    OWN_KEYS,
    RAW_BYTES,
    RAW_KEYS,
    RAW_PITCH,
    RAWS,
    SIDE,
    SLAB,
    TURNS,
    Barriers,
    Lengths,
    Lists,
    Places,
    Query,
    Sources,
    Work,
)

ROW_BYTES = FP8_DS_MLA.data_bytes
NEVER = 2**30


@dataclass(frozen=True)
class Scout:
    """A walk over the tiles of a pair's items, by a warpgroup. Behind the last item come two tiles marked END.

    Two threads have a key: both load its index, then one has its row copied, the other its scales.

    Each warp keeps where it is in shared memory, at `home`, since registers are scarce:

        tile, end (of the item), tiles of the first list, item
        live columns of both lists, length of the next item's first list, first tile of the item, ODD in the sign bit
        addresses of the item's rows of both lists
        heads of the item, length of the next one's second list, address of the item's queries
    """

    heads: int
    second: str
    rank: Any
    work: Work
    q: Query
    sources: Sources
    thread: Any
    home: Any

    @cute.jit
    def run(self, ready: Barriers, at: Places) -> None:
        """Fill the ring of raw tiles."""
        self.ask_for_lengths(self.work.first)
        self.enter(self.work.first, Int32(0))
        index = self.look()
        place, ends = Int32(0), Int32(0)
        while ends < TURNS:
            tile, end, tiles0, item = ptx.load_shared_128(self.home)
            first = ptx.load_shared_s32(self.home + 28)
            heads, _, low, high = ptx.load_shared_128(self.home + 48)
            odd = Int32(ODD) if first < 0 else Int32(0)
            mark = odd | (Int32(FIRST) if tile == first & 0x7FFFFFFF else Int32(0))
            mark = mark | (Int32(LAST) if tile == end - 1 else Int32(0))
            if item >= self.work.end:
                mark = Int32(END)
                ends = ends + 1
            if tile == end - 1:
                self.enter(item + self.work.step, odd ^ ODD)
            else:
                cute.arch.sync_warp()
                ptx.store_shared_s32(self.home, tile + 1)
                cute.arch.sync_warp()
            is_there, source = self.locate(index, tile, tiles0)
            # on its way while rows are copied; into the register just served, as a move would wait for it
            index = self.look()
            self.fetch(is_there, source, (mark | heads << HEADS_BIT, item, low, high), place, ready, at)
            place = place + 1

    @cute.jit
    def enter(self, item: Any, odd: Any) -> None:
        """Go to an item's first tile."""
        work, sources = self.work, self.sources
        tile, end = Int32(0), Int32(NEVER)
        tiles0, live0, live1 = Int32(0), Int32(0), Int32(0)
        row0, row1 = self.q.base, self.q.base
        queries, heads = self.q.base, Int32(0)
        if item < work.end:
            batch, token, part, head_block = work.place(item)
            first = head_block * self.heads
            queries = self.q.of(batch, token, first) + self.rank * (SIDE * 2)
            heads = cutlass.min(self.q.heads - first, self.heads)
            row0, row1 = self.row(sources.list0, batch, token), self.row(sources.list1, batch, token)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            live0 = self.live(sources.lengths0, sources.list0.columns, 24)
            if const_expr(self.second != "none"):
                columns = sources.list1.columns
                if const_expr(self.second == "dense"):
                    columns = columns * sources.cache1.rows.divisor
                live1 = self.live(sources.lengths1, columns, 52)
            self.ask_for_queries(queries, heads)
            tiles0 = (live0 + (KEYS - 1)) // KEYS
            tiles = tiles0 + (live1 + (KEYS - 1)) // KEYS
            tile, _ = divmod(tiles * part, work.parts)
            end, _ = divmod(tiles * (part + 1), work.parts)
            if work.part_tiles != 0:
                tile = cutlass.min(part * work.part_tiles, tiles)
                end = cutlass.min(tile + work.part_tiles, tiles)
            if end <= tile:
                # nothing to attend to is a tile of skipped keys
                end = tile + 1
                live0, live1 = Int32(0), Int32(0)
        cute.arch.sync_warp()
        ptx.store_shared_128(self.home, (tile, end, tiles0, item))
        first = tile | (Int32(-(2**31)) if odd != 0 else Int32(0))
        ptx.store_shared_128(self.home + 16, (live0, live1, Int32(0), first))
        ptx.store_shared_128(self.home + 32, (*ptx.halves(row0), *ptx.halves(row1)))
        ptx.store_shared_128(self.home + 48, (heads, Int32(0), *ptx.halves(queries)))
        cute.arch.sync_warp()
        self.ask_for_lengths(item + work.step)

    @cute.jit
    def ask_for_queries(self, queries: Any, heads: Any) -> None:
        """L2 has this block's part of the item's queries by the time they are wanted."""
        for line in cutlass.range(self.thread, heads * 4, 128, unroll=1):
            ptx.prefetch_l2(queries + Int64(line // 4) * self.q.head + line % 4 * 128, None)

    @cute.jit
    def ask_for_list(self, row: Any, columns: Lists, first_thread: cutlass.Constexpr) -> None:
        """L2 has the item's first columns by the time they are wanted, one after the other."""
        line = self.thread - first_thread
        ptx.prefetch_l2(row + Int64(line) * 128, line >= 0 and line < KEYS and line * 32 < columns.columns)

    def row(self, columns: Lists, batch: Any, token: Any) -> Any:
        return columns.base + Int64(batch) * columns.batch + Int64(token) * columns.token

    @cute.jit
    def ask_for_lengths(self, item: Any) -> None:
        """Start to copy how many columns an item has; L2 has the first of them by the time they are wanted."""
        work, sources = self.work, self.sources
        if item < work.end:
            batch, token, _, _ = work.place(item)
            self.ask_for_list(self.row(sources.list0, batch, token), sources.list0, 0)
            self.ask_for_length(sources.lengths0, batch, token, 24)
            if const_expr(self.second != "none"):
                self.ask_for_list(self.row(sources.list1, batch, token), sources.list1, KEYS)
                self.ask_for_length(sources.lengths1, batch, token, 52)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def ask_for_length(self, lengths: Lengths, batch: Any, token: Any, place: cutlass.Constexpr) -> None:
        if lengths.base != 0 and self.thread % 32 == 0:
            element = Int64(batch) * lengths.batch + Int64(token) * lengths.token
            ptx.copy_async_32(self.home + place, lengths.base + element * 4)

    @cute.jit
    def live(self, lengths: Lengths, columns: Any, place: cutlass.Constexpr) -> Any:
        """How many columns count."""
        count = columns
        if lengths.base != 0:
            count = cutlass.max(cutlass.min(ptx.load_shared_s32(self.home + place), columns), 0)
        return count

    @property
    def key(self) -> Any:
        """The thread's, in a tile."""
        return self.thread // 32 * OWN_KEYS + self.thread % OWN_KEYS

    @cute.jit
    def look(self) -> Any:
        """Load the key's index in the next tile, of a dense list its page; -1 where there is none."""
        tile, _, tiles0, _ = ptx.load_shared_128(self.home)
        live, live1 = ptx.load_shared_64(self.home + 16)
        low, high, low1, high1 = ptx.load_shared_128(self.home + 32)
        column = tile * KEYS + self.key
        place = column
        if const_expr(self.second != "none"):
            is_first = tile < tiles0
            column = column if is_first else column - tiles0 * KEYS
            live, low, high = (live if is_first else live1), (low if is_first else low1), (high if is_first else high1)
            place = column
            if const_expr(self.second == "dense"):
                page, _ = divmod(column, self.sources.cache1.rows)
                place = column if is_first else page
        return ptx.load_global_s32_where(column < live, ptx.pair(low, high) + Int64(place) * 4)

    @cute.jit
    def locate(self, index: Any, tile: Any, tiles0: Any) -> tuple[Any, Any]:
        """Whether there is a key of this index, and where the thread's share of it is: its row or its scales."""
        cache = self.sources.cache0
        base, stride, pages = cache.base, cache.page_stride, cache.pages
        known = cutlass.max(index, Int32(0))
        page, inside = divmod(known, cache.rows)
        rows = cache.rows.divisor
        if const_expr(self.second != "none"):
            is_first, other = tile < tiles0, self.sources.cache1
            base, stride = (base if is_first else other.base), (stride if is_first else other.page_stride)
            pages, rows = (pages if is_first else other.pages), (rows if is_first else other.rows.divisor)
            if const_expr(self.second == "dense"):
                known = (tile - tiles0) * KEYS + self.key
            second_page, second_inside = divmod(known, other.rows)
            if const_expr(self.second == "dense"):
                second_page = index
            page, inside = (page if is_first else second_page), (inside if is_first else second_inside)
        is_there = index >= 0 and page < pages
        row = inside * ROW_BYTES + self.rank * SIDE
        scales = rows * ROW_BYTES + inside * 8 + self.rank * 4
        return is_there, base + Int64(page) * stride + Int64(row if self.has_row else scales)

    @property
    def has_row(self) -> Any:
        """Of a key's two threads, one has its row copied, the other its scales."""
        return self.thread % 32 < OWN_KEYS

    @cute.jit
    def fetch(self, is_there: Any, source: Any, heading: Any, place: Any, ready: Barriers, at: Places) -> None:
        """Start to copy a tile."""
        warp = cute.arch.make_warp_uniform(self.thread // 32)
        half = 2 * place + warp // 2
        slot, key = half % RAWS, self.key % RAW_KEYS
        full = ready.raws.full(slot)
        ready.raws.wait_empty(slot, half // RAWS & 1)
        part_bytes = SIDE + self.rank * SLAB
        there = cute.arch.vote_ballot_sync(is_there) & (2**OWN_KEYS - 1)
        if self.thread % 32 == 0:
            heading_at = at.heading + place % HEADINGS * HEADING
            ptx.store_shared_s32(heading_at + 16 + warp * 4, ~there)
            if warp == 0:
                ptx.store_shared_128(heading_at, heading)
            cute.arch.mbarrier_arrive_and_expect_tx(full, cute.arch.popc(there) * part_bytes)
        if self.has_row:
            if is_there:
                ptx.copy_bulk(at.raw + slot * RAW_BYTES + key * RAW_PITCH, source, part_bytes, full.toint())
        else:
            source = source if is_there else self.sources.cache0.base
            ptx.copy_async_or_zero(
                at.scale + (slot * RAW_KEYS + key) * 4, source, 4, Int32(4) if is_there else Int32(0)
            )
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
