# SPDX-License-Identifier: Apache-2.0
"""Loads and stores, one thread at a time: parameters, global and shared memory."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tests.model.ptx import LANES, PARAMETERS, TYPES, Op, Run, bits_of, instruction, split

SKIPPED = ("prefetch", "prefetchu", "griddepcontrol", "setmaxnreg", "nanosleep", "membar", "discard", "applypriority")


@instruction(*SKIPPED)
def _skip(op: Op) -> Run:
    return lambda warp, lanes: None


def count_of(op: Op) -> int:
    """Elements of a vector access."""
    return next((int(part[1:]) for part in op.parts if part in ("v2", "v4", "v8")), 1)


def addresses(warp: Any, slot: int, offset: int) -> Any:
    base = warp.r[slot]
    return base + base.dtype.type(offset & ((1 << (8 * base.dtype.itemsize)) - 1)) if offset else base


def chosen(lanes: Any, vector: Any) -> Any:
    return vector if lanes is None else vector[lanes]


def put(warp: Any, slot: int, lanes: Any, values: Any) -> None:
    """Values of the lanes that run into a register."""
    if lanes is None:
        warp.r[slot] = values
        return
    new = warp.r[slot].copy()
    new[lanes] = values
    warp.r[slot] = new


def space(op: Op) -> str:
    names = [part for part in op.parts if part.split("::")[0] in ("global", "shared", "param", "local", "const")]
    if not names:
        raise NotImplementedError
    return names[0]


@instruction("ld", "ldu")
def _load(op: Op) -> Run:
    where, bits, count = space(op), bits_of(op.kind), count_of(op)
    targets = op.slots(0, max(bits, 16))
    kinds = [op.program.initial[slot].dtype.type for slot in targets]
    if where == "param":
        return _load_parameter(op, targets, kinds)
    address = op.address(1, 64 if where == "global" else 32)
    width = bits // 8 * count
    is_signed = op.kind.startswith("s")
    names = split(op.args[0].strip("{} "))
    used = [i for i, name in enumerate(names) if op.program.is_used(name)]

    def load(warp: Any, lanes: Any) -> None:
        at = chosen(lanes, addresses(warp, *address))
        if where == "global":
            position = warp.memory.position(at, width)
            values = warp.memory.load(position, bits, count)
        else:
            position = warp.shared.position(at, width)
            values = warp.shared.load(position, bits, count)
            if warp.events and len(used) == count:
                warp.events.read(op.number, lanes, position, width)
            elif warp.events:  # a word that nobody looks at may be anything
                for i in used:
                    warp.events.read(op.number, lanes, position + i * (bits // 8), bits // 8)
        for i, (slot, kind) in enumerate(zip(targets, kinds, strict=True)):
            value = values[:, i]
            if value.dtype != kind:
                value = (value.view(f"i{bits // 8}") if is_signed else value).astype(kind)
            put(warp, slot, lanes, value)

    return load


def _load_parameter(op: Op, targets: list[int], kinds: list[Any]) -> Run:
    slot, offset = op.address(1, 64)
    size = op.bits // 8

    def load(warp: Any, lanes: Any) -> None:
        start = int(warp.r[slot][0]) - PARAMETERS + offset
        for i, (target, kind) in enumerate(zip(targets, kinds, strict=True)):
            raw = warp.cluster.parameters[start + i * size : start + (i + 1) * size]
            number = int.from_bytes(raw, "little", signed=op.kind.startswith("s"))
            number &= (1 << (8 * np.dtype(kind).itemsize)) - 1
            value = np.full(LANES, number, np.uint64).astype(kind)
            put(warp, target, lanes, chosen(lanes, value))

    return load


@instruction("st")
def _store(op: Op) -> Run:
    if op.parts[1] == "async":
        raise NotImplementedError
    where, bits, count = space(op), bits_of(op.kind), count_of(op)
    sources = op.slots(1, bits)
    address = op.address(0, 64 if where == "global" else 32)
    width, kind = bits // 8 * count, TYPES[bits]

    def store(warp: Any, lanes: Any) -> None:
        at = chosen(lanes, addresses(warp, *address))
        values = np.empty((len(at), count), kind)
        for i, slot in enumerate(sources):
            values[:, i] = chosen(lanes, warp.r[slot])
        if where == "global":
            position = warp.memory.position(at, width, is_write=True)
            warp.memory.store(position, values, bits)
            warp.memory.note_written(position, width)
            return
        position = warp.shared.position(at, width)
        warp.shared.store(position, values, bits)
        if warp.events:
            warp.events.write(op.number, lanes, position, width)

    return store


ATOMICS = {"add": operator.add, "or": operator.or_}


@instruction("red", "atom")
def _atomic(op: Op) -> Run:
    """Of a word of shared memory, lane after lane; what orders them is not looked at."""
    combine = next((ATOMICS[part] for part in op.parts if part in ATOMICS), None)
    if combine is None or bits_of(op.kind) != 32 or not space(op).startswith("shared"):
        raise NotImplementedError
    returns = op.parts[0] == "atom"
    address, (source,) = op.address(int(returns), 32), op.slots(1 + returns, 32)
    target = op.slots(0, 32)[0] if returns else None

    def change(warp: Any, lanes: Any) -> None:
        position = warp.shared.position(chosen(lanes, addresses(warp, *address)), 4)
        words, found = memoryview(warp.shared.views[32]), []
        for at, value in zip((position >> 2).tolist(), chosen(lanes, warp.r[source]).tolist(), strict=True):
            found.append(words[at])
            words[at] = combine(found[-1], value) & 0xFFFFFFFF
        if target is not None:
            put(warp, target, lanes, np.array(found, warp.r[target].dtype))

    return change
