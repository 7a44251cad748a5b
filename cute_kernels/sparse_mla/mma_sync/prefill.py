# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill, sparse_mla_mixed and sparse_mla_prefill_paged by mma.sync, on every architecture from sm_80 on.

One kernel, with a class for each way to name rows of KV. A CTA of eight warps takes work tiles
(params.PrefillScheduler), a query row and 16, 32 or 64 of its heads, and goes through their keys in steps. Q and O stay
in registers for a work tile. The warps are head groups times column groups: a warp has 32 heads (16 if there are no
more) and 128 columns (64, if one head group has all heads) in both products. All warps have the same role. A step:

    indices  gmem --> lanes: index, page, row of a key --+     (Producer, one and two steps ahead of the rows)
    KV       gmem --cp.async--> stages ------------------+     (stages - 1 steps ahead of the products)
                                  | bf16 already, or all warps convert: stage --> tile
             CTA barrier          v
    Q (registers) --------------tile---mma--> shares of S, by column group (shared memory)
             barrier of the head group          | a warp for every 8 heads adds them up
                                                v softmax: row_max, row_sum, P (shared memory), factors of O
             barrier of the head group          |
                                tile---mma------+--> O (registers) --by factors--> out

So a tile is read twice per head group. Columns of Q K^T are summed in an order of our own: a lane has 16 neighbouring
ones of a row, so that it reads them 16 bytes at a time, and no two lanes from the same bank. Lane l of a warp has, with
r = l // 4 and c = l % 4:

    q[m][slab][s]   operand a of rows 16 m .. and, of the warp's slab, columns 16 c + 4 s .. + 3
    o[m][n]         four sums: rows 16 m + r and 8 further, columns 8 n + 2 c and + 1

Shared memory, in this order:

    stages    what rows are copied to, by step: tiles if all caches are bf16, else raw rows
      tile      [8 slabs][keys][64] bf16; chunk c of 16 bytes of key k lies at c ^ (k % 8)
      raw       [keys][576 or 1088] bytes of a row, [keys][8] scale bytes
    tile      where raw rows become a tile; nothing if stages are tiles
    shares    [head groups][column groups][row groups of a head group][keys / 8][32 lanes] two fp32: shares of Q K^T;
              a row group is 8 heads
    weights   [rows / 16][keys / 16][32 lanes][4] words: P as operand of the second product
    masks     [stages][keys] int32: 0 for a key that does not count, else one more than the number of its cache
    labels    [stages] int32: the work tile that the stage's keys belong to
    factors   [2][rows] fp32: by head, what O is multiplied with in this step, and at the end
    flags     [8] int32: by row group, whether one of the former is not 1
    rows      [row groups][32 lanes] two fp32: the maximum of the lane's row, and its part of the sum of the weights
    tops      [row groups][32 lanes] fp32: the largest score of the lane's row
    sinks     [128] fp32: by head of a row
    cursors   [8] cursors of the warps' producers
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, mma_sync, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.paging import Batch, matrix
from cute_kernels.dsl.reduce import exchange_in_quad, over_quad
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FORMATS as FORMATS_BY_ID
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, MXFP8_V41, NVFP4_V41, PLAIN_BF16, PLAIN_FP8, label_of
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla import kernel_args
from cute_kernels.sparse_mla.kernel_args import GatheredArgs, MixedArgs
from cute_kernels.sparse_mla.mma_sync.operands import (
    CHUNK,
    FLAG_BYTES,
    LANES,
    ROW_STATE,
    WARPS,
    any_grows,
    rescale,
    softmax,
    wide_chunk,
)
from cute_kernels.sparse_mla.params import (
    GatheredKV,
    KVCache,
    Logs,
    MixedKV,
    PrefillQuery,
    PrefillScheduler,
    fake_logs,
    logs_of,
    out_scale_of,
)

# ---- config

FORMATS = (PLAIN_BF16.id, FP8_DS_MLA.id, PLAIN_FP8.id, MXFP8_V41.id, NVFP4_V41.id)
HEADS = (16, 32, 64)
"""Of a work tile, by kernel; more heads than the last make two work tiles of a row."""

MAX_HEADS = 2 * HEADS[-1]
"""Of a row."""

SLAB = 64
SLABS = HEAD_DIM // SLAB
SLAB_ROW = 2 * SLAB

KEY_LANES = 8
"""Lanes that copy a key, 128 bytes at a time."""

KEYS_AT_ONCE = LANES // KEY_LANES
"""That a warp copies."""

COUNTED = LANES
"""Work tiles whose columns are counted at a time."""

CURSOR_BYTES = 16 + COUNTED * 16
"""Shared memory of a warp's cursor, see Producer."""

MOST_STAGES = 4


def group_heads(heads: int) -> int:
    """Heads of a work tile of a kernel for so many heads in all."""
    return next((count for count in HEADS if heads <= count), HEADS[-1])


def row_bytes(kv_format: str) -> int:
    """What is copied of a row; the scales of fp8_ds_mla apart, those of V4.1's own records with their codes."""
    if kv_format == FP8_DS_MLA.id:
        return FP8_DS_MLA.data_bytes
    return FORMATS_BY_ID[kv_format].page_bytes(1)


