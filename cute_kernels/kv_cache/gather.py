# SPDX-License-Identifier: Apache-2.0
"""Kernels of dequantize_and_gather_k_cache: rows of requests, by warps. Lanes and columns: record.py.

GatherKernel: one warp takes some neighbouring rows of a request at a time. CTAs are numbered (i, request) and a
request's rows are dealt to its CTAs in turn, so the number of CTAs need not know the lengths, which only the device
has, and a CTA with nothing to do costs one look at its request's length.

While a warp works on its rows it has already asked for the pages of the next ones: the way from a length to a CTA
table entry to a row is three waits long, and only the last one is for much data. A lane holds the page of one row. With
gather_lens the first two of these waits are for one another. All warps of a request read the same lengths, and
neighbours the same entries, so those go through L1 and a multiprocessor asks for them once: when every warp asked the
same L2 slice, a call of 4224 rows took 0.4 us longer. Without gather_lens both are under way at once, which loads in
order keep so (perf/log/kv_cache.md).

GatherBulkKernel, for calls of many rows of fp8_ds_mla where their pages allow it: bulk copies bring four neighbouring
rows of a page at a time.

    a stage, in shared memory      4 x 576 bytes of data | 4 x 8 scale bytes
    a warp                         two stages, each with an mbarrier; warps have nothing to do with one another

Chunks of four rows are aligned in the request, and so in a page, whose rows are a multiple of four. The first and the
last chunk may reach beyond the rows to gather: they are copied as wholes, and what is too much is not stored.

Chunks are dealt to the warps in turn. A call that fits the grid gives a warp two of them, both under way at once; in
longer ones a stage is filled again as soon as it is used up. A chunk without a page completes its stage's barrier too,
with no bytes, so that every stage is waited for in the same way.

Both write zeros of a row without a page: who reads the rows finds no others' there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import (
    FORMATS,
    FP8_DS_MLA,
    HEAD_DIM,
    NOPE_DIM,
    V41_KV_CACHES,
    Nvfp4V41Format,
    label_of,
)
from cute_kernels.kv_cache import record
from cute_kernels.kv_cache.call import GatherCall
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.runtime.arch import arch_number, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

BULK_ARCH = 90
"""First architecture with bulk copies."""

BULK_ROWS = {False: 4096, True: 12288}
"""Rows of a call, of all its requests together, from which on the kernel with bulk copies is faster, by whether there
are gather_lens (perf/log/kv_cache.md)."""

CHUNK_ROWS = 4

BULK_ALIGNMENT = 16
"""Of pools and pages, and so of the rows and scales of a chunk."""

CTAS_PER_SM = 64
"""Of either kernel, when there are rows enough: as fast as any (perf/log/kv_cache.md)."""

MOST_REQUESTS = 65535
"""Blocks that a grid can have in its second dimension."""

MOST_ROWS = 2**29
"""Per request: row numbers of the passes of all CTAs stay within int32."""


# ---- kernel: rows by loads


class GatherKernel:
    """Entry point: (out, seq_lens, gather_lens or anything like them, block table, cache address, page stride in bytes,
    pages of the pool, rows of a page, first row of out to write, CTAs per request, stream)."""

    def __init__(self, key: GatherKey) -> None:
        self.arch = key.arch
        self.kv_format = key.kv_format
        self.gathered = key.gathered
        self.warps = key.warps
        self.rows = key.rows
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"dequantize_and_gather_k_cache_w{key.warps}r{key.rows}" + ("_gathered" if key.gathered else "")
        if key.kv_format != FP8_DS_MLA.id:
            self.name += f"_{label_of(key.kv_format)}"

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        seq_lens: cute.Tensor,
        gather_lens: cute.Tensor,
        table: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        block_size: Int32,
        offset: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        out_row = stride_bytes(out, 1)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(out) + Int64(offset) * out_row,
            stride_bytes(out, 0),
            out_row,
            length(out, 1) - offset,
            address(seq_lens),
            address(gather_lens),
            address(table),
            stride_bytes(table, 0),
            length(table, 1),
            pool,
            page_stride,
            pages,
            block_size,
            page_rows,
        )
        requests = length(seq_lens, 0)
        kernel.launch(grid=[ctas, requests, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        out_request: Int64,
        out_row: Int64,
        room: Int32,
        seq_lens: Int64,
        gather_lens: Int64,
        table: Int64,
        table_stride: Int64,
        width: Int32,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        block_size: Int32,
        page_rows: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, request, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        start = (cta * self.warps + warp) * self.rows
        step = ctas * (self.warps * self.rows)
        scales = pool + Int64(block_size) * FP8_DS_MLA.data_bytes
        offsets = record.Offsets.of(lane)
        target = out + Int64(request) * out_request
        table += Int64(request) * table_stride
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        load = ptx.load_global_s32_again if const_expr(self.gathered) else ptx.load_global_s32_in_order
        count = load(seq_lens + Int64(request) * 4)
        first = Int32(0)
        if const_expr(self.gathered):
            seq_len = count
            count = cutlass.min(load(gather_lens + Int64(request) * 4), seq_len)
            first = seq_len - count
        # the row of the request this lane finds the page of, among those the warp takes next
        position = first + start + lane % self.rows
        entry = self.load_entry(load, position, table, width, page_rows)
        count = cutlass.min(count, room)
        while start < count:
            column, _ = divmod(position, page_rows)
            is_named = position >= 0 and column < width and entry >= 0 and entry < pages
            page = entry if is_named else Int32(-1)
            rows: list[tuple[Any, Any]] = []
            for i in range_constexpr(self.rows):
                row_page = cute.arch.shuffle_sync(page, i)
                _, row = divmod(cutlass.max(first + start + i, 0), page_rows)
                # a row that has no page reads page 0 and stores zeros
                base = Int64(cutlass.max(row_page, 0)) * page_stride
                if const_expr(self.kv_format != FP8_DS_MLA.id):
                    places = record.places_v41(pool + base, row, block_size, self.kv_format)
                    rows.append((row_page, record.load_v41(places, lane, self.kv_format)))
                else:
                    data = pool + base + Int64(row) * FP8_DS_MLA.data_bytes
                    scale = scales + base + Int64(row) * FP8_DS_MLA.scale_bytes
                    rows.append((row_page, record.load(data, scale, lane, offsets)))
            position += step
            entry = self.load_entry(ptx.load_global_s32_in_order, position, table, width, page_rows)

            for i in range_constexpr(self.rows):
                row_page, loaded = rows[i]
                row_target = target + Int64(start + i) * out_row
                is_wanted = start + i < count
                has_page = is_wanted and row_page >= 0
                if const_expr(self.kv_format != FP8_DS_MLA.id):
                    record.store_decoded_v41(row_target, lane, loaded, has_page, self.kv_format, self.arch)
                else:
                    record.store_loaded(row_target, lane, loaded, has_page, self.arch)
                record.store_zeros(row_target, lane, is_wanted and row_page < 0)
            start += step

    def load_entry(self, load: Any, position: Any, table: Any, width: Any, page_rows: Any) -> Any:
        """Block table entry of a row of the request, or of the nearest column if the table has none for it."""
        column, _ = divmod(position, page_rows)
        return load(table + Int64(cutlass.max(cutlass.min(column, width - 1), 0)) * 4)


# ---- kernel: chunks by bulk copies


class GatherBulkKernel:
    """Entry point: as that of GatherKernel."""

    def __init__(self, key: GatherBulkKey) -> None:
        self.arch = key.arch
        self.gathered = key.gathered
        self.warps = key.warps
        self.rows = key.rows
        self.stages = key.stages
        self.stage_bytes = key.stage_bytes
        self.data_bytes = key.rows * FP8_DS_MLA.data_bytes
        form = f"w{key.warps}r{key.rows}s{key.stages}" + ("_gathered" if key.gathered else "")
        self.name = f"dequantize_and_gather_k_cache_bulk_{form}"

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        seq_lens: cute.Tensor,
        gather_lens: cute.Tensor,
        table: cute.Tensor,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        block_size: Int32,
        offset: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        out_row = stride_bytes(out, 1)
        page_rows = cute.fast_divmod_create_divisor_v2(block_size)
        kernel = self.kernel(
            address(out) + Int64(offset) * out_row,
            stride_bytes(out, 0),
            out_row,
            length(out, 1) - offset,
            address(seq_lens),
            address(gather_lens),
            address(table),
            stride_bytes(table, 0),
            length(table, 1),
            pool,
            page_stride,
            pages,
            block_size,
            page_rows,
        )
        requests = length(seq_lens, 0)
        kernel.launch(grid=[ctas, requests, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        out_request: Int64,
        out_row: Int64,
        room: Int32,
        seq_lens: Int64,
        gather_lens: Int64,
        table: Int64,
        table_stride: Int64,
        width: Int32,
        pool: Int64,
        page_stride: Int64,
        pages: Int32,
        block_size: Int32,
        page_rows: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, request, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        smem = SmemAllocator()
        memory = smem.allocate_tensor(
            Uint8, cute.make_layout(self.warps * self.stages * self.stage_bytes), byte_alignment=128
        )
        ring = memory.iterator.toint() + warp * (self.stages * self.stage_bytes)
        barriers = smem.allocate_array(Int64, self.warps * self.stages) + warp * self.stages
        if lane == 0:
            for stage in range_constexpr(self.stages):
                cute.arch.mbarrier_init(barriers + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        target = out + Int64(request) * out_request
        table += Int64(request) * table_stride
        cute.arch.griddepcontrol_wait()

        # all warps read the same lengths: through L1, a multiprocessor asks for them once
        count = ptx.load_global_s32_again(seq_lens + Int64(request) * 4)
        first = Int32(0)
        if const_expr(self.gathered):
            seq_len = count
            count = cutlass.min(ptx.load_global_s32_again(gather_lens + Int64(request) * 4), seq_len)
            first = seq_len - count
        # rows of the first chunk that come before the first row; rows are counted from the first chunk on
        lead = first & (self.rows - 1)
        origin = first - lead
        start = (cta * self.warps + warp) * self.rows
        step = ctas * (self.warps * self.rows)
        pending = [
            self.load_page(origin + start + stage * step, table, width, pages, page_rows)
            for stage in range(self.stages)
        ]
        count = cutlass.min(count, room)
        end = lead + count if count > 0 else Int32(0)
        for stage in range_constexpr(self.stages):
            row = start + stage * step
            if lane == 0 and row < end:
                self.copy_chunk_async(
                    stage, pending[stage], origin + row, ring, barriers, pool, page_stride, block_size, page_rows
                )
        phase = Int32(0)
        while start < end:
            for stage in range_constexpr(self.stages):
                if start < end:
                    page = pending[stage]
                    later = start + self.stages * step
                    pending[stage] = self.load_page(origin + later, table, width, pages, page_rows)
                    cute.arch.mbarrier_wait(barriers + stage, phase)
                    for i in range_constexpr(self.rows):
                        row = start - lead + i
                        is_wanted = row >= 0 and row < count
                        row_target = target + Int64(row) * out_row
                        shared = ring + stage * self.stage_bytes
                        self.store_row(row_target, lane, shared, i, is_wanted and page >= 0)
                        record.store_zeros(row_target, lane, is_wanted and page < 0)
                    # no lane reads the stage any more
                    cute.arch.sync_warp()
                    if lane == 0 and later < end:
                        self.copy_chunk_async(
                            stage,
                            pending[stage],
                            origin + later,
                            ring,
                            barriers,
                            pool,
                            page_stride,
                            block_size,
                            page_rows,
                        )
                    start += step
            phase ^= 1

    @cute.jit
    def load_page(self, position: Any, table: Any, width: Any, pages: Any, page_rows: Any) -> Any:
        """Page of a row of the request, -1 if it has none."""
        column, _ = divmod(position, page_rows)
        entry = ptx.load_global_s32_again(table + Int64(cutlass.max(cutlass.min(column, width - 1), 0)) * 4)
        is_named = position >= 0 and column < width and entry >= 0 and entry < pages
        return entry if is_named else Int32(-1)

    @cute.jit
    def copy_chunk_async(
        self,
        stage: Any,
        page: Any,
        position: Any,
        ring: Any,
        barriers: Any,
        pool: Any,
        page_stride: Any,
        block_size: Any,
        page_rows: Any,
    ) -> None:
        """By one lane: have a chunk copied into a stage, whose barrier completes when that is done."""
        barrier = barriers + stage
        if page >= 0:
            _, row = divmod(position, page_rows)
            start = pool + Int64(page) * page_stride
            scales = start + Int64(block_size) * FP8_DS_MLA.data_bytes + Int64(row) * FP8_DS_MLA.scale_bytes
            shared = ring + stage * self.stage_bytes
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.stage_bytes)
            data = start + Int64(row) * FP8_DS_MLA.data_bytes
            ptx.copy_bulk(shared, data, self.data_bytes, barrier.toint())
            ptx.copy_bulk(shared + self.data_bytes, scales, self.stage_bytes - self.data_bytes, barrier.toint())
        else:
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def store_row(self, target: Any, lane: Any, stage: Any, i: int, predicate: Any) -> None:
        """Row `i` of the stage at shared address `stage`, to `target`."""
        start = stage + i * FP8_DS_MLA.data_bytes
        is_rope = lane >= record.ROPE_LANE
        rope = start + NOPE_DIM + (lane % 8) * 16
        codes = ptx.load_shared_64(start + lane * 8)
        second = ptx.load_shared_64(rope if is_rope else start + record.HALF_CODES + lane * 8)
        scales = ptx.load_shared_64(stage + self.data_bytes + i * FP8_DS_MLA.scale_bytes)
        rope_words = second + ptx.load_shared_64(rope + 8)
        record.store_decoded(target, lane, codes, second, rope_words, scales, predicate, self.arch)


# ---- keys


@dataclass(frozen=True)
class GatherKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    gathered      whether there are gather_lens; without them the first row to copy is known to be row 0
    warps         per CTA
    rows          per warp, asked for together: 1, 2, 4 ... 32; with more than two the compiler may delay the last ones
    """

    kernel_name: ClassVar[str] = "kv_cache.gather"
    kv_format: str = FP8_DS_MLA.id
    gathered: bool = False
    warps: int = 4
    rows: int = 2

    @property
    def instructions(self) -> tuple[str, ...]:
        if isinstance(FORMATS[self.kv_format], Nvfp4V41Format):
            return ("st.global.128",)
        return "ld.global.64", *convert.e4m3_instructions(self.arch), "st.global.128"

    @property
    def cta_rows(self) -> int:
        """Rows of one pass of a CTA."""
        return self.warps * self.rows

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride() -> Any:
            return cute.sym_int64()

        out = make_fake_tensor(BFloat16, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=(stride(), stride(), 1))
        lens = [make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(2)]
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(stride(), 1))
        numbers = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(0), Int32(1))
        return GatherKernel(self), (out, *lens, table, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


@dataclass(frozen=True)
class GatherBulkKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    gathered      whether there are gather_lens; without them the first row to copy is known to be row 0
    warps         per CTA
    rows          per chunk: 2, 4, 8 ...; divides the rows of a page
    stages        of each warp

    Four warps with two stages of four rows were the fastest, or as fast as any, in all measured calls of 16384 rows and
    more on an H200: perf/log/kv_cache.md.
    """

    kernel_name: ClassVar[str] = "kv_cache.gather_bulk"
    kv_format: str = FP8_DS_MLA.id
    gathered: bool = False
    warps: int = 4
    rows: int = CHUNK_ROWS
    stages: int = 2

    @property
    def instructions(self) -> tuple[str, ...]:
        return "bulk.load", "mbarrier", "cvt.e4m3", "st.global.128"

    @property
    def cta_rows(self) -> int:
        """Rows of one pass of a CTA."""
        return self.warps * self.stages * self.rows

    @property
    def stage_bytes(self) -> int:
        return self.rows * (FP8_DS_MLA.data_bytes + FP8_DS_MLA.scale_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.warps * self.stages * (self.stage_bytes + 8)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride() -> Any:
            return cute.sym_int64()

        out = make_fake_tensor(BFloat16, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=(stride(), stride(), 1))
        lens = [make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(2)]
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(stride(), 1))
        numbers = (Int64(0), Int64(0), Int32(0), Int32(self.rows), Int32(0), Int32(1))
        return GatherBulkKernel(self), (out, *lens, table, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


def key_for(arch: str, kv_format: str, gathered: bool, is_bulk: bool) -> GatherKey | GatherBulkKey:
    """The kernel that serves calls of this kind."""
    return GatherBulkKey(arch, kv_format, gathered) if is_bulk else GatherKey(arch, kv_format, gathered)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[GatherKey | GatherBulkKey]:
    """Prefill gathers the tail of the window and, in layers with compressed entries, all of those; few rows or many."""
    forms = (False, True) if arch_number(arch) >= BULK_ARCH else (False,)
    kinds = [(FP8_DS_MLA.id, is_bulk) for is_bulk in forms]
    if latent_ratios(config):
        pairs = V41_KV_CACHES.values()
        kinds += dict.fromkeys((fmt.id, False) for pair in pairs for fmt in pair if fmt != FP8_DS_MLA)
    return [key_for(arch, fmt, gathered, is_bulk) for gathered in (True, False) for fmt, is_bulk in kinds]


@cache
def _key(device_index: int, kv_format: str, gathered: bool, is_bulk: bool) -> GatherKey | GatherBulkKey:
    return key_for(arch_of(device_index), kv_format, gathered, is_bulk)


# ---- launch


def why_not(call: GatherCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    if call.out.data_ptr() % 16 or any(call.out.shape[axis] > 1 and call.out.stride(axis) % 8 for axis in (0, 1)):
        where = f"address {call.out.data_ptr():#x} and strides {tuple(call.out.stride())}"
        return f"rows of out must be 16-byte aligned, got {where}"
    if call.k_cache.data_ptr() % 8 or (call.k_cache.shape[0] > 1 and call.k_cache.stride(0) % 8):
        return (
            f"pages of k_cache must be 8-byte aligned, got address {call.k_cache.data_ptr():#x} and page stride "
            f"{call.k_cache.stride(0)}"
        )
    if call.seq_lens.shape[0] > MOST_REQUESTS:
        return f"there may be at most {MOST_REQUESTS} requests, got {call.seq_lens.shape[0]}"
    if call.out.shape[1] > MOST_ROWS or call.block_size >= 2**31:
        return f"out must have at most {MOST_ROWS} rows per request, got {call.out.shape[1]}"
    return ""


def ctas_per_request(
    key: GatherKey | GatherBulkKey, requests: int, rows: int, multiprocessors: int, per_multiprocessor: int
) -> int:
    """How many CTAs share the rows of one request: no more than `rows` keep busy, and their share of the GPU."""
    enough = -(-rows // key.cta_rows)
    share = -(-multiprocessors * per_multiprocessor // requests)
    return max(1, min(enough, share))


def wants_bulk(arch: str, k_cache: Any, block_size: int, gathered: bool, rows: int) -> bool:
    """Whether a call of so many rows is one for bulk copies, whose chunks must lie in one page, and aligned."""
    return (
        rows >= BULK_ROWS[gathered]
        and block_size % CHUNK_ROWS == 0
        and k_cache.data_ptr() % BULK_ALIGNMENT == 0
        and k_cache.stride(0) % BULK_ALIGNMENT == 0
        and arch_number(arch) >= BULK_ARCH
    )


def _write_zeros(rows: Any, seq_lens: Any, gather_lens: Any) -> None:
    """The call of a cache, or a table, without pages."""
    lens = seq_lens if gather_lens is None else seq_lens.minimum(gather_lens)
    column = lens.new_ones(rows.shape[1]).cumsum(0) - 1
    rows.masked_fill_((column < lens[:, None])[..., None], 0)


def launch(call: GatherCall) -> None:
    """Run the kernel on the current stream of out's device."""
    requests, width, pages = call.seq_lens.shape[0], call.block_table.shape[1], call.k_cache.shape[0]
    room = call.out.shape[1] - call.offset
    if requests == 0 or room <= 0:
        return
    if width == 0 or pages == 0:
        _write_zeros(call.out[:requests, call.offset :], call.seq_lens, call.gather_lens)
        return
    rows = min(room, width * call.block_size)
    device_index = call.out.device.index
    gathered = call.gather_lens is not None
    is_bulk = call.kv_format == FP8_DS_MLA.id and wants_bulk(
        arch_of(device_index), call.k_cache, call.block_size, gathered, requests * rows
    )
    key = _key(device_index, call.kv_format, gathered, is_bulk)
    launch_key(
        key,
        device_index,
        call.out,
        call.seq_lens,
        call.seq_lens if call.gather_lens is None else call.gather_lens,
        call.block_table,
        call.k_cache.data_ptr(),
        call.k_cache.stride(0),
        pages,
        call.block_size,
        call.offset,
        ctas_per_request(key, requests, rows, multiprocessors(device_index), CTAS_PER_SM),
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
