# SPDX-License-Identifier: Apache-2.0
"""vLLM's own attention layers, small ones, with the plug-in over them: `python -m tests.plugins.real_vllm` in an
environment of scripts/test_engines.sh, on a CPU; with the argument cuda on a GPU.

The engine constructs the layers, binds caches whose pages lie apart as its own do, and runs its step between the
linears and the projection: once for a prefill, then for the last rows as a decode batch, which must agree; on a GPU on
three streams more, and once more in a captured graph. The platform is one that says it is a Hopper.

On a CPU, with TRITON_INTERPRET=1 and CUDA_VISIBLE_DEVICES empty, the engine's own builders then make the metadata, of
rows that are drafted tokens to an engine that drafts, and a prefill to one that does not: both must agree. On a GPU,
`python -m perf engines` has the engine's own kernels beside it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from cute_kernels.plugins import VARIABLE, vllm
from perf import engine_layers
from tests.plugins import seams, stubs
from tests.plugins.fake_vllm import DECODES, MAX_LEN, MAX_TOKENS, TOKENS, TOP_K, metadata

LAYERS = (0, 3, 43)
"""Of ratio 128, of ratio 4, and the draft's, which has a window alone."""


def prepare(device: str) -> Any:
    """Import the engine under a platform that is not there; returns its model's module."""
    stubs.install("xgrammar", "llguidance")
    library = torch.library.Library("_C", "FRAGMENT")
    for name in ("cutlass_scaled_mm_supports_block_fp8", "cutlass_scaled_mm_supports_fp8"):
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    prepare.library = library  # type: ignore[attr-defined]
    import vllm.platforms as platforms
    from vllm.platforms.interface import DeviceCapability, PlatformEnum, UnspecifiedPlatform

    class Hopper(UnspecifiedPlatform):
        _enum, device_type, device_name, dispatch_key = PlatformEnum.CUDA, device, "cuda", device.upper()

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a Hopper"

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

    platforms._current_platform = Hopper()
    for name in ("_vllm_fa2_C", "_vllm_fa3_C"):
        sys.modules[f"vllm.vllm_flash_attn.{name}"] = ModuleType(name)
    if device == "cpu":
        torch.cuda.Event = lambda *args, **kwargs: None  # type: ignore[assignment, misc]
        torch.accelerator.empty_cache = lambda: None

    os.environ[VARIABLE] = "all"
    vllm.register()
    assert vllm.MODEL not in sys.modules
    import vllm.models.deepseek_v4.nvidia.model as model

    assert model._select_dsv4_attn_cls.of_cute_kernels
    import vllm.model_executor.layers.sparse_attn_indexer as indexer

    indexer.has_deep_gemm = lambda: True
    import vllm.v1.attention.backends.mla.indexer as builders

    builders.has_deep_gemm = lambda: False
    return model


def make_config() -> Any:
    from transformers import DeepseekV4Config
    from vllm.config import VllmConfig

    sizes = DeepseekV4Config(
        hidden_size=256, num_attention_heads=4, q_lora_rank=128, o_lora_rank=128, o_groups=2, index_topk=TOP_K
    )
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        hf_config=sizes, hf_text_config=sizes, max_model_len=MAX_LEN, dtype=torch.bfloat16, is_moe=False,
        architectures=["DeepseekV4ForCausalLM"], use_mla=True, enforce_eager=True, runner_type="generate",
    )  # fmt: skip
    config.quant_config = None
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.cache_config.block_size, config.cache_config.cache_dtype = 256, "fp8"
    config.kernel_config.enable_jit_warmup = False
    config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs = MAX_TOKENS, 8
    return config


