# SPDX-License-Identifier: Apache-2.0
"""Run a compatibility call and the op it stands for on the same arguments, and compare everything they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from tests.helpers import raw_bytes


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and objects with attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "__dict__"):
        yield from tensors(vars(value))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def same_values(got: Any, want: Any) -> None:
    """Equal bits, shapes, dtypes and strides of all tensors; other values are equal."""
    got, want = list(tensors(got)), list(tensors(want))
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(bits(a), bits(b))


def agree(call: Callable[..., Any], args: Sequence[Any], op: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
    """call(*args) and op(**kwargs) return the same and leave the same bytes in the tensors they share.

    Each runs on copies of its own that keep strides and the sharing of memory. Returns what `call` returned. One of the
    two, result or memory, must show that something happened.
    """
    results, memories = [], []
    for run_call in (True, False):
        own_args, own_kwargs = deepcopy((list(args), dict(kwargs)))
        results.append(call(*own_args) if run_call else op(**own_kwargs))
        memories.append([raw_bytes(t).clone() for t in tensors(own_args)])
    same_values(results[0], results[1])
    assert all(torch.equal(a, b) for a, b in zip(*memories, strict=True))
    before = [raw_bytes(t) for t in tensors(list(args))]
    changed = any(not torch.equal(a, b) for a, b in zip(before, memories[0], strict=True))
    assert changed or any(t.numel() for t in tensors(results[0]))
    return results[0]
