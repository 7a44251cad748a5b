"""Which tiles of keys a block of a score kernel takes: an equal share of the list of all groups' tiles.

If there are many groups, all warps of a block count the tiles first. Then each warp that has to do with tiles goes
through the block's share for itself, group after group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.indexer.logits_plan import CHUNKS, CLOSING, WARP


class Part(NamedTuple):
    """The tiles that a block takes of a group: the group's number, its request and first row, the first key, the end of
    the group's keys, and how many tiles of `keys` there are; of those a warpgroup or team takes number `own` and every
    `step`th after it.
    """

    group: Any
    request: Any
    first_row: Any
    first_key: Any
    stop: Any
    count: Any
    own: Any
    step: int
    keys: int

    @cute.jit
    def mark(self, tile: Any) -> Any:
        """Second word of a tile's note."""
        return self.first_key + tile * self.keys + (Int32(CLOSING) if tile >= self.count - self.step else Int32(0))


class Shares:
    """rows: of a group; warps: of a block; paged: whether keys lie in pages; keys: of a tile."""

    def __init__(self, rows: int, warps: int, paged: bool, keys: int) -> None:
        self.rows, self.warps, self.paged, self.keys = rows, warps, paged, keys

    @cute.jit
    def count(self, warp: Any, groups: Any, windows: Any, sums: Any) -> None:
        """Tiles of every chunk of groups, into shared memory. By all warps of the block, which then synchronize."""
        lane = cute.arch.lane_idx()
        width = self.chunk_width(groups)
        chunks = cute.ceil_div(groups.total(), width * WARP)
        for chunk in cutlass.range(warp, chunks, self.warps, unroll=1):
            tiles = Int32(0)
            for i in cutlass.range(width, unroll=1):
                group = (chunk * width + i) * WARP + lane
                tiles += windows.span(groups, group, self.rows, self.paged, self.keys)[2]
            tiles = cute.arch.warp_redux_sync(tiles, "add")
            if lane == 0:
                ptx.store_shared_s32(sums + chunk * 4, tiles)

    def chunk_width(self, groups: Any) -> Any:
        """Groups of a chunk, in 32s."""
        return cute.ceil_div(groups.total(), WARP * CHUNKS)

    @cute.jit
    def share(self, groups: Any, sums: Any) -> tuple[Any, Any, Any]:
        """The chunk that the block's share begins in, tiles of it that belong to others, and tiles of the share."""
        lane = cute.arch.lane_idx()
        chunks = cute.ceil_div(groups.total(), self.chunk_width(groups) * WARP)
        total = Int32(0)
        for begin in cutlass.range(0, chunks, WARP, unroll=1):
            tiles = ptx.load_shared_s32(sums + (begin + lane) * 4)
            total += tiles if begin + lane < chunks else Int32(0)
        skipped, count = self.portion(groups, cute.arch.warp_redux_sync(total, "add"))
        first, goes_on = Int32(0), count > 0
        while goes_on:
            tiles = ptx.load_shared_s32(sums + (first + lane) * 4)
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
    def portion(self, groups: Any, total: Any) -> tuple[Any, Any]:
        """Of so many tiles, how many are those of blocks before this one, and how many are this block's."""
        block, _, _ = cute.arch.block_idx()
        each, rest = divmod(total, groups.blocks)
        return block * each + cutlass.min(block, rest), each + (Int32(1) if block < rest else Int32(0))

    @cute.jit
    def each_part(
        self,
        role: Any,
        step: cutlass.Constexpr,
        groups: Any,
        windows: Any,
        sums: Any,
        work: cutlass.Constexpr,
        state: Any,
    ) -> Any:
        """state = work(part, state) for all parts of the block's share of which number `role` of `step` has tiles."""
        lane = cute.arch.lane_idx()
        base, skipped, remaining = Int32(0), Int32(0), Int32(0)
        is_counted = groups.total() > WARP
        if is_counted:
            chunk, skipped, remaining = self.share(groups, sums)
            base = chunk * self.chunk_width(groups) * WARP
        done, goes_on = Int32(0), is_counted | True
        while goes_on:
            low, high, tiles = windows.span(groups, base + lane, self.rows, self.paged, self.keys)
            until = self.sum_up_to_lane(tiles)
            here = cute.arch.shuffle_sync(until, WARP - 1)
            if not is_counted:
                skipped, remaining = self.portion(groups, here)
            if skipped >= here:
                skipped -= here
            elif remaining > 0:
                number = cute.arch.popc(cute.arch.vote_ballot_sync(until <= skipped))
                skipped -= cute.arch.shuffle_sync(until - tiles, number)
                while (number < WARP) & (remaining > 0):
                    count = cutlass.min(cute.arch.shuffle_sync(tiles, number) - skipped, remaining)
                    own = (role + step - done % step) % step
                    if own < count:
                        request, first_row = groups.place(base + number, self.rows)
                        first_key = cute.arch.shuffle_sync(low, number) + skipped * self.keys
                        stop = cute.arch.shuffle_sync(high, number)
                        part = Part(base + number, request, first_row, first_key, stop, count, own, step, self.keys)
                        state = work(part, state)
                    done += count
                    remaining -= count
                    skipped = Int32(0)
                    number += 1
            base += WARP
            goes_on = remaining > 0
        return state

    @cute.jit
    def sum_up_to_lane(self, number: Any) -> Any:
        lane = cute.arch.lane_idx()
        for i in range_constexpr(5):
            below = cute.arch.shuffle_sync(number, cutlass.max(lane - (1 << i), 0))
            number += below if lane >= (1 << i) else Int32(0)
        return number
