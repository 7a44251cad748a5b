# SPDX-License-Identifier: Apache-2.0
"""What a layer asks of torch by itself on a GPU, beside its ops: memory and views only, or its steps are not bound.

Without a GPU, on fake tensors: every line of the layer runs as it does for CUDA tensors on an architecture, and ops end
with their checks. What launching an op's kernel does is not seen here, nor is it by `layers.bound`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from cute_kernels.runtime import arch
from layers import (
    BlockTables,
    Communicator,
    ContextParallel,
    ContextStepBuilder,
    DeepseekV4Config,
    DeepseekV4Metadata,
    DeepseekV4MetadataBuilder,
    LayerCaches,
    TensorParallel,
    random_layer_tensors,
)
from layers import indexer as indexer_module
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from layers.bound import Scratch, _Watch
from tests.layers.engine import CONFIG, KINDS, make_layer

LONGEST, MOST_ROWS = 16384, 4096
CUDA = torch.device("cuda", 0)
WIDE = replace(CONFIG, num_attention_heads=64)
"""With as many heads attention quantizes its result."""

STEPS: dict[str, Any] = {
    "short": ([30], [30], 0),
    "chunk": ([64], [364], 0),
    "chunks": ([40, 600, 7], [340, 9000, 4096], 0),
    "many": ([30] * 9, [8000] * 9, 0),
    "large": ([2000, 2000], [12000, 16000], 0),
    "decodes": ([1, 1, 1], [9000, 0, 300], 3),
    "many decodes": ([1] * 40, [9000, 0] * 20, 40),
    "drafts": ([3, 3], [9000, 300], 2),
    "unequal drafts": ([3, 1], [9000, 300], 2),
    "mixed": ([2, 2, 64, 200], [9000, 12, 364, 9000], 2),
}
"""Rows and lengths of the requests, and how many of them are decodes."""


class _Memory(Scratch):
    def take(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


class _Methods(TorchFunctionMode):
    """x[...] and x.copy_ by the operations that they stand for: torch's own way there needs a build with CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            return torch.ops.aten.copy_.default(*args)
        if func is not torch.Tensor.__getitem__:
            return func(*args, **(kwargs or {}))
        x, index = args
        aten, dim = torch.ops.aten, 0
        for part in index if isinstance(index, tuple) else (index,):
            if part is ...:
                dim += x.dim() - sum(other is not ... for other in index)
            elif isinstance(part, torch.Tensor):
                x, dim = aten.index.Tensor(x, [*[None] * dim, part]), dim + part.dim()
            elif part is None:
                x, dim = aten.unsqueeze.default(x, dim), dim + 1
            elif isinstance(part, slice):
                x, dim = aten.slice.Tensor(x, dim, *part.indices(x.shape[dim])), dim + 1
            else:
                x = aten.select.int(x, dim, part)
        return x


