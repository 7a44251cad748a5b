# SPDX-License-Identifier: Apache-2.0
"""MXFP4 scores on Hopper (mqa_logits, paged_mqa_logits): e2m1 codes multiplied as e4m3 ones.

    warps 0 ..     2 to 4 consumer warpgroups: dequantization, wgmma, epilogue; each has every second (third, fourth)
                   tile
    then 2 to 4    producer warps, one for each consumer warpgroup (producer.py); of keys that have come they prepare
                   the scales
    then 1         fill warp: writes -inf where a row sees no key, if that is wanted (params.Fill)

    keys      gmem --TMA--> ring of packed keys --dequantize--> registers -----+
    scales    gmem --> ring of keys --producer--> prepared scales --^          +--wgmma--> [64 keys, columns] in fp32
    queries   gmem --TMA--> ring of packed queries --dequantize--> smem -------+              | relu, weights, sums
                                                                                              v
                                                                                            scores

An e2m1 number times 2^6 to 2^-8 is an e4m3 number. So a row, which is a key or a query head, becomes e4m3 codes times
one power of two, if its scale blocks' scales are at most 14 binary orders below the largest: that one's codes are taken
times 2^6, and the row counts 2^-6 times its scale. Rows with smaller scales ("far" ones) have all their codes taken
times 2^6; how far each scale block is below the largest remains to be applied to its products. Signs are opposite in
all of it, keys and queries alike.

A tile is 128 keys, which a warpgroup multiplies in two halves, one after the other. A warp decodes its 16 keys of a
half from shared memory into the registers that its products take them from. Which column comes where in a product is
free as long as queries agree: a lane has one scale block of two keys, which it loads
with two instructions and whose scales it applies with one table look-up each.

Scores of far rows, be it a key or one of a query row's heads, come from products of single warps, whose scale blocks
are summed apart and scaled one by one. So do those of heads whose weight times their row's scale is 2^103 or more, of
which BOUND times as much is no fp32 number. Which way a score comes depends on its row and its key alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, convert, mma_sync, ptx, wgmma
from cute_kernels.dsl.convert import E2M1_IN_E4M3
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer.hopper.epilogue import Epilogue
from cute_kernels.indexer.params import (
    COUNTERS,
    KEY_TILE,
    LAST_OF_GROUP,
    WARP,
    Fill,
    KeyCache,
    RowGroups,
    TileScheduler,
    Windows,
    fake_arguments,
)
from cute_kernels.indexer.producer import (
    END,
    HEADER,
    QUERY_STAGES,
    KeyTile,
    Producer,
    QueryCopy,
    advance,
    ask_for_ends,
    code_rows,
    prefetch_lengths,
)
from cute_kernels.runtime.compile import KernelKey

HALVES = 2
"""Of a tile, 64 keys each."""

STAGES = {1: 12, 2: 12, 3: 6, 4: 6}
"""Of the ring of keys, by the rows of a group; for more rows there is room for fewer, and they need fewer."""

WARPGROUPS = {1: 4, 2: 3, 3: 2, 4: 2}
"""Of consumers, each of which has every fourth, third or second tile."""

REGISTERS = {1: (40, 96), 2: (56, 152), 3: (56, 224), 4: (56, 224)}
"""Per thread, of producer and fill warps and of consumers. The CTA has whole warpgroups, and together they have what
they were launched with."""

REGISTERS_BESIDE_LESS = (40, 232)
"""Of 256 columns, where producer warps have least to do."""

STRIP = 16
"""Keys or query heads that a warp decodes together: its rows of a warpgroup's products."""

BEHIND = {1: 1, 2: 2, 3: 1, 4: 1}
"""Tiles that a producer has asked for before it looks at the scales of the first, by the rows of a group: fewer than a
consumer has stages."""

DECODED = INDEX_DIM
"""Bytes of a key's or a head's e4m3 codes."""

LARGEST = 6
"""Exponent that the scale block of a row with the largest scale gets in e4m3."""

RAISED = 2.0**-LARGEST

BOUND = 2.0**25
"""Of the products of two rows' codes: 128 times 384 times 384 is less, and no code is NaN."""

LARGE, INFINITE = 0x73000000, 0x7F800000
"""Bits of 2^103, BOUND times which is no fp32 number, and of infinity."""

