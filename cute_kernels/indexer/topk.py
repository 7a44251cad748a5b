# SPDX-License-Identifier: Apache-2.0
"""Kernel of top_k_per_row_prefill and top_k_per_row_decode: a CTA, or a cluster of CTAs, picks the best of a row.

A row of at most k columns has all of them written, without a look at its scores. The picks come in ascending order,
whatever the shape of the CTA, so a row's result is the same bits in every call. Scores are compared by `order`, a sort
key of 32 bits (`descending_order`): the smaller, the better; NaN last. A longer row goes through these phases, or
through those of topk_held.py, if the registers of a CTA hold it:

    threshold    a bound that at least k elements reach, and little more than k: "candidates"      bound_of_*
      |  sync    all warps' bounds become one
    filter       each warp lists its candidates: (order, place), or places first and orders later   list_tiles, collect
      |  sync
    select       radix: a histogram of the candidates finds the bin of the k-th best; while that    count, find
      |  sync    holds more than RANKED elements, it gets a histogram 512 times as fine
    pick         elements of better bins become bits of `picks`; those of the bin are listed        pick
      |  sync
    rank         the listed ones are compared with each other, and the best become bits, too        rank
      |  sync
    write        bits become columns, ascending, warp by warp by prefix sums                        write

* Threshold of streamed rows (one CTA, several tiles): guessed by the first tile, the average of the warps' guesses, so
  that the row is read once. If fewer than k scores reach it, or a list is too short, as of other rows.
* Threshold of other rows: each thread keeps the maxima of up to 8 groups of its scores; each warp bisects for a score
  that ceil(k / warps of the row) of its maxima reach. The worst warp's score, which at least k reach, is the bound.
  Every warp has columns from all over the row, so runs of good columns do not matter.
* A warp with more candidates than its list holds goes through all of its columns again instead.
* Rank: equal scores are told apart by place. If more than RANKED have the k-th best score, the first places are picked.
* Syncs are of the CTA or, where it is shared, of the cluster; histograms are then summed over its CTAs.

Nothing here depends on the order in which threads come: histograms and lists are sums and sets, and the picks are
written by column.

Decode rows may have slots of the compressed cache written in place of columns: each pick's page comes from the
request's row of a block table. A warp lists its picks in shared memory first, so that all their pages are under way at
once and neighbouring lanes store neighbours.

A CTA takes neighbouring columns, in tiles, one after the other:

    chunk       128 neighbouring columns, which a warp loads at once, four a lane
    tile        V chunks of each of W warps, held in registers. Of T tiles warp w has chunks (v W + w) T + t in tile t:
                every tile has columns from all over the row, and so has every warp
    place       a column's offset in its CTA, from the last 16-byte boundary before the row's range on
    picks       bit p % 32 of word p // 32 for place p: whether it is one of the k best
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix, lanes_sum, pairwise
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer.topk_slots import Slots
from cute_kernels.runtime.arch import arch_number
from cute_kernels.runtime.compile import KernelKey

# ---- config

CLUSTER_ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Where the CTAs of a cluster can share a row."""

SPREAD_BYTES = 117 << 10
"""More than half of the shared memory of a multiprocessor that has clusters."""

BIN_BITS = 9
BINS = 1 << BIN_BITS

RANKED = 32
"""Elements of the k-th best one's bin that are ranked at once, one a lane."""

GROUPS = 8
"""Of which a thread keeps the maxima."""

CHUNK_BITS = 7

CHUNK = 1 << CHUNK_BITS
"""Columns that a warp loads at once."""

SPARE = 1 / 3
"""Of the picks, that a bound is searched for beyond k in a sample: of random scores fewer than k reach it in less than
one of a hundred rows, and 1.3 k on average."""

AT_ONCE = 3
"""Listed elements that a thread loads before it looks at one."""

MOST_EACH = 1.5
"""Scores of a lane in a sample that are to reach its bound: with more, too few lanes have none for a good guess."""

MORE_LANES = 0.8
"""Added to the lanes whose best scores are to be better than a bound, a whole number then. Each warp's few lanes are a
rough estimate: with half a lane more, fewer than 512 scores reached the bound in about one of 600 rows of 16 tiles."""

GUESSES, FAR = 4, 1 << 26
"""Times that a bound is searched where it would be if scores were spread evenly, before the middle of their orders is
taken, and the distance of these for which that is worth it, eight binary orders: normal scores of both signs need 4
steps at most, not 11, some others 4 more."""

RANKED_AT_ONCE = 8
"""Elements of the list with which a lane compares its own one before it looks for more."""


# ---- shared memory

# byte offsets in a CTA's shared memory; all before ZEROS is zero at first
CANDIDATES = 0
EQUALS_LENGTH, BEFORE, TIES_BEFORE = (4 * BINS + 4 * i for i in range(3))
ZEROS = 4 * BINS + 16
SUMS = ZEROS
FOUND, EXTREMES = SUMS + 4 * BINS, SUMS + 4 * BINS + 16
COUNTS, TIE_COUNTS, WINNERS, RANGES = (EXTREMES + 16 + 128 * i for i in range(4))
AGREED = COUNTS  # 256 bytes, long before there are counts
EQUALS = RANGES + 256
LIST = EQUALS + 8 * RANKED


