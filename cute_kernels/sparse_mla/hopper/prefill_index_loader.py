# SPDX-License-Identifier: Apache-2.0
"""What goes ahead of the tiles in the producer of Hopper's prefill kernels: which rows of KV a tile is made of.

The columns of a query row that count are numbered, and a tile is 64 of them. Each producer warp has its share of every
tile's rows, and loads their indices itself, AHEAD tiles ahead, into one of LISTS lists:

    list     [64] indices of a tile's rows, -1 where there is none; [warps] flags of the tile, of each warp its own
    cursor   of a warp, in shared memory, as registers are scarce: work tile, first column, list and number of the count
             of the next tile to load indices of; 16 bytes, of which the producer keeps a word; how many columns count
             of 32 work tiles

What an index means is in the records of KV (params.GatheredKV, params.MixedKV).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.params import GatheredKV, MixedKV, PrefillScheduler
from cute_kernels.sparse_mla.schedule import TILE as KEYS

AHEAD = 3
"""Tiles between loading indices and copying their rows: who fills a stage of a ring of three knows that what it copied
three stages before is there."""

LISTS = AHEAD + 1

COUNTS = 32
CURSOR = 32 + COUNTS * 4
"""Bytes of a warp's cursor."""

KEPT_AT = 16
"""Of a cursor, the word that the producer keeps."""

LAST, END = 1, 2
"""Flags of a tile: it ends a work tile; that is the CTA's last one. Bits from params.FLAG_BITS on are the KV's."""

COPIED_ROWS = 4
"""Rows that all lanes of a warp copy at a time: 8 lanes copy 128 bytes of one."""


def list_bytes(warps: int) -> int:
    return KEYS * 4 + warps * 4


class Position(NamedTuple):
    """Of a cursor: a work tile, its first column of the tile, the tile's list; number of the work tile's count, and the
    count."""

    work_tile: Any
    column: Any
    slot: Any
    number: Any
    count: Any


