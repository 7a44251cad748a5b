# SPDX-License-Identifier: Apache-2.0
"""A small inference engine for tests: shuffled pages, recycled windows, chunked prefill, drafts, prefix forks.

Every page starts poisoned and is poisoned again when its tokens slide out of the window, so a layer that reads what it
must not read shows NaN or different bits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from layers import (
    PRESETS,
    AttentionOptions,
    BlockTables,
    DeepseekV4Config,
    DeepseekV4MetadataBuilder,
    LayerCaches,
    build_layer,
    linear,
    random_layer_tensors,
)
from layers.attention import DeepseekV4MultiHeadLatentAttentionWrapper
from layers.caches import KV_BLOCK_SIZE, STATE_BLOCK_SIZE, SWA_BLOCK_SIZE, PagedCache
from tests.helpers import raw_bytes

KINDS = (1, 4, 128)
NO_PAGE = -1_000_000
POISON = 0xFF
HEADS = 16 if torch.cuda.is_available() else 4
"""On the CPU, where a layer's time goes by its heads, two for each group of the output projection."""

CONFIG = replace(
    PRESETS["v4-flash"].reduced(), hidden_size=256, num_attention_heads=HEADS, q_lora_rank=128, o_lora_rank=128
)


_dequantize = linear.dequantize_weight


