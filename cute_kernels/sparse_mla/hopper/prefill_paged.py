# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill_paged on Hopper (fp8_ds_mla caches): both products by wgmma, KV dequantized on its way to them.

A CTA takes work tiles (params.PrefillScheduler): a query row and up to 64 of its heads. The keys of a row are numbered,
compressed entries first, then the window's positions, and come in tiles of 64. Warpgroups:

    0      QK and softmax     copies Q, S = Q K^T, softmax                                         QkSoftmax
    1, 2   PV and epilogue    O += P V of half of the columns each, out                            PvEpilogue
    3      producer           indices -> rows; copies of rows, fp8 -> bf16: K and V at once        IndexLoader, Producer

    indices  gmem --> row lists [8 tiles]: of a tile entries, then their pages, then addresses of rows
    KV       gmem --cp.async--> fp8 [1 tile] --converted by the lane that copied it--> KV ring [2 tiles, bf16, swizzled]
                                                                                         |                   |
    Q        gmem --cp.async--> q --ldmatrix--> registers (columns 0 to 255) --wgmma--+  |                   |
                                q (columns 256 to 511) -----------------------wgmma---+--+--> S              |
                                                                                              v softmax      |
                                                                                              p [2 tiles] --wgmma--> O
                                                                                                             |
    out      gmem <--------------------------------------------------------------- registers ----------------+

    ring     full                                                            empty
    kv       producer warps have stored the tile; an mbarrier of its own     PV warps of both warpgroups are done with
             for the first half of its columns                               it (QK is, as P is there)
    p        softmax threads have stored P and factors                       PV warps are done with them

There is one tile of fp8, no more: the copy of the next tile's slab starts as soon as that of this tile is converted.
Products begin when half of a tile's columns is there.

A tile's 512 columns are cut into slabs of 64; a slab of a tile is [64 keys, 128 bytes] of bf16, in the layout of the
128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8). perf/notes/prefill_paged.md has why,
perf/log/prefill_paged.md what was tried; prefill_paged_cluster.py splits rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import over_quad
from cute_kernels.dsl.tensor import length
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.hopper.prefill_index_loader import END, LAST
from cute_kernels.sparse_mla.hopper.prefill_softmax import (
    FACTOR,
    KEYS,
    P_BYTES,
    ROWS,
    SIDE,
    SLAB_BYTES,
    SLAB_ROW_BYTES,
    STEP,
    load_factors,
    load_q,
    load_sink,
    mask,
    multiply_pv,
    own_head,
    smem_layouts,
    softmax,
    store_logs,
    store_p,
    thread_idx,
    tiled_mmas,
)
from cute_kernels.sparse_mla.kernel_args import PagedArgs, fake_paged
from cute_kernels.sparse_mla.params import (
    NEG_MAX,
    PagedKV,
    PrefillOutput,
    PrefillQuery,
    PrefillScheduler,
)

# ---- config

SLAB = 64
SLABS = HEAD_DIM // SLAB
LAST_SLAB = SLABS - 1
"""The rotary columns."""

FIRST_HALF = SLABS // 2
"""Slabs of a tile that products begin with."""

HELD = 256
"""Columns of the queries in registers; the others stay in shared memory while the work tile lasts."""

STAGE_BITS = 1
KV_STAGES = 1 << STAGE_BITS

P_BITS = 1
P_STAGES = 1 << P_BITS

ROW_LISTS = 8
"""Of tiles. A producer warp looks after every fourth tile: it asks for the entries that the tile is made of four tiles
ahead, then for their pages, and two tiles ahead it publishes where the rows are. No warp is more than two tiles behind
another."""

PV, PRODUCER, WARPGROUPS = 1, 3, 4
"""Numbers of warpgroups, QK and softmax being 0: the first of two of PV, the producer; how many there are."""

THREADS = WARPGROUPS * 128
PRODUCER_WARPS = 4

SOFTMAX_REGISTERS, PV_REGISTERS, PRODUCER_REGISTERS = 128, 160, 64
"""Per thread, in steps of 8; all four warpgroups together have 512, what they are launched with. QK and softmax keeps
what it is launched with."""

Q_BARRIER, PV_BARRIER = 1, 2
"""Named barriers of the QK and softmax warpgroup, and of both PV warpgroups."""


# ---- shared memory

KV_STAGE_BYTES = SLABS * SLAB_BYTES

ROW_BYTES = FP8_DS_MLA.data_bytes
CODES = LAST_SLAB * SLAB
"""Of those the e4m3 codes."""

SCALES = 8
"""Bytes of a row's scales, the unused one included."""

OWN_ROWS = 16
"""Of a tile, or of a work tile's heads, by a warp."""

GROUP = 8
"""Rows that a warp converts at a time: four lanes have one."""

GROUPS = OWN_ROWS // GROUP

ROW_LIST = 816
SCALE_OFFSETS, TILE_AT, VALID_AT = 512, 768, 784
"""Bytes of a tile's row list, and where in it are, behind 64-bit addresses of its rows (before, their pages), 0 where
there is no such row: what to add for a row's scales (before, its entry, then which row of its page it is); flags of the
tile, how many rows from its first one on are compressed, the request, and how many entries are visible; a bit for each
row that is there."""

RECORDS = 32
RECORD = 32
"""Bytes of what a producer warp knows of a work tile: request, visible entries, how many of its keys are compressed,
how many there are in all; first position of the window."""

CURSOR = 16 + RECORDS * RECORD
"""Bytes of where a producer warp is: work tile, first column of its next tile, number of the work tile's record;
records."""

HEADER = 32
"""Bytes of a KV stage's header: of every 16 keys, which are there, and flags of the tile."""

NO_TILE = -1
"""Flags of a row list behind the CTA's last tile."""

TARGET = 8
"""Bytes of a tile's target: its flags and its work tile."""

SWIZZLED = ("kv", "q", "p")
"""What tensor cores read: 1024-byte aligned."""


BARRIERS = 3 * KV_STAGES + 2 * P_STAGES + ROW_LISTS


