# SPDX-License-Identifier: Apache-2.0
"""mbarriers: what counts, and the instructions of threads. What is asynchronous arrives in asynchronous.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.model.memory import SharedMemory
from tests.model.moves import addresses, put
from tests.model.ptx import LANES, Op, Run, instruction, is_branch

OVER = np.zeros(LANES, np.bool_), np.ones(LANES, np.bool_)


@dataclass(eq=False)
class Barrier:
    """A phase is over when `expected` arrivals and as many bytes as were announced have come; then the next begins.

    phase   how many are over
    """

    expected: int
    pending: int
    bytes: int = 0
    phase: int = 0

    @classmethod
    def of(cls, expected: int) -> Barrier:
        return cls(expected, expected)

    def arrive(self, count: int = 1, announced: int = 0) -> bool:
        """Whether the phase is over now. Of more arrivals than it expects an error."""
        self.bytes += announced
        self.pending -= count
        if self.pending < 0:
            raise AssertionError(f"more arrivals than the {self.expected} that the mbarrier expects")
        return self._turn()

    def announce(self, count: int) -> bool:
        self.bytes += count
        return self._turn()

    def complete(self, count: int) -> bool:
        self.bytes -= count
        return self._turn()

    def is_over(self, parity: int) -> bool:
        """Whether the latest phase of that parity is, as far as waiting for a parity can tell."""
        return (self.phase & 1) != parity

    def _turn(self) -> bool:
        if self.pending or self.bytes:
            return False
        self.pending = self.expected
        self.phase += 1
        return True


def find(warp: Any, place: int) -> Barrier:
    found: Barrier | None = warp.cluster.mbarriers.get(place)
    if found is None:
        raise AssertionError(f"expected an mbarrier at position {place:#x} of shared memory, nobody has made one")
    return found


def _places(warp: Any, lanes: Any, address: tuple[int, int]) -> list[tuple[int, Any]]:
    """See each_place; an mbarrier of this block's memory has its rank in its address already."""
    at = addresses(warp, *address)
    at = at if lanes is None else at[lanes]
    words = at.tobytes()
    if words == words[: at.itemsize] * len(at):
        return [(warp.shared.place(int(at[0]), 8), lanes)]
    return each_place(warp, lanes, warp.shared.position(at, 8))


def each_place(warp: Any, lanes: Any, places: Any) -> list[tuple[int, Any]]:
    """Positions of mbarriers, and the lanes that have it."""
    numbers = np.arange(LANES) if lanes is None else np.flatnonzero(lanes)
    if (places == places[0]).all():
        return [(int(places[0]), lanes)]
    found = []
    for place in np.unique(places):
        own = np.zeros(LANES, np.bool_)
        own[numbers[places == place]] = True
        found.append((int(place), own))
    return found


def count(lanes: Any) -> int:
    return LANES if lanes is None else int(lanes.sum())


@instruction("mbarrier.init")
def _init(op: Op) -> Run:
    address, expected = op.address(0, 32), op.program.slot(op.args[1], op.scope, 32)

    def init(warp: Any, lanes: Any) -> None:
        for place, own in _places(warp, lanes, address):
            first = int(np.argmax(own)) if own is not None else 0
            number = int(warp.r[expected][first])
            warp.cluster.mbarriers[place] = Barrier.of(number)
            if warp.events:
                warp.events.init(op.number, own, place, number)

    return init


@instruction("mbarrier.inval")
def _invalidate(op: Op) -> Run:
    address = op.address(0, 32)

    def invalidate(warp: Any, lanes: Any) -> None:
        for place, _ in _places(warp, lanes, address):
            del warp.cluster.mbarriers[place]

    return invalidate


def order_of(op: Op) -> str:
    """ "relaxed", or the scope: the block's where none is said."""
    return next((part for part in ("relaxed", "cluster") if part in op.parts), "cta")


@instruction("mbarrier.arrive", "mbarrier.expect_tx")
def _arrive(op: Op) -> Run:
    is_arrival, announces = op.parts[1] == "arrive", "expect_tx" in op.parts
    if "noComplete" in op.parts:
        raise NotImplementedError
    at = 0 if op.args[0].startswith("[") else 1
    address = op.address(at, 32)
    number = op.program.slot(op.args[at + 1], op.scope, 32) if len(op.args) > at + 1 else None
    order = order_of(op)

    def arrive(warp: Any, lanes: Any) -> None:
        for place, own in _places(warp, lanes, address):
            amount = 1 if number is None else int(warp.r[number][0 if own is None else int(np.argmax(own))])
            barrier = find(warp, place)
            many = count(own)
            announced, arrivals = (amount * many, many) if announces else (0, amount * many)
            if warp.events:
                warp.events.arrive(op.number, own, place, arrivals if is_arrival else 0, announced, order)
            if is_arrival:
                barrier.arrive(arrivals, announced)
            else:
                barrier.announce(announced)

    return arrive


@instruction("mbarrier.try_wait", "mbarrier.test_wait")
def _wait(op: Op) -> Run:
    order = order_of(op)
    if "parity" not in op.parts or order == "relaxed":
        raise NotImplementedError
    done, address = op.program.slot(op.args[0], op.scope, 1), op.address(1, 32)
    parity = op.program.slot(op.args[2], op.scope, 32)
    spins: list[bool] = []

    def wait(warp: Any, lanes: Any) -> Any:
        if not spins:
            spins.append(_spins(op))
        targets = []
        for place, own in _places(warp, lanes, address):
            if place // warp.shared.SPAN != warp.block.rank:
                raise IndexError(f"a wait for mbarrier {place:#x}, which is another block's")
            wanted = int(warp.r[parity][0 if own is None else int(np.argmax(own))])
            targets.append((place, own, find(warp, place), wanted))
        over = all(barrier.is_over(wanted) for _, _, barrier, wanted in targets)
        if not over and spins[0]:
            reason = ", ".join(f"mbarrier {place:#x} parity {wanted}" for place, _, _, wanted in targets)
            return warp.cluster.wait(
                warp, lambda: all(barrier.is_over(wanted) for _, _, barrier, wanted in targets), reason
            )
        warp.asks = not over
        for place, own, barrier, wanted in targets:
            is_over = barrier.is_over(wanted)
            put(warp, done, own, OVER[is_over] if own is None else is_over)
            if is_over and warp.events:
                warp.events.wait(op.number, own, place, wanted, barrier.phase - 1, order)
        return True

    return wait


def _spins(op: Op) -> bool:
    """Whether a wait that fails is tried again at once, as nothing else is between it and a branch back."""
    ops = op.program.ops
    for other in ops[op.number + 1 : op.number + 4]:
        if not is_branch(other):
            return False
        if other.parts[0] == "bra" and op.number - 2 <= op.program.target(other) <= op.number:
            return True
    return False


@instruction("mapa")
def _map(op: Op) -> Run:
    source, rank, target = op.source(1, 32), op.program.slot(op.args[2], op.scope, 32), op.target()
    if op.kind != "u32":
        raise NotImplementedError
    offset = np.uint32((1 << SharedMemory.RANK) - 1)

    def map_(warp: Any, lanes: Any) -> None:
        new = (warp.r[source] & offset) | (warp.r[rank] << np.uint32(SharedMemory.RANK))
        put(warp, target, lanes, new if lanes is None else new[lanes])

    return map_


@instruction("fence")
def _fence(op: Op) -> Run:
    kind = ".".join(op.parts[1:])

    def fence(warp: Any, lanes: Any) -> None:
        if warp.events:
            warp.events.fence(op.number, lanes, kind)

    return fence
