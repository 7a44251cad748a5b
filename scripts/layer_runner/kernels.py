# SPDX-License-Identifier: Apache-2.0
"""The kernels of a run, compiled ahead of it in as many processes as there are cores: one by one, as launches ask for
them, they take minutes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from rich.progress import Progress

from cute_kernels.layers import DeepseekV4MetadataBuilder, DeepseekV4MultiHeadLatentAttentionWrapper
from cute_kernels.runtime import cache
from cute_kernels.runtime.compile import collect, jit_forbidden
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.precompile import precompile
from layer_runner.requests import Request
from layer_runner.run import paged_pools, run_once
from layer_runner.stepping import run_alone


def kernels_of(runs: Iterable[Callable[[], object]]) -> list[KernelKey]:
    """Keys of the kernels that `runs` launch, found by running all but these. What fails here fails, and says why, when
    the run itself comes to it."""
    with collect() as keys:
        for run in runs:
            with contextlib.suppress(Exception):
                run()
    torch.cuda.synchronize()
    return list(keys)


def passes(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, requests: Sequence[Request], chunk: int, device: str, seed: int
) -> Iterator[Callable[[], object]]:
    """The ways in which `run_layer` brings the requests through a layer. It keeps the launches of its steps: a layer
    that has run without kernels runs without them ever after."""
    options = layer.options
    builder = DeepseekV4MetadataBuilder(layer.config, options.max_num_tokens, options.max_model_len, device)
    yield lambda: run_once(layer, requests, chunk, device, seed)
    fresh = paged_pools(layer, [request.length for request in requests], device, seed)
    yield lambda: run_alone(layer, builder, requests, fresh)


def compile_ahead(keys: Sequence[KernelKey], bar: Progress) -> str | None:
    """Have the kernels in the cache, and say so in a sentence if any was missing there; a cache that is switched off,
    or takes nothing, is left alone."""
    folder = cache.default_directory()
    if folder is None or jit_forbidden() or not keys:
        return None
    start, compiled = time.perf_counter(), 0
    with bar:
        task = bar.add_task("compiling kernels", total=len(keys))
        for outcome in precompile(keys, folder):
            compiled += outcome.status == "compiled"
            bar.advance(task)
        bar.remove_task(task)
    if not compiled:
        return None
    seconds = time.perf_counter() - start
    return f"Compiled {compiled} kernels in {seconds:.0f} s into {folder}: the next run loads them."
