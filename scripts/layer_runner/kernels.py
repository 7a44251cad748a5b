# SPDX-License-Identifier: Apache-2.0
"""The kernels of a run, compiled ahead of it in as many processes as there are cores: one by one, as launches ask for
them, they take minutes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.progress import Progress

from cute_kernels.layers import (
    DeepseekV4MetadataBuilder,
    DeepseekV4MultiHeadLatentAttentionWrapper,
    DeepseekV41Attention,
)
from cute_kernels.runtime import cache
from cute_kernels.runtime.compile import collect, jit_forbidden
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.precompile import precompile
from layer_runner import v41
from layer_runner.requests import Request
from layer_runner.run import paged_pools, run_once
from layer_runner.stepping import run_alone


def kernels_of_layer(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, requests: Sequence[Request], chunk: int, device: str, seed: int
) -> list[KernelKey]:
    """Keys of the kernels that `run_layer` launches, found by running all but these. What fails here fails, and says
    why, when the run itself comes to it. The layer keeps the launches of its steps: it is of no use afterwards."""
    options = layer.options
    builder = DeepseekV4MetadataBuilder(layer.config, options.max_num_tokens, options.max_model_len, device)
    with collect() as keys, contextlib.suppress(Exception):
        run_once(layer, requests, chunk, device, seed)
        run_alone(layer, builder, requests, paged_pools(layer, [r.length for r in requests], device, seed))
    return list(keys)


def kernels_of_stack(
    layers: Sequence[DeepseekV41Attention], requests: Sequence[Request], chunk: int, device: str, seed: int
) -> list[KernelKey]:
    """The same of `v41.run_stack`, less what its metadata launch: steps look rows up by these."""
    found: dict[KernelKey, None] = {}

    @contextlib.contextmanager
    def noting() -> Iterator[None]:
        with collect() as keys:
            yield
        found.update(keys)

    builder = v41.step_builder(layers, device)
    with contextlib.suppress(Exception):
        paged = v41.paged_pools(layers, requests, [r.reach for r in requests], device, seed)
        v41.run_batch(layers, builder, requests, paged, chunk, inside=noting)
        fresh = v41.paged_pools(layers, requests, [r.length for r in requests], device, seed)
        for number, one in enumerate(r.one_shot() for r in requests):
            v41.run_batch(layers, builder, [one], fresh, max(one.length, 1), first_request=number, inside=noting)
    return list(found)


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
