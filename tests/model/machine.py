# SPDX-License-Identifier: Apache-2.0
"""Blocks of a cluster that run a program: warps interleaved at random, what is asynchronous done late and in any order.

A warp runs its threads in lockstep as long as they agree on where to go; after a branch that they take differently the
part that is behind runs first, until they meet. Where a part has to wait (for an mbarrier, a barrier, threads of its
own warp), others of the warp and other warps run. Copies and products are `Task`s in queues: those of one queue are
done in order, and it is a matter of chance which queue's first task is done next, and when. If nothing can run and
there is no task, the kernel hangs, and the model says who waits for what.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.model import (  # noqa: F401
    alu,
    asynchronous,
    blackwell,
    convert,
    fields,
    hopper,
    mbarriers,
    moves,
    tensor_copies,
    warps,
)
from tests.model.memory import GlobalMemory, SharedMemory
from tests.model.ptx import FALSE, LANES, TRUE, Branch, Program
from tests.model.tasks import Task

MOST_VAIN = 10000
"""Questions in a row whether a phase is over, all in vain and without anything done meanwhile: nothing can go on."""

PATIENCE = 100
"""Of slow warps: so many such questions."""

RUNS = (1, 20, 300, 2000)
"""How many instructions a warp runs before another one may: one of these, by chance."""

LANE = np.arange(LANES)
ALL = np.ones(LANES, np.bool_)


class Hang(AssertionError):
    """Nothing can go on."""


@dataclass(eq=False)
class Part:
    """Threads of a warp that are at the same instruction. lanes: None is all 32."""

    at: int
    lanes: Any
    waits: Callable[[], bool] | None = None
    reason: str = ""

    @property
    def mask(self) -> Any:
        return ALL if self.lanes is None else self.lanes


@dataclass(eq=False)
class Block:
    rank: int
    number: int
    barriers: dict[int, list[int]] = field(default_factory=dict)
    """Named barriers: threads that have arrived, how often it has opened, results of a reduction."""
    columns: dict[int, int] = field(default_factory=dict)
    """Of tensor memory, that have been asked for: first -> how many."""


class Warp:
    """Registers `r` by slot, parts, and what it has under way."""

    def __init__(self, cluster: Cluster, block: Block, number: int) -> None:
        self.cluster, self.block, self.number = cluster, block, number
        self.shared, self.memory = cluster.shared, cluster.memory
        self.r: list[Any] = []
        self.part = Part(0, None)
        """That runs."""
        self.parts = [self.part]
        self.cluster_phase = 0
        self.asks = False
        """It has asked whether a phase is over, and it is not."""
        self.events = cluster.events.of_warp(self) if cluster.events else None
        self.pending: dict[int, Any] = {}
        """Slot -> registers that a product will write, behind the newest of `products`."""
        self.products: list[list[Task]] = [[]]
        self.copies: list[list[Task]] = [[]]
        self.bulk_copies: list[list[Task]] = [[]]
        self.queues: dict[str, deque[Task]] = {}
        self.tensor_loads: list[tuple[Task, dict[int, Any]]] = []
        self.tensor_stores: list[Task] = []
        self.tensor_work: list[Task] = []
        """Products and copies of tcgen05 that may be under way."""

    @property
    def name(self) -> str:
        return f"block {self.block.number} warp {self.number}"

    def can_run(self) -> bool:
        parts = self.parts
        if len(parts) == 1:
            return parts[0].waits is None or parts[0].waits()
        return any(part.waits is None or part.waits() for part in parts)


class Cluster:
    """Blocks that run `program` together.

    parameters   bytes of all parameters of the kernel
    first        number of the cluster's first block
    grid         number of blocks in all
    blocks       of the cluster
    rows         of the grid: a cluster has blocks of all of them
    size         bytes of a block's shared memory
    seed         of everything that is left to chance
    laziness     0 to 1: how much rather warps run than tasks are done
    events       who writes down what happens, or None
    slow         warps of a block that run only if nothing else does
    """

    def __init__(
        self,
        program: Program,
        parameters: bytes,
        memory: GlobalMemory,
        *,
        first: int = 0,
        grid: int = 1,
        blocks: int = 1,
        rows: int = 1,
        size: int,
        seed: int = 0,
        laziness: float = 0.5,
        events: Any = None,
        tensor_maps: dict[int, Any] | None = None,
        slow: Collection[int] = (),
    ) -> None:
        self.slow = slow
        self.program, self.parameters, self.memory, self.events = program, parameters, memory, events
        self.shared = SharedMemory(blocks, size)
        self.size, self.grid, self.rows, self.laziness = size, grid, rows, laziness
        self.random = random.Random(seed)
        self.tensor_maps = tensor_maps or {}
        self.vain = 0
        self.mbarriers: dict[int, mbarriers.Barrier] = {}
        self.tensor_memory: dict[int, Any] = {}
        self.columns: dict[int, int] = {}
        """Where so many columns of tensor memory are, for who asks for them."""
        self.queues: list[deque[Task]] = []
        self.arrived = [0, 0]
        """At the cluster's barrier: threads, and how often it has opened."""
        self._counts, self._block_counts = [0] * len(program.ops), [0] * len(program.ops)
        self.blocks = [Block(rank, first + rank) for rank in range(blocks)]
        self.warps = [Warp(self, block, i) for block in self.blocks for i in range(program.threads // LANES)]
        self._orders = [self.random.sample(range(len(self.warps)), len(self.warps)) for _ in range(16)]
        own = [slot for slot, value in enumerate(program.initial) if isinstance(value, str | int)]
        for warp in self.warps:
            warp.r = list(program.initial)
            for slot in own:
                warp.r[slot] = self._initial(program.initial[slot], warp)

    @property
    def threads(self) -> int:
        return len(self.warps) * LANES

    @property
    def counts(self) -> list[int]:
        """How often each instruction ran: by itself, and with its block."""
        counts = self._counts[:]
        for block in filter(None, self.program.blocks):
            for i in range(block.first, block.first + block.size):
                counts[i] += self._block_counts[block.first]
        return counts

    def _initial(self, value: Any, warp: Warp) -> Any:
        if isinstance(value, int):
            return np.full(LANES, value, np.uint64)
        blocks, rank = len(self.blocks), warp.block.rank
        cluster, beside = warp.block.number // blocks, blocks // self.rows
        values: dict[str, Any] = {
            "%tid.x": warp.number * LANES + LANE,
            "%ctaid.x": cluster * beside + rank % beside,
            "%ctaid.y": rank // beside,
            "%nctaid.x": self.grid // self.rows,
            "%nctaid.y": self.rows,
            "%ntid.x": self.program.threads,
            "%laneid": LANE,
            "%warpid": warp.number,
            "%cluster_ctarank": rank,
            "%cluster_ctaid.x": rank % beside,
            "%cluster_ctaid.y": rank // beside,
            "%cluster_nctarank": blocks,
            "%cluster_nctaid.x": beside,
            "%cluster_nctaid.y": self.rows,
            "%clusterid.x": cluster,
            "%nclusterid.x": self.grid // blocks,
        }
        if value in self.program.shared_symbols:
            number: Any = self.shared.base(rank)
        elif value in values:
            number = values[value]
        elif value[-2:] in (".y", ".z"):
            number = 1 if value.startswith(("%n", "%cluster_n")) else 0
        else:
            raise ValueError(f"{value}: expected a register that the model knows")
        return np.broadcast_to(np.asarray(number), LANES).astype(np.uint32)

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """To the end. Raises Hang, or what an instruction raised, with the instruction."""
        with np.errstate(all="ignore"):
            while True:
                queue = self._ready_queue()
                warp = None
                if queue is None or self.random.random() < self.laziness:
                    warp = self._ready_warp()
                if warp is not None and (queue is None or not self._is_slow(warp)):
                    self._run(warp, self.random.choice(RUNS))
                elif queue is not None:
                    self._do(queue)
                elif any(warp.parts for warp in self.warps):
                    raise Hang(self._who_waits())
                else:
                    return

    def _ready_warp(self) -> Warp | None:
        """Any that can run."""
        first, slow = self.random.randrange(len(self.warps)), None
        for i in self._orders[self.random.randrange(len(self._orders))]:
            warp = self.warps[i - first]
            if warp.can_run():
                if not self._is_slow(warp):
                    return warp
                slow = warp
        return slow

    def _is_slow(self, warp: Warp) -> bool:
        """Whether anything else comes first; but warps that ask in vain do not."""
        return warp.number in self.slow and self.vain < PATIENCE

    def _ready_queue(self) -> deque[Task] | None:
        """Any whose first task may be done."""
        if not self.queues:
            return None
        first = self.random.randrange(len(self.queues))
        for queue in self.queues[first:] + self.queues[:first]:
            if all(task.is_done for task in queue[0].after):
                return queue
        return None

    def add(self, task: Task, queue: deque[Task] | None = None) -> Task:
        """To be done some time: behind those of a queue, or whenever."""
        queue = deque() if queue is None else queue
        if not queue:
            self.queues.append(queue)
        queue.append(task)
        return task

    def _do(self, queue: deque[Task]) -> None:
        task = queue[0]
        self.vain = 0
        task.do()
        task.is_done = True
        queue.popleft()
        if not queue:
            self.queues = [other for other in self.queues if other is not queue]

    def _run(self, warp: Warp, count: int) -> None:
        """So many instructions, or fewer if it has to wait, or asked for something that is not there yet."""
        program, counts = self.program, self._counts
        runs, branches, blocks = program.runs, program.branches, program.blocks
        part, parts = None, warp.parts
        while count > 0:
            if len(parts) == 1:
                part = parts[0]
            elif part is None or part is not parts[0] or part.waits is not None or part.at >= parts[1].at:
                part = self._next_part(warp)
            if part is None or (part.waits is not None and not part.waits()):
                return
            at = part.at
            block, function = blocks[at], None
            if block is not None and part.waits is None and block.size <= count and _is_alone(part, parts, block.size):
                function = program.function(block, part.lanes is None)
            try:
                if block is not None and function is not None:
                    warp.part = part
                    done = function(warp, warp.r, part.lanes)
                    part.at = at + done
                    if done == block.size:
                        self._block_counts[at] += 1
                        count -= done
                    else:  # the next one ran, and has to wait
                        for i in range(at, at + done + 1):
                            counts[i] += 1
                        count -= done + 1
                else:
                    counts[at] += 1
                    count -= 1
                    branch = branches[at]
                    if branch is not None:
                        if not self._branch(warp, part, branch):
                            part = None
                        continue
                    warp.part = part
                    if runs[at](warp, part.lanes) is not False:
                        part.at, part.waits = at + 1, None
                if warp.asks:
                    # in vain: others first
                    warp.asks, self.vain = False, self.vain + 1
                    if self.vain == MOST_VAIN:
                        raise Hang(self._who_waits())
                    return
            except Hang:
                raise
            except Exception as error:
                at += getattr(error, "at", 0)
                raise type(error)(f"{warp.name}, instruction {at}: {program.ops[at].text}: {error}") from error

    def _next_part(self, warp: Warp) -> Part | None:
        """The part that is behind all others that can run; those that meet become one."""
        parts = warp.parts
        parts.sort(key=lambda part: part.at)
        for one, two in itertools.pairwise(parts):
            if one.at == two.at:
                mask = one.mask | two.mask
                parts.remove(two)
                one.lanes, one.waits = None if mask.all() else mask, None
                return self._next_part(warp)
        return next((part for part in parts if part.waits is None or part.waits()), None)

    def _branch(self, warp: Warp, part: Part, branch: Branch) -> bool:
        """Whether the part is as it was, but elsewhere."""
        part.waits = None
        if branch.predicate is None:
            return self._go(warp, part, branch.target)
        taken = warp.r[branch.predicate]
        if branch.is_negated:
            taken = ~taken
        if part.lanes is not None:
            taken = taken & part.lanes
        flags = taken.tobytes()
        if flags == FALSE:
            part.at += 1
        elif flags == (TRUE if part.lanes is None else part.lanes.tobytes()):
            return self._go(warp, part, branch.target)
        else:
            if branch.target >= 0:
                warp.parts.append(Part(branch.target, taken))
            part.at, part.lanes = part.at + 1, part.mask & ~taken
            return False
        return True

    def _go(self, warp: Warp, part: Part, target: int) -> bool:
        if target < 0:
            warp.parts.remove(part)
            return False
        part.at = target
        return True

    def wait(self, warp: Warp, is_over: Callable[[], bool], reason: str) -> bool:
        """For an instruction that has to wait: whether it need not. Else it runs again when it need not."""
        if is_over():
            return True
        warp.part.waits, warp.part.reason = is_over, reason
        return False

    def converge(self, warp: Warp, lanes: Any) -> bool:
        """For an instruction that all threads of a warp have to reach: whether they have."""
        if lanes is None or len(warp.parts) == 1:
            return True
        return self.wait(warp, lambda: len(warp.parts) == 1, "the other threads of the warp")

    def _who_waits(self) -> str:
        lines = [
            f"{warp.name} at {part.at} {self.program.ops[part.at].text[:100]}: {part.reason}"
            for warp in self.warps
            for part in warp.parts
        ]
        states = [f"mbarrier {at:#x}: {barrier}" for at, barrier in sorted(self.mbarriers.items())]
        return "\n".join(["nothing can go on", *lines, *states])


def _is_alone(part: Part, parts: list[Part], size: int) -> bool:
    """Whether so many instructions of a part meet no other part."""
    return len(parts) == 1 or (part is parts[0] and part.at + size <= parts[1].at)
