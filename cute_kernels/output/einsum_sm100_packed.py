"""Kernel of deepseek_v4_fp8_einsum on Blackwell for scales in words: tensor cores multiply with them.

As einsum_sm100.py, but that products of all chunks of a tile are summed in tensor memory, in fp32. A word has the bytes
of four chunks, so it is copied, as it is, to shared memory and on to tensor memory once for these four; a product says
which byte it takes. The rows' words lie as umma.scale_offset has them, then those of the columns, 128 at a time.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import barriers, ptx, umma
from cute_kernels.output.einsum_sm100 import BlackwellEinsumKernel, Results
from cute_kernels.output.einsum_sm100_plan import ROWS, SCALE_COLUMNS
from cute_kernels.output.einsum_tiles import CHUNK, WARP

BYTES = 4
"""Chunks that a word has scales of."""

BEHIND = 2
"""Stages of scales that are on their way while the next one is asked for."""

BLOCK_BYTES = ROWS * 4
"""Of the words of 128 rows or columns."""


class PackedEinsumKernel(BlackwellEinsumKernel):
    """Entry point: as BlackwellEinsumKernel, with scales that are words."""

    @cute.jit
    def copy_scales(
        self, tiles: Any, ring: Any, scale: Any, a_scale: Any, b_scale: Any, rows: Any, columns: Any, chunks: Any
    ) -> None:
        """Fill the ring with the words of all tiles. By one warp."""
        plan = self.plan
        lane = cute.arch.lane_idx()
        stage, phase = barriers.start()
        arriving, count = Int32(0), Int32(0)
        for number in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            group, row_tile, column_tile = tiles.place(number)
            # rows and columns beyond the last have no words of their own; their results are not stored
            first_row, first_column = row_tile * ROWS + lane, column_tile * plan.columns + lane
            own_rows = [cutlass.min(first_row + i, rows - 1) for i in range(0, ROWS, WARP)]
            own_columns = [
                cutlass.min(first_column + i, columns - 1) for i in range(0, plan.column_scales * CHUNK, WARP)
            ]
            sources = [a_scale.at(row, group) for row in own_rows]
            sources += [b_scale.at(group, column) for column in own_columns]
            for index in cutlass.range(chunks // BYTES, unroll=1):
                ring.wait_empty(stage, phase)
                for i in range_constexpr(len(sources)):
                    stride = a_scale.strides[2] if const_expr(i < ROWS // WARP) else b_scale.strides[2]
                    target = scale + stage * (plan.scales * 4) + i // 4 * BLOCK_BYTES + lane * 16 + i % 4 * 4
                    ptx.copy_async_32(target, sources[i] + Int64(index) * stride)
                cute.arch.cp_async_commit_group()
                count += 1
                if count > BEHIND:
                    cute.arch.cp_async_wait_group(BEHIND)
                    arriving = self.announce(ring, arriving)
                stage, phase = barriers.advance(stage, phase, plan.scale_stages)
        cute.arch.cp_async_wait_group(0)
        for _ in cutlass.range(cutlass.min(count, BEHIND), unroll=1):
            arriving = self.announce(ring, arriving)

    @cute.jit
    def announce(self, ring: Any, stage: Any) -> Any:
        """Say that the lane's words are in a stage. The next one."""
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(ring.full(stage))
        return barriers.advance(stage, Int32(0), self.plan.scale_stages)[0]

    @cute.jit
    def start_products(self, tiles: Any, rings: Any, scale: Any, a: Any, b: Any, tensor: Any, chunks: Any) -> None:
        """Multiply the chunks in the ring. By one warp. Arguments as BlackwellEinsumKernel's."""
        plan = self.plan
        ring, scale_ring, product_ring = rings
        stage, phase = barriers.start()
        scale_stage, scale_phase = barriers.start()
        buffer, use = barriers.start()
        scale_buffer = Int32(0)
        for _ in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            product_ring.wait_empty(buffer, use)
            for index in cutlass.range(chunks // BYTES, unroll=1):
                scale_ring.wait_full(scale_stage, scale_phase)
                ptx.fence_tensor_after()
                scales = tensor + plan.scales_at + scale_buffer * plan.scale_width
                with cute.arch.elect_one():
                    for block in range_constexpr(1 + plan.column_scales):
                        source = scale + scale_stage * (plan.scales * 4) + block * BLOCK_BYTES
                        ptx.copy_scales(scales + block * SCALE_COLUMNS, ptx.descriptor_at(umma.SCALES, source))
                    ptx.commit_tensor(scale_ring.empty(scale_stage).toint())
                for part in range_constexpr(BYTES):
                    ring.wait_full(stage, phase)
                    ptx.fence_tensor_after()
                    with cute.arch.elect_one():
                        rows = ptx.descriptor_at(plan.operand, a + stage * (ROWS * CHUNK))
                        weights = ptx.descriptor_at(plan.operand, b + stage * (plan.columns * CHUNK))
                        for number, step in enumerate(plan.steps):
                            ptx.tensor_mma_scaled(
                                tensor + buffer * plan.columns,
                                rows + (step >> 4),
                                weights + (step >> 4),
                                plan.scaled_instruction(part),
                                scales,
                                scales + SCALE_COLUMNS,
                                index if part + number == 0 else 1,
                                kind="mxf8f6f4",
                            )
                        ptx.commit_tensor(ring.empty(stage).toint())
                    stage, phase = barriers.advance(stage, phase, plan.stages)
                scale_buffer = barriers.advance(scale_buffer, Int32(0), plan.scale_buffers)[0]
                scale_stage, scale_phase = barriers.advance(scale_stage, scale_phase, plan.scale_stages)
            with cute.arch.elect_one():
                ptx.commit_tensor(product_ring.full(buffer).toint())
            buffer, use = barriers.advance(buffer, use, plan.buffers)

    @cute.jit
    def consume_products(
        self, thread: Any, tiles: Any, rings: Any, scale: Any, tensor: Any, results: Results, chunks: Any
    ) -> None:
        """Store the tiles' results. By two warpgroups: a thread has a row, and half of the tile's columns."""
        plan = self.plan
        product_ring = rings[2]
        own_row, own_column, products = self.own_place(thread, tensor)
        buffer, use = barriers.start()
        for number in cutlass.range(tiles.first, tiles.end, tiles.step, unroll=1):
            target, left = self.own_results(tiles.place(number), own_row, own_column, results)
            product_ring.wait_full(buffer, use)
            ptx.fence_tensor_after()
            for first in range_constexpr(0, plan.width, self.piece):
                words = ptx.load_tensor_memory(products + (buffer * plan.columns + first), self.piece, Float32)
                self.store(list(words), target + first * 2, left - first)
            ptx.fence_tensor_before()
            cute.arch.sync_warp()
            if thread % WARP == 0:
                cute.arch.mbarrier_arrive(product_ring.empty(buffer))
            buffer, use = barriers.advance(buffer, use, plan.buffers)
