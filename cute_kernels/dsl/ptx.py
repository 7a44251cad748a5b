"""Every inline PTX instruction of the kernels. The first line of each says on which architectures it is legal.

Addresses are plain 64-bit numbers: a kernel computes them in full width, and no layout algebra can narrow them.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

inline_ptx = cute.arch.inline_ptx

DEPENDENT_LAUNCH_ARCH = 90
"""First architecture with programmatic dependent launch, and so with `griddepcontrol`."""


def load_global_128(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes that no thread writes during the kernel and that are read once; 16-byte aligned."""
    return inline_ptx(
        "ld.global.nc.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_128_again(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. As load_global_128, for data that other threads of the SM read too: it stays in L1."""
    return inline_ptx(
        "ld.global.nc.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_s64(address: Any) -> Any:
    """sm_70 and up. An int64 that no thread writes during the kernel."""
    return inline_ptx("ld.global.nc.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[Int64(address)])


# The loads in order stay in program order among themselves. The assembler sinks other loads to where their values are
# used, to save registers, and a load that is sunk below the wait for another one costs its whole latency once more.


def load_global_128_in_order(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes that are read once, 16-byte aligned."""
    return inline_ptx(
        _in_order("v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}"),
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_64_in_order(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. 8 bytes that are read once, 8-byte aligned."""
    return inline_ptx(
        _in_order("v2.b32 {{$w0}, {$w1}}"), write_only_types=[Int32, Int32], read_only_args=[Int64(address)]
    )


def load_global_s64_in_order(address: Any) -> Any:
    """sm_70 and up. An int64."""
    return inline_ptx(_in_order("b64 {$w0}"), write_only_types=[Int64], read_only_args=[Int64(address)])


def load_global_s32_in_order(address: Any) -> Any:
    """sm_70 and up. An int32."""
    return inline_ptx(_in_order("b32 {$w0}"), write_only_types=[Int32], read_only_args=[Int64(address)])


def _in_order(what: str) -> str:
    return f"ld.relaxed.gpu.global.L1::no_allocate.{what}, [{{$r0}}];"


def store_global_128(address: Any, words: Any, predicate: Any = None) -> None:
    """sm_70 and up. Four words, 16-byte aligned; where there is a predicate and it is false, nothing happens."""
    inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int64(address), *(Int32(word) for word in words)],
        predicate=predicate,
    )


def store_global_64(address: Any, low: Any, high: Any) -> None:
    """sm_70 and up. 8 bytes, 8-byte aligned."""
    inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[Int64(address), Int32(low), Int32(high)])


def permute_bytes(a: Any, b: Any, selector: int) -> Any:
    """sm_70 and up. Four of the eight bytes of (a, b): nibble i of `selector` picks byte i; 0..3 are a's, 4..7 b's."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Int32], read_only_args=[a, b, Int32(selector)]
    )


def max_bf16x2(a: Any, b: Any) -> Any:
    """sm_80 and up. Larger of each pair of bf16 halves; a NaN loses against a number."""
    return inline_ptx("max.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def max_f32(a: Any, b: Any) -> Any:
    """sm_70 and up. The larger one; a NaN loses against a number."""
    return inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(a), Float32(b)]
    )


def min_f32(a: Any, b: Any) -> Any:
    """sm_70 and up. The smaller one; a NaN loses against a number."""
    return inline_ptx(
        "min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[Float32(a), Float32(b)]
    )


def e4m3x4(a: Any, b: Any, c: Any, d: Any) -> Any:
    """sm_89 and up. Four fp32 as e4m3 codes, `a` in the lowest byte: nearest even, saturating at 448."""
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


def bf16x2(low: Any, high: Any) -> Any:
    """sm_80 and up. Two fp32 as a pair of bf16, nearest even."""
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[Float32(low), Float32(high)]
    )
