# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: every published form loads, every value lands in its place, everything broken is named in one line."""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from layers import (
    PRESETS,
    CheckpointError,
    TensorParallel,
    build_layer,
    checkpoint,
    held_layers,
    random_layer_tensors,
    read_layer_tensors,
)
from layers.attention import AttentionOptions, DeepseekV4MultiHeadLatentAttentionWrapper
from layers.checkpoint import tensor_shapes
from tests.layers.engine import CONFIG, KINDS

Tensors = dict[str, torch.Tensor]
WIDE = replace(CONFIG, num_attention_heads=16, o_groups=8)
SMALL_OPTIONS = {"max_model_len": 128, "max_num_tokens": 16}


@functools.cache
def _layer_tensors(ratio: int, quantized: bool, wo_a_quantized: bool) -> Tensors:
    tensors = random_layer_tensors(
        WIDE, WIDE.layer_of_kind(ratio), 1, quantized=quantized, wo_a_quantized=wo_a_quantized
    )
    for name, scale in tensors.items():
        if name.endswith(".scale"):
            scale.copy_(torch.exp2(torch.arange(scale.numel()) % 97 - 50.0).view(scale.shape))
    return tensors


def layer_tensors(ratio: int, quantized: bool = True, wo_a_quantized: bool = True) -> Tensors:
    """Seeded weights with scales that all differ from their neighbours'."""
    return {name: tensor.clone() for name, tensor in _layer_tensors(ratio, quantized, wo_a_quantized).items()}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    return (torch.log2(scale) + 127).round().to(torch.uint8).view(torch.float8_e8m0fnu)


def with_e8m0_scales(tensors: Tensors) -> Tensors:
    return {n: e8m0(t) if n.endswith(".scale") else t for n, t in tensors.items()}


def with_inverse_names(tensors: Tensors) -> Tensors:
    return {n.replace(".scale", ".weight_scale_inv"): t for n, t in tensors.items()}


def prefixed(tensors: Tensors, layer_index: int, model: str = "") -> Tensors:
    return {f"{model}layers.{layer_index}.attn.{n}": t.contiguous() for n, t in tensors.items()}


def write_single(directory: Path, tensors: Tensors) -> None:
    save_file(tensors, directory / "model.safetensors")


