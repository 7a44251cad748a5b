# SPDX-License-Identifier: Apache-2.0
"""One layer, one batch: the timed run, the same requests alone, the checks between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.layers import DeepseekV4MultiHeadLatentAttentionWrapper
from cute_kernels.runtime.record import record_calls
from layer_runner.checks import (
    Check,
    check_caches,
    check_consistent,
    check_finite,
    check_ranks_agree,
    check_ranks_result,
    check_repeatable,
    check_shares,
    check_topk,
    check_untouched,
    digest,
    truncated_rows,
)
from layer_runner.dump import dump_arrays
from layer_runner.pools import Pools
from layer_runner.ranks import Ranks, collectives
from layer_runner.report import Row, summarize
from layer_runner.requests import Request, schedule
from layer_runner.stepping import BatchResult, run_alone, run_batch, step_builder
from layer_runner.timing import StepTimes, time_steps

SHARDED = ("compressed cache", "indexer cache")
"""Of a context group whose ranks have pages of their own."""

KINDS = {1: "SWA", 4: "C4A", 128: "C128A"}


@dataclass(frozen=True)
class LayerReport:
    """A layer's run. truncated: (rows cut by top-k, rows) of a layer with an indexer. arrays: what --dump writes, if
    asked for. steps: what steps take on a GPU. exchanged: of each rank, what came over the wire
    (`layer_runner.ranks`). restricted: (rows that see more than their candidate blocks, rows) of a layer that selects
    among these."""

    layer_index: int
    kind: str
    rows: list[Row]
    checks: list[Check]
    truncated: tuple[int, int] | None
    arrays: dict[str, np.ndarray] | None
    steps: list[StepTimes]
    exchanged: list[list[dict[str, Any]]] | None = None
    restricted: tuple[int, int] | None = None


def count_steps(requests: Sequence[Request], chunk: int, device: str, dump: bool) -> int:
    """Steps that `run_layer` takes for one layer."""
    batch = sum(1 for _ in schedule(requests, chunk))
    return batch * (1 + (device == "cuda") + dump) + len(requests)


def max_rows(requests: Sequence[Request], chunk: int) -> int:
    """The largest number of rows in any step."""
    steps = max(sum(part.rows for part in parts) for parts, _ in schedule(requests, chunk))
    return max(steps, *(request.length for request in requests))


def paged_pools(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, reaches: Sequence[int], device: str, seed: int
) -> Pools:
    """Caches for sequences that reach so far."""
    options = layer.options
    return Pools(
        layer.config,
        layer.compress_ratio,
        reaches,
        kv_cache=options.kv_cache,
        index_cache=options.index_cache,
        device=device,
        seed=seed,
        context=options.cp,
    )


def run_once(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, requests: Sequence[Request], chunk: int, device: str, seed: int
) -> tuple[BatchResult, Pools]:
    """The batch through a layer, and the caches that it leaves."""
    builder = step_builder(layer, device)
    pools = paged_pools(layer, [request.reach for request in requests], device, seed)
    return run_batch(layer, builder, requests, pools, chunk), pools


def run_layer(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper,
    requests: Sequence[Request],
    *,
    chunk: int,
    device: str,
    seed: int,
    dump: bool,
    on_step: Callable[[], None] = lambda: None,
    ranks: Ranks | None = None,
    whole: tuple[BatchResult, Pools] | None = None,
) -> LayerReport:
    """Run the batch and check it; requests lie on the layer's device.

    ranks   the processes that run this layer, each its part
    whole   what one process by itself gave, on the rank that speaks
    """
    ratio, builder = layer.compress_ratio, step_builder(layer, device)

    def pools(reaches: list[int], number: int) -> Pools:
        return paged_pools(layer, reaches, device, seed + number)

    def batch(target: Pools, *, capture: bool = False) -> BatchResult:
        return run_batch(layer, builder, requests, target, chunk, capture=capture, on_step=on_step)

    reaches = [request.reach for request in requests]
    # Kernels are loaded and autotuned before anything is timed.
    first = pools(reaches, 0) if device == "cuda" else None
    warm_up = None if first is None else batch(first)
    paged = pools(reaches, 0)
    with record_calls() as recording:
        result = batch(paged)
    fresh = pools([request.length for request in requests], 1)
    alone = run_alone(layer, builder, requests, fresh, on_step=on_step)

    checks = [check_finite(result.outputs), check_consistent(result.outputs, alone, device)]
    if device == "cpu":
        checks.append(check_caches(paged, fresh, requests))
    checks.append(check_untouched(paged, fresh))
    truncated = None
    if layer.indexer is not None:
        checks.append(check_topk(result.topk, ratio))
        truncated = truncated_rows(result.topk, ratio)
    if warm_up is not None:
        checks.append(check_repeatable(warm_up.outputs, result.outputs))
    rows = summarize(recording.calls)
    exchanged = None
    if ranks is not None:
        held = {"outputs": digest(result.outputs), "picks": digest(result.topk)}
        cp = layer.options.cp
        is_sharded = cp is not None and cp.is_sharded
        replicated = [name for name in paged.by_name() if not (is_sharded and name in SHARDED)]
        held["caches"] = digest(
            [paged.live_bytes(name, n, r.length) for name in replicated for n, r in enumerate(requests)]
        )
        if cp is not None and is_sharded:
            shares = {
                name: digest([paged.live_bytes(name, n, r.length) for n, r in enumerate(requests)])
                for name in paged.by_name()
                if name in SHARDED
            }
            gathered = ranks.gather(f"shares/{layer.layer_index}", [cp.rank, shares])
            if whole is not None and device == "cpu" and shares:
                checks.append(check_shares(gathered, whole[1], requests, cp.size))
        checks.append(check_ranks_agree(ranks.gather(f"digests/{layer.layer_index}", held)))
        exchanged = ranks.gather(f"exchanged/{layer.layer_index}", collectives(rows))
    if whole is not None:
        assert ranks is not None
        checks.append(check_ranks_result(result.outputs, whole[0].outputs, ranks.size, device))
        if device == "cpu":
            checks.append(check_caches(paged, whole[1], requests, "caches hold the bytes of one process"))
    arrays = None
    if dump:
        # Capturing runs ops of its own, which the timed run must not see.
        target = pools(reaches, 0)
        arrays = dump_arrays(layer, target, requests[0], batch(target, capture=True))
    steps = [] if first is None else time_steps(layer, builder, requests, first, chunk)
    return LayerReport(layer.layer_index, KINDS[ratio], rows, checks, truncated, arrays, steps, exchanged)
