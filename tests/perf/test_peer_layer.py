# SPDX-License-Identifier: Apache-2.0
"""The peers' chain with this project's ops in the place of the peers' kernels: what is called, in which order, and what
counts as agreement; no GPU."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from cute_kernels.compressor.ops import fused_compress_norm_rope_store
from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8
from cute_kernels.indexer.ops import (
    cp_gather_indexer_k_quant_cache,
    fused_indexer_q_rope_quant,
    mqa_logits,
    paged_mqa_logits,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from cute_kernels.indices.ops import combine_topk_swa_indices, compute_global_topk_indices_and_lens
from cute_kernels.kv_cache.ops import (
    dequantize_and_gather_k_cache,
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
)
from cute_kernels.norm.ops import fused_q_kv_rmsnorm
from cute_kernels.output.ops import deepseek_v4_fp8_einsum, fused_inv_rope_fp8_quant
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_prefill
from layers import PRESETS
from layers.linear import dequantize_weight, quantize_activation
from perf import layer, peer_layer, peers
from perf.layer import Case
from perf.peer_layer import Kernels, PeerStep
from perf.peers import PeerMissing, missing_allowed


class Flash:
    """FlashMLA's interface."""

    def get_mla_metadata(self) -> tuple[Any, None]:
        return SimpleNamespace(tile_scheduler_metadata=None, num_splits=None), None

    def flash_mla_with_kvcache(self, **given: Any) -> None:
        q, extra = given["q"], given["extra_k_cache"]
        assert q.shape[1:] == (1, 64, 512)
        assert given["is_fp8_kvcache"]
        assert given["tile_scheduler_metadata"] is not None
        more = {}
        if extra is not None:
            lens = given["extra_topk_length"][:, None]
            more = {"extra_k_cache": extra.squeeze(2), "extra_indices": given["extra_indices_in_kvcache"]}
            more["extra_topk_length"] = lens
        sparse_mla_decode(
            q,
            given["k_cache"].squeeze(2),
            given["indices"],
            topk_length=given["topk_length"][:, None],
            attn_sink=given["attn_sink"],
            softmax_scale=given["softmax_scale"],
            out=given["out"],
            **more,
        )

    def flash_mla_sparse_fwd(self, **given: Any) -> None:
        assert given["q"].shape[1] == 64
        names = ("q", "kv", "indices", "sm_scale")
        more = {name: given[name] for name in ("attn_sink", "topk_length", "out")}
        sparse_mla_prefill(*(given[name] for name in names), **more)


class DeepGemm:
    """DeepGEMM's ops."""

    def fp8_fp4_gemm_nt(self, a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any) -> None:
        x = a.double() * a_scale.double().repeat_interleave(128, 1)
        out.copy_(x @ dequantize_weight(b, b_scale, torch.float64).t())

    def fp8_einsum(
        self, equation: str, a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, c: None, recipe: list[int]
    ) -> None:
        deepseek_v4_fp8_einsum(a, a_scale, b, b_scale, out, equation, recipe)

    def get_paged_mqa_logits_metadata(self, lens: Any, page: int, workers: int) -> torch.Tensor:
        return torch.tensor([len(lens), page, workers])

    def fp8_fp4_mqa_logits(
        self, q: Any, q_scale: None, k: Any, k_scale: Any, weights: Any, start: Any, end: Any, longest: int
    ) -> torch.Tensor:
        return mqa_logits(q, (k, k_scale), weights, start, end, False, max_seqlen_k=longest)

    def fp8_fp4_paged_mqa_logits(
        self, q: Any, q_scale: None, pool: Any, weights: Any, lens: Any, table: Any, schedule: Any, columns: int
    ) -> torch.Tensor:
        assert schedule.tolist() == [len(lens), 64, 66 if lens.shape[1] == 4 else 132]
        return paged_mqa_logits(q, pool.squeeze(2), weights, lens, table, None, columns)


def insert(
    q: Any, kv: Any, pages: Any, slots: Any, positions: Any, table: Any, padded: int, eps: float, block: int
) -> torch.Tensor:
    pool = FP8_DS_MLA.allocate(1, block, "cpu")
    shape, stride = (len(pages), *pool.shape[1:]), pages.stride(0)
    pool = pages.as_strided(shape, (stride, *pool.stride()[1:]))
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(q, kv, pool, slots, positions, table, eps, block)
    return F.pad(q, (0, 0, 0, padded - q.shape[1]))


def compress(*args: Any) -> None:
    (*given, weight, _restart, scale, eps, ratio, _keep, kv_format) = args
    fused_compress_norm_rope_store(
        *given, weight, eps, ratio, kv_format=kv_format, persist="all", fp8_scale=scale, min_restart=None
    )


