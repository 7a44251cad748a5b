# SPDX-License-Identifier: Apache-2.0
"""Linear layers: bf16 or block-quantized FP8 weights, recorded like ops.

FP8 products are cute_kernels' own; bf16 ones for few rows on Hopper, else torch's.

On the CPU products are accumulated in float64, so a row's result does not depend on how many rows come with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from cute_kernels import numerics
from cute_kernels.linear.ops import bf16_linear, fp8_linear, quantize_fp8_1x128
from cute_kernels.runtime import record
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.compile import call
from cute_kernels.runtime.record import Cost

WEIGHT_BLOCK = 128

MOST_OWN_ROWS = 64
"""Up to so many rows our bf16 GEMM is faster than cuBLAS's for all weights of the layers. With more it is for some of
them, which gains a layer nothing (perf/notes/gemm.md)."""


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [out, in] in 128 x 128 blocks with power-of-two scales: (e4m3 [out, in], fp32 [out / 128, in / 128])."""
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // WEIGHT_BLOCK, WEIGHT_BLOCK, columns // WEIGHT_BLOCK, WEIGHT_BLOCK)
    byte = numerics.ue8m0_from_absmax(blocks.abs().amax(dim=(1, 3)), numerics.E4M3_MAX, numerics.OUTPUT_FLOOR)
    codes = numerics.to_e4m3(blocks * numerics.ue8m0_inverse(byte)[:, None, :, None]).reshape(rows, columns)
    return codes.view(torch.float8_e4m3fn), numerics.ue8m0_scale(byte).float()


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] of an e4m3 weight with 128 x 128 block scales; exact in bf16 when the scales are powers of two."""
    spread = scale.to(dtype).repeat_interleave(WEIGHT_BLOCK, 0).repeat_interleave(WEIGHT_BLOCK, 1)
    return weight.to(dtype) * spread[: weight.shape[0], : weight.shape[1]]


def quantize_activation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [T, in] per row and 128 columns: (e4m3 [T, in], fp32 scales [T, in / 128])."""
    codes, byte = numerics.quantize_e4m3(x, WEIGHT_BLOCK, numerics.OUTPUT_FLOOR)
    return codes.view(torch.float8_e4m3fn), numerics.ue8m0_scale(byte).float()


