# SPDX-License-Identifier: Apache-2.0
"""Drawn calls, on the CPU: they are calls, the same plan makes the same one, and a wrong result of one is noticed."""

from __future__ import annotations

import random

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


@pytest.mark.parametrize("name", sorted(registry.all_ops()))
def test_plans_make_calls(name: str) -> None:
    op = registry.all_ops()[name]
    examples = drawn.small_examples(op)
    made = [(plan, drawn.call_of(op, plan, examples)) for plan in plans_of(name)]
    calls = [(plan, call) for plan, call in made if call is not None]
    assert len(calls) > PLANS // 10
    changed = 0
    for plan, call in calls[:COMPARED]:
        again = drawn.call_of(op, plan, examples)
        assert again is not None
        assert same(call, again)
        assert drawn.difference(op, call, after(op, call)) == ""
        before = examples[plan.example % len(examples)]
        for argument, now, was in zip(op.overload._schema.arguments, call.args, before.args, strict=True):
            assert not drawn.is_packed(argument.name, was) or now.shape[1:] == was.shape[1:]
        changed += not same(call, before)
    assert changed > 0


@pytest.mark.parametrize("name", sorted(registry.all_ops()))
def test_a_result_that_is_not_there_is_noticed(name: str) -> None:
    """The kernel that does nothing."""
    op = registry.all_ops()[name]
    examples = drawn.small_examples(op)
    calls = [call for plan in plans_of(name) if (call := drawn.call_of(op, plan, examples)) is not None]
    assert any(drawn.difference(op, call, verify.clone_arguments(call.args, CPU)) for call in calls[:COMPARED])
