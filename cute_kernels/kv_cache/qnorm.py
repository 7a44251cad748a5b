# SPDX-License-Identifier: Apache-2.0
"""The step before attention in one launch: norm and rotation of the queries, rotation and insertion of the KV rows.
Kernel of the three ops that do so: with an fp8_ds_mla cache and queries in place (QUANT_INSERT), with a plain bf16
cache (BF16_INSERT), with a plain e4m3 cache and result (FP8_INSERT).

A token has one part for its KV row and one for every few of its heads, and a warp takes one part. All rows of a part
are rotated by the same angles, so these are loaded once for them. Lanes and columns of a row: record.py; the rope
columns are the second run of the lanes 24 to 31.

    part     0        1                2                  ...
    rows     kv       q[0 .. rows)     q[rows .. 2 rows)  ...     the last part of a token may have fewer heads

All rows of a part are under way before anything waits for the position, on which the angles depend. A row of q is
written by the warp that read it, and by no other, so it may be overwritten.

The mean square is a sum of fp32 in a fixed order (query_norm.py), the same for every number of rows in a part: a row's
bits do not depend on where it stands. A sum of squares beyond fp32, as of 512 numbers of 2^60, makes the inverse root
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import convert, ptx, transforms
from cute_kernels.dsl.ptx import DEPENDENT_LAUNCH_ARCH
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import (
    FP8_DS_MLA,
    HEAD_DIM,
    MXFP8_FORMATS,
    PLAIN_BF16,
    PLAIN_FP8,
    ROPE_DIM,
    V41_KV_CACHES,
)
from cute_kernels.kv_cache import query_norm, record
from cute_kernels.kv_cache.call import Bf16InsertCall, Fp8InsertCall, QuantInsertCall
from cute_kernels.models import ModelConfig, latent_ratios
from cute_kernels.runtime.arch import arch_number, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

# ---- config

MXFP8 = tuple(fmt.id for fmt in MXFP8_FORMATS)

FEW_ROWS = 4096
"""Up to so many rows of q, all tokens and heads together, one row per warp and angles ahead of the wait are faster;
from there on two, and rows first (perf/notes/kv_cache.md, perf/notes/insert_compress.md)."""


# ---- rows and where they lie


class Rows(NamedTuple):
    """What the kernel takes, in plain numbers.

    q             address, strides in bytes, heads
    out           address, strides in bytes, address of the scale
    kv            address, stride in bytes, slots, their number, scale
    angles        positions, table, its stride in bytes and rows
    cache         address, stride in bytes, rows of the pool, rows of a page; the last as a divisor: page_rows
    units         warps that have something to do, token_parts of them for a token
    """

    q: tuple[Int64, Int64, Int64, Int32]
    out: tuple[Int64, Int64, Int64, Int64]
    kv: tuple[Int64, Int64, Int64, Int32, Int64]
    angles: tuple[Int64, Int64, Int64, Int32]
    cache: tuple[Int64, Int64, Int32, Int32]
    page_rows: cute.FastDivmodDivisorV2
    units: Int32
    token_parts: cute.FastDivmodDivisorV2
    eps: Float32


def make_rows(q: Any, out: Any, kv: Any, positions: Any, table: Any, cache: Any, eps: Any, heads_at_once: int) -> Rows:
    """From an entry point's arguments to what its kernel takes. out, cache: as in Rows; kv: rows, slots, scale."""
    heads = length(q, 1)
    parts = 1 + cute.ceil_div(heads, heads_at_once)
    kv, slots, kv_scale = kv
    return Rows(
        (address(q), stride_bytes(q, 0), stride_bytes(q, 1), heads),
        out,
        (address(kv), stride_bytes(kv, 0), address(slots), length(slots, 0), kv_scale),
        (address(positions), address(table), stride_bytes(table, 0), length(table, 0)),
        cache,
        cute.fast_divmod_create_divisor_v2(cache[3]),
        length(q, 0) * parts,
        cute.fast_divmod_create_divisor_v2(parts),
        eps,
    )


# ---- kernel


