# SPDX-License-Identifier: Apache-2.0
"""Kernel of quantize_fp8_1x128: rows of bf16 as e4m3 codes with one power-of-two scale per 128 columns.

A warp takes COLUMNS columns of one token, a CTA the same columns of TOKENS neighbouring tokens:

    lane               0 .. 15               16 .. 31
    vector i           scale block 2 i       scale block 2 i + 1      of the warp's columns, 8 columns a lane

so a scale block is sixteen lanes wide, and four shuffles find the scales of two vectors at once. Every lane rounds its
own maximum up to a power of two first, which fits into half a word; the largest of these is the block's scale. The CTA
stages its scales in shared memory and stores them as [scale block, token], four tokens in 16 bytes: the layout of an
FP8 GEMM's activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import lanes_max_bf16x2
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.linear.call import QuantizeCall
from cute_kernels.models import ModelConfig
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

TOKENS = 8
"""Of a CTA: a warp each."""

VECTOR = 8
"""bf16 columns that a lane loads at once."""

WARP_COLUMNS = 32 * VECTOR

BLOCK = 128
"""Columns that share a scale."""

VECTORS = 2
"""Of a lane: 512 columns a warp. Four gave nothing at large T and half as many CTAs at T = 1."""


@dataclass(frozen=True)
class QuantizeKey(KernelKey):
    """One kernel serves every size."""

    kernel_name: ClassVar[str] = "linear.quantize"

    @property
    def smem_bytes(self) -> int:
        return 4 * (VECTORS * WARP_COLUMNS // BLOCK) * TOKENS

    @property
    def instructions(self) -> tuple[str, ...]:
        return *convert.e4m3_instructions(self.arch), "ld.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        size, stride = cute.sym_int, cute.sym_int64
        x = make_fake_tensor(BFloat16, (size(), size()), stride=(stride(divisibility=VECTOR), 1), assumed_align=16)
        out = make_fake_tensor(Float8E4M3FN, (size(), size()), stride=(stride(divisibility=VECTOR), 1), assumed_align=8)
        scales = make_fake_tensor(Float32, (size(), size()), stride=(stride(), 1), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return QuantizeKernel(self), (x, out, scales, Boolean(False), stream)


class QuantizeKernel:
    """Entry point: (x, out, memory of the scales, whether to launch as a dependent of the kernel before, stream)."""

    def __init__(self, key: QuantizeKey) -> None:
        self.arch = key.arch
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.columns = VECTORS * WARP_COLUMNS
        self.blocks = self.columns // BLOCK

    @cute.jit
    def __call__(
        self, x: cute.Tensor, out: cute.Tensor, scales: cute.Tensor, use_pdl: Boolean, stream: cuda.CUstream
    ) -> None:
        self.kernel.set_name_prefix("quantize_fp8_1x128", remove_cutlass_symbol=True, keep_mangled_name=False)
        column_tiles = cute.ceil_div(length(x, 1), self.columns)
        kernel = self.kernel(
            address(x),
            stride_bytes(x, 0),
            length(x, 0),
            length(x, 1),
            address(out),
            stride_bytes(out, 0),
            address(scales),
            stride_bytes(scales, 0),
            length(scales, 1),
            cute.fast_divmod_create_divisor_v2(column_tiles),
        )
        kernel.launch(
            grid=[cute.ceil_div(length(x, 0), TOKENS) * column_tiles, 1, 1],
            block=[TOKENS * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        x_token: Int64,
        tokens: Int32,
        columns: Int32,
        out: Int64,
        out_token: Int64,
        scales: Int64,
        scale_block: Int64,
        padded_tokens: Int32,
        column_tiles: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        token_tile, column_tile = divmod(cta, column_tiles)
        token = token_tile * TOKENS + warp
        first = column_tile * self.columns + lane * VECTOR
        # tokens and columns past the end load others again; those columns count as zeros, and nothing of them is stored
        source = x + Int64(cutlass.min(token, tokens - 1)) * x_token
        inside = [first + i * WARP_COLUMNS < columns for i in range(VECTORS)]
        starts = [
            source + Int64(cutlass.select_(inside[i], first + i * WARP_COLUMNS, Int32(0))) * 2 for i in range(VECTORS)
        ]
        if const_expr(self.has_dependency):
            # the product behind this kernel takes longer to begin than all that is done here
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        loaded = [ptx.load_global_128_cached_in_order(start) for start in starts]

        staged = SmemAllocator().allocate_tensor(Float32, cute.make_layout((self.blocks, TOKENS)))
        for pair in range_constexpr(VECTORS // 2):
            words = [
                [Int32(cutlass.select_(inside[i], word, Int32(0))) for word in loaded[i]]
                for i in (2 * pair, 2 * pair + 1)
            ]
            largest = []
            for vector in words:
                halves = convert.absmax_bf16x2(*vector)
                largest.append(ptx.max_f32(convert.bf16_low(halves), convert.bf16_high(halves)))
            low, high = convert.ue8m0_from_absmax_each(tuple(largest), E4M3_MAX, OUTPUT_FLOOR, self.arch)
            # exponent bytes as bf16 powers of two: that of the first vector in the low half
            exponents = lanes_max_bf16x2(low << 7 | high << 23, lanes=16)
            for i in range_constexpr(2):
                byte = exponents >> 7 & 0xFF if const_expr(i == 0) else exponents >> 23
                factor = convert.ue8m0_inverse(byte)
                number = 2 * pair + i
                is_stored = token < tokens and inside[number]
                ptx.store_global_64(
                    out + Int64(token) * out_token + Int64(first + number * WARP_COLUMNS),
                    convert.e4m3_from_bf16x4(words[i][0], words[i][1], factor, self.arch),
                    convert.e4m3_from_bf16x4(words[i][2], words[i][3], factor, self.arch),
                    is_stored,
                )
                if lane % 16 == 0:
                    # the tokens between the last one and the padded length get zeros
                    scale = (byte << 23).bitcast(Float32)
                    staged[number * 2 + lane // 16, warp] = scale if token < tokens else Float32(0.0)
        cute.arch.sync_threads()
        index, member = thread // TOKENS, thread % TOKENS
        is_mine = thread < self.blocks * TOKENS
        value = staged[index if is_mine else 0, member].bitcast(Int32)
        token = token_tile * TOKENS + member
        number = column_tile * self.blocks + index
        target = scales + Int64(number) * scale_block + Int64(token) * 4
        ptx.store_global_s32(target, value, is_mine and number * BLOCK < columns and token < padded_tokens)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[QuantizeKey]:
    """Every FP8 linear's input that no kernel before it quantizes."""
    return [QuantizeKey(arch)]


def why_not(call: QuantizeCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    if call.x.shape[1] % VECTOR:
        return f"K must be a multiple of {VECTOR}, got {call.x.shape[1]}"
    for name, tensor, unit in (("x", call.x, 16), ("out", call.out, 8)):
        stride = tensor.stride(0) * tensor.element_size() if tensor.shape[0] > 1 else 0
        if tensor.data_ptr() % unit or stride % unit:
            return (
                f"rows of {name} must be {unit}-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if -(-call.x.shape[0] // TOKENS) * -(-call.x.shape[1] // WARP_COLUMNS) >= 2**31:
        return f"x must have fewer than 2^31 tiles of {TOKENS} x {WARP_COLUMNS}, got shape {tuple(call.x.shape)}"
    return ""


def launch(call: QuantizeCall) -> None:
    """Run the kernel on the current stream of x's device."""
    if call.x.shape[0] == 0 or call.x.shape[1] == 0:
        return
    launch_key(
        QuantizeKey(arch_of(call.x.device.index)), call.x.device.index, call.x, call.out, call.scale_out, call.use_pdl
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
