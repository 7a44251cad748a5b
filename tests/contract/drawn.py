# SPDX-License-Identifier: Apache-2.0
"""Good calls that nobody wrote down: calls that an op is verified with, changed by what its schema says of an argument.

A plan names the call and the changes; the same plan always makes the same arguments. Fewer rows, other strides and
gaps, other values and holes, other scalars, optional tensors left out: the op's checks say whether a call is still one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.runtime import verify
from cute_kernels.runtime.contract import is_cache
from cute_kernels.runtime.ops import Op
from cute_kernels.runtime.verify import Example

CPU = torch.device("cpu")
POISON, WRITTEN_POISON = 0xFF, 0x7B
"""Bytes of gaps between elements: NaN, or -1; and a number around what is written."""

HOSTS = ("upload",)
"""Ints of several meanings, which the host puts together."""

SPARE = 64
"""Elements behind a tensor's last one."""


@dataclass(frozen=True)
class Plan:
    """A call of an op.

    example   which of the op's examples, counted round
    changes   seeds of what is done to it, one after the other
    """

    example: int
    changes: tuple[int, ...] = ()


class Draft:
    """The arguments of a call in the making."""

    def __init__(self, op: Op, args: Sequence[Any], draw: random.Random) -> None:
        self.arguments = op.overload._schema.arguments
        self.args = list(args)
        self.draw = draw
        self.tensors = [i for i, value in enumerate(self.args) if isinstance(value, torch.Tensor)]
        self.written = {i for i in self.tensors if self.arguments[i].alias_info is not None}

    def name(self, place: int) -> str:
        return str(self.arguments[place].name)

    def pick(self, places: Sequence[int]) -> int | None:
        return self.draw.choice(list(places)) if places else None

    def shares_memory(self, place: int) -> bool:
        memory = self.args[place].untyped_storage().data_ptr()
        return any(i != place and self.args[i].untyped_storage().data_ptr() == memory for i in self.tensors)


def is_packed(name: str, value: Any) -> bool:
    """Whether an argument has pages of packed records: what lies where in a page depends on the number of its rows."""
    return isinstance(value, torch.Tensor) and is_cache(name) and value.dtype == torch.uint8


