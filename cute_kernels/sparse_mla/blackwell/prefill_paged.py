# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill_paged on Blackwell (sm_100a, sm_103a): the kernel of prefill.py over rows of two fp8_ds_mla
caches, with warps that convert them. Compiled and run in a model of the GPU, never on one.

The window's positions come first, then compressed entries from a new tile on. A query row with more than 64 heads is
two work tiles, side by side: rows that both need come from L2 for the second one.

    indices  gmem --> index loader: entries, their pages, rows --> lists [4 slots]
    scales   gmem --cp.async, index loader--> scales [4 slots] --> dequantizers
    codes    gmem --TMA gather4, KV loader 0--> raw [2 stages] --dequantizers, warps 12 to 15, as decode's--> kv
    rotary columns, Q
             gmem --TMA, KV loader 1--> kv [2 stages, bf16, swizzled]

    ring     full                                                          empty
    raw      all bytes of a tile's codes                                   dequantizer warps have loaded them
    kv       dequantizer warps have stored a tile, and its rotary columns  as prefill.py's
             are there; of a work tile's Q, all is there
    lists    as prefill.py's                                               dequantizer warps have read list and scales
                                                                           as well
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime.work import Work
from cute_kernels.sparse_mla.blackwell.decode import (
    CODES_BYTES,
    FP8_STAGES,
    GATHERED,
    KEYS,
    RAW_BYTES,
    ROPE_BYTES,
    ROW_BYTES,
    SCALE_BYTES,
    STAGE_BYTES,
    STAGES,
    Dequantizer,
    codes_copy,
    pitch_of,
    raw_offset,
    rope_copy,
    rope_offset,
)
from cute_kernels.sparse_mla.blackwell.prefill import (
    BUFFERS,
    COMPRESSED,
    DEQUANT_WARPS,
    END,
    FLAGS_AT,
    HALVES,
    KV_WARPS,
    LANES,
    LAST,
    LIST_BYTES,
    QUERY_ROWS,
    SLOTS,
    SOFTMAX_WARPS,
    Bars,
    BlackwellPrefillKey,
    IndexLoader,
    KVLoader,
    PrefillConfig,
    PrefillKernel,
    Smem,
    map_of,
    of_tile,
    shape,
    smem_parts,
)
from cute_kernels.sparse_mla.kernel_args import fake_paged
from cute_kernels.sparse_mla.params import PagedKV

# ---- config: that of decode.py, whose ring of raw codes and whose stages these are

# ---- shared memory and barriers


def paged_smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; what is not as in prefill's Smem:

    kv       [2 stages][8 slabs][64 rows][64] bf16
    raw      [2 stages][64 rows][448] e4m3
    scales   [4 slots][64 rows] 8 scale bytes
    """
    kv = {"kv": STAGES * STAGE_BYTES, "raw": FP8_STAGES * RAW_BYTES}
    return kv | smem_parts() | kv | {"scales": SLOTS * KEYS * SCALE_BYTES}


@dataclass(frozen=True)
class PagedBars(Bars):
    """As Bars, with the rings as above, and

    scales   [4 slots] a tile's scales are there
    """

    raw: Any = None
    scales: Any = None

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> PagedBars:
        scales = smem.allocate_array(Int64, SLOTS)
        return cls(**cls.parts(smem, STAGES), raw=barriers.Ring.allocate(smem, FP8_STAGES), scales=scales)

    def initialize(self) -> None:
        # the dequantizers, and a thread that has rotary columns or queries copied
        self.kv.initialize(DEQUANT_WARPS + 1, 1)
        self.raw.initialize(1, DEQUANT_WARPS)
        self.lists.initialize(1, 1 + KV_WARPS + SOFTMAX_WARPS + DEQUANT_WARPS)
        for slot in range(SLOTS):
            # the lanes that have them copied
            cute.arch.mbarrier_init(self.scales + slot, 32)
        self.initialize_others()


BARRIERS = 2 * (STAGES + FP8_STAGES + BUFFERS + SLOTS + 1) + SLOTS + BUFFERS + 1

PAGED = PrefillConfig("bf16", STAGES, paged_smem_parts(), PagedBars, BARRIERS, dequantizes=True)


# ---- producer: index loader and KV loaders


class PagedRows(NamedTuple):
    """What rows are selected from; of the window's cache and of the other, rows of 576 bytes from page to page."""

    kv: PagedKV
    window_pitch: Any
    compressed_pitch: Any


