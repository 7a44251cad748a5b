# SPDX-License-Identifier: Apache-2.0
"""Kernels of pack_records and unpack_records: bytes of records between pages and rows.

A record is its data and then its scales, which pages keep apart. Records in rows are a stream of units of 16, 8 or 4
bytes, the largest that data, scales and all strides are multiples of. Threads take neighbouring units of that stream,
EACH of them a CTA's width apart: in rows accesses are whole lines, in pages they are as long as a record's data.

All slots of a thread are under way at once, then all of its units. Neighbours ask for the same slot, which comes from
L1. A slot outside the cache forms no address: such a record is packed as zeros, and not unpacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8, RECORD_FORMATS, compressor_state
from cute_kernels.kv_cache.call import PackCall, UnpackCall
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

UNITS = (16, 8, 4)
"""Bytes that a thread moves at once."""

THREADS = 256
"""Of a CTA."""

EACH = {16: 4, 8: 4, 4: 8}
"""Unit -> how many of them a thread has under way."""

MOST_UNITS = 2**31 - 2**16
"""Of a call."""


@dataclass(frozen=True)
class PackKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    unit        bytes that a thread moves at once
    is_unpack   whether records go from rows to pages
    """

    kernel_name: ClassVar[str] = "kv_cache.pack"
    unit: int = 8
    is_unpack: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        wide = ("ld.global.128", "st.global.128") if self.unit == 16 else ()
        return (*wide, "griddepcontrol") if arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH else wide

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8)
        numbers = (Int64(0), Int64(4), Int64(0), Int64(4), Int32(0), *(Int32(1) for _ in range(4)))
        return PackKernel(self), (slots, *numbers, Boolean(False), make_fake_stream(use_tvm_ffi_env_stream=True))


