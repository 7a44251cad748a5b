"""Device side of the picks of a row: which of its columns are the k best, and their order in the result.

1. A bound leaves little more than k candidates. Every warp has columns from all over the row, so clusters of good
   columns do not matter.
   Of a row that a block takes in tiles: what probably a few more than k scores reach, guessed by the first tile. So the
   row is read once. If the guess was wrong, because fewer than k scores reach it or more than there is room for, and
   of other rows: a warp finds the best of some groups of its elements, and a score that its share of k of these reach,
   or a few more. The worst of these scores is reached by at least k elements.
2. Warps list their candidates. A histogram of them, between the bound and the best element, leaves those that share the
   k-th one's bin. While these are too many, they get a histogram of their own, 512 times as fine.
3. They are ranked by score and place; or, if they are many with the same score, they are picked by place.

A warp with more candidates than its list holds goes through all of its columns again instead.

Nothing here depends on the order in which threads come: histograms and lists are sums and sets, and the picks are
written by column. Scores are compared as `descending_order` numbers: the smaller, the better; NaN last.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix, pairwise
from cute_kernels.indexer.topk_bins import LOWEST_ORDER, NAN_ORDER, Bins, Scale, finest
from cute_kernels.indexer.topk_picks import Picks, Slots
from cute_kernels.indexer.topk_plan import (
    BIN_BITS,
    CHUNK,
    CHUNK_BITS,
    GROUPS,
    LIST,
    RANKED,
    SPARE,
    ZEROS,
    Here,
    Part,
    Plan,
)

AT_ONCE = 3
"""Listed elements that a thread loads before it looks at one."""

MOST_EACH = 1.5
"""Scores of a lane in a sample that are to reach its bound: with more, too few lanes have none for a good guess."""

GUESSES, FAR = 4, 1 << 26
"""Times that a bound is searched where it would be if scores were spread evenly, before the middle of their orders is
taken, and the distance of these for which that is worth it, eight binary orders: normal scores of both signs need 4
steps at most, not 11, some others 4 more."""


class RowPicks:
    """Of a row that a block or a cluster shares."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.bins = plan, Bins(plan)
        self.picks = Picks(plan, self.bins)
        self.vectors, self.length = plan.vectors, plan.length

    @cute.jit
    def clear(self, here: Here) -> None:
        """What must be zero at first. A barrier follows, in `select`."""
        self.bins.clear(here, 0, ZEROS)
        self.picks.clear(here)

    @cute.jit
    def select(self, here: Here, part: Part, k: Int32, share: Int32, groups: Int32, out: Int64, slots: Slots) -> None:
        """Write the k best of a row that has more columns, or their slots. Where the bound is none that is guessed, at
        least `share` of a warp's maxima of `groups` groups a thread reach it."""
        scores = cute.make_rmem_tensor((4 * self.vectors,), Float32)
        best = cute.make_rmem_tensor((GROUPS,), Float32)
        top, bound, listed = Uint32(NAN_ORDER), Uint32(LOWEST_ORDER), Int32(0)
        if const_expr(not self.plan.is_streamed):
            top, bound = self.bound_of_tiles(here, part, part.tiles, scores, best, groups, share)
            listed = self.list_tiles(here, part, scores, bound)
        else:
            self.fetch(here, part)
            bound = self.bound_of_sample(here, part, scores, best, k)
            listed = self.list_tiles(here, part, scores, bound)
            top, total = self.bins.agree(here, self.complete(here, part, listed), listed, self.length)
            if total < k:
                top, bound = self.bound_of_tiles(here, part, part.tiles, scores, best, groups, share)
                listed = self.list_tiles(here, part, scores, bound)
                self.complete(here, part, listed)
        scale = finest(top, bound)
        low, shift = scale.low, scale.shift
        self.count(here, part, listed, low, shift, self.plan.is_streamed)
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
    def fetch(self, here: Here, part: Part) -> None:
        """Ask for the row: tiles are read one after the other, but come from memory at once."""
        for place in cutlass.range(here.thread * 32, part.stop, self.plan.threads * 32, unroll=1):
            ptx.prefetch_l2(part.base + Int64(place) * 4, place < part.stop)

    def first_chunk(self, here: Here, part: Part, tile: Any) -> Any:
        """Of a warp in a tile."""
        return here.warp * part.tiles + tile

    def vectors_of(self, part: Part, chunks: Any, first: Any) -> Any:
        """How many of a thread's vectors are in the first `chunks` chunks, its own beginning with chunk `first`."""
        ahead = cutlass.max(chunks - first, Int32(0))
        if self.plan.tiles == 1:
            return (ahead + (self.plan.warps - 1)) >> (self.plan.warps.bit_length() - 1)
        return Int32((Float32(ahead + self.plan.warps * part.tiles) - Float32(0.5)) * part.each)

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
        number = Int32(Float32(32.5) - Float32(32.0) * ptx.exp2(each * Float32(-ptx.LOG2_E)))
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
    def list_tiles(self, here: Here, part: Part, scores: cute.Tensor, bound: Uint32) -> Int32:
        """List the candidates of all tiles, of which the first is loaded: how many a warp has."""
        listed = Int32(0)
        for tile in cutlass.range(part.tiles, unroll=1):
            if const_expr(self.plan.tiles > 1):  # noqa: SIM102
                if tile > 0:
                    self.load(here, part, tile, scores)
            listed = self.collect(here, part, tile, scores, bound, listed)
        cute.arch.sync_warp()
        return listed

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
        if const_expr(self.plan.is_streamed):
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
    def collect(self, here: Here, part: Part, tile: Int32, scores: cute.Tensor, bound: Uint32, listed: Int32) -> Int32:
        """List a tile's candidates after those that are listed, as far as they fit: how many there are now."""
        least, number = ptx.of_descending_order(bound), Int32(0)
        chunk = self.first_chunk(here, part, tile)
        place = chunk * CHUNK + here.lane * 4
        if const_expr(self.plan.is_streamed):
            some = self.vectors_of(part, (part.stop + (CHUNK - 1)) >> CHUNK_BITS, chunk)
            marks = Int32(0)
            for i in range_constexpr(self.vectors):
                if i < some:
                    for j in range_constexpr(4):
                        marks = ptx.mark_where_at_least(marks, scores[4 * i + j], least, 4 * i + j)
            number = cute.arch.popc(marks)
            sums = listed + lanes_prefix(number)
            marks = marks if sums <= self.length else Int32(0)
            target = here.at + LIST + (here.warp * self.length + sums - number) * 8 + 4
            while marks != 0:
                bit = 31 - Int32(cute.arch.clz(marks))
                marks = marks ^ (Int32(1) << bit)
                ptx.store_shared_s32(target, place + (bit >> 2) * part.step + (bit & 3))
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
        return cute.arch.shuffle_sync(sums, 31)

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
