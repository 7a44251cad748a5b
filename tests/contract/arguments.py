# SPDX-License-Identifier: Apache-2.0
"""Arguments that somebody might pass by mistake: one or two of a good call's replaced, drawn from the op's schema."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

NUMBERS: list[Any] = [
    *(-(2**31) - 1, -(2**31), -64, -1, 0, 1, 2, 3, 4, 7, 64, 100, 128, 129, 2**20, 2**31 - 1, 2**31, 2**40),
    *(
        2**63 - 1,
        2**63,
        2**64,
        -(2**64),
        0.0,
        0.5,
        1.5,
        -1.0,
        1e-30,
        1e38,
        1e39,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
]
"""Of any scalar's place: whole, broken, huge."""

NO_NUMBERS: list[Any] = [None, True, False, "", "64", "fp8_ds_mla/1", b"64", (), [1], (1, 2), 1j, object(), torch.int32]

DTYPES = [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn, torch.bool]


def scalar(draw: random.Random) -> Any:
    return draw.choice(NUMBERS if draw.random() < 0.7 else NO_NUMBERS)


def tensor(draw: random.Random, value: Any, others: Sequence[torch.Tensor]) -> Any:
    """Something in place of the tensor (or None) `value`."""
    if draw.random() < 0.12 or not isinstance(value, torch.Tensor):
        return draw.choice([*NO_NUMBERS, *others, torch.zeros(3), torch.zeros(()), value])
    return draw.choice(CHANGES)(draw, value, others)


def _dtype(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=draw.choice(DTYPES))


def _axis(draw: random.Random, x: torch.Tensor) -> int:
    return draw.randrange(x.dim()) if x.dim() else 0


def _shorter(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    axis = _axis(draw, x)
    if x.dim() == 0 or x.shape[axis] == 0:
        return x[None]
    keep = draw.choice([0, 1, x.shape[axis] - 1])
    return x.narrow(axis, draw.choice([0, x.shape[axis] - keep]), keep)


def _longer(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    shape = list(x.shape)
    if shape:
        shape[_axis(draw, x)] += draw.choice([1, 3, 128])
    return torch.zeros(shape, dtype=x.dtype)


def _rank(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    return draw.choice(
        [x[None], x.unsqueeze(-1), x.flatten() if x.is_contiguous() else x[None], x[:0] if x.dim() else x]
    )


def _transposed(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    return x.transpose(_axis(draw, x), _axis(draw, x)) if x.dim() else x


def _gaps(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """The same values in a wider tensor: other strides, and perhaps an odd address."""
    shape = list(x.shape)
    if not shape:
        return x
    axis, start = _axis(draw, x), draw.choice([0, 1, 3])
    shape[axis] = shape[axis] * 2 + 3
    step = draw.choice([1, 2])
    wide = torch.zeros(shape, dtype=x.dtype)
    index = [slice(None)] * x.dim()
    index[axis] = slice(start, start + x.shape[axis] * step, step)
    view = wide[tuple(index)]
    return view.copy_(x) if view.shape == x.shape else view


def _stacked(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Elements on top of each other."""
    if x.numel() == 0 or x.dim() == 0:
        return x
    if draw.random() < 0.5:
        return x.narrow(_axis(draw, x), 0, 1).expand(x.shape) if x.dim() else x
    return x.as_strided(x.shape, (1,) * x.dim(), x.storage_offset())


def _gradient(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    return x.detach().clone().requires_grad_() if x.is_floating_point() else x


def _elsewhere(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    return x.to("meta")


def _another(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Another argument, or its memory in the shape of this one."""
    other = draw.choice(list(others))
    need = x.numel() * x.element_size()
    if draw.random() < 0.7 and x.dim() and need and other.untyped_storage().nbytes() >= need + 16:
        typed = torch.empty(0, dtype=x.dtype)
        offset = draw.choice([0, 0, 1]) if other.untyped_storage().nbytes() >= 2 * need + 16 else 0
        strides = torch.empty(x.shape, device="meta").stride()
        return typed.set_(other.untyped_storage(), offset, x.shape, strides)
    return other


def _same(draw: random.Random, x: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    return x


CHANGES = [
    _dtype,
    _shorter,
    _shorter,
    _longer,
    _rank,
    _transposed,
    _gaps,
    _gaps,
    _stacked,
    _stacked,
    _gradient,
    _elsewhere,
]
CHANGES += [_another, _another, _same]


def mistaken(draw: random.Random, args: Sequence[Any], is_scalar: Sequence[bool]) -> list[Any]:
    """A call's arguments, one to three of them changed."""
    changed = list(args)
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    for place in draw.sample(range(len(args)), draw.choice([1, 1, 1, 2, 3]) if len(args) > 2 else 1):
        if is_scalar[place]:
            changed[place] = scalar(draw)
        else:
            changed[place] = tensor(draw, args[place], tensors)
    return changed
