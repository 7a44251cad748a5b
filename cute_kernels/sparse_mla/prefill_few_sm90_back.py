"""The warpgroup of Hopper's prefill kernel for few heads that sums up results: O^T += V^T P.

Tensor cores read V^T from the rows as they lie, columns on their long side. A thread has columns of two or four heads.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.dsl import barriers, ptx, wgmma
from cute_kernels.dsl.convert import bf16_floats, e4m3_words, ue8m0_from_absmax, ue8m0_inverse
from cute_kernels.dsl.reduce import over_quad, pairwise
from cute_kernels.dsl.rope import HALF_TABLE_BYTES, rotate_pair_back
from cute_kernels.numerics import E4M3_MAX, OUTPUT_FLOOR
from cute_kernels.sparse_mla.prefill_few_sm90_plan import (
    BACK_BARRIER,
    P_BUFFERS,
    PARTS,
    UNIT_BYTES,
    UNIT_COLUMNS,
    UNITS,
    Barriers,
    Places,
    Plan,
)
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS, LABEL, LAST, Output, Query, Work, uniform_tile

STEPS = KEYS // 16


class FewBack:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cute.jit
    def run(
        self,
        thread: Any,
        work: Work,
        q: Query,
        out: Output,
        ready: Barriers,
        pv: cute.TiledMma,
        p_layout: cute.ComposedLayout,
        unit_layout: cute.ComposedLayout,
        at: Places,
    ) -> None:
        """Store the results. By a warpgroup.

        pv   adds to what is there
        """
        lane = thread & 31
        warp = cute.arch.make_warp_uniform(thread >> 5)
        part_of = pv.get_slice(thread)
        shape = part_of.partition_shape_C((UNIT_COLUMNS, self.plan.heads))
        totals = [cute.make_rmem_tensor(shape, Float32) for _ in range(PARTS)]

        tile = Int32(0)
        unit, phase = barriers.start()
        item = work.first
        while item < work.end:
            angles = [(Int32(0),) * 4] * 2
            if const_expr(out.quant is not None):
                # there is time: the first tile's weights are not there yet. Of four pairs of the last unit's columns
                angles_at = out.quant.angles_at(item) + (warp * 8 + (lane & 1) * 4) * 4
                angles = [ptx.load_global_128_again(angles_at + half * HALF_TABLE_BYTES) for half in range(2)]
            for total in totals:
                total.fill(0.0)
            mark, buffer = Int32(0), Int32(0)
            while mark & LAST == 0:
                buffer = tile % P_BUFFERS
                ready.weights.wait_full(buffer, tile // P_BUFFERS & 1)
                mark, has_factors = ptx.load_shared_64(at.label + buffer * LABEL)
                if has_factors != 0:
                    self.multiply(totals, self.of_heads(at.factors + buffer * self.plan.note_bytes, lane))
                p_tile = uniform_tile(at.p + buffer * self.plan.p_bytes, p_layout, BFloat16)
                weights = pv.make_fragment_B(part_of.partition_B(p_tile))
                units, values = [], []
                for _ in range_constexpr(PARTS):
                    # full since the scores waited for it; this orders the reads behind what filled it
                    ready.units.wait_full(unit, phase)
                    units.append(unit)
                    rows = uniform_tile(at.units + unit * UNIT_BYTES, unit_layout, BFloat16)
                    transposed = cute.composition(rows, cute.make_layout((UNIT_COLUMNS, KEYS), stride=(KEYS, 1)))
                    values.append(pv.make_fragment_A(part_of.partition_A(transposed)))
                    unit, phase = barriers.advance(unit, phase, UNITS)
                # of weights stored in the ordinary way; where they are stored, it would wait for the stores
                cute.arch.fence_view_async_shared()
                warpgroup.fence()
                for i in range_constexpr(PARTS):
                    for step in range_constexpr(STEPS):
                        cute.gemm(pv, totals[i], values[i][None, None, step], weights[None, None, step], totals[i])
                    warpgroup.commit_group()
                for i in range_constexpr(PARTS):
                    warpgroup.wait_group(PARTS - 1 - i)
                    self.let_go(ready.units.empty(units[i]), lane)
                if mark & LAST == 0:
                    self.let_go(ready.weights.empty(buffer), lane)
                tile = tile + 1
            shares = self.of_heads(at.shares + buffer * self.plan.note_bytes, lane)
            if const_expr(out.scale is not None):
                shares = [share * out.scale for share in shares]
            self.multiply(totals, shares)
            if const_expr(out.quant is not None):
                self.store_codes(totals, angles, item, lane, warp, q, out, at)
            else:
                target = out.base + Int64(item) * out.row
                for i in range_constexpr(PARTS):
                    place = target + i * (UNIT_COLUMNS * 2)
                    wgmma.store_bf16_transposed(totals[i], lane, warp, place, out.head, q.heads, self.plan.heads)
            # the shares have been used
            self.let_go(ready.weights.empty(buffer), lane)
            item = item + work.step

    @cute.jit
    def store_codes(
        self, totals: Any, angles: Any, item: Any, lane: Any, warp: Any, q: Query, out: Output, at: Places
    ) -> None:
        """Store an item's results as codes. A unit is the 128 columns of a scale; a thread has 8 neighbouring ones of a
        head of every 8, those of tile lane % 4 // 2 of the unit's two."""
        # all warps have read what they told each other of the item before
        cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=128)
        own_at = at.absmax + (warp * self.plan.heads + (lane >> 2)) * (PARTS * 4)
        eights = []
        for block in range_constexpr(self.plan.heads // 8):
            largest = []
            for i in range_constexpr(PARTS):
                values = bf16_floats(wgmma.transposed_bf16(totals[i], lane, 0, block, self.plan.heads))
                if const_expr(i == PARTS - 1):
                    values = self.turn(values, angles, lane & 2 != 0)
                most = Float32(0.0)
                for value in values:
                    most = ptx.max_f32(most, ptx.abs_f32(value))
                largest.append(over_quad(most, ptx.max_f32).bitcast(Int32))
                eights.append(values)
            if lane & 3 == 0:
                ptx.store_shared_128(own_at + block * (8 * PARTS * 4), largest)
        cute.arch.barrier(barrier_id=BACK_BARRIER, number_of_threads=128)
        for block in range_constexpr(self.plan.heads // 8):
            head = block * 8 + (lane >> 2)
            is_there = head < q.heads
            target = out.quant.codes_at(item, head) + ((lane & 2) * 32 + warp * 16 + (lane & 1) * 8)
            most_at = at.absmax + head * (PARTS * 4)
            warps = [ptx.load_shared_128(most_at + other * (self.plan.heads * PARTS * 4)) for other in range(4)]
            for i in range_constexpr(PARTS):
                most = pairwise([four[i].bitcast(Float32) for four in warps], ptx.max_f32)
                byte = ue8m0_from_absmax(most, E4M3_MAX, OUTPUT_FLOOR)
                out.quant.store_scale(byte, item, head, i, lane & 3, is_there & (warp == i))
                factor = ue8m0_inverse(byte)
                codes = e4m3_words([value * factor for value in eights[block * PARTS + i]])
                ptx.store_global_64(target + i * UNIT_COLUMNS, codes[0], codes[1], is_there)

    @cute.jit
    def turn(self, values: Any, angles: Any, is_rope: Any) -> Any:
        """Eight neighbouring columns, turned back if they are rotary."""
        turned = []
        for i in range_constexpr(4):
            cos, sin = (words[i].bitcast(Float32) for words in angles)
            pair = rotate_pair_back(values[2 * i], values[2 * i + 1], cos, sin)
            turned += [pair[j] if is_rope else values[2 * i + j] for j in range(2)]
        return turned

    def of_heads(self, address: Any, lane: Any) -> list[Any]:
        """The thread's of the fp32 numbers that heads have."""
        pairs = [ptx.load_shared_f32x2(address + (8 * i + (lane & 3) * 2) * 4) for i in range(self.plan.heads // 8)]
        return [number for pair in pairs for number in pair]

    @cute.jit
    def multiply(self, totals: Any, factors: Any) -> None:
        """Each total's column with its head's factor."""
        own = self.plan.heads // 2
        for total in totals:
            for i in range_constexpr(cute.size(total)):
                total[i] = total[i] * factors[i % own // 4 * 2 + i % 2]

    @cute.jit
    def let_go(self, empty: Any, lane: Any) -> None:
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(empty)
