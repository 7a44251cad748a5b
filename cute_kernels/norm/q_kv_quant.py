# SPDX-License-Identifier: Apache-2.0
"""Kernel of fused_q_kv_rmsnorm_quant: norms of the latent query and of the KV vector, the query quantized to e4m3.

Lanes hold a row as rms.py has it, so a scale block of 128 columns is sixteen lanes wide:

    lane                  0 .. 15               16 .. 31
    vector i of a warp    scale block 2 v       scale block 2 v + 1      v: number of the vector in the row

    many tokens    a warp takes both vectors of a token, a CTA TOKENS tokens; their scales meet in shared memory, so
                   that they are stored as runs of [scale block, token]
    few tokens     a CTA takes one vector of a token, a warp 256 columns of it

Either way lanes' squares are added in the order in which one warp has them, so that a row's bits depend neither on the
form nor on the batch, and are those of fused_q_kv_rmsnorm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import lanes_max_bf16x2, lanes_sum
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.models import ModelConfig
from cute_kernels.norm.call import QKvQuantCall
from cute_kernels.norm.rms import VECTOR, WARP_COLUMNS, Row, why_not_matrix
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

TOKENS = 4
"""Of a CTA where a warp takes a token: fp32 scales of a block are stored 16 bytes at a time.

On an H200, q_lora_rank 1536, T = 8192, while CTAs took one of the two vectors: eight were 5% slower (18.1 µs instead of
17.2) and sixteen 12%. Both vectors in one warp, which has twice as much in flight, made it 15.1.
"""

FEW_TOKENS = 256
"""Tokens up to which a CTA takes one vector.

On an H200, q_lora_rank 1536: 1.39 instead of 1.59 µs for one token, 1.67 instead of 1.90 for 64, 4.03 instead of 3.97
for 1024, 21.4 instead of 15.1 for 8192 (perf/results/h200/fused_q_kv_rmsnorm_quant.json). 256 is from
before a warp took both vectors: the forms were equal near 384.
"""

BLOCK = 128
"""Columns that share a scale."""

ROW_ALIGNMENT = 4
"""The memory of the scales has this many tokens or a multiple."""

VECTOR_COLUMNS = 32 * VECTOR
"""Columns of a warp's vector: two scale blocks."""


