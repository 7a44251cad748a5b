# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of scripts/run_layer.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


from tests.scripts.runs import (
    write_checkpoint,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 tokens for the tiny width."""
    path = tmp_path_factory.mktemp("states") / "h.npy"
    np.save(path, np.random.default_rng(5).standard_normal((160, 128), dtype=np.float32))
    return path
