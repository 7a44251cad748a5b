"""What the warps of Hopper's decode kernel agree on: sizes, the shared memory of a block, its work, its arguments.

A pair of blocks has a work item: block r of it has columns 256 r ... 256 r + 255 of the queries, of the keys and of the
result. A tile is 64 keys. Its 256 columns are cut into slabs of 64; a slab of a tile is [64 keys, 128 bytes] of bf16,
which tensor cores read in the layout of the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers
from cute_kernels.sparse_mla.logs import Logs
from cute_kernels.sparse_mla.schedule import TILE

PAIR = 2
"""Blocks that share a work item."""

KEYS = TILE
SIDE = 512 // PAIR
"""Columns of a block."""

SLAB = 64
SLABS = SIDE // SLAB
LAST_SLAB = SLABS - 1
"""In the second block, the rotary columns."""

SLAB_BYTES = KEYS * SLAB * 2
STAGE_BYTES = SLABS * SLAB_BYTES

ROWS = 64
"""Rows of S, P and O, whatever the heads: what tensor cores take."""

STAGES = 4
P_BUFFERS = 2
TURNS = 2
"""Warpgroups that convert rows, and that compute scores: they take tiles in turn."""

RAWS = 4
"""Halves of tiles whose rows are on their way from memory."""

RAW_KEYS = KEYS // 2

RAW_PITCH = SIDE + SLAB
"""Bytes of a block's part of a row, as the cache has it, in the first block and a gap that keeps banks apart; in the
second, whose rotary columns are bf16 already, none."""

RAW_BYTES = RAW_KEYS * RAW_PITCH

HEADINGS = 8
"""At least the tiles that can be on their way from the scout to the scores."""

HEADING = 32
"""Bytes of a heading: marks of the tile and, from HEADS_BIT on, heads of its item; the item; address of its queries. Of
every 16 keys, which are skipped."""

HEADS_BIT = 8

OWN_KEYS = 16
"""Of a tile, by a warp of the scout."""

WALK = 64
"""Bytes of a warp's walk, see Scout."""

FIRST, LAST, END, ODD = 1, 2, 4, 8
"""Marks of a tile: it begins an item; it ends one; there is no such tile; its item is the pair's second, fourth ..."""

NOTE = 8
"""Bytes of a head's note: what to multiply O with before a tile, and what behind an item's last one."""

LABEL = 16
"""Bytes of a tile's label: marks; of an item's last tile, heads that are there, address of their rows of O, or where
codes are stored, the query row and the first head."""

FIRST_BACK_THREAD, FIRST_FRONT_THREAD, FIRST_SCOUT_THREAD, THREADS = 256, 384, 640, 768
SCORES_BARRIER, BACK_BARRIER = 1, 3

HALF = 8
"""Of every 16 heads, block r of the pair has the r-th 8 to find weights for."""

PARTIAL_BYTES = ROWS // 2 * KEYS * 4
P_BYTES = ROWS // 2 * KEYS * 2
WORDS_BYTES = 128 * 16
"""Four words of each thread of a warpgroup."""