def write_sharded(directory: Path, tensors: Tensors) -> None:
    """Three shards, each with every third tensor, and the index."""
    names, shards = sorted(tensors), {}
    for i in range(3):
        shards[f"model-0000{i + 1}-of-00003.safetensors"] = {n: tensors[n] for n in names[i::3]}
    for file, part in shards.items():
        save_file(part, directory / file)
    index = {"metadata": {}, "weight_map": {n: file for file, part in shards.items() for n in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_without_index(directory: Path, tensors: Tensors) -> None:
    write_sharded(directory, tensors)
    (directory / "model.safetensors.index.json").unlink()


def dequantized(tensors: Tensors) -> Tensors:
    return {n: t.bfloat16() if t.dtype == torch.float8_e4m3fn else t for n, t in tensors.items() if ".scale" not in n}


FORMS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (lambda t: t, ""),
    (lambda t: t, "model."),
    (with_e8m0_scales, ""),
    (with_inverse_names, "model."),
    (dequantized, ""),
]


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("write", [write_single, write_sharded, write_without_index])
@pytest.mark.parametrize(("form", "model"), FORMS)
def test_round_trip(
    tmp_path: Path, ratio: int, write: Callable[[Path, Tensors], None], form: Callable[[Tensors], Tensors], model: str
) -> None:
    """Only this layer's tensors are read, whatever else the files hold."""
    number = WIDE.layer_of_kind(ratio)
    tensors = form(layer_tensors(ratio))
    stored = prefixed(tensors, number, model)
    stored |= {f"{model}layers.{number}1.attn.wq_a.weight": torch.zeros(3)}
    stored |= {f"{model}layers.{number}.ffn.w1.weight": torch.zeros(3), f"{model}embed.weight": torch.zeros(2)}
    write(tmp_path, stored)
    loaded = read_layer_tensors(str(tmp_path), number)
    assert sorted(loaded) == sorted(tensors)
    assert all(same(loaded[name], tensors[name]) for name in tensors)
    assert held_layers(tmp_path) == sorted({number, int(f"{number}1")})
    build_layer(WIDE, number, loaded, options=AttentionOptions(**SMALL_OPTIONS))


def part(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return x.chunk(size, dim)[rank]


def check_landing(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, t: Tensors, scales: Tensors, rank: int, size: int
) -> None:
    """Every buffer of a layer against the published tensors; `scales` has fp32 scales by linear."""

    def scale(linear: str, dim: int | None) -> torch.Tensor | None:
        if linear not in scales:
            return None
        return scales[linear] if dim is None else part(scales[linear], dim, rank, size)

    def equal(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
        assert (got is None) == (want is None)
        if got is not None and want is not None:
            assert same(got, want.reshape(got.shape))

    equal(layer.fused_wqa_wkv.weight, torch.cat([t["wq_a.weight"], t["wkv.weight"]]))
    first = [scale("wq_a", None), scale("wkv", None)]
    equal(layer.fused_wqa_wkv.scale, None if first[0] is None else torch.cat(first))  # type: ignore[arg-type]
    equal(layer.wq_b.weight, part(t["wq_b.weight"], 0, rank, size))
    equal(layer.wq_b.scale, scale("wq_b", 0))
    equal(layer.q_norm_weight, t["q_norm.weight"])
    equal(layer.kv_norm_weight, t["kv_norm.weight"])
    equal(layer.mla_attn.attn_sink, part(t["attn_sink"], 0, rank, size))
    groups = WIDE.o_groups // size
    assert layer.o_proj.wo_a.shape == (groups, 128, 1024)
    equal(layer.o_proj.wo_a, part(t["wo_a.weight"], 0, rank, size))
    equal(layer.o_proj.wo_a_scale, scale("wo_a", 0))
    equal(layer.o_proj.wo_b.weight, part(t["wo_b.weight"], 1, rank, size))
    equal(layer.o_proj.wo_b.scale, scale("wo_b", 1))
    assert (layer.compressor is not None) == (layer.compress_ratio > 1)
    assert (layer.indexer is not None) == (layer.compress_ratio == 4)
    compressors = {"compressor.": layer.compressor}
    if layer.indexer is not None:
        compressors["indexer.compressor."] = layer.indexer.compressor
        equal(layer.indexer.wq_b.weight, t["indexer.wq_b.weight"])
        equal(layer.indexer.wq_b.scale, scale("indexer.wq_b", None))
        equal(layer.indexer.weights_proj.weight, t["indexer.weights_proj.weight"])
    for prefix, module in compressors.items():
        if module is not None:
            both = torch.cat([t[prefix + "wkv.weight"], t[prefix + "wgate.weight"]])
            equal(module.fused_wkv_wgate.weight, both)
            equal(module.ape, t[prefix + "ape"])
            equal(module.norm_weight, t[prefix + "norm.weight"])


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize(("quantized", "wo_a_quantized"), [(True, True), (True, False), (False, False), (False, True)])
@pytest.mark.parametrize("spelling", [lambda t: t, with_e8m0_scales, with_inverse_names])
def test_values_land_where_they_should(
    ratio: int, quantized: bool, wo_a_quantized: bool, spelling: Callable[[Tensors], Tensors]
) -> None:
    tensors = layer_tensors(ratio, quantized, wo_a_quantized)
    scales = {n.removesuffix(".scale"): t for n, t in tensors.items() if n.endswith(".scale")}
    quantized_names = {"wq_a", "wq_b", "wkv", "wo_b"} | ({"indexer.wq_b"} if ratio == 4 else set())
    assert set(scales) == (quantized_names if quantized else set()) | ({"wo_a"} if wo_a_quantized else set())
    for size in (1, 2, 8):
        for rank in range(size):
            options = AttentionOptions(tp=TensorParallel(rank, size), **SMALL_OPTIONS)
            layer = build_layer(WIDE, WIDE.layer_of_kind(ratio), spelling(tensors), options=options)
            assert layer.compress_ratio == ratio
            check_landing(layer, tensors, scales, rank, size)


def test_other_float_dtypes_are_converted() -> None:
    """fp32 weights of a converted checkpoint become bf16, norms stay fp32; a bf16 sink becomes fp32."""
    tensors = layer_tensors(4, False, False)
    other = {n: t.bfloat16() if n == "attn_sink" or n.endswith("ape") else t.float() for n, t in tensors.items()}
    layer = build_layer(WIDE, WIDE.layer_of_kind(4), other, options=AttentionOptions(**SMALL_OPTIONS))
    landed = {n: t.bfloat16().float() if n == "attn_sink" or n.endswith("ape") else t for n, t in tensors.items()}
    landed |= {n: t.float() for n, t in tensors.items() if n.endswith("norm.weight")}
    check_landing(layer, landed, {}, 0, 1)


def test_names_and_shapes_of_a_published_layer() -> None:
    """The C4A layers of V4-Flash, written out."""
    assert tensor_shapes(PRESETS["v4-flash"], 4) == {
        "wq_a.weight": (1024, 4096),
        "q_norm.weight": (1024,),
        "wq_b.weight": (64 * 512, 1024),
        "wkv.weight": (512, 4096),
        "kv_norm.weight": (512,),
        "wo_a.weight": (8 * 1024, 8 * 512),
        "wo_b.weight": (4096, 8 * 1024),
        "attn_sink": (64,),
        "compressor.wkv.weight": (1024, 4096),
        "compressor.wgate.weight": (1024, 4096),
        "compressor.norm.weight": (512,),
        "compressor.ape": (4, 1024),
        "indexer.wq_b.weight": (64 * 128, 1024),
        "indexer.weights_proj.weight": (64, 4096),
        "indexer.compressor.wkv.weight": (256, 4096),
        "indexer.compressor.wgate.weight": (256, 4096),
        "indexer.compressor.norm.weight": (128,),
        "indexer.compressor.ape": (4, 256),
    }
    assert tensor_shapes(PRESETS["v4-pro"], 128)["compressor.ape"] == (128, 512)
    assert tensor_shapes(PRESETS["v4-pro"], 128)["compressor.wkv.weight"] == (512, 7168)
    assert not any("compressor" in n or "indexer" in n for n in tensor_shapes(PRESETS["v4-pro"], 1))


def test_random_tensors_are_seeded_by_layer() -> None:
    left, right, other = (random_layer_tensors(WIDE, i, s) for i, s in ((2, 5), (2, 5), (4, 5)))
    assert all(same(left[n], right[n]) for n in left)
    assert not same(left["wq_a.weight"], other["wq_a.weight"])
    assert not same(left["wq_a.weight"], random_layer_tensors(WIDE, 2, 6)["wq_a.weight"])


def refuse(action: Callable[[], object], *words: str, error: type[ValueError] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message, message
    assert len(message) < 400
    for word in words:
        assert word in message, message


def build(tensors: Tensors, ratio: int = 4) -> None:
    build_layer(WIDE, WIDE.layer_of_kind(ratio), tensors, options=AttentionOptions(**SMALL_OPTIONS))


@pytest.mark.parametrize("ratio", KINDS)
def test_every_tensor_is_required_in_its_shape(ratio: int) -> None:
    tensors = layer_tensors(ratio)
    number = f"layer {WIDE.layer_of_kind(ratio)}"
    for name in tensors:
        rest = {n: t for n, t in tensors.items() if n != name}
        if name.endswith(".scale"):
            refuse(lambda rest=rest: build(rest, ratio), number, f"FP8 weight without {name}")
        else:
            refuse(lambda rest=rest: build(rest, ratio), number, f"missing tensor {name}")
        wrong = {**tensors, name: tensors[name][:-1]}
        got = str(list(wrong[name].shape))
        refuse(lambda wrong=wrong: build(wrong, ratio), number, name, str(list(tensors[name].shape)), f"got {got}")


def test_dtypes_that_cannot_be() -> None:
    tensors = layer_tensors(4)
    fp8 = tensors["wq_b.weight"]
    cases = {
        "wo_b.scale": (tensors["wo_b.scale"].int(), ("wo_b", "int32")),
        "wq_a.weight": (tensors["wq_a.weight"].view(torch.uint8), ("wq_a.weight", "uint8")),
        "attn_sink": (tensors["attn_sink"].long(), ("attn_sink", "int64")),
        "indexer.weights_proj.weight": (fp8[: WIDE.index_n_heads, :1].repeat(1, 256), ("weights_proj", "FP8")),
        "q_norm.weight": (fp8[0, :128], ("q_norm", "FP8")),
        "wkv.weight": (tensors["wkv.weight"].bfloat16(), ("wq_a and wkv",)),
    }
    for name, (value, words) in cases.items():
        refuse(lambda name=name, value=value: build({**tensors, name: value}), *words)


def test_sizes_that_fp8_blocks_do_not_fit() -> None:
    for name in ("q_lora_rank", "o_lora_rank"):
        config = replace(WIDE, **{name: 64})
        tensors = random_layer_tensors(config, 2, quantized=False, wo_a_quantized=False)
        for linear in ("wq_a", "wkv") if name == "q_lora_rank" else ("wo_a",):
            weight = tensors[linear + ".weight"]
            tensors[linear + ".weight"] = weight.to(torch.float8_e4m3fn)
            tensors[linear + ".scale"] = torch.ones(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
        refuse(lambda c=config, t=tensors: build_layer(c, 2, t), name, "multiple of 128", "64", error=ValueError)


@pytest.mark.parametrize("index", [-1, 44, 1000])
def test_layers_that_the_config_does_not_have(index: int) -> None:
    tensors = layer_tensors(4)
    refuse(lambda: build_layer(WIDE, index, tensors), "layer_index", "0..43", f"got {index}", error=ValueError)
    refuse(lambda: random_layer_tensors(WIDE, index), "layer_index", error=ValueError)


def test_directories_without_the_layer(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    refuse(lambda: read_layer_tensors(missing, 2), str(missing), "not a directory")
    refuse(lambda: held_layers(missing), str(missing), "not a directory")
    refuse(lambda: read_layer_tensors(tmp_path, 2), str(tmp_path), "no *.safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refuse(lambda: held_layers(tmp_path), str(tmp_path), "no *.safetensors file")
    for write in (write_single, write_sharded):
        write(tmp_path, prefixed({"attn_sink": torch.zeros(2), "a": torch.zeros(1), "b": torch.zeros(1)}, 7))
        refuse(lambda: read_layer_tensors(tmp_path, 2), str(tmp_path), "layers.2.attn.")
        assert held_layers(tmp_path) == [7]
        assert sorted(read_layer_tensors(tmp_path, 7)) == ["a", "attn_sink", "b"]


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 100000])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    write_single(tmp_path, prefixed(layer_tensors(4), 2))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refuse(lambda: read_layer_tensors(tmp_path, 2), str(file), "cannot read")
    refuse(lambda: held_layers(tmp_path), str(file), "cannot read")


def test_a_header_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((20).to_bytes(8, "little") + b"{\n not a header \n}\n " + bytes(100))
    refuse(lambda: read_layer_tensors(tmp_path, 2), str(file), "cannot read")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xff", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": null}', b'{"weight_map": 5}', b"7"],
)
def test_broken_indexes(tmp_path: Path, content: bytes) -> None:
    write_sharded(tmp_path, prefixed(layer_tensors(1), 0))
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(content)
    refuse(lambda: read_layer_tensors(tmp_path, 0), str(index), "not a safetensors index")
    refuse(lambda: held_layers(tmp_path), str(index), "not a safetensors index")


def test_an_index_that_names_a_missing_file(tmp_path: Path) -> None:
    write_sharded(tmp_path, prefixed(layer_tensors(1), 0))
    gone = tmp_path / "model-00002-of-00003.safetensors"
    gone.unlink()
    refuse(lambda: read_layer_tensors(tmp_path, 0), str(gone), "cannot read")


def test_an_index_that_names_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"layers.0.attn.wq_a.weight": "."}}')
    refuse(lambda: read_layer_tensors(tmp_path, 0), str(tmp_path), "expected a file in")


def test_an_index_that_promises_what_no_file_holds(tmp_path: Path) -> None:
    write_sharded(tmp_path, prefixed(layer_tensors(1), 0))
    index = tmp_path / "model.safetensors.index.json"
    entries = json.loads(index.read_text())["weight_map"]
    entries = {re.sub(r"^layers\.0\.", "layers.5.", name): file for name, file in entries.items()}
    index.write_text(json.dumps({"weight_map": entries}))
    refuse(lambda: read_layer_tensors(tmp_path, 5), str(tmp_path), "layers.5.attn.")


def test_files_of_other_layers_are_not_opened(tmp_path: Path) -> None:
    save_file(prefixed(layer_tensors(1), 0), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"broken")
    names = dict.fromkeys(prefixed(layer_tensors(1), 0), "a.safetensors")
    names["layers.1.attn.wq_a.weight"] = "b.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert len(read_layer_tensors(tmp_path, 0)) == len(layer_tensors(1))
    assert held_layers(tmp_path) == [0, 1]
    refuse(lambda: read_layer_tensors(tmp_path, 1), "b.safetensors", "cannot read")


def test_norm_weights_keep_fp32() -> None:
    index = CONFIG.layer_of_kind(4)
    tensors = random_layer_tensors(CONFIG, index)
    fine = {n: t.float() * 1.001 if n.endswith("norm.weight") else t for n, t in tensors.items()}
    layer = build_layer(CONFIG, index, fine)
    assert layer.compressor is not None
    assert layer.indexer is not None
    for weight, name in (
        (layer.q_norm_weight, "q_norm.weight"),
        (layer.kv_norm_weight, "kv_norm.weight"),
        (layer.compressor.norm_weight, "compressor.norm.weight"),
        (layer.indexer.compressor.norm_weight, "indexer.compressor.norm.weight"),
    ):
        assert weight.dtype == torch.float32
        assert torch.equal(weight, fine[name])


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "a/../../b.safetensors", ""])
def test_an_index_that_leaves_the_folder(tmp_path: Path, file: str) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(prefixed(layer_tensors(4), 2), tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"layers.2.attn.wq_a.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for read in (lambda: read_layer_tensors(folder, 2), lambda: held_layers(folder)):
        refuse(read, "layers.2.attn.wq_a.weight", "expected a file in", repr(file))


def test_shapes_are_compared_before_tensors_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = WIDE.layer_of_kind(4)
    tensors = layer_tensors(4)
    write_single(tmp_path, prefixed(tensors, number))
    assert sorted(read_layer_tensors(tmp_path, number, WIDE)) == sorted(tensors)
    save_file(prefixed({"wq_b.weight": torch.zeros(7, 9)}, number), tmp_path / "model.safetensors")
    loaded: list[str] = []

    class File:
        def __init__(self, path: str, framework: str) -> None:
            self.file = safe_open(path, framework=framework)

        def __enter__(self) -> File:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> Any:
            loaded.append(name)
            return getattr(self.file, name)

    monkeypatch.setattr(checkpoint, "safe_open", File)
    refuse(lambda: read_layer_tensors(tmp_path, number, WIDE), "wq_b.weight", "expected shape", "[7, 9]")
    assert "get_tensor" not in loaded
    read_layer_tensors(tmp_path, number)
    assert "get_tensor" in loaded


def test_two_scales_must_be_one() -> None:
    tensors = layer_tensors(4)
    tensors["wq_b.weight_scale_inv"] = tensors["wq_b.scale"].clone()
    build(tensors)
    tensors["wq_b.weight_scale_inv"][0, 0] *= 2
    refuse(lambda: build(tensors), "wq_b.scale and wq_b.weight_scale_inv", "got different ones")


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [
        ("attn_sink", torch.float64, 1e39),
        ("compressor.ape", torch.float64, -1e39),
        ("compressor.wkv.weight", torch.float32, 3.4e38),
        ("q_norm.weight", torch.float64, 1e300),
    ],
)
def test_values_that_overflow_are_refused(name: str, dtype: torch.dtype, value: float) -> None:
    tensors = layer_tensors(4)
    tensors[name] = tensors[name].to(dtype)
    build(tensors)
    tensors[name].view(-1)[1] = value
    refuse(lambda: build(tensors), name, "beyond those of its layer")
    if name == "attn_sink":
        tensors[name][1] = -torch.inf
        build(tensors)


def test_values_that_do_not_overflow_are_not() -> None:
    tensors = layer_tensors(4)
    tensors["attn_sink"][0] = float("inf")
    tensors["attn_sink"][1] = 3.4e38
    tensors["q_norm.weight"] = tensors["q_norm.weight"].float()
    tensors["q_norm.weight"][0] = 3.4e38
    build(tensors)


def test_unused_tensors_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_named", set())
    tensors = {**layer_tensors(4, quantized=False), "wq_b.scale": torch.ones(1), "wk.bias": torch.ones(2)}
    with pytest.warns(RuntimeWarning, match=r"checkpoint: layer \d+: not used: wk\.bias, wq_b\.scale$"):
        build(tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(tensors)
        build(layer_tensors(4))
