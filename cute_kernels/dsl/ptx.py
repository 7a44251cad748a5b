"""Every inline PTX instruction of the kernels. The first line of each says on which architectures it is legal.

Addresses are plain 64-bit numbers: a kernel computes them in full width, and no layout algebra can narrow them.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import AddressSpace, Float32, Float64, Int8, Int32, Int64, Uint32
from cutlass._mlir.dialects import cute as cute_dialect
from cutlass._mlir.dialects import cute_nvgpu, llvm
from cutlass.cutlass_dsl import T

inline_ptx = cute.arch.inline_ptx
_dialect: Any = cute_dialect

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


def load_global_128_weak(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. As load_global_128_again, for what a kernel before may have written after this one began."""
    return inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_64_again(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. As load_global_128_again: 8 bytes, 8-byte aligned."""
    return inline_ptx(
        "ld.global.nc.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_s64(address: Any) -> Any:
    """sm_70 and up. An int64 that no thread writes during the kernel."""
    return inline_ptx("ld.global.nc.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[Int64(address)])


def load_global_s32_again(address: Any) -> Any:
    """sm_70 and up. An int32 that no thread writes during the kernel and that others of the SM read too."""
    return inline_ptx("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int64(address)])


# The loads in order stay in program order among themselves. The assembler sinks other loads to where their values are
# used, to save registers, and a load that is sunk below the wait for another one costs its whole latency once more.


def load_global_128_in_order(address: Any, through_l1: bool = False) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes that are read once, 16-byte aligned. A call that fills the memory's pipe is faster if its
    lines may go through L1, a short one if they may not (perf/notes/memory_bound.md)."""
    return inline_ptx(
        _in_order("v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}", through_l1),
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_128_cached_in_order(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes through L1, 16-byte aligned; for data that others of the SM read too, or that is streamed
    while as much is written: memory then is 5% faster than with loads that leave L1 out."""
    return inline_ptx(
        "ld.relaxed.cta.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_64_in_order(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. 8 bytes that are read once, 8-byte aligned."""
    return inline_ptx(
        _in_order("v2.b32 {{$w0}, {$w1}}"), write_only_types=[Int32, Int32], read_only_args=[Int64(address)]
    )


def load_global_s64_in_order(address: Any, is_shared: bool = False) -> Any:
    """sm_70 and up. An int64; is_shared: other threads of the SM read it too, and it may come from L1."""
    load = _in_order("b64 {$w0}", is_shared=is_shared)
    return inline_ptx(load, write_only_types=[Int64], read_only_args=[Int64(address)])


def load_global_s32_in_order(address: Any, is_shared: bool = False) -> Any:
    """sm_70 and up. An int32; is_shared: as above."""
    load = _in_order("b32 {$w0}", is_shared=is_shared)
    return inline_ptx(load, write_only_types=[Int32], read_only_args=[Int64(address)])


def load_global_bool_in_order(address: Any) -> Any:
    """sm_70 and up. A byte that is 0 or 1, as an int32."""
    return inline_ptx(_in_order("u8 {$w0}"), write_only_types=[Int32], read_only_args=[Int64(address)])


def load_global_u16_in_order(address: Any) -> Any:
    """sm_70 and up. Two bytes, as the low half of a word."""
    return inline_ptx(_in_order("u16 {$w0}"), write_only_types=[Int32], read_only_args=[Int64(address)])


def load_global_bool_where(condition: Any, address: Any) -> Any:
    """sm_70 and up, in order. A byte that is 0 or 1, as an int32; -1 where the condition fails."""
    return _load_where(_in_order("u8 {$w0}"), condition, address, 1)


def load_global_128_where(condition: Any, address: Any, through_l1: bool = False) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. As load_global_128_in_order; four times -1 where the condition fails."""
    return _load_where(_in_order("v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}", through_l1), condition, address, 4)


def load_global_128_cached_where(condition: Any, address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. As load_global_128_cached_in_order; four times -1 where the condition fails."""
    return _load_where(_in_order("v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}", is_shared=True), condition, address, 4)


def load_global_s32_where(condition: Any, address: Any, is_shared: bool = False) -> Any:
    """sm_70 and up. As load_global_s32_in_order; -1 where the condition fails."""
    return _load_where(_in_order("b32 {$w0}", is_shared=is_shared), condition, address, 1)


def load_global_s64_where(condition: Any, address: Any) -> Any:
    """sm_70 and up, in order. An int64; -1 where the condition fails."""
    return inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; mov.b64 {{$w0}}, -1; @p {_in_order('b64 {$w0}')} }}",
        write_only_types=[Int64],
        read_only_args=[Int64(address), Int32(condition)],
    )