def bind_caches(config: Any, prefix: str) -> None:
    """Pages as the specifications have them, as far apart as three layers' pages."""
    for name, layer in config.compilation_config.static_forward_context.items():
        spec = layer.get_kv_cache_spec(config) if name.startswith(prefix) else None
        if spec is None:
            continue
        assert spec.page_size_bytes % 576 == 0, (name, spec.page_size_bytes)
        dtype = torch.float32 if name.endswith("state_cache") else torch.uint8
        rows = spec.block_size // getattr(spec, "tokens_per_state", 1)
        columns = {"swa_cache": 584, "k_cache": 132}.get(name.rpartition(".")[2], 584)
        if dtype == torch.float32:
            columns = spec.head_size
        stride = 3 * spec.page_size_bytes // dtype.itemsize
        pages = 4 if dtype == torch.uint8 else -(-TOKENS // rows) + 1
        cache = torch.zeros(pages * stride, dtype=dtype).as_strided((pages, 1, rows, columns), (stride, 0, columns, 1))
        layer.bind_kv_cache(cache)


def real(found: dict[str, Any], layer: Any) -> dict[str, Any]:
    """The metadata of fake_vllm.py as the engine's own classes."""
    import importlib

    kinds: dict[frozenset[str], type] = {}
    for file, classes in seams.FIELDS["vllm"].items():
        for name, fields in classes.items():
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            kinds[frozenset(fields)] = getattr(module, name)

    def convert(value: Any) -> Any:
        if isinstance(value, list):
            return [convert(item) for item in value]
        if not isinstance(value, SimpleNamespace):
            return value
        values = {name: convert(held) for name, held in vars(value).items()}
        kind = kinds[frozenset(values)]
        needed = {f.name: None for f in dataclasses.fields(kind) if f.default is f.default_factory}
        return kind(**(needed | {name: held for name, held in values.items() if held is not None}))

    made = {prefix: convert(value) for prefix, value in found.items()}
    swa = made[layer.swa_cache_layer.prefix]
    if layer.indexer is not None:
        of_indexer = made[layer.indexer.k_cache.prefix]
        of_indexer.max_seq_len, of_indexer.num_decodes = 1 << 20, swa.num_decodes
        of_indexer.num_prefill_tokens = TOKENS if of_indexer.num_prefills else 0
    return made


def run(layer: Any, inputs: dict[str, Any], rows: slice, found: Any) -> torch.Tensor:
    """The engine's step of some rows, from the linears' results to attention's."""
    from vllm.forward_context import override_forward_context

    given = {name: None if value is None else value[rows] for name, value in inputs.items()}
    count = given["positions"].shape[0]
    out = torch.full((count, layer.padded_heads, layer.head_dim), torch.nan, dtype=torch.bfloat16)
    context = SimpleNamespace(attn_metadata=found, cudagraph_runtime_mode=None, additional_kwargs={})
    with override_forward_context(context):
        qr, scale, kv = layer._split_qkv_and_norm(given["qr_kv"])
        layer._prepare_and_attn(
            given["hidden_states"], qr, kv, scale, given["kv_score"], given["indexer_kv_score"],
            given["indexer_weights"], given["positions"], out,
        )  # fmt: skip
    return out


def check(layer: Any) -> None:
    generator = torch.Generator().manual_seed(layer.compress_ratio)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(torch.get_default_device())

    for name, parameter in layer.named_parameters():
        parameter.data.copy_(1 + 0.1 * draw(*parameter.shape) if "norm" in name else 0.1 * draw(*parameter.shape))
    width = {1: 0, 4: 2048, 128: 1024}[layer.compress_ratio]
    inputs: dict[str, Any] = {
        "hidden_states": draw(TOKENS, 256).bfloat16(),
        "qr_kv": draw(TOKENS, layer.q_lora_rank + layer.head_dim).bfloat16(),
        "kv_score": draw(TOKENS, width) if width else None,
        "indexer_kv_score": draw(TOKENS, 512) if layer.indexer is not None else None,
        "indexer_weights": draw(TOKENS, 64).bfloat16() if layer.indexer is not None else None,
        "positions": torch.arange(TOKENS),
    }
    dummy = run(layer, inputs, slice(0, TOKENS), None)
    assert not dummy.any()
    whole = run(layer, inputs, slice(0, TOKENS), real(metadata(layer, decodes=False), layer))
    form = vllm.sparse_mla_prefill_paged_form
    vllm.sparse_mla_prefill_paged_form = lambda *step, **more: "paged"
    paged = run(layer, inputs, slice(0, TOKENS), real(metadata(layer, decodes=False), layer))
    vllm.sparse_mla_prefill_paged_form = form
    torch.testing.assert_close(paged, whole, atol=0.02, rtol=0.02)
    last = slice(TOKENS - DECODES, TOKENS)
    decoded = run(layer, inputs, last, real(metadata(layer, decodes=True), layer))
    torch.testing.assert_close(decoded, whole[last], atol=0.02, rtol=0.02)
    assert whole.isfinite().all()
    if decoded.is_cuda:
        found, graph = real(metadata(layer, decodes=True), layer), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            again = run(layer, inputs, last, found)
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, decoded)
    project(layer, whole, inputs["positions"] * 0)


