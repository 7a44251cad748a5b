# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill on Blackwell (sm_100a, sm_103a): both products by tcgen05, rows of KV gathered by TMA.

Compiled, inspected and run in a model of the GPU; nobody has run it on one.

A CTA takes work tiles (params.PrefillScheduler): a query row and a head group of 64 heads or fewer. Warps of a CTA:

    0 .. 3     softmax, correction of O                                    Softmax
    4 .. 7     epilogue                                                    Epilogue
    8          MMA: one thread starts S = Q K^T and O += P V               Mma
    9          index loader: which rows a tile is made of                  IndexLoader
    10, 11     KV loaders: a thread of each has half of a stage copied     KVLoader
    12 .. 15   dequantizers, of e4m3 rows: prefill_mixed.py, prefill_paged.py

    indices  gmem --> index loader --rows, which are there, flags--> lists [4 slots] --> KV loaders, MMA, softmax
    KV       gmem --TMA gather4--> kv [3 stages] --> MMA
    Q        gmem --TMA--> a stage of kv --tcgen05.cp, 384 columns--> tensor memory --> MMA
                  --TMA, 128 columns---------------------------------> shared memory --> MMA
    S        tensor memory [2 buffers] --softmax--> P, shared memory [2 buffers] --> MMA
    O        tensor memory, all 512 columns of 64 heads --(rescaled where a maximum moves)--> epilogue --> gmem

    ring    full                                              empty
    kv      all bytes of a tile, or of a work tile's Q        P V of the tile is done, or the copy of Q
    p       softmax warps have stored P, and loaded S         P V is done
    lists   the index loader has written a tile's list        MMA, KV loader and softmax warps have read it
    o       a work tile's P V is done, its factors are there  epilogue warps have loaded O

A work tile begins with a stage of its queries; tiles of 64 keys follow. A row that nobody selects is row -1: it arrives
as zeros, and no address is formed. Slabs, products and tensor memory are those of decode.py: lanes h and 64 + h belong
to head h, of S they have 32 keys each, of O the columns that `o_dim` says. perf/notes/blackwell_prefill.md has why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, umma
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.dsl.tensor import boxes, gathered_rows, length
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.work import Shape, Work
from cute_kernels.sparse_mla.blackwell.decode import (
    GATHERED,
    HEADS,
    KEY_ROWS,
    KEYS,
    O_BLOCK,
    O_COLUMN,
    O_COLUMNS,
    PAIR_BARRIER,
    PAIR_THREADS,
    Q_COLUMN,
    Q_SLABS,
    S_COLUMN,
    S_COLUMNS,
    SLAB,
    SLAB_BYTES,
    SLABS,
    STAGE_BYTES,
    VALUE_ROWS,
    chunk_offset,
    descriptor,
    o_dim,
    rescale,
    scores_steps,
    values_steps,
)
from cute_kernels.sparse_mla.kernel_args import GatheredArgs, MixedArgs, PagedArgs, fake_gathered
from cute_kernels.sparse_mla.params import (
    NEG_MAX,
    RESCALE_THRESHOLD,
    PrefillOutput,
    PrefillQuery,
    PrefillScheduler,
    out_scale_of,
)

# ---- config

STAGES = 3

P_BITS = 1
BUFFERS = 1 << P_BITS
"""Of S in tensor memory, and of P."""

P_BYTES = HEADS * KEYS * 2

EPILOGUE_WARP, MMA_WARP, INDEX_WARP, KV_WARP, DEQUANT_WARP = 4, 8, 9, 10, 12
"""The first of each role; the softmax begins."""

SOFTMAX_WARPS = EPILOGUE_WARPS = DEQUANT_WARPS = 4
KV_WARPS = 2

SLOTS = 4
"""Tiles that the index loader may be ahead of the softmax."""

LIST_BYTES = KEYS * 4 + 16
MASK_AT, FLAGS_AT = KEYS * 4, KEYS * 4 + 8
"""Bytes of a tile's list, and where in it are, behind its rows: which keys are there, 32 a word; its flags."""

LAST, END, COMPRESSED = 1, 2, 4
"""Flags of a tile: it ends a work tile; that is the CTA's last one; its rows are of the compressed cache."""

GROUP_BYTES = GATHERED * SLAB * 2
"""Of four rows that one instruction gathers, in a slab."""

LANE = 1 << 16
"""From a lane to the next in an address of tensor memory."""

LANES = 32
HALVES = KEYS // LANES


def group_offset(group: int, slab: int) -> int:
    """Of a slab's part of four rows, in a stage; where in it their chunks lie is the copy's business."""
    return slab * SLAB_BYTES + group * GROUP_BYTES


class QueryCopy(NamedTuple):
    """A copy of 16 bytes of all heads' queries from a stage to tensor memory."""

    column: int
    offset: int


