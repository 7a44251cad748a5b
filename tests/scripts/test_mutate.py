# SPDX-License-Identifier: Apache-2.0
"""The script that plants bugs: what it changes, and which tests it runs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts import mutate
from scripts.mutate import Bug

ROOT = mutate.ROOT


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("a < b", {"a <= b", "a < b + 1"}),
        ("a <= {b}", {"a < {b}"}),
        ("a is None", {"a is not None"}),
        ("a == 1", {"a != 1"}),
        ("min(a, b)", {"max(a, b)"}),
        ("a and b", {"((a) or (b))"}),
        ("a or b or c", {"((a) and (b) and (c))"}),
        ("not a", {"bool(a)"}),
        ("a // 4", {"(a % 4)"}),
        ("f(x, out=y, use_pdl=z, n=3)", {"f(x, use_pdl=z, n=3)", "f(x, out=y, n=3)"}),
        ("c.require(a, 'b', 'c', 1)", {"pass"}),
    ],
)
def test_changes(source: str, changed: set[str]) -> None:
    tree = ast.parse(source)
    found = {change for node in ast.walk(tree) for change in mutate.changes(node)}
    assert found == changed


def test_every_bug_is_another_program(tmp_path: Path) -> None:
    for bug in mutate.draw(ROOT, 60, seed=1):
        source = (ROOT / bug.path).read_text()
        changed = mutate.planted(source, bug)
        assert changed != source
        ast.parse(changed)


def test_planted_bugs_can_be_planted() -> None:
    for bug in mutate.PLANTED:
        ast.parse(mutate.planted((ROOT / bug.path).read_text(), bug))
        assert mutate.tests_of(ROOT, ROOT / bug.path)
    with pytest.raises(ValueError, match=r"layers/mla\.py:3: no longer reads 'never there'"):
        mutate.planted("a\nb\nc\n", Bug("layers/mla.py", 3, "never there", ""))


def test_tests_that_import_the_module_come_first() -> None:
    chosen = mutate.tests_of(ROOT, ROOT / "cute_kernels" / "runtime" / "cache.py")
    assert ROOT / "tests" / "runtime" / "test_cache.py" in chosen
    assert all(path.parent.name == "runtime" for path in chosen)
    assert mutate.tests_of(ROOT, ROOT / "perf" / "measure.py")[0] == ROOT / "tests" / "perf" / "test_measure.py"


def test_wrong_arguments_of_a_modules_ops_come_last() -> None:
    found = mutate.fuzzers(ROOT / "cute_kernels" / "kv_cache" / "ops.py")
    assert [name.rpartition("[")[2] for name in found] == [
        "quantize_and_insert_k_cache]",
        "dequantize_and_gather_k_cache]",
        "pack_records]",
        "unpack_records]",
    ]
    path, _, test = mutate.FUZZER.partition("::")
    assert f"def {test}(" in (ROOT / path).read_text()
    assert mutate.fuzzers(ROOT / "layers" / "mla.py") == []


def test_then_those_that_import_it_through_another() -> None:
    chosen = mutate.tests_of(ROOT, ROOT / "cute_kernels" / "compat" / "vllm_indices.py")
    assert ROOT / "tests" / "compat" / "test_vllm.py" in chosen
    chosen = mutate.tests_of(ROOT, ROOT / "layers" / "rotary.py")
    assert chosen[0] == ROOT / "tests" / "layers" / "test_rotary.py"


def test_what_a_package_exports_is_of_the_module_that_it_takes_it_from() -> None:
    found = mutate.exports(ROOT)
    assert found["layers.DeepseekV4MTPNorms"] == "layers.mtp"
    assert found["cute_kernels.sparse_mla_decode"] == "cute_kernels.sparse_mla.ops"
    for module, test in (("layers/mtp.py", "layers/test_mtp.py"), ("layers/caches.py", "layers/test_caches.py")):
        assert ROOT / "tests" / test in mutate.tests_of(ROOT, ROOT / module)


def test_kernels_and_benchmarks_are_no_host_modules() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in mutate.modules(ROOT)}
    assert {"cute_kernels/runtime/ops.py", "layers/mla.py", "perf/measure.py"} <= found
    assert not {"cute_kernels/kv_cache/gather.py", "cute_kernels/kv_cache/verify_cases.py", "perf/linear.py"} & found


def test_bugs_that_only_a_gpu_shows_are_not_drawn(tmp_path: Path) -> None:
    lines = ["def f(a):", "    return a < 3", "def g(a):", "    return torch.ones(3, device='cuda') < a"]
    lines += ["def h(a):", "    assert a < 4", "    return a > 0.5, torch.ones(a, dtype=torch.float32)"]
    lines += [
        "LIMIT, FEW = 2, 3",
        "SHARE, PART = 2.0**-3, 0.5",
        "def f(a, b: float):",
        "    return a < PART, b > 1 + a",
    ]
    lines += ["def g(a):", "    import no_such_package.part", "    return a < 7"]
    lines += ["def g(a):", "    from pathlib import Path", "    return a == 9"]
    module = tmp_path / "module.py"
    module.write_text("\n".join(lines))
    assert {(bug.line, bug.new) for bug in mutate.bugs(tmp_path, module)} == {
        (2, "a <= 3"),
        (2, "a < 3 + 1"),
        (len(lines), "a != 9"),
    }


def test_a_run_says_whether_the_tests_of_a_tree_pass(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test_a() -> None:\n    assert 1 + 1 == 2\n")
    (tmp_path / "test_bad.py").write_text("def test_a() -> None:\n    assert 1 + 1 == 3\n")
    assert mutate.passes(tmp_path, "test_good.py")
    assert not mutate.passes(tmp_path, "test_bad.py")
