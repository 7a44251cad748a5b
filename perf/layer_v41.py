# SPDX-License-Identifier: Apache-2.0
"""Whole attention layers of V4.1: `python -m perf layer --model v4.1-flash`.

As perf.layer: three layers of one kind, with weights and caches of their own, one after the other in a CUDA graph. What
the layers before would hand to them, picks and candidate blocks, is drawn. Kinds are those of the model and the tokens
of an entry; an index source selects among candidate blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from cute_kernels.formats import V41_KV_CACHES
from cute_kernels.indices.ops import compute_global_topk_indices_and_lens
from cute_kernels.layers import (
    V41_PRESETS,
    DeepseekV41Attention,
    RotaryEmbedding,
    V41Caches,
    V41Options,
    V41Selection,
    V41Step,
    V41StepBuilder,
    V41Tables,
)
from cute_kernels.layers.caches import INDEX_CACHES, SWA_BLOCK_SIZE
from cute_kernels.layers.linear import Linear
from cute_kernels.layers.mla import Workspace
from cute_kernels.layers.v41_caches import ENTRY_BLOCK_SIZE, RING_ROWS
from cute_kernels.runtime.record import Cost
from perf import layer
from perf.layer import CHECKED, LAYERS, Case, fill_cache, fill_module, paged

OP = "layer_v41"
MODEL = "v4.1-flash"
KINDS = {"window": 0, "source2": 2, "consumer2": 3, "source1": 20, "consumer1": 21, "index": 24, "draft": 40}
"""By kind: a layer of it."""
OWN = "own"
"""In the place of tensor-parallel ranks in names: caches of the model's own records, and MXFP4 keys."""


@dataclass(frozen=True)
class V41Case(Case):
    """One cell. is_own: caches of V4.1's own records; else those that engines have on Hopper."""

    is_own: bool = False

    @property
    def name(self) -> str:
        return super().name + (f" {OWN}" if self.is_own else "")

    @property
    def index(self) -> int:
        return KINDS[self.kind]

    @property
    def ratios(self) -> tuple[int, ...]:
        return (V41_PRESETS[self.model].compress_ratio_of(self.index),) * LAYERS

    @property
    def layer_key(self) -> tuple[Any, ...]:
        return self.model, self.kind, self.is_own

    @property
    def is_draft(self) -> bool:
        return self.kind == "draft"

    @property
    def caches(self) -> dict[str, Any]:
        """Names of the formats."""
        names = ("mxfp8_v41+nvfp4_v41", "mxfp4") if self.is_own else ("fp8_ds_mla", "fp8")
        return dict(zip(("kv_cache", "index_cache"), names, strict=True))

    @property
    def record_bytes(self) -> tuple[int, int, int]:
        """Of a window's row, an entry and an index key."""
        window, entry = V41_KV_CACHES[self.caches["kv_cache"]]
        return window.row_elements, entry.row_elements, INDEX_CACHES[self.caches["index_cache"]].row_elements

    def build_layers(self, longest: int) -> list[Any]:
        return build_layers(self, longest)

    def cache_bytes(self) -> int:
        window, entry, key = self.record_bytes
        rows = self.requests * (V41_PRESETS[self.model].sliding_window + self.rows)
        ratio = self.ratios[0]
        entries = self.requests * (max(self.lengths()) // ratio) if ratio else 0
        return LAYERS * (rows * window + entries * (entry + key))

    def make_step(self, layers: list[Any]) -> Any:
        return V41LayerStep(self, layers)


def cases(full: bool = False) -> Iterator[V41Case]:
    """The cells of the report, or those of a longer look."""
    config = V41_PRESETS[MODEL]
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256) if full else (1, 64, 128)
    for kind in KINDS:
        if kind == "consumer2" and not full:  # as one of ratio 1
            continue
        rows = config.draft_block_size if kind == "draft" else 1
        scores = kind in ("source1", "index")
        contexts = (8192, 65536, 262144) if full else (8192, 65536) if scores else (8192,)
        for context in contexts:
            for b in batches:
                yield V41Case(MODEL, kind, "decode", b, rows, context)
        if scores:
            for b in (1, 8) if full or kind == "index" else (1,):
                yield V41Case(MODEL, kind, "decode", b, 1, 1048576)
        if kind == "consumer1" or (full and kind.startswith("source")):
            for b in batches:
                yield V41Case(MODEL, kind, "decode", b, 1, 8192, is_own=True)
        if full and kind != "draft":
            yield V41Case(MODEL, kind, "prefill", 1, 2048, 65536)


