# SPDX-License-Identifier: Apache-2.0
"""Tensors of the GEMMs, and work tiles of those of Blackwell and by mma.sync."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl.tensor import address, stride_bytes

CHUNK = 128
"""Columns of K that share a scale: 128 bytes."""

CHUNKS_PER_WORD = 4
"""Scales in a word, where they are packed."""

WARP = 32


class Strided(NamedTuple):
    """Address of a tensor of three dimensions, and its strides in bytes."""

    address: Any
    strides: tuple[Any, Any, Any]

    @classmethod
    def of(cls, tensor: Any) -> Strided:
        return cls(address(tensor), tuple(stride_bytes(tensor, axis) for axis in range(3)))

    def at(self, *index: Any) -> Any:
        return self.address + sum(Int64(i) * stride for i, stride in zip(index, self.strides, strict=False))


class TileScheduler(NamedTuple):
    """The work tiles of a CTA: numbers first, first + step ... below `end`, by columns, then rows, then groups."""

    first: Any
    end: Any
    step: Any
    row_tiles: Any
    column_tiles: Any

    def coords(self, number: Any) -> tuple[Any, Any, Any]:
        """Group, tile of rows and tile of columns."""
        line = number // self.column_tiles
        return line // self.row_tiles, line % self.row_tiles, number % self.column_tiles


def fake_arguments(scales: Any = Float32) -> tuple[Any, ...]:
    """Of every kernel: (a, a_scale, b, b_scale, out, number of CTAs, stream)."""

    def tensor(dtype: Any, divisibility: int, dense: bool) -> Any:
        stride = [cute.sym_int64(divisibility=divisibility) for _ in range(2)]
        shape = tuple(cute.sym_int() for _ in range(3))
        last = 1 if dense else cute.sym_int64()
        return make_fake_tensor(dtype, shape, stride=(*stride, last), assumed_align=16 if dense else 4)

    a, b = (tensor(Float8E4M3FN, 16, dense=True) for _ in range(2))
    a_scale, b_scale = (tensor(scales, 1, dense=False) for _ in range(2))
    out = tensor(BFloat16, 8, dense=True)
    return a, a_scale, b, b_scale, out, Int32(1), make_fake_stream(use_tvm_ffi_env_stream=True)
