# SPDX-License-Identifier: Apache-2.0
"""Independent tasks of a step: where streams are of no use, they run as they come. No GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from layers.streams import run_on_streams, start_on_streams


class Unused:
    """A stream that nobody may touch."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("is_first_ahead", [False, True])
def test_fewer_than_two_tasks_take_no_stream(count: int, is_first_ahead: bool) -> None:
    streams = [cast("torch.cuda.Stream", Unused())]
    tasks: list[Callable[[], torch.Tensor]] = [lambda: torch.ones(3)] * count
    results, join = start_on_streams(tasks, streams, torch.device("cuda"), is_first_ahead)
    join()
    assert [x.tolist() for x in results] == [[1.0] * 3] * count
    assert len(run_on_streams(tasks, streams, torch.device("cuda"))) == count
