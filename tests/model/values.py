# SPDX-License-Identifier: Apache-2.0
"""What bits mean: the number formats of registers and memory, as numpy vectors."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle import E2M1, E4M3

U16, U32, U64, I32, I64, F32 = np.uint16, np.uint32, np.uint64, np.int32, np.int64, np.float32

E4M3_F32 = E4M3.astype(F32)
E2M1_F32 = np.concatenate([E2M1, -E2M1]).astype(F32)


def low(word: Any) -> Any:
    """The lower 16 bits of 32."""
    return word & U32(0xFFFF)


def high(word: Any) -> Any:
    return word >> U32(16)


def pack(lower: Any, upper: Any) -> Any:
    """Two uint32 below 2^16 as one."""
    return lower | (upper << U32(16))


def from_bf16(half: Any) -> Any:
    """fp32 of bf16 bits."""
    return (half.astype(U32) << U32(16)).view(F32)


def to_bf16(value: Any) -> Any:
    """bf16 bits, as uint32, of fp32, ties to even; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(value, F32).view(U32)
    rounded = (bits + (U32(0x7FFF) + ((bits >> U32(16)) & U32(1)))) >> U32(16)  # overflows of NaN alone
    np.copyto(rounded, U32(0x7FFF), where=np.isnan(value))
    return rounded


def from_f16(half: Any) -> Any:
    return half.astype(U16).view(np.float16).astype(F32)


def to_f16(value: Any) -> Any:
    """fp16 bits, as uint32, of fp32."""
    return np.ascontiguousarray(value, F32).astype(np.float16).view(U16).astype(U32)


def to_e4m3(value: Any) -> Any:
    """e4m3 codes, as uint32, of fp32: saturating, ties to even; NaN is 0x7F."""
    magnitude = np.minimum(np.abs(np.nan_to_num(value.astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)), 448.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -6)
    steps = np.rint(magnitude * 2.0 ** (3 - exponent)).astype(np.int64)  # 8 .. 16, below 8 if subnormal
    codes = np.where(steps < 8, steps, ((exponent + 7) << 3) + steps - 8).astype(U32)
    return np.where(np.isnan(value), U32(0x7F), codes | (np.signbit(value).astype(U32) << U32(7)))


def from_format(bits: Any, name: str) -> Any:
    """fp32 of elements in memory: bf16, f16, e4m3 or tf32."""
    if name == "bf16":
        return from_bf16(bits)
    if name == "f16":
        return from_f16(bits)
    if name == "e4m3":
        return E4M3_F32[bits]
    raise NotImplementedError(name)
