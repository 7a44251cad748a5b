# SPDX-License-Identifier: Apache-2.0
"""V4.1's layers: against formulas in float64; however a sequence is cut into steps; late layers; wrong arguments."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from layers import (
    V41Caches,
    V41StepBuilder,
    V41Tables,
    late_rows,
    random_v41_draft_context_tensors,
    random_v41_layer_tensors,
    v41_indexer,
)
from layers.v41_config import CONSUMER, KINDS
from tests import oracle
from tests.layers.v41_engine import CONFIG, Engine, Request, draft_model, hidden_rows, model, same
from tests.layers.v41_meaning import V41Meaning, V41Rounded

SHORT = replace(CONFIG, rope_original_max_position=64, compress_rope_theta=500.0, rope_theta=300.0)
"""A short original context puts positions of a test past it, and the ramp over frequencies that turn."""
CLOSE = 2e-4
"""Largest relative error against float64 formulas that round alike. Sums in another order rarely fall to the other side
of a rounding boundary."""


def sets(picks: torch.Tensor) -> list[list[int]]:
    return [sorted(x for x in row if x >= 0) for row in picks.tolist()]


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            found[name] = oracle.E4M3[tensor.view(torch.uint8).numpy()]
        elif tensor.dtype == torch.float8_e8m0fnu:
            found[name] = 2.0 ** (tensor.view(torch.uint8).numpy().astype(np.float64) - 127)
        else:
            found[name] = oracle.to_numpy(tensor)
    return found


@pytest.mark.parametrize(
    ("index_cache", "kv_cache"), [("fp8", "fp8_ds_mla"), ("mxfp4", "fp8_ds_mla"), ("mxfp4", "mxfp8_v41+nvfp4_v41")]
)
def test_layers_are_their_formulas(index_cache: str, kv_cache: str) -> None:
    layers, total = model(SHORT, index_cache, kv_cache), 117
    engine = Engine(layers, seed=1)
    hidden = hidden_rows(total, 2, SHORT)
    outs, selections = engine.step([], [(engine.request(), hidden)])
    weights = [plain(random_v41_layer_tensors(SHORT, layer)) for layer in range(len(layers))]
    given: list[Any] = [
        None if layer.indexer is None else (sets(s.picks), [] if s.candidates is None else sets(s.candidates))
        for layer, s in zip(layers, selections, strict=True)
    ]
    meaning = V41Meaning(SHORT, weights, V41Rounded(kv=kv_cache, index=index_cache))
    results = meaning.run([oracle.to_numpy(hidden)] * len(layers), given)
    for layer, (out,), result, picked in zip(layers, outs, results, given, strict=True):
        error = np.linalg.norm(oracle.to_numpy(out) - result.out) / np.linalg.norm(result.out)
        assert error <= CLOSE, layer.layer_index
        if picked is not None:
            wrong = sum(a != b for a, b in zip(picked[0], result.picks, strict=True))
            assert wrong <= 1, layer.layer_index
            cut = total - SHORT.index_topk * layer.compress_ratio
            assert sum(len(row) == SHORT.index_topk for row in picked[0]) >= cut
        if result.blocks:
            assert sum(a != b for a, b in zip(picked[1], result.blocks, strict=True)) <= 1
            assert len(picked[1][-1]) == SHORT.candidate_topk_blocks < total // 8, "blocks must be left out"


def one_shot(engine: Engine, hidden: torch.Tensor) -> tuple[Request, list[torch.Tensor], list[torch.Tensor]]:
    """(request, outputs by layer, picks by layer)."""
    request = engine.request()
    outs, selections = engine.step([], [(request, hidden)])
    return request, [out[0] for out in outs], [s.picks for s in selections if s is not None]


@pytest.mark.full
@pytest.mark.parametrize(("index_cache", "kv_cache"), [("fp8", "fp8_ds_mla"), ("mxfp4", "mxfp8_v41+nvfp4_v41")])
def test_steps_of_any_size_give_the_same_bits(index_cache: str, kv_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, decodes and single tokens, next to other requests, on other pages; longer chunks score the keys of
    candidates alone."""
    layers, total = model(index_cache=index_cache, kv_cache=kv_cache), 150
    hidden, others = hidden_rows(total, 3), hidden_rows(260, 4)
    reference = Engine(layers, seed=2)
    whole, expected, picks = one_shot(reference, hidden)
    assert all(torch.isfinite(out).all() for out in expected)
    monkeypatch.setattr(v41_indexer, "MOST_SHARED", 40)
    rng, engine = random.Random(3), Engine(layers, seed=3)
    request, other = engine.request(), engine.request()
    found: list[list[torch.Tensor]] = [[] for _ in layers]
    found_picks: list[list[torch.Tensor]] = [[] for _ in picks]

    def feed(outs: Any, selections: Any, number: int, rows: slice) -> None:
        for kept, out in zip(found, outs, strict=True):
            kept.append(out[number])
        chosen = [s.picks[rows] for s in selections if s is not None]
        for kept, part in zip(found_picks, chosen, strict=True):
            kept.append(part)

    while request.length < 120:
        count = min(rng.choice([1, 3, 31, 64]), 120 - request.length)
        tail = others[other.length : other.length + 10]
        rows = hidden[request.length : request.length + count]
        feed(*engine.step([], [(other, tail), (request, rows)]), 1, slice(10, 10 + count))
    while request.length < total:
        count = min(rng.choice([1, 1, 2, 5]), total - request.length)
        rows = hidden[request.length : request.length + count]
        feed(*engine.step([(request, rows), (other, others[-2:])]), 0, slice(0, count))
    assert same([torch.cat(kept) for kept in found], expected)
    assert same([torch.cat(kept).sort(1).values for kept in found_picks], [p.sort(1).values for p in picks])
    assert same(engine.stored(request), reference.stored(whole))


