# SPDX-License-Identifier: Apache-2.0
"""V4.1's configuration and weights: published numbers and names, FP8 blocks of 32 x 32, errors of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layers import (
    CheckpointError,
    ConfigError,
    DeepseekV4Config,
    DeepseekV41Config,
    build_layer,
    build_v41_draft_context,
    build_v41_layer,
    held_layers,
    random_v41_draft_context_tensors,
    random_v41_layer_tensors,
    read_v41_draft_context_tensors,
    read_v41_layer_tensors,
)
from layers.v41_checkpoint import expand_weight, v41_tensor_shapes
from layers.v41_config import DRAFT, INDEX_SOURCE, KINDS, SOURCE, V41_PRESETS, WINDOW, is_v41
from tests import oracle
from tests.layers.v41_engine import CONFIG

FLASH = V41_PRESETS["v4.1-flash"]
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "sliding_window": 128,
    "rms_norm_eps": 1e-20,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [37, 38, 39],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576,
}
NESTED = {"model_type": "deepseek_v41", "text_config": TEXT, "vision_config": {"hidden_size": 1}}


@pytest.mark.parametrize("raw", [NESTED, {**TEXT, "model_type": "deepseek_v41"}], ids=["nested", "flat"])
def test_published_numbers(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    assert DeepseekV41Config.from_json(path) == FLASH
    assert is_v41(raw)
    with pytest.raises(ConfigError, match="model_type: expected 'deepseek_v4', got 'deepseek_v41'"):
        DeepseekV4Config.from_dict(raw)


def test_kinds_and_owners() -> None:
    kinds = {kind: [i for i in range(43) if FLASH.kind_of(i) == kind] for kind in (WINDOW, SOURCE, INDEX_SOURCE)}
    assert kinds == {WINDOW: [0, 1], SOURCE: [2, 8, 14, 20], INDEX_SOURCE: [24, 28, 32, 36]}
    assert [i for i in range(43) if FLASH.kind_of(i) == DRAFT] == [40, 41, 42] == list(FLASH.draft_layer_ids)
    assert [FLASH.source_of(i) for i in (2, 7, 8, 19, 20, 39)] == [2, 2, 8, 14, 20, 20]
    assert [FLASH.index_source_of(i) for i in (3, 19, 20, 23, 24, 39)] == [2, 14, 20, 20, 24, 36]
    assert [i for i in range(43) if FLASH.takes_candidates(i)] == [24, 28, 32, 36]
    small = FLASH.reduced()
    assert {small.kind_of(i) for i in range(len(small.compress_ratios))} == set(KINDS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": [0, 4]}, "compress_ratios"),
        ({"compress_ratios": [*TEXT["compress_ratios"][:2], 4, *TEXT["compress_ratios"][3:]]}, "among"),
        ({"compress_ratios": None}, "compress_ratios: expected a list of integers, got None"),
        ({"kv_source_layer_ids": [8, 2]}, "kv_source_layer_ids: expected ascending layers of ratio 1 or 2"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "kv_source_layer_ids: expected a source at or before layer 2"),
        ({"kv_source_layer_ids": [2, 20, 40]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [2, 24]}, "compress_ratios: expected 2 of layer 20, as its source 2, got 1"),
        ({"index_source_layer_ids": [2, 8, 20]}, "index_source_layer_ids: expected all sources"),
        ({"candidate_source_layer_id": 24}, "candidate_source_layer_id: expected one of the sources"),
        ({"candidate_block_size": 16}, "candidate_block_size: expected 8, got 16"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks: expected a positive integer"),
        ({"index_head_dim": 64}, "index_head_dim: expected 128, got 64"),
        ({"dspark_block_size": 0}, "draft_block_size: expected a positive integer"),
        ({"dspark_target_layer_ids": [39, 38]}, "draft_target_layer_ids: expected ascending layers below 40"),
        ({"dspark_target_layer_ids": [39, 40]}, "draft_target_layer_ids: expected ascending layers below 40"),
        ({"dspark_target_layer_ids": 39}, "dspark_target_layer_ids: expected a list of integers, got 39"),
        ({"compress_ratios": [*TEXT["compress_ratios"][:40], 1]}, "compress_ratios: expected 0 of layers behind"),
    ],
)
def test_configs_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        DeepseekV41Config.from_dict({**NESTED, "text_config": {**TEXT, **changes}})
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="model_type: expected 'deepseek_v41'"):
        DeepseekV41Config.from_dict({**TEXT, "model_type": "deepseek_v4"})


def test_a_layer_of_v4_does_not_take_it() -> None:
    """V4's ratio 1 is a window alone, V4.1's is a cache of all tokens."""
    with pytest.raises(TypeError, match="config: expected a DeepseekV4Config, got DeepseekV41Config"):
        build_layer(FLASH, 20, {})  # type: ignore[arg-type]


def test_names_and_shapes_of_tensors() -> None:
    shapes = v41_tensor_shapes(FLASH, 2)
    own = {name for name in shapes if name.startswith(("compressor", "indexer"))}
    assert own == {
        "compressor.wkv.weight",
        "compressor.wgate.weight",
        "compressor.norm.weight",
        "indexer.wk.weight",
        "indexer.k_norm.weight",
        "indexer.wq_b.weight",
        "indexer.weights_proj.weight",
    }
    assert own - v41_tensor_shapes(FLASH, 20).keys() == {"compressor.wgate.weight"}
    selects = {"indexer.wq_b.weight", "indexer.weights_proj.weight"}
    assert v41_tensor_shapes(FLASH, 24).keys() - v41_tensor_shapes(FLASH, 0).keys() == selects
    assert v41_tensor_shapes(FLASH, 25) == v41_tensor_shapes(FLASH, 0)
    assert (shapes["wq_a.weight"], shapes["indexer.wk.weight"]) == ((1280, 5120), (128, 512))
    assert random_v41_layer_tensors(CONFIG, 0)["wq_a.scale"].shape == (4, 8)


def test_expansion_is_exact() -> None:
    """Every code under scales from block to block, against the table of code values."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 1)[:, torch.arange(256) % 128 != 127]
    codes = torch.nn.functional.pad(codes, (0, 2))  # 64 x 256
    byte = torch.randint(60, 200, (2, 8), generator=torch.Generator().manual_seed(0))
    scale = torch.exp2(byte.double() - 127).float()
    weight = codes.view(torch.float8_e4m3fn)
    got = expand_weight("w", weight, scale)
    want = oracle.E4M3[codes.numpy()] * np.kron(scale.numpy().astype(np.float64), np.ones((32, 32)))
    np.testing.assert_array_equal(oracle.to_numpy(got), want)
    with pytest.raises(CheckpointError, match="w: holds values that bf16 has not"):
        expand_weight("w", weight, torch.full((2, 8), 2.0**-127))
    with pytest.raises(CheckpointError, match="w: holds values that bf16 has not"):
        expand_weight("w", weight, torch.full((2, 8), 1.7))


