# SPDX-License-Identifier: Apache-2.0
"""Threads of one warp that touch the same bytes of shared memory: the warp has to meet in between.

Threads that always synchronize together are one agent of trace.py, so replays do not see this. Here a warp is looked at
by itself, in the order in which it ran.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.model.events import ALL, Event, Record
from tests.model.ptx import LANES

UNIT = 4
"""Bytes that are told apart."""

MEETS = ("warp", "barrier_wait", "wait")
"""What orders all that the warp's threads did before and all that they do next. A wait for an mbarrier is taken to be
for what the others of the warp have arrived for, too."""

NOBODY, SEVERAL = -1, LANES


def unordered(record: Record, without: int = -1, votes_order: bool = False) -> list[str]:
    """What threads of a warp do out of order, if instruction `without` were not there. votes_order: see trace.make."""
    found: dict[str, None] = {}
    for warp in record.warps:
        for event, what in _of_warp(warp.events, without, votes_order):
            found.setdefault(f"{what}: {event.op}: {record.program.ops[event.op].text[:90]}")
    return list(found)


def _of_warp(events: list[Event], without: int, votes_order: bool) -> Iterator[tuple[Event, str]]:
    touched = [event.at for event in events if event.kind in ("read", "write", "copy")]
    if not touched:
        return
    top = max(int(at.max(initial=0)) for at in touched) // UNIT + 8
    writer, reader = np.full(top, NOBODY), np.full(top, NOBODY)
    for event in events:
        if event.op == without:
            continue
        if event.kind in MEETS and event.lanes == ALL:
            writer[:], reader[:] = NOBODY, NOBODY
        elif event.kind == "exchange" and votes_order:
            reader[:] = NOBODY
        elif event.kind in ("read", "write", "copy"):
            yield from _touch(event, writer, reader)


def _touch(event: Event, writer: Any, reader: Any) -> Iterator[tuple[Event, str]]:
    lanes = _numbers(event.lanes)
    count = max(1, event.width // UNIT)
    places = (event.at[:, None] // UNIT + np.arange(count)).ravel()
    own = np.repeat(lanes[: len(event.at)], count)
    if ((writer[places] != NOBODY) & (writer[places] != own)).any():
        yield event, "after another thread's write"
    if event.kind == "read":
        reader[places] = np.where((reader[places] == NOBODY) | (reader[places] == own), own, SEVERAL)
        return
    if ((reader[places] != NOBODY) & (reader[places] != own)).any():
        yield event, "after another thread's read"
    writer[places] = own


@functools.lru_cache(maxsize=4096)
def _numbers(lanes: int) -> Any:
    return np.flatnonzero([lanes >> i & 1 for i in range(LANES)])
