"""Blackwell's tensor memory, its products, and tensor copies: instructions around facts.meaning.

A thread's products are done in the order it starts them, its copies to tensor memory in theirs; a product comes after
the copies before it, but a copy may overtake the products before it. What was stored to tensor memory arrives some
time before the wait for it; what was loaded is in registers behind the wait.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from cute_kernels.facts import meaning
from tests.model import mbarriers
from tests.model.asynchronous import _poison
from tests.model.moves import addresses, chosen
from tests.model.ptx import LANES, Op, Run, instruction, split
from tests.model.tasks import Task
from tests.model.values import U32
from tests.model.warps import together

POISON_WORD = U32(0xFFFFFFFF)
UNKNOWN = np.full(LANES, 0x7FFFDEAD, U32)


def block_of(warp: Any) -> meaning.Block:
    """The memories of the warp's block."""
    rank, span = warp.block.rank, warp.shared.SPAN
    tensor = warp.cluster.tensor_memory.setdefault(
        rank, np.full((meaning.LANES, meaning.COLUMNS), POISON_WORD, np.uint32)
    )
    return meaning.Block(warp.shared.bytes[rank * span : (rank + 1) * span], tensor)


def one_lane(lanes: Any) -> int:
    """Of an instruction that one thread runs."""
    if lanes is None or lanes.sum() != 1:
        raise AssertionError(f"expected one thread, got {LANES if lanes is None else int(lanes.sum())}")
    return int(np.argmax(lanes))


def check_blocks(op: Op) -> None:
    if "cta_group::2" in op.parts:
        raise NotImplementedError


# ---- allocation, fences ----------------------------------------------------------------------------------------------


@instruction("tcgen05.alloc")
def _allocate(op: Op) -> Run:
    check_blocks(op)
    address, columns = op.address(0, 32), op.program.slot(op.args[1], op.scope, 32)

    def allocate(warp: Any, lanes: Any) -> None:
        if int(warp.r[columns][0]) != meaning.COLUMNS:
            raise NotImplementedError("a part of tensor memory")
        block_of(warp)
        position = warp.shared.position(addresses(warp, *address)[:1], 4)
        warp.shared.store(position, np.zeros((1, 1), np.uint32), 32)
        if warp.events:
            warp.events.write(op.number, None, position, 4)

    return together(allocate)


@instruction("tcgen05.dealloc")
def _free(op: Op) -> Run:
    def free(warp: Any, lanes: Any) -> None:
        block_of(warp).tensor[:] = POISON_WORD

    return together(free)


@instruction("tcgen05.relinquish_alloc_permit")
def _relinquish(op: Op) -> Run:
    return together(lambda warp, lanes: None)


