"""The warps of the score kernel on Blackwell between those that bring keys and those that add up: one starts products,
one puts the scales of MXFP4 where products take them from.

Both go through the ring of keys tile by tile, as the other warps do. A buffer of tensor memory gets a tile's products
when the warpgroups have loaded what was there.

Scales come as a word of four for each key and head, in their order. Products want words of rows r, r + 32, r + 64 and
r + 96 side by side (umma.scale_offset), so a warp puts 128 of them in that order, in their place; from there they are
copied into tensor memory.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx, umma
from cute_kernels.indexer.logits_plan import QUERIES, WARP
from cute_kernels.indexer.logits_scores import await_tile
from cute_kernels.indexer.logits_sm100_plan import BUFFERS, SCALE_COLUMNS, TILE, BlackwellPlan


class Products:
    """The parts of both warps.

    rings     of keys, queries and buffers of products
    ordered   MXFP4: the mbarriers, one per stage, that scales in order arrive on
    """

    def __init__(self, plan: BlackwellPlan) -> None:
        self.plan = plan

    @cute.jit
    def start(self, rings: Any, ordered: Any, at: Any, keys: Any, queries: Any, tensor: Any) -> None:
        """Products of all tiles of the block's share, into tensor memory at an address. By a warp. keys, queries:
        addresses of their stages and buffers."""
        plan = self.plan
        ring, query_ring, product_ring = rings
        stage, phase = barriers.start()
        current, turn, number = Int32(-1), Int32(-1), Int32(0)
        is_running = Int32(1)
        while is_running != 0:
            tile = await_tile(ring, at, stage, phase)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                # products only let go of what they read themselves
                cute.arch.sync_warp()
                if cute.arch.lane_idx() == 0:
                    cute.arch.mbarrier_arrive(ring.empty(stage))
                is_new = tile.group != current
                if is_new:
                    current, turn = tile.group, turn + 1
                    query_ring.wait_full(turn % QUERIES, turn // QUERIES & 1)
                product_ring.wait_empty(number % BUFFERS, number // BUFFERS & 1)
                if const_expr(plan.mxfp4):
                    ptx.wait_mbarrier((ordered + stage).toint(), phase)
                ptx.fence_tensor_after()
                with cute.arch.elect_one():
                    self.multiply(
                        tensor,
                        at,
                        keys + stage * (TILE * plan.row_bytes),
                        queries + turn % QUERIES * (plan.columns * plan.row_bytes),
                        stage,
                        turn % QUERIES,
                        number % BUFFERS,
                        is_new,
                    )
                    ptx.commit_tensor(product_ring.full(number % BUFFERS).toint())
                number += 1
                stage, phase = barriers.advance(stage, phase, plan.stages)

    @cute.jit
    def multiply(
        self,
        tensor: Any,
        at: Any,
        keys: Any,
        queries: Any,
        stage: Any,
        query_buffer: Any,
        buffer: Any,
        is_new: Any,
    ) -> None:
        """The products of a tile. By one thread. is_new: whether the queries are new in their buffer."""
        plan = self.plan
        key_scales = tensor + plan.key_scales_at + buffer * SCALE_COLUMNS
        head_scales = tensor + plan.head_scales_at + query_buffer * (plan.scale_blocks * SCALE_COLUMNS)
        if const_expr(plan.mxfp4):
            if is_new:
                for block in range_constexpr(plan.scale_blocks):
                    source = at.head_scales + (query_buffer * plan.scale_rows + block * TILE) * 4
                    target = head_scales + block * SCALE_COLUMNS
                    ptx.copy_scales(target, ptx.descriptor_at(umma.SCALES, source))
            ptx.copy_scales(key_scales, ptx.descriptor_at(umma.SCALES, at.scales + stage * (TILE * 4)))
        target = tensor + buffer * plan.columns
        rows, heads = (ptx.descriptor_at(plan.operand, address) for address in (keys, queries))
        for number, (step, instruction) in enumerate(plan.steps):
            operands = rows + (step >> 4), heads + (step >> 4)
            if const_expr(plan.mxfp4):
                ptx.tensor_mma_scaled(target, *operands, instruction, key_scales, head_scales, min(number, 1))
            else:
                ptx.tensor_mma(target, *operands, instruction, min(number, 1), kind="f8f6f4")

    @cute.jit
    def order_scales(self, rings: Any, ordered: Any, at: Any) -> None:
        """Put the scales of all tiles, and of the groups' queries, in order. By a warp."""
        plan = self.plan
        ring, query_ring = rings[:2]
        lane = cute.arch.lane_idx()
        stage, phase = barriers.start()
        current, turn = Int32(-1), Int32(-1)
        is_running = Int32(1)
        while is_running != 0:
            tile = await_tile(ring, at, stage, phase)
            if tile.group < 0:
                is_running = Int32(0)
            else:
                if tile.group != current:
                    current, turn = tile.group, turn + 1
                    query_ring.wait_full(turn % QUERIES, turn // QUERIES & 1)
                    for block in range_constexpr(plan.scale_blocks):
                        self.order(at.head_scales + (turn % QUERIES * plan.scale_rows + block * TILE) * 4, lane)
                self.order(at.scales + stage * (TILE * 4), lane)
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(ordered + stage)
                stage, phase = barriers.advance(stage, phase, plan.stages)

    @cute.jit
    def order(self, scales: Any, lane: Any) -> None:
        """128 words at an address. By a warp."""
        words = [ptx.load_shared_s32(scales + (lane + i * WARP) * 4) for i in range(TILE // WARP)]
        cute.arch.sync_warp()
        ptx.store_shared_128(scales + lane * 16, words)
