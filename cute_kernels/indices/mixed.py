# SPDX-License-Identifier: Apache-2.0
"""Kernel of build_flashinfer_mixed_sparse_indices: one CTA writes one row.

    warp 0            columns [0, window)     decode: copied      prefill: slots of the last positions
    the other warps   the columns after them  decode: copied or   prefill: translated
                                              translated

The two parts of a row share nothing but its position, and so wait side by side.
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
from cute_kernels.dsl.paging import (
    LANES,
    Batch,
    BlockTable,
    Matrix,
    block_sum,
    block_table,
    load_run,
    matrix,
    store_run,
    store_window,
    visible_entries,
)
from cute_kernels.dsl.tensor import address, length
from cute_kernels.indices.call import MixedCall
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
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel


@dataclass(frozen=True)
class MixedKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width        neighbouring columns of a lane: 4 or 1
    is_shift     whether all pages have 2^n rows
    warps        that share the compressed columns
    groups       of warps * 32 * width compressed columns in a pass
    through_l1   whether what is moved may go through L1
    is_local     whether compressed indices of decode rows are request-local
    """

    kernel_name: ClassVar[str] = "indices.mixed"
    tuning: ClassVar[tuple[str, ...]] = ("warps", "groups", "through_l1")
    width: int = 4
    is_shift: bool = True
    warps: int = 4
    groups: int = 1
    through_l1: bool = False
    is_local: bool = False

    @property
    def smem_bytes(self) -> int:
        return (self.warps + 1) * 4

    @property
    def instructions(self) -> tuple[str, ...]:
        return instructions(self.arch, self.width)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        matrices = tuple(fake(Int32, 2) for _ in range(6))
        vectors = tuple(fake(Int32, 1) for _ in range(4))
        numbers = (Int64(0), Int64(0), Int32(1), Int32(1), Int32(1), Int32(0))
        return MixedKernel(self), (*matrices, *vectors, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


class MixedKernel:
    """Entry point: (decode window, decode compressed, prefill picks, window block table, compressed block table,
    indices, query start locations, context lengths, requests, lens, address of the decode rows' lens or 0, address of
    their valid tokens or 0, rows of a window page, rows of a compressed page, tokens per entry, picks per row,
    stream)."""

    def __init__(self, key: MixedKey) -> None:
        self.width, self.warps, self.groups, self.is_local = key.width, key.warps, key.groups, key.is_local
        self.group = key.warps * LANES * key.width
        self.is_shift = key.is_shift
        self.through_l1 = key.through_l1
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        local = "_local" if key.is_local else ""
        self.name = (
            f"build_flashinfer_mixed_sparse_indices_c{key.width}w{key.warps}g{key.groups}{local}"
            + "_l1" * key.through_l1
        )

    @cute.jit
    def __call__(
        self,
        decode_window: cute.Tensor,
        decode: cute.Tensor,
        prefill: cute.Tensor,
        window_table: cute.Tensor,
        table: cute.Tensor,
        indices: cute.Tensor,
        starts: cute.Tensor,
        seq_lens: cute.Tensor,
        requests: cute.Tensor,
        lens: cute.Tensor,
        decode_lens: Int64,
        valid: Int64,
        window_block_size: Int32,
        block_size: Int32,
        ratio: Int32,
        topk: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            matrix(decode_window),
            matrix(decode),
            matrix(prefill),
            block_table(window_table, window_block_size, self.is_shift),
            block_table(table, block_size, self.is_shift),
            matrix(indices),
            Batch(address(starts), address(seq_lens), length(seq_lens, 0)),
            address(requests),
            address(lens),
            decode_lens,
            valid,
            topk,
            cute.fast_divmod_create_divisor_v2(ratio),
        )
        kernel.launch(grid=[length(indices, 0), 1, 1], block=[(1 + self.warps) * LANES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        decode_window: Matrix,
        decode: Matrix,
        prefill: Matrix,
        window_table: BlockTable,
        table: BlockTable,
        indices: Matrix,
        batch: Batch,
        requests: Int64,
        lens: Int64,
        decode_lens: Int64,
        valid: Int64,
        topk: Int32,
        ratio: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        request = requests + Int64(row) * 4
        window = decode_window.columns
        target = indices.row(row)
        is_decode = row < decode_window.rows
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        # for the one thread that stores the length; a row without one counts as valid
        is_valid = ptx.load_global_bool_where(thread == 0 and is_decode and valid != 0, valid + Int64(row))
        has_length = thread == 0 and is_decode and decode_lens != 0
        given = ptx.load_global_s32_where(has_length, decode_lens + Int64(row) * 4)
        num_mapped, num_visible = Int32(0), Int32(0)
        if cute.arch.make_warp_uniform(thread // LANES) == 0:
            if is_decode:
                for column in range(thread * self.width, window, LANES * self.width):
                    source = decode_window.row(row) + Int64(column) * 4
                    run = load_run(column < window, source, self.width, self.through_l1)
                    store_run(target + Int64(column) * 4, run, column < window)
            else:
                owner = ptx.load_global_s32_in_order(request, is_shared=True)
                position = batch.position(row, owner)
                num_visible = cutlass.min(visible_entries(position, ratio), topk)
                count = cutlass.min(position + 1, window)
                store_window(target, window_table.of(owner), position, count, window, self.width)
        else:
            target += Int64(window) * 4
            columns = indices.columns - window
            source = decode.row(row) if is_decode else prefill.row(row - decode_window.rows)
            available = decode.columns if is_decode else prefill.columns
            for start in range((thread - LANES) * self.width, columns, self.groups * self.group):
                runs = []
                for group in range_constexpr(self.groups):
                    column = start + group * self.group
                    start_of_run = source + Int64(column) * 4
                    runs.append(load_run(column < available, start_of_run, self.width, self.through_l1))
                if is_decode and not self.is_local:
                    for group in range_constexpr(self.groups):
                        column = start + group * self.group
                        store_run(target + Int64(column) * 4, runs[group], column < columns)
                else:
                    # in here, because outside of the loop it would be waited for before the picks are under way
                    owner = ptx.load_global_s32_in_order(request, is_shared=True)
                    picks = [pick for run in runs for pick in run]
                    if not is_decode:
                        visible = visible_entries(batch.position(row, owner), ratio)
                        num_picks = cutlass.min(visible, topk)
                        for i in range_constexpr(len(picks)):
                            column = start + i // self.width * self.group + i % self.width
                            picks[i] = ptx.value_below(picks[i], visible if column < num_picks else Int32(0), picks[i])
                    pages = table.of(owner)
                    found = [pages.look_up(pick) for pick in picks]
                    for group in range_constexpr(self.groups):
                        column = start + group * self.group
                        slots = [pages.slot_index(one) for one in found[group * self.width : (group + 1) * self.width]]
                        store_run(target + Int64(column) * 4, slots, column < columns)
                        for slot in slots:
                            num_mapped += (slot >> 31) + 1

        count = num_visible
        if is_decode and not self.is_local:
            count = cutlass.max(cutlass.min(given, decode.columns), 0) if decode_lens != 0 else decode.columns
        if is_decode and self.is_local:
            num_mapped = block_sum(num_mapped, 1 + self.warps)
            count = num_mapped if is_valid != 0 else Int32(0)
        ptx.store_global_s32(lens + Int64(row) * 4, window + count, thread == 0)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[MixedKey]:
    """Every kind of layer: window alone, picks of the indexer (request-local), all entries (as slots)."""
    keys = []
    for width in (4, 1):
        columns = [0, config.index_topk, *(128 * 2**i for i in range(7))]
        keys += [MixedKey(arch, width, True, *shape) for count in columns for shape in shapes_for(count, width)]
        if 4 in config.compress_ratios:
            picks = shapes_for(config.index_topk, width)
            keys += [MixedKey(arch, width, True, *shape, is_local=True) for shape in picks]
    return list(dict.fromkeys(keys))


@cache
def _key(
    device_index: int, width: int, is_shift: bool, warps: int, groups: int, through_l1: bool, is_local: bool
) -> MixedKey:
    return MixedKey(arch_of(device_index), width, is_shift, warps, groups, through_l1, is_local)


def why_not(call: MixedCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for name, value, limit in (
        ("the columns of out", call.sparse_indices.shape[1], MOST_ROWS),
        ("compress_ratio", call.compress_ratio, 2**31),
    ):
        if value >= limit:
            return f"{name} must be below {limit}, got {value}"
    why = too_many_entries("swa_block_table", call.swa_block_table, call.swa_block_size)
    if why or call.compressed_block_table is None:
        return why
    return too_many_entries("compressed_block_table", call.compressed_block_table, call.compressed_block_size)


def launch(call: MixedCall) -> None:
    """Run the kernel on the current stream of the tensors' device."""
    if call.sparse_indices.shape[0] == 0:
        return
    device_index = call.sparse_indices.device.index
    # what is not there is never read: anything of the same kind stands in for it
    decode = (
        call.decode_swa_indices[:, :0] if call.decode_compressed_indices is None else call.decode_compressed_indices
    )
    table = call.swa_block_table[:, :0] if call.compressed_block_table is None else call.compressed_block_table
    read = [matrix for matrix in (call.decode_swa_indices, decode, call.prefill_topk_indices) if matrix.numel()]
    width = group_width((call.window_size, *(matrix.shape[1] for matrix in read)), *read, call.sparse_indices)
    compressed_rows = call.swa_block_size if call.compressed_block_table is None else call.compressed_block_size
    is_shift, pages = page_argument(call.swa_block_size, compressed_rows)
    launch_key(
        _key(
            device_index,
            width,
            is_shift,
            *shape_for(call.sparse_indices.shape[0], call.sparse_indices.shape[1] - call.window_size, width),
            call.decode_compressed_indices_are_local and decode.shape[1] > 0,
        ),
        device_index,
        call.decode_swa_indices,
        decode,
        call.prefill_topk_indices,
        call.swa_block_table,
        table,
        call.sparse_indices,
        call.query_start_loc,
        call.seq_lens,
        call.token_to_req_indices,
        call.sparse_topk_lens,
        0 if call.decode_compressed_topk_lens is None else call.decode_compressed_topk_lens.data_ptr(),
        0 if call.decode_is_valid_token is None else call.decode_is_valid_token.data_ptr(),
        *pages,
        max(call.compress_ratio, 1),
        call.topk,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
