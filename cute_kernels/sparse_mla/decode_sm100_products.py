"""Both products of Blackwell's decode kernel, started by one thread: S = Q K^T and O += P V, results in tensor memory.

S of a tile is started before P V of the one before, so that tensor cores have work while softmax is computed.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.dsl.umma import Operand
from cute_kernels.sparse_mla import decode_sm100_plan
from cute_kernels.sparse_mla.decode_sm100_plan import (
    BUFFERS,
    END,
    FIRST,
    KEY_ROWS,
    LAST,
    SLAB_BYTES,
    VALUE_ROWS,
    Barriers,
    Places,
)
from cute_kernels.sparse_mla.decode_sm100_scout import marks


class Products:
    """plan: what products are made of, a module."""

    plan: Any = decode_sm100_plan

    @cute.jit
    def run(self, ready: Barriers, at: Places) -> None:
        """Multiply every tile. By a warp."""
        tile, mark, items = Int32(0), Int32(0), Int32(0)
        while mark & END == 0:
            slot, buffer, stage = tile % ready.headings.stages, tile % BUFFERS, tile % ready.stages.stages
            mark = marks(slot, tile, ready, at)
            if mark & END == 0:
                if mark & FIRST != 0:
                    ready.wait(ready.queries, items & 1)
                    items = items + 1
                    self.start_scores(tile, ready, at)
                if mark & LAST == 0:
                    self.start_scores(tile + 1, ready, at)
                ready.wait(ready.weights + buffer, tile // BUFFERS & 1)
                ptx.fence_tensor_after()
                # all threads have read the marks
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    adds = Int32(0) if mark & FIRST != 0 else Int32(1)
                    self.multiply_values(at.p + buffer * SLAB_BYTES, at.v + stage * self.plan.STAGE_BYTES, adds)
                    ready.commit(ready.stages.empty(stage))
                    cute.arch.mbarrier_arrive(ready.headings.empty(slot))
            tile = tile + 1

    @cute.jit
    def start_scores(self, tile: Any, ready: Barriers, at: Places) -> None:
        """S of a tile, once it is there. The buffer is free: P of the tile two before has been waited for."""
        buffer, stage = tile % BUFFERS, tile % ready.stages.stages
        ready.wait(ready.stages.full(stage), tile // ready.stages.stages & 1)
        ptx.fence_tensor_after()
        with cute.arch.elect_one():
            self.multiply_keys(Int32(buffer * self.plan.S_COLUMNS), at.q, at.v + stage * self.plan.STAGE_BYTES)
            ready.commit(ready.sums + buffer)

    def multiply_keys(self, column: Any, q: Any, stage: Any) -> None:
        """S = Q K^T."""
        queries, keys = descriptor(KEY_ROWS, q), descriptor(KEY_ROWS, stage)
        for step in self.plan.scores_steps():
            ptx.tensor_mma(
                column + step.d,
                step.a if step.is_resident else queries + step.a // 16,
                keys + step.b // 16,
                self.plan.SCORES_INSTRUCTION,
                int(not step.is_first),
                a_in_tensor_memory=step.is_resident,
                **self.plan.FORM,
            )

    def multiply_values(self, p: Any, stage: Any, adds: Any) -> None:
        """O += P V, or O = P V."""
        weights, values = descriptor(KEY_ROWS, p), descriptor(VALUE_ROWS, stage)
        for step in self.plan.values_steps():
            ptx.tensor_mma(
                step.d,
                weights + step.a // 16,
                values + step.b // 16,
                self.plan.VALUES_INSTRUCTION,
                adds if step.is_first else 1,
                **self.plan.FORM,
            )


def descriptor(operand: Operand, address: Any) -> Any:
    """In a register."""
    wide: Any = Int64(address)
    return operand.at(wide)
