# SPDX-License-Identifier: Apache-2.0
"""Steps whose launches are kept, against the same steps through their ops: the same bits, whatever changes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from layers import BlockTables, DeepseekV4MetadataBuilder, LayerCaches
from layers import indexer as indexer_module
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from layers.bound import scratch_of
from layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE
from layers.metadata import DeepseekV4Metadata
from tests.helpers import raw_bytes
from tests.layers.engine import CONFIG, KINDS, hidden_rows, make_layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LONGEST = 2048


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


class Server:
    """A layer, its caches and block tables at fixed addresses, for a fixed number of requests."""

    def __init__(self, ratio: int, requests: int, **options: Any) -> None:
        self.ratio, self.requests = ratio, requests
        self.layer = make_layer(ratio, device="cuda", **options)
        tokens = {"swa": SWA_BLOCK_SIZE, "compressed": KV_BLOCK_SIZE, "state": STATE_BLOCK_SIZE.get(ratio, 1)}
        pages = {group: -(-LONGEST // size) for group, size in tokens.items()}
        generator = torch.Generator().manual_seed(3)
        tables = {
            group: torch.randperm(requests * count, generator=generator).int().view(requests, count).cuda()
            for group, count in pages.items()
        }
        self.caches = LayerCaches.allocate(
            CONFIG,
            ratio,
            swa_blocks=requests * pages["swa"],
            compressed_blocks=requests * pages["compressed"],
            state_blocks=requests * pages["state"],
            device="cuda",
        )
        self.tables = BlockTables(tables["swa"])
        if ratio > 1:
            self.tables = BlockTables(tables["swa"], tables["compressed"], tables["state"])
        self.builder = DeepseekV4MetadataBuilder(CONFIG, LONGEST, LONGEST, "cuda")

    def metadata(self, rows: list[int], lengths: list[int], decodes: int) -> DeepseekV4Metadata:
        return self.builder.build(self.ratio, rows, lengths, self.tables, decodes)

    def prefill(self, length: int) -> None:
        m = self.metadata([length] * self.requests, [length] * self.requests, 0)
        self.layer(m.positions, hidden_rows(length * self.requests, seed=length).cuda(), m, self.caches)

    def decode(self, lengths: list[int], hidden: torch.Tensor, rows: int = 1) -> torch.Tensor:
        m = self.metadata([rows] * self.requests, lengths, self.requests)
        return self.layer(m.positions, hidden, m, self.caches)

    def bytes(self) -> list[torch.Tensor]:
        caches = (self.caches.swa, self.caches.compressed, self.caches.state, self.caches.indexer)
        return [raw_bytes(cache.data) for cache in caches if cache is not None]


def pair(ratio: int, requests: int, **options: Any) -> tuple[Server, Server]:
    servers = (Server(ratio, requests, **options), Server(ratio, requests, bind_steps=False, **options))
    for server in servers:
        server.prefill(300)
    return servers


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"use_pdl": False}])
def test_same_bits_as_the_ops(ratio: int, options: dict[str, Any]) -> None:
    bound, free = pair(ratio, 3, **options)
    for step in range(6):
        lengths = [301 + step, 280 + step if step % 2 else 0, 290 + step]
        hidden = hidden_rows(3, seed=step).cuda()
        assert torch.equal(bound.decode(lengths, hidden), free.decode(lengths, hidden))
    assert all(map(torch.equal, bound.bytes(), free.bytes()))
    assert len(bound.layer._bound) == 1
    assert len(free.layer._bound) == 0


@pytest.mark.parametrize("ratio", KINDS)
def test_a_step_that_comes_again_calls_no_op(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, _ = pair(ratio, 2)
    bound.decode([301, 301], hidden_rows(2, seed=0).cuda())
    monkeypatch.setattr(compile_, "launch", None)
    monkeypatch.setattr(DeepseekV4MultiHeadLatentAttentionWrapper, "_forward", None)
    bound.decode([302, 302], hidden_rows(2, seed=1).cuda())


def chunk(server: Server, rows: list[int], lengths: list[int], decodes: int, seed: int) -> torch.Tensor:
    """A step with prefill rows."""
    m = server.metadata(rows, lengths, decodes)
    return server.layer(m.positions, hidden_rows(sum(rows), seed).cuda(), m, server.caches)


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("prefill", ["gathered", "paged"])
@pytest.mark.parametrize("decodes", [0, 1])
def test_chunks_are_bound_when_they_come_again(
    ratio: int, prefill: str, decodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound, free = pair(ratio, 2, prefill=prefill)
    steps = ([1, 64], [301, 364]) if decodes else ([40, 64], [340, 364]), ([1, 200], [301, 500])
    for seed in range(4):
        for rows, lengths in steps:
            got, want = (chunk(server, rows, lengths, decodes, seed) for server in (bound, free))
            assert torch.equal(got, want), (seed, rows)
        if not seed:
            assert len(bound.layer._bound) == 0
    assert all(map(torch.equal, bound.bytes(), free.bytes()))
    # a workspace that grew in the first round made other keys of the second
    assert len(bound.layer._bound) == 2
    assert not bound.layer._bound.foreign
    monkeypatch.setattr(DeepseekV4MultiHeadLatentAttentionWrapper, "_forward", None)
    chunk(bound, *steps[0], decodes, 9)


def test_scores_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of the indexer whose scores do not fit into its memory at once are bound as others are."""
    launches = []
    for size in (indexer_module.SCORE_BYTES, 1 << 15):
        monkeypatch.setattr(indexer_module, "SCORE_BYTES", size)
        bound, free = pair(4, 2)
        for seed in range(3):
            got, want = (chunk(server, [40, 200], [1340, 1500], 0, seed) for server in (bound, free))
            assert torch.equal(got, want), seed
        assert not bound.layer._bound.foreign
        (step,) = bound.layer._bound._prefills.values()
        assert step is not None
        launches.append(len(step.calls))
    assert launches[1] > launches[0]


