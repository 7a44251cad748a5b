"""What a warp of the portable kernel of deepseek_v4_fp8_einsum computes.

Lane l = 4 r + c has, of every 16 rows, rows r and r + 8, and of the warp's columns, lane_columns neighbouring ones from
c lane_columns on. Of a row of codes it has four neighbouring ones, 4 c and on, of every 16 that a product sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import convert, mma_sync, ptx
from cute_kernels.output.einsum_portable_plan import (
    COLUMN_WARPS,
    PIECE,
    PIECES,
    SCALES_PER_WORD,
    EinsumPlan,
    column_of,
    column_turn,
    row_turn,
)
from cute_kernels.output.einsum_tiles import CHUNK, Strided

STEPS = PIECES // 2
"""Of a chunk: two products each, whose operands are loaded together."""


class Places(NamedTuple):
    """Where a lane's operands lie in a stage; the first of its rows and of its columns, in a tile; where the scales of
    these lie in a stage."""

    a: Any
    b: Any
    row: Any
    column: Any
    row_scales: Any
    column_scales: Any


class Products:
    """converts: whether the GPU converts e4m3 to f16; else bits are moved, and operands are 2^-8 of their values."""

    def __init__(self, plan: EinsumPlan, converts: bool) -> None:
        self.plan, self.converts = plan, converts
        self.factor = 1.0 if converts else 2.0**16

    @property
    def words(self) -> int:
        """Of codes that a lane has for a step."""
        return 4 * self.plan.row_tiles + 2 * self.plan.column_tiles

    @property
    def sums(self) -> int:
        """Of a lane."""
        return 4 * self.plan.row_tiles * self.plan.column_tiles

    def places(self, warp: Any, lane: Any) -> Places:
        plan = self.plan
        first_row = warp // COLUMN_WARPS * (16 * plan.row_tiles)
        first_column = warp % COLUMN_WARPS * (8 * plan.column_tiles)
        # a: matrices of 8 rows and 16 codes, rows first; b: pieces first, then the next product
        a_row, a_piece = first_row + (lane & 15), lane >> 4
        b_row = first_column + column_of(lane & 7, lane >> 4, plan.lane_columns)
        b_piece = (lane >> 3) & 1
        row, column = first_row + (lane >> 2), first_column + (lane & 3) * plan.lane_columns
        return Places(
            a_row * CHUNK + (a_piece ^ row_turn(a_row)) * PIECE,
            plan.b_at + b_row * CHUNK + (b_piece ^ column_turn(b_row, plan.lane_columns)) * PIECE,
            row,
            column,
            plan.scales_at + row * 4,
            plan.scales_at + (plan.rows + (column if plan.packed else 0)) * 4,
        )

    def load(self, words: Any, stage: Any, places: Places, step: int) -> None:
        """The lane's words of a step."""
        plan = self.plan
        found: list[Any] = []
        a, b = ((stage + place) ^ (step * 2 * PIECE) for place in (places.a, places.b))
        for i in range(plan.row_tiles):
            found += ptx.load_matrices(a + i * (16 * CHUNK))
        for j in range(0, plan.column_tiles, 2):
            found += ptx.load_matrices(b + 2 * j * CHUNK)
        for i, word in enumerate(found):
            words[i] = word

    def none(self) -> list[Any]:
        return [()] * (self.plan.row_tiles * self.plan.column_tiles)

    def pairs(self, word: Any) -> list[Any]:
        return list(ptx.f16x2_of_e4m3x4(word) if self.converts else convert.f16x2_of_e4m3x4_by_bits(word))

    def multiply(self, sums: list[Any], words: list[Any]) -> list[Any]:
        """Sums of products, [row_tiles][column_tiles] of four, with those of a step."""
        plan = self.plan
        sums = list(sums)
        for k in range(2):
            # words of `a`: both halves of the rows for the first product, then for the second one
            rows = [[self.pairs(words[4 * i + 2 * k + half]) for half in range(2)] for i in range(plan.row_tiles)]
            columns = [self.pairs(words[4 * plan.row_tiles + 2 * j + k]) for j in range(plan.column_tiles)]
            for i, (low, high) in enumerate(rows):
                a = (low[0], high[0], low[1], high[1])
                for j, b in enumerate(columns):
                    number = i * plan.column_tiles + j
                    sums[number] = mma_sync.multiply_by(a, b, sums[number], is_f16=True)
        return sums

    def load_factors(self, stage: Any, places: Places, chunk: Any) -> tuple[list[Any], list[Any]]:
        """Scales of the lane's rows and columns in a chunk: of all columns one, or each its own."""
        plan = self.plan
        rows = [stage + places.row_scales + 32 * i for i in range(2 * plan.row_tiles)]
        columns = stage + places.column_scales
        if not plan.packed:
            own = [ptx.load_shared_f32(columns)]
            return [ptx.mul_rn(ptx.load_shared_f32(row), own[0]) for row in rows], []
        shift = chunk % SCALES_PER_WORD * 8
        words = [word for i in range(0, plan.lane_columns, 4) for word in ptx.load_shared_128(columns + 4 * i)]
        of_rows, of_columns = (
            [convert.ue8m0_value((word >> shift) & 0xFF) for word in found]
            for found in ([ptx.load_shared_s32(row) for row in rows], words)
        )
        return of_rows, of_columns

    def add(self, totals: cute.Tensor, sums: list[Any], factors: tuple[list[Any], list[Any]]) -> None:
        """totals += scaled sums. A lane's totals are in the order of its columns: of 16 rows, r's come first."""
        plan = self.plan
        of_rows, of_columns = factors
        for i in range(plan.row_tiles):
            for half in range(2):
                for column in range(plan.lane_columns):
                    factor = of_rows[2 * i + half]
                    if of_columns:
                        factor = ptx.mul_rn(factor, of_columns[column])
                    value = sums[i * plan.column_tiles + column // 2][2 * half + column % 2].bitcast(Float32)
                    if self.factor != 1.0:
                        value = ptx.mul_rn(value, Float32(self.factor))
                    place = (2 * i + half) * plan.lane_columns + column
                    totals[place] = ptx.fma_rn(value, factor, totals[place])

    @cute.jit
    def store(self, totals: cute.Tensor, out: Strided, tile: Any, places: Places, rows: Any, columns: Any) -> None:
        """Store the totals as bf16 where there are rows and columns."""
        plan = self.plan
        group, row_tile, column_tile = tile
        row, column = row_tile * plan.rows + places.row, column_tile * plan.columns + places.column
        target = out.at(row, group) + Int64(column) * 2
        for i in range_constexpr(2 * plan.row_tiles):
            own = [totals[i * plan.lane_columns + j] for j in range(plan.lane_columns)]
            words = convert.bf16_words(own)
            exists = (row + 8 * i < rows) & (column < columns)
            address = target + out.strides[0] * (8 * i)
            if const_expr(len(words) == 4):
                ptx.store_global_128(address, words, exists)
            else:
                ptx.store_global_64(address, words[0], words[1], exists)
