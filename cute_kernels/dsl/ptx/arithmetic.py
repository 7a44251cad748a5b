# SPDX-License-Identifier: Apache-2.0
"""Arithmetic with its rounding spelled out, and conversions between number formats."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Float64, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx
from cutlass.cutlass_dsl import CuTeDSL


def permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    """sm_70 and up. Four of the eight bytes of (a, b): nibble i of `selector`, a number or a register, picks byte i;
    0..3 are a's, 4..7 b's."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, Int32(selector)]
    )


def max_bf16x2(a: Any, b: Any) -> Any:
    """sm_80 and up. Larger of each pair of bf16 halves; a NaN loses against a number."""
    return inline_ptx("max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def max_u16x2(a: Any, b: Any) -> Any:
    """sm_90 and up. Larger of each pair of unsigned 16-bit halves."""
    return inline_ptx("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(a), Int32(b)])


def max_f32(a: Any, b: Any) -> Any:
    """sm_70 and up. The larger one; a NaN loses against a number."""
    return inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(a), Float32(b)]
    )


def max3_f32(a: Any, b: Any, c: Any) -> Any:
    """sm_100a and up. The largest one; a NaN loses against a number."""
    return inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[Float32(a), Float32(b), Float32(c)],
    )


def min_f32(a: Any, b: Any) -> Any:
    """sm_70 and up. The smaller one; a NaN loses against a number."""
    return inline_ptx(
        "min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(a), Float32(b)]
    )


def descending_order(a: Any) -> Any:
    """sm_70 and up. An unsigned number that falls as the fp32 grows: equal for -0 and +0, and 0xFFFFFFFF, which no
    number has, for NaN."""
    return inline_ptx(
        "{ .reg .pred p; .reg .f32 f; .reg .b32 b, s; add.rn.f32 f, {$r0}, 0f00000000; mov.b32 b, f; "
        "shr.s32 s, b, 31; not.b32 s, s; and.b32 s, s, 0x7fffffff; xor.b32 b, b, s; "
        "setp.nan.f32 p, {$r0}, {$r0}; selp.b32 {$w0}, 0xffffffff, b, p; }",
        write_only_types=[Uint32],
        read_only_args=[Float32(a)],
    )


def of_descending_order(order: Any) -> Any:
    """sm_70 and up. An fp32 with that descending_order."""
    return inline_ptx(
        "{ .reg .b32 s; shr.s32 s, {$r0}, 31; not.b32 s, s; and.b32 s, s, 0x7fffffff; xor.b32 s, s, {$r0}; "
        "mov.b32 {$w0}, s; }",
        write_only_types=[Float32],
        read_only_args=[Uint32(order)],
    )


def count_where_at_least(count: Any, a: Any, b: Any) -> Any:
    """sm_70 and up. The number, one more if a >= b; a NaN is not."""
    return inline_ptx(
        "{ .reg .pred p; setp.ge.f32 p, {$r1}, {$r2}; mov.b32 {$w0}, {$r0}; @p add.s32 {$w0}, {$w0}, 1; }",
        write_only_types=[Int32],
        read_only_args=[Int32(count), Float32(a), Float32(b)],
    )


def mark_where_at_least(marks: Any, a: Any, b: Any, bit: int) -> Any:
    """sm_70 and up. The word, with that bit set if a >= b; a NaN is not."""
    return inline_ptx(
        "{ .reg .pred p; setp.ge.f32 p, {$r1}, {$r2}; mov.b32 {$w0}, {$r0}; "
        f"@p or.b32 {{$w0}}, {{$w0}}, {1 << bit:#x}; }}",
        write_only_types=[Int32],
        read_only_args=[Int32(marks), Float32(a), Float32(b)],
    )


def abs_f32(a: Any) -> Any:
    """sm_70 and up. The magnitude."""
    return inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def _binary_f32(instruction: str, a: Any, b: Any) -> Any:
    return inline_ptx(
        f"{instruction}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
        write_only_types=[Float32],
        read_only_args=[Float32(a), Float32(b)],
    )


def mul_rn(a: Any, b: Any) -> Any:
    """sm_70 and up. a * b, nearest even."""
    return _binary_f32("mul.rn", a, b)


def add_rn(a: Any, b: Any) -> Any:
    """sm_70 and up. a + b, nearest even."""
    return _binary_f32("add.rn", a, b)


def sub_rn(a: Any, b: Any) -> Any:
    """sm_70 and up. a - b, nearest even."""
    return _binary_f32("sub.rn", a, b)


