# SPDX-License-Identifier: Apache-2.0
"""Whole attention layers, as an engine runs them: `python -m perf layer`.

A cell is one kind of layer of one model in one kind of step. Three layers, or twelve of one rank's share, with weights
and caches of their own run one after the other in a CUDA graph, over and over, so that no weight stays in L2 from one
call to the next, and each is a call of that graph. A cell of kind "model" is a decode step of all layers of the model,
in their order, each with the output of the one before, and a call is the whole step, with what the GPU does for its
metadata: a copy of numbers and a launch.
Requests of a decode step have lengths of their own, up to 255 tokens below the context, as in serving: which of them
close a group of compressed tokens differs from step to step. In cells named by a kind of unequal lengths (perf.grid)
they are as much below lengths of that kind, of which most are far shorter than the context.

The bytes of a cell are what no layer of this kind can do without: its weights once, the cache rows and keys that it
reads, and hidden states in and out; its FLOPs those of its products. Where caches do not fit into the GPU's memory a
cell is left out, and says how many bytes it would take.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8, round_up
from cute_kernels.layers import (
    PRESETS,
    AttentionOptions,
    BlockTables,
    DeepseekV4MetadataBuilder,
    LayerCaches,
    TensorParallel,
)
from cute_kernels.layers.attention import AUX_STREAM_MAX_TOKENS, DeepseekV4MultiHeadLatentAttentionWrapper
from cute_kernels.layers.bound import scratch_of
from cute_kernels.layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE, PagedCache
from cute_kernels.layers.config import DeepseekV4Config
from cute_kernels.layers.linear import Linear
from cute_kernels.layers.mla import Workspace
from cute_kernels.layers.output import OutputProjection
from cute_kernels.layers.rotary import RotaryEmbedding
from cute_kernels.runtime.compile import launch, record_launches
from cute_kernels.runtime.record import Cost, record_calls
from perf.grid import BETWEEN, LENGTHS, ONE_LONG, ZIPF, draw, lengths
from perf.measure import OURS, capture, fixed_streams, peak, row, skipped, time_apart, time_graphs
from perf.peers import load_failure
from perf.timeline import Timeline, profile

if TYPE_CHECKING:
    from perf.peer_layer import PeerStep

OP = "layer"
DEVICE = "cuda"
LAYERS = 3
MOST_LAYERS = 12
"""Of a chain: of all heads so many, of a rank's share more, as it takes more of them to pass through L2."""

TARGET_US = 1500.0
"""Of a replay, if all heads of a layer were as fast as memory and tensor cores; a rank's share takes several times as
long as that."""

KINDS = {"swa": 1, "c4a": 4, "c128a": 128}
MODEL = "model"
"""Kind of the cells that are a step of a whole model."""
ROW_BYTES, KEY_BYTES = 584, 132
"""Of a record of fp8_ds_mla, and of an FP8 key of the indexer."""
HOST_STEPS = 12
BUILDS = 12
CONTEXTS = (2000, 200_000)
"""Least and most tokens of cells between those that are tuned."""
SLOW_ROWS = (33, 47)
"""Least and most decode rows of one more such cell of each model: products take tiles of 64 rows for them
(perf/notes/gemm.md), so that a row takes longer than of 32 or of 64."""
LONG_STEPS = {
    "v4-flash": ("c128a", 1, 131_072, (90_000, 400_000)),
    "v4-pro": ("c4a", 2, 16_384, (6_000, 50_000)),
}
"""Kind, ranks and context of steps whose attention has 64 heads and 18 tiles of keys in its longest rows, and the least
and most context of such cells between. With LONG_REQUESTS, from the least to the most, it cuts long rows in halves
(long_rows of `sparse_mla_decode`). Of C4A a row has picks of a context of 4096 tokens or more, and fewer below."""
LONG_REQUESTS = 45, 64
MOST_OF_MEMORY = 0.8
"""Share of the free memory that the caches of a cell may take: layers and graphs need some too."""
CHECKED = 0.05
"""Relative difference allowed between the layer as it runs and the one whose steps are taken one by one. The latter
rounds normed queries to bf16, and the former may not: a difference d of results becomes sqrt(d / 12) or so where they
are rounded to e4m3, which they are twice."""


