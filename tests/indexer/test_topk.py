# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.indexer import ops, reference
from cute_kernels.indexer.call import TopKDecodeCall
from cute_kernels.indexer.ops import all_visible_entries, top_k_per_row_decode, top_k_per_row_prefill
from cute_kernels.runtime.record import record_calls
from tests.helpers import check_op
from tests.indexer.meaning import top_k

POISON = -77_777
INT = torch.int32


def prefill(logits: torch.Tensor, starts: Any, ends: Any, k: int, out: torch.Tensor | None = None) -> torch.Tensor:
    rows = len(starts)
    out = torch.full((rows + 2, k + 3), POISON, dtype=INT) if out is None else out
    starts, ends = (torch.as_tensor(x, dtype=INT) for x in (starts, ends))
    top_k_per_row_prefill(logits, starts, ends, out, rows, logits.stride(0), logits.stride(1), k)
    assert (out[rows:] == POISON).all()
    assert (out[:, k:] == POISON).all()
    return out[:rows, :k]


def check_row(got: torch.Tensor, scores: torch.Tensor, k: int) -> None:
    """`scores` are those of the row's range."""
    n = len(scores)
    if n <= k:
        assert got.tolist() == [*range(n), *[-1] * (k - n)]
    else:
        picks = got.tolist()
        assert len(set(picks)) == k
        assert set(picks) == top_k(scores.tolist(), k)


SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4028234663852886e38]),
    st.floats(width=32),
)


@settings(deadline=None, max_examples=25)
@given(st.lists(SCORES, min_size=1, max_size=24), st.integers(1, 26), st.data())
def test_prefill_picks_by_total_order(values: list[float], k: int, data: st.DataObject) -> None:
    columns = len(values)
    row = torch.tensor(values, dtype=torch.float32)
    logits = torch.full((4, columns + 5), torch.nan)[:, :columns]
    logits[:3] = row
    starts = data.draw(st.lists(st.integers(-3, columns + 3), min_size=3, max_size=3))
    ends = data.draw(st.lists(st.integers(-3, columns + 3), min_size=3, max_size=3))
    got = prefill(logits, starts, ends, k)
    for r in range(3):
        check_row(got[r], row[max(starts[r], 0) : max(min(ends[r], columns), 0)], k)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 9), st.randoms(use_true_random=False))
def test_decode_uses_one_length_per_row(next_n: int, batch: int, k: int, random: Any) -> None:
    rows, columns = batch * next_n, 20
    logits = torch.tensor([[random.choice([-1.0, 0.0, 2.0, math.nan]) for _ in range(columns)] for _ in range(rows)])
    logits = logits.reshape(rows, columns)
    lengths = torch.tensor([random.randint(-2, columns + 4) for _ in range(rows)], dtype=INT)
    wide = torch.zeros(batch, next_n + 2, dtype=INT)
    wide[:, :next_n] = lengths.view(batch, next_n)
    num_rows = random.randint(0, rows)
    out = torch.full((rows + 1, k + 2), POISON, dtype=INT)
    stride = columns if rows == 0 else logits.stride(0)
    top_k_per_row_decode(logits, next_n, wide[:, :next_n], out, num_rows, stride, 1, k)
    assert (out[num_rows:] == POISON).all()
    assert (out[:, k:] == POISON).all()
    for r in range(num_rows):
        check_row(out[r, :k], logits[r, : max(int(lengths[r]), 0)], k)


def test_decode_accepts_one_dimension_for_one_token() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([30, 4, 0], dtype=INT)
    out = torch.full((3, 5), POISON, dtype=INT)
    top_k_per_row_decode(logits, 1, lengths, out, 3, 30, 1, 5)
    for r in range(3):
        check_row(out[r], logits[r, : lengths[r]], 5)
    with pytest.raises(ValueError, match=r"top_k_per_row_decode: seq_lens: expected one length per row.*next_n = 2"):
        top_k_per_row_decode(torch.randn(6, 30), 2, lengths, torch.zeros(6, 5, dtype=INT), 6, 30, 1, 5)


