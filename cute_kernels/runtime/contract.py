# SPDX-License-Identifier: Apache-2.0
"""What every op's arguments must keep, whatever the op means: checked from its schema, before the op's own checks.

* Scalars are of the schema's type: no bool where a number is meant, ints of 32 bits, floats finite in fp32.
* Inputs need no gradient, unless grad mode is off: no op has a backward pass.
* A written tensor holds each of its elements once, and shares none with another argument. Elements count, never ranges
  of bytes: interleaved views of one buffer are fine. Two paged caches may be views of one pool: which pages a call
  writes is said by slots and tables, so by data. A pair that the op declares `in_place` may be one and the same tensor.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from cute_kernels.runtime.checks import SCALARS, Checker

MOST_WORK = 10_000
"""Steps of the search for a shared element of two interleaved tensors; without an answer they are accepted."""


MOST_DISTANCES = 64
"""Pairs of tensors and distances between them that are remembered as those of tensors without a common element."""


class Contract:
    """The contract of one op.

    schema      its torch schema; caches are the tensors whose names end with "cache", rotation tables excepted
    in_place    written tensor -> the input that it may be: the same memory, shape and strides
    """

    def __init__(self, op: str, schema: Any, in_place: Mapping[str, str]) -> None:
        self.op = op
        self.names = [argument.name for argument in schema.arguments]
        kinds = [str(argument.type) for argument in schema.arguments]
        self.scalars = [(i, kind) for i, kind in enumerate(kinds) if kind in SCALARS]
        tensors = [i for i in range(len(kinds)) if i not in dict(self.scalars)]
        self.tensors = tensors
        self.written = [i for i in tensors if schema.arguments[i].alias_info is not None]
        caches = {i for i in tensors if is_cache(self.names[i])}
        pairs = [(i, j) for i in tensors for j in tensors if i < j]
        # pairs that may share elements, and those that may be one tensor
        self.free = {(i, j) for i, j in pairs if {i, j} <= caches or not {i, j} & set(self.written)}
        self.apart = tuple(pair for pair in pairs if pair not in self.free)
        self.same = {tuple(sorted((self.names.index(a), self.names.index(b)))) for a, b in in_place.items()}
        self.has_plain_scalars = _plain_scalars(self.scalars)

    def check_scalars(self, args: Sequence[Any]) -> None:
        c = Checker(self.op)
        for i, kind in self.scalars:
            c.scalar(self.names[i], args[i], kind)

    def check_tensors(self, args: Sequence[Any]) -> None:
        """Gradients and shared elements; tensors that are none are left to the op's own checks."""
        c = Checker(self.op)
        if torch.is_grad_enabled():
            for i in self.tensors:
                if isinstance(args[i], torch.Tensor) and args[i].requires_grad:
                    c.fail(
                        self.names[i],
                        "a tensor that needs no gradient",
                        "one with requires_grad: this op has no backward pass. Detach it, or call under "
                        "torch.no_grad()",
                    )
        for i in self.written:
            if isinstance(args[i], torch.Tensor) and not lies_apart(args[i]):
                shape = f"strides {tuple(args[i].stride())} of shape {list(args[i].shape)}"
                c.fail(self.names[i], "a tensor whose elements lie apart", shape)
        self.check_apart(args)

    def check_apart(self, args: Sequence[Any]) -> None:
        """No written tensor shares an element with another argument."""
        spans = sorted((*span(args[i]), i) for i in self.tensors if isinstance(args[i], torch.Tensor))
        reached = (0, -math.inf)  # memory and farthest byte of the spans so far
        for at, (memory, first, end, i) in enumerate(spans):
            if first < end and (memory, first) < reached:
                for other, other_first, other_end, j in spans[:at]:
                    if other == memory and first < other_end and other_first < other_end:
                        self.check_pair(args, min(i, j), max(i, j), (first - other_first) * (1 if j < i else -1))
            reached = max(reached, (memory, end))

    def check_pair(self, args: Sequence[Any], i: int, j: int, distance: Any) -> None:
        """Two tensors whose spans overlap, the second one `distance` bytes behind the first."""
        if (i, j) in self.free:
            return
        is_same = distance == 0 and _is_alike(args[i], args[j])
        if (is_same and (i, j) in self.same) or not shares_element(args[i], args[j], distance):
            return
        out, given = (i, j) if i in self.written else (j, i)
        expected = f"memory that {self.names[given]} has no element of"
        expected += f", or the very tensor {self.names[given]}" if (i, j) in self.same else ""
        Checker(self.op).fail(self.names[out], expected, f"a tensor that overlaps {self.names[given]}")


