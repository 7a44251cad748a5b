# SPDX-License-Identifier: Apache-2.0
"""V4.1: layers that hand entries and selections on run together, step by step; each is reported by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.layers import (
    DeepseekV41Attention,
    DeepseekV41Config,
    DeepseekV41DraftContext,
    V41Caches,
    V41Selection,
    V41StepBuilder,
    V41Tables,
)
from cute_kernels.layers.caches import SWA_BLOCK_SIZE, PagedCache
from cute_kernels.layers.v41_caches import ENTRY_BLOCK_SIZE, RING_ROWS
from cute_kernels.layers.v41_config import CONSUMER, DRAFT
from cute_kernels.runtime.record import Call, record_calls
from layer_runner.checks import (
    Check,
    check_caches,
    check_consistent,
    check_finite,
    check_repeatable,
    check_topk,
    check_untouched,
    truncated_rows,
    visible_entries,
)
from layer_runner.pools import POISON, Pools, page_table, raw_pages
from layer_runner.report import summarize
from layer_runner.requests import InputError, Request, rms_normalize, schedule
from layer_runner.run import LayerReport


def kind_name(config: DeepseekV41Config, layer: int) -> str:
    """The kind of a layer and the ratio of the entries that it reads."""
    kind, ratio = config.kind_of(layer), config.compress_ratio_of(layer)
    return f"{kind}, ratio {ratio}" if ratio else kind


def needed_layers(config: DeepseekV41Config, layer: int) -> set[int]:
    """Layers that one cannot run without, itself among them."""
    if config.compress_ratio_of(layer) == 0:
        return {layer}
    needed = {layer, config.source_of(layer)}
    if config.kind_of(layer) == CONSUMER:
        needed |= needed_layers(config, config.index_source_of(layer))
    if config.takes_candidates(layer):
        needed.add(config.candidate_source_layer_id)
    return needed


def chosen_layers(config: DeepseekV41Config, layer: int | None, held: Iterable[int] | None) -> list[int]:
    """A layer and all that it needs, or the first of each kind and ratio, of those that a checkpoint holds."""
    present = set(range(len(config.compress_ratios)) if held is None else held)
    if layer is None:
        kinds: dict[str, int] = {}
        for index in sorted(present):
            if needed_layers(config, index) <= present:
                name = kind_name(config, index)
                kinds.setdefault(f"{name} of candidates" if config.takes_candidates(index) else name, index)
        wanted = set(kinds.values())
    else:
        wanted = {layer}
    needed = sorted(set().union(*(needed_layers(config, index) for index in wanted)))
    missing = [index for index in needed if index not in present]
    if missing:
        raise InputError(f"--layer: layer {layer} needs layers {missing}, which the checkpoint does not hold")
    return needed


class V41Pools(Pools):
    """Caches of some layers and tables of a batch, and what one layer has of them (`of`).

    reaches   for each request, one past the last position that layers write, a draft's last block left out
    """

    def __init__(
        self, layers: Sequence[DeepseekV41Attention], reaches: Sequence[int], ring_rows: int, device: str, seed: int
    ) -> None:
        self.config = layers[0].config
        block = self.config.draft_block_size if any(layer.kind == DRAFT for layer in layers) else 0
        self.reaches, self.layer, self.ring_rows = [reach + block for reach in reaches], -1, ring_rows
        generator = torch.Generator().manual_seed(seed)
        windows, window_blocks = page_table(self.reaches, SWA_BLOCK_SIZE, generator)
        entries, entry_blocks = page_table(self.reaches, ENTRY_BLOCK_SIZE, generator)
        rings = torch.randperm(len(reaches) + 1, generator=generator)[: len(reaches)].int()
        self.v41_tables = V41Tables(windows.to(device), entries.to(device), rings.to(device))
        self.v41_caches = V41Caches.allocate(
            self.config,
            [layer.layer_index for layer in layers],
            window_blocks=window_blocks,
            entry_blocks=entry_blocks,
            rings=len(reaches) + 1,
            ring_rows=ring_rows,
            kv_cache=layers[0].options.kv_cache,
            index_cache=layers[0].options.index_cache,
            device=device,
        )
        pools: list[PagedCache] = [*self.v41_caches.windows.values()]
        for source in self.v41_caches.sources.values():
            pools += [cache for cache in (source.entries, source.keys, source.ring) if cache is not None]
        for cache in pools:
            raw_pages(cache).fill_(POISON)

    def of(self, layer: int) -> V41Pools:
        """The same pools, of which the names are those that this layer writes."""
        part = copy(self)
        part.layer, part.compress_ratio = layer, self.config.compress_ratio_of(layer)
        return part

    def v41_tables_of(self, requests: Sequence[int]) -> V41Tables:
        rows, tables = torch.tensor(requests, device=self.v41_tables.windows.device), self.v41_tables
        assert tables.entries is not None
        assert tables.rings is not None
        return V41Tables(tables.windows[rows], tables.entries[rows], tables.rings[rows])

    def by_name(self) -> dict[str, tuple[PagedCache, torch.Tensor, int]]:
        tables, layer = self.v41_tables, self.layer
        found: dict[str, tuple[PagedCache, torch.Tensor, int]] = {
            "window cache": (self.v41_caches.windows[layer], tables.windows, 1)
        }
        if layer in self.v41_caches.sources:
            assert tables.entries is not None
            source, ratio = self.v41_caches.sources[layer], self.compress_ratio
            found["entries"] = source.entries, tables.entries, ratio
            found["index keys"] = source.keys, tables.entries, ratio
        return found


@dataclass(frozen=True)
class StackResult:
    """By layer, each for every request: outputs, picks and candidate blocks (of layers that select, else empty)."""

    outputs: list[list[torch.Tensor]]
    topk: list[list[torch.Tensor]]
    candidates: list[list[torch.Tensor]]
    calls: list[list[Call]]


def run_batch(
    layers: Sequence[DeepseekV41Attention],
    builder: V41StepBuilder,
    requests: Sequence[Request],
    pools: V41Pools,
    chunk: int,
    *,
    draft_context: DeepseekV41DraftContext | None = None,
    first_request: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> StackResult:
    """Run all steps of the requests through all layers, each of which reads the same hidden states. Draft layers have
    them for target layers' states, and run a block behind each step, of which the last one of a request is returned."""
    outputs: list[list[list[torch.Tensor]]] = [[[] for _ in requests] for _ in layers]
    topk: list[list[list[torch.Tensor]]] = [[[] for _ in requests] for _ in layers]
    blocks: list[list[list[torch.Tensor]]] = [[[] for _ in requests] for _ in layers]
    calls: list[list[Call]] = [[] for _ in layers]
    config, drafts = layers[0].config, [index for index, layer in enumerate(layers) if layer.kind == DRAFT]
    for parts, numbers in schedule(requests, chunk):
        hidden = torch.cat([requests[p.request].rows(p, number) for p, number in zip(parts, numbers, strict=True)])
        tables = pools.v41_tables_of([first_request + part.request for part in parts])
        step = builder.build(
            [part.rows for part in parts],
            [part.start + part.rows for part in parts],
            tables,
            sum(number is not None for number in numbers),
            ring_rows=pools.ring_rows,
        )
        selection: V41Selection | None = None
        for index, layer in enumerate(layers):
            if index in drafts:
                assert draft_context is not None
                states = torch.cat([hidden] * len(config.draft_target_layer_ids), dim=1)
                with record_calls() as recording:
                    layer.store_context(draft_context(states), step, pools.v41_caches)
                calls[index] += recording.calls
                continue
            with record_calls() as recording:
                out, selection = layer(hidden, step, pools.v41_caches, selection)
            calls[index] += recording.calls
            row = 0
            for part in parts:
                kept = slice(row, row + part.accepted)
                outputs[index][part.request].append(out[kept])
                if layer.indexer is not None:
                    assert selection is not None
                    topk[index][part.request].append(selection.picks[kept])
                    if layer.indexer.takes_candidates and selection.candidates is not None:
                        blocks[index][part.request].append(selection.candidates[kept])
                row += part.rows
            on_step()
        if drafts:
            rows = config.draft_block_size
            step = builder.build(
                [rows] * len(parts),
                [part.start + part.accepted + rows for part in parts],
                V41Tables(tables.windows),
                len(parts),
                is_draft=True,
            )
            hidden = torch.cat([block_rows(config, first_request + part.request, hidden.device) for part in parts])
        for index in drafts:
            with record_calls() as recording:
                out, _ = layers[index](hidden, step, pools.v41_caches)
            calls[index] += recording.calls
            for part, block in zip(parts, out.split(config.draft_block_size), strict=True):
                outputs[index][part.request] = [block]
            on_step()

    def joined(parts: list[list[list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
        return [[torch.cat(x) for x in of_layer if x] for of_layer in parts]

    return StackResult(joined(outputs), joined(topk), joined(blocks), calls)


def block_rows(config: DeepseekV41Config, request: int, device: torch.device) -> torch.Tensor:
    """Hidden states of a request's blocks, seeded by its number: a block has no tokens yet."""
    generator = torch.Generator().manual_seed(request)
    rows = torch.randn(config.draft_block_size, config.hidden_size, generator=generator)
    return rms_normalize(rows).bfloat16().to(device)


def check_candidates(topk: Sequence[torch.Tensor], candidates: Sequence[torch.Tensor]) -> Check:
    """Every pick of the last rows of a request, which had candidates, lies in one of them."""
    bad = rows = 0
    for picks, blocks in zip(topk, candidates, strict=True):
        own = picks[len(picks) - len(blocks) :]
        inside = (torch.div(own, 8, rounding_mode="floor")[:, :, None] == blocks[:, None]).any(dim=2)
        bad += int((~inside & (own >= 0)).any(dim=1).sum())
        rows += len(blocks)
    return Check("picks lie in candidate blocks", bad == 0, f"{bad} of {rows} rows do not")


def cut_by_candidates(config: DeepseekV41Config, topk: Sequence[torch.Tensor]) -> tuple[int, int]:
    """(rows that see more blocks than are candidates, rows)."""
    most, cut = config.candidate_block_size * config.candidate_topk_blocks, 0
    for picks in topk:
        cut += int((visible_entries(picks.shape[0], 1, picks.device) > most).sum())
    return cut, sum(picks.shape[0] for picks in topk)


def count_steps(layers: int, requests: Sequence[Request], chunk: int, device: str) -> int:
    """Steps that `run_stack` takes, over all layers, of drafts one for a context and its block."""
    batch = sum(1 for _ in schedule(requests, chunk))
    return layers * (batch * (1 + (device == "cuda")) + len(requests))


def run_stack(
    layers: Sequence[DeepseekV41Attention],
    requests: Sequence[Request],
    *,
    chunk: int,
    device: str,
    seed: int,
    draft_context: DeepseekV41DraftContext | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[LayerReport]:
    """Run the batch through all layers and check each; requests lie on the layers' device.

    draft_context   with draft layers: what makes their context of hidden states
    """
    config, options = layers[0].config, layers[0].options
    builder = V41StepBuilder(config, options.max_num_tokens, options.max_model_len, device)
    how: dict[str, Any] = {"draft_context": draft_context, "on_step": on_step}
    draft = max(request.draft for request in requests)
    ring_rows = max(RING_ROWS, (draft + 2) // 2 * 2)

    def pools(reaches: list[int], number: int) -> V41Pools:
        return V41Pools(layers, reaches, ring_rows, device, seed + number)

    reaches = [request.reach for request in requests]
    # Kernels are loaded and autotuned before anything is recorded.
    warm_up = None
    if device == "cuda":
        warm_up = run_batch(layers, builder, requests, pools(reaches, 0), chunk, **how)
    paged = pools(reaches, 0)
    result = run_batch(layers, builder, requests, paged, chunk, **how)
    fresh = pools([request.length for request in requests], 1)
    alone = [
        run_batch(layers, builder, [r.one_shot()], fresh, max(r.length, 1), first_request=number, **how).outputs
        for number, r in enumerate(requests)
    ]
    reports = []
    for index, layer in enumerate(layers):
        outputs, topk = result.outputs[index], result.topk[index]
        mine, theirs = paged.of(layer.layer_index), fresh.of(layer.layer_index)
        checks = [
            check_finite(outputs),
            check_consistent(outputs, [of_request[index][0] for of_request in alone], device),
        ]
        if device == "cpu":
            checks.append(check_caches(mine, theirs, requests))
        checks.append(check_untouched(mine, theirs))
        truncated = restricted = None
        if layer.indexer is not None:
            checks.append(check_topk(topk, layer.compress_ratio))
            truncated = truncated_rows(topk, layer.compress_ratio)
            if layer.indexer.takes_candidates:
                checks.append(check_candidates(topk, result.candidates[index] or [x[:0] for x in topk]))
                restricted = cut_by_candidates(config, topk)
        if warm_up is not None:
            checks.append(check_repeatable(warm_up.outputs[index], outputs))
        name, rows = kind_name(config, layer.layer_index), summarize(result.calls[index])
        reports.append(LayerReport(layer.layer_index, name, rows, checks, truncated, None, [], restricted=restricted))
    return reports
