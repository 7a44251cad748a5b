# SPDX-License-Identifier: Apache-2.0
"""Rows of sparse_mla_prefill_paged that Hopper's kernel cuts into parts, against float64 and against each other."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from tests.gpu.decode_cases import INT_MIN
from tests.gpu.decode_checks import same_bits
from tests.gpu.paged_cases import Call, Results, check, make, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or arch_of(0) != "sm_90a", reason="Hopper's kernel alone cuts rows into parts"
    ),
]

WAYS = [*({"num_splits": n} for n in range(2, 9)), *({"split_tokens": n} for n in (64, 128, 192, 320, 4096))]
NAMES = [f"{name}={number}" for way in WAYS for name, number in way.items()]


def rows_of(call: Call, first: int, last: int, request: int) -> Call:
    """Some rows of one request, given by their numbers in the batch; there is nobody else."""
    start, whole = sum(call.query_lens[:request]), call.query_lens[request]
    assert start <= first < last <= start + whole
    assert call.compressed_table is not None
    changes: dict[str, Any] = {
        "q": call.q[first:last],
        "topk": None if call.topk is None else call.topk[first:last],
        "query_lens": [last - first],
        "seq_lens": [call.seq_lens[request] - (start + whole - last)],
        "table": call.table[request : request + 1],
        "compressed_table": call.compressed_table[request : request + 1],
    }
    return dataclasses.replace(call, **changes)


def part_of(results: Results, first: int, last: int) -> Results:
    out, top, lse = (part[first:last] for part in results)
    return out, top, lse


@pytest.mark.parametrize("way", WAYS, ids=NAMES)
@pytest.mark.parametrize(("ratio", "width"), [(0, None), (4, 200), (1, None)])
def test_all_parts(ratio: int, width: int | None, way: dict[str, int]) -> None:
    """Uneven contexts: rows with less tiles than parts, and with none."""
    # eleven tiles are more than eight parts of one
    if ratio != 1 or way.get("split_tokens") != 64:
        check(make(seq_lens=(300, 6, 1, 9, 365), ratio=ratio, width=width, heads=64), **way)


@pytest.mark.parametrize("heads", [1, 8, 63, 65, 100, 128])
@pytest.mark.parametrize("way", [WAYS[0], WAYS[3], WAYS[6], WAYS[8]], ids=str)
def test_heads(heads: int, way: dict[str, int]) -> None:
    check(make(heads=heads, seed=heads), **way)


@pytest.mark.parametrize("sink", ["none", "minus", "finite", "plus"])
def test_sinks(sink: str) -> None:
    check(make(sink=sink), num_splits=4)
    check(make(sink=sink, heads=128), split_tokens=64)


@pytest.mark.parametrize("scale", [0.0, -0.05, 0.3])
def test_scales(scale: float) -> None:
    check(dataclasses.replace(make(sink="finite"), scale=scale), num_splits=3)


@pytest.mark.parametrize("splits", [2, 5, 8])
def test_more_clusters_than_run_at_a_time(splits: int) -> None:
    query_lens = tuple((1, 0, 7, 1, 40)[i % 5] for i in range(33))
    seq_lens = tuple(n + (i * 37 % 900) - 3 for i, n in enumerate(query_lens))
    check(make(query_lens, seq_lens, heads=128, width=200, padding=5, rows=(16, 4)), num_splits=splits)


@pytest.mark.parametrize("requests", [31, 32, 33, 700])
def test_many_requests(requests: int) -> None:
    seq_lens = tuple(1 + i * 37 % 400 for i in range(requests))
    check(make((1,) * requests, seq_lens, width=60, padding=3), num_splits=4)
    check(make((0,) * (requests - 1) + (3,), seq_lens, width=60, padding=0), num_splits=8)


def test_rows_without_a_position() -> None:
    for seq_lens in ((0, 3, -5, 9, 1), (INT_MIN, 5, 1, 1, 2)):
        for splits in (2, 8):
            out, top, lse = check(make(seq_lens=seq_lens), num_splits=splits)
            assert (out[0] == 0).all()
            assert (top[0] == -math.inf).all()
            assert (lse[0] == math.inf).all()


@pytest.mark.parametrize("bad", [0.9, 1.0])
def test_parts_of_which_no_entry_counts(bad: float) -> None:
    check(make((1, 9), (3000, 500), width=260, bad=bad), num_splits=6)
    check(make((1, 9), (3000, 500), width=260, bad=bad, window_size=1), split_tokens=64)


@pytest.mark.parametrize(("ratio", "width"), [(4, 512), (128, None)])
@pytest.mark.parametrize("heads", [64, 128])
def test_what_is_chosen_for_few_rows(ratio: int, width: int | None, heads: int) -> None:
    for count in (1, 3, 16, 32, 64, 65):
        check(make((count,), (65_537,), heads=heads, ratio=ratio, width=width, padding=0))


@pytest.mark.parametrize("way", [{"num_splits": 3}, {"num_splits": 8}, {"split_tokens": 128}], ids=str)
def test_a_row_has_the_same_bits_alone(way: dict[str, int]) -> None:
    call = make((40, 1, 30), (700, 900, 33), width=200, padding=2)
    want = check(call, **way)
    for request, (first, last) in ((0, (0, 40)), (0, (7, 8)), (1, (40, 41)), (2, (41, 70)), (2, (60, 61))):
        assert same_bits(run(rows_of(call, first, last, request), **way), part_of(want, first, last))


def test_parts_of_a_size_are_the_same_however_wide_the_lists_are() -> None:
    call = make((5,), (900,), width=230, padding=0, bad=0.0)
    assert call.topk is not None
    want = check(call, split_tokens=192)
    for more in (1, 100, 400, 1000):
        wide = torch.nn.functional.pad(call.topk, (0, more), value=-1)
        assert same_bits(run(dataclasses.replace(call, topk=wide), split_tokens=192), want)
    # of all entries as many count, whatever room the table has
    call = make((5,), (900,), ratio=4, width=None, padding=0)
    want = check(call, split_tokens=192)
    assert call.compressed_table is not None
    table = torch.nn.functional.pad(call.compressed_table, (0, 13), value=-1)
    assert same_bits(run(dataclasses.replace(call, compressed_table=table), split_tokens=192), want)


def test_bits_repeat() -> None:
    call = make((1,) * 20 + (30, 9), (700,) * 10 + (150,) * 10 + (200, 500), width=205, padding=0)
    for splits in (0, 2, 4, 8):
        want = check(call, num_splits=splits)
        for _ in range(20):
            assert same_bits(run(call, num_splits=splits), want)


def test_what_is_not_supported() -> None:
    call = make((5,), (900,), width=900)
    with pytest.raises(NotImplementedError, match="num_splits"):
        run(call, num_splits=9)
    with pytest.raises(NotImplementedError, match="split_tokens"):
        run(call, split_tokens=64)
