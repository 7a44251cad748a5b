"""How rows of sparse_mla_prefill_paged are cut into parts. Plain numbers, no tensors.

A row's keys are numbered, those of compressed entries first, and a tile is TILE of them: schedule.part_range says which
tiles are a part. A kernel that cuts rows merges the parts in a cluster of as many blocks, or more.
"""

from __future__ import annotations

from functools import lru_cache

from cute_kernels.sparse_mla import schedule

CLUSTERS = (2, 4, 8)
"""Blocks of a cluster, by kernel."""

MOST_PARTS = CLUSTERS[-1]

GROUP = 16
"""Multiprocessors come in groups of 16 or a few more, and a cluster runs in one of them."""

TILE_US, MERGE_US = 2.2, 2.0
"""What choose_parts reckons with on an H200: microseconds of a tile, and of a merge (perf/notes/prefill.md)."""


def cluster_of(parts: int) -> int:
    """Blocks of the cluster that merges so many parts."""
    return next(blocks for blocks in CLUSTERS if parts <= blocks)


@lru_cache(maxsize=4096)
def choose_parts(rows: int, heads: int, tiles: int, sms: int) -> int:
    """Parts to cut each row into, from the shapes of a call alone: 1, or as many as a cluster has blocks.

    rows    query rows
    tiles   of the longest row that the widths of lists and tables allow
    sms     multiprocessors

    Rows are cut only if all clusters run at a time, and where that takes less time, the one with the fewest parts of
    several: ceil(tiles / parts) * TILE_US + (parts > 1) * MERGE_US.
    """
    items = rows * schedule.head_blocks(heads)

    def cost(parts: int) -> float:
        return -(-tiles // parts) * TILE_US + (parts > 1) * MERGE_US

    fitting = [parts for parts in CLUSTERS if items * parts <= sms // GROUP * GROUP]
    return min((1, *fitting), key=cost)
