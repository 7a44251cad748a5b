# SPDX-License-Identifier: Apache-2.0
"""Weights of V4.1's attention layers, named as published. Their FP8 blocks of 32 x 32 are expanded to bf16, exactly."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from cute_kernels import numerics

from .checkpoint import FLOATS, CheckpointError, Tensors, check_shape, is_usable, overflows, read_tensors, scale_of
from .linear import Linear
from .rotary import RotaryEmbedding
from .v41_config import SOURCE, DeepseekV41Config
from .v41_draft import DeepseekV41DraftContext
from .v41_layer import DeepseekV41Attention, V41Options, WeightBytes

V41_WEIGHT_BLOCK = 32
V41_QUANTIZED_TENSORS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b", "proj")
"""Linears that a checkpoint stores as FP8. Any other may be, if it comes with a scale."""

DRAFT_CONTEXT = "mtp.0.main_"
"""What names of a draft context's tensors begin with."""


def v41_tensor_shapes(config: DeepseekV41Config, layer_index: int) -> dict[str, tuple[int, ...]]:
    """Names (behind `layers.N.attn.`, of a draft layer `mtp.M.attn.`) and shapes of a layer's tensors, scales left
    out."""
    hidden, head, q_rank = config.hidden_size, config.head_dim, config.q_lora_rank
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a.weight": (q_rank, hidden),
        "q_norm.weight": (q_rank,),
        "wq_b.weight": (config.num_attention_heads * head, q_rank),
        "wkv.weight": (head, hidden),
        "kv_norm.weight": (head,),
        "wo_a.weight": (config.o_groups * config.o_lora_rank, config.heads_per_group * head),
        "wo_b.weight": (hidden, config.o_groups * config.o_lora_rank),
        "attn_sink": (config.num_attention_heads,),
    }
    if config.kind_of(layer_index) == SOURCE:
        shapes["compressor.wkv.weight"] = (head, hidden)
        if config.compress_ratio_of(layer_index) == 2:
            shapes["compressor.wgate.weight"] = (head, hidden)
        shapes["compressor.norm.weight"] = (head,)
        shapes["indexer.wk.weight"] = (config.index_head_dim, head)
        shapes["indexer.k_norm.weight"] = (config.index_head_dim,)
    if layer_index in config.index_source_layer_ids:
        shapes["indexer.wq_b.weight"] = (config.index_n_heads * config.index_head_dim, q_rank)
        shapes["indexer.weights_proj.weight"] = (config.index_n_heads, hidden)
    return shapes


