# SPDX-License-Identifier: Apache-2.0
"""Run as a program: calls on kernels whose every wait is preceded by a pause, another one each time, so that warps and
blocks meet in orders that they otherwise hardly do. Writes results to a file.

    python -m tests.gpu.delays KERNEL FILE

Pauses are put where the kernel is traced: it needs a kernel cache of its own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import registry, verify
from cute_kernels.runtime.key import KernelKey
from tests.gpu import decode_cases
from tests.gpu.decode_cases import make

KERNELS: dict[str, tuple[str, ...]] = {
    "decode.DecodeKey": ("sparse_mla_decode",),
    "decode_swap_ab.DecodeSwapAbKey": ("sparse_mla_decode",),
    "prefill.PrefillKey": ("sparse_mla_prefill",),
    "prefill.QuantPrefillKey": ("sparse_mla_prefill",),
    "prefill.NormQuantPrefillKey": ("sparse_mla_prefill",),
    "prefill_paged.PagedKey": ("sparse_mla_prefill_paged",),
    "prefill_paged.QuantPagedKey": ("sparse_mla_prefill_paged",),
    "prefill_paged_cluster.PagedClusterKey": ("sparse_mla_prefill_paged",),
    "prefill_mixed.MixedKey": ("sparse_mla_mixed",),
    "prefill_mixed.MixedFp8Key": ("sparse_mla_mixed",),
    "prefill_mixed.MixedFp8ConvertedKey": ("sparse_mla_mixed",),
    "prefill_mixed_swap_ab.SwapAbMixedFp8Key": ("sparse_mla_mixed",),
    "prefill_swap_ab.SwapAbPrefillKey": ("sparse_mla_prefill",),
    "prefill_swap_ab.QuantSwapAbPrefillKey": ("sparse_mla_prefill",),
    "prefill_swap_ab.SwapAbMixedKey": ("sparse_mla_mixed",),
    "gemm.GemmKey": ("bf16_gemm", "fp8_gemm", "fp8_gemm_squares", "deepseek_v4_fp8_einsum"),
    "gemm_dual.DualGemmKey": ("fp8_bf16_gemm",),
    "gemm_swap_ab.SwapAbKey": ("bf16_gemm", "fp8_gemm"),
    "logits.LogitsKey": ("mqa_logits", "paged_mqa_logits", "score_top_k_decode", "score_top_k_prefill"),
    "logits_mxfp4.Mxfp4LogitsKey": ("mqa_logits", "paged_mqa_logits"),
    "logits_candidates.CandidateLogitsKey": ("score_candidates_decode", "score_candidates_prefill"),
    "topk_held.AnyTopKKey": ("top_k_per_row_decode", "top_k_per_row_prefill"),
    "ratio128.C128Key": ("fused_compress_norm_rope_store",),
    "gather.GatherBulkKey": ("dequantize_and_gather_k_cache",),
    "insert_compress.InsertCompressKey": ("fused_qkv_insert_compress",),
}
"""Whose warps have roles, or whose blocks work together: module and class of the key -> ops that run them."""

MOST_KEYS = 2
"""Of a kernel: each takes some seconds to compile."""

REPEATS = 5
HEADS = (64, 24, 8, 16, 128)

Result = tuple[torch.Tensor, ...]


def kernel_of(key: KernelKey) -> str:
    return f"{type(key).__module__.rpartition('.')[2]}.{type(key).__name__}"


def verified_calls(kernel: str) -> list[Callable[[], Result]]:
    """For some keys of a kernel the largest call that its ops are verified with."""
    largest: dict[KernelKey, tuple[int, Callable[[], Result]]] = {}
    for name in KERNELS[kernel]:
        op = registry.all_ops()[name]
        examples = verify.examples_of(op)
        assert examples is not None
        for example in examples():
            args = verify.clone_arguments(example.args, torch.device("cuda"))
            with contextlib.suppress(NotImplementedError), compile_.collect() as keys:
                op.overload(*args)
            size = sum(value.numel() for value in op.mutated(args).values())
            for key in keys:
                if kernel_of(key) == kernel and size > largest.get(key, (0, None))[0]:
                    largest[key] = size, Verified(op, example.args)
    return [call for _, call in sorted(largest.values(), key=lambda found: -found[0])[:MOST_KEYS]]


class Verified:
    """Runs a call on fresh arguments; the result is what it writes but for its workspace."""

    def __init__(self, op: Any, args: tuple[Any, ...]) -> None:
        self.op, self.args = op, args

    def __call__(self) -> Result:
        args = verify.clone_arguments(self.args, torch.device("cuda"))
        self.op.overload(*args)
        written = self.op.mutated(args)
        return tuple(verify.raw_memory(value).cpu() for name, value in written.items() if name != "workspace")


def decode_calls() -> list[Callable[[], Result]]:
    """Several items for each block, of many lengths, with holes; parts; long rows in halves, some by two clusters."""
    some = [make(b=150, s_q=2, heads=heads, topk=130, second="listed", lengths="bs", seed=heads) for heads in HEADS]
    calls = [*some, make(b=3, s_q=1, heads=64, topk=640, second="listed", seed=5)]
    cut = make(b=45, s_q=1, heads=64, topk=100, second="dense", extra_topk=1100, lengths="bs", seed=7)

    def result(call: decode_cases.Call, **more: Any) -> Result:
        return tuple(x.cpu() for x in decode_cases.run(call, **more))

    return [*(partial(result, call) for call in calls), partial(result, cut, long_rows="halves")]


def calls(kernel: str) -> list[Callable[[], Result]]:
    return decode_calls() if kernel == "decode.DecodeKey" else verified_calls(kernel)


def add_pauses() -> None:
    """Every wait of kernels that are compiled from now on sleeps first: up to 2 us, and four times as long a warp in
    eight, another one every 70 us."""
    import cutlass.cute as cute
    from cutlass import Int32

    from cute_kernels.dsl import ptx

    def pause() -> None:
        now = Int32(cute.arch.clock64())
        warp = Int32(cute.arch.thread_idx()[0]) // 32
        # of the clock's bits the ones that hash best, and which warp it is
        number = (now ^ (warp * 40503)) * -1640531527
        is_slow = ((((now >> 17) ^ warp) & 7) - 1) >> 31 & 1
        length = ((number >> 16) & 2047) << (2 * is_slow)
        cute.arch.inline_ptx("nanosleep.u32 {$r0};", read_only_args=[length])

    def pause_before(place: Any, name: str) -> None:
        wait = getattr(place, name)

        def pause_and_wait(*args: Any, **named: Any) -> Any:
            pause()
            return wait(*args, **named)

        setattr(place, name, pause_and_wait)

    for name in ("wait_mbarrier", "wait_mbarrier_cluster", "wait_global_s64"):
        pause_before(ptx, name)
    # barrier and sync_threads: of teams of warps
    for name in ("barrier", "sync_threads", "cp_async_wait_group", "cluster_wait", "mbarrier_wait"):
        pause_before(cute.arch, name)


def require_pauses(kernel: str) -> None:
    """A key of the kernel that is compiled without a pause is an error."""
    compile_object = compile_.compile_object

    def compiled(key: KernelKey) -> tuple[bytes, Any]:
        data, report = compile_object(key)
        if kernel_of(key) == kernel and "nanosleep" not in report.ptx:
            raise RuntimeError(f"{key}: no wait is preceded by a pause")
        return data, report

    compile_.compile_object = compiled


if __name__ == "__main__":
    kernel, file = sys.argv[1:]
    add_pauses()
    require_pauses(kernel)
    torch.save([[call() for _ in range(REPEATS)] for call in calls(kernel)], file)
