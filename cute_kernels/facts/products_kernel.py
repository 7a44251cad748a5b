"""The experiments of `products` as kernels: images of memories come in, the instructions run, images go out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.facts.products import NAMES, SHARED_BYTES, Copy, Experiment, Multiply
from cute_kernels.runtime.key import KernelKey

THREADS = 128
LINE = THREADS * 16
"""Bytes that the threads copy at a time."""

STRIP = 32
"""Columns of tensor memory that a thread loads or stores at a time."""


@dataclass(frozen=True)
class ProductKey(KernelKey):
    """name: of an experiment."""

    kernel_name: ClassVar[str] = "isa_probes.products"
    name: str = ""

    @property
    def experiment(self) -> Experiment:
        return NAMES[self.name]

    @property
    def smem_bytes(self) -> int:
        return SHARED_BYTES + 16

    @property
    def instructions(self) -> tuple[str, ...]:
        steps = self.experiment.steps
        found = [("tcgen05.cp" if isinstance(step, Copy) else "tcgen05.mma") for step in steps]
        return (*dict.fromkeys(found), "tcgen05.ld", "mbarrier")

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        shared, tensor, out = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in "sto")
        return ProductKernel(self.experiment), (shared, tensor, out, make_fake_stream(use_tvm_ffi_env_stream=True))


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
        done = smem.allocate_array(Int64, 1)
        where = smem.allocate_array(Int32, 1).toint()
        if thread == 0:
            cute.arch.mbarrier_init(done, 1)
        cute.arch.mbarrier_init_fence()
        if warp == 0:
            ptx.allocate_tensor_memory(where, ptx.COLUMNS, self.blocks)
            ptx.relinquish_tensor_memory(self.blocks)
        for line in cutlass.range(SHARED_BYTES // LINE, unroll=1):
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
        if (warp == 0) & (block == 0):
            with cute.arch.elect_one():
                for step in const_expr(self.experiment.steps):
                    self.do(step, image)
                if const_expr(self.is_pair):
                    ptx.commit_tensor_multicast(done.toint(), 3)
                else:
                    ptx.commit_tensor(done.toint())
        ptx.wait_mbarrier(done.toint(), 0)
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
