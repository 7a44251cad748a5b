# SPDX-License-Identifier: Apache-2.0
"""Do the tests notice bugs? Plants one at a time on the host side and runs the tests that import the module.

    python scripts/mutate.py --processes 2       # 100 bugs, drawn by seed 0: up to 90 minutes on two cores
    python scripts/mutate.py --count 10 --seed 3
    python scripts/mutate.py --planted           # those that survived once: each must be found

A bug is a small change of the syntax tree: a comparison or a bound off by one, a condition turned round, `and` for
`or`, `min` for `max`, an argument left out, a check that is not made. Bugs are drawn evenly over the modules of
cute_kernels, layers and perf that run on the host: no kernels (tests/model plants bugs in those), and neither functions
that name CUDA nor benchmarks that no test imports, which need a GPU, nor functions that need a package that is not
installed. What is changed are copies of the tree.

Exit status: 1 if less than 95% of the bugs, or not all of the planted ones, were found.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cute_kernels", "layers", "perf", "scripts", "tests", "docs")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "NOTICE")
SHARE = 0.95
SECONDS = 300.0
"""A file of tests that takes longer has met a bug that hangs: found."""

FUZZER = "tests/contract/test_fuzz.py::test_wrong_arguments_of_ops"

MOST_FILES = 8
"""Test files of a module that are run, the nearest ones first."""

READY = ("torch", "numpy", "pytest", "hypothesis", "torch.testing", "torch._dynamo")
"""What takes long to import and is none of the tree's: imported once, by the process that runs are forked from."""


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
    Bug("layers/mla.py", 0, "PREFILL_CHUNK_SIZE, entries, columns)", "1, entries, columns)"),
    Bug("layers/indexer.py", 0, "if last > first and total + entries > self.max_total_entries:", "if False:"),
    Bug("perf/measure.py", 0, "_timing(t[1:], len(candidates[name])", "_timing(t, len(candidates[name])"),
    Bug("perf/measure.py", 0, "            scrub.sum()\n", ""),
)  # fmt: skip
"""Bugs that no test found on 2026-11-20."""


# ---- which modules, which tests --------------------------------------------------------------------------------------


