# SPDX-License-Identifier: Apache-2.0
"""The smallest kernel: it writes a number that its code holds."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32


class NumberKernel:
    def __init__(self, number: int) -> None:
        self.number = number

    @cute.jit
    def __call__(self, out: cute.Tensor, stream: cuda.CUstream) -> None:
        self.kernel.set_name_prefix(f"number_{self.number}", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(out).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, out: cute.Tensor) -> None:
        out[0] = Int32(self.number)
