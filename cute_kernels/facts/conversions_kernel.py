"""The experiments of `conversions` as kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.facts.conversions import NAMES
from cute_kernels.runtime.key import KernelKey

THREADS = 128


@dataclass(frozen=True)
class ConversionKey(KernelKey):
    """name: of a conversion."""

    kernel_name: ClassVar[str] = "isa_probes.conversions"
    name: str = ""

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        source, out = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,), assumed_align=16) for _ in range(2))
        return ConversionKernel(self.name), (source, out, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True))


class ConversionKernel:
    """Entry point: (source [count, 2], out [count, words], count, stream): a thread converts a word."""

    def __init__(self, name: str) -> None:
        self.name, self.words = name, NAMES[name].words

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
