# SPDX-License-Identifier: Apache-2.0
"""Independent tasks of a step: where streams are of no use, they run as they come. No GPU."""

from __future__ import annotations

import contextlib
import itertools
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


def test_the_stream_of_a_captured_step_is_not_the_one_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams come out of a pool that begins again; one is kept until it is itself captured."""
    dealt, current = itertools.cycle(["s0", "s1", "s2"]), ["s0"]
    monkeypatch.setattr(streams, "_graph_streams", streams._GraphStreams())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: next(dealt))
    found: list[torch.cuda.Stream] = []
    for captured in ("s0", "s2", "s1", "s1", "s0", "s2"):
        current[0] = captured
        found += streams.graph_streams(torch.device("cuda", 0))
    assert [*map(str, found)] == ["s1", "s1", "s2", "s2", "s2", "s0"]


class Dealt:
    """A stream of torch's pool: equal to others of its number, as torch's are."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dealt) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]

    def record_event(self) -> None:
        pass

    def wait_event(self, event: None) -> None:
        pass


@pytest.mark.parametrize("is_own", [True, False])
def test_results_on_a_stream_of_a_caller_are_recorded(is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the pool has dealt it to us, too: what else the caller does there may take their memory."""
    own, current = Dealt(1), Dealt(0)
    recorded: list[Dealt] = []
    kept = streams._GraphStreams()
    kept.of[0] = cast("torch.cuda.Stream", own)
    monkeypatch.setattr(streams, "_graph_streams", kept)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    result = cast("torch.Tensor", SimpleNamespace(record_stream=recorded.append))
    given = cast("torch.cuda.Stream", own if is_own else Dealt(1))
    run_on_streams([lambda: result, lambda: result], [given], torch.device("cuda"))
    assert recorded == ([] if is_own else [current])
