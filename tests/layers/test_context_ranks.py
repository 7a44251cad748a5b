# SPDX-License-Identifier: Apache-2.0
"""Layers whose context several ranks share: one process's results for any division, and errors on all ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from layers import (
    Communicator,
    CommunicatorError,
    ContextParallel,
    TensorParallel,
    ThreadCommunicator,
    random_layer_tensors,
)
from tests.layers.context_engine import ContextEngine, Steps, context_steps, layer_of, together
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer, relative, same_bytes
from tests.layers.ranks import run_threads

SHARED: dict[str, Any] = {"cp_kv": "sharded", "cp_prefill": "zigzag"}
FOUR_HEADS = replace(CONFIG, num_attention_heads=4)
FORMS: dict[str, dict[str, Any]] = {
    "replicated": {"cp_prefill": "zigzag"},
    "sharded": SHARED,
    "decode alone": {"cp_kv": "sharded"},
    "own heads": {"cp_kv": "sharded", "cp_heads": "own"},
    "all queries": {"cp_kv": "sharded", "cp_heads": "own", "cp_q": "replicate"},
}


def assert_as_one(results: list[Any], whole: dict[str, Any], options: dict[str, Any], limit: float = 4e-3) -> None:
    """Caches and picks are one process's, outputs nearly, and all ranks hold the same bytes."""
    for held in results:
        if isinstance(held, BaseException):
            raise held
        assert same_bytes(held["outputs"], results[0]["outputs"])
        assert same_bytes(held["picks"], whole["picks"])
        assert same_bytes(held["window"], whole["window"])
    assert same_bytes(together(results, options), whole["entries"])
    for ours, theirs in zip(results[0]["outputs"], whole["outputs"], strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours, theirs) <= limit


SAMPLE = (
    (2, 4, "sharded", "fp8"),
    (2, 4, "own heads", "mxfp4"),
    (2, 4, "all queries", "fp8"),
    (2, 128, "sharded", "fp8"),
)
"""What runs without --thorough."""


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index_cache", ["fp8", "mxfp4"])
@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("size", [2, 4])
def test_every_kind_and_form(size: int, ratio: int, index_cache: str, form: str, thorough: bool) -> None:
    if ratio != 4 and index_cache != "fp8":
        pytest.skip("has no indexer")
    if not thorough and (size, ratio, form, index_cache) not in SAMPLE:
        pytest.skip("needs --thorough")
    options: dict[str, Any] = {"config": replace(CONFIG, o_groups=4), "index_cache": index_cache}
    whole = context_steps(None, ratio, options)
    # outputs of one rank's heads are its own; partial sums of tensor-parallel ranks are rounded
    limit = 4e-3 if "cp_heads" in FORMS[form] else 1e-4
    options |= FORMS[form]
    assert_as_one(run_threads(size, context_steps, ratio, options), whole, options, limit)


def test_more_ranks_than_pages_and_requests() -> None:
    """Four ranks of which two have no entry, and ties of all scores between those that do."""
    tensors = random_layer_tensors(FOUR_HEADS, FOUR_HEADS.layer_of_kind(4), 0)
    tensors["indexer.weights_proj.weight"].zero_()
    steps: Steps = [([], [(0, 300)]), ([(0, 1)], [(1, 3)]), ([(0, 2), (1, 2)], [])]
    options: dict[str, Any] = {"config": FOUR_HEADS, "tensors": tensors}
    whole = context_steps(None, 4, options, steps)
    assert whole["picks"][1][0, -1] >= 0, "rows see more than top-k takes"
    options |= {"cp_kv": "sharded"}
    assert_as_one(run_threads(4, context_steps, 4, options, steps), whole, options, 1e-4)


