# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_mixed over e4m3 caches on Hopper for up to 32 heads: keys on the tensor cores' long side, as in
prefill_swap_ab.py, whose softmax it shares. Codes stay codes in shared memory: warps convert what they multiply on its
way to registers, which are the operand of the long side.

A CTA takes work tiles: a query row with all its heads. Its keys come in tiles of 64 rows of kv, which are both K and V.
Warpgroups, of up to 16 heads and of 32:

    0      0      QK and softmax     copies Q, S^T = K Q^T, softmax                          QkSoftmax
    1      1, 2   PV and epilogue    O^T += V^T P, out                                       PvEpilogue
    2, 3   3      producer           indices -> rows (IndexLoader), copies of codes          Producer

    indices  gmem --cp.async--> lists [4 tiles] (prefill_index_loader.py)
    KV       gmem --cp.async--> KV ring [5 or 6 tiles of codes]
                                     |                                    |
                                ldmatrix, cvt                  ldmatrix.trans, prmt, cvt
    Q        gmem --cp.async--> q ---cvt--- mma --> S^T                   |
                                                     | softmax            |
                                                     +-> p [2] --- mma --> O^T
    out      gmem <--------------------------------------------------------+

    ring     full                                          empty
    kv       all rows of a tile are there, and its header  PV warps are done with it (QK is, as P is there)
    p        softmax warps have stored P, and factors if   PV warps have used them
             maxima have moved

Products of up to 16 heads are mma.sync's, with queries in registers (MmaSyncQk, MmaSyncPv); those of 32 are wgmma's,
whose other operand is in shared memory (WgmmaQk, WgmmaPv).