class Smem(NamedTuple):
    """Addresses in shared memory, 32 bits wide; by default sizes in bytes, see smem_parts.

    kv         [2 stages][8 slabs][64 keys][64] bf16: K, and V
    q          [4 slabs][64 heads][64] bf16: the last columns of the work tile's queries, for a while the first ones
    p          [2 stages][64 heads][64 keys] bf16
    fp8        [64 keys][448] e4m3
    scale      [4 warps][2 groups][32 lanes] 8 scale bytes of the lane's row
    row_list   [8] row lists
    cursor     [4 producer warps] where they are
    header     [2 stages] headers
    factor     [2 stages][64 heads] factors
    target     [2 stages] targets
    """

    kv: Any = KV_STAGES * KV_STAGE_BYTES
    q: Any = ROWS * (HEAD_DIM - HELD) * 2
    p: Any = P_STAGES * P_BYTES
    fp8: Any = KEYS * CODES
    scale: Any = PRODUCER_WARPS * GROUPS * 32 * SCALES
    row_list: Any = ROW_LISTS * ROW_LIST
    cursor: Any = PRODUCER_WARPS * CURSOR
    header: Any = KV_STAGES * HEADER
    factor: Any = P_STAGES * ROWS * FACTOR
    target: Any = P_STAGES * TARGET

    @classmethod
    def allocate(cls, allocator: SmemAllocator) -> Smem:
        places = []
        for name, size in smem_parts().items():
            align = 1024 if name in SWIZZLED else 16
            place = allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
            places.append(place.iterator.toint())
        return cls(*places)


def smem_parts() -> dict[str, int]:
    """Bytes of everything but the barriers, in order."""
    return Smem()._asdict()


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