@dataclass(frozen=True)
class Case:
    """One cell: `rows` new tokens of each of `requests` requests, of contexts up to `context` tokens.

    unequal   the kind of lengths of a decode step's requests (perf.grid.lengths), or "": all near the context
    """

    model: str
    kind: str
    phase: str
    requests: int
    rows: int
    context: int
    tp: int = 1
    is_between: bool = False
    unequal: str = ""

    @property
    def ratios(self) -> tuple[int, ...]:
        """The compress ratio of each layer, in the order in which they run."""
        if self.kind != MODEL:
            return (KINDS[self.kind],) * min(LAYERS * self.tp, MOST_LAYERS)
        config = PRESETS[self.model]
        return config.compress_ratios[: config.num_hidden_layers]

    @property
    def calls(self) -> int:
        """Calls that one pass through the layers counts as: a layer each, or the whole step."""
        return 1 if self.kind == MODEL else len(self.ratios)

    @property
    def tokens(self) -> int:
        return self.requests * self.rows

    @property
    def name(self) -> str:
        size = f"decode b{self.requests} ctx{self.context}" if self.phase == "decode" else ""
        size = size or f"prefill {self.rows} ctx{self.context}"
        more = f" n{self.rows}" if self.phase == "decode" and self.rows > 1 else ""
        more += f" tp{self.tp}" if self.tp > 1 else ""
        more += f" {self.unequal}" if self.unequal else ""
        return f"{self.model} {self.kind} {size}{more}" + (f" {BETWEEN}" if self.is_between else "")

    @property
    def decodes(self) -> int:
        """Requests that decode."""
        return self.requests if self.phase == "decode" else 0

    def query_lengths(self) -> list[int]:
        """New tokens of each request."""
        return [self.rows] * self.requests

    def lengths(self) -> list[int]:
        """Tokens of each request after the step."""
        if self.phase == "prefill":
            return [self.context + self.rows]
        found = lengths(self.unequal, self.requests, self.context)
        return [max(length - 61 * r % 256, self.rows + 8) for r, length in enumerate(found)]

    @property
    def layer_key(self) -> tuple[Any, ...]:
        """Cells that agree in it may have the same layers."""
        return self.model, self.kind, self.tp, self.phase, self.context

    def build_layers(self, longest: int) -> list[Any]:
        return build_layers(self, longest)

    def cache_bytes(self) -> int:
        return cache_bytes(self, PRESETS[self.model])

    def make_step(self, layers: list[Any]) -> Any:
        return Step(self, layers)


def cases(full: bool = False) -> Iterator[Case]:
    """The cells of the report, or those of a longer look."""
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if full else (1, 8, 64, 256)
    contexts = (2048, 8192, 65536, 262144, 1048576) if full else (8192, 65536)
    for model in PRESETS:
        for kind in KINDS:
            for context in contexts:
                for b in batches:
                    for rows in (1, 2, 4) if full else (1,):
                        for tp in (1, 2, 4, 8) if full else (1,):
                            yield Case(model, kind, "decode", b, rows, context, tp)
            if not full:
                for b in (1, 8):
                    yield Case(model, kind, "decode", b, 1, 1048576)
                for b in (1, 64):
                    yield Case(model, kind, "decode", b, 4, 8192)
                for b in (1, 64):
                    yield Case(model, kind, "decode", b, 1, 8192, 8)
            for context in (0, 65536):
                for rows in (512, 2048, 4096):
                    yield Case(model, kind, "prefill", 1, rows, context)
            yield from cases_between(model, kind)
        for point in draw(f"layer {model} slow rows", 1, kind=(1, len(KINDS)), b=SLOW_ROWS, context=CONTEXTS):
            kind = list(KINDS)[point["kind"] - 1]
            yield Case(model, kind, "decode", point["b"], 1, point["context"], is_between=True)
        yield from cases_of_long_rows(model)
        for b in (1, 8, 64):
            yield Case(model, MODEL, "decode", b, 1, 8192)


def cases_between(model: str, kind: str) -> Iterator[Case]:
    """Cells of sizes that nobody tunes for: decode steps, one of a rank's share, and a chunk of a prompt."""
    what, contexts = f"layer {model} {kind}", CONTEXTS
    for point in draw(f"{what} decode", 2, b=(2, 256), context=contexts):
        yield Case(model, kind, "decode", point["b"], 1, point["context"], is_between=True)
    for point in draw(f"{what} ranks", 1, b=(2, 256), context=contexts, doublings=(1, 3)):
        yield Case(model, kind, "decode", point["b"], 1, point["context"], 2 ** point["doublings"], is_between=True)
    for point in draw(f"{what} prefill", 1, rows=(128, 4096), context=contexts):
        yield Case(model, kind, "prefill", 1, point["rows"], point["context"], is_between=True)


