# SPDX-License-Identifier: Apache-2.0
"""Every command that README and docs/ name is one that its program's parser takes."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from cute_kernels import cli
from cute_kernels.runtime.registry import all_ops
from perf import cli as perf_cli
from tests.scripts.runs import run_layer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = (
    r"python3? -m (?:cute_kernels|perf|pytest)|(?:python3? )?(?:scripts|docs/examples)/[a-z_]+\.(?:sh|py)|\.ci/run"
)


def commands(text: str) -> list[str]:
    """Commands of a page, in its code blocks and between backticks, without comments and what stands before them."""
    lines = re.findall(r"^ {4,}(.*)$", text, re.M)
    spans = re.findall(r"`([^`]+)`", re.sub(r"^ {4,}.*$", "", text, flags=re.M))
    found = [re.search(rf"(?:^|\s)({PROGRAMS})(?=\s|$).*", " ".join(piece.split())) for piece in [*lines, *spans]]
    return [match.group().strip() for match in found if match]


CASES = [
    pytest.param(command, id=f"{page.name}: {command.partition(' #')[0]}")
    for page in PAGES
    for command in dict.fromkeys(commands(page.read_text()))
]


@pytest.mark.parametrize("command", CASES)
def test_a_parser_takes_it(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = shlex.split(command.partition(" > ")[0], comments=True)
    arguments = [re.sub(r"^(<op>|NAME|OP)$", next(iter(all_ops())), word) for word in words]
    if words[:2] in (["python", "-m"], ["python3", "-m"]):
        program, arguments = words[2], arguments[3:]
    else:
        program, arguments = (words[1], arguments[2:]) if words[0].startswith("python") else (words[0], arguments[1:])
    if program in ("cute_kernels", "perf"):
        parser = {"cute_kernels": cli.make_parser, "perf": perf_cli.make_parser}[program]()
        if len(arguments) == 1:  # a subcommand's name, not a call
            with pytest.raises(SystemExit, match=r"^0$"):
                parser.parse_args([*arguments, "--help"])
        else:
            parser.parse_args(arguments)
    elif program in ("scripts/run_layer.py", "scripts/quickstart.sh"):
        run_layer.parse_arguments(arguments)
    elif program == "scripts/api_site.py":
        assert len(arguments) == 1
    elif program.startswith("docs/examples/"):  # tests/test_examples.py runs them
        source = (ROOT / program).read_text()
        assert all(f'"{word}"' in source for word in arguments if word.startswith("-"))
    else:
        assert program == "pytest" or (ROOT / program).is_file()
        assert all((ROOT / word).exists() for word in arguments if "/" in word)


def test_commands_are_found() -> None:
    block = "    A=1 scripts/quickstart.sh --draft 3   # fast\n    x = 1\n"
    text = f"Try `python -m perf show OP`:\n\n{block}`python -m perf`ect\n"
    assert commands(text) == ["scripts/quickstart.sh --draft 3 # fast", "python -m perf show OP", "python -m perf"]
    assert len(CASES) > 40


def test_what_quick_leaves_out_is_there() -> None:
    """One that is renamed would be run again, unnoticed."""
    text = (ROOT / "scripts/test.sh").read_text()
    (listed,) = re.findall(r"^  left_out=\($(.*?)^  \)$", text, re.M | re.S)
    words = subprocess.run(["bash", "-c", f"printf '%s\n' {' '.join(listed.split())}"], capture_output=True, text=True)
    left_out = words.stdout.split()
    assert len(left_out) > 10
    assert all((ROOT / path).exists() for path in left_out), left_out
