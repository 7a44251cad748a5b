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
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import visible_entries
from cute_kernels.sparse_mla.paged_sm90_plan import DELTAS, PAIR, THERE, TILE
from cute_kernels.sparse_mla.paged_sm90_walk import HALVES, LANES, Walk
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS
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
                self.record(own_lane()) + i * 16, (request, visible, first, cutlass.max(end, first))
            )
        cute.arch.sync_warp()

    @cute.jit
    def tiles(self, number: Any) -> Any:
        records = self.records(number)
        (_, whole), (_, more) = (self.parts(*record[1:]) for record in records)
        (request, visible0, first, end0), (other, visible1, _, end1) = records
        _, together = self.parts(cutlass.max(visible0, visible1), first, cutlass.max(end0, end1))
        return together if request == other else whole + more

    def records(self, number: Any) -> tuple[Any, Any]:
        """Of each query row, request, visible entries, first position of the window, and the one behind its last."""
        record_at = self.record(number)
        return ptx.load_shared_128(record_at), ptx.load_shared_128(record_at + 16)

    @cute.jit
    def enter(self, list_at: Any, item: Any, column: Any, number: Any) -> Any:
        (request, visible0, first0, end0), (other, visible1, first1, end1) = self.records(number)
        is_same = request == other
        visible = cutlass.max(visible0, visible1) if is_same else visible0
        end = cutlass.max(end0, end1) if is_same else end0
        first, turn = first0, column // KEYS
        entries, whole = self.parts(visible, first, end)
        entries1, whole1 = self.parts(visible1, first1, end1)
        total = whole if is_same else whole + whole1
        is_second = turn >= whole
        turn_own = turn - whole if is_second else turn
        request = other if is_second else request
        entries = entries1 if is_second else entries
        first = first1 if is_second else first
        is_compressed = turn_own < entries
        start = turn_own * KEYS if is_compressed else (first // KEYS + turn_own - entries) * KEYS
        low0, high0 = (Int32(0), visible0) if is_compressed else (first0, end0)
        low1, high1 = (Int32(0), visible1) if is_compressed else (first1, end1)
        is_there0 = (is_same | (turn < whole)) & (turn < total)
        is_there1 = (is_same | is_second) & (turn < total)
        bits: list[Any] = [[], []]
        for half in range_constexpr(HALVES):
            row = own_lane() + half * LANES
            entry = start + row
            has0 = (entry >= low0) & (entry < high0) & is_there0
            has1 = (entry >= low1) & (entry < high1) & is_there1
            bits[0].append(cute.arch.vote_ballot_sync(has0))
            bits[1].append(cute.arch.vote_ballot_sync(has1))
            ptx.store_shared_s32(list_at + DELTAS + row * 4, entry if has0 | has1 else Int32(-1))
        if own_lane() == 0:
            ptx.store_shared_s32(list_at + TILE + 4, Int32(KEYS) if is_compressed else Int32(0))
            ptx.store_shared_64(list_at + TILE + 8, request, Int32(0x7FFFFFFF))
            ptx.store_shared_128(list_at + PAIR, (*bits[0], *bits[1]))
        return self.marks(item, turn + 1 >= total)

    @cute.jit
    def parts(self, visible: Any, first: Any, end: Any) -> tuple[Any, Any]:
        """How many tiles of entries there are, and with those of the window."""
        entries = (visible + (KEYS - 1)) // KEYS
        window = (end + (KEYS - 1)) // KEYS - first // KEYS
        return entries, entries + (window if end > first else Int32(0))

    @cute.jit
    def wanted(self, tile: Any) -> tuple[Any, Any]:
        list_at = self.list_of(tile)
        there = ptx.load_shared_64(list_at + THERE)
        low0, high0, low1, high1 = ptx.load_shared_128(list_at + PAIR)
        first, second = (there[0] & low0, there[1] & high0), (there[0] & low1, there[1] & high1)
        is_second = ptx.rank_again() != 0
        own = [b if is_second else a for a, b in zip(first, second, strict=True)]
        other = [a if is_second else b for a, b in zip(first, second, strict=True)]
        return own, other
