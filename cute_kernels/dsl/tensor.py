# SPDX-License-Identifier: Apache-2.0
"""Tensor arguments as plain numbers, for kernels that compute their addresses themselves, in 64 bits; and as
descriptors of tensor copies, which are made with the kernel's launch: ptx.tensor_map gives their address."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.nvgpu.cpasync.copy import CopyBulkTensor2DGather4G2SOp


def address(tensor: Any) -> Any:
    """Address of the first element, int64."""
    return tensor.iterator.toint()


def stride_bytes(tensor: Any, axis: int) -> Any:
    """Bytes from one index of `axis` to the next, int64."""
    return Int64(tensor.stride[axis]) * (tensor.element_type.width // 8)


def length(tensor: Any, axis: int) -> Any:
    """Size of `axis`."""
    return tensor.shape[axis]


# ---- descriptors of tensor copies

_ATOMS = {
    128: tcgen05.SmemLayoutAtomKind.K_SW128,
    64: tcgen05.SmemLayoutAtomKind.K_SW64,
    32: tcgen05.SmemLayoutAtomKind.K_SW32,
}

ROWS = 64
"""Of the tile that gathered rows fill, which only the descriptor's making looks at."""


def gathered_rows(
    start: Any, dtype: Any, rows: Any, columns: int, stride: Any, swizzle: int = 0, width: int | None = None
) -> Any:
    """sm_100a and up, not sm_120a. Copy atom for ptx.gather_rows: boxes of `columns` elements of a row.

    start     pointer to the first row's first column, 16-byte aligned
    rows      how many there are: others arrive as zeros
    stride    elements from row to row, a multiple of 16 bytes
    swizzle   bytes, as of dsl.umma.Operand; columns then fill so many bytes
    width     columns of a row; None: those of a box
    """
    where = cute.make_tensor(cute.recast_ptr(start, dtype=Int32), cute.make_layout((ROWS, columns), stride=(1, 0)))
    whole = cute.make_layout((rows, columns if width is None else width), stride=(stride, 1))
    source = cute.make_tensor(cute.recast_ptr(start, dtype=dtype), whole)
    layout = tile(dtype, ROWS, columns, swizzle)
    operation = CopyBulkTensor2DGather4G2SOp()
    return cpasync.make_tiled_tma_atom(operation, source, layout, (ROWS, columns), gmem_coord_tensor=where)[0]


def boxes(source: Any, rows: int, columns: int, swizzle: int = 0) -> Any:
    """sm_90 and up. Copy atom for ptx.copy_bulk_tensor: boxes of [rows, columns] of a tensor [rows, columns, ...]."""
    layout = tile(source.element_type, rows, columns, swizzle)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, layout, (rows, columns))[0]


def tile(dtype: Any, rows: int, columns: int, swizzle: int) -> Any:
    """Layout in shared memory of what such a copy brings."""
    if swizzle == 0:
        return cute.make_layout((rows, columns), stride=(columns, 1))
    return cute.tile_to_shape(tcgen05.make_smem_layout_atom(_ATOMS[swizzle], dtype), (rows, columns), (0, 1))