def matmul(x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x [..., T, in] @ weight [..., out, in]^T, accumulated in at least fp32 and rounded once to `out_dtype`."""
    if x.device.type == "cpu":
        return (x.double() @ weight.double().transpose(-1, -2)).to(out_dtype)
    if out_dtype == x.dtype:
        return x @ weight.transpose(-1, -2)
    if x.dim() == 2:
        return torch.mm(x, weight.t(), out_dtype=out_dtype)
    return torch.bmm(x, weight.transpose(-1, -2), out_dtype=out_dtype)


class Fp8Rows(NamedTuple):
    """Activations that are quantized already: e4m3 [T, in] and fp32 scales [T, in / 128], rows innermost."""

    codes: torch.Tensor
    scale: torch.Tensor


def bf16_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    label: str,
    batch_invariant: bool = False,
    use_pdl: bool = False,
) -> torch.Tensor:
    """bf16 x [T, in] @ weight [out, in]^T: for few rows on Hopper, and where bits must not depend on how many they are,
    by our kernels, else by torch."""
    is_few = batch_invariant or x.shape[0] <= MOST_OWN_ROWS
    if x.is_cuda and is_few and weight.shape[0] % 16 == 0 and arch_of(x.device.index) == "sm_90a":
        return bf16_linear(x, weight, out_dtype=out_dtype, batch_invariant=batch_invariant, use_pdl=use_pdl)
    if x.device.type == "cpu" or torch.compiler.is_compiling():
        return _recorded(label, x, weight, out_dtype, lambda: matmul(x, weight, out_dtype))
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)

    def product() -> torch.Tensor:
        call(_multiply_into, x.get_device(), x, weight.t(), out)
        return out

    return _recorded(label, x, weight, out_dtype, product)


def _multiply_into(x: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
    """out [T, out] = x @ columns [in, out] by cuBLAS, accumulated in fp32."""
    if out.dtype == x.dtype:
        torch.mm(x, columns, out=out)
    else:
        torch.ops.aten.mm.dtype_out(x, columns, out.dtype, out=out)


def _recorded(
    label: str, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype, body: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """`body()`, a product of torch's, noted in the recording in progress."""
    recording = None if torch.compiler.is_compiling() else record.active()
    if recording is None:
        return body()
    outputs = x.shape[0] * weight.shape[0]
    size = weight.numel() * weight.element_size() + x.numel() * x.element_size()
    cost = Cost(bytes=size + outputs * out_dtype.itemsize, flops=2 * outputs * weight.shape[1])
    return recording.run(f"linear {label}", "torch", cost, x.device, body)


class Linear(nn.Module):
    """y = x @ weight^T without bias.

    With `quantized`, the weight is e4m3 with one fp32 scale per 128 x 128 block, and the activation is quantized per
    row and 128 columns with a ue8m0 scale before the product. Otherwise the weight is bf16.

    label       name in recordings
    out_dtype   dtype of the result; the accumulator is rounded to it once
    batch_invariant
                a row's bits do not depend on how many rows there are (on a CPU they never do)
    use_pdl     kernels start while those before them on the stream still run (programmatic dependent launch). Weights
                and scales then count as constant: whoever writes them on that stream puts a launch of its own behind
    """

    weight: torch.Tensor
    scale: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        quantized: bool,
        label: str,
        out_dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
        use_pdl: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.batch_invariant, self.use_pdl = batch_invariant, use_pdl
        self.in_features, self.out_features = in_features, out_features
        self.quantized, self.label, self.out_dtype = quantized, label, out_dtype
        if quantized and in_features % WEIGHT_BLOCK:
            raise ValueError(f"Linear {label}: in_features: expected a multiple of {WEIGHT_BLOCK}, got {in_features}")
        dtype = torch.float8_e4m3fn if quantized else torch.bfloat16
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=dtype, device=device))
        blocks = (-(-out_features // WEIGHT_BLOCK), in_features // WEIGHT_BLOCK)
        self.register_buffer("scale", torch.ones(blocks, device=device) if quantized else None)

    def _has_fp8_product(self, device: torch.device) -> bool:
        """Whether the GPU multiplies e4m3 numbers, or converts them as it does."""
        if device.type != "cuda":
            return False
        arch = arch_of(device.index)
        if arch != "sm_90a" and (arch == "sm_80" or self.out_dtype != torch.bfloat16):
            return False
        return self.out_features % 16 == 0

    def quantize(self, x: torch.Tensor) -> Fp8Rows:
        return Fp8Rows(*quantize_fp8_1x128(x, use_pdl=self.use_pdl))

    def multiply(self, x: Fp8Rows, out: torch.Tensor | None = None, rows: slice | None = None) -> torch.Tensor:
        """The product of quantized rows, on a GPU.

        rows   of the weight, from and to a multiple of 128; None: all
        """
        assert self.scale is not None
        weight, scale = self.weight, self.scale
        if rows is not None:
            weight, scale = weight[rows], scale[rows.start // WEIGHT_BLOCK : rows.stop // WEIGHT_BLOCK]
        return fp8_linear(
            x.codes,
            x.scale,
            weight,
            scale,
            out_dtype=self.out_dtype,
            out=out,
            batch_invariant=self.batch_invariant,
            use_pdl=self.use_pdl,
        )

    def _dequantized_product(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale is not None
        dtype = torch.float64 if x.device.type == "cpu" else torch.bfloat16
        codes, scales = quantize_activation(x)
        dequantized = codes.to(dtype) * scales.to(dtype).repeat_interleave(WEIGHT_BLOCK, 1)
        return matmul(dequantized, dequantize_weight(self.weight, self.scale, dtype), self.out_dtype)

    def forward(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The product, in `out` if there is one: [T, out] of the module's out_dtype."""
        if self.scale is not None and self._has_fp8_product(x.device):
            return self.multiply(self.quantize(x), out)
        if self.scale is None:
            gemm = {"batch_invariant": self.batch_invariant, "use_pdl": self.use_pdl}
            product = bf16_product(x, self.weight, self.out_dtype, label=self.label, **gemm)
        else:
            product = _recorded(self.label, x, self.weight, self.out_dtype, lambda: self._dequantized_product(x))
        return product if out is None else out.copy_(product)
