# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode by mma.sync, on every architecture from sm_80 on, for caches of fp8_ds_mla and plain_bf16.

A CTA of eight warps takes work tiles (params.TileScheduler): a split of a query row's KV, a head group of 8 to 64; and
goes through its keys in steps. Q and O stay in registers for a work tile. Of 512 columns each warp has 64 in both
products: a scale block of fp8_ds_mla, or its rotated columns, so that a warp converts what it multiplies, on the way
from shared memory to its registers, and nothing is converted by two warps. All warps have the same role. A step:

    indices  gmem --> lanes, an entry each --> row of the cache --+       (Producer, stages - 1 steps ahead of the rest)
    KV       gmem --cp.async--> stages [keys][512 columns] -------+
                                    | a warp's 64 columns, to bf16
    Q (registers) ------------------+--mma--> shares of S, [8 warps] (shared memory)
             CTA barrier                        | a warp for every 8 heads adds them up
                                                v softmax: row_max, row_sum, P (shared memory), factors of O
             CTA barrier                        |
                                    | the warp's columns again, transposed
                                    +-----mma---+--> O (registers) --by factors--> out

Lane l of a warp has, with r = l // 4 and c = l % 4:

    q[m][s]    operand a of rows 16 m .. and columns 16 c + 4 s .. + 3 of the warp's 64, as `paired` has them
    o[m][j]    eight sums: rows 16 m + r and 8 further, columns 16 j + 4 c .. + 3; of two products, of even columns and
               of odd ones

Shared memory, in this order:

    stages    what the cache rows are copied to, by step
      fp8       [keys][448] e4m3, [keys][64] bf16 rotated columns, [keys][8] scale bytes
      plain     [8][keys][64] bf16, by warp
    shares    [8][row groups][keys / 8][32 lanes] two fp32: shares of Q K^T by warp; a row group is 8 heads
    weights   [rows / 16][keys / 16][32 lanes][4] words: P as operand of the second product
    masks     [stages][keys] int32: 0 for a key that does not count
    factors   [2][rows] fp32: by head, what O is multiplied with in this step, and at the end
    flags     [8] int32: by row group, whether one of the former is not 1
    rows      [row groups][32 lanes] two fp32: the maximum of the lane's row, and its part of the sum of the weights
    cursors   [8][16] words: where each warp is in the CTA's steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.dsl.entry import entry_point
from cute_kernels.dsl.tensor import address, stride_bytes
from cute_kernels.formats import FP8_DS_MLA, NOPE_DIM, PLAIN_BF16
from cute_kernels.runtime.arch import SMEM_BYTES, arch_number
from cute_kernels.sparse_mla.kernel_args import DecodeArgs, DecodeKernelKey, fake_decode
from cute_kernels.sparse_mla.mma_sync import operands
from cute_kernels.sparse_mla.mma_sync.operands import (
    CHUNK,
    FLAG_BYTES,
    LANES,
    ROPE_BYTES,
    ROW_STATE,
    WARP_COLUMNS,
    WARPS,
    Columns,
    any_grows,
    columns_of,
    fp8_chunk,
    of_its_kind,
    paired,
    rescale,
    softmax,
    wide_chunk,
)
from cute_kernels.sparse_mla.params import EXTRA, KVCache, Output, TileScheduler

# ---- config

KEY_LANES = 4
"""Lanes that copy a key, in pieces of 64 bytes."""

CURSOR_BYTES = 64
"""Shared memory of a warp's cursor, see Producer."""

MOST_STAGES = 4
FORMATS = (FP8_DS_MLA.id, PLAIN_BF16.id)
HEADS = (8, 16, 32, 64)


