# SPDX-License-Identifier: Apache-2.0
"""Weights that would give wrong numbers without a word: foreign number formats, NaN, broken scales."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from layers import PRESETS, AttentionOptions, CheckpointError, build_layer, random_layer_tensors, read_layer_tensors

CONFIG = replace(PRESETS["v4-flash"].reduced(), hidden_size=128, num_attention_heads=2, o_groups=1, index_n_heads=2)
LAYER = 2


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    return random_layer_tensors(CONFIG, LAYER)


def build(tensors: dict[str, torch.Tensor]) -> None:
    build_layer(CONFIG, LAYER, tensors, options=AttentionOptions(max_model_len=64, max_num_tokens=8))


def with_value(x: torch.Tensor, value: object) -> torch.Tensor:
    """The tensor with its last element replaced."""
    flat = x.clone().flatten()
    flat[-1] = value
    return flat.view(x.shape)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.int8])
@pytest.mark.parametrize("name", ["wq_b.weight", "compressor.wgate.weight", "kv_norm.weight"])
def test_foreign_formats(tensors: dict[str, torch.Tensor], name: str, dtype: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=f"layer 2: {name}: expected bf16, fp32 or e4m3, got {dtype}"):
        build({**tensors, name: tensors[name].float().abs().to(dtype)})


@pytest.mark.parametrize("name", ["q_norm.weight", "indexer.weights_proj.weight", "compressor.ape", "attn_sink"])
def test_nan(tensors: dict[str, torch.Tensor], name: str) -> None:
    with pytest.raises(CheckpointError, match=f"layer 2: {name}: holds NaN"):
        build({**tensors, name: with_value(tensors[name], float("nan"))})


def test_nan_codes(tensors: dict[str, torch.Tensor]) -> None:
    for sign in (0, 0x80):
        codes = with_value(tensors["wo_b.weight"].view(torch.uint8), 0x7F | sign).view(torch.float8_e4m3fn)
        with pytest.raises(CheckpointError, match=r"layer 2: wo_b\.weight: holds NaN"):
            build({**tensors, "wo_b.weight": codes})


def test_infinite_values(tensors: dict[str, torch.Tensor]) -> None:
    """Only a sink may be infinite: it then takes all of the weight, or none."""
    for value in (float("inf"), -float("inf")):
        with pytest.raises(CheckpointError, match=r"compressor\.wkv\.weight: holds NaN or infinite"):
            build({**tensors, "compressor.wkv.weight": with_value(tensors["compressor.wkv.weight"], value)})
    build({**tensors, "attn_sink": torch.tensor([float("inf"), -float("inf")])})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_broken_scales(tensors: dict[str, torch.Tensor], value: float) -> None:
    with pytest.raises(CheckpointError, match=r"layer 2: wkv\.scale: expected finite"):
        build({**tensors, "wkv.scale": with_value(tensors["wkv.scale"], value)})


def test_a_block_of_zeros_may_have_the_scale_zero(tensors: dict[str, torch.Tensor]) -> None:
    build({**tensors, "wkv.scale": with_value(tensors["wkv.scale"], 0.0)})


def test_ue8m0_has_a_code_for_nan(tensors: dict[str, torch.Tensor]) -> None:
    scale = with_value(torch.full(tensors["wkv.scale"].shape, 127, dtype=torch.uint8), 255)
    with pytest.raises(CheckpointError, match=r"layer 2: wkv\.scale: expected finite"):
        build({**tensors, "wkv.scale": scale.view(torch.float8_e8m0fnu)})


def test_an_index_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("[" * 100000)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        read_layer_tensors(tmp_path, 0)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
        read_layer_tensors(tmp_path, 0)
