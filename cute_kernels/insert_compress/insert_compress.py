# SPDX-License-Identifier: Apache-2.0
"""Kernel of fused_qkv_insert_compress: all between the GEMMs and attention of a layer of ratio 128, in one launch.

    CTAs              do                                                        warps
    0 .. entry_ctas   clusters: state of some tokens, entries that these close  see below
    entry_ctas ..     queries and keys (kv_cache/qnorm.py)                      each `rows` heads of a token, or its KV

A cluster takes up to 32 tokens, and each of its CTAs a part of the 512 columns of all of them. Almost always none of
its tokens closes an entry: then its warps save a token's columns each, and nothing else happens.

    columns of a CTA    `slices` times 64, of kv and of score
    saving              a warp a token: lanes 0 .. 15 kv, lanes 16 .. 31 score, four columns each
    an entry            thread r lists row r of the window; warp w takes rows 2 w + 16 i and 2 w + 1 + 16 i, then those
                        of w + 4: per column the largest score, a sum of weights and a sum of weighted values. The
                        first warp merges them, exchanges the sums of squares with the other CTAs and stores the columns

The sums of an entry have the order of compressor/ratio128.py, so that its bits are the same. That kernel keeps 64 KB
of rows on their way to shared memory, for many entries; here most CTAs have none, and many CTAs share a multiprocessor
instead: rows of an entry are asked for into L2 as soon as they are known, and read from there.

All that does not hang on the GEMMs is read while these still run: what the step says about tokens and requests, the
rotary table, the bias, the block table. None of it is written by the kernel ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.compressor import epilogue, ratio128
from cute_kernels.compressor.ratio128 import (
    COLUMNS,
    CONSUMER_WARPS,
    PARTS,
    RATIO,
    ROW_BYTES,
    ROWS,
    SLICES,
    Mean,
    MeanSmem,
    Producer,
    State,
    Step,
    Tokens,
)
from cute_kernels.dsl import ptx, reduce
from cute_kernels.dsl.convert import FP32_MAX
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, ROPE_DIM
from cute_kernels.insert_compress.call import CompressCall
from cute_kernels.kv_cache import qnorm
from cute_kernels.kv_cache.qnorm import QnormKernel, QnormKey, Rows, make_rows
from cute_kernels.models import ModelConfig
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

WARPS = 4
LANES = 32
HALF_ROW = HEAD_DIM * 4
GROUPS = RATIO // ROWS
TURNS = CONSUMER_WARPS // WARPS
"""Parts of an entry's slice that a warp makes, one after the other."""

LISTED = 1
"""Named barrier."""

CLUSTER = 8
"""CTAs that share tokens."""

FEW_QUERY_ROWS = 4096
"""Up to so many rows of q, warps take one head at a time."""

SHAPES = (1, 4)
"""Heads of a warp for few rows of q and for more."""


