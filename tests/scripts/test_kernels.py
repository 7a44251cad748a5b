# SPDX-License-Identifier: Apache-2.0
"""Finding the kernels of a run without running them: what a GPU is not needed for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from cute_kernels.indices.combine import CombineKey
from cute_kernels.runtime import cache
from cute_kernels.runtime.compile import JIT_VARIABLE, function

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from layer_runner.kernels import compile_ahead, kernels_of


def test_new_memory_is_zeros_and_kernels_are_noted() -> None:
    key, made = CombineKey("sm_90a"), []

    def run() -> None:
        old = torch.full((4,), 2.0)
        made.extend([torch.empty(1000), torch.empty_like(old), old.new_empty(9), torch.empty_strided((2, 3), (3, 1))])
        made.append(old)
        function(key, 0)("never launched")
        raise ValueError("said by the run itself")

    assert kernels_of(run) == [key]
    assert [float(x.abs().sum()) for x in made] == [0, 0, 0, 0, 8]


def test_a_cache_that_takes_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, bar = [CombineKey("sm_90a")], Progress(disable=True)
    monkeypatch.setenv(JIT_VARIABLE, "forbid")
    assert compile_ahead(keys, bar) is None
    monkeypatch.delenv(JIT_VARIABLE)
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, "")
    assert compile_ahead(keys, bar) is None
