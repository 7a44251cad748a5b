"""Warps that decode MXFP4 keys and queries for the warpgroups that multiply, as e4m3 ones are, in groups of three and
four rows.

A warpgroup has two such warps. One brings packed keys, too. They decode half of each tile and pass its note on; before
the first tile of a group they bring and decode its queries. Scores of far keys and of rows with far heads (mxfp4_codes) come from them,
by products of single warps, whose blocks are summed apart and scaled one by one; the warpgroups leave them out. Which
way a score comes depends on its row and its key alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from cute_kernels.dsl import mma_sync, ptx
from cute_kernels.indexer import mxfp4_codes
from cute_kernels.indexer.logits_plan import CLOSING, KEYS, NOTE, QUERIES, WARP
from cute_kernels.indexer.logits_scores import Scores, Tile
from cute_kernels.indexer.mxfp4_codes import BLOCKS
from cute_kernels.indexer.mxfp4_plan import DECODED, STRIP
from cute_kernels.indexer.mxfp4_relay_plan import BEHIND, FAR, SHARERS, STRIPS, RelayPlan

from cute_kernels.indexer.mxfp4_walk import BehindWalk

class Queries(NamedTuple):
    """Addresses of the first row's codes and scales, and strides in bytes."""

    codes: Any
    by_request: Any
    by_row: Any
    by_head: Any
    scales: Any
    scales_by_request: Any
    scales_by_row: Any


class Call(NamedTuple):
    """What a warp that decodes knows of the call. rings: of packed keys, of queries, of decoded keys; weights and out:
    address and stride in bytes."""

    groups: Any
    windows: Any
    weights: Any
    queries: Queries
    rings: Any
    at: Any
    out: Any


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

    def store(self, part: int, totals: Any, seen: Any, tile: Any, scale: Any, own: Any, *_: Any) -> None:
        is_near = scale.bitcast(Int32) != FAR
        Scores.store(self, part, totals, seen, tile, scale, own, [is_near] * self.held)


def far_rows(at: Any, buffer: Any) -> Any:
    """A bit for each row of a group that has a far head."""
    one, two = ptx.load_shared_64(at.far + buffer * (SHARERS * 4))
    return one | two


