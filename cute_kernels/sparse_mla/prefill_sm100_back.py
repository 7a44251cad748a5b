"""The warpgroup of Blackwell's prefill kernel that stores results: O of an item once its products are done."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.sparse_mla.blackwell.decode import O_BLOCK, O_COLUMN, O_COLUMNS, o_dim
from cute_kernels.sparse_mla.prefill_sm90_plan import END, ROWS, Output, Query, Work
from cute_kernels.sparse_mla.prefill_sm100_plan import LANE, Barriers, Places

WORDS = 4
"""That a thread stores at a time."""


class Back:
    @cute.jit
    def run(self, thread: Any, work: Work, q: Query, out: Output, ready: Barriers, at: Places) -> None:
        """Store the results of all items. By a warpgroup."""
        head, half = thread % ROWS, thread // ROWS
        lanes = O_COLUMN + (thread >> 5) * (32 * LANE)
        item, mark = Int32(work.first), Int32(0)
        _, phase = barriers.start()
        while mark & END == 0:
            ready.total.wait_full(0, phase)
            ptx.fence_tensor_after()
            mark = ptx.load_shared_s32(at.label)
            share = ptx.load_shared_f32(at.note + head * 4)
            if const_expr(out.scale is not None):
                share = share * out.scale
            row, first = work.place(item)
            target = out.base + Int64(row) * out.row + Int64(first + head) * out.head
            is_head = first + head < q.heads
            for block in cutlass.range(O_COLUMNS // O_BLOCK, unroll=1):
                found = ptx.load_tensor_memory(lanes + block * O_BLOCK, O_BLOCK)
                place = target + Int64(o_dim(half, block) * 2)
                for i in range_constexpr(O_BLOCK // (2 * WORDS)):
                    own = [Float32(found[2 * WORDS * i + j]) * share for j in range(2 * WORDS)]
                    words = [ptx.bf16x2(own[2 * j], own[2 * j + 1]) for j in range(WORDS)]
                    ptx.store_global_128(place + i * (WORDS * 4), words, is_head)
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread & 31 == 0:
                cute.arch.mbarrier_arrive(ready.total.empty(0))
            item, phase = item + work.step, phase ^ 1
