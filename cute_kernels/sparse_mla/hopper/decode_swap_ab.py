# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode on Hopper for up to 16 heads, rows whole (no other launch combines splits): keys on the tensor
cores' long side, as in prefill_swap_ab.py, over records that are dequantized on their way.

A CTA takes work tiles: a query row with all its heads; or a cluster of two takes a row, half of its tiles each, and
each CTA adds up half of the columns of O (`Combination`). Keys come in tiles of 64. Warpgroups:

    0, 1   dequantizer, QK and softmax, ping-pong   records -> bf16, S^T = K Q^T, softmax     DequantQkSoftmax
    2      PV and epilogue                          copies Q, O^T += V^T P, out               PvEpilogue
    3      producer                                 indices -> rows, their copies             decode.Producer

    indices  gmem --> producer (index, then page and row of each key of a tile)
    records  gmem --bulk copy--> raw ring [4 stages of 32 keys] --dequantizer--> K in registers --wgmma--> S^T
    scales   gmem --cp.async---> scale, same stages, of fp8_ds_mla  |                                      v softmax
    Q        gmem --cp.async--> q ---------------------------------------------------------wgmma--> S^T   p [2]
                                                                    +-----> KV ring [2 tiles] --------wgmma--> O^T
    out      gmem <---------------------------------------------------------------------------------------------+

    barrier   full                                      empty                        waits for full, for empty
    fp8       all bytes of 32 keys' records and the     dequantizer has loaded       dequantizer, producer
              tile's header are there                   them
    kv        none: p's                                 PV is done with a tile       -, dequantizer
    p         a warpgroup has stored a tile's P, and    PV is done with it           PV, softmax
              before that its V
    q         a work tile's queries                     none: PV copies them         QK
    row_max   of each softmax warpgroup: its tile counts in the running maxima       the other softmax warpgroup
    combined  (cluster) the other CTA's maxima and      none: a row a cluster        PV
              sums; then its part of O

K goes to the tensor cores from the registers that it is dequantized in, so shared memory has it once, for PV. Lane l of
a warp has, with c = l % 4, columns 16 c ... 16 c + 15 of each slab (64 columns) of two keys, and a product of 16
columns takes four of them: 16 c + 4 k ... 16 c + 4 k + 3 is what it has of product k. So columns of a slab are in the
order of products: of its 32 words (pairs of columns) number 8 c + i is word c of 16-byte chunk i, in Q, in V, and in
the rows of O^T.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, convert, ptx, wgmma
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.dsl.transforms import HALF_TABLE_BYTES, rotate_pair_back
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, MXFP8_V41, NVFP4_V41
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.sparse_mla.hopper import prefill_index_loader as index_loader
from cute_kernels.sparse_mla.hopper import prefill_swap_ab as swap_ab
from cute_kernels.sparse_mla.hopper.decode import Producer
from cute_kernels.sparse_mla.hopper.decode_dequantize import E2M1_SHIFT, LEAST_POWER, NAN, ONES, e2m1_factors
from cute_kernels.sparse_mla.hopper.decode_smem import (
    CURSOR,
    END,
    EXTRA,
    FIRST,
    FP8_KEYS,
    FP8_STAGES,
    HEADER,
    HEADERS,
    KEYS,
    LAST,
    PING_PONG,
    SLAB,
    SLAB_BYTES,
    SLAB_ROW_BYTES,
    WARP_KEYS,
    WORDS_BYTES,
    RecordPart,
)
from cute_kernels.sparse_mla.kernel_args import DecodeArgs, DecodeKernelKey, fake_decode
from cute_kernels.sparse_mla.params import (
    NEG_MAX,
    RESCALE_THRESHOLD,
    KVSources,
    Logs,
    PrefillOutput,
    PrefillQuery,
    PrefillScheduler,
    Query,
    TileScheduler,
    logs_of,
    out_scale_of,
)

# ---- config

SLABS = HEAD_DIM // SLAB
SLAB_STEPS = SLAB // swap_ab.STEP
TILE_BYTES = KEYS * HEAD_DIM * 2

LARGE = 0x80808080
"""Bits of scale bytes that make a scale 2 or more, too large for one product in bf16."""

PITCH = FP8_DS_MLA.data_bytes
"""From row to row of a stage, but for the shortest records."""

STAGE_BYTES = FP8_KEYS * PITCH

WHOLE = {
    FP8_DS_MLA.id: RecordPart(
        PITCH, PITCH, 0, None, FP8_DS_MLA.scale_bytes, FP8_DS_MLA.scale_bytes, PITCH, STAGE_BYTES
    ),
    MXFP8_V41.id: RecordPart(528, 528, 0, MXFP8_V41.data_bytes, 528, 0, PITCH, STAGE_BYTES),
    NVFP4_V41.id: RecordPart(288, 288, 0, NVFP4_V41.data_bytes, 288, 0, 288, STAGE_BYTES),
}
"""Records by format, as a CTA has the whole of them. Loads of rows meet in no bank: of PITCH, 16 bytes of two rows at a
time; of 288 bytes, 8 of four."""

PV, PRODUCER, WARPGROUPS = 2, 3, 4
THREADS = WARPGROUPS * 128

SOFTMAX_BARRIER = 3
"""Of the first softmax warpgroup; the second one's comes next. 1 and 2 are prefill_swap_ab.py's."""

SOFTMAX_REGISTERS, PV_REGISTERS, PRODUCER_REGISTERS = 160, 144, 48
"""Per thread, in steps of 8; all four warpgroups together have 512, what they are launched with."""

RELEASED = 2
"""Slabs that are dequantized before the one that is loaded last: until its words are there others are under way."""

SLAB_ORDER = (*range(RELEASED), SLABS - 1, *range(RELEASED, SLABS - 1))


# ---- shared memory


