# SPDX-License-Identifier: Apache-2.0
"""Bad input of scripts/run_layer.py: one clear line, status 2, no traceback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


from tests.scripts.runs import (
    assert_refused,
    shard,
    status,
    tiny_tensors,
    write_checkpoint,
)


@pytest.mark.parametrize(
    ("arguments", "clue"),
    [
        ("--model v5", "--model"),
        ("--layer 44", "--layer"),
        ("--layer -1", "--layer"),
        ("--layer one", "--layer"),
        ("--prefill 0", "--prefill"),
        ("--decode -1", "--decode"),
        ("--batch 0", "--batch"),
        ("--chunk 0", "--chunk"),
        ("--chunk -3", "--chunk"),
        ("--draft 0", "--draft"),
        ("--index-topk 0", "--index-topk"),
        ("--index-topk many", "--index-topk"),
        ("--seed -1", "--seed"),
        ("--kv-cache fp4", "--kv-cache"),
        ("--index-cache bf16", "--index-cache"),
        ("--prefill-form flat", "--prefill-form"),
        ("--wo-a fp4", "--wo-a"),
        ("--fallback maybe", "--fallback"),
        ("--text absent.txt", "absent.txt"),
        ("--hidden-states absent.npy", "absent.npy"),
        ("--checkpoint absent", "absent"),
        ("--checkpoint . --wo-a bf16", "--wo-a"),
        ("--checkpoint . --model v4-pro", "--model"),
        ("--checkpoint . --full-width", "--full-width"),
        ("--batch 7000", "6115 bytes do not give 7000 requests"),
        ("--html absent/r.html", "--html"),
        ("--html /proc/r.html", "cannot write /proc/r.html"),
        ("--layer 0 --dump /proc/d.npz", "cannot write /proc/d.npz"),
        ("--text a --hidden-states b", "--hidden-states"),
        ("--dump d.npz", "--layer"),
        ("--layer 0 --dump absent/d.npz", "--dump"),
        ("--layer 0 --dump .", "--dump"),
        ("--json absent/r.json", "--json"),
        ("--nonsense", "--nonsense"),
    ],
)
def test_bad_arguments(
    arguments: str, clue: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused(capsys, clue, *arguments.split())


def test_more_requests_than_tokens(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "h.npy"
    np.save(path, np.ones((5, 128), np.float32))
    flags = ("--checkpoint", checkpoint, "--hidden-states", path, "--batch")
    assert_refused(capsys, "--batch: expected at most 5 requests of an array of 5 tokens, got 1000000", *flags, 10**6)
    assert_refused(capsys, "got 6", *flags, 6)


def test_a_folder_without_permission(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    assert_refused(capsys, "--json: cannot write", "--json", tmp_path / "r.json")


def test_cuda_without_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(capsys, "CUDA", "--device", "cuda")


@pytest.mark.parametrize("text", [b"", b" \n\n\t "])
def test_empty_text(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_bytes(text)
    assert_refused(capsys, "holds no text", "--text", tmp_path / "t.txt")


def test_text_too_short_for_the_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_bytes(b"ab")
    assert_refused(capsys, "3 requests", "--text", tmp_path / "t.txt")


def test_text_is_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(capsys, "--text", "--text", tmp_path)


BAD_ARRAYS: dict[str, tuple[Any, str]] = {
    "float64": (np.zeros((5, 128)), "float32"),
    "float16": (np.zeros((5, 128), np.float16), "float32"),
    "big endian": (np.zeros((5, 128), ">f4"), "float32"),
    "objects": (np.array([[None] * 128]), "not a complete .npy file"),
    "one dimension": (np.zeros(128, np.float32), "shape"),
    "three dimensions": (np.zeros((1, 5, 128), np.float32), "shape"),
    "width": (np.zeros((5, 127), np.float32), "[tokens, 128]"),
    "no tokens": (np.zeros((0, 128), np.float32), "shape"),
    "nan": (np.full((5, 128), np.nan, np.float32), "finite"),
    "inf": (np.full((5, 128), np.inf, np.float32), "finite"),
    "beyond bf16": (np.full((5, 128), np.finfo(np.float32).max), "finite"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_bad_arrays(case: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array, clue = BAD_ARRAYS[case]
    np.save(tmp_path / "h.npy", array)
    assert_refused(capsys, clue, "--checkpoint", checkpoint, "--hidden-states", tmp_path / "h.npy")


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_array(keep: int, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "h.npy"
    np.save(path, np.zeros((5, 128), np.float32))
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(capsys, "not a complete .npy file", "--checkpoint", checkpoint, "--hidden-states", path)


def test_sequence_too_long(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "h.npy", np.zeros((501, 128), np.float32))
    flags = ("--checkpoint", checkpoint, "--layer", 0)
    clue = "max_position_embeddings = 500"
    assert_refused(capsys, clue, *flags, "--hidden-states", tmp_path / "h.npy")
    assert_refused(capsys, clue, *flags, "--prefill", 493, "--batch", 1)
    assert status(*flags, "--prefill", 492, "--batch", 1) == 0


CONFIGS: dict[str, tuple[Any, str]] = {
    "model_type": ({"model_type": "llama"}, "model_type"),
    "ratio": ({"compress_ratios": [0, 0, 4, 16]}, "compress_ratios"),
    "ratios no list": ({"compress_ratios": "4"}, "compress_ratios"),
    "too few ratios": ({"compress_ratios": [0, 4]}, "compress_ratios"),
    "layer type": ({"compress_ratios": None, "layer_types": ["full_attention"] * 4}, "layer_types"),
    "layer type no name": ({"compress_ratios": None, "layer_types": [[4]] * 4}, "layer_types"),
    "head_dim": ({"head_dim": 128}, "head_dim"),
    "hidden_size": ({"hidden_size": "wide"}, "hidden_size"),
    "negative": ({"index_topk": -1}, "index_topk"),
    "groups": ({"num_attention_heads": 3, "o_groups": 2}, "num_attention_heads"),
    "rope type": ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_scaling"),
    "rope no object": ({"rope_scaling": "yarn"}, "rope_scaling"),
    "rope part": ({"rope_parameters": {"main": "yarn", "compress": {"rope_type": "yarn"}}}, "rope"),
    "rope theta": ({"rope_theta": "big"}, "rope_theta"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_config(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, clue = CONFIGS[case]
    assert_refused(capsys, clue, "--checkpoint", write_checkpoint(tmp_path / "c", tiny_tensors((0,)), **changes))


@pytest.mark.parametrize("content", [None, "", "[1]", '{"a": ', "\ud800"])
def test_unreadable_config(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "c", tiny_tensors((0,)))
    if content is None:
        (directory / "config.json").unlink()
    else:
        (directory / "config.json").write_text(content, errors="surrogatepass")
    assert_refused(capsys, "config.json", "--checkpoint", directory)


def changed(name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = tiny_tensors((0, 2))
    assert name in tensors
    del tensors[name]
    return tensors if value is None else {**tensors, name: value}


BAD_TENSORS: dict[str, tuple[str, torch.Tensor | None, str]] = {
    "missing": ("layers.2.attn.indexer.weights_proj.weight", None, "missing tensor indexer.weights_proj.weight"),
    "missing sink": ("layers.2.attn.attn_sink", None, "missing tensor attn_sink"),
    "missing scale": ("layers.2.attn.wq_b.scale", None, "wq_b.scale"),
    "shape": ("layers.2.attn.q_norm.weight", torch.ones(64), "q_norm.weight"),
    "transposed": ("layers.2.attn.wkv.weight", torch.ones(128, 512).to(torch.float8_e4m3fn), "wkv.weight"),
    "scale shape": ("layers.2.attn.wo_b.scale", torch.ones(2, 2), "wo_b.scale"),
    "scale dtype": ("layers.2.attn.wo_b.scale", torch.ones(1, 1, dtype=torch.int8), "wo_b"),
    "integers": ("layers.2.attn.kv_norm.weight", torch.ones(512, dtype=torch.int32), "kv_norm.weight"),
    "half quantized": ("layers.2.attn.wkv.weight", torch.ones(512, 128).bfloat16(), "wq_a and wkv"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, value, clue = BAD_TENSORS[case]
    directory = write_checkpoint(tmp_path / "c", changed(name, value))
    assert_refused(capsys, clue, "--checkpoint", directory, "--layer", 2, "--prefill", 9, "--decode", 1)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
@pytest.mark.parametrize("flags", [(), ("--layer", 0)])
def test_truncated_safetensors(
    keep: int, flags: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_checkpoint(tmp_path / "c", tiny_tensors((0,)))
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused(capsys, "model.safetensors", "--checkpoint", directory, *flags)


def test_layers_the_checkpoint_does_not_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "c", tiny_tensors((0,)))
    assert_refused(capsys, "layers.3.attn.", "--checkpoint", directory, "--layer", 3)
    assert_refused(capsys, "--layer", "--checkpoint", directory, "--layer", 4)
    save_file({"embed.weight": torch.ones(2)}, directory / "model.safetensors")
    assert_refused(capsys, "layers.N.attn", "--checkpoint", directory)
    (directory / "model.safetensors").unlink()
    assert_refused(capsys, "no *.safetensors", "--checkpoint", directory)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_bad_index(index: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "c", tiny_tensors((0,)))
    (directory / "model.safetensors.index.json").write_text(index)
    assert_refused(capsys, "", "--checkpoint", directory)


def test_index_names_an_absent_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = write_checkpoint(tmp_path / "c", tiny_tensors((0,)))
    shard(directory)
    (directory / "model-2.safetensors").unlink()
    assert_refused(capsys, "model-2.safetensors", "--checkpoint", directory)


def test_index_may_name_folders(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "c", tiny_tensors((0,)))
    (directory / "part").mkdir()
    (directory / "model.safetensors").rename(directory / "part" / "one.safetensors")
    weight_map = dict.fromkeys(tiny_tensors((0,)), "part/one.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert status("--checkpoint", directory, "--prefill", 9, "--decode", 1, "--batch", 1) == 0