@functools.cache
def imported(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, with what it takes from them. Relative ones are of its own folder."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            module = f"{path.parent.name}.{node.module}" if node.level else node.module
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def is_host(path: Path) -> bool:
    """No kernel, which is traced and not run; no file that only calls another; no examples for tests."""
    is_kernel = any(name.split(".")[0] in ("cutlass", "cuda") for name in imported(path))
    return not is_kernel and path.name not in ("__init__.py", "__main__.py", "verify_cases.py")


def sources(root: Path) -> list[Path]:
    found = [p for folder in ("cute_kernels", "layers", "perf") for p in sorted((root / folder).rglob("*.py"))]
    return [p for p in found if not p.is_relative_to(root / "cute_kernels" / "layers")]


def modules(root: Path) -> list[Path]:
    """Those of the host. Of perf only those that a test imports: the others are benchmarks, which need a GPU."""
    return [p for p in sources(root) if is_host(p) and (p.parent.name != "perf" or importers(root, p, tests(root)))]


def tests(root: Path) -> list[Path]:
    """Test files that run on the host."""
    found = sorted((root / "tests").rglob("test_*.py"))
    return [p for p in found if not {"gpu", "compile", "model"} & set(p.relative_to(root).parts)]


def importers(root: Path, module: Path, files: Sequence[Path]) -> list[Path]:
    """Those that import a module, or what its package, or a package above, takes from it."""
    name = ".".join(module.relative_to(root).with_suffix("").parts)
    names = {name} | {public for public, home in exports(root).items() if home == name}
    names |= {name.replace("layers.", "cute_kernels.layers.", 1) for name in names}
    return [p for p in files if names & imported(p)]


@functools.cache
def exports(root: Path) -> dict[str, str]:
    """Public name in a package -> the module that its __init__ takes it from."""
    found = {}
    for path in (root / folder for folder in ("cute_kernels", "layers", "perf")):
        for init in path.rglob("__init__.py"):
            package = ".".join(init.parent.relative_to(root).parts)
            for node in ast.parse(init.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ImportFrom) and node.module:
                    home = f"{package}.{node.module}" if node.level else node.module
                    found.update({f"{package}.{alias.asname or alias.name}": home for alias in node.names})
    return found


def tests_of(root: Path, module: Path) -> list[Path]:
    """Test files that import a module, then those that import one that does, then those of its folder; of each first
    those of its package, and of these first those that have its name in theirs."""
    package = module.parent.name
    every, users = tests(root), importers(root, module, sources(root))
    direct = importers(root, module, every)
    through = [p for p in every if any(p in importers(root, user, every) for user in users)]
    near = [sorted(f, key=lambda p: (p.parent.name != package, module.stem not in p.stem)) for f in (direct, through)]
    return list(dict.fromkeys([*near[0], *near[1], *(p for p in every if p.parent.name == package)]))[:MOST_FILES]


def fuzzers(module: Path) -> list[str]:
    """Tests that call the ops of a module with wrong arguments: they import none, and find all by their names."""
    names = re.findall(r'define_op\(\s*"(\w+)\(', module.read_text(encoding="utf-8"))
    return [f"{FUZZER}[{name}]" for name in names]


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
_OPTIONAL = ("use_pdl", "out", "optional", "contiguous", "dense_last", "keepdim", "dtype")


def changes(node: ast.AST, floats: Collection[str] = ()) -> Iterator[str]:
    """What a node of the tree could read with a bug in it. A float at its limit is no bug worth finding; `floats`:
    names of some."""
    is_limit = isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OTHER
    if is_limit and isinstance(node, ast.Compare) and not _has_float(node, floats):
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield f"{left} {_OTHER[type(node.ops[0])]} {right}"
        is_set = isinstance(node.comparators[0], (ast.Set, ast.SetComp))
        if isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) and not is_set:
            yield f"{left} {_SIGN[type(node.ops[0])]} {right} + 1"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            yield ast.unparse(node).replace(node.func.id, "max" if node.func.id == "min" else "min", 1)
        for keyword in node.keywords:
            if keyword.arg in _OPTIONAL and ast.unparse(keyword.value) != "torch.float32":  # torch's own choice
                rest = [k for k in node.keywords if k is not keyword]
                yield ast.unparse(ast.Call(node.func, node.args, rest))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "c.require" in ast.unparse(node):
        yield "pass"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        other = ast.Mod() if isinstance(node.op, ast.FloorDiv) else ast.FloorDiv()
        yield f"({ast.unparse(ast.BinOp(node.left, other, node.right))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"bool({ast.unparse(node.operand)})"


def _has_float(node: ast.AST, floats: Collection[str] = ()) -> bool:
    """Whether a number with a point, or the name of one, is in an expression."""
    return any(
        (isinstance(part, ast.Constant) and isinstance(part.value, float))
        or (isinstance(part, ast.Name) and part.id in floats)
        for part in ast.walk(node)
    )


def floats_of(tree: ast.Module) -> set[str]:
    """Names of constants with a point, and of parameters that are said to have one."""
    constants = [node for node in tree.body if isinstance(node, ast.Assign) and _has_float(node.value)]
    names = [part for node in constants for target in node.targets for part in ast.walk(target)]
    parameters = [node for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None]
    return {name.id for name in names if isinstance(name, ast.Name)} | {
        node.arg for node in parameters if node.annotation is not None and ast.unparse(node.annotation) == "float"
    }


