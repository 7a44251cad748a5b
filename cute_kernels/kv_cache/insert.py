"""Kernel of quantize_and_insert_k_cache: one warp takes one row, or several at once. Lanes and columns: record.py.

A quantization block of 64 columns is eight lanes wide, in both halves of a row, so one sequence of three shuffles finds
the maxima of two blocks. Lane 0 collects the eight scale bytes.

All rows of a warp are loaded before any is used, whether or not their slot turns out to name a row of the cache:
reading a row early hides its latency behind that of its slot. The shuffles come before the test of the slot for the
same reason: the compiler may not move them, or what they need, behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.kv_cache import record
from cute_kernels.numerics import CACHE_FLOOR, E4M3_MAX
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

MINIMUM_ARCH = 89
"""First architecture that converts to e4m3 in hardware."""


@dataclass(frozen=True)
class InsertKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    warps         per block
    rows          per warp, all in flight together

    On an H200, four warps of one row were the fastest in every measured call:
    perf/results/h200/quantize_and_insert_k_cache.json.
    """

    kv_format: str = FP8_DS_MLA.id
    warps: int = 4
    rows: int = 1

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "cvt.e4m3", "st.global.64"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        stride = cute.sym_int64(divisibility=8)
        k = make_fake_tensor(BFloat16, (cute.sym_int(), HEAD_DIM), stride=(stride, 1), assumed_align=16)
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8)
        numbers = (Int64(0), Int64(0), Int32(0), Int32(1))
        return InsertKernel(self), (k, slots, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class InsertKernel:
    """Entry point: (k, slots, cache address, page stride in bytes, rows of the pool, rows of a page, stream)."""

    def __init__(self, key: InsertKey) -> None:
        self.warps = key.warps
        self.rows = key.rows
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
        self.kernel.set_name_prefix(
            f"quantize_and_insert_k_cache_w{self.warps}r{self.rows}",
            remove_cutlass_symbol=True,
            keep_mangled_name=False,
        )
        count = length(slots, 0)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(k), stride_bytes(k, 0), address(slots), count, pool, page_stride, capacity, block_size, page_rows
        )
        blocks = cute.ceil_div(count, self.warps * self.rows)
        kernel.launch(grid=[blocks, 1, 1], block=[self.warps * 32, 1, 1], stream=stream)

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
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        k_lane = k + Int64(lane * 16)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        loaded = []
        for i in range_constexpr(self.rows):
            row = (block * self.rows + i) * self.warps + warp
            # rows past the end load the last row again, and store nothing
            source = Int64(cutlass.min(row, count - 1))
            slot = ptx.load_global_s64(slots + source * 8)
            first = ptx.load_global_128(k_lane + source * row_bytes)
            second = ptx.load_global_128(k_lane + source * row_bytes + record.HALF_ROW)
            loaded.append((slot if row < count else Int64(-1), first, second))

        for i in range_constexpr(self.rows):
            slot, first, second = loaded[i]
            byte_first, byte_second = self.scale_bytes(first, second)
            is_rope = lane >= record.ROPE_LANE
            scales = self.collect(byte_first | (Int32(0) if is_rope else byte_second) << 16)
            codes = self.codes(first, byte_first)
            codes_second = self.codes(second, byte_second)
            rope = record.rope_pieces(lane, second)
            if slot >= 0 and slot < Int64(capacity):
                page, row = divmod(Int32(slot), page_rows)
                start = pool + Int64(page) * page_stride
                data = start + Int64(row) * FP8_DS_MLA.data_bytes
                scale = start + Int64(block_size) * FP8_DS_MLA.data_bytes + Int64(row) * FP8_DS_MLA.scale_bytes
                self.store(lane, data, scale, codes, codes_second, rope, scales)

    @cute.jit
    def scale_bytes(self, first: Any, second: Any) -> Any:
        """ue8m0 bytes of the two blocks this lane has columns of."""
        a = convert.absmax_bf16x2(*first)
        b = convert.absmax_bf16x2(*second)
        # one word per lane: maximum of the first half's block below, of the second half's above
        both = ptx.max_bf16x2(ptx.permute_bytes(a, b, 0x5410), ptx.permute_bytes(a, b, 0x7632))
        for step in range_constexpr(3):
            both = ptx.max_bf16x2(both, cute.arch.shuffle_sync_bfly(both, 1 << step))
        return (
            convert.ue8m0_from_absmax(convert.bf16_low(both), E4M3_MAX, CACHE_FLOOR),
            convert.ue8m0_from_absmax(convert.bf16_high(both), E4M3_MAX, CACHE_FLOOR),
        )

    @cute.jit
    def collect(self, pair: Any) -> Any:
        """The eight scale bytes as two words, right in lane 0. Bytes 0 and 2 of `pair` belong to the lane's blocks."""
        pair = ptx.permute_bytes(pair, cute.arch.shuffle_sync_bfly(pair, 8), 0x6240)  # blocks 0 1 4 5
        other = cute.arch.shuffle_sync_bfly(pair, 16)  # blocks 2 3 6 7
        return ptx.permute_bytes(pair, other, 0x5410), ptx.permute_bytes(pair, other, 0x7632)

    def codes(self, words: Any, byte: Any) -> Any:
        """A lane's eight codes, as two words."""
        factor = convert.ue8m0_inverse(byte)
        return (
            convert.e4m3_from_bf16x4(words[0], words[1], factor),
            convert.e4m3_from_bf16x4(words[2], words[3], factor),
        )

    @cute.jit
    def store(self, lane: Any, data: Any, scale: Any, codes: Any, codes_second: Any, rope: Any, scales: Any) -> None:
        is_rope = lane >= record.ROPE_LANE
        ptx.store_global_64(data + Int64(lane * 8), *codes)
        ptx.store_global_64(
            data + Int64(record.second_offset(lane)),
            rope[0] if is_rope else codes_second[0],
            rope[1] if is_rope else codes_second[1],
        )
        if is_rope or lane == 0:
            ptx.store_global_64(
                data + Int64(record.third_offset(lane)) if is_rope else scale,
                rope[2] if is_rope else scales[0],
                rope[3] if is_rope else scales[1],
            )


