# SPDX-License-Identifier: Apache-2.0
"""Hopper's kernels, as compiled, in the model: it is judged by them, as hardware has confirmed them. Results against
float64; other orders of what their warps do; and planted bugs, which the model has to find."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.dsl.ptx import LOG2_E, READ_AGAIN
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from cute_kernels.sparse_mla.hopper.prefill import PrefillKey
from tests.compile.reports import compile_report
from tests.gpu import decode_cases
from tests.gpu.decode_checks import attention
from tests.gpu.prefill_checks import LARGEST, assert_results
from tests.model import edits, mutations, orders
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import Decode, on_host, put
from tests.model.ptx import Program, parse
from tests.model.trace import Trace

DECODE, PREFILL = DecodeKey("sm_90a", 64, "listed", dealt=True), PrefillKey("sm_90a")
SPLIT_DECODE = DecodeKey("sm_90a", 64, "listed", True, dealt=True)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


@functools.cache
def text(key: DecodeKey | PrefillKey) -> str:
    return compile_report(key).ptx


@functools.cache
def program(key: DecodeKey | PrefillKey) -> Program:
    return parse(text(key))


def decode_call(lengths: list[int], extra: list[int]) -> decode_cases.Call:
    """Rows of two lists of slots, a tenth of them bad, in pages of 7 and 5 rows."""
    many: dict[str, Any] = {"rows": 7, "second": "listed", "extra_rows": 5, "lengths": "bs", "seed": 1}
    with on_host():
        call = decode_cases.make(b=len(lengths), heads=64, topk=128, extra_topk=100, **many)
        call.length, call.extra_length = (torch.tensor(each).int()[:, None] for each in (lengths, extra))
        decode_cases.fill(call)
    return call


@functools.cache
def decode_trace() -> Trace:
    """Of a pair of blocks that has all rows: a row of four tiles, one without keys, and another one. In any order."""
    decode = Decode(decode_call([128, 0, INT_MAX], [100, -1, 99]), 64)
    records, make = orders.recorder(program(DECODE))
    decode.run(program(DECODE), DECODE.smem_bytes, pairs=1, seed=1, events=make)
    decode.check()
    # backs let the other block send weights by an arrival without a scope, which is the block's
    return orders.check(records[0], votes_order=True, unscoped="reads")


def test_decode_in_any_order() -> None:
    trace = decode_trace()
    conflicts = {op: most for op, (_, _, most) in trace.record.bank_conflicts().items() if most}
    # of the second block's columns the rotary ones lie closer than the others
    assert set(conflicts.values()) <= {4}
    assert len(conflicts) <= 4


@pytest.mark.parametrize("laziness", [0.02, 0.98])
def test_decode_by_two_pairs(laziness: float) -> None:
    """Work is done at once, or not before somebody waits for it."""
    decode = Decode(decode_call([65, 64], [0, 63]), 64)
    decode.run(program(DECODE), DECODE.smem_bytes, pairs=2, seed=2, laziness=laziness)
    decode.check()


def test_decode_deals_work_by_length() -> None:
    """Nine splits of four rows to four pairs of blocks, longest first, without those behind a row's end: the bits of
    pairs that have one each, and there, where nobody deals, empty ones are stored."""
    dealt, apart = (Decode(decode_call([128, 0, 1, 64], [100, -1, 0, 65]), 64, True, 9, 3) for _ in range(2))
    dealt.run(program(SPLIT_DECODE), SPLIT_DECODE.smem_bytes, pairs=4, seed=3)
    apart.run(program(SPLIT_DECODE), SPLIT_DECODE.smem_bytes, pairs=36, seed=3)
    (out, lse), (want, want_lse) = dealt.results(), apart.results()
    tiles = torch.tensor([4, 0, 1, 3])
    has_keys = (torch.arange(9)[:, None] * 3 < tiles)[:, :, None, None, None].expand_as(want)
    assert torch.equal(out[has_keys], want[has_keys])
    assert torch.equal(lse, want_lse)
    assert torch.isinf(lse).sum() == 64 * (36 - 4)


def test_decode_deals_nothing_where_all_are_as_long() -> None:
    decode = Decode(decode_call([1, 2, 3], [0, 0, 0]), 64)
    decode.run(program(DECODE), DECODE.smem_bytes, pairs=2, seed=5)
    decode.check()


def test_decode_gives_nothing_beside_a_long_row() -> None:
    """Three rows and two pairs of blocks: the pair with the row of four tiles has no other."""
    decode = Decode(decode_call([0, 128, 1], [0, 100, -1]), 64)
    decode.run(program(DECODE), DECODE.smem_bytes, pairs=2, seed=4)
    decode.check()


class Prefill:
    """Three rows over 40 rows of kv, one of them empty and one with a length: 130 columns, a tenth of them bad."""

    def __init__(self, heads: int = 64, rows: int = 3, columns: int = 130, count: int = 40) -> None:
        g = torch.Generator().manual_seed(1)
        self.q = torch.randn(rows, heads, 512, generator=g).bfloat16()
        self.kv = (torch.randn(count, 1, 512, generator=g).clamp(-4, 4) * LARGEST / 4).bfloat16()
        self.indices = torch.randint(0, count, (rows, 1, columns), generator=g).int()
        bad = torch.rand(self.indices.shape, generator=g) < 0.1
        self.indices[bad] = torch.tensor([-1, INT_MAX, count, INT_MIN]).int().repeat(100)[: int(bad.sum())]
        self.lengths = torch.tensor([columns, 0, 65]).int()
        self.sink = torch.randn(heads, generator=g)

    def run(self, own: Program, blocks: int, codes: Any = None, squares: Any = None, **options: Any) -> None:
        """codes: what results become, instead of bf16. squares: sums of the queries' squares, if they are raw"""
        (rows, heads, _), columns = self.q.shape, self.indices.shape[2]
        memory = self.memory = GlobalMemory()
        self.places = [memory.reserve(rows * heads * size) for size in (0 if codes else 1024, 4, 4)]
        values = [put(memory, self.q), self.q.stride(0) * 2, self.q.stride(1) * 2, heads]
        if squares is not None:
            values += [0.0, put(memory, squares), squares.stride(0) * 4]
        values += [put(memory, self.kv), self.kv.stride(0) * 2, len(self.kv)]
        values += [put(memory, self.indices), self.indices.stride(0) * 4, columns, put(memory, self.lengths)]
        logs = [value for place in self.places[1:] for value in (place, heads * 4, 4)]
        if codes is None:
            values += [self.places[0], heads * 1024, 1024, *logs, READ_AGAIN]
        else:
            values += [*logs, *codes.place(memory, rows, heads)]
        values += [put(memory, self.sink)]
        values += [512**-0.5 * LOG2_E, rows, 0]
        # a kernel for few heads takes no number of blocks of heads; what products are made of are parameters, too
        count = len(own.parameters)
        parameters = pack(own, (values + [0] * count)[:count])
        run_grid(own, parameters, memory, blocks=blocks, size=PREFILL.smem_bytes, **options)

    def out(self) -> torch.Tensor:
        return torch.from_numpy(self.memory.get(self.places[0], self.q.shape, "int16")).view(torch.bfloat16)

    def lse(self) -> torch.Tensor:
        return torch.from_numpy(self.memory.get(self.places[2], self.q.shape[:2], "float32"))

    def check(self) -> None:
        count, out, lse = len(self.kv), self.out(), self.lse()
        slots = self.indices[:, 0].long()
        named = (slots >= 0) & (slots < count) & (torch.arange(slots.shape[1]) < self.lengths[:, None])
        k = torch.zeros(*slots.shape, 512, dtype=torch.float64)
        k[named] = self.kv[slots[named], 0].double()
        scale = 512**-0.5
        assert_results((out, lse), attention(self.q.double(), k, named, scale, self.sink), self.q, scale)
        assert (self.memory.written[self.memory.writable] == 1).all()


