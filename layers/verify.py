# SPDX-License-Identifier: Apache-2.0
"""Does a whole attention layer on a GPU agree with the same layer on the CPU? For cute_kernels verify --layers."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.runtime.record import record_calls
from cute_kernels.runtime.registry import deployment_keys
from cute_kernels.runtime.verify import Verdict, describe

from .attention import AttentionOptions
from .caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE, LayerCaches
from .checkpoint import build_layer, random_layer_tensors
from .config import PRESETS, DeepseekV4Config
from .metadata import BlockTables, DeepseekV4MetadataBuilder

KINDS = {"layer SWA": 1, "layer C4A": 4, "layer C128A": 128}
STEPS = (90, 90, 20, 1, 1, 1)
"""Rows per step of one request: chunked prefill, then decode."""

TOLERANCE = {1: 0.05, 4: 0.1, 128: 0.05}
"""Relative error against the CPU by compress ratio: FP8 GEMMs on a GPU sum with few bits, which moves codes that are
quantized later and, with an indexer, a few selections."""


def keys(arch: str) -> list[Any]:
    """Kernels that verify_layer runs on an architecture."""
    return deployment_keys(_config(), 1, arch)


def _config() -> DeepseekV4Config:
    return PRESETS["v4-flash"].reduced()


def verify_layer(name: str, device: str = "cuda") -> Verdict:
    """Verdict of the layer kind `name` on `device`; ops without a kernel run their references, and are named."""
    start = time.perf_counter()
    ratio = KINDS[name]
    before = os.environ.get(FALLBACK_VARIABLE)
    os.environ[FALLBACK_VARIABLE] = "reference"
    try:
        want = _run(ratio, "cpu")
        with record_calls() as recording:
            got = _run(ratio, device)
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


def _run(ratio: int, device: str) -> torch.Tensor:
    """Outputs of one request, on the CPU."""
    config = _config()
    index = config.layer_of_kind(ratio)
    total = sum(STEPS)
    options = AttentionOptions(max_model_len=512, max_num_tokens=256)
    layer = build_layer(config, index, random_layer_tensors(config, index, 0), options=options, device=device)
    sizes = {"swa": SWA_BLOCK_SIZE, "compressed": KV_BLOCK_SIZE, "state": STATE_BLOCK_SIZE.get(ratio, 1)}
    pages = {group: -(-total // size) for group, size in sizes.items()}
    # page 0 stays unused, the others lie in reverse order
    tables = {
        group: torch.arange(count, 0, -1, dtype=torch.int32, device=device)[None] for group, count in pages.items()
    }
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
    hidden = torch.randn(total, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    outputs, done = [], 0
    for rows in STEPS:
        metadata = builder.build(ratio, [rows], [done + rows], block_tables, int(rows == 1))
        outputs.append(layer(metadata.positions, hidden[done : done + rows], metadata, caches))
        done += rows
    return torch.cat(outputs).cpu()
