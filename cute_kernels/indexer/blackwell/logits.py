# SPDX-License-Identifier: Apache-2.0
"""Scores on Blackwell (mqa_logits, paged_mqa_logits): e4m3 or MXFP4 products by tcgen05.mma from codes as stored.

    warps 0 .. 7    two consumer warpgroups: sums over heads, epilogue
    warp 8          producer warp (producer.py)
    warp 9          MMA warp: starts the products; allocates and frees tensor memory
    warp 10         scale warp: puts the scales of MXFP4 where tcgen05.cp takes them from (of FP8 it has nothing to do)
    warp 11         fill warp: writes -inf where a row sees no key, if that is wanted (params.Fill)

    keys, queries   gmem --TMA--> rings in shared memory --tcgen05.mma--> tensor memory, 2 or 3 of [128 keys, columns]
    scales (MXFP4)  gmem --> ring of keys --scale warp--> in order --tcgen05.cp--> tensor memory
                    tensor memory --tcgen05.ld--> relu, weights, sums over heads --> scores, a key a thread

A tile's products are [128 keys, heads of a group's rows]: keys on the side that has 128 lanes of tensor memory, so that
a thread has all heads of its key, and heads are added up without another thread. A thread loads some products while it
adds up those that came before. The order of these sums is the same in every kernel here.

The two consumer warpgroups take turns or, of more than two rows, each adds up half of them in every tile: then weights,
of which a thread needs those of all heads, still have room in registers.

Scales of MXFP4 come as a word of four for each key and head, in their order. Products want words of rows r, r + 32,
r + 64 and r + 96 side by side (umma.scale_offset), so the scale warp puts 128 of them in that order, in their place;
from there they are copied into tensor memory.

No Blackwell has run this kernel yet: the host model of tests/model has.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, umma, wgmma
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer.params import (
    COUNTERS,
    WARP,
    Fill,
    KeyCache,
    RowGroups,
    TileScheduler,
    Windows,
    fake_arguments,
)
from cute_kernels.indexer.producer import (
    HEADER,
    QUERY_STAGES,
    KeyTile,
    Producer,
    QueryCopy,
    code_rows,
    prefetch_lengths,
    release,
    wait_key_tile,
)
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.work import Shape, Work

KEY_TILE = 128
"""Keys of a tile: lanes of tensor memory."""

PAGE_BOX = 64
"""Keys of pages that a TMA box brings: pages have a multiple of it."""

STAGE_BYTES = 128 * 1024
"""Of the ring of keys, without scales. A Hopper multiprocessor has use for 48 to 72 KB on their way, and two or three
stages are with those who use them."""

CONSUMERS = 2
"""Warpgroups."""

MOST_BUFFERS = 3
"""Of a tile's products in tensor memory, where it has columns for them; else one less. With two, consumers that take
turns have one each, and the next product waits for its consumer; with three there is one ahead."""

SCALE_COLUMNS = 4
"""Of tensor memory, for the scales of 128 rows of an operand."""

ALIGNMENT = 128
"""Of everything in shared memory but barriers and operands, which have less and more, in bytes."""

MANY_WEIGHTS = 64
"""Of a thread, beyond which it needs more registers than its share of a multiprocessor's."""

REGISTERS = 56, 224
"""Per thread of a kernel with MANY_WEIGHTS, of the warps beside and of consumers: together what three warpgroups are
launched with, 3 x 168."""

SUMS_DONE = 1
"""Barrier of the warps that use tensor memory."""

LANE_SHIFT = 16
"""Of an address in tensor memory: bits of the column."""

SUMS = 4
"""Of a row's heads, every fourth in each: two are added to at once, and two additions do not wait for each other."""

DOUBLED = 2
"""Of these, the first ones, that are of twice relu: see Consumer.add_heads."""


