# SPDX-License-Identifier: Apache-2.0
"""Kernel of compute_global_topk_indices_and_lens: one CTA translates one row.

    a pass of a row     groups * warps * 32 * width columns
    lane                `width` neighbouring columns of each group

All picks of a pass are loaded before any is used, then all pages they name: two waits a pass, whatever its length. The
pages of one request are few enough to stay in L1 while its rows are translated. Slots are stored in their picks'
columns: that is all where picks end with the first one that names nothing, as they do behind top-k. Of a row with holes
the first warp then moves slots to the left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import (
    LANES,
    BlockTable,
    Matrix,
    block_sum_and_max,
    block_table,
    load_run,
    matrix,
    store_run,
)
from cute_kernels.dsl.tensor import address, length
from cute_kernels.indices.call import TranslateCall
from cute_kernels.indices.launching import (
    MOST_ROWS,
    fake,
    group_width,
    instructions,
    page_argument,
    shape_for,
    shapes_for,
    too_many_entries,
)
from cute_kernels.models import ModelConfig, has_indexer
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel


@dataclass(frozen=True)
class TranslateKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width        neighbouring columns of a lane: 4 or 1
    is_shift     whether pages have 2^n rows
    warps        per CTA
    groups       of columns in a pass
    through_l1   whether picks may go through L1
    """

    kernel_name: ClassVar[str] = "indices.translate"
    tuning: ClassVar[tuple[str, ...]] = ("warps", "groups", "through_l1")
    width: int = 4
    is_shift: bool = True
    warps: int = 4
    groups: int = 1
    through_l1: bool = False

    @property
    def smem_bytes(self) -> int:
        return 2 * self.warps * 4

    @property
    def instructions(self) -> tuple[str, ...]:
        return instructions(self.arch, self.width)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        tensors = (fake(Int32, 2), fake(Int32, 1), fake(Int32, 2), fake(Boolean, 1), fake(Int32, 2), fake(Int32, 1))
        return TranslateKernel(self), (*tensors, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


class TranslateKernel:
    """Entry point: (picks, requests, block table, valid tokens, indices, lens, rows of a page, stream)."""

    def __init__(self, key: TranslateKey) -> None:
        self.width, self.warps, self.groups = key.width, key.warps, key.groups
        self.group = key.warps * LANES * key.width
        self.is_shift = key.is_shift
        self.through_l1 = key.through_l1
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = (
            f"compute_global_topk_indices_and_lens_c{key.width}w{key.warps}g{key.groups}" + "_l1" * key.through_l1
        )

    @cute.jit
    def __call__(
        self,
        picks: cute.Tensor,
        requests: cute.Tensor,
        table: cute.Tensor,
        valid: cute.Tensor,
        indices: cute.Tensor,
        lens: cute.Tensor,
        block_size: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            matrix(picks),
            address(requests),
            block_table(table, block_size, self.is_shift),
            address(valid),
            matrix(indices),
            address(lens),
        )
        kernel.launch(grid=[length(picks, 0), 1, 1], block=[self.warps * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self, picks: Matrix, requests: Int64, table: BlockTable, valid: Int64, indices: Matrix, lens: Int64
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        # for the one thread that stores the length
        is_valid = ptx.load_global_bool_where(thread == 0, valid + Int64(row))
        a_pass = self.groups * self.group
        count = Int32(picks.columns)
        # nearly every row is one pass: in front of the loop it waits for nothing else
        missing, end = self.translate(Int32(0), row, thread, picks, requests, table, indices)
        for start in range(a_pass, picks.columns, a_pass):
            found = self.translate(start, row, thread, picks, requests, table, indices)
            missing, end = missing + found[0], cutlass.max(end, found[1])
        # of most rows nothing is missing, and one barrier says so
        if ptx.any_of_group(Int32(0), self.warps * LANES, missing) != 0:
            missing, end = block_sum_and_max(missing, end, self.warps)
            count += missing
            # all slots have been stored ahead of the barrier that said so
            if end > count and thread < LANES:
                self.close_holes(indices.row(row), indices.columns)
        ptx.store_global_s32(lens + Int64(row) * 4, count if is_valid != 0 else Int32(0), thread == 0)

    @cute.jit
    def translate(
        self, start: Any, row: Any, thread: Any, picks: Matrix, requests: Int64, table: BlockTable, indices: Matrix
    ) -> Any:
        """A pass. Returns of this thread's picks the number without a slot, negative, and the end of those with one."""
        columns = [start + thread * self.width + group * self.group for group in range(self.groups)]
        runs = []
        for group in range_constexpr(self.groups):
            start_of_run = picks.row(row) + Int64(columns[group]) * 4
            runs.append(load_run(columns[group] < picks.columns, start_of_run, self.width, self.through_l1))
        # behind the picks, as it would be waited for before they are under way
        pages = table.of(ptx.load_global_s32_in_order(requests + Int64(row) * 4, is_shared=True))
        # a pick that was not loaded is -1, which names nothing
        found = [[pages.look_up(pick) for pick in run] for run in runs]
        missing, end = Int32(0), Int32(0)
        for group in range_constexpr(self.groups):
            column = columns[group]
            is_inside = column < picks.columns
            slots = [pages.slot_index(one) for one in found[group]]
            store_run(indices.row(row) + Int64(column) * 4, slots, is_inside)
            for i, slot in enumerate(slots):
                missing += slot >> 31 if is_inside else Int32(0)
                end = cutlass.max(end, column + i + 1 if slot >= 0 else Int32(0))
        return missing, end

    @cute.jit
    def close_holes(self, row: Int64, columns: Int32) -> None:
        """By one warp: move the slots of a row, which the CTA has stored, to the left, -1 behind them."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        for start in range(0, columns, LANES):
            column = start + lane
            slot = ptx.load_global_s32_where(column < columns, row + Int64(column) * 4)
            there = cute.arch.vote_ballot_sync(slot >= 0)
            place = count + cute.arch.popc(there & ((Int32(1) << lane) - 1))
            ptx.store_global_s32(row + Int64(place) * 4, slot, slot >= 0)
            count += cute.arch.popc(there)
        for start in range(count, columns, LANES):
            column = start + lane
            ptx.store_global_s32(row + Int64(column) * 4, Int32(-1), column < columns)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[TranslateKey]:
    """Decode rows of the layers with ratio 4 have index_topk picks."""
    if not has_indexer(config):
        return []
    return [
        TranslateKey(arch, width, True, *shape) for width in (4, 1) for shape in shapes_for(config.index_topk, width)
    ]


@cache
def _key(device_index: int, width: int, is_shift: bool, warps: int, groups: int, through_l1: bool) -> TranslateKey:
    return TranslateKey(arch_of(device_index), width, is_shift, warps, groups, through_l1)


FEW_PICKS = 1 << 20
"""Of all rows, below which a warp has one group of a row, as of few rows. On an H200, one group and two, one behind the
other and apart: 1024 rows of 512 picks 3.16, 3.04 and 3.24, 3.15 us, 2048 rows 4.47, 4.33 and 4.54, 4.42, 3072 rows
6.04, 5.98 and 5.63, 5.71; of 1024 picks 512 rows 3.17, 3.05 and 3.18, 3.08, 1024 rows 4.44, 4.35 and 4.36, 4.34
(perf/log/data/indices_6.txt)."""


def shape_of_call(rows: int, columns: int, width: int) -> tuple[int, int, bool]:
    """As launching.shape_for."""
    return shape_for(1 if width == 4 and rows * columns < FEW_PICKS else rows, columns, width)


def why_not(call: TranslateCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    if call.topk_indices.shape[1] >= MOST_ROWS:
        return f"topk_indices must have fewer than {MOST_ROWS} columns, got {call.topk_indices.shape[1]}"
    return too_many_entries("block_table", call.block_table, call.block_size)


def launch(call: TranslateCall) -> None:
    """Run the kernel on the current stream of the tensors' device."""
    if call.topk_indices.shape[0] == 0:
        return
    device_index = call.topk_indices.device.index
    rows, columns = call.topk_indices.shape
    width = group_width((columns,), call.topk_indices, call.out_indices)
    is_shift, pages = page_argument(call.block_size)
    launch_key(
        _key(device_index, width, is_shift, *shape_of_call(rows, columns, width)),
        device_index,
        call.topk_indices,
        call.token_to_req_indices,
        call.block_table,
        call.is_valid_token,
        call.out_indices,
        call.out_lens,
        *pages,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
