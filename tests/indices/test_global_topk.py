# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from tests.helpers import check_op
from tests.indices.batches import (
    DEAD,
    INT32_MAX,
    Table,
    check_compiled,
    int32,
    make_table,
    poisoned,
    same,
    slot_of,
    table_tensor,
    wide,
)

INT32_MIN = -(2**31)


def expected_global(
    picks: Table, requests: list[int], valid: list[bool], table: Table, block_size: int
) -> tuple[Table, list[int]]:
    rows, lens = [], []
    for row, request, ok in zip(picks, requests, valid, strict=True):
        slots = [slot for slot in (slot_of(table, request, x, block_size) for x in row) if slot != -1]
        rows.append(slots + [-1] * (len(row) - len(slots)))
        lens.append(len(slots) if ok else 0)
    return rows, lens


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 5, 64]),
    rows=st.integers(0, 8),
    width=st.sampled_from([0, 1, 4, 33]),
)
def test_against_loops(seed: int, block_size: int, rows: int, width: int) -> None:
    rnd = random.Random(seed)
    entries = [rnd.randint(0, 90) for _ in range(3)]
    table = make_table(rnd, entries, block_size, spare=rnd.randint(0, 2))
    requests = [rnd.choice([0, 1, 2, 1, -1, 3]) for _ in range(rows)]
    valid = [rnd.random() < 0.7 for _ in range(rows)]

    def pick() -> int:
        return rnd.choice([rnd.randint(0, 95), rnd.randint(0, 95), -1, INT32_MIN, INT32_MAX, 10**6])

    picks = [[pick() for _ in range(width)] for _ in range(rows)]
    tail = rnd.randint(0, 2)
    indices, lens = compute_global_topk_indices_and_lens(
        wide(picks, width),
        int32(requests + [0] * tail),
        table_tensor(table),
        block_size,
        torch.tensor(valid + [True] * tail, dtype=torch.bool),
    )
    want, want_lens = expected_global(picks, requests, valid, table, block_size)
    same(indices, want, (rows, width) if rows and width else None)
    assert indices.shape == (rows, width)
    same(lens, want_lens, (rows,))


def small_call() -> dict[str, Any]:
    """Live picks, a tail of -1, a page past the live length, an invalid token, a request that does not exist."""
    return {
        "topk_indices": wide([[0, 5, 63, -1], [64, 3, 128, -1], [1, 2, -1, -1], [9, -1, -1, -1]], 4),
        "token_to_req_indices": int32([0, 1, 0, 5]),
        "block_table": table_tensor([[3, DEAD], [10, 20]]),
        "block_size": 64,
        "is_valid_token": torch.tensor([True, True, False, True]),
    }


def test_small_example() -> None:
    indices, lens = compute_global_topk_indices_and_lens(**small_call())
    same(indices, [[192, 197, 255, -1], [1280, 643, -1, -1], [193, 194, -1, -1], [-1] * 4])
    same(lens, [3, 2, 0, 0])  # the invalid token's row is translated all the same


def test_the_first_row_of_the_first_page_counts() -> None:
    call = small_call()
    call["block_table"] = table_tensor([[0, DEAD], [10, 20]])
    indices, lens = compute_global_topk_indices_and_lens(**call)
    same(indices, [[0, 5, 63, -1], [1280, 643, -1, -1], [1, 2, -1, -1], [-1] * 4])
    same(lens, [3, 2, 0, 0])


def test_pages_without_an_int32_slot_are_unmapped_and_not_counted() -> None:
    last = INT32_MAX // 64
    call = small_call()
    call["block_table"] = table_tensor([[last, last + 1], [INT32_MAX, INT32_MAX]])
    indices, lens = compute_global_topk_indices_and_lens(**call)
    same(
        indices, [[last * 64, last * 64 + 5, INT32_MAX, -1], [-1] * 4, [last * 64 + 1, last * 64 + 2, -1, -1], [-1] * 4]
    )
    same(lens, [3, 0, 0, 0])


def test_writes_given_buffers_and_nothing_else() -> None:
    call = small_call()
    whole, whole_lens = poisoned(6, 6), poisoned(6)
    indices, lens = whole[1:5, 1:5], whole_lens[1:5]
    got = compute_global_topk_indices_and_lens(**call, out_indices=indices, out_lens=lens)
    assert got[0] is indices
    assert got[1] is lens
    fresh, fresh_lens = compute_global_topk_indices_and_lens(**call)
    want, want_lens = poisoned(6, 6), poisoned(6)
    want[1:5, 1:5], want_lens[1:5] = fresh, fresh_lens
    assert torch.equal(whole, want)
    assert torch.equal(whole_lens, want_lens)


def test_op_and_compile() -> None:
    call = small_call()
    check_op("compute_global_topk_indices_and_lens", *call.values(), poisoned(4, 4), poisoned(4))
    smaller = {**call, "topk_indices": call["topk_indices"][:2, :3], "block_size": 16}
    check_compiled(compute_global_topk_indices_and_lens, call, smaller)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"topk_indices": torch.zeros(4, 4, dtype=torch.int64)}, TypeError, "topk_indices"),
        ({"topk_indices": int32([0] * 4)}, ValueError, "topk_indices"),
        ({"topk_indices": torch.zeros(4, 4, dtype=torch.int32).T}, ValueError, "topk_indices"),
        ({"token_to_req_indices": int32([0] * 3)}, ValueError, "token_to_req_indices"),
        ({"block_table": torch.zeros(2, 2)}, TypeError, "block_table"),
        ({"block_size": -1}, ValueError, "block_size"),
        ({"is_valid_token": torch.ones(3, dtype=torch.bool)}, ValueError, "is_valid_token"),
        ({"out_indices": poisoned(4, 5)}, ValueError, "out_indices"),
        ({"out_lens": poisoned(3)}, ValueError, "out_lens"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    with pytest.raises(error, match=rf"compute_global_topk_indices_and_lens: {argument}: expected"):
        compute_global_topk_indices_and_lens(**{**small_call(), **change})
