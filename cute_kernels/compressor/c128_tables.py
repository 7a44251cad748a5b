"""Units of work in shared memory, from the warp that lists them (c128_units.py) to those that work on them.

A unit is a table of 128 rows. Each has an address it is read from, one it is saved to, and the row of the bias to add
on the way; an address of 0 means that nothing is read, or saved. There are two kinds:

    ENTRY    the window of an entry, its 128 rows in order
    SAVE     rows that are saved and belong to no entry
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.formats import HEAD_DIM

RATIO = 128
"""Rows of a window, and of a table."""

ROW_BYTES = 2 * HEAD_DIM * 4
TABLES = 3
"""That are in use at a time: of the unit worked on, of the next, and of the one that is listed."""

PER_LANE = RATIO // 32
TABLE_BYTES = TABLES * (RATIO * (8 + 8 + 4) + 4 * 8) + RATIO * 4 * 8
"""Of shared memory, for `Tables`."""

END, SAVE, ENTRY = range(3)
"""Kinds of units. END is not one: it says that none follows."""


class Tables(NamedTuple):
    """Shared memory: units, TABLES of them, and the tokens of a chunk that close entries.

    source, target, bias   [TABLES * RATIO]
    head                   [TABLES * 4]: kind, slot of the entry, position of its first row
    closers                [RATIO * 4]: token, position, slot of the entry, request
    """

    source: Any
    target: Any
    bias: Any
    head: Any
    closers: Any


def allocate_tables(smem: Any) -> Tables:
    def array(element: Any, length: int) -> Any:
        return smem.allocate_tensor(element, cute.make_layout(length), byte_alignment=16)

    rows = TABLES * RATIO
    return Tables(
        array(Int64, rows), array(Int64, rows), array(Int32, rows), array(Int64, 4 * TABLES), array(Int64, 4 * RATIO)
    )


class Handover:
    """Tables are written by one warp, and read by the movers; their heads are read by the finisher too. It has barriers
    of its own, or the movers could not begin a unit before it has ended with the last one.

    listed, headed, taken   the first of TABLES named barriers each: a table is written, its head is, both were read
    movers                  threads
    fused                   whether rows are saved
    """

    def __init__(self, listed: int, headed: int, taken: int, movers: int, fused: bool) -> None:
        self.listed = listed
        self.headed = headed
        self.taken = taken
        self.table_threads = movers + 32
        self.head_threads = 64
        self.taken_threads = movers + 64
        self.fused = fused

    def write(self, tables: Tables, unit: Any, sources: Any, targets: Any, biases: Any) -> None:
        for j in range(PER_LANE):
            index = (unit % TABLES) * RATIO + 32 * j + cute.arch.lane_idx()
            tables.source[index] = sources[j]
            if self.fused:
                tables.target[index] = targets[j]
                tables.bias[index] = biases[j]

    @cute.jit
    def acquire(self, unit: Int32) -> None:
        """Wait until the table of `unit` may be written."""
        if unit >= TABLES:
            cute.arch.barrier(barrier_id=self.taken + unit % TABLES, number_of_threads=self.taken_threads)

    @cute.jit
    def publish(self, tables: Tables, unit: Int32, kind: Int32, entry_slot: Int64, position: Int64) -> None:
        """Hand out the table of `unit`."""
        stage = unit % TABLES
        if cute.arch.lane_idx() == 0:
            tables.head[stage * 4] = Int64(kind)
            tables.head[stage * 4 + 1] = entry_slot
            tables.head[stage * 4 + 2] = position
        cute.arch.barrier_arrive(barrier_id=self.listed + stage, number_of_threads=self.table_threads)
        cute.arch.barrier_arrive(barrier_id=self.headed + stage, number_of_threads=self.head_threads)

    @cute.jit
    def await_table(self, tables: Tables, unit: Int32) -> Int32:
        """For movers: the kind of `unit`, once its table is written."""
        stage = unit % TABLES
        cute.arch.barrier(barrier_id=self.listed + stage, number_of_threads=self.table_threads)
        return Int32(tables.head[stage * 4])

    @cute.jit
    def await_head(self, tables: Tables, unit: Int32) -> Int32:
        """For the finisher: the kind of `unit`, once its head is written."""
        stage = unit % TABLES
        cute.arch.barrier(barrier_id=self.headed + stage, number_of_threads=self.head_threads)
        return Int32(tables.head[stage * 4])

    @cute.jit
    def release(self, unit: Int32) -> None:
        """Table and head of `unit` have been read."""
        cute.arch.barrier_arrive(barrier_id=self.taken + unit % TABLES, number_of_threads=self.taken_threads)
