# SPDX-License-Identifier: Apache-2.0
"""Scores on every architecture from sm_80 on (mqa_logits, paged_mqa_logits): f16 or bf16 products by mma.sync.

    8 warps    all do the same: they count tiles (params.TileScheduler), write -inf where a row sees no key, if that is
               wanted (params.Fill), and then score, in teams of one warp for every row of a group

    keys       gmem --cp.async--> the team's ring [stages][32 keys] --every warp--> registers, converted (mma B) ---+
    queries    gmem --> registers, converted (mma A), [heads of the warp's row, 128] -------------------------------+
                                                                                                                    v
                                          scores <-- relu, weights, sums over heads <-- products [heads, 32 keys], fp32

A team takes every second (fourth, eighth) tile of the CTA's share, in steps of STEP keys: it copies a step's keys to
its own ring, and then each of its warps scores its row against all of them. Of each work tile it first has copies of
keys on their way, then loads the queries: they stay in registers as operands, converted, while the keys of a step are
converted by every warp. A lane l = 4 r + c has heads r and r + 8 of every 16, and of every 8 keys 2 c and 2 c + 1. It
adds its heads up, and eight lanes exchange what they have until each is left with one key. The order of these sums is
the same for every key, in every kernel here.

Shared memory: [teams][stages] of a step's codes, their scales [STEP] of 4 bytes, and a word that says by bit which of
the keys exist; then the counts of tiles. A key's chunks of 16 bytes lie so that what eight lanes read at a time is in
different banks: of 128-byte keys at chunk ^ (4 if the key is odd), of 64-byte keys in order.

Operands are f16 or bf16 pairs, exactly. Lane l = 4 r + c has, of a key or a head, the chunks of 16 bytes that c says: c
and c + 4 of e4m3 codes, c of e2m1 codes, which is one scale block. In that order the 128 columns are summed: as queries
and keys agree, it may be any.

    e4m3   f16 pairs. Where the GPU converts e4m3, their values; elsewhere 2^-8 of them, by moving bits
    e2m1   bf16 pairs, a quarter of their values with the scale block's scale: so bf16 holds the products of all eight
           codes and all scales, 2^-127 to 2^127
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, mma_sync, ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer.params import COUNTERS, KEY_TILE, WARP, Fill, RowGroups, TileScheduler, Windows, WorkTile
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number
from cute_kernels.runtime.compile import KernelKey

WARPS = 8
"""With 8 warps, each has the registers for a row's queries, 128 per lane of 64 heads."""

STEP = WARP
"""Keys of a step: one for every lane, where scores are stored and pages looked up."""

STEPS = KEY_TILE // STEP
"""Of a tile."""

CHUNK = 16
MOST_STAGES = 6
ROWS = (1, 2, 4)
"""Of a group: warps of a team."""

HEAD_TILE = 16
MOST_HEADS = 64

PAIR = 16
"""Keys whose products are formed at a time: eight independent sums of 64 heads."""

E4M3_ARCH = 89
"""First architecture that converts e4m3."""


