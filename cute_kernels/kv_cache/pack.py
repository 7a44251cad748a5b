# SPDX-License-Identifier: Apache-2.0
"""Kernels of pack_records and unpack_records: bytes of records between pages and rows.

A record is its data and then its scales, which pages keep apart. A CTA takes a tile of neighbouring rows through shared
memory, where they lie as in rows, and each side of global memory is accessed by vectors of 16 bytes:

    pages  data    vectors of `data`, a record's behind each other    <-->  units of shared memory, up to 16 bytes each
           scales  units, by the thread that has the record's slot    <-->  the same
    rows           vectors of the tile, whatever records they cut     <-->  vectors of shared memory

A thread finds one record's place in its page and leaves it in shared memory for all that move its data. All of a
thread's vectors are under way at once: where rows are the source together with the slots, else behind them. A slot
outside the cache forms no address: such a record is packed as zeros, and not unpacked.

Rows that are further apart than a record is long, or not 16-byte aligned, are moved by smaller vectors, none of which
crosses a record's end. Records that are whole vectors, without scales, go from registers to the other side.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8, RECORD_FORMATS, compressor_state
from cute_kernels.kv_cache.call import PackCall, UnpackCall
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

# ---- config

VECTORS = (16, 8, 4)
"""Bytes that a thread moves at once."""

THREADS = 128
"""Of a CTA, and so the most records of a tile."""

EACH = 5
"""Vectors of data, at most, that a thread has under way."""

MOST_RECORDS = 2**31 - 2**16
"""Of a call."""


# ---- kernel


class Vector(NamedTuple):
    """What a thread moves at once.

    offset      in the tile
    address     in global memory
    is_there    whether there is anything at the address
    is_inside   whether the tile has a place for it; None: it has
    size        bytes
    """

    offset: Any
    address: Any
    is_there: Any
    is_inside: Any
    size: int


class PackKernel:
    """Entry point: (slots; address of the rows, their stride in bytes; address of the cache, page stride in bytes, rows
    of the pool, of a page; records; whether to launch as a dependent of the kernel before; stream)."""

    def __init__(self, key: PackKey) -> None:
        self.data, self.scales, self.record, self.tile = key.data, key.scales, key.record, key.tile
        self.vector, self.unit, self.is_direct, self.is_unpack = key.vector, key.unit, key.is_direct, key.is_unpack
        self.smem_bytes = key.smem_bytes
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"{'un' * key.is_unpack}pack_records_{key.data}_{key.scales}_{key.vector}"

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
        records: Int32,
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
            records,
        )
        kernel.launch(
            grid=[cute.ceil_div(records, self.tile), 1, 1],
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
        records: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        memory = SmemAllocator().allocate_tensor(Int32, cute.make_layout(self.smem_bytes // 4), byte_alignment=16)
        tile = memory.iterator.toint()
        places = tile + (0 if const_expr(self.is_direct) else self.tile * self.record)
        first = cta * self.tile
        count = cutlass.min(records - first, self.tile)
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        slot = ptx.load_global_s64_where(thread < count, slots + Int64(first + thread) * 8)
        in_rows = self.row_vectors(rows + Int64(first) * row_stride, row_stride, thread, count)
        if const_expr(self.is_unpack):
            words = [self.load(vector) for vector in in_rows]
            # keeps the loads together: the assembler would begin to store before it asks for all vectors
            cute.arch.sync_warp()
        is_named = (slot >= 0) & (slot < Int64(capacity))
        page, row = divmod(Int32(slot) if is_named else Int32(0), page_rows)
        page_at = cache + Int64(page) * page_stride
        data_at = page_at + Int64(row) * self.data
        if thread < self.tile:
            # no data are at address 0
            ptx.store_shared_64(places + thread * 8, *ptx.halves(data_at if is_named else Int64(0)))
        scales_at = page_at + Int64(block_size) * self.data + Int64(row) * self.scales
        in_pages = []
        for i in range_constexpr(0, self.scales, self.unit):
            offset = thread * self.record + (self.data + i)
            in_pages.append(Vector(offset, scales_at + i, is_named, thread < self.tile, self.unit))
        if const_expr(self.is_unpack):
            if const_expr(not self.is_direct):
                self.store_tile(tile, in_rows, words, self.vector)
            cute.arch.sync_threads()
            in_pages += self.data_vectors(places, thread)
            if const_expr(not self.is_direct):
                words = self.load_tile(tile, in_pages, self.unit)
            self.store(in_pages, words)
        else:
            words = [self.load(vector) for vector in in_pages]
            cute.arch.sync_threads()
            in_data = self.data_vectors(places, thread)
            words += [self.load(vector) for vector in in_data]
            in_pages += in_data
            cute.arch.sync_warp()
            words = [
                [word if vector.is_there else Int32(0) for word in found]
                for vector, found in zip(in_pages, words, strict=True)
            ]
            if const_expr(not self.is_direct):
                self.store_tile(tile, in_pages, words, self.unit)
                cute.arch.sync_threads()
                words = self.load_tile(tile, in_rows, self.vector)
            self.store(in_rows, words)

    # -- vectors of a thread

    def data_vectors(self, places: Any, thread: Any) -> list[Vector]:
        """Of the data of the tile's records in pages."""
        each = self.data // self.vector
        found = []
        for number, is_inside in self.numbers(thread, self.tile * each):
            record, place = number // each, number % each
            at = ptx.pair(*ptx.load_shared_64(places + Int32(record) * 8))
            offset = Int32(record * self.record + place * self.vector)
            is_there = at != 0 if is_inside is None else (at != 0) & is_inside
            found.append(Vector(offset, at + Int64(place * self.vector), is_there, is_inside, self.vector))
        return found

    def row_vectors(self, rows: Any, row_stride: Any, thread: Any, count: Any) -> list[Vector]:
        """Of the tile's `count` rows, the first of which is at the address `rows`."""
        found = []
        # vectors then cut records, which lie one behind the other
        is_flat = self.record % self.vector != 0
        whole = count * self.record // self.vector
        for number, is_inside in self.numbers(thread, self.tile * self.record // self.vector):
            offset = Int32(number * self.vector)
            if is_flat:
                at, is_there = rows + Int64(offset), Int32(number) < whole
            else:
                each = self.record // self.vector
                record, place = number // each, number % each
                at = rows + Int64(record) * row_stride + Int64(place * self.vector)
                is_there = Int32(record) < count
            is_there = is_there if is_inside is None else is_there & is_inside
            # where the last tile has no vector its rest may have places
            found.append(Vector(offset, at, is_there, is_there, self.vector))
        if is_flat:
            offset = whole * self.vector + thread * self.unit
            is_rest = offset < count * self.record
            found.append(Vector(offset, rows + Int64(offset), is_rest, is_rest, self.unit))
        return found

    def numbers(self, thread: Any, count: int) -> list[tuple[Any, Any]]:
        """(number, whether it is one of `count`; None: it is) of each vector of a thread; those that are not are 0."""
        found = []
        for first in range(0, count, THREADS):
            number, is_inside = Uint32(thread + first), None
            if first + THREADS > count:
                is_inside = number < Uint32(count)
                number = cutlass.select_(is_inside, number, Uint32(0))
            found.append((number, is_inside))
        return found

    # -- accesses

    def load(self, vector: Vector) -> list[Any]:
        """The words of a vector; any, where it is not there."""
        if vector.size == 16:
            return list(ptx.load_global_128_where(vector.is_there, vector.address, through_l1=True))
        if vector.size == 8:
            return list(ptx.halves(ptx.load_global_s64_where(vector.is_there, vector.address)))
        return [ptx.load_global_s32_where(vector.is_there, vector.address)]

    def store(self, vectors: Any, words: Any) -> None:
        """Write vectors where they are there."""
        for vector, own in zip(vectors, words, strict=True):
            if vector.size == 16:
                ptx.store_global_128(vector.address, own, vector.is_there)
            elif vector.size == 8:
                ptx.store_global_64(vector.address, own[0], own[1], vector.is_there)
            else:
                ptx.store_global_s32(vector.address, own[0], vector.is_there)

    def store_tile(self, tile: Any, vectors: Any, words: Any, unit: int) -> None:
        """Put vectors in their places in the tile, by at most `unit` bytes."""
        for vector, own in zip(vectors, words, strict=True):
            if vector.is_inside is None:
                self.store_shared(tile + vector.offset, own, unit)
            else:
                self.store_shared_where(vector.is_inside, tile + vector.offset, own, unit)

    @cute.jit
    def store_shared_where(self, condition: Any, at: Any, words: Any, unit: cutlass.Constexpr) -> None:
        if condition:
            self.store_shared(at, words, unit)

    def store_shared(self, at: Any, words: Any, unit: int) -> None:
        for i in range(0, len(words), unit // 4):
            part = words[i : i + unit // 4]
            if len(part) == 4:
                ptx.store_shared_128(at + i * 4, part)
            elif len(part) == 2:
                ptx.store_shared_64(at + i * 4, *part)
            else:
                ptx.store_shared_s32(at + i * 4, part[0])

    def load_tile(self, tile: Any, vectors: Any, unit: int) -> list[list[Any]]:
        """The words of vectors in the tile, by at most `unit` bytes; any, where it has no place for them."""
        found = []
        for vector in vectors:
            own: list[Any] = []
            size, offset = min(unit, vector.size), vector.offset
            if vector.is_inside is not None:
                offset = cutlass.select_(vector.is_inside, offset, Int32(0))
            for i in range(0, vector.size, size):
                at = tile + offset + i
                if size == 16:
                    own += ptx.load_shared_128(at)
                elif size == 8:
                    own += ptx.load_shared_64(at)
                else:
                    own.append(ptx.load_shared_s32(at))
            found.append(own)
        return found


# ---- key


@dataclass(frozen=True)
class PackKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    data, scales   bytes of a record
    vector         bytes of an access of a page's data, or of rows
    is_unpack      whether records go from rows to pages
    """

    kernel_name: ClassVar[str] = "kv_cache.pack"
    data: int = 576
    scales: int = 8
    vector: int = 16
    is_unpack: bool = False

    @property
    def record(self) -> int:
        """Bytes."""
        return self.data + self.scales

    @property
    def unit(self) -> int:
        """Bytes of an access of shared memory, or of scales."""
        return math.gcd(self.vector, self.data, self.scales)

    @property
    def tile(self) -> int:
        """Records of a CTA, a power of two."""
        most = min(EACH * THREADS * self.vector // self.data, THREADS)
        return 1 << max(most.bit_length() - 1, 0)

    @property
    def is_direct(self) -> bool:
        """Whether a vector of rows is one of a page."""
        return self.scales == 0 and self.unit == self.vector

    @property
    def smem_bytes(self) -> int:
        return 8 * self.tile + (0 if self.is_direct else self.tile * self.record)

    @property
    def instructions(self) -> tuple[str, ...]:
        wide = ("ld.global.128", "st.global.128") if self.vector == 16 else ()
        return (*wide, "griddepcontrol") if arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH else wide

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8)
        numbers = (Int64(0), Int64(4), Int64(0), Int64(4), Int32(0), Int32(1), Int32(1))
        return PackKernel(self), (slots, *numbers, Boolean(False), make_fake_stream(use_tvm_ffi_env_stream=True))


def deployment_keys(is_unpack: bool, arch: str) -> list[PackKey]:
    """Attention's records, the indexer's and those of compressor states, as this project allocates them."""
    formats = FP8_DS_MLA, INDEXER_FP8, compressor_state(512, 128)
    return [PackKey(arch, *sizes(kv_format.id), is_unpack=is_unpack) for kv_format in formats]


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


def vector_of(records: Any, cache: Any, kv_format: str) -> int:
    """Largest number of bytes that a thread can move at once; less than 4 if there is no kernel for it."""
    (data, scales), row_stride = sizes(kv_format), records.stride(0) if records.shape[0] > 1 else 0
    page_stride = cache.stride(0) * cache.element_size() if cache.shape[0] > 1 else 0
    both = math.gcd(VECTORS[0], data, records.data_ptr(), cache.data_ptr(), page_stride)
    # rows one behind the other are vectors whatever records they cut
    is_dense = records.shape[0] <= 1 or row_stride == data + scales
    return both if is_dense and both == VECTORS[0] else math.gcd(both, scales, row_stride)


def why_not(records: Any, cache: Any, kv_format: str) -> str:
    """Why no kernel can move these (checked) records; empty if one can."""
    if vector_of(records, cache, kv_format) < VECTORS[-1]:
        return (
            f"records and pages must be {VECTORS[-1]}-byte aligned, got addresses {records.data_ptr():#x} and "
            f"{cache.data_ptr():#x}, strides {records.stride(0)} and {cache.stride(0)}"
        )
    if records.shape[0] > MOST_RECORDS:
        return f"there must be at most {MOST_RECORDS} records, got {records.shape[0]}"
    if cache.shape[0] * cache.shape[1] >= 2**31:
        return f"cache must have fewer than 2^31 rows, got {cache.shape[0]} pages of {cache.shape[1]}"
    return ""


def run(records: Any, slots: Any, cache: Any, kv_format: str, is_unpack: bool, use_pdl: bool) -> None:
    """Launch on the current stream of the cache's device."""
    if records.shape[0] == 0 or (is_unpack and cache.shape[0] * cache.shape[1] == 0):
        return
    device_index, (pages, block_size) = cache.device.index, cache.shape[:2]
    launch_key(
        PackKey(arch_of(device_index), *sizes(kv_format), vector_of(records, cache, kv_format), is_unpack),
        device_index,
        slots,
        records.data_ptr(),
        records.stride(0),
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        pages * block_size,
        # the rows of no page are a divisor too
        max(block_size, 1),
        records.shape[0],
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
