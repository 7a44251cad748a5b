"""The warpgroups of the score kernel on Blackwell that add up the heads and store the scores.

A thread has a key of a tile: its lane of tensor memory holds the products with all heads of all rows. It loads some of
them, adds up those that came before, and meets no other thread. The order of these sums is the same in every kernel
here.

Two warpgroups share the work. They take turns, or, of more than two rows, each adds up half of them in every tile:
then weights, of which a thread needs those of all heads, still have room in registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx
from cute_kernels.indexer.logits_plan import QUERIES, WARP
from cute_kernels.indexer.logits_scores import Scores, await_tile
from cute_kernels.indexer.logits_sm100_plan import BUFFERS, SUMMERS, TILE, BlackwellPlan

LANE_SHIFT = 16
"""Of an address in tensor memory: bits of the column."""

SUMS = 4
"""Of a row's heads, every fourth in each: two are added to at once, and two additions do not wait for each other."""


class BlackwellScores(Scores):
    """The consumers' part, by SUMMERS warpgroups. Those that run it have their registers in rmem tensors:

    weights         of the rows that the thread has, head after head
    firsts, stops   keys that these rows see
    targets         addresses of the rows' scores of key 0
    """

    plan: BlackwellPlan

    def __init__(self, plan: BlackwellPlan, paged: bool) -> None:
        self.plan, self.paged, self.held = plan, paged, plan.held
        self.width = 32 if plan.heads % 32 == 0 else 16
        """Columns of tensor memory that a thread loads at a time."""

    @cute.jit
    def run(
        self,
        warpgroup: Any,
        part: Any,
        count: cutlass.Constexpr,
        thread: Any,
        groups: Any,
        windows: Any,
        rings: Any,
        at: Any,
        tensor: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """Score the warpgroup's tiles, or of all tiles the `count` rows of its part.

        thread   of the warpgroup
        rings    of keys, queries and buffers of products
        tensor   address of the tensor memory
        """
        plan = self.plan
        lane = thread % WARP
        weights = cute.make_rmem_tensor((count * plan.heads,), Float32)
        firsts, stops = (cute.make_rmem_tensor((count,), Int32) for _ in range(2))
        seen = (firsts, stops, cute.make_rmem_tensor((count,), Int64))
        first = part * plan.held
        products = tensor + (thread // WARP * WARP << LANE_SHIFT) + first * plan.heads
        stage, phase = barriers.start()
        current, turn, loaded, number = Int32(-1), Int32(-1), Int32(-1), Int32(0)
        is_running = Int32(1)
        while is_running != 0:
            tile = await_tile(rings[0], at, stage, phase)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != current:
                    current, turn = tile.group, turn + 1
                query_buffer, buffer = turn % QUERIES, number % BUFFERS
                if (number % SUMMERS == warpgroup) | (plan.parts > 1):
                    if loaded != turn:
                        loaded = turn
                        rings[1].wait_full(query_buffer, turn // QUERIES & 1)
                        self.load(weights, seen, groups, windows, current, at, query_buffer, first, out, out_stride)
                    scale = Float32(1.0)
                    if const_expr(not plan.mxfp4):
                        scale = ptx.load_shared_f32(at.scales + (stage * TILE + thread) * 4)
                    rings[2].wait_full(buffer, number // BUFFERS & 1)
                    ptx.fence_tensor_after()
                    totals = self.add_all(products + buffer * plan.columns, weights, count)
                    ptx.fence_tensor_before()
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(rings[2].empty(buffer))
                    self.store(0, totals, seen, tile, scale, thread)
                self.let_go(rings, tile, query_buffer, lane)
                number += 1
                stage, phase = barriers.advance(stage, phase, plan.stages)

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
        first: Any,
        out: Any,
        out_stride: Any,
    ) -> None:
        """What belongs to a group's rows from number `first` on: weights, which keys they see, where scores go."""
        plan = self.plan
        source = at.weights + (buffer * plan.columns + first * plan.heads) * 4
        for i in range_constexpr(0, cute.size(weights), 4):
            for j, word in enumerate(ptx.load_shared_128(source + i * 4)):
                weights[i + j] = word.bitcast(Float32)
        firsts, stops, targets = seen
        request, first_row = groups.place(group, plan.rows)
        for i in range_constexpr(cute.size(firsts)):
            row = first + i
            is_row = first_row + row < groups.count
            place = at.windows + (buffer * 2 * plan.rows + (row if is_row else Int32(0))) * 4
            start = Int32(0)
            if const_expr(not self.paged):
                start = ptx.load_shared_s32(place)
            begin, end, shift = windows.clip(start, ptx.load_shared_s32(place + plan.rows * 4))
            firsts[i] = begin
            stops[i] = end if is_row else begin
            number = Int64(request) * Int64(groups.count) + Int64(first_row + row)
            targets[i] = out + number * out_stride - Int64(shift) * 4

    @cute.jit
    def add_all(self, products: Any, weights: Any, count: cutlass.Constexpr) -> Any:
        """Sums over heads of the thread's key, for `count` rows whose products begin at an address. Some products are
        loaded while others are added up."""
        width = self.width
        pieces = count * self.plan.heads // width
        sums = [[Float32(0.0)] * SUMS for _ in range(count)]
        coming = ptx.start_tensor_load(products, width)
        for piece in range_constexpr(pieces):
            words = ptx.wait_tensor_loads(coming)
            if const_expr(piece + 1 < pieces):
                coming = ptx.start_tensor_load(products + (piece + 1) * width, width)
            row = piece * width // self.plan.heads
            for i in range_constexpr(0, width, 2):
                pair = [ptx.relu(words[i + j].bitcast(Float32)) for j in range(2)]
                weight = [weights[piece * width + i + j] for j in range(2)]
                sums[row][i % SUMS : i % SUMS + 2] = ptx.fma_f32x2(pair, weight, sums[row][i % SUMS : i % SUMS + 2])
        return [ptx.add_rn(ptx.add_rn(a, b), ptx.add_rn(c, d)) for a, b, c, d in sums]
