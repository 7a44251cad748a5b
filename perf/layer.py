"""Whole attention layers, as an engine runs them: `python -m perf layer`.

A cell is one kind of layer of one model in one kind of step. Three layers with weights and caches of their own run one
after the other in a CUDA graph, so that no weight stays in L2 from one call to the next, and each is a call of that
graph. Requests of a decode step have lengths of their own, up to 255 tokens below the context, as in serving: which of
them close a group of compressed tokens differs from step to step.

The bytes of a cell are what no layer of this kind can do without: its weights once, the cache rows and keys that it
reads, and hidden states in and out; its FLOPs those of its products. Where caches do not fit into the GPU's memory a
cell is left out, and says how many bytes it would take.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import FP8_DS_MLA, INDEXER_FP8, round_up
from cute_kernels.runtime.record import Cost
from layers import PRESETS, AttentionOptions, BlockTables, DeepseekV4MetadataBuilder, LayerCaches, TensorParallel
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE, PagedCache
from layers.config import DeepseekV4Config
from layers.linear import Linear
from layers.mla import Workspace
from layers.rotary import RotaryEmbedding
from perf.measure import OURS, row, time_graphs

OP = "layer"
LAYERS = 3
KINDS = {"swa": 1, "c4a": 4, "c128a": 128}
HOST_STEPS = 12
CHECKED = 0.02
"""Relative difference allowed between the layer as it runs and the one whose steps are taken one by one."""


@dataclass(frozen=True)
class Case:
    """One cell: `rows` new tokens of each of `requests` requests, of contexts up to `context` tokens."""

    model: str
    kind: str
    phase: str
    requests: int
    rows: int
    context: int
    tp: int = 1

    @property
    def ratio(self) -> int:
        return KINDS[self.kind]

    @property
    def tokens(self) -> int:
        return self.requests * self.rows

    @property
    def name(self) -> str:
        size = f"decode b{self.requests} ctx{self.context}" if self.phase == "decode" else ""
        size = size or f"prefill {self.rows} ctx{self.context}"
        more = f" n{self.rows}" if self.phase == "decode" and self.rows > 1 else ""
        return f"{self.model} {self.kind} {size}{more}" + (f" tp{self.tp}" if self.tp > 1 else "")

    def lengths(self) -> list[int]:
        """Tokens of each request after the step."""
        if self.phase == "prefill":
            return [self.context + self.rows]
        return [max(self.context - 61 * r % 256, self.rows + 8) for r in range(self.requests)]


def cases(full: bool = False) -> Iterator[Case]:
    """The cells of the report, or those of a longer look."""
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if full else (1, 8, 64, 256)
    contexts = (2048, 8192, 65536, 262144, 1048576) if full else (8192, 65536)
    for model in PRESETS:
        for kind in KINDS:
            for context in contexts:
                for b in batches:
                    if not full and model == "v4-pro" and (b == 8 or (context > 8192 and (kind, b) != ("c4a", 64))):
                        continue
                    if not full and kind == "swa" and context > 8192:
                        continue
                    for rows in (1, 2, 4) if full else (1,):
                        for tp in (1, 2, 4, 8) if full else (1,):
                            yield Case(model, kind, "decode", b, rows, context, tp)
            if not full:
                yield Case(model, kind, "decode", 64, 4, 8192)
                yield Case(model, kind, "decode", 1, 1, 8192, 8)
                yield Case(model, kind, "decode", 64, 1, 8192, 8)
            for context in (0, 65536):
                for rows in (512, 2048, 4096):
                    if full or (context and rows > 512):
                        yield Case(model, kind, "prefill", 1, rows, context)


def fill_weights(layer: DeepseekV4MultiHeadLatentAttentionWrapper, seed: int) -> None:
    """Random weights of ordinary magnitudes, made on the GPU."""
    g = torch.Generator(device="cuda").manual_seed(seed)

    def fill(weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        fan_in = weight.shape[-1]
        for part in weight.view(-1, fan_in).split(4096):
            values = torch.empty(part.shape, device="cuda", dtype=torch.bfloat16).normal_(generator=g)
            part.copy_(values * (64.0 if scale is not None else fan_in**-0.5))
        if scale is not None:
            scale.fill_(2.0 ** round(math.log2(fan_in**-0.5 / 64)))

    for module in layer.modules():
        if isinstance(module, Linear):
            fill(module.weight, module.scale)
    fill(layer.o_proj.wo_a, layer.o_proj.wo_a_scale)
    layer.mla_attn.attn_sink.normal_(generator=g)
    for compressor in (layer.compressor, None if layer.indexer is None else layer.indexer.compressor):
        if compressor is not None:
            compressor.ape.normal_(generator=g).mul_(0.5)


def fill_cache(cache: PagedCache, g: torch.Generator) -> None:
    """Valid records of random numbers: some pages, over and over."""
    rows = cache.block_size
    if cache.kv_format.id not in (FP8_DS_MLA.id, INDEXER_FP8.id):
        cache.data.normal_(generator=g)
        return
    pages = cache.kv_format.pages(cache.data, rows)
    some = torch.zeros_like(pages[: min(len(pages), 64 if rows > 4 else 4096)])
    count = len(some)
    if cache.kv_format.id == FP8_DS_MLA.id:
        records = some[:, : rows * 576].unflatten(1, (rows, 576))
        x = torch.randn(count, rows, 512, device="cuda", generator=g)
        records[..., :448] = (x[..., :448] * 100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        records[..., 448:] = (x[..., 448:] * 0.3).bfloat16().view(torch.uint8)
        scales = some[:, rows * 576 :]
        scales.copy_(torch.randint(118, 120, scales.shape, device="cuda", generator=g))
    else:
        keys = torch.randn(count, rows * 128, device="cuda", generator=g).to(torch.float8_e4m3fn)
        some[:, : rows * 128] = keys.view(torch.uint8)
        some[:, rows * 128 : rows * 132] = (torch.rand(count, rows, device="cuda", generator=g) + 0.5).view(torch.uint8)
    for first in range(0, len(pages), count):
        pages[first : first + count].copy_(some[: len(pages) - first])


class Step:
    """Layers, caches and metadata of one cell."""

    def __init__(self, case: Case, layers: list[DeepseekV4MultiHeadLatentAttentionWrapper]) -> None:
        self.case, self.layers, self.config = case, layers, layers[0].config
        lengths = case.lengths()
        longest, ratio = max(lengths), case.ratio
        g = torch.Generator(device="cuda").manual_seed(7)

        def table(page: int, live_tokens: int) -> tuple[torch.Tensor, int]:
            """Pages of each request, those of live tokens its own, in random order."""
            width = -(-longest // page) + 1
            live = min(-(-live_tokens // page) + 2, width)
            order = torch.randperm(case.requests * live, device="cuda", generator=g).view(case.requests, live).int()
            return order[:, torch.arange(width, device="cuda") % live].contiguous(), case.requests * live

        swa, swa_blocks = table(SWA_BLOCK_SIZE, self.config.sliding_window + case.rows)
        self.tables = BlockTables(swa)
        blocks: dict[str, Any] = {"swa_blocks": swa_blocks}
        if ratio > 1:
            compressed, blocks["compressed_blocks"] = table(KV_BLOCK_SIZE, longest)
            state, blocks["state_blocks"] = table(STATE_BLOCK_SIZE[ratio], 2 * ratio + case.rows)
            self.tables = BlockTables(swa, compressed, state)
        self.caches = [LayerCaches.allocate(self.config, ratio, **blocks, device="cuda") for _ in layers]
        for caches in self.caches:
            for cache in vars(caches).values():
                if cache is not None:
                    fill_cache(cache, g)
        self.builder = DeepseekV4MetadataBuilder(self.config, max(case.tokens, 1), longest, "cuda")
        shape = case.tokens, self.config.hidden_size
        self.hidden = torch.randn(shape, device="cuda", generator=g).bfloat16()
        self.build()

    def build(self) -> None:
        case = self.case
        decodes = case.requests if case.phase == "decode" else 0
        query = [case.rows] * case.requests
        self.metadata = self.builder.build(case.ratio, query, case.lengths(), self.tables, decodes)

    def run(self, number: int, capture: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        m = self.metadata
        return self.layers[number](m.positions, self.hidden, m, self.caches[number], capture=capture)

    def calls(self) -> list[Callable[[], Any]]:
        return [partial(self.run, number) for number in range(len(self.layers))]

    def is_right(self) -> bool:
        """Whether the layer as it runs agrees with its steps taken one by one, which a capture asks for."""
        one, other = self.run(0), self.run(0, {})
        close = (one.double() - other.double()).norm() <= CHECKED * other.double().norm()
        return bool(torch.isfinite(one).all() and close)


def least_work(case: Case, layer: DeepseekV4MultiHeadLatentAttentionWrapper) -> Cost:
    """Bytes and FLOPs that no layer of this kind can do without."""
    config, heads = layer.config, layer.num_heads
    weights = sum(m.weight.numel() * m.weight.element_size() for m in layer.modules() if isinstance(m, Linear))
    numbers = sum(m.weight.numel() for m in layer.modules() if isinstance(m, Linear)) + layer.o_proj.wo_a.numel()
    weights += layer.o_proj.wo_a.numel() * layer.o_proj.wo_a.element_size()
    hidden = 2 * 2 * case.tokens * config.hidden_size
    attended = keys = 0
    rows_read = 0
    for length in case.lengths():
        visible = length // case.ratio if case.ratio > 1 else 0
        picked = min(visible, config.index_topk) if case.ratio == 4 else visible
        window = min(length, config.sliding_window)
        attended += case.rows * (picked + window)
        # rows that several tokens of a request read are read once
        rows_read += min(visible, case.rows * picked) + min(length, window + case.rows - 1)
        if case.ratio == 4 and visible > config.index_topk:
            keys += case.rows * visible
    index_bytes = keys // max(case.rows, 1) * 132
    index_flops = 2 * keys * config.index_n_heads * config.index_head_dim
    flops = 2 * case.tokens * numbers + 4 * attended * heads * config.head_dim + index_flops
    return Cost(bytes=weights + hidden + rows_read * 584 + index_bytes, flops=flops)


def build_layers(case: Case, longest: int) -> list[DeepseekV4MultiHeadLatentAttentionWrapper]:
    config = PRESETS[case.model]
    rotary = RotaryEmbedding(config, case.ratio > 1, longest, "cuda")
    rows = round_up(max(case.tokens, 64), 64)
    options = AttentionOptions(
        prefill="auto",
        max_model_len=longest,
        max_num_tokens=rows,
        workspace=Workspace(),
        topk_indices_buffer=torch.full((rows, config.index_topk), -1, dtype=torch.int32, device="cuda"),
        tp=TensorParallel(rank=0, size=case.tp, reduce=lambda x: x),
    )
    layers = []
    for seed in range(LAYERS):
        index = config.layer_of_kind(case.ratio)
        layer = DeepseekV4MultiHeadLatentAttentionWrapper(
            config, index, options=options, rotary_emb=rotary, device="cuda"
        )
        fill_weights(layer, seed)
        layers.append(layer)
    return layers


def cache_bytes(case: Case, config: DeepseekV4Config) -> int:
    """Of the caches of all layers of a cell, about."""
    per_request = 584 * (config.sliding_window + case.rows)
    if case.ratio > 1:
        per_request += max(case.lengths()) // case.ratio * (584 + (132 if case.ratio == 4 else 0))
    return LAYERS * case.requests * per_request


def host_us(step: Step) -> float:
    """Host time of an eager layer, median; the GPU has nothing queued when a step begins."""
    found = []
    for _ in range(HOST_STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for call in step.calls():
            call()
        found.append((time.perf_counter() - begin) * 1e6 / LAYERS)
    torch.cuda.synchronize()
    return statistics.median(found[2:])


def launches(step: Step) -> float:
    """Kernels, copies and fills of a layer."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in step.calls():
            call()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return round(len(events) / LAYERS, 2)


