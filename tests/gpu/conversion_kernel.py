# SPDX-License-Identifier: Apache-2.0
"""A kernel that does nothing but convert: number formats, and the Hadamard transform in two layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, ptx, transforms
from cute_kernels.dsl.tensor import address
from cute_kernels.numerics import E2M1_MAX, E2M1_ROUNDINGS, E4M3_MAX
from cute_kernels.runtime.key import KernelKey

THREADS = 128

FLOOR = 1e-10

FORMS = (*E2M1_ROUNDINGS, "e4m3", "of e4m3", "scale e4m3", "scale e2m1", "products")
"""e2m1 codes of bf16 by both rules, e4m3 codes of bf16, bf16 of e4m3 codes, ue8m0 bytes of fp32 for both formats, and
products of bf16 with 0 in place of NaN."""


@dataclass(frozen=True)
class ConversionKey(KernelKey):
    """form: one of FORMS; "" is the Hadamard transform of rows that 128 / held lanes hold."""

    kernel_name: ClassVar[str] = "tests.conversion"
    form: str = ""
    held: int = 8

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        source, target = (make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,)) for _ in range(2))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return Conversion(self), (source, target, Float32(1), Int32(1), stream)


class Conversion:
    """(source, target, factor, blocks, stream): a thread takes 16 bytes and stores the words of what they become, or
    `held` fp32 columns."""

    def __init__(self, key: ConversionKey) -> None:
        self.arch = key.arch
        self.form = key.form
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
        if const_expr(self.form):
            found = self.converted(ptx.load_global_128(source + number * 16), factor)
            for i in range_constexpr(len(found)):
                ptx.store_global_s32(target + number * (len(found) * 4) + i * 4, found[i])
        else:
            start = source + number * (self.held * 4)
            words = [word for i in range(self.held // 4) for word in ptx.load_global_128(start + i * 16)]
            columns = transforms.hadamard([word.bitcast(Float32) for word in words], thread % 32)
            for i in range_constexpr(self.held // 4):
                four = [column.bitcast(Int32) for column in columns[4 * i : 4 * i + 4]]
                ptx.store_global_128(target + number * (self.held * 4) + i * 16, four)

    def converted(self, words: Any, factor: Any) -> list[Any]:
        """What becomes of four words."""
        if self.form in E2M1_ROUNDINGS:
            return [convert.e2m1_from_bf16s(words, factor, self.form, self.arch)]
        if self.form == "e4m3":
            return [convert.e4m3_from_bf16x4(words[i], words[i + 1], factor, self.arch) for i in (0, 2)]
        if self.form == "of e4m3":
            return [pair for word in words for pair in convert.bf16x4_from_e4m3(word, factor, self.arch)]
        if self.form == "products":
            bits = factor.bitcast(Int32)
            pair = ptx.permute_bytes(bits, bits, 0x3232)
            return [ptx.number_or_zero_bf16x2(ptx.multiply_bf16x2(word, pair)) for word in words]
        largest = E4M3_MAX if self.form == "scale e4m3" else E2M1_MAX
        numbers = [word.bitcast(Float32) for word in words]
        pairs = (numbers[:2], numbers[2:])
        return [b for pair in pairs for b in convert.ue8m0_from_absmax_each(pair, largest, FLOOR, self.arch)]
