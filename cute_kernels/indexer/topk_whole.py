# SPDX-License-Identifier: Apache-2.0
"""Picks of rows that are picked whole, as they have at most k columns: 0, 1, ... and then -1, or slots of these. No
score is read. top_k_per_row_prefill and _decode of such narrow scores come here, and all_visible_entries.

    warp    128 `chunks` neighbouring picks of a row, four a lane and chunk: pages of all of them are asked for before
            one is used, and a lane writes 16 bytes where the row of the result allows it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.indexer.topk_slots import Slots
from cute_kernels.runtime.arch import arch_number
from cute_kernels.runtime.compile import KernelKey

WARPS = 8
"""Of a CTA."""

CHUNK = 128
"""Picks that a warp writes at once."""

CHUNKS = 1, 4
"""Of a warp: of calls with few picks, and where that would be MANY_WARPS and more. By turns on
an H200 1 and 16 rows (k = 512) take 2.2 us with one and 2.4 with four, 256 and 4096 rows (k = 1024) 3.1 and 7.4, and
2.6 and 6.3 us."""

MANY_WARPS = 512


@dataclass(frozen=True)
class WholeRowsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    chunks   that a warp writes
    """

    kernel_name: ClassVar[str] = "indexer.topk_whole"
    chunks: int = 1

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("griddepcontrol",) if arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH else ()

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        out = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), cute.sym_int64()))
        starts, ends = (Int64(0), Int64(4)), (Int64(0), Int64(4), Int64(4), Int32(1))
        table = Int64(0), Int64(0), Int32(0), Int32(1)
        numbers = Int32(1), *starts, *ends, Int32(1), Int32(0), *table, Int32(1), Int32(1), Boolean(True)
        return WholeRowsKernel(self), (out, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


def key_for(arch: str, rows: int, k: int) -> WholeRowsKey:
    """The kernel for so many picks of so many rows."""
    few, many = CHUNKS
    return WholeRowsKey(arch, few if rows * -(-k // CHUNK) < MANY_WARPS else many)


def keys_of(arch: str) -> list[WholeRowsKey]:
    """All kernels of an architecture."""
    return [WholeRowsKey(arch, chunks) for chunks in CHUNKS]


class WholeRowsKernel:
    """Entry point: (result; columns of the scores; address of the starts or 0, their stride in bytes; address of the
    ends, strides of requests and of their tokens, tokens of a request; what no end exceeds, whether a row's first
    column is that of its start (-1) or not (0); address of the block table or 0, stride of its rows in bytes, its
    columns, rows of a page; rows, k; whether to launch as a dependent of the kernel before; stream)."""

    def __init__(self, key: WholeRowsKey) -> None:
        self.chunks = key.chunks
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        columns: Int32,
        starts: Int64,
        starts_stride: Int64,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: Int32,
        limit: Int32,
        shifts: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        page_rows: Int32,
        rows: Int32,
        k: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        name = f"top_k_whole_rows_c{self.chunks}"
        self.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        parts = cute.ceil_div(k, CHUNK * self.chunks)
        kernel = self.kernel(
            columns,
            starts,
            starts_stride,
            ends,
            ends_request,
            ends_token,
            cute.fast_divmod_create_divisor_v2(tokens),
            limit,
            shifts,
            table,
            table_stride,
            table_columns,
            cute.fast_divmod_create_divisor_v2(page_rows),
            Int32(0x7FFFFFFF) // page_rows + 1,
            address(out),
            stride_bytes(out, 0),
            rows,
            k,
            cute.fast_divmod_create_divisor_v2(parts),
        )
        kernel.launch(
            grid=[cute.ceil_div(rows, WARPS) * parts, 1, 1],
            block=[32 * WARPS, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        columns: Int32,
        starts: Int64,
        starts_stride: Int64,
        ends: Int64,
        ends_request: Int64,
        ends_token: Int64,
        tokens: cute.FastDivmodDivisorV2,
        limit: Int32,
        shifts: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        page_rows: cute.FastDivmodDivisorV2,
        named_pages: Int32,
        out: Int64,
        out_stride: Int64,
        rows: Int32,
        k: Int32,
        parts: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        eight, part = divmod(cta, parts)
        row = eight * WARPS + cute.arch.make_warp_uniform(thread // 32)
        is_row = row < rows
        request, token = divmod(row, tokens)
        place = ends + Int64(request) * ends_request + Int64(token) * ends_token
        ptx.prefetch_l2(place, is_row & (thread % 32 == 0))
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        start = ptx.load_global_s32_where(is_row & (starts != 0), starts + Int64(row) * starts_stride, is_shared=True)
        end = ptx.load_global_s32_where(is_row, place, is_shared=True)
        shift = start & shifts
        start = cutlass.max(start, Int32(0))
        end = Int32(ptx.min_s64(Int64(shift) + Int64(columns), Int64(cutlass.min(end, limit))))
        size = end - start if end > start else Int32(0)
        first = part * (CHUNK * self.chunks) + thread % 32 * 4
        stop = k if is_row else Int32(0)
        target = out + Int64(row) * out_stride
        if table == 0:
            for chunk in range_constexpr(self.chunks):
                i = first + chunk * CHUNK
                entries = [i + j if i + j < size else Int32(-1) for j in range(4)]
                self.write(target, i, entries, stop)
        else:
            slots = Slots(table, table_stride, request, table_columns, page_rows, named_pages)
            found = [
                slots.load_page(first + (chunk * CHUNK + j), first + (chunk * CHUNK + j) < cutlass.min(size, stop))
                for chunk in range(self.chunks)
                for j in range(4)
            ]
            for chunk in range_constexpr(self.chunks):
                entries = [slots.slot(page) for page in found[4 * chunk : 4 * chunk + 4]]
                self.write(target, first + chunk * CHUNK, entries, stop)

    @cute.jit
    def write(self, target: Int64, first: Int32, entries: Any, stop: Int32) -> None:
        """Write four neighbouring picks of a row, as far as the row has them."""
        if (Int32(target & 15) == 0) & (first + 4 <= stop):
            ptx.store_global_128(target + Int64(first) * 4, entries)
        else:
            for j in range_constexpr(4):
                ptx.store_global_s32(target + Int64(first + j) * 4, entries[j], first + j < stop)
