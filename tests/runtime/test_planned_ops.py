# SPDX-License-Identifier: Apache-2.0
"""Plans of the public functions, on every example of every op: what a plan launches at other addresses is what the
function itself launches there. On tensors of the CPU, with kernels that note their arguments."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import plans
from cute_kernels.runtime.ops import Op
from cute_kernels.runtime.registry import ops_with_kernels
from cute_kernels.runtime.verify import examples_of
from perf import public
from tests.runtime.conftest import Launches

EXAMPLES = 12
"""Of an op, at most."""


class Mover:
    """Puts tensors into other memory, as aligned as they were; those of one storage stay together."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.misaligned: list[torch.Tensor] = []

    def storage(self, old: torch.UntypedStorage) -> torch.UntypedStorage:
        while old._cdata not in self.storages:
            memory = torch.empty(old.nbytes(), dtype=torch.uint8)
            self.misaligned.append(memory)
            if (memory.data_ptr() - old.data_ptr()) % plans.ALIGNMENT == 0:
                self.storages[old._cdata] = memory.untyped_storage()
        return self.storages[old._cdata]

    def __call__(self, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(self, value))
        if isinstance(value, SimpleNamespace):
            return SimpleNamespace(**{name: self(inner) for name, inner in vars(value).items()})
        if not isinstance(value, torch.Tensor):
            return value
        storage = self.storage(value.untyped_storage())
        empty = torch.empty(0, dtype=value.dtype)
        return empty.set_(storage, value.storage_offset(), value.shape, value.stride())


def seen(values: Sequence[Any], given: Sequence[torch.Tensor], allocated: Sequence[torch.Tensor]) -> list[Any]:
    """What a kernel would make of its arguments. What the call allocated is somewhere, and what has no elements is
    nowhere."""
    nowhere = {0, *(tensor.data_ptr() for tensor in (*given, *allocated) if tensor.numel() == 0)}
    nowhere -= {tensor.data_ptr() for tensor in given if tensor.numel()}

    def place(address: int) -> Any:
        for number, tensor in enumerate(allocated):
            if 0 <= address - tensor.data_ptr() < tensor.nbytes:
                return number, address - tensor.data_ptr()
        return "nowhere" if address in nowhere else address

    return [
        (place(value.data_ptr() if value.numel() else 0), value.dtype, tuple(value.shape), value.stride())
        if isinstance(value, torch.Tensor)
        else place(value)
        if type(value) is int
        else value
        for value in values
    ]


def planned_function(call: Any) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """(a public function without its plans, arguments)"""
    return call.func.__wrapped__, call.args, call.keywords


def results(value: Any) -> list[Any]:
    return [*value] if isinstance(value, tuple) else [value]


def describe(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    read = [value.slot_mapping if isinstance(value, SimpleNamespace) else value for value in (*args, *kwargs.values())]
    values, kinds = plans._flatten(read)
    describe = plans._describer(tuple(plans._leaves(kinds)))
    return None if describe is None else describe(values)


@pytest.mark.parametrize("op", ops_with_kernels(), ids=lambda op: op.name)
def test_a_plan_launches_what_the_function_does(op: Op, launched: Launches) -> None:
    examples = examples_of(op)
    assert examples is not None
    planned = 0
    for example in itertools.islice(examples(), EXAMPLES):
        function, args, kwargs = planned_function(public.bind(op.name, example.args))
        with compile_.record_launches() as launches, plans._Watch() as watch:
            result = function(*args, **kwargs)
        if not launches:
            continue
        metadata, tensors, _ = describe(args, kwargs)
        plan = plans._plan(tensors, watch, launches, result)
        assert plan is not None, example.name
        del tensors, result, watch, launches
        move = Mover()
        args, kwargs = move(args), {name: move(value) for name, value in kwargs.items()}
        metadata_there, tensors, addresses = describe(args, kwargs)
        assert metadata_there == metadata
        assert plan.fits(addresses)
        launched.clear()
        with plans._Watch() as watch:
            result = function(*args, **kwargs)
        want = [[key, *seen(given, tensors, watch.allocated)] for key, given in launched]
        want.append(seen(results(result), tensors, watch.allocated))
        launched.clear()
        with plans._Watch() as watch:
            result = plan.run(tensors, addresses)
        got = [[key, *seen(given, tensors, watch.allocated)] for key, given in launched]
        got.append(seen(results(result), tensors, watch.allocated))
        assert got == want, example.name
        planned += 1
    assert planned
