# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_mixed over e4m3 caches on Hopper for up to 16 heads: keys on the tensor cores' long side, as in
prefill_swap_ab.py, whose softmax it shares. Codes stay codes in shared memory: warps convert what they multiply on its
way to registers, and multiply it by mma.sync.

A CTA takes work tiles: a query row with all its heads. Its keys come in tiles of 64 rows of kv, which are both K and V.
Warpgroups:

    0      QK and softmax     copies Q, S^T = K Q^T, softmax                          QkSoftmax
    1      PV and epilogue    O^T += V^T P, out                                       PvEpilogue
    2, 3   producer           indices -> rows (IndexLoader), copies of codes          Producer

    indices  gmem --cp.async--> lists [4 tiles] (index_loader.py)
    KV       gmem --cp.async--> KV ring [6 tiles of codes]
                                     |                                    |
                                ldmatrix, cvt                  ldmatrix.trans, prmt, cvt
    Q        gmem --cp.async--> q --registers, f16--mma.sync--> S^T       |
                                                    softmax v             |
                                                           p [2] --mma.sync--> O^T
    out      gmem <--------------------------------------------------------+

    ring     full                                          empty
    kv       all rows of a tile are there, and its header  PV warps are done with it (QK is, as P is there)
    p        softmax warps have stored P, and factors if   PV warps have used them
             maxima have moved

f16 holds every e4m3 number, so all products are exact. The 512 codes of a row are cut into slabs of 128: a slab of a
tile is [64 keys, 128 bytes], its 16-byte chunk c of row r at chunk c ^ (r % 8), so that no eight rows that a matrix is
loaded of meet in a bank. perf/notes/prefill_mixed.md has why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, mma_sync, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.dsl.tensor import length
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.hopper.index_loader import AHEAD, COPIED_ROWS, END, KEYS, LAST, IndexLoader, own_lane
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import (
    FLAGS_AT,
    HEADER,
    P_STAGES,
    PRODUCER_WARPS,
    SLAB_BYTES,
    SLAB_ROW_BYTES,
    TARGET,
    ColumnSoftmax,
    Smem,
    SwapAbConfig,
    arrive_full,
    release,
    store_header,
)
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import smem_parts as shared_parts
from cute_kernels.sparse_mla.kernel_args import MixedArgs, fake_mixed
from cute_kernels.sparse_mla.params import (
    NEG_MAX,
    PrefillOutput,
    PrefillQuery,
    PrefillScheduler,
    output_policy,
    row_units,
)

# ---- config

CHUNK = 16
"""Codes, and bytes, of a row of what ldmatrix loads; both products take one at a time: as 16 summed columns of K, and
as 16 rows of V^T."""

SLAB_CHUNKS = SLAB_ROW_BYTES // CHUNK
CHUNKS = HEAD_DIM // CHUNK
SLABS = CHUNKS // SLAB_CHUNKS

KV_STAGES = 6
"""What shared memory has room for."""

PV, PRODUCER, WARPGROUPS = 1, 2, 4
"""Numbers of warpgroups, QK and softmax being 0: PV, the first of two of the producer; how many there are."""

THREADS = WARPGROUPS * 128

SOFTMAX_REGISTERS, PV_REGISTERS, PRODUCER_REGISTERS = 216, 152, 72
"""Per thread, in steps of 8; all four warpgroups together have 512, what they are launched with. Queries of 16 heads
are 128 of the first."""


# ---- shared memory

KV_STAGE_BYTES = SLABS * SLAB_BYTES


def smem_parts(config: SwapAbConfig) -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order."""
    return shared_parts(config) | {"kv": KV_STAGES * KV_STAGE_BYTES, "header": KV_STAGES * HEADER}


def smem_bytes(config: SwapAbConfig) -> int:
    return sum(smem_parts(config).values()) + (KV_STAGES + P_STAGES) * barriers.BYTES_PER_STAGE


@dataclass(frozen=True)
class Bars:
    """A CTA's mbarriers, and what completes their phases.

    kv   full: all rows of a tile are there, and its header. empty: PV warps are done with it
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


# ---- producer


