# SPDX-License-Identifier: Apache-2.0
"""vLLM's own DeepseekV4 attention layers: constructed by its classes, with its cache specifications, its metadata
builders, its forward context and random weights, once as it makes them and once with the plug-in over them.

Both sides have the same weights, and caches with the same bytes, block tables and strides: pages of a layer lie apart,
as those of several layers share a block in the engine. Windows and compressor states have pages for their last tokens
only; what came before is the null page. One scratch memory, metadata and forward context serve both sides.

`Engine.without_linears` puts fixed results in the place of the engine's own projections, so that what is left is what
a layer does between them.
"""

from __future__ import annotations

import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8
from cute_kernels.plugins import VARIABLE, vllm
from perf.measure import fixed_streams

KINDS = {"swa": "sliding_attention", "c4a": "compressed_sparse_attention", "c128a": "heavily_compressed_attention"}
RATIOS = {"swa": 1, "c4a": 4, "c128a": 128}

ENGINES, OURS = "vllm", "cute_kernels"
"""The two sides."""

APART = 2
"""Pages of a layer are so many pages' bytes apart."""


@dataclass(frozen=True)
class Batch:
    """A step. requests: (rows, tokens before them) of each, decodes first; padding: requests that a graph has beyond
    them, of as many rows as the first."""

    name: str
    requests: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def rows(self) -> int:
        return self.live + self.padding * self.requests[0][0]

    @property
    def live(self) -> int:
        return sum(rows for rows, _ in self.requests)

    @property
    def longest(self) -> int:
        return max(rows + before for rows, before in self.requests)


@dataclass(frozen=True)
class Sizes:
    """Of the layers and of the step: what the engine's configuration says.

    kinds    of the layers, in turn: of KINDS
    heads    of this rank, and groups of them
    hidden   columns of hidden states
    fp8      whether linears are FP8, as in published weights
    drafts   speculative tokens
    """

    kinds: tuple[str, ...]
    heads: int = 64
    groups: int = 8
    hidden: int = 4096
    q_lora_rank: int = 1024
    o_lora_rank: int = 1024
    top_k: int = 512
    fp8: bool = True
    drafts: int = 0
    max_len: int = 8192
    max_rows: int = 1024
    max_requests: int = 256


@dataclass
class Side:
    """The layers of one side. buffer: the indexer's picks; storage: cache -> all bytes of its pages, and between."""

    name: str
    layers: list[Any]
    buffer: torch.Tensor
    storage: dict[str, torch.Tensor] = field(default_factory=dict)


def load(parts: str = "all") -> Any:
    """The engine's model, imported with the plug-in in its environment, which replaces `parts`."""
    os.environ[VARIABLE] = parts
    vllm.register()
    import vllm.models.deepseek_v4.nvidia.model as model

    if not getattr(model._select_dsv4_attn_cls, "of_cute_kernels", False):
        raise RuntimeError(f"the plug-in did not take this vLLM: {'; '.join(sorted(vllm.PLUGIN.said))}")
    return model


def said() -> set[str]:
    """What the plug-in has logged."""
    return vllm.PLUGIN.said


@contextmanager
def one_rank(device: str) -> Iterator[None]:
    """The engine's groups of ranks, of one rank, and its scratch memory."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        initialize_model_parallel(1, 1)
    init_workspace_manager(torch.device(device))
    yield


def make_config(sizes: Sizes, kinds: Sequence[str]) -> Any:
    """The engine's configuration, without a checkpoint behind it."""
    from transformers import DeepseekV4Config
    from vllm.config import VllmConfig

    model = DeepseekV4Config(
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        o_groups=sizes.groups,
        q_lora_rank=sizes.q_lora_rank,
        o_lora_rank=sizes.o_lora_rank,
        index_topk=sizes.top_k,
        max_position_embeddings=sizes.max_len,
    )
    model.layer_types, model.num_hidden_layers = [KINDS[kind] for kind in kinds], len(kinds)
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        hf_config=model, hf_text_config=model, max_model_len=sizes.max_len, dtype=torch.bfloat16, is_moe=False,
        architectures=["DeepseekV4ForCausalLM"], use_mla=True, enforce_eager=True, runner_type="generate",
        quantization=None, is_hybrid=False,
    )  # fmt: skip
    config.quant_config = None
    if sizes.fp8:
        from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

        config.quant_config = DeepseekV4FP8Config(weight_block_size=[128, 128])
        # FP8 activations by the engine's kernel: its other way is for torch.compile
        config.compilation_config.custom_ops = ["all"]
    if sizes.drafts:
        config.speculative_config = SimpleNamespace(
            num_speculative_tokens=sizes.drafts, parallel_drafting=False, enable_adaptive_verification=False,
            use_dspark=lambda: False, method="mtp", disable_padded_drafter_batch=False,
        )  # fmt: skip
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.cache_config.block_size, config.cache_config.cache_dtype = 256, "fp8"
    config.kernel_config.enable_jit_warmup = False
    config.scheduler_config.max_num_batched_tokens = sizes.max_rows
    config.scheduler_config.max_num_seqs = sizes.max_requests
    return config


