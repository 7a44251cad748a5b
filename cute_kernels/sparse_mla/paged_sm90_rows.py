"""The warpgroup of Hopper's paged prefill kernel that asks for rows, and makes them what tensor cores multiply.

A warp does 16 rows of every tile, in two groups: four lanes have a row of a group, each 16 neighbouring fp8 columns of
every slab, which become two chunks of 16 bytes, and two chunks of the rotary ones, which are bf16 already. A tile's
first 256 columns are there before the others.

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
from cute_kernels.sparse_mla.mixed_sm90_fp8_plan import HALF_BYTES
from cute_kernels.sparse_mla.paged_sm90_plan import (
    GROUP,
    GROUPS,
    OWN_ROWS,
    RAW_ROW,
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
    Places,
    Query,
    Work,
)
from cute_kernels.sparse_mla.prefill_sm90_rows import own_lane

HALF_SLABS = SLABS // 2

CODES, ROPE = (4, 3), (0, 2)
"""16-byte loads of a lane for each half of a row: one of each fp8 slab; two of the rotary one."""

CHUNK = 16

LARGE = (-0x7F7F7F80, 0x00808080)
"""Of the scale bytes of half a row, the bits that make a scale 2 or more."""

MOST_SCALE, NAN = 134, 0x7FC07FC0
"""The largest scale byte that one factor is made of; two bf16 that are none."""


class PagedRows:
    @cute.jit
    def run(self, work: Work, q: Query, sources: Sources, ready: Barriers, at: Places) -> None:
        """Fill the ring. By a warpgroup."""
        walk = Walk(work, sources, ready, at)
        walk.begin()
        walk.wait(Int32(0))
        for half in range_constexpr(2):
            for group in cutlass.range(GROUPS, unroll=1):
                self.ask_for_rows(half, group, Int32(0), walk)
                cute.arch.cp_async_commit_group()

        tile, mark = Int32(0), Int32(0)
        while mark & END == 0:
            # what the walk has asked for
            self.settle()
            walk.step(tile)
            if walk.mark(tile) & END == 0:
                walk.wait(tile + 1)
            first = (tile & 1) * 2
            for half in range_constexpr(2):
                for group in cutlass.range(GROUPS, unroll=1):
                    self.convert(half, group, tile, walk, ready)
                if const_expr(half == 0):
                    self.tell(at.heading + first * HEADING, walk.mark(tile), walk.there(tile))
                cute.arch.sync_warp()
                if own_lane() == 0:
                    cute.arch.mbarrier_arrive(ready.stages.full(first + half))
            mark = walk.mark(tile)
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    def settle(self) -> None:
        """All that the warp has asked for is there, but for what it asked for behind the half of a group of rows that
        is next to be converted."""
        cute.arch.cp_async_wait_group(2 * GROUPS - 1)
        cute.arch.sync_warp()

    @cute.jit
    def tell(self, heading: Any, mark: Any, there: Any) -> None:
        """Write a tile's heading. One lane does."""
        if (own_warp() == 0) & (own_lane() == 0):
            ptx.store_shared_128(heading, [word >> shift & 0xFFFF for word in there for shift in (0, 16)])
            ptx.store_shared_s32(heading + 16, mark)

    def row(self, group: Any) -> Any:
        """The lane's, of a group, in a tile."""
        return own_warp() * OWN_ROWS + group * GROUP + own_lane() // 4

    def raw(self, half: int, group: Any, at: Places) -> tuple[Any, Any]:
        """Where the lane's first chunk of half a row waits to be converted, and its scales."""
        chunk = self.row(group) * RAW_ROW + half * HALF_SLABS * SLAB + own_lane() % 4 * CHUNK
        return at.raw + chunk, at.scale + (((own_warp() * GROUPS + group) * 2 + half) * 32 + own_lane()) * 4

    @cute.jit
    def ask_for_rows(self, half: cutlass.Constexpr, group: Any, tile: Any, walk: Walk) -> None:
        """Start to copy half a group of a tile's rows: each lane what it will convert, and zeros where there is no
        row."""
        source, scales = walk.sources_of(tile, self.row(group))
        is_there = source != 0
        target, target_scales = self.raw(half, group, walk.at)
        source = source + (own_lane() % 4 * CHUNK + half * HALF_SLABS * SLAB)
        read = Int32(CHUNK) if is_there else Int32(0)
        for chunk in range_constexpr(CODES[half] + ROPE[half]):
            ptx.copy_async_or_zero(target + chunk * SLAB, source + chunk * SLAB, CHUNK, read)
        read = Int32(4) if is_there else Int32(0)
        ptx.copy_async_or_zero(target_scales, scales + 4 * half, 4, read)

    @cute.jit
    def convert(self, half: cutlass.Constexpr, group: Any, tile: Any, walk: Walk, ready: Barriers) -> None:
        """Store half a group of a tile's rows as bf16, and ask for that of the next tile, where there is one."""
        at = walk.at
        self.settle()
        raw_at, scales_at = self.raw(half, group, at)
        scales = ptx.load_shared_s32(scales_at)
        raw = [ptx.load_shared_128_in_order(raw_at + i * SLAB) for i in range(CODES[half])]
        words = cute.make_rmem_tensor((CODES[half] * 8,), Int32)
        if cute.arch.vote_any_sync(scales & LARGE[half] != 0):
            for slab in range_constexpr(CODES[half]):
                self.fill(words, slab, raw[slab], self.large_factors(scales, slab))
        else:
            for slab in range_constexpr(CODES[half]):
                self.fill(words, slab, raw[slab], [ptx.bf16x2_of_ue8m0(scales, slab)])
        if const_expr(half == 0):
            self.ask_for_more(half, group, tile, walk)

        number, quad, member = (tile & 1) * 2 + half, own_lane() // 4, own_lane() % 4
        ready.stages.wait_empty(number, tile >> 1 & 1)
        row_at = at.stages + number * HALF_BYTES + self.row(group) * (SLAB * 2)
        for slab in range_constexpr(CODES[half]):
            place = row_at + slab * SLAB_BYTES + ((2 * member ^ quad) << 4)
            for chunk in range_constexpr(2):
                self.put(place ^ (CHUNK * chunk), [words[8 * slab + 4 * chunk + i] for i in range(4)])
        if const_expr(half == 1):
            rope = [ptx.load_shared_128_in_order(raw_at + (CODES[half] + i) * SLAB) for i in range(ROPE[half])]
            for chunk in range_constexpr(ROPE[half]):
                place = row_at + CODES[half] * SLAB_BYTES + ((member ^ quad) << 4)
                ptx.store_shared_128(place ^ (4 * CHUNK * chunk), rope[chunk])
            self.ask_for_more(half, group, tile, walk)

    @cute.jit
    def ask_for_more(self, half: cutlass.Constexpr, group: Any, tile: Any, walk: Walk) -> None:
        """Have room whose words are in registers filled with the next tile's, if there is one."""
        if walk.mark(tile) & END == 0:
            self.ask_for_rows(half, group, tile + 1, walk)
        cute.arch.cp_async_commit_group()

    def put(self, place: Any, words: Any) -> None:
        ptx.store_shared_128(place, words)

    def fill(self, words: Any, slab: int, four: Any, factors: Any) -> None:
        """16 fp8 columns as bf16."""
        found = bf16_pairs_of_e4m3(four, factors)
        for i in range(8):
            words[8 * slab + i] = found[i]

    @cute.jit
    def large_factors(self, scales: Any, slab: cutlass.Constexpr) -> tuple[Any, Any]:
        """A slab's scale as two factors, since it may be too large for one product in bf16."""
        byte = (scales >> (slab * 8)) & 0xFF
        factor = ptx.bf16x2_of_ue8m0(cutlass.min(byte, Int32(MOST_SCALE)), 0)
        more = cutlass.max(byte - (MOST_SCALE - 127), Int32(127)) * 0x00800080
        return factor, (Int32(NAN) if byte == 255 else more)
