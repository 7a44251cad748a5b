# SPDX-License-Identifier: Apache-2.0
"""Random delays in kernels, so that warps and CTAs meet in orders that they otherwise hardly do.

They are put where a kernel is traced, before everything that a warp waits for, and so in every role: kernels that are
compiled after `add_delays` have them, under the keys of those that do not. They need a process and a kernel cache of
their own.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.dsl import ptx

MOST_NS = 2047

WAITS = (
    (ptx, "wait_mbarrier"),
    (ptx, "wait_mbarrier_cluster"),
    (ptx, "wait_global_s64"),
    (cute.arch, "barrier"),
    (cute.arch, "cluster_arrive"),
    (cute.arch, "cp_async_wait_group"),
    (cute.arch, "mbarrier_wait"),
    (cute.arch, "sync_threads"),
)
"""Where a warp waits for other threads, or for copies."""


def add_delays() -> None:
    """From now on, in this process, kernels are compiled with delays."""
    for place, name in WAITS:
        setattr(place, name, _delayed(getattr(place, name)))


def _delayed(wait: Any) -> Any:
    def delay_and_wait(*args: Any, **named: Any) -> Any:
        _delay()
        return wait(*args, **named)

    return delay_and_wait


def _delay() -> None:
    """Up to MOST_NS, by the low bits of the clock and the number of the warp, so that lanes stay together."""
    warp = Int32(cute.arch.thread_idx()[0]) // 32
    hashed = (Int32(cute.arch.clock64()) ^ warp * 40503) * -1640531527
    cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[(hashed >> 16) & MOST_NS])
