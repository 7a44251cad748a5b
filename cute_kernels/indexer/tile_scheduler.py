"""Which tiles of keys a CTA takes: the tiles of all groups, one group after the other, are one list, of which every CTA
takes an equal share. Neither long requests nor few of them leave CTAs idle.

If there are many groups, all warps of a CTA count the tiles first. Then each warp that has to do with tiles goes
through the CTA's share for itself, work tile after work tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.indexer.params import WARP, RowGroups, Windows

COUNTERS = 256
"""Counts of tiles in shared memory, one for each chunk of groups: a multiple of 32 groups."""

LAST_OF_GROUP = 1
"""Added to the first key of a tile, a multiple of 32 at least, if its consumer has no more tiles of the group."""


class WorkTile(NamedTuple):
    """What a CTA takes of a group: the group's number, its request and first row, the first key, the end of the group's
    keys, and how many tiles of `keys` keys there are; of those a consumer takes number `own` and every `step`th after
    it.
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
    def tagged_key(self, tile: Any) -> Any:
        """First key of a tile, plus LAST_OF_GROUP if that applies."""
        return (
            self.first_key + tile * self.keys + (Int32(LAST_OF_GROUP) if tile >= self.count - self.step else Int32(0))
        )


@dataclass(frozen=True)
class TileScheduler:
    """The share of a CTA.

    rows      of a group
    warps     of the CTA
    paged     whether keys lie in pages
    keys      of a tile
    counts    address of COUNTERS words of shared memory
    """

    rows: int
    warps: int
    paged: bool
    keys: int
    groups: RowGroups
    windows: Windows
    counts: Any

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
                tiles += self.windows.span(self.groups, group, self.rows, self.paged, self.keys)[2]
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
    def for_each(self, consumer: Any, step: cutlass.Constexpr, work: cutlass.Constexpr, state: Any) -> Any:
        """state = work(work_tile, state) for all work tiles of which consumer number `consumer` of `step` has tiles."""
        lane = cute.arch.lane_idx()
        base, skipped, remaining = Int32(0), Int32(0), Int32(0)
        is_counted = self.groups.total() > WARP
        if is_counted:
            chunk, skipped, remaining = self.share()
            base = chunk * self.chunk_width() * WARP
        done, goes_on = Int32(0), is_counted | True
        while goes_on:
            low, high, tiles = self.windows.span(self.groups, base + lane, self.rows, self.paged, self.keys)
            until = self.sum_up_to_lane(tiles)
            here = cute.arch.shuffle_sync(until, WARP - 1)
            if not is_counted:
                skipped, remaining = self.portion(here)
            if skipped >= here:
                skipped -= here
            elif remaining > 0:
                number = cute.arch.popc(cute.arch.vote_ballot_sync(until <= skipped))
                skipped -= cute.arch.shuffle_sync(until - tiles, number)
                while (number < WARP) & (remaining > 0):
                    count = cutlass.min(cute.arch.shuffle_sync(tiles, number) - skipped, remaining)
                    own = (consumer + step - done % step) % step
                    if own < count:
                        request, first_row = self.groups.coords(base + number, self.rows)
                        first_key = cute.arch.shuffle_sync(low, number) + skipped * self.keys
                        stop = cute.arch.shuffle_sync(high, number)
                        work_tile = WorkTile(
                            base + number, request, first_row, first_key, stop, count, own, step, self.keys
                        )
                        state = work(work_tile, state)
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
