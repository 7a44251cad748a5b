# SPDX-License-Identifier: Apache-2.0
"""Rotary tables: plain for sliding-window layers, YaRN without attention scaling for layers with a compressor."""

from __future__ import annotations

import math

import torch
from torch import nn

from cute_kernels.runtime.checks import Checker

from .config import AttentionConfig


def inverse_frequencies(config: AttentionConfig, compressed: bool) -> torch.Tensor:
    """float64 [32] angular frequencies of a layer.

    YaRN (arXiv 2309.00071): dimensions that turn often within the original context keep their frequency, those that
    turn rarely have it divided by the factor, with a linear ramp between; the ramp's ends are rounded outwards.
    """
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    plain = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if not compressed or config.rope_factor == 1.0:
        return plain

    def dimension_of(turns: float) -> float:
        return dim * math.log(config.rope_original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(config.rope_beta_fast)), 0)
    high = min(math.ceil(dimension_of(config.rope_beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain / config.rope_factor * ramp + plain * (1 - ramp)


class RotaryEmbedding(nn.Module):
    """The table of one layer kind: `cos_sin_cache` fp32 [max_positions, 64], cos in columns 0..31, sin in 32..63.

    Angles are computed in float64 and each cosine and sine is rounded once, so the table is exact at a million tokens.

    table   one that an engine has already, in that form; nothing is computed then
    """

    cos_sin_cache: torch.Tensor

    def __init__(
        self,
        config: AttentionConfig,
        compressed: bool,
        max_positions: int | None = None,
        device: torch.device | str = "cpu",
        table: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        if table is not None:
            Checker("RotaryEmbedding").tensor("table", table, torch.float32, (None, config.qk_rope_head_dim))
            self.register_buffer("cos_sin_cache", table, persistent=False)
            return
        positions = torch.arange(max_positions or config.max_position_embeddings, device=device)
        table = torch.empty(positions.shape[0], config.qk_rope_head_dim, dtype=torch.float32, device=device)
        frequencies = inverse_frequencies(config, compressed).to(device)
        for start in range(0, positions.shape[0], 1 << 16):
            rows = slice(start, start + (1 << 16))
            angles = positions[rows, None] * frequencies
            table[rows] = torch.cat([angles.cos(), angles.sin()], dim=1).float()
        self.register_buffer("cos_sin_cache", table, persistent=False)
