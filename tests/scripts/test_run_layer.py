"""scripts/run_layer.py: exit statuses, bad input, what the dump holds, and that its self-checks can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from layers import PRESETS, DeepseekV4Config, random_layer_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import layer_runner.run
import run_layer
from layer_runner import checks, report
from layer_runner.pools import POISON, Pools, raw_pages
from layer_runner.requests import Request, make_requests, plan_decode, schedule, split_text
from layer_runner.run import max_rows

from cute_kernels.runtime.record import Call, Cost

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


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 tokens for the tiny width."""
    path = tmp_path_factory.mktemp("states") / "h.npy"
    np.save(path, np.random.default_rng(5).standard_normal((160, 128), dtype=np.float32))
    return path


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


# --- whole runs ---------------------------------------------------------------------------------------------------


def run_script(*arguments: object, cwd: Path, isolated: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OMP_WAIT_POLICY")}
    flags = ["-P"] if isolated and sys.version_info >= (3, 11) else []
    command = [sys.executable, *flags, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_default_run_from_anywhere(tmp_path: Path) -> None:
    """All three kinds, rows truncated, requests of unequal length, every check passed; no installation needed."""
    path = tmp_path / "report.json"
    done = run_script("--json", path, cwd=tmp_path)
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
        assert {"sparse_mla_prefill", "sparse_mla_decode", "linear wo_b", "deepseek_v4_fp8_einsum"} <= ops.keys()
        assert all(op["calls"] > 0 and op["seconds"] > 0 for op in layer["ops"])
        assert all(op in done.stdout for op in ops)
        # hidden 512, 2 groups of rank 256: the flops of wo_b say that every row ran exactly once.
        assert ops["linear wo_b"]["flops"] == 2 * sum(lengths) * 512 * 512
    assert {"mqa_logits", "paged_mqa_logits", "top_k_per_row_decode"} <= {op["op"] for op in c4a["ops"]}


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
    flags = ("--layer", 2, "--prefill", 100, "--decode", 3, "--seed", 4)
    seeded = dump(tmp_path, *flags)
    for number, form in enumerate((e8m0, renamed)):
        directory = write_checkpoint(tmp_path / str(number), form, **raw)
        assert_same(seeded, dump(tmp_path, "--checkpoint", directory, *flags))
        shard(directory)
        assert_same(seeded, dump(tmp_path, "--checkpoint", directory, *flags))
    other = dump(tmp_path, "--layer", 2, "--prefill", 100, "--decode", 3, "--seed", 5)
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


# --- bad input ----------------------------------------------------------------------------------------------------


def assert_refused(capsys: pytest.CaptureFixture[str], clue: str, *arguments: object) -> None:
    assert status(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("run_layer.py: error: ")
    assert clue in captured.err
    assert "PASS" not in captured.out


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


# --- the self-checks can fail -------------------------------------------------------------------------------------


def small_run(checkpoint: Path, *flags: object) -> int:
    return status("--checkpoint", checkpoint, "--layer", 2, "--prefill", 50, "--decode", 3, *flags)


def test_a_wrong_output_fails(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_alone = layer_runner.run.run_alone

    def off_by_a_bit(*arguments: Any, **keywords: Any) -> list[torch.Tensor]:
        outputs = run_alone(*arguments, **keywords)
        outputs[1][3, 5] *= 1.5
        return outputs

    monkeypatch.setattr(layer_runner.run, "run_alone", off_by_a_bit)
    assert small_run(checkpoint, "--json", tmp_path / "r.json") == 1
    assert "FAIL batch with decode" in capsys.readouterr().out
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["passed"] is False
    assert [c["passed"] for c in written["layers"][0]["checks"]].count(False) == 1


def test_a_stray_write_fails(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte in a page of nobody, in page padding, or in an unused row of a request's page."""
    config = DeepseekV4Config.from_dict(TINY)
    pools = Pools(config, 4, [70, 9], kv_cache="fp8_ds_mla", index_cache="fp8", device="cpu", seed=1)
    assert pools.stray_writes() == []
    table = pools.tables.swa
    assert (table[0, :2] != table[1, 0]).all()
    spare = int(table[0, 2])
    row = pools.slots("window cache", 1, 9, 10)
    pages = raw_pages(pools.caches.swa)
    for place in ((spare, 0), (0, pages.shape[1] - 1), (int(row[0]) // 64, int(row[0]) % 64 * 576)):
        pages[place] ^= 1
        assert pools.stray_writes() == ["window cache"]
        pages[place] ^= 1
    pages[int(table[1, 0]), 8 * 576] = 0
    assert pools.stray_writes() == []

    run_batch = layer_runner.run.run_batch

    def clumsy(layer: Any, builder: Any, requests: Any, target: Pools, *rest: Any, **keywords: Any) -> Any:
        result = run_batch(layer, builder, requests, target, *rest, **keywords)
        raw_pages(target.by_name()["indexer state"][0])[int(target.tables.state[0, -1]), 0] = 0  # type: ignore[index]
        return result

    monkeypatch.setattr(layer_runner.run, "run_batch", clumsy)
    assert small_run(checkpoint) == 1
    assert "FAIL memory of no request is untouched (stray writes in indexer state)" in capsys.readouterr().out


def test_different_cache_bytes_fail(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_batch = layer_runner.run.run_batch

    def clumsy(layer: Any, builder: Any, requests: Any, target: Pools, *rest: Any, **keywords: Any) -> Any:
        result = run_batch(layer, builder, requests, target, *rest, **keywords)
        target.caches.compressed.data[target.tables.compressed[1, 0], 0, 0] += 1  # type: ignore[union-attr, index]
        return result

    monkeypatch.setattr(layer_runner.run, "run_batch", clumsy)
    assert small_run(checkpoint) == 1
    assert "(compressed cache of request 1 differ)" in capsys.readouterr().out


def test_pages_are_strewn_and_owned() -> None:
    """Requests share no page, pages do not lie in order, and a table names a spare page after a request's last."""
    config = DeepseekV4Config.from_dict(TINY)
    pools = Pools(config, 4, [1000, 130, 700], kv_cache="bf16", index_cache="fp8", device="cpu", seed=2)
    for table, size in ((pools.tables.swa, 64), (pools.tables.compressed, 256), (pools.tables.state, 4)):
        assert table is not None
        counts = [-(-n // size) for n in (1000, 130, 700)]
        owned = torch.cat([row[:n] for row, n in zip(table, counts, strict=True)])
        assert owned.unique().numel() == owned.numel() == sum(counts)
        assert not torch.equal(owned, owned.sort().values)
        spare = torch.cat([row[n:] for row, n in zip(table, counts, strict=True)])
        assert not torch.isin(spare, owned).any()
        assert spare.numel() >= 3


def test_live_rows() -> None:
    """What a request of 203 tokens needs to go on: all entries, and the state of the group that is open."""
    config = DeepseekV4Config.from_dict(TINY)

    def live(ratio: int, length: int) -> dict[str, tuple[int, int]]:
        pools = Pools(config, ratio, [length], kv_cache="bf16", index_cache="fp8", device="cpu", seed=0)
        return {name: pools.live_rows(name, 0, length) for name in pools.by_name()}

    assert live(1, 203) == {"window cache": (0, 203)}
    assert live(4, 203) == {
        "window cache": (0, 203),
        "compressed cache": (0, 50),
        "compressor state": (196, 203),
        "indexer cache": (0, 50),
        "indexer state": (196, 203),
    }
    assert live(128, 203) == {"window cache": (0, 203), "compressed cache": (0, 1), "compressor state": (128, 203)}
    assert live(4, 3)["compressor state"] == (0, 3)


def test_poison_is_not_a_number() -> None:
    """A row that nobody wrote reads as NaN in every cache format, so that using it shows in the outputs."""
    config = DeepseekV4Config.from_dict(TINY)
    for kv_cache in ("fp8_ds_mla", "bf16", "fp8"):
        pools = Pools(config, 4, [9], kv_cache=kv_cache, index_cache="fp8", device="cpu", seed=0)
        for name, (cache, _, _) in pools.by_name().items():
            read = cache.kv_format.read(cache.data, cache.block_size, pools.slots(name, 0, 0, 2))
            assert torch.isnan(read.float()).all(), (kv_cache, name)
    assert POISON == 0xFF


def test_topk_check() -> None:
    good = torch.full((12, 2), -1, dtype=torch.int32)
    for row, picks in {3: [0, -1], 7: [1, 0], 11: [2, 0]}.items():
        good[row : row + 4] = torch.tensor(picks)
    assert checks.check_topk([good], 4).passed
    assert checks.truncated_rows([good, good[:9]], 4) == (1, 21)
    for row, picks in ((0, [0, -1]), (3, [-1, -1]), (7, [1, 1]), (7, [2, 0]), (11, [0, -1]), (5, [0, -2])):
        bad = good.clone()
        bad[row] = torch.tensor(picks)
        assert not checks.check_topk([good, bad], 4).passed, (row, picks)


def test_number_checks() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    nan = x.clone()
    nan[2, 2] = torch.nan
    near = x.clone()
    near[0] *= 1.01
    zero = torch.zeros_like(x)
    assert checks.check_finite([x]).passed
    assert not checks.check_finite([x, nan]).passed
    assert checks.check_consistent([x, zero], [x, zero], "cpu").passed
    assert checks.check_consistent([near], [x], "cuda").passed
    for a, b in ((near, x), (nan, x), (x, nan), (x, zero), (zero, x)):
        assert not checks.check_consistent([x, a], [x, b], "cpu").passed
    assert checks.check_repeatable([x, near], [x, near.clone()]).passed
    assert not checks.check_repeatable([x, near], [x, x]).passed


# --- parts --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    limit=st.none() | st.integers(1, 30),
    decode=st.integers(0, 9),
    draft=st.integers(1, 4),
    chunk=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_every_token_goes_through_once(
    lengths: list[int], limit: int | None, decode: int, draft: int, chunk: int, seed: int
) -> None:
    sequences = [torch.arange(1, n + 1).bfloat16()[:, None] for n in lengths]
    requests = make_requests(sequences, prefill_limit=limit, decode=decode, draft=draft, max_positions=1000, seed=seed)
    for request, length in zip(requests, lengths, strict=True):
        assert request.prefill >= 1
        assert limit is None or request.prefill <= limit
        assert request.length == request.prefill + sum(request.decode) <= length
        assert limit is not None or request.length == length
        assert len(request.decode) <= decode
        assert all(1 <= accepted <= draft for accepted in request.decode)
    seen: list[list[float]] = [[] for _ in requests]
    reach = [0] * len(requests)
    most = 0
    for parts, steps in schedule(requests, chunk):
        decodes = sum(step is not None for step in steps)
        assert all(step is None for step in steps[decodes:])
        assert sum(part.rows for part in parts[decodes:]) <= chunk
        assert len({part.request for part in parts}) == len(parts)
        most = max(most, sum(part.rows for part in parts))
        for part, step in zip(parts, steps, strict=True):
            request = requests[part.request]
            assert part.start == len(seen[part.request])
            rows = request.rows(part, step)
            assert rows.shape[0] == part.rows == (draft if step is not None else part.accepted)
            seen[part.request] += rows[: part.accepted, 0].tolist()
            reach[part.request] = max(reach[part.request], part.start + part.rows)
            rest = request.hidden_states[part.start + part.accepted : part.start + part.rows]
            assert not torch.equal(rest, rows[part.accepted :]) or part.accepted == part.rows
    for request, positions in zip(requests, seen, strict=True):
        assert positions == request.hidden_states[:, 0].tolist()
    assert reach == [request.reach for request in requests]
    assert max_rows(requests, chunk) >= max(most, *(request.length for request in requests))


def test_decode_plan() -> None:
    generator = torch.Generator().manual_seed(1)
    assert plan_decode(100, None, 5, 1, generator) == [1] * 5
    assert plan_decode(3, None, 5, 1, generator) == [1, 1]
    assert plan_decode(1, None, 5, 3, generator) == []
    assert len(set(plan_decode(100, None, 30, 3, generator))) == 3


def test_one_shot_has_no_decode() -> None:
    states = torch.ones(9, 4).bfloat16()
    request = Request(states, 5, (1, 3), 3, torch.zeros(2, 3, 4).bfloat16())
    assert request.reach == 9
    assert replace(request, decode=(3, 1)).reach == 11
    assert request.one_shot().reach == 9
    [(parts, steps)] = schedule([request.one_shot()], 9)
    assert [(p.start, p.rows, p.accepted) for p in parts] == [(0, 9, 9)]
    assert steps == [None]


def test_split_text() -> None:
    assert split_text(b"one\n\ntwo\n \nthree\n\nfour", 3) == [b"one", b"two", b"three\n\nfour"]
    assert split_text(b"one\n\ntwo", 1) == [b"one\n\ntwo"]
    pieces = split_text(b"abcdefghi", 3)
    assert b"".join(pieces) == b"abcdefghi"
    assert len(pieces) == 3
    assert all(pieces)


def test_table_of_calls() -> None:
    calls = [
        Call("b", "kernel", Cost(2_000_000, 10), 1e-3),
        Call("a", "reference", Cost(5, 0), 0.5),
        Call("b", "kernel", Cost(1_000_000, 10), 2e-3),
        Call("b", "reference"),
    ]
    rows = report.summarize(calls)
    assert [(r.op, r.implementation, r.calls) for r in rows] == [
        ("b", "kernel", 2),
        ("a", "reference", 1),
        ("b", "reference", 1),
    ]
    assert (rows[0].seconds, rows[0].bytes, rows[0].flops) == (3e-3, 3_000_000, 20)
    ceiling = report.Ceiling(bytes_per_second=4e9, flops_per_second=1e6)
    assert rows[0].of_ceiling(ceiling) == pytest.approx(0.25)
    assert replace(rows[0], flops=2000).of_ceiling(ceiling) == pytest.approx(2000 / 1e6 / 3e-3)
    assert rows[0].of_ceiling(None) is None
    assert rows[2].of_ceiling(ceiling) is None
    on_gpu = rows[0].as_json(ceiling, True)
    assert on_gpu["gb_per_second"] == pytest.approx(1.0)
    assert on_gpu["of_ceiling"] == pytest.approx(0.25)
    assert "gb_per_second" not in rows[0].as_json(None, False)

    def headers(ceiling: report.Ceiling | None, on_gpu: bool) -> list[str]:
        return [str(column.header) for column in report.render(rows, "t", ceiling, on_gpu).columns]

    assert headers(None, False) == ["op", "by", "calls", "ms", "bytes"]
    assert headers(None, True)[5:] == ["GB/s", "TFLOPS"]
    assert headers(ceiling, True)[5:] == ["GB/s", "TFLOPS", "% of ceiling"]