@functools.cache
def prefill_trace() -> Trace:
    call = Prefill()
    records, make = orders.recorder(program(PREFILL))
    call.run(program(PREFILL), 1, seed=3, laziness=0.9, events=make)
    call.check()
    # it has no fences behind cp.async, see hopper/prefill.py
    return orders.check(records[0], copies_are_fenced=False, votes_order=True)


def test_prefill_in_any_order() -> None:
    prefill_trace()


def test_prefill_in_any_order_with_late_tiles() -> None:
    """QK warps do not find the next tile of nine, and hand over P before it is there."""
    call = Prefill(columns=550)
    records, make = orders.recorder(program(PREFILL))
    call.run(program(PREFILL), 1, seed=3, laziness=0.9, events=make, slow=range(12, 16))
    call.check()
    orders.check(records[0], copies_are_fenced=False, votes_order=True)


IMPLIED = {
    "no fence": "threads of the scores have had their own behind the same bytes, before they gave way to this one",
    "no barrier of the warp": "another one, or a vote on what was read, comes before the arrival that it is for",
}
"""What a replay rightly does not find, as something else keeps the same order -> what does."""


def missed(trace: Trace, every: int) -> tuple[int, list[mutations.Mutant]]:
    """How many bugs were planted, every so manyth of all there are, and those that no replay finds."""
    planted = list(mutations.mutants(trace, one_way=True))[::every]
    return len(planted), [mutant for mutant in planted if not mutations.problems(trace, mutant)]


@pytest.mark.slow
def test_bugs_in_the_order_of_decode_are_found(thorough: bool) -> None:
    every = 1 if thorough else 5
    count, found = missed(decode_trace(), every)
    assert {mutant.name for mutant in found} <= set(IMPLIED), [(mutant.op, mutant.name) for mutant in found]
    assert count > 130 // every
    assert len(found) <= 0.05 * count, [(mutant.op, mutant.name) for mutant in found]


def test_bugs_in_the_places_of_decode_are_found() -> None:
    """Of operands in shared memory and of stores, and results that are not waited for: in a sample of all there are."""
    planted = list(edits.edits(program(DECODE)))
    assert len(planted) > 80
    decode = Decode(decode_call([64], [40]), 64)

    def check(changed: Program) -> None:
        decode.run(changed, DECODE.smem_bytes, pairs=1, seed=2)
        decode.check()

    assert edits.unfound(planted[::9], text(DECODE), check) == []
