"""What the warpgroups of Hopper's prefill kernel agree on: sizes, shared memory of a block, its work, its arguments.

A work item is a query row and up to 64 of its heads. Its keys come in tiles of 64 rows of kv, which are both K and V.
The 512 columns of a tile, or of an item's queries, are cut into slabs of 64: a slab is [64 rows, 128 bytes] of bf16,
which tensor cores read in the layout of the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8).

Tiles go through a ring of stages. What begins an item is a stage too: its queries. Of those the scores' warpgroup holds
HELD columns in registers, and lets go of the stage; the other columns stay in memory of their own while the item lasts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.logs import Logs
from cute_kernels.sparse_mla.schedule import TILE

KEYS = TILE
ROWS = 64
"""Heads of an item, as tensor cores take them; those that are not there are zero."""

SLAB = 64
SLABS = HEAD_DIM // SLAB
SLAB_BYTES = KEYS * SLAB * 2
STAGE_BYTES = SLABS * SLAB_BYTES
STAGES = 3

HELD = 384
"""Columns of the queries in registers: a quarter of them each, per thread. More would leave too few for the scores, and
fewer would leave too little memory for three stages."""

KEPT = HEAD_DIM - HELD
"""Columns of the queries in shared memory."""

P_BITS = 1
P_BUFFERS = 1 << P_BITS
P_BYTES = ROWS * KEYS * 2

SIDE = HEAD_DIM // 2
"""Columns of the results that one of two warpgroups has."""

AHEAD = 3
"""Tiles between asking for indices and asking for their rows: whoever fills a stage knows that what was asked for three
stages before is there."""

LISTS = AHEAD + 1
LIST = KEYS * 4 + 4 * 4
"""Bytes of a tile's list: its indices, and its marks for each of the four warps that ask for rows."""

HEADING = 32
"""Bytes of a stage's heading: of every 16 keys, which are there, and marks of the tile; of queries, their item."""

WALK_ITEMS = 32
WALK = 32 + WALK_ITEMS * 4
"""Bytes of a warp's walk, see Rows.set_walk, set_item and look_ahead."""

LAST, END = 1, 2
"""Marks of a tile: it ends an item; that is the block's last one."""

MARK_BITS = 2
"""Of a mark; whoever asks for rows may remember something in those above."""

NOTE = 8
"""Bytes of a head's note: what to multiply O with before a tile, and what behind an item's last one."""

LABEL = 8
"""Bytes of a tile's label: its marks and its item."""

BACK, ROWS_GROUP, GROUPS = 1, 3, 4
"""Numbers of warpgroups, the scores being 0: the first of two backs, the one that asks for rows; how many there are."""

THREADS = GROUPS * 128

LAUNCHED = 65536 // THREADS
"""Registers per thread before warpgroups ask for more or fewer."""

SCORES_REGISTERS, BACK_REGISTERS, ROWS_REGISTERS = 160, 160, 32
"""Per thread, in steps of 8; all four warpgroups together have 512, what they are launched with."""

TILES = ("stages", "kept", "p")
"""Parts of shared memory that tensor cores read: 1024-byte aligned."""


def smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order."""
    return {
        "stages": STAGES * STAGE_BYTES,
        "kept": ROWS * KEPT * 2,
        "p": P_BUFFERS * P_BYTES,
        "list": LISTS * LIST,
        "heading": STAGES * HEADING,
        "walk": 4 * WALK,
        "note": P_BUFFERS * ROWS * NOTE,
        "label": P_BUFFERS * LABEL,
    }


BARRIERS = 2 * (STAGES + P_BUFFERS) + 1


class Places(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    stages    [3][8 slabs][64 rows][64] bf16: keys of a tile, or queries of an item
    kept      [2 slabs][64 heads][64] bf16: the last columns of the item's queries
    p         [2 buffers][64 heads][64 keys] bf16: weights
    list      [4] lists
    heading   [3 stages] headings
    walk      [4 warps that ask for rows] where they are
    note      [2 buffers][64 heads] notes
    label     [2 buffers] labels
    raw, scale
              what a kernel over rows of another kind converts
    """

    stages: Any
    kept: Any
    p: Any
    list: Any
    heading: Any
    walk: Any
    note: Any
    label: Any
    raw: Any = None
    scale: Any = None


@dataclass(frozen=True)
class Tiles(barriers.Ring):
    """The ring of stages as those see it that multiply: where a tile lies, and what says whether it is there.

    A tile is where a walk along the ring is, a (stage, phase) as in barriers.
    """

    def advance(self, stage: Any, phase: Any) -> tuple[Any, Any]:
        """The next tile."""
        return barriers.advance(stage, phase, self.stages)

    def wait_tile(self, stage: Any, phase: Any) -> None:
        """Until all of a tile is there."""
        self.wait_full(stage, phase)

    def has_tile(self, stage: Any, phase: Any) -> Any:
        """1 if `wait_tile` would not wait, else 0."""
        return self.is_full(stage, phase)

    def let_go_of_queries(self, stage: Any) -> None:
        """By a thread of each of the scores' warps."""
        cute.arch.mbarrier_arrive(self.empty(stage), arrive_count=2)