def load_global_s32_again_where(condition: Any, address: Any) -> Any:
    """sm_70 and up. An int32 that no thread writes during the kernel and that others of the SM read too; it stays in
    L1. -1 where the condition fails."""
    return _load_where("ld.global.nc.b32 {$w0}, [{$r0}];", condition, address, 1)


def load_element_s32(row: Any, index: Any, length: Any, condition: Any = None) -> Any:
    """sm_70 and up. Number `index` of the `length` int32 at an address, which no thread writes during the kernel and
    which others of the SM read too; -1 if the index, as an unsigned number, is past them, or where the condition fails.
    """
    test = "setp.lt.u32 p, {$r1}, {$r2};"
    arguments = [Int64(row), Int32(index), Int32(length)]
    if condition is not None:
        test = "setp.ne.b32 p, {$r3}, 0; setp.lt.and.u32 p, {$r1}, {$r2}, p;"
        arguments.append(Int32(condition))
    return inline_ptx(
        f"{{ .reg .pred p; .reg .b64 element; {test} mad.wide.u32 element, {{$r1}}, 4, {{$r0}}; "
        "mov.b32 {$w0}, -1; @p ld.global.nc.b32 {$w0}, [element]; }",
        write_only_types=[Int32],
        read_only_args=arguments,
    )


def value_below(index: Any, length: Any, value: Any) -> Any:
    """sm_70 and up. The value if the index, as an unsigned number, is below the length, else -1."""
    return inline_ptx(
        "{ .reg .pred p; setp.lt.u32 p, {$r0}, {$r1}; selp.b32 {$w0}, {$r2}, -1, p; }",
        write_only_types=[Int32],
        read_only_args=[Int32(index), Int32(length), Int32(value)],
    )


def _load_where(load: str, condition: Any, address: Any, words: int) -> Any:
    """`load` with a predicate: nothing is read where the condition fails."""
    otherwise = " ".join(f"mov.b32 {{$w{i}}}, -1;" for i in range(words))
    return inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; {otherwise} @p {load} }}",
        write_only_types=[Int32] * words,
        read_only_args=[Int64(address), Int32(condition)],
    )


def _in_order(what: str, through_l1: bool = False, is_shared: bool = False) -> str:
    how = "cta.global." if is_shared else "gpu.global." if through_l1 else "gpu.global.L1::no_allocate."
    return f"ld.relaxed.{how}{what}, [{{$r0}}];"


def prefetch_l2(address: Any, predicate: Any) -> None:
    """sm_70 and up. Where the predicate holds, ask for the 128 bytes around an address: L2 has them when needed."""
    inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[Int64(address)], predicate=predicate)


def store_global_128(address: Any, words: Any, predicate: Any = None) -> None:
    """sm_70 and up. Four words, 16-byte aligned; where there is a predicate and it is false, nothing happens."""
    inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int64(address), *(Int32(word) for word in words)],
        predicate=predicate,
    )


def store_global_s32(address: Any, word: Any, predicate: Any = None) -> None:
    """sm_70 and up. An int32; where there is a predicate and it is false, nothing happens."""
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[Int64(address), Int32(word)], predicate=predicate)


