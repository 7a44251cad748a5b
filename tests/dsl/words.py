# SPDX-License-Identifier: Apache-2.0
"""The numbers of device functions, played by numpy arrays: the functions themselves then run without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cute_kernels import numerics


class Word:
    """An array of 32-bit words with the operators of the DSL's Int32."""

    def __init__(self, bits: Any) -> None:
        self.bits = np.asarray(bits).astype(np.int64).astype(np.uint32)

    def __and__(self, other: Any) -> Word:
        return Word(self.bits & _bits(other))

    def __or__(self, other: Any) -> Word:
        return Word(self.bits | _bits(other))

    def __add__(self, other: Any) -> Word:
        return Word(self.bits.astype(np.int64) + _bits(other))

    def __mul__(self, factor: int) -> Word:
        return Word(self.bits.astype(np.int64) * factor)

    def __lshift__(self, count: int) -> Word:
        return Word(self.bits << np.uint32(count))

    def __rshift__(self, count: int) -> Word:
        return Word(self.bits.view(np.int32) >> np.int32(count))

    def bitcast(self, dtype: Any) -> np.ndarray:
        """The fp32 numbers of these bits."""
        return self.bits.view(np.float32)


class Real(np.ndarray):
    """An array of fp32 with the operators of the DSL's Float32."""

    def bitcast(self, dtype: Any) -> Word:
        return Word(np.asarray(self).view(np.uint32))


def real(values: Any) -> Real:
    return np.asarray(values, np.float32).view(Real)


def _bits(value: Any) -> np.ndarray:
    return value.bits if isinstance(value, Word) else np.asarray(value).astype(np.int64).astype(np.uint32)


def f16x2(low: np.ndarray, high: np.ndarray) -> Word:
    """cvt.rn.f16x2.f32"""
    with np.errstate(over="ignore"):
        halves = [np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16)) for x in (low, high)]
    return Word(halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << 16)


def _halves(word: Word) -> list[np.ndarray]:
    """fp32 of the low and of the high bf16 of each word."""
    bits = np.atleast_1d(word.bits)
    return [(bits << np.uint32(16)).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)]