def project(layer: Any, o: torch.Tensor, positions: torch.Tensor) -> None:
    """With FP8 weights as the engine leaves them, a scale for 128 x 128. Nothing is turned at position 0."""
    groups, width = layer.n_local_groups, o.shape[1] // layer.n_local_groups * 512
    weight = torch.randn(groups, layer.o_lora_rank, width, dtype=torch.float32).to(torch.float8_e4m3fn)
    layer.wo_a.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.wo_a.weight_scale_inv = torch.full((groups, layer.o_lora_rank // 128, width // 128), 0.5, dtype=torch.float32)
    got = layer._o_proj(o, positions).float()
    z = torch.einsum("tgk,grk->tgr", o.float().view(-1, groups, width), weight.float() * 0.5)
    expected = layer.wo_b(z.bfloat16().flatten(1)).float()
    assert ((got - expected).norm() / expected.norm()) < 0.1


def main(device: str = "cpu") -> None:
    model = prepare(device)
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
    from vllm.v1.worker.workspace import init_workspace_manager

    config = make_config()
    with set_current_vllm_config(config), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device(device))
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device(device)
        streams = [torch.cuda.Stream() for _ in range(3)] if device == "cuda" else None
        buffer = torch.full((MAX_TOKENS, TOP_K), -1, dtype=torch.int32)
        kind = model._select_dsv4_attn_cls(config)
        assert issubclass(kind, DeepseekV4FlashMLAAttention)
        for number in LAYERS:
            prefix = f"model.layers.{number}.attn"
            layer = kind(config, prefix=prefix, topk_indices_buffer=buffer, aux_stream_list=streams)
            bind_caches(config, prefix)
            check(layer)
            parts = [layer, layer.compressor, layer.indexer, getattr(layer.indexer, "indexer_op", None)]
            names = ", ".join(type(part).__name__ for part in parts if part is not None)
            print(f"layer {number}: {names}; {layer.padded_heads} heads", flush=True)
        (said,) = vllm.PLUGIN.said
        assert said.startswith("in use in vllm"), said
        if device == "cuda":
            build(config)
        else:
            check_builders(model)
    print(f"vllm: layers were constructed and ran: {said}")


def check_builders(model: Any) -> None:
    """Both classes of a batch, prefill and decode, by the engine's builders."""
    import vllm.v1.attention.backends.mla.sparse_swa as builders

    builders.get_mla_metadata = lambda: (SimpleNamespace(),)
    batch = engine_layers.Batch("", ((3, 300), (3, 77)))
    hidden = torch.randn(batch.rows, 256).bfloat16()
    sizes = engine_layers.Sizes(
        ("swa", "c4a", "c128a"), heads=4, groups=2, hidden=256, q_lora_rank=128, o_lora_rank=128, top_k=TOP_K,
        fp8=False, max_len=MAX_LEN, max_rows=64, max_requests=8,
    )  # fmt: skip
    results = []
    for drafts in (0, 2):
        engine = engine_layers.Engine(model, replace(sizes, drafts=drafts), "cpu", (engine_layers.OURS,))
        engine.bind_caches([batch])
        found, positions = engine.build(batch)
        swa = next(m for name, m in found.items() if name.endswith("swa_cache"))
        assert (swa.num_decodes, swa.num_prefills) == ((2, 0) if drafts else (0, 2))
        with engine.without_linears(batch.rows, fresh=True):
            results.append([engine.run(engine_layers.OURS, n, hidden, found, positions) for n in range(3)])
    for prefilled, decoded in zip(*results, strict=True):
        assert prefilled.any()
        torch.testing.assert_close(decoded, prefilled, atol=0.02, rtol=0.02)


def build(config: Any) -> None:
    """The engine's own metadata builders take what the layers say of their caches."""
    for name, layer in config.compilation_config.static_forward_context.items():
        spec = layer.get_kv_cache_spec(config)
        if spec is None:
            continue
        builder = layer.get_attn_backend().get_builder_cls()
        width = {"block_table_width": 16} if getattr(builder, "requires_block_table_width", False) else {}
        builder(spec, [name], config, torch.device(torch.get_default_device()), **width)


if __name__ == "__main__":
    main(*sys.argv[1:])
