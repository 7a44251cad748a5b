"""The softmax of the decode kernel of teams, and what the warps of a team tell one another in a step.

A warp has the softmax of the group of heads of its rank: it adds up what all warps of its team have of their scores,
and shares the weights. A warp alone has all in registers. Lane 4 r + c has scores of keys r and r + 8 of each piece,
with heads 2 c and 2 c + 1 of a group.

What a team shares, in this order:

    scores    [ranks][groups][pieces][32 lanes] four fp32: what a warp's columns come to
    weights   [groups][pieces][32 lanes] two words as f16, then two as bf16: P, see operands
    factors   [groups][32 lanes] two fp32: what O of the lane's heads is multiplied with, if a maximum has moved
    moves     [groups] words: whether one has

Who writes a step's scores has waited for the weights of the step before, and so for those who read its scores; and the
other way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.teams_plan import LANES
from cute_kernels.sparse_mla.teams_source import Own

FIRST_BARRIER = 1
GROWTH = 7.0
"""A head's maximum moves when a score, in log2 units, is more than this above it: O is rarely rescaled, and P is
at most 2^7, so that it fits f16 times 2^SHIFT."""

LEAST = -3.0e38
"""The maximum of nothing."""


class Weights(NamedTuple):
    """P of a step: what the lane's warp has made, two words as f16 and two as bf16 for each piece, and, for teams of
    several warps, the address of the lane's ones of all."""

    words: list[Any]
    at: Any

    def operand(self, piece: int, is_f16: bool, plan: Any) -> list[Any]:
        """Operand b of a piece, two words for each group."""
        kind = 0 if is_f16 else 1
        if plan.team == 1:
            return self.words[4 * piece + 2 * kind : 4 * piece + 2 * kind + 2]
        at = [self.at + (group * plan.pieces + piece) * (LANES * 16) + 8 * kind for group in range(plan.groups)]
        return [word for place in at for word in ptx.load_shared_64(place)]


def shared_at(base: Any, own: Own, plan: Any) -> Any:
    """Address of what the warp's team shares."""
    return base + plan.results_at + own.team * plan.exchange_bytes


def give(parts: Any, shared: Any, piece: int, own: Own, lane: Any, plan: Any) -> None:
    """Share what the warp's columns of a piece come to. parts: registers, four for each group."""
    mine = shared + own.rank * plan.partial_bytes + piece * (LANES * 16) + lane * 16
    for group in range(plan.groups):
        words = [parts[4 * group + i].bitcast(Int32) for i in range(4)]
        ptx.store_shared_128(mine + group * (plan.pieces * LANES * 16), words)


@cute.jit
def add_up(scores: Any, shared: Any, own: Own, lane: Any, plan: cutlass.Constexpr) -> None:
    """Scores of the warp's own group, in the order of the ranks. scores: registers, four for each piece."""
    meet(own, plan)
    given = shared + own.rank * (plan.pieces * LANES * 16) + lane * 16
    for piece in range_constexpr(plan.pieces):
        for rank in range_constexpr(plan.team):
            four = ptx.load_shared_128(given + rank * plan.partial_bytes + piece * (LANES * 16))
            for i in range_constexpr(4):
                value = four[i].bitcast(Float32)
                scores[4 * piece + i] = value if const_expr(rank == 0) else scores[4 * piece + i] + value


def meet(own: Own, plan: Any) -> None:
    """Wait for the other warps of the team."""
    cute.arch.barrier(barrier_id=FIRST_BARRIER + own.team, number_of_threads=plan.team * LANES)


