# SPDX-License-Identifier: Apache-2.0
"""The paged caches of a layer. Pools may be allocated here or handed in by an engine; block tables are the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker

from .config import COMPRESS_RATIOS, DeepseekV4Config

SWA_BLOCK_SIZE = 64
"""Tokens per page of the sliding-window cache."""
KV_BLOCK_SIZE = 256
"""Source tokens per page of the compressed and indexer caches; a page holds KV_BLOCK_SIZE // ratio rows."""
STATE_BLOCK_SIZE = {4: 4, 128: 8}
"""Tokens per page of the compressor state, by compress ratio."""

KV_CACHES = {"fp8_ds_mla": formats.FP8_DS_MLA, "bf16": formats.PLAIN_BF16, "fp8": formats.PLAIN_FP8}
INDEX_CACHES = {"fp8": formats.INDEXER_FP8, "mxfp4": formats.INDEXER_MXFP4}


@dataclass
class PagedCache:
    """A pool of pages: `data` [num_blocks, block_size, row] in `kv_format`; block_size counts rows."""

    data: torch.Tensor
    kv_format: Any
    block_size: int

    def __post_init__(self) -> None:
        self.kv_format.check(Checker(type(self).__name__), "data", self.data, self.block_size)


class DeepseekV4SWACache(PagedCache):
    """K rows of the last tokens, one per token, pages of 64."""


class DeepseekV4CompressedCache(PagedCache):
    """Compressed entries, one per 4 or 128 tokens, pages of 64 or 2 rows."""


class DeepseekV4IndexerCache(PagedCache):
    """Compressed indexer keys, one per 4 tokens, pages of 64 rows."""


class CompressorStateCache(PagedCache):
    """fp32 projections and scores of the last tokens, pages of 4 or 8 tokens."""


@dataclass
class LayerCaches:
    """All caches of one layer; which are present follows from its compress ratio."""

    swa: DeepseekV4SWACache
    compressed: DeepseekV4CompressedCache | None = None
    state: CompressorStateCache | None = None
    indexer: DeepseekV4IndexerCache | None = None
    indexer_state: CompressorStateCache | None = None

    @property
    def addresses(self) -> tuple[Any, ...]:
        """Where the caches lie, and as what: what is compiled and launched for them depends on nothing else."""
        caches = (self.swa, self.compressed, self.state, self.indexer, self.indexer_state)
        return tuple(
            [None if c is None else (c.data.data_ptr(), c.data.shape, c.data.stride(), c.kv_format.id) for c in caches]
        )

    @classmethod
    def allocate(
        cls,
        config: DeepseekV4Config,
        compress_ratio: int,
        *,
        swa_blocks: int,
        compressed_blocks: int = 0,
        state_blocks: int = 0,
        kv_cache: str = "fp8_ds_mla",
        index_cache: str = "fp8",
        device: torch.device | str = "cpu",
    ) -> LayerCaches:
        """Zeroed pools with the given numbers of pages. The indexer's two pools have as many pages as the main ones and
        share their block tables."""
        for name, value, choices in (
            ("compress_ratio", compress_ratio, COMPRESS_RATIOS),
            ("kv_cache", kv_cache, tuple(KV_CACHES)),
            ("index_cache", index_cache, tuple(INDEX_CACHES)),
        ):
            if value not in choices:
                raise ValueError(f"LayerCaches: {name}: expected one of {choices}, got {value!r}")
        fmt = KV_CACHES[kv_cache]
        swa = DeepseekV4SWACache(fmt.allocate(swa_blocks, SWA_BLOCK_SIZE, device), fmt, SWA_BLOCK_SIZE)
        if compress_ratio == 1:
            return cls(swa)
        rows = KV_BLOCK_SIZE // compress_ratio
        compressed = DeepseekV4CompressedCache(fmt.allocate(compressed_blocks, rows, device), fmt, rows)
        state_rows = STATE_BLOCK_SIZE[compress_ratio]

        def state(head_dim: int) -> CompressorStateCache:
            state_format = formats.compressor_state(head_dim, compress_ratio)
            return CompressorStateCache(
                state_format.allocate(state_blocks, state_rows, device), state_format, state_rows
            )

        if compress_ratio == 128:
            return cls(swa, compressed, state(config.head_dim))
        index = INDEX_CACHES[index_cache]
        indexer = DeepseekV4IndexerCache(index.allocate(compressed_blocks, rows, device), index, rows)
        return cls(swa, compressed, state(config.head_dim), indexer, state(config.index_head_dim))
