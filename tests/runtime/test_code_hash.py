# SPDX-License-Identifier: Apache-2.0
"""Lists of hashes of kernels' code, and what differs between two."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cute_kernels.runtime import code_hash, registry
from cute_kernels.runtime.code_hash import CodeHash
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Report, find_nvdisasm
from tests.runtime.test_cli import Capture, run

pytestmark = pytest.mark.usefixtures("machine")

PTX = ".visible .entry {0}(\n .param .u64 {0}_param_0\n)\n.visible .entry {0}_more() {{ add.s32 %r1, %r2, {1}; }}"
OLD = [CodeHash("a.b(arch='sm_90a')", "1", "1"), CodeHash("a.c(arch='sm_90a')", "2", "2"), CodeHash("a.d()", "3")]


def report(arch: str, symbol: str, number: int = 3) -> Any:
    class Stub(Report):
        sass = f".text.{symbol}: IADD3 {number} .text.{symbol}_more"  # type: ignore[assignment]

    text = PTX.format(symbol, number)
    return Stub(32, 0, 0, 0, 0, {}, 0.5, Key(arch), text, b"")


@dataclass(frozen=True)
class Key(KernelKey):
    """A kernel that writes its number; -1 does not compile."""

    kernel_name: ClassVar[str] = "tests.code_hash"
    number: int = 7

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        import cutlass.cute as cute
        from cutlass import Int32
        from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

        if self.number == -1:
            raise ValueError("no such number")
        out = make_fake_tensor(Int32, (cute.sym_int(),), stride=(1,))
        return _entry(self.number), (out, make_fake_stream(use_tvm_ffi_env_stream=True))


def _entry(number: int) -> Any:
    from tests.runtime.number_kernel import NumberKernel

    return NumberKernel(number)


def test_symbols_do_not_count_and_everything_else_does() -> None:
    one = code_hash.hash_report(report("sm_90a", "one"))
    assert one == code_hash.hash_report(report("sm_90a", "another"))
    other = code_hash.hash_report(report("sm_90a", "one", 4))
    assert one.ptx != other.ptx
    assert one.sass != other.sass
    assert code_hash.mask("f f_more_param_0 fx", ["f", "f_more"]) == "entry0 entry1_param_0 entry0x"


def test_sass_of_hopper_alone() -> None:
    assert code_hash.hash_report(report("sm_100a", "one")).sass is None
    assert code_hash.hash_report(report("sm_90a", "one")).sass is not None


def test_what_differs() -> None:
    new = [
        CodeHash(OLD[0].key, "1", None),  # no disassembler there
        CodeHash(OLD[1].key, "2", "3"),
        CodeHash("a.e()", "3"),
    ]
    found = code_hash.compare(*({line.key: line for line in lines} for lines in (OLD, new)))
    assert found.equal == (OLD[0].key,)
    assert found.changed == {OLD[1].key: "SASS"}
    assert (found.only_old, found.only_new) == (("a.d()",), ("a.e()",))

    def change(old: CodeHash, new: CodeHash) -> str:
        return code_hash.compare({"k": old}, {"k": new}).changed["k"]

    assert change(CodeHash("k", "1", "1"), CodeHash("k", "2", "2")) == "PTX, SASS"
    assert change(CodeHash("k", "1"), CodeHash("k", None, error="no")) == "new: does not compile: no"
    assert change(CodeHash("k", None, error="no"), CodeHash("k", None, error="no")) == "old: does not compile: no"


def test_comparing_files(capsys: Capture, tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    code_hash.write_list(old, reversed(OLD))
    assert [line["key"] for line in json.loads(old.read_text())] == [line.key for line in OLD]
    assert list(code_hash.read_list(old).values()) == OLD
    code_hash.write_list(new, OLD[:2])
    status, out, _ = run(capsys, "precompile", "--compare", str(old), str(new))
    assert (status, out) == (0, "only old  a.d()\n2 equal, 0 changed, 1 only old, 0 only new\n")
    code_hash.write_list(new, [OLD[0], CodeHash(OLD[1].key, "9", "9"), *OLD[2:]])
    status, out, _ = run(capsys, "precompile", "--compare", str(old), str(new))
    assert status == 1
    assert out == f"changed   {OLD[1].key}: PTX, SASS\n2 equal, 1 changed, 0 only old, 0 only new\n"
    status, out, _ = run(capsys, "precompile", "--compare", str(old), str(new), "--json")
    assert status == 1
    assert json.loads(out)["changed"] == {OLD[1].key: "PTX, SASS"}


@pytest.mark.parametrize("content", ["{", "[1]", '[{"key": "a"}]', '{"a": 1}', None])
def test_files_that_are_no_lists(capsys: Capture, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "list.json"
    if content is not None:
        path.write_text(content)
    status, out, err = run(capsys, "precompile", "--compare", str(path), str(path))
    assert (status, out) == (2, "")
    assert str(path) in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--hash", "x", "--out", "y"], "not allowed with"),
        (["--hash", "x", "--compare", "y", "z"], "not allowed with"),
        (["--hash", "/dev/null/x"], "--hash: cannot write /dev/null/x"),
        (["--hash", "x", "--kernel", "nobody.*"], "--kernel: expected a pattern of kernels' names"),
    ],
)
def test_requests_that_cannot_be_met(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.setattr(registry, "deployment_keys", lambda model, tp, arch: [Key(arch)])
    status, out, err = run(capsys, "precompile", "--arch", "sm_90a", *arguments)
    assert (status, out) == (2, "")
    assert why in err


def test_a_list_of_compiled_keys(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same keys hash the same in every process; a kernel that writes another number hashes otherwise."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

    def hashes(name: str, numbers: list[int], *arguments: str) -> tuple[int, dict[str, CodeHash]]:
        monkeypatch.setattr(registry, "deployment_keys", lambda model, tp, arch: [Key(arch, n) for n in numbers])
        path = tmp_path / name
        archs = ["--arch", "sm_90a", "--arch", "sm_100a"]
        status, out, _ = run(capsys, "precompile", *archs, "--hash", str(path), "--kernel", "tests.*", *arguments)
        assert f"{2 * sum(n >= 0 for n in numbers)} of {2 * len(numbers)}" in out
        return status, code_hash.read_list(path)

    status, first = hashes("first", [7, 8])
    assert status == 0
    assert list(first) == sorted(Key(arch, n).identity for arch in ("sm_90a", "sm_100a") for n in (7, 8))
    seven, eight = (first[Key("sm_90a", n).identity] for n in (7, 8))
    assert seven.ptx != eight.ptx
    assert (seven.sass is not None) == (find_nvdisasm() is not None)
    status, second = hashes("second", [8, -1], "--workers", "1")
    assert status == 1
    found = code_hash.compare(first, second)
    assert found.equal == tuple(sorted(Key(arch, 8).identity for arch in ("sm_90a", "sm_100a")))
    assert "no such number" in (second[Key("sm_90a", -1).identity].error or "")
