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
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import bf16_pairs_of_e4m3
from cute_kernels.sparse_mla.paged_sm90_plan import (
    GROUP,
    GROUPS,
    OWN_ROWS,
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

AHEAD = 5

LAST_SLAB = SLABS - 1
"""The rotary columns."""

LARGE = (-0x7F7F7F80, 0x00808080)
"""Of a row's scale bytes, the bits that make a scale 2 or more."""

MOST_SCALE, NAN = 134, 0x7FC07FC0
"""The largest scale byte that one factor is made of; two bf16 that are none."""


class PagedRows:
    @cute.jit
    def run(self, work: Work, q: Query, sources: Sources, ready: Barriers, at: Places) -> None:
        """Fill the ring. By a warpgroup."""
        walk = Walk(work, sources, ready, at)
        walk.begin()
        walk.wait(Int32(0))
        tile, mark = Int32(0), Int32(0)
        source, scales_at = self.aim(tile, 0, mark, walk)
        raw = [word for slab in range(AHEAD) for word in self.ask(source, slab)]
        low, high = self.ask_for_scales(scales_at)

        while mark & END == 0:
            walk.step(tile)
            mark = walk.mark(tile)
            if mark & END == 0:
                walk.wait(tile + 1)
            stage = tile & STAGES - 1
            ready.stages.wait_empty(stage, tile >> STAGE_BITS & 1)
            for group in range_constexpr(GROUPS):
                self.copy_rotary(tile, group, walk)
            # with what the walk has asked for
            cute.arch.cp_async_commit_group()
            has_large = Int32(0)
            for group in range_constexpr(GROUPS):
                has_large = has_large | (low & LARGE[0]) | (high & LARGE[1])
                raw, low, high = self.convert(tile, group, raw, low, high, mark, walk)
            if cute.arch.vote_any_sync(has_large != 0):
                for group in range_constexpr(GROUPS):
                    self.enlarge(tile, group, walk)
            if (own_warp() == 0) & (own_lane() == 0):
                self.tell(at.heading + stage * HEADING, mark, walk.there(tile))
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            if own_lane() == 0:
                cute.arch.mbarrier_arrive(ready.stages.full(stage))
            tile = tile + 1

    @cute.jit
    def tell(self, heading: Any, mark: Any, there: Any) -> None:
        """Write a stage's heading."""
        masks = [word >> shift & 0xFFFF for word in there for shift in (0, 16)]
        ptx.store_shared_128(heading, masks)
        ptx.store_shared_s32(heading + 16, mark)

    def row(self, group: int) -> Any:
        """The lane's, of a unit's rows, in its tile."""
        return own_warp() * OWN_ROWS + group * GROUP + own_lane() // 4

    @cute.jit
    def aim(self, tile: Any, group: cutlass.Constexpr, mark: Any, walk: Walk) -> tuple[Any, Any]:
        """Addresses of the lane's first codes of a unit, and of its row's scales; 0 if there is no such row, or no such
        tile, as the mark of the one before says."""
        source, scales = walk.sources_of(tile, self.row(group))
        is_there = (source != 0) & (mark & END == 0)
        source = source + own_lane() % 4 * CHUNK
        return (source if is_there else Int64(0)), (scales if is_there else Int64(0))

    def ask(self, source: Any, slab: int) -> Any:
        """Load the lane's codes of a slab."""
        return ptx.load_global_or_zero(source, slab * SLAB, 4)

    def ask_for_scales(self, scales_at: Any) -> Any:
        return ptx.load_global_or_zero(scales_at, 0, 2)

    def place(self, tile: Any, group: int, at: Places) -> Any:
        """Where the lane's row of a unit goes."""
        return at.stages + (tile & STAGES - 1) * STAGE_BYTES + self.row(group) * (SLAB * 2)

    def fp8_place(self, tile: Any, group: int, at: Places) -> Any:
        """Where the first of the lane's two chunks of a slab goes, 2 m; 2 m + 1 is beside it."""
        return self.place(tile, group, at) + ((2 * (own_lane() % 4) ^ own_lane() // 4) << 4)

    @cute.jit
    def copy_rotary(self, tile: Any, group: cutlass.Constexpr, walk: Walk) -> None:
        """Start to copy two chunks of the rotary columns, m and m + 4, to where they are multiplied."""
        source = walk.source_of(tile, self.row(group))
        read = Int32(CHUNK) if source != 0 else Int32(0)
        source = source + own_lane() % 4 * CHUNK + LAST_SLAB * SLAB
        place = self.place(tile, group, walk.at) + LAST_SLAB * SLAB_BYTES
        place = place + ((own_lane() % 4 ^ own_lane() // 4) << 4)
        for chunk in range_constexpr(2):
            ptx.copy_async_or_zero(place ^ (64 * chunk), source + 64 * chunk, CHUNK, read)

    @cute.jit
    def convert(
        self, tile: Any, group: cutlass.Constexpr, raw: Any, low: Any, high: Any, mark: Any, walk: Walk
    ) -> tuple[Any, Any, Any]:
        """Store the fp8 columns of a group as bf16, slab by slab, and load what comes AHEAD slabs later in the place of
        its codes; the same of the next group."""
        place = self.fp8_place(tile, group, walk.at)
        source, _ = self.aim(tile, group, Int32(0), walk)
        scales, raw = None, list(raw)
        for slab in range_constexpr(LAST_SLAB):
            factor = ptx.bf16x2_of_ue8m0(cutlass.min(self.scale(low, high, slab), Int32(MOST_SCALE)), 0)
            self.store_slab(raw[4 * slab : 4 * slab + 4], [factor], place + slab * SLAB_BYTES)
            if const_expr(slab + AHEAD == LAST_SLAB):
                if const_expr(group + 1 < GROUPS):
                    source, scales_at = self.aim(tile, group + 1, Int32(0), walk)
                else:
                    source, scales_at = self.aim(tile + 1, 0, mark, walk)
                scales = self.ask_for_scales(scales_at)
            raw += self.ask(source, (slab + AHEAD) % LAST_SLAB)
        return raw[4 * LAST_SLAB :], *scales

    def store_slab(self, four: Any, factors: Any, place: Any) -> None:
        """Store 16 fp8 columns as bf16."""
        for chunk in range(2):
            words = bf16_pairs_of_e4m3(four[2 * chunk : 2 * chunk + 2], factors)
            ptx.store_shared_128_in_order(place ^ (CHUNK * chunk), words)

    @cute.jit
    def enlarge(self, tile: Any, group: cutlass.Constexpr, walk: Walk) -> None:
        """Multiply what `convert` has stored with what is left of scales too large for one product in bf16."""
        _, scales_at = self.aim(tile, group, Int32(0), walk)
        low, high = self.ask_for_scales(scales_at)
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
