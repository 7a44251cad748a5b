"""Where a score kernel leaves the scores of a row that may be among its best, and the picks' kernel finds them.

The tiles of all rows, one row after the other, are one list, of which every block takes an equal share (logits_plan).
What a block takes of a row is a segment; of its scores it keeps a superset of the k best as a list of (score, key). The
memory that both kernels share:

    lists    of every segment, LENGTH entries; that of block b and row r has number b + r, which no other has: from
             segment to segment either the block or the row changes, or both
    counts   of entries of each list; an order (ptx.descending_order) that at least k of the row's scores reach
    firsts   of each row, the first block with a segment of it
    lasts    and the last one
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int64

from cute_kernels.indexer.chunks import COUNT, ENTRY, LENGTH


class Lists(NamedTuple):
    """Addresses of the four parts."""

    lists: Any
    counts: Any
    firsts: Any
    lasts: Any

    @classmethod
    def at(cls, memory: Any, rows: Any, blocks: Any) -> Lists:
        """In memory from an address on."""
        number = Int64(rows + blocks - 1)
        counts = memory + number * (LENGTH * ENTRY)
        firsts = counts + number * COUNT
        return cls(memory, counts, firsts, firsts + Int64(rows) * 4)

    def list_of(self, number: Any) -> Any:
        return self.lists + Int64(number) * (LENGTH * ENTRY)

    def count_of(self, number: Any) -> Any:
        return self.counts + Int64(number) * COUNT
