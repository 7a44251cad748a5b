"""Bugs planted in Blackwell's decode kernel, which no hardware has run yet: the model has to find them. What the kernel
computes is in test_decode_sm100.py."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from tests.compile.reports import compile_report
from tests.model import edits, mutations, orders, trace
from tests.model import test_decode_sm100 as calls

NAME = "rows without keys, padded pages"
KEY = calls.BlackwellDecodeKey("sm_100a", "listed", False)


def decode() -> calls.Decode:
    how, lengths, parts = calls.CALLS[NAME]
    made = calls.Decode(calls.with_lengths(calls.make(**how), *lengths), calls.HEADS, **parts)
    made.ctas = 1
    return made


@functools.cache
def decode_trace() -> trace.Trace:
    records, make = orders.recorder(calls.program("listed", False))
    made = decode()
    made.run(seed=3, events=make)
    made.check()
    return trace.make(records[0])


IMPLIED = {
    "no fence": "nothing in tensor memory is before it, or the next one comes before anybody relies on it",
    "no barrier of the warp": "another one comes before the arrival that it is for",
    "no wait for tensor memory": "the next wait is for all loads; what registers hold before, edits show",
}
"""What a replay rightly does not find, as something else keeps the same order -> what does."""


def test_bugs_in_the_order_of_decode_are_found() -> None:
    planted = list(mutations.mutants(decode_trace()))
    found = [mutant for mutant in planted if not mutations.problems(decode_trace(), mutant)]
    assert {mutant.name for mutant in found} <= set(IMPLIED), [(mutant.op, mutant.name) for mutant in found]
    assert len(planted) > 150
    assert len(found) <= 0.05 * len(planted), [(mutant.op, mutant.name) for mutant in found]


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
