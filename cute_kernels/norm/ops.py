# SPDX-License-Identifier: Apache-2.0
"""RMS norms of the attention path: latent q and kv (q also quantized), the inputs of the MTP layer, its shared head.

All of them compute y = x * rsqrt(mean(x^2) + eps) * weight per row and round to bf16 at the end only.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.linear.ops import activation_scale_shape
from cute_kernels.norm import reference
from cute_kernels.norm.call import MtpInputCall, QKvCall, QKvQuantCall, SharedHeadCall
from cute_kernels.runtime.checks import Checker, Dim
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned

__all__ = [
    "fused_mtp_input_rmsnorm",
    "fused_q_kv_rmsnorm",
    "fused_q_kv_rmsnorm_quant",
    "mtp_shared_head_rmsnorm",
]

_WEIGHT_DTYPES = (torch.bfloat16, torch.float32)
_FLOPS = 4  # per value: the square, its sum, two products


def _check_norm(c: Checker, names: tuple[str, str], x: Any, weight: Any, shape: tuple[Dim, ...]) -> None:
    c.tensor(names[0], x, torch.bfloat16, shape)
    c.tensor(names[1], weight, _WEIGHT_DTYPES, shape[-1:])


def _check_eps(c: Checker, eps: float) -> None:
    c.require(eps >= 0, "eps", "a number >= 0", eps)


def _like(c: Checker, argument: str, x: Any) -> torch.Tensor:
    """A new contiguous result for the tensor `x`."""
    c.tensor(argument, x, torch.bfloat16)
    return torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)


def _check_q_kv(call: QKvCall) -> None:
    c = Checker("fused_q_kv_rmsnorm")
    _check_norm(c, ("qr", "q_weight"), call.qr, call.q_weight, ("T", "q_lora_rank"))
    _check_norm(c, ("kv", "kv_weight"), call.kv, call.kv_weight, ("T", "head_dim"))
    _check_eps(c, call.eps)
    c.tensor("out", call.qr_out, torch.bfloat16, ("T", "q_lora_rank"))
    c.tensor("out", call.kv_out, torch.bfloat16, ("T", "head_dim"))


def _cost_q_kv(call: QKvCall) -> Cost:
    moved = nbytes(call.qr, call.kv, call.q_weight, call.kv_weight, call.qr_out, call.kv_out)
    return Cost(bytes=moved, flops=_FLOPS * (call.qr.numel() + call.kv.numel()))


def _q_kv_kernel() -> OpKernel[QKvCall]:
    from cute_kernels.norm.rms import Q_KV

    return Q_KV


_q_kv = define_op(
    "fused_q_kv_rmsnorm(Tensor qr, Tensor kv, Tensor q_weight, Tensor kv_weight, float eps, Tensor(a!) qr_out, "
    "Tensor(b!) kv_out, bool use_pdl) -> ()",
    QKvCall,
    check=_check_q_kv,
    reference=reference.fused_q_kv_rmsnorm,
    kernel=_q_kv_kernel,
    cost=_cost_q_kv,
    in_place={"qr_out": "qr", "kv_out": "kv"},
)


@planned
def fused_q_kv_rmsnorm(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of the latent query and of the KV vector of each token, usually column slices of one projection.

    qr          bf16 [T, q_lora_rank], rows of any stride
    kv          bf16 [T, head_dim], rows of any stride
    q_weight    bf16 or fp32 [q_lora_rank]. Constant, as kv_weight: it may be read before the kernels ahead of it have
                ended (with use_pdl); whoever writes it on that stream puts a launch without use_pdl in between
    kv_weight   bf16 or fp32 [head_dim]
    eps         added to the mean of the squares
    out         (bf16 like qr, bf16 like kv), rows of any stride, or None: allocated, contiguous; mutated. It may be
                (qr, kv) themselves, either of them
    use_pdl     start while the kernel before on the stream still runs (programmatic dependent launch), and wait for it
                before qr or kv is read

    Returns (qr_out, kv_out). Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fused_q_kv_rmsnorm")
    if out is None:
        out = _like(c, "qr", qr), _like(c, "kv", kv)
    qr_out, kv_out = c.pair("out", out, "like qr, like kv")
    _q_kv(QKvCall(qr, kv, q_weight, kv_weight, eps, qr_out, kv_out, use_pdl))
    return qr_out, kv_out


def _check_q_kv_quant(call: QKvQuantCall) -> None:
    c = Checker("fused_q_kv_rmsnorm_quant")
    _check_norm(c, ("qr", "q_weight"), call.qr, call.q_weight, ("T", "q_lora_rank"))
    _check_norm(c, ("kv", "kv_weight"), call.kv, call.kv_weight, ("T", "head_dim"))
    _check_eps(c, call.eps)
    c.tensor("out", call.out, torch.float8_e4m3fn, ("T", "q_lora_rank"))
    c.tensor("scale_out", call.scale_out, torch.float32, activation_scale_shape(*call.qr.shape))
    c.tensor("kv_out", call.kv_out, torch.bfloat16, ("T", "head_dim"))
    c.tensor("qr_out", call.qr_out, torch.bfloat16, ("T", "q_lora_rank"), optional=True)


def _cost_q_kv_quant(call: QKvQuantCall) -> Cost:
    moved = nbytes(call.qr, call.kv, call.q_weight, call.kv_weight, call.out, call.scale_out, call.kv_out, call.qr_out)
    return Cost(bytes=moved, flops=_FLOPS * (call.qr.numel() + call.kv.numel()) + 2 * call.qr.numel())


def _q_kv_quant_kernel() -> OpKernel[QKvQuantCall]:
    from cute_kernels.norm.q_kv_quant import KERNEL

    return KERNEL


_q_kv_quant = define_op(
    "fused_q_kv_rmsnorm_quant(Tensor qr, Tensor kv, Tensor q_weight, Tensor kv_weight, float eps, Tensor(a!) out, "
    "Tensor(b!) scale_out, Tensor(c!) kv_out, Tensor(d!)? qr_out, bool use_pdl) -> ()",
    QKvQuantCall,
    check=_check_q_kv_quant,
    reference=reference.fused_q_kv_rmsnorm_quant,
    kernel=_q_kv_quant_kernel,
    cost=_cost_q_kv_quant,
)


@planned
def fused_q_kv_rmsnorm_quant(
    qr: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    kv_weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    kv_out: torch.Tensor | None = None,
    qr_out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fused_q_kv_rmsnorm` with the latent query quantized, as the FP8 GEMMs behind it read it: one launch.

    The normed query is rounded to bf16 and then quantized as `quantize_fp8_1x128` does: each block of 128 columns (the
    last one of a row may be narrower) gets the scale 2^ceil(log2(max(absmax, 1e-10) / 448)) and is stored as e4m3
    (nearest even). The bytes are those of the two ops one after the other.

    qr          bf16 [T, q_lora_rank], rows of any stride
    kv          bf16 [T, head_dim], rows of any stride
    q_weight    bf16 or fp32 [q_lora_rank]. Constant, as kv_weight: it may be read before the kernels ahead of it have
                ended (with use_pdl); whoever writes it on that stream puts a launch without use_pdl in between
    kv_weight   bf16 or fp32 [head_dim]
    eps         added to the mean of the squares
    out         codes, e4m3 [T, q_lora_rank], rows of any stride, or None: allocated, contiguous; mutated
    scale_out   the memory of the scales, fp32 `activation_scale_shape(T, q_lora_rank)`: [ceil(q_lora_rank / 128), T
                rounded up to 4] with a dense last dimension, or None: allocated; mutated, all of it: the columns of
                tokens that do not exist become zero
    kv_out      bf16 [T, head_dim], rows of any stride, or None: allocated, contiguous; mutated
    qr_out      the normed query in bf16, [T, q_lora_rank], rows of any stride, or None: not stored; mutated
    use_pdl     start while the kernel before on the stream still runs (programmatic dependent launch), and wait for it
                before qr or kv is read

    Returns (out, scale [T, ceil(q_lora_rank / 128)], kv_out); scale is a view of scale_out with tokens innermost: the
    `a_scale` of the FP8 GEMMs. No output may share memory with an input or with another output. Kernels need rows of
    16-byte alignment (those of out: 8), and multiples of 8 up to 2048 as widths. Raises ValueError or TypeError on
    arguments that do not fit.
    """
    c = Checker("fused_q_kv_rmsnorm_quant")
    c.tensor("qr", qr, torch.bfloat16, (None, None))
    if out is None:
        out = torch.empty(qr.shape, dtype=torch.float8_e4m3fn, device=qr.device)
    if scale_out is None:
        scale_out = torch.empty(activation_scale_shape(*qr.shape), dtype=torch.float32, device=qr.device)
    if kv_out is None:
        kv_out = _like(c, "kv", kv)
    _q_kv_quant(QKvQuantCall(qr, kv, q_weight, kv_weight, eps, out, scale_out, kv_out, qr_out, use_pdl))
    return out, scale_out.t()[: qr.shape[0]], kv_out