@dataclass(frozen=True)
class PrefillConfig:
    """Sizes of a CTA. keys is chosen as large as shared memory allows, then the number of stages.

    rows      heads of a work tile, one of HEADS
    formats   record format ids of the caches, one or two
    """

    arch: str
    rows: int
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rows not in HEADS:
            raise ValueError(f"heads: expected one of {HEADS}, got {self.rows}")
        for kv_format in self.formats:
            if kv_format not in FORMATS:
                raise ValueError(f"format: expected one of {FORMATS}, got {kv_format!r}")

    @property
    def is_direct(self) -> bool:
        """Whether rows are copied to where they are multiplied."""
        return all(kv_format == PLAIN_BF16.id for kv_format in self.formats)

    # ---- what a warp has ----

    @property
    def head_groups(self) -> int:
        return 2 if self.rows == HEADS[-1] else 1

    @property
    def shares(self) -> int:
        """Column groups."""
        return WARPS // self.head_groups

    @property
    def warp_rows(self) -> int:
        return self.rows // self.head_groups

    @property
    def tiles(self) -> int:
        """The same as tensor cores count them."""
        return self.warp_rows // 16

    @property
    def slabs(self) -> int:
        return SLABS // self.shares

    @property
    def groups(self) -> int:
        """Row groups: a warp for each does their softmax."""
        return self.rows // 8

    @property
    def group_flags(self) -> int:
        """Row groups of a head group."""
        return self.warp_rows // 8

    # ---- sizes, in bytes ----

    @property
    def keys(self) -> int:
        """Of a step."""
        return next(keys for keys in (64, 32, 16) if self._bytes(keys, 2) <= SMEM_BYTES[self.arch])

    @property
    def stages(self) -> int:
        fitting = (n for n in range(MOST_STAGES, 1, -1) if self._bytes(self.keys, n) <= SMEM_BYTES[self.arch])
        return next(fitting)

    @property
    def raw_row(self) -> int:
        """From one raw row to the next: an odd number of 64 bytes, so that two rows lie in different banks."""
        return max(row_bytes(kv_format) for kv_format in self.formats) // 128 * 128 + 64

    def _stage(self, keys: int) -> int:
        return keys * (SLABS * SLAB_ROW if self.is_direct else self.raw_row + FP8_DS_MLA.scale_bytes)

    def parts(self, keys: int, stages: int) -> dict[str, int]:
        """Bytes of everything in shared memory, in order."""
        return {
            "stages": stages * self._stage(keys),
            "tile": 0 if self.is_direct else keys * SLABS * SLAB_ROW,
            "shares": WARPS * self.warp_rows * keys * 4,
            "weights": self.rows * keys * 2,
            "masks": stages * keys * 4,
            "labels": 4 * MOST_STAGES,
            "factors": 2 * self.rows * 4,
            "flags": FLAG_BYTES,
            "rows": self.groups * ROW_STATE,
            "tops": self.groups * LANES * 4,
            "sinks": 4 * MAX_HEADS,
            "cursors": WARPS * CURSOR_BYTES,
        }

    def _bytes(self, keys: int, stages: int) -> int:
        return sum(self.parts(keys, stages).values())

    @property
    def smem_bytes(self) -> int:
        return self._bytes(self.keys, self.stages)

    def place(self, part: str) -> int:
        """Where it begins."""
        names = itertools.takewhile(lambda name: name != part, parts := self.parts(self.keys, self.stages))
        return sum(parts[name] for name in names)

    @property
    def stage_bytes(self) -> int:
        return self._stage(self.keys)

    @property
    def slab_bytes(self) -> int:
        return self.keys * SLAB_ROW

    @property
    def share_bytes(self) -> int:
        """Of one warp."""
        return self.warp_rows * self.keys * 4

    @property
    def group_bytes(self) -> int:
        """Of one row group in a warp's share."""
        return self.keys // 8 * LANES * 8

    @property
    def operand_bytes(self) -> int:
        """Of P, for 16 heads."""
        return self.keys // 16 * LANES * 16

    @property
    def scales_at(self) -> int:
        """In a stage."""
        return self.keys * self.raw_row


# ---- which rows a query row attends to
#
# A class for each way to name them. Columns that count are numbered from 0. What the methods load is under way when
# they return:
#
#     sources       of a kernel's arguments: what the others look into. On the host's side of the launch
#     count         of a lane's work tile, which may be none: four words, how many columns of its query row count and
#                   what else the next two need
#     load_index    of a column (is_live: whether it counts): a word of the lists
#     load_page     of that word: two words that name the row of the column
#     resolve_row   of those: address of the row, or any if there is none; address of its scale bytes; and one more than
#                   the number of its cache, or 0 if there is no such row
#
# What passes between the last three is held in registers through the products.


@dataclass(frozen=True)
class GatheredRows:
    """Rows of one buffer, by their numbers."""

    def sources(self, args: GatheredArgs) -> GatheredKV:
        return args.sources()

    @cute.jit
    def count(self, work_tile: Any, scheduler: PrefillScheduler, kv: Any) -> tuple[Any, Any, Any, Any]:
        row, is_wanted = scheduler.row(work_tile), work_tile < scheduler.end
        count = kv.columns
        if kv.lengths != 0:
            found = ptx.load_global_s32_where(is_wanted, kv.lengths + Int64(row) * 4)
            count = cutlass.max(cutlass.min(found, count), Int32(0))
        return count, Int32(0), Int32(0), Int32(0)

    @cute.jit
    def load_index(self, row: Any, column: Any, words: Any, is_live: Any, kv: Any) -> Any:
        return ptx.load_global_s32_where(is_live, kv.lists + Int64(row) * kv.list_row + Int64(column) * 4)

    def load_page(self, index: Any, column: Any, words: Any, is_live: Any, kv: Any) -> tuple[Any, Any]:
        return index, Int32(0)

    @cute.jit
    def resolve_row(self, index: Any, _: Any, kv: Any) -> tuple[Any, Any, Any]:
        exists = index >= 0 and index < kv.rows
        start = kv.base + Int64(index if exists else Int32(0)) * kv.row
        return start, start, Int32(exists)


def row_of(cache: KVCache, page: Any, row: Any, kv_format: str) -> tuple[Any, Any]:
    """Addresses of a row and of its scale bytes."""
    start = cache.base + Int64(page) * cache.page_stride
    scales = start
    if kv_format == FP8_DS_MLA.id:
        behind = Int64(cache.rows.divisor) * FP8_DS_MLA.data_bytes
        scales = start + behind + Int64(row) * FP8_DS_MLA.scale_bytes
    return start + Int64(row) * row_bytes(kv_format), scales


@cute.jit
def row_of_two(page: Any, row: Any, is_second: Any, caches: Any, formats: cutlass.Constexpr) -> tuple[Any, Any, Any]:
    """What `resolve_row` gives of row `row` of page `page`, if that page exists, of one of two caches."""
    pages = caches[1].pages if is_second else caches[0].pages
    exists = page >= 0 and page < pages
    known = page if exists else Int32(0)
    first, second = row_of(caches[0], known, row, formats[0]), row_of(caches[1], known, row, formats[1])
    start = second[0] if is_second else first[0]
    scales = second[1] if is_second else first[1]
    cache = Int32(2) if is_second else Int32(1)
    return start, scales, cache if exists else Int32(0)


