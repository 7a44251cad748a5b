"""The warps of Blackwell's paged prefill kernel that know and ask for rows, and those that make them bf16.

The window's positions come first, then compressed entries from a new tile on. Entries, their pages and their scales are
looked up by a warp up to LISTS tiles ahead.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.blackwell.decode import (
    CODES_BYTES,
    GATHERED,
    LAST_SLAB,
    RAWS,
    ROPE_BYTES,
    ROW_BYTES,
    ROWS_APART,
    STAGES,
    raw_offset,
    rope_offset,
    stage_offset,
)
from cute_kernels.sparse_mla.blackwell.decode import Dequantizer as DecodeFront
from cute_kernels.sparse_mla.paged_sm100_plan import SCALES, PagedBarriers, Sources
from cute_kernels.sparse_mla.prefill_sm90_plan import END, KEYS, LAST, Work
from cute_kernels.sparse_mla.prefill_sm100_plan import LIST, LISTS, MARK_AT, SECOND, Places
from cute_kernels.sparse_mla.prefill_sm100_rows import HALVES, LANES, Lists, Rows, choose


class PagedLists(Lists):
    """Of an item: its request, visible entries, how many of them count, positions of its window, the first of them."""

    numbers = 5

    def count(self, item: Any, work: Work, sources: Sources) -> tuple[Any, ...]:
        request, visible, compressed, first, end = sources.named.keys_of(work.place(item)[0], item < work.end)
        return request, visible, compressed, cutlass.max(end - first, 0), first

    def window_tiles(self, count: Any) -> Any:
        return (count[3] + (KEYS - 1)) // KEYS

    def tiles(self, count: Any) -> Any:
        return self.window_tiles(count) + (count[2] + (KEYS - 1)) // KEYS

    @cute.jit
    def mark(self, tile: Any, count: Any) -> Any:
        return Int32(SECOND) if tile >= self.window_tiles(count) else Int32(0)

    @cute.jit
    def write(
        self,
        item: Any,
        tile: Any,
        count: Any,
        slot: Any,
        work: Work,
        sources: Sources,
        ready: PagedBarriers,
        at: Places,
    ) -> None:
        """Where a tile's rows are, which are there, and their scales."""
        query, _ = work.place(item)
        behind = tile - self.window_tiles(count)
        is_second = behind >= 0
        first = (behind if is_second else tile) * KEYS + cute.arch.lane_idx()
        entries = [self.entry(query, first + half * LANES, is_second, count, sources.named) for half in range(HALVES)]
        found = [self.look_up(entry, is_second, count, sources.named) for entry in entries]
        rows = [self.row(is_second, one, sources) for one in found]
        self.store(rows, at.lists + slot * LIST)
        for half in range_constexpr(HALVES):
            scales_at = at.scales + (slot * KEYS + half * LANES + cute.arch.lane_idx()) * SCALES
            source = self.scales(rows[half], is_second, found[half], sources.named)
            ptx.copy_async_or_zero(scales_at, source, SCALES, Int32(SCALES) if rows[half] >= 0 else Int32(0))
        cute.arch.cp_async_mbarrier_arrive_noinc(ready.scales + slot)

    @cute.jit
    def entry(self, query: Any, number: Any, is_second: Any, count: Any, named: Any) -> Any:
        """The entry, or the position, of a tile's row; -1 if it has none."""
        _, visible, compressed, window, first = count
        found = Int32(-1)
        if is_second:
            found = number if number < compressed else Int32(-1)
            if named.lists != 0:
                place = named.lists + Int64(query) * named.list_row + Int64(number) * 4
                found = ptx.load_global_s32_where(number < compressed, place)
            found = found if found < visible else Int32(-1)
        else:
            found = first + number if number < window else Int32(-1)
        return found

    @cute.jit
    def look_up(self, entry: Any, is_second: Any, count: Any, named: Any) -> tuple[Any, Any]:
        """Page of an entry, -1 if it has none, and the row in it."""
        known = cutlass.max(entry, Int32(0))
        column, inside = divmod(known, named.window.rows)
        other, other_inside = divmod(known, named.compressed.rows)
        column, inside = (other if is_second else column), (other_inside if is_second else inside)
        columns = named.compressed.columns if is_second else named.window.columns
        table = named.compressed.table if is_second else named.window.table
        stride = named.compressed.table_row if is_second else named.window.table_row
        place = table + Int64(count[0]) * stride + Int64(column) * 4
        return ptx.load_global_s32_where((entry >= 0) & (column < columns), place), inside

    @cute.jit
    def row(self, is_second: Any, found: Any, sources: Sources) -> Any:
        """Row of the cache's tensor of rows, -1 if the page is none of the cache's."""
        page, inside = found
        pages = sources.named.compressed.pages if is_second else sources.named.window.pages
        step = sources.compressed_step if is_second else sources.window_step
        return page * step + inside if (page >= 0) & (page < pages) else Int32(-1)

    @cute.jit
    def scales(self, row: Any, is_second: Any, found: Any, named: Any) -> Any:
        """Address of the scales of a row that is there."""
        page, inside = found
        base = named.compressed.base if is_second else named.window.base
        stride = named.compressed.page_stride if is_second else named.window.page_stride
        page_rows = named.compressed.rows.divisor if is_second else named.window.rows.divisor
        offset = Int64(page) * stride + Int64(page_rows * ROW_BYTES + inside * SCALES)
        return base + (offset if row >= 0 else Int64(0))