class PagedIndexLoader(IndexLoader):
    """Rows of two paged caches, by position. Of a work tile is known: its request, visible entries, how many of them
    count, positions of its window, the first of them."""

    counts = 5

    def count(self, work_tile: Any) -> tuple[Any, ...]:
        row, _ = self.scheduler.coords(work_tile)
        found = self.kv.kv.keys_of(row, work_tile < self.scheduler.end)
        request, visible, compressed, first, end = found
        return request, visible, compressed, cutlass.max(end - first, 0), first

    def window_tiles(self, count: Any) -> Any:
        return (count[3] + (KEYS - 1)) // KEYS

    def num_tiles(self, count: Any) -> Any:
        return self.window_tiles(count) + (count[2] + (KEYS - 1)) // KEYS

    @cute.jit
    def flags(self, tile: Any, count: Any) -> Any:
        return Int32(COMPRESSED) if tile >= self.window_tiles(count) else Int32(0)

    @cute.jit
    def publish(self, work_tile: Any, tile: Any, count: Any, slot: Any) -> None:
        """Store a tile's rows, and start to copy their scales."""
        query_row, _ = self.scheduler.coords(work_tile)
        behind = tile - self.window_tiles(count)
        is_compressed = behind >= 0
        first = (behind if is_compressed else tile) * KEYS + cute.arch.lane_idx()
        entries = [self.load_entry(query_row, first + half * LANES, is_compressed, count) for half in range(HALVES)]
        found = [self.load_page(entry, is_compressed, count) for entry in entries]
        rows = [self.row_of(is_compressed, one) for one in found]
        self.store(rows, slot)
        for half in range_constexpr(HALVES):
            scales_at = self.smem.scales + (slot * KEYS + half * LANES + cute.arch.lane_idx()) * SCALE_BYTES
            source = self.scales_of(rows[half], is_compressed, found[half])
            read = Int32(SCALE_BYTES) if rows[half] >= 0 else Int32(0)
            ptx.copy_async_or_zero(scales_at, source, SCALE_BYTES, read)
        cute.arch.cp_async_mbarrier_arrive_noinc(self.bars.scales + slot)

    @cute.jit
    def load_entry(self, query_row: Any, key: Any, is_compressed: Any, count: Any) -> Any:
        """The entry, or the position, of a tile's key; -1 if it has none."""
        _, visible, compressed, window, first = count
        kv = self.kv.kv
        found = Int32(-1)
        if is_compressed:
            found = key if key < compressed else Int32(-1)
            if kv.lists != 0:
                place = kv.lists + Int64(query_row) * kv.list_row + Int64(key) * 4
                found = ptx.load_global_s32_where(key < compressed, place)
            found = found if found < visible else Int32(-1)
        else:
            found = first + key if key < window else Int32(-1)
        return found

    @cute.jit
    def load_page(self, entry: Any, is_compressed: Any, count: Any) -> tuple[Any, Any]:
        """Page of an entry, -1 if it has none, and the row in it."""
        window, compressed = self.kv.kv.window, self.kv.kv.compressed
        known = cutlass.max(entry, Int32(0))
        column, inside = divmod(known, window.rows)
        other, other_inside = divmod(known, compressed.rows)
        column, inside = (other if is_compressed else column), (other_inside if is_compressed else inside)
        columns = compressed.columns if is_compressed else window.columns
        table = compressed.table if is_compressed else window.table
        stride = compressed.table_row if is_compressed else window.table_row
        place = table + Int64(count[0]) * stride + Int64(column) * 4
        return ptx.load_global_s32_where((entry >= 0) & (column < columns), place), inside

    @cute.jit
    def row_of(self, is_compressed: Any, found: Any) -> Any:
        """Row of the cache's tensor of rows, -1 if the page is none of the cache's."""
        page, inside = found
        pages = self.kv.kv.compressed.pages if is_compressed else self.kv.kv.window.pages
        pitch = self.kv.compressed_pitch if is_compressed else self.kv.window_pitch
        return page * pitch + inside if (page >= 0) & (page < pages) else Int32(-1)

    @cute.jit
    def scales_of(self, row: Any, is_compressed: Any, found: Any) -> Any:
        """Address of the scales of a row that is there."""
        page, inside = found
        window, compressed = self.kv.kv.window, self.kv.kv.compressed
        base = compressed.base if is_compressed else window.base
        stride = compressed.page_stride if is_compressed else window.page_stride
        page_rows = compressed.rows.divisor if is_compressed else window.rows.divisor
        offset = Int64(page) * stride + Int64(page_rows * ROW_BYTES + inside * SCALE_BYTES)
        return base + (offset if row >= 0 else Int64(0))


