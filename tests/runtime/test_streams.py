# SPDX-License-Identifier: Apache-2.0
"""Streams of CUDA's own, without a GPU: what is asked for, and what is said if there are none."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.runtime.streams import make_stream

cuda = pytest.importorskip("cuda.bindings.runtime", reason="cuda-python is not installed")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What CUDA and torch were asked for."""
    done: list[Any] = []
    fine = cuda.cudaError_t.cudaSuccess

    def note(what: Any, answer: Any) -> Any:
        done.append(what)
        return answer

    monkeypatch.setattr(torch.cuda, "device", lambda index: note(index, contextlib.nullcontext()))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(at=handle, device=device))
    monkeypatch.setattr(cuda, "cudaSetDevice", lambda index: note(("set", index), (fine,)))
    monkeypatch.setattr(cuda, "cudaStreamCreateWithFlags", lambda flags: note(("make", flags), (fine, 0x50)))
    return done


def test_a_stream_is_made_on_its_device(asked: list[Any]) -> None:
    stream: Any = make_stream(3)
    assert (stream.at, stream.device) == (0x50, 3)
    assert asked == [3, ("set", 3), ("make", cuda.cudaStreamNonBlocking)]


@pytest.mark.parametrize("call", ["cudaSetDevice", "cudaStreamCreateWithFlags"])
def test_what_fails_is_named(call: str, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, call, lambda number: (cuda.cudaError_t.cudaErrorMemoryAllocation, None))
    with pytest.raises(RuntimeError, match=r"^make_stream: cuda:3: cudaErrorMemoryAllocation$"):
        make_stream(3)
