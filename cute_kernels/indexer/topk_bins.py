"""Where among the orders of a row's candidates, shared by the blocks of a cluster, the k-th best one is."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_prefix, lanes_sum
from cute_kernels.indexer.topk_plan import AGREED, BIN_BITS, BINS, CANDIDATES, EXTREMES, FOUND, RANGES, SUMS, Here, Plan

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
    """Of all blocks that share a row. What is done once for a block, its first warp does: issue slots are scarce."""

    def __init__(self, plan: Plan) -> None:
        self.warps, self.threads, self.cluster = plan.warps, plan.threads, plan.cluster

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
        0). One block only."""
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
        """Of all warps' numbers, summed in a fixed order. One block only."""
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
        sums, total = [], Int32(0)
        for i in range_constexpr(OWN // 4):
            for number in ptx.load_shared_128(own + 16 * i):
                total += number
                sums.append(total)
        prefix = lanes_prefix(total)
        rest = wanted - (prefix - total)
        bin_, below, upto = Int32(0), Int32(0), total
        for i in range_constexpr(OWN - 1):
            is_below = sums[i] < rest
            bin_ += Int32(is_below)
            below = cutlass.select_(is_below, sums[i], below)
            reverse = sums[OWN - 2 - i]
            upto = cutlass.select_(reverse < rest, upto, reverse)
        reached = cute.arch.vote_ballot_sync(prefix >= wanted)
        # where no lane reaches it, `lane` is 0 and what it says is replaced
        lane = cute.arch.popc((reached & -reached) - 1) & 31
        shuffle = cute.arch.shuffle_sync
        before, count = shuffle(prefix - total + below, lane), shuffle(upto - below, lane)
        bin_, total = lane * OWN + shuffle(bin_, lane), shuffle(prefix, 31)
        return bin_, (total if reached == 0 else before), (Int32(0) if reached == 0 else count)
