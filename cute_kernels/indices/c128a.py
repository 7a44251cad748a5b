# SPDX-License-Identifier: Apache-2.0
"""Kernel of build_c128a_topk_metadata: one warp writes a segment of a row, 4 * 32 * width columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import LANES, BlockTable, Matrix, block_table, matrix, store_run, visible_entries
from cute_kernels.dsl.tensor import address, length
from cute_kernels.indices.call import C128aCall
from cute_kernels.indices.launching import (
    WARPS,
    fake,
    group_width,
    instructions,
    load_position,
    page_argument,
    too_many_entries,
)
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel


@dataclass(frozen=True)
class EntriesKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width            neighbouring columns of a lane: 4 or 1
    wide_positions   whether positions are int64, not int32
    is_shift         whether pages have 2^n rows
    groups           of 32 * width columns in a segment
    warps            per CTA
    """

    kernel_name: ClassVar[str] = "indices.c128a_entries"
    width: int = 4
    wide_positions: bool = True
    is_shift: bool = True
    groups: int = 4
    warps: int = WARPS

    @property
    def instructions(self) -> tuple[str, ...]:
        return instructions(self.arch, self.width, is_loading=False)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        vectors = (fake(Int64 if self.wide_positions else Int32, 1), fake(Int32, 1), fake(Int64, 1), fake(Int32, 1))
        matrices = tuple(fake(Int32, 2) for _ in range(3))
        numbers = (Int32(0), Int32(0), Int32(1), Int32(1))
        return EntriesKernel(self), (*vectors, *matrices, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class EntriesKernel:
    """Entry point: (positions, requests, slots, decode lens, block table, decode rows, prefill rows, number of decode
    rows, columns, tokens per entry, rows of a page, stream)."""

    def __init__(self, key: EntriesKey) -> None:
        self.width, self.groups, self.warps = key.width, key.groups, key.warps
        self.segment = key.groups * LANES * key.width
        self.wide_positions = key.wide_positions
        self.is_shift = key.is_shift
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        positions = "" if key.wide_positions else "_int32"
        self.name = f"build_c128a_topk_metadata_c{key.width}g{key.groups}w{key.warps}{positions}"

    @cute.jit
    def __call__(
        self,
        positions: cute.Tensor,
        requests: cute.Tensor,
        slots: cute.Tensor,
        lens: cute.Tensor,
        table: cute.Tensor,
        decode: cute.Tensor,
        prefill: cute.Tensor,
        split: Int32,
        columns: Int32,
        ratio: Int32,
        block_size: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        rows = length(positions, 0)
        segments = cutlass.max(cute.ceil_div(columns, self.segment), 1)
        kernel = self.kernel(
            address(positions),
            address(requests),
            address(slots),
            address(lens),
            block_table(table, block_size, self.is_shift),
            matrix(decode),
            matrix(prefill),
            rows,
            split,
            columns,
            cute.fast_divmod_create_divisor_v2(segments),
            cute.fast_divmod_create_divisor_v2(ratio),
        )
        ctas = cute.ceil_div(rows * segments, self.warps)
        kernel.launch(grid=[ctas, 1, 1], block=[self.warps * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        positions: Int64,
        requests: Int64,
        slots: Int64,
        lens: Int64,
        table: BlockTable,
        decode: Matrix,
        prefill: Matrix,
        rows: Int32,
        split: Int32,
        columns: Int32,
        segments: cute.FastDivmodDivisorV2,
        ratio: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread % LANES
        row, segment = divmod(cta * self.warps + cute.arch.make_warp_uniform(thread // LANES), segments)
        first = segment * self.segment + lane * self.width
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        if row < rows:
            position = load_position(positions, row, self.wide_positions)
            last = Int32(ptx.max_s64(ptx.min_s64(position, Int64(2**31 - 2)), Int64(-1)))
            count = cutlass.min(visible_entries(last, ratio), columns)
            if row < split:
                slot = ptx.load_global_s64_in_order(slots + Int64(row) * 8)
                pages = table.of(ptx.load_global_s32_in_order(requests + Int64(row) * 4, is_shared=True))
                found = []
                for group in range_constexpr(self.groups):
                    entry = first + group * (LANES * self.width)
                    found.append([pages.look_up(entry + i, entry + i < count) for i in range(self.width)])
                target = decode.row(row)
                for group in range_constexpr(self.groups):
                    entry = first + group * (LANES * self.width)
                    store_run(
                        target + Int64(entry) * 4, [pages.slot_index(one) for one in found[group]], entry < columns
                    )
                is_first = lane == 0 and segment == 0
                ptx.store_global_s32(lens + Int64(row) * 4, count if slot >= 0 else Int32(0), is_first)
            else:
                target = prefill.row(row - split)
                for group in range_constexpr(self.groups):
                    entry = first + group * (LANES * self.width)
                    entries = [(entry + i if entry + i < count else Int32(-1)) for i in range(self.width)]
                    store_run(target + Int64(entry) * 4, entries, entry < columns)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[EntriesKey]:
    """Models with layers of ratio 128 build these tables; positions are int64."""
    return [EntriesKey(arch, width) for width in (4, 1)] if 128 in config.compress_ratios else []


@cache
def _key(device_index: int, width: int, wide_positions: bool, is_shift: bool) -> EntriesKey:
    return EntriesKey(arch_of(device_index), width, wide_positions, is_shift)


def why_not(call: C128aCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    tokens = call.compress_ratio * max(call.max_compressed_tokens, 1)
    if tokens >= 2**31:
        return f"the entries of a row must stand for fewer than 2^31 tokens, got {tokens}"
    return too_many_entries("block_table", call.block_table, call.block_size)


def launch(call: C128aCall) -> None:
    """Run the kernel on the current stream of the tensors' device."""
    if call.positions.shape[0] == 0:
        return
    device_index = call.positions.device.index
    width = group_width((), call.global_decode_buffer, call.prefill_buffer)
    is_shift, pages = page_argument(call.block_size)
    launch_key(
        _key(device_index, width, call.positions.element_size() == 8, is_shift),
        device_index,
        call.positions,
        call.token_to_req_indices,
        call.slot_mapping,
        call.decode_lens_buffer,
        call.block_table,
        call.global_decode_buffer,
        call.prefill_buffer,
        call.num_decode_tokens,
        call.max_compressed_tokens,
        call.compress_ratio,
        *pages,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
