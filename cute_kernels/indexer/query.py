# SPDX-License-Identifier: Apache-2.0
"""Kernel of fused_indexer_q_rope_quant, of both formats (FP8, MXFP4): eight lanes take a head of a token, a warp four
heads at a time.

    columns of a head      0 .. 63, not rotated      64 .. 127, rotated in pairs
    lane c of its eight    8 * c .. + 7              64 + 8 * c .. + 7, so four pairs

So every lane rotates as much as every other, everything is read 16 bytes a lane, and whatever the heads of a token
number, a lane needs the same four cosines and sines for all of them. Both halves of a lane's columns belong to scale
blocks of four lanes (MXFP4) or are parts of the one block (FP8): one sequence of shuffles finds their maxima.

All columns of a warp's heads are on their way when it waits for the position of their token, and then for the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, ptx, reduce, transforms
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer.call import QueryFp8Call, QueryMxfp4Call
from cute_kernels.models import ModelConfig, has_indexer
from cute_kernels.numerics import CACHE_FLOOR, E2M1_MAX, E2M1_ROUNDINGS, E4M3_MAX
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

# ---- config

HEADS_AT_ONCE = 4
"""Heads that a warp holds one of in each of its lanes' groups of eight."""

HALF_HEAD = INDEX_DIM
"""Bytes from a head's first column to its first rotated one."""

SEVERAL_HEADS = 8192
"""Heads of a call, of all its tokens together, from which on a warp takes two groups of four. The bound lies between
calls of 4096 heads and of 65536: perf/log/indexer_query.md has the times of one, two and four groups."""

MANY_HEADS = 262144
"""Heads from which on queries go through L1, and a warp takes what the longest calls are fastest with; same note. The
bound lies between calls of 65536 heads and of 2097152."""

SIZES = (0, SEVERAL_HEADS, MANY_HEADS)
"""Numbers of heads that have kernels of their own, and all from there to the next."""


# ---- tokens and their heads


class Queries(NamedTuple):
    """What the kernel takes, in plain numbers: strides in bytes, `units` warps with `parts` of them to a token."""

    positions: Int64
    position_bytes: Int64
    q: Int64
    q_token: Int64
    q_head: Int64
    units: Int32
    heads: Int32
    parts: cute.FastDivmodDivisorV2
    table: Int64
    table_stride: Int64
    table_rows: Int64
    weights: Int64
    weights_stride: Int64
    softmax_scale: Float32
    head_scale: Float32
    codes: Int64
    codes_token: Int64
    codes_head: Int64
    scales: Int64
    scales_stride: Int64
    out: Int64
    out_stride: Int64
    round_weights: Boolean
    floor: Float32


def make_queries(
    positions: Any,
    q: Any,
    table: Any,
    weights: Any,
    results: Any,
    round_weights: Any,
    groups: int,
    floor: Any = CACHE_FLOOR,
) -> Queries:
    """From an entry point's arguments to what its kernel takes, for warps of `groups` groups of heads.

    table     address, row stride and rows
    weights   address, row stride and the two factors
    results   codes: address, token and head stride; scales: address and row stride; scaled weights: likewise
    floor     smallest absmax of a block of e2m1 codes
    """
    heads = length(q, 1)
    parts = cute.ceil_div(heads, HEADS_AT_ONCE * groups)
    return Queries(
        *(address(positions), stride_bytes(positions, 0), address(q), stride_bytes(q, 0), stride_bytes(q, 1)),
        *(length(q, 0) * parts, heads, cute.fast_divmod_create_divisor_v2(parts)),
        *(*table, *weights, *results, round_weights, Float32(floor)),
    )


# ---- kernel