@dataclass(frozen=True)
class PortableConfig:
    """Sizes of a kernel: `heads` of a query row, a multiple of HEAD_TILE, `rows` of a group, bytes of a key's codes."""

    arch: str
    heads: int
    rows: int
    code_bytes: int

    def __post_init__(self) -> None:
        if self.heads % HEAD_TILE or not 0 < self.heads <= MOST_HEADS:
            raise ValueError(f"heads: expected a multiple of {HEAD_TILE} up to {MOST_HEADS}, got {self.heads}")
        if self.rows not in ROWS:
            raise ValueError(f"rows: expected one of {ROWS}, got {self.rows}")

    @property
    def keys(self) -> int:
        """Of a tile, as shares are counted."""
        return KEY_TILE

    @property
    def tiles(self) -> int:
        """Of heads, as the tensor cores take them."""
        return self.heads // HEAD_TILE

    @property
    def teams(self) -> int:
        return WARPS // self.rows

    @property
    def threads(self) -> int:
        return WARPS * WARP

    @property
    def chunks(self) -> int:
        """Of a key's codes."""
        return self.code_bytes // CHUNK

    @property
    def copies(self) -> int:
        """Chunks of a step that each lane of a team copies."""
        return STEP * self.chunks // (WARP * self.rows)

    @property
    def stages(self) -> int:
        """Of a team's ring: one in use, the others on their way."""
        room = SMEM_BYTES[self.arch] - COUNTERS * 4
        return min(MOST_STAGES, room // (self.teams * self.stage_bytes))

    # ---- shared memory, in bytes

    @property
    def scales_at(self) -> int:
        """In a stage."""
        return STEP * self.code_bytes

    @property
    def mask_at(self) -> int:
        """In a stage."""
        return self.scales_at + STEP * 4

    @property
    def stage_bytes(self) -> int:
        return self.mask_at + CHUNK

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def counts_at(self) -> int:
        return self.teams * self.ring_bytes

    @property
    def smem_bytes(self) -> int:
        return self.counts_at + COUNTERS * 4


def chunk_at(key: int, chunk: int, code_bytes: int) -> int:
    """Place of a key's chunk among a step's codes. Also of a traced key and chunk."""
    turned = (chunk ^ ((key & 1) * 4)) if code_bytes == INDEX_DIM else chunk
    return key * code_bytes + turned * CHUNK


def key_of_lane(lane: int) -> int:
    """Which of a step's keys a lane stores the score of. Also of a traced lane."""
    return (lane & 4) * 4 + (lane & 8) + (lane & 3) * 2 + (lane >> 4)


# ---- dequantization


class Fp8Operands:
    """Codes e4m3, 128 bytes. A key's scale is an fp32 number that its score is multiplied with."""

    is_f16 = True
    code_bytes = 128

    def __init__(self, arch: str) -> None:
        self.converts = arch_number(arch) >= E4M3_ARCH
        self.factor = 1.0 if self.converts else 2.0**16

    def factors(self, scale: Any, lane: Any) -> Any:
        """What `pairs` needs of a key's or a head's scales."""
        return None

    def pairs(self, word: Any, factors: Any) -> list[Any]:
        """Of a word of codes: two."""
        return list(ptx.f16x2_of_e4m3x4(word) if self.converts else convert.f16x2_of_e4m3x4_by_bits(word))


class Mxfp4Operands:
    """Codes e2m1, 64 bytes, with a ue8m0 scale for every 32 of them, four in a word."""

    is_f16 = False
    code_bytes = 64
    factor = 16.0
    """Of a product, as each operand is a quarter of its value."""

    def factors(self, scale: Any, lane: Any) -> Any:
        """What `pairs` needs of a key's or a head's scales."""
        return convert.e2m1_scale_pairs((Int32(scale) >> ((lane & 3) * 8)) & 0xFF)

    def pairs(self, word: Any, factors: Any) -> list[Any]:
        """Of a word of codes: four."""
        found = convert.bf16x2_of_e2m1x8(word)
        for factor in factors:
            found = [ptx.multiply_bf16x2(pair, factor) for pair in found]
        return found


def operands_of(mxfp4: bool, arch: str) -> Any:
    return Mxfp4Operands() if mxfp4 else Fp8Operands(arch)


# ---- scores


class Queries(NamedTuple):
    """Addresses of codes and, of MXFP4, their scales, each with its strides by request, row and head; address and
    stride of the weights, all in bytes; and the number of heads."""

    codes: tuple[Any, Any, Any, Any]
    scales: tuple[Any, Any, Any, Any]
    weights: Any
    weights_stride: Any
    heads: Any


class KeyPages(NamedTuple):
    """Addresses of key 0 of page 0 and of its scale, bytes from key to key and from page to page, keys of a page as a
    divisor, number of pages, and the block table, which contiguous keys have not: all of them are in page 0."""

    codes: Any
    scales: Any
    stride: Any
    page_stride: Any
    page_rows: Any
    pages: Any
    table: Any
    table_stride: Any
    table_columns: Any


class Row(NamedTuple):
    """A warp's row: its keys from `first` to before `stop`, none if it does not exist; the address of its score of key
    0; and a lane's weights, of heads r, r + 8, r + 16 and so on."""

    first: Any
    stop: Any
    target: Any
    weights: list[Any]


@dataclass(frozen=True)
class Team:
    """A warp of a team.

    operands   of operands_of
    team       number of the team, member of the warp in it
    q          registers for the row's queries
    ring       address of the team's ring
    out        address of the scores; out_stride in bytes
    """

    config: PortableConfig
    operands: Any
    paged: bool
    groups: RowGroups
    windows: Windows
    queries: Queries
    keys: KeyPages
    team: Any
    member: Any
    q: mma_sync.Registers
    ring: Any
    out: Any
    out_stride: Any

    @property
    def is_fp8(self) -> bool:
        return self.config.code_bytes == INDEX_DIM

    @cute.jit
    def run(self, scheduler: TileScheduler) -> None:
        """Score the team's tiles of the CTA's share."""

        def score(work_tile: WorkTile, state: Any) -> Any:
            self.score(work_tile)
            return state

        scheduler.for_each(self.team, self.config.teams, score, Int32(0))

    @cute.jit
    def score(self, work_tile: WorkTile) -> None:
        """Score the team's tiles of a work tile."""
        config, ring = self.config, self.ring
        # what a lane's number leads to is computed where it is needed: kept over all work tiles, it takes too
        # many registers
        lane = ptx.again(cute.arch.lane_idx())
        ahead = const_expr(config.stages - 1)
        steps = (work_tile.count - work_tile.own + (work_tile.step - 1)) // work_tile.step * STEPS
        found = [self.load_pages(work_tile, Int32(i), steps, lane) for i in range(config.stages)]
        # the team may still be reading what the work tile before has left. And the loads of pages are all on their way
        # before one is waited for: loads are not moved past this
        self.sync_team()
        for i in range_constexpr(ahead):
            self.copy_keys_async(found[i], ring + i * config.stage_bytes, lane)
        page, place = found[ahead]
        row = self.load_row(work_tile, lane)
        stage, free = Int32(0), Int32(ahead)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.cp_async_wait_group(ahead - 1)
            # the stage is there for all, and all have released the one before it
            self.sync_team()
            own = ptx.again(lane)
            self.copy_keys_async((page, place), ring + free * config.stage_bytes, own)
            page, place = self.load_pages(work_tile, step + config.stages, steps, own)
            if row.first < row.stop:
                self.score_step(row, ring + stage * config.stage_bytes, self.first_key(work_tile, step), own)
            free = stage
            stage = Int32(0) if stage + 1 == config.stages else stage + 1
        cute.arch.cp_async_wait_group(0)

    def first_key(self, work_tile: WorkTile, step: Any) -> Any:
        return work_tile.first_key + (work_tile.own + step // STEPS * work_tile.step) * KEY_TILE + step % STEPS * STEP

    @cute.jit
    def sync_team(self) -> None:
        """Wait for the other warps of the team."""
        if const_expr(self.config.rows == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=self.team + 1, number_of_threads=self.config.rows * WARP)

    @cute.jit
    def load_pages(self, work_tile: WorkTile, step: Any, steps: Any, lane: Any) -> tuple[Any, Any]:
        """Page, negative if there is none, and place in it of a step's key for each lane. Nothing is read beyond the
        keys' end."""
        keys = self.keys
        key = self.first_key(work_tile, step) + lane
        is_wanted = (step < steps) & (key < work_tile.stop)
        page, place = (Int32(0) if is_wanted else Int32(-1)), key
        if const_expr(self.paged):
            column, place = divmod(key, keys.page_rows)
            address = keys.table + Int64(work_tile.request) * keys.table_stride + Int64(column) * 4
            page = ptx.load_global_s32_where(is_wanted & (column < keys.table_columns), address, is_shared=True)
            page = page if page < keys.pages else Int32(-1)
        return page, place

    @cute.jit
    def copy_keys_async(self, found: Any, stage: Any, lane: Any) -> None:
        """Have a step's keys copied to a stage: the warp's share of their codes, and by the first warp their scales and
        which of them exist."""
        config, keys, member = self.config, self.keys, self.member
        page, place = found
        there = cute.arch.vote_ballot_sync(page >= 0)
        offset = Int64(page) * keys.page_stride
        low, high = ptx.halves(keys.codes + offset + Int64(place) * keys.stride)
        at_once = const_expr(WARP // config.chunks)
        key, chunk = member * (config.copies * at_once) + lane // config.chunks, lane % config.chunks
        target = stage + chunk_at(key, chunk, config.code_bytes)
        for i in range_constexpr(config.copies):
            number = key + i * at_once
            source = ptx.pair(cute.arch.shuffle_sync(low, number), cute.arch.shuffle_sync(high, number))
            exists = (there >> number) & 1 != 0
            ptx.copy_async_128_once(target + i * (WARP * CHUNK), source + Int64(chunk * CHUNK), exists)
        if member == 0:
            scale = keys.scales + offset + Int64(place) * 4
            ptx.copy_async_32(stage + config.scales_at + lane * 4, scale, page >= 0)
            if lane == 0:
                ptx.store_shared_s32(stage + config.mask_at, there)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_row(self, work_tile: WorkTile, lane: Any) -> Row:
        """The warp's row of a group. Its queries become operand a: of 16 heads and word s, register 4 (8 m + s) has
        head r's first pair and the next head r + 8's; two further are the second pairs."""
        config, groups, queries, member = self.config, self.groups, self.queries, self.member
        r, c = lane >> 2, lane & 3
        number = work_tile.first_row + member
        is_row = number < groups.count
        first, stop, shift = self.windows.load(work_tile.request, number, is_row, self.paged)
        index = Int64(work_tile.request) * Int64(groups.count) + Int64(number)
        codes, scales = (
            where + Int64(work_tile.request) * request + Int64(number) * row
            for where, request, row, _ in (queries.codes, queries.scales)
        )
        loaded, weights = [], []
        for half in range_constexpr(2 * config.tiles):
            head = r + 8 * half
            exists = is_row & (head < queries.heads)
            at = codes + Int64(head) * queries.codes[3] + Int64(c * CHUNK)
            words = list(ptx.load_global_128_cached_where(exists, at))
            scale = Int32(0)
            if const_expr(self.is_fp8):
                words += ptx.load_global_128_cached_where(exists, at + INDEX_DIM // 2)
            else:
                scale = ptx.load_global_s32_where(exists, scales + Int64(head) * queries.scales[3], is_shared=True)
            weight = queries.weights + index * queries.weights_stride + Int64(head) * 4
            weight = ptx.load_global_s32_where(exists, weight, is_shared=True)
            weights.append((weight if exists else Int32(0)).bitcast(Float32))
            loaded.append(([word if exists else Int32(0) for word in words], scale if exists else Int32(0)))
        # all loads are on their way before one is waited for
        for half in range_constexpr(2 * config.tiles):
            words, scale = loaded[half]
            factors = self.operands.factors(scale, lane)
            pairs = [pair for word in words for pair in self.operands.pairs(word, factors)]
            for i in range_constexpr(16):
                self.q.put((half // 2 * 8 + i // 2) * 4 + i % 2 * 2 + half % 2, pairs[i])
        target = self.out + index * self.out_stride - Int64(shift) * 4
        return Row(first, stop if is_row else first, target, weights)

    @cute.jit
    def score_step(self, row: Row, stage: Any, first_key: Any, lane: Any) -> None:
        """Score the keys of a step, which is in a stage."""
        sums = [self.add_heads(self.multiply(stage, first, lane), row.weights) for first in range(0, STEP, PAIR)]
        own = key_of_lane(lane)
        score = self.exchange(sums, lane)
        if const_expr(self.operands.factor != 1.0):
            score = ptx.mul_rn(score, Float32(self.operands.factor))
        if const_expr(self.is_fp8):
            score = ptx.mul_rn(score, ptx.load_shared_f32(stage + self.config.scales_at + own * 4))
        if const_expr(self.paged):
            is_there = (ptx.load_shared_s32(stage + self.config.mask_at) >> own) & 1 != 0
            score = score if is_there else Float32(-Float32.inf)
        key = first_key + own
        ptx.store_global_f32(row.target + Int64(key) * 4, score, (key >= row.first) & (key < row.stop))

    @cute.jit
    def multiply(self, stage: Any, first: cutlass.Constexpr, lane: Any) -> Any:
        """Products of the row's heads and 16 keys of a stage: [two 8 keys][16 heads][4]."""
        config = self.config
        r, c = lane >> 2, lane & 3
        blocks = []
        for block in range_constexpr(PAIR // 8):
            key = first + 8 * block
            at = stage + key * config.code_bytes
            words = list(ptx.load_shared_128(at + chunk_at(r, c, config.code_bytes)))
            scale = Int32(0)
            if const_expr(self.is_fp8):
                words += ptx.load_shared_128(at + chunk_at(r, c ^ 4, config.code_bytes))
            else:
                scale = ptx.load_shared_s32(stage + config.scales_at + (key + r) * 4)
            blocks.append((words, self.operands.factors(scale, lane)))
        products: list[Any] = [[()] * config.tiles for _ in blocks]
        for word in range_constexpr(config.code_bytes // 16):
            # converted when they are due, or too many registers are taken
            pairs = [self.operands.pairs(words[word], factors) for words, factors in blocks]
            for i in range_constexpr(len(pairs[0]) // 2):
                s = word * (len(pairs[0]) // 2) + i
                for m in range_constexpr(config.tiles):
                    for block in range_constexpr(len(pairs)):
                        b, before = pairs[block][2 * i : 2 * i + 2], products[block][m]
                        a = self.q.four((m * 8 + s) * 4)
                        products[block][m] = mma_sync.multiply(a, b, before, self.operands.is_f16)
        return products

    def add_heads(self, products: Any, weights: list[Any]) -> list[Any]:
        """Weighted sums over the lane's heads: [two 8 keys][two keys]."""
        sums = []
        for tiles in products:
            for i in range(2):
                total = None
                for number, weight in enumerate(weights):
                    product = ptx.relu(tiles[number // 2][number % 2 * 2 + i].bitcast(Float32))
                    total = ptx.mul_rn(product, weight) if total is None else ptx.fma_rn(product, weight, total)
                sums.append(total)
        return sums

    @cute.jit
    def exchange(self, sums: Any, lane: Any) -> Any:
        """The score of the lane's key: sums over all lanes with the same c."""
        values = [sums[pair][i] for pair in range(2) for i in range(4)]
        for bit in (4, 8, 16):
            is_upper = lane & bit != 0
            half = len(values) // 2
            kept = []
            for i in range_constexpr(half):
                low, high = values[i], values[half + i]
                got = cute.arch.shuffle_sync_bfly(low if is_upper else high, bit)
                kept.append(ptx.add_rn(high if is_upper else low, got))
            values = kept
        return values[0]


# ---- kernel


class PortableLogitsKernel:
    """Entry point: (weights, out;
    address of the queries and their strides in bytes, by request, row and head, the same of their scales; requests,
    rows of a request, heads;
    addresses of key 0 and its scale, strides of keys and pages in bytes; keys of a page, pages; address of the block
    table, its stride in bytes and its columns;
    addresses of starts and ends, stride of the ends by request in bytes; number of keys, whether a row's columns begin
    at its start (-1) or not (0), keys up to which a row is not scored, whether to write -inf where there are no scores,
    ctas; stream).
    """

    def __init__(self, key: PortableLogitsKey) -> None:
        self.config, self.paged = key.config, key.paged
        self.operands = operands_of(key.mxfp4, key.arch)
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        kind = ("paged_" if key.paged else "") + "mqa_logits_portable" + ("_mxfp4" if key.mxfp4 else "_fp8")
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
        q_scale: Int64,
        q_scale_request: Int64,
        q_scale_row: Int64,
        q_scale_head: Int64,
        requests: Int32,
        row_count: Int32,
        heads: Int32,
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
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        rows = cute.fast_divmod_create_divisor_v2(page_rows)
        kernel = self.kernel(
            RowGroups.of(requests, row_count, self.config.rows, ctas),
            Windows(starts, ends, end_request, limit, length(out, 1), shifts, skip),
            Queries(
                (q, q_request, q_row, q_head),
                (q_scale, q_scale_request, q_scale_row, q_scale_head),
                address(weights),
                stride_bytes(weights, 0),
                heads,
            ),
            KeyPages(keys, scales, key_stride, page_stride, rows, pages, table, table_stride, table_columns),
            address(out),
            stride_bytes(out, 0),
            clean,
            ctas,
        )
        kernel.launch(grid=[ctas, 1, 1], block=[self.config.threads, 1, 1], min_blocks_per_mp=1, stream=stream)

    @cute.kernel
    def kernel(
        self,
        groups: RowGroups,
        windows: Windows,
        queries: Queries,
        keys: KeyPages,
        out: Int64,
        out_stride: Int64,
        clean: Int32,
        ctas: Int32,
    ) -> None:
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(config.smem_bytes), byte_alignment=128)
        base = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
        scheduler = self.scheduler(groups, windows, base)
        if scheduler.is_counted():
            scheduler.count_tiles(warp)
            cute.arch.sync_threads()
        q = mma_sync.Registers("q", config.tiles * 32)
        q.declare()
        if clean != 0:
            fill = Fill(self.paged, groups, windows, out, out_stride)
            fill.run(cta * WARPS + warp, ctas * WARPS)
        team, member = warp // config.rows, warp % config.rows
        ring = base + team * config.ring_bytes
        sources = groups, windows, queries, keys
        role = Team(config, self.operands, self.paged, *sources, team, member, q, ring, out, out_stride)
        role.run(self.scheduler(groups, windows, base))

    def scheduler(self, groups: RowGroups, windows: Windows, base: Any) -> TileScheduler:
        """Made where it is used, so that the address of the counts takes no register in between."""
        config = self.config
        counts = base + config.counts_at
        return TileScheduler(config.rows, WARPS, self.paged, KEY_TILE, groups, windows, counts)


# ---- key


@dataclass(frozen=True)
class PortableLogitsKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    heads   of a query row, a multiple of 16 up to 64: those that a call has not are left out
    rows    of a group: 1, 2 or 4
    paged   whether keys lie in pages
    mxfp4   whether queries and keys are MXFP4, else they are FP8
    """

    kernel_name: ClassVar[str] = "indexer.mma_sync.logits"
    heads: int = 64
    rows: int = 4
    paged: bool = False
    mxfp4: bool = False

    @property
    def config(self) -> PortableConfig:
        return PortableConfig(self.arch, self.heads, self.rows, operands_of(self.mxfp4, self.arch).code_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        used = "mma.sync", "cp.async", "ld.global.128"
        return used if self.mxfp4 or not operands_of(False, self.arch).converts else (*used, "cvt.e4m3")

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def matrix() -> Any:
            return make_fake_tensor(Float32, (cute.sym_int(), cute.sym_int()), stride=(cute.sym_int64(), 1))

        queries = [Int64(0)] * 8 + [Int32(1)] * 3
        keys = [Int64(0)] * 4 + [Int32(1)] * 2 + [Int64(0)] * 2 + [Int32(0)]
        windows = [Int64(0)] * 3 + [Int32(0)] * 4 + [Int32(1)]
        return PortableLogitsKernel(self), (
            matrix(),
            matrix(),
            *queries,
            *keys,
            *windows,
            make_fake_stream(use_tvm_ffi_env_stream=True),
        )
