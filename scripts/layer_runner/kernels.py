# SPDX-License-Identifier: Apache-2.0
"""The kernels of a run, compiled ahead of it in as many processes as there are cores: one by one, as launches ask for
them, they take minutes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.progress import Progress
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels.layers import (
    DeepseekV4MetadataBuilder,
    DeepseekV4MultiHeadLatentAttentionWrapper,
)
from cute_kernels.runtime import cache
from cute_kernels.runtime.compile import collect, jit_forbidden
from cute_kernels.runtime.key import KernelKey
from cute_kernels.runtime.precompile import precompile
from layer_runner.requests import Request
from layer_runner.run import paged_pools, run_once
from layer_runner.stepping import run_alone

EMPTIES = {
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}


class Zeros(TorchDispatchMode):
    """New memory is zeros, so that numbers that no kernel has written name something wherever torch looks them up."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in EMPTIES:
            out.zero_()
        return out


def kernels_of(run: Callable[[], object]) -> list[KernelKey]:
    """Keys of the kernels that `run` launches, found by running all but these. What fails here fails, and says why,
    when the run itself comes to it."""
    with collect() as keys, Zeros(), contextlib.suppress(Exception):
        run()
    return list(keys)


def kernels_of_layer(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, requests: Sequence[Request], chunk: int, device: str, seed: int
) -> list[KernelKey]:
    """Those of `run_layer`. A layer keeps the launches of its steps: this one is of no use afterwards."""
    options = layer.options
    builder = DeepseekV4MetadataBuilder(layer.config, options.max_num_tokens, options.max_model_len, device)

    def run() -> None:
        run_once(layer, requests, chunk, device, seed)
        run_alone(layer, builder, requests, paged_pools(layer, [r.length for r in requests], device, seed))

    return kernels_of(run)


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