def on_the_host(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module, without functions that name CUDA or import what is not installed, and without assertions,
    which a type checker needs."""
    yield tree
    for child in ast.iter_child_nodes(tree):
        is_tested = not isinstance(child, ast.FunctionDef) or ("cuda" not in ast.unparse(child) and _is_here(child))
        if is_tested and not isinstance(child, ast.Assert):
            yield from on_the_host(child)


def _is_here(function: ast.FunctionDef) -> bool:
    """Whether what a function imports is installed: its tests are skipped where it is not."""
    modules = [node.module for node in ast.walk(function) if isinstance(node, ast.ImportFrom) and not node.level]
    modules += [a.name for node in ast.walk(function) if isinstance(node, ast.Import) for a in node.names]
    return all(importlib.util.find_spec(name.partition(".")[0]) is not None for name in modules if name)


def bugs(root: Path, module: Path) -> list[Bug]:
    """All bugs of a module in expressions and statements of one line."""
    source = module.read_text(encoding="utf-8")
    lines = source.encode().splitlines()
    path, found, tree = module.relative_to(root).as_posix(), [], ast.parse(source)
    floats = floats_of(tree)
    for node in on_the_host(tree):
        if isinstance(node, (ast.expr, ast.stmt)) and node.lineno == node.end_lineno:
            old = lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()
            found += [Bug(path, node.lineno, old, new) for new in changes(node, floats) if new != old]
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


def passes(root: Path, test: str) -> bool:
    """Whether a file of tests, or one of these, passes in the tree as it is."""
    process = os.fork()
    if process == 0:
        _test(root, test)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) in (0, 5)
        time.sleep(0.05)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


def _test(root: Path, test: str) -> NoReturn:
    """In a forked process: run the tests, and exit with pytest's status."""
    os.setpgid(0, 0)
    os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1", CUDA_VISIBLE_DEVICES="")
    os.chdir(root)
    sys.dont_write_bytecode = True
    sys.path[:] = [str(root), *(path for path in sys.path if not Path(path or ".").resolve().is_relative_to(ROOT))]
    sink = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(sink, stream)
    status = 1
    with contextlib.suppress(BaseException):
        import pytest

        status = pytest.main(["-x", "-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", test])
    os._exit(status)


class Runner:
    """Plants bugs in a copy of the tree of its own."""

    def __init__(self) -> None:
        for name in READY:
            importlib.import_module(name)
        self.folder = tempfile.TemporaryDirectory()
        self.root = copy_tree(Path(self.folder.name))
        self.sound: dict[str, bool] = {}

    def is_sound(self, test: str) -> bool:
        """Whether a file passes without a bug."""
        if test not in self.sound:
            self.sound[test] = passes(self.root, test)
        return self.sound[test]

    def run(self, bug: Bug) -> tuple[str, float, set[str]]:
        """("found", "survived", or "no tests" where there are none; seconds; tests that do not pass without it)."""
        module, start = self.root / bug.path, time.perf_counter()
        chosen = [str(p.relative_to(self.root)) for p in tests_of(self.root, module)] + fuzzers(module)
        source, status = module.read_text(encoding="utf-8"), "survived" if chosen else "no tests"
        for test in chosen:
            module.write_text(planted(source, bug), encoding="utf-8")
            try:
                is_noticed = not passes(self.root, test)
            finally:
                module.write_text(source, encoding="utf-8")
            if is_noticed and self.is_sound(test):
                status = "found"
                break
        unsound = {test for test in chosen if self.sound.get(test) is False}
        return status, time.perf_counter() - start, unsound


_runner: Runner | None = None


def _run(bug: Bug) -> tuple[str, float, set[str]]:
    """In a process of a pool."""
    global _runner
    _runner = _runner or Runner()
    return _runner.run(bug)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="bugs (100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--planted", action="store_true", help="the bugs that survived once")
    parser.add_argument("--processes", type=int, default=1, help="bugs at a time (1)")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    results: list[dict[str, object]] = []
    missed: dict[str, int] = {}
    chosen = PLANTED if options.planted else draw(ROOT, options.count, options.seed)
    with ProcessPoolExecutor(options.processes) as pool:
        running = {pool.submit(_run, bug): bug for bug in chosen}
        for done in as_completed(running):
            bug, (status, seconds, unsound) = running[done], done.result()
            results.append({"path": bug.path, "line": bug.line, "old": bug.old, "new": bug.new, "status": status})
            print(f"{status:9s} {seconds:6.1f} s  {bug.path}:{bug.line}: {bug.old!r} -> {bug.new!r}", flush=True)
            for test in unsound:
                missed[test] = missed.get(test, 0) + (status != "found")
    for test, count in sorted(missed.items()):
        print(f"{test} does not pass without a bug, within {SECONDS:.0f} s: it was of no use for {count} that survived")
    found = sum(result["status"] == "found" for result in results)
    print(f"{found} of {len(results)} found")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if found >= len(results) * (1.0 if options.planted else SHARE) else 1


if __name__ == "__main__":
    sys.exit(main())
