# SPDX-License-Identifier: Apache-2.0
"""Drawn calls, on the CPU: they are calls, the same plan makes the same one, and a wrong result of one is noticed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from cute_kernels.runtime import registry, verify
from cute_kernels.runtime.ops import Op
from cute_kernels.runtime.verify import Example
from tests.contract import drawn
from tests.contract.drawn import CPU, Plan

PLANS = 40
COMPARED = 5


def plans_of(name: str) -> list[Plan]:
    draw = random.Random(name)
    return [
        Plan(draw.randrange(2**16), tuple(draw.randrange(2**32) for _ in range(draw.randint(1, 3))))
        for _ in range(PLANS)
    ]


def same(a: Example, b: Example) -> bool:
    return all(
        torch.equal(verify.raw_memory(x), verify.raw_memory(y)) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a.args, b.args, strict=True)
    )


def after(op: Op, call: Example) -> tuple[object, ...]:
    args = verify.clone_arguments(call.args, CPU)
    op.reference(*args)
    return args


@dataclass(frozen=True)
class Drawn:
    """Calls of an op and the plans that they were made by."""

    op: Op
    examples: list[Example]
    calls: list[tuple[Plan, Example]]


@pytest.fixture(scope="module", params=sorted(registry.all_ops()))
def made(request: pytest.FixtureRequest) -> Drawn:
    op = registry.all_ops()[request.param]
    examples = drawn.small_examples(op)
    plans = [(plan, drawn.call_of(op, plan, examples)) for plan in plans_of(op.name)]
    return Drawn(op, examples, [(plan, call) for plan, call in plans if call is not None])


def test_plans_make_calls(made: Drawn) -> None:
    op, examples, calls = made.op, made.examples, made.calls
    assert len(calls) > PLANS // 10
    changed = 0
    for plan, call in calls[:COMPARED]:
        again = drawn.call_of(op, plan, examples)
        assert again is not None
        assert same(call, again)
        assert drawn.difference(op, call, after(op, call)) == ""
        before = examples[plan.example % len(examples)]
        for argument, now, was in zip(op.overload._schema.arguments, call.args, before.args, strict=True):
            if now is not None and drawn.is_packed(argument.name, was):
                assert now.shape[1:] == was.shape[1:]
        changed += not same(call, before)
    assert changed > 0


def test_a_result_that_is_not_there_is_noticed(made: Drawn) -> None:
    """The kernel that does nothing."""
    calls = [call for _, call in made.calls[:COMPARED]]
    assert any(drawn.difference(made.op, call, verify.clone_arguments(call.args, CPU)) for call in calls)