def _check_mtp_input(call: MtpInputCall) -> None:
    c = Checker("fused_mtp_input_rmsnorm")
    previous_shape = ("T", call.hc_mult, "hidden")
    _check_norm(c, ("inputs_embeds", "enorm_weight"), call.inputs_embeds, call.enorm_weight, ("T", "hidden"))
    c.tensor("positions", call.positions, (torch.int64, torch.int32), ("T",))
    _check_norm(
        c, ("previous_hidden_states", "hnorm_weight"), call.previous_hidden_states, call.hnorm_weight, previous_shape
    )
    _check_eps(c, call.eps)
    c.tensor("out", call.enorm_out, torch.bfloat16, ("T", "hidden"))
    c.tensor("out", call.hnorm_out, torch.bfloat16, previous_shape)


def _cost_mtp_input(call: MtpInputCall) -> Cost:
    inputs = nbytes(
        call.inputs_embeds, call.positions, call.previous_hidden_states, call.enorm_weight, call.hnorm_weight
    )
    flops = _FLOPS * (call.inputs_embeds.numel() + call.previous_hidden_states.numel())
    return Cost(bytes=inputs + nbytes(call.enorm_out, call.hnorm_out), flops=flops)


def _mtp_input_kernel() -> OpKernel[MtpInputCall]:
    from cute_kernels.norm.rms import MTP_INPUT

    return MTP_INPUT