@pytest.mark.parametrize(("k", "tile"), [(512, 4000), (1024, 4000), (512, 2999)])
def test_large_rows_with_ties_at_the_threshold(k: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of rows that are longer than what is sorted at once."""
    monkeypatch.setattr(reference, "SORT_TILE", tile)
    g = torch.Generator().manual_seed(k)
    logits = torch.randint(-3, 4, (7, 3000), generator=g).float()
    logits[3] = 1.0
    logits[4] = torch.nan
    logits[4, 100 : 100 + k // 2] = -torch.inf
    starts, ends = [0, 10, 500, 0, 0, 2999, 7], [3000, 2990, 500 + k, 3000, 3000, 2**31 - 1, k + 8]
    got = prefill(logits, starts, ends, k)
    for r in range(7):
        check_row(got[r], logits[r, starts[r] : min(ends[r], 3000)], k)
    assert got[3].sort().values.tolist() == list(range(k))


def test_nan_only_after_the_numbers() -> None:
    logits = torch.tensor([[math.nan, 1.0, math.nan, -math.inf, 2.0, math.nan]])
    assert set(prefill(logits, [0], [6], 3)[0].tolist()) == {1, 3, 4}
    assert set(prefill(logits, [0], [6], 4)[0].tolist()) == {0, 1, 3, 4}
    negative_nan = torch.tensor([-1, 0x7F800001, -8388607, 0], dtype=INT).view(torch.float32)[None]
    assert negative_nan[0, :3].isnan().all()
    assert set(prefill(negative_nan, [0], [4], 1)[0].tolist()) == {3}
    assert set(prefill(negative_nan, [0], [4], 2)[0].tolist()) == {0, 3}


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]])
    assert set(prefill(logits, [0], [5], 2)[0].tolist()) == {1, 2}


def test_row_alone_equals_row_in_batch() -> None:
    g = torch.Generator().manual_seed(9)
    logits = torch.randint(-2, 3, (9, 200), generator=g).float()
    starts = torch.randint(0, 50, (9,), generator=g)
    ends = torch.randint(60, 220, (9,), generator=g)
    whole = prefill(logits, starts, ends, 31)
    for r in range(9):
        alone = prefill(logits[r : r + 1], starts[r : r + 1], ends[r : r + 1], 31)
        assert set(alone[0].tolist()) == set(whole[r].tolist())


@pytest.mark.parametrize("shape", [(0, 10), (3, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    logits = torch.zeros(shape)
    got = prefill(logits, [0] * shape[0], [5] * shape[0], 4)
    assert (got == -1).all()
    out = torch.full((shape[0], 4), POISON, dtype=INT)
    lengths = torch.full((shape[0], 1), 5, dtype=INT)
    top_k_per_row_decode(logits, 1, lengths, out, shape[0], logits.stride(0), 1, 4)
    assert (out == -1).all()


def test_strided_output() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(1))
    buffer = torch.full((8, 64), POISON, dtype=INT)
    out = buffer[1:7, 8:40]
    prefill(logits, [0, 1, 2, 3], [40, 30, 5, 3], 6, out)
    for r in range(4):
        check_row(out[r, :6], logits[r, r : [40, 30, 5, 3][r]], 6)
    out[:4, :6] = POISON
    assert (buffer == POISON).all()


def test_opcheck_and_compile() -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 50, generator=g)
    starts, ends = torch.zeros(6, dtype=INT), torch.tensor([50, 3, 0, 49, 20, 21], dtype=INT)
    out = torch.zeros(6, 20, dtype=INT)
    check_op("top_k_per_row_prefill", logits, starts, ends, out, 6, 20, True)
    table = torch.arange(30, dtype=INT).view(3, 10)
    for slots in ((None, 0), (table, 4)):
        check_op("top_k_per_row_decode", logits, ends.view(3, 2), out, 5, 20, *slots, True)
        check_op("all_visible_entries", ends.view(3, 2), out, *slots)

    def f(logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits.shape[0]
        outs = [torch.empty(rows, k, dtype=INT) for _ in range(2)]
        top_k_per_row_prefill(logits, starts, ends, outs[0], rows, logits.stride(0), logits.stride(1), k)
        top_k_per_row_decode(logits, 2, ends.view(-1, 2), outs[1], rows, logits.stride(0), logits.stride(1), k)
        return outs[0], outs[1]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, k in ((6, 20), (4, 7)):
        args = (logits[:rows], starts[:rows], ends[:rows], k)
        assert all(torch.equal(a, b) for a, b in zip(f(*args), compiled(*args), strict=True))


def slots_of(entries: torch.Tensor, next_n: int, table: torch.Tensor, page_rows: int) -> list[list[int]]:
    """In plain Python, whose numbers have no width."""
    found = []
    for r, row in enumerate(entries.tolist()):
        pages = table[r // next_n].tolist()
        slots = []
        for x in row:
            page = pages[x // page_rows] if 0 <= x < len(pages) * page_rows else -1
            slot = page * page_rows + x % page_rows
            slots.append(slot if page >= 0 and slot < 2**31 else -1)
        found.append(slots)
    return found


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 3), st.integers(0, 4), st.integers(1, 9), st.integers(1, 5), st.integers(0, 6), st.data())
def test_slots_of_picks(next_n: int, batch: int, k: int, page_rows: int, width: int, data: st.DataObject) -> None:
    rows, columns = batch * next_n, 20
    seed = data.draw(st.integers(0, 2**31))
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, columns, generator=g)
    lengths = torch.randint(-2, columns + 4, (batch, next_n), generator=g).int()
    choices = torch.tensor([-1, -(2**31), 0, 5, 70, 2**31 - 1, (2**31 - 1) // page_rows], dtype=INT)
    table = choices[torch.randint(0, len(choices), (batch, width + 2), generator=g)][:, 1 : 1 + width]
    stride = columns if rows == 0 else logits.stride(0)
    picks, out = (torch.full((rows + 1, k + 2), POISON, dtype=INT) for _ in range(2))
    top_k_per_row_decode(logits, next_n, lengths, picks, rows, stride, 1, k)
    slots: dict[str, Any] = {"slot_block_table": table, "slot_rows_per_page": page_rows}
    top_k_per_row_decode(logits, next_n, lengths, out, rows, stride, 1, k, **slots)
    assert out[:rows, :k].tolist() == slots_of(picks[:rows, :k], next_n, table, page_rows)
    assert (out[rows:] == POISON).all()
    assert (out[:, k:] == POISON).all()

    entries = all_visible_entries(lengths, k)
    assert entries.tolist() == [[x if x < n else -1 for x in range(k)] for n in lengths.view(-1).tolist()]
    out.fill_(POISON)
    got = all_visible_entries(lengths, k, out=out[:rows, 1 : 1 + k], **slots)
    assert got.tolist() == slots_of(entries, next_n, table, page_rows)
    out[:rows, 1 : 1 + k] = POISON
    assert (out == POISON).all()


def test_visible_entries_of_one_row_a_request() -> None:
    assert all_visible_entries(torch.tensor([2, 0, 9], dtype=INT), 3).tolist() == [[0, 1, -1], [-1] * 3, [0, 1, 2]]
    assert all_visible_entries(torch.zeros(0, 2, dtype=INT), 3).shape == (0, 3)


def test_bad_slots() -> None:
    lengths, table = torch.zeros(2, 2, dtype=INT), torch.zeros(2, 5, dtype=INT)
    logits, out = torch.zeros(4, 30), torch.zeros(4, 8, dtype=INT)
    changes: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"slot_block_table": table[:1]}, ValueError, "slot_block_table"),
        ({"slot_block_table": table.long()}, TypeError, "slot_block_table"),
        ({"slot_block_table": torch.zeros(5, 2, dtype=INT).T}, ValueError, "slot_block_table"),
        ({"slot_rows_per_page": 0}, ValueError, "slot_rows_per_page"),
        ({"slot_rows_per_page": 2**30 + 1}, ValueError, "slot_rows_per_page"),
    ]
    for change, error, says in changes:
        slots: dict[str, Any] = {"slot_block_table": table, "slot_rows_per_page": 4, **change}
        with pytest.raises(error, match=f"top_k_per_row_decode: {says}: expected"):
            top_k_per_row_decode(logits, 2, lengths, out, 4, 30, 1, 8, **slots)
        with pytest.raises(error, match=f"all_visible_entries: {says}: expected"):
            all_visible_entries(lengths, 8, **slots)
    for arguments, error, says in (
        ((lengths.long(), 8), TypeError, "visible"),
        ((lengths, 0), ValueError, "k"),
        ((lengths.view(1, 2, 2), 8), ValueError, "visible"),
    ):
        with pytest.raises(error, match=f"all_visible_entries: {says}: expected"):
            all_visible_entries(*arguments)
    for bad in (out[:3], out[:, :7]):
        with pytest.raises(ValueError, match="all_visible_entries: out: expected"):
            all_visible_entries(lengths, 8, out=bad)


def test_cost() -> None:
    logits, out = torch.zeros(4, 50), torch.zeros(4, 10, dtype=INT)
    starts, ends = torch.tensor([-5, 5, 0, 9], dtype=INT), torch.tensor([60, 12, -3, 20], dtype=INT)
    with record_calls() as recording:
        top_k_per_row_prefill(logits, starts, ends, out, 4, 50, 1, 10)
        top_k_per_row_decode(logits, 2, ends.view(2, 2), out, 4, 50, 1, 10)
    assert [c.cost.bytes for c in recording.calls] == [
        4 * (50 + 11) + 4 * 4 * 10 + 2 * 16,
        4 * (50 + 12 + 20) + 4 * 4 * 10 + 16,
    ]


def test_bad_arguments() -> None:
    logits = torch.zeros(4, 30)
    lengths = torch.zeros(4, dtype=INT)
    good: dict[str, Any] = {"logits": logits, "out": torch.zeros(4, 8, dtype=INT), "num_rows": 4, "stride0": 30}
    good |= {"stride1": 1, "k": 8}
    own = {
        top_k_per_row_prefill: {"row_starts": lengths, "row_ends": lengths},
        top_k_per_row_decode: {"next_n": 2, "seq_lens": lengths.view(2, 2)},
    }
    shared: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"logits": None}, TypeError, "logits"),
        ({"logits": logits.double()}, TypeError, "logits"),
        ({"logits": torch.zeros(4, 60)[:, ::2], "stride0": 60, "stride1": 2}, ValueError, "logits"),
        ({"stride0": 31}, ValueError, "stride0"),
        ({"stride1": 2}, ValueError, "stride1"),
        ({"out": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "out"),
        ({"out": torch.zeros(3, 8, dtype=INT)}, ValueError, "out"),
        ({"k": 9}, ValueError, "out"),
        ({"k": 0}, ValueError, "k"),
        ({"num_rows": 5}, ValueError, "num_rows"),
        ({"num_rows": -1}, ValueError, "num_rows"),
    ]
    special: dict[Any, list[tuple[dict[str, Any], type[Exception], str]]] = {
        top_k_per_row_prefill: [
            ({"row_starts": lengths[:3]}, ValueError, "row_starts"),
            ({"row_ends": lengths.long()}, TypeError, "row_ends"),
        ],
        top_k_per_row_decode: [
            ({"seq_lens": lengths.view(4, 1)}, ValueError, "seq_lens"),
            ({"seq_lens": lengths[:2].view(1, 2)}, ValueError, "seq_lens"),
            ({"seq_lens": lengths.view(2, 2).long()}, TypeError, "seq_lens"),
            ({"next_n": 0}, ValueError, "next_n"),
        ],
    }
    for function, mine in own.items():
        for change, error, says in shared + special[function]:
            with pytest.raises(error, match=f"{function.__name__}: {says}: expected"):
                function(**{**good, **mine, **change})


def test_oracle_orders_as_described() -> None:
    assert top_k([math.nan, -math.inf, 1.0, 1.0], 2) == {2, 3}
    assert top_k([1.0, 2.0, 1.0], 2) == {0, 1}
    assert top_k(np.array([math.nan, math.nan, -math.inf]), 2) == {0, 2}


def test_use_pdl_reaches_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[TopKDecodeCall] = []
    monkeypatch.setattr(ops, "_top_k_decode", calls.append)
    logits, lengths, out = torch.randn(3, 30), torch.full((3, 1), 30, dtype=INT), torch.zeros(3, 5, dtype=INT)
    for more in ({}, {"use_pdl": False}, {"use_pdl": True}):
        top_k_per_row_decode(logits, 1, lengths, out, 3, 30, 1, 5, **more)
    assert [call.use_pdl for call in calls] == [True, False, True]
