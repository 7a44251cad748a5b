"""What the warpgroups of Hopper's paged prefill kernel agree on beyond prefill's plan: sizes and shared memory.

Tiles are prefill's. The fp8 columns of their rows come from the caches as they are there, and a lane of the warpgroup
that asks for rows converts what it has asked for. So nobody else waits for codes, and there is a tile of them, no more:
what is converted is asked to be replaced at once. Products begin when the first half of a tile's columns is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.paging import Batch
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    HEADING,
    KEYS,
    LABEL,
    NOTE,
    P_BUFFERS,
    P_BYTES,
    ROWS,
    SLAB,
    SLABS,
    STAGE_BYTES,
    Plan,
    Tiles,
)

STAGE_BITS = 1
STAGES = 1 << STAGE_BITS
HELD = 256

OWN_ROWS = 16
"""Of a tile, or of an item's heads, by a warp."""

GROUP = 8
"""Rows that a warp converts at a time: four lanes have one."""

GROUPS = OWN_ROWS // GROUP
WARPS = 4

HALF = SLABS // 2
"""Slabs of the first half of a tile."""

RAW_ROW = FP8_DS_MLA.data_bytes
CODES = (SLABS - 1) * SLAB
"""Of those the e4m3 codes."""

SCALES = 8
"""Bytes of a row's scales, the unused one included."""

LISTS = 8
"""Of tiles. A warp looks after every fourth tile: it asks for the entries that the tile is made of four tiles ahead,
then for their pages, and two tiles ahead it tells all where the rows are. No warp is more than two tiles behind
another."""

LIST = 816
DELTAS, TILE, THERE = 512, 768, 784
"""Bytes of a tile's list, and where in it are, behind 64-bit addresses of its rows (before, their pages), 0 where there
is no such row: what to add for a row's scales (before, its entry, then which row of its page it is); marks of the tile,
how many rows from its first one on are compressed, the request, and how many entries are visible; a bit for each row
that is there."""

WALK_ITEMS = 32
RECORD = 32
"""Bytes of what a warp knows of an item: request, visible entries, how many of its keys are compressed, how many there
are in all; first position of the window."""

WALK = 16 + WALK_ITEMS * RECORD
"""Bytes of a warp's walk: item, first column of its next tile, number of the item's record; records."""


def smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; what is not as in prefill's Places:

    stages    [2][8 slabs][64 rows][64] bf16: keys of a tile
    kept      [4 slabs][64 heads][64] bf16: the last columns of the item's queries, for a while the first ones
    raw       [64 rows][448] e4m3
    scale     [4 warps][2 groups][32 lanes] 8 scale bytes of the lane's row
    list      [8] lists
    walk      [4 warps] where they are
    """
    return {
        "stages": STAGES * STAGE_BYTES,
        "kept": ROWS * (HEAD_DIM - HELD) * 2,
        "p": P_BUFFERS * P_BYTES,
        "raw": KEYS * CODES,
        "scale": WARPS * GROUPS * 32 * SCALES,
        "list": LISTS * LIST,
        "walk": WARPS * WALK,
        "heading": STAGES * HEADING,
        "note": P_BUFFERS * ROWS * NOTE,
        "label": P_BUFFERS * LABEL,
    }


BARRIERS = 3 * STAGES + 2 * P_BUFFERS + LISTS


@dataclass(frozen=True)
class PagedTiles(Tiles):
    """Products with a tile begin when the first half of its columns is there: a third mbarrier of each stage."""

    halves: Any

    def half(self, stage: Any) -> Any:
        return self.halves + stage

    def wait_tile(self, stage: Any, phase: Any) -> None:
        ptx.wait_mbarrier(self.half(stage).toint(), phase)

    def has_tile(self, stage: Any, phase: Any) -> Any:
        return ptx.test_mbarrier(self.half(stage).toint(), phase)


@dataclass(frozen=True)
class Barriers:
    """mbarriers of a block, and what completes their phases.

    stages    full: all warps that convert rows have stored theirs, and the heading. half: all lanes of them have stored
              the first half of the columns. empty: the backs' warps are done with the tile
    weights   full: all threads of the scores have stored a tile's weights. empty: as prefill's
    lists     a tile's list says where its rows are
    """

    stages: PagedTiles
    weights: barriers.Ring
    lists: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Barriers:
        stages = PagedTiles(smem.allocate_array(Int64, 2 * STAGES), STAGES, smem.allocate_array(Int64, STAGES))
        return cls(stages, barriers.Ring.allocate(smem, P_BUFFERS), smem.allocate_array(Int64, LISTS))

    def initialize(self) -> None:
        """By one thread; the block synchronizes afterwards."""
        self.stages.initialize(WARPS, 2 * 4)
        self.weights.initialize(WARPS * 32, 2 * 4)
        for i in range(STAGES):
            cute.arch.mbarrier_init(self.stages.half(i), WARPS * 32)
        for i in range(LISTS):
            cute.arch.mbarrier_init(self.lists + i, 1)
        cute.arch.mbarrier_init_fence()


SCORES_REGISTERS, ROWS_REGISTERS = 128, 64
"""As prefill's: this kernel's warpgroup of rows needs more registers."""


PAGED = Plan(
    BFloat16,
    smem_parts(),
    Barriers,
    BARRIERS,
    HELD,
    SCORES_REGISTERS,
    ROWS_REGISTERS,
    queries_in_ring=False,
    readers_fence=True,
)


class Cache(NamedTuple):
    """Pages `page_stride` bytes apart, of as many rows as `rows` divides by; a block table: address, bytes from row to
    row, columns."""

    base: Any
    page_stride: Any
    pages: Any
    rows: Any
    table: Any
    table_row: Any
    columns: Any


def cache_of(pages: Any, table: Any) -> Cache:
    """Of its tensors."""
    rows = cute.fast_divmod_create_divisor_v2(length(pages, 1))
    where = (address(table), stride_bytes(table, 0), length(table, 1))
    return Cache(address(pages), stride_bytes(pages, 0), length(pages, 0), rows, *where)


class Sources(NamedTuple):
    """Both caches. The window's positions. Entries: address of the lists that name them, bytes from list to list; 0:
    all visible ones in order. Most columns of them. Tokens of an entry, as a divisor. Where the query rows are. Where
    they are cut into parts: how many, and tiles in a part, or 0 (schedule.part_range)."""

    window: Cache
    compressed: Cache
    window_size: Any
    lists: Any
    list_row: Any
    columns: Any
    ratio: Any
    batch: Batch
    parts: Any = None
    part_tiles: Any = None


def own_warp() -> Any:
    """The warp's number in its warpgroup, computed anew as own_lane."""
    return (ptx.thread_again() & 127) >> 5
