# SPDX-License-Identifier: Apache-2.0
"""How rows of paged prefill are cut into parts."""

from __future__ import annotations

import pytest

from cute_kernels.sparse_mla.schedule import CLUSTERS, choose_cluster_splits, cluster_of

SMS = 132


@pytest.mark.parametrize("sms", [16, 108, 132, 144])
@pytest.mark.parametrize("heads", [1, 64, 65, 128])
def test_all_clusters_run_at_a_time(sms: int, heads: int) -> None:
    for rows in range(1, 200):
        for tiles in (0, 1, 2, 5, 10, 18, 130):
            parts = choose_cluster_splits(rows, heads, tiles, sms)
            assert parts in (1, *CLUSTERS)
            assert parts == 1 or rows * -(-heads // 64) * parts <= sms
            assert parts == 1 or tiles > 1


def test_fewer_rows_never_have_fewer_parts() -> None:
    for tiles in (1, 3, 10, 18, 130):
        chosen = [choose_cluster_splits(rows, 64, tiles, SMS) for rows in range(1, 140)]
        assert chosen == sorted(chosen, reverse=True)
        assert chosen[-1] == 1


def test_a_gpu_with_few_multiprocessors_keeps_rows_whole() -> None:
    assert choose_cluster_splits(1, 64, 18, 1) == 1
    assert choose_cluster_splits(0, 64, 18, SMS) in (1, *CLUSTERS)


def test_clusters_have_a_block_for_each_part() -> None:
    assert [cluster_of(parts) for parts in range(1, CLUSTERS[-1] + 1)] == [2, 2, 4, 4, 8, 8, 8, 8]
