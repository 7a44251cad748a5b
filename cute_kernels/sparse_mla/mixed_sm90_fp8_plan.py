"""What Hopper's mixed kernel over e4m3 caches has that the one over bf16 caches has not: see prefill_sm90_plan.

e4m3 rows and queries become f16 on their way to tensor cores: f16 holds every e4m3 number, so all products are exact. A
tile lies in two halves then, 256 columns each, and the ring has stages for five of them: one can be filled as soon as
one of the backs has let go of its columns of a tile. Codes, as caches and queries have them, come in quarters of 128
columns, through a ring of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float16, Int32, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    HEADING,
    P_BUFFERS,
    ROWS,
    STAGE_BYTES,
    Barriers,
    Plan,
    Tiles,
    smem_parts,
)

HALVES = 5
HALF_BYTES = STAGE_BYTES // 2

import os
S, HELD, R = map(int, os.environ.get("REGS", "144,320,48").split(","))


@dataclass(frozen=True)
class Halves(Tiles):
    """The ring of halves. A tile is where its first half is."""

    def wait_tile(self, stage: Any, phase: Any) -> None:
        self.wait_full(stage, phase)
        self.wait_full(*self.half(stage, phase, 1))

    def has_tile(self, stage: Any, phase: Any) -> Any:
        return self.is_full(stage, phase) & self.is_full(*self.half(stage, phase, 1))

    def advance(self, stage: Any, phase: Any) -> tuple[Any, Any]:
        return self.half(stage, phase, 2)

    def parts(self, stage: Any, base: Any) -> list[Any]:
        second, _ = self.half(stage, Int32(0), 1)
        return [base + stage * HALF_BYTES, base + second * HALF_BYTES]

    def let_go_of_queries(self, stage: Any) -> None:
        second, _ = self.half(stage, Int32(0), 1)
        for half in (stage, second):
            cute.arch.mbarrier_arrive(self.empty(half))

    def side(self, stage: Any, phase: Any, side: Any, base: Any) -> tuple[Any, Any, Any]:
        half, its_phase = self.half(stage, phase, side)
        return base + half * HALF_BYTES, half, its_phase

    @cute.jit
    def half(self, stage: Any, phase: Any, further: Any) -> tuple[Any, Any]:
        """The half that many (0 to 2) further on."""
        following = stage + further
        is_round = following >= HALVES
        return (following - HALVES if is_round else following), (phase ^ 1 if is_round else phase)


@dataclass(frozen=True)
class HalfBarriers(Barriers):
    """As Barriers, but for:

    stages    full: the warps that convert have stored a half. empty: those of the back whose columns it has are done
              with it, or the scores' with queries
    """

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> HalfBarriers:
        stages = Halves(smem.allocate_array(Int64, 2 * HALVES), HALVES)
        return cls(stages, barriers.Ring.allocate(smem, P_BUFFERS), smem.allocate_array(Int64, 1))

    def initialize(self) -> None:
        self.stages.initialize(4, 4)
        self.initialize_others()


def memory() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; what is not as in Places:

    stages    [5 halves][4 slabs][64 rows][64] f16
    kept      [3 slabs][64 heads][64] f16
    """
    halves = {"stages": HALVES * HALF_BYTES}
    return halves | smem_parts() | halves | {"kept": ROWS * (HEAD_DIM - HELD) * 2, "heading": HALVES * HEADING}


MBARRIERS = 2 * (HALVES + P_BUFFERS) + 1

FP8 = Plan(Float16, 2, memory(), HalfBarriers, MBARRIERS, HELD, S, R, readers_fence=True)
