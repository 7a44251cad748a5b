# SPDX-License-Identifier: Apache-2.0
"""Conversions from and to narrow formats that Blackwell has instructions for, two or more numbers at a time.

What rounds, and to where, is NVIDIA's PTX manual's; tests/dsl/words.py has the same in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import CUDA_VERSION, Int32
from cutlass.cute.arch import inline_ptx

from cute_kernels.dsl.ptx.arithmetic import of_magnitude

HAS_BF16_OF_E4M3, HAS_E4M3_OF_BF16 = ((CUDA_VERSION.major, CUDA_VERSION.minor) >= first for first in ((13, 2), (13, 1)))
"""Whether the DSL's assembler takes cvt.rn.bf16x2.e4m3x2, and cvt.rn.satfinite.e4m3x2.bf16x2: PTX ISA 9.2 and 9.1, so
from CUDA 13.2 and 13.1 on. tests/compile/test_assemblers.py asks it."""


def bf16x2_of_e4m3x4(codes: Any) -> tuple[Any, Any]:
    """sm_100a and up, where HAS_BF16_OF_E4M3. The four e4m3 codes of a word as two pairs of bf16, exact, the lowest
    bytes first; 0x7F and 0xFF give NaN."""
    return inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; "
        "cvt.rn.bf16x2.e4m3x2 {$w0}, lo; cvt.rn.bf16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Int32, Int32],
        read_only_args=[Int32(codes)],
    )


def bf16x2_of_ue8m0x2(bytes_: Any, number: int) -> Any:
    """sm_100a and up. The ue8m0 scales in the low (number = 0) or high (1) half of a word as a pair of bf16, the lower
    byte first: 2^(byte - 127); 0 is the subnormal 2^-127, 255 is NaN."""
    half = "lo" if number == 0 else "hi"
    return inline_ptx(
        f"{{ .reg .b16 lo, hi; mov.b32 {{lo, hi}}, {{$r0}}; cvt.rn.bf16x2.ue8m0x2 {{$w0}}, {half}; }}",
        write_only_types=[Int32],
        read_only_args=[Int32(bytes_)],
    )


def e2m1_codes(values: Sequence[Any]) -> Any:
    """sm_100a and up. Four or eight fp32 as e2m1 codes, the first in the lowest nibble of a word: nearest, ties to the
    even code, saturating at 6; the sign of zero stays; NaN becomes 6."""
    pairs = range(len(values) // 2)
    parts = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}}; " for i in pairs)
    pack = "mov.b16 low, {b0, b1}; mov.b16 none, 0; mov.b32 {$w0}, {low, none};"
    if len(values) == 8:
        pack = "mov.b32 {$w0}, {b0, b1, b2, b3};"
    return inline_ptx(
        f"{{ .reg .b8 b<{len(pairs)}>; .reg .b16 low, none; {parts}{pack} }}",
        write_only_types=[Int32],
        read_only_args=list(values),
    )


def ue8m0x2(low: Any, high: Any) -> Any:
    """sm_100a and up. ue8m0 bytes of two fp32 > 0, that of `low` in the lowest byte of a word, 0 above them: the
    smallest power of two that is no smaller; up to 2^-127 gives 0, infinity 254, NaN 255."""
    return inline_ptx(
        "{ .reg .b16 both, none; cvt.rp.satfinite.ue8m0x2.f32 both, {$r1}, {$r0}; mov.b16 none, 0; "
        "mov.b32 {$w0}, {both, none}; }",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def e4m3x4_of_bf16(low: Any, high: Any) -> Any:
    """sm_100a and up, where HAS_E4M3_OF_BF16. Four bf16 in two words as e4m3 codes in their order: nearest even,
    saturating at 448; NaN becomes 0x7F."""
    return inline_ptx(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.bf16x2 lo, {$r0}; cvt.rn.satfinite.e4m3x2.bf16x2 hi, {$r1}; "
        "mov.b32 {$w0}, {lo, hi}; }",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def number_or_zero_bf16x2(pair: Any) -> Any:
    """sm_80 and up. The halves of a bf16 pair as they are, but 0, of its sign, in place of NaN."""
    return of_magnitude("max", "bf16x2", pair, 0)
