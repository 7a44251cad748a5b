# SPDX-License-Identifier: Apache-2.0
"""A small engine for V4.1's layers: shuffled pages, rings, chunked prefill, drafts, prefix forks, late-layer prefill.

All caches start poisoned, so that a read of what nobody wrote shows as NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from layers import (
    DeepseekV41Attention,
    DeepseekV41Config,
    DeepseekV41DraftContext,
    V41Caches,
    V41Options,
    V41Selection,
    V41Step,
    V41StepBuilder,
    V41Tables,
    build_v41_draft_context,
    build_v41_layer,
    late_rows,
    random_v41_draft_context_tensors,
    random_v41_layer_tensors,
)
from layers.v41_caches import ENTRY_BLOCK_SIZE, RING_ROWS
from layers.v41_config import V41_PRESETS
from tests.helpers import raw_bytes

CONFIG = replace(
    V41_PRESETS["v4.1-flash"].reduced(),
    hidden_size=256,
    num_attention_heads=4,
    q_lora_rank=128,
    o_lora_rank=128,
    index_n_heads=4,
    index_topk=8,
    sliding_window=48,
    candidate_topk_blocks=5,
)
SLOTS, PAGES = 6, 40


def hidden_rows(count: int, seed: int, config: DeepseekV41Config = CONFIG) -> torch.Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@cache
def model(
    config: DeepseekV41Config = CONFIG, index_cache: str = "fp8", kv_cache: str = "fp8_ds_mla"
) -> list[DeepseekV41Attention]:
    return _layers(config, range(config.num_hidden_layers), index_cache, kv_cache)


def _layers(
    config: DeepseekV41Config, layers: Sequence[int], index_cache: str, kv_cache: str
) -> list[DeepseekV41Attention]:
    options = V41Options(kv_cache=kv_cache, index_cache=index_cache, max_model_len=1024, max_num_tokens=1024)
    return [build_v41_layer(config, layer, _tensors(config, layer), options=options) for layer in layers]


@cache
def _tensors(config: DeepseekV41Config, layer: int) -> dict[str, torch.Tensor]:
    return random_v41_layer_tensors(config, layer)


@dataclass
class Draft:
    """The context and the layers of a draft."""

    context: DeepseekV41DraftContext
    layers: list[DeepseekV41Attention]


@cache
def draft_model(config: DeepseekV41Config = CONFIG, kv_cache: str = "fp8_ds_mla") -> Draft:
    context = build_v41_draft_context(config, random_v41_draft_context_tensors(config))
    return Draft(context, _layers(config, config.draft_layer_ids, "fp8", kv_cache))


@dataclass
class Request:
    """A request's pages, ring and length, and the first position that late layers have."""

    windows: list[int] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    ring: int = 0
    length: int = 0
    replay_start: int = 0


