# SPDX-License-Identifier: Apache-2.0
"""Benchmark of merge_attention_states on fp32 splits, as sparse_mla_decode hands them over. It has no peer: vLLM merges
two without a sink, FlashMLA inside its decode.

The splits come from memory. In a decode step most of them are still in L2, and the merge starts as a dependent launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla import ops as _registered  # noqa: F401
from perf.bench import Arguments, Bench, Case, Run, close
from perf.grid import draw, mark

OP = "merge_attention_states"
BATCHES = (1, 8, 32, 64, 128)
HEADS = (64, 128)
PARTS = (2, 3, 5, 8, 16)
CHOSEN = (5, 6)
"""Parts that decode cuts a single row into, of 128 + 512 and 128 + 1024 keys."""

TILES = (10, 18)
"""Tiles of these rows: as many splits as there can be."""

SHAPES = tuple(
    (batch, heads, parts)
    for heads in HEADS
    for batch in BATCHES
    for parts in (sorted(PARTS + TILES) if batch == 1 else PARTS)
)
"""(rows, heads, parts) of the cases."""

BETWEEN_SHAPES = tuple(
    (point["batch"], heads, point["parts"])
    for heads, point in zip((64, 128, 64, 128), draw(OP, 4, batch=(2, 120), parts=(4, 18)), strict=True)
)

VARIANTS: tuple[dict[str, Any], ...] = (
    {"warps": 8},
    {"held": 4, "vectors": 4},
    {"held": 8, "vectors": 2},
    {"held": 16, "vectors": 1},
)
"""Fields of CombineKey."""

OUT = close(rtol=2.0**-7, atol=2.0**-17)
LSE = close(rtol=2.0**-21, atol=1e-6)
"""The reference sums in float64: a bf16 result may be rounded to its neighbour."""


def name_of(batch: int, heads: int, parts: int) -> str:
    return f"b{batch} h{heads} parts={parts}"


def _make(batch: int, heads: int, parts: int, seed: int) -> Arguments:
    """Arguments with one query token a row, and a sink."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    return (
        torch.randn(parts, batch, 1, heads, HEAD_DIM, device="cuda", generator=g),
        torch.randn(parts, batch, heads, 1, device="cuda", generator=g),
        torch.randn(heads, device="cuda", generator=g),
        torch.empty(batch, 1, heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16),
        torch.empty(batch, heads, 1, device="cuda"),
    )


def right(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether (out, lse) are the reference's as near as their types allow."""
    return OUT(got[:1], want[:1]) and LSE(got[1:], want[1:])


def _variants() -> Mapping[str, Run]:
    from cute_kernels.runtime.arch import arch_of
    from cute_kernels.runtime.compile import launch as launch_key
    from cute_kernels.sparse_mla.combine import key_for, launch

    def run(fields: Mapping[str, Any], *args: Any) -> None:
        outs, lses, sink, out, lse = args
        key = replace(key_for(arch_of(0), True, False, len(outs)), **fields)
        launch_key(replace(key, more=len(outs) > key.held), 0, outs, lses, sink.data_ptr(), out, lse, False)

    found: dict[str, Run] = {"ours use_pdl": partial(launch, use_pdl=True)}
    for fields in VARIANTS:
        found["ours " + " ".join(f"{name}={value}" for name, value in fields.items())] = partial(run, fields)
    return found


def _cases(shapes: Sequence[tuple[int, int, int]]) -> tuple[Case, ...]:
    return tuple(
        Case(name_of(*shape), shape[0], partial(_make, *shape), {"heads": shape[1], "parts": shape[2]})
        for shape in shapes
    )


BENCH = Bench(
    OP,
    _cases(SHAPES),
    quick=(1, 64),
    between=mark(_cases(BETWEEN_SHAPES)),
    variants=_variants,
    same=right,
)

SWEEPS = {OP: BENCH.sweep}
QUICK = {OP: BENCH.quick}
"""Numbers of rows of a quick look."""
