# SPDX-License-Identifier: Apache-2.0
"""The experiments as kernels: of `conversions`, of `copies`, and of `products`, where images of memories come in, the
instructions run, and images go out.
"""

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

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.tensor import address, boxes, gathered_rows
from cute_kernels.isa_probes import conversions, copies, products
from cute_kernels.isa_probes.copies import KNOWN_PAGES, KNOWN_ROWS, ROW_BYTES, TILE, Transfer
from cute_kernels.isa_probes.products import IMAGE_BYTES, IMAGES, ROUNDS, SHARED_BYTES, Copy, Experiment, Multiply
from cute_kernels.runtime.key import KernelKey

THREADS = 128


# ---- conversions


class ConversionKernel:
    """Entry point: (source [count, 2], out [count, words], count, stream): a thread converts a word."""

    def __init__(self, name: str) -> None:
        self.name, self.words = name, conversions.NAMES[name].words

    @cute.jit
    def __call__(self, source: cute.Tensor, out: cute.Tensor, count: Int32, stream: cuda.CUstream) -> None:
        self.kernel.set_name_prefix(f"fact_{self.name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(address(source), address(out), count)
        kernel.launch(grid=[cute.ceil_div(count, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: Int64, out: Int64, count: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        number = block * THREADS + thread
        if number < count:
            codes, scales = ptx.load_global_64_again(source + Int64(number) * 8)
            found = self.convert(codes, scales)
            for i in range_constexpr(self.words):
                ptx.store_global_s32(out + Int64(number) * (4 * self.words) + 4 * i, found[i])

    def convert(self, codes: Any, scales: Any) -> Any:
        if const_expr(self.name == "ue8m0"):
            return [ptx.bf16x2_of_ue8m0x2(codes, half) for half in range(2)]
        pair = ptx.bf16x2_of_ue8m0x2(scales, 0)
        factor = ptx.permute_bytes(pair, pair, 0x3232)
        return [ptx.multiply_bf16x2(pair, factor) for pair in convert.bf16_pairs_of_e4m3x4(codes)]


@dataclass(frozen=True)
class ConversionKey(KernelKey):
    """name: of a conversion."""

    kernel_name: ClassVar[str] = "isa_probes.conversions"
    name: str = ""

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        source, out = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(2))
        return ConversionKernel(self.name), (source, out, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


# ---- copies

DTYPES = {1: Uint8, 2: Uint16, 4: Int32}


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
            copy = gathered_rows(start, dtype, count, columns, stride, swizzle, width)
        else:
            layout = cute.make_layout((TILE, columns, count), stride=(stride, 1, TILE * stride))
            copy = boxes(cute.make_tensor(cute.recast_ptr(start, dtype=dtype), layout), TILE, columns, swizzle)
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


@dataclass(frozen=True)
class TransferKey(KernelKey):
    """name: of a transfer."""

    kernel_name: ClassVar[str] = "isa_probes.copies"
    name: str = ""

    @property
    def transfer(self) -> Transfer:
        return copies.NAMES[self.name]

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


# ---- products

LINE = THREADS * 16
"""Bytes that the threads copy at a time."""

STRIP = 32
"""Columns of tensor memory that a thread loads or stores at a time."""


class ProductKernel:
    """Entry point: (shared [blocks, SHARED_BYTES], tensor [blocks, 128, 512], out like tensor, stream), as int32."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment, self.blocks = experiment, experiment.blocks
        self.is_pair = experiment.blocks == 2

    @cute.jit
    def __call__(self, shared: cute.Tensor, tensor: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel.set_name_prefix(f"fact_{self.experiment.name}", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(address(shared), address(tensor), address(out))
        kernel.launch(grid=[self.blocks, 1, 1], block=[THREADS, 1, 1], cluster=[self.blocks, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, shared: Int64, tensor: Int64, out: Int64) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        image = smem.allocate(SHARED_BYTES, 1024).toint()
        done, full = (smem.allocate_array(Int64, 1) for _ in range(2))
        where = smem.allocate_array(Int32, 1).toint()
        if thread == 0:
            cute.arch.mbarrier_init(done, 1)
            cute.arch.mbarrier_init(full, self.blocks * (THREADS // 32))
        cute.arch.mbarrier_init_fence()
        if const_expr(self.is_pair):
            # a pair's allocation wants both blocks to be running
            self.synchronize()
        if warp == 0:
            ptx.allocate_tensor_memory(where, ptx.COLUMNS, self.blocks)
            ptx.relinquish_tensor_memory(self.blocks)
        # a handoff's rounds bring their own
        for line in cutlass.range(SHARED_BYTES // LINE if self.experiment.release == "" else 0, unroll=1):
            at = line * LINE + thread * 16
            ptx.store_shared_128(image + at, ptx.load_global_128(shared + Int64(block) * SHARED_BYTES + Int64(at)))
        cute.arch.fence_view_async_shared()
        ptx.fence_tensor_before()
        cute.arch.sync_threads()
        ptx.fence_tensor_after()
        lanes = (thread // 32) << 21
        row = (Int64(block) * ptx.LANES + Int64(thread)) * (ptx.COLUMNS * 4)
        for strip in cutlass.range(ptx.COLUMNS // STRIP, unroll=1):
            words: list[Any] = []
            for i in range_constexpr(STRIP // 4):
                words += ptx.load_global_128(tensor + row + Int64(strip * (STRIP * 4) + i * 16))
            ptx.store_tensor_memory(lanes + strip * STRIP, words)
        ptx.wait_tensor_stores()
        ptx.fence_tensor_before()
        self.synchronize()
        ptx.fence_tensor_after()
        if const_expr(self.experiment.release == ""):
            if (warp == 0) & (block == 0):
                self.do_all(image, done)
            ptx.wait_mbarrier(done.toint(), 0)
        else:
            for number in cutlass.range(ROUNDS, unroll=1):
                source = shared + Int64(block) * SHARED_BYTES + Int64(number % IMAGES * IMAGE_BYTES)
                for line in range_constexpr(IMAGE_BYTES // LINE):
                    at = line * LINE + thread * 16
                    ptx.store_shared_128(image + at, ptx.load_global_128(source + Int64(at)))
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if thread % 32 == 0:
                    self.arrive(full)
                if (warp == 0) & (block == 0):
                    ptx.wait_mbarrier_cluster(full.toint(), number & 1)
                    ptx.fence_tensor_after()
                    self.do_all(image, done)
                ptx.wait_mbarrier(done.toint(), number & 1)
        ptx.fence_tensor_after()
        for strip in cutlass.range(ptx.COLUMNS // STRIP, unroll=1):
            loaded = ptx.load_tensor_memory(lanes + strip * STRIP, STRIP, Int32)
            for i in range_constexpr(STRIP // 8):
                target = out + row + Int64(strip * (STRIP * 4) + i * 32)
                ptx.store_global_256(target, loaded[8 * i : 8 * i + 8])
        ptx.fence_tensor_before()
        self.synchronize()
        if warp == 0:
            ptx.free_tensor_memory(ptx.load_shared_s32(where), ptx.COLUMNS, self.blocks)

    def synchronize(self) -> None:
        """All threads of all blocks."""
        if self.is_pair:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def arrive(self, barrier: Any) -> None:
        """At a barrier of the even block, as kernels for pairs do."""
        if self.experiment.release == "cluster":
            ptx.arrive_cluster(ptx.pair_leader(barrier.toint()), "cluster")
        else:
            cute.arch.mbarrier_arrive(barrier, 0)

    def do_all(self, image: Any, done: Any) -> None:
        """All steps, by a thread of the warp; `done` says when they are over."""
        with cute.arch.elect_one():
            for step in self.experiment.steps:
                self.do(step, image)
            if const_expr(self.is_pair):
                ptx.commit_tensor_multicast(done.toint(), 3)
            else:
                ptx.commit_tensor(done.toint())

    def do(self, step: Multiply | Copy, image: Any) -> None:
        if isinstance(step, Copy):
            source = ptx.descriptor_at(step.source[0], image + step.source[1])
            ptx.copy_to_tensor_memory(step.column, source, step.shape, self.blocks)
            return
        in_tensor = isinstance(step.a, int)
        a = step.a if isinstance(step.a, int) else ptx.descriptor_at(step.a[0], image + step.a[1])
        b = ptx.descriptor_at(step.b[0], image + step.b[1])
        given: dict[str, Any] = {"kind": step.kind, "a_in_tensor_memory": in_tensor, "blocks": self.blocks}
        if step.scales is None:
            given["weight_stationary"] = step.weight_stationary
            ptx.tensor_mma(step.d, a, b, step.instruction, int(step.accumulate), **given)
        else:
            ptx.tensor_mma_scaled(step.d, a, b, step.instruction, *step.scales, int(step.accumulate), **given)


@dataclass(frozen=True)
class ProductKey(KernelKey):
    """name: of an experiment."""

    kernel_name: ClassVar[str] = "isa_probes.products"
    name: str = ""

    @property
    def experiment(self) -> Experiment:
        return products.NAMES[self.name]

    @property
    def smem_bytes(self) -> int:
        return SHARED_BYTES + 24

    @property
    def instructions(self) -> tuple[str, ...]:
        steps = self.experiment.steps
        found = [("tcgen05.cp" if isinstance(step, Copy) else "tcgen05.mma") for step in steps]
        return (*dict.fromkeys(found), "tcgen05.ld", "mbarrier")

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        shared, tensor, out = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in "sto")
        return ProductKernel(self.experiment), (shared, tensor, out, make_fake_stream(use_tvm_ffi_env_stream=True))
