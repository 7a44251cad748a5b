# SPDX-License-Identifier: Apache-2.0
"""Which part may import which, read from the sources; and what importing the packages does."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
TREES = {"cute_kernels": "cute_kernels", "layers": "cute_kernels.layers", "perf": "perf", "scripts": "scripts"}
DSL = ("cutlass", "triton", "tvm_ffi", "cuda")


def within(module: str, packages: Iterable[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def scan(source: str, module: str, is_package: bool, known: Iterable[str]) -> set[str]:
    """Modules that `source` imports, in function bodies too. `from a import b` counts as a.b if that is a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            submodules = names & set(known)
            found |= submodules
            if submodules != names:
                found.add(base)
    return found


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module name -> what it imports, for every module of the project outside tests/."""
    paths: dict[str, Path] = {}
    for top, package in TREES.items():
        for path in (ROOT / top).rglob("*.py"):
            parts = (package, *path.relative_to(ROOT / top).with_suffix("").parts)
            paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: scan(p.read_text(), name, p.name == "__init__.py", paths) for name, p in paths.items()}


NAMES = ("compressor", "indexer", "indices", "insert_compress", "kv_cache", "linear", "norm", "output", "sparse_mla")
PACKAGES = tuple(f"cute_kernels.{name}" for name in NAMES)
LAYERS = ("cute_kernels.layers", "layers")
PEERS = ("flash_mla", "deep_gemm", "flashinfer", "vllm")


def last(module: str) -> str:
    return module.rsplit(".", 1)[-1]


def reached(module: str) -> set[str]:
    """All modules that importing `module` may load, its own imports' imports included; package __init__ files aside."""
    seen: set[str] = set()
    todo = [module]
    while todo:
        for name in imports().get(todo.pop(), set()) - seen:
            seen.add(name)
            todo.append(name)
    return seen


def test_the_scanner_sees_every_form_of_import() -> None:
    source = (
        "import a.b as c\nfrom . import ops, other\nfrom ..dsl import ptx\ndef f():\n    from cutlass import cute\n"
    )
    known = ["p.package.ops", "p.dsl.ptx"]
    assert scan(source, "p.package.kernel", False, known) == {
        "a.b",
        "p.package.ops",
        "p.package",
        "p.dsl.ptx",
        "cutlass",
    }
    assert scan("from . import ops", "p.package", True, known) == {"p.package.ops"}
    assert "torch" in reached("cute_kernels.kv_cache.ops")
    assert "cute_kernels.numerics" in reached("cute_kernels.kv_cache.reference")


def violations(
    modules: Iterable[str], forbidden: Callable[[str], bool], transitive: bool = False
) -> dict[str, set[str]]:
    """Module -> the forbidden ones among its imports, for the modules that have any."""
    checked = {module: reached(module) if transitive else imports()[module] for module in modules}
    found = {module: {name for name in imports if forbidden(name)} for module, imports in checked.items()}
    return {module: names for module, names in found.items() if names}


def test_a_reference_needs_no_kernel_and_no_compiler() -> None:
    references = [m for m in imports() if within(m, PACKAGES) and last(m).startswith("reference")]
    assert len(references) >= len(PACKAGES)
    assert violations(references, lambda name: within(name, (*DSL, "cute_kernels.dsl")), transitive=True) == {}


def test_layers_reach_kernels_through_ops_only() -> None:
    shared = tuple(f"cute_kernels.{name}" for name in ("formats", "models", "numerics", "paging", "runtime"))

    def forbidden(name: str) -> bool:
        if within(name, ["cute_kernels"]):
            is_ops = name.rpartition(".")[0] in PACKAGES and last(name).startswith("ops")
            return not (is_ops or name == "cute_kernels" or within(name, (*shared, LAYERS[0])))
        return within(name, (*DSL, LAYERS[1], "perf", "scripts", "tests"))

    assert violations((m for m in imports() if within(m, LAYERS)), forbidden) == {}


def test_the_library_imports_nothing_above_it() -> None:
    plugins = "cute_kernels.plugins"
    library = [m for m in imports() if within(m, ["cute_kernels"]) and not within(m, (*LAYERS, plugins))]
    assert violations(library, lambda name: within(name, (*LAYERS, plugins, "perf", "scripts", "tests"))) == {}
    packages_go_here = (*PACKAGES, "cute_kernels.__main__", "cute_kernels.compat")
    below = [m for m in library if m != "cute_kernels" and not within(m, packages_go_here)]
    assert violations(below, lambda name: within(name, PACKAGES)) == {}
    others = [m for m in imports() if not within(m, ["cute_kernels.compat"])]
    assert violations(others, lambda name: within(name, ["cute_kernels.compat"])) == {}


def test_kernels_import_no_torch() -> None:
    kernels = [
        module
        for module, found in imports().items()
        if within(module, ["cute_kernels.dsl"])
        or (within(module, PACKAGES) and any(within(name, ("cutlass", "cute_kernels.dsl")) for name in found))
    ]
    assert violations(kernels, lambda name: within(name, ["torch"])) == {}


def test_importing_the_packages_is_silent_and_loads_no_compiler(tmp_path: Path) -> None:
    """And no peer whose calls are taken over, and no GPU."""
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import cute_kernels.layers, layers\n"
        f"import {', '.join(f'cute_kernels.compat.{peer}' for peer in PEERS)}\n"
        f"bad = sorted(m for m in set(sys.modules) - before if m.split('.')[0] in {(*DSL, *PEERS)!r})\n"
        "sys.exit(f'loaded: {bad}' if bad or torch.cuda.is_initialized() else 0)\n"
    )
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:cute_kernels", "-c", code],
        cwd=ROOT,
        env={**os.environ, **home},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.rglob("*")), "importing must compile and cache nothing"


def test_every_module_of_ops_references_and_layers_imports_without_a_compiler() -> None:
    """What importing the packages does not load: submodules that users import by name. But first, all ops are found;
    and nothing asks for a GPU or prints."""
    names = sorted(
        m for m in imports() if within(m, LAYERS) or (within(m, PACKAGES) and last(m).startswith(("ops", "ref")))
    )
    code = (
        "import importlib, sys, torch\n"
        "before = set(sys.modules)\n"
        "from cute_kernels.runtime.registry import all_ops, ops_with_kernels\n"
        "ops = set(all_ops())\n"
        "assert {'sparse_mla_decode', 'fused_q_kv_rmsnorm', 'top_k_per_row_decode'} <= ops, ops\n"
        "assert {op.name for op in ops_with_kernels()} <= ops\n"
        f"for m in {names!r}: importlib.import_module(m)\n"
        f"bad = sorted(m for m in set(sys.modules) - before if m.split('.')[0] in {DSL!r})\n"
        "sys.exit(f'loaded: {bad}' if bad or 'cutlass' in sys.modules or torch.cuda.is_initialized() else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
