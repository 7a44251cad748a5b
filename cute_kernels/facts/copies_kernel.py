"""The experiments of `copies` as kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8, Uint16, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx, tensor_maps
from cute_kernels.dsl.tensor import address
from cute_kernels.facts.copies import KNOWN_PAGES, KNOWN_ROWS, NAMES, ROW_BYTES, TILE, Transfer
from cute_kernels.runtime.key import KernelKey

THREADS = 128
DTYPES = {1: Uint8, 2: Uint16, 4: Int32}


@dataclass(frozen=True)
class TransferKey(KernelKey):
    """name: of a transfer."""

    kernel_name: ClassVar[str] = "isa_probes.copies"
    name: str = ""

    @property
    def transfer(self) -> Transfer:
        return NAMES[self.name]

    @property
    def smem_bytes(self) -> int:
        return self.transfer.shared_bytes + 8

    @property
    def instructions(self) -> tuple[str, ...]:
        return "tma.gather4" if self.transfer.is_gathered else "tma.load", "mbarrier"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        source, out = (make_fake_tensor(Uint8, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(2))
        numbers = make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=16)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return TransferKernel(self.transfer), (source, numbers, out, Int32(0), stream)


class TransferKernel:
    """Entry point: (source [ROWS * ROW_BYTES], numbers, out [blocks * shared_bytes], number of rows or pages, stream).
    Shared memory is full of ones before."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.known = KNOWN_ROWS if transfer.is_gathered else KNOWN_PAGES

    @cute.jit
    def __call__(
        self, source: cute.Tensor, numbers: cute.Tensor, out: cute.Tensor, count: Int32, stream: cuda.CUstream
    ) -> None:
        transfer = self.transfer
        self.kernel.set_name_prefix(f"fact_{transfer.name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        dtype, columns, swizzle = DTYPES[transfer.width], transfer.columns, transfer.swizzle
        memory: Any = source.iterator
        start, stride = memory + transfer.first, ROW_BYTES // transfer.width
        if const_expr(transfer.is_gathered):
            width = transfer.column + columns
            copy = tensor_maps.gathered_rows(start, dtype, count, columns, stride, swizzle, width)
        else:
            layout = cute.make_layout((TILE, columns, count), stride=(stride, 1, TILE * stride))
            copy = tensor_maps.boxes(
                cute.make_tensor(cute.recast_ptr(start, dtype=dtype), layout), TILE, columns, swizzle
            )
        kernel = self.kernel(copy, address(numbers), address(out))
        blocks = transfer.blocks
        kernel.launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], cluster=[blocks, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, copy: cute.CopyAtom, numbers: Int64, out: Int64) -> None:
        transfer = self.transfer
        size, is_pair = transfer.shared_bytes, transfer.blocks == 2
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        image = smem.allocate(size, 1024).toint()
        done = smem.allocate_array(Int64, 1)
        if thread == 0:
            cute.arch.mbarrier_init(done, transfer.blocks)
        cute.arch.mbarrier_init_fence()
        for line in range_constexpr(size // (THREADS * 16)):
            ptx.store_shared_128(image + line * (THREADS * 16) + thread * 16, [Int32(-1)] * 4)
        cute.arch.fence_view_async_shared()
        if const_expr(is_pair):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if thread == 0:
            map_ = ptx.tensor_map(copy)
            ptx.prefetch_tensor_map(map_)
            barrier = done.toint()
            if const_expr(is_pair):
                barrier = ptx.pair_leader(barrier)
                ptx.expect_cluster(barrier, size)
            else:
                cute.arch.mbarrier_arrive_and_expect_tx(done, size)
            if const_expr(transfer.is_gathered):
                for group in cutlass.range(TILE // 4, unroll=1):
                    rows = ptx.load_global_128(numbers + Int64(block) * (TILE * 4) + Int64(group * 16))
                    ptx.prefetch_rows_l2(map_, transfer.column, rows)
                    to = image + group * (4 * transfer.line)
                    ptx.gather_rows(to, map_, transfer.column, rows, barrier, blocks=transfer.blocks)
            else:
                places = ptx.load_global_128(numbers)
                for number in range_constexpr(2):
                    at = 0, places[2 * number], places[2 * number + 1]
                    ptx.copy_bulk_tensor(image + number * (TILE * transfer.line), map_, at, barrier)
        if const_expr(is_pair):
            if block == 0:
                ptx.wait_mbarrier_cluster(done.toint(), 0)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            ptx.wait_mbarrier(done.toint(), 0)
        for line in range_constexpr(size // (THREADS * 16)):
            at = line * (THREADS * 16) + thread * 16
            ptx.store_global_128(out + Int64(block) * size + Int64(at), ptx.load_shared_128(image + at))
