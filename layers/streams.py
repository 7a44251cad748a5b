# SPDX-License-Identifier: Apache-2.0
"""Independent work of a step on streams beside its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch


class _GraphStreams(threading.local):
    """By device, a stream for captured steps: a thread's own, as two threads may capture at the same time."""

    def __init__(self) -> None:
        self.of: dict[int, torch.cuda.Stream] = {}


_graph_streams = _GraphStreams()


def graph_streams(device: torch.device) -> Sequence[torch.cuda.Stream]:
    """The auxiliary stream of this thread's steps, if one is being captured."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        return ()
    index = torch.cuda.current_device() if device.index is None else device.index
    current = torch.cuda.current_stream(index)
    # torch deals streams out of a pool of 32, over and over: the one that is captured may be ours of a capture before
    while _graph_streams.of.get(index, current) == current:
        _graph_streams.of[index] = torch.cuda.Stream(index)
    return (_graph_streams.of[index],)


def start_on_streams(
    tasks: Sequence[Callable[[], torch.Tensor]],
    streams: Sequence[torch.cuda.Stream],
    device: torch.device,
    is_first_ahead: bool = False,
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Run independent tasks, the first on the current stream and the others on `streams` if there are any: (results,
    what makes the current stream wait for the others).

    is_first_ahead   the first task is launched before the others
    """
    if len(tasks) < 2 or not streams or device.type != "cuda":
        return [task() for task in tasks], lambda: None
    current = torch.cuda.current_stream(device)
    ready = current.record_event()
    results: dict[int, torch.Tensor] = {}
    done = []
    if is_first_ahead:
        results[0] = tasks[0]()
    for number, task in enumerate(tasks[1:]):
        stream = streams[number % len(streams)]
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            results[number + 1] = task()
            # on a stream of our own memory is not taken again before the next fork, which is behind all uses of this; a
            # caller's that is the same one of the pool is another object
            if not any(stream is own for own in _graph_streams.of.values()):
                results[number + 1].record_stream(current)
        done.append(stream.record_event())
    if not is_first_ahead:
        results[0] = tasks[0]()

    def join() -> None:
        for event in done:
            current.wait_event(event)

    return [results[number] for number in range(len(tasks))], join


def run_on_streams(
    tasks: Sequence[Callable[[], torch.Tensor]], streams: Sequence[torch.cuda.Stream], device: torch.device
) -> list[torch.Tensor]:
    """The same, all waited for."""
    results, join = start_on_streams(tasks, streams, device)
    join()
    return results
