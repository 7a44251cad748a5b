"""Bugs planted in the places that Blackwell's decode kernel, which no hardware has run yet, reads and writes: the model
has to find them. What the kernel computes is in test_decode_sm100.py, its order in test_planted_sm100.py."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.compile.reports import compile_report
from tests.model import edits
from tests.model import test_decode_sm100 as calls

KEY = calls.BlackwellDecodeKey("sm_100a", "listed", False)


def test_bugs_in_the_places_of_decode_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operands in shared and tensor memory, and results that are not waited for: in a sample of all there are."""
    text = compile_report(KEY).ptx
    planted = list(edits.edits(calls.program("listed", False)))
    assert len(planted) > 300
    lists = {"topk": 64, "rows": 7, "second": "listed", "extra_topk": 40, "extra_rows": 5}
    call = calls.with_lengths(calls.make(b=1, **lists), [64], [40])

    def survives(edit: edits.Edit) -> bool:
        program = edit.program(text)
        monkeypatch.setattr(calls, "program", lambda *_: program)
        made = calls.Decode(call, calls.HEADS)
        try:
            made.run(seed=3)
            made.check()
        except edits.FOUND:
            return False
        return True

    assert [edit for edit in planted[::29] if survives(edit)] == []
