# SPDX-License-Identifier: Apache-2.0
"""What `perf layer --model v4.1-flash` measures and what it calls a floor; no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.layers import linear
from layers import V41_PRESETS, DeepseekV41Attention
from layers.v41_config import KINDS
from layers.v41_indexer import V41Indexer
from layers.v41_step import V41Selection
from perf import layer, layer_v41
from perf.cli import main
from perf.layer_v41 import MODEL, V41Case

SMALL = {"window": 0, "source2": 1, "consumer2": 2, "source1": 3, "consumer1": 4, "index": 5, "draft": 7}
"""By kind: a layer of the reduced model."""


def test_cases_are_every_kind_and_named_apart() -> None:
    config = V41_PRESETS[MODEL]
    every = [case.name for case in layer_v41.cases()]
    assert len(set(every)) == len(every)
    assert [case.kind for case in layer_v41.cases() if case.is_between] == [
        kind for kind in SMALL if kind != "consumer2"
    ]
    for kind in ("window", "source1", "index"):
        assert {f"{MODEL} {kind} prefill {rows} ctx{context}" for rows in (2048, 4096) for context in (0, 65536)} < set(
            every
        )
    shown = {kind for kind in SMALL if kind not in ("draft", "consumer2")}
    assert {f"{MODEL} {kind} decode b64 ctx8192" for kind in shown} < set(every)
    assert f"{MODEL} draft decode b128 ctx8192 n5" in every
    assert f"{MODEL} index decode b8 ctx1048576" in every
    assert f"{MODEL} consumer1 decode b1 ctx8192 own" in every
    assert {config.kind_of(index) for index in layer_v41.KINDS.values()} == set(KINDS)
    for kind, index in layer_v41.KINDS.items():
        ratio = config.compress_ratio_of(index)
        assert kind.endswith(str(ratio)) or kind in ("window", "index", "draft")
        assert config.takes_candidates(index) == (kind == "index")
    assert set(every) < {case.name for case in layer_v41.cases(full=True)}
    own, engines = (V41Case(MODEL, "consumer1", "decode", 1, 1, 8192, is_own=own) for own in (True, False))
    assert own.layer_key != engines.layer_key, "their caches are others"


def by_hand(kind: str) -> tuple[int, int]:
    """Bytes and FLOPs of a decode step of two requests of 65536 and 65475 tokens; of a draft five rows each. Products
    of scores take half as long as others."""
    numbers = 1792 * 5120 + 32768 * 1280 + 8 * 1024 * 4096 + 5120 * 8192
    numbers += {"source2": 2 * 512 * 5120 + 128 * 512, "source1": 512 * 5120 + 128 * 512}.get(kind, 0)
    numbers += 4096 * 1280 + 32 * 5120 if kind in ("source1", "source2", "index") else 0
    keys = {"source2": 32768 + 32737, "source1": 65536 + 65475, "index": 2 * 16384}.get(kind, 0)
    picked = 0 if kind in ("window", "draft") else 2 * 512
    tokens, rows = (10, 2 * 133) if kind == "draft" else (2, 2 * 128)
    moved = 2 * numbers + (rows + picked) * 584 + keys * 132 + 2 * 2 * tokens * 5120
    attended = (tokens // 2) * (rows + picked)
    return moved, 2 * tokens * numbers + 4 * attended * 64 * 512 + keys * 32 * 128


@pytest.mark.parametrize("kind", layer_v41.KINDS)
def test_the_floor_counts_what_must_move(kind: str) -> None:
    case = V41Case(MODEL, kind, "decode", 2, 5 if kind == "draft" else 1, 65536)
    with torch.device("meta"):
        built = DeepseekV41Attention(V41_PRESETS[MODEL], case.index, device="meta")
    work = layer_v41.least_work(built, case)
    assert (work.bytes, work.flops) == by_hand(kind)


@pytest.mark.parametrize("kind", ["window", "source2", "source1", "index"])
def test_the_floor_counts_what_each_row_of_a_prefill_sees(kind: str) -> None:
    """A chunk of 1000 rows at the begin of a prompt, and 4 rows of which the last one alone sees more than it picks."""
    config = V41_PRESETS[MODEL]
    for rows, context in ((1000, 0), (4, 1022), (4, 40000)):
        case = V41Case(MODEL, kind, "prefill", 1, rows, context)
        ratio = case.ratios[0]
        with torch.device("meta"):
            built = DeepseekV41Attention(config, case.index, device="meta")
        weights = layer_v41.least_work(built, V41Case(MODEL, kind, "prefill", 1, 1, 0))
        attended, keys = 0, []
        for tokens in range(context + 1, context + rows + 1):
            entries = tokens // ratio if ratio else 0
            attended += min(tokens, 128) + min(entries, 512)
            if entries > 512:
                keys.append(min(entries, 16384) if kind == "index" else entries)
        first = 1 + (1 if ratio == 1 else 0)
        work = layer_v41.least_work(built, case)
        flops = 4 * 64 * 512 * (attended - first) + (sum(keys) * 32 * 128 if built.indexer is not None else 0)
        products = (weights.flops - 4 * 64 * 512 * first) * (rows - 1)
        assert work.flops - weights.flops == flops + products
        length = context + rows
        visible = length // ratio if ratio else 0
        read = min(visible, sum(keys)) if built.indexer is not None else 0
        rows_read = min(length, 128 + rows - 1) + min(visible, rows * 512)
        assert work.bytes - weights.bytes == (rows_read - first) * 584 + read * 132 + 2 * 2 * (rows - 1) * 5120


def test_own_records_are_smaller() -> None:
    case = V41Case(MODEL, "source1", "decode", 2, 1, 65536, is_own=True)
    with torch.device("meta"):
        built = DeepseekV41Attention(V41_PRESETS[MODEL], case.index, device="meta")
    keys, picked = 65536 + 65475, 2 * 512
    more = 2 * 128 * (584 - 528) + picked * (584 - 288) + keys * (132 - 68)
    assert layer_v41.least_work(built, case).bytes == by_hand("source1")[0] - more


@pytest.mark.full
@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize("kind", SMALL)
def test_a_step_runs(kind: str, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables, caches and what layers before would hand on fit together, and a request alone gives the same."""
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    monkeypatch.setattr(layer_v41, "KINDS", SMALL)
    monkeypatch.setattr(layer_v41, "V41_PRESETS", {MODEL: V41_PRESETS[MODEL].reduced()})
    cases = [V41Case(MODEL, kind, "decode", 3, 5 if kind == "draft" else 1, 300, is_own=is_own)]
    if kind != "draft":
        cases += [
            V41Case(MODEL, kind, "prefill", 1, rows, context, is_own=is_own) for rows, context in ((12, 200), (90, 0))
        ]
    for case in cases:
        layers = case.build_layers(max(case.lengths()) + 64)
        step = case.make_step(layers)
        assert len(step.calls()) == len(step.layers) == layer.LAYERS
        assert step.is_right()
        assert len({caches.windows[case.index].data.data_ptr() for caches in step.caches}) == layer.LAYERS
        bytes_only = {"copy": 1e-3}
        assert layer.ops_floor_us(step, bytes_only) > layer.floor_us(step.work(), bytes_only, None) > 0
        assert case.cache_bytes() > 0


