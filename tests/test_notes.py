# SPDX-License-Identifier: Apache-2.0
"""Notes are short, each has its log, and the paths that they and the code name exist. For links see test_docs.py."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTES = sorted((ROOT / "perf/notes").glob("*.md"))
LOG = sorted((ROOT / "perf/log").rglob("*.md"))
FOLDERS = ("cute_kernels", "docs", "layers", "perf", "scripts", "tests")
PART = r"[\w.*{},-]"
NAMED = re.compile(
    rf"(?<![\w/.*{{}}-])(?:{PART}+/)*{PART}*[\w*}}]\.(?:py|md|txt|json|toml|sh)(?!\w)"
    rf"|(?<![\w/.-])(?:{'|'.join(FOLDERS)})(?:/{PART}*[\w*}}])+"
)
"""A file's name, with folders or without, or a path from one of the project's folders on."""


@cache
def tree() -> list[str]:
    """Paths of all files and folders, with a / ahead."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in [*inside, *ROOT.iterdir()]]


def names(pattern: str) -> list[str]:
    """What a name with braces stands for."""
    braces = re.search(r"{([^}]*)}", pattern)
    if braces is None:
        return [pattern]
    return [name for word in braces[1].split(",") for name in names(pattern.replace(braces[0], word, 1))]


def missing_paths(text: str) -> list[str]:
    """Paths in a page, whole ones or the last parts of them, that are not in the project. Links are not looked at."""
    found = NAMED.findall(re.sub(r"\]\([^)]*\)", "]", text))
    wanted = {name for pattern in found for name in names(pattern)}
    return sorted(name for name in wanted if not any(fnmatchcase(path, f"*/{name}") for path in tree()))


@pytest.mark.parametrize("page", [*NOTES, *LOG], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_in_notes_and_log_exist(page: Path) -> None:
    assert missing_paths(page.read_text()) == []
    assert max(map(len, page.read_text().splitlines())) <= 120


def test_missing_paths_are_found() -> None:
    text = "docs/ops.md, ops.md, sparse_mla/ops.py: perf/none, none.md, [ops.py](a.md) docs/{ops,none}.md test_d*.py"
    assert missing_paths(text) == ["docs/none.md", "none.md", "perf/none"]


def test_notes_are_short_and_have_a_log() -> None:
    assert {page.name for page in NOTES} == {page.name for page in LOG if page.parent.name == "log"}
    assert len(NOTES) > 20
    for page in NOTES:
        assert len(page.read_text().splitlines()) <= 80, page.name


def test_notes_and_data_that_code_names_exist() -> None:
    named = [
        (path.name, target)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for target in re.findall(r"perf/(?:notes|log)(?:/\w+)+(?:\.\w+)?", path.read_text())
    ]
    assert len(named) > 30
    assert [(name, target) for name, target in named if not (ROOT / target).exists()] == []
