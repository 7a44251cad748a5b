# SPDX-License-Identifier: Apache-2.0
"""Configuration of V4.1: which layers compress, which select, and whose entries and selections the others read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import AttentionConfig, dimensions, read_json, require

MODEL_TYPE = "deepseek_v41"
LATENT_RATIOS = (2, 1)
"""Tokens of a compressed entry. Not what `compress_ratio` 1 of V4's ops and layers means, which is no entries at all:
that is 0 here."""

CANDIDATE_BLOCK = 8
"""Entries of a candidate block: `select_candidate_blocks` has no others."""

WINDOW, SOURCE, INDEX_SOURCE, CONSUMER, DRAFT = "window", "source", "index source", "consumer", "draft"
KINDS = (WINDOW, SOURCE, INDEX_SOURCE, CONSUMER, DRAFT)
"""Kinds of layers. All attend to a window of their own; sources, index sources and consumers to compressed entries too:

window         to nothing else
source         compresses, stores entries and index keys, and selects among all of them
index source   selects among the entries of the source before it: of the candidate source, among its candidate blocks
consumer       takes the selection of the layer before that selects
draft          one behind the model's layers: attends to a window that others fill, and to all of its own block of rows
"""


def is_v41(raw: dict[str, Any]) -> bool:
    """Whether a parsed config.json is V4.1's: its own model_type says so, or that of its text_config."""
    text = raw.get("text_config")
    return MODEL_TYPE in (raw.get("model_type"), text.get("model_type") if isinstance(text, dict) else None)