def query_copies() -> Iterator[QueryCopy]:
    for chunk in range(Q_SLABS * SLAB // 8):
        slab, within = divmod(chunk, SLAB // 8)
        yield QueryCopy(Q_COLUMN + chunk * 4, slab * SLAB_BYTES + within * 16)


# ---- shared memory

ALIGNED = ("kv", "raw", "q", "p")
"""What has swizzled rows: 1024-byte aligned."""


def smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order."""
    return {
        "kv": STAGES * STAGE_BYTES,
        "q": (SLABS - Q_SLABS) * SLAB_BYTES,
        "p": BUFFERS * P_BYTES,
        "lists": SLOTS * LIST_BYTES,
        "exchange": 2 * HEADS * 4,
        "factor": HEADS * 4,
        "flags": 8,
    }


class Smem(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    kv         [3 stages][8 slabs][64 keys][64] bf16: keys of a tile, or a work tile's queries
    q          [2 slabs][64 heads][64] bf16: slabs 6 and 7
    p          [2 buffers][64 heads][64 keys] bf16
    lists      [4 slots] lists
    exchange   [2 halves][64 heads] fp32: what threads of the same head tell each other
    factor     [64 heads] fp32: what to multiply a work tile's O with
    flags      of the work tile's last tile
    raw, scales
               what kernels with dequantizers convert
    """

    kv: Any
    q: Any
    p: Any
    lists: Any
    exchange: Any
    factor: Any
    flags: Any
    raw: Any = None
    scales: Any = None


# ---- barriers


@dataclass(frozen=True)
class Bars:
    """mbarriers, and what completes their phases: the rings as above, and

    s        [2 buffers] Q K^T of a tile is done
    q_done   Q K^T of a work tile's last tile is done
    """

    kv: barriers.Ring
    s: Any
    p: barriers.Ring
    lists: barriers.Ring
    o: barriers.Ring
    q_done: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        return cls(**cls.parts(smem, STAGES))

    @staticmethod
    def parts(smem: SmemAllocator, stages: int) -> dict[str, Any]:
        ring = barriers.Ring.allocate
        return {
            "kv": ring(smem, stages),
            "s": smem.allocate_array(Int64, BUFFERS),
            "p": ring(smem, BUFFERS),
            "lists": ring(smem, SLOTS),
            "o": ring(smem, 1),
            "q_done": smem.allocate_array(Int64, 1),
        }

    def initialize(self) -> None:
        """By one thread; the CTA synchronizes afterwards."""
        self.kv.initialize(KV_WARPS, 1)
        # the MMA thread, and each warp of the others
        self.lists.initialize(1, 1 + KV_WARPS + SOFTMAX_WARPS)
        self.initialize_others()

    def initialize_others(self, softmax_warps: int = SOFTMAX_WARPS) -> None:
        """softmax_warps: that give P"""
        for buffer in range(BUFFERS):
            cute.arch.mbarrier_init(self.s + buffer, 1)
        self.p.initialize(softmax_warps, 1)
        self.o.initialize(1 + SOFTMAX_WARPS, EPILOGUE_WARPS)
        cute.arch.mbarrier_init(self.q_done, 1)
        cute.arch.mbarrier_init_fence()

    def give_p(self, buffer: Any) -> None:
        """P is there. By a thread of each softmax warp."""
        cute.arch.mbarrier_arrive(self.p.full(buffer))

    def release_o(self) -> None:
        """O has been loaded. By a thread of each epilogue warp."""
        cute.arch.mbarrier_arrive(self.o.empty(0))


BARRIERS = 2 * (STAGES + BUFFERS + SLOTS + 1) + BUFFERS + 1


@dataclass(frozen=True)
class PrefillConfig:
    """What kernels over rows of another kind have otherwise.

    dtype        of what tensor cores multiply: "bf16" or "f16"
    stages       of kv
    smem_parts   as smem_parts(); the names are those of Smem
    bars         type of the barriers
    barriers     how many those are
    dequantizes  there are warps that convert rows
    """

    dtype: str
    stages: int
    smem_parts: dict[str, int]
    bars: type[Bars] = Bars
    barriers: int = BARRIERS
    dequantizes: bool = False

    @property
    def threads(self) -> int:
        return (DEQUANT_WARP + (DEQUANT_WARPS if self.dequantizes else 0)) * 32

    @property
    def smem_bytes(self) -> int:
        return sum(self.smem_parts.values()) + self.barriers * 8


BF16 = PrefillConfig("bf16", STAGES, smem_parts())


# ---- producer: index loader and KV loaders


@dataclass(frozen=True)
class IndexLoader:
    """The warp that finds out which rows tiles are made of, up to SLOTS tiles ahead: rows of one buffer, by their
    numbers. What another way to name rows needs is in the methods from `publish` on."""

    scheduler: PrefillScheduler
    kv: Any
    bars: Any
    smem: Smem

    counts: ClassVar[int] = 1
    """Numbers that `count` has of a work tile."""

    @cute.jit
    def run(self) -> None:
        """Write the lists of all tiles."""
        scheduler, ring = self.scheduler, self.bars.lists
        slot, phase = barriers.start()
        work_tile, number, counts = Int32(scheduler.first), Int32(0), (Int32(0),) * self.counts
        while work_tile < scheduler.end:
            if number == 0:
                # loading each work tile's count in its time would take a long wait each time
                counts = self.count(work_tile + cute.arch.lane_idx() * scheduler.step)
            count = tuple(cute.arch.shuffle_sync(one, number) for one in counts)
            tiles = cutlass.max(self.num_tiles(count), 1)
            tile = Int32(0)
            while tile < tiles:
                ring.wait_empty(slot, phase)
                self.publish(work_tile, tile, count, slot)
                if cute.arch.lane_idx() == 0:
                    flags = self.flags(tile, count)
                    if tile + 1 == tiles:
                        is_last = work_tile + scheduler.step >= scheduler.end
                        flags = flags | (Int32(LAST | END) if is_last else Int32(LAST))
                    ptx.store_shared_s32(self.list_at(slot) + FLAGS_AT, flags)
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(ring.full(slot))
                slot, phase = barriers.advance(slot, phase, SLOTS)
                tile = tile + 1
            work_tile, number = work_tile + scheduler.step, (number + 1) & LANES - 1

    def list_at(self, slot: Any) -> Any:
        return self.smem.lists + slot * LIST_BYTES

    @cute.jit
    def store(self, rows: Any, slot: Any) -> None:
        """Store the lane's two rows of a tile, and which of all are there."""
        for half in range_constexpr(HALVES):
            lane = cute.arch.lane_idx()
            ptx.store_shared_s32(self.list_at(slot) + (half * LANES + lane) * 4, rows[half])
            there = cute.arch.vote_ballot_sync(rows[half] >= 0)
            if lane == 0:
                ptx.store_shared_s32(self.list_at(slot) + MASK_AT + half * 4, there)

    @cute.jit
    def publish(self, work_tile: Any, tile: Any, count: Any, slot: Any) -> None:
        """Store a tile's rows. Of a lane's two, all loads are under way at once."""
        row, _ = self.scheduler.coords(work_tile)
        places = [self.place(tile, half * LANES + cute.arch.lane_idx(), count) for half in range(HALVES)]
        indices = [self.load_index(row, *place[:2]) for place in places]
        self.store([self.resolve_row(*both) for both in zip(places, indices, strict=True)], slot)

    def count(self, work_tile: Any) -> tuple[Any, ...]:
        """What there is to know of a work tile; of what is none, anything."""
        return (self.kv.count(work_tile, self.scheduler),)

    def num_tiles(self, count: Any) -> Any:
        """Of a work tile. One that attends to nothing has a tile without rows."""
        return (count[0] + (KEYS - 1)) // KEYS

    def flags(self, tile: Any, count: Any) -> Any:
        """Of a tile, beside LAST and END."""
        return Int32(0)

    @cute.jit
    def place(self, tile: Any, key: Any, count: Any) -> tuple[Any, ...]:
        """Of a tile's key: the column that names its row, and whether that counts."""
        column = tile * KEYS + key
        return column, column < count[0]

    @cute.jit
    def load_index(self, row: Any, column: Any, counts: Any) -> Any:
        """What is in a column, -1 if nothing is."""
        index_at = self.kv.lists + Int64(row) * self.kv.list_row + Int64(column) * 4
        return ptx.load_global_s32_where(counts, index_at)

    @cute.jit
    def resolve_row(self, place: Any, index: Any) -> Any:
        """Which row of its buffer that is, -1 if none."""
        return index if (index >= 0) & (index < self.kv.rows) else Int32(-1)


@cute.jit
def map_of(maps: Any, flags: Any) -> Any:
    """Tensor map of what a tile's rows come from, of one or two."""
    source = maps[0]
    if const_expr(len(maps) > 1):
        source = maps[1] if flags & COMPRESSED != 0 else maps[0]
    return source


@dataclass(frozen=True)
class KVLoader:
    """A thread that has a part of each stage copied: of a work tile's queries, then of its tiles.

    part   which
    maps   addresses of tensor maps: of q, and of what rows are gathered from
    """

    part: Any
    maps: Any
    scheduler: PrefillScheduler
    bars: Any
    smem: Smem

    stages: ClassVar[int] = STAGES
    stage_bytes: ClassVar[int] = STAGE_BYTES
    slabs: ClassVar[int] = SLABS
    columns: ClassVar[int] = SLAB
    parts: ClassVar[int] = KV_WARPS
    """Of the ring that is filled: its depth; of a stage bytes, slabs, columns of each, and threads that share it."""

    query_stages: ClassVar[int] = 1
    """That a work tile's queries take."""

    def ring(self) -> tuple[barriers.Ring, Any]:
        """Its barriers and its address."""
        return self.bars.kv, self.smem.kv

    @cute.jit
    def run(self) -> None:
        """Fill the ring."""
        ring, ring_at = self.ring()
        lists = self.bars.lists
        stage, phase = barriers.start()
        slot, list_phase = barriers.start()
        work_tile, q_phase, flags = Int32(self.scheduler.first), Int32(1), Int32(0)
        while flags & END == 0:
            for number in range_constexpr(self.query_stages):
                ring.wait_empty(stage, phase)
                stage_at = ring_at + stage * self.stage_bytes
                self.copy_queries_async(work_tile, number, q_phase, stage_at, ring.full(stage))
                stage, phase = barriers.advance(stage, phase, self.stages)
            work_tile, q_phase = work_tile + self.scheduler.step, q_phase ^ 1
            flags = Int32(0)
            while flags & LAST == 0:
                lists.wait_full(slot, list_phase)
                list_at = self.smem.lists + slot * LIST_BYTES
                flags = ptx.load_shared_s32(list_at + FLAGS_AT)
                ring.wait_empty(stage, phase)
                self.copy_rows_async(flags, list_at, ring_at + stage * self.stage_bytes, ring.full(stage))
                cute.arch.mbarrier_arrive(lists.empty(slot))
                stage, phase = barriers.advance(stage, phase, self.stages)
                slot, list_phase = barriers.advance(slot, list_phase, SLOTS)

    @cute.jit
    def copy_queries_async(
        self, work_tile: Any, number: cutlass.Constexpr, q_phase: Any, stage_at: Any, full: Any
    ) -> None:
        """Start to copy the part of a stage of a work tile's queries, the stage of that number; q_phase: the parity of
        q_done that the work tile before has to have completed."""
        row, first = self.scheduler.coords(work_tile)
        queries = self.maps[0]
        cute.arch.mbarrier_arrive_and_expect_tx(full, SLABS // self.parts * SLAB_BYTES)
        held, kept = Q_SLABS // self.parts, (SLABS - Q_SLABS) // self.parts
        for i in range_constexpr(held):
            slab = self.part * held + i
            ptx.copy_bulk_tensor(stage_at + slab * SLAB_BYTES, queries, (slab * SLAB, first, row), full.toint())
        ptx.wait_mbarrier(self.bars.q_done.toint(), q_phase)
        for i in range_constexpr(kept):
            slab = self.part * kept + i
            place = (slab + Q_SLABS) * SLAB, first, row
            ptx.copy_bulk_tensor(self.smem.q + slab * SLAB_BYTES, queries, place, full.toint())

    @cute.jit
    def copy_rows_async(self, flags: Any, list_at: Any, stage_at: Any, full: Any) -> None:
        """Start to gather the part of a tile's rows."""
        source = map_of(self.maps[1:], flags)
        own_rows = KEYS // self.parts
        cute.arch.mbarrier_arrive_and_expect_tx(full, self.slabs * SLAB_BYTES // self.parts)
        own_at = stage_at + self.part * group_offset(own_rows // GATHERED, 0)
        for group in range_constexpr(own_rows // GATHERED):
            rows = ptx.load_shared_128(list_at + self.part * (own_rows * 4) + group * (GATHERED * 4))
            for slab in range_constexpr(self.slabs):
                target = own_at + group_offset(group, slab)
                ptx.gather_rows(target, source, slab * self.columns, rows, full.toint())


# ---- MMA


@dataclass(frozen=True)
class Mma:
    """The thread that starts products, in tensor memory."""

    config: PrefillConfig
    bars: Any
    smem: Smem

    @property
    def qk(self) -> int:
        return umma.instruction("f16", self.config.dtype, self.config.dtype, HEADS, KEYS)

    @property
    def pv(self) -> int:
        return umma.instruction("f16", self.config.dtype, self.config.dtype, HEADS, HEAD_DIM // 2, b_is_mn_major=True)

    @cute.jit
    def run(self) -> None:
        """Multiply every tile.

        It does what there is to do: Q K^T of the next tile, up to a tile before P of this one is there, so that tensor
        cores and softmax warps have work at the same time; P V of this one.
        """
        bars = self.bars
        stage, phase = barriers.start()
        slot = Int32(0)
        # of tiles; flags and stages of the last one with S and of the one before
        with_s, with_o = Int32(0), Int32(0)
        flags, flags_before = Int32(LAST), Int32(0)
        last, before = Int32(0), Int32(0)
        wants_q, is_first, o_phase, goes_on = Int32(1), Int32(1), Int32(0), Int32(1)
        while goes_on != 0:
            ahead = with_s - with_o
            if (ahead < BUFFERS) & (flags & END == 0) and bars.kv.is_full(stage, phase) != 0:
                if wants_q != 0:
                    self.copy_queries(stage)
                    wants_q = Int32(0)
                else:
                    flags_before, before, last = flags, last, stage
                    flags = self.multiply_qk(with_s, stage, slot)
                    slot = slot + 1 & SLOTS - 1
                    with_s = with_s + 1
                    wants_q = flags & LAST
                stage, phase = barriers.advance(stage, phase, self.config.stages)
            ahead = with_s - with_o
            if (ahead > 0) & (bars.p.is_full(with_o & BUFFERS - 1, with_o >> P_BITS & 1) != 0):
                its_flags, its_stage = (flags, last) if ahead == 1 else (flags_before, before)
                self.multiply_pv(with_o, its_stage, is_first, its_flags, o_phase)
                with_o, is_first = with_o + 1, Int32(0)
                if its_flags & LAST != 0:
                    is_first, o_phase = Int32(1), o_phase ^ 1
                if its_flags & END != 0:
                    goes_on = Int32(0)

    @cute.jit
    def copy_queries(self, stage: Any) -> None:
        """Copy the queries in a stage to tensor memory; products come after it by themselves. No product reads the last
        work tile's any more: slabs 6 and 7 of these have come, and that waited for q_done."""
        ptx.fence_tensor_after()
        source = descriptor(KEY_ROWS, self.smem.kv + stage * STAGE_BYTES)
        copies = list(query_copies())
        for i in range_constexpr(len(copies)):
            ptx.copy_to_tensor_memory(copies[i].column, source + copies[i].offset // 16, "64x128b.warpx2::02_13")
        ptx.commit_tensor(self.bars.kv.empty(stage).toint())

    @cute.jit
    def multiply_qk(self, tile: Any, stage: Any, slot: Any) -> Any:
        """S = Q K^T of a tile that is there; its flags. Its list is there, too: who filled the stage has waited for it.
        Its buffer is free: P V of the tile that had it has started."""
        flags = ptx.load_shared_s32(self.smem.lists + slot * LIST_BYTES + FLAGS_AT)
        cute.arch.mbarrier_arrive(self.bars.lists.empty(slot))
        ptx.fence_tensor_after()
        buffer = tile & BUFFERS - 1
        queries, keys = descriptor(KEY_ROWS, self.smem.q), descriptor(KEY_ROWS, self.smem.kv + stage * STAGE_BYTES)
        steps = list(scores_steps())
        for i in range_constexpr(len(steps)):
            step = steps[i]
            ptx.tensor_mma(
                buffer * S_COLUMNS + step.d,
                step.a if step.is_resident else queries + step.a // 16,
                keys + step.b // 16,
                self.qk,
                int(not step.is_first),
                a_in_tensor_memory=step.is_resident,
                weight_stationary=True,
            )
        ptx.commit_tensor((self.bars.s + buffer).toint())
        if flags & LAST != 0:
            ptx.commit_tensor(self.bars.q_done.toint())
        return flags

    @cute.jit
    def multiply_pv(self, tile: Any, stage: Any, is_first: Any, flags: Any, o_phase: Any) -> None:
        """O += P V of a tile whose P is there; O = P V of a work tile's first one."""
        bars = self.bars
        if is_first != 0:
            bars.o.wait_empty(0, o_phase)
        ptx.fence_tensor_after()
        buffer = tile & BUFFERS - 1
        weights = descriptor(KEY_ROWS, self.smem.p + buffer * P_BYTES)
        values = descriptor(VALUE_ROWS, self.smem.kv + stage * STAGE_BYTES)
        steps = list(values_steps())
        for i in range_constexpr(len(steps)):
            step = steps[i]
            ptx.tensor_mma(
                step.d,
                weights + step.a // 16,
                values + step.b // 16,
                self.pv,
                1 - is_first if step.is_first else 1,
                weight_stationary=True,
            )
        ptx.commit_tensor(bars.p.empty(buffer).toint())
        ptx.commit_tensor(bars.kv.empty(stage).toint())
        if flags & LAST != 0:
            ptx.commit_tensor(bars.o.full(0).toint())


# ---- softmax, and correction

CHUNK = 8
"""Elements of P that a thread stores at a time."""

ALL = -1
"""Of the keys of a lane: all are there."""


@dataclass(frozen=True)
class Softmax:
    """The warpgroup that makes P of S.

    Two threads have a head, half of a tile's keys each. Maxima move only when a head's outgrow theirs by 2^8: sums and
    O are relative to them, and until they move nobody asks what the other half's are. When they do, O is rescaled here.

    thread   of the warpgroup
    sink     address of fp32 [h], or 0
    """

    config: PrefillConfig
    thread: Any
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    sink: Any
    scale_log2: Any
    bars: Any
    smem: Smem

    @cute.jit
    def run(self) -> None:
        """Store P of all tiles, and what a work tile's logits come to."""
        thread, bars, smem = self.thread, self.bars, self.smem
        head, half = thread % HEADS, thread // HEADS
        lanes = (thread >> 5) * (32 * LANE)
        scale = ptx.abs_f32(self.scale_log2)
        work_tile, flags, tile = Int32(self.scheduler.first), Int32(0), Int32(0)
        slot, list_phase = barriers.start()
        _, o_phase = barriers.start()
        while flags & END == 0:
            row, first = self.scheduler.coords(work_tile)
            logit = self.load_sink(first + head)
            row_max, largest, row_sum = Float32(NEG_MAX), Float32(-Float32.inf), Float32(0.0)
            flags, is_first = Int32(0), Int32(1)
            while flags & LAST == 0:
                buffer, phase = tile & BUFFERS - 1, tile >> P_BITS & 1
                bars.lists.wait_full(slot, list_phase)
                there = ptx.load_shared_s32(smem.lists + slot * LIST_BYTES + MASK_AT + half * 4)
                flags = ptx.load_shared_s32(smem.lists + slot * LIST_BYTES + FLAGS_AT)
                ptx.wait_mbarrier((bars.s + buffer).toint(), phase)
                ptx.fence_tensor_after()
                scores = list(self.load_scores(buffer, lanes))
                cute.arch.sync_warp()
                if thread & 31 == 0:
                    cute.arch.mbarrier_arrive(bars.lists.empty(slot))
                slot, list_phase = barriers.advance(slot, list_phase, SLOTS)
                scores = self.mask(scores, there)
                tile_max = self.maximum(scores) * scale
                largest = ptx.max_f32(largest, tile_max)
                # P V of the tile before last, which had this buffer
                bars.p.wait_empty(buffer, phase)
                grows = tile_max - row_max > Float32(RESCALE_THRESHOLD)
                if ptx.any_of_group(PAIR_BARRIER + (head >> 5), PAIR_THREADS, grows) != 0:
                    # the vote was after what was exchanged before had been read
                    found = ptx.max_f32(tile_max, self.others(tile_max))
                    moved = found if found - row_max > Float32(RESCALE_THRESHOLD) else row_max
                    # there is nothing before a work tile's first tile
                    factor = Float32(1.0) if is_first != 0 else ptx.exp2(row_max - moved)
                    row_max, row_sum = moved, row_sum * factor
                    if is_first == 0:
                        # P V of the tile before
                        bars.p.wait_empty(buffer ^ 1, (tile + 1 >> P_BITS) & 1)
                        ptx.fence_tensor_after()
                        rescale(lanes, factor)
                p = [ptx.exp2(ptx.fma_rn(score, scale, -row_max)) for score in scores]
                row_sum = row_sum + pairwise(p, operator.add)
                for chunk in range_constexpr(S_COLUMNS // CHUNK):
                    own = p[CHUNK * chunk : CHUNK * (chunk + 1)]
                    words = [self.pair(own[2 * i], own[2 * i + 1]) for i in range(CHUNK // 2)]
                    place = chunk_offset(head, half * (S_COLUMNS // CHUNK) + chunk)
                    ptx.store_shared_128(smem.p + buffer * P_BYTES + place, words)
                # tensor cores read P, and the next S comes where this one was
                cute.arch.fence_view_async_shared()
                ptx.fence_tensor_before()
                cute.arch.sync_warp()
                if thread & 31 == 0:
                    bars.give_p(buffer)
                is_first, tile = Int32(0), tile + 1

            row_sum = self.of_both(row_sum, operator.add)
            largest = self.of_both(largest, ptx.max_f32)
            bars.o.wait_empty(0, o_phase)
            if half == 0:
                ptx.store_shared_f32(smem.factor + head * 4, out_scale_of(row_sum, row_max, logit, self.sink))
                self.store_logs(row, first + head, largest, row_max, row_sum)
            if thread == 0:
                ptx.store_shared_s32(smem.flags, flags)
            cute.arch.sync_warp()
            if thread & 31 == 0:
                cute.arch.mbarrier_arrive(bars.o.full(0))
            work_tile, o_phase = work_tile + self.scheduler.step, o_phase ^ 1

    def load_scores(self, buffer: Any, lanes: Any) -> tuple[Any, ...]:
        """The thread's, of S_COLUMNS keys."""
        return ptx.load_tensor_memory(lanes + S_COLUMN + buffer * S_COLUMNS, S_COLUMNS)

    def pair(self, low: Any, high: Any) -> Any:
        """Two elements of P in a word."""
        return ptx.bf16x2(low, high) if self.config.dtype == "bf16" else ptx.f16x2(low, high)

    @cute.jit
    def mask(self, scores: cutlass.Constexpr, there: Any) -> Any:
        """The scores of keys that are there, -inf for the others; negated if the scale is negative."""
        found = list(scores)
        if self.scale_log2 < Float32(0.0):
            found = [-score for score in found]
        if there != ALL:
            found = [found[i] if there >> i & 1 != 0 else Float32(-Float32.inf) for i in range(S_COLUMNS)]
        return found

    def maximum(self, scores: Any) -> Any:
        found = scores[0]
        for i in range(1, len(scores) - 1, 2):
            found = ptx.max3_f32(found, scores[i], scores[i + 1])
        return ptx.max_f32(found, scores[-1])

    @cute.jit
    def of_both(self, value: Any, combine: cutlass.Constexpr) -> Any:
        """A head's two threads' values, combined, in both. By the warps that have its 32 heads."""
        # what was exchanged before has been read
        self.pair_barrier()
        return combine(value, self.others(value))

    @cute.jit
    def others(self, value: Any) -> Any:
        """The value of the thread that has the other keys of this one's head."""
        ptx.store_shared_f32(self.smem.exchange + self.thread * 4, value)
        self.pair_barrier()
        return ptx.load_shared_f32(self.smem.exchange + (self.thread ^ HEADS) * 4)

    def pair_barrier(self) -> None:
        """Wait for the other warp that has the thread's head."""
        barrier = PAIR_BARRIER + (self.thread % HEADS >> 5)
        cute.arch.barrier(barrier_id=barrier, number_of_threads=PAIR_THREADS)

    @cute.jit
    def load_sink(self, head: Any) -> Any:
        """Bits of a head's, or anything if there is none."""
        found = Int32(0)
        if self.sink != 0:
            found = ptx.load_global_s32_again_where(head < self.q.heads, self.sink + Int64(head) * 4)
        return found

    @cute.jit
    def store_logs(self, row: Any, head: Any, largest: Any, row_max: Any, row_sum: Any) -> None:
        """Store what a head's logits come to."""
        lse = (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
        lse = Float32(Float32.inf) if row_sum == Float32(0.0) else lse
        if const_expr(self.out.max_logits is not None):
            self.out.max_logits.store((row, head), largest * Float32(ptx.LN_2), head < self.q.heads)
        self.out.lse.store((row, head), lse, head < self.q.heads)


# ---- epilogue

WORDS = 4
"""That a thread stores at a time."""


@dataclass(frozen=True)
class Epilogue:
    """The warpgroup that stores O of a work tile once its products are done. thread: of the warpgroup."""

    thread: Any
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    bars: Any
    smem: Smem

    o_dim: ClassVar[Callable[..., Any]] = staticmethod(o_dim)

    @cute.jit
    def run(self) -> None:
        """Store the results of all work tiles."""
        thread, out = self.thread, self.out
        head, half = thread % HEADS, thread // HEADS
        lanes = O_COLUMN + (thread >> 5) * (32 * LANE)
        work_tile, flags = Int32(self.scheduler.first), Int32(0)
        _, phase = barriers.start()
        while flags & END == 0:
            self.bars.o.wait_full(0, phase)
            ptx.fence_tensor_after()
            flags = ptx.load_shared_s32(self.smem.flags)
            factor = ptx.load_shared_f32(self.smem.factor + head * 4)
            if const_expr(out.scale is not None):
                factor = factor * out.scale
            row, first = self.scheduler.coords(work_tile)
            target = out.base + Int64(row) * out.row + Int64(first + head) * out.head
            is_head = first + head < self.q.heads
            for block in cutlass.range(O_COLUMNS // O_BLOCK, unroll=1):
                found = ptx.load_tensor_memory(lanes + block * O_BLOCK, O_BLOCK)
                place = target + Int64(self.o_dim(half, block) * 2)
                for i in range_constexpr(O_BLOCK // (2 * WORDS)):
                    own = [Float32(found[2 * WORDS * i + j]) * factor for j in range(2 * WORDS)]
                    words = [ptx.bf16x2(own[2 * j], own[2 * j + 1]) for j in range(WORDS)]
                    ptx.store_global_128(place + i * (WORDS * 4), words, is_head)
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread & 31 == 0:
                self.bars.release_o()
            work_tile, phase = work_tile + self.scheduler.step, phase ^ 1


# ---- kernel


class PrefillKernel:
    """See kernel_args.GatheredArgs, where strides of q and of kv are multiples of 16 bytes even if they mean
    nothing, and kv has rows.

    dtype            of queries and rows
    index_loader, kv_loader, dequantizer
                     roles, which kernels over rows of another kind have otherwise
    blocks, mma, softmax, epilogue
                     CTAs that share a work tile, and roles that these have otherwise
    """

    name = "sparse_mla_prefill"
    config = BF16
    dtype: Any = BFloat16
    index_loader: type[IndexLoader] = IndexLoader
    kv_loader: type[KVLoader] = KVLoader
    dequantizer: Any = None
    blocks: int = 1
    mma: type[Mma] = Mma
    softmax: type[Softmax] = Softmax
    epilogue: type[Epilogue] = Epilogue

    def maps_and_sources(self, args: Any) -> tuple[Any, Any]:
        """Atoms of the copies of rows, and what tells where rows are."""
        return (self.rows_map(args.kv),), args.sources()

    @property
    def columns(self) -> int:
        """Of a slab."""
        return SLAB * 16 // self.dtype.width

    def rows_map(self, source: Any, rows: Any = None) -> Any:
        """Atom of a copy that gathers four rows' part of a slab.

        rows   None: the source's first axis. Else it has pages, and so many rows follow each other without a gap
        """
        count, step = (length(source, 0), source.stride[0]) if rows is None else (rows, HEAD_DIM)
        return gathered_rows(source.iterator, self.dtype, count, self.columns, step, 128, HEAD_DIM)

    def queries_map(self, q: Any) -> Any:
        """Atom of a copy of a slab of 64 heads' queries: zeros for heads that are not there."""
        layout = cute.make_layout((length(q, 1), HEAD_DIM, length(q, 0)), stride=(q.stride[1], 1, q.stride[0]))
        return boxes(cute.make_tensor(q.iterator, layout), HEADS, self.columns, 128)

    @cute.jit
    def launch(self, args: GatheredArgs | MixedArgs | PagedArgs) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        q = args.q
        maps, sources = self.maps_and_sources(args)
        group_bits = Int32(1) if length(q, 1) > self.blocks * HEADS else Int32(0)
        work_tiles = length(q, 0) << group_bits
        kernel = self.kernel(
            (self.queries_map(q), *maps),
            PrefillQuery.of(q),
            sources,
            args.output(),
            args.sink,
            args.scale_log2,
            work_tiles,
            group_bits,
        )
        blocks = const_expr(self.blocks)
        kernel.launch(
            grid=[cutlass.min(args.ctas // blocks, work_tiles) * blocks, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[blocks, 1, 1] if const_expr(blocks > 1) else None,
            min_blocks_per_mp=1,
            stream=args.stream,
        )

    @cute.kernel
    def kernel(
        self,
        copies: Any,
        q: PrefillQuery,
        kv: Any,
        out: PrefillOutput,
        sink: Int64,
        scale_log2: Float32,
        work_tiles: Int32,
        group_bits: Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread // 32)
        allocator = SmemAllocator()
        parts = {}
        for name, size in self.config.smem_parts.items():
            align = 1024 if name in ALIGNED else 8
            part = allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
            parts[name] = part.iterator.toint()
        smem = Smem(**parts)
        bars = self.config.bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
        if const_expr(self.blocks > 1):
            # a pair's allocation wants both CTAs to be running
            self.synchronize()
        if warp == EPILOGUE_WARP:
            # all of it, so it begins at address 0; nobody needs to be told
            ptx.allocate_tensor_memory(smem.exchange, ptx.COLUMNS, self.blocks)
            ptx.relinquish_tensor_memory(self.blocks)
        self.synchronize()
        cute.arch.griddepcontrol_wait()

        config, scheduler = self.config, self.own(PrefillScheduler(cta, work_tiles, ctas, group_bits))
        if warp < EPILOGUE_WARP:
            self.softmax(config, thread, scheduler, q, out, sink, scale_log2, bars, smem).run()
        elif warp < MMA_WARP:
            self.epilogue(thread - EPILOGUE_WARP * 32, scheduler, q, out, bars, smem).run()
        elif warp == MMA_WARP:
            with cute.arch.elect_one():
                self.mma(config, bars, smem).run()
        elif warp == INDEX_WARP:
            self.index_loader(scheduler, kv, bars, smem).run()
        elif warp < DEQUANT_WARP:
            with cute.arch.elect_one():
                maps = [ptx.tensor_map(copy) for copy in copies]
                for i in range_constexpr(len(maps)):
                    ptx.prefetch_tensor_map(maps[i])
                self.kv_loader(warp - KV_WARP, maps, scheduler, bars, smem).run()
        else:
            if const_expr(self.dequantizer is not None):
                self.dequantizer(thread - DEQUANT_WARP * 32, bars, smem).run()
        cute.arch.sync_warp()
        self.synchronize()
        if warp == EPILOGUE_WARP:
            ptx.free_tensor_memory(0, ptx.COLUMNS, self.blocks)

    def own(self, scheduler: PrefillScheduler) -> PrefillScheduler:
        """A CTA's work tiles, of a scheduler of CTAs."""
        return scheduler

    def synchronize(self) -> None:
        """All threads that share work tiles."""
        cute.arch.sync_threads()


# ---- key


@dataclass(frozen=True)
class BlackwellPrefillKey(KernelKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill"

    @property
    def smem_bytes(self) -> int:
        return BF16.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = ("tcgen05.mma", "tcgen05.cp", "tcgen05.ld", "tma.gather4", "tma.load")
        return *used, "mbarrier", "st.global.128", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PrefillKernel().launch, fake_gathered())


# ---- what a tile takes

PREFILLS = ((64, 640), (128, 640), (64, 1152), (128, 1152), (64, 2176), (128, 2176), (8, 640))
"""Heads and columns of calls with 4096 query rows over 16384 rows of kv."""

QUERY_ROWS, KV_ROWS = 4096, 16384


def of_tile(op: str, kernel: str, rows: dict[str, float], heads: int = HEADS, shapes: tuple[Shape, ...] = ()) -> Work:
    """Work of a tile.

    rows    bytes through shared memory until the tile is there
    heads   of a work tile, of the 64 that are computed
    """
    flops = 2 * 2 * KEYS * HEAD_DIM
    smem = {
        "Q K^T": STAGE_BYTES + (SLABS - Q_SLABS) * SLAB_BYTES,
        "P in and out": P_BYTES + HEAD_DIM // O_COLUMNS * P_BYTES,
        "P V": STAGE_BYTES,
    }
    # rows are read over and over: they come from L2, whose rate is not known
    mma = {"bf16": float(flops * HEADS)}
    return Work(op, kernel, f"{KEYS} keys, {HEADS} heads", 1, 0, mma, rows | smem, flops * heads, shapes)


def shape(name: str, heads: int, keys: int, kv_bytes: float) -> Shape:
    """Of a call with QUERY_ROWS rows that attend to so many keys each."""
    tiles = QUERY_ROWS * -(-heads // HEADS) * -(-keys // KEYS)
    return Shape(name, tiles, QUERY_ROWS * heads * HEAD_DIM * 2 * 2 + kv_bytes)


def work() -> tuple[Work, ...]:
    """128 heads are two work tiles. Fewer than 64 take as long as 64."""
    shapes: dict[int, list[Shape]] = {}
    for heads, topk in PREFILLS:
        name = f"sq{QUERY_ROWS} h{heads} topk{topk} skv{KV_ROWS}"
        own = shape(name, heads, topk, KV_ROWS * HEAD_DIM * 2 + QUERY_ROWS * topk * 4)
        shapes.setdefault(min(heads, HEADS), []).append(own)
    rows = {"rows in": float(STAGE_BYTES)}
    return tuple(
        of_tile("sparse_mla_prefill", f"{heads} heads", rows, heads, tuple(own)) for heads, own in shapes.items()
    )
