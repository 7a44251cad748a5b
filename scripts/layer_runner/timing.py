# SPDX-License-Identifier: Apache-2.0
"""What a step of a layer takes on a GPU as its user gets it: in a CUDA graph, called eagerly, and launch by launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.layers import ContextStep, DeepseekV4MultiHeadLatentAttentionWrapper
from cute_kernels.runtime.record import Cost, record_calls
from layer_runner.pools import Pools
from layer_runner.requests import Part, Request, schedule
from layer_runner.stepping import Builder
from perf.layer import least_work
from perf.measure import capture, time_graphs
from perf.timeline import Timeline, profile

EAGER_CALLS = 12
REPLAYS = 15


@dataclass(frozen=True)
class StepTimes:
    """One step through the layer, times in microseconds.

    name        what the step is
    graph_us    replayed from a CUDA graph with nothing in L2; None where a graph cannot hold the step
    eager_us    an eager call of a step that has run before, until all is done
    host_us     the part of it until all is queued
    timeline    launches, of the graph where there is one
    least       bytes and FLOPs that no layer of the kind can do without
    """

    name: str
    graph_us: float | None
    eager_us: float
    host_us: float
    timeline: Timeline
    least: Cost

    @property
    def us(self) -> float:
        """The time that counts: a graph's where there is one."""
        return self.eager_us if self.graph_us is None else self.graph_us


def chosen_steps(requests: Sequence[Request], chunk: int) -> list[tuple[str, list[Part], list[int | None]]]:
    """The step with the most prefill rows and the one with the most decode rows and no others, as far as there are any:
    what it is, its parts, and the number of each decode's step."""
    steps = [(parts, numbers) for parts, numbers in schedule(requests, chunk)]

    def rows(step: tuple[list[Part], list[int | None]], is_decode: bool) -> int:
        return sum(part.rows for part, number in zip(*step, strict=True) if (number is not None) == is_decode)

    found = []
    prefill = max(steps, key=lambda step: rows(step, False))
    found.append((f"prefill, {rows(prefill, False)} + {rows(prefill, True)} decode rows", *prefill))
    decodes = [step for step in steps if rows(step, False) == 0]
    if decodes:
        decode = max(decodes, key=lambda step: rows(step, True))
        found.append((f"decode, {rows(decode, True)} rows of {len(decode[0])} requests", *decode))
    return found


def time_steps(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper,
    builder: Builder,
    requests: Sequence[Request],
    pools: Pools,
    chunk: int,
) -> list[StepTimes]:
    """Times of `chosen_steps`. pools: caches that all steps of the batch have gone through; steps write them again."""
    found = []
    for name, parts, numbers in chosen_steps(requests, chunk):
        hidden = torch.cat([requests[p.request].rows(p, number) for p, number in zip(parts, numbers, strict=True)])
        query, lengths = [p.rows for p in parts], [p.start + p.rows for p in parts]
        metadata = builder.build(
            layer.compress_ratio,
            query,
            lengths,
            pools.tables_of([p.request for p in parts]),
            sum(number is not None for number in numbers),
        )
        if isinstance(metadata, ContextStep):
            hidden = metadata.own_rows(hidden)
        call = partial(layer, metadata.positions, hidden, metadata, pools.caches)
        sizes = [None if c is None else row_bytes(c) for c in (pools.caches.swa, pools.caches.indexer)]
        least = least_work(layer, query, lengths, row_bytes=sizes[0] or 0, key_bytes=sizes[1] or 0)
        found.append(time_call(name, call, least))
    return found


def row_bytes(cache: Any) -> int:
    """Of a cached token or entry."""
    return int(cache.kv_format.page_bytes(cache.block_size)) // int(cache.block_size)


def time_call(name: str, call: Callable[[], Any], least: Cost) -> StepTimes:
    with record_calls() as recording:
        call()
    host, eager = [], []
    for _ in range(EAGER_CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        host.append((queued - begin) * 1e6)
        eager.append((time.perf_counter() - begin) * 1e6)
    graph_us, timed = None, call
    # references wait for the GPU, which no graph can hold
    if all(done.implementation != "reference" for done in recording.calls):
        graph_us = time_graphs({name: [call]}, least.bytes, REPLAYS, flops_per_set=least.flops)[name].median
        timed = capture([call])[0].replay
        timed()
    eager_us, host_us = (statistics.median(times[2:]) for times in (eager, host))
    return StepTimes(name, graph_us, eager_us, host_us, profile(timed), least)
