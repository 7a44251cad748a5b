"""Kernel of dequantize_and_gather_k_cache: one warp takes some neighbouring rows of a request at a time. Lanes and
columns: record.py.

Blocks are numbered (i, request) and a request's rows are dealt to its blocks in turn, so the number of blocks need not
know the lengths, which only the device has, and a block with nothing to do costs one look at its request's length.

While a warp works on its rows it has already asked for the pages of the next ones: the way from a length to a block
table entry to a row is three waits long, and only the last one is for much data. A lane holds the page of one row.
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
from cute_kernels.runtime.arch import arch_number, arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

MINIMUM_ARCH = 89
"""First architecture that converts from e4m3 in hardware."""

FOUR_ROWS_CALLS = range(12288, 131072)
"""Rows of a call, of all its requests together, that warps take four at a time; of more or fewer they take two.

Few rows are better spread over more warps, and very many over more blocks. Between these, four rows in flight hide more
of a warp's waits. On an H200 two rows were no slower in the calls of up to 8192 rows and of 262144, and four faster in
those of 16384 to 65536; the ends of the range lie between: perf/results/h200/dequantize_and_gather_k_cache.json.
"""

ROWS_PER_SM = 512
"""Rows that the blocks of a multiprocessor take in one pass when there are rows enough: as fast as any, same record.

