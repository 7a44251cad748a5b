"""The warpgroup of Hopper's paged prefill kernel that asks for rows, and makes them what tensor cores multiply.

A warp does 16 rows of every tile, in two groups: four lanes have a row of a group, each 16 neighbouring fp8 columns of
every slab, which become two chunks of 16 bytes, and two chunks of the rotary ones, which are bf16 already and go
straight to where they are multiplied.

Each lane copies what it will convert itself: nobody waits for another lane's copies. It converts slab by slab, without
a branch, and asks for the next tile's slab in the place of each. All that can be done before there is room for a tile
is done before: whoever multiplies waits for the room, and for what comes after it.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.paged_sm90_plan import (
    CODES,
    GROUP,
    GROUPS,
    HALF,
    OWN_ROWS,
    SCALES,
    STAGE_BITS,
    STAGES,
    Barriers,
    Sources,
    own_warp,
)
from cute_kernels.sparse_mla.paged_sm90_walk import Walk
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    END,
    HEADING,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    Places,
    Query,
    Work,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import own_lane

CHUNK = 16
"""Bytes of a lane's load."""

LAST_SLAB = SLABS - 1
"""The rotary columns."""

LOOK = 2
"""Slabs whose codes are loaded ahead of those that are converted."""

OWN_GROUP = GROUP * SLAB * 2
"""Bytes from the lane's row of one group to that of the other, in a slab."""

LARGE = (-0x7F7F7F80, 0x00808080)
"""Of a row's scale bytes, the bits that make a scale 2 or more."""

MOST_SCALE, NAN = 134, 0x7FC07FC0
"""The largest scale byte that one factor is made of; two bf16 that are none."""


