# SPDX-License-Identifier: Apache-2.0
"""Which rows of a cache a query row attends to, where it names entries of its request."""

from __future__ import annotations

import torch

from cute_kernels import formats
from cute_kernels.sparse_mla import selection


def test_entries_are_seen_up_to_a_limit() -> None:
    """Of columns and of what stands in them, both."""
    pool = formats.PLAIN_BF16.allocate(3, 4)
    table = torch.tensor([[2, 0], [1, 9]], dtype=torch.int32)
    entries = torch.tensor([[0, 5, 2, 1], [3, 4, -1, 0], [7, 1, 0, 2]], dtype=torch.int32)
    visible, requests = torch.tensor([4, 4, 2]), torch.tensor([0, 1, 0])
    one = selection.by_entry(pool, formats.PLAIN_BF16, table, requests, visible, entries)
    assert one.slots(slice(0, 3)).tolist() == [[8, -1, 10, 9], [7, -1, -1, 4], [-1, 9, -1, -1]]
    assert one.slots(slice(2, 3)).tolist() == [[-1, 9, -1, -1]]
