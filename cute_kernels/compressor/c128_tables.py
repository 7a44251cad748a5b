"""Units of work in shared memory, from the warps that list them (c128_units.py) to those that work on them.

A unit is a table of 128 rows. Each has an address it is read from, one it is saved to, and the row of the bias to add
on the way; an address of 0 means that nothing is read, or saved. There are two kinds:

    ENTRY    the window of an entry, its 128 rows in order
    SAVE     rows that are saved and belong to no entry
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.formats import HEAD_DIM

RATIO = 128
"""Rows of a window, and of a table."""

ROW_BYTES = 2 * HEAD_DIM * 4
TABLES = 3
"""That are in use at a time: of the unit worked on, of the next, and of the one that is listed."""

LISTERS = RATIO // 32
"""Warps that list: a thread per row."""

TABLE_BYTES = TABLES * (RATIO * (8 + 8 + 4) + 4 * 8) + RATIO * 4 * 8 + LISTERS * 4
"""Of shared memory, for `Tables`."""

END, SAVE, ENTRY = range(3)
"""Kinds of units. END is not one: it says that none follows."""


class Tables(NamedTuple):
    """Shared memory: units, TABLES of them, and the tokens of a chunk that close entries.

    source, target, bias   [TABLES * RATIO]
    head                   [TABLES * 4]: kind, slot of the entry, position of its first row
    closers                [RATIO * 4]: token, position, slot of the entry, request; 32 places for each listing warp
    closing                [LISTERS]: how many of a warp's places are taken
    """

    source: Any
    target: Any
    bias: Any
    head: Any
    closers: Any
    closing: Any


def allocate_tables(smem: Any) -> Tables:
    def array(element: Any, length: int) -> Any:
        return smem.allocate_tensor(element, cute.make_layout(length), byte_alignment=16)

    rows = TABLES * RATIO
    return Tables(
        array(Int64, rows),
        array(Int64, rows),
        array(Int32, rows),
        array(Int64, 4 * TABLES),
        array(Int64, 4 * RATIO),
        array(Int32, LISTERS),
    )


class Handover:
    """Tables are written by the listers, a thread per row, and read by the movers; their heads are read by the finisher
    too. It has barriers of its own, or the movers could not begin a unit before it has ended with the last one. Of the
    listers one warp waits for the others and hands over, once all listers have met.

    listed, headed, taken   the first of TABLES named barriers each: a table is written, its head is, both were read
    meeting                 named barrier of the listers
    movers                  threads, and their number is the first lister's too
    fused                   whether rows are saved
    """

    def __init__(self, listed: int, headed: int, taken: int, meeting: int, movers: int, fused: bool) -> None:
        self.listed = listed
        self.headed = headed
        self.taken = taken
        self.meeting = meeting
        self.movers = movers
        self.table_threads = movers + 32
        self.head_threads = 64
        self.taken_threads = movers + 64
        self.fused = fused

    def row(self) -> Any:
        """The lister's thread's, of each table."""
        thread, _, _ = cute.arch.thread_idx()
        return thread - self.movers

    def meet(self) -> None:
        """All listers wait for each other."""
        cute.arch.barrier(barrier_id=self.meeting, number_of_threads=RATIO)

    def any_row(self, condition: Any) -> Boolean:
        """Whether the condition holds for one of the listers; it waits for all."""
        return ptx.any_of_group(self.meeting, RATIO, condition) != 0

    def write(self, tables: Tables, unit: Any, source: Any, target: Any, bias: Any) -> None:
        """A lister's row of the table of `unit`."""
        index = unit % TABLES * RATIO + self.row()
        tables.source[index] = source
        if self.fused:
            tables.target[index] = target
            tables.bias[index] = bias

    @cute.jit
    def acquire(self, unit: Int32) -> None:
        """Wait until the table of `unit` may be written."""
        if unit >= TABLES:
            if self.row() < 32:
                cute.arch.barrier(barrier_id=self.taken + unit % TABLES, number_of_threads=self.taken_threads)
            self.meet()

    @cute.jit
    def publish(self, tables: Tables, unit: Int32, kind: Int32, entry_slot: Int64, position: Int64) -> None:
        """Hand out the table of `unit`."""
        stage = unit % TABLES
        self.meet()
        if self.row() < 32:
            if self.row() == 0:
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