SCALE_BLOCKS = 4
"""Of a row, with a scale each; lane i of every four has scale block i % 4."""

BARRIER = 1
"""Of the first consumer warpgroup, and so on."""


@dataclass(frozen=True)
class Mxfp4Config:
    """Sizes of one kernel: `heads` of a query row, at most `rows` of them in a group, keys copied by TMA boxes of
    `box`. A consumer warpgroup decodes the queries of its group into shared memory once."""

    heads: int
    rows: int
    box: int

    keys: ClassVar[int] = HALVES * KEY_TILE
    row_bytes: ClassVar[int] = INDEX_DIM // 2
    accumulators: ClassVar[int] = 1
    shares_queries: ClassVar[bool] = False

    @property
    def columns(self) -> int:
        """Of a tile's products."""
        return self.heads * self.rows

    @property
    def warpgroups(self) -> int:
        """Of consumers."""
        return WARPGROUPS[self.rows]

    @property
    def producers(self) -> int:
        """Warps, one for each consumer warpgroup."""
        return self.warpgroups

    @property
    def stages(self) -> int:
        """Of the ring of keys."""
        return STAGES[self.rows]

    @property
    def query_stages(self) -> int:
        """Of all warpgroups."""
        return self.warpgroups * QUERY_STAGES

    @property
    def q_scale_words(self) -> int:
        """Of a query stage."""
        return self.columns

    @property
    def registers(self) -> tuple[int, int]:
        return REGISTERS_BESIDE_LESS if self.columns == 256 and self.box == KEY_TILE else REGISTERS[self.rows]

    @property
    def warps_beside(self) -> int:
        """Producer warps and the fill warp."""
        return self.producers + 1

    @property
    def threads(self) -> int:
        """Of a CTA: whole warpgroups."""
        return round_up(self.warpgroups * 4 + self.warps_beside, 4) * WARP

    @property
    def boxes(self) -> int:
        """Of a tile."""
        return self.keys // self.box

    # ---- shared memory

    @property
    def words(self) -> dict[str, int]:
        """What shared memory holds besides operands and barriers, in words. The scales of keys and of query heads are
        four bytes each; those of heads are replaced by what is not in the e4m3 codes. The table has the e4m3 codes."""
        return {
            "headers": self.stages * HEADER,
            "scales": self.stages * self.keys,
            "weights": self.query_stages * self.columns,
            "windows": self.query_stages * 2 * self.rows,
            "counts": COUNTERS,
            "prepared_scales": self.stages * self.keys * 2,
            "progress": self.warpgroups * 2,
            "q_scales": self.query_stages * self.q_scale_words,
            "table": round_up(2 * len(E2M1_IN_E4M3) + 1, 4),
        }

    @property
    def smem_bytes(self) -> int:
        small = (2 * self.stages + self.query_stages) * barriers.BYTES_PER_STAGE
        small += sum(round_up(count * 4, 16) for count in self.words.values())
        packed = (self.stages * self.keys + self.query_stages * self.columns) * self.row_bytes
        return round_up(small, 1024) + packed + self.warpgroups * self.columns * DECODED


class Smem(NamedTuple):
    """Addresses in shared memory: Mxfp4Config.words, packed keys and queries."""

    headers: Any
    scales: Any
    weights: Any
    windows: Any
    counts: Any
    prepared_scales: Any
    progress: Any
    q_scales: Any
    table: Any
    keys: Any
    queries: Any


@dataclass(frozen=True)
class Bars:
    """Rings of keys and queries; of keys once more, whose full barriers say that the scales have been prepared."""

    keys: barriers.Ring
    queries: barriers.Ring
    prepared: barriers.Ring


# ---- producer