@dataclass(frozen=True)
class TopKConfig:
    """CTAs of so many warps, `cluster` of which share a row; vectors of a thread and tile, most tiles of a CTA."""

    warps: int
    vectors: int
    cluster: int
    tiles: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def is_streamed(self) -> bool:
        """Whether a row's bound is guessed by its first tile, and what reaches it kept of all tiles as they come."""
        return self.tiles > 1 and self.cluster == 1

    @property
    def is_chosen(self) -> bool:
        """Whether candidates of a streamed row get their scores from registers, tile by tile, and not from memory when
        all are listed. With 32 registers to choose from that is as slow, and slower for rows of two or three tiles."""
        return self.is_streamed and self.vectors <= 4

    @property
    def tile(self) -> int:
        """Columns."""
        return 4 * self.vectors * self.threads

    @property
    def places(self) -> int:
        """Of a CTA."""
        return self.tile * self.tiles

    @property
    def width(self) -> int:
        """Places whose picks a lane writes at a time: 16 where otherwise half of the lanes would have none."""
        return 32 if self.places // self.threads >= 32 else 16

    @property
    def length(self) -> int:
        """Candidates that a warp lists; fewer where the CTA's picks need much memory. All lists together have room
        for the picks of a row, 4 bytes each, which wait there for the pages they lie in."""
        if self.is_streamed:
            most = 8192 if self.places <= 8192 * self.warps else 3584
        else:
            most = 8192 if self.places <= 131072 else 2048
        return min(most, 512 * self.warps) // self.warps

    @property
    def picks(self) -> int:
        """Byte offset of the words with a bit for each place that is picked."""
        return LIST + 8 * self.length * self.warps

    @property
    def ties(self) -> int:
        """Byte offset of those for the places that share the k-th best score and are picked after all better ones."""
        return self.picks + self.places // 8

    @property
    def smem_bytes(self) -> int:
        """Of a CTA."""
        return self.ties + self.places // 8


class Here(NamedTuple):
    """A thread's place, and the address of shared memory: the CTA's own, and that of the cluster's first CTA."""

    at: Any
    lead: Any
    thread: Any
    warp: Any
    lane: Any
    rank: Any


class Part(NamedTuple):
    """A CTA's part of a row.

    base    address of place 0, 16-byte aligned
    head    first place of the row's range: less than 4 in the first CTA, else at most 0
    stop    end of the part; 0 or less if there is none
    tiles   of the part
    first   column of the row's range that is place 0
    step    places from a thread's vector to its next one
    each    1 / (warps * tiles), fp32
    """

    base: Any
    head: Any
    stop: Any
    tiles: Any
    first: Any
    step: Any
    each: Any


# ---- histogram

OWN = BINS // 32
"""Bins of a lane."""

NAN_ORDER = 0xFFFFFFFF

LOWEST_ORDER = 0xFF800000
"""descending_order of NaN and of -inf."""

TOO_MANY = -(1 << 20)
"""Candidates of a warp whose list is too short: the sum of all warps is less than 0, whatever the others have."""


class Scale(NamedTuple):
    """Bins of 2^shift orders from `low` on."""

    low: Any
    shift: Any

    def bin(self, order: Any) -> Any:
        """Of an order; those outside are in none of the BINS first."""
        return (order - self.low) >> Uint32(self.shift)

    def start(self, number: Any) -> Any:
        """First order of a bin."""
        return self.low + (Uint32(number) << Uint32(self.shift))


def finest(first: Any, last: Any) -> Scale:
    """The finest one of which the bins hold all orders from `first` to `last`."""
    width = 32 - Int32(cute.arch.clz(Int32(last - first)))
    return Scale(first, cutlass.max(width - BIN_BITS, Int32(0)))