class PagedRows(Rows):
    """maps: addresses of the descriptors of q, of the caches' codes, and of their rotary columns."""

    stages, parts = STAGES, 1

    @cute.jit
    def run(self, part: Any, work: Work, maps: Any, ready: PagedBarriers, at: Places) -> None:
        """Fill the ring of codes, or that of stages with queries and rotary columns. By a thread of each of two warps;
        part: its number."""
        caches = (len(maps) - 1) // 2
        if part == 0:
            self.ask_for_codes(maps[1 : 1 + caches], ready, at)
        else:
            Rows.run(self, Int32(0), work, (maps[0], *maps[1 + caches :]), ready, at)

    @cute.jit
    def ask_for_codes(self, maps: Any, ready: PagedBarriers, at: Places) -> None:
        raw, phase = barriers.start()
        slot, turn = barriers.start()
        mark = Int32(0)
        while mark & END == 0:
            ready.lists.wait_full(slot, turn)
            list_at = at.lists + slot * LIST
            mark = ptx.load_shared_s32(list_at + MARK_AT)
            ready.raws.wait_empty(raw, phase)
            full = ready.raws.full(raw)
            cute.arch.mbarrier_arrive_and_expect_tx(full, CODES_BYTES)
            self.gather(list_at, choose(maps, mark), full, at.raw + raw_offset(raw, 0), raw_offset)
            cute.arch.mbarrier_arrive(ready.lists.empty(slot))
            raw, phase = barriers.advance(raw, phase, RAWS)
            slot, turn = barriers.advance(slot, turn, LISTS)

    @cute.jit
    def ask_for_rows(self, part: Any, mark: Any, list_at: Any, stage_at: Any, maps: Any, full: Any) -> None:
        """Start to gather a tile's rotary columns."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, ROPE_BYTES)
        self.gather(list_at, choose(maps[1:], mark), full, stage_at, rope_offset)

    @cute.jit
    def gather(self, list_at: Any, source: Any, full: Any, target: Any, offset: cutlass.Constexpr) -> None:
        for row in range_constexpr(0, KEYS, GATHERED):
            rows = ptx.load_shared_128(list_at + row * 4)
            ptx.gather_rows(target + offset(0, row), source, 0, rows, full.toint())


class Front(DecodeFront):
    @cute.jit
    def run(self, thread: Any, work: Work, ready: PagedBarriers, at: Places) -> None:
        """Convert every tile. By a warpgroup."""
        row, member = thread // 4, thread % 4
        raw, raw_phase = barriers.start()
        stage, phase = barriers.start()
        slot, turn = barriers.start()
        mark = Int32(0)
        while mark & END == 0:
            # queries need nothing
            ready.stages.wait_empty(stage, phase)
            if thread % 32 == 0:
                cute.arch.mbarrier_arrive(ready.stages.full(stage))
            stage, phase = barriers.advance(stage, phase, STAGES)
            mark = Int32(0)
            while mark & LAST == 0:
                ready.lists.wait_full(slot, turn)
                mark = ptx.load_shared_s32(at.lists + slot * LIST + MARK_AT)
                ptx.wait_mbarrier((ready.scales + slot).toint(), turn)
                scales_at = at.scales + (slot * KEYS + row) * SCALES
                scales = [ptx.load_shared_64(scales_at + half * ROWS_APART * SCALES) for half in range(2)]
                ready.raws.wait_full(raw, raw_phase)
                ready.stages.wait_empty(stage, phase)
                source = at.raw + raw_offset(raw, row) + member * 16
                target = at.stages + stage_offset(stage, 0, row, 2 * member)
                for half in range_constexpr(2):
                    for slab in range_constexpr(LAST_SLAB):
                        self.convert(source, target, scales[half], half, slab)
                # tensor cores read what this thread has stored
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if thread % 32 == 0:
                    cute.arch.mbarrier_arrive(ready.stages.full(stage))
                    cute.arch.mbarrier_arrive(ready.raws.empty(raw))
                    cute.arch.mbarrier_arrive(ready.lists.empty(slot))
                raw, raw_phase = barriers.advance(raw, raw_phase, RAWS)
                stage, phase = barriers.advance(stage, phase, STAGES)
                slot, turn = barriers.advance(slot, turn, LISTS)
