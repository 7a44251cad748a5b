# SPDX-License-Identifier: Apache-2.0
"""What the score kernels share: groups of query rows, the keys that rows see, where keys lie; entry arguments; the
tiles that a CTA takes; warps that write -inf.

Query rows of one request that follow each other form a group, at most `rows` of them. A group is scored against the
keys that any of its rows sees, a tile of keys at a time. A score depends on its row and its key alone, not on the tile
or the CTA that computes it.

The tiles of all groups, one group after the other, are one list, of which every CTA takes an equal share. Neither long
requests nor few of them leave CTAs idle. If there are many groups, all warps of a CTA count the tiles first. Then each
warp that has to do with tiles goes through the CTA's share for itself, work tile after work tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx

WARP = 32

KEY_TILE = 64
"""Keys of a tile on Hopper, the rows of a warpgroup's wgmma, and where mma.sync computes products."""


def fake_arguments(has_q_scales: bool = False, has_pdl: bool = False) -> tuple[Any, ...]:
    """To compile Hopper's and Blackwell's kernels with; some of them take the queries' scales, some whether they are
    launched as dependents."""

    def matrix() -> Any:
        return make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))

    numbers: list[Any] = [Int64(0)] * 4 + [Int32(1)] * 2
    numbers += [Int64(0)] * 4 + [Int32(1)] * 2 + [Int64(0)] * 2 + [Int32(0)]
    numbers += [Int64(0)] * 3 + [Int32(0)] * 4 + [Int64(0)] * (3 if has_q_scales else 0)
    numbers += [Boolean(False)] * has_pdl + [Int32(1)]
    return matrix(), matrix(), *numbers, make_fake_stream(use_tvm_ffi_env_stream=True)