@dataclass(frozen=True)
class InsertCompressKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    rows       heads of q that a warp holds
    cluster    CTAs that share tokens: 2, 4 or 8
    ctas       that fit a multiprocessor: decides how many registers a thread may have
    """

    kernel_name: ClassVar[str] = "insert_compress.insert_compress"

    rows: int = SHAPES[0]
    cluster: int = CLUSTER
    ctas: int = 5

    @property
    def smem_bytes(self) -> int:
        return (
            (LANES * 4 + RATIO) * 8
            + SLICES // self.cluster * CONSUMER_WARPS * 3 * COLUMNS * 4
            + PARTS * (SLICES * 4 + 8)
        )

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "ld.global.128", "st.global.128", "cvt.e4m3", "ex2", "st.async"
        return *used, "barrier.cluster", "mbarrier", "griddepcontrol"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def stride(divisibility: int) -> Any:
            return cute.sym_int64(divisibility=divisibility)

        count = cute.sym_int()
        q_shape = (count, cute.sym_int(), HEAD_DIM)
        q = make_fake_tensor(BFloat16, q_shape, stride=(stride(8), stride(8), 1), assumed_align=16)
        kv = make_fake_tensor(BFloat16, (count, HEAD_DIM), stride=(stride(8), 1), assumed_align=16)
        slots, state_slots = (make_fake_tensor(Int64, (cute.sym_int(),), stride=(1,)) for _ in range(2))
        positions = make_fake_tensor(Int64, (count,), stride=(1,), assumed_align=8)
        table = make_fake_tensor(Float32, (cute.sym_int(), ROPE_DIM), stride=(stride(4), 1), assumed_align=16)
        pages = make_fake_tensor(Int32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))
        numbers = (
            *(Int64(0), Int64(0), Int32(0), Int32(1), Float32(0)),
            *(Int64(0), Int64(0), Int64(0), Int64(0), Int32(0), Int32(1)),
            *(Int64(0), Int64(0), Int64(0), Int64(0)),
            *(Int64(0), Int64(0), Int32(0), Int32(1)),
            *epilogue.fake_numbers(),
            Boolean(False),
        )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return InsertCompressKernel(self), (q, kv, slots, positions, table, state_slots, pages, *numbers, stream)


class Smem(NamedTuple):
    """Shared memory of a CTA that has entries.

    closers    int64 [LANES * 4]: position, entry's slot, request and the request's first token of those that close
    sources    int64 [GROUPS, ROWS]: where rows i * GROUPS + group of the entry's window lie; odd: a row of the step,
               without its bias
    memory     parts [slices, CONSUMER_WARPS, 3, COLUMNS], and what CTAs of a cluster exchange (ratio128.MeanSmem)
    """

    closers: Any
    sources: Any
    memory: MeanSmem


class Known(NamedTuple):
    """What a lane knows about its token: its position modulo RATIO, where it is saved or 0."""

    phase: Any
    target: Any


class InsertCompressKernel:
    """Entry point: (q, kv, slots, positions, cos and sin table, state slots, block table; of the keys' cache: address,
    page stride in bytes, rows of the pool, rows of a page, eps; addresses of entry slots, requests, starts and
    restarts, whether only a window is saved, tokens of a cluster; address and row stride of kv_score and of ape; the
    state cache's address, page stride, pages, rows of a page; `entry.numbers`; use_pdl, stream)."""

    def __init__(self, key: InsertCompressKey) -> None:
        self.cluster = key.cluster
        self.ctas = key.ctas
        self.slices = SLICES // key.cluster
        self.qnorm = QnormKernel(QnormKey(key.arch, FP8_DS_MLA.id, True, key.rows, WARPS, True))
        self.store = epilogue.EntryStore(FP8_DS_MLA.id, False, "", False, key.arch)
        # what a token closes, saves and reads is decided as in ratio128.py
        self.producer = Producer(True, None)  # type: ignore[arg-type]
        self.mean = Mean(0, 0)
        self.name = f"qkv_insert_compress_r{key.rows}c{key.cluster}b{key.ctas}"

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        slots: cute.Tensor,
        positions: cute.Tensor,
        table: cute.Tensor,
        state_slots: cute.Tensor,
        block_table: cute.Tensor,
        k_pool: Int64,
        k_page_stride: Int64,
        k_capacity: Int32,
        k_page_rows: Int32,
        k_eps: Float32,
        entry_slots: Int64,
        requests: Int64,
        starts: Int64,
        restart: Int64,
        window: Int32,
        per_cluster: Int32,
        kv_score: Int64,
        row_stride: Int64,
        ape: Int64,
        ape_stride: Int64,
        state_pool: Int64,
        state_page_stride: Int64,
        state_pages: Int32,
        state_page_rows: Int32,
        pool: Int64,
        page_stride: Int64,
        page_rows: Int32,
        capacity: Int32,
        weight: Int64,
        angles: Int64,
        angles_stride: Int64,
        angles_rows: Int32,
        fp8_scale: Int64,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        in_place = (address(q), stride_bytes(q, 0), stride_bytes(q, 1), Int64(0))
        keys = (k_pool, k_page_stride, k_capacity, k_page_rows)
        rows = make_rows(q, in_place, (kv, slots, Int64(0)), positions, table, keys, k_eps, self.qnorm.rows)
        count = length(state_slots, 0)
        tokens = Tokens(address(positions), requests, address(state_slots), entry_slots, count, per_cluster)
        page_divisor = cute.fast_divmod_create_divisor_v2(state_page_rows)
        state = State(
            state_pool,
            state_page_stride,
            state_pages,
            state_pages * state_page_rows,
            page_divisor,
            address(block_table),
            stride_bytes(block_table, 0),
            length(block_table, 1) * state_page_rows,
            length(block_table, 0),
            page_divisor,  # of cyclic tables alone
        )
        step = Step(kv_score, row_stride, ape, ape_stride, starts, restart, window, Int32(0))
        cache = epilogue.make_cache(
            pool, page_stride, page_rows, capacity, weight, angles, angles_stride, angles_rows, fp8_scale, eps
        )
        entry_ctas = cute.ceil_div(count, per_cluster) * self.cluster
        ctas = cute.ceil_div(entry_ctas + cute.ceil_div(rows.units, WARPS), self.cluster) * self.cluster
        self.kernel(tokens, state, step, cache, rows, entry_ctas).launch(
            grid=[ctas, 1, 1],
            block=[WARPS * LANES, 1, 1],
            cluster=[self.cluster, 1, 1],
            min_blocks_per_mp=self.ctas,
            # without it the DSL asks a device, which a machine that only compiles does not have; -1 is CUDA's default
            preferred_smem_carveout=-1,
            stream=stream,
            use_pdl=use_pdl,
        )

    @cute.kernel
    def kernel(
        self, tokens: Tokens, state: State, step: Step, cache: epilogue.Cache, rows: Rows, entry_ctas: Int32
    ) -> None:
        cta, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        shared = Smem(
            smem.allocate_tensor(Int64, cute.make_layout(LANES * 4), byte_alignment=16),
            smem.allocate_tensor(Int64, cute.make_layout(RATIO), byte_alignment=16),
            MeanSmem(
                smem.allocate_tensor(
                    Float32, cute.make_layout(self.slices * CONSUMER_WARPS * 3 * COLUMNS), byte_alignment=16
                ),
                smem.allocate_tensor(Float32, cute.make_layout(PARTS * SLICES), byte_alignment=16),
                smem.allocate_array(Int64, PARTS),
            ),
        )
        if cta < entry_ctas:
            self.compress(cta // self.cluster * tokens.per_cluster, tokens, state, step, cache, shared)
        else:
            self.qnorm.run(cta - entry_ctas, rows)

    @cute.jit
    def compress(
        self, first: Int32, tokens: Tokens, state: State, step: Step, cache: epilogue.Cache, shared: Smem
    ) -> None:
        """What a cluster does with its tokens, from `first` on; every CTA of it decides the same."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        warp = cute.arch.make_warp_uniform(thread // LANES)
        rank = cute.arch.block_idx_in_cluster()
        cute.arch.griddepcontrol_launch_dependents()
        known, pending = self.look(tokens, state, step, cache, shared, first, warp, lane)
        biases = self.load_bias(step, known, warp, rank, lane)
        readable = Boolean(False)
        source = lowest_bit(pending)
        if pending != 0:
            if warp == 0:
                self.mean.start(shared.memory)
            cute.arch.cluster_arrive_relaxed()
            # what the first warp wrote of the tokens that close entries
            cute.arch.barrier()
            readable = self.list_rows(state, step, shared, first, source, rank)
        cute.arch.griddepcontrol_wait()
        self.save(step, known, first, warp, rank, lane, biases)
        for other in cutlass.range(warp + WARPS, tokens.per_cluster, WARPS, unroll=1):
            self.save(step, known, first, other, rank, lane, self.load_bias(step, known, other, rank, lane))
        if pending != 0:
            # every CTA's mbarriers are ready before any of them sends
            cute.arch.cluster_wait()
        entries = Int32(0)
        while pending != 0:
            if readable:
                self.close(step, cache, shared, source, entries)
                entries += 1
            pending = pending & (pending - 1)
            source = lowest_bit(pending)
            if pending != 0:
                readable = self.list_rows(state, step, shared, first, source, rank)

    @cute.jit
    def look(
        self,
        tokens: Tokens,
        state: State,
        step: Step,
        cache: epilogue.Cache,
        shared: Smem,
        first: Int32,
        warp: Int32,
        lane: Int32,
    ) -> tuple[Known, Int32]:
        """What a lane knows about token `first + lane`, and which lanes' tokens close entries: the same in every warp.
        The first warp writes them down."""
        producer = self.producer
        token = first + lane
        is_token = lane < tokens.per_cluster and token < tokens.total
        own = producer.load_token(tokens, Int64(token if is_token else Int32(0)), is_token)
        is_known = own.request >= 0 and own.request < state.requests
        request = producer.load_request(step, own.request if is_known else Int32(0), is_known)
        is_kept = step.window == 0 or (is_known and own.position >= producer.oldest(step, request, own.position, token))
        is_saved = producer.is_row(own.slot, state.capacity) and is_kept
        closes = producer.closes(state, cache.capacity, own)
        if closes and warp == 0:
            shared.closers[lane * 4] = own.position
            shared.closers[lane * 4 + 1] = own.entry_slot
            shared.closers[lane * 4 + 2] = Int64(own.request)
            shared.closers[lane * 4 + 3] = Int64(request.start)
        pending = cute.arch.vote_ballot_sync(closes)
        return Known(Int32(own.position) & (RATIO - 1), producer.state_row(state, own.slot, is_saved)), pending

    def place(self, rank: Any, slice_: int, lane: Any) -> Any:
        """Offset in bytes of four columns of the CTA in a half of a row."""
        return Int64((rank * self.slices + slice_) * (COLUMNS * 4) + lane % 16 * 16)

    @cute.jit
    def load_bias(self, step: Step, known: Known, other: Int32, rank: Int32, lane: Int32) -> Any:
        """The bias of a lane's scores of lane `other`'s token, which is saved; zeros for values."""
        phase = cute.arch.shuffle_sync(known.phase, other)
        is_saved = cute.arch.shuffle_sync(known.target, other) != 0
        row = step.ape + Int64(phase) * step.ape_stride
        return [
            ptx.load_global_128_cached_where(is_saved and lane >= 16, row + self.place(rank, i, lane))
            for i in range(self.slices)
        ]

    @cute.jit
    def save(self, step: Step, known: Known, first: Int32, other: Int32, rank: Int32, lane: Int32, biases: Any) -> None:
        """Save the CTA's columns of lane `other`'s token."""
        target = cute.arch.shuffle_sync(known.target, other)
        if target != 0:
            half = Int64(lane // 16 * HALF_ROW)
            row = step.kv_score + Int64(first + other) * step.kv_stride + half
            words = [ptx.load_global_128_in_order(row + self.place(rank, i, lane)) for i in range(self.slices)]
            for i in range_constexpr(self.slices):
                biased = [a.bitcast(Float32) + b.bitcast(Float32) for a, b in zip(words[i], biases[i], strict=True)]
                saved = [b.bitcast(Int32) if lane >= 16 else a for a, b in zip(words[i], biased, strict=True)]
                ptx.store_global_128(target + half + self.place(rank, i, lane), saved)

    @cute.jit
    def list_rows(self, state: State, step: Step, shared: Smem, first: Int32, source: Int32, rank: Int32) -> Boolean:
        """Write down where the rows of the window of lane `source`'s token lie: whether all of them can be read. All
        threads of the CTA must call; rows of the state are asked for at once."""
        row, _, _ = cute.arch.thread_idx()
        position, request, start = (shared.closers[source * 4 + i] for i in (0, 2, 3))
        behind = (RATIO - 1) - row
        at = position - Int64(behind)
        has_column = at < Int64(state.known)
        column, offset = divmod(Int32(at if has_column else Int64(0)), state.divisor)
        table = state.table + request * state.table_stride
        page = ptx.load_global_s32_where(has_column, table + Int64(column) * 4)
        number = first + source - behind
        is_new = number >= cutlass.max(Int32(start), 0)
        is_cached = page >= 0 and page < state.pages
        cached = state.pool + Int64(page) * state.page_stride + Int64(offset) * ROW_BYTES
        cached = cached if is_cached else Int64(0)
        for half in range_constexpr(2):
            for line in range_constexpr(2 * self.slices):
                at_line = Int64(rank * (self.slices * COLUMNS * 4) + half * HALF_ROW + line * 128)
                ptx.prefetch_l2(cached + at_line, is_cached and not is_new)
        new = (step.kv_score + Int64(number) * step.kv_stride) | Int64(1)
        where = new if is_new else cached
        shared.sources[row % GROUPS * ROWS + row // GROUPS] = where
        return ptx.any_of_group(LISTED, RATIO, where == 0) == 0

    @cute.jit
    def close(
        self,
        step: Step,
        cache: epilogue.Cache,
        shared: Smem,
        source: Int32,
        number: Int32,
    ) -> None:
        """Compute and store the CTA's columns of entry `number` of the cluster, that of lane `source`'s token."""
        # what follows from these would otherwise be kept from entry to entry
        thread, rank = ptx.thread_again(), ptx.rank_again()
        lane = thread % LANES
        warp = cute.arch.make_warp_uniform(thread // LANES)
        parts = shared.memory.parts.iterator.toint()
        for turn in range_constexpr(TURNS):
            mover = warp + turn * WARPS
            first = 2 * mover + lane // 16
            for i in range_constexpr(self.slices):
                part = self.part(step, shared, first, self.place(rank, i, lane))
                if lane < 16:
                    target = parts + ((i * CONSUMER_WARPS + mover) * 3 * COLUMNS + lane * 4) * 4
                    for k in range_constexpr(3):
                        ptx.store_shared_128(target + k * COLUMNS * 4, [x.bitcast(Int32) for x in part[k]])
        cute.arch.barrier()
        if warp == 0:
            position, slot = shared.closers[source * 4], shared.closers[source * 4 + 1]
            columns = [(rank * self.slices + i) * COLUMNS + lane % 16 * 4 for i in range(self.slices)]
            loaded = [self.store.load(cache, column, position - (RATIO - 1)) for column in columns]
            x, squares = [], []
            for i in range_constexpr(self.slices):
                x.append(self.combine(parts + i * (CONSUMER_WARPS * 3 * COLUMNS * 4), lane))
                squares.append(reduce.lanes_sum(reduce.square_sum(x[i]), 16))
            total = self.mean.exchange(shared.memory, number, squares, rank, self.cluster)
            factor = self.store.factor(cache, total)
            # both halves of the warp have the same columns
            slot = slot if lane < 16 else Int64(-1)
            for i in range_constexpr(self.slices):
                self.store.finish(cache, loaded[i], columns[i], x[i], factor, slot)

    @cute.jit
    def part(self, step: Step, shared: Smem, first: Int32, place: Int64) -> Any:
        """Largest scores, sums of weights and sums of weighted values of four columns over the rows of two half warps,
        as `Mean.add_part` makes them; in the lower half warp."""
        scores = []
        half = ROWS // 2
        for rows in (range(half), range(half, ROWS)):
            sources = self.sources(shared, first, rows)
            words = [ptx.load_global_128_in_order((source & Int64(-2)) + place + HALF_ROW) for source in sources]
            for i, source, found in zip(rows, sources, words, strict=True):
                is_new = (Int32(source) & 1) != 0
                bias = ptx.load_global_128_cached_where(
                    is_new, step.ape + Int64(first + i * GROUPS) * step.ape_stride + place
                )
                pairs = zip([w.bitcast(Float32) for w in found], [b.bitcast(Float32) for b in bias], strict=True)
                scores.append([a + b if is_new else a for a, b in pairs])
        # half of the values are under way while the weights are made of the scores, in their place
        values = self.values(shared, first, range(half), place)
        most = []
        for c in range_constexpr(4):
            # not -inf, even if all scores are: their difference would be NaN
            most.append(Float32(-FP32_MAX))
            for i in range_constexpr(ROWS):
                most[c] = ptx.max_f32(most[c], scores[i][c])
        factors = [[ptx.exp2((scores[i][c] - most[c]) * ptx.LOG2_E) for c in range(4)] for i in range(ROWS)]
        weights, totals = [Float32(0)] * 4, [Float32(0)] * 4
        for i in range_constexpr(ROWS):
            if const_expr(i == half):
                values = self.values(shared, first, range(half, ROWS), place)
            for c in range_constexpr(4):
                weights[c] = ptx.add_rn(weights[c], factors[i][c])
                totals[c] = ptx.fma_rn(factors[i][c], values[i % half][c].bitcast(Float32), totals[c])
        largest, sums = [], []
        for c in range_constexpr(4):
            mine = most[c], weights[c], totals[c]
            other = [cute.arch.shuffle_sync_bfly(x, 16) for x in mine]
            both = self.mean.merge([mine, other])
            largest.append(both[0])
            weights[c] = both[1]
            sums.append(both[2])
        return largest, weights, sums

    def sources(self, shared: Smem, first: Any, rows: range) -> list[Any]:
        """Where some of a half warp's rows lie; read again rather than kept."""
        place = shared.sources.iterator.toint() + (first * ROWS + rows.start) * 8
        words = [ptx.load_shared_128_in_order(place, i * 16) for i in range(len(rows) // 2)]
        return [ptx.pair(*pair) for a, b, c, d in words for pair in ((a, b), (c, d))]

    def values(self, shared: Smem, first: Any, rows: range, place: Any) -> list[Any]:
        """A lane's values of some of its rows."""
        return [ptx.load_global_128_in_order((x & Int64(-2)) + place) for x in self.sources(shared, first, rows)]

    @cute.jit
    def combine(self, parts: Int32, lane: Int32) -> Any:
        """A lane's four columns of a slice of an entry from all parts, as `Mean.combine` merges them: each half warp
        those of four movers, then both."""
        place = parts + (lane // 16 * (CONSUMER_WARPS // 2) * 3 * COLUMNS + lane % 16 * 4) * 4
        read = [
            [ptx.load_shared_128(place + (m * 3 + k) * COLUMNS * 4) for k in range(3)]
            for m in range(CONSUMER_WARPS // 2)
        ]
        x = []
        for c in range_constexpr(4):
            own = self.mean.merge([[words[c].bitcast(Float32) for words in part] for part in read])
            other = [cute.arch.shuffle_sync_bfly(y, 16) for y in own]
            # the lower half's rows first, in both halves
            is_lower = lane < 16
            first = [a if is_lower else b for a, b in zip(own, other, strict=True)]
            second = [b if is_lower else a for a, b in zip(own, other, strict=True)]
            _, weight, total = self.mean.merge([first, second])
            x.append(ptx.div_rn(total, weight))
        return x[0], x[1], x[2], x[3]


def lowest_bit(mask: Any) -> Any:
    """Number of the lowest bit that is set; 32 if none is."""
    return cute.arch.popc((mask & -mask) - 1)


def key_for(arch: str, rows: int) -> InsertCompressKey:
    """The kernel in use with so many heads a warp."""
    # on Blackwell the assembler needs a few registers more
    return InsertCompressKey(arch, rows, ctas=5 if arch == "sm_90a" else 4)


def keys_of(arch: str) -> list[InsertCompressKey]:
    """All kernels of an architecture."""
    return [key_for(arch, rows) for rows in SHAPES] if ratio128.runs_on(arch) else []


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[InsertCompressKey]:
    """Layers of ratio 128, with the usual formats of both caches."""
    return keys_of(arch) if RATIO in config.compress_ratios else []


@cache
def _key(device_index: int, rows: int) -> InsertCompressKey:
    return key_for(arch_of(device_index), rows)


def tokens_per_cluster(count: int) -> int:
    """How many tokens a cluster takes in a call of `count`: a warp has one of them where there are few."""
    return WARPS if count <= 128 else 2 * WARPS if count <= 1024 else LANES


def why_not(call: CompressCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    arch = arch_of(call.q.device.index)
    if not ratio128.runs_on(arch):
        return f"{arch} has no clusters of CTAs with 200 KB of shared memory"
    why = qnorm.why_not_quant_insert(call.insert()) or ratio128.why_not(call.compress())
    if why:
        return why
    for name, tensor, size in (("norm_weight", call.norm_weight, 2), ("cos_sin_cache", call.cos_sin_cache, 4)):
        if tensor.element_size() != size:
            return f"{name} must have {size} bytes an element, got {tensor.dtype}"
    return ""


def launch(call: CompressCall) -> None:
    """Run the kernel on the current stream of q's device."""
    rows = SHAPES[call.q.shape[0] * call.q.shape[1] > FEW_QUERY_ROWS]
    launch_with(_key(call.q.device.index, rows), call)


def launch_with(key: InsertCompressKey, call: CompressCall, per_cluster: int | None = None) -> None:
    """`launch` with a kernel of the caller's choice, and as many tokens a cluster: for tests and benchmarks."""
    if call.q.shape[0] == 0:
        return
    k_cache, state, kv_score, ape = call.k_cache, call.state_cache, call.kv_score, call.ape
    k_pool = k_cache.data_ptr(), k_cache.stride(0) * k_cache.element_size(), k_cache.shape[0] * call.block_size
    pages, page_rows, _ = state.shape
    launch_key(
        key,
        call.q.device.index,
        *(call.q, call.kv, call.slot_mapping, call.positions, call.cos_sin_cache),
        *(call.state_slot_mapping, call.state_block_table),
        *(*k_pool, call.block_size, call.eps),
        *(call.entry_slot_mapping.data_ptr(), call.token_to_req_indices.data_ptr(), call.query_start_loc.data_ptr()),
        *(0 if call.min_restart is None else call.min_restart.data_ptr(), int(call.persist == "window")),
        per_cluster or tokens_per_cluster(call.state_slot_mapping.shape[0]),
        *(kv_score.data_ptr(), kv_score.stride(0) * 4, ape.data_ptr(), ape.stride(0) * 4),
        *(state.data_ptr(), state.stride(0) * 4, pages, page_rows),
        *epilogue.numbers(call.entry_cache, call.cos_sin_cache, call.norm_weight, None, call.eps),
        call.use_pdl,
    )


KERNEL = OpKernel(launch, why_not, deployment_keys)
