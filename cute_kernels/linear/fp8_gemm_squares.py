"""Kernel of fp8_gemm_squares: on Hopper, hopper/gemm.py with `squares`."""

from __future__ import annotations

from typing import Any

from cute_kernels.linear import select
from cute_kernels.linear.fp8_gemm import is_aligned, operands_fit
from cute_kernels.linear.hopper.gemm import SCALE_BLOCK, GemmKey
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import launch as launch_key


def deployment_keys(config: Any, tp: int, arch: str) -> list[GemmKey]:
    """One for each work tile: a batch may have any size."""
    return [tile.key for tile in select.SQUARES_TILES] if arch == select.HOPPER else []


def supports(
    a: Any, a_scale: Any, weight: Any, weight_scale: Any, out: Any, squares: Any, use_pdl: bool
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    arch = arch_of(out.device.index)
    if arch != select.HOPPER:
        return False, f"there is a kernel on {select.HOPPER} only, this is {arch}"
    if not is_aligned(out):
        return False, (
            f"out must be 16-byte aligned row by row, got address {out.data_ptr():#x} and strides {tuple(out.stride())}"
        )
    return operands_fit(("a", a), ("weight", weight), out)


def launch(a: Any, a_scale: Any, weight: Any, weight_scale: Any, out: Any, squares: Any, use_pdl: bool) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked and supported."""
    rows, outputs = out.shape
    if rows == 0 or outputs == 0:
        return
    if a.shape[1] == 0:
        out.zero_()
        squares.zero_()
        return
    device_index = out.device.index
    key, ctas = select.with_squares(rows, outputs, a.shape[1] // SCALE_BLOCK, multiprocessors(device_index))
    operands = a.unsqueeze(1), a_scale.unsqueeze(1), weight.unsqueeze(0), weight_scale.unsqueeze(0), out.unsqueeze(1)
    launch_key(key, device_index, *operands, squares, ctas, use_pdl)
