# SPDX-License-Identifier: Apache-2.0
"""What an engine builds its layers from: specs, backends, weights that it has loaded, the op that its compiler splits
at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_kernels import formats
from layers import (
    PRESETS,
    AttentionOptions,
    BlockTables,
    CheckpointError,
    DeepseekCompressor,
    DeepseekV4FlashInferMLASparseBackend,
    DeepseekV4MLABackend,
    DeepseekV4MLAModules,
    KVCacheSpec,
    LayerCaches,
    TensorParallel,
    deepseek_v4_attention,
    engine,
    forward_context,
    get_kv_cache_spec,
    random_layer_tensors,
    register_layer,
    unregister_layer,
)
from layers.mla import DeepseekV4FlashInferMLASparseImpl, DeepseekV4MLAAttention
from tests.helpers import raw_bytes
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer, same_bytes

NAME = "layers.2.attn"
OP = torch.ops.cute_kernels.deepseek_v4_attention.default

# ---- cache specs

# (source tokens of a page, rows, bytes of the rows, bytes from page to page, window) of an engine's allocator
SPECS = {
    1: {"swa": (64, 64, 37376, 65 * 576, 128)},
    4: {
        "swa": (64, 64, 37376, 65 * 576, 128),
        "compressed": (256, 64, 37376, 65 * 576, None),
        "state": (4, 4, 32768, 57 * 576, 8),
        "indexer": (256, 64, 8448, 15 * 576, None),
        "indexer_state": (4, 4, 8192, 15 * 576, 8),
    },
    128: {
        "swa": (64, 64, 37376, 65 * 576, 128),
        "compressed": (256, 2, 1168, 3 * 576, None),
        "state": (8, 8, 32768, 57 * 576, 128),
    },
}


@pytest.mark.parametrize("ratio", KINDS)
def test_specs(ratio: int) -> None:
    specs = DeepseekV4MLABackend.get_kv_cache_spec(PRESETS["v4-flash"], ratio)
    found = {
        name: (s.block_size, s.rows, s.real_page_size_bytes, s.page_size_bytes, s.sliding_window)
        for name, s in specs.items()
    }
    assert found == SPECS[ratio]
    assert all(s.alignment == 576 for s in specs.values())


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize(("kv", "index"), [("fp8_ds_mla", "mxfp4"), ("bf16", "fp8"), ("fp8", "fp8")])
def test_specs_are_those_of_the_caches(ratio: int, kv: str, index: str) -> None:
    caches = LayerCaches.allocate(
        CONFIG, ratio, swa_blocks=3, compressed_blocks=3, state_blocks=3, kv_cache=kv, index_cache=index
    )
    specs = get_kv_cache_spec(CONFIG, ratio, kv_cache=kv, index_cache=index)
    present = {f.name: getattr(caches, f.name) for f in fields(caches) if getattr(caches, f.name) is not None}
    assert list(specs) == [name for name in SPECS[4] if name in present]
    for name, cache in present.items():
        spec = specs[name]
        assert (spec.kv_format.id, spec.rows, spec.dtype) == (cache.kv_format.id, cache.block_size, cache.data.dtype)
        assert spec.page_size_bytes == cache.data.stride(0) * cache.data.element_size()
        memory = torch.zeros(3 * spec.page_size_bytes, dtype=torch.uint8)
        view = spec.view(memory)
        assert (view.shape, view.stride(), view.dtype) == (cache.data.shape, cache.data.stride(), cache.data.dtype)


def test_pages_within_larger_blocks() -> None:
    """The last page ends with its rows, wherever the next would begin."""
    spec = KVCacheSpec(formats.FP8_DS_MLA, 256, 128)
    stride = 40 * 576
    memory = torch.zeros(2 * stride + spec.real_page_size_bytes + 3, dtype=torch.uint8)
    pages = spec.view(memory, stride)
    assert pages.shape == (3, 2, 584)
    pages[2].fill_(7)
    assert memory.nonzero().flatten().tolist() == list(range(2 * stride, 2 * stride + 2 * 584))
    assert spec.view(memory[:-4], stride).shape[0] == 2
    for wrong in (2 * 584 - 1, -576):
        with pytest.raises(ValueError, match=r"KVCacheSpec\.view: page_stride: "):
            spec.view(memory, wrong)
    with pytest.raises(ValueError, match=r"page_stride: expected a multiple of 2 "):
        KVCacheSpec(formats.PLAIN_BF16, 64).view(memory, 65537)


def test_backends() -> None:
    for backend, name, impl, caches in (
        (DeepseekV4MLABackend, "CUTE_KERNELS_MLA_DSV4", DeepseekV4MLAAttention, ("fp8_ds_mla",)),
        (
            DeepseekV4FlashInferMLASparseBackend,
            "FLASHINFER_MLA_SPARSE_DSV4",
            DeepseekV4FlashInferMLASparseImpl,
            ("bf16", "fp8"),
        ),
    ):
        assert (backend.get_name(), backend.get_impl_cls()) == (name, impl)
        assert backend.supported_kv_cache_dtypes == caches
        assert backend.supported_dtypes == (torch.bfloat16,)
        assert backend.get_supported_kernel_block_sizes() == [256]
        assert backend.get_supported_head_sizes() == [512]
        assert [backend.get_padded_num_q_heads(heads) for heads in (1, 8, 16, 100, 128)] == [1, 8, 16, 100, 128]
        assert isinstance(make_layer(1, kv_cache=caches[-1]).mla_attn, impl)
        assert backend.get_metadata_cls().__name__ + "Builder" == backend.get_builder_cls().__name__
        spec = backend.get_kv_cache_spec(CONFIG, 1)["swa"]
        assert spec == get_kv_cache_spec(CONFIG, 1, kv_cache=caches[0])["swa"]
    for heads in (0, 129):
        with pytest.raises(ValueError, match="num_heads"):
            DeepseekV4MLABackend.get_padded_num_q_heads(heads)
    with pytest.raises(ValueError, match="kv_cache"):
        DeepseekV4MLABackend.get_kv_cache_spec(CONFIG, 1, "bf16")
    with pytest.raises(ValueError, match="compress_ratio"):
        get_kv_cache_spec(CONFIG, 3)


# ---- a layer of an engine's weights

TP = TensorParallel(1, 2, reduce=lambda x: x)
SCALES = ("scale", "weight_scale", "weight_scale_inv")


def modules_of(
    tensors: dict[str, torch.Tensor], ratio: int, options: AttentionOptions, scale: str
) -> DeepseekV4MLAModules:
    """What an engine's loader makes of a checkpoint on this rank."""
    like = make_layer(ratio, tensors=tensors, tp=options.tp)
    tp = options.tp

    def linear(*names: str, dim: int | None = None) -> SimpleNamespace:
        weights = [tensors[name + ".weight"] for name in names]
        scales = [tensors[name + ".scale"] for name in names if name + ".scale" in tensors]
        if dim is not None:
            weights, scales = [tp.slice(w, dim) for w in weights], [tp.slice(s, dim) for s in scales]
        found = SimpleNamespace(weight=torch.nn.Parameter(torch.cat(weights), requires_grad=False))
        if scales:
            setattr(found, scale, torch.cat(scales))
        return found

    def compressor(prefix: str) -> SimpleNamespace:
        return SimpleNamespace(
            fused_wkv_wgate=linear(prefix + "wkv", prefix + "wgate"),
            ape=tensors[prefix + "ape"],
            norm=SimpleNamespace(weight=tensors[prefix + "norm.weight"]),
        )

    indexer = None
    if ratio == 4:
        indexer = SimpleNamespace(
            wq_b=linear("indexer.wq_b"),
            weights_proj=linear("indexer.weights_proj"),
            compressor=compressor("indexer.compressor."),
        )
    padding = torch.full((64,), -torch.inf)
    rotary = SimpleNamespace(cos_sin_cache=like.rotary_emb.cos_sin_cache)
    return DeepseekV4MLAModules(
        CONFIG,
        fused_wqa_wkv=linear("wq_a", "wkv"),
        q_norm=SimpleNamespace(weight=tensors["q_norm.weight"]),
        wq_b=linear("wq_b", dim=0),
        kv_norm=SimpleNamespace(weight=tensors["kv_norm.weight"].float()),
        wo_a=linear("wo_a", dim=0),
        wo_b=linear("wo_b", dim=1),
        attn_sink=torch.cat([tp.slice(tensors["attn_sink"], 0), padding]),
        rotary_emb=rotary,
        indexer=indexer,
        indexer_rotary_emb=rotary if ratio == 4 else None,
        topk_indices_buffer=torch.full((2048, CONFIG.index_topk), -1, dtype=torch.int32) if ratio == 4 else None,
        aux_stream_list=[],
        compressor=compressor("compressor.") if ratio > 1 else None,
    )


