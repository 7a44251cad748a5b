# SPDX-License-Identifier: Apache-2.0
"""What kernels share: records of the query, caches, index lists, where results go and the work tiles of a CTA; what
they agree on about softmax.

Those of decode first; from PrefillScheduler on, those of prefill's kernels, whose query rows have no batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.paging import Batch, visible_entries
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.schedule import MOST_DEALT, TILE

EXTRA = ("none", "listed", "dense")
"""How the extra list names its rows: there is none; by slot; by page (a block table)."""

MOST_COLUMNS = 2**31 - 2 * TILE
"""Of a list: the columns of a step that goes beyond the last one are still int32 numbers."""

FIRST_DEALT = -MOST_DEALT - 1
"""Numbers of dealt work tiles are negative, and so is where they end."""


class TileScheduler(NamedTuple):
    """The work tiles of a CTA or cluster: numbers first, first + step ... below `end`. A work tile is a split of a
    query row's KV and a head group; head groups are next to each other, then splits, tokens, batches.

    head_groups, splits, tokens   divisors by the numbers of those
    split_tiles                   KV tiles of a split, or 0: a row's tiles are divided evenly
    dealt                         None, or address in shared memory of int32 [1 + MOST_DEALT]: 0 if work is not dealt.
                                  Else numbers are places in it, counted from FIRST_DEALT, of numbers in the call, and
                                  its first word is where these places end. Nothing of that is kept in registers: roles
                                  have few, and the other fields are arguments of the launch or what the GPU knows
    """

    first: Any
    end: Any
    step: Any
    head_groups: Any
    splits: Any
    tokens: Any
    split_tiles: Any
    dealt: Any = None

    @classmethod
    def of(cls, q: cute.Tensor, heads: int, splits: Any, split_tiles: Any, ctas: Any) -> TileScheduler:
        """All work tiles of a call whose CTAs have so many heads each. On the host's side of the launch."""
        divisor = cute.fast_divmod_create_divisor_v2
        head_groups, tokens = (length(q, 2) + (heads - 1)) // heads, length(q, 1)
        end = length(q, 0) * tokens * splits * head_groups
        return cls(Int32(0), end, ctas, divisor(head_groups), divisor(splits), divisor(tokens), split_tiles)

    def coords(self, work_tile: Any) -> tuple[Any, Any, Any, Any]:
        """(batch, token, split_idx, head group) of a work tile."""
        rest, head_group = divmod(self.number(work_tile), self.head_groups)
        row, split_idx = divmod(rest, self.splits)
        batch, token = divmod(row, self.tokens)
        return batch, token, split_idx, head_group

    def row(self, work_tile: Any) -> tuple[Any, Any]:
        """(number of the query row, batch * tokens + token, head group) of a work tile."""
        rest, head_group = divmod(self.number(work_tile), self.head_groups)
        row, _ = divmod(rest, self.splits)
        return row, head_group

    def has(self, work_tile: Any) -> Any:
        """Whether there is one of that number."""
        end = self.end
        if self.dealt is not None:
            end = cutlass.select_(work_tile < 0, ptx.load_shared_s32(self.dealt), end)
        return work_tile < end

    def after(self, work_tile: Any) -> Any:
        """The number that comes next."""
        step = self.step
        if self.dealt is not None:
            step = cutlass.select_(work_tile < 0, Int32(1), step)
        return work_tile + step

    def begin(self) -> Any:
        """The first number."""
        first = self.first
        if self.dealt is not None:
            first = cutlass.select_(ptx.load_shared_s32(self.dealt) < 0, Int32(FIRST_DEALT), first)
        return first

    @cute.jit
    def number(self, work_tile: Any) -> Any:
        """The number in the call of a work tile."""
        if const_expr(self.dealt is not None):
            if work_tile < 0:
                work_tile = ptx.load_shared_s32(self.dealt + (work_tile - FIRST_DEALT + 1) * 4)
        return work_tile

    @cute.jit
    def tiles(self, split_idx: Any, tiles: Any) -> tuple[Any, Any]:
        """[first, end) of a row's `tiles` tiles: those of a split, fewer than 2^31 over its number."""
        first, _ = divmod(tiles * split_idx, self.splits)
        end, _ = divmod(tiles * (split_idx + 1), self.splits)
        if self.split_tiles != 0:
            first = cutlass.min(split_idx * self.split_tiles, tiles)
            end = cutlass.min(first + self.split_tiles, tiles)
        return first, end

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

    @cute.jit
    def columns_of(self, lists: Any, second: cutlass.Constexpr, batch: Any, token: Any, split_idx: Any) -> Any:
        """`columns`, of lists: see live_of_both."""
        return self.columns(split_idx, *live_of_both(lists, second, batch, token))

    @cute.jit
    def prefetch(
        self, work_tile: Any, lists: Any, second_cache: Any, second: cutlass.Constexpr, lane: Any, is_wanted: Any = None
    ) -> None:
        """L2 has the lengths and the first columns of a work tile by the time they are wanted. By a warp.

        is_wanted   None: if there is such a work tile
        """
        if const_expr(is_wanted is None):
            is_wanted = work_tile < self.end
        if is_wanted:
            batch, token, _, _ = self.coords(work_tile)
            for i in range_constexpr(1 if second == "none" else 2):
                columns = lists[i].columns
                if const_expr(i == 1 and second == "dense"):
                    columns, _ = divmod(columns, second_cache.rows)
                ptx.prefetch_l2(lists[i].row(batch, token) + lane * 128, lane * 32 < columns)
                offset = Int64(batch) * Int64(lists[i].lengths_batch) + Int64(token) * Int64(lists[i].lengths_token)
                ptx.prefetch_l2(lists[i].lengths + offset * 4, lists[i].lengths != 0 and lane == 0)


