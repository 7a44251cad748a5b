# SPDX-License-Identifier: Apache-2.0
"""Scores and picks in one op: against scores in integers and a sort, whatever the workspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import formats
from cute_kernels.indexer import chunks
from cute_kernels.indexer.call import ScoreTopKDecodeCall, ScoreTopKPrefillCall
from cute_kernels.indexer.ops import (
    mqa_logits,
    paged_mqa_logits,
    score_top_k_decode,
    score_top_k_prefill,
    score_top_k_workspace_size,
)
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from tests.helpers import check_op
from tests.indexer.meaning import INT, Case, paged, ranges, top_k

FORMATS = (formats.INDEXER_FP8, formats.INDEXER_MXFP4)
POISON = -77_777
MIB = 1 << 20


def ids(fmt: Any) -> str:
    return str(fmt.id)


def picks(scores: np.ndarray, k: int) -> list[int]:
    """Of the scores of a row's range, in ascending order, then -1."""
    found = list(range(len(scores))) if len(scores) <= k else sorted(top_k(scores.tolist(), k))
    return [*found, *[-1] * (k - len(found))]


def out_and_memory(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = torch.full((rows + 2, k + 3), POISON, dtype=INT)
    return whole[1:-1, 1 : k + 1], whole


def scratch(size: int) -> torch.Tensor:
    return torch.full((size // 4,), torch.nan)


@pytest.mark.parametrize("width", [0, 80])
@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_prefill_picks(fmt: Any, width: int) -> None:
    rows, keys, k = 19, 150, 20
    case = Case(fmt.id, rows, 8, keys)
    start, end = ranges(rows, keys)
    for fit in (1, 2, 7, rows):
        out, whole = out_and_memory(rows, k)
        workspace = scratch(fit * chunks.row_bytes(width or keys))
        got = score_top_k_prefill(
            case.query(), case.kv(), case.w(), start, end, k, max_seqlen_k=width, out=out, workspace=workspace
        )
        assert got is out
        for r in range(rows):
            first, last = int(start[r]), min(int(end[r]), keys)
            last = min(last, first + width) if width else last
            first = max(first, 0)
            assert out[r].tolist() == picks(case.scores[r, first : max(last, first)], k), (fit, r)
        out.fill_(POISON)
        assert (whole == POISON).all()


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_decode_picks(fmt: Any, next_n: int) -> None:
    lengths, k, columns = [70, 0, 9, 130, 21], 20, 120
    case = Case(fmt.id, next_n * len(lengths), 8, sum(lengths))
    pool, table = paged(case, fmt, lengths, 16)
    lens = torch.tensor([[length - j for j in range(next_n)] for length in lengths], dtype=INT)
    lens[3, 0] = 1000
    first = np.cumsum([0, *lengths])
    query = case.query(slice(None), len(lengths), next_n)
    # the fourth request's last pages are beyond its columns, and nowhere in the table
    for fit in (1, 2, len(lengths)):
        out, whole = out_and_memory(next_n * len(lengths), k)
        workspace = scratch(fit * next_n * chunks.row_bytes(columns))
        more: dict[str, Any] = {"kv_format": fmt.id, "out": out, "workspace": workspace}
        score_top_k_decode(query, pool, case.w(), lens, table, columns, k, **more)
        for row in range(next_n * len(lengths)):
            b, j = divmod(row, next_n)
            count = min(max(int(lens[b, j]), 0), columns)
            assert out[row].tolist() == picks(case.scores[row, first[b] : first[b] + count], k), (fit, row)
        out.fill_(POISON)
        assert (whole == POISON).all()


def test_decode_writes_slots_of_another_cache() -> None:
    lengths, k, columns = [70, 0, 9, 130, 21], 20, 120
    case = Case("indexer_fp8/1", 2 * len(lengths), 8, sum(lengths))
    pool, table = paged(case, formats.INDEXER_FP8, lengths, 16)
    lens = torch.tensor([[length, length - 1] for length in lengths], dtype=INT)
    args = case.query(slice(None), len(lengths), 2), pool, case.w(), lens, table, columns
    others = torch.arange(5 * 12, dtype=INT).flip(0).view(5, 12) - 3
    for count in (k, columns):
        workspace = scratch(4 * chunks.row_bytes(columns)) if count < columns else None
        found = score_top_k_decode(*args, count, workspace=workspace)
        slots: dict[str, Any] = {"slot_block_table": others, "slot_rows_per_page": 8}
        got = score_top_k_decode(*args, count, workspace=workspace, **slots)
        for row, entries in enumerate(found.tolist()):
            pages = [int(others[row // 2, x // 8]) if 0 <= x < 96 else -1 for x in entries]
            assert got[row].tolist() == [p * 8 + x % 8 if p >= 0 else -1 for p, x in zip(pages, entries, strict=True)]


def test_missing_pages_score_the_lowest() -> None:
    fmt = formats.INDEXER_FP8
    case = Case(fmt.id, 1, 8, 64)
    pool, table = paged(case, fmt, [64], 16)
    table[0, 1] = -1
    lens = torch.tensor([[64]], dtype=INT)
    scores = case.scores[0].copy()
    scores[16:32] = -np.inf
    for k in (40, 60):
        got = score_top_k_decode(case.query(slice(None), 1, 1), pool, case.w(), lens, table, 64, k)
        assert got[0].tolist() == picks(scores, k)


def test_the_pair_of_ops_picks_the_same_when_all_scores_are_equal() -> None:
    q, keys = torch.ones(3, 4, 128).to(torch.float8_e4m3fn), torch.ones(90, 128).to(torch.float8_e4m3fn)
    start, end = torch.tensor([0, 11, 80], dtype=INT), torch.tensor([90, 70, 90], dtype=INT)
    for weight, k in ((1.0, 30), (0.0, 30), (torch.nan, 30), (-torch.inf, 59)):
        got = score_top_k_prefill(q, (keys, torch.ones(90)), torch.full((3, 4), weight), start, end, k)
        assert got[0].tolist() == list(range(k))
        assert got[1].tolist() == list(range(k))
        assert got[2].tolist() == [*range(10), *[-1] * (k - 10)]


def test_rows_that_have_no_more_than_k_columns_need_no_workspace() -> None:
    case = Case("indexer_fp8/1", 5, 8, 60)
    start, end = ranges(5, 60)
    assert score_top_k_workspace_size(5, 60, 60) == 0
    whole = score_top_k_prefill(case.query(), case.kv(), case.w(), start, end, 60)
    args = [case.query(), None, *case.kv(), case.w(), start, end, 0]
    out = torch.full((5, 60), POISON, dtype=INT)
    OPS["score_top_k_prefill"].overload(*args, out, None)
    assert torch.equal(whole, out)
    for r in range(5):
        count = max(0, min(int(end[r]), 60) - max(int(start[r]), 0))
        assert out[r].tolist() == [*range(count), *[-1] * (60 - count)]


def test_empty() -> None:
    case = Case("indexer_fp8/1", 4, 8, 30)
    start, end = ranges(4, 30)
    k, scale = case.kv()
    got = score_top_k_prefill(case.query(), (k[:0], scale[:0]), case.w(), start, end, 5)
    assert (got == -1).all()
    none = slice(0, 0)
    got = score_top_k_prefill(case.query(none), (k, scale), case.w(none), start[:0], end[:0], 5)
    assert got.shape == (0, 5)
    pool, table = paged(case, formats.INDEXER_FP8, [30, 0], 16)
    lens = torch.tensor([[30, 3], [0, -1]], dtype=INT)
    got = score_top_k_decode(case.query(slice(None), 2, 2), pool, case.w(), lens, table, 0, 5)
    assert (got == -1).all()
    got = score_top_k_decode(case.query(none, 0, 2), pool, case.w(none), lens[:0], table[:0], 30, 5)
    assert got.shape == (0, 5)


def test_workspace_size() -> None:
    size = score_top_k_workspace_size
    assert size(4096, 262144, 512) == size(4096, 65536, 512) == 1024 * MIB
    assert size(4096, 262144, 512, most=0) == MIB
    assert size(1, 1 << 20, 512, next_n=4, most=MIB) == 16 * MIB
    assert size(4096, 300, 512) == size(0, 3000, 512) == 0
    assert size(10, 513, 512) == 10 * 768 * 4
    assert size(64, 32768, 512, next_n=2) == 2 * 64 * 32768 * 4
    for columns in (600, 5000, 100_001):
        assert 0 < size(4096, columns, 512) <= 1024 * MIB
        assert size(7, columns, 512) <= size(8, columns, 512)


@pytest.mark.parametrize("requests", [0, 1, 3, 4, 5, 63, 64, 4096])
@pytest.mark.parametrize("next_n", [1, 3])
def test_chunks_are_even_and_fit(requests: int, next_n: int) -> None:
    unit = next_n * chunks.row_bytes(700)
    for fit in (1, 2, 5, 60, 10_000):
        found = chunks.bounds(requests, 700, next_n, fit * unit + 5)
        assert [first for first, _ in found] == [0, *[last for _, last in found[:-1]]][: len(found)]
        assert (found[-1][1] if found else 0) == requests
        counts = [last - first for first, last in found]
        assert all(0 < count <= fit for count in counts)
        least = -(-requests // fit)
        assert least <= len(counts) <= -(-5 * least // 4)
        assert all(count % chunks.ROWS == 0 for count in counts[:-1]) or fit < chunks.ROWS


def test_chunks_waste_no_rows_of_a_group() -> None:
    size = score_top_k_workspace_size(4096, 262144, 512, most=64_000_000)
    assert {last - first for first, last in chunks.bounds(4096, 262144, 1, size)} == {60, 4096 % 60}
    assert chunks.bounds(5, 700, 1, 5 * chunks.row_bytes(700)) == ((0, 5),)


@pytest.mark.parametrize("fmt", FORMATS, ids=ids)
def test_opcheck(fmt: Any) -> None:
    case = Case(fmt.id, 6, 8, 50)
    start, end = ranges(6, 50)
    q = case.query()
    codes, scale = q if isinstance(q, tuple) else (q, None)
    results = torch.zeros(6, 9, dtype=INT), scratch(2 * chunks.row_bytes(50))
    check_op("score_top_k_prefill", codes, scale, *case.kv(), case.w(), start, end, 40, *results)
    pool, table = paged(case, fmt, [20, 30], 16)
    lens = torch.tensor([[20, 3, 7], [30, -1, 9]], dtype=INT)
    q = case.query(slice(None), 2, 3)
    codes, scale = q if isinstance(q, tuple) else (q, None)
    results = torch.zeros(6, 9, dtype=INT), scratch(3 * chunks.row_bytes(30))
    for slots in ((None, 0), (table, 16)):
        check_op("score_top_k_decode", codes, scale, pool, case.w(), lens, table, 30, fmt.id, *results, *slots)


@pytest.mark.full
def test_compile() -> None:
    case = Case("indexer_fp8/1", 6, 8, 50)
    start, end = ranges(6, 50)
    pool, table = paged(case, formats.INDEXER_FP8, [20, 30], 16)
    lens = torch.tensor([[20, 3, 7], [30, -1, 9]], dtype=INT)

    def f(q: Any, kv: Any, w: Any, start: Any, end: Any, lens: Any) -> Any:
        one = score_top_k_prefill(q, kv, w, start, end, 7)
        two = score_top_k_decode(q.unflatten(0, (-1, 3)), pool, w, lens, table, 30, 7)
        return one, two

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    args = case.query(), case.kv(), case.w(), start, end, lens
    assert all(torch.equal(a, b) for a, b in zip(f(*args), compiled(*args), strict=True))


def test_cost_is_that_of_scores_that_are_not_written() -> None:
    case = Case("indexer_fp8/1", 4, 8, 50)
    start, end = torch.zeros(4, dtype=INT), torch.tensor([50, 20, 21, -3], dtype=INT)
    pool, table = paged(case, formats.INDEXER_FP8, [50, 50][:1], 64)
    lens = torch.tensor([[50, 20, 21, -3]], dtype=INT)
    with record_calls() as recording:
        score_top_k_prefill(case.query(), case.kv(), case.w(), start, end, 20)
        score_top_k_decode(case.query(slice(None), 1, 4), pool, case.w(), lens, table, 50, 20)
    common = 4 * 8 * 128 + 4 * 8 * 4 + 50 * 132 + 4 * 20 * 4
    assert [call.cost.bytes for call in recording.calls] == [common + 2 * 16, common + 16]
    assert [call.cost.flops for call in recording.calls] == [2 * 128 * 8 * (50 + 21)] * 2


def test_scores_are_those_of_the_other_ops() -> None:
    """Which the reference leaves in the workspace."""
    case = Case("indexer_fp8/1", 3, 8, 50)
    start, end = torch.zeros(3, dtype=INT), torch.full((3,), 50, dtype=INT)
    workspace = scratch(3 * chunks.row_bytes(50))
    score_top_k_prefill(case.query(), case.kv(), case.w(), start, end, 9, workspace=workspace)
    scores = mqa_logits(case.query(), case.kv(), case.w(), start, end)
    assert torch.equal(workspace.view(3, -1)[:, :50], scores)
    pool, table = paged(case, formats.INDEXER_FP8, [50], 64)
    lens, query = end.view(1, 3), case.query(slice(None), 1, 3)
    workspace.fill_(torch.nan)
    score_top_k_decode(query, pool, case.w(), lens, table, 50, 9, workspace=workspace)
    scores = paged_mqa_logits(query, pool, case.w(), lens, table, None, 50)
    assert torch.equal(workspace.view(3, -1)[:, :50], scores)


def test_bad_arguments() -> None:
    case = Case("indexer_fp8/1", 6, 8, 300)
    start, end = ranges(6, 300)
    pool, table = paged(case, formats.INDEXER_FP8, [100, 200], 16)
    good: dict[Any, dict[str, Any]] = {
        score_top_k_prefill: {
            "q": case.query(),
            "kv": case.kv(),
            "weights": case.w(),
            "cu_seq_len_k_start": start,
            "cu_seq_len_k_end": end,
            "k": 9,
        },
        score_top_k_decode: {
            "q": case.query(slice(None), 2, 3),
            "kv_cache": pool,
            "weights": case.w(),
            "context_lens": torch.zeros(2, 3, dtype=INT),
            "block_tables": table,
            "max_model_len": 300,
            "k": 9,
        },
    }
    shared: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"k": 0}, ValueError, "k"),
        ({"out": torch.zeros(6, 8, dtype=INT)}, ValueError, "out"),
        ({"out": torch.zeros(5, 9, dtype=INT)}, ValueError, "out"),
        ({"out": torch.zeros(6, 9)}, TypeError, "out"),
        ({"weights": case.w()[:5]}, ValueError, "weights"),
        ({"workspace": torch.zeros(2, 4096)}, ValueError, "workspace"),
        ({"workspace": torch.zeros(8192, dtype=torch.float64)}, TypeError, "workspace"),
        ({"workspace": torch.zeros(8193)[1:]}, ValueError, "workspace"),
        ({"workspace": torch.zeros(16384)[::2]}, ValueError, "workspace"),
        ({"workspace": torch.zeros(8193, dtype=torch.uint8)}, ValueError, "workspace"),
    ]
    special: dict[Any, list[tuple[dict[str, Any], type[Exception], str]]] = {
        score_top_k_prefill: [
            ({"workspace": torch.zeros(511)}, ValueError, "workspace"),
            ({"max_seqlen_k": -1}, ValueError, "max_seqlen_k"),
            ({"kv": case.kv()[0]}, TypeError, "kv"),
            ({"cu_seq_len_k_end": end.long()}, TypeError, "cu_seq_len_k_end"),
        ],
        score_top_k_decode: [
            ({"workspace": torch.zeros(3 * 512 - 1)}, ValueError, "workspace"),
            ({"context_lens": torch.zeros(6, dtype=INT)}, ValueError, "context_lens"),
            ({"max_model_len": -1}, ValueError, "max_model_len"),
            ({"kv_format": "indexer_mxfp4/1"}, (TypeError, ValueError), "kv_cache"),  # type: ignore[list-item]
        ],
    }
    for function, arguments in good.items():
        function(**arguments)
        for change, error, says in shared + special[function]:
            with pytest.raises(error, match=rf"{function.__name__}: {says}: expected"):
                function(**{**arguments, **change})
    with pytest.raises(ValueError, match=r"workspace: expected at least 6144 bytes \(score_top_k"):
        score_top_k_decode(**{**good[score_top_k_decode], "workspace": torch.zeros(2)})


def test_a_workspace_of_bytes_does_as_well() -> None:
    case = Case("indexer_fp8/1", 5, 8, 300)
    start, end = ranges(5, 300)
    args = case.query(), case.kv(), case.w(), start, end, 9
    small = torch.full((3 * 2048 + 16,), 0xA5, dtype=torch.uint8)[16:]
    assert torch.equal(score_top_k_prefill(*args, workspace=small), score_top_k_prefill(*args))


@pytest.mark.parametrize("optional", [False, True])
def test_parts_of_a_call(optional: bool) -> None:
    """Of three requests of two rows each; all of them are the call itself."""
    b, n = 3, 2
    numbers = torch.arange(b * n)
    per_request, per_row = numbers.view(b, n), numbers[:, None]
    scale = per_request if optional else None
    call = ScoreTopKDecodeCall(
        per_request, scale, numbers, per_row, per_request, per_request, 9, "f", per_row, None, scale, 4
    )
    assert call.requests(0, 3) is call
    for first, last in ((0, 1), (1, 3), (2, 2)):
        part = call.requests(first, last)
        for name in ("q", "context_lens", "block_tables", *(("q_scale", "slot_block_table") if optional else ())):
            assert torch.equal(getattr(part, name), per_request[first:last])
        for name in ("weights", "out"):
            assert torch.equal(getattr(part, name), per_row[2 * first : 2 * last])
        assert (part.q_scale is None) == (part.slot_block_table is None) == (not optional)
        assert part.kv_cache is numbers
        assert part[6:8] == (9, "f")
    row_scale = per_row if optional else None
    rows = ScoreTopKPrefillCall(per_row, row_scale, numbers, numbers, per_row, numbers, numbers, 9, per_row, None)
    assert rows.rows(0, 6) is rows
    part = rows.rows(1, 4)
    cut = ("q", "weights", "out", *(("q_scale",) if optional else ()))
    assert all(torch.equal(getattr(part, name), per_row[1:4]) for name in cut)
    assert (part.q_scale is None) == (not optional)
    assert all(torch.equal(getattr(part, f"cu_seq_len_k_{name}"), numbers[1:4]) for name in ("start", "end"))
    assert part.k is numbers
