# SPDX-License-Identifier: Apache-2.0
"""The indexer's layer picks the same whatever scores have room for, and allocates no more."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from layers import indexer
from tests.layers.engine import Engine, Request, hidden_rows, make_layer


def run(index_cache: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[torch.Tensor]]:
    """Sizes of the workspaces and picks of a prefill and a decode step."""
    layer = make_layer(4, index_cache=index_cache)
    engine, requests = Engine(layer, seed=1), [Request(), Request()]
    assert layer.indexer is not None
    op, sizes, picks = layer.indexer.indexer_op, [], []

    def keep(module: Any, given: Any, result: torch.Tensor) -> None:
        picks.append(result.clone())

    op.register_forward_hook(keep)
    make = op._workspace

    def workspace(*args: Any) -> torch.Tensor | None:
        found = make(*args)
        sizes.append(0 if found is None else found.nbytes)
        return found

    monkeypatch.setattr(op, "_workspace", workspace)
    engine.step([], [(requests[0], hidden_rows(420, seed=2)), (requests[1], hidden_rows(70, seed=3))])
    engine.step([(request, hidden_rows(1, seed=4 + i)) for i, request in enumerate(requests)])
    assert layer.config.index_topk < 420 // 4
    return sizes, picks


@pytest.mark.parametrize("index_cache", ["fp8", "mxfp4"])
def test_picks_do_not_depend_on_the_workspace(index_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, picks = run(index_cache, monkeypatch)
    # rows of up to 105 entries
    assert sizes == [490 * 1024, 2 * 1024]
    monkeypatch.setattr(indexer, "SCORE_BYTES", 100_000)
    small, same = run(index_cache, monkeypatch)
    assert small == [97 * 1024, 2 * 1024]
    assert all(torch.equal(one, two) for one, two in zip(picks, same, strict=True))


@pytest.mark.parametrize(
    ("most", "chunks"),
    [(1 << 20, [3]), (185, [2, 1]), (150, [1, 2]), (130, [1, 2]), (100, [1, 1, 1]), (1, [1, 1, 1])],
)
def test_prefill_requests_are_scored_in_chunks_of_entries(
    most: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of 105, 80 and 50 entries: as many at a time as `max_total_entries` allows, one at least."""

    def picks(most: int) -> tuple[list[int], torch.Tensor]:
        layer = make_layer(4, max_num_tokens=1024, max_model_len=512)
        assert layer.indexer is not None
        op = layer.indexer.indexer_op
        assert op.max_total_entries == 1 << 20
        op.max_total_entries = most
        found: list[torch.Tensor] = []
        op.register_forward_hook(lambda module, given, result: found.append(result.clone()))
        sizes: list[int] = []
        prefill = op._prefill_chunk

        def counted(*args: Any) -> None:
            sizes.append(args[-2] - args[-3])
            prefill(*args)

        monkeypatch.setattr(op, "_prefill_chunk", counted)
        rows = [420, 320, 200]
        Engine(layer, seed=1).step([], [(Request(), hidden_rows(n, seed=n)) for n in rows])
        return sizes, found[0]

    sizes, found = picks(most)
    assert sizes == chunks
    assert torch.equal(found, picks(1 << 20)[1])
