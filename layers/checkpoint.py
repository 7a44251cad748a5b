# SPDX-License-Identifier: Apache-2.0
"""Weights of one attention layer, named as DeepSeek publishes them, from safetensors files or from a seed."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path, PurePath

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cute_kernels import numerics

from .attention import QUANTIZED_LINEARS, AttentionOptions, DeepseekV4MultiHeadLatentAttentionWrapper
from .compressor import DeepseekCompressor
from .config import DeepseekV4Config
from .linear import WEIGHT_BLOCK, Linear, dequantize_weight, quantize_weight
from .rotary import RotaryEmbedding

SCALE_SUFFIXES = (".scale", ".weight_scale_inv")
Tensors = dict[str, torch.Tensor]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one line."""


def tensor_shapes(config: DeepseekV4Config, compress_ratio: int) -> dict[str, tuple[int, ...]]:
    """Names (behind `layers.N.attn.`) and shapes of a layer's tensors, scales left out."""
    hidden, head, q_rank = config.hidden_size, config.head_dim, config.q_lora_rank
    group_columns = config.heads_per_group * head
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a.weight": (q_rank, hidden),
        "q_norm.weight": (q_rank,),
        "wq_b.weight": (config.num_attention_heads * head, q_rank),
        "wkv.weight": (head, hidden),
        "kv_norm.weight": (head,),
        "wo_a.weight": (config.o_groups * config.o_lora_rank, group_columns),
        "wo_b.weight": (hidden, config.o_groups * config.o_lora_rank),
        "attn_sink": (config.num_attention_heads,),
    }

    def compressor(prefix: str, width: int) -> None:
        columns = width * (2 if compress_ratio == 4 else 1)
        shapes[prefix + "wkv.weight"] = (columns, hidden)
        shapes[prefix + "wgate.weight"] = (columns, hidden)
        shapes[prefix + "norm.weight"] = (width,)
        shapes[prefix + "ape"] = (compress_ratio, columns)

    if compress_ratio > 1:
        compressor("compressor.", head)
    if compress_ratio == 4:
        shapes["indexer.wq_b.weight"] = (config.index_n_heads * config.index_head_dim, q_rank)
        shapes["indexer.weights_proj.weight"] = (config.index_n_heads, hidden)
        compressor("indexer.compressor.", config.index_head_dim)
    return shapes


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes of a tensor that is not FP8; the layer rounds it to its own."""
QUANTIZED_TENSORS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")
"""Linears that may be FP8 in a checkpoint, and are multiplied as such."""
DEQUANTIZED_TENSORS = tuple(
    prefix + name for prefix in ("compressor.", "indexer.compressor.") for name in ("wkv", "wgate")
)
"""Linears that may be FP8 in a checkpoint, but are multiplied as bf16: what they read is never quantized."""


def _files(directory: Path) -> dict[str, list[str]] | None:
    """Tensor names by file from the index, or None when there is no index."""
    indexes = sorted(directory.glob("*.safetensors.index.json"))
    if not indexes:
        return None
    try:
        weight_map = json.loads(indexes[0].read_text(encoding="utf-8"))["weight_map"]
        files: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            parts = PurePath(str(file)).parts
            if not parts or PurePath(str(file)).is_absolute() or ".." in parts:
                raise CheckpointError(f"checkpoint: {indexes[0]}: {name}: expected a file in {directory}, got {file!r}")
            files.setdefault(str(file), []).append(name)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {indexes[0]} is not a safetensors index: {error}") from error
    return files


def _paths(directory: Path) -> tuple[dict[Path, list[str]] | None, list[Path]]:
    """(tensor names by file as the index lists them, or None; the files to read)."""
    if not directory.is_dir():
        raise CheckpointError(f"checkpoint: {directory} is not a directory")
    indexed = _files(directory)
    if indexed is None:
        listed, paths = None, sorted(directory.glob("*.safetensors"))
    else:
        listed = {directory / file: names for file, names in indexed.items()}
        paths = sorted(listed)
    if not paths:
        raise CheckpointError(f"checkpoint: {directory} holds no *.safetensors file")
    return listed, paths


def held_layers(directory: str | Path, first_draft: int | None = None) -> list[int]:
    """Numbers of the layers of which the checkpoint has attention tensors, ascending. Reads names only.

    first_draft   number of V4.1's first draft layer, of which `mtp.0.attn.` are the tensors; None: these do not count
    """
    listed, paths = _paths(Path(directory))
    names: list[str] = []
    for path in paths:
        if listed is not None:
            names += listed[path]
            continue
        try:
            with safe_open(str(path), framework="pt") as file:
                names += file.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint: cannot read {path}: {error}") from error
    found = [re.match(r"(?:model\.)?(layers|mtp)\.(\d+)\.attn\.", name) for name in names]
    held = {int(match[2]) for match in found if match and match[1] == "layers"}
    if first_draft is not None:
        held |= {first_draft + int(match[2]) for match in found if match and match[1] == "mtp"}
    return sorted(held)


def read_layer_tensors(directory: str | Path, layer_index: int, config: DeepseekV4Config | None = None) -> Tensors:
    """All tensors of `layers.N.attn.` (optionally behind `model.`), by their name behind that prefix.

    Reads every *.safetensors file of the directory, or those its index names. Only this layer's tensors are loaded:
    `layer_index` is N.

    config   of the layer they are for: a tensor of another shape is refused before memory is asked for
    """
    shapes = {} if config is None else tensor_shapes(config, config.compress_ratio_of(layer_index))
    return read_tensors(directory, f"layers.{layer_index}.attn.", f"layer {layer_index}", shapes)


def read_tensors(directory: str | Path, stem: str, label: str, shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """All tensors whose names begin with a stem, by the rest of them, as `read_layer_tensors` reads those of a layer.

    label    what they are of, in messages
    shapes   theirs, as far as they are known
    """
    directory = Path(directory)
    prefixes = stem, f"model.{stem}"
    listed, paths = _paths(directory)
    tensors: Tensors = {}
    for path in paths:
        if listed is not None and not any(name.startswith(prefixes) for name in listed[path]):
            continue
        try:
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
                    prefix = next((p for p in prefixes if name.startswith(p)), None)
                    if prefix is not None:
                        short = name[len(prefix) :]
                        if short in shapes:
                            check_shape(label, short, shapes[short], file.get_slice(name).get_shape())
                        tensors[short] = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"checkpoint: cannot read {path}: {error}") from error
    if not tensors:
        raise CheckpointError(f"checkpoint: {directory} holds no tensor named {prefixes[0]}*")
    return tensors


def check_shape(label: str, name: str, shape: tuple[int, ...], found: Sequence[int]) -> None:
    if tuple(found) != shape:
        raise CheckpointError(f"checkpoint: {label}: {name}: expected shape {list(shape)}, got {list(found)}")


def scale_of(tensors: Tensors, linear: str) -> torch.Tensor | None:
    found = [_as_fp32(linear, tensors[linear + suffix]) for suffix in SCALE_SUFFIXES if linear + suffix in tensors]
    if len(found) > 1 and not torch.equal(*found):
        names = " and ".join(linear + suffix for suffix in SCALE_SUFFIXES)
        raise CheckpointError(f"checkpoint: {names}: expected one of them, or the same values, got different ones")
    return found[0] if found else None


def _as_fp32(linear: str, scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.float8_e8m0fnu:
        return numerics.ue8m0_scale(scale.view(torch.uint8)).float()
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"checkpoint: {linear} scale: expected e8m0, fp32 or bf16, got {scale.dtype}")
    return scale.float()


def check_tensors(config: DeepseekV4Config, layer_index: int, tensors: Tensors) -> frozenset[str]:
    """Check names, shapes and dtypes against the config; returns the quantized linears as the layer names them."""
    for name, shape in tensor_shapes(config, config.compress_ratio_of(layer_index)).items():
        if name not in tensors:
            raise CheckpointError(f"checkpoint: layer {layer_index}: missing tensor {name}")
        check_shape(f"layer {layer_index}", name, shape, tensors[name].shape)
        linear = name.removesuffix(".weight")
        fp8 = tensors[name].dtype == torch.float8_e4m3fn
        if fp8 and linear not in QUANTIZED_TENSORS + DEQUANTIZED_TENSORS:
            raise CheckpointError(f"checkpoint: layer {layer_index}: {name}: expected a bf16 or fp32 tensor, got FP8")
        if not fp8 and tensors[name].dtype not in FLOATS:
            raise CheckpointError(
                f"checkpoint: layer {layer_index}: {name}: expected bf16, fp32 or e4m3, got {tensors[name].dtype}"
            )
        if not is_usable(name, tensors[name]):
            raise CheckpointError(f"checkpoint: layer {layer_index}: {name}: holds NaN or infinite values")
        if overflows(name, tensors[name]):
            raise CheckpointError(f"checkpoint: layer {layer_index}: {name}: holds values beyond those of its layer")
        if fp8:
            _check_scale(config, layer_index, linear, tensors)
        if (
            fp8
            and linear in DEQUANTIZED_TENSORS
            and not bool(_dequantized(tensors, linear).bfloat16().isfinite().all())
        ):
            raise CheckpointError(f"checkpoint: layer {layer_index}: {name}: holds values beyond those of its layer")
    quantized = {n for n in QUANTIZED_TENSORS if n + ".weight" in tensors and _is_fp8(tensors, n)}
    if ("wq_a" in quantized) != ("wkv" in quantized):
        raise CheckpointError(f"checkpoint: layer {layer_index}: wq_a and wkv: expected both FP8 or neither")
    if "wq_a" in quantized and config.q_lora_rank % WEIGHT_BLOCK:
        raise CheckpointError(
            f"checkpoint: q_lora_rank: expected a multiple of {WEIGHT_BLOCK}, got {config.q_lora_rank}"
        )
    _name_unused(config, layer_index, tensors, quantized)
    names = quantized - {"wq_a", "wkv"} | ({"wqa_wkv"} if "wq_a" in quantized else set())
    return frozenset(names)


def _is_fp8(tensors: Tensors, linear: str) -> bool:
    return tensors[linear + ".weight"].dtype == torch.float8_e4m3fn


def _dequantized(tensors: Tensors, linear: str) -> torch.Tensor:
    """A weight that the layer keeps as bf16: exact where scales are powers of two."""
    weight = tensors[linear + ".weight"]
    scale = scale_of(tensors, linear) if _is_fp8(tensors, linear) else None
    return weight if scale is None else dequantize_weight(weight, scale, torch.float32)


def is_usable(name: str, tensor: torch.Tensor) -> bool:
    """No NaN; infinite only where that means something: a sink that takes nothing or everything. Dtypes that no layer
    takes are refused for what they are."""
    if tensor.numel() == 0:
        return True
    if tensor.dtype == torch.float8_e4m3fn:
        return int((tensor.view(torch.uint8) & 0x7F).max()) < 0x7F
    if tensor.dtype not in FLOATS:
        return True
    least, most = (float(end) for end in torch.aminmax(tensor))  # NaN if any number is
    return not math.isnan(least) if name == "attn_sink" else math.isfinite(least) and math.isfinite(most)


def overflows(name: str, tensor: torch.Tensor) -> bool:
    """Whether finite values become infinite where the layer keeps them: in fp32 (sinks, positions, norms that are), or
    bf16."""
    is_fp32_norm = name.endswith("norm.weight") and tensor.dtype == torch.float32
    dtype = torch.float32 if name == "attn_sink" or name.endswith("ape") or is_fp32_norm else torch.bfloat16
    if torch.finfo(tensor.dtype).max <= torch.finfo(dtype).max:
        return False
    return not torch.equal(tensor.isfinite(), tensor.to(dtype).isfinite())


_named: set[tuple[int, tuple[str, ...]]] = set()


def _name_unused(config: DeepseekV4Config, layer_index: int, tensors: Tensors, quantized: set[str]) -> None:
    """Warn, once per process, of tensors that the layer does not read: the config may be another model's."""
    used = set(tensor_shapes(config, config.compress_ratio_of(layer_index)))
    dequantized = {n for n in DEQUANTIZED_TENSORS if n + ".weight" in tensors and _is_fp8(tensors, n)}
    used |= {linear + suffix for linear in quantized | dequantized for suffix in SCALE_SUFFIXES}
    unused = tuple(sorted(set(tensors) - used))
    if unused and (layer_index, unused) not in _named:
        _named.add((layer_index, unused))
        warnings.warn(f"checkpoint: layer {layer_index}: not used: {', '.join(unused)}", RuntimeWarning, stacklevel=3)


