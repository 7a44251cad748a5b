# SPDX-License-Identifier: Apache-2.0
"""Block tables and batches of requests on the device: what cute_kernels.paging is to the references.

Rows of int32 are moved in runs of `width` neighbouring columns a lane: 4 with 16-byte accesses, 1 where a row's address
or length allows no more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes

LANES = 32

SEARCH_STEPS = (16, 8, 4, 2, 1, 1)
"""Of a binary search for a number of 0 .. 32."""


def load_run(condition: Any, address: Any, width: int, through_l1: bool = False) -> tuple[Any, ...]:
    """A lane's run of columns; -1 where the condition fails."""
    if width == 4:
        return ptx.load_global_128_where(condition, address, through_l1)
    return (ptx.load_global_s32_where(condition, address),)


def store_run(address: Any, words: Any, condition: Any) -> None:
    """Write a lane's run of columns where the condition holds."""
    if len(words) == 4:
        ptx.store_global_128(address, words, condition)
    else:
        ptx.store_global_s32(address, words[0], condition)


@cute.jit
def store_window(target: Any, pages: Any, last: Any, count: Any, columns: Any, width: Any) -> None:
    """The row of index columns at `target`: slots of the `count` positions that end with `last`, then -1."""
    lane = cute.arch.lane_idx()
    for start in range(0, columns, LANES * width):
        column = start + lane * width
        first = last + 1 - count + column
        found = [pages.look_up(first + i, column + i < count) for i in range(width)]
        slots = [pages.slot_index(one) for one in found]
        store_run(target + Int64(column) * 4, slots, column < columns)