def _bf16_bits(values: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16.f32, as uint32: nearest even; NaN becomes 0x7FFF."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1)) >> np.uint64(16)
    return np.where(np.isnan(values), np.uint64(0x7FFF), rounded).astype(np.uint32)


def multiply_bf16x2(a: Word, b: Word) -> Word:
    """fma.rn.bf16x2 with -0. fp32 holds a product of two bf16, unless it is so small that bf16 makes 0 of it."""
    with np.errstate(all="ignore"):
        return bf16x2(*(x * y for x, y in zip(_halves(a), _halves(b), strict=True)))


def number_or_zero_bf16x2(pair: Word) -> Word:
    """max.xorsign.abs.bf16x2 with 0: NaN loses, the sign stays."""
    halves = [pair.bits >> np.uint32(shift) & np.uint32(0xFFFF) for shift in (0, 16)]
    low, high = (np.where(h & np.uint32(0x7FFF) > 0x7F80, h & np.uint32(0x8000), h) for h in halves)
    return Word(low | high << np.uint32(16))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1_code(values: np.ndarray) -> np.ndarray:
    """cvt.rn.satfinite.e2m1x2.f32 of one number: the nearest code, of two that are as near the even one; the sign
    stays; beyond 6, and for NaN, which has no sign then, 6."""
    distance = np.abs(np.minimum(np.abs(values.astype(np.float64)), 6.0)[..., None] - E2M1)
    nearest = distance == distance.min(axis=-1, keepdims=True)
    code = np.where(nearest.sum(axis=-1) == 2, (nearest & (np.arange(8) % 2 == 0)).argmax(axis=-1), nearest.argmax(-1))
    return np.where(np.isnan(values), 7, code | np.signbit(values) << 3).astype(np.uint32)


def e2m1_codes(values: Any) -> Word:
    return Word(sum(e2m1_code(value) << np.uint32(4 * i) for i, value in enumerate(values)))


def ue8m0_byte(values: np.ndarray) -> np.ndarray:
    """cvt.rp.satfinite.ue8m0x2.f32 of one number: the exponent of the next power of two, at least 0 and at most 254."""
    fraction, exponent = np.frexp(np.abs(values.astype(np.float64)))
    power = exponent - (fraction == 0.5)
    bounded = np.where(np.isinf(values), 254, np.clip(np.where(values == 0, -127, power) + 127, 0, 254))
    return np.where(np.isnan(values), 255, bounded).astype(np.uint32)


def ue8m0x2(low: np.ndarray, high: np.ndarray) -> Word:
    return Word(ue8m0_byte(low) | ue8m0_byte(high) << np.uint32(8))


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """cvt.rn.satfinite.e4m3x2: nearest even, saturating at 448; NaN becomes 0x7F."""
    return numerics.to_e4m3(torch.from_numpy(np.ascontiguousarray(values))).view(torch.uint8).numpy().astype(np.uint32)


def e4m3x4(*values: np.ndarray) -> Word:
    return Word(sum(e4m3_codes(value) << np.uint32(8 * i) for i, value in enumerate(values)))


def floats_of_e4m3x4(codes: Word) -> list[np.ndarray]:
    """cvt.rn.f16x2.e4m3x2 and then cvt.f32.f16."""
    each = [codes.bits >> np.uint32(8 * i) & np.uint32(0xFF) for i in range(4)]
    return [numerics.from_e4m3(torch.from_numpy(e.astype(np.uint8)).view(torch.float8_e4m3fn)).numpy() for e in each]


def bf16x2(low: np.ndarray, high: np.ndarray) -> Word:
    """cvt.rn.bf16x2.f32"""
    return Word(_bf16_bits(low) | _bf16_bits(high) << np.uint32(16))


def bf16x2_of_e4m3x4(codes: Word) -> tuple[Word, Word]:
    """cvt.rn.bf16x2.e4m3x2"""
    a, b, c, d = floats_of_e4m3x4(codes)
    return bf16x2(a, b), bf16x2(c, d)


def _magnitude(pair: Word, other: int, takes_other: Any) -> Word:
    """{min,max}.xorsign.abs.f16x2 with two f16 >= 0: NaN loses, the sign of a number stays, and so does that of NaN."""
    halves = []
    for shift in (0, 16):
        bits, limit = pair.bits >> np.uint32(shift) & np.uint32(0xFFFF), np.uint32(other >> shift & 0xFFFF)
        magnitude = bits & np.uint32(0x7FFF)
        chosen = np.where(takes_other(magnitude, limit) | (magnitude > 0x7C00), limit, magnitude)
        halves.append(chosen | bits & np.uint32(0x8000))
    return Word(halves[0] | halves[1] << np.uint32(16))


def permute_bytes(a: Word, b: Word, selector: Any) -> Word:
    """prmt.b32"""
    a, b, selectors = np.broadcast_arrays(a.bits, b.bits, _bits(selector))
    source = np.stack([word >> np.uint32(8 * i) & np.uint32(0xFF) for word in (a, b) for i in range(4)])
    result = np.zeros_like(a)
    for i in range(4):
        nibble = selectors >> np.uint32(4 * i) & np.uint32(15)
        picked = np.take_along_axis(source, (nibble & np.uint32(7)).astype(np.int64)[None], axis=0)[0]
        sign = (picked >> np.uint32(7)) * np.uint32(0xFF)
        result = result | np.where(nibble > 7, sign, picked) << np.uint32(8 * i)
    return Word(result)


def fma_rn(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma.rn.f32 where the product is exact."""
    assert np.isin(np.abs(b), (0.5, 1.0, 2.0)).all()
    return a * b + c


def shuffle_bfly(value: np.ndarray, step: int) -> np.ndarray:
    """shfl.sync.bfly; the last axis is the lanes of a warp."""
    return value[..., np.arange(32) ^ step]


PTX = SimpleNamespace(
    f16x2=f16x2,
    max_magnitude_f16x2=lambda pair, least: _magnitude(pair, least, np.less),
    min_magnitude_f16x2=lambda pair, most: _magnitude(pair, most, np.greater),
    permute_bytes=permute_bytes,
    multiply_bf16x2=multiply_bf16x2,
    number_or_zero_bf16x2=number_or_zero_bf16x2,
    compiled_for=lambda: 90,
    E4M3_ARCH=89,
    e2m1_codes=e2m1_codes,
    ue8m0x2=ue8m0x2,
    e4m3x4=e4m3x4,
    e4m3x4_of_bf16=lambda low, high: e4m3x4(*_halves(low), *_halves(high)),
    floats_of_e4m3x4=floats_of_e4m3x4,
    bf16x2=bf16x2,
    bf16x2_of_e4m3x4=bf16x2_of_e4m3x4,
    HAS_BF16_OF_E4M3=True,
    HAS_E4M3_OF_BF16=True,
    max_f32=np.fmax,
    min_f32=np.fmin,
    add_rn=np.add,
    sub_rn=np.subtract,
    mul_rn=np.multiply,
    fma_rn=fma_rn,
)
"""In place of cute_kernels.dsl.ptx."""

CUTE = SimpleNamespace(arch=SimpleNamespace(shuffle_sync_bfly=shuffle_bfly))
"""In place of cutlass.cute."""
