# SPDX-License-Identifier: Apache-2.0
"""Without a GPU the tests of this folder can be collected all the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the tests for it are collected and run")
def test_all_are_collected() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    (count,) = re.findall(r"^(\d+) tests collected", done.stdout, re.MULTILINE)
    pytest.skip(f"{int(count) - 1} tests of tests/gpu need an NVIDIA GPU")