@pytest.fixture(params=["sm_90a", "sm_100a"])
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A GPU of this architecture, as far as layers ask about it."""
    capability = {name: number for number, name in arch.ARCH_OF_CAPABILITY.items()}[request.param]
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for known in (arch.arch_of, arch.multiprocessors):
        known.cache_clear()
    yield request.param
    for known in (arch.arch_of, arch.multiprocessors):
        known.cache_clear()


def fake(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)


def moved(value: Any) -> Any:
    """A tensor, or all of a list, as one of the GPU."""
    if isinstance(value, list):
        return [moved(x) for x in value]
    return fake(value) if isinstance(value, torch.Tensor) else value


def move(layer: DeepseekV4MultiHeadLatentAttentionWrapper) -> None:
    """To the GPU that is none. Not by `Module.to`, which looks at addresses."""
    for module in layer.modules():
        for of_module in (vars(module), module._buffers):
            of_module |= {name: fake(value) for name, value in of_module.items() if isinstance(value, torch.Tensor)}
    for stack in (layer._query_weights, layer._hidden_weights):
        if stack is not None:
            stack.weight = fake(stack.weight)
            stack.scale = None if stack.scale is None else fake(stack.scale)


@functools.cache
def tensors_of(config: DeepseekV4Config, ratio: int) -> dict[str, torch.Tensor]:
    return random_layer_tensors(config, config.layer_of_kind(ratio))


class _Apart(Communicator):
    """The first of two ranks, of which the other one never comes."""

    rank, size, device, transport = 0, 2, CUDA, "none"

    def barrier(self) -> None: ...

    def abort(self) -> None: ...

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out[0].copy_(x)

    def _all_to_all(self, out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(x)

    def _all_reduce(self, x: torch.Tensor) -> None: ...


def foreign(ratio: int, rows: list[int], lengths: list[int], decodes: int, **options: Any) -> list[str]:
    """Torch operations that keep a step from being bound, as `BoundSteps.run` finds them. options: of make_layer; with
    cp, whose steps have decode rows alone, of a rank of two."""
    limits = {"max_model_len": LONGEST, "max_num_tokens": MOST_ROWS}
    config = options.get("config", CONFIG)
    layer = make_layer(ratio, tensors=tensors_of(config, ratio), **limits | options)
    formats = {name: value for name, value in options.items() if name in ("kv_cache", "index_cache")}
    caches = LayerCaches.allocate(layer.config, ratio, swa_blocks=4, compressed_blocks=4, state_blocks=4, **formats)
    table = torch.zeros(len(rows), 256, dtype=torch.int32)
    tables = BlockTables(table) if ratio == 1 else BlockTables(table, table, table)
    step: Any = None
    if layer.options.cp is not None:
        step = ContextStepBuilder(layer.config, MOST_ROWS, LONGEST, layer.options.cp).build(
            ratio, rows, lengths, tables, decodes
        )
        m: DeepseekV4Metadata = step.decodes.metadata
    else:
        m = DeepseekV4MetadataBuilder(layer.config, MOST_ROWS, LONGEST).build(ratio, rows, lengths, tables, decodes)
    with FakeTensorMode(), torch.no_grad(), _Methods():
        move(layer)
        # not by setattr, which takes a changed field for another step's
        for of_step in (m,) if step is None else (m, step.decodes, step):
            vars(of_step).update({name: moved(value) for name, value in vars(of_step).items()})
        for cache in vars(caches).values():
            if cache is not None:
                cache.data = fake(cache.data)
        hidden = torch.empty(m.num_tokens, layer.config.hidden_size, dtype=torch.bfloat16, device=CUDA)
        result = torch.empty_like(hidden)
        with _Watch(_Memory(CUDA)) as watch:
            if step is None:
                layer._forward(hidden, m, caches, None, result)
            else:
                layer._attend_context(hidden, step, caches)
    # prim::device and its like are how fake tensors answer for themselves
    return [name for name in watch.foreign if not name.startswith("prim::")]


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("options", [{}, {"prefill": "paged"}, {"config": WIDE}, {"config": WIDE, "prefill": "auto"}])
def test_a_step_launches_nothing_but_ops(ratio: int, name: str, options: dict[str, Any]) -> None:
    assert foreign(ratio, *STEPS[name], **options) == []


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("name", STEPS)
def test_scores_in_several_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer_module, "SCORE_BYTES", 1 << 18)
    assert foreign(4, *STEPS[name]) == []


@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("ratio", KINDS)
@pytest.mark.parametrize("name", ["decodes", "many decodes", "drafts", "unequal drafts"])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"kv": "sharded"},
        {"kv": "sharded", "heads": "own"},
        {"kv": "sharded", "heads": "own", "q": "replicate"},
        {"kv": "sharded", "shards": 4, "wire": "bf16"},
    ],
)
def test_decode_rows_of_a_context_group(ratio: int, name: str, form: dict[str, Any]) -> None:
    group = _Apart()
    tp = TensorParallel(group=group) if form.get("heads") == "own" else TensorParallel()
    assert foreign(ratio, *STEPS[name], cp=ContextParallel(group=group, **form), tp=tp) == []


@pytest.mark.usefixtures("target")
def test_operations_that_keep_a_step_from_being_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found if there are any."""
    gather = DeepseekV4Metadata.decode_block_table
    monkeypatch.setattr(DeepseekV4Metadata, "decode_block_table", lambda m: gather(m).clone())
    assert set(foreign(4, [3, 1], [9000, 300], 2)) == {"aten::clone"}
