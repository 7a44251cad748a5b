# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill on Hopper for more than 16 heads: both products by wgmma, rows of kv gathered into shared memory.

A CTA takes work tiles (params.PrefillScheduler): a query row, a group of 64 heads. Its keys come in tiles of 64 rows of
kv, which are both K and V. Warpgroups of a CTA:

    0      QK and softmax     Q in registers (a quarter of it in shared memory), S = Q K^T, softmax       QkSoftmax
    1, 2   PV and epilogue    O += P V of 256 columns each, out                                           PvEpilogue
    3      producer           indices -> rows (prefill_index_loader), their copies, copies of queries     Producer

    indices  gmem --cp.async--> lists, AHEAD tiles ahead --> producer
    KV       gmem --cp.async--> KV ring [3 tiles, swizzled] ------------+-------------------------+
                                                                        |                         |
    Q        gmem --cp.async--> a stage of the KV ring -> registers, q -+--wgmma--> S             |
                                                                        |           v softmax     |
                                                                   p ring, factors, target --wgmma--> O
                                                                                                      |
    out      gmem <-- registers (dsl/wgmma.store_bf16, or codes: quant_output) <----------------------+

    ring     full                                             empty
    kv       all rows of a tile or of queries, the header     PV warps are done with a tile, QK warps with queries
    p        QK warps have stored P, factors and the target   PV warps are done with them

What begins a work tile is a stage of its queries: of these QK takes HELD columns to registers and moves the others to
memory of their own, `q`, which only QK warps meet in; then it releases the stage.

The 512 columns of a tile, or of queries, are cut into slabs of 64: a slab is [64 rows, 128 bytes] of bf16, in the
layout of the 128-byte swizzle: 16-byte chunk c of row r lies at chunk c ^ (r % 8). perf/notes/prefill.md has why,
perf/log/prefill.md what was tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.convert import bf16_high, bf16_low
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import over_quad
from cute_kernels.dsl.tensor import length
from cute_kernels.dsl.transforms import HALF_TABLE_BYTES, rotate_pair
from cute_kernels.formats import HEAD_DIM, ROPE_DIM
from cute_kernels.kv_cache.query_norm import inverse_rms
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.hopper.prefill_codes import SOFTMAX_BARRIER, load_codes
from cute_kernels.sparse_mla.hopper.prefill_index_loader import (
    AHEAD,
    COPIED_ROWS,
    CURSOR,
    END,
    KEPT_AT,
    LAST,
    LISTS,
    IndexLoader,
    list_bytes,
    own_lane,
)
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
from cute_kernels.sparse_mla.kernel_args import GatheredArgs, MixedArgs, fake_gathered
from cute_kernels.sparse_mla.params import (
    LEAST_SCALE,
    NEG_MAX,
    PrefillOutput,
    PrefillQuery,
    PrefillScheduler,
    output_policy,
    row_units,
)

# ---- config

SLAB = 64
SLABS = HEAD_DIM // SLAB

HELD = 384
"""Columns of the queries in registers: a quarter of them each, per thread. More would leave too few for the scores, and
fewer would leave too little memory for three stages."""

KV_STAGES, P_STAGES = 3, 2

FIRST_PV, PRODUCER, WARPGROUPS = 1, 3, 4
"""Numbers of warpgroups, QK and softmax being 0; how many there are."""

THREADS = WARPGROUPS * 128

SOFTMAX_REGISTERS, PV_REGISTERS, PRODUCER_REGISTERS = 160, 160, 32
"""Per thread, in steps of 8; all four warpgroups together have 512, what they are launched with."""


@dataclass(frozen=True)
class PrefillConfig:
    """What a kernel is made for.

    name         of the kernel
    dtype        of what tensor cores multiply
    codes        what comes as e4m3 codes, which become `dtype` (prefill_mixed): "none", "queries", which QK warps
                 convert, or "all", where the producer converts rows, and stores them in the ordinary way
    """

    name: str
    dtype: Any = BFloat16
    codes: str = "none"

    @property
    def has_codes(self) -> bool:
        return self.codes != "none"

    @property
    def stores_rows(self) -> bool:
        return self.codes == "all"


# ---- shared memory

KV_STAGE_BYTES = SLABS * SLAB_BYTES

HEADER = 32
"""Bytes of a stage's header: of every 16 keys, which are there, and flags of the tile; of queries, their work tile."""