def store_global_s64(address: Any, word: Any, predicate: Any = None) -> None:
    """sm_70 and up. An int64; where there is a predicate and it is false, nothing happens."""
    inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[Int64(address), Int64(word)], predicate=predicate)


def store_global_64(address: Any, low: Any, high: Any, predicate: Any = None) -> None:
    """sm_70 and up. 8 bytes, 8-byte aligned; where there is a predicate and it is false, nothing happens."""
    inline_ptx(
        "st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[Int64(address), Int32(low), Int32(high)],
        predicate=predicate,
    )


def store_global_16(address: Any, word: Any, predicate: Any = None) -> None:
    """sm_70 and up. The low half of a word; where there is a predicate and it is false, nothing happens."""
    inline_ptx("st.global.b16 [{$r0}], {$r1};", read_only_args=[Int64(address), Int32(word)], predicate=predicate)


def store_global_8(address: Any, word: Any, predicate: Any = None) -> None:
    """sm_70 and up. The low byte of a word; where there is a predicate and it is false, nothing happens."""
    inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[Int64(address), Int32(word)], predicate=predicate)


def permute_bytes(a: Any, b: Any, selector: Any) -> Any:
    """sm_70 and up. Four of the eight bytes of (a, b): nibble i of `selector`, a number or a register, picks byte i;
    0..3 are a's, 4..7 b's."""
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


def append_where_at_least(address: Any, a: Any, b: Any, word: Any) -> Any:
    """sm_70 and up. If a >= b, store a and a word at an 8-byte aligned address of shared memory: the address for what
    comes next."""
    return inline_ptx(
        "{ .reg .pred p; setp.ge.f32 p, {$r1}, {$r2}; mov.b32 {$w0}, {$r0}; "
        "@p st.shared.v2.b32 [{$w0}], {{$r1}, {$r3}}; @p add.s32 {$w0}, {$w0}, 8; }",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Float32(a), Float32(b), Int32(word)],
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


# With an explicit rounding mode the assembler fuses nothing: each result is rounded by itself.


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


def reciprocal_rn(a: Any) -> Any:
    """sm_70 and up. 1 / a, nearest even."""
    return inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def min_s64(a: Any, b: Any) -> Any:
    """sm_70 and up. The smaller int64."""
    return inline_ptx("min.s64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[Int64(a), Int64(b)])


def max_s64(a: Any, b: Any) -> Any:
    """sm_70 and up. The larger int64."""
    return inline_ptx("max.s64 {$w0}, {$r0}, {$r1};", write_only_types=[Int64], read_only_args=[Int64(a), Int64(b)])


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


def f16x2(low: Any, high: Any) -> Any:
    """sm_80 and up. Two fp32 as a pair of f16, nearest even; a NaN of either sign becomes 0x7FFF."""
    return inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[Float32(low), Float32(high)]
    )


def _magnitude_f16x2(instruction: str, pair: Any, other: int) -> Any:
    return inline_ptx(
        f"{{ .reg .b32 other; mov.b32 other, {other}; {instruction}.xorsign.abs.f16x2 {{$w0}}, {{$r0}}, other; }}",
        write_only_types=[Int32],
        read_only_args=[pair],
    )


def max_magnitude_f16x2(pair: Any, least: int) -> Any:
    """sm_86 and up. Halves of at least the magnitude of `least`, two f16 >= 0; signs stay, NaN gives `least`."""
    return _magnitude_f16x2("max", pair, least)


def min_magnitude_f16x2(pair: Any, most: int) -> Any:
    """sm_86 and up. Halves of at most the magnitude of `most`, two f16 >= 0; signs stay, NaN gives `most`."""
    return _magnitude_f16x2("min", pair, most)


def store_shared_128(address: Any, words: Any) -> None:
    """sm_70 and up. Four words to shared memory, 16-byte aligned."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int32(address), *(Int32(word) for word in words)],
    )


LOG2_E = 1.4426950408889634
"""exp2 of a number times this is its exponential."""

LN_2 = 0.6931471805599453
"""log2 of a number times this is its natural logarithm."""


def exp2(a: Any) -> Any:
    """sm_70 and up. 2^a, off by at most 2^-22 of it; subnormal results are 0."""
    return inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def load_shared_f32(address: Any) -> Any:
    """sm_70 and up. An fp32 of shared memory; the address is one of the block's own, 32 bits wide."""
    return inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[Int32(address)])


