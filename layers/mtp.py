# SPDX-License-Identifier: Apache-2.0
"""Norms of the multi-token-prediction layer; its attention is an ordinary sliding-window layer."""

from __future__ import annotations

import torch
from torch import nn

from cute_kernels.norm.ops import fused_mtp_input_rmsnorm, mtp_shared_head_rmsnorm

from .config import DeepseekV4Config


class DeepseekV4MTPNorms(nn.Module):
    """The MTP layer's input norms (embedding and previous hidden streams) and the norm before the shared head."""

    enorm_weight: torch.Tensor
    hnorm_weight: torch.Tensor
    head_norm_weight: torch.Tensor

    def __init__(self, config: DeepseekV4Config, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.eps, self.hc_mult = config.rms_norm_eps, config.hc_mult
        for name in ("enorm_weight", "hnorm_weight", "head_norm_weight"):
            self.register_buffer(name, torch.ones(config.hidden_size, dtype=torch.bfloat16, device=device))

    def forward(
        self, inputs_embeds: torch.Tensor, positions: torch.Tensor, previous_hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalized (embeddings [T, hidden], hidden streams [T, hc_mult, hidden]); position 0 embeds as zero."""
        return fused_mtp_input_rmsnorm(
            inputs_embeds,
            positions,
            previous_hidden_states,
            self.enorm_weight,
            self.hnorm_weight,
            self.eps,
            self.hc_mult,
        )

    def shared_head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden], normalized for the shared head."""
        return mtp_shared_head_rmsnorm(hidden_states, self.head_norm_weight, self.eps)