class Bins:
    """Of all CTAs that share a row. What is done once for a CTA, its first warp does: issue slots are scarce."""

    def __init__(self, config: Any) -> None:
        self.warps, self.threads, self.cluster = config.warps, config.threads, config.cluster

    def barrier(self) -> None:
        """Of all threads that share the row."""
        if self.cluster > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def clear(self, here: Here, start: cutlass.Constexpr, size: cutlass.Constexpr) -> None:
        for i in cutlass.range(here.thread * 16, size, 16 * self.threads, unroll=1):
            ptx.store_shared_128(here.at + start + i, [Int32(0)] * 4)

    @cute.jit
    def clear_again(self, here: Here) -> None:
        """All threads have read the bins, and now count in them again."""
        self.barrier()
        self.clear(here, CANDIDATES, 4 * BINS)
        self.barrier()

    def push(self, here: Here, scale: Scale, order: Any, is_wanted: Any, may_be_nan: bool) -> None:
        """Count the order of a number, where it is wanted and in a bin."""
        number = scale.bin(order)
        is_wanted = (number < Uint32(BINS)) & is_wanted
        if may_be_nan:
            is_wanted = is_wanted & (order != Uint32(NAN_ORDER))
        ptx.reduce_shared("add.u32", here.at + CANDIDATES + Int32(number) * 4, Int32(1), is_wanted)

    @cute.jit
    def extremes(self, here: Here, first: Uint32, last: Uint32) -> tuple[Any, Any]:
        """(smallest `first`, largest `last`) of all warps, each of which brings its own."""
        if here.lane == 0:
            ptx.store_shared_64(here.at + RANGES + here.warp * 8, Int32(first), Int32(last))
        self.barrier()
        own = here.at + RANGES + here.lane % self.warps * 8
        if const_expr(self.cluster == 1):
            one, other = ptx.load_shared_64(own)
            first, last = Uint32(one), Uint32(other)
            first, last = self.over_lanes(first, last)
        else:
            if here.warp == 0:
                pairs = [ptx.load_cluster_64(ptx.map_shared(own, rank)) for rank in range(self.cluster)]
                for one, other in pairs:
                    first, last = cutlass.min(first, Uint32(one)), cutlass.max(last, Uint32(other))
                first, last = self.over_lanes(first, last)
                if here.lane == 0:
                    ptx.store_shared_64(here.at + EXTREMES, Int32(first), Int32(last))
            cute.arch.sync_threads()
            one, other = ptx.load_shared_64(here.at + EXTREMES)
            first, last = Uint32(one), Uint32(other)
        return Uint32(first), Uint32(last)

    @cute.jit
    def agree(self, here: Here, first: Uint32, listed: Int32, length: cutlass.Constexpr) -> tuple[Any, Any]:
        """(smallest `first` of all warps, number of their candidates or, if one has more than its list holds, less than
        0). One CTA only."""
        if here.lane == 0:
            number = listed if listed <= length else Int32(TOO_MANY)
            ptx.store_shared_64(here.at + AGREED + here.warp * 8, Int32(first), number)
        cute.arch.sync_threads()
        one, number = ptx.load_shared_64(here.at + AGREED + here.lane % self.warps * 8)
        number = number if here.lane < self.warps else Int32(0)
        first = Uint32(cute.arch.warp_redux_sync(Uint32(one), "min"))
        return first, Int32(cute.arch.warp_redux_sync(number, "add"))

    @cute.jit
    def average(self, here: Here, number: Float32) -> Float32:
        """Of all warps' numbers, summed in a fixed order. One CTA only."""
        if here.lane == 0:
            ptx.store_shared_s32(here.at + RANGES + here.warp * 4, number.bitcast(Int32))
        cute.arch.sync_threads()
        number = ptx.load_shared_s32(here.at + RANGES + here.lane % self.warps * 4).bitcast(Float32)
        return lanes_sum(number * Float32(1 / 32))

    def over_lanes(self, first: Any, last: Any) -> tuple[Any, Any]:
        """(smallest `first`, largest `last`) of the lanes."""
        redux = cute.arch.warp_redux_sync
        return Uint32(redux(first, "min")), Uint32(redux(last, "max"))

    @cute.jit
    def find(self, here: Here, wanted: Int32) -> tuple[Any, Any, Any]:
        """(bin of element number `wanted` in the order of the bins, elements before that bin, elements in it); where
        there are fewer, (any bin, their number, 0). Afterwards a barrier comes before the bins change."""
        self.barrier()
        source = here.at + CANDIDATES
        if const_expr(self.cluster > 1):
            for bin_ in cutlass.range(here.thread, BINS, self.threads, unroll=1):
                own, sum_ = source + bin_ * 4, Int32(0)
                for number in [ptx.load_cluster_s32(ptx.map_shared(own, rank)) for rank in range(self.cluster)]:
                    sum_ += number
                ptx.store_shared_s32(here.at + SUMS + bin_ * 4, sum_)
            cute.arch.sync_threads()
            source = here.at + SUMS
        if here.warp == 0:
            found = self.find_lane(source + here.lane * (4 * OWN), wanted)
            if here.lane == 0:
                ptx.store_shared_128(here.at + FOUND, [*found, Int32(0)])
        cute.arch.sync_threads()
        bin_, before, count, _nothing = ptx.load_shared_128(here.at + FOUND)
        return bin_, before, count

    @cute.jit
    def find_lane(self, own: Int32, wanted: Int32) -> tuple[Any, Any, Any]:
        """What `find` returns, by the bins at the address of each lane."""
        sums = [Int32(0)]
        for i in range_constexpr(OWN // 4):
            one, two, three, four = ptx.load_shared_128(own + 16 * i)
            start, both, more = sums[-1], one + two, three + four
            sums += [start + one, start + both, start + (both + three), start + (both + more)]
        total = sums[-1]
        prefix = lanes_prefix(total)
        bin_, below, upto = self.search(sums, wanted - (prefix - total))
        reached = cute.arch.vote_ballot_sync(prefix >= wanted)
        # where no lane reaches it, `lane` is 0 and what it says is replaced
        lane = cute.arch.popc((reached & -reached) - 1) & 31
        shuffle = cute.arch.shuffle_sync
        before, count = shuffle(prefix - total + below, lane), shuffle(upto - below, lane)
        bin_, total = lane * OWN + shuffle(bin_, lane), shuffle(prefix, 31)
        return bin_, (total if reached == 0 else before), (Int32(0) if reached == 0 else count)

    def search(self, sums: list[Any], wanted: Any) -> tuple[Any, Any, Any]:
        """(number i of the bin with element `wanted`, sums i and i + 1) of the sums of 0, 1, ... of a lane's bins."""
        bin_ = Int32(0)
        while len(sums) > 2:
            half = len(sums) // 2
            is_later = sums[half] < wanted
            bin_ += cutlass.select_(is_later, Int32(half), Int32(0))
            sums = [cutlass.select_(is_later, sums[half + i], sums[i]) for i in range(half + 1)]
        return bin_, *sums


# ---- epilogue: the last ones ranked, picks written by column

NOWHERE = 0x7FFFFFFF
"""After all places."""


class Picks:
    """Of a row: bits of places that are picked, bits of others of which some are, and a list of the latter."""

    def __init__(self, config: TopKConfig, bins: Bins) -> None:
        self.config, self.bins = config, bins
        self.cluster = config.cluster

    @cute.jit
    def clear(self, here: Here) -> None:
        """Pick nothing."""
        self.bins.clear(here, self.config.picks, self.config.smem_bytes - self.config.picks)

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
        word, bit = here.at + self.config.picks + (place >> 5) * 4, Int32(1) << (place & 31)
        ptx.reduce_shared("or.b32", word, bit, is_there & (order < low))
        if is_last:
            if is_tied:
                ptx.reduce_shared("or.b32", word + (self.config.ties - self.config.picks), bit)
            else:
                self.list(here, order, place)

    @cute.jit
    def list(self, here: Here, order: Uint32, place: Int32) -> None:
        place += here.rank * self.config.places
        number = ptx.fetch_add_shared(here.lead + EQUALS_LENGTH, Int32(1), self.cluster > 1)
        if number < RANKED:
            if const_expr(self.cluster > 1):
                ptx.store_cluster_64(here.lead + EQUALS + number * 8, Int32(order), place)
            else:
                ptx.store_shared_64(here.lead + EQUALS + number * 8, Int32(order), place)

    @cute.jit
    def rank(self, here: Here, count: Int32, wanted: Int32) -> None:
        """By one warp of each CTA: of the `count` elements of the list, note the CTA's among the `wanted` best as
        ties, and the places of all of these."""
        own = here.lead + EQUALS + here.lane * 8
        word, place = ptx.load_cluster_64(own) if const_expr(self.cluster > 1) else ptx.load_shared_64(own)
        is_there = here.lane < count
        order, place = Uint32(word) if is_there else Uint32(NAN_ORDER), place if is_there else Int32(NOWHERE)
        is_picked = is_there & (self.better(order, place, count) < wanted)
        ptx.store_shared_s32(here.at + WINNERS + here.lane * 4, place if is_picked else Int32(NOWHERE))
        place -= here.rank * self.config.places
        is_own = is_picked & (place >= 0) & (place < self.config.places)
        ptx.reduce_shared("or.b32", here.at + self.config.ties + (place >> 5) * 4, Int32(1) << (place & 31), is_own)

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
        width = self.config.width
        words = (part.stop + (width - 1)) >> (width.bit_length() - 1)
        share = (words + (self.config.warps - 1)) >> (self.config.warps.bit_length() - 1)
        first = here.warp * share
        stop = cutlass.min(first + share, words)
        here_picks, here_ties = here.at + self.config.picks, here.at + self.config.ties
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
            ties = cute.arch.popc(cute.arch.vote_ballot_sync(place < here.rank * self.config.places + first * width))
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
            slots.write(here.at + LIST, start_of_warp + here.lane, 32, stop, out)
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
    def load(self, words: Any, number: Any, stop: Any) -> Any:
        """The bits of `width` places, or zero past the end."""
        found = Int32(0)
        if number < stop:
            if const_expr(self.config.width == 32):
                found = ptx.load_shared_s32(words + number * 4)
            else:
                found = ptx.load_shared_u16(words + number * 2)
        return found

    @cute.jit
    def publish(self, here: Here, number: Any, counts: cutlass.Constexpr, before: cutlass.Constexpr) -> None:
        """Let the CTA's warps know this warp's sum, and CTAs of higher rank the CTA's."""
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


# ---- bound and candidates


def chosen(found: Sequence[Any], number: Any) -> Any:
    """One of a thread's scores, a power of two of them: registers have no numbers."""
    for level in range(len(found).bit_length() - 1):
        is_odd = (number >> level) & 1 != 0
        found = [cutlass.select_(is_odd, *found[i : i + 2][::-1]) for i in range(0, len(found), 2)]
    return found[0]


class RowPicks:
    """Of a row that a CTA or a cluster shares."""

    is_early = False
    """Whether all columns of a row are loaded, by `hold`, before its bounds are there."""

    def __init__(self, config: TopKConfig) -> None:
        self.config, self.bins = config, Bins(config)
        self.picks = Picks(config, self.bins)
        self.vectors, self.length = config.vectors, config.length

    @cute.jit
    def clear(self, here: Here) -> None:
        """What must be zero at first. A barrier follows, in `select`."""
        self.bins.clear(here, 0, ZEROS)
        self.picks.clear(here)

    @cute.jit
    def select(
        self, here: Here, part: Part, held: Any, k: Int32, share: Int32, groups: Int32, out: Int64, slots: Slots
    ) -> None:
        """Write the k best of a row that has more columns, or their slots. held: does not matter. Where the bound is
        none that is guessed, at least `share` of a warp's maxima of `groups` groups a thread reach it."""
        scores = cute.make_rmem_tensor((4 * self.vectors,), Float32)
        best = cute.make_rmem_tensor((GROUPS,), Float32)
        top, bound, listed = Uint32(NAN_ORDER), Uint32(LOWEST_ORDER), Int32(0)
        if const_expr(not self.config.is_streamed):
            top, bound = self.bound_of_tiles(here, part, part.tiles, scores, best, groups, share)
            listed, _first = self.list_tiles(here, part, scores, bound)
        else:
            self.ask(here, part, Int32(1))
            bound = self.bound_of_sample(here, part, scores, best, k)
            listed, first = self.list_tiles(here, part, scores, bound)
            top, total = self.bins.agree(here, first, listed, self.length)
            if total < k:
                top, bound = self.bound_of_tiles(here, part, part.tiles, scores, best, groups, share)
                listed, _first = self.list_tiles(here, part, scores, bound)
        scale = finest(top, bound)
        low, shift = scale.low, scale.shift
        self.count(here, part, listed, low, shift, self.config.is_streamed)
        bin_, before, count = self.bins.find(here, k)
        wanted = k - before
        is_nan = count == 0
        low = Uint32(NAN_ORDER) if is_nan else Scale(low, shift).start(bin_)
        shift = Int32(0) if is_nan else Int32(shift)
        while count > RANKED and shift > 0:
            shift = cutlass.max(shift - BIN_BITS, Int32(0))
            self.bins.clear_again(here)
            self.count(here, part, listed, low, shift)
            bin_, before, count = self.bins.find(here, wanted)
            wanted -= before
            low = Scale(low, shift).start(bin_)

        is_tied = is_nan or count > RANKED
        # no NaN is a candidate
        listed = Int32(self.length + 1) if is_nan else Int32(listed)
        self.pick(here, part, listed, low, shift, is_tied)
        self.bins.barrier()
        self.picks.write(here, part, count, wanted, is_tied, k, out, slots)

    @cute.jit
    def ask(self, here: Here, part: Part, tile: Int32) -> None:
        """Have a tile, if there is one, on its way to L2 while the one before is looked at: each lane asks for 128
        bytes. Not earlier: what all CTAs ask for would push out of L2 what nobody has read yet."""
        place = self.first_chunk(here, part, tile) * CHUNK + (here.lane >> 2) * part.step + (here.lane & 3) * 32
        is_wanted = (place < part.stop) & (tile < part.tiles) & (here.lane < 4 * self.vectors)
        ptx.prefetch_l2(part.base + Int64(place) * 4, is_wanted)

    def first_chunk(self, here: Here, part: Part, tile: Any) -> Any:
        """Of a warp in a tile."""
        return here.warp * part.tiles + tile

    def vectors_of(self, part: Part, chunks: Any, first: Any) -> Any:
        """How many of a thread's vectors are in the first `chunks` chunks, its own beginning with chunk `first`."""
        ahead = cutlass.max(chunks - first, Int32(0))
        if self.config.tiles == 1:
            return (ahead + (self.config.warps - 1)) >> (self.config.warps.bit_length() - 1)
        return Int32((Float32(ahead + self.config.warps * part.tiles) - Float32(0.5)) * part.each)

    @cute.jit
    def bound_of_tiles(
        self, here: Here, part: Part, tiles: Int32, scores: cute.Tensor, best: cute.Tensor, groups: Int32, share: Int32
    ) -> tuple[Any, Any]:
        """(order of the best score of the first `tiles` tiles, one that `share` maxima of every warp reach). The first
        tile's scores remain."""
        self.clear_best(best)
        for number in cutlass.range(tiles, unroll=1):
            self.load(here, part, tiles - 1 - number, scores)
            self.update(best, scores)
        return self.bins.extremes(here, *self.bound(best, groups, share))

    @cute.jit
    def bound_of_sample(self, here: Here, part: Part, scores: cute.Tensor, best: cute.Tensor, k: Int32) -> Uint32:
        """An order that probably a few more than k elements of the row reach, by its first tile, whose scores remain.

        If so many of a warp's scores are to reach a bound that a lane has n of them on average, the best score of a
        lane reaches it in 1 - exp(-n) of all lanes: it is where so many of these are better. With many picks a lane's
        columns are two halves, and with too many for these all numbers are candidates. The row's bound is the average
        of the warps'."""
        self.clear_best(best)
        self.load(here, part, Int32(0), scores)
        self.update(best, scores)
        halves = [pairwise([best[2 * half + i] for i in (0, 1, 4, 5)], ptx.max_f32) for half in range(2)]
        each = Float32(k) * Float32((1 + SPARE) / 32) * part.each
        is_halved = each > Float32(MOST_EACH)
        each = each * Float32(0.5) if is_halved else each
        number = Int32(Float32(32 + MORE_LANES) - Float32(32.0) * ptx.exp2(each * Float32(-ptx.LOG2_E)))
        one, other = halves
        if not is_halved:
            one = ptx.max_f32(one, other)
        bound = cute.arch.shuffle_sync(self.sorted(here, one), number & 31)
        if is_halved:
            bound = (bound + cute.arch.shuffle_sync(self.sorted(here, other), number & 31)) * Float32(0.5)
        bound = bound if number < 31 else Float32(float("-inf"))
        return Uint32(ptx.descending_order(self.bins.average(here, bound)))

    def clear_best(self, best: Any) -> None:
        for i in range(GROUPS):
            best[i] = Int32(-1).bitcast(Float32)

    @cute.jit
    def sorted(self, here: Here, value: Float32) -> Float32:
        """The lanes' values, the largest in lane 0; NaN as -inf."""
        value = ptx.max_f32(value, Float32(float("-inf")))
        for size in (2, 4, 8, 16, 32):
            for step in range_constexpr(size.bit_length() - 1):
                distance = size >> (step + 1)
                other = cute.arch.shuffle_sync_bfly(value, distance)
                is_upper = ((here.lane & distance) == 0) == ((here.lane & size) == 0)
                value = cutlass.select_(is_upper, ptx.max_f32(value, other), ptx.min_f32(value, other))
        return value

    @cute.jit
    def list_tiles(self, here: Here, part: Part, scores: cute.Tensor, bound: Uint32) -> tuple[Any, Any]:
        """List the candidates of all tiles, of which the first is loaded: (how many a warp has, the smallest of their
        orders if the row is streamed)."""
        listed, first = Int32(0), Uint32(NAN_ORDER)
        for tile in cutlass.range(part.tiles, unroll=1):
            if const_expr(self.config.tiles > 1):
                if tile > 0:
                    if const_expr(self.config.is_streamed):
                        self.ask(here, part, tile + 1)
                    self.load(here, part, tile, scores)
            listed, first = self.collect(here, part, tile, scores, bound, listed, first)
        cute.arch.sync_warp()
        if const_expr(self.config.is_chosen):
            first = Uint32(cute.arch.warp_redux_sync(first, "min"))
        elif const_expr(self.config.is_streamed):
            first = self.complete(here, part, listed)
        return listed, first

    @cute.jit
    def complete(self, here: Here, part: Part, listed: Int32) -> Uint32:
        """Add the orders to the warp's list of places, unless it is more than full: the smallest of them."""
        first = Uint32(NAN_ORDER)
        stop = listed if listed <= self.length else Int32(0)
        for start in cutlass.range(Int32(0), stop, 32 * AT_ONCE, unroll=1):
            found = []
            for i in range_constexpr(AT_ONCE):
                number = start + 32 * i + here.lane
                where = here.at + LIST + (here.warp * self.length + cutlass.min(number, stop - 1)) * 8
                place = ptx.load_shared_s32(where + 4)
                word = ptx.load_global_s32_where(number < stop, part.base + Int64(place) * 4, is_shared=True)
                found.append((number, where, word))
            for number, where, word in found:
                order = Uint32(ptx.descending_order(word.bitcast(Float32)))
                ptx.store_shared_s32_where(number < stop, where, Int32(order))
                first = cutlass.min(first, order)
        cute.arch.sync_warp()
        return Uint32(cute.arch.warp_redux_sync(first, "min"))

    @cute.jit
    def load(self, here: Here, part: Part, tile: Int32, scores: cute.Tensor) -> None:
        """A tile's scores; NaN outside the row's range."""
        number = self.first_chunk(here, part, tile)
        place = number * CHUNK + here.lane * 4
        source = part.base + Int64(place) * 4
        whole = self.vectors_of(part, part.stop >> CHUNK_BITS, number)
        some = self.vectors_of(part, (part.stop + (CHUNK - 1)) >> CHUNK_BITS, number)
        # only the first chunk of a row may begin before it, and only the last one end behind it
        is_cut = number * CHUNK < part.head
        if const_expr(self.config.is_streamed):
            for i in range_constexpr(self.vectors):
                words = (Int32(-1),) * 4
                if i < whole:
                    is_inside = True if const_expr(i > 0) else place >= part.head
                    words = ptx.load_global_128_cached_where(is_inside, source + Int64(part.step * i) * 4)
                self.take(scores, i, words)
        elif whole == self.vectors and not is_cut:
            for i in range_constexpr(self.vectors):
                self.take(scores, i, ptx.load_global_128_cached_in_order(source + Int64(part.step * i) * 4))
        else:
            for i in range_constexpr(self.vectors):
                is_inside = (i < whole) & ((place >= part.head) if const_expr(i == 0) else True)
                self.take(scores, i, ptx.load_global_128_cached_where(is_inside, source + Int64(part.step * i) * 4))
        if is_cut or some > whole:
            for i in range_constexpr(self.vectors):
                if (is_cut and i == 0) or (some > whole and whole == i):
                    for j in range_constexpr(4):
                        column = place + part.step * i + j
                        is_wanted = (column >= part.head) & (column < part.stop)
                        word = ptx.load_global_s32_where(is_wanted, part.base + Int64(column) * 4, is_shared=True)
                        scores[4 * i + j] = word.bitcast(Float32)

    def take(self, scores: Any, vector: int, words: Any) -> None:
        for j in range(4):
            scores[4 * vector + j] = words[j].bitcast(Float32)

    def update(self, best: Any, scores: Any) -> None:
        """The maxima of a thread's groups. Neighbours belong to different groups: they are often alike."""
        half = self.vectors // 2
        for group in range(GROUPS):
            members = [scores[4 * (group // 4 * half + i) + group % 4] for i in range(half)]
            best[group] = ptx.max_f32(best[group], pairwise(members, ptx.max_f32))

    @cute.jit
    def bound(self, best: cute.Tensor, groups: Int32, share: Int32) -> tuple[Any, Any]:
        """(order of the warp's best score, one that `share` of its maxima of `groups` groups a thread reach or, if not
        so many are numbers, that of -inf)"""
        for level in (4, 2, 1):
            if groups <= level:
                for i in range_constexpr(level):
                    best[i] = ptx.max_f32(best[i], best[i + level])
                    best[i + level] = Int32(-1).bitcast(Float32)
        scores: list[Any] = [best[i] for i in range(GROUPS)]
        first = ptx.descending_order(pairwise(scores, ptx.max_f32))
        last = ptx.descending_order(pairwise(scores, ptx.min_f32))
        orders = cute.make_rmem_tensor((GROUPS,), Uint32)
        for i in range_constexpr(GROUPS):
            orders[i] = Uint32(NAN_ORDER)
        orders[0] = ptx.descending_order(scores[0])
        for level in (1, 2, 4):
            if groups > level:
                for i in range_constexpr(level, 2 * level):
                    orders[i] = ptx.descending_order(scores[i])
        first = Uint32(cute.arch.warp_redux_sync(first, "min"))
        # orders of negative numbers have the highest bit set, and what select_ returns counts as signed
        last = Uint32(cute.arch.warp_redux_sync(cutlass.select_(last == Uint32(NAN_ORDER), Uint32(0), last), "umax"))
        low, high = first, last
        reached = self.reach(orders, groups, high)
        is_short = reached < share
        limit = share + (share >> 3)
        below, guesses = Int32(0), (Int32(GUESSES) if high - low >= Uint32(FAR) else Int32(0))
        while reached > limit and low < high:
            middle = low + ((high - low) >> Uint32(1))
            if guesses > 0:
                guesses -= 1
                wanted = (Float32(share + limit) * Float32(0.5) - Float32(below)) * ptx.reciprocal(reached - below)
                best_score, worst_score = ptx.of_descending_order(low), ptx.of_descending_order(high)
                guess = ptx.descending_order(ptx.fma_rn(ptx.sub_rn(worst_score, best_score), wanted, best_score))
                middle = Uint32(guess) if (guess >= low) & (guess < high) else middle
            number = self.reach(orders, groups, middle)
            if number >= share:
                high, reached = Uint32(middle), number
            else:
                low, below = Uint32(middle + Uint32(1)), number
        return first, (Uint32(LOWEST_ORDER) if is_short else high)

    @cute.jit
    def reach(self, orders: cute.Tensor, groups: Int32, order: Uint32) -> Int32:
        """How many maxima of a warp have at most this order."""
        number = Int32(orders[0] <= order)
        for level in (1, 2, 4):
            if groups > level:
                for i in range_constexpr(level, 2 * level):
                    number += Int32(orders[i] <= order)
        return Int32(cute.arch.warp_redux_sync(number, "add"))

    @cute.jit
    def collect(
        self, here: Here, part: Part, tile: Int32, scores: cute.Tensor, bound: Uint32, listed: Int32, first: Uint32
    ) -> tuple[Any, Any]:
        """List a tile's candidates after those that are listed, as far as they fit: (how many there are now, the
        smallest of `first` and of a thread's orders, where the list gets them here)."""
        least, number = ptx.of_descending_order(bound), Int32(0)
        chunk = self.first_chunk(here, part, tile)
        place = chunk * CHUNK + here.lane * 4
        if const_expr(self.config.is_streamed):
            some = self.vectors_of(part, (part.stop + (CHUNK - 1)) >> CHUNK_BITS, chunk)
            marks = Int32(0)
            for i in range_constexpr(self.vectors):
                if i < some:
                    for j in range_constexpr(4):
                        marks = ptx.mark_where_at_least(marks, scores[4 * i + j], least, 4 * i + j)
            number = cute.arch.popc(marks)
            sums = listed + lanes_prefix(number)
            marks = marks if sums <= self.length else Int32(0)
            target = here.at + LIST + (here.warp * self.length + sums - number) * 8
            while marks != 0:
                bit = 31 - Int32(cute.arch.clz(marks))
                marks = marks ^ (Int32(1) << bit)
                column = place + (bit >> 2) * part.step + (bit & 3)
                if const_expr(self.config.is_chosen):
                    order = Uint32(ptx.descending_order(chosen([scores[i] for i in range(4 * self.vectors)], bit)))
                    first = Uint32(cutlass.min(first, order))
                    ptx.store_shared_64(target, Int32(order), column)
                else:
                    ptx.store_shared_s32(target + 4, column)
                target += 8
        else:
            for i in range_constexpr(4 * self.vectors):
                number = ptx.count_where_at_least(number, scores[i], least)
            sums = listed + lanes_prefix(number)
            least = cutlass.select_(sums <= self.length, least, Int32(-1).bitcast(Float32))
            target = here.at + LIST + (here.warp * self.length + sums - number) * 8
            for i in range_constexpr(4 * self.vectors):
                column = place + (i // 4 * part.step + i % 4)
                target = ptx.append_where_at_least(target, scores[i], least, column)
        return cute.arch.shuffle_sync(sums, 31), first

    def count(self, here: Here, part: Part, listed: Int32, low: Uint32, shift: Int32, has_orders: bool = True) -> None:
        """Count the warp's candidates in bins. has_orders: the list has orders, not scores; it has them afterwards."""

        def push(is_there: Any, order: Any, place: Any, may_be_nan: bool) -> None:
            self.bins.push(here, Scale(low, shift), order, is_there, may_be_nan)

        self.each(here, part, listed, push, has_orders)

    def pick(self, here: Here, part: Part, listed: Int32, low: Uint32, shift: Int32, is_tied: Boolean) -> None:
        """Pick the warp's elements before `low`; those of the 2^shift orders from there on may be picked later."""

        def add(is_there: Any, order: Any, place: Any, may_be_nan: bool) -> None:
            self.picks.add(here, is_there, order, place, low, shift, is_tied, may_be_nan)

        self.each(here, part, listed, add, True)

    @cute.jit
    def each(
        self, here: Here, part: Part, listed: Int32, work: cutlass.Constexpr, has_orders: cutlass.Constexpr
    ) -> None:
        """work(whether there is such an element, its order, its place, whether it may be NaN) for what the warp lists
        or, if that were more than a list holds, for all of its elements."""
        if listed <= self.length:
            for first in cutlass.range(Int32(0), listed, 32 * AT_ONCE, unroll=1):
                found = self.load_list(here, first + here.lane, listed, has_orders)
                for i in range_constexpr(AT_ONCE):
                    if first + 32 * i < listed:
                        work(*found[i], False)
        else:
            for tile in cutlass.range(part.tiles, unroll=1):
                place = self.first_chunk(here, part, tile) * CHUNK + here.lane * 4
                for _vector in cutlass.range(self.vectors, unroll=1):
                    for element in self.load_again(part, place):
                        work(*element, True)
                    place += part.step

    def load_list(self, here: Here, first: Any, listed: Any, has_orders: bool) -> list[Any]:
        """(whether there is such an element, its order, its place) of a thread's next ones of its warp's list. Where
        the list has scores, it has their orders afterwards."""
        found = []
        for i in range(AT_ONCE):
            number = first + i * 32
            where = here.at + LIST + (here.warp * self.length + cutlass.min(number, listed - 1)) * 8
            found.append((number < listed, where, *ptx.load_shared_64(where)))
        if not has_orders:
            cute.arch.sync_warp()  # lanes that have none have read the last one
            orders = [ptx.descending_order(word.bitcast(Float32)) for _, _, word, _ in found]
            for (is_there, where, _, _), order in zip(found, orders, strict=True):
                ptx.store_shared_s32_where(is_there, where, Int32(order))
            return [(found[i][0], orders[i], found[i][3]) for i in range(AT_ONCE)]
        return [(is_there, Uint32(word), place) for is_there, _, word, place in found]

    def load_again(self, part: Part, first: Any) -> list[Any]:
        """The same of four neighbouring places of the row."""
        found = []
        for j in range(4):
            place = first + j
            is_there = (place >= part.head) & (place < part.stop)
            word = ptx.load_global_s32_where(is_there, part.base + Int64(place) * 4, is_shared=True)
            found.append((is_there, ptx.descending_order(word.bitcast(Float32)), place))
        return found


# ---- kernel


class TopKKernel:
    """Entry point: (result; address of the scores, stride of their rows in bytes, their columns; address of the starts
    or 0, their stride; address of the ends, strides of requests and of their tokens, tokens of a request; what no end
    exceeds, whether a row's first column is that of its start (-1) or not (0); address of the block table or 0, stride
    of its rows in bytes, its columns, rows of a page; rows, k, a warp's share of k, groups of a thread whose maxima
    bound it, 128-byte lines of a row to fetch early; whether to launch as a dependent of the kernel before; stream).
    row: how the picks of a row are found."""

    def __init__(self, key: TopKKey, row: Any) -> None:
        self.config, self.row = key.config, row
        self.threads, self.cluster, self.smem_bytes = self.config.threads, key.cluster, key.smem_bytes
        # so many CTAs of a multiprocessor must find registers
        self.resident = 32 // key.warps if key.cluster == 1 else 0
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"{key.entry}_w{key.warps}v{key.vectors}c{key.cluster}t{key.tiles}" + "s" * key.is_spread

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        scores: Int64,
        scores_stride: Int64,
        columns: Int32,
        starts: Int64,
        starts_stride: Int64,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: Int32,
        limit: Int32,
        shifts: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        page_rows: Int32,
        rows: Int32,
        k: Int32,
        share: Int32,
        groups: Int32,
        early_lines: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            scores,
            scores_stride,
            columns,
            starts,
            starts_stride,
            ends,
            ends_request,
            ends_token,
            cute.fast_divmod_create_divisor_v2(tokens),
            limit,
            shifts,
            table,
            table_stride,
            table_columns,
            cute.fast_divmod_create_divisor_v2(page_rows),
            Int32(0x7FFFFFFF) // page_rows + 1,
            address(out),
            stride_bytes(out, 0),
            k,
            share,
            groups,
            early_lines,
        )
        kernel.launch(
            grid=[rows * self.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
            min_blocks_per_mp=self.resident,
            preferred_smem_carveout=100 if self.resident > 1 else None,
        )

    @cute.kernel
    def kernel(
        self,
        scores: Int64,
        scores_stride: Int64,
        columns: Int32,
        starts: Int64,
        starts_stride: Int64,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: cute.FastDivmodDivisorV2,
        limit: Int32,
        shifts: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        page_rows: cute.FastDivmodDivisorV2,
        named_pages: Int32,
        out: Int64,
        out_stride: Int64,
        k: Int32,
        share: Int32,
        groups: Int32,
        early_lines: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        memory = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.smem_bytes // 4), byte_alignment=16)
        at = memory.iterator.toint()
        row, rank, lead = cta, Int32(0), at
        if const_expr(self.cluster > 1):
            row = cta // self.cluster
            rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
            lead = ptx.map_shared(at, 0)
        here = Here(at, lead, thread, cute.arch.make_warp_uniform(thread // 32), thread % 32, rank)
        # for calls of which little is under way at once: a row comes while its bounds do
        line = rank * self.threads + thread
        ptx.prefetch_l2(scores + Int64(row) * scores_stride + Int64(line) * 128, line < early_lines)
        request, token = divmod(row, tokens)
        place = ends + Int64(request) * ends_request + Int64(token) * ends_token
        ptx.prefetch_l2(place, thread == 0)
        self.row.clear(here)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        start = ptx.load_global_s32_where(starts != 0, starts + Int64(row) * starts_stride, is_shared=True)
        end = ptx.load_global_s32_in_order(place, is_shared=True)
        source = scores + Int64(row) * scores_stride
        head, held = Int32(source & 15) >> 2, None
        if const_expr(self.row.is_early):
            held = self.row.hold(here, self.part(source, head, Int32(0), head + columns, head + columns))
        shift = start & shifts
        start = cutlass.max(start, Int32(0))
        end = Int32(ptx.min_s64(Int64(shift) + Int64(columns), Int64(cutlass.min(end, limit))))
        size = end - start if end > start else Int32(0)
        slots = Slots(table, table_stride, request, table_columns, page_rows, named_pages)
        if size <= k:
            target = out + Int64(row) * out_stride
            for i in cutlass.range(rank * self.threads + thread, k, self.cluster * self.threads, unroll=1):
                entry = i if i < size else Int32(-1)
                if table != 0:
                    entry = slots.slot(slots.load_page(i, i < size))
                ptx.store_global_s32(target + Int64(i) * 4, entry)
        else:
            source += Int64(start - shift) * 4
            head = head + (start - shift) if const_expr(self.row.is_early) else Int32(source & 15) >> 2
            width = stop = head + size
            if const_expr(self.cluster > 1):
                width = (stop + (128 * self.cluster - 1)) // (128 * self.cluster) * 128
            part = self.part(source, head, rank * width, stop, width)
            given = held if const_expr(self.cluster == 1) else self.part(source, head, Int32(0), stop, stop)
            self.row.select(here, part, given, k, share, groups, out + Int64(row) * out_stride, slots)

    def part(self, source: Any, head: Any, skipped: Any, stop: Any, width: Any) -> Part:
        """`width` places of a row from number `skipped` on, as far as the row has them; place `head` is at `source`."""
        tiles = 1
        if self.config.tiles > 1:
            tiles = (width + (self.config.tile - 1)) // self.config.tile
        step = CHUNK * self.config.warps * tiles
        each = Float32(1.0 / self.config.warps) * ptx.reciprocal(Int32(tiles))
        base = source + Int64(skipped - head) * 4
        return Part(base, head - skipped, cutlass.min(stop - skipped, width), tiles, skipped - head, step, each)


# ---- key


@dataclass(frozen=True)
class TopKKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    warps     of a CTA, at most 32
    vectors   of four scores that a thread holds at once
    cluster   CTAs that share a row
    tiles     how often a thread fills its registers, at most, for a row
    is_spread CTAs ask for so much shared memory that a multiprocessor takes only one of them
    """

    kernel_name: ClassVar[str] = "indexer.topk"
    entry: ClassVar[str] = "top_k_per_row"
    warps: int = 32
    vectors: int = 8
    cluster: int = 1
    tiles: int = 1
    is_spread: bool = False

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.warps, self.vectors, self.cluster, self.tiles

    @property
    def config(self) -> TopKConfig:
        """What the kernel is cut by."""
        return TopKConfig(self.warps, self.vectors, self.cluster, self.tiles)

    @property
    def smem_bytes(self) -> int:
        return max(self.config.smem_bytes, SPREAD_BYTES) if self.is_spread else self.config.smem_bytes

    @property
    def capacity(self) -> int:
        """Most columns of a row, those before it up to a multiple of 16 bytes included."""
        return self.config.places * self.cluster

    @property
    def instructions(self) -> tuple[str, ...]:
        together = ("barrier.cluster",) if self.cluster > 1 else ()
        return "ld.global.128", "atomic", *together

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return TopKKernel(self, RowPicks(self.config)), self.arguments()

    def arguments(self) -> tuple[Any, ...]:
        """The entry point's, to compile for."""
        scores, starts, ends = (Int64(0), Int64(4), Int32(1)), (Int64(0), Int64(4)), (Int64(0), Int64(4), Int64(4))
        out = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64()))
        table = Int64(0), Int64(0), Int32(0), Int32(1)
        numbers = (*scores, *starts, *ends, *(Int32(1) for _ in range(3)), *table, *(Int32(1) for _ in range(5)))
        return out, *numbers, Boolean(True), make_fake_stream(use_tvm_ffi_env_stream=True)
