"""What the decode kernel of teams makes of an item: the teams' maxima, sums and O become the item's.

All warps agree on the maxima first. Then each stores what it has of O, by its factors, where others find it, some of
its columns at a time; and each adds up some heads of the columns of its rank, over all teams, for the caller.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.convert import bf16_floats, bf16_words
from cute_kernels.sparse_mla.portable_output import Output
from cute_kernels.sparse_mla.quant_output import SCALED, codes_of_lanes, load_two_angles, turn_two
from cute_kernels.sparse_mla.teams_plan import BLOCK, CHUNK, GROUP, LANES, SHIFT, first_column
from cute_kernels.sparse_mla.teams_source import Own


@cute.jit
def finish(
    out: Output, place: Any, o: Any, wide: Any, tops: Any, amounts: Any, base: Any, own: Own, lane: Any,
    plan: cutlass.Constexpr, is_fp32: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Store the results of an item.

    place           part, batch, token and first head
    tops, amounts   registers: the team's maxima, and the lane's part of its sums, lost
    base            address of shared memory
    """
    if const_expr(out.quant is not None):
        # asked for early: the position is waited for
        _, batch, token, _ = place
        angles_at = out.quant.angles_at(batch * out.tokens + token) + Int64(lane % 16 * 8)
        held = cute.make_rmem_tensor((plan.heads // plan.teams * (plan.width // 4) // LANES * 2,), Int32)
    agree(out, place, tops, amounts, base, own, lane, plan)
    for number in range_constexpr(plan.columns // plan.width):
        if const_expr(number > 0):
            cute.arch.sync_threads()
        hand_over(o, wide, amounts, number, base, own, lane, plan)
        cute.arch.sync_threads()
        if const_expr(out.quant is not None):
            add_up_codes(out, place, number, held, angles_at, base, own, lane, plan)
        else:
            add_up(out, place, number, base, own, lane, plan, is_fp32)


@cute.jit
def agree(
    out: Output, place: Any, tops: Any, amounts: Any, base: Any, own: Own, lane: Any, plan: cutlass.Constexpr
) -> None:
    """Store the log-sum-exps, and put what the warp's O is multiplied with where its sums were."""
    part, batch, token, first = place
    r, c = lane >> 2, lane & 3
    # asked for together, and early
    logits = cute.make_rmem_tensor((2 * plan.groups,), Float32)
    logits.fill(-Float32.inf)
    if out.sink != 0:
        for i in range_constexpr(2 * plan.groups):
            head = first + i // 2 * GROUP + 2 * c + i % 2
            word = ptx.load_global_s32_where(head < out.heads, out.sink + Int64(head) * 4, is_shared=True)
            logits[i] = word.bitcast(Float32)
    for step in (4, 8, 16):
        for i in range_constexpr(2 * plan.groups):
            amounts[i] = amounts[i] + cute.arch.shuffle_sync_bfly(amounts[i], step)
    maxima = base + plan.maxima_at + 2 * c * 8
    if own.rank == 0 and r == 0:
        for group in range_constexpr(plan.groups):
            words = [value[2 * group + i].bitcast(Int32) for i in range(2) for value in (tops, amounts)]
            ptx.store_shared_128(maxima + (own.team * plan.heads + group * GROUP) * 8, words)
    # the results of the item before have been read, too
    cute.arch.sync_threads()
    for group in range_constexpr(plan.groups):
        mine = maxima + group * (GROUP * 8)
        found = [ptx.load_shared_128(mine + team * (plan.heads * 8)) for team in range(plan.teams)]
        for i in range_constexpr(2):
            head = first + group * GROUP + 2 * c + i
            exists = head < out.heads
            top = tops[2 * group + i]
            for four in found:
                top = ptx.max_f32(top, four[2 * i].bitcast(Float32))
            whole = Float32(0.0)
            for four in found:
                whole = whole + four[2 * i + 1].bitcast(Float32) * ptx.exp2(four[2 * i].bitcast(Float32) - top)
            is_empty = whole == Float32(0.0)  # and not where it is NaN
            share = whole + ptx.exp2(logits[2 * group + i] * Float32(ptx.LOG2_E) - top)
            factor = ptx.exp2(tops[2 * group + i] - top) * ptx.reciprocal(share)
            amounts[2 * group + i] = Float32(0.0) if is_empty else factor
            lse = Float32(Float32.inf) if is_empty else (top + ptx.log2(whole)) * Float32(ptx.LN_2)
            is_chosen = exists and r == 0 and own.rank == 0 and own.team == 0
            out.lse.store((part, batch, head, token), lse, is_chosen)


@cute.jit
def hand_over(
    o: Any, wide: Any, factors: Any, number: cutlass.Constexpr, base: Any, own: Own, lane: Any, plan: cutlass.Constexpr
) -> None:
    """Store some of the warp's columns of O."""
    r, c = lane >> 2, lane & 3
    unit = Float32(2.0**-SHIFT) if wide[0] == 0 else Float32(1.0)
    scaled = [factors[i] * unit for i in range(2 * plan.groups)]
    results = base + plan.results_at + (own.team * plan.team + own.rank) * plan.result_bytes + 2 * c * plan.pitch
    chunks, codes = const_expr(plan.width // CHUNK), const_expr(plan.codes * BLOCK // CHUNK)
    for i in range_constexpr(chunks):
        chunk, at = const_expr(number * chunks + i), results + i * (CHUNK * 4)
        if const_expr(chunk < codes):
            store_chunk(o, scaled, chunk, False, at, r, plan)
        elif own.is_last:
            store_chunk(o, factors, chunk, True, at, r, plan)
        else:
            store_chunk(o, scaled, chunk, False, at, r, plan)


def store_chunk(o: Any, factors: Any, chunk: int, is_rope: bool, at: Any, r: Any, plan: Any) -> None:
    near, far = first_column(is_rope, r)
    for group in range(plan.groups):
        first = plan.sums(chunk // 4, chunk % 4, group)
        words = o.get([first + i for i in range(4)])
        words = [(words[i].bitcast(Float32) * factors[2 * group + i % 2]).bitcast(Int32) for i in range(4)]
        for i in range(2):
            row = at + (group * GROUP + i) * plan.pitch
            if is_rope:
                ptx.store_shared_s32(row + near * 4, words[i])
                ptx.store_shared_s32(row + far * 4, words[2 + i])
            else:
                ptx.store_shared_64(row + near * 4, words[i], words[2 + i])


@cute.jit
def add_up(
    out: Output, place: Any, number: cutlass.Constexpr, base: Any, own: Own, lane: Any, plan: cutlass.Constexpr,
    is_fp32: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Add up what the warps of this rank have handed over, of as many heads as there are for each team."""
    part, batch, token, first = place
    size = const_expr(4 if is_fp32 else 2)
    quads, heads = const_expr(plan.width // 4), const_expr(plan.heads // plan.teams)
    start = out.base + Int64(part) * out.strides[0] + Int64(batch) * out.strides[1] + Int64(token) * out.strides[2]
    start = start + Int64(own.column + number * plan.width) * size
    results = base + plan.results_at + own.rank * plan.result_bytes
    for i in range_constexpr(heads * quads // LANES):
        number = i * LANES + lane
        row, quad = own.team * heads + number // quads, number % quads
        at = results + row * plan.pitch + quad * 16
        total = sum_of_teams(at, plan)
        exists = first + row < out.heads
        target = start + Int64(first + row) * out.strides[3] + quad * (4 * size)
        if const_expr(is_fp32):
            ptx.store_global_128(target, [value.bitcast(Int32) for value in total], exists)
        else:
            ptx.store_global_64(target, ptx.bf16x2(total[0], total[1]), ptx.bf16x2(total[2], total[3]), exists)


def sum_of_teams(at: Any, plan: Any) -> list[Any]:
    """Four neighbouring columns of what the warps of a rank have handed over."""
    total = [Float32(0.0)] * 4
    for team in range(plan.teams):
        four = ptx.load_shared_128(at + team * (plan.team * plan.result_bytes))
        total = [total[j] + four[j].bitcast(Float32) for j in range(4)]
    return total


@cute.jit
def add_up_codes(
    out: Output, place: Any, number: cutlass.Constexpr, held: Any, angles_at: Any, base: Any, own: Own, lane: Any,
    plan: cutlass.Constexpr,
) -> None:  # fmt: skip
    """As add_up, for codes. The 128 columns of a scale come in one turn, or in two.

    held        registers for bf16 pairs of columns that come in the first of two turns
    angles_at   address of the cosines of the lane's pairs, if its columns are rotary
    """
    _, batch, token, first = place
    turns = const_expr(SCALED // plan.width)
    quads, heads = const_expr(plan.width // 4), const_expr(plan.heads // plan.teams)
    column = own.column + number * plan.width
    token = batch * out.tokens + token
    results = base + plan.results_at + own.rank * plan.result_bytes
    is_last = const_expr(number == plan.columns // plan.width - 1)
    if const_expr(is_last):
        angles = load_two_angles(angles_at)
    for i in range_constexpr(heads * quads // LANES):
        row, quad = own.team * heads + (i * LANES + lane) // quads, lane % quads
        pairs = bf16_words(sum_of_teams(results + row * plan.pitch + quad * 16, plan))
        if const_expr(number % turns < turns - 1):
            held[2 * i], held[2 * i + 1] = pairs
        else:
            values = bf16_floats(pairs)
            if const_expr(is_last):
                values = turn_two(values, angles, own.is_last & (quad >= quads - 16))
            if const_expr(turns > 1):
                values = bf16_floats([held[2 * i], held[2 * i + 1]]) + values
            byte, codes = codes_of_lanes(values, quads)
            exists = first + row < out.heads
            out.quant.store_scale(byte, token, first + row, column // SCALED, quad, exists)
            target = out.quant.codes_at(token, first + row) + (column - (turns - 1) * plan.width + quad * 4)
            for turn in range_constexpr(turns):
                ptx.store_global_s32(target + turn * plan.width, codes[turn], exists)
