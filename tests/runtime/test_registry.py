# SPDX-License-Identifier: Apache-2.0
"""Which kernels there are, which keys a deployment needs, and having them ready."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cute_kernels
from cute_kernels import support
from cute_kernels.models import MODELS, ModelShape, V41Shape
from cute_kernels.runtime import arch as arch_
from cute_kernels.runtime import cache, registry, verify
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.key import KernelKey
from layers.config import PRESETS
from layers.v41_config import V41_PRESETS

ROOT = Path(__file__).parent.parent.parent
needs_dsl = pytest.mark.skipif(not importlib.util.find_spec("cutlass"), reason="CuTe DSL is not installed")
FLASH = MODELS["v4-flash"]


@needs_dsl
@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("arch", sorted(arch_.SMEM_BYTES))
def test_the_kernels_of_a_deployment_are_finite_and_enumerable(model: str, arch: str) -> None:
    for tp in (1, 2, 4, 8):
        keys = registry.deployment_keys(MODELS[model], tp, arch)
        assert len(set(keys)) == len(keys)
        if model in PRESETS:
            assert keys == registry.deployment_keys(PRESETS[model], tp, arch), "a layer's config serves as well"
        for key in keys:
            assert isinstance(key, KernelKey)
            assert key.arch == arch
            for value in vars(key).values():
                assert value is None or type(value) in (str, int, float, bool), key


@needs_dsl
def test_the_support_table_says_what_the_kernels_say() -> None:
    """An op has a line if it has a kernel, and a kernel runs where it declares keys."""
    ops = registry.ops_with_kernels()
    assert sorted(support.KERNEL_ARCHS) == sorted(op.name for op in ops)
    for op in ops:
        declare = op.load_kernel().deployment_keys
        archs = {arch for arch in support.ARCHS if any(declare(model, 1, arch) for model in MODELS.values())}
        assert set(support.KERNEL_ARCHS[op.name]) == archs, op.name


def test_what_does_not_run_everywhere_has_a_reason() -> None:
    incomplete = {
        op
        for op in support.KERNEL_ARCHS
        for arch in support.ARCHS
        if support.support(op, arch).status in ("no", "partly")
    }
    assert incomplete == set(support.REASONS)
    assert all("\n" not in reason for reason in support.REASONS.values())
    assert all(op in support.KERNEL_ARCHS for op, _ in support.PARTLY)


@pytest.mark.parametrize("tp", [0, -1, 3, 128, True, 1.0])
def test_ranks_must_divide_the_heads(tp: Any) -> None:
    with pytest.raises(ValueError, match="tp: expected a divisor of num_attention_heads = 64"):
        registry.deployment_keys(FLASH, tp, "sm_90a")


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("sm_75", "kernels need sm_80 or newer"),
        ("sm_52", "kernels need sm_80 or newer"),
        ("sm_79", "kernels need sm_80 or newer"),
        ("sm_80a", "did you mean sm_80"),
        ("sm_90", "expected one of .*sm_90a"),
        ("sm_100f", "expected one of .*sm_100a"),
        ("sm_999", "expected one of"),
        ("hopper", "expected one of"),
        ("", "expected one of"),
    ],
)
def test_an_architecture_that_does_not_exist(arch: str, why: str) -> None:
    for call in (lambda: registry.deployment_keys(FLASH, 1, arch), lambda: cute_kernels.warmup(FLASH, arch=arch)):
        with pytest.raises(ValueError, match=rf"arch: .*{why}"):
            call()


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A deployment of two kernels, and what is done with them."""
    calls = SimpleNamespace(functions=[], prepared=[], keys=[KernelKey("sm_90a"), KernelKey("sm_90a ")])
    monkeypatch.setattr(registry, "deployment_keys", lambda config, tp, arch: calls.keys)
    monkeypatch.setattr(compile_, "function", calls.functions.append)
    monkeypatch.setattr(compile_, "prepare", calls.prepared.append)
    return calls


