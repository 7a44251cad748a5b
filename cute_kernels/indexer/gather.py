# SPDX-License-Identifier: Apache-2.0
"""Kernel of cp_gather_indexer_k_quant_cache: one warp copies the records of some neighbouring rows of the destination.

Lane l finds out where the record of the warp's row l lies: which request the row belongs to, its page, its place in it.
Then the lane copies that row's scale, and all lanes together copy the codes, `access` bytes a lane:

    codes of a row            128 bytes (FP8)      64 bytes (MXFP4)
    lanes, 16 bytes each      8, so 4 rows         4, so 8 rows at a time
    lanes, 4 bytes each       32, so 1 row         16, so 2 rows at a time

All records of a warp are on their way before the first one is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import paging, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FORMATS, INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE
from cute_kernels.indexer.call import GatherCall
from cute_kernels.models import ModelConfig, has_indexer
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

SCALE_BYTES = 4
"""Of a record, in every format."""


@dataclass(frozen=True)
class GatherKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format   record format id
    rows        per warp, at most 32 and a multiple of what its lanes copy at a time
    access      bytes per lane and instruction: 16, or 4 where pages or rows are not aligned for that
    through_l1  whether codes may go through L1
    warps       per CTA
    """

    kernel_name: ClassVar[str] = "indexer.gather"
    tuning: ClassVar[tuple[str, ...]] = ("rows", "through_l1")
    kv_format: str = INDEXER_FP8.id
    rows: int = 32
    access: int = 16
    through_l1: bool = False
    warps: int = 4

    @property
    def code_bytes(self) -> int:
        """Of a record."""
        return int(FORMATS[self.kv_format].fields(1)[0][1])

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("ld.global.128", "st.global.128") if self.access == 16 else ()

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64()))
        bounds = make_fake_tensor(Int32, (cute.sym_int(),), stride=(cute.sym_int64(),))
        pool, codes, scales = (Int64(0), Int64(0), Int32(1), Int32(1)), (Int64(0), Int64(0)), (Int64(0), Int64(0))
        numbers = (*pool, *codes, *scales, Int32(0))
        return GatherKernel(self), (table, bounds, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class GatherKernel:
    """Entry point: (block table, first rows of the requests; cache address, page stride in bytes, pages of the pool,
    rows of a page; address and row stride of the codes, address and row stride of the scales, and their rows; stream).
    """

    def __init__(self, key: GatherKey) -> None:
        self.code_bytes = key.code_bytes
        self.access = key.access
        self.lanes = key.code_bytes // key.access
        self.rows = key.rows
        self.steps = key.rows * self.lanes // 32
        self.warps = key.warps
        self.through_l1 = key.through_l1
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = (
            f"cp_gather_indexer_k_quant_cache_{key.code_bytes}_a{key.access}r{key.rows}w{key.warps}"
            + "_l1" * key.through_l1
        )

    @cute.jit
    def __call__(
        self,
        table: cute.Tensor,
        bounds: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        block_size: Int32,
        codes: Int64,
        codes_stride: Int64,
        scales: Int64,
        scales_stride: Int64,
        count: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(table),
            stride_bytes(table, 0),
            length(table, 0),
            Int64(length(table, 1)) * Int64(block_size),
            address(bounds),
            pool,
            page_stride,
            pages,
            page_rows,
            Int64(block_size) * self.code_bytes,
            codes,
            codes_stride,
            scales,
            scales_stride,
            count,
        )
        ctas = cute.ceil_div(count, self.rows * self.warps)
        kernel.launch(grid=[ctas, 1, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        table: Int64,
        table_stride: Int64,
        requests: Int32,
        entries: Int64,
        bounds: Int64,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        page_rows: cute.FastDivmodDivisorV2,
        scales_offset: Int64,
        codes: Int64,
        codes_stride: Int64,
        scales: Int64,
        scales_stride: Int64,
        count: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread % 32
        first = (cta * self.warps + cute.arch.make_warp_uniform(thread // 32)) * self.rows
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        # where the record of row first + lane lies
        row = first + lane
        request, start = self.request_of_lanes(row, bounds, requests)
        is_wanted = (request >= 0) & (lane < self.rows) & (row < count)
        entry = Int64(row) - Int64(start)
        is_wanted = is_wanted & (entry >= 0) & (entry < entries)
        column, place = divmod(Int32(entry if is_wanted else Int64(0)), page_rows)
        page = ptx.load_global_s32_again_where(is_wanted, table + Int64(request) * table_stride + Int64(column) * 4)
        is_wanted = (page >= 0) & (page < pages)
        # a row without a record reads the first one of the pool and stores nothing
        origin = Int64(page if is_wanted else Int32(0)) * page_stride
        place = place if is_wanted else Int32(0)
        source = origin + Int64(place) * self.code_bytes

        piece = Int64(lane % self.lanes * self.access)
        loaded = []
        for i in range_constexpr(self.steps):
            number = i * (32 // self.lanes) + lane // self.lanes
            start = cute.arch.shuffle_sync(source, number)
            is_here = cute.arch.shuffle_sync(Int32(is_wanted), number) != 0
            loaded.append((number, is_here, self.load(pool + start + piece)))
        scale = ptx.load_global_s32_in_order(pool + origin + scales_offset + Int64(place) * SCALE_BYTES)
        for i in range_constexpr(self.steps):
            number, is_here, words = loaded[i]
            self.store(codes + Int64(first + number) * codes_stride + piece, words, is_here)
        ptx.store_global_s32(scales + Int64(row) * scales_stride, scale, is_wanted)

    @cute.jit
    def request_of_lanes(self, row: Any, bounds: Any, requests: Any) -> tuple[Any, Any]:
        """The request each lane's row belongs to, -1 if it is none's, and that request's first row: lane l has the row
        l after that of lane 0."""
        lane = cute.arch.lane_idx()
        base, _ = paging.narrow(cute.arch.shuffle_sync(row, 0), None, bounds + 4, requests)
        request, start, goes_on = Int32(-1), Int32(0), base < requests
        while goes_on:
            # a lane holds the bounds of request base + lane, and finds its row among those of all by halving
            is_request = base + lane < requests
            begin = ptx.load_global_s32_again_where(is_request, bounds + Int64(base + lane) * 4)
            end = ptx.load_global_s32_again_where(is_request, bounds + Int64(base + lane + 1) * 4)
            end = end if is_request else Int32(0x7FFFFFFF)
            ended = Int32(0)
            for i in range_constexpr(len(paging.SEARCH_STEPS)):
                step = paging.SEARCH_STEPS[i]
                ended += Int32(step) if cute.arch.shuffle_sync(end, ended + (step - 1)) <= row else Int32(0)
            begin = cute.arch.shuffle_sync(begin, ended)
            if ended < 32 and base + ended < requests and request < 0:
                request, start = base + ended, begin
            base += 32
            goes_on = cute.arch.vote_any_sync(ended == 32)
        return request, start

    def load(self, source: Any) -> Any:
        if self.access == 16:
            return ptx.load_global_128_in_order(source, self.through_l1)
        return ptx.load_global_s32_in_order(source)

    def store(self, target: Any, words: Any, predicate: Any) -> None:
        if self.access == 16:
            ptx.store_global_128(target, words, predicate)
        else:
            ptx.store_global_s32(target, words, predicate)


MANY_ROWS = 65536
"""Rows of a destination from which on a warp takes 32 FP8 keys; of fewer it takes 8, and of MXFP4 keys always 16. The
bound lies between calls of 16384 rows and of 65536: perf/log/indexer_query.md."""

LONG_ROWS = 131072
"""Rows from which on codes go through L1, as in other kernels that move about as many bytes: same log."""

SIZES = (0, MANY_ROWS, LONG_ROWS)
"""Numbers of rows that have kernels of their own, and all from there to the next."""


def size_of(rows: int) -> int:
    """The one of SIZES that a destination of so many rows belongs to."""
    return max(size for size in SIZES if size <= rows)


def key_for(arch: str, kv_format: str, size: int, aligned: bool) -> GatherKey:
    """The kernel that serves destinations of this size; aligned: whether pages and rows are multiples of 16 bytes."""
    rows = 16 if kv_format != INDEXER_FP8.id else 32 if size >= MANY_ROWS else 8
    return GatherKey(arch, kv_format, rows, 16 if aligned else 4, through_l1=aligned and size >= LONG_ROWS)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[GatherKey]:
    """Layers with indexer keys in any format, few keys or many."""
    if not has_indexer(config):
        return []
    formats = (INDEXER_FP8, INDEXER_MXFP4, INDEXER_MXFP4_WIDE)
    return list(dict.fromkeys(key_for(arch, fmt.id, size, True) for fmt in formats for size in SIZES))


@cache
def _key(device_index: int, kv_format: str, size: int, aligned: bool) -> GatherKey:
    return key_for(arch_of(device_index), kv_format, size, aligned)


def is_aligned(kv_cache: Any, dst_k: Any, alignment: int) -> bool:
    """Whether pages of the cache and rows of the codes are multiples of `alignment` bytes."""
    return all(
        tensor.data_ptr() % alignment == 0 and (tensor.shape[0] <= 1 or tensor.stride(0) % alignment == 0)
        for tensor in (kv_cache, dst_k)
    )


def why_not(call: GatherCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for name, tensor, what in (
        ("kv_cache", call.kv_cache, "pages"),
        ("dst_k", call.dst_k, "rows"),
        ("dst_scale", call.dst_scale, "rows"),
    ):
        if tensor.data_ptr() % 4 or (tensor.shape[0] > 1 and tensor.stride(0) % 4):
            return (
                f"{what} of {name} must be 4-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    entries = call.block_table.shape[1] * call.kv_cache.shape[1]
    if max(entries, call.kv_cache.shape[1], call.dst_k.shape[0]) > 2**31 - 256:
        given = f"{call.dst_k.shape[0]}, {entries} in a row of block_table and {call.kv_cache.shape[1]} in a page"
        return f"there must be at most 2^31 - 256 keys, got {given}"
    return ""


def launch(call: GatherCall) -> None:
    """Run the kernel on the current stream of dst_k's device."""
    rows, pages = call.dst_k.shape[0], call.kv_cache.shape[0]
    if rows == 0 or pages == 0 or call.block_table.numel() == 0:
        return
    device_index = call.dst_k.device.index
    launch_key(
        _key(device_index, call.kv_format, size_of(rows), is_aligned(call.kv_cache, call.dst_k, 16)),
        device_index,
        *arguments(call),
    )


def arguments(call: GatherCall) -> tuple[Any, ...]:
    """What the kernel's entry point takes. Everything but the table and the bounds is bytes."""
    return (
        call.block_table,
        call.cu_seq_lens,
        call.kv_cache.data_ptr(),
        call.kv_cache.stride(0),
        call.kv_cache.shape[0],
        call.kv_cache.shape[1],
        call.dst_k.data_ptr(),
        call.dst_k.stride(0),
        call.dst_scale.data_ptr(),
        call.dst_scale.stride(0),
        call.dst_k.shape[0],
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
