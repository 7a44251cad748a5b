# SPDX-License-Identifier: Apache-2.0
"""Argument checks, of metadata and of data: every message names the op, the argument, what was expected and what
came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

Dim = int | str | None

SCALARS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("an int", (int, torch.SymInt)),
    "float": ("a number", (float, int, torch.SymFloat, torch.SymInt)),
    "bool": ("True or False", (bool,)),
    "str": ("a string", (str,)),
    "List[int]": ("a list of ints", (list, tuple)),
}
"""Scalars by the name of their type in a schema: what they are called, and the Python types they may have."""

INT_LIMIT = 2**31
FLOAT_LIMIT = torch.finfo(torch.float32).max


class Checker:
    """Checks the arguments of one call of one op.

    Dimensions may be given by name: the first tensor that uses a name binds it, every later one must agree.
    All tensors must live on the device of the first one. Only metadata is looked at, never data, so that the
    checks also run on fake tensors and cost no synchronisation.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.dims: dict[str, tuple[Any, str]] = {}
        self.device: torch.device | None = None

    def fail(self, argument: str, expected: str, got: object, error: type[Exception] = ValueError) -> NoReturn:
        raise error(f"{self.op}: {argument}: expected {expected}, got {got}")

    def require(self, condition: Any, argument: str, expected: str, got: object) -> None:
        if not condition:
            self.fail(argument, expected, got)

    def one_of(self, argument: str, value: object, choices: Sequence[object]) -> None:
        """One of `choices`, of their type: True is not 1."""
        same = [c for c in choices if isinstance(value, type(c)) and isinstance(value, bool) == isinstance(c, bool)]
        if value not in same:
            self.fail(argument, "one of " + ", ".join(repr(c) for c in choices), repr(value))

    def scalar(self, argument: str, value: Any, kind: str) -> None:
        """A scalar that kernels can take: no bool for a number, ints of 32 bits, floats finite in fp32."""
        what, types = SCALARS[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
            plain = (bool, int, float, str, type(None))
            self.fail(argument, what, repr(value) if isinstance(value, plain) else type(value).__name__, TypeError)
        if kind == "int" and isinstance(value, int):
            self.require(-INT_LIMIT <= value < INT_LIMIT, argument, "an int of 32 bits", value)
        elif kind == "float" and isinstance(value, (int, float)):
            self.require(-FLOAT_LIMIT <= value <= FLOAT_LIMIT, argument, "a finite fp32 number", value)
        elif isinstance(value, (list, tuple)):
            for number in value:
                self.scalar(argument, number, "int")

    def ints(self, **values: Any) -> None:
        """Ints, where a function looks at them, or allocates by them, before its op does."""
        for argument, value in values.items():
            self.scalar(argument, value, "int")

    def flags(self, **values: Any) -> None:
        """Bools, as `ints`."""
        for argument, value in values.items():
            self.scalar(argument, value, "bool")

    def pair(self, argument: str, value: Any, of: str) -> tuple[Any, Any]:
        """The two elements of a tuple or list; `of` says what they are."""
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            self.fail(argument, f"a pair ({of})", type(value).__name__, TypeError)
        return value[0], value[1]

    def tensor(
        self,
        argument: str,
        value: Any,
        dtype: torch.dtype | tuple[torch.dtype, ...],
        shape: Sequence[Dim] | None = None,
        *,
        optional: bool = False,
        contiguous: bool = False,
        dense_last: bool = True,
    ) -> None:
        """Check a tensor's type, dtype, device, shape and strides.

        `shape` holds sizes, names of sizes, or None for any size. `dense_last` asks for stride 1 in the last dimension.
        """
        if value is None:
            if not optional:
                self.fail(argument, "a tensor", "None", TypeError)
            return
        if not isinstance(value, torch.Tensor):
            self.fail(argument, "a tensor", type(value).__name__, TypeError)
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        if value.dtype not in dtypes:
            self.fail(argument, "dtype " + " or ".join(str(d) for d in dtypes), value.dtype, TypeError)
        if self.device is None:
            self.device = value.device
        elif value.device != self.device:
            self.fail(argument, f"a tensor on {self.device}", f"one on {value.device}")
        if shape is not None:
            self._shape(argument, value, shape)
        if contiguous and not value.is_contiguous():
            self.fail(argument, "a contiguous tensor", f"strides {tuple(value.stride())}")
        if dense_last and value.dim() > 0 and value.size(-1) > 1 and value.stride(-1) != 1 and value.numel() > 0:
            self.fail(argument, "stride 1 in the last dimension", f"strides {tuple(value.stride())}")

    def _shape(self, argument: str, value: torch.Tensor, shape: Sequence[Dim]) -> None:
        wanted = "[" + ", ".join("any" if d is None else str(d) for d in shape) + "]"
        if value.dim() != len(shape):
            self.fail(argument, f"{len(shape)} dimensions {wanted}", f"shape {list(value.shape)}")
        for axis, want in enumerate(shape):
            have = value.shape[axis]
            if want is None:
                continue
            if isinstance(want, str):
                if want not in self.dims:
                    self.dims[want] = (have, argument)
                    continue
                bound, source = self.dims[want]
                if have != bound:
                    self.fail(argument, f"shape {wanted} with {want} = {bound} as in {source}", list(value.shape))
            elif have != want:
                self.fail(argument, f"shape {wanted}", list(value.shape))


# ---- checks of data, for the `validate` of an op
#
# They read tensors and so wait for the device: they run with CUTE_KERNELS_CHECK=1 only. What an op skips by contract,
# such as a slot outside its cache, is no error.


def distinct_slots(op: str, argument: str, slots: torch.Tensor, capacity: int) -> None:
    """No slot inside the cache (0 .. capacity - 1) may be named twice: which row would win is not defined."""
    rows = ((slots >= 0) & (slots < capacity)).nonzero().squeeze(1)
    valid = slots[rows]
    ordered, order = torch.sort(valid, stable=True)
    again = (ordered[1:] == ordered[:-1]).nonzero()
    if again.shape[0] == 0:
        return
    at = int(again[0])
    first, second = int(rows[order[at]]), int(rows[order[at + 1]])
    Checker(op).fail(
        f"{argument}[{second}]", "a slot that no other row of the call has", f"{int(slots[second])}, as in row {first}"
    )


def ascending(op: str, argument: str, starts: torch.Tensor) -> None:
    """First rows of requests must not descend."""
    down = (starts[1:] < starts[:-1]).nonzero()
    if down.shape[0]:
        at = int(down[0]) + 1
        Checker(op).fail(f"{argument}[{at}]", f"at least {int(starts[at - 1])}, the element before it", int(starts[at]))


def at_most(op: str, argument: str, values: torch.Tensor, limit: int, meaning: str) -> None:
    """No element may exceed `limit`; `meaning` says what that is."""
    above = (values > limit).nonzero()
    if above.shape[0]:
        place = above[0].tolist()
        Checker(op).fail(
            f"{argument}[{', '.join(map(str, place))}]", f"at most {limit}, {meaning}", int(values[tuple(place)])
        )