def key_for(arch: str, kv_format: str) -> InsertKey:
    """The kernel that serves calls of this kind."""
    return InsertKey(arch=arch, kv_format=kv_format)


def deployment_keys(config: Any, tp: int, arch: str) -> list[InsertKey]:
    """Every layer of every model inserts into an fp8_ds_mla cache."""
    return [key_for(arch, FP8_DS_MLA.id)] if arch_number(arch) >= MINIMUM_ARCH else []


@cache
def _key(device_index: int, kv_format: str) -> InsertKey:
    return key_for(arch_of(device_index), kv_format)


def supports(k: Any, k_cache: Any, slot_mapping: Any, block_size: int, kv_format: str) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    arch = arch_of(k.device.index)
    if arch_number(arch) < MINIMUM_ARCH:
        return False, f"{arch} has no e4m3 conversion, sm_{MINIMUM_ARCH} and up have"
    if k.data_ptr() % 16 or (k.shape[0] > 1 and k.stride(0) % 8):
        return False, f"rows of k must be 16-byte aligned, got address {k.data_ptr():#x} and row stride {k.stride(0)}"
    if k_cache.data_ptr() % 8 or (k_cache.shape[0] > 1 and k_cache.stride(0) % 8):
        return False, (
            f"pages of k_cache must be 8-byte aligned, got address {k_cache.data_ptr():#x} and page stride "
            f"{k_cache.stride(0)}"
        )
    if max(k_cache.shape[0], 1) * block_size >= 2**31:
        return False, f"k_cache must have fewer than 2^31 rows, got {k_cache.shape[0]} pages of {block_size}"
    return True, ""


def launch(k: Any, k_cache: Any, slot_mapping: Any, block_size: int, kv_format: str) -> None:
    """Run the kernel on the current stream of k's device. Arguments in the schema's order, checked and supported."""
    if slot_mapping.shape[0] == 0:
        return
    device_index = k.device.index
    launch_key(
        _key(device_index, kv_format),
        device_index,
        k,
        slot_mapping,
        k_cache.data_ptr(),
        k_cache.stride(0),
        k_cache.shape[0] * block_size,
        block_size,
    )