class Own(NamedTuple):
    """Addresses in shared memory of what prefill_swap_ab.py has not; by default sizes in bytes.

    fp8       [4][32 keys][PITCH] records
    scale     [4][32 keys] 8 scale bytes, of fp8_ds_mla
    header    [8] headers of tiles, as decode.py has them
    cursor    [4 producer warps] where it is
    row_max   [16 heads] fp32: running maxima
    known     [2 CTAs][16 heads] two fp32: of each CTA's split maximum and sum
    """

    fp8: Any = FP8_STAGES * STAGE_BYTES
    scale: Any = FP8_STAGES * FP8_KEYS * FP8_DS_MLA.scale_bytes
    header: Any = HEADERS * HEADER
    cursor: Any = 4 * CURSOR
    row_max: Any = 64
    known: Any = 256


def row_sum_bytes(heads: int) -> int:
    """A softmax warpgroup's running sums, [128 threads][heads / 4] fp32. At a work tile's end it has its exchange
    there."""
    return wgmma.WARPGROUP * heads // 4 * 4


def smem_parts(config: swap_ab.SwapAbConfig) -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order. Of prefill_swap_ab.py's: what its producer does
    not need; the KV ring has two whole tiles."""
    unused = ("lists", "header", "cursors", "exchange")
    shared = {name: size for name, size in swap_ab.smem_parts(config).items() if name not in unused}
    shared |= {"kv": PING_PONG * TILE_BYTES, "row_sum": PING_PONG * row_sum_bytes(config.heads)}
    return shared | {f"own_{name}": size for name, size in Own()._asdict().items()}


BARRIERS = 2 * (swap_ab.P_STAGES + FP8_STAGES) + 4 * PING_PONG


def smem_bytes(config: swap_ab.SwapAbConfig) -> int:
    return sum(smem_parts(config).values()) + BARRIERS * 8


def allocate(allocator: SmemAllocator, config: swap_ab.SwapAbConfig) -> tuple[swap_ab.Smem, Own]:
    """exchange is where row_sum is."""
    places = {}
    for name, size in smem_parts(config).items():
        align = 1024 if name in swap_ab.SWIZZLED else 16
        place = allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
        places[name] = place.iterator.toint()
    own = Own(*(places.pop(f"own_{name}") for name in Own._fields))
    places["exchange"] = places.pop("row_sum")
    return swap_ab.Smem(**places, lists=None, header=None, cursors=None), own


@dataclass(frozen=True)
class Bars:
    """A CTA's mbarriers: the table at the head. kv: empty, row_max: full, of each softmax warpgroup's tiles; q: of even
    and of odd work tiles, since a softmax warpgroup may see every second one alone; combined: full, of what the other
    CTAs of a row know of their splits, and of their parts of O."""

    fp8: barriers.Ring
    p: barriers.Ring
    kv: Any
    row_max: Any
    q: Any
    combined: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        rings = (barriers.Ring.allocate(smem, stages) for stages in (FP8_STAGES, swap_ab.P_STAGES))
        return cls(*rings, *(smem.allocate_array(Int64, PING_PONG) for _ in range(4)))

    def initialize(self) -> None:
        """By one thread; the CTA, or the cluster, synchronizes afterwards."""
        # of each producer warp that has keys in it one thread, and the threads that have keys' scales
        self.fp8.initialize(2 + FP8_KEYS, 4)
        self.p.initialize(4, 4)
        for of_tiles in (self.kv, self.row_max):
            barriers.initialize(of_tiles, PING_PONG, 4)
        barriers.initialize(self.q, PING_PONG, wgmma.WARPGROUP)
        barriers.initialize(self.combined, 2, 1)
        cute.arch.mbarrier_init_fence()


# ---- queries


@dataclass(frozen=True)
class QueryCopies:
    """Copies of work tiles' queries, by the PV warpgroup: it knows when QK is done with those before."""

    config: swap_ab.SwapAbConfig
    bars: Bars
    smem: swap_ab.Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    lane: Any
    warp: Any

    @cute.jit
    def copy_async(self, number: Any) -> None:
        """Start to copy the queries of the CTA's work tile of that number, if there is one. A warp does two slabs."""
        config, q, lane, scheduler = self.config, self.q, self.lane, self.scheduler
        work_tile = scheduler.first + number * scheduler.step
        if work_tile < scheduler.end:
            stage = number & config.q_stages - 1
            source = q.base + Int64(scheduler.row(work_tile)) * q.row + lane * 4
            target = self.smem.q + stage * config.q_bytes + (lane >> 3) * 4
            for head in cutlass.range(config.heads, unroll=4):
                # nothing is read of heads that are not there
                size = Int32(4) if head < q.heads else Int32(0)
                row = source + Int64(cutlass.min(head, q.heads - 1)) * q.head
                to = target + head * SLAB_ROW_BYTES + ((lane & 7) ^ (head & 7)) * 16
                for j in range_constexpr(SLABS // 4):
                    slab = self.warp * (SLABS // 4) + j
                    ptx.copy_async_or_zero(
                        to + slab * (config.heads * SLAB_ROW_BYTES), row + Int64(slab * SLAB_ROW_BYTES), 4, size
                    )
            cute.arch.cp_async_mbarrier_arrive_noinc(self.bars.q + (number & 1))


# ---- dequantization, QK and softmax


@dataclass(frozen=True)
class DequantQkSoftmax:
    """A warpgroup that dequantizes, and does QK and softmax of, every second tile, from `warpgroup` on.

    A warp has 16 keys: a lane two of them, 8 apart, and of each slab 16 neighbouring columns. Both warpgroups share
    the running maxima, for which they take turns, and move them as prefill_swap_ab.py does; each has sums of its
    own, relative to the maxima that it knows of.

    formats   of both caches
    ctas      of a row
    softmax   with what of the exchange is the warpgroup's
    mma       K Q^T with K in registers, the first step of a tile and the others
    """

    formats: tuple[str, str]
    ctas: int
    bars: Bars
    own: Own
    softmax: swap_ab.ColumnSoftmax
    mma: tuple[Any, Any]
    q_layout: Any
    warpgroup: Any

    @cute.jit
    def run(self) -> None:
        """Give PV the V and P of every second tile."""
        bars, own, softmax = self.bars, self.own, self.softmax
        config, scheduler, warp = softmax.config, softmax.scheduler, softmax.warp
        part = self.mma[0].get_slice(softmax.thread)
        shape = part.partition_shape_C((KEYS, config.heads))
        s, scores = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        # one is filled while tensor cores read the other
        k_parts = [cute.make_rmem_tensor(part.partition_shape_A((KEYS, SLAB)), BFloat16) for _ in range(2)]
        scale = ptx.abs_f32(softmax.scale_log2)
        row_max = [Float32(NEG_MAX) for _ in config.own_heads]
        row_sum = [Float32(0.0) for _ in config.own_heads]
        # the CTA's work tile before the first one
        work_tile, number, q_at = scheduler.first - scheduler.step, Int32(-1), softmax.smem.q
        turn, flags = Int32(0), Int32(0)
        while flags & END == 0:
            for piece in range_constexpr(2):
                bars.fp8.wait_full(2 * self.warpgroup + piece, turn & 1)
            header_at = own.header + (2 * turn + self.warpgroup & HEADERS - 1) * HEADER
            flags, found, _, _ = ptx.load_shared_128(header_at)
            skipped = ptx.load_shared_s32(header_at + 16 + warp * 4)
            if flags & END == 0:
                if found != work_tile:
                    # at most one of a single tile is between
                    number = number + (Int32(1) if found - work_tile == scheduler.step else Int32(2))
                    work_tile = found
                    for j in range_constexpr(len(config.own_heads)):
                        row_max[j], row_sum[j] = Float32(NEG_MAX), Float32(0.0)
                    q_at = softmax.smem.q + (number & config.q_stages - 1) * config.q_bytes
                    ptx.wait_mbarrier((bars.q + (number & 1)).toint(), number >> 1 & 1)
                    # tensor cores read them
                    cute.arch.fence_view_async_shared()
                logit = Int32(0)
                if softmax.sink != 0 and self.ctas == 1:
                    is_wanted = (flags & LAST != 0) & (softmax.thread < softmax.q.heads)
                    logit = ptx.load_global_s32_where(is_wanted, softmax.sink + Int64(softmax.thread) * 4)
                tile_scale, shift = scale, Float32(0.0)
                is_extra = False
                if const_expr(self.formats[0] != self.formats[1]):
                    is_extra = flags & EXTRA != 0
                if is_extra:
                    self.multiply(self.formats[1], s, k_parts, part, q_at, turn, skipped)
                    if const_expr(self.formats[1] == NVFP4_V41.id):
                        tile_scale, shift = scale * Float32(2.0**E2M1_SHIFT), Float32(E2M1_SHIFT)
                else:
                    self.multiply(self.formats[0], s, k_parts, part, q_at, turn, skipped)
                valid = ~skipped
                softmax.take_scores(s, scores, (valid & 0xFF, valid >> 8 & 0xFF))
                row_max, row_sum = self.give_p(
                    scores, tile_scale, shift, row_max, row_sum, flags, turn, logit, work_tile
                )
            turn = turn + 1

    # ---- dequantization and QK

    @cute.jit
    def multiply(
        self, kv_format: cutlass.Constexpr, s: Any, k_parts: Any, part: Any, q_at: Any, turn: Any, skipped: Any
    ) -> None:
        """s = K Q^T of a tile, which the KV ring has then."""
        softmax, record = self.softmax, const_expr(WHOLE[kv_format])
        lane, warp, warpgroup_number = softmax.lane, softmax.warp, self.warpgroup
        quad, member = lane >> 2, lane & 3
        # stages, and keys of them, are next to each other
        key = (2 * warpgroup_number + (warp >> 1)) * FP8_KEYS + (warp & 1) * WARP_KEYS + quad
        stage_at = self.own.fp8 + (2 * warpgroup_number + (warp >> 1)) * STAGE_BYTES
        row_at = stage_at + ((warp & 1) * WARP_KEYS + quad) * record.pitch
        rows = [row_at + half * 8 * record.pitch for half in range(2)]
        scales_at = [self.own.scale + (key + 8 * half) * FP8_DS_MLA.scale_bytes for half in range(2)]
        words = [self.load_scales(kv_format, rows[half], scales_at[half]) for half in range(2)]
        raw = [[self.load_codes(kv_format, rows[half], slab, member) for half in range(2)] for slab in range(SLABS)]
        # of what is not there scales are 0, whatever there is in the stage
        masks = [(skipped >> (quad + 8 * half) & 1) - 1 for half in range(2)]
        scales = self.scales_of(kv_format, words, member, masks)
        is_large = False
        if const_expr(kv_format != NVFP4_V41.id):
            is_large = cute.arch.vote_any_sync((scales[0] | scales[1] | scales[2] | scales[3]) & LARGE != 0)
        ptx.wait_mbarrier((self.bars.kv + warpgroup_number).toint(), turn & 1 ^ 1)
        # a lane's row of its matrix, of four: keys 0 to 7 and 8 to 15 of one chunk, and of the next one
        matrix, row = lane >> 3, lane & 7
        target = softmax.smem.kv + warpgroup_number * TILE_BYTES + (warp * WARP_KEYS + (matrix & 1) * 8 + row) * 128
        target = target + ((matrix >> 1 ^ row) << 4)
        q_tile = wgmma.uniform_tile(ptx.again(q_at), self.q_layout, BFloat16)
        q_parts = self.mma[0].make_fragment_B(part.partition_B(q_tile))
        for i in range_constexpr(SLABS):
            slab = const_expr(SLAB_ORDER[i])
            k = k_parts[i % 2]
            held = cute.recast_tensor(k, Int32)
            if const_expr(i >= 2):
                # of the products before the last ones: they have read these registers
                warpgroup.wait_group(1)
            for half in range_constexpr(2):
                pairs = self.dequantize(kv_format, raw[slab][half], scales, half, slab, is_large, masks[half])
                for j in range_constexpr(2 * SLAB_STEPS):
                    held[2 * j + half] = pairs[j]
            for step in range_constexpr(SLAB_STEPS):
                at = (target ^ (32 * step)) + slab * SLAB_BYTES
                ptx.store_matrices(at, [held[4 * step + j] for j in range(4)])
            if const_expr(i == RELEASED):
                self.release()
            warpgroup.fence()
            for step in range_constexpr(SLAB_STEPS):
                chosen = self.mma[0] if const_expr(i + step == 0) else self.mma[1]
                cute.gemm(chosen, s, k[None, None, step], q_parts[None, None, slab * SLAB_STEPS + step], s)
            warpgroup.commit_group()
        warpgroup.wait_group(0)

    def load_scales(self, kv_format: str, row_at: Any, scale_at: Any) -> list[Any]:
        """A key's scale bytes."""
        if kv_format == FP8_DS_MLA.id:
            return [*ptx.load_shared_64(scale_at)]
        first = (MXFP8_V41 if kv_format == MXFP8_V41.id else NVFP4_V41).data_bytes
        return [word for at in range(first, WHOLE[kv_format].row, 16) for word in ptx.load_shared_128(row_at + at)]

    def scales_of(self, kv_format: str, words: list[list[Any]], member: Any, masks: list[Any]) -> list[Any]:
        """Of both keys' scale bytes a byte for each slab of the lane's columns; NVFP4's become factors, bf16, two in a
        word. First those of one key."""
        if kv_format == NVFP4_V41.id:
            return e2m1_factors([*words[0], *words[1]], member, [masks[0]] * 2 + [masks[1]] * 2)
        if kv_format == MXFP8_V41.id:
            chosen = 0x6420 + (member >> 1) * 0x1111
            return [
                ptx.permute_bytes(words[half][i], words[half][i + 1], chosen) & masks[half]
                for half in range(2)
                for i in (0, 2)
            ]
        # the last slab has none
        return [word for low, high in words for word in (low, high & 0x00FFFFFF)]

    def load_codes(self, kv_format: str, row_at: Any, slab: int, member: Any) -> Any:
        """The lane's columns of a key and a slab, as the record has them."""
        if kv_format == NVFP4_V41.id:
            return ptx.load_shared_64(row_at + slab * (SLAB // 2) + member * 8)
        if kv_format == FP8_DS_MLA.id and slab == SLABS - 1:
            rope_at = row_at + slab * SLAB + member * 32
            return [*ptx.load_shared_128(rope_at), *ptx.load_shared_128(rope_at + 16)]
        return ptx.load_shared_128(row_at + slab * SLAB + member * 16)

    @cute.jit
    def dequantize(
        self,
        kv_format: cutlass.Constexpr,
        raw: Any,
        scales: Any,
        half: cutlass.Constexpr,
        slab: cutlass.Constexpr,
        is_large: Any,
        mask: Any,
    ) -> Any:
        """The lane's columns of a key and a slab as bf16, of NVFP4 2^-8 of their values."""
        pairs = []
        if const_expr(kv_format == NVFP4_V41.id):
            two = scales[4 * half + slab // 2]
            factor = ptx.permute_bytes(two, two, const_expr(0x1010 if slab % 2 == 0 else 0x3232))
            for codes in raw:
                pairs += [ptx.multiply_bf16x2(pair, factor) for pair in convert.bf16_pairs_of_e2m1(codes)]
        elif const_expr(len(raw) == 8):
            # rotary columns: where nothing was loaded there may be NaN
            pairs = [word & mask for word in raw]
        else:
            four = scales[2 * half + slab // 4]
            used = Int32(ONES) if is_large else four
            factor = ptx.bf16x2_of_ue8m0(used, slab % 4)
            for codes in raw:
                pairs += [ptx.multiply_bf16x2(ptx.bf16x2_of_two_codes(codes, pair), factor) for pair in range(2)]
            if is_large:
                byte = (four >> (slab % 4 * 8)) & 0xFF
                power = Int32(LEAST_POWER) if byte == 0 else byte << 7
                exact = (Int32(NAN) if byte == 255 else power) * 0x00010001
                pairs = [ptx.multiply_bf16x2(pair, exact) for pair in pairs]
        return pairs

    @cute.jit
    def release(self) -> None:
        """The producer may overwrite what the warp has loaded."""
        cute.arch.sync_warp()
        if self.softmax.lane == 0:
            for piece in range_constexpr(2):
                cute.arch.mbarrier_arrive(self.bars.fp8.empty(2 * self.warpgroup + piece))

    # ---- softmax

    @cute.jit
    def give_p(
        self,
        scores: Any,
        scale: Any,
        shift: Any,
        row_max: Any,
        row_sum: Any,
        flags: Any,
        turn: Any,
        logit: Any,
        work_tile: Any,
    ) -> tuple[Any, Any]:
        """Store a tile's P, 2^shift of it, and what PV has to know, and of a work tile's last tile what its logits come
        to. row_max, row_sum: of the warpgroup's tiles before. Returns them with this one."""
        bars, softmax, config = self.bars, self.softmax, self.softmax.config
        smem, lane, warp, own_heads = softmax.smem, softmax.lane, softmax.warp, softmax.config.own_heads
        buffer, other = self.warpgroup, self.warpgroup ^ 1
        round_ = turn & 1
        bars.p.wait_empty(buffer, round_)
        pairs = [[scores[swap_ab.index_of(j, half)] for half in range(2)] for j in own_heads]
        largest = [ptx.max_f32(*pair) * scale for pair in pairs]
        # the tile before is the other warpgroup's
        ptx.wait_mbarrier((bars.row_max + other).toint(), round_ ^ other)
        known = config.load_of_heads(lane, self.own.row_max)
        known = [Float32(NEG_MAX) if flags & FIRST != 0 else number for number in known]
        growth = [largest[j] - known[j] for j in own_heads]
        has_grown = Int32(1) if pairwise(growth, ptx.max_f32) > Float32(RESCALE_THRESHOLD) else Int32(0)
        has_factors = ptx.any_of_group(softmax.barrier, 128, has_grown)
        factors, maxima = [Float32(1.0) for _ in own_heads], [number + Float32(0.0) for number in known]
        if has_factors != 0:
            found = softmax.exchange_max(largest)
            for j in range_constexpr(len(own_heads)):
                moved = found[j] if found[j] - known[j] > Float32(RESCALE_THRESHOLD) else known[j]
                # there is nothing before a work tile's first tile
                is_new = known[j] == Float32(NEG_MAX)
                factors[j] = Float32(1.0) if is_new else ptx.exp2(known[j] - moved)
                maxima[j] = moved
        if (warp == 0) & (lane < 4):
            softmax.store_pairs(self.own.row_max, maxima)
            softmax.store_pairs(smem.factor + buffer * (config.heads * 4), factors)
        before = [Float32(0.0) for _ in own_heads]
        if flags & (LAST | FIRST) == LAST:
            # what the other warpgroup knows of the work tile
            bars.p.wait_full(other, round_ ^ other)
            before = self.load_sums(other)
        barriers.arrive_warp(lane, bars.row_max + self.warpgroup)
        for i in range_constexpr(cute.size(scores)):
            scores[i] = ptx.exp2(ptx.fma_rn(scores[i], scale, shift - maxima[i // 4 * 2 + i % 2]))
        unshift = ptx.exp2(-shift)
        for j in range_constexpr(len(own_heads)):
            own = row_sum[j] * ptx.exp2(row_max[j] - maxima[j])
            tile_sum = (scores[swap_ab.index_of(j, 0)] + scores[swap_ab.index_of(j, 1)]) * unshift
            row_sum[j] = own + tile_sum + before[j] * factors[j]
            row_max[j] = maxima[j]
        softmax.store_p(scores, smem.p + buffer * config.p_bytes)
        if (warp == 0) & (lane == 0):
            last = Int32(index_loader.LAST) if flags & LAST != 0 else Int32(0)
            ptx.store_shared_64(smem.target + buffer * swap_ab.TARGET, last, has_factors)
        if flags & LAST != 0:
            softmax.gather(row_sum, row_max, row_max)
            if softmax.thread < config.heads:
                if const_expr(self.ctas > 1):
                    whole_sum, _, whole_max = softmax.gathered(softmax.thread)
                    known_at = self.own.known + (ptx.rank_again() * config.heads + softmax.thread) * 8
                    ptx.store_shared_64(known_at, whole_max.bitcast(Int32), whole_sum.bitcast(Int32))
                else:
                    out_scale = softmax.store_lse(softmax.thread, work_tile, logit)
                    ptx.store_shared_f32(smem.out_scale + buffer * (config.heads * 4) + softmax.thread * 4, out_scale)
        else:
            self.store_sums(row_sum)
        softmax.publish_p(buffer)
        return row_max, row_sum

    def sums_at(self, warpgroup: Any) -> Any:
        """Address of the thread's sums as a warpgroup has them."""
        heads = self.softmax.config.heads
        first = self.softmax.smem.exchange + (warpgroup - self.warpgroup) * row_sum_bytes(heads)
        return first + self.softmax.thread * heads

    def load_sums(self, warpgroup: Any) -> list[Any]:
        numbers: list[Any] = []
        for i in range(self.softmax.config.heads // 8):
            numbers += ptx.load_shared_f32x2(self.sums_at(warpgroup) + 8 * i)
        return numbers

    def store_sums(self, row_sum: Any) -> None:
        words = [number.bitcast(Int32) for number in row_sum]
        for i in range(len(words) // 2):
            ptx.store_shared_64(self.sums_at(self.warpgroup), *words[2 * i : 2 * i + 2], offset=8 * i)


# ---- PV and epilogue


@dataclass(frozen=True)
class Combination:
    """What the PV warpgroup does with O of a split of a row: CTA r of a row's `ctas` gets the r-th share of the slabs
    of the others' O, each by its factor, where its KV ring was, and adds them up. A row is all that a CTA has then.

    sink, out   see swap_ab.ColumnSoftmax
    heads       how many there are
    """

    config: swap_ab.SwapAbConfig
    ctas: int
    bars: Bars
    smem: swap_ab.Smem
    own: Own
    sink: Any
    out: PrefillOutput
    heads: Any
    thread: Any
    lane: Any
    rank: Any

    @property
    def share(self) -> int:
        """Slabs of a CTA."""
        return SLABS // self.ctas

    @property
    def part_bytes(self) -> int:
        """Of a share of the slabs."""
        return self.share * self.config.heads // 8 * WORDS_BYTES

    def expect(self) -> None:
        """By one thread, before the cluster synchronizes."""
        others = self.ctas - 1
        for barrier, size in ((0, self.config.heads * 8), (1, self.part_bytes)):
            cute.arch.mbarrier_arrive_and_expect_tx(self.bars.combined + barrier, others * size)

    @cute.jit
    def run(self, o: Any, row: Any) -> Any:
        """The share's sum. Log-sum-exps of the row are stored."""
        bars, rank, thread, heads = self.bars, self.rank, self.thread, self.config.heads
        own_heads = [8 * (j // 2) + 2 * (self.lane & 3) + j % 2 for j in self.config.own_heads]
        logits = [self.load_logit(head) for head in own_heads]
        # all warps' products are done: when the others know of this split, they may write where V was
        cute.arch.barrier(barrier_id=swap_ab.EPILOGUE_BARRIER, number_of_threads=128)
        if thread < heads:
            known_at = self.own.known + (rank * heads + thread) * 8
            two = ptx.load_shared_64(known_at)
            for other in range_constexpr(1, self.ctas):
                barrier = ptx.map_shared(bars.combined.toint(), rank ^ other)
                ptx.store_remote_64(ptx.map_shared(known_at, rank ^ other), two, barrier)
        ptx.wait_mbarrier(bars.combined.toint(), Int32(0))
        self.config.rescale([o], self.factors(own_heads, logits, row))
        total = cute.make_rmem_tensor((self.share * heads // 2,), Float32)
        for target in range_constexpr(self.ctas):
            first = const_expr(target * self.share * (heads // 2))
            if rank == target:
                for i in range_constexpr(cute.size(total)):
                    total[i] = o[first + i]
            else:
                barrier = ptx.map_shared((bars.combined + 1).toint(), target)
                place = ptx.map_shared(self.smem.kv + rank * self.part_bytes + thread * 16, target)
                for i in range_constexpr(cute.size(total) // 4):
                    words = [o[first + 4 * i + j].bitcast(Int32) for j in range(4)]
                    ptx.store_remote_128(place + i * WORDS_BYTES, words, barrier)
        ptx.wait_mbarrier((bars.combined + 1).toint(), Int32(0))
        for other in range_constexpr(1, self.ctas):
            place = self.smem.kv + (rank ^ other) * self.part_bytes + thread * 16
            for i in range_constexpr(cute.size(total) // 4):
                part = ptx.load_shared_128(place + i * WORDS_BYTES)
                for j in range_constexpr(4):
                    total[4 * i + j] = total[4 * i + j] + part[j].bitcast(Float32)
        return total

    def load_logit(self, head: Any) -> Any:
        """Bits of a head's sink, if it has one."""
        return ptx.load_global_s32_where((self.sink != 0) & (head < self.heads), self.sink + Int64(head) * 4)

    @cute.jit
    def factors(self, own_heads: Any, logits: Any, row: Any) -> Any:
        """What to multiply this CTA's O with, by the thread's heads."""
        maxima, sums = [], []
        for cta in range_constexpr(self.ctas):
            at = self.own.known + cta * (self.config.heads * 8)
            pairs = [ptx.load_shared_128(at + own_heads[2 * i] * 8) for i in range(self.config.heads // 8)]
            words = [word for pair in pairs for word in pair]
            maxima.append([word.bitcast(Float32) for word in words[::2]])
            sums.append([word.bitcast(Float32) for word in words[1::2]])
        factors = []
        for j in range_constexpr(len(own_heads)):
            row_max = pairwise([each[j] for each in maxima], ptx.max_f32)
            weights = [ptx.exp2(each[j] - row_max) for each in maxima]
            row_sum = pairwise([sums[cta][j] * weights[cta] for cta in range(self.ctas)], operator.add)
            own_max = ptx.load_shared_f32(self.own.known + (self.rank * self.config.heads + own_heads[j]) * 8)
            factors.append(out_scale_of(row_sum, row_max, logits[j], self.sink) * ptx.exp2(own_max - row_max))
            lse = (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
            lse = Float32(Float32.inf) if row_sum == Float32(0.0) else lse
            is_told = (self.rank == 0) & (self.thread < 4) & (own_heads[j] < self.heads)
            self.out.lse.store((row, own_heads[j]), lse, is_told)
        return factors


@dataclass(frozen=True)
class PvEpilogue:
    """The PV and epilogue warpgroup: O^T += V^T P, as in prefill_swap_ab.py.

    A thread has of each slab rows r and r + 8 of 16 of its warp, r = lane // 4, of two or four heads; transposed, four
    neighbouring columns of head r of every 8.

    pv        adds to what is there
    layouts   of a tile of P, and of one of V
    """

    config: swap_ab.SwapAbConfig
    bars: Bars
    smem: swap_ab.Smem
    queries: QueryCopies
    combination: Combination
    out: PrefillOutput
    thread: Any
    pv: Any
    layouts: tuple[Any, Any]

    @cute.jit
    def run(self) -> None:
        """Store results."""
        config, bars, smem, queries, out, pv = self.config, self.bars, self.smem, self.queries, self.out, self.pv
        scheduler, lane, (p_layout, v_layout) = queries.scheduler, queries.lane, self.layouts
        part = pv.get_slice(self.thread)
        o = cute.make_rmem_tensor(part.partition_shape_C((HEAD_DIM, config.heads)), Float32)
        tile, number, work_tile = Int32(0), Int32(0), scheduler.first
        queries.copy_async(number)
        while work_tile < scheduler.end:
            number = number + 1
            if const_expr(config.q_stages > 1):
                # where those of the work tile before were
                queries.copy_async(number)
            row = scheduler.row(work_tile)
            angles = [(Int32(0),) * 2] * 2
            if const_expr(out.quant is not None):
                # there is time: the first tile's P is not there yet
                angles_at = out.quant.angles_at(row) + ((lane & 3) * 8 + queries.warp * 2) * 4
                angles = [ptx.load_global_64_again(angles_at + half * HALF_TABLE_BYTES) for half in range(2)]
            o.fill(0.0)
            flags, buffer = Int32(0), Int32(0)
            while flags & index_loader.LAST == 0:
                buffer = tile & 1
                bars.p.wait_full(buffer, tile >> 1 & 1)
                flags, has_factors = ptx.load_shared_64(smem.target + buffer * swap_ab.TARGET)
                if const_expr(config.q_stages == 1):
                    if flags & index_loader.LAST != 0:
                        # all products of this work tile's queries are done
                        queries.copy_async(number)
                if has_factors != 0:
                    config.rescale([o], config.load_of_heads(lane, smem.factor + buffer * (config.heads * 4)))
                p = wgmma.uniform_tile(smem.p + buffer * config.p_bytes, p_layout, BFloat16)
                v = wgmma.uniform_tile(smem.kv + buffer * TILE_BYTES, v_layout, BFloat16)
                p_parts = pv.make_fragment_B(part.partition_B(p))
                transposed = cute.composition(v, cute.make_layout((HEAD_DIM, KEYS), stride=(KEYS, 1)))
                v_parts = pv.make_fragment_A(part.partition_A(transposed))
                # of P and V stored in the ordinary way; where they are stored, it would wait for the stores
                cute.arch.fence_view_async_shared()
                warpgroup.fence()
                for step in range_constexpr(KEYS // swap_ab.STEP):
                    cute.gemm(pv, o, v_parts[None, None, step], p_parts[None, None, step], o)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                barriers.arrive_warp(lane, bars.kv + buffer)
                if flags & index_loader.LAST == 0:
                    swap_ab.release(bars.p.empty(buffer), lane)
                tile = tile + 1
            total = o
            if const_expr(self.combination.ctas > 1):
                total = self.combination.run(o, row)
            else:
                config.rescale([o], config.load_of_heads(lane, smem.out_scale + buffer * (config.heads * 4)))
            if const_expr(out.quant is not None):
                self.store_quantized(total, angles, row, smem.p + buffer * config.p_bytes)
            else:
                self.store(total, row)
            # its out_scale has been used
            swap_ab.release(bars.p.empty(buffer), lane)
            work_tile = work_tile + scheduler.step

    def words(self, o: Any, slab: int, group: int) -> list[Any]:
        """Four neighbouring columns of a slab, those from 16 (lane % 4) + 4 warp on, of the lane's head of a group of
        8, as bf16."""
        first = slab * (self.config.heads // 2) + 4 * group
        return [ptx.transpose_matrix(ptx.bf16x2(o[i], o[i + 1])) for i in (first, first + 2)]

    @property
    def first_slab(self) -> Any:
        """Of the CTA's share."""
        return self.combination.rank * self.combination.share

    @cute.jit
    def store(self, o: Any, row: Any) -> None:
        """Store the CTA's share of a row's results."""
        out, lane = self.out, self.queries.lane
        target = out.base + Int64(row) * out.row + (self.first_slab * SLAB_ROW_BYTES + (lane & 3) * 32)
        target = target + self.queries.warp * 8
        for group in range_constexpr(self.config.heads // 8):
            head = group * 8 + (lane >> 2)
            head_at = target + Int64(head) * out.head
            for slab in range_constexpr(self.combination.share):
                low, high = self.words(o, slab, group)
                ptx.store_global_64(head_at + slab * SLAB_ROW_BYTES, low, high, head < self.queries.q.heads)

    @cute.jit
    def store_quantized(self, o: Any, angles: Any, row: Any, absmax: Any) -> None:
        """Store the CTA's share of a row's results as codes. Two slabs have a scale.

        absmax   where P was: [4 warps][heads][4 scales] fp32, of what a warp has of a head's results
        """
        heads, quant, lane, warp = self.config.heads, self.out.quant, self.queries.lane, self.queries.warp
        scales, is_last = const_expr(self.combination.share // 2), self.combination.rank == self.combination.ctas - 1
        # all warps' products of P are done
        cute.arch.barrier(barrier_id=swap_ab.EPILOGUE_BARRIER, number_of_threads=128)
        own_at = absmax + (warp * heads + (lane >> 2)) * 16
        eights = []
        for group in range_constexpr(heads // 8):
            largest = []
            for i in range_constexpr(scales):
                values = convert.bf16_floats([*self.words(o, 2 * i, group), *self.words(o, 2 * i + 1, group)])
                if const_expr(i == scales - 1):
                    values = self.rotate_back(values, angles, is_last)
                most = Float32(0.0)
                for value in values:
                    most = ptx.max_f32(most, ptx.abs_f32(value))
                largest.append(over_quad(most, ptx.max_f32).bitcast(Int32))
                eights.append(values)
            if lane & 3 == 0:
                ptx.store_shared_128(own_at + group * (8 * 16), [*largest, *[Int32(0)] * (4 - scales)])
        cute.arch.barrier(barrier_id=swap_ab.EPILOGUE_BARRIER, number_of_threads=128)
        for group in range_constexpr(heads // 8):
            head = group * 8 + (lane >> 2)
            is_there = head < self.queries.q.heads
            target = quant.codes_at(row, head) + (self.first_slab * SLAB + (lane & 3) * 16 + warp * 4)
            warps = [ptx.load_shared_128(absmax + (other * heads + head) * 16) for other in range(4)]
            for i in range_constexpr(scales):
                most = pairwise([four[i].bitcast(Float32) for four in warps], ptx.max_f32)
                byte = convert.ue8m0_from_absmax(most, E4M3_MAX, OUTPUT_FLOOR)
                chunk = self.combination.rank * scales + i
                quant.store_scale(byte, row, head, chunk, lane & 3, is_there & (warp == i))
                factor = convert.ue8m0_inverse(byte)
                codes = convert.e4m3_words([value * factor for value in eights[group * scales + i]])
                for j in range_constexpr(2):
                    ptx.store_global_s32(target + (2 * i + j) * SLAB, codes[j], is_there)

    @cute.jit
    def rotate_back(self, values: Any, angles: Any, is_rope: Any) -> Any:
        """Four columns each of two slabs, the second ones rotated back if they are rotary."""
        rotated = values[:4]
        for i in range_constexpr(2):
            cos, sin = (words[i].bitcast(Float32) for words in angles)
            first = const_expr(4 + 2 * i)
            pair = rotate_pair_back(values[first], values[first + 1], cos, sin)
            rotated += [pair[j] if is_rope else values[first + j] for j in range(2)]
        return rotated


# ---- kernel


class RowLogs(NamedTuple):
    """As Logs of prefill, by query row and head, of lse [1, b, h, s_q]. tokens: divisor"""

    logs: Logs
    tokens: Any

    def store(self, place: tuple[Any, ...], number: Any, condition: Any) -> None:
        row, head = place
        batch, token = divmod(row, self.tokens)
        self.logs.store((Int32(0), batch, head, token), number, condition)


class DecodeSwapAbKernel:
    """See kernel_args.DecodeArgs; rows are whole, and rows of q, and of out, equally far apart."""

    def __init__(self, key: DecodeSwapAbKey) -> None:
        self.key, self.config = key, key.config
        self.shared = swap_ab.SwapAbKernel(key.config)

    @cute.jit
    def launch(self, args: DecodeArgs) -> None:
        self.kernel.set_name_prefix(self.key.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        q, tokens = args.q, length(args.q, 1)
        rows = length(q, 0) * tokens
        q_row = cutlass.select_(tokens == 1, stride_bytes(q, 0), stride_bytes(q, 1))
        if const_expr(self.key.quantized):
            places = None, None, None, args.output().quant
        else:
            out_row = cutlass.select_(tokens == 1, stride_bytes(args.out, 1), stride_bytes(args.out, 2))
            places = address(args.out), out_row, stride_bytes(args.out, 3), None
        divisor = cute.fast_divmod_create_divisor_v2
        qk = wgmma.make_mma_of_registers(BFloat16, self.key.heads)
        qk_more = wgmma.make_mma_of_registers(BFloat16, self.key.heads)
        *_, pv = self.shared.tiled_mmas()
        _, *layouts = self.shared.smem_layouts()
        kernel = self.kernel(
            PrefillQuery(address(q), q_row, stride_bytes(q, 2), length(q, 2)),
            args.query(),
            args.sources(),
            places,
            logs_of(args.lse),
            args.sink,
            args.scale_log2,
            (divisor(tokens), divisor(Int32(self.key.ctas)), divisor(Int32(1))),
            rows,
            args.constant_lists,
            (qk, qk_more, pv),
            (wgmma.swizzled(BFloat16, KEYS, HEAD_DIM), *layouts),
        )
        ctas = const_expr(self.key.ctas)
        kernel.launch(
            grid=[rows * ctas if const_expr(ctas > 1) else cutlass.min(args.ctas, rows), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
            **({"cluster": [ctas, 1, 1]} if ctas > 1 else {}),
        )

    @cute.kernel
    def kernel(
        self,
        q: PrefillQuery,
        query: Query,
        sources: KVSources,
        places: tuple[Any, Any, Any, Any],
        lse: Logs,
        sink: Int64,
        scale_log2: Float32,
        divisors: tuple[Any, Any, Any],
        rows: Int32,
        constant_lists: Int32,
        mma: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        config, allocator = self.config, SmemAllocator()
        smem, own_smem = allocate(allocator, config)
        bars = Bars.allocate(allocator)
        own, first = thread % wgmma.WARPGROUP, ptx.block_again()
        lane, warp = own & 31, cute.arch.make_warp_uniform(own >> 5)
        base, out_row, out_head, quant = places
        tokens, splits, one_divisor = divisors
        out = PrefillOutput(base, out_row, out_head, None, RowLogs(lse, tokens), quant=quant)
        is_shared = const_expr(self.key.ctas > 1)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if const_expr(is_shared) else 0
        combination = Combination(config, self.key.ctas, bars, smem, own_smem, sink, out, q.heads, own, lane, rank)
        if thread == 0:
            bars.initialize()
            if const_expr(is_shared):
                combination.expect()
        if const_expr(is_shared):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        for one in mma[1:]:
            wgmma.accumulate(one)
        if constant_lists == 0:
            cute.arch.griddepcontrol_wait()
        if group < PRODUCER:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        v_layout, q_layout, p_layout = layouts
        work_tiles = rows * self.key.ctas
        split_log2 = Int32(self.key.ctas.bit_length() - 1)
        if group < PV:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            scheduler = PrefillScheduler(first, work_tiles, cute.arch.grid_dim()[0], split_log2)
            softmax = swap_ab.ColumnSoftmax(
                config=config,
                bars=bars,
                smem=smem._replace(exchange=smem.exchange + group * row_sum_bytes(config.heads)),
                scheduler=scheduler,
                q=q,
                out=out,
                sink=sink,
                scale_log2=scale_log2,
                thread=own,
                lane=lane,
                warp=warp,
                barrier=SOFTMAX_BARRIER + group,
            )
            DequantQkSoftmax(self.key.formats, self.key.ctas, bars, own_smem, softmax, mma[:2], q_layout, group).run()
        elif group < PRODUCER:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            scheduler = PrefillScheduler(first, work_tiles, cute.arch.grid_dim()[0], split_log2)
            queries = QueryCopies(config, bars, smem, scheduler, q, lane, warp)
            PvEpilogue(config, bars, smem, queries, combination, out, own, mma[2], (p_layout, v_layout)).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            cursor = own_smem.cursor + warp * CURSOR
            tiles = TileScheduler(first, work_tiles, cute.arch.grid_dim()[0], one_divisor, splits, tokens, Int32(0))
            Producer(self.key, bars, own_smem, Int32(0), tiles, query, sources, own, cursor, constant_lists).run()
        # no producer thread leaves before its last copies are there, which dequantizers wait for
        cute.arch.sync_threads()


# ---- key


@dataclass(frozen=True)
class DecodeSwapAbKey(DecodeKernelKey):
    """What distinguishes one compiled kernel from another.

    heads              8 or 16: how many there are at most
    second             how the extra list names its rows: "none" (there is none), "listed" by slot, "dense" by page
    format0, format1   record formats of both caches
    quantized          results are turned back and become e4m3 codes, see quant_output
    ctas               1, or 2 that share a row: a cluster, which has no other
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.decode_swap_ab"
    takes_constant_lists: ClassVar[bool] = True
    heads: int = 8
    second: str = "listed"
    format0: str = FP8_DS_MLA.id
    format1: str = NVFP4_V41.id
    quantized: bool = False
    ctas: int = 1

    @property
    def formats(self) -> tuple[str, str]:
        return self.format0, self.format1

    @property
    def parts(self) -> tuple[RecordPart, RecordPart]:
        """Of both caches' records, which a CTA has the whole of."""
        return WHOLE[self.format0], WHOLE[self.format1]

    @property
    def has_two_formats(self) -> bool:
        return self.format0 != self.format1

    @property
    def name(self) -> str:
        kinds = "_".join(kv_format.split("_")[0] for kv_format in self.formats)
        more = "_quant" * self.quantized + f"_{self.ctas}ctas" * (self.ctas > 1)
        return f"sparse_mla_decode_swap_ab_h{self.heads}_{self.second}_{kinds}{more}"

    @property
    def config(self) -> swap_ab.SwapAbConfig:
        return swap_ab.SwapAbConfig(self.name, self.heads)

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.config)

    @property
    def instructions(self) -> tuple[str, ...]:
        own = ("cvt.e4m3",) * self.quantized + ("st.async", "barrier.cluster") * (self.ctas > 1)
        return "wgmma", "bulk.load", "mbarrier", "stmatrix", "setmaxnreg", "griddepcontrol", *own

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        fakes = fake_decode(
            False, self.format0, self.format1, self.quantized, takes_constant_lists=self.takes_constant_lists
        )
        return entry_point(DecodeSwapAbKernel(self).launch, fakes)
