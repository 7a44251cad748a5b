"""Quantization of an FP8 linear's activations."""

from __future__ import annotations

import torch

from cute_kernels.formats import round_up
from cute_kernels.linear import reference
from cute_kernels.linear.scales import BLOCK, ROW_ALIGNMENT
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes


def activation_scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape [ceil(K / 128), T rounded up to 4] of the fp32 memory that holds the scales of activations [T, K]."""
    return -(-columns // BLOCK), round_up(rows, ROW_ALIGNMENT)


def _check(x: torch.Tensor, out: torch.Tensor, scale_out: torch.Tensor, use_pdl: bool) -> None:
    c = Checker("quantize_fp8_1x128")
    c.tensor("x", x, torch.bfloat16, ("T", "K"))
    c.tensor("out", out, torch.float8_e4m3fn, ("T", "K"))
    c.tensor("scale_out", scale_out, torch.float32, activation_scale_shape(*x.shape))


def _cost(x: torch.Tensor, out: torch.Tensor, scale_out: torch.Tensor, use_pdl: bool) -> Cost:
    return Cost(bytes=nbytes(x, out, scale_out))


_quantize = define_op(
    "quantize_fp8_1x128(Tensor x, Tensor(a!) out, Tensor(b!) scale_out, bool use_pdl) -> ()",
    check=_check,
    reference=reference.quantize_fp8_1x128,
    kernel="cute_kernels.linear.quantize",
    cost=_cost,
)


def quantize_fp8_1x128(
    x: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to e4m3 with one scale per row and 128 columns, as an FP8 GEMM reads them.

    Each block of 128 columns (the last one of a row may be narrower) gets the scale 2^ceil(log2(max(absmax, 1e-10) /
    448)) and is stored as e4m3 (nearest even). NaN does not count for the absmax and becomes the code 0x7F; infinity
    counts as the largest fp32 number and becomes 448.

    x           bf16 [T, K], rows of any stride
    out         e4m3 [T, K], rows of any stride, or None: allocated, contiguous; mutated
    scale_out   the memory of the scales, fp32 [ceil(K / 128), T rounded up to 4] with a dense last dimension,
                `activation_scale_shape(T, K)`, or None: allocated; mutated, all of it: the columns of rows that do not
                exist become zero
    use_pdl     start while the kernel before on the stream still runs (programmatic dependent launch), and wait for it

    Returns (out, scale [T, ceil(K / 128)]); scale is a view of scale_out, rows innermost: `a_scale` of
    `deepseek_v4_fp8_einsum` (with a group dimension). No output may share memory with x or the other. Kernels need rows
    of x that are 16-byte, and rows of out that are 8-byte aligned, and K to be a multiple of 8.
    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("quantize_fp8_1x128")
    c.tensor("x", x, torch.bfloat16, (None, None))
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if scale_out is None:
        scale_out = torch.empty(activation_scale_shape(*x.shape), dtype=torch.float32, device=x.device)
    _quantize(x, out, scale_out, use_pdl)
    return out, scale_out.t()[: x.shape[0]]
