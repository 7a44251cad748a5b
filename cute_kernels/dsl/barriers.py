# SPDX-License-Identifier: Apache-2.0
"""A ring of shared-memory stages between warps that fill them and warps that use them.

Each stage has two mbarriers: `full` completes when everything that fills the stage has arrived, `empty` when every user
has released it. A side goes round the ring with a (stage, phase) of its own, from `start` on by `advance`; it waits
for the phase's parity. Fillers wait for the opposite parity, which an unused barrier counts as complete, so that the
first round finds every stage empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import ptx

BYTES_PER_STAGE = 16
"""Shared memory of a stage's two barriers."""


@dataclass(frozen=True)
class Ring:
    """The barriers of `stages` stages: first all `full` ones, then the `empty` ones."""

    first: Any
    stages: int

    @classmethod
    def allocate(cls, smem: Any, stages: int) -> Ring:
        """In memory of a SmemAllocator."""
        return cls(smem.allocate_array(Int64, 2 * stages), stages)

    def place(self, number: Any) -> tuple[Any, Any]:
        """(stage, phase) of what goes round as the `number`th, counted from 0."""
        return place(number, self.stages)

    def full(self, stage: Any) -> Any:
        return self.first + stage

    def empty(self, stage: Any) -> Any:
        return self.first + self.stages + stage

    def initialize(self, arrivals_to_fill: int, arrivals_to_empty: int, first: int = 0, step: int = 1) -> None:
        """Of stages `first`, `first` + step, and so on. By one thread; the block (of a cluster: all of it) synchronizes
        afterwards."""
        for stage in range(first, self.stages, step):
            cute.arch.mbarrier_init(self.full(stage), arrivals_to_fill)
            cute.arch.mbarrier_init(self.empty(stage), arrivals_to_empty)
        cute.arch.mbarrier_init_fence()

    def is_full(self, stage: Any, phase: Any) -> Any:
        """1 if `wait_full` would not wait, else 0."""
        return ptx.test_mbarrier(self.full(stage).toint(), phase)

    def is_empty(self, stage: Any, phase: Any) -> Any:
        """1 if `wait_empty` would not wait, else 0."""
        return ptx.test_mbarrier(self.empty(stage).toint(), phase ^ 1)

    def wait_full(self, stage: Any, phase: Any) -> None:
        _wait(self.full(stage), phase)

    def wait_empty(self, stage: Any, phase: Any) -> None:
        _wait(self.empty(stage), phase ^ 1)


def initialize(first: Any, count: int, arrivals: int) -> None:
    """So many mbarriers, by one thread, which fences behind the last of them."""
    for i in range(count):
        cute.arch.mbarrier_init(first + i, arrivals)


@cute.jit
def arrive_warp(lane: Any, barrier: Any) -> None:
    """One arrival for a warp, when all its lanes are here."""
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(barrier)


def _wait(barrier: Any, phase: Any) -> None:
    ptx.wait_mbarrier(barrier.toint(), phase)


def place(number: Any, stages: int) -> tuple[Any, Any]:
    """(stage, phase) of what goes round a ring as the `number`th, counted from 0. stages: a power of two.

    By masks: remainders and quotients of numbers that might be negative take five instructions each."""
    return number & (stages - 1), number >> (stages.bit_length() - 1) & 1


def start() -> tuple[Any, Any]:
    """The first stage and its phase."""
    return Int32(0), Int32(0)


@cute.jit
def advance(stage: Int32, phase: Int32, stages: cutlass.Constexpr) -> tuple[Any, Any]:
    """The next stage and its phase."""
    following = stage + 1
    is_end = following == stages
    return (Int32(0) if is_end else following), (phase ^ 1 if is_end else phase)
