# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_mixed on Blackwell (sm_100a, sm_103a): the kernel of prefill.py over rows of two paged caches, bf16 or
e4m3. Compiled and run in a model of the GPU, never on one.

No tile has rows of both caches: the window's columns come first, then the compressed ones from a new tile on. Over bf16
caches nothing else differs.

Over e4m3 caches, rows and queries become f16 on their way to tensor cores, as on Hopper: f16 holds every e4m3 number,
so all products are exact, and P keeps 11 bits (products of 8-bit numbers would take it with 4):

    KV, Q    gmem --TMA--> raw [2 stages] --dequantizers, warps 12 to 15--> kv [2 stages, f16, swizzled], q

    ring    full                                                   empty
    raw     all bytes of a tile's codes, or of a work tile's Q     dequantizer warps have loaded them
    kv      dequantizer warps have stored a tile, or Q             as prefill.py's

A slab of codes is [64 rows, 128 bytes], too, but of 128 columns: two slabs of a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Int32, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.tensor import address, length
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.work import Work
from cute_kernels.sparse_mla.blackwell.decode import KEYS, Q_SLABS, SLAB, SLAB_BYTES, SLABS, STAGE_BYTES
from cute_kernels.sparse_mla.blackwell.prefill import (
    BUFFERS,
    COMPRESSED,
    DEQUANT_WARPS,
    END,
    FLAGS_AT,
    KV_ROWS,
    KV_WARPS,
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
    of_tile,
    shape,
    smem_parts,
)
from cute_kernels.sparse_mla.kernel_args import fake_mixed
from cute_kernels.sparse_mla.params import SlotCache, compressed_columns, window_columns

# ---- config, of e4m3 caches

STAGES, RAW_STAGES = 2, 2

CODE_SLAB = 2 * SLAB
"""Columns of a slab of codes."""

CODE_SLABS = HEAD_DIM // CODE_SLAB
RAW_BYTES = CODE_SLABS * SLAB_BYTES

WARP_ROWS = KEYS // DEQUANT_WARPS
"""Of a tile, by a dequantizer warp."""

LANES_ROWS = 8
"""Rows of a load of all lanes: four lanes have half a row of a slab of codes. Of eight lanes that are served together,
four have row r and four row r ^ 5, so that neither loads of 16 codes nor stores of 16 bytes meet in a bank."""


def lane_row(lane: Any) -> Any:
    """Of LANES_ROWS, a lane's."""
    return (lane >> 3) ^ ((lane >> 2 & 1) * 5)


def code_offset(row: Any, slab: int, member: Any) -> Any:
    """Of the 16 codes that lane `member` of four has of a row in a stage's slab, in their stage of raw."""
    chunk = (slab % 2 * 4 + member) ^ (row & 7)
    return slab // 2 * SLAB_BYTES + row * CODE_SLAB + (chunk << 4)


def value_offset(row: Any, slab: int, member: Any, chunk: int) -> Any:
    """Of what the first (0) or last (1) eight of those codes become, in a stage of kv."""
    return slab * SLAB_BYTES + row * (SLAB * 2) + (((2 * member + chunk) ^ (row & 7)) << 4)


# ---- shared memory and barriers, of e4m3 caches


