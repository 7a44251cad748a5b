# SPDX-License-Identifier: Apache-2.0
"""Independent work of a step on streams beside its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from cute_kernels.runtime.streams import make_stream


class _GraphStreams(threading.local):
    """By device, a stream for captured steps: a thread's own, as two threads may capture at the same time. It is none
    of torch's pool, which an engine may capture or run other work on."""

    def __init__(self) -> None:
        self.of: dict[int, torch.cuda.Stream] = {}


_graph_streams = _GraphStreams()


def graph_streams(device: torch.device) -> Sequence[torch.cuda.Stream]:
    """The auxiliary stream of this thread's steps, if one is being captured; none for what runs on that stream."""
    if device.type != "cuda" or torch.compiler.is_compiling() or not torch.cuda.is_current_stream_capturing():
        return ()
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _graph_streams.of:
        _graph_streams.of[index] = make_stream(index)
    stream = _graph_streams.of[index]
    return () if torch.cuda.current_stream(index) == stream else (stream,)


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
            # on a stream of our own memory is not taken again before the next fork, which is behind all uses of this
            if stream not in _graph_streams.of.values():
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