@dataclass(frozen=True)
class IndexLoader:
    """By all producer warps; their threads are the CTA's last ones.

    lists, cursors   addresses in shared memory
    row_units        of caches whose rows are named by slot
    is_short         of registers: what can be computed anew is
    """

    kv: GatheredKV | MixedKV
    scheduler: PrefillScheduler
    lists: Any
    cursors: Any
    warps: int = 4
    row_units: int = 0
    is_short: bool = False

    @property
    def own_rows(self) -> int:
        """Of a tile, by a warp."""
        return KEYS // self.warps

    def own_warp(self) -> Any:
        """The warp's number among them, computed anew, as `own_lane`."""
        return (ptx.thread_again() & self.warps * 32 - 1) >> 5

    def own_row(self) -> Any:
        """The row of a tile whose index the lane has."""
        return self.own_warp() * self.own_rows + (own_lane() & self.own_rows - 1)

    def list_at(self, slot: Any) -> Any:
        return self.lists + slot * list_bytes(self.warps)

    @property
    def cursor(self) -> Any:
        """Address of the warp's."""
        cursors = ptx.again(self.cursors) if self.is_short else self.cursors
        return cursors + self.own_warp() * CURSOR

    @cute.jit
    def start(self) -> None:
        """Have the indices of the first tiles."""
        self.load_counts(self.scheduler.first)
        self.set_cursor(self.scheduler.first, Int32(0), Int32(0), Int32(0))
        for _ in range_constexpr(AHEAD):
            self.copy_next_indices_async()
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def next_rows(self) -> tuple[Any, Any]:
        """Of the tile AHEAD of the cursor: where a row of the warp's is, -1 if there is no such row, and the flags."""
        return self.rows_of(ptx.load_shared_s32(self.cursor + 8))

    @cute.jit
    def rows_of(self, slot: Any) -> tuple[Any, Any]:
        """`next_rows`, with the list of the tile where the cursor is."""
        list_at = self.list_at((slot + LISTS - AHEAD) & LISTS - 1)
        index = ptx.load_shared_s32(list_at + self.own_row() * 4)
        flags = ptx.load_shared_s32(list_at + KEYS * 4 + self.own_warp() * 4)
        return self.kv.resolve_row(index, flags, self.own_row, self.row_units), flags

    def position(self) -> Position:
        work_tile, column, slot, number = ptx.load_shared_128(self.cursor)
        return Position(work_tile, column, slot, number, ptx.load_shared_s32(self.counts + number * 4))

    @cute.jit
    def copy_next_indices_async(self) -> None:
        """Start to copy the indices of the warp's rows of the next tile, and go on from it."""
        self.copy_indices_async(self.position())
        # read anew, as few registers are left
        self.advance(self.position())

    @cute.jit
    def copy_indices_async(self, position: Position) -> None:
        """Start to copy the indices of the warp's rows of the tile there."""
        work_tile, column, slot, _, count = position
        if own_lane() < self.own_rows:
            index_at = self.list_at(slot) + (self.own_warp() * self.own_rows + own_lane()) * 4
            own = column + self.own_warp() * self.own_rows + own_lane()
            if (work_tile < self.scheduler.end) & (own < self.kv.total(count)):
                row, _ = self.scheduler.coords(work_tile)
                own = self.kv.column(own, count)
                ptx.copy_async_32(index_at, self.kv.lists + Int64(row) * self.kv.list_row + Int64(own) * 4)
            else:
                ptx.store_shared_s32(index_at, Int32(-1))

    @cute.jit
    def advance(self, position: Position) -> None:
        """Write the flags of the tile there, and go on from it."""
        work_tile, column, slot, number, count = position
        flags = self.kv.flags(column, count)
        column = column + KEYS
        if column >= self.kv.total(count):
            work_tile, column, number = work_tile + self.scheduler.step, Int32(0), number + 1
            flags = flags | (Int32(LAST) if work_tile < self.scheduler.end else Int32(LAST | END))
            if number == COUNTS:
                self.load_counts(work_tile)
                number = Int32(0)
        cute.arch.sync_warp()
        if own_lane() == 0:
            ptx.store_shared_s32(self.list_at(slot) + KEYS * 4 + self.own_warp() * 4, flags)
        self.set_cursor(work_tile, column, (slot + 1) & LISTS - 1, number)

    @cute.jit
    def set_cursor(self, work_tile: Any, column: Any, slot: Any, number: Any) -> None:
        if own_lane() == 0:
            ptx.store_shared_128(self.cursor, (work_tile, column, slot, number))
        cute.arch.sync_warp()

    @cute.jit
    def keep(self, word: Any) -> None:
        """Have the warp's cursor keep a word, at KEPT_AT."""
        cute.arch.sync_warp()
        if own_lane() == 0:
            ptx.store_shared_s32(self.cursor + KEPT_AT, word)
        cute.arch.sync_warp()

    @property
    def counts(self) -> Any:
        """Address of the counts of COUNTS work tiles, from the one on that number 0 of the cursor belongs to."""
        return self.cursor + CURSOR - COUNTS * 4

    @cute.jit
    def load_counts(self, work_tile: Any) -> None:
        """Of a work tile and the 31 behind it: loading each in its time would take a long wait each time."""
        count = self.kv.count(work_tile + own_lane() * self.scheduler.step, self.scheduler, self.is_short)
        cute.arch.sync_warp()
        ptx.store_shared_s32(self.counts + own_lane() * 4, count)
        cute.arch.sync_warp()

    def first_chunk(self) -> tuple[Any, Any]:
        """The row of the lane's first 16-byte chunk of a slab, and where it lies in the slab. 4 rows further another
        bit of the swizzle is set, 8 further the same."""
        row = self.own_warp() * self.own_rows + (own_lane() >> 3)
        return row, row * 128 + ((own_lane() & 7) ^ (own_lane() >> 3)) * 16


def own_lane() -> Any:
    """Computed anew: the loop over tiles has no registers to spare."""
    return ptx.thread_again() & 31
