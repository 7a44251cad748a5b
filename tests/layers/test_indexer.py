"""The indexer's layer picks the same with scores and picks in one op and in two."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.runtime.record import record_calls
from layers import indexer
from tests.layers.engine import Engine, Request, hidden_rows, make_layer

ONE = {"score_top_k_prefill", "score_top_k_decode"}
TWO = {"mqa_logits", "top_k_per_row_prefill", "paged_mqa_logits", "top_k_per_row_decode"}
NEVER = 1 << 60


def run(index_cache: str) -> tuple[set[str], list[torch.Tensor]]:
    """Ops of prefill and decode steps, and all picks."""
    layer = make_layer(4, index_cache=index_cache)
    engine, requests = Engine(layer, seed=1), [Request(), Request()]
    assert layer.indexer is not None
    op, picks = layer.indexer.indexer_op, []

    def keep(module: Any, given: Any, result: torch.Tensor) -> None:
        picks.append(result.clone())

    op.register_forward_hook(keep)
    with record_calls() as recording:
        engine.step([], [(requests[0], hidden_rows(420, seed=2)), (requests[1], hidden_rows(70, seed=3))])
        for seed in (4, 5):
            engine.step([(request, hidden_rows(1, seed=seed + i)) for i, request in enumerate(requests)])
    assert layer.config.index_topk < 420 // 4
    return {call.op for call in recording.calls}, picks


@pytest.mark.parametrize("index_cache", ["fp8", "mxfp4"])
def test_both_ways_pick_the_same(index_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for least, used, unused in ((0, ONE, TWO), (NEVER, TWO, ONE)):
        monkeypatch.setattr(indexer, "FUSED_DECODE_COLUMNS", least)
        monkeypatch.setattr(indexer, "FUSED_PREFILL_BYTES", least)
        ops, found[least] = run(index_cache)
        assert used <= ops
        assert not unused & ops
    assert len(found[0]) == 3
    assert all(torch.equal(one, two) for one, two in zip(found[0], found[NEVER], strict=True))
