# SPDX-License-Identifier: Apache-2.0
"""Hopper's decode with long rows in halves, as compiled, in the model: results against float64, and the same bits
whoever does which half."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla import schedule
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from tests.compile.reports import compile_report
from tests.gpu import decode_cases
from tests.model import orders
from tests.model.problems import Decode, on_host
from tests.model.ptx import Program, parse
from tests.model.test_hopper import missed
from tests.model.trace import Trace

KEY = DecodeKey("sm_90a", 64, "dense", halves=True)
LEAST = schedule.LEAST_HALVED * schedule.TILE


@functools.cache
def program() -> Program:
    return parse(compile_report(KEY).ptx)


def decode_call(extra: list[int]) -> decode_cases.Call:
    """Rows of 64 columns, a tenth of them bad, and of so many entries, in pages of 7 and 5 rows."""
    many: dict[str, Any] = {"rows": 7, "second": "dense", "extra_rows": 5, "lengths": "bs", "seed": 1}
    with on_host():
        call = decode_cases.make(b=len(extra), heads=64, topk=64, extra_topk=LEAST + 100, bad=0.1, **many)
        call.length = torch.full((len(extra), 1), 64).int()
        call.visible = torch.tensor(extra).int()[:, None]
        decode_cases.fill(call)
    return call


def run(extra: list[int], pairs: int, **options: Any) -> Decode:
    decode = Decode(decode_call(extra), 64, halves=True)
    decode.run(program(), KEY.smem_bytes, pairs=pairs, **options)
    decode.check()
    return decode


def test_a_helper_gives_the_same_bits() -> None:
    """Of a long row beside a short one and an empty one, with a pair of blocks that helps and without."""
    helped, alone = run([1, LEAST + 70, 0], 4, laziness=0.02), run([1, LEAST + 70, 0], 3, laziness=0.98)
    assert all(torch.equal(*both) for both in zip(helped.results(), alone.results(), strict=True))


def test_rows_of_which_there_are_more_than_helpers() -> None:
    """Two are as long, and one pair could help: it leaves at once."""
    run([LEAST - 64, LEAST - 64], 3, seed=3)


@functools.cache
def traces(pairs: int) -> list[Trace]:
    """Of each pair of blocks: one has a row of 13 tiles, one a short one, and a third one helps."""
    decode = Decode(decode_call([LEAST, 3]), 64, halves=True)
    records, make = orders.recorder(program())
    decode.run(program(), KEY.smem_bytes, pairs=pairs, seed=5, events=make)
    decode.check()
    # as in test_hopper
    return [orders.check(record, votes_order=True, unscoped="reads") for record in records]


@pytest.mark.parametrize("pairs", [2, 3])
def test_in_any_order(pairs: int) -> None:
    assert len(traces(pairs)) == pairs


IMPLIED = {
    "no wait": "for what a first half has left: where a pair does both, its softmax warpgroups' turns keep the order",
    "the mbarrier -8 bytes away": "the same wait",
    "expects +1 arrivals": "of an mbarrier of four that has no use where there is one work tile",
    "no fence": "threads of the softmax have had their own; and the model knows no proxies of global memory",
    "no barrier of the warp": "another one, or a vote on what was read, comes before the arrival that it is for",
}
"""What a replay rightly does not find, as something else keeps the same order -> what does."""


@pytest.mark.slow
def test_bugs_in_their_order_are_found() -> None:
    count, found = missed(traces(2)[0], 1)
    assert {mutant.name for mutant in found} <= set(IMPLIED), [(mutant.op, mutant.name) for mutant in found]
    assert count > 130
    assert len(found) <= 0.06 * count, [(mutant.op, mutant.name) for mutant in found]