def reduced_step(monkeypatch: pytest.MonkeyPatch, kind: str, requests: int = 2) -> layer_v41.V41LayerStep:
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    monkeypatch.setattr(layer_v41, "KINDS", SMALL)
    monkeypatch.setattr(layer_v41, "V41_PRESETS", {MODEL: V41_PRESETS[MODEL].reduced()})
    case = V41Case(MODEL, kind, "decode", requests, 1, 300)
    return case.make_step(case.build_layers(max(case.lengths()) + 64))


def test_products_that_round_otherwise_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step of all requests, so that other entries are picked where scores nearly tie."""
    step = reduced_step(monkeypatch, "index", requests=8)
    right = linear.matmul

    def matmul(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        product = right(x, weight, torch.float32)
        if len(x) > 1:
            product *= 1 + 2.0**-13 * torch.randn(product.shape, generator=torch.Generator().manual_seed(0))
        return product.to(out_dtype)

    monkeypatch.setattr(linear, "matmul", matmul)
    found = [step.difference(request) for request in range(8)]
    assert all(one.is_small for one in found)
    assert any(one.moved for one in found)


def test_a_wrong_pick_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a step of many requests, where the layer alone picks the best."""
    step = reduced_step(monkeypatch, "source1")
    assert step.difference(0).is_small
    right = V41Indexer.forward

    def forward(self: V41Indexer, *given: Any) -> V41Selection:
        selection = right(self, *given)
        if len(selection.picks) > 1:
            row = selection.picks[0]
            row[0] = next(entry for entry in range(300) if entry not in row.tolist())
        return selection

    monkeypatch.setattr(V41Indexer, "forward", forward)
    found = step.difference(0)
    assert found.moved == 1
    assert found.shortfall > layer_v41.TIED
    assert not step.is_right()


def test_a_wrong_candidate_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = reduced_step(monkeypatch, "source1")
    right = V41Indexer.forward

    def forward(self: V41Indexer, *given: Any) -> V41Selection:
        selection = right(self, *given)
        assert selection.candidates is not None
        selection.candidates[:, -1] = next(i for i in range(37) if i not in selection.candidates.tolist()[0])
        return selection

    monkeypatch.setattr(V41Indexer, "forward", forward)
    found = step.difference(0)
    assert (found.moved, found.output) == (0, 0.0)
    assert found.shortfall > layer_v41.TIED


def test_another_tables_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that reads another one's entries in the step of both."""
    step = reduced_step(monkeypatch, "consumer1")
    assert step.is_right()
    assert step.selection is not None
    assert step.selection.slots is not None
    step.selection.slots.copy_(step.selection.slots.roll(1, dims=0))
    assert not step.is_right()


def test_drawn_picks() -> None:
    counts = torch.tensor([0, 3, 100, 7, 5])
    found = layer_v41.drawn(counts, 5, torch.Generator().manual_seed(0))
    assert found.dtype == torch.int32
    for row, count in zip(found.tolist(), counts.tolist(), strict=True):
        kept = [x for x in row if x >= 0]
        assert row == kept + [-1] * (5 - len(kept))
        assert kept == sorted(set(kept))
        assert len(kept) == min(count, 5)
        assert not count or kept[-1] == count - 1


def test_peers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layer", "--model", MODEL, "--peers"]) == 2
    assert "--peers: nobody's kernels" in capsys.readouterr().err
