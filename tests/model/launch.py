# SPDX-License-Identifier: Apache-2.0
"""From tensors to a kernel's parameters, and a grid of clusters that run it one after another."""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tests.model.machine import Cluster
from tests.model.memory import GlobalMemory
from tests.model.ptx import Program

FORMATS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f32": "f", "b8": "B", "b32": "I", "b64": "Q"}


def pack(program: Program, values: Sequence[Any]) -> bytes:
    """All parameters of a kernel, in its order: numbers, or bytes where it takes an aggregate."""
    if len(values) != len(program.parameters):
        raise ValueError(f"{program.name}: expected {len(program.parameters)} parameters, got {len(values)}")
    raw = bytearray(program.parameters[-1].offset + program.parameters[-1].size)
    for parameter, value in zip(program.parameters, values, strict=True):
        if isinstance(value, bytes):
            data = value
        elif parameter.kind == "f32":
            data = struct.pack("<f", value)
        else:
            data = int(value).to_bytes(parameter.size, "little", signed=value < 0)
        if len(data) != parameter.size:
            raise ValueError(f"{parameter.name}: expected {parameter.size} bytes, got {len(data)}")
        raw[parameter.offset : parameter.offset + len(data)] = data
    return bytes(raw)


def divisor(number: int) -> tuple[bytes, int]:
    """What cute.fast_divmod_create_divisor_v2 makes of a number: a struct of (divisor, multiplier, two shifts), and the
    number."""
    bits = max(0, (number - 1).bit_length())
    multiplier = ((1 << 32) * ((1 << bits) - number)) // number + 1
    return struct.pack("<IIBBxx", number, multiplier & 0xFFFFFFFF, min(bits, 1), max(bits - 1, 0)), number


def run_grid(
    program: Program,
    parameters: bytes,
    memory: GlobalMemory,
    *,
    blocks: int,
    cluster: int = 1,
    rows: int = 1,
    size: int,
    seed: int = 0,
    laziness: float = 0.5,
    events: Any = None,
    tensor_maps: dict[int, Any] | None = None,
    slow: Collection[int] = (),
) -> Any:
    """Run so many blocks, `cluster` of them at a time. Returns how often each instruction ran, by number.

    rows     of the grid: a cluster has blocks of all of them
    events   what makes the record of a cluster, called with its number
    """
    counts = np.zeros(len(program.ops), np.int64)
    for first in range(0, blocks, cluster):
        one = Cluster(
            program,
            parameters,
            memory,
            first=first,
            grid=blocks,
            blocks=cluster,
            rows=rows,
            size=size,
            seed=seed * 1000 + first,
            laziness=laziness,
            events=events(first // cluster) if events else None,
            tensor_maps=tensor_maps,
            slow=slow,
        )
        one.run()
        counts += np.array(one.counts)
    return counts
