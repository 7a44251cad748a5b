"""Which kernel bf16_gemm runs on Hopper: few rows, and whatever must not depend on their number, take the swapped
operands' kernel and many rows the other one."""

from __future__ import annotations

from typing import Any

from cute_kernels.linear import select
from cute_kernels.linear.fp8_gemm import MOST_SWAPPED_ROWS, OUTPUTS, is_aligned, operands_fit
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key

CHUNK = 64
"""Columns of K: 128 bytes."""


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """Of the linears that read the hidden states and stay bf16: compressors' and the indexer's weights."""
    if arch != select.HOPPER:
        return []
    outputs = dict.fromkeys(output for kind, output, *_ in select.layer_gemms(config, tp) if kind == "bf16")
    many = [key for output in outputs for key in select.many_bf16_rows_keys(output)]
    return [*select.swap_ab_keys(config, tp, arch, "bf16"), *many]


def supports(a: Any, b: Any, out: Any, batch_invariant: bool, use_pdl: bool) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    arch = arch_of(out.device.index)
    if arch != select.HOPPER:
        return False, f"it has a kernel on {select.HOPPER} only, this is {arch}: torch.mm does the same"
    return operands_fit(("a", a), ("b", b), out)


def launch(a: Any, b: Any, out: Any, batch_invariant: bool, use_pdl: bool) -> None:
    """Run the kernel on the current stream of out's device. Arguments in the schema's order, checked and supported."""
    rows, outputs = out.shape
    if rows == 0 or outputs == 0:
        return
    shape = OUTPUTS[str(out.dtype)], rows
    chunks, device_index = -(-a.shape[1] // CHUNK), out.device.index
    a, b, out = a.unsqueeze(1), b.unsqueeze(0), out.unsqueeze(1)
    key: KernelKey
    if batch_invariant or rows <= MOST_SWAPPED_ROWS or not is_aligned(out):
        key, number = select.swap_ab("bf16", *shape, 1, outputs, chunks)
    else:
        key, number = select.many_bf16_rows(*shape, outputs, chunks, multiprocessors(device_index))
    launch_key(key, device_index, a, None, b, None, out, None, number, use_pdl)