class PagedKVLoader(KVLoader):
    """The thread that fills the ring of codes, or the one that fills stages with queries and rotary columns.

    part   0 or 1
    maps   addresses of tensor maps: of q, of the caches' codes, and of their rotary columns
    """

    stages, parts = STAGES, 1

    @cute.jit
    def run(self) -> None:
        caches = (len(self.maps) - 1) // 2
        if self.part == 0:
            self.load_codes(self.maps[1 : 1 + caches])
        else:
            maps = (self.maps[0], *self.maps[1 + caches :])
            KVLoader.run(PagedKVLoader(Int32(0), maps, self.scheduler, self.bars, self.smem))

    @cute.jit
    def load_codes(self, maps: Any) -> None:
        """Fill the ring of codes."""
        bars = self.bars
        raw, phase = barriers.start()
        slot, list_phase = barriers.start()
        flags = Int32(0)
        while flags & END == 0:
            bars.lists.wait_full(slot, list_phase)
            list_at = self.smem.lists + slot * LIST_BYTES
            flags = ptx.load_shared_s32(list_at + FLAGS_AT)
            bars.raw.wait_empty(raw, phase)
            full = bars.raw.full(raw)
            cute.arch.mbarrier_arrive_and_expect_tx(full, CODES_BYTES)
            self.gather(list_at, map_of(maps, flags), full, self.smem.raw + raw_offset(raw, 0), raw_offset)
            cute.arch.mbarrier_arrive(bars.lists.empty(slot))
            raw, phase = barriers.advance(raw, phase, FP8_STAGES)
            slot, list_phase = barriers.advance(slot, list_phase, SLOTS)

    @cute.jit
    def copy_rows_async(self, flags: Any, list_at: Any, stage_at: Any, full: Any) -> None:
        """Start to gather a tile's rotary columns."""
        cute.arch.mbarrier_arrive_and_expect_tx(full, ROPE_BYTES)
        self.gather(list_at, map_of(self.maps[1:], flags), full, stage_at, rope_offset)

    @cute.jit
    def gather(self, list_at: Any, source: Any, full: Any, target: Any, offset: cutlass.Constexpr) -> None:
        for row in range_constexpr(0, KEYS, GATHERED):
            rows = ptx.load_shared_128(list_at + row * 4)
            ptx.gather_rows(target + offset(0, row), source, 0, rows, full.toint())


# ---- dequantization


@dataclass(frozen=True)
class PagedDequantizer(Dequantizer):
    """The warpgroup that makes bf16 of codes, as decode's does. thread: of the warpgroup."""

    thread: Any
    bars: PagedBars
    smem: Smem

    @cute.jit
    def run(self) -> None:
        """Convert every tile."""
        thread, bars, smem = self.thread, self.bars, self.smem
        row, member = thread // 4, thread % 4
        raw, raw_phase = barriers.start()
        stage, phase = barriers.start()
        slot, list_phase = barriers.start()
        flags = Int32(0)
        while flags & END == 0:
            # queries need nothing
            bars.kv.wait_empty(stage, phase)
            if thread % 32 == 0:
                cute.arch.mbarrier_arrive(bars.kv.full(stage))
            stage, phase = barriers.advance(stage, phase, STAGES)
            flags = Int32(0)
            while flags & LAST == 0:
                bars.lists.wait_full(slot, list_phase)
                flags = ptx.load_shared_s32(smem.lists + slot * LIST_BYTES + FLAGS_AT)
                ptx.wait_mbarrier((bars.scales + slot).toint(), list_phase)
                scales = self.load_scales(smem.scales + (slot * KEYS + row) * SCALE_BYTES)
                bars.raw.wait_full(raw, raw_phase)
                bars.kv.wait_empty(stage, phase)
                self.convert_rows(raw, stage, row, member, scales, smem)
                # tensor cores read what this thread has stored
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if thread % 32 == 0:
                    cute.arch.mbarrier_arrive(bars.kv.full(stage))
                    cute.arch.mbarrier_arrive(bars.raw.empty(raw))
                    cute.arch.mbarrier_arrive(bars.lists.empty(slot))
                raw, raw_phase = barriers.advance(raw, raw_phase, FP8_STAGES)
                stage, phase = barriers.advance(stage, phase, STAGES)
                slot, list_phase = barriers.advance(slot, list_phase, SLOTS)


# ---- kernel


class PagedKernel(PrefillKernel):
    """See kernel_args.PagedArgs. select.py says which strides of q and of pages it takes."""

    name = "sparse_mla_prefill_paged"
    config = PAGED
    index_loader = PagedIndexLoader
    kv_loader = PagedKVLoader
    dequantizer = PagedDequantizer

    def maps_and_sources(self, args: Any) -> tuple[Any, Any]:
        caches = args.swa_cache, args.compressed_cache
        maps = (*(codes_copy(cache) for cache in caches), *(rope_copy(cache) for cache in caches))
        return maps, PagedRows(args.sources(), *(pitch_of(cache) for cache in caches))


# ---- key


@dataclass(frozen=True)
class BlackwellPagedKey(BlackwellPrefillKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill_paged"

    @property
    def smem_bytes(self) -> int:
        return PAGED.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cp.async"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PagedKernel().launch, fake_paged())


# ---- what a tile takes

CONTEXT = 16384


def work() -> tuple[Work, ...]:
    """128 heads are two work tiles."""
    rows = {"codes in and out": 2.0 * RAW_BYTES, "bf16 in": float(STAGE_BYTES)}
    shapes = []
    for heads in (64, 128):
        for name, keys in (("swa", 128), ("c4", 640)):
            moved = CONTEXT * FP8_DS_MLA.row_elements * (1.25 if name == "c4" else 1)
            shapes.append(shape(f"{name} new{QUERY_ROWS} ctx{CONTEXT} h{heads}", heads, keys, moved))
    return (of_tile("sparse_mla_prefill_paged", "64 heads", rows, shapes=tuple(shapes)),)
