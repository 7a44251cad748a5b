# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of every op: refused with an error that names what is wrong, and nothing is written before it."""

from __future__ import annotations

import ctypes
import functools
import random
import re
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.runtime import registry, verify
from cute_kernels.runtime.contract import is_cache
from cute_kernels.runtime.ops import Op
from tests.contract import arguments, public

CALLS = 1000
FUNCTION_CALLS = 300
EXAMPLES = 4
"""Good calls of each op that are changed, the smallest of those it is verified with that write something."""

RUNS = 30
"""Accepted calls of each op whose reference runs: what raises there has perhaps written."""

LARGEST = 2**31 - 1
"""An int that every op takes, as large as kernels can; what it asks for need not fit this machine."""

CPU = torch.device("cpu")


def memory_of(args: tuple[Any, ...]) -> int:
    return sum(value.untyped_storage().nbytes() for value in args if isinstance(value, torch.Tensor))


def verified_calls(op: Op) -> list[tuple[Any, ...]]:
    """All that write something, small ones first."""
    examples = verify.examples_of(op)
    assert examples is not None, op.name
    calls = [e.args for e in examples() if any(value.numel() for value in op.mutated(e.args).values())]
    return sorted(calls, key=memory_of)


def good_calls(op: Op) -> list[tuple[Any, ...]]:
    """Few and small, but with every optional tensor in one of them."""
    return calls_of(op.name)[0]


@functools.cache
def calls_of(name: str) -> tuple[list[tuple[Any, ...]], tuple[Any, ...] | None]:
    """Good calls of an op, and one with room between pages: all there are, a hundred sometimes, are made once."""
    op = registry.all_ops()[name]
    calls = verified_calls(op)
    return _few(calls), next((call for call in calls if has_room(op, call)), None)


def has_room(op: Op, call: tuple[Any, ...]) -> bool:
    """Whether the paged caches of a call have at least two pages, apart from one another, or the op has none."""
    places = [i for i, argument in enumerate(op.overload._schema.arguments) if is_cache(argument.name)]
    caches = [call[i] for i in places if call[i] is not None]
    return all(c.shape[0] > 1 and c.stride(0) > c[0].numel() for c in caches) and bool(caches or not places)


def _few(calls: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    absent = {place for place in range(len(calls[0])) if calls[0][place] is None}
    chosen = calls[: EXAMPLES - 1]
    fuller = [c for c in calls if any(c[place] is not None for place in absent)]
    return [*chosen, *fuller[:1]]


def complaint(error: BaseException) -> str:
    """What is wrong with a refusal, or nothing."""
    if not isinstance(error, (ValueError, TypeError)):
        return f"{type(error).__name__}: {error}"
    if not re.match(r"\w+: ([\w ]+: )*[\w.\[\]]+: expected .+, got ", str(error), re.DOTALL):
        return f"{type(error).__name__} without op, argument, expectation or what came: {error}"
    return ""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """So that a call which asks for hundreds of GB does not get them, whatever the machine promises."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**32, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


class Calls:
    """Copies of good calls to be changed, each made anew only when a call that was accepted may have written to it."""

    def __init__(self, calls: Sequence[tuple[Any, ...]]) -> None:
        self.calls = calls
        self.copies: dict[int, tuple[tuple[Any, ...], dict[int, torch.Tensor]]] = {}
        """By number: a copy; and by the addresses of its memories, what they hold."""

    def copy(self, number: int) -> tuple[Any, ...]:
        index = number % len(self.calls)
        if index not in self.copies:
            call = self.calls[index]
            copy = verify.clone_arguments(call, CPU)
            memories = zip(map(verify.raw_memory, _tensors(copy)), map(verify.raw_memory, _tensors(call)), strict=True)
            self.copies[index] = copy, {memory.data_ptr(): original for memory, original in memories}
        return self.copies[index][0]

    def is_refused(self, function: Callable[[], object], values: Sequence[Any], number: int) -> bool:
        """Whether a call with values made of copy(number) is refused as it must be, with nothing written to them."""
        index = number % len(self.calls)
        originals = self.copies[index][1]
        memories = {memory.data_ptr(): memory for memory in map(verify.raw_memory, _tensors(values))}
        before = {place: originals[place] if place in originals else memories[place].clone() for place in memories}
        try:
            function()
        except Exception as error:
            raised = error
        else:
            del self.copies[index]
            return False
        if "allocate memory" in str(raised) and any(type(value) is int and value == LARGEST for value in values):
            del self.copies[index]  # it asked for so much
            return False
        assert complaint(raised) == "", f"{complaint(raised)}, {[describe(value) for value in values]}"
        for place, memory in memories.items():
            assert holds(memory, before[place]), (
                f"written before it raised {raised!r}, {[describe(value) for value in values]}"
            )
        return True


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t


def holds(memory: torch.Tensor, bytes_: torch.Tensor) -> bool:
    """Whether all bytes of two memories are equal, without what torch.equal costs: tens of thousands are compared."""
    size = memory.numel()
    return size == bytes_.numel() and _memcmp(memory.data_ptr(), bytes_.data_ptr(), size) == 0


def _tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [value.detach() for value in values if isinstance(value, torch.Tensor) and value.device == CPU]


@pytest.mark.parametrize("name", sorted(registry.all_ops()))
def test_wrong_arguments_of_ops(name: str) -> None:
    op = registry.all_ops()[name]
    assert op.call is not None
    is_scalar = ["Tensor" not in str(argument.type) for argument in op.overload._schema.arguments]
    draw = random.Random(name)
    calls = Calls(good_calls(op))
    accepted, refused = 0, 0
    for number in range(CALLS):
        args = arguments.mistaken(draw, calls.copy(number), is_scalar)
        if accepted < RUNS or not passes(op, args):
            if calls.is_refused(partial(op.call, op.call_type(*args)), args, number):
                refused += 1
            else:
                accepted += 1
    assert refused > CALLS // 4


def passes(op: Op, args: Sequence[Any]) -> bool:
    try:
        op.check(*args)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", sorted(public.functions()))
def test_wrong_arguments_of_functions(name: str) -> None:
    function, op = public.functions()[name]
    is_scalar = public.scalars_of(function)
    draw = random.Random(name)
    calls = Calls([call for call in good_calls(op) if public.named(function, op, call, True) is not None])
    accepted, refused = 0, 0
    for number in range(FUNCTION_CALLS):
        call = calls.copy(number)
        values = public.named(function, op, call, draw.random() < 0.7)
        assert values is not None
        more = {key: default for key, default in public.defaults(function).items() if key not in values}
        values |= {key: more[key] for key in draw.sample(sorted(more), draw.randint(0, min(1, len(more))))}
        changed = arguments.mistaken(draw, list(values.values()), [is_scalar[key] for key in values])
        values = dict(zip(values, changed, strict=True))
        if accepted >= RUNS:
            continue
        if calls.is_refused(partial(function, **values), list(values.values()), number):
            refused += 1
        else:
            accepted += 1
    assert refused > 20


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)} {tuple(value.stride())} on {value.device}"
    return repr(value)
