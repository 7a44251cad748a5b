# SPDX-License-Identifier: Apache-2.0
"""Every op on two streams at a time, from two threads, and on a GPU that is not the current one: the bits of one call
that runs alone."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cute_kernels.runtime import registry, verify
from cute_kernels.runtime.ops import FALLBACK_VARIABLE, Op
from tests.contract import drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CUDA = torch.device("cuda")
REPEATS = 8
OPS = sorted(registry.all_ops())


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def calls_of(op: Op) -> list[tuple[Any, ...]]:
    """The arguments of a small call and of a larger one, on the CPU."""
    examples = drawn.small_examples(op)
    return [example.args for example in (examples[0], examples[-1])]


def written(op: Op, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """All bytes behind the results, on the CPU; a workspace may hold anything."""
    return [verify.raw_memory(value).cpu() for name, value in op.mutated(args).items() if name != "workspace"]


def alone(op: Op, call: tuple[Any, ...]) -> list[torch.Tensor]:
    args = verify.clone_arguments(call, CUDA)
    op.overload(*args)
    return written(op, args)


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("name", OPS)
def test_two_threads(name: str) -> None:
    op = registry.all_ops()[name]
    calls = calls_of(op)
    want = [alone(op, call) for call in calls]
    many = [[verify.clone_arguments(call, CUDA) for _ in range(REPEATS)] for call in calls]
    torch.cuda.synchronize()
    raised: list[BaseException] = []

    def work(copies: list[tuple[Any, ...]]) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for args in copies:
                    op.overload(*args)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(copies,)) for copies in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert raised == []
    for copies, expected in zip(many, want, strict=True):
        assert all(same(written(op, args), expected) for args in copies)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_the_second_gpu_while_the_first_is_current(name: str) -> None:
    op = registry.all_ops()[name]
    for call in calls_of(op):
        args = verify.clone_arguments(call, torch.device("cuda", 1))
        op.overload(*args)
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
        assert same(written(op, args), alone(op, call))
