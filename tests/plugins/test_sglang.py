# SPDX-License-Identifier: Apache-2.0
"""SGLang's backend with the plug-in's subclass, on the CPU: calls have the keywords of seams.py."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import formats, quantize_and_insert_k_cache, sparse_mla_decode, sparse_mla_prefill
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

    class MQALayer:
        n_local_heads = HEADS

        def _kernel_num_heads(self, num_tokens: int) -> int:
            return 64

    kernels.flash_mla_sparse_fwd = flash_mla_sparse_fwd  # type: ignore[attr-defined]
    backend.DeepseekV4AttnBackend = DeepseekV4AttnBackend  # type: ignore[attr-defined]
    model.MQALayer = MQALayer  # type: ignore[attr-defined]
    for module in (kernels, backend, model):
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
        "cute_kernels: in use in sglang 0.5.23: CuteKernelsDeepseekV4AttnBackend with decode, prefill; 3 heads"
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