def cases_of_long_rows(model: str) -> Iterator[Case]:
    """Decode steps of long rows: all of them, one, few, and one of a size that nobody tunes for."""
    kind, tp, context, contexts = LONG_STEPS[model]
    for unequal in ("", ONE_LONG, ZIPF):
        yield Case(model, kind, "decode", 48, 1, context, tp, unequal=unequal)
    for point in draw(f"layer {model} long rows", 1, b=LONG_REQUESTS, context=contexts, unequal=(1, len(LENGTHS))):
        unequal = LENGTHS[point["unequal"] - 1]
        yield Case(model, kind, "decode", point["b"], 1, point["context"], tp, is_between=True, unequal=unequal)


def fill_module(module: torch.nn.Module, o_proj: OutputProjection, g: torch.Generator) -> None:
    """Random weights of a layer's linears, of ordinary magnitudes, made on the GPU."""

    def fill(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        fan_in = weight.shape[-1]
        for part in weight.view(-1, fan_in).split(4096):
            values = torch.empty(part.shape, device=DEVICE, dtype=torch.bfloat16).normal_(generator=g)
            part.copy_(values * (64.0 if scale is not None else fan_in**-0.5))
        if scale is not None:
            scale.fill_(2.0 ** round(math.log2(fan_in**-0.5 / 64)))

    for part in module.modules():
        if isinstance(part, Linear):
            fill(part.weight, part.scale)
    fill(o_proj.wo_a, o_proj.wo_a_scale)


def fill_weights(layer: DeepseekV4MultiHeadLatentAttentionWrapper, seed: int) -> None:
    """Random weights of a layer."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    fill_module(layer, layer.o_proj, g)
    layer.mla_attn.attn_sink.normal_(generator=g)
    for compressor in (layer.compressor, None if layer.indexer is None else layer.indexer.compressor):
        if compressor is not None:
            compressor.ape.normal_(generator=g).mul_(0.5)


def fill_cache(cache: PagedCache, g: torch.Generator) -> None:
    """Valid records of random numbers: some pages, over and over."""
    rows = cache.block_size
    if cache.data.dtype != torch.uint8:
        cache.data.normal_(generator=g)
        return
    pages = cache.kv_format.pages(cache.data, rows)
    some = torch.zeros_like(pages[: min(len(pages), 64 if rows > 4 else 4096)])
    count = len(some)
    if cache.kv_format.id == FP8_DS_MLA.id:
        records = some[:, : rows * 576].unflatten(1, (rows, 576))
        x = torch.randn(count, rows, 512, device=DEVICE, generator=g)
        records[..., :448] = (x[..., :448] * 100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        records[..., 448:] = (x[..., 448:] * 0.3).bfloat16().view(torch.uint8)
        scales = some[:, rows * 576 :]
        scales.copy_(torch.randint(118, 120, scales.shape, device=DEVICE, generator=g))
    elif cache.kv_format.id == INDEXER_FP8.id:
        keys = torch.randn(count, rows * 128, device=DEVICE, generator=g).to(torch.float8_e4m3fn)
        some[:, : rows * 128] = keys.view(torch.uint8)
        some[:, rows * 128 : rows * 132] = (torch.rand(count, rows, device=DEVICE, generator=g) + 0.5).view(torch.uint8)
    else:
        kv_format = cache.kv_format
        pool = kv_format.allocate(count, rows, DEVICE)
        values = torch.randn(count * rows, kv_format.dim, device=DEVICE, generator=g)
        kv_format.write(pool, rows, torch.arange(count * rows, device=DEVICE), values.bfloat16())
        some.copy_(kv_format.pages(pool, rows))
    for first in range(0, len(pages), count):
        pages[first : first + count].copy_(some[: len(pages) - first])


def paged(case: Case, page: int, live_tokens: int, g: torch.Generator) -> tuple[torch.Tensor, int]:
    """(block table, pages that it names): pages of each request, those of live tokens its own, in random order."""
    width = -(-max(case.lengths()) // page) + 1
    live = min(-(-live_tokens // page) + 2, width)
    order = torch.randperm(case.requests * live, device=DEVICE, generator=g).view(case.requests, live).int()
    return order[:, torch.arange(width, device=DEVICE) % live].contiguous(), case.requests * live


class Step:
    """Layers, caches and metadata of one cell."""

    op, products = OP, "e4m3"

    def __init__(self, case: Case, layers: list[DeepseekV4MultiHeadLatentAttentionWrapper]) -> None:
        self.case, self.layers, self.config = case, layers, layers[0].config
        self.kinds = tuple(dict.fromkeys(case.ratios))
        g = torch.Generator(device=DEVICE).manual_seed(7)
        made = {ratio: self._tables(ratio, g) for ratio in self.kinds}
        self.tables = {ratio: tables for ratio, (tables, _) in made.items()}
        self.caches = []
        for ratio in case.ratios:
            caches = LayerCaches.allocate(self.config, ratio, **made[ratio][1], device=DEVICE)
            for cache in vars(caches).values():
                if cache is not None:
                    fill_cache(cache, g)
            self.caches.append(caches)
        self.builder = DeepseekV4MetadataBuilder(
            self.config, max(case.tokens, 1), max(case.lengths()), DEVICE, c128a_lists=False
        )
        shape = case.tokens, self.config.hidden_size
        self.hidden = [torch.randn(shape, device=DEVICE, generator=g).bfloat16() for _ in range(2)]
        self.build()

    def _tables(self, ratio: int, g: torch.Generator) -> tuple[BlockTables, dict[str, Any]]:
        """Block tables of a layer kind, and how many pages of each pool they name."""
        case = self.case
        swa, swa_blocks = paged(case, SWA_BLOCK_SIZE, self.config.sliding_window + case.rows, g)
        if ratio == 1:
            return BlockTables(swa), {"swa_blocks": swa_blocks}
        compressed, compressed_blocks = paged(case, KV_BLOCK_SIZE, max(case.lengths()), g)
        state, state_blocks = paged(case, STATE_BLOCK_SIZE[ratio], 2 * ratio + case.rows, g)
        blocks = {"swa_blocks": swa_blocks, "compressed_blocks": compressed_blocks, "state_blocks": state_blocks}
        return BlockTables(swa, compressed, state), blocks

    def build(self) -> None:
        """Metadata of the step, for all kinds of layers at once."""
        case = self.case
        self.metadata = self.builder.build_step(case.query_lengths(), case.lengths(), self.tables, case.decodes)

    @cached_property
    def device_build(self) -> Callable[[], Any]:
        """What the GPU does of `build`, again and again and in a graph: the copy of the step's numbers from pinned
        memory, and the launch. Graphs read that memory as long as the step lives."""
        if self.hidden[0].device.type != "cuda":
            return self.build
        with record_launches() as launches:
            self.build()
        ((key, index, arguments),) = launches
        assert not callable(key)
        target = self.builder.numbers[: 2 * self.case.requests + 1]
        numbers = target.cpu().pin_memory()

        def build() -> None:
            target.copy_(numbers, non_blocking=True)
            launch(key, index, *arguments)

        return build

    def run(
        self, number: int, hidden: torch.Tensor | None = None, capture: dict[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """One layer. capture: as of a layer's call."""
        m = self.metadata[self.case.ratios[number]]
        hidden = self.hidden[0] if hidden is None else hidden
        return self.layers[number](m.positions, hidden, m, self.caches[number], capture=capture)

    @property
    def is_chained(self) -> bool:
        """Whether a call is a whole step."""
        return self.case.kind == MODEL

    def run_all(self, hidden: torch.Tensor, build: Callable[[], Any] | None = None) -> torch.Tensor:
        """All layers, each with the output of the one before. build: of their metadata, before them."""
        if build is not None:
            build()
        for number in range(len(self.layers)):
            hidden = self.run(number, hidden)
        return hidden

    def calls(self) -> list[Callable[[], Any]]:
        """What is timed: the layers one by one, or whole steps from different inputs."""
        if self.is_chained:
            build = self.device_build
            return [partial(self.run_all, hidden, build) for hidden in self.hidden]
        return [partial(self.run, number) for number in range(len(self.layers))]

    def run_once(self) -> None:
        """One pass through the layers, `case.calls` calls."""
        for call in self.calls()[: self.case.calls]:
            call()

    def work(self) -> Cost:
        """`least_work` of a call."""
        return work_of(self.case, self.layers)

    def each_kind(self) -> list[tuple[int, int]]:
        """(number of the first layer, how many there are) of each kind."""
        return [(self.case.ratios.index(ratio), self.case.ratios.count(ratio)) for ratio in self.kinds]

    def is_right(self) -> bool:
        """Whether the first layer of each kind as it runs agrees with its steps taken one by one, which a capture asks
        for."""
        for number, _ in self.each_kind():
            one, other = self.run(number), self.run(number, capture={})
            close = (one.double() - other.double()).norm() <= CHECKED * other.double().norm()
            if not (torch.isfinite(one).all() and close):
                return False
        return True


def least_work(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper,
    query_lengths: Sequence[int],
    lengths: Sequence[int],
    *,
    row_bytes: int = ROW_BYTES,
    key_bytes: int = KEY_BYTES,
) -> Cost:
    """Bytes and FLOPs that a step of no layer of this kind can do without.

    query_lengths   rows of each request in the step
    lengths         tokens of each request after it
    row_bytes       of a cached token or entry
    key_bytes       of a cached key of the indexer
    """
    config, heads, ratio = layer.config, layer.num_heads, layer.compress_ratio
    linears = [m.weight for m in layer.modules() if isinstance(m, Linear)] + [layer.o_proj.wo_a]
    weights = sum(weight.numel() * weight.element_size() for weight in linears)
    numbers = sum(weight.numel() for weight in linears)
    tokens = sum(query_lengths)
    hidden = 2 * 2 * tokens * config.hidden_size
    attended = keys = keys_read = rows_read = 0
    for rows, length in zip(query_lengths, lengths, strict=True):
        seen = range(length - rows + 1, length + 1)
        visible = [tokens // ratio if ratio > 1 else 0 for tokens in seen]
        picked = sum(min(entries, config.index_topk) if ratio == 4 else entries for entries in visible)
        attended += picked + sum(min(tokens, config.sliding_window) for tokens in seen)
        # rows that several tokens of a request read are read once
        rows_read += min(visible[-1], picked) + min(length, config.sliding_window + rows - 1)
        if ratio == 4 and visible[-1] > config.index_topk:
            keys += sum(entries for entries in visible if entries > config.index_topk)
            keys_read += visible[-1]
    index_flops = 2 * keys * config.index_n_heads * config.index_head_dim
    flops = 2 * tokens * numbers + 4 * attended * heads * config.head_dim + index_flops
    return Cost(bytes=weights + hidden + rows_read * row_bytes + keys_read * key_bytes, flops=flops)


def work_of(case: Case, layers: Sequence[DeepseekV4MultiHeadLatentAttentionWrapper]) -> Cost:
    """`least_work` of a call: of a layer, or of all of them."""
    costs = [least_work(layer, case.query_lengths(), case.lengths()) for layer in layers]
    return Cost(sum(cost.bytes for cost in costs) // case.calls, sum(cost.flops for cost in costs) // case.calls)


def floor_us(cost: Cost, roofs: Mapping[str, float], products: str | None) -> float:
    """The least time of some work under ceilings in GB/s and TFLOPS, microseconds."""
    moved = cost.bytes / roofs["copy"] / 1e3 if "copy" in roofs else 0.0
    return max(moved, cost.flops / roofs[products] / 1e6 if products is not None and products in roofs else 0.0)


E4M3_OPS = ("fp8_gemm", "fp8_einsum", "mqa_logits", "score_top_k")
BF16_OPS = ("bf16_gemm", "linear ", "sparse_mla")
"""What the names of ops that are matrix products of a kind have in them; FLOPs of all others have no ceiling."""


def products_of(op: str) -> str | None:
    """The kind of matrix products that an op's FLOPs are."""
    kinds = (("e4m3", E4M3_OPS), ("bf16", BF16_OPS))
    return next((kind for kind, names in kinds if any(name in op for name in names)), None)


def ops_floor_us(step: Step, roofs: Mapping[str, float]) -> float:
    """The floors of the ops that a call runs, summed up: what unfused ops allow at most."""
    total = 0.0
    for number, count in step.each_kind():
        with record_calls() as recording:
            step.run(number)
        total += count * sum(floor_us(call.cost, roofs, products_of(call.op)) for call in recording.calls)
    return total / step.case.calls


def build_layers(case: Case, longest: int, **more: Any) -> list[DeepseekV4MultiHeadLatentAttentionWrapper]:
    """The layers of a cell, which cells of fewer rows and shorter sequences take as well. more: other options."""
    config = PRESETS[case.model]
    rows = round_up(max(case.tokens, 64), 64)
    given: dict[str, Any] = {"tp": TensorParallel(rank=0, size=case.tp, reduce=lambda x: x), **more}
    options = AttentionOptions(
        prefill="auto",
        max_model_len=longest,
        max_num_tokens=rows,
        workspace=Workspace(),
        topk_indices_buffer=torch.full((rows, config.index_topk), -1, dtype=torch.int32, device=DEVICE),
        **given,
    )
    rotary = {kind: RotaryEmbedding(config, kind, longest, DEVICE) for kind in {ratio > 1 for ratio in case.ratios}}
    layers = []
    for seed, ratio in enumerate(case.ratios):
        layer = DeepseekV4MultiHeadLatentAttentionWrapper(
            config, config.layer_of_kind(ratio), options=options, rotary_emb=rotary[ratio > 1], device=DEVICE
        )
        fill_weights(layer, seed)
        layers.append(layer)
    return layers


def cache_bytes(case: Case, config: DeepseekV4Config) -> int:
    """Of the caches of all layers of a cell, about."""
    total = 0
    for ratio in case.ratios:
        total += case.requests * ROW_BYTES * (config.sliding_window + case.rows)
        if ratio > 1:
            total += case.requests * (max(case.lengths()) // ratio) * (ROW_BYTES + (KEY_BYTES if ratio == 4 else 0))
    return total


def eager_us(step: Step) -> tuple[float, float]:
    """(host time until all is queued, time until all is done) of an eager call, medians; nothing is queued when a pass
    begins."""
    host, whole = [], []
    for _ in range(HOST_STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step.run_once()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        done = time.perf_counter()
        host.append((queued - begin) * 1e6 / step.case.calls)
        whole.append((done - begin) * 1e6 / step.case.calls)
    return statistics.median(host[2:]), statistics.median(whole[2:])


def metadata_us(step: Step) -> tuple[float, float]:
    """(host time of building the metadata of a step, time until they are there), medians."""
    host, whole = [], []
    for _ in range(BUILDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step.build()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        host.append((queued - begin) * 1e6)
        whole.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(host[2:]), statistics.median(whole[2:])


def timeline(step: Step | PeerStep, calls: int) -> Timeline:
    """What a pass of so many calls launches, replayed from a graph."""
    graph, _ = capture(step.calls()[:calls])
    graph.replay()
    return profile(graph.replay)


def workspace_bytes(step: Step) -> int:
    """Scratch memory that the layers keep between calls and share."""
    workspace = step.layers[0].options.workspace
    scratch = scratch_of(step.hidden[0].device, torch.cuda.current_stream().cuda_stream)
    return scratch.nbytes + (0 if workspace is None else workspace.nbytes)


def facts_of(found: Timeline, calls: int) -> dict[str, Any]:
    """What a record says of a profile: launches, gaps between them, and kind -> [launches, microseconds], per call."""
    return {
        "launches": round(len(found.launches) / calls, 2),
        "gaps_us": round(found.gaps / calls, 2),
        "kernels": {
            kind: [round(count / calls, 2), round(us / calls, 2)] for kind, (count, us) in found.by_kind().items()
        },
    }


def peers_of(step: Step) -> dict[str, PeerStep | str]:
    """The same layers by the peers' kernels, or the reason why they are not timed: a missing kernel, or results that
    are not ours."""
    from perf import peer_layer

    wanted: dict[str, list[torch.cuda.Stream]] = {peer_layer.NAME: []}
    if step.case.tokens <= AUX_STREAM_MAX_TOKENS:
        wanted[peer_layer.STREAMS_NAME] = [*fixed_streams()[1:]]
    found: dict[str, PeerStep | str] = {}
    for name, streams in wanted.items():
        try:
            peer = peer_layer.PeerStep(step, streams)
            found[name] = "; ".join(peer.disagreements()) or peer
        except ImportError as error:  # noqa: PERF203
            found[name] = load_failure(name, error)
        except Exception as error:  # an installation that is not whole fails in many ways
            found[name] = f"{type(error).__name__}: {error}"
    return found


def measure(
    case: Case, step: Step, replays: int, roofs: Mapping[str, float], with_peers: bool = False
) -> dict[str, Any]:
    """One cell of the record. roofs: copy in GB/s, bf16 and e4m3 in TFLOPS."""
    work = step.work()
    if not step.is_right():
        raise RuntimeError(f"{case.name}: the layer is not what it should be (Step.is_right); nothing was timed")
    peers = peers_of(step) if with_peers else {}
    candidates = {OURS: step.calls()}
    candidates |= {name: peer.calls() for name, peer in peers.items() if not isinstance(peer, str)}
    failures: dict[str, str] = {}
    options: Any = {"target_us": TARGET_US / min(case.tp, 4), "flops_per_set": work.flops, "queued": True}
    timings = time_graphs(candidates, work.bytes, replays, failures=failures, **options)
    if OURS in failures:
        raise RuntimeError(f"{case.name}: cannot be captured in a graph: {failures[OURS]}")
    timed = {name: candidates[name] for name in timings}
    apart, between = time_apart(timed, work.bytes, replays, **options)
    host, whole = eager_us(step)
    metadata_host, metadata = metadata_us(step)
    shape = {
        "case": case.name,
        "T": case.tokens,
        "model": case.model,
        "kind": case.kind,
        "tp": case.tp,
        **({"group": BETWEEN} if case.is_between else {}),
        **facts_of(timeline(step, case.calls), case.calls),
        "eager_host_us": round(host, 1),
        "eager_us": round(whole, 1),
        "metadata_us": round(metadata, 1),
        "metadata_host_us": round(metadata_host, 1),
        "floor_us": round(floor_us(work, roofs, step.products), 2),
        "ops_floor_us": round(ops_floor_us(step, roofs), 2),
        "peak_bytes": peak(step.calls()[0]),
        "workspace_bytes": workspace_bytes(step),
        "bound_steps": len(getattr(step.layers[0], "_bound", ())),
    }
    rows = [row(name, timing, work, True, apart[name]) for name, timing in timings.items()]
    best = min((line for line in rows if line["kind"] == "peer"), key=lambda line: line["us"], default=None)
    if best is not None:
        peer = peers[best["name"]]
        assert not isinstance(peer, str)
        shape["peer"] = facts_of(timeline(peer, case.calls), case.calls)
    reasons = {name: peer for name, peer in peers.items() if isinstance(peer, str)} | failures
    rows += [skipped(name, why) for name, why in reasons.items()]
    return {
        "op": step.op, "shape": shape, "bytes": work.bytes, "flops": work.flops, "products": step.products,
        "tensors": 1, "between_us": round(between, 3), "rows": rows,
    }  # fmt: skip


def sweep(
    wanted: Sequence[Case],
    replays: int,
    budget: float,
    roofs: Mapping[str, float],
    report: Callable[[Case, dict[str, Any] | str], None],
    with_peers: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], bool]:
    """(cells, cells that do not fit into the GPU's memory, whether time was up), in the order of `wanted`. Layers are
    kept from cell to cell where they fit.

    budget       seconds after which no further cell is begun
    roofs        ceilings for floors: copy in GB/s, bf16 and e4m3 in TFLOPS
    report       is told of each cell, or why it was left out
    with_peers   the same layers by other projects' kernels, in turn with ours
    """
    begin = time.monotonic()
    cells: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    kept: tuple[Any, list[DeepseekV4MultiHeadLatentAttentionWrapper]] | None = None
    for case in wanted:
        if time.monotonic() - begin > budget:
            report(case, f"the budget of {budget:.0f} s is used up")
            return cells, left_out, True
        key = case.layer_key
        if kept is None or kept[0] != key:
            kept = None
            gc.collect()
            torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        needed = case.cache_bytes()
        if needed > MOST_OF_MEMORY * free:
            why = f"its caches take {needed} bytes"
            left_out.append({"case": case.name, "reason": why, "bytes": needed})
            report(case, why)
            continue
        if kept is None:
            group = [other for other in wanted if other.layer_key == key]
            largest = max(group, key=lambda other: other.tokens)
            kept = key, largest.build_layers(max(max(other.lengths()) for other in group) + 64)
        step = case.make_step(kept[1])
        cell = measure(case, step, replays, roofs, with_peers)
        cells.append(cell)
        report(case, cell)
        del step
        gc.collect()
    return cells, left_out, False
