# SPDX-License-Identifier: Apache-2.0
"""What the tests of scripts/run_layer.py share: tiny checkpoints, runs in this process and in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from layers import DeepseekV4Config, random_layer_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import run_layer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_layer.py"
TINY = {
    "model_type": "deepseek_v4",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "q_lora_rank": 128,
    "o_groups": 1,
    "o_lora_rank": 128,
    "index_n_heads": 2,
    "index_topk": 8,
    "compress_ratios": [0, 0, 4, 128],
    "max_position_embeddings": 500,
}
LAYERS = {"SWA": 0, "C4A": 2, "C128A": 3}


def tiny_tensors(layers: tuple[int, ...] = (0, 2, 3), prefix: str = "layers", fp32_scales: bool = False) -> dict:
    config = DeepseekV4Config.from_dict(TINY)
    tensors = {}
    for index in layers:
        for name, value in random_layer_tensors(config, index).items():
            full = f"{prefix}.{index}.attn.{name}"
            if not name.endswith(".scale"):
                tensors[full] = value
            elif fp32_scales:
                tensors[full.removesuffix(".scale") + ".weight_scale_inv"] = value
            else:
                tensors[full] = value.to(torch.float8_e8m0fnu)
    return tensors


def write_checkpoint(directory: Path, tensors: dict | None = None, **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY, **changes}))
    save_file(tiny_tensors() if tensors is None else tensors, directory / "model.safetensors")
    return directory


def shard(directory: Path) -> None:
    """Turn a checkpoint of one file into two files with an index; a linear and its scale end up in different files."""
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{1 + n % 2}.safetensors" for n, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def status(*arguments: object) -> int:
    try:
        return run_layer.main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def dump(tmp_path: Path, *arguments: object) -> dict[str, np.ndarray]:
    path = tmp_path / "dump.npz"
    assert status(*arguments, "--dump", path) == 0
    with np.load(path) as file:
        return dict(file)


def assert_same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def run_script(*arguments: object, cwd: Path, isolated: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
    flags = ["-P"] if isolated and sys.version_info >= (3, 11) else []
    command = [sys.executable, *flags, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def assert_refused(capsys: pytest.CaptureFixture[str], clue: str, *arguments: object) -> None:
    assert status(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("run_layer.py: error: ")
    assert clue in captured.err
    assert "PASS" not in captured.out
