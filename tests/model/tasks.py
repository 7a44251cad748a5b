# SPDX-License-Identifier: Apache-2.0
"""What is done some time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Task:
    """Something asynchronous: what it does when its time comes, and what has to be done before."""

    do: Callable[[], None]
    after: tuple[Task, ...] = ()
    is_done: bool = False
