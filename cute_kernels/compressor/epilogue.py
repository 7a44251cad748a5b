# SPDX-License-Identifier: Apache-2.0
"""Epilogue of every kernel that stores compressed entries: norm, rotation, rounding, quantization, stores.

A lane holds four consecutive columns of an entry, and neighbouring lanes neighbouring columns. Sixteen lanes, aligned
to half a warp, make a block of 64 columns; entries of 128 columns take a whole warp. Which warp has which block, and
how a sum of squares comes about, is the caller's business.

    fp8_ds_mla/1       16 lanes share a ue8m0 scale; the last block is rope and stays bf16
    plain_bf16/1, plain_fp8/1            nothing is shared
    indexer_fp8/1      32 lanes share an fp32 scale
    indexer_mxfp4/1    8 lanes share a ue8m0 scale
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import convert, ptx, reduce, transforms
from cute_kernels.formats import (
    FORMATS,
    FP8_DS_MLA,
    INDEX_DIM,
    INDEXER_FP8,
    INDEXER_MXFP4,
    INDEXER_MXFP4_WIDE,
    PLAIN_BF16,
    PLAIN_FP8,
    ROPE_DIM,
)
from cute_kernels.numerics import CACHE_FLOOR, E2M1_MAX, E4M3_MAX

MXFP4 = (INDEXER_MXFP4.id, INDEXER_MXFP4_WIDE.id)
E4M3 = (FP8_DS_MLA.id, PLAIN_FP8.id, INDEXER_FP8.id)
_LANES_PER_SCALE = {FP8_DS_MLA.id: 16, INDEXER_FP8.id: 32, INDEXER_MXFP4.id: 8, INDEXER_MXFP4_WIDE.id: 8}


class Cache(NamedTuple):
    """Where entries go and what they need on the way: arguments that all kernels pass on.

    pool          address of the cache          page_stride, table_stride   in bytes
    page_rows     rows of a page                capacity                    rows of the pool
    weight        address of the norm's weight  fp8_scale                   address, for plain_fp8 only
    table         address of the cosines and sines, of `table_rows` positions
    """

    pool: Int64
    page_stride: Int64
    page_rows: Int32
    divisor: cute.FastDivmodDivisorV2
    capacity: Int32
    weight: Int64
    table: Int64
    table_stride: Int64
    table_rows: Int32
    fp8_scale: Int64
    eps: Float32


def fake_numbers() -> tuple[Any, ...]:
    """What a key's `build` has in place of `numbers`."""
    return (
        *(Int64(0), Int64(0), Int32(1), Int32(0)),
        *(Int64(0), Int64(0), Int64(0), Int32(1)),
        *(Int64(0), Float32(0)),
    )


def make_cache(
    pool: Any,
    page_stride: Any,
    page_rows: Any,
    capacity: Any,
    weight: Any,
    table: Any,
    table_stride: Any,
    table_rows: Any,
    fp8_scale: Any,
    eps: Any,
) -> Cache:
    """From `numbers`, in an entry point, to what its kernel takes."""
    divisor = cute.fast_divmod_create_divisor_v2(page_rows)
    return Cache(
        pool, page_stride, page_rows, divisor, capacity, weight, table, table_stride, table_rows, fp8_scale, eps
    )


class Loaded(NamedTuple):
    """What a lane needs besides the entry: words of the norm's weight, of cosines and sines, of the plain scale."""

    weight: Any
    cos: Any
    sin: Any
    fp8_scale: Any


