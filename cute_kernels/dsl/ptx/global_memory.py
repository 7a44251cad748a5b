# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and prefetches of global memory. Addresses are plain 64-bit numbers: a kernel computes them in full
width, and no layout algebra can narrow them.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx


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


def load_global_f32_weak(address: Any) -> Any:
    """sm_70 and up. As load_global_128_weak: an fp32."""
    return inline_ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[Int64(address)])


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


def load_global_64_in_order(address: Any, is_shared: bool = False) -> tuple[Any, Any]:
    """sm_70 and up. 8 bytes, 8-byte aligned; is_shared: other threads of the SM read them too, and they may come from
    L1."""
    load = _in_order("v2.b32 {{$w0}, {$w1}}", is_shared=is_shared)
    return inline_ptx(load, write_only_types=[Int32, Int32], read_only_args=[Int64(address)])


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


def load_global_64_or_zero(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. As load_global_64_in_order; zeros if the address is 0."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.b64 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        f"@p {_in_order('v2.b32 {{$w0}, {$w1}}')} }}",
        write_only_types=[Int32, Int32],
        read_only_args=[Int64(address)],
    )


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


def store_global_128(address: Any, words: Any, predicate: Any = None, policy: Any = None) -> None:
    """sm_70 and up, with a policy of L2 sm_80 and up. Four words, 16-byte aligned; where there is a predicate and it is
    false, nothing happens."""
    hint, last = ("", "") if policy is None else (".L2::cache_hint", ", {$r5}")
    inline_ptx(
        f"st.global{hint}.v4.b32 [{{$r0}}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}}{last};",
        read_only_args=[Int64(address), *(Int32(word) for word in words), *([] if policy is None else [Int64(policy)])],
        predicate=predicate,
    )


def store_global_256(address: Any, words: Any, predicate: Any = None) -> None:
    """sm_100a and up. Eight words, 32-byte aligned; where there is a predicate and it is false, nothing happens."""
    inline_ptx(
        "st.global.v8.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}, {$r5}, {$r6}, {$r7}, {$r8}};",
        read_only_args=[Int64(address), *words],
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


def store_global_f32(address: Any, value: Any, predicate: Any = None, policy: Any = None) -> None:
    """sm_70 and up, with a policy of L2 sm_80 and up. An fp32; where there is a predicate and it is false, nothing
    happens."""
    hint, last = ("", "") if policy is None else (".L2::cache_hint", ", {$r2}")
    inline_ptx(
        f"st.global{hint}.f32 [{{$r0}}], {{$r1}}{last};",
        read_only_args=[Int64(address), Float32(value), *([] if policy is None else [Int64(policy)])],
        predicate=predicate,
    )


def store_global_s64_release(address: Any, word: Any) -> None:
    """sm_70 and up. An int64 for another block: who finds it there finds what this thread knew to be stored before."""
    inline_ptx("st.release.gpu.global.b64 [{$r0}], {$r1};", read_only_args=[Int64(address), Int64(word)])


def wait_global_s64(address: Any, word: Any) -> None:
    """sm_70 and up. Until an int64 is there, see store_global_s64_release."""
    inline_ptx(
        "{ .reg .pred there; .reg .b64 found; again: ld.acquire.gpu.global.b64 found, [{$r0}]; "
        "setp.eq.b64 there, found, {$r1}; @!there bra again; }",
        read_only_args=[Int64(address), Int64(word)],
    )