@pytest.mark.full
def test_as_many_shards_give_the_same_bits(thorough: bool) -> None:
    """Whatever the number of ranks that have them."""
    steps: Steps = [([], [(0, 600)]), ([(0, 3)], [])]
    found = []
    for size in (1, 2, 4) if thorough else (1, 4):
        results = run_threads(size, context_steps, 128, {"cp_kv": "sharded", "cp_shards": 4}, steps)
        found.append(results[0]["outputs"])
    assert all(same_bytes(found[0], other) for other in found[1:])


def test_partial_results_as_bf16() -> None:
    options: dict[str, Any] = {"quantized": False}
    steps: Steps = [([], [(0, 300)]), ([(0, 2)], [])]
    whole = context_steps(None, 128, options, steps)
    options |= {"cp_kv": "sharded", "cp_wire": "bf16"}
    first, second = run_threads(2, context_steps, 128, options, steps)
    assert same_bytes(first["outputs"], second["outputs"])
    assert 0 < relative(first["outputs"][1], whole["outputs"][1]) < 1e-2


def _different(communicator: Communicator, name: str, values: list[Any]) -> None:
    layer_of(communicator, 4, {"cp_kv": "sharded", name: values[communicator.rank]})


@pytest.mark.parametrize(("name", "values"), [("cp_wire", ["fp32", "bf16"]), ("index_cache", ["fp8", "mxfp4"])])
def test_unequal_options_are_one_error_everywhere(name: str, values: list[Any]) -> None:
    first, second = run_threads(2, _different, name, values)
    assert isinstance(first, ValueError)
    assert str(first) == str(second)
    assert f"{name.replace('_', '.', 1) if name.startswith('cp') else name}: expected the same" in str(first)


def _raises_inside(communicator: Communicator, place: str) -> None:
    """Rank 1 raises before a step's first collective, or between two."""
    layer = layer_of(communicator, 4, SHARED)
    if communicator.rank == 1:

        def fail(*arguments: Any, **named: Any) -> None:
            raise MemoryError("no memory")

        target: Any = layer.compressor if place == "between" else layer.fused_wqa_wkv
        target.forward = fail
    ContextEngine(layer).step([], [(Request(), hidden_rows(600, seed=0))])


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_rank_that_raises_ends_the_others(place: str) -> None:
    start = time.monotonic()
    first, second = run_threads(2, _raises_inside, place)
    assert isinstance(second, MemoryError)
    assert isinstance(first, CommunicatorError)
    assert time.monotonic() - start < 30


def _other_step(communicator: Communicator) -> None:
    tp = TensorParallel(check_steps=True)
    layer = make_layer(4, cp=ContextParallel(group=communicator, kv="sharded"), tp=tp)
    ContextEngine(layer).step([], [(Request(), hidden_rows(5 + communicator.rank, seed=0))])


def test_unequal_steps_are_found() -> None:
    first, second = run_threads(2, _other_step)
    assert isinstance(first, ValueError)
    assert str(first) == str(second)
    assert "step: query_lens: expected the same on all ranks, got [5] on 0 and [6] on 1" in str(first)


def test_refused() -> None:
    first, _ = ThreadCommunicator.group(2)
    cp = ContextParallel(group=first, kv="sharded")
    for ratio, options, message in (
        (4, {"kv_cache": "bf16"}, "cp: expected fp8_ds_mla caches to shard, got bf16"),
        (4, {"persist": "all"}, "cp: expected persist 'window' and keep_every 0"),
        (1, {"config": replace(CONFIG, num_attention_heads=5, o_groups=1)}, "expected a size that divides 5 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            make_layer(ratio, cp=cp, **options)  # type: ignore[arg-type]
    own = ContextParallel(group=first, kv="sharded", heads="own")
    with pytest.raises(
        ValueError, match="expected neighbours in the tensor-parallel group, got rank 0 of 2 on its rank"
    ):
        make_layer(1, cp=own)
    layer = make_layer(1, cp=cp)
    with pytest.raises(ValueError, match=r"metadata: expected a ContextStep with options\.cp, got DeepseekV4Metadata"):
        Engine(layer).step([], [(Request(), hidden_rows(3, seed=0))])