@cute.jit
def live_of_both(lists: Any, second: cutlass.Constexpr, batch: Any, token: Any) -> tuple[Any, Any]:
    """Columns that a row has in both lists. second: how the second one names its rows, one of EXTRA"""
    used, used_second = lists[0].live(batch, token), Int32(0)
    if const_expr(second != "none"):
        used_second = lists[1].live(batch, token)
    return used, used_second


def tiles_of(columns: Any) -> Any:
    return (columns + (TILE - 1)) >> (TILE.bit_length() - 1)


class QueryNorm(NamedTuple):
    """What raw queries are normed and rotated with. The norm has no weight: it is one factor for a head, which softmax
    multiplies scores with. Only the rotary columns are changed, in shared memory: rotated, not scaled.

    squares, row_stride   sums of squares, fp32 [query rows, heads * 4]: address, stride in bytes
    rotation              quant_output.Rotation
    """

    squares: Any
    row_stride: Any
    eps: Any
    rotation: Any


class Query(NamedTuple):
    """q: address, strides in bytes, number of heads. norm: QueryNorm of raw queries, or None."""

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

    def load_length(self, batch: Any, token: Any) -> Any:
        """The word that says how many columns a row has, or 0 if all of them count."""
        offset = Int64(batch) * Int64(self.lengths_batch) + Int64(token) * Int64(self.lengths_token)
        return ptx.load_global_s32_where(self.lengths != 0, self.lengths + offset * 4)

    def live_of(self, word: Any, columns: Any) -> Any:
        """How many of its columns a row with such a word has."""
        return cutlass.select_(self.lengths != 0, cutlass.max(cutlass.min(word, columns), Int32(0)), columns)

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

    @classmethod
    def of(cls, caches: Any, lists: Any, lengths: Any) -> KVSources:
        """Of two each, on the host's side of the launch. lengths: as of IndexList.of"""
        (cache, extra_cache), (indices, extra_indices) = (map(KVCache.of, caches), map(IndexList.of, lists, lengths))
        return cls(cache, indices, extra_cache, extra_indices)


class Logs(NamedTuple):
    """fp32 numbers of heads: their address, or 0 where nobody asks for them; strides in bytes, one for each axis."""

    base: Any
    strides: tuple[Any, ...]

    def of(self, *place: Any) -> Any:
        """Address of the number at a place, which has an index for each axis."""
        offsets = [Int64(index) * stride for index, stride in zip(place, self.strides, strict=True)]
        return reduce(lambda total, offset: total + offset, offsets, self.base)

    def store(self, place: tuple[Any, ...], number: Any, condition: Any) -> None:
        """Store a number, if the condition holds and somebody asks for it."""
        ptx.store_global_s32(self.of(*place), number.bitcast(Int32), condition & (self.base != 0))