def fp8_smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; what is not as in prefill's Smem:

    kv    [2 stages][8 slabs][64 rows][64] f16
    raw   [2 stages][4 slabs][64 rows][128] e4m3
    """
    kv = {"kv": STAGES * STAGE_BYTES, "raw": RAW_STAGES * RAW_BYTES}
    return kv | smem_parts() | kv


@dataclass(frozen=True)
class Fp8Bars(Bars):
    """As Bars, with the rings as above; lists are empty when dequantizer warps have read them as well."""

    raw: Any = None

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Fp8Bars:
        return cls(**cls.parts(smem, STAGES), raw=barriers.Ring.allocate(smem, RAW_STAGES))

    def initialize(self) -> None:
        self.kv.initialize(DEQUANT_WARPS, 1)
        self.raw.initialize(KV_WARPS, DEQUANT_WARPS)
        self.lists.initialize(1, 1 + KV_WARPS + SOFTMAX_WARPS + DEQUANT_WARPS)
        self.initialize_others()


BARRIERS = 2 * (STAGES + RAW_STAGES + BUFFERS + SLOTS + 1) + BUFFERS + 1

FP8 = PrefillConfig("f16", STAGES, fp8_smem_parts(), Fp8Bars, BARRIERS, dequantizes=True)


# ---- producer: index loader and KV loaders


class MixedIndexLoader(IndexLoader):
    """Rows of two paged caches, by their slots."""

    def window_tiles(self, count: Any) -> Any:
        return (window_columns(count[0]) + (KEYS - 1)) // KEYS

    def num_tiles(self, count: Any) -> Any:
        return self.window_tiles(count) + (compressed_columns(count[0]) + (KEYS - 1)) // KEYS

    @cute.jit
    def flags(self, tile: Any, count: Any) -> Any:
        return Int32(COMPRESSED) if tile >= self.window_tiles(count) else Int32(0)

    @cute.jit
    def place(self, tile: Any, key: Any, count: Any) -> tuple[Any, Any, Any]:
        """As IndexLoader's, and whether the row is a compressed one."""
        window, compressed = window_columns(count[0]), compressed_columns(count[0])
        behind = tile - self.window_tiles(count)
        is_compressed = behind >= 0
        own = (behind if is_compressed else tile) * KEYS + key
        counts = own < (compressed if is_compressed else window)
        return own + (self.kv.window_size if is_compressed else 0), counts, is_compressed

    @cute.jit
    def resolve_row(self, place: Any, slot: Any) -> Any:
        _, _, is_compressed = place
        # by a name of its own, which a branch does not carry along: one division serves both caches
        kv = self.kv
        found = Int32(-1)
        if is_compressed:
            found = kv.compressed.offset(slot, 1)
        else:
            found = kv.window.offset(slot, 1)
        return found


