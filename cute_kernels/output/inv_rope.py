# SPDX-License-Identifier: Apache-2.0
"""Kernel of fused_inv_rope_fp8_quant, and of fused_inv_rope, its form without quantization: a warp takes some heads of
one token, of 512 bf16 columns each. A lane has two runs of eight columns, 16 bytes each:

    lane                 0 .. 15    16 .. 23     24 .. 31
    columns 8 * lane     chunk 0    chunk 1      chunk 1
    columns 256 + ...    chunk 2    chunk 3      chunk 3, rope

A chunk of 128 columns is sixteen lanes wide, in both halves of a head, so one sequence of four shuffles finds two
scales. Every lane rounds its own maximum up to a power of two first: the largest of these is the chunk's scale, and a
power of two fits into half a word, whatever fp32 number the maximum was.

The warps of a CTA take neighbouring tokens, because neighbouring tokens are neighbours in the memory of the scales:
they meet in shared memory, and the CTA stores whole 32-byte sectors. Of few rows no warp waits for another: the warps
of a CTA take heads of one token, and each stores its own scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
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
from cute_kernels.dsl.transforms import HALF_TABLE_BYTES, rotate_pair_back, table_row
from cute_kernels.formats import HEAD_DIM, ROPE_DIM
from cute_kernels.models import ModelConfig
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.output.call import QuantizedCall, RotatedCall
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

TOKENS = 8
"""Of a CTA, one for each of its warps: their fp32 scales of one chunk fill a sector of 32 bytes."""

FEW_ROWS = 2048
"""Heads of a call, of all tokens together, up to which a warp takes one, and a CTA those of one token: they are better
spread over more warps.

On an H200, 64 heads: 1.52 instead of 1.71 µs for one token, 2.98 instead of 3.41 for 13, where a CTA takes eight tokens
(perf/results/h200/fused_inv_rope_fp8_quant.json).
"""

EARLY_TOKENS = 12
"""Of a call of few rows, up to which the next kernel may start ahead of this one's wait; of more, once the loads are
under way.

On an H200, one behind the other, 64 heads: 1.52 instead of 1.65 µs for one token so, 2.18 instead of 3.00 for 13
otherwise. In layers, 8 heads: 20.2 instead of 21.6 µs for one token, 25.5 instead of 26.4 for 32 (perf/log/norms.md).
"""

ONE_TOKEN_WARPS = 4
"""Of a CTA that takes heads of one token."""

MANY_ROWS = 32768
"""Heads of a call from which a warp takes four; of fewer it takes two.

On an H200, one was the fastest with 64 and 128 heads, two with 4096 and 8192, and four with 65536 and more; the limits
lie between: perf/log/data/norms_inv_rope_3.txt.
"""

MOST_CHOICES = 1024
"""Kernels that are remembered by heads and tokens."""

HALF_ROW = 512
"""Bytes from a lane's first run of bf16 columns to its second."""

ROPE_LANE = 24
"""First lane whose second run of columns is rope."""


# ---- rotation and quantization


@cute.jit
def turn_back(lane: Any, words: Any, cos: Any, sin: Any) -> Any:
    """fp32 values of a lane's second run of columns, turned back where they are rope."""
    is_rope = lane >= ROPE_LANE
    values = []
    for i in range_constexpr(4):
        even, odd = convert.bf16_low(words[i]), convert.bf16_high(words[i])
        turned_even, turned_odd = rotate_pair_back(even, odd, cos[i].bitcast(Float32), sin[i].bitcast(Float32))
        values += [turned_even if is_rope else even, turned_odd if is_rope else odd]
    return values


@cute.jit
def rounded(lane: Any, words: Any, turned: Any) -> Any:
    """bf16 of a lane's second run of columns. What is not rope keeps its bits."""
    is_rope = lane >= ROPE_LANE
    result = []
    for i in range_constexpr(4):
        pair = ptx.bf16x2(turned[2 * i], turned[2 * i + 1])
        result.append(pair if is_rope else words[i])
    return result


