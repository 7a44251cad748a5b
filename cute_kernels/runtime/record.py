# SPDX-License-Identifier: Apache-2.0
"""What ran: a recorder that ops and layers report their calls to while somebody listens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

HEAD_START_CYCLES = 400_000
"""About 0.2 ms in which the GPU waits before a timed call: long enough for the call to be queued before its start event
passes, so that the events time the GPU and not the launch."""


@dataclass(frozen=True)
class Cost:
    """Bytes that must move to and from memory, and floating-point operations, of one call."""

    bytes: int = 0
    flops: int = 0


@dataclass
class Call:
    """One recorded call: `seconds` is filled in when the recording ends (GPU times come from events)."""

    op: str
    implementation: str
    cost: Cost = field(default_factory=Cost)
    seconds: float = 0.0


class Recording:
    """The calls of a `record_calls()` block, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._events: list[tuple[Call, torch.cuda.Event, torch.cuda.Event]] = []

    def run(self, op: str, implementation: str, cost: Cost, device: torch.device, body: Callable[[], Any]) -> Any:
        call = Call(op, implementation, cost)
        self.calls.append(call)
        if device.type == "cuda":
            with torch.cuda.device(device):
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(HEAD_START_CYCLES)
                start.record()
                result = body()
                stop.record()
            self._events.append((call, start, stop))
            return result
        begin = time.perf_counter()
        result = body()
        call.seconds = time.perf_counter() - begin
        return result

    def finish(self) -> None:
        for call, start, stop in self._events:
            stop.synchronize()
            call.seconds = start.elapsed_time(stop) * 1e-3
        self._events.clear()


_active: ContextVar[Recording | None] = ContextVar("cute_kernels_recording", default=None)


def active() -> Recording | None:
    """The recording in progress in this context, or None."""
    return _active.get()


@contextmanager
def record_calls() -> Iterator[Recording]:
    """Record every op call (and every GEMM of the layers) made inside the block, on any device, by this thread or task
    (contextvars): calls of other threads are theirs. Not reentrant."""
    if _active.get() is not None:
        raise RuntimeError("record_calls: a recording is already active")
    recording = Recording()
    token = _active.set(recording)
    try:
        yield recording
    finally:
        _active.reset(token)
        recording.finish()
