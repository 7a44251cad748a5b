"""How chunks get to shared memory in the portable kernel of deepseek_v4_fp8_einsum.

A thread copies the same 16 bytes of every `rows_at_once`-th row of both operands, and one or two scales. Rows and
columns that do not exist are left out: what is in shared memory in their place leads to results that nobody stores.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.output.einsum_portable_plan import (
    PIECE,
    PIECES,
    SCALES_PER_WORD,
    EinsumPlan,
    column_turn,
    row_turn,
)
from cute_kernels.output.einsum_tiles import CHUNK, Strided, Tiles


class Operands(NamedTuple):
    """What is multiplied, its numbers of rows and columns, and of 128-column chunks."""

    a: Strided
    a_scale: Strided
    b: Strided
    b_scale: Strided
    rows: Any
    columns: Any
    chunks: Any


class Ahead(NamedTuple):
    """What a thread copies next: number of a tile, and a chunk; addresses of the thread's first piece of the tile's `a`
    and `b` and of its scales, all of chunk 0; and how many rows and columns there are from these pieces' own on, and
    from each scale's own on."""

    number: Any
    chunk: Any
    a: Any
    b: Any
    rows: Any
    columns: Any
    scales: tuple[Any, ...]
    scales_left: tuple[Any, ...]


class Copies:
    def __init__(self, plan: EinsumPlan) -> None:
        self.plan = plan

    def seek(self, number: Any, tiles: Tiles, operands: Operands, thread: Any) -> Ahead:
        """The first chunk of a tile."""
        plan = self.plan
        group, row_tile, column_tile = tiles.place(number)
        first_row, first_column = row_tile * plan.rows, column_tile * plan.columns
        own, piece = thread // PIECES, Int64(thread % PIECES * PIECE)
        row, column = first_row + own, first_column + own
        a, b = operands.a.at(row, group) + piece, operands.b.at(group, column) + piece
        found = [
            self.seek_scale(first_row, first_column, group, operands, thread + i * plan.threads)
            for i in range(plan.scales_of_thread)
        ]
        scales, left = (tuple(part) for part in zip(*found, strict=True))
        return Ahead(number, Int32(0), a, b, operands.rows - row, operands.columns - column, scales, left)

    @cute.jit
    def seek_scale(self, first_row: Any, first_column: Any, group: Any, operands: Operands, number: Any) -> Any:
        """Address of a tile's scale by number, rows' first, and how many there are from it on."""
        plan = self.plan
        row, column = first_row + number, first_column + number - plan.rows
        scale, left = operands.a_scale.at(row, group), operands.rows - row
        if number >= plan.rows:
            if const_expr(plan.packed):
                scale, left = operands.b_scale.at(group, column), operands.columns - column
            else:
                scale, left = operands.b_scale.at(group, first_column // CHUNK), plan.scale_count - number
        if number >= plan.scale_count:
            left = Int32(0)
        return scale, left

    @cute.jit
    def copy(self, stage: Any, ahead: Ahead, tiles: Tiles, operands: Operands, thread: Any) -> Ahead:
        """Have a chunk copied to a stage, if there is one left. What comes next."""
        plan = self.plan
        own, piece = thread // PIECES, thread % PIECES
        offset = Int64(ahead.chunk) * CHUNK
        a, b = ahead.a + offset, ahead.b + offset
        for row in range_constexpr(0, plan.rows, plan.rows_at_once):
            target = stage + (own + row) * CHUNK + (piece ^ row_turn(own + row)) * PIECE
            ptx.copy_async_128_once(target, a + operands.a.strides[0] * row, row < ahead.rows)
        for row in range_constexpr(0, plan.columns, plan.rows_at_once):
            turn = column_turn(own + row, plan.lane_columns)
            target = stage + plan.b_at + (own + row) * CHUNK + (piece ^ turn) * PIECE
            ptx.copy_async_128_once(target, b + operands.b.strides[1] * row, row < ahead.columns)
        place = Int64(ahead.chunk // SCALES_PER_WORD if const_expr(plan.packed) else ahead.chunk)
        for i in range_constexpr(plan.scales_of_thread):
            number = thread + i * plan.threads
            stride = operands.a_scale.strides[2] if number < plan.rows else operands.b_scale.strides[2]
            target = stage + plan.scales_at + number * 4
            ptx.copy_async_32(target, ahead.scales[i] + place * stride, ahead.scales_left[i] > 0)
        cute.arch.cp_async_commit_group()
        return self.advance(ahead, tiles, operands, thread)

    @cute.jit
    def advance(self, ahead: Ahead, tiles: Tiles, operands: Operands, thread: Any) -> Ahead:
        """The next chunk, of the same tile or of the block's next one. Beyond the last tile nothing is there."""
        ahead = ahead._replace(chunk=ahead.chunk + 1)
        if ahead.chunk == operands.chunks:
            ahead = self.seek(ahead.number + tiles.step, tiles, operands, thread)
            if ahead.number >= tiles.end:
                nothing = (Int32(0),) * self.plan.scales_of_thread
                ahead = ahead._replace(rows=Int32(0), columns=Int32(0), scales_left=nothing)
        return ahead
