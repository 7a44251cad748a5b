"""Records that the decode kernels share: query, paged caches, index lists, where results go, the tiles of a CTA."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64

from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla.logs import Logs


class TileScheduler(NamedTuple):
    """The work tiles of a CTA or cluster: numbers first, first + step ... below `end`. A work tile is a split of a
    query row's KV and a head group; head groups are next to each other, then splits, tokens, batches.

    tokens, head_groups, splits   divisors by the numbers of those
    split_tiles                   KV tiles of a split, or 0: a row's tiles are divided evenly
    """

    tokens: Any
    head_groups: Any
    splits: Any
    split_tiles: Any
    first: Any
    end: Any
    step: Any

    def coords(self, work_tile: Any) -> tuple[Any, Any, Any, Any]:
        """(batch, token, split_idx, head group) of a work tile."""
        rest, head_group = divmod(work_tile, self.head_groups)
        row, split_idx = divmod(rest, self.splits)
        batch, token = divmod(row, self.tokens)
        return batch, token, split_idx, head_group


class Query(NamedTuple):
    """q: address, strides in bytes, number of heads."""

    base: Any
    batch: Any
    token: Any
    head: Any
    heads: Any

    @classmethod
    def of(cls, q: cute.Tensor) -> Query:
        """On the host's side of the launch."""
        return cls(address(q), stride_bytes(q, 0), stride_bytes(q, 1), stride_bytes(q, 2), length(q, 2))

    def at(self, batch: Any, token: Any, head: Any) -> Any:
        """Address of a head's row."""
        return self.base + Int64(batch) * self.batch + Int64(token) * self.token + Int64(head) * self.head


class KVCache(NamedTuple):
    """Pages `page_stride` bytes apart, each of as many rows as `rows` divides by."""

    base: Any
    page_stride: Any
    pages: Any
    rows: Any

    @classmethod
    def of(cls, cache: cute.Tensor) -> KVCache:
        """On the host's side of the launch."""
        rows = cute.fast_divmod_create_divisor_v2(length(cache, 1))
        return cls(address(cache), stride_bytes(cache, 0), length(cache, 0), rows)


class IndexList(NamedTuple):
    """int32 [batch, token, columns]: topk indices, or a block table."""

    base: Any
    batch: Any
    token: Any
    columns: Any

    @classmethod
    def of(cls, indices: cute.Tensor) -> IndexList:
        """On the host's side of the launch."""
        return cls(address(indices), stride_bytes(indices, 0), stride_bytes(indices, 1), length(indices, 2))

    def row(self, batch: Any, token: Any) -> Any:
        return self.base + Int64(batch) * self.batch + Int64(token) * self.token


class Lengths(NamedTuple):
    """How many columns of a list count: address or 0 (all of them), strides in elements."""

    base: Any
    batch: Any
    token: Any


class KVSources(NamedTuple):
    """The cache with its list, and the extra one with its own; without one, these mean nothing."""

    cache: KVCache
    indices: IndexList
    lengths: Lengths
    extra_cache: KVCache
    extra_indices: IndexList
    extra_lengths: Lengths


class Output(NamedTuple):
    """out: address, strides of splits, batches, tokens and heads in bytes; lse by splits, batches, heads and tokens;
    number of heads. quant: where the results go instead as codes, their row being batch * tokens + token; or None."""

    base: Any
    strides: Any
    lse: Logs
    heads: Any
    quant: Any = None
