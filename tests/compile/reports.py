# SPDX-License-Identifier: Apache-2.0
"""Reports of kernels that all tests share. A key that compiled.lock.json has a line of is not compiled to be asked what
the line says (lock.py). Of the others, what one test has compiled no other compiles again, in this run or the next, as
long as the sources stay the same: that lies in the cache of pytest, named as objects of a kernel cache are. Of each
kernel the first key is compiled as one that is launched, to an object; of the others the device's code alone."""

from __future__ import annotations

import functools
import itertools
import pickle
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from cute_kernels.runtime import cache
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Facts, Report, find_nvdisasm, problems
from perf import compiled
from tests.compile import lock, questions
from tests.compile.lock import Line, Lock

RESERVED = 1024
"""Bytes of shared memory that the system takes for each block."""

INSTRUCTION_BYTES = 16

folder: Path | None = None
"""Where they are: a conftest.py sets it."""

known = Lock({}, {}, {}, {})
"""What is not compiled to be asked again: a conftest.py reads it."""


class KeptReport(Report):
    """A report whose machine code is disassembled once for all tests."""

    @cached_property
    def sass(self) -> str | None:
        path = _path(self.key).with_suffix(".sass")
        if path.exists():
            return zlib.decompress(path.read_bytes()).decode()
        sass = super().sass
        if sass is not None:
            cache.replace_file(path, zlib.compress(sass.encode(), 1))
        return sass


def _path(key: KernelKey) -> Path:
    assert folder is not None, "expected a conftest.py that says where reports are"
    return cache.Store(folder).object_path(key).with_suffix(".report")


def kept(key: KernelKey) -> Report | None:
    """The report, if some test has compiled the key."""
    path = _path(key)
    return pickle.loads(zlib.decompress(path.read_bytes())) if path.exists() else None


def _compiled(key: KernelKey) -> Report:
    assert folder is not None
    path, store = _path(key), cache.Store(folder)
    held = store.acquire(key)
    assert held is not None, f"{folder}: expected a folder that can be written"
    try:
        found = kept(key)
        if found is not None:
            return found
        # says that an object of the kernel has been made
        has_object = folder / f"{key.kernel_name}-{cache.sources_of(key)[:16]}.object"
        plain = compile_.compile_report(key) if has_object.exists() else compile_.compile_object(key)[1]
        has_object.touch()
        report = KeptReport(**{field.name: getattr(plain, field.name) for field in fields(Report)})
        cache.replace_file(path, zlib.compress(pickle.dumps(report), 1))
        return report
    finally:
        held.release()


@dataclass(frozen=True, eq=False)
class Asked(Facts):
    """Figures of a kernel, and answers about its code: those of its line in the lock, or else it is compiled."""

    key: KernelKey
    line: Line | None

    __hash__ = object.__hash__

    @cached_property
    def compiled(self) -> Report:
        report = _compiled(self.key)
        if self.line is not None:
            lock.check(self.key, {**self.line, "answers": {}}, report)
        return report

    @cached_property
    def ptx(self) -> str:
        """All of it. To count what is in it, ask `in_ptx`."""
        text = lock.known_ptx(self.key, self.line) if self.line is not None else None
        if text is None:
            text = self.compiled.ptx
        lock.texts.setdefault(self.key.kernel_name, {})[self.key.identity] = text
        return text

    @property
    def in_ptx(self) -> Text:
        return Text(self, "ptx")

    @property
    def in_sass(self) -> Text | None:
        """None where nvdisasm is not installed."""
        return Text(self, "sass") if self.line is not None or find_nvdisasm() else None

    @property
    def answers(self) -> dict[str, Any]:
        """What was asked in this process."""
        answers: dict[str, Any] = lock.told[type(self.key).__module__][self.key.identity]["answers"]
        return answers

    def knows(self, text: str) -> bool:
        return text in self.answers or (self.line is not None and text in self.line["answers"])

    def ask(self, kind: str, question: Callable[..., Any], *arguments: Any) -> Any:
        text = lock.asked(kind, question, arguments)
        if text not in self.answers:
            is_known = self.line is not None and text in self.line["answers"]
            self.answers[text] = self.line["answers"][text] if is_known else lock.ask(self.compiled, text)
        return self.answers[text]


