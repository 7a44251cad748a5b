# SPDX-License-Identifier: Apache-2.0
"""Warps that do the steps of a trace, each in its order: which is next, and when what is asynchronous is done, is a
matter of chance. Here is what threads do by themselves; replay.py has what is asynchronous.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.model.clocks import EVER, Clocks, Meeting
from tests.model.mbarriers import Barrier
from tests.model.ptx import LANES
from tests.model.trace import Step, Trace

MOST_PROBLEMS = 20

ALIGNED = ("barrier_arrive", "product", "tensor_load", "tensor_store", "tensor_wait", "tensor_use")
"""What all threads of a warp have to reach together: "if all threads in the warp execute the same instruction"."""


class Schedule:
    """One schedule of `trace`.

    steps      of its warps, if they have been changed
    laziness   0 to 1: how much rather warps run than what is asynchronous is done
    is_exact   whether waits have to find the phase over that they found when the trace was made
    accesses   whether to look at what is read and written
    most       problems to look for
    ignores    how problems begin that are none
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
        ignores: tuple[str, ...] = (),
    ) -> None:
        self.trace, self.laziness, self.is_exact, self.accesses = trace, laziness, is_exact, accesses
        self.most, self.ignores = most, ignores
        self.steps = trace.steps if steps is None else steps
        self.random = random.Random(seed)
        self.slow = self._slow_warps(seed % 3)
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
        self.are_apart: set[int] = set()
        """Warps of which some threads have waited for an mbarrier without the others, and have not met them since."""
        self.mute = -1
        """A wait that tells its threads nothing: is there anything then that they do not know when they go on?"""
        self.untold: dict[int, list[tuple[Step, Any, bool]]] = defaultdict(list)
        self.published: dict[Any, set[Any]] = defaultdict(set)
        """Agent or barrier -> mbarriers whose making a fence lies behind: relaxed arrivals tell of them, too."""
        self.running = [trace.per_block] * trace.record.blocks
        """Warps of each block that have not left."""
        self.started: dict[Any, set[int]] = defaultdict(set)
        """Warp or barrier -> blocks that have met: they are known to have started."""
        self.problems: dict[str, None] = {}
        self.threads = 32 * len(self.steps)
        self.doers: dict[str, Callable[[int, Step], object]] = {}
        """Kind of a step -> the method that does it."""

    def run(self) -> list[str]:
        """What is wrong, nothing if nothing is."""
        position = [0] * len(self.steps)
        live = [i for i, steps in enumerate(self.steps) if steps]
        quick = [i for i in live if i not in self.slow]
        # without those that have found that they cannot go on, since anything else was done
        ready, ready_quick = live[:], quick[:]
        while live and len(self.problems) < self.most:
            if self.queues and (not ready or self.random.random() > self.laziness):
                queue = self.queues[self._below(len(self.queues))]
                queue.popleft()()
                if not queue:
                    self.queues = [other for other in self.queues if other is not queue]
                ready, ready_quick = live[:], quick[:]
                continue
            if not ready:
                for i in live:
                    self.report("hangs", self.steps[i][position[i]])
                break
            among = ready_quick or ready
            warp = among[self._below(len(among))]
            steps, at = self.steps[warp], position[warp]
            can_go_on, has_changed = True, False
            for _ in range((1, 4, 30)[self._below(3)]):
                step = steps[at]
                can_go_on = self._do(warp, step)
                if not can_go_on:
                    break
                at += 1
                has_changed = has_changed or step.kind not in ("access", "wait")
                if at == len(steps):
                    break
            position[warp] = at
            is_over = at == len(steps)
            if is_over:
                live.remove(warp)
                quick = [i for i in live if i not in self.slow]
            if has_changed:
                ready, ready_quick = live[:], quick[:]
            if is_over or not can_go_on:
                for some in (ready, ready_quick):
                    if warp in some:
                        some.remove(warp)
        while self.queues and len(self.problems) < self.most:
            self.queues[-1].popleft()()
            self.queues = [queue for queue in self.queues if queue]
        return list(self.problems)

    def _below(self, count: int) -> int:
        """A number as random.choice draws it, in half the time."""
        bits = count.bit_length()
        while (number := self.random.getrandbits(bits)) >= count:
            pass
        return number

    def _slow_warps(self, way: int) -> set[int]:
        """Those that run only if no other can: none, a block's, or any of them."""
        count, blocks = len(self.steps), self.trace.record.blocks
        if way == 0:
            return set()
        if way == 1 and blocks > 1:
            block = self.random.randrange(blocks)
            return {i for i in range(count) if i // self.trace.per_block == block}
        return set(self.random.sample(range(count), self.random.randrange(1, count)))

    def left(self) -> dict[Any, tuple[int, int, int]]:
        """Of each mbarrier phases that are over, arrivals and bytes that the next still waits for."""
        return {place: (b.phase, b.pending, b.bytes) for place, b in self.barriers.items()}

    def report(self, what: str, step: Step) -> None:
        if not (self.ignores and what.startswith(self.ignores)):
            self.problems.setdefault(f"{what}: {self.trace.text(step.ops)}")

    def _do(self, warp: int, step: Step) -> bool:
        """Whether the step could be done."""
        if step.kind != "wait" and self.untold[warp]:
            self._know(warp)
        if step.kind in ALIGNED and warp in self.are_apart:
            self.report("threads of the warp have waited apart, and have not met", step)
        kind = step.kind
        if kind not in self.doers:
            self.doers[kind] = getattr(self, f"_{kind}")
        return self.doers[kind](warp, step) is not False

    def _know(self, warp: int) -> None:
        clocks = self.clocks
        for step, over, is_relaxed in self.untold.pop(warp):
            for agent in step.agents:
                known = clocks.known[agent], clocks.fenced[agent], clocks.of_reads(agent)
                if is_relaxed or any((given > own).any() for given, own in zip(over, known, strict=True)):
                    self.report("untold", step)

    # ---- accesses

    def _access(self, warp: int, step: Step) -> None:
        if 0 in self.running:
            self._find_memory(step)
        if not self.accesses:
            return
        clocks = self.clocks
        for agent, reads, writes in step.touches:
            known, of_reads = clocks.known[agent], clocks.of_reads(agent)
            is_initial = warp not in self.has_waited
            wrong = clocks.touch(agent, int(known[agent]), known, of_reads, reads, writes, is_initial)
            if wrong:
                self.report(wrong, step)

    def _find_memory(self, step: Step) -> None:
        for _, reads, writes in step.touches:
            homes = np.unique(self.trace.homes[np.concatenate([reads, writes])])
            if any(not self.running[home] for home in homes if home >= 0):
                self.report("the block whose memory it is has left", step)

    def _same_write(self, warp: int, step: Step) -> None:
        """Threads of a warp write the same to the same place at once: each of them has written it."""
        if not self.accesses:
            return
        clocks, (writer,) = self.clocks, step.args
        self.sequence[writer] += 1
        together: dict[int, list[int]] = {}
        for agent, _, writes in step.touches:
            together.setdefault(id(writes), []).append(agent)
        for agents in together.values():
            known = clocks.known[agents].min(axis=0)
            known[writer] = EVER
            of_reads = np.maximum(clocks.known[agents], clocks.seen[agents]).min(axis=0)
            _, reads, writes = next(touch for touch in step.touches if touch[0] == agents[0])
            wrong = clocks.touch(writer, self.sequence[writer], known, of_reads, reads, writes, False)
            if wrong:
                self.report(wrong, step)
        for agent, _, writes in step.touches:
            clocks.known[agent, writer] = self.sequence[writer]
            # each one's write has to be over before others may follow
            clocks.read[agent, writes] = clocks.known[agent, agent]

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
        if self.clocks.known[step.agents[0], agent] < clock and place not in self.published[step.agents[0]]:
            self.report("not after the mbarrier was made", step)
        return self.barriers[place]

    def _exit(self, warp: int, step: Step) -> None:
        self.running[step.args[0]] -= 1
        for agent, copies in self._copies(step):
            if self.clocks.known[agent, copies] < self.sequence[copies]:
                self.report("leaves with copies under way", step)
        stores = self.trace.numbers.get(("bulk store", warp))
        if stores is not None and self.clocks.known[list(step.agents), stores].max() < self.sequence[stores]:
            self.report("leaves with bulk stores under way, which read its memory", step)

    def _copies(self, step: Step) -> list[tuple[int, int]]:
        """(threads, their copies) of a step."""
        numbers = self.trace.numbers
        return [(agent, numbers["copy", agent]) for agent in step.agents if ("copy", agent) in numbers]

    def _turn(self, place: Any, step: Step, change: Callable[[Barrier], bool]) -> None:
        if not self.running[place // self.trace.record.span]:
            self.report("the block whose mbarrier it is has left", step)
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
        is_remote = warp // self.trace.per_block != place // self.trace.record.span
        for agent in step.agents:
            self.meetings[place].arrive(self.clocks, agent, order, is_remote)
        if arrivals:
            self._turn(place, step, lambda barrier: barrier.arrive(arrivals, announced))
        else:
            self._turn(place, step, lambda barrier: barrier.announce(announced))

    def _wait(self, warp: int, step: Step) -> bool:
        place, parity, phase, order = step.args
        barrier = self._find(place, step)
        if barrier is None:
            return True
        if not barrier.is_over(parity):
            return False
        if self.is_exact and barrier.phase - 1 != phase:
            self.report(f"waits for phase {phase}, {barrier.phase - 1} is over", step)
        meeting = self.meetings[place]
        if step.ops == (self.mute,):
            self.untold[warp].append((step, meeting.told(order).copy(), meeting.is_relaxed))
        else:
            for agent in step.agents:
                meeting.wait(self.clocks, agent, order)
        self.has_waited.add(warp)
        if sum(step.counts) < LANES:
            self.are_apart.add(warp)
        return True

    # ---- barriers of warps, blocks, clusters

    def _warp(self, warp: int, step: Step) -> None:
        self.clocks.join(step.agents)
        self._meet(warp, step)

    def _exchange(self, warp: int, step: Step) -> None:
        if self.trace.votes_order:
            self.clocks.exchange(step.agents)
        self._meet(warp, step)

    def _meet(self, warp: int, step: Step) -> None:
        if sum(step.counts) == LANES:
            self.are_apart.discard(warp)

    def _barrier_arrive(self, warp: int, step: Step) -> None:
        key, expected, order = step.args
        state = self.named[key]
        for agent in step.agents:
            self.meetings[key].arrive(self.clocks, agent, order)
            self.published[key] |= self.published[agent]
        self.started[key] |= self.started[warp] | {warp // self.trace.per_block}
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
        if (warp, key) not in self.entered:
            self.report("waits at a barrier without having arrived", step)
        elif self.named[key][1] <= self.entered[warp, key]:
            return False
        self.entered.pop((warp, key), None)
        for agent in step.agents:
            self.meetings[key].wait(self.clocks, agent)
            self.published[agent] |= self.published[key]
        self.started[warp] |= self.started[key]
        self.has_waited.add(warp)
        return True

    def _fence(self, warp: int, step: Step) -> None:
        kind, clocks = step.args[0], self.clocks
        for agent in step.agents:
            if kind.startswith("proxy.async"):
                np.maximum(clocks.fenced[agent], clocks.known[agent], out=clocks.fenced[agent])
                clocks.tick(agent)
            elif kind.startswith("mbarrier_init"):
                self.published[agent] |= {place for place, (maker, _) in self.made.items() if maker == agent}
            elif kind == "tcgen05.after":
                np.maximum(clocks.tensor[agent], clocks.of_issuer(agent), out=clocks.tensor[agent])
            elif kind == "tcgen05.before":
                np.maximum(clocks.known[agent], clocks.waited[agent], out=clocks.known[agent])
