"""Merge of partial attention results."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.sparse_mla import arguments, reference

__all__ = ["merge_attention_states"]

_DTYPES = (torch.bfloat16, torch.float32)


def _check(
    outs: torch.Tensor, lses: torch.Tensor, attn_sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    c = Checker("merge_attention_states")
    arguments.check_query(c, "outs", outs, _DTYPES, ("n", "b", "s_q"))
    c.require(outs.shape[0] >= 1, "outs", "at least one part", f"shape {list(outs.shape)}")
    c.tensor("lses", lses, torch.float32, ("n", "b", "h", "s_q"))
    arguments.check_sink(c, "attn_sink", attn_sink)
    c.tensor("out", out, _DTYPES, ("b", "s_q", "h", formats.HEAD_DIM))
    arguments.check_partial(c, out, attn_sink)
    arguments.check_logs(c, "lse", lse, ("b", "h", "s_q"))


def _cost(
    outs: torch.Tensor, lses: torch.Tensor, attn_sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None
) -> Cost:
    return Cost(bytes=nbytes(outs, lses, out, lse), flops=2 * outs.numel())


_merge = define_op(
    "merge_attention_states(Tensor outs, Tensor lses, Tensor? attn_sink, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    check=_check,
    reference=reference.merge_attention_states,
    kernel="cute_kernels.sparse_mla.combine",
    cost=_cost,
)


def merge_attention_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, Any]:
    """Merge attention over disjoint sets of rows, computed without sink, into attention over all of them.

    lse = ln sum_i exp(lses[i]); out = sum_i exp(lses[i] - lse) outs[i] / (1 + exp(attn_sink - lse)). A part whose lse
    is infinite is empty: its out is not looked at.

    outs        fp32 or bf16 [n, b, s_q, h, 512], n >= 1 parts, any strides with a dense last dimension, 1 <= h <= 128
    lses        fp32 [n, b, h, s_q], natural logarithm, sink not included
    attn_sink   fp32 [h]: a logit without a value, applied once; -inf or None has no effect, +inf gives out = 0
    out         [b, s_q, h, 512], any strides with a dense last dimension; bf16, or fp32 for a result that is merged
                again (then attn_sink must be None); mutated
    lse         fp32 [b, h, s_q], any strides; mutated
    return_lse  False: lse is written only if it is given

    Returns (out, lse), or (out, None) if nobody asks for lse; it does not include the sink. Where every part is empty,
    out = 0 and lse = +inf. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("merge_attention_states")
    arguments.check_query(c, "outs", outs, _DTYPES, ("n", "b", "s_q"))
    c.tensor("lses", lses, torch.float32, ("n", "b", "h", "s_q"))
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=torch.bfloat16, device=outs.device)
    if lse is None and return_lse:
        lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    _merge(outs, lses, attn_sink, out, lse)
    return out, lse
