# SPDX-License-Identifier: Apache-2.0
"""A kernel's arguments as one record: what is compiled takes them one by one, what launches the kernel by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import cutlass.cute as cute

Record = TypeVar("Record", bound=tuple[Any, ...])
"""A NamedTuple, in the order in which arguments are given."""


def entry_point(launch: Callable[[Record], None], fakes: Record) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What KernelKey.build returns: `launch` of a record, whose fields are its arguments. What is None among the fakes
    is no argument, and None to the launch."""
    record: Any = fakes
    given = {name: fake for name, fake in record._asdict().items() if fake is not None}

    def entry(*arguments: Any) -> None:
        launch(record._replace(**dict(zip(given, arguments, strict=True))))

    # whatever refuses an argument at a launch says its name
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    entry.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in given])  # type: ignore[attr-defined]
    return cute.jit(entry, preprocess=False), tuple(given.values())
