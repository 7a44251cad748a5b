"""What Blackwell's decode kernel does with O, which stays in tensor memory until an item ends: half of a head's columns
in a lane. By the scores' warps, that have its factors."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.sparse_mla.decode_sm100_plan import O_BLOCK, O_COLUMN, O_COLUMNS, o_dim
from cute_kernels.sparse_mla.portable_output import Output
from cute_kernels.sparse_mla.softmax import share

BLOCKS = O_COLUMNS // O_BLOCK


class Back:
    def __init__(self, out_fp32: bool) -> None:
        self.out_fp32 = out_fp32

    @cute.jit
    def rescale(self, lanes: Any, factor: Any) -> None:
        """Have O follow a maximum that moved."""
        for block in cutlass.range(BLOCKS, unroll=1):
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
        index = (Int64(part) * Int64(out.batches) + batch) * Int64(out.heads) + head
        index = index * Int64(out.tokens) + token
        ptx.store_global_s32(out.lse + index * 4, lse.bitcast(Int32), is_first and head < out.heads)
        return share(whole, top, logit, out.sink)

    @cute.jit
    def store(self, place: Any, factor: Any, half: Any, lanes: Any, out: Output) -> None:
        """Store the thread's half of a head's row of O, multiplied with its factor."""
        part, batch, token, head = place
        size = const_expr(4 if self.out_fp32 else 2)
        row = out.base + Int64(part) * out.strides[0] + Int64(batch) * out.strides[1]
        row = row + Int64(token) * out.strides[2] + Int64(head) * out.strides[3]
        for block in cutlass.range(BLOCKS, unroll=1):
            values = [value * factor for value in ptx.load_tensor_memory(lanes + O_COLUMN + block * O_BLOCK, O_BLOCK)]
            if const_expr(self.out_fp32):
                words = [value.bitcast(Int32) for value in values]
            else:
                words = [ptx.bf16x2(values[i], values[i + 1]) for i in range(0, O_BLOCK, 2)]
            target = row + Int64(o_dim(half, block) * size)
            for i in range_constexpr(0, O_BLOCK * size // 4, 4):
                ptx.store_global_128(target + i * 4, words[i : i + 4], head < out.heads)
