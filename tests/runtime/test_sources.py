# SPDX-License-Identifier: Apache-2.0
"""What a kernel's code depends on: no file too few, and not all of them."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_kernels.models import MODELS
from cute_kernels.runtime import cache
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.registry import deployment_keys
from cute_kernels.runtime.sources import Sources

SOURCES = cache.SOURCES

PACKAGE = {
    "__init__.py": "from p.ops import op",
    "ops.py": "kernel = 'p.kernel'\nfrom p import kernel, other",
    "kernel.py": """
        from p.near import (
            one,  # why (and when)
            two as second,
        )
        import p.whole, os
        import p.folder.plain as plain
        from . import beside
        from .folder import brought, sub
        def f():
            from p.inside import x
            import p.late
    """,
    "near.py": "# from p.commented import x\n",
    "whole.py": "from p.far import *",
    "far.py": "",
    "beside.py": "from torch import nn",
    "inside.py": "from p import kernel",
    "late.py": "",
    "commented.py": "",
    "other.py": "",
    "folder/__init__.py": "from p.folder.source import brought",
    "folder/source.py": "",
    "folder/plain.py": "from .. import star\n",
    "folder/sub/__init__.py": "from .leaf import x",
    "folder/sub/leaf.py": "",
    "star.py": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "p"


def test_closure(folder: Path) -> None:
    sources = Sources.read(folder)
    needed = (
        "beside far folder folder.plain folder.source folder.sub folder.sub.leaf inside kernel late near star whole"
    )
    assert sources.closure("p.kernel") == tuple(f"p.{name}" for name in needed.split())
    assert sources.closure("p.far") == ("p.far",)
    assert {"p.kernel", "p.other"} <= set(sources.closure("p"))


def test_only_what_is_needed_changes_the_hash(folder: Path) -> None:
    before = Sources.read(folder)
    closure = set(before.paths("p.kernel"))
    for name in PACKAGE:
        path = folder / name
        text = path.read_text()
        path.write_text(text + "\n# a comment\n")
        after = Sources.read(folder)
        assert (after.digest("p.kernel") != before.digest("p.kernel")) is (name in closure), name
        assert before.is_current("p.kernel") is (name not in closure), name
        assert after.whole != before.whole
        assert not before.is_current()
        path.write_text(text)
    assert before.is_current("p.kernel")
    assert before.is_current()
    (folder / "far.py").rename(folder / "far2.py")
    assert not before.is_current("p.kernel")
    assert Sources.read(folder).digest("p.kernel") != before.digest("p.kernel")


def test_a_module_of_another_package_depends_on_all(folder: Path) -> None:
    sources = Sources.read(folder)
    assert sources.digest("elsewhere") == sources.whole
    assert Sources(folder, {}).digest("p.kernel") == Sources(folder, {}).whole == ""


def _imports(path: str) -> set[str]:
    """Modules of the package that a file imports, by its syntax tree."""
    tree = ast.parse(SOURCES.files[path])
    modules = {SOURCES._module(p) for p in SOURCES.files}
    here = SOURCES._module(path).split(".")
    package = here if path.endswith("__init__.py") else here[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base} & modules
    return found


@pytest.mark.full
def test_the_search_in_the_text_finds_what_the_parser_finds() -> None:
    for path in SOURCES.files:
        assert SOURCES.imports(SOURCES._module(path)) >= _imports(path), path


def test_own_files_of_packages_only_describe_and_import() -> None:
    """They run before a kernel's module does and count only where a name is taken from them."""
    allowed = ast.Import, ast.ImportFrom, ast.Assign, ast.Expr
    for path, content in SOURCES.files.items():
        if path.endswith("__init__.py"):
            for node in ast.parse(content).body:
                assert isinstance(node, allowed), (path, node.lineno)
                if isinstance(node, ast.Expr):
                    assert isinstance(node.value, ast.Constant), (path, node.lineno)
                if isinstance(node, ast.Assign):
                    assert all(isinstance(target, ast.Name) for target in node.targets), (path, node.lineno)


def _keys() -> Iterator[KernelKey]:
    for arch in ("sm_90a", "sm_100a", "sm_80"):
        for model in MODELS.values():
            yield from deployment_keys(model, 1, arch)


def test_a_comment_in_one_kernel_recompiles_that_kernel(tmp_path: Path) -> None:
    copy = tmp_path / "cute_kernels"
    shutil.copytree(cache.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = copy / "indexer/topk.py"
    path.write_text(path.read_text() + "\n# a comment\n")
    edited = Sources.read(copy)
    keys = list(_keys())
    changed = {k.kernel_name for k in keys if edited.digest(type(k).__module__) != SOURCES.digest(type(k).__module__)}
    assert changed == {
        f"indexer.{name}" for name in ("topk_any", "topk_held", "merge_keys", "block_maxima", "block_picks")
    }, "which use it"
    assert len({k.kernel_name for k in keys}) > 30


@pytest.mark.full
@pytest.mark.parametrize("name", ["compressor.save", "norm.rms", "linear.hopper.gemm_swap_ab"])
def test_what_runs_during_compilation_is_in_the_closure(name: str) -> None:
    """Seen by a profiler: which files of the package functions are called from while a key is compiled."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.runtime.compile import compile_object

    key = next(k for k in _keys() if k.kernel_name.startswith(name) and k.arch == "sm_90a")
    called: set[str] = set()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: called.add(frame.f_code.co_filename))
    try:
        compile_object(key)
    finally:
        sys.setprofile(before)
    inside = {Path(path) for path in called if path.startswith(str(cache.PACKAGE))}
    ran = {path.relative_to(cache.PACKAGE).as_posix() for path in inside}
    assert len(ran) > 3
    assert ran <= set(SOURCES.paths(type(key).__module__))
