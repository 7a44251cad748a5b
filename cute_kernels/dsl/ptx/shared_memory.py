# SPDX-License-Identifier: Apache-2.0
"""Loads, stores and atomic operations of shared memory, at 32-bit addresses: the block's own, and that of other blocks
of the cluster.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32
from cutlass.cute.arch import inline_ptx


def append_where_at_least(address: Any, a: Any, b: Any, word: Any) -> Any:
    """sm_70 and up. If a >= b, store a and a word at an 8-byte aligned address of shared memory: the address for what
    comes next."""
    return inline_ptx(
        "{ .reg .pred p; setp.ge.f32 p, {$r1}, {$r2}; mov.b32 {$w0}, {$r0}; "
        "@p st.shared.v2.b32 [{$w0}], {{$r1}, {$r3}}; @p add.s32 {$w0}, {$w0}, 8; }",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Float32(a), Float32(b), Int32(word)],
    )


def store_shared_s32_where(condition: Any, address: Any, word: Any) -> None:
    """sm_70 and up. A word to shared memory, 4-byte aligned, where the condition holds."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[Int32(address), Int32(word)], predicate=condition)


def store_shared_128(address: Any, words: Any) -> None:
    """sm_70 and up. Four words to shared memory, 16-byte aligned."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int32(address), *(Int32(word) for word in words)],
    )


def store_shared_128_in_order(address: Any, words: Any, offset: int = 0) -> None:
    """sm_70 and up. As store_shared_128; it is not moved past loads and stores that are in order, of global memory
    either.

    offset   added to the address by the instruction
    """
    inline_ptx(
        f"st.relaxed.cta.shared.v4.b32 [{{$r0}}{_plus(offset)}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[Int32(address), *(Int32(word) for word in words)],
    )


def load_shared_f32(address: Any) -> Any:
    """sm_70 and up. An fp32 of shared memory; the address is one of the block's own, 32 bits wide."""
    return inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[Int32(address)])


def load_shared_128(address: Any, offset: int = 0) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. 16 bytes of shared memory, 16-byte aligned; the address is one of the block's own, 32 bits wide.

    offset   added to it by the instruction: addresses that differ by it then share a register
    """
    return inline_ptx(
        f"ld.shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}{_plus(offset)}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def load_shared_128_in_order(address: Any, offset: int = 0) -> tuple[Any, Any, Any, Any]:
    """sm_70 and up. As load_shared_128; such loads are not moved past each other.

    offset   added to the address by the instruction
    """
    return inline_ptx(
        f"ld.volatile.shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}{_plus(offset)}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def store_shared_f32(address: Any, value: Any, predicate: Any = None) -> None:
    """sm_70 and up. An fp32 to shared memory; where there is a predicate and it is false, nothing happens."""
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[Int32(address), Float32(value)], predicate=predicate)


def load_shared_64(address: Any) -> tuple[Any, Any]:
    """sm_70 and up. 8 bytes of shared memory, 8-byte aligned; the address is one of the block's own, 32 bits wide."""
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32, Int32], read_only_args=[Int32(address)]
    )


def load_shared_s32(address: Any) -> Any:
    """sm_70 and up. An int32 of shared memory; the address is one of the block's own, 32 bits wide."""
    return inline_ptx("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(address)])


def load_shared_u16(address: Any) -> Any:
    """sm_70 and up. Two bytes of shared memory, as the low half of a word; the address is one of the block's own."""
    return inline_ptx("ld.shared.u16 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(address)])


def load_shared_u8(address: Any) -> Any:
    """sm_70 and up. A byte of shared memory, as a word; the address is one of the block's own."""
    return inline_ptx("ld.shared.u8 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[Int32(address)])


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


def store_shared_8(address: Any, word: Any) -> None:
    """sm_70 and up. The low byte of a word to shared memory."""
    inline_ptx("st.shared.b8 [{$r0}], {$r1};", read_only_args=[Int32(address), Int32(word)])


def store_shared_64(address: Any, low: Any, high: Any, *, offset: int = 0) -> None:
    """sm_70 and up. Two words to shared memory, 8-byte aligned; offset: as of load_shared_128."""
    inline_ptx(
        f"st.shared.v2.b32 [{{$r0}}{_plus(offset)}], {{{{$r1}}, {{$r2}}}};",
        read_only_args=[Int32(address), Int32(low), Int32(high)],
    )


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


def load_cluster_128(address: Any) -> tuple[Any, Any, Any, Any]:
    """sm_90 and up. As load_cluster_s32: four words, 16-byte aligned."""
    return inline_ptx(
        "ld.shared::cluster.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[Int32(address)],
    )


def load_cluster_128_or(condition: Any, address: Any, words: Any) -> tuple[Any, Any, Any, Any]:
    """sm_90 and up. As load_cluster_128; these words where the condition fails."""
    otherwise = " ".join(f"mov.b32 {{$w{i}}}, {{$r{i + 2}}};" for i in range(4))
    return inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; {otherwise} "
        "@p ld.shared::cluster.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[Int32(address), Int32(condition), *(Int32(word) for word in words)],
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


def store_matrices_transposed(address: Any, words: Any) -> None:
    """sm_90 and up. As store_matrices, two or four of them: lane i holds elements [2 (i % 4), i // 4] and
    [2 (i % 4) + 1, i // 4] of each matrix. Of two, lanes from 16 on give addresses that mean nothing."""
    registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [{{$r0}}], {{{registers}}};",
        read_only_args=[Int32(address), *(Int32(word) for word in words)],
    )


def load_matrices(address: Any, offset: int = 0) -> tuple[Any, Any, Any, Any]:
    """sm_75 and up. Four 8 x 8 matrices of 16-bit elements of shared memory: lane i gets two neighbours in row i // 4
    of each, and gives the address of row i % 8 of matrix i // 8. offset: as of load_shared_128."""
    return inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}{_plus(offset)}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def load_matrices_transposed(address: Any, offset: int = 0) -> tuple[Any, Any, Any, Any]:
    """sm_75 and up. As load_matrices, transposed: lane i gets elements [2 (i % 4), i // 4] and [2 (i % 4) + 1, i // 4]
    of each matrix. offset: as of load_shared_128."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
        f"{{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}{_plus(offset)}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[Int32(address)],
    )


def _plus(offset: int) -> str:
    return f"+{offset}" if offset else ""
