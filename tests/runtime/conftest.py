# SPDX-License-Identifier: Apache-2.0
"""Machines that the tests of the command line run on, and one whose kernels only note what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import cache, kept, plans
from cute_kernels.runtime import compile as compile_
from tests.runtime.test_cache import ENVIRONMENT


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU, with a kernel cache of its own."""
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "environment", lambda: dict(ENVIRONMENT))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A machine with one GPU, of a settable capability."""
    state = SimpleNamespace(capability=(9, 0))
    arch_.arch_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: state.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 << 30))
    yield state
    arch_.arch_of.cache_clear()


Launches = list[tuple[Any, tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Keys and arguments of launches, which do nothing: memory of the CPU counts as a Hopper's."""
    launches: Launches = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(plans, "_are_on_gpu", lambda values: True)
    monkeypatch.setattr(compile_, "_obtain", lambda key, index: lambda *args: launches.append((key, args)))

    def forget() -> None:
        kept.forget()
        arch_.arch_of.cache_clear()
        arch_.multiprocessors.cache_clear()

    forget()
    yield launches
    forget()
