# SPDX-License-Identifier: Apache-2.0
"""Blackwell's decode kernel for pairs of blocks, as compiled, in the model of the GPU: results against float64, other
orders of what its warps do, and bugs planted in places, which the model has to find: those in order are in
test_planted_sm100.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla.blackwell import decode_2cta as plan
from cute_kernels.sparse_mla.blackwell.decode_2cta import BlackwellPairDecodeKey
from tests.compile.reports import compile_report
from tests.model import edits, orders
from tests.model import test_decode_sm100 as single
from tests.model.ptx import Program
from tests.model.test_decode_sm100 import MOST, make, program, with_lengths

HEADS = 128
KEY = BlackwellPairDecodeKey("sm_100a", "listed", False)


TAKES_FOR_GRANTED = {"unscoped": "reads and fenced writes"}
"""The second block's warps arrive without a scope, which is the block's then, at the first one's mbarriers."""


class Decode(single.Decode):
    """By so many blocks."""

    kind = BlackwellPairDecodeKey
    cluster, code_bytes = plan.BLOCKS, plan.CODES
    ctas = 4


CALLS: dict[str, single.Case] = {
    "65 heads, lists in turn, most indices bad": (
        {"b": 3, "heads": 65, "topk": 64, "second": "listed", "extra_topk": 64, "extra_rows": 2, "bad": 0.6},
        ([64, 0, -5], [0, 64, MOST]),
        {},
    ),
    "more parts than tiles, two tokens, pages": (
        {"b": 1, "s_q": 2, "heads": 128, "topk": 66, "rows": 3, "second": "dense", "extra_topk": 40, "lengths": "bs"},
        None,
        {"parts": 3, "out_fp32": True},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_results(name: str) -> None:
    single.check_case(name, CALLS[name], Decode, HEADS)


def run_all_rows(own: Program, events: Any) -> None:
    """By a pair that has all rows, one of them without keys, and more tiles than there are places for any of them."""
    lists = {"topk": 250, "rows": 7, "second": "listed", "extra_topk": 100, "extra_rows": 5, "more_stride": 576}
    call = with_lengths(make(b=3, heads=100, **lists), [250, 0, 129], [100, -3, 64])
    decode = Decode(call, HEADS)
    decode.ctas = plan.BLOCKS
    decode.run(own, seed=3, events=events)
    decode.check()


def test_in_any_order() -> None:
    """Whatever the order of warps, copies and products: nothing hangs, and no bytes are read or written while something
    else writes them."""
    records, make_record = orders.recorder(program("listed", False, BlackwellPairDecodeKey))
    run_all_rows(program("listed", False, BlackwellPairDecodeKey), make_record)
    orders.check(records[0], schedules=3, more=6, **TAKES_FOR_GRANTED)
    conflicts = {op for op, (_, _, most) in records[0].bank_conflicts().items() if most}
    # of the two slabs that every other row has in another order the second block has only one: half of the lanes wait
    steps = [op for op in program("listed", False, BlackwellPairDecodeKey).ops if op.number in conflicts]
    assert len(steps) == 2 * 2 * 3
    assert all(op.opcode.startswith(("ld.shared.v4", "st.shared.v4")) for op in steps)


def test_bugs_in_the_places_are_found() -> None:
    """Of operands in shared and tensor memory, and results that are not waited for: in a sample of all there are, by a
    tile of each list."""
    planted = list(edits.edits(program("listed", False, BlackwellPairDecodeKey)))
    assert len(planted) > 150
    lists = {"topk": 64, "rows": 7, "second": "listed", "extra_topk": 40, "extra_rows": 5}

    def check(changed: Program) -> None:
        decode = Decode(with_lengths(make(b=1, heads=128, **lists), [64], [40]), HEADS)
        decode.run(changed, seed=3)
        decode.check()

    assert edits.unfound(planted[:: len(planted) // 5], compile_report(KEY).ptx, check) == []
