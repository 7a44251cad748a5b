"""Where the kernels of sparse attention put what the logits of heads come to: log-sum-exps and largest logits."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, stride_bytes


class Logs(NamedTuple):
    """fp32 numbers of heads: their address, or 0 where nobody asks for them; strides in bytes, one for each axis."""

    base: Any
    strides: tuple[Any, ...]

    def of(self, *place: Any) -> Any:
        """Address of the number at a place, which has an index for each axis."""
        offsets = [Int64(index) * stride for index, stride in zip(place, self.strides, strict=True)]
        return reduce(lambda total, offset: total + offset, offsets, self.base)

    def store(self, place: tuple[Any, ...], number: Any, condition: Any) -> None:
        """Store a number, if the condition holds and somebody asks for it."""
        ptx.store_global_s32(self.of(*place), number.bitcast(Int32), condition & (self.base != 0))


def logs_of(tensor: cute.Tensor) -> Logs:
    """The kernel's argument. On the host's side of the launch."""
    return Logs(address(tensor), tuple(stride_bytes(tensor, axis) for axis in range(cute.rank(tensor))))


def fake_logs(axes: int) -> Any:
    """fp32 of any sizes and strides to compile for; what is launched may be empty, and then nothing is stored."""
    shape, strides = (tuple(make() for _ in range(axes)) for make in (cute.sym_int, cute.sym_int64))
    return make_fake_tensor(Float32, shape, stride=strides)