def fma_rn(a: Any, b: Any, c: Any) -> Any:
    """sm_70 and up. a * b + c, rounded once, nearest even."""
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[Float32(a), Float32(b), Float32(c)],
    )


def fma_f32x2(a: Any, b: Any, c: Any) -> tuple[Any, Any]:
    """sm_100a and up. fma_rn of two pairs of numbers, and a third one."""
    return inline_ptx(
        "{ .reg .b64 a, b, c; mov.b64 a, {{$r0}, {$r1}}; mov.b64 b, {{$r2}, {$r3}}; mov.b64 c, {{$r4}, {$r5}}; "
        "fma.rn.f32x2 c, a, b, c; mov.b64 {{$w0}, {$w1}}, c; }",
        write_only_types=[Float32, Float32],
        read_only_args=[Float32(number) for pair in (a, b, c) for number in pair],
    )


def twice_relu_f32x2(pair: Any) -> tuple[Any, Any]:
    """sm_100a and up. x + |x| of two numbers: twice relu of it, exactly, from -fp32's largest number up to 2^127. -inf
    gives NaN, larger numbers infinity; NaN stays NaN."""
    return inline_ptx(
        "{ .reg .f32 l, h; .reg .b64 a, b; abs.f32 l, {$r0}; abs.f32 h, {$r1}; mov.b64 a, {{$r0}, {$r1}}; "
        "mov.b64 b, {l, h}; add.rn.f32x2 a, a, b; mov.b64 {{$w0}, {$w1}}, a; }",
        write_only_types=[Float32, Float32],
        read_only_args=[Float32(number) for number in pair],
    )


def div_rn(a: Any, b: Any) -> Any:
    """sm_70 and up. a / b, nearest even: a dozen instructions."""
    return _binary_f32("div.rn", a, b)


def reciprocal_f64(a: Any) -> Any:
    """sm_70 and up. float64 1 / a of an fp32, nearest even."""
    return inline_ptx(
        "{ .reg .f64 d; cvt.f64.f32 d, {$r0}; rcp.rn.f64 {$w0}, d; }",
        write_only_types=[Float64],
        read_only_args=[Float32(a)],
    )


def mul_f64(a: Any, b: Any) -> Any:
    """sm_70 and up. fp32 a times float64 b, rounded to float64 and then to fp32."""
    return inline_ptx(
        "{ .reg .f64 d; cvt.f64.f32 d, {$r0}; mul.rn.f64 d, d, {$r1}; cvt.rn.f32.f64 {$w0}, d; }",
        write_only_types=[Float32],
        read_only_args=[Float32(a), b],
    )