class Engine:
    """Layers of both sides, or of some."""

    def __init__(self, model: Any, sizes: Sizes, device: str = "cuda", sides: Sequence[str] = (ENGINES, OURS)) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

        self.sizes, self.device = sizes, device
        self.config = make_config(sizes, sizes.kinds * len(sides))
        classes = {ENGINES: DeepseekV4FlashMLAAttention, OURS: model._select_dsv4_attn_cls(self.config)}
        if not issubclass(classes[OURS], DeepseekV4FlashMLAAttention) or classes[OURS] is classes[ENGINES]:
            raise RuntimeError(f"the plug-in chose {classes[OURS].__name__}")
        # the engine's three, which all layers share
        self.streams = [*fixed_streams()[1:]] if device == "cuda" else None
        self.sides: dict[str, Side] = {}
        number = 0
        with set_current_vllm_config(self.config), torch.device(device), _bfloat16(), torch.no_grad():
            for name in sides:
                buffer = torch.full((sizes.max_rows, sizes.top_k), -1, dtype=torch.int32)
                side = self.sides[name] = Side(name, [], buffer)
                for seed, _ in enumerate(sizes.kinds):
                    layer = classes[name](
                        self.config,
                        prefix=f"model.layers.{number}.attn",
                        topk_indices_buffer=buffer,
                        aux_stream_list=self.streams,
                    )
                    fill_weights(layer, seed)
                    side.layers.append(layer)
                    number += 1
            self.builders: dict[Any, Any] = {}

    def caches(self, name: str | None = None) -> Iterator[tuple[str, Any, Any]]:
        """(name, its layer, its specification) of each cache of a side, or of all."""
        prefixes = [layer.prefix + "." for layer in self.sides[name].layers] if name else [""]
        for key, layer in self.config.compilation_config.static_forward_context.items():
            if not any(f"{key}.".startswith(prefix) for prefix in prefixes):
                continue
            spec = layer.get_kv_cache_spec(self.config)
            if spec is not None:
                yield key, layer, spec

    def bind_caches(self, batches: Sequence[Batch]) -> None:
        """Caches with random records in them, as many pages as the largest of the batches takes."""
        made: list[torch.Tensor] = []
        for name, side in self.sides.items():
            for index, (key, layer, spec) in enumerate(self.caches(name)):
                pages = 1 + max(page_count(batch, spec) for batch in batches)
                is_state = key.endswith("state_cache")
                dtype = torch.float32 if is_state else torch.uint8
                rows = spec.block_size // getattr(spec, "tokens_per_state", 1)
                columns = spec.head_size if is_state else 132 if key.endswith("k_cache") else 584
                page = spec.page_size_bytes // dtype.itemsize
                if index == len(made):
                    made.append(torch.zeros(pages, APART, page, dtype=dtype, device=self.device))
                    fill_pages(made[index][:, 0], rows, columns, index)
                storage = made[index] if name == next(iter(self.sides)) else made[index].clone()
                side.storage[key] = storage
                stride = APART * page
                layer.bind_kv_cache(storage.as_strided((pages, 1, rows, columns), (stride, 0, columns, 1)))

    def build(
        self, batch: Batch, max_seq_len: int | None = None, buffers: dict[Any, torch.Tensor] | None = None
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """(metadata by layer, positions) by the engine's own builders.

        max_seq_len   as the engine says in captures: the model's
        buffers       what an earlier step's inputs lie in, whose graph is to take this one's
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        counts = torch.tensor([rows for rows, _ in batch.requests] + [0] * batch.padding, dtype=torch.int32)
        before = torch.tensor([tokens for _, tokens in batch.requests] + [0] * batch.padding, dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
        request = torch.repeat_interleave(torch.arange(len(counts)), counts)
        positions = torch.zeros(batch.rows, dtype=torch.int64)
        positions[: len(request)] = before[request] + torch.arange(len(request)) - starts[request]
        lengths = before + counts
        buffers = {} if buffers is None else buffers

        def on_device(key: Any, value: torch.Tensor) -> torch.Tensor:
            if key not in buffers:
                buffers[key] = value.to(self.device)
            return buffers[key].copy_(value)

        tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        built: dict[Any, Any] = {}
        found: dict[str, Any] = {}
        for key, layer, spec in self.caches():
            kind = layer.get_attn_backend().get_builder_cls()
            place = spec.block_size, getattr(spec, "sliding_window", None)
            if place not in tables:
                table = block_table(batch, spec, self.sizes.max_len)
                slots = torch.full((batch.rows,), -1, dtype=torch.int64)
                own = positions[: len(request)]
                page = table[request, own // spec.block_size].long()
                slots[: len(request)] = page * spec.block_size + own % spec.block_size
                tables[place] = on_device((place, "table"), table), on_device((place, "slots"), slots)
            table, slots = tables[place]
            which = (kind, repr(spec))
            if which not in built:
                if which not in self.builders:
                    width = {"block_table_width": table.shape[1]} if needs_width(kind) else {}
                    self.builders[which] = kind(spec, [key], self.config, torch.device(self.device), **width)
                built[which] = self.builders[which].build(
                    0,
                    CommonAttentionMetadata(
                        query_start_loc=on_device("starts", starts),
                        query_start_loc_cpu=starts,
                        seq_lens=on_device("lengths", lengths),
                        num_reqs=len(counts),
                        num_actual_tokens=batch.rows,
                        max_query_len=max(int(counts.max()), 1),
                        max_seq_len=max_seq_len or batch.longest,
                        block_table_tensor=table,
                        slot_mapping=slots,
                        positions=on_device("positions", positions),
                        seq_lens_cpu_upper_bound=lengths,
                    ),
                )
            found[key] = built[which]
        return found, on_device("positions", positions)

    def run(self, name: str, number: int, hidden: torch.Tensor, metadata: Any, positions: torch.Tensor) -> torch.Tensor:
        """A layer's step, as the model calls it."""
        from vllm.forward_context import set_forward_context

        with set_forward_context(metadata, self.config, num_tokens=hidden.shape[0]):
            result: torch.Tensor = self.sides[name].layers[number](positions, hidden)
        return result

    @contextmanager
    def without_linears(self, rows: int, fresh: bool = False) -> Iterator[None]:
        """Fixed random results in the place of the engine's linears. fresh: in memory of their own at each call; else
        an op that works in place finds what it has left."""
        with ExitStack() as stack:
            for side in self.sides.values():
                for seed, layer in enumerate(side.layers):
                    stack.enter_context(_without_linears(layer, rows, seed, self.device, fresh))
            yield


def needs_width(builder: Any) -> bool:
    return bool(getattr(builder, "requires_block_table_width", False))


@contextmanager
def _bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _without_linears(layer: Any, rows: int, seed: int, device: str, fresh: bool) -> Iterator[None]:
    g = torch.Generator(device=device).manual_seed(seed)

    def draw(columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(rows, columns, generator=g, device=device, dtype=torch.float32).to(dtype)

    inputs: list[Any] = [draw(layer.q_lora_rank + layer.head_dim), None, None, None]
    if layer.compressor is not None:
        inputs[1] = draw(2 * layer.compressor.coff * layer.head_dim, torch.float32)
    q = draw(layer.n_local_heads * layer.head_dim)
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (layer, "_run_parallel_input_projections", lambda hidden: tuple(inputs)),
        (layer, "_wq_b_proj", lambda qr, scale=None: q.clone() if fresh else q),
        (layer.wo_b, "forward", lambda z: z),
    ]
    if layer.indexer is not None:
        inputs[2:] = draw(512, torch.float32), draw(layer.indexer.n_head)
        index_q = draw(layer.indexer.n_head * layer.indexer.head_dim)
        replaced.append((layer.indexer, "_wq_b_proj", lambda qr, scale=None: index_q))
    for owner, name, function in replaced:
        object.__setattr__(owner, name, function)
    try:
        yield
    finally:
        for owner, name, _ in replaced:
            object.__delattr__(owner, name)


def fill_weights(layer: Any, seed: int) -> None:
    """Random weights of ordinary magnitudes, those of a seed, as the engine's loader leaves them."""
    for name, parameter in layer.named_parameters():
        device = parameter.device
        g = torch.Generator(device=device).manual_seed(zlib.crc32(name.encode()) + seed)
        data, columns = parameter.data, parameter.shape[-1]
        if data.dtype == torch.float8_e4m3fn:
            for part in data.view(-1, columns).split(4096):
                values = 64 * torch.randn(part.shape, generator=g, device=device, dtype=torch.float32)
                part.copy_(values.to(part.dtype))
            continue
        if "scale" in name:  # of 128 x 128 codes, as numbers or as exponents alone
            exponent = -6 - round(math.log2(128 * columns) / 2)
            if data.dtype.itemsize == 1:
                data.view(torch.uint8).fill_(127 + exponent)
            else:
                data.fill_(2.0**exponent)
            continue
        if name == "attn_sink":  # of heads that fill up the rank's own there is none
            data = data[: layer.n_local_heads]
        values = torch.randn(data.shape, generator=g, device=device, dtype=torch.float32)
        if "norm" in name:
            values = 1 + 0.1 * values
        elif name != "attn_sink":
            values *= 0.5 if name.endswith("ape") else columns**-0.5
        data.copy_(values)
    for module in layer.modules():
        process = getattr(getattr(module, "quant_method", None), "process_weights_after_loading", None)
        if process is not None:
            process(module)


def fill_pages(pages: torch.Tensor, rows: int, columns: int, seed: int) -> None:
    """Valid records of random numbers in pages of [pages, elements]: some pages, over and over."""
    count = min(len(pages), 512)
    g = torch.Generator(device=pages.device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=pages.device, dtype=torch.float32)

    some = torch.zeros_like(pages[:count])
    if pages.dtype == torch.float32:
        some[:, : rows * columns] = draw(count, rows * columns)
    elif columns == FP8_DS_MLA.row_elements:
        x = draw(count, rows, 512)
        records = some[:, : rows * 576].unflatten(1, (rows, 576))
        records[..., :448] = (x[..., :448] * 100).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        records[..., 448:] = (x[..., 448:] * 0.3).bfloat16().view(torch.uint8)
        scales = some[:, rows * 576 : rows * 584]
        scales.copy_(torch.randint(118, 120, scales.shape, device=pages.device, generator=g))
    else:
        assert columns == INDEXER_FP8.row_elements
        some[:, : rows * 128] = draw(count, rows * 128).to(torch.float8_e4m3fn).view(torch.uint8)
        some[:, rows * 128 : rows * 132] = (draw(count, rows).abs() + 0.5).view(torch.uint8)
    for first in range(0, len(pages), count):
        pages[first : first + count].copy_(some[: len(pages) - first])


def first_page(before: int, spec: Any) -> int:
    """Of a request with so many tokens in the cache: pages that no step reads any more are not there."""
    window = getattr(spec, "sliding_window", None)
    return max(before - window, 0) // spec.block_size if window else 0


def page_count(batch: Batch, spec: Any) -> int:
    """Pages that the requests of a batch have."""
    return sum((b + rows - 1) // spec.block_size + 1 - first_page(b, spec) for rows, b in batch.requests)


def block_table(batch: Batch, spec: Any, max_len: int) -> torch.Tensor:
    """Pages of each request in no order; page 0 is nobody's."""
    g = torch.Generator().manual_seed(spec.block_size)
    order = (torch.randperm(page_count(batch, spec), generator=g) + 1).int()
    table = torch.zeros(len(batch.requests) + batch.padding, -(-max_len // spec.block_size), dtype=torch.int32)
    taken = 0
    for number, (rows, before) in enumerate(batch.requests):
        first, end = first_page(before, spec), (before + rows - 1) // spec.block_size + 1
        table[number, first:end] = order[taken : taken + end - first]
        taken += end - first
    return table


def snapshot(sides: Mapping[str, Side]) -> dict[str, torch.Tensor]:
    """Copies of all caches."""
    return {key: data.clone() for side in sides.values() for key, data in side.storage.items()}


def restore(sides: Mapping[str, Side], copies: Mapping[str, torch.Tensor]) -> None:
    for side in sides.values():
        for key, data in side.storage.items():
            data.copy_(copies[key])
