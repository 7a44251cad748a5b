# SPDX-License-Identifier: Apache-2.0
"""Long rows in halves on a GPU: what they come to, and that bits follow from a row's own length, whoever does them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.sparse_mla.ops import sparse_mla_decode
from tests.gpu import decode_cases
from tests.gpu.decode_cases import check, check_constant_lists, fill, int32, make, run
from tests.gpu.decode_checks import same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(torch.cuda.is_available() and arch_of(0) != "sm_90a", reason="needs Hopper"),
]

COLUMNS = 1100
HALVES: dict[str, Any] = {"long_rows": "halves"}


def call_of(b: int, **more: Any) -> decode_cases.Call:
    """Rows of 20 tiles, of which all columns have records, whatever their lengths become."""
    call = make(b=b, topk=100, extra_topk=COLUMNS, extra_rows=4, lengths="bs", **{"second": "dense", **more})
    set_lengths(call, [COLUMNS] * b)
    fill(call)
    return call


def extra_lengths(call: decode_cases.Call) -> torch.Tensor:
    found = call.visible if call.visible is not None else call.extra_length
    assert found is not None
    return found


def set_lengths(call: decode_cases.Call, lengths: list[int]) -> None:
    assert call.length is not None
    call.length.fill_(100)
    extra_lengths(call).copy_(int32(lengths).view(call.rows))


@pytest.mark.parametrize("shape", [(48, 1, 64), (20, 2, 64), (64, 1, 64), (27, 1, 128), (45, 1, 40), (50, 1, 17)])
@pytest.mark.parametrize("second", ["listed", "dense"])
def test_lengths_of_every_kind(second: str, shape: tuple[int, int, int]) -> None:
    b, s_q, heads = shape
    sink = "none" if s_q > 1 else "mixed"
    check(make(b, s_q, heads, 100, second=second, extra_topk=COLUMNS, lengths="bs", sink=sink), **HALVES)


@pytest.mark.parametrize("second", ["listed", "dense"])
@pytest.mark.parametrize("heads", [64, 128])
def test_bits_follow_from_a_rows_own_length(second: str, heads: int) -> None:
    """A row of which others are as long, longer or empty; with a helper, and without."""
    b, row = 48 * 64 // heads, 13
    call, results = call_of(b, heads=heads, second=second), []
    others: list[list[int]] = [
        [COLUMNS] * b,
        [5] * b,
        [0] * b,
        [COLUMNS - 64] * b,
        list(range(COLUMNS - b, COLUMNS)),
        [COLUMNS if i % 3 else 70 for i in range(b)],
    ]
    for lengths in others:
        lengths[row] = COLUMNS - 1
        set_lengths(call, lengths)
        want = check(call, **HALVES)
        for _ in range(20):
            assert same_bits(run(call, **HALVES), want)
        results.append((want[0][row], want[1][row]))
    assert all(same_bits(found, results[0]) for found in results)


def test_bits_in_another_order() -> None:
    """Rows of 11 to 18 tiles, in turn: which clusters help follows from where rows are."""
    call = call_of(60)
    set_lengths(call, [(i * 37) % COLUMNS for i in range(60)])
    out, lse = check(call, **HALVES)
    for shift in (1, 30, 59):
        rows = torch.arange(60, device=decode_cases.DEVICE).roll(shift)
        assert same_bits(run(call.take(rows), **HALVES), (out[rows], lse[rows]))


@pytest.mark.parametrize("second", ["listed", "dense"])
def test_long_rows_are_cut_without_being_asked(second: str) -> None:
    call = call_of(48, second=second)
    set_lengths(call, [COLUMNS] + [9] * 47)
    assert same_bits(run(call), run(call, **HALVES))
    assert not same_bits(run(call), run(call, long_rows="whole"))


def test_maxima_of_either_half() -> None:
    """The first half has the larger scores, or the second one, or both halves none."""
    call = call_of(48)
    assert call.table is not None
    nothing = call.table.clone()
    half = call.table.shape[1] * 8 // 18
    nothing[:16, :half] = -1
    nothing[16:32, half:] = -1
    nothing[32:40] = -1
    check(dataclasses.replace(call, table=nothing), **HALVES)


def test_one_workspace_for_all_calls() -> None:
    """Calls with helpers for other rows, back to back: none finds what the one ahead has left."""
    calls = [call_of(48, seed=seed, second=second) for seed, second in ((1, "dense"), (2, "dense"), (3, "listed"))]
    for i, call in enumerate(calls):
        lengths = [9] * 48
        lengths[5 * i] = lengths[5 * i + 1] = COLUMNS - i
        set_lengths(call, lengths)
    want = [check(call, **HALVES) for call in calls]
    workspace = decode_cases.workspace_for(calls[0])
    got = [tuple(torch.full_like(t, torch.nan) for t in results) for results in want]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call, (out, lse) in zip(calls, got, strict=True):
            sparse_mla_decode(**call.arguments(), out=out, lse=lse, workspace=workspace, **HALVES)
    for _ in range(20):
        graph.replay()
        assert all(same_bits(*both) for both in zip(got, want, strict=True))
        for t in itertools.chain(*got):
            t.fill_(torch.nan)


@pytest.mark.parametrize("constant", [0, 1, 2])
def test_lists_that_are_read_early(constant: int) -> None:
    check_constant_lists(constant, b=48, topk=100, extra_topk=COLUMNS, second="dense", extra_rows=4)


@pytest.mark.parametrize("second", ["listed", "dense"])
def test_short_rows_have_the_bits_of_whole_ones(second: str) -> None:
    call = call_of(48, second=second)
    set_lengths(call, [(i * 13) % (64 * 9) for i in range(47)] + [COLUMNS])
    halved, whole = run(call, **HALVES), run(call, long_rows="whole")
    assert all(torch.equal(a[:47], b[:47]) for a, b in zip(halved, whole, strict=True))