def test_warmup_on_a_gpu_loads_every_kernel(deployment: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(arch_, "arch_of", lambda index: "sm_90a")
    assert cute_kernels.warmup(FLASH, tp=2) == deployment.keys
    assert cute_kernels.warmup(FLASH, arch="sm_90a") == deployment.keys
    assert (deployment.functions, deployment.prepared) == (deployment.keys * 2, [])
    cute_kernels.warmup(FLASH, arch="sm_100a")
    assert (len(deployment.functions), deployment.prepared) == (4, deployment.keys)


def test_warmup_without_a_gpu_fills_the_disk_cache(
    deployment: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match=r"warmup: arch: .*without a GPU"):
        cute_kernels.warmup(FLASH)
    assert cute_kernels.warmup(FLASH, arch="sm_90a") == deployment.keys
    assert (deployment.functions, deployment.prepared) == ([], deployment.keys)
    monkeypatch.setenv(cache.DIRECTORY_VARIABLE, "")
    with pytest.raises(RuntimeError, match="warmup: no disk cache"):
        cute_kernels.warmup(FLASH, arch="sm_90a")


# ---- models ----------------------------------------------------------------------------------------------------------


def test_models_are_the_layers_presets() -> None:
    assert sorted(MODELS) == sorted({**PRESETS, **V41_PRESETS})
    for name, config in PRESETS.items():
        shape = MODELS[name]
        assert {field: getattr(config, field) for field in vars(shape)} == vars(shape)
    for name, newer in V41_PRESETS.items():
        assert V41Shape.of(newer) == MODELS[name]
        with pytest.raises(ValueError, match=r"config: expected compress ratios of V4, or a V41Shape, got \[0, 1, 2\]"):
            registry.deployment_keys(newer)


def test_a_published_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "deepseek_v4", "hidden_size": 512, "num_attention_heads": 32, "compress_ratios": [0, 128, 4], '
        '"vocab_size": 7}'
    )
    shape = ModelShape.from_json(path)
    assert (shape.hidden_size, shape.num_attention_heads, shape.compress_ratios) == (512, 32, (1, 128, 4))
    assert shape.index_topk == FLASH.index_topk
    path.write_text('{"layer_types": ["sliding_attention", "compressed_sparse_attention"]}')
    assert ModelShape.from_json(path).compress_ratios == (1, 4)
    path.write_text('{"model_type": "deepseek_v41", "text_config": {"hidden_size": 512, "compress_ratios": [0, 1]}}')
    newer = ModelShape.from_json(path)
    assert isinstance(newer, V41Shape)
    assert (newer.hidden_size, newer.index_n_heads, newer.layer_ratios, newer.latent_ratios) == (512, 32, (0, 1), (1,))
    assert newer.compress_ratios == (1,), "a window alone"
    path.write_text('{"hc_mult": 1}')
    assert ModelShape.from_json(path).hc_mult == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot read"),
        ("[]", "expected a config.json"),
        ('{"model_type": "llama"}', "expected a config.json"),
        ('{"hidden_size": "big"}', "hidden_size: expected a positive integer"),
        ('{"hidden_size": 0}', "hidden_size: expected a positive integer"),
        ('{"compress_ratios": [2]}', "compress_ratios: expected"),
        ('{"compress_ratios": 4}', "compress_ratios: expected"),
        ('{"layer_types": ["full_attention"]}', "compress_ratios: expected"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"config: .*{why}") as caught:
        ModelShape.from_json(path)
    assert "\n" not in str(caught.value)


# ---- support ---------------------------------------------------------------------------------------------------------


def test_support() -> None:
    assert support.support("sparse_mla_decode", "sm_90a").status in ("reference", "compiled", "measured")
    assert support.support("bf16_gemm", "sm_80").status == "no"
    assert support.support("quantize_and_insert_k_cache", "sm_100a") == support.Support("compiled")
    measured = support.support("quantize_and_insert_k_cache", "sm_90a")
    assert (measured.status, measured.record) == ("measured", "h200/quantize_and_insert_k_cache.json")
    assert set(support.ARCHS) <= set(arch_.SMEM_BYTES)


def test_ops_without_a_kernel_share_a_row() -> None:
    known = sorted(support.KERNEL_ARCHS)
    for others, row in (([], None), (["a"], "| `a` |"), (["a", "b"], "| the other 2 ops |")):
        found = [line for line in support.markdown([*known, *others]).splitlines() if line.startswith("|")]
        assert len(found) == 2 + len(known) + (row is not None)
        assert row is None or found[-1].startswith(row)


def test_every_measurement_has_its_record() -> None:
    for (op, arch), name in support.RECORDS.items():
        assert arch in support.KERNEL_ARCHS[op]
        record = json.loads((ROOT / "perf/results" / name).read_text())
        assert any(line["op"] == op and line["rows"] for line in record["records"])


def test_every_op_has_cases_to_be_verified_with() -> None:
    assert [name for name, op in registry.all_ops().items() if verify.examples_of(op) is None] == []
