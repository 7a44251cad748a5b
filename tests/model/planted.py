# SPDX-License-Identifier: Apache-2.0
"""Which bugs planted in a kernel's order nothing finds, and why: that something else keeps the same order is either
proved by a rule, or said in a table that the tests hold to be complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.model import edits, lanes, orders
from tests.model.edits import Edit
from tests.model.mutations import Mutant, among_threads, in_schedule, mutants, problems
from tests.model.ptx import parse
from tests.model.replay import Replay
from tests.model.trace import Trace
from tests.model.trace import make as make_trace

TELLS_NOTHING = "what the wait is for comes before something else that its threads wait for, before they do anything"
IS_REPEATED = "threads of the warp have met, and have touched and waited for nothing since"

RESULTS = "no wait for tensor memory", "no wait for products", "no wait for copies"
"""What makes registers or bytes wrong: run, such a kernel gives other results."""

IDLE = ("arrive", "exchange", "exit")
"""Steps that leave a barrier of the warp nothing to keep apart."""


Call = Callable[..., None]
"""Runs a program and raises one of edits.FOUND if its results are wrong; events: of run_grid."""


@dataclass
class Kernel:
    """A kernel under test, right in some schedules.

    text      PTX
    calls     that together reach all it does
    roles     name -> warps of a block
    ignores   see schedule.Schedule
    how       see trace.make
    """

    text: str
    calls: Sequence[Call]
    roles: Mapping[str, range]
    ignores: tuple[str, ...] = ()
    how: Mapping[str, bool] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)

    def __post_init__(self) -> None:
        program = parse(self.text)
        for call in self.calls:
            records, make = orders.recorder(program)
            call(program, events=make)
            trace = make_trace(records[0], **self.how)
            self.traces.append(trace)
            assert lanes.unordered(trace.record, votes_order=trace.votes_order) == []
            for seed in range(2):
                assert Replay(trace, seed, ignores=self.ignores).run() == []

    def planted(self) -> dict[tuple[int, str], list[tuple[Trace, Mutant]]]:
        """(instruction, what is wrong) -> the bug in all traces that have it, in order."""
        found: dict[tuple[int, str], list[tuple[Trace, Mutant]]] = {}
        for trace in self.traces:
            for mutant in mutants(trace, one_way=True):
                found.setdefault((mutant.op, mutant.name), []).append((trace, mutant))
        return dict(sorted(found.items()))

    def missed(self, every: int = 1, first: int = 0) -> tuple[int, list[Mutant]]:
        """How many bugs were planted, every so manyth of all there are or, with 0, one of each kind, and those that
        nothing finds."""
        planted = list(self.planted().values())[first::every] if every else self._of_each_kind(first)
        return len(planted), [places[0][1] for places in planted if not self._is_found(places)]

    def _of_each_kind(self, first: int) -> list[list[tuple[Trace, Mutant]]]:
        kinds: dict[str, list[list[tuple[Trace, Mutant]]]] = {}
        for (_, name), places in self.planted().items():
            kinds.setdefault(name, []).append(places)
        return [bugs[first % len(bugs)] for bugs in kinds.values()]

    def _is_found(self, places: list[tuple[Trace, Mutant]]) -> bool:
        if any(problems(trace, mutant, ignores=self.ignores) for trace, mutant in places):
            return True
        mutant = places[0][1]
        if mutant.name not in RESULTS:
            return False
        return edits.is_found(self.calls[0], Edit(mutant.op, mutant.name).program(self.text), events=None)

    def rates(self, schedules: int, every: int = 1, first: int = 0) -> list[tuple[int, Mutant]]:
        """Of every so manyth bug that is found: in how many of so many random schedules. What is found without one, or
        by results, is in all of them."""
        found = []
        for places in list(self.planted().values())[first::every]:
            mutant = places[0][1]
            if any(among_threads(trace, own) for trace, own in places):
                found.append((schedules, mutant))
                continue
            steps = [(trace, own.steps(trace)) for trace, own in places]
            count = sum(
                any(in_schedule(trace, changed, seed, ignores=self.ignores) for trace, changed in steps)
                for seed in range(schedules)
            )
            if count == 0 and mutant.name in RESULTS and self._is_found(places):
                count = schedules
            if count:
                found.append((count, mutant))
        return found

    # ---- why

    def rule(self, mutant: Mutant) -> str:
        """What proves that a kernel with this bug is right, if one of the rules does."""
        # one for another mbarrier is one more, and has not hung
        if mutant.name in ("no wait", "the mbarrier -8 bytes away") and self._tells_nothing(mutant.op):
            return TELLS_NOTHING
        if mutant.name == "no barrier of the warp" and self._is_repeated(mutant.op):
            return IS_REPEATED
        return ""

    def _tells_nothing(self, op: int) -> bool:
        for trace in self.traces:
            for seed in range(3):
                replay = Replay(trace, seed, accesses=False)
                replay.mute = op
                if replay.run():
                    return False
        return True

    def _is_repeated(self, op: int) -> bool:
        for steps in (steps for trace in self.traces for steps in trace.steps):
            for i, step in enumerate(steps):
                if step.kind == "warp" and step.ops == (op,):
                    before = next((one for one in reversed(steps[:i]) if one.kind not in IDLE), None)
                    if before is None or before.kind != "warp" or before.counts != step.counts:
                        return False
        return True

    def role(self, op: int) -> str:
        """Of the warps that run an instruction; "all" if they have several."""
        warps = {
            number % trace.per_block
            for trace in self.traces
            for number, steps in enumerate(trace.steps)
            if any(op in step.ops for step in steps)
        }
        return next((name for name, own in self.roles.items() if warps <= set(own)), "all")

    def check(self, left: Mapping[tuple[str, str], tuple[int, str]], every: int = 1, first: int = 0) -> tuple[int, int]:
        """That every bug that nothing finds is in a table, of (role, what is wrong): so many, and the reason, which has
        to hold where it is a rule's. Returns how many were planted (see `missed`), and how many nothing finds."""
        count, missed = self.missed(every, first)
        found: Counter[tuple[str, str]] = Counter()
        for mutant in missed:
            key = self.role(mutant.op), mutant.name
            found[key] += 1
            text = f"{key}, {mutant.op}: {self.traces[0].record.program.ops[mutant.op].text}"
            assert key in left, f"not found, and not in the table: {text}"
            assert found[key] <= left[key][0], f"not found, and more than the table has: {text}"
            why = left[key][1]
            assert why not in (TELLS_NOTHING, IS_REPEATED) or self.rule(mutant) == why, f"no rule says so: {text}"
        assert every != 1 or dict(found) == {key: number for key, (number, _) in left.items()}
        return count, len(missed)
