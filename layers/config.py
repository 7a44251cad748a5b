# SPDX-License-Identifier: Apache-2.0
"""Model configuration: what a DeepSeek-V4 attention layer needs to know, read from a HuggingFace config.json."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cute_kernels.formats import HEAD_DIM, INDEX_DIM, ROPE_DIM

COMPRESS_RATIOS = (1, 4, 128)
_LAYER_TYPES = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_LONGEST_VALUE = 80
"""Characters of a refused value that a message shows."""


class ConfigError(ValueError):
    """A configuration that cannot be used, in one line."""


def read_json(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file."""
    path = Path(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"config: {path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"config: {path}: expected an object, got {type(raw).__name__}")
    return raw


def require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        shown = repr(got)
        shown = shown if len(shown) <= _LONGEST_VALUE else shown[: _LONGEST_VALUE - 3] + "..."
        raise ConfigError(f"config: {name}: expected {expected}, got {shown}")


@dataclass(frozen=True)
class AttentionConfig:
    """Dimensions that the attention layers of all models of the family have."""

    hidden_size: int = 4096
    num_hidden_layers: int = 43
    num_attention_heads: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_topk: int = 512
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = ()
    rms_norm_eps: float = 1e-6
    hc_mult: int = 4
    max_position_embeddings: int = 1048576
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_max_position: int = 65536
    head_dim: int = HEAD_DIM
    qk_rope_head_dim: int = ROPE_DIM
    index_head_dim: int = INDEX_DIM

    def __post_init__(self) -> None:
        for name, only in (("head_dim", HEAD_DIM), ("qk_rope_head_dim", ROPE_DIM), ("index_head_dim", INDEX_DIM)):
            require(getattr(self, name) == only, name, f"{only}", getattr(self, name))
        for name in (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "o_groups", "o_lora_rank",
            "index_n_heads", "index_topk", "sliding_window", "hc_mult", "max_position_embeddings",
            "rope_original_max_position",
        ):  # fmt: skip
            value = getattr(self, name)
            require(type(value) is int and 0 < value < 2**31, name, "a positive integer below 2**31", value)
        for name in (
            "rms_norm_eps", "rope_theta", "compress_rope_theta", "rope_factor", "rope_beta_fast", "rope_beta_slow",
        ):  # fmt: skip
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(number and 0 < value <= sys.float_info.max, name, "a positive number", value)
        for name in ("rope_theta", "compress_rope_theta"):
            require(getattr(self, name) > 1, name, "a number above 1", getattr(self, name))
        require(
            self.num_attention_heads % self.o_groups == 0,
            "num_attention_heads",
            f"a multiple of o_groups = {self.o_groups}",
            self.num_attention_heads,
        )
        require(
            len(self.compress_ratios) >= self.num_hidden_layers,
            "compress_ratios",
            f"at least num_hidden_layers = {self.num_hidden_layers} entries",
            len(self.compress_ratios),
        )

    @property
    def heads_per_group(self) -> int:
        """Attention heads that share one group of the output projection."""
        return self.num_attention_heads // self.o_groups

    @property
    def softmax_scale(self) -> float:
        """Factor on q . k before the softmax."""
        return float(self.head_dim**-0.5)

    def compress_ratio_of(self, layer_index: int) -> int:
        """The entry of compress_ratios for a layer."""
        count = len(self.compress_ratios)
        require(0 <= layer_index < count, "layer_index", f"0..{count - 1}", layer_index)
        return self.compress_ratios[layer_index]


@dataclass(frozen=True)
class DeepseekV4Config(AttentionConfig):
    """Dimensions of V4's attention layers.

    compress_ratios[i] is the kind of layer i: 1 attends to the sliding window alone, 4 adds compressed entries picked
    by the indexer (C4A), 128 adds every compressed entry (C128A). A config's 0 means 1.
    """

    compress_ratios: tuple[int, ...] = (1, 1, *((4, 128) * 20), 4, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for ratio in self.compress_ratios:
            require(ratio in COMPRESS_RATIOS, "compress_ratios", f"entries among 0 and {COMPRESS_RATIOS}", ratio)

    def layer_of_kind(self, compress_ratio: int) -> int:
        """The first layer with this ratio."""
        if compress_ratio not in self.compress_ratios:
            raise ConfigError(f"config: no layer with compress ratio {compress_ratio}")
        return self.compress_ratios.index(compress_ratio)

    @classmethod
    def from_json(cls, path: str | Path) -> DeepseekV4Config:
        """Read a HuggingFace config.json, in DeepSeek's own spelling or in transformers'."""
        return cls.from_dict(read_json(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DeepseekV4Config:
        """The config of a parsed config.json; keys that do not concern attention are ignored.

        Missing numbers are those of V4-Flash; the kinds of the layers (compress_ratios or layer_types) must be there.
        A missing rope_scaling is V4-Flash's too, one that is null means none.
        """
        kind = raw.get("model_type", "deepseek_v4")
        require(kind == "deepseek_v4", "model_type", "'deepseek_v4'", kind)
        return cls(**{**dimensions(raw), "compress_ratios": _compress_ratios(raw)})

    def reduced(self) -> DeepseekV4Config:
        """The same layer kinds at a width that a laptop runs in seconds; top-k is small enough to truncate rows."""
        return replace(
            self,
            hidden_size=512,
            num_attention_heads=16,
            q_lora_rank=256,
            o_groups=2,
            o_lora_rank=256,
            index_n_heads=16,
            index_topk=16,
        )


V4_FLASH = DeepseekV4Config()
V4_PRO = DeepseekV4Config(
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=128,
    q_lora_rank=1536,
    o_groups=16,
    index_topk=1024,
    compress_ratios=(128, 128, *((4, 128) * 29), 4, 1),
)
PRESETS = {"v4-flash": V4_FLASH, "v4-pro": V4_PRO}


def dimensions(raw: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a parsed config.json that all models of the family have, but for the kinds of the layers."""
    values: dict[str, Any] = {}
    for name in (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "o_groups", "o_lora_rank",
        "index_n_heads", "index_topk", "sliding_window", "rms_norm_eps", "hc_mult", "max_position_embeddings",
        "rope_theta", "compress_rope_theta", "head_dim", "qk_rope_head_dim", "index_head_dim",
    ):  # fmt: skip
        if raw.get(name) is not None:
            values[name] = raw[name]
    return values | _rope(raw)


def _compress_ratios(raw: dict[str, Any]) -> tuple[int, ...]:
    ratios: Any = raw.get("compress_ratios")
    types: Any = raw.get("layer_types")
    if ratios is None and types is not None:
        require(isinstance(types, list), "layer_types", "a list", types)
        for name in types:
            known = isinstance(name, str) and name in _LAYER_TYPES
            require(known, "layer_types", f"entries among {sorted(_LAYER_TYPES)}", name)
        return tuple(_LAYER_TYPES[name] for name in types)
    require(isinstance(ratios, list), "compress_ratios", "a list of integers", ratios)
    for ratio in ratios:
        require(type(ratio) is int, "compress_ratios", "a list of integers", ratio)
    return tuple(1 if r == 0 else r for r in ratios)


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    if raw.get(name) is None and raw.get("rope_scaling", ...) is None:
        return {"rope_factor": 1.0}
    scaling = raw.get(name) or {}
    require(isinstance(scaling, dict), name, "an object", scaling)
    values: dict[str, Any] = {}
    if "compress" in scaling:
        for key, part in (("rope_theta", "main"), ("compress_rope_theta", "compress")):
            section = scaling.get(part, {})
            require(isinstance(section, dict), f"{name}.{part}", "an object", section)
            if section.get("rope_theta") is not None:
                values[key] = section["rope_theta"]
        scaling = scaling["compress"]
    elif scaling.get("rope_theta") is not None:
        values["rope_theta"] = scaling["rope_theta"]
    kind = scaling.get("rope_type", scaling.get("type", "yarn"))
    if kind == "default":
        return {**values, "rope_factor": 1.0}
    require(kind == "yarn", f"{name}.type", "'yarn'", kind)
    names = {
        "factor": "rope_factor",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "original_max_position_embeddings": "rope_original_max_position",
    }
    values.update({ours: scaling[theirs] for theirs, ours in names.items() if scaling.get(theirs) is not None})
    return values