def test_chunks_of_other_lengths_and_a_workspace_that_grew() -> None:
    bound, free = pair(128, 2, prefill="gathered")
    for seed, first in enumerate((340, 340, 900, 340, 340, 900, 900, 1500, 340)):
        got, want = (chunk(server, [40, 64], [first, 364], 0, seed) for server in (bound, free))
        assert torch.equal(got, want), (seed, first)


def test_hidden_states_anywhere() -> None:
    """Other addresses, rows of a wider buffer, padding rows, and a result nobody overwrites later."""
    bound, free = pair(4, 2)
    wide = torch.randn(5, CONFIG.hidden_size + 64, device="cuda").bfloat16()
    kept = []
    for step, hidden in enumerate((wide[:2, :-64], wide[1:3, :-64], wide[:4, 64:], hidden_rows(2, 5).cuda())):
        out = bound.decode([301 + step] * 2, hidden)
        kept.append((out, out.clone()))
        assert torch.equal(out, free.decode([301 + step] * 2, hidden))
    assert all(torch.equal(out, copy) for out, copy in kept)


def rolled(weight: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The weight rolled by one along `dim`; by its bytes where they are codes, which torch does not roll on a GPU."""
    codes = weight.element_size() == 1
    return weight.view(torch.uint8).roll(1, dim).view(weight.dtype) if codes else weight.roll(1, dim)


def test_weights_written_in_place_and_replaced() -> None:
    bound, free = pair(4, 2)
    hidden = hidden_rows(2, seed=0).cuda()
    for server in (bound, free):
        server.decode([301, 301], hidden)
    for change in ("copy", "replace", "load"):
        for server in (bound, free):
            layer = server.layer
            if change == "copy":
                layer.wq_b.weight.copy_(rolled(layer.wq_b.weight, 0))
                assert layer.indexer is not None
                layer.indexer.weights_proj.weight.copy_(layer.indexer.weights_proj.weight.roll(1, 0))
            elif change == "replace":
                layer.q_norm_weight = layer.q_norm_weight.roll(1)
            else:
                layer.load_state_dict({k: rolled(v) for k, v in layer.state_dict().items()}, assign=True)
        got, want = (server.decode([302, 302], hidden) for server in (bound, free))
        assert torch.equal(got, want), change


def test_caches_and_rows_may_change_under_it() -> None:
    bound, free = pair(4, 2)
    copies = [LayerCaches(**vars(server.caches)) for server in (bound, free)]
    for server, copy in zip((bound, free), copies, strict=True):
        for name, cache in vars(copy).items():
            # pages lie further apart than their entries take, which clone() would not keep
            data = torch.empty_strided(cache.data.shape, cache.data.stride(), dtype=cache.data.dtype, device="cuda")
            setattr(copy, name, type(cache)(data.copy_(cache.data), cache.kv_format, cache.block_size))
        del server
    for step in range(3):
        for rows in (1, 2):
            hidden = hidden_rows(2 * rows, seed=step).cuda()
            lengths = [301 + step + rows] * 2
            assert torch.equal(bound.decode(lengths, hidden, rows), free.decode(lengths, hidden, rows))
        bound.caches, copies[0] = copies[0], bound.caches
        free.caches, copies[1] = copies[1], free.caches


def test_streams_and_threads_have_scratch_of_their_own() -> None:
    bound, free = pair(4, 2)
    hidden = hidden_rows(2, seed=0).cuda()
    want = free.decode([301, 301], hidden)
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(2):
            got = bound.decode([301, 301], hidden)
    other.synchronize()
    assert torch.equal(got, want)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(bound.decode([301, 301], hidden)))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], want)
    device = torch.device("cuda", 0)
    assert scratch_of(device, other.cuda_stream) is not scratch_of(device, torch.cuda.current_stream().cuda_stream)
    assert scratch_of(device, other.cuda_stream).nbytes > 0


def test_recordings_see_the_ops() -> None:
    bound, _ = pair(1, 2)
    hidden = hidden_rows(2, seed=0).cuda()
    bound.decode([301, 301], hidden)
    with record_calls() as recording:
        bound.decode([302, 302], hidden)
    assert {"fp8_gemm", "sparse_mla_decode"} <= {call.op for call in recording.calls}
