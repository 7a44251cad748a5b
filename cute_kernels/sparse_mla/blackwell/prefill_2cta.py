# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_prefill on Blackwell (sm_100a, sm_103a) for more than 64 heads: prefill.py for clusters of two CTAs.

Experimental: no call is given to it (select.py). Compiled, inspected and run in a model of the GPU; nobody has run it
on one.

Every row is gathered once for 128 heads. Both CTAs have prefill.py's warps, and all but the MMA its roles; a work tile
is a query row, a CTA has 64 of its heads, and columns are split as in decode_2cta.py: CTA r has columns 256 r and up of
every key. Products are the cluster's, started by a thread of CTA 0, which waits for barriers there.

    KV       gmem --TMA gather4, half of the columns--> kv [6 stages] --> MMA
    Q        gmem --TMA, all columns of 64 heads--> two stages of kv --tcgen05.cp--> tensor memory --> MMA
    S        tensor memory [2 buffers of parts of S] --> softmax, where two warps trade --> P, shared memory --> MMA
    O        tensor memory, all 512 columns of 64 heads --> epilogue --> gmem

S = Q K^T has M = 128 and N = 128: a lane holds half of its head's Q, lane h columns 0 to 255 and lane 64 + h the
others, and gets what comes of the keys' columns that one CTA has. O += P V has N = 256: lanes 0 to 63 get the columns
of V that CTA 0 has, lanes 64 and up those of CTA 1. perf/notes/blackwell_prefill.md has why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.work import Shape, Work
from cute_kernels.sparse_mla.blackwell import decode_2cta as plan
from cute_kernels.sparse_mla.blackwell import prefill as single
from cute_kernels.sparse_mla.blackwell.decode import (
    CHUNKS,
    GATHERED,
    HEADS,
    KEY_ROWS,
    KEYS,
    SLAB,
    SLAB_BYTES,
    VALUE_ROWS,
    descriptor,
)
from cute_kernels.sparse_mla.blackwell.decode_2cta import (
    BLOCKS,
    Q_COLUMN,
    Q_COLUMNS,
    S_COLUMN,
    S_COLUMNS,
    SCORES_INSTRUCTION,
    SIDE,
    SLABS,
    STAGE_BYTES,
    TRADE_BYTES,
    VALUES_INSTRUCTION,
    scores_steps,
    values_steps,
)
from cute_kernels.sparse_mla.blackwell.prefill import (
    BUFFERS,
    END,
    EPILOGUE_WARPS,
    FLAGS_AT,
    KV_WARPS,
    LAST,
    LIST_BYTES,
    P_BITS,
    P_BYTES,
    SLOTS,
    SOFTMAX_WARPS,
    Bars,
    BlackwellPrefillKey,
    Epilogue,
    KVLoader,
    Mma,
    PrefillConfig,
    PrefillKernel,
    QueryCopy,
    Softmax,
    group_offset,
)
from cute_kernels.sparse_mla.kernel_args import fake_gathered
from cute_kernels.sparse_mla.params import PrefillScheduler

# ---- config

STAGES = 6

QUERY_STAGES = 2
"""Of kv, that a work tile's queries take: a stage has so many columns of each half of a head's."""

QUERY_SLABS = SLABS // QUERY_STAGES
"""Of a stage with queries, each for 128 lanes: rows of 64 heads twice, from the first half of their columns and from
the second."""

QUERY_SLAB_BYTES = 2 * SLAB_BYTES


def query_copies() -> Iterator[QueryCopy]:
    """Of a stage: 16 bytes of all lanes' queries each. Columns are those of the first stage."""
    for slab in range(QUERY_SLABS):
        for chunk in range(CHUNKS):
            yield QueryCopy(Q_COLUMN + slab * Q_COLUMNS + chunk * 4, slab * QUERY_SLAB_BYTES + chunk * 16)


# ---- shared memory


def smem_parts() -> dict[str, int]:
    """As prefill.py's, but for

    kv    [6 stages][4 slabs][64 keys][64] bf16: a CTA's columns of a tile's keys, or half of its queries
    q     [2 pairs of warps][8][64 threads][4] fp32: parts of S that are traded
    """
    return single.smem_parts() | {"kv": STAGES * STAGE_BYTES, "q": 2 * TRADE_BYTES}