TARGET = 8
"""Bytes of a tile's target: its flags and its work tile."""

PRODUCER_WARPS = 4

SWIZZLED = ("kv", "q", "p")
"""Parts of shared memory that tensor cores read: 1024-byte aligned."""


BARRIERS = 2 * (KV_STAGES + P_STAGES)


class Smem(NamedTuple):
    """Addresses in shared memory, 32 bits wide; by default sizes in bytes, see smem_parts.

    kv        [3][8 slabs][64 rows][64] bf16: keys of a tile, or queries of a work tile
    q         [2 slabs][64 heads][64] bf16: those columns of the work tile's queries that are not in registers
    p         [2 stages][64 heads][64 keys] bf16
    lists     [4] lists of indices, see IndexLoader
    header    [3 stages] headers
    cursors   [4 producer warps] cursors, see IndexLoader; they keep, see Producer
    factor    [2 stages][64 heads] factors
    target    [2 stages] targets
    """

    kv: Any = KV_STAGES * KV_STAGE_BYTES
    q: Any = ROWS * (HEAD_DIM - HELD) * 2
    p: Any = P_STAGES * P_BYTES
    lists: Any = LISTS * list_bytes(PRODUCER_WARPS)
    header: Any = KV_STAGES * HEADER
    cursors: Any = PRODUCER_WARPS * CURSOR
    factor: Any = P_STAGES * ROWS * FACTOR
    target: Any = P_STAGES * TARGET


def smem_parts() -> dict[str, int]:
    """Bytes of everything but the barriers, in order."""
    return Smem()._asdict()


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


@dataclass(frozen=True)
class Bars:
    """mbarriers of a CTA, and what completes their phases.

    kv       full: all rows of a stage are there, and the header. empty: PV warps are done with a tile, or QK warps with
             queries
    p        full: QK warps have stored a tile's P. empty: PV warps are done with it
    """

    kv: barriers.Ring
    p: barriers.Ring

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        return cls(*(barriers.Ring.allocate(smem, stages) for stages in (KV_STAGES, P_STAGES)))

    def initialize(self) -> None:
        """By one thread; the CTA synchronizes afterwards."""
        # every producer thread, as its copies are there, and one of each warp for the header
        self.kv.initialize(PRODUCER_WARPS * (32 + 1), 2 * 4)
        self.p.initialize(4, 2 * 4)
        cute.arch.mbarrier_init_fence()


# ---- producer


def query_slabs(q: PrefillQuery) -> tuple[int, ...]:
    """Slabs of the queries, those first that are held in registers. Of raw ones the rotary slab, the last, comes first:
    it is rotated in registers, where tensor cores wait for no store, and while the other slabs come."""
    return tuple(range(SLABS)) if q.norm_eps is None else (SLABS - 1, *range(SLABS - 1))


