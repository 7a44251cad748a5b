# SPDX-License-Identifier: Apache-2.0
"""The smallest whole kernel: the largest magnitude of each bf16 row of 512 columns (docs/adding_a_kernel.md).

python docs/examples/own_kernel.py      # compiles it for three architectures, without a GPU, and says what came out

   a warp takes a row         lane l has columns 8 l ... 8 l + 7 and 256 + 8 l ... 256 + 8 l + 7: 16 bytes each
   lanes                      exchange maxima of bf16 pairs, then lane 0 stores the larger half, as fp32
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.reduce import lanes_max_bf16x2
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.runtime.arch import arch_number
from cute_kernels.runtime.compile import KernelKey, compile_report

COLUMNS = 512
MAGNITUDES = 0x7FFF7FFF
"""A pair of bf16 without its signs. Magnitudes are ordered as their bits are."""


# ---- key


@dataclass(frozen=True)
class RowMaxKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    warps   per block
    """

    kernel_name: ClassVar[str] = "example.row_max"
    warps: int = 4

    @property
    def instructions(self) -> tuple[str, ...]:
        return ("ld.global.128",)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        rows = cute.sym_int()
        x = make_fake_tensor(BFloat16, (rows, COLUMNS), stride=(cute.sym_int64(divisibility=8), 1), assumed_align=16)
        out = make_fake_tensor(Float32, (rows,), stride=(1,), assumed_align=4)
        return RowMaxKernel(self), (x, out, make_fake_stream(use_tvm_ffi_env_stream=True))


# ---- kernel


class RowMaxKernel:
    """Entry point: (x, out, stream)."""

    def __init__(self, key: RowMaxKey) -> None:
        self.warps = key.warps
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream) -> None:
        rows = length(out, 0)
        kernel = self.kernel(address(x), stride_bytes(x, 0), address(out), rows)
        kernel.launch(grid=[cute.ceil_div(rows, self.warps), 1, 1], block=[self.warps * 32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, x: Int64, row_bytes: Int64, out: Int64, rows: Int32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = thread % 32
        row = block * self.warps + thread // 32
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()  # before the first read of what an earlier kernel may write

        # a warp past the end loads the last row again, and stores nothing: no address lies outside
        source = x + Int64(cutlass.min(row, rows - 1)) * row_bytes + Int64(lane * 16)
        words = [*ptx.load_global_128(source), *ptx.load_global_128(source + COLUMNS)]  # 256 columns are 512 bytes
        pair = words[0] & MAGNITUDES
        for word in words[1:]:
            pair = ptx.max_bf16x2(pair, word & MAGNITUDES)
        pair = lanes_max_bf16x2(pair)
        largest = cutlass.max(pair << 16, pair & Int32(0x7FFF0000))  # fp32 of either half
        ptx.store_global_s32(out + Int64(row) * 4, largest, lane == 0 and row < rows)


def main(argv: Sequence[str] | None = None) -> None:
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        report = compile_report(RowMaxKey(arch))
        assert not report.spill_stores + report.spill_loads
        print(f"{arch}: {report.registers} registers, no spills; {dict(report.instructions)}")


if __name__ == "__main__":
    main()
