"""The two warpgroups of Hopper's prefill kernel that sum up results: O += P V of half of the columns each."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    END,
    KEYS,
    LABEL,
    LAST,
    NOTE,
    P_BITS,
    P_BUFFERS,
    P_BYTES,
    ROWS,
    SIDE,
    STAGE_BYTES,
    Barriers,
    Output,
    Places,
    Plan,
    Query,
    Work,
    uniform_tile,
)

STEPS = KEYS // 16


class Back:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cute.jit
    def run(
        self,
        thread: Any,
        side: Any,
        work: Work,
        q: Query,
        out: Output,
        ready: Barriers,
        pv: cute.TiledMma,
        p_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
        at: Places,
    ) -> None:
        """Store columns 256 * side to 256 * side + 255 of the results. By a warpgroup."""
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        part = pv.get_slice(thread)
        total = cute.make_rmem_tensor(part.partition_shape_C((ROWS, SIDE)), Float32)
        own_row = warp * 16 + (lane >> 2)

        tile = Int32(0)
        stage, phase = barriers.start()
        mark, coming = Int32(0), work.first
        while mark & END == 0:
            angles = (Int32(0), Int32(0))
            if const_expr(out.quant is not None):
                # there is time: the first tile's weights are not there yet
                angles = out.quant.angles(work.place(coming)[0], lane)
                coming = coming + work.step
            if const_expr(self.plan.queries_in_ring):
                # the first stage has the queries
                stage, phase = ready.stages.advance(stage, phase)
            total.fill(0.0)
            shares = [Float32(0.0), Float32(0.0)]
            mark, item = Int32(0), Int32(0)
            while mark & LAST == 0:
                buffer = tile & P_BUFFERS - 1
                ready.weights.wait_full(buffer, tile >> P_BITS & 1)
                ready.stages.wait_full(stage, phase)
                mark, item = ptx.load_shared_64(at.label + buffer * LABEL)
                note_at = at.note + (buffer * ROWS + own_row) * NOTE
                notes = [ptx.load_shared_f32x2(note_at + half * (8 * NOTE)) for half in range(2)]
                factors, shares = [note[0] for note in notes], [note[1] for note in notes]
                if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
                    self.multiply(total, factors)
                values_at = at.stages + stage * STAGE_BYTES + side * (STAGE_BYTES // 2)
                v_tile = uniform_tile(values_at, v_layout, self.plan.dtype)
                transposed = cute.composition(v_tile, cute.make_layout((SIDE, KEYS), stride=(KEYS, 1)))
                values = pv.make_fragment_B(part.partition_B(transposed))
                p_tile = uniform_tile(at.p + buffer * P_BYTES, p_layout, self.plan.dtype)
                weights = pv.make_fragment_A(part.partition_A(p_tile))
                if const_expr(self.plan.readers_fence):
                    cute.arch.fence_view_async_shared()
                warpgroup.fence()
                for step in range_constexpr(STEPS):
                    cute.gemm(pv, total, weights[None, None, step], values[None, None, step], total)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                self.let_go(ready.weights.empty(buffer), ready.stages.empty(stage), lane)
                stage, phase = ready.stages.advance(stage, phase)
                tile = tile + 1
            if const_expr(out.quant is not None):
                row, first = work.place(item)
                head = first + own_row
                out.quant.store(total, shares, angles, row, head, q.heads - head, side, lane)
            else:
                self.store(total, shares, item, side, own_row, lane, work, q, out, at)

    @cute.jit
    def store(
        self,
        total: cute.Tensor,
        shares: Any,
        item: Any,
        side: Any,
        own_row: Any,
        lane: Any,
        work: Work,
        q: Query,
        out: Output,
        at: Places,
    ) -> None:
        """Store what an item's rows of O come to."""
        if const_expr(out.scale is not None):
            shares = [share * out.scale for share in shares]
        self.multiply(total, shares)
        row, first = work.place(item)
        target = out.base + Int64(row) * out.row + Int64(first + own_row) * out.head + side * (SIDE * 2)
        wgmma.store_bf16(total, lane, target, out.head, q.count(first) - own_row, Int32(SIDE), SIDE, out.policy)

    @cute.jit
    def multiply(self, total: cute.Tensor, factors: Any) -> None:
        for i in range_constexpr(SIDE // 2):
            total[i] = total[i] * factors[i // 2 % 2]

    @cute.jit
    def let_go(self, weights: Any, stage: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(weights)
            cute.arch.mbarrier_arrive(stage)
