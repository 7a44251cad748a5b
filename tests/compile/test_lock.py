# SPDX-License-Identifier: Apache-2.0
"""compiled.lock.json is of the kernels that it is about, and stands for no kernel that was edited."""

from __future__ import annotations

import copy
import hashlib
import itertools
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor.save import SaveKey
from cute_kernels.runtime import cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Report
from cute_kernels.runtime.sources import Sources
from tests.compile import lock, questions, reports
from tests.compile.lock import Lock
from tests.compile.reports import compile_report

SAMPLE = 12
"""Keys of each run, others for every commit."""

KEY = SaveKey("sm_90a", 1024)
"""Quickly compiled."""


def sample(known: Lock) -> Iterable[KernelKey]:
    """Keys with a line, drawn by the commit that is checked out."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, check=False).stdout

    def number(identity: str) -> bytes:
        return hashlib.sha256(head + identity.encode()).digest()

    return itertools.islice(known.keys(number), SAMPLE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With --every-kernel, which compiles all keys, all lines are compared."""
    if "locked" in metafunc.fixturenames:
        known = Lock.read()
        keys = [*(known.keys(str) if metafunc.config.getoption("--every-kernel") else sample(known))]
        metafunc.parametrize("locked", keys, ids=[key.identity for key in keys])


def test_lines_are_of_the_code(locked: KernelKey, pytestconfig: pytest.Config) -> None:
    """In a sample compiled as what is launched, whatever was compiled before."""
    line = Lock.read().line(locked)
    assert line is not None
    is_every = pytestconfig.getoption("--every-kernel")
    report = compile_report(locked).compiled if is_every else compile_.compile_object(locked)[1]
    lock.check(locked, line, report)
    text = lock.known_ptx(locked, line)
    assert text is None or text == report.ptx


# ---- what the lock is held to ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report() -> Report:
    return compile_.compile_report(KEY)


@pytest.fixture
def written(report: Report, tmp_path: Path) -> Lock:
    """A lock with a line of the key, and of another one that depends on other sources."""
    line = lock.line_of(report)
    for kind, question, arguments in (
        ("ptx", questions.count, (r"ld\.global",)),
        ("sass", questions.places, (r"\bSTG",)),
        ("ptx", questions.findall, (r"(st)\.(global)",)),
    ):
        text = lock.asked(kind, question, arguments)
        line["answers"][text] = lock.ask(report, text)
    other = copy.deepcopy(line)
    found = Lock({}, {}, {}, {})
    found.update({SaveKey.__module__: {KEY.identity: line}, OTHER: {"norm.rms()": other}})
    path = tmp_path / "lock.json"
    found.write(path)
    return Lock.read(path)


OTHER = "cute_kernels.norm.rms"


@pytest.fixture
def asked(written: Lock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """compile_report with that lock, and what it had to compile."""
    compiled: list[KernelKey] = []

    def compile_one(key: KernelKey) -> Report:
        compiled.append(key)
        return compile_.compile_report(key)

    monkeypatch.setattr(reports, "known", written)
    monkeypatch.setattr(reports, "_compiled", compile_one)
    monkeypatch.setattr(lock, "told", {})
    compile_report.cache_clear()
    yield compiled
    compile_report.cache_clear()


def edit(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """A line more in a source file."""
    files = {**cache.SOURCES.files, path: cache.SOURCES.files[path] + b"# edited\n"}
    monkeypatch.setattr(cache, "SOURCES", Sources(cache.SOURCES.folder, files))


def test_what_the_lock_knows_is_not_compiled(asked: list[KernelKey], report: Report) -> None:
    found = compile_report(KEY)
    assert (found.registers, found.smem, found.instructions) == (report.registers, report.smem, report.instructions)
    assert found.in_ptx.count(r"ld\.global") == report.ptx.count("ld.global")
    assert set(found.in_ptx.findall(r"(st)\.(global)")) == {("st", "global")}
    assert asked == []


def test_a_question_that_it_does_not_know_compiles(asked: list[KernelKey], report: Report) -> None:
    found = compile_report(KEY)
    assert found.in_ptx.count(r"st\.global") == report.ptx.count("st.global")
    assert found.in_ptx.has("no such instruction") is False
    assert asked == [KEY]


def test_a_key_without_a_line_is_compiled(asked: list[KernelKey]) -> None:
    compile_report(SaveKey("sm_90a", 512))
    assert asked == [SaveKey("sm_90a", 512)]


@pytest.mark.parametrize("path", ["compressor/save.py", "dsl/tensor.py"])
def test_an_edited_kernel_is_compiled(path: str, asked: list[KernelKey], monkeypatch: pytest.MonkeyPatch) -> None:
    edit(monkeypatch, path)
    compile_report(KEY)
    assert asked == [KEY]


def test_an_edit_elsewhere_compiles_nothing(
    asked: list[KernelKey], written: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(monkeypatch, "norm/rms.py")
    compile_report(KEY)
    assert asked == []
    assert (written.is_current(SaveKey.__module__), written.is_current(OTHER)) == (True, False)


@pytest.mark.parametrize("name", ["dsl", "toolkit", "nvdisasm"])
def test_another_compiler_compiles(name: str, asked: list[KernelKey], monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**lock.environment(), name: "0"}
    monkeypatch.setattr(lock, "environment", lambda: other)
    compile_report(KEY)
    assert asked == [KEY]


def test_a_wrong_line_is_found(written: Lock, report: Report) -> None:
    line = written.line(KEY)
    assert line is not None
    assert lock.differences(line, report) == []
    for name in (*lock.FIGURES, "ptx"):
        assert len(lock.differences({**line, name: None}, report)) == 1
    for text in line["answers"]:
        wrong = {**line, "answers": {**line["answers"], text: -1}}
        assert len(lock.differences(wrong, report)) == 1
        with pytest.raises(AssertionError, match=r"compressor\.save.*-1 in compiled\.lock\.json"):
            lock.check(KEY, wrong, report)


def test_a_wrong_figure_is_found_by_whoever_compiles(asked: list[KernelKey], written: Lock) -> None:
    written.lines[SaveKey.__module__][KEY.identity]["registers"] += 1
    with pytest.raises(AssertionError, match="registers"):
        _ = compile_report(KEY).ptx


def test_a_question_that_changed_is_another_one(written: Lock) -> None:
    written.questions["count"] = "of another function"
    line = written.line(KEY)
    assert line is not None
    assert {text.split()[1] for text in line["answers"]} == {"places", "findall"}


def test_writing_keeps_what_counts_and_drops_the_rest(
    written: Lock, report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(monkeypatch, "norm/rms.py")
    more = lock.line_of(report)
    text = lock.asked("ptx", questions.count, (r"st\.global",))
    more["answers"][text] = 3
    written.update({SaveKey.__module__: {KEY.identity: more}})
    written.write(tmp_path / "again.json")
    again = Lock.read(tmp_path / "again.json")
    assert list(again.lines) == [SaveKey.__module__]
    line = again.line(KEY)
    assert line is not None
    assert len(line["answers"]) == 4
    assert [*again.keys(str)] == [KEY]
