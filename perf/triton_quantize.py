# SPDX-License-Identifier: Apache-2.0
"""Activations quantized for an FP8 product by one Triton kernel, for the peers' chain: engines do it by a kernel, and
the one that vLLM ships is not in every installation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _quantize_rows(x, codes, scales, stride, rows, padded_rows, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCKS
    columns = (first + tl.arange(0, BLOCKS)[:, None]) * 128 + tl.arange(0, 128)[None, :]
    values = tl.load(x + row.to(tl.int64) * stride + columns).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(values), axis=1), 1e-10) * (1.0 / 448.0)
    exponent = ((most.to(tl.int32, bitcast=True) + 0x007FFFFF) >> 23) & 0xFF
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    width = tl.num_programs(1) * BLOCKS * 128
    tl.store(codes + row.to(tl.int64) * width + columns, (values * inverse[:, None]).to(tl.float8e4nv))
    tl.store(scales + (first + tl.arange(0, BLOCKS)) * padded_rows + row, scale)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [T, K] -> (e4m3 [T, K], fp32 [T, K / 128] with tokens innermost, in rows of a multiple of 4), by powers of
    two."""
    rows, width = x.shape
    padded = -(-rows // 4) * 4
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(width // 128, padded, device=x.device)
    blocks = 4 if width % 512 == 0 else 1
    grid = (rows, width // 128 // blocks)
    _quantize_rows[grid](x, codes, scales, x.stride(0), rows, padded, BLOCKS=blocks, num_warps=4)
    return codes, scales.t()[:rows]