def _check_scale(config: DeepseekV4Config, layer_index: int, linear: str, tensors: Tensors) -> None:
    scale = scale_of(tensors, linear)
    where = f"checkpoint: layer {layer_index}: {linear}"
    if scale is None:
        raise CheckpointError(f"{where}: FP8 weight without {linear}.scale")
    expected = tuple(-(-n // WEIGHT_BLOCK) for n in tensors[linear + ".weight"].shape)
    if tuple(scale.shape) != expected:
        raise CheckpointError(f"{where}.scale: expected shape {list(expected)}, got {list(scale.shape)}")
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise CheckpointError(f"{where}.scale: expected finite scales that are not negative")


def random_layer_tensors(
    config: DeepseekV4Config,
    layer_index: int,
    seed: int = 0,
    *,
    quantized: bool = True,
    wo_a_quantized: bool = True,
) -> Tensors:
    """Seeded weights in the published form: FP8 with e8m0-representable block scales where a checkpoint has them.

    config, layer_index   of the layer that they are for; a layer's differ from another one's
    seed                  the same weights for the same seed
    quantized             whether linears that a checkpoint has in FP8 are so; else they are bf16
    wo_a_quantized        the same of `wo_a` alone
    """
    generator = torch.Generator().manual_seed(seed * 1000003 + layer_index)
    tensors: Tensors = {}
    for name, shape in tensor_shapes(config, config.compress_ratio_of(layer_index)).items():
        value = torch.randn(shape, generator=generator)
        linear = name.removesuffix(".weight")
        if name.endswith("norm.weight"):
            tensors[name] = (1 + 0.1 * value).bfloat16()
        elif name == "attn_sink":
            tensors[name] = value
        elif name.endswith("ape"):
            tensors[name] = 0.5 * value
        elif linear in QUANTIZED_TENSORS and (wo_a_quantized if linear == "wo_a" else quantized):
            tensors[name], tensors[linear + ".scale"] = quantize_weight(value * shape[-1] ** -0.5)
        else:
            tensors[name] = (value * shape[-1] ** -0.5).bfloat16()
    return tensors


def load_layer(layer: DeepseekV4MultiHeadLatentAttentionWrapper, tensors: Tensors) -> None:
    """Copy checked tensors into a layer, sliced for its tensor-parallel rank."""
    tp = layer.tp

    def weight_and_scale(
        linear: str, dim: int | None = None, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, scale = tensors[linear + ".weight"], None
        if _is_fp8(tensors, linear):
            scale = scale_of(tensors, linear)
        if dim is None:
            return weight, scale
        return tp.slice(weight, dim, ranks), None if scale is None else tp.slice(scale, dim, ranks)

    def fill(module: Linear, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        module.weight.copy_(weight)
        if scale is not None:
            assert module.scale is not None
            module.scale.copy_(scale)

    def norm(module: nn.Module, name: str, weight: torch.Tensor) -> None:
        """Norm weights keep fp32 where a checkpoint has it; the ops take both."""
        dtype = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
        setattr(module, name, weight.to(device=getattr(module, name).device, dtype=dtype, copy=True))

    def compressor(module: DeepseekCompressor, prefix: str) -> None:
        parts = [_dequantized(tensors, prefix + "wkv"), _dequantized(tensors, prefix + "wgate")]
        module.fused_wkv_wgate.weight.copy_(torch.cat(parts))
        module.ape.copy_(tensors[prefix + "ape"])
        norm(module, "norm_weight", tensors[prefix + "norm.weight"])

    with torch.no_grad():
        (wq_a, wq_a_scale), (wkv, wkv_scale) = weight_and_scale("wq_a"), weight_and_scale("wkv")
        scale = None if wq_a_scale is None or wkv_scale is None else torch.cat([wq_a_scale, wkv_scale])
        layer.fused_wqa_wkv.weight[: wq_a.shape[0]].copy_(wq_a)
        layer.fused_wqa_wkv.weight[wq_a.shape[0] :].copy_(wkv)
        if scale is not None:
            assert layer.fused_wqa_wkv.scale is not None
            layer.fused_wqa_wkv.scale.copy_(scale)
        fill(layer.wq_b, *weight_and_scale("wq_b", 0, layer.query_heads // layer.num_heads))
        norm(layer, "q_norm_weight", tensors["q_norm.weight"])
        norm(layer, "kv_norm_weight", tensors["kv_norm.weight"])
        layer.mla_attn.attn_sink.copy_(tp.slice(tensors["attn_sink"], 0))
        wo_a, wo_a_scale = weight_and_scale("wo_a", 0)
        layer.o_proj.wo_a.copy_(wo_a.reshape(layer.o_proj.wo_a.shape))
        if wo_a_scale is not None:
            assert layer.o_proj.wo_a_scale is not None
            layer.o_proj.wo_a_scale.copy_(wo_a_scale.reshape(layer.o_proj.wo_a_scale.shape))
        fill(layer.o_proj.wo_b, *weight_and_scale("wo_b", 1))
        if layer.compressor is not None:
            compressor(layer.compressor, "compressor.")
        if layer.indexer is not None:
            fill(layer.indexer.wq_b, *weight_and_scale("indexer.wq_b"))
            layer.indexer.weights_proj.weight.copy_(tensors["indexer.weights_proj.weight"])
            compressor(layer.indexer.compressor, "indexer.compressor.")


def build_layer(
    config: DeepseekV4Config,
    layer_index: int,
    tensors: Tensors,
    *,
    options: AttentionOptions | None = None,
    rotary_emb: RotaryEmbedding | None = None,
    device: torch.device | str = "cpu",
) -> DeepseekV4MultiHeadLatentAttentionWrapper:
    """A layer with these weights; which linears are FP8 follows from the tensors.

    config        of the model
    layer_index   which of its layers: its kind follows from that
    tensors       of `read_layer_tensors` or `random_layer_tensors`: the whole layer's, also for a rank, which takes its
                  part; copied
    options       cache formats, streams, ranks; None: the defaults
    rotary_emb    a table that layers of a kind share; None: one is made
    device        of the layer

    Raises CheckpointError, a ValueError, where a tensor is missing or has another shape or dtype.
    """
    if not isinstance(config, DeepseekV4Config):  # ratios of another model would mean other layers
        raise TypeError(f"build_layer: config: expected a DeepseekV4Config, got {type(config).__name__}")
    quantized = check_tensors(config, layer_index, tensors)
    assert quantized <= QUANTIZED_LINEARS
    layer = DeepseekV4MultiHeadLatentAttentionWrapper(
        config, layer_index, quantized=quantized, options=options, rotary_emb=rotary_emb, device=device
    )
    load_layer(layer, tensors)
    return layer
