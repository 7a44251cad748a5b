# SPDX-License-Identifier: Apache-2.0
"""Hopper's kernels with pauses before their waits give the same bits: nothing depends on who comes first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.cache import DIRECTORY_VARIABLE
from tests.gpu import delays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def on_hopper() -> None:
    if arch_of(torch.cuda.current_device()) != "sm_90a":
        pytest.skip("the kernels are for Hopper")


@pytest.mark.parametrize("kernel", delays.KERNELS)
def test_pauses_change_no_bit(kernel: str, tmp_path: Path) -> None:
    calls = delays.calls(kernel)
    assert calls, "no op is verified with it"
    results = tmp_path / "results.pt"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, DIRECTORY_VARIABLE: str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.gpu.delays", kernel, str(results)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=300)
    for call, repeated in zip(calls, torch.load(results), strict=True):
        want = call()
        for result in repeated:
            for got, expected in zip(result, want, strict=True):
                assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