@pytest.mark.full
def test_token_by_token_gives_the_same_bits() -> None:
    layers, total = model(), 35
    hidden = hidden_rows(total, 5)
    reference, engine = Engine(layers, seed=4), Engine(layers, seed=5)
    whole, expected, _ = one_shot(reference, hidden)
    request = engine.request()
    found = [engine.step([], [(request, hidden[:1])])[0]]
    found += [engine.step([(request, row[None])])[0] for row in hidden[1:]]
    assert same([torch.cat([outs[layer][0] for outs in found]) for layer in range(len(layers))], expected)
    assert same(engine.stored(request), reference.stored(whole))


@pytest.mark.full
def test_rejected_drafts_leave_no_trace() -> None:
    """Steps of six rows, of which 1 to 5 are accepted, as well as all."""
    layers, total = model(), 100
    hidden = hidden_rows(total, 6)
    reference, engine = Engine(layers, seed=6), Engine(layers, seed=7)
    whole, expected, _ = one_shot(reference, hidden)
    request, found = engine.request(), []
    found.append([out[0] for out in engine.step([], [(request, hidden[:37])])[0]])
    accepts = [1, 2, 3, 4, 5, 6] * 9
    while request.length < total:
        start = request.length
        accepted = min(accepts.pop(), total - start)
        rows = torch.cat([hidden[start : start + accepted], hidden_rows(6 - accepted, 100 + start)])
        outs, _ = engine.step([(request, rows)])
        found.append([out[0][:accepted] for out in outs])
        request.length = start + accepted
    assert same([torch.cat(parts) for parts in zip(*found, strict=True)], expected)
    assert same(engine.stored(request), reference.stored(whole))


def test_a_prefix_fork_equals_a_sequential_run() -> None:
    layers = model()
    hidden, tail = hidden_rows(150, 8), hidden_rows(20, 9)
    branch = torch.cat([hidden[:128], tail])
    reference, engine = Engine(layers, seed=8), Engine(layers, seed=9)
    whole, expected, _ = one_shot(reference, branch)
    parent = engine.request()
    engine.step([], [(parent, hidden)])
    child = engine.fork(parent, 128)
    outs, _ = engine.step([], [(child, tail)])
    assert same([out[0] for out in outs], [out[128:] for out in expected])
    assert same(engine.stored(child), reference.stored(whole))


