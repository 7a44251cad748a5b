# SPDX-License-Identifier: Apache-2.0
"""How e4m3 queries become f16 in Hopper's prefill kernel (prefill.py over what prefill_mixed.py brings): on their way
from a stage to registers. f16 holds every e4m3 number, so products stay exact.

Of every 16 columns the pairs are multiplied in the order 0, 2, 4, 6, 1, 3, 5, 7: a lane that gets four neighbouring
codes of a row from ldmatrix then has two words of an operand without asking other lanes. Queries, rows and O have the
same order, and O is put right as it is stored (dsl/wgmma.store_bf16_paired).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.hopper.prefill_softmax import SLAB_BYTES, SLAB_ROW_BYTES, STEP, thread_idx

CODE_SLABS = HEAD_DIM // SLAB_ROW_BYTES
"""Slabs of a stage that codes of queries fill: [4 slabs][64 heads][128], swizzled as f16 is."""

SOFTMAX_BARRIER = 1
"""Number of the barrier of the QK and softmax warps."""


@cute.jit
def load_codes(held: cute.Tensor, stage_at: Any, q_at: Any) -> None:
    """Load the queries of a work tile by the QK and softmax warps, all at once: as many columns as `held` has to
    registers, the others to their place in shared memory.

    stage_at   where their codes are
    q_at       where the others go: [slabs][64 heads][64] f16, swizzled
    """
    lane, warp = thread_idx() & 31, thread_idx() >> 5
    row_at = stage_at + (warp * 16 + (lane & 15)) * SLAB_ROW_BYTES
    words = cute.recast_tensor(held, Int32)
    loads = cute.size(words) // 8
    for number in range_constexpr(loads):
        for i, word in enumerate(_load_two_steps(row_at, lane, number)):
            words[8 * number + i] = word
    # all warps are done with the products of the work tile before
    cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=128)
    to = q_at + (warp * 16 + (lane & 15)) * SLAB_ROW_BYTES
    for number in range_constexpr(HEAD_DIM // (2 * STEP) - loads):
        eight = _load_two_steps(row_at, lane, loads + number)
        for half in range_constexpr(2):
            chunk = (4 * (number % 2) + 2 * half + (lane >> 4)) ^ (lane & 7)
            ptx.store_matrices(to + number // 2 * SLAB_BYTES + chunk * 16, eight[4 * half : 4 * half + 4])
    # tensor cores read what all warps have stored
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=128)


def _load_two_steps(row_at: Any, lane: Any, number: int) -> list[Any]:
    """The thread's words of 32 columns of the queries, as two steps of products have them. Lane i gives the address of
    row i % 8 of matrix i // 8, and gets four neighbouring codes of row i // 4."""
    chunk = (2 * (number % 4) + (lane >> 4)) ^ (lane & 7)
    four = ptx.load_matrices(row_at + number // 4 * SLAB_BYTES + chunk * 16)
    words = []
    for first, second in (four[:2], four[2:]):
        low, high = ptx.f16x2_of_e4m3x4(first), ptx.f16x2_of_e4m3x4(second)
        words += [low[0], high[0], low[1], high[1]]
    return words
