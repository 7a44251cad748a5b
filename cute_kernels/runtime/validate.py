# SPDX-License-Identifier: Apache-2.0
"""Checks of data, for the `validate` of an op: each names the op, the argument with the index of the culprit, and why.

They read tensors and so wait for the device: they run with CUTE_KERNELS_CHECK=1 only. What an op skips by contract,
such as a slot outside its cache, is no error.
"""

from __future__ import annotations

import torch

from cute_kernels.runtime.checks import Checker


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
