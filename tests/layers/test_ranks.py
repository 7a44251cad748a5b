# SPDX-License-Identifier: Apache-2.0
"""Layers over several ranks, processes over gloo or threads: one process's results, and errors on all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed

from layers import Communicator, CommunicatorError, GroupCommunicator, TensorParallel, ThreadCommunicator
from layers.score_rows import shards_rows
from tests.layers.context_engine import Steps, context_steps, together
from tests.layers.engine import CONFIG, KINDS, Engine, Request, hidden_rows, make_layer, relative, same_bytes
from tests.layers.ranks import RankPool, exchange, parallel_layer, ragged_steps, run_threads

WIDE = replace(CONFIG, num_attention_heads=16, o_groups=8)
PROCESSES = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    found = RankPool(PROCESSES)
    yield found
    found.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    found = RankPool(4)
    yield found
    found.close()


def assert_exchanged(results: list[list[torch.Tensor]]) -> None:
    size = len(results)
    numbers = torch.arange(6).view(2, 3)
    for rank, (gathered, raw, received, total) in enumerate(results):
        assert torch.equal(gathered, torch.stack([100 * other + numbers for other in range(size)]))
        assert raw[:, 0].tolist() == [(other + 250 - size) % 256 for other in range(size)]
        expected = [[100.0 * other + 2 * rank, 100.0 * other + 2 * rank + 1] for other in range(size)]
        assert received.tolist() == expected
        assert torch.equal(total, torch.full((5,), 1.5 * size + sum(range(size)), dtype=torch.bfloat16))


@pytest.mark.full
def test_collectives_between_processes(pool: RankPool) -> None:
    for size in range(2, PROCESSES + 1):
        assert_exchanged(pool.run(size, exchange))


@pytest.mark.parametrize("size", [1, 2, 5, 16, 64])
def test_collectives_between_threads(size: int) -> None:
    assert_exchanged(run_threads(size, exchange))


def assert_as_one(results: list[dict[str, Any]], whole: dict[str, Any]) -> None:
    """All ranks hold the same bytes; picks and caches are one process's, outputs nearly."""
    for held in results:
        assert same_bytes(held["outputs"], results[0]["outputs"])
        assert same_bytes(held["picks"], whole["picks"])
        assert same_bytes(held["caches"], whole["caches"])
    for ours, theirs in zip(results[0]["outputs"], whole["outputs"], strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative(ours, theirs) < 4e-3


@pytest.mark.full
def test_processes_give_what_one_gives(pool: RankPool) -> None:
    options: dict[str, Any] = {"config": WIDE, "index_cache": "mxfp4"}
    parallel = {**options, "tp_indexer": "rows", "tp_check_steps": True}
    results = pool.run(2, parallel_layer, 4, 3, parallel)
    assert_as_one(results, ragged_steps(make_layer(4, **options), 3))


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 3])
def test_processes_that_share_a_context(pool: RankPool, size: int, thorough: bool) -> None:
    if size > 2 and not thorough:
        pytest.skip("needs --thorough")
    # three ranks cannot share out four heads
    options = {"cp_prefill": "zigzag", "cp_kv": "sharded" if size == 2 else "replicated"}
    steps: Steps = [([], [(0, 400), (1, 9)]), ([(1, 1)], [(0, 130)]), ([(0, 2), (1, 2)], [])]
    results = pool.run(size, context_steps, 4, options, steps)
    whole = context_steps(None, 4, {}, steps)
    for held in results:
        assert same_bytes(held["outputs"], whole["outputs"])
        assert same_bytes(held["picks"], whole["picks"])
        assert same_bytes(held["window"], whole["window"])
    assert same_bytes(together(results, options), whole["entries"])


SAMPLE = (2, 1, "fp8", "bf16"), (2, 128, "fp8", "fp8_ds_mla")
"""What runs without --thorough, beside the processes of the test before."""


@pytest.mark.slow
@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("index_cache", ["fp8", "mxfp4"])
@pytest.mark.parametrize("kv_cache", ["fp8_ds_mla", "bf16"])
def test_every_kind_and_format(
    request: pytest.FixtureRequest, size: int, ratio: int, index_cache: str, kv_cache: str, thorough: bool
) -> None:
    if ratio != 4 and index_cache != "fp8":
        pytest.skip("has no indexer")
    if not thorough and (size, ratio, index_cache, kv_cache) not in SAMPLE:
        pytest.skip("needs --thorough")
    ranks: RankPool = request.getfixturevalue("four" if thorough else "pool")
    options: dict[str, Any] = {"config": WIDE, "index_cache": index_cache, "kv_cache": kv_cache}
    whole = ragged_steps(make_layer(ratio, **options), 5)
    for form in ("replicated", "rows")[: 1 + (ratio == 4)]:
        assert_as_one(ranks.run(size, parallel_layer, ratio, 5, {**options, "tp_indexer": form}), whole)


def test_threads_with_fewer_requests_than_ranks() -> None:
    """Ranks without a decode row; the partial outputs are fp32, so that nearly all bits are one process's."""
    options = {"config": WIDE, "tp_indexer": "rows", "tp_partial_dtype": torch.float32}
    results = run_threads(4, parallel_layer, 4, 2, options)
    whole = ragged_steps(make_layer(4, config=WIDE), 2)
    assert_as_one(results, whole)
    assert relative(torch.cat(results[0]["outputs"]), torch.cat(whole["outputs"])) < 1e-4


