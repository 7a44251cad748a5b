"""The warpgroups that decode MXFP4 keys, multiply them with queries, add up the heads and store the scores.

A warp decodes its 16 keys of a tile from shared memory into the registers that its products take them from. Which
column comes where in a product is free as long as queries agree: a lane has one block of two keys, which it loads with
two instructions and whose scales it applies with one table look-up each.

Scores of far rows (mxfp4_codes), be it a key or one of a query row's heads, come from products of single warps, whose
blocks are summed apart and scaled one by one. Which way a score comes depends on its row and its key alone.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64, range_constexpr

from cute_kernels.dsl import mma_sync, ptx, wgmma
from cute_kernels.indexer import mxfp4_codes
from cute_kernels.indexer.logits_plan import CLOSING, KEYS, NOTE, QUERIES, WARP
from cute_kernels.indexer.logits_scores import Scores, Tile
from cute_kernels.indexer.mxfp4_codes import BLOCKS, Rows
from cute_kernels.indexer.mxfp4_plan import DECODED, STRIP

BARRIER = 1
"""Of the first warpgroup, and so on."""


class Mxfp4Scores(Scores):
    """The consumers' part, by `plan.warpgroups` warpgroups."""

    @cute.jit
    def run(
        self,
        thread: Any,
        groups: Any,
        windows: Any,
        rings: Any,
        ready: Any,
        at: Any,
        mma: Any,
        q: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """Score the warpgroup's tiles. mma: the product of keys in registers, and the one that adds; q: [columns, 128,
        warpgroups]."""
        plan = self.plan
        lane = thread % WARP
        warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        warp = cute.arch.make_warp_uniform(thread % wgmma.WARPGROUP // WARP)
        products = wgmma.accumulators(mma[0], KEYS, self.columns)
        keys, words = wgmma.row_registers(mma[0], Float8E4M3FN)
        weights = cute.make_rmem_tensor((plan.columns // 4,), Float32)
        firsts, stops = (cute.make_rmem_tensor((self.held,), Int32) for _ in range(2))
        seen = (firsts, stops, cute.make_rmem_tensor((self.held,), Int64))
        sign = mxfp4_codes.sign_of(at.table)
        own = warp * STRIP + lane // 4 + (lane & 2) * 4
        decoded = q.iterator.toint() + warpgroup * (plan.columns * DECODED)
        stage, phase, current, turn = warpgroup, Int32(0), Int32(-1), Int32(-1)
        is_running, far_rows = Int32(1), Int32(0)
        while is_running != 0:
            ready.wait_full(stage, phase)
            group, key, boxes, is_any_far = ptx.load_shared_128(at.notes + stage * (NOTE * 4))
            tile = Tile(stage, cute.arch.make_warp_uniform(group), key, boxes)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != current:
                    current, turn = tile.group, turn + 1
                    buffer = self.await_queries(rings[1], warpgroup, turn)
                    far_rows = self.decode_queries(warpgroup, warp, buffer, decoded, at)
                    _, first_row = groups.place(current, plan.rows)
                    # rows that are not there may be anything
                    far_rows &= (1 << cutlass.min(groups.count - first_row, plan.rows)) - 1
                    self.load(weights, seen, groups, windows, current, at, buffer, lane, out, out_stride)
                buffer = warpgroup * QUERIES + turn % QUERIES
                strip = stage * KEYS + warp * STRIP
                scales = at.ready_scales + strip * 8
                scale = ptx.load_shared_f32(at.ready_scales + (stage * KEYS + own) * 8 + 4)
                places = scales + lane // 4 * 8 + lane % 4
                entries = [at.table + ptx.load_shared_u8(places + 64 * i) for i in range(2)]
                mxfp4_codes.decode(words, at.keys + strip * plan.row_bytes, entries, sign)
                far = Int32(0)
                if (is_any_far != 0) | (far_rows != 0):
                    rows, _ = mxfp4_codes.look_at(at.scales + strip * 4, at.table)
                    is_far_key = mxfp4_codes.half(rows.far, (lane & 2) * 8) != 0
                    far = Int32(-1) if is_far_key else far_rows >> (lane & 1)
                    totals = self.add_far(words, rows, at, buffer, decoded, lane)
                    self.store(0, totals, seen, tile, scale, own, [far >> 2 * i & 1 != 0 for i in range(self.held)])
                cute.arch.sync_warp()
                # asking for the scale, which is never that NaN, makes the arrival wait until it has come
                if (lane == 0) & (scale.bitcast(Int32) != -1):
                    cute.arch.mbarrier_arrive(rings[0].empty(stage))
                wgmma.multiply_registers(*mma, products, keys, q, warpgroup)
                wgmma.wait(0)
                is_near = [far >> 2 * i & 1 == 0 for i in range(self.held)]
                self.store(0, self.add(products, weights, 0, lane), seen, tile, scale, own, is_near)
                if (lane == 0) & (tile.place & CLOSING != 0):
                    cute.arch.mbarrier_arrive(rings[1].empty(buffer))
                stage, phase = self.walk.advance(stage, phase)

    @cute.jit
    def decode_queries(self, warpgroup: Any, warp: Any, buffer: Any, decoded: Any, at: Any) -> Any:
        """A group's queries, as the warpgroup's products take them; weights get the heads' scales. By the warpgroup.
        Returns which rows have a far head, a bit each."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        barrier = warpgroup + BARRIER
        # nobody multiplies with what was there
        cute.arch.barrier(barrier_id=barrier, number_of_threads=wgmma.WARPGROUP)
        found = Int32(0)
        for strip in cutlass.range(warp, plan.columns // STRIP, wgmma.WARPGROUP // WARP, unroll=1):
            first = buffer * plan.columns + strip * STRIP
            line = decoded + (strip * STRIP + lane // 4) * DECODED
            codes, scales = at.queries + first * plan.row_bytes, at.head_scales + first * 4
            # what the scales lack replaces them
            is_far = mxfp4_codes.decode_heads(line, codes, scales, scales, at.weights + first * 4, at.table)
            found |= is_far << (strip * STRIP // plan.heads)
        cute.arch.fence_view_async_shared()
        far_rows = Int32(0)
        for row in range_constexpr(plan.rows):
            far_rows |= ptx.any_of_group(barrier, wgmma.WARPGROUP, found >> row & 1) << row
        return far_rows

    @cute.jit
    def add_far(self, words: Any, rows: Rows, at: Any, buffer: Any, decoded: Any, lane: Any) -> Any:
        """Sums over heads, as `add`, with all blocks' scales applied to their products. By one warp."""
        plan = self.plan
        block = lane % 4
        sums = []
        for row in range_constexpr(plan.rows):
            low, high = Float32(0.0), Float32(0.0)
            for eight in cutlass.range(plan.heads // 8, unroll=1):
                first = row * plan.heads + eight * 8
                line = decoded + (first + lane // 4) * DECODED + block * 4
                own = buffer * plan.columns + first + block * 2
                head_below = ptx.load_shared_64(at.head_scales + own * 4)
                total = cute.make_rmem_tensor((4,), Float32)
                total.fill(0.0)
                for i in cutlass.range(BLOCKS, unroll=1):
                    part = [Float32(0.0)] * 4
                    for piece in range_constexpr(4):
                        # the other blocks' codes count nothing
                        keys = [words[piece * 4 + j] if block == i else Int32(0) for j in range(4)]
                        heads = [ptx.load_shared_s32(line + (piece * 32 + j * 16 ^ (lane // 4 * 16))) for j in range(2)]
                        part = mma_sync.multiply_e4m3(keys, heads, part)
                    below = cute.arch.shuffle_sync(rows.below, (lane & -4) + i)
                    for j in range_constexpr(4):
                        exponent = ((below >> (j // 2 * 16)) & 0xFF) + ((head_below[j % 2] >> (8 * i)) & 0xFF)
                        total[j] = ptx.fma_rn(part[j], mxfp4_codes.power_below(exponent), total[j])
                weights = ptx.load_shared_f32x2(at.weights + own * 4)
                for j in range_constexpr(2):
                    low = ptx.fma_rn(ptx.relu(total[j]), weights[j], low)
                    high = ptx.fma_rn(ptx.relu(total[2 + j]), weights[j], high)
            sums.append([low, high])
        return self.across(sums, lane)
