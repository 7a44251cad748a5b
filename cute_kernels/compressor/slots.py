# SPDX-License-Identifier: Apache-2.0
"""Kernel of get_compressed_slot_mapping: one lane finds the slot of one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.compressor.call import SlotsCall
from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import LANES, Batch, BlockTable, block_table
from cute_kernels.dsl.tensor import address, length
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

MOST_ENTRIES = 2**30
"""That the row of a block table may hold: int32 arithmetic on them is exact."""


@dataclass(frozen=True)
class SlotsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    warps   per CTA
    """

    kernel_name: ClassVar[str] = "compressor.slots"
    warps: int = 4

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("griddepcontrol",) if arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH else ()

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def vector(element_type: Any) -> Any:
            return make_fake_tensor(element_type, (cute.sym_int(),), stride=(1,))

        table = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        numbers = (Int64(0), Int32(0), Int32(1), Int32(1))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return SlotsKernel(self), (vector(Int64), vector(Int32), vector(Int32), table, *numbers, stream)


class SlotsKernel:
    """Entry point: (out, query start locations, context lengths, block table, address of the rows' own slots or 0,
    number of rows, rows of a page, tokens per entry, stream)."""

    def __init__(self, key: SlotsKey) -> None:
        self.threads = key.warps * LANES
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.name = f"get_compressed_slot_mapping_w{key.warps}"

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        starts: cute.Tensor,
        seq_lens: cute.Tensor,
        table: cute.Tensor,
        own_slots: Int64,
        rows: Int32,
        page_rows: Int32,
        ratio: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(
            address(out),
            length(out, 0),
            Batch(address(starts), address(seq_lens), length(seq_lens, 0)),
            block_table(table, page_rows, is_shift=False),
            own_slots,
            rows,
            cute.fast_divmod_create_divisor_v2(ratio),
        )
        kernel.launch(
            grid=[cute.ceil_div(length(out, 0), self.threads), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        out: Int64,
        out_rows: Int32,
        batch: Batch,
        table: BlockTable,
        own_slots: Int64,
        rows: Int32,
        ratio: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row = cta * self.threads + thread
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        own_slot = Int64(0)
        if row < rows and own_slots != 0:
            own_slot = ptx.load_global_s64_in_order(own_slots + Int64(row) * 8)
        request, position = batch.of_lanes(row)
        group, remainder = divmod(position + 1, ratio)
        closes = row < rows and position >= 0 and remainder == 0 and own_slot >= 0
        pages = table.of(request)
        slot = pages.slot(pages.look_up(group - 1, closes))
        ptx.store_global_s64(out + Int64(row) * 8, cutlass.max(slot, -1), row < out_rows)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[SlotsKey]:
    """Models with compressed layers, of whatever ratio."""
    return [SlotsKey(arch)] if set(config.compress_ratios) - {1} or latent_ratios(config) else []


@cache
def _key(device_index: int) -> SlotsKey:
    return SlotsKey(arch_of(device_index))


def why_not(call: SlotsCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    entries = max(call.block_table.shape[1], 1) * (call.block_size // call.compress_ratio)
    if call.block_size >= 2**31 or entries > MOST_ENTRIES:
        return (
            f"a row of block_table must have at most {MOST_ENTRIES} entries, got {entries}, and block_size be below "
            f"2^31, got {call.block_size}"
        )
    return ""


def launch(call: SlotsCall) -> None:
    """Run the kernel on the current stream of the tensors' device."""
    if call.out.shape[0] == 0:
        return
    device_index = call.out.device.index
    launch_key(
        _key(device_index),
        device_index,
        call.out,
        call.query_start_loc,
        call.seq_lens,
        call.block_table,
        0 if call.slot_mapping is None else call.slot_mapping.data_ptr(),
        call.num_tokens,
        call.block_size // call.compress_ratio,
        call.compress_ratio,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
