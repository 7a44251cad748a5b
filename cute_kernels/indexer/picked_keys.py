# SPDX-License-Identifier: Apache-2.0
"""Kernel of top_k_keys: a thread takes a pick, and makes a key of its score and of its entry's number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.indexer.call import KeysCall
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

THREADS = 256
"""Of a CTA."""

MOST_COLUMNS, MOST_CTAS = 65535, 2**31 - 1
"""CTAs of a row and rows of a grid."""

ZERO, INFINITE = 0x00000000, 0x7F800000
"""Bits of an fp32 without its sign."""


@dataclass(frozen=True)
class PickedKeysKey(KernelKey):
    """One kernel serves every size."""

    kernel_name: ClassVar[str] = "indexer.picked_keys"

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("griddepcontrol",) if arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH else ()

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def matrix(dtype: Any) -> Any:
            return make_fake_tensor(
                dtype, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64())
            )

        numbers = Int32(1), Int32(1), Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True)
        return PickedKeysKernel(self), (matrix(Float32), matrix(Int32), matrix(Int64), *numbers)


class PickedKeysKernel:
    """Entry point: (scores, picks, keys; entries of a page, ranks, rank; stream)."""

    def __init__(self, key: PickedKeysKey) -> None:
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        picks: cute.Tensor,
        keys: cute.Tensor,
        page_entries: Int32,
        ranks: Int32,
        rank: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix("top_k_keys", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            address(scores),
            stride_bytes(scores, 0),
            length(scores, 1),
            address(picks),
            stride_bytes(picks, 0),
            length(picks, 1),
            address(keys),
            stride_bytes(keys, 0),
            cute.fast_divmod_create_divisor_v2(page_entries),
            ranks,
            rank,
        )
        kernel.launch(
            grid=[length(picks, 0), cute.ceil_div(length(picks, 1), THREADS), 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.has_dependency,
        )

    @cute.kernel
    def kernel(
        self,
        scores: Int64,
        scores_stride: Int64,
        columns: Int32,
        picks: Int64,
        picks_stride: Int64,
        k: Int32,
        keys: Int64,
        keys_stride: Int64,
        page_entries: cute.FastDivmodDivisorV2,
        ranks: Int32,
        rank: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, part, _ = cute.arch.block_idx()
        place = part * THREADS + thread
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        source = picks + Int64(row) * picks_stride + Int64(place) * 4
        pick = ptx.load_global_s32_where(place < k, source)
        is_there = (pick >= 0) & (pick < columns)
        pick = pick if is_there else Int32(0)
        bits = ptx.load_global_s32_where(is_there, scores + Int64(row) * scores_stride + Int64(pick) * 4)
        page, entry = divmod(pick, page_entries)
        number = (Int64(page) * Int64(ranks) + Int64(rank)) * Int64(page_entries.divisor) + Int64(entry)
        is_there = is_there & (number < Int64(2**31))

        magnitude = bits & 0x7FFFFFFF
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        order = Int32(0) if magnitude == ZERO else order
        order = Int32(-(2**31)) if magnitude > INFINITE else order
        low, high = ~Int32(number), order
        if not is_there:
            low, high = Int32(0), Int32(-(2**31))
        ptx.store_global_64(keys + Int64(row) * keys_stride + Int64(place) * 8, low, high, place < k)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[PickedKeysKey]:
    """Layers with an indexer."""
    return [PickedKeysKey(arch)] if 4 in config.compress_ratios else []


def why_not(call: KeysCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    if call.picks.shape[1] > MOST_COLUMNS * THREADS:
        return f"there must be at most {MOST_COLUMNS * THREADS} picks of a row, got {call.picks.shape[1]}"
    if call.picks.shape[0] > MOST_CTAS:
        return f"there must be at most {MOST_CTAS} rows, got {call.picks.shape[0]}"
    return ""


def launch(call: KeysCall) -> None:
    """Run the kernel on the current stream of the picks' device."""
    if call.picks.numel() == 0:
        return
    device_index = call.picks.device.index
    tensors = call.scores, call.picks, call.out
    launch_key(
        PickedKeysKey(arch_of(device_index)), device_index, *tensors, call.entries_per_page, call.ranks, call.rank
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
