# SPDX-License-Identifier: Apache-2.0
"""scripts/run_layer.py at its limits: absurd numbers, long texts, odd files, closed pipes, a Python without torch."""

from __future__ import annotations

import json
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from layers import DeepseekV4Config, random_layer_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import run_layer
from layer_runner.requests import InputError, array_sequences, plan_decode, text_sequences

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "run_layer.py"
CONFIG = {
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "q_lora_rank": 64,
    "o_groups": 1,
    "o_lora_rank": 64,
    "index_n_heads": 1,
    "index_topk": 4,
    "compress_ratios": [4],
}


@pytest.fixture
def run_arguments(tmp_path: Path) -> list[str]:
    """A checkpoint of one small bf16 layer and 20 rows of hidden states."""
    config = DeepseekV4Config.from_dict(CONFIG)
    tensors = random_layer_tensors(config, 0, quantized=False, wo_a_quantized=False)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({f"layers.0.attn.{n}": t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    np.save(tmp_path / "h.npy", np.random.default_rng(0).standard_normal((20, 128), dtype=np.float32))
    return ["--checkpoint", str(tmp_path), "--hidden-states", str(tmp_path / "h.npy")]


def refused(capsys: pytest.CaptureFixture[str], clue: str, *arguments: str) -> None:
    try:
        status = run_layer.main(arguments)
    except SystemExit as stop:
        status = int(stop.code or 0)
    errors = capsys.readouterr().err
    assert status == 2
    assert errors.count("\n") == 1
    assert errors.startswith("run_layer.py: error: ")
    assert clue in errors


@pytest.mark.parametrize(
    "flag", ["--prefill", "--decode", "--batch", "--chunk", "--draft", "--index-topk", "--layer", "--seed"]
)
def test_numbers_beyond_int32_are_refused(
    flag: str, run_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (2**31, 10**30):
        refused(capsys, flag, *run_arguments, flag, str(number))


@pytest.mark.parametrize("flag", ["--prefill", "--decode", "--chunk", "--seed"])
def test_large_numbers_are_harmless(flag: str, run_arguments: list[str]) -> None:
    assert run_layer.main([*run_arguments, flag, str(2**31 - 1)]) == 0


@pytest.mark.parametrize("error", [MemoryError("Unable to allocate 9 TiB"), RuntimeError("can't allocate memory:\n9")])
def test_full_memory_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(run_layer, "run", fail)
    refused(capsys, "llocate")


@pytest.mark.parametrize("error", [RuntimeError("sizes do not match"), NotImplementedError("no kernel")])
def test_defects_are_not_hidden(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(run_layer, "run", fail)
    with pytest.raises(type(error)):
        run_layer.main([])


def test_only_the_needed_part_of_a_text_becomes_hidden_states(tmp_path: Path) -> None:
    """A text may be much longer than what its hidden states would leave of the memory."""
    path = tmp_path / "t.txt"
    path.write_bytes(b"first paragraph\n\n" + bytes(range(65, 91)) * 40)
    whole = text_sequences(path, 2, 32, 0, 10**9)
    assert [x.shape[0] for x in whole] == [15, 1040]
    cut = text_sequences(path, 2, 32, 0, 100)
    assert [x.shape[0] for x in cut] == [15, 100]
    assert all(torch.equal(a, b[: len(a)]) for a, b in zip(cut, whole, strict=True))


def test_decode_plan_of_absurdly_many_steps() -> None:
    assert plan_decode(50, 10, 10**12, 1, torch.Generator()) == [1] * 49


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.ljust(117) + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        header(b"{'descr':'<f4','fortran_order':False,'shape':(999999999999999999999999,128)}"),
        header(b"{'descr':'<f4','fortran_order':False,'shape':(1000000000000,128)}"),
        header(b"{'descr': [[[[["),
        header(b"{"),
        header(b"\xff\xfe'"),
    ],
)
def test_headers_that_lie(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "h.npy"
    path.write_bytes(content)
    with pytest.raises(InputError, match="is not a complete"):
        array_sequences(path, 1, 128)


def test_a_reader_that_stops_reading_is_no_error(run_arguments: list[str]) -> None:
    command = [sys.executable, str(SCRIPT), *run_arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def test_an_interrupt_is_one_line() -> None:
    command = [sys.executable, str(SCRIPT), "--prefill", "400", "--decode", "300"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("DeepSeek-V4")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "run_layer.py: interrupted\n")


def test_a_python_without_torch_is_told_what_to_do() -> None:
    command = [sys.executable, "-S", str(SCRIPT), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "quickstart.sh" in done.stderr
