"""The wheel holds the two packages and their legal texts, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("cute_kernels", "layers")
LEGAL = ("LICENSE", "NOTICE")


def tree(folder: Path) -> set[str]:
    """Files below `folder`, relative to its parent, without caches."""
    return {
        str(path.relative_to(folder.parent))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built without network from a copy of the repository: builds leave files in the tree they run in."""
    copy = tmp_path_factory.mktemp("build") / "tree"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist"))
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(copy / "out")], cwd=copy, check=True, capture_output=True)
    (path,) = (copy / "out").glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_holds_exactly_the_packages(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    assert names == set().union(*(tree(ROOT / package) for package in PACKAGES))
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


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
    assert metadata["Requires-Python"] == ">=3.10"
    assert set(metadata.get_all("Provides-Extra", [])) == {"cu13", "perf", "test"}
    required = metadata.get_all("Requires-Dist", [])
    for package in ("torch", "nvidia-cutlass-dsl"):
        assert any(line.startswith(package) and "extra ==" not in line for line in required)
    assert not any(line.startswith(("pytest", "matplotlib")) and "extra ==" not in line for line in required)
