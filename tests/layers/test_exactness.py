# SPDX-License-Identifier: Apache-2.0
"""However a sequence is cut into steps, batched, paged, drafted or forked, a layer computes the same bits."""

from __future__ import annotations

import random

import pytest
import torch

from layers import BlockTables
from tests.layers.engine import KINDS, Engine, Request, hidden_rows, make_layer, relative, same_bytes

CACHES = [("fp8_ds_mla", "fp8"), ("fp8_ds_mla", "mxfp4"), ("bf16", "fp8"), ("fp8", "fp8")]
TOLERANCE = 1e-6


def families(ratio: int) -> list[tuple[str, str]]:
    return CACHES if ratio == 4 else [c for c in CACHES if c[1] == "fp8"]


CASES = [(ratio, kv, index) for ratio in KINDS for kv, index in families(ratio)]
NEED_THOROUGH = (1, "fp8"), (128, "bf16")
"""Kinds and formats that test_meaning.py has, and this file with other formats and kinds."""


def skip_unless(thorough: bool, is_in_sample: bool) -> None:
    if not thorough and not is_in_sample:
        pytest.skip("needs --thorough")


def one_shot(engine: Engine, hidden: torch.Tensor) -> tuple[Request, torch.Tensor, dict[str, torch.Tensor]]:
    request, capture = Request(), {}
    (out,) = engine.step([], [(request, hidden)], capture=capture)
    return request, out, capture


@pytest.mark.parametrize(("ratio", "kv", "index"), CASES)
def test_chunked_prefill_and_decode_equal_one_shot(ratio: int, kv: str, index: str, thorough: bool) -> None:
    skip_unless(thorough, (ratio, kv) not in NEED_THOROUGH)
    layer = make_layer(ratio, kv_cache=kv, index_cache=index)
    total = 396
    hidden = hidden_rows(total, seed=1)
    reference = Engine(layer, seed=1)
    whole, expected, captured = one_shot(reference, hidden)
    assert torch.isfinite(expected).all()
    rng = random.Random(2)
    engine = Engine(layer, seed=2)
    request, outs, picks = Request(), [], []
    while request.length < 380:
        count = min(rng.choice([1, 2, 3, 5, 31, 64, 127, 130]), 380 - request.length)
        capture: dict[str, torch.Tensor] = {}
        outs += engine.step([], [(request, hidden[request.length : request.length + count])], capture=capture)
        picks.append(capture.get("topk", torch.empty(0)))
    while request.length < total:
        capture = {}
        outs += engine.step([(request, hidden[request.length : request.length + 1])], capture=capture)
        picks.append(capture.get("topk", torch.empty(0)))
    assert same_bytes(engine.entries(request), reference.entries(whole))
    assert same_bytes(engine.window(request), reference.window(whole))
    assert relative(torch.cat(outs), expected) <= TOLERANCE
    if ratio == 4:
        assert int((captured["topk"][-1] >= 0).sum()) < total // 4, "selection must be exercised"
        assert torch.equal(torch.cat(picks).sort(dim=1).values, captured["topk"].sort(dim=1).values)


@pytest.mark.parametrize(("ratio", "kv", "index"), CASES)
def test_batch_equals_single_requests_whatever_the_pages(ratio: int, kv: str, index: str, thorough: bool) -> None:
    skip_unless(thorough, (ratio, kv) not in NEED_THOROUGH)
    layer = make_layer(ratio, kv_cache=kv, index_cache=index)
    lengths = [5, 300, 1, 131, 64]
    prompts = [hidden_rows(n + 3, seed=10 + n) for n in lengths]
    batch = Engine(layer, seed=3)
    requests = [Request() for _ in lengths]
    outs = batch.step([], [(r, p[:n]) for r, p, n in zip(requests, prompts, lengths, strict=True)])
    tails = [
        batch.step([(r, p[n + i : n + i + 1]) for r, p, n in zip(requests, prompts, lengths, strict=True)])
        for i in range(3)
    ]
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        alone = Engine(layer, seed=50 + number)
        request = Request()
        (expected,) = alone.step([], [(request, prompt[:length])])
        assert relative(outs[number], expected) <= TOLERANCE
        for i in range(3):
            (expected,) = alone.step([(request, prompt[length + i : length + i + 1])])
            assert relative(tails[i][number], expected) <= TOLERANCE
        assert same_bytes(batch.entries(requests[number]), alone.entries(request))
        assert same_bytes(batch.window(requests[number]), alone.window(request))


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("kv", ["fp8_ds_mla", "bf16"])
def test_mixed_steps_of_decodes_and_prefills(ratio: int, kv: str, thorough: bool) -> None:
    """Old requests decode, with unequal numbers of tokens, in the same steps in which new ones prefill."""
    skip_unless(thorough, kv == "fp8_ds_mla" or ratio == 4)
    layer = make_layer(ratio, kv_cache=kv)
    prompts = [hidden_rows(n, seed=20 + n) for n in (290, 40, 333)]
    references = [one_shot(Engine(layer, seed=4), p)[1] for p in prompts]
    engine = Engine(layer, seed=5)
    first, second, third = Request(), Request(), Request()
    outs: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}

    def run(decodes: list[tuple[int, Request, int]], prefills: list[tuple[int, Request, int]]) -> None:
        def feed(items: list[tuple[int, Request, int]]) -> list[tuple[Request, torch.Tensor]]:
            return [(r, prompts[n][r.length : r.length + c]) for n, r, c in items]

        results = engine.step(feed(decodes), feed(prefills))
        for (number, _, _), out in zip(decodes + prefills, results, strict=True):
            outs[number].append(out)

    run([], [(0, first, 200), (1, second, 30)])
    run([(0, first, 1), (1, second, 3)], [(2, third, 150)])
    run([(1, second, 2), (0, first, 4)], [(2, third, 100)])
    run([(0, first, 2), (1, second, 2)], [(2, third, 83)])
    while first.length < 290:
        run([(0, first, min(7, 290 - first.length))], [])
    run([(1, second, 3)], [])
    for number, expected in enumerate(references):
        got = torch.cat(outs[number])
        assert relative(got, expected[: len(got)]) <= TOLERANCE


