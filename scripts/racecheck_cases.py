#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Minimal kernels without a race, for telling what compute-sanitizer's racecheck makes of an order.

    compute-sanitizer --tool racecheck python scripts/racecheck_cases.py CASE
    python scripts/racecheck_cases.py --list

One warp of a block writes 32 words again and again, and others add them up; the sums are checked. --list says what
orders this in each case, and what racecheck said about it. What it reports of the library's kernels:
scripts/sanitize.py.
Exit status: 0 the sums are right, 1 they are wrong, 2 bad input.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.runtime.arch import arch_of

WARP = 32
ROUNDS = 6


class Case:
    """Warps 0 .. users - 1 of each block add up what the last warp writes. Entry point: (int32 out [threads], stream).

    What orders a round is up to the subclass: `start` prepares it, by one thread; who fills calls `await_users` and
    `hand_over`, and who reads `await_words` and `let_go`. With `cluster_wait` nobody fills before the cluster's blocks
    have all started, and the others wait for that at the end.
    """

    name = "case"
    users = 1
    cluster = 1
    blocks = 1
    cluster_wait = False
    start: Any
    await_users: Any
    hand_over: Any
    await_words: Any
    let_go: Any

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        threads = (self.users + 1) * WARP
        self.kernel(address(out)).launch(
            grid=[self.blocks, 1, 1], block=[threads, 1, 1], cluster=[self.cluster, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = SmemAllocator()
        ring = barriers.Ring.allocate(smem, 1)
        words = smem.allocate_tensor(Int32, cute.make_layout(WARP), byte_alignment=16).iterator.toint()
        if thread == 0:
            self.start(ring)
        cute.arch.sync_threads()
        if const_expr(self.cluster_wait):
            cute.arch.cluster_arrive_relaxed()
            if warp == self.users:
                cute.arch.cluster_wait()
        lane = thread % WARP
        total = Int32(0)
        for i in cutlass.range(ROUNDS, unroll=1):
            if warp == self.users:
                self.await_users(ring, i)
                ptx.store_shared_s32(words + lane * 4, i * WARP + lane)
                self.hand_over(ring)
            else:
                self.await_words(ring, i)
                total = total + ptx.load_shared_s32(words + (lane ^ 1) * 4)
                self.let_go(ring, lane)
        if warp == self.users:
            self.await_users(ring, Int32(ROUNDS))
        else:
            if const_expr(self.cluster_wait):
                cute.arch.cluster_wait()
            ptx.store_global_s32(out + Int64(block * (self.users * WARP) + thread) * 4, total)


class Mbarriers(Case):
    """Every lane that fills arrives at `full`. Of those that read, every lane arrives at `empty`, or one for all."""

    def __init__(self, one_lane: bool) -> None:
        self.one_lane = one_lane

    def start(self, ring: Any) -> None:
        ring.initialize(WARP, 1 if self.one_lane else WARP)

    def await_users(self, ring: Any, i: Any) -> None:
        ring.wait_empty(0, i & 1)

    def hand_over(self, ring: Any) -> None:
        cute.arch.mbarrier_arrive(ring.full(0))

    def await_words(self, ring: Any, i: Any) -> None:
        ring.wait_full(0, i & 1)

    @cute.jit
    def let_go(self, ring: Any, lane: Any) -> None:
        if const_expr(self.one_lane):
            cute.arch.sync_warp()
        if lane == 0 or not self.one_lane:
            cute.arch.mbarrier_arrive(ring.empty(0))


class Named(Case):
    """Named barrier 1 hands over, 2 gives back. Who need not wait arrives, or waits all the same."""

    users = 4
    blocks = 16
    threads = (users + 1) * WARP

    def __init__(self, arrive: bool, cluster_wait: bool = False) -> None:
        self.cluster_wait = cluster_wait
        self.cluster = 2 if cluster_wait else 1
        self.arrive = cute.arch.barrier_arrive if arrive else cute.arch.barrier

    def start(self, ring: Any) -> None:
        ring.initialize(1, 1)

    @cute.jit
    def await_users(self, ring: Any, i: Int32) -> None:
        if i > 0:
            cute.arch.barrier(barrier_id=2, number_of_threads=self.threads)

    def hand_over(self, ring: Any) -> None:
        self.arrive(barrier_id=1, number_of_threads=self.threads)

    def await_words(self, ring: Any, i: Any) -> None:
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    def let_go(self, ring: Any, lane: Any) -> None:
        self.arrive(barrier_id=2, number_of_threads=self.threads)


class Pairs(Case):
    """The whole block meets before and after words are read; pairs of warps meet at named barriers of their own in
    between, one pair twice as often as the other."""

    users = 3
    threads = (users + 1) * WARP

    def start(self, ring: Any) -> None:
        ring.initialize(1, 1)

    @cute.jit
    def meet(self) -> None:
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARP)
        for _ in cutlass.range(warp // 2 + 1, unroll=1):
            cute.arch.barrier(barrier_id=1 + warp // 2, number_of_threads=2 * WARP)

    @cute.jit
    def await_users(self, ring: Any, i: Int32) -> None:
        if i > 0:
            cute.arch.sync_threads()
        self.meet()

    def hand_over(self, ring: Any) -> None:
        cute.arch.sync_threads()

    def await_words(self, ring: Any, i: Any) -> None:
        self.meet()
        cute.arch.sync_threads()

    def let_go(self, ring: Any, lane: Any) -> None:
        cute.arch.sync_threads()


CASES: dict[str, tuple[Case, str]] = {
    "all-lanes": (Mbarriers(False), "every lane that read arrives at an mbarrier: clean"),
    "one-lane": (Mbarriers(True), "a warp barrier, then one lane arrives for its warp: reports what other lanes read"),
    "named-sync": (Named(False), "bar.sync on both sides: clean"),
    "named-arrive": (Named(True), "bar.arrive where nobody has to wait: reports all that was read"),
    "pairs": (Pairs(), "bar.sync 0 of the block, and named barriers of two warps in between"),
    "cluster-wait": (
        Named(False, cluster_wait=True),
        "bar.sync, after a wait at the cluster's barrier that others do last: never ends, as it is held until all wait",
    ),
}
"""By name: the case, what orders its rounds, and what racecheck of Compute Sanitizer 2025.3.1 did on an H200; with the
first two and named-arrive in CUDA C++, compiled with nvcc 13.0, it did the same."""


def run(name: str) -> bool:
    """Compile and run a case; whether its sums are right."""
    case, _ = CASES[name]
    case.name = name.replace("-", "_")
    out = torch.zeros(case.blocks * case.users * WARP, dtype=torch.int32, device="cuda")
    fake = make_fake_compact_tensor(Int32, (out.numel(),), stride_order=(0,), assumed_align=16)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch_of(torch.cuda.current_device())}"
    cute.compile(case, fake, stream, options=options)(out)
    first = torch.arange(WARP, dtype=torch.int32) ^ 1
    want = sum((first + i * WARP for i in range(ROUNDS)), torch.zeros_like(first))
    return torch.equal(out.cpu().view(-1, WARP), want.expand(case.blocks * case.users, WARP))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("case", nargs="?", choices=tuple(CASES), metavar="CASE")
    which.add_argument("--list", action="store_true", help="what each case shows")
    arguments = parser.parse_args()
    if arguments.list:
        for name, (_, text) in CASES.items():
            print(f"{name}: {text}")
        return 0
    right = run(arguments.case)
    print(f"{arguments.case}: the sums are {'right' if right else 'wrong'}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
