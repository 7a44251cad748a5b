"""What the warps of Hopper's decode kernel agree on: sizes, the shared memory of a block, its work, its arguments.

A tile is 64 keys. Its 512 columns are cut into slabs of 64; a slab of a tile is [64 keys, 128 bytes] of bf16, which
tensor cores read in the layout of the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8).

In a slab, columns have other places than in the cache, so that a thread's registers are whole chunks of tensor-core
operands as they come out of the conversion. Of a row, lane member m = 0 .. 3 of a quad holds 16 columns, and its number
8 c + 2 m + e in the slab, c = 0 .. 7, e = 0 or 1, is

    an fp8 column       16 m + 4 (c // 2) + c % 2 + 2 e
    a rotary column     32 (c // 4) + 8 m + 2 (c % 4) + e

The sum over columns in Q K^T does not mind, as Q is stored in the same order; of O, a thread holds just these columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers
from cute_kernels.sparse_mla.schedule import TILE

KEYS = TILE
DIM = 512
SLAB = 64
SLABS = DIM // SLAB
ROPE_SLAB = SLABS - 1
SLAB_BYTES = KEYS * SLAB * 2
STAGE_BYTES = SLABS * SLAB_BYTES

ROWS = 64
"""Rows of P and O, whatever the heads: what tensor cores take."""

STAGES = 2
AHEAD = 3
"""Tiles that the scout is ahead of the scores by."""

TABLES = 4

ENTRY = 16
"""Bytes of a table's entry of a key: address of its row, the sign bit set if it is skipped, and its scale bytes."""

HEADING = 16
"""Bytes of a table's heading: LAST or 0, heads of the item, address of its queries."""

WALK = 64
"""Bytes of a warp's walk, see Scout."""

LAST, SKIPS = 1, 2
"""Marks of a tile: it ends an item; it has keys that do not count, whose scores are -inf."""

SCORES_BARRIER, BACK_BARRIER = 1, 2
FIRST_BACK_THREAD, BACK_THREADS = 128, 256
FIRST_SCORES_THREAD = 384

LEAST = -3.0e38
"""The running maximum of nothing."""


def score_pitch(heads: int) -> int:
    """fp32 from a key's scores to the next key's: an odd multiple of 8, so that stores meet every bank once."""
    return heads if heads == 8 else heads + 8


def sum_parts(heads: int) -> int:
    """Warps of the back that hold sums of the same head."""
    return BACK_THREADS // max(heads, 32)


def smem_parts(heads: int) -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; the first three are 1024-byte aligned."""
    return {
        "q": heads * DIM * 2,
        "v": STAGES * STAGE_BYTES,
        "p": ROWS * KEYS * 2,
        "scores": KEYS * score_pitch(heads) * 4,
        "table": TABLES * KEYS * ENTRY,
        "heading": TABLES * HEADING,
        "mark": 4 * 4,
        "scale": KEYS * 8,
        "walk": 4 * WALK,
        "top": sum_parts(heads) * heads * 4,
        "sum": sum_parts(heads) * heads * 4,
        "rescale": heads * 4,
    }


def smem_bytes(heads: int) -> int:
    return sum(smem_parts(heads).values()) + (TABLES + STAGES + 1) * barriers.BYTES_PER_STAGE


class Places(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    q            [8 slabs][heads][64] bf16
    v            [2 stages][8 slabs][64 keys][64] bf16
    p            [64 rows][64 keys] bf16, swizzled likewise
    scores       [64 keys][score_pitch] fp32, before scaling
    table        [4][64 keys] entries
    heading      [4] headings of tables
    mark         [4 warps of the scores] LAST, SKIPS
    scale        [64 keys] 8 scale bytes, of a tile with large ones
    walk         [4 warps of the scores] where the scout is
    top          [sum_parts][heads] maxima of a tile
    sum          [sum_parts][heads] sums of an item
    rescale      [heads] what to multiply O with
    """

    q: Any
    v: Any
    p: Any
    scores: Any
    table: Any
    heading: Any
    mark: Any
    scale: Any
    walk: Any
    top: Any
    sum: Any
    rescale: Any


@dataclass(frozen=True)
class Rings:
    """tables: from the scout to the others; nobody waits until one is empty. stages: from the front to the scores; the
    back empties them. scores: scores and marks, from the scores to the back."""

    tables: barriers.Ring
    stages: barriers.Ring
    scores: barriers.Ring

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Rings:
        return cls(*(barriers.Ring.allocate(smem, stages) for stages in (TABLES, STAGES, 1)))

    def initialize(self) -> None:
        """By one thread; the block synchronizes afterwards."""
        # of a key's two threads both arrive, and the asynchronous copy of its scale bytes does
        self.tables.initialize(3 * KEYS, 1)
        self.stages.initialize(4, BACK_THREADS // 32)
        self.scores.initialize(4, BACK_THREADS // 32)


class Work(NamedTuple):
    """The items of a block: numbers first, first + step ... below `end`; by blocks of heads, parts, tokens, batches."""

    tokens: Any
    head_blocks: Any
    parts: Any
    part_tiles: Any
    first: Any
    end: Any
    step: Any

    def place(self, item: Any) -> tuple[Any, Any, Any, Any]:
        """(batch, token, part, block of heads) of a work item."""
        rest = item // self.head_blocks
        row = rest // self.parts
        return row // self.tokens, row % self.tokens, rest % self.parts, item % self.head_blocks


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
    """out: address, strides of parts, batches, tokens and heads in bytes; lse; numbers of heads and batches."""

    base: Any
    strides: Any
    lse: Any
    heads: Any
    batches: Any
