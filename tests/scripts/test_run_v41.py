# SPDX-License-Identifier: Apache-2.0
"""scripts/run_layer.py on V4.1: every kind runs, selections leave entries out, and what it cannot take is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from layers import DeepseekV41Config, random_v41_draft_context_tensors, random_v41_layer_tensors
from layers.v41_config import V41_PRESETS
from tests.scripts.runs import status

TINY = {
    "model_type": "deepseek_v41",
    "text_config": {
        "hidden_size": 128,
        "num_hidden_layers": 7,
        "num_attention_heads": 2,
        "q_lora_rank": 128,
        "o_groups": 1,
        "o_lora_rank": 128,
        "index_n_heads": 2,
        "index_topk": 4,
        "sliding_window": 16,
        "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 0, 0],
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 5],
        "candidate_source_layer_id": 3,
        "candidate_topk_blocks": 2,
        "dspark_target_layer_ids": [4, 6],
        "max_position_embeddings": 500,
    },
}
SHORT = ("--prefill", "30", "--decode", "3", "--batch", "2", "--draft", "3", "--chunk", "25")


def write_checkpoint(directory: Path, layers: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8)) -> Path:
    config = DeepseekV41Config.from_dict(TINY)
    tensors: dict[str, torch.Tensor] = {}
    for index in layers:
        for name, tensor in random_v41_layer_tensors(config, index).items():
            tensors[f"layers.{index}.attn.{name}" if index < 7 else f"mtp.{index - 7}.attn.{name}"] = tensor
    if 7 in layers:
        context = random_v41_draft_context_tensors(config)
        tensors |= {f"mtp.0.main_{name}": tensor for name, tensor in context.items()}
    (directory / "config.json").write_text(json.dumps(TINY))
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("index_cache", ["fp8", "mxfp4"])
def test_a_checkpoint(index_cache: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first layer of each kind and ratio, with drafts."""
    path, picture = tmp_path / "report.json", tmp_path / "report.html"
    flags = ("--index-cache", index_cache, "--json", path, "--html", picture)
    assert status("--checkpoint", write_checkpoint(tmp_path), *SHORT, *flags) == 0
    out, written = capsys.readouterr().out, json.loads(path.read_text())
    assert "FAIL" not in out
    assert "source, ratio 2" in picture.read_text()
    kinds = [(layer["layer"], layer["kind"]) for layer in written["layers"]]
    assert kinds == [
        (0, "window"),
        (1, "source, ratio 2"),
        (2, "consumer, ratio 2"),
        (3, "source, ratio 1"),
        (4, "consumer, ratio 1"),
        (5, "index source, ratio 1"),
        (7, "draft"),
    ]
    by_layer: dict[int, dict[str, Any]] = {layer["layer"]: layer for layer in written["layers"]}
    rows = sum(r["prefill"] + sum(r["decode"]) for r in written["requests"])
    for index in (1, 3, 5):
        assert 0 < by_layer[index]["rows_truncated_by_topk"] < by_layer[index]["rows"] == rows
    assert 0 < by_layer[5]["rows_cut_by_candidates"] < rows
    assert f"{by_layer[5]['rows_cut_by_candidates']} of {rows} rows cut by candidate blocks" in out
    ops = {index: {op["op"] for op in layer["ops"]} for index, layer in by_layer.items()}
    assert {"compress_latent", "rope_quant_insert", "k_norm_rope_store"} <= ops[1] & ops[3]
    assert "select_candidate_blocks" in ops[3]
    assert {"mqa_logits", "score_candidates_decode"} <= ops[5]
    assert not {"compress_latent", "mqa_logits", "score_top_k_prefill"} & (ops[0] | ops[2] | ops[4])
    assert {"linear main_proj", "mtp_shared_head_rmsnorm", "sparse_mla_decode"} <= ops[7]
    assert "sparse_mla_prefill" not in ops[7]
    assert "FP8 weights are expanded to bf16, exactly" in out


def test_a_layer_runs_with_those_that_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path, (1, 3, 5, 6))
    assert status("--checkpoint", directory, *SHORT, "--layer", 6) == 0
    assert "3 layers" in capsys.readouterr().out
    assert status("--checkpoint", write_checkpoint(tmp_path, (3, 6)), "--layer", 6) == 2
    assert "--layer: layer 6 needs layers [5], which the checkpoint does not hold" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--wo-a", "fp8"), "--wo-a"),
        (("--kv-cache", "bf16"), "--kv-cache"),
        (("--index-hadamard",), "--index-hadamard"),
        (("--prefill-form", "paged"), "--prefill-form"),
        (("--layer", "0", "--dump", "x.npz"), "--dump"),
        (("--layer", "9"), "--layer"),
    ],
)
def test_what_it_does_not_take(flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--model", "v4.1-flash", *flags) == 2
    error = capsys.readouterr().err
    assert f"error: {named}: " in error
    assert error.count("\n") == 1


def test_the_reduced_width_reduces_what_selects() -> None:
    published, small = V41_PRESETS["v4.1-flash"], V41_PRESETS["v4.1-flash"].reduced()
    assert small.index_topk < published.index_topk
    assert small.candidate_topk_blocks * small.candidate_block_size < 400
    assert small.num_hidden_layers == len(small.compress_ratios) - 2 == 7
