"""Ops of the linear layers: quantized activations, and the GEMMs that read them."""

from cute_kernels.linear.ops_gemm import (
    bf16_linear,
    deepseek_v4_fp8_einsum,
    fp8_grouped_linear,
    fp8_linear,
    fp8_linear_squares,
)
from cute_kernels.linear.ops_quantize import activation_scale_shape, quantize_fp8_1x128

__all__ = [
    "activation_scale_shape",
    "bf16_linear",
    "deepseek_v4_fp8_einsum",
    "fp8_grouped_linear",
    "fp8_linear",
    "fp8_linear_squares",
    "quantize_fp8_1x128",
]