class PagedRows:
    walk: type[Walk] = Walk

    @cute.jit
    def run(self, work: Work, q: Query, sources: Sources, ready: Barriers, at: Places) -> None:
        """Fill the ring. By a warpgroup."""
        walk = self.walk(work, sources, ready, at)
        walk.begin()
        walk.wait(Int32(0))
        tile, mark = Int32(0), Int32(0)
        starts = self.aim(tile, mark, walk)
        for slab in range_constexpr(LAST_SLAB):
            self.copy_slab(starts, slab, self.raw(at))
        # two groups, as later on: the first half of a tile's codes, and the second
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_commit_group()

        while mark & END == 0:
            mark = walk.mark(tile)
            walk.step(tile)
            if mark & END == 0:
                walk.wait(tile + 1)
            cute.arch.cp_async_wait_group(1)
            scales = [word for group in range(GROUPS) for word in ptx.load_shared_64(self.scales(group, at))]
            large = [scales[2 * group] & LARGE[0] | scales[2 * group + 1] & LARGE[1] for group in range(GROUPS)]
            is_ordinary = (large[0] | large[1]) == 0
            if not is_ordinary:
                scales = [self.bounded(word) for word in scales]
            self.convert(tile, scales, is_ordinary, mark, walk, ready)
            stage = tile & STAGES - 1
            if not is_ordinary:
                for group in range_constexpr(GROUPS):
                    self.enlarge(tile, group, walk)
                cute.arch.mbarrier_arrive(ready.stages.half(stage))
            if (own_warp() == 0) & (own_lane() == 0):
                self.tell(at.heading + stage * HEADING, mark, walk.there(tile))
            # the rotary columns, and for the next step what the walk has asked for
            cute.arch.cp_async_wait_group(2)
            cute.arch.sync_warp()
            if own_lane() == 0:
                cute.arch.mbarrier_arrive(ready.stages.full(stage))
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def tell(self, heading: Any, mark: Any, there: Any) -> None:
        """Write a stage's heading."""
        masks = [word >> shift & 0xFFFF for word in there for shift in (0, 16)]
        ptx.store_shared_128(heading, masks)
        ptx.store_shared_s32(heading + 16, mark)

    def row(self, group: int) -> Any:
        """The lane's, of a group, in a tile."""
        return own_warp() * OWN_ROWS + group * GROUP + own_lane() // 4

    @cute.jit
    def aim(self, tile: Any, mark: Any, walk: Walk) -> Any:
        """Start to copy the scales of the lane's rows of a tile, and say where its first codes are: 0 if there is no
        such row, or no such tile, as the mark of the one before says."""
        found = [walk.sources_of(tile, self.row(group)) for group in range(GROUPS)]
        sources = []
        for group in range_constexpr(GROUPS):
            source, scales_at = found[group]
            is_there = (source != 0) & (mark & END == 0)
            read = Int32(SCALES) if is_there else Int32(0)
            ptx.copy_async_or_zero(self.scales(group, walk.at), scales_at, SCALES, read)
            source = source + own_lane() % 4 * CHUNK
            sources.append(source if is_there else Int64(0))
        return sources

    def raw(self, at: Places) -> Any:
        """Where the lane's codes of the first slab and group wait."""
        return at.raw + self.row(0) * CODES + own_lane() % 4 * CHUNK

    def scales(self, group: int, at: Places) -> Any:
        """Where the scales of the lane's row of a group wait."""
        return at.scale + ((own_warp() * GROUPS + group) * 32 + own_lane()) * SCALES

    @cute.jit
    def copy_slab(self, sources: Any, slab: cutlass.Constexpr, raw_at: Any) -> None:
        """Start to copy the lane's codes of a slab, or zeros."""
        for group in range_constexpr(GROUPS):
            read = Int32(CHUNK) if sources[group] != 0 else Int32(0)
            target = raw_at + (group * GROUP * CODES + slab * SLAB)
            ptx.copy_async_or_zero(target, sources[group] + slab * SLAB, CHUNK, read)

    def place(self, tile: Any, group: int, at: Places) -> Any:
        """Where the lane's row of a group goes."""
        return at.stages + (tile & STAGES - 1) * STAGE_BYTES + self.row(group) * (SLAB * 2)

    def fp8_place(self, tile: Any, group: int, at: Places) -> Any:
        """Where the first of the lane's two chunks of a slab goes, 2 m; 2 m + 1 is beside it."""
        return self.place(tile, group, at) + ((2 * (own_lane() % 4) ^ own_lane() // 4) << 4)

    @cute.jit
    def copy_rotary(self, tile: Any, group: cutlass.Constexpr, source: Any, walk: Walk) -> None:
        """Start to copy two chunks of a row's rotary columns, m and m + 4, or zeros."""
        read = Int32(CHUNK) if source != 0 else Int32(0)
        source = source + own_lane() % 4 * CHUNK + LAST_SLAB * SLAB
        place = self.place(tile, group, walk.at) + LAST_SLAB * SLAB_BYTES
        place = place + ((own_lane() % 4 ^ own_lane() // 4) << 4)
        for chunk in range_constexpr(2):
            ptx.copy_async_or_zero(place ^ (64 * chunk), source + 64 * chunk, CHUNK, read)

    @cute.jit
    def convert(self, tile: Any, scales: Any, is_ordinary: Any, mark: Any, walk: Walk, ready: Barriers) -> None:
        """Store the fp8 columns of a tile as bf16, and have the next tile's codes copied in the place of its own."""
        raw_at = self.raw(walk.at)
        raw = []
        for slab in range_constexpr(LOOK):
            raw += self.load(raw_at, slab)
        rows = [walk.source_of(tile, self.row(group)) for group in range(GROUPS)]
        sources = self.aim(tile + 1, mark, walk)
        place = self.fp8_place(tile, 0, walk.at)
        places = place, place ^ CHUNK
        words = [self.bf16(raw, scales, 0, group) for group in range(GROUPS)]
        ready.stages.wait_empty(tile & STAGES - 1, tile >> STAGE_BITS & 1)
        for slab in range_constexpr(LAST_SLAB):
            if const_expr(slab + LOOK == HALF):
                cute.arch.cp_async_wait_group(1)
            if const_expr(slab + LOOK < LAST_SLAB):
                raw += self.load(raw_at, slab + LOOK)
            for group in range_constexpr(GROUPS):
                chosen = words[group] if const_expr(slab == 0) else self.bf16(raw, scales, slab, group)
                self.store(chosen, places, slab * SLAB_BYTES + group * OWN_GROUP)
            self.copy_slab(sources, slab, raw_at)
            if const_expr(slab == 0):
                for group in range_constexpr(GROUPS):
                    self.copy_rotary(tile, group, rows[group], walk)
                # with the scales, and what the walk has asked for
                cute.arch.cp_async_commit_group()
            if const_expr(slab + 1 == HALF):
                ptx.arrive_mbarrier(ready.stages.half(tile & STAGES - 1).toint(), is_ordinary)
                cute.arch.cp_async_commit_group()
        cute.arch.cp_async_commit_group()

    def load(self, raw_at: Any, slab: int) -> Any:
        """The lane's codes of a slab."""
        offsets = [group * GROUP * CODES + slab * SLAB for group in range(GROUPS)]
        return [word for offset in offsets for word in ptx.load_shared_128_in_order(raw_at, offset)]

    def bounded(self, scales: Any) -> Any:
        """Four scales, each MOST_SCALE at most."""
        found = Int32(0)
        for i in range(4):
            found = found | cutlass.min((scales >> (8 * i)) & 0xFF, Int32(MOST_SCALE)) << (8 * i)
        return found

    def bf16(self, raw: Any, scales: Any, slab: int, group: int) -> Any:
        """The lane's 16 columns of a slab."""
        factor = ptx.bf16x2_of_ue8m0(scales[2 * group + slab // 4], slab % 4)
        four = raw[4 * (GROUPS * slab + group) :][:4]
        return [ptx.multiply_bf16x2(ptx.bf16x2_of_two_codes(word, pair), factor) for word in four for pair in range(2)]

    def store(self, words: Any, places: Any, offset: int) -> None:
        for chunk in range(2):
            ptx.store_shared_128_in_order(places[chunk], words[4 * chunk : 4 * chunk + 4], offset)

    @cute.jit
    def enlarge(self, tile: Any, group: cutlass.Constexpr, walk: Walk) -> None:
        """Multiply what `convert` has stored with what is left of scales too large for one product in bf16."""
        source, scales_at = walk.sources_of(tile, self.row(group))
        low, high = ptx.load_global_64_or_zero(scales_at if source != 0 else Int64(0))
        place = self.fp8_place(tile, group, walk.at)
        for slab in range_constexpr(LAST_SLAB):
            byte = self.scale(low, high, slab)
            factor = cutlass.max(byte - (MOST_SCALE - 127), Int32(127)) * 0x00800080
            factor = Int32(NAN) if byte == 255 else factor
            for chunk in range_constexpr(2):
                chunk_at = place + slab * SLAB_BYTES ^ (CHUNK * chunk)
                words = ptx.load_shared_128_in_order(chunk_at)
                ptx.store_shared_128_in_order(chunk_at, [ptx.multiply_bf16x2(word, factor) for word in words])

    def scale(self, low: Any, high: Any, slab: int) -> Any:
        """The byte of a slab's scale."""
        return ((low if slab < 4 else high) >> (slab % 4 * 8)) & 0xFF
