# SPDX-License-Identifier: Apache-2.0
"""Blackwell's prefill, mixed and paged kernels, as compiled, in the model of the GPU: results against float64. What no
query row selects is NaN, as is shared and tensor memory that nobody has written. Other orders are in
test_planted_sm100.py, too."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla.blackwell.decode_2cta import BLOCKS
from cute_kernels.sparse_mla.blackwell.prefill import BlackwellPrefillKey
from cute_kernels.sparse_mla.blackwell.prefill_2cta import BlackwellPairPrefillKey
from cute_kernels.sparse_mla.blackwell.prefill_mixed import BlackwellMixedFp8Key, BlackwellMixedKey
from cute_kernels.sparse_mla.blackwell.prefill_paged import BlackwellPagedKey
from tests.compile.reports import compile_report
from tests.gpu import paged_cases, test_mixed, test_prefill
from tests.model import edits, orders
from tests.model.prefill_problems import Mixed, Paged, Prefill, Problem, on_host
from tests.model.ptx import Program, parse
from tests.model.test_decode_pair_sm100 import TAKES_FOR_GRANTED

_programs: dict[BlackwellPrefillKey, Program] = {}


def problem(kind: type[Problem], key: BlackwellPrefillKey, call: Any) -> Problem:
    if key not in _programs:
        _programs[key] = parse(compile_report(key).ptx)
    return kind(call, _programs[key], key.smem_bytes, BLOCKS if isinstance(key, BlackwellPairPrefillKey) else 1)


def prefill(**how: Any) -> Problem:
    with on_host():
        return problem(Prefill, BlackwellPrefillKey("sm_100a"), test_prefill.make(**how))


def pair(**how: Any) -> Problem:
    with on_host():
        return problem(Prefill, BlackwellPairPrefillKey("sm_100a"), test_prefill.make(**how))


def mixed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Problem:
    monkeypatch.setattr(sys.modules[test_mixed.__name__], "made_of", dtype)
    key = BlackwellMixedKey("sm_100a") if dtype == test_mixed.BF16 else BlackwellMixedFp8Key("sm_100a")
    with on_host():
        return problem(Mixed, key, test_mixed.make(**how))


def paged(**how: Any) -> Problem:
    with on_host():
        return problem(Paged, BlackwellPagedKey("sm_100a"), paged_cases.make(**how))


def check_in_any_order(one: Problem, **options: Any) -> None:
    """Right as it ran, and nothing that happened needed the order in which it did."""
    records, make = orders.recorder(one.program)
    one.check(one.cluster, events=make, **options)
    if one.cluster > 1:
        orders.check(records[0], schedules=2, more=7, **TAKES_FOR_GRANTED)
    else:
        # a stage that queries had but for their kept columns is an operand's as a whole afterwards
        orders.check(records[0], schedules=2, more=7, counts_versions=False)


def test_prefill_of_several_rows_by_a_block() -> None:
    """Lists around a tile, empty ones, a sink; whatever the order of things, the bits are the same."""
    one = prefill(s_q=4, heads=9, topk=65, lengths="odd", bad=0.2, seed=5)
    got = one.check(1, seed=1, laziness=0.9)
    again = one.run(2, seed=2, laziness=0.1)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


def test_prefill_of_128_heads() -> None:
    check_in_any_order(prefill(s_q=1, heads=128, topk=70, s_kv=90, seed=3), seed=3)


def test_prefill_by_pairs() -> None:
    """As of one block; 65 heads leave the second block one."""
    check_in_any_order(pair(s_q=3, heads=128, topk=200, lengths="odd", bad=0.2, seed=5), seed=3)
    one = pair(s_q=3, heads=65, topk=70, lengths="odd", bad=0.5, seed=6)
    got = one.check(2, seed=1, laziness=0.9)
    again = one.run(4, seed=2, laziness=0.1)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


def test_bugs_in_the_places_of_pairs_are_found() -> None:
    """Of operands, stores and what is waited for: in a sample of all there are."""
    one = pair(s_q=1, heads=128, topk=70, s_kv=90, seed=3)
    planted = list(edits.edits(one.program))
    assert len(planted) > 80

    def check(changed: Program) -> None:
        dataclasses.replace(one, program=changed).check(2, seed=3)

    text = compile_report(BlackwellPairPrefillKey("sm_100a")).ptx
    assert edits.unfound(planted[:: len(planted) // 8], text, check) == []


@pytest.mark.parametrize("dtype", [test_mixed.BF16, test_mixed.FP8], ids=["bf16", "fp8"])
def test_mixed_caches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of both caches, windows that are not full, pages with room between them, a row of nobody."""
    call = {"query_lens": (1, 1), "seq_lens": (300, 3), "window_size": 7, "width": 65, "rows": (53, 2)}
    mixed(dtype, monkeypatch, heads=20, more_stride=(512, 1024), seed=4, **call).check(1, seed=4)


def test_paged_caches() -> None:
    """Entries that are listed, and rows with a window alone."""
    call = {"query_lens": (1, 2), "seq_lens": (300, 6), "window_size": 70, "width": 40, "more_stride": (576, 0)}
    paged(heads=8, **call).check(1)


def test_all_entries_of_paged_caches() -> None:
    call = {"query_lens": (1,), "seq_lens": (600,), "window_size": 64, "ratio": 128, "width": None, "padding": 0}
    paged(heads=64, rows=(64, 2), **call).check(1, seed=2)