def divide(number: Any, by: int) -> Any:
    """number // by of a number that is not negative: the DSL's own division minds negative ones, six instructions."""
    return number >> (by.bit_length() - 1) if by & (by - 1) == 0 else Int32(Uint32(number) // by)


class RowGroups(NamedTuple):
    """The groups of a call: `requests` times `count` rows, in `per_request` groups each; `ctas` share them."""

    requests: Any
    count: Any
    per_request: Any
    ctas: Any

    @classmethod
    def of(cls, requests: Any, count: Any, rows: int, ctas: Any) -> RowGroups:
        """Of at most `rows` rows each. On the host's side of the launch."""
        divisor = cute.fast_divmod_create_divisor_v2
        return cls(requests, count, divisor(cute.ceil_div(count, rows)), divisor(ctas))

    def total(self) -> Any:
        return self.requests * self.per_request.divisor

    def coords(self, group: Any, rows: int) -> tuple[Any, Any]:
        """Request of a group, and the first of its rows among the request's."""
        request, number = divmod(group, self.per_request)
        return request, number * rows


class Windows(NamedTuple):
    """Which keys each row sees: addresses of int32 starts and ends, and bytes from one request's ends to the
    next one's.

    limit     number of keys there are
    columns   of the scores
    shifts    -1 if a row's first column is that of its start, 0 if it is that of key 0
    skip      a row that sees no more keys than these is not scored: it counts as one that sees none
    """

    starts: Any
    ends: Any
    end_request: Any
    limit: Any
    columns: Any
    shifts: Any
    skip: Any

    def start_address(self, row: Any) -> Any:
        return self.starts + Int64(row) * 4

    def end_address(self, request: Any, row: Any) -> Any:
        return self.ends + Int64(request) * self.end_request + Int64(row) * 4

    @cute.jit
    def clip(self, start: Any, end: Any) -> tuple[Any, Any, Any]:
        """First key, end of the keys (both 0 if there are none) and the key of column 0. start: the number 0 where rows
        have no starts."""
        if const_expr(isinstance(start, int)):
            stop = cutlass.min(cutlass.min(end, self.limit), self.columns)
            return Int32(0), (stop if stop > cutlass.max(self.skip, 0) else Int32(0)), Int32(0)
        shift = start & self.shifts
        first = cutlass.max(start, 0)
        stop = Int32(ptx.min_s64(Int64(shift) + Int64(self.columns), Int64(cutlass.min(end, self.limit))))
        is_any = (first < stop) & (stop - first > self.skip)
        return (first if is_any else Int32(0)), (stop if is_any else Int32(0)), shift

    @cute.jit
    def load(self, request: Any, row: Any, is_wanted: Any, paged: cutlass.Constexpr) -> tuple[Any, Any, Any]:
        """As `clip`, of a row; no keys if it is not wanted."""
        end = ptx.load_global_s32_where(is_wanted, self.end_address(request, row), is_shared=True)
        start: Any = 0
        if const_expr(not paged):
            start = ptx.load_global_s32_where(is_wanted, self.start_address(row), is_shared=True)
        return self.clip(start, end)

    @cute.jit
    def load_ends(self, groups: Any, group: Any, rows: cutlass.Constexpr) -> list[Any]:
        """Ends of a group's rows, -1 of rows that there are not."""
        is_group = group < groups.total()
        request, first_row = groups.coords(group if is_group else Int32(0), rows)
        ends = []
        for i in cutlass.range_constexpr(rows):
            is_row = is_group & (first_row + i < groups.count)
            address = self.end_address(request, first_row + i)
            ends.append(ptx.load_global_s32_where(is_row, address, is_shared=True))
        return ends

    @cute.jit
    def span_of_ends(self, ends: list[Any], keys: cutlass.Constexpr) -> tuple[Any, Any, Any]:
        """As `span`, of rows that all begin with key 0."""
        high = Int32(0)
        for i in cutlass.range_constexpr(len(ends)):
            high = cutlass.max(high, self.clip(0, ends[i])[1])
        return Int32(0), high, divide(high + (keys - 1), keys)

    @cute.jit
    def span(
        self, groups: Any, group: Any, rows: cutlass.Constexpr, paged: cutlass.Constexpr, keys: cutlass.Constexpr
    ) -> tuple[Any, Any, Any]:
        """First key of a group's tiles of `keys` keys, end of its keys and number of tiles."""
        if const_expr(paged):
            return self.span_of_ends(self.load_ends(groups, group, rows), keys)
        is_group = group < groups.total()
        request, first_row = groups.coords(group if is_group else Int32(0), rows)
        low, high = Int32(0x7FFFFFFF), Int32(0)
        for i in cutlass.range_constexpr(rows):
            first, stop, _ = self.load(request, first_row + i, is_group & (first_row + i < groups.count), paged)
            low = cutlass.min(low, first) if first < stop else low
            high = cutlass.max(high, stop)
        low = low & -keys if high > 0 else Int32(0)
        return low, high, divide(high - low + (keys - 1), keys)


class KeyCache(NamedTuple):
    """Where keys are, as far as TMA descriptors do not know it: `scales` is the address of the scale of key 0 of
    page 0, `page_boxes` the TMA boxes of a page, as a divisor, `count` the number of contiguous keys, which have no
    block table."""

    scales: Any
    page_stride: Any
    page_boxes: Any
    pages: Any
    count: Any
    table: Any
    table_stride: Any
    table_columns: Any

    @cute.jit
    def load_page(self, request: Any, box: Any, is_wanted: Any) -> tuple[Any, Any]:
        """Page, which may not exist, and place in it of a TMA box of a request's keys."""
        column, place = divmod(box, self.page_boxes)
        is_wanted = is_wanted & (column < self.table_columns)
        address = self.table + Int64(request) * self.table_stride + Int64(column) * 4
        return ptx.load_global_s32_where(is_wanted, address, is_shared=True), place

    @cute.jit
    def existing(self, page: Any) -> Any:
        """The page, or a negative number if there is none."""
        return page if page < self.pages else Int32(-1)

    @cute.jit
    def locate(self, request: Any, box: Any, is_wanted: Any) -> tuple[Any, Any]:
        """Page, negative if there is none, and place in it of a TMA box of a request's keys."""
        page, place = self.load_page(request, box, is_wanted)
        return self.existing(page), place


# ---- tile scheduler

LOOKED_AT = 4 * WARP
"""Groups up to which every warp that needs a CTA's share finds it by itself."""

COUNTERS = 256
"""Counts of tiles in shared memory, one for each chunk of groups: a multiple of 32 groups."""

LAST_OF_GROUP, LAST_OF_ALL = 1, 16
"""Added to the first key of a tile, a multiple of 32 at least, if its consumer has no more tiles of the group; if it
has none at all, and the group is the CTA's last."""


class WorkTile(NamedTuple):
    """What a CTA takes of a group: the group's number, its request and first row, the first key, the end of the group's
    keys, and how many tiles of `keys` keys there are; of those a consumer takes number `own` and every `step`th after
    it.

    turn   number of the work tile among the CTA's
    last   what is added to the first key of a consumer's last tile
    """

    group: Any
    request: Any
    first_row: Any
    first_key: Any
    stop: Any
    count: Any
    own: Any
    turn: Any
    last: Any
    step: int
    keys: int

    @property
    def taken(self) -> Any:
        """Tiles that the consumer takes: maybe none, never less, as `own` < `step`."""
        return divide(self.count - self.own + (self.step - 1), self.step)

    @cute.jit
    def tagged_key(self, tile: Any) -> Any:
        """First key of a tile, plus LAST_OF_GROUP and LAST_OF_ALL if they apply."""
        return self.first_key + tile * self.keys + (self.last if tile >= self.count - self.step else Int32(0))


@dataclass(frozen=True)
class TileScheduler:
    """The share of a CTA.

    rows      of a group
    warps     of the CTA
    paged     whether keys lie in pages
    keys      of a tile
    counts    address of COUNTERS words of shared memory
    ends      None, or those of the rows of the group that has the lane's number (Windows.load_ends), where rows begin
              with key 0: a warp that goes through the share has asked for them before it could do anything else
    """

    rows: int
    warps: int
    paged: bool
    keys: int
    groups: RowGroups
    windows: Windows
    counts: Any
    ends: Any = None

    @cute.jit
    def count_tiles(self, warp: Any) -> None:
        """Tiles of every chunk of groups, into shared memory. By all warps of the CTA, which then synchronize."""
        lane = cute.arch.lane_idx()
        width = self.chunk_width()
        chunks = cute.ceil_div(self.groups.total(), width * WARP)
        for chunk in cutlass.range(warp, chunks, self.warps, unroll=1):
            tiles = Int32(0)
            for i in cutlass.range(width, unroll=1):
                group = (chunk * width + i) * WARP + lane
                tiles += self.span(group)[2]
            tiles = cute.arch.warp_redux_sync(tiles, "add")
            if lane == 0:
                ptx.store_shared_s32(self.counts + chunk * 4, tiles)

    def chunk_width(self) -> Any:
        """Groups of a chunk, in 32s."""
        return cute.ceil_div(self.groups.total(), WARP * COUNTERS)

    @cute.jit
    def share(self) -> tuple[Any, Any, Any]:
        """The chunk that the CTA's share begins in, tiles of it that belong to others, and tiles of the share."""
        lane = cute.arch.lane_idx()
        chunks = cute.ceil_div(self.groups.total(), self.chunk_width() * WARP)
        total = Int32(0)
        for begin in cutlass.range(0, chunks, WARP, unroll=1):
            tiles = ptx.load_shared_s32(self.counts + (begin + lane) * 4)
            total += tiles if begin + lane < chunks else Int32(0)
        skipped, count = self.portion(cute.arch.warp_redux_sync(total, "add"))
        first, goes_on = Int32(0), count > 0
        while goes_on:
            tiles = ptx.load_shared_s32(self.counts + (first + lane) * 4)
            tiles = tiles if first + lane < chunks else Int32(0)
            until = self.sum_up_to_lane(tiles)
            here = cute.arch.shuffle_sync(until, WARP - 1)
            goes_on = skipped >= here
            if goes_on:
                skipped -= here
                first += WARP
            else:
                number = cute.arch.popc(cute.arch.vote_ballot_sync(until <= skipped))
                skipped -= cute.arch.shuffle_sync(until - tiles, number)
                first += number
        return first, skipped, count

    @cute.jit
    def portion(self, total: Any) -> tuple[Any, Any]:
        """Of so many tiles, how many are those of CTAs before this one, and how many are this CTA's."""
        cta, _, _ = cute.arch.block_idx()
        each, rest = divmod(total, self.groups.ctas)
        return cta * each + cutlass.min(cta, rest), each + (Int32(1) if cta < rest else Int32(0))

    @cute.jit
    def for_each(
        self, consumer: Any, step: cutlass.Constexpr, work: cutlass.Constexpr, state: Any, is_always: Any = False
    ) -> Any:
        """state = work(work_tile, state) for all work tiles of which consumer number `consumer` of `step` has tiles, or
        for all that there are (is_always)."""
        lane = cute.arch.lane_idx()
        base, skipped, remaining = Int32(0), Int32(0), Int32(0)
        low, high, tiles = Int32(0), Int32(0), Int32(0)
        if self.is_counted():
            chunk, skipped, remaining = self.share()
            base = chunk * self.chunk_width() * WARP
            low, high, tiles = self.span(base + lane)
        else:
            if const_expr(self.ends is None):
                low, high, tiles = self.span(lane)
            else:
                low, high, tiles = self.windows.span_of_ends(self.ends, self.keys)
            if self.groups.total() <= WARP:
                skipped, remaining = self.portion(cute.arch.warp_redux_sync(tiles, "add"))
            else:
                spans = [(low, high, tiles), *(self.span(lane + first) for first in range(WARP, LOOKED_AT, WARP))]
                sums = [cute.arch.warp_redux_sync(span[2], "add") for span in spans]
                skipped, remaining = self.portion(sum(sums[1:], sums[0]))
                for i in cutlass.range_constexpr(len(spans) - 1):
                    if (base == i * WARP) & (skipped >= sums[i]):
                        skipped -= sums[i]
                        base += WARP
                        low, high, tiles = spans[i + 1]
        own, turn, goes_on = Int32(consumer), Int32(0), remaining > 0
        while goes_on:
            until = self.sum_up_to_lane(tiles)
            here = cute.arch.shuffle_sync(until, WARP - 1)
            if skipped >= here:
                skipped -= here
            else:
                number = cute.arch.popc(cute.arch.vote_ballot_sync(until <= skipped))
                skipped -= cute.arch.shuffle_sync(until - tiles, number)
                while (number < WARP) & (remaining > 0):
                    count = cutlass.min(cute.arch.shuffle_sync(tiles, number) - skipped, remaining)
                    if (own < count) | (is_always & (count > 0)):
                        request, first_row = self.groups.coords(base + number, self.rows)
                        first_key = cute.arch.shuffle_sync(low, number) + skipped * self.keys
                        stop = cute.arch.shuffle_sync(high, number)
                        last = Int32(LAST_OF_GROUP) if count < remaining else Int32(LAST_OF_GROUP + LAST_OF_ALL)
                        place = base + number, request, first_row, first_key, stop
                        work_tile = WorkTile(*place, count, own, turn, last, step, self.keys)
                        state = work(work_tile, state)
                    turn = turn + 1 if count > 0 else turn
                    # the first of the next work tile's tiles, if these were before it
                    own = own - count
                    if own < 0:
                        own = own + divide(step - 1 - own, step) * step
                    remaining -= count
                    skipped = Int32(0)
                    number += 1
            base += WARP
            goes_on = remaining > 0
            if goes_on:
                low, high, tiles = self.span(base + lane)
        return state

    def span(self, group: Any) -> tuple[Any, Any, Any]:
        """First key of a group's tiles, end of its keys and number of tiles."""
        return self.windows.span(self.groups, group, self.rows, self.paged, self.keys)

    def is_counted(self) -> Any:
        """Whether all warps count tiles (`count_tiles`) before one can find the CTA's share."""
        return self.groups.total() > LOOKED_AT

    @cute.jit
    def sum_up_to_lane(self, number: Any) -> Any:
        lane = cute.arch.lane_idx()
        for i in range_constexpr(5):
            below = cute.arch.shuffle_sync_up(number, 1 << i)
            number += below if lane >= (1 << i) else Int32(0)
        return number


# ---- columns without keys

PIECE = 4096
"""Columns that a warp looks after at a time: of one row, 16 KB."""

NEGATIVE_INFINITY = 0xFF800000 - (1 << 32)
"""Bits of -inf, as an int32."""


@dataclass(frozen=True)
class Fill:
    """Warps that write -inf where a row sees no key, beside those that compute scores or before they do: what one of
    them does. out: address of the scores, out_stride in bytes."""

    paged: bool
    groups: RowGroups
    windows: Windows
    out: Any
    out_stride: Any

    @cute.jit
    def run(self, number: Any, warps: Any) -> None:
        """Write the columns outside the rows' windows, as number `number` of so many warps. Every 32nd piece of a
        warp's is a lane's, which finds out what the row sees; then all lanes write each of the 32 in turn."""
        lane = cute.arch.lane_idx()
        per_row = cute.ceil_div(self.windows.columns, PIECE)
        pieces = Int64(self.groups.requests * self.groups.count) * Int64(per_row)
        step, first = Int64(warps), Int64(number)
        while first < pieces:
            own = first + Int64(lane) * step
            is_piece = own < pieces
            row = Int32(own // Int64(per_row)) if is_piece else Int32(0)
            begin = Int32(own % Int64(per_row)) * PIECE
            request = row // self.groups.count
            low, high, shift = self.windows.load(request, row % self.groups.count, is_piece, self.paged)
            low, high = low - shift if low < high else Int32(0), high - shift if low < high else Int32(0)
            end = cutlass.min(begin + PIECE, self.windows.columns) if is_piece else begin
            for other in cutlass.range(WARP, unroll=1):
                target = self.out + Int64(cute.arch.shuffle_sync(row, other)) * self.out_stride
                one, two = cute.arch.shuffle_sync(begin, other), cute.arch.shuffle_sync(end, other)
                self.write(target, one, cutlass.min(two, cute.arch.shuffle_sync(low, other)))
                self.write(target, cutlass.max(one, cute.arch.shuffle_sync(high, other)), two)
            first += step * WARP

    @cute.jit
    def write(self, row: Any, begin: Any, end: Any) -> None:
        """-inf to columns begin .. end - 1 of the row at an address: 16 bytes a lane where they are aligned."""
        lead = Int32((row >> 2) & 3)
        words = [Int32(NEGATIVE_INFINITY)] * 4
        for at in cutlass.range((begin + lead & -4) - lead + cute.arch.lane_idx() * 4, end, WARP * 4, unroll=1):
            target = row + Int64(at) * 4
            is_whole = (at >= begin) & (at + 4 <= end)
            ptx.store_global_128(target, words, is_whole)
            if not is_whole:
                for i in range_constexpr(4):
                    ptx.store_global_s32(target + i * 4, words[0], (at + i >= begin) & (at + i < end))