@dataclass(frozen=True)
class ScalePreparer:
    """What a producer warp does when keys have come: it looks at their scales for the warpgroup that decodes them.

    BEHIND tiles after the producer has asked for one, it waits for it. How far it is is in shared memory, so that the
    producer's loops need not know: how many tiles it is behind, and of the next one the stage and, in bit 8, the ring's
    phase there; END after the last tile.

    place   address of these two words, the warp's own
    """

    config: Mxfp4Config
    bars: Bars
    smem: Smem
    place: Any

    @cute.jit
    def start(self, state: Any) -> None:
        if cute.arch.lane_idx() == 0:
            ptx.store_shared_64(self.place, Int32(0), state)
        cute.arch.sync_warp()

    @cute.jit
    def follow(self) -> None:
        """After the producer has asked for a tile."""
        behind, state = ptx.load_shared_64(self.place)
        if behind < BEHIND[self.config.rows]:
            behind += 1
        else:
            state = self.prepare(state)
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ptx.store_shared_64(self.place, behind, state)
        cute.arch.sync_warp()

    @cute.jit
    def catch_up_unless(self, is_empty: Any) -> None:
        """Before the producer waits for a stage of queries: it may be in use by a group whose tiles wait for this
        warp."""
        if cute.arch.vote_any_sync(is_empty == 0):
            self.catch_up()

    @cute.jit
    def catch_up(self) -> None:
        """Be no tile behind."""
        behind, state = ptx.load_shared_64(self.place)
        while behind > 0:
            state = self.prepare(state)
            behind -= 1
        cute.arch.sync_warp()
        if cute.arch.lane_idx() == 0:
            ptx.store_shared_64(self.place, behind, state)
        cute.arch.sync_warp()

    @cute.jit
    def finish(self) -> None:
        """After the producer has asked for all tiles."""
        state = ptx.load_shared_64(self.place)[1]
        while state != END:
            state = self.prepare(state)

    @cute.jit
    def prepare(self, state: Any) -> Any:
        """Wait for a tile and look at its scales. Returns the state of the next one."""
        smem = self.smem
        lane = cute.arch.lane_idx()
        stage, phase = state & 0xFF, state >> 8
        self.bars.keys.wait_full(stage, phase)
        header = smem.headers + stage * (HEADER * 4)
        after = Int32(END)
        if ptx.load_shared_s32(header) >= 0:
            is_any_far = Int32(0)
            for i in range_constexpr(self.config.keys // WARP):
                key = stage * self.config.keys + i * WARP + lane
                entries, scale, is_far = prepare_row(ptx.load_shared_s32(smem.scales + key * 4))
                ptx.store_shared_64(smem.prepared_scales + key * 8, entries, scale.bitcast(Int32))
                is_any_far = Int32(1) if is_far else is_any_far
            is_any_far = Int32(1) if cute.arch.vote_any_sync(is_any_far != 0) else Int32(0)
            if lane == 0:
                ptx.store_shared_s32(header + (HEADER - 1) * 4, is_any_far)
            following, phase = advance(stage, phase, self.config)
            after = following | phase << 8
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(self.bars.prepared.full(stage))
        return after


# ---- dequantization

_BYTES = 0x00FF00FF
_ONE = 0x00010001
_MANY = 0x01F001F0
"""Bits of a number of at most 256 that is at least 16, in both halves of a word."""


class Rows(NamedTuple):
    """What a lane knows of rows r and r + 8 of a warp's 16, r = lane // 4, the former in the low half of each word:

    largest   ue8m0 byte of the largest scale
    far       all bits set if a scale block is too far below
    below     if so, how far the lane's scale block is, else 0
    """

    largest: Any
    far: Any
    below: Any


@cute.jit
def decode(words: Any, codes: Any, entries: tuple[Any, Any], sign: Any) -> None:
    """Decode 16 rows of packed codes at an address of shared memory. By one warp.

    entries   addresses of the codes that the lane's scale blocks of rows r and r + 8 take
    sign      sign_of(table)
    words     16 registers: of pieces 0 to 3, eight columns of the lane's scale block each, the words (row r, columns
              0 to 3), (row r + 8, the same), (row r, columns 4 to 7), (row r + 8, the same)
    """
    lane = cute.arch.lane_idx()
    for row in range_constexpr(2):
        packed = ptx.load_shared_128(codes + row * 512 + lane * 16)
        low, high = ptx.load_shared_64(entries[row])
        for piece in range_constexpr(4):
            first, second = convert.e4m3_from_e2m1x8(packed[piece], low, high, sign)
            words[piece * 4 + row], words[piece * 4 + 2 + row] = first, second


@cute.jit
def load_scales(scales: Any, table: Any) -> tuple[Rows, tuple[Any, Any]]:
    """What the scales of 16 rows say, at an address of shared memory, and addresses of the codes that the lane's scale
    blocks of rows r and r + 8 take. By one warp."""
    lane = cute.arch.lane_idx()
    own = ptx.load_shared_u8(scales + lane) | (ptx.load_shared_u8(scales + 32 + lane) << 16)
    largest = own
    for distance in (1, 2):
        largest = ptx.max_u16x2(largest, cute.arch.shuffle_sync_bfly(largest, distance))
    below = largest - own
    far, rest = Int32(0), Int32(0)
    is_many = (below + _ONE) & _MANY
    if cute.arch.vote_any_sync(is_many != 0):
        for distance in (1, 2):
            is_many |= cute.arch.shuffle_sync_bfly(is_many, distance)
        far = (Int32(0x0000FFFF) if is_many & 0xFFFF != 0 else Int32(0)) | (
            Int32(-0x10000) if is_many & -0x10000 != 0 else Int32(0)
        )
        rest, below = below & far, below & ~far
    return Rows(largest, far, rest), (table + (below & 0xFFFF) * 8, table + (below >> 16) * 8)


@cute.jit
def prepare_row(word: Any) -> tuple[Any, Any, Any]:
    """Of a row's four scales: for each scale block a byte, how far from the table's begin its codes are; what the row's
    e4m3 codes count; and whether the row is far."""
    pairs = word & _BYTES, (word >> 8) & _BYTES
    largest = ptx.max_u16x2(*pairs)
    largest = cutlass.max(largest & 0xFFFF, largest >> 16)
    below = largest * 0x01010101 - word
    is_far = ((below & _BYTES) + _ONE | (below >> 8 & _BYTES) + _ONE) & _MANY != 0
    return (Int32(0) if is_far else below << 3), row_scale(largest), is_far


@cute.jit
def decode_into(line: Any, codes: Any, scales: Any, table: Any) -> Rows:
    """As `decode`, into rows of 128 bytes of shared memory, where the swizzle of the products' operands has them.

    line   address of row r: of the 16, a multiple of 8 rows after a multiple of 1024 bytes
    """
    lane = cute.arch.lane_idx()
    sign = sign_of(table)
    rows, entries = load_scales(scales, table)
    for row in range_constexpr(2):
        packed = ptx.load_shared_128(codes + row * 512 + lane * 16)
        low, high = ptx.load_shared_64(entries[row])
        for piece in range_constexpr(4):
            found = convert.e4m3_from_e2m1x8(packed[piece], low, high, sign)
            for i in range_constexpr(2):
                ptx.store_shared_s32(line + row * 1024 + column_place(lane, piece, i) + lane % 4 * 4, found[i])
    return rows


def column_place(lane: Any, piece: Any, i: Any) -> Any:
    """Where four columns of each scale block are, in row lane // 4 of 8: words `i` of piece `piece`, as of `decode`."""
    return (piece * 2 + i ^ lane // 4) * 16


@cute.jit
def decode_heads(line: Any, codes: Any, scales: Any, below: Any, weights: Any, table: Any) -> Any:
    """As decode_into, of heads, whose weights are at an address of shared memory, and get what the heads' codes count.
    What these lack in far rows goes to another, a byte for each scale block. By one warp; 1 if a head is far,
    else 0."""
    lane = cute.arch.lane_idx()
    rows = decode_into(line, codes, scales, table)
    is_far = rows.far != 0
    for row in range_constexpr(2):
        ptx.store_shared_8(below + row * 32 + lane, rows.below >> (16 * row))
        if lane % 4 == 0:
            weight = weights + (row * 8 + lane // 4) * 4
            scaled = ptx.load_shared_f32(weight) * row_scale(upper_or_lower(rows.largest, 16 * row))
            ptx.store_shared_f32(weight, scaled)
            bits = scaled.bitcast(Int32) & 0x7FFFFFFF
            is_far = is_far | ((bits >= LARGE) & (bits < INFINITE))
    return Int32(1) if cute.arch.vote_any_sync(is_far) else Int32(0)


def upper_or_lower(word: Any, shift: Any) -> Any:
    """The 16 bits of a word that belong to row r (shift 0) or r + 8 (shift 16)."""
    return (word >> shift) & 0xFFFF


def row_scale(largest: Any) -> Any:
    """What a row's e4m3 codes count: fp32."""
    return convert.ue8m0_value(largest) * Float32(RAISED)


def power_below(exponent: Any) -> Any:
    """fp32 2^-exponent, 0 from 127 on."""
    return (cutlass.max(Int32(127) - exponent, Int32(0)) << 23).bitcast(Float32)


def sign_of(table: Any) -> Any:
    """E2M1_SIGN, in a register: the compiler would make sixteen of a number that it knows."""
    return ptx.load_shared_s32(table + 2 * len(convert.E2M1_IN_E4M3) * 4)


def fill_table(table: Any) -> None:
    """Write the e4m3 codes, and E2M1_SIGN behind them, to shared memory. By one thread."""
    numbers = [int.from_bytes(bytes(row[i : i + 4]), "little") for row in convert.E2M1_IN_E4M3 for i in (0, 4)]
    numbers += [convert.E2M1_SIGN] * (-len(numbers) % 4)
    for i in range(0, len(numbers), 4):
        ptx.store_shared_128(table + i * 4, numbers[i : i + 4])


# ---- MMA


@dataclass(frozen=True)
class Consumer:
    """A consumer warpgroup's mainloop.

    mma    the product of keys in registers, and the one that adds
    q      [columns, 128, warpgroups]
    sign   sign_of(table)
    """

    config: Mxfp4Config
    warpgroup: Any
    warp: Any
    bars: Bars
    smem: Smem
    epilogue: Epilogue
    mma: tuple[Any, Any]
    q: Any
    sign: Any

    @cute.jit
    def run(self) -> None:
        """Score the warpgroup's tiles."""
        config, bars, smem, mma, q = self.config, self.bars, self.smem, self.mma, self.q
        warpgroup, warp, lane = self.warpgroup, self.warp, self.epilogue.lane
        held, pairs_halves = self.epilogue.held, self.epilogue.pairs_halves
        products = wgmma.accumulators(mma[0], KEY_TILE, config.columns)
        keys, words = wgmma.row_registers(mma[0], Float8E4M3FN)
        rows = self.epilogue.allocate()
        decoded = q.iterator.toint() + warpgroup * (config.columns * DECODED)
        stage, phase, current, turn = warpgroup, Int32(0), Int32(-1), Int32(-1)
        is_running, far_rows = Int32(1), Int32(0)
        while is_running != 0:
            bars.prepared.wait_full(stage, phase)
            group, tagged_key, boxes, is_any_far = ptx.load_shared_128(smem.headers + stage * (HEADER * 4))
            tile = KeyTile(stage, cute.arch.make_warp_uniform(group), tagged_key, boxes)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != current:
                    current, turn = tile.group, turn + 1
                    query_stage = warpgroup * QUERY_STAGES + turn % QUERY_STAGES
                    bars.queries.wait_full(query_stage, turn // QUERY_STAGES & 1)
                    far_rows = self.decode_queries(query_stage, decoded)
                    _, first_row = self.epilogue.groups.coords(current, config.rows)
                    # rows that are not there may be anything
                    far_rows &= (1 << cutlass.min(self.epilogue.groups.count - first_row, config.rows)) - 1
                    self.epilogue.load_rows(rows, current, query_stage)
                query_stage = warpgroup * QUERY_STAGES + turn % QUERY_STAGES
                far = Int32(0)
                if (is_any_far != 0) | (far_rows != 0):
                    for half in cutlass.range(HALVES, unroll=1):
                        first = (stage * HALVES + half) * KEY_TILE
                        self.decode_keys(words, first)
                        own_rows, _ = load_scales(smem.scales + (first + warp * STRIP) * 4, smem.table)
                        is_far_key = upper_or_lower(own_rows.far, (lane & 2) * 8) != 0
                        found = Int32(-1) if is_far_key else far_rows >> (Int32(0) if pairs_halves else lane & 1)
                        sums = self.add_far(words, own_rows, query_stage, decoded)
                        wanted = [found >> 2 * i & 1 != 0 for i in range(held)]
                        if const_expr(pairs_halves):
                            wanted = [wanted[0] & (lane & 1 == half)]
                        self.epilogue.store(0, sums, rows, tile, self.load_scale(first), wanted, half)
                        far |= (found & 0xFF) << half * 8
                sums, own_half = [], lane & 1
                for half in range_constexpr(HALVES):
                    first = (stage * HALVES + half) * KEY_TILE
                    self.decode_keys(words, first)
                    if const_expr(not pairs_halves):
                        own_half = Int32(half)
                    if const_expr(half == 0 or not pairs_halves):
                        scale = self.load_scale((stage * HALVES + own_half) * KEY_TILE)
                    if const_expr(half == HALVES - 1):
                        cute.arch.sync_warp()
                        # asking for the scale, which is never that NaN, makes the arrival wait until it has come
                        if (lane == 0) & (scale.bitcast(Int32) != -1):
                            cute.arch.mbarrier_arrive(bars.keys.empty(stage))
                    wgmma.multiply_registers(*mma, products, keys, q, warpgroup)
                    wgmma.wait(0)
                    sums += self.epilogue.sum_heads(0, products, rows.weights)
                    if const_expr(half == HALVES - 1 or not pairs_halves):
                        is_near = [far >> (2 * i + own_half * 8) & 1 == 0 for i in range(held)]
                        totals = self.epilogue.reduce_quad(sums)
                        self.epilogue.store(0, totals, rows, tile, scale, is_near, own_half)
                        sums = []
                if (lane == 0) & (tile.tagged_key & LAST_OF_GROUP != 0):
                    cute.arch.mbarrier_arrive(bars.queries.empty(query_stage))
                stage, phase = advance(stage, phase, config)

    def load_scale(self, first: Any) -> Any:
        """What the thread's key counts, of the 64 from number `first` of the ring on."""
        return ptx.load_shared_f32(self.smem.prepared_scales + (first + self.epilogue.own) * 8 + 4)

    @cute.jit
    def decode_keys(self, words: Any, first: Any) -> None:
        """As `decode`, the warp's 16 of the 64 keys from number `first` of the ring on."""
        smem, lane = self.smem, self.epilogue.lane
        strip = first + self.warp * STRIP
        places = smem.prepared_scales + strip * 8 + lane // 4 * 8 + lane % 4
        entries = [smem.table + ptx.load_shared_u8(places + 64 * i) for i in range(2)]
        decode(words, smem.keys + strip * self.config.row_bytes, entries, self.sign)

    @cute.jit
    def decode_queries(self, query_stage: Any, decoded: Any) -> Any:
        """A group's queries, as the warpgroup's products take them; weights get the heads' scales. By the warpgroup.
        Returns which rows have a far head, a bit each."""
        config, smem = self.config, self.smem
        lane = cute.arch.lane_idx()
        barrier = self.warpgroup + BARRIER
        # nobody multiplies with what was there
        cute.arch.barrier(barrier_id=barrier, number_of_threads=wgmma.WARPGROUP)
        found = Int32(0)
        for strip in cutlass.range(self.warp, config.columns // STRIP, wgmma.WARPGROUP // WARP, unroll=1):
            first = query_stage * config.columns + strip * STRIP
            line = decoded + (strip * STRIP + lane // 4) * DECODED
            codes, scales = smem.queries + first * config.row_bytes, smem.q_scales + first * 4
            # what the scales lack replaces them
            is_far = decode_heads(line, codes, scales, scales, smem.weights + first * 4, smem.table)
            found |= is_far << (strip * STRIP // config.heads)
        cute.arch.fence_view_async_shared()
        far_rows = Int32(0)
        for row in range_constexpr(config.rows):
            far_rows |= ptx.any_of_group(barrier, wgmma.WARPGROUP, found >> row & 1) << row
        return far_rows

    @cute.jit
    def add_far(self, words: Any, own_rows: Rows, query_stage: Any, decoded: Any) -> Any:
        """Sums over heads, as Epilogue.add_heads, with all scale blocks' scales applied to their products. By one
        warp."""
        config, smem, lane = self.config, self.smem, self.epilogue.lane
        scale_block = lane % 4
        sums = []
        for row in range_constexpr(config.rows):
            low, high = Float32(0.0), Float32(0.0)
            for eight in cutlass.range(config.heads // 8, unroll=1):
                first = row * config.heads + eight * 8
                line = decoded + (first + lane // 4) * DECODED + scale_block * 4
                own = query_stage * config.columns + first + scale_block * 2
                head_below = ptx.load_shared_64(smem.q_scales + own * 4)
                total = cute.make_rmem_tensor((4,), Float32)
                total.fill(0.0)
                for i in cutlass.range(SCALE_BLOCKS, unroll=1):
                    part = [Float32(0.0)] * 4
                    for piece in range_constexpr(4):
                        # the other scale blocks' codes count nothing
                        keys = [words[piece * 4 + j] if scale_block == i else Int32(0) for j in range(4)]
                        heads = [ptx.load_shared_s32(line + (piece * 32 + j * 16 ^ (lane // 4 * 16))) for j in range(2)]
                        part = mma_sync.multiply_e4m3(keys, heads, part)
                    below = cute.arch.shuffle_sync(own_rows.below, (lane & -4) + i)
                    for j in range_constexpr(4):
                        exponent = ((below >> (j // 2 * 16)) & 0xFF) + ((head_below[j % 2] >> (8 * i)) & 0xFF)
                        total[j] = ptx.fma_rn(part[j], power_below(exponent), total[j])
                weights = ptx.load_shared_f32x2(smem.weights + own * 4)
                for j in range_constexpr(2):
                    low = ptx.fma_rn(ptx.relu(total[j]), weights[j], low)
                    high = ptx.fma_rn(ptx.relu(total[2 + j]), weights[j], high)
            sums.append([low, high])
        return self.epilogue.reduce_quad(sums)


# ---- kernel


class Mxfp4LogitsKernel:
    """Entry point: as that of hopper/logits.py, and before what follows these the address of the queries' scales and
    their strides in bytes, by request and row."""

    def __init__(self, key: Mxfp4LogitsKey) -> None:
        self.config, self.paged = key.config, key.paged
        self.box = key.box if key.paged else self.config.keys
        kind = f"paged_mqa_logits_mxfp4_b{key.box}" if key.paged else "mqa_logits_mxfp4"
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
        use_pdl: Boolean,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        config, width = self.config, self.config.row_bytes
        query_rows = code_rows(q, width, (Int32(config.heads), row_count, requests), (q_head, q_row, q_request))
        key_rows = code_rows(keys, width, (page_rows, pages), (key_stride, page_stride))
        boxes = cute.fast_divmod_create_divisor_v2(cute.ceil_div(page_rows, config.box))
        load = cpasync.CopyBulkTensorTileG2SOp()
        query_tiles, key_tiles = (
            cute.make_layout((rows, width, count), stride=(width, 1, rows * width))
            for rows, count in (
                (config.heads, config.query_stages * config.rows),
                (self.box, config.stages * (config.keys // self.box)),
            )
        )
        query_copy, query_source = cpasync.make_tiled_tma_atom(load, query_rows, query_tiles, (config.heads, width))
        key_copy, _ = cpasync.make_tiled_tma_atom(load, key_rows, key_tiles, (self.box, width))
        kernel = self.kernel(
            query_copy,
            query_source,
            key_copy,
            query_tiles,
            wgmma.swizzled_tiles(Float8E4M3FN, config.columns, config.warpgroups),
            *(wgmma.make_mma_of_registers(Float8E4M3FN, config.columns) for _ in range(2)),
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
        kernel.launch(
            grid=[ctas, 1, 1], block=[config.threads, 1, 1], min_blocks_per_mp=1, stream=stream, use_pdl=use_pdl
        )

    @cute.kernel
    def kernel(
        self,
        query_copy: cute.CopyAtom,
        query_source: cute.Tensor,
        key_copy: cute.CopyAtom,
        query_tiles: cute.Layout,
        query_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
        mma_more: cute.TiledMma,
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
        stages = config.stages, config.query_stages, config.stages
        bars = Bars(*(barriers.Ring.allocate(allocator, count) for count in stages))
        words = [
            allocator.allocate_tensor(Int32, cute.make_layout(count), byte_alignment=16)
            for count in config.words.values()
        ]
        q = allocator.allocate_tensor(Float8E4M3FN, query_layout.outer, byte_alignment=1024, swizzle=query_layout.inner)
        packed_keys = allocator.allocate_tensor(
            Float8E4M3FN, cute.make_layout(config.stages * config.keys * config.row_bytes), byte_alignment=128
        )
        packed_queries = allocator.allocate_tensor(Float8E4M3FN, query_tiles, byte_alignment=128)
        smem = Smem(*(tensor.iterator.toint() for tensor in (*words, packed_keys, packed_queries)))
        producer_warp, fill_warp = config.warpgroups * 4, config.warpgroups * 5
        ends: Any = None
        if const_expr(self.paged):
            ends = ask_for_ends((warp >= producer_warp) & (warp < fill_warp), groups, windows, config.rows)
        # by consumers, which have nothing else to do yet. One arrival announces bytes, one per lane what lanes copy;
        # every warp that uses a stage releases it
        for i in range_constexpr(config.warpgroups):
            if thread == i * wgmma.WARPGROUP:
                bars.keys.initialize(1 if self.paged else 1 + WARP, 4, i, config.warpgroups)
                bars.prepared.initialize(1, 4, i, config.warpgroups)
        if thread == WARP:
            bars.queries.initialize(1 + WARP, 4)
        if thread == 2 * WARP:
            fill_table(smem.table)
        if warp == 3:
            for copy in (query_copy, key_copy):
                cpasync.prefetch_descriptor(copy)
        if const_expr(self.paged):
            prefetch_lengths(warp, config.threads // WARP, groups, windows, cache)
        cute.arch.griddepcontrol_wait()
        cute.arch.sync_threads()
        cute.arch.griddepcontrol_launch_dependents()
        scheduler = TileScheduler(
            config.rows, config.threads // WARP, self.paged, config.keys, groups, windows, smem.counts, ends
        )
        if scheduler.is_counted():
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()

        wgmma.overwrite(mma)
        wgmma.accumulate(mma_more)
        if warp >= producer_warp:
            cute.arch.setmaxregister_decrease(config.registers[0])
            if warp < fill_warp:
                role = cute.arch.make_warp_uniform(warp - producer_warp)
                preparer = ScalePreparer(config, bars, smem, smem.progress + role * 8)
                key_part = ptx.tensor_map(key_copy), smem.keys
                query_part = QueryCopy.of(
                    query_copy, query_source, packed_queries, query_tiles, config.heads, config.row_bytes
                )
                context = scheduler, groups, windows, cache, smem, bars, (weights, weights_stride)
                producer = Producer(config, self.paged, *context, key_part, query_part, q_scales, preparer)
                preparer.start(role)
                producer.run(role)
                preparer.finish()
            elif (warp == fill_warp) & (clean != 0):
                fill = Fill(self.paged, groups, windows, out, out_stride)
                fill.run(cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
        else:
            cute.arch.setmaxregister_increase(config.registers[1])
            lane = thread % WARP
            warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
            own_warp = cute.arch.make_warp_uniform(thread % wgmma.WARPGROUP // WARP)
            sign = sign_of(smem.table)
            own = own_warp * STRIP + lane // 4 + (lane & 2) * 4
            place = out, out_stride, lane, own
            sums: dict[str, Any] = {"bound": BOUND, "pairs_halves": config.rows == 1}
            epilogue = Epilogue(config, self.paged, groups, windows, smem, *place, **sums)
            consumer = Consumer(config, warpgroup, own_warp, bars, smem, epilogue, (mma, mma_more), q, sign)
            consumer.run()


# ---- key


@dataclass(frozen=True)
class Mxfp4LogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row: a multiple of 16, at most 64
    rows    of a group, at most 256 / heads
    paged   whether keys lie in pages
    box     keys that a copy brings, 64 or 8: pages have a multiple of it
    """

    kernel_name: ClassVar[str] = "indexer.hopper.logits_mxfp4"
    heads: int = 64
    rows: int = 4
    paged: bool = False
    box: int = KEY_TILE

    @property
    def config(self) -> Mxfp4Config:
        return Mxfp4Config(self.heads, self.rows, self.box)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "wgmma", "tma.load", "cp.async", "mbarrier", "griddepcontrol"
        return (*used, *["bulk.load"] * self.paged, "mma.sync")

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return Mxfp4LogitsKernel(self), fake_arguments(has_q_scales=True, has_pdl=True)