@pytest.mark.parametrize(("ratio", "kv"), [(1, "fp8"), (4, "fp8_ds_mla"), (128, "bf16")])
@pytest.mark.parametrize(("quantized", "scale"), [(True, "weight_scale_inv"), (True, "weight_scale"), (False, "")])
def test_a_layer_of_an_engines_weights(ratio: int, kv: str, quantized: bool, scale: str) -> None:
    index = CONFIG.layer_of_kind(ratio)
    tensors = random_layer_tensors(CONFIG, index, 3, quantized=quantized, wo_a_quantized=quantized)
    tensors["kv_norm.weight"] = tensors["kv_norm.weight"].float()
    tp = TP if ratio == 1 and CONFIG.o_groups % 2 == 0 else TensorParallel()
    options = AttentionOptions(kv_cache=kv, max_model_len=2048, max_num_tokens=2048, tp=tp)
    modules = modules_of(tensors, ratio, options, scale)
    layer = modules.build(index, options)
    assert layer.options.aux_streams == []
    if ratio == 4:
        assert layer.indexer is not None
        assert layer.indexer.indexer_op.topk_indices_buffer is modules.topk_indices_buffer
    for own, theirs in (
        (layer.wq_b.weight, modules.wq_b.weight),
        (layer.o_proj.wo_a, modules.wo_a.weight),
        (layer.rotary_emb.cos_sin_cache, modules.rotary_emb.cos_sin_cache),
        (layer.mla_attn.attn_sink, modules.attn_sink),
    ):
        stacked = own is layer.wq_b.weight and ratio == 4 and quantized
        assert (own.data_ptr() == theirs.data_ptr()) != stacked
    engines = [Engine(each, seed=2) for each in (layer, make_layer(ratio, tensors=tensors, kv_cache=kv, tp=tp))]
    outs, entries = [], []
    for each in engines:
        request = Request()
        outs.append(each.step([], [(request, hidden_rows(140, seed=1))]) + each.step([(request, hidden_rows(1, 2))]))
        entries.append(each.entries(request) + each.window(request))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert same_bytes(*entries)


