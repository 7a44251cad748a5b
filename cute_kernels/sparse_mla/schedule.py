# SPDX-License-Identifier: Apache-2.0
"""How calls are cut into work: tiles of keys, parts of a row, blocks of heads. Plain numbers, no tensors.

A tile is TILE columns of one list; the first list's tiles come first, and no tile has columns of both. Columns at and
beyond a row's length are no work: a row has as many tiles as its lengths say, at most as many as its lists are wide.
A work item is one part of one row, for one block of heads.
"""

from __future__ import annotations

from functools import lru_cache

from cute_kernels.formats import HEAD_DIM

TILE = 64
"""Keys that a kernel takes at a time."""

BLOCK_HEADS = (8, 16, 32, 64)
"""Heads of a work item, by kernel; more heads than the last make several blocks."""

MOST_PARTS = 32
"""Parts of a row that choose_parts considers."""

MOST_ROUNDS = 2
"""Rounds of work items that choose_parts splits rows into. It bounds the workspace whatever the batch."""

TILE_US, MERGE_US, BYTES_PER_US = 1.3, 3.0, 5e6
"""What choose_parts reckons with on an H200: microseconds of a tile of a work item, of a merge as a dependent launch
with what its launch and the wait for all parts cost a layer, and the rate at which partial results go to L2 and come
back (perf/log/data/merge_2.txt, perf/log/layer.md)."""

FEW_PARTS, MANY_PARTS_US = 8, 3.0
"""More parts than that take so much longer to merge: of one row with ten tiles, ten parts take a layer 2.8 us longer
than five to eight do."""

PART_BYTES = HEAD_DIM * 4 + 4
"""Workspace of one part of one head of a row: an fp32 result and its log-sum-exp."""


def block_heads(heads: int) -> int:
    """Heads of a block for so many heads in all."""
    return next((count for count in BLOCK_HEADS if heads <= count), BLOCK_HEADS[-1])


