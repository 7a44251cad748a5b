# SPDX-License-Identifier: Apache-2.0
"""Wrong calls of the public functions behind good ones that have plans: refused as without plans, with the same words.
On tensors of the CPU, with kernels that do nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels.runtime import plans, verify
from tests.contract import arguments, public
from tests.contract.test_fuzz import describe, memory_of, verified_calls
from tests.runtime.conftest import Launches

CPU = torch.device("cpu")
CALLS, GOOD, MOST_BYTES = 40, slice(0, 9, 4), 1 << 24
"""Wrong calls of each function; which of the smallest good ones are before them; and what those take at most."""

PLANNED = sorted(name for name, (function, _) in public.functions().items() if hasattr(function, "__wrapped__"))


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.full
@pytest.mark.parametrize("name", PLANNED)
def test_wrong_calls_behind_good_ones(name: str, launched: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    function, op = public.functions()[name]
    plain = function.__wrapped__  # type: ignore[attr-defined]
    is_scalar, draw = public.scalars_of(function), random.Random(f"plans of {name}")
    small = [call for call in verified_calls(op) if memory_of(call) < MOST_BYTES]
    good = [call for call in small if public.named(function, op, call, True) is not None][GOOD]

    def named(number: int, allocates: bool) -> dict[str, Any]:
        values = public.named(function, op, verify.clone_arguments(good[number % len(good)], CPU), allocates)
        assert values is not None
        return values

    runs = []
    run = plans._Plan.run
    monkeypatch.setattr(plans._Plan, "run", lambda self, *args: (runs.append(self), run(self, *args))[1])
    for number in range(2 * len(good)):
        values = named(number, number < len(good))
        for _ in range(4):
            outcome(lambda values=values: function(**values))  # type: ignore[misc]
    assert runs, "no good call has a plan"
    refused = 0
    for number in range(CALLS):
        values = named(number, draw.random() < 0.5)
        changed = arguments.mistaken(draw, list(values.values()), [is_scalar[key] for key in values])
        values = dict(zip(values, changed, strict=True))
        with monkeypatch.context() as patch:
            patch.setattr(plans, "_are_on_gpu", lambda given: False)
            want = outcome(lambda values=values: plain(**values))  # type: ignore[misc]
        if want.startswith(("ValueError", "TypeError")):
            refused += 1
            for _ in range(3):
                got = outcome(lambda values=values: function(**values))  # type: ignore[misc]
                assert got == want, [describe(value) for value in values.values()]
    assert refused > CALLS // 4
