# SPDX-License-Identifier: Apache-2.0
"""What is known of compiled kernels without compiling them: compiled.lock.json.

A line per key has the figures of its code, a hash of its PTX, and the answers to what tests ask about the PTX and the
machine code: counts, places of instructions, matches of a pattern. Tests judge these facts as they judge those of a
kernel that was just compiled; no verdict is kept. A line counts as long as the key's sources (the import closure, by
which the kernel cache names its objects too) and the compilers are those of the line. All other keys are compiled, and
in every run a sample of those with a line: test_lock.py.

tests/model runs the PTX of kernels: that is kept beside it, by kernel, and counts if it has the hash of a line.

`python -m pytest tests/compile tests/model --write-lock` writes lines of what was compiled or asked for the first time
and drops those of other sources.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.runtime import cache
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.report import Facts, Report
from tests.compile import questions

FILE = Path(__file__).with_name("compiled.lock.json")

PTX = Path(__file__).with_name("ptx")
"""Folder of the PTX that tests/model runs, a file for each kernel. A text counts if its hash is the line's."""

FIGURES = tuple(field.name for field in fields(Facts) if field.name != "seconds")

NOTHING = dict.fromkeys(FIGURES, 0) | {"instructions": {}}
"""Figures that a line does not name."""

HASH_LETTERS = 16

PACKAGE = "cute_kernels."
"""Of the modules of keys with lines. What those of tests depend on is not known."""

OUTPUT = "cute_kernels_told"
"""Where a process that runs tests leaves `told` and `texts` for the one that hands them out."""

Line = dict[str, Any]
"""figures -> those of Facts; ptx -> hash; answers -> question -> answer."""

told: dict[str, dict[str, Line]] = {}
"""Module -> identity -> what this process was told of a key: figures, and answers to what it asked."""

texts: dict[str, dict[str, str]] = {}
"""Kernel -> identity -> PTX that this process asked for as a whole."""


@functools.cache
def _disassembler() -> str:
    try:
        return importlib.metadata.version("nvidia-cuda-nvdisasm")
    except importlib.metadata.PackageNotFoundError:
        return ""


def environment() -> dict[str, Any]:
    """What the code of a key depends on beside its sources, and the version of the disassembler. TVM-FFI is there for
    host code alone."""
    of_device = {name: value for name, value in cache.environment().items() if name != "tvm_ffi"}
    return {**of_device, "nvdisasm": _disassembler()}


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]


