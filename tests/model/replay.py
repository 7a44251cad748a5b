"""A trace under another schedule, without arithmetic: does it hang, does anything meet that nothing keeps apart?

Every warp does its steps in its order; which warp is next, and when what is asynchronous is done, is a matter of
chance. Two accesses to the same bytes, one of them a write, must be in order whatever the schedule: clocks.py finds
them in any. Hangs, phases that lap and arrivals too many show in some schedules only.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.model.clocks import EVER, Clocks, Meeting
from tests.model.mbarriers import Barrier
from tests.model.trace import Step, Trace

MOST_PROBLEMS = 20


class Replay:
    """One schedule of `trace`, whose steps may have been changed.

    is_exact   whether waits have to find the phase over that they found when the trace was made, and nothing may be
               left half done in the end
    """

    def __init__(
        self,
        trace: Trace,
        seed: int = 0,
        steps: list[list[Step]] | None = None,
        laziness: float = 0.5,
        is_exact: bool = True,
        accesses: bool = True,
        most: int = MOST_PROBLEMS,
    ) -> None:
        self.trace, self.laziness, self.is_exact, self.accesses = trace, laziness, is_exact, accesses
        self.most = most
        self.steps = trace.steps if steps is None else steps
        self.random = random.Random(seed)
        self.clocks = Clocks(trace)
        self.barriers: dict[Any, Barrier] = {}
        self.meetings: dict[Any, Meeting] = defaultdict(lambda: Meeting(len(trace.agents)))
        self.made: dict[Any, tuple[int, int]] = {}
        self.named: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
        self.entered: dict[tuple[int, Any], int] = {}
        self.queues: list[deque[Callable[[], None]]] = []
        self.ordered: dict[Any, deque[Callable[[], None]]] = defaultdict(deque)
        self.sequence: dict[int, int] = defaultdict(int)
        self.committed: dict[int, list[int]] = defaultdict(list)
        self.has_waited: set[int] = set()
        self.problems: dict[str, None] = {}
        self.threads = 32 * len(self.steps)

    def run(self) -> list[str]:
        """What is wrong, nothing if nothing is."""
        position = [0] * len(self.steps)
        blocked = [False] * len(self.steps)
        live = [i for i, steps in enumerate(self.steps) if steps]
        while live and len(self.problems) < self.most:
            ready = [i for i in live if not blocked[i]]
            if self.queues and (not ready or self.random.random() > self.laziness):
                queue = self.random.choice(self.queues)
                queue.popleft()()
                if not queue:
                    self.queues = [other for other in self.queues if other is not queue]
                blocked = [False] * len(self.steps)
                continue
            if not ready:
                for i in live:
                    self.report("hangs", self.steps[i][position[i]])
                break
            warp = self.random.choice(ready)
            for _ in range(self.random.choice((1, 4, 30))):
                step = self.steps[warp][position[warp]]
                if not self._do(warp, step):
                    blocked[warp] = True
                    break
                position[warp] += 1
                if step.kind not in ("access", "wait"):
                    blocked = [False] * len(self.steps)
                if position[warp] == len(self.steps[warp]):
                    live.remove(warp)
                    break
        while self.queues and len(self.problems) < self.most:
            self.queues[-1].popleft()()
            self.queues = [queue for queue in self.queues if queue]
        return list(self.problems)

    def left(self) -> dict[Any, tuple[int, int, int]]:
        """Of each mbarrier phases that are over, arrivals and bytes that the next still waits for."""
        return {place: (b.phase, b.pending, b.bytes) for place, b in self.barriers.items()}

    def report(self, what: str, step: Step) -> None:
        self.problems.setdefault(f"{what}: {self.trace.text(step.ops)}")

    def _do(self, warp: int, step: Step) -> bool:
        """Whether the step could be done."""
        return getattr(self, f"_{step.kind}")(warp, step) is not False

    # ---- accesses

    def _access(self, warp: int, step: Step) -> None:
        if not self.accesses:
            return
        clocks = self.clocks
        for agent, reads, writes in step.touches:
            known, of_reads = clocks.known[agent], clocks.of_reads(agent)
            is_initial = warp not in self.has_waited
            wrong = clocks.touch(agent, int(known[agent]), known, of_reads, reads, writes, is_initial)
            if wrong:
                self.report(wrong, step)

    def _same_write(self, warp: int, step: Step) -> None:
        """Threads of a warp write the same to the same place at once: each has written it."""
        if not self.accesses:
            return
        known, agents = self.clocks.known, list(step.agents)
        before = known[agents].copy()
        for agent, reads, writes in step.touches:
            mine = known[agent].copy()
            mine[agents] = EVER
            of_reads = self.clocks.of_reads(agent)
            wrong = self.clocks.touch(agent, int(known[agent, agent]), mine, of_reads, reads, writes, False)
            if wrong:
                self.report(wrong, step)
        for agent, _, writes in step.touches:  # each one's write has to be over before another's may follow
            self.clocks.read[agent, writes] = known[agent, agent]
        for agent in agents:
            known[agent, agents] = np.maximum(known[agent, agents], before[range(len(agents)), agents])

    def _start(
        self,
        step: Step,
        agent: int,
        clock: int,
        reads: Any,
        writes: Any,
        issuer: int | None = None,
        is_ordered: bool = False,
    ) -> None:
        """Something asynchronous, by an agent of its own; is_ordered: after all that the agent did before."""
        if not self.accesses:
            return
        clocks, issuer = self.clocks, step.agents[0] if issuer is None else issuer
        known = clocks.of_issuer(issuer) if clocks.is_async[agent] else clocks.known[issuer].copy()
        of_reads = clocks.of_reads(issuer)
        if is_ordered:
            known[agent] = of_reads[agent] = EVER
        wrong = clocks.touch(agent, clock, known, of_reads, reads, writes, False)
        if wrong:
            self.report(wrong, step)

    def _later(self, task: Callable[[], None], key: Any = None) -> None:
        queue = deque() if key is None else self.ordered[key]
        if not queue:
            self.queues.append(queue)
        queue.append(task)

    # ---- mbarriers

    def _init(self, warp: int, step: Step) -> None:
        place, expected = step.args
        self.barriers[place] = Barrier.of(expected)
        self.made[place] = step.agents[0], int(self.clocks.known[step.agents[0], step.agents[0]])

    def _find(self, place: Any, step: Step) -> Barrier | None:
        if place not in self.barriers:
            self.report("nobody has made the mbarrier", step)
            return None
        agent, clock = self.made[place]
        if self.clocks.known[step.agents[0], agent] < clock:
            self.report("not after the mbarrier was made", step)
        return self.barriers[place]

    def _turn(self, place: Any, step: Step, change: Callable[[Barrier], bool]) -> None:
        try:
            if change(self.barriers[place]):
                self.meetings[place].turn()
        except AssertionError as error:
            self.report(str(error), step)
            self.barriers[place].pending = 0

    def _arrive(self, warp: int, step: Step) -> None:
        place, arrivals, announced, order = step.args
        if self._find(place, step) is None:
            return
        for agent in step.agents:
            self.meetings[place].arrive(self.clocks, agent, order)
        if arrivals:
            self._turn(place, step, lambda barrier: barrier.arrive(arrivals, announced))
        else:
            self._turn(place, step, lambda barrier: barrier.announce(announced))

    def _wait(self, warp: int, step: Step) -> bool:
        place, parity, phase = step.args
        barrier = self._find(place, step)
        if barrier is None:
            return True
        if not barrier.is_over(parity):
            return False
        if self.is_exact and barrier.phase - 1 != phase:
            self.report(f"waits for phase {phase}, {barrier.phase - 1} is over", step)
        for agent in step.agents:
            self.meetings[place].wait(self.clocks, agent)
        self.has_waited.add(warp)
        return True

    # ---- barriers of warps, blocks, clusters

    def _warp(self, warp: int, step: Step) -> None:
        self.clocks.join(step.agents)

    def _exchange(self, warp: int, step: Step) -> None:
        self.clocks.exchange(step.agents)

    def _barrier_arrive(self, warp: int, step: Step) -> None:
        key, expected = step.args
        state = self.named[key]
        for agent in step.agents:
            self.meetings[key].arrive(self.clocks, agent)
        self.entered[warp, key] = state[1]
        state[0] += sum(step.counts)
        expected = expected or self.threads
        if state[0] > expected:
            self.report("more threads than the barrier expects", step)
        if state[0] >= expected:
            self.named[key] = [0, state[1] + 1]
            self.meetings[key].turn()

    def _barrier_wait(self, warp: int, step: Step) -> bool:
        (key,) = step.args
        if self.named[key][1] <= self.entered.get((warp, key), -1):
            return False
        for agent in step.agents:
            self.meetings[key].wait(self.clocks, agent)
        self.has_waited.add(warp)
        return True

    def _fence(self, warp: int, step: Step) -> None:
        kind, clocks = step.args[0], self.clocks
        for agent in step.agents:
            if kind.startswith("proxy.async"):
                np.maximum(clocks.fenced[agent], clocks.known[agent], out=clocks.fenced[agent])
                clocks.tick(agent)
            elif kind == "tcgen05.after":
                np.maximum(clocks.tensor[agent], clocks.known[agent], out=clocks.tensor[agent])
            elif kind == "tcgen05.before":
                np.maximum(clocks.known[agent], clocks.waited[agent], out=clocks.known[agent])

    # ---- copies

    def _copy(self, warp: int, step: Step) -> None:
        for issuer, (agent, reads, writes) in zip(step.agents, step.touches, strict=True):
            self.sequence[agent] += 1
            self._start(step, agent, self.sequence[agent], reads, writes, issuer)

    def _copies(self, step: Step) -> list[tuple[int, int]]:
        """(threads, their copies) of a step."""
        numbers = self.trace.numbers
        return [(agent, numbers["copy", agent]) for agent in step.agents if ("copy", agent) in numbers]

    def _copy_commit(self, warp: int, step: Step) -> None:
        for _, copies in self._copies(step):
            self.committed[copies].append(self.sequence[copies])

    def _copy_wait(self, warp: int, step: Step) -> None:
        for agent, copies in self._copies(step):
            known = self.clocks.known[agent]
            known[copies] = max(known[copies], self._done(copies, step.args[0]))

    def _done(self, agent: int, newest: int | None) -> int:
        """How much of what an agent has started is done when all groups but some are."""
        if newest is None:
            return self.sequence[agent]
        groups = self.committed[agent]
        return groups[-1 - newest] if len(groups) > newest else 0

    def _copy_arrive(self, warp: int, step: Step) -> None:
        place, arrivals = step.args
        if self._find(place, step) is None:
            return
        tables = [(a, c, self.sequence[c], self.clocks.known[a].copy(), self.clocks.fenced[a].copy()) for a, c in self._copies(step)]

        def land() -> None:
            for agent, copies, clock, known, fenced in tables:
                self.meetings[place].add(copies, clock, known, fenced, agent)
            self._turn(place, step, lambda barrier: barrier.arrive(arrivals))

        self._later(land)

    def _announced(self, step: Step, place: Any, size: int, touch: tuple[int, Any, Any]) -> None:
        """Something that makes an mbarrier count its bytes when it is done."""
        barrier = self._find(place, step)
        if barrier is None:
            return
        agent, reads, writes = touch
        clock, issuer = barrier.phase + 1, step.agents[0]
        self._start(step, agent, clock, reads, writes)
        known, fenced = self.clocks.known[issuer].copy(), self.clocks.fenced[issuer].copy()

        def land() -> None:
            self.meetings[place].add(agent, clock, known, fenced, issuer)
            self._turn(place, step, lambda barrier: barrier.complete(size))

        self._later(land)

    def _bulk(self, warp: int, step: Step) -> None:
        place, size = step.args
        self._announced(step, place, size, step.touches[0])

    def _store_async(self, warp: int, step: Step) -> None:
        (places,) = step.args
        for touch, place in zip(step.touches, np.unique(places), strict=True):
            self._announced(step, int(place), int((places == place).sum()) * step.width, touch)

    # ---- products and bulk stores: in order, done by groups

    def _product(self, warp: int, step: Step) -> None:
        for agent, reads, writes in step.touches:
            self._start(step, agent, self.sequence[agent] + 1, reads, writes, is_ordered=True)
            wrong = self.accesses and self.clocks.operand_is_whole(reads)
            if wrong:
                self.report(wrong, step)
        self.sequence[step.touches[0][0]] += 1

    def _group(self, name: str, warp: int) -> int | None:
        return self.trace.numbers.get((name, warp))

    def _commit(self, name: str, warp: int) -> None:
        agent = self._group(name, warp)
        if agent is not None:
            self.committed[agent].append(self.sequence[agent])

    def _wait_group(self, name: str, warp: int, step: Step) -> None:
        agent = self._group(name, warp)
        if agent is not None:
            for own in step.agents:
                known = self.clocks.known[own]
                known[agent] = max(known[agent], self._done(agent, step.args[0]))

    def _product_commit(self, warp: int, step: Step) -> None:
        self._commit("wgmma", warp)

    def _product_wait(self, warp: int, step: Step) -> None:
        self._wait_group("wgmma", warp, step)

    def _bulk_read(self, warp: int, step: Step) -> None:
        agent, reads, writes = step.touches[0]
        self.sequence[agent] += 1
        self._start(step, agent, self.sequence[agent], reads, writes)

    def _bulk_commit(self, warp: int, step: Step) -> None:
        self._commit("bulk store", warp)

    def _bulk_wait(self, warp: int, step: Step) -> None:
        self._wait_group("bulk store", warp, step)

    # ---- tcgen05

    def _tensor(self, warp: int, step: Step) -> None:
        self._tensor_work(warp, step, ("tensor", "tensor_copy"))

    def _tensor_copy(self, warp: int, step: Step) -> None:
        self._tensor_work(warp, step, ("tensor_copy",))

    def _tensor_work(self, warp: int, step: Step, behind: tuple[str, ...]) -> None:
        """A product or a copy, behind these that the thread has started before."""
        clocks, issuer = self.clocks, step.agents[0]
        agent = step.touches[0][0]
        self.sequence[agent] += 1
        if not self.accesses:
            return
        known = np.where(clocks.is_tensor, clocks.tensor[issuer], clocks.of_issuer(issuer))
        of_reads = np.where(clocks.is_tensor, clocks.tensor[issuer], clocks.of_reads(issuer))
        for name in behind:
            before = self.trace.numbers.get((name, warp))
            if before is not None:
                known[before] = of_reads[before] = EVER
        for _, reads, writes in step.touches:
            wrong = clocks.touch(agent, self.sequence[agent], known, of_reads, reads, writes, False)
            wrong = wrong or clocks.operand_is_whole(reads)
            if wrong:
                self.report(wrong, step)

    def _tensor_commit(self, warp: int, step: Step) -> None:
        (place,) = step.args
        if self._find(place, step) is None:
            return
        issuer = step.agents[0]
        agents = [self.trace.numbers.get((name, warp)) for name in ("tensor", "tensor_copy")]
        done = [(agent, self.sequence[agent]) for agent in agents if agent is not None]
        known = np.maximum(self.clocks.known[issuer], self.clocks.waited[issuer])
        fenced = self.clocks.fenced[issuer].copy()
        self.clocks.tick(issuer)

        def land() -> None:
            for agent, clock in done:
                self.meetings[place].add(agent, clock, known, fenced, issuer)
            self._turn(place, step, lambda barrier: barrier.arrive())

        self._later(land, ("commit", warp))

    def _tensor_load(self, warp: int, step: Step) -> None:
        self._tensor_access(step)

    def _tensor_store(self, warp: int, step: Step) -> None:
        self._tensor_access(step)

    def _tensor_access(self, step: Step) -> None:
        agent, reads, writes = step.touches[0]
        self.sequence[agent] += 1
        if not self.accesses:
            return
        known = self.clocks.tensor[list(step.agents)].min(axis=0)
        wrong = self.clocks.touch(agent, self.sequence[agent], known, known, reads, writes, False)
        if wrong:
            self.report(wrong, step)

    def _tensor_wait(self, warp: int, step: Step) -> None:
        done = self.trace.numbers.get((step.args[0], warp))
        if done is not None:
            for agent in step.agents:
                self.clocks.tensor[agent, done] = self.clocks.waited[agent, done] = self.sequence[done]

    def _tensor_free(self, warp: int, step: Step) -> None:
        self._access(warp, step)