@dataclass(frozen=True)
class DeepseekV41Config(AttentionConfig):
    """Dimensions of V4.1's attention layers.

    compress_ratios[i]          tokens per entry of the compressed cache that layer i reads; 0: it reads none
    kv_source_layer_ids         layers that own a compressor, a compressed cache and index keys, ascending
    index_source_layer_ids      layers that run the indexer, ascending; those above are among them
    candidate_source_layer_id   the layer that selects candidate blocks, for the index sources that read its keys
    draft_block_size            rows of a request that draft layers run at once
    draft_target_layer_ids      layers whose hidden states draft layers know the tokens before by, ascending
    """

    hidden_size: int = 5120
    num_hidden_layers: int = 40
    q_lora_rank: int = 1280
    index_n_heads: int = 32
    rms_norm_eps: float = 1e-20
    compress_ratios: tuple[int, ...] = (0, 0, *((2,) * 18), *((1,) * 20), 0, 0, 0)
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = CANDIDATE_BLOCK
    draft_block_size: int = 5
    draft_target_layer_ids: tuple[int, ...] = (37, 38, 39)

    def __post_init__(self) -> None:
        super().__post_init__()
        ratios, allowed = self.compress_ratios, (0, *LATENT_RATIOS)
        for ratio in ratios:
            require(ratio in allowed, "compress_ratios", f"entries among {allowed}", ratio)
        reading = [layer for layer, ratio in enumerate(ratios) if ratio]
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            layers = getattr(self, name)
            fits = layers == tuple(sorted(set(layers))) and set(layers) <= set(reading)
            require(fits, name, "ascending layers of ratio 1 or 2", layers)
        sources, selecting = self.kv_source_layer_ids, self.index_source_layer_ids
        require(
            set(sources) <= set(selecting), "index_source_layer_ids", f"all sources {sources} among them", selecting
        )
        for layer in reading:
            expected = f"a source at or before layer {layer}"
            require(bool(sources) and sources[0] <= layer, "kv_source_layer_ids", expected, sources)
            source = self.source_of(layer)
            same = ratios[source] == ratios[layer]
            require(
                same, "compress_ratios", f"{ratios[source]} of layer {layer}, as its source {source}", ratios[layer]
            )
        candidate = self.candidate_source_layer_id
        require(candidate in sources, "candidate_source_layer_id", f"one of the sources {sources}", candidate)
        block, blocks = self.candidate_block_size, self.candidate_topk_blocks
        require(block == CANDIDATE_BLOCK, "candidate_block_size", f"{CANDIDATE_BLOCK}", block)
        for name, count in (("candidate_topk_blocks", blocks), ("draft_block_size", self.draft_block_size)):
            positive = type(count) is int and 0 < count < 2**31
            require(positive, name, "a positive integer below 2**31", count)
        drafts, targets = ratios[self.num_hidden_layers :], self.draft_target_layer_ids
        require(not any(drafts), "compress_ratios", "0 of layers behind num_hidden_layers", drafts)
        if drafts:
            fits = bool(targets) and targets == tuple(sorted(set(targets))) and targets[0] >= 0
            fits = fits and targets[-1] < self.num_hidden_layers
            require(fits, "draft_target_layer_ids", f"ascending layers below {self.num_hidden_layers}", targets)

    def kind_of(self, layer_index: int) -> str:
        """One of KINDS."""
        if self.compress_ratio_of(layer_index) == 0:
            return WINDOW if layer_index < self.num_hidden_layers else DRAFT
        if layer_index in self.kv_source_layer_ids:
            return SOURCE
        return INDEX_SOURCE if layer_index in self.index_source_layer_ids else CONSUMER

    def source_of(self, layer_index: int) -> int:
        """The layer whose compressed cache this one reads."""
        return max(layer for layer in self.kv_source_layer_ids if layer <= layer_index)

    def index_source_of(self, layer_index: int) -> int:
        """The layer whose selection this one takes."""
        return max(layer for layer in self.index_source_layer_ids if layer <= layer_index)

    @property
    def draft_layer_ids(self) -> tuple[int, ...]:
        """The draft's layers."""
        return tuple(range(self.num_hidden_layers, len(self.compress_ratios)))

    def takes_candidates(self, layer_index: int) -> bool:
        """Whether the layer selects among the candidate source's blocks alone."""
        source = self.candidate_source_layer_id
        return self.kind_of(layer_index) == INDEX_SOURCE and self.source_of(layer_index) == source

    @classmethod
    def from_json(cls, path: str | Path) -> DeepseekV41Config:
        """Read a HuggingFace config.json."""
        return cls.from_dict(read_json(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DeepseekV41Config:
        """The config of a parsed config.json, whose numbers are at its top or in its text_config; keys that do not
        concern attention are ignored. Missing numbers are those of V4.1-Flash; the lists of sources and index sources,
        and the ratios, must be there. The draft's numbers are those of its dspark_block_size and
        dspark_target_layer_ids."""
        text = raw.get("text_config")
        require(text is None or isinstance(text, dict), "text_config", "an object", text)
        require(is_v41(raw), "model_type", f"'{MODEL_TYPE}'", raw.get("model_type"))
        raw = text or raw
        values = dimensions(raw)
        for name in ("candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size"):
            if raw.get(name) is not None:
                values[name] = raw[name]
        if raw.get("dspark_block_size") is not None:
            values["draft_block_size"] = raw["dspark_block_size"]
        lists = {name: name for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids")}
        if raw.get("dspark_target_layer_ids") is not None:
            lists["dspark_target_layer_ids"] = "draft_target_layer_ids"
        for name, ours in lists.items():
            listed = raw.get(name)
            fits = isinstance(listed, list) and all(type(number) is int for number in listed)
            require(fits, name, "a list of integers", listed)
            values[ours] = tuple(listed)  # type: ignore[arg-type]
        return cls(**values)

    def reduced(self) -> DeepseekV41Config:
        """All kinds of layers in seven and two of a draft, at a width that a laptop runs in seconds. Of a few hundred
        tokens, selections of both ratios leave entries out, and so do candidate blocks."""
        return replace(
            self,
            hidden_size=512,
            num_hidden_layers=7,
            num_attention_heads=16,
            q_lora_rank=256,
            o_groups=2,
            o_lora_rank=256,
            index_n_heads=16,
            index_topk=16,
            compress_ratios=(0, 2, 2, 1, 1, 1, 1, 0, 0),
            kv_source_layer_ids=(1, 3),
            index_source_layer_ids=(1, 3, 5),
            candidate_source_layer_id=3,
            candidate_topk_blocks=8,
            draft_target_layer_ids=(4, 5, 6),
        )


V41_PRESETS = {"v4.1-flash": DeepseekV41Config()}