class CodesLoader(KVLoader):
    """A KV loader of codes, those of queries included."""

    stages, stage_bytes, slabs, columns = RAW_STAGES, RAW_BYTES, CODE_SLABS, CODE_SLAB

    def ring(self) -> tuple[barriers.Ring, Any]:
        return self.bars.raw, self.smem.raw

    @cute.jit
    def copy_queries_async(
        self, work_tile: Any, number: cutlass.Constexpr, q_phase: Any, stage_at: Any, full: Any
    ) -> None:
        row, first = self.scheduler.coords(work_tile)
        cute.arch.mbarrier_arrive_and_expect_tx(full, RAW_BYTES // self.parts)
        own = CODE_SLABS // self.parts
        for i in range_constexpr(own):
            slab = self.part * own + i
            target = stage_at + slab * SLAB_BYTES
            ptx.copy_bulk_tensor(target, self.maps[0], (slab * CODE_SLAB, first, row), full.toint())


# ---- dequantization


@dataclass(frozen=True)
class Dequantizer:
    """The warpgroup that makes f16 of codes. thread: of the warpgroup."""

    thread: Any
    bars: Fp8Bars
    smem: Smem

    @cute.jit
    def run(self) -> None:
        """Convert a work tile's queries, then its tiles, of all work tiles."""
        bars, smem = self.bars, self.smem
        raw, raw_phase = barriers.start()
        stage, phase = barriers.start()
        slot, list_phase = barriers.start()
        q_phase, flags = Int32(1), Int32(0)
        while flags & END == 0:
            bars.raw.wait_full(raw, raw_phase)
            bars.kv.wait_empty(stage, phase)
            raw_at, stage_at = smem.raw + raw * RAW_BYTES, smem.kv + stage * STAGE_BYTES
            for slab in range_constexpr(Q_SLABS):
                self.convert(raw_at, stage_at, slab, slab)
            # Q K^T of the work tile before is done
            ptx.wait_mbarrier(bars.q_done.toint(), q_phase)
            for slab in range_constexpr(Q_SLABS, SLABS):
                self.convert(raw_at, smem.q, slab, slab - Q_SLABS)
            self.release(raw, stage)
            raw, raw_phase = barriers.advance(raw, raw_phase, RAW_STAGES)
            stage, phase = barriers.advance(stage, phase, STAGES)
            q_phase, flags = q_phase ^ 1, Int32(0)
            while flags & LAST == 0:
                bars.lists.wait_full(slot, list_phase)
                flags = ptx.load_shared_s32(smem.lists + slot * LIST_BYTES + FLAGS_AT)
                bars.raw.wait_full(raw, raw_phase)
                bars.kv.wait_empty(stage, phase)
                raw_at, stage_at = smem.raw + raw * RAW_BYTES, smem.kv + stage * STAGE_BYTES
                for slab in range_constexpr(SLABS):
                    self.convert(raw_at, stage_at, slab, slab)
                self.release(raw, stage)
                if self.thread & 31 == 0:
                    cute.arch.mbarrier_arrive(bars.lists.empty(slot))
                raw, raw_phase = barriers.advance(raw, raw_phase, RAW_STAGES)
                stage, phase = barriers.advance(stage, phase, STAGES)
                slot, list_phase = barriers.advance(slot, list_phase, SLOTS)

    @cute.jit
    def convert(self, raw_at: Any, target: Any, slab: cutlass.Constexpr, to_slab: cutlass.Constexpr) -> None:
        """Store the thread's columns of a slab, as slab `to_slab` of what begins at the target."""
        row = (self.thread >> 5) * WARP_ROWS + lane_row(self.thread & 31)
        member = self.thread & 3
        for i in range_constexpr(WARP_ROWS // LANES_ROWS):
            own = row + i * LANES_ROWS
            four = ptx.load_shared_128(raw_at + code_offset(own, slab, member))
            words = [word for codes in four for word in ptx.f16x2_of_e4m3x4(codes)]
            for chunk in range_constexpr(2):
                place = target + value_offset(own, to_slab, member, chunk)
                ptx.store_shared_128(place, words[4 * chunk : 4 * chunk + 4])

    @cute.jit
    def release(self, raw: Any, stage: Any) -> None:
        """Of what has been converted."""
        # tensor cores read what this thread has stored
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if self.thread & 31 == 0:
            cute.arch.mbarrier_arrive(self.bars.kv.full(stage))
            cute.arch.mbarrier_arrive(self.bars.raw.empty(raw))


# ---- kernel


class MixedKernel(PrefillKernel):
    """See kernel_args.MixedArgs. select.py says which strides of q and of pages it takes."""

    name = "sparse_mla_mixed"
    index_loader = MixedIndexLoader

    def maps_and_sources(self, args: Any) -> tuple[Any, Any]:
        caches = args.window, args.compressed
        return tuple(self.rows_map(cache, rows_of(cache)) for cache in caches), args.sources(slot_cache)


class MixedFp8Kernel(MixedKernel):
    """As MixedKernel, with e4m3 queries and caches."""

    name = "sparse_mla_mixed_fp8"
    config = FP8
    dtype = Float8E4M3FN
    kv_loader = CodesLoader
    dequantizer = Dequantizer


def page_rows(cache: Any) -> Any:
    """Rows from a page of a cache [pages, rows of a page, 512] to the next, those between pages included. On the host's
    side of the launch, as all below."""
    return Int32(cache.stride[0] // HEAD_DIM)


def rows_of(cache: cute.Tensor) -> Any:
    """From a cache's first row to its last one."""
    return (length(cache, 0) - 1) * page_rows(cache) + length(cache, 1)


def slot_cache(cache: cute.Tensor) -> SlotCache:
    """Whose places are counted in rows."""
    rows = length(cache, 1)
    divisor = cute.fast_divmod_create_divisor_v2(rows)
    return SlotCache(address(cache), length(cache, 0) * rows, divisor, page_rows(cache) - rows)


# ---- keys


@dataclass(frozen=True)
class BlackwellMixedKey(BlackwellPrefillKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill_mixed"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(MixedKernel().launch, fake_mixed(BFloat16))


@dataclass(frozen=True)
class BlackwellMixedFp8Key(BlackwellPrefillKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill_mixed_fp8"

    @property
    def smem_bytes(self) -> int:
        return FP8.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(MixedFp8Kernel().launch, fake_mixed(Float8E4M3FN))


# ---- what a tile takes


def work() -> tuple[Work, ...]:
    """Of both formats; the calls are those of prefill, as perf's are."""
    bf16 = {"rows in": float(STAGE_BYTES)}
    codes = {"codes in and out": 2.0 * RAW_BYTES, "f16 in": float(STAGE_BYTES)}
    found = []
    for name, rows, size in (("bf16", bf16, 2), ("e4m3", codes, 1)):
        kv_bytes = KV_ROWS * HEAD_DIM * size
        shapes = tuple(shape(f"{name} sq{QUERY_ROWS} h64 {keys} keys", 64, keys, kv_bytes) for keys in (640, 1152))
        found.append(of_tile("sparse_mla_mixed", f"{name}, 64 heads", rows, shapes=shapes))
    return tuple(found)
