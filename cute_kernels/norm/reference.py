# SPDX-License-Identifier: Apache-2.0
"""What the norms mean, in plain torch."""

from __future__ import annotations

import torch

from cute_kernels.linear.reference import quantize_fp8_1x128
from cute_kernels.numerics import rms_norm


def fused_q_kv_rmsnorm(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    qr_out: torch.Tensor,
    kv_out: torch.Tensor,
    use_pdl: bool,
) -> None:
    qr_out.copy_(rms_norm(qr, q_weight, eps))
    kv_out.copy_(rms_norm(kv, kv_weight, eps))


def fused_q_kv_rmsnorm_quant(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    scale_out: torch.Tensor,
    kv_out: torch.Tensor,
    qr_out: torch.Tensor | None,
    use_pdl: bool,
) -> None:
    query = rms_norm(qr, q_weight, eps).bfloat16()
    quantize_fp8_1x128(query, out, scale_out, use_pdl)
    kv_out.copy_(rms_norm(kv, kv_weight, eps))
    if qr_out is not None:
        qr_out.copy_(query)


def fused_mtp_input_rmsnorm(
    inputs_embeds: torch.Tensor,
    positions: torch.Tensor,
    previous_hidden_states: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eps: float,
    hc_mult: int,
    enorm_out: torch.Tensor,
    hnorm_out: torch.Tensor,
    use_pdl: bool,
) -> None:
    first = (positions == 0)[:, None]
    enorm_out.copy_(rms_norm(inputs_embeds, enorm_weight, eps).masked_fill(first, 0.0))
    hnorm_out.copy_(rms_norm(previous_hidden_states, hnorm_weight, eps))


def mtp_shared_head_rmsnorm(
    hidden_states: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, use_pdl: bool
) -> None:
    out.copy_(rms_norm(hidden_states, weight, eps))
