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

PAIRS = 2
SHARE = 7, 8
"""Of a GPU's multiprocessors all can have blocks of pairs at a time. Larger clusters stay in a group of some 16
multiprocessors, so that of 132 an H200 had 120 with clusters of 4 or 8: this share is what they are trusted with."""

TILE_US, MERGE_US = 2.2, {1: 0.0, 2: 0.0, 4: 0.0, 8: 2.3}
"""What choose_parts reckons with on an H200: microseconds of a tile, and what so many parts take besides, which begin
sooner than whole rows and are merged in the end (perf/notes/prefill.md)."""


def cluster_of(parts: int) -> int:
    """Blocks of the cluster that merges so many parts."""
    return next(blocks for blocks in CLUSTERS if parts <= blocks)


@lru_cache(maxsize=4096)
def choose_parts(rows: int, heads: int, tiles: int, sms: int) -> int:
    """Parts to cut each row into, from the shapes of a call alone: 1, or as many as a cluster has blocks.

    rows    query rows
    tiles   of the longest row that the widths of lists and tables allow
    sms     multiprocessors

    Rows are cut only if all clusters run at a time. The cheapest number of parts, the smallest of several, where p
    parts cost ceil(tiles / p) * TILE_US + MERGE_US[p].
    """
    items = rows * schedule.head_blocks(heads)

    def cost(parts: int) -> float:
        return -(-tiles // parts) * TILE_US + MERGE_US[parts]

    def room(parts: int) -> int:
        return sms if parts == PAIRS else sms * SHARE[0] // SHARE[1]

    fitting = [parts for parts in CLUSTERS if items * parts <= room(parts)]
    return min((1, *fitting), key=cost)
