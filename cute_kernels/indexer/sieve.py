"""The warp of a score kernel that keeps of each row only scores that may be among its k best.

Warpgroups that score put a tile's scores into a ring in shared memory, where this warp takes them in the order of their
keys, and lists those that are better than a bound. When the list is full, the k best of it are kept, or a few more, and
the worst of these becomes the bound: a later score that is no better loses against k scores of lower keys, whatever
the order in which the k best are asked for. So nothing is kept that could be left out by equal scores, and the list is
never too short.

Scores are compared as `descending_order` numbers: the smaller, the better; NaN last.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.indexer.chunks import ENTRY, LENGTH
from cute_kernels.indexer.logits_plan import KEYS, WARP
from cute_kernels.indexer.logits_shares import Shares
from cute_kernels.indexer.sieve_plan import Lists
from cute_kernels.indexer.topk_bins import OWN, Scale, find_lane, finest, over_lanes
from cute_kernels.indexer.topk_plan import BIN_BITS, BINS

KEPT = LENGTH - 8 * KEYS
"""Entries that may be left of a full list."""

TILES = 2
"""That are looked at together."""

AT_ONCE = 8
"""Entries that a lane loads before it looks at one."""

WORST = 0xFFFFFFFF
"""Order of NaN."""


class Sieve:
    """Of one block of a score kernel with groups of one row."""

    def __init__(self, plan: Any) -> None:
        self.plan = plan
        self.shares = Shares(plan.rows, plan.threads // WARP, True, KEYS)

    def allocate(self, smem: Any) -> None:
        """The ring of scores, which has as many stages as that of keys, the list and the bins."""
        self.ring = barriers.Ring.allocate(smem, self.plan.stages)
        memory = smem.allocate_tensor(Int32, cute.make_layout(sieve_words(self.plan.stages)), byte_alignment=16)
        self.bins = memory.iterator.toint()
        self.entries = self.bins + 4 * BINS
        self.scores = self.entries + LENGTH * ENTRY

    def initialize(self) -> None:
        """By one thread. The warps of a warpgroup fill a stage."""
        self.ring.initialize(4, 1)

    @cute.jit
    def put(self, tile: Any, own: Any, score: Any, is_wanted: Any) -> None:
        """Into the tile's stage, as score of its key number `own`. By a warp."""
        self.ring.wait_empty(tile.stage, tile.phase)
        ptx.store_shared_f32(self.scores + (tile.stage * KEYS + own) * 4, score, is_wanted)

    @cute.jit
    def hand_over(self, tile: Any, lane: Any) -> None:
        """A tile's scores are there. By a warp."""
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(self.ring.full(tile.stage))

    @cute.jit
    def run(self, groups: Any, windows: Any, sums: Any, memory: Any) -> None:
        """Go through the block's share. By one warp."""
        lists = Lists.at(memory, groups.total(), cute.arch.grid_dim()[0])

        def sift(part: Any, state: Any) -> Any:
            listed, worst, slot, phase = self.sift(part, windows.skip, *state)
            self.write(part, lists, listed, worst)
            return slot, phase

        self.shares.each_part(Int32(0), 1, groups, windows, sums, sift, barriers.start())

    @cute.jit
    def sift(self, part: Any, k: Any, slot: Any, phase: Any) -> tuple[Any, Any, Any, Any]:
        """List what may be among the k best of a segment. Returns how many there are; an order that k of them reach,
        or that of NaN; the next stage and phase."""
        lane = cute.arch.lane_idx()
        listed, worst, key = Int32(0), Uint32(WORST), part.first_key + lane
        # of what the lane has listed
        first, last = Uint32(WORST), Uint32(0)
        for tile in cutlass.range(0, part.count, TILES, unroll=1):
            if listed > LENGTH - TILES * KEYS:
                listed, worst = self.keep_best(listed, k, first, last)
                last = Uint32(worst)
            more = part.count - tile
            slots, found = [], []
            for i in range_constexpr(TILES):
                if i < more:
                    self.ring.wait_full(slot, phase)
                slots.append(slot)
                # where there is no such tile, it is some other's
                place = self.scores + (slot * KEYS + lane) * 4
                found += [ptx.load_shared_f32(place + j * (WARP * 4)) for j in range(KEYS // WARP)]
                if i < more:
                    slot, phase = barriers.advance(slot, phase, self.plan.stages)
            orders = [ptx.descending_order(score) for score in found]
            stop = cutlass.min(part.stop, part.first_key + part.count * KEYS)
            chosen = []
            for i in range_constexpr(len(orders)):
                order = orders[i]
                # those that are no better than k others lose against them
                is_listed = ((order < worst) | (worst == Uint32(WORST))) & (key + i * WARP < stop)
                first = Uint32(cutlass.min(first, order if is_listed else Uint32(WORST)))
                last = Uint32(cutlass.max(last, order if is_listed else Uint32(0)))
                chosen.append(is_listed)
            listed = self.append(listed, chosen, orders, [key + i * WARP for i in range(len(orders))])
            cute.arch.sync_warp()
            for i in range_constexpr(TILES):
                if (lane == 0) & (i < more):
                    cute.arch.mbarrier_arrive(self.ring.empty(slots[i]))
            key += TILES * KEYS
        cute.arch.sync_warp()
        return listed, worst, slot, phase

    @cute.jit
    def append(self, listed: Any, chosen: Any, orders: Any, keys: Any) -> Any:
        """Add entries, the lanes' first ones, then their second ones. Returns how many there are now."""
        below = (1 << cute.arch.lane_idx()) - 1
        ballots = [cute.arch.vote_ballot_sync(is_chosen) for is_chosen in chosen]
        for i in range_constexpr(len(chosen)):
            place = self.entries + (listed + cute.arch.popc(ballots[i] & below)) * ENTRY
            ptx.store_shared_64(place, Int32(orders[i]), keys[i], predicate=chosen[i])
            listed += cute.arch.popc(ballots[i])
        return listed

    def load(self, first: Any, listed: Any) -> list[Any]:
        """(whether there is such an entry, its order, its key): the lane's next ones of the list."""
        found = []
        for i in range(AT_ONCE):
            number = first + i * WARP
            order, key = ptx.load_shared_64(self.entries + cutlass.min(number, listed - 1) * ENTRY)
            found.append((number < listed, Uint32(order), key))
        return found

    @cute.jit
    def keep_best(self, listed: Any, k: Any, first: Any, last: Any) -> tuple[Any, Any]:
        """Keep the k best entries of more, or at most KEPT that include them, in their order. first, last: the lane's
        share of orders between which all are. Returns how many there are, and the order that they reach."""
        lane = cute.arch.lane_idx()
        first, last = over_lanes(first, last)
        low, shift = finest(first, last)
        wanted, before, ties, goes_on = k, Int32(0), Int32(LENGTH), Int32(1)
        while goes_on != 0:
            self.count(listed, low, shift)
            bin_, below, count = find_lane(self.bins + lane * (4 * OWN), wanted)
            before, wanted = before + below, wanted - below
            low = Scale(low, shift).start(bin_)
            goes_on = Int32(0)
            if before + count > KEPT:
                if shift > 0:
                    shift, goes_on = cutlass.max(shift - BIN_BITS, Int32(0)), Int32(1)
                else:
                    ties = wanted
        # the last order of the bin, or of all
        most = low + ((Uint32(1) << Uint32(shift)) - 1)
        most = Uint32(most) if most >= low else Uint32(WORST)
        kept = Int32(0)
        if ties == LENGTH:
            kept = self.keep(listed, most)
        else:
            kept = self.keep_first(listed, low, ties)
        cute.arch.sync_warp()
        return kept, most

    @cute.jit
    def keep(self, listed: Any, most: Any) -> Any:
        """Keep entries of these orders. Returns how many there are."""
        kept, lane = Int32(0), cute.arch.lane_idx()
        for start in cutlass.range(Int32(0), listed, WARP * AT_ONCE, unroll=1):
            found = self.load(start + lane, listed)
            chosen = [entry[0] & (entry[1] <= most) for entry in found]
            kept = self.append(kept, chosen, [entry[1] for entry in found], [entry[2] for entry in found])
        return kept

    @cute.jit
    def keep_first(self, listed: Any, low: Any, ties: Any) -> Any:
        """Keep entries before an order, and the first of those that have it. Returns how many there are."""
        kept, tied, lane = Int32(0), Int32(0), cute.arch.lane_idx()
        below = (1 << lane) - 1
        for start in cutlass.range(Int32(0), listed, WARP * AT_ONCE, unroll=1):
            for is_there, order, key in self.load(start + lane, listed):
                ballot = cute.arch.vote_ballot_sync(is_there & (order == low))
                is_first = (order == low) & (tied + cute.arch.popc(ballot & below) < ties)
                tied += cute.arch.popc(ballot)
                kept = self.append(kept, [is_there & ((order < low) | is_first)], [order], [key])
        return kept

    @cute.jit
    def count(self, listed: Any, low: Any, shift: Any) -> None:
        """Count the list's orders in bins."""
        lane = cute.arch.lane_idx()
        cute.arch.sync_warp()
        for i in range_constexpr(BINS // (4 * WARP)):
            ptx.store_shared_128(self.bins + (i * WARP + lane) * 16, [Int32(0)] * 4)
        cute.arch.sync_warp()
        for start in cutlass.range(lane, listed, WARP * AT_ONCE, unroll=1):
            for is_there, order, _key in self.load(start, listed):
                number = Scale(low, shift).bin(order)
                is_counted = is_there & (number < Uint32(BINS))
                ptx.reduce_shared("add.u32", self.bins + Int32(number) * 4, Int32(1), is_counted)
        cute.arch.sync_warp()

    @cute.jit
    def write(self, part: Any, lists: Any, listed: Any, worst: Any) -> None:
        """A segment's list, and where it is."""
        lane, block = cute.arch.lane_idx(), cute.arch.block_idx()[0]
        number = block + part.group
        target = lists.list_of(number)
        for start in cutlass.range(lane, listed, WARP * AT_ONCE, unroll=1):
            found = self.load(start, listed)
            for i in range_constexpr(AT_ONCE):
                is_there, order, key = found[i]
                score = ptx.of_descending_order(order).bitcast(Int32)
                ptx.store_global_64(target + Int64(start + i * WARP) * ENTRY, score, key, is_there)
        if lane == 0:
            ptx.store_global_64(lists.count_of(number), listed, Int32(worst))
            if part.first_key == 0:
                ptx.store_global_s32(lists.firsts + Int64(part.group) * 4, block)
            if part.first_key + part.count * KEYS >= part.stop:
                ptx.store_global_s32(lists.lasts + Int64(part.group) * 4, block)
        cute.arch.sync_warp()


def sieve_words(stages: int) -> int:
    """Of shared memory, besides the barriers."""
    return BINS + LENGTH * (ENTRY // 4) + stages * KEYS


class SievedScores:
    """To be mixed into the scores of a kernel: they go to the sieve."""

    sieve: Sieve
    scaled: Any

    @cute.jit
    def store(
        self,
        part: cutlass.Constexpr,
        totals: Any,
        seen: Any,
        tile: Any,
        scale: Any,
        own: Any,
        is_wanted: Any = None,
    ) -> None:
        # of two neighbouring lanes both have the key's score
        is_stored = cute.arch.lane_idx() & 1 == 0
        if const_expr(is_wanted is not None):
            is_stored = is_stored & is_wanted[0]
        self.sieve.put(tile, own, self.scaled(totals[0], tile, scale, own), is_stored)

    def hand_over(self, tile: Any, lane: Any) -> None:
        self.sieve.hand_over(tile, lane)
