# SPDX-License-Identifier: Apache-2.0
"""Kernels compiled ahead into a folder serve a process that has no compiler. Needs CuTe DSL, no GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime import cache
from cute_kernels.runtime.registry import deployment_keys

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.compile import reports
from tests.compile.reports import compile_report

ROOT = Path(__file__).parent.parent.parent
KERNELS = "kv_cache.*"
"""Of the bundle: few, quickly compiled."""


def test_a_bundle_serves_a_process_without_a_compiler(tmp_path: Path) -> None:
    keys = [key for key in deployment_keys(MODELS["v4-pro"], 8, "sm_90a") if fnmatch(key.kernel_name, KERNELS)]
    for key in keys:
        # all but one come from the folder that tests share
        if key.kernel_name != "kv_cache.insert":
            compile_report(key)
    others = shutil.ignore_patterns("kv_cache.insert*", "*.report", "*.sass", "*.lock", ".*")
    shared = cache.Store(reports.folder).folder("sm_90a")
    shutil.copytree(shared, cache.Store(tmp_path / "bundle").folder("sm_90a"), ignore=others)
    shutil.copytree(ROOT / "cute_kernels", tmp_path / "cute_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    variables = {"HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    environment = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", cache.DIRECTORY_VARIABLE)}

    def python(*arguments: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path, env={**environment, **variables, **more}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    command = ["-m", "cute_kernels", "precompile", "--arch", "sm_90a", "--model", "v4-pro", "--tp", "8"]
    command += ["--kernel", KERNELS, "--json", "--quiet"]
    made = json.loads(python(*command, "--out", "bundle"))
    status = {kernel["key"]: kernel["status"] for kernel in made["kernels"]}
    assert set(status.values()) <= {"compiled", "cached"}
    assert "compiled" in status.values()
    for kernel in made["kernels"]:
        assert kernel["problems"] == []
        assert kernel["facts"]["registers"] > 0
        assert kernel["facts"]["instructions"]
    code = (
        "import cute_kernels\n"
        "from cute_kernels.models import MODELS\n"
        "from cute_kernels.runtime import compile as c, registry\n"
        "keys = registry.deployment_keys(MODELS['v4-pro'], 8, 'sm_90a')\n"
        "keys = [key for key in keys if key.kernel_name.startswith('kv_cache.')]\n"
        "for key in keys: c.function(key)\n"
        "print(len(keys), c.compilations(), c.disk_loads())\n"
    )
    count = len(made["kernels"])
    out = python("-c", code, CUTE_KERNELS_CACHE_DIR=str(tmp_path / "bundle"), CUTE_KERNELS_JIT="forbid")
    assert out == f"{count} 0 {count}\n"
    assert not (tmp_path / "home").exists(), "nothing goes into the user's own cache"
