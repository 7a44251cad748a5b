# SPDX-License-Identifier: Apache-2.0
"""Number formats on the device: bf16 pairs, ue8m0 scales, e4m3 codes. Bit for bit what numerics.py defines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dsl import ptx, reduce
from cute_kernels.numerics import E4M3_LEAST, E4M3_MAX
from cute_kernels.runtime.arch import arch_number

FP32_MAX = 3.4028234663852886e38

BLACKWELL = ("sm_100a", "sm_103a")
"""Architectures whose own instructions the functions with an argument `arch` use, where these give the same bits."""


def bf16_low(pair: Any) -> Any:
    """fp32 value of the bf16 in the low half of a 32-bit word."""
    return (pair << 16).bitcast(Float32)


def bf16_high(pair: Any) -> Any:
    """fp32 value of the bf16 in the high half of a 32-bit word."""
    return (pair & Int32(-65536)).bitcast(Float32)


def bf16_floats(words: Any) -> list[Any]:
    """fp32 values of all halves of the words."""
    return [half(word) for word in words for half in (bf16_low, bf16_high)]


def bf16_pairs_of_e4m3(words: Any, factors: Any) -> list[Any]:
    """Pairs of bf16 of e4m3 codes, four in a word, in their order: 2^-120 of their values times each of the bf16 pairs
    in `factors`."""
    pairs = []
    for codes in words:
        # neighbours two bytes apart
        apart = ptx.permute_bytes(codes, codes, 0x3120)
        for left in (8, 0):
            pair = ptx.bf16x2_of_codes(apart, left)
            for factor in factors:
                pair = ptx.multiply_bf16x2(pair, factor)
            pairs.append(pair)
    return pairs


AS_BF16 = (127 + ptx.E4M3_AS_BF16) * 0x00800080
"""2^120 in both halves of a word, as bf16."""


def bf16_pairs_of_e4m3x4(codes: Any) -> tuple[Any, Any]:
    """The four e4m3 codes of a word as two pairs of bf16, exact. By the instruction for it where the assembler has it;
    it makes NaN of 0x7F and 0xFF, which else count as 480 and -480."""
    if ptx.HAS_BF16_OF_E4M3:
        return ptx.bf16x2_of_e4m3x4(codes)
    first, second = bf16_pairs_of_e4m3([codes], [ptx.again(AS_BF16)])  # an immediate number will not do
    return first, second


@cute.jit
def bf16x2_of_e4m3(code: Any) -> Any:
    """One e4m3 code in both halves of a word, as bf16, exact; NaN stays NaN."""
    pair = ptx.multiply_bf16x2(((code & 0x80) << 8 | (code & 0x7F) << 4) * 0x00010001, ptx.again(AS_BF16))
    return Int32(0x7FC07FC0) if code & 0x7F == 0x7F else pair


def bf16_words(values: Any) -> list[Any]:
    """fp32 values as bf16 pairs, each rounded to nearest even: the inverse of bf16_floats."""
    return [ptx.bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def e4m3_instructions(arch: str) -> tuple[str, ...]:
    """What makes a kernel fast that converts e4m3, as KernelKey.instructions has it. Older GPUs have integers only."""
    return ("cvt.e4m3",) if arch_number(arch) >= ptx.E4M3_ARCH else ()


def e4m3_words(values: Any) -> list[Any]:
    """fp32 values as e4m3 codes, four in a word: nearest even, saturating at 448."""
    return [ptx.e4m3x4(*values[i : i + 4]) for i in range(0, len(values), 4)]


def absmax_bf16x2(*pairs: Any) -> Any:
    """bf16 pair: absolute maxima of the low halves and of the high halves. NaN only if there is nothing else."""
    largest = pairs[0] & 0x7FFF7FFF
    for pair in pairs[1:]:
        largest = ptx.max_bf16x2(largest, pair & 0x7FFF7FFF)
    return largest


def magnitude_or_nan(words: Any, lanes: int) -> Any:
    """Largest magnitude among the bf16 numbers of some words, a power of two of them, of neighbouring lanes, as bits of
    a bf16; all lanes must call. As integers NaNs are larger than all numbers, which end with 0x7F80."""
    largest = reduce.pairwise([(word >> shift) & 0x7FFF for word in words for shift in (0, 16)], cutlass.max)
    for step in range(lanes.bit_length() - 1):
        largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 1 << step))
    return largest


def ue8m0_from_absmax(absmax: Any, largest: float, floor: Any) -> Any:
    """Exponent byte e + 127 of the smallest power of two 2^e with max(absmax, floor) <= largest * 2^e.

    NaN counts as nothing and infinity as the largest fp32. The next power of two comes from the bits of the quotient.
    """
    bounded = ptx.min_f32(ptx.max_f32(absmax, Float32(floor)), Float32(FP32_MAX))
    return ((bounded * Float32(1.0 / largest)).bitcast(Int32) + 0x007FFFFF) >> 23


def ue8m0_from_absmax_each(pair: Iterable[Any], largest: float, floor: Any, arch: str) -> Iterator[Any]:
    """ue8m0_from_absmax of two numbers; where it takes an instruction for each, when it is asked for."""
    if arch not in BLACKWELL:
        yield from (ue8m0_from_absmax(absmax, largest, floor) for absmax in pair)
        return
    bounded = [ptx.min_f32(ptx.max_f32(absmax, Float32(floor)), Float32(FP32_MAX)) for absmax in pair]
    both = ptx.ue8m0x2(*(value * Float32(1.0 / largest) for value in bounded))
    yield from (both & 0xFF, both >> 8)


def ue8m0_inverse(byte: Any) -> Any:
    """fp32 value 2^(127 - byte) of a ue8m0 byte below 254."""
    return ((Int32(254) - byte) << 23).bitcast(Float32)


def _twice(factor: Any) -> Any:
    """A power of two, fp32, as a pair of bf16."""
    bits = factor.bitcast(Int32)
    return ptx.permute_bytes(bits, bits, 0x3232)


def e4m3_from_bf16x4(low: Any, high: Any, factor: Any, arch: str = "") -> Any:
    """Four e4m3 codes of the bf16 words (low, high), each multiplied by the power of two `factor` first.

    The product of a NaN is the positive NaN on every GPU, so a NaN of either sign gets the code 0x7F. A product that
    bf16 has to round is far below the smallest code.
    """
    if arch in BLACKWELL and ptx.HAS_E4M3_OF_BF16:
        pair = _twice(factor)
        return ptx.e4m3x4_of_bf16(ptx.multiply_bf16x2(low, pair), ptx.multiply_bf16x2(high, pair))
    return ptx.e4m3x4(
        bf16_low(low) * factor, bf16_high(low) * factor, bf16_low(high) * factor, bf16_high(high) * factor
    )


@cute.jit
def ue8m0_value(byte: Any) -> Any:
    """fp32 value 2^(byte - 127) of any ue8m0 byte: 0 is the subnormal 2^-127, 255 is NaN."""
    bits = cutlass.max(byte << 23, Int32(0x00400000))
    return (Int32(0x7FC00000) if byte == 255 else bits).bitcast(Float32)


def bf16x4_from_e4m3(codes: Any, factor: Any, arch: str = "") -> tuple[Any, Any]:
    """Four e4m3 codes times the power of two `factor`, as two bf16 pairs. Exact wherever bf16 can hold the product."""
    if arch in BLACKWELL and ptx.HAS_BF16_OF_E4M3:
        pair, (low, high) = _twice(factor), ptx.bf16x2_of_e4m3x4(codes)
        return ptx.multiply_bf16x2(low, pair), ptx.multiply_bf16x2(high, pair)
    if ptx.compiled_for() < ptx.E4M3_ARCH:
        (a, c), (b, d) = (ptx.floats_of_f16x2(pair) for pair in f16x2_of_e4m3x4_by_bits(codes))
        a, b, c, d = (value * Float32(256.0) for value in (a, b, c, d))
    else:
        a, b, c, d = ptx.floats_of_e4m3x4(codes)
    return ptx.bf16x2(a * factor, b * factor), ptx.bf16x2(c * factor, d * factor)


def _e4m3_code(value: float) -> int:
    """Of a number >= 0 that has one."""
    units = int(value * 2**9)
    exponent = max(units.bit_length() - 4, 0)
    return units if units < 8 else 8 * (exponent + 1) + (units >> exponent) - 8


E2M1_UNIT = 2.0**-14
"""The smallest normal f16. Counted in it, e2m1 numbers are built as f16 numbers are, those below 1 subnormal: bits 9 to
11 of the f16 are the code rounded towards zero. f16 holds every bf16 times a power of two exactly from 0.125 to 6
units; the lowest boundary between two codes is at 0.25."""

E2M1_LARGEST = 0x0E000E00
"""6 units, in both halves of a word."""

E2M1_HALF_STEP = 0x00FF00FF
"""A little less than half of what separates two codes, in both halves: adding it rounds, and ties go down."""


def e2m1_from_bf16s(words: Any, factor: Any, rounding: str, arch: str = "") -> Any:
    """e2m1 codes of two or four bf16 words, each number times the power of two `factor`; the lowest nibble comes first.

    rounding   one of numerics.E2M1_ROUNDINGS
    """
    if arch in BLACKWELL:
        return _e2m1_by_instruction(words, factor, rounding)
    words = [*words, *[Int32(0)] * (4 - len(words))]
    scaled = factor * Float32(E2M1_UNIT)
    rounded = []
    for word in words:
        pair = ptx.f16x2(bf16_low(word) * scaled, bf16_high(word) * scaled)
        pair = ptx.min_magnitude_f16x2(ptx.max_magnitude_f16x2(pair, 0), E2M1_LARGEST)
        up = pair + E2M1_HALF_STEP
        if rounding == "ties_to_even":  # a tie goes up from an odd code
            up += (pair >> 9) & 0x00010001
        rounded.append(up)
    # four elements with even numbers and four with odd ones: of each byte, bit 7 is the sign and bits 1 to 3 the code
    first = ptx.permute_bytes(rounded[0], rounded[1], 0x7351)
    second = ptx.permute_bytes(rounded[2], rounded[3], 0x7351)
    even, odd = ptx.permute_bytes(first, second, 0x5410), ptx.permute_bytes(first, second, 0x7632)
    codes = ((even >> 1) & 0x07070707) | ((odd << 3) & 0x70707070)
    signs = ((even >> 4) & 0x0F0F0F0F) | (odd & ~0x0F0F0F0F)
    if rounding == "ties_to_lower":  # no negative zero
        signs &= codes + 0x77777777
    return codes | (signs & ~0x77777777)


def e2m1_instructions(arch: str) -> tuple[str, ...]:
    """What runtime.report.INSTRUCTIONS calls the instructions of e2m1_from_bf16s."""
    return ("cvt.e2m1",) if arch in BLACKWELL else ()


E2M1_NUDGE = 1.0 - 2.0**-12
"""What takes a tie between two e2m1 codes below it. Neighbours of a tie among numbers of 8 bits are 2^-8 of it away,
and the product with a bf16 times a power of two is exact."""


def _e2m1_by_instruction(words: Any, factor: Any, rounding: str) -> Any:
    """As e2m1_from_bf16s. The instruction sends ties to the even code, keeps the sign of zero and makes 6 of NaN."""
    if rounding == "ties_to_even":
        # a NaN of either sign is the positive one after the product, and +0 then
        scaled = [ptx.number_or_zero_bf16x2(ptx.multiply_bf16x2(word, _twice(factor))) for word in words]
        return ptx.e2m1_codes(bf16_floats(scaled))
    nudged = factor * Float32(E2M1_NUDGE)
    codes = ptx.e2m1_codes(
        [value * nudged for value in bf16_floats([ptx.number_or_zero_bf16x2(word) for word in words])]
    )
    # bit 3 of each nibble stays where the others are not 0: there is no negative zero
    return codes & (((codes & 0x77777777) + 0x77777777) | 0x77777777)


def nvfp4_scale(absmax: Any) -> tuple[Any, Any]:
    """e4m3 code of an NVFP4 block's scale, absmax / 6 from 2^-9 to 448, and the reciprocal of that scale.

    x times the reciprocal, x a bf16, gives e2m1_from_bf16s the codes of the exact quotient: eight bits over four bits
    are on a boundary between two codes or 2^-8 of it away, the product is at most 2^-23 off, and f16, which comes
    first, puts it back on a boundary it was on.
    """
    bounded = ptx.min_f32(ptx.max_f32(ptx.mul_rn(absmax, Float32(1.0 / 6.0)), Float32(E4M3_LEAST)), Float32(E4M3_MAX))
    code = ptx.e4m3x4(bounded, bounded, bounded, bounded) & 0xFF
    if ptx.compiled_for() < ptx.E4M3_ARCH:
        (value, _), _ = (ptx.floats_of_f16x2(pair) for pair in f16x2_of_e4m3x4_by_bits(code))
        value = value * Float32(256.0)
    else:
        value, _, _, _ = ptx.floats_of_e4m3x4(code)
    return code, ptx.reciprocal_rn(value)


E2M1_IN_E4M3 = tuple(
    tuple(_e4m3_code(value * 2.0**exponent) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    for exponent in range(6, -9, -1)
)
"""e4m3 codes of the e2m1 magnitudes times 2^6, 2^5, ... 2^-8: those powers of two with which all are exact."""


E2M1_SIGN = 0x40404040


def e4m3_from_e2m1x8(word: Any, low: Any, high: Any, sign: Any) -> tuple[Any, Any]:
    """Eight e2m1 codes of a word, the first in the lowest nibble, as e4m3 codes in two words, with the opposite sign.

    low, high   codes of the magnitudes, eight bytes: a row of E2M1_IN_E4M3
    sign        E2M1_SIGN

    A selector with its high bit set asks for eight times the highest bit of the byte it selects, here 0.
    """
    magnitudes = word & 0x77777777
    found = []
    for shift in (0, 16):
        half_sign = ptx.permute_bytes(sign, sign, word >> shift)
        found.append(ptx.permute_bytes(low, high, magnitudes >> shift) + half_sign * 2)
    return found[0], found[1]


# e4m3 codes of the same key or row, as bf16: ptx.bf16x2_of_codes, multiplied with pairs of their scales.

LARGEST_SINGLE_SCALE = 254 - ptx.E4M3_AS_BF16
"""The largest ue8m0 byte whose scale times 2^120 is a finite bf16: codes of larger scales are multiplied twice."""


def scale_pair(low: Any, high: Any) -> Any:
    """bf16 pair of 2^(byte - 127 + 120) for two ue8m0 bytes of at most LARGEST_SINGLE_SCALE."""
    return (low | (high << 16)) * 128 + ptx.E4M3_AS_BF16 * 0x00800080


def excess_pair(low: Any, high: Any) -> Any:
    """bf16 pair of what scale_pair leaves out of two ue8m0 bytes: 1, or a power of two; NaN of byte 255."""
    return _excess(low) | (_excess(high) << 16)


@cute.jit
def _excess(byte: Any) -> Any:
    exponent = (cutlass.max(byte - LARGEST_SINGLE_SCALE, Int32(0)) + 127) << 7
    return Int32(0x7FC0) if byte == 255 else exponent


SIGNS = 0x80008000 - (1 << 32)
"""The sign bits of both halves of a word."""


def f16x2_of_e4m3x4_by_bits(word: Any) -> tuple[Any, Any]:
    """Four e4m3 codes as f16, times 2^-8: those of bytes 0 and 2, and of bytes 1 and 3. Exact; NaN stays NaN. For GPUs
    that do not convert e4m3.

    The bits S EEEE MMM become S 0 EEEE MMM 0000000, with 1 in place of that 0 for NaN: adding 1 to the magnitude of a
    NaN, and of nothing else, carries into its sign.
    """
    is_nan = (word & 0x7F7F7F7F) + 0x01010101
    pairs = []
    for left in (8, 0):
        code = word << left
        pairs.append((code & SIGNS) | ((code >> 1) & 0x3F803F80) | (((is_nan << left) >> 1) & 0x40004000))
    return pairs[0], pairs[1]


def bf16x2_of_e2m1x8(word: Any) -> list[Any]:
    """Eight e2m1 codes as bf16 pairs, times 2^-126: those of nibbles i and i + 4 for i = 0 to 3. Exact: the bits S EE M
    become S 000000 EE M 000000."""
    # nibble i to the top of its half; without the sign, its lowest bit to bit 6
    codes = [word << 12, word << 8, word << 4, word]
    magnitudes = [word << 6, word << 2, word >> 2, word >> 6]
    return [(c & SIGNS) | (m & 0x01C001C0) for c, m in zip(codes, magnitudes, strict=True)]


def bf16_pairs_of_e2m1(word: Any) -> list[Any]:
    """Eight e2m1 codes as bf16 pairs in their order, times 2^-126, as bf16x2_of_e2m1x8 has them in another one."""
    # code 2 i comes to the top of byte i, where code 2 i + 1 is
    return [ptx.bf16x2_of_nibbles(word << 4, word, i) for i in range(4)]


E2M1_AS_BF16 = (127 + 126) * 0x00800080
"""2^126 in both halves of a word, as bf16."""


def bf16_of_e2m1(word: Any) -> list[Any]:
    """Eight e2m1 codes as bf16 pairs in their order, exact."""
    return [ptx.multiply_bf16x2(pair, ptx.again(E2M1_AS_BF16)) for pair in bf16_pairs_of_e2m1(word)]


LARGEST_SINGLE_E2M1_SCALE = 130
"""The largest ue8m0 byte whose scale takes one factor in e2m1_scale_pairs."""


@cute.jit
def e2m1_scale_pairs(byte: Any) -> tuple[Any, Any]:
    """Two factors, as bf16 pairs, that turn what bf16x2_of_e2m1x8 gives into a quarter of values with that ue8m0 byte:
    2^(byte - 3) in all. The quarter lets bf16 hold every one exactly, from 0.5 x 2^-127 to 6 x 2^127. NaN of 255."""
    first = cutlass.min(byte, Int32(LARGEST_SINGLE_E2M1_SCALE)) + 124
    second = cutlass.max(byte - LARGEST_SINGLE_E2M1_SCALE, Int32(0)) + 127
    factor = Int32(0x7FC0) if byte == 255 else second << 7
    return (first << 7) * 0x00010001, factor * 0x00010001
