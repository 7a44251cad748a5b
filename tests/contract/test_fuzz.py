"""Wrong arguments of every op: refused with a ValueError or TypeError that names what is wrong, nothing written before."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch

from cute_kernels.runtime import registry, verify
from cute_kernels.runtime.ops import Op
from tests.contract import arguments

CALLS = 1000
EXAMPLES = 4
"""Good calls of each op that are changed, the smallest of those it is verified with that write something."""

RUNS = 150
"""Accepted calls of each op whose reference runs: what raises there has perhaps written."""

CPU = torch.device("cpu")


def memory_of(args: tuple[Any, ...]) -> int:
    return sum(value.untyped_storage().nbytes() for value in args if isinstance(value, torch.Tensor))


def good_calls(op: Op) -> list[tuple[Any, ...]]:
    """Few and small, but with every optional tensor in one of them."""
    examples = verify.examples_of(op)
    assert examples is not None, op.name
    calls = [e.args for e in examples() if any(value.numel() for value in op.mutated(e.args).values())]
    calls.sort(key=memory_of)
    absent = {place for place in range(len(calls[0])) if calls[0][place] is None}
    chosen = calls[: EXAMPLES - 1]
    fuller = [c for c in calls if any(c[place] is not None for place in absent)]
    return [*chosen, *fuller[:1]]


def complaint(op: Op, error: BaseException) -> str:
    """What is wrong with a refusal, or nothing."""
    if not isinstance(error, (ValueError, TypeError)):
        return f"{type(error).__name__}: {error}"
    if not re.match(rf"{op.name}: ([\w ]+: )*[\w.\[\]]+: expected .+, got ", str(error), re.DOTALL):
        return f"{type(error).__name__} without op, argument, expectation or what came: {error}"
    return ""


@pytest.mark.parametrize("name", sorted(registry.all_ops()))
def test_wrong_arguments(name: str) -> None:
    op = registry.all_ops()[name]
    assert op.call is not None
    is_scalar = ["Tensor" not in str(argument.type) for argument in op.overload._schema.arguments]
    draw = random.Random(name)
    calls = good_calls(op)
    runs, refused = 0, 0
    for number in range(CALLS):
        good = calls[number % len(calls)]
        args = arguments.mistaken(draw, verify.clone_arguments(good, CPU), is_scalar)
        error: BaseException | None = None
        try:
            op.check(*args)
        except Exception as raised:
            error = raised
        if error is None and runs >= RUNS:
            continue
        runs += error is None
        tensors = [value for value in args if isinstance(value, torch.Tensor) and value.device == CPU]
        before = [verify.raw_memory(value.detach()).clone() for value in tensors]
        try:
            op.call(*args)
        except Exception as raised:
            error = raised
        else:
            continue
        refused += 1
        told = f"call {number}: {[describe(value) for value in args]}"
        assert complaint(op, error) == "", told
        for value, was in zip(tensors, before, strict=True):
            assert torch.equal(verify.raw_memory(value.detach()), was), f"written before it raised {error!r}, {told}"
    assert refused > CALLS // 4


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {tuple(value.stride())} on {value.device}"
    return repr(value)