@dataclass(frozen=True)
class Text:
    """PTX or machine code of a kernel. Tests ask about it, so that the answers can be known without the kernel."""

    report: Asked
    kind: str

    def count(self, pattern: str) -> int:
        return int(self.ask(questions.count, pattern))

    def has(self, pattern: str) -> bool:
        return self.count(pattern) > 0

    def findall(self, pattern: str) -> list[Any]:
        return [tuple(one) if isinstance(one, list) else one for one in self.ask(questions.findall, pattern)]

    def places(self, pattern: str) -> list[int]:
        return list(self.ask(questions.places, pattern))

    def first_place(self, pattern: str) -> int:
        return int(self.ask(questions.first_place, pattern))

    def ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """What a function makes of the text: one at the top of a module, of JSON, whose source says all it does."""
        return self.report.ask(self.kind, question, *arguments)


@functools.lru_cache(maxsize=64)
def compile_report(key: KernelKey) -> Asked:
    """What there is to know of a kernel, which is compiled unless the lock has a line."""
    line = known.line(key)
    report = _compiled(key) if line is None else None
    facts = lock.line_of(report) if line is None else line
    lock.told.setdefault(type(key).__module__, {}).setdefault(key.identity, {**facts, "answers": {}})
    found = Asked(**{name: facts[name] for name in lock.FIGURES}, seconds=0.0, key=key, line=line)
    if report is not None:
        vars(found)["compiled"] = report
    if compiled.MARK in key.kernel_name:
        found.in_ptx.ask(compiled.tensor_columns)  # whatever the test: test_report_of_blackwell.py compiles nothing
    return found


def at_hand(key: KernelKey) -> Asked | None:
    """The report, if that compiles nothing."""
    return compile_report(key) if known.line(key) or kept(key) else None


def check_fits(key: KernelKey, threads: int) -> Asked:
    """The report of a kernel that keeps everything in registers, and of whose blocks, of so many threads, one fits a
    multiprocessor."""
    report = compile_report(key)
    assert problems(key, report) == []
    assert report.stack == 0
    assert not report.in_ptx.has(r"st\.local|ld\.local")
    assert report.smem <= SMEM_BYTES[key.arch] - RESERVED
    assert report.registers <= 65536 // threads
    return report


def disassemble(patterns: Mapping[KernelKey, Sequence[str]]) -> bool:
    """Have the places of patterns in the machine code of kernels of one architecture. Of those that are not known, in
    one call of nvdisasm, which takes half a second to begin; False where it is needed and not installed."""
    wanted = {
        compile_report(key): {lock.asked("sass", questions.places, (one,)): one for one in own}
        for key, own in patterns.items()
    }
    todo = [report for report, own in wanted.items() if not all(report.knows(text) for text in own)]
    tool = find_nvdisasm() if todo else None
    if tool is None:
        return not todo
    (arch,) = {report.key.arch for report in todo}
    codes = [_machine_code(report.compiled.cubin) for report in todo]
    with tempfile.NamedTemporaryFile() as f:
        f.write(b"".join(codes))
        f.flush()
        command = [tool, "-ndf", "-b", arch.replace("sm_", "SM"), f.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines() if ";" in line]
    ends = list(itertools.accumulate(len(code) // INSTRUCTION_BYTES for code in codes))
    assert len(lines) == ends[-1]
    for report, start, end in zip(todo, (0, *ends), ends, strict=False):
        code = "\n".join(lines[start:end])
        report.answers.update({text: questions.places(code, pattern) for text, pattern in wanted[report].items()})
    return True


def _machine_code(cubin: bytes) -> bytes:
    """The code of the one kernel in an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<3H", cubin, 0x3A)
    # of a section: where its name is, four numbers, and where it is
    sections = [struct.unpack_from("<I20x2Q", cubin, table + i * size) for i in range(count)]
    (found,) = [s for s in sections if cubin.startswith(b".text.", sections[names][1] + s[0])]
    return cubin[found[1] : found[1] + found[2]]