def test_late_layers_on_the_last_rows() -> None:
    """Rows whose window lies within the replayed ones have the bits of a run of all rows, and so have decodes behind
    them; those before see as much of their window as there is."""
    layers, total, window, late = model(), 110, CONFIG.sliding_window, 60
    hidden = hidden_rows(total + 20, 10)
    reference, engine = Engine(layers, seed=10), Engine(layers, seed=11, late=late)
    whole, request = reference.request(), engine.request()
    expected, _ = reference.step([], [(whole, hidden[:total])])
    outs, _ = engine.step([], [(request, hidden[:total])])
    assert request.replay_start == total - late
    first_late = CONFIG.kv_source_layer_ids[-1] + 1
    for layer, (got,), (want,) in zip(layers, outs, expected, strict=True):
        assert torch.isfinite(got).all()
        rows = total if layer.layer_index < first_late else late - window + 1
        assert torch.equal(got[-rows:], want[-rows:])
        if layer.layer_index >= first_late:
            assert len(got) == late
            assert not torch.equal(got[:-rows], want[-late:-rows]), "windows must be cut"
    for count in (1, 6, 3):
        rows = hidden[request.length : request.length + count]
        outs, _ = engine.step([(request, rows)])
        expected, _ = reference.step([(whole, rows)])
        assert all(torch.equal(a[0], b[0]) for a, b in zip(outs, expected, strict=True))


def test_late_decodes_do_not_read_before_the_replay() -> None:
    """A prompt of one replayed row: windows of decodes begin there, in whatever pages poison lies before."""
    layers, total = model(), 60
    hidden = hidden_rows(total + 6, 12)
    engine = Engine(layers, seed=12, late=1)
    request = engine.request()
    engine.step([], [(request, hidden[:total])])
    for row in hidden[total:]:
        outs, _ = engine.step([(request, row[None])])
        assert all(torch.isfinite(out[0]).all() for out in outs)
    assert request.replay_start == total - 1


def test_late_rows() -> None:
    late = late_rows([3, 5, 200, 128], [50, 5, 500, 300], 1, [7, 0, 90, 11])
    assert late.query_lens == [3, 5, 128, 128]
    assert late.replay_start == [7, 0, 372, 11]
    assert late.rows == [*range(8), *range(80, 208), *range(208, 336)]


def test_padded_requests_change_nothing() -> None:
    layers = model()
    hidden = hidden_rows(21, 13)
    plain_run, padded = Engine(layers, seed=13), Engine(layers, seed=13)
    left, right = plain_run.request(), padded.request()
    for engine, request in ((plain_run, left), (padded, right)):
        engine.step([], [(request, hidden[:20])])
    expected, _ = plain_run.step([(left, hidden[20:])])
    tables = padded._tables([right, Request(ring=-1)])
    step = padded.builder.build([1, 1], [21, 0], tables, 2, ring_rows=8)
    rows, selection = torch.cat([hidden[20:], hidden[:1]]), None
    right.length = 21
    for layer, (want,) in zip(layers, expected, strict=True):
        out, selection = layer(rows, step, padded.caches, selection)
        assert torch.equal(out[:1], want)
    assert same(padded.stored(right), plain_run.stored(left))


def test_every_kind_is_run() -> None:
    assert {layer.kind for layer in (*model(), *draft_model().layers)} == set(KINDS)
    assert any(layer.indexer is not None and layer.indexer.takes_candidates for layer in model())


# ---- the draft