def logs_of(tensor: cute.Tensor) -> Logs:
    """The kernel's argument. On the host's side of the launch."""
    return Logs(address(tensor), tuple(stride_bytes(tensor, axis) for axis in range(cute.rank(tensor))))


def fake_logs(axes: int) -> Any:
    """fp32 of any sizes and strides to compile for; what is launched may be empty, and then nothing is stored."""
    shape, strides = (tuple(make() for _ in range(axes)) for make in (cute.sym_int, cute.sym_int64))
    return make_fake_tensor(Float32, shape, stride=strides)


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


# ---- prefill

HEAD_GROUP = 64
"""Heads of a work tile."""


class PrefillScheduler(NamedTuple):
    """The work tiles of a CTA: numbers first, first + step ... below `end`. A work tile is a query row and a group of
    its heads; the groups of a row follow each other, and there are 1 << group_bits of them."""

    first: Any
    end: Any
    step: Any
    group_bits: Any

    def row(self, work_tile: Any) -> Any:
        """The query row of a work tile."""
        return work_tile >> self.group_bits

    def coords(self, work_tile: Any, heads: int = HEAD_GROUP) -> tuple[Any, Any]:
        """(query row, first head) of a work tile. heads: of a group."""
        row = self.row(work_tile)
        return row, (work_tile - (row << self.group_bits)) * heads


class PrefillQuery(NamedTuple):
    """q: address, strides in bytes, number of heads. Of raw queries, which are still to be normed and rotated: what is
    added to a head's mean square, or None; four sums of squares of each head, fp32 [rows, heads, 4]: address, bytes
    from row to row."""

    base: Any
    row: Any
    head: Any
    heads: Any
    norm_eps: Any = None
    squares: Any = None
    squares_row: Any = None

    @classmethod
    def of(cls, q: cute.Tensor, *norm: Any) -> PrefillQuery:
        """On the host's side of the launch."""
        return cls(address(q), stride_bytes(q, 0), stride_bytes(q, 1), length(q, 1), *norm)

    def left(self, head: Any, most: int = HEAD_GROUP) -> Any:
        """Heads of a work tile that begins with a head and has so many at most."""
        return cutlass.min(self.heads - head, most)


class PrefillOutput(NamedTuple):
    """out: address, strides in bytes of rows and heads; max_logits, or None, and lse by rows and heads; what to
    multiply out with, or None; L2's policy for out, or None; where splits of rows are combined, the address of the
    sink, or 0. quant: where the results go instead as codes, or None."""

    base: Any
    row: Any
    head: Any
    max_logits: Any
    lse: Any
    scale: Any = None
    policy: Any = None
    sink: Any = None
    quant: Any = None

    @classmethod
    def of(cls, out: cute.Tensor, max_logits: Any, lse: cute.Tensor, **more: Any) -> PrefillOutput:
        """On the host's side of the launch."""
        logits = None if max_logits is None else logs_of(max_logits)
        return cls(address(out), stride_bytes(out, 0), stride_bytes(out, 1), logits, logs_of(lse), **more)

    @classmethod
    def of_codes(cls, quant: Any, max_logits: cute.Tensor, lse: cute.Tensor) -> PrefillOutput:
        """On the host's side of the launch."""
        return cls(None, None, None, logs_of(max_logits), logs_of(lse), quant=quant)


STREAMED = 1 << 15
"""Heads of all rows, 1 KB of results each: of more than that L2 has lost the first before anybody reads them."""


@cute.jit
def output_policy(heads: Any) -> Any:
    """L2's policy for the results of so many heads of all rows: what it would lose anyway shall not push out kv."""
    return Int64(ptx.READ_ONCE) if heads > STREAMED else Int64(ptx.READ_AGAIN)


FLAG_BITS = 2
"""Of a tile's flags, those that are the kernel's: the KV may remember something in the bits above."""