def copy_async_32(shared: Any, source: Any, predicate: Any = None) -> None:
    """sm_80 and up. 4 bytes from global to shared memory, asynchronously; both addresses 4-byte aligned. Where there is
    a predicate and it is false, nothing happens."""
    inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;",
        read_only_args=[Int32(shared), Int64(source)],
        predicate=predicate,
    )


def load_shared_128(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes of shared memory, 16-byte aligned; the address is one of the block's own, 32 bits wide."""
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def store_shared_f32(address: Any, value: Any, predicate: Any = None) -> None:
    """sm_70 and up. An fp32 to shared memory; where there is a predicate and it is false, nothing happens."""
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[Int32(address), Float32(value)], predicate=predicate)


def copy_async_128(shared: Any, source: Any, predicate: Any = None) -> None:
    """sm_80 and up. 16 bytes from global to shared memory, asynchronously and through L1; 16-byte aligned. Where there
    is a predicate and it is false, nothing happens."""
    inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 16;",
        read_only_args=[Int32(shared), Int64(source)],
        predicate=predicate,
    )


def copy_async_128_once(shared: Any, source: Any, predicate: Any = None) -> None:
    """sm_80 and up. As copy_async_128, past L1: for what is read once."""
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
        read_only_args=[Int32(shared), Int64(source)],
        predicate=predicate,
    )


def copy_bulk(shared: Any, source: Any, size: Any, barrier: Any) -> None:
    """sm_90 and up. One thread has `size` bytes copied from global to shared memory; the mbarrier at the shared address
    `barrier` counts them when they are there. Addresses and size are multiples of 16."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[Int32(shared), Int64(source), Int32(size), Int32(barrier)],
    )


def tensor_map(copy: Any) -> Any:
    """sm_90 and up. Address of the descriptor in the atom of a bulk tensor copy, for copy_bulk_3d."""
    pointer = _dialect.PtrType.get(Int8.mlir_type, AddressSpace.generic, 64)
    return cute_nvgpu.get_tma_desc_addr(pointer, cute_nvgpu.atom_make_exec_tma(copy._trait.value)).toint()


def copy_bulk_3d(shared: Any, tensor_map: Any, at: tuple[Any, Any, Any], barrier: Any) -> None:
    """sm_90 and up. As copy_bulk, for the box at the given coordinates, the densest dimension first, of the tensor that
    a descriptor tells of. By one thread, unlike the DSL's own copy, which the whole warp has to reach."""
    inline_ptx(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}}], [{$r5}];",
        read_only_args=[Int32(shared), Int64(tensor_map), *(Int32(i) for i in at), Int32(barrier)],
    )


def copy_async_or_zero(shared: Any, source: Any, size: int, read: Any) -> None:
    """sm_80 and up. 4, 8 or 16 bytes from global to shared memory, asynchronously and, if 16, past L1. Only the first
    `read` of them are read, the others become zero. Both addresses are multiples of `size`."""
    cache = "cg" if size == 16 else "ca"
    inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
        read_only_args=[Int32(shared), Int64(source), Int32(read)],
    )


def load_shared_64(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. 8 bytes of shared memory, 8-byte aligned; the address is one of the block's own, 32 bits wide."""
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32], read_only_args=[Int32(address)]
    )


def wait_mbarrier(address: Any, phase: Any) -> None:
    """sm_90 and up. Until the phase of that parity is complete; unlike the DSL's own wait it does not ask to sleep."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; @!done bra again; }",
        read_only_args=[Int32(address), Int32(phase)],
    )


def test_mbarrier(address: Any, phase: Any) -> Any:
    """sm_90 and up. 1 if the phase of that parity is complete, else 0."""
    return inline_ptx(
        "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; "
        "selp.b32 {$w0}, 1, 0, done; }",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(phase)],
    )


def load_shared_s32(address: Any) -> Any:
    """sm_70 and up. An int32 of shared memory; the address is one of the block's own, 32 bits wide."""
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(address)])


