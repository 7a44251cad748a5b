# SPDX-License-Identifier: Apache-2.0
"""What sparse_mla_prefill_paged runs ahead of prefill's kernel, where rows are gathered first: one launch that makes
bf16 rows of what both caches have of the requests, and a list of rows for every query row.

    rows     [0, T + R (W - 1))         positions: request r's last q_r + W - 1, from row starts[r] + r (W - 1) on,
                                        starts counted from the first; so the key that is w positions behind the
                                        first of query row t's window is row t + r (W - 1) + w
             [..., + R E)               entries: E of each request, those that it has so far
    list     [picks | window]           of a query row, -1 what no page has; its length

T query rows of R requests; a window of W positions; E entries, what a row of the block table has room for. Where rows
are, and whom they belong to, so follows from the shapes of the call and the starts: no lengths are added up.

    CTAs     [lists | positions | entries]
    a warp   a segment of a list (groups * 32 * width columns), or `rows` neighbouring rows: lanes 0, 1 ... find where
             they are in the caches, then all lanes move one after the other (lanes and columns: kv_cache/record.py)

A row that no page has, or that no position or entry has, is left as it is: no list names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.paging import LANES, Batch, load_run, store_run, visible_entries
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache import record
from cute_kernels.runtime.arch import arch_number
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.kernel_args import fake_cache, fake_rows, fake_stream, fake_table, paged_sources
from cute_kernels.sparse_mla.params import PagedCache, PagedKV

WARPS = 4
"""Per CTA."""


class GatherPagedArgs(NamedTuple):
    """kv, indices, lengths: what prefill's kernel reads: rows, lists, and their lengths; all others as of PagedArgs."""

    kv: cute.Tensor
    indices: cute.Tensor
    lengths: Int64
    swa_cache: cute.Tensor
    swa_block_table: cute.Tensor
    compressed_cache: cute.Tensor
    compressed_block_table: cute.Tensor
    lists: Int64
    list_row: Int64
    columns: Int32
    compress_ratio: Int32
    starts: Int64
    seq_lens: Int64
    requests: Int32
    window_size: Int32
    stream: cuda.CUstream


class Rows(NamedTuple):
    """kv: address, bytes from row to row. Rows of positions, entries of a request."""

    base: Any
    row: Any
    positions: Any
    entries: Any


class Lists(NamedTuple):
    """Lists: address, bytes from list to list, how many; columns; address of their lengths."""

    base: Any
    row: Any
    rows: Any
    columns: Any
    lengths: Any


class Keys(NamedTuple):
    """Of a query row: its request, visible entries; columns that name entries, all of its columns. Of the request's
    entries the first row; what to add to a column of the window's for its position, and for its row."""

    request: Any
    visible: Any
    num_picks: Any
    count: Any
    first_entry: Any
    to_position: Any
    to_row: Any


