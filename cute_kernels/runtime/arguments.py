# SPDX-License-Identifier: Apache-2.0
"""An op's arguments by name: functions that are written over a record of them, a NamedTuple in the schema's order."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record")
T = TypeVar("T")


def of_arguments(record: type[Record]) -> Callable[[Callable[[Record], T]], Callable[..., T]]:
    """A function of a record as one of the arguments in the schema's order, by whose names it is known."""

    def decorate(body: Callable[[Record], T]) -> Callable[..., T]:
        @functools.wraps(body)
        def function(*args: Any) -> T:
            return body(record(*args))

        function.__signature__ = inspect.signature(record)  # type: ignore[attr-defined]
        return function

    return decorate