def _dequantized_once(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As linear.dequantize_weight, which a layer on the CPU calls anew in every step."""
    if torch.compiler.is_compiling():
        return _dequantize(weight, scale, dtype)
    made_of = dtype, weight._version, scale._version, scale.data_ptr()
    if getattr(weight, "made_of", None) != made_of:
        weight.made_of, weight.dequantized = made_of, _dequantize(weight, scale, dtype)  # type: ignore[attr-defined]
    return weight.dequantized  # type: ignore[attr-defined,no-any-return]


linear.dequantize_weight = _dequantized_once


def make_layer(
    ratio: int,
    *,
    config: DeepseekV4Config = CONFIG,
    seed: int = 0,
    quantized: bool = True,
    tensors: dict[str, torch.Tensor] | None = None,
    device: str = "cpu",
    **options: Any,
) -> DeepseekV4MultiHeadLatentAttentionWrapper:
    index = config.layer_of_kind(ratio)
    if tensors is None:
        tensors = random_layer_tensors(config, index, seed, quantized=quantized, wo_a_quantized=quantized)
    limits = {"max_model_len": 2048, "max_num_tokens": 2048, **options}
    return build_layer(config, index, tensors, options=AttentionOptions(**limits), device=device)


def hidden_rows(count: int, seed: int, config: DeepseekV4Config = CONFIG) -> torch.Tensor:
    return torch.randn(count, config.hidden_size, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass
class Request:
    """A request's page tables: logical page -> physical page, per cache group."""

    pages: dict[str, dict[int, int]] = field(default_factory=lambda: {"swa": {}, "compressed": {}, "state": {}})
    length: int = 0


class Engine:
    """Runs one layer for many requests. Groups: swa (64 tokens a page), compressed (256), state (4 or 8)."""

    def __init__(self, layer: DeepseekV4MultiHeadLatentAttentionWrapper, *, pages: int = 96, seed: int = 0) -> None:
        self.layer, self.ratio = layer, layer.compress_ratio
        self.tokens = {"swa": SWA_BLOCK_SIZE, "compressed": KV_BLOCK_SIZE, "state": STATE_BLOCK_SIZE.get(self.ratio, 1)}
        counts = {"swa": pages, "compressed": pages, "state": 16 * pages}
        options = layer.options
        self.device = layer.q_norm_weight.device
        self.caches = LayerCaches.allocate(
            layer.config,
            self.ratio,
            swa_blocks=counts["swa"],
            compressed_blocks=counts["compressed"],
            state_blocks=counts["state"],
            kv_cache=options.kv_cache,
            index_cache=options.index_cache,
            device=self.device,
        )
        self.builder = DeepseekV4MetadataBuilder(
            layer.config, options.max_num_tokens, options.max_model_len, self.device
        )
        self.pools: dict[str, list[PagedCache]] = {
            "swa": [self.caches.swa],
            "compressed": [c for c in (self.caches.compressed, self.caches.indexer) if c is not None],
            "state": [c for c in (self.caches.state, self.caches.indexer_state) if c is not None],
        }
        self.free: dict[str, list[int]] = {}
        for group, count in counts.items():
            self.free[group] = list(range(count))
            random.Random(seed + len(group)).shuffle(self.free[group])
            for cache in self.pools[group]:
                raw_bytes(cache.data).fill_(POISON)

    def _poison(self, group: str, page: int) -> None:
        for cache in self.pools[group]:
            cache.kv_format.pages(cache.data, cache.block_size)[page].fill_(POISON)

    def _grow(self, request: Request, upto: int) -> None:
        for group, tokens in self.tokens.items():
            if self.pools[group]:
                first = request.length // tokens
                for logical in range(first, -(-upto // tokens)):
                    if logical not in request.pages[group]:
                        request.pages[group][logical] = self.free[group].pop()

    def _recycle(self, request: Request, restart: int) -> None:
        """Give back the pages that no step starting at `restart` or later can read."""
        state_from = 4 * (restart // 4) - 4 if self.ratio == 4 else 128 * (restart // 128)
        keep_every = self.layer.options.keep_every
        for group, oldest in (("swa", restart - self.layer.config.sliding_window + 1), ("state", state_from)):
            tokens = self.tokens[group]
            for logical in [p for p in request.pages[group] if (p + 1) * tokens <= oldest]:
                if group == "state" and keep_every and (logical + 1) * tokens % keep_every == 0:
                    continue
                page = request.pages[group].pop(logical)
                self._poison(group, page)
                self.free[group].insert(0, page)

    def _table(self, group: str, requests: list[Request]) -> torch.Tensor | None:
        if not self.pools[group]:
            return None
        width = max([max(r.pages[group], default=0) + 1 for r in requests], default=1) + 2
        table = torch.full((len(requests), width), NO_PAGE, dtype=torch.int32)
        for row, request in enumerate(requests):
            for logical, page in request.pages[group].items():
                table[row, logical] = page
        return table.to(self.device)

    def step(
        self,
        decodes: list[tuple[Request, torch.Tensor]],
        prefills: list[tuple[Request, torch.Tensor]] = [],  # noqa: B006 (never mutated)
        *,
        restart: list[int] | None = None,
        recycle: bool = True,
        capture: dict[str, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Feed hidden rows to each request from its current length on; returns each request's output rows.

        restart   per request, the smallest position it may continue from (default: what the metadata assumes)
        """
        work = decodes + prefills
        requests = [r for r, _ in work]
        counts = [len(rows) for _, rows in work]
        starts = [r.length for r in requests]
        for request, count in zip(requests, counts, strict=True):
            self._grow(request, request.length + count)
        swa = self._table("swa", requests)
        assert swa is not None
        tables = BlockTables(swa, self._table("compressed", requests), self._table("state", requests))
        metadata = self.builder.build(
            self.ratio,
            counts,
            [s + c for s, c in zip(starts, counts, strict=True)],
            tables,
            len(decodes),
            min_restart=None if restart is None else torch.tensor(restart, dtype=torch.int32, device=self.device),
        )
        hidden = torch.cat([rows for _, rows in work]) if work else hidden_rows(0, 0, self.layer.config)
        hidden = hidden.to(self.device)
        out = self.layer(metadata.positions, hidden, metadata, self.caches, capture=capture)
        for number, request in enumerate(requests):
            request.length = starts[number] + counts[number]
            if recycle:
                default = starts[number] if number < len(decodes) else request.length
                self._recycle(request, default if restart is None else restart[number])
        return list(out.split(counts))

    def rewind(self, request: Request, length: int) -> None:
        """Forget tokens from `length` on (rejected drafts): their rows are overwritten by the next step."""
        request.length = length

    def fork(self, request: Request, at: int) -> Request:
        """A new request that continues `request` from position `at`, a multiple of 256, on copies of its pages."""
        other = Request(length=at)
        for group, tokens in self.tokens.items():
            for logical, page in request.pages[group].items():
                if (logical + 1) * tokens <= at and self.pools[group]:
                    copy = self.free[group].pop()
                    other.pages[group][logical] = copy
                    for cache in self.pools[group]:
                        cache.data[copy] = cache.data[page]
        return other

    def entries(self, request: Request, count: int | None = None) -> list[torch.Tensor]:
        """Raw bytes of the request's compressed entries: one tensor per field of the main and the indexer cache."""
        entries = request.length // self.ratio if count is None else count
        result = []
        for cache in self.pools["compressed"]:
            table = request.pages["compressed"]
            slots = [table[e // cache.block_size] * cache.block_size + e % cache.block_size for e in range(entries)]
            result += cache.kv_format.read_fields(
                cache.data, cache.block_size, torch.tensor(slots, dtype=torch.int64, device=self.device)
            )
        return result

    def window(self, request: Request) -> list[torch.Tensor]:
        """Raw bytes of the window's rows, as far as the request still owns them."""
        cache, table = self.caches.swa, request.pages["swa"]
        first = max(request.length - self.layer.config.sliding_window + 1, 0)
        slots = [table[p // 64] * 64 + p % 64 for p in range(first, request.length)]
        return list(
            cache.kv_format.read_fields(
                cache.data, cache.block_size, torch.tensor(slots, dtype=torch.int64, device=self.device)
            )
        )


def same_bytes(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))
