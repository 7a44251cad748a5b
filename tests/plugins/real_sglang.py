# SPDX-License-Identifier: Apache-2.0
"""SGLang's own modules on a CPU with the plug-in over them: `python -m tests.plugins.real_sglang` in an environment of
scripts/test_engines.sh; with the argument cuda on a GPU.

They are imported, and have the plug-in's class, function and head count where they use them. The backend, made by its
constructor, runs steps with its own metadata (sglang_steps.py). Then its attention, over caches and metadata made by
hand, runs the same rows as a decode and as a sparse prefill, and its indexer, with scores and top-k by torch, picks the
same entries as the plug-in's. On a GPU the backend without the plug-in runs the same, by FlashMLA's kernels: of its own
package or of vLLM's.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.plugins import stubs
from tests.plugins.fake_vllm import draw
from tests.plugins.sglang_steps import DRAFTS, check_steps, plan_by_hand

ROWS, HEADS, SWA_ROWS, ENTRIES = 5, 8, 256, 64
"""Rows and heads of a step, and rows of a page of each cache: records of 584 bytes in pages of multiples of 576."""


def main(device: str = "cpu") -> None:
    # before the stub of torchvision, whose version transformers asks for
    importlib.import_module("transformers.models.auto.image_processing_auto")
    importlib.import_module("transformers.models.auto.processing_auto")
    stubs.install("IPython", "flash_mla", "sentencepiece", "torchvision")
    if device == "cuda" and isinstance(importlib.import_module("flash_mla"), stubs.StubModule):
        take_vllms_kernels()
    from cute_kernels.plugins import VARIABLE, sglang

    os.environ[VARIABLE] = "all"
    os.environ["SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"] = "1"
    sglang.register()
    assert not {sglang.BACKEND, sglang.KERNELS, sglang.MODEL} & {*sys.modules}
    backend, kernels, model = (importlib.import_module(n) for n in (sglang.BACKEND, sglang.KERNELS, sglang.MODEL))
    kind = backend.DeepseekV4AttnBackend
    assert issubclass(kind, sglang.Backend)
    assert kind.__mro__[2].__module__ == sglang.BACKEND
    others = importlib.import_module("sglang.srt.layers.attention.deepseek_v4_trtllm_backend")
    assert others.DeepseekV4AttnBackend is kind
    assert getattr(kernels, sglang.PREFILL).__module__ == sglang.__name__
    layer = SimpleNamespace(n_local_heads=8, is_dsv41=False, attn_tp_size=8)
    sglang.State.serves = True
    assert model.MQALayer._kernel_num_heads(layer, 1) == 8
    with torch.no_grad(), torch.device(device):
        run_steps(backend, sglang.Backend, device)
        check(backend, kernels, sglang.Backend)
    print(f"sglang: modules were patched, attention ran: {', '.join(sglang.PLUGIN.said)}")


def run_steps(module: Any, mixin: type, device: str) -> None:
    """By the engine's constructors, without a configuration of a server."""
    context = importlib.import_module("sglang.srt.runtime_context")
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
    kind = module.DeepseekV4AttnBackend
    kinds = [kind, kind.__mro__[kind.__mro__.index(mixin) + 1]]
    if device == "cpu":
        # it has kernels and a planner on GPUs alone, and its prefill a gather
        module.is_cuda = lambda: True
        module._create_flashmla_metadata = lambda: None
        module.create_paged_compressor_data = plan_by_hand
        kind._use_sparse_prefill = lambda self, *args, **kwargs: False
    wrong = []
    for drafts in ({}, {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": DRAFTS}):
        options = drafts and {**drafts, "speculative_eagle_topk": 1, "speculative_num_steps": DRAFTS - 1}
        context._CONTEXT.set_server_args(arguments(model_path="none", **options))
        wrong += check_steps(
            kinds if device == "cuda" else kinds[:1], device, 64 if device == "cuda" else HEADS, drafts=bool(drafts)
        )
    assert not wrong, "\n".join(wrong)
    if device == "cpu":
        del kind._use_sparse_prefill


def take_vllms_kernels() -> None:
    """FlashMLA's functions from vLLM's copy, without the keywords that only its own package has."""
    copy = importlib.import_module("vllm.third_party.flashmla.flash_mla_interface")
    own, interface = (importlib.import_module(name) for name in ("flash_mla", "flash_mla.flash_mla_interface"))
    vars(interface)["FlashMLASchedMeta"], vars(own)["get_mla_metadata"] = copy.FlashMLASchedMeta, copy.get_mla_metadata

    def call(function: Any, *args: Any, **options: Any) -> Any:
        known = inspect.signature(function).parameters
        return function(*args, **{name: value for name, value in options.items() if name in known})

    for name in ("flash_mla_with_kvcache", "flash_mla_sparse_fwd"):
        vars(own)[name] = partial(call, getattr(copy, name))


def make_pool(backend: ModuleType) -> Any:
    from cute_kernels import formats, quantize_and_insert_k_cache

    layout = importlib.import_module("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout.V4
    raw = []
    for seed, rows in enumerate((SWA_ROWS, ENTRIES)):
        stride = -(-584 * rows // 576) * 576
        pages = torch.zeros(2, stride, dtype=torch.uint8)
        keys = draw(torch.Generator().manual_seed(seed), 2 * rows, 512).bfloat16()
        cache = pages[:, : 584 * rows].view(2, rows, formats.FP8_DS_MLA.row_elements)
        quantize_and_insert_k_cache(keys, cache, torch.arange(2 * rows), rows)
        raw.append(pages)

    class Pool(backend.DeepSeekV4TokenToKVPool):  # type: ignore[name-defined]
        request_window, kv_layout = None, layout

        def __init__(self) -> None:
            pass

        def get_swa_key_buffer_radix(self, layer_id: int) -> torch.Tensor:
            return raw[0]

        def get_extra_key_buffer(self, layer_id: int) -> torch.Tensor:
            return raw[1]

        def get_swa_key_page_size(self) -> int:
            return SWA_ROWS

        def get_extra_key_page_size(self, layer_id: int) -> int:
            return ENTRIES

        def get_swa_key_bytes_per_token(self) -> int:
            return 584

        def get_extra_key_bytes_per_token(self, layer_id: int) -> int:
            return 584

        def get_swa_key_layout(self) -> Any:
            return layout

        def get_extra_key_layout(self, layer_id: int) -> Any:
            return layout

    return Pool()


def gather(cache: torch.Tensor, ids: torch.Tensor, page_size: int, out: torch.Tensor, layout: Any) -> None:
    """In place of the engine's Triton kernel."""
    from cute_kernels import dequantize_and_gather_k_cache

    pages = cache[:, : 584 * page_size].view(cache.shape[0], page_size, 584)
    table = torch.arange(cache.shape[0], dtype=torch.int32)[None]
    rows = torch.zeros(1, cache.shape[0] * page_size, 512, dtype=torch.bfloat16)
    lens = torch.tensor([rows.shape[1]], dtype=torch.int32)
    dequantize_and_gather_k_cache(rows, pages, lens, None, table, page_size, 0)
    out.copy_(rows[0, ids.long()].view(out.shape))


def check(module: ModuleType, kernels: ModuleType, mixin: type) -> None:
    kind: Any = module.DeepseekV4AttnBackend
    engines = kind.__mro__[kind.__mro__.index(mixin) + 1]
    pool = make_pool(module)
    generator = torch.Generator().manual_seed(3)

    def choose(most: int, columns: int) -> torch.Tensor:
        chosen = torch.randint(0, most, (ROWS, columns), generator=generator, dtype=torch.int32, device="cpu")
        return chosen.to(torch.get_default_device())

    is_cuda = torch.get_default_device().type == "cuda"
    heads = 64 if is_cuda else HEADS  # FlashMLA has 64
    core = module.DSV4AttnMetadata.__new__(module.DSV4AttnMetadata)
    core.swa_page_indices, core.swa_topk_lengths = choose(2 * SWA_ROWS, 128), torch.tensor([128, 1, 70, 5, 64]).int()
    core.c4_sparse_page_indices, core.c4_sparse_topk_lengths = (
        choose(2 * ENTRIES, 64),
        torch.tensor([64, 1, 3, 9, 1]).int(),
    )
    core.c4_sparse_page_indices[1] = -1  # a row that sees no entry has a length of 1 all the same
    core.c0_flashmla_metadata, core.c4_flashmla_metadata = (
        sys.modules["flash_mla"].get_mla_metadata()[0] if is_cuda else None for _ in range(2)
    )
    # the workspace of the prefill: all entries, then all rows of the window's cache
    entries = torch.where(core.c4_sparse_page_indices >= 0, core.c4_sparse_page_indices, -1)
    combined = torch.full((ROWS, 256), -1, dtype=torch.int32)
    lens = core.c4_sparse_topk_lengths + core.swa_topk_lengths
    for row in range(ROWS):
        own, window = int(core.c4_sparse_topk_lengths[row]), int(core.swa_topk_lengths[row])
        combined[row, :own] = entries[row, :own]
        combined[row, own : own + window] = core.swa_page_indices[row, :window] + 2 * ENTRIES
    workspace = torch.zeros(2 * (ENTRIES + SWA_ROWS), 1, 512, dtype=torch.bfloat16)
    ids = torch.arange(2 * SWA_ROWS, dtype=torch.int32)
    prefill = SimpleNamespace(
        swa_token_ids=ids,
        swa_page_size=SWA_ROWS,
        c0_combined_indices=torch.where(torch.arange(128) < core.swa_topk_lengths[:, None], core.swa_page_indices, -1),
        c0_combined_lens=core.swa_topk_lengths,
        layer_inputs=lambda ratio, metadata, page_size: (ids[: 2 * ENTRIES], combined, lens),
    )

    def initialize(self: Any) -> None:
        self.is_dsv41 = self._swa_interleaved = self.mtp_enabled = False
        self.hisparse_coordinator, self.token_to_kv_pool, self.softmax_scale, self.head_dim_v = (
            None,
            pool,
            512**-0.5,
            512,
        )
        self.dsv4_prefill_backend = None
        self.sparse_prefill_kv_buffer = SimpleNamespace(
            get=lambda rows: workspace[:rows], get_with_head=lambda rows, head_source: (workspace[:rows], False)
        )
        self.forward_metadata = SimpleNamespace(
            core_attn_metadata=core, sparse_prefill_cache=prefill, late_layer_tail=None
        )
        self._flash_mla_with_kvcache = kernels.flash_mla_with_kvcache

    engines.__init__ = initialize
    module.is_cp_active = lambda forward_batch: False  # type: ignore[attr-defined]
    module.use_dsv4_q8kv8_sparse_prefill = lambda chosen: False  # type: ignore[attr-defined]
    if not is_cuda:
        module.dequantize_k_cache_paged_dsv4 = gather  # type: ignore[attr-defined]
    module.get_platform = lambda: SimpleNamespace(is_sm120=False, is_sm100=False)  # type: ignore[attr-defined]
    backend = kind()
    q, key = draw(generator, ROWS, heads, 512).bfloat16(), torch.zeros(ROWS, 512).bfloat16()

    def attend(own: Any, is_prefill: bool, ratio: int) -> torch.Tensor:
        mode = SimpleNamespace(is_idle=lambda: False, is_extend_without_speculative=lambda: is_prefill)
        found: torch.Tensor = own._forward_attention(
            q, key, key, SimpleNamespace(layer_id=0, tp_q_head_num=heads), SimpleNamespace(forward_mode=mode),
            compress_ratio=ratio, save_kv_cache=False, attn_sink=torch.zeros(heads),
        )  # fmt: skip
        return found

    for ratio in (0, 4):
        sides = (backend, engines()) if is_cuda else (backend,)
        found = [attend(own, is_prefill, ratio) for own in sides for is_prefill in (False, True)]
        for other in found[1:]:
            torch.testing.assert_close(found[0], other, atol=0.01, rtol=0.02)
        assert found[0].shape == (ROWS, heads, 512)
        assert found[0].any()
    if is_cuda:
        check_graphs(partial(attend, backend, False), partial(attend, engines(), False), core, q)
    check_indexer(backend)


def check_graphs(ours: Any, theirs: Any, core: Any, q: torch.Tensor) -> None:
    """A decode step that was captured once takes the metadata and queries that its tensors hold at each replay: other
    slots, longer and shorter rows, rows that are padding. FlashMLA's plan is not in ours."""
    g = torch.Generator().manual_seed(17)
    graphs = {}
    for ratio in (0, 4):
        ours(ratio)  # compiles, as the engine's warm-up does
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ours(ratio)
        graphs[ratio] = graph, out
    first = core.c4_sparse_topk_lengths.clone()
    for step in range(3):
        q.copy_(draw(g, *q.shape).bfloat16())
        for pages, lens, most in (
            (core.swa_page_indices, core.swa_topk_lengths, 2 * SWA_ROWS),
            (core.c4_sparse_page_indices, core.c4_sparse_topk_lengths, 2 * ENTRIES),
        ):
            pages.copy_(torch.randint(0, most, pages.shape, generator=g, dtype=torch.int32, device="cpu"))
            lens.copy_(torch.randint(1, pages.shape[1] + 1, lens.shape, generator=g, dtype=torch.int32, device="cpu"))
        # what the engine has in the rows of a graph that no request has: slot 0, and no entry
        core.swa_page_indices[step + 2 :], core.swa_topk_lengths[step + 2 :] = 0, 1
        core.c4_sparse_page_indices[step + 2 :], core.c4_sparse_topk_lengths[step + 2 :] = -1, 1
        assert not torch.equal(core.c4_sparse_topk_lengths, first)
        for ratio, (graph, out) in graphs.items():
            out.fill_(torch.nan)
            graph.replay()
            for name in ("c0_flashmla_metadata", "c4_flashmla_metadata"):
                setattr(core, name, sys.modules["flash_mla"].get_mla_metadata()[0])
            torch.testing.assert_close(out, theirs(ratio), atol=0.01, rtol=0.02)
            assert torch.equal(out, ours(ratio))


def check_indexer(backend: Any) -> None:
    """The engine's own is what runs if another top-k than its kernel's is chosen."""
    indexer = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")
    kinds = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_topk_backend").DSATopKBackend
    metadata = importlib.import_module("sglang.srt.layers.attention.dsv4.metadata")
    indexer.get_global_indexer_capturer = lambda: None  # type: ignore[attr-defined]
    top_k, pages, g = 64, 3, torch.Generator().manual_seed(5)
    cache = torch.zeros(pages, 64 * 132, dtype=torch.uint8)
    cache[:, : 64 * 128] = draw(g, pages, 64 * 128).to(torch.float8_e4m3fn).view(torch.uint8)
    cache[:, 64 * 128 :] = (draw(g, pages, 64).abs() + 0.5).view(torch.uint8)
    prepared = draw(g, ROWS, 64, 128).to(torch.float8_e4m3fn), draw(g, ROWS, 64, 1)
    core = backend.forward_metadata.core_attn_metadata
    core.positions_casual = torch.arange(ROWS)
    paged = metadata.PagedIndexerMetadata(
        page_size=256, compressed_page_size=64, use_topk_v2=False,
        page_table=torch.tensor([[2, 0, 1]], dtype=torch.int32).repeat(ROWS, 1),
        compressed_seq_lens=torch.tensor([0, 5, 64, 100, 192], dtype=torch.int32),
    )  # fmt: skip
    backend.forward_metadata = SimpleNamespace(core_metadata=core, indexer_metadata=paged)
    backend.token_to_kv_pool = SimpleNamespace(get_index_k_with_scale_buffer=lambda layer_id: cache)
    backend._forward_prepare_normal = lambda **call: prepared
    backend.debug_use_external_c4_sparse_indices = False
    c4 = SimpleNamespace(layer_id=3, index_topk=top_k, use_fp4_indexer=False)
    step = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True))
    found = []
    for has_entries in (False, True):
        for kind in (kinds.TORCH, kinds.SGL_KERNEL):
            backend.dsa_topk_backend = kind
            core.c4_sparse_page_indices, entries = torch.full((2, ROWS, top_k), 7, dtype=torch.int32)
            core.c4_sparse_raw_indices = entries if has_entries else None
            backend.forward_c4_indexer(
                x=torch.zeros(ROWS, 1), q_lora=torch.zeros(ROWS, 1), forward_batch=step, c4_indexer=c4,
                alt_streams=None, enable_multi_stream=False, q_lora_ready=None, skip_compressor=False,
            )  # fmt: skip
            found.append([core.c4_sparse_page_indices, entries])
    for theirs, ours in zip(found[::2], found[1::2], strict=True):
        for one, other in zip(theirs, ours, strict=True):
            assert torch.equal(one.sort().values, other.sort().values)
    assert (found[3][1][:, 0] >= 0).tolist() == [False, True, True, True, True]


if __name__ == "__main__":
    main(*sys.argv[1:])