class QueryKernel:
    """Entry point: (positions, q; address, row stride in bytes and rows of the table; address and row stride of the
    weights; two factors; address, token and head stride of the codes; address and row stride of the scales, which FP8
    does not have; address and row stride of the scaled weights; whether fp32 weights are rounded to bf16 first;
    smallest absmax of a block of e2m1 codes; use_pdl; stream).

    early   positions and angles (fp32) are read before the wait for the kernel ahead, which does not write them"""

    def __init__(self, key: QueryKey, early: bool = False) -> None:
        self.arch = key.arch
        self.rounding = key.rounding
        self.transformed = key.transformed
        self.table_bf16 = key.table_bf16
        self.weights_bf16 = key.weights_bf16
        self.out_bf16 = key.out_bf16
        self.groups = key.groups
        self.through_l1 = key.through_l1
        self.warps = key.warps
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.early = early and self.has_dependency
        kind = f"mxfp4_{key.rounding}" if key.rounding else "fp8"
        self.name = (
            f"fused_indexer_q_rope_quant_{kind}_g{key.groups}w{key.warps}"
            + "_l1" * key.through_l1
            + "_hadamard" * key.transformed
        )

    @cute.jit
    def __call__(
        self,
        positions: cute.Tensor,
        q: cute.Tensor,
        table: Int64,
        table_stride: Int64,
        table_rows: Int64,
        weights: Int64,
        weights_stride: Int64,
        softmax_scale: Float32,
        head_scale: Float32,
        codes: Int64,
        codes_token: Int64,
        codes_head: Int64,
        scales: Int64,
        scales_stride: Int64,
        out: Int64,
        out_stride: Int64,
        round_weights: Boolean,
        floor: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        queries = make_queries(
            positions,
            q,
            (table, table_stride, table_rows),
            (weights, weights_stride, softmax_scale, head_scale),
            (codes, codes_token, codes_head, scales, scales_stride, out, out_stride),
            round_weights,
            self.groups,
            floor,
        )
        ctas = cute.ceil_div(queries.units, self.warps)
        self.kernel(queries).launch(
            grid=[ctas, 1, 1],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(self, queries: Queries) -> None:
        cta, _, _ = cute.arch.block_idx()
        self.run(cta, queries)

    @cute.jit
    def run(self, cta: Int32, queries: Queries) -> None:
        """What block number `block` does."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        c = lane % 8
        number = cta * self.warps + cute.arch.make_warp_uniform(thread // 32)
        # warps past the end load what the last one loads, and store nothing
        here = number < queries.units
        token, part = divmod(cutlass.min(number, queries.units - 1), queries.parts)
        end = queries.heads if here else Int32(0)
        token = Int64(token)
        first = part * (HEADS_AT_ONCE * self.groups) + lane // 8
        # lane c of each eight has the weight of its head in group c, and there may be fewer groups than lanes
        mine = first + cutlass.min(c, self.groups - 1) * HEADS_AT_ONCE
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
            cos, sin = self.load_angles(self.angles_row(queries, token), c)
            cute.arch.griddepcontrol_wait()
        elif const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        loaded = []
        for i in range_constexpr(self.groups):
            head = cutlass.min(first + i * HEADS_AT_ONCE, queries.heads - 1)
            start = queries.q + token * queries.q_token + Int64(head) * queries.q_head + Int64(c * 16)
            low = ptx.load_global_128_in_order(start, self.through_l1)
            loaded.append((low, ptx.load_global_128_in_order(start + HALF_HEAD, self.through_l1)))
        weight = self.load_weight(
            queries.weights + token * queries.weights_stride, cutlass.min(mine, queries.heads - 1)
        )
        # the load that others wait for comes last: what waits cannot hold up a load that is under way
        if const_expr(not self.early):
            cos, sin = self.load_angles(self.angles_row(queries, token), c)

        shared = Int32(0)
        for i in range_constexpr(self.groups):
            head = first + i * HEADS_AT_ONCE
            straight, turned = list(loaded[i][0]), self.rotate(loaded[i][1], cos, sin)
            if const_expr(self.transformed):
                straight, turned = self.transform(straight, turned, lane)
            target = queries.codes + token * queries.codes_token + Int64(head) * queries.codes_head
            store = self.store_mxfp4 if const_expr(self.rounding) else self.store_fp8
            scale = store(straight, turned, c, target, head < end, queries.floor)
            shared = scale if c == i else shared
        if const_expr(not self.weights_bf16):
            rounded = convert.bf16_low(ptx.bf16x2(weight, weight))
            weight = rounded if queries.round_weights else weight
        is_mine = c < self.groups and mine < end
        if const_expr(self.rounding):
            ptx.store_global_s32(queries.scales + token * queries.scales_stride + Int64(mine) * 4, shared, is_mine)
        else:
            weight = ptx.mul_rn(weight, (shared << 23).bitcast(Float32))
        weight = ptx.mul_rn(ptx.mul_rn(weight, queries.softmax_scale), queries.head_scale)
        self.store_weight(queries.out + token * queries.out_stride, mine, weight, is_mine)

    def load_weight(self, row: Any, head: Any) -> Any:
        if self.weights_bf16:
            return convert.bf16_low(ptx.load_global_u16_in_order(row + Int64(head) * 2))
        return ptx.load_global_s32_in_order(row + Int64(head) * 4).bitcast(Float32)

    def store_weight(self, row: Any, head: Any, weight: Any, predicate: Any) -> None:
        if self.out_bf16:
            ptx.store_global_16(row + Int64(head) * 2, ptx.bf16x2(weight, weight), predicate)
        else:
            ptx.store_global_s32(row + Int64(head) * 4, weight.bitcast(Int32), predicate)

    def angles_row(self, queries: Queries, token: Any) -> Any:
        """Address of a token's row of the table."""
        position = ptx.load_global_s64_in_order(queries.positions + token * queries.position_bytes)
        return queries.table + transforms.table_row(position, queries.table_rows) * queries.table_stride

    def load_angles(self, row: Any, c: Any) -> tuple[list[Any], list[Any]]:
        """The cosines and the sines of a lane's four pairs."""
        if self.table_bf16:
            pairs = ptx.load_global_64_again(row + Int64(c * 8))
            more = ptx.load_global_64_again(row + Int64(c * 8) + transforms.HALF_TABLE_BYTES // 2)
            return self.floats(pairs), self.floats(more)
        # ahead of the wait: the assembler must not move them behind it
        load = ptx.load_global_128_cached_in_order if self.early else ptx.load_global_128_again
        cos = load(row + Int64(c * 16))
        sin = load(row + Int64(c * 16) + transforms.HALF_TABLE_BYTES)
        return [word.bitcast(Float32) for word in cos], [word.bitcast(Float32) for word in sin]

    def floats(self, words: Any) -> list[Any]:
        """The fp32 values of bf16 pairs."""
        return [half(word) for word in words for half in (convert.bf16_low, convert.bf16_high)]

    def rotate(self, words: Any, cos: list[Any], sin: list[Any]) -> list[Any]:
        """Four rotated pairs, rounded to bf16."""
        return [
            ptx.bf16x2(*transforms.rotate_pair(convert.bf16_low(word), convert.bf16_high(word), cos[i], sin[i]))
            for i, word in enumerate(words)
        ]

    def transform(self, low: Any, high: Any, lane: Any) -> tuple[list[Any], list[Any]]:
        """The Hadamard transform of a head, rounded to bf16."""
        columns = transforms.hadamard(self.floats([*low, *high]), lane, run=8)
        words = [ptx.bf16x2(columns[i], columns[i + 1]) for i in range(0, len(columns), 2)]
        return words[:4], words[4:]

    def store_fp8(self, low: Any, high: Any, c: Any, target: Any, predicate: Any, _floor: Any) -> Any:
        """Store a lane's codes. Returns the scale byte of its head. The floor is that of e2m1 codes."""
        largest = ptx.max_bf16x2(convert.absmax_bf16x2(*low), convert.absmax_bf16x2(*high))
        largest = reduce.lanes_max_bf16x2(largest, 8)
        largest = ptx.max_f32(convert.bf16_low(largest), convert.bf16_high(largest))
        byte = convert.ue8m0_from_absmax(largest, E4M3_MAX, CACHE_FLOOR)
        factor = convert.ue8m0_inverse(byte)
        for words, offset in ((low, 0), (high, INDEX_DIM // 2)):
            ptx.store_global_64(
                target + Int64(c * 8 + offset),
                convert.e4m3_from_bf16x4(words[0], words[1], factor, self.arch),
                convert.e4m3_from_bf16x4(words[2], words[3], factor, self.arch),
                predicate,
            )
        return byte

    def store_mxfp4(self, low: Any, high: Any, c: Any, target: Any, predicate: Any, floor: Any) -> Any:
        """Store a lane's codes. Returns the four scale bytes of its head, right in the first four of its lanes."""
        a, b = convert.absmax_bf16x2(*low), convert.absmax_bf16x2(*high)
        # one word per lane: maximum of its lower block below, of the higher one above
        largest = ptx.max_bf16x2(ptx.permute_bytes(a, b, 0x5410), ptx.permute_bytes(a, b, 0x7632))
        largest = reduce.lanes_max_bf16x2(largest, 4)
        halves = (half(largest) for half in (convert.bf16_low, convert.bf16_high))
        scales = convert.ue8m0_from_absmax_each(halves, E2M1_MAX, floor, self.arch)
        bytes_ = []
        for byte, words, offset in zip(scales, (low, high), (0, INDEX_DIM // 4), strict=True):
            codes = convert.e2m1_from_bf16s(words, convert.ue8m0_inverse(byte), self.rounding, self.arch)
            ptx.store_global_s32(target + Int64(c * 4 + offset), codes, predicate)
            bytes_.append(byte)
        pair = bytes_[0] | (bytes_[1] << 16)
        return pair | (cute.arch.shuffle_sync_bfly(pair, 4) << 8)


# ---- key


@dataclass(frozen=True)
class QueryKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    rounding       of MXFP4 codes, one of numerics.E2M1_ROUNDINGS; "" for FP8
    transformed    whether a Hadamard transform comes before the quantization
    table_bf16     dtype of cosines and sines: bf16, or else fp32
    weights_bf16   dtype of the heads' weights, likewise
    out_bf16       dtype of the scaled weights, likewise
    groups         of four heads per warp, all in flight together
    through_l1     whether queries may go through L1
    warps          per block

    key_for chooses; perf/log/indexer_query.md has the times.
    """

    kernel_name: ClassVar[str] = "indexer.query"
    tuning: ClassVar[tuple[str, ...]] = ("groups", "through_l1")
    rounding: str = ""
    transformed: bool = False
    table_bf16: bool = False
    weights_bf16: bool = True
    out_bf16: bool = False
    groups: int = 2
    through_l1: bool = False
    warps: int = 4

    @property
    def instructions(self) -> tuple[str, ...]:
        if self.rounding:
            return "ld.global.128", *convert.e2m1_instructions(self.arch)
        return "ld.global.128", *convert.e4m3_instructions(self.arch), "st.global.64"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        positions = make_fake_tensor(Int64, (cute.sym_int(),), stride=(cute.sym_int64(),))
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        q = make_fake_tensor(BFloat16, (cute.sym_int(), cute.sym_int(), INDEX_DIM), stride=strides)
        table, weights, codes = (Int64(0), Int64(0), Int64(1)), (Int64(0), Int64(0)), (Int64(0), Int64(0), Int64(0))
        scales, out, factors = (Int64(0), Int64(0)), (Int64(0), Int64(0)), (Float32(1), Float32(1))
        numbers = (*table, *weights, *factors, *codes, *scales, *out, Boolean(False), Float32(0), Boolean(False))
        return QueryKernel(self), (positions, q, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


def size_of(heads: int) -> int:
    """The one of SIZES that a call with so many heads in all belongs to."""
    return max(size for size in SIZES if size <= heads)


def key_for(
    arch: str, rounding: str, transformed: bool, size: int, formats: tuple[bool, bool, bool] = (False, True, False)
) -> QueryKey:
    """The kernel that serves calls of this size; formats: whether table, weights and scaled weights are bf16."""
    is_long = size == MANY_HEADS
    groups = 1 if size == 0 else 4 if is_long and (rounding or transformed) else 2
    return QueryKey(arch, rounding, transformed, *formats, groups=groups, through_l1=is_long)


def keys(arch: str, rounding: str, transformed: bool) -> list[QueryKey]:
    """The kernels of a model's layers: cosines and sines in fp32, weights in bf16 or as an fp32 GEMM leaves them, few
    tokens or many."""
    formats = [(False, weights_bf16, False) for weights_bf16 in (True, False)]
    return [key_for(arch, rounding, transformed, size, each) for each in formats for size in SIZES]


@cache
def _key(
    device_index: int, rounding: str, transformed: bool, size: int, table_bytes: int, weight_bytes: int, out_bytes: int
) -> QueryKey:
    formats = (table_bytes == 2, weight_bytes == 2, out_bytes == 2)
    return key_for(arch_of(device_index), rounding, transformed, size, formats)


# ---- launch


def why_not(call: QueryFp8Call | QueryMxfp4Call) -> str:
    """Why the kernel cannot take a (checked) call; empty if it can."""
    index_q, table = call.index_q, call.index_q_cos_sin_cache
    codes_alignment = 4 if call.e2m1_rounding else 8
    for name, tensor, what, alignment in (
        ("index_q", index_q, "heads", 16),
        ("index_q_cos_sin_cache", table, "rows", 4 * table.element_size()),
        ("q_quant", call.q_quant, "heads", codes_alignment),
    ):
        size = tensor.element_size()
        strides = [tensor.stride(axis) * size for axis in range(tensor.dim() - 1) if tensor.shape[axis] > 1]
        if tensor.data_ptr() % alignment or any(stride % alignment for stride in strides):
            return (
                f"{what} of {name} must be {alignment}-byte aligned, got address {tensor.data_ptr():#x} and "
                f"strides {tuple(tensor.stride())}"
            )
    if index_q.shape[0] * max(index_q.shape[1], HEADS_AT_ONCE) >= 2**31:
        return f"there must be fewer than 2^31 heads, got {index_q.shape[0]} x {index_q.shape[1]}"
    return ""


def key_of(call: QueryFp8Call | QueryMxfp4Call) -> QueryKey:
    tensors = call.index_q_cos_sin_cache, call.index_weights, call.weights_out
    sizes = (tensor.element_size() for tensor in tensors)
    size = size_of(call.index_q.shape[0] * call.index_q.shape[1])
    return _key(call.index_q.device.index, call.e2m1_rounding, call.index_hadamard, size, *sizes)


def arguments(call: QueryFp8Call | QueryMxfp4Call) -> tuple[Any, ...]:
    """What the kernel's entry point takes. Rows and heads of one byte per column or less have strides in bytes."""
    table, weights, scales, out = call.index_q_cos_sin_cache, call.index_weights, call.q_scale, call.weights_out
    return (
        call.positions,
        call.index_q,
        table.data_ptr(),
        table.stride(0) * table.element_size(),
        table.shape[0],
        weights.data_ptr(),
        weights.stride(0) * weights.element_size(),
        call.index_weights_softmax_scale,
        call.index_weights_head_scale,
        call.q_quant.data_ptr(),
        call.q_quant.stride(0),
        call.q_quant.stride(1),
        0 if scales is None else scales.data_ptr(),
        0 if scales is None else scales.stride(0) * 4,
        out.data_ptr(),
        out.stride(0) * out.element_size(),
        call.round_weights,
        call.e2m1_floor,
        call.use_pdl,
    )


def launch(call: QueryFp8Call | QueryMxfp4Call) -> None:
    """Run the kernel on the current stream of index_q's device; without tokens or heads there is nothing to run."""
    if call.index_q.shape[0] * call.index_q.shape[1] > 0:
        launch_key(key_of(call), call.index_q.device.index, *arguments(call))


def fp8_keys(config: ModelConfig, tp: int, arch: str) -> list[QueryKey]:
    """Layers with an FP8 cache of indexer keys, with or without a Hadamard transform."""
    if not has_indexer(config):
        return []
    return [key for transformed in (False, True) for key in keys(arch, "", transformed)]


def mxfp4_keys(config: ModelConfig, tp: int, arch: str) -> list[QueryKey]:
    """Layers with an MXFP4 cache of indexer keys: either rounding, with or without a Hadamard transform."""
    if not has_indexer(config):
        return []
    forms = [(rounding, transformed) for rounding in E2M1_ROUNDINGS for transformed in (False, True)]
    return [key for form in forms for key in keys(arch, *form)]


FP8 = OpKernel[QueryFp8Call](launch, why_not, fp8_keys)
MXFP4 = OpKernel[QueryMxfp4Call](launch, why_not, mxfp4_keys)
