# SPDX-License-Identifier: Apache-2.0
"""Calls drawn from each op's schema (tests/contract/drawn.py), on a GPU against the references on the CPU.

What a deployment's kernels take is drawn, so that nothing else compiles. Hypothesis draws from a fixed seed; of what it
finds it prints the plan and the example's name. Name and changes belong into KEPT.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from cute_kernels.models import MODELS
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime import registry, verify
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, Op
from cute_kernels.runtime.verify import Example
from tests.contract import drawn
from tests.contract.drawn import CPU, Plan

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SEED = 20261127
CALLS = 1000

KEPT: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("sparse_mla_decode", "8 heads, window, 200 columns, 1 splits", (17, 168, 10780, 10780)),
    ("sparse_mla_prefill", "4 x 13, 77 of 90", (6825,)),
    (
        "sparse_mla_prefill_paged",
        "(1, 30, 0, 5, 1) x 8, window 128, 65 columns of ratio 4, ('fp8_ds_mla/1', 'fp8_ds_mla/1'), pages of (53, 2), "
        "[], as codes",
        (547,),
    ),
)
"""Calls that once went wrong: op, example, and what is done to it, see Plan. Examples are called by name: their numbers
move when others join."""

TENSOR_PARALLEL = (1, 2, 4, 8)

CHECKS = list(hypothesis.HealthCheck)
"""Of strategies: that many plans are no calls is meant."""

PLANS = st.builds(
    Plan, example=st.integers(0, 2**16), changes=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple)
)


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


@functools.cache
def bundle(arch: str) -> frozenset[Any]:
    """Kernels of every deployment of every model."""
    keys: set[Any] = set()
    for model in MODELS.values():
        keys.update(*(registry.deployment_keys(model, tp, arch) for tp in TENSOR_PARALLEL))
    return frozenset(keys)


def kernels_of(op: Op, call: Example) -> frozenset[Any] | None:
    """What the call would launch, or None if no kernel takes it, or it was drawn with too small a workspace: a CPU, for
    which calls are drawn, needs none."""
    args = verify.clone_arguments(call.args, torch.device("cuda"))
    try:
        with compile_.collect() as keys:
            op.overload(*args)
    except NotImplementedError:
        return None
    except ValueError as error:
        if ": workspace: " not in str(error):
            raise
        return None
    return frozenset(keys)


def run(op: Op, call: Example) -> str:
    """How the call differs from its reference, or ""."""
    args = verify.clone_arguments(call.args, torch.device("cuda"))
    op.overload(*args)
    return drawn.difference(op, call, verify.clone_arguments(args, CPU))


@pytest.mark.parametrize("name", sorted(op.name for op in registry.ops_with_kernels()))
def test_drawn_calls_agree_with_their_references(name: str) -> None:
    op = registry.all_ops()[name]
    served = bundle(arch_of(torch.cuda.current_device()))
    ready: set[Any] = set()

    def is_served(example: Example) -> bool:
        keys = kernels_of(op, example)
        return keys is not None and keys <= served

    examples = drawn.small_examples(op, is_served)
    assert examples, "no example is a deployment's call"
    for example in examples:
        ready |= kernels_of(op, example) or set()
    ran = 0

    @hypothesis.seed(SEED)
    @hypothesis.settings(
        max_examples=CALLS, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(PLANS)
    def agrees(plan: Plan) -> None:
        nonlocal ran
        call = drawn.call_of(op, plan, examples)
        keys = None if call is None else kernels_of(op, call)
        if call is None or keys is None or not keys <= ready:
            hypothesis.reject()
        assert run(op, call) == "", call.name
        ran += 1

    agrees()
    assert ran >= CALLS


@pytest.mark.parametrize(("name", "example", "changes"), KEPT, ids=[name for name, _, _ in KEPT])
def test_kept_calls_agree_with_their_references(name: str, example: str, changes: tuple[int, ...]) -> None:
    op = registry.all_ops()[name]
    offered = verify.examples_of(op)
    assert offered is not None
    call = drawn.call_of(op, Plan(0, changes), [one for one in offered() if one.name == example])
    assert call is not None
    try:
        why = run(op, call)
    except NotImplementedError:
        pytest.skip("no kernel takes it here")
    assert why == ""
