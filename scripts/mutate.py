# SPDX-License-Identifier: Apache-2.0
"""Do the tests notice bugs? Plants one at a time on the host side and runs the tests that import the module.

    python scripts/mutate.py                     # 100 bugs, drawn by seed 0: up to 90 minutes on two cores
    python scripts/mutate.py --count 10 --seed 3
    python scripts/mutate.py --planted           # those that survived once: each must be found

A bug is a small change of the syntax tree: a comparison or a bound off by one, a condition turned round, `and` for
`or`, `min` for `max`, an argument left out, a check that is not made. Bugs are drawn evenly over the modules of
cute_kernels, layers and perf that run on the host, kernels excepted (tests/model plants bugs in those). A copy of the
tree is changed, never the tree itself.

Exit status: 1 if less than 95% of the bugs, or not all of the planted ones, were found.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cute_kernels", "layers", "perf", "scripts", "tests", "docs")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE")
SHARE = 0.95
SECONDS = 300
"""A run that takes longer has met a bug that hangs: found."""

MOST_FILES = 4
"""Test files of a module that are run, the nearest ones first."""


@dataclass(frozen=True)
class Bug:
    """`path` with the lines from `line` on that read `old` replaced by `new`."""

    path: str
    line: int
    old: str
    new: str


PLANTED = (
    Bug("cute_kernels/compressor/reference.py", 0, "(score - score.amax(dim=1, keepdim=True))", "(score)"),
    Bug("cute_kernels/runtime/ops.py", 0, "(value.dtype, value.get_device(), value.shape", "(value.dtype, value.shape"),
    Bug("cute_kernels/compat/vllm.py", 0, "kv_weight, eps, use_pdl=True)", "kv_weight, eps)"),
    Bug("layers/mla.py", 0, "self.workspace.get(PREFILL_CHUNK_SIZE, columns", "self.workspace.get(1, columns"),
    Bug("layers/indexer.py", 0, "if last > first and total + entries > self.max_total_entries:", "if False:"),
    Bug("perf/measure.py", 0, "_timing(t[1:], len(candidates[name])", "_timing(t, len(candidates[name])"),
    Bug("perf/measure.py", 0, "            scrub.sum()\n", ""),
)  # fmt: skip
"""Bugs that no test found on 2026-11-20."""


# ---- which modules, which tests --------------------------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, with what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_host(path: Path) -> bool:
    """No kernel: what imports the DSL is traced, not run."""
    return not any(name.split(".")[0] in ("cutlass", "cuda") for name in imported(path)) and path.name != "__init__.py"


def modules(root: Path) -> list[Path]:
    found = [p for folder in ("cute_kernels", "layers", "perf") for p in sorted((root / folder).rglob("*.py"))]
    return [p for p in found if is_host(p) and not p.is_relative_to(root / "cute_kernels" / "layers")]


def tests_of(root: Path, module: Path) -> list[Path]:
    """Test files that import a module, or else the `ops` beside it, those of its own folder first."""
    parts = module.relative_to(root).with_suffix("").parts
    name, package = ".".join(parts), parts[-2] if parts[0] == "cute_kernels" else parts[0]
    tests = [p for p in sorted((root / "tests").rglob("test_*.py")) if not {"gpu", "compile", "model"} & set(p.parts)]
    alias = {name, name.replace("layers.", "cute_kernels.layers.", 1)}
    direct = [p for p in tests if alias & imported(p)]
    beside = [p for p in tests if p.parent.name == package]
    near = sorted(direct, key=lambda p: p.parent.name != package)
    return list(dict.fromkeys([*near, *beside]))[:MOST_FILES]


# ---- bugs ------------------------------------------------------------------------------------------------------------

_OTHER = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_SIGN = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Is: "is",
    ast.IsNot: "is not",
}
_OPTIONAL = ("use_pdl", "out", "optional", "contiguous", "dense_last", "keepdim", "device", "dtype")


def changes(node: ast.AST) -> Iterator[str]:
    """What a node of the tree could read with a bug in it."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield f"{left} {_OTHER[type(node.ops[0])]} {right}"
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
            yield f"{left} {_SIGN[type(node.ops[0])]} {right} + 1"
    elif isinstance(node, ast.BoolOp):
        other = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + other.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            yield ast.unparse(node).replace(node.func.id, "max" if node.func.id == "min" else "min", 1)
        for keyword in node.keywords:
            if keyword.arg in _OPTIONAL:
                rest = [k for k in node.keywords if k is not keyword]
                yield ast.unparse(ast.Call(node.func, node.args, rest))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "c.require" in ast.unparse(node):
        yield "pass"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        sign = "%" if isinstance(node.op, ast.FloorDiv) else "//"
        yield f"({ast.unparse(node.left)} {sign} {ast.unparse(node.right)})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"bool({ast.unparse(node.operand)})"