@pytest.mark.parametrize("kv_cache", ["fp8_ds_mla", "mxfp8_v41+nvfp4_v41"])
@pytest.mark.parametrize("total", [20, 117])
def test_draft_layers_are_their_formulas(total: int, kv_cache: str) -> None:
    """Of a prefix shorter than the window, and of a longer one."""
    draft = draft_model(SHORT, kv_cache)
    engine = Engine(model(SHORT, "fp8", kv_cache), seed=20, draft=draft)
    request, block = engine.request(), hidden_rows(SHORT.draft_block_size, 21, SHORT)
    outs, _ = engine.step([], [(request, hidden_rows(total, 22, SHORT))])
    found = engine.draft_blocks([(request, block)])
    ids = SHORT.draft_layer_ids
    weights: list[Any] = [{}] * SHORT.num_hidden_layers + [plain(random_v41_layer_tensors(SHORT, i)) for i in ids]
    meaning = V41Meaning(SHORT, weights, V41Rounded(kv=kv_cache, index="fp8"))
    states = np.concatenate([oracle.to_numpy(outs[i][0]) for i in SHORT.draft_target_layer_ids], axis=1)
    context = meaning.draft_context(plain(random_v41_draft_context_tensors(SHORT)), states)
    for layer, (got,) in zip(ids, found, strict=True):
        want = meaning.draft(layer, context, oracle.to_numpy(block))
        assert np.linalg.norm(oracle.to_numpy(got) - want) <= CLOSE * np.linalg.norm(want)


@pytest.mark.full
def test_blocks_see_the_context_and_themselves_alone() -> None:
    """However the tokens before were cut into steps, whatever blocks were there before, next to other requests."""
    layers, draft, total = model(), draft_model(), 150
    hidden, others = hidden_rows(total, 23), hidden_rows(60, 24)
    block, other_block = (hidden_rows(CONFIG.draft_block_size, seed) for seed in (25, 26))
    reference, engine = Engine(layers, seed=25, draft=draft), Engine(layers, seed=26, draft=draft)
    whole, request, other = reference.request(), engine.request(), engine.request()
    reference.step([], [(whole, hidden)])
    expected = [out[0] for out in reference.draft_blocks([(whole, block)])]
    assert all(torch.isfinite(out).all() for out in expected)
    engine.step([], [(other, others), (request, hidden[:100])])
    accepts = [1, 5, 3, 6, 2] * 9
    while request.length < total:
        engine.draft_blocks([(request, other_block)])
        start = request.length
        accepted = min(accepts.pop(), total - start)
        rows = torch.cat([hidden[start : start + accepted], hidden_rows(6 - accepted, 100 + start)])
        engine.step([(request, rows)])
        request.length = start + accepted
    found = engine.draft_blocks([(other, other_block), (request, block)])
    assert same([out[1] for out in found], expected)
    first = [out[0] for out in reference.draft_blocks([(whole, torch.cat([block[:-1], other_block[-1:]]))])]
    assert all(not torch.equal(a[0], b[0]) for a, b in zip(first, expected, strict=True)), "the last row is seen"


def test_blocks_behind_late_layers() -> None:
    """Windows of a block begin where the late layers' rows do, in whatever pages poison lies before."""
    engine = Engine(model(), seed=27, late=20, draft=draft_model())
    request = engine.request()
    engine.step([], [(request, hidden_rows(100, 28))])
    found = engine.draft_blocks([(request, hidden_rows(CONFIG.draft_block_size, 29))])
    assert request.replay_start == 80
    assert all(torch.isfinite(out).all() for (out,) in found)


