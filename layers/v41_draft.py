# SPDX-License-Identifier: Apache-2.0
"""V4.1's draft (DSpark): what its layers know of the tokens in front of a block.

A step of the model leaves hidden states of some of its layers. Of these DeepseekV41DraftContext makes one row a token,
of which every draft layer stores a window row by weights of its own (`DeepseekV41Attention.store_context`). A step of
the draft (`V41StepBuilder.build`, is_draft) then runs a block of rows of each request through its layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cute_kernels.norm.ops import mtp_shared_head_rmsnorm
from cute_kernels.runtime.checks import Checker

from .linear import Linear
from .v41_config import DeepseekV41Config


class DeepseekV41DraftContext(nn.Module):
    """The projection of hidden states, which all draft layers share, and its norm. Replicated on every tensor-parallel
    rank."""

    norm_weight: torch.Tensor

    def __init__(
        self, config: DeepseekV41Config, *, batch_invariant: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        gemm: dict[str, Any] = {"quantized": False, "batch_invariant": batch_invariant, "device": device}
        hidden = config.hidden_size
        self.proj = Linear(len(config.draft_target_layer_ids) * hidden, hidden, label="main_proj", **gemm)
        self.register_buffer("norm_weight", torch.ones(hidden, dtype=torch.bfloat16, device=device))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """bf16 [T, hidden] of hidden states bf16 [T, n * hidden]: those of `draft_target_layer_ids`, side by side."""
        check = Checker("draft context")
        check.tensor("hidden_states", hidden_states, torch.bfloat16, (None, self.proj.in_features))
        return mtp_shared_head_rmsnorm(self.proj(hidden_states), self.norm_weight, self.config.rms_norm_eps)
