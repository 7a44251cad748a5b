# SPDX-License-Identifier: Apache-2.0
"""Blackwell's kernels by each assembler that CuTe DSL is installed with: that of CUDA 12.9, and of CUDA 13."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import nvidia_cutlass_dsl

from tests.compile import assembler, reports

ROOT = Path(nvidia_cutlass_dsl.__path__[0])
INSIDE = ("dsl_packages", "cutlass", "_mlir", "_mlir_libs")
"""Folders down to the one in which CuTe DSL looks for its compilers, of which it takes the newest."""


def with_one_compiler(folder: Path, major: int) -> Path:
    """A package like the installed one, with the compiler of that CUDA only: links, but for the folders that lead to
    it."""
    source, target = ROOT, folder / ROOT.name
    for name in (*INSIDE, ""):
        target.mkdir(parents=True)
        for path in source.iterdir():
            is_other = path.name.startswith("_cutlass_ir.cu") and not path.name.startswith(f"_cutlass_ir.cu{major}.")
            if path.name not in (name, "__pycache__") and not is_other:
                (target / path.name).symlink_to(path)
        source, target = source / name, target / name
    return folder


@pytest.mark.parametrize("major", [12, 13])
def test_every_assembler_takes_what_it_is_given(major: int, tmp_path: Path) -> None:
    if not (ROOT / f"cu{major}").exists():
        pytest.skip(f"CuTe DSL is installed without its compiler for CUDA {major} (nvidia-cutlass-dsl-libs-cu{major})")
    found = alone(major, tmp_path) if len([*ROOT.glob("cu*")]) > 1 else assembler.findings(reports.compile_report)
    assert found["cuda"][0] == major
    assert found["chosen"] == found["takes"]
    assert {key: wrong for key, wrong in found["problems"].items() if wrong} == {}


def alone(major: int, folder: Path) -> Any:
    """What a process finds that has only this one of several compilers."""
    folder = with_one_compiler(folder, major)
    paths = folder, folder / ROOT.name / INSIDE[0], Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(path) for path in paths)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.compile.assembler"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
