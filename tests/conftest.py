# SPDX-License-Identifier: Apache-2.0
"""Options of tests that take samples; no search for garbage among half a million objects that collection makes and
tests keep; and what the tests say at their end about those that were skipped: a line a reason, however many."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-kernel",
        action="store_true",
        help="tests/compile: every kernel of every deployment, and every row of the table in test_code.py; without it, "
        "a sample with every pair of options, and of kernels that only move bytes, of architectures but sm_90a, one, "
        "of which those with a line in compiled.lock.json are not compiled, but for a sample",
    )
    parser.addoption(
        "--write-lock",
        action="store_true",
        help="tests/compile, tests/model: write to compiled.lock.json and beside it what these tests had to compile",
    )
    parser.addoption(
        "--thorough",
        action="store_true",
        help="tests/model: every bug in the order of Hopper's decode, not every fifth, and of Blackwell's kernels "
        "every third to sixth, not one of each kind; tests/layers: test_exactness.py with every format, test_ranks.py "
        "with every format on two and four ranks; tests/runtime/test_verify.py: the reference of every example, not of "
        "one large one of each op; opcheck traces every call, not one of each op",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-lock"):
        from tests.compile.lock import Writer

        config.pluginmanager.register(Writer())


@pytest.fixture(scope="session")
def thorough(pytestconfig: pytest.Config) -> bool:
    return bool(pytestconfig.getoption("--thorough"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if "tests.helpers" in sys.modules:  # not in a process that only hands out tests, which needs no torch
            sys.modules["tests.helpers"].traces_all = session.config.getoption("--thorough")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count} test{'s' * (count > 1)}: {reason}")
