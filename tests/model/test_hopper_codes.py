# SPDX-License-Identifier: Apache-2.0
"""Hopper's kernels that store e4m3 codes, as compiled, in the model: the bytes that their bf16 results come to, in any
order of what their warps do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla import select
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
    orders.check(records[0], votes_order=True, unscoped="reads")


@pytest.mark.parametrize("heads", [HEADS, 16, 5])
def test_prefill(heads: int) -> None:
    """Three rows, one of them empty, by one block."""
    own = codes(1 if heads % GROUPS else GROUPS)
    plain, quantized = Prefill(heads), Prefill(heads)
    keys = [select.prefill_key("sm_90a", heads, is_quantized) for is_quantized in (False, True)]
    plain.run(parse(compile_report(keys[0]).ptx), 1, seed=1)
    program = parse(compile_report(keys[1]).ptx)
    records, make = orders.recorder(program)
    quantized.run(program, 1, own, seed=2, events=make)
    own.assert_those_of(plain.out(), quantized.memory)
    assert torch.equal(quantized.lse(), plain.lse())
    # as in test_hopper
    orders.check(records[0], copies_are_fenced=False, votes_order=True)


def exact_queries(own: Codes, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw queries, their sums of squares, and what they come to, with three rows of which nothing is rounded: whole
    numbers times a power of two, sums of squares whose root is one, quarter turns, which own gets."""
    turns = torch.randint(0, 4, (50, 32), generator=g)
    own.table = torch.cat([torch.tensor(part)[turns] for part in ([1.0, 0, -1, 0], [0, 1.0, 0, -1])], dim=1)
    whole = torch.randint(-3, 4, (3, HEADS, 512), generator=g).float()
    rms = torch.exp2(torch.randint(-20, 21, (3, HEADS, 1), generator=g).float())
    squares = (torch.tensor([96.0, 224, 64, 128]) * rms**2).flatten(1)
    cos, sin = own.table[own.positions.clamp(0, 49), None].split(32, dim=-1)
    even, odd = whole[..., 448::2], whole[..., 449::2]
    finished = whole.clone()
    finished[..., 448::2], finished[..., 449::2] = even * cos - odd * sin, odd * cos + even * sin
    raw, finished = (whole * rms).bfloat16(), finished.bfloat16()
    # the row that attends to nothing is none of NaN's either
    raw[1, 2], squares[1, 12], squares[2, 20] = torch.nan, torch.nan, torch.nan
    finished[2, 5] = torch.nan
    return raw, squares, finished


def test_decode_of_raw_queries() -> None:
    """The bytes of queries that are normed and rotated before: three rows by one pair of blocks, the second empty."""
    call, own = decode_call([70, 0, 64], [100, -1, 65]), codes()
    q, squares, finished = exact_queries(own, torch.Generator().manual_seed(7))
    plain = Decode(dataclasses.replace(call, q=finished[:, None]), HEADS)
    raw = Decode(dataclasses.replace(call, q=q[:, None]), HEADS, codes=own, norm=(squares, 0.0))
    key = DecodeKey("sm_90a", HEADS, "listed", False)
    plain.run(parse(compile_report(key).ptx), key.smem_bytes, pairs=1, seed=1)
    program = parse(compile_report(dataclasses.replace(key, quantized=True, raw=True)).ptx)
    records, make = orders.recorder(program)
    raw.run(program, key.smem_bytes, pairs=1, seed=2, events=make)
    out, lse = plain.results()
    own.assert_those_of(out[0].flatten(0, 1), raw.memory)
    torch.testing.assert_close(raw.results_of_logits(), lse, rtol=0, atol=0, equal_nan=True)
    # as in test_hopper; rotary columns are rotated in place
    orders.check(records[0], counts_versions=False, votes_order=True, unscoped="reads")


def test_prefill_of_raw_queries() -> None:
    """The bytes of queries that are normed and rotated before."""
    g = torch.Generator().manual_seed(7)
    plain, raw, own = Prefill(HEADS), Prefill(HEADS), codes()
    raw.q, squares, plain.q = exact_queries(own, g)
    plain.kv = raw.kv = torch.randint(-2, 3, plain.kv.shape, generator=g).bfloat16()
    keys = select.prefill_key("sm_90a", HEADS), select.prefill_key("sm_90a", HEADS, True, True)
    plain.run(parse(compile_report(keys[0]).ptx), 1, seed=1)
    program = parse(compile_report(keys[1]).ptx)
    records, make = orders.recorder(program)
    raw.run(program, 1, own, squares, seed=2, events=make)
    own.assert_those_of(plain.out(), raw.memory)
    torch.testing.assert_close(raw.lse(), plain.lse(), rtol=0, atol=0, equal_nan=True)
    # as in test_hopper
    orders.check(records[0], copies_are_fenced=False, votes_order=True)
