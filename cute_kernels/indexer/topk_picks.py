"""Device side of the last steps: the k-th best ones are ranked, and the picks written by column."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix
from cute_kernels.indexer.topk_bins import NAN_ORDER, Bins, Scale
from cute_kernels.indexer.topk_plan import (
    BEFORE,
    COUNTS,
    EQUALS,
    EQUALS_LENGTH,
    LIST,
    RANKED,
    TIE_COUNTS,
    TIES_BEFORE,
    WINNERS,
    Here,
    Part,
    Plan,
)

RANKED_AT_ONCE = 8
"""Elements of the list with which a lane compares its own one before it looks for more."""

LOOK_UPS = 4
"""Pages that a lane asks for before it uses one."""

NOWHERE = 0x7FFFFFFF
"""After all places."""


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

    def look_up(self, entry: Any, is_wanted: Any) -> tuple[Any, Any]:
        """(page, row of the page) of an entry >= 0; the page is negative if there is none or it is not wanted."""
        column, row = divmod(entry, self.rows)
        is_inside = is_wanted & (column < self.columns)
        source = self.table + Int64(self.request) * self.stride + Int64(column) * 4
        return ptx.load_global_s32_where(is_inside, source, is_shared=True), row

    def slot(self, found: tuple[Any, Any]) -> Any:
        """int32 slot of what `look_up` found, -1 if there is none or int32 cannot name it."""
        page, row = found
        # of the last named page a slot may pass 2^31, but not 2^32
        slot = ptx.value_below(page, self.named_pages, page * self.rows.divisor + row)
        return cutlass.max(slot, Int32(-1))


class Picks:
    """Of a row: bits of places that are picked, bits of others of which some are, and a list of the latter."""

    def __init__(self, plan: Plan, bins: Bins) -> None:
        self.plan, self.bins = plan, bins
        self.cluster = plan.cluster

    @cute.jit
    def clear(self, here: Here) -> None:
        """Pick nothing."""
        self.bins.clear(here, self.plan.picks, self.plan.smem_bytes - self.plan.picks)

    @cute.jit
    def add(
        self,
        here: Here,
        is_there: Boolean,
        order: Uint32,
        place: Int32,
        low: Uint32,
        shift: Int32,
        is_tied: Boolean,
        may_be_nan: cutlass.Constexpr,
    ) -> None:
        """Pick an element before `low`; note one of the 2^shift orders from there on as a tie, or list it."""
        is_last = is_there & (Scale(low, shift).bin(order) == Uint32(0))
        if const_expr(may_be_nan):
            # of NaN there is a bin only if all numbers are picked
            is_last = is_last & ((order != Uint32(NAN_ORDER)) | (low == Uint32(NAN_ORDER)))
        word, bit = here.at + self.plan.picks + (place >> 5) * 4, Int32(1) << (place & 31)
        ptx.reduce_shared("or.b32", word, bit, is_there & (order < low))
        if is_last:
            if is_tied:
                ptx.reduce_shared("or.b32", word + (self.plan.ties - self.plan.picks), bit)
            else:
                self.list(here, order, place)

    @cute.jit
    def list(self, here: Here, order: Uint32, place: Int32) -> None:
        place += here.rank * self.plan.places
        number = ptx.fetch_add_shared(here.lead + EQUALS_LENGTH, Int32(1), self.cluster > 1)
        if number < RANKED:
            if const_expr(self.cluster > 1):
                ptx.store_cluster_64(here.lead + EQUALS + number * 8, Int32(order), place)
            else:
                ptx.store_shared_64(here.lead + EQUALS + number * 8, Int32(order), place)

    @cute.jit
    def rank(self, here: Here, count: Int32, wanted: Int32) -> None:
        """By one warp of each block: of the `count` elements of the list, note the block's among the `wanted` best as
        ties, and the places of all of these."""
        own = here.lead + EQUALS + here.lane * 8
        word, place = ptx.load_cluster_64(own) if const_expr(self.cluster > 1) else ptx.load_shared_64(own)
        is_there = here.lane < count
        order, place = Uint32(word) if is_there else Uint32(NAN_ORDER), place if is_there else Int32(NOWHERE)
        is_picked = is_there & (self.better(order, place, count) < wanted)
        ptx.store_shared_s32(here.at + WINNERS + here.lane * 4, place if is_picked else Int32(NOWHERE))
        place -= here.rank * self.plan.places
        is_own = is_picked & (place >= 0) & (place < self.plan.places)
        ptx.reduce_shared("or.b32", here.at + self.plan.ties + (place >> 5) * 4, Int32(1) << (place & 31), is_own)

    @cute.jit
    def better(self, order: Uint32, place: Int32, count: Int32) -> Int32:
        """How many of the first `count` lanes have a better element than this one."""
        number = Int32(0)
        for first in cutlass.range(Int32(0), count, RANKED_AT_ONCE, unroll=1):
            for i in range_constexpr(RANKED_AT_ONCE):
                other = Uint32(cute.arch.shuffle_sync(Int32(order), first + i))
                is_equal = (other == order) & (cute.arch.shuffle_sync(place, first + i) < place)
                number += Int32((other < order) | is_equal)
        return number

    @cute.jit
    def write(
        self, here: Here, part: Part, count: Int32, wanted: Int32, is_tied: Boolean, k: Int32, out: Int64, slots: Slots
    ) -> None:
        """Write the picks and the first `wanted` ties by column, or the slots of these. If there are no ties, the list
        becomes ones, all of which are picked."""
        # warps share the words evenly
        width = self.plan.width
        words = (part.stop + (width - 1)) >> (width.bit_length() - 1)
        share = (words + (self.plan.warps - 1)) >> (self.plan.warps.bit_length() - 1)
        first = here.warp * share
        stop = cutlass.min(first + share, words)
        here_picks, here_ties = here.at + self.plan.picks, here.at + self.plan.ties
        picks, ties = Int32(0), Int32(0)
        for start in cutlass.range(first, stop, 32, unroll=1):
            picks += cute.arch.popc(self.load(here_picks, start + here.lane, stop))
        self.publish(here, picks, COUNTS, BEFORE)
        if is_tied:
            for start in cutlass.range(first, stop, 32, unroll=1):
                ties += cute.arch.popc(self.load(here_ties, start + here.lane, stop))
            self.publish(here, ties, TIE_COUNTS, TIES_BEFORE)
        elif here.warp == 0:
            self.rank(here, count, wanted)
        self.bins.barrier()

        picks = self.sum_before(here, COUNTS, BEFORE)
        if is_tied:
            ties = self.sum_before(here, TIE_COUNTS, TIES_BEFORE)
        else:
            place = ptx.load_shared_s32(here.at + WINNERS + here.lane * 4)
            ties = cute.arch.popc(cute.arch.vote_ballot_sync(place < here.rank * self.plan.places + first * width))
        target = picks + cutlass.min(ties, wanted)
        start_of_warp = target
        for start in cutlass.range(first, stop, 32, unroll=1):
            word = self.load(here_picks, start + here.lane, stop)
            tied = self.load(here_ties, start + here.lane, stop)
            if is_tied:
                number = cute.arch.popc(tied)
                sums = lanes_prefix(number)
                excess = number - (wanted - ties - (sums - number))
                while excess > 0 and tied != 0:
                    tied = tied ^ (Int32(1) << (31 - Int32(cute.arch.clz(tied))))
                    excess -= 1
                ties += cute.arch.shuffle_sync(sums, 31)
            word = word | tied
            number = cute.arch.popc(word)
            sums = target + lanes_prefix(number)
            column = part.first + (start + here.lane) * width
            if slots.table == 0:
                self.write_word(column, word, sums - number, k, out)
            else:
                self.list_word(here, column, word, sums - number, k)
            target = cute.arch.shuffle_sync(sums, 31)
        if slots.table != 0:
            cute.arch.sync_warp()
            stop = cutlass.min(target, k)
            self.write_slots(here.at + LIST, start_of_warp + here.lane, 32, stop, out, slots)
        if const_expr(self.cluster > 1):
            self.bins.barrier()  # nobody leaves while others may read its shared memory

    @cute.jit
    def write_word(self, column: Int32, word: Int32, number: Int32, k: Int32, out: Int64) -> None:
        """Write the columns that the bits of a word stand for, `column` for bit 0, as numbers `number`, ... of k."""
        while word != 0:
            bit = cute.arch.popc((word & -word) - 1)
            word = word & (word - 1)
            ptx.store_global_s32(out + Int64(number) * 4, column + bit, number < k)
            number += 1

    @cute.jit
    def list_word(self, here: Here, column: Int32, word: Int32, number: Int32, k: Int32) -> None:
        """As `write_word`, but to shared memory, where nobody needs the candidates any more."""
        while word != 0:
            bit = cute.arch.popc((word & -word) - 1)
            word = word & (word - 1)
            if number < k:
                ptx.store_shared_s32(here.at + LIST + number * 4, column + bit)
            number += 1

    @cute.jit
    def write_slots(
        self, columns: Int32, first: Int32, step: cutlass.Constexpr, stop: Int32, out: Int64, slots: Slots
    ) -> None:
        """Write the slots of listed picks, up to `stop`, of which a thread has every step-th one from `first` on:
        neighbours by neighbouring lanes, and as many pages under way as there can be."""
        for start in cutlass.range(first, stop, step * LOOK_UPS, unroll=1):
            found = []
            for i in range_constexpr(LOOK_UPS):
                number = start + step * i
                entry = ptx.load_shared_s32(columns + cutlass.min(number, stop - 1) * 4)
                found.append(slots.look_up(entry, number < stop))
            for i in range_constexpr(LOOK_UPS):
                number = start + step * i
                ptx.store_global_s32(out + Int64(number) * 4, slots.slot(found[i]), number < stop)

    @cute.jit
    def load(self, words: Any, number: Any, stop: Any) -> Any:
        """The bits of `width` places, or zero past the end."""
        found = Int32(0)
        if number < stop:
            if const_expr(self.plan.width == 32):
                found = ptx.load_shared_s32(words + number * 4)
            else:
                found = ptx.load_shared_u16(words + number * 2)
        return found

    @cute.jit
    def publish(self, here: Here, number: Any, counts: cutlass.Constexpr, before: cutlass.Constexpr) -> None:
        """Let the block's warps know this warp's sum, and blocks of higher rank the block's."""
        number = cute.arch.warp_redux_sync(number, "add")
        if here.lane == 0:
            ptx.store_shared_s32(here.at + counts + here.warp * 4, number)
        if const_expr(self.cluster > 1):
            is_later = (here.lane > here.rank) & (here.lane < self.cluster)
            target = ptx.map_shared(here.at + before, cutlass.min(here.lane, Int32(self.cluster - 1)))
            ptx.reduce_shared("add.u32", target, number, is_later, of_cluster=True)

    @cute.jit
    def sum_before(self, here: Here, counts: cutlass.Constexpr, before: cutlass.Constexpr) -> Any:
        """What warps before this one published."""
        number = ptx.load_shared_s32(here.at + counts + here.lane * 4)
        number = number if here.lane < here.warp else Int32(0)
        return cute.arch.warp_redux_sync(number, "add") + ptx.load_shared_s32(here.at + before)
