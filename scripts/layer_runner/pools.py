# SPDX-License-Identifier: Apache-2.0
"""The paged caches of a layer for a batch: pages handed out in random order, everything else poisoned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_kernels.layers import BlockTables, ContextParallel, DeepseekV4Config, LayerCaches
from cute_kernels.layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE, PagedCache
from cute_kernels.paging import entries_to_slots, expand_block_table

POISON = 0xFF
"""Every byte of a pool before its first use: NaN in bf16, fp32, e4m3 and ue8m0, so that a stray read shows."""
SPARE_PAGES = 3
"""Pages that belong to no request. Block tables name one of them past a request's last page."""


def raw_pages(cache: PagedCache) -> torch.Tensor:
    """The memory of a pool's pages, padding included, as uint8 [num_blocks, page stride]."""
    data = cache.data
    stride = data.stride(0) * data.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=data.device)
    raw.set_(data.untyped_storage(), 0, (data.shape[0], stride), (stride, 1))
    return raw


def page_table(
    reaches: Sequence[int], page_tokens: int, generator: torch.Generator, ranks: int = 1, rank: int = 0
) -> tuple[torch.Tensor, int]:
    """(block table int32 [R, width] of pages in random order, pages in all), for requests that reach so far. Of several
    ranks, rank r has pages r, r + ranks, ..."""
    counts = [-(-(-(-reach // page_tokens) - rank) // ranks) for reach in reaches]
    blocks = sum(counts) + SPARE_PAGES
    pages = torch.randperm(blocks, generator=generator).int()
    rows = pages[-1].repeat(len(counts), max(counts) + 1)
    for row, given in zip(rows, pages.split([*counts, SPARE_PAGES]), strict=False):
        row[: given.shape[0]] = given
    return rows, blocks


class Pools:
    """Caches and block tables of a batch.

    reaches   for each request, one past the last position it will write
    context   the ranks among which the requests' entries may be shared out
    """

    window: int | None = None
    """Tokens of the window, of ranks that need no more of the window cache."""

    def __init__(
        self,
        config: DeepseekV4Config,
        compress_ratio: int,
        reaches: Sequence[int],
        *,
        kv_cache: str,
        index_cache: str,
        device: str,
        seed: int,
        context: ContextParallel | None = None,
    ) -> None:
        self.compress_ratio, self.reaches = compress_ratio, list(reaches)
        if context is not None:
            self.window = config.sliding_window
        generator = torch.Generator().manual_seed(seed)

        def table(page_tokens: int, ranks: int = 1, rank: int = 0) -> tuple[torch.Tensor, int]:
            rows, blocks = page_table(self.reaches, page_tokens, generator, ranks, rank)
            return rows.to(device), blocks

        swa, swa_blocks = table(SWA_BLOCK_SIZE)
        compressed = state = None
        compressed_blocks = state_blocks = 0
        if compress_ratio > 1:
            ranks = (context.size, context.rank) if context is not None and context.is_sharded else (1, 0)
            compressed, compressed_blocks = table(KV_BLOCK_SIZE, *ranks)
            self._whole_table = expand_block_table(compressed, *ranks, ranks[0] * compressed.shape[1])
            state, state_blocks = table(STATE_BLOCK_SIZE[compress_ratio])
        self.tables = BlockTables(swa, compressed, state)
        self.caches = LayerCaches.allocate(
            config,
            compress_ratio,
            swa_blocks=swa_blocks,
            compressed_blocks=compressed_blocks,
            state_blocks=state_blocks,
            kv_cache=kv_cache,
            index_cache=index_cache,
            device=device,
        )
        for cache, _, _ in self.by_name().values():
            raw_pages(cache).fill_(POISON)

    def tables_of(self, requests: Sequence[int]) -> BlockTables:
        """The block tables of some requests, in the given order."""
        rows = torch.tensor(requests, device=self.tables.swa.device)
        compressed, state = self.tables.compressed, self.tables.state
        return BlockTables(
            self.tables.swa[rows],
            None if compressed is None else compressed[rows],
            None if state is None else state[rows],
        )

    def by_name(self) -> dict[str, tuple[PagedCache, torch.Tensor, int]]:
        """Every cache of the layer: (cache, its block table, tokens per row)."""
        c, t, ratio = self.caches, self.tables, self.compress_ratio
        whole = None if t.compressed is None else self._whole_table
        every = {
            "window cache": (c.swa, t.swa, 1),
            "compressed cache": (c.compressed, whole, ratio),
            "compressor state": (c.state, t.state, 1),
            "indexer cache": (c.indexer, whole, ratio),
            "indexer state": (c.indexer_state, t.state, 1),
        }
        return {
            name: (cache, table, tokens)
            for name, (cache, table, tokens) in every.items()
            if cache is not None and table is not None
        }

    def slots(self, name: str, request: int, start: int, stop: int) -> torch.Tensor:
        """Slots int64 of the rows start .. stop - 1 of a request in the named cache; -1: another rank's."""
        cache, table, _ = self.by_name()[name]
        entries = torch.arange(start, max(stop, start), device=table.device)
        return entries_to_slots(entries, torch.full_like(entries, request), table, cache.block_size)

    def live_rows(self, name: str, request: int, length: int) -> tuple[int, int]:
        """(first, last + 1): rows that a request of `length` tokens needs in order to go on.

        Of the compressor state these are the open group and, where groups overlap, the one before it. Of the window,
        all that one process wrote; ranks that share a context have those that are still in it.
        """
        ratio = self.compress_ratio
        if name.endswith("state"):
            return max(length // ratio * ratio - (ratio if ratio == 4 else 0), 0), length
        if name == "window cache" and self.window is not None:
            return max(length - self.window + 1, 0), length
        return 0, length // self.by_name()[name][2]

    def live_slots(self, name: str, request: int, length: int) -> torch.Tensor:
        """Slots int64 of a request's live rows."""
        return self.slots(name, request, *self.live_rows(name, request, length))

    def records(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """uint8 [rows, record]: the raw records of the named cache."""
        cache, _, _ = self.by_name()[name]
        return torch.cat(cache.kv_format.read_fields(cache.data, cache.block_size, slots), dim=1)

    def live_bytes(self, name: str, request: int, length: int) -> torch.Tensor:
        """The raw records of a request's live rows that this rank has, read through its block table."""
        slots = self.live_slots(name, request, length)
        return self.records(name, slots[slots >= 0])

    def stray_writes(self) -> list[str]:
        """Names of the caches in which a byte changed that belongs to no token of any request."""
        return [name for name in self.by_name() if not self._rest_is_poison(name)]

    def _rest_is_poison(self, name: str) -> bool:
        cache, table, tokens = self.by_name()[name]
        free = torch.ones(cache.data.shape[0] * cache.block_size, dtype=torch.bool, device=table.device)
        for request, reach in enumerate(self.reaches):
            slots = self.slots(name, request, 0, reach // tokens)
            free[slots[slots >= 0]] = False
        rest = cache.kv_format.read_fields(cache.data, cache.block_size, free.nonzero().squeeze(1))
        padding = raw_pages(cache)[:, cache.kv_format.page_bytes(cache.block_size) :]
        return all(bool((part == POISON).all()) for part in (*rest, padding))
