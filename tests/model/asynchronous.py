# SPDX-License-Identifier: Apache-2.0
"""Copies that are done some time: cp.async, bulk copies, stores to other blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.model import mbarriers
from tests.model.memory import POISON
from tests.model.moves import addresses, chosen, count_of
from tests.model.ptx import LANES, Op, Run, instruction
from tests.model.tasks import Task


@instruction("cp.async.ca", "cp.async.cg")
def _copy(op: Op) -> Run:
    to, of, size = op.address(0, 32), op.address(1, 64), int(op.args[2])
    has_size = len(op.args) - op.opcode.endswith("cache_hint") > 3
    given = op.program.slot(op.args[3], op.scope, 32) if has_size else None

    def copy(warp: Any, lanes: Any) -> None:
        target = warp.shared.position(chosen(lanes, addresses(warp, *to)), size)
        source = chosen(lanes, addresses(warp, *of))
        counts = np.full(len(target), size) if given is None else chosen(lanes, warp.r[given]).astype(np.int64)
        if ((counts != 0) & (counts != size)).any():
            raise NotImplementedError("copies of a part")
        taken = counts > 0
        at = warp.memory.position(source[taken], size)
        _poison(warp, target, size)
        if warp.events:
            warp.events.copy(op.number, lanes, target, size)

        def land() -> None:
            values = np.zeros((len(target), size // 4), np.uint32)
            values[taken] = warp.memory.load(at, 32, size // 4)
            warp.shared.store(target, values, 32)

        warp.copies[-1].append(warp.cluster.add(Task(land)))

    return copy


def _poison(warp: Any, position: Any, size: int) -> None:
    """What a copy will overwrite is not defined any more."""
    warp.shared.bytes[position[:, None] + np.arange(size)] = POISON


@instruction("cp.async.commit_group")
def _commit(op: Op) -> Run:
    def commit(warp: Any, lanes: Any) -> None:
        warp.copies.append([])
        if warp.events:
            warp.events.copy_commit(op.number, lanes)

    return commit


@instruction("cp.async.wait_group", "cp.async.wait_all")
def _wait(op: Op) -> Run:
    newest = int(op.args[0]) if op.args else None

    def wait(warp: Any, lanes: Any) -> Any:
        groups = warp.copies if newest is None else warp.copies[: max(0, len(warp.copies) - 1 - newest)]
        tasks = [task for group in groups for task in group]
        if not warp.cluster.wait(warp, lambda: all(task.is_done for task in tasks), "cp.async"):
            return False
        if warp.events:
            warp.events.copy_wait(op.number, lanes, newest)
        return True

    return wait


@instruction("cp.async.mbarrier.arrive")
def _copies_arrive(op: Op) -> Run:
    if "noinc" not in op.parts:
        raise NotImplementedError
    address = op.address(0, 32)

    def arrive(warp: Any, lanes: Any) -> None:
        at = warp.shared.position(chosen(lanes, addresses(warp, *address)), 8)
        before = tuple(task for group in warp.copies for task in group if not task.is_done)
        for place, own in mbarriers.each_place(warp, lanes, at):
            barrier, many = mbarriers.find(warp, place), mbarriers.count(own)
            if warp.events:
                warp.events.copy_arrive(op.number, own, place, many)

            def land(barrier: mbarriers.Barrier = barrier, many: int = many) -> None:
                barrier.arrive(many)

            warp.cluster.add(Task(land, before))

    return arrive


@instruction("st.async")
def _store(op: Op) -> Run:
    if "mbarrier::complete_tx::bytes" not in op.parts:
        raise NotImplementedError
    to, sources, bar = op.address(0, 32), op.slots(1), op.address(2, 32)
    size = op.bits // 8 * count_of(op)

    def store(warp: Any, lanes: Any) -> None:
        target = warp.shared.position(chosen(lanes, addresses(warp, *to)), size)
        places = warp.shared.position(chosen(lanes, addresses(warp, *bar)), 8)
        values = np.stack([chosen(lanes, warp.r[slot]) for slot in sources], axis=1)
        barriers = [mbarriers.find(warp, int(place)) for place in places]
        _poison(warp, target, size)
        if warp.events:
            warp.events.store_async(op.number, lanes, target, size, places)

        def land() -> None:
            warp.shared.store(target, values, op.bits)
            for barrier in barriers:
                barrier.complete(size)

        warp.cluster.add(Task(land))

    return store


@instruction("cp.async.bulk")
def _bulk(op: Op) -> Run:
    if op.parts[3] == "global":
        return _bulk_store(op)
    if op.parts[4] != "global" or "multicast::cluster" in op.parts:
        raise NotImplementedError
    to, of, bar = op.address(0, 32), op.address(1, 64), op.address(3, 32)
    amount = op.program.slot(op.args[2], op.scope, 32)

    def copy(warp: Any, lanes: Any) -> None:
        for lane in range(LANES) if lanes is None else np.flatnonzero(lanes):
            size = int(warp.r[amount][lane])
            target, source = addresses(warp, *to)[lane : lane + 1], addresses(warp, *of)[lane : lane + 1]
            if size % 16 or int(target[0]) % 16 or int(source[0]) % 16:
                raise IndexError(
                    f"bulk copy of {size} bytes from {int(source[0]):#x} to {int(target[0]):#x}: misaligned"
                )
            if not size:
                continue
            start = _extent(warp, target, size)
            first = int(warp.memory.position(source, 16)[0])
            if not warp.memory.readable[first : first + size].all():
                raise IndexError(f"bulk copy of {size} bytes at {int(source[0]):#x}")
            place = int(warp.shared.position(addresses(warp, *bar)[lane : lane + 1], 8)[0])
            bulk_copy(warp, op, int(lane), [(start, first, size)], place)

    return copy


def _extent(warp: Any, address: Any, size: int) -> int:
    """Position of an address with so many bytes behind it."""
    start = int(warp.shared.position(address, 16)[0])
    warp.shared.position(address + np.uint32(size - 16), 16)
    return start


def bulk_copy(warp: Any, op: Op, lane: int, parts: list[tuple[int, int, int]], place: int) -> None:
    """Have parts (position in shared memory, in global memory or -1 for zeros, bytes) copied, each at its time."""
    barrier = mbarriers.find(warp, place)
    if warp.events:
        warp.events.bulk(op.number, lane, [(start, size) for start, _, size in parts], place)
    shared, memory = warp.shared.bytes, warp.memory.bytes
    for start, first, size in parts:
        shared[start : start + size] = POISON

        def land(start: int = start, first: int = first, size: int = size) -> None:
            shared[start : start + size] = memory[first : first + size] if first >= 0 else 0
            barrier.complete(size)

        warp.cluster.add(Task(land))


def _bulk_store(op: Op) -> Run:
    if "bulk_group" not in op.parts:
        raise NotImplementedError
    to, of = op.address(0, 64), op.address(1, 32)
    amount = op.program.slot(op.args[2], op.scope, 32)

    def copy(warp: Any, lanes: Any) -> None:
        for lane in range(LANES) if lanes is None else np.flatnonzero(lanes):
            size = int(warp.r[amount][lane])
            start = _extent(warp, addresses(warp, *of)[lane : lane + 1], size)
            first = int(warp.memory.position(addresses(warp, *to)[lane : lane + 1], 16, is_write=True)[0])
            if not warp.memory.writable[first : first + size].all():
                raise IndexError(f"bulk copy of {size} bytes to {first:#x}")
            if warp.events:
                warp.events.bulk_read(op.number, int(lane), start, size)

            def land(start: int = start, first: int = first, size: int = size) -> None:
                warp.memory.bytes[first : first + size] = warp.shared.bytes[start : start + size]
                warp.memory.note_written(np.array([first]), size)

            warp.bulk_copies[-1].append(warp.cluster.add(Task(land)))

    return copy


@instruction("cp.async.bulk.commit_group")
def _bulk_commit(op: Op) -> Run:
    def commit(warp: Any, lanes: Any) -> None:
        warp.bulk_copies.append([])
        if warp.events:
            warp.events.bulk_commit(op.number, lanes)

    return commit


@instruction("cp.async.bulk.wait_group")
def _bulk_wait(op: Op) -> Run:
    newest = int(op.args[0])

    def wait(warp: Any, lanes: Any) -> Any:
        tasks = [task for group in warp.bulk_copies[: max(0, len(warp.bulk_copies) - 1 - newest)] for task in group]
        if not warp.cluster.wait(warp, lambda: all(task.is_done for task in tasks), "bulk copies"):
            return False
        if warp.events:
            warp.events.bulk_wait(op.number, lanes, newest)
        return True

    return wait
