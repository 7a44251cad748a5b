# SPDX-License-Identifier: Apache-2.0
"""Block tables against integer loops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels import paging

INT32_MAX = 2**31 - 1


def expected_slot(entry: int, request: int, table: list[list[int]], rows_per_page: int) -> int:
    if entry < 0 or not 0 <= request < len(table):
        return -1
    column = entry // rows_per_page
    if column >= len(table[request]) or table[request][column] < 0:
        return -1
    return table[request][column] * rows_per_page + entry % rows_per_page


entries_strategy = st.integers(-5, 300) | st.sampled_from([-(2**31), INT32_MAX, -1, 0])
pages_strategy = st.integers(0, 1000) | st.sampled_from([-1, -(10**6), INT32_MAX])


@settings(deadline=None, max_examples=25)
@given(st.data(), st.integers(0, 4), st.integers(0, 5), st.sampled_from([1, 2, 3, 64]))
def test_entries_to_slots(data: st.DataObject, num_requests: int, width: int, rows_per_page: int) -> None:
    row = st.lists(pages_strategy, min_size=width, max_size=width)
    table = data.draw(st.lists(row, min_size=num_requests, max_size=num_requests))
    pairs = data.draw(st.lists(st.tuples(entries_strategy, st.integers(-2, num_requests + 1)), max_size=20))
    block_table = torch.tensor(table, dtype=torch.int32).reshape(num_requests, width)
    entries = torch.tensor([e for e, _ in pairs], dtype=torch.int32)
    requests = torch.tensor([r for _, r in pairs], dtype=torch.int32)
    got = paging.entries_to_slots(entries, requests, block_table, rows_per_page)
    assert got.dtype == torch.int64
    assert got.tolist() == [expected_slot(e, r, table, rows_per_page) for e, r in pairs]


def test_pages_are_multiplied_in_64_bits() -> None:
    table = torch.tensor([[INT32_MAX, 2**25]], dtype=torch.int32)
    got = paging.entries_to_slots(
        torch.tensor([63, 64], dtype=torch.int32), torch.zeros(2, dtype=torch.int32), table, 64
    )
    assert got.tolist() == [INT32_MAX * 64 + 63, 2**31]


def test_requests_and_entries_broadcast() -> None:
    table = torch.tensor([[5, 0], [7, 8]], dtype=torch.int32)
    got = paging.entries_to_slots(torch.tensor([[0, 3, 4, 9]]), torch.tensor([[0], [1], [2]]), table, 4)
    assert got.tolist() == [[20, 23, 0, -1], [28, 31, 32, -1], [-1] * 4]


def test_row_strided_table() -> None:
    wide = torch.arange(12, dtype=torch.int32).view(3, 4)
    got = paging.entries_to_slots(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]), wide[:, 1:3], 1)
    assert got.tolist() == [1, 6, -1]


def test_to_index() -> None:
    slots = torch.tensor([0, 7, -1, -5, INT32_MAX, INT32_MAX + 1, 2**32, 2**32 + 3, -(2**32) + 3, -(2**63)])
    got = paging.to_index(slots)
    assert got.dtype == torch.int32
    assert got.tolist() == [0, 7, -1, -1, INT32_MAX, -1, -1, -1, -1, -1]


def expected_row(row: int, starts: list[int], seq_lens: list[int]) -> tuple[int, int] | None:
    """(request, position) of a row, None if no request covers it."""
    for r, seq_len in enumerate(seq_lens):
        if starts[r] <= row < starts[r + 1]:
            return r, seq_len - (starts[r + 1] - starts[r]) + (row - starts[r])
    return None


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9) | st.just(INT32_MAX)), max_size=5),
    st.integers(0, 3),
    st.integers(0, 25),
)
def test_row_positions(requests: list[tuple[int, int]], first: int, num_rows: int) -> None:
    """Requests without rows, rows before the first and behind the last request, more rows than context."""
    starts = [first]
    for rows, _ in requests:
        starts.append(starts[-1] + rows)
    seq_lens = [seq_len for _, seq_len in requests]
    request, position = paging.row_positions(
        num_rows, torch.tensor(starts, dtype=torch.int32), torch.tensor(seq_lens, dtype=torch.int32)
    )
    assert request.dtype == position.dtype == torch.int64
    for row, got in enumerate(zip(request.tolist(), position.tolist(), strict=True)):
        want = expected_row(row, starts, seq_lens)
        assert got[1] == -1 if want is None else got == want
    assert len(request) == len(position) == num_rows


def test_of_request() -> None:
    values = torch.tensor([5, -7, INT32_MAX], dtype=torch.int32)
    got = paging.of_request(values, torch.tensor([[2, 0], [3, -1], [1, 2**31 - 1]], dtype=torch.int32))
    assert got.dtype == torch.int64
    assert got.tolist() == [[INT32_MAX, 5], [0, 0], [-7, 0]]
    assert paging.of_request(values[:0], torch.tensor([0, -1])).tolist() == [0, 0]
