# SPDX-License-Identifier: Apache-2.0
"""SGLang's backend with the plug-in's subclass, on the CPU: calls have the keywords of seams.py."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import (
    formats,
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
        "cute_kernels: in use in sglang 0.5.23: CuteKernelsDeepseekV4AttnBackend with decode, prefill, indexer; 3 heads"
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
