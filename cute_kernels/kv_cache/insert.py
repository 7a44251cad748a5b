# SPDX-License-Identifier: Apache-2.0
"""Kernel of quantize_and_insert_k_cache: one warp takes one row, or several at once. Lanes and columns: record.py.

All rows of a warp are loaded before any is used, whether or not their slot turns out to name a row of the cache:
reading a row early hides its latency behind that of its slot. The shuffles come before the test of the slot for the
same reason: the compiler may not move them, or what they need, behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.kv_cache import record
from cute_kernels.kv_cache.call import InsertCall
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

MANY_ROWS = 4096
"""Rows of a call from which on they go through L1: that is faster in long calls and slower in short ones
(perf/notes/kv_cache.md)."""


@dataclass(frozen=True)
class InsertKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    warps         per CTA
    rows          per warp, all in flight together
    through_l1    whether rows may go through L1

    On an H200, four warps of one row were the fastest in every measured call:
    perf/log/data/insert_gather_save_1.json.
    """

    kernel_name: ClassVar[str] = "kv_cache.insert"
    kv_format: str = FP8_DS_MLA.id
    warps: int = 4
    rows: int = 1
    through_l1: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", *convert.e4m3_instructions(self.arch), "st.global.64"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        stride = cute.sym_int64(divisibility=8)
        k = make_fake_tensor(BFloat16, (cute.sym_int(), HEAD_DIM), stride=(stride, 1), assumed_align=16)
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8)
        numbers = (Int64(0), Int64(0), Int32(0), Int32(1))
        return InsertKernel(self), (k, slots, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class InsertKernel:
    """Entry point: (k, slots, cache address, page stride in bytes, rows of the pool, rows of a page, stream)."""

    def __init__(self, key: InsertKey) -> None:
        self.arch = key.arch
        self.warps = key.warps
        self.rows = key.rows
        self.through_l1 = key.through_l1
        self.name = f"quantize_and_insert_k_cache_w{key.warps}r{key.rows}" + "_l1" * key.through_l1
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @cute.jit
    def __call__(
        self,
        k: cute.Tensor,
        slots: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        count = length(slots, 0)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(k), stride_bytes(k, 0), address(slots), count, pool, page_stride, capacity, block_size, page_rows
        )
        ctas = cute.ceil_div(count, self.warps * self.rows)
        kernel.launch(grid=[ctas, 1, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        k: Int64,
        row_bytes: Int64,
        slots: Int64,
        count: Int32,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        page_rows: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        k_lane = k + Int64(lane * 16)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        loaded = []
        for i in range_constexpr(self.rows):
            row = (cta * self.rows + i) * self.warps + warp
            # rows past the end load the last row again, and store nothing
            source = Int64(cutlass.min(row, count - 1))
            slot = ptx.load_global_s64(slots + source * 8)
            first = self.load_half(k_lane + source * row_bytes)
            second = self.load_half(k_lane + source * row_bytes + record.HALF_ROW)
            loaded.append((slot if row < count else Int64(-1), first, second))

        for i in range_constexpr(self.rows):
            slot, first, second = loaded[i]
            pieces = record.encode(lane, first, second, second, self.arch)
            if slot >= 0 and slot < Int64(capacity):
                page, row = divmod(Int32(slot), page_rows)
                record.store_encoded(lane, pool + Int64(page) * page_stride, row, block_size, pieces)

    def load_half(self, address: Any) -> Any:
        """A lane's columns of one half of a row, as words."""
        return (
            ptx.load_global_128_in_order(address, through_l1=True) if self.through_l1 else ptx.load_global_128(address)
        )


def key_for(arch: str, kv_format: str, rows: int) -> InsertKey:
    """The kernel that serves calls of so many rows."""
    return InsertKey(arch, kv_format, through_l1=rows >= MANY_ROWS)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[InsertKey]:
    """Every layer of every model inserts into an fp8_ds_mla cache, few rows or many."""
    return [key_for(arch, FP8_DS_MLA.id, rows) for rows in (1, MANY_ROWS)]


@cache
def _key(device_index: int, kv_format: str, is_long: bool) -> InsertKey:
    return key_for(arch_of(device_index), kv_format, MANY_ROWS if is_long else 1)


def why_not(call: InsertCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    if call.k.data_ptr() % 16 or (call.k.shape[0] > 1 and call.k.stride(0) % 8):
        return (
            f"rows of k must be 16-byte aligned, got address {call.k.data_ptr():#x} and row stride {call.k.stride(0)}"
        )
    if call.k_cache.data_ptr() % 8 or (call.k_cache.shape[0] > 1 and call.k_cache.stride(0) % 8):
        return (
            f"pages of k_cache must be 8-byte aligned, got address {call.k_cache.data_ptr():#x} and page stride "
            f"{call.k_cache.stride(0)}"
        )
    if max(call.k_cache.shape[0], 1) * call.block_size >= 2**31:
        return f"k_cache must have fewer than 2^31 rows, got {call.k_cache.shape[0]} pages of {call.block_size}"
    return ""


def launch(call: InsertCall) -> None:
    """Run the kernel on the current stream of k's device."""
    if call.slot_mapping.shape[0] == 0:
        return
    device_index = call.k.device.index
    launch_key(
        _key(device_index, call.kv_format, call.slot_mapping.shape[0] >= MANY_ROWS),
        device_index,
        call.k,
        call.slot_mapping,
        call.k_cache.data_ptr(),
        call.k_cache.stride(0),
        call.k_cache.shape[0] * call.block_size,
        call.block_size,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
