# SPDX-License-Identifier: Apache-2.0
"""Bugs planted in the places that Blackwell's decode kernel, which no hardware has run yet, reads and writes: the model
has to find them. What the kernel computes is in test_decode_sm100.py, its order in test_planted_sm100.py."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.compile.reports import compile_report
from tests.model import edits
from tests.model import test_decode_sm100 as calls
from tests.model.ptx import Program

KEY = calls.BlackwellDecodeKey("sm_100a", "listed", False)


def test_bugs_in_the_places_of_decode_are_found() -> None:
    """Of operands in shared and tensor memory, and results that are not waited for: in a sample of all there are."""
    planted = list(edits.edits(calls.program("listed", False)))
    assert len(planted) > 300
    lists = {"topk": 64, "rows": 7, "second": "listed", "extra_topk": 40, "extra_rows": 5}
    call = calls.with_lengths(calls.make(b=1, **lists), [64], [40])

    def check(program: Program) -> None:
        made = calls.Decode(call, calls.HEADS)
        made.run(program, seed=3)
        made.check()

    assert edits.unfound(planted[::29], compile_report(KEY).ptx, check) == []