@cute.jit
def block_sum(number: Any, warps: int) -> Any:
    """Sum of an int32 over all threads of a block of so many warps, in every thread. All threads must call."""
    total = cute.arch.warp_redux_sync(number, "add")
    if const_expr(warps > 1):
        sums = SmemAllocator().allocate_tensor(Int32, cute.make_layout(warps))
        sums[cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // LANES)] = total
        cute.arch.sync_threads()
        total = sums[0]
        for i in range_constexpr(1, warps):
            total += sums[i]
    return total


@cute.jit
def block_sum_and_max(summed: Any, largest: Any, warps: int) -> Any:
    """Sum of one int32 and maximum of another over all threads of a block of so many warps, in every thread. All
    threads must call."""
    summed, largest = cute.arch.warp_redux_sync(summed, "add"), cute.arch.warp_redux_sync(largest, "max")
    if const_expr(warps > 1):
        staged = SmemAllocator().allocate_tensor(Int32, cute.make_layout(2 * warps))
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // LANES)
        staged[warp], staged[warps + warp] = summed, largest
        cute.arch.sync_threads()
        summed, largest = staged[0], staged[warps]
        for i in range_constexpr(1, warps):
            summed, largest = summed + staged[i], cutlass.max(largest, staged[warps + i])
    return summed, largest


class Matrix(NamedTuple):
    """int32 [rows, columns] in plain numbers, `stride` bytes from row to row."""

    address: Any
    stride: Any
    rows: Any
    columns: Any

    def row(self, row: Any) -> Any:
        """Address of a row."""
        return self.address + Int64(row) * self.stride


def matrix(tensor: Any) -> Matrix:
    """A matrix argument; of more than two dimensions those between the first and the last have one element."""
    last = cute.rank(tensor) - 1
    return Matrix(address(tensor), stride_bytes(tensor, 0), length(tensor, 0), length(tensor, last))


class Shift(NamedTuple):
    """A number of rows that is a power of two: `rows` = 1 << `bits`."""

    bits: Any
    rows: Any


class BlockTable(NamedTuple):
    """A block table. A row of it holds at most 2^30 entries, and a page has at most as many rows.

    split         rows of a page, as a Shift or as a divisor
    named_pages   pages of which int32 can name a row; unsigned
    """

    pages: Matrix
    split: Any
    named_pages: Any

    @cute.jit
    def of(self, request: Any) -> Any:
        """The pages of one request; it has none if it is no row of the table."""
        is_known = request >= 0 and request < self.pages.rows
        row = self.pages.row(request if is_known else Int32(0))
        return Pages(row, self.pages.columns if is_known else Int32(0), self.split, self.named_pages)


def block_table(tensor: Any, page_rows: Any, is_shift: bool) -> BlockTable:
    """A block table argument. page_rows: rows of a page, or with `is_shift` the exponent of that power of two."""
    if is_shift:
        named_pages = Int32(Int64(2**31) >> Int64(page_rows))
        return BlockTable(matrix(tensor), Shift(page_rows, Int32(1) << page_rows), named_pages)
    named_pages = Int32(0x7FFFFFFF) // page_rows + 1
    return BlockTable(matrix(tensor), cute.fast_divmod_create_divisor_v2(page_rows), named_pages)


class Pages(NamedTuple):
    """A row of a block table.

    An entry is mapped iff its page lies inside the row and is >= 0, and its slot fits int32. Looking up and using pages
    are two steps, so that a kernel can have many look-ups under way.
    """

    row: Any
    columns: Any
    split: Any
    named_pages: Any

    def look_up(self, entry: Any, is_wanted: Any = None) -> tuple[Any, Any]:
        """(page, row of the page) of an int32 entry; the page is negative if it has none or is not wanted.

        The column of a negative entry is, as an unsigned number, past those of 2^30 entries.
        """
        if isinstance(self.split, Shift):
            column, offset = entry >> self.split.bits, entry & (self.split.rows - 1)
        else:
            column, offset = divmod(entry, self.split)
        return ptx.load_element_s32(self.row, column, self.columns, is_wanted), offset

    def slot(self, found: tuple[Any, Any]) -> Any:
        """int64 slot of what `look_up` found; negative if there is none."""
        page, offset = found
        rows = self.split.rows if isinstance(self.split, Shift) else self.split.divisor
        return Int64(page) * Int64(rows) + Int64(offset)

    def slot_index(self, found: tuple[Any, Any]) -> Any:
        """int32 slot of what `look_up` found, -1 if there is none or int32 cannot name it."""
        page, offset = found
        if isinstance(self.split, Shift):
            return ptx.value_below(page, self.named_pages, page * self.split.rows + offset)
        # of the last named page a slot may pass 2^31, but not 2^32
        return cutlass.max(ptx.value_below(page, self.named_pages, page * self.split.divisor + offset), Int32(-1))


@cute.jit
def narrow(row: Any, origin: Any, bounds: Any, count: Any) -> tuple[Any, Any]:
    """(first, span) with span < 32: of `count` ascending int32 bounds, all before `first` are at most `row`, all from
    first + span on are larger. Every round leaves a 32nd. All lanes of the warp must call with the same row.

    origin   address of the int32 that is subtracted from every bound, or None
    """
    lane = cute.arch.lane_idx()
    first, span = Int32(0), Int32(count)
    while span >= LANES:
        step = (span + (LANES - 1)) >> 5
        # a lane looks at the last bound of its piece
        last = (lane + 1) * step - 1
        value = Int64(ptx.load_global_s32_again_where(last < span, bounds + Int64(first + last) * 4))
        if const_expr(origin is not None):
            value -= Int64(ptx.load_global_s32_again_where(True, origin))
        skipped = cute.arch.popc(cute.arch.vote_ballot_sync(last < span and value <= Int64(row))) * step
        first += skipped
        span = cutlass.min(step, span - skipped)
    return first, span


class Batch(NamedTuple):
    """Rows and contexts of requests: addresses of int32 starts [requests + 1], ascending, and seq_lens [requests].

    Rows count from the first start. Positions are below context lengths, so they fit int32; -1 is that of a row which
    is not among those of its request, or which the context is too short for.

    Many warps ask for the same few of these numbers: each SM gets them from L2 once, or they would queue up there.
    """

    starts: Any
    seq_lens: Any
    requests: Any

    @cute.jit
    def position(self, row: Any, request: Any) -> Any:
        """int32 position of a row of a request, which may be any number."""
        is_known = request >= 0 and request < self.requests
        offset = Int64(request) * 4
        origin = ptx.load_global_s32_where(is_known, self.starts, is_shared=True)
        begin = ptx.load_global_s32_where(is_known, self.starts + offset, is_shared=True)
        end = ptx.load_global_s32_where(is_known, self.starts + offset + 4, is_shared=True)
        seq_len = ptx.load_global_s32_where(is_known, self.seq_lens + offset, is_shared=True)
        counted = Int64(row) + Int64(origin)
        position = Int64(seq_len) - Int64(end) + counted
        is_inside = is_known and Int64(begin) <= counted and counted < Int64(end) and position >= 0
        return Int32(position) if is_inside else Int32(-1)

    @cute.jit
    def search(self, row: Any, is_wanted: Any) -> Any:
        """The request of each lane's row, which may be any rows; `requests` or another that does not have the row if
        no request has it, or it is not wanted. Every step waits for a load: for what is rarely asked."""
        origin = ptx.load_global_s32_where(self.requests > 0, self.starts, is_shared=True)
        counted = Int64(row) + Int64(origin)
        first, end = Int32(0), self.requests if is_wanted else Int32(0)
        while first < end:
            middle = (first + end) >> 1
            bound = ptx.load_global_s32_in_order(self.starts + Int64(middle + 1) * 4, is_shared=True)
            is_behind = Int64(bound) <= counted
            first = middle + 1 if is_behind else first
            end = end if is_behind else middle
        return first

    @cute.jit
    def of_lanes(self, row: Any) -> tuple[Any, Any]:
        """(request, position) of each lane's row: rows ascend by one from lane to lane. Here rows count from 0, and a
        row before the first start has no position. The request of a row without a position means nothing."""
        lane = cute.arch.lane_idx()
        first, _ = narrow(cute.arch.shuffle_sync(row, 0), None, self.starts + 4, self.requests)
        request, position, goes_on = Int32(-1), Int32(-1), first < self.requests
        while goes_on:
            # a lane holds what belongs to request first + lane
            is_request = first + lane < self.requests
            offset = Int64(first + lane) * 4
            begin = ptx.load_global_s32_again_where(is_request, self.starts + offset)
            end = ptx.load_global_s32_again_where(is_request, self.starts + 4 + offset)
            seq_len = ptx.load_global_s32_again_where(is_request, self.seq_lens + offset)
            end = end if is_request else Int32(0x7FFFFFFF)
            # a binary search over the lanes
            below = Int32(0)
            for i in range_constexpr(len(SEARCH_STEPS)):
                step = SEARCH_STEPS[i]
                below += Int32(step) if cute.arch.shuffle_sync(end, below + (step - 1)) <= row else Int32(0)
            begin, end = cute.arch.shuffle_sync(begin, below), cute.arch.shuffle_sync(end, below)
            seq_len = cute.arch.shuffle_sync(seq_len, below)
            if below < LANES and first + below < self.requests and begin <= row:
                request = first + below
                position = Int32(ptx.max_s64(Int64(seq_len) - Int64(end) + Int64(row), Int64(-1)))
            first += LANES
            goes_on = cute.arch.vote_any_sync(below == LANES)
        return request, position

    @cute.jit
    def find(self, row: Any, per_request: Any) -> tuple[Any, Any, Any, Any]:
        """(request, position, context length, the request's value in the int32 [requests] at `per_request`) of a row.

        A row that no request covers belongs to request number `requests` and has no values. With fewer than 32 requests
        all loads are under way at once. All lanes of the warp must call with the same row.
        """
        lane = cute.arch.lane_idx()
        first, span = narrow(row, self.starts, self.starts + 4, self.requests)
        # a lane holds what belongs to request first + lane
        is_request = first + lane < self.requests
        offset = Int64(first + lane) * 4
        origin = ptx.load_global_s32_in_order(self.starts, is_shared=True)
        end = ptx.load_global_s32_where(is_request, self.starts + 4 + offset, is_shared=True)
        seq_len = ptx.load_global_s32_where(is_request, self.seq_lens + offset, is_shared=True)
        value = ptx.load_global_s32_where(is_request, per_request + offset, is_shared=True)
        remaining = Int64(end) - Int64(origin) - Int64(row)
        found = cute.arch.popc(cute.arch.vote_ballot_sync(lane < span and remaining <= 0))
        request = first + found
        seq_len = cute.arch.shuffle_sync(seq_len, found)
        position = Int64(seq_len) - cute.arch.shuffle_sync(remaining, found)
        is_inside = request < self.requests and position >= 0
        return request, Int32(position) if is_inside else Int32(-1), seq_len, cute.arch.shuffle_sync(value, found)


@cute.jit
def visible_entries(position: Any, ratio: Any) -> Any:
    """Groups of `ratio` tokens that end at or before an int32 position >= -1."""
    entries, _ = divmod(position + 1, ratio)
    return entries