@dataclass(frozen=True)
class Barriers:
    """mbarriers of a block, and what completes their phases.

    stages    full: all rows are there, and the heading. empty: the backs' warps are done with a tile, or the scores'
              with queries
    weights   full: the scores' warps have stored a tile's weights. empty: the backs' warps are done with them
    kept      the scores' warps are done with the item's queries in shared memory
    """

    stages: Tiles
    weights: barriers.Ring
    kept: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Barriers:
        stages = Tiles(smem.allocate_array(Int64, 2 * STAGES), STAGES)
        return cls(stages, barriers.Ring.allocate(smem, P_BUFFERS), smem.allocate_array(Int64, 1))

    def initialize(self) -> None:
        """By one thread; the block synchronizes afterwards."""
        # every thread that asks for rows, and one of each of its warps for the heading
        self.stages.initialize(128 + 4, 2 * 4)
        self.initialize_others()

    def initialize_others(self) -> None:
        self.weights.initialize(4, 2 * 4)
        cute.arch.mbarrier_init(self.kept, 4)
        cute.arch.mbarrier_init_fence()


@dataclass(frozen=True)
class Plan:
    """What is not the same in kernels over rows of another kind.

    dtype      of what tensor cores multiply
    memory     as smem_parts(); the names are those of Places
    barriers   type of the barriers, and how many mbarriers those are
    held       as HELD
    scores_registers, rows_registers
               per thread of those warpgroups
    queries_in_ring
               what begins an item is a stage of queries; else the scores' warpgroup copies them itself
    readers_fence
               whoever multiplies makes sure that tensor cores see what has been stored in a stage
    """

    dtype: Any
    memory: dict[str, int]
    barriers: Any
    mbarriers: int
    held: int
    scores_registers: int
    rows_registers: int
    queries_in_ring: bool = True
    readers_fence: bool = False

    @property
    def smem_bytes(self) -> int:
        return sum(self.memory.values()) + self.mbarriers * 8


BF16 = Plan(BFloat16, smem_parts(), Barriers, BARRIERS, HELD, SCORES_REGISTERS, ROWS_REGISTERS)


def uniform_tile(address: Any, layout: Any, dtype: Any) -> Any:
    """The tile of that layout at an address in shared memory that all lanes of a warp have. The reduction over lanes
    leaves it in a register of the whole warp, where descriptors for tensor cores are made of it with no more ado; from
    a register per lane each of them would be moved there, between two products."""
    place = cute.arch.warp_redux_sync(address, "or")
    pointer = cute.make_ptr(dtype, place, cutlass.AddressSpace.smem, assumed_align=1024, swizzle_=layout.inner)
    return cute.make_tensor(pointer, layout.outer)


class Work(NamedTuple):
    """The items of a block: numbers first, first + step ... below `end`; a query row's blocks of heads follow each
    other, and there are 1 << blocks_bits of them."""

    first: Any
    end: Any
    step: Any
    blocks_bits: Any

    def place(self, item: Any) -> tuple[Any, Any]:
        """(query row, first head) of a work item."""
        row = item >> self.blocks_bits
        return row, (item - (row << self.blocks_bits)) * ROWS


class Query(NamedTuple):
    """q: address, strides in bytes, number of heads. Of raw heads, which are still to be normed and rotated: what is
    added to their mean square, or None; four sums of squares for each, fp32 [rows, heads, 4]: address, bytes from row
    to row."""

    base: Any
    row: Any
    head: Any
    heads: Any
    norm_eps: Any = None
    squares: Any = None
    squares_row: Any = None

    def count(self, first: Any) -> Any:
        """Heads of an item whose first is that one."""
        return cutlass.min(self.heads - first, ROWS)

    @property
    def slabs(self) -> tuple[int, ...]:
        """Slabs of the queries, those first that are held in registers. Raw heads have their rotary one there, the
        last: it is rotated in registers, and tensor cores wait for no store."""
        if self.norm_eps is None:
            return tuple(range(SLABS))
        return *range(HELD // SLAB - 1), SLABS - 1, *range(HELD // SLAB - 1, SLABS - 1)


class Sources(NamedTuple):
    """kv: address, bytes from row to row, number of rows. Lists: address, bytes from list to list, columns. Columns
    that count: address of int32 [rows], or 0."""

    kv: Any
    kv_row: Any
    kv_rows: Any
    lists: Any
    list_row: Any
    columns: Any
    lengths: Any


STREAMED = 1 << 15
"""Heads of all rows, 1 KB of results each: of more than that L2 has lost the first before anybody reads them."""


@cute.jit
def results_policy(heads: Any) -> Any:
    """L2's policy for the results of so many heads of all rows: what it would lose anyway shall not push out kv."""
    return Int64(ptx.READ_ONCE) if heads > STREAMED else Int64(ptx.READ_AGAIN)


class Output(NamedTuple):
    """out: address, strides in bytes of rows and heads; max_logits, or None, and lse by rows and heads; what to
    multiply out with, or None; L2's policy for out, or None; where parts of rows are merged, the address of the sink,
    or 0. quant: where the results go instead as codes, or None."""

    base: Any
    row: Any
    head: Any
    max_logits: Any
    lse: Logs
    scale: Any
    policy: Any = None
    sink: Any = None
    quant: Any = None
