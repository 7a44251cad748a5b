# SPDX-License-Identifier: Apache-2.0
"""How many CTAs a grid has that walks over its work tiles."""

from __future__ import annotations

import pytest

from cute_kernels.runtime.arch import grid_size, small_grids


@pytest.mark.parametrize(
    ("most", "ctas", "cluster", "size"),
    [
        (None, 7, 1, 7),
        (None, 6, 2, 6),
        (2, 7, 1, 2),
        (2, 1, 1, 1),
        (2, 8, 2, 2),
        (2, 8, 4, 4),
        (5, 8, 2, 4),
        (5, 2, 2, 2),
        (9, 8, 1, 8),
    ],
)
def test_small_grids_have_whole_clusters(most: int | None, ctas: int, cluster: int, size: int) -> None:
    """At least one, and never more than the GPU was to have."""
    with small_grids(most):
        assert grid_size(ctas, cluster) == size
    assert grid_size(ctas, cluster) == ctas
