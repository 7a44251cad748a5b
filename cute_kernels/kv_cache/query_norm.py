"""The sum of squares that a head of a query is normed by: in one order, however threads hold the head's 512 columns.

Two kernels norm queries, and make the same bits of them: qnorm.py, a warp of which has a head by runs of columns, and
Hopper's prefill attention, a warp of which has sixteen heads as tensor cores take them. The order is a tree:

    pairs      of neighbouring columns, 2 p and 2 p + 1
    runs       of eight columns, four pairs each. The first pairs of all 64 runs are added up, as are the second, third
               and fourth ones: runs that are neighbours first, then sums that are neighbours
    total      (first + second) + (third + fourth)
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.dsl import ptx, reduce
from cute_kernels.formats import HEAD_DIM

PAIRS = 4
"""Of a run."""


def pair_square(word: Any) -> Any:
    """Sum of the squares of a pair of bf16."""
    # not convert.bf16_low and bf16_high: whoever scales the pair later has it unpacked anew, instead of keeping 32 bits
    # of each number in registers until then
    low, high = (ptx.permute_bytes(word, Int32(0), order).bitcast(Float32) for order in (0x1044, 0x3244))
    return reduce.square_sum([low, high])


def inverse_rms(total: Any, eps: Any) -> Any:
    """1 / sqrt(mean of the squares + eps)."""
    return ptx.rsqrt(ptx.fma_rn(total, Float32(1.0 / HEAD_DIM), eps))


def sums_of_runs(rows: list[Any], lane: Any) -> list[Any]:
    """Totals, in every lane, of rows of which each lane has run `lane` and run 32 + `lane`: eight words. All lanes must
    call. In each of the first three steps a lane keeps half of its sums and its neighbour the others."""
    sums = []
    for words in rows:
        # words: pairs of the first half of the row, then of the second
        squares = reduce.halve_sums([pair_square(word) for word in words], lane, 0, PAIRS)
        squares = reduce.halve_sums(reduce.halve_sums(squares, lane, 1, 1), lane, 2, 1)
        sums.append(squares[0])
    # the other runs, then the other half of the row, then the other pairs
    for step in (8, 16, 1, 2, 4):
        sums = [ptx.add_rn(total, cute.arch.shuffle_sync_bfly(total, step)) for total in sums]
    return sums


class RunningTree:
    """A sum of a power of two of values, neighbours first, which come one after the other. While it is compiled."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Any]] = []

    def add(self, value: Any) -> None:
        size = 1
        while self.parts and self.parts[-1][0] == size:
            value = ptx.add_rn(self.parts.pop()[1], value)
            size *= 2
        self.parts.append((size, value))

    @property
    def total(self) -> Any:
        ((_, value),) = self.parts
        return value
