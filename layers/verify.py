# SPDX-License-Identifier: Apache-2.0
"""Do whole attention layers on a GPU agree with the same ones on the CPU? For cute_kernels verify --layers."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import torch

from cute_kernels.models import V41Shape
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from cute_kernels.runtime.registry import deployment_keys
from cute_kernels.runtime.verify import Verdict, describe

from .attention import AttentionOptions
from .caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE, LayerCaches
from .checkpoint import build_layer, random_layer_tensors
from .config import PRESETS, AttentionConfig, DeepseekV4Config
from .metadata import BlockTables, DeepseekV4MetadataBuilder
from .v41_caches import ENTRY_BLOCK_SIZE, RING_ROWS, V41Caches
from .v41_checkpoint import (
    build_v41_draft_context,
    build_v41_layer,
    random_v41_draft_context_tensors,
    random_v41_layer_tensors,
)
from .v41_config import DRAFT, V41_PRESETS, DeepseekV41Config
from .v41_layer import V41Options
from .v41_step import V41StepBuilder, V41Tables

V41_LAYERS = "layers V4.1"
KINDS = {"layer SWA": 1, "layer C4A": 4, "layer C128A": 128, V41_LAYERS: 0}
"""Compress ratios; of V4.1, whose layers share what they store, a layer of each kind at once."""

STEPS = (90, 90, 20, 1, 1, 1)
"""Rows per step of one request: chunked prefill, then decode."""

TOLERANCE = {1: 0.05, 4: 0.1, 128: 0.05, 0: 0.1}
"""Relative error against the CPU by compress ratio: FP8 GEMMs on a GPU sum with few bits, which moves codes that are
quantized later and, with an indexer, a few selections."""


def keys(arch: str) -> list[Any]:
    """Kernels that verify_layer runs on an architecture."""
    configs = _config(), V41Shape.of(_v41_config())
    return list(dict.fromkeys(key for config in configs for key in deployment_keys(config, 1, arch)))


def _config() -> DeepseekV4Config:
    return PRESETS["v4-flash"].reduced()


def _v41_config() -> DeepseekV41Config:
    return V41_PRESETS["v4.1-flash"].reduced()


def verify_layer(name: str, device: str = "cuda") -> Verdict:
    """Verdict of the layer kind `name` on `device`; ops without a kernel run their references, and are named."""
    start = time.perf_counter()
    ratio = KINDS[name]
    run = _run_v41 if name == V41_LAYERS else partial(_run, ratio)
    before = os.environ.get(FALLBACK_VARIABLE)
    os.environ[FALLBACK_VARIABLE] = "reference"
    try:
        want = run("cpu")
        with record_calls() as recording:
            got = run(device)
    except Exception as error:
        return Verdict(name, "fail", 0, describe(error), time.perf_counter() - start)
    finally:
        if before is None:
            del os.environ[FALLBACK_VARIABLE]
        else:
            os.environ[FALLBACK_VARIABLE] = before
    difference = float((got.double() - want.double()).norm() / want.double().norm())
    fits = bool(torch.isfinite(got).all()) and difference <= TOLERANCE[ratio]
    references = sorted({call.op for call in recording.calls if call.implementation == "reference"})
    detail = f"relative difference {difference:.2g}, at most {TOLERANCE[ratio]} allowed"
    if references:
        detail += f"; {len(references)} ops ran their references"
    return Verdict(name, "pass" if fits else "fail", len(STEPS), detail, time.perf_counter() - start)


def _tables(sizes: dict[str, int], tokens: int, device: str) -> tuple[dict[str, int], dict[str, torch.Tensor]]:
    """(pages that one request needs, its block table) by group of caches, whose pages have so many tokens. Page 0 stays
    unused, the others lie in reverse order."""
    pages = {group: -(-tokens // size) for group, size in sizes.items()}
    return pages, {
        group: torch.arange(count, 0, -1, dtype=torch.int32, device=device)[None] for group, count in pages.items()
    }


def _hidden(rows: int, config: AttentionConfig, device: str) -> torch.Tensor:
    return torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)


def _run(ratio: int, device: str) -> torch.Tensor:
    """Outputs of one request, on the CPU."""
    config = _config()
    index = config.layer_of_kind(ratio)
    total = sum(STEPS)
    options = AttentionOptions(max_model_len=512, max_num_tokens=256)
    layer = build_layer(config, index, random_layer_tensors(config, index, 0), options=options, device=device)
    sizes = {"swa": SWA_BLOCK_SIZE, "compressed": KV_BLOCK_SIZE, "state": STATE_BLOCK_SIZE.get(ratio, 1)}
    pages, tables = _tables(sizes, total, device)
    caches = LayerCaches.allocate(
        config,
        ratio,
        swa_blocks=pages["swa"] + 1,
        compressed_blocks=pages["compressed"] + 1,
        state_blocks=pages["state"] + 1,
        device=device,
    )
    block_tables = BlockTables(tables["swa"], tables["compressed"], tables["state"])
    builder = DeepseekV4MetadataBuilder(config, options.max_num_tokens, options.max_model_len, device)
    hidden = _hidden(total, config, device)
    outputs, done = [], 0
    for rows in STEPS:
        metadata = builder.build(ratio, [rows], [done + rows], block_tables, int(rows == 1))
        outputs.append(layer(metadata.positions, hidden[done : done + rows], metadata, caches))
        done += rows
    return torch.cat(outputs).cpu()


def _run_v41(device: str) -> torch.Tensor:
    """Outputs of all layers for one request, and of a block of each draft layer behind it, on the CPU. Each layer reads
    the same hidden states."""
    config, total = _v41_config(), sum(STEPS)
    block = config.draft_block_size
    indices = range(len(config.compress_ratios))
    options = V41Options(max_model_len=512, max_num_tokens=256)
    layers = [
        build_v41_layer(config, i, random_v41_layer_tensors(config, i, 0), options=options, device=device)
        for i in indices
    ]
    context = build_v41_draft_context(config, random_v41_draft_context_tensors(config, 0), device=device)
    pages, tables = _tables({"windows": SWA_BLOCK_SIZE, "entries": ENTRY_BLOCK_SIZE}, total + block, device)
    windows, entries = (count + 1 for count in pages.values())
    caches = V41Caches.allocate(config, indices, window_blocks=windows, entry_blocks=entries, rings=2, device=device)
    all_tables = V41Tables(**tables, rings=torch.ones(1, dtype=torch.int32, device=device))
    builder = V41StepBuilder(config, options.max_num_tokens, options.max_model_len, device)
    hidden = _hidden(total + block, config, device)
    outputs, done = [], 0
    for rows in STEPS:
        step = builder.build([rows], [done + rows], all_tables, int(rows == 1), ring_rows=RING_ROWS)
        states, selection = hidden[done : done + rows], None
        for layer in layers:
            if layer.kind == DRAFT:
                layer.store_context(context(torch.cat([states] * len(config.draft_target_layer_ids), 1)), step, caches)
            else:
                out, selection = layer(states, step, caches, selection)
                outputs.append(out)
        done += rows
    step = builder.build([block], [total + block], V41Tables(tables["windows"]), 1, is_draft=True)
    outputs += [layer(hidden[total:], step, caches)[0] for layer in layers if layer.kind == DRAFT]
    return torch.cat(outputs).cpu()