@dataclass(frozen=True)
class DecodeConfig:
    """Sizes of a CTA. keys is chosen as large as shared memory allows, then the number of stages.

    heads     of a work tile, one of HEADS
    formats   record format ids of the lists, one or two
    """

    arch: str
    heads: int
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.heads not in HEADS:
            raise ValueError(f"heads: expected one of {HEADS}, got {self.heads}")
        for kv_format in self.formats:
            if kv_format not in FORMATS:
                raise ValueError(f"format: expected one of {FORMATS}, got {kv_format!r}")

    @property
    def rows(self) -> int:
        """Heads of a tile as the tensor cores count them."""
        return max(16, self.heads)

    @property
    def is_plain(self) -> bool:
        """Whether no list is of fp8_ds_mla."""
        return FP8_DS_MLA.id not in self.formats

    @property
    def groups(self) -> int:
        """Row groups: a warp for each does their softmax."""
        return self.rows // 8

    @property
    def shares(self) -> int:
        """Of Q K^T: one of each warp."""
        return WARPS

    @property
    def keys(self) -> int:
        """Of a step; it divides 64, so that no step straddles two tiles of the schedule."""
        return next(keys for keys in (64, 32, 16) if self._bytes(keys, 2) <= SMEM_BYTES[self.arch])

    @property
    def stages(self) -> int:
        fitting = (n for n in range(MOST_STAGES, 1, -1) if self._bytes(self.keys, n) <= SMEM_BYTES[self.arch])
        return next(fitting)

    def _bytes(self, keys: int, stages: int) -> int:
        stage = max(self._stage(kv_format, keys) for kv_format in self.formats)
        shares = WARPS * self.rows * keys * 4
        weights = self.rows * keys * 2
        return (
            stages * (stage + keys * 4)
            + shares
            + weights
            + 2 * self.rows * 4
            + FLAG_BYTES
            + self.groups * ROW_STATE
            + WARPS * CURSOR_BYTES
        )

    def _stage(self, kv_format: str, keys: int) -> int:
        if kv_format == FP8_DS_MLA.id:
            return keys * (FP8_DS_MLA.data_bytes + FP8_DS_MLA.scale_bytes)
        return keys * PLAIN_BF16.page_bytes(1)

    @property
    def smem_bytes(self) -> int:
        return self._bytes(self.keys, self.stages)

    # ---- places, in bytes; in a stage from its beginning ----

    @property
    def stage_bytes(self) -> int:
        return max(self._stage(kv_format, self.keys) for kv_format in self.formats)

    @property
    def shares_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def share_bytes(self) -> int:
        """Of one warp."""
        return self.rows * self.keys * 4

    @property
    def group_bytes(self) -> int:
        """Of one row group in a warp's share."""
        return self.keys // 8 * LANES * 8

    @property
    def weights_at(self) -> int:
        return self.shares_at + WARPS * self.share_bytes

    @property
    def masks_at(self) -> int:
        return self.weights_at + self.rows * self.keys * 2

    @property
    def factors_at(self) -> int:
        return self.masks_at + self.stages * self.keys * 4

    @property
    def flags_at(self) -> int:
        return self.factors_at + 2 * self.rows * 4

    @property
    def rows_at(self) -> int:
        return self.flags_at + FLAG_BYTES

    @property
    def cursors_at(self) -> int:
        return self.rows_at + self.groups * ROW_STATE

    @property
    def rope_at(self) -> int:
        """Rotated columns of an fp8 stage."""
        return self.keys * NOPE_DIM

    @property
    def scales_at(self) -> int:
        return self.rope_at + self.keys * ROPE_BYTES

    @property
    def plain_bytes(self) -> int:
        """Of one warp's columns in a plain stage."""
        return self.keys * 2 * WARP_COLUMNS


# ---- producer

ITEM, LIST, COLUMN, END, COLUMN_SECOND, END_SECOND, LOADED_LIST, LOADED_COLUMN = range(8)
ROW, ROW_SECOND, CURRENT, EXTRA_STEPS = 8, 10, 12, 13
"""Words of a warp's cursor, in shared memory, as O and Q leave no registers: work tile and list of the next step, its
first column, the end of the work tile's columns in that list, the same two of the extra list; list (-1: there is none)
and first column of the step that is loaded but not copied; two words each, addresses of the rows of both lists; the
work tile whose products are under way, and how many steps it has in the extra list."""