@dataclass(frozen=True)
class GatherPagedKernel:
    """See GatherPagedArgs and GatherPagedKey."""

    key: GatherPagedKey

    @cute.jit
    def launch(self, args: GatherPagedArgs) -> None:
        key, kv = self.key, paged_sources(args)
        name = f"dequantize_and_gather_paged_{key.compressed}_c{key.width}r{key.rows}"
        self.kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        tokens, columns = length(args.indices, 0), length(args.indices, 2)
        entries = Int32(0)
        if const_expr(key.compressed != "none"):
            entries = kv.compressed.columns * length(args.compressed_cache, 1)
        positions = tokens + args.requests * (args.window_size - 1)
        cta_rows = WARPS * key.rows
        segments = cute.ceil_div(columns, key.segment)
        list_ctas = cute.ceil_div(tokens * segments, WARPS)
        position_ctas = cute.ceil_div(positions, cta_rows)
        kernel = self.kernel(
            kv,
            Rows(address(args.kv), stride_bytes(args.kv, 0), positions, entries),
            Lists(address(args.indices), stride_bytes(args.indices, 0), tokens, columns, args.lengths),
            cute.fast_divmod_create_divisor_v2(segments),
            cute.fast_divmod_create_divisor_v2(cutlass.max(entries, 1)),
            list_ctas,
            list_ctas + position_ctas,
        )
        ctas = list_ctas + position_ctas + cute.ceil_div(args.requests * entries, cta_rows)
        kernel.launch(
            grid=[ctas, 1, 1],
            block=[WARPS * LANES, 1, 1],
            stream=args.stream,
            use_pdl=key.has_dependency,
        )

    @cute.kernel
    def kernel(
        self,
        kv: PagedKV,
        rows: Rows,
        lists: Lists,
        segments: cute.FastDivmodDivisorV2,
        entries: cute.FastDivmodDivisorV2,
        list_ctas: Int32,
        entries_from: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        if const_expr(self.key.has_dependency):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if cta < list_ctas:
            row, segment = divmod(cta * WARPS + warp, segments)
            if row < lists.rows:
                self.write_list(kv, rows, lists, row, segment)
        elif cta < entries_from:
            self.gather_positions(kv, rows, ((cta - list_ctas) * WARPS + warp) * self.key.rows)
        else:
            if const_expr(self.key.compressed != "none"):
                self.gather_entries(kv, rows, entries, ((cta - entries_from) * WARPS + warp) * self.key.rows)

    # ---- lists

    @cute.jit
    def write_list(self, kv: PagedKV, rows: Rows, lists: Lists, row: Any, segment: Any) -> None:
        """A segment of a query row's list, and, with the first one, how long the list is."""
        key, batch, lane = self.key, kv.batch, cute.arch.lane_idx()
        first = segment * key.segment + lane * key.width
        steps = [first + group * (LANES * key.width) for group in range(key.groups)]
        picks = []
        if const_expr(key.compressed == "listed"):
            # on their way before the row's request is looked for
            start = kv.lists + Int64(row) * kv.list_row
            picks = [load_run(step < kv.columns, start + Int64(step) * 4, key.width) for step in steps]
        request = self.request_of(batch, row, 0)
        position = batch.position(row, request)
        num_picks, visible = Int32(0), Int32(0)
        if const_expr(key.compressed != "none"):
            visible = visible_entries(position, kv.ratio)
            num_picks = cutlass.min(visible, kv.columns)
        num_window = cutlass.min(position + 1, kv.window_size)
        count = num_picks + num_window
        ptx.store_global_s32(lists.lengths + Int64(row) * 4, count, (lane == 0) & (segment == 0))
        keys = Keys(
            request,
            visible,
            num_picks,
            count,
            rows.positions + request * rows.entries,
            position + 1 - count,
            row + (request + 1) * (kv.window_size - 1) - (num_window - 1) - num_picks,
        )
        if segment * key.segment < count:
            self.write_columns(kv, lists, row, segment * key.segment, steps, picks, keys)

    @cute.jit
    def write_columns(
        self, kv: PagedKV, lists: Lists, row: Any, first: Any, steps: Any, picks: Any, keys: Keys
    ) -> None:
        """A segment of a list. first: its first column; steps: the lane's of each group; picks: what they name."""
        key, entries, pages = self.key, [], []
        if const_expr(key.compressed != "none"):
            for group in range_constexpr(key.groups):
                for i in range_constexpr(key.width):
                    column = steps[group] + i
                    entry = picks[group][i] if const_expr(key.compressed == "listed") else column
                    is_named = (column < keys.num_picks) & (entry >= 0) & (entry < keys.visible)
                    entries.append(entry)
                    pages.append(self.look_up(kv.compressed, keys.request, entry, is_named)[0])
        for group in range_constexpr(key.groups):
            words = [Int32(-1)] * key.width
            if const_expr(key.compressed != "none"):
                own = slice(group * key.width, (group + 1) * key.width)
                words = [
                    ptx.value_below(page, kv.compressed.pages, keys.first_entry + entry)
                    for page, entry in zip(pages[own], entries[own], strict=True)
                ]
            end = first + (group + 1) * (LANES * key.width)
            # nearly all groups hold nothing but picks
            if end > keys.num_picks:
                columns = [steps[group] + i for i in range(key.width)]
                tail = [self.window_row(kv, keys, column) for column in columns]
                words = [(words[i] if columns[i] < keys.num_picks else tail[i]) for i in range(key.width)]
            place = lists.base + Int64(row) * lists.row + Int64(steps[group]) * 4
            store_run(place, words, (steps[group] < lists.columns) & (end - LANES * key.width < keys.count))

    def window_row(self, kv: PagedKV, keys: Keys, column: Any) -> Any:
        """The row of a column that names a position, -1 if there is none."""
        is_named = (column >= keys.num_picks) & (column < keys.count)
        page, _ = self.look_up(kv.window, keys.request, column + keys.to_position, is_named)
        return ptx.value_below(page, kv.window.pages, column + keys.to_row)

    # ---- rows

    @cute.jit
    def gather_positions(self, kv: PagedKV, rows: Rows, first: Any) -> None:
        """Rows from that number on, of positions."""
        batch, before = kv.batch, kv.window_size - 1
        row = first + cute.arch.lane_idx() % self.key.rows
        request = self.request_of(batch, row, before)
        is_known = (row < rows.positions) & (request < batch.requests)
        origin = ptx.load_global_s32_where(is_known, batch.starts, is_shared=True)
        begin, end, seq_len = self.facts(batch, request, is_known)
        own = Int64(row) - Int64(request) * Int64(before) - (Int64(begin) - Int64(origin))
        position = Int64(seq_len) - (Int64(end) - Int64(begin)) - Int64(before) + own
        is_own = (begin < end) & (own >= 0) & (position >= 0) & (position < Int64(seq_len))
        self.move(kv.window, rows, first, request, Int32(position) if is_own else Int32(-1), is_known & is_own)

    @cute.jit
    def gather_entries(self, kv: PagedKV, rows: Rows, entries: cute.FastDivmodDivisorV2, first: Any) -> None:
        """Entries from that number on, of all requests'."""
        request, entry = divmod(first + cute.arch.lane_idx() % self.key.rows, entries)
        is_known = request < kv.batch.requests
        begin, end, seq_len = self.facts(kv.batch, request, is_known)
        count, _ = divmod(cutlass.max(seq_len, 0), kv.ratio)
        is_own = is_known & (begin < end) & (entry < count)
        self.move(kv.compressed, rows, rows.positions + first, request, entry, is_own)

    def facts(self, batch: Batch, request: Any, is_known: Any) -> tuple[Any, Any, Any]:
        """Where a request's query rows begin and end, and its context."""
        offset = Int64(request) * 4
        places = batch.starts + offset, batch.starts + 4 + offset, batch.seq_lens + offset
        begin, end, seq_len = (ptx.load_global_s32_where(is_known, place, is_shared=True) for place in places)
        return begin, end, seq_len

    @cute.jit
    def move(self, cache: PagedCache, rows: Rows, first: Any, request: Any, number: Any, is_own: Any) -> None:
        """Rows from row `first` on: lane i has found the request and the number of the i-th, if it has one."""
        lane = cute.arch.lane_idx()
        page, inside = self.look_up(cache, request, number, is_own)
        is_there = (page >= 0) & (page < cache.pages)
        # of a row that is not there something is read that is
        start = cache.base + Int64(page) * cache.page_stride
        data = start + Int64(inside) * FP8_DS_MLA.data_bytes if is_there else rows.base
        scales = start + Int64(cache.rows.divisor) * FP8_DS_MLA.data_bytes + Int64(inside) * FP8_DS_MLA.scale_bytes
        scales = scales if is_there else rows.base
        offsets = record.Offsets.of(lane)
        loaded, stored = [], []
        for i in range_constexpr(self.key.rows):
            stored.append(cute.arch.shuffle_sync(Int32(is_there), i) != 0)
            places = cute.arch.shuffle_sync(data, i), cute.arch.shuffle_sync(scales, i)
            loaded.append(record.load(*places, lane, offsets))
        for i in range_constexpr(self.key.rows):
            target = rows.base + Int64(first + i) * rows.row
            record.store_loaded(target, lane, loaded[i], stored[i], self.key.arch)

    # ---- requests and pages

    @cute.jit
    def request_of(self, batch: Batch, number: Any, more: Any) -> Any:
        """The request of a lane's number, where request r has as many numbers as rows, and `more`; of what no request
        has, the last one, or what is none."""
        origin = ptx.load_global_s32_where(batch.requests > 1, batch.starts, is_shared=True)
        first, last = Int32(0), batch.requests - 1
        while first < last:
            middle = (first + last) >> 1
            start = ptx.load_global_s32_in_order(batch.starts + Int64(middle + 1) * 4, is_shared=True)
            is_behind = Int64(start) - Int64(origin) + Int64(middle + 1) * Int64(more) <= Int64(number)
            first = middle + 1 if is_behind else first
            last = last if is_behind else middle
        return first

    @cute.jit
    def look_up(self, cache: PagedCache, request: Any, number: Any, is_wanted: Any) -> tuple[Any, Any]:
        """(page, row of the page) of a request's position or entry; the page is -1 if it is not wanted, as one below 0
        must not be, or the table has no column for it."""
        column, inside = divmod(number, cache.rows)
        place = cache.table + Int64(request) * cache.table_row + Int64(column) * 4
        page = ptx.load_global_s32_where(is_wanted & (column < cache.columns), place, is_shared=True)
        return page, inside


@dataclass(frozen=True)
class GatherPagedKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    compressed   which entries count: "none", "all" that a row sees, or "listed"
    width        neighbouring columns of a lane: 4, or 1 where lists are not 16-byte aligned
    rows         per warp, asked for together
    groups       of 32 * width columns in a segment
    """

    kernel_name: ClassVar[str] = "sparse_mla.gather_paged"
    tuning: ClassVar[tuple[str, ...]] = ("rows", "groups")
    compressed: str
    width: int = 4
    rows: int = 2
    groups: int = 3

    @property
    def has_dependency(self) -> bool:
        return arch_number(self.arch) >= ptx.DEPENDENT_LAUNCH_ARCH

    @property
    def segment(self) -> int:
        return self.groups * LANES * self.width

    @property
    def instructions(self) -> tuple[str, ...]:
        wide = ("ld.global.64", *convert.e4m3_instructions(self.arch), "st.global.128")
        wide += ("griddepcontrol",) if self.has_dependency else ()
        return ("ld.global.128", *wide) if self.compressed == "listed" and self.width == 4 else wide

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        shape, strides = (cute.sym_int(), 1, cute.sym_int()), (cute.sym_int64(), cute.sym_int64(), 1)
        fakes = GatherPagedArgs(
            kv=fake_rows(),
            indices=make_fake_tensor(Int32, shape, stride=strides, assumed_align=16),
            lengths=Int64(0),
            swa_cache=fake_cache(cutlass.Uint8, FP8_DS_MLA.row_elements),
            swa_block_table=fake_table(),
            compressed_cache=fake_cache(cutlass.Uint8, FP8_DS_MLA.row_elements),
            compressed_block_table=fake_table(),
            lists=Int64(0),
            list_row=Int64(0),
            columns=Int32(0),
            compress_ratio=Int32(1),
            starts=Int64(0),
            seq_lens=Int64(0),
            requests=Int32(0),
            window_size=Int32(1),
            stream=fake_stream(),
        )
        return entry_point(GatherPagedKernel(self).launch, fakes)
