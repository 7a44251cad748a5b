# SPDX-License-Identifier: Apache-2.0
"""Decode steps whose attention norms and rotates the queries, on a Hopper GPU: which do, and that bits do not depend on
how their launches come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from layers.attention import LEAST_RAW_DECODE_ROWS
from tests.gpu.test_bound_steps import Server
from tests.layers.engine import CONFIG, KINDS, hidden_rows

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or arch_of(0) != "sm_90a", reason="the kernel is Hopper's"),
]

HEADS = {1: 64, 4: 64, 128: 128}
"""The fewest whose attention takes raw queries, by the layer's ratio."""
REQUESTS = LEAST_RAW_DECODE_ROWS
NEAR = 0.05
"""Queries are rounded once less than where another launch norms them: behind it e4m3 codes are those of neighbours."""


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


def serve(ratio: int, requests: int = REQUESTS, heads: int = 0, **options: Any) -> Server:
    config = replace(CONFIG, num_attention_heads=heads or HEADS[ratio])
    server = Server(ratio, requests, config=config, **options)
    server.prefill(40)
    return server


def lengths_at(step: int, requests: int = REQUESTS) -> list[int]:
    """One of them at a padding row."""
    return [0 if r == 5 else 41 + step + r % 3 for r in range(requests)]


@pytest.mark.parametrize("ratio", KINDS)
def test_bits_of_bound_free_and_captured_steps(ratio: int) -> None:
    servers = bound, free, graphed = [serve(ratio, bind_steps=bind) for bind in (True, False, False)]
    hidden = hidden_rows(REQUESTS, 0).cuda()
    for server in servers:
        server.decode(lengths_at(0), hidden)
    graph, rows = torch.cuda.CUDAGraph(), [1] * REQUESTS
    m = graphed.metadata(rows, lengths_at(3), REQUESTS)
    with torch.cuda.graph(graph):
        out = graphed.layer(m.positions, hidden, m, graphed.caches)
    for step in range(1, 4):
        hidden.copy_(hidden_rows(REQUESTS, step))
        graphed.metadata(rows, lengths_at(step), REQUESTS)
        graph.replay()
        want = free.decode(lengths_at(step), hidden)
        assert torch.equal(bound.decode(lengths_at(step), hidden), want)
        assert torch.equal(out, want)
    assert len(bound.layer._bound) == 1
    for other in (bound, graphed):
        assert all(map(torch.equal, other.bytes(), free.bytes()))


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("rows", [1, 2])
def test_near_a_step_whose_queries_are_normed_before(ratio: int, rows: int) -> None:
    server = serve(ratio)
    lengths, hidden = lengths_at(rows), hidden_rows(rows * REQUESTS, 1).cuda()
    with record_calls() as recording:
        got = server.decode(lengths, hidden, rows).double()
    assert "fp8_gemm_squares" in {call.op for call in recording.calls}
    m = server.metadata([rows] * REQUESTS, lengths, REQUESTS)
    want = server.layer(m.positions, hidden, m, server.caches, capture={}).double()
    some = torch.arange(len(want), device="cuda") // rows != 5
    assert bool(((got - want)[some].norm(dim=-1) <= NEAR * want[some].norm(dim=-1)).all())


def test_which_steps_norm_them_before() -> None:
    """Of few rows, batch invariant ones, and those whose queries' norm hides behind compression."""
    for ratio, requests, options in (
        (1, REQUESTS - 1, {}),
        (1, REQUESTS, {"batch_invariant": True}),
        (128, REQUESTS, {"heads": 64}),
    ):
        server = serve(ratio, requests, **options)
        with record_calls() as recording:
            server.decode(lengths_at(1, requests), hidden_rows(requests, 1).cuda())
        ops = {call.op for call in recording.calls}
        assert "fp8_gemm" in ops
        assert "fp8_gemm_squares" not in ops
