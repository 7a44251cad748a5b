# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.indices.ops import compute_decode_swa_indices
from tests.helpers import check_op
from tests.indices.batches import (
    INT32_MAX,
    POISON,
    Table,
    check_compiled,
    int32,
    make_table,
    poisoned,
    same,
    slot_of,
    table_tensor,
)


def expected_swa(
    positions: list[int], requests: list[int], valid: list[bool], table: Table, block_size: int, window: int
) -> tuple[list, list[int]]:
    rows, lens = [], []
    for position, request, ok in zip(positions, requests, valid, strict=True):
        row, length = [-1] * window, 0
        if ok:
            for seen in range(max(position - window + 1, 0), position + 1):
                row[length] = slot_of(table, request, seen, block_size)
                length += 1
        rows.append([row])
        lens.append(length)
    return rows, lens


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    window=st.sampled_from([1, 2, 7, 64, 128]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    rows=st.integers(0, 9),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_against_loops(seed: int, window: int, block_size: int, rows: int, dtype: torch.dtype) -> None:
    rnd = random.Random(seed)
    contexts = [rnd.randint(0, 300) for _ in range(3)]
    table = make_table(rnd, contexts, block_size)
    requests = [rnd.choice([0, 1, 2, 2, -1, 3, INT32_MAX]) for _ in range(rows)]
    positions = [rnd.choice([rnd.randint(-2, 310), 0, window - 1, window, 10**6]) for _ in range(rows)]
    valid = [rnd.random() < 0.8 for _ in range(rows)]
    tail = rnd.randint(0, 2)  # per-token vectors may be longer than this call's rows

    indices, lens = compute_decode_swa_indices(
        torch.tensor(positions, dtype=dtype),
        int32(requests + [0] * tail),
        torch.tensor(valid + [True] * tail, dtype=torch.bool),
        table_tensor(table),
        block_size,
        window,
    )

    want, want_lens = expected_swa(positions, requests, valid, table, block_size, window)
    same(indices, want, (rows, 1, window))
    same(lens, want_lens, (rows,))


def small_call() -> dict[str, Any]:
    """Two requests; three tokens of one request (as with drafts), one invalid token with garbage, one far position."""
    rnd = random.Random(1)
    return {
        "positions": torch.tensor([130, 131, 132, -5, 40, 10**6]),
        "token_to_req_indices": int32([0, 0, 0, 99, 1, 1]),
        "is_valid_token": torch.tensor([True, True, True, False, True, True]),
        "block_table": table_tensor(make_table(rnd, [133, 41], 64)),
        "block_size": 64,
    }


def test_default_window_is_128() -> None:
    indices, lens = compute_decode_swa_indices(**small_call())
    assert indices.shape == (6, 1, 128)
    same(lens, [128, 128, 128, 0, 41, 128])
    assert indices[3].unique().tolist() == [-1]
    assert indices[5].unique().tolist() == [-1]  # its pages are not in the table; the length stays


def test_neighbouring_tokens_shift_the_window_by_one() -> None:
    indices, _ = compute_decode_swa_indices(**small_call())
    assert torch.equal(indices[0, 0, 1:], indices[1, 0, :-1])
    assert torch.equal(indices[1, 0, 1:], indices[2, 0, :-1])


def test_pages_without_an_int32_slot_are_unmapped() -> None:
    last = INT32_MAX // 64  # its last row is slot 2^31 - 1
    table = [[last, last + 1, INT32_MAX, -1, 7]]
    positions = [64 * 5 - 1]
    indices, lens = compute_decode_swa_indices(
        torch.tensor(positions), int32([0]), torch.tensor([True]), table_tensor(table), 64, 320
    )
    same(indices, [[[last * 64 + i for i in range(64)] + [-1] * 192 + [7 * 64 + i for i in range(64)]]])
    assert indices[0, 0, 63].item() == INT32_MAX
    same(lens, [320])


def test_no_tokens_and_no_requests() -> None:
    none = torch.empty(0, dtype=torch.int32)
    table = torch.empty(0, 0, dtype=torch.int32)
    indices, lens = compute_decode_swa_indices(torch.empty(0, dtype=torch.int64), none, none.bool(), table, 64)
    assert indices.shape == (0, 1, 128)
    assert lens.shape == (0,)
    one = torch.zeros(1, dtype=torch.int64)
    indices, lens = compute_decode_swa_indices(one, one.int(), one == 0, table, 64, 4)
    same(indices, [[[-1] * 4]])
    same(lens, [1])


def test_writes_given_buffers_and_nothing_else() -> None:
    call = small_call()
    whole, whole_lens = poisoned(8, 2, 130), poisoned(8)
    indices, lens = whole[1:7, :1, 1:129], whole_lens[1:7]
    got = compute_decode_swa_indices(**call, out_indices=indices, out_lens=lens)
    assert got[0] is indices
    assert got[1] is lens

    fresh, fresh_lens = compute_decode_swa_indices(**call)
    want, want_lens = poisoned(8, 2, 130), poisoned(8)
    want[1:7, :1, 1:129], want_lens[1:7] = fresh, fresh_lens
    assert torch.equal(whole, want)
    assert torch.equal(whole_lens, want_lens)
    assert POISON not in fresh


def test_op_and_compile() -> None:
    call = small_call()
    check_op("compute_decode_swa_indices", *call.values(), 128, poisoned(6, 1, 128), poisoned(6))
    shorter = {**call, "positions": call["positions"][:3], "block_size": 16, "window_size": 96}
    check_compiled(compute_decode_swa_indices, {**call, "window_size": 128}, shorter)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"positions": torch.zeros(6)}, TypeError, "positions"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, "positions"),
        ({"token_to_req_indices": torch.zeros(6, dtype=torch.int64)}, TypeError, "token_to_req_indices"),
        ({"token_to_req_indices": int32([0] * 5)}, ValueError, "token_to_req_indices"),
        ({"is_valid_token": int32([1] * 6)}, TypeError, "is_valid_token"),
        ({"is_valid_token": torch.ones(5, dtype=torch.bool)}, ValueError, "is_valid_token"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "block_table"),
        ({"block_table": int32([0])}, ValueError, "block_table"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32).T}, ValueError, "block_table"),
        ({"block_size": 0}, ValueError, "block_size"),
        ({"window_size": 0}, ValueError, "window_size"),
        ({"window_size": -3}, ValueError, "window_size"),
        ({"out_indices": poisoned(6, 128)}, ValueError, "out_indices"),
        ({"out_indices": poisoned(6, 1, 127)}, ValueError, "out_indices"),
        ({"out_lens": poisoned(7)}, ValueError, "out_lens"),
        ({"out_lens": torch.zeros(6, dtype=torch.int64)}, TypeError, "out_lens"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    with pytest.raises(error, match=rf"compute_decode_swa_indices: {argument}: expected"):
        compute_decode_swa_indices(**{**small_call(), **change})
