# SPDX-License-Identifier: Apache-2.0
"""How calls are cut into work: tiles of keys, splits of a row, head groups. Plain numbers, no tensors.

A tile is TILE columns of one list; the first list's tiles come first, and no tile has columns of both. Columns at and
beyond a row's length are no work: a row has as many tiles as its lengths say, at most as many as its lists are wide.
A work tile is one split of one row, for one head group.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from cute_kernels.formats import HEAD_DIM

TILE = 64
"""Keys that a kernel takes at a time."""

GROUP_HEADS = (8, 16, 32, 64)
"""Heads of a work tile, by kernel; more heads than the last make several groups."""

MOST_SPLITS = 32
"""Splits of a row that choose_splits considers."""

MOST_ROUNDS = 2
"""Rounds of work tiles that choose_splits splits rows into. It bounds the workspace whatever the batch."""

TILE_US, COMBINE_US, BYTES_PER_US = 1.3, 3.0, 5e6
"""What choose_splits reckons with on an H200: microseconds of a KV tile, of the combination as a dependent launch with
what its launch and the wait for all splits cost a layer, and the rate at which partial results go to L2 and come back
(perf/log/data/merge_2.txt, perf/log/layer.md)."""

FEW_SPLITS, MANY_SPLITS_US = 8, 3.0
"""More splits than that take so much longer to combine: of one row with ten tiles, ten splits take a layer 2.8 us
longer than five to eight do."""

SPLIT_BYTES = HEAD_DIM * 4 + 4
"""Workspace of one split of one head of a row: an fp32 result and its log-sum-exp."""

# ---- rows of unequal length: which work tiles a cluster of Hopper's decode takes, see hopper/planner.py

MOST_PLANNED = 384
"""Work tiles of a call that are dealt: half as many as hopper/planner.py has threads, two of which rank each."""

MOST_DEALT = 15
"""Work tiles of a cluster that are dealt."""

LEAST_TILES = 64
"""Of a cluster, if rows are as long as lists: with fewer, dealing is not worth it. On an H100 192 rows of 26 tiles, 78
a cluster, take 116.2 us where 115.4 before, and 75.3 where 100.6 if their lengths are spread evenly; 256 equal rows of
10 tiles, 40 a cluster, took 71.0 where 67.9 with a planner that did not yet stop where all are as long."""


def is_dealt(work_tiles: int, clusters: int, max_tiles: int, splits: int, split_tiles: int) -> bool:
    """Whether clusters have several work tiles, as many as can be dealt and with enough keys, by shapes alone."""
    rounds = -(-work_tiles // clusters)
    tiles = min(split_tiles, max_tiles) if split_tiles else -(-max_tiles // splits)
    return work_tiles <= MOST_PLANNED and 1 < rounds <= MOST_DEALT and rounds * tiles >= LEAST_TILES


# ---- clusters of Hopper's decode, which take the work tiles of rows in several splits in turns

WORK_TILE_TILES = 1.5
"""What a work tile takes besides its KV tiles, in those: 3500 cycles, where a KV tile takes 2250."""

MOST_IDLE = 8
"""Fewer clusters than that may be left without work, so that the others have splits of all lengths."""


@lru_cache(maxsize=4096)
def choose_clusters(rows: int, head_groups: int, max_tiles: int, splits: int, split_tiles: int, at_once: int) -> int:
    """Clusters that a call's work tiles go to, at most `at_once`, by shapes alone: which of them does a split does not
    change what is summed.

    Splits of a row are next to each other, and cluster c takes work tiles c, c + clusters ... Where the clusters are a
    multiple of the splits, as 66 are of 3, it always has the same split of a row, and one that has those of 4 tiles
    works twice as long as one that has those of 2. With 65 all have splits of all lengths. The largest number whose
    busiest cluster has the least to do.
    """
    work_tiles = rows * head_groups * splits
    spans = (split_range(max_tiles, split, splits, split_tiles) for split in range(splits))
    costs = [WORK_TILE_TILES + max(end - first, 1) for first, end in spans]
    if work_tiles <= at_once or splits > MOST_SPLITS or len(set(costs)) == 1:
        return at_once
    period = splits * head_groups

    def busiest(clusters: int) -> float:
        cycle = period // gcd(clusters, period)
        work = []
        for first in range(clusters):
            taken = [costs[(first + clusters * turn) // head_groups % splits] for turn in range(cycle)]
            cycles, rest = divmod(-(-(work_tiles - first) // clusters), cycle)
            work.append(cycles * sum(taken) + sum(taken[:rest]))
        return max(work)

    return min(range(at_once, max(at_once - MOST_IDLE, 0), -1), key=busiest)


# ---- long rows in halves, see hopper/decode_halves.py

LEAST_HALVED = 12
"""Tiles of a row that is cut in halves, or more. On an H200 34 to 64 rows that all have 12 tiles take 3 to 4% longer;
if one alone has them, 21 to 25% less: of 48 rows 16.0 us back to back, where 21.2 whole and 21.8 by FlashMLA. Of 18
tiles it is 2 to 5% longer, and 28 to 31% less."""

MOST_RANKED = 64
"""Work tiles of a call whose rows are cut in halves, at most: a warp ranks them, two a lane. The more there are the
fewer clusters can help: from 60 on, with 132 multiprocessors, lengths that are spread evenly lose up to 5%, while one
long row gains as ever."""

KEPT_BYTES = GROUP_HEADS[-1] * HEAD_DIM * 2 + GROUP_HEADS[-1] * 8 + 128
"""Workspace of a work tile whose row is cut in halves: of the first half bf16 O, as threads hold it, a maximum and a
sum of each head, and a mark of each CTA."""


def may_halve(work_tiles: int, clusters: int, max_tiles: int) -> bool:
    """Whether long rows can be cut in halves, by shapes alone: there are clusters without a row."""
    return 0 < work_tiles <= min(clusters - 1, MOST_RANKED) and max_tiles >= LEAST_HALVED


def heads_of_group(heads: int) -> int:
    """Heads of a head group for so many heads in all."""
    return next((count for count in GROUP_HEADS if heads <= count), GROUP_HEADS[-1])


def head_groups(heads: int) -> int:
    """Head groups; some heads of the last one may be masked."""
    return -(-heads // GROUP_HEADS[-1])


def num_tiles(columns: int) -> int:
    """Tiles of a list of so many columns."""
    return -(-columns // TILE)


def split_range(tiles: int, split: int, splits: int, split_tiles: int = 0) -> tuple[int, int]:
    """Tiles [first, end) of a split of a row of `tiles` tiles: what the kernels compute.

    split_tiles   0: the splits are as equal as can be; else tiles of a split, and splits behind the row's are empty
    """
    if split_tiles:
        return min(split * split_tiles, tiles), min((split + 1) * split_tiles, tiles)
    return tiles * split // splits, tiles * (split + 1) // splits


def split_limit(rows: int, head_groups: int, max_tiles: int, at_once: int) -> int:
    """The most splits that choose_splits may choose, at least 1."""
    return max(1, min(max_tiles, MOST_SPLITS, MOST_ROUNDS * at_once // max(rows * head_groups, 1)))


@lru_cache(maxsize=4096)
def choose_splits(
    rows: int, head_groups: int, max_tiles: int, at_once: int, heads: int = GROUP_HEADS[-1], most: int = MOST_SPLITS
) -> int:
    """Splits to cut each row into, at most `most`, from the shapes of a call alone.

    rows        query rows
    head_groups of the query rows
    max_tiles   tiles of the longest row that the lists' widths allow
    at_once     work tiles that run at a time
    heads       of a group

    The cheapest number of splits, the smallest of several, where the cost of p splits is

        ceil(rows * head_groups * p / at_once) * ceil(max_tiles / p) * TILE_US
        + (p > 1) * (COMBINE_US + bytes of the partial results, once written and once read, / BYTES_PER_US)
        + (p > FEW_SPLITS) * MANY_SPLITS_US

    What a launch takes whatever its work, 8 us or so, is the same for all of them.
    """

    def cost(splits: int) -> float:
        work_tiles = rows * head_groups * splits
        time = -(-work_tiles // at_once) * -(-max_tiles // splits) * TILE_US
        if splits > 1:
            time += COMBINE_US + 2 * work_tiles * heads * HEAD_DIM * 4 / BYTES_PER_US
        if splits > FEW_SPLITS:
            time += MANY_SPLITS_US
        return time

    limit = min(most, split_limit(rows, head_groups, max_tiles, at_once))
    return min(range(1, max(limit, 1) + 1), key=cost)


def kept_bytes(rows: int, heads: int, max_tiles: int, sms: int) -> int:
    """Bytes of workspace for the long rows of a call of this shape that are cut in halves."""
    work_tiles = rows * head_groups(heads)
    return work_tiles * KEPT_BYTES if may_halve(work_tiles, sms // 2, max_tiles) else 0


def fixed_splits(max_tiles: int, num_splits: int, split_tokens: int) -> tuple[int, int]:
    """(splits, tiles in a split or 0) of a call that asks for splits by number or by size, one of the two not 0."""
    if split_tokens:
        split_tiles = num_tiles(split_tokens)
        return max(1, -(-max_tiles // split_tiles)), split_tiles
    return max(1, min(num_splits, max_tiles)), 0


def goes_through_workspace(splits: int, split_tiles: int) -> bool:
    """Whether results are combined from the workspace, and not written where the caller wants them.

    Splits of a fixed size always are, even if there is only one: with wider lists, and so with empty splits behind it,
    a row must have the same bits.

    split_tiles   or the tokens in a split: 0 if their number is not fixed
    """
    return splits > 1 or split_tiles > 0


def workspace_bytes(rows: int, heads: int, max_tiles: int, num_splits: int, split_tokens: int, sms: int) -> int:
    """Bytes of workspace for any call with at most so many rows and tiles, whatever choose_splits makes of it.

    sms   multiprocessors, at most as many work tiles run at a time; 0: choose_splits is not asked
    """
    if num_splits or split_tokens:
        splits, _ = fixed_splits(max_tiles, num_splits, split_tokens)
        rows_and_splits = rows * splits if goes_through_workspace(splits, split_tokens) else 0
    elif max_tiles > 1:
        rows_and_splits = min(MOST_ROUNDS * sms // head_groups(heads), rows * min(max_tiles, MOST_SPLITS))
    else:
        rows_and_splits = 0
    return rows_and_splits * heads * SPLIT_BYTES


@lru_cache(maxsize=4096)
def split_bytes(rows: int, heads: int, max_tiles: int, sms: int) -> int:
    """Bytes of workspace for the splits that choose_splits makes of a call of this shape, whichever kernel runs it.

    sms   multiprocessors. A kernel runs half of that to twice as many work tiles at a time
    """
    shape = rows, head_groups(heads), max_tiles
    splits = max(choose_splits(*shape, at_once, heads_of_group(heads)) for at_once in (sms // 2, sms, 2 * sms))
    return rows * splits * heads * SPLIT_BYTES if splits > 1 else 0


# ---- rows of sparse_mla_prefill_paged, whose splits a cluster combines

CLUSTERS = (2, 4, 8)
"""CTAs of a cluster, by kernel."""

PAIRS = 2
SHARE = 7, 8
"""Of a GPU's multiprocessors all can have CTAs of pairs at a time. Larger clusters stay in a group of some 16
multiprocessors, so that of 132 an H200 had 120 with clusters of 4 or 8: this share is what they are trusted with."""

CLUSTER_TILE_US, CLUSTER_COMBINE_US = 2.2, {1: 0.0, 2: 0.0, 4: 0.0, 8: 2.3}
"""What choose_cluster_splits reckons with on an H200: microseconds of a tile, and what so many splits take besides,
which begin sooner than whole rows and are combined in the end (perf/log/prefill_paged_cluster.md)."""


def cluster_of(splits: int) -> int:
    """CTAs of the cluster that combines so many splits."""
    return next(ctas for ctas in CLUSTERS if splits <= ctas)


@lru_cache(maxsize=4096)
def choose_cluster_splits(rows: int, heads: int, tiles: int, sms: int) -> int:
    """Splits to cut each row into, from the shapes of a call alone: 1, or as many as a cluster has CTAs.

    rows    query rows
    tiles   of the longest row that the widths of lists and tables allow
    sms     multiprocessors

    Rows are cut only if all clusters run at a time. The cheapest number of splits, the smallest of several, where p
    splits cost ceil(tiles / p) * CLUSTER_TILE_US + CLUSTER_COMBINE_US[p].
    """
    work_tiles = rows * head_groups(heads)

    def cost(splits: int) -> float:
        return -(-tiles // splits) * CLUSTER_TILE_US + CLUSTER_COMBINE_US[splits]

    def at_once(splits: int) -> int:
        return sms if splits == PAIRS else sms * SHARE[0] // SHARE[1]

    fitting = [splits for splits in CLUSTERS if work_tiles * splits <= at_once(splits)]
    return min((1, *fitting), key=cost)