class Relay:
    """What a warp that decodes does for its warpgroup. How far it is, it has in a word: the stage of its next tile, the
    ring's phase there, and of the tile's group, modulo 2 QUERIES, the number, after a new one's minus one.

    number   which of the warpgroup's SHARERS
    """

    PHASE, TURN, NEW, END = 8, 9, 1 << 11, -1

    def __init__(self, plan: RelayPlan) -> None:
        self.plan = plan

    def start(self, role: Any) -> Any:
        return role | ((2 * QUERIES - 1) << self.TURN | self.NEW)

    @cute.jit
    def step(self, state: Any, role: Any, number: Any, call: Any) -> Any:
        """Decode what the warp has to of the next tile, when it is there, and pass it on. Returns the next state, END
        after the last tile. call: Call."""
        plan, at = self.plan, call.at
        packed, of_queries, ready = call.rings
        lane = cute.arch.lane_idx()
        stage, phase = state & ((1 << self.PHASE) - 1), state >> self.PHASE & 1
        packed.wait_full(stage, phase)
        group, place, boxes, _ = ptx.load_shared_128(at.notes + stage * (NOTE * 4))
        group = cute.arch.make_warp_uniform(group)
        ready.wait_empty(stage, phase)
        if (number == 0) & (lane == 0):
            note = [Int32(group), Int32(place), Int32(boxes), Int32(0)]
            ptx.store_shared_128(at.ready_notes + stage * (NOTE * 4), note)
        after = Int32(self.END)
        if group >= 0:
            is_new = state & self.NEW != 0
            turn = (state >> self.TURN) + (Int32(1) if is_new else Int32(0)) & (2 * QUERIES - 1)
            buffer = role * QUERIES + turn % QUERIES
            if is_new:
                of_queries.wait_empty(buffer, turn // QUERIES)
                self.bring_queries(role, number, call, group, buffer)
                if lane == 0:
                    cute.arch.mbarrier_arrive(of_queries.full(buffer))
                of_queries.wait_full(buffer, turn // QUERIES)
            for i in cutlass.range(STRIPS, unroll=1):
                self.decode(number * STRIPS + i, Tile(stage, group, place, boxes), buffer, call)
            following = stage + plan.warpgroups
            is_end = following >= plan.stages
            after = following - (Int32(plan.stages) if is_end else Int32(0))
            after |= (phase ^ (Int32(1) if is_end else Int32(0))) << self.PHASE | turn << self.TURN
            after |= Int32(self.NEW) if place & CLOSING != 0 else Int32(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(ready.full(stage))
            if group >= 0:
                cute.arch.mbarrier_arrive(packed.empty(stage))
        return after

    @cute.jit
    def finish(self, state: Any, role: Any, number: Any, call: Any) -> None:
        """All tiles that there are left."""
        while state != self.END:
            state = self.step(state, role, number, call)

    @cute.jit
    def bring_queries(self, role: Any, number: Any, call: Any, group: Any, buffer: Any) -> None:
        """Every second strip of a group's queries, two at a time, and by warp 0 its windows, into a buffer."""
        plan, at, queries, groups, windows = self.plan, call.at, call.queries, call.groups, call.windows
        lane = cute.arch.lane_idx()
        request, first_row = groups.place(group, plan.rows)
        rows = cutlass.min(Int32(plan.rows), groups.count - first_row)
        if (number == 0) & (lane < rows):
            place = at.windows + (buffer * 2 * plan.rows + lane) * 4
            ptx.copy_async_32(place + plan.rows * 4, windows.end_address(request, first_row + lane))
            ptx.copy_async_32(place, windows.start_address(first_row + lane))
        codes = queries.codes + Int64(request) * queries.by_request + Int64(first_row) * queries.by_row
        scales = queries.scales
        scales += Int64(request) * queries.scales_by_request + Int64(first_row) * queries.scales_by_row
        weights, weights_stride = call.weights
        weights += Int64(request * groups.count + first_row) * weights_stride
        warp = role * SHARERS + number
        per_row = plan.heads // STRIP
        strips = rows * per_row
        far = Int32(0)
        for pair in cutlass.range(number, strips, 2 * SHARERS, unroll=1):
            for i in range_constexpr(2):
                strip = pair + i * SHARERS
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
                strip = pair + i * SHARERS
                if strip < strips:
                    first = buffer * plan.columns + strip * STRIP
                    line = at.decoded_queries + (first + lane // 4) * DECODED
                    places = at.below + first * 4, at.weights + first * 4, at.table
                    is_far = mxfp4_codes.decode_heads(line, *self.staging(at, warp, i), *places)
                    far |= is_far << (strip // per_row)
            # all lanes have read what the next strips overwrite
            cute.arch.sync_warp()
        if lane == 0:
            ptx.store_shared_s32(at.far + (buffer * SHARERS + number) * 4, far)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    def staging(self, at: Any, warp: Any, i: int) -> tuple[Any, Any]:
        """Where a warp has codes and scales of a strip of heads on their way."""
        number = warp * 2 + i
        return at.queries + number * (STRIP * self.plan.row_bytes), at.head_scales + number * (STRIP * 4)

    @cute.jit
    def decode(self, strip: Any, tile: Tile, buffer: Any, call: Any) -> None:
        """A strip of a tile's keys."""
        at = call.at
        lane = cute.arch.lane_idx()
        first = tile.stage * KEYS + strip * STRIP
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
            self.score_far(rows, is_far, far, scale, tile, strip, buffer, call)

    @cute.jit
    def score_far(
        self, rows: Any, is_far: Any, far: Any, scale: Any, tile: Any, strip: Any, buffer: Any, call: Any
    ) -> None:
        """Scores of a strip's far keys, and of all its keys in far rows, with all blocks' scales applied to their
        products. Lanes 0 and 1 of four store those of their two keys."""
        plan, at, groups = self.plan, call.at, call.groups
        out, out_stride = call.out
        lane = cute.arch.lane_idx()
        request, first_row = groups.place(tile.group, plan.rows)
        own = strip * STRIP + lane // 4 + (lane & 1) * 8
        key = (tile.place & -KEYS) + own
        for row in cutlass.range(cutlass.min(groups.count - first_row, plan.rows), unroll=1):
            low, high = self.add_far(rows.below, tile.stage * KEYS + strip * STRIP, row, buffer, at)
            score = (high if lane & 1 != 0 else low) * scale
            place = at.windows + (buffer * 2 * plan.rows + row) * 4
            ends = ptx.load_shared_s32(place), ptx.load_shared_s32(place + plan.rows * 4)
            first, stop, shift = call.windows.clip(*ends)
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


class RelayWalk(BehindWalk):
    """The part of the warps that bring packed keys and, some tiles behind, decode them."""

    def __init__(self, plan: RelayPlan, relay: Relay) -> None:
        super().__init__(plan, BEHIND, False)
        self.relay = relay

    @cute.jit
    def run_and_decode(self, role: Any, keys: Any, key_copy: Any, call: Call) -> Any:
        """Go through the block's share, for warpgroup number `role`. By one warp. Returns what Relay is to go on with."""
        self.context = role, call
        self.start(call.at.walks + role * 8, self.relay.start(role))
        rings = call.rings[:2]
        self.run(role, call.groups, call.windows, keys, *call.weights, key_copy, None, rings, call.at)
        return self.state()

    def bring_queries(self, *_: Any) -> None:
        """Relay does."""

    def step(self, state: Any) -> Any:
        role, call = self.context
        return self.relay.step(state, role, Int32(0), call)