@dataclass
class Lock:
    """environment   that all lines are of
    questions     function of a text -> hash of its source: changed, it is another question
    sources       module of keys -> hash of its import closure
    lines         module -> identity of a key -> its line"""

    environment: Mapping[str, Any]
    questions: dict[str, str]
    sources: dict[str, str]
    lines: dict[str, dict[str, Line]]

    @classmethod
    def read(cls, path: Path = FILE) -> Lock:
        raw = json.loads(path.read_text()) if path.exists() else {"environment": {}, "questions": {}, "modules": {}}
        modules = raw["modules"]
        return cls(
            raw["environment"],
            raw["questions"],
            {name: module["sources"] for name, module in modules.items()},
            {name: {k: NOTHING | line for k, line in module["keys"].items()} for name, module in modules.items()},
        )

    def answers(self, line: Line) -> dict[str, Any]:
        """Those of a line whose questions are still asked as they were."""
        return {asked: told for asked, told in line["answers"].items() if self._is_asked(asked.split(" ", 2)[1])}

    def _is_asked(self, name: str) -> bool:
        question = question_of(name)
        return question is not None and self.questions.get(name) == source_hash(question)

    def is_current(self, module: str) -> bool:
        return self.environment == environment() and self.sources.get(module) == cache.SOURCES.digest(module)

    def line(self, key: KernelKey) -> Line | None:
        """That of a key, if it is of these sources and compilers. Keys of tests have none: their closure is unknown."""
        module = type(key).__module__
        found = self.lines.get(module, {}).get(key.identity)
        if found is None or not self.is_current(module):
            return None
        return {**found, "answers": self.answers(found)}

    def keys(self, order: Callable[[str], Any]) -> Iterator[KernelKey]:
        """All with a line that counts, in an order of their identities."""
        names = sorted((order(name), name, module) for module, lines in self.lines.items() for name in lines)
        return (key_of(module, name) for _, name, module in names if self.is_current(module))

    def update(self, modules: Mapping[str, Mapping[str, Line]]) -> None:
        """Take these lines, by module and identity, and drop what no longer counts."""
        for module in [module for module in self.lines if not self.is_current(module)]:
            del self.lines[module], self.sources[module]
        for line in (line for of_module in self.lines.values() for line in of_module.values()):
            line["answers"] = self.answers(line)
        self.environment = environment()
        for module, lines in modules.items():
            self.sources[module] = cache.SOURCES.digest(module)
            of_module = self.lines.setdefault(module, {})
            for name, line in lines.items():
                of_module[name] = merged([of_module.get(name), line])
        lines = (line for of_module in self.lines.values() for line in of_module.values())
        names = sorted({asked.split(" ", 2)[1] for line in lines for asked in line["answers"]})
        self.questions = {name: source_hash(question) for name in names if (question := question_of(name))}

    def write(self, path: Path = FILE) -> None:
        modules = [
            f"{json.dumps(module)}: {{\n"
            f'"sources": "{self.sources[module]}",\n"keys": {{\n'
            + ",\n".join(f"{json.dumps(name)}: {_text(lines[name])}" for name in sorted(lines))
            + "\n}}"
            for module, lines in sorted(self.lines.items())
        ]
        head = (
            f'{{"environment": {json.dumps(self.environment, sort_keys=True)},\n'
            f'"questions": {json.dumps(self.questions, indent=1)},\n"modules": {{\n'
        )
        cache.replace_file(path, (head + ",\n".join(modules) + "\n}}\n").encode())


def _text(line: Line) -> str:
    """JSON, without figures that are 0."""
    figures = {name: line[name] for name in FIGURES if line[name]}
    return json.dumps({**figures, "ptx": line["ptx"], "answers": dict(sorted(line["answers"].items()))})


def merged(lines: Iterable[Line | None]) -> Line:
    """One line of several of a key, with the answers of all. Of lines of other code the last counts."""
    found: Line = {}
    for line in filter(None, lines):
        is_same = found.get("ptx") == line["ptx"]
        found = {**line, "answers": {**(found["answers"] if is_same else {}), **line["answers"]}}
    return found


def line_of(report: Report) -> Line:
    """That of a kernel of which nothing has been asked."""
    return {**{name: getattr(report, name) for name in FIGURES}, "ptx": short_hash(report.ptx), "answers": {}}


def facts_of(line: Line) -> Facts:
    return Facts(**{name: line[name] for name in FIGURES}, seconds=0.0)


