# SPDX-License-Identifier: Apache-2.0
"""Run as a program: decode calls on a kernel whose every wait is preceded by a pause of up to 2 us, another one each
time, so that warps and blocks meet in orders that they otherwise hardly do. Writes results to a file.

Pauses are put where the kernel is traced: it needs a kernel cache of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from tests.gpu.decode_cases import Call, make, run

HEADS = (64, 24, 8, 16, 128)


def calls() -> list[Call]:
    """Several items for each block, of many lengths, with holes; parts."""
    some = [make(b=150, s_q=2, heads=heads, topk=130, second="listed", lengths="bs", seed=heads) for heads in HEADS]
    return [*some, make(b=3, s_q=1, heads=64, topk=640, second="listed", seed=5)]


def add_pauses() -> None:
    import cutlass.cute as cute
    from cutlass import Int32

    from cute_kernels.dsl import ptx

    def pause() -> None:
        now = Int32(cute.arch.clock64())
        # of the clock's bits the ones that hash best, and which warp it is
        number = (now ^ (Int32(cute.arch.thread_idx()[0]) // 32 * 40503)) * -1640531527
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[(number >> 16) & 2047])

    def pause_before(place: Any, name: str) -> None:
        wait = getattr(place, name)

        def pause_and_wait(*args: Any, **named: Any) -> Any:
            pause()
            return wait(*args, **named)

        setattr(place, name, pause_and_wait)

    pause_before(ptx, "wait_mbarrier")
    # of teams of warps
    pause_before(cute.arch, "barrier")
    pause_before(cute.arch, "sync_threads")
    pause_before(cute.arch, "cp_async_wait_group")


if __name__ == "__main__":
    add_pauses()
    results = [[run(call) for _ in range(5)] for call in calls()]
    torch.save([[tuple(x.cpu() for x in result) for result in repeated] for repeated in results], sys.argv[1])