# ---- barriers

BARRIERS = 2 * (STAGES + BUFFERS + SLOTS + 1) + BUFFERS + 2


@dataclass(frozen=True)
class BarsOf2(Bars):
    """Those that the MMA thread waits for are CTA 0's: what fills kv, bytes of both CTAs; P of both; and

    o_free   both CTAs' epilogue warps have loaded O

    What tensor cores arrive at is every CTA's own. So are the others.
    """

    o_free: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> BarsOf2:
        return cls(**cls.parts(smem, STAGES), o_free=smem.allocate_array(Int64, 1))

    def initialize(self) -> None:
        self.kv.initialize(KV_WARPS, 1)
        # in CTA 1 nobody starts products
        self.lists.initialize(1, 1 + KV_WARPS + SOFTMAX_WARPS - ptx.rank_again())
        cute.arch.mbarrier_init(self.o_free, BLOCKS * EPILOGUE_WARPS)
        self.initialize_others(BLOCKS * SOFTMAX_WARPS)

    def give_p(self, buffer: Any) -> None:
        cute.arch.mbarrier_arrive(self.p.full(buffer), 0)

    def release_o(self) -> None:
        cute.arch.mbarrier_arrive(self.o.empty(0))
        cute.arch.mbarrier_arrive(self.o_free, 0)

    def commit(self, barrier: Any) -> None:
        """Arrive in both CTAs when the products that this thread has started are done."""
        ptx.commit_tensor_multicast(barrier.toint(), (1 << BLOCKS) - 1)


PAIR = PrefillConfig("bf16", STAGES, smem_parts(), BarsOf2, BARRIERS)


# ---- producer