def index_query(**given: Any) -> None:
    names = "positions", "q", "cos_sin_cache", "weights", "weights_softmax_scale", "weights_head_scale"
    codes, weights = fused_indexer_q_rope_quant(*(given[name] for name in names), round_weights=True)
    given["q_fp8"].copy_(codes.view(torch.uint8))
    given["weights_out"].copy_(weights)


class TopK:
    """vLLM's ops."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def top_k_per_row_prefill(self, *args: Any) -> None:
        self.called.append("per row")
        top_k_per_row_prefill(*args)

    def _decode(self, scores: Any, lens: Any, out: Any, workspace: Any, k: int, columns: int) -> None:
        top_k_per_row_decode(scores, 1, lens[:, None], out, len(scores), scores.stride(0), scores.stride(1), k)

    def cooperative_topk(self, *args: Any) -> None:
        self.called.append("cooperative")
        self._decode(*args)

    def persistent_topk(self, *args: Any) -> None:
        self.called.append("persistent")
        self._decode(*args)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Our ops under the names that the peers have, and cells of narrow layers, which the CPU runs."""
    found = Kernels(
        flash=Flash(),
        deepgemm=DeepGemm(),
        quantize=quantize_activation,
        norm=fused_q_kv_rmsnorm,
        insert=insert,
        compress=compress,
        compress_index=compress,
        index_query=index_query,
        index_gather=cp_gather_indexer_k_quant_cache,
        gather=dequantize_and_gather_k_cache,
        slots=compute_global_topk_indices_and_lens,
        combine=combine_topk_swa_indices,
        inverse_rope=fused_inv_rope_fp8_quant,
        top_k=TopK(),
        use_stream=contextlib.nullcontext,
    )
    monkeypatch.setattr(peer_layer, "kernels", lambda: found)
    monkeypatch.setattr(peer_layer, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    small = {name: config.reduced() for name, config in PRESETS.items()}
    monkeypatch.setattr(layer, "PRESETS", small)
    return found


PICKED = [Case("v4-flash", "c4a", "decode", 3, 4, 500), Case("v4-flash", "c4a", "prefill", 1, 12, 500)]
"""Of more entries than are picked, on more than one page."""


def step_of(case: Case) -> layer.Step:
    return layer.Step(case, layer.build_layers(case, max(case.lengths()) + 64))


@pytest.mark.parametrize(
    "case",
    [
        Case("v4-flash", "swa", "decode", 2, 1, 300),
        Case("v4-flash", "swa", "prefill", 1, 12, 200),
        Case("v4-flash", "c4a", "decode", 3, 4, 300),
        Case("v4-flash", "c4a", "prefill", 1, 12, 200),
        Case("v4-flash", "c128a", "decode", 2, 1, 300),
        Case("v4-flash", "c128a", "prefill", 1, 140, 200),
        Case("v4-flash", "c4a", "decode", 2, 1, 300, 2),
    ],
    ids=lambda case: case.name,
)
def test_every_stage_is_ours(case: Case, fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(case)
    peer = PeerStep(step)
    monkeypatch.setattr(peer, "_replay", lambda number: "")
    stages = peer.stages(0)
    assert len(stages) == {"swa": 10, "c128a": 12, "c4a": 19}[case.kind]
    assert peer.disagreements() == []
    assert [call().shape for call in peer.calls()] == [step.hidden[0].shape] * len(step.layers)
    want = step.run(0)
    assert peer_layer._distance(peer.run(0), want) < 0.02


def test_a_stage_that_differs_is_named(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    def norm(*args: Any) -> Any:
        qr, kv = fused_q_kv_rmsnorm(*args)
        return qr * 1.01, kv

    monkeypatch.setattr(peer_layer, "kernels", lambda: replace(fake, norm=norm))
    peer = PeerStep(step_of(Case("v4-flash", "swa", "decode", 2, 1, 300)))
    monkeypatch.setattr(peer, "_replay", lambda number: "")
    (text,) = peer.disagreements()
    assert text.startswith("norms 0.0")


def with_pick(step: layer.Step, monkeypatch: pytest.MonkeyPatch, make: Any) -> list[str]:
    """What is found where picks are made so: (the right kernel, its arguments) -> picks."""
    peer = PeerStep(step)
    monkeypatch.setattr(peer, "_replay", lambda number: "")
    monkeypatch.setattr(peer, "pick", partial(make, peer.pick))
    return peer.disagreements()


@pytest.mark.parametrize("case", PICKED, ids=lambda case: case.name)
def test_a_wrong_pick_is_noticed(case: Case, fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the last row, an entry out of the middle of those that it leaves out; one that is missing; one that the
    row does not see. Rows are judged five at a time."""
    monkeypatch.setattr(peer_layer, "SCORE_BYTES", 4.0 * 5 * 125)
    step = step_of(case)
    assert with_pick(step, monkeypatch, lambda pick, *args: pick(*args).flip(1)) == []
    for planted in ("another", "missing", "unseen"):

        def pick(right: Any, codes: Any, weights: Any, cache: Any, m: Any, planted: str = planted) -> torch.Tensor:
            picks = right(codes, weights, cache, m)
            row, visible = picks[-1], int(m.visible[-1])
            left_out = sorted(set(range(visible)) - set(row.tolist()))
            row[3] = {"another": left_out[len(left_out) // 2], "missing": -1, "unseen": visible}[planted]
            return picks

        (text,) = with_pick(step, monkeypatch, pick)
        assert text.startswith("picks 0." if planted == "another" else "picks inf"), planted


@pytest.mark.parametrize("case", PICKED, ids=lambda case: case.name)
def test_a_shifted_table_is_noticed(case: Case, fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are scored in the place of others."""

    def pick(right: Any, codes: Any, weights: Any, cache: Any, m: Any) -> torch.Tensor:
        return right(codes, weights, cache, replace(m, compressed_block_table=m.compressed_block_table.roll(1, dims=1)))

    (text,) = with_pick(step_of(case), monkeypatch, pick)
    assert float(text.removeprefix("picks ")) > 0.1


def test_keys_that_are_alike_may_be_picked_in_any_place(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages of a request hold the same keys, and of three that are alike one is picked last."""
    step = step_of(Case("v4-flash", "c4a", "decode", 2, 1, 760))
    cache = step.caches[0].indexer
    assert cache is not None
    pages = cache.kv_format.pages(cache.data, cache.block_size)
    pages[1:] = pages[0]

    def pick(right: Any, codes: Any, weights: Any, cache: Any, m: Any) -> torch.Tensor:
        """Others that are alike in the place of those that were picked; the last entry was stored by the step."""
        picks = right(codes, weights, cache, m)
        for row, visible in zip(picks, m.visible.tolist(), strict=True):
            for i, entry in enumerate(row.tolist()):
                alike = set(range(entry % 64, visible - 1, 64)) - set(row.tolist())
                if alike and entry < visible - 1:
                    row[i] = alike.pop()
                    moved.append(entry)
        return picks

    moved: list[int] = []
    assert with_pick(step, monkeypatch, pick) == []
    assert moved


def test_scales_may_differ_where_a_power_of_two_begins(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """One scale of a step that is twice what it should be is an error; where the largest number of its chunk is 448
    times a power of two, give or take a rounding, it is not."""
    case = Case("v4-flash", "swa", "prefill", 1, 12, 0)

    def inverse_rope(*args: Any) -> Any:
        codes, scale = fused_inv_rope_fp8_quant(*args)
        scale = scale.clone()
        scale[5, 0, 1] *= 2
        return codes, scale

    monkeypatch.setattr(peer_layer, "kernels", lambda: replace(fake, inverse_rope=inverse_rope))
    peer = PeerStep(step_of(case))
    monkeypatch.setattr(peer, "_replay", lambda number: "")
    (text,) = peer.disagreements()
    assert text.startswith("output scales 0.")

    out = torch.randn(3, 2, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    out[1, 0, 128:256] = 0.5
    out[1, 0, 200] = -1.75
    positions, angle = torch.arange(3), torch.tensor([1e-6])
    table = torch.cat([angle.cos(), angle.sin()]).repeat_interleave(32).expand(3, 64)
    _, right = fused_inv_rope_fp8_quant(out, positions, table, 1, 2)
    off = partial(peer_layer._off_edge, out=out, positions=positions, table=table)
    assert off(right, right) == 0
    other = right.clone()
    other[1, 0, 1] *= 2
    assert off(right, other) == off(other, right) == 0
    other[1, 0, 1] *= 2
    assert off(right, other) == torch.inf, "no neighbour"
    other[1, 0, 1] = torch.nan
    assert off(other, right) == torch.inf
    # a pair of columns of which one turns a hair over the edge
    out[2, 1, 384:], out[2, 1, 510], out[2, 1, 511] = 0.5, 1.75, 0.25
    _, right = fused_inv_rope_fp8_quant(out, positions, table, 1, 2)
    other = right.clone()
    other[2, 0, 7] /= 2
    assert 0 < off(other, right) < peer_layer.EDGE
    out[2, 1, 511] = 1.5
    assert off(other, right) < peer_layer.EDGE
    out[2, 1, 510] = 1.7421875
    assert off(other, right) > peer_layer.EDGE


def test_few_rows_are_picked_by_another_kernel(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_layer, "COOPERATIVE_PICKS", (16,))
    for requests, name in ((2, "cooperative"), (65, "persistent")):
        peer = PeerStep(step_of(Case("v4-flash", "c4a", "decode", requests, 1, 100)))
        fake.top_k.called.clear()
        peer.run(0)
        assert fake.top_k.called == [name]


def test_a_model_is_chained(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Case, "ratios", property(lambda self: (1, 4, 128, 4)))
    step = step_of(Case("v4-flash", "model", "decode", 2, 1, 300))
    peer = PeerStep(step)
    monkeypatch.setattr(peer, "_replay", lambda number: "")
    assert peer.disagreements() == []
    one, other = (call() for call in peer.calls())
    assert not torch.equal(one, other)


def test_a_peer_that_is_missing_or_wrong_is_skipped_with_the_reason(
    fake: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(Case("v4-flash", "swa", "decode", 2, 1, 300))
    monkeypatch.setattr(layer, "fixed_streams", lambda: ("captured", "one", "two", "three"))
    used: list[list[str]] = []

    def disagreements(self: Any) -> list[str]:
        used.append(self.streams)
        return ["attention 0.1", "wo_a 0.2"] if self.streams else []

    monkeypatch.setattr(PeerStep, "disagreements", disagreements)
    found = layer.peers_of(step)
    assert used == [[], ["one", "two", "three"]]
    assert isinstance(found[peer_layer.NAME], PeerStep)
    assert found[peer_layer.STREAMS_NAME] == "attention 0.1; wo_a 0.2"

    def missing() -> Kernels:
        raise ModuleNotFoundError("No module named 'vllm'")

    monkeypatch.setattr(peer_layer, "kernels", missing)
    why = "cannot be imported: ModuleNotFoundError: No module named 'vllm'"
    with missing_allowed():
        assert layer.peers_of(step) == dict.fromkeys((peer_layer.NAME, peer_layer.STREAMS_NAME), why)
    with pytest.raises(PeerMissing, match=f"the peer {re.escape(peer_layer.NAME)} {why}"):
        layer.peers_of(step)


def test_differences() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert peer_layer._distance(x, x) == 0
    assert peer_layer._distance(x + torch.tensor([[0.0, 0.5]]), x) == pytest.approx(0.1)
    assert peer_layer._distance(x * float("nan"), x) == float("inf")
    cache = SimpleNamespace(kv_format=INDEXER_FP8, block_size=4, data=INDEXER_FP8.allocate(3, 4, "cpu"))
    pages = INDEXER_FP8.pages(cache.data, 4)
    pages[1, 2 * 128 : 3 * 128], pages[1, 4 * 128 + 8 : 4 * 128 + 12] = 7, 9
    records = peer_layer._records(cache, torch.tensor([-1, 6, 0]))  # type: ignore[arg-type]
    assert records.tolist() == [[7] * 128 + [9] * 4, [0] * 132]


@pytest.mark.parametrize(("ratio", "entries", "topk"), [(1, 0, 0), (4, 75, 0), (128, 2, 8)])
def test_columns_of_a_prefill(ratio: int, entries: int, topk: int) -> None:
    """Of 40 rows at the end of 300: entries, own rows, and what of the window lies before them."""
    step: Any = SimpleNamespace(
        seq_lens_cpu=[300],
        num_prefill_tokens=40,
        seq_lens=torch.tensor([300]),
        positions=torch.arange(40),
        c128a_prefill_topk_indices=torch.zeros(40, 8, dtype=torch.int32),
    )
    made = peer_layer._Prefill(step, ratio, 128)
    assert (made.entries, made.columns, made.topk) == (entries, entries + 40 + 127, topk)
    assert made.kv.shape == (1, made.columns, 512)
    assert made.keys.shape == (entries, 128)


def test_products_that_are_compiled_beforehand() -> None:
    """Those that a step multiplies, and no others."""
    flash = peer_layer.products_of(Case("v4-flash", "c4a", "decode", 64, 4, 8192), PRESETS["v4-flash"])
    assert flash == [
        (256, 1, 1536, 4096, False),
        (256, 1, 32768, 1024, False),
        (256, 8, 1024, 4096, True),
        (256, 1, 4096, 8192, False),
        (256, 1, 8192, 1024, False),
    ]
    rank = peer_layer.products_of(Case("v4-flash", "swa", "decode", 1, 1, 8192, 8), PRESETS["v4-flash"])
    assert rank == [
        (1, 1, 1536, 4096, False), (1, 1, 4096, 1024, False), (1, 1, 1024, 4096, True), (1, 1, 4096, 1024, False)
    ]  # fmt: skip


def test_a_replay_must_be_the_eager_layer(fake: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = PeerStep(step_of(Case("v4-flash", "c4a", "decode", 2, 1, 300)))
    spoil: list[Any] = []

    class Graph:
        """Its replay calls what it holds once more, after something was spoilt."""

        def __init__(self, calls: Any) -> None:
            self.calls = calls

        def replay(self) -> None:
            for action in spoil:
                action()
            for call in self.calls:
                call()

    def capture(calls: Any) -> tuple[Graph, int]:
        for call in calls:
            call()
        return Graph(calls), len(calls)

    monkeypatch.setattr(peer_layer, "capture", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert peer._replay(0) == ""
    pick, attend, project = peer.pick, peer.attend, peer.project
    peer.plans[4].num_splits = torch.tensor([1])
    assert peer._replay(0) == ""
    spoil.append(lambda: peer.plans[4].num_splits.add_(1))
    assert peer._replay(0) == "a plan has changed since the capture"
    spoil[:] = [lambda: monkeypatch.setattr(peer, "pick", lambda *a: pick(*a).add_(1))]
    assert peer._replay(0).startswith("what a graph's replay or an eager layer has left out scores ")
    monkeypatch.setattr(peer, "pick", pick)
    spoil[:] = [lambda: monkeypatch.setattr(peer, "attend", lambda *a: attend(*a) * 1.02)]
    assert peer._replay(0).startswith("attention in a graph's replay is 0.02 from")
    monkeypatch.setattr(peer, "attend", attend)
    # eagerly, when captured, in the replay, from its attention
    factors = iter((1.0, 1.0, 1.5, 1.0))
    spoil.clear()
    monkeypatch.setattr(peer, "project", lambda *a: project(*a) * next(factors))
    assert peer._replay(0).startswith("the results of a graph's replay are 0.5 from")


@pytest.mark.parametrize(
    ("cores", "wanted", "processes"), [(1, 3, 1), (4, 3, 3), (4, 9, 4), (None, 2, 1), (99, 40, 8), (4, 0, 1)]
)
def test_products_are_compiled_side_by_side(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, wanted: int, processes: int
) -> None:
    """Each once, in at most so many processes as there is work for."""
    asked: list[Any] = []

    class Pool(contextlib.AbstractContextManager[Any]):
        def __init__(self, count: int, mp_context: Any) -> None:
            asked.append(count)

        def submit(self, work: Any, product: Any) -> Any:
            asked.append(product)
            return Future()

        def __exit__(self, *error: object) -> None:
            return None

    class Future:
        def result(self) -> None:
            raise RuntimeError("it does not compile")

    monkeypatch.setattr(peers, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(peers.os, "cpu_count", lambda: cores)
    monkeypatch.setattr(peers, "MOST_COMPILERS", 8)
    products = [peers.Product(rows, 1, 128, 256) for rows in range(wanted, 0, -1)]
    peers.compile_products([*products, *products])
    assert asked == [processes, *sorted(products)]


@pytest.mark.parametrize("way", ["there", "module", "library"])
def test_deepgemms_ops_are_registered_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's module or, where that cannot be imported, by the library that lies beside it."""
    done: list[Any] = []
    ops = SimpleNamespace(init=lambda *args: done.append(("init", *args)))
    if way == "there":
        ops.fp8_fp4_mqa_logits = None
    monkeypatch.setattr(torch.ops, "deep_gemm", ops, raising=False)

    def load(name: str) -> Any:
        done.append(name)
        if name == "vllm.third_party.deep_gemm" and way == "library":
            raise ImportError(name)
        return SimpleNamespace(load=lambda file: done.append(("load", file)), LIB="/lib")

    monkeypatch.setattr(peers.importlib, "import_module", load)
    assert peers.deepgemm() is ops
    assert (
        done
        == {
            "there": [],
            "module": ["vllm.third_party.deep_gemm"],
            "library": [
                "vllm.third_party.deep_gemm",
                "vllm._load",
                ("load", "deep_gemm/_C_extension.abi3.so"),
                ("init", "/lib/deep_gemm", "deep_gemm"),
            ],
        }[way]
    )
