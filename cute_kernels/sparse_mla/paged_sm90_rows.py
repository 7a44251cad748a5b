"""The warpgroup of Hopper's paged prefill kernel that asks for rows, and makes them what tensor cores multiply.

A warp does 16 rows of every tile, in two groups: four lanes have a row of a group, each 16 neighbouring fp8 columns of
every slab, which become two chunks of 16 bytes, and two chunks of the rotary ones, which are bf16 already.

Each lane copies what it will convert itself: nobody waits for another lane's copies, and it asks for the next tile's
share as soon as its own registers have that of this one.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import bf16_pairs_of_e4m3
from cute_kernels.sparse_mla.paged_sm90_plan import (
    GROUP,
    GROUPS,
    OWN_ROWS,
    RAW_ROW,
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
CHUNKS = SLABS + 1
"""Bytes of a lane's load, and how many there are of a row: one of each fp8 slab, two of the rotary one."""

LAST_SLAB = SLABS - 1
"""The rotary columns."""

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
        for group in range_constexpr(GROUPS):
            self.ask_for_rows(group, Int32(0), walk)
            cute.arch.cp_async_commit_group()

        tile, mark = Int32(0), Int32(0)
        while mark & END == 0:
            # the first group of rows, and what the walk has asked for before it
            self.settle()
            walk.step(tile)
            if walk.mark(tile) & END == 0:
                walk.wait(tile + 1)
            for group in range_constexpr(GROUPS):
                self.convert(group, tile, walk, ready)
            mark = walk.mark(tile)
            stage = tile & STAGES - 1
            if (own_warp() == 0) & (own_lane() == 0):
                self.tell(at.heading + stage * HEADING, mark, walk.there(tile))
            cute.arch.sync_warp()
            if own_lane() == 0:
                cute.arch.mbarrier_arrive(ready.stages.full(stage))
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    def settle(self) -> None:
        """All that the warp has asked for is there, but for the group of rows that it asked for last."""
        cute.arch.cp_async_wait_group(GROUPS - 1)
        cute.arch.sync_warp()

    @cute.jit
    def tell(self, heading: Any, mark: Any, there: Any) -> None:
        """Write a stage's heading."""
        masks = [word >> shift & 0xFFFF for word in there for shift in (0, 16)]
        ptx.store_shared_128(heading, masks)
        ptx.store_shared_s32(heading + 16, mark)

    def slot(self, group: int) -> Any:
        """Where a group's rows wait to be converted, among the warps' slots."""
        return own_warp() * GROUPS + group

    @cute.jit
    def ask_for_rows(self, group: cutlass.Constexpr, tile: Any, walk: Walk) -> None:
        """Start to copy a group of rows of a tile: each lane what it will convert, and zeros where there is no row."""
        at = walk.at
        slot = self.slot(group)
        row = own_warp() * OWN_ROWS + group * GROUP + own_lane() // 4
        source, scales = walk.sources_of(tile, row)
        is_there = source != 0
        target = at.raw + (slot * GROUP + own_lane() // 4) * RAW_ROW + own_lane() % 4 * CHUNK
        source = source + own_lane() % 4 * CHUNK
        read = Int32(CHUNK) if is_there else Int32(0)
        for chunk in range_constexpr(CHUNKS):
            ptx.copy_async_or_zero(target + chunk * SLAB, source + chunk * SLAB, CHUNK, read)
        read = Int32(SCALES) if is_there else Int32(0)
        ptx.copy_async_or_zero(at.scale + (slot * 32 + own_lane()) * SCALES, scales, SCALES, read)

    @cute.jit
    def convert(self, group: cutlass.Constexpr, tile: Any, walk: Walk, ready: Barriers) -> None:
        """Store a group of a tile's rows as bf16, and ask for that group of the next tile, where there is one."""
        at = walk.at
        slot, stage = self.slot(group), tile & STAGES - 1
        quad, member = own_lane() // 4, own_lane() % 4
        self.settle()
        raw_at = at.raw + (slot * GROUP + quad) * RAW_ROW + member * CHUNK
        row = own_warp() * OWN_ROWS + group * GROUP + quad
        row_at = at.stages + stage * STAGE_BYTES + row * (SLAB * 2)
        # where the lane's first chunk lies, if it has 2 m and 2 m + 1, or m and m + 4
        fp8_at = row_at + ((2 * member ^ quad) << 4)
        rope_at = row_at + LAST_SLAB * SLAB_BYTES + ((member ^ quad) << 4)
        low, high = ptx.load_shared_64(at.scale + (slot * 32 + own_lane()) * SCALES)
        raw = [ptx.load_shared_128_in_order(raw_at + chunk * SLAB) for chunk in range(CHUNKS)]
        if const_expr(group == 0):
            ready.stages.wait_empty(stage, tile >> STAGE_BITS & 1)
        # the rotary chunks first: once their words, which were loaded last, can be stored, all others are there too;
        # asking for what is to take their place does not wait for loads whose values nobody has used
        for chunk in range_constexpr(2):
            ptx.store_shared_128(rope_at ^ (64 * chunk), raw[LAST_SLAB + chunk])
        self.ask_for_more(group, tile, walk)
        if cute.arch.vote_any_sync((low & LARGE[0]) | (high & LARGE[1]) != 0):
            for slab in range_constexpr(LAST_SLAB):
                self.store_slab(raw[slab], self.large_factors(low, high, slab), fp8_at + slab * SLAB_BYTES)
        else:
            for slab in range_constexpr(LAST_SLAB):
                factor = ptx.bf16x2_of_ue8m0(low if slab < 4 else high, slab % 4)
                self.store_slab(raw[slab], [factor], fp8_at + slab * SLAB_BYTES)

    def store_slab(self, four: Any, factors: Any, place: Any) -> None:
        """Store 16 fp8 columns as bf16."""
        for chunk in range(2):
            words = bf16_pairs_of_e4m3(four[2 * chunk : 2 * chunk + 2], factors)
            ptx.store_shared_128(place ^ (CHUNK * chunk), words)

    @cute.jit
    def large_factors(self, low: Any, high: Any, slab: cutlass.Constexpr) -> tuple[Any, Any]:
        """A slab's scale as two factors, since it may be too large for one product in bf16."""
        byte = ((low if slab < 4 else high) >> (slab % 4 * 8)) & 0xFF
        factor = ptx.bf16x2_of_ue8m0(cutlass.min(byte, Int32(MOST_SCALE)), 0)
        more = cutlass.max(byte - (MOST_SCALE - 127), Int32(127)) * 0x00800080
        return factor, (Int32(NAN) if byte == 255 else more)

    @cute.jit
    def ask_for_more(self, group: cutlass.Constexpr, tile: Any, walk: Walk) -> None:
        """Have room that has been read filled with rows of the next tile, if there is one."""
        if walk.mark(tile) & END == 0:
            self.ask_for_rows(group, tile + 1, walk)
        cute.arch.cp_async_commit_group()
