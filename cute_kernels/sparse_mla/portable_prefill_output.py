"""What the portable kernels of prefill make of an item's O: out, and what the logits of its rows come to."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import exchange_in_quad, over_quad
from cute_kernels.sparse_mla.logs import Logs
from cute_kernels.sparse_mla.softmax import share


class Results(NamedTuple):
    """Address of out and its strides in bytes; max_logits (None: nobody asks) and lse, by rows and heads; address of
    the sink, or 0; heads; and what out is multiplied with, or None."""

    out: Any
    row: Any
    head: Any
    max_logits: Any
    lse: Logs
    sink: Any
    heads: Any
    scale: Any

    @cute.jit
    def finish(self, row: Any, head: Any, state: Any, top: Any, logit: Any, factor: Any, lane: Any) -> None:
        """Store what the logits of the lane's head come to.

        state    address of its maximum and of the lane's sum of weights; top: of its largest score
        logit    bits of its sink; means nothing if there is none
        factor   where in shared memory what O is multiplied with belongs
        """
        exists = head < self.heads
        most, amount = ptx.load_shared_f32x2(state)
        amount = over_quad(amount, operator.add)
        whole = share(amount, most, logit, self.sink)
        if const_expr(self.scale is not None):
            whole = whole * self.scale
        ptx.store_shared_f32(factor, whole, lane & 3 == 0)
        lse = Float32(Float32.inf) if amount == Float32(0.0) else (most + ptx.log2(amount)) * Float32(ptx.LN_2)
        is_first = exists and lane & 3 == 0
        self.lse.store((row, head), lse, is_first)
        if const_expr(self.max_logits is not None):
            self.max_logits.store((row, head), ptx.load_shared_f32(top) * Float32(ptx.LN_2), is_first)

    @cute.jit
    def store(self, o: Any, target: Any, rows: Any, factors: Any, lane: Any, tiles: cutlass.Constexpr) -> None:
        """Store the warp's columns of its heads.

        o         Registers, as portable_prefill_products has them
        target    address of the warp's first head and column; rows: how many heads there are from it on
        factors   address of what the first one's row of O is multiplied with
        tiles     of 16 heads
        """
        own = const_expr(o.count // tiles)
        at = target + Int64(lane >> 2) * self.head + Int64((lane & 3) * 16)
        for m in range_constexpr(tiles):
            for side in range_constexpr(2):
                row = 16 * m + 8 * side
                factor = ptx.load_shared_f32(factors + (row + (lane >> 2)) * 4)
                for i in range_constexpr(own // 16):
                    # 32 columns
                    first = m * own + i * 16 + 2 * side
                    sums = [o.get([first + 8 * j + k for k in (0, 1, 4, 5)]) for j in range(2)]
                    values = [word.bitcast(Float32) * factor for four in sums for word in four]
                    words = exchange_in_quad(lane, convert.bf16_words(values))
                    ptx.store_global_128(at + self.head * row + i * 64, words, row + (lane >> 2) < rows)
