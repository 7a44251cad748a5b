"""Records that the decode kernels share: query, paged caches, index lists, where results go, the tiles of a CTA."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla.logs import Logs, logs_of
from cute_kernels.sparse_mla.schedule import TILE

EXTRA = ("none", "listed", "dense")
"""How the extra list names its rows: there is none; by slot; by page (a block table)."""

MOST_COLUMNS = 2**31 - 2 * TILE
"""Of a list: the columns of a step that goes beyond the last one are still int32 numbers."""


class TileScheduler(NamedTuple):
    """The work tiles of a CTA or cluster: numbers first, first + step ... below `end`. A work tile is a split of a
    query row's KV and a head group; head groups are next to each other, then splits, tokens, batches.

    head_groups, splits, tokens   divisors by the numbers of those
    split_tiles                   KV tiles of a split, or 0: a row's tiles are divided evenly
    """

    first: Any
    end: Any
    step: Any
    head_groups: Any
    splits: Any
    tokens: Any
    split_tiles: Any

    @classmethod
    def of(cls, q: cute.Tensor, heads: int, splits: Any, split_tiles: Any, ctas: Any) -> TileScheduler:
        """All work tiles of a call whose CTAs have so many heads each. On the host's side of the launch."""
        divisor = cute.fast_divmod_create_divisor_v2
        head_groups, tokens = (length(q, 2) + (heads - 1)) // heads, length(q, 1)
        end = length(q, 0) * tokens * splits * head_groups
        return cls(Int32(0), end, ctas, divisor(head_groups), divisor(splits), divisor(tokens), split_tiles)

    def coords(self, work_tile: Any) -> tuple[Any, Any, Any, Any]:
        """(batch, token, split_idx, head group) of a work tile."""
        rest, head_group = divmod(work_tile, self.head_groups)
        row, split_idx = divmod(rest, self.splits)
        batch, token = divmod(row, self.tokens)
        return batch, token, split_idx, head_group

    def row(self, work_tile: Any) -> tuple[Any, Any]:
        """(number of the query row, batch * tokens + token, head group) of a work tile."""
        rest, head_group = divmod(work_tile, self.head_groups)
        row, _ = divmod(rest, self.splits)
        return row, head_group

    @cute.jit
    def columns(self, split_idx: Any, live: Any, extra_live: Any) -> tuple[Any, Any, Any, Any]:
        """(first, end, first, end): the columns of both lists that a split of a row has."""
        tiles = tiles_of(live)
        all_tiles = tiles + tiles_of(extra_live)
        first, end = Int32(0), all_tiles
        if self.split_tiles != 0:
            first = cutlass.min(split_idx * self.split_tiles, all_tiles)
            end = cutlass.min((split_idx + 1) * self.split_tiles, all_tiles)
        else:
            splits = Int64(self.splits.divisor)
            first = Int32(Int64(all_tiles) * split_idx // splits)
            end = Int32(Int64(all_tiles) * (split_idx + 1) // splits)
        return (
            cutlass.min(first, tiles) * TILE,
            cutlass.min(cutlass.min(end, tiles) * TILE, live),
            cutlass.max(first - tiles, Int32(0)) * TILE,
            cutlass.min(cutlass.max(end - tiles, Int32(0)) * TILE, extra_live),
        )


def tiles_of(columns: Any) -> Any:
    return (columns + (TILE - 1)) >> (TILE.bit_length() - 1)


class Query(NamedTuple):
    """q: address, strides in bytes, number of heads. norm: how a kernel that takes raw queries norms and rotates them;
    or None."""

    base: Any
    batch: Any
    token: Any
    head: Any
    heads: Any
    norm: Any = None

    @classmethod
    def of(cls, q: cute.Tensor, norm: Any = None) -> Query:
        """On the host's side of the launch."""
        return cls(address(q), stride_bytes(q, 0), stride_bytes(q, 1), stride_bytes(q, 2), length(q, 2), norm)

    def at(self, batch: Any, token: Any, head: Any) -> Any:
        """Address of a head's row."""
        return self.base + Int64(batch) * self.batch + Int64(token) * self.token + Int64(head) * self.head

    def left(self, head: Any, most: int) -> Any:
        """Heads of a work tile that begins with a head and has so many at most."""
        return cutlass.min(self.heads - head, Int32(most))


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
    """int32 [batch, token, columns], topk indices or a block table; and how many columns count: address of the lengths
    or 0 (all of them), their strides in elements."""

    base: Any
    batch: Any
    token: Any
    columns: Any
    lengths: Any
    lengths_batch: Any
    lengths_token: Any

    @classmethod
    def of(cls, indices: cute.Tensor, lengths: tuple[Any, Any, Any]) -> IndexList:
        """On the host's side of the launch."""
        strides = stride_bytes(indices, 0), stride_bytes(indices, 1)
        return cls(address(indices), *strides, length(indices, 2), *lengths)

    @classmethod
    def of_rows(cls, indices: cute.Tensor, lengths: tuple[Any, Any, Any], page_rows: Any) -> IndexList:
        """With a block table's columns counted in rows of its pages. page_rows: 1, or those. On the host's side."""
        columns = cutlass.min(Int64(length(indices, 2)) * Int64(page_rows), Int64(MOST_COLUMNS))
        return cls(address(indices), stride_bytes(indices, 0), stride_bytes(indices, 1), Int32(columns), *lengths)

    def row(self, batch: Any, token: Any) -> Any:
        return self.base + Int64(batch) * self.batch + Int64(token) * self.token

    @cute.jit
    def live(self, batch: Any, token: Any) -> Any:
        """Columns that a row has."""
        live = self.columns
        if self.lengths != 0:
            offset = Int64(batch) * Int64(self.lengths_batch) + Int64(token) * Int64(self.lengths_token)
            count = ptx.load_global_s32_in_order(self.lengths + offset * 4, is_shared=True)
            live = cutlass.min(cutlass.max(count, Int32(0)), live)
        return cute.arch.make_warp_uniform(live)


class KVSources(NamedTuple):
    """The cache with its list, and the extra one with its own; without one, these mean nothing."""

    cache: KVCache
    indices: IndexList
    extra_cache: KVCache
    extra_indices: IndexList


class Output(NamedTuple):
    """out: address, strides of splits, batches, tokens and heads in bytes; lse by splits, batches, heads and tokens;
    address of the sink, or 0; number of heads. quant: where the results go instead as codes, their row being
    batch * tokens + token; or None."""

    base: Any
    strides: Any
    lse: Logs
    sink: Any
    heads: Any
    quant: Any = None
    tokens: Any = None

    @classmethod
    def of(cls, out: cute.Tensor, lse: cute.Tensor, sink: Any) -> Output:
        """On the host's side of the launch."""
        strides = tuple(stride_bytes(out, axis) for axis in range(4))
        return cls(address(out), strides, logs_of(lse), sink, length(out, 3))
