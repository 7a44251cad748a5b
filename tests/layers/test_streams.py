# SPDX-License-Identifier: Apache-2.0
"""Independent tasks of a step: where streams are of no use, they run as they come. No GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from layers import streams
from layers.streams import run_on_streams, start_on_streams


class Unused:
    """A stream that nobody may touch."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("is_first_ahead", [False, True])
def test_fewer_than_two_tasks_take_no_stream(count: int, is_first_ahead: bool) -> None:
    unused = [cast("torch.cuda.Stream", Unused())]
    tasks: list[Callable[[], torch.Tensor]] = [lambda: torch.ones(3)] * count
    results, join = start_on_streams(tasks, unused, torch.device("cuda"), is_first_ahead)
    join()
    assert [x.tolist() for x in results] == [[1.0] * 3] * count
    assert len(run_on_streams(tasks, unused, torch.device("cuda"))) == count


def test_captured_steps_take_a_stream_that_was_made_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each device, whatever is captured; what runs on it already takes none."""
    made: list[str] = []
    current = "captured"

    def make_stream(index: int) -> str:
        made.append(f"made{len(made)} for {index}")
        return made[-1]

    monkeypatch.setattr(streams, "_graph_streams", streams._GraphStreams())
    monkeypatch.setattr(streams, "make_stream", make_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current)
    assert [str(streams.graph_streams(torch.device(name))) for name in ("cuda:0", "cuda:1", "cuda", "cuda:0")] == [
        "('made0 for 0',)",
        "('made1 for 1',)",
        "('made1 for 1',)",
        "('made0 for 0',)",
    ]
    current = made[0]
    assert streams.graph_streams(torch.device("cuda", 0)) == ()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert streams.graph_streams(torch.device("cuda", 1)) == ()
    assert len(made) == 2


class Numbered:
    """A stream: equal to others of its number, as torch's are."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbered) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass


@pytest.mark.parametrize("is_own", [True, False])
def test_results_on_a_stream_of_a_caller_are_recorded(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What else the caller does there may take their memory."""
    own, current = Numbered(1), Numbered(0)
    recorded: list[Numbered] = []
    kept = streams._GraphStreams()
    kept.of[0] = cast("torch.cuda.Stream", own)
    monkeypatch.setattr(streams, "_graph_streams", kept)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    result = cast("torch.Tensor", SimpleNamespace(record_stream=recorded.append))
    given = cast("torch.cuda.Stream", Numbered(1 if is_own else 2))
    run_on_streams([lambda: result, lambda: result], [given], torch.device("cuda"))
    assert recorded == ([] if is_own else [current])
