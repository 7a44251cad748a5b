# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode on Blackwell (sm_100a, sm_103a) for more than 64 heads: decode.py for clusters of two CTAs.

Experimental. Compiled, inspected and run in a model of the GPU; nobody has run it on one.

Every row is gathered, dequantized and stored once for 128 heads. Warps of both CTAs have the roles of decode.py, but
for the MMA, which a warp of CTA 0 starts for both; what it waits for are barriers of CTA 0. Here is what roles do
otherwise.

A cluster of two CTAs has a work tile: CTA r has heads 64 r to 64 r + 63 of a query row, and of every key columns 256 r
to 256 r + 255, which nobody gathers or converts again. A tile of a CTA is four slabs of decode.py.

Products are the cluster's: M = 128, half of it of each CTA. Both CTAs' tiles together are the second operand of both.
O += P V: CTA r has columns 256 r and up of V, 128 of them in a product, whose results are in both CTAs' lanes 64 r
to 64 r + 63. S = Q K^T: a CTA's keys make half of N, and so are multiplied for one half of the lanes. These hold the
columns of Q that the CTA has of the keys, and get the part of S that comes of these. Both parts are added by threads:
the two warps that share heads exchange halves of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx, umma
from cute_kernels.dsl.entry import entry_point
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.work import Work
from cute_kernels.sparse_mla.blackwell import decode as single
from cute_kernels.sparse_mla.blackwell.decode import (
    CHUNKS,
    HEADING,
    HEADING_READERS,
    HEADS,
    KEY_ROWS,
    KEYS,
    LAST_SLAB,
    O_BLOCK,
    PAIR_THREADS,
    ROWS_APART,
    SCALE_BYTES,
    SLAB,
    SLAB_BYTES,
    Bars,
    BlackwellDecodeKey,
    DecodeKernel,
    Dequantizer,
    KVLoader,
    Mma,
    Smem,
    Softmax,
    Step,
    chunk_offset,
)
from cute_kernels.sparse_mla.kernel_args import fake_decode
from cute_kernels.sparse_mla.params import Query, TileScheduler

# ---- config

BLOCKS = 2
"""That share a work tile."""

SIDE = HEAD_DIM // BLOCKS
"""Columns of a CTA."""

SLABS = SIDE // SLAB
STAGE_BYTES = SLABS * SLAB_BYTES
STAGES = 4

FP8_STAGES = 3
"""Tiles whose codes are on their way from memory."""

CODES = SIDE
RAW_BYTES = KEYS * CODES

FIRST_CODE = 192
"""Of CTA 1's: with those from here on its box ends where a row's codes end. It has no use for the first."""

SLOTS = 8
"""Tiles that the index loader may be ahead of the softmax."""

Q_COLUMN, S_COLUMN = 256, 384
"""In tensor memory, all of which is taken: O, the lane's half of its head's Q, two buffers of S."""

Q_COLUMNS = SLAB // 2
S_COLUMNS = KEYS
"""Of a buffer: parts of S of all keys."""

FORM = {"blocks": BLOCKS}
"""Of products, as ptx.tensor_mma takes it."""

SCORES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", BLOCKS * HEADS, BLOCKS * KEYS)
VALUES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", BLOCKS * HEADS, SIDE, b_is_mn_major=True)

