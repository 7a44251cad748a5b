# SPDX-License-Identifier: Apache-2.0
"""scripts/run_layer.py: exit statuses, bad input, what the dump holds, and that its self-checks can fail."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from layers import PRESETS, random_layer_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


from tests.scripts.runs import (
    LAYERS,
    TINY,
    assert_same,
    dump,
    run_script,
    shard,
    status,
    tiny_tensors,
    write_checkpoint,
)


def test_default_run_from_anywhere(tmp_path: Path) -> None:
    """All three kinds, rows truncated, requests of unequal length, every check passed; no installation needed."""
    path, picture = tmp_path / "report.json", tmp_path / "report.html"
    done = run_script("--json", path, "--html", picture, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "FAIL" not in done.stdout
    assert "checks passed" in done.stdout
    written = json.loads(path.read_text())
    assert written["passed"] is True
    assert [layer["kind"] for layer in written["layers"]] == ["SWA", "C4A", "C128A"]
    lengths = [r["prefill"] + sum(r["decode"]) for r in written["requests"]]
    assert len(set(lengths)) == 3
    assert all(len(r["decode"]) == 8 for r in written["requests"])
    c4a = written["layers"][1]
    assert 0 < c4a["rows_truncated_by_topk"] < c4a["rows"] == sum(lengths)
    assert f"{c4a['rows_truncated_by_topk']} of {c4a['rows']} rows truncated by top-k" in done.stdout
    for layer in written["layers"]:
        ops = {op["op"]: op for op in layer["ops"]}
        assert {op["implementation"] for op in layer["ops"]} == {"reference", "torch"}
        assert {"sparse_mla_prefill_paged", "sparse_mla_decode", "linear wo_b", "deepseek_v4_fp8_einsum"} <= ops.keys()
        assert all(op["calls"] > 0 and op["seconds"] > 0 for op in layer["ops"])
        assert all(op in done.stdout for op in ops)
        # hidden 512, 2 groups of rank 256: the flops of wo_b say that every row ran exactly once.
        assert ops["linear wo_b"]["flops"] == 2 * sum(lengths) * 512 * 512
    assert {"score_top_k_prefill", "score_top_k_decode"} <= {op["op"] for op in c4a["ops"]}
    assert_explained(done.stdout, written, lengths)
    assert_drawn(picture.read_text(), written)


def assert_explained(out: str, written: dict[str, Any], lengths: list[int]) -> None:
    """A reader who knows nothing is told what ran, on what, what the words mean and what came out."""
    first = out.splitlines()[:3]
    assert first[0].startswith("DeepSeek-V4 attention, a layer of each kind (SWA, C4A, C128A), on cpu")
    assert "hidden size 512 instead of 4096, 16 heads instead of 64, top-k 16 instead of 512" in first[1]
    assert "seeded (--seed 0), v4-flash" in first[1]
    assert re.search(r"^Input: scripts/data/sample.txt, .*; 3 requests of (\d+ \+ 8(, )?){3} tokens", first[2])
    for word in ("SWA ", "C4A ", "C128A ", "by ", "kernel: ", "reference: ", "torch: "):
        assert word in out[: out.index("layer 0")]
    assert "a row that sees more than 16 entries attends to the 16 best" in out
    calls = sum(op["calls"] for layer in written["layers"] for op in layer["ops"])
    assert re.search(
        rf"13 of 13 checks passed: 3 layers, {sum(lengths)} tokens each, {calls} calls of ops in \d+ s", out
    )
    assert "\nNext:\n  python -m cute_kernels info " in out
    for table, layer in zip(re.findall(r"^layer .*?^PASS", out, re.M | re.S), written["layers"], strict=True):
        shares = re.findall(r" (\d+)% (█*) *$", table, re.M)
        assert len(shares) == len(layer["ops"])
        assert abs(sum(int(percent) for percent, _ in shares) - 100) <= len(shares) / 2
        assert all(len(bar) == pytest.approx(0.16 * int(percent), abs=0.6) for percent, bar in shares)


def assert_drawn(page: str, written: dict[str, Any]) -> None:
    """Every op has a bar of time and one of bytes, as long as its share of the largest."""
    cells = re.findall(r'<tr><td>(.*?)</td><td class="bar"><div style="width: ([\d.]+)%">', page)
    expected = []
    for layer in written["layers"]:
        for what in ("seconds", "bytes"):
            largest = max(op[what] for op in layer["ops"])
            expected += [(op["op"], f"{100 * op[what] / largest:.1f}") for op in layer["ops"]]
    assert cells == expected
    assert page.count("PASS") == 13
    assert page.startswith("<!doctype html>")


def test_bad_input_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = run_script("--checkpoint", tmp_path / "absent", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "absent" in done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--kv-cache bf16 --draft 3 --chunk 60",
        "--kv-cache fp8 --index-cache mxfp4 --index-hadamard --draft 2",
        "--prefill-form paged --index-cache mxfp4 --chunk 7 --batch 5 --decode 3",
        "--decode 0 --index-topk 3",
        "--draft 6 --decode 20 --batch 2 --seed 7",
    ],
)
def test_options(checkpoint: Path, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--checkpoint", checkpoint, "--prefill", 90, *flags.split()) == 0
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("PASS") == 13


def test_wo_a_bf16(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    assert status("--wo-a", "bf16", "--layer", 0, "--prefill", 40, "--batch", 1, "--json", path) == 0
    ops = [op["op"] for op in json.loads(path.read_text())["layers"][0]["ops"]]
    assert "linear wo_a" in ops
    assert "deepseek_v4_fp8_einsum" not in ops


def test_v4_pro_and_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--model", "v4-pro", "--layer", 61, "--prefill", 30, "--batch", 1) == 0
    assert "layer 61 (SWA)" in capsys.readouterr().out


def test_checkpoint_without_some_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first held layer of each kind runs, here one only, so that --dump needs no --layer."""
    directory = write_checkpoint(tmp_path / "c", tiny_tensors((1,)))
    assert status("--checkpoint", directory, "--prefill", 40, "--dump", tmp_path / "d.npz") == 0
    assert "layer 1 (SWA)" in capsys.readouterr().out
    assert (tmp_path / "d.npz").exists()


