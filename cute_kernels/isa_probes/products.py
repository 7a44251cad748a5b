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
ROUNDS = 4096
IMAGES, IMAGE_BYTES = 4, 16384
"""Of a handoff's shared memory: where the operands are, and what they are in each round, one after the other. Sums of
all rounds stay exact."""

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
    release          of a handoff: the scope of its arrivals, "cta" or "cluster"; "" it is none

    A handoff repeats its steps ROUNDS times. Before each round all threads of both blocks write their operands, another
    image each time, and a lane of each warp arrives at a barrier of the even block, which then multiplies.
    """

    name: str
    fact: str
    steps: tuple[Multiply | Copy, ...]
    shared: tuple[tuple[int, str], ...] = ((0, "bf16"),)
    tensor: tuple[tuple[int, str], ...] = ((0, "fp32"),)
    blocks: int = 1
    is_twice: bool = False
    release: str = ""


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
    if experiment.release:
        return _expect_handoffs(experiment, blocks)
    _run(experiment, blocks)
    return [block.tensor for block in blocks]


def _expect_handoffs(experiment: Experiment, blocks: list[Block]) -> list[Any]:
    """Every image has been multiplied equally often, and all of it was added up."""
    sources = [block.shared.copy() for block in blocks]
    gains = [np.zeros(block.tensor.shape, np.float64) for block in blocks]
    for number in range(IMAGES):
        own = slice(number * IMAGE_BYTES, (number + 1) * IMAGE_BYTES)
        once = [Block(source.copy(), block.tensor.copy()) for source, block in zip(sources, blocks, strict=True)]
        for block, source in zip(once, sources, strict=True):
            block.shared[:IMAGE_BYTES] = source[own]
        _run(experiment, once)
        for gain, after, before in zip(gains, once, blocks, strict=True):
            gain += after.tensor.view(np.float32).astype(np.float64) - before.tensor.view(np.float32)
    totals = [b.tensor.view(np.float32) + gain * (ROUNDS // IMAGES) for b, gain in zip(blocks, gains, strict=True)]
    return [total.astype(np.float32).view(np.uint32) for total in totals]


def _run(experiment: Experiment, blocks: list[Block]) -> None:
    """All steps, once."""
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
        "copied_rows_swizzled",
        "the same of swizzled rows, each copy 16 bytes further into them, as queries are copied",
        tuple(Copy(40 + 4 * step, (K16, 8192 + 16 * step), "64x128b.warpx2::02_13") for step in range(8)),
    ),
    Experiment(
        "pair_copied_rows_swizzled",
        "128 swizzled rows in both blocks of a pair, each copy 16 bytes further into them",
        tuple(Copy(40 + 4 * step, (K16, 8192 + 16 * step), "128x128b") for step in range(8)),
        blocks=2,
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
    *(
        Experiment(
            f"handoff_{scope}",
            f"what threads of both blocks write, a pair's product reads once they arrived with the scope {scope}",
            (Multiply(0, (K16, 0), (K16, 8192), PAIR_QK, accumulate=True),),
            blocks=2,
            release=scope,
        )
        for scope in ("cta", "cluster")
    ),
)

_DECODE, _PAIR = "sparse_mla.blackwell.decode", "sparse_mla.blackwell.decode_2cta"
_PREFILLS = tuple(f"sparse_mla.blackwell.prefill{kind}" for kind in ("", "_mixed", "_paged"))
_PREFILL_PAIR = "sparse_mla.blackwell.prefill_2cta"
_LOGITS, _GEMM, _GEMM_PAIR = "indexer.blackwell.logits", "output.blackwell.einsum", "output.blackwell.einsum_2cta"

USED_BY = {
    "ws64_results": (_DECODE, *_PREFILLS),
    "ws64_rows_twice": (_DECODE, *_PREFILLS),
    "ws64_rows_of_two_halves": (_DECODE,),
    "ws64_mn_major": (_DECODE, *_PREFILLS),
    "ws64_e4m3": ("sparse_mla.blackwell.prefill_mixed_fp8",),
    "m128_e4m3": (_LOGITS, _GEMM, _GEMM_PAIR),
    "mxf4_scales": (_LOGITS,),
    "mxf8_scales": (_GEMM,),
    "copied_rows": _PREFILLS,
    "copied_rows_swizzled": _PREFILLS,
    "pair_copied_rows_swizzled": (_PREFILL_PAIR,),
    "pair256_results": (_GEMM_PAIR,),
    **{
        f"pair128_{what}": (_PAIR, _PREFILL_PAIR)
        for what in ("results", "rows_twice", "rows_of_two_halves", "mn_major")
    },
    "handoff_cta": (_PAIR, _PREFILL_PAIR, _GEMM_PAIR),
    "handoff_cluster": (f"{_PAIR}_cluster_release",),
}
"""Experiment -> the kernels that rest on its fact. What no kernel rests on is a way out, should another fact fail."""

NAMES = {experiment.name: experiment for experiment in EXPERIMENTS}
