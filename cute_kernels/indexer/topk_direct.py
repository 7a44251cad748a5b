"""Picks of a row that a block's registers hold, by one histogram of scores and without lists: nearly every such row.

1. The lanes' best scores say what a few more than k scores of a random row reach. Where k is too large a part of the row
   for that, it is the row's worst score.
2. Scores from there to the best one are counted in BINS bins of equal width. That is not finer where there are more
   scores, as `topk_bins.Scale` is, but one histogram is enough if the k-th one's bin holds RANKED elements at most.
3. These are ranked by score and place. Then every thread knows which of its columns are picked: they are counted by
   chunk, and written where the chunks before and the lanes before leave off.

Where fewer than k scores are counted, too many share the last bin, or a score at an end of the scale is not finite,
nothing has been written, and `topk_row` picks by lists.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix, pairwise
from cute_kernels.indexer.topk_bins import NAN_ORDER, Bins
from cute_kernels.indexer.topk_picks import NOWHERE, Picks, Slots
from cute_kernels.indexer.topk_plan import (
    BINS,
    CANDIDATES,
    CHUNK,
    EQUALS,
    EQUALS_LENGTH,
    LIST,
    RANGES,
    RANKED,
    ZEROS,
    Here,
    Part,
    Plan,
)

FIRST_BIN = float(1 << 23)
FIRST_BITS = 0x4B000000
"""A number plus 2^23 is rounded to an integer, which then is in its lower bits."""

PACKED = 4
"""Counts of at most 128 that a word holds."""


class DirectPicks:
    """Of a row whose scores are in the registers of one block."""

    def __init__(self, plan: Plan, bins: Bins, picks: Picks) -> None:
        self.plan, self.bins, self.picks = plan, bins, picks
        self.vectors, self.warps = plan.vectors, plan.warps
        self.chunks = plan.vectors * plan.warps
        self.words = -(-plan.vectors // PACKED)
        self.columns = LIST + 4 * self.chunks  # of picks that become slots

    @cute.jit
    def select(
        self, here: Here, part: Part, scores: cute.Tensor, bound: Float32, top: Float32, k: Int32, out: Int64, slots: Slots
    ) -> Int32:
        """Write the k best, if they are among those from `bound` to `top` and their last bin is small: 1 if so, else
        0."""
        width = (BINS - 1) * ptx.reciprocal(ptx.sub_rn(top, bound))
        is_done = Int32(0)
        # false of NaN too
        if (width > 0.0) & (width < float("inf")) & (top < float("inf")):
            for i in range_constexpr(4 * self.vectors):
                number = self.bin(scores[i], top, width)
                place = here.at + (CANDIDATES - 4 * FIRST_BITS) + number.bitcast(Int32) * 4
                ptx.reduce_shared("add.u32", place, Int32(1), number < Float32(FIRST_BIN + BINS))
            bin_, before, count = self.bins.find(here, k)
            if (count > 0) & (count <= RANKED):
                self.write(here, part, scores, top, width, bin_, count, k - before, k, out, slots)
                is_done = Int32(1)
            else:
                cute.arch.sync_threads()
                self.bins.clear(here, 0, ZEROS)
                cute.arch.sync_threads()
        return is_done

    def bin(self, score: Any, top: Any, width: Any) -> Any:
        """FIRST_BIN and the number of a score's bin; larger or NaN for what is in none."""
        return ptx.fma_rn(ptx.sub_rn(top, score), width, Float32(FIRST_BIN))

    @cute.jit
    def write(
        self,
        here: Here,
        part: Part,
        scores: cute.Tensor,
        top: Float32,
        width: Float32,
        bin_: Int32,
        count: Int32,
        wanted: Int32,
        k: Int32,
        out: Int64,
        slots: Slots,
    ) -> None:
        """Write the elements before a bin and the `wanted` best of its `count` elements."""
        last = Float32(FIRST_BIN) + Float32(bin_)
        first = here.warp * CHUNK + here.lane * 4
        for i in range_constexpr(self.vectors):
            numbers = [self.bin(scores[4 * i + j], top, width) for j in range(4)]
            if (numbers[0] == last) | (numbers[1] == last) | (numbers[2] == last) | (numbers[3] == last):
                for j in range_constexpr(4):
                    if numbers[j] == last:
                        number = ptx.fetch_add_shared(here.at + EQUALS_LENGTH, Int32(1), False)
                        order = Int32(ptx.descending_order(scores[4 * i + j]))
                        place = first + CHUNK * self.warps * i + j
                        ptx.store_shared_64(here.at + EQUALS + number * 8, order, place)
        cute.arch.sync_threads()
        worst, worst_place = self.worst_of(here, count, wanted)

        flags, packed = [], [Int32(0)] * self.words
        for i in range_constexpr(self.vectors):
            numbers = [self.bin(scores[4 * i + j], top, width) for j in range(4)]
            bits = Int32(0)
            for j in range_constexpr(4):
                bits = bits | cutlass.select_(numbers[j] < last, Int32(1 << j), Int32(0))
            if (numbers[0] == last) | (numbers[1] == last) | (numbers[2] == last) | (numbers[3] == last):
                for j in range_constexpr(4):
                    order = Uint32(ptx.descending_order(scores[4 * i + j]))
                    place = first + CHUNK * self.warps * i + j
                    is_better = (order < worst) | ((order == worst) & (place <= worst_place))
                    is_picked = (numbers[j] == last) & is_better
                    bits = bits | cutlass.select_(is_picked, Int32(1 << j), Int32(0))
            flags.append(bits)
            packed[i // PACKED] += cute.arch.popc(bits) << (8 * (i % PACKED))
        sums = [lanes_prefix(word) for word in packed]
        for i in range_constexpr(self.vectors):
            number = (cute.arch.shuffle_sync(sums[i // PACKED], 31) >> (8 * (i % PACKED))) & 0xFF
            if here.lane == i:
                ptx.store_shared_s32(here.at + LIST + (i * self.warps + here.warp) * 4, number)
        cute.arch.sync_threads()
        before = self.before_chunks(here)
        own = self.chunks // 32
        for i in range_constexpr(self.vectors):
            below = ((sums[i // PACKED] - packed[i // PACKED]) >> (8 * (i % PACKED))) & 0xFF
            number = cute.arch.shuffle_sync(before, (i * self.warps + here.warp) >> (own.bit_length() - 1)) + below
            column = part.first + first + CHUNK * self.warps * i
            for j in range_constexpr(4):
                is_picked = (flags[i] & (1 << j)) != 0
                if slots.table == 0:
                    ptx.store_global_s32(out + Int64(number) * 4, column + j, is_picked)
                else:
                    ptx.store_shared_s32_where(is_picked, here.at + self.columns + number * 4, column + j)
                number += Int32(is_picked)
        if slots.table != 0:
            cute.arch.sync_threads()
            self.picks.write_slots(here.at + self.columns, here.thread, self.plan.threads, k, out, slots)

    @cute.jit
    def worst_of(self, here: Here, count: Int32, wanted: Int32) -> tuple[Any, Any]:
        """(order, place) of number `wanted` of the list's `count` elements; by every warp."""
        word, place = ptx.load_shared_64(here.at + EQUALS + here.lane * 8)
        is_there = here.lane < count
        order, place = Uint32(word) if is_there else Uint32(NAN_ORDER), place if is_there else Int32(NOWHERE)
        better = self.picks.better(order, place, count)
        found = cute.arch.vote_ballot_sync(is_there & (better == wanted - 1))
        lane = cute.arch.popc((found & -found) - 1) & 31
        shuffle = cute.arch.shuffle_sync
        return Uint32(shuffle(Int32(order), lane)), shuffle(place, lane)

    @cute.jit
    def before_chunks(self, here: Here) -> Int32:
        """Picks before one of the chunks of each lane: of its neighbouring ones that whose remainder is the warp's."""
        own = self.chunks // 32
        total, below = Int32(0), Int32(0)
        for i in range_constexpr(own):
            if const_expr(own > 1):
                below = total if here.warp & (own - 1) == i else below
            total += ptx.load_shared_s32(here.at + LIST + (here.lane * own + i) * 4)
        return lanes_prefix(total) - total + below