TRADE_BYTES = 2 * 32 * (KEYS // 2) * 4
"""Of two warps that share heads: what each gives to the other. A slab of each one's queries takes half of it."""


# ---- shared memory


def smem_parts() -> dict[str, int]:
    """As decode.py's. No queries stay in shared memory: q is where warps trade."""
    return single.smem_parts() | {
        "kv": STAGES * STAGE_BYTES,
        "q": 2 * TRADE_BYTES,
        "raw": FP8_STAGES * RAW_BYTES,
        "rows": SLOTS * KEYS * 4,
        "scales": SLOTS * KEYS * FP8_DS_MLA.scale_bytes,
        "heading": SLOTS * HEADING,
    }


RINGS = {"headings": SLOTS, "fp8": FP8_STAGES, "stages": STAGES}
BARRIERS = single.barriers_of(RINGS)


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


def smem_at(base: Any) -> Smem:
    """In shared memory that begins at a 1024-byte aligned address. What is not as decode.py has it:

    kv    [4 stages][4 slabs][64 keys][64] bf16
    q     [2 pairs of warps][8][64 threads][4] fp32 parts of S; when a work tile begins [4 warps][32 heads][64] bf16
    raw   [3][64 keys][256] codes: CTA 1's from FIRST_CODE on
    """
    return single.in_order(base, smem_parts())


def stage_offset(stage: Any, slab: Any, row: Any, chunk: Any) -> Any:
    """Of a chunk of a key, in kv; of the CTA's slabs."""
    return stage * STAGE_BYTES + slab * SLAB_BYTES + single.chunk_offset(row, chunk)


def raw_offset(raw: Any, row: Any) -> Any:
    """Of what a CTA gathers of a key's codes, in raw."""
    return raw * RAW_BYTES + row * CODES


def rope_offset(stage: Any, row: Any) -> Any:
    """As decode.py's, of CTA 1."""
    return stage * STAGE_BYTES + (SLABS - 1) * SLAB_BYTES + row * (SLAB * 2)


def first_column(rank: Any) -> Any:
    """Of the codes that a CTA gathers, in words."""
    return rank * (FIRST_CODE // 4)


def code_offset(rank: Any, slab: Any) -> Any:
    """Of the codes of a CTA's slab, in a row of raw."""
    return rank * (SIDE - FIRST_CODE) + slab * SLAB


def trade_offset(pair: Any, half: Any, lane: Any) -> Any:
    """Of four scores that a lane gives to the other warp, or gets; the next four are 64 threads on. In q."""
    return pair * TRADE_BYTES + (half * 32 + lane) * 16


def scores_steps() -> Iterator[Step]:
    """Both parts of S of 128 heads and 64 keys, 16 columns of each at a time."""
    for slab in range(SLABS):
        for k in range(0, SLAB, 16):
            a = Q_COLUMN + slab * Q_COLUMNS + k // 2
            yield Step(S_COLUMN, a, True, slab * SLAB_BYTES + KEY_ROWS.step(k), slab + k == 0)


def values_steps() -> Iterator[Step]:
    """O += P V, of 128 columns of each CTA and 16 keys at a time."""
    return single.values_steps(SLABS)


def o_dim(half: Any, block: Any) -> Any:
    """As decode.py's."""
    return half * SIDE + block * O_BLOCK


CODES_BYTES = RAW_BYTES
ROPE_BYTES = single.ROPE_BYTES
"""What the barriers of a tile's copies expect."""


class TwoCtas:
    """What decode.py has otherwise, under the same names."""

    BLOCKS = BLOCKS
    CODES = CODES
    STAGE_BYTES = STAGE_BYTES
    S_COLUMNS = S_COLUMNS
    SCORES_INSTRUCTION = SCORES_INSTRUCTION
    VALUES_INSTRUCTION = VALUES_INSTRUCTION
    FORM = FORM
    smem_parts = staticmethod(smem_parts)
    smem_at = staticmethod(smem_at)
    o_dim = staticmethod(o_dim)
    scores_steps = staticmethod(scores_steps)
    values_steps = staticmethod(values_steps)


# ---- barriers


@dataclass(frozen=True)
class BarsOf2(Bars):
    """Those that the MMA warp waits for are CTA 0's, and threads of both CTAs arrive there: weights,
    queries and full stages. What tensor cores arrive at is every CTA's own: sums and empty stages. So are the others.

    stages     full: as in one CTA, of both CTAs' tiles; the rotary columns are CTA 1's
    """

    depths = RINGS
    blocks = BLOCKS

    def initialize(self, readers: int = HEADING_READERS) -> None:
        # in CTA 1 nobody starts products
        super().initialize(readers - ptx.rank_again())

    def arrive(self, barrier: Any) -> None:
        cute.arch.mbarrier_arrive(barrier, 0)

    def wait(self, barrier: Any, phase: Any) -> None:
        ptx.wait_mbarrier_cluster(barrier.toint(), phase)

    def commit(self, barrier: Any) -> None:
        ptx.commit_tensor_multicast(barrier.toint(), (1 << BLOCKS) - 1)


class ClusterReleaseBarsOf2(BarsOf2):
    """Arrivals release to the cluster, not to their CTA alone."""

    def arrive(self, barrier: Any) -> None:
        ptx.arrive_cluster(ptx.pair_leader(barrier.toint()), "cluster")


# ---- producer


class KVLoaderOf2(KVLoader):
    @cute.jit
    def copy_async(self, stage: Any, source: Any, rows_at: Any, full: Any, at: Smem) -> None:
        """Start the copies of a CTA's part of a tile. Of rotary columns CTA 0 has none, but it says how
        many bytes the second one's bring to its barrier. By a thread."""
        rank = ptx.rank_again()
        if const_expr(not self.is_rope):
            cute.arch.mbarrier_arrive_and_expect_tx(full, CODES_BYTES)
            column = first_column(rank)
            self.gather(lambda row: at.raw + raw_offset(stage, row), source, column, rows_at, full.toint())
        elif rank == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, ROPE_BYTES)
        else:
            counter = ptx.pair_leader(full.toint())
            self.gather(lambda row: at.kv + rope_offset(stage, row), source, 0, rows_at, counter, BLOCKS)


# ---- dequantization


class DequantizerOf2(Dequantizer):
    """Loads of neighbouring rows, which are 256 bytes apart, would meet in banks: every other row has its slabs in
    another order, each two of them the second one first."""

    def load_scales(self, scales_at: Any) -> list[Any]:
        """Of the CTA's four slabs."""
        own_at = scales_at + ptx.rank_again() * SLABS
        return [ptx.load_shared_s32(own_at + half * ROWS_APART * SCALE_BYTES) for half in range(2)]

    @cute.jit
    def convert_rows(self, raw: Any, stage: Any, row: Any, member: Any, scales: Any, at: Smem) -> None:
        rank, odd = ptx.rank_again(), row & 1
        source = at.raw + raw_offset(raw, row) + code_offset(rank, 0) + member * 16
        target = at.kv + stage_offset(stage, 0, row, 2 * member)
        # what comes of the first slab of two, and of the second
        sources = [source + sign * odd * code_offset(0, 1) for sign in (1, -1)]
        targets = [target + sign * odd * stage_offset(0, 1, 0, 0) for sign in (1, -1)]
        selectors = [Int32(0x1010) + odd * 0x2222, Int32(0x3232) - odd * 0x2222]
        for slab in range_constexpr(SLABS):
            # CTA 1's last slab are its rotary columns
            if rank * SLABS + (slab ^ odd) < LAST_SLAB:
                for half in range_constexpr(2):
                    pair = ptx.bf16x2_of_ue8m0x2(scales[half], slab // 2)
                    factor = ptx.permute_bytes(pair, pair, selectors[slab % 2])
                    offset = raw_offset(0, half * ROWS_APART) + code_offset(0, slab)
                    words = ptx.load_shared_128(sources[slab % 2], offset=offset)
                    place = targets[slab % 2] + stage_offset(0, slab, half * ROWS_APART, 0)
                    self.store(place, words, factor)


# ---- MMA


class MmaOf2(Mma):
    plan = TwoCtas

    @cute.jit
    def run(self, bars: BarsOf2, at: Any) -> None:
        """Multiply every tile, for both CTAs. By a warp of each: CTA 0's."""
        if ptx.rank_again() == 0:
            Mma.run(self, bars, at)


# ---- softmax

KEPT = S_COLUMNS // 2
FOUR = PAIR_THREADS * 16
"""Bytes from four scores of a thread to the next four."""


def trade_scores(column: Any, thread: Any, trade_at: Any, meet: Callable[[], None]) -> tuple[Any, ...]:
    """A thread's scores: of its lane's parts of S, from a column of tensor memory on, it gives those of the other
    warp's keys away, and adds what it gets to the others. By the warps that share heads.

    trade_at   where pairs of warps trade
    meet       waits for the other warp
    """
    pair, half, lane = thread // 32 % 2, thread // HEADS, thread % 32
    given = ptx.load_tensor_memory(column + (half ^ 1) * KEPT, KEPT)
    given_at = trade_at + trade_offset(pair, half, lane)
    for i in range(0, KEPT, 4):
        words = [value.bitcast(Int32) for value in given[i : i + 4]]
        ptx.store_shared_128(given_at + i // 4 * FOUR, words)
    kept = ptx.load_tensor_memory(column + half * KEPT, KEPT)
    meet()
    others_at = trade_at + trade_offset(pair, half ^ 1, lane)
    got = [word for i in range(0, KEPT, 4) for word in ptx.load_shared_128(others_at, offset=i // 4 * FOUR)]
    return tuple(mine + word.bitcast(Float32) for mine, word in zip(kept, got, strict=True))


class SoftmaxOf2(Softmax):
    plan = TwoCtas

    def load_scores(self, buffer: Any, thread: Any, lanes: Any, at: Smem) -> tuple[Any, ...]:
        """The place is free: of the tile before the other warp has used what it got, before it told its maxima."""
        return trade_scores(lanes + S_COLUMN + buffer * S_COLUMNS, thread, at.q, lambda: self.pair_barrier(thread))

    @cute.jit
    def load_queries(
        self, work_tile: Any, thread: Any, lanes: Any, scheduler: TileScheduler, queries: Query, bars: BarsOf2, at: Smem
    ) -> None:
        """Store half of a work tile's Q, that of the thread's head in its lane of tensor memory, by way of the place
        where warps trade. Of heads beyond the last, the last one's."""
        if work_tile < scheduler.end:
            # found out again: during tiles there is no register for them
            thread, at = ptx.thread_again(), smem_at(ptx.again(at.kv))
            batch, token, _, head_group = scheduler.coords(work_tile)
            lane, half = thread % 32, thread // HEADS
            first = head_group * HEADS + thread % HEADS // 32 * 32
            row = queries.at(batch, token, first) + Int64(half * (SIDE * 2) + thread % CHUNKS * 16)
            last = queries.heads - 1 - first
            # the other warp has its half of their place
            slab_at = at.q + thread // 32 % 2 * TRADE_BYTES + half * (32 * SLAB * 2)
            lines = [slab_at + chunk_offset(4 * i + lane // CHUNKS, lane % CHUNKS) for i in range(2)]
            ahead = cute.make_rmem_tensor((4 * CHUNKS,), Int32)
            self.load_slab(ahead, row, thread, last, queries)
            for slab in cutlass.range(SLABS, unroll=1):
                for i in range_constexpr(CHUNKS):
                    words = [ahead[4 * i + word] for word in range(4)]
                    ptx.store_shared_128(lines[i % 2] + i // 2 * (8 * SLAB * 2), words)
                if slab < SLABS - 1:
                    row = row + SLAB * 2
                    self.load_slab(ahead, row, thread, last, queries)
                cute.arch.sync_warp()
                self.move_slab(slab_at, lane, lanes + Q_COLUMN + slab * Q_COLUMNS)
                cute.arch.sync_warp()
            # scores come to both halves only when all warps' queries are there
            ptx.wait_tensor_stores()
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread % 32 == 0:
                bars.arrive(bars.queries)


# ---- kernel


class SchedulerOf2(TileScheduler):
    """Of a cluster. A CTA's head group is one of 64 heads."""

    def coords(self, work_tile: Any) -> tuple[Any, Any, Any, Any]:
        batch, token, split_idx, head_group = super().coords(work_tile)
        return batch, token, split_idx, head_group * BLOCKS + ptx.rank_again()


class Decode2CtaKernel(DecodeKernel):
    name = "sparse_mla_decode_blackwell_pair"
    plan = TwoCtas
    barriers = BarsOf2
    roles = (DequantizerOf2, MmaOf2, SoftmaxOf2, KVLoaderOf2)

    def own(self, scheduler: TileScheduler, block: Any) -> TileScheduler:
        return SchedulerOf2(*scheduler)._replace(first=block // BLOCKS)

    def synchronize(self) -> None:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


# ---- key


@dataclass(frozen=True)
class BlackwellPairDecodeKey(BlackwellDecodeKey):
    """As BlackwellDecodeKey. A cluster of two CTAs takes two of the head groups of 64 that calls are cut into."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.decode_2cta"

    @property
    def smem_bytes(self) -> int:
        return smem_bytes()

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "barrier.cluster"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(Decode2CtaKernel(self).launch, fake_decode(self.out_fp32))


class ClusterReleaseKernel(Decode2CtaKernel):
    name = "sparse_mla_decode_blackwell_pair_cluster_release"
    barriers = ClusterReleaseBarsOf2


@dataclass(frozen=True)
class BlackwellPairClusterDecodeKey(BlackwellPairDecodeKey):
    """As BlackwellPairDecodeKey, with arrivals that release to the cluster: what runs if only that is enough."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.decode_2cta_cluster_release"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(ClusterReleaseKernel(self).launch, fake_decode(self.out_fp32))


# ---- what a tile takes


def work() -> tuple[Work, ...]:
    """Of a tile, in one of its two blocks: the first, whose columns are all codes."""
    products = 2 * 2 * HEADS * KEYS * HEAD_DIM
    heads = BLOCKS * HEADS
    return (
        Work(
            op="sparse_mla_decode",
            kernel=f"{heads} heads, pair of blocks",
            tile=f"{KEYS} keys, {heads} heads",
            blocks=BLOCKS,
            hbm=KEYS * FP8_DS_MLA.row_elements / BLOCKS,
            mma={"bf16": products},
            smem={
                "codes in and out": 2 * RAW_BYTES,
                "bf16 in": STAGE_BYTES,
                "Q K^T": STAGE_BYTES,
                "parts of scores": 2 * 2 * TRADE_BYTES,
                "P": 3 * SLAB_BYTES,
                "P V": STAGE_BYTES,
            },
            flops=products,
            shapes=single.shapes(heads),
            # see decode.py
            threads={"codes to bf16": 530, "softmax": 340, "all else": 60},
        ),
    )
