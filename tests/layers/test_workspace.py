# SPDX-License-Identifier: Apache-2.0
"""Scratch memory of the layers: where decode rows are split, all layers of a model share memory that never moves."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cute_kernels.sparse_mla import ops
from layers import mla
from layers.bound import ALIGNMENT, CHUNK_BYTES, Scratch
from layers.mla import Workspace
from layers.output import OutputProjection
from layers.parallel import TensorParallel
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer

CPU = torch.device("cpu")


def test_parts_stay_where_they_are() -> None:
    workspace = Workspace()
    first = workspace.parts(1000, CPU)
    assert (first.dtype, first.shape) == (torch.float32, (250,))
    workspace.get(3, 70, 512, CPU)
    for size in (1000, 12, 4):
        assert workspace.parts(size, CPU).data_ptr() == first.data_ptr()
        assert workspace.parts(size, CPU).shape == (size // 4,)


class OnGpu(torch.Tensor):
    """A tensor on the CPU that says it lies on a GPU."""

    device = torch.device("cuda", 0)  # type: ignore[assignment]


def test_memory_of_captured_steps_is_kept_and_none_is_made_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(
        mla.torch, "empty", lambda *size, dtype=None, device=None: empty(*size, dtype=dtype).as_subclass(OnGpu)
    )
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    workspace = Workspace()
    first = workspace.get(3, 70, 512, OnGpu.device)
    parts = workspace.parts(1000, OnGpu.device)
    capturing = True
    assert workspace.get(2, 70, 512, OnGpu.device).data_ptr() == first.data_ptr()
    assert workspace.parts(1000, OnGpu.device).data_ptr() == parts.data_ptr()
    for grow in (lambda: workspace.get(3, 71, 512, OnGpu.device), lambda: workspace.parts(1004, OnGpu.device)):
        with pytest.raises(
            RuntimeError, match=r"Workspace: expected \d+ bytes .* before a CUDA graph is captured, got"
        ):
            grow()
    capturing = False
    told = {first.data_ptr(), parts.data_ptr()}
    grown = workspace.get(9, 70, 512, OnGpu.device), workspace.parts(9000, OnGpu.device)
    assert not told & {memory.data_ptr() for memory in grown}
    assert set(workspace._captured) == told, "a graph replays into them"
    workspace.get(900, 70, 512, OnGpu.device)
    assert set(workspace._captured) == told, "no graph knows these"


@pytest.mark.parametrize("rows", [1, 3, 40, 5000])
def test_layers_of_all_kinds_share_what_their_calls_need(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_multiprocessors", lambda device: 132)
    workspace = Workspace()
    sizes = set()
    for ratio in KINDS:
        layer = make_layer(ratio, workspace=workspace, max_num_tokens=rows, max_model_len=4096)
        layer.mla_attn.reserve(CPU)
        sizes.add(layer.mla_attn._decode_workspace(CPU).nbytes)
        entries = {1: 0, 4: layer.config.index_topk, 128: 4096 // 128}[ratio]
        for fewer in {1, rows // 2 + 1, rows}:
            needed = ops.sparse_mla_decode_workspace_size(fewer, 1, layer.num_heads, 128, entries)
            assert needed <= min(sizes)
    assert len(sizes) == 1


@pytest.mark.parametrize("ratio", KINDS)
def test_decode_steps_use_it(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    def spy(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["workspace"])
        return ops.sparse_mla_decode(*args, **kwargs)

    monkeypatch.setattr(mla, "sparse_mla_decode", spy)
    monkeypatch.setattr(ops, "_multiprocessors", lambda device: 132)
    layer = make_layer(ratio)
    engine, request = Engine(layer, seed=1), Request()
    engine.step([], [(request, hidden_rows(200, seed=2))])
    for seed in (3, 4):
        engine.step([(request, hidden_rows(1, seed=seed))])
    assert len(given) == 2
    assert given[0].data_ptr() == given[1].data_ptr() == layer.mla_attn.workspace.parts(4, CPU).data_ptr()
    assert given[0].nbytes == layer.mla_attn._decode_workspace(CPU).nbytes > 0


@pytest.mark.parametrize("is_invariant", [False, True])
def test_rows_are_cut_as_the_op_chooses_or_never(is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def spy_on(name: str) -> None:
        op = getattr(mla, name)

        def spy(*args: Any, **kwargs: Any) -> Any:
            given.append((name, kwargs["num_splits"], kwargs.get("split_tokens", 0)))
            return op(*args, **kwargs)

        monkeypatch.setattr(mla, name, spy)

    spy_on("sparse_mla_decode")
    spy_on("sparse_mla_prefill_paged")
    monkeypatch.setattr(ops, "_multiprocessors", lambda device: 132)
    layer = make_layer(4, prefill="paged", batch_invariant=is_invariant)
    engine, request = Engine(layer, seed=1), Request()
    engine.step([], [(request, hidden_rows(200, seed=2))])
    engine.step([(request, hidden_rows(1, seed=3))])
    splits = int(is_invariant)
    assert given == [("sparse_mla_prefill_paged", splits, 0), ("sparse_mla_decode", splits, 0)]
    assert (layer.mla_attn._decode_workspace(CPU).nbytes == 0) == is_invariant


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_plain_caches_need_none(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_multiprocessors", lambda device: 132)
    layer = make_layer(4, kv_cache=kv)
    layer.mla_attn.reserve(CPU)
    assert layer.mla_attn.workspace.parts(0, CPU).untyped_storage().nbytes() == 0


@pytest.mark.full
@pytest.mark.parametrize("ratio", KINDS)
def test_what_is_reserved_is_enough_for_the_largest_step(ratio: int) -> None:
    """As many requests as are gathered at a time, the longest ones, and all rows of a step."""
    requests, rows = mla.PREFILL_CHUNK_SIZE, 40
    assert requests > 1
    layer = make_layer(ratio, prefill="gathered", max_num_tokens=rows * requests, max_model_len=512)
    layer.mla_attn.reserve(CPU)
    reserved = layer.mla_attn.workspace.nbytes
    assert reserved > 0
    engine, batch = Engine(layer, seed=1), [Request() for _ in range(requests)]
    for start in range(0, 480, rows):
        engine.step([], [(request, hidden_rows(rows, seed=start)) for request in batch])
    assert layer.mla_attn.workspace.nbytes == reserved


@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("length", [4095, 4096, 4097])
def test_a_gathered_request_has_room_for_all_its_entries(ratio: int, length: int) -> None:
    """Compressed entries of the longest request, in whole pages, the window before a step's rows, and those; of each
    row the numbers of its keys, and how many."""
    layer = make_layer(ratio, prefill="gathered", max_num_tokens=70, max_model_len=length)
    layer.mla_attn.reserve(CPU)
    entries, window = math.ceil(length / ratio) if ratio > 1 else 0, layer.config.sliding_window
    page = 256 // ratio
    entries = math.ceil(entries / page) * page
    rows = mla.PREFILL_CHUNK_SIZE * (entries + window - 1) + 70
    keys = window + (layer.config.index_topk if ratio == 4 else entries)
    memory = layer.mla_attn.workspace.bytes(1, CPU).untyped_storage()
    assert memory.nbytes() == rows * 1024 + 70 * (math.ceil(keys / 4) * 4 + 1) * 4


def test_scratch_of_steps_is_given_out_again() -> None:
    """Aligned pieces one behind the other, in as many chunks as they need, which stay where they are."""
    scratch = Scratch(CPU)
    assert scratch.nbytes == 0
    first, second = scratch.take(1), scratch.take(300)
    assert (first.dtype, first.shape, second.shape) == (torch.uint8, (1,), (300,))
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT
    assert scratch.nbytes == CHUNK_BYTES
    rest = CHUNK_BYTES - 3 * ALIGNMENT
    assert scratch.take(rest).data_ptr() - first.data_ptr() == 3 * ALIGNMENT, "to the last byte"
    assert scratch.nbytes == CHUNK_BYTES
    other = scratch.take(1)
    assert scratch.nbytes == 2 * CHUNK_BYTES
    large = scratch.take(CHUNK_BYTES + 1)
    assert scratch.nbytes == 3 * CHUNK_BYTES + 1
    scratch.rewind()
    again = scratch.take(1), scratch.take(CHUNK_BYTES), scratch.take(CHUNK_BYTES + 1)
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in (first, other, large)]
    assert scratch.nbytes == 3 * CHUNK_BYTES + 1


@pytest.mark.parametrize("wo_a_quantized", [False, True])
@pytest.mark.parametrize("tma_aligned_scales", [False, True])
def test_results_are_quantized_for_fp8_products_with_plain_scales(
    wo_a_quantized: bool, tma_aligned_scales: bool
) -> None:
    projection = OutputProjection(
        CONFIG,
        TensorParallel(),
        wo_a_quantized=wo_a_quantized,
        wo_b_quantized=True,
        tma_aligned_scales=tma_aligned_scales,
    )
    assert projection.takes_codes == (wo_a_quantized and not tma_aligned_scales)
