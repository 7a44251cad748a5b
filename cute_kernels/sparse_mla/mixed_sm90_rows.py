"""The warpgroup of Hopper's mixed kernel that asks for rows: those of prefill's, of two paged caches.

The columns that count of a query row are numbered from its window's on, and the compressed ones follow: a tile may have
rows of both caches. A tile's mark says how many of the rows from its first on are the window's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.prefill_sm90_plan import MARK_BITS, Work
from cute_kernels.sparse_mla.prefill_sm90_rows import Rows

UNIT = 16
"""Bytes in which places in a pool are counted: as many as int32 has numbers for are 32 GiB."""

COUNT_BITS = 16
"""Of each of the two numbers that are packed into one."""


def row_units(dtype: Any) -> int:
    return HEAD_DIM * dtype.width // 8 // UNIT


class Pool(NamedTuple):
    """A paged cache: address, number of rows, rows of a page as a divisor, and units between the end of a page and the
    next one."""

    base: Any
    rows: Any
    page_rows: Any
    gap: Any

    @cute.jit
    def place(self, slot: Any, row_units: cutlass.Constexpr) -> Any:
        """Units from the base on to the row of a slot, -1 if the pool has no such row."""
        place = slot * row_units + (slot // self.page_rows) * self.gap
        return place if (slot >= 0) & (slot < self.rows) else Int32(-1)


def pool(cache: cute.Tensor) -> Pool:
    """A cache [pages, rows of a page, 512] with dense pages."""
    page_rows = length(cache, 1)
    gap = Int32(stride_bytes(cache, 0) // UNIT) - page_rows * row_units(cache.element_type)
    divisor = cute.fast_divmod_create_divisor_v2(page_rows)
    return Pool(address(cache), length(cache, 0) * page_rows, divisor, gap)


class MixedSources(NamedTuple):
    """The caches. Lists: address, bytes from list to list, columns, the first of them that name rows of the window's
    cache. Columns that count: address of int32 [rows], the window's included. Where the query rows are."""

    window: Pool
    compressed: Pool
    lists: Any
    list_row: Any
    columns: Any
    window_size: Any
    lengths: Any
    batch: Batch


class MixedRows(Rows):
    """dtype: of the caches."""

    def __init__(self, dtype: Any) -> None:
        self.row_units = row_units(dtype)

    @cute.jit
    def count(self, item: Any, work: Work, sources: Any) -> Any:
        """As two numbers in one: the window's columns, and the compressed ones."""
        query, _ = work.place(item)
        is_item = item < work.end
        found = ptx.load_global_s32_where(is_item, sources.lengths + Int64(query) * 4)
        position = sources.batch.position(query, sources.batch.search(query, is_item))
        window = cutlass.min(sources.window_size, position + 1)
        compressed = cutlass.max(found, sources.window_size) - sources.window_size
        compressed = cutlass.min(compressed, self.compressed_columns(sources))
        return window | (compressed << COUNT_BITS) if position >= 0 else Int32(0)

    def compressed_columns(self, sources: Any) -> Any:
        return sources.columns - sources.window_size

    def window(self, count: Any) -> Any:
        """The window's columns among those of `count`."""
        return count & (1 << COUNT_BITS) - 1

    def total(self, count: Any) -> Any:
        return self.window(count) + (count >> COUNT_BITS & (1 << COUNT_BITS) - 1)

    @cute.jit
    def column(self, number: Any, count: Any, sources: Any) -> Any:
        behind = number - self.window(count)
        return sources.window_size + behind if behind >= 0 else number

    def mark(self, number: Any, count: Any) -> Any:
        """How many rows are the window's, of this tile and what follows."""
        return cutlass.max(self.window(count) - number, 0) << MARK_BITS

    @cute.jit
    def find(self, index: Any, mark: Any, sources: Any) -> Any:
        """Units from its pool's base on."""
        place = Int32(-1)
        if self.own_row() < mark >> MARK_BITS:
            place = sources.window.place(index, self.row_units)
        else:
            place = sources.compressed.place(index, self.row_units)
        return place

    @cute.jit
    def address(self, place: Any, row: Any, mark: Any, sources: Any) -> Any:
        base = sources.window.base if row < mark >> MARK_BITS else sources.compressed.base
        return base + Int64(cutlass.max(place, 0)) * UNIT
