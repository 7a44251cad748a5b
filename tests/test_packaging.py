# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the package, layers inside, and its legal texts, and nothing else; what it installs runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import cute_kernels
from tests.helpers import run_in_forks

ROOT = Path(__file__).parent.parent
PACKAGES = {"cute_kernels": "cute_kernels", "layers": "cute_kernels/layers"}
LEGAL = ("LICENSE", "NOTICE")


def tree(folder: Path) -> set[str]:
    """Files below `folder`, relative to it, without caches."""
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def build_wheel(copy: Path, hook: str) -> zipfile.ZipFile:
    """What a hook of the build backend makes of a copy of the repository."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "results", "compiled", "plots")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    build = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(copy / "out")], cwd=copy, check=True, capture_output=True)
    (path,) = (copy / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def run_isolated(code: str, folder: Path, cwd: Path) -> str:
    """The output of `code` in a process with the packages of `folder` and what they depend on, but no checkout."""
    installed = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    start = f"import site, sys; sys.path += {[str(folder), *installed]!r}; site.addsitedir({str(folder)!r})\n"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-S", "-c", start + code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without network from a copy of the repository: builds leave files in the tree they run in."""
    return build_wheel(tmp_path_factory.mktemp("build") / "tree", "build_wheel")


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_exactly_the_packages(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert names == {f"{inside}/{path}" for folder, inside in PACKAGES.items() for path in tree(ROOT / folder)}
    assert {f"{inside}/py.typed" for inside in PACKAGES.values()} <= names


def test_wheel_holds_the_legal_texts(wheel: zipfile.ZipFile, metadata: Message) -> None:
    assert sorted(metadata.get_all("License-File", [])) == sorted(LEGAL)
    assert metadata["License-Expression"] == "Apache-2.0"
    for name in LEGAL:
        (inside,) = (n for n in wheel.namelist() if n.endswith(f".dist-info/licenses/{name}"))
        assert wheel.read(inside) == (ROOT / name).read_bytes()
    assert "cute-kernels" in (ROOT / "NOTICE").read_text()
    assert "nvidia-cutlass-dsl" in (ROOT / "NOTICE").read_text()


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "cute-kernels"
    assert metadata["Version"] == cute_kernels.__version__
    assert metadata["Author"] == "The cute_kernels developers"
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cu13", "docs", "perf", "test"}
    required = metadata.get_all("Requires-Dist", [])
    for package in ("torch", "nvidia-cutlass-dsl"):
        assert any(line.startswith(package) and "extra ==" not in line for line in required)
    assert not any(line.startswith(("pytest", "matplotlib")) and "extra ==" not in line for line in required)


def test_what_the_wheel_installs_runs(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Imports, an op, a layer's package, `info`."""
    wheel.extractall(tmp_path / "site")
    code = """
import runpy, torch, cute_kernels, cute_kernels.layers as layers
print(cute_kernels.__file__)
print(layers.mla.__name__, layers.DeepseekV4Config.__module__)
cache = cute_kernels.formats.FP8_DS_MLA.allocate(num_blocks=2, block_size=64)
k = torch.randn(3, 512).bfloat16()
cute_kernels.quantize_and_insert_k_cache(k, cache, torch.arange(3))
print(int(cache.any()))
sys.argv = ["cute_kernels", "info"]
try:
    runpy.run_module("cute_kernels", run_name="__main__")
except SystemExit as stopped:
    print("status", stopped.code)
"""
    lines = run_isolated(code, tmp_path / "site", tmp_path).splitlines()
    assert lines[0] == str(tmp_path / "site/cute_kernels/__init__.py")
    assert lines[1:3] == ["cute_kernels.layers.mla cute_kernels.layers.config", "1"]
    assert lines[-1] == "status 0"


SAME = """
import cute_kernels.layers.mla as by_package
import layers, layers.mla, layers.verify, cute_kernels.layers.verify
assert layers is cute_kernels.layers
assert layers.mla is by_package and layers.verify is cute_kernels.layers.verify
assert layers.DeepseekV4Config is cute_kernels.layers.config.DeepseekV4Config
print(cute_kernels.__file__)
"""


def test_a_checkout_has_two_names_for_the_same_layers() -> None:
    done = run_in_forks([first + SAME for first in ("", "import layers\n", "from layers.config import PRESETS\n")])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("__init__.py") == 3


def test_an_editable_install_has_the_layers_of_its_checkout(tmp_path: Path) -> None:
    """By both names where the checkout is on the path; elsewhere `layers` is free for others."""
    checkout, site = tmp_path / "tree", tmp_path / "site"
    build_wheel(checkout, "build_editable").extractall(site)
    own_file = str(checkout / "cute_kernels/__init__.py")
    assert run_isolated(SAME, site, cwd=checkout).strip() == own_file
    elsewhere = "import cute_kernels.layers, importlib.util; print(importlib.util.find_spec('layers'))"
    assert run_isolated(elsewhere, site, cwd=tmp_path).strip() == "None"
