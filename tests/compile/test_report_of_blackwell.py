# SPDX-License-Identifier: Apache-2.0
"""Whether perf/compiled has what today's sources compile to, of the kernels that other tests have compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import compiled

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.compile import reports

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("arch", compiled.ARCHS)
def test_figures_are_of_these_sources(arch: str) -> None:
    """Compiles nothing itself: the tests of each kernel have, or it is not looked at."""
    made = []
    for key, ops in compiled.own_keys([arch]).items():
        if report := reports.at_hand(key):
            made.append(compiled.kernel_of(key, ops, report, report.in_ptx.ask(compiled.tensor_columns)))
    assert compiled.differences(compiled.read(ROOT), made) == []
