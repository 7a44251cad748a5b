"""Warps that write -inf where a row sees no key, beside those that compute scores or before they do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.indexer.params import WARP, RowGroups, Windows

PIECE = 4096
"""Columns that a warp looks after at a time: of one row, 16 KB."""

NEGATIVE_INFINITY = 0xFF800000 - (1 << 32)
"""Bits of -inf, as an int32."""


@dataclass(frozen=True)
class Fill:
    """What one of the warps does. out: address of the scores, out_stride in bytes."""

    paged: bool
    groups: RowGroups
    windows: Windows
    out: Any
    out_stride: Any

    @cute.jit
    def run(self, number: Any, warps: Any) -> None:
        """Write the columns outside the rows' windows, as number `number` of so many warps. Every 32nd piece of a
        warp's is a lane's, which finds out what the row sees; then all lanes write each of the 32 in turn."""
        lane = cute.arch.lane_idx()
        per_row = cute.ceil_div(self.windows.columns, PIECE)
        pieces = Int64(self.groups.requests * self.groups.count) * Int64(per_row)
        step, first = Int64(warps), Int64(number)
        while first < pieces:
            own = first + Int64(lane) * step
            is_piece = own < pieces
            row = Int32(own // Int64(per_row)) if is_piece else Int32(0)
            begin = Int32(own % Int64(per_row)) * PIECE
            request = row // self.groups.count
            low, high, shift = self.windows.load(request, row % self.groups.count, is_piece, self.paged)
            low, high = low - shift if low < high else Int32(0), high - shift if low < high else Int32(0)
            end = cutlass.min(begin + PIECE, self.windows.columns) if is_piece else begin
            for other in cutlass.range(WARP, unroll=1):
                target = self.out + Int64(cute.arch.shuffle_sync(row, other)) * self.out_stride
                one, two = cute.arch.shuffle_sync(begin, other), cute.arch.shuffle_sync(end, other)
                self.write(target, one, cutlass.min(two, cute.arch.shuffle_sync(low, other)))
                self.write(target, cutlass.max(one, cute.arch.shuffle_sync(high, other)), two)
            first += step * WARP

    @cute.jit
    def write(self, row: Any, begin: Any, end: Any) -> None:
        """-inf to columns begin .. end - 1 of the row at an address: 16 bytes a lane where they are aligned."""
        lead = Int32((row >> 2) & 3)
        words = [Int32(NEGATIVE_INFINITY)] * 4
        for at in cutlass.range((begin + lead & -4) - lead + cute.arch.lane_idx() * 4, end, WARP * 4, unroll=1):
            target = row + Int64(at) * 4
            is_whole = (at >= begin) & (at + 4 <= end)
            ptx.store_global_128(target, words, is_whole)
            if not is_whole:
                for i in range_constexpr(4):
                    ptx.store_global_s32(target + i * 4, words[0], (at + i >= begin) & (at + i < end))
