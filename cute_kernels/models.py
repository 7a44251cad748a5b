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
        kind = raw.get("model_type", "deepseek_v4") if isinstance(raw, dict) else None
        if kind not in ("deepseek_v4", "deepseek_v41"):
            raise ValueError(f"config: {path}: expected a config.json with model_type 'deepseek_v4' or 'deepseek_v41'")
        if kind == "deepseek_v41":
            return V41Shape._from_raw(raw)
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


@dataclass(frozen=True)
class V41Shape(ModelShape):
    """V4.1: layer_ratios[i] is 0 for a layer with a window alone, else 2 or 1, tokens of an entry that it reads.

    To V4's kernels, whose ratio 1 means a window alone, no layer compresses: that is what compress_ratios says.
    """

    hidden_size: int = 5120
    q_lora_rank: int = 1280
    index_n_heads: int = 32
    compress_ratios: tuple[int, ...] = (1,)
    layer_ratios: tuple[int, ...] = (0, 0, *((2,) * 18), *((1,) * 20), 0, 0, 0)

    @property
    def latent_ratios(self) -> tuple[int, ...]:
        """Those of compressors."""
        return tuple(sorted(set(self.layer_ratios) - {0}))

    @classmethod
    def of(cls, config: ModelConfig) -> V41Shape:
        """The shape of a cute_kernels.layers.DeepseekV41Config, whose compress_ratios are the layer_ratios here."""
        names = {field.name for field in fields(cls)} - {"compress_ratios", "layer_ratios"}
        return cls(**{name: getattr(config, name) for name in names}, layer_ratios=config.compress_ratios)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any]) -> V41Shape:
        """Of a config.json, whose numbers may be in its text_config."""
        text = raw.get("text_config") if raw.get("text_config") is not None else raw
        if not isinstance(text, dict):
            raise ValueError(f"config: text_config: expected an object, got {text!r}")
        names = {field.name for field in fields(cls)} - {"compress_ratios", "layer_ratios"}
        values: dict[str, Any] = {n: _positive(n, text[n]) for n in names if text.get(n) is not None}
        ratios = text.get("compress_ratios")
        if ratios is not None:
            if not isinstance(ratios, list) or not all(type(r) is int and r in (0, 1, 2) for r in ratios):
                raise ValueError(f"config: compress_ratios: expected a list of 0, 1 and 2, got {ratios!r}")
            values["layer_ratios"] = tuple(ratios)
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
    "v4.1-flash": V41Shape(),
}
"""Models by the names that --model takes."""
