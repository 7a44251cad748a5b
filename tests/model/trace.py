# SPDX-License-Identifier: Apache-2.0
"""A record of events as steps that replay.py goes through: threads of a warp that synchronize together are one agent,
bytes that are always accessed together are one class, accesses between two synchronizations are one step.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.model.events import ALL, TENSOR, TENSOR_COLUMNS, TENSOR_LANES, Event, Record
from tests.model.ptx import LANES

SYNCHRONIZES = ("wait", "arrive", "copy_arrive", "bulk", "init", "warp", "fence", "tensor", "tensor_copy")
"""Kinds of events whose threads have to be told apart from others of their warp."""

PLAIN = ("read", "write")
TENSOR_WORK = ("tensor", "tensor_copy")


@dataclass(eq=False)
class Step:
    """kind, args and width of an event.

    ops        instructions that it stands for
    agents     groups of threads that take part; counts: threads of each
    touches    (agent, classes that it reads, that it writes)
    operands   of products: classes of each
    """

    kind: str
    ops: tuple[int, ...]
    agents: tuple[int, ...]
    counts: tuple[int, ...]
    args: tuple[Any, ...] = ()
    touches: tuple[tuple[int, Any, Any], ...] = ()
    width: int = 0
    operands: tuple[Any, ...] = ()

    def changed(self, **what: Any) -> Step:
        return replace(self, **what)


@dataclass(eq=False)
class Trace:
    """steps: of each warp; agents: names of all; classes: how many; operand: those that products read; homes: of each
    the block in whose shared memory it is, -1 in tensor memory."""

    record: Record
    copies_are_fenced: bool = True
    votes_order: bool = False
    unscoped: str = ""
    steps: list[list[Step]] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)
    is_async: list[bool] = field(default_factory=list)
    classes: int = 0
    sizes: Any = None
    operand: Any = None
    homes: Any = None
    readers: Any = None
    """[classes, most] agents that read them, or write them together with others; agent 0 where there are less."""
    numbers: dict[Any, int] = field(default_factory=dict)

    def agent(self, key: Any, is_async: bool) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.agents)
            self.agents.append(str(key))
            self.is_async.append(is_async)
        return self.numbers[key]

    def name(self, agent: int) -> str:
        """Of an agent, without its threads."""
        kind, number = next(key for key, value in self.numbers.items() if value == agent)[:2]
        if kind == "copy":
            return f"cp.async of {self.name(number)}"
        return f"{kind} {number:#x}" if kind in ("bulk", "st.async") else f"{kind} {number % self.per_block}"

    def started_by(self, warp: int) -> list[int]:
        """Agents of a warp's products of tcgen05, one for each accumulator, and of its copies."""
        return [number for key, number in self.numbers.items() if key[0] in TENSOR_WORK and key[1] == warp]

    @property
    def per_block(self) -> int:
        """Warps of a block."""
        return len(self.record.warps) // self.record.blocks

    def text(self, ops: tuple[int, ...]) -> str:
        return "; ".join(f"{op}: {self.record.program.ops[op].text[:90]}" for op in ops[:3])


UNSCOPED = ("", "reads", "reads and fenced writes")


def make(record: Record, copies_are_fenced: bool = True, votes_order: bool = False, unscoped: str = "") -> Trace:
    """As the PTX ISA says, or as Hopper does:

    copies_are_fenced   whether tensor cores see what cp.async has written only behind a proxy fence, or without
    votes_order         whether what threads of a warp have read may be overwritten once all have voted or shuffled: the
                        ISA says so of a barrier of the warp alone
    unscoped            one of UNSCOPED: what an mbarrier hands on of what threads of other blocks did where they
                        arrive, or others wait, in the block's scope. Nothing, says the ISA. "reads": that theirs of
                        their own block's memory are over. They are before the arrival in the block's scope; what
                        overwrites those bytes comes of the arrival, and meets them in that memory. "and fenced writes":
                        also what they wrote to that memory before a proxy fence, to the tensor cores of their block
    """
    if unscoped not in UNSCOPED:
        raise ValueError(f"unscoped: expected one of {UNSCOPED}, got {unscoped!r}")
    trace = Trace(record, copies_are_fenced, votes_order, unscoped)
    unit = min((event.width for warp in record.warps for event in warp.events if event.width), default=4)
    sets = _Sets(min(unit, 16), record)
    for number, warp in enumerate(record.warps):
        trace.steps.append(list(_steps(trace, sets, number, warp.events)))
    sets.resolve(trace)
    return trace