def rsqrt(a: Any) -> Any:
    """sm_70 and up. 1 / sqrt(a), off by at most 2^-22.9 of it."""
    return inline_ptx("rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def reciprocal(a: Any) -> Any:
    """sm_70 and up. 1 / a, off by at most one unit in the last place; exact for powers of two."""
    return inline_ptx("rcp.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def reciprocal_normal(a: Any) -> Any:
    """sm_70 and up. As reciprocal, of what is neither subnormal nor above 2^126."""
    return inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def reciprocal_rn(a: Any) -> Any:
    """sm_70 and up. 1 / a, nearest even."""
    return inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def min_s64(a: Any, b: Any) -> Any:
    """sm_70 and up. The smaller int64."""
    return inline_ptx("min.s64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[Int64(a), Int64(b)])


def max_s64(a: Any, b: Any) -> Any:
    """sm_70 and up. The larger int64."""
    return inline_ptx("max.s64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[Int64(a), Int64(b)])


E4M3_ARCH, MAGNITUDE_ARCH = 89, 86
"""First architectures that convert e4m3, and that compare magnitudes. Before, a few instructions do the same."""


def compiled_for() -> int:
    """90 of sm_90a: the architecture that is compiled for."""
    arch = CuTeDSL._get_dsl().get_arch_enum()
    return int(arch.major) * 10 + int(arch.minor)


def _e4m3(value: Any) -> Any:
    """sm_80 and up. fp32 as an e4m3 code, as e4m3x4 does it: the largest magnitude first, then numbers that have an
    exponent in e4m3, rounded as integers, and smaller ones, rounded by adding 2^14, whose last bit is theirs."""
    return inline_ptx(
        "{ .reg .pred small, nan; .reg .b32 m, n, t; .reg .f32 f; and.b32 m, {$r0}, 0x7FFFFFFF; "
        "setp.gt.u32 nan, m, 0x7F800000; min.u32 m, m, 0x43E00000; setp.lt.u32 small, m, 0x3C800000; "
        "shr.u32 n, m, 20; and.b32 n, n, 1; add.u32 n, n, m; add.u32 n, n, 0xC407FFFF; shr.u32 n, n, 20; "
        "and.b32 n, n, 0x7F; mov.b32 f, m; add.rn.f32 f, f, 0f46800000; mov.b32 t, f; sub.u32 t, t, 0x46800000; "
        "selp.b32 n, t, n, small; shr.u32 t, {$r0}, 24; and.b32 t, t, 0x80; or.b32 n, n, t; "
        "selp.b32 {$w0}, 0x7F, n, nan; }",
        write_only_types=[Int32],
        read_only_args=[Float32(value).bitcast(Int32)],
    )


def e4m3x4(a: Any, b: Any, c: Any, d: Any) -> Any:
    """sm_80 and up. Four fp32 as e4m3 codes, `a` in the lowest byte: nearest even, saturating at 448; NaN is 0x7F."""
    if compiled_for() < E4M3_ARCH:
        return _e4m3(a) | (_e4m3(b) << 8) | (_e4m3(c) << 16) | (_e4m3(d) << 24)
    return inline_ptx(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 hi, {$r3}, {$r2}; mov.b32 {$w0}, {lo, hi}; }",
        write_only_types=[Int32],
        read_only_args=[a, b, c, d],
    )


def floats_of_e4m3x4(codes: Any) -> tuple[Any, Any, Any, Any]:
    """sm_89 and up. The four e4m3 codes of a word as fp32, exact, the lowest byte first; 0x7F and 0xFF give NaN."""
    return inline_ptx(
        "{ .reg .b16 lo, hi, a, b, c, d; .reg .b32 p, q; mov.b32 {lo, hi}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 p, lo; cvt.rn.f16x2.e4m3x2 q, hi; mov.b32 {a, b}, p; mov.b32 {c, d}, q; "
        "cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; cvt.f32.f16 {$w2}, c; cvt.f32.f16 {$w3}, d; }",
        write_only_types=[Float32, Float32, Float32, Float32],
        read_only_args=[codes],
    )


def floats_of_f16x2(pair: Any) -> tuple[Any, Any]:
    """sm_70 and up. The halves of a word, two f16, as fp32, the low one first."""
    return inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def f16x2_of_e4m3x4(codes: Any) -> tuple[Any, Any]:
    """sm_89 and up. The four e4m3 codes of a word as two pairs of f16, exact, the lowest bytes first; NaN stays NaN."""
    return inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Int32, Int32],
        read_only_args=[Int32(codes)],
    )


def bf16x2(low: Any, high: Any) -> Any:
    """sm_80 and up. Two fp32 as a pair of bf16, nearest even."""
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[Float32(low), Float32(high)]
    )


def f16x2(low: Any, high: Any) -> Any:
    """sm_80 and up. Two fp32 as a pair of f16, nearest even; a NaN of either sign becomes 0x7FFF."""
    return inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[Float32(low), Float32(high)]
    )


def of_magnitude(instruction: str, kind: str, pair: Any, other: int) -> Any:
    """sm_80 and up. max or min of the magnitudes of a pair's halves, of that kind, and of those of `other`, which are
    >= 0; signs stay, and NaN gives `other`."""
    if compiled_for() < MAGNITUDE_ARCH:
        body = f"and.b32 m, {{$r0}}, 0x7FFF7FFF; {instruction}.{kind} m, m, other; and.b32 s, {{$r0}}, 0x80008000; "
        body = f".reg .b32 m, s; mov.b32 other, {other}; {body}or.b32 {{$w0}}, m, s;"
    else:
        body = f"mov.b32 other, {other}; {instruction}.xorsign.abs.{kind} {{$w0}}, {{$r0}}, other;"
    return inline_ptx(
        f"{{ .reg .b32 other; {body} }}",
        write_only_types=[Int32],
        read_only_args=[pair],
    )


def max_magnitude_f16x2(pair: Any, least: int) -> Any:
    """sm_80 and up. Halves of at least the magnitude of `least`, two f16 >= 0; signs stay, NaN gives `least`."""
    return of_magnitude("max", "f16x2", pair, least)


