"""The warp of Blackwell's mixed kernel that knows rows: those of prefill's, of two paged caches.

No tile has rows of both caches: the window's columns come first, then the compressed ones from a new tile on.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Int32

from cute_kernels.dsl.tensor import address, length
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.mixed_sm90_rows import COUNT_BITS, MixedRows, MixedSources, Pool
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS
from cute_kernels.sparse_mla.prefill_sm100_plan import SECOND
from cute_kernels.sparse_mla.prefill_sm100_rows import Lists


def page_step(cache: Any) -> Any:
    """Rows from a page of a cache [pages, rows of a page, 512] to the next, those between pages included."""
    return Int32(cache.stride[0] // HEAD_DIM)


def rows_of(cache: cute.Tensor) -> Any:
    """From a cache's first row to its last one."""
    return (length(cache, 0) - 1) * page_step(cache) + length(cache, 1)


def row_pool(cache: cute.Tensor) -> Pool:
    """A cache whose places are counted in rows."""
    page_rows = length(cache, 1)
    divisor = cute.fast_divmod_create_divisor_v2(page_rows)
    return Pool(address(cache), length(cache, 0) * page_rows, divisor, page_step(cache) - page_rows)


class MixedLists(Lists):
    named = MixedRows(BFloat16)

    def split(self, count: Any) -> tuple[Any, Any]:
        """The window's columns that count, and the compressed ones."""
        return self.named.window(count[0]), count[0] >> COUNT_BITS & (1 << COUNT_BITS) - 1

    def window_tiles(self, count: Any) -> Any:
        return (self.split(count)[0] + (KEYS - 1)) // KEYS

    def tiles(self, count: Any) -> Any:
        return self.window_tiles(count) + (self.split(count)[1] + (KEYS - 1)) // KEYS

    @cute.jit
    def mark(self, tile: Any, count: Any) -> Any:
        return Int32(SECOND) if tile >= self.window_tiles(count) else Int32(0)

    @cute.jit
    def place(self, tile: Any, number: Any, count: Any, sources: MixedSources) -> tuple[Any, Any, Any]:
        """As of Lists, and whether the row is a compressed one."""
        window, compressed = self.split(count)
        behind = tile - self.window_tiles(count)
        is_second = behind >= 0
        own = (behind if is_second else tile) * KEYS + number
        is_named = own < (compressed if is_second else window)
        return own + (sources.window_size if is_second else 0), is_named, is_second

    def entry(self, query: Any, place: Any, sources: MixedSources) -> Any:
        return super().entry(query, place[:2], sources)

    @cute.jit
    def row(self, place: Any, entry: Any, sources: MixedSources) -> Any:
        _, _, is_second = place
        found = Int32(-1)
        if is_second:
            found = sources.compressed.place(entry, 1)
        else:
            found = sources.window.place(entry, 1)
        return found
