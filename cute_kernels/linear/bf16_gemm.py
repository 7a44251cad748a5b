"""bf16_gemm on Hopper: the kernel with swapped operands, whatever the number of rows."""

from __future__ import annotations

from typing import Any

from cute_kernels.linear import select
from cute_kernels.linear.fp8_gemm import OUTPUTS, operands_fit
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key


def deployment_keys(config: Any, tp: int, arch: str) -> list[KernelKey]:
    """Of the linears that read the hidden states and stay bf16: compressors' and the indexer's weights."""
    return [*select.swap_ab_keys(config, tp, arch, "bf16")]


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
    key, clusters = select.swap_ab("bf16", OUTPUTS[str(out.dtype)], rows, 1, outputs, -(-a.shape[1] // 64))
    a, b, out = a.unsqueeze(1), b.unsqueeze(0), out.unsqueeze(1)
    launch_key(key, a.device.index, a, None, b, None, out, None, clusters, use_pdl)
