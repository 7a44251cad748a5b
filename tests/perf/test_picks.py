# SPDX-License-Identifier: Apache-2.0
"""When picks are the best of what may be picked; no GPU."""

from __future__ import annotations

import pytest
import torch

from perf.picks import largest, shortfall

SCORES = torch.tensor([[3.0, 1.0, 2.0, -torch.inf, 2.0]])


@pytest.mark.parametrize(
    ("picks", "expected"),
    [
        ([0, 2], 0.0),
        ([0, 4], 0.0),  # of two that tie either
        ([0, 1], 1.0),
        ([1, 2], 2.0),
        ([0, -1], torch.inf),  # one is missing
        ([0, 0], torch.inf),
        ([0, 3], torch.inf),  # one that may not be picked
        ([0, 1, 2, 4, -1], 0.0),
        ([0, 1, 2, -1, -1], torch.inf),
    ],
)
def test_the_shortfall_of_picks(picks: list[int], expected: float) -> None:
    assert shortfall(SCORES, torch.tensor([picks])).tolist() == [expected]


def test_a_row_that_sees_nothing_is_right() -> None:
    scores = torch.full((1, 3), -torch.inf)
    assert largest(scores) > 0
    assert shortfall(scores, torch.tensor([[-1, -1]])).tolist() == [0.0]
    assert shortfall(scores, torch.tensor([[0, -1]])).tolist() == [torch.inf]
    assert largest(torch.tensor([[2.0, -3.0, -torch.inf]])).tolist() == [3.0]
