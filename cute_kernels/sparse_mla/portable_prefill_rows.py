"""Which rows a query row attends to, for the portable kernels of prefill: one class for each way to name them.

Columns that count are numbered from 0. A class of rows has four methods, and what they load is under way when they
return:

    count      of a query row that a lane asks for (is_wanted: whether it is one): four words, how many columns count
               and what else the next two need
    ask        of a column (is_live: whether it counts): a word of the lists
    look_up    of that word: two words that name the row of the column
    find       of those: address of the row, or any if there is none; address of its scale bytes; and one more than the
               number of its cache, or 0 if there is no such row

What passes between the last three is held in registers through the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.portable_prefill_plan import row_bytes


class Pool(NamedTuple):
    """A paged cache: address, bytes from page to page, pages, and rows of a page as a divisor."""

    base: Any
    stride: Any
    pages: Any
    rows: Any

    def row(self, page: Any, row: Any, kv_format: str) -> tuple[Any, Any]:
        """Addresses of a row and of its scale bytes."""
        start = self.base + Int64(page) * self.stride
        scales = start
        if kv_format == FP8_DS_MLA.id:
            behind = Int64(self.rows.divisor) * FP8_DS_MLA.data_bytes
            scales = start + behind + Int64(row) * FP8_DS_MLA.scale_bytes
        return start + Int64(row) * row_bytes(kv_format), scales


def pool_of(tensor: cute.Tensor) -> Pool:
    """A cache argument. On the host's side of the launch."""
    rows = cute.fast_divmod_create_divisor_v2(length(tensor, 1))
    return Pool(address(tensor), stride_bytes(tensor, 0), length(tensor, 0), rows)


@cute.jit
def row_of_two(page: Any, row: Any, is_second: Any, pools: Any, formats: cutlass.Constexpr) -> tuple[Any, Any, Any]:
    """What `find` gives of row `row` of page `page`, if that page exists, of one of two caches."""
    pages = pools[1].pages if is_second else pools[0].pages
    exists = page >= 0 and page < pages
    known = page if exists else Int32(0)
    first, second = pools[0].row(known, row, formats[0]), pools[1].row(known, row, formats[1])
    start = second[0] if is_second else first[0]
    scales = second[1] if is_second else first[1]
    cache = Int32(2) if is_second else Int32(1)
    return start, scales, cache if exists else Int32(0)


class GatheredSources(NamedTuple):
    """Rows of kv: address, bytes from row to row, how many. Lists: address, bytes from list to list, columns. Columns
    that count: address of int32 [rows], or 0."""

    kv: Any
    kv_row: Any
    kv_rows: Any
    lists: Any
    list_row: Any
    columns: Any
    lengths: Any


@dataclass(frozen=True)
class GatheredRows:
    """Rows of one buffer, by their numbers."""

    @cute.jit
    def count(self, row: Any, is_wanted: Any, sources: Any) -> tuple[Any, Any, Any, Any]:
        count = sources.columns
        if sources.lengths != 0:
            found = ptx.load_global_s32_where(is_wanted, sources.lengths + Int64(row) * 4)
            count = cutlass.max(cutlass.min(found, count), Int32(0))
        return count, Int32(0), Int32(0), Int32(0)

    @cute.jit
    def ask(self, row: Any, column: Any, words: Any, is_live: Any, sources: Any) -> Any:
        listed = sources.lists + Int64(row) * sources.list_row + Int64(column) * 4
        return ptx.load_global_s32_where(is_live, listed)

    def look_up(self, index: Any, column: Any, words: Any, is_live: Any, sources: Any) -> tuple[Any, Any]:
        return index, Int32(0)

    @cute.jit
    def find(self, index: Any, _: Any, sources: Any) -> tuple[Any, Any, Any]:
        exists = index >= 0 and index < sources.kv_rows
        start = sources.kv + Int64(index if exists else Int32(0)) * sources.kv_row
        return start, start, Int32(exists)


class MixedSources(NamedTuple):
    """Two caches. Lists: address, bytes from list to list, columns, the first of them that name rows of the window's
    cache. Columns that count: address of int32 [rows], the window's included. Where the query rows are."""

    pools: Any
    lists: Any
    list_row: Any
    columns: Any
    window_size: Any
    lengths: Any
    batch: Batch