class Layout:
    """What calls that agree in all but addresses have in common: the bytes that their tensors span.

    Spans that do not meet need no second look, and so end nearly all calls at new addresses. Those that meet are looked
    into once for each distance between them.
    """

    def __init__(self, contract: Contract, args: Sequence[Any]) -> None:
        self.contract = contract
        self.present = [i for i in contract.tensors if isinstance(args[i], torch.Tensor)]
        spans = [span(args[i]) for i in self.present]
        self.sizes = tuple(end - first for _, first, end in spans)
        places = [place for place, size in enumerate(self.sizes) if size]
        pairs = itertools.combinations(places, 2)
        self.pairs = tuple((a, b) for a, b in pairs if (self.present[a], self.present[b]) not in contract.free)
        self.are_disjoint = disjoint(len(self.present), self.pairs)
        self.apart: set[tuple[int, int, int]] = set()

    def check(self, addresses: Sequence[int], args: Sequence[Any]) -> None:
        """As Contract.check_apart does. addresses   of the tensors among `args`, in order"""
        if not self.are_disjoint(addresses, self.sizes):
            for a, b in self.pairs:
                distance = addresses[b] - addresses[a]
                if -self.sizes[b] < distance < self.sizes[a] and (a, b, distance) not in self.apart:
                    self.contract.check_pair(args, self.present[a], self.present[b], distance)
                    if len(self.apart) >= MOST_DISTANCES:
                        self.apart.clear()
                    self.apart.add((a, b, distance))


@functools.cache
def disjoint(count: int, pairs: Sequence[tuple[int, int]]) -> Callable[[Sequence[int], Sequence[int]], bool]:
    """Whether none of these pairs of `count` spans meet, of their first bytes and sizes: one expression, as calls at
    new addresses ask."""
    places = range(count)
    names = [", ".join(f"{letter}{place}" for place in places) + "," * (count > 0) for letter in "as"]
    lines = ["def disjoint(firsts, sizes):"]
    lines += [f" {name} = {values}" for name, values in zip(names, ("firsts", "sizes"), strict=True) if name]
    lines += [f" z{place} = a{place} + s{place}" for place in places]
    lines += [" return " + (" and ".join(f"(z{a} <= a{b} or z{b} <= a{a})" for a, b in pairs) or "True")]
    defined: dict[str, Any] = {}
    exec("\n".join(lines), defined)
    found: Callable[[Sequence[int], Sequence[int]], bool] = defined["disjoint"]
    return found


def is_cache(name: str) -> bool:
    return name.endswith("cache") and not name.endswith("cos_sin_cache")


def _plain_scalars(scalars: Sequence[tuple[int, str]]) -> Callable[[Sequence[Any]], bool]:
    """Whether all scalars of a call have the very types of the schema: one expression, as every call asks.

    torch would take a bool for an int and anything for a bool before the op sees it.
    """
    kinds = {"List[int]": "in (list, tuple)"}
    tests = [f"type(args[{i}]) {kinds.get(kind, f'is {kind}')}" for i, kind in scalars]
    plain: Callable[[Sequence[Any]], bool] = eval(f"lambda args: {' and '.join(tests) or 'True'}")
    return plain


# ---- elements in memory ----------------------------------------------------------------------------------------------


def _is_symbolic(tensor: torch.Tensor) -> bool:
    return any(isinstance(number, torch.SymInt) for number in (*tensor.shape, *tensor.stride()))


def lies_apart(tensor: torch.Tensor) -> bool:
    """Whether each element has an address of its own: sorted, each stride exceeds the extent of those below it.

    Of symbolic sizes only a stride of 0 is looked at.
    """
    if _is_symbolic(tensor):
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        sizes = zip(tensor.stride(), tensor.shape, strict=True)
        return not any(
            isinstance(stride, int) and stride == 0 and statically_known_true(size > 1) for stride, size in sizes
        )
    if tensor.is_contiguous() or tensor.numel() == 0:
        return True
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def span(tensor: torch.Tensor) -> tuple[int, Any, Any]:
    """(memory, first byte, one past the last): the address space, or the storage of a tensor that has no address."""
    size = tensor.element_size()
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        memory, first = tensor.untyped_storage()._cdata, tensor.storage_offset() * size
        if _is_symbolic(tensor) or isinstance(first, torch.SymInt):
            return memory, 0, math.inf
    else:
        memory, first = 0, tensor.data_ptr()
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return memory, first, first + count * size


def _is_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


class _Elements:
    """Elements in memory, as numpy's solver of address equations asks for them. Nothing is read."""

    def __init__(self, tensor: torch.Tensor, address: int) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (address, True),
        }


def shares_element(a: torch.Tensor, b: torch.Tensor, distance: Any) -> bool:
    """Whether two tensors, b starting `distance` bytes behind a, have a byte in common.

    Symbolic ones have if they are the same object; what cannot be decided cheaply counts as apart.
    """
    if _is_symbolic(a) or _is_symbolic(b):
        return a is b
    base = 1 << 60
    first, second = (np.asarray(_Elements(t, at)) for t, at in ((a, base), (b, base + distance)))
    try:
        return bool(np.shares_memory(first, second, MOST_WORK))  # type: ignore[arg-type]  # any number of steps
    except np.exceptions.TooHardError:
        return False
