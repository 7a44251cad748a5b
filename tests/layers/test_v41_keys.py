# SPDX-License-Identifier: Apache-2.0
"""Kernels that V4.1's layers launch are those of a deployment, whatever their options: none compiles while it serves.

Without a GPU: ops run their references, and then launch their kernels for Hopper on the same arguments, where launches
only note their keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cute_kernels.formats import V41_KV_CACHES
from cute_kernels.models import V41Shape
from cute_kernels.runtime import arch, ops
from cute_kernels.runtime import compile as compile_
from cute_kernels.runtime.registry import deployment_keys
from cute_kernels.sparse_mla import launch as sparse_mla
from layers.caches import INDEX_CACHES
from tests.layers.v41_engine import CONFIG, Engine, draft_model, hidden_rows, model

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

FEW_HEADS = replace(CONFIG, index_n_heads=16)
MANY_HEADS = replace(FEW_HEADS, num_attention_heads=32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, None]]:
    """Keys of what an H200 would have launched."""
    execute = ops._execute

    def also_launch(op: ops.Op, implementation: str, body: Any, args: tuple[Any, ...]) -> None:
        call = op.call_type(*args)
        kernel = op.load_kernel()
        assert not kernel.why_not(call), op.name
        execute(op, implementation, body, args)
        kernel.launch(call)

    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(sparse_mla, "no_logs", lambda dimensions, index: torch.zeros([1] * dimensions))
    monkeypatch.setattr(ops, "_execute", also_launch)
    for known in (arch.arch_of, arch.multiprocessors):
        known.cache_clear()
    with compile_.collect() as keys:
        yield keys
    for known in (arch.arch_of, arch.multiprocessors):
        known.cache_clear()


@pytest.mark.parametrize("config", [FEW_HEADS, MANY_HEADS], ids=["few heads", "many heads"])
@pytest.mark.parametrize("index_cache", sorted(INDEX_CACHES))
@pytest.mark.parametrize("kv_cache", sorted(V41_KV_CACHES))
def test_layers_launch_what_a_deployment_has(
    kv_cache: str, index_cache: str, config: Any, launched: dict[Any, None]
) -> None:
    engine = Engine(model(config, index_cache, kv_cache), seed=1, draft=draft_model(config, kv_cache))
    first, second = engine.request(), engine.request()
    engine.step([], [(first, hidden_rows(130, 1)), (second, hidden_rows(9, 2))])
    for rows in (1, 6):
        engine.step([(first, hidden_rows(rows, 3)), (second, hidden_rows(rows, 4))])
    engine.step([(first, hidden_rows(1, 5))], [(second, hidden_rows(70, 6))])
    engine.draft_blocks([(first, hidden_rows(5, 7)), (second, hidden_rows(5, 8))])
    known = deployment_keys(V41Shape.of(config), 1, "sm_90a")
    unknown = [key.identity for key in launched if key not in known]
    assert launched
    assert not unknown
