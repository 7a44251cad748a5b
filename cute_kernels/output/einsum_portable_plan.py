"""How the portable kernel of deepseek_v4_fp8_einsum divides its work: plain Python that it traces and tests evaluate.

A block's warps share a tile of [rows, columns] results; a warp has [16 row_tiles, 8 column_tiles] of them. A lane has
neighbouring columns, 2 column_tiles of them: number n of the 8 columns of a product `j` is column
2 column_tiles (n / 2) + 2 j + n % 2 of the warp. So it stores its results of a row at once, without an exchange.

A stage in shared memory:

    a        [rows, 128] e4m3         16-byte chunk i of a row lies at i ^ `row_turn` of it
    b        [columns, 128] e4m3      likewise, at i ^ `column_turn`
    scales   4 bytes for each of the rows, then for each of the columns, or for all of them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_kernels.formats import round_up
from cute_kernels.output.einsum_tiles import CHUNK, WARP
from cute_kernels.runtime.arch import SMEM_BYTES

PIECE = 16
"""Bytes that are copied, and of a row that a matrix of operands has, at a time: one product sums as many codes."""

PIECES = CHUNK // PIECE
SCALES_PER_WORD = 4
COLUMN_WARPS = 4
MOST_ROWS_OF_WARP = 64
MOST_STAGES = 9
"""More are of no use: those of the smallest tile are 90 KB, enough for the memory's latency."""


@dataclass(frozen=True)
class EinsumPlan:
    """Sizes of a kernel: rows and columns of a tile, and whether each column has scales of its own."""

    arch: str
    rows: int
    columns: int
    packed: bool

    @property
    def row_warps(self) -> int:
        """Along the rows of a tile: two wherever that leaves a warp two products of 16 rows."""
        return max(1, min(2, self.rows // WARP))

    @property
    def threads(self) -> int:
        return self.row_warps * COLUMN_WARPS * WARP

    @property
    def row_tiles(self) -> int:
        """Products of a warp along its rows."""
        return self.rows // self.row_warps // 16

    @property
    def column_tiles(self) -> int:
        """Products of a warp along its columns: an even number, as two are loaded at a time."""
        return self.columns // COLUMN_WARPS // 8

    @property
    def lane_columns(self) -> int:
        return 2 * self.column_tiles

    @property
    def rows_at_once(self) -> int:
        """Rows that the threads copy a chunk of at a time."""
        return self.threads // PIECES

    # ---- places, in bytes ----

    @property
    def b_at(self) -> int:
        """In a stage."""
        return self.rows * CHUNK

    @property
    def scales_at(self) -> int:
        """In a stage."""
        return self.b_at + self.columns * CHUNK

    @property
    def scale_count(self) -> int:
        """Of a stage."""
        return self.rows + (self.columns if self.packed else 1)

    @property
    def scales_of_thread(self) -> int:
        """That it copies, of every stage."""
        return -(-self.scale_count // self.threads)

    @property
    def stage_bytes(self) -> int:
        return self.scales_at + round_up(self.scale_count * 4, CHUNK)

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, SMEM_BYTES[self.arch] // self.stage_bytes)

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes


def row_turn(row: Any) -> Any:
    """Of a row of `a`. Also of a traced one."""
    return row & 7


def column_turn(column: Any, lane_columns: int) -> Any:
    """Of a row of `b`: different ones for those that a product's lanes read together. Also of a traced one."""
    return (column & 1) | ((column // lane_columns & 3) << 1)


def column_of(n: Any, j: Any, lane_columns: int) -> Any:
    """Which of a warp's columns is number n of product j. Also of traced numbers."""
    return (n >> 1) * lane_columns + 2 * j + (n & 1)
