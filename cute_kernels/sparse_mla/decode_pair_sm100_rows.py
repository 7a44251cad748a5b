"""The warps of Blackwell's decode kernel for pairs of blocks that ask for rows and convert them: those of one block, of
half of the columns."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.decode_pair_sm100_plan import (
    BLOCKS,
    CODES_BYTES,
    ROPE_BYTES,
    SLABS,
    code_offset,
    first_column,
    raw_offset,
    rope_offset,
    stage_offset,
)
from cute_kernels.sparse_mla.decode_sm100_front import ROWS_APART, Front
from cute_kernels.sparse_mla.decode_sm100_plan import LAST_SLAB, Places
from cute_kernels.sparse_mla.decode_sm100_scout import Gather

SCALE_BYTES = FP8_DS_MLA.scale_bytes


class PairFront(Front):
    """Loads of neighbouring rows, which are 256 bytes apart, would meet in banks: every other row has its slabs in
    another order, each two of them the second one first."""

    def load_scales(self, scales_at: Any) -> list[Any]:
        """Of the block's four slabs."""
        own_at = scales_at + ptx.rank_again() * SLABS
        return [ptx.load_shared_s32(own_at + half * ROWS_APART * SCALE_BYTES) for half in range(2)]

    @cute.jit
    def convert_rows(self, raw: Any, stage: Any, row: Any, member: Any, scales: Any, at: Places) -> None:
        rank, odd = ptx.rank_again(), row & 1
        source = at.raw + raw_offset(raw, row) + code_offset(rank, 0) + member * 16
        target = at.v + stage_offset(stage, 0, row, 2 * member)
        # what comes of the first slab of two, and of the second
        sources = [source + sign * odd * code_offset(0, 1) for sign in (1, -1)]
        targets = [target + sign * odd * stage_offset(0, 1, 0, 0) for sign in (1, -1)]
        selectors = [Int32(0x1010) + odd * 0x2222, Int32(0x3232) - odd * 0x2222]
        for slab in range_constexpr(SLABS):
            # the second block's last slab are its rotary columns
            if rank * SLABS + (slab ^ odd) < LAST_SLAB:
                for half in range_constexpr(2):
                    pair = ptx.bf16x2_of_ue8m0x2(scales[half], slab // 2)
                    factor = ptx.permute_bytes(pair, pair, selectors[slab % 2])
                    offset = raw_offset(0, half * ROWS_APART) + code_offset(0, slab)
                    words = ptx.load_shared_128(sources[slab % 2], offset=offset)
                    place = targets[slab % 2] + stage_offset(0, slab, half * ROWS_APART, 0)
                    self.store(place, words, factor)


class PairGather(Gather):
    @cute.jit
    def ask(self, stage: Any, source: Any, rows_at: Any, full: Any, at: Places) -> None:
        """Start the copies of a block's part of a tile. Of rotary columns the first block has none, but it says how
        many bytes the second one's bring to its barrier. By a thread."""
        rank = ptx.rank_again()
        if const_expr(not self.is_rope):
            cute.arch.mbarrier_arrive_and_expect_tx(full, CODES_BYTES)
            column = first_column(rank)
            self.gather(lambda row: at.raw + raw_offset(stage, row), source, column, rows_at, full.toint())
        elif rank == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, ROPE_BYTES)
        else:
            counter = ptx.pair_leader(full.toint())
            self.gather(lambda row: at.v + rope_offset(stage, row), source, 0, rows_at, counter, BLOCKS)