class QnormKernel:
    """Entry point: (q, kv, slots, positions, cos and sin table; for plain_fp8 address of the e4m3 queries, bytes from
    token to token and from head to head, addresses of the KV scale and of the inverse query scale; cache address, page
    stride in bytes, rows of the pool, rows of a page, eps, use_pdl, stream)."""

    def __init__(self, key: QnormKey) -> None:
        self.arch = key.arch
        self.form = key.kv_format
        self.norm = key.norm
        self.rows = key.rows
        self.warps = key.warps
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.early = key.early and self.has_dependency
        form = key.kv_format.partition("/")[0]
        self.name = f"qnorm_rope_insert_{form}_n{int(key.norm)}r{key.rows}w{key.warps}" + "_early" * key.early

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        slots: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        out: Int64,
        out_token: Int64,
        out_head: Int64,
        kv_scale: Int64,
        q_scale_inv: Int64,
        pool: Int64,
        page_stride: Int64,
        capacity: Int32,
        block_size: Int32,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        result = (out, out_token, out_head, q_scale_inv)
        if const_expr(self.form != PLAIN_FP8.id):
            result = (address(q), stride_bytes(q, 0), stride_bytes(q, 1), q_scale_inv)
        cache = (pool, page_stride, capacity, block_size)
        rows = make_rows(q, result, (kv, slots, kv_scale), positions, table, cache, eps, self.rows)
        ctas = cute.ceil_div(rows.units, self.warps)
        self.kernel(rows).launch(
            grid=[ctas, 1, 1],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(self, rows: Rows) -> None:
        cta, _, _ = cute.arch.block_idx()
        self.run(cta, rows)

    @cute.jit
    def run(self, cta: Int32, rows: Rows) -> None:
        """What CTA number `CTA` does."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        unit = cta * self.warps + cute.arch.make_warp_uniform(thread // 32)
        token, part = divmod(unit, rows.token_parts)
        if const_expr(self.early):
            cute.arch.griddepcontrol_launch_dependents()
        elif const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if unit < rows.units:
            if part > 0:
                self.rotate_queries(lane, token, (part - 1) * self.rows, rows.q, rows.out, rows.angles, rows.eps)
            else:
                self.insert(lane, token, rows.kv, rows.angles, rows.cache, rows.page_rows)

    @cute.jit
    def rotate_queries(self, lane: Any, token: Any, first_head: Any, q: Any, out: Any, angles: Any, eps: Any) -> None:
        start, token_stride, head_stride, heads = q
        target, out_token_stride, out_head_stride, scale = out
        rows = []
        # one row leaves room for the position before it, and the angles wait for that; of several rows, all but the
        # first would be loaded after that wait
        if const_expr(self.early):
            position = self.load_position(angles, token)
            cos, sin = self.load_angles(lane, position, angles)
            cute.arch.griddepcontrol_wait()
            factor = self.load_scale(scale)
        elif const_expr(self.rows == 1):
            position, factor = self.load_position(angles, token), self.load_scale(scale)
        for i in range_constexpr(self.rows):
            # heads past the last one load that one again, and store nothing
            head = Int64(cutlass.min(first_head + i, heads - 1))
            source = start + Int64(token) * token_stride + head * head_stride + Int64(lane * 16)
            rows.append(self.load_row(ptx.load_global_128_cached_in_order, source))
        if const_expr(self.rows > 1 and not self.early):
            position, factor = self.load_position(angles, token), self.load_scale(scale)
        known = (cos, sin) if self.early else None
        # always so, which the assembler does not know: loads are in a CTA before that of what uses them, as it would
        # have the position behind the first row's squares
        if first_head < heads:
            target += Int64(token) * out_token_stride
            to = (target, out_head_stride, factor, first_head, heads)
            self.finish(lane, rows, position, known, angles, eps, to)

    @cute.jit
    def finish(self, lane: Any, rows: Any, position: Any, known: Any, angles: Any, eps: Any, to: Any) -> None:
        """Norm, rotate and store a warp's rows. known: their cosines and sines, or None."""
        target, head_stride, factor, first_head, heads = to
        cos, sin = self.load_angles(lane, position, angles) if const_expr(known is None) else known
        factors = []
        if const_expr(self.norm):
            factors = [query_norm.inverse_rms(total, eps) for total in query_norm.sums_of_lanes(rows, lane)]
        for i in range_constexpr(self.rows):
            values = convert.bf16_floats(rows[i])
            if const_expr(self.norm):
                values = [ptx.mul_rn(value, factors[i]) for value in values]
            values = self.rotated(lane, values, cos, sin)
            head = first_head + i
            self.store_query(lane, target + Int64(head) * head_stride, values, factor, head < heads)

    @cute.jit
    def insert(self, lane: Any, token: Any, kv: Any, angles: Any, cache: Any, page_rows: Any) -> None:
        start, stride, slots, count, scale = kv
        pool, page_stride, capacity, block_size = cache
        if token < count:
            slot = ptx.load_global_s64_in_order(slots + Int64(token) * 8)
            if const_expr(self.early):
                position = self.load_position(angles, token)
                cos, sin = self.load_angles(lane, position, angles)
                cute.arch.griddepcontrol_wait()
            divisor = self.load_scale(scale)
            words = self.load_row(ptx.load_global_128_in_order, start + Int64(token) * stride + Int64(lane * 16))
            if const_expr(not self.early):
                position = self.load_position(angles, token)
                cos, sin = self.load_angles(lane, position, angles)
            if const_expr(self.form == PLAIN_FP8.id):
                # a quotient is a product with the float64 reciprocal: off by at most 2^-52 of it before its last
                # rounding, while no quotient of two fp32 is nearer than 2^-49 of it to where that turns
                inverse = ptx.reciprocal_f64(divisor)
                twice = inverse + inverse
            values = self.rotated(lane, convert.bf16_floats(words), cos, sin)
            is_inside = slot >= 0 and slot < Int64(capacity)
            page, row = divmod(Int32(slot if is_inside else Int64(0)), page_rows)
            page_start = pool + Int64(page) * page_stride
            if const_expr(self.form == FP8_DS_MLA.id):
                # the codes need no angles, and are made while these are on their way
                pieces = record.encode(lane, words[:4], words[4:], convert.bf16_words(values[8:]), self.arch)
                if is_inside:
                    record.store_encoded(lane, page_start, row, block_size, pieces)
            elif const_expr(self.form in MXFP8):
                places = record.places_v41(page_start, row, block_size, self.form)
                rounded = (*words[:4], *convert.bf16_words(values[8:]))
                record.store_v41(lane, places, rounded, is_inside, self.form, self.arch)
            elif const_expr(self.form == PLAIN_BF16.id):
                target = page_start + Int64(row) * (2 * HEAD_DIM) + Int64(lane * 16)
                ptx.store_global_128(target, words[:4], is_inside)
                ptx.store_global_128(target + record.HALF_ROW, convert.bf16_words(values[8:]), is_inside)
            else:
                # an fp32 product of a NaN is the positive one, as the code 0x7F asks for; that with a half is exact
                quotients = [ptx.mul_rn(ptx.mul_f64(value, twice), Float32(0.5)) for value in values]
                codes = convert.e4m3_words(quotients)
                store_codes(page_start + Int64(row) * HEAD_DIM + Int64(lane * 8), codes, is_inside)
        elif const_expr(self.early):
            # a kernel behind this one counts on its having waited, even if it had nothing to do
            cute.arch.griddepcontrol_wait()

    def load_row(self, load: Any, start: Any) -> Any:
        """A lane's eight words of a row."""
        return (*load(start), *load(start + record.HALF_ROW))

    def load_position(self, angles: Any, token: Any) -> Any:
        # all warps of a token want it
        return ptx.load_global_s64_in_order(angles[0] + Int64(token) * 8, is_shared=True)

    def load_scale(self, scale: Any) -> Any:
        """The number at that address, where the format has scales."""
        return ptx.load_global_s32_in_order(scale).bitcast(Float32) if self.form == PLAIN_FP8.id else None

    def load_angles(self, lane: Any, position: Any, angles: Any) -> Any:
        """Cosines and sines of the four pairs a rope lane has; the other lanes get those of some rope lane."""
        _, table, stride, rows = angles
        start = table + transforms.table_row(position, rows) * stride + Int64((lane % 8) * 16)
        # ahead of the wait: the assembler must not move them behind it
        load = ptx.load_global_128_cached_in_order if self.early else ptx.load_global_128_weak
        cos = load(start)
        sin = load(start + transforms.HALF_TABLE_BYTES)
        return [word.bitcast(Float32) for word in cos], [word.bitcast(Float32) for word in sin]

    @cute.jit
    def rotated(self, lane: Any, values: Any, cos: Any, sin: Any) -> Any:
        """A lane's sixteen values of a row, the rope columns among them rotated."""
        is_rope = lane >= record.ROPE_LANE
        result = list(values[:8])
        for pair in range_constexpr(4):
            even, odd = values[8 + 2 * pair], values[9 + 2 * pair]
            rotated_even, rotated_odd = transforms.rotate_pair(even, odd, cos[pair], sin[pair])
            result += [rotated_even if is_rope else even, rotated_odd if is_rope else odd]
        return result

    def store_query(self, lane: Any, target: Any, values: Any, factor: Any, predicate: Any) -> None:
        if self.form == PLAIN_FP8.id:
            codes = convert.e4m3_words([ptx.mul_rn(value, factor) for value in values])
            store_codes(target + Int64(lane * 8), codes, predicate)
        else:
            words, start = convert.bf16_words(values), target + Int64(lane * 16)
            ptx.store_global_128(start, words[:4], predicate)
            ptx.store_global_128(start + record.HALF_ROW, words[4:], predicate)


def store_codes(target: Any, codes: list[Any], predicate: Any) -> None:
    """A lane's sixteen codes of a row of e4m3: eight bytes in each half."""
    ptx.store_global_64(target, codes[0], codes[1], predicate)
    ptx.store_global_64(target + HEAD_DIM // 2, codes[2], codes[3], predicate)


# ---- key


@dataclass(frozen=True)
class QnormKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    kv_format     record format id; with plain_fp8 the queries become e4m3 too
    norm          whether the queries are normalized
    rows          heads per warp, all in flight together
    warps         per CTA
    early         positions, slots and angles are read before the wait for the kernel ahead, which does not write them
    """

    kernel_name: ClassVar[str] = "kv_cache.qnorm"
    tuning: ClassVar[tuple[str, ...]] = ("rows", "early")
    kv_format: str = FP8_DS_MLA.id
    norm: bool = True
    rows: int = 2
    warps: int = 4
    early: bool = False

    @property
    def instructions(self) -> tuple[str, ...]:
        if self.kv_format == PLAIN_BF16.id:
            return ("ld.global.128",)
        return "ld.global.128", *convert.e4m3_instructions(self.arch), "st.global.64"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride() -> Any:
            return cute.sym_int64(divisibility=8)

        count = cute.sym_int()
        q_shape = (count, cute.sym_int(), HEAD_DIM)
        q = make_fake_tensor(BFloat16, q_shape, stride=(stride(), stride(), 1), assumed_align=16)
        kv = make_fake_tensor(BFloat16, (count, HEAD_DIM), stride=(stride(), 1), assumed_align=16)
        slots = make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,), assumed_align=8)
        positions = make_fake_tensor(Int64, (count,), stride=(1,), assumed_align=8)
        table_stride = cute.sym_int64(divisibility=4)
        table = make_fake_tensor(Float32, (cute.sym_int(), ROPE_DIM), stride=(table_stride, 1), assumed_align=16)
        numbers = (*(Int64(0),) * 7, Int32(0), Int32(1), Float32(0.0), Boolean(False))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return QnormKernel(self), (q, kv, slots, positions, table, *numbers, stream)


def _shape(query_rows: int) -> tuple[int, bool]:
    """(rows of a warp, whether it reads its angles early)."""
    return (1, True) if query_rows <= FEW_ROWS else (2, False)


def key_for(arch: str, kv_format: str, norm: bool = True, query_rows: int = 0) -> QnormKey:
    """The kernel that serves calls of this kind with so many rows of q."""
    return _key_of_shape(arch, kv_format, norm, *_shape(query_rows))


def _key_of_shape(arch: str, kv_format: str, norm: bool, rows: int, early: bool) -> QnormKey:
    return QnormKey(arch, kv_format, norm, rows, early=early and arch_number(arch) >= DEPENDENT_LAUNCH_ARCH)


def deployment(config: ModelConfig, arch: str, kv_formats: Iterable[str]) -> list[QnormKey]:
    """What the layers need: V4's normalize their queries, V4.1's do not."""
    norm = not latent_ratios(config)
    return [key_for(arch, fmt, norm, rows) for fmt in kv_formats for rows in (FEW_ROWS, FEW_ROWS + 1)]


@cache
def _key(device_index: int, kv_format: str, norm: bool, shape: tuple[int, bool]) -> QnormKey:
    return _key_of_shape(arch_of(device_index), kv_format, norm, *shape)


def key_of(q: Any, kv_format: str, norm: bool = True) -> QnormKey:
    """The kernel that serves a call on this q."""
    return _key(q.device.index, kv_format, norm, _shape(q.shape[0] * q.shape[1]))


# ---- launch


def misfit(
    q: Any,
    kv: Any,
    cache: Any,
    cos_sin_cache: Any,
    block_size: int,
    kv_format: str,
    q_out: tuple[str, Any] | None = None,
) -> str:
    """Why `launch_with` cannot take these (checked) arguments; empty if it can. q_out: name and tensor, where it is
    not q."""
    page_alignment = 16 if kv_format == PLAIN_BF16.id else 8
    for name, tensor, what, alignment in (
        ("q", q, "rows", 16),
        ("kv", kv, "rows", 16),
        ("cos_sin_cache", cos_sin_cache, "rows", 16),
        ("the cache", cache, "pages", page_alignment),
        *(() if q_out is None else ((*q_out, "rows", 8),)),
    ):
        if not _is_aligned(tensor, alignment):
            return (
                f"{what} of {name} must be {alignment}-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if max(cache.shape[0], 1) * block_size >= 2**31:
        return f"the cache must have fewer than 2^31 rows, got {cache.shape[0]} pages of {block_size}"
    if q.shape[0] * (q.shape[1] + 1) >= 2**31:
        return f"q must have fewer than 2^31 rows, got shape {tuple(q.shape)}"
    return ""


def _is_aligned(tensor: Any, alignment: int) -> bool:
    """Whether everything that a row or page can start at is a multiple of `alignment` bytes."""
    elements = alignment // tensor.element_size()
    outer = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return tensor.data_ptr() % alignment == 0 and all(size <= 1 or stride % elements == 0 for size, stride in outer)


def launch_with(
    key: QnormKey,
    q: Any,
    kv: Any,
    cache: Any,
    slot_mapping: Any,
    positions: Any,
    cos_sin_cache: Any,
    eps: float,
    block_size: int,
    use_pdl: bool,
    out: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0),
) -> None:
    """Run the kernel of `key` on the current stream of q's device, on checked arguments that fit.

    out    for plain_fp8: address of the e4m3 queries, bytes from token to token and from head to head, addresses of the
           KV scale and of the inverse query scale
    """
    if q.shape[0] == 0:
        return
    pool = cache.data_ptr(), cache.stride(0) * cache.element_size(), cache.shape[0] * block_size, block_size
    launch_key(key, q.device.index, q, kv, slot_mapping, positions, cos_sin_cache, *out, *pool, eps, use_pdl)


def why_not_quant_insert(call: QuantInsertCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return misfit(call.q, call.kv, call.k_cache, call.cos_sin_cache, call.block_size, call.kv_format)


def launch_quant_insert(call: QuantInsertCall) -> None:
    """Run the kernel on the current stream of q's device."""
    key = key_of(call.q, call.kv_format, call.apply_q_norm)
    launch_with(
        key,
        call.q,
        call.kv,
        call.k_cache,
        call.slot_mapping,
        call.positions,
        call.cos_sin_cache,
        call.eps,
        call.block_size,
        call.use_pdl,
    )


def quant_insert_keys(config: ModelConfig, tp: int, arch: str) -> list[QnormKey]:
    """Of the model's windows."""
    v41 = dict.fromkeys(window.id for window, _ in V41_KV_CACHES.values())
    return deployment(config, arch, v41 if latent_ratios(config) else (FP8_DS_MLA.id,))


QUANT_INSERT = OpKernel(launch_quant_insert, why_not_quant_insert, quant_insert_keys)


def why_not_bf16_insert(call: Bf16InsertCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return misfit(call.q, call.kv, call.kv_cache, call.cos_sin_cache, call.block_size, call.kv_format)


def launch_bf16_insert(call: Bf16InsertCall) -> None:
    """Run the kernel on the current stream of q's device."""
    key = key_of(call.q, call.kv_format, call.apply_q_norm)
    launch_with(
        key,
        call.q,
        call.kv,
        call.kv_cache,
        call.slot_mapping,
        call.positions,
        call.cos_sin_cache,
        call.eps,
        call.block_size,
        call.use_pdl,
    )


BF16_INSERT = OpKernel(
    launch_bf16_insert, why_not_bf16_insert, lambda config, tp, arch: deployment(config, arch, (PLAIN_BF16.id,))
)


def why_not_fp8_insert(call: Fp8InsertCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return misfit(
        call.q, call.kv, call.kv_cache, call.cos_sin_cache, call.block_size, call.kv_format, ("q_fp8", call.q_fp8)
    )


def launch_fp8_insert(call: Fp8InsertCall) -> None:
    """Run the kernel on the current stream of q's device."""
    key = key_of(call.q, call.kv_format, call.apply_q_norm)
    scales = call.fp8_kv_scale.data_ptr(), call.q_scale_inv.data_ptr()
    out = call.q_fp8.data_ptr(), call.q_fp8.stride(0), call.q_fp8.stride(1), *scales
    launch_with(
        key,
        call.q,
        call.kv,
        call.kv_cache,
        call.slot_mapping,
        call.positions,
        call.cos_sin_cache,
        call.eps,
        call.block_size,
        call.use_pdl,
        out,
    )


FP8_INSERT = OpKernel(
    launch_fp8_insert, why_not_fp8_insert, lambda config, tp, arch: deployment(config, arch, (PLAIN_FP8.id,))
)