@dataclass(frozen=True)
class NormQuantKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width            columns of the latent query, a multiple of 8
    fp32_weight      whether its weight is fp32; else it is bf16
    kv_width         columns of the KV vector, a multiple of 8
    kv_fp32_weight   the same of its weight
    has_query        whether the normed query is stored as bf16 too
    spread           whether a CTA takes a row; else a warp does
    """

    kernel_name: ClassVar[str] = "norm.q_kv_quant"
    tuning: ClassVar[tuple[str, ...]] = ("spread",)
    width: int
    fp32_weight: bool
    kv_width: int
    kv_fp32_weight: bool
    has_query: bool
    spread: bool

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return -(-max(self.width, self.kv_width) // VECTOR_COLUMNS) if self.spread else TOKENS

    @property
    def smem_bytes(self) -> int:
        return 4 * self.staged_floats

    @property
    def staged_floats(self) -> int:
        """In shared memory: lanes' sums of squares, or the scales of a CTA's rows."""
        return 32 * self.warps if self.spread else TOKENS * 2 * -(-self.width // VECTOR_COLUMNS)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "st.global.128", *convert.e4m3_instructions(self.arch), "st.global.64"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def rows(dtype: Any, width: int) -> Any:
            stride = cute.sym_int64(divisibility=VECTOR)
            return make_fake_tensor(
                dtype, (cute.sym_int(), width), stride=(stride, 1), assumed_align=VECTOR * dtype.width // 8
            )

        def weight(width: int, is_fp32: bool) -> Any:
            return make_fake_tensor(Float32 if is_fp32 else BFloat16, (width,), stride=(1,), assumed_align=16)

        scales = make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        query = rows(BFloat16, self.width) if self.has_query else None
        arguments = (
            *(rows(BFloat16, self.width), weight(self.width, self.fp32_weight)),
            *(rows(Float8E4M3FN, self.width), scales, query),
            *(rows(BFloat16, self.kv_width), weight(self.kv_width, self.kv_fp32_weight)),
            rows(BFloat16, self.kv_width),
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return NormQuantKernel(self), (*arguments, Float32(0), Boolean(False), stream)


class NormQuantKernel:
    """Entry point: (qr, its weight, codes, memory of the scales, bf16 query or None, kv, its weight, kv result, eps,
    whether to launch as a dependent of the kernel before, stream)."""

    def __init__(self, key: NormQuantKey) -> None:
        self.arch = key.arch
        self.warps = key.warps
        self.has_query = key.has_query
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.query, self.kv = (
            Row(width, is_fp32, key.warps, self.has_dependency, spread=key.spread)
            for width, is_fp32 in ((key.width, key.fp32_weight), (key.kv_width, key.kv_fp32_weight))
        )
        self.is_spread = key.spread
        self.staged_floats = key.staged_floats
        kinds = (("q", key.width, key.fp32_weight), ("kv", key.kv_width, key.kv_fp32_weight))
        self.name = "_".join(
            ["rms_norm_quant", *(f"{name}{width}_{'fp32' if is_fp32 else 'bf16'}" for name, width, is_fp32 in kinds)]
            + ["query"] * key.has_query
            + ["spread"] * key.spread
        )

    @cute.jit
    def __call__(
        self,
        qr: cute.Tensor,
        q_weight: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        query: cute.Tensor | None,
        kv: cute.Tensor,
        kv_weight: cute.Tensor,
        kv_out: cute.Tensor,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        query_rows = (Int64(0), Int64(0))
        if const_expr(self.has_query):
            query_rows = (address(query), stride_bytes(query, 0))
        kernel = self.kernel(
            address(qr),
            stride_bytes(qr, 0),
            address(q_weight),
            address(codes),
            stride_bytes(codes, 0),
            address(scales),
            stride_bytes(scales, 0),
            length(scales, 1),
            *query_rows,
            address(kv),
            stride_bytes(kv, 0),
            address(kv_weight),
            address(kv_out),
            stride_bytes(kv_out, 0),
            length(qr, 0),
            eps,
        )
        kernel.launch(
            grid=[length(qr, 0) * 2 if const_expr(self.is_spread) else cute.ceil_div(length(qr, 0), TOKENS), 1, 1],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        qr: Int64,
        qr_token: Int64,
        q_weight: Int64,
        codes: Int64,
        codes_token: Int64,
        scales: Int64,
        scale_block: Int64,
        padded_tokens: Int32,
        query: Int64,
        query_token: Int64,
        kv: Int64,
        kv_token: Int64,
        kv_weight: Int64,
        kv_out: Int64,
        kv_out_token: Int64,
        tokens: Int32,
        eps: Float32,
    ) -> None:
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        staged = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.staged_floats))
        if const_expr(self.has_dependency):
            # the product behind this kernel takes longer to begin than all that is done here
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.is_spread):
            token, lane = cta // 2, thread
            # neighbours in the grid take both vectors of a token, which are neighbours in memory
            if cta % 2 == 0:
                factors = self.query.load_weight(q_weight, lane)
                self.wait()
                words = self.query.load(qr + Int64(token) * qr_token, lane)
                scale = self.row_scale(self.query, words, lane, staged, eps)
                vectors = self.normed_query(words, factors, scale, lane, query + Int64(token) * query_token)
                exponents = self.exponents(vectors)
                self.store_codes(vectors, exponents, lane, codes + Int64(token) * codes_token)
                self.store_scale(exponents[0], lane, scales, scale_block, token, tokens, padded_tokens)
            else:
                factors = self.kv.load_weight(kv_weight, lane)
                self.wait()
                words = self.kv.load(kv + Int64(token) * kv_token, lane)
                scale = self.row_scale(self.kv, words, lane, staged, eps)
                self.kv.store(kv_out + Int64(token) * kv_out_token, lane, words, factors, scale, None)
        else:
            warp = cute.arch.make_warp_uniform(thread // 32)
            token, lane = cta * TOKENS + warp, thread % 32
            # rows past the end load the last row again, and store nothing
            source = Int64(cutlass.min(token, tokens - 1))
            factors, kv_factors = self.query.load_weight(q_weight, lane), self.kv.load_weight(kv_weight, lane)
            self.wait()
            kv_words = self.kv.load(kv + source * kv_token, lane)
            words = self.query.load(qr + source * qr_token, lane)
            # a branch keeps the loads together: the assembler would begin to sum before the last one is asked for
            if token < tokens:
                scale = self.row_scale(self.kv, kv_words, lane, staged, eps)
                self.kv.store(kv_out + Int64(token) * kv_out_token, lane, kv_words, kv_factors, scale, None)
                scale = self.row_scale(self.query, words, lane, staged, eps)
                vectors = self.normed_query(words, factors, scale, lane, query + Int64(token) * query_token)
                exponents = self.exponents(vectors)
                self.store_codes(vectors, exponents, lane, codes + Int64(token) * codes_token)
                for i in range_constexpr(self.query.vectors):
                    if lane % 16 == 0:
                        staged[(2 * i + lane // 16) * TOKENS + warp] = (exponents[i] << 23).bitcast(Float32)
            cute.arch.sync_threads()
            number, token = thread // TOKENS, cta * TOKENS + thread % TOKENS
            if number * BLOCK < self.query.width and token < padded_tokens:
                value = staged[thread].bitcast(Int32)
                target = scales + Int64(number) * scale_block + Int64(token) * 4
                # the tokens between the last one and the padded length get zeros
                ptx.store_global_s32(target, value if token < tokens else Int32(0))

    def wait(self) -> None:
        """Behind it lies everything that earlier kernels may write; weights are constant, and asked for before."""
        if self.has_dependency:
            cute.arch.griddepcontrol_wait()

    def row_scale(self, row: Row, words: Any, lane: Any, staged: Any, eps: Any) -> Any:
        """What a row is multiplied by. All threads of a CTA must call where it takes a row."""
        mine = row.squares(words, lane)
        if self.is_spread:
            mine = row.warp_order_sum(mine, lane, staged)
        return ptx.rsqrt(ptx.fma_rn(lanes_sum(mine), Float32(1.0 / row.width), eps))

    def normed_query(self, words: Any, factors: Any, scale: Any, lane: Any, target: Any) -> list[Any]:
        """A lane's vectors of the normed query, those beyond the row zero. Stored as bf16 too, if that is wanted."""
        vectors = []
        for i, loaded in enumerate(words):
            vector, inside = self.query.normed(loaded, factors[i], scale), self.query.is_inside(lane, i)
            if self.has_query:
                ptx.store_global_128(target + Int64(lane + i * self.query.step) * (2 * VECTOR), vector, inside)
            if inside is not None:
                vector = [Int32(cutlass.select_(inside, word, Int32(0))) for word in vector]
            vectors.append(vector)
        return vectors

    def store_codes(self, vectors: list[Any], exponents: list[Any], lane: Any, target: Any) -> None:
        for i, (vector, exponent) in enumerate(zip(vectors, exponents, strict=True)):
            factor = convert.ue8m0_inverse(exponent)
            ptx.store_global_64(
                target + Int64(lane + i * self.query.step) * VECTOR,
                convert.e4m3_from_bf16x4(vector[0], vector[1], factor, self.arch),
                convert.e4m3_from_bf16x4(vector[2], vector[3], factor, self.arch),
                self.query.is_inside(lane, i),
            )

    @cute.jit
    def store_scale(
        self, exponent: Any, lane: Any, scales: Any, scale_block: Any, token: Any, tokens: Any, padded_tokens: Any
    ) -> None:
        """Of a CTA's only row: a lane in sixteen stores the scale of its block."""
        target = scales + Int64(lane // 16) * scale_block + Int64(token) * 4
        is_mine = lane % 16 == 0 and lane * VECTOR < self.query.width
        ptx.store_global_s32(target, exponent << 23, is_mine)
        # the tokens between the last one and the padded length get zeros
        for i in range_constexpr(1, ROW_ALIGNMENT):
            is_padding = is_mine and token == tokens - 1 and token + i < padded_tokens
            ptx.store_global_s32(target + 4 * i, Int32(0), is_padding)

    def exponents(self, vectors: list[Any]) -> list[Any]:
        """ue8m0 bytes of the scale blocks that a lane's vectors are part of."""
        largest = []
        for vector in vectors:
            halves = convert.absmax_bf16x2(*vector)
            largest.append(ptx.max_f32(convert.bf16_low(halves), convert.bf16_high(halves)))
        found = []
        for i in range(0, len(largest) - 1, 2):
            # a lane's own power of two fits into half a word: four shuffles find the largest of two vectors
            low, high = convert.ue8m0_from_absmax_each(largest[i : i + 2], E4M3_MAX, OUTPUT_FLOOR, self.arch)
            both = lanes_max_bf16x2(low << 7 | high << 23, lanes=16)
            found += [both >> 7 & 0xFF, both >> 23]
        if len(largest) % 2:
            byte = convert.ue8m0_from_absmax(largest[-1], E4M3_MAX, OUTPUT_FLOOR)
            found.append(lanes_max_bf16x2(byte << 7, lanes=16) >> 7)
        return found


def keys_of(
    arch: str, width: int, fp32_weight: bool, kv_width: int, kv_fp32_weight: bool, has_query: bool
) -> tuple[NormQuantKey, NormQuantKey]:
    """The kernels for few and for many tokens."""
    few, many = (
        NormQuantKey(arch, width, fp32_weight, kv_width, kv_fp32_weight, has_query, spread) for spread in (True, False)
    )
    return few, many


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[NormQuantKey]:
    """Every layer with FP8 weights norms its latent query and its KV vector so; checkpoints have bf16 weights."""
    return [*keys_of(arch, config.q_lora_rank, False, HEAD_DIM, False, False)]


@cache
def _keys(device_index: int, *fields: Any) -> tuple[NormQuantKey, NormQuantKey]:
    return keys_of(arch_of(device_index), *fields)


def why_not(call: QKvQuantCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    for name, x, weight, result in (
        ("qr", call.qr, call.q_weight, call.qr_out),
        ("kv", call.kv, call.kv_weight, call.kv_out),
    ):
        if x.shape[1] > WARP_COLUMNS:
            return f"rows of {name} must have at most {WARP_COLUMNS} columns, got {x.shape[1]}"
        why = why_not_matrix(name, x, weight, x if result is None else result)
        if why:
            return why
    stride = call.out.stride(0) if call.out.shape[0] > 1 else 0
    if call.out.data_ptr() % VECTOR or stride % VECTOR:
        return (
            f"rows of out must be {VECTOR}-byte aligned, got address {call.out.data_ptr():#x} and strides "
            f"{tuple(call.out.stride())}"
        )
    if call.qr.shape[0] >= 2**30:
        return f"qr must have fewer than 2^30 rows, got {call.qr.shape[0]}"
    return ""


def launch(call: QKvQuantCall) -> None:
    """Run the kernel on the current stream of qr's device."""
    tokens = call.qr.shape[0]
    if tokens == 0:
        return
    device_index = call.qr.device.index
    kinds = (call.qr.shape[1], call.q_weight.element_size() == 4, call.kv.shape[1], call.kv_weight.element_size() == 4)
    key = _keys(device_index, *kinds, call.qr_out is not None)[tokens > FEW_TOKENS]
    launch_key(
        key,
        device_index,
        call.qr,
        call.q_weight,
        call.out,
        call.scale_out,
        call.qr_out,
        call.kv,
        call.kv_weight,
        call.kv_out,
        call.eps,
        call.use_pdl,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
