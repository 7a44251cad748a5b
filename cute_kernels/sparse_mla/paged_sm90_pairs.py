"""Which rows two neighbouring query rows need together that attend to all visible entries: a pair of blocks walks.

Tiles are cut where entries and positions are multiples of 64, so that a query row's tiles do not depend on the row
beside it: what that one alone attends to is masked, and a tile of nothing else changes no bit of the result. Rows of
different requests share no tile: those of the second one follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import visible_entries
from cute_kernels.sparse_mla.paged_sm90_plan import OWN_ROWS, RECORD
from cute_kernels.sparse_mla.paged_sm90_walk import Walk
from cute_kernels.sparse_mla.prefill_sm90_plan import END, KEYS, LAST
from cute_kernels.sparse_mla.prefill_sm90_rows import own_lane


@dataclass(frozen=True)
class PairWalk(Walk):
    @cute.jit
    def look_ahead(self, item: Any) -> None:
        own = item + own_lane() * self.work.step
        is_item = own < self.work.end
        cute.arch.sync_warp()
        for i in cutlass.range(2, unroll=1):
            query, _ = self.work.place((own & -2) + i)
            batch = self.sources.batch
            request = batch.search(query, is_item)
            position = batch.position(query, request) if is_item else Int32(-1)
            visible = cutlass.min(visible_entries(position, self.sources.ratio), self.sources.columns)
            table = self.sources.window
            first = cutlass.max(position + 1 - self.sources.window_size, 0)
            end = cutlass.min(position + 1, ptx.again(table.columns) * table.rows.divisor)
            ptx.store_shared_128(
                self.home + 16 + own_lane() * RECORD + i * 16, (request, visible, first, cutlass.max(end, first))
            )
        cute.arch.sync_warp()

    @cute.jit
    def ask_for_entries(self, tile: Any) -> None:
        item, column, number, _ = ptx.load_shared_128(self.home)
        record_at = self.home + 16 + number * RECORD
        request, visible0, first0, end0 = ptx.load_shared_128(record_at)
        other, visible1, first1, end1 = ptx.load_shared_128(record_at + 16)
        is_same = request == other
        visible = cutlass.max(visible0, visible1) if is_same else visible0
        end = cutlass.max(end0, end1) if is_same else end0
        first, turn = first0, column // KEYS
        entries, whole = self.tiles(visible, first, end)
        entries1, whole1 = self.tiles(visible1, first1, end1)
        total = whole if is_same else whole + whole1
        is_second = turn >= whole
        turn_own = turn - whole if is_second else turn
        request = other if is_second else request
        entries = entries1 if is_second else entries
        first = first1 if is_second else first
        is_compressed = turn_own < entries
        start = turn_own * KEYS if is_compressed else (first // KEYS + turn_own - entries) * KEYS
        entry = start + self.row
        low0, high0 = (Int32(0), visible0) if is_compressed else (first0, end0)
        low1, high1 = (Int32(0), visible1) if is_compressed else (first1, end1)
        has0 = (entry >= low0) & (entry < high0) & (is_same | (turn < whole)) & (turn < total)
        has1 = (entry >= low1) & (entry < high1) & (is_same | is_second) & (turn < total)
        list_at = self.list_of(tile)
        bits0 = cute.arch.vote_ballot_sync(has0) & (1 << OWN_ROWS) - 1
        bits1 = cute.arch.vote_ballot_sync(has1) & (1 << OWN_ROWS) - 1
        if own_lane() < OWN_ROWS:
            ptx.store_shared_s32(list_at + own_lane() * 4, entry if has0 | has1 else Int32(-1))
        column, mark = column + KEYS, Int32(0)
        if turn + 1 >= total:
            item, column, number = item + self.work.step, Int32(0), number + 1
            mark = Int32(LAST) if item < self.work.end else Int32(LAST | END)
        if own_lane() == 0:
            rest = Int32(KEYS) if is_compressed else Int32(0)
            ptx.store_shared_128(list_at + OWN_ROWS * 8, (mark, rest, request, Int32(0x7FFFFFFF)))
            ptx.store_shared_64(list_at + OWN_ROWS * 8 + 24, bits0, bits1)
        self.go_on(item, column, number)

    @cute.jit
    def tiles(self, visible: Any, first: Any, end: Any) -> tuple[Any, Any]:
        """How many tiles of entries there are, and with those of the window."""
        entries = (visible + (KEYS - 1)) // KEYS
        window = (end + (KEYS - 1)) // KEYS - first // KEYS
        return entries, entries + (window if end > first else Int32(0))

    @cute.jit
    def wanted(self, tile: Any) -> tuple[Any, Any]:
        there = self.there(tile)
        bits0, bits1 = ptx.load_shared_64(self.list_of(tile) + OWN_ROWS * 8 + 24)
        rank = ptx.rank_again()
        return there & (bits1 if rank != 0 else bits0), there & (bits0 if rank != 0 else bits1)