class KVLoaderOf2(KVLoader):
    """Of a CTA's own columns, which count at CTA 0's barriers."""

    stages, stage_bytes, slabs = STAGES, STAGE_BYTES, SLABS
    query_stages = QUERY_STAGES

    @cute.jit
    def copy_queries_async(
        self, work_tile: Any, number: cutlass.Constexpr, q_phase: Any, stage_at: Any, full: Any
    ) -> None:
        """Start to copy a slab of both halves. Who copies them on to tensor memory waits for q_done."""
        row, first = self.scheduler.coords(work_tile)
        counter = self.expect(full, QUERY_SLAB_BYTES)
        column = (number * QUERY_SLABS + self.part) * SLAB
        for half in range_constexpr(2):
            target = stage_at + self.part * QUERY_SLAB_BYTES + half * SLAB_BYTES
            place = column + half * SIDE, first, row
            ptx.copy_bulk_tensor(target, self.maps[0], place, counter, blocks=BLOCKS)

    @cute.jit
    def copy_rows_async(self, flags: Any, list_at: Any, stage_at: Any, full: Any) -> None:
        own_rows = KEYS // self.parts
        counter = self.expect(full, self.slabs * SLAB_BYTES // self.parts)
        first = ptx.rank_again() * SIDE
        own_at = stage_at + self.part * group_offset(own_rows // GATHERED, 0)
        for group in range_constexpr(own_rows // GATHERED):
            rows = ptx.load_shared_128(list_at + self.part * (own_rows * 4) + group * (GATHERED * 4))
            for slab in range_constexpr(self.slabs):
                target = own_at + group_offset(group, slab)
                ptx.gather_rows(target, self.maps[1], first + slab * SLAB, rows, counter, blocks=BLOCKS)

    @cute.jit
    def expect(self, full: Any, size: Any) -> Any:
        """Address of the barrier at which this CTA's `size` bytes count, CTA 0's, whose thread tells it of both CTAs'.
        The other's may come before: its phase waits for that thread."""
        if ptx.rank_again() == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(full, BLOCKS * size)
        return ptx.pair_leader(full.toint())


# ---- MMA


class MmaOf2(Mma):
    """The thread that starts both CTAs' products, in CTA 0."""

    @cute.jit
    def run(self) -> None:
        if ptx.rank_again() == 0:
            self.multiply()

    @cute.jit
    def multiply(self) -> None:
        """Multiply every tile, as prefill.py does. A work tile's queries come when Q K^T of the last one's is done."""
        bars = self.bars
        stage, phase = barriers.start()
        slot = Int32(0)
        # of tiles; flags and stages of the last one with S and of the one before
        with_s, with_o = Int32(0), Int32(0)
        flags, flags_before = Int32(LAST), Int32(0)
        last, before = Int32(0), Int32(0)
        # stages of queries that are still to be copied
        queries, q_phase = Int32(QUERY_STAGES), Int32(1)
        is_first, o_phase, goes_on = Int32(1), Int32(0), Int32(1)
        while goes_on != 0:
            ahead = with_s - with_o
            if (ahead < BUFFERS) & (flags & END == 0) and self.is_full(stage, phase, queries, q_phase) != 0:
                if queries != 0:
                    q_phase = q_phase ^ 1 if queries == QUERY_STAGES else q_phase
                    self.copy_queries_to(QUERY_STAGES - queries, stage)
                    queries = queries - 1
                else:
                    flags_before, before, last = flags, last, stage
                    flags = self.multiply_qk(with_s, stage, slot)
                    slot = slot + 1 & SLOTS - 1
                    with_s = with_s + 1
                    queries = Int32(QUERY_STAGES) if flags & LAST != 0 else Int32(0)
                stage, phase = barriers.advance(stage, phase, STAGES)
            ahead = with_s - with_o
            p_full = bars.p.full(with_o & BUFFERS - 1).toint()
            if (ahead > 0) & (ptx.test_mbarrier_cluster(p_full, with_o >> P_BITS & 1) != 0):
                its_flags, its_stage = (flags, last) if ahead == 1 else (flags_before, before)
                self.multiply_pv(with_o, its_stage, is_first, its_flags, o_phase)
                with_o, is_first = with_o + 1, Int32(0)
                if its_flags & LAST != 0:
                    is_first, o_phase = Int32(1), o_phase ^ 1
                if its_flags & END != 0:
                    goes_on = Int32(0)

    @cute.jit
    def is_full(self, stage: Any, phase: Any, queries: Any, q_phase: Any) -> Any:
        """Whether a stage is there and, if a work tile's queries begin with it, no product reads the last one's."""
        found = ptx.test_mbarrier_cluster(self.bars.kv.full(stage).toint(), phase)
        if queries == QUERY_STAGES:
            found = found & ptx.test_mbarrier(self.bars.q_done.toint(), q_phase)
        return found

    @cute.jit
    def copy_queries_to(self, number: Any, stage: Any) -> None:
        """Copy the queries in a stage, a work tile's of that number, to tensor memory; products come after it by
        themselves."""
        ptx.fence_tensor_after()
        source = descriptor(KEY_ROWS, self.smem.kv + stage * STAGE_BYTES)
        copies = list(query_copies())
        for i in range_constexpr(len(copies)):
            column = copies[i].column + number * (QUERY_SLABS * Q_COLUMNS)
            ptx.copy_to_tensor_memory(column, source + copies[i].offset // 16, "128x128b", BLOCKS)
        self.bars.commit(self.bars.kv.empty(stage))

    @cute.jit
    def multiply_qk(self, tile: Any, stage: Any, slot: Any) -> Any:
        flags = ptx.load_shared_s32(self.smem.lists + slot * LIST_BYTES + FLAGS_AT)
        cute.arch.mbarrier_arrive(self.bars.lists.empty(slot))
        ptx.fence_tensor_after()
        buffer, keys = tile & BUFFERS - 1, descriptor(KEY_ROWS, self.smem.kv + stage * STAGE_BYTES)
        steps = list(scores_steps())
        for i in range_constexpr(len(steps)):
            step, d = steps[i], buffer * S_COLUMNS + steps[i].d
            b, adds = keys + step.b // 16, int(not step.is_first)
            ptx.tensor_mma(d, step.a, b, SCORES_INSTRUCTION, adds, a_in_tensor_memory=True, blocks=BLOCKS)
        self.bars.commit(self.bars.s + buffer)
        if flags & LAST != 0:
            ptx.commit_tensor(self.bars.q_done.toint(), BLOCKS)
        return flags

    @cute.jit
    def multiply_pv(self, tile: Any, stage: Any, is_first: Any, flags: Any, o_phase: Any) -> None:
        bars = self.bars
        if is_first != 0:
            ptx.wait_mbarrier_cluster(bars.o_free.toint(), o_phase ^ 1)
        ptx.fence_tensor_after()
        buffer = tile & BUFFERS - 1
        weights = descriptor(KEY_ROWS, self.smem.p + buffer * P_BYTES)
        values = descriptor(VALUE_ROWS, self.smem.kv + stage * STAGE_BYTES)
        steps = list(values_steps())
        for i in range_constexpr(len(steps)):
            step = steps[i]
            adds = 1 - is_first if step.is_first else 1
            ptx.tensor_mma(
                step.d, weights + step.a // 16, values + step.b // 16, VALUES_INSTRUCTION, adds, blocks=BLOCKS
            )
        bars.commit(bars.p.empty(buffer))
        bars.commit(bars.kv.empty(stage))
        if flags & LAST != 0:
            bars.commit(bars.o.full(0))


# ---- softmax and epilogue


class SoftmaxOf2(Softmax):
    def load_scores(self, buffer: Any, lanes: Any) -> tuple[Any, ...]:
        """The place of the trade is free: of the tile before the other warp has used what it got, before it voted."""
        column = lanes + S_COLUMN + buffer * S_COLUMNS
        return plan.trade_scores(column, self.thread, self.smem.q, self.pair_barrier)


class EpilogueOf2(Epilogue):
    o_dim = staticmethod(plan.o_dim)


# ---- kernel


class SchedulerOf2(PrefillScheduler):
    """Of a cluster; heads are a CTA's."""

    def coords(self, work_tile: Any, heads: int = BLOCKS * HEADS) -> tuple[Any, Any]:
        row, first = super().coords(work_tile, heads)
        return row, first + ptx.rank_again() * HEADS


class Prefill2CtaKernel(PrefillKernel):
    name = "sparse_mla_prefill_pair"
    config = PAIR
    blocks = BLOCKS
    kv_loader, mma, softmax, epilogue = KVLoaderOf2, MmaOf2, SoftmaxOf2, EpilogueOf2

    def own(self, scheduler: PrefillScheduler) -> PrefillScheduler:
        first, step = scheduler.first // BLOCKS, scheduler.step // BLOCKS
        return SchedulerOf2(*scheduler)._replace(first=first, step=step)

    def synchronize(self) -> None:
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


# ---- key


@dataclass(frozen=True)
class BlackwellPairPrefillKey(BlackwellPrefillKey):
    """As BlackwellPrefillKey. A cluster of two CTAs takes all heads of a query row, 65 to 128."""

    kernel_name: ClassVar[str] = "sparse_mla.blackwell.prefill_2cta"

    @property
    def smem_bytes(self) -> int:
        return PAIR.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        return *super().instructions, "barrier.cluster"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(Prefill2CtaKernel().launch, fake_gathered())


# ---- what a tile takes


def work() -> tuple[Work, ...]:
    """Of a tile, in one of its two blocks."""
    heads, products = BLOCKS * HEADS, 2 * 2 * KEYS * HEAD_DIM * HEADS
    shapes: list[Shape] = []
    for many, topk in single.PREFILLS:
        if many == heads:
            name = f"sq{single.QUERY_ROWS} h{heads} topk{topk} skv{single.KV_ROWS}"
            moved = single.KV_ROWS * HEAD_DIM * 2 + single.QUERY_ROWS * (topk * 4 + heads * HEAD_DIM * 2 * 2)
            shapes.append(Shape(name, single.QUERY_ROWS * -(-topk // KEYS), moved))
    return (
        Work(
            op="sparse_mla_prefill",
            kernel=f"{heads} heads, pair of blocks",
            tile=f"{KEYS} keys, {heads} heads",
            blocks=BLOCKS,
            hbm=0,
            mma={"bf16": float(products)},
            smem={
                "rows in": STAGE_BYTES,
                "Q K^T": STAGE_BYTES,
                "parts of scores": 2 * 2 * TRADE_BYTES,
                "P in and out": 3 * P_BYTES,
                "P V": STAGE_BYTES,
            },
            flops=products,
            shapes=tuple(shapes),
        ),
    )