def measure(case: Case, step: Step, replays: int) -> dict[str, Any]:
    """One cell of the record."""
    work = least_work(case, step.layers[0])
    if not step.is_right():
        raise RuntimeError(f"{case.name}: the layer disagrees with its steps taken one by one; nothing was timed")
    candidates = {OURS: step.calls()}
    timings = time_graphs(candidates, work.bytes, replays, flops_per_set=work.flops)
    facts = {
        "model": case.model,
        "kind": case.kind,
        "tp": case.tp,
        "launches": launches(step),
        "eager_host_us": round(host_us(step), 1),
        "bound_steps": len(step.layers[0]._bound),
    }
    rows = [row(name, timing, work, True) for name, timing in timings.items()]
    shape = {"case": case.name, "T": case.tokens, **facts}
    return {
        "op": OP, "shape": shape, "bytes": work.bytes, "flops": work.flops, "products": "e4m3", "tensors": 1,
        "rows": rows,
    }  # fmt: skip


def sweep(
    wanted: list[Case], replays: int, budget: float, report: Callable[[Case, dict[str, Any] | str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """(cells, what was left out and why), in the order of `wanted`. Layers are kept from cell to cell where they fit.

    budget   seconds after which no further cell is begun
    report   is told of each cell, or why it was left out
    """
    begin = time.monotonic()
    cells, left_out = [], []
    kept: tuple[Any, list[DeepseekV4MultiHeadLatentAttentionWrapper]] | None = None
    for case in wanted:
        key = case.model, case.kind, case.tp, case.phase, case.context
        why = ""
        if time.monotonic() - begin > budget:
            why = f"the budget of {budget:.0f} s is used up"
        free, _ = torch.cuda.mem_get_info()
        needed = cache_bytes(case, PRESETS[case.model])
        if needed > 0.8 * free:
            why = f"its caches take {needed} bytes"
        if why:
            left_out.append(f"{case.name}: {why}")
            report(case, why)
            continue
        if kept is None or kept[0] != key or case.tokens > len(kept[1][0].options.topk_indices_buffer):  # type: ignore[arg-type]
            kept = None
            gc.collect()
            torch.cuda.empty_cache()
            group = [
                other for other in wanted if key == (other.model, other.kind, other.tp, other.phase, other.context)
            ]
            largest = max(group, key=lambda other: other.tokens)
            kept = key, build_layers(largest, max(max(other.lengths()) for other in group) + 64)
        step = Step(case, kept[1])
        cell = measure(case, step, replays)
        cells.append(cell)
        report(case, cell)
        del step
        gc.collect()
    return cells, left_out
