# SPDX-License-Identifier: Apache-2.0
"""The shapes that scores and picks in one op are measured in; what is measured in them needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels.formats import INDEXER_FP8
from perf import logits, score_top_k
from perf.cli import MODULES
from perf.score_top_k import PickSet
from perf.targets import TARGETS_US


def test_shapes() -> None:
    named = {
        score_top_k.PREFILL: [score_top_k.prefill_name(*shape) for shape in score_top_k.PREFILLS],
        score_top_k.DECODE: [
            score_top_k.decode_name(*shape, mxfp4)
            for mxfp4, shapes in ((False, score_top_k.DECODES), (True, score_top_k.MXFP4_DECODES))
            for shape in shapes
        ],
    }
    assert named[score_top_k.PREFILL][0] == "sq4096 sk4096 k=512"
    assert "b64 ctx32768 k=512" in named[score_top_k.DECODE]
    assert "b64 ctx8192 next_n=2 k=512" in named[score_top_k.DECODE]
    assert "b64 ctx32768 mxfp4 k=512" in named[score_top_k.DECODE]
    for op, names in named.items():
        assert len(set(names)) == len(names)
        assert MODULES[op] == "perf.score_top_k"
        assert op in score_top_k.PEERS
        assert {case for _, measured, case in TARGETS_US if measured == op} <= set(names)
    rows = {shape[0] for shape in score_top_k.PREFILLS}, {shape[0] for shape in score_top_k.DECODES}
    for op, known in zip(named, rows, strict=True):
        assert set(score_top_k.QUICK[op]) <= known


def sets() -> list[PickSet]:
    """A call of each op, as the benchmark makes them, of few rows."""
    g, k = torch.Generator().manual_seed(0), 8
    q, keys = (torch.randn(*shape, 128, generator=g).to(torch.float8_e4m3fn) for shape in ((3, 64), (40,)))
    weights, scale = torch.randn(3, 64, generator=g), torch.rand(40, generator=g) + 0.5
    start, end = torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor([40, 33, 9], dtype=torch.int32)
    scores = torch.empty(3, 64)[:, :40]
    prefill = q, None, keys, scale, weights, start, end, False, 0, scores
    pool = torch.zeros(2, 64, 132, dtype=torch.uint8)
    pool.view(2, -1)[:, : 64 * 128] = torch.randn(2, 64 * 128, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
    pool.view(2, -1)[:, 64 * 128 :] = torch.rand(2, 64, generator=g).view(torch.uint8)
    lens, table = torch.tensor([[40], [64], [1]], dtype=torch.int32), torch.tensor([[1], [0], [1]], dtype=torch.int32)
    decode = q[:, None], None, pool, weights, lens, table, 64, False, INDEXER_FP8.id, torch.empty(3, 64), False
    return [
        PickSet.of(logits.LogitsSet(op, args, lambda got: True), k)
        for op, args in ((logits.CONTIGUOUS, prefill), (logits.PAGED, decode))
    ]


def test_memory_is_that_of_the_public_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which say with their results that they were called as they ought to be."""
    found: list[Any] = []
    monkeypatch.setattr(score_top_k, "peak", lambda run: found.append(run()) or len(found))
    for s in sets():
        s.ours()
        assert s.peaks() == {"peak": 1, "peak_unfused": 2}
        fused, (scores, picks) = found
        assert torch.equal(fused, s.picks)
        assert (scores.dtype, scores.shape[0], picks.shape) == (torch.float32, 3, s.picks.shape)
        found.clear()


def test_queries_of_mxfp4_come_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    for name in ("score_top_k_decode", "paged_mqa_logits"):
        monkeypatch.setattr(score_top_k, name, lambda q, *args, **more: given.append(q))
    monkeypatch.setattr(score_top_k, "peak", lambda run: run())
    (_, s) = sets()
    s.peaks()
    scale = torch.zeros(1)
    replace(s, args=(s.args[0], scale, *s.args[2:])).peaks()
    assert all(q is s.args[0] for q in given[:2])
    assert all(q is s.args[0] and by is scale for q, by in given[2:])
    assert len(given) == 4


def test_one_op_picks_what_two_do() -> None:
    for s in sets():
        s.unfused()
        want = s.picks.clone()
        assert (want >= 0).any()
        assert s.right(s.ours)
        assert torch.equal(s.picks, want)

        def spoiled(s: PickSet = s) -> None:
            s.ours()
            s.picks[0, 0] += 1

        assert not s.right(spoiled)


@pytest.mark.parametrize(("fitting", "count"), [(1, 1), (3, 3), (99, logits.MOST_SETS)])
@pytest.mark.parametrize("peers", [False, True])
def test_what_is_measured_of_a_call(fitting: int, count: int, peers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many sets of inputs as leave the cache cold, but not too many of the smallest; the pair of ops beside one."""
    kept: list[Any] = []
    for module in (score_top_k, logits):
        monkeypatch.setattr(module, "number_of_sets", lambda size: fitting)
        monkeypatch.setattr(module, "compare", lambda *args, **more: kept.append((args, more)))
    monkeypatch.setattr(score_top_k, "load_peer", lambda name, load: name)
    monkeypatch.setattr(PickSet, "peaks", lambda self: {"peak": 3})
    for s in sets():
        seeds: list[int] = []

        def make(seed: int, s: PickSet = s, seeds: list[int] = seeds) -> PickSet:
            seeds.append(seed)
            return s

        score_top_k._records(s.op, {"case": "c"}, make, peers, 7)
        (op, facts, made, _, candidates, replays), more = kept.pop()
        assert (op, facts, replays, more) == (s.op, {"case": "c", "peak": 3}, 7, {"products": "e4m3"})
        assert seeds == list(range(count))
        assert len(made) == count
        assert set(candidates) == {score_top_k.UNFUSED, *(score_top_k.PEERS[s.op] if peers else ())}
        seeds.clear()
        logits._records(
            s.scored.op, {"case": "c"}, lambda seed, s=s, seeds=seeds: seeds.append(seed) or s.scored, {}, 7
        )
        (op, facts, made, *_), _ = kept.pop()
        assert (op, facts, len(made)) == (s.scored.op, {"case": "c"}, count)
        assert seeds == list(range(count))


def test_scores_of_mxfp4_have_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: DeepGEMM's are for Blackwell."""
    kept: list[Any] = []
    monkeypatch.setattr(score_top_k, "compare", lambda *args, **more: kept.append(args[4]))
    monkeypatch.setattr(score_top_k, "number_of_sets", lambda size: 1)
    monkeypatch.setattr(PickSet, "peaks", lambda self: {})
    (s, _) = sets()
    with_scale = replace(s, args=(s.args[0], torch.zeros(1), *s.args[2:]))
    monkeypatch.setattr(score_top_k, "OPS", {s.op: SimpleNamespace(cost=lambda *args: SimpleNamespace(bytes=1))})
    score_top_k._records(s.op, {}, lambda seed: with_scale, True, 7)
    assert set(kept.pop()) == {score_top_k.UNFUSED}