def key_of(module: str, identity: str) -> KernelKey:
    """The key that has the identity."""
    name, _, arguments = identity.partition("(")
    owners = [one for one in vars(importlib.import_module(module)).values() if isinstance(one, type)]
    (owner,) = {one for one in owners if issubclass(one, KernelKey) and vars(one).get("kernel_name") == name}
    call = ast.parse(f"key({arguments}", mode="eval").body
    assert isinstance(call, ast.Call)
    key: KernelKey = owner(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    assert key.identity == identity
    return key


@functools.cache
def _texts_of(kernel: str) -> dict[str, str]:
    path = PTX / f"{kernel}.json.xz"
    found: dict[str, str] = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    return found


def known_ptx(key: KernelKey, line: Line) -> str | None:
    """The PTX of a key with that line, if it is kept."""
    text = _texts_of(key.kernel_name).get(key.identity)
    return text if text is not None and short_hash(text) == line["ptx"] else None


def write_ptx(lock: Lock, found: Mapping[str, Mapping[str, str]]) -> None:
    """Keep these texts, and of those that are there the ones of lines."""
    hashes = {name: line["ptx"] for lines in lock.lines.values() for name, line in lines.items()}
    PTX.mkdir(exist_ok=True)
    for kernel in {*found, *(path.name.removesuffix(".json.xz") for path in PTX.glob("*.json.xz"))}:
        all_ = {**_texts_of(kernel), **found.get(kernel, {})}
        kept = {name: text for name, text in sorted(all_.items()) if hashes.get(name) == short_hash(text)}
        path = PTX / f"{kernel}.json.xz"
        if not kept:
            path.unlink(missing_ok=True)
        elif kept != _texts_of(kernel):
            cache.replace_file(path, lzma.compress(json.dumps(kept, indent=0).encode()))


class Writer:
    """A plugin of pytest that writes the lines of all keys that tests of any process asked about, and the PTX of those
    of which they asked all."""

    def __init__(self) -> None:
        self.lock = Lock.read()
        self.texts: dict[str, dict[str, str]] = {}

    def take(self, lines: Mapping[str, Mapping[str, Line]], ptx: Mapping[str, Mapping[str, str]]) -> None:
        self.lock.update({module: found for module, found in lines.items() if module.startswith(PACKAGE)})
        for kernel, found in ptx.items():
            self.texts.setdefault(kernel, {}).update(found)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.take(*node.workeroutput[OUTPUT])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[OUTPUT] = told, texts
            return
        self.take(told, texts)
        self.lock.write()
        write_ptx(self.lock, self.texts)


# ---- questions -------------------------------------------------------------------------------------------------------


def name_of(question: Callable[..., Any]) -> str:
    """Where a function is that makes an answer of a text."""
    module = "" if question.__module__ == questions.__name__ else f"{question.__module__}:"
    return module + question.__qualname__


@functools.cache
def question_of(name: str) -> Callable[..., Any] | None:
    """The function of that name, or None if there is none any more."""
    module, _, function = name.rpartition(":")
    try:
        place = importlib.import_module(module) if module else questions
    except ModuleNotFoundError:
        return None
    return getattr(place, function, None)


@functools.cache
def source_hash(question: Callable[..., Any]) -> str:
    return short_hash(inspect.getsource(question))


def asked(kind: str, question: Callable[..., Any], arguments: tuple[str, ...]) -> str:
    """A question about the text of a kind, "ptx" or "sass", as a line has it."""
    return " ".join([kind, name_of(question), *(["\n".join(arguments)] if arguments else [])])


def ask(report: Report, text: str) -> Any:
    """The answer to a question that a line has, as JSON keeps it; None where there is no such text."""
    kind, name, *rest = text.split(" ", 2)
    code, question = getattr(report, kind), question_of(name)
    assert question is not None
    arguments = rest[0].split("\n") if rest else []
    return None if code is None else json.loads(json.dumps(question(code, *arguments)))


def check(key: KernelKey, line: Line, report: Report) -> None:
    """Raise where a line is not of the code that was compiled."""
    found = differences(line, report)
    if found:
        raise AssertionError(f"{key.identity}: " + "\n".join(found))


def differences(line: Line, report: Report) -> list[str]:
    """What of a line is not so in the code that was compiled."""
    code = line_of(report)
    code["answers"] = {text: ask(report, text) for text in line["answers"]}
    found = [
        f"{name}: {line[name]} in {FILE.name}, {code[name]} in the code"
        for name in (*FIGURES, "ptx")
        if line[name] != code[name]
    ]
    for text, told in line["answers"].items():
        if code["answers"][text] not in (told, None):
            found.append(f"{text}: {told} in {FILE.name}, {code['answers'][text]} in the code")
    return found