def build_layers(case: V41Case, longest: int) -> list[DeepseekV41Attention]:
    """The layers of a cell, which cells of fewer rows and shorter sequences take as well."""
    config = V41_PRESETS[case.model]
    rotary = RotaryEmbedding(config, case.ratios[0] > 0, longest, layer.DEVICE)
    options = V41Options(
        max_model_len=longest, max_num_tokens=max(case.tokens, 64), workspace=Workspace(), **case.caches
    )
    built = []
    for seed in range(LAYERS):
        one = DeepseekV41Attention(config, case.index, options=options, rotary_emb=rotary, device=layer.DEVICE)
        g = torch.Generator(device=layer.DEVICE).manual_seed(seed)
        fill_module(one, one.o_proj, g)
        one.attention.attn_sink.normal_(generator=g)
        built.append(one)
    return built


class V41LayerStep:
    """Layers, caches and metadata of one cell."""

    op, products = OP, "bf16"

    def __init__(self, case: V41Case, layers: list[DeepseekV41Attention]) -> None:
        self.case, self.layers, self.config = case, layers, layers[0].config
        g = torch.Generator(device=layer.DEVICE).manual_seed(7)
        windows, window_blocks = paged(case, SWA_BLOCK_SIZE, self.config.sliding_window + case.rows, g)
        entries, entry_blocks = paged(case, ENTRY_BLOCK_SIZE, max(case.lengths()), g)
        rings = torch.arange(case.requests, dtype=torch.int32, device=layer.DEVICE)
        self.tables = V41Tables(windows, entries, rings) if case.ratios[0] else V41Tables(windows)
        blocks: dict[str, Any] = {"window_blocks": window_blocks, "entry_blocks": entry_blocks, "rings": case.requests}
        self.caches = []
        for _ in layers:
            caches = V41Caches.allocate(self.config, [case.index], **blocks, **case.caches, device=layer.DEVICE)
            pools: list[Any] = [*caches.windows.values()]
            for source in caches.sources.values():
                pools += [cache for cache in (source.entries, source.keys, source.ring) if cache is not None]
            for pool in pools:
                fill_cache(pool, g)
            self.caches.append(caches)
        self.hidden = [torch.randn(case.tokens, self.config.hidden_size, device=layer.DEVICE, generator=g).bfloat16()]
        self.builder = self._builder()
        self.build()
        self.selection = self._selection(g)

    def _builder(self) -> V41StepBuilder:
        return V41StepBuilder(self.config, max(self.case.tokens, 1), max(self.case.lengths()), layer.DEVICE)

    def _step(self, builder: V41StepBuilder, requests: int) -> V41Step:
        """Of the first requests."""
        case, tables = self.case, self.tables
        entries, rings = (None if t is None else t[:requests] for t in (tables.entries, tables.rings))
        some = V41Tables(tables.windows[:requests], entries, rings)
        given = case.query_lengths()[:requests], case.lengths()[:requests], some, min(case.decodes, requests)
        return builder.build(*given, ring_rows=RING_ROWS, is_draft=case.is_draft)

    def build(self) -> None:
        """Metadata of the step."""
        self.step = self._step(self.builder, self.case.requests)

    def _selection(self, g: torch.Generator) -> V41Selection | None:
        """Picks, and candidate blocks, that layers before would hand to this one; drawn."""
        ratio, config, step = self.case.ratios[0], self.config, self.step
        if self.case.kind not in ("consumer1", "consumer2", "index"):
            return None
        visible = step.entries[ratio].visible
        picks = drawn(visible, config.index_topk, g)
        blocks = -(-visible // config.candidate_block_size)
        candidates = drawn(blocks, config.candidate_topk_blocks, g)
        slots = lens = None
        decodes = step.window.num_decode_tokens
        if decodes:
            assert step.tables.entries is not None
            rows = ENTRY_BLOCK_SIZE // ratio
            m = step.window
            slots, lens = compute_global_topk_indices_and_lens(
                picks[:decodes], m.token_to_req_indices, step.tables.entries, rows, m.is_valid_token
            )
        source = config.index_source_of(self.case.index)
        return V41Selection(source, picks, slots, lens, config.candidate_source_layer_id, candidates)

    def run(self, number: int) -> torch.Tensor:
        """One layer."""
        return self.layers[number](self.hidden[0], self.step, self.caches[number], self.selection)[0]

    def calls(self) -> list[Callable[[], Any]]:
        return [partial(self.run, number) for number in range(LAYERS)]

    def run_once(self) -> None:
        for call in self.calls():
            call()

    def work(self) -> Cost:
        return least_work(self.layers[0], self.case)

    def each_kind(self) -> list[tuple[int, int]]:
        return [(0, LAYERS)]

    def is_right(self) -> bool:
        """Whether rows of the first request are what they are in a step of it alone."""
        whole, rows = self.run(0), self.case.rows
        selection = self.selection
        if selection is not None:
            slots, lens = (None if x is None else x[:rows] for x in (selection.slots, selection.lens))
            selection = replace(selection.of_rows(torch.arange(rows, device=layer.DEVICE)), slots=slots, lens=lens)
        step = self._step(self._builder(), 1)
        alone, _ = self.layers[0](self.hidden[0][:rows], step, self.caches[0], selection)
        close = (whole[:rows].double() - alone.double()).norm() <= CHECKED * alone.double().norm()
        return bool(torch.isfinite(whole).all() and close)


def drawn(counts: torch.Tensor, most: int, g: torch.Generator) -> torch.Tensor:
    """int32 [rows, most]: of 0 .. counts - 1 so many, ascending, the last one among them, then -1."""
    widest = max(int(counts.max()), 1)
    found = torch.full((len(counts), most), -1, dtype=torch.int32, device=counts.device)
    for rows in torch.arange(len(counts), device=counts.device).split(max((1 << 27) // widest, 1)):
        order = torch.rand(len(rows), widest, device=counts.device, generator=g)
        column = torch.arange(widest, device=counts.device)
        order.masked_fill_(column >= counts[rows, None], -1.0).masked_fill_(column == counts[rows, None] - 1, 2.0)
        values, chosen = order.topk(min(most, widest), dim=1)
        chosen = torch.where(values < 0, widest, chosen).sort(dim=1).values
        found[rows, : chosen.shape[1]] = torch.where(chosen == widest, -1, chosen).int()
    return found


def least_work(one: DeepseekV41Attention, case: V41Case) -> Cost:
    """Bytes and FLOPs that a call of a cell can't do without."""
    config, ratio = one.config, case.ratios[0]
    window_bytes, entry_bytes, key_bytes = case.record_bytes
    weights = [m.weight for m in one.modules() if isinstance(m, Linear)] + [one.o_proj.wo_a]
    numbers, tokens = sum(weight.numel() for weight in weights), case.tokens
    moved = 2 * numbers + 2 * 2 * tokens * config.hidden_size
    attended = keys = 0
    for rows, length in zip(case.query_lengths(), case.lengths(), strict=True):
        visible = length // ratio if ratio else 0
        picked = min(visible, config.index_topk)
        window = min(length, config.sliding_window) + (case.rows if case.is_draft else 0)
        attended += rows * (picked + window)
        behind = 0 if case.is_draft else rows - 1
        moved += min(visible, rows * picked) * entry_bytes + min(length, window + behind) * window_bytes
        if one.indexer is not None and visible > config.index_topk:
            candidates = config.candidate_topk_blocks * config.candidate_block_size
            scored = min(visible, candidates) if one.indexer.takes_candidates else visible
            keys += rows * scored
            moved += min(visible, rows * scored) * key_bytes
    flops = 2 * tokens * numbers + 4 * attended * one.num_heads * config.head_dim
    return Cost(moved, flops + 2 * keys * config.index_n_heads * config.index_head_dim)
