"""Queries of the decode kernel of teams: all warps of a block convert an item's, and share them.

Operand b of the product with K: lane 4 r + c has of head r of each group columns 16 c .. + 15 of each block; those of
e4m3 columns as f16, by a power of two that brings the largest one that a head has in the columns of a rank to
2^7 ... 2^8, rotated columns as bf16. f16 then holds exactly what is at least 2^-24 of the largest one, and the rest to
2^-32 of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import lanes_max_bf16x2
from cute_kernels.sparse_mla.teams_plan import BLOCK, GROUP, LANES
from cute_kernels.sparse_mla.teams_source import Own

QUERY_EXPONENT = 7


class Query(NamedTuple):
    """Q: Registers of the resident blocks, and where the lane finds all of them."""

    words: Any
    at: Any


@cute.jit
def ask_query(query: Any, head_bytes: Any, heads: Any, own: Own, lane: Any, plan: cutlass.Constexpr) -> tuple[Any, ...]:
    """Load the warp's share of an item's queries: the team's blocks of its rank's columns. Heads that do not exist are
    zeros.

    query   address of the item's first head
    """
    r, c = lane >> 2, lane & 3
    at = query + Int64(r) * head_bytes + Int64(own.column + own.team * (plan.shares * BLOCK) + 16 * c) * 2
    words = []
    for share in range_constexpr(plan.shares):
        for group in range_constexpr(plan.groups):
            exists = group * GROUP + r < heads
            place = at + head_bytes * (group * GROUP) + share * (BLOCK * 2)
            for half in range_constexpr(2):
                four = ptx.load_global_128_where(exists, place + 16 * half)
                words += [word if exists else Int32(0) for word in four]
    return tuple(words)


@cute.jit
def share_query(q: Any, factors: Any, given: Any, base: Any, own: Own, lane: Any, plan: cutlass.Constexpr) -> None:
    """Convert an item's queries and put them where all warps find them; by all warps of the block.

    q         Registers for the resident blocks, see teams_plan.Plan.query
    factors   the lane's two of each group: what products of e4m3 columns are multiplied with
    given     of ask_query
    base      address of shared memory
    """
    r, c = lane >> 2, lane & 3
    words = list(given)
    peaks = base + plan.peaks_at + own.rank * plan.peak_bytes + r * 4
    mine = peaks + own.team * (plan.team * plan.peak_bytes)
    are_rope = [own.is_last & (own.team * plan.shares + share == plan.codes) for share in range(plan.shares)]
    for group in range_constexpr(plan.groups):
        peak = Int32(0)
        for share in range_constexpr(plan.shares):
            first = const_expr(8 * (share * plan.groups + group))
            largest = lanes_max_bf16x2(convert.absmax_bf16x2(*words[first : first + 8]), 4)
            largest = cutlass.max(largest & 0x7FFF, largest >> 16)
            peak = cutlass.max(peak, Int32(0) if are_rope[share] else largest)
        ptx.store_shared_s32(mine + group * (GROUP * 4), peak)
    cute.arch.sync_threads()
    target = query_at(base, own, lane, plan) + own.team * (plan.shares * plan.groups * 1024)
    for group in range_constexpr(plan.groups):
        largest = Int32(0)
        for team in range_constexpr(plan.teams):
            peak = ptx.load_shared_s32(peaks + team * (plan.team * plan.peak_bytes) + group * (GROUP * 4))
            largest = cutlass.max(largest, peak)
        # of 2^(QUERY_EXPONENT + 127 - exponent), so that neither it nor its inverse is subnormal
        field = cutlass.min(QUERY_EXPONENT + 254 - (largest >> 7), Int32(253))
        factor = (field << 23).bitcast(Float32)
        inverse = ((254 - field) << 23).bitcast(Float32)
        for i in range_constexpr(2):
            factors[2 * group + i] = cute.arch.shuffle_sync(inverse, 8 * c + 4 * i)
        for share in range_constexpr(plan.shares):
            first = const_expr(8 * (share * plan.groups + group))
            for i in range_constexpr(first, first + 8):
                word = words[i]
                scaled = ptx.f16x2(convert.bf16_low(word) * factor, convert.bf16_high(word) * factor)
                words[i] = word if are_rope[share] else scaled
    for share in range_constexpr(plan.shares):
        mine = words[8 * plan.groups * share : 8 * plan.groups * (share + 1)]
        pairs = [mine[8 * group + 2 * i : 8 * group + 2 * i + 2] for i in range(4) for group in range(plan.groups)]
        for i in range_constexpr(2 * plan.groups):
            place = target + (share * 2 * plan.groups + i) * (LANES * 16)
            ptx.store_shared_128(place, pairs[2 * i] + pairs[2 * i + 1])
    cute.arch.sync_threads()
    for i in range_constexpr(plan.resident * plan.groups * 2):
        four = ptx.load_shared_128(query_at(base, own, lane, plan) + i * (LANES * 16))
        for j in range_constexpr(4):
            q.put(4 * i + j, four[j])


def query_at(base: Any, own: Own, lane: Any, plan: Any) -> Any:
    """Where a lane finds its first words of the warp's columns of Q."""
    return base + plan.queries_at + own.rank * plan.query_bytes + lane * 16
