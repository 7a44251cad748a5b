# SPDX-License-Identifier: Apache-2.0
"""The oldest CuTe DSL and TVM-FFI that pyproject.toml allows compile ten kernels: engines pin them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "oldest-dsl"


def oldest(package: str) -> str:
    found = re.search(rf'^    "{package}>=([\d.]+),', (ROOT / "pyproject.toml").read_text(), re.M)
    assert found is not None
    return found[1]


def test_the_oldest_dsl_compiles(tmp_path: Path) -> None:
    if not FOLDER.exists():
        pytest.skip("the oldest CuTe DSL is not installed (scripts/test.sh installs it beside the newest)")
    paths = FOLDER, FOLDER / "nvidia_cutlass_dsl/dsl_packages", ROOT
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "CUTE_KERNELS_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.compile.oldest_dsl"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["versions"] == {name: oldest(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")}
    assert {key: wrong for key, wrong in found["problems"].items() if wrong} == {}
    assert found["loads"]
