# SPDX-License-Identifier: Apache-2.0
"""A kernel of Hopper that multiplies operands as descriptors tell of them, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.runtime.key import KernelKey

THREADS = 128
ROWS = 64
SHARED_BYTES = 1 << 16


@dataclass(frozen=True)
class OperandsKey(KernelKey):
    """columns: of the products. name: "bf16" or "e4m3". Which operands are MN-major."""

    kernel_name: ClassVar[str] = "tests.wgmma_operands"
    name: str = "bf16"
    columns: int = 64
    a_is_mn: bool = False
    b_is_mn: bool = False

    @property
    def smem_bytes(self) -> int:
        return SHARED_BYTES

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("wgmma",)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        image, out = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(2))
        given = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=16)
        return Operands(self), (image, given, out, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


class Operands:
    """(image [SHARED_BYTES], descriptors of a and b at address 0 [products, 2], out fp32 [products, 64, columns], how
    many products, stream)."""

    def __init__(self, key: OperandsKey) -> None:
        self.key = key

    @cute.jit
    def __call__(
        self, image: cute.Tensor, given: cute.Tensor, out: cute.Tensor, count: Int32, stream: cuda.CUstream
    ) -> None:
        self.kernel.set_name_prefix("wgmma_operands", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(address(image), address(given), address(out), count)
        kernel.launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, image: Int64, given: Int64, out: Int64, count: Int32) -> None:
        columns = self.key.columns
        thread, _, _ = cute.arch.thread_idx()
        base = SmemAllocator().allocate(SHARED_BYTES, 1024).toint()
        for line in cutlass.range(SHARED_BYTES // (THREADS * 16), unroll=1):
            at = line * (THREADS * 16) + thread * 16
            ptx.store_shared_128(base + at, ptx.load_global_128(image + Int64(at)))
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        row = thread // 32 * 16 + thread % 32 // 4
        for number in cutlass.range(count, unroll=1):
            a, b = (ptx.load_global_s64(given + Int64(number * 16 + 8 * i)) + Int64(base >> 4) for i in range(2))
            results = self.multiply(a, b)
            target = out + (Int64(number) * ROWS + Int64(row)) * (columns * 4) + Int64(thread % 4 * 8)
            for block in range_constexpr(columns // 8):
                for half in range_constexpr(2):
                    low, high = (results[4 * block + 2 * half + i].bitcast(Int32) for i in range(2))
                    ptx.store_global_64(target + (half * 8 * columns * 4 + block * 32), low, high)

    def multiply(self, a: Any, b: Any) -> tuple[Any, ...]:
        key, held = self.key, self.key.columns // 2
        name, depth = ("bf16", 16) if key.name == "bf16" else ("e4m3", 32)
        majors = f", {int(key.a_is_mn)}, {int(key.b_is_mn)}" if key.name == "bf16" else ""
        registers = ", ".join(f"{{$w{i}}}" for i in range(held))
        found: tuple[Any, ...] = ptx.inline_ptx(
            "wgmma.fence.sync.aligned; "
            f"wgmma.mma_async.sync.aligned.m64n{key.columns}k{depth}.f32.{name}.{name} {{{registers}}}, "
            f"{{$r0}}, {{$r1}}, 0, 1, 1{majors}; "
            "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
            write_only_types=[Float32] * held,
            read_only_args=[a, b],
        )
        return found
