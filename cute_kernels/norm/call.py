# SPDX-License-Identifier: Apache-2.0
"""Calls of the norms: their arguments by name, in the order of the schemas."""

from __future__ import annotations

from typing import NamedTuple

import torch


class QKvCall(NamedTuple):
    """fused_q_kv_rmsnorm."""

    qr: torch.Tensor
    kv: torch.Tensor
    q_weight: torch.Tensor
    kv_weight: torch.Tensor
    eps: float
    qr_out: torch.Tensor
    kv_out: torch.Tensor
    use_pdl: bool


class QKvQuantCall(NamedTuple):
    """fused_q_kv_rmsnorm_quant."""

    qr: torch.Tensor
    kv: torch.Tensor
    q_weight: torch.Tensor
    kv_weight: torch.Tensor
    eps: float
    out: torch.Tensor
    scale_out: torch.Tensor
    kv_out: torch.Tensor
    qr_out: torch.Tensor | None
    use_pdl: bool


class MtpInputCall(NamedTuple):
    """fused_mtp_input_rmsnorm."""

    inputs_embeds: torch.Tensor
    positions: torch.Tensor
    previous_hidden_states: torch.Tensor
    enorm_weight: torch.Tensor
    hnorm_weight: torch.Tensor
    eps: float
    hc_mult: int
    enorm_out: torch.Tensor
    hnorm_out: torch.Tensor
    use_pdl: bool


class SharedHeadCall(NamedTuple):
    """mtp_shared_head_rmsnorm."""

    hidden_states: torch.Tensor
    weight: torch.Tensor
    eps: float
    out: torch.Tensor
    use_pdl: bool
