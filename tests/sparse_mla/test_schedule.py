# SPDX-License-Identifier: Apache-2.0
"""How decode rows are cut into parts: every tile is in one part, and a workspace holds whatever is chosen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels.sparse_mla import schedule
from cute_kernels.sparse_mla.ops import sparse_mla_decode_workspace_size

SMS = 132


@given(st.integers(0, 300), st.integers(1, 40))
def test_balanced_parts_cover_a_row_once(tiles, parts):
    ranges = [schedule.split_range(tiles, p, parts) for p in range(parts)]
    assert [t for first, end in ranges for t in range(first, end)] == list(range(tiles))
    sizes = [end - first for first, end in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 9))
def test_parts_of_a_fixed_size_cover_a_row_once(max_tiles, tiles, size):
    tiles = min(tiles, max_tiles)
    parts, part_tiles = schedule.fixed_splits(max_tiles, 0, size * schedule.TILE)
    assert part_tiles == size
    ranges = [schedule.split_range(tiles, p, parts, part_tiles) for p in range(parts)]
    assert [t for first, end in ranges for t in range(first, end)] == list(range(tiles))
    # where a part begins and ends does not depend on the lists' widths
    more, _ = schedule.fixed_splits(max_tiles + 77, 0, size * schedule.TILE)
    longer = [schedule.split_range(tiles, p, more, part_tiles) for p in range(more)]
    assert longer[:parts] == ranges
    assert all(first == end for first, end in longer[parts:])


def test_parts_by_number():
    assert [schedule.fixed_splits(10, n, 0) for n in (1, 3, 10, 11, 500)] == [(1, 0), (3, 0), (10, 0), (10, 0), (10, 0)]
    assert schedule.fixed_splits(0, 7, 0) == (1, 0)
    assert schedule.fixed_splits(0, 0, 64) == (1, 1)


@pytest.mark.parametrize(
    ("heads", "tile", "blocks"),
    [(1, 8, 1), (8, 8, 1), (9, 16, 1), (16, 16, 1), (17, 32, 1), (33, 64, 1), (64, 64, 1), (65, 64, 2), (128, 64, 2)],
)
def test_blocks_of_heads(heads, tile, blocks):
    assert (schedule.heads_of_group(heads), schedule.head_groups(heads)) == (tile, blocks)


@given(st.integers(0, 400), st.integers(1, 2), st.integers(0, 200), st.integers(1, 40))
def test_chosen_parts_are_within_their_limits(rows, blocks, tiles, most):
    parts = schedule.choose_splits(rows, blocks, tiles, SMS, 64, most)
    assert 1 <= parts <= max(1, min(most, tiles, schedule.MOST_SPLITS))
    assert parts <= schedule.split_limit(rows, blocks, tiles, SMS)
    assert parts == 1 or rows * blocks * parts <= schedule.MOST_ROUNDS * SMS


def test_what_is_chosen():
    """A row on its own is split as far as a merge takes little time, a batch that fills the GPU not at all."""
    assert schedule.choose_splits(1, 1, 10, SMS) == 5
    assert schedule.choose_splits(1, 1, 3, SMS) == 1  # two tiles take less than a merge
    assert schedule.choose_splits(SMS, 1, 10, SMS) == 1
    assert schedule.choose_splits(SMS // 2, 2, 18, SMS) == 1
    assert 1 < schedule.choose_splits(8, 1, 10, SMS) <= 10
    assert schedule.choose_splits(4, 1, 1000, SMS) == schedule.MOST_SPLITS
    # a longer list is worth more parts, a larger batch fewer
    by_tiles = [schedule.choose_splits(8, 1, tiles, SMS) for tiles in (2, 10, 18, 130)]
    assert by_tiles == sorted(by_tiles)
    by_rows = [schedule.choose_splits(rows, 1, 18, SMS) for rows in (1, 4, 16, 64, 132)]
    assert by_rows == sorted(by_rows, reverse=True)


@given(
    st.integers(0, 300), st.integers(0, 300), st.integers(1, 128), st.integers(0, 150), st.integers(0, 150),
    st.integers(0, 12), st.integers(0, 6), st.integers(1, 40),
)  # fmt: skip
def test_a_workspace_holds_what_smaller_calls_choose(rows, more, heads, tiles, more_tiles, number, size, most):
    split_tokens = 0 if number else size * schedule.TILE
    room = schedule.workspace_bytes(rows + more, heads, tiles + more_tiles, number, split_tokens, SMS)
    if number or split_tokens:
        parts, _ = schedule.fixed_splits(tiles, number, split_tokens)
    else:
        blocks = schedule.head_groups(heads)
        parts = schedule.choose_splits(rows, blocks, tiles, SMS, schedule.heads_of_group(heads), most)
    assert not schedule.goes_through_workspace(parts, split_tokens) or parts * rows * heads * (512 * 4 + 4) <= room


@given(
    rows=st.integers(1, 300), heads=st.integers(1, 128), tiles=st.integers(1, 200), times=st.sampled_from((0.5, 1, 2))
)
def test_an_allocated_workspace_changes_no_choice(rows, heads, tiles, times):
    size, at_once = schedule.split_bytes(rows, heads, tiles, SMS), int(SMS * times)
    shape = rows, schedule.head_groups(heads), tiles, at_once, schedule.heads_of_group(heads)
    assert schedule.choose_splits(*shape, size // (rows * heads * schedule.SPLIT_BYTES)) == schedule.choose_splits(
        *shape
    )
    assert size <= rows * heads * schedule.SPLIT_BYTES * schedule.split_limit(*shape[:3], 2 * SMS)


def test_workspace_size():
    size = sparse_mla_decode_workspace_size
    part = 512 * 4 + 4
    assert size(3, 2, 8, 128, num_splits=2) == 2 * 6 * 8 * part
    assert size(3, 2, 8, 128, num_splits=9) == 2 * 6 * 8 * part
    assert size(3, 2, 8, 128, 513, num_splits=9) == 9 * 6 * 8 * part
    assert size(3, 1, 64, 128, 512, split_tokens=128) == 5 * 3 * 64 * part
    # one part of a fixed size is merged like several
    assert size(3, 1, 64, 128, 512, split_tokens=640) == 3 * 64 * part
    assert size(3, 1, 64, 128, num_splits=1) == 0
    assert size(3, 1, 64, 128, 512, device="cpu") == size(3, 1, 64, 128, 512, device=torch.device("cpu")) == 0
    # bounded whatever the batch, and the same for calls in which any list has more than a tile for each row
    assert schedule.workspace_bytes(10**6, 64, 10, 0, 0, SMS) == 2 * SMS * 64 * part
    assert schedule.workspace_bytes(10**6, 64, 1, 0, 0, SMS) == 0
    assert schedule.workspace_bytes(1, 64, 10, 0, 0, SMS) == 10 * 64 * part


@pytest.mark.parametrize(
    ("work_tiles", "clusters", "tiles", "splits", "split_tiles", "is_dealt"),
    [
        (192, 66, 22, 1, 0, True),  # three rounds of 22 tiles
        (192, 66, 21, 1, 0, False),  # 63 tiles
        (66, 66, 1000, 1, 0, False),  # one round
        (67, 66, 32, 1, 0, True),
        (384, 66, 11, 1, 0, True),
        (385, 66, 1000, 1, 0, False),  # more than can be compared
        (15, 1, 100, 1, 0, True),
        (16, 1, 100, 1, 0, False),  # more rounds than there is room for
        (192, 66, 43, 2, 0, True),  # half of 43 is 22
        (192, 66, 42, 2, 0, False),
        (192, 66, 100, 5, 22, True),
        (192, 66, 100, 5, 21, False),
        (192, 66, 21, 1, 22, False),  # a row has no more than that
    ],
)
def test_what_is_dealt(work_tiles, clusters, tiles, splits, split_tiles, is_dealt):
    assert schedule.is_dealt(work_tiles, clusters, tiles, splits, split_tiles) == is_dealt


def taken(rows: int, head_groups: int, tiles: int, splits: int, split_tiles: int, clusters: int) -> list[list[int]]:
    """KV tiles of the work tiles of each cluster."""
    spans = [schedule.split_range(tiles, split, splits, split_tiles) for split in range(splits)]
    lengths = [end - first for _ in range(rows) for first, end in spans for _ in range(head_groups)]
    return [lengths[cluster::clusters] for cluster in range(clusters)]


@pytest.mark.parametrize(
    ("rows", "head_groups", "tiles", "splits", "split_tiles", "clusters"),
    [
        (256, 1, 10, 3, 4, 65),  # of 66 every third one would have splits of 4 tiles alone
        (64, 1, 10, 3, 4, 65),
        (32, 1, 10, 3, 4, 66),  # whatever their number one has two of 4 tiles
        (22, 1, 10, 3, 4, 66),  # one round
        (256, 1, 10, 2, 5, 66),  # all splits are as long
        (256, 1, 10, 3, 0, 65),  # 3, 3 and 4 tiles
        (256, 1, 10, 1, 0, 66),
        (128, 2, 18, 5, 4, 66),
        (0, 1, 10, 3, 4, 66),
    ],
)
def test_clusters_have_splits_of_all_lengths(rows, head_groups, tiles, splits, split_tiles, clusters):
    shape = rows, head_groups, tiles, splits, split_tiles
    assert schedule.choose_clusters(*shape, 66) == clusters

    def busiest(count: int) -> float:
        return max(sum(own) + schedule.WORK_TILE_TILES * len(own) for own in taken(*shape, count))

    if rows * head_groups * splits > 66:
        assert min(range(66, 66 - schedule.MOST_IDLE, -1), key=busiest) == clusters


@pytest.mark.parametrize("at_once", [1, 3])
def test_fewer_clusters_than_may_be_idle(at_once):
    assert 1 <= schedule.choose_clusters(7, 1, 10, 3, 4, at_once) <= at_once
