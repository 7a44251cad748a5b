"""Linear layers: bf16 or block-quantized FP8 weights, recorded like ops. The GEMMs are torch's.

On the CPU products are accumulated in float64, so a row's result does not depend on how many rows come with it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from cute_kernels import numerics
from cute_kernels.runtime import record
from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.record import Cost

WEIGHT_BLOCK = 128
_FP8_ROWS = 4
"""cuBLAS's block-scaled FP8 product takes multiples of this many rows,"""
_FP8_SCALES = 4
"""and weight scales padded to multiples of this many blocks along the input."""


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


def block_scaled_matmul(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16 x [T, in] @ weight [out, in]^T in FP8 on Hopper (cuBLAS), with scales per 1 x 128 and 128 x 128 block."""
    rows = x.shape[0]
    codes, scales = quantize_activation(F.pad(x, (0, 0, 0, -rows % _FP8_ROWS)))
    product = F.scaled_mm(
        codes,
        weight.t(),
        scales.t().contiguous().t(),
        F.ScalingType.BlockWise1x128,
        F.pad(scale, (0, -scale.shape[1] % _FP8_SCALES)).t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product[:rows]


class Linear(nn.Module):
    """y = x @ weight^T without bias.

    With `quantized`, the weight is e4m3 with one fp32 scale per 128 x 128 block, and the activation is quantized per
    row and 128 columns with a ue8m0 scale before the product. Otherwise the weight is bf16.

    label       name in recordings
    out_dtype   dtype of the result; the accumulator is rounded to it once
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
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.quantized, self.label, self.out_dtype = quantized, label, out_dtype
        if quantized and in_features % WEIGHT_BLOCK:
            raise ValueError(f"Linear {label}: in_features: expected a multiple of {WEIGHT_BLOCK}, got {in_features}")
        dtype = torch.float8_e4m3fn if quantized else torch.bfloat16
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=dtype, device=device))
        blocks = (-(-out_features // WEIGHT_BLOCK), in_features // WEIGHT_BLOCK)
        self.register_buffer("scale", torch.ones(blocks, device=device) if quantized else None)

    def _has_fp8_product(self, device: torch.device) -> bool:
        return (
            device.type == "cuda"
            and arch_of(device.index) == "sm_90a"
            and self.out_dtype == torch.bfloat16
            and self.out_features % WEIGHT_BLOCK == 0
        )

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            return matmul(x, self.weight, self.out_dtype)
        if x.shape[0] and self._has_fp8_product(x.device):
            return block_scaled_matmul(x, self.weight, self.scale)
        dtype = torch.float64 if x.device.type == "cpu" else torch.bfloat16
        codes, scales = quantize_activation(x)
        dequantized = codes.to(dtype) * scales.to(dtype).repeat_interleave(WEIGHT_BLOCK, 1)
        return matmul(dequantized, dequantize_weight(self.weight, self.scale, dtype), self.out_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recording = None if torch.compiler.is_compiling() else record.active()
        if recording is None:
            return self._product(x)
        rows = x.shape[0]
        size = self.weight.numel() * self.weight.element_size() + x.numel() * x.element_size()
        cost = Cost(
            bytes=size + rows * self.out_features * self.out_dtype.itemsize,
            flops=2 * rows * self.in_features * self.out_features,
        )
        return recording.run(f"linear {self.label}", "torch", cost, x.device, lambda: self._product(x))