def busy_warps(heads: int) -> int:
    """Warps of a warpgroup whose rows of S, P and O are not all padding."""
    return -(-heads // 16)


def smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; the first two are 1024-byte aligned."""
    return {
        "q": ROWS * SIDE * 2,
        "v": STAGES * STAGE_BYTES,
        "p": P_BUFFERS * P_BYTES,
        "partial": TURNS * PARTIAL_BYTES,
        "raw": RAWS * RAW_BYTES,
        "scale": RAWS * RAW_KEYS * 4,
        "heading": HEADINGS * HEADING,
        "walk": 4 * WALK,
        "note": P_BUFFERS * ROWS * NOTE,
        "label": P_BUFFERS * LABEL,
        "top": ROWS // 2 * 4,
        "amount": 128 * 4,
    }


BARRIERS = 2 * (RAWS + STAGES + P_BUFFERS) + TURNS + 1 + 4 + 4 + 4


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


class Places(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    q            [4 slabs][64 heads][64] bf16
    v            [4 stages][4 slabs][64 keys][64] bf16
    p            [2 buffers][2][128 threads][8] bf16: weights of the other block's heads, as the threads hold them
    partial      [2 warpgroups][4][128 threads][4] fp32: the other block's part of scores, as the threads hold them;
                 then, where half of it was, weights of this block's heads, as in p
    raw          [4][32 keys][RAW_PITCH] parts of rows, as the caches have them
    scale        [4][32 keys] 4 scale bytes
    heading      [8] headings of tiles
    walk         [4 warps of the scout] where it is
    note         [2 buffers][2 blocks][4 warps][8] notes
    label        [2 buffers] labels
    top          [4 warps][8 heads] running maxima
    amount       [128 threads] running sums
    """

    q: Any
    v: Any
    p: Any
    partial: Any
    raw: Any
    scale: Any
    heading: Any
    walk: Any
    note: Any
    label: Any
    top: Any
    amount: Any


@dataclass(frozen=True)
class Barriers:
    """Two blocks' mbarriers, and what completes their phases.

    raws       full: all bytes of half a tile's rows and scales, and the tile's heading are there. empty: the front's
               warps have loaded them
    stages     full: the front's warps have stored a tile. empty: the back's warps are done with it
    weights    full: the scores' warps have stored their rows of P and their notes, and all bytes of the other block's
               are there. empty: both backs' warps are done with them
    partials   of each warpgroup of the scores: all bytes of the other block's part of them are there
    queries    an item's queries are there
    products   of each of the scores' warps: an item's last Q K^T is done, and another item follows
    tops       of each of their warps: the running maxima are a tile's
    amounts    of each of their warps: the running sums are a tile's
    """

    raws: barriers.Ring
    stages: barriers.Ring
    weights: barriers.Ring
    partials: Any
    queries: Any
    products: Any
    tops: Any
    amounts: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Barriers:
        rings = (barriers.Ring.allocate(smem, stages) for stages in (RAWS, STAGES, P_BUFFERS))
        return cls(*rings, *(smem.allocate_array(Int64, count) for count in (TURNS, 1, 4, 4, 4)))

    def initialize(self) -> None:
        """By one thread; the pair of blocks synchronizes afterwards."""
        # of each warp of the scout that has keys in it one thread, and the copies of scales
        self.raws.initialize(2 + RAW_KEYS, 4)
        self.stages.initialize(4, 4)
        self.weights.initialize(4, 4 * PAIR)
        for first, count, arrivals in (
            (self.partials, TURNS, 1),
            (self.queries, 1, 128),
            (self.products, 4, 1),
            (self.tops, 4, 1),
            (self.amounts, 4, 1),
        ):
            for i in range(count):
                cute.arch.mbarrier_init(first + i, arrivals)
        cute.arch.mbarrier_init_fence()


class Work(NamedTuple):
    """The items of a block: numbers first, first + step ... below `end`; by blocks of heads, parts, tokens, batches.

    tokens, head_blocks, parts   divisors by the numbers of those
    """

    tokens: Any
    head_blocks: Any
    parts: Any
    part_tiles: Any
    first: Any
    end: Any
    step: Any

    def place(self, item: Any) -> tuple[Any, Any, Any, Any]:
        """(batch, token, part, block of heads) of a work item."""
        rest, head_block = divmod(item, self.head_blocks)
        row, part = divmod(rest, self.parts)
        batch, token = divmod(row, self.tokens)
        return batch, token, part, head_block


class Query(NamedTuple):
    """q: address, strides in bytes, number of heads."""

    base: Any
    batch: Any
    token: Any
    head: Any
    heads: Any

    def of(self, batch: Any, token: Any, head: Any) -> Any:
        return self.base + Int64(batch) * self.batch + Int64(token) * self.token + Int64(head) * self.head


class Cache(NamedTuple):
    """Pages `page_stride` bytes apart, each of as many rows as `rows` divides by."""

    base: Any
    page_stride: Any
    pages: Any
    rows: Any


class Lists(NamedTuple):
    """int32 rows of columns: indices, or a block table."""

    base: Any
    batch: Any
    token: Any
    columns: Any


class Lengths(NamedTuple):
    """Columns that count: address or 0, strides in elements."""

    base: Any
    batch: Any
    token: Any


class Sources(NamedTuple):
    cache0: Cache
    list0: Lists
    lengths0: Lengths
    cache1: Cache
    list1: Lists
    lengths1: Lengths


class Output(NamedTuple):
    """out: address, strides of parts, batches, tokens and heads in bytes; lse by parts, batches, heads and tokens;
    number of heads. quant: where the results go instead as codes, their row being batch * tokens + token; or None."""

    base: Any
    strides: Any
    lse: Logs
    heads: Any
    quant: Any = None
