"""The warpgroups that multiply keys with queries, add up the heads and store the scores.

The products of a tile are [64 keys, heads of a group's rows]. A thread holds two keys and, of every 8 heads, two
neighbouring ones, for all rows of the group: it adds its heads of a row, four lanes exchange what they have, and each
is left with one key and every second row. The order of these sums is the same in every kernel here.

Products of four rows come in two parts. While the tensor cores multiply one, the threads add up the other, from tile to
tile; but products that are under way must not cross the end of a loop (see dsl.wgmma), so a round takes two tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx, wgmma
from cute_kernels.indexer.logits_plan import CLOSING, KEYS, NOTE, QUERIES, WARP, Plan


class Tile(NamedTuple):
    """A tile in the ring: its stage, and what its note says."""

    stage: Any
    group: Any
    place: Any
    boxes: Any


@cute.jit
def await_tile(ring: Any, at: Any, stage: Any, phase: Any) -> Tile:
    """What comes in a stage, when it is there."""
    ring.wait_full(stage, phase)
    group, place, boxes, _ = ptx.load_shared_128(at.notes + stage * (NOTE * 4))
    return Tile(stage, cute.arch.make_warp_uniform(group), place, boxes)


class Scores:
    """The consumers' part, by `plan.warpgroups` warpgroups. Those that run it have their registers in rmem tensors:

    products        of the parts
    weights         of all rows
    firsts, stops   keys that the thread's rows see
    targets         addresses of the rows' scores of key 0
    """

    def __init__(self, plan: Plan, paged: bool, walk: Any) -> None:
        self.plan, self.paged, self.walk = plan, paged, walk
        self.rows = plan.rows // plan.parts
        self.columns = plan.columns // plan.parts
        self.held = -(-self.rows // 2)

    @cute.jit
    def run(
        self,
        thread: Any,
        groups: Any,
        windows: Any,
        rings: Any,
        at: Any,
        mma: Any,
        k: Any,
        q: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """Score the warpgroup's tiles. mma: the product of a part, and the one that adds; k: [KEYS, 128, stages]; q:
        [columns of a part, 128, parts of all buffers]."""
        plan = self.plan
        lane = thread % WARP
        warpgroup = cute.arch.make_warp_uniform(thread // wgmma.WARPGROUP)
        products = [wgmma.accumulators(mma[0], KEYS, self.columns) for _ in range(plan.parts)]
        weights = cute.make_rmem_tensor((plan.columns // 4,), Float32)
        count = self.held * plan.parts
        firsts, stops = (cute.make_rmem_tensor((count,), Int32) for _ in range(2))
        targets = cute.make_rmem_tensor((count,), Int64)
        seen = (firsts, stops, targets)
        own = thread % wgmma.WARPGROUP // WARP * 16 + lane // 4 + (lane & 2) * 4
        stage, phase, current, turn = warpgroup, Int32(0), Int32(-1), Int32(-1)
        is_running = Int32(1)
        while is_running != 0:
            tile = await_tile(rings[0], at, stage, phase)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != current:
                    current, turn = tile.group, turn + 1
                    buffer = self.await_queries(rings[1], warpgroup, turn)
                    self.load(weights, seen, groups, windows, tile.group, at, buffer, lane, out, out_stride)
                buffer = warpgroup * QUERIES + turn % QUERIES
                if const_expr(plan.parts == 1):
                    scale = ptx.load_shared_f32(at.scales + (stage * KEYS + own) * 4)
                    wgmma.multiply(*mma, products[0], 0, k, q, stage, buffer)
                    wgmma.wait(0)
                    self.finish(0, products[0], weights, seen, tile, scale, own, lane)
                    self.let_go(rings, tile, buffer, lane)
                    stage, phase = self.walk.advance(stage, phase)
                else:
                    scale = ptx.load_shared_f32(at.scales + (stage * KEYS + own) * 4)
                    for part in range_constexpr(2):
                        wgmma.multiply(*mma, products[part], 0, k, q, stage, buffer * 2 + part)
                    stage, phase = self.walk.advance(stage, phase)
                    after = await_tile(rings[0], at, stage, phase)
                    if after.group < 0:
                        is_running = Int32(0)
                        for part in range_constexpr(2):
                            wgmma.wait(1 - part)
                            self.finish(part, products[part], weights, seen, tile, scale, own, lane)
                        self.let_go(rings, tile, buffer, lane)
                    else:
                        is_new = after.group != current
                        if is_new:
                            turn += 1
                            self.await_queries(rings[1], warpgroup, turn)
                        next_buffer = warpgroup * QUERIES + turn % QUERIES
                        next_scale = ptx.load_shared_f32(at.scales + (stage * KEYS + own) * 4)
                        for part in range_constexpr(2):
                            wgmma.wait(1)
                            self.finish(part, products[part], weights, seen, tile, scale, own, lane)
                            wgmma.multiply(*mma, products[part], 0, k, q, stage, next_buffer * 2 + part)
                        self.let_go(rings, tile, buffer, lane)
                        if is_new:
                            current = after.group
                            self.load(weights, seen, groups, windows, current, at, next_buffer, lane, out, out_stride)
                        for part in range_constexpr(2):
                            wgmma.wait(1 - part)
                            self.finish(part, products[part], weights, seen, after, next_scale, own, lane)
                        self.let_go(rings, after, next_buffer, lane)
                        stage, phase = self.walk.advance(stage, phase)

    @cute.jit
    def await_queries(self, ring: Any, warpgroup: Any, turn: Any) -> Any:
        """The buffer with the queries of the warpgroup's group number `turn`."""
        buffer = warpgroup * QUERIES + turn % QUERIES
        ring.wait_full(buffer, turn // QUERIES & 1)
        return buffer

    @cute.jit
    def let_go(self, rings: Any, tile: Any, buffer: Any, lane: Any) -> None:
        """Of a tile whose note, scales and keys have been used, and of the queries if it was the last with them."""
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(rings[0].empty(tile.stage))
            if tile.place & CLOSING != 0:
                cute.arch.mbarrier_arrive(rings[1].empty(buffer))

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
        """What belongs to a group's rows: a thread's heads of all of them, of every 8 the two of its products' columns;
        of every second row which keys it sees and where its scores go."""
        plan = self.plan
        source = at.weights + buffer * (plan.columns * 4)
        for block in range_constexpr(plan.columns // 8):
            pair = ptx.load_shared_f32x2(source + (block * 8 + lane % 4 * 2) * 4)
            weights[2 * block], weights[2 * block + 1] = pair
        firsts, stops, targets = seen
        request, first_row = groups.place(group, plan.rows)
        for i in range_constexpr(self.held * plan.parts):
            row = 2 * i + (lane & 1)
            is_row = (row < plan.rows) & (first_row + row < groups.count)
            place = at.windows + (buffer * 2 * plan.rows + (row if is_row else Int32(0))) * 4
            start = Int32(0)
            if const_expr(not self.paged):
                start = ptx.load_shared_s32(place)
            first, stop, shift = windows.clip(start, ptx.load_shared_s32(place + plan.rows * 4))
            firsts[i] = first
            stops[i] = stop if is_row else first
            number = Int64(request) * Int64(groups.count) + Int64(first_row + row)
            targets[i] = out + number * out_stride - Int64(shift) * 4

    @cute.jit
    def finish(
        self,
        part: cutlass.Constexpr,
        products: cute.Tensor,
        weights: cute.Tensor,
        seen: Any,
        tile: Any,
        scale: Any,
        own: Any,
        lane: Any,
    ) -> None:
        """Add up a part of a tile's products and store the scores."""
        self.store(part, self.add(products, weights, part * (self.columns // 4), lane), seen, tile, scale, own)

    @cute.jit
    def store(
        self,
        part: cutlass.Constexpr,
        totals: Any,
        seen: Any,
        tile: Any,
        scale: Any,
        own: Any,
        is_wanted: Any = None,
    ) -> None:
        """Write the scores of a part's rows that the thread has, if they are wanted."""
        firsts, stops, targets = seen
        key = (tile.place & -KEYS) + own
        for i in range_constexpr(len(totals)):
            row = part * self.held + i
            score = totals[i] * scale
            if const_expr(self.paged):
                is_there = tile.boxes & (1 << (own // self.plan.box)) != 0
                score = score if is_there else Float32(-Float32.inf)
            is_seen = (key >= firsts[row]) & (key < stops[row])
            if const_expr(is_wanted is not None):
                is_seen = is_seen & is_wanted[i]
            ptx.store_global_f32(targets[row] + Int64(key) * 4, score, is_seen)

    @cute.jit
    def add(self, products: cute.Tensor, weights: cute.Tensor, first: cutlass.Constexpr, lane: Any) -> Any:
        """Sums over heads: of rows lane % 2, lane % 2 + 2, ... of a part, for one key, that of the lane. The part's
        weights begin with number `first`."""
        blocks = self.plan.heads // 8
        sums = [[Float32(0.0)] * 2 for _ in range(self.rows)]
        for i in range_constexpr(2 * blocks):
            for row in range_constexpr(self.rows):
                column = row * blocks + i // 2
                for half in range_constexpr(2):
                    product = ptx.relu(products[column * 4 + half * 2 + i % 2])
                    weight = weights[first + row * 2 * blocks + i]
                    if const_expr(i == 0):
                        sums[row][half] = ptx.mul_rn(product, weight)
                    else:
                        sums[row][half] = ptx.fma_rn(product, weight, sums[row][half])
        return self.across(sums, lane)

    @cute.jit
    def across(self, sums: Any, lane: Any) -> Any:
        """Sums over four lanes of what each has of every row's two keys."""
        is_upper, is_odd = lane & 2 != 0, lane & 1 != 0
        rows = []
        for row in range_constexpr(self.rows):
            low, high = sums[row]
            got = cute.arch.shuffle_sync_bfly(low if is_upper else high, 2)
            rows.append(ptx.add_rn(high if is_upper else low, got))
        totals = []
        for i in range_constexpr(0, self.rows, 2):
            if const_expr(i + 1 < self.rows):
                even, odd = rows[i], rows[i + 1]
                got = cute.arch.shuffle_sync_bfly(even if is_odd else odd, 1)
                totals.append(ptx.add_rn(odd if is_odd else even, got))
            else:
                totals.append(ptx.add_rn(rows[i], cute.arch.shuffle_sync_bfly(rows[i], 1)))
        return totals
