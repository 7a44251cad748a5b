# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.indices.ops import combine_topk_swa_indices
from tests.helpers import check_op
from tests.indices.batches import (
    INT32_MAX,
    Step,
    Table,
    check_compiled,
    int32,
    poisoned,
    random_step,
    same,
    wide,
)

INT32_MIN = -(2**31)


def expected_combine(
    picks: Table, step: Step, gather_lens: list[int], window: int, ratio: int, topk: int, M: int, N: int
) -> tuple[Table, list[int]]:
    width = -(-(topk + window) // 128) * 128
    rows, lens = [], []
    for t, (request, position) in enumerate(zip(step.requests, step.positions, strict=True)):
        row: list[int] = []
        if position is not None and position >= 0:
            visible = (position + 1) // ratio if topk else 0
            chosen = picks[t][: min(visible, topk)]
            row += [M * request + x if 0 <= x < min(visible, N) else -1 for x in chosen]
            tail_start = step.seq_lens[request] - min(gather_lens[request], step.seq_lens[request])
            for seen in range(max(position - window + 1, 0), position + 1):
                i = seen - tail_start
                row.append(M * request + N + i if i >= 0 and N + i < M else -1)
        lens.append(len(row))
        rows.append([x if x <= INT32_MAX else -1 for x in row] + [-1] * (width - len(row)))
    return rows, lens


def call_with(picks: torch.Tensor, step: Step, gather_lens: list[int], **sizes: int) -> dict[str, Any]:
    return {
        "topk_indices": picks,
        "query_start_loc": int32(step.query_start_loc),
        "seq_lens": int32(step.seq_lens),
        "gather_lens": int32(gather_lens),
        **sizes,
    }


def full_gather(step: Step, window: int) -> list[int]:
    """What the layers gather: this step's rows and the window before them."""
    return [n + min(s - n, window - 1) for n, s in zip(step.query_lens, step.seq_lens, strict=True)]


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(0, 4),
    window=st.sampled_from([1, 5, 64, 128]),
    ratio=st.sampled_from([1, 4, 4, 128]),
    topk=st.sampled_from([0, 1, 8, 64, 70]),
    sane=st.booleans(),
)
def test_against_loops(seed: int, requests: int, window: int, ratio: int, topk: int, sane: bool) -> None:
    rnd = random.Random(seed)
    step = random_step(rnd, requests, 12, 300, padded_rows=rnd.randint(0, 2))
    step.first = rnd.choice([0, 17])
    gather_lens = full_gather(step, window)
    N = max(step.seq_lens, default=0) // ratio
    M = N + max(gather_lens, default=0)
    if not sane:  # lengths, contexts and workspaces that do not fit: nothing may point at another region
        gather_lens = [
            rnd.choice([-3, 0, g - 1, g + 5, s + 7]) for g, s in zip(gather_lens, step.seq_lens, strict=True)
        ]
        step.seq_lens = [rnd.choice([s, s, 0, 2]) for s in step.seq_lens]
        N = rnd.choice([N, N // 2, 0])
        M = N + rnd.choice([0, 3, M - N])
    picks = [
        [rnd.choice([rnd.randint(0, max(N, 1)), rnd.randint(0, 80), -1, INT32_MIN, INT32_MAX]) for _ in range(topk + 3)]
        for _ in range(step.num_rows)
    ]
    sizes = {"window_size": window, "compress_ratio": ratio, "topk": topk, "M": M, "N": N}
    indices, lens = combine_topk_swa_indices(**call_with(wide(picks, topk + 3), step, gather_lens, **sizes))
    want, want_lens = expected_combine(picks, step, gather_lens, window, ratio, topk, M, N)
    assert indices.shape == (step.num_rows, -(-(topk + window) // 128) * 128)
    same(indices, want)
    same(lens, want_lens, (step.num_rows,))


@pytest.mark.parametrize(("ratio", "topk"), [(4, 512), (128, 256), (1, 0)])
def test_indices_name_the_right_rows_of_the_workspace(ratio: int, topk: int) -> None:
    """Label every workspace row with what the gather ops put there; each token must see exactly what it may see."""
    rnd = random.Random(11)
    step = Step([3, 0, 40, 1], [3, 50, 700, 260])
    gather_lens = full_gather(step, 128)
    N = 0 if topk == 0 else max(step.seq_lens) // ratio
    M = N + max(gather_lens)
    labels: dict[int, tuple[str, int, int]] = {}
    for b, (seq_len, gathered) in enumerate(zip(step.seq_lens, gather_lens, strict=True)):
        for e in range(seq_len // ratio if topk else 0):
            labels[M * b + e] = ("entry", b, e)
        for i in range(gathered):
            assert M * b + N + i not in labels
            labels[M * b + N + i] = ("token", b, seq_len - gathered + i)
    picks = []
    for position in step.positions:
        visible = (position + 1) // ratio if topk else 0
        row = rnd.sample(range(visible), min(visible, topk))
        picks.append(row + [-1] * (topk - len(row)))

    indices, lens = combine_topk_swa_indices(
        **call_with(wide(picks, topk), step, gather_lens, window_size=128, compress_ratio=ratio, topk=topk, M=M, N=N)
    )
    for t, (request, position) in enumerate(zip(step.requests, step.positions, strict=True)):
        got = [labels[x] for x in indices[t, : lens[t]].tolist()]
        want = [("entry", request, e) for e in picks[t] if e >= 0]
        want += [("token", request, p) for p in range(max(0, position - 127), position + 1)]
        assert got == want
        assert indices[t, lens[t] :].unique().tolist() in ([], [-1])


def small_step() -> tuple[Step, torch.Tensor]:
    step = Step([2, 3, 0, 4, 1], [2, 200, 9, 40, 131])
    picks = wide([[(7 * t + 3 * j) % 9 for j in range(8)] for t in range(step.num_rows)], 8)
    return step, picks


SIZES = {"window_size": 128, "compress_ratio": 4, "topk": 8, "M": 300, "N": 60}


def small_call() -> dict[str, Any]:
    step, picks = small_step()
    return call_with(picks, step, full_gather(step, 128), **SIZES)


def test_a_chunk_is_a_step_of_its_own() -> None:
    """A slice of the batch's arrays gives what those requests give alone, whatever query_start_loc starts at."""
    step, picks = small_step()
    call = small_call()
    chunk = combine_topk_swa_indices(
        picks[2:9], call["query_start_loc"][1:5], call["seq_lens"][1:4], call["gather_lens"][1:4], *SIZES.values()
    )
    alone = Step(step.query_lens[1:4], step.seq_lens[1:4])
    again = combine_topk_swa_indices(**call_with(picks[2:9], alone, full_gather(alone, 128), **SIZES))
    want, want_lens = expected_combine(picks[2:9].tolist(), alone, full_gather(alone, 128), *SIZES.values())
    for indices, lens in (chunk, again):
        same(indices, want)
        same(lens, want_lens)


def test_minus_one_stays_and_keeps_its_column() -> None:
    step = Step([1, 1], [41, 41])
    indices, lens = combine_topk_swa_indices(
        **call_with(
            wide([[3, -1, 9, 10, -1, 0]] * 2, 6), step, [4, 4], window_size=4, compress_ratio=4, topk=6, M=20, N=12
        )
    )
    same(indices, [[b + 3, -1, b + 9, -1, -1, b, *range(b + 12, b + 16)] + [-1] * 118 for b in (0, 20)])
    same(lens, [10, 10])


def test_nothing_points_outside_its_region() -> None:
    """Picks without a row in the workspace, positions that were not gathered, a tail longer than its room."""
    step = Step([1, 1], [41, 41])
    indices, lens = combine_topk_swa_indices(
        **call_with(wide([[3, 4, 9]] * 2, 3), step, [2, 4], window_size=4, compress_ratio=4, topk=3, M=7, N=4)
    )
    same(indices, [[3, -1, -1, -1, -1, 4, 5] + [-1] * 121, [10, -1, -1, 11, 12, 13, -1] + [-1] * 121])
    same(lens, [7, 7])


def test_rows_beyond_int32_cannot_be_named() -> None:
    step = Step([0, 0, 1, 1], [0, 0, 8, 8])
    half = 2**30
    indices, lens = combine_topk_swa_indices(
        **call_with(
            wide([[1], [1]], 1), step, [0, 0, 8, 8], window_size=2, compress_ratio=4, topk=1, M=half - 1, N=half - 9
        )
    )
    b = 2 * (half - 1)
    assert b + half - 9 + 6 > INT32_MAX
    same(indices, [[b + 1] + [-1] * 127, [-1] * 128])
    same(lens, [3, 3])


@pytest.mark.parametrize("ratio", [0, 1, 4])
def test_without_picks_the_ratio_does_not_matter(ratio: int) -> None:
    step = Step([2], [3])
    picks = torch.empty(2, 0, dtype=torch.int32)
    indices, lens = combine_topk_swa_indices(
        **call_with(picks, step, [3], window_size=2, compress_ratio=ratio, topk=0, M=5, N=0)
    )
    same(indices, [[0, 1] + [-1] * 126, [1, 2] + [-1] * 126])
    same(lens, [2, 2])


def test_no_rows_and_no_requests() -> None:
    nothing = Step([], [])
    indices, lens = combine_topk_swa_indices(**call_with(poisoned(0, 8), nothing, [], **SIZES))
    assert indices.shape == (0, 256)
    assert lens.shape == (0,)
    indices, lens = combine_topk_swa_indices(**call_with(poisoned(2, 8), nothing, [], **SIZES))
    same(indices, [[-1] * 256] * 2)
    same(lens, [0, 0])


def test_writes_given_buffers_and_nothing_else() -> None:
    call = small_call()
    whole, whole_lens = poisoned(12, 260), poisoned(12)
    out = (whole[1:11, 2:258], whole_lens[1:11])
    got = combine_topk_swa_indices(**call, out=out)
    assert got[0] is out[0]
    assert got[1] is out[1]
    fresh, fresh_lens = combine_topk_swa_indices(**call)
    want, want_lens = poisoned(12, 260), poisoned(12)
    want[1:11, 2:258], want_lens[1:11] = fresh, fresh_lens
    assert torch.equal(whole, want)
    assert torch.equal(whole_lens, want_lens)


def test_op_and_compile() -> None:
    call = small_call()
    check_op("combine_topk_swa_indices", *call.values(), poisoned(10, 256), poisoned(10))
    chunk = {
        **call,
        "topk_indices": call["topk_indices"][2:9],
        "query_start_loc": call["query_start_loc"][1:5].clone(),
        "seq_lens": call["seq_lens"][1:4].clone(),
        "gather_lens": call["gather_lens"][1:4].clone(),
    }
    check_compiled(combine_topk_swa_indices, call, {**chunk, "topk": 7, "M": 310, "N": 50, "window_size": 64})


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"topk_indices": torch.zeros(10, 8, dtype=torch.int64)}, TypeError, "topk_indices"),
        ({"topk_indices": poisoned(10, 7)}, ValueError, "topk_indices"),
        ({"topk_indices": poisoned(8, 10).T}, ValueError, "topk_indices"),
        ({"query_start_loc": torch.zeros(6, dtype=torch.int64)}, TypeError, "query_start_loc"),
        ({"query_start_loc": int32([0] * 5)}, ValueError, "query_start_loc"),
        ({"query_start_loc": int32([0] * 12)[::2]}, ValueError, "query_start_loc"),
        ({"seq_lens": torch.zeros(5)}, TypeError, "seq_lens"),
        ({"gather_lens": int32([0] * 4)}, ValueError, "gather_lens"),
        ({"window_size": 0}, ValueError, "window_size"),
        ({"window_size": -999}, ValueError, "window_size"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio"),
        ({"compress_ratio": -1, "topk": 0}, ValueError, "compress_ratio"),
        ({"topk": -1}, ValueError, "topk"),
        ({"N": -1}, ValueError, "N"),
        ({"M": 59}, ValueError, "M"),
        ({"out": (poisoned(10, 136), poisoned(10))}, ValueError, "out"),
        ({"out": (poisoned(10, 256), poisoned(9))}, ValueError, "out"),
        ({"out": poisoned(10, 256)}, TypeError, "out"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    with pytest.raises(error, match=rf"combine_topk_swa_indices: {argument}: expected"):
        combine_topk_swa_indices(**{**small_call(), **change})
