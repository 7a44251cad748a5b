# SPDX-License-Identifier: Apache-2.0
"""What kernels depend on in a model: names and numbers of the layers' configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

_LAYER_TYPES = {"sliding_attention": 1, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


class ModelConfig(Protocol):
    """What kernels read of a model's configuration: a ModelShape, or a cute_kernels.layers.DeepseekV4Config."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def q_lora_rank(self) -> int: ...

    @property
    def o_groups(self) -> int: ...

    @property
    def o_lora_rank(self) -> int: ...

    @property
    def index_n_heads(self) -> int: ...

    @property
    def index_topk(self) -> int: ...

    @property
    def sliding_window(self) -> int: ...

    @property
    def hc_mult(self) -> int: ...

    @property
    def compress_ratios(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of the attention layers; compress_ratios[i] is the kind of layer i: 1, 4 or 128."""

    hidden_size: int = 4096
    num_attention_heads: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    index_n_heads: int = 64
    index_topk: int = 512
    sliding_window: int = 128
    hc_mult: int = 4
    compress_ratios: tuple[int, ...] = (1, 1, *((4, 128) * 20), 4, 1)

    @classmethod
    def from_json(cls, path: str | Path) -> ModelShape:
        """The shape in a HuggingFace config.json; ValueError, in one line, if there is none in it."""
        try:
            raw = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"config: cannot read {path}: {error}") from error
        if not isinstance(raw, dict) or raw.get("model_type", "deepseek_v4") != "deepseek_v4":
            raise ValueError(f"config: {path}: expected a config.json with model_type 'deepseek_v4'")
        values: dict[str, Any] = {}
        for field in fields(cls):
            if field.name != "compress_ratios" and raw.get(field.name) is not None:
                values[field.name] = _positive(field.name, raw[field.name])
        ratios = raw.get("compress_ratios")
        if ratios is None and raw.get("layer_types") is not None:
            ratios = [_LAYER_TYPES.get(str(name)) for name in raw["layer_types"]]
        if ratios is not None:
            values["compress_ratios"] = _ratios(ratios)
        return cls(**values)


def latent_ratios(config: ModelConfig) -> tuple[int, ...]:
    """Ratios of V4.1's compressors, 1 and 2; none of a V4 model, whose config does not name them."""
    return tuple(getattr(config, "latent_ratios", ()))


def has_indexer(config: ModelConfig) -> bool:
    """Whether some layers pick entries by scores."""
    return 4 in config.compress_ratios or bool(latent_ratios(config))


def _positive(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"config: {name}: expected a positive integer, got {value!r}")
    return value


def _ratios(ratios: object) -> tuple[int, ...]:
    known = {0: 1, 1: 1, 4: 4, 128: 128}
    if not isinstance(ratios, list) or not all(type(r) is int and r in known for r in ratios):
        raise ValueError(f"config: compress_ratios: expected a list of 0, 1, 4 and 128, got {ratios!r}")
    return tuple(known[r] for r in ratios)


MODELS = {
    "v4-flash": ModelShape(),
    "v4-pro": ModelShape(
        hidden_size=7168,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        index_topk=1024,
        compress_ratios=(128, 128, *((4, 128) * 29), 4, 1),
    ),
}
"""Models by the names that --model takes."""
