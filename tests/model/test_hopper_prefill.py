# SPDX-License-Identifier: Apache-2.0
"""Hopper's kernels of prefill's ops, as compiled, in the model: results against float64, and other orders of what their
warps do. What they take for granted that the PTX ISA does not say is in the table."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import PLAIN_BF16, PLAIN_FP8
from cute_kernels.runtime.key import KernelKey
from cute_kernels.sparse_mla.hopper.prefill_mixed import MixedFp8ConvertedKey
from cute_kernels.sparse_mla.hopper.prefill_paged import PagedKey
from cute_kernels.sparse_mla.hopper.prefill_paged_cluster import PagedClusterKey
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import SwapAbPrefillKey
from cute_kernels.sparse_mla.select import mixed_key
from tests.compile.reports import compile_report
from tests.gpu import paged_cases, test_mixed, test_prefill
from tests.model import mutations, orders
from tests.model.hopper_problems import Mixed, MixedConverted, OnHopper, Paged, PagedCluster, Prefill
from tests.model.prefill_problems import on_host
from tests.model.ptx import parse
from tests.model.trace import Trace

Case = tuple[KernelKey, Callable[..., OnHopper], Any]
"""A kernel, a problem of its, and the call."""


PRODUCERS = range(12, 16)

PREPARES = slice(4, 8)
"""Warps of a CTA that write the first row lists where rows are split."""


def swap_ab() -> Case:
    call = test_prefill.make(s_q=3, heads=7, topk=130, lengths="odd", bad=0.2, seed=5)
    return SwapAbPrefillKey("sm_90a", 8), Prefill, call


def mixed(heads: int, dtype: torch.dtype = test_mixed.FP8, longest: int = 300) -> Case:
    """A row of five tiles, or of more keys, of one of three keys, of three tiles, and nobody's: every ring goes round,
    and the ends of rows share the stages of P."""
    rows = {"query_lens": (1, 1, 1), "seq_lens": (longest, 3, 9), "window_size": 7, "width": longest + 30}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[test_mixed.__name__], "made_of", dtype)
        call = test_mixed.make(heads=heads, more_stride=(512, 1024), seed=4, rows=(53, 2), **rows)
        call.lengths = torch.tensor([longest, -1, 150, 99], dtype=torch.int32)
        call = test_mixed.fill(call)
    kv_format = PLAIN_BF16 if dtype == test_mixed.BF16 else PLAIN_FP8
    return mixed_key("sm_90a", heads, kv_format.id), Mixed, call


def converted(longest: int = 300) -> Case:
    _, _, call = mixed(40, longest=longest)
    return MixedFp8ConvertedKey("sm_90a"), MixedConverted, call


def paged() -> Case:
    rows = {"query_lens": (1, 2), "seq_lens": (300, 6), "window_size": 70, "width": 40, "more_stride": (576, 0)}
    return PagedKey("sm_90a"), Paged, paged_cases.make(heads=8, **rows)


def two_splits() -> Case:
    """Of six tiles at most, more than lists are prepared for: a row of eleven, of one, and without keys."""
    rows = {"query_lens": (1, 1), "seq_lens": (2500, 6), "window_size": 70, "width": 600, "more_stride": (576, 0)}
    kind = functools.partial(PagedCluster, ctas=2, splits=2, split_tiles=6)
    return PagedClusterKey("sm_90a", 2), kind, paged_cases.make(heads=8, **rows)


def three_splits() -> Case:
    """As equal as can be, for four CTAs: a row of four tiles, and of one, which the last split has."""
    rows = {"query_lens": (1, 1), "seq_lens": (600, 6), "window_size": 70, "width": 150, "padding": 0}
    return PagedClusterKey("sm_90a", 4), functools.partial(PagedCluster, ctas=4, splits=3), paged_cases.make(**rows)


MIXED_HEADS = 40, 7, 16, 20

CASES: dict[str, tuple[Callable[[], Case], Any]] = {
    "paged": (paged, {}),
    "two_splits": (two_splits, {}),
    "three_splits": (three_splits, {}),
    # what scores of 40 heads have read of a tile's marks may be overwritten once their warp has voted
    **{f"mixed_{heads}": (functools.partial(mixed, heads), {"votes_order": heads == 40}) for heads in MIXED_HEADS},
    # rows of cp.async are multiplied without a proxy fence
    "swap_ab": (swap_ab, {"copies_are_fenced": False}),
    "mixed_40_bf16": (
        functools.partial(mixed, 40, test_mixed.BF16),
        {"copies_are_fenced": False, "votes_order": True},
    ),
    "mixed_40_converted": (converted, {"copies_are_fenced": False, "votes_order": True}),
    "mixed_7_bf16": (functools.partial(mixed, 7, test_mixed.BF16), {"copies_are_fenced": False}),
}
"""By name: what makes it, and what its kernel takes for granted."""


@pytest.mark.parametrize("name", CASES)
def test_in_any_order(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", ["mixed_40_bf16", "mixed_40_converted"])
def test_in_any_order_with_late_tiles(name: str) -> None:
    """A row of nine tiles, of which QK warps do not find the next one: they hand over P, and then a stage is empty that
    says nothing of the one behind it, nor of the indices that were copied with that."""
    make = {"mixed_40_bf16": functools.partial(mixed, 40, test_mixed.BF16), "mixed_40_converted": converted}[name]
    check(name, functools.partial(make, longest=550), PRODUCERS)


@functools.cache
def check(name: str, make: Callable[[], Case] | None = None, slow: Any = ()) -> list[Trace]:
    """Of each cluster, right in any order. make: of another call than CASES has; slow: warps that run last."""
    made_by, takes_for_granted = CASES[name]
    with on_host():
        key, kind, call = (make or made_by)()
    one = kind(call, parse(compile_report(key).ptx), key.smem_bytes)
    records, new = orders.recorder(one.program)
    one.check(1, seed=1, laziness=0.8, events=new, slow=slow)
    more = {"counts_versions": False, **takes_for_granted}
    return [orders.check(record, schedules=2, more=7, **more) for record in records]


def test_row_lists_are_published_behind_a_barrier_of_the_warp() -> None:
    """What a PV warp writes for the producer, and one lane publishes: racecheck, which does not follow this, reports
    it."""
    trace = check("two_splits")[0]
    name = mutations.DROPPED["warp"]
    barriers = {mutant.op: mutant for mutant in mutations.mutants(trace) if mutant.name == name}
    for steps in trace.steps[PREPARES]:
        published = next(i for i, step in enumerate(steps) if step.kind == "arrive")
        before = next(step for step in reversed(steps[:published]) if step.kind == "warp")
        found = mutations.problems(trace, barriers[before.ops[0]])
        assert found
        assert all(one.startswith("read not after the write of warp") for one in found)


@pytest.mark.parametrize(("heads", "consumers"), list(zip(MIXED_HEADS, (12, 8, 8, 12), strict=True)))
def test_one_lane_arrives_behind_a_barrier_of_its_warp(heads: int, consumers: int) -> None:
    """Warps that multiply hand over, or let go of, what all their lanes have stored or read: racecheck, which does not
    follow this, reports it. One of the barriers orders nothing else: there the warp has waited for P, or has multiplied
    what it read, since."""
    [trace] = check(f"mixed_{heads}")
    barriers = {step.ops[0] for steps in trace.steps[:consumers] for step in steps if step.kind == "warp"}
    dropped = {m.op: m for m in mutations.mutants(trace) if m.name == mutations.DROPPED["warp"] and m.op in barriers}
    assert dropped.keys() == barriers
    needless = [op for op, mutant in dropped.items() if not mutations.problems(trace, mutant)]
    assert len(needless) == 1
    assert len(barriers) == (3 if heads == 40 else 5)
