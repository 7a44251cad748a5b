"""The thread of Blackwell's prefill kernel that starts products: S = Q K^T and O += P V, in tensor memory."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import barriers, ptx, umma
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.blackwell.decode import KEY_ROWS, S_COLUMNS, VALUE_ROWS, scores_steps, values_steps
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    END,
    KEYS,
    LAST,
    P_BITS,
    P_BUFFERS,
    P_BYTES,
    ROWS,
    STAGE_BYTES,
)
from cute_kernels.sparse_mla.prefill_sm100_plan import (
    LIST,
    LISTS,
    MARK_AT,
    Barriers,
    Places,
    Plan,
    query_copies,
)


class Products:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.scores = umma.instruction("f16", plan.dtype, plan.dtype, ROWS, KEYS)
        self.values = umma.instruction("f16", plan.dtype, plan.dtype, ROWS, HEAD_DIM // 2, b_is_mn_major=True)

    @cute.jit
    def run(self, ready: Barriers, at: Places) -> None:
        """Multiply all tiles. By a thread.

        It does what there is to do: Q K^T of the next tile, up to a tile before the weights of this one are there, so
        that tensor cores and the scores' warps have work at the same time; P V of this one.
        """
        stage, phase = barriers.start()
        slot = Int32(0)
        # of tiles; marks and stages of the last one that is scored and of the one before
        scored, added = Int32(0), Int32(0)
        mark, mark_before = Int32(LAST), Int32(0)
        last, before = Int32(0), Int32(0)
        is_due, is_first, parity, goes_on = Int32(1), Int32(1), Int32(0), Int32(1)
        while goes_on != 0:
            ahead = scored - added
            if (ahead < P_BUFFERS) & (mark & END == 0) and ready.stages.is_full(stage, phase) != 0:
                if is_due != 0:
                    self.take_queries(stage, ready, at)
                    is_due = Int32(0)
                else:
                    mark_before, before, last = mark, last, stage
                    mark = self.start_scores(scored, stage, slot, ready, at)
                    slot = slot + 1 & LISTS - 1
                    scored = scored + 1
                    is_due = mark & LAST
                stage, phase = barriers.advance(stage, phase, self.plan.stages)
            ahead = scored - added
            if (ahead > 0) & (ready.weights.is_full(added & P_BUFFERS - 1, added >> P_BITS & 1) != 0):
                its_mark, place = (mark, last) if ahead == 1 else (mark_before, before)
                self.add(added, place, is_first, its_mark, parity, ready, at)
                added, is_first = added + 1, Int32(0)
                if its_mark & LAST != 0:
                    is_first, parity = Int32(1), parity ^ 1
                if its_mark & END != 0:
                    goes_on = Int32(0)

    @cute.jit
    def take_queries(self, stage: Any, ready: Barriers, at: Places) -> None:
        """Copy the queries in a stage to tensor memory; products come after it by themselves. No product reads the last
        item's any more: what is kept of these has come, and that waited for `kept`."""
        ptx.fence_tensor_after()
        source = KEY_ROWS.at(Int64(at.stages + stage * STAGE_BYTES))
        copies = list(query_copies())
        for i in range_constexpr(len(copies)):
            ptx.copy_to_tensor_memory(copies[i].column, source + copies[i].offset // 16, "64x128b.warpx2::02_13")
        ptx.commit_tensor(ready.stages.empty(stage).toint())

    @cute.jit
    def start_scores(self, tile: Any, stage: Any, slot: Any, ready: Barriers, at: Places) -> Any:
        """S = Q K^T of a tile that is there, and whose mark is returned. Its list is there, too: who filled the stage
        has waited for it. Its buffer is free: P V of the tile that had it has started."""
        mark = ptx.load_shared_s32(at.lists + slot * LIST + MARK_AT)
        cute.arch.mbarrier_arrive(ready.lists.empty(slot))
        ptx.fence_tensor_after()
        buffer = tile & P_BUFFERS - 1
        kept, keys = KEY_ROWS.at(Int64(at.kept)), KEY_ROWS.at(Int64(at.stages + stage * STAGE_BYTES))
        steps = list(scores_steps())
        for i in range_constexpr(len(steps)):
            step = steps[i]
            ptx.tensor_mma(
                buffer * S_COLUMNS + step.d,
                step.a if step.is_resident else kept + step.a // 16,
                keys + step.b // 16,
                self.scores,
                int(not step.is_first),
                a_in_tensor_memory=step.is_resident,
                weight_stationary=True,
            )
        ptx.commit_tensor((ready.scores + buffer).toint())
        if mark & LAST != 0:
            ptx.commit_tensor(ready.kept.toint())
        return mark

    @cute.jit
    def add(self, tile: Any, stage: Any, is_first: Any, mark: Any, parity: Any, ready: Barriers, at: Places) -> None:
        """O += P V of a tile whose weights are there; O = P V of an item's first one."""
        if is_first != 0:
            ready.total.wait_empty(0, parity)
        ptx.fence_tensor_after()
        buffer = tile & P_BUFFERS - 1
        weights = KEY_ROWS.at(Int64(at.p + buffer * P_BYTES))
        values = VALUE_ROWS.at(Int64(at.stages + stage * STAGE_BYTES))
        steps = list(values_steps())
        for i in range_constexpr(len(steps)):
            step = steps[i]
            ptx.tensor_mma(
                step.d,
                weights + step.a // 16,
                values + step.b // 16,
                self.values,
                1 - is_first if step.is_first else 1,
                weight_stationary=True,
            )
        ptx.commit_tensor(ready.weights.empty(buffer).toint())
        ptx.commit_tensor(ready.stages.empty(stage).toint())
        if mark & LAST != 0:
            ptx.commit_tensor(ready.total.full(0).toint())