def _different(communicator: Communicator, name: str, values: list[Any]) -> None:
    layer = make_layer(1, config=WIDE, tp=TensorParallel(group=communicator), **{name: values[communicator.rank]})
    layer(torch.zeros(4, dtype=torch.int64), torch.zeros(4, WIDE.hidden_size, dtype=torch.bfloat16))


@pytest.mark.parametrize(("name", "values"), [("kv_cache", ["fp8_ds_mla", "bf16"]), ("max_model_len", [1024, 2048])])
def test_unequal_options_are_one_error_everywhere(name: str, values: list[Any]) -> None:
    first, second = run_threads(2, _different, name, values)
    assert isinstance(first, ValueError)
    assert str(first) == str(second)
    assert f"{name}: expected the same on all ranks, got {values[0]} on 0 and {values[1]} on 1" in str(first)


def _other_rows(communicator: Communicator) -> None:
    layer = make_layer(1, config=WIDE, tp=TensorParallel(group=communicator, check_steps=True))
    Engine(layer).step([], [(Request(), hidden_rows(5, seed=communicator.rank))])


def test_unequal_steps_are_found() -> None:
    first, second = run_threads(2, _other_rows)
    assert isinstance(first, ValueError)
    assert str(first) == str(second)
    assert "step: hidden_states: expected the same on all ranks" in str(first)


def _raises_inside(communicator: Communicator, place: str) -> None:
    """Rank 1 raises in the middle of a step; the caches it was to fill stay behind."""
    layer = make_layer(4, config=WIDE, tp=TensorParallel(group=communicator, indexer="rows"))
    if communicator.rank == 1:

        def fail(*arguments: Any, **named: Any) -> None:
            raise MemoryError("no memory")

        assert layer.indexer is not None
        target: Any = layer.mla_attn if place == "between" else layer.indexer.indexer_op
        target.forward = fail
    ragged_steps(layer, 2)


@pytest.mark.parametrize("place", ["before", "between"])
def test_a_rank_that_raises_ends_the_others(place: str) -> None:
    start = time.monotonic()
    first, second = run_threads(2, _raises_inside, place)
    assert isinstance(second, MemoryError)
    assert isinstance(first, CommunicatorError)
    assert time.monotonic() - start < 30


def test_a_thread_that_stalls_is_an_error_after_the_timeout() -> None:
    first, _ = ThreadCommunicator.group(2, timeout_s=0.2)
    with pytest.raises(CommunicatorError, match="rank 0: all_reduce between 2 ranks failed"):
        first.all_reduce(torch.zeros(3))


def _lost(communicator: Communicator, how: str) -> None:
    if communicator.rank == 1:
        if how == "dies":
            os._exit(9)
        if how == "raises":
            communicator.abort()
            os._exit(1)
        time.sleep(8)
    x = torch.zeros(3)
    communicator.all_reduce(x)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "raises", "stalls"])
def test_a_lost_process_ends_the_others(how: str) -> None:
    timeout_s = 3.0
    pool = RankPool(2, timeout_s=timeout_s)
    try:
        pool.run(2, exchange)
        start = time.monotonic()
        pool.start(2, _lost, how)
        ((_, error),) = pool.outcomes(1)
        assert error is not None
        assert "CommunicatorError: rank 0: all_reduce between 2 ranks failed" in error
        assert time.monotonic() - start < 2 * timeout_s
    finally:
        pool.close()


def test_arguments_of_collectives() -> None:
    (alone,) = ThreadCommunicator.group(1)
    with pytest.raises(ValueError, match=r"all_gather: expected out of shape \[1, 3\], got \[3\]"):
        alone.all_gather(torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"all_to_all: expected two tensors \[1, ...\]"):
        alone.all_to_all(torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="all_reduce: expected contiguous tensors"):
        alone.all_reduce(torch.zeros(4, 4).t()[1:])
    with pytest.raises(ValueError, match="one dtype"):
        alone.all_gather(torch.zeros(1, 3), torch.zeros(3, dtype=torch.int32))


def test_groups_that_do_not_fit_are_refused() -> None:
    first, second = ThreadCommunicator.group(2)
    assert (TensorParallel(group=second).rank, TensorParallel(group=second).size) == (1, 2)
    with pytest.raises(ValueError, match="group: expected rank 0 of 4, got rank 0 of 2"):
        TensorParallel(0, 4, group=first)
    with pytest.raises(ValueError, match="indexer: expected one of"):
        TensorParallel(0, 2, group=first, indexer="columns")
    with pytest.raises(ValueError, match="partial_dtype: expected bfloat16 or float32"):
        TensorParallel(0, 2, group=first, partial_dtype=torch.float16)
    if not torch.distributed.is_initialized():
        with pytest.raises(ValueError, match="expected init_process_group before the first use"):
            GroupCommunicator()


def test_when_rows_are_divided() -> None:
    """Long contexts and many rows; never where nothing was measured, and never alone."""
    assert shards_rows("sm_90a", 2, 64, 0, 262144, 512)
    assert shards_rows("sm_90a", 2, 8, 0, 262144, 512)
    assert shards_rows("sm_90a", 2, 0, 8192, 65536, 512)
    assert not shards_rows("sm_90a", 2, 1, 0, 262144, 512)
    assert not shards_rows("sm_90a", 2, 8, 0, 16384, 512)
    assert not shards_rows("sm_90a", 1, 64, 0, 262144, 512)
    assert not shards_rows("sm_100a", 2, 64, 0, 262144, 512)
    assert not shards_rows("", 2, 64, 0, 262144, 512)
    assert shards_rows("sm_90a", 8, 64, 0, 10**9, 2048)
