"""How a row is cut into pieces for the blocks and threads that pick its best columns, and their shared memory.

A block takes neighbouring columns, in tiles, one after the other:

    chunk       128 neighbouring columns, which a warp loads at once, four a lane
    tile        V chunks of each of W warps, held in registers. Of T tiles warp w has chunks (v W + w) T + t in tile t:
                every tile has columns from all over the row, and so has every warp
    place       of a column in its block, from the last 16-byte boundary before the row's range on
    picks       bit p % 32 of word p // 32 for place p: whether it is one of the k best
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

BIN_BITS = 9
BINS = 1 << BIN_BITS

RANKED = 32
"""Elements of the k-th best one's bin that are ranked at once, one a lane."""

GROUPS = 8
"""Of which a thread keeps the maxima."""

CHUNK_BITS = 7
CHUNK = 1 << CHUNK_BITS
"""Columns that a warp loads at once."""

SPARE = 1 / 3
"""Of the picks, that a bound is searched for beyond k in a sample: of random scores fewer than k reach it in less than
one of a hundred rows, and 1.3 k on average."""

# byte offsets in a block's shared memory; all before ZEROS is zero at first
CANDIDATES = 0
EQUALS_LENGTH, BEFORE, TIES_BEFORE = (4 * BINS + 4 * i for i in range(3))
ZEROS = 4 * BINS + 16
SUMS = ZEROS
FOUND, EXTREMES = SUMS + 4 * BINS, SUMS + 4 * BINS + 16
COUNTS, TIE_COUNTS, WINNERS, RANGES = (EXTREMES + 16 + 128 * i for i in range(4))
AGREED = COUNTS  # 256 bytes, long before there are counts
EQUALS = RANGES + 256
LIST = EQUALS + 8 * RANKED


@dataclass(frozen=True)
class Plan:
    """Blocks of so many warps, `cluster` of which share a row; vectors of a thread and tile, most tiles of a block."""

    warps: int
    vectors: int
    cluster: int
    tiles: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def is_streamed(self) -> bool:
        """Whether a row's bound is guessed by its first tile, and what reaches it kept of all tiles as they come."""
        return self.tiles > 1 and self.cluster == 1

    @property
    def tile(self) -> int:
        """Columns."""
        return 4 * self.vectors * self.threads

    @property
    def places(self) -> int:
        """Of a block."""
        return self.tile * self.tiles

    @property
    def width(self) -> int:
        """Places whose picks a lane writes at a time: 16 where otherwise half of the lanes would have none."""
        return 32 if self.places // self.threads >= 32 else 16

    @property
    def length(self) -> int:
        """Candidates that a warp lists; fewer where the block's picks need much memory. All lists together have room
        for the picks of a row, 4 bytes each, which wait there for the pages they lie in."""
        if self.is_streamed:
            most = 8192 if self.places <= 8192 * self.warps else 3584
        else:
            most = 8192 if self.places <= 131072 else 2048
        return min(most, 512 * self.warps) // self.warps

    @property
    def picks(self) -> int:
        """Byte offset of the words with a bit for each place that is picked."""
        return LIST + 8 * self.length * self.warps

    @property
    def ties(self) -> int:
        """Byte offset of those for the places that share the k-th best score and are picked after all better ones."""
        return self.picks + self.places // 8

    @property
    def smem_bytes(self) -> int:
        """Of a block."""
        return self.ties + self.places // 8


class Here(NamedTuple):
    """A thread's place, and the address of shared memory: the block's own, and that of the cluster's first block."""

    at: Any
    lead: Any
    thread: Any
    warp: Any
    lane: Any
    rank: Any


class Part(NamedTuple):
    """A block's part of a row.

    base    address of place 0, 16-byte aligned
    head    first place of the row's range: less than 4 in the first block, else at most 0
    stop    end of the part; 0 or less if there is none
    tiles   of the part
    first   column of the row's range that is place 0
    step    places from a thread's vector to its next one
    each    1 / (warps * tiles), fp32
    """

    base: Any
    head: Any
    stop: Any
    tiles: Any
    first: Any
    step: Any
    each: Any
