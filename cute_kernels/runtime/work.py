# SPDX-License-Identifier: Apache-2.0
"""What a tensor-core kernel moves and computes for a tile: the kernel states it, perf/roofline.py makes times of it.

The file of a kernel, `blackwell/<kernel>.py`, offers

    def work() -> tuple[Work, ...]:

one entry per variant that differs in it (heads, formats, one block or a pair). The figures are the ones that the kernel
and its tests use: tile sizes, stages and formats come from the constants of the kernel, not from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MMA_KINDS = ("bf16", "e4m3", "e2m1")
"""Kinds of tensor-core instructions by rate."""


@dataclass(frozen=True)
class Shape:
    """A call of a size that people ask about, for example of perf's sweep.

    name    as in perf's cases: "b256 h64 128+512"
    tiles   that the call has, all blocks together
    bytes   the fewest that must move to and from memory, queries and results included
    """

    name: str
    tiles: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """One tile of one kernel. A figure is what a single block (one multiprocessor) does for the tile.

    op       the op that the kernel serves
    kernel   the variant in a few words: "64 heads", "128 heads, pair of blocks"
    tile     what a tile is: "64 keys, 64 heads"
    blocks   blocks that share the tile, each with the figures below: 2 for a pair
    hbm      bytes that must come from memory, if nothing of the tile is in a cache
    mma      kind among MMA_KINDS -> floating-point operations of the instructions, padding included. What runs at half
             the rate of its kind counts twice
    smem     what -> bytes that are written to, or read from, shared memory: copies that land, what threads load and
             store, operands of tensor cores (once per instruction)
    flops    floating-point operations that the op asks for, padding left out
    shapes   of whole calls
    threads  what -> clocks that it keeps threads' busiest pipe busy, all warps together, where that may bind
    """

    op: str
    kernel: str
    tile: str
    blocks: int
    hbm: float
    mma: Mapping[str, float]
    smem: Mapping[str, float]
    flops: float
    shapes: tuple[Shape, ...] = ()
    threads: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.mma) - set(MMA_KINDS))
        if unknown:
            raise ValueError(f"Work: mma: expected kinds among {', '.join(MMA_KINDS)}, got {', '.join(unknown)}")
