"""Every inline PTX instruction of the kernels. The first line of each says on which architectures it is legal.

Addresses are plain 64-bit numbers: a kernel computes them in full width, and no layout algebra can narrow them.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

inline_ptx = cute.arch.inline_ptx

EVICT_FIRST_POLICY = 0x12F0000000000000
"""What `createpolicy.fractional.L2::evict_first.b64 policy, 1.0` makes, on every architecture so far."""

EVICT_LAST_POLICY = 0x14F0000000000000
"""The same of `L2::evict_last`."""

DEPENDENT_LAUNCH_ARCH = 90
"""First architecture with programmatic dependent launch, and so with `griddepcontrol`."""


def load_global_128(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes that no thread writes during the kernel and that are read once; 16-byte aligned."""
    return inline_ptx(
        "ld.global.nc.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address)],
    )


def load_global_128_first_out(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_80 and up. As load_global_128; in L2 the data is the first to make room for other data."""
    return inline_ptx(
        "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}], {$r1};",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int64(address), Int64(EVICT_FIRST_POLICY)],
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


def load_global_128_in_order(address: Any, first_out: bool = False) -> tuple[Any, Any, Any, Any]:
    """sm_80 and up. 16 bytes that are read once, 16-byte aligned; first_out: first to make room in L2."""
    return inline_ptx(
        _in_order("v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}", first_out),
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=_with_policy(address, first_out),
    )


def load_global_64_in_order(address: Any, first_out: bool = False) -> tuple[Any, Any]:
    """sm_80 and up. 8 bytes that are read once, 8-byte aligned; first_out: first to make room in L2."""
    return inline_ptx(
        _in_order("v2.b32 {{$w0}, {$w1}}", first_out),
        write_only_types=[Int32, Int32],
        read_only_args=_with_policy(address, first_out),
    )


def load_global_s64_in_order(address: Any) -> Any:
    """sm_70 and up. An int64."""
    return inline_ptx(_in_order("b64 {$w0}"), write_only_types=[Int64], read_only_args=[Int64(address)])


def load_global_s32_in_order(address: Any) -> Any:
    """sm_70 and up. An int32."""
    return inline_ptx(_in_order("b32 {$w0}"), write_only_types=[Int32], read_only_args=[Int64(address)])


def _in_order(what: str, first_out: bool = False) -> str:
    hint = ".L1::no_allocate.L2::cache_hint" if first_out else ".L1::no_allocate"
    return f"ld.relaxed.gpu.global{hint}.{what}, [{{$r0}}]{', {$r1}' if first_out else ''};"


def _with_policy(address: Any, first_out: bool) -> list[Any]:
    return [Int64(address), Int64(EVICT_FIRST_POLICY)] if first_out else [Int64(address)]


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


def store_shared_64(address: Any, low: Any, high: Any) -> None:
    """sm_70 and up. 8 bytes to shared memory, 8-byte aligned; the address is 32 bits wide."""
    inline_ptx("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[Int32(address), Int32(low), Int32(high)])


def store_shared_128(address: Any, words: Any) -> None:
    """sm_70 and up. Four words to shared memory, 16-byte aligned; the address is 32 bits wide."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int32(address), *(Int32(word) for word in words)],
    )


def load_shared_64(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. 8 bytes of shared memory, 8-byte aligned; the address is 32 bits wide."""
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32, Int32],
        read_only_args=[Int32(address)],
    )


def load_shared_128(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes of shared memory, 16-byte aligned; the address is 32 bits wide."""
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def load_shared_s64(address: Any) -> Any:
    """sm_70 and up. An int64 of shared memory; the address is 32 bits wide."""
    return inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[Int32(address)])


def copy_global_64(shared_address: Any, address: Any) -> None:
    """sm_80 and up. 8 bytes from global to shared memory, not waited for; see barrier_arrive_with_copies."""
    inline_ptx("cp.async.ca.shared.global [{$r0}], [{$r1}], 8;", read_only_args=[Int32(shared_address), Int64(address)])


# A barrier lies in shared memory, 8-byte aligned. A phase of it ends when as many threads have arrived as it was made
# for and all bytes announced have come. Phases are numbered from 0, and a wait names the parity of the phase.


def barrier_init(barrier: Any, count: int) -> None:
    """sm_90 and up. Make a barrier for `count` arrivals a phase. barrier_init_done comes before its first use."""
    inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[Int32(barrier), Int32(count)])


def barrier_init_done() -> None:
    """sm_90 and up. Let bulk copies see the barriers that this thread made."""
    inline_ptx("fence.proxy.async.shared::cta;")


def barrier_arrive(barrier: Any, size: Any) -> None:
    """sm_90 and up. Arrive, and announce `size` bytes of bulk copies."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[Int32(barrier), Int32(size)]
    )


def barrier_arrive_with_copies(barrier: Any) -> None:
    """sm_80 and up. Arrive as soon as all earlier copy_global_64 of this thread have come."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[Int32(barrier)])


def barrier_wait(barrier: Any, parity: Any) -> None:
    """sm_90 and up. Wait until the phase of that parity has ended."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; @!done bra again; }",
        read_only_args=[Int32(barrier), Int32(parity)],
    )


def bulk_load(shared_address: Any, address: Any, size: Any, barrier: Any) -> None:
    """sm_90 and up. One thread copies `size` bytes to shared memory; both addresses and size are multiples of 16."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[Int32(shared_address), Int64(address), Int32(size), Int32(barrier)],
    )


def bulk_store(address: Any, shared_address: Any, size: int, policy: int | None = None) -> None:
    """sm_90 and up. One thread copies `size` bytes of shared memory to global memory; all three multiples of 16.

    What other threads wrote there must be behind a proxy fence of theirs. bulk_store_commit makes a group of the copies
    so far. policy: one of the cache policies above.
    """
    hint, more = ("", []) if policy is None else (".L2::cache_hint", [Int64(policy)])
    inline_ptx(
        f"cp.async.bulk.global.shared::cta.bulk_group{hint} [{{$r0}}], [{{$r1}}], {{$r2}}{', {$r3}' if hint else ''};",
        read_only_args=[Int64(address), Int32(shared_address), Int32(size), *more],
    )


def bulk_store_commit() -> None:
    """sm_90 and up. The bulk stores of this thread since the last group become a group."""
    inline_ptx("cp.async.bulk.commit_group;")


def bulk_store_sources_read(pending: int = 0) -> None:
    """sm_90 and up. Wait until all but the last `pending` groups of bulk stores need their shared memory no more."""
    inline_ptx(f"cp.async.bulk.wait_group.read {pending};")


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