def test_weights_that_are_no_layer() -> None:
    options = AttentionOptions(max_model_len=2048, max_num_tokens=2048)
    index = CONFIG.layer_of_kind(4)
    modules = modules_of(random_layer_tensors(CONFIG, index), 4, options, "scale")

    def refused(match: str, error: type[Exception] = ValueError, **changes: Any) -> None:
        given = {f.name: getattr(modules, f.name) for f in fields(modules)} | changes
        with pytest.raises(error, match=f"^DeepseekV4MLAModules: {match}"):
            DeepseekV4MLAModules(**given).build(index, options)

    fp8 = SimpleNamespace(weight=torch.zeros(CONFIG.index_n_heads, CONFIG.hidden_size).to(torch.float8_e4m3fn))
    refused("compressor: expected a module", compressor=None)
    refused("indexer: expected a module", indexer=None)
    refused("indexer_rotary_emb: ", indexer_rotary_emb=SimpleNamespace(cos_sin_cache=torch.zeros(2048, 64)))
    refused("wq_b: expected scales", wq_b=SimpleNamespace(weight=modules.wq_b.weight))
    refused(r"wq_b\.weight: expected shape", wq_b=SimpleNamespace(weight=modules.wq_b.weight[1:], scale=torch.ones(1)))
    packed = SimpleNamespace(weight=modules.wq_b.weight, scale=modules.wq_b.scale.int())
    refused(r"wq_b\.scale: expected floating", TypeError, wq_b=packed)
    parts = vars(modules.indexer) | {"weights_proj": fp8}
    fp8.scale = torch.ones(1, 2)
    refused(r"indexer\.weights_proj\.weight: expected dtype", TypeError, indexer=SimpleNamespace(**parts))
    with pytest.raises(ValueError, match="compressor: expected None for compress ratio 1"):
        modules.build(0, options)


def test_scales_as_exponents() -> None:
    scale = torch.exp2(torch.arange(6) - 3.0).view(2, 3)
    e8m0 = (torch.log2(scale) + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(engine._scale("x", SimpleNamespace(weight_scale_inv=e8m0)), scale)


def test_rotate_is_accepted_and_means_nothing() -> None:
    for rotate in (False, True):
        compressor = DeepseekCompressor(CONFIG, 4, 512, label="compressor", rotate=rotate)
        assert not compressor.index_hadamard


# ---- attention alone, and the op


@pytest.fixture(autouse=True)
def no_layer_stays() -> Iterator[None]:
    yield
    unregister_layer(NAME)
    assert not engine._layers


class Split:
    """A layer as an engine's compiled model runs it: attention by the op, then the rest."""

    def __init__(self, layer: Any, heads: int, padding: int) -> None:
        self.layer, self.heads, self.padding = layer, heads, padding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, metadata: Any, caches: Any, capture: None = None
    ) -> torch.Tensor:
        register_layer(NAME, self.layer, caches)
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, self.padding), value=torch.nan)
        positions = torch.nn.functional.pad(positions, (0, self.padding))
        out = torch.full((hidden.shape[0], self.heads, 512), 7.0, dtype=torch.bfloat16)
        with forward_context({metadata.compress_ratio: metadata}):
            deepseek_v4_attention(hidden, positions, out, NAME)
        rows = metadata.num_tokens
        assert (out[:rows, self.layer.num_heads :] == 7).all()
        assert not out[rows:].any()
        result = self.layer.project(out, positions)
        assert not result[rows:].any()
        return result[:rows]