def head_blocks(heads: int) -> int:
    """Blocks of heads; the last one may be masked in part."""
    return -(-heads // BLOCK_HEADS[-1])


def num_tiles(columns: int) -> int:
    """Tiles of a list of so many columns."""
    return -(-columns // TILE)


def part_range(tiles: int, part: int, parts: int, part_tiles: int = 0) -> tuple[int, int]:
    """Tiles [first, end) of part `part` of a row of `tiles` tiles: what the kernels compute.

    part_tiles   0: the parts are as equal as they can be; else tiles in a part, and parts behind the row's are empty
    """
    if part_tiles:
        return min(part * part_tiles, tiles), min((part + 1) * part_tiles, tiles)
    return tiles * part // parts, tiles * (part + 1) // parts


def part_limit(rows: int, blocks: int, max_tiles: int, at_once: int) -> int:
    """The most parts that choose_parts may choose, at least 1."""
    return max(1, min(max_tiles, MOST_PARTS, MOST_ROUNDS * at_once // max(rows * blocks, 1)))


@lru_cache(maxsize=4096)
def choose_parts(
    rows: int, blocks: int, max_tiles: int, at_once: int, heads: int = BLOCK_HEADS[-1], most: int = MOST_PARTS
) -> int:
    """Parts to cut each row into, at most `most`, from the shapes of a call alone.

    rows        query rows
    blocks      blocks of heads
    max_tiles   tiles of the longest row that the lists' widths allow
    at_once     work items that run at a time
    heads       in a block

    The cheapest number of parts, the smallest of several, where the cost of p parts is

        ceil(rows * blocks * p / at_once) * ceil(max_tiles / p) * TILE_US
        + (p > 1) * (MERGE_US + bytes of the partial results, once written and once read, / BYTES_PER_US)
        + (p > FEW_PARTS) * MANY_PARTS_US

    What a launch takes whatever its work, 8 us or so, is the same for all of them.
    """

    def cost(parts: int) -> float:
        items = rows * blocks * parts
        time = -(-items // at_once) * -(-max_tiles // parts) * TILE_US
        if parts > 1:
            time += MERGE_US + 2 * items * heads * HEAD_DIM * 4 / BYTES_PER_US
        if parts > FEW_PARTS:
            time += MANY_PARTS_US
        return time

    limit = min(most, part_limit(rows, blocks, max_tiles, at_once))
    return min(range(1, max(limit, 1) + 1), key=cost)


def fixed_parts(max_tiles: int, num_splits: int, split_tokens: int) -> tuple[int, int]:
    """(parts, tiles in a part or 0) of a call that asks for parts by number or by size, one of the two not 0."""
    if split_tokens:
        part_tiles = num_tiles(split_tokens)
        return max(1, -(-max_tiles // part_tiles)), part_tiles
    return max(1, min(num_splits, max_tiles)), 0


def goes_through_workspace(parts: int, part_tiles: int) -> bool:
    """Whether results are merged from the workspace, and not written where the caller wants them.

    Parts of a fixed size always are, even if there is only one: with wider lists, and so with empty parts behind it, a
    row must have the same bits.

    part_tiles   or the tokens in a part: 0 if their number is not fixed
    """
    return parts > 1 or part_tiles > 0


def workspace_bytes(rows: int, heads: int, max_tiles: int, num_splits: int, split_tokens: int, sms: int) -> int:
    """Bytes of workspace for any call with at most so many rows and tiles, whatever choose_parts makes of it.

    sms   multiprocessors, at most as many work items run at a time; 0: choose_parts is not asked
    """
    if num_splits or split_tokens:
        parts, _ = fixed_parts(max_tiles, num_splits, split_tokens)
        rows_and_parts = rows * parts if goes_through_workspace(parts, split_tokens) else 0
    elif max_tiles > 1:
        rows_and_parts = min(MOST_ROUNDS * sms // head_blocks(heads), rows * min(max_tiles, MOST_PARTS))
    else:
        rows_and_parts = 0
    return rows_and_parts * heads * PART_BYTES


# ---- rows of sparse_mla_prefill_paged, whose parts a cluster merges

CLUSTERS = (2, 4, 8)
"""Blocks of a cluster, by kernel."""

PAIRS = 2
SHARE = 7, 8
"""Of a GPU's multiprocessors all can have blocks of pairs at a time. Larger clusters stay in a group of some 16
multiprocessors, so that of 132 an H200 had 120 with clusters of 4 or 8: this share is what they are trusted with."""

CLUSTER_TILE_US, CLUSTER_MERGE_US = 2.2, {1: 0.0, 2: 0.0, 4: 0.0, 8: 2.3}
"""What choose_cluster_parts reckons with on an H200: microseconds of a tile, and what so many parts take besides, which
begin sooner than whole rows and are merged in the end (perf/log/prefill_paged_cluster.md)."""


def cluster_of(parts: int) -> int:
    """Blocks of the cluster that merges so many parts."""
    return next(blocks for blocks in CLUSTERS if parts <= blocks)


@lru_cache(maxsize=4096)
def choose_cluster_parts(rows: int, heads: int, tiles: int, sms: int) -> int:
    """Parts to cut each row into, from the shapes of a call alone: 1, or as many as a cluster has blocks.

    rows    query rows
    tiles   of the longest row that the widths of lists and tables allow
    sms     multiprocessors

    Rows are cut only if all clusters run at a time. The cheapest number of parts, the smallest of several, where p
    parts cost ceil(tiles / p) * CLUSTER_TILE_US + CLUSTER_MERGE_US[p].
    """
    items = rows * head_blocks(heads)

    def cost(parts: int) -> float:
        return -(-tiles // parts) * CLUSTER_TILE_US + CLUSTER_MERGE_US[parts]

    def room(parts: int) -> int:
        return sms if parts == PAIRS else sms * SHARE[0] // SHARE[1]

    fitting = [parts for parts in CLUSTERS if items * parts <= room(parts)]
    return min((1, *fitting), key=cost)
