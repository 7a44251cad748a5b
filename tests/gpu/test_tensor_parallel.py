# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel over NCCL on two GPUs: eager and in a graph, with the indexer's rows divided, against one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from layers import Communicator, TensorParallel
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer, relative
from tests.layers.ranks import RankPool, exchange, ragged_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TOLERANCE = 0.1
"""Relative, of a whole layer on a GPU: last bits of products move FP8 codes and, with an indexer, a few picks."""

REPLAYS = 100


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    found = RankPool(2, "nccl")
    yield found
    found.close()


def _layer(
    communicator: Communicator, ratio: int, indexer: str, size: int, partial_dtype: torch.dtype = torch.bfloat16
) -> DeepseekV4MultiHeadLatentAttentionWrapper:
    parallel = TensorParallel(group=communicator, indexer=indexer, partial_dtype=partial_dtype)
    tp = parallel if size > 1 else TensorParallel()
    device = str(communicator.device)
    layer = make_layer(ratio, config=replace(CONFIG, o_groups=8), tp=tp, device=device)
    hidden = torch.zeros(4, layer.config.hidden_size, dtype=torch.bfloat16, device=device)
    layer(torch.zeros(4, dtype=torch.int64, device=device), hidden)
    return layer


def _steps(
    communicator: Communicator, ratio: int, indexer: str, size: int, partial_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    return ragged_steps(_layer(communicator, ratio, indexer, size, partial_dtype), 3)


def _replays(communicator: Communicator, ratio: int, indexer: str) -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many replays of a captured decode step gave the eager step's bits, its output and its picks."""
    layer = _layer(communicator, ratio, indexer, 2)
    engine, requests = Engine(layer, seed=3), [Request() for _ in range(3)]
    engine.step([], [(request, hidden_rows(200 + n, seed=n)) for n, request in enumerate(requests)])
    hidden = hidden_rows(3, seed=9).to(communicator.device)
    captured: dict[str, Any] = {}
    whole = layer.forward

    def keep(positions: torch.Tensor, rows: torch.Tensor, metadata: Any, caches: Any, **more: Any) -> torch.Tensor:
        captured.update(arguments=(positions, rows, metadata, caches))
        return whole(positions, rows, metadata, caches, **more)

    layer.forward = keep  # type: ignore[method-assign,assignment]
    eager = torch.cat(engine.step([(r, hidden[n : n + 1]) for n, r in enumerate(requests)], recycle=False))
    layer.forward = whole  # type: ignore[method-assign]
    picks = torch.empty(0)
    if layer.indexer is not None:
        picks = layer.indexer.indexer_op.topk_indices_buffer[:3].cpu()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(*captured["arguments"])
    same = 0
    for _ in range(REPLAYS):
        out.zero_()
        graph.replay()
        same += torch.equal(out, eager)
    torch.cuda.synchronize()
    return same, eager.cpu(), picks


def test_collectives_over_nccl(pool: RankPool) -> None:
    first, second = pool.run(2, exchange)
    gathered, raw, received, total = first
    assert torch.equal(gathered, second[0])
    assert gathered[1, 0].tolist() == [100, 101, 102]
    assert torch.equal(raw, second[1])
    assert received.tolist() == [[0, 1], [100, 101]]
    assert second[2].tolist() == [[2, 3], [102, 103]]
    assert total.tolist() == second[3].tolist() == [4.0] * 5


@pytest.mark.parametrize("ratio", KINDS)
def test_two_gpus_give_what_one_gives(pool: RankPool, ratio: int) -> None:
    alone = pool.run(2, _steps, ratio, "replicated", 1)[0]
    first, second = pool.run(2, _steps, ratio, "replicated", 2)
    for ours, theirs, whole in zip(first["outputs"], second["outputs"], alone["outputs"], strict=True):
        assert torch.equal(ours, theirs)
        assert relative(ours, whole) < TOLERANCE
    for ours, theirs in zip(first["caches"], second["caches"], strict=True):
        assert torch.equal(ours, theirs)
    if ratio == 4:
        divided, _ = pool.run(2, _steps, ratio, "rows", 2)
        for name in ("outputs", "picks", "caches"):
            assert all(torch.equal(a, b) for a, b in zip(divided[name], first[name], strict=True)), name


def test_fp32_partial_outputs(pool: RankPool) -> None:
    alone = pool.run(2, _steps, 1, "replicated", 1)[0]
    first, _ = pool.run(2, _steps, 1, "replicated", 2, torch.float32)
    for ours, whole in zip(first["outputs"], alone["outputs"], strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours, whole) < TOLERANCE


@pytest.mark.parametrize(("ratio", "indexer"), [(1, "replicated"), (128, "replicated"), (4, "replicated"), (4, "rows")])
def test_a_step_in_a_graph(pool: RankPool, ratio: int, indexer: str) -> None:
    for same, _, _ in pool.run(2, _replays, ratio, indexer):
        assert same == REPLAYS
