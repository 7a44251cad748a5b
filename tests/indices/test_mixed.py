# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.indices.ops import (
    build_flashinfer_mixed_sparse_indices,
    compute_decode_swa_indices,
    compute_global_topk_indices_and_lens,
)
from tests.helpers import check_op
from tests.indices.batches import (
    INT32_MAX,
    Step,
    Table,
    check_compiled,
    int32,
    make_table,
    poisoned,
    random_step,
    same,
    slot_of,
    table_tensor,
    wide,
)

INT32_MIN = -(2**31)


def expected_mixed(
    swa: Table,
    compressed: Table | None,
    lens: list[int] | None,
    picks: Table,
    step: Step,
    swa_table: Table,
    swa_size: int,
    table: Table,
    size: int,
    window: int,
    ratio: int,
    topk: int,
    local: bool,
    valid: list[bool] | None,
) -> tuple[Table, list[int]]:
    decode_width = len(compressed[0]) if compressed else 0
    padded = -(-max(topk, decode_width) // 4) * 4
    rows, counts = [], []
    for t in range(step.num_rows):
        request, position = step.requests[t], step.positions[t]
        row, count = [-1] * (window + padded), 0
        if t < len(swa):
            row[:window] = swa[t]
            for j in range(decode_width):
                x = compressed[t][j]
                row[window + j] = slot_of(table, request, x, size) if local else x
                count += row[window + j] != -1 if local else 0
            if local and valid is not None and not valid[t]:
                count = 0
            if not local and decode_width:
                count = decode_width if lens is None else min(max(lens[t], 0), decode_width)
        elif position is not None and position >= 0:
            for j, seen in enumerate(range(max(position - window + 1, 0), position + 1)):
                row[j] = slot_of(swa_table, request, seen, swa_size)
            visible = (position + 1) // ratio if topk else 0
            count = min(visible, topk)
            for j, x in enumerate(picks[t - len(swa)][:count]):
                row[window + j] = slot_of(table, request, x, size) if 0 <= x < visible else -1
        rows.append(row)
        counts.append(window + count)
    return rows, counts


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    window=st.sampled_from([1, 4, 128]),
    ratio=st.sampled_from([4, 4, 128, 1]),
    topk=st.sampled_from([0, 3, 8, 64]),
    decode_width=st.sampled_from([None, 0, 1, 8, 70]),
    prefill_width=st.sampled_from([0, 2, 8, 66]),
    local=st.booleans(),
    with_optionals=st.booleans(),
    middle=st.booleans(),
)
def test_against_loops(
    seed: int,
    window: int,
    ratio: int,
    topk: int,
    decode_width: int | None,
    prefill_width: int,
    local: bool,
    with_optionals: bool,
    middle: bool,
) -> None:
    rnd = random.Random(seed)
    step = random_step(rnd, 4, 6, 300, padded_rows=rnd.randint(0, 4))
    step.first = rnd.choice([0, 0, 23])
    if rnd.random() < 0.2:
        step.seq_lens[-1] = 0  # a context shorter than its query: positions below 0
    # Decode rows end anywhere, at request boundaries or not: it does not matter here.
    decode = rnd.choice([0, step.num_rows, rnd.randint(0, step.num_rows)])
    swa_size, size = rnd.choice([1, 16, 64]), rnd.choice([1, 2, 64])
    swa_table = make_table(rnd, step.seq_lens, swa_size)
    table = make_table(rnd, [s // ratio for s in step.seq_lens], size)

    def entry() -> int:
        return rnd.choice([rnd.randint(0, 80), rnd.randint(0, 80), -1, INT32_MIN, INT32_MAX])

    swa = [[rnd.randint(-1, 10**6) for _ in range(window)] for _ in range(decode)]
    compressed = None if decode_width is None else [[entry() for _ in range(decode_width)] for _ in range(decode)]
    picks = [[entry() for _ in range(prefill_width)] for _ in range(step.num_rows - decode)]
    lens = [rnd.choice([-2, 0, 1, 5, 99]) for _ in range(decode + 1)] if with_optionals else None
    valid = [rnd.random() < 0.7 for _ in range(decode + 1)] if with_optionals else None

    def maybe_3d(t: torch.Tensor) -> torch.Tensor:
        return t.unsqueeze(1) if middle else t

    indices, counts = build_flashinfer_mixed_sparse_indices(
        maybe_3d(wide(swa, window)),
        None if compressed is None else maybe_3d(wide(compressed, decode_width)),
        None if lens is None else int32(lens),
        wide(picks, prefill_width),
        int32(step.query_start_loc),
        int32(step.seq_lens),
        int32(step.requests),
        table_tensor(swa_table),
        swa_size,
        table_tensor(table),
        size,
        window,
        ratio,
        topk,
        local,
        None if valid is None else torch.tensor(valid, dtype=torch.bool),
    )

    want, want_counts = expected_mixed(
        swa, compressed, lens, picks, step, swa_table, swa_size, table, size, window, ratio, topk, local, valid
    )
    # The table keeps its width when there are no decode rows.
    padded = -(-max(topk, decode_width or 0) // 4) * 4
    assert indices.shape == (step.num_rows, window + padded)
    same(indices, [row + [-1] * (window + padded - len(row)) for row in want])
    same(counts, want_counts, (step.num_rows,))


def small_call(local: bool = True) -> dict[str, Any]:
    """Two decode requests (one with two rows) and two prefill requests, C4 shapes, rows of padding at the end."""
    rnd = random.Random(4)
    step = Step([2, 1, 5, 3], [130, 40, 5, 400], padded_rows=2)
    return {
        "decode_swa_indices": wide([[rnd.randint(0, 10**6) for _ in range(128)] for _ in range(3)], 128),
        "decode_compressed_indices": wide([[5, 3, 31, -1, -1], [0, -1, -1, -1, -1], [9, 8, 7, 6, 5]], 5),
        "decode_compressed_topk_lens": None if local else int32([3, 1, 5]),
        "prefill_topk_indices": wide([[t, 0, 99 - t, -1, 1, 50] for t in range(10)], 6),
        "query_start_loc": int32(step.query_start_loc),
        "seq_lens": int32(step.seq_lens),
        "token_to_req_indices": int32(step.requests),
        "swa_block_table": table_tensor(make_table(rnd, step.seq_lens, 64)),
        "swa_block_size": 64,
        "compressed_block_table": table_tensor(make_table(rnd, [s // 4 for s in step.seq_lens], 16)),
        "compressed_block_size": 16,
        "window_size": 128,
        "compress_ratio": 4,
        "topk": 6,
        "decode_compressed_indices_are_local": local,
        "decode_is_valid_token": torch.tensor([True, True, False]) if local else None,
    }


def test_decode_rows_agree_with_the_ops_that_build_them() -> None:
    """A step of decode rows alone: window table and top-k translation side by side."""
    rnd = random.Random(9)
    step = Step([2, 1, 1], [300, 7, 129])
    positions = torch.tensor(step.positions)
    requests, valid = int32(step.requests), torch.tensor([True, True, False, True])
    swa_table = table_tensor(make_table(rnd, step.seq_lens, 64))
    table = table_tensor(make_table(rnd, [s // 4 for s in step.seq_lens], 64))
    picks = wide([[rnd.randrange(s // 4) for _ in range(8)] for s in (300, 300, 7, 129)], 8)
    swa, swa_lens = compute_decode_swa_indices(positions, requests, valid, swa_table, 64)
    slots, lens = compute_global_topk_indices_and_lens(picks, requests, table, 64, valid)

    rest = (
        poisoned(0, 8),
        int32(step.query_start_loc),
        int32(step.seq_lens),
        requests,
        swa_table,
        64,
        table,
        64,
        128,
        4,
        8,
    )
    local = build_flashinfer_mixed_sparse_indices(swa, picks, None, *rest, True, valid)
    translated = build_flashinfer_mixed_sparse_indices(swa, slots, lens, *rest)
    for indices, counts in (local, translated):
        assert torch.equal(indices, torch.cat([swa[:, 0], slots], dim=1))
        assert torch.equal(counts, 128 + lens)
    assert swa_lens.tolist() == [128, 128, 0, 128]


def test_prefill_rows_of_one_step_equal_the_same_rows_in_chunks() -> None:
    """The same prompt in one piece and in three gives the same rows."""
    rnd = random.Random(2)
    total = 300
    swa_table = table_tensor(make_table(rnd, [total], 64))
    table = table_tensor(make_table(rnd, [total // 4], 64))
    picks = wide([rnd.sample(range(75), 8) for _ in range(total)], 8)

    def build(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        return build_flashinfer_mixed_sparse_indices(
            poisoned(0, 128), None, None, picks[first:last], int32([0, last - first]), int32([last]),
            int32([0] * (last - first)), swa_table, 64, table, 64, 128, 4, 8,
        )  # fmt: skip

    whole = build(0, total)
    parts = [build(a, b) for a, b in ((0, 1), (1, 130), (130, total))]
    assert torch.equal(whole[0], torch.cat([p[0] for p in parts]))
    assert torch.equal(whole[1], torch.cat([p[1] for p in parts]))


@pytest.mark.parametrize("ratio", [0, 1])
def test_window_only_layers_need_no_compressed_table(ratio: int) -> None:
    call = small_call()
    call.update(
        decode_compressed_indices=None,
        prefill_topk_indices=poisoned(10, 0),
        compressed_block_table=None,
        compressed_block_size=0,
        compress_ratio=ratio,
        topk=0,
    )
    indices, counts = build_flashinfer_mixed_sparse_indices(**call)
    assert indices.shape == (13, 128)
    assert torch.equal(indices, build_flashinfer_mixed_sparse_indices(**small_call())[0][:, :128])
    same(counts, [128] * 13)


def test_picks_count_only_below_the_visible_entries() -> None:
    """Position 4 sees one entry: whatever the later columns hold is not a pick, even where it names that entry."""
    call = small_call()
    call["prefill_topk_indices"] = wide([[0] * 6] * 10, 6)
    indices, counts = build_flashinfer_mixed_sparse_indices(**call)
    first = int(call["compressed_block_table"][2, 0]) * 16
    same(indices[6:8, 128:], [[first] + [-1] * 7] * 2)
    assert counts[6:8].tolist() == [129, 129]


def test_entries_a_row_does_not_see_yet_are_dropped() -> None:
    """Positions 397, 398 and 399 see 99, 99 and 100 entries; the page that holds entry 99 is live for all three."""
    call = small_call()
    call["prefill_topk_indices"] = wide([[98, 99, 100, 98, 0, -1]] * 10, 6)
    indices, counts = build_flashinfer_mixed_sparse_indices(**call)
    page, first = call["compressed_block_table"][3, [98 // 16, 0]].tolist()
    last = page * 16 + 2
    same(indices[8:10, 128:], [[last, -1, -1, last, first * 16, -1, -1, -1]] * 2)
    same(indices[10, 128:], [last, last + 1, -1, last, first * 16, -1, -1, -1])
    assert counts[8:11].tolist() == [134] * 3


def test_a_row_that_is_not_its_requests_is_empty() -> None:
    """Rows 3 .. 7 belong to request 2 and rows 8 .. 10 to request 3."""
    call = small_call()
    want, want_counts = build_flashinfer_mixed_sparse_indices(**call)
    call["token_to_req_indices"] = call["token_to_req_indices"].clone()
    call["token_to_req_indices"][[6, 9]] = int32([3, 2])
    indices, counts = build_flashinfer_mixed_sparse_indices(**call)
    want[[6, 9]], want_counts[[6, 9]] = -1, 128
    assert torch.equal(indices, want)
    assert torch.equal(counts, want_counts)


def test_slots_without_lengths_count_the_whole_row() -> None:
    call = small_call(local=False)
    _, counts = build_flashinfer_mixed_sparse_indices(**call)
    assert counts[:3].tolist() == [131, 129, 133]
    _, counts = build_flashinfer_mixed_sparse_indices(**{**call, "decode_compressed_topk_lens": None})
    assert counts[:3].tolist() == [133, 133, 133]


def test_pages_without_an_int32_slot_are_unmapped() -> None:
    call = small_call()
    swa_table = [[INT32_MAX // 64, 0, 0, 0, INT32_MAX // 64 + 1, INT32_MAX, INT32_MAX // 64]] * 4
    table = [[INT32_MAX // 16 + 1, INT32_MAX, 4, INT32_MAX // 16, 0, 9, 0]] * 4
    call.update(swa_block_table=table_tensor(swa_table), compressed_block_table=table_tensor(table))
    indices, counts = build_flashinfer_mixed_sparse_indices(**call)
    last = INT32_MAX // 64 * 64
    # Position 4 of the third request, whose only visible entry has no slot; then positions 397 .. 399 of the fourth.
    same(indices[7], [last + j for j in range(5)] + [-1] * 123 + [-1] * 8)
    same(indices[10, :128], [-1] * (384 - 272) + [last + j for j in range(16)])
    same(indices[10, 128:], [-1, -1, 9 * 16 + 12, -1, -1, INT32_MAX // 16 * 16 + 2, -1, -1])
    same(counts, [128 + n for n in (0, 0, 0, 0, 0, 0, 1, 1, 6, 6, 6, 0, 0)])


def test_no_rows() -> None:
    none = torch.empty(0, dtype=torch.int32)
    indices, counts = build_flashinfer_mixed_sparse_indices(
        poisoned(0, 128), poisoned(0, 5), None, poisoned(0, 8), int32([0]), none, none,
        poisoned(0, 0), 64, poisoned(0, 0), 64, 128, 4, 8,
    )  # fmt: skip
    assert indices.shape == (0, 136)
    assert counts.shape == (0,)


def test_writes_given_buffers_and_nothing_else() -> None:
    call = small_call()
    whole, whole_lens = poisoned(15, 140), poisoned(15)
    out = (whole[1:14, 1:137], whole_lens[1:14])
    got = build_flashinfer_mixed_sparse_indices(**call, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    fresh, fresh_lens = build_flashinfer_mixed_sparse_indices(**call)
    want, want_lens = poisoned(15, 140), poisoned(15)
    want[1:14, 1:137], want_lens[1:14] = fresh, fresh_lens
    assert torch.equal(whole, want)
    assert torch.equal(whole_lens, want_lens)


@pytest.mark.parametrize("local", [False, True])
def test_op(local: bool) -> None:
    outputs = (poisoned(13, 136), poisoned(13))
    check_op("build_flashinfer_mixed_sparse_indices", *small_call(local).values(), *outputs)


@pytest.mark.full
def test_compile() -> None:
    call = small_call()
    smaller = {**call, "prefill_topk_indices": call["prefill_topk_indices"][:4, :5], "topk": 7, "swa_block_size": 32}
    check_compiled(build_flashinfer_mixed_sparse_indices, call, smaller)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"decode_swa_indices": poisoned(3, 127)}, ValueError, "decode_swa_indices"),
        ({"decode_swa_indices": poisoned(3, 2, 128)}, ValueError, "decode_swa_indices"),
        ({"decode_swa_indices": torch.zeros(3, 128)}, TypeError, "decode_swa_indices"),
        ({"decode_compressed_indices": poisoned(2, 5)}, ValueError, "decode_compressed_indices"),
        ({"decode_compressed_topk_lens": int32([1, 2])}, ValueError, "decode_compressed_topk_lens"),
        ({"prefill_topk_indices": torch.zeros(10, 6, dtype=torch.int64)}, TypeError, "prefill_topk_indices"),
        ({"query_start_loc": int32([0, 1, 2, 3])}, ValueError, "query_start_loc"),
        ({"seq_lens": int32([0, 1, 2])}, ValueError, "query_start_loc"),
        ({"seq_lens": torch.zeros(4, dtype=torch.int64)}, TypeError, "seq_lens"),
        ({"token_to_req_indices": int32([0] * 12)}, ValueError, "token_to_req_indices"),
        ({"swa_block_table": int32([0])}, ValueError, "swa_block_table"),
        ({"swa_block_size": 0}, ValueError, "swa_block_size"),
        ({"compressed_block_table": torch.zeros(4, 4)}, TypeError, "compressed_block_table"),
        ({"compressed_block_table": None}, TypeError, "compressed_block_table"),
        ({"compressed_block_table": None, "topk": 0}, TypeError, "compressed_block_table"),
        ({"compressed_block_table": None, "decode_compressed_indices": None}, TypeError, "compressed_block_table"),
        ({"compressed_block_size": 0}, ValueError, "compressed_block_size"),
        ({"window_size": 0}, ValueError, "window_size"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio"),
        ({"topk": -1}, ValueError, "topk"),
        ({"decode_is_valid_token": torch.ones(2, dtype=torch.bool)}, ValueError, "decode_is_valid_token"),
        ({"out": (poisoned(13, 135), poisoned(13))}, ValueError, "out"),
        ({"out": (poisoned(12, 136), poisoned(13))}, ValueError, "out"),
        ({"out": (poisoned(13, 136), poisoned(14))}, ValueError, "out"),
        ({"out": [poisoned(13, 136)]}, TypeError, "out"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    with pytest.raises(error, match=rf"build_flashinfer_mixed_sparse_indices: {argument}: expected"):
        build_flashinfer_mixed_sparse_indices(**{**small_call(), **change})