class _Sets:
    """Sets of positions; those that are members of the same sets become one class."""

    def __init__(self, unit: int, record: Record) -> None:
        self.unit = unit
        top = TENSOR + record.blocks * TENSOR_LANES * TENSOR_COLUMNS * 4
        self.marks = np.zeros(top // unit + 1, np.uint64)
        self.random = np.random.default_rng(0)
        self.units: list[Any] = []
        self.known: dict[bytes, int] = {}

    def add(self, events: list[tuple[Any, int]]) -> int:
        """Number of the set of all positions, `width` bytes each."""
        key = b"".join(at.tobytes() + bytes([width]) for at, width in events)
        if key not in self.known:
            parts = [(at[:, None] // self.unit + np.arange(max(1, width // self.unit))).ravel() for at, width in events]
            units = np.unique(np.concatenate(parts)) if parts else np.zeros(0, np.int64)
            self.marks[units] ^= self.random.integers(1, 1 << 63, dtype=np.uint64)
            self.known[key] = len(self.units)
            self.units.append(units)
        return self.known[key]

    def resolve(self, trace: Trace) -> None:
        """Replace numbers of sets by classes, in all steps."""
        used = np.zeros(len(self.marks), np.bool_)
        for units in self.units:
            used[units] = True
        # a class is of one block, whoever accesses those of several at once
        homes = np.arange(len(self.marks)) * self.unit // trace.record.span
        homes[TENSOR // self.unit :] = -1
        self.marks ^= self.random.integers(1, 1 << 63, size=int(homes.max()) + 2, dtype=np.uint64)[homes]
        _, inverse, counts = np.unique(self.marks[used], return_inverse=True, return_counts=True)
        numbers = np.full(len(self.marks), -1)
        numbers[used] = inverse
        classes = [np.unique(numbers[units]) for units in self.units]
        is_shared = np.zeros(len(counts), np.bool_)
        is_shared[numbers[: TENSOR // self.unit][used[: TENSOR // self.unit]]] = True
        trace.classes, trace.sizes = len(counts), counts * self.unit
        trace.homes = np.full(trace.classes, -1)
        trace.homes[numbers[used]] = homes[used]
        trace.operand = np.zeros(trace.classes, np.bool_)
        is_reader = np.zeros((trace.classes, len(trace.agents)), np.bool_)
        for steps in trace.steps:
            for step in steps:
                step.touches = tuple((a, classes[r], classes[w]) for a, r, w in step.touches)
                step.operands = tuple(classes[number] for number in step.operands)
                for agent, reads, writes in step.touches:
                    is_reader[reads, agent] = True
                    if step.kind == "same_write":
                        is_reader[writes, agent] = True
                    if step.kind in ("product", "tensor"):
                        trace.operand[reads[is_shared[reads]]] = True
        most = max(1, int(is_reader.sum(axis=1).max(initial=0)))
        order = np.argsort(~is_reader, axis=1, kind="stable")[:, :most]
        trace.readers = np.where(np.take_along_axis(is_reader, order, axis=1), order, 0)


def _groups(events: list[Event]) -> list[int]:
    """Threads of a warp that always synchronize together, as bits."""
    groups = [ALL]
    for lanes in {event.lanes for event in events if event.kind in SYNCHRONIZES}:
        groups = [part for group in groups for part in (group & lanes, group & ~lanes) if part]
    return groups


def _steps(trace: Trace, sets: _Sets, number: int, events: list[Event]) -> Iterator[Step]:
    groups = _groups(events)
    agents = [trace.agent(("warp", number, f"{group:x}"), False) for group in groups]
    pending: dict[tuple[int, str], list[tuple[Any, int]]] = defaultdict(list)
    ops: list[int] = []
    has_read = is_apart = False

    def flush() -> Iterator[Step]:
        if not pending:
            return
        touched = {agent for agent, _ in pending}
        touches = [
            (a, sets.add(pending.get((a, "read"), [])), sets.add(pending.get((a, "write"), []))) for a in touched
        ]
        yield Step("access", tuple(dict.fromkeys(ops)), tuple(touched), (), (), tuple(touches))
        pending.clear()
        ops.clear()

    products: list[Event] = []

    def multiply() -> Iterator[Step]:
        """Products that were started one after the other."""
        if products:
            whole = Event("product", products[0].op)
            whole.args = ([part for event in products for part in event.args[0]],)
            touches = _touches(trace, sets, number, whole, groups, agents)
            step = Step("product", (products[0].op,), tuple(agents), (), (), tuple(touches))
            step.operands = tuple(sets.add([(at, 16)]) for _, at in whole.args[0])
            yield step
            products.clear()

    for event in events:
        if event.kind == "product":
            yield from flush()
            products.append(event)
            continue
        if event.kind != "exchange" or (has_read and len(groups) > 1):
            yield from multiply()
        if event.kind == "write" and len(groups) > 1 and len(np.unique(event.at)) < len(event.at):
            yield from flush()
            writer = trace.agent(("together, warp", number), False)
            touches = [(a, sets.add([]), sets.add([(at, event.width)])) for a, at in _by_group(event, groups, agents)]
            yield Step("same_write", (event.op,), tuple(a for a, _, _ in touches), (), (writer,), tuple(touches))
            continue
        if event.kind in PLAIN:
            for agent, at in _by_group(event, groups, agents):
                pending[agent, event.kind].append((at, event.width))
            ops.append(event.op)
            has_read = True
            continue
        if event.kind == "exchange":
            if len(groups) == 1 or not (has_read or is_apart):
                continue
            has_read = False
        is_apart = (is_apart or event.kind == "wait") and event.lanes != ALL
        yield from flush()
        own = [(a, (event.lanes & g).bit_count()) for a, g in zip(agents, groups, strict=True) if event.lanes & g]
        step = Step(event.kind, (event.op,), tuple(a for a, _ in own), tuple(c for _, c in own), event.args)
        step.width = event.width
        step.touches = tuple(_touches(trace, sets, number, event, groups, agents))
        yield step
    yield from multiply()
    yield from flush()
    yield Step("exit", (events[-1].op,) if events else (), tuple(agents), (), (trace.record.warps[number].block,))


def _by_group(event: Event, groups: list[int], agents: list[int]) -> Iterator[tuple[int, Any]]:
    if len(groups) == 1:
        yield agents[0], event.at
        return
    for agent, group in zip(agents, groups, strict=True):
        if group & event.lanes:
            yield agent, event.at[_among(event.lanes, group)]


@functools.lru_cache(maxsize=4096)
def _among(lanes: int, group: int) -> Any:
    """Which of some lanes are in a group."""
    return np.array([bool(group >> i & 1) for i in range(LANES) if lanes >> i & 1])


def _touches(
    trace: Trace, sets: _Sets, number: int, event: Event, groups: list[int], agents: list[int]
) -> Iterator[tuple[int, int, int]]:
    """What something asynchronous reads and writes, by the agent that does it."""
    if event.kind == "copy":
        for agent, at in _by_group(event, groups, agents):
            yield trace.agent(("copy", agent), not trace.copies_are_fenced), sets.add([]), sets.add([(at, event.width)])
    elif event.kind == "store_async":
        for place in np.unique(event.args[0]):
            at = event.at[event.args[0] == place]
            yield trace.agent(("st.async", int(place)), False), sets.add([]), sets.add([(at, event.width)])
    elif event.kind == "bulk":
        yield trace.agent(("bulk", event.args[0]), True), sets.add([]), sets.add([(event.at, event.width)])
    elif event.kind == "bulk_read":
        yield trace.agent(("bulk store", number), True), sets.add([(event.at, event.width)]), sets.add([])
    elif event.kind == "product":
        for side in dict.fromkeys(side for side, _ in event.args[0]):
            operands = [(at, 16) for own, at in event.args[0] if own == side]
            yield trace.agent(("wgmma", number), True), sets.add(operands), sets.add([])
    elif event.kind in ("tensor", "tensor_copy"):
        results = [int(at[0]) for is_written, at, _ in event.args[0] if is_written and event.kind == "tensor"]
        agent = trace.agent((event.kind, number, *results), True)
        for is_written, at, width in event.args[0]:
            touched, nothing = sets.add([(at, width)]), sets.add([])
            yield (agent, nothing, touched) if is_written else (agent, touched, nothing)
    elif event.kind in ("tensor_load", "tensor_store"):
        # a thread has a lane, and waits for what it has started itself
        of_lanes, nothing = event.at.reshape(LANES, -1), sets.add([])
        for thread, group in zip(agents, groups, strict=True):
            own = [bool(group >> lane & 1) for lane in range(LANES)]
            agent, touched = trace.agent((event.kind, number, thread), True), sets.add([(of_lanes[own].ravel(), 4)])
            yield (agent, nothing, touched) if event.kind == "tensor_store" else (agent, touched, nothing)
    elif event.kind == "tensor_use":
        yield trace.agent((event.kind, number), True), sets.add([]), sets.add([(event.at, event.width)])
