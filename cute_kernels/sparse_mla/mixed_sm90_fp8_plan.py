"""What Hopper's mixed kernel over e4m3 caches has that the one over bf16 caches has not: see prefill_sm90_plan.

e4m3 rows and queries become f16 on their way to tensor cores: f16 holds every e4m3 number, so all products are exact.
Codes need no memory of their own: they are copied to the stage that they will fill.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float16

from cute_kernels.sparse_mla.prefill_sm90_plan import (
    BARRIERS,
    HELD,
    ROWS_REGISTERS,
    SCORES_REGISTERS,
    Barriers,
    Plan,
    smem_parts,
)


@dataclass(frozen=True)
class CodeBarriers(Barriers):
    """As Barriers, but for:

    stages    full: the warps that convert rows have stored theirs, and the heading
    """

    def initialize(self) -> None:
        self.stages.initialize(4, 2 * 4)
        self.initialize_others()


FP8 = Plan(Float16, smem_parts(), CodeBarriers, BARRIERS, HELD, SCORES_REGISTERS, ROWS_REGISTERS, readers_fence=True)
