# SPDX-License-Identifier: Apache-2.0
"""What the output-projection ops mean, in plain torch."""

from __future__ import annotations

import torch

from cute_kernels import numerics
from cute_kernels.linear.scales import BLOCK, pack_words
from cute_kernels.output.call import QuantizedCall, RotatedCall


def fused_inv_rope_fp8_quant(call: QuantizedCall) -> None:
    num_tokens = call.o.shape[0]
    x = numerics.rotate(call.o, call.positions, call.cos_sin_cache, inverse=True)
    codes, byte = numerics.quantize_e4m3(x, BLOCK, numerics.OUTPUT_FLOOR)
    call.out.view(torch.uint8).copy_(codes.reshape(call.out.shape))
    scale = pack_words(byte) if call.tma_aligned_scales else numerics.ue8m0_scale(byte).float()
    by_row = call.scale_out.permute(2, 0, 1)
    by_row[:num_tokens] = scale.reshape(num_tokens, *call.scale_out.shape[:2])
    by_row[num_tokens:] = 0


def fused_inv_rope(call: RotatedCall) -> None:
    call.out.copy_(
        numerics.rotate(call.o, call.positions, call.cos_sin_cache, inverse=True)
        .to(torch.bfloat16)
        .reshape(call.out.shape)
    )
