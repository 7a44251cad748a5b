# SPDX-License-Identifier: Apache-2.0
"""Calls of the output-projection ops: their arguments by name, in the order of the schemas."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QuantizedCall(NamedTuple):
    """fused_inv_rope_fp8_quant."""

    o: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    out: torch.Tensor
    scale_out: torch.Tensor
    n_groups: int
    heads_per_group: int
    tma_aligned_scales: bool
    use_pdl: bool


class RotatedCall(NamedTuple):
    """fused_inv_rope."""

    o: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    out: torch.Tensor
    n_groups: int
    heads_per_group: int
    use_pdl: bool
