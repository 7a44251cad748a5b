# SPDX-License-Identifier: Apache-2.0
"""What QK and softmax, and PV, do alike in Hopper's prefill kernels for up to 64 heads of a work tile: prefill.py and
prefill_paged.py.

A warp has 16 heads, as tensor cores give them: a thread has 16 keys of each of two. Maxima move only when a head's
outgrow theirs by 2^8: sums and O are relative to them, and until they move no thread asks what the others' are.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import ptx, wgmma
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.hopper.prefill_index_loader import LAST
from cute_kernels.sparse_mla.params import (
    HEAD_GROUP,
    NEG_MAX,
    RESCALE_THRESHOLD,
    PrefillOutput,
    PrefillScheduler,
    out_scale_of,
)
from cute_kernels.sparse_mla.schedule import TILE

KEYS, ROWS = TILE, HEAD_GROUP

STEP = 16
"""Columns that an instruction multiplies."""

SLAB_ROW_BYTES = 128
SLAB_BYTES = KEYS * SLAB_ROW_BYTES

SIDE = HEAD_DIM // 2
"""Columns of O that one of two warpgroups has."""

P_BYTES = ROWS * KEYS * 2

FACTOR = 8
"""Bytes of a head's factors: what to multiply O with before a tile, and what behind a work tile's last one."""

OWN_SCORES = ROWS * KEYS // 128
"""Of a tile, by a thread."""


def tiled_mmas(dtype: Any) -> tuple[Any, Any, Any, Any]:
    """S = Q K^T of queries in registers, twice, as one will accumulate, and of those in shared memory; O = P V, by 128
    columns, as an instruction with more would need more registers than a thread has before setmaxnreg."""
    held = [wgmma.make_mma_of_registers(dtype, KEYS) for _ in range(2)]
    return *held, wgmma.make_mma(dtype, 1, KEYS), wgmma.make_mma(dtype, 1, SIDE // 2, columns_lie=True)


def smem_layouts(dtype: Any, held: int) -> tuple[Any, Any, Any, Any]:
    """Of a tile of K, of half of its columns as V, of the queries but for so many columns, and of a tile of P."""
    shapes = (KEYS, HEAD_DIM), (KEYS, SIDE), (ROWS, HEAD_DIM - held), (ROWS, KEYS)
    k, v, q, p = (wgmma.swizzled(dtype, *shape) for shape in shapes)
    return k, v, q, p


def thread_idx() -> Any:
    """In its warpgroup, computed anew: loops over tiles have no registers to spare."""
    return ptx.thread_again() & 127


def own_head(first: Any, half: int) -> Any:
    """The thread's first or second head; first: the work tile's."""
    return first + (thread_idx() >> 5) * 16 + (thread_idx() >> 2 & 7) + 8 * half


@cute.jit
def load_q(held: cute.Tensor, q_at: Any) -> None:
    """Load the queries that are held in registers: lane i gives the address of row i % 8 of matrix i // 8."""
    lane, warp = thread_idx() & 31, thread_idx() >> 5
    row_at = q_at + (warp * 16 + (lane & 15)) * SLAB_ROW_BYTES
    words = cute.recast_tensor(held, Int32)
    for step in range_constexpr(cute.size(words) // 4):
        chunk = (2 * (step % 4) + (lane >> 4)) ^ (lane & 7)
        four = ptx.load_matrices(row_at + step // 4 * SLAB_BYTES + chunk * 16)
        for i in range_constexpr(4):
            words[4 * step + i] = four[i]


@cute.jit
def load_sink(sink: Any, head: Any, heads: Any) -> Any:
    """Bits of a head's logit, if there is a sink."""
    found = Int32(0)
    if sink != 0:
        found = ptx.load_global_s32_again_where(head < heads, sink + Int64(head) * 4)
    return found


def over_keys(scores: Any, half: int, combine: Any) -> Any:
    """Of the thread's scores of one of its heads."""
    return pairwise([scores[i] for i in range(OWN_SCORES) if i // 2 % 2 == half], combine)


@cute.jit
def mask(scores: Any, scale_log2: Any, valid: Any) -> None:
    """Scores times the sign of their scale; -inf for keys that are not there. valid: of every 16 keys, which are."""
    if scale_log2 < Float32(0.0):
        for i in range_constexpr(OWN_SCORES):
            scores[i] = -scores[i]
    if (valid[0] & valid[1] & valid[2] & valid[3]) != 0xFFFF:
        for i in range_constexpr(OWN_SCORES):
            bit = valid[i // 8] >> ((thread_idx() & 3) * 2 + (8 * (i // 4 % 2) + i % 2))
            scores[i] = scores[i] if bit & 1 != 0 else Float32(-Float32.inf)


@cute.jit
def softmax(scores: Any, scales: Any, row_max: Any, row_sum: Any, max_logit: Any) -> tuple[Any, Any, Any, Any]:
    """Make P of a tile's scores. Returns of both heads what to multiply O with first, and what the others become.

    scales      of the scores, in powers of two
    row_max     running maxima; row_sum: sums of weights relative to them
    max_logit   largest scores so far
    """
    factors = [Float32(1.0), Float32(1.0)]
    largest = [over_keys(scores, half, ptx.max_f32) * scales[half] for half in range(2)]
    max_logit = [ptx.max_f32(max_logit[half], largest[half]) for half in range(2)]
    grown = [largest[half] - row_max[half] > Float32(RESCALE_THRESHOLD) for half in range(2)]
    if cute.arch.vote_any_sync(grown[0] | grown[1]):
        for half in range_constexpr(2):
            found = over_quad(largest[half], ptx.max_f32)
            moved = found if found - row_max[half] > Float32(RESCALE_THRESHOLD) else row_max[half]
            # there is nothing before a work tile's first tile
            is_new = row_max[half] == Float32(NEG_MAX)
            factors[half] = Float32(1.0) if is_new else ptx.exp2(row_max[half] - moved)
            row_max[half] = moved
    for i in range_constexpr(OWN_SCORES):
        scores[i] = ptx.exp2(ptx.fma_rn(scores[i], scales[i // 2 % 2], -row_max[i // 2 % 2]))
    for half in range_constexpr(2):
        row_sum[half] = row_sum[half] * factors[half] + over_keys(scores, half, operator.add)
    return factors, max_logit, row_max, row_sum


@cute.jit
def store_p(
    scores: Any,
    smem: Any,
    buffer: Any,
    flags: Any,
    factors: Any,
    row_max: Any,
    row_sum: Any,
    logits: Any,
    sink: Any,
    dtype: cutlass.Constexpr = BFloat16,
) -> Any:
    """Store a tile's P and the factors of its heads. Returns the thread's sums of weights, of a work tile's last tile
    those of all its keys.

    factors   what to multiply O with before
    logits    bits of the sinks of the thread's heads, in a work tile's last tile
    """
    lane, warp = thread_idx() & 31, thread_idx() >> 5
    pair = ptx.bf16x2 if dtype is BFloat16 else ptx.f16x2
    p_at = smem.p + buffer * P_BYTES + (warp * 16 + (lane & 15)) * (KEYS * 2)
    for i in range_constexpr(KEYS // STEP):
        words = [pair(scores[8 * i + 2 * j], scores[8 * i + 2 * j + 1]) for j in range(4)]
        ptx.store_matrices(p_at + ((2 * i + (lane >> 4)) ^ (lane & 7)) * 16, words)
    out_scales = [Float32(0.0), Float32(0.0)]
    if flags & LAST != 0:
        for half in range_constexpr(2):
            row_sum[half] = over_quad(row_sum[half], operator.add)
            out_scales[half] = out_scale_of(row_sum[half], row_max[half], logits[half], sink)
    if (lane & 3) == 0:
        for half in range_constexpr(2):
            factor_at = smem.factor + (buffer * ROWS + warp * 16 + (lane >> 2) + 8 * half) * FACTOR
            ptx.store_shared_64(factor_at, factors[half].bitcast(Int32), out_scales[half].bitcast(Int32))
    return row_sum


@cute.jit
def store_logs(
    scheduler: PrefillScheduler,
    heads: Any,
    out: PrefillOutput,
    work_tile: Any,
    half: cutlass.Constexpr,
    max_logit: Any,
    row_max: Any,
    row_sum: Any,
) -> None:
    """Store what the logits of the thread's first or second head come to."""
    row, _ = scheduler.coords(work_tile)
    _, first = scheduler.coords(work_tile)
    head = own_head(first, half)
    lse = (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
    lse = Float32(Float32.inf) if row_sum == Float32(0.0) else lse
    is_own = (thread_idx() & 3 == 0) & (head < heads)
    if const_expr(out.max_logits is not None):
        out.max_logits.store((row, head), max_logit * Float32(ptx.LN_2), is_own)
    out.lse.store((row, head), lse, is_own)


# ---- PV


def load_factors(smem: Any, buffer: Any, own_row: Any) -> tuple[list[Any], list[Any]]:
    """Of the thread's two rows: what to multiply O with before a tile, and what behind a work tile's last one."""
    factor_at = smem.factor + (buffer * ROWS + own_row) * FACTOR
    both = [ptx.load_shared_f32x2(factor_at + half * (8 * FACTOR)) for half in range(2)]
    return [each[0] for each in both], [each[1] for each in both]


@cute.jit
def multiply_pv(
    pv: Any,
    part: Any,
    o: Any,
    smem: Any,
    buffer: Any,
    v_at: Any,
    layouts: Any,
    dtype: cutlass.Constexpr,
    fences: cutlass.Constexpr,
) -> None:
    """O += P V of a tile, and wait for it.

    part      the thread's of the product
    buffer    of P
    v_at      where the warpgroup's columns of the tile are; layouts: of P, and of those
    fences    whether what is multiplied has been stored in the ordinary way
    """
    p_layout, v_layout = layouts
    v_tile = wgmma.uniform_tile(v_at, v_layout, dtype)
    transposed = cute.composition(v_tile, cute.make_layout((SIDE, KEYS), stride=(KEYS, 1)))
    v = pv.make_fragment_B(part.partition_B(transposed))
    p_tile = wgmma.uniform_tile(smem.p + buffer * P_BYTES, p_layout, dtype)
    p = pv.make_fragment_A(part.partition_A(p_tile))
    if const_expr(fences):
        cute.arch.fence_view_async_shared()
    warpgroup.fence()
    for step in range_constexpr(KEYS // STEP):
        cute.gemm(pv, o, p[None, None, step], v[None, None, step], o)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
