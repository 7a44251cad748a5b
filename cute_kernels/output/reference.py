# SPDX-License-Identifier: Apache-2.0
"""What the output-projection ops mean, in plain torch."""

from __future__ import annotations

import torch

from cute_kernels import numerics
from cute_kernels.linear.scales import BLOCK, pack_words


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
