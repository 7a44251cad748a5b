# SPDX-License-Identifier: Apache-2.0
"""A kernel's arguments as one record: what is compiled takes them one by one, what launches the kernel by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import cutlass.cute as cute

Record = TypeVar("Record", bound=tuple[Any, ...])
"""A NamedTuple, in the order in which arguments are given."""


class EntryPoint:
    """The function that is compiled: `launch` of a record, whose fields are its arguments. What is None among the fakes
    is no argument, and None to the launch."""

    def __init__(self, launch: Callable[[Any], None], fakes: Any) -> None:
        self.launch, self.fakes = launch, fakes

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        self.launch(self.record(arguments))

    def record(self, arguments: tuple[Any, ...]) -> Any:
        names = [name for name, fake in self.fakes._asdict().items() if fake is not None]
        return self.fakes._replace(**dict(zip(names, arguments, strict=True)))


def entry_point(launch: Callable[[Record], None], fakes: Record) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What KernelKey.build returns."""
    return EntryPoint(launch, fakes), tuple(fake for fake in fakes if fake is not None)
