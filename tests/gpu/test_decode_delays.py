# SPDX-License-Identifier: Apache-2.0
"""Hopper's decode kernels with pauses before their waits give the same bits: nothing depends on who comes first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.cache import DIRECTORY_VARIABLE
from tests.gpu.decode_checks import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

ROOT = Path(__file__).resolve().parent.parent.parent


def test_pauses_change_no_bit(tmp_path: Path) -> None:
    if arch_of(0) != "sm_90a":
        pytest.skip("the kernel is for Hopper")
    from tests.gpu import decode_delays
    from tests.gpu.decode_cases import check

    results = tmp_path / "results.pt"
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, DIRECTORY_VARIABLE: str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tests.gpu.decode_delays", str(results)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=300)
    for call, repeated in zip(decode_delays.calls(), torch.load(results), strict=True):
        want = tuple(x.cpu() for x in check(call))
        for result in repeated:
            assert same_bits(result, want)
