# SPDX-License-Identifier: Apache-2.0
"""Whether a kernel that ran once in the model is right in any order: its record, replayed."""

from __future__ import annotations

from collections.abc import Callable

from tests.model import lanes, trace
from tests.model.events import Record
from tests.model.ptx import Program
from tests.model.replay import Replay

LAZINESS = (0.5, 0.95, 0.05)


def recorder(program: Program) -> tuple[list[Record], Callable[[int], Record]]:
    """Records of a grid's clusters, and what makes them: `events` of run_grid."""
    records: list[Record] = []

    def make(number: int) -> Record:
        records.append(Record(program))
        return records[-1]

    return records, make


def check(
    record: Record,
    schedules: int = 3,
    more: int = 6,
    copies_are_fenced: bool = True,
    counts_versions: bool = True,
    votes_order: bool = False,
    unscoped: str = "",
) -> trace.Trace:
    """Raises AssertionError with all that is wrong in some schedules with what is accessed, and `more` without. In nine
    each way in which warps are slow meets each laziness.

    copies_are_fenced, votes_order, unscoped
                        see trace.make
    counts_versions     whether all bytes of an operand have been written equally often: not where something else than
                        an operand has been in a part of its place
    """
    among_threads = lanes.unordered(record, votes_order=votes_order)
    assert not among_threads, "\n".join(["threads of a warp:", *among_threads])
    steps = trace.make(record, copies_are_fenced, votes_order, unscoped)
    left = None
    for seed in range(schedules + more):
        replay = Replay(steps, seed, laziness=LAZINESS[seed // 3 % 3], accesses=seed < schedules)
        replay.clocks.counts_versions = counts_versions
        problems = replay.run()
        assert not problems, "\n".join([f"schedule {seed}:", *problems])
        assert left in (None, replay.left()), f"schedule {seed}: mbarriers are left in another state"
        left = replay.left()
    assert left is not None
    halves = [
        f"mbarrier {place:#x}: {pending} arrivals, {size} bytes"
        for place, (_, pending, size) in left.items()
        if pending != replay.barriers[place].expected or size
    ]
    assert not halves, "\n".join(["left in the middle of a phase:", *halves])
    return steps
