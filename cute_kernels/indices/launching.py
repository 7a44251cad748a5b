# SPDX-License-Identifier: Apache-2.0
"""What the launchers of the index kernels share: how wide a lane's accesses can be, and what a kernel can take."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.runtime.arch import arch_number

MOST_ROWS = 2**30
"""Entries that the row of a block table may hold, and columns of an index table: int32 arithmetic on them is exact."""

WARPS = 4
"""Per CTA."""

FEW_ROWS, MANY_ROWS = 512, 4096
"""Below the first there are few rows, from the second on many: between what was measured, see shape_for."""


def instructions(arch: str, width: int, is_loading: bool = True) -> tuple[str, ...]:
    """What a kernel whose lanes move `width` columns at once must contain."""
    if width == 4:
        return ("ld.global.128", "st.global.128") if is_loading else ("st.global.128",)
    return ("griddepcontrol",) if arch_number(arch) >= ptx.DEPENDENT_LAUNCH_ARCH else ()


def load_position(positions: Any, row: Any, is_wide: bool) -> Any:
    """int64 position of a row, from int64 or int32 ones."""
    if is_wide:
        return ptx.load_global_s64_in_order(positions + Int64(row) * 8, is_shared=True)
    return Int64(ptx.load_global_s32_in_order(positions + Int64(row) * 4, is_shared=True))


def fake(element_type: Any, dimensions: int) -> Any:
    """A tensor argument to compile for: any sizes, any stride between rows."""
    shape = tuple(cute.sym_int() for _ in range(dimensions))
    stride: tuple[Any, ...] = (*(cute.sym_int64() for _ in range(dimensions - 1)), 1)
    return make_fake_tensor(element_type, shape, stride=stride)


def group_width(columns: tuple[int, ...], *matrices: Any) -> int:
    """Neighbouring int32 columns that a lane can move at once: 4 if 16-byte accesses fit all rows, else 1.

    columns    numbers of columns after which a run must not go on
    matrices   what is moved
    """
    if any(count % 4 for count in columns):
        return 1
    for matrix in matrices:
        if matrix.data_ptr() % 16 or (matrix.shape[0] > 1 and matrix.stride(0) % 4):
            return 1
    return 4


def shape_for(rows: int, columns: int, width: int) -> tuple[int, int, bool]:
    """(warps that share a row, groups of 32 * width columns that each takes in a pass, whether these go through L1).

    With few rows all of a row should be under way at once. With many, what every warp does once must be worth its
    while: on an H200 one group a warp was the fastest for 64 rows, two for 1024, two in CTAs of two warps for 8192,
    and there, through L1. (perf/log/data: compute_global_topk_indices_and_lens.json,
    build_flashinfer_mixed_sparse_indices.json, indices_4.txt.)
    """
    most, groups = (8, 1) if rows < FEW_ROWS else (4, 2) if rows < MANY_ROWS else (2, 2)
    needed = max(1, -(-columns // (32 * width * groups)))
    return min(most, 1 << (needed - 1).bit_length()), groups, width == 4 and rows >= MANY_ROWS


def shapes_for(columns: int, width: int) -> list[tuple[int, int, bool]]:
    """Every result of shape_for, whatever the number of rows."""
    return list(dict.fromkeys(shape_for(rows, columns, width) for rows in (1, FEW_ROWS, MANY_ROWS)))


def page_argument(*page_rows: int) -> tuple[bool, tuple[int, ...]]:
    """(whether all these numbers are powers of two, they themselves or their exponents): what block_table takes."""
    if any(rows & (rows - 1) for rows in page_rows):
        return False, page_rows
    return True, tuple(rows.bit_length() - 1 for rows in page_rows)


def too_many_entries(name: str, block_table: Any, block_size: int) -> str:
    """Why the entries of a row of a block table cannot be numbered; empty if they can."""
    entries = max(block_table.shape[1], 1) * block_size
    if entries <= MOST_ROWS:
        return ""
    return f"a row of {name} must have at most {MOST_ROWS} entries, got {entries}"