@dataclass(frozen=True)
class Producer:
    """The producer warpgroup: copies a work tile's queries, then its tiles of kv.

    A warp does 16 rows of every stage, 4 at a time: 8 lanes copy the 128 bytes of a slab's row, all slabs one after the
    other. Rows that nobody selects become zeros. Its cursor keeps the work tile whose queries come next.

    waits_late   the kernel ahead makes the rows, and lets this one start when all kernels before it have ended: only
                 the producer waits for it, ahead of its first rows
    """

    row_dtype: ClassVar[Any] = BFloat16
    waits_late: ClassVar[bool] = False
    bars: Bars
    smem: Smem
    q: PrefillQuery
    loader: IndexLoader

    @cute.jit
    def run(self) -> None:
        """Fill the KV ring."""
        bars, smem, loader = self.bars, self.smem, self.loader
        loader.start()
        if const_expr(self.waits_late):
            cute.arch.griddepcontrol_wait()
        loader.keep(loader.scheduler.first)
        flags = Int32(0)
        stage, phase = barriers.start()
        while flags & END == 0:
            bars.kv.wait_empty(stage, phase)
            self.give_queries(stage)
            stage, phase = barriers.advance(stage, phase, KV_STAGES)
            flags = Int32(0)
            while flags & LAST == 0:
                cute.arch.cp_async_wait_group(AHEAD - 1)
                cute.arch.sync_warp()
                place, flags = loader.next_rows()
                bars.kv.wait_empty(stage, phase)
                store_header(loader, smem.header, stage, place, flags)
                self.copy_rows_async(place, flags, stage)
                loader.copy_next_indices_async()
                self.arrive_full(stage)
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def give_queries(self, stage: Any) -> None:
        """Give the queries of the kept work tile, and keep the next one."""
        smem, loader = self.smem, self.loader
        self.fill_queries(smem.kv + stage * KV_STAGE_BYTES)
        work_tile = ptx.load_shared_s32(loader.cursor + KEPT_AT)
        if (loader.own_warp() == 0) & (own_lane() == 0):
            ptx.store_shared_s32(smem.header + stage * HEADER, work_tile)
        Producer.arrive_full(self, stage)
        loader.keep(work_tile + loader.scheduler.step)

    @cute.jit
    def fill_queries(self, stage_at: Any) -> None:
        """Start to copy the warp's share of the queries of the kept work tile to a stage."""
        self.copy_queries_async(stage_at, query_slabs(self.q))

    @cute.jit
    def arrive_full(self, stage: Any) -> None:
        """The stage is full when this warp's copies are there."""
        full = self.bars.kv.full(stage)
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
        if own_lane() == 0:
            cute.arch.mbarrier_arrive(full)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_rows_async(self, place: Any, flags: Any, stage: Any) -> None:
        """Start to copy the warp's rows of a tile."""
        loader = self.loader
        row, chunk = loader.first_chunk()
        target = self.smem.kv + stage * KV_STAGE_BYTES + chunk
        for i in range_constexpr(loader.own_rows // COPIED_ROWS):
            own = cute.arch.shuffle_sync(place, COPIED_ROWS * i + (own_lane() >> 3))
            source = loader.kv.address(own, flags, row + COPIED_ROWS * i) + (own_lane() & 7) * 16
            size = Int32(16) if own >= 0 else Int32(0)
            to = (target ^ (i % 2 * 64)) + i * (COPIED_ROWS * SLAB_ROW_BYTES)
            for slab in range_constexpr(SLABS):
                ptx.copy_async_or_zero(to + slab * SLAB_BYTES, source + slab * SLAB_ROW_BYTES, 16, size)

    @cute.jit
    def copy_queries_async(self, target: Any, slabs: cutlass.Constexpr) -> None:
        """Start to copy the warp's share of some slabs of the queries; target: where the first one goes."""
        loader, q = self.loader, self.q
        # read anew, as few registers are left
        query, first = loader.scheduler.coords(ptx.load_shared_s32(loader.cursor + KEPT_AT))
        source = q.base + Int64(query) * q.row
        row, chunk = loader.first_chunk()
        source = source + Int64(first + row) * q.head + (own_lane() & 7) * 16
        rest = q.heads - (first + row)
        for i in range_constexpr(loader.own_rows // COPIED_ROWS):
            # nothing is read of heads that are not there
            size = Int32(16) if COPIED_ROWS * i < rest else Int32(0)
            to = target + (chunk ^ (i % 2 * 64)) + i * (COPIED_ROWS * SLAB_ROW_BYTES)
            for number in range_constexpr(len(slabs)):
                slab_at, offset = to + number * SLAB_BYTES, slabs[number] * SLAB_ROW_BYTES
                ptx.copy_async_or_zero(slab_at, source + offset, 16, size, is_read_once=True)
            source = source + COPIED_ROWS * q.head


@cute.jit
def store_header(loader: IndexLoader, headers: Any, stage: Any, place: Any, flags: Any) -> None:
    """Store the warp's part of a tile's header."""
    there = cute.arch.vote_ballot_sync(place >= 0)
    if own_lane() == 0:
        header_at = headers + stage * HEADER
        ptx.store_shared_s32(header_at + loader.own_warp() * 4, there & 0xFFFF)
        if loader.own_warp() == 0:
            ptx.store_shared_s32(header_at + 16, flags)


# ---- MMA and softmax

NAN_PAIR = 0x7FFF7FFF
"""Two bf16."""


@dataclass(frozen=True)
class QkSoftmax:
    """The QK and softmax warpgroup.

    Raw queries (params.PrefillQuery) are rotated in registers. Their norm is one factor for a whole head, and has no
    place in its columns: it is multiplied with the scale.

    mma        Q K^T of queries in registers, the first and the others, which add; of those in shared memory
    k_layout   of a tile
    q_layout   of the queries in shared memory
    """

    config: PrefillConfig
    bars: Bars
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    sink: Any
    scale_log2: Any
    thread: Any
    mma: tuple[Any, Any, Any]
    k_layout: Any
    q_layout: Any

    @cute.jit
    def run(self) -> None:
        """Give the PV warpgroups the P of all tiles."""
        config, bars, smem, scheduler, q = self.config, self.bars, self.smem, self.scheduler, self.q
        part = self.mma[2].get_slice(self.thread)
        shape = self.mma[0].get_slice(self.thread).partition_shape_A((ROWS, HELD))
        held = cute.make_rmem_tensor(shape, config.dtype)
        s = cute.make_rmem_tensor(part.partition_shape_C((ROWS, KEYS)), Float32)

        scale = ptx.abs_f32(self.scale_log2)
        tile = Int32(0)
        stage, phase = barriers.start()
        flags, work_tile = Int32(0), Int32(0)
        norm = None
        if const_expr(q.norm_eps is not None):
            norm = self.load_norm(scheduler.first)
        while flags & END == 0:
            if const_expr(q.norm_eps is not None):
                # before the queries are there
                norm = self.finish_norm(norm)
            bars.kv.wait_full(stage, phase)
            work_tile = ptx.load_shared_s32(smem.header + stage * HEADER)
            if const_expr(config.has_codes):
                load_codes(held, smem.kv + stage * KV_STAGE_BYTES, smem.q)
            else:
                load_queries(held, smem.kv + stage * KV_STAGE_BYTES, smem.q)
            self.release_queries(stage)
            stage, phase = barriers.advance(stage, phase, KV_STAGES)
            scales = [scale, scale]
            if const_expr(q.norm_eps is not None):
                scales = self.rotate(held, scale, norm)

            row_max = [Float32(NEG_MAX), Float32(NEG_MAX)]
            max_logit = [Float32(-Float32.inf), Float32(-Float32.inf)]
            row_sum = [Float32(0.0), Float32(0.0)]
            flags = Int32(0)
            is_published = Int32(1)
            while flags & LAST == 0:
                if (is_published == 0) & (bars.kv.is_full(stage, phase) == 0):
                    self.publish_p(tile - 1)
                    is_published = Int32(1)
                bars.kv.wait_full(stage, phase)
                if const_expr(config.stores_rows):
                    cute.arch.fence_view_async_shared()
                self.multiply(s, held, part, stage, tile - 1, is_published)
                header = smem.header + stage * HEADER
                there = ptx.load_shared_128(header)
                flags = ptx.load_shared_s32(header + 16)
                logits = [Int32(0), Int32(0)]
                if flags & LAST != 0:
                    logits = [load_sink(self.sink, self.head(work_tile, half), q.heads) for half in range(2)]
                    if const_expr(q.norm_eps is not None):
                        self.prefetch_squares(work_tile + scheduler.step)
                warpgroup.wait_group(0)
                is_published = Int32(0)
                mask(s, self.scale_log2, there)
                factors, max_logit, row_max, row_sum = softmax(s, scales, row_max, row_sum, max_logit)
                buffer = tile & P_STAGES - 1
                bars.p.wait_empty(buffer, tile >> P_STAGES.bit_length() - 1 & 1)
                row_sum = store_p(s, smem, buffer, flags, factors, row_max, row_sum, logits, self.sink, config.dtype)
                if thread_idx() == 0:
                    ptx.store_shared_64(smem.target + buffer * TARGET, flags, work_tile)
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
                tile = tile + 1

            self.publish_p(tile - 1)
            if const_expr(q.norm_eps is not None):
                # not before: the fence of `publish_p` waits for loads
                norm = self.load_norm(work_tile + scheduler.step)
            for half in range_constexpr(2):
                most = over_quad(max_logit[half], ptx.max_f32)
                store_logs(scheduler, q.heads, self.out, work_tile, half, most, row_max[half], row_sum[half])

    @cute.jit
    def release_queries(self, stage: Any) -> None:
        """All warps have read the queries in a stage."""
        if thread_idx() & 31 == 0:
            cute.arch.mbarrier_arrive(self.bars.kv.empty(stage), arrive_count=2)

    @cute.jit
    def load_norm(self, work_tile: Any) -> tuple[Any, Any]:
        """Of a work tile, or of the last one if there are fewer: the address of its angles, and the sums of squares of
        the thread's two heads, or of the last head where there are fewer."""
        work_tile = cutlass.min(work_tile, self.scheduler.end - 1)
        row, _ = self.scheduler.coords(work_tile)
        angles_at = self.out.quant.angles_at(row)
        heads = [cutlass.min(self.head(work_tile, half), self.q.heads - 1) for half in range(2)]
        return angles_at, [ptx.load_global_128_in_order(self.squares_at(row, head)) for head in heads]

    def squares_at(self, row: Any, head: Any) -> Any:
        return self.q.squares + Int64(row) * self.q.squares_row + Int64(head) * 16

    @cute.jit
    def prefetch_squares(self, work_tile: Any) -> None:
        """L2 has the squares of a work tile by the time they are wanted: a lane asks for one of the warp's heads."""
        row, first = self.scheduler.coords(work_tile)
        head = first + (thread_idx() >> 5) * 16 + (thread_idx() & 15)
        ptx.prefetch_l2(self.squares_at(row, head), (work_tile < self.scheduler.end) & (head < self.q.heads))

    @cute.jit
    def finish_norm(self, norm: tuple[Any, Any]) -> tuple[Any, Any]:
        """What load_norm has loaded: cosines and sines of the thread's pair of every 8 rotary columns, and 1 / rms of
        its heads."""
        angles_at, squares = norm
        lane_at = angles_at + (thread_idx() & 31) * 4
        own = [ptx.load_global_s32_again(lane_at + half * HALF_TABLE_BYTES) for half in range(2)]
        angles = []
        for run in range_constexpr(ROPE_DIM // 8):
            number = run * 4 + (thread_idx() & 3)
            angles.append([cute.arch.shuffle_sync(angle, number).bitcast(Float32) for angle in own])
        return angles, [self.inverse_rms(four) for four in squares]

    @cute.jit
    def rotate(self, held: cute.Tensor, scale: Any, norm: tuple[Any, Any]) -> list[Any]:
        """Rotate raw queries, and return what to multiply the scores of the thread's two heads with.

        held   of every four words, of 16 columns, the first and the third are of the first head; the first slab is the
               rotary one
        norm   as finish_norm has it
        """
        angles, factors = norm
        words = cute.recast_tensor(held, Int32)
        for run in range_constexpr(ROPE_DIM // 8):
            for half in range_constexpr(2):
                i = run * 2 + half
                pair = rotate_pair(bf16_low(words[i]), bf16_high(words[i]), *angles[run])
                words[i] = ptx.bf16x2(*pair)
        for half in range_constexpr(2):
            # keys that are not attended to have the score -inf, which neither NaN nor 0 may be multiplied with: a head
            # whose sums are NaN has NaN for a query instead
            words[half] = words[half] if factors[half] == factors[half] else Int32(NAN_PAIR)
        return [ptx.max_f32(scale * factor, Float32(LEAST_SCALE)) for factor in factors]

    def inverse_rms(self, squares: Any) -> Any:
        """1 / rms of a head."""
        first, second, third, fourth = (word.bitcast(Float32) for word in squares)
        return inverse_rms(ptx.add_rn(ptx.add_rn(first, second), ptx.add_rn(third, fourth)), self.q.norm_eps)

    @cute.jit
    def multiply(self, s: Any, held: Any, part: Any, stage: Any, tile: Any, is_published: Any) -> None:
        """Start s = Q K^T of a tile, and publish P of the tile before, `tile`, if that has not been done."""
        # no proxy fence for what cp.async has brought, here and in PvEpilogue: other kernels that multiply such rows
        # have none either, and tests that repeat calls stand guard; fences cost 2%
        k_tile = wgmma.uniform_tile(self.smem.kv + stage * KV_STAGE_BYTES, self.k_layout, self.config.dtype)
        k = self.mma[2].make_fragment_B(part.partition_B(k_tile))
        steps = [slab * (SLAB // STEP) + i for slab in query_slabs(self.q) for i in range(SLAB // STEP)]
        q_tile = wgmma.uniform_tile(self.smem.q, self.q_layout, self.config.dtype)
        q = self.mma[2].make_fragment_A(part.partition_A(q_tile))
        warpgroup.fence()
        for step in range_constexpr(HELD // STEP):
            chosen = self.mma[0] if const_expr(step == 0) else self.mma[1]
            cute.gemm(chosen, s, held[None, None, step], k[None, None, steps[step]], s)
        for step in range_constexpr((HEAD_DIM - HELD) // STEP):
            some = k[None, None, steps[HELD // STEP + step]]
            cute.gemm(self.mma[2], s, q[None, None, step], some, s)
        warpgroup.commit_group()
        if is_published == 0:
            self.publish_p(tile)

    @cute.jit
    def publish_p(self, tile: Any) -> None:
        """Let PV have a tile's P. The next tile's products have begun before, if it is there: tensor cores then have
        P V to do while softmax of that tile goes on, and nobody waits for the fence."""
        # tensor cores read it
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if thread_idx() & 31 == 0:
            cute.arch.mbarrier_arrive(self.bars.p.full(tile & P_STAGES - 1))

    def head(self, work_tile: Any, half: int) -> Any:
        """The thread's first or second head."""
        _, first = self.scheduler.coords(work_tile)
        return own_head(first, half)


@cute.jit
def load_queries(held: cute.Tensor, stage_at: Any, q_at: Any) -> None:
    """Load the queries of a work tile by the QK and softmax warps: as many columns as `held` has to registers, the
    others to their place in shared memory."""
    lane, warp = thread_idx() & 31, thread_idx() >> 5
    row_at = (warp * 16 + (lane & 15)) * SLAB_ROW_BYTES
    # all warps are done with the products of the work tile before
    cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=128)
    # first, while there are registers for them
    for step in range_constexpr((HEAD_DIM - HELD) // STEP):
        to = row_at + step // 4 * SLAB_BYTES + ((2 * (step % 4) + (lane >> 4)) ^ (lane & 7)) * 16
        ptx.store_matrices(q_at + to, ptx.load_matrices(stage_at + to + HELD // SLAB * SLAB_BYTES))
    load_q(held, stage_at)
    # tensor cores read what all warps have stored
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=128)


# ---- PV and epilogue


@dataclass(frozen=True)
class PvEpilogue:
    """A PV and epilogue warpgroup: columns 256 * side to 256 * side + 255 of O.

    layouts   of P, and of the columns of a tile
    """

    config: PrefillConfig
    bars: Bars
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
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
        flags, coming = Int32(0), self.scheduler.first
        while flags & END == 0:
            angles = (Int32(0), Int32(0))
            if const_expr(out.quant is not None):
                # there is time: the first tile's P is not there yet
                angles = out.quant.angles(self.scheduler.coords(coming)[0], lane)
                coming = coming + self.scheduler.step
            # the first stage has the queries
            stage, phase = barriers.advance(stage, phase, KV_STAGES)
            o.fill(0.0)
            out_scale = [Float32(0.0), Float32(0.0)]
            flags, work_tile = Int32(0), Int32(0)
            while flags & LAST == 0:
                buffer = tile & P_STAGES - 1
                bars.p.wait_full(buffer, tile >> P_STAGES.bit_length() - 1 & 1)
                bars.kv.wait_full(stage, phase)
                flags, work_tile = ptx.load_shared_64(smem.target + buffer * TARGET)
                factors, out_scale = load_factors(smem, buffer, own_row)
                if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
                    wgmma.scale_rows(o, factors)
                v_at = smem.kv + stage * KV_STAGE_BYTES + self.side * (KV_STAGE_BYTES // 2)
                config = self.config
                multiply_pv(pv, part, o, smem, buffer, v_at, self.layouts, config.dtype, config.stores_rows)
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(bars.p.empty(buffer))
                    cute.arch.mbarrier_arrive(bars.kv.empty(stage))
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
                tile = tile + 1
            if const_expr(out.quant is not None):
                row, first = self.scheduler.coords(work_tile)
                head = first + own_row
                out.quant.store(o, out_scale, angles, row, head, self.q.heads - head, self.side, lane)
            else:
                self.store(o, out_scale, work_tile, own_row, lane)

    @cute.jit
    def store(self, o: cute.Tensor, out_scale: Any, work_tile: Any, own_row: Any, lane: Any) -> None:
        """Store this warpgroup's columns of a work tile's rows of O."""
        out = self.out
        if const_expr(out.scale is not None):
            out_scale = [scale * out.scale for scale in out_scale]
        wgmma.scale_rows(o, out_scale)
        row, first = self.scheduler.coords(work_tile)
        target = out.base + Int64(row) * out.row + Int64(first + own_row) * out.head + self.side * (SIDE * 2)
        heads = self.q.left(first) - own_row
        if const_expr(self.config.has_codes):
            wgmma.store_bf16_paired(o, lane, target, out.head, heads, SIDE, out.policy)
        else:
            wgmma.store_bf16(o, lane, target, out.head, heads, Int32(SIDE), SIDE, out.policy)


# ---- kernel


class PrefillKernel:
    """See kernel_args.GatheredArgs, kernel_args.MixedArgs.

    producer   type of the producer
    """

    def __init__(self, config: PrefillConfig, producer: Any = Producer) -> None:
        self.config, self.producer = config, producer

    @cute.jit
    def launch(self, args: GatheredArgs | MixedArgs) -> None:
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        q = args.q
        group_bits = Int32(1) if length(q, 1) > ROWS else Int32(0)
        work_tiles = length(q, 0) << group_bits
        kernel = self.kernel(
            args.query(),
            args.sources(),
            args.output(output_policy(length(q, 0) * length(q, 1))),
            args.sink,
            args.scale_log2,
            work_tiles,
            group_bits,
            tiled_mmas(self.config.dtype),
            smem_layouts(self.config.dtype, HELD),
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
        kv: Any,
        out: PrefillOutput,
        sink: Int64,
        scale_log2: Float32,
        work_tiles: Int32,
        group_bits: Int32,
        products: tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout, cute.ComposedLayout],
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // 128)
        allocator = SmemAllocator()
        places = {}
        for name, size in smem_parts().items():
            align = 1024 if name in SWIZZLED else 16
            place = allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
            places[name] = place.iterator.toint()
        smem = Smem(**places)
        bars = Bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
        cute.arch.sync_threads()
        if const_expr(not self.producer.waits_late):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for product in products[1:]:
            wgmma.accumulate(product)
        # the CTA's number is read by whoever needs it: before the branches a register could be spilled
        scheduler = PrefillScheduler(ptx.block_again(), work_tiles, ctas, group_bits)
        config, own = self.config, thread % 128
        k_layout, v_layout, q_layout, p_layout = layouts
        if group < FIRST_PV:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            QkSoftmax(
                config=config,
                bars=bars,
                smem=smem,
                scheduler=scheduler,
                q=q,
                out=out,
                sink=sink,
                scale_log2=scale_log2,
                thread=own,
                mma=products[:3],
                k_layout=k_layout,
                q_layout=q_layout,
            ).run()
        elif group < PRODUCER:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            PvEpilogue(
                config=config,
                bars=bars,
                smem=smem,
                scheduler=scheduler,
                q=q,
                out=out,
                thread=own,
                side=cute.arch.make_warp_uniform(group - FIRST_PV),
                pv=products[3],
                layouts=(p_layout, v_layout),
            ).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            scheduler = PrefillScheduler(ptx.block_again(), work_tiles, ctas, group_bits)
            units = row_units(self.producer.row_dtype)
            is_short = config.stores_rows
            loader = IndexLoader(kv, scheduler, smem.lists, smem.cursors, PRODUCER_WARPS, units, is_short)
            self.producer(bars, smem, q, loader).run()


# ---- key


@dataclass(frozen=True)
class PrefillKey(KernelKey):
    """What distinguishes one compiled kernel from another: nothing but the architecture."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill"

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        return "wgmma", "cp.async", "ldmatrix", "mbarrier", "setmaxnreg", "st.global.128", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PrefillKernel(PrefillConfig("sparse_mla_prefill")).launch, fake_gathered())


@dataclass(frozen=True)
class QuantPrefillKey(PrefillKey):
    """As PrefillKey: results are turned back and become e4m3 codes, see quant_output."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_quant"

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "cvt.e4m3"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        config = PrefillConfig("sparse_mla_prefill_quant")
        return entry_point(PrefillKernel(config).launch, fake_gathered(quantized=True))


@dataclass(frozen=True)
class NormQuantPrefillKey(QuantPrefillKey):
    """As QuantPrefillKey: queries come as their projection made them, and are normed and rotated first."""

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_norm_quant"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        config = PrefillConfig("sparse_mla_prefill_norm_quant")
        return entry_point(PrefillKernel(config).launch, fake_gathered(quantized=True, raw=True))