@pytest.mark.parametrize(("layer", "name"), [(0, "layers.0"), (1, "layers.1"), (5, "layers.5"), (8, "mtp.1")])
def test_a_checkpoint_is_read(layer: int, name: str, tmp_path: Path) -> None:
    tensors = random_v41_layer_tensors(CONFIG, layer)
    published = {f"{name}.attn.{short}": tensor for short, tensor in tensors.items()}
    others = {"layers.40.attn.wkv.weight": torch.zeros(1), "mtp.0.attn.wkv.weight": torch.zeros(1)}
    save_file({**others, **published}, tmp_path / "model.safetensors")
    assert held_layers(tmp_path, CONFIG.num_hidden_layers) == sorted({layer, 7, 40})
    found = read_v41_layer_tensors(tmp_path, layer, CONFIG)
    assert found.keys() == tensors.keys()
    a, b = build_v41_layer(CONFIG, layer, found), build_v41_layer(CONFIG, layer, tensors)
    assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))
    assert a.wq_b.weight.dtype == torch.bfloat16
    assert a.weight_bytes is not None
    assert a.weight_bytes.stored == sum(t.nbytes for t in tensors.values())
    fp8 = sum(t.numel() for t in tensors.values() if t.dtype == torch.float8_e4m3fn)
    scales = sum(t.numel() for t in tensors.values() if t.dtype == torch.float8_e8m0fnu)
    assert a.weight_bytes.kept == a.weight_bytes.stored + fp8 - scales


def test_a_draft_context_is_read(tmp_path: Path) -> None:
    tensors = random_v41_draft_context_tensors(CONFIG)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "proj.weight": (256, 768), "proj.scale": (8, 24), "norm.weight": (256,)
    }  # fmt: skip
    published = {f"mtp.0.main_{name}": tensor for name, tensor in tensors.items()}
    save_file({**published, "mtp.1.main_norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    found = build_v41_draft_context(CONFIG, read_v41_draft_context_tensors(tmp_path, CONFIG))
    weight = oracle.E4M3[tensors["proj.weight"].view(torch.uint8).numpy()]
    scale = 2.0 ** (tensors["proj.scale"].view(torch.uint8).numpy().astype(np.float64) - 127)
    np.testing.assert_array_equal(oracle.to_numpy(found.proj.weight), weight * np.kron(scale, np.ones((32, 32))))
    assert torch.equal(found.norm_weight, tensors["norm.weight"])
    with pytest.raises(CheckpointError, match=r"mtp.0.main_: proj.weight: expected shape \[256, 768\]"):
        build_v41_draft_context(CONFIG, {**tensors, "proj.weight": tensors["proj.weight"][:, :512]})


def test_tensors_that_do_not_fit() -> None:
    good = random_v41_layer_tensors(CONFIG, 1)

    def refused(message: str, **changes: torch.Tensor | None) -> None:
        tensors = {name: tensor for name, tensor in {**good, **changes}.items() if tensor is not None}
        with pytest.raises(CheckpointError, match=message) as caught:
            build_v41_layer(CONFIG, 1, tensors)
        assert "\n" not in str(caught.value)

    refused(r"layer 1: missing tensor indexer.wk.weight", **{"indexer.wk.weight": None})
    refused(r"wkv.weight: expected shape \[512, 256\], got \[512, 128\]", **{"wkv.weight": good["wkv.weight"][:, :128]})
    refused(r"wkv: FP8 weight without wkv.scale", **{"wkv.scale": None})
    refused(r"wkv.scale: expected shape \[16, 8\], got \[4, 2\]", **{"wkv.scale": good["wkv.scale"][:4, :2]})
    refused(r"wkv.scale: expected finite scales above 0", **{"wkv.scale": torch.zeros(16, 8)})
    refused(r"q_norm.weight: holds NaN", **{"q_norm.weight": good["q_norm.weight"] * torch.nan})
    refused(r"wo_b.weight: expected bf16, fp32 or e4m3", **{"wo_b.weight": good["wo_b.weight"].view(torch.int8)})
