"""Conversions from narrow number formats that Blackwell has instructions for, two or four numbers at a time."""

from __future__ import annotations

from typing import Any

from cutlass import CUDA_VERSION, Int32

from cute_kernels.dsl.ptx.inline import inline_ptx

HAS_BF16_OF_E4M3 = CUDA_VERSION.major >= 13
"""Whether the DSL's assembler knows the instruction of bf16x2_of_e4m3x4: that of CUDA 12 does not."""


def bf16x2_of_e4m3x4(codes: Any) -> tuple[Any, Any]:
    """sm_100a and up, where HAS_BF16_OF_E4M3. The four e4m3 codes of a word as two pairs of bf16, exact, the lowest
    bytes first; 0x7F and 0xFF give NaN."""
    return inline_ptx(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; "
        "cvt.rn.bf16x2.e4m3x2 {$w0}, lo; cvt.rn.bf16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Int32, Int32],
        read_only_args=[Int32(codes)],
    )


def f16x2_of_e2m1x8(codes: Any) -> tuple[Any, Any, Any, Any]:
    """sm_100a and up. The eight e2m1 codes of a word as four pairs of f16, exact, the lowest nibbles first."""
    parts = "".join(f"cvt.rn.f16x2.e2m1x2 {{$w{i}}}, b{i}; " for i in range(4))
    return inline_ptx(
        f"{{ .reg .b8 b<4>; mov.b32 {{b0, b1, b2, b3}}, {{$r0}}; {parts}}}",
        write_only_types=[Int32] * 4,
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


def bf16x2_of_scale(bytes_: Any, number: int) -> Any:
    """sm_80 and up. The ue8m0 scale in byte `number` (0 to 3) of a word in both halves of a pair of bf16; byte 0 gives
    0, 255 infinity. For scales that an op wrote, which are neither."""
    return inline_ptx(
        f"{{ .reg .b32 e; bfe.u32 e, {{$r0}}, {8 * number}, 8; mul.lo.u32 {{$w0}}, e, 0x00800080; }}",
        write_only_types=[Int32],
        read_only_args=[Int32(bytes_)],
    )
