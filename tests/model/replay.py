# SPDX-License-Identifier: Apache-2.0
"""A trace under another schedule, without arithmetic: does it hang, does anything meet that nothing keeps apart?

Two accesses to the same bytes, one of them a write, must be in order whatever the schedule: clocks.py finds them in
any. Hangs, phases that lap and arrivals too many show in some schedules only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.model.clocks import EVER
from tests.model.schedule import Schedule
from tests.model.trace import Step

GENERIC = ("copy", "store_async")
"""What is asynchronous and yet of the proxy of threads."""


class Replay(Schedule):
    """With what is asynchronous: copies, products, tensor memory."""

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
        known = clocks.known[issuer].copy() if step.kind in GENERIC else clocks.of_issuer(issuer)
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

    # ---- copies

    def _copy(self, warp: int, step: Step) -> None:
        for issuer, (agent, reads, writes) in zip(step.agents, step.touches, strict=True):
            self.sequence[agent] += 1
            self._start(step, agent, self.sequence[agent], reads, writes, issuer)

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
        tables = [(a, c, self.sequence[c], self.clocks.tables_of(a)) for a, c in self._copies(step)]

        def land() -> None:
            for agent, copies, clock, known in tables:
                self.meetings[place].add(copies, clock, known, agent)
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
        known = self.clocks.tables_of(issuer)

        def land() -> None:
            self.meetings[place].add(agent, clock, known, issuer)
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
        for operand in step.operands if self.accesses else ():
            wrong = self.clocks.operand_is_whole(operand)
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
        self._tensor_work(warp, step)

    def _tensor_copy(self, warp: int, step: Step) -> None:
        self._tensor_work(warp, step)

    def _tensor_work(self, warp: int, step: Step) -> None:
        """A product or a copy: behind the thread's copies before it and its products with the same accumulator, and
        behind what the thread knew at its last fence."""
        clocks, issuer = self.clocks, step.agents[0]
        agent = step.touches[0][0]
        self.sequence[agent] += 1
        if not self.accesses:
            return
        known = clocks.tensor[issuer].copy()
        known[issuer] = clocks.fenced[issuer, issuer]
        known[agent] = EVER
        known[self.trace.numbers.get(("tensor_copy", warp), agent)] = EVER
        for _, reads, writes in step.touches:
            wrong = clocks.touch(agent, self.sequence[agent], known, known, reads, writes, False)
            wrong = wrong or clocks.operand_is_whole(reads)
            if wrong:
                self.report(wrong, step)

    def _tensor_commit(self, warp: int, step: Step) -> None:
        (place,) = step.args
        if self._find(place, step) is None:
            return
        issuer = step.agents[0]
        done = [(agent, self.sequence[agent]) for agent in self.trace.started_by(warp)]
        tables = self.clocks.tables_of(issuer)
        for table in (tables[0], tables[2]):
            np.maximum(table, self.clocks.waited[issuer], out=table)
        self.clocks.tick(issuer)

        def land() -> None:
            for agent, clock in done:
                self.meetings[place].add(agent, clock, tables, issuer)
            self._turn(place, step, lambda barrier: barrier.arrive())

        self._later(land, ("commit", warp))

    def _tensor_load(self, warp: int, step: Step) -> None:
        self._tensor_access(step)

    def _tensor_store(self, warp: int, step: Step) -> None:
        self._tensor_access(step)

    def _tensor_access(self, step: Step) -> None:
        for thread, (agent, reads, writes) in zip(step.agents, step.touches, strict=True):
            self.sequence[agent] += 1
            if self.accesses:
                known = self.clocks.tensor[thread]
                wrong = self.clocks.touch(agent, self.sequence[agent], known, known, reads, writes, False)
                if wrong:
                    self.report(wrong, step)

    def _tensor_wait(self, warp: int, step: Step) -> None:
        for agent in step.agents:
            done = self.trace.numbers.get((step.args[0], warp, agent))
            if done is not None:
                self.clocks.tensor[agent, done] = self.clocks.waited[agent, done] = self.sequence[done]

    def _tensor_use(self, warp: int, step: Step) -> None:
        """Done when the threads go on."""
        (peer,) = step.args
        if peer is not None and peer not in self.started[warp]:
            self.report("the pair's other block may not have started", step)
        agent, reads, writes = step.touches[0]
        self.sequence[agent] += 1
        clocks, clock = self.clocks, self.sequence[agent]
        known = clocks.known[list(step.agents)].max(axis=0)
        wrong = self.accesses and clocks.touch(agent, clock, known, known, reads, writes, False)
        if wrong:
            self.report(wrong, step)
        clocks.known[list(step.agents), agent] = clock