@dataclass(frozen=True)
class Bars:
    """A CTA's mbarriers, and what completes their phases.

    kv           full: all producer warps have stored their rows, and the header. empty: PV warps are done with the tile
    first_half   of each KV stage: all producer lanes have stored the first half of the columns
    p            full: all softmax threads have stored a tile's P and factors. empty: PV warps are done with them
    rows         of each row list: it says where its tile's rows are
    """

    kv: barriers.Ring
    first_half: Any
    p: barriers.Ring
    rows: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        kv, first_half = barriers.Ring.allocate(smem, KV_STAGES), smem.allocate_array(Int64, KV_STAGES)
        return cls(kv, first_half, barriers.Ring.allocate(smem, P_STAGES), smem.allocate_array(Int64, ROW_LISTS))

    def initialize(self) -> None:
        """By one thread; the CTA synchronizes afterwards."""
        self.kv.initialize(PRODUCER_WARPS, 2 * 4)
        self.p.initialize(128, 2 * 4)
        for i in range(KV_STAGES):
            cute.arch.mbarrier_init(self.first_half + i, PRODUCER_WARPS * 32)
        for i in range(ROW_LISTS):
            cute.arch.mbarrier_init(self.rows + i, 1)
        cute.arch.mbarrier_init_fence()

    def wait_first_half(self, stage: Any, phase: Any) -> None:
        ptx.wait_mbarrier((self.first_half + stage).toint(), phase)

    def has_first_half(self, stage: Any, phase: Any) -> Any:
        """1 if `wait_first_half` would not wait, else 0."""
        return ptx.test_mbarrier((self.first_half + stage).toint(), phase)

    def wait_rows(self, tile: Any) -> None:
        """Until a tile's row list says where its rows are."""
        ptx.wait_mbarrier((self.rows + (tile & ROW_LISTS - 1)).toint(), tile // ROW_LISTS & 1)


def lane_idx() -> Any:
    return ptx.thread_again() & 31


def warp_idx() -> Any:
    """In its warpgroup."""
    return (ptx.thread_again() & 127) >> 5


# ---- producer: index loader

HALVES = KEYS // 32
"""Rows of a lane: lane i has rows i and i + 32."""


class TableEntry(NamedTuple):
    """Of a block table: address, bytes from row to row, the column."""

    base: Any
    row: Any
    column: Any

    def address(self, request: Any) -> Any:
        """Of the page that a request has there."""
        return self.base + Int64(request) * self.row + Int64(self.column) * 4


@dataclass(frozen=True)
class IndexLoader:
    """Which rows the CTA's tiles are made of: four producer warps go through the tiles in turn, two rows a lane.

    Of a tile, entries, then their pages, then addresses of rows become known, a tile's time apart, so that nobody waits
    for memory. A warp takes these steps for every fourth tile and publishes the result in the tile's row list.
    """

    scheduler: PrefillScheduler
    kv: PagedKV
    bars: Bars
    smem: Smem

    @property
    def is_split(self) -> bool:
        """Whether the CTA has a split of one work tile: the first tiles' row lists are there before it begins, see
        prefill_paged_cluster."""
        return self.kv.splits is not None

    @property
    def cursor(self) -> Any:
        return self.smem.cursor + warp_idx() * CURSOR

    def record(self, number: Any) -> Any:
        return self.cursor + 16 + number * RECORD

    def row_list(self, tile: Any) -> Any:
        return self.smem.row_list + (tile & ROW_LISTS - 1) * ROW_LIST

    @cute.jit
    def begin(self) -> None:
        """Have the first tiles' row lists on their way."""
        self.look_ahead(self.scheduler.first)
        self.set_cursor(self.scheduler.first, Int32(0), Int32(0))
        self.skip_tiles(warp_idx())
        if lane_idx() == 0:
            ptx.store_shared_s32(self.row_list(warp_idx() - PRODUCER_WARPS) + TILE_AT, Int32(NO_TILE))
        cute.arch.sync_warp()
        for tile in cutlass.range(-PRODUCER_WARPS, 0, 1, unroll=1):
            self.step(tile)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()

    @cute.jit
    def step(self, tile: Any) -> None:
        """What the warp does while that tile is converted. What it asked for in its last step is there."""
        if const_expr(self.is_split):
            # before there is nothing left to do for the warp's first tile
            if tile >= warp_idx():
                self.load_next(tile)
        else:
            self.load_next(tile)

    @cute.jit
    def load_next(self, tile: Any) -> None:
        turn = (tile - warp_idx()) & PRODUCER_WARPS - 1
        if turn == 0:
            self.copy_entries_async(tile + 4)
        elif turn == 1:
            self.copy_pages_async(tile + 3)
        elif turn == 2:
            self.resolve_rows(tile + 2)

    @cute.jit
    def look_ahead(self, work_tile: Any) -> None:
        """Have the records of that work tile and the 31 behind it: each in its time would take a long wait."""
        if const_expr(self.is_split):
            # there is no other work tile
            cute.arch.sync_warp()
            ptx.store_shared_128(self.record(lane_idx()), [Int32(0)] * 4)
            cute.arch.sync_warp()
        else:
            own = work_tile + lane_idx() * self.scheduler.step
            row, _ = self.scheduler.coords(own)
            request, visible, compressed, first, end = self.kv.keys_of(row, own < self.scheduler.end)
            record_at = self.record(lane_idx())
            cute.arch.sync_warp()
            ptx.store_shared_128(record_at, (request, visible, compressed, compressed + cutlass.max(end - first, 0)))
            ptx.store_shared_s32(record_at + 16, first)
            cute.arch.sync_warp()

    @cute.jit
    def tiles(self, number: Any) -> Any:
        """Of a work tile, by its record."""
        return (ptx.load_shared_s32(self.record(number) + 12) + (KEYS - 1)) // KEYS

    @cute.jit
    def set_cursor(self, work_tile: Any, column: Any, number: Any) -> None:
        # all lanes have read where the warp is
        cute.arch.sync_warp()
        if lane_idx() == 0:
            ptx.store_shared_128(self.cursor, (work_tile, column, number, Int32(0)))
        cute.arch.sync_warp()

    @cute.jit
    def skip_tiles(self, steps: Any) -> None:
        """Move the cursor over so many tiles; a work tile has one at least."""
        work_tile, column, number, _ = ptx.load_shared_128(self.cursor)
        left = cutlass.max(self.tiles(number) - column // KEYS, 1)
        while steps >= left:
            steps = steps - left
            work_tile, column, number = work_tile + self.scheduler.step, Int32(0), number + 1
            if number == RECORDS:
                self.look_ahead(work_tile)
                number = Int32(0)
            left = cutlass.max(self.tiles(number), 1)
        self.set_cursor(work_tile, column + steps * KEYS, number)

    @cute.jit
    def copy_entries_async(self, tile: Any) -> None:
        """Start to copy, or write, the entries of a tile, and go on."""
        work_tile, column, number, _ = ptx.load_shared_128(self.cursor)
        list_at = self.row_list(tile)
        flags = Int32(NO_TILE)
        if work_tile < self.scheduler.end:
            flags = self.enter_tile(list_at, work_tile, column, number)
        if lane_idx() == 0:
            ptx.store_shared_s32(list_at + TILE_AT, flags)
        self.skip_tiles(Int32(PRODUCER_WARPS))

    @cute.jit
    def enter_tile(self, list_at: Any, work_tile: Any, column: Any, number: Any) -> Any:
        """The entries of a work tile's tile that begins with that column; its flags."""
        kv, record_at = self.kv, self.record(number)
        request, visible, compressed, total = ptx.load_shared_128(record_at)
        first = ptx.load_shared_s32(record_at + 16)
        query, _ = self.scheduler.coords(work_tile)
        for half in range_constexpr(HALVES):
            row = lane_idx() + half * 32
            own, entry_at = column + row, list_at + SCALE_OFFSETS + row * 4
            if (own < compressed) & (kv.lists != 0):
                ptx.copy_async_32(entry_at, kv.lists + Int64(query) * kv.list_row + Int64(own) * 4)
            else:
                entry = own if own < compressed else own - compressed + first
                ptx.store_shared_s32(entry_at, entry if own < total else Int32(-1))
        if lane_idx() == 0:
            ptx.store_shared_s32(list_at + TILE_AT + 4, compressed - column)
            ptx.store_shared_64(list_at + TILE_AT + 8, request, visible)
        return self.flags_of(work_tile, column + KEYS >= total)

    @cute.jit
    def flags_of(self, work_tile: Any, is_last: Any) -> Any:
        """Of a work tile's tile, which may be its last one."""
        last = Int32(LAST) if work_tile + self.scheduler.step < self.scheduler.end else Int32(LAST | END)
        return last if is_last else Int32(0)

    @cute.jit
    def copy_pages_async(self, tile: Any) -> None:
        """Start to copy the pages of a tile's entries, and write where in them the rows are."""
        list_at = self.row_list(tile)
        flags, rest, request, visible = ptx.load_shared_128(list_at + TILE_AT)
        if flags >= 0:
            for half in range_constexpr(HALVES):
                row = lane_idx() + half * 32
                entry_at, page_at = list_at + SCALE_OFFSETS + row * 4, list_at + row * 4
                entry = ptx.load_shared_s32(entry_at)
                is_named, inside, named_by = self.resolve_page(entry, row < rest, visible)
                ptx.store_shared_s32(entry_at, inside)
                if is_named:
                    ptx.copy_async_32(page_at, named_by.address(request))
                else:
                    ptx.store_shared_s32(page_at, Int32(-1))

    @cute.jit
    def resolve_page(self, entry: Any, is_compressed: Any, visible: Any) -> tuple[Any, Any, TableEntry]:
        """Whether there may be a page of an entry, which row of it the entry is, and where a table names it."""
        window, compressed = self.kv.window, self.kv.compressed
        known = cutlass.max(entry, Int32(0))
        column, _ = divmod(known, window.rows)
        other, _ = divmod(known, compressed.rows)
        column = other if is_compressed else column
        rows = compressed.rows.divisor if is_compressed else window.rows.divisor
        inside = known - column * rows
        columns = compressed.columns if is_compressed else window.columns
        base = compressed.table if is_compressed else window.table
        stride = compressed.table_row if is_compressed else window.table_row
        is_named = (entry >= 0) & (column < columns)
        if is_compressed:
            is_named = is_named & (entry < visible)
        return is_named, inside, TableEntry(base, stride, column)

    @cute.jit
    def resolve_rows(self, tile: Any) -> None:
        """Write where a tile's rows are, and publish it."""
        list_at = self.row_list(tile)
        flags, rest = ptx.load_shared_64(list_at + TILE_AT)
        if flags >= 0:
            places = [list_at + (lane_idx() + half * 32) * 4 for half in range(HALVES)]
            pages = [ptx.load_shared_s32(place) for place in places]
            insides = [ptx.load_shared_s32(place + SCALE_OFFSETS) for place in places]
            # pages lie where addresses will
            cute.arch.sync_warp()
            found = list(zip(pages, insides, strict=True))
            valid = [self.enter_row(list_at, lane_idx() + i * 32, *place, rest) for i, place in enumerate(found)]
            self.publish(tile, valid)

    @cute.jit
    def publish(self, tile: Any, valid: Any) -> None:
        """Tell all producer warps where a tile's rows are, now that they are in its row list."""
        if lane_idx() == 0:
            ptx.store_shared_64(self.row_list(tile) + VALID_AT, *valid)
        cute.arch.sync_warp()
        if lane_idx() == 0:
            cute.arch.mbarrier_arrive(self.bars.rows + (tile & ROW_LISTS - 1))

    @cute.jit
    def enter_row(self, list_at: Any, row: Any, page: Any, inside: Any, rest: Any) -> Any:
        """Write where a lane's row is; a bit of each lane says whether it is there."""
        window, compressed = self.kv.window, self.kv.compressed
        is_compressed = row < rest
        rows = compressed.rows.divisor if is_compressed else window.rows.divisor
        base = compressed.base if is_compressed else window.base
        stride = compressed.page_stride if is_compressed else window.page_stride
        count = compressed.pages if is_compressed else window.pages
        is_valid = (page >= 0) & (page < count)
        valid = cute.arch.vote_ballot_sync(is_valid)
        source = base + Int64(page) * stride + Int64(inside * ROW_BYTES)
        source = source if is_valid else Int64(0)
        ptx.store_shared_64(list_at + row * 8, *ptx.halves(source))
        ptx.store_shared_s32(list_at + SCALE_OFFSETS + row * 4, rows * ROW_BYTES + inside * (SCALES - ROW_BYTES))
        return valid

    # What the rows of a published tile are.

    def sources_of(self, tile: Any, row: Any) -> tuple[Any, Any]:
        """Addresses of a row's record and of its scales. That of its record is 0 if it is not there."""
        source = self.source_of(tile, row)
        return source, source + Int64(ptx.load_shared_s32(self.row_list(tile) + SCALE_OFFSETS + row * 4))

    def source_of(self, tile: Any, row: Any) -> Any:
        """Address of a row's record, 0 if it is not there."""
        return ptx.pair(*ptx.load_shared_64(self.row_list(tile) + row * 8))

    def flags(self, tile: Any) -> Any:
        return ptx.load_shared_s32(self.row_list(tile) + TILE_AT)

    def valid(self, tile: Any) -> tuple[Any, Any]:
        """Which rows are there, as bits in two words."""
        return ptx.load_shared_64(self.row_list(tile) + VALID_AT)


# ---- producer: copies and dequantization

CHUNK = 16
"""Bytes of a lane's load."""

LOOK = 2
"""Slabs whose codes are loaded ahead of those that are converted."""

OWN_GROUP = GROUP * SLAB * 2
"""Bytes from the lane's row of one group to that of the other, in a slab."""

LARGE = (-0x7F7F7F80, 0x00808080)
"""Of a row's scale bytes, the bits that make a scale 2 or more."""

MOST_SCALE, NAN = 134, 0x7FC07FC0
"""The largest scale byte that one factor is made of; two bf16 that are none."""


@dataclass(frozen=True)
class Producer:
    """The producer warpgroup: copies rows and makes them bf16.

    A warp does 16 rows of every tile, in two groups: four lanes have a row of a group, each 16 neighbouring fp8 columns
    of every slab, which become two chunks of 16 bytes, and two chunks of the rotary ones, which are bf16 already and go
    straight to the KV stage.

    Each lane copies what it will convert itself: nobody waits for another lane's copies. It converts slab by slab,
    without a branch, and asks for the next tile's slab in the place of each. All that can be done before the KV stage
    is empty is done before: whoever multiplies waits for the stage, and for what comes after it.
    """

    bars: Bars
    smem: Smem
    index: IndexLoader

    @cute.jit
    def run(self) -> None:
        """Fill the KV ring."""
        bars, index = self.bars, self.index
        if const_expr(not index.is_split):
            index.begin()
        bars.wait_rows(Int32(0))
        tile, flags = Int32(0), Int32(0)
        starts = self.copy_scales_async(tile, flags)
        for slab in range_constexpr(LAST_SLAB):
            self.copy_slab_async(starts, slab, self.fp8())
        # two groups, as later on: the first half of a tile's codes, and the second
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_commit_group()

        while flags & END == 0:
            flags = index.flags(tile)
            index.step(tile)
            if flags & END == 0:
                bars.wait_rows(tile + 1)
            cute.arch.cp_async_wait_group(1)
            scales = [word for group in range(GROUPS) for word in ptx.load_shared_64(self.scales(group))]
            large = [scales[2 * group] & LARGE[0] | scales[2 * group + 1] & LARGE[1] for group in range(GROUPS)]
            is_ordinary = (large[0] | large[1]) == 0
            if not is_ordinary:
                scales = [self.bounded(word) for word in scales]
            self.convert(tile, scales, is_ordinary, flags)
            stage = tile & KV_STAGES - 1
            if not is_ordinary:
                for group in range_constexpr(GROUPS):
                    self.scale_again(tile, group)
                cute.arch.mbarrier_arrive(bars.first_half + stage)
            if (warp_idx() == 0) & (lane_idx() == 0):
                self.store_header(self.smem.header + stage * HEADER, flags, index.valid(tile))
            # the rotary columns, and for the next step what the index loader has asked for
            cute.arch.cp_async_wait_group(2)
            cute.arch.sync_warp()
            if lane_idx() == 0:
                cute.arch.mbarrier_arrive(bars.kv.full(stage))
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def store_header(self, header_at: Any, flags: Any, valid: Any) -> None:
        masks = [word >> shift & 0xFFFF for word in valid for shift in (0, 16)]
        ptx.store_shared_128(header_at, masks)
        ptx.store_shared_s32(header_at + 16, flags)

    def row(self, group: int) -> Any:
        """The lane's, of a group, in a tile."""
        return warp_idx() * OWN_ROWS + group * GROUP + lane_idx() // 4

    @cute.jit
    def copy_scales_async(self, tile: Any, flags: Any) -> Any:
        """Start to copy the scales of the lane's rows of a tile. Returns where its first codes are: 0 if there is no
        such row, or no such tile, as the flags of the one before say."""
        found = [self.index.sources_of(tile, self.row(group)) for group in range(GROUPS)]
        sources = []
        for group in range_constexpr(GROUPS):
            source, scales_at = found[group]
            is_valid = (source != 0) & (flags & END == 0)
            read = Int32(SCALES) if is_valid else Int32(0)
            ptx.copy_async_or_zero(self.scales(group), scales_at, SCALES, read)
            source = source + lane_idx() % 4 * CHUNK
            sources.append(source if is_valid else Int64(0))
        return sources

    def fp8(self) -> Any:
        """Where the lane's codes of the first slab and group are."""
        return self.smem.fp8 + self.row(0) * CODES + lane_idx() % 4 * CHUNK

    def scales(self, group: int) -> Any:
        """Where the scales of the lane's row of a group are."""
        return self.smem.scale + ((warp_idx() * GROUPS + group) * 32 + lane_idx()) * SCALES

    @cute.jit
    def copy_slab_async(self, sources: Any, slab: cutlass.Constexpr, fp8_at: Any) -> None:
        """Start to copy the lane's codes of a slab, or zeros."""
        for group in range_constexpr(GROUPS):
            read = Int32(CHUNK) if sources[group] != 0 else Int32(0)
            target = fp8_at + (group * GROUP * CODES + slab * SLAB)
            ptx.copy_async_or_zero(target, sources[group] + slab * SLAB, CHUNK, read)

    def row_at(self, tile: Any, group: int) -> Any:
        """Where the lane's row of a group goes."""
        return self.smem.kv + (tile & KV_STAGES - 1) * KV_STAGE_BYTES + self.row(group) * SLAB_ROW_BYTES

    def chunk_at(self, tile: Any, group: int) -> Any:
        """Where the first of the lane's two chunks of an fp8 slab goes, 2 m; 2 m + 1 is beside it."""
        return self.row_at(tile, group) + ((2 * (lane_idx() % 4) ^ lane_idx() // 4) << 4)

    @cute.jit
    def copy_rope_async(self, tile: Any, group: cutlass.Constexpr, source: Any) -> None:
        """Start to copy two chunks of a row's rotary columns, m and m + 4, or zeros."""
        read = Int32(CHUNK) if source != 0 else Int32(0)
        source = source + lane_idx() % 4 * CHUNK + LAST_SLAB * SLAB
        place = self.row_at(tile, group) + LAST_SLAB * SLAB_BYTES
        place = place + ((lane_idx() % 4 ^ lane_idx() // 4) << 4)
        for chunk in range_constexpr(2):
            ptx.copy_async_or_zero(place ^ (64 * chunk), source + 64 * chunk, CHUNK, read)

    @cute.jit
    def convert(self, tile: Any, scales: Any, is_ordinary: Any, flags: Any) -> None:
        """Store the fp8 columns of a tile as bf16, and have the next tile's codes copied in the place of its own."""
        bars, fp8_at = self.bars, self.fp8()
        raw = []
        for slab in range_constexpr(LOOK):
            raw += self.load(fp8_at, slab)
        rows = [self.index.source_of(tile, self.row(group)) for group in range(GROUPS)]
        sources = self.copy_scales_async(tile + 1, flags)
        place = self.chunk_at(tile, 0)
        places = place, place ^ CHUNK
        words = [self.bf16(raw, scales, 0, group) for group in range(GROUPS)]
        bars.kv.wait_empty(tile & KV_STAGES - 1, tile >> STAGE_BITS & 1)
        for slab in range_constexpr(LAST_SLAB):
            if const_expr(slab + LOOK == FIRST_HALF):
                cute.arch.cp_async_wait_group(1)
            if const_expr(slab + LOOK < LAST_SLAB):
                raw += self.load(fp8_at, slab + LOOK)
            for group in range_constexpr(GROUPS):
                chosen = words[group] if const_expr(slab == 0) else self.bf16(raw, scales, slab, group)
                self.store(chosen, places, slab * SLAB_BYTES + group * OWN_GROUP)
            self.copy_slab_async(sources, slab, fp8_at)
            if const_expr(slab == 0):
                for group in range_constexpr(GROUPS):
                    self.copy_rope_async(tile, group, rows[group])
                # with the scales, and what the index loader has asked for
                cute.arch.cp_async_commit_group()
            if const_expr(slab + 1 == FIRST_HALF):
                ptx.arrive_mbarrier((bars.first_half + (tile & KV_STAGES - 1)).toint(), is_ordinary)
                cute.arch.cp_async_commit_group()
        cute.arch.cp_async_commit_group()

    def load(self, fp8_at: Any, slab: int) -> Any:
        """The lane's codes of a slab."""
        offsets = [group * GROUP * CODES + slab * SLAB for group in range(GROUPS)]
        return [word for offset in offsets for word in ptx.load_shared_128_in_order(fp8_at, offset)]

    def bounded(self, scales: Any) -> Any:
        """Four scales, each MOST_SCALE at most."""
        found = Int32(0)
        for i in range(4):
            found = found | cutlass.min((scales >> (8 * i)) & 0xFF, Int32(MOST_SCALE)) << (8 * i)
        return found

    def bf16(self, raw: Any, scales: Any, slab: int, group: int) -> Any:
        """The lane's 16 columns of a slab."""
        factor = ptx.bf16x2_of_ue8m0(scales[2 * group + slab // 4], slab % 4)
        four = raw[4 * (GROUPS * slab + group) :][:4]
        return [ptx.multiply_bf16x2(ptx.bf16x2_of_two_codes(word, pair), factor) for word in four for pair in range(2)]

    def store(self, words: Any, places: Any, offset: int) -> None:
        for chunk in range(2):
            ptx.store_shared_128_in_order(places[chunk], words[4 * chunk : 4 * chunk + 4], offset)

    @cute.jit
    def scale_again(self, tile: Any, group: cutlass.Constexpr) -> None:
        """Multiply what `convert` has stored with what is left of scales too large for one product in bf16."""
        source, scales_at = self.index.sources_of(tile, self.row(group))
        low, high = ptx.load_global_64_or_zero(scales_at if source != 0 else Int64(0))
        place = self.chunk_at(tile, group)
        for slab in range_constexpr(LAST_SLAB):
            byte = self.scale(low, high, slab)
            factor = cutlass.max(byte - (MOST_SCALE - 127), Int32(127)) * 0x00800080
            factor = Int32(NAN) if byte == 255 else factor
            for chunk in range_constexpr(2):
                chunk_at = place + slab * SLAB_BYTES ^ (CHUNK * chunk)
                words = ptx.load_shared_128_in_order(chunk_at)
                ptx.store_shared_128_in_order(chunk_at, [ptx.multiply_bf16x2(word, factor) for word in words])

    def scale(self, low: Any, high: Any, slab: int) -> Any:
        """The byte of a slab's scale."""
        return ((low if slab < 4 else high) >> (slab % 4 * 8)) & 0xFF


# ---- MMA and softmax

AT_ONCE = 4
"""Heads that a warp copies at a time: 8 lanes have the 128 bytes of a slab's row."""

LINE = 128
"""Bytes that come to L2 at a time."""


class Epilogue(Protocol):
    """What becomes of a work tile's results."""

    def store_lse(self, work_tile: Any, half: int, max_logit: Any, row_max: Any, row_sum: Any) -> None:
        """What the logits of the thread's first or second head come to. By the QK and softmax warpgroup."""

    def store_out(self, o: Any, out_scales: Any, work_tile: Any, side: Any, own_row: Any, lane: Any) -> None:
        """A side of the rows of O. By a PV warpgroup; own_row: the thread's first."""


@dataclass(frozen=True)
class QkSoftmax:
    """The QK and softmax warpgroup.

    It copies the queries itself, half of the columns after the other, into the same memory: those that come first go on
    into registers. Copies of a work tile's first ones are under way while the last softmax of the one before goes on.

    mma       Q K^T of queries in registers, the first step and the others, and of those in shared memory
    layouts   of a tile of K, and of the queries in shared memory
    """

    bars: Bars
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    epilogue: Epilogue
    sink: Any
    scale_log2: Any
    thread: Any
    mma: tuple[Any, Any, Any]
    layouts: tuple[Any, Any]

    @cute.jit
    def run(self) -> None:
        """Give PV the P of all tiles."""
        bars, smem, scheduler, mma = self.bars, self.smem, self.scheduler, self.mma
        part = mma[2].get_slice(self.thread)
        held = cute.make_rmem_tensor(mma[0].get_slice(self.thread).partition_shape_A((ROWS, HELD)), BFloat16)
        scores = cute.make_rmem_tensor(part.partition_shape_C((ROWS, KEYS)), Float32)

        scale = ptx.abs_f32(self.scale_log2)
        tile = Int32(0)
        stage, phase = barriers.start()
        flags, work_tile = Int32(0), scheduler.first - scheduler.step
        self.copy_q_async(scheduler.first, range(HELD // SLAB))
        self.prefetch_q(scheduler.first)
        while flags & END == 0:
            work_tile = self.take_q(held, work_tile)
            row_max = [Float32(NEG_MAX), Float32(NEG_MAX)]
            max_logit = [Float32(-Float32.inf), Float32(-Float32.inf)]
            row_sum = [Float32(0.0), Float32(0.0)]
            flags = Int32(0)
            is_first, is_public = True, Int32(1)
            while flags & LAST == 0:
                # P of the tile before is published once this tile's products have begun, if it is there: tensor cores
                # then have P V to do while its softmax goes on, and nobody waits for the fence
                if (is_public == 0) & (bars.has_first_half(stage, phase) == 0):
                    self.publish_p(tile - 1)
                    is_public = Int32(1)
                bars.wait_first_half(stage, phase)
                cute.arch.fence_view_async_shared()
                self.multiply(part, scores, held, stage, phase, is_first, tile - 1, is_public)
                header_at = smem.header + stage * HEADER
                valid = ptx.load_shared_128(header_at)
                flags = ptx.load_shared_s32(header_at + 16)
                logits = [Int32(0), Int32(0)]
                if flags & LAST != 0:
                    logits = [load_sink(self.sink, self.head(work_tile, half), self.q.heads) for half in range(2)]
                warpgroup.wait_group(0)
                self.copy_next_q_async(flags, work_tile)
                is_first, is_public = False, Int32(0)
                mask(scores, self.scale_log2, valid)
                factors, max_logit, row_max, row_sum = softmax(scores, [scale, scale], row_max, row_sum, max_logit)
                buffer = tile & P_STAGES - 1
                bars.p.wait_empty(buffer, tile >> P_BITS & 1)
                row_sum = store_p(scores, smem, buffer, flags, factors, row_max, row_sum, logits, self.sink)
                if thread_idx() == 0:
                    ptx.store_shared_64(smem.target + buffer * TARGET, flags, work_tile)
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
                tile = tile + 1

            self.publish_p(tile - 1)
            for half in range_constexpr(2):
                largest_of_all = over_quad(max_logit[half], ptx.max_f32)
                self.epilogue.store_lse(work_tile, half, largest_of_all, row_max[half], row_sum[half])

    @cute.jit
    def take_q(self, held: Any, work_tile: Any) -> Any:
        """Have the first columns of the queries of the work tile behind `work_tile`, and the others on their way.
        Returns its number."""
        scheduler = self.scheduler
        work_tile = work_tile + scheduler.step
        # a warp's products have the heads that it has copied
        self.settle()
        load_q(held, self.smem.q)
        cute.arch.sync_warp()
        # waited for when they are needed
        self.copy_q_async(work_tile, range(HELD // SLAB, SLABS))
        if work_tile + scheduler.step < scheduler.end:
            self.prefetch_q(work_tile + scheduler.step)
        return work_tile

    @cute.jit
    def copy_next_q_async(self, flags: Any, work_tile: Any) -> None:
        """Once a work tile's last tile is multiplied, start to copy the first columns of the next one's queries."""
        scheduler = self.scheduler
        if flags & LAST != 0:
            # all products with the queries are done
            cute.arch.barrier(barrier_id=Q_BARRIER, number_of_threads=128)
            if work_tile + scheduler.step < scheduler.end:
                self.copy_q_async(work_tile + scheduler.step, range(HELD // SLAB))

    @cute.jit
    def multiply(
        self,
        part: Any,
        scores: Any,
        held: Any,
        stage: Any,
        phase: Any,
        is_first: Any,
        before: Any,
        is_public: Any,
    ) -> None:
        """Start scores = Q K^T of a tile, half by half, and publish P of the tile before.

        part        the thread's of the product of queries in shared memory
        is_first    whether it is the work tile's first
        before      number of the tile before
        is_public   whether its P is published
        """
        mma, (k_layout, q_layout) = self.mma, self.layouts
        k = self.k_parts(part, stage, k_layout)
        warpgroup.fence()
        for step in range_constexpr(HELD // STEP):
            chosen = mma[0] if const_expr(step == 0) else mma[1]
            cute.gemm(chosen, scores, held[None, None, step], k[None, None, step], scores)
        self.publish_p(before, is_public == 0)
        warpgroup.commit_group()
        self.bars.kv.wait_full(stage, phase)
        if is_first:
            # the other half of the queries
            self.settle()
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=Q_BARRIER, number_of_threads=128)
        cute.arch.fence_view_async_shared()
        k = self.k_parts(part, stage, k_layout)
        kept = mma[2].make_fragment_A(part.partition_A(wgmma.uniform_tile(self.smem.q, q_layout, BFloat16)))
        warpgroup.fence()
        for step in range_constexpr((HEAD_DIM - HELD) // STEP):
            cute.gemm(mma[2], scores, kept[None, None, step], k[None, None, HELD // STEP + step], scores)
        warpgroup.commit_group()

    def k_parts(self, part: Any, stage: Any, k_layout: Any) -> Any:
        rows = wgmma.uniform_tile(self.smem.kv + stage * KV_STAGE_BYTES, k_layout, BFloat16)
        return self.mma[2].make_fragment_B(part.partition_B(rows))

    def publish_p(self, tile: Any, predicate: Any = None) -> None:
        """Let PV have a tile's P. By all lanes, which do not wait for each other then, and where there is a predicate,
        if it holds: a branch among products would have their descriptors come from registers of lanes."""
        # tensor cores read it
        cute.arch.fence_view_async_shared()
        ptx.arrive_mbarrier(self.bars.p.full(tile & P_STAGES - 1).toint(), predicate)

    def head(self, work_tile: Any, half: int) -> Any:
        """The thread's first or second head."""
        _, first = self.scheduler.coords(work_tile)
        return own_head(first, half)

    @cute.jit
    def prefetch_q(self, work_tile: Any) -> None:
        """Have a work tile's queries on their way to L2, from which they come sooner."""
        q = self.q
        query, first = self.scheduler.coords(work_tile)
        for i in cutlass.range(OWN_ROWS // 8, unroll=1):
            row = first + (thread_idx() >> 5) * OWN_ROWS + (thread_idx() >> 2 & 7) + 8 * i
            source = q.base + Int64(query) * q.row + Int64(row) * q.head + (thread_idx() & 3) * LINE
            for line in range_constexpr(HEAD_DIM * 2 // (4 * LINE)):
                ptx.prefetch_l2(source + line * (4 * LINE), row < q.heads)

    @cute.jit
    def settle(self) -> None:
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    @cute.jit
    def copy_q_async(self, work_tile: Any, slabs: cutlass.Constexpr) -> None:
        """Start to copy some slabs of the warp's heads of a work tile's queries."""
        q = self.q
        query, first = self.scheduler.coords(work_tile)
        lane = thread_idx() & 31
        row = (thread_idx() >> 5) * OWN_ROWS + (lane >> 3)
        source = q.base + Int64(query) * q.row + Int64(first + row) * q.head + (lane & 7) * 16
        for i in range_constexpr(OWN_ROWS // AT_ONCE):
            # nothing is read of heads that are not there
            read = Int32(16) if first + row + AT_ONCE * i < q.heads else Int32(0)
            place = (row + AT_ONCE * i) * SLAB_ROW_BYTES + ((lane & 7) ^ (row + AT_ONCE * i & 7)) * 16
            for slab in slabs:
                to = self.smem.q + (slab - slabs[0]) * SLAB_BYTES + place
                ptx.copy_async_or_zero(to, source + slab * SLAB_ROW_BYTES, 16, read)
            source = source + AT_ONCE * q.head


# ---- PV and epilogue


@dataclass(frozen=True)
class PvEpilogue:
    """A PV and epilogue warpgroup: O += P V of columns 256 side to 256 side + 255.

    layouts   of a tile of P, and of half of the columns of V
    """

    bars: Bars
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    epilogue: Epilogue
    thread: Any
    side: Any
    pv: Any
    layouts: tuple[Any, Any]

    @cute.jit
    def run(self) -> None:
        """Store results."""
        bars, smem, out, pv = self.bars, self.smem, self.out, self.pv
        lane = self.thread & 31
        warp = cute.arch.make_warp_uniform(self.thread >> 5)
        part = pv.get_slice(self.thread)
        o = cute.make_rmem_tensor(part.partition_shape_C((ROWS, SIDE)), Float32)
        own_row = warp * 16 + (lane >> 2)

        tile = Int32(0)
        stage, phase = barriers.start()
        flags, work_tile = Int32(0), self.scheduler.first - self.scheduler.step
        while flags & END == 0:
            angles = (Int32(0), Int32(0))
            if const_expr(out.quant is not None):
                # there is time: the first tile's P is not there yet
                angles = out.quant.angles(self.scheduler.coords(work_tile + self.scheduler.step)[0], lane)
            o.fill(0.0)
            out_scales = [Float32(0.0), Float32(0.0)]
            flags = Int32(0)
            while flags & LAST == 0:
                buffer = tile & P_STAGES - 1
                bars.p.wait_full(buffer, tile >> P_BITS & 1)
                bars.kv.wait_full(stage, phase)
                flags, work_tile = ptx.load_shared_64(smem.target + buffer * TARGET)
                factors, out_scales = load_factors(smem, buffer, own_row)
                if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
                    wgmma.scale_rows(o, factors)
                v_at = smem.kv + stage * KV_STAGE_BYTES + self.side * (KV_STAGE_BYTES // 2)
                multiply_pv(pv, part, o, smem, buffer, v_at, self.layouts, BFloat16, fences=True)
                empty = bars.p.empty(buffer), bars.kv.empty(stage)
                cute.arch.sync_warp()
                if lane == 0:
                    for one in empty:
                        cute.arch.mbarrier_arrive(one)
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
                tile = tile + 1
            self.epilogue_of(o, out_scales, angles, work_tile, own_row, lane)

    @cute.jit
    def epilogue_of(self, o: Any, out_scales: Any, angles: Any, work_tile: Any, own_row: Any, lane: Any) -> None:
        out = self.out
        if const_expr(out.quant is not None):
            row, first = self.scheduler.coords(work_tile)
            head = first + own_row
            out.quant.store(o, out_scales, angles, row, head, self.q.heads - head, self.side, lane)
        else:
            self.epilogue.store_out(o, out_scales, work_tile, self.side, own_row, lane)


@dataclass(frozen=True)
class StoreEpilogue:
    """Results are stored where the caller wants them."""

    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput

    @cute.jit
    def store_lse(self, work_tile: Any, half: cutlass.Constexpr, max_logit: Any, row_max: Any, row_sum: Any) -> None:
        store_logs(self.scheduler, self.q.heads, self.out, work_tile, half, max_logit, row_max, row_sum)

    @cute.jit
    def store_out(self, o: Any, out_scales: Any, work_tile: Any, side: Any, own_row: Any, lane: Any) -> None:
        out = self.out
        wgmma.scale_rows(o, out_scales)
        row, first = self.scheduler.coords(work_tile)
        target = out.base + Int64(row) * out.row + Int64(first + own_row) * out.head + side * (SIDE * 2)
        wgmma.store_bf16(o, lane, target, out.head, self.q.left(first) - own_row, Int32(SIDE), SIDE, out.policy)


# ---- kernel


@dataclass(frozen=True)
class PagedKernel:
    """See kernel_args.PagedArgs."""

    name: str = "sparse_mla_prefill_paged"

    @cute.jit
    def launch(self, args: PagedArgs) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        group_bits = Int32(1) if length(args.q, 1) > ROWS else Int32(0)
        work_tiles = length(args.q, 0) << group_bits
        kernel = self.kernel(
            PrefillQuery.of(args.q),
            args.sources(),
            args.output(),
            args.sink,
            args.scale_log2,
            work_tiles,
            group_bits,
            tiled_mmas(BFloat16),
            smem_layouts(BFloat16, HELD),
        )
        kernel.launch(
            grid=[cutlass.min(args.ctas, work_tiles), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: PrefillQuery,
        kv: PagedKV,
        out: PrefillOutput,
        sink: Int64,
        scale_log2: Float32,
        work_tiles: Int32,
        group_bits: Int32,
        mma: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        allocator = SmemAllocator()
        smem, bars = Smem.allocate(allocator), Bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for one in mma[1:]:
            wgmma.accumulate(one)
        k_layout, v_layout, q_layout, p_layout = layouts
        # its number is read by whoever needs it: before the branches a register could be spilled
        scheduler = PrefillScheduler(ptx.block_again(), work_tiles, ctas, group_bits)
        epilogue = StoreEpilogue(scheduler, q, out)
        own = thread % wgmma.WARPGROUP
        if group < PV:
            QkSoftmax(bars, smem, scheduler, q, epilogue, sink, scale_log2, own, mma[:3], (k_layout, q_layout)).run()
        elif group < PRODUCER:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            side = cute.arch.make_warp_uniform(group - PV)
            PvEpilogue(bars, smem, scheduler, q, out, epilogue, own, side, mma[3], (p_layout, v_layout)).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            scheduler = PrefillScheduler(ptx.block_again(), work_tiles, ctas, group_bits)
            Producer(bars, smem, IndexLoader(scheduler, kv, bars, smem)).run()


# ---- key


@dataclass(frozen=True)
class PagedKey(KernelKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_paged"

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "cp.async", "ldmatrix", "stmatrix", "mbarrier", "setmaxnreg", "st.global.128", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PagedKernel().launch, fake_paged())


@dataclass(frozen=True)
class QuantPagedKey(PagedKey):
    """As PagedKey: results are turned back and become e4m3 codes, see quant_output."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_paged_quant"

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PagedKernel("sparse_mla_prefill_paged_quant").launch, fake_paged(quantized=True))
