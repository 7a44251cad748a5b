"""Warps that decode MXFP4 keys and queries for the warpgroups that multiply, as e4m3 ones are, in groups of three and
four rows.

Those that bring packed keys decode their warpgroup's queries. Others wait for packed keys, decode them, each a strip of
a tile, and pass the tile's note on. Scores of far keys and of rows with far heads (mxfp4_codes) come from the latter,
by products of single warps, whose blocks are summed apart and scaled one by one; the warpgroups leave them out. Which
way a score comes depends on its row and its key alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.indexer import mxfp4_codes
from cute_kernels.indexer.logits_plan import KEYS, NOTE, QUERIES, WARP
from cute_kernels.indexer.logits_scores import Scores, Tile
from cute_kernels.indexer.logits_walk import Walk
from cute_kernels.indexer.mxfp4_codes import BLOCKS
from cute_kernels.indexer.mxfp4_plan import DECODED, STRIP
from cute_kernels.indexer.mxfp4_relay_plan import FAR, RelayPlan


class Queries(NamedTuple):
    """Addresses of the first row's codes and scales, and strides in bytes."""

    codes: Any
    by_request: Any
    by_row: Any
    by_head: Any
    scales: Any
    scales_by_request: Any
    scales_by_row: Any


class RelayWalk(Walk):
    """The part of the warps that bring keys, as e4m3 ones, and decode queries. `query_copy` is Queries."""

    @cute.jit
    def bring_queries(
        self,
        windows: Any,
        groups: Any,
        weights: Any,
        weights_stride: Any,
        query_copy: Any,
        ring: Any,
        at: Any,
        part: Any,
        buffer: Any,
        phase: Any,
    ) -> None:
        plan = self.plan
        lane = cute.arch.lane_idx()
        request, first_row = part.request, part.first_row
        rows = cutlass.min(Int32(plan.rows), groups.count - first_row)
        role = buffer // QUERIES
        packed = at.queries + role * (plan.heads * plan.row_bytes)
        scales = at.head_scales + role * (plan.heads * 4)
        ring.wait_empty(buffer, phase)
        if lane < rows:
            place = at.windows + (buffer * 2 * plan.rows + lane) * 4
            ptx.copy_async_32(place + plan.rows * 4, windows.end_address(request, first_row + lane))
            if const_expr(not self.paged):
                ptx.copy_async_32(place, windows.start_address(first_row + lane))
        far = Int32(0)
        for row in cutlass.range(rows, unroll=1):
            number = first_row + row
            codes = query_copy.codes + Int64(request) * query_copy.by_request + Int64(number) * query_copy.by_row
            words = (
                query_copy.scales
                + Int64(request) * query_copy.scales_by_request
                + Int64(number) * query_copy.scales_by_row
            )
            own_weights = weights + Int64(request * groups.count + number) * weights_stride
            first = buffer * plan.columns + row * plan.heads
            for i in range_constexpr(plan.heads * BLOCKS // WARP):
                piece = i * WARP + lane
                source = codes + Int64(piece // BLOCKS) * query_copy.by_head + piece % BLOCKS * 16
                ptx.copy_async_128_once(packed + piece * 16, source)
            for i in range_constexpr(-(-plan.heads // WARP)):
                head = i * WARP + lane
                # the compiler takes no predicate that it knows to hold
                is_head = None if (i + 1) * WARP <= plan.heads else head < plan.heads
                ptx.copy_async_32(scales + head * 4, words + Int64(head) * 4, is_head)
                ptx.copy_async_32(at.weights + (first + head) * 4, own_weights + Int64(head) * 4, is_head)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            is_far = Int32(0)
            for strip in cutlass.range(plan.heads // STRIP, unroll=1):
                is_far |= self.decode_heads(at, packed, scales, strip, first + strip * STRIP)
            far |= is_far << row
            # all lanes have read what the next row overwrites
            cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_s32(at.far + buffer * 4, far)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ring.full(buffer))

    @cute.jit
    def decode_heads(self, at: Any, packed: Any, scales: Any, strip: Any, first: Any) -> Any:
        """A strip of a row's heads, the first of them number `first` of all buffers; their weights get their scales.
        1 if one is far, else 0."""
        lane = cute.arch.lane_idx()
        line = at.decoded_queries + (first + lane // 4) * DECODED
        sign = mxfp4_codes.sign_of(at.table)
        strip_bytes = STRIP * self.plan.row_bytes
        rows = mxfp4_codes.decode_into(line, packed + strip * strip_bytes, scales + strip * STRIP * 4, at.table, sign)
        for row in range_constexpr(2):
            ptx.store_shared_8(at.below + (first + row * 8) * 4 + lane, rows.below >> (16 * row))
            if lane % 4 == 0:
                weight = at.weights + (first + row * 8 + lane // 4) * 4
                scale = mxfp4_codes.row_scale(mxfp4_codes.half(rows.largest, 16 * row))
                ptx.store_shared_f32(weight, ptx.load_shared_f32(weight) * scale)
        return Int32(1) if cute.arch.vote_any_sync(rows.far != 0) else Int32(0)


class RelayScores(Scores):
    """The part of the warpgroups that multiply: as of e4m3 keys, without the scores that come from elsewhere."""

    @cute.jit
    def load(
        self,
        weights: Any,
        seen: Any,
        groups: Any,
        windows: Any,
        group: Any,
        at: Any,
        buffer: Any,
        lane: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        Scores.load(self, weights, seen, groups, windows, group, at, buffer, lane, out, out_stride)
        firsts, stops, _ = seen
        far = ptx.load_shared_s32(at.far + buffer * 4)
        for i in range_constexpr(self.held * self.plan.parts):
            stops[i] = stops[i] if far >> (2 * i + (lane & 1)) & 1 == 0 else firsts[i]

    def store(
        self, part: int, totals: Any, seen: Any, tile: Any, scale: Any, own: Any, is_wanted: Any = None
    ) -> None:
        is_near = scale.bitcast(Int32) != FAR
        Scores.store(self, part, totals, seen, tile, scale, own, [is_near] * self.held)


class Relay:
    """The part of the warps that decode keys."""

    def __init__(self, plan: RelayPlan, paged: bool, walk: Any) -> None:
        self.plan, self.paged, self.walk = plan, paged, walk

    @cute.jit
    def run(self, warp: Any, groups: Any, windows: Any, rings: Any, ready: Any, at: Any, out: Any, out_stride: Any) -> None:
        """Decode strip number `warp` of all tiles. rings: of packed keys, and of queries; ready: of decoded keys."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        sign = mxfp4_codes.sign_of(at.table)
        stage, phase = Int32(0), Int32(0)
        # of each warpgroup, as far as it is not a warp's own stage: whether it has tiles, its group and turn
        running = Int32((1 << plan.warpgroups) - 1)
        current, turn = (cute.make_rmem_tensor((plan.warpgroups,), Int32) for _ in range(2))
        current.fill(-1)
        turn.fill(-1)
        while running != 0:
            role = stage % plan.warpgroups
            if running >> role & 1 != 0:
                rings[0].wait_full(stage, phase)
                group, place, boxes, _ = ptx.load_shared_128(at.notes + stage * (NOTE * 4))
                group = cute.arch.make_warp_uniform(group)
                ready.wait_empty(stage, phase)
                if (warp == 0) & (lane == 0):
                    note = [Int32(group), Int32(place), Int32(boxes), Int32(0)]
                    ptx.store_shared_128(at.ready_notes + stage * (NOTE * 4), note)
                if group < 0:
                    running ^= Int32(1) << role
                else:
                    buffer = Int32(0)
                    for i in range_constexpr(plan.warpgroups):
                        if role == i:
                            if group != current[i]:
                                current[i], turn[i] = group, turn[i] + 1
                                rings[1].wait_full(i * QUERIES + turn[i] % QUERIES, turn[i] // QUERIES & 1)
                            buffer = i * QUERIES + turn[i] % QUERIES
                    first = stage * KEYS + warp * STRIP
                    line = at.decoded_keys + (first + lane // 4) * DECODED
                    codes, scales = at.keys + first * plan.row_bytes, at.scales + first * 4
                    rows = mxfp4_codes.decode_into(line, codes, scales, at.table, sign)
                    shift = (lane & 1) * 16
                    is_far = mxfp4_codes.half(rows.far, shift) != 0
                    scale = mxfp4_codes.row_scale(mxfp4_codes.half(rows.largest, shift))
                    if lane & 2 == 0:
                        target = at.ready_scales + (first + lane // 4 + (lane & 1) * 8) * 4
                        ptx.store_shared_s32(target, Int32(FAR) if is_far else scale.bitcast(Int32))
                    far_rows = ptx.load_shared_s32(at.far + buffer * 4)
                    if cute.arch.vote_any_sync(rows.far != 0) | (far_rows != 0):
                        cute.arch.sync_warp()
                        tile = Tile(stage, group, place, boxes)
                        self.score_far(
                            rows, is_far, far_rows, scale, tile, warp, buffer, groups, windows, at, out, out_stride
                        )
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(ready.full(stage))
                    if group >= 0:
                        cute.arch.mbarrier_arrive(rings[0].empty(stage))
            stage += 1
            if stage == plan.stages:
                stage, phase = Int32(0), phase ^ 1

    @cute.jit
    def score_far(
        self,
        rows: Any,
        is_far: Any,
        far_rows: Any,
        scale: Any,
        tile: Any,
        warp: Any,
        buffer: Any,
        groups: Any,
        windows: Any,
        at: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """Scores of a strip's far keys, and of all its keys in far rows, with all blocks' scales applied to their
        products. Lanes 0 and 1 of four store those of their two keys."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        request, first_row = groups.place(tile.group, plan.rows)
        own = warp * STRIP + lane // 4 + (lane & 1) * 8
        key = (tile.place & -KEYS) + own
        for row in cutlass.range(cutlass.min(groups.count - first_row, plan.rows), unroll=1):
            low, high = self.add_far(rows.below, tile.stage * KEYS + warp * STRIP, row, buffer, at)
            score = (high if lane & 1 != 0 else low) * scale
            place = at.windows + (buffer * 2 * plan.rows + row) * 4
            start = Int32(0)
            if const_expr(not self.paged):
                start = ptx.load_shared_s32(place)
            else:
                score = score if tile.boxes & (1 << (own // plan.box)) != 0 else Float32(-Float32.inf)
            first, stop, shift = windows.clip(start, ptx.load_shared_s32(place + plan.rows * 4))
            number = Int64(request) * Int64(groups.count) + Int64(first_row + row)
            target = out + number * out_stride + (Int64(key) - Int64(shift)) * 4
            is_seen = (key >= first) & (key < stop) & (lane & 2 == 0)
            ptx.store_global_f32(target, score, is_seen & (is_far | (far_rows >> row & 1 != 0)))

    @cute.jit
    def add_far(self, below: Any, first: Any, row: Any, buffer: Any, at: Any) -> tuple[Any, Any]:
        """Sums over a row's heads for keys r and r + 8 of a strip, which begins with row `first` of the stages. By one
        warp."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        low, high = Float32(0.0), Float32(0.0)
        key_line = at.decoded_keys + (first + lane // 4) * DECODED
        for eight in cutlass.range(plan.heads // 8, unroll=1):
            head = buffer * plan.columns + row * plan.heads + eight * 8
            line = at.decoded_queries + (head + lane // 4) * DECODED
            own = head + lane % 4 * 2
            total = cute.make_rmem_tensor((4,), Float32)
            total.fill(0.0)
            for block in cutlass.range(BLOCKS, unroll=1):
                places = [mxfp4_codes.place(lane, lane % 4, i) + block * 4 for i in range(2)]
                keys = [ptx.load_shared_s32(key_line + places[i // 2] + i % 2 * 1024) for i in range(4)]
                heads = [ptx.load_shared_s32(line + place) for place in places]
                part = mma_sync.multiply_e4m3(keys, heads, [Float32(0.0)] * 4)
                of_keys = cute.arch.shuffle_sync(below, (lane & -4) + block)
                for j in range_constexpr(4):
                    of_head = ptx.load_shared_u8(at.below + (own + j % 2) * 4 + block)
                    exponent = ((of_keys >> (j // 2 * 16)) & 0xFF) + of_head
                    total[j] = ptx.fma_rn(part[j], mxfp4_codes.power_below(exponent), total[j])
            weights = ptx.load_shared_f32x2(at.weights + own * 4)
            for j in range_constexpr(2):
                low = ptx.fma_rn(ptx.relu(total[j]), weights[j], low)
                high = ptx.fma_rn(ptx.relu(total[2 + j]), weights[j], high)
        for distance in (2, 1):
            low = ptx.add_rn(low, cute.arch.shuffle_sync_bfly(low, distance))
            high = ptx.add_rn(high, cute.arch.shuffle_sync_bfly(high, distance))
        return low, high