class GatheredKV(NamedTuple):
    """kv: address, bytes from row to row, number of rows. Lists: address, bytes from list to list, columns. Columns
    that count: address of int32 [rows], or 0."""

    base: Any
    row: Any
    rows: Any
    lists: Any
    list_row: Any
    columns: Any
    lengths: Any

    @classmethod
    def of(cls, kv: cute.Tensor, indices: cute.Tensor, lengths: Any) -> GatheredKV:
        """On the host's side of the launch."""
        lists = address(indices), stride_bytes(indices, 0), length(indices, 2)
        return cls(address(kv), stride_bytes(kv, 0), length(kv, 0), *lists, lengths)

    @cute.jit
    def count(self, work_tile: Any, scheduler: PrefillScheduler, is_short: cutlass.Constexpr = False) -> Any:
        """Of a work tile's columns that count; of what is no work tile, anything."""
        count = self.columns
        if self.lengths != 0:
            row, _ = scheduler.coords(work_tile)
            found = ptx.load_global_s32_where(work_tile < scheduler.end, self.lengths + Int64(row) * 4)
            count = cutlass.max(cutlass.min(found, count), 0)
        return count

    def total(self, count: Any) -> Any:
        """The number of columns that `count` says count."""
        return count

    def column(self, number: Any, count: Any) -> Any:
        """Where the column is of that number among those that count."""
        return number

    def flags(self, number: Any, count: Any) -> Any:
        """What to remember of a tile whose first column has that number, in bits from FLAG_BITS on."""
        return Int32(0)

    @cute.jit
    def resolve_row(self, index: Any, flags: Any, row: Callable[[], Any], row_units: cutlass.Constexpr) -> Any:
        """Where the row of an index is, a number >= 0, or -1 if there is none.

        row        computes its number in the tile
        row_units  of MixedKV
        """
        return index if (index >= 0) & (index < self.rows) else Int32(-1)

    def address(self, place: Any, flags: Any, row: Any) -> Any:
        """Of what `resolve_row` found for a row of the tile; of -1, any."""
        return self.base + Int64(cutlass.max(place, 0)) * self.row


UNIT = 16
"""Bytes in which places in a cache are counted: as many as int32 has numbers for are 32 GiB."""

COUNT_BITS = 16
"""Of each of the two numbers that are packed into one."""


def row_units(dtype: Any) -> int:
    return HEAD_DIM * dtype.width // 8 // UNIT


