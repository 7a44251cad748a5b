"""A kernel that does nothing but convert: e2m1 codes, and the Hadamard transform in two layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, hadamard, ptx
from cute_kernels.dsl.tensor import address
from cute_kernels.runtime.key import KernelKey

THREADS = 128


@dataclass(frozen=True)
class ConversionKey(KernelKey):
    """rounding: of e2m1 codes; "" is the Hadamard transform of rows that 128 / held lanes hold."""

    rounding: str = ""
    held: int = 8

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        source, target = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(2))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Conversion(self), (source, target, Float32(1), Int32(1), stream)


class Conversion:
    """(source, target, factor, blocks, stream): a thread takes 16 bytes of bf16 for a word of codes, or `held` fp32
    columns."""

    def __init__(self, key: ConversionKey) -> None:
        self.rounding = key.rounding
        self.held = key.held

    @cute.jit
    def __call__(
        self, source: cute.Tensor, target: cute.Tensor, factor: Float32, blocks: Int32, stream: cuda.CUstream
    ) -> None:
        self.kernel.set_name_prefix("conversion", remove_cutlass_symbol=True, keep_mangled_name=False)
        kernel = self.kernel(address(source), address(target), factor)
        kernel.launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, source: Int64, target: Int64, factor: Float32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        number = Int64(block * THREADS + thread)
        if const_expr(self.rounding):
            words = ptx.load_global_128(source + number * 16)
            ptx.store_global_s32(target + number * 4, convert.e2m1_from_bf16s(words, factor, self.rounding))
        else:
            start = source + number * (self.held * 4)
            words = [word for i in range(self.held // 4) for word in ptx.load_global_128(start + i * 16)]
            columns = hadamard.transform([word.bitcast(Float32) for word in words], thread % 32)
            for i in range_constexpr(self.held // 4):
                four = [column.bitcast(Int32) for column in columns[4 * i : 4 * i + 4]]
                ptx.store_global_128(target + number * (self.held * 4) + i * 16, four)