@dataclass(frozen=True)
class Producer:
    """The producer: copies the rows of tiles. By two warpgroups.

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
        flags = Int32(0)
        stage, phase = barriers.start()
        while flags & END == 0:
            cute.arch.cp_async_wait_group(AHEAD - 1)
            cute.arch.sync_warp()
            place, flags = loader.next_rows()
            bars.kv.wait_empty(stage, phase)
            store_header(loader, smem.header, stage, place, flags)
            self.copy_rows_async(place, flags, stage)
            arrive_full(bars.kv.full(stage))
            loader.copy_next_indices_async()
            cute.arch.cp_async_commit_group()
            stage, phase = barriers.advance(stage, phase, KV_STAGES)
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def copy_rows_async(self, place: Any, flags: Any, stage: Any) -> None:
        """Start to copy the warp's rows of a tile."""
        loader = self.loader
        row, chunk_at = loader.first_chunk()
        target = self.smem.kv + stage * KV_STAGE_BYTES + chunk_at
        for i in range_constexpr(loader.own_rows // COPIED_ROWS):
            own = cute.arch.shuffle_sync(place, COPIED_ROWS * i + (own_lane() >> 3))
            source = loader.kv.address(own, flags, row + COPIED_ROWS * i) + (own_lane() & 7) * CHUNK
            size = Int32(CHUNK) if own >= 0 else Int32(0)
            to = (target ^ (i % 2 * 64)) + i * (COPIED_ROWS * SLAB_ROW_BYTES)
            for slab in range_constexpr(SLABS):
                ptx.copy_async_or_zero(to + slab * SLAB_BYTES, source + slab * SLAB_ROW_BYTES, CHUNK, size)


# ---- QK and softmax

CHAINS = 4
"""Sums of a product that follow each other are this many apart: what tensor cores add to is there by then."""


@dataclass(frozen=True)
class QkSoftmax:
    """The QK and softmax warpgroup: a warp has 16 keys, and the queries of all heads in registers, as f16.

    Of a chunk of 16 codes lane l has those from 4 (l % 4) on, of K as of queries: which of the summed columns they are
    numbered as is the same in both.
    """

    columns: ColumnSoftmax

    @cute.jit
    def run(self) -> None:
        """Give PV the P of all tiles."""
        columns = self.columns
        config, bars, smem, scheduler, q = columns.config, columns.bars, columns.smem, columns.scheduler, columns.q
        scores = cute.make_rmem_tensor((config.heads // 2,), Float32)
        scale = ptx.abs_f32(columns.scale_log2)
        tile, number = Int32(0), Int32(0)
        stage, phase = barriers.start()
        work_tile = scheduler.first
        columns.copy_q_async(work_tile, Int32(0))
        while work_tile < scheduler.end:
            cute.arch.cp_async_wait_group(0)
            columns.sync()
            q_stage = number % config.q_stages
            # all warps have the queries of the work tile before in registers
            columns.copy_q_async(work_tile + scheduler.step, q_stage ^ 1)
            held = self.load_q(smem.q + q_stage * config.q_bytes)
            row_max = [Float32(NEG_MAX) for _ in config.own_heads]
            max_logit = [Float32(-Float32.inf) for _ in config.own_heads]
            row_sum = [Float32(0.0) for _ in config.own_heads]

            bars.kv.wait_full(stage, phase)
            valid, flags = self.load_header(stage)
            sums = self.no_sums()
            for slab in range_constexpr(SLABS):
                sums = self.multiply(sums, held, stage, slab)
            columns.take_scores(self.total(sums), scores, valid)
            stage, phase = barriers.advance(stage, phase, KV_STAGES)
            while flags & LAST == 0:
                buffer = tile % P_STAGES
                bars.p.wait_empty(buffer, tile // P_STAGES & 1)
                factors, has_factors, row_max, max_logit = columns.move_max(scores, scale, row_max, max_logit, buffer)
                bars.kv.wait_full(stage, phase)
                # P of this tile becomes while the next one is multiplied
                own_flags = flags
                valid, flags = self.load_header(stage)
                sums = self.multiply(self.no_sums(), held, stage, 0)
                row_sum = columns.weigh(scores, scale, row_max, row_sum, factors, has_factors, own_flags, buffer)
                sums = self.multiply(sums, held, stage, 1)
                columns.publish_p(buffer)
                for slab in range_constexpr(2, SLABS):
                    sums = self.multiply(sums, held, stage, slab)
                columns.take_scores(self.total(sums), scores, valid)
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
                tile = tile + 1

            buffer = tile % P_STAGES
            logit = Int32(0)
            if columns.sink != 0:
                logit = ptx.load_global_s32_where(columns.thread < q.heads, columns.sink + Int64(columns.thread) * 4)
            bars.p.wait_empty(buffer, tile // P_STAGES & 1)
            row_max, max_logit, row_sum = columns.softmax(scores, scale, row_max, max_logit, row_sum, flags, buffer)
            columns.finish(row_sum, max_logit, row_max, work_tile, logit, buffer)
            columns.publish_p(buffer)
            tile = tile + 1
            work_tile, number = work_tile + scheduler.step, number + 1
        # no lane ends with copies under way
        cute.arch.cp_async_wait_group(0)

    def load_q(self, q_at: Any) -> list[list[Any]]:
        """The lane's queries, of every 8 heads: two words of each chunk."""
        heads, lane = self.columns.config.heads, self.columns.lane
        row_at = q_at + (lane & 7) * SLAB_ROW_BYTES
        held: list[list[Any]] = []
        for group in range(heads // 8):
            words: list[Any] = []
            for i in range(CHUNKS // 4):
                chunk = (4 * i % SLAB_CHUNKS + (lane >> 3)) ^ (lane & 7)
                slab_at = 4 * i // SLAB_CHUNKS * (heads * SLAB_ROW_BYTES) + group * (8 * SLAB_ROW_BYTES)
                found = ptx.load_matrices(row_at + chunk * CHUNK, slab_at)
                words += [ptx.f16x2_of_e4m3x4(word) for word in found]
            held.append(words)
        return held

    def load_header(self, stage: Any) -> tuple[Any, Any]:
        """Which of the warp's keys are there, and the tile's flags."""
        header_at = self.columns.smem.header + stage * HEADER
        return ptx.load_shared_64(header_at + self.columns.warp * 8), ptx.load_shared_s32(header_at + FLAGS_AT)

    def no_sums(self) -> list[Any]:
        """Of every 8 heads, those that are apart."""
        return [[] for _ in range(CHAINS)]

    def multiply(self, sums: list[Any], held: list[list[Any]], stage: Any, slab: int) -> list[Any]:
        """Add the warp's part of S^T = K Q^T of a slab of a tile."""
        columns = self.columns
        groups, lane = columns.config.heads // 8, columns.lane
        kv_at = columns.smem.kv + stage * KV_STAGE_BYTES
        row_at = kv_at + (columns.warp * 16 + (lane & 15)) * SLAB_ROW_BYTES + ((lane >> 4) ^ (lane & 7)) * CHUNK
        sums = list(sums)
        for i in range(SLAB_CHUNKS):
            if i % 2 == 0:
                codes = ptx.load_matrices(row_at ^ (i * CHUNK), slab * SLAB_BYTES)
            (a0, a2), (a1, a3) = (ptx.f16x2_of_e4m3x4(word) for word in codes[i % 2 * 2 : i % 2 * 2 + 2])
            for group in range(groups):
                own = (i * groups + group) % CHAINS
                b = held[group][slab * SLAB_CHUNKS + i]
                sums[own] = mma_sync.multiply_by((a0, a1, a2, a3), b, sums[own], is_f16=True)
        return sums

    def total(self, sums: list[Any]) -> list[Any]:
        """The warp's scores."""
        groups = self.columns.config.heads // 8
        scores = []
        for group in range(groups):
            for i in range(4):
                parts = [known[i].bitcast(Float32) for known in sums[group::groups]]
                scores.append(pairwise(parts, operator.add))
        return scores


# ---- PV and epilogue

SELECT_PAIRS = 0x3120
"""Of two codes of one key and two of the next: the first of both, and the second of both."""


@dataclass(frozen=True)
class PvEpilogue:
    """The PV and epilogue warpgroup: O^T += V^T P, 128 columns by each warp.

    What ldmatrix has transposed are pairs of codes: of a chunk lane l has columns 2 (l // 4) and the next, which are
    rows l // 4 and l // 4 + 8 of a product. So a lane has neighbouring columns of a head, and stores them as such.
    """

    config: SwapAbConfig
    bars: Bars
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    lane: Any
    warp: Any

    @cute.jit
    def run(self) -> None:
        """Store results."""
        config, bars, smem, scheduler, lane = self.config, self.bars, self.smem, self.scheduler, self.lane
        o = cute.make_rmem_tensor((SLAB_CHUNKS * config.heads // 2,), Int32)
        tile, used = Int32(0), Int32(0)
        stage, phase = barriers.start()
        work_tile = scheduler.first
        while work_tile < scheduler.end:
            o.fill(0)
            flags, buffer = Int32(0), Int32(0)
            while flags & LAST == 0:
                buffer = tile % P_STAGES
                bars.p.wait_full(buffer, tile // P_STAGES & 1)
                # not behind the last products with it: an arrival overtakes loads whose values nobody has used yet
                if tile != 0:
                    release(bars.kv.empty(used), lane)
                # full since QK waited for it; this orders the reads behind what filled it
                bars.kv.wait_full(stage, phase)
                flags, has_factors = ptx.load_shared_64(smem.target + buffer * TARGET)
                if has_factors != 0:
                    self.rescale(o, self.of_heads(smem.factor + buffer * (config.heads * 4)))
                self.multiply(o, smem.p + buffer * config.p_bytes, smem.kv + stage * KV_STAGE_BYTES)
                if flags & LAST == 0:
                    release(bars.p.empty(buffer), lane)
                used = stage
                stage, phase = barriers.advance(stage, phase, KV_STAGES)
                tile = tile + 1
            out_scales = self.of_heads(smem.out_scale + buffer * (config.heads * 4))
            self.rescale(o, [out_scale * self.out.scale for out_scale in out_scales])
            self.store(o, work_tile)
            # its out_scale has been used
            release(bars.p.empty(buffer), lane)
            work_tile = work_tile + scheduler.step

    @cute.jit
    def multiply(self, o: Any, p_at: Any, kv_at: Any) -> None:
        """Add the warp's part of V^T P of a tile."""
        lane, groups = self.lane, self.config.heads // 8
        p: list[list[Any]] = []
        for group in range_constexpr(groups):
            row_at = p_at + group * (8 * SLAB_ROW_BYTES) + (lane & 7) * SLAB_ROW_BYTES
            words: list[Any] = []
            for half in range_constexpr(2):
                words += ptx.load_matrices(row_at + ((4 * half + (lane >> 3)) ^ (lane & 7)) * CHUNK)
            p.append(words)
        row_at = kv_at + self.warp * SLAB_BYTES + lane * SLAB_ROW_BYTES + (lane & 7) * CHUNK
        together = CHAINS // groups
        for first in range_constexpr(0, SLAB_CHUNKS, together):
            codes = []
            for chunk in range_constexpr(first, first + together):
                loads = [
                    ptx.load_matrices_transposed(row_at ^ (chunk * CHUNK), keys * SLAB_ROW_BYTES)
                    for keys in range(0, KEYS, 32)
                ]
                codes.append([word for four in loads for word in four])
            for step in range_constexpr(KEYS // 16):
                for i in range_constexpr(together):
                    a: list[Any] = []
                    for word in codes[i][2 * step : 2 * step + 2]:
                        a += ptx.f16x2_of_e4m3x4(ptx.permute_bytes(word, word, SELECT_PAIRS))
                    for group in range_constexpr(groups):
                        own = ((first + i) * groups + group) * 4
                        b = p[group][2 * step : 2 * step + 2]
                        known = [o[own + j] for j in range(4)]
                        found = mma_sync.multiply_by(a, b, known, is_f16=True)
                        for j in range_constexpr(4):
                            o[own + j] = found[j]

    def of_heads(self, address: Any) -> list[Any]:
        """The thread's of the fp32 numbers that heads have."""
        numbers: list[Any] = []
        for i in range(self.config.heads // 8):
            numbers += ptx.load_shared_f32x2(address + (8 * i + (self.lane & 3) * 2) * 4)
        return numbers

    @cute.jit
    def rescale(self, o: Any, factors: Any) -> None:
        """Multiply each column of O^T with its head's factor."""
        groups = self.config.heads // 8
        for i in range_constexpr(cute.size(o)):
            o[i] = (o[i].bitcast(Float32) * factors[i // 4 % groups * 2 + i % 2]).bitcast(Int32)

    @cute.jit
    def store(self, o: Any, work_tile: Any) -> None:
        """Store a work tile's results, whole sectors of a head at a time."""
        out, lane, groups = self.out, self.lane, self.config.heads // 8
        target = out.base + Int64(work_tile) * out.row + (self.warp * SLAB_ROW_BYTES + (lane >> 2) * 2) * 2
        for group in range_constexpr(groups):
            for half in range_constexpr(2):
                head = 8 * group + (lane & 3) * 2 + half
                head_at = target + Int64(head) * out.head
                for chunk in range_constexpr(SLAB_CHUNKS):
                    first = (chunk * groups + group) * 4 + half
                    word = ptx.bf16x2(o[first].bitcast(Float32), o[first + 2].bitcast(Float32))
                    ptx.store_global_s32(head_at + chunk * (CHUNK * 2), word, head < self.q.heads)


# ---- kernel


def row_scheduler(work_tiles: Any, ctas: Any) -> PrefillScheduler:
    """Of query rows, each with all its heads. Made by each role: before the branches a register could be spilled."""
    return PrefillScheduler(ptx.block_again(), work_tiles, ctas, Int32(0))


class MixedSwapAbKernel:
    """See kernel_args.MixedArgs."""

    def __init__(self, config: SwapAbConfig) -> None:
        self.config = config

    @cute.jit
    def launch(self, args: MixedArgs) -> None:
        self.kernel.set_name_prefix(self.config.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        work_tiles = length(args.q, 0)
        kernel = self.kernel(
            args.query(),
            args.sources(),
            args.output(output_policy(work_tiles * length(args.q, 1))),
            args.sink,
            args.scale_log2,
            work_tiles,
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
        self, q: PrefillQuery, kv: Any, out: PrefillOutput, sink: Int64, scale_log2: Float32, work_tiles: Int32
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // 128)
        config, allocator = self.config, SmemAllocator()
        smem, bars = Smem.allocate(allocator, smem_parts(config)), Bars.allocate(allocator)
        if thread == 0:
            bars.initialize()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        own = thread % 128
        if group < PV:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            columns = ColumnSoftmax(
                config=config,
                bars=bars,
                smem=smem,
                scheduler=row_scheduler(work_tiles, ctas),
                q=q,
                out=out,
                sink=sink,
                scale_log2=scale_log2,
                thread=own,
                lane=own & 31,
                warp=cute.arch.make_warp_uniform(own >> 5),
            )
            QkSoftmax(columns).run()
        elif group < PRODUCER:
            cute.arch.setmaxregister_increase(PV_REGISTERS)
            warp = cute.arch.make_warp_uniform(own >> 5)
            scheduler = row_scheduler(work_tiles, ctas)
            PvEpilogue(config, bars, smem, scheduler, q, out, own & 31, warp).run()
        else:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            scheduler = row_scheduler(work_tiles, ctas)
            loader = IndexLoader(kv, scheduler, smem.lists, smem.cursors, PRODUCER_WARPS, row_units(Float8E4M3FN))
            Producer(bars, smem, loader).run()


# ---- key


@dataclass(frozen=True)
class SwapAbMixedFp8Key(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   8 or 16: how many there are at most
    """

    kernel_name: ClassVar[str] = "sparse_mla.hopper.prefill_mixed_swap_ab_fp8"
    heads: int

    @property
    def config(self) -> SwapAbConfig:
        return SwapAbConfig("sparse_mla_mixed_fp8", self.heads, is_fp8=True)

    @property
    def smem_bytes(self) -> int:
        return smem_bytes(self.config)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "mma.sync", "cp.async", "ldmatrix", "stmatrix", "cvt.e4m3", "mbarrier", "setmaxnreg", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(MixedSwapAbKernel(self.config).launch, fake_mixed(Float8E4M3FN))