@dataclass(frozen=True)
class MixedRows:
    """Rows of two caches by their slots, the window's columns first."""

    formats: tuple[str, ...]

    def sources(self, args: MixedArgs) -> MixedKV:
        return args.sources(KVCache.of)

    @cute.jit
    def count(self, work_tile: Any, scheduler: PrefillScheduler, kv: Any) -> tuple[Any, Any, Any, Any]:
        """The second word: the window's columns."""
        row, is_wanted = scheduler.row(work_tile), work_tile < scheduler.end
        found = ptx.load_global_s32_where(is_wanted, kv.lengths + Int64(row) * 4)
        position = kv.batch.position(row, kv.batch.search(row, is_wanted))
        window = cutlass.min(kv.window_size, position + 1)
        listed = cutlass.min(cutlass.max(found, kv.window_size), kv.columns) - kv.window_size
        count = window + listed if position >= 0 else Int32(0)
        return count, window, Int32(0), Int32(0)

    @cute.jit
    def load_index(self, row: Any, column: Any, words: Any, is_live: Any, kv: Any) -> Any:
        window = words[1]
        place = kv.window_size - window + column if column >= window else column
        return ptx.load_global_s32_where(is_live, kv.lists + Int64(row) * kv.list_row + Int64(place) * 4)

    def load_page(self, slot: Any, column: Any, words: Any, is_live: Any, kv: Any) -> tuple[Any, Any]:
        """The slot, and whether it is one of the second cache."""
        return slot, Int32(column >= words[1])

    @cute.jit
    def resolve_row(self, slot: Any, is_second: Any, kv: Any) -> tuple[Any, Any, Any]:
        known = cutlass.max(slot, Int32(0))
        first, second = divmod(known, kv.window.rows), divmod(known, kv.compressed.rows)
        page, row = second[0] if is_second != 0 else first[0], second[1] if is_second != 0 else first[1]
        caches = kv.window, kv.compressed
        return row_of_two(page if slot >= 0 else Int32(-1), row, is_second != 0, caches, self.formats)


class PagedArgs(NamedTuple):
    """sparse_mla_prefill_paged.

    q, window, window_table, compressed, compressed_table, entries, out, max_logits, lse
                 as the op's, the window's cache and table again if there is no other; the window's table also for
                 entries, if nothing lists them; strides of q, out and of pages are multiples of 16 bytes
    starts, seq_lens, requests
                 addresses of query_start_loc and seq_lens, number of requests
    ratio        tokens of a compressed entry
    sink, scale_log2, ctas
                 see kernel_args.PagedArgs
    """

    q: cute.Tensor
    window: cute.Tensor
    window_table: cute.Tensor
    compressed: cute.Tensor
    compressed_table: cute.Tensor
    entries: cute.Tensor
    out: cute.Tensor
    max_logits: cute.Tensor
    lse: cute.Tensor
    starts: Int64
    seq_lens: Int64
    requests: Int32
    window_size: Int32
    ratio: Int32
    sink: Int64
    scale_log2: Float32
    ctas: Int32
    stream: cuda.CUstream


class PagedSources(NamedTuple):
    """Two caches, the second the first again if there is one alone, and their block tables. Lists of entries: address,
    bytes from list to list, columns. Positions in the window; tokens of an entry as a divisor. Where the query rows
    are."""

    caches: Any
    tables: Any
    lists: Any
    list_row: Any
    columns: Any
    window_size: Any
    ratio: Any
    batch: Batch

    @classmethod
    def of(cls, args: PagedArgs) -> PagedSources:
        """On the host's side of the launch."""
        return cls(
            (KVCache.of(args.window), KVCache.of(args.compressed)),
            (matrix(args.window_table), matrix(args.compressed_table)),
            address(args.entries),
            stride_bytes(args.entries, 0),
            length(args.entries, 1),
            args.window_size,
            cute.fast_divmod_create_divisor_v2(args.ratio),
            Batch(args.starts, args.seq_lens, args.requests),
        )


COMPRESSED = ("none", "all", "listed")
"""Which compressed entries count: there are none, all that a row sees, those that lists name."""


@dataclass(frozen=True)
class PagedRows:
    """Rows of two paged caches by what they hold: the window's positions, in order, then compressed entries."""

    formats: tuple[str, ...]
    compressed: str

    def sources(self, args: PagedArgs) -> PagedSources:
        return PagedSources.of(args)

    @cute.jit
    def count(self, work_tile: Any, scheduler: PrefillScheduler, kv: Any) -> tuple[Any, Any, Any, Any]:
        """The other words: the window's columns, the position, the request."""
        row, is_wanted = scheduler.row(work_tile), work_tile < scheduler.end
        request = kv.batch.search(row, is_wanted)
        position = kv.batch.position(row, request)
        window = cutlass.min(kv.window_size, position + 1)
        entries = Int32(0)
        if const_expr(self.compressed != "none"):
            entries, _ = divmod(position + 1, kv.ratio)
            if const_expr(self.compressed == "listed"):
                entries = cutlass.min(entries, kv.columns)
            else:
                mapped = Int64(kv.tables[1].columns) * Int64(kv.caches[1].rows.divisor)
                entries = Int32(ptx.min_s64(mapped, Int64(entries)))
        count = window + entries if position >= 0 else Int32(0)
        return count, window, position, request

    @cute.jit
    def load_index(self, row: Any, column: Any, words: Any, is_live: Any, kv: Any) -> Any:
        """An entry, of what is listed."""
        entry = Int32(-1)
        if const_expr(self.compressed == "listed"):
            number = column - words[1]
            listed = kv.lists + Int64(row) * kv.list_row + Int64(number) * 4
            entry = ptx.load_global_s32_where(is_live and number >= 0, listed)
        return entry

    @cute.jit
    def load_page(self, listed: Any, column: Any, words: Any, is_live: Any, kv: Any) -> tuple[Any, Any]:
        """A page, and the row of the page: with a sign if the cache is the second one."""
        _, window, position, request = words
        # one load for both caches: what it gives is not looked at here
        table, pages = kv.tables[0].row(request), kv.tables[0].columns
        number, place = self.split(position + 1 - window + column, is_live and column < window, 0, kv)
        if const_expr(self.compressed != "none"):
            is_second = is_live and column >= window
            entry = column - window
            if const_expr(self.compressed == "listed"):
                visible, _ = divmod(position + 1, kv.ratio)
                entry = listed if listed < visible else Int32(-1)
            second, behind = self.split(entry, is_second and entry >= 0, 1, kv)
            table = kv.tables[1].row(request) if is_second else table
            pages = kv.tables[1].columns if is_second else pages
            number, place = second if is_second else number, -1 - behind if is_second else place
        # as an unsigned number, -1 is past all pages
        return ptx.load_element_s32(table, number, pages), place

    @cute.jit
    def split(self, entry: Any, is_wanted: Any, which: cutlass.Constexpr, kv: Any) -> tuple[Any, Any]:
        """(number of the page or -1, row of the page) of an entry of a cache."""
        number, row = divmod(entry if is_wanted else Int32(0), kv.caches[which].rows)
        return number if is_wanted else Int32(-1), row

    @cute.jit
    def resolve_row(self, page: Any, place: Any, kv: Any) -> tuple[Any, Any, Any]:
        is_second = place < 0
        return row_of_two(page, -1 - place if is_second else place, is_second, kv.caches, self.formats)


