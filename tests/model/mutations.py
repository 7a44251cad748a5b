# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in a trace, one at a time and wherever they can be, to see whether a replay finds them.

A bug is one of an instruction: what it does wrong it does whenever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.model import lanes
from tests.model.replay import Replay
from tests.model.trace import Step, Trace

DROPPED = {
    "wait": "no wait",
    "arrive": "no arrival",
    "copy_arrive": "no arrival of copies",
    "copy_wait": "no wait for copies",
    "copy_commit": "no group of copies",
    "product_wait": "no wait for products",
    "fence": "no fence",
    "warp": "no barrier of the warp",
    "barrier": "no barrier",
    "tensor_commit": "no commit",
    "tensor_wait": "no wait for tensor memory",
    "bulk_wait": "no wait for bulk stores",
}
QUIET = ("warp", "fence", "copy_wait", "copy_commit", "product_wait", "tensor_wait", "bulk_wait")
"""Nobody waits longer or shorter without these: only accesses tell."""

SKIPPED = ("access", "same_write", "exchange", "exit")
ORDERS = ("proxy.async", "tcgen05")
"""Fences that anything depends on; what else there is orders the making of mbarriers."""


Change = Callable[[Step], Step | None]
"""From a step to what it becomes, or None if it goes."""


@dataclass(frozen=True)
class Mutant:
    """op: instruction; name: what is wrong with it; change: of its steps; is_quiet: see QUIET."""

    op: int
    name: str
    change: Change
    is_quiet: bool = False

    def steps(self, trace: Trace) -> list[list[Step]]:
        return [[new for new in map(self._of, steps) if new is not None] for steps in trace.steps]

    def _of(self, step: Step) -> Step | None:
        return self.change(step) if step.ops == (self.op,) and step.kind not in SKIPPED else step


def _with(step: Step, index: int, value: Any) -> Step:
    return step.changed(args=(*step.args[:index], value, *step.args[index + 1 :]))


def mutants(trace: Trace, one_way: bool = False) -> Iterator[Mutant]:
    """All of them; one_way: where a number can be too large or too small, only one of the two."""
    by_op: dict[int, list[Step]] = {}
    for step in (step for steps in trace.steps for step in steps):
        if step.kind not in SKIPPED:
            by_op.setdefault(step.ops[0], []).append(step)
    places = {step.args[0] for steps in by_op.values() for step in steps if step.kind == "init"}
    for op, steps in by_op.items():
        yield from _of_step(op, steps, places, ((1,) if op % 2 else (-1,)) if one_way else (1, -1))


def _of_step(op: int, steps: list[Step], places: set[Any], ways: tuple[int, ...]) -> Iterator[Mutant]:
    step = steps[0]
    kind = step.kind.split("_")[0] if step.kind.startswith("barrier") else step.kind
    if kind in DROPPED and (kind != "fence" or step.args[0].startswith(ORDERS)):
        yield Mutant(op, DROPPED[kind], lambda step: None, kind in QUIET)
    if kind == "init":
        for more in ways:
            if step.args[1] + more > 0:
                yield Mutant(op, f"expects {more:+} arrivals", _more(1, more))
    if kind == "wait":
        yield Mutant(op, "the other parity", lambda step: _with(step, 1, step.args[1] ^ 1))
    if kind in ("wait", "arrive", "tensor_commit", "copy_arrive"):
        # a later stage is full or empty when this one is, too
        for by in (-8,) if kind == "wait" else [8 * way for way in ways]:
            if any(step.args[0] + by in places for step in steps):
                yield Mutant(op, f"the mbarrier {by:+} bytes away", _moved(by, places))
    if kind == "arrive" and step.args[2]:
        for more in (16 * way for way in ways):
            yield Mutant(op, f"announces {more:+} bytes", _more(2, more))


def _more(index: int, by: int) -> Change:
    """With another number, where there is one."""
    return lambda step: _with(step, index, step.args[index] + by) if step.args[index] else step


def _moved(by: int, places: set[Any]) -> Change:
    """With the next mbarrier instead; the last one with itself."""
    return lambda step: _with(step, 0, step.args[0] + by) if step.args[0] + by in places else step


def problems(
    trace: Trace, mutant: Mutant, schedules: int = 2, more: int = 6, ignores: tuple[str, ...] = ()
) -> list[str]:
    """What replays find: in so many schedules with accesses, in `more` without, first in one of these.

    ignores   see Schedule
    """
    found = among_threads(trace, mutant)
    if found:
        return found
    steps, looking = mutant.steps(trace), [(seed, True) for seed in range(schedules)]
    others = [] if mutant.is_quiet else [(seed, False) for seed in range(more)]
    for seed, accesses in [*others[:1], *looking, *others[1:]]:
        found = in_schedule(trace, steps, seed, accesses, ignores)
        if found:
            return found
    return []


def among_threads(trace: Trace, mutant: Mutant) -> list[str]:
    """What is found without a schedule, of barriers of the warp."""
    return lanes.unordered(trace.record, mutant.op, trace.votes_order) if mutant.name == DROPPED["warp"] else []


def in_schedule(
    trace: Trace, steps: list[list[Step]], seed: int, accesses: bool = True, ignores: tuple[str, ...] = ()
) -> list[str]:
    """What a replay of a bug's steps finds."""
    laziness = (0.5, 0.95, 0.05)[seed % 3]
    replay = Replay(trace, seed, steps, laziness=laziness, is_exact=False, accesses=accesses, most=1, ignores=ignores)
    return replay.run() or _left(replay)


def _left(replay: Replay) -> list[str]:
    """mbarriers that a kernel leaves in the middle of a phase."""
    return [
        f"left in the middle of a phase: mbarrier {place:#x}"
        for place, barrier in replay.barriers.items()
        if barrier.pending != barrier.expected or barrier.bytes
    ]
