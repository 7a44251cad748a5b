# SPDX-License-Identifier: Apache-2.0
"""Bulk copies of boxes and of gathered rows of tensors that a descriptor (asynchronous.tensor_map) tells of, and
mbarriers over a cluster's blocks.

In a pair of blocks that work on one product (`blocks` = 2), the mbarrier of a copy may be that of either block: with
`pair_leader` of an address it is the even one's. The bytes always go to the block that asks.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Int64
from cutlass.cute.arch import inline_ptx

from cute_kernels.dsl.ptx.asynchronous import READ_ONCE

PAIR_LEADER = 0xFEFFFFFF
"""Without the lowest bit of the block's number in its cluster, which is bit 24 of a shared address."""


def prefetch_tensor_map(tensor_map: Any) -> None:
    """sm_90 and up. Have the descriptor at hand when the first copy needs it."""
    inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[Int64(tensor_map)])


def pair_leader(address: Any) -> Any:
    """sm_100a and up, not sm_120a. Of a shared address, that of the same place in the even block of the pair."""
    return Int32(address) & PAIR_LEADER


def copy_bulk_tensor(
    shared: Any,
    tensor_map: Any,
    at: tuple[Any, ...],
    barrier: Any,
    *,
    blocks: int = 1,
    is_read_once: bool = False,
) -> None:
    """sm_90 and up, blocks = 2: sm_100a. One thread has the box at the given coordinates, the densest dimension first,
    copied to shared memory; the mbarrier counts its bytes. What is outside the tensor arrives as zeros and counts too.
    """
    last = len(at) + 2
    coordinates = ", ".join(f"{{$r{i + 2}}}" for i in range(len(at)))
    hint, policy = (".L2::cache_hint", f", {{$r{last + 1}}}") if is_read_once else ("", "")
    inline_ptx(
        f"cp.async.bulk.tensor.{len(at)}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{_group(blocks)}"
        f"{hint} [{{$r0}}], [{{$r1}}, {{{coordinates}}}], [{{$r{last}}}]{policy};",
        read_only_args=[
            Int32(shared),
            Int64(tensor_map),
            *(Int32(i) for i in at),
            Int32(barrier),
            *([Int64(READ_ONCE)] if is_read_once else []),
        ],
    )


def gather_rows(
    shared: Any,
    tensor_map: Any,
    column: Any,
    rows: tuple[Any, Any, Any, Any],
    barrier: Any,
    *,
    blocks: int = 1,
    is_read_once: bool = False,
) -> None:
    """sm_100a and up, not sm_120a. One thread has four rows of a 2-D tensor copied to shared memory, one after the
    other, from `column` on and as wide as the descriptor's box; the mbarrier counts 4 times that. A row number below 0
    or past the tensor gives zeros, which count too. Swizzles follow the bits of the shared address: the four rows may
    be any four of a tile whose first is 1024-byte aligned."""
    hint, policy = (".L2::cache_hint", ", {$r8}") if is_read_once else ("", "")
    inline_ptx(
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes{_group(blocks)}"
        f"{hint} [{{$r0}}], [{{$r1}}, {{{{$r2}}, {{$r3}}, {{$r4}}, {{$r5}}, {{$r6}}}}], [{{$r7}}]{policy};",
        read_only_args=[
            Int32(shared),
            Int64(tensor_map),
            Int32(column),
            *(Int32(row) for row in rows),
            Int32(barrier),
            *([Int64(READ_ONCE)] if is_read_once else []),
        ],
    )


def prefetch_rows_l2(tensor_map: Any, column: Any, rows: tuple[Any, Any, Any, Any]) -> None:
    """sm_100a and up, not sm_120a. One thread asks for the same four rows in L2."""
    inline_ptx(
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [{$r0}, {{$r1}, {$r2}, {$r3}, {$r4}, {$r5}}];",
        read_only_args=[Int64(tensor_map), Int32(column), *(Int32(row) for row in rows)],
    )


def _group(blocks: int) -> str:
    return ".cta_group::2" if blocks == 2 else ""


def expect_cluster(barrier: Any, size: Any) -> None:
    """sm_90 and up. Arrive on an mbarrier of any block of the cluster and have its phase wait for `size` more bytes."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [{$r0}], {$r1};",
        read_only_args=[Int32(barrier), Int32(size)],
    )


def wait_mbarrier_cluster(address: Any, phase: Any) -> None:
    """sm_90 and up. As wait_mbarrier; what threads of the cluster's other blocks did before they arrived is seen."""
    inline_ptx(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@!done bra again; }",
        read_only_args=[Int32(address), Int32(phase)],
    )


def test_mbarrier_cluster(address: Any, phase: Any) -> Any:
    """sm_90 and up. As test_mbarrier; if it is complete, what threads of the cluster's other blocks did before they
    arrived is seen."""
    return inline_ptx(
        "{ .reg .pred done; mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "selp.b32 {$w0}, 1, 0, done; }",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(phase)],
    )


def arrive_cluster(barrier: Any, scope: str = "cta") -> None:
    """sm_90 and up. Arrive on an mbarrier of any block of the cluster, the address from map_shared. With the block's
    scope what threads of the block have read of their own shared memory is over, but what they wrote need not be seen
    elsewhere; with that of the cluster it is, which waits for global memory, too. scope: cta or cluster"""
    inline_ptx(f"mbarrier.arrive.release.{scope}.shared::cluster.b64 _, [{{$r0}}];", read_only_args=[Int32(barrier)])


def expect_bytes(barrier: Any, size: Any) -> None:
    """sm_90 and up. Arrive on one of the block's own mbarriers and have its phase wait for `size` more bytes."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[Int32(barrier), Int32(size)]
    )
