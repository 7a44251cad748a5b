"""The numbers of device functions, played by numpy arrays: the functions themselves then run without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


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


def _bits(value: Any) -> np.ndarray:
    return value.bits if isinstance(value, Word) else np.asarray(value).astype(np.int64).astype(np.uint32)


def f16x2(low: np.ndarray, high: np.ndarray) -> Word:
    """cvt.rn.f16x2.f32"""
    with np.errstate(over="ignore"):
        halves = [np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16)) for x in (low, high)]
    return Word(halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << 16)


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
    add_rn=np.add,
    sub_rn=np.subtract,
    mul_rn=np.multiply,
    fma_rn=fma_rn,
)
"""In place of cute_kernels.dsl.ptx."""

CUTE = SimpleNamespace(arch=SimpleNamespace(shuffle_sync_bfly=shuffle_bfly))
"""In place of cutlass.cute."""
