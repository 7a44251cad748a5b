# SPDX-License-Identifier: Apache-2.0
"""Scales of 128 columns, as words: four ue8m0 bytes of consecutive 128-column chunks in one int32."""

from __future__ import annotations

import torch

from cute_kernels import numerics
from cute_kernels.formats import HEAD_DIM, round_up
from cute_kernels.runtime.checks import Checker

BLOCK = 128
"""Columns (and, in a weight, rows) that share a scale."""
CHUNKS_PER_WORD = 4
ROW_ALIGNMENT = 4
"""Rows of a scale in memory are a multiple of this: 16 bytes, what a bulk tensor copy needs."""


def output_scale_shape(
    num_tokens: int, n_groups: int, heads_per_group: int, tma_aligned_scales: bool = False
) -> tuple[int, int, int]:
    """Shape [G, S, T rounded up to 4] of the memory that `fused_inv_rope_fp8_quant` writes its scales to.

    S is heads_per_group * 4 fp32 scales or, with tma_aligned_scales, heads_per_group int32 words of four.
    """
    per_head = 1 if tma_aligned_scales else HEAD_DIM // BLOCK
    return n_groups, heads_per_group * per_head, round_up(num_tokens, ROW_ALIGNMENT)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, 32, 8, dtype=torch.int32, device=like.device)


def pack_words(byte: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4 n] -> int32 [..., n]; byte j of a word, counted from the low end, is chunk j."""
    return (byte.int().unflatten(-1, (-1, CHUNKS_PER_WORD)) << _shifts(byte)).sum(dim=-1, dtype=torch.int32)


def unpack_words(word: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., 4 n]: the inverse of `pack_words`."""
    return (word[..., None] >> _shifts(word)).to(torch.uint8).flatten(-2)


def pack_block_scales(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Spread the 128 x 128 block scales of a weight over its rows and pack them, once, when the weight is loaded.

    scale   fp32 [G, ceil(rows / 128), K / 128], every value a power of two in 2^-127 .. 2^127; K a multiple of 512
    rows    rows R of each group's weight

    Returns int32 [G, R, K / 512]: the `b_scale` that `deepseek_v4_fp8_einsum` takes with recipe (1, 1, 128). It is a
    view of memory [G, K / 512, R rounded up to 4], rows innermost; the padding is zero.
    It reads the values: on a GPU it waits for them. Raises ValueError or TypeError on arguments that do not fit, and
    on a scale that is no power of two.
    """
    c = Checker("pack_block_scales")
    c.require(rows > 0, "rows", "a positive number", rows)
    c.tensor("scale", scale, torch.float32, (None, round_up(rows, BLOCK) // BLOCK, None), dense_last=False)
    groups, _, chunks = scale.shape
    c.require(chunks % CHUNKS_PER_WORD == 0, "scale", "K / 128 to be a multiple of 4", list(scale.shape))
    mantissa, exponent = torch.frexp(scale.double())
    byte = exponent - 1 + 127
    legal = (mantissa == 0.5) & (byte >= 0)
    if not bool(legal.all()):
        c.fail("scale", "powers of two in 2^-127 .. 2^127", scale[~legal][0].item())
    word = pack_words(byte.to(torch.uint8)).repeat_interleave(BLOCK, dim=1)[:, :rows]
    memory = word.new_zeros(groups, chunks // CHUNKS_PER_WORD, round_up(rows, ROW_ALIGNMENT))
    memory[:, :, :rows] = word.transpose(1, 2)
    return memory.transpose(1, 2)[:, :rows]


def unpack_scales(scale: torch.Tensor) -> torch.Tensor:
    """float64 values of scales along K: int32 words [..., K / 512] -> [..., K / 128]; fp32 scales pass through."""
    if scale.dtype == torch.int32:
        return numerics.ue8m0_scale(unpack_words(scale))
    return scale.double()