@pytest.mark.parametrize(
    ("ratio", "kv", "prefill"),
    [
        (1, "fp8_ds_mla", "paged"),
        (4, "fp8_ds_mla", "gathered"),
        (128, "fp8_ds_mla", "paged"),
        (1, "bf16", "gathered"),
        (4, "fp8", "gathered"),
    ],
)
def test_attention_and_projection_are_the_layer(ratio: int, kv: str, prefill: str) -> None:
    """With more heads than the layer has, and rows behind the step's."""
    layer = make_layer(ratio, kv_cache=kv, prefill=prefill)
    outs, pools = [], []
    for each in (layer, Split(layer, layer.num_heads + 3, 2)):
        run, requests = Engine(layer, seed=1), [Request(), Request()]
        run.layer = each
        chunk = [(r, hidden_rows(n, seed=n)) for r, n in zip(requests, (131, 5), strict=True)]
        rows = run.step([], chunk) + run.step([(requests[0], hidden_rows(2, 3))], [(requests[1], hidden_rows(7, 4))])
        outs.append(rows)
        pools.append([raw_bytes(c.data) for c in vars(run.caches).values() if c is not None])
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert same_bytes(*pools)


def decode_step(ratio: int, length: int = 5) -> tuple[Engine, Any]:
    """Caches and metadata of a step of one token."""
    run, request = Engine(make_layer(ratio)), Request()
    run.step([], [(request, hidden_rows(length, seed=1))], recycle=False)
    run._grow(request, length + 1)
    swa = run._table("swa", [request])
    assert swa is not None
    tables = BlockTables(swa, run._table("compressed", [request]), run._table("state", [request]))
    return run, run.builder.build(ratio, [1], [length + 1], tables, 1)


def test_the_profiling_run() -> None:
    layer = make_layer(4)
    register_layer(NAME, layer)
    out = torch.ones(3, layer.num_heads, 512, dtype=torch.bfloat16)
    with forward_context(None):
        deepseek_v4_attention(hidden_rows(3, 1), torch.zeros(3, dtype=torch.int64), out, NAME)
    assert not out.any()
    assert layer.mla_attn.workspace.nbytes > 0


def test_the_innermost_context_counts() -> None:
    run, metadata = decode_step(1)
    register_layer(NAME, run.layer, run.caches)
    out = torch.ones(1, run.layer.num_heads, 512, dtype=torch.bfloat16)
    with forward_context(None):
        with forward_context({1: metadata}):
            deepseek_v4_attention(hidden_rows(1, 1), metadata.positions, out, NAME)
            assert out.any()
        deepseek_v4_attention(hidden_rows(1, 1), metadata.positions, out, NAME)
        assert not out.any()


def test_what_the_op_refuses() -> None:
    run, metadata = decode_step(1)
    layer, caches = run.layer, run.caches
    hidden, out = hidden_rows(1, 1), torch.zeros(1, layer.num_heads, 512, dtype=torch.bfloat16)

    def refused(match: str, *, error: type[Exception] = ValueError, step: Any = {1: metadata}, **given: Any) -> None:  # noqa: B006
        args = {"hidden_states": hidden, "positions": metadata.positions, "out": out, "layer_name": NAME} | given
        with pytest.raises(error, match=match), forward_context(step):
            deepseek_v4_attention(**args)

    refused("deepseek_v4_attention: layer_name: expected one of the 0 registered layers, got 'layers.2.attn'")
    register_layer(NAME, layer)
    refused("attention layer: caches: ")
    register_layer(NAME, layer, caches)
    refused("deepseek_v4_attention: layer_name: ", step={4: metadata})
    refused("deepseek_v4_attention: out: ", out=out[:, :, :64])
    refused("deepseek_v4_attention: out: ", out=out.float(), error=TypeError)
    refused("attention layer: out: expected at least ", out=out[:, 1:])
    refused("deepseek_v4_attention: positions: ", positions=metadata.positions.int(), error=TypeError)
    refused("attention layer: hidden_states: ", hidden_states=hidden[:, 1:])
    with pytest.raises(RuntimeError, match="forward_context"):
        deepseek_v4_attention(hidden, metadata.positions, out, NAME)
    with pytest.raises(ValueError, match="register_layer: layer_name: "):
        register_layer(NAME, make_layer(1))
    unregister_layer("nobody's")


