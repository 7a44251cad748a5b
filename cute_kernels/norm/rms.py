"""Kernel of the RMS norms. Warps and rows: row.py.

A call norms one matrix, or two of different widths and weights in different blocks. The rows of the second may come in
streams, several for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from cute_kernels.dsl import ptx
from cute_kernels.dsl.tensor import address, length, stride_bytes
from cute_kernels.norm.row import BLOCK_WARP_COLUMNS, VECTOR, Row, warps_for
from cute_kernels.runtime.arch import arch_number
from cute_kernels.runtime.compile import KernelKey

WARPS = 4
"""Of a block whose warps take a row each."""

MOST_WARPS = 16
"""Of a block. With more of them a lane's part of a row and its fp32 weights would not fit into registers."""

MOST_COLUMNS = MOST_WARPS * BLOCK_WARP_COLUMNS
"""Of a row."""


@dataclass(frozen=True)
class RmsNormKey(KernelKey):
    """What distinguishes one compiled kernel from another.

    width            columns of the first matrix, a multiple of 8
    fp32_weight      whether its weight is fp32; else it is bf16
    second_width     columns of the second matrix; 0: there is none
    second_fp32_weight
                     the same of its weight
    positions        "int64" or "int32": tokens have positions of that type, and rows of the first matrix at position 0
                     come out as zeros; "": they have none
    """

    kernel_name: ClassVar[str] = "norm.rms"
    width: int
    fp32_weight: bool
    second_width: int = 0
    second_fp32_weight: bool = False
    positions: str = ""

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.width, self.second_width) if self.second_width else (self.width,)

    @property
    def warps(self) -> int:
        """Of a block."""
        needed = max(warps_for(width) for width in self.widths)
        return WARPS if needed == 1 else needed

    @property
    def smem_bytes(self) -> int:
        return sum(4 * self.warps for width in self.widths if warps_for(width) > 1)

    @property
    def instructions(self) -> tuple[str, ...]:
        return "ld.global.128", "st.global.128"

    def build(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        def matrix(width: int, streams: bool = False) -> Any:
            outer = 2 if streams else 1
            shape: list[Any] = [cute.sym_int() for _ in range(outer)]
            strides: list[Any] = [cute.sym_int64(divisibility=VECTOR) for _ in range(outer)]
            return make_fake_tensor(BFloat16, (*shape, width), stride=(*strides, 1), assumed_align=16)

        def weight(width: int, is_fp32: bool) -> Any:
            return make_fake_tensor(Float32 if is_fp32 else BFloat16, (width,), stride=(1,), assumed_align=16)

        first = (matrix(self.width), weight(self.width, self.fp32_weight), matrix(self.width))
        second: tuple[Any, ...] = (None, None, None)
        if self.second_width:
            streams, width = bool(self.positions), self.second_width
            second = matrix(width, streams), weight(width, self.second_fp32_weight), matrix(width, streams)
        positions = None
        if self.positions:
            positions = make_fake_tensor(
                {"int64": Int64, "int32": Int32}[self.positions], (cute.sym_int(),), stride=(1,)
            )
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return RmsNormKernel(self), (*first, *second, positions, Float32(0), Boolean(False), stream)


class RmsNormKernel:
    """Entry point: (rows, weight, out, second rows, second weight, second out, positions, eps, whether to launch as a
    dependent of the kernel before, stream). What the key does not have is None."""

    def __init__(self, key: RmsNormKey) -> None:
        has_dependency = arch_number(key.arch) >= ptx.DEPENDENT_LAUNCH_ARCH
        self.warps = key.warps
        self.first = Row(key.width, key.fp32_weight, key.warps, has_dependency, key.positions)
        self.second: Any = None
        if key.second_width:
            self.second = Row(key.second_width, key.second_fp32_weight, key.warps, has_dependency)
        self.positions = key.positions
        self.has_dependency = has_dependency
        rows = [row for row in (self.first, self.second) if row is not None]
        kinds = [f"{row.width}_{'fp32' if row.is_fp32_weight else 'bf16'}" for row in rows]
        self.name = "_".join(["rms_norm", *kinds, *([key.positions] if key.positions else [])])

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        second_x: cute.Tensor | None,
        second_weight: cute.Tensor | None,
        second_out: cute.Tensor | None,
        positions: cute.Tensor | None,
        eps: Float32,
        use_pdl: Boolean,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        tokens = length(x, 0)
        zero = Int64(0)
        first = (address(x), stride_bytes(x, 0), address(weight), address(out), stride_bytes(out, 0))
        second, streams, rows = (zero,) * 7, Int32(0), self.first.rows
        if const_expr(self.second is not None):
            streams, rows = Int32(1), min(self.first.rows, self.second.rows)
            stride, out_stride = zero, zero
            if const_expr(self.positions != ""):
                streams = length(second_x, 1)
                stride, out_stride = stride_bytes(second_x, 1), stride_bytes(second_out, 1)
            second = (
                address(second_x),
                stride_bytes(second_x, 0),
                stride,
                address(second_weight),
                address(second_out),
                stride_bytes(second_out, 0),
                out_stride,
            )
        where = address(positions) if const_expr(self.positions != "") else zero
        parts = 1 + streams
        kernel = self.kernel(*first, *second, where, tokens, cute.fast_divmod_create_divisor_v2(parts), eps)
        kernel.launch(
            grid=[cute.ceil_div(tokens, rows) * parts, 1, 1],
            block=[self.warps * 32, 1, 1],
            stream=stream,
            use_pdl=use_pdl if const_expr(self.has_dependency) else False,
        )

    @cute.kernel
    def kernel(
        self,
        x: Int64,
        x_token: Int64,
        weight: Int64,
        out: Int64,
        out_token: Int64,
        second_x: Int64,
        second_x_token: Int64,
        second_x_stream: Int64,
        second_weight: Int64,
        second_out: Int64,
        second_out_token: Int64,
        second_out_stream: Int64,
        positions: Int64,
        tokens: Int32,
        parts: cute.FastDivmodDivisorV2,
        eps: Float32,
    ) -> None:
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.second is None):
            self.first.norm(block, tokens, eps, x, x_token, weight, out, out_token, positions)
        else:
            # neighbours in the grid take the matrices' rows of the same tokens: the streams of a token are neighbours
            # in memory, and one stream after the other was 3% slower (hidden 7168, T = 8192: 290 µs instead of 281)
            block, part = divmod(block, parts)
            if part == 0:
                self.first.norm(block, tokens, eps, x, x_token, weight, out, out_token, positions)
            else:
                stream = Int64(part - 1)
                source = second_x + stream * second_x_stream
                target = second_out + stream * second_out_stream
                self.second.norm(
                    block, tokens, eps, source, second_x_token, second_weight, target, second_out_token, positions
                )


def supports_matrix(name: str, x: Any, weight: Any, out: Any) -> tuple[bool, str]:
    """Whether the kernel can norm these rows, 16 bytes at a time."""
    width = x.shape[-1]
    if width == 0:
        return False, f"rows of {name} must have columns, got none"
    if width % VECTOR or warps_for(width) > MOST_WARPS:
        return (
            False,
            f"rows of {name} must have a multiple of {VECTOR} columns, and at most {MOST_COLUMNS}, got {width}",
        )
    for what, tensor in ((name, x), (f"the weight of {name}", weight), (f"the result of {name}", out)):
        strides = [tensor.stride(axis) for axis in range(tensor.dim() - 1) if tensor.shape[axis] > 1]
        if tensor.data_ptr() % 16 or any(stride % VECTOR for stride in strides):
            return False, (
                f"rows of {what} must be 16-byte aligned, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    return True, ""