# --- the dump -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LAYERS)
def test_dump_shapes(checkpoint: Path, states: Path, tmp_path: Path, kind: str) -> None:
    arrays = dump(tmp_path, "--checkpoint", checkpoint, "--hidden-states", states, "--layer", LAYERS[kind])
    rows = 160
    expected = {
        "hidden_states": (rows, 128),
        "kv": (rows, 512),
        "comp": {"SWA": (0, 512), "C4A": (rows // 4, 512), "C128A": (rows // 128, 512)}[kind],
        "idx_k": (rows // 4 if kind == "C4A" else 0, 128),
        "topk": (rows, 8 if kind == "C4A" else 0),
        "q": (rows, 2, 512),
        "idx_q": (rows, 2 if kind == "C4A" else 0, 128),
        "o_raw": (rows, 2, 512),
        "o": (rows, 2, 512),
        "lse": (rows, 2),
        "oa": (rows, 1, 128),
        "out": (rows, 128),
    }
    assert {name: array.shape for name, array in arrays.items()} == expected
    assert {name: array.dtype for name, array in arrays.items()} == {
        name: np.dtype(np.int32 if name == "topk" else np.float32) for name in expected
    }
    assert all(np.isfinite(array).all() for array in arrays.values())
    given_states = np.load(states)
    np.testing.assert_array_equal(arrays["hidden_states"], torch.from_numpy(given_states).bfloat16().float().numpy())


@pytest.mark.parametrize("kind", LAYERS)
def test_dump_does_not_depend_on_the_steps(checkpoint: Path, states: Path, tmp_path: Path, kind: str) -> None:
    """Chunks, decode steps, rejected drafts and other requests in the batch leave no trace."""
    base = ("--checkpoint", checkpoint, "--hidden-states", states, "--layer", LAYERS[kind])
    one_shot = dump(tmp_path, *base, "--decode", 0, "--chunk", 1000)
    assert_same(one_shot, dump(tmp_path, *base, "--chunk", 37, "--batch", 3))
    assert_same(one_shot, dump(tmp_path, *base, "--chunk", 50, "--draft", 5, "--decode", 12, "--seed", 3))


@pytest.mark.parametrize("kind", LAYERS)
def test_dump_holds_attention(checkpoint: Path, states: Path, tmp_path: Path, kind: str) -> None:
    """o_raw and lse follow from q, kv, comp and topk of the same dump, computed here in float64 (bf16 caches: kv is
    exactly what the cache holds); o is o_raw turned back by each row's angle."""
    layer = LAYERS[kind]
    base = ("--checkpoint", checkpoint, "--hidden-states", states, "--layer", layer, "--kv-cache", "bf16")
    d = dump(tmp_path, *base, "--draft", 3)
    sink = tiny_tensors((layer,))[f"layers.{layer}.attn.attn_sink"].double().numpy()
    q, kv, comp, topk = (d[name].astype(np.float64) for name in ("q", "kv", "comp", "topk"))
    np.testing.assert_allclose((q**2).mean(axis=-1), 1.0, atol=0.02)
    for t in range(160):
        visible = (t + 1) // {"SWA": 1000, "C4A": 4, "C128A": 128}[kind]
        if kind == "C4A":
            picks = topk[t][topk[t] >= 0].astype(int)
            assert len(set(picks)) == len(picks) == min(visible, 8)
            assert all(picks < visible)
        else:
            picks = np.arange(visible)
        keys = np.concatenate([kv[max(0, t - 127) : t + 1], comp[picks]])
        logits = q[t] @ keys.T / np.sqrt(512)
        top = logits.max(axis=1, keepdims=True)
        weights = np.exp(logits - top)
        total = weights.sum(axis=1)
        np.testing.assert_allclose(d["lse"][t], np.log(total) + top[:, 0], atol=1e-4)
        with_sink = total + np.exp(sink - top[:, 0])
        np.testing.assert_allclose(d["o_raw"][t], weights @ keys / with_sink[:, None], atol=0.02, rtol=0.01)

    theta = np.arange(32) / 32
    if kind == "SWA":
        frequency = 10000.0**-theta
        angle = np.exp(-1j * np.arange(160)[:, None] * frequency)[:, None]
        raw = d["o_raw"][..., 448:].astype(np.float64)
        turned = (raw[..., 0::2] + 1j * raw[..., 1::2]) * angle
        np.testing.assert_allclose(d["o"][..., 448::2], turned.real, atol=0.02, rtol=0.01)
        np.testing.assert_allclose(d["o"][..., 449::2], turned.imag, atol=0.02, rtol=0.01)
    np.testing.assert_array_equal(d["o"][..., :448], d["o_raw"][..., :448])


def test_checkpoint_run_equals_seeded_run(tmp_path: Path) -> None:
    """The seeded tensors, written as a checkpoint in every spelling, give the same dump."""
    config = PRESETS["v4-flash"].reduced()
    raw = {name: getattr(config, name) for name in TINY if hasattr(config, name)}
    raw["compress_ratios"] = [0 if r == 1 else r for r in config.compress_ratios]
    tensors = random_layer_tensors(config, 2, 4)
    plain = {f"layers.2.attn.{name}": value for name, value in tensors.items()}
    e8m0 = {n: v.to(torch.float8_e8m0fnu) if n.endswith(".scale") else v for n, v in plain.items()}
    renamed = {f"model.{n.replace('.scale', '.weight_scale_inv')}": v for n, v in plain.items()}
    flags = ("--layer", 2, "--prefill", 30, "--decode", 3, "--seed", 4)
    seeded = dump(tmp_path, *flags)
    for number, form in enumerate((e8m0, renamed)):
        directory = write_checkpoint(tmp_path / str(number), form, **raw)
        assert_same(seeded, dump(tmp_path, "--checkpoint", directory, *flags))
        shard(directory)
        assert_same(seeded, dump(tmp_path, "--checkpoint", directory, *flags))
    other = dump(tmp_path, "--layer", 2, "--prefill", 30, "--decode", 3, "--seed", 5)
    assert not np.array_equal(seeded["out"], other["out"])


def test_text_becomes_hidden_states(checkpoint: Path, tmp_path: Path) -> None:
    """One token per byte: equal bytes give equal rows, RMS 1; feeding the rows back as an array gives the same run."""
    text = tmp_path / "t.txt"
    text.write_bytes(b"abcab" * 9 + b"\xff\xfe\n\n" + b"short\n\nthe rest of it\n")
    base = ("--checkpoint", checkpoint, "--layer", 2)
    arrays = dump(tmp_path, *base, "--text", text)
    assert arrays["out"].shape[0] == 47
    rows = arrays["hidden_states"]
    np.testing.assert_array_equal(rows[0], rows[3])
    assert not np.array_equal(rows[0], rows[1])
    np.testing.assert_allclose((rows**2).mean(axis=1), 1.0, atol=0.02)
    np.save(tmp_path / "back.npy", rows)
    assert_same(arrays, dump(tmp_path, *base, "--hidden-states", tmp_path / "back.npy"))


def test_dump_is_written_where_asked(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "no_suffix"
    flags = ("--layer", 0, "--prefill", 9, "--batch", 1, "--decode", 2)
    assert status("--checkpoint", checkpoint, *flags, "--dump", path) == 0
    assert np.load(path)["out"].shape == (11, 128)
