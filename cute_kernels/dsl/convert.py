"""Number formats on the device: bf16 pairs, ue8m0 scales, e4m3 codes. Bit for bit what numerics.py defines."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dsl import ptx

FP32_MAX = 3.4028234663852886e38


def bf16_low(pair: Any) -> Any:
    """fp32 value of the bf16 in the low half of a 32-bit word."""
    return (pair << 16).bitcast(Float32)


def bf16_high(pair: Any) -> Any:
    """fp32 value of the bf16 in the high half of a 32-bit word."""
    return (pair & Int32(-65536)).bitcast(Float32)


def absmax_bf16x2(*pairs: Any) -> Any:
    """bf16 pair: absolute maxima of the low halves and of the high halves. NaN only if there is nothing else."""
    largest = pairs[0] & 0x7FFF7FFF
    for pair in pairs[1:]:
        largest = ptx.max_bf16x2(largest, pair & 0x7FFF7FFF)
    return largest


def ue8m0_from_absmax(absmax: Any, largest: float, floor: float) -> Any:
    """Exponent byte e + 127 of the smallest power of two 2^e with max(absmax, floor) <= largest * 2^e.

    NaN counts as nothing and infinity as the largest fp32. The next power of two comes from the bits of the quotient.
    """
    bounded = ptx.min_f32(ptx.max_f32(absmax, Float32(floor)), Float32(FP32_MAX))
    return ((bounded * Float32(1.0 / largest)).bitcast(Int32) + 0x007FFFFF) >> 23


def ue8m0_inverse(byte: Any) -> Any:
    """fp32 value 2^(127 - byte) of a ue8m0 byte below 254."""
    return ((Int32(254) - byte) << 23).bitcast(Float32)


def e4m3_from_bf16x4(low: Any, high: Any, factor: Any) -> Any:
    """Four e4m3 codes of the bf16 words (low, high), each multiplied by the power of two `factor` first.

    The product of a NaN is the positive NaN on every GPU, so a NaN of either sign gets the code 0x7F.
    """
    return ptx.e4m3x4(
        bf16_low(low) * factor, bf16_high(low) * factor, bf16_low(high) * factor, bf16_high(high) * factor
    )


@cute.jit
def ue8m0_value(byte: Any) -> Any:
    """fp32 value 2^(byte - 127) of any ue8m0 byte: 0 is the subnormal 2^-127, 255 is NaN."""
    bits = cutlass.max(byte << 23, Int32(0x00400000))
    return (Int32(0x7FC00000) if byte == 255 else bits).bitcast(Float32)


def bf16x4_from_e4m3(codes: Any, factor: Any) -> tuple[Any, Any]:
    """Four e4m3 codes times the power of two `factor`, as two bf16 pairs. Exact wherever bf16 can hold the product."""
    a, b, c, d = ptx.floats_of_e4m3x4(codes)
    return ptx.bf16x2(a * factor, b * factor), ptx.bf16x2(c * factor, d * factor)
