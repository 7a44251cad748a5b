# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of the picks of a row: decode rows and prefill rows of random scores, all as long as there are columns."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from cute_kernels.indexer import ops as _registered  # noqa: F401
from perf.bench import Arguments, Bench, Case, Run, not_dependent
from perf.grid import LENGTHS, draw, draw_rows, lengths, mark

PICKS = (512, 1024)
MORE_PICKS = (512, 1024, 2048)
PAGE_ROWS = 64
BATCHES = (1, 8, 64, 256)
DECODE = tuple((rows, columns) for columns in (8192, 32768) for rows in BATCHES)
LONG = ((1, 262144), (8, 262144), (80, 262144), (200, 262144), (1, 1048576))
"""(rows, columns): of a decode step, and of contexts of one and four million tokens at ratio 4."""
UNEQUAL_ROWS, UNEQUAL_COLUMNS = (16, 48, 192), 32768
PREFILL = ((4096, 4096), (4096, 16384), (1024, 65536))
UNTUNED_DECODE = tuple((rows, columns) for columns in (5000, 70000) for rows in (3, 48, 200))
UNTUNED_PREFILL = ((2000, 5000), (2000, 70000))
"""(rows, columns), with all of MORE_PICKS: neither multiples of a tile nor sizes that shapes were chosen by."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {"warps": 8, "vectors": 4},
    {"warps": 8, "vectors": 8},
    {"warps": 16, "vectors": 4},
    {"warps": 16, "vectors": 8},
    {"warps": 16, "vectors": 16},
    {"warps": 32, "vectors": 4},
    {"warps": 32, "vectors": 8},
    {"warps": 8, "vectors": 4, "cluster": 2},
    {"warps": 8, "vectors": 8, "cluster": 4},
    {"warps": 8, "vectors": 4, "tiles": 8},
    {"warps": 8, "vectors": 8, "tiles": 8},
    {"warps": 16, "vectors": 8, "tiles": 8},
    {"warps": 16, "vectors": 8, "tiles": 16},
    {"warps": 32, "vectors": 8, "tiles": 8},
    {"warps": 32, "vectors": 4, "tiles": 16},
    {"warps": 32, "vectors": 4, "cluster": 8, "tiles": 8},
    {"warps": 16, "vectors": 8, "cluster": 8, "tiles": 8},
)
"""Arguments of topk_select.of_shape. Those that are too small for a row, or hold it more than fourfold, are not run."""

WORKSPACE = 1 << 20
"""Bytes that vLLM's cooperative and persistent kernels get, as its layers do."""


