# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill and sparse_mla_mixed (bf16 caches) on Hopper for up to 16 heads: keys on the tensor cores' long
side, S^T = K Q^T and O^T = V^T P, so that heads need no padding to 64.

A CTA takes work tiles (params.PrefillScheduler): a query row with all its heads. Its keys come in tiles of 64 rows of
kv, which are both K and V. Warpgroups:

    0      QK and softmax     copies Q, S^T = K Q^T, softmax                                       QkSoftmax
    1      PV and epilogue    O^T += V^T P, out                                                    PvEpilogue
    2, 3   producer           indices -> rows (IndexLoader), copies of rows                        Producer

    indices  gmem --cp.async--> lists [4 tiles] (prefill_index_loader.py)
    KV       gmem --cp.async--> KV ring [12 stages, a quarter of a tile's columns each]
                                     |                  |
    Q        gmem --cp.async--> q --wgmma--> S^T        |
                                             v softmax  |
                                             p [2] --wgmma--> O^T
                                                              |
    out      gmem <-------------------------------------------+

    ring     full                                               empty
    kv       all rows of a quarter of a tile are there, and     PV warps are done with it (QK is, as P is there)
             with the first one its header
    p        softmax warps have stored P, and factors if        PV warps have used them
             maxima have moved

The 512 columns of a tile, or of the queries, are cut into slabs of 64; a slab of a tile is [64 keys, 128 bytes] of
bf16, in the layout of the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
perf/notes/prefill_swap_ab.md has why, perf/log/prefill_swap_ab.md what was tried.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.convert import bf16_floats, e4m3_words, ue8m0_from_absmax, ue8m0_inverse
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.dsl.tensor import length
from cute_kernels.dsl.transforms import HALF_TABLE_BYTES, rotate_pair_back
from cute_kernels.formats import HEAD_DIM
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.hopper.prefill_index_loader import (
    AHEAD,
    COPIED_ROWS,
    CURSOR,
    END,
    KEYS,
    LAST,
    LISTS,
    IndexLoader,
    list_bytes,
    own_lane,
)
from cute_kernels.sparse_mla.kernel_args import GatheredArgs, MixedArgs, fake_gathered, fake_mixed
from cute_kernels.sparse_mla.params import (
    NEG_MAX,
    RESCALE_THRESHOLD,
    PrefillOutput,
    PrefillQuery,
    PrefillScheduler,
    out_scale_of,
    output_policy,
    row_units,
)

# ---- config

HEADS = (8, 16)
"""Heads of a work tile, by kernel. With 32 the ring is shorter, and padding to 64 rows takes 10% less time."""

SLAB = 64
SLABS = HEAD_DIM // SLAB

STAGE_SLABS = 2
STAGE_COLUMNS = STAGE_SLABS * SLAB
QUARTERS = SLABS // STAGE_SLABS
"""Stages that a tile takes."""

KV_STAGES = 12
"""What shared memory has room for."""

Q_STAGES = {8: 2, 16: 1}
"""Work tiles whose queries are in shared memory, by heads: two of 16 would leave room for 11 KV stages. Of codes, which
are half as long, of twice the heads."""

P_STAGES = 2

HEADERS = 4
"""Of the tiles in the KV ring, and of the next one."""

PV, PRODUCER, WARPGROUPS = 1, 2, 4
"""Numbers of warpgroups, QK and softmax being 0: PV, the first of two of the producer; how many there are."""

THREADS = WARPGROUPS * 128
PRODUCER_WARPS = 8
SOFTMAX_BARRIER, EPILOGUE_BARRIER = 1, 2

SOFTMAX_REGISTERS, PV_REGISTERS, PRODUCER_REGISTERS = 152, 200, 80
"""Per thread, in steps of 8; all four warpgroups together have 512, what they are launched with."""


@dataclass(frozen=True)
class SwapAbConfig:
    """What a kernel is made for.

    op          name of the op
    heads       8 or 16: how many there are at most
    quantized   results become codes
    is_fp8      rows and queries are e4m3 codes, which are multiplied as f16 (prefill_mixed_swap_ab.py)
    """

    op: str
    heads: int
    quantized: bool = False
    is_fp8: bool = False

    @property
    def name(self) -> str:
        return f"{self.op}_{self.heads}{'_quant' if self.quantized else ''}"

    @property
    def q_stages(self) -> int:
        return Q_STAGES[max(self.heads // 2, HEADS[0]) if self.is_fp8 else self.heads]

    @property
    def q_slabs(self) -> int:
        """128 bytes of each head's query."""
        return SLABS // 2 if self.is_fp8 else SLABS

    @property
    def q_bytes(self) -> int:
        return self.heads * self.q_slabs * SLAB_ROW_BYTES

    @property
    def p_bytes(self) -> int:
        return self.heads * KEYS * 2

    @property
    def own_heads(self) -> range:
        """Of a thread: 8 (j // 2) + 2 (lane % 4) + j % 2."""
        return range(self.heads // 4)

    def load_of_heads(self, lane: Any, address: Any) -> list[Any]:
        """Of the fp32 numbers that heads have in shared memory, those of a thread's heads."""
        numbers: list[Any] = []
        for i in range(self.heads // 8):
            numbers += ptx.load_shared_f32x2(address + (8 * i + (lane & 3) * 2) * 4)
        return numbers

    def rescale(self, o: Any, factors: Any) -> None:
        """Multiply each column of O^T with its head's factor. o: parts of whole times 64 rows"""
        for part in o:
            for i in range(cute.size(part)):
                part[i] = part[i] * factors[i % (self.heads // 2) // 4 * 2 + i % 2]


# ---- shared memory

SLAB_BYTES = KEYS * SLAB * 2
SLAB_ROW_BYTES = SLAB * 2
KV_STAGE_BYTES = KEYS * STAGE_COLUMNS * 2

FLAGS_AT = PRODUCER_WARPS * 4
HEADER = 48
"""Bytes of a tile's header: for each producer warp, which of its keys are there; at FLAGS_AT, flags of the tile."""

TARGET = 8
"""Bytes of a tile's target: its flags, and whether there are factors."""

EXCHANGED = 16
"""Bytes of what a softmax warp tells of a head: row_sum, max_logit and row_max of its keys."""

SWIZZLED = ("kv", "q", "p")
"""What tensor cores read: 1024-byte aligned."""


def smem_parts(config: SwapAbConfig) -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order."""
    heads = config.heads
    absmax = {"absmax": 4 * heads * QUARTERS * 4} if config.quantized else {}
    return {
        "kv": KV_STAGES * KV_STAGE_BYTES,
        "q": config.q_stages * config.q_bytes,
        "p": P_STAGES * config.p_bytes,
        "lists": LISTS * list_bytes(PRODUCER_WARPS),
        "header": HEADERS * HEADER,
        "cursors": PRODUCER_WARPS * CURSOR,
        "factor": P_STAGES * heads * 4,
        "out_scale": P_STAGES * heads * 4,
        "target": P_STAGES * TARGET,
        "tile_max": 4 * heads * 4,
        "exchange": 4 * heads * EXCHANGED,
    } | absmax


def smem_bytes(config: SwapAbConfig) -> int:
    return sum(smem_parts(config).values()) + (KV_STAGES + P_STAGES) * barriers.BYTES_PER_STAGE


class Smem(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    kv          [12 stages][2 slabs][64 keys][64] bf16: K, and V
    q           [stages][8 slabs][heads][64] bf16
    p           [2 stages][heads][64 keys] bf16
    lists       [4] lists of the index loader
    header      [4] headers of tiles
    cursors     [8 producer warps] of the index loader
    factor      [2 stages][heads] fp32: what to multiply O^T with before a tile
    out_scale   [2 stages][heads] fp32: and what behind a work tile's last one
    target      [2 stages] targets
    tile_max    [4 warps][heads] fp32: the largest of a tile's scores
    exchange    [4 warps][heads] what a warp tells
    absmax      where codes are stored: [4 warps][heads][4 quarters] fp32, of what a warp has of a head's results
    """

    kv: Any
    q: Any
    p: Any
    lists: Any
    header: Any
    cursors: Any
    factor: Any
    out_scale: Any
    target: Any
    tile_max: Any
    exchange: Any
    absmax: Any = None

    @classmethod
    def allocate(cls, allocator: SmemAllocator, parts: dict[str, int]) -> Smem:
        places = []
        for name, size in parts.items():
            align = 1024 if name in SWIZZLED else 16
            place = allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
            places.append(place.iterator.toint())
        return cls(*places)


@dataclass(frozen=True)
class Bars:
    """A CTA's mbarriers, and what completes their phases.

    kv   full: all rows of a quarter of a tile are there, and the header. empty: PV warps are done with them
    p    full: softmax warps have stored a tile's P. empty: PV warps are done with it
    """

    kv: barriers.Ring
    p: barriers.Ring

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        return cls(*(barriers.Ring.allocate(smem, stages) for stages in (KV_STAGES, P_STAGES)))

    def initialize(self) -> None:
        """By one thread; the CTA synchronizes afterwards."""
        # every producer thread, and one of each producer warp for the header
        self.kv.initialize(PRODUCER_WARPS * 32 + PRODUCER_WARPS, 4)
        self.p.initialize(4, 4)
        cute.arch.mbarrier_init_fence()


@cute.jit
def release(empty: Any, lane: Any) -> None:
    """The warp is done with what the mbarrier is of."""
    cute.arch.sync_warp()
    if lane == 0:
        cute.arch.mbarrier_arrive(empty)


# ---- producer


@dataclass(frozen=True)
class Producer:
    """The producer: copies the rows of tiles, quarter by quarter. By two warpgroups.

    A warp does 8 rows of every tile, 4 at a time: 8 lanes copy the 128 bytes of a slab's row. Rows that nobody selects
    become zeros.
    """

    bars: Bars
    smem: Smem
    loader: IndexLoader

    @cute.jit
    def run(self) -> None:
        """Fill the KV ring."""
        bars, smem, loader = self.bars, self.smem, self.loader
        loader.start()
        flags, tile = Int32(0), Int32(0)
        stage, phase = barriers.start()
        while flags & END == 0:
            cute.arch.cp_async_wait_group(AHEAD - 1)
            cute.arch.sync_warp()
            place, flags = loader.next_rows()
            store_header(loader, smem.header, tile & HEADERS - 1, place, flags)
            row, chunk_at = loader.first_chunk()
            sources = []
            for i in range_constexpr(loader.own_rows // COPIED_ROWS):
                own = cute.arch.shuffle_sync(place, COPIED_ROWS * i + (own_lane() >> 3))
                source = loader.kv.address(own, flags, row + COPIED_ROWS * i) + (own_lane() & 7) * 16
                sources.append((source, Int32(16) if own >= 0 else Int32(0)))
            for quarter in range_constexpr(QUARTERS):
                bars.kv.wait_empty(stage, phase)
                self.copy_rows_async(sources, quarter, smem.kv + stage * KV_STAGE_BYTES + chunk_at)
                arrive_full(bars.kv.full(stage))
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
            loader.copy_next_indices_async()
            cute.arch.cp_async_commit_group()
            tile = tile + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def copy_rows_async(self, sources: Any, quarter: cutlass.Constexpr, target: Any) -> None:
        """Start to copy the warp's rows of a quarter; target: where the lane's first chunk goes."""
        for i in range_constexpr(self.loader.own_rows // COPIED_ROWS):
            source, size = sources[i]
            to = (target ^ (i % 2 * 64)) + i * (COPIED_ROWS * SLAB_ROW_BYTES)
            for slab in range_constexpr(STAGE_SLABS):
                column = (quarter * STAGE_SLABS + slab) * SLAB_ROW_BYTES
                ptx.copy_async_or_zero(to + slab * SLAB_BYTES, source + column, 16, size)


@cute.jit
def store_header(loader: IndexLoader, headers: Any, number: Any, place: Any, flags: Any) -> None:
    """Write the warp's part of a header."""
    valid = cute.arch.vote_ballot_sync(place >= 0)
    if own_lane() == 0:
        header_at = headers + number * HEADER
        ptx.store_shared_s32(header_at + loader.own_warp() * 4, valid & (1 << loader.own_rows) - 1)
        if loader.own_warp() == 0:
            ptx.store_shared_s32(header_at + FLAGS_AT, flags)
    cute.arch.sync_warp()


@cute.jit
def arrive_full(full: Any) -> None:
    """What the mbarrier is of is full when this warp's copies are there."""
    cute.arch.cp_async_mbarrier_arrive_noinc(full)
    if own_lane() == 0:
        cute.arch.mbarrier_arrive(full)


# ---- MMA and softmax

STEP = 16
"""Columns that an instruction multiplies."""

ALL_KEYS = 0xFF
"""Of a word of a header: all of a producer warp's are there."""


@dataclass(frozen=True)
class ColumnSoftmax:
    """What the QK and softmax warpgroup does but for the products, whose columns are heads.

    A warp has 16 keys of all heads, as tensor cores give them: a thread has two keys of two or four heads. Maxima move
    only when a head's outgrow theirs by 2^8: sums and O are relative to them, and until they move no warp asks what the
    others' are.

    barrier   number of the warpgroup's named barrier
    """

    config: SwapAbConfig
    bars: Any
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    sink: Any
    scale_log2: Any
    thread: Any
    lane: Any
    warp: Any
    barrier: Any = SOFTMAX_BARRIER

    def sync(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=128)

    @cute.jit
    def copy_q_async(self, work_tile: Any, q_stage: Any) -> None:
        """Start to copy a work tile's queries, if there is such one. A warp does its share of slabs, 4 heads at a
        time."""
        q, heads = self.q, self.config.heads
        # of codes queries are held in registers, and leave none for addresses
        lane = own_lane() if self.config.is_fp8 else self.lane
        if work_tile < self.scheduler.end:
            source = q.base + Int64(work_tile) * q.row + (lane & 7) * 16
            target = self.smem.q + q_stage * self.config.q_bytes
            for i in range_constexpr(heads // 4):
                head = 4 * i + (lane >> 3)
                # nothing is read of heads that are not there
                size = Int32(16) if head < q.heads else Int32(0)
                row = source + Int64(cutlass.min(head, q.heads - 1)) * q.head
                to = target + head * SLAB_ROW_BYTES + ((lane & 7) ^ (head & 7)) * 16
                for j in range_constexpr(self.config.q_slabs // 4):
                    slab = self.warp * (self.config.q_slabs // 4) + j
                    ptx.copy_async_or_zero(
                        to + slab * (heads * SLAB_ROW_BYTES), row + Int64(slab * SLAB_ROW_BYTES), 16, size
                    )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def take_scores(self, s: Any, scores: Any, valid: Any) -> None:
        """scores = s, with the sign of the scale, -inf where a key is not there."""
        for i in range_constexpr(cute.size(scores)):
            scores[i] = s[i]
        if self.scale_log2 < Float32(0.0):
            for i in range_constexpr(cute.size(scores)):
                scores[i] = -scores[i]
        if (valid[0] & valid[1]) != ALL_KEYS:
            for i in range_constexpr(cute.size(scores)):
                bit = valid[i // 2 % 2] >> (self.lane >> 2)
                scores[i] = scores[i] if bit & 1 != 0 else Float32(-Float32.inf)

    @cute.jit
    def softmax(
        self, scores: Any, scale: Any, row_max: Any, max_logit: Any, row_sum: Any, flags: Any, buffer: Any
    ) -> tuple[Any, Any, Any]:
        """Store a tile's P, and what PV has to know. Returns the work tile's maxima, largest logits and sums."""
        factors, has_factors, row_max, max_logit = self.move_max(scores, scale, row_max, max_logit, buffer)
        row_sum = self.weigh(scores, scale, row_max, row_sum, factors, has_factors, flags, buffer)
        return row_max, max_logit, row_sum

    @cute.jit
    def move_max(self, scores: Any, scale: Any, row_max: Any, max_logit: Any, buffer: Any) -> tuple[Any, Any, Any, Any]:
        """Returns what to multiply O with before a tile, whether that is anything, and the work tile's maxima and
        largest logits with it."""
        own_heads = self.config.own_heads
        largest = [ptx.max_f32(scores[index_of(j, 0)], scores[index_of(j, 1)]) * scale for j in own_heads]
        max_logit = [ptx.max_f32(max_logit[j], largest[j]) for j in own_heads]
        growth = [largest[j] - row_max[j] for j in own_heads]
        has_grown = Int32(1) if pairwise(growth, ptx.max_f32) > Float32(RESCALE_THRESHOLD) else Int32(0)
        has_factors = ptx.any_of_group(self.barrier, 128, has_grown)
        factors = [Float32(1.0) for _ in own_heads]
        if has_factors != 0:
            found = self.exchange_max(largest)
            for j in range_constexpr(len(own_heads)):
                moved = found[j] if found[j] - row_max[j] > Float32(RESCALE_THRESHOLD) else row_max[j]
                # there is nothing before a work tile's first tile
                is_new = row_max[j] == Float32(NEG_MAX)
                factors[j] = Float32(1.0) if is_new else ptx.exp2(row_max[j] - moved)
                row_max[j] = moved
            if (self.warp == 0) & (self.lane < 4):
                self.store_pairs(self.smem.factor + buffer * (self.config.heads * 4), factors)
        return factors, has_factors, row_max, max_logit

    @cute.jit
    def weigh(
        self,
        scores: Any,
        scale: Any,
        row_max: Any,
        row_sum: Any,
        factors: Any,
        has_factors: Any,
        flags: Any,
        buffer: Any,
    ) -> list[Any]:
        """Store a tile's P, and what PV has to know. Returns the work tile's sums."""
        smem, own_heads = self.smem, self.config.own_heads
        for i in range_constexpr(cute.size(scores)):
            scores[i] = ptx.exp2(ptx.fma_rn(scores[i], scale, -row_max[i // 4 * 2 + i % 2]))
        row_sum = [row_sum[j] * factors[j] + (scores[index_of(j, 0)] + scores[index_of(j, 1)]) for j in own_heads]
        self.store_p(scores, smem.p + buffer * self.config.p_bytes)
        if (self.warp == 0) & (self.lane == 0):
            ptx.store_shared_64(smem.target + buffer * TARGET, flags, has_factors)
        return row_sum

    @cute.jit
    def exchange_max(self, largest: Any) -> list[Any]:
        """The heads' largest scores of the tile."""
        heads, lane = self.config.heads, self.lane
        of_warp = [_over_keys(number, ptx.max_f32) for number in largest]
        if lane < 4:
            self.store_pairs(self.smem.tile_max + self.warp * (heads * 4), of_warp)
        self.sync()
        found = []
        for i in range_constexpr(heads // 8):
            pairs_at = self.smem.tile_max + (8 * i + (lane & 3) * 2) * 4
            pairs = [ptx.load_shared_f32x2(pairs_at + other * (heads * 4)) for other in range(4)]
            found += [pairwise([pair[j] for pair in pairs], ptx.max_f32) for j in range(2)]
        return found

    @cute.jit
    def store_pairs(self, address: Any, numbers: Any) -> None:
        """Store an fp32 of each of the lane's heads. By 4 lanes."""
        for i in range_constexpr(self.config.heads // 8):
            pair = [number.bitcast(Int32) for number in numbers[2 * i : 2 * i + 2]]
            ptx.store_shared_64(address + (8 * i + (self.lane & 3) * 2) * 4, *pair)

    @cute.jit
    def store_p(self, p: Any, p_at: Any) -> None:
        """Store a tile's P, a head's keys next to each other."""
        lane, pairs = self.lane, self.config.heads // 8
        pair = ptx.f16x2 if self.config.is_fp8 else ptx.bf16x2
        words = [pair(p[2 * i], p[2 * i + 1]) for i in range(2 * pairs)]
        chunk = 2 * self.warp + (lane >> 3 & 1)
        for i in range_constexpr(0, pairs, 2):
            head = 8 * (i + (lane >> 4)) + (lane & 7)
            place = p_at + head * SLAB_ROW_BYTES + (chunk ^ (lane & 7)) * 16
            ptx.store_matrices_transposed(place, words[2 * i : 2 * i + 4])

    @cute.jit
    def publish_p(self, buffer: Any) -> None:
        """Let PV have a tile's P."""
        cute.arch.sync_warp()
        if self.lane == 0:
            cute.arch.mbarrier_arrive(self.bars.p.full(buffer))

    @cute.jit
    def finish(self, row_sum: Any, max_logit: Any, row_max: Any, work_tile: Any, logit: Any, buffer: Any) -> None:
        """Store a work tile's log-sum-exps, and what to multiply its rows of O with. logit: bits of the thread's
        head's sink"""
        heads = self.config.heads
        self.gather(row_sum, max_logit, row_max)
        if self.thread < heads:
            out_scale = self.store_lse(self.thread, work_tile, logit)
            ptx.store_shared_f32(self.smem.out_scale + buffer * (heads * 4) + self.thread * 4, out_scale)

    @cute.jit
    def gather(self, row_sum: Any, max_logit: Any, row_max: Any) -> None:
        """Have the first warp know what all warps know of the heads."""
        lane = self.lane
        sums = [_over_keys(number, operator.add) for number in row_sum]
        largest = [_over_keys(number, ptx.max_f32) for number in max_logit]
        if lane < 4:
            for j in range_constexpr(self.config.heads // 4):
                head = 8 * (j // 2) + 2 * lane + j % 2
                known = [number.bitcast(Int32) for number in (sums[j], largest[j], row_max[j], Float32(0.0))]
                place = self.smem.exchange + (self.warp * self.config.heads + head) * EXCHANGED
                ptx.store_shared_128(place, known)
        self.sync()

    @cute.jit
    def store_lse(self, head: Any, work_tile: Any, logit: Any) -> Any:
        """Store what a head's logits come to. Returns what to multiply its row of O with."""
        q, out = self.q, self.out
        row_sum, max_logit, row_max = self.gathered(head)
        lse = (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
        lse = Float32(Float32.inf) if row_sum == Float32(0.0) else lse
        if const_expr(out.max_logits is not None):
            out.max_logits.store((work_tile, head), max_logit * Float32(ptx.LN_2), head < q.heads)
        out.lse.store((work_tile, head), lse, head < q.heads)
        return out_scale_of(row_sum, row_max, logit, self.sink)

    def gathered(self, head: Any) -> tuple[Any, Any, Any]:
        """row_sum, max_logit and row_max of a head, of which all warps have told."""
        known = []
        for warp in range(4):
            words = ptx.load_shared_128(self.smem.exchange + (warp * self.config.heads + head) * EXCHANGED)
            known.append([word.bitcast(Float32) for word in words])
        row_sum = pairwise([one[0] for one in known], operator.add)
        max_logit = pairwise([one[1] for one in known], ptx.max_f32)
        return row_sum, max_logit, known[0][2]


def index_of(head: int, half: int) -> int:
    """Where the score is of one of the thread's heads and one of its two keys."""
    return head // 2 * 4 + half * 2 + head % 2


def _over_keys(value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """What the lanes have that have the same heads, combined, in each of them. All lanes must call."""
    for offset in (4, 8, 16):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@dataclass(frozen=True)
class QkSoftmax:
    """The QK and softmax warpgroup.

    mma       K Q^T, the first step of a tile and the others
    layouts   of a stage of K and of the queries
    """

    columns: ColumnSoftmax
    mma: tuple[Any, Any]
    layouts: tuple[Any, Any]

    @cute.jit
    def run(self) -> None:
        """Give PV the P of all tiles."""
        columns = self.columns
        config, bars, smem, scheduler, q = columns.config, columns.bars, columns.smem, columns.scheduler, columns.q
        thread, sink, own_heads = columns.thread, columns.sink, config.own_heads
        part = self.mma[0].get_slice(thread)
        shape = part.partition_shape_C((KEYS, config.heads))
        s, scores = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))

        scale = ptx.abs_f32(columns.scale_log2)
        tile, number = Int32(0), Int32(0)
        stage, phase = barriers.start()
        work_tile = scheduler.first
        for ahead in range_constexpr(config.q_stages):
            columns.copy_q_async(work_tile + ahead * scheduler.step, Int32(ahead))
        while work_tile < scheduler.end:
            cute.arch.cp_async_wait_group(config.q_stages - 1)
            # tensor cores read them
            cute.arch.fence_view_async_shared()
            columns.sync()
            q_stage = number % config.q_stages
            q_at = smem.q + q_stage * config.q_bytes
            row_max = [Float32(NEG_MAX) for _ in own_heads]
            max_logit = [Float32(-Float32.inf) for _ in own_heads]
            row_sum = [Float32(0.0) for _ in own_heads]

            stage, phase, valid, flags = self.multiply(s, part, tile, stage, phase, q_at)
            warpgroup.wait_group(0)
            columns.take_scores(s, scores, valid)
            while flags & LAST == 0:
                buffer = tile % P_STAGES
                bars.p.wait_empty(buffer, tile // P_STAGES & 1)
                own_flags = flags
                if self.is_late(stage, phase):
                    row_max, max_logit, row_sum = columns.softmax(
                        scores, scale, row_max, max_logit, row_sum, own_flags, buffer
                    )
                    columns.publish_p(buffer)
                    stage, phase, valid, flags = self.multiply(s, part, tile + 1, stage, phase, q_at)
                    warpgroup.wait_group(0)
                else:
                    # softmax goes on while tensor cores multiply the next tile
                    stage, phase, valid, flags = self.multiply(s, part, tile + 1, stage, phase, q_at)
                    row_max, max_logit, row_sum = columns.softmax(
                        scores, scale, row_max, max_logit, row_sum, own_flags, buffer
                    )
                    columns.publish_p(buffer)
                    warpgroup.wait_group(0)
                tile = tile + 1
                columns.take_scores(s, scores, valid)

            buffer = tile % P_STAGES
            logit = Int32(0)
            if sink != 0:
                logit = ptx.load_global_s32_where(thread < q.heads, sink + Int64(thread) * 4)
            bars.p.wait_empty(buffer, tile // P_STAGES & 1)
            row_max, max_logit, row_sum = columns.softmax(scores, scale, row_max, max_logit, row_sum, flags, buffer)
            # all warps are done with the products of this work tile's queries
            behind = work_tile + config.q_stages * scheduler.step
            columns.copy_q_async(behind, q_stage)
            columns.finish(row_sum, max_logit, row_max, work_tile, logit, buffer)
            columns.publish_p(buffer)
            tile = tile + 1
            work_tile, number = work_tile + scheduler.step, number + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def multiply(self, s: Any, part: Any, tile: Any, stage: Any, phase: Any, q_at: Any) -> tuple[Any, Any, Any, Any]:
        """Start s = K Q^T of the tile that begins at a stage, once it is there. Returns where the next begins, which of
        the warp's keys are there, and the tile's flags."""
        mma, layouts = self.mma, self.layouts
        bars, smem = self.columns.bars, self.columns.smem
        # made anew: held in registers, descriptors would have to be moved to uniform ones, between two products
        q_tile = wgmma.uniform_tile(ptx.again(q_at), layouts[1], BFloat16)
        q_parts = mma[0].make_fragment_B(part.partition_B(q_tile))
        k_parts = []
        for _ in range_constexpr(QUARTERS):
            bars.kv.wait_full(stage, phase)
            rows = wgmma.uniform_tile(smem.kv + stage * KV_STAGE_BYTES, layouts[0], BFloat16)
            k_parts.append(mma[0].make_fragment_A(part.partition_A(rows)))
            stage, phase = barriers.advance(stage, phase, KV_STAGES)
        # no proxy fence for what cp.async has brought: other kernels that multiply such rows have none either, and
        # tests that repeat calls stand guard
        warpgroup.fence()
        steps = STAGE_COLUMNS // STEP
        for i in range_constexpr(QUARTERS * steps):
            chosen = mma[0] if const_expr(i == 0) else mma[1]
            cute.gemm(chosen, s, k_parts[i // steps][None, None, i % steps], q_parts[None, None, i], s)
        warpgroup.commit_group()
        header_at = smem.header + (tile & HEADERS - 1) * HEADER
        valid = ptx.load_shared_64(header_at + (ptx.thread_again() >> 5) * 8)
        return stage, phase, valid, ptx.load_shared_s32(header_at + FLAGS_AT)

    @cute.jit
    def is_late(self, stage: Any, phase: Any) -> Any:
        """Whether the tile that begins at a stage is not there for all warps."""
        bars = self.columns.bars
        missing = Int32(0)
        for _ in range_constexpr(QUARTERS):
            missing = missing | (bars.kv.is_full(stage, phase) ^ 1)
            stage, phase = barriers.advance(stage, phase, KV_STAGES)
        return ptx.any_of_group(self.columns.barrier, 128, missing) != 0


# ---- PV and epilogue


@dataclass(frozen=True)
class PvEpilogue:
    """The PV and epilogue warpgroup: O^T += V^T P.

    Tensor cores read V^T from the rows as they lie, columns on their long side. A thread has columns of two or four
    heads.

    pv        adds to what is there
    layouts   of a tile of P, and of a stage of V
    """

    config: SwapAbConfig
    bars: Any
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    thread: Any
    lane: Any
    warp: Any
    pv: Any
    layouts: tuple[Any, Any]

    @cute.jit
    def run(self) -> None:
        """Store results."""
        config, bars, smem, scheduler, out = self.config, self.bars, self.smem, self.scheduler, self.out
        pv, (p_layout, v_layout), lane = self.pv, self.layouts, self.lane
        part = pv.get_slice(self.thread)
        shape = part.partition_shape_C((STAGE_COLUMNS, config.heads))
        o = [cute.make_rmem_tensor(shape, Float32) for _ in range(QUARTERS)]

        tile = Int32(0)
        stage, phase = barriers.start()
        work_tile = scheduler.first
        while work_tile < scheduler.end:
            angles = [(Int32(0),) * 4] * 2
            if const_expr(out.quant is not None):
                # there is time: the first tile's P is not there yet. Of four pairs of the last quarter's columns
                angles_at = out.quant.angles_at(work_tile) + (self.warp * 8 + (lane & 1) * 4) * 4
                angles = [ptx.load_global_128_again(angles_at + half * HALF_TABLE_BYTES) for half in range(2)]
            for quarter in o:
                quarter.fill(0.0)
            flags, buffer = Int32(0), Int32(0)
            while flags & LAST == 0:
                buffer = tile % P_STAGES
                bars.p.wait_full(buffer, tile // P_STAGES & 1)
                flags, has_factors = ptx.load_shared_64(smem.target + buffer * TARGET)
                if has_factors != 0:
                    config.rescale(o, config.load_of_heads(lane, smem.factor + buffer * (config.heads * 4)))
                p = wgmma.uniform_tile(smem.p + buffer * config.p_bytes, p_layout, BFloat16)
                p_parts = pv.make_fragment_B(part.partition_B(p))
                stages, v_parts = [], []
                for _ in range_constexpr(QUARTERS):
                    # full since QK waited for it; this orders the reads behind what filled it
                    bars.kv.wait_full(stage, phase)
                    stages.append(stage)
                    rows = wgmma.uniform_tile(smem.kv + stage * KV_STAGE_BYTES, v_layout, BFloat16)
                    transposed = cute.composition(rows, cute.make_layout((STAGE_COLUMNS, KEYS), stride=(KEYS, 1)))
                    v_parts.append(pv.make_fragment_A(part.partition_A(transposed)))
                    stage, phase = barriers.advance(stage, phase, KV_STAGES)
                # of P stored in the ordinary way; where it is stored, it would wait for the stores
                cute.arch.fence_view_async_shared()
                warpgroup.fence()
                for i in range_constexpr(QUARTERS):
                    for step in range_constexpr(KEYS // STEP):
                        cute.gemm(pv, o[i], v_parts[i][None, None, step], p_parts[None, None, step], o[i])
                    warpgroup.commit_group()
                for i in range_constexpr(QUARTERS):
                    warpgroup.wait_group(QUARTERS - 1 - i)
                    release(bars.kv.empty(stages[i]), lane)
                if flags & LAST == 0:
                    release(bars.p.empty(buffer), lane)
                tile = tile + 1
            out_scales = config.load_of_heads(lane, smem.out_scale + buffer * (config.heads * 4))
            if const_expr(out.scale is not None):
                out_scales = [out_scale * out.scale for out_scale in out_scales]
            config.rescale(o, out_scales)
            if const_expr(out.quant is not None):
                self.store_quantized(o, angles, work_tile)
            else:
                target = out.base + Int64(work_tile) * out.row
                for i in range_constexpr(QUARTERS):
                    place = target + i * (STAGE_COLUMNS * 2)
                    wgmma.store_bf16_transposed(o[i], lane, self.warp, place, out.head, self.q.heads, config.heads)
            # its out_scale has been used
            release(bars.p.empty(buffer), lane)
            work_tile = work_tile + scheduler.step

    @cute.jit
    def store_quantized(self, o: Any, angles: Any, work_tile: Any) -> None:
        """Store a work tile's results as codes. A quarter is the 128 columns of a scale; a thread has 8 neighbouring
        ones of a head of every 8, those of tile lane % 4 // 2 of the quarter's two."""
        heads, quant, smem, lane, warp = self.config.heads, self.out.quant, self.smem, self.lane, self.warp
        # all warps have read what they told each other of the work tile before
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=128)
        own_at = smem.absmax + (warp * heads + (lane >> 2)) * (QUARTERS * 4)
        eights = []
        for group in range_constexpr(heads // 8):
            largest = []
            for i in range_constexpr(QUARTERS):
                values = bf16_floats(wgmma.transposed_bf16(o[i], lane, 0, group, heads))
                if const_expr(i == QUARTERS - 1):
                    values = self.rotate_back(values, angles, lane & 2 != 0)
                most = Float32(0.0)
                for value in values:
                    most = ptx.max_f32(most, ptx.abs_f32(value))
                largest.append(over_quad(most, ptx.max_f32).bitcast(Int32))
                eights.append(values)
            if lane & 3 == 0:
                ptx.store_shared_128(own_at + group * (8 * QUARTERS * 4), largest)
        cute.arch.barrier(barrier_id=EPILOGUE_BARRIER, number_of_threads=128)
        for group in range_constexpr(heads // 8):
            head = group * 8 + (lane >> 2)
            is_there = head < self.q.heads
            target = quant.codes_at(work_tile, head) + ((lane & 2) * 32 + warp * 16 + (lane & 1) * 8)
            most_at = smem.absmax + head * (QUARTERS * 4)
            warps = [ptx.load_shared_128(most_at + other * (heads * QUARTERS * 4)) for other in range(4)]
            for i in range_constexpr(QUARTERS):
                most = pairwise([four[i].bitcast(Float32) for four in warps], ptx.max_f32)
                byte = ue8m0_from_absmax(most, E4M3_MAX, OUTPUT_FLOOR)
                quant.store_scale(byte, work_tile, head, i, lane & 3, is_there & (warp == i))
                factor = ue8m0_inverse(byte)
                codes = e4m3_words([value * factor for value in eights[group * QUARTERS + i]])
                ptx.store_global_64(target + i * STAGE_COLUMNS, codes[0], codes[1], is_there)

    @cute.jit
    def rotate_back(self, values: Any, angles: Any, is_rope: Any) -> Any:
        """Eight neighbouring columns, rotated back if they are rotary."""
        rotated = []
        for i in range_constexpr(4):
            cos, sin = (words[i].bitcast(Float32) for words in angles)
            pair = rotate_pair_back(values[2 * i], values[2 * i + 1], cos, sin)
            rotated += [pair[j] if is_rope else values[2 * i + j] for j in range(2)]
        return rotated


# ---- kernel


class SwapAbKernel:
    """See kernel_args.GatheredArgs, kernel_args.MixedArgs."""

    def __init__(self, config: SwapAbConfig) -> None:
        self.config = config

    @cute.jit
    def launch(self, args: GatheredArgs | MixedArgs) -> None:
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        work_tiles = length(args.q, 0)
        kernel = self.kernel(
            args.query(),
            args.sources(),
            args.output(output_policy(work_tiles * length(args.q, 1))),
            args.sink,
            args.scale_log2,
            work_tiles,
            self.tiled_mmas(),
            self.smem_layouts(),
        )
        kernel.launch(
            grid=[cutlass.min(args.ctas, work_tiles), 1, 1],
            block=[THREADS, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
        )

    def tiled_mmas(self) -> tuple[Any, Any, Any]:
        """S^T = K Q^T, twice, as one will accumulate; O^T = V^T P of columns as they lie."""
        keys, dims = OperandMajorMode.K, OperandMajorMode.MN

        def make(major: Any) -> Any:
            shape = (wgmma.ROWS, self.config.heads)
            return hopper_helpers.make_trivial_tiled_mma(BFloat16, BFloat16, major, keys, Float32, (1, 1, 1), shape)

        return make(keys), make(keys), make(dims)

    def smem_layouts(self) -> tuple[Any, Any, Any]:
        """Of a KV stage, of a work tile's queries, and of a tile of P."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        shapes = (KEYS, STAGE_COLUMNS), (self.config.heads, HEAD_DIM), (self.config.heads, KEYS)
        kv, q, p = (cute.tile_to_shape(atom, shape, (0, 1)) for shape in shapes)
        return kv, q, p

    @cute.kernel
    def kernel(
        self,
        q: PrefillQuery,
        kv: Any,
        out: PrefillOutput,
        sink: Int64,
        scale_log2: Float32,
        work_tiles: Int32,
        mma: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        config, allocator = self.config, SmemAllocator()
        smem, bars = Smem.allocate(allocator, smem_parts(config)), Bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for one in mma[1:]:
            wgmma.accumulate(one)
        kv_layout, q_layout, p_layout = layouts
        # a work tile is a query row: there is one group of heads
        scheduler = PrefillScheduler(ptx.block_again(), work_tiles, ctas, Int32(0))
        own = thread % wgmma.WARPGROUP
        if group < PV:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            columns = ColumnSoftmax(
                config=config,
                bars=bars,
                smem=smem,
                scheduler=scheduler,
                q=q,
                out=out,
                sink=sink,
                scale_log2=scale_log2,
                thread=own,
                lane=own & 31,
                warp=cute.arch.make_warp_uniform(own >> 5),
            )
            QkSoftmax(columns, mma[:2], (kv_layout, q_layout)).run()
        elif group < PRODUCER:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            lane, warp = own & 31, cute.arch.make_warp_uniform(own >> 5)
            PvEpilogue(config, bars, smem, scheduler, q, out, own, lane, warp, mma[2], (p_layout, kv_layout)).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            loader = IndexLoader(kv, scheduler, smem.lists, smem.cursors, PRODUCER_WARPS, row_units(BFloat16))
            Producer(bars, smem, loader).run()


# ---- keys


@dataclass(frozen=True)
class SwapAbPrefillKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   8 or 16: how many there are at most
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_swap_ab"
    is_quantized: ClassVar[bool] = False
    heads: int

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(SwapAbConfig("", self.heads, self.is_quantized))

    @property
    def instructions(self) -> tuple[str, ...]:
        stores = "cvt.e4m3" if self.is_quantized else "st.global.128"
        return "wgmma", "cp.async", "stmatrix", "mbarrier", "setmaxnreg", "griddepcontrol", stores

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return self.entry_of("sparse_mla_prefill", fake_gathered(self.is_quantized))

    def entry_of(self, name: str, fakes: GatheredArgs | MixedArgs) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(SwapAbKernel(SwapAbConfig(name, self.heads, self.is_quantized)).launch, fakes)


@dataclass(frozen=True)
class QuantSwapAbPrefillKey(SwapAbPrefillKey):
    """As SwapAbPrefillKey: results are turned back and become e4m3 codes, see quant_output."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_swap_ab_quant"
    is_quantized: ClassVar[bool] = True


@dataclass(frozen=True)
class SwapAbMixedKey(SwapAbPrefillKey):
    """As SwapAbPrefillKey, over two paged caches."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed_swap_ab"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return self.entry_of("sparse_mla_mixed", fake_mixed(BFloat16))