def load_shared_u16(address: Any) -> Any:
    """sm_70 and up. Two bytes of shared memory, as the low half of a word; the address is one of the block's own."""
    return inline_ptx("ld.shared.u16 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(address)])


def load_shared_f32x2(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. Two fp32 of shared memory, 8-byte aligned; the address is one of the block's own, 32 bits wide."""
    return inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[Int32(address)],
    )


def store_shared_s32(address: Any, word: Any) -> None:
    """sm_70 and up. An int32 to shared memory."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[Int32(address), Int32(word)])


def store_shared_64(address: Any, low: Any, high: Any) -> None:
    """sm_70 and up. Two words to shared memory, 8-byte aligned."""
    inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[Int32(address), Int32(low), Int32(high)])


def map_shared(address: Any, rank: Any) -> Any:
    """sm_90 and up. The address, among those of all the cluster's blocks, of the same place in block `rank`."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(rank)],
    )


def store_remote_128(address: Any, words: Any, barrier: Any) -> None:
    """sm_90 and up. Four words to a block of the cluster, asynchronously; that block's mbarrier counts their bytes when
    they are there. Addresses from map_shared, the first one 16-byte aligned."""
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[Int32(address), *(Int32(word) for word in words), Int32(barrier)],
    )


def store_remote_64(address: Any, words: Any, barrier: Any) -> None:
    """sm_90 and up. As store_remote_128: two words, 8-byte aligned."""
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[Int32(address), *(Int32(word) for word in words), Int32(barrier)],
    )


def load_cluster_s32(address: Any) -> Any:
    """sm_90 and up. An int32 of the shared memory of any block of the cluster; the address is from map_shared."""
    return inline_ptx(
        "ld.shared::cluster.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(address)]
    )


def load_cluster_64(address: Any) -> tuple[Any, Any]:
    """sm_90 and up. As load_cluster_s32: two words, 8-byte aligned."""
    return inline_ptx(
        "ld.shared::cluster.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32, Int32],
        read_only_args=[Int32(address)],
    )


def store_cluster_64(address: Any, low: Any, high: Any) -> None:
    """sm_90 and up. Two words to the shared memory of any block of the cluster, 8-byte aligned, from map_shared."""
    inline_ptx(
        "st.shared::cluster.v2.b32 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[Int32(address), Int32(low), Int32(high)],
    )


def reduce_shared(operation: str, address: Any, word: Any, predicate: Any = None, of_cluster: bool = False) -> None:
    """sm_70 and up, of a cluster sm_90 and up. Combine a word of shared memory with this one, atomically: "add.u32",
    "or.b32". Where there is a predicate and it is false, nothing happens. of_cluster: the address is from map_shared.
    """
    scope = "cluster.shared::cluster" if of_cluster else "cta.shared"
    inline_ptx(
        f"red.relaxed.{scope}.{operation} [{{$r0}}], {{$r1}};",
        read_only_args=[Int32(address), Int32(word)],
        predicate=predicate,
    )


def fetch_add_shared(address: Any, number: Any, of_cluster: bool) -> Any:
    """sm_70 and up, of a cluster sm_90 and up. Add a number to a word of shared memory, atomically: what it was before.
    of_cluster: the address is from map_shared."""
    scope = "cluster.shared::cluster" if of_cluster else "cta.shared"
    return inline_ptx(
        f"atom.relaxed.{scope}.add.u32 {{$w0}}, [{{$r0}}], {{$r1}};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(number)],
    )


def store_matrices(address: Any, words: Any) -> None:
    """sm_90 and up. Four 8 x 8 matrices of 16-bit elements to shared memory: lane i holds two neighbours in row i // 4
    of each, and gives the address of row i % 8 of matrix i // 8."""
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int32(address), *(Int32(word) for word in words)],
    )