_mtp_input = define_op(
    "fused_mtp_input_rmsnorm(Tensor inputs_embeds, Tensor positions, Tensor previous_hidden_states, "
    "Tensor enorm_weight, Tensor hnorm_weight, float eps, SymInt hc_mult, "
    "Tensor(a!) enorm_out, Tensor(b!) hnorm_out, bool use_pdl) -> ()",
    MtpInputCall,
    check=_check_mtp_input,
    reference=reference.fused_mtp_input_rmsnorm,
    kernel=_mtp_input_kernel,
    cost=_cost_mtp_input,
    in_place={"enorm_out": "inputs_embeds", "hnorm_out": "previous_hidden_states"},
)


@planned
def fused_mtp_input_rmsnorm(
    inputs_embeds: torch.Tensor,
    positions: torch.Tensor,
    previous_hidden_states: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eps: float,
    hc_mult: int,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    use_pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norms in front of the MTP layer: of the token embeddings, and of each residual stream of the previous layer.

    An embedding row at position 0 has no predecessor: it comes out as +0, whatever it holds. Residual rows are never
    masked.

    inputs_embeds            bf16 [T, hidden], rows of any stride
    positions                int64 or int32 [T]
    previous_hidden_states   bf16 [T, hc_mult, hidden], any strides with a dense last dimension
    enorm_weight             bf16 or fp32 [hidden], for the embeddings. Constant, as hnorm_weight: it may be read before
                             the kernels ahead of it have ended (with use_pdl)
    hnorm_weight             bf16 or fp32 [hidden], for the residual streams
    eps                      added to the mean of the squares
    hc_mult                  residual streams per token (4)
    out                      (bf16 like inputs_embeds, bf16 like previous_hidden_states), dense in the last dimension,
                             or None: allocated, contiguous; mutated. It may be (inputs_embeds, previous_hidden_states)
                             themselves, either of them
    use_pdl                  start while the kernel before on the stream still runs (programmatic dependent launch),
                             and wait for it before anything but the weights is read

    Returns (enorm_out, hnorm_out). Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fused_mtp_input_rmsnorm")
    if out is None:
        out = (
            _like(c, "inputs_embeds", inputs_embeds),
            _like(c, "previous_hidden_states", previous_hidden_states),
        )
    enorm_out, hnorm_out = c.pair("out", out, "like inputs_embeds, like previous_hidden_states")
    _mtp_input(
        MtpInputCall(
            inputs_embeds,
            positions,
            previous_hidden_states,
            enorm_weight,
            hnorm_weight,
            eps,
            hc_mult,
            enorm_out,
            hnorm_out,
            use_pdl,
        )
    )
    return enorm_out, hnorm_out


def _check_shared_head(call: SharedHeadCall) -> None:
    c = Checker("mtp_shared_head_rmsnorm")
    _check_norm(c, ("hidden_states", "weight"), call.hidden_states, call.weight, ("T", "hidden"))
    _check_eps(c, call.eps)
    c.tensor("out", call.out, torch.bfloat16, ("T", "hidden"))


def _cost_shared_head(call: SharedHeadCall) -> Cost:
    return Cost(bytes=nbytes(call.hidden_states, call.weight, call.out), flops=_FLOPS * call.hidden_states.numel())


def _shared_head_kernel() -> OpKernel[SharedHeadCall]:
    from cute_kernels.norm.rms import SHARED_HEAD

    return SHARED_HEAD


_shared_head = define_op(
    "mtp_shared_head_rmsnorm(Tensor hidden_states, Tensor weight, float eps, Tensor(a!) out, bool use_pdl) -> ()",
    SharedHeadCall,
    check=_check_shared_head,
    reference=reference.mtp_shared_head_rmsnorm,
    kernel=_shared_head_kernel,
    cost=_cost_shared_head,
    in_place={"out": "hidden_states"},
)


@planned
def mtp_shared_head_rmsnorm(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> torch.Tensor:
    """RMS norm in front of the MTP layer's shared head.

    hidden_states   bf16 [T, hidden], rows of any stride
    weight          bf16 or fp32 [hidden]. Constant: it may be read before the kernels ahead of it have ended (with
                    use_pdl)
    eps             added to the mean of the squares
    out             bf16 [T, hidden], rows of any stride, or None: allocated, contiguous; mutated. It may be
                    hidden_states itself
    use_pdl         start while the kernel before on the stream still runs (programmatic dependent launch), and wait for
                    it before hidden_states is read

    Returns out. Raises ValueError or TypeError on arguments that do not fit.
    """
    if out is None:
        out = _like(Checker("mtp_shared_head_rmsnorm"), "hidden_states", hidden_states)
    _shared_head(SharedHeadCall(hidden_states, weight, eps, out, use_pdl))
    return out
