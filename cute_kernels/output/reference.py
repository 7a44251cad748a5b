"""What the output-projection ops mean, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_kernels import numerics
from cute_kernels.output.scales import BLOCK, pack_words, unpack_scales


def fused_inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    tma_aligned_scales: bool,
    use_pdl: bool,
) -> None:
    num_tokens = o.shape[0]
    x = numerics.rotate(o, positions, cos_sin_cache, inverse=True)
    codes, byte = numerics.quantize_e4m3(x, BLOCK, numerics.OUTPUT_FLOOR)
    out.view(torch.uint8).copy_(codes.reshape(out.shape))
    scale = pack_words(byte) if tma_aligned_scales else numerics.ue8m0_scale(byte).float()
    by_row = scale_out.permute(2, 0, 1)
    by_row[:num_tokens] = scale.reshape(num_tokens, *scale_out.shape[:2])
    by_row[num_tokens:] = 0


def fused_inv_rope(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    out: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    use_pdl: bool,
) -> None:
    out.copy_(numerics.rotate(o, positions, cos_sin_cache, inverse=True).to(torch.bfloat16).reshape(out.shape))


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
