# SPDX-License-Identifier: Apache-2.0
"""SGLang's backend with the plug-in's subclass, on the CPU: calls have the keywords of seams.py."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from cute_kernels import (
    formats,
    fused_compress_norm_rope_store,
    quantize_and_insert_k_cache,
    sparse_mla_decode,
    sparse_mla_prefill,
)
from cute_kernels.plugins import Plugin
from cute_kernels.plugins import sglang as plugin
from tests.helpers import generator
from tests.plugins import seams

HEADS, ROWS = 3, 256
CALLS = seams.KEYWORDS["sglang"][seams.BACKEND]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin, "PLUGIN", Plugin("sglang", plugin.PLUGIN.supported, plugin.PLUGIN.own))
    monkeypatch.setattr(Plugin, "version", lambda self: "0.5.23")
    monkeypatch.setattr(plugin.State, "serves", False)
    monkeypatch.setattr(plugin.Backend, "parts", frozenset())
    with torch.no_grad():
        yield


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules of the engine, patched by the plug-in with all its parts."""
    kernels, backend, model = (ModuleType(name) for name in (plugin.KERNELS, plugin.BACKEND, plugin.MODEL))
    monkeypatch.setenv("CUTE_KERNELS_PLUGIN", "all")

    def flash_mla_sparse_fwd(
        q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: Any = 512, *rest: Any, **kw: Any
    ) -> Any:
        return "the engine's prefill", None, None

    class DeepseekV4AttnBackend:
        trtllm_attn = mega_attn = False

        def __init__(self, layout: str = "V4", **attributes: Any) -> None:
            self.is_dsv41, self._swa_interleaved, self.hisparse_coordinator = False, False, None
            self.token_to_kv_pool = SimpleNamespace(kv_layout=SimpleNamespace(name=layout))
            self._flash_mla_with_kvcache = lambda **call: ("the engine's decode", None)
            vars(self).update(attributes)

        def _forward_prefill_sparse(self, q: torch.Tensor, **call: Any) -> Any:
            o, _, _ = vars(sys.modules[plugin.KERNELS])["flash_mla_sparse_fwd"](q=q, **call)
            return o

        def forward_c4_indexer(self, *call: Any) -> None:
            assert len(call) == 9
            self.done = "the engine's indexer"

        def forward_unified(self, x: Any, forward_batch: Any, layer_id: int, compressor: Any) -> None:
            self._forward_compress_all_in_one(**compressor)

        def _forward_compress_all_in_one(self, **call: Any) -> None:
            self.done = "the engine's compressor"

        def _get_paged_compress_metadata(self, compress_ratio: int) -> Any:
            return self.plans[compress_ratio]

        def _forward_prepare_normal(self, *, x: Any, positions: Any, **call: Any) -> Any:
            self.done = f"{len(x)} rows prepared"
            assert len(positions) == len(x) == len(call["q_lora"])
            return self.prepared

        def _forward_prepare_multi_stream(self, *, alt_streams: Any, q_lora_ready: Any, **call: Any) -> Any:
            found = self._forward_prepare_normal(**call)
            self.done += f" on {alt_streams}"
            return found

        def _get_nonpaged_indexer_plan(self, **call: Any) -> Any:
            assert len(call) == 6
            return self.plan

        def _gather_nonpaged_index_k(self, *, token_to_kv_pool: Any, plan: Any, **call: Any) -> Any:
            assert plan is self.plan
            return self.gathered

    class MQALayer:
        n_local_heads = HEADS

        def _kernel_num_heads(self, num_tokens: int) -> int:
            return 64

    kernels.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]
    backend.DeepseekV4AttnBackend = DeepseekV4AttnBackend  # type: ignore[attr-defined]
    model.MQALayer = MQALayer  # type: ignore[attr-defined]
    indexer = ModuleType(plugin.INDEXER)
    indexer.get_global_indexer_capturer = lambda: None  # type: ignore[attr-defined]
    for module in (kernels, backend, model, indexer):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin.register()
    plugin.register()
    return SimpleNamespace(backend=backend.DeepseekV4AttnBackend, original=DeepseekV4AttnBackend, layer=MQALayer())


