# SPDX-License-Identifier: Apache-2.0
"""Model configurations: the published numbers, both spellings of config.json, and errors of one line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from layers import PRESETS, ConfigError, DeepseekV4Config
from layers.config import COMPRESS_RATIOS

FLASH_RATIOS = [0, 0, *([4, 128] * 20), 4, 0]
PRO_RATIOS = [128, 128, *([4, 128] * 29), 4, 0]
YARN = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
DEEPSEEK = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 1024,
    "sliding_window": 128,
    "compress_ratios": PRO_RATIOS,
    "compress_rope_theta": 160000,
    "rope_theta": 10000,
    "rope_scaling": YARN,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "max_position_embeddings": 1048576,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
COMPRESS = {
    "rope_type": "yarn",
    "rope_theta": 160000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 65536,
    "attention_factor": 1.0,
    "partial_rotary_factor": 0.125,
}
MAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125}


def transformers_spelling(**changes: Any) -> dict[str, Any]:
    """What transformers saves: layer types of the layers without the prediction layer, nested rope parameters."""
    raw = {k: v for k, v in DEEPSEEK.items() if k not in ("compress_ratios", "rope_scaling", "qk_rope_head_dim")}
    raw["layer_types"] = [TYPES[r] for r in PRO_RATIOS[:61]]
    raw["compress_rates"] = {TYPES[4]: 4, TYPES[128]: 128}
    raw["rope_parameters"] = {"main": MAIN, "compress": COMPRESS}
    return {**raw, **changes}


def write(path: Path, raw: object) -> Path:
    path.write_text(json.dumps(raw), encoding="utf-8")
    return path


def test_presets_have_the_published_numbers() -> None:
    flash, pro = PRESETS["v4-flash"], PRESETS["v4-pro"]
    common = {
        "head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_n_heads": 64, "o_lora_rank": 1024,
        "sliding_window": 128, "rms_norm_eps": 1e-6, "hc_mult": 4, "max_position_embeddings": 1048576,
        "rope_theta": 10000, "compress_rope_theta": 160000, "rope_factor": 16, "rope_beta_fast": 32,
        "rope_beta_slow": 1, "rope_original_max_position": 65536, "heads_per_group": 8, "softmax_scale": 512**-0.5,
    }  # fmt: skip
    own = {
        "hidden_size": (4096, 7168), "num_hidden_layers": (43, 61), "num_attention_heads": (64, 128),
        "q_lora_rank": (1024, 1536), "o_groups": (8, 16), "index_topk": (512, 1024),
    }  # fmt: skip
    for config, column in ((flash, 0), (pro, 1)):
        for name, value in common.items():
            assert getattr(config, name) == value, name
        for name, values in own.items():
            assert getattr(config, name) == values[column], name
    assert flash.compress_ratios == tuple(r or 1 for r in FLASH_RATIOS)
    assert pro.compress_ratios == tuple(r or 1 for r in PRO_RATIOS)
    # the last layer is the prediction layer
    assert Counter(flash.compress_ratios[:43]) == {1: 2, 4: 21, 128: 20}
    assert Counter(pro.compress_ratios[:61]) == {4: 30, 128: 31}


def test_layer_of_kind_is_the_first_one() -> None:
    assert [PRESETS["v4-flash"].layer_of_kind(r) for r in COMPRESS_RATIOS] == [0, 2, 3]
    assert [PRESETS["v4-pro"].layer_of_kind(r) for r in COMPRESS_RATIOS] == [61, 2, 0]
    with pytest.raises(ConfigError, match="no layer with compress ratio 128"):
        DeepseekV4Config(num_hidden_layers=1, compress_ratios=(4,)).layer_of_kind(128)


def test_reduced_keeps_the_kinds() -> None:
    for config in PRESETS.values():
        small = config.reduced()
        assert small.compress_ratios == config.compress_ratios
        assert small.sliding_window == 128
        assert small.num_attention_heads % small.o_groups == 0
        assert small.index_topk < 32


def test_deepseeks_spelling(tmp_path: Path) -> None:
    assert DeepseekV4Config.from_json(write(tmp_path / "config.json", DEEPSEEK)) == PRESETS["v4-pro"]
    flash = {
        **DEEPSEEK, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "q_lora_rank": 1024,
        "o_groups": 8, "index_topk": 512, "compress_ratios": FLASH_RATIOS,
    }  # fmt: skip
    assert DeepseekV4Config.from_json(str(write(tmp_path / "flash.json", flash))) == PRESETS["v4-flash"]
    # one published variant lists three prediction layers
    more = DeepseekV4Config.from_dict({**flash, "compress_ratios": [*FLASH_RATIOS, 0, 0]})
    assert more.compress_ratios == (*PRESETS["v4-flash"].compress_ratios, 1, 1)


def test_every_number_is_read() -> None:
    raw = {
        "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "q_lora_rank": 96, "o_groups": 2,
        "o_lora_rank": 64, "index_n_heads": 4, "index_topk": 7, "sliding_window": 32, "rms_norm_eps": 1e-5,
        "hc_mult": 2, "max_position_embeddings": 999, "rope_theta": 5e3, "compress_rope_theta": 7e4,
    }  # fmt: skip
    scaling = {"type": "yarn", "factor": 8, "beta_fast": 20, "beta_slow": 2, "original_max_position_embeddings": 77}
    config = DeepseekV4Config.from_dict({**raw, "compress_ratios": [0, 128, 4], "rope_scaling": scaling})
    for name, value in raw.items():
        assert getattr(config, name) == value
    assert config.compress_ratios == (1, 128, 4)
    assert (config.rope_factor, config.rope_beta_fast, config.rope_beta_slow) == (8, 20, 2)
    assert config.rope_original_max_position == 77
    assert config.heads_per_group == 4


def test_transformers_spelling_nested(tmp_path: Path) -> None:
    config = DeepseekV4Config.from_json(write(tmp_path / "config.json", transformers_spelling()))
    pro = PRESETS["v4-pro"]
    assert config.compress_ratios == pro.compress_ratios[:61]
    assert {k: v for k, v in vars(config).items() if k != "compress_ratios"} == {
        k: v for k, v in vars(pro).items() if k != "compress_ratios"
    }


def test_transformers_spelling_nested_thetas_win() -> None:
    parameters = {"main": {**MAIN, "rope_theta": 123.0}, "compress": {**COMPRESS, "rope_theta": 456.0, "factor": 2.0}}
    config = DeepseekV4Config.from_dict(transformers_spelling(rope_parameters=parameters))
    assert (config.rope_theta, config.compress_rope_theta, config.rope_factor) == (123.0, 456.0, 2.0)


def test_transformers_spelling_flat() -> None:
    """A flat object describes the layers with a compressor; the thetas stay where they are."""
    config = DeepseekV4Config.from_dict(
        transformers_spelling(rope_parameters={**YARN, "rope_type": "yarn", "factor": 5.0})
    )
    assert (config.rope_theta, config.compress_rope_theta, config.rope_factor) == (10000, 160000, 5.0)


def test_default_rope_type_means_no_scaling() -> None:
    parameters = {"main": MAIN, "compress": {"rope_type": "default", "rope_theta": 160000.0}}
    for raw in ({"rope_parameters": parameters}, {"rope_parameters": {"rope_type": "default"}}):
        assert DeepseekV4Config.from_dict(transformers_spelling(**raw)).rope_factor == 1.0


def test_rope_scaling_null_means_none_and_missing_means_published() -> None:
    raw = without("rope_scaling")
    assert DeepseekV4Config.from_dict({**raw, "rope_scaling": None}).rope_factor == 1.0
    assert DeepseekV4Config.from_dict(raw).rope_factor == 16.0
    # transformers' key counts even if the other one is null
    assert DeepseekV4Config.from_dict({**raw, "rope_scaling": None, "rope_parameters": YARN}).rope_factor == 16.0


def test_flat_rope_parameters_may_hold_theta() -> None:
    raw = transformers_spelling(rope_parameters={**YARN, "rope_theta": 777.0})
    del raw["rope_theta"]
    config = DeepseekV4Config.from_dict(raw)
    assert (config.rope_theta, config.compress_rope_theta) == (777.0, 160000)


def test_a_null_rope_scaling_means_none_and_a_missing_one_deepseeks() -> None:
    assert DeepseekV4Config.from_dict({**DEEPSEEK, "rope_scaling": None}).rope_factor == 1.0
    assert DeepseekV4Config.from_dict(without("rope_scaling")).rope_factor == 16.0
    flat = {**YARN, "rope_type": "yarn", "rope_theta": 77.0}
    config = DeepseekV4Config.from_dict(transformers_spelling(rope_parameters=flat))
    assert (config.rope_theta, config.compress_rope_theta) == (77.0, 160000)


def test_null_values_and_foreign_keys_are_ignored() -> None:
    raw = {**DEEPSEEK, "rope_parameters": None, "layer_types": None, "index_topk": None, "n_routed_experts": "many"}
    assert DeepseekV4Config.from_dict(raw).index_topk == 512


def without(*names: str) -> dict[str, Any]:
    return {k: v for k, v in DEEPSEEK.items() if k not in names}


BAD = [
    ({**DEEPSEEK, "model_type": "llama"}, "model_type", "'llama'"),
    ({**DEEPSEEK, "model_type": None}, "model_type", "None"),
    ({**DEEPSEEK, "compress_ratios": [4, 8] * 40}, "compress_ratios", "8"),
    ({**DEEPSEEK, "compress_ratios": [-4] * 61}, "compress_ratios", "-4"),
    ({**DEEPSEEK, "compress_ratios": [4.0] * 61}, "compress_ratios", "4.0"),
    ({**DEEPSEEK, "compress_ratios": [True] * 61}, "compress_ratios", "True"),
    ({**DEEPSEEK, "compress_ratios": "0,4,128"}, "compress_ratios", "'0,4,128'"),
    ({**DEEPSEEK, "compress_ratios": {"0": 4}}, "compress_ratios", "{'0': 4}"),
    ({**DEEPSEEK, "compress_ratios": [4, 128]}, "compress_ratios", "2"),
    (without("compress_ratios"), "compress_ratios", "None"),
    ({**DEEPSEEK, "compress_ratios": None}, "compress_ratios", "None"),
    (transformers_spelling(layer_types=["full_attention"] * 61), "layer_types", "'full_attention'"),
    (transformers_spelling(layer_types=[["sliding_attention"]] * 61), "layer_types", "['sliding_attention']"),
    (transformers_spelling(layer_types="sliding_attention"), "layer_types", "'sliding_attention'"),
    (transformers_spelling(layer_types=[4] * 61), "layer_types", "4"),
    ({**DEEPSEEK, "hidden_size": "7168"}, "hidden_size", "'7168'"),
    ({**DEEPSEEK, "hidden_size": 7168.0}, "hidden_size", "7168.0"),
    ({**DEEPSEEK, "num_hidden_layers": True}, "num_hidden_layers", "True"),
    ({**DEEPSEEK, "num_attention_heads": 0}, "num_attention_heads", "0"),
    ({**DEEPSEEK, "num_attention_heads": 100}, "num_attention_heads", "100"),
    ({**DEEPSEEK, "sliding_window": -128}, "sliding_window", "-128"),
    ({**DEEPSEEK, "index_topk": [1024]}, "index_topk", "[1024]"),
    ({**DEEPSEEK, "rms_norm_eps": "1e-6"}, "rms_norm_eps", "'1e-6'"),
    ({**DEEPSEEK, "rms_norm_eps": 0}, "rms_norm_eps", "0"),
    ({**DEEPSEEK, "rms_norm_eps": 10**400}, "rms_norm_eps", "1000"),
    ({**DEEPSEEK, "index_topk": 2**31}, "index_topk", "2147483648"),
    ({**DEEPSEEK, "rope_theta": True}, "rope_theta", "True"),
    ({**DEEPSEEK, "rope_theta": 1}, "rope_theta", "1"),
    ({**DEEPSEEK, "compress_rope_theta": 1.0}, "compress_rope_theta", "1.0"),
    ({**DEEPSEEK, "rope_theta": float("nan")}, "rope_theta", "nan"),
    ({**DEEPSEEK, "compress_rope_theta": float("inf")}, "compress_rope_theta", "inf"),
    ({**DEEPSEEK, "head_dim": 128}, "head_dim", "128"),
    ({**DEEPSEEK, "qk_rope_head_dim": 32}, "qk_rope_head_dim", "32"),
    ({**DEEPSEEK, "index_head_dim": 64}, "index_head_dim", "64"),
    ({**DEEPSEEK, "rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling", "'linear'"),
    ({**DEEPSEEK, "rope_scaling": {**YARN, "factor": "16"}}, "rope_factor", "'16'"),
    ({**DEEPSEEK, "rope_scaling": {**YARN, "original_max_position_embeddings": 65536.0}}, "original", "65536.0"),
    ({**DEEPSEEK, "rope_scaling": "yarn"}, "rope_scaling", "'yarn'"),
    ({**DEEPSEEK, "rope_scaling": ["yarn"]}, "rope_scaling", "['yarn']"),
    (transformers_spelling(rope_parameters=7), "rope_parameters", "7"),
    (transformers_spelling(rope_parameters={"main": 5, "compress": COMPRESS}), "main", "5"),
    (transformers_spelling(rope_parameters={"main": MAIN, "compress": 5}), "compress", "5"),
    (transformers_spelling(rope_parameters={"main": {"rope_theta": "x"}, "compress": COMPRESS}), "rope_theta", "'x'"),
    (transformers_spelling(rope_parameters={**COMPRESS, "rope_type": ["yarn"]}), "type", "['yarn']"),
]


@pytest.mark.parametrize(("raw", "key", "got"), BAD, ids=range(len(BAD)))
def test_errors_are_one_line_and_name_the_key(raw: dict[str, Any], key: str, got: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        DeepseekV4Config.from_json(write(tmp_path / "config.json", raw))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("config: ")
    assert key in message
    assert message.endswith(got) or f"got {got}" in message


def test_files_that_are_no_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    cases = [
        (path, None, "No such file"),
        (tmp_path, None, "directory"),
        (path, b"", "not valid JSON"),
        (path, b'{"hidden_size": 1,\n "x" 2}', "not valid JSON"),
        (path, b"\xff\xfe\x00", "not valid JSON"),
        (path, b"[" * 200000, "not valid JSON"),
        (path, b"[1, 2]", "expected an object, got list"),
        (path, b"null", "expected an object, got NoneType"),
    ]
    for file, content, expected in cases:
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=expected) as caught:
            DeepseekV4Config.from_json(file)
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_long_value_does_not_fill_the_screen() -> None:
    with pytest.raises(ConfigError) as caught:
        DeepseekV4Config.from_dict({**DEEPSEEK, "compress_ratios": ["4"] * 5000})
    assert len(str(caught.value)) < 300
