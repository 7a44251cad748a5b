"""What a warp of the portable kernels of prefill computes in a step, softmax apart: rows as bf16, its share of the
scores, its columns of O.

Lane l of a warp has, with r = l // 4 and c = l % 4:

    q[m][slab][s]   operand a of rows 16 m .. and, of the warp's slab, columns 16 c + 4 s .. + 3
    o[m][n]         four sums: rows 16 m + r and 8 further, columns 8 n + 2 c and + 1

In which order columns are summed is free: of Q and K a lane has 16 neighbouring ones of a row, so that it reads them 16
bytes at a time, and no two lanes from the same bank.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import convert, mma_sync, ptx
from cute_kernels.formats import FP8_DS_MLA, PLAIN_BF16, PLAIN_FP8
from cute_kernels.sparse_mla.mma_sync.operands import CHUNK, LANES, WARPS, wide_chunk
from cute_kernels.sparse_mla.portable_prefill_plan import SLAB, SLAB_ROW, SLABS

NO_SCALE = 127
"""The ue8m0 byte of 1."""


def one_scale() -> Any:
    """The factor of codes that have no scale, in a register, as instructions take no immediate pair."""
    return ptx.again(convert.scale_pair(Int32(NO_SCALE), Int32(NO_SCALE)))


@cute.jit
def load_query(q: Any, start: Any, row_bytes: Any, rows: Any, lane: Any, is_fp8: Any, plan: Any) -> None:
    """The lane's operands, zeros for heads that do not exist.

    start   address of the warp's first head and column; rows: how many heads there are from it on
    """
    size = const_expr(1 if is_fp8 else 2)
    start = start + Int64(lane >> 2) * row_bytes + Int64((lane & 3) * (16 * size))
    for m in range_constexpr(plan.tiles):
        for side in range_constexpr(2):
            row = 16 * m + 8 * side
            exists = row + (lane >> 2) < rows
            for slab in range_constexpr(plan.slabs):
                at = start + row_bytes * row + slab * (SLAB * size)
                words = list(ptx.load_global_128_where(exists, at))
                if const_expr(is_fp8):
                    words = convert.bf16_pairs_of_e4m3(words, [one_scale()])
                else:
                    words += ptx.load_global_128_where(exists, at + CHUNK)
                for i in range_constexpr(8):
                    place = ((m * plan.slabs + slab) * 4 + i // 2) * 4 + i % 2 * 2 + side
                    q.put(place, words[i] if exists else Int32(0))


@cute.jit
def share_scores(q: Any, target: Any, keys: Any, lane: Any, plan: cutlass.Constexpr) -> None:
    """Store the warp's share of Q K^T for a step.

    target   where the lane stores its share of row group 0 and keys 0 to 7
    keys     address of the warp's columns of key 0
    """
    at = keys + wide_chunk(lane >> 2, 2 * (lane & 3))
    other = at ^ CHUNK
    for _ in cutlass.range(plan.keys // 16, unroll=2):
        sums: list[Any] = [()] * (2 * plan.tiles)
        for slab in range_constexpr(plan.slabs):
            offsets = [n * (8 * SLAB_ROW) + slab * plan.slab_bytes for n in range(2)]
            words = [(*ptx.load_shared_128(at, offset), *ptx.load_shared_128(other, offset)) for offset in offsets]
            for s in range_constexpr(4):
                for n in range_constexpr(2):
                    for m in range_constexpr(plan.tiles):
                        a = q.four(((m * plan.slabs + slab) * 4 + s) * 4)
                        sums[2 * m + n] = mma_sync.multiply(a, words[n][2 * s : 2 * s + 2], sums[2 * m + n])
        for m in range_constexpr(plan.tiles):
            for side in range_constexpr(2):
                for n in range_constexpr(2):
                    offset = (2 * m + side) * plan.group_bytes + n * (LANES * 8)
                    ptx.store_shared_64(target, *sums[2 * m + n][2 * side : 2 * side + 2], offset=offset)
        at += 16 * SLAB_ROW
        other += 16 * SLAB_ROW
        target += 2 * LANES * 8


@cute.jit
def accumulate(o: Any, weights: Any, values: Any, lane: Any, plan: cutlass.Constexpr) -> None:
    """o += P V for the warp's columns.

    weights   where the lane finds its words of P for the warp's rows 0 to 15 and keys 0 to 15
    values    address of the warp's columns of key 0
    """
    # a row of four 8 x 8 matrices: keys 8 (i % 2) .. and chunk i / 2 in matrix i
    at = values + (lane & 8) * SLAB_ROW + wide_chunk(lane & 7, lane >> 4)
    for _ in cutlass.range(plan.keys // 16, unroll=2):
        a = [ptx.load_shared_128(weights, m * plan.operand_bytes) for m in range(plan.tiles)]
        for slab in range_constexpr(plan.slabs):
            for j in range_constexpr(4):
                b = ptx.load_matrices_transposed(at ^ (2 * CHUNK * j), slab * plan.slab_bytes)
                for i in range_constexpr(2):
                    for m in range_constexpr(plan.tiles):
                        place = (m * (8 * plan.slabs) + 8 * slab + 2 * j + i) * 4
                        mma_sync.accumulate(o.four(place), a[m], b[2 * i : 2 * i + 2])
        weights += LANES * 16
        at += 16 * SLAB_ROW


@cute.jit
def to_tile(stage: Any, tile: Any, masks: Any, warp: Any, lane: Any, plan: cutlass.Constexpr) -> None:
    """Make bf16 of a step's raw rows: of a key, four lanes or some warps have four each. masks: of the stage."""
    groups = const_expr(WARPS * LANES // (4 * plan.keys))
    own = const_expr(WARPS // groups)
    key = (warp % own) * 8 + (lane >> 2)
    slab = warp // own * (SLABS // groups)
    raw = stage + key * plan.raw_row
    target = tile + wide_chunk(key, 2 * (lane & 3)) + slab * plan.slab_bytes
    scales = stage + plan.scales_at + key * FP8_DS_MLA.scale_bytes
    formats = const_expr(tuple(dict.fromkeys(plan.formats)))
    if const_expr(len(formats) == 1):
        slabs_to_tile(raw, scales, target, slab, lane, formats[0], plan)
    else:
        which = ptx.load_shared_s32(masks + key * 4)
        if which == 2:
            slabs_to_tile(raw, scales, target, slab, lane, plan.formats[1], plan)
        else:
            slabs_to_tile(raw, scales, target, slab, lane, plan.formats[0], plan)


@cute.jit
def slabs_to_tile(
    raw: Any, scales: Any, target: Any, slab: Any, lane: Any, kv_format: cutlass.Constexpr, plan: cutlass.Constexpr
) -> None:
    """The lane's 16 columns of some slabs of its key, from number `slab` on."""
    count = const_expr(SLABS * 4 * plan.keys // (WARPS * LANES))
    part = lane & 3
    if const_expr(kv_format == PLAIN_BF16.id):
        wide_to_tile(raw + slab * SLAB_ROW + part * (2 * CHUNK), target, count, plan)
    elif const_expr(kv_format == PLAIN_FP8.id):
        codes = raw + slab * SLAB + part * CHUNK
        for _ in cutlass.range(count, unroll=2):
            store_values(target, convert.bf16_pairs_of_e4m3(ptx.load_shared_128(codes), [one_scale()]))
            codes += SLAB
            target += plan.slab_bytes
    else:
        coded = cutlass.min(Int32(SLABS - 1) - slab, Int32(count))
        codes = raw + slab * SLAB + part * CHUNK
        low, high = ptx.load_shared_64(scales)
        for i in cutlass.range(coded, unroll=2):
            number = slab + i
            byte = (low if number < 4 else high) >> ((number & 3) * 8) & 0xFF
            least = cutlass.min(byte, Int32(convert.LARGEST_SINGLE_SCALE))
            values = convert.bf16_pairs_of_e4m3(ptx.load_shared_128(codes), [convert.scale_pair(least, least)])
            if byte > convert.LARGEST_SINGLE_SCALE:
                values = [ptx.multiply_bf16x2(value, convert.excess_pair(byte, byte)) for value in values]
            store_values(target, values)
            codes += SLAB
            target += plan.slab_bytes
        if coded < count:
            wide_to_tile(raw + (SLABS - 1) * SLAB + part * (2 * CHUNK), target, 1, plan)


@cute.jit
def wide_to_tile(source: Any, target: Any, count: cutlass.Constexpr, plan: cutlass.Constexpr) -> None:
    """The same of columns that are bf16."""
    for _ in cutlass.range(count, unroll=2):
        store_values(target, [word for i in range(2) for word in ptx.load_shared_128(source + i * CHUNK)])
        source += SLAB_ROW
        target += plan.slab_bytes


def store_values(target: Any, values: list[Any]) -> None:
    """Two chunks, the second of which lies where one bit of the first one's place is another."""
    ptx.store_shared_128(target, values[:4])
    ptx.store_shared_128(target ^ CHUNK, values[4:])