def bugs(root: Path, module: Path) -> list[Bug]:
    """All bugs of a module in expressions and statements of one line."""
    source = module.read_text(encoding="utf-8")
    lines = source.encode().splitlines()
    path, found = module.relative_to(root).as_posix(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.expr, ast.stmt)) and node.lineno == node.end_lineno:
            old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            found += [Bug(path, node.lineno, old, new) for new in changes(node) if new != old]
    return found


def draw(root: Path, count: int, seed: int) -> list[Bug]:
    """So many bugs, of as many modules as there are."""
    choose, every = random.Random(seed), modules(root)
    choose.shuffle(every)
    drawn: list[Bug] = []
    while len(drawn) < count:
        for module in every:
            found = bugs(root, module) if len(drawn) < count else []
            drawn += [choose.choice(found)] if found else []
    return drawn


def planted(source: str, bug: Bug) -> str:
    """A module's source with a bug in it."""
    lines = source.splitlines(keepends=True)
    before, after = "".join(lines[: max(bug.line - 1, 0)]), "".join(lines[max(bug.line - 1, 0) :])
    if bug.old not in after:
        raise ValueError(f"{bug.path}:{bug.line}: no longer reads {bug.old!r}")
    return before + after.replace(bug.old, bug.new, 1)


# ---- runs ------------------------------------------------------------------------------------------------------------


def copy_tree(folder: Path) -> Path:
    root = folder / "tree"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for name in FILES:
        shutil.copy(ROOT / name, root / name)
    return root


def passes(root: Path, tests: Sequence[str]) -> bool:
    """Whether tests pass in the tree as it is."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-m",
        "not slow and not gpu",
        "-p",
        "no:cacheprovider",
        *tests,
    ]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)


def run(root: Path, bug: Bug, sound: dict[str, bool]) -> tuple[str, float]:
    """("found", "survived", or "no tests" where there are none that pass without the bug; seconds).

    sound   test files and whether they pass without a bug, as far as is known
    """
    module, start = root / bug.path, time.perf_counter()
    tests = [str(p.relative_to(root)) for p in tests_of(root, module)]
    for test in tests:
        if test not in sound:
            sound[test] = passes(root, [test])
    tests = [test for test in tests if sound[test]]
    if not tests:
        return "no tests", time.perf_counter() - start
    source = module.read_text(encoding="utf-8")
    module.write_text(planted(source, bug), encoding="utf-8")
    try:
        status = "survived" if passes(root, tests) else "found"
    finally:
        module.write_text(source, encoding="utf-8")
    return status, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="bugs (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", action="store_true", help="the bugs that survived once")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    results: list[dict[str, object]] = []
    sound: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = copy_tree(Path(folder))
        for bug in PLANTED if options.planted else draw(root, options.count, options.seed):
            status, seconds = run(root, bug, sound)
            results.append({"path": bug.path, "line": bug.line, "old": bug.old, "new": bug.new, "status": status})
            print(f"{status:9s} {seconds:6.1f} s  {bug.path}:{bug.line}: {bug.old!r} -> {bug.new!r}", flush=True)
    found = sum(result["status"] == "found" for result in results)
    print(f"{found} of {len(results)} found")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if found >= len(results) * (1.0 if options.planted else SHARE) else 1


if __name__ == "__main__":
    sys.exit(main())
