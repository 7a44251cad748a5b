# SPDX-License-Identifier: Apache-2.0
"""What the ops of the linear layers mean, in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from cute_kernels import numerics
from cute_kernels.linear.call import Bf16GemmCall, DualGemmCall, EinsumCall, Fp8GemmCall, QuantizeCall, SquaresCall
from cute_kernels.linear.scales import BLOCK, unpack_scales


def quantize_fp8_1x128(call: QuantizeCall) -> None:
    rows, columns = call.x.shape
    codes, byte = numerics.quantize_e4m3(F.pad(call.x, (0, -columns % BLOCK)), BLOCK, numerics.OUTPUT_FLOOR)
    call.out.view(torch.uint8).copy_(codes[:, :columns])
    call.scale_out[:, :rows] = numerics.ue8m0_scale(byte).float().t()
    call.scale_out[:, rows:] = 0


def fp8_gemm(call: Fp8GemmCall) -> None:
    rows, groups, outputs = call.out.shape
    total = torch.zeros(groups, rows, outputs, dtype=torch.float64, device=call.a.device)
    row_scale = call.a_scale.double().transpose(0, 1)
    column_scale = call.weight_scale.double().repeat_interleave(BLOCK, dim=1)[:, :outputs]
    for chunk in range(call.a.shape[2] // BLOCK):
        columns = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
        tokens = numerics.from_e4m3(call.a[..., columns]).double().transpose(0, 1)
        # the dot products of a chunk are exact in float64: 128 multiples of 2^-18 below 2^18
        dot = tokens @ numerics.from_e4m3(call.weight[..., columns]).double().transpose(1, 2)
        total += dot * (row_scale[:, :, None, chunk] * column_scale[:, None, :, chunk])
    result = total.float().transpose(0, 1)
    if call.out_scale is None:
        call.out.copy_(result)
    else:
        codes = torch.empty(rows, groups * outputs, dtype=call.out.dtype, device=call.out.device)
        quantize_fp8_1x128(QuantizeCall(result.bfloat16().flatten(1), codes, call.out_scale, call.use_pdl))
        call.out.view(torch.uint8).copy_(codes.view(torch.uint8).unflatten(1, (groups, outputs)))


def fp8_gemm_squares(call: SquaresCall) -> None:
    operands = call.a.unsqueeze(1), call.a_scale.unsqueeze(1), call.weight.unsqueeze(0), call.weight_scale.unsqueeze(0)
    fp8_gemm(Fp8GemmCall(*operands, call.out.unsqueeze(1), None, False, call.use_pdl))
    blocks = call.out[:, : call.squares.shape[1] * BLOCK].double().unflatten(1, (call.squares.shape[1], BLOCK))
    call.squares.copy_(blocks.square().sum(-1))


def bf16_gemm(call: Bf16GemmCall) -> None:
    call.out.copy_((call.a.double() @ call.weight.double().t()).float())


def fp8_bf16_gemm(call: DualGemmCall) -> None:
    operands = call.a.unsqueeze(1), call.a_scale.unsqueeze(1), call.weight.unsqueeze(0), call.weight_scale.unsqueeze(0)
    fp8_gemm(Fp8GemmCall(*operands, call.out.unsqueeze(1), None, False, call.use_pdl))
    bf16_gemm(Bf16GemmCall(call.x, call.x_weight, call.x_out, False, call.use_pdl))


def deepseek_v4_fp8_einsum(call: EinsumCall) -> None:
    by_group = call.a.transpose(0, 1)
    row_scale = unpack_scales(call.a_scale).transpose(0, 1)
    column_scale = unpack_scales(call.b_scale)
    if call.recipe[1] == BLOCK:
        column_scale = column_scale.repeat_interleave(BLOCK, dim=1)[:, : call.b.shape[1]]
    total = by_group.new_zeros((*by_group.shape[:2], call.b.shape[1]), dtype=torch.float64)
    for chunk in range(call.a.shape[2] // BLOCK):
        columns = slice(chunk * BLOCK, (chunk + 1) * BLOCK)
        rows, weight = (numerics.from_e4m3(t[..., columns]).double() for t in (by_group, call.b))
        # The dot products of a chunk are exact in float64: 128 multiples of 2^-18 below 2^18. No order can show.
        dot = rows @ weight.transpose(1, 2)
        total += dot * (row_scale[:, :, None, chunk] * column_scale[:, None, :, chunk])
    call.out.copy_(total.float().transpose(0, 1))
