# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies, barriers, and what is said about dependent launches."""

from __future__ import annotations

from typing import Any

from cutlass import AddressSpace, Int8, Int32, Int64
from cutlass._mlir.dialects import cute as cute_dialect
from cutlass._mlir.dialects import cute_nvgpu
from cutlass.cute.arch import inline_ptx

_dialect: Any = cute_dialect


DEPENDENT_LAUNCH_ARCH = 90
"""First architecture with programmatic dependent launch, and so with `griddepcontrol`."""


READ_ONCE = 0x12F0000000000000
"""Policy of L2 for data that nobody reads again: other data stays."""

READ_AGAIN = 0x1000000000000000
"""Policy of L2 for any other data: what accesses without a policy have."""

READ_SOON = 0x14F0000000000000
"""Policy of L2 for a little data that the next kernel reads: it stays while other data comes and goes."""


def copy_async_32(shared: Any, source: Any, predicate: Any = None) -> None:
    """sm_80 and up. 4 bytes from global to shared memory, asynchronously; both addresses 4-byte aligned. Where there is
    a predicate and it is false, nothing happens."""
    inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4;",
        read_only_args=[Int32(shared), Int64(source)],
        predicate=predicate,
    )


def copy_async_128(shared: Any, source: Any, predicate: Any = None) -> None:
    """sm_80 and up. 16 bytes from global to shared memory, asynchronously and through L1; 16-byte aligned. Where there
    is a predicate and it is false, nothing happens."""
    inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 16;",
        read_only_args=[Int32(shared), Int64(source)],
        predicate=predicate,
    )


def copy_async_128_once(shared: Any, source: Any, predicate: Any = None, policy: Any = None) -> None:
    """sm_80 and up. As copy_async_128, past L1: for what is read once. policy: of L2, if it is not the usual one."""
    hint, last = ("", "") if policy is None else (".L2::cache_hint", ", {$r2}")
    inline_ptx(
        f"cp.async.cg.shared.global{hint} [{{$r0}}], [{{$r1}}], 16{last};",
        read_only_args=[Int32(shared), Int64(source), *([] if policy is None else [Int64(policy)])],
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


def copy_bulk_3d(
    shared: Any, tensor_map: Any, at: tuple[Any, Any, Any], barrier: Any, is_read_once: bool = False
) -> None:
    """sm_90 and up. As copy_bulk, for the box at the given coordinates, the densest dimension first, of the tensor that
    a descriptor tells of. By one thread, unlike the DSL's own copy, which the whole warp has to reach."""
    hint, policy = (".L2::cache_hint", ", {$r6}") if is_read_once else ("", "")
    inline_ptx(
        f"cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{hint} "
        f"[{{$r0}}], [{{$r1}}, {{{{$r2}}, {{$r3}}, {{$r4}}}}], [{{$r5}}]{policy};",
        read_only_args=[
            Int32(shared),
            Int64(tensor_map),
            *(Int32(i) for i in at),
            Int32(barrier),
            *([Int64(READ_ONCE)] if is_read_once else []),
        ],
    )


def copy_async_or_zero(shared: Any, source: Any, size: int, read: Any, is_read_once: bool = False) -> None:
    """sm_80 and up. 4, 8 or 16 bytes from global to shared memory, asynchronously and, if 16, past L1. Only the first
    `read` of them are read, the others become zero. Both addresses are multiples of `size`."""
    cache = "cg" if size == 16 else "ca"
    hint, policy = (".L2::cache_hint", ", {$r3}") if is_read_once else ("", "")
    inline_ptx(
        f"cp.async.{cache}.shared.global{hint} [{{$r0}}], [{{$r1}}], {size}, {{$r2}}{policy};",
        read_only_args=[Int32(shared), Int64(source), Int32(read), *([Int64(READ_ONCE)] if is_read_once else [])],
    )


def wait_mbarrier(address: Any, phase: Any) -> None:
    """sm_90 and up. Until the phase of that parity is complete; unlike the DSL's own wait it does not ask to sleep."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; @!done bra again; }",
        read_only_args=[Int32(address), Int32(phase)],
    )


def arrive_mbarrier(address: Any, predicate: Any) -> None:
    """sm_80 and up. Arrive where the predicate holds, or is None."""
    inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[Int32(address)], predicate=predicate)


def test_mbarrier(address: Any, phase: Any) -> Any:
    """sm_90 and up. 1 if the phase of that parity is complete, else 0."""
    return inline_ptx(
        "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; "
        "selp.b32 {$w0}, 1, 0, done; }",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(phase)],
    )


def any_of_group(barrier: Any, threads: int, condition: Any) -> Any:
    """sm_70 and up. Wait at a named barrier for `threads` threads: 1 if the condition holds for one of them, else 0."""
    return inline_ptx(
        "{ .reg .pred p, q; setp.ne.b32 p, {$r0}, 0; "
        f"barrier.cta.red.or.pred q, {{$r1}}, {threads}, p; "
        "selp.b32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[Int32(condition), Int32(barrier)],
    )
