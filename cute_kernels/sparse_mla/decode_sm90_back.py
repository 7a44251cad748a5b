"""The back of Hopper's decode kernel: O += P V, and the results of an item.

Products have 64 rows whatever the heads. Fewer heads leave rows of P that are zero and rows of O that nobody stores;
the tensor cores' time for them is there, since the front takes longer.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.decode_sm90_plan import (
    BACK_BARRIER,
    FIRST_BACK_THREAD,
    HALF,
    KEYS,
    LABEL,
    LAST,
    NOTE,
    P_BUFFERS,
    P_BYTES,
    PAIR,
    PARTIAL_BYTES,
    ROWS,
    SIDE,
    STAGE_BYTES,
    STAGES,
    TURNS,
    WORDS_BYTES,
    Barriers,
    Output,
    Places,
    Work,
)

OWN_ROWS = 16
"""Of O, by a warp."""


class Back:
    def __init__(self, out_fp32: bool) -> None:
        self.out_fp32 = out_fp32

    @cute.jit
    def run(
        self,
        thread: Any,
        work: Work,
        out: Output,
        ready: Barriers,
        pv: cute.TiledMma,
        v_tile: cute.Tensor,
        at: Places,
    ) -> None:
        """Store results. By a warpgroup."""
        part = pv.get_slice(thread)
        transposed = cute.composition(v_tile, cute.make_layout((SIDE, KEYS, STAGES), stride=(KEYS, 1, SIDE * KEYS)))
        v_parts = pv.make_fragment_B(part.partition_B(transposed))
        weights = cute.make_rmem_tensor(part.partition_shape_A((ROWS, KEYS)), BFloat16)
        total = cute.make_rmem_tensor(part.partition_shape_C((ROWS, SIDE)), Float32)
        tile = Int32(0)
        for item in cutlass.range(work.first, work.end, work.step, unroll=1):
            angles = (Int32(0), Int32(0))
            if const_expr(out.quant is not None):
                # there is time: the first tile's weights are not there yet
                batch, token, _, _ = work.place(item)
                angles = out.quant.angles(batch * work.tokens.divisor + token, own_number() % 32)
            total.fill(0.0)
            mark = Int32(0)
            while mark & LAST == 0:
                buffer, stage = tile % P_BUFFERS, tile % STAGES
                ready.weights.wait_full(buffer, tile // P_BUFFERS & 1)
                mark = ptx.load_shared_s32(at.label + buffer * LABEL)
                note_at = at.note + (buffer * ROWS + own_number() // 32 * HALF + own_number() % 32 // 4) * NOTE
                factors = [ptx.load_shared_f32(note_at + half * (ROWS // 2 * NOTE)) for half in range(2)]
                if cute.arch.vote_any_sync((factors[0] != Float32(1.0)) | (factors[1] != Float32(1.0))):
                    self.rescale(total, factors)
                words = cute.recast_tensor(weights, Int32)
                own_at = at.partial + tile % TURNS * PARTIAL_BYTES + own_number() * 16
                other_at = at.p + buffer * P_BYTES + own_number() * 16
                rank = ptx.rank_again()
                for half in range_constexpr(2):
                    half_at = own_at if rank == half else other_at
                    for i in range_constexpr(2):
                        four = ptx.load_shared_128(half_at + i * WORDS_BYTES)
                        for j in range_constexpr(4):
                            words[8 * i + 2 * j + half] = four[j]
                # of what the front stored in the ordinary way
                cute.arch.fence_view_async_shared()
                warpgroup.fence()
                for step in range_constexpr(KEYS // 16):
                    cute.gemm(pv, total, weights[None, None, step], v_parts[None, None, step, stage], total)
                warpgroup.commit_group()
                if mark & LAST == 0:
                    # they are in registers
                    self.let_go_of_weights(buffer, ready)
                warpgroup.wait_group(0)
                if mark & LAST != 0:
                    if const_expr(out.quant is not None):
                        self.store_quantized(out, angles, total, buffer, at)
                    else:
                        self.store(out.strides[3], total, buffer, stage, at)
                    self.let_go_of_weights(buffer, ready)
                cute.arch.sync_warp()
                if own_number() % 32 == 0:
                    cute.arch.mbarrier_arrive(ready.stages.empty(stage))
                tile = tile + 1

    @cute.jit
    def let_go_of_weights(self, buffer: Any, ready: Barriers) -> None:
        cute.arch.sync_warp()
        if own_number() % 32 == 0:
            for block in range_constexpr(PAIR):
                cute.arch.mbarrier_arrive(ready.weights.empty(buffer), block)

    @cute.jit
    def rescale(self, total: Any, factors: Any) -> None:
        """Have O follow the maxima that moved."""
        for i in range_constexpr(SIDE // 2):
            total[i] = total[i] * factors[i // 2 % 2]

    @cute.jit
    def store(self, head_stride: Any, total: Any, buffer: Any, stage: Any, at: Places) -> None:
        """Store this block's columns of an item's rows of O."""
        lane = own_number() % 32
        warp = cute.arch.make_warp_uniform(own_number() // 32)
        _, heads, low, high = ptx.load_shared_128(at.label + buffer * LABEL)
        first = warp * OWN_ROWS
        size = const_expr(4 if self.out_fp32 else 2)
        target = ptx.pair(low, high) + Int64(first) * head_stride + ptx.rank_again() * (SIDE * size)
        note_at = at.note + (buffer * ROWS + warp * HALF + lane // 4) * NOTE + 4
        factors = [ptx.load_shared_f32(note_at + half * (ROWS // 2 * NOTE)) for half in range(2)]
        if const_expr(self.out_fp32):
            for half in range_constexpr(2):
                row = lane // 4 + 8 * half
                row_at = target + Int64(row) * head_stride + lane % 4 * 8
                for i in range_constexpr(SIDE // 8):
                    low, high = ((total[4 * i + 2 * half + j] * factors[half]).bitcast(Int32) for j in range(2))
                    ptx.store_global_64(row_at + i * 32, low, high, first + row < heads)
        else:
            # the tile's V has served: by way of its memory rows become whole
            cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=128)
            rows_at = at.v + stage * STAGE_BYTES + warp * (OWN_ROWS * SIDE * 2)
            matrix_at = rows_at + (lane % 16) * (SIDE * 2)
            for pair in range_constexpr(SIDE // 16):
                two = []
                for i in range_constexpr(4):
                    place, half = 8 * pair + 4 * (i // 2) + 2 * (i % 2), i % 2
                    two.append(ptx.bf16x2(*(total[place + j] * factors[half] for j in range(2))))
                chunk = (2 * pair + lane // 16) ^ (lane % 8)
                ptx.store_matrices(matrix_at + chunk * 16, two)
            cute.arch.sync_warp()
            for row in cutlass.range(cutlass.min(heads - first, OWN_ROWS), unroll=8):
                eight = ptx.load_shared_128(rows_at + row * (SIDE * 2) + (lane ^ (row % 8)) * 16)
                ptx.store_global_128(target + Int64(row) * head_stride + lane * 16, eight)

    @cute.jit
    def store_quantized(self, out: Output, angles: Any, total: Any, buffer: Any, at: Places) -> None:
        """Store what this block's columns of an item's rows of O are as codes."""
        lane = own_number() % 32
        warp = cute.arch.make_warp_uniform(own_number() // 32)
        _, heads, row, first = ptx.load_shared_128(at.label + buffer * LABEL)
        own = warp * OWN_ROWS + lane // 4
        note_at = at.note + (buffer * ROWS + warp * HALF + lane // 4) * NOTE + 4
        factors = [ptx.load_shared_f32(note_at + half * (ROWS // 2 * NOTE)) for half in range(2)]
        if warp * OWN_ROWS < heads:
            out.quant.store(total, factors, angles, row, first + own, heads - own, ptx.rank_again(), lane)


def own_number() -> Any:
    """The thread's number in the back, computed anew: the loop over tiles has no register to spare."""
    return ptx.thread_again() - FIRST_BACK_THREAD