def _table(rows: int, columns: int) -> torch.Tensor:
    """Pages of 64 entries, those of all requests mixed."""
    width = -(-columns // PAGE_ROWS)
    pages = torch.randperm(rows * width, device="cuda", dtype=torch.int64)
    return pages.view(rows, width).int()


def _make_all_visible(rows: int, entries: int, is_slots: bool, seed: int) -> Arguments:
    visible = torch.full((rows, 1), entries, dtype=torch.int32, device="cuda")
    out = torch.empty(rows, PICKS[0], dtype=torch.int32, device="cuda")
    return (visible, out, _table(rows, entries), PAGE_ROWS) if is_slots else (visible, out, None, 0)


def _make(op: str, rows: int, columns: int, k: int, is_slots: bool, kind: str, seed: int) -> Arguments:
    g = torch.Generator(device="cuda").manual_seed(seed)
    logits = torch.randn(rows, columns, device="cuda", generator=g)
    ends = torch.tensor(lengths(kind, rows, columns), dtype=torch.int32, device="cuda")
    out = torch.empty(rows, k, dtype=torch.int32, device="cuda")
    if op == "decode":
        slots = (_table(rows, columns), PAGE_ROWS) if is_slots else (None, 0)
        return logits, ends[:, None], out, rows, k, *slots, True
    return logits, torch.zeros_like(ends), ends, out, rows, k, True


def _case(op: str, rows: int, columns: int, k: int, is_slots: bool = False, kind: str = "") -> Case:
    name = " ".join([f"{rows}x{columns} k={k}", *["slots"] * is_slots, *[kind] * bool(kind)])
    facts = {"columns": columns, "k": k, **({"group": kind} if kind else {})}
    return Case(name, rows, partial(_make, op, rows, columns, k, is_slots, kind), facts)


def _cases(
    op: str, shapes: Sequence[tuple[int, int]], is_slots: bool = False, picks: Sequence[int] = PICKS
) -> tuple[Case, ...]:
    return tuple(
        _case(op, rows, columns, k, is_slots) for rows, columns in shapes for k in (picks[:1] if is_slots else picks)
    )


def _unequal_cases() -> tuple[Case, ...]:
    return tuple(
        _case("decode", rows, UNEQUAL_COLUMNS, k, kind=kind) for kind in LENGTHS for rows in UNEQUAL_ROWS for k in PICKS
    )


def _between(op: str, rows: tuple[int, int], columns: tuple[int, int], picks: Sequence[int]) -> tuple[Case, ...]:
    points = draw(f"top-k {op}", 2 * len(picks), rows=rows, columns=columns)
    return mark(
        _case(op, point["rows"], point["columns"], k) for point, k in zip(points, (*picks, *picks), strict=True)
    )


def _all_visible_cases(several: Sequence[int]) -> tuple[Case, ...]:
    return tuple(
        Case(f"{rows}x512" + " slots" * is_slots, rows, partial(_make_all_visible, rows, 512, is_slots), {"k": 512})
        for rows in several
        for is_slots in (False, True)
    )


def same_picks(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    """Whether nearly all picks are right, in any order, none twice: peers choose otherwise among equal scores."""
    found, right = got[0].sort(dim=1).values, want[0].sort(dim=1).values
    at = torch.searchsorted(right, found).clamp(max=right.shape[1] - 1)
    strange = right.gather(1, at) != found
    strange[:, 1:] |= (found[:, 1:] == found[:, :-1]) & (found[:, 1:] >= 0)
    return float(strange.float().mean()) < 1e-3


def _local(rest: Sequence[Any]) -> Sequence[Any]:
    """A decode call's arguments behind its scores, without those of slots and use_pdl, which only our own op has."""
    *local, table, _page_rows, _use_pdl = rest
    if table is not None:
        raise NotImplementedError("writes columns, no slots")
    return local


def _vllm(name: str) -> Callable[[], Run]:
    def load() -> Run:
        importlib.import_module("vllm._C_stable_libtorch")
        kernel = getattr(torch.ops._C, name)
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")

        def run(logits: Any, *rest: Any) -> None:
            *bounds, out, rows, k = rest[:-1] if name.endswith("prefill") else _local(rest)
            strides = logits.stride()
            if name == "top_k_per_row_prefill":
                kernel(logits, *bounds, out, rows, *strides, k)
            elif name == "top_k_per_row_decode":
                kernel(logits, 1, bounds[0], out, rows, *strides, k)
            else:
                kernel(logits, bounds[0], out, workspace, k, logits.shape[1])

        return run

    return load


def _variants(op: str) -> dict[str, Run]:
    from cute_kernels.indexer import topk_select
    from cute_kernels.runtime.arch import arch_of

    bounds_of = topk_select.decode_bounds if op == "decode" else topk_select.prefill_bounds

    def run(fields: dict[str, Any], logits: Any, *rest: Any) -> None:
        *bounds, out, rows, k = rest[:-1] if op == "prefill" else _local(rest)
        key = topk_select.of_shape(arch_of(0), **fields)
        if not logits.shape[1] <= key.capacity <= 4 * logits.shape[1]:
            raise NotImplementedError(f"holds rows of {key.capacity} columns")
        topk_select.launch_with(key, logits, *bounds_of(*bounds), out, rows, k)

    return {
        "ours " + " ".join(f"{name}={value}" for name, value in fields.items()): partial(run, fields)
        for fields in VARIANTS
    }


BENCHES = (
    Bench(
        op="all_visible_entries",
        cases=_all_visible_cases(BATCHES),
        quick=(1, 64),
        between=mark(_all_visible_cases(draw_rows("all_visible_entries", BATCHES, 2))),
    ),
    Bench(
        op="top_k_per_row_decode",
        cases=(
            *_cases("decode", DECODE + LONG),
            *_cases("decode", UNTUNED_DECODE, picks=MORE_PICKS),
            *_cases("decode", DECODE, is_slots=True),
            *_unequal_cases(),
        ),
        quick=(1, 64),
        between=_between("decode", (2, 250), (3000, 200_000), MORE_PICKS),
        peers={
            "vllm-cooperative": _vllm("cooperative_topk"),
            "vllm-persistent": _vllm("persistent_topk"),
            "vllm-per-row": _vllm("top_k_per_row_decode"),
        },
        variants=partial(_variants, "decode"),
        apart=not_dependent,
        peer_same=same_picks,
    ),
    Bench(
        op="top_k_per_row_prefill",
        cases=_cases("prefill", PREFILL) + _cases("prefill", UNTUNED_PREFILL, picks=MORE_PICKS),
        quick=(1024,),
        between=_between("prefill", (300, 4000), (3000, 100_000), MORE_PICKS),
        peers={"vllm-per-row": _vllm("top_k_per_row_prefill")},
        variants=partial(_variants, "prefill"),
        apart=not_dependent,
        peer_same=same_picks,
    ),
)
SWEEPS = {bench.op: bench.sweep for bench in BENCHES}
QUICK = {bench.op: bench.quick for bench in BENCHES}
"""Numbers of rows of a quick look."""
