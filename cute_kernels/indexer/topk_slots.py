# SPDX-License-Identifier: Apache-2.0
"""Slots of the compressed cache in place of a row's picks: the last step of topk.py, topk_held.py and topk_whole.py,
for decode."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx

PAGES_AT_ONCE = 4
"""Pages that a lane asks for before it uses one."""


class Slots(NamedTuple):
    """The row of a block table that turns a request's entries into slots of its cache.

    table        address of the table; 0: entries are written as they are
    stride       of its rows in bytes
    request      number of the row; its address, which takes two registers, is made where it is used
    columns      of the table
    rows         of a page, as a divisor
    named_pages  pages of which int32 can name a row; unsigned
    """

    table: Any
    stride: Any
    request: Any
    columns: Any
    rows: Any
    named_pages: Any

    def load_page(self, entry: Any, is_wanted: Any) -> tuple[Any, Any]:
        """(page, row of the page) of an entry >= 0; the page is negative if there is none or it is not wanted."""
        column, row = divmod(entry, self.rows)
        is_inside = is_wanted & (column < self.columns)
        source = self.table + Int64(self.request) * self.stride + Int64(column) * 4
        return ptx.load_global_s32_where(is_inside, source, is_shared=True), row

    def slot(self, found: tuple[Any, Any]) -> Any:
        """int32 slot of what `load_page` found, -1 if there is none or int32 cannot name it."""
        page, row = found
        # of the last named page a slot may pass 2^31, but not 2^32
        slot = ptx.value_below(page, self.named_pages, page * self.rows.divisor + row)
        return cutlass.max(slot, Int32(-1))

    @cute.jit
    def write(self, entries: Int32, first: Int32, step: cutlass.Constexpr, stop: Int32, out: Int64) -> None:
        """Write the slots of the entries listed at this address, up to number `stop`, of which a thread has every
        step-th one from `first` on: neighbours by neighbouring lanes, and as many pages under way as there can be."""
        for start in cutlass.range(first, stop, step * PAGES_AT_ONCE, unroll=1):
            found = []
            for i in range_constexpr(PAGES_AT_ONCE):
                number = start + step * i
                entry = ptx.load_shared_s32(entries + cutlass.min(number, stop - 1) * 4)
                found.append(self.load_page(entry, number < stop))
            for i in range_constexpr(PAGES_AT_ONCE):
                number = start + step * i
                ptx.store_global_s32(out + Int64(number) * 4, self.slot(found[i]), number < stop)
