"""What Blackwell's decode kernel does with O, which stays in tensor memory until an item ends: half of a head's columns
in a lane. By the scores' warps, that have its factors."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.decode_sm100_plan import O_BLOCK, O_COLUMN, O_COLUMNS, chunk_offset
from cute_kernels.sparse_mla.params import Output
from cute_kernels.sparse_mla.softmax import share

LINE = 128
"""Bytes that a row has in shared memory on its way out."""

CHUNKS = LINE // 16
LINES = 32 // CHUNKS
"""That a warp stores at a time."""


class Back:
    """plan: a module, that says which columns are where."""

    def __init__(self, out_fp32: bool, plan: Any) -> None:
        self.out_fp32, self.plan = out_fp32, plan

    @cute.jit
    def rescale(self, lanes: Any, factor: Any) -> None:
        """Have O follow a maximum that moved."""
        for block in cutlass.range(O_COLUMNS // O_BLOCK, unroll=1):
            place = lanes + O_COLUMN + block * O_BLOCK
            values = ptx.load_tensor_memory(place, O_BLOCK)
            ptx.store_tensor_memory(place, [value * factor for value in values])
        ptx.wait_tensor_stores()

    @cute.jit
    def close(self, place: Any, is_first: Any, top: Any, whole: Any, out: Output) -> Any:
        """Store a head's log-sum-exp; what to multiply its row of O with.

        place      part, batch, token and head
        is_first   of the two threads that have the head
        """
        part, batch, token, head = place
        logit = Int32(0)
        if out.sink != 0:
            logit = ptx.load_global_s32_where(head < out.heads, out.sink + Int64(head) * 4)
        lse = (top + ptx.log2(whole)) * Float32(ptx.LN_2)
        lse = Float32(Float32.inf) if whole == Float32(0.0) else lse
        out.lse.store((part, batch, head, token), lse, is_first and head < out.heads)
        return share(whole, top, logit, out.sink)

    @cute.jit
    def store(self, place: Any, factor: Any, lane: Any, half: Any, lanes: Any, rows_at: Any, out: Output) -> None:
        """Store the warp's half of 32 heads' rows of O, each multiplied with its factor, as whole lines.

        place     part, batch, token and first head
        rows_at   4 KB of shared memory
        """
        part, batch, token, first = place
        size = const_expr(4 if self.out_fp32 else 2)
        blocks = const_expr(LINE // (O_BLOCK * size))
        row = out.base + Int64(part) * out.strides[0] + Int64(batch) * out.strides[1]
        row = row + Int64(token) * out.strides[2] + Int64(first) * out.strides[3]
        for block in cutlass.range(0, O_COLUMNS // O_BLOCK, blocks, unroll=1):
            words: list[Any] = []
            for i in range_constexpr(blocks):
                found = ptx.load_tensor_memory(lanes + O_COLUMN + (block + i) * O_BLOCK, O_BLOCK)
                words += self.words([value * factor for value in found])
            cute.arch.sync_warp()
            for chunk in range_constexpr(CHUNKS):
                ptx.store_shared_128(rows_at + chunk_offset(lane, chunk), words[4 * chunk : 4 * chunk + 4])
            cute.arch.sync_warp()
            target = row + Int64(self.plan.o_dim(half, block) * size + lane % CHUNKS * 16)
            for i in range_constexpr(32 // LINES):
                head = LINES * i + lane // CHUNKS
                four = ptx.load_shared_128(rows_at + chunk_offset(head, lane % CHUNKS))
                ptx.store_global_128(target + Int64(head) * out.strides[3], four, first + head < out.heads)

    def words(self, values: list[Any]) -> list[Any]:
        """As they are stored."""
        if self.out_fp32:
            return [value.bitcast(Int32) for value in values]
        return [ptx.bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]