class Engine:
    """Runs all layers. late: layers behind the last source run the last rows of a prefill alone, so many; draft: stores
    the context of every step, whose target layers' outputs stand for the hidden states behind them."""

    def __init__(
        self, layers: Sequence[DeepseekV41Attention], *, seed: int = 0, late: int = 0, draft: Draft | None = None
    ) -> None:
        self.layers, self.late, self.draft = layers, late, draft
        self.config, options = layers[0].config, layers[0].options
        sizes = {"window_blocks": PAGES, "entry_blocks": PAGES, "rings": SLOTS}
        kinds = {"kv_cache": options.kv_cache, "index_cache": options.index_cache}
        held = [*range(self.config.num_hidden_layers), *(self.config.draft_layer_ids if draft is not None else ())]
        self.caches = V41Caches.allocate(self.config, held, **kinds, **sizes)
        builder = (self.config, options.max_num_tokens, options.max_model_len)
        self.builder, self.late_builder = V41StepBuilder(*builder), V41StepBuilder(*builder)
        rng = random.Random(seed)
        self.free: dict[str, list[int]] = {"windows": [*range(PAGES)], "entries": [*range(PAGES)]}
        self.free["rings"] = [*range(SLOTS)]
        for pages in self.free.values():
            rng.shuffle(pages)
        for cached in self._pools():
            raw_bytes(cached.data).fill_(0xFF)

    def _pools(self) -> list[Any]:
        sources = [c for s in self.caches.sources.values() for c in (s.entries, s.keys, s.ring) if c is not None]
        return [*self.caches.windows.values(), *sources]

    def request(self) -> Request:
        return Request(ring=self.free["rings"].pop())

    def _tables(self, requests: Sequence[Request]) -> V41Tables:
        def table(name: str) -> torch.Tensor:
            width = max(len(getattr(r, name)) for r in requests) + 1
            rows = [[*getattr(r, name), *[-1] * (width - len(getattr(r, name)))] for r in requests]
            return torch.tensor(rows, dtype=torch.int32)

        rings = torch.tensor([r.ring for r in requests], dtype=torch.int32)
        return V41Tables(table("windows"), table("entries"), rings)

    def step(
        self,
        decodes: list[tuple[Request, torch.Tensor]],
        prefills: list[tuple[Request, torch.Tensor]] = [],  # noqa: B006 (never mutated)
    ) -> tuple[list[list[torch.Tensor]], list[list[V41Selection]]]:
        """Feed rows to each request. By layer: the outputs of each request (of late layers of the rows they ran), and
        the selection after it."""
        work = decodes + prefills
        requests, counts = [r for r, _ in work], [len(rows) for _, rows in work]
        lengths = [r.length + n for r, n in zip(requests, counts, strict=True)]
        self._grow(requests, lengths)
        tables, hidden = self._tables(requests), torch.cat([rows for _, rows in work])
        step = self.builder.build(counts, lengths, tables, len(decodes), ring_rows=RING_ROWS)
        selection, outs, selections = None, [], []
        last_source = self.config.kv_source_layer_ids[-1]
        for layer in self.layers:
            out, selection = layer(hidden, step, self.caches, selection)
            outs.append(list(out.split(counts)))
            selections.append(selection)
            if self.late and layer.layer_index == last_source:
                before = [r.replay_start for r in requests]
                late = late_rows(counts, lengths, len(decodes), before, self.late)
                rows, counts = torch.tensor(late.rows), late.query_lens
                step = self._late_step(counts, lengths, tables, len(decodes), late.replay_start)
                hidden, selection = hidden[rows], selection.of_rows(rows)
                for request, start in zip(requests, late.replay_start, strict=True):
                    request.replay_start = start
        if self.draft is not None:
            self._store_context(torch.cat([torch.cat(outs[i]) for i in self.config.draft_target_layer_ids], 1), step)
        for request, length in zip(requests, lengths, strict=True):
            request.length = length
        return outs, selections

    def _grow(self, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """Have pages for so many tokens of each request."""
        for request, length in zip(requests, lengths, strict=True):
            for name, size in (("windows", 64), ("entries", ENTRY_BLOCK_SIZE)):
                pages = getattr(request, name)
                pages += [self.free[name].pop() for _ in range(-(-length // size) - len(pages))]

    def _store_context(self, hidden: torch.Tensor, step: V41Step) -> None:
        assert self.draft is not None
        for layer in self.draft.layers:
            layer.store_context(self.draft.context(hidden), step, self.caches)

    def draft_blocks(self, blocks: list[tuple[Request, torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Run a block of rows behind each request through the draft's layers: by layer, the outputs of each."""
        assert self.draft is not None
        requests, rows = [r for r, _ in blocks], self.config.draft_block_size
        starts = [request.replay_start for request in requests]
        lengths = [request.length + rows for request in requests]
        self._grow(requests, lengths)
        tables = V41Tables(self._tables(requests).windows)
        counts = [rows] * len(blocks)
        step = self.builder.build(counts, lengths, tables, len(blocks), replay_start=starts, is_draft=True)
        hidden = torch.cat([block for _, block in blocks])
        return [list(layer(hidden, step, self.caches)[0].split(rows)) for layer in self.draft.layers]

    def _late_step(
        self, counts: list[int], lengths: list[int], tables: V41Tables, decodes: int, starts: list[int]
    ) -> V41Step:
        return self.late_builder.build(counts, lengths, tables, decodes, ring_rows=RING_ROWS, replay_start=starts)

    def fork(self, request: Request, at: int) -> Request:
        """A request that goes on from position `at`, a multiple of 128, with copies of the pages: of ratio 2 nothing of
        a ring is needed where a pair begins."""
        other = self.request()
        other.length = at
        for name, size in (("windows", 64), ("entries", ENTRY_BLOCK_SIZE)):
            for page in getattr(request, name)[: at // size]:
                copy = self.free[name].pop()
                getattr(other, name).append(copy)
                owners: list[Any] = [*self.caches.windows.values()]
                if name == "entries":
                    owners = [c for s in self.caches.sources.values() for c in (s.entries, s.keys)]
                for cached in owners:
                    cached.data[copy] = cached.data[page]
        return other

    def stored(self, request: Request) -> list[torch.Tensor]:
        """Raw bytes of the request's entries, keys and current windows, of all layers."""
        found = []

        def read(cached: Any, table: list[int], first: int, stop: int) -> None:
            rows = cached.block_size
            slots = torch.tensor([table[i // rows] * rows + i % rows for i in range(first, stop)], dtype=torch.int64)
            found.extend(cached.kv_format.read_fields(cached.data, rows, slots))

        for source, caches in self.caches.sources.items():
            count = request.length // self.config.compress_ratio_of(source)
            read(caches.entries, request.entries, 0, count)
            read(caches.keys, request.entries, 0, count)
        first = max(request.length - self.config.sliding_window + 1, 0)
        for window in self.caches.windows.values():
            read(window, request.windows, first, request.length)
        return found


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
