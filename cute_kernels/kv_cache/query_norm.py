# SPDX-License-Identifier: Apache-2.0
"""The sum of squares that a head of a query is normed by: in one order, however threads hold the head's 512 columns.

Two ways lead to a head's norm, with the same bits: qnorm.py, a warp of which has a head by runs of columns, and
linear/hopper/gemm.py with `squares`, whose threads have results as tensor cores leave them, followed by attention. The
order is a tree:

    pairs      of neighbouring columns, 2 p and 2 p + 1
    runs       of eight columns, four pairs each. Of the 16 runs of a block of 128 columns the first pairs are added up,
               as are the second, third and fourth ones: neighbours first, then sums that are neighbours
    block      (first + second) + (third + fourth)
    head       (block 0 + block 1) + (block 2 + block 3)
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.dsl import convert, ptx, reduce
from cute_kernels.formats import HEAD_DIM

PAIRS = 4
"""Of a run."""


def pair_square(word: Any) -> Any:
    """Sum of the squares of a pair of bf16."""
    return reduce.square_sum([convert.bf16_low(word), convert.bf16_high(word)])


def inverse_rms(total: Any, eps: Any) -> Any:
    """1 / sqrt(mean of the squares + eps)."""
    return ptx.rsqrt(ptx.fma_rn(total, Float32(1.0 / HEAD_DIM), eps))


def sums_of_lanes(rows: list[Any], lane: Any) -> list[Any]:
    """Totals, in every lane, of heads of which each lane has run `lane` and run 32 + `lane`: eight words. All lanes
    must call. In each of the first three steps a lane keeps half of its sums and its neighbour the others."""
    sums = []
    for words in rows:
        # pairs of the first half of the head, then of the second
        squares = reduce.halve_sums([pair_square(word) for word in words], lane, 0, PAIRS)
        squares = reduce.halve_sums(reduce.halve_sums(squares, lane, 1, 1), lane, 2, 1)
        sums.append(squares[0])
    # the block's other runs, its other pairs, the other block of the half, the other half
    for step in (8, 2, 4, 16, 1):
        sums = [ptx.add_rn(total, cute.arch.shuffle_sync_bfly(total, step)) for total in sums]
    return sums


def sum_of_quad(words: list[Any]) -> Any:
    """The sum of a block, in each of the four neighbouring lanes that have it: pair `lane % 4` of its 16 runs each."""
    return reduce.over_quad(reduce.pairwise([pair_square(word) for word in words], ptx.add_rn), ptx.add_rn)
