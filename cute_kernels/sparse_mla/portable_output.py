"""What the portable decode kernel makes of an item's O: the log-sum-exp of its rows, and the columns of out."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.sparse_mla.logs import Logs, logs_of
from cute_kernels.sparse_mla.portable_plan import WARP_COLUMNS


class Output(NamedTuple):
    """Address of out, and strides of its parts, batches, tokens and heads in bytes; log-sum-exps by parts, batches,
    heads and tokens; address of the sink (0: none); and how many heads there are. quant: where the results
    go instead as codes, their row being batch * tokens + token; or None."""

    base: Any
    strides: Any
    lse: Logs
    sink: Any
    heads: Any
    quant: Any = None
    tokens: Any = None

    @cute.jit
    def finish(self, place: Any, is_own: Any, state: Any, factor: Any, lane: Any) -> None:
        """Store the log-sum-exp of the lane's row, and what its row of O is multiplied with.

        place    part, batch, token and head of the row; is_own: whether the head is one of the item's
        state    address of the row's maximum and of the lane's sum of weights
        factor   where the factor belongs in shared memory
        """
        part, batch, token, head = place
        exists = is_own and head < self.heads
        top, whole = ptx.load_shared_f32x2(state)
        for step in (1, 2):
            whole = whole + cute.arch.shuffle_sync_bfly(whole, step)
        is_empty = whole == Float32(0.0)  # and not where it is NaN
        share = whole
        if self.sink != 0:
            logit = ptx.load_global_s32_where(exists, self.sink + Int64(head) * 4).bitcast(Float32)
            share = whole + ptx.exp2(logit * Float32(ptx.LOG2_E) - top)
        ptx.store_shared_f32(factor, Float32(0.0) if is_empty else ptx.reciprocal(share), lane & 3 == 0)
        lse = Float32(Float32.inf) if is_empty else (top + ptx.log2(whole)) * Float32(ptx.LN_2)
        self.lse.store((part, batch, head, token), lse, exists and lane & 3 == 0)

    @cute.jit
    def store(
        self, o: Any, place: Any, rows: Any, factors: Any, warp: Any, lane: Any, is_fp32: cutlass.Constexpr
    ) -> None:
        """Store the warp's columns of an item, each row multiplied with its factor.

        o         Registers, as portable_products.py has them
        place     part, batch, token and head of the first row
        rows      how many there are
        factors   address of the first row's factor
        """
        part, batch, token, head = place
        size = const_expr(4 if is_fp32 else 2)
        start = self.base + Int64(part) * self.strides[0] + Int64(batch) * self.strides[1]
        start += Int64(token) * self.strides[2] + Int64(head + (lane >> 2)) * self.strides[3]
        start += Int64((warp * WARP_COLUMNS + (lane & 3) * 4) * size)
        for half in range_constexpr(o.count // 16):
            # 8 rows; o[m][j][even or odd][4] with m = half // 2
            first = half // 2 * 32 + half % 2 * 2
            row = 8 * half + (lane >> 2)
            factor = ptx.load_shared_f32(factors + row * 4)
            o.scale([first + i // 2 * 4 + i % 2 for i in range(16)], factor)
            target = start + self.strides[3] * (8 * half)
            for j in range_constexpr(4):
                words = o.get([first + j * 8 + i % 2 * 4 + i // 2 for i in range(4)])
                if const_expr(is_fp32):
                    ptx.store_global_128(target + j * 64, words, row < rows)
                else:
                    low, high = (ptx.bf16x2(*(word.bitcast(Float32) for word in words[i : i + 2])) for i in (0, 2))
                    ptx.store_global_64(target + j * 32, low, high, row < rows)


def output_of(out: cute.Tensor, lse: cute.Tensor, sink: Any) -> Output:
    """The kernel's arguments. On the host's side of the launch."""
    strides = tuple(stride_bytes(out, axis) for axis in range(4))
    return Output(address(out), strides, logs_of(lse), sink, length(out, 3))
