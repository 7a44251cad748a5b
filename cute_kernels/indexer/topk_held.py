# SPDX-License-Identifier: Apache-2.0
"""Picks of rows that the registers of a CTA hold: no lists of candidates, whatever the share of picks.
Rows of up to 24576 columns; topk_select.HELD, HELD_BY_FEW and HELD_BY_TWO say which of them come here, and where rows
may be longer each CTA or cluster decides (AnyRow). Read topk.py first: orders, places, bins, `Here`, `Part`, `share`
and `groups` are explained there.

    scores   gmem --> registers --best, bound--> bins of equal width --histogram--> the bin with the k-th best
             (calls of few rows ask for all columns while the row's bounds come, and drop those outside; a row that
             half of the registers hold is then loaded again, by all warps: EitherRow)
    -------- barrier (Bins.extremes), and two in Bins.find ---------------------------------------------------
    marks    of a thread's scores: surely picked (better bins), tied (that bin)
    ties     listed --barrier--> each ranked by a warp, by score and place; or, if they are many with the same score,
             the number of each warp --barrier--> taken by place
    -------- barrier -----------------------------------------------------------------------------------------
    picks    marks --sums over lanes and warps--> where each goes --smem, a warp its own--> gmem, by column

Bins are of scores, not of their bits: half of all fp32 numbers lie between a small negative and a small positive one.
A bin is one fused multiplication and addition, whose rounding makes it whole, so it is monotonic in the score. Where
the best score and the bound (`bounds`) are too far apart, or too close, or both too far from zero, where fewer than k
scores reach the bound, and where too many share a bin, bins of orders (topk.Scale) take over, each time for the tied
ones only, and each time with the barriers of the first.

A warp has neighbouring chunks, so its picks are neighbours as well:

    E        ceil(chunks of the row / warps), `each`: at most the vectors that a thread holds
    chunk    128 neighbouring columns, four a lane; warp w has chunks w E ... (w + 1) E - 1 of a row
    mark     bit 4 i + j of a thread's word: column j of its four in chunk i of its warp's
    code     of a column: 4096 w + 128 i + 4 lane + j, in the order of columns; a warp uses at most 1024 of its 4096

As in topk.py nothing depends on the order in which threads come, and scores that are equal are taken by column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix, pairwise
from cute_kernels.indexer.topk import (
    BINS,
    CHUNK,
    CHUNK_BITS,
    EQUALS,
    NAN_ORDER,
    Bins,
    Here,
    Part,
    RowPicks,
    Scale,
    TopKConfig,
    TopKKernel,
    TopKKey,
    chosen,
    finest,
)
from cute_kernels.indexer.topk_slots import Slots

# ---- config

HELD_RANKED = 128
"""Tied scores that are ranked, of which a lane compares four with that of its warp's turn: more than topk.RANKED."""

CODE_BITS = 12
"""Of a code, those that say which of its warp's columns it is."""

LEAST_RANGE = 2.0**-64
"""Between the best score and the bound: with less, what divides it by bins may be infinite."""

MOST_RANGES = 4096.0
"""From zero to the best score, at most: 2^21 bins, of the 2^22 that BIN_ZERO has room for."""

BIN_ZERO, BIN_ZERO_BITS = 1.5 * 2**23, 0x4B400000
"""The best score's bin, and its bits, while bins are fp32: sums around it round to whole numbers."""

NEVER = 1 << 30
"""More scores than a row has."""

MOST_VECTORS = 8
"""Of whose scores a word has marks."""

CHOSEN_FROM = 16
"""Scores from which one is chosen by selections: with more, the selections do not find registers."""


@dataclass(frozen=True)
class HeldConfig:
    """CTAs of so many warps; vectors of four scores that a thread holds. Shared memory begins as in topk.py, up to
    EQUALS; the offsets below follow, in bytes."""

    warps: int
    vectors: int
    cluster: int = 1
    tiles: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def places(self) -> int:
        """Of a row, at most."""
        return CHUNK * self.warps * self.vectors

    @property
    def tile(self) -> int:
        return self.places

    counts = EQUALS
    """Picks of each warp; then the number of ranked scores; of each thread, marks that ranks added: zero at first."""

    @property
    def number(self) -> int:
        return self.counts + 128

    @property
    def added(self) -> int:
        return self.number + 16

    @property
    def late(self) -> int:
        """What is wanted late, and would take registers: chunks of a warp, column of place 0."""
        return self.added + 4 * self.threads

    @property
    def ranked(self) -> int:
        """Order and code of tied scores."""
        return self.late + 16

    @property
    def picks(self) -> int:
        """Columns that are picked, in order."""
        return self.ranked + 8 * HELD_RANKED

    @property
    def smem_bytes(self) -> int:
        return self.picks + 4 * self.places


