"""Hopper's kernels that store e4m3 codes, as compiled, in the model: the bytes that their bf16 results come to, in any
order of what their warps do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla import prefill
from cute_kernels.sparse_mla.hopper.decode import DecodeKey
from tests import oracle
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.problems import Codes, Decode
from tests.model.ptx import parse
from tests.model.test_hopper import Prefill, decode_call

HEADS, GROUPS = 64, 4


def codes(groups: int = GROUPS) -> Codes:
    """Of three rows, one of them at a position that the table does not have."""
    return Codes(torch.tensor([5, 99, -3]), oracle.cos_sin_table(50), groups)


def test_decode() -> None:
    """Three rows, one of them empty, by one pair of blocks: its ring goes round."""
    call = decode_call([70, 0, 64], [100, -1, 65])
    plain, quantized = Decode(call, HEADS), Decode(call, HEADS, codes=codes())
    key = DecodeKey("sm_90a", HEADS, "listed", False)
    plain.run(parse(compile_report(key).ptx), key.smem_bytes, pairs=1, seed=1)
    program = parse(compile_report(DecodeKey("sm_90a", HEADS, "listed", False, True)).ptx)
    records, make = orders.recorder(program)
    quantized.run(program, key.smem_bytes, pairs=1, seed=2, events=make)
    out, lse = plain.results()
    quantized.codes.assert_those_of(out[0].flatten(0, 1), quantized.memory)
    assert torch.equal(quantized.results_of_logits(), lse)
    # as in test_hopper
    orders.check(records[0], votes_order=True, scopes_count=False)


@pytest.mark.parametrize("heads", [HEADS, 16, 5])
def test_prefill(heads: int) -> None:
    """Three rows, one of them empty, by one block."""
    own = codes(1 if heads % GROUPS else GROUPS)
    plain, quantized = Prefill(heads), Prefill(heads)
    keys = [prefill.key_for("sm_90a", heads, is_quantized) for is_quantized in (False, True)]
    plain.run(parse(compile_report(keys[0]).ptx), 1, seed=1)
    program = parse(compile_report(keys[1]).ptx)
    records, make = orders.recorder(program)
    quantized.run(program, 1, own, seed=2, events=make)
    own.assert_those_of(plain.out(), quantized.memory)
    assert torch.equal(quantized.lse(), plain.lse())
    # as in test_hopper
    orders.check(records[0], copies_are_fenced=False, votes_order=True)
