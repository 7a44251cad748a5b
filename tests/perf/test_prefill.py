# SPDX-License-Identifier: Apache-2.0
"""The shapes that prefill is measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.runtime import kept
from cute_kernels.runtime.ops import OPS
from perf.prefill import OP, PER_ROW, SHAPES, in_order, near, portable
from perf.targets import TARGETS_US


def test_names_tell_shapes_apart() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)


def test_targets_are_those_of_shapes() -> None:
    stated = {case for _, op, case in TARGETS_US if op == OP}
    assert stated
    assert stated <= {shape.name for shape in SHAPES}


def test_arguments_are_in_the_schemas_order() -> None:
    names = [argument.name for argument in OPS[OP].overload._schema.arguments]
    assert in_order(OP, {name: name for name in sorted(names)}) == tuple(names)
    assert set(PER_ROW) < set(names)


def test_what_counts_as_near() -> None:
    """bf16's rounding of out, far less than that of lse."""
    out = torch.randn(5, 2, 512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lse = torch.tensor([[3.0, -1.0]], dtype=torch.float64).repeat(5, 1)
    want = {"out": out, "lse": lse}
    assert near({"out": out.bfloat16(), "lse": lse.float()}, want)
    assert not near({"out": out * 1.02, "lse": lse}, want)
    assert not near({"out": out.index_fill(1, torch.tensor([1]), 0.0), "lse": lse}, want)
    assert not near({"out": out, "lse": lse + 1e-3}, want)
    assert not near({"out": out, "lse": torch.full_like(lse, float("nan"))}, want)


def test_portable_calls_run_no_plan_and_leave_none() -> None:
    plans = kept.table()
    plans["before"] = None
    seen: list[Any] = []

    def call() -> None:
        seen.append(dict(plans))
        plans["inside"] = None

    portable("prefill_key", call)
    assert seen == [{}]
    assert plans == {}