# ---- picks


class HeldRow:
    """Of a row that a CTA holds. is_early: all columns come while the bounds do, for calls of few rows."""

    def __init__(self, config: HeldConfig, is_early: bool) -> None:
        assert config.vectors <= MOST_VECTORS
        self.config, self.bins, self.is_early = config, Bins(config), is_early
        self.vectors, self.warps = config.vectors, config.warps

    @cute.jit
    def clear(self, here: Here) -> None:
        """What must be zero at first. A barrier follows, in `select`."""
        self.bins.clear(here, 0, 4 * BINS)
        self.clear_counts(here)

    @cute.jit
    def clear_counts(self, here: Here) -> None:
        self.bins.clear(here, self.config.counts, self.config.late - self.config.counts)

    @cute.jit
    def select(
        self, here: Here, part: Part, held: Any, k: Int32, share: Int32, groups: Int32, out: Int64, slots: Slots
    ) -> None:
        """Write the k best of a row that has more columns, or their slots. held: what `hold` returned of all columns,
        or None; share, groups: topk.py's."""
        scores, each = self.hold(here, part) if const_expr(held is None) else held
        if const_expr(held is not None):
            self.cut(here, part, each, scores)
        if here.thread == 0:
            ptx.store_shared_64(here.at + self.config.late, each, part.first)
        first, last = self.extremes(here, *self.bounds(part, each, scores, k))
        best, worst = ptx.of_descending_order(first), ptx.of_descending_order(last)
        width = ptx.sub_rn(best, worst)

        sure, tied, wanted, count = Int32(0), Int32(0), Int32(k), Int32(0)
        is_near = ptx.abs_f32(best) <= width * Float32(MOST_RANGES)
        if (width >= Float32(LEAST_RANGE)) & (width < Float32(float("inf"))) & is_near:
            sure, tied, wanted, count = self.pick_by_scores(here, scores, best, width, k)
        if count == 0:
            # such bins are no good, or fewer than k scores are in them
            sure, tied, wanted, count = Int32(0), Int32(0), Int32(k), Int32(NEVER)
            for i in range_constexpr(4 * self.vectors):
                tied = tied | (Int32(scores[i] == scores[i]) << i)
            cute.arch.sync_threads()  # all have read the extremes before the next ones take their place
        is_equal = Int32(0)
        if count > HELD_RANKED:
            self.park(here, scores)
        while (count > HELD_RANKED) & (is_equal == 0):
            sure, tied, wanted, count, is_equal = self.pick_by_orders(here, sure, tied, wanted)
        if count == 0:
            tied = self.marks_of_nan(here, part, scores)

        if (count > 0) & (count <= HELD_RANKED):
            self.publish(here, sure)
            self.rank(here, scores, tied, count, wanted)
        else:
            self.publish(here, tied)
            cute.arch.sync_threads()
            taken = self.first_of(tied, wanted - self.before(here), here)
            cute.arch.sync_threads()
            sure = sure | taken
            self.publish(here, sure)
        cute.arch.sync_threads()
        sure = sure | ptx.load_shared_s32(here.at + self.config.added + ptx.thread_again() * 4)
        self.write(here, sure, out, slots)

    @cute.jit
    def bounds(self, part: Part, each: Int32, scores: cute.Tensor, k: Int32) -> tuple[Any, Any]:
        """Orders of the thread's best score, and of its bid for the bound. The worst bid of all threads is where bins
        end: at least k scores should reach it, and few more, as fewer scores in bins make bins finer, and lanes of a
        warp want the same bank less often. Where fewer than k reach it, bins of orders take over.

        A bid is the best of n of the thread's scores: of all of them, or, for more picks, of the half whose best is
        worse. Of random scores all but T^(-1 / n) reach the worst of T bids, and the chance that fewer than 2 / n do is
        below exp(-T / 16). So k up to 2 / n of the row are safe; for more picks the bid is the thread's worst score."""
        halves = []
        for half in range_constexpr(2):
            columns = [4 * i + j for i in range(self.vectors) for j in (half, half + 2)]
            halves.append(pairwise([scores[i] for i in columns], ptx.max_f32))
        best = last = ptx.max_f32(*halves)
        # without the columns ahead of the row's, which calls of few rows hold as well
        size = part.stop - part.head
        if k * 2 * each > size:
            if k * cutlass.max(each, Int32(2)) <= size:
                last = ptx.min_f32(*halves)
            else:
                last = pairwise([scores[i] for i in range(4 * self.vectors)], ptx.min_f32)
        return ptx.descending_order(best), ptx.descending_order(last)

    @cute.jit
    def pick_by_scores(
        self, here: Here, scores: cute.Tensor, best: Float32, width: Float32, k: Int32
    ) -> tuple[Any, Any, Any, Any]:
        """(marks of what is better than the bin of the k-th best; marks of that bin; how many of these are wanted, and
        how many there are: 0 if fewer than k scores are in bins). Bins of equal width."""
        factor = Float32(BINS - 2) * ptx.reciprocal(width)
        zero, minus = ptx.fma_rn(best, factor, Float32(BIN_ZERO)), ptx.sub_rn(Float32(0.0), factor)
        bins_at = here.at - Int32(BIN_ZERO_BITS * 4 & 0x7FFFFFFF)
        for i in range_constexpr(4 * self.vectors):
            number = ptx.min_f32(ptx.fma_rn(scores[i], minus, zero), Float32(BIN_ZERO + BINS))
            ptx.reduce_shared("add.u32", bins_at + number.bitcast(Int32) * 4, Int32(1))
        bin_, before, count = self.bins.find(here, k)
        bin_ = bin_ if count > 0 else Int32(BINS)
        last = Int32(bin_ + BIN_ZERO_BITS).bitcast(Float32)
        better = ptx.sub_rn(last, Float32(1.0))
        sure, tied = Int32(0), Int32(0)
        for i in range_constexpr(4 * self.vectors):
            number = ptx.fma_rn(scores[i], minus, zero)
            sure = ptx.mark_where_at_least(sure, better, number, i)
            tied = ptx.mark_where_at_least(tied, last, number, i)
        tied = tied ^ sure
        return sure, tied, k - before, count

    @cute.jit
    def pick_by_orders(self, here: Here, sure: Int32, among: Int32, wanted: Int32) -> tuple[Any, Any, Any, Any, Any]:
        """The same of marked scores, added to those that are sure, by bins of orders; and whether all that share a bin
        are equal."""
        scale = finest(*self.extremes_of(here, among))
        low, shift = scale.low, scale.shift
        self.bins.clear_again(here._replace(thread=ptx.thread_again()))
        for i in cutlass.range(4 * self.vectors, unroll=1):
            order = Uint32(ptx.descending_order(self.parked(here, i)))
            self.bins.push(here, Scale(low, shift), order, (among >> i) & 1 != 0, False)
        bin_, before, count = self.bins.find(here, wanted)
        bin_ = bin_ if count > 0 else Int32(BINS)
        tied = Int32(0)
        for i in cutlass.range(4 * self.vectors, unroll=1):
            number = Uint32(Scale(low, shift).bin(Uint32(ptx.descending_order(self.parked(here, i)))))
            mark = among & (Int32(1) << i)
            sure = sure | (mark if number < Uint32(bin_) else Int32(0))
            tied = tied | (mark if number == Uint32(bin_) else Int32(0))
        return sure, tied, wanted - before, count, Int32(shift == 0)

    def hold(self, here: Here, part: Part) -> tuple[Any, Any]:
        """(the thread's scores of so many places, chunks of a warp)"""
        scores, each = cute.make_rmem_tensor((4 * self.vectors,), Float32), self.each(part)
        self.load(here, part, each, scores)
        return scores, each

    def each(self, part: Part) -> Any:
        """Chunks of a warp."""
        return (((part.stop + (CHUNK - 1)) >> CHUNK_BITS) + (self.warps - 1)) // self.warps

    @cute.jit
    def cut(self, here: Here, part: Part, each: Int32, scores: cute.Tensor) -> None:
        """Scores outside the row's range become NaN."""
        own = here.warp * each * CHUNK
        if (own < part.head) | (own + each * CHUNK > part.stop):
            first_place = own + here.lane * 4
            for i in range_constexpr(4 * self.vectors):
                place = first_place + (i // 4 * CHUNK + i % 4)
                is_inside = (place >= part.head) & (place < part.stop)
                scores[i] = scores[i] if is_inside else Int32(-1).bitcast(Float32)

    @cute.jit
    def load(self, here: Here, part: Part, each: Int32, scores: cute.Tensor) -> None:
        """The thread's scores; NaN outside the row."""
        first_place = here.warp * each * CHUNK + here.lane * 4
        for i in range_constexpr(self.vectors):
            place = first_place + i * CHUNK
            is_inside = (i < each) & (place >= part.head) & (place + 4 <= part.stop)
            words = ptx.load_global_128_cached_where(is_inside, part.base + Int64(place) * 4)
            for j in range_constexpr(4):
                scores[4 * i + j] = words[j].bitcast(Float32)
        own = here.warp * each * CHUNK
        if (own < part.head) | ((part.stop > own) & (part.stop <= own + each * CHUNK) & (part.stop % 4 != 0)):
            for i in range_constexpr(self.vectors):
                place = first_place + i * CHUNK
                is_cut = (i < each) & ((place < part.head) | (place + 4 > part.stop))
                for j in range_constexpr(4):
                    is_wanted = is_cut & (place + j >= part.head) & (place + j < part.stop)
                    word = ptx.load_global_s32_where(is_wanted, part.base + Int64(place + j) * 4, is_shared=True)
                    scores[4 * i + j] = word.bitcast(Float32) if is_wanted else scores[4 * i + j]

    @cute.jit
    def extremes(self, here: Here, first: Uint32, last: Uint32) -> tuple[Any, Any]:
        """(smallest, largest) order of all threads' `first` and `last`; of NaN (0xFFFFFFFF, 0)."""
        redux = cute.arch.warp_redux_sync
        last = cutlass.select_(last == Uint32(NAN_ORDER), Uint32(0), last)
        # what select_ returns counts as signed
        return self.bins.extremes(here, Uint32(redux(first, "min")), Uint32(redux(last, "umax")))

    @cute.jit
    def extremes_of(self, here: Here, marks: Int32) -> tuple[Any, Any]:
        """The same of marked scores, which are numbers and parked."""
        best = worst = Int32(-1).bitcast(Float32)
        for i in cutlass.range(4 * self.vectors, unroll=1):
            score = self.parked(here, i) if (marks >> i) & 1 != 0 else Int32(-1).bitcast(Float32)
            best, worst = ptx.max_f32(best, score), ptx.min_f32(worst, score)
        return self.extremes(here, ptx.descending_order(best), ptx.descending_order(worst))

    def park(self, here: Here, scores: Any) -> None:
        """Put the thread's scores where picks come later: loops over them, which rows rarely need, take little code
        and no registers."""
        at = here.at + self.config.picks + ptx.thread_again() * 16
        for i in range(self.vectors):
            words = [scores[4 * i + j].bitcast(Int32) for j in range(4)]
            ptx.store_shared_128(at + i * 16 * self.config.threads, words)

    def parked(self, here: Here, i: Any) -> Any:
        """The thread's score i."""
        at = here.at + self.config.picks + ptx.thread_again() * 16
        return ptx.load_shared_s32(at + (i >> 2) * (16 * self.config.threads) + (i & 3) * 4).bitcast(Float32)

    @cute.jit
    def marks_of_nan(self, here: Here, part: Part, scores: cute.Tensor) -> Int32:
        """The row's NaN: all numbers are picked, and some of these."""
        each, _ = ptx.load_shared_64(here.at + self.config.late)
        first_place = here.warp * each * CHUNK + here.lane * 4
        marks = Int32(0)
        for i in range_constexpr(4 * self.vectors):
            place = first_place + (i // 4 * CHUNK + i % 4)
            is_inside = (i // 4 < each) & (place >= part.head) & (place < part.stop)
            marks = marks | (Int32(is_inside & (scores[i] != scores[i])) << i)
        return marks

    # -- ties

    @cute.jit
    def publish(self, here: Here, marks: Int32) -> None:
        """Let other warps know how many of the warp's columns are marked. A barrier follows."""
        number = cute.arch.warp_redux_sync(cute.arch.popc(marks), "add")
        if here.lane == 0:
            ptx.store_shared_s32(here.at + self.config.counts + here.warp * 4, number)

    @cute.jit
    def before(self, here: Here) -> Int32:
        """What warps before this one published."""
        number = ptx.load_shared_s32(here.at + self.config.counts + here.lane % self.warps * 4)
        return Int32(cute.arch.warp_redux_sync(number if here.lane < here.warp else Int32(0), "add"))

    @cute.jit
    def rank(self, here: Here, scores: cute.Tensor, tied: Int32, count: Int32, wanted: Int32) -> None:
        """Add marks of the `wanted` best of all `count` tied scores, to their warps' numbers as well. A barrier
        follows."""
        config = self.config
        if tied != 0:
            number = ptx.fetch_add_shared(here.at + config.number, cute.arch.popc(tied), False)
            for first in range_constexpr(0, 4 * self.vectors, CHOSEN_FROM):
                some = [scores[i] for i in range(first, min(first + CHOSEN_FROM, 4 * self.vectors))]
                marks = tied
                if const_expr(4 * self.vectors > CHOSEN_FROM):
                    marks = (tied >> first) & ((1 << CHOSEN_FROM) - 1)
                while marks != 0:
                    bit = cute.arch.popc((marks & -marks) - 1)
                    marks = marks & (marks - 1)
                    code = here.warp << CODE_BITS | here.lane * 4 + (((bit >> 2) + first // 4) * CHUNK + (bit & 3))
                    order = Int32(ptx.descending_order(chosen(some, bit)))
                    ptx.store_shared_64(here.at + config.ranked + number * 8, order, code)
                    number += 1
        cute.arch.sync_threads()
        others = []
        for number in [here.lane + first for first in range(0, HELD_RANKED, 32)]:
            word, code = ptx.load_shared_64(here.at + config.ranked + cutlass.min(number, count - 1) * 8)
            others.append((number < count, Uint32(word), code))
        for one in cutlass.range(here.warp, count, self.warps, unroll=1):
            word, code = ptx.load_shared_64(here.at + config.ranked + one * 8)
            own, better = Uint32(word), Int32(0)
            for is_there, other, other_code in others:
                better += Int32(is_there & ((other < own) | ((other == own) & (other_code < code))))
            better = cute.arch.warp_redux_sync(better, "add")
            warp, lane = code >> CODE_BITS, (code >> 2) & 31
            mark = Int32(1) << (((code >> CHUNK_BITS) & 31) * 4 + (code & 3))
            is_picked = (better < wanted) & (here.lane == 0)
            ptx.reduce_shared("or.b32", here.at + config.added + (warp * 32 + lane) * 4, mark, is_picked)
            ptx.reduce_shared("add.u32", here.at + config.counts + warp * 4, Int32(1), is_picked)

    @cute.jit
    def first_of(self, marks: Int32, wanted: Int32, here: Here) -> Int32:
        """The first `wanted` of the warp's marks."""
        taken = Int32(0)
        numbers, _ = self.numbers(marks)
        for i in range_constexpr(self.vectors):
            number = numbers[i]
            for j in range_constexpr(4):
                bit = (marks >> (4 * i + j)) & 1
                taken = taken | ((bit & Int32(number < wanted)) << (4 * i + j))
                number += bit
        return taken

    def numbers(self, marks: Any) -> tuple[list[Any], Any]:
        """(of each of the thread's vectors, how many of the warp's marks come before it; the warp's marks)"""
        numbers, total = [], Int32(0)
        for first in range(0, self.vectors, 4):
            four = marks >> (4 * first) if first > 0 else marks
            pairs = (four & 0x5555) + ((four >> 1) & 0x5555)
            fours = (pairs & 0x3333) + ((pairs >> 2) & 0x3333)
            # a byte for each vector: no warp has more than 128 marks in a chunk
            own = (fours & 0x0F0F) | ((fours & 0xF0F0) << 12)
            sums = lanes_prefix(own)
            all_ = cute.arch.shuffle_sync(sums, 31)
            for i in range(min(4, self.vectors - first)):
                shift = 16 * (i % 2) + 8 * (i // 2)
                numbers.append(total + (((sums - own) >> shift) & 0xFF))
                total = total + ((all_ >> shift) & 0xFF)
        return numbers, total

    # -- epilogue

    @cute.jit
    def write(self, here: Here, marks: Int32, out: Int64, slots: Slots) -> None:
        """Write the columns that are marked, or their slots."""
        start = self.before(here)
        numbers, total = self.numbers(marks)
        each, first = ptx.load_shared_64(here.at + self.config.late)
        column = first + here.warp * each * CHUNK + here.lane * 4
        picks_at = here.at + self.config.picks + start * 4
        for i in range_constexpr(self.vectors):
            target = picks_at + numbers[i] * 4
            for j in range_constexpr(4):
                bit = (marks >> (4 * i + j)) & 1
                ptx.store_shared_s32_where(bit != 0, target, column + (i * CHUNK + j))
                target += bit * 4
        cute.arch.sync_warp()
        if slots.table == 0:
            for number in cutlass.range(start + here.lane, start + total, 32, unroll=1):
                word = ptx.load_shared_s32(here.at + self.config.picks + number * 4)
                ptx.store_global_s32(out + Int64(number) * 4, word)
        else:
            slots.write(here.at + self.config.picks, start + here.lane, 32, start + total, out)


# ---- rows of which some are much shorter


class EitherRow:
    """Of a row that a CTA holds, in half of its registers if these are enough: half of the instructions. is_early: as
    of HeldRow. Most of the warps would have nothing of a row that is much shorter than the columns asked for early, so
    the shorter ones are loaded again."""

    def __init__(self, config: HeldConfig, is_early: bool) -> None:
        self.is_early = is_early
        self.longer = HeldRow(config, is_early)
        self.shorter = HeldRow(HeldConfig(config.warps, config.vectors // 2), False)

    @cute.jit
    def clear(self, here: Here) -> None:
        """What must be zero at first, the same of both. A barrier follows, in `select`."""
        self.longer.clear(here)

    def hold(self, here: Here, part: Part) -> tuple[Any, Any]:
        """As of HeldRow."""
        return self.longer.hold(here, part)

    @cute.jit
    def select(
        self, here: Here, part: Part, held: Any, k: Int32, share: Int32, groups: Int32, out: Int64, slots: Slots
    ) -> None:
        """As of HeldRow."""
        if part.stop > self.shorter.config.places:
            self.longer.select(here, part, held, k, share, groups, out, slots)
        else:
            self.shorter.select(here, part, None, k, share, groups, out, slots)


class AnyRow:
    """Of a row that a CTA or a cluster takes: what the registers of a CTA hold as HeldRow, a longer one as
    topk.RowPicks. Of rows of unequal lengths the short ones would take as long as the longest, or longer: with a chunk
    or two a warp bounds are poor and lists long. In a cluster the first CTA holds the row, and the others leave.
    """

    is_early = False

    def __init__(self, config: TopKConfig) -> None:
        # a CTA of a cluster has a multiprocessor's registers
        most = MOST_VECTORS if config.cluster > 1 and config.warps <= 24 else min(config.vectors, 4)
        self.held = HeldRow(HeldConfig(config.warps, most), False)
        self.longer = RowPicks(config)

    @cute.jit
    def clear(self, here: Here) -> None:
        """What must be zero at first. A barrier follows, in `select`."""
        self.held.clear_counts(here)
        self.longer.clear(here)  # bins, too

    @cute.jit
    def select(
        self, here: Here, part: Part, held: Any, k: Int32, share: Int32, groups: Int32, out: Int64, slots: Slots
    ) -> None:
        """As of topk.RowPicks. held: of a cluster, the row as one part."""
        whole = part if const_expr(held is None) else held
        # what comes first in the code needs no jump, and long rows take the longest
        if whole.stop > self.held.config.places:
            self.longer.select(here, part, None, k, share, groups, out, slots)
        elif here.rank == 0:
            self.held.select(here, whole, None, k, share, groups, out, slots)


# ---- keys


@dataclass(frozen=True)
class HeldTopKKey(TopKKey):
    """Rows of up to 128 * warps * vectors columns; cluster and tiles are 1."""

    kernel_name: ClassVar[str] = "indexer.topk_held"
    entry: ClassVar[str] = "top_k_per_row_held"
    warps: int = 16
    vectors: int = 4

    @property
    def config(self) -> Any:
        """What the kernel is cut by."""
        return HeldConfig(self.warps, self.vectors)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        is_halved = self.vectors == MOST_VECTORS or (self.is_spread and self.vectors > 1)
        row = EitherRow(self.config, self.is_spread) if is_halved else HeldRow(self.config, self.is_spread)
        return TopKKernel(self, row), self.arguments()


@dataclass(frozen=True)
class AnyTopKKey(TopKKey):
    """Rows of any length that a CTA or a cluster takes."""

    kernel_name: ClassVar[str] = "indexer.topk_any"
    entry: ClassVar[str] = "top_k_per_row_any"

    @property
    def row(self) -> AnyRow:
        """How the picks of a row are found."""
        return AnyRow(self.config)

    @property
    def smem_bytes(self) -> int:
        return max(super().smem_bytes, self.row.held.config.smem_bytes)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return TopKKernel(self, self.row), self.arguments()