def fewer(d: Draft) -> None:
    """Fewer rows (or columns, or heads) in all tensors that have as many, or a multiple; and in scalars that say so. A
    page of packed records keeps its rows."""
    place = d.pick([i for i in d.tensors if d.args[i].dim() and max(d.args[i].shape) > 1])
    if place is None:
        return
    shape = d.args[place].shape
    axis = 0 if d.draw.random() < 0.7 and shape[0] > 1 else d.draw.choice([i for i, n in enumerate(shape) if n > 1])
    size = shape[axis]
    kept = d.draw.choice([1, size - 1, size // 2, d.draw.randrange(size)])
    multiples = d.draw.random() < 0.5
    for i in d.tensors:
        for at, n in enumerate(d.args[i].shape[:1] if is_packed(d.name(i), d.args[i]) else d.args[i].shape):
            if n == size or (multiples and n % size == 0):
                d.args[i] = d.args[i].narrow(at, 0, n // size * kept)
    for i, value in enumerate(d.args):
        if type(value) is int and value == size and d.draw.random() < 0.8:
            d.args[i] = kept


def apart(d: Draft) -> None:
    """The same values with more room between the elements of an axis."""
    place = d.pick([i for i in d.tensors if d.args[i].dim() and d.args[i].numel() and not d.shares_memory(i)])
    if place is None:
        return
    old = d.args[place]
    axes = [i for i, n in enumerate(old.shape) if n > 1]
    if not axes:
        return
    unit = max(d.draw.choice([1, 4, 16, 64, 576]) // old.element_size(), 1)
    chosen = d.draw.choice(axes)
    strides, reach, moved = list(old.stride()), 1, 0
    for axis in sorted(range(old.dim()), key=lambda i: (old.stride(i), old.shape[i])):
        if axis == chosen:
            moved = d.draw.choice([1, 2, 5]) * unit
        if moved:
            strides[axis] = max(old.stride(axis), reach) + (moved if axis == chosen else 0)
        reach = max(reach, strides[axis] * old.shape[axis])
    first = d.draw.choice([0, unit, 128])
    memory = torch.empty(first + reach + SPARE, dtype=old.dtype)
    verify.raw_memory(memory).fill_(WRITTEN_POISON if place in d.written else POISON)
    d.args[place] = memory.as_strided(old.shape, strides, first)
    d.args[place].copy_(old)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Elements as what torch can move about: e4m3 as bytes."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 and tensor.dtype != torch.bool else tensor


def other_numbers(d: Draft) -> None:
    """An input's values in another order, or fewer of them; of floats with other signs or smaller."""
    place = d.pick([i for i in d.tensors if i not in d.written and d.args[i].numel() > 1])
    if place is None:
        return
    old, g = d.args[place], torch.Generator().manual_seed(d.draw.randrange(2**31))
    new = old
    if d.shares_memory(place):
        new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)
        verify.raw_memory(new).fill_(POISON)
    if is_cache(d.name(place)):
        pages = old.shape[0] - 1  # the last one often has a row that nobody may read
        order = torch.cat([torch.randperm(pages, generator=g), torch.tensor([pages])])
        _words(new).copy_(_words(old).clone()[order])
        d.args[place] = new
        return
    if not old.is_floating_point() and (_ascends(old) or d.name(place) in HOSTS):
        return  # first rows of requests, or requests of rows: nothing else fits them
    values = _words(old).flatten().clone()
    count = len(values)
    more = ["sign", "small"] if old.is_floating_point() else []
    how = d.draw.choice(["order", "order", "repeat", *more])
    if how == "order":
        values = values[torch.randperm(count, generator=g)]
    elif how == "repeat":
        source = values[torch.randint(0, count, (count,), generator=g)]
        values = torch.where(torch.rand(count, generator=g) < d.draw.choice([0.1, 0.9]), source, values)
    else:
        some = torch.rand(count, generator=g) < 0.5
        if old.element_size() == 1:
            values = torch.where(some, values ^ 0x80, values)
        else:
            values = torch.where(some, values * (-1.0 if how == "sign" else 0.25), values)
    _words(new).copy_(values.view(old.shape))
    d.args[place] = new


def _ascends(numbers: torch.Tensor) -> bool:
    flat = numbers.flatten()
    return numbers.dim() == 1 and bool((flat[1:] >= flat[:-1]).all())


def scalar(d: Draft) -> None:
    place = d.pick([i for i, value in enumerate(d.args) if type(value) in (bool, int, float)])
    if place is None:
        return
    value = d.args[place]
    if type(value) is bool:
        d.args[place] = not value
    elif type(value) is float:
        d.args[place] = value * d.draw.choice([0.25, 0.5, 1.0])
    else:
        d.args[place] = d.draw.choice([value - 1, value + 1, value // 2, 2 * value, 0, 1])


def left_out(d: Draft) -> None:
    """Without an optional tensor."""
    optional = [i for i in d.tensors if i not in d.written and str(d.arguments[i].type).startswith("Optional")]
    place = d.pick(optional)
    if place is not None:
        d.args[place] = None
        d.tensors.remove(place)


CHANGES: tuple[Callable[[Draft], None], ...] = (fewer, apart, other_numbers, scalar, left_out)


def call_of(op: Op, plan: Plan, examples: Sequence[Example]) -> Example | None:
    """The call of a plan, or None if the op refuses it, by its checks or for its data."""
    example = examples[plan.example % len(examples)]
    args: Sequence[Any] = verify.clone_arguments(example.args, CPU)
    for seed in plan.changes:
        draft = Draft(op, args, random.Random(seed))
        draft.draw.choice(CHANGES)(draft)
        args = draft.args
    # an example whose data break the contract is there to show that this harms nobody
    is_sound = not refuses(op.validate, example.args)
    if refuses(op.check, args) or (is_sound and refuses(op.validate, args)):
        return None
    return Example(example.name, tuple(args), example.agree)


def refuses(check: Callable[..., None] | None, args: Sequence[Any]) -> bool:
    try:
        if check is not None:
            check(*args)
    except (TypeError, ValueError):
        return True
    return False


def difference(op: Op, call: Example, got: Sequence[Any]) -> str:
    """Between the arguments after the kernel ran, on the CPU, and what the reference makes of the call; or ""."""
    want = verify.clone_arguments(call.args, CPU)
    op.reference(*want)
    if call.agree is None:
        return verify.compare_arguments([argument.name for argument in op.overload._schema.arguments], got, want)
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(mine, torch.Tensor) and mine.is_floating_point() and mine.numel():
            # values that nobody may use were moved to where they are used: both must say so
            neither = (mine.float().isnan() & theirs.float().isnan()).to(mine.device)
            _words(mine).masked_fill_(neither, 0)
            _words(theirs).masked_fill_(neither, 0)
    return call.agree(got, want)


def small_examples(op: Op, takes: Callable[[Example], bool] = lambda example: True) -> list[Example]:
    """Of the examples that write something, and that `takes` says to take, the half that needs the least memory: their
    references are quick."""
    offered = verify.examples_of(op)
    assert offered is not None, op.name
    examples = [e for e in offered() if any(value.numel() for value in op.mutated(e.args).values()) and takes(e)]
    examples.sort(key=lambda example: memory_of(example.args))
    return examples[: max(2, len(examples) // 2)]


def memory_of(args: Sequence[Any]) -> int:
    storages = [value.untyped_storage() for value in args if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