@cute.jit
def weigh(
    scores: Any, tops: Any, amounts: Any, o: Any, shared: Any, alive: Any, scale_log2: Any, own: Own, lane: Any,
    plan: cutlass.Constexpr,
) -> Weights:  # fmt: skip
    """Softmax of a step.

    scores          of the warp's group, unscaled; lost
    tops, amounts   registers: the lane's two heads'; maxima, and its part of the sums of weights
    alive           bits 0, 8 and so on: whether there are keys r, r + 8 and so on
    """
    count = const_expr(4 * plan.pieces)
    grows = cutlass.Boolean(False)
    for i in range_constexpr(count):
        # not added: the score of a key that is not there is NaN if the query is
        is_there = alive & (1 << 8 * (i // 2)) != 0
        scores[i] = scores[i] * scale_log2 if is_there else Float32(-Float32.inf)
    for i in range_constexpr(count):
        grows = grows | (scores[i] > tops[i % 2] + Float32(GROWTH))
    moves = cute.arch.vote_any_sync(grows)
    weights_at = shared + plan.team * plan.partial_bytes
    factors_at = weights_at + plan.partial_bytes
    moves_at = factors_at + plan.groups * (LANES * 8)
    if moves:
        factors = grow(scores, tops, amounts, plan)
        if const_expr(plan.team == 1):
            rescale(o, 0, factors, plan)
        else:
            words = [factor.bitcast(Int32) for factor in factors]
            ptx.store_shared_64(factors_at + own.rank * (LANES * 8) + lane * 8, *words)
    for i in range_constexpr(count):
        scores[i] = ptx.exp2(scores[i] - tops[i % 2])
        amounts[i % 2] = amounts[i % 2] + scores[i]
    words = operands(scores, plan)
    if const_expr(plan.team > 1):
        mine = weights_at + own.rank * (plan.pieces * LANES * 16) + lane * 16
        for piece in range_constexpr(plan.pieces):
            ptx.store_shared_128(mine + piece * (LANES * 16), words[4 * piece : 4 * piece + 4])
        if lane == 0:
            ptx.store_shared_s32(moves_at + own.rank * 4, Int32(1) if moves else Int32(0))
        meet(own, plan)
        follow(o, factors_at, moves_at, lane, plan)
    return Weights(words, weights_at + lane * 16)


def operands(weights: Any, plan: Any) -> list[Any]:
    """P as operand b of each piece: keys r and r + 8 with two heads become keys 2 c .. and 2 c + 8 .. with head r."""
    words = []
    for piece in range(plan.pieces):
        for pair in (ptx.f16x2, ptx.bf16x2):
            words += [pair(weights[4 * piece + 2 * i], weights[4 * piece + 2 * i + 1]) for i in range(2)]
    return [ptx.transpose_matrix(word) for word in words]


@cute.jit
def follow(o: Any, factors_at: Any, moves_at: Any, lane: Any, plan: cutlass.Constexpr) -> None:
    """Rescale O of the groups of which a maximum has moved."""
    moves = ptx.load_shared_128(moves_at) if const_expr(plan.groups == 4) else ptx.load_shared_64(moves_at)
    some = moves[0]
    for group in range_constexpr(1, plan.groups):
        some = some | moves[group]
    if some != 0:
        for group in range_constexpr(plan.groups):
            if moves[group] != 0:
                words = ptx.load_shared_64(factors_at + group * (LANES * 8) + lane * 8)
                rescale(o, group, [word.bitcast(Float32) for word in words], plan)


def rescale(o: Any, group: int, factors: Any, plan: Any) -> None:
    """Multiply the lane's two heads of a group in O."""
    for i in range(2):
        sums = [plan.sums(block, chunk, group) + i for block in range(plan.blocks) for chunk in range(4)]
        o.scale([first + j for first in sums for j in (0, 2)], factors[i])


@cute.jit
def grow(scores: Any, tops: Any, amounts: Any, plan: cutlass.Constexpr) -> list[Any]:
    """Move the maxima of heads of which a score is far above, and have the sums follow them: factors of both heads."""
    factors = []
    for i in range_constexpr(2):
        largest = scores[i]
        for j in range_constexpr(1, 2 * plan.pieces):
            largest = ptx.max_f32(largest, scores[2 * j + i])
        for step in (4, 8, 16):
            largest = ptx.max_f32(largest, cute.arch.shuffle_sync_bfly(largest, step))
        before = tops[i]
        after = largest if largest > before + Float32(GROWTH) else before
        factor = ptx.exp2(before - after)
        tops[i] = after
        amounts[i] = amounts[i] * factor
        factors.append(factor)
    return factors