class PackKernel:
    """Entry point: (slots; address of the rows, their stride in bytes; address of the cache, page stride in bytes, rows
    of the pool; rows of a page; units of a record, of its data; units of the call; whether to launch as a dependent of
    the kernel before; stream)."""

    def __init__(self, key: PackKey) -> None:
        self.unit, self.each, self.is_unpack = key.unit, EACH[key.unit], key.is_unpack
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"{'un' * key.is_unpack}pack_records_{key.unit}"

    @cute.jit
    def __call__(
        self,
        slots: cute.Tensor,
        rows: Int64,
        row_stride: Int64,
        cache: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        record_units: Int32,
        data_units: Int32,
        units: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            address(slots),
            rows,
            row_stride,
            cache,
            page_stride,
            capacity,
            block_size,
            cute.fast_divmod_create_divisor_v2(block_size),
            cute.fast_divmod_create_divisor_v2(record_units),
            record_units - data_units,
            data_units,
            units,
        )
        kernel.launch(
            grid=[cute.ceil_div(units, THREADS * self.each), 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        slots: Int64,
        rows: Int64,
        row_stride: Int64,
        cache: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        page_rows: cute.FastDivmodDivisorV2,
        record: cute.FastDivmodDivisorV2,
        scale_units: Int32,
        data_units: Int32,
        units: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        first = cta * (THREADS * self.each) + thread
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        found = []
        for i in range_constexpr(self.each):
            # units past the end are those of the last one, which moves once
            unit = cutlass.min(first + i * THREADS, units - 1)
            number, place = divmod(unit, record)
            slot = ptx.load_global_s64_in_order(slots + Int64(number) * 8, is_shared=True)
            found.append((number, place, slot))
        places, loaded = [], []
        for i in range_constexpr(self.each):
            number, place, slot = found[i]
            is_there = (slot >= 0) & (slot < Int64(capacity))
            page, row = divmod(Int32(slot) if is_there else Int32(0), page_rows)
            in_page = row * data_units + place
            if place >= data_units:
                in_page = block_size * data_units + row * scale_units + (place - data_units)
            paged = cache + Int64(page) * page_stride + Int64(in_page) * self.unit
            packed = rows + Int64(number) * row_stride + Int64(place) * self.unit
            places.append((paged, packed, is_there))
            loaded.append(self.load(packed, Boolean(True)) if self.is_unpack else self.load(paged, is_there))
        for i in range_constexpr(self.each):
            paged, packed, is_there = places[i]
            is_inside = first + i * THREADS < units
            if const_expr(self.is_unpack):
                self.store(paged, loaded[i], is_inside & is_there)
            else:
                words = [word if is_there else Int32(0) for word in loaded[i]]
                self.store(packed, words, is_inside)

    def load(self, source: Any, condition: Any) -> tuple[Any, ...]:
        """The words of a unit; any, where the condition fails."""
        if self.unit == 16:
            return ptx.load_global_128_where(condition, source)
        if self.unit == 8:
            return ptx.halves(ptx.load_global_s64_where(condition, source))
        return (ptx.load_global_s32_where(condition, source),)

    def store(self, target: Any, words: Any, condition: Any) -> None:
        """Write a unit where the condition holds."""
        if self.unit == 16:
            ptx.store_global_128(target, words, condition)
        elif self.unit == 8:
            ptx.store_global_64(target, words[0], words[1], condition)
        else:
            ptx.store_global_s32(target, words[0], condition)


def deployment_keys(is_unpack: bool, arch: str) -> list[PackKey]:
    """Attention's records, the indexer's and those of compressor states, as this project allocates them."""
    formats = FP8_DS_MLA, INDEXER_FP8, compressor_state(512, 128)
    return [PackKey(arch, math.gcd(UNITS[0], *sizes(kv_format.id)), is_unpack) for kv_format in formats]


def pack_keys(config: ModelConfig, tp: int, arch: str) -> list[PackKey]:
    """Those of pack_records."""
    return deployment_keys(False, arch)


def unpack_keys(config: ModelConfig, tp: int, arch: str) -> list[PackKey]:
    """Those of unpack_records."""
    return deployment_keys(True, arch)


# ---- launch


@lru_cache
def sizes(kv_format: str) -> tuple[int, int]:
    """Bytes of a record's data and of its scales."""
    (_, data), *rest = RECORD_FORMATS[kv_format].fields(1)
    return data, sum(size for _, size in rest)


def unit_of(records: Any, cache: Any, kv_format: str) -> int:
    """Largest number of bytes that a thread can move at once; less than 4 if there is no kernel for it."""
    strides = [t.stride(0) * t.element_size() if t.shape[0] > 1 else 0 for t in (records, cache)]
    data, scales = sizes(kv_format)
    return math.gcd(UNITS[0], data, scales, records.data_ptr(), cache.data_ptr(), *strides)


def why_not(records: Any, cache: Any, kv_format: str) -> str:
    """Why no kernel can move these (checked) records; empty if one can."""
    unit = unit_of(records, cache, kv_format)
    if unit < UNITS[-1]:
        return (
            f"records and pages must be {UNITS[-1]}-byte aligned, got addresses {records.data_ptr():#x} and "
            f"{cache.data_ptr():#x}, strides {records.stride(0)} and {cache.stride(0)}"
        )
    if records.shape[0] * sum(sizes(kv_format)) // unit > MOST_UNITS:
        return f"there must be at most {MOST_UNITS * unit} bytes of records, got {records.shape[0]} records"
    if cache.shape[1] * sum(sizes(kv_format)) // unit > MOST_UNITS:
        return f"a page must have at most {MOST_UNITS * unit} bytes, got {cache.shape[1]} records"
    if cache.shape[0] * cache.shape[1] >= 2**31:
        return f"cache must have fewer than 2^31 rows, got {cache.shape[0]} pages of {cache.shape[1]}"
    return ""


def run(records: Any, slots: Any, cache: Any, kv_format: str, is_unpack: bool, use_pdl: bool) -> None:
    """Launch on the current stream of the cache's device."""
    if records.shape[0] == 0 or (is_unpack and cache.shape[0] * cache.shape[1] == 0):
        return
    unit, (data, scales), device_index = unit_of(records, cache, kv_format), sizes(kv_format), cache.device.index
    units = (data + scales) // unit
    pages, block_size = cache.shape[:2]
    launch_key(
        PackKey(arch_of(device_index), unit, is_unpack),
        device_index,
        slots,
        records.data_ptr(),
        records.stride(0),
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        pages * block_size,
        # the rows of no page are a divisor too
        max(block_size, 1),
        units,
        data // unit,
        records.shape[0] * units,
        use_pdl,
    )


def why_not_pack(call: PackCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return why_not(call.out, call.cache, call.kv_format)


def why_not_unpack(call: UnpackCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return why_not(call.records, call.cache, call.kv_format)


def launch_pack(call: PackCall) -> None:
    """Run the kernel on the current stream of the cache's device."""
    run(call.out, call.slots, call.cache, call.kv_format, False, call.use_pdl)


def launch_unpack(call: UnpackCall) -> None:
    """Run the kernel on the current stream of the cache's device."""
    run(call.records, call.slots, call.cache, call.kv_format, True, call.use_pdl)


PACK = OpKernel(launch_pack, why_not_pack, pack_keys)
UNPACK = OpKernel(launch_unpack, why_not_unpack, unpack_keys)
