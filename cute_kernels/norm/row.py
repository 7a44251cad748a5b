"""How warps hold a row of bf16 numbers, and how they norm it.

One warp, or all warps of a block, take a row of `width` columns:

    vectors of 16 bytes, dealt to the lanes of its warps in turn
    lane l of w warps    columns 8 * l .. + 7, 8 * (l + 32 * w) .. + 7, ...

A row is read once and stays in registers: its squares are summed lane by lane, then by shuffles, then over the block's
warps in shared memory. Who sums what follows from the widths alone, so a row's bits do not depend on its batch.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import convert, ptx
from cute_kernels.dsl.reduce import lanes_sum, square_sum

VECTOR = 8
"""bf16 columns that a lane loads at once."""

WARP_COLUMNS = 2048
"""Widest row that one warp takes alone: sums need no shared memory, and a block takes several rows."""

BLOCK_WARP_COLUMNS = 1024
"""Columns for each warp of a block that takes one row."""


class Row:
    """How lanes hold a row, and what they do with it.

    warps       of a row
    rows        of a block
    vectors     of a lane; the last one may lie beyond the row's end
    positions   "int64" or "int32": rows at position 0 come out as zeros, and positions are of that type; "": none do
    spread      all warps of a block take a row together, however narrow it is
    """

    def __init__(
        self,
        width: int,
        is_fp32_weight: bool,
        block_warps: int,
        has_dependency: bool,
        positions: str = "",
        spread: bool = False,
    ) -> None:
        self.width = width
        self.is_fp32_weight = is_fp32_weight
        self.has_dependency = has_dependency
        self.positions = positions
        self.warps = 1 if warps_for(width) == 1 and not spread else block_warps
        self.rows = block_warps // self.warps
        self.vectors = -(-width // (self.step * VECTOR))

    @cute.jit
    def norm(
        self,
        block: Any,
        tokens: Any,
        eps: Any,
        x: Any,
        x_token: Any,
        weight: Any,
        out: Any,
        out_token: Any,
        positions: Any,
    ) -> None:
        """Norm the rows of one block. Strides are in bytes."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        token = block * self.rows + warp // self.warps
        lane = thread % (self.warps * 32)
        # rows past the end load the last row again, and store nothing
        source = Int64(cutlass.min(token, tokens - 1))
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_wait()
        words = self.load(x + source * x_token, lane)
        is_zero = self.is_first_position(positions, source)
        factors = self.load_weight(weight, lane)
        # the next kernel's blocks start once all loads of this one are under way, and do not compete with them
        if const_expr(self.has_dependency):
            cute.arch.griddepcontrol_launch_dependents()
        # a branch keeps the loads together: the assembler would begin to sum before it asks for the weights
        if token < tokens:
            total = lanes_sum(self.squares(words, lane))
            if const_expr(self.warps > 1):
                total = self.block_sum(total, warp)
            scale = ptx.rsqrt(ptx.fma_rn(total, Float32(1.0 / self.width), eps))
            self.store(out + Int64(token) * out_token, lane, words, factors, scale, is_zero)

    def is_first_position(self, positions: Any, token: Any) -> Any:
        """Whether the token is at position 0; None if there are no positions."""
        if self.positions == "":
            return None
        if self.positions == "int64":
            return ptx.load_global_s64_in_order(positions + token * 8) == 0
        return ptx.load_global_s32_in_order(positions + token * 4) == 0

    @cute.jit
    def block_sum(self, total: Any, warp: Any) -> Any:
        """Sum over the block's warps of a number that all lanes of a warp have, in every thread."""
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.warps))
        sums[warp] = total
        cute.arch.sync_threads()
        total = sums[0]
        for i in range_constexpr(1, self.warps):
            total = ptx.add_rn(total, sums[i])
        return total

    @property
    def step(self) -> int:
        """Vectors from one of a lane's to its next."""
        return self.warps * 32

    def is_inside(self, lane: Any, i: int) -> Any:
        """Whether a lane's vector i is part of the row; None if it is whatever the lane."""
        if (i + 1) * self.step * VECTOR <= self.width:
            return None
        return lane < self.width // VECTOR - i * self.step

    def load(self, start: Any, lane: Any) -> list[Any]:
        """A lane's vectors, as four words each. Beyond the end it gets the row's first one.

        They go through L1 although nobody reads them again: on an H200, loads that leave it out made a call that writes
        as much as it reads 5% slower (hidden 4096, T = 8192: 180 µs instead of 171).
        """
        return [ptx.load_global_128_cached_in_order(start + self._offset(lane, i) * 16) for i in range(self.vectors)]

    def load_weight(self, start: Any, lane: Any) -> list[Any]:
        """The weights of a lane's columns, as four words for each vector, or eight if they are fp32."""
        loaded: list[Any] = []
        for i in range(self.vectors):
            if self.is_fp32_weight:
                at = start + self._offset(lane, i) * 32
                loaded.append((*ptx.load_global_128_cached_in_order(at), *ptx.load_global_128_cached_in_order(at + 16)))
            else:
                loaded.append(ptx.load_global_128_cached_in_order(start + self._offset(lane, i) * 16))
        return loaded

    def _offset(self, lane: Any, i: int) -> Any:
        inside = self.is_inside(lane, i)
        vector = lane + i * self.step
        return Int64(vector if inside is None else cutlass.select_(inside, vector, Int32(0)))

    def squares(self, words: list[Any], lane: Any) -> Any:
        """Sum of the squares of a lane's columns."""
        total = Float32(0.0)
        for i, vector in enumerate(words):
            partial = square_sum(convert.bf16_floats(vector))
            inside = self.is_inside(lane, i)
            total = ptx.add_rn(total, partial if inside is None else cutlass.select_(inside, partial, Float32(0.0)))
        return total

    def store(self, start: Any, lane: Any, words: list[Any], factors: list[Any], scale: Any, is_zero: Any) -> None:
        """Multiply a lane's columns, round them once and store them."""
        for i, vector in enumerate(words):
            rounded = self.normed(vector, factors[i], scale)
            if is_zero is not None:
                rounded = [cutlass.select_(is_zero, Int32(0), pair) for pair in rounded]
            ptx.store_global_128(start + Int64(lane + i * self.step) * 16, rounded, self.is_inside(lane, i))

    def normed(self, vector: Any, factors: Any, scale: Any) -> list[Any]:
        """A vector times its row's scale and its weights, rounded once: four words."""
        if self.is_fp32_weight:
            weights = [word.bitcast(Float32) for word in factors]
        else:
            weights = convert.bf16_floats(factors)
        pairs = zip(convert.bf16_floats(vector), weights, strict=True)
        return convert.bf16_words([ptx.mul_rn(ptx.mul_rn(value, scale), weight) for value, weight in pairs])


def warps_for(width: int) -> int:
    """Of a row."""
    return 1 if width <= WARP_COLUMNS else -(-width // BLOCK_WARP_COLUMNS)