# ---- producer

NAMED = 12
"""Place of the last word of a cursor."""


@dataclass(frozen=True)
class Producer:
    """A warp's way through the CTA's steps, and its copies.

    A step is `config.keys` columns of a work tile, and columns that count are numbered, whatever cache they name: there
    are as few steps as there can be. The warp goes through the steps of all work tiles of the CTA ahead of the
    products: by as many steps as there are stages, but one, with rows; by one step more with what names them, and by
    yet one more with what lists that, both of which lanes hold in registers. Work tiles without columns have no steps;
    what is in a stage says which work tile it belongs to.

    It keeps where it is in shared memory, at `cursor`, as O and Q leave no registers: four words, the work tile that it
    has reached, its first column that is not loaded yet, the work tile's number among those whose columns are counted,
    and the work tile of the step whose rows are named; then four words that `rows.count` says of each of those work
    tiles, the first of them how many columns count.

    rows      which rows a work tile has, see above; kv: what it looks into
    found     three registers: what names the row of the lane's key in the next step, see load_page; and what lists that
              of the step after it, see load_index
    smem      address of the CTA's shared memory
    """

    config: PrefillConfig
    rows: Any
    kv: Any
    scheduler: PrefillScheduler
    cursor: Any
    found: Any
    smem: Any

    @property
    def own_keys(self) -> int:
        """Keys of a step that a warp copies; of 16 keys some warps copy none."""
        return max(self.config.keys // WARPS, KEYS_AT_ONCE)

    @cute.jit
    def start(self, warp: Any, lane: Any) -> None:
        """Before the first work tile."""
        self.load_counts(self.scheduler.first, lane)
        self.store_cursor((self.scheduler.first, Int32(0), Int32(0), self.scheduler.end), lane)
        self.load_indices(warp, lane)
        self.load_pages(warp, lane)
        self.load_indices(warp, lane)

    @cute.jit
    def store_cursor(self, words: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_128(self.cursor, words)
        cute.arch.sync_warp()

    @cute.jit
    def load_counts(self, work_tile: Any, lane: Any) -> None:
        """Count the columns of that work tile and the 31 behind it: loading each in its time would take a long wait
        each time."""
        own = work_tile + lane * self.scheduler.step
        words = self.rows.count(own, self.scheduler, self.kv)
        cute.arch.sync_warp()
        ptx.store_shared_128(self.cursor + 16 + lane * 16, words)
        cute.arch.sync_warp()

    @cute.jit
    def load_indices(self, warp: Any, lane: Any) -> None:
        """Go to the next step there is, and load what lists its rows."""
        work_tile, column, number, named = ptx.load_shared_128(self.cursor)
        count = ptx.load_shared_s32(self.cursor + 16 + number * 16)
        while work_tile < self.scheduler.end and column >= count:
            work_tile, column, number = work_tile + self.scheduler.step, Int32(0), number + 1
            if number == COUNTED:
                self.load_counts(work_tile, lane)
                number = Int32(0)
            count = ptx.load_shared_s32(self.cursor + 16 + number * 16)
        words = ptx.load_shared_128(self.cursor + 16 + number * 16)
        own = column + self.own_key(warp, lane)
        is_live = work_tile < self.scheduler.end and own < count
        self.found[2] = self.rows.load_index(self.scheduler.row(work_tile), own, words, is_live, self.kv)
        self.store_cursor((work_tile, column + self.config.keys, number, named), lane)

    @cute.jit
    def load_pages(self, warp: Any, lane: Any) -> None:
        """Load what names the rows of the step whose indices were loaded last."""
        work_tile, column, number, _ = ptx.load_shared_128(self.cursor)
        words = ptx.load_shared_128(self.cursor + 16 + number * 16)
        own = column - self.config.keys + self.own_key(warp, lane)
        is_live = work_tile < self.scheduler.end and own < words[0]
        self.found[0], self.found[1] = self.rows.load_page(self.found[2], own, words, is_live, self.kv)
        self.store_cursor((work_tile, column, number, work_tile), lane)

    def own_key(self, warp: Any, lane: Any) -> Any:
        """The key of a step that a lane knows of; others of the warp know of the same."""
        return warp * self.own_keys + (lane & (self.own_keys - 1))

    @cute.jit
    def copy_async(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the named rows copied to a stage, and load what names and lists the next ones."""
        lane = ptx.again(lane)
        if const_expr(self.config.keys < WARPS * KEYS_AT_ONCE):
            if warp < self.config.keys // KEYS_AT_ONCE:
                self.copy_rows_async(stage, warp, lane)
        else:
            self.copy_rows_async(stage, warp, lane)
        cute.arch.cp_async_commit_group()
        self.load_pages(warp, lane)
        self.load_indices(warp, lane)

    @cute.jit
    def copy_rows_async(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the warp's keys copied to a stage, zeros for those that do not count."""
        config = self.config
        start, scales, cache = self.rows.resolve_row(self.found[0], self.found[1], self.kv)
        is_owner = lane < self.own_keys
        key = self.own_key(warp, lane)
        if is_owner:
            ptx.store_shared_s32(self.smem + config.place("masks") + (stage * config.keys + key) * 4, cache)
        if warp == 0 and lane == 0:
            work_tile = ptx.load_shared_s32(self.cursor + NAMED)
            ptx.store_shared_s32(self.smem + config.place("labels") + stage * 4, work_tile)
        target = self.smem + stage * config.stage_bytes
        if const_expr(FP8_DS_MLA.id in config.formats):
            size = const_expr(FP8_DS_MLA.scale_bytes)
            if is_owner:
                read = Int32(size) if cache != 0 else Int32(0)
                ptx.copy_async_or_zero(target + config.scales_at + key * size, scales, size, read)
        low, high = ptx.halves(start)
        for i in range_constexpr(self.own_keys // KEYS_AT_ONCE):
            owner = KEYS_AT_ONCE * i + (lane // KEY_LANES)
            source = ptx.pair(cute.arch.shuffle_sync(low, owner), cute.arch.shuffle_sync(high, owner))
            which = cute.arch.shuffle_sync(cache, owner)
            self.copy_key_async(target, warp * self.own_keys + owner, lane & (KEY_LANES - 1), source, which)

    @cute.jit
    def copy_key_async(self, stage: Any, key: Any, part: Any, source: Any, which: Any) -> None:
        """The lane's part of a key: every eighth chunk of its row, the row being `source`."""
        config = self.config
        read = Int32(CHUNK) if which != 0 else Int32(0)
        source = source + Int64(part * CHUNK)
        if const_expr(config.is_direct):
            target = stage + wide_chunk(key, part)
            for slab in range_constexpr(SLABS):
                ptx.copy_async_or_zero(target + slab * config.slab_bytes, source + slab * 128, CHUNK, read)
        else:
            target = stage + key * config.raw_row + part * CHUNK
            sizes = [row_bytes(kv_format) for kv_format in config.formats]
            size = Int32(sizes[0])
            if const_expr(sizes[0] != sizes[-1]):
                size = Int32(sizes[-1]) if which == len(sizes) else size
            whole, most = const_expr(min(sizes) // 128), const_expr(max(sizes))
            for i in range_constexpr(whole):
                ptx.copy_async_or_zero(target + i * 128, source + i * 128, CHUNK, read)
            for i in range_constexpr(whole, -(-most // 128)):
                if i * 128 + part * CHUNK < size:
                    ptx.copy_async_or_zero(target + i * 128, source + i * 128, CHUNK, read)


# ---- dequantization

NO_SCALE = 127
"""The ue8m0 byte of 1."""


def one_scale() -> Any:
    """The factor of codes that have no scale, in a register, as instructions take no immediate pair."""
    return ptx.again(convert.scale_pair(Int32(NO_SCALE), Int32(NO_SCALE)))


@cute.jit
def convert_step(stage: Any, tile: Any, masks: Any, warp: Any, lane: Any, config: cutlass.Constexpr) -> None:
    """Make bf16 of a step's raw rows: of a key, four lanes of some warps have four each. masks: of the stage."""
    groups = const_expr(WARPS * LANES // (4 * config.keys))
    own = const_expr(WARPS // groups)
    key = (warp % own) * 8 + (lane >> 2)
    slab = warp // own * (SLABS // groups)
    raw = stage + key * config.raw_row
    target = tile + wide_chunk(key, 2 * (lane & 3)) + slab * config.slab_bytes
    scales = stage + config.scales_at + key * FP8_DS_MLA.scale_bytes
    formats = const_expr(tuple(dict.fromkeys(config.formats)))
    if const_expr(len(formats) == 1):
        convert_slabs(raw, scales, target, slab, lane, formats[0], config)
    else:
        which = ptx.load_shared_s32(masks + key * 4)
        if which == 2:
            convert_slabs(raw, scales, target, slab, lane, config.formats[1], config)
        else:
            convert_slabs(raw, scales, target, slab, lane, config.formats[0], config)


@cute.jit
def convert_slabs(
    raw: Any, scales: Any, target: Any, slab: Any, lane: Any, kv_format: cutlass.Constexpr, config: cutlass.Constexpr
) -> None:
    """The lane's 16 columns of some slabs of its key, from number `slab` on."""
    count = const_expr(SLABS * 4 * config.keys // (WARPS * LANES))
    part = lane & 3
    if const_expr(kv_format == PLAIN_BF16.id):
        move_slabs(raw + slab * SLAB_ROW + part * (2 * CHUNK), target, count, config)
    elif const_expr(kv_format == PLAIN_FP8.id):
        codes = raw + slab * SLAB + part * CHUNK
        for _ in cutlass.range(count, unroll=2):
            store_values(target, convert.bf16_pairs_of_e4m3(ptx.load_shared_128(codes), [one_scale()]))
            codes += SLAB
            target += config.slab_bytes
    elif const_expr(kv_format == MXFP8_V41.id):
        codes = raw + slab * SLAB + part * CHUNK
        scale_at = raw + MXFP8_V41.data_bytes + slab * (SLAB // MXFP8_V41.quant_block) + (part >> 1)
        for _ in cutlass.range(count, unroll=2):
            store_values(target, scaled(ptx.load_shared_128(codes), ptx.load_shared_u8(scale_at)))
            codes += SLAB
            scale_at += SLAB // MXFP8_V41.quant_block
            target += config.slab_bytes
    elif const_expr(kv_format == NVFP4_V41.id):
        codes = raw + slab * (SLAB // 2) + part * (CHUNK // 2)
        scale_at = raw + NVFP4_V41.data_bytes + slab * (SLAB // NVFP4_V41.quant_block) + part
        for _ in cutlass.range(count, unroll=2):
            scale = convert.bf16x2_of_e4m3(ptx.load_shared_u8(scale_at))
            values = [value for word in ptx.load_shared_64(codes) for value in convert.bf16_of_e2m1(word)]
            store_values(target, [ptx.multiply_bf16x2(value, scale) for value in values])
            codes += SLAB // 2
            scale_at += SLAB // NVFP4_V41.quant_block
            target += config.slab_bytes
    else:
        coded = cutlass.min(Int32(SLABS - 1) - slab, Int32(count))
        codes = raw + slab * SLAB + part * CHUNK
        low, high = ptx.load_shared_64(scales)
        for i in cutlass.range(coded, unroll=2):
            number = slab + i
            byte = (low if number < 4 else high) >> ((number & 3) * 8) & 0xFF
            store_values(target, scaled(ptx.load_shared_128(codes), byte))
            codes += SLAB
            target += config.slab_bytes
        if coded < count:
            move_slabs(raw + (SLABS - 1) * SLAB + part * (2 * CHUNK), target, 1, config)


@cute.jit
def scaled(codes: Any, byte: Any) -> Any:
    """16 e4m3 codes as bf16 pairs, with the scale of that ue8m0 byte."""
    least = cutlass.min(byte, Int32(convert.LARGEST_SINGLE_SCALE))
    values = convert.bf16_pairs_of_e4m3(codes, [convert.scale_pair(least, least)])
    if byte > convert.LARGEST_SINGLE_SCALE:
        values = [ptx.multiply_bf16x2(value, convert.excess_pair(byte, byte)) for value in values]
    return values


@cute.jit
def move_slabs(source: Any, target: Any, count: cutlass.Constexpr, config: cutlass.Constexpr) -> None:
    """The same of columns that are bf16."""
    for _ in cutlass.range(count, unroll=2):
        store_values(target, [word for i in range(2) for word in ptx.load_shared_128(source + i * CHUNK)])
        source += SLAB_ROW
        target += config.slab_bytes


def store_values(target: Any, values: list[Any]) -> None:
    """Two chunks, the second of which lies where one bit of the first one's place is another."""
    ptx.store_shared_128(target, values[:4])
    ptx.store_shared_128(target ^ CHUNK, values[4:])


# ---- MMA: S, and O


@cute.jit
def load_query(q: Any, start: Any, row_bytes: Any, rows: Any, lane: Any, is_fp8: Any, config: Any) -> None:
    """The lane's operands, zeros for heads that do not exist. Of an e4m3 NaN they are NaN, so that it spoils its head.

    start   address of the warp's first head and column; rows: how many heads there are from it on
    """
    size = const_expr(1 if is_fp8 else 2)
    start = start + Int64(lane >> 2) * row_bytes + Int64((lane & 3) * (16 * size))
    for m in range_constexpr(config.tiles):
        for side in range_constexpr(2):
            row = 16 * m + 8 * side
            exists = row + (lane >> 2) < rows
            for slab in range_constexpr(config.slabs):
                at = start + row_bytes * row + slab * (SLAB * size)
                words = list(ptx.load_global_128_where(exists, at))
                if const_expr(is_fp8):
                    words = [pair for four in words for pair in convert.bf16x4_from_e4m3(four, Float32(1.0))]
                else:
                    words += ptx.load_global_128_where(exists, at + CHUNK)
                for i in range_constexpr(8):
                    place = ((m * config.slabs + slab) * 4 + i // 2) * 4 + i % 2 * 2 + side
                    q.put(place, words[i] if exists else Int32(0))


@cute.jit
def multiply_qk(q: Any, target: Any, keys: Any, lane: Any, config: cutlass.Constexpr) -> None:
    """Store the warp's share of Q K^T for a step.

    target   where the lane stores its share of row group 0 and keys 0 to 7
    keys     address of the warp's columns of key 0
    """
    at = keys + wide_chunk(lane >> 2, 2 * (lane & 3))
    other = at ^ CHUNK
    for _ in cutlass.range(config.keys // 16, unroll=2):
        sums: list[Any] = [()] * (2 * config.tiles)
        for slab in range_constexpr(config.slabs):
            offsets = [n * (8 * SLAB_ROW) + slab * config.slab_bytes for n in range(2)]
            words = [(*ptx.load_shared_128(at, offset), *ptx.load_shared_128(other, offset)) for offset in offsets]
            for s in range_constexpr(4):
                for n in range_constexpr(2):
                    for m in range_constexpr(config.tiles):
                        a = q.four(((m * config.slabs + slab) * 4 + s) * 4)
                        sums[2 * m + n] = mma_sync.multiply(a, words[n][2 * s : 2 * s + 2], sums[2 * m + n])
        for m in range_constexpr(config.tiles):
            for side in range_constexpr(2):
                for n in range_constexpr(2):
                    offset = (2 * m + side) * config.group_bytes + n * (LANES * 8)
                    ptx.store_shared_64(target, *sums[2 * m + n][2 * side : 2 * side + 2], offset=offset)
        at += 16 * SLAB_ROW
        other += 16 * SLAB_ROW
        target += 2 * LANES * 8


@cute.jit
def multiply_pv(o: Any, weights: Any, values: Any, lane: Any, config: cutlass.Constexpr) -> None:
    """o += P V for the warp's columns.

    weights   where the lane finds its words of P for the warp's rows 0 to 15 and keys 0 to 15
    values    address of the warp's columns of key 0
    """
    # a row of four 8 x 8 matrices: keys 8 (i % 2) .. and chunk i / 2 in matrix i
    at = values + (lane & 8) * SLAB_ROW + wide_chunk(lane & 7, lane >> 4)
    for _ in cutlass.range(config.keys // 16, unroll=2):
        a = [ptx.load_shared_128(weights, m * config.operand_bytes) for m in range(config.tiles)]
        for slab in range_constexpr(config.slabs):
            for j in range_constexpr(4):
                b = ptx.load_matrices_transposed(at ^ (2 * CHUNK * j), slab * config.slab_bytes)
                for i in range_constexpr(2):
                    for m in range_constexpr(config.tiles):
                        place = (m * (8 * config.slabs) + 8 * slab + 2 * j + i) * 4
                        mma_sync.accumulate(o.four(place), a[m], b[2 * i : 2 * i + 2])
        weights += LANES * 16
        at += 16 * SLAB_ROW


# ---- epilogue


class Results(NamedTuple):
    """Address of out and its strides in bytes; max_logits (None: nobody asks) and lse, by rows and heads; address of
    the sink, or 0; heads; and what out is multiplied with, or None."""

    out: Any
    row: Any
    head: Any
    max_logits: Any
    lse: Logs
    sink: Any
    heads: Any
    scale: Any

    @classmethod
    def of(cls, args: GatheredArgs | MixedArgs | PagedArgs) -> Results:
        """On the host's side of the launch."""
        out = args.out
        logs, scale = (None, args.scale) if isinstance(args, MixedArgs) else (logs_of(args.max_logits), None)
        strides = stride_bytes(out, 0), stride_bytes(out, 1)
        return cls(address(out), *strides, logs, logs_of(args.lse), args.sink, length(args.q, 1), scale)

    @cute.jit
    def store_logs(self, row: Any, head: Any, state: Any, top: Any, logit: Any, factor: Any, lane: Any) -> None:
        """Store what the logits of the lane's head come to.

        state    address of its maximum and of the lane's sum of weights; top: of its largest score
        logit    bits of its sink; means nothing if there is none
        factor   where in shared memory what O is multiplied with belongs
        """
        exists = head < self.heads
        row_max, row_sum = ptx.load_shared_f32x2(state)
        row_sum = over_quad(row_sum, operator.add)
        whole = out_scale_of(row_sum, row_max, logit, self.sink)
        if const_expr(self.scale is not None):
            whole = whole * self.scale
        ptx.store_shared_f32(factor, whole, lane & 3 == 0)
        lse = Float32(Float32.inf) if row_sum == Float32(0.0) else (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
        is_first = exists and lane & 3 == 0
        self.lse.store((row, head), lse, is_first)
        if const_expr(self.max_logits is not None):
            self.max_logits.store((row, head), ptx.load_shared_f32(top) * Float32(ptx.LN_2), is_first)

    @cute.jit
    def store_out(self, o: Any, target: Any, rows: Any, factors: Any, lane: Any, tiles: cutlass.Constexpr) -> None:
        """Store the warp's columns of its heads.

        o         Registers, see the head of this file
        target    address of the warp's first head and column; rows: how many heads there are from it on
        factors   address of what the first one's row of O is multiplied with
        tiles     of 16 heads
        """
        own = const_expr(o.count // tiles)
        at = target + Int64(lane >> 2) * self.head + Int64((lane & 3) * 16)
        for m in range_constexpr(tiles):
            for side in range_constexpr(2):
                row = 16 * m + 8 * side
                factor = ptx.load_shared_f32(factors + (row + (lane >> 2)) * 4)
                for i in range_constexpr(own // 16):
                    # 32 columns
                    first = m * own + i * 16 + 2 * side
                    sums = [o.get([first + 8 * j + k for k in (0, 1, 4, 5)]) for j in range(2)]
                    values = [word.bitcast(Float32) * factor for four in sums for word in four]
                    words = exchange_in_quad(lane, convert.bf16_words(values))
                    ptx.store_global_128(at + self.head * row + i * 64, words, row + (lane >> 2) < rows)


# ---- kernel


class PrefillKernel:
    """See kernel_args.GatheredArgs, kernel_args.MixedArgs, PagedArgs.

    rows      which rows a work tile has
    name      of the kernel
    is_fp8    whether q is e4m3, else it is bf16
    """

    def __init__(self, config: PrefillConfig, rows: Any, name: str, is_fp8: bool = False) -> None:
        self.config, self.rows, self.is_fp8 = config, rows, is_fp8
        self.name = f"{name}_portable_h{config.rows}"
        self.has_dependency = arch_number(config.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @cute.jit
    def launch(self, args: GatheredArgs | MixedArgs | PagedArgs) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        q = args.q
        group_bits = Int32(1) if length(q, 1) > self.config.rows else Int32(0)
        work_tiles = length(q, 0) << group_bits
        query = PrefillQuery(address(q), stride_bytes(q, 0), stride_bytes(q, 1), None)
        kernel = self.kernel(query, self.rows.sources(args), Results.of(args), args.scale_log2, work_tiles, group_bits)
        kernel.launch(
            grid=[cutlass.min(args.ctas, work_tiles), 1, 1],
            block=[WARPS * LANES, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
        )

    @cute.kernel
    def kernel(
        self, q: PrefillQuery, kv: Any, out: Results, scale_log2: Float32, work_tiles: Int32, group_bits: Int32
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane = thread & (LANES - 1)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        config = self.config
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(config.smem_bytes), byte_alignment=128)
        base = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        if thread < MAX_HEADS:
            logit = ptx.load_global_s32_where(out.sink != 0 and thread < out.heads, out.sink + Int64(thread) * 4)
            ptx.store_shared_s32(base + config.place("sinks") + thread * 4, logit)
        scheduler = PrefillScheduler(cta, work_tiles, ctas, group_bits)
        cursor = base + config.place("cursors") + warp * CURSOR_BYTES
        producer = Producer(config, self.rows, kv, scheduler, cursor, cute.make_rmem_tensor((3,), Int32), base)
        producer.start(warp, lane)
        for early in cutlass.range(config.stages - 1, unroll=1):
            producer.copy_async(early, warp, lane)

        steps = const_expr(config.tiles * config.slabs * 4)
        q_words, o = mma_sync.Registers("q", steps * 4), mma_sync.Registers("o", steps * 8)
        q_words.declare()
        o.declare()
        group = warp // config.shares
        self.wait_for_rows()
        stage: Any = Int32(0)
        work_tile = cta
        while work_tile < work_tiles:
            lane = own_lane()
            row, head = scheduler.coords(work_tile, config.rows)
            head = head + group * config.warp_rows
            column = warp % config.shares * (config.slabs * SLAB)
            size = const_expr(1 if self.is_fp8 else 2)
            start = q.base + Int64(row) * q.row + Int64(head) * q.head + column * size
            load_query(q_words, start, q.head, out.heads - head, lane, self.is_fp8, config)
            self.prefetch_queries(q, scheduler, work_tile + ctas, out.heads)
            o.clear()
            if warp < config.groups:
                state = base + config.place("rows") + warp * ROW_STATE + lane * 8
                least = Float32(-Float32.inf).bitcast(Int32)
                ptx.store_shared_64(state, least, Int32(0))
                ptx.store_shared_s32(base + config.place("tops") + (warp * LANES + lane) * 4, least)
            while ptx.load_shared_s32(base + config.place("labels") + stage * 4) == work_tile:
                self.step(producer, q_words, o, base, stage, scale_log2, warp)
                self.wait_for_rows()
                stage = Int32(0) if stage + 1 == config.stages else stage + 1
            self.finish(o, scheduler, work_tile, out, base, warp)
            work_tile += ctas

    @cute.jit
    def prefetch_queries(self, q: PrefillQuery, scheduler: PrefillScheduler, work_tile: Any, heads: Any) -> None:
        """L2 has a work tile's queries by the time they are wanted. On an H200, 2.5% less time at 640 keys a row."""
        line_bits = const_expr(2 if self.is_fp8 else 3)
        start = q.base + Int64(scheduler.row(work_tile)) * q.row
        _, first = scheduler.coords(work_tile, self.config.rows)
        for i in range_constexpr(-(-(self.config.rows << line_bits) // (WARPS * LANES))):
            line = ptx.thread_again() + i * (WARPS * LANES)
            own = line >> line_bits
            exists = work_tile < scheduler.end and own < self.config.rows and first + own < heads
            place = (line & ((1 << line_bits) - 1)) * 128
            ptx.prefetch_l2(start + Int64(first + own) * q.head + place, exists)

    @cute.jit
    def wait_for_rows(self) -> None:
        """All warps are done with the stage before the next one, whose rows are there for all of them."""
        cute.arch.cp_async_wait_group(self.config.stages - 2)
        cute.arch.sync_threads()

    @cute.jit
    def group_barrier(self, warp: Any) -> None:
        """The warps of the same heads wait for one another."""
        threads = const_expr(self.config.shares * LANES)
        cute.arch.barrier(barrier_id=1 + warp // self.config.shares, number_of_threads=threads)

    @cute.jit
    def step(self, producer: Producer, q: Any, o: Any, base: Any, stage: Any, scale_log2: Any, warp: Any) -> None:
        """Both products and the softmax of a step whose rows are in a stage."""
        config = self.config
        lane = own_lane()
        free = config.stages - 1 if stage == 0 else stage - 1
        tile = base + stage * config.stage_bytes
        masks = base + config.place("masks") + stage * (config.keys * 4)
        # of the two warps that share a quarter of the multiprocessor, one copies while the other one multiplies
        if warp < WARPS // 2:
            producer.copy_async(free, warp, lane)
        if const_expr(not config.is_direct):
            convert_step(tile, base + config.place("tile"), masks, warp, lane, config)
            tile = base + config.place("tile")
            cute.arch.sync_threads()
        group = warp // config.shares
        columns = tile + warp % config.shares * (config.slabs * config.slab_bytes)
        multiply_qk(q, base + config.place("shares") + warp * config.share_bytes + lane * 8, columns, lane, config)
        if warp >= WARPS // 2:
            producer.copy_async(free, warp, lane)
        self.group_barrier(warp)
        weights = base + config.place("weights") + lane * 16
        if warp < config.groups:
            place = warp // config.group_flags * (config.shares * config.share_bytes)
            place += warp % config.group_flags * config.group_bytes
            softmax(
                base + config.place("shares") + place + lane * 8,
                weights + (warp >> 1) * config.operand_bytes + (warp & 1) * 4,
                masks + (lane & 3) * 8,
                base + config.place("factors") + (warp * 8 + (lane >> 2)) * 4,
                base + config.place("flags") + warp * 4,
                scale_log2,
                base + config.place("rows") + warp * ROW_STATE + lane * 8,
                lane,
                config,
                base + config.place("tops") + (warp * LANES + lane) * 4,
            )
        self.group_barrier(warp)
        if any_grows(base + config.place("flags") + group * (config.group_flags * 4), config.group_flags) != 0:
            rescale(o, base + config.place("factors") + group * (config.warp_rows * 4), lane, config.tiles)
        multiply_pv(o, weights + group * (config.tiles * config.operand_bytes), columns, lane, config)

    @cute.jit
    def finish(self, o: Any, scheduler: PrefillScheduler, work_tile: Any, out: Results, base: Any, warp: Any) -> None:
        """Store the results of a work tile."""
        config = self.config
        lane = own_lane()
        row, head = scheduler.coords(work_tile, config.rows)
        factors = base + config.place("factors") + config.rows * 4
        # without steps in between, some warps may still read what the work tile before has left
        self.group_barrier(warp)
        if warp < config.groups:
            own = warp * 8 + (lane >> 2)
            state = base + config.place("rows") + warp * ROW_STATE + lane * 8
            top = base + config.place("tops") + (warp * LANES + lane) * 4
            logit = ptx.load_shared_s32(base + config.place("sinks") + (head + own) * 4)
            out.store_logs(row, head + own, state, top, logit, factors + own * 4, lane)
        self.group_barrier(warp)
        first = warp // config.shares * config.warp_rows
        column = warp % config.shares * (config.slabs * SLAB)
        target = out.out + Int64(row) * out.row + Int64(head + first) * out.head + column * 2
        out.store_out(o, target, out.heads - head - first, factors + first * 4, lane, config.tiles)


def own_lane() -> Any:
    """The thread's lane, computed anew: products leave no registers."""
    return ptx.thread_again() & (LANES - 1)


# ---- keys


@dataclass(frozen=True)
class PortableKey(KernelKey):
    """What the kernels of this file are known by, and something of their own.

    heads   of a work tile: 16, 32 or 64
    """

    heads: int = 64

    @property
    def formats(self) -> tuple[str, ...]:
        """Record format ids of the caches."""
        raise NotImplementedError

    @property
    def config(self) -> PrefillConfig:
        return PrefillConfig(self.arch, self.heads, self.formats)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return "mma.sync", "ldmatrix", "cp.async", "ex2", "ld.global.128", "st.global.128"


@dataclass(frozen=True)
class PortablePrefillKey(PortableKey):
    """What distinguishes one compiled kernel from another: the architecture and the heads of a work tile."""

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.prefill"

    @property
    def formats(self) -> tuple[str, ...]:
        return (PLAIN_BF16.id,)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        kernel = PrefillKernel(self.config, GatheredRows(), "sparse_mla_prefill")
        return entry_point(kernel.launch, kernel_args.fake_gathered())


@dataclass(frozen=True)
class PortableMixedKey(PortableKey):
    """What distinguishes one compiled kernel from another.

    kv_format   record format id of both caches, plain_bf16/1 or plain_fp8/1; query has the same elements
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.prefill_mixed"
    kv_format: str = PLAIN_BF16.id

    @property
    def formats(self) -> tuple[str, ...]:
        return self.kv_format, self.kv_format

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        is_fp8 = self.kv_format == PLAIN_FP8.id
        name = "sparse_mla_mixed" + ("_fp8" if is_fp8 else "")
        kernel = PrefillKernel(self.config, MixedRows(self.formats), name, is_fp8)
        return entry_point(kernel.launch, kernel_args.fake_mixed(Float8E4M3FN if is_fp8 else BFloat16))


@dataclass(frozen=True)
class PortablePagedKey(PortableKey):
    """What distinguishes one compiled kernel from another.

    compressed   the compressed entries that count: "none", "all" that a row sees, or "listed"
    format0      record format id of the window's cache: fp8_ds_mla/1, plain_bf16/1 or mxfp8_v41/1
    format1      of the compressed cache, which may be nvfp4_v41/1 too; format0 if there is none
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.prefill_paged"
    compressed: str = "listed"
    format0: str = FP8_DS_MLA.id
    format1: str = FP8_DS_MLA.id

    def __post_init__(self) -> None:
        if self.compressed not in COMPRESSED:
            raise ValueError(f"compressed: expected one of {COMPRESSED}, got {self.compressed!r}")

    @property
    def formats(self) -> tuple[str, ...]:
        return self.format0, self.format1

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def cache(kv_format: str) -> Any:
            if kv_format == PLAIN_BF16.id:
                return kernel_args.fake_cache(BFloat16)
            return kernel_args.fake_cache(Uint8, FORMATS_BY_ID[kv_format].row_elements)

        rows, table = kernel_args.fake_rows, kernel_args.fake_table
        tensors = (rows(), cache(self.format0), table(), cache(self.format1), table(), table())
        scalars = (Int64(0), Int64(0), Int32(0), Int32(1), Int32(1), Int64(0), Float32(0), Int32(1))
        results = (rows(), fake_logs(2), fake_logs(2))
        names = "_".join("bf16" if fmt == PLAIN_BF16.id else label_of(fmt) for fmt in self.formats)
        name = f"sparse_mla_prefill_paged_{self.compressed}_{names}"
        kernel = PrefillKernel(self.config, PagedRows(self.formats, self.compressed), name)
        return entry_point(kernel.launch, PagedArgs._make((*tensors, *results, *scalars, kernel_args.fake_stream())))
