# SPDX-License-Identifier: Apache-2.0
"""Bulk copies of boxes and of gathered rows of tensors that a tensor map tells of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cute_kernels.dsl import umma
from cute_kernels.isa_probes import meaning
from tests.model import mbarriers
from tests.model.memory import POISON
from tests.model.moves import addresses
from tests.model.ptx import LANES, PARAMETERS, Op, Program, Run, instruction, split
from tests.model.tasks import Task
from tests.model.values import U32

ALIGN = 128


def at_parameters(program: Program, maps: Iterable[meaning.TensorMap]) -> dict[int, meaning.TensorMap]:
    """Tensor maps that are a kernel's first parameters, by address. Their `base` is a position in global memory."""
    return {PARAMETERS + parameter.offset: map_ for parameter, map_ in zip(program.parameters, maps, strict=False)}


def check(map_: meaning.TensorMap) -> None:
    """Raises ValueError on what a driver refuses."""
    if map_.base % 16 or any(stride % 16 or not 0 <= stride < 1 << 40 for stride in map_.strides):
        raise ValueError(f"tensor map: expected base and strides that are multiples of 16, got {map_}")
    if not all(0 < size <= 1 << 32 for size in map_.sizes) or not all(0 < size <= 256 for size in map_.box):
        raise ValueError(f"tensor map: expected sizes up to 2^32 and boxes up to 256, got {map_}")
    row = map_.box[0] * map_.width
    if row % 16 or (map_.swizzle and row > map_.swizzle):
        raise ValueError(f"tensor map: expected box rows of 16 n bytes, at most those of a swizzled row, got {map_}")


@instruction("cp.async.bulk.prefetch", "prefetch.tensormap")
def _prefetch(op: Op) -> Run:
    return lambda warp, lanes: None


@instruction("cp.async.bulk.tensor")
def _copy(op: Op) -> Run:
    if op.parts[5] == "global":
        return _copy_out(op)
    if "global" not in op.parts[5:] or any(part.startswith("multicast") for part in op.parts):
        raise NotImplementedError
    is_gathered = "tile::gather4" in op.parts
    to, bar = op.address(0, 32), op.address(2, 32)
    name, coordinates = split(op.args[1].strip("[] "))
    source = op.program.slot(name, op.scope, 64)
    at = [op.program.slot(one, op.scope, 32) for one in split(coordinates.strip("{} "))]

    def copy(warp: Any, lanes: Any) -> None:
        for lane in range(LANES) if lanes is None else np.flatnonzero(lanes):
            map_ = warp.cluster.tensor_maps[int(warp.r[source][lane])]
            where = [int(warp.r[slot][lane].view(np.int32)) for slot in at]
            target = addresses(warp, *to)[lane : lane + 1]
            place = int(warp.shared.position(addresses(warp, *bar)[lane : lane + 1], 8)[0])
            _start(warp, op, int(lane), map_, where, target, place, is_gathered)

    return copy


def _copy_out(op: Op) -> Run:
    """From shared memory, as part of the group of bulk copies that its thread commits next."""
    if "bulk_group" not in op.parts or "tile" not in op.parts:
        raise NotImplementedError
    of = op.address(1, 32)
    name, coordinates = split(op.args[0].strip("[] "))
    target = op.program.slot(name, op.scope, 64)
    at = [op.program.slot(one, op.scope, 32) for one in split(coordinates.strip("{} "))]

    def copy(warp: Any, lanes: Any) -> None:
        for lane in range(LANES) if lanes is None else np.flatnonzero(lanes):
            map_ = warp.cluster.tensor_maps[int(warp.r[target][lane])]
            where = [int(warp.r[slot][lane].view(np.int32)) for slot in at]
            source = addresses(warp, *of)[lane : lane + 1]
            check(map_)
            if int(source[0]) % ALIGN:
                raise IndexError(f"a tensor copy from {int(source[0]):#x}: misaligned")
            first, size = int(warp.shared.position(source, 16)[0]), int(np.prod(map_.box)) * map_.width
            warp.shared.position(source + U32(size - 16), 16)
            bytes_, inside = meaning.bytes_of(map_, where)
            start, rank = int(source[0]) & ((1 << warp.shared.RANK) - 1), first // warp.shared.SPAN
            found = umma.swizzled(start + np.arange(size), map_.swizzle) + rank * warp.shared.SPAN
            if not warp.memory.writable[bytes_[inside[..., 0]]].all():
                raise IndexError(f"a tensor copy to {where} of {map_}")
            if warp.events:
                warp.events.bulk_read(op.number, int(lane), first, size)

            def land(bytes_: Any = bytes_, inside: Any = inside, found: Any = found) -> None:
                chosen = np.broadcast_to(inside, bytes_.shape).reshape(-1)
                places = bytes_.reshape(-1)[chosen]
                warp.memory.bytes[places] = warp.shared.bytes[found[chosen]]
                warp.memory.note_written(places, 1)

            warp.bulk_copies[-1].append(warp.cluster.add(Task(land)))

    return copy


def _start(
    warp: Any, op: Op, lane: int, map_: Any, where: list[int], target: Any, place: int, is_gathered: bool
) -> None:
    check(map_)
    if len(where) != (5 if is_gathered else len(map_.sizes)) or len(map_.box) != len(map_.sizes):
        raise ValueError(f"{len(where)} coordinates of {map_}")
    size = int(np.prod(map_.box)) * map_.width * (4 if is_gathered else 1)
    if int(target[0]) % ALIGN:
        raise IndexError(f"a tensor copy to {int(target[0]):#x}: misaligned")
    first = int(warp.shared.position(target, 16)[0])
    warp.shared.position(target + U32(size - 16), 16)
    barrier, memory = mbarriers.find(warp, place), warp.memory.bytes
    start, rank = int(target[0]) & ((1 << warp.shared.RANK) - 1), first // warp.shared.SPAN
    shared = warp.shared.bytes[rank * warp.shared.SPAN : (rank + 1) * warp.shared.SPAN]
    shared[umma.swizzled(start + np.arange(size), map_.swizzle)] = POISON
    if warp.events:
        warp.events.bulk(op.number, lane, [(first, size)], place)

    def land() -> None:
        if is_gathered:
            found = meaning.rows_of(map_, memory, where[0], where[1:])
        else:
            found = meaning.box_of(map_, memory, where)
        meaning.place_box(shared, start, found, map_.swizzle)
        barrier.complete(size)

    warp.cluster.add(Task(land))