def load_matrices(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_75 and up. Four 8 x 8 matrices of 16-bit elements of shared memory: lane i gets two neighbours in row i // 4
    of each, and gives the address of row i % 8 of matrix i // 8."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def load_matrices_transposed(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_75 and up. As load_matrices, transposed: lane i gets elements [2 (i % 4), i // 4] and [2 (i % 4) + 1, i // 4]
    of each matrix."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def pair(low: Any, high: Any) -> Any:
    """sm_70 and up. Two words as an int64."""
    return inline_ptx(
        "mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[Int32(low), Int32(high)]
    )


def halves(number: Any) -> tuple[Any, Any]:
    """sm_70 and up. The low and the high word of an int64."""
    return inline_ptx("mov.b64 {{$w0}, {$w1}}, {$r0};", write_only_types=[Int32, Int32], read_only_args=[Int64(number)])


def again(number: Any) -> Any:
    """sm_70 and up. The number. What is computed from it is computed here, and not once and for all before a loop,
    where it would take registers."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(number)])


def thread_again() -> Any:
    """sm_70 and up. The thread's number in its block, read here: it takes no register elsewhere."""
    return _read_special("%tid.x")


def block_again() -> Any:
    """sm_70 and up. The block's number in its grid, read here."""
    return _read_special("%ctaid.x")


def rank_again() -> Any:
    """sm_90 and up. The block's number in its cluster, read here."""
    return _read_special("%cluster_ctarank")


def _read_special(register: str) -> Any:
    # inline_ptx takes the percent sign for something else
    return Int32(llvm.inline_asm(T.i32(), [], f"mov.u32 $0, {register};", "=r", has_side_effects=True))


def log2(a: Any) -> Any:
    """sm_70 and up. Binary logarithm, off by at most 2^-22."""
    return inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[Float32(a)])


def any_of_group(barrier: Any, threads: int, condition: Any) -> Any:
    """sm_70 and up. Wait at a named barrier for `threads` threads: 1 if the condition holds for one of them, else 0."""
    return inline_ptx(
        "{ .reg .pred p, q; setp.ne.b32 p, {$r0}, 0; "
        f"barrier.cta.red.or.pred q, {{$r1}}, {threads}, p; "
        "selp.b32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[Int32(condition), Int32(barrier)],
    )


E4M3_AS_BF16 = 120
"""The bits of an e4m3 code, moved to where bf16 keeps its sign, exponent and mantissa, are 2^-120 times its value."""


def bf16x2_of_ue8m0(bytes_: Any, number: int) -> Any:
    """sm_80 and up. 2^(e - 127 + 120) in both halves, for byte `number` (0 to 3) of a word, e <= 134."""
    return inline_ptx(
        f"{{ .reg .b32 e; bfe.u32 e, {{$r0}}, {8 * number}, 8; "
        f"mad.lo.u32 {{$w0}}, e, 0x00800080, {E4M3_AS_BF16 * 0x00800080}; }}",
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


def multiply_bf16x2(a: Any, b: Any) -> Any:
    """sm_80 and up. Products of both halves, nearest even; subnormal numbers count. What is added is -0."""
    return inline_ptx(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 {$w0}, {$r0}, {$r1}, zero; }",
        write_only_types=[Int32],
        read_only_args=[Int32(a), Int32(b)],
    )


def relu(a: Any) -> Any:
    """sm_80 and up. The number if it is positive, else 0; NaN stays NaN."""
    return inline_ptx("max.NaN.f32 {$w0}, {$r0}, 0f00000000;", write_only_types=[Float32], read_only_args=[Float32(a)])


def store_global_f32(address: Any, value: Any, predicate: Any = None) -> None:
    """sm_70 and up. An fp32; where there is a predicate and it is false, nothing happens."""
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[Int64(address), Float32(value)], predicate=predicate)
