# SPDX-License-Identifier: Apache-2.0
"""Dependent launches: an op does the same with and without, also right behind a kernel that writes what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.runtime.compile import collect
from cute_kernels.runtime.ops import Op
from cute_kernels.runtime.registry import all_ops
from cute_kernels.runtime.verify import clone_arguments, compare_arguments, examples_of, raw_memory
from tests.gpu.ahead import compile_ahead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
MOST_CALLS = 3
"""Calls of each op: those that it is verified with and that write the most."""


def arguments_of(op: Op) -> list[str]:
    return [argument.name for argument in op.overload._schema.arguments]


NAMES = sorted(name for name, op in all_ops().items() if op.kernel is not None and "use_pdl" in arguments_of(op))


def calls(op: Op) -> list[tuple[Any, ...]]:
    def written(args: tuple[Any, ...]) -> int:
        return sum(value.numel() for value in op.mutated(args).values())

    examples = examples_of(op)
    assert examples is not None
    why_not = op.load_kernel().why_not
    found = [e.args for e in examples() if not why_not(op.call_type(*clone_arguments(e.args, CUDA)))]
    return sorted(found, key=written, reverse=True)[:MOST_CALLS]


def with_pdl(op: Op, args: tuple[Any, ...], use_pdl: bool) -> tuple[Any, ...]:
    place = arguments_of(op).index("use_pdl")
    return (*args[:place], use_pdl, *args[place + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_dependent_launches_change_nothing(name: str) -> None:
    op = all_ops()[name]
    kernel, results = op.load_kernel(), []
    with collect() as keys:
        for call in calls(op):
            for use_pdl in (False, True):
                kernel.launch(op.call_type(*with_pdl(op, clone_arguments(call, CUDA), use_pdl)))
    compile_ahead(keys)
    for call in calls(op):
        for use_pdl in (False, True):
            fresh, args = clone_arguments(call, CUDA), with_pdl(op, clone_arguments(call, CUDA), use_pdl)
            memories = [(raw_memory(a), raw_memory(b)) for a, b in zip(args, fresh, strict=True) if torch.is_tensor(a)]
            record = op.call_type(*args)
            kernel.launch(record)  # linked and warm: the next launch follows the copies at once
            for _ in range(3):
                for memory, before in memories:
                    memory.copy_(before)
                kernel.launch(record)
            results.append(clone_arguments(args, CPU))
        assert compare_arguments(arguments_of(op), results[-1], results[-2]) == ""
