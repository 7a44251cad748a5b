"""Bulk copies of boxes of tensors that a descriptor tells of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.dsl import umma
from tests.model.asynchronous import bulk_copy
from tests.model.moves import addresses
from tests.model.ptx import LANES, PARAMETERS, Op, Program, Run, instruction


@dataclass(frozen=True)
class TensorMap:
    """A tensor of bytes at an address: the densest dimension first, `strides` those of the others.

    box       of a copy, in elements of each dimension; 1 in those that are left out
    swizzle   bytes of a row of the pattern, 0: none
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def rows(self, at: tuple[int, ...]) -> list[tuple[int, int]]:
        """(address or -1, bytes of it that there are) of every row of the box at these coordinates, in the order of
        shared memory. What is outside of the tensor is zero."""
        box = (*self.box, *[1] * (len(self.shape) - len(self.box)))
        found = []
        for place in np.ndindex(*box[:0:-1]):
            index = [first + i for first, i in zip(at[1:], place[::-1], strict=True)]
            inside = all(0 <= i < size for i, size in zip(index, self.shape[1:], strict=True))
            if at[0] < 0:
                raise NotImplementedError
            width = max(0, min(box[0], self.shape[0] - at[0])) if inside else 0
            offset = sum(i * stride for i, stride in zip(index, self.strides, strict=True))
            found.append((self.address + at[0] + offset if width else -1, width))
        return found


def at_parameter(program: Program, number: int, tensor_map: TensorMap) -> dict[int, TensorMap]:
    """Where a kernel finds it that has it as a parameter."""
    return {PARAMETERS + program.parameters[number].offset: tensor_map}


@instruction("cp.async.bulk.tensor")
def _copy(op: Op) -> Run:
    if "tile" not in op.parts or op.parts[6] != "global" or any(part.startswith("multicast") for part in op.parts):
        raise NotImplementedError
    to, bar = op.address(0, 32), op.address(2, 32)
    name, coordinates = op.args[1].strip("[] ").split(",", 1)
    tensor = op.program.slot(name.strip(), op.scope, 64)
    names = [one.strip() for one in coordinates.strip("{} ").split(",")]
    slots = [op.program.slot(one, op.scope, 32) for one in names]

    def copy(warp: Any, lanes: Any) -> None:
        for lane in range(LANES) if lanes is None else np.flatnonzero(lanes):
            found: TensorMap = warp.cluster.tensor_maps[int(warp.r[tensor][lane])]
            at = tuple(int(warp.r[slot].view(np.int32)[lane]) for slot in slots)
            if len(at) != len(found.shape):
                raise ValueError(f"{len(at)} coordinates, the tensor has {len(found.shape)} dimensions")
            address = int(addresses(warp, *to)[lane])
            if address % 128:
                raise IndexError(f"box at {address:#x}: misaligned")
            place = int(warp.shared.position(addresses(warp, *bar)[lane : lane + 1], 8)[0])
            bulk_copy(warp, op, int(lane), _chunks(warp, found, address, at), place)

    return copy


def _chunks(warp: Any, found: TensorMap, address: int, at: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Of a box: (position in shared memory, in global memory or -1, bytes). Of swizzled ones 16 bytes each."""
    chunks = []
    for number, (source, width) in enumerate(found.rows(at)):
        if width not in (0, found.box[0]):
            raise NotImplementedError("a part of a row")
        size = 16 if found.swizzle else found.box[0]
        for first in range(0, found.box[0], size):
            target = umma.swizzled(address + number * found.box[0] + first, found.swizzle)
            start = int(warp.shared.position(np.array([target], np.uint32), 16)[0])
            taken = -1
            if source >= 0:
                taken = int(warp.memory.position(np.array([source + first], np.uint64), 16)[0])
            chunks.append((start, taken, size))
    return chunks


def check(found: TensorMap) -> None:
    """Raises ValueError on what a driver refuses."""
    if found.address % 16 or any(stride % 16 or not 0 <= stride < 1 << 40 for stride in found.strides):
        raise ValueError(f"tensor map: address and strides must be multiples of 16, got {found}")
    if not all(0 < size < 1 << 32 for size in found.shape) or not all(0 < size <= 256 for size in found.box):
        raise ValueError(f"tensor map: sizes, got {found}")
    if found.swizzle and found.box[0] != found.swizzle:
        raise ValueError(f"tensor map: a swizzled box has rows of {found.swizzle} bytes, got {found}")


__all__ = ["TensorMap", "at_parameter", "check"]