@pytest.mark.parametrize(("ratio", "kv", "index"), CASES)
@pytest.mark.parametrize("persist", ["window", "all"])
def test_rejected_drafts_equal_a_sequential_run(ratio: int, kv: str, index: str, persist: str, thorough: bool) -> None:
    """Of what persists, which knows nothing of formats, each way with one of them."""
    skip_unless(thorough, (kv, index) == CACHES[0] or (persist == "window" and (ratio, kv) not in NEED_THOROUGH))
    layer = make_layer(ratio, kv_cache=kv, index_cache=index, persist=persist)
    total = 200
    hidden = hidden_rows(total + 8, seed=30)
    reference = Engine(layer, seed=6)
    whole, expected, _ = one_shot(reference, hidden[:total])
    rng = random.Random(7)
    engine = Engine(layer, seed=7)
    request, outs = Request(), []
    outs += engine.step([], [(request, hidden[:117])])
    while request.length < total:
        start = request.length
        accepted = min(rng.randint(1, 8), total - start)
        wrong = hidden_rows(8 - accepted, seed=1000 + start)
        (out,) = engine.step([(request, torch.cat([hidden[start : start + accepted], wrong]))])
        outs.append(out[:accepted])
        engine.rewind(request, start + accepted)
    assert relative(torch.cat(outs), expected) <= TOLERANCE
    assert same_bytes(engine.entries(request), reference.entries(whole))
    assert same_bytes(engine.window(request), reference.window(whole))


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("persist", ["window", "all"])
def test_prefix_fork_equals_a_sequential_run(ratio: int, persist: str) -> None:
    layer = make_layer(ratio, persist=persist, keep_every=256)
    shared, tail = hidden_rows(600, seed=40), hidden_rows(138, seed=41)
    branch = torch.cat([shared[:512], tail])
    reference = Engine(layer, seed=8)
    whole, expected, _ = one_shot(reference, branch)
    engine = Engine(layer, seed=9)
    parent = Request()
    for start, stop in ((0, 300), (300, 512), (512, 600)):
        engine.step([], [(parent, shared[start:stop])], recycle=stop <= 300)
    child = engine.fork(parent, 512)
    outs = engine.step([], [(child, tail[:118])])
    while child.length < len(branch):  # past 640, where an entry of 128 tokens ends
        outs += engine.step([(child, branch[child.length : child.length + 2])])
    assert relative(torch.cat(outs), expected[512:]) <= TOLERANCE
    assert same_bytes(engine.entries(child), reference.entries(whole))


@pytest.mark.parametrize("ratio", KINDS)
def test_paged_prefill_equals_gathered(ratio: int) -> None:
    hidden = hidden_rows(300, seed=42)
    outs = []
    for form in ("gathered", "paged"):
        engine = Engine(make_layer(ratio, prefill=form), seed=10)
        request = Request()
        outs.append(torch.cat([engine.step([], [(request, part)])[0] for part in hidden.split(110)]))
    assert relative(outs[0], outs[1]) <= TOLERANCE


@pytest.mark.parametrize("ratio", KINDS)
def test_padded_requests_and_rows_change_nothing(ratio: int) -> None:
    """CUDA-graph padding: requests of length 0 and hidden rows past the step."""
    layer = make_layer(ratio)
    hidden = hidden_rows(141, seed=43)
    plain, padded = Engine(layer, seed=11), Engine(layer, seed=11)
    left, right = Request(), Request()
    plain.step([], [(left, hidden[:140])])
    padded.step([], [(right, hidden[:140])])
    (expected,) = plain.step([(left, hidden[140:])])
    padded._grow(right, 141)
    tables = [padded._table(group, [right, Request()]) for group in ("swa", "compressed", "state")]
    assert tables[0] is not None
    metadata = padded.builder.build(ratio, [1, 1], [141, 0], BlockTables(tables[0], tables[1], tables[2]), 2)
    rows = torch.cat([hidden[140:], torch.full((3, hidden.shape[1]), float("nan"), dtype=torch.bfloat16)])
    out = layer(metadata.positions, rows, metadata, padded.caches)
    right.length = 141
    assert torch.equal(out[0], expected[0])
    assert torch.equal(out[2:], torch.zeros_like(out[2:]))
    assert same_bytes(padded.entries(right), plain.entries(left))
    assert same_bytes(padded.window(right), plain.window(left))


def test_profiling_run_returns_zeros() -> None:
    layer = make_layer(4)
    hidden = hidden_rows(9, seed=44)
    assert torch.equal(layer(torch.arange(9), hidden), torch.zeros_like(hidden))
