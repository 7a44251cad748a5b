"""Which kernel fp8_gemm runs: on Hopper few rows, and whatever must not depend on their number, take the swapped
operands' kernel and many rows the other one; other architectures the kernels of deepseek_v4_fp8_einsum."""

from __future__ import annotations

from typing import Any

from cute_kernels.linear import fp8_einsum, select
from cute_kernels.linear.params import CHUNK
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

RECIPE = (1, 128, 128)
EQUATION = "bhr,hdr->bhd"

MOST_SWAPPED_ROWS = 32
"""More rows are faster the other way round on an H200."""

MOST_SWAPPED_CODE_ROWS, FEW_CODES = 64, 1024
"""The same for e4m3 results of so few columns: only the swapped operands' kernel cuts their K into more than two."""

OUTPUTS = {"torch.bfloat16": "bf16", "torch.float32": "fp32", "torch.float8_e4m3fn": "e4m3"}


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """Of every FP8 linear of a model: for few rows one for each way to cut a weight's K, for many one for each tile."""
    if arch != select.HOPPER:
        return [*fp8_einsum.deployment_keys(config, tp, arch)]
    outputs = {output for kind, output, *_ in select.layer_gemms(config, tp) if kind == "e4m3"}
    many = [
        key for output in OUTPUTS.values() if output in outputs for key in select.many_rows_keys(output, may_split=True)
    ]
    return [*select.swap_ab_keys(config, tp, arch, "e4m3"), *many]


def _is_swapped(out: Any, batch_invariant: bool) -> bool:
    rows, groups, outputs = out.shape
    if batch_invariant or rows <= MOST_SWAPPED_ROWS:
        return True
    is_small = rows <= MOST_SWAPPED_CODE_ROWS and groups * outputs <= FEW_CODES
    return is_small and OUTPUTS[str(out.dtype)] == "e4m3"


def supports(
    a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, out_scale: Any, batch_invariant: bool, use_pdl: bool
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    arch = arch_of(out.device.index)
    if arch != select.HOPPER:
        if OUTPUTS[str(out.dtype)] != "bf16":
            return False, f"a result of {out.dtype} has a kernel on {select.HOPPER} only, this is {arch}"
        return fp8_einsum.supports(a, a_scale, b, b_scale, out, EQUATION, RECIPE)
    if not _is_swapped(out, batch_invariant) and not is_aligned(out):
        return False, (
            f"out must be 16-byte aligned row by row for many rows, got address {out.data_ptr():#x} and strides "
            f"{tuple(out.stride())}"
        )
    return operands_fit(("a", a), ("b", b), out)


def is_aligned(tensor: Any) -> bool:
    """Whether bulk tensor copies can move its rows."""
    strides = [tensor.stride(axis) * tensor.element_size() for axis in range(tensor.dim() - 1)]
    return tensor.data_ptr() % 16 == 0 and all(stride % 16 == 0 and 0 < stride < 2**40 for stride in strides)


def operands_fit(a: tuple[str, Any], b: tuple[str, Any], out: Any) -> tuple[bool, str]:
    """Whether bulk tensor copies can bring the operands, and the epilogue store the result."""
    for name, tensor in (a, b):
        if not is_aligned(tensor):
            return False, (
                f"{name} must be 16-byte aligned row by row, got address {tensor.data_ptr():#x} and strides "
                f"{tuple(tensor.stride())}"
            )
    if out.shape[-1] % 16:
        return False, f"N must be a multiple of 16, got {out.shape[-1]}"
    strides = [out.stride(axis) for axis in range(out.dim() - 1) if out.shape[axis] > 1]
    unit = 1 if out.element_size() == 4 else 2
    if any(stride % unit for stride in strides) or out.data_ptr() % (unit * out.element_size()):
        return False, f"out must be aligned to {unit} elements row by row, got strides {tuple(out.stride())}"
    return True, ""


def launch(
    a: Any, a_scale: Any, b: Any, b_scale: Any, out: Any, out_scale: Any, batch_invariant: bool, use_pdl: bool
) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked and supported."""
    rows, groups, outputs = out.shape
    if rows == 0 or groups == 0 or outputs == 0:
        return
    if a.shape[2] == 0 and out_scale is None:
        out.zero_()
        return
    device_index = out.device.index
    if arch_of(device_index) != select.HOPPER:
        fp8_einsum.launch(a, a_scale, b, b_scale, out, EQUATION, RECIPE, use_pdl)
        return
    shape = OUTPUTS[str(out.dtype)], rows, groups, outputs, a.shape[2] // CHUNK
    key: KernelKey
    if _is_swapped(out, batch_invariant):
        key, number = select.swap_ab("e4m3", *shape)
    else:
        key, number = select.many_rows(*shape, multiprocessors(device_index), may_split=True)
    launch_key(key, device_index, a, a_scale, b, b_scale, out, out_scale, number, use_pdl)
