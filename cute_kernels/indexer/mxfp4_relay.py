"""Warps that decode MXFP4 keys and queries for the warpgroups that multiply, as e4m3 ones are, in groups of three and
four rows.

They wait for packed keys, decode them, each a strip of a tile, and pass the tile's note on; before the first tile of a
group they bring and decode its queries. Scores of far keys and of rows with far heads (mxfp4_codes) come from them,
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
from cute_kernels.indexer.logits_plan import CLOSING, KEYS, NOTE, QUERIES, WARP
from cute_kernels.indexer.logits_scores import Scores, Tile
from cute_kernels.indexer.logits_walk import Walk
from cute_kernels.indexer.mxfp4_codes import BLOCKS
from cute_kernels.indexer.mxfp4_plan import DECODED, STRIP
from cute_kernels.indexer.mxfp4_relay_plan import FAR, RELAY_WARPS, RelayPlan


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
    """The part of the warps that bring keys, as e4m3 ones; others bring queries."""

    def bring_queries(self, *_: Any) -> None:
        pass


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
        far = far_rows(at, buffer)
        for i in range_constexpr(self.held * self.plan.parts):
            stops[i] = stops[i] if far >> (2 * i + (lane & 1)) & 1 == 0 else firsts[i]

    def store(
        self, part: int, totals: Any, seen: Any, tile: Any, scale: Any, own: Any, is_wanted: Any = None
    ) -> None:
        is_near = scale.bitcast(Int32) != FAR
        Scores.store(self, part, totals, seen, tile, scale, own, [is_near] * self.held)


def far_rows(at: Any, buffer: Any) -> Any:
    """A bit for each row of a group that has a far head."""
    found = ptx.load_shared_128(at.far + buffer * (RELAY_WARPS * 4))
    return found[0] | found[1] | found[2] | found[3]


class Relay:
    """The part of the warps that decode. They know, in a byte of one word for each warpgroup, whether it has tiles, how
    many groups of its they have seen, modulo 2 QUERIES, and whether its next tile is of a new one."""

    RUNS, NEW, TURN = 8, 4, 2 * QUERIES - 1

    def __init__(self, plan: RelayPlan, paged: bool) -> None:
        self.plan, self.paged = plan, paged

    @cute.jit
    def run(
        self,
        warp: Any,
        groups: Any,
        windows: Any,
        weights: Any,
        weights_stride: Any,
        queries: Queries,
        rings: Any,
        ready: Any,
        at: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """Decode strip number `warp` of all tiles. rings: of packed keys, and of queries; ready: of decoded keys."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        stage, phase = Int32(0), Int32(0)
        state = Int32(sum((self.RUNS | self.NEW | self.TURN) << (8 * i) for i in range(plan.warpgroups)))
        while state != 0:
            role = stage % plan.warpgroups
            own = state >> (8 * role) & 0xFF
            if own != 0:
                rings[0].wait_full(stage, phase)
                group, place, boxes, _ = ptx.load_shared_128(at.notes + stage * (NOTE * 4))
                group = cute.arch.make_warp_uniform(group)
                tile = Tile(stage, group, place, boxes)
                ready.wait_empty(stage, phase)
                if (warp == 0) & (lane == 0):
                    note = [Int32(group), Int32(place), Int32(boxes), Int32(0)]
                    ptx.store_shared_128(at.ready_notes + stage * (NOTE * 4), note)
                after = Int32(0)
                if group >= 0:
                    turn = (own + (own >> 2 & 1)) & self.TURN
                    buffer = role * QUERIES + turn % QUERIES
                    if own & self.NEW != 0:
                        rings[1].wait_empty(buffer, turn // QUERIES)
                        self.bring_queries(
                            warp, groups, windows, weights, weights_stride, queries, at, group, buffer
                        )
                        if lane == 0:
                            cute.arch.mbarrier_arrive(rings[1].full(buffer))
                        rings[1].wait_full(buffer, turn // QUERIES)
                    after = Int32(self.RUNS) | turn | (Int32(self.NEW) if place & CLOSING != 0 else Int32(0))
                    self.decode(warp, tile, buffer, groups, windows, at, out, out_stride)
                state ^= (own ^ after) << (8 * role)
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
    def bring_queries(
        self,
        warp: Any,
        groups: Any,
        windows: Any,
        weights: Any,
        weights_stride: Any,
        queries: Queries,
        at: Any,
        group: Any,
        buffer: Any,
    ) -> None:
        """Every fourth strip of a group's queries, two at a time, and by warp 0 its windows, into a buffer."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        request, first_row = groups.place(group, plan.rows)
        rows = cutlass.min(Int32(plan.rows), groups.count - first_row)
        if (warp == 0) & (lane < rows):
            place = at.windows + (buffer * 2 * plan.rows + lane) * 4
            ptx.copy_async_32(place + plan.rows * 4, windows.end_address(request, first_row + lane))
            if const_expr(not self.paged):
                ptx.copy_async_32(place, windows.start_address(first_row + lane))
        codes = queries.codes + Int64(request) * queries.by_request + Int64(first_row) * queries.by_row
        scales = queries.scales
        scales += Int64(request) * queries.scales_by_request + Int64(first_row) * queries.scales_by_row
        weights += Int64(request * groups.count + first_row) * weights_stride
        per_row = plan.heads // STRIP
        strips = rows * per_row
        far = Int32(0)
        for pair in cutlass.range(warp, strips, 2 * RELAY_WARPS, unroll=1):
            for i in range_constexpr(2):
                strip = pair + i * RELAY_WARPS
                if strip < strips:
                    row, head = strip // per_row, strip % per_row * STRIP
                    packed, words = self.staging(at, warp, i)
                    for j in range_constexpr(2):
                        own = j * 8 + lane // 4
                        source = codes + Int64(row) * queries.by_row + Int64(head + own) * queries.by_head
                        ptx.copy_async_128_once(packed + (j * WARP + lane) * 16, source + lane % 4 * 16)
                    if lane < STRIP:
                        offset = Int64(head + lane) * 4
                        ptx.copy_async_32(words + lane * 4, scales + Int64(row) * queries.scales_by_row + offset)
                        target = at.weights + (buffer * plan.columns + strip * STRIP + lane) * 4
                        ptx.copy_async_32(target, weights + Int64(row) * weights_stride + offset)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            for i in range_constexpr(2):
                strip = pair + i * RELAY_WARPS
                if strip < strips:
                    is_far = self.decode_heads(at, warp, i, buffer * plan.columns + strip * STRIP)
                    far |= is_far << (strip // per_row)
            # all lanes have read what the next strips overwrite
            cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_s32(at.far + (buffer * RELAY_WARPS + warp) * 4, far)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    def staging(self, at: Any, warp: Any, i: int) -> tuple[Any, Any]:
        """Where a warp has codes and scales of a strip of heads on their way."""
        number = warp * 2 + i
        return at.queries + number * (STRIP * self.plan.row_bytes), at.head_scales + number * (STRIP * 4)

    @cute.jit
    def decode_heads(self, at: Any, warp: Any, i: cutlass.Constexpr, first: Any) -> Any:
        """A strip of heads, the first of them number `first` of all buffers; their weights get their scales. 1 if one is
        far, else 0."""
        lane = cute.arch.lane_idx()
        line = at.decoded_queries + (first + lane // 4) * DECODED
        rows = mxfp4_codes.decode_into(line, *self.staging(at, warp, i), at.table)
        for row in range_constexpr(2):
            ptx.store_shared_8(at.below + (first + row * 8) * 4 + lane, rows.below >> (16 * row))
            if lane % 4 == 0:
                weight = at.weights + (first + row * 8 + lane // 4) * 4
                scale = mxfp4_codes.row_scale(mxfp4_codes.half(rows.largest, 16 * row))
                ptx.store_shared_f32(weight, ptx.load_shared_f32(weight) * scale)
        return Int32(1) if cute.arch.vote_any_sync(rows.far != 0) else Int32(0)

    @cute.jit
    def decode(
        self, warp: Any, tile: Tile, buffer: Any, groups: Any, windows: Any, at: Any, out: Any, out_stride: Any
    ) -> None:
        """The warp's strip of a tile's keys."""
        lane = cute.arch.lane_idx()
        first = tile.stage * KEYS + warp * STRIP
        line = at.decoded_keys + (first + lane // 4) * DECODED
        rows = mxfp4_codes.decode_into(line, at.keys + first * self.plan.row_bytes, at.scales + first * 4, at.table)
        shift = (lane & 1) * 16
        is_far = mxfp4_codes.half(rows.far, shift) != 0
        scale = mxfp4_codes.row_scale(mxfp4_codes.half(rows.largest, shift))
        if lane & 2 == 0:
            target = at.ready_scales + (first + lane // 4 + (lane & 1) * 8) * 4
            ptx.store_shared_s32(target, Int32(FAR) if is_far else scale.bitcast(Int32))
        far = far_rows(at, buffer)
        if cute.arch.vote_any_sync(rows.far != 0) | (far != 0):
            cute.arch.sync_warp()
            self.score_far(rows, is_far, far, scale, tile, warp, buffer, groups, windows, at, out, out_stride)

    @cute.jit
    def score_far(
        self,
        rows: Any,
        is_far: Any,
        far: Any,
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
            ptx.store_global_f32(target, score, is_seen & (is_far | (far >> row & 1 != 0)))

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
