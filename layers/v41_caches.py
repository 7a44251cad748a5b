# SPDX-License-Identifier: Apache-2.0
"""The paged caches of V4.1's attention layers: a window for each, entries and index keys for each source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cute_kernels import formats
from cute_kernels.formats import V41_KV_CACHES

from .caches import (
    INDEX_CACHES,
    SWA_BLOCK_SIZE,
    CompressorStateCache,
    DeepseekV4CompressedCache,
    DeepseekV4IndexerCache,
    DeepseekV4SWACache,
)
from .v41_config import DeepseekV41Config

ENTRY_BLOCK_SIZE = 128
"""Source tokens per page of entries and of index keys: 64 or 128 rows, of ratio 2 or 1."""
RING_ROWS = 8
"""Projections that a request's ring keeps, of ratio 2: at least one more than the drafts of a decode step, and even."""


@dataclass
class V41SourceCaches:
    """What a source stores, for all layers up to the next one. ring: projections of the last tokens, of ratio 2."""

    entries: DeepseekV4CompressedCache
    keys: DeepseekV4IndexerCache
    ring: CompressorStateCache | None = None


@dataclass
class V41Caches:
    """Caches of a model, or of some of its layers: windows by layer, the rest by source."""

    windows: dict[int, DeepseekV4SWACache]
    sources: dict[int, V41SourceCaches]

    @classmethod
    def allocate(
        cls,
        config: DeepseekV41Config,
        layers: Iterable[int] | None = None,
        *,
        window_blocks: int,
        entry_blocks: int = 0,
        rings: int = 0,
        ring_rows: int = RING_ROWS,
        kv_cache: str = "fp8_ds_mla",
        index_cache: str = "fp8",
        device: torch.device | str = "cpu",
    ) -> V41Caches:
        """Zeroed pools for some layers, by default all but the draft's.

        window_blocks   pages of 64 tokens of each window cache
        entry_blocks    pages of 128 source tokens of each source's entries, and of its keys
        rings           requests that may be in flight
        ring_rows       even, and more than the drafts of a step
        kv_cache        one of formats.V41_KV_CACHES; the model's own is "mxfp8_v41+nvfp4_v41"
        index_cache     "fp8" or "mxfp4"
        """
        if kv_cache not in V41_KV_CACHES:
            raise ValueError(f"V41Caches: kv_cache: expected one of {tuple(V41_KV_CACHES)}, got {kv_cache!r}")
        if index_cache not in INDEX_CACHES:
            raise ValueError(f"V41Caches: index_cache: expected one of {tuple(INDEX_CACHES)}, got {index_cache!r}")
        wanted = list(range(config.num_hidden_layers) if layers is None else layers)
        (mine, fmt), keys = V41_KV_CACHES[kv_cache], INDEX_CACHES[index_cache]
        ring = formats.compressor_state(formats.HEAD_DIM, 2)

        def source(layer: int) -> V41SourceCaches:
            ratio = config.compress_ratio_of(layer)
            rows = ENTRY_BLOCK_SIZE // ratio
            state = None
            if ratio == 2:
                state = CompressorStateCache(ring.allocate(rings, ring_rows, device), ring, ring_rows)
            return V41SourceCaches(
                DeepseekV4CompressedCache(fmt.allocate(entry_blocks, rows, device), fmt, rows),
                DeepseekV4IndexerCache(keys.allocate(entry_blocks, rows, device), keys, rows),
                state,
            )

        sources = {config.source_of(layer) for layer in wanted if config.compress_ratio_of(layer)}
        return cls(
            {
                layer: DeepseekV4SWACache(mine.allocate(window_blocks, SWA_BLOCK_SIZE, device), mine, SWA_BLOCK_SIZE)
                for layer in wanted
            },
            {layer: source(layer) for layer in sorted(sources)},
        )
