# SPDX-License-Identifier: Apache-2.0
"""Runs a batch of requests through one layer, step by step."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from cute_kernels.layers import (
    ContextStep,
    ContextStepBuilder,
    DeepseekV4Metadata,
    DeepseekV4MetadataBuilder,
    DeepseekV4MultiHeadLatentAttentionWrapper,
)
from cute_kernels.layers.caches import KV_BLOCK_SIZE
from layer_runner.pools import Pools
from layer_runner.requests import Request, schedule


@dataclass(frozen=True)
class BatchResult:
    """What a run of the batch gave, rejected drafts left out.

    outputs    bf16 [T, hidden] of each request
    topk       int32 [T, K] of each request; empty without an indexer
    captured   intermediate tensors of the first request, [T, ...]; empty unless asked for
    """

    outputs: list[torch.Tensor]
    topk: list[torch.Tensor]
    captured: dict[str, torch.Tensor]


def entries_of_slots(slots: torch.Tensor, table: torch.Tensor, rows_per_page: int) -> torch.Tensor:
    """int32 entries of one request, by its block table, from slots of the cache; -1 stays, -2 where no page has one."""
    named = torch.div(slots, rows_per_page, rounding_mode="floor")[..., None] == table
    entries = named.int().argmax(dim=-1) * rows_per_page + slots % rows_per_page
    entries = torch.where(named.any(dim=-1), entries, -2)
    return torch.where(slots < 0, slots, entries).int()


Builder = DeepseekV4MetadataBuilder | ContextStepBuilder


def step_builder(layer: DeepseekV4MultiHeadLatentAttentionWrapper, device: str) -> Builder:
    """Of the steps that a layer takes."""
    options = layer.options
    limits = options.max_num_tokens, options.max_model_len
    if options.cp is not None:
        return ContextStepBuilder(layer.config, *limits, options.cp, device)
    return DeepseekV4MetadataBuilder(layer.config, *limits, device)


def run_batch(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper,
    builder: Builder,
    requests: Sequence[Request],
    pools: Pools,
    chunk: int,
    *,
    capture: bool = False,
    first_request: int = 0,
    on_step: Callable[[], None] = lambda: None,
) -> BatchResult:
    """Run all steps of the requests, whose block tables are the rows of `pools` from `first_request` on."""
    outputs: list[list[torch.Tensor]] = [[] for _ in requests]
    topk: list[list[torch.Tensor]] = [[] for _ in requests]
    captured: dict[str, list[torch.Tensor]] = {}
    for parts, decode_steps in schedule(requests, chunk):
        hidden = [requests[part.request].rows(part, step) for part, step in zip(parts, decode_steps, strict=True)]
        hidden_states = torch.cat(hidden)
        tables = pools.tables_of([first_request + part.request for part in parts])
        metadata = builder.build(
            layer.compress_ratio,
            [part.rows for part in parts],
            [part.start + part.rows for part in parts],
            tables,
            sum(step is not None for step in decode_steps),
        )
        step_capture: dict[str, torch.Tensor] | None = {} if capture else None
        picks = None if layer.indexer is None else layer.indexer.indexer_op.topk_indices_buffer
        if isinstance(metadata, ContextStep):
            own = metadata.own_rows(hidden_states)
            out = layer(metadata.positions, own, metadata, pools.caches)
            # in a context of its own, so that what is gathered only to be checked is not recorded
            out = contextvars.Context().run(metadata.whole_rows, out)
            if picks is not None:
                picks = contextvars.Context().run(metadata.whole_rows, picks[: metadata.num_tokens])
        else:
            out = layer(metadata.positions, hidden_states, metadata, pools.caches, capture=step_capture)
        row = 0
        for number, part in enumerate(parts):
            kept = slice(row, row + part.accepted)
            outputs[part.request].append(out[kept])
            if picks is not None:
                found = picks[kept].clone()
                has_slots = isinstance(metadata, DeepseekV4Metadata) and number < metadata.num_decodes
                if has_slots and layer.mla_attn.takes_slots and not capture:
                    assert tables.compressed is not None
                    found = entries_of_slots(found, tables.compressed[number], KV_BLOCK_SIZE // layer.compress_ratio)
                topk[part.request].append(found)
            if part.request == 0 and step_capture is not None:
                for name, value in step_capture.items():
                    captured.setdefault(name, []).append(value[kept].clone())
            row += part.rows
        on_step()
    return BatchResult(
        [torch.cat(x) for x in outputs],
        [torch.cat(x) for x in topk if x],
        {name: torch.cat(x) for name, x in captured.items()},
    )


def run_alone(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper,
    builder: Builder,
    requests: Sequence[Request],
    pools: Pools,
    *,
    on_step: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """Outputs of each request alone, its whole sequence as one prefill."""
    return [
        run_batch(
            layer, builder, [request.one_shot()], pools, request.length, first_request=number, on_step=on_step
        ).outputs[0]
        for number, request in enumerate(requests)
    ]