class SlotCache(NamedTuple):
    """A paged cache whose rows are named by slot: address, number of rows, rows of a page as a divisor, and units
    between the end of a page and the next one."""

    base: Any
    rows: Any
    page_rows: Any
    gap: Any

    @classmethod
    def of(cls, cache: cute.Tensor) -> SlotCache:
        """A cache [pages, rows of a page, 512] with dense pages. On the host's side of the launch."""
        page_rows = length(cache, 1)
        gap = Int32(stride_bytes(cache, 0) // UNIT) - page_rows * row_units(cache.element_type)
        divisor = cute.fast_divmod_create_divisor_v2(page_rows)
        return cls(address(cache), length(cache, 0) * page_rows, divisor, gap)

    @cute.jit
    def offset(self, slot: Any, row_units: cutlass.Constexpr) -> Any:
        """Units from the base on to the row of a slot, -1 if the cache has no such row."""
        offset = slot * row_units + (slot // self.page_rows) * self.gap
        return offset if (slot >= 0) & (slot < self.rows) else Int32(-1)


class MixedKV(NamedTuple):
    """The caches, SlotCache or KVCache. Lists: address, bytes from list to list, columns, the first of them that name
    rows of the window's cache. Columns that count: address of int32 [rows], the window's included. Where the query rows
    are."""

    window: Any
    compressed: Any
    lists: Any
    list_row: Any
    columns: Any
    window_size: Any
    lengths: Any
    batch: Batch

    @classmethod
    def of(
        cls, window: Any, compressed: Any, indices: cute.Tensor, window_size: Any, lengths: Any, batch: Batch
    ) -> MixedKV:
        """On the host's side of the launch."""
        lists = address(indices), stride_bytes(indices, 0), length(indices, 1)
        return cls(window, compressed, *lists, window_size, lengths, batch)

    @cute.jit
    def count(self, work_tile: Any, scheduler: PrefillScheduler, is_short: cutlass.Constexpr = False) -> Any:
        """Of a work tile's columns that count, as two numbers in one: the window's, and the compressed ones. is_short:
        of registers"""
        row, _ = scheduler.coords(work_tile)
        is_row = work_tile < scheduler.end
        found = ptx.load_global_s32_where(is_row, self.lengths + Int64(row) * 4)
        position = self.batch.position(row, self.batch.search(row, is_row))
        window = cutlass.min(self.window_size, position + 1)
        compressed = cutlass.max(found, self.window_size) - self.window_size
        columns = ptx.again(self.columns) if const_expr(is_short) else self.columns
        compressed = cutlass.min(compressed, columns - self.window_size)
        return window | (compressed << COUNT_BITS) if position >= 0 else Int32(0)

    def total(self, count: Any) -> Any:
        return window_columns(count) + compressed_columns(count)

    @cute.jit
    def column(self, number: Any, count: Any) -> Any:
        behind = number - window_columns(count)
        return self.window_size + behind if behind >= 0 else number

    def flags(self, number: Any, count: Any) -> Any:
        """How many rows are the window's, of this tile and what follows."""
        return cutlass.max(window_columns(count) - number, 0) << FLAG_BITS

    @cute.jit
    def resolve_row(self, index: Any, flags: Any, row: Callable[[], Any], row_units: cutlass.Constexpr) -> Any:
        """Units from its cache's base on. row_units: of the caches"""
        # a name of its own: the compiler then merges what both branches do
        kv, place = self, Int32(-1)
        if row() < flags >> FLAG_BITS:
            place = kv.window.offset(index, row_units)
        else:
            place = kv.compressed.offset(index, row_units)
        return place

    @cute.jit
    def address(self, place: Any, flags: Any, row: Any) -> Any:
        base = self.window.base if row < flags >> FLAG_BITS else self.compressed.base
        return base + Int64(cutlass.max(place, 0)) * UNIT


def window_columns(count: Any) -> Any:
    """Of what MixedKV.count says."""
    return count & (1 << COUNT_BITS) - 1


def compressed_columns(count: Any) -> Any:
    """Of what MixedKV.count says."""
    return count >> COUNT_BITS & (1 << COUNT_BITS) - 1


class PagedCache(NamedTuple):
    """Pages `page_stride` bytes apart, of as many rows as `rows` divides by; a block table: address, bytes from row to
    row, columns."""

    base: Any
    page_stride: Any
    pages: Any
    rows: Any
    table: Any
    table_row: Any
    columns: Any

    @classmethod
    def of(cls, cache: cute.Tensor, table: cute.Tensor) -> PagedCache:
        """On the host's side of the launch."""
        return cls(*KVCache.of(cache), address(table), stride_bytes(table, 0), length(table, 1))


class PagedKV(NamedTuple):
    """Both caches. The window's positions. Entries: address of the lists that name them, bytes from list to list; 0:
    all visible ones in order. Most columns of them. Tokens of an entry, as a divisor. Where the query rows are. Where
    rows are split: splits, and KV tiles of a split, or 0 (schedule.split_range)."""

    window: PagedCache
    compressed: PagedCache
    window_size: Any
    lists: Any
    list_row: Any
    columns: Any
    ratio: Any
    batch: Batch
    splits: Any = None
    split_tiles: Any = None

    @cute.jit
    def keys_of(self, row: Any, is_row: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Of a query row: its request, visible entries, how many of them count, the first position of its window and
        the end of it. What is no row has none."""
        request = self.batch.search(row, is_row)
        position = self.batch.position(row, request) if is_row else Int32(-1)
        visible = visible_entries(position, self.ratio)
        compressed = cutlass.min(visible, self.columns)
        first = cutlass.max(position + 1 - self.window_size, 0)
        end = cutlass.min(position + 1, ptx.again(self.window.columns) * self.window.rows.divisor)
        return request, visible, compressed, first, end


# ---- softmax, while a kernel goes through the tiles of a row

RESCALE_THRESHOLD = 8.0
"""A head's running maximum moves when a score, in powers of two, is more than this above it: O is rarely rescaled,
and weights are at most 2^8."""

NEG_MAX = -3.0e38
"""The running maximum of nothing, where it is a number."""

LEAST_SCALE = 1e-37
"""What a scale of 0 becomes: the scores of what is skipped are infinite, and 0 times that is NaN."""


@cute.jit
def out_scale_of(row_sum: Any, row_max: Any, logit: Any, sink: Any) -> Any:
    """What to multiply a head's row of O with.

    row_sum   of its weights, relative to `row_max`, its running maximum
    logit     bits of its sink; means nothing if `sink` is 0
    """
    whole = row_sum
    if sink != 0:
        whole = row_sum + ptx.exp2(logit.bitcast(Float32) * Float32(ptx.LOG2_E) - row_max)
    return Float32(0.0) if row_sum == Float32(0.0) else ptx.reciprocal(whole)
