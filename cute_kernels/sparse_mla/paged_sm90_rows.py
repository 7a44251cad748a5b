"""The warpgroup of Hopper's paged prefill kernel that asks for rows, and makes them what tensor cores multiply.

A warp does 16 rows of every tile, in two groups: four lanes have a row of a group, each 16 neighbouring fp8 columns of
every slab, which become two chunks of 16 bytes, and two chunks of the rotary ones, which are bf16 already.

Each lane copies what it will convert itself: nobody waits for another lane's copies, and it asks for a chunk of the
next tile soon after it has converted that of this one.
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

HALF_SLABS = SLABS // 2

CHUNK = 16
CHUNKS = SLABS + 1
"""Bytes of a lane's load, and how many there are of a row: one of each fp8 slab, two of the rotary one."""

AHEAD = 3
"""Loads of raw rows that are under way while a lane converts."""

ASKED = {4: 5, CHUNKS - 1: CHUNKS - 5}
"""Behind which chunk how many are asked for of the next tile; each time takes some instructions more."""

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
        item, column, number = walk.begin()
        walk.wait(Int32(0))
        for group in cutlass.range(GROUPS, unroll=1):
            source, scales, read = self.aim(group, Int32(0), Int32(0), walk)
            raw_at = self.raw(group, at)
            for chunk in range_constexpr(CHUNKS):
                self.ask(raw_at, source, chunk, read)
            self.ask_for_scales(group, scales, read, at)

        tile, mark = Int32(0), Int32(0)
        while mark & END == 0:
            # what the walk has asked for
            self.settle()
            item, column, number = walk.step(tile, item, column, number)
            mark = walk.mark(tile)
            if mark & END == 0:
                walk.wait(tile + 1)
            for group in cutlass.range(GROUPS, unroll=1):
                self.convert(group, tile, mark, walk, ready)
            stage = tile & STAGES - 1
            self.tell(at.heading + stage * HEADING, mark, walk.there(tile))
            self.announce(ready.stages.full(stage))
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    def settle(self) -> None:
        """All that the warp has asked for is there, but for the group of rows that it asked for last."""
        cute.arch.cp_async_wait_group(GROUPS - 1)
        cute.arch.sync_warp()

    @cute.jit
    def announce(self, full: Any) -> None:
        """The warp's rows of a tile are there."""
        cute.arch.sync_warp()
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(full)

    @cute.jit
    def tell(self, heading: Any, mark: Any, there: Any) -> None:
        """Write a tile's heading. One lane does."""
        if (own_warp() == 0) & (own_lane() == 0):
            ptx.store_shared_128(heading, [word >> shift & 0xFFFF for word in there for shift in (0, 16)])
            ptx.store_shared_s32(heading + 16, mark)

    def row(self, group: Any) -> Any:
        """The lane's, of a group, in a tile."""
        return own_warp() * OWN_ROWS + group * GROUP + own_lane() // 4

    def raw(self, group: Any, at: Places) -> Any:
        """Where the lane's first chunk of a group waits to be converted."""
        return at.raw + self.row(group) * RAW_ROW + own_lane() % 4 * CHUNK

    def scales(self, group: Any, at: Places) -> Any:
        """Where the scales of the lane's row of a group wait."""
        return at.scale + ((own_warp() * GROUPS + group) * 32 + own_lane()) * SCALES

    @cute.jit
    def aim(self, group: Any, tile: Any, mark: Any, walk: Walk) -> tuple[Any, Any, Any]:
        """Of the lane's row of a group of a tile, where its first chunk is, and its scales, and how many bytes to read
        of a chunk: none if there is no such row, or no such tile, as the mark of the one before says."""
        source, scales = walk.sources_of(tile, self.row(group))
        read = Int32(CHUNK) if (source != 0) & (mark & END == 0) else Int32(0)
        return source + own_lane() % 4 * CHUNK, scales, read

    def ask(self, raw_at: Any, source: Any, chunk: int, read: Any) -> None:
        """Start to copy a chunk of the lane's row, or zeros."""
        ptx.copy_async_or_zero(raw_at + chunk * SLAB, source + chunk * SLAB, CHUNK, read)

    def ask_for_scales(self, group: Any, scales: Any, read: Any, at: Places) -> None:
        """That is the last of a group's copies."""
        ptx.copy_async_or_zero(self.scales(group, at), scales, SCALES, read >> 1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def convert(self, group: Any, tile: Any, mark: Any, walk: Walk, ready: Barriers) -> None:
        """Store a group of a tile's rows as bf16, and ask for that of the next tile, chunk by chunk: zeros where there
        is no row, or no tile."""
        at = walk.at
        self.settle()
        low, high = ptx.load_shared_64(self.scales(group, at))
        source, scales, read = self.aim(group, tile + 1, mark, walk)
        raw_at = self.raw(group, at)
        raw = [ptx.load_shared_128_in_order(raw_at + chunk * SLAB) for chunk in range(AHEAD)]
        stage, quad, member = tile & STAGES - 1, own_lane() // 4, own_lane() % 4
        ready.stages.wait_empty(stage, tile >> STAGE_BITS & 1)
        row_at = at.stages + stage * STAGE_BYTES + self.row(group) * (SLAB * 2)
        # where the lane's first chunk lies, if it has 2 m and 2 m + 1, or m and m + 4
        fp8_at, rope_at = row_at + ((2 * member ^ quad) << 4), row_at + ((member ^ quad) << 4)
        if cute.arch.vote_any_sync((low & LARGE[0]) | (high & LARGE[1]) != 0):
            self.stream(True, low, high, source, read, raw, raw_at, fp8_at, rope_at)
        else:
            self.stream(False, low, high, source, read, raw, raw_at, fp8_at, rope_at)
        self.ask_for_scales(group, scales, read, at)

    @cute.jit
    def stream(
        self,
        has_large: cutlass.Constexpr,
        low: Any,
        high: Any,
        source: Any,
        read: Any,
        first: Any,
        raw_at: Any,
        fp8_at: Any,
        rope_at: Any,
    ) -> None:
        """Convert chunk by chunk, and ask for the next tile's in its place."""
        raw = list(first)
        for chunk in range_constexpr(CHUNKS):
            if const_expr(chunk + AHEAD < CHUNKS):
                raw.append(ptx.load_shared_128_in_order(raw_at + (chunk + AHEAD) * SLAB))
            if const_expr(chunk < LAST_SLAB):
                word, number = (low if chunk < 4 else high), chunk % 4
                factors = self.large_factors(word, number) if has_large else [ptx.bf16x2_of_ue8m0(word, number)]
                place = fp8_at + chunk * SLAB_BYTES
                for half in range_constexpr(2):
                    self.put(place ^ (CHUNK * half), self.bf16(raw[chunk][2 * half : 2 * half + 2], factors))
            else:
                self.put((rope_at + LAST_SLAB * SLAB_BYTES) ^ (64 * (chunk - LAST_SLAB)), raw[chunk])
            # their words have been stored
            for done in range_constexpr(ASKED.get(chunk, 0)):
                self.ask(raw_at, source, chunk - done, read)

    def bf16(self, words: Any, factors: Any) -> Any:
        """8 fp8 columns."""
        return bf16_pairs_of_e4m3(words, factors)

    def put(self, place: Any, words: Any) -> None:
        ptx.store_shared_128(place, words)

    @cute.jit
    def large_factors(self, scales: Any, slab: cutlass.Constexpr) -> tuple[Any, Any]:
        """A slab's scale as two factors, since it may be too large for one product in bf16."""
        byte = (scales >> (slab * 8)) & 0xFF
        factor = ptx.bf16x2_of_ue8m0(cutlass.min(byte, Int32(MOST_SCALE)), 0)
        more = cutlass.max(byte - (MOST_SCALE - 127), Int32(127)) * 0x00800080
        return factor, (Int32(NAN) if byte == 255 else more)
