# SPDX-License-Identifier: Apache-2.0
"""Context groups on GPUs, as threads on one GPU and over NCCL on two: against one GPU, eager and in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from layers import Communicator
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from layers.context_step import ContextStep
from tests.layers.context_engine import ContextEngine, context_steps, layer_of, together
from tests.layers.engine import KINDS, NO_PAGE, Request, hidden_rows, relative
from tests.layers.ranks import RankPool, run_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOLERANCE = 0.1
"""Relative, of a whole layer on a GPU: last bits of products move FP8 codes and, with an indexer, a few picks."""

REPLAYS, MOST_PAGES = 100, 600
SHARED: dict[str, Any] = {"cp_kv": "sharded", "cp_prefill": "zigzag"}
FORMS: list[dict[str, Any]] = [
    SHARED,
    {"cp_prefill": "zigzag"},
    {"cp_kv": "sharded", "cp_heads": "own"},
    {"cp_kv": "sharded", "cp_heads": "own", "cp_q": "replicate"},
    SHARED | {"cp_wire": "bf16"},
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    found = RankPool(2, "nccl")
    yield found
    found.close()


def assert_as_one(results: list[Any], whole: dict[str, Any], options: dict[str, Any]) -> None:
    for held in results:
        if isinstance(held, BaseException):
            raise held
    first, second = results
    for name in ("outputs", "picks"):
        assert all(torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True)), name
    for ours, theirs in zip(first["outputs"], whole["outputs"], strict=True):
        assert relative(ours, theirs) < TOLERANCE
    found = together(results, options)
    assert [x.shape for x in found] == [x.shape for x in whole["entries"]]
    same = sum(int((a == b).sum()) for a, b in zip(found, whole["entries"], strict=True))
    # products of other numbers of rows may round otherwise: most bytes are the same
    assert same >= 0.9 * sum(x.numel() for x in found)


@pytest.mark.parametrize("options", FORMS[:4])
@pytest.mark.parametrize("ratio", KINDS)
def test_threads_on_one_gpu(ratio: int, options: dict[str, Any]) -> None:
    on_gpu = {**options, "device": "cuda"}
    assert_as_one(run_threads(2, context_steps, ratio, on_gpu), context_steps(None, ratio, on_gpu), options)


class KeptTables(ContextEngine):
    """Its block tables stay where they are, as a server's do."""

    def __init__(self, layer: DeepseekV4MultiHeadLatentAttentionWrapper) -> None:
        super().__init__(layer, seed=3)
        self.tables: dict[str, torch.Tensor] = {}

    def _table(self, group: str, requests: list[Request]) -> torch.Tensor | None:
        table = super()._table(group, requests)
        if table is None:
            return None
        if group not in self.tables:
            self.tables[group] = table.new_empty(len(requests), MOST_PAGES)
        kept = self.tables[group].fill_(NO_PAGE)
        kept[:, : table.shape[1]] = table
        return kept


def _decodes(communicator: Communicator, ratio: int, options: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Outputs of decode steps, and how many steps are bound."""
    layer = layer_of(communicator, ratio, {**options, "device": "cuda"})
    engine, requests = KeptTables(layer), [Request() for _ in range(3)]
    engine.step([], [(request, hidden_rows(600 + n, seed=n)) for n, request in enumerate(requests)])
    outputs = []
    for step in range(6):
        work = [(request, hidden_rows(1, seed=9 * step + n)) for n, request in enumerate(requests)]
        outputs.append(torch.cat(engine.step(work)).cpu())
        if layer.options.bind_steps:
            # what comes again is a list of calls
            layer._attend_context = None  # type: ignore[method-assign,assignment]
    assert not layer._bound.foreign
    return outputs, len(layer._bound)


@pytest.mark.parametrize("options", [*FORMS, {"cp_kv": "sharded", "cp_shards": 4}])
@pytest.mark.parametrize("ratio", KINDS)
def test_decode_steps_are_bound(ratio: int, options: dict[str, Any]) -> None:
    """The same bits on each rank as through ops."""
    forms = [run_threads(2, _decodes, ratio, options | {"bind_steps": binds}) for binds in (True, False)]
    for bound, free in zip(*forms, strict=True):
        for held in (bound, free):
            if isinstance(held, BaseException):
                raise held
        assert (bound[1], free[1]) == (1, 0)
        assert all(map(torch.equal, bound[0], free[0]))


def _steps(communicator: Communicator, ratio: int, options: dict[str, Any], alone: bool) -> dict[str, Any]:
    return context_steps(None if alone else communicator, ratio, {**options, "device": str(communicator.device)})


@pytest.mark.parametrize("ratio", KINDS)
def test_two_gpus_give_what_one_gives(pool: RankPool, ratio: int) -> None:
    whole = pool.run(2, _steps, ratio, {}, True)[0]
    for options in FORMS:
        assert_as_one(pool.run(2, _steps, ratio, options, False), whole, options)


def _replays(communicator: Communicator, ratio: int, options: dict[str, Any]) -> int:
    """How many replays of a captured decode step gave the eager step's bits."""
    layer = layer_of(communicator, ratio, {**options, "device": str(communicator.device)})
    engine, requests = ContextEngine(layer, seed=3), [Request() for _ in range(3)]
    engine.step([], [(request, hidden_rows(600 + n, seed=n)) for n, request in enumerate(requests)])
    hidden = hidden_rows(3, seed=9).to(communicator.device)
    captured: dict[str, Any] = {}
    whole = layer.forward

    def keep(positions: torch.Tensor, rows: torch.Tensor, metadata: Any, caches: Any) -> torch.Tensor:
        assert isinstance(metadata, ContextStep)
        captured.update(arguments=(positions, rows, metadata, caches))
        return whole(positions, rows, metadata, caches)

    layer.forward = keep  # type: ignore[method-assign,assignment]
    eager = torch.cat(engine.step([(r, hidden[n : n + 1]) for n, r in enumerate(requests)]))
    layer.forward = whole  # type: ignore[method-assign]
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
    return same


@pytest.mark.parametrize("options", [SHARED, FORMS[2]])
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_decode_step_in_a_graph(pool: RankPool, ratio: int, options: dict[str, Any]) -> None:
    assert pool.run(2, _replays, ratio, options) == [REPLAYS, REPLAYS]
