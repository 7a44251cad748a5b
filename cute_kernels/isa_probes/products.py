# SPDX-License-Identifier: Apache-2.0
"""Experiments with Blackwell's tensor cores: memories in, one to four instructions, memories out.

Operands are noise of small numbers, so that products are exact in whatever order they are summed, and so is the rest of
both memories: who reads a wrong place reads other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.dsl import umma
from cute_kernels.isa_probes import meaning
from cute_kernels.isa_probes.meaning import COLUMNS, LANES, Block

SHARED_BYTES = 1 << 16
SCALES_AT = 61440
"""Where scales are in shared memory, where there are any."""


@dataclass(frozen=True)
class Multiply:
    """ptx.tensor_mma or, with scales, ptx.tensor_mma_scaled. a, b: (operand, byte of shared memory); a: or a column."""

    d: int
    a: tuple[umma.Operand, int] | int
    b: tuple[umma.Operand, int]
    instruction: int
    kind: str = "f16"
    weight_stationary: bool = False
    accumulate: bool = False
    scales: tuple[int, int] | None = None


@dataclass(frozen=True)
class Copy:
    """ptx.copy_to_tensor_memory."""

    column: int
    source: tuple[umma.Operand, int]
    shape: str


@dataclass(frozen=True)
class Experiment:
    """Memories, and what one thread does with them.

    shared, tensor   what they are full of: (from this byte or column on, format), ...
    is_twice         lanes 64 and up of tensor memory are as lanes 0 to 63
    """

    name: str
    fact: str
    steps: tuple[Multiply | Copy, ...]
    shared: tuple[tuple[int, str], ...] = ((0, "bf16"),)
    tensor: tuple[tuple[int, str], ...] = ((0, "fp32"),)
    blocks: int = 1
    is_twice: bool = False


E4M3_OF = np.array([0x00, 0x38, 0x40, 0x44, 0x48, 0x4A, 0x4C, 0x4E, 0x50], np.uint8)
"""Codes of 0 to 8."""


def noise(random: Any, count: int, name: str) -> Any:
    """`count` bytes of small numbers in a format."""
    if name == "fp32":
        return random.integers(-99, 100, count // 4).astype(np.float32).view(np.uint8)
    if name == "bf16":
        bits = random.integers(-8, 9, count // 2).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16).view(np.uint8)
    if name == "e4m3":
        return E4M3_OF[random.integers(0, 9, count)] | random.integers(0, 2, count).astype(np.uint8) << 7
    low, high = (126, 130) if name == "ue8m0" else (0, 256)
    return random.integers(low, high, count).astype(np.uint8)


def memories(experiment: Experiment) -> list[Block]:
    """What the experiment begins with, the same every time."""
    random = np.random.default_rng(sum(experiment.name.encode()))
    found = []
    for _ in range(experiment.blocks):
        shared = _fill(random, experiment.shared, SHARED_BYTES, 1)[0]
        tensor = _fill(random, experiment.tensor, COLUMNS * 4, LANES, 4).view(np.uint32)
        if experiment.is_twice:
            tensor[64:] = tensor[:64]
        found.append(Block(shared, tensor))
    return found


def _fill(random: Any, parts: Sequence[tuple[int, str]], end: int, rows: int, unit: int = 1) -> Any:
    ends = [start * unit for start, _ in parts[1:]] + [end]
    pieces = [
        noise(random, rows * (stop - start * unit), name).reshape(rows, -1)
        for (start, name), stop in zip(parts, ends, strict=True)
    ]
    return np.ascontiguousarray(np.concatenate(pieces, axis=1))


def expect(experiment: Experiment) -> list[Any]:
    """uint32 [128, 512] of each block: tensor memory afterwards."""
    blocks = memories(experiment)
    for step in experiment.steps:
        if isinstance(step, Copy):
            for block in blocks:
                meaning.copy_to_tensor_memory(block, step.column, step.source[0].at(step.source[1]), step.shape)
            continue
        a_scales, b_scales = step.scales or (None, None)
        meaning.multiply(
            blocks,
            step.d,
            step.a if isinstance(step.a, int) else step.a[0].at(step.a[1]),
            step.b[0].at(step.b[1]),
            step.instruction,
            step.accumulate,
            kind=step.kind,
            a_in_tensor_memory=isinstance(step.a, int),
            weight_stationary=step.weight_stationary,
            a_scales=a_scales,
            b_scales=b_scales,
        )
    return [block.tensor for block in blocks]


K16, K8, K4 = umma.k_major(16), umma.k_major(8), umma.k_major(4, 64)
V16, V8 = umma.mn_major(16, 8192), umma.mn_major(8, 8192)
QK = umma.instruction("f16", "bf16", "bf16", 64, 64)
PV = umma.instruction("f16", "bf16", "bf16", 64, 256, b_is_mn_major=True)
SCORES = umma.instruction("f8f6f4", "e4m3", "e4m3", 128, 64)
PAIR_QK = umma.instruction("f16", "bf16", "bf16", 128, 128)
PAIR_PV = umma.instruction("f16", "bf16", "bf16", 128, 256, b_is_mn_major=True)
WIDE = umma.instruction("f16", "bf16", "bf16", 256, 128)
BF16_WORDS = ((0, "fp32"), (256, "bf16"))
WITH_SCALES = (
    Copy(504, (umma.SCALES, SCALES_AT), "32x128b.warpx4"),
    Copy(508, (umma.SCALES, SCALES_AT + 512), "32x128b.warpx4"),
)

EXPERIMENTS = (
    Experiment(
        "ws64_results",
        "64 rows, weight-stationary: columns of the second half of N are in lanes 64 and up",
        (Multiply(0, (K16, 0), (K16, 8192 + 96), QK, weight_stationary=True),),
    ),
    Experiment(
        "ws64_rows_twice",
        "its rows from tensor memory, where lanes 64 and up hold them again",
        (Multiply(0, 256, (K16, 8192), QK, weight_stationary=True),),
        tensor=BF16_WORDS,
        is_twice=True,
    ),
    Experiment(
        "ws64_rows_of_two_halves",
        "lanes 64 and up of those rows may be others: they make the second half of N",
        (Multiply(0, 264, (K16, 8192 + 32), QK, weight_stationary=True),),
        tensor=BF16_WORDS,
    ),
    Experiment(
        "ws64_mn_major",
        "an operand of 256 rows that are neighbours in memory, 64 of them 8 KB on; added to what was there",
        (Multiply(128, (K16, 32), (V16, 8192 + V16.step(16)), PV, weight_stationary=True, accumulate=True),),
    ),
    Experiment(
        "ws64_e4m3",
        "64 rows of e4m3, weight-stationary, the other operand MN-major",
        (
            Multiply(
                0,
                (K8, 64),
                (V8, 8192 + V8.step(32)),
                umma.instruction("f8f6f4", "e4m3", "e4m3", 64, 256, b_is_mn_major=True),
                kind="f8f6f4",
                weight_stationary=True,
            ),
        ),
        shared=((0, "e4m3"),),
    ),
    Experiment(
        "m64_results",
        "64 rows of one block: 16 to the lanes of each warp",
        (Multiply(0, (K16, 0), (K16, 8192), QK),),
    ),
    Experiment(
        "m128_e4m3",
        "128 rows of e4m3, a second step inside the swizzled row added to the first",
        (
            Multiply(64, (K8, 0), (K8, 16384), SCORES, kind="f8f6f4"),
            Multiply(64, (K8, 32), (K8, 16384 + 32), SCORES, kind="f8f6f4", accumulate=True),
        ),
        shared=((0, "e4m3"),),
    ),
    Experiment(
        "mxf4_scales",
        "e2m1 with two scales a row out of four, which copies put in place",
        (
            *WITH_SCALES,
            Multiply(
                0,
                (K4, 0),
                (K4, 8192 + 32),
                umma.scaled_instruction("mxf4", "e2m1", "e2m1", 128, 64, 2, 0),
                kind="mxf4",
                scales=(504, 508),
            ),
        ),
        shared=((0, "e2m1"), (SCALES_AT, "ue8m0")),
    ),
    Experiment(
        "mxf8_scales",
        "e4m3 with one scale a row out of four",
        (
            *WITH_SCALES,
            Multiply(
                0,
                (K8, 32),
                (K8, 16384),
                umma.scaled_instruction("mxf8f6f4", "e4m3", "e4m3", 128, 64, 1, 3),
                kind="mxf8f6f4",
                scales=(504, 508),
            ),
        ),
        shared=((0, "e4m3"), (SCALES_AT, "ue8m0")),
    ),
    Experiment(
        "mixed_kinds",
        "bf16, then e4m3 with scales, added in one result",
        (
            *WITH_SCALES,
            Multiply(0, (K16, 32), (K16, 16384), umma.instruction("f16", "bf16", "bf16", 128, 64)),
            Multiply(
                0,
                (K8, 32768),
                (K8, 49152),
                umma.scaled_instruction("mxf8f6f4", "e4m3", "e4m3", 128, 64),
                kind="mxf8f6f4",
                scales=(504, 508),
                accumulate=True,
            ),
        ),
        shared=((0, "bf16"), (32768, "e4m3"), (SCALES_AT, "ue8m0")),
    ),
    Experiment(
        "copied_rows",
        "64 rows of 16 bytes of shared memory to lanes 0 to 63, and again to the others",
        (Copy(40, (umma.Operand(8, 0, False, 0, 128), 2048), "64x128b.warpx2::02_13"),),
    ),
    Experiment(
        "pair128_results",
        "128 rows of a pair: 64 a block, the second half of N in lanes 64 and up, half of `b` from each block",
        (Multiply(0, (K16, 0), (K16, 8192 + 64), PAIR_QK),),
        blocks=2,
    ),
    Experiment(
        "pair128_rows_twice",
        "its rows from tensor memory, where lanes 64 and up hold them again",
        (Multiply(0, 256, (K16, 8192), PAIR_QK),),
        tensor=BF16_WORDS,
        blocks=2,
        is_twice=True,
    ),
    Experiment(
        "pair128_rows_of_two_halves",
        "lanes 64 and up of those rows may be others: they make the second half of N",
        (Multiply(0, 256, (K16, 8192), PAIR_QK),),
        tensor=BF16_WORDS,
        blocks=2,
    ),
    Experiment(
        "pair128_mn_major",
        "128 rows of a pair times 256 columns that are neighbours in memory",
        (Multiply(256, (K16, 96), (V16, 8192 + V16.step(48)), PAIR_PV, accumulate=True),),
        blocks=2,
    ),
    Experiment(
        "pair256_results",
        "256 rows of a pair: 128 a block",
        (Multiply(0, (K16, 0), (K16, 16384), WIDE),),
        blocks=2,
    ),
)

NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}