def caches(rows: int, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = [formats.FP8_DS_MLA.allocate(2, n) for n in (rows, extra)]
    for seed, cache in enumerate(made):
        values = torch.randn(2 * cache.shape[1], 512, generator=generator(seed)).bfloat16()
        quantize_and_insert_k_cache(values, cache, torch.arange(values.shape[0]), cache.shape[1])
    return made[0], made[1]


def decode_call(generator: torch.Generator) -> dict[str, Any]:
    """As the backend makes it: rows of caches in pages with padding, indices in columns of 64."""
    cache, extra = caches(ROWS, 64)
    indices = torch.randint(0, 2 * ROWS, (4, 1, 128), generator=generator).int()
    picks = torch.randint(0, 128, (4, 1, 64), generator=generator).int()
    picks[1] = -1  # nothing is visible: the length is 1 all the same
    call = {
        "q": torch.randn(4, 1, HEADS, 512, generator=generator).bfloat16(),
        "k_cache": cache[:, :, None],
        "head_dim_v": 512,
        "block_table": None,
        "cache_seqlens": None,
        "tile_scheduler_metadata": object(),
        "softmax_scale": 512**-0.5,
        "is_fp8_kvcache": True,
        "indices": indices,
        "topk_length": torch.tensor([128, 1, 70, 5]).int(),
        "attn_sink": torch.randn(HEADS, generator=generator),
        "extra_k_cache": extra[:, :, None],
        "extra_indices_in_kvcache": picks,
        "extra_topk_length": torch.tensor([64, 1, 33, 1]).int(),
    }
    assert set(call) == CALLS["flash_mla_with_kvcache"]
    return call


def test_decode_is_served(engine: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    backend = engine.backend()
    assert isinstance(backend, engine.original)
    assert type(backend).__name__ == "CuteKernelsDeepseekV4AttnBackend"
    call = decode_call(generator(1))
    with caplog.at_level(logging.INFO, "sglang.cute_kernels"):
        out = [backend._flash_mla_with_kvcache(**call)[0] for _ in range(2)]
    expected, _ = sparse_mla_decode(
        call["q"], call["k_cache"][:, :, 0], call["indices"], topk_length=call["topk_length"],
        attn_sink=call["attn_sink"], extra_k_cache=call["extra_k_cache"][:, :, 0],
        extra_indices=call["extra_indices_in_kvcache"], extra_topk_length=call["extra_topk_length"],
    )  # fmt: skip
    assert torch.equal(out[0], expected)
    assert [record.getMessage() for record in caplog.records] == [
        "cute_kernels: in use in sglang 0.5.23: CuteKernelsDeepseekV4AttnBackend with decode, prefill, indexer, "
        "compressor; 3 heads"
    ]
    assert engine.layer._kernel_num_heads(4) == HEADS


def test_sparse_prefill_is_served_there_alone(engine: SimpleNamespace) -> None:
    call = {
        "q": torch.randn(5, HEADS, 512, generator=generator(1)).bfloat16(),
        "kv": torch.randn(40, 1, 512, generator=generator(2)).bfloat16(),
        "indices": torch.randint(-1, 40, (5, 1, 128), generator=generator(3)).int(),
        "sm_scale": 512**-0.5,
        "d_v": 512,
        "attn_sink": torch.randn(HEADS, generator=generator(4)),
        "topk_length": torch.tensor([128, 3, 1, 60, 0]).int(),
    }
    assert set(call) == CALLS["flash_mla_sparse_fwd"]
    out = engine.backend()._forward_prefill_sparse(**call)
    assert torch.equal(out, sparse_mla_prefill(**call)[0])
    function = vars(sys.modules[plugin.KERNELS])["flash_mla_sparse_fwd"]
    assert function(**call)[0] == "the engine's prefill"
    assert engine.backend(is_dsv41=True)._forward_prefill_sparse(**call) == "the engine's prefill"


@pytest.mark.parametrize(
    "attributes",
    [
        {"trtllm_attn": True},
        {"mega_attn": True},
        {"is_dsv41": True},
        {"_swa_interleaved": True},
        {"layout": "V41"},
        {"hisparse_coordinator": object()},
        {"_flash_mla_with_kvcache": None},
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_other_backends_keep_their_kernels(engine: SimpleNamespace, attributes: dict[str, Any]) -> None:
    backend = engine.backend(**attributes)
    if backend._flash_mla_with_kvcache is not None:
        assert backend._flash_mla_with_kvcache(**decode_call(generator(1)))[0] == "the engine's decode"
    assert engine.layer._kernel_num_heads(4) == 64


def test_other_records_and_arguments_are_the_engines(engine: SimpleNamespace) -> None:
    backend, call = engine.backend(), decode_call(generator(1))
    for changed in ({"k_cache": call["k_cache"][..., :528]}, {"kv_format": "V32"}, {"descale_q": torch.ones(1)}):
        assert backend._flash_mla_with_kvcache(**{**call, **changed})[0] == "the engine's decode"


ENTRIES, TOP_K = 192, 64
"""Of three pages, and picks of a row."""


def picking(engine: SimpleNamespace, raw: bool, gathers: bool) -> tuple[Any, list[set[int]], list[set[int]]]:
    """(a backend with a step of four rows, entries and slots of each row's best ones by float64)."""
    g, rows = generator(5), 4
    pages = torch.zeros(5, 64 * 132, dtype=torch.uint8)
    keys, scales = torch.randn(ENTRIES, 128, generator=g).to(torch.float8_e4m3fn), torch.rand(ENTRIES, generator=g)
    table = torch.tensor([4, 1, 2], dtype=torch.int32).repeat(rows, 1)
    slots = (table[0].long()[:, None] * 64 + torch.arange(64)).flatten()
    pages[table[0].long(), : 64 * 128] = keys.view(torch.uint8).view(3, -1)
    pages[table[0].long(), 64 * 128 :] = scales.view(torch.uint8).view(3, -1)
    lens = torch.tensor([0, 3, 100, 192], dtype=torch.int32)
    q = torch.randn(rows + 1, 64, 128, generator=g).to(torch.float8_e4m3fn)
    weights = torch.randn(rows + 1, 64, generator=g)
    values = keys.double() * scales[:, None].double()
    scores = torch.einsum("thk,th->tk", (q[:rows].double() @ values.T).relu(), weights[:rows].double())
    best = [set(scores[t, :n].topk(min(TOP_K, n)).indices.tolist()) for t, n in enumerate(lens.tolist())]
    core = SimpleNamespace(
        positions=torch.arange(rows),
        c4_sparse_page_indices=torch.full((rows, TOP_K), 7, dtype=torch.int32),
        c4_sparse_raw_indices=torch.full((rows, TOP_K), 7, dtype=torch.int32) if raw else None,
    )
    paged = SimpleNamespace(
        compressed_seq_lens=lens, page_table=table, compressed_page_size=64, max_compressed_seq_len=ENTRIES
    )
    pool = SimpleNamespace(kv_layout=SimpleNamespace(name="V4"), get_index_k_with_scale_buffer=lambda layer_id: pages)
    backend = engine.backend(
        token_to_kv_pool=pool,
        forward_metadata=SimpleNamespace(core_metadata=core, indexer_metadata=paged),
        prepared=(q, weights[..., None]),
        plan=SimpleNamespace(ks=torch.zeros_like(lens), max_seqlen_k=ENTRIES) if gathers else None,
        gathered=(keys, scales),
        debug_use_external_c4_sparse_indices=False,
        dsa_topk_backend=SimpleNamespace(is_sgl_kernel=lambda: True),
    )
    return backend, best, [{int(slots[entry]) for entry in found} for found in best]


C4 = SimpleNamespace(layer_id=3, index_topk=TOP_K, use_fp4_indexer=False)
STEP = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("raw", [False, True])
def test_the_indexer_writes_slots_and_entries(engine: SimpleNamespace, raw: bool, gathers: bool) -> None:
    backend, best, slots = picking(engine, raw, gathers)
    backend.forward_c4_indexer(torch.zeros(5, 1), torch.zeros(4, 1), C4, STEP)
    assert backend.done == "4 rows prepared"
    core = backend.forward_metadata.core_metadata
    for found, expected in ((core.c4_sparse_page_indices, slots), (core.c4_sparse_raw_indices, best)):
        for row, chosen in zip(found if found is not None else (), expected, strict=found is not None):
            assert set(row[: len(chosen)].tolist()) == chosen
            assert (row[len(chosen) :] == -1).all()
    backend.forward_c4_indexer(torch.zeros(4, 1), torch.zeros(4, 1), C4, STEP, ["streams"], True, None)
    assert backend.done == "4 rows prepared on ['streams']"


@pytest.mark.parametrize(
    "changed", ["mxfp4", "top-k", "recorded", "external", "idle", "parts", "backend"], ids=lambda name: name
)
def test_the_engines_indexer(engine: SimpleNamespace, changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _, _ = picking(engine, False, False)
    indexer, step = C4, STEP
    if changed == "mxfp4":
        indexer = SimpleNamespace(**{**vars(C4), "use_fp4_indexer": True})
    elif changed == "top-k":
        backend.dsa_topk_backend = SimpleNamespace(is_sgl_kernel=lambda: False)
    elif changed == "recorded":
        monkeypatch.setattr(sys.modules[plugin.INDEXER], "get_global_indexer_capturer", object)
    elif changed == "external":
        backend.debug_use_external_c4_sparse_indices = True
    elif changed == "idle":
        step = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))
    elif changed == "parts":
        monkeypatch.setattr(plugin.Backend, "parts", frozenset({"decode"}))
    else:
        backend._is_served = False
    backend.forward_c4_indexer(torch.zeros(4, 1), torch.zeros(4, 1), indexer, step)
    assert backend.done == "the engine's indexer"
    if changed not in ("idle", "parts", "backend"):
        assert any(said.startswith("indexer: the engine's own, as ") for said in plugin.PLUGIN.said)


def test_methods_have_the_engines_arguments() -> None:
    functions = {name: text for file in seams.SIGNATURES["sglang"].values() for name, text in file.items()}
    expected = functions["C4IndexerBackendMixin.forward_c4_indexer"]
    got = inspect.signature(plugin.Backend.forward_c4_indexer).parameters.values()
    assert ", ".join(str(p.replace(annotation=p.empty)) for p in got) == expected


PAGE = 16
"""Tokens of a page of the window's cache."""


class Rings:
    """Where the engine keeps states: of ratio 4 in rings of the pages of the window's cache, of ratio 128 in rings of
    requests; and its planner, row by row. Slots and groups of rows as c_plan.cuh has them."""

    def __init__(self, ratio: int, ring: int, table: torch.Tensor, page: int, numbers: Any = range(100)) -> None:
        self.ratio, self.ring, self.window = ratio, ring, 8 if ratio == 4 else 128
        self.table, self.page, self.numbers = table, page, numbers
        self.rows = (table.numel() if ratio == 4 else len(table)) * ring

    def slot(self, request: int, position: int) -> int:
        page = int(self.table[request, position // self.page] if self.ratio == 4 else self.numbers[request])
        return page * self.ring + position % self.ring

    def groups(self, request: int, position: int) -> tuple[int, int]:
        before = max(position - self.ratio, 0)
        return self.slot(request, before) // self.ratio, self.slot(request, position) // self.ratio

    def decode(self, lengths: list[int]) -> Any:
        rows = [(n, self.slot(r, n - 1), *self.groups(r, n - 1)) for r, n in enumerate(lengths)]
        return Decode(self.ratio, torch.tensor(rows, dtype=torch.int32).view(torch.uint8).view(-1, 16))

    def prefill(self, spans: list[tuple[int, int]], padding: int) -> Any:
        """Of requests with positions first to stop - 1, in the order in which threads may write it."""
        closing, saving, row = [], [], 0
        spare = self.ring - self.window + 2 if self.ring > self.window else 0
        for request, (first, stop) in enumerate(spans):
            kept = min(stop // self.ratio * self.ratio - (4 if self.ratio == 4 else 0), stop - spare)
            for j, position in enumerate(range(first, stop)):
                if (position + 1) % self.ratio == 0:
                    older = self.window - min(j + 1, self.window)
                    groups = self.groups(request, position) if older else (-1, request)
                    closing.append((position + 1, row | older << 16, *groups))
                if position >= kept or (self.ratio == 4 and position % self.page >= self.page - 4):
                    saving.append((row, self.slot(request, position)))
                row += 1
        closing = [*reversed(closing), *[(-1, 0, -1, -1)] * padding]
        saving = [*reversed(saving), *[(-1, -1)] * padding]
        made = [torch.tensor(rows, dtype=torch.int32).view(torch.uint8) for rows in (closing, saving)]
        return Prefill(self.ratio, made[0].view(-1, 16), made[1].view(-1, 8))


class Decode(NamedTuple):
    compress_ratio: int
    plan_d: torch.Tensor
    is_decode: bool = True


class Prefill(NamedTuple):
    compress_ratio: int
    plan_c: torch.Tensor
    plan_w: torch.Tensor
    is_decode: bool = False


@pytest.mark.parametrize(("ratio", "of_indexer"), [(4, False), (4, True), (128, False)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_compressor_reads_plans(engine: SimpleNamespace, ratio: int, of_indexer: bool, drafts: int) -> None:
    """Chunks, tokens and drafted tokens, some of which are run again: the entries of one long step without rings, and
    in the rings what the engine has, projections without their bias."""
    requests, tokens = 3, 300 if ratio == 128 else 90
    table = torch.randperm(requests * (tokens // PAGE + 1), generator=generator(7)).view(requests, -1)
    rings = Rings(ratio, (2 if drafts else 1) * (8 if ratio == 4 else 128), table, PAGE)
    fmt: Any = formats.INDEXER_FP8 if of_indexer else formats.FP8_DS_MLA
    dim, g = fmt.dim, generator(ratio + drafts)
    width = dim * (2 if ratio == 4 else 1)
    history = torch.randn(requests, tokens, 2 * width, generator=g)
    ape = torch.randn(ratio, width, generator=g)
    halves = torch.cat(ape.chunk(2, dim=1)).view(4, -1) if ratio == 4 else ape
    norm = SimpleNamespace(weight=torch.randn(dim, generator=g), variance_epsilon=1e-6)
    angles = torch.arange(tokens)[:, None] * torch.rand(32, generator=g)
    turns = torch.polar(torch.ones_like(angles), angles)
    states = torch.full((rings.rows, 2 * width), torch.nan)
    entries = tokens // ratio
    page_rows = 64 // ratio + 1
    pages = -(-requests * entries // page_rows) + 1
    caches = [
        torch.full((pages, -(-fmt.row_elements * page_rows // 576) * 576), 3, dtype=torch.uint8) for _ in range(2)
    ]

    def slots(request: int, first: int, stop: int) -> torch.Tensor:
        """Of the entries that close; the engine has some slot where none does."""
        at = torch.arange(first, stop)
        return torch.where((at + 1) % ratio == 0, 1 + request * entries + at // ratio, 0)

    backend = engine.backend(plans={})

    def run(plan: Any, spans: list[tuple[int, int]], layer: int, projected: torch.Tensor | None = None) -> None:
        backend.plans[ratio] = plan
        if projected is None:
            projected = torch.cat([history[r, a:b] for r, (a, b) in enumerate(spans)])
        call = {
            "kv_score_buffer": states, "kv_score_input": projected, "ape": halves, "head_dim": dim, "norm": norm,
            "freqs_cis_cache": turns, "kv_cache": caches[0], "is_indexer": of_indexer, "rotate": of_indexer,
            "compress_ratio": ratio, "page_size": page_rows, "use_fp4_indexer": False, "bf16_store": False,
            "out_loc": torch.cat([slots(r, a, b) for r, (a, b) in enumerate(spans)]),
        }  # fmt: skip
        assert set(call) <= seams.KEYWORDS["sglang"][seams.COMPRESSOR_V2]["self._forward_compress_all_in_one"]
        backend.forward_core_compressor(None, None, layer, call)

    done = [0, 0, 0]
    while min(done) < tokens:
        size = int(torch.randint(1, 2 * rings.window, (1,), generator=g))
        if min(done) > rings.window and drafts and max(done) + drafts <= tokens:
            spans = [(n, n + drafts) for n in done]
            rejected = int(torch.randint(0, drafts, (1,), generator=g))
            projected = torch.cat([history[r, a:b] for r, (a, b) in enumerate(spans)])
            if rejected:
                projected.view(requests, drafts, -1)[:, drafts - rejected :] += 1
            run(rings.prefill(spans, 5), spans, 2, projected)
            done = [n + drafts - rejected for n in done]
            continue
        if max(done) < tokens and min(done) > 0 and size % 2:
            spans = [(n, n + 1) for n in done]
            run(rings.decode([n + 1 for n in done]), spans, 2)
        else:
            spans = [(n, min(n + max(size - r, 1), tokens)) for r, n in enumerate(done)]
            if any(a == b for a, b in spans):
                break
            run(rings.prefill(spans, size % 3), spans, 2)
        done = [b for _, b in spans]
    assert min(done) > 2 * rings.window
    assert not hasattr(backend, "done")
    for r, n in enumerate(done):
        for p in range(n - 1, n // ratio * ratio - (4 if ratio == 4 else 0) - 1, -1):
            assert torch.equal(states[rings.slot(r, p)], history[r, p]), (r, p)
    plain = torch.zeros(requests * tokens, 1, 2 * width)
    at = torch.cat([torch.arange(n) for n in done])
    owner = torch.repeat_interleave(torch.arange(requests, dtype=torch.int32), torch.tensor(done))
    fused_compress_norm_rope_store(
        torch.cat([history[r, :n] for r, n in enumerate(done)]), ape, at, owner,
        torch.tensor([0, *torch.tensor(done).cumsum(0).tolist()], dtype=torch.int32), plain, owner * tokens + at,
        torch.full((requests, tokens), -1, dtype=torch.int32), torch.cat([angles.cos(), angles.sin()], 1),
        caches[1][:, : fmt.row_elements * page_rows].view(pages, page_rows, -1),
        torch.cat([slots(r, 0, n) for r, n in enumerate(done)]), norm.weight, 1e-6, ratio, kv_format=fmt.id,
        index_hadamard=of_indexer,
    )  # fmt: skip
    assert torch.equal(caches[0], caches[1])


def test_a_plan_is_read_once_for_all_layers_of_a_step(engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass begins where layers begin again, also if the engine writes its next plan into the same memory; a captured
    graph reads the plan itself."""
    reads: list[int] = []
    monkeypatch.setattr(plugin, "read_plan", lambda plan, ratio, rows: reads.append(ratio))
    states, first, second = plugin.States(), Decode(4, torch.zeros(1, 16)), Decode(4, torch.zeros(1, 16))
    for plan, layer, of_indexer, is_in_graph, read in (
        (first, 2, False, False, True),
        (first, 2, True, False, True),  # on another stream
        (first, 4, False, False, False),
        (first, 4, True, False, False),
        (first, 6, False, True, True),
        (first, 8, False, True, False),
        (first, 2, False, True, True),
        (first, 4, False, True, False),
        (second, 6, False, True, True),
    ):
        reads.clear()
        monkeypatch.setattr(plugin, "is_capturing", lambda now=is_in_graph: now)
        states.layer = layer
        states._step(plan, 4, of_indexer, 1)
        assert bool(reads) == read, (layer, of_indexer, is_in_graph)


def test_other_states_are_the_engines(engine: SimpleNamespace) -> None:
    backend = engine.backend(plans={})
    call = {
        "kv_score_buffer": torch.zeros(8, 1024), "kv_score_input": torch.zeros(1, 1024), "compress_ratio": 128,
        "freqs_cis_cache": torch.zeros(1), "ape": torch.zeros(1),
    }  # fmt: skip
    for changed in (
        {"kv_score_buffer": torch.zeros(8, 1024).bfloat16()},
        {"kv_score_buffer": torch.zeros(8, 1536)},
        {"use_fp4_indexer": True},
        {"bf16_store": True},
        {"kv_layout": SimpleNamespace(name="V41")},
    ):
        backend.done = ""
        backend.forward_indexer_compressor(None, None, 0, {**call, **changed})
        assert backend.done == "the engine's compressor"