@cute.jit
def scale_pair(first: Any, turned: Any, arch: cutlass.Constexpr) -> Any:
    """Scales of the two chunks that a lane has columns of, as bf16: that of its first run in the low half."""
    pairs = convert.absmax_bf16x2(*first)
    largest = ptx.max_f32(convert.bf16_low(pairs), convert.bf16_high(pairs))
    largest_turned = ptx.abs_f32(turned[0])
    for value in turned[1:]:
        largest_turned = ptx.max_f32(largest_turned, ptx.abs_f32(value))
    low, high = convert.ue8m0_from_absmax_each((largest, largest_turned), E4M3_MAX, OUTPUT_FLOOR, arch)
    return lanes_max_bf16x2(low << 7 | high << 23, lanes=16)


def store_codes(start: Any, first: Any, turned: Any, pair: Any, is_stored: Any, arch: str) -> None:
    """Store a lane's codes; `start` is where its first eight belong."""
    factor = convert.ue8m0_inverse(pair >> 7 & 0xFF)
    low = convert.e4m3_from_bf16x4(first[0], first[1], factor, arch)
    high = convert.e4m3_from_bf16x4(first[2], first[3], factor, arch)
    ptx.store_global_64(start, low, high, is_stored)
    factor = convert.ue8m0_inverse(pair >> 23)
    scaled = [value * factor for value in turned]
    ptx.store_global_64(start + HEAD_DIM // 2, ptx.e4m3x4(*scaled[:4]), ptx.e4m3x4(*scaled[4:]), is_stored)


@cute.jit
def scale_word(lane: Any, pair: Any) -> Any:
    """The four scales of a head as exponent bytes, in every lane."""
    mine = pair >> 7  # bytes 0 and 2
    other = cute.arch.shuffle_sync_bfly(mine, 16)
    is_upper = lane >= 16
    low = other if is_upper else mine
    high = mine if is_upper else other
    return ptx.permute_bytes(low, high, 0x6240)


# ---- kernel


class InvRopeKernel:
    """Entry point: (o, positions, cos and sin table, out, memory of the scales or None, heads per group, whether to
    launch as a dependent of the kernel before, stream)."""

    def __init__(self, key: InvRopeKey) -> None:
        self.arch = key.arch
        self.heads = key.heads
        self.words = key.words
        self.warps, self.one_token = key.warps, key.one_token
        self.is_quantized = key.scales != "none"
        self.is_packed = key.scales == "packed"
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.is_late = key.late
        self.name = f"fused_inv_rope_{key.scales}_h{key.heads}" + "_one_token" * key.one_token + "_late" * key.late

    @cute.jit
    def __call__(
        self,
        o: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        out: cute.Tensor,
        scales: cute.Tensor | None,
        heads_per_group: Int32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        head_ctas = cute.ceil_div(length(o, 1), self.heads * (self.warps if const_expr(self.one_token) else 1))
        nothing = (Int64(0), Int64(0), Int64(0), Int32(0))
        if const_expr(self.is_quantized):
            memory = (address(scales), stride_bytes(scales, 0), stride_bytes(scales, 1), length(scales, 2))
        else:
            memory = nothing
        kernel = self.kernel(
            address(o),
            stride_bytes(o, 0),
            stride_bytes(o, 1),
            length(o, 0),
            length(o, 1),
            address(positions),
            stride_bytes(positions, 0),
            address(table),
            stride_bytes(table, 0),
            length(table, 0),
            address(out),
            stride_bytes(out, 0),
            stride_bytes(out, 1),
            *memory,
            cute.fast_divmod_create_divisor_v2(heads_per_group),
            cute.fast_divmod_create_divisor_v2(head_ctas),
        )
        if const_expr(not self.one_token):
            token_ctas = cute.ceil_div(length(o, 0), TOKENS)
        elif const_expr(self.is_quantized):
            token_ctas = length(scales, 2)
        else:
            token_ctas = length(o, 0)
        kernel.launch(
            # where few rows are spread over CTAs, nothing is divided ahead of the first load
            grid=[head_ctas, token_ctas, 1] if const_expr(self.one_token) else [token_ctas * head_ctas, 1, 1],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        o: Int64,
        o_token: Int64,
        o_head: Int64,
        tokens: Int32,
        heads: Int32,
        positions: Int64,
        position_stride: Int64,
        table: Int64,
        table_stride: Int64,
        table_rows: Int32,
        out: Int64,
        out_token: Int64,
        out_group: Int64,
        scales: Int64,
        scale_group: Int64,
        scale_row: Int64,
        padded_tokens: Int32,
        group_heads: cute.FastDivmodDivisorV2,
        head_ctas: cute.FastDivmodDivisorV2,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, token, _ = cute.arch.block_idx()
        lane = thread % 32
        warp = cute.arch.make_warp_uniform(thread // 32)
        if const_expr(self.one_token):
            first_head = (cta * self.warps + warp) * self.heads
        else:
            token_cta, head_cta = divmod(cta, head_ctas)
            token, first_head = token_cta * TOKENS + warp, head_cta * self.heads
        # tokens and heads past the end load the last ones again, and store nothing
        source = Int64(cutlass.min(token, tokens - 1))
        starts = []
        for i in range_constexpr(self.heads):
            number = Int64(cutlass.min(first_head + i, heads - 1))
            starts.append(o + source * o_token + number * o_head + Int64(lane * 16))
        position_at = positions + source * position_stride
        if const_expr(self.has_dependency):
            # the product behind this kernel takes longer to begin than all that is done here
            if const_expr(not self.is_late):
                cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        # the loads from the table wait for the position, so it comes first. But of few rows the assembler then put what
        # waits for it ahead of the rows' loads: there it is last, and may be in L1, as other warps want it, too
        if const_expr(not self.one_token):
            position = ptx.load_global_s64_in_order(position_at)
        loaded = []
        for start in starts:
            # through L1, although nobody reads it again: leaving it out cost 6% (8192 tokens: 204 µs instead of 192)
            first = ptx.load_global_128_cached_in_order(start)
            loaded.append((first, ptx.load_global_128_cached_in_order(start + HALF_ROW)))
        if const_expr(self.one_token):
            position = ptx.load_global_s64_in_order(position_at, is_shared=True)
        # all lanes load what the rope lanes need: the same sectors
        angles = table + table_row(position, table_rows) * table_stride + Int64((lane % 8) * 16)
        cos = ptx.load_global_128_cached_in_order(angles)
        sin = ptx.load_global_128_cached_in_order(angles + HALF_TABLE_BYTES)
        if const_expr(self.is_late):
            cute.arch.griddepcontrol_launch_dependents()

        value = Int32(0)
        where = (out, out_token, out_group, group_heads, heads)
        if const_expr(self.one_token and not self.is_quantized):
            # no token is past the end, and without a branch it is known early where its heads go
            self.store_heads(lane, token, first_head, loaded, cos, sin, where)
        # a branch keeps the loads together: the assembler would begin with the first head before the last is loaded
        elif token < tokens:
            value = self.store_heads(lane, token, first_head, loaded, cos, sin, where)

        if const_expr(self.is_quantized):
            # this thread stores value `index` of a token
            index, is_mine = lane, lane < self.words
            if const_expr(not self.one_token):
                staged = SmemAllocator().allocate_tensor(Int32, cute.make_layout((self.words, TOKENS)))
                if is_mine:
                    staged[lane, warp] = value
                cute.arch.sync_threads()
                index, is_mine = thread // TOKENS, thread < self.words * TOKENS
                value = staged[index if is_mine else 0, thread % TOKENS]
                token = token_cta * TOKENS + thread % TOKENS
            per_head = 1 if const_expr(self.is_packed) else 4
            number = first_head + index // per_head
            group, offset = divmod(number, group_heads)
            row = offset * per_head + index % per_head
            target = scales + Int64(group) * scale_group + Int64(row) * scale_row + Int64(token) * 4
            # the tokens between the last one and the padded length get zeros
            ptx.store_global_s32(target, value, is_mine and number < heads and token < padded_tokens)

    @cute.jit
    def store_heads(self, lane: Any, token: Any, first_head: Any, loaded: Any, cos: Any, sin: Any, where: Any) -> Any:
        """Turn a warp's heads back and store them. Returns what the lane contributes to the scales."""
        out, out_token, out_group, group_heads, heads = where
        words = []
        for i in range_constexpr(self.heads):
            group, offset = divmod(first_head + i, group_heads)
            target = out + Int64(token) * out_token + Int64(group) * out_group
            words.append(self.store_head(lane, loaded[i], cos, sin, target, offset, first_head + i < heads))
        return self.lane_scale(lane, words) if const_expr(self.is_quantized) else Int32(0)

    @cute.jit
    def store_head(self, lane: Any, loaded: Any, cos: Any, sin: Any, target: Any, offset: Any, is_stored: Any) -> Any:
        """Turn one head back and store it as number `offset` of its group. Returns its scales as exponent bytes."""
        first, second = loaded
        turned = turn_back(lane, second, cos, sin)
        if const_expr(self.is_quantized):
            pair = scale_pair(first, turned, self.arch)
            start = target + Int64(offset) * HEAD_DIM + Int64(lane * 8)
            store_codes(start, first, turned, pair, is_stored, self.arch)
            word = scale_word(lane, pair)
        else:
            start = target + Int64(offset) * (HEAD_DIM * 2) + Int64(lane * 16)
            ptx.store_global_128(start, first, is_stored)
            ptx.store_global_128(start + HALF_ROW, rounded(lane, second, turned), is_stored)
            word = Int32(0)
        return word

    @cute.jit
    def lane_scale(self, lane: Any, words: Any) -> Any:
        """What lane `i` contributes to the scales: the word of head i, or chunk i % 4 of head i // 4 as fp32."""
        index = lane if const_expr(self.is_packed) else lane // 4
        word = words[0]
        for i in range_constexpr(1, self.heads):
            word = words[i] if index == i else word
        if const_expr(not self.is_packed):
            word = (word >> (lane % 4 * 8) & 0xFF) << 23
        return word


# ---- key


@dataclass(frozen=True)
class InvRopeKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    scales    "fp32": one for each chunk; "packed": a word of four exponent bytes for each head; "none": no
              quantization, the result is bf16
    heads     of a token per warp, all in flight together: 1, 2, 4 or 8; FEW_ROWS and MANY_ROWS choose
    one_token whether the warps of a CTA take heads of one token; else each takes another token
    late      whether the next kernel may start only once this one's loads are under way; EARLY_TOKENS chooses
    """

    kernel_name: ClassVar[str] = "output.inv_rope_quant"
    tuning: ClassVar[tuple[str, ...]] = ("heads", "one_token", "late")
    scales: str = "fp32"
    heads: int = 1
    one_token: bool = False
    late: bool = False

    @property
    def warps(self) -> int:
        """Of a CTA."""
        return ONE_TOKEN_WARPS if self.one_token else TOKENS

    @property
    def smem_bytes(self) -> int:
        return 0 if self.scales == "none" or self.one_token else self.words * TOKENS * 4

    @property
    def instructions(self) -> tuple[str, ...]:
        if self.scales == "none":
            return "ld.global.128", "st.global.128"
        return "ld.global.128", *convert.e4m3_instructions(self.arch), "st.global.64"

    @property
    def words(self) -> int:
        """Scales, or words of scales, that a warp makes."""
        return self.heads * (4 if self.scales == "fp32" else 1)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride(divisibility: int = 1) -> Any:
            return cute.sym_int64(divisibility=divisibility)

        def size() -> Any:
            return cute.sym_int()

        o = make_fake_tensor(BFloat16, (size(), size(), HEAD_DIM), stride=(stride(8), stride(8), 1), assumed_align=16)
        positions = make_fake_tensor(Int64, (size(),), stride=(stride(),))
        table = make_fake_tensor(Float32, (size(), ROPE_DIM), stride=(stride(4), 1), assumed_align=16)
        out_type = BFloat16 if self.scales == "none" else Float8E4M3FN
        out = make_fake_tensor(out_type, (size(), size(), size()), stride=(stride(8), stride(8), 1), assumed_align=8)
        scales = None
        if self.scales != "none":
            scale_type = Float32 if self.scales == "fp32" else Int32
            scales = make_fake_tensor(scale_type, (size(), size(), size()), stride=(stride(), stride(), 1))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return InvRopeKernel(self), (o, positions, table, out, scales, Int32(1), Boolean(False), stream)


@lru_cache(MOST_CHOICES)
def key_for(arch: str, scales: str, rows: int, tokens: int = 1) -> InvRopeKey:
    """The kernel that serves calls of this kind with `rows` heads, of all tokens together."""
    few = rows <= FEW_ROWS
    late = few and tokens > EARLY_TOKENS and scales != "none" and arch_number(arch) >= ptx.DEPENDENT_LAUNCH_ARCH
    return InvRopeKey(arch, scales, heads=1 if few else 2 if rows < MANY_ROWS else 4, one_token=few, late=late)


def keys_of(scales: str, arch: str) -> list[InvRopeKey]:
    """The kernels for every number of rows, each once: that of few rows with many tokens may be that with few."""
    calls = (1, 1), (FEW_ROWS, EARLY_TOKENS + 1), (FEW_ROWS + 1, 1), (MANY_ROWS, 1)
    return list(dict.fromkeys(key_for(arch, scales, *call) for call in calls))


def key_of_call(o: Any, scales: str) -> InvRopeKey:
    """The kernel that serves this call."""
    tokens, heads = o.shape[0], o.shape[1]
    return key_for(arch_of(o.device.index), scales, tokens * heads, tokens)


# ---- launch


def why_not_rotation(o: Any, cos_sin_cache: Any, out: Any) -> str:
    """Why these cannot be moved 16 bytes (codes: 8) at a time, or numbered in 32 bits; empty if they can."""
    for name, tensor, axes in (("o", o, (0, 1)), ("cos_sin_cache", cos_sin_cache, (0,)), ("out", out, (0, 1))):
        size = tensor.element_size()
        unit = 8 if size == 1 else 16
        strides = [tensor.stride(axis) * size for axis in axes if tensor.shape[axis] > 1]
        if tensor.data_ptr() % unit or any(stride % unit for stride in strides):
            return (
                f"rows of {name} must be {unit}-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if (o.shape[0] + TOKENS) * o.shape[1] >= 2**31 or cos_sin_cache.shape[0] >= 2**31:
        return "o must have fewer than 2^31 heads and cos_sin_cache fewer than 2^31 rows"
    return ""


def quantized_keys(config: ModelConfig, tp: int, arch: str) -> list[InvRopeKey]:
    """Every layer's output is quantized, with scales of either kind: the product that takes them chooses."""
    return [key for scales in ("fp32", "packed") for key in keys_of(scales, arch)]


def why_not_quantized(call: QuantizedCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return why_not_rotation(call.o, call.cos_sin_cache, call.out)


def launch_quantized(call: QuantizedCall) -> None:
    """Run the kernel on the current stream of o's device."""
    if call.o.shape[0] == 0:
        return
    key = key_of_call(call.o, "packed" if call.tma_aligned_scales else "fp32")
    launch_key(
        key,
        call.o.device.index,
        call.o,
        call.positions,
        call.cos_sin_cache,
        call.out,
        call.scale_out,
        call.heads_per_group,
        call.use_pdl,
    )


QUANTIZED = OpKernel(launch_quantized, why_not_quantized, quantized_keys)


def rotated_keys(config: ModelConfig, tp: int, arch: str) -> list[InvRopeKey]:
    """For checkpoints with a bf16 output projection, and for looking into the layers."""
    return keys_of("none", arch)


def why_not_rotated(call: RotatedCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return why_not_rotation(call.o, call.cos_sin_cache, call.out)


def launch_rotated(call: RotatedCall) -> None:
    """Run the kernel on the current stream of o's device."""
    if call.o.shape[0] == 0:
        return
    key = key_of_call(call.o, "none")
    launch_key(
        key,
        call.o.device.index,
        call.o,
        call.positions,
        call.cos_sin_cache,
        call.out,
        None,
        call.heads_per_group,
        call.use_pdl,
    )


ROTATED = OpKernel(launch_rotated, why_not_rotated, rotated_keys)