These are 64 blocks whose warps take two rows, or 32 whose warps take four.
"""

MOST_REQUESTS = 65535
"""Blocks that a grid can have in its second dimension."""

MOST_ROWS = 2**29
"""Per request: row numbers of the passes of all blocks stay within int32."""


@dataclass(frozen=True)
class GatherKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id
    gathered      whether there are gather_lens; without them the first row to copy is known to be row 0
    warps         per block
    rows          per warp, asked for together: 1, 2, 4 ... 32; with more than two the compiler may delay the last ones
    """

    kv_format: str = FP8_DS_MLA.id
    gathered: bool = False
    warps: int = 4
    rows: int = 2

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.64", "cvt.e4m3", "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride() -> Any:
            return cute.sym_int64()

        out = make_fake_tensor(BFloat16, (cute.sym_int(), cute.sym_int(), HEAD_DIM), stride=(stride(), stride(), 1))
        lens = [make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(2)]
        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(stride(), 1))
        numbers = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(0), Int32(1))
        return GatherKernel(self), (out, *lens, table, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class GatherKernel:
    """Entry point: (out, seq_lens, gather_lens or anything like them, block table, cache address, page stride in bytes,
    pages of the pool, rows of a page, first row of out to write, blocks per request, stream)."""

    def __init__(self, key: GatherKey) -> None:
        self.gathered = key.gathered
        self.warps = key.warps
        self.rows = key.rows
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"dequantize_and_gather_k_cache_w{key.warps}r{key.rows}" + ("_gathered" if key.gathered else "")

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
        blocks: Int32,
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
        kernel.launch(grid=[blocks, requests, 1], block=[self.warps * 32, 1, 1], stream=stream)

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
        block, request, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        start = (block * self.warps + warp) * self.rows
        step = blocks * (self.warps * self.rows)
        scales = pool + Int64(block_size) * FP8_DS_MLA.data_bytes
        is_rope = lane >= record.ROPE_LANE
        second_offset = Int64(record.second_offset(lane))
        third_offset = Int64(record.third_offset(lane))
        target = out + Int64(request) * out_request + Int64(lane * 16)
        table += Int64(request) * table_stride
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        count = ptx.load_global_s32_in_order(seq_lens + Int64(request) * 4)
        first = Int32(0)
        if const_expr(self.gathered):
            seq_len = count
            count = cutlass.min(ptx.load_global_s32_in_order(gather_lens + Int64(request) * 4), seq_len)
            first = seq_len - count
        # the row of the request this lane finds the page of, among those the warp takes next
        position = first + start + lane % self.rows
        entry = self.load_entry(position, table, width, page_rows)
        count = cutlass.min(count, room)
        while start < count:
            column, _ = divmod(position, page_rows)
            is_named = position >= 0 and column < width and entry >= 0 and entry < pages
            page = entry if is_named else Int32(-1)
            rows = []
            for i in range_constexpr(self.rows):
                row_page = cute.arch.shuffle_sync(page, i)
                _, row = divmod(cutlass.max(first + start + i, 0), page_rows)
                # a row that has no page reads page 0 and stores nothing
                base = Int64(cutlass.max(row_page, 0)) * page_stride
                data = pool + base + Int64(row) * FP8_DS_MLA.data_bytes
                scale = scales + base + Int64(row) * FP8_DS_MLA.scale_bytes
                codes = ptx.load_global_64_in_order(data + Int64(lane * 8))
                second = ptx.load_global_64_in_order(data + second_offset)
                third = ptx.load_global_64_in_order(data + third_offset if is_rope else scale)
                rows.append((row_page if start + i < count else Int32(-1), codes, second, third))
            position += step
            entry = self.load_entry(position, table, width, page_rows)

            for i in range_constexpr(self.rows):
                row_page, codes, second, third = rows[i]
                rope = record.rope_words(lane, second, third)
                # lanes with rope have no scales: they need those of block 3 for their first columns
                low = cute.arch.shuffle_sync(third[0], lane % record.ROPE_LANE)
                shift = lane // 8 * 8
                factor = convert.ue8m0_value((low >> shift) & 0xFF)
                factor_second = convert.ue8m0_value((third[1] >> shift) & 0xFF)
                words = self.values(codes, factor)
                words_second = self.values(second, factor_second)
                row_target = target + Int64(start + i) * out_row
                ptx.store_global_128(row_target, words, row_page >= 0)
                words_second = self.choose(is_rope, rope, words_second)
                ptx.store_global_128(row_target + record.HALF_ROW, words_second, row_page >= 0)
            start += step

    def load_entry(self, position: Any, table: Any, width: Any, page_rows: Any) -> Any:
        """Block table entry of a row of the request, or of the nearest column if the table has none for it."""
        column, _ = divmod(position, page_rows)
        return ptx.load_global_s32_in_order(table + Int64(cutlass.max(cutlass.min(column, width - 1), 0)) * 4)

    def values(self, codes: Any, factor: Any) -> Any:
        """A lane's eight columns as four bf16 pairs."""
        return convert.bf16x4_from_e4m3(codes[0], factor) + convert.bf16x4_from_e4m3(codes[1], factor)

    @cute.jit
    def choose(self, condition: Any, a: Any, b: Any) -> Any:
        return (
            a[0] if condition else b[0],
            a[1] if condition else b[1],
            a[2] if condition else b[2],
            a[3] if condition else b[3],
        )


def rows_per_warp(rows: int) -> int:
    """How many rows a warp takes at a time in a call of at most so many, all requests together."""
    return 4 if rows in FOUR_ROWS_CALLS else 2


def deployment_keys(config: Any, tp: int, arch: str) -> list[GatherKey]:
    """Prefill gathers the tail of the window and, in layers with compressed entries, all of those; few rows or many."""
    if arch_number(arch) < MINIMUM_ARCH:
        return []
    return [GatherKey(arch, FP8_DS_MLA.id, gathered, rows=rows) for gathered in (True, False) for rows in (2, 4)]


@cache
def _key(device_index: int, kv_format: str, gathered: bool, rows: int) -> GatherKey:
    return GatherKey(arch_of(device_index), kv_format, gathered, rows=rows)


def supports(
    out: Any,
    k_cache: Any,
    seq_lens: Any,
    gather_lens: Any,
    block_table: Any,
    block_size: int,
    offset: int,
    kv_format: str,
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    arch = arch_of(out.device.index)
    if arch_number(arch) < MINIMUM_ARCH:
        return False, f"{arch} has no e4m3 conversion, sm_{MINIMUM_ARCH} and up have"
    if out.data_ptr() % 16 or any(out.shape[axis] > 1 and out.stride(axis) % 8 for axis in (0, 1)):
        return False, (
            f"rows of out must be 16-byte aligned, got address {out.data_ptr():#x} and strides {tuple(out.stride())}"
        )
    if k_cache.data_ptr() % 8 or (k_cache.shape[0] > 1 and k_cache.stride(0) % 8):
        return False, (
            f"pages of k_cache must be 8-byte aligned, got address {k_cache.data_ptr():#x} and page stride "
            f"{k_cache.stride(0)}"
        )
    if seq_lens.shape[0] > MOST_REQUESTS:
        return False, f"there may be at most {MOST_REQUESTS} requests, got {seq_lens.shape[0]}"
    if out.shape[1] > MOST_ROWS or block_size >= 2**31:
        return False, f"out must have at most {MOST_ROWS} rows per request, got {out.shape[1]}"
    return True, ""


def blocks_per_request(key: GatherKey, requests: int, rows: int, multiprocessors: int, per_multiprocessor: int) -> int:
    """How many blocks share the rows of one request: no more than `rows` keep busy, and their share of the GPU."""
    enough = -(-rows // (key.warps * key.rows))
    share = -(-multiprocessors * per_multiprocessor // requests)
    return max(1, min(enough, share))


def launch(
    out: Any,
    k_cache: Any,
    seq_lens: Any,
    gather_lens: Any,
    block_table: Any,
    block_size: int,
    offset: int,
    kv_format: str,
) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked and supported."""
    requests, width, pages = seq_lens.shape[0], block_table.shape[1], k_cache.shape[0]
    rows = min(out.shape[1] - offset, width * block_size)
    if requests == 0 or rows <= 0 or pages == 0:
        return
    device_index = out.device.index
    key = _key(device_index, kv_format, gather_lens is not None, rows_per_warp(requests * rows))
    blocks_per_sm = ROWS_PER_SM // (key.warps * key.rows)
    launch_key(
        key,
        device_index,
        out,
        seq_lens,
        seq_lens if gather_lens is None else gather_lens,
        block_table,
        k_cache.data_ptr(),
        k_cache.stride(0),
        pages,
        block_size,
        offset,
        blocks_per_request(key, requests, rows, multiprocessors(device_index), blocks_per_sm),
    )
