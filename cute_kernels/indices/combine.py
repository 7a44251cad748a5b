# SPDX-License-Identifier: Apache-2.0
"""Kernel of combine_topk_swa_indices: one warp writes a segment of a row, groups * 32 * width columns.

    columns of a row    [0, n_c)  picks         [n_c, n_c + window)  gathered rows         [n_c + window, end)  -1
    a lane              `width` neighbouring columns of each group

Column j of the picks becomes column j of the result, so both are moved in the same runs wherever n_c lies; the parts
differ in what a column's value is. All that tells the parts apart is known per row. A row's picks are on their way
before its request is looked for.
"""

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
from cute_kernels.dsl.paging import LANES, Batch, Matrix, load_run, matrix, store_run, visible_entries
from cute_kernels.dsl.tensor import address, length
from cute_kernels.indices.call import CombineCall
from cute_kernels.indices.launching import MANY_ROWS, MOST_ROWS, WARPS, fake, group_width, instructions
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel


@dataclass(frozen=True)
class CombineKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width    neighbouring columns of a lane: 4 or 1
    groups   of 32 * width columns in a segment
    warps    per CTA
    """

    kernel_name: ClassVar[str] = "indices.combine"
    tuning: ClassVar[tuple[str, ...]] = ("groups",)
    width: int = 4
    groups: int = 5
    warps: int = WARPS

    @property
    def instructions(self) -> tuple[str, ...]:
        return instructions(self.arch, self.width)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        tensors = (fake(Int32, 2), fake(Int32, 1), fake(Int32, 1), fake(Int32, 1), fake(Int32, 2), fake(Int32, 1))
        numbers = (Int32(0), Int32(1), Int32(0), Int64(0), Int64(0))
        return CombineKernel(self), (*tensors, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class CombineKernel:
    """Entry point: (picks, query start locations, context lengths, gathered lengths, indices, lens, window, tokens per
    entry, picks per row, M, N, stream)."""

    def __init__(self, key: CombineKey) -> None:
        self.width, self.groups, self.warps = key.width, key.groups, key.warps
        self.segment = key.groups * LANES * key.width
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"combine_topk_swa_indices_c{key.width}g{key.groups}w{key.warps}"

    @cute.jit
    def __call__(
        self,
        picks: cute.Tensor,
        starts: cute.Tensor,
        seq_lens: cute.Tensor,
        gather_lens: cute.Tensor,
        indices: cute.Tensor,
        lens: cute.Tensor,
        window: Int32,
        ratio: Int32,
        topk: Int32,
        M: Int64,
        N: Int64,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        rows = length(picks, 0)
        segments = cute.ceil_div(length(indices, 1), self.segment)
        kernel = self.kernel(
            matrix(picks),
            Batch(address(starts), address(seq_lens), length(seq_lens, 0)),
            address(gather_lens),
            matrix(indices),
            address(lens),
            window,
            topk,
            M,
            N,
            cute.fast_divmod_create_divisor_v2(segments),
            cute.fast_divmod_create_divisor_v2(ratio),
        )
        ctas = cute.ceil_div(rows * segments, self.warps)
        kernel.launch(grid=[ctas, 1, 1], block=[self.warps * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        picks: Matrix,
        batch: Batch,
        gather_lens: Int64,
        indices: Matrix,
        lens: Int64,
        window: Int32,
        topk: Int32,
        M: Int64,
        N: Int64,
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

        if row < picks.rows:
            runs = []
            for group in range_constexpr(self.groups):
                column = first + group * (LANES * self.width)
                runs.append(load_run(column < topk, picks.row(row) + Int64(column) * 4, self.width))
            request, position, seq_len, gather_len = batch.find(row, gather_lens)
            visible = visible_entries(position, ratio)
            num_picks = cutlass.min(visible, topk)
            num_window = cutlass.min(position + 1, window)

            # first row of the request, and rows that int32 can name from there on
            base = Int64(request) * M
            named = Int64(2**31) - base
            most = Int32(self.between(cutlass.min(N, named), visible))
            # the window starts in row `offset` of the gathered tail, which lies in rows N .. M - 1 of the request
            tail_start = Int64(seq_len) - Int64(cutlass.min(gather_len, seq_len))
            offset = Int64(position + 1 - num_window) - tail_start
            skipped = Int32(self.between(-offset, num_window))
            begin = num_picks + skipped
            num_tail = cutlass.max(Int32(self.between(cutlass.min(M, named) - N - offset, num_window)) - skipped, 0)
            shift = Int32(base + N + offset - Int64(num_picks))

            for group in range_constexpr(self.groups):
                column = first + group * (LANES * self.width)
                picked = [ptx.value_below(pick, most, pick + Int32(base)) for pick in runs[group]]
                # nearly all groups hold nothing but picks
                if segment * self.segment + (group + 1) * (LANES * self.width) > num_picks:
                    tail = [
                        ptx.value_below(column + i - begin, num_tail, column + i + shift) for i in range(self.width)
                    ]
                    picked = [(picked[i] if column + i < num_picks else tail[i]) for i in range(self.width)]
                store_run(indices.row(row) + Int64(column) * 4, picked, column < indices.columns)
            ptx.store_global_s32(lens + Int64(row) * 4, num_picks + num_window, lane == 0 and segment == 0)

    def between(self, value: Any, most: Any) -> Any:
        """An int64 value, at least 0 and at most `most`."""
        return cutlass.max(cutlass.min(value, Int64(most)), Int64(0))


SHORT, LONG = 3, 5
"""Groups of a segment in calls of fewer than MANY_ROWS rows, and of more: on an H200, three were up to 5% faster with
1024 rows, and 512 picks with 8192 rows took 10.6 µs with five instead of 11.4 (perf/log/data/indices_4.txt)."""


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[CombineKey]:
    """Prefill of every kind of layer."""
    return [CombineKey(arch, width, groups) for width in (4, 1) for groups in (SHORT, LONG)]


@cache
def _key(device_index: int, width: int, groups: int) -> CombineKey:
    return CombineKey(arch_of(device_index), width, groups)


def why_not(call: CombineCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for name, value, limit in (
        ("the columns of out", call.out_indices.shape[1], MOST_ROWS),
        ("compress_ratio", call.compress_ratio, 2**31),
        ("M", call.M, 2**31),
    ):
        if value >= limit:
            return f"{name} must be below {limit}, got {value}"
    return ""


def launch(call: CombineCall) -> None:
    """Run the kernel on the current stream of the tensors' device."""
    if call.topk_indices.shape[0] == 0:
        return
    device_index = call.topk_indices.device.index
    # without picks nothing is read from topk_indices, whatever its address
    width = (
        group_width((call.topk,), call.topk_indices, call.out_indices)
        if call.topk
        else group_width((), call.out_indices)
    )
    launch_key(
        _key(device_index, width, SHORT if call.topk_indices.shape[0] < MANY_ROWS else LONG),
        device_index,
        call.topk_indices,
        call.query_start_loc,
        call.seq_lens,
        call.gather_lens,
        call.out_indices,
        call.out_lens,
        call.window_size,
        max(call.compress_ratio, 1),
        call.topk,
        call.M,
        call.N,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
