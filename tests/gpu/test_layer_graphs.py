# SPDX-License-Identifier: Apache-2.0
"""A decode step of every layer kind, captured in a CUDA graph and replayed with other numbers, against eager steps."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime.compile import launch, record_launches
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from layers import BlockTables, deepseek_v4_attention, forward_context, register_layer, unregister_layer
from layers.metadata import DeepseekV4Metadata
from layers.streams import graph_streams
from tests.helpers import raw_bytes
from tests.layers.engine import KINDS, NO_PAGE, Engine, Request, hidden_rows, make_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ROWS = 6
LONGEST = 2048
LENGTHS = (127, 3, 200, 255, 383, 64)
"""Tokens before the first decode: the first step closes groups of 128 and of 4 in some requests and not in others."""


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


class Decoder:
    """An engine whose decode steps always have ROWS rows, with everything that changes at fixed addresses."""

    def __init__(self, ratio: int, **options: Any) -> None:
        self.engine = Engine(make_layer(ratio, device="cuda", **options), seed=1)
        self.requests = [Request() for _ in LENGTHS]
        self.engine.step([], [(r, hidden_rows(n, seed=n)) for r, n in zip(self.requests, LENGTHS, strict=True)])
        self.hidden = torch.zeros(ROWS, self.engine.layer.config.hidden_size, dtype=torch.bfloat16, device="cuda")
        self.tables: dict[str, torch.Tensor] = {}
        self.graph = torch.cuda.CUDAGraph()

    def prepare(self, active: list[int], seed: int) -> DeepseekV4Metadata:
        """Metadata and inputs of a step of some requests; the other rows are padding."""
        engine = self.engine
        lengths = torch.zeros(ROWS, dtype=torch.int32)
        rows = [self.requests[i] for i in active]
        for number, request in enumerate(rows):
            engine._grow(request, request.length + 1)
            request.length += 1
            lengths[number] = request.length
        for group in ("swa", "compressed", "state"):
            found = engine._table(group, rows)
            if found is None:
                continue
            table = self.tables.setdefault(
                group, torch.empty(ROWS, LONGEST // engine.tokens[group], dtype=torch.int32, device="cuda")
            )
            table.fill_(NO_PAGE)
            table[: len(rows), : found.shape[1]] = found[:, : table.shape[1]]
        self.hidden.copy_(hidden_rows(ROWS, seed))
        tables = BlockTables(self.tables["swa"], self.tables.get("compressed"), self.tables.get("state"))
        return engine.builder.build(
            engine.ratio, [1] * ROWS, [LONGEST] * ROWS, tables, ROWS, seq_lens_device=lengths.cuda()
        )

    def eager(self, m: DeepseekV4Metadata) -> torch.Tensor:
        return self.engine.layer(m.positions, self.hidden, m, self.engine.caches)

    def capture(self, m: DeepseekV4Metadata) -> None:
        with torch.cuda.graph(self.graph):
            self.hidden_out = self.eager(m)

    def replay(self) -> torch.Tensor:
        self.hidden_out.fill_(math.nan)
        self.graph.replay()
        return self.hidden_out

    def pools(self) -> list[torch.Tensor]:
        return [raw_bytes(cache.data) for caches in self.engine.pools.values() for cache in caches]


STEPS = ([0, 1, 2, 3, 4, 5], [0, 3], [5, 4, 1], [2], [3, 1, 0, 4, 2, 5], [1, 0, 3, 5], [4])


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache": "bf16"}, {"kv_cache": "fp8"}, {"index_cache": "mxfp4", "index_hadamard": True}],
    ids=["fp8_ds_mla", "bf16", "fp8", "mxfp4"],
)
def test_a_replayed_step_is_the_eager_step(ratio: int, options: dict[str, Any]) -> None:
    graphed, eager = Decoder(ratio, **options), Decoder(ratio, **options)
    for decoder in (graphed, eager):  # whatever compiles or plans does so before the capture
        decoder.eager(decoder.prepare(STEPS[0], 1))
    captured = graphed.prepare(STEPS[1], 2)
    graphed.capture(captured)
    graphed.replay()
    eager.eager(eager.prepare(STEPS[1], 2))
    for number, active in enumerate(STEPS):
        graphed.prepare(active, 10 + number)
        got = graphed.replay()
        want = eager.eager(eager.prepare(active, 10 + number))
        assert torch.equal(got, want), f"step {number}"
        for mine, theirs in zip(graphed.pools(), eager.pools(), strict=True):
            assert torch.equal(mine, theirs), f"step {number}"


@pytest.mark.parametrize("ratio", [1, 128])
def test_a_step_sees_the_lists_of_its_own_metadata(ratio: int) -> None:
    """Attention reads lists of a step's metadata before the kernel ahead of it has ended. A graph of steps of different
    lengths, each with the kernel that makes its metadata, against steps that wait for it. No group of 128 is closed."""
    graphed, eager = Decoder(ratio), Decoder(ratio)
    for decoder in (graphed, eager):
        decoder.eager(decoder.prepare(STEPS[0], 1))
    longest = torch.tensor(LENGTHS)
    back = torch.rand(8, ROWS, generator=torch.Generator().manual_seed(1)) * longest.clamp(max=8)
    lengths = (longest - back.long()).int().cuda()
    given = lengths[0].clone()

    def build(decoder: Decoder, lens: torch.Tensor) -> DeepseekV4Metadata:
        tables = BlockTables(*(decoder.tables.get(group) for group in ("swa", "compressed", "state")))
        return decoder.engine.builder.build(ratio, [1] * ROWS, [LONGEST] * ROWS, tables, ROWS, seq_lens_device=lens)

    build(graphed, given)  # its launch is kept, and so noted from now on
    with record_launches() as launches:
        metadata = build(graphed, given)
    got = []
    with torch.cuda.graph(graphed.graph):
        for lens in lengths:
            given.copy_(lens)
            for key, index, arguments in launches:
                launch(key, index, *arguments)
            got.append(graphed.eager(metadata))
    for _ in range(5):
        graphed.graph.replay()
        for number, lens in enumerate(lengths):
            m = build(eager, lens)
            torch.cuda.synchronize()
            assert torch.equal(got[number], eager.eager(m)), f"step {number}"


class SplitDecoder(Decoder):
    """The same by the op that compilers split at, into more heads than there are."""

    def eager(self, m: DeepseekV4Metadata) -> torch.Tensor:
        layer = self.engine.layer
        heads = torch.full((ROWS, layer.num_heads + 5, 512), 7.0, dtype=torch.bfloat16, device="cuda")
        register_layer("layer", layer, self.engine.caches)
        with forward_context({m.compress_ratio: m}):
            deepseek_v4_attention(self.hidden, m.positions, heads, "layer")
        unregister_layer("layer")
        self.padding = heads[:, layer.num_heads :]
        return layer.project(heads, m.positions)


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("kv", ["fp8_ds_mla", "fp8"])
def test_attention_by_its_op(ratio: int, kv: str) -> None:
    """Through its ops, by launches that were kept, and in a graph."""
    split, whole = SplitDecoder(ratio, kv_cache=kv), Decoder(ratio, kv_cache=kv)
    for number, active in enumerate(STEPS[:4]):
        got, want = split.eager(split.prepare(active, number)), whole.eager(whole.prepare(active, number))
        assert torch.equal(got, want), f"step {number}"
        assert bool((split.padding == 7).all())
    kept = [len(decoder.engine.layer._bound) for decoder in (split, whole)]
    assert kept == ([1, 1] if kv == "fp8_ds_mla" else [0, 0])
    split.capture(split.prepare(STEPS[4], 8))
    split.replay()
    whole.eager(whole.prepare(STEPS[4], 8))
    for number, active in enumerate(STEPS[5:]):
        split.prepare(active, 10 + number)
        assert torch.equal(split.replay(), whole.eager(whole.prepare(active, 10 + number))), f"step {number}"
        assert bool((split.padding == 7).all())
    for mine, theirs in zip(split.pools(), whole.pools(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize(
    "options", [{"kv_cache": "bf16"}, {"kv_cache": "fp8"}, {"index_cache": "fp8"}, {"index_cache": "mxfp4"}], ids=str
)
def test_steps_are_made_of_kernels(ratio: int, options: dict[str, Any]) -> None:
    """The requests' first ones, too."""
    with record_calls() as recording:
        decoder = Decoder(ratio, **options)
        decoder.eager(decoder.prepare(STEPS[0], 1))
    ran = {call.op: call.implementation for call in recording.calls if not call.op.startswith("linear")}
    assert {op for op, implementation in ran.items() if implementation != "kernel"} == set()


def second_stream() -> torch.cuda.Stream:
    number = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        number.add_(1)
        (found,) = graph_streams(number.device)
    return found


def test_the_second_stream_outlives_layers_and_graphs() -> None:
    """It is the process's: a layer that is captured when another one is gone has the same, and the right bits."""
    found = []
    for seed in (1, 2):
        graphed, eager = Decoder(4), Decoder(4)
        for decoder in (graphed, eager):
            decoder.eager(decoder.prepare(STEPS[0], seed))
        graphed.capture(graphed.prepare(STEPS[1], 3))
        eager.eager(eager.prepare(STEPS[1], 3))
        graphed.prepare(STEPS[2], 4)
        assert torch.equal(graphed.replay(), eager.eager(eager.prepare(STEPS[2], 4)))
        found.append(second_stream())
        del graphed, eager, decoder
        gc.collect()
        torch.cuda.empty_cache()
    assert found[0] == found[1]