def min_magnitude_f16x2(pair: Any, most: int) -> Any:
    """sm_80 and up. Halves of at most the magnitude of `most`, two f16 >= 0; signs stay, NaN gives `most`."""
    return of_magnitude("min", "f16x2", pair, most)


LOG2_E = 1.4426950408889634
"""exp2 of a number times this is its exponential."""


LN_2 = 0.6931471805599453
"""log2 of a number times this is its natural logarithm."""


def exp2(a: Any) -> Any:
    """sm_70 and up. 2^a, off by at most 2^-22 of it; subnormal results are 0."""
    return inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def log2(a: Any) -> Any:
    """sm_70 and up. Binary logarithm, off by at most 2^-22."""
    return inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


E4M3_AS_BF16 = 120
"""The bits of an e4m3 code, moved to where bf16 keeps its sign, exponent and mantissa, are 2^-120 times its value."""


def bf16x2_of_ue8m0(bytes_: Any, number: int) -> Any:
    """sm_80 and up. 2^(e - 127 + 120) in both halves, for byte `number` (0 to 3) of a word, e <= 134."""
    return inline_ptx(
        f"{{ .reg .b32 e; prmt.b32 e, {{$r0}}, 0, {0x4040 | number | number << 8:#x}; shl.b32 e, e, 7; "
        f"add.u32 {{$w0}}, e, {E4M3_AS_BF16 * 0x00800080}; }}",
        write_only_types=[Int32],
        read_only_args=[Int32(bytes_)],
    )


def bf16x2_of_codes(word: Any, left: int) -> Any:
    """sm_70 and up. The e4m3 codes in bytes 1 and 3 of (word << left), left = 0 or 8, as bf16, times 2^-120. Exact;
    codes 0x7F and 0xFF count as 480 and -480."""
    shift = "shr.u32 t, {$r0}, 4; mov.b32 s, {$r0};" if left == 0 else "shl.b32 t, {$r0}, 4; shl.b32 s, {$r0}, 8;"
    return inline_ptx(
        f"{{ .reg .b32 s, t; {shift} and.b32 t, t, 0x07f007f0; lop3.b32 {{$w0}}, s, 0x80008000, t, 0xea; }}",
        write_only_types=[Int32],
        read_only_args=[Int32(word)],
    )


def bf16x2_of_nibbles(even: Any, odd: Any, number: int) -> Any:
    """sm_70 and up. The e2m1 codes at the top of byte `number` of both words as bf16, times 2^-126. Exact: each byte
    comes with eight copies of its sign above it."""
    selector = (12 + number) << 12 | (4 + number) << 8 | (8 + number) << 4 | number
    return inline_ptx(
        f"{{ .reg .b32 t; prmt.b32 t, {{$r0}}, {{$r1}}, {selector}; shl.b32 t, t, 2; "
        "and.b32 {$w0}, t, 0x81c081c0; }",
        write_only_types=[Int32],
        read_only_args=[Int32(even), Int32(odd)],
    )


def bf16x2_of_two_codes(word: Any, pair: int) -> Any:
    """sm_70 and up. As bf16x2_of_codes, of the codes in bytes 2 * pair and 2 * pair + 1 of a word. Three instructions:
    each byte comes with eight copies of its sign above it."""
    selector = (0x9180, 0xB3A2)[pair]
    return inline_ptx(
        f"{{ .reg .b32 t; prmt.b32 t, {{$r0}}, {{$r0}}, {selector}; "
        "shl.b32 t, t, 4; and.b32 {$w0}, t, 0x87f087f0; }",
        write_only_types=[Int32],
        read_only_args=[Int32(word)],
    )


def multiply_bf16x2(a: Any, b: Any) -> Any:
    """sm_80 and up. Products of both halves, nearest even; subnormal numbers count. What is added is -0."""
    return inline_ptx(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, zero; }",
        write_only_types=[Int32],
        read_only_args=[Int32(a), Int32(b)],
    )


def multiply_f16x2(a: Any, b: Any) -> Any:
    """sm_70 and up. Products of both halves, nearest even; subnormal numbers count."""
    return inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[Int32(a), Int32(b)]
    )


def relu(a: Any) -> Any:
    """sm_80 and up. The number if it is positive, else 0; NaN stays NaN."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Float32], read_only_args=[Float32(a)])


def multiply_saturated(a: Any, b: Any) -> Any:
    """sm_70 and up. a * b, nearest even, but 0 if that is less, or NaN, and 1 if it is more. On Hopper this has twice
    the rate of a maximum."""
    return _binary_f32("mul.rn.sat", a, b)