def test_drafts_that_do_not_fit() -> None:
    layers, draft, hidden = model(), draft_model(), hidden_rows(5, 14)
    caches = V41Caches.allocate(CONFIG, (0, *CONFIG.draft_layer_ids), window_blocks=2)
    builder, pages = V41StepBuilder(CONFIG, 64, 256), torch.zeros(1, 1, dtype=torch.int32)
    step, block = (builder.build([5], [5], V41Tables(pages), 1, is_draft=is_draft) for is_draft in (False, True))
    with pytest.raises(ValueError, match="step: expected is_draft = True of its builder, got False"):
        draft.layers[0](hidden, step, caches)
    with pytest.raises(ValueError, match="step: expected is_draft = False of its builder, got True"):
        layers[0](hidden, block, caches)
    with pytest.raises(ValueError, match="step: expected one of the model, got one of the draft"):
        draft.layers[0].store_context(hidden, block, caches)
    with pytest.raises(ValueError, match="layer: expected one of the draft, got layer 0, window"):
        layers[0].store_context(hidden, step, caches)
    with pytest.raises(ValueError, match="context: expected shape"):
        draft.layers[0].store_context(hidden[:4], step, caches)
    with pytest.raises(ValueError, match=r"query_lens: expected decodes of as many rows each, with is_draft, got"):
        builder.build([5], [5], V41Tables(pages), 0, is_draft=True)
    with pytest.raises(ValueError, match=r"hidden_states: expected shape"):
        draft.context(hidden)


def test_what_does_not_fit_is_refused() -> None:
    layers, hidden = model(), hidden_rows(4, 14)
    caches = V41Caches.allocate(CONFIG, window_blocks=2, entry_blocks=2, rings=1)
    builder = V41StepBuilder(CONFIG, 64, 256)
    pages, ring = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    step = builder.build([4], [4], V41Tables(pages, pages, ring), 0, ring_rows=8)
    _, selection = layers[1](hidden, step, caches)
    consumer = next(layer for layer in layers if layer.kind == CONSUMER and layer.compress_ratio == 1)
    candidates = next(layer for layer in layers if layer.indexer is not None and layer.indexer.takes_candidates)
    with pytest.raises(ValueError, match="selection: expected that of layer 3, got 1"):
        consumer(hidden, step, caches, selection)
    with pytest.raises(ValueError, match="selection: expected that of layer 3, got None"):
        candidates(hidden, step, caches, selection)
    with pytest.raises(ValueError, match="selection: expected 4 rows, those of the step, got 2"):
        layers[2](hidden, step, caches, selection.of_rows(torch.tensor([0, 1])))
    with pytest.raises(ValueError, match="step: expected rings of 8 rows, got None"):
        layers[1](hidden, builder.build([4], [4], V41Tables(pages, pages), 0), caches)
    with pytest.raises(ValueError, match="step: expected a table of entries, for compress ratio 2, got None"):
        layers[2](hidden, builder.build([4], [4], V41Tables(pages), 0), caches)
    with pytest.raises(ValueError, match=r"caches.windows: expected a window of layer 0, got"):
        layers[0](hidden, step, replace(caches, windows={1: caches.windows[1]}))
    with pytest.raises(ValueError, match=r"caches.keys: expected format indexer_mxfp4/1, got indexer_fp8/1"):
        model(index_cache="mxfp4")[1](hidden, step, caches)
    with pytest.raises(ValueError, match=r"caches.windows: expected format mxfp8_v41/1, got fp8_ds_mla/1"):
        model(kv_cache="mxfp8_v41")[1](hidden, step, caches)
    with pytest.raises(ValueError, match=r"caches.sources: expected entries of format nvfp4_v41/1, got fp8_ds_mla/1"):
        model(kv_cache="fp8_ds_mla+nvfp4_v41")[1](hidden, step, caches)
    with pytest.raises(ValueError, match="replay_start: expected 0 to 6, the first row of the step, got 7"):
        builder.build([4], [10], V41Tables(pages), 0, replay_start=[7])
    with pytest.raises(ValueError, match="ring_rows: expected rows of a ring"):
        builder.build([4], [4], V41Tables(pages, pages, ring), 0)
    with pytest.raises(ValueError, match="index_cache: expected one of"):
        V41Caches.allocate(CONFIG, window_blocks=1, index_cache="nvfp4")
    with pytest.raises(ValueError, match="kv_cache: expected one of"):
        V41Caches.allocate(CONFIG, window_blocks=1, kv_cache="nvfp4_v41")