f16 holds every e4m3 number, so all products are exact. The 512 codes of a row are cut into slabs of 128: a slab of a
tile is [64 keys, 128 bytes], its 16-byte chunk c of row r at chunk c ^ (r % 8), so that no eight rows that a matrix is
loaded of meet in a bank. perf/notes/prefill_mixed.md has why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, mma_sync, ptx, wgmma
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.reduce import pairwise
from cute_kernels.dsl.tensor import length
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.sparse_mla.hopper.prefill_index_loader import (
    AHEAD,
    COPIED_ROWS,
    END,
    KEYS,
    LAST,
    IndexLoader,
    own_lane,
)
from cute_kernels.sparse_mla.hopper.prefill_swap_ab import (
    ALL_KEYS,
    FLAGS_AT,
    HEADER,
    P_STAGES,
    SLAB_BYTES,
    SLAB_ROW_BYTES,
    SWIZZLED,
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


@dataclass(frozen=True)
class Roles:
    """Of a kernel's warpgroups, one of which does QK and softmax.

    pv, producer   how many there are
    kv_stages      what shared memory has room for
    registers      per thread, of QK and softmax, PV, producer, in steps of 8: all have what they are launched with.
                   Queries of 16 heads are 128 of the first.
    """

    pv: int
    producer: int
    kv_stages: int
    registers: tuple[int, int, int]

    @property
    def producer_warps(self) -> int:
        return self.producer * 4

    @property
    def threads(self) -> int:
        return (1 + self.pv + self.producer) * 128


FEW, MANY = Roles(1, 2, 6, (216, 152, 72)), Roles(2, 1, 5, (168, 136, 72))

ROLES = {8: FEW, 16: FEW, 32: MANY}
"""By heads of a work tile, up to so many."""


# ---- shared memory

KV_STAGE_BYTES = SLABS * SLAB_BYTES


def smem_parts(config: SwapAbConfig) -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order."""
    roles, heads = ROLES[config.heads], config.heads
    parts = shared_parts(config) | {"kv": roles.kv_stages * KV_STAGE_BYTES, "header": roles.kv_stages * HEADER}
    return parts if roles is FEW else {"q16": heads * HEAD_DIM * 2} | parts


def smem_bytes(config: SwapAbConfig) -> int:
    stages = ROLES[config.heads].kv_stages + P_STAGES
    return sum(smem_parts(config).values()) + stages * barriers.BYTES_PER_STAGE


def allocate(allocator: SmemAllocator, config: SwapAbConfig) -> tuple[Smem, Any]:
    """Also the address of queries as f16, where these are in shared memory: [8 slabs][heads][64]."""
    places = {}
    for name, size in smem_parts(config).items():
        align = 1024 if name in (*SWIZZLED, "q16") else 16
        place = allocator.allocate_tensor(Int32, cute.make_layout(size // 4), byte_alignment=align)
        places[name] = place.iterator.toint()
    q16 = places.pop("q16", None)
    return Smem(**places), q16


@dataclass(frozen=True)
class Bars:
    """A CTA's mbarriers, and what completes their phases.

    kv   full: all rows of a tile are there, and its header. empty: PV warps are done with it
    p    full: softmax warps have stored a tile's P. empty: PV warps are done with it
    """

    kv: barriers.Ring
    p: barriers.Ring

    @classmethod
    def allocate(cls, smem: SmemAllocator, roles: Roles) -> Bars:
        return cls(*(barriers.Ring.allocate(smem, stages) for stages in (roles.kv_stages, P_STAGES)))

    def initialize(self, roles: Roles) -> None:
        """By one thread; the CTA synchronizes afterwards."""
        # every producer thread, and one of each producer warp for the header
        self.kv.initialize(roles.producer_warps * (32 + 1), roles.pv * 4)
        self.p.initialize(4, roles.pv * 4)
        cute.arch.mbarrier_init_fence()


# ---- producer


@dataclass(frozen=True)
class Producer:
    """The producer: copies the rows of tiles.

    A warp does 8 or 16 rows of every tile, 4 at a time: 8 lanes copy the 128 bytes of a slab's row. Rows that nobody
    selects become zeros.
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
            stage, phase = barriers.advance(stage, phase, bars.kv.stages)
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


def k_chunks(columns: ColumnSoftmax, stage: Any, slab: int) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Of each chunk of a slab of a tile, the lane's words of the warp's 16 keys, as rows of a product."""
    lane = columns.lane
    kv_at = columns.smem.kv + stage * KV_STAGE_BYTES
    row_at = kv_at + (columns.warp * 16 + (lane & 15)) * SLAB_ROW_BYTES + ((lane >> 4) ^ (lane & 7)) * CHUNK
    for chunk in range(0, SLAB_CHUNKS, 2):
        codes = ptx.load_matrices(row_at ^ (chunk * CHUNK), slab * SLAB_BYTES)
        for pair in codes[:2], codes[2:]:
            (first, third), (second, fourth) = (ptx.f16x2_of_e4m3x4(word) for word in pair)
            yield first, second, third, fourth


CHAINS = 4
"""Sums of a product that follow each other are this many apart: what tensor cores add to is there by then."""


@dataclass(frozen=True)
class MmaSyncQk:
    """S^T = K Q^T by mma.sync: a warp has 16 keys, and the queries of all heads in registers, as f16.

    Of a chunk of 16 codes lane l has those from 4 (l % 4) on, of K as of queries: which of the summed columns they are
    numbered as is the same in both.
    """

    columns: ColumnSoftmax

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

    def sums(self) -> list[Any]:
        """Of every 8 heads, those that are apart."""
        return [[] for _ in range(CHAINS)]

    def multiply(self, sums: list[Any], held: list[list[Any]], stage: Any, slab: int) -> list[Any]:
        """Add the warp's part of S^T of a slab of a tile."""
        groups, sums = self.columns.config.heads // 8, list(sums)
        for i, words in enumerate(k_chunks(self.columns, stage, slab)):
            for group in range(groups):
                own = (i * groups + group) % CHAINS
                b = held[group][slab * SLAB_CHUNKS + i]
                sums[own] = mma_sync.multiply_by(words, b, sums[own], is_f16=True)
        return sums

    def scores(self, sums: list[Any]) -> list[Any]:
        """The warp's scores."""
        groups = self.columns.config.heads // 8
        scores = []
        for group in range(groups):
            for i in range(4):
                parts = [known[i].bitcast(Float32) for known in sums[group::groups]]
                scores.append(pairwise(parts, operator.add))
        return scores


@dataclass(frozen=True)
class WgmmaQk:
    """S^T = K Q^T by wgmma: queries are f16 in shared memory, in the order in which lanes have the codes of K.

    s     the products
    mma   the first step of a tile and the others
    """

    columns: ColumnSoftmax
    s: Any
    q16: Any
    mma: tuple[Any, Any]
    layout: Any

    @cute.jit
    def load_q(self, q_at: Any) -> None:
        """Convert the queries, a slab of codes by each warp."""
        columns = self.columns
        heads, lane = columns.config.heads, columns.lane
        row_at = (lane & 7) * SLAB_ROW_BYTES
        from_at = q_at + columns.warp * (heads * SLAB_ROW_BYTES) + row_at
        to_at = self.q16 + columns.warp * (2 * heads * SLAB_ROW_BYTES) + row_at
        for group in range_constexpr(heads // 8):
            for half in range_constexpr(2):
                first = ((4 * half + (lane >> 3)) ^ (lane & 7)) * CHUNK
                codes = ptx.load_matrices(from_at + first, group * (8 * SLAB_ROW_BYTES))
                for pair in range_constexpr(2):
                    words = [word for four in codes[2 * pair : 2 * pair + 2] for word in ptx.f16x2_of_e4m3x4(four)]
                    place = ((4 * pair + (lane >> 3)) ^ (lane & 7)) * CHUNK
                    ptx.store_matrices(to_at + (half * heads + group * 8) * SLAB_ROW_BYTES + place, words)
        # tensor cores read them
        cute.arch.fence_view_async_shared()
        columns.sync()

    def sums(self) -> Any:
        return self.s

    @cute.jit
    def multiply(self, s: Any, held: Any, stage: Any, slab: cutlass.Constexpr) -> Any:
        """Start to add the warpgroup's S^T = K Q^T of a slab of a tile."""
        mma = self.mma
        part = mma[0].get_slice(self.columns.thread)
        # made anew, as in prefill_swap_ab.py
        q_tile = wgmma.uniform_tile(ptx.again(self.q16), self.layout, Float16)
        q = mma[0].make_fragment_B(part.partition_B(q_tile))
        k = cute.make_rmem_tensor(part.partition_shape_A((KEYS, SLAB_CHUNKS * CHUNK)), Float16)
        words = cute.recast_tensor(k, Int32)
        if const_expr(slab >= 2):
            # the registers of two slabs are in use at a time
            warpgroup.wait_group(1)
        chunks = list(k_chunks(self.columns, stage, slab))
        for i in range_constexpr(len(chunks)):
            for j in range_constexpr(4):
                words[4 * i + j] = chunks[i][j]
        warpgroup.fence()
        for i in range_constexpr(SLAB_CHUNKS):
            chosen = mma[0] if const_expr(slab == 0 and i == 0) else mma[1]
            cute.gemm(chosen, s, k[None, None, i], q[None, None, slab * SLAB_CHUNKS + i], s)
        warpgroup.commit_group()
        return s

    def scores(self, s: Any) -> Any:
        warpgroup.wait_group(0)
        return s


@dataclass(frozen=True)
class QkSoftmax:
    """The QK and softmax warpgroup."""

    columns: ColumnSoftmax
    products: MmaSyncQk | WgmmaQk

    @cute.jit
    def run(self) -> None:
        """Give PV the P of all tiles."""
        columns, products = self.columns, self.products
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
            held = products.load_q(smem.q + number % config.q_stages * config.q_bytes)
            # all warps have loaded those that lie there
            columns.copy_q_async(work_tile + scheduler.step, (number + 1) % config.q_stages)
            row_max = [Float32(NEG_MAX) for _ in config.own_heads]
            max_logit = [Float32(-Float32.inf) for _ in config.own_heads]
            row_sum = [Float32(0.0) for _ in config.own_heads]

            bars.kv.wait_full(stage, phase)
            valid, flags = self.load_header(stage)
            sums = products.sums()
            for slab in range_constexpr(SLABS):
                sums = products.multiply(sums, held, stage, slab)
            columns.take_scores(products.scores(sums), scores, valid)
            stage, phase = barriers.advance(stage, phase, bars.kv.stages)
            while flags & LAST == 0:
                buffer = tile % P_STAGES
                bars.p.wait_empty(buffer, tile // P_STAGES & 1)
                factors, has_factors, row_max, max_logit = columns.move_max(scores, scale, row_max, max_logit, buffer)
                bars.kv.wait_full(stage, phase)
                # P of this tile becomes while the next one is multiplied
                own_flags = flags
                valid, flags = self.load_header(stage)
                sums = products.multiply(products.sums(), held, stage, 0)
                row_sum = columns.weigh(scores, scale, row_max, row_sum, factors, has_factors, own_flags, buffer)
                sums = products.multiply(sums, held, stage, 1)
                columns.publish_p(buffer)
                for slab in range_constexpr(2, SLABS):
                    sums = products.multiply(sums, held, stage, slab)
                columns.take_scores(products.scores(sums), scores, valid)
                stage, phase = barriers.advance(stage, phase, bars.kv.stages)
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

    def load_header(self, stage: Any) -> tuple[Any, Any]:
        """Which of the warp's keys are there, and the tile's flags."""
        columns = self.columns
        header_at = columns.smem.header + stage * HEADER
        flags = ptx.load_shared_s32(header_at + FLAGS_AT)
        if ROLES[columns.config.heads] is FEW:
            return ptx.load_shared_64(header_at + columns.warp * 8), flags
        valid = ptx.load_shared_s32(header_at + columns.warp * 4)
        return (valid & ALL_KEYS, valid >> 8), flags


# ---- PV and epilogue

SELECT_PAIRS = 0x3120
"""Of two codes of one key and two of the next: the first of both, and the second of both."""


def v_words(code_pairs: Any) -> list[Any]:
    """Of 16 keys of a chunk, as ldmatrix has transposed them, the words of a product's rows. Lane l has columns
    2 (l // 4) and the next one, which are rows l // 4 and l // 4 + 8."""
    return [half for word in code_pairs for half in ptx.f16x2_of_e4m3x4(ptx.permute_bytes(word, word, SELECT_PAIRS))]


@dataclass(frozen=True)
class MmaSyncPv:
    """O^T += V^T P by mma.sync, 128 neighbouring columns by each warp."""

    tiles: ClassVar[int] = SLAB_CHUNKS
    apart: ClassVar[int] = CHUNK
    config: SwapAbConfig
    lane: Any
    warp: Any

    def sums(self) -> Any:
        """Of a tile."""
        return cute.make_rmem_tensor((self.config.heads // 2,), Float32)

    def column(self) -> Any:
        """The lane's first; the next tile's is `apart` further."""
        return self.warp * (SLAB_CHUNKS * CHUNK) + (self.lane >> 2) * 2

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
                    a, tile = v_words(codes[i][2 * step : 2 * step + 2]), o[first + i]
                    for group in range_constexpr(groups):
                        b = p[group][2 * step : 2 * step + 2]
                        known = [tile[4 * group + j].bitcast(Int32) for j in range(4)]
                        found = mma_sync.multiply_by(a, b, known, is_f16=True)
                        for j in range_constexpr(4):
                            tile[4 * group + j] = found[j].bitcast(Float32)


@dataclass(frozen=True)
class WgmmaPv:
    """O^T += V^T P by wgmma, 256 columns by each of two warpgroups, 64 at a time: a chunk by each warp.

    side   the warpgroup's number
    """

    tiles: ClassVar[int] = 4
    apart: ClassVar[int] = 4 * CHUNK
    config: SwapAbConfig
    thread: Any
    lane: Any
    warp: Any
    side: Any
    mma: Any
    layout: Any

    def sums(self) -> Any:
        """Of a tile."""
        return wgmma.accumulators(self.mma, wgmma.ROWS, self.config.heads)

    def column(self) -> Any:
        """The lane's first; the next tile's is `apart` further."""
        return self.side * (HEAD_DIM // 2) + self.warp * CHUNK + (self.lane >> 2) * 2

    @cute.jit
    def multiply(self, o: Any, p_at: Any, kv_at: Any) -> None:
        """Add the warpgroup's part of V^T P of a tile."""
        lane, mma = self.lane, self.mma
        part = mma.get_slice(self.thread)
        p = mma.make_fragment_B(part.partition_B(wgmma.uniform_tile(p_at, self.layout, Float16)))
        row_at = kv_at + self.side * (2 * SLAB_BYTES) + lane * SLAB_ROW_BYTES + ((lane & 7) ^ self.warp) * CHUNK
        # of P stored in the ordinary way
        cute.arch.fence_view_async_shared()
        for i in range_constexpr(self.tiles):
            v = cute.make_rmem_tensor(part.partition_shape_A((wgmma.ROWS, KEYS)), Float16)
            words = cute.recast_tensor(v, Int32)
            if const_expr(i >= 2):
                # the registers of two tiles are in use at a time
                warpgroup.wait_group(1)
            for keys in range_constexpr(0, KEYS, 32):
                half_slab = row_at ^ (i % 2 * self.apart)
                codes = ptx.load_matrices_transposed(half_slab, i // 2 * SLAB_BYTES + keys * SLAB_ROW_BYTES)
                for j in range_constexpr(2):
                    found = v_words(codes[2 * j : 2 * j + 2])
                    for k in range_constexpr(4):
                        words[keys // 4 + 4 * j + k] = found[k]
            warpgroup.fence()
            for step in range_constexpr(KEYS // 16):
                cute.gemm(mma, o[i], v[None, None, step], p[None, None, step], o[i])
            warpgroup.commit_group()
        warpgroup.wait_group(0)


@dataclass(frozen=True)
class PvEpilogue:
    """A PV and epilogue warpgroup. A lane has two neighbouring columns of a quarter of the heads of each of its tiles
    of O^T, and stores them as such."""

    config: SwapAbConfig
    bars: Bars
    smem: Smem
    scheduler: PrefillScheduler
    q: PrefillQuery
    out: PrefillOutput
    lane: Any
    products: MmaSyncPv | WgmmaPv

    @cute.jit
    def run(self) -> None:
        """Store results."""
        config, bars, smem, scheduler, lane = self.config, self.bars, self.smem, self.scheduler, self.lane
        products = self.products
        o = [products.sums() for _ in range(products.tiles)]
        tile, used = Int32(0), Int32(0)
        stage, phase = barriers.start()
        work_tile = scheduler.first
        while work_tile < scheduler.end:
            for one in o:
                one.fill(0.0)
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
                    config.rescale(o, config.load_of_heads(lane, smem.factor + buffer * (config.heads * 4)))
                products.multiply(o, smem.p + buffer * config.p_bytes, smem.kv + stage * KV_STAGE_BYTES)
                if flags & LAST == 0:
                    release(bars.p.empty(buffer), lane)
                used = stage
                stage, phase = barriers.advance(stage, phase, bars.kv.stages)
                tile = tile + 1
            out_scales = config.load_of_heads(lane, smem.out_scale + buffer * (config.heads * 4))
            config.rescale(o, [out_scale * self.out.scale for out_scale in out_scales])
            self.store(o, work_tile)
            # its out_scale has been used
            release(bars.p.empty(buffer), lane)
            work_tile = work_tile + scheduler.step

    @cute.jit
    def store(self, o: Any, work_tile: Any) -> None:
        """Store a work tile's results, whole sectors of a head at a time."""
        out, products = self.out, self.products
        target = out.base + Int64(work_tile) * out.row + products.column() * 2
        for i in range_constexpr(self.config.heads // 4):
            head = 8 * (i // 2) + (self.lane & 3) * 2 + i % 2
            head_at = target + Int64(head) * out.head
            for number in range_constexpr(products.tiles):
                first = 4 * (i // 2) + i % 2
                word = ptx.bf16x2(o[number][first], o[number][first + 2])
                ptx.store_global_s32(head_at + number * (products.apart * 2), word, head < self.q.heads)


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
        config = self.config
        kernel = self.kernel(
            args.query(),
            args.sources(),
            args.output(output_policy(work_tiles * length(args.q, 1))),
            args.sink,
            args.scale_log2,
            work_tiles,
            *self.operands(),
        )
        kernel.launch(
            grid=[cutlass.min(args.ctas, work_tiles), 1, 1],
            block=[ROLES[config.heads].threads, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
            use_pdl=True,
        )

    def operands(self) -> tuple[Any, Any]:
        """Of wgmma: K Q^T, twice, as one will accumulate, and V^T P; layouts of the queries and of P. Else nothing."""
        heads = self.config.heads
        if ROLES[heads] is FEW:
            return (), ()
        layouts = tuple(wgmma.swizzled(Float16, heads, columns) for columns in (HEAD_DIM, KEYS))
        return tuple(wgmma.make_mma_of_registers(Float16, heads) for _ in range(3)), layouts

    def qk(self, columns: ColumnSoftmax, q16: Any, mma: Any, layouts: Any) -> MmaSyncQk | WgmmaQk:
        if ROLES[self.config.heads] is FEW:
            return MmaSyncQk(columns)
        return WgmmaQk(columns, wgmma.accumulators(mma[0], KEYS, self.config.heads), q16, mma[:2], layouts[0])

    def pv(self, thread: Any, warp: Any, side: Any, mma: Any, layouts: Any) -> MmaSyncPv | WgmmaPv:
        """side: the warpgroup's number among those of PV"""
        if ROLES[self.config.heads] is FEW:
            return MmaSyncPv(self.config, thread & 31, warp)
        side = cute.arch.make_warp_uniform(side)
        return WgmmaPv(self.config, thread, thread & 31, warp, side, mma[2], layouts[1])

    @cute.kernel
    def kernel(
        self,
        q: PrefillQuery,
        kv: Any,
        out: PrefillOutput,
        sink: Int64,
        scale_log2: Float32,
        work_tiles: Int32,
        mma: Any,
        layouts: Any,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        ctas, _, _ = cute.arch.grid_dim()
        group = cute.arch.make_warp_uniform(thread // 128)
        config, allocator = self.config, SmemAllocator()
        roles = ROLES[config.heads]
        (smem, q16), bars = allocate(allocator, config), Bars.allocate(allocator, roles)
        if thread == 0:
            bars.initialize(roles)
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        for one in mma[1:]:
            wgmma.accumulate(one)
        own = thread % 128
        lane = own & 31
        if group < 1:
            cute.arch.setmaxregister_increase(roles.registers[0])
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
                lane=lane,
                warp=cute.arch.make_warp_uniform(own >> 5),
            )
            QkSoftmax(columns, self.qk(columns, q16, mma, layouts)).run()
        elif group < 1 + roles.pv:
            cute.arch.setmaxregister_increase(roles.registers[1])
            warp = cute.arch.make_warp_uniform(own >> 5)
            scheduler = row_scheduler(work_tiles, ctas)
            products = self.pv(own, warp, group - 1, mma, layouts)
            PvEpilogue(config, bars, smem, scheduler, q, out, lane, products).run()
        else:
            cute.arch.setmaxregister_decrease(roles.registers[2])
            scheduler = row_scheduler(work_tiles, ctas)
            units = row_units(Float8E4M3FN)
            loader = IndexLoader(kv, scheduler, smem.lists, smem.cursors, roles.producer_warps, units)
            Producer(bars, smem, loader).run()


# ---- key


@dataclass(frozen=True)
class SwapAbMixedFp8Key(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   8, 16 or 32: how many there are at most
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
        products = "mma.sync" if ROLES[self.heads] is FEW else "wgmma"
        return products, "cp.async", "ldmatrix", "stmatrix", "cvt.e4m3", "mbarrier", "setmaxnreg", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(MixedSwapAbKernel(self.config).launch, fake_mixed(Float8E4M3FN))