class EntryStore:
    """The code for one format. Made from fields of a kernel's key; its methods are traced into the kernel.

    kv_format        record format id
    fp32_weight      whether the norm's weight is fp32 and not bf16
    e2m1_rounding    for MXFP4
    index_hadamard   for formats of 128 columns
    arch             compile target
    e2m1_floor       smallest absmax of a block, for MXFP4
    """

    def __init__(
        self,
        kv_format: str,
        fp32_weight: bool,
        e2m1_rounding: str,
        index_hadamard: bool,
        arch: str,
        e2m1_floor: float = CACHE_FLOOR,
    ) -> None:
        fmt = FORMATS[kv_format]
        self.kv_format = kv_format
        self.dim = fmt.dim
        self.fp32_weight = fp32_weight
        self.e2m1_rounding = e2m1_rounding
        self.index_hadamard = index_hadamard
        self.arch = arch
        self.e2m1_floor = e2m1_floor
        self.data_bytes = fmt.fields(1)[0][1]
        self.scale_bytes = fmt.fields(1)[1][1] if len(fmt.fields(1)) > 1 else 0

    def load(self, cache: Cache, column: Any, position: Any) -> Loaded:
        """Ask for what four columns of an entry need whose first token is at `position` (int64).

        column   first of the lane's four in the entry
        """
        row = cache.table + Int64(transforms.table_row(position, cache.table_rows)) * cache.table_stride
        # columns left of the rotated ones read the first pairs, and ignore them
        pair = Int64(cutlass.max(column - (self.dim - ROPE_DIM), 0)) * 2
        load_weight = ptx.load_global_128_in_order if self.fp32_weight else ptx.load_global_64_in_order
        weight = load_weight(cache.weight + Int64(column) * (4 if self.fp32_weight else 2))
        cos = ptx.load_global_64_in_order(row + pair)
        sin = ptx.load_global_64_in_order(row + pair + transforms.HALF_TABLE_BYTES)
        scale = Int32(0)
        if const_expr(self.kv_format == PLAIN_FP8.id):
            scale = ptx.load_global_s32_in_order(cache.fp8_scale)
        return Loaded(weight, cos, sin, scale)

    def factor(self, cache: Cache, sum_squares: Any) -> Any:
        """What the norm multiplies an entry by, from the sum of its squares."""
        return ptx.rsqrt(ptx.fma_rn(sum_squares, Float32(1.0 / self.dim), cache.eps))

    @cute.jit
    def finish(self, cache: Cache, loaded: Loaded, column: Any, x: Any, factor: Any, slot: Any) -> None:
        """Norm, rotate, round and quantize the lane's four fp32 columns `x` and store them at `slot`.

        All lanes of a warp must call. A slot outside the cache stores nothing.
        """
        low, high = self._rounded(loaded, column, x, factor)
        if const_expr(self.index_hadamard):
            values = [part(word) for word in (low, high) for part in (convert.bf16_low, convert.bf16_high)]
            values = transforms.hadamard(values, column // 4)
            low, high = ptx.bf16x2(values[0], values[1]), ptx.bf16x2(values[2], values[3])
        self.write(cache, column, low, high, slot, loaded.fp8_scale)

    @cute.jit
    def write(self, cache: Cache, column: Any, low: Any, high: Any, slot: Any, fp8_scale: Any = None) -> None:
        """Quantize the lane's four columns, two bf16 pairs, and store them at `slot`, as `finish` does."""
        is_inside = (slot >= 0) & (slot < Int64(cache.capacity))
        page, row = divmod(Int32(slot if is_inside else Int64(0)), cache.divisor)
        start = cache.pool + Int64(page) * cache.page_stride
        data = start + Int64(row) * self.data_bytes
        scale = start + Int64(cache.page_rows) * self.data_bytes + Int64(row) * self.scale_bytes
        if const_expr(self.kv_format == FP8_DS_MLA.id):
            self._store_ds_mla(data, scale, column, low, high, is_inside)
        elif const_expr(self.kv_format == PLAIN_BF16.id):
            ptx.store_global_64(data + Int64(column) * 2, low, high, is_inside)
        elif const_expr(self.kv_format == PLAIN_FP8.id):
            inverse = ptx.reciprocal_rn(fp8_scale.bitcast(Float32))
            ptx.store_global_s32(data + Int64(column), convert.e4m3_from_bf16x4(low, high, inverse), is_inside)
        elif const_expr(self.kv_format == INDEXER_FP8.id):
            byte = self._scale_byte(low, high, E4M3_MAX)
            codes = convert.e4m3_from_bf16x4(low, high, convert.ue8m0_inverse(byte), self.arch)
            ptx.store_global_s32(data + Int64(column), codes, is_inside)
            ptx.store_global_s32(scale, byte << 23, is_inside & (column == 0))
        else:
            byte = self._scale_byte(low, high, E2M1_MAX)
            codes = convert.e2m1_from_bf16s((low, high), convert.ue8m0_inverse(byte), self.e2m1_rounding, self.arch)
            ptx.store_global_16(data + Int64(column // 2), codes, is_inside)
            ptx.store_global_8(scale + Int64(column // 32), byte, is_inside & (column % 32 == 0))

    @cute.jit
    def _rounded(self, loaded: Loaded, column: Any, x: Any, factor: Any) -> tuple[Any, Any]:
        """The entry's columns as two bf16 pairs."""
        if const_expr(self.fp32_weight):
            weight = [word.bitcast(Float32) for word in loaded.weight]
        else:
            weight = [part(word) for word in loaded.weight for part in (convert.bf16_low, convert.bf16_high)]
        y = [value * factor * w for value, w in zip(x, weight, strict=True)]
        is_rope = column >= self.dim - ROPE_DIM
        words = []
        for i in range_constexpr(2):
            even, odd = y[2 * i], y[2 * i + 1]
            turned = transforms.rotate_pair(even, odd, loaded.cos[i].bitcast(Float32), loaded.sin[i].bitcast(Float32))
            words.append(ptx.bf16x2(turned[0] if is_rope else even, turned[1] if is_rope else odd))
        return words[0], words[1]

    def _scale_byte(self, low: Any, high: Any, largest: float) -> Any:
        """ue8m0 byte of the lanes that share a scale."""
        pair = reduce.lanes_max_bf16x2(convert.absmax_bf16x2(low, high), _LANES_PER_SCALE[self.kv_format])
        absmax = ptx.max_f32(convert.bf16_low(pair), convert.bf16_high(pair))
        floor = self.e2m1_floor if largest == E2M1_MAX else CACHE_FLOOR
        return convert.ue8m0_from_absmax(absmax, largest, floor)

    @cute.jit
    def _store_ds_mla(self, data: Any, scale: Any, column: Any, low: Any, high: Any, is_inside: Any) -> None:
        byte = self._scale_byte(low, high, E4M3_MAX)
        codes = convert.e4m3_from_bf16x4(low, high, convert.ue8m0_inverse(byte), self.arch)
        first_rope = self.dim - ROPE_DIM
        is_rope = column >= first_rope
        ptx.store_global_s32(data + Int64(column), codes, is_inside & ~is_rope)
        ptx.store_global_64(data + Int64(column * 2 - first_rope), low, high, is_inside & is_rope)
        # the last block's byte is padding
        byte = Int32(0) if is_rope else byte
        ptx.store_global_8(scale + Int64(column // 64), byte, is_inside & (column % 64 == 0))


def store_for(kv_format: str, fp32_weight: bool, e2m1_rounding: str, index_hadamard: bool) -> dict[str, Any]:
    """Fields of a kernel's key, without the differences that make none."""
    rounding = e2m1_rounding if kv_format in MXFP4 else ""
    return {
        "kv_format": kv_format,
        "fp32_weight": fp32_weight,
        "e2m1_rounding": rounding,
        "index_hadamard": index_hadamard and FORMATS[kv_format].dim == INDEX_DIM,
    }


def numbers(kv_cache: Any, cos_sin_cache: Any, weight: Any, fp8_scale: Any, eps: float) -> tuple[Any, ...]:
    """The numbers of `Cache` for a launch; weight: None where nothing is normed."""
    pages, page_rows, _ = kv_cache.shape
    return (
        kv_cache.data_ptr(),
        kv_cache.stride(0) * kv_cache.element_size(),
        page_rows,
        pages * page_rows,
        0 if weight is None else weight.data_ptr(),
        cos_sin_cache.data_ptr(),
        cos_sin_cache.stride(0) * 4,
        cos_sin_cache.shape[0],
        0 if fp8_scale is None else fp8_scale.data_ptr(),
        eps,
    )


def why_not(kv_cache: Any, cos_sin_cache: Any, weight: Any, kv_format: str) -> str:
    """Why entries cannot be stored with these (checked) arguments; empty if they can."""
    least = 4 if FORMATS[kv_format].dim == INDEX_DIM else 8
    page_stride = kv_cache.stride(0) * kv_cache.element_size()
    if kv_cache.data_ptr() % least or (kv_cache.shape[0] > 1 and page_stride % least):
        return (
            f"pages of kv_cache must be {least}-byte aligned, got address {kv_cache.data_ptr():#x} and page stride "
            f"{page_stride}"
        )
    if kv_cache.shape[0] * kv_cache.shape[1] >= 2**31:
        return f"kv_cache must have fewer than 2^31 rows, got {kv_cache.shape[0]} pages of {kv_cache.shape[1]}"
    if cos_sin_cache.data_ptr() % 8 or (cos_sin_cache.shape[0] > 1 and cos_sin_cache.stride(0) % 2):
        return (
            f"rows of cos_sin_cache must be 8-byte aligned, got address {cos_sin_cache.data_ptr():#x} and row stride "
            f"{cos_sin_cache.stride(0)}"
        )
    four = 0 if weight is None else 4 * weight.element_size()
    if weight is not None and weight.data_ptr() % four:
        return f"rms_norm_weight must be {four}-byte aligned, got address {weight.data_ptr():#x}"
    return ""
