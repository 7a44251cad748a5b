# SPDX-License-Identifier: Apache-2.0
"""What the ops of the linear layers mean, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from cute_kernels import numerics
from cute_kernels.linear.scales import BLOCK, unpack_scales


def quantize_fp8_1x128(x: torch.Tensor, out: torch.Tensor, scale_out: torch.Tensor, use_pdl: bool) -> None:
    rows, columns = x.shape
    codes, byte = numerics.quantize_e4m3(F.pad(x, (0, -columns % BLOCK)), BLOCK, numerics.OUTPUT_FLOOR)
    out.view(torch.uint8).copy_(codes[:, :columns])
    scale_out[:, :rows] = numerics.ue8m0_scale(byte).float().t()
    scale_out[:, rows:] = 0


def fp8_gemm(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    batch_invariant: bool,
    use_pdl: bool,
) -> None:
    rows, groups, outputs = out.shape
    total = torch.zeros(groups, rows, outputs, dtype=torch.float64, device=a.device)
    row_scale = a_scale.double().transpose(0, 1)
    column_scale = weight_scale.double().repeat_interleave(BLOCK, dim=1)[:, :outputs]
    for chunk in range(a.shape[2] // BLOCK):
        columns = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
        tokens = numerics.from_e4m3(a[..., columns]).double().transpose(0, 1)
        # the dot products of a chunk are exact in float64: 128 multiples of 2^-18 below 2^18
        dot = tokens @ numerics.from_e4m3(weight[..., columns]).double().transpose(1, 2)
        total += dot * (row_scale[:, :, None, chunk] * column_scale[:, None, :, chunk])
    result = total.float().transpose(0, 1)
    if out_scale is None:
        out.copy_(result)
    else:
        codes = torch.empty(rows, groups * outputs, dtype=out.dtype, device=out.device)
        quantize_fp8_1x128(result.bfloat16().flatten(1), codes, out_scale, use_pdl)
        out.view(torch.uint8).copy_(codes.view(torch.uint8).unflatten(1, (groups, outputs)))


def fp8_gemm_squares(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    squares: torch.Tensor,
    use_pdl: bool,
) -> None:
    operands = a.unsqueeze(1), a_scale.unsqueeze(1), weight.unsqueeze(0), weight_scale.unsqueeze(0)
    fp8_gemm(*operands, out.unsqueeze(1), None, False, use_pdl)
    blocks = out[:, : squares.shape[1] * BLOCK].double().unflatten(1, (squares.shape[1], BLOCK))
    squares.copy_(blocks.square().sum(-1))


def bf16_gemm(a: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, batch_invariant: bool, use_pdl: bool) -> None:
    out.copy_((a.double() @ weight.double().t()).float())


def deepseek_v4_fp8_einsum(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    equation: str,
    recipe: Sequence[int],
) -> None:
    by_group = a.transpose(0, 1)
    row_scale = unpack_scales(a_scale).transpose(0, 1)
    column_scale = unpack_scales(b_scale)
    if recipe[1] == BLOCK:
        column_scale = column_scale.repeat_interleave(BLOCK, dim=1)[:, : b.shape[1]]
    total = torch.zeros(by_group.shape[0], by_group.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    for chunk in range(a.shape[2] // BLOCK):
        columns = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
        rows, weight = (numerics.from_e4m3(t[..., columns]).double() for t in (by_group, b))
        # The dot products of a chunk are exact in float64: 128 multiples of 2^-18 below 2^18. No order can show.
        dot = rows @ weight.transpose(1, 2)
        total += dot * (row_scale[:, :, None, chunk] * column_scale[:, None, :, chunk])
    out.copy_(total.float().transpose(0, 1))