@instruction("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def _fence(op: Op) -> Run:
    return lambda warp, lanes: None


# ---- loads and stores ------------------------------------------------------------------------------------------------


def _columns(op: Op) -> int:
    if "32x32b" not in op.parts:
        raise NotImplementedError
    return next(int(part[1:]) for part in op.parts if part[0] == "x" and part[1:].isdigit())


def _pending(warp: Any, name: str) -> list[Any]:
    """What the warp's next wait is for."""
    if not hasattr(warp, name):
        setattr(warp, name, [])
    found: list[Any] = getattr(warp, name)
    return found


@instruction("tcgen05.ld")
def _load(op: Op) -> Run:
    columns, targets, address = _columns(op), op.slots(0, 32), op.address(1, 32)

    def load(warp: Any, lanes: Any) -> None:
        where = meaning.lanes_of(warp.number, int(addresses(warp, *address)[0]), columns)
        found = block_of(warp).tensor[where].copy()
        for i, slot in enumerate(targets):
            warp.r[slot] = UNKNOWN
            _pending(warp, "tensor_loads").append((slot, found[:, i]))

    return together(load)


@instruction("tcgen05.st")
def _store(op: Op) -> Run:
    columns, sources, address = _columns(op), op.slots(1, 32), op.address(0, 32)

    def store(warp: Any, lanes: Any) -> None:
        where = meaning.lanes_of(warp.number, int(addresses(warp, *address)[0]), columns)
        values = np.stack([warp.r[slot].astype(U32) for slot in sources], axis=1)
        tensor = block_of(warp).tensor

        def land() -> None:
            tensor[where] = values

        tensor[where] = POISON_WORD
        _pending(warp, "tensor_stores").append(warp.cluster.add(Task(land)))

    return together(store)


@instruction("tcgen05.wait::ld", "tcgen05.wait::st")
def _wait(op: Op) -> Run:
    def wait(warp: Any, lanes: Any) -> Any:
        if "wait::ld" in op.parts:
            for slot, value in _pending(warp, "tensor_loads"):
                warp.r[slot] = value
            _pending(warp, "tensor_loads").clear()
            return True
        stores = _pending(warp, "tensor_stores")
        if not warp.cluster.wait(warp, lambda: all(task.is_done for task in stores), "stores to tensor memory"):
            return False
        stores.clear()
        return True

    return together(wait)


# ---- products --------------------------------------------------------------------------------------------------------


def _kind(op: Op) -> str:
    return next(part.removeprefix("kind::") for part in op.parts if part.startswith("kind::"))


@instruction("tcgen05.mma")
def _multiply(op: Op) -> Run:
    check_blocks(op)
    kind = _kind(op)
    is_scaled = "block_scale" in op.parts
    in_tensor_memory = op.args[1].startswith("[")
    names = [arg.strip("[] ") for arg in op.args]
    widths = [32, 32 if in_tensor_memory else 64, 64, 32, *([32, 32] if is_scaled else []), 1]
    slots = [op.program.slot(name, op.scope, width) for name, width in zip(names, widths, strict=True)]

    def multiply(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes)
        d, a, b, descriptor, *others = (int(warp.r[slot][lane]) for slot in slots)
        scales = dict(zip(("a_scales", "b_scales"), others[:-1], strict=False))
        block = block_of(warp)

        def do() -> None:
            meaning.multiply(
                [block],
                d,
                a,
                b,
                descriptor,
                bool(others[-1]),
                kind=kind,
                a_in_tensor_memory=in_tensor_memory,
                weight_stationary="ws" in op.parts,
                **scales,
            )

        before = tuple(task for task in warp.queues.get("tensor copies", ()) if not task.is_done)
        _started(warp, Task(do, before), "products")

    return multiply


@instruction("tcgen05.cp")
def _copy(op: Op) -> Run:
    check_blocks(op)
    shape = ".".join(op.parts[3:])
    to, of = op.program.slot(op.args[0].strip("[] "), op.scope, 32), op.program.slot(op.args[1], op.scope, 64)

    def copy(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes)
        address, source, block = int(warp.r[to][lane]), int(warp.r[of][lane]), block_of(warp)
        _started(warp, Task(lambda: meaning.copy_to_tensor_memory(block, address, source, shape)), "tensor copies")

    return copy


def _started(warp: Any, task: Task, queue: str) -> None:
    warp.cluster.add(task, warp.queues.setdefault(queue, deque()))
    own = _pending(warp, "tensor_work")
    own[:] = [other for other in own if not other.is_done] + [task]


@instruction("tcgen05.commit")
def _commit(op: Op) -> Run:
    check_blocks(op)
    if any(part.startswith("multicast") for part in op.parts):
        raise NotImplementedError
    address = op.address(0, 32)

    def commit(warp: Any, lanes: Any) -> None:
        lane = one_lane(lanes)
        place = int(warp.shared.position(addresses(warp, *address)[lane : lane + 1], 8)[0])
        barrier = mbarriers.find(warp, place)

        def land() -> None:
            barrier.arrive()

        warp.cluster.add(Task(land, tuple(_pending(warp, "tensor_work"))))

    return commit


# ---- tensor copies ---------------------------------------------------------------------------------------------------


@instruction("cp.async.bulk.tensor")
def _copy_box(op: Op) -> Run:
    if "shared::cluster" not in op.parts or "global" not in op.parts or "multicast::cluster" in op.parts:
        raise NotImplementedError
    check_blocks(op)
    is_gathered = "tile::gather4" in op.parts
    to, bar = op.address(0, 32), op.address(2, 32)
    name, coordinates = split(op.args[1].strip("[] "))
    source = op.program.slot(name, op.scope, 64)
    at = [op.program.slot(one, op.scope, 32) for one in split(coordinates.strip("{} "))]

    def copy(warp: Any, lanes: Any) -> None:
        for lane in range(LANES) if lanes is None else np.flatnonzero(lanes):
            own = np.arange(LANES) == lane
            map_ = warp.cluster.tensor_maps[int(warp.r[source][lane])]
            where = [int(warp.r[slot][lane].astype(U32).view(np.int32)) for slot in at]
            size = int(np.prod(map_.box)) * map_.width * (4 if is_gathered else 1)
            target = chosen(own, addresses(warp, *to))
            if int(target[0]) % 128:
                raise IndexError(f"a tensor copy to {int(target[0]):#x}: misaligned")
            first = warp.shared.position(target, 16)
            warp.shared.position(target + U32(size - 16), 16)
            place = int(warp.shared.position(chosen(own, addresses(warp, *bar)), 8)[0])
            barrier, block, address = mbarriers.find(warp, place), block_of(warp), int(target[0]) & 0xFFFFFF
            _poison(warp, first, size)
            if warp.events:
                warp.events.bulk(op.number, int(lane), [(int(first[0]), size)], place)

            warp.cluster.add(Task(_landing(map_, where, warp.memory.bytes, block, address, barrier, size)))

    return copy


def _landing(map_: Any, where: Any, memory: Any, block: Any, address: int, barrier: Any, size: int) -> Any:
    """What a tensor copy does when its time comes; where: coordinates, of gathered rows a column and four rows."""

    def land() -> None:
        is_gathered = len(where) > len(map_.box)
        rows = meaning.rows_of(map_, memory, where[0], where[1:]) if is_gathered else None
        found = meaning.box_of(map_, memory, where) if rows is None else rows
        meaning.place_box(block.shared, address, found, map_.swizzle)
        barrier.complete(size)

    return land
