# SPDX-License-Identifier: Apache-2.0
"""Kernel of compute_decode_swa_indices: one warp writes one row, 32 * width columns at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import LANES, BlockTable, Matrix, block_table, matrix, store_window
from cute_kernels.dsl.tensor import address, length
from cute_kernels.indices.call import WindowCall
from cute_kernels.indices.launching import (
    MOST_ROWS,
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
class WindowKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width            neighbouring columns of a lane: 4 or 1
    wide_positions   whether positions are int64, not int32
    is_shift         whether pages have 2^n rows
    warps            per CTA
    """

    kernel_name: ClassVar[str] = "indices.window"
    width: int = 4
    wide_positions: bool = True
    is_shift: bool = True
    warps: int = WARPS

    @property
    def instructions(self) -> tuple[str, ...]:
        return instructions(self.arch, self.width, is_loading=False)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        positions = fake(Int64 if self.wide_positions else Int32, 1)
        tensors = (positions, fake(Int32, 1), fake(Boolean, 1), fake(Int32, 2), fake(Int32, 3), fake(Int32, 1))
        return WindowKernel(self), (*tensors, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


class WindowKernel:
    """Entry point: (positions, requests, valid tokens, block table, indices, lens, rows of a page, stream)."""

    def __init__(self, key: WindowKey) -> None:
        self.width, self.wide_positions, self.warps = key.width, key.wide_positions, key.warps
        self.is_shift = key.is_shift
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"compute_decode_swa_indices_c{key.width}w{key.warps}" + ("" if key.wide_positions else "_int32")

    @cute.jit
    def __call__(
        self,
        positions: cute.Tensor,
        requests: cute.Tensor,
        valid: cute.Tensor,
        table: cute.Tensor,
        indices: cute.Tensor,
        lens: cute.Tensor,
        block_size: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            address(positions),
            address(requests),
            address(valid),
            block_table(table, block_size, self.is_shift),
            matrix(indices),
            address(lens),
        )
        ctas = cute.ceil_div(length(positions, 0), self.warps)
        kernel.launch(grid=[ctas, 1, 1], block=[self.warps * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, positions: Int64, requests: Int64, valid: Int64, table: BlockTable, indices: Matrix, lens: Int64
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread % LANES
        row = cta * self.warps + cute.arch.make_warp_uniform(thread // LANES)
        window = indices.columns
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        if row < indices.rows:
            position = load_position(positions, row, self.wide_positions)
            pages = table.of(ptx.load_global_s32_in_order(requests + Int64(row) * 4, is_shared=True))
            is_valid = ptx.load_global_bool_in_order(valid + Int64(row))
            # no window that ends past MOST_ROWS + window has an entry that a block table maps
            last = Int32(ptx.max_s64(ptx.min_s64(position, Int64(MOST_ROWS) + Int64(window)), Int64(-1)))
            count = cutlass.min(last + 1, window) if is_valid != 0 else Int32(0)
            store_window(indices.row(row), pages, last, count, window, self.width)
            ptx.store_global_s32(lens + Int64(row) * 4, count, lane == 0)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[WindowKey]:
    """Every model has a sliding window; positions are int64."""
    return [WindowKey(arch, width) for width in (4, 1)]


@cache
def _key(device_index: int, width: int, wide_positions: bool, is_shift: bool) -> WindowKey:
    return WindowKey(arch_of(device_index), width, wide_positions, is_shift)


def why_not(call: WindowCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    if call.window_size >= MOST_ROWS:
        return f"window_size must be below {MOST_ROWS}, got {call.window_size}"
    return too_many_entries("block_table", call.block_table, call.block_size)


def launch(call: WindowCall) -> None:
    """Run the kernel on the current stream of the tensors' device."""
    if call.positions.shape[0] == 0:
        return
    device_index = call.positions.device.index
    is_shift, pages = page_argument(call.block_size)
    launch_key(
        _key(
            device_index,
            group_width((call.window_size,), call.out_indices),
            call.positions.element_size() == 8,
            is_shift,
        ),
        device_index,
        call.positions,
        call.token_to_req_indices,
        call.is_valid_token,
        call.block_table,
        call.out_indices,
        call.out_lens,
        *pages,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