@dataclass(frozen=True)
class Producer:
    """A warp's walk through the CTA's steps, and its copies.

    A step is `config.keys` neighbouring columns of one list. The warp goes through the steps of all work tiles of the
    CTA, one after the other, ahead of the products: by one step with the lists' entries, which threads hold in
    registers, and by as many steps as there are stages, but one, with the rows themselves. Four lanes copy a key, a
    warp eight of them.

    cursor           address of its words in shared memory
    entry            register: what the lane has loaded, its entry of the list for the step that is fetched
    stages, masks    addresses in shared memory
    """

    config: Any
    second: Any
    scheduler: Any
    caches: Any
    lists: Any
    cursor: Any
    entry: Any
    stages: Any
    masks: Any

    @cute.jit
    def start(self, lane: Any) -> None:
        """Before the first work tile."""
        words = cute.make_rmem_tensor((12,), Int32)
        words.fill(0)
        words[ITEM] = self.scheduler.first - self.scheduler.step
        words[LIST] = Int32(1)
        self.store_cursor(words, lane)

    @cute.jit
    def store_cursor(self, words: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            for i in range_constexpr(3):
                ptx.store_shared_128(self.cursor + 16 * i, [words[4 * i + j] for j in range(4)])
        cute.arch.sync_warp()

    @cute.jit
    def load_indices(self, warp: Any, lane: Any) -> None:
        """Go to the next step there is, and ask for its entries."""
        index = self.entry
        words = cute.make_rmem_tensor((12,), Int32)
        for i in range_constexpr(3):
            four = ptx.load_shared_128(self.cursor + 16 * i)
            for j in range_constexpr(4):
                words[4 * i + j] = four[j]
        while words[COLUMN] >= words[END] and words[ITEM] < self.scheduler.end:
            self.next_list(words)
        exists = words[ITEM] < self.scheduler.end
        column = words[COLUMN] + warp * (LANES // KEY_LANES) + (lane >> 2)
        is_live = exists and column < words[END]
        if const_expr(self.second == "dense"):
            page, _ = divmod(column, self.caches[1].rows)
            column = page if words[LIST] == 1 else column
        row = ptx.pair(words[ROW], words[ROW + 1])
        index[0] = ptx.load_global_s32_where(is_live, row + Int64(column) * 4)
        words[LOADED_LIST] = words[LIST] if exists else Int32(-1)
        words[LOADED_COLUMN] = words[COLUMN]
        words[COLUMN] = words[COLUMN] + self.config.keys
        self.store_cursor(words, lane)

    @cute.jit
    def next_list(self, words: Any) -> None:
        """To the work tile's second list, or to the next work tile's first one."""
        if const_expr(self.second == "none"):
            self.next_work_tile(words)
        elif words[LIST] == 0:
            words[LIST] = Int32(1)
            words[COLUMN] = words[COLUMN_SECOND]
            words[END] = words[END_SECOND]
            words[ROW] = words[ROW_SECOND]
            words[ROW + 1] = words[ROW_SECOND + 1]
        else:
            self.next_work_tile(words)

    @cute.jit
    def next_work_tile(self, words: Any) -> None:
        """To the next work tile's first list."""
        work_tile = words[ITEM] + self.scheduler.step
        words[ITEM] = work_tile
        words[LIST] = Int32(0)
        words[COLUMN] = Int32(0)
        words[END] = Int32(0)
        if work_tile < self.scheduler.end:
            batch, token, split_idx, _ = self.scheduler.coords(work_tile)
            used = self.lists[0].live(batch, token)
            used_second = Int32(0)
            words[ROW], words[ROW + 1] = ptx.halves(self.lists[0].row(batch, token))
            if const_expr(self.second != "none"):
                used_second = self.lists[1].live(batch, token)
                words[ROW_SECOND], words[ROW_SECOND + 1] = ptx.halves(self.lists[1].row(batch, token))
            first, end, first_second, end_second = self.scheduler.columns(split_idx, used, used_second)
            words[COLUMN] = first
            words[END] = end
            words[COLUMN_SECOND] = first_second
            words[END_SECOND] = end_second

    @cute.jit
    def copy_async(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the fetched step's rows copied to a stage, and load the indices of the next one."""
        self.copy_stage_async(stage, warp, lane)
        self.load_indices(warp, lane)

    @cute.jit
    def copy_stage_async(self, stage: Any, warp: Any, lane: Any) -> None:
        """Have the fetched step's rows copied to a stage, zeros for those that are masked; a group of its own."""
        which = ptx.load_shared_s32(self.cursor + LOADED_LIST * 4)
        if const_expr(self.config.keys < WARPS * LANES // KEY_LANES):
            which = which if warp < self.config.keys * KEY_LANES // LANES else Int32(-1)
        if const_expr(self.second == "none"):
            if which >= 0:
                self.copy_rows_async(stage, warp, lane, 0)
        elif which == 0:
            self.copy_rows_async(stage, warp, lane, 0)
        elif which == 1:
            self.copy_rows_async(stage, warp, lane, 1)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def copy_rows_async(self, stage: Any, warp: Any, lane: Any, which: cutlass.Constexpr) -> None:
        config, cache = self.config, self.caches[which]
        lane = ptx.again(lane)
        entry = self.entry[0]
        known = cutlass.max(entry, Int32(0))
        page, row = divmod(known, cache.rows)
        key = warp * (LANES // KEY_LANES) + (lane >> 2)
        if const_expr(which == 1 and self.second == "dense"):
            page = known
            _, row = divmod(ptx.load_shared_s32(self.cursor + LOADED_COLUMN * 4) + key, cache.rows)
        is_valid = entry >= 0 and page < cache.pages
        part = lane & (KEY_LANES - 1)
        if part == 0:
            ptx.store_shared_s32(self.masks + (stage * config.keys + key) * 4, Int32(is_valid))
        start = cache.base + (Int64(page) * cache.page_stride if is_valid else Int64(0))
        row = row if is_valid else Int32(0)
        read = Int32(CHUNK) if is_valid else Int32(0)
        target = self.stages + stage * config.stage_bytes
        if const_expr(config.formats[which] == PLAIN_BF16.id):
            data = start + Int64(row) * (2 * PLAIN_BF16.dim) + Int64(part * CHUNK)
            near = target + wide_chunk(key, part)
            far = target + wide_chunk(key, part + KEY_LANES)
            for i in range_constexpr(2 * PLAIN_BF16.dim // (KEY_LANES * CHUNK)):
                place = (far if i % 2 else near) + i // 2 * config.plain_bytes
                ptx.copy_async_or_zero(place, data + i * (KEY_LANES * CHUNK), CHUNK, read)
        else:
            data = start + Int64(row) * FP8_DS_MLA.data_bytes + Int64(part * CHUNK)
            codes = target + fp8_chunk(key, part)
            pieces = NOPE_DIM // (KEY_LANES * CHUNK)
            for i in range_constexpr(pieces):
                place = i * (KEY_LANES * CHUNK)
                ptx.copy_async_or_zero(codes + place, data + place, CHUNK, read)
            for i in range_constexpr(2):
                rope = target + config.rope_at + wide_chunk(key, part + i * KEY_LANES)
                ptx.copy_async_or_zero(rope, data + (pieces + i) * (KEY_LANES * CHUNK), CHUNK, read)
            if part == 0:
                scales = start + Int64(cache.rows.divisor) * FP8_DS_MLA.data_bytes
                scales = scales + Int64(row) * FP8_DS_MLA.scale_bytes
                place = target + config.scales_at + key * FP8_DS_MLA.scale_bytes
                ptx.copy_async_or_zero(place, scales, FP8_DS_MLA.scale_bytes, read // 2)


# ---- MMA: S, and O


@cute.jit
def multiply_qk(
    q: Any,
    target: Any,
    columns: Columns,
    kind: cutlass.Constexpr,
    warp: Any,
    lane: Any,
    config: cutlass.Constexpr,
) -> None:
    """Store the warp's share of Q K^T for a step.

    q        the lane's operands, [m][s][4]
    target   where the lane stores its share of row group 0 and keys 0 to 7
    kind     of the columns
    """
    tiles = const_expr(config.rows // 16)
    at = columns.at + operands.keys_at(lane, kind)
    factors = operands.factors_of(columns, kind, warp, lane, config.keys)
    words = operands.registers(kind)
    operands.put(words, operands.load_keys(at, kind))
    # two at a time are 1% faster on an H200, and spill
    for n in cutlass.range(config.keys // 8, unroll=1):
        b = operands.key_operands(words, kind, factors, n, lane, config)
        # ahead of the stores below, which loads do not overtake; behind the last keys there is something, too
        at += 8 * operands.key_bytes(kind)
        operands.put(words, operands.load_keys(at, kind))
        sums: list[Any] = [()] * tiles
        for s in range_constexpr(4):
            for m in range_constexpr(tiles):
                sums[m] = mma_sync.multiply(q.four((m * 4 + s) * 4), (b[2 * s], b[2 * s + 1]), sums[m])
        for m in range_constexpr(tiles):
            for side in range_constexpr(2):
                place = target + (2 * m + side) * config.group_bytes
                ptx.store_shared_64(place, *sums[m][2 * side : 2 * side + 2])
        target += LANES * 8


@cute.jit
def multiply_pv(
    o: Any,
    weights: Any,
    columns: Columns,
    kind: cutlass.Constexpr,
    warp: Any,
    lane: Any,
    config: cutlass.Constexpr,
) -> None:
    """o += P V for the warp's columns.

    o         [m][j][even or odd][4]
    weights   where the lane finds its words of P for rows 0 to 15 and keys 0 to 15
    kind      of the columns
    """
    tiles = const_expr(config.rows // 16)
    at = columns.at + operands.values_at(lane, kind)
    factors = operands.factors_of(columns, kind, warp, lane, config.keys)
    words = operands.registers(kind)
    operands.put(words, operands.load_values(at, kind))
    # two at a time make the kernel 3% faster on an H200
    for p in cutlass.range(config.keys // 16, unroll=2):
        a = [ptx.load_shared_128(weights + m * (config.keys // 16) * (LANES * 16)) for m in range(tiles)]
        for half in range_constexpr(2):
            b = operands.value_operands(words, kind, factors, p, lane)
            at = (at ^ operands.other_half(kind)) + half * (16 * operands.key_bytes(kind))
            operands.put(words, operands.load_values(at, kind))
            for i in range_constexpr(4):
                for m in range_constexpr(tiles):
                    mma_sync.accumulate(o.four((m * 8 + half * 4 + i) * 4), a[m], (b[2 * i], b[2 * i + 1]))
        weights += LANES * 16


# ---- epilogue


@cute.jit
def store_lse(out: Output, place: Any, is_own: Any, state: Any, factor: Any, lane: Any) -> None:
    """Store the log-sum-exp of the lane's row, and what its row of O is multiplied with.

    place    split_idx, batch, token and head of the row; is_own: whether the head is one of the work tile's
    state    address of the row's maximum and of the lane's sum of weights
    factor   where the factor belongs in shared memory
    """
    split_idx, batch, token, head = place
    exists = is_own and head < out.heads
    row_max, row_sum = ptx.load_shared_f32x2(state)
    for step in (1, 2):
        row_sum = row_sum + cute.arch.shuffle_sync_bfly(row_sum, step)
    is_empty = row_sum == Float32(0.0)  # and not where it is NaN
    with_sink = row_sum
    if out.sink != 0:
        logit = ptx.load_global_s32_where(exists, out.sink + Int64(head) * 4).bitcast(Float32)
        with_sink = row_sum + ptx.exp2(logit * Float32(ptx.LOG2_E) - row_max)
    ptx.store_shared_f32(factor, Float32(0.0) if is_empty else ptx.reciprocal(with_sink), lane & 3 == 0)
    lse = Float32(Float32.inf) if is_empty else (row_max + ptx.log2(row_sum)) * Float32(ptx.LN_2)
    out.lse.store((split_idx, batch, head, token), lse, exists and lane & 3 == 0)


@cute.jit
def store_out(
    out: Output, o: Any, place: Any, rows: Any, factors: Any, warp: Any, lane: Any, is_fp32: cutlass.Constexpr
) -> None:
    """Store the warp's columns of a work tile, each row multiplied with its factor.

    o         Registers, see the head of this file
    place     split_idx, batch, token and head of the first row
    rows      how many there are
    factors   address of the first row's factor
    """
    split_idx, batch, token, head = place
    size = const_expr(4 if is_fp32 else 2)
    start = out.base + Int64(split_idx) * out.strides[0] + Int64(batch) * out.strides[1]
    start += Int64(token) * out.strides[2] + Int64(head + (lane >> 2)) * out.strides[3]
    start += Int64((warp * WARP_COLUMNS + (lane & 3) * 4) * size)
    for half in range_constexpr(o.count // 16):
        # 8 rows; o[m][j][even or odd][4] with m = half // 2
        first = half // 2 * 32 + half % 2 * 2
        row = 8 * half + (lane >> 2)
        factor = ptx.load_shared_f32(factors + row * 4)
        o.scale([first + i // 2 * 4 + i % 2 for i in range(16)], factor)
        target = start + out.strides[3] * (8 * half)
        for j in range_constexpr(4):
            words = o.get([first + j * 8 + i % 2 * 4 + i // 2 for i in range(4)])
            if const_expr(is_fp32):
                ptx.store_global_128(target + j * 64, words, row < rows)
            else:
                low, high = (ptx.bf16x2(*(word.bitcast(Float32) for word in words[i : i + 2])) for i in (0, 2))
                ptx.store_global_64(target + j * 32, low, high, row < rows)


# ---- kernel


class PortableDecodeKernel:
    """See kernel_args.DecodeArgs."""

    def __init__(self, key: PortableDecodeKey) -> None:
        self.config, self.heads, self.second, self.formats = key.config, key.heads, key.second, key.formats
        self.tiles = self.config.rows // 16
        self.out_fp32 = key.out_fp32
        self.has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        names = "_".join("fp8" if kv_format == FP8_DS_MLA.id else "bf16" for kv_format in key.formats)
        self.name = f"sparse_mla_decode_portable_h{key.heads}_{key.second}_{names}" + ("_fp32" if key.out_fp32 else "")

    @cute.jit
    def launch(self, args: DecodeArgs) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        q = args.q
        scheduler = TileScheduler.of(q, self.heads, args.splits, args.split_tiles, args.ctas)
        kernel = self.kernel(
            address(q),
            tuple(stride_bytes(q, axis) for axis in range(3)),
            (KVCache.of(args.cache0), KVCache.of(args.cache1)),
            args.lists(self.second),
            args.output(),
            args.scale_log2,
            scheduler,
        )
        kernel.launch(
            grid=[cutlass.min(args.ctas, scheduler.end), 1, 1],
            block=[WARPS * LANES, 1, 1],
            min_blocks_per_mp=1,
            stream=args.stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: Int64,
        q_strides: Any,
        caches: Any,
        lists: Any,
        out: Output,
        scale_log2: Float32,
        scheduler: TileScheduler,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane = thread & (LANES - 1)
        warp = cute.arch.make_warp_uniform(thread // LANES)
        config = self.config
        memory = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(config.smem_bytes), byte_alignment=128)
        base = memory.iterator.toint()
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()

        scheduler = scheduler._replace(first=cta)
        producer = Producer(
            config,
            self.second,
            scheduler,
            caches,
            lists,
            base + config.cursors_at + warp * CURSOR_BYTES,
            cute.make_rmem_tensor((1,), Int32),
            base,
            base + config.masks_at,
        )
        producer.start(lane)
        producer.load_indices(warp, lane)
        for early in cutlass.range(config.stages - 1, unroll=1):
            producer.copy_async(early, warp, lane)

        q_words = mma_sync.Registers("q", self.tiles * 16)
        o = mma_sync.Registers("o", self.tiles * 32)
        q_words.declare()
        o.declare()
        factors = base + config.factors_at
        stage: Any = Int32(0)
        work_tile = cta
        while work_tile < scheduler.end:
            cute.arch.sync_warp()
            ptx.store_shared_s32(producer.cursor + CURRENT * 4, work_tile)
            lane = ptx.again(lane)
            batch, token, split_idx, head_group = scheduler.coords(work_tile)
            first, end, first_second, end_second = scheduler.columns_of(lists, self.second, batch, token, split_idx)
            left = self.steps(first_second, end_second)
            ptx.store_shared_s32(producer.cursor + EXTRA_STEPS * 4, left)
            left += self.steps(first, end)
            head = head_group * self.heads
            query = q + Int64(batch) * q_strides[0] + Int64(token) * q_strides[1] + Int64(head) * q_strides[2]
            self.load_query(q_words, query, q_strides[2], cutlass.min(out.heads - head, self.heads), warp, lane)
            o.clear()
            if warp < config.groups:
                state = base + config.rows_at + warp * ROW_STATE + lane * 8
                ptx.store_shared_64(state, Float32(-Float32.inf).bitcast(Int32), Int32(0))
            while left > 0:
                cute.arch.cp_async_wait_group(config.stages - 2)
                # all warps are done with the stage before this one, and this one's rows are there for all of them
                cute.arch.sync_threads()
                self.step(producer, q_words, o, base, stage, left, scale_log2, warp, lane)
                left -= 1
                stage = Int32(0) if stage + 1 == config.stages else stage + 1
            # in a work tile without steps, lanes have not met since each stored it
            cute.arch.sync_warp()
            batch, token, split_idx, head_group = scheduler.coords(ptx.load_shared_s32(producer.cursor + CURRENT * 4))
            lane = ptx.again(lane)
            head = head_group * self.heads
            # without steps in between, some warps may still read what the work tile before has left
            cute.arch.sync_threads()
            if warp < config.groups:
                row = warp * 8 + (lane >> 2)
                state = base + config.rows_at + warp * ROW_STATE + lane * 8
                factor = factors + (config.rows + row) * 4
                store_lse(out, (split_idx, batch, token, head + row), row < self.heads, state, factor, lane)
            cute.arch.sync_threads()
            work_tile = ptx.load_shared_s32(producer.cursor + CURRENT * 4) + scheduler.step
            rows = cutlass.min(out.heads - head, self.heads)
            store_out(
                out, o, (split_idx, batch, token, head), rows, factors + config.rows * 4, warp, lane, self.out_fp32
            )

    def steps(self, first: Any, end: Any) -> Any:
        return cutlass.max(end - first + (self.config.keys - 1), Int32(0)) >> (self.config.keys.bit_length() - 1)

    @cute.jit
    def load_query(self, q: Any, query: Any, row_bytes: Any, rows: Any, warp: Any, lane: Any) -> None:
        """The lane's operands, zeros for heads that do not exist. query: address of the work tile's first head."""
        start = query + Int64(lane >> 2) * row_bytes + Int64(warp * (2 * WARP_COLUMNS) + (lane & 3) * 32)
        for m in range_constexpr(self.tiles):
            for side in range_constexpr(2):
                row = 16 * m + 8 * side
                exists = row + (lane >> 2) < rows
                for i in range_constexpr(2):
                    words = paired(ptx.load_global_128_where(exists, start + row_bytes * row + 16 * i), self.config)
                    for j in range_constexpr(4):
                        place = (m * 4 + 2 * i + j // 2) * 4 + j % 2 * 2 + side
                        q.put(place, words[j] if exists else Int32(0))

    @cute.jit
    def step(
        self,
        producer: Any,
        q: Any,
        o: Any,
        base: Any,
        stage: Any,
        left: Any,
        scale_log2: Any,
        warp: Any,
        lane: Any,
    ) -> None:
        """Both products and the softmax of a step whose rows are in a stage."""
        config = self.config
        lane = ptx.again(lane)
        shares = base + config.shares_at
        own = shares + warp * config.share_bytes + lane * 8
        weights = base + config.weights_at
        is_second = left < 0
        if const_expr(self.formats[0] != self.formats[-1]):
            is_second = left <= ptx.load_shared_s32(producer.cursor + EXTRA_STEPS * 4)
        columns = columns_of(base + stage * config.stage_bytes, is_second, warp, lane, config)
        # of the two warps that share a quarter of the multiprocessor, one copies while the other one multiplies: on an
        # H200, 3% less time than if all copy first
        free = config.stages - 1 if stage == 0 else stage - 1
        if warp < WARPS // 2:
            producer.copy_async(free, warp, lane)
        of_its_kind(lambda kind: multiply_qk(q, own, columns, kind, warp, lane, config), columns, config)
        if warp >= WARPS // 2:
            producer.copy_async(free, warp, lane)
        cute.arch.sync_threads()
        factors = base + config.factors_at
        if warp < config.groups:
            softmax(
                shares + warp * config.group_bytes + lane * 8,
                weights + (warp >> 1) * (config.keys // 16 * LANES * 16) + (warp & 1) * 4 + lane * 16,
                base + config.masks_at + (stage * config.keys + (lane & 3) * 2) * 4,
                factors + (warp * 8 + (lane >> 2)) * 4,
                base + config.flags_at + warp * 4,
                scale_log2,
                base + config.rows_at + warp * ROW_STATE + lane * 8,
                lane,
                config,
            )
        cute.arch.sync_threads()
        if any_grows(base + config.flags_at, config.groups) != 0:
            rescale(o, factors, lane, self.tiles)
        of_its_kind(
            lambda kind: multiply_pv(o, weights + lane * 16, columns, kind, warp, lane, config), columns, config
        )


# ---- key


@dataclass(frozen=True)
class PortableDecodeKey(DecodeKernelKey):
    """What distinguishes one compiled kernel from another.

    heads     of a work work tile: 8, 16, 32 or 64
    format0   record format id of the first cache: fp8_ds_mla/1 or plain_bf16/1
    second    the second list: "none", "listed" (indices) or "dense" (a block table)
    format1   record format id of the second cache; means nothing without a second list
    out_fp32  whether out is fp32, else it is bf16
    """

    kernel_name: ClassVar[str] = "sparse_mla.mma_sync.decode"
    heads: int = 64
    format0: str = FP8_DS_MLA.id
    second: str = "listed"
    format1: str = FP8_DS_MLA.id
    out_fp32: bool = False

    def __post_init__(self) -> None:
        if self.second not in EXTRA:
            raise ValueError(f"second: expected one of {EXTRA}, got {self.second!r}")

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.format0,) if self.second == "none" else (self.format0, self.format1)

    @property
    def config(self) -> DecodeConfig:
        return DecodeConfig(self.arch, self.heads, self.formats)

    @property
    def smem_bytes(self) -> int:
        return self.config.smem_bytes

    @property
    def instructions(self) -> tuple[str, ...]:
        loads = ("ldmatrix",) if FP8_DS_MLA.id in self.formats else ()
        return "mma.sync", "cp.async", "ex2", "ld.global.128", *loads

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return entry_point(PortableDecodeKernel(self).launch, fake_decode(self.out_fp32, self.format0, self.format1))
