"""What the warps of a team do in the portable score kernel.

A team goes through its tiles of the block's share. Of each group it first has copies of keys on their way, then loads
the queries: they stay in registers as operands, converted, while the keys of a step are converted by every warp. The
products of a step are [heads of the warp's row, 32 keys]; a lane l = 4 r + c has heads r and r + 8 of every 16, and of
every 8 keys 2 c and 2 c + 1. It adds its heads up, and eight lanes exchange what they have until each is left with one
key. The order of these sums is the same for every key, in every kernel here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer.logits_plan import KEYS, WARP
from cute_kernels.indexer.portable_plan import CHUNK, STEP, STEPS, PortablePlan, chunk_at, key_of_lane

PAIR = 16
"""Keys whose products are formed at a time: eight independent sums of 64 heads."""


class Queries(NamedTuple):
    """Addresses of codes and, of MXFP4, their scales, each with its strides by request, row and head; address and
    stride of the weights, all in bytes; and the number of heads."""

    codes: tuple[Any, Any, Any, Any]
    scales: tuple[Any, Any, Any, Any]
    weights: Any
    weights_stride: Any
    heads: Any


class Keys(NamedTuple):
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


class Team:
    """`operands`: of portable_operands."""

    def __init__(self, plan: PortablePlan, operands: Any, shares: Any, paged: bool) -> None:
        self.plan, self.operands, self.shares, self.paged = plan, operands, shares, paged
        self.is_fp8 = plan.code_bytes == INDEX_DIM

    @cute.jit
    def run(
        self,
        warp: Any,
        groups: Any,
        windows: Any,
        queries: Queries,
        keys: Keys,
        q: Any,
        base: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """Score what the block's share has for the warp's team. q: Registers for the row's queries."""
        plan = self.plan
        team, member = warp // plan.rows, warp % plan.rows
        ring = base + team * plan.ring_bytes

        def score(part: Any, state: Any) -> Any:
            self.score(part, team, member, groups, windows, queries, keys, q, ring, out, out_stride)
            return state

        self.shares.each_part(team, plan.teams, groups, windows, base + plan.sums_at, score, Int32(0))

    @cute.jit
    def score(
        self,
        part: Any,
        team: Any,
        member: Any,
        groups: Any,
        windows: Any,
        queries: Queries,
        keys: Keys,
        q: Any,
        ring: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """Score the team's tiles of a part."""
        plan = self.plan
        # what a lane's number leads to is computed where it is needed: kept over all parts, it takes too many registers
        lane = ptx.again(cute.arch.lane_idx())
        ahead = const_expr(plan.stages - 1)
        steps = (part.count - part.own + (part.step - 1)) // part.step * STEPS
        found = [self.look_up(part, keys, Int32(i), steps, lane) for i in range(plan.stages)]
        # the team may still be reading what the part before has left. And the look-ups are all on their way before one
        # is waited for: loads are not moved past this
        self.meet(team)
        for i in range_constexpr(ahead):
            self.copy(keys, found[i], ring + i * plan.stage_bytes, member, lane)
        page, place = found[ahead]
        row = self.load_row(part, member, groups, windows, queries, q, out, out_stride, lane)
        stage, free = Int32(0), Int32(ahead)
        for step in cutlass.range(steps, unroll=1):
            cute.arch.cp_async_wait_group(ahead - 1)
            # the stage is there for all, and all have let go of the one before it
            self.meet(team)
            own = ptx.again(lane)
            self.copy(keys, (page, place), ring + free * plan.stage_bytes, member, own)
            page, place = self.look_up(part, keys, step + plan.stages, steps, own)
            if row.first < row.stop:
                self.score_step(row, q, ring + stage * plan.stage_bytes, self.first_key(part, step), own)
            free = stage
            stage = Int32(0) if stage + 1 == plan.stages else stage + 1
        cute.arch.cp_async_wait_group(0)

    def first_key(self, part: Any, step: Any) -> Any:
        return part.first_key + (part.own + step // STEPS * part.step) * KEYS + step % STEPS * STEP

    @cute.jit
    def meet(self, team: Any) -> None:
        """Wait for the other warps of the team."""
        if const_expr(self.plan.rows == 1):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier(barrier_id=team + 1, number_of_threads=self.plan.rows * WARP)

    @cute.jit
    def look_up(self, part: Any, keys: Keys, step: Any, steps: Any, lane: Any) -> tuple[Any, Any]:
        """Page, negative if there is none, and place in it of a step's key for each lane. Nothing is read beyond the
        keys' end."""
        key = self.first_key(part, step) + lane
        is_wanted = (step < steps) & (key < part.stop)
        page, place = (Int32(0) if is_wanted else Int32(-1)), key
        if const_expr(self.paged):
            column, place = divmod(key, keys.page_rows)
            address = keys.table + Int64(part.request) * keys.table_stride + Int64(column) * 4
            page = ptx.load_global_s32_where(is_wanted & (column < keys.table_columns), address, is_shared=True)
            page = page if page < keys.pages else Int32(-1)
        return page, place

    @cute.jit
    def copy(self, keys: Keys, found: Any, stage: Any, member: Any, lane: Any) -> None:
        """Have a step's keys copied to a stage: the warp's part of their codes, and by the first warp their scales and
        which of them exist."""
        plan = self.plan
        page, place = found
        there = cute.arch.vote_ballot_sync(page >= 0)
        offset = Int64(page) * keys.page_stride
        low, high = ptx.halves(keys.codes + offset + Int64(place) * keys.stride)
        at_once = const_expr(WARP // plan.chunks)
        key, chunk = member * (plan.copies * at_once) + lane // plan.chunks, lane % plan.chunks
        target = stage + chunk_at(key, chunk, plan.code_bytes)
        for i in range_constexpr(plan.copies):
            number = key + i * at_once
            source = ptx.pair(cute.arch.shuffle_sync(low, number), cute.arch.shuffle_sync(high, number))
            exists = (there >> number) & 1 != 0
            ptx.copy_async_128_once(target + i * (WARP * CHUNK), source + Int64(chunk * CHUNK), exists)
        if member == 0:
            scale = keys.scales + offset + Int64(place) * 4
            ptx.copy_async_32(stage + plan.scales_at + lane * 4, scale, page >= 0)
            if lane == 0:
                ptx.store_shared_s32(stage + plan.mask_at, there)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_row(
        self,
        part: Any,
        member: Any,
        groups: Any,
        windows: Any,
        queries: Queries,
        q: Any,
        out: Any,
        out_stride: Any,
        lane: Any,
    ) -> Row:
        """The warp's row of a group. Its queries become operand a: of 16 heads and word s, register 4 (8 m + s) has
        head r's first pair and the next head r + 8's; two further are the second pairs."""
        plan = self.plan
        r, c = lane >> 2, lane & 3
        number = part.first_row + member
        is_row = number < groups.count
        first, stop, shift = windows.load(part.request, number, is_row, self.paged)
        index = Int64(part.request) * Int64(groups.count) + Int64(number)
        codes, scales = (
            where + Int64(part.request) * request + Int64(number) * row
            for where, request, row, _ in (queries.codes, queries.scales)
        )
        loaded, weights = [], []
        for half in range_constexpr(2 * plan.tiles):
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
        for half in range_constexpr(2 * plan.tiles):
            words, scale = loaded[half]
            factors = self.operands.factors(scale, lane)
            pairs = [pair for word in words for pair in self.operands.pairs(word, factors)]
            for i in range_constexpr(16):
                q.put((half // 2 * 8 + i // 2) * 4 + i % 2 * 2 + half % 2, pairs[i])
        target = out + index * out_stride - Int64(shift) * 4
        return Row(first, stop if is_row else first, target, weights)

    @cute.jit
    def score_step(self, row: Row, q: Any, stage: Any, first_key: Any, lane: Any) -> None:
        """Score the keys of a step, which is in a stage."""
        sums = [self.add_heads(self.multiply(q, stage, first, lane), row.weights) for first in range(0, STEP, PAIR)]
        own = key_of_lane(lane)
        score = self.exchange(sums, lane)
        if const_expr(self.operands.factor != 1.0):
            score = ptx.mul_rn(score, Float32(self.operands.factor))
        if const_expr(self.is_fp8):
            score = ptx.mul_rn(score, ptx.load_shared_f32(stage + self.plan.scales_at + own * 4))
        if const_expr(self.paged):
            is_there = (ptx.load_shared_s32(stage + self.plan.mask_at) >> own) & 1 != 0
            score = score if is_there else Float32(-Float32.inf)
        key = first_key + own
        ptx.store_global_f32(row.target + Int64(key) * 4, score, (key >= row.first) & (key < row.stop))

    @cute.jit
    def multiply(self, q: Any, stage: Any, first: cutlass.Constexpr, lane: Any) -> Any:
        """Products of the row's heads and 16 keys of a stage: [two 8 keys][16 heads][4]."""
        plan = self.plan
        r, c = lane >> 2, lane & 3
        blocks = []
        for block in range_constexpr(PAIR // 8):
            key = first + 8 * block
            at = stage + key * plan.code_bytes
            words = list(ptx.load_shared_128(at + chunk_at(r, c, plan.code_bytes)))
            scale = Int32(0)
            if const_expr(self.is_fp8):
                words += ptx.load_shared_128(at + chunk_at(r, c ^ 4, plan.code_bytes))
            else:
                scale = ptx.load_shared_s32(stage + plan.scales_at + (key + r) * 4)
            blocks.append((words, self.operands.factors(scale, lane)))
        products: list[Any] = [[()] * plan.tiles for _ in blocks]
        for word in range_constexpr(plan.code_bytes // 16):
            # converted when they are due, or too many registers are taken
            pairs = [self.operands.pairs(words[word], factors) for words, factors in blocks]
            for i in range_constexpr(len(pairs[0]) // 2):
                s = word * (len(pairs[0]) // 2) + i
                for m in range_constexpr(plan.tiles):
                    for block in range_constexpr(len(pairs)):
                        b, before = pairs[block][2 * i : 2 * i + 2], products[block][m]
                        a = q.four((m * 8 + s) * 4)
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
