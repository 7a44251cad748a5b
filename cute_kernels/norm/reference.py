# SPDX-License-Identifier: Apache-2.0
"""What the norms mean, in plain torch."""

from __future__ import annotations

from cute_kernels.linear.call import QuantizeCall
from cute_kernels.linear.reference import quantize_fp8_1x128
from cute_kernels.norm.call import MtpInputCall, QKvCall, QKvQuantCall, SharedHeadCall
from cute_kernels.numerics import rms_norm


def fused_q_kv_rmsnorm(call: QKvCall) -> None:
    call.qr_out.copy_(rms_norm(call.qr, call.q_weight, call.eps))
    call.kv_out.copy_(rms_norm(call.kv, call.kv_weight, call.eps))


def fused_q_kv_rmsnorm_quant(call: QKvQuantCall) -> None:
    query = rms_norm(call.qr, call.q_weight, call.eps).bfloat16()
    quantize_fp8_1x128(QuantizeCall(query, call.out, call.scale_out, call.use_pdl))
    call.kv_out.copy_(rms_norm(call.kv, call.kv_weight, call.eps))
    if call.qr_out is not None:
        call.qr_out.copy_(query)


def fused_mtp_input_rmsnorm(call: MtpInputCall) -> None:
    first = (call.positions == 0)[:, None]
    call.enorm_out.copy_(rms_norm(call.inputs_embeds, call.enorm_weight, call.eps).masked_fill(first, 0.0))
    call.hnorm_out.copy_(rms_norm(call.previous_hidden_states, call.hnorm_weight, call.eps))


def mtp_shared_head_rmsnorm(call: SharedHeadCall) -> None:
    call.out.copy_(rms_norm(call.hidden_states, call.weight, call.eps))