@dataclass(frozen=True)
class BlackwellConfig:
    """Sizes of one kernel: `heads` of a query row, at most `rows` of them in a group, keys copied by TMA boxes of
    `box`, PAGE_BOX or, of contiguous keys, KEY_TILE; and whether codes are MXFP4."""

    heads: int
    rows: int
    box: int
    mxfp4: bool = False

    keys: ClassVar[int] = KEY_TILE
    producers: ClassVar[int] = 1
    warpgroups: ClassVar[int] = CONSUMERS
    warps_beside: ClassVar[int] = 4
    query_stages: ClassVar[int] = QUERY_STAGES
    shares_queries: ClassVar[bool] = False

    @property
    def columns(self) -> int:
        """Of a tile's products."""
        return self.heads * self.rows

    @property
    def row_bytes(self) -> int:
        return INDEX_DIM // 2 if self.mxfp4 else INDEX_DIM

    @property
    def row_splits(self) -> int:
        """That a tile's rows are added up in, one by each consumer. One: then each adds up every second tile."""
        return 2 if self.rows > 2 else 1

    @property
    def held(self) -> int:
        """Rows whose weights a thread has in registers."""
        return -(-self.rows // self.row_splits)

    def rows_of_split(self, split: int) -> int:
        return min(self.held, self.rows - split * self.held)

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return (self.warpgroups * 4 + self.warps_beside) * WARP

    @property
    def boxes(self) -> int:
        """Of a tile."""
        return self.keys // self.box

    @property
    def stages(self) -> int:
        return STAGE_BYTES // (KEY_TILE * self.row_bytes)

    @property
    def scale_tiles(self) -> int:
        """Of 128 heads, whose scales come together."""
        return -(-self.columns // KEY_TILE)

    @property
    def q_scale_words(self) -> int:
        """Of a query stage."""
        return self.scale_tiles * KEY_TILE

    # ---- shared memory

    @property
    def words(self) -> dict[str, int]:
        """What shared memory holds besides operands and barriers, in words. MXFP4: the scales of a tile's keys, and of
        the heads of 128 rows, come in their order and are put in that of umma.scale_offset."""
        words = {
            "headers": self.stages * HEADER,
            "scales": self.stages * self.keys,
            "weights": self.query_stages * self.columns,
            "windows": self.query_stages * 2 * self.rows,
            "counts": COUNTERS,
            "tensor": 4,
        }
        return {**words, "q_scales": self.query_stages * self.q_scale_words} if self.mxfp4 else words

    @property
    def barriers(self) -> int:
        """mbarriers: of two rings, of products, and where scales have been put in order."""
        products = self.product_places + self.buffers
        return 2 * (self.stages + self.query_stages) + products + (self.stages if self.mxfp4 else 0)

    @property
    def smem_bytes(self) -> int:
        small = self.barriers * barriers.BYTES_PER_STAGE // 2
        small = round_up(small, ALIGNMENT) + sum(round_up(count * 4, ALIGNMENT) for count in self.words.values())
        return round_up(small, 1024) + (self.stages * KEY_TILE + self.query_stages * self.columns) * self.row_bytes

    # ---- tensor memory, in columns: products of every buffer, scales of keys for each, scales of two groups' queries

    @property
    def buffers(self) -> int:
        return MOST_BUFFERS if self._columns_of(MOST_BUFFERS) <= ptx.COLUMNS else MOST_BUFFERS - 1

    @property
    def product_places(self) -> int:
        """mbarriers that products arrive on, one tile's after the other's.

        A parity cannot tell a phase from the one before last, so who waits on an mbarrier has to wait for all its
        phases. Consumers that take turns wait for their own tiles' only: of an odd number of buffers each has two
        mbarriers, one for either consumer."""
        takes_turns = self.row_splits == 1
        return math.lcm(self.buffers, CONSUMERS) if takes_turns else self.buffers

    def _columns_of(self, buffers: int) -> int:
        scales = buffers + QUERY_STAGES * self.scale_tiles if self.mxfp4 else 0
        return buffers * self.columns + scales * SCALE_COLUMNS

    @property
    def key_scales_at(self) -> int:
        return self.buffers * self.columns

    @property
    def q_scales_at(self) -> int:
        return self.key_scales_at + self.buffers * SCALE_COLUMNS

    @property
    def used_columns(self) -> int:
        return self._columns_of(self.buffers)

    @property
    def tensor_columns(self) -> int:
        """That the kernel asks for: a power of two."""
        return max(32, 1 << (self.used_columns - 1).bit_length())

    # ---- products

    @property
    def operand(self) -> umma.Operand:
        """Keys or heads, a row of codes each, as tensor copies leave them."""
        return umma.k_major(4, 64) if self.mxfp4 else umma.k_major(8, 128)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Of a tile's product: bytes to add to the start of both operands, and the descriptor of the instruction."""
        bits = self.operand.bits
        firsts = range(0, INDEX_DIM, umma.K_BYTES * 8 // bits)
        return [(self.operand.step(k), self.instruction_at(k)) for k in firsts]

    def instruction_at(self, k: int) -> int:
        if not self.mxfp4:
            return umma.instruction("f8f6f4", "e4m3", "e4m3", KEY_TILE, self.columns)
        scale_block = k // 32
        return umma.scaled_instruction("mxf4", "e2m1", "e2m1", KEY_TILE, self.columns, scale_block, scale_block)


def most_rows(heads: int, mxfp4: bool) -> int:
    """Of a group: at most 256 columns of products, and of MXFP4 so many that scales have room in tensor memory."""
    return min(4, (192 if mxfp4 else 256) // heads)


class Smem(NamedTuple):
    """Addresses in shared memory: BlackwellConfig.words. tensor: of the address of the tensor memory."""

    headers: Any
    scales: Any
    weights: Any
    windows: Any
    counts: Any
    tensor: Any
    q_scales: Any = None


@dataclass(frozen=True)
class Bars:
    """Rings of keys and of queries, and mbarriers.

    products   that a tile's products arrive on: see BlackwellConfig.product_places
    loaded     one for each buffer of products in tensor memory, that those who have loaded them arrive on
    ordered    of MXFP4, one for each stage of keys, that scales in order arrive on
    """

    keys: barriers.Ring
    queries: barriers.Ring
    products: Any
    loaded: Any
    ordered: Any


@cute.jit
def product_buffer(place: Any, phase: Any, config: cutlass.Constexpr) -> tuple[Any, Any]:
    """Buffer of the tile whose products arrive at a place in a phase, and the phase of `loaded` that it ends."""
    if const_expr(config.product_places > config.buffers):
        is_second = place >= config.buffers
        place, phase = (place - config.buffers if is_second else place), Int32(is_second)
    return place, phase


# ---- MMA


@dataclass(frozen=True)
class MmaWarp:
    """The warp that starts products. It goes through the ring of keys tile by tile, as the other warps do. A buffer of
    tensor memory gets a tile's products when the consumers have loaded what was there.

    keys, queries   addresses of their stages
    tensor          address of the tensor memory
    """

    config: BlackwellConfig
    bars: Bars
    smem: Smem
    keys: Any
    queries: Any
    tensor: Any

    @cute.jit
    def run(self) -> None:
        """Products of all tiles of the CTA."""
        config, bars, smem = self.config, self.bars, self.smem
        stage, phase = barriers.start()
        place, place_phase = barriers.start()
        current, turn = Int32(-1), Int32(-1)
        is_running = Int32(1)
        while is_running != 0:
            tile = wait_key_tile(bars.keys, smem.headers, stage, phase)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                # the arrival of products only releases what they read themselves
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(bars.keys.empty(stage))
                is_new = tile.group != current
                if is_new:
                    current, turn = tile.group, turn + 1
                    bars.queries.wait_full(turn % QUERY_STAGES, turn // QUERY_STAGES & 1)
                buffer, buffer_phase = product_buffer(place, place_phase, config)
                ptx.wait_mbarrier((bars.loaded + buffer).toint(), buffer_phase ^ 1)
                if const_expr(config.mxfp4):
                    ptx.wait_mbarrier((bars.ordered + stage).toint(), phase)
                ptx.fence_tensor_after()
                with cute.arch.elect_one():
                    self.multiply(
                        self.keys + stage * (KEY_TILE * config.row_bytes),
                        self.queries + turn % QUERY_STAGES * (config.columns * config.row_bytes),
                        stage,
                        turn % QUERY_STAGES,
                        buffer,
                        is_new,
                    )
                    ptx.commit_tensor((bars.products + place).toint())
                place, place_phase = barriers.advance(place, place_phase, config.product_places)
                stage, phase = barriers.advance(stage, phase, config.stages)

    @cute.jit
    def multiply(
        self,
        keys: Any,
        queries: Any,
        stage: Any,
        query_stage: Any,
        buffer: Any,
        is_new: Any,
    ) -> None:
        """The products of a tile. By one thread. is_new: whether the queries are new in their stage."""
        config, smem = self.config, self.smem
        key_scales = self.tensor + config.key_scales_at + buffer * SCALE_COLUMNS
        q_scales = self.tensor + config.q_scales_at + query_stage * (config.scale_tiles * SCALE_COLUMNS)
        if const_expr(config.mxfp4):
            if is_new:
                for number in range_constexpr(config.scale_tiles):
                    source = smem.q_scales + (query_stage * config.q_scale_words + number * KEY_TILE) * 4
                    target = q_scales + number * SCALE_COLUMNS
                    ptx.copy_scales(target, ptx.descriptor_at(umma.SCALES, source))
            ptx.copy_scales(key_scales, ptx.descriptor_at(umma.SCALES, smem.scales + stage * (KEY_TILE * 4)))
        target = self.tensor + buffer * config.columns
        rows, heads = (ptx.descriptor_at(config.operand, address) for address in (keys, queries))
        for number, (step, instruction) in enumerate(config.steps):
            operands = rows + (step >> 4), heads + (step >> 4)
            if const_expr(config.mxfp4):
                ptx.tensor_mma_scaled(target, *operands, instruction, key_scales, q_scales, min(number, 1))
            else:
                ptx.tensor_mma(target, *operands, instruction, min(number, 1), kind="f8f6f4")


@dataclass(frozen=True)
class ScaleWarp:
    """The warp that puts scales in order: of MXFP4."""

    config: BlackwellConfig
    bars: Bars
    smem: Smem

    @cute.jit
    def run(self) -> None:
        """Put the scales of all tiles, and of the groups' queries, in order."""
        config, bars, smem = self.config, self.bars, self.smem
        lane = cute.arch.lane_idx()
        stage, phase = barriers.start()
        current, turn = Int32(-1), Int32(-1)
        is_running = Int32(1)
        while is_running != 0:
            tile = wait_key_tile(bars.keys, smem.headers, stage, phase)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != current:
                    current, turn = tile.group, turn + 1
                    bars.queries.wait_full(turn % QUERY_STAGES, turn // QUERY_STAGES & 1)
                    for number in range_constexpr(config.scale_tiles):
                        self.order(
                            smem.q_scales + (turn % QUERY_STAGES * config.q_scale_words + number * KEY_TILE) * 4, lane
                        )
                self.order(smem.scales + stage * (KEY_TILE * 4), lane)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(bars.ordered + stage)
                stage, phase = barriers.advance(stage, phase, config.stages)

    @cute.jit
    def order(self, scales: Any, lane: Any) -> None:
        """128 words at an address. By the warp."""
        words = [ptx.load_shared_s32(scales + (lane + i * WARP) * 4) for i in range(KEY_TILE // WARP)]
        cute.arch.sync_warp()
        ptx.store_shared_128(scales + lane * 16, words)


# ---- epilogue


@dataclass(frozen=True)
class Consumer:
    """A thread of the warpgroups that add up the heads and store the scores: it has a key of a tile, whose products
    with all heads of all rows are its lane of tensor memory, and meets no other thread.

    thread   of the warpgroup
    tensor   address of the tensor memory
    out      address of the scores; out_stride in bytes
    """

    config: BlackwellConfig
    paged: bool
    warpgroup: Any
    thread: Any
    groups: RowGroups
    windows: Windows
    bars: Bars
    smem: Smem
    tensor: Any
    out: Any
    out_stride: Any

    @property
    def width(self) -> int:
        """Columns of tensor memory that a thread loads at a time."""
        return 32 if self.config.heads % 32 == 0 else 16

    @cute.jit
    def run(self, split: Any, count: cutlass.Constexpr) -> None:
        """Score the warpgroup's tiles, or of all tiles the `count` rows of its split."""
        config, bars, smem = self.config, self.bars, self.smem
        warpgroup, thread = self.warpgroup, self.thread
        lane = thread % WARP
        weights = cute.make_rmem_tensor((count * config.heads,), Float32)
        firsts, stops = (cute.make_rmem_tensor((count,), Int32) for _ in range(2))
        seen = (firsts, stops, cute.make_rmem_tensor((count,), Int64))
        first = split * config.held
        products = self.tensor + (thread // WARP * WARP << LANE_SHIFT) + first * config.heads
        stage, phase = barriers.start()
        place, place_phase = barriers.start()
        current, turn, loaded, number = Int32(-1), Int32(-1), Int32(-1), Int32(0)
        is_running = Int32(1)
        while is_running != 0:
            tile = wait_key_tile(bars.keys, smem.headers, stage, phase)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != current:
                    current, turn = tile.group, turn + 1
                query_stage = turn % QUERY_STAGES
                if (number % CONSUMERS == warpgroup) | (config.row_splits > 1):
                    if loaded != turn:
                        loaded = turn
                        bars.queries.wait_full(query_stage, turn // QUERY_STAGES & 1)
                        self.load_rows(weights, seen, current, query_stage, first)
                    scale = Float32(1.0)
                    if const_expr(not config.mxfp4):
                        scale = ptx.load_shared_f32(smem.scales + (stage * KEY_TILE + thread) * 4)
                    ptx.wait_mbarrier((bars.products + place).toint(), place_phase)
                    ptx.fence_tensor_after()
                    buffer, _ = product_buffer(place, place_phase, config)
                    at = products + buffer * config.columns
                    totals = self.add_heads(at, weights, count)
                    if not cute.arch.vote_all_sync(are_finite(totals)):
                        self.add_heads_again(totals, at, query_stage, first)
                    ptx.fence_tensor_before()
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(bars.loaded + buffer)
                    self.store(totals, seen, tile, scale)
                release(bars, tile, query_stage, lane)
                number += 1
                place, place_phase = barriers.advance(place, place_phase, config.product_places)
                stage, phase = barriers.advance(stage, phase, config.stages)

    @cute.jit
    def load_rows(self, weights: Any, seen: Any, group: Any, query_stage: Any, first: Any) -> None:
        """What belongs to a group's rows from number `first` on: weights, which keys they see, where scores go."""
        config, smem, groups, windows = self.config, self.smem, self.groups, self.windows
        source = smem.weights + (query_stage * config.columns + first * config.heads) * 4
        for i in range_constexpr(0, cute.size(weights), 4):
            for j, word in enumerate(ptx.load_shared_128(source + i * 4)):
                weights[i + j] = word.bitcast(Float32)
        firsts, stops, targets = seen
        request, first_row = groups.coords(group, config.rows)
        for i in range_constexpr(cute.size(firsts)):
            row = first + i
            is_row = first_row + row < groups.count
            place = smem.windows + (query_stage * 2 * config.rows + (row if is_row else Int32(0))) * 4
            start = Int32(0)
            if const_expr(not self.paged):
                start = ptx.load_shared_s32(place)
            begin, end, shift = windows.clip(start, ptx.load_shared_s32(place + config.rows * 4))
            firsts[i] = begin
            stops[i] = end if is_row else begin
            number = Int64(request) * Int64(groups.count) + Int64(first_row + row)
            targets[i] = self.out + number * self.out_stride - Int64(shift) * 4

    @cute.jit
    def add_heads(self, products: Any, weights: Any, count: cutlass.Constexpr) -> Any:
        """Sums over heads of the thread's key, for `count` rows whose products begin at an address. Some products are
        loaded while others are added up.

        Half of the sums are of x + |x| in place of max(x, 0), which takes half the instructions, of another pipe. They
        are twice as large: what they are rounded to is the same, unless they are below 2^-125, or beyond fp32's range.
        """
        width = self.width
        pieces = count * self.config.heads // width
        sums = [[Float32(0.0)] * SUMS for _ in range(count)]
        coming = ptx.start_tensor_load(products, width)
        for piece in range_constexpr(pieces):
            words = ptx.wait_tensor_loads(coming)
            if const_expr(piece + 1 < pieces):
                coming = ptx.start_tensor_load(products + (piece + 1) * width, width)
            row = piece * width // self.config.heads
            for i in range_constexpr(0, width, 2):
                pair: Any = [words[i + j].bitcast(Float32) for j in range(2)]
                pair = ptx.twice_relu_f32x2(pair) if const_expr(i % SUMS < DOUBLED) else [ptx.relu(x) for x in pair]
                weight = [weights[piece * width + i + j] for j in range(2)]
                sums[row][i % SUMS : i % SUMS + 2] = ptx.fma_f32x2(pair, weight, sums[row][i % SUMS : i % SUMS + 2])
        totals = cute.make_rmem_tensor((count,), Float32)
        for row in range_constexpr(count):
            a, b, c, d = sums[row]
            totals[row] = ptx.fma_rn(ptx.add_rn(a, b), Float32(0.5), ptx.add_rn(c, d))
        return totals

    @cute.jit
    def add_heads_again(self, totals: Any, products: Any, query_stage: Any, first: Any) -> None:
        """The same sums of max(x, 0) alone, where a product is -inf or a double is beyond fp32's range: rare, so in
        few instructions."""
        heads, words_at = self.config.heads, self.smem.weights + query_stage * (self.config.columns * 4)
        for row in range_constexpr(cute.size(totals)):
            weights_at, row_at = words_at + (first + row) * (heads * 4), products + row * heads
            a, b, c, d = (Float32(0.0) for _ in range(SUMS))
            for head in cutlass.range(0, heads, SUMS, unroll=1):
                x = [ptx.relu(product) for product in ptx.load_tensor_memory(row_at + head, SUMS)]
                w = [word.bitcast(Float32) for word in ptx.load_shared_128(weights_at + head * 4)]
                a, b = ptx.fma_f32x2(x[:2], w[:2], (a, b))
                c, d = ptx.fma_f32x2(x[2:], w[2:], (c, d))
            totals[row] = ptx.add_rn(ptx.add_rn(a, b), ptx.add_rn(c, d))

    @cute.jit
    def store(self, sums: Any, seen: Any, tile: KeyTile, scale: Any) -> None:
        """Write the scores of the thread's key."""
        firsts, stops, targets = seen
        key = tile.first_key + self.thread
        for i in range_constexpr(cute.size(sums)):
            score = sums[i] * scale
            if const_expr(self.paged):
                is_there = tile.boxes & (1 << (self.thread // self.config.box)) != 0
                score = score if is_there else Float32(-Float32.inf)
            is_seen = (key >= firsts[i]) & (key < stops[i])
            ptx.store_global_f32(targets[i] + Int64(key) * 4, score, is_seen)


def are_finite(sums: Any) -> Any:
    return functools.reduce(operator.and_, (ptx.abs_f32(sums[i]) < Float32.inf for i in range(cute.size(sums))))


# ---- kernel


class BlackwellLogitsKernel:
    """Entry point: as that of hopper/logits_mxfp4.py. Queries that are FP8 have no scales."""

    def __init__(self, key: BlackwellLogitsKey) -> None:
        self.config, self.paged = key.config, key.paged
        self.has_many_weights = self.config.held * self.config.heads > MANY_WEIGHTS
        kind = ("paged_" if key.paged else "") + "mqa_logits_sm100" + ("_mxfp4" if key.mxfp4 else "")
        self.name = f"{kind}_h{key.heads}r{key.rows}"

    @cute.jit
    def __call__(
        self,
        weights: cute.Tensor,
        out: cute.Tensor,
        q: Int64,
        q_request: Int64,
        q_row: Int64,
        q_head: Int64,
        requests: Int32,
        row_count: Int32,
        keys: Int64,
        scales: Int64,
        key_stride: Int64,
        page_stride: Int64,
        page_rows: Int32,
        pages: Int32,
        table: Int64,
        table_stride: Int64,
        table_columns: Int32,
        starts: Int64,
        ends: Int64,
        end_request: Int64,
        limit: Int32,
        shifts: Int32,
        skip: Int32,
        clean: Int32,
        q_scales: Int64,
        q_scales_request: Int64,
        q_scales_row: Int64,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        config, width = self.config, self.config.row_bytes
        query_rows = code_rows(q, width, (Int32(config.heads), row_count, requests), (q_head, q_row, q_request))
        key_rows = code_rows(keys, width, (page_rows, pages), (key_stride, page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(cute.ceil_div(page_rows, config.box))
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles = self.tiles(config.heads, config.query_stages * config.rows)
        key_tiles = self.tiles(config.box, config.stages * config.boxes)
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_rows, query_tiles, (config.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_rows, key_tiles, (config.box, width))
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            self.tiles(KEY_TILE, config.stages),
            RowGroups.of(requests, row_count, config.rows, ctas),
            Windows(starts, ends, end_request, limit, length(out, 1), shifts, skip),
            KeyCache(scales, page_stride, boxes, pages, limit, table, table_stride, table_columns),
            address(weights),
            stride_bytes(weights, 0),
            (q_scales, q_scales_request, q_scales_row),
            address(out),
            stride_bytes(out, 0),
            clean,
        )
        kernel.launch(grid=[ctas, 1, 1], block=[config.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    def tiles(self, rows: int, count: int) -> Any:
        """Shared-memory layout of so many tiles of rows of codes, as BlackwellConfig.operand has them."""
        kinds = tcgen05.SmemLayoutAtomKind
        atom = tcgen05.make_smem_layout_atom(kinds.K_SW64 if self.config.mxfp4 else kinds.K_SW128, Float8E4M3FN)
        return cute.tile_to_shape(atom, (rows, self.config.row_bytes, count), (0, 1, 2))

    @cute.kernel
    def kernel(
        self,
        query_copy: cute.CopyAtom,
        query_source: cute.Tensor,
        key_copy: cute.CopyAtom,
        query_tiles: cute.ComposedLayout,
        key_tiles: cute.ComposedLayout,
        groups: RowGroups,
        windows: Windows,
        cache: KeyCache,
        weights: Int64,
        weights_stride: Int64,
        q_scales: tuple[Int64, Int64, Int64],
        out: Int64,
        out_stride: Int64,
        clean: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        allocator = SmemAllocator()
        keys, queries = (barriers.Ring.allocate(allocator, count) for count in (config.stages, config.query_stages))
        products, loaded = (allocator.allocate_array(Int64, n) for n in (config.product_places, config.buffers))
        ordered: Any = allocator.allocate_array(Int64, config.stages) if const_expr(config.mxfp4) else None
        bars = Bars(keys, queries, products, loaded, ordered)
        words = {
            name: allocator.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=ALIGNMENT)
            for name, count in config.words.items()
        }
        smem = Smem(**{name: tensor.iterator.toint() for name, tensor in words.items()})
        k, q = (
            allocator.allocate_tensor(Float8E4M3FN, layout.outer, byte_alignment=1024, swizzle=layout.inner)
            for layout in (key_tiles, query_tiles)
        )
        producer_warp = config.warpgroups * 4
        mma_warp, scale_warp, fill_warp = producer_warp + 1, producer_warp + 2, producer_warp + 3
        if warp == producer_warp:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if warp == mma_warp:
            ptx.allocate_tensor_memory(smem.tensor, config.tensor_columns)
            ptx.relinquish_tensor_memory()
        if thread == fill_warp * WARP:
            # one arrival announces bytes, one per lane what lanes copy; every consumer warp releases a stage, and the
            # MMA warp its header
            bars.keys.initialize(1 if self.paged else 1 + WARP, config.warpgroups * 4 + 1)
            bars.queries.initialize(1 + WARP, config.warpgroups * 4)
            barriers.initialize(bars.products, config.product_places, 1)
            barriers.initialize(bars.loaded, config.buffers, config.row_splits * 4)
            if const_expr(config.mxfp4):
                barriers.initialize(bars.ordered, config.stages, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_wait()
        tensor = ptx.load_shared_s32(smem.tensor)
        if const_expr(self.paged):
            prefetch_lengths(warp, config.threads // WARP, groups, windows, cache)
        scheduler = TileScheduler(
            config.rows, config.threads // WARP, self.paged, config.keys, groups, windows, smem.counts
        )
        if scheduler.is_counted():
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()

        sharers = (config.warpgroups * 4 + 1) * WARP
        if warp >= producer_warp:
            if const_expr(self.has_many_weights):
                cute.arch.setmaxregister_decrease(REGISTERS[0])
            if warp == producer_warp:
                key_part = ptx.tensor_map(key_copy), k.iterator.toint()
                query_part = QueryCopy.of(
                    query_copy, query_source, q, query_tiles.outer, config.heads, config.row_bytes
                )
                context = scheduler, groups, windows, cache, smem, bars, (weights, weights_stride)
                producer = Producer(
                    config, self.paged, *context, key_part, query_part, q_scales if const_expr(config.mxfp4) else None
                )
                producer.run(Int32(0))
            elif warp == mma_warp:
                mma_role = MmaWarp(config, bars, smem, k.iterator.toint(), q.iterator.toint(), tensor)
                mma_role.run()
                cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)
                ptx.free_tensor_memory(tensor, config.tensor_columns)
            elif warp == scale_warp:
                if const_expr(config.mxfp4):
                    scale_role = ScaleWarp(config, bars, smem)
                    scale_role.run()
            elif clean != 0:
                fill = Fill(self.paged, groups, windows, out, out_stride)
                fill.run(cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
        else:
            if const_expr(self.has_many_weights):
                cute.arch.setmaxregister_increase(REGISTERS[1])
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            own = thread % wgmma.WARPGROUP
            rest = groups, windows, bars, smem, tensor, out, out_stride
            consumer = Consumer(config, self.paged, warpgroup, own, *rest)
            if const_expr(config.rows % config.row_splits == 0):
                split = warpgroup if const_expr(config.row_splits > 1) else Int32(0)
                consumer.run(split, config.held)
            else:
                for split in range_constexpr(config.row_splits):
                    if warpgroup == split:
                        consumer.run(Int32(split), config.rows_of_split(split))
            cute.arch.barrier(barrier_id=SUMS_DONE, number_of_threads=sharers)


# ---- key


@dataclass(frozen=True)
class BlackwellLogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row: a multiple of 16, at most 64
    rows    of a group, at most most_rows
    paged   whether keys lie in pages, of a multiple of 64
    mxfp4   whether queries and keys are MXFP4, else they are FP8
    """

    kernel_name: ClassVar[str] = "indexer.blackwell.logits"
    heads: int = 64
    rows: int = 4
    paged: bool = False
    mxfp4: bool = False

    @property
    def config(self) -> BlackwellConfig:
        return BlackwellConfig(self.heads, self.rows, PAGE_BOX if self.paged else KEY_TILE, self.mxfp4)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = ["tcgen05.mma", "tcgen05.ld", "tma.load", "cp.async", "mbarrier", "griddepcontrol"]
        return (*used, *["bulk.load"] * self.paged, *["tcgen05.cp"] * self.mxfp4)

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return BlackwellLogitsKernel(self), fake_arguments(has_q_scales=True)


# ---- times, for perf/roofline.py


def work() -> tuple[Work, ...]:
    """What perf/roofline.py makes times of."""
    decodes = [_work(rows, True, mxfp4) for mxfp4, most in ((False, 4), (True, 3)) for rows in range(1, most + 1)]
    return (*decodes, _work(most_rows(HEADS, False), False, False), _work(most_rows(HEADS, True), False, True))


HEADS = 64
DECODES = (64, 8192), (256, 32768)
"""Requests of a call, and keys of each."""

PREFILLS = (4096, 4096), (4096, 16384), (4096, 65536)
"""Rows of a call, and keys: the last row sees all, the one before that by RATIO one less."""

RATIO = 4

FP32_RATE = 128
"""Additions, or multiplications with one, of a multiprocessor in a clock: the data sheet's. A packed one is two."""


def _work(rows: int, paged: bool, mxfp4: bool) -> Work:
    config = BlackwellConfig(HEADS, rows, PAGE_BOX if paged else KEY_TILE, mxfp4)
    keys, scales, scores = KEY_TILE * config.row_bytes, KEY_TILE * 4, KEY_TILE * rows * 4
    products = 2 * KEY_TILE * config.columns * INDEX_DIM
    smem = {"copies": keys + scales, "operands": keys + config.columns * config.row_bytes, "scales": scales}
    if mxfp4:
        smem["scales"] = 3 * scales
    shapes = []
    name = " mxfp4" * mxfp4
    if paged:
        for requests, length in DECODES:
            tiles = requests * length / KEY_TILE
            more = f" next_n={rows}" * (rows > 1)
            shapes.append(Shape(f"b{requests} ctx{length}{more}{name}", tiles, tiles * (keys + scales + scores)))
    else:
        for count, length in PREFILLS:
            pairs = count * (length - (count - 1) / (2 * RATIO))
            moved = pairs * 4 + length * (config.row_bytes + 4) + count * HEADS * (config.row_bytes + 4)
            shapes.append(Shape(f"sq{count} sk{length}{name}", pairs / rows / KEY_TILE, moved))
    return Work(
        op="paged_mqa_logits" if paged else "mqa_logits",
        kernel=("MXFP4" if mxfp4 else "FP8") + f", {rows} row{'s' * (rows > 1)}",
        tile=f"{KEY_TILE} keys, {HEADS} heads of {rows} row{'s' * (rows > 1)}",
        blocks=1,
        hbm=(keys + scales if paged else 0) + scores,
        mma={"e2m1" if mxfp4 else "e4m3": products},
        smem=smem,
        flops=products,
        shapes=tuple(shapes),
        # of every product its share of a sum, and of every second one x + |x|
        threads={"sums": 1.5 * KEY_TILE * config.columns / FP32_RATE},
    )