@dataclass(frozen=True)
class MixedRows:
    """Rows of two caches by their slots, the window's columns first."""

    formats: tuple[str, ...]

    @cute.jit
    def count(self, row: Any, is_wanted: Any, sources: Any) -> tuple[Any, Any, Any, Any]:
        """The second word: the window's columns."""
        found = ptx.load_global_s32_where(is_wanted, sources.lengths + Int64(row) * 4)
        position = sources.batch.position(row, sources.batch.search(row, is_wanted))
        window = cutlass.min(sources.window_size, position + 1)
        listed = cutlass.min(cutlass.max(found, sources.window_size), sources.columns) - sources.window_size
        count = window + listed if position >= 0 else Int32(0)
        return count, window, Int32(0), Int32(0)

    @cute.jit
    def ask(self, row: Any, column: Any, words: Any, is_live: Any, sources: Any) -> Any:
        window = words[1]
        place = sources.window_size - window + column if column >= window else column
        listed = sources.lists + Int64(row) * sources.list_row + Int64(place) * 4
        return ptx.load_global_s32_where(is_live, listed)

    def look_up(self, slot: Any, column: Any, words: Any, is_live: Any, sources: Any) -> tuple[Any, Any]:
        """The slot, and whether it is one of the second cache."""
        return slot, Int32(column >= words[1])

    @cute.jit
    def find(self, slot: Any, is_second: Any, sources: Any) -> tuple[Any, Any, Any]:
        known = cutlass.max(slot, Int32(0))
        first, second = divmod(known, sources.pools[0].rows), divmod(known, sources.pools[1].rows)
        page, row = second[0] if is_second != 0 else first[0], second[1] if is_second != 0 else first[1]
        return row_of_two(page if slot >= 0 else Int32(-1), row, is_second != 0, sources.pools, self.formats)


class PagedSources(NamedTuple):
    """Two caches, the second the first again if there is one alone, and their block tables. Lists of entries: address,
    bytes from list to list, columns. Positions in the window; tokens of an entry as a divisor. Where the query rows
    are."""

    pools: Any
    tables: Any
    lists: Any
    list_row: Any
    columns: Any
    window_size: Any
    ratio: Any
    batch: Batch


COMPRESSED = ("none", "all", "listed")
"""Which compressed entries count: there are none, all that a row sees, those that lists name."""


@dataclass(frozen=True)
class PagedRows:
    """Rows of two paged caches by what they hold: the window's positions, in order, then compressed entries."""

    formats: tuple[str, ...]
    compressed: str

    @cute.jit
    def count(self, row: Any, is_wanted: Any, sources: Any) -> tuple[Any, Any, Any, Any]:
        """The other words: the window's columns, the position, the request."""
        request = sources.batch.search(row, is_wanted)
        position = sources.batch.position(row, request)
        window = cutlass.min(sources.window_size, position + 1)
        entries = Int32(0)
        if const_expr(self.compressed != "none"):
            entries, _ = divmod(position + 1, sources.ratio)
            if const_expr(self.compressed == "listed"):
                entries = cutlass.min(entries, sources.columns)
            else:
                mapped = Int64(sources.tables[1].columns) * Int64(sources.pools[1].rows.divisor)
                entries = Int32(ptx.min_s64(mapped, Int64(entries)))
        count = window + entries if position >= 0 else Int32(0)
        return count, window, position, request

    @cute.jit
    def ask(self, row: Any, column: Any, words: Any, is_live: Any, sources: Any) -> Any:
        """An entry, of what is listed."""
        entry = Int32(-1)
        if const_expr(self.compressed == "listed"):
            number = column - words[1]
            listed = sources.lists + Int64(row) * sources.list_row + Int64(number) * 4
            entry = ptx.load_global_s32_where(is_live and number >= 0, listed)
        return entry

    @cute.jit
    def look_up(self, listed: Any, column: Any, words: Any, is_live: Any, sources: Any) -> tuple[Any, Any]:
        """A page, and the row of the page: with a sign if the cache is the second one."""
        _, window, position, request = words
        # one load for both caches: what it gives is not looked at here
        table, pages = sources.tables[0].row(request), sources.tables[0].columns
        number, place = self.split(position + 1 - window + column, is_live and column < window, 0, sources)
        if const_expr(self.compressed != "none"):
            is_second = is_live and column >= window
            entry = column - window
            if const_expr(self.compressed == "listed"):
                visible, _ = divmod(position + 1, sources.ratio)
                entry = listed if listed < visible else Int32(-1)
            second, behind = self.split(entry, is_second and entry >= 0, 1, sources)
            table = sources.tables[1].row(request) if is_second else table
            pages = sources.tables[1].columns if is_second else pages
            number, place = second if is_second else number, -1 - behind if is_second else place
        # as an unsigned number, -1 is past all pages
        return ptx.load_element_s32(table, number, pages), place

    @cute.jit
    def split(self, entry: Any, is_wanted: Any, which: cutlass.Constexpr, sources: Any) -> tuple[Any, Any]:
        """(number of the page or -1, row of the page) of an entry of a cache."""
        number, row = divmod(entry if is_wanted else Int32(0), sources.pools[which].rows)
        return number if is_wanted else Int32(-1), row

    @cute.jit
    def find(self, page: Any, place: Any, sources: Any) -> tuple[Any, Any, Any]:
        is_second = place < 0
        return row_of_two(page, -1 - place if is_second else place, is_second, sources.pools, self.formats)