def expand_weight(name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 [out, in] of an e4m3 weight whose 32 x 32 blocks have power-of-two scales: the same values. CheckpointError
    if one is no number of bf16."""
    block = V41_WEIGHT_BLOCK
    spread = scale.double().repeat_interleave(block, 0).repeat_interleave(block, 1)
    exact = weight.double() * spread[: weight.shape[0], : weight.shape[1]]
    expanded = exact.to(torch.bfloat16)
    if not torch.equal(expanded.double(), exact):
        raise CheckpointError(f"checkpoint: {name}: holds values that bf16 has not")
    return expanded


def v41_draft_context_shapes(config: DeepseekV41Config) -> dict[str, tuple[int, ...]]:
    """Names (behind DRAFT_CONTEXT) and shapes of its tensors, scales left out."""
    hidden = config.hidden_size
    return {"proj.weight": (hidden, len(config.draft_target_layer_ids) * hidden), "norm.weight": (hidden,)}


def expand_tensors(label: str, shapes: dict[str, tuple[int, ...]], tensors: Tensors) -> tuple[Tensors, WeightBytes]:
    """The tensors that a module reads, checked, without scales: in bf16, sinks in fp32; and what they take."""
    where, found, stored = f"checkpoint: {label}", {}, 0
    for name, shape in shapes.items():
        if name not in tensors:
            raise CheckpointError(f"{where}: missing tensor {name}")
        tensor, linear = tensors[name], name.removesuffix(".weight")
        check_shape(label, name, shape, tensor.shape)
        if not is_usable(name, tensor):
            raise CheckpointError(f"{where}: {name}: holds NaN or infinite values")
        stored += tensor.nbytes
        if tensor.dtype == torch.float8_e4m3fn:
            scale = scale_of(tensors, linear)
            if scale is None:
                raise CheckpointError(f"{where}: {linear}: FP8 weight without {linear}.scale")
            blocks = tuple(-(-n // V41_WEIGHT_BLOCK) for n in shape)
            if tuple(scale.shape) != blocks:
                raise CheckpointError(
                    f"{where}: {linear}.scale: expected shape {list(blocks)}, got {list(scale.shape)}"
                )
            if not bool((scale.isfinite() & (scale > 0)).all()):
                raise CheckpointError(f"{where}: {linear}.scale: expected finite scales above 0")
            stored += scale.numel()
            found[name] = expand_weight(f"{label}: {name}", tensor, scale)
        elif tensor.dtype in FLOATS:
            if overflows(name, tensor):
                raise CheckpointError(f"{where}: {name}: holds values beyond those of its layer")
            found[name] = tensor.to(torch.float32 if name == "attn_sink" else torch.bfloat16)
        else:
            raise CheckpointError(f"{where}: {name}: expected bf16, fp32 or e4m3, got {tensor.dtype}")
    return found, WeightBytes(stored, sum(tensor.nbytes for tensor in found.values()))


def read_v41_layer_tensors(directory: str | Path, layer_index: int, config: DeepseekV41Config | None = None) -> Tensors:
    """All tensors of `layers.N.attn.` of a checkpoint, as `read_layer_tensors` reads those of V4; of a draft layer,
    which needs the config, those of `mtp.M.attn.`."""
    shapes = {} if config is None else v41_tensor_shapes(config, layer_index)
    first_draft = layer_index + 1 if config is None else config.num_hidden_layers
    name = f"layers.{layer_index}" if layer_index < first_draft else f"mtp.{layer_index - first_draft}"
    return read_tensors(directory, f"{name}.attn.", f"layer {layer_index}", shapes)


def read_v41_draft_context_tensors(directory: str | Path, config: DeepseekV41Config) -> Tensors:
    """The tensors of a checkpoint's draft context, by their names behind DRAFT_CONTEXT."""
    return read_tensors(directory, DRAFT_CONTEXT, DRAFT_CONTEXT, v41_draft_context_shapes(config))


def random_v41_layer_tensors(config: DeepseekV41Config, layer_index: int, seed: int = 0) -> Tensors:
    """Seeded weights in the published form: FP8 in 32 x 32 blocks with e8m0 scales where a checkpoint has them."""
    return _random_tensors(v41_tensor_shapes(config, layer_index), seed * 1000003 + layer_index)


def random_v41_draft_context_tensors(config: DeepseekV41Config, seed: int = 0) -> Tensors:
    """Seeded weights of a draft context, as `random_v41_layer_tensors` makes those of a layer."""
    return _random_tensors(v41_draft_context_shapes(config), seed * 1000003 + len(config.compress_ratios))


def _random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for name, shape in shapes.items():
        value, linear = torch.randn(shape, generator=generator), name.removesuffix(".weight")
        if name.endswith("norm.weight"):
            tensors[name] = (1 + 0.1 * value).bfloat16()
        elif name == "attn_sink":
            tensors[name] = value
        elif linear in V41_QUANTIZED_TENSORS:
            tensors[name], tensors[linear + ".scale"] = _quantize(value * shape[-1] ** -0.5)
        else:
            tensors[name] = (value * shape[-1] ** -0.5).bfloat16()
    return tensors


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [out, in], e8m0 [out / 32, in / 32]) of a weight with multiples of 32."""
    block = V41_WEIGHT_BLOCK
    blocks = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    byte = numerics.ue8m0_from_absmax(blocks.abs().amax(dim=(1, 3)), numerics.E4M3_MAX, numerics.OUTPUT_FLOOR)
    codes = numerics.to_e4m3(blocks * numerics.ue8m0_inverse(byte)[:, None, :, None]).reshape(weight.shape)
    return codes.view(torch.float8_e4m3fn), byte.view(torch.float8_e8m0fnu)


def load_v41_layer(layer: DeepseekV41Attention, tensors: Tensors) -> WeightBytes:
    """Check and expand tensors, and copy them into a layer, sliced for its tensor-parallel rank. Returns what all of
    them take."""
    shapes = v41_tensor_shapes(layer.config, layer.layer_index)
    found, size = expand_tensors(f"layer {layer.layer_index}", shapes, tensors)
    tp = layer.tp

    def fill(module: Linear, *parts: str) -> None:
        module.weight.copy_(torch.cat([found[part + ".weight"] for part in parts]))

    def norm(module: nn.Module, name: str, weight: str) -> None:
        getattr(module, name).copy_(found[weight + ".weight"])

    with torch.no_grad():
        fill(layer.fused_wqa_wkv, "wq_a", "wkv")
        layer.wq_b.weight.copy_(tp.slice(found["wq_b.weight"], 0))
        norm(layer, "q_norm_weight", "q_norm")
        norm(layer, "kv_norm_weight", "kv_norm")
        layer.attention.attn_sink.copy_(tp.slice(found["attn_sink"], 0))
        layer.o_proj.wo_a.copy_(tp.slice(found["wo_a.weight"], 0).reshape(layer.o_proj.wo_a.shape))
        layer.o_proj.wo_b.weight.copy_(tp.slice(found["wo_b.weight"], 1))
        if layer.compressor is not None:
            gate = ["compressor.wgate"] if layer.compress_ratio == 2 else []
            fill(layer.compressor.wkv_wgate, "compressor.wkv", *gate)
            fill(layer.compressor.wk, "indexer.wk")
            norm(layer.compressor, "norm_weight", "compressor.norm")
            norm(layer.compressor, "key_norm_weight", "indexer.k_norm")
        if layer.indexer is not None:
            fill(layer.indexer.wq_b, "indexer.wq_b")
            fill(layer.indexer.weights_proj, "indexer.weights_proj")
    return size


def build_v41_layer(
    config: DeepseekV41Config,
    layer_index: int,
    tensors: Tensors,
    *,
    options: V41Options | None = None,
    rotary_emb: RotaryEmbedding | None = None,
    device: torch.device | str = "cpu",
) -> DeepseekV41Attention:
    """A layer with these weights: `config`, `layer_index`, `tensors`, `options`, `rotary_emb` and `device` as of
    `build_layer`. Of a draft layer the index is behind those of the model's layers (`config.draft_layer_ids`)."""
    layer = DeepseekV41Attention(config, layer_index, options=options, rotary_emb=rotary_emb, device=device)
    layer.weight_bytes = load_v41_layer(layer, tensors)
    return layer


def build_v41_draft_context(
    config: DeepseekV41Config,
    tensors: Tensors,
    *,
    batch_invariant: bool = False,
    device: torch.device | str = "cpu",
) -> DeepseekV41DraftContext:
    """A draft's context with these weights."""
    context = DeepseekV41DraftContext(config, batch_invariant=batch_invariant, device=device)
    found, _ = expand_tensors(DRAFT_CONTEXT, v41_draft_context_shapes(config), tensors)
    with torch.no_grad():
        context.proj.weight.copy_(found["proj.weight"])
        context.norm_weight.copy_(found["norm.weight"])
    return context