def test_a_compiler_may_split_at_the_op() -> None:
    """It is one node of the graph, which holds no more of the layer than its name."""
    run, metadata = decode_step(4)
    register_layer(NAME, run.layer, run.caches)
    heads = run.layer.num_heads
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def model(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = torch.empty(hidden.shape[0], heads, 512, dtype=hidden.dtype)
        deepseek_v4_attention(hidden * 2, positions, out, NAME)
        return out + 1

    args = hidden_rows(1, 5), metadata.positions
    with forward_context({4: metadata}):
        want = model(*args)
        got = torch.compile(model, fullgraph=True, backend=backend)(*args)
        torch.library.opcheck(OP, (*args, torch.zeros(1, heads, 512, dtype=torch.bfloat16), NAME))
    assert torch.equal(got, want)
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert calls.count(OP) == 1
    assert all("cute_kernels" not in str(target) for target in calls if target is not OP)


def test_index_metadata_comes_with_its_cache_and_lengths() -> None:
    for ratio in KINDS:
        run, request = Engine(make_layer(ratio, kv_cache="bf16")), Request()
        impl, seen = run.layer.mla_attn, []
        original = impl._build_sparse_index_metadata
        impl._build_sparse_index_metadata = lambda *args, seen=seen, f=original: (
            seen.append((args, f(*args))) or f(*args)
        )  # type: ignore[method-assign]
        run.step([], [(request, hidden_rows(130, seed=1))])
        ((_, metadata, _), (cache, seq_lens, indices, lens)) = seen[0]
        own = run.caches.swa if ratio == 1 else run.caches.compressed
        assert own is not None
        assert cache is own.data
        assert seq_lens is metadata.seq_lens
        assert (indices.shape[0], lens.shape) == (130, (130,))


def test_fp8_weights_of_compressors_are_dequantized() -> None:
    """From a checkpoint or of an engine: as exact as their scales, and what they multiply is not quantized."""
    index = CONFIG.layer_of_kind(4)
    tensors = random_layer_tensors(CONFIG, index, 3)
    plain = dict(tensors)
    for prefix in ("compressor.", "indexer.compressor."):
        for name in ("wkv", "wgate"):
            weight = tensors[f"{prefix}{name}.weight"]
            codes = (weight.float() * 64).to(torch.float8_e4m3fn)
            blocks = [-(-n // 128) for n in weight.shape]
            scale = torch.exp2(torch.arange(blocks[0] * blocks[1]).view(blocks) % 3 - 7.0)
            tensors[f"{prefix}{name}.weight"], tensors[f"{prefix}{name}.scale"] = codes, scale
            spread = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = codes.double() * spread[: weight.shape[0], : weight.shape[1]]
            plain[f"{prefix}{name}.weight"] = value.bfloat16()
            assert torch.equal(plain[f"{prefix}{name}.weight"].double(), value)
    options = AttentionOptions(max_model_len=2048, max_num_tokens=2048)
    want = dict(make_layer(4, tensors=plain).named_buffers())
    for layer in (make_layer(4, tensors=tensors), modules_of(tensors, 4, options, "scale").build(index, options)):
        found = dict(layer.named_buffers())
        assert found.keys() == want.keys()
        for name, value in found.items():
            assert torch.equal(value.float(), want[name].float()), name
            assert value.dtype == want[name].dtype or name == "kv_norm_weight", name


def test_fp8_weights_that_bf16_has_not() -> None:
    index = CONFIG.layer_of_kind(128)
    tensors = random_layer_tensors(CONFIG, index, 3)
    weight = tensors["compressor.wkv.weight"]
    tensors["compressor.wkv.weight"] = torch.full(weight.shape, 448.0).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"compressor\.wkv: FP8 weight without compressor\.wkv\.scale"):
        make_layer(128, tensors=tensors)
    tensors["compressor.wkv.scale"] = torch.full((weight.shape[0] // 128, weight.shape[1] // 128), 2.0**120)
    with pytest.raises(CheckpointError, match=r"compressor\.wkv\.weight: holds values beyond"):
        make_layer(128, tensors=tensors)
