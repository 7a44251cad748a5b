# SPDX-License-Identifier: Apache-2.0
"""What the sparse attention ops mean, in plain torch.

K and V are the same 512 values of a cache row. A query row attends to the rows its selections name:

    s_n = scale * (q . k_n)        L = ln sum_n exp(s_n)        out = sum_n exp(s_n - L) k_n / (1 + exp(sink - L))

All arithmetic is float64 and rounded once at the end, so neither the order of the columns nor the batch around a row
can be seen in the result. A row that attends to nothing gives out = 0, lse = +inf and max_logits = -inf. A logit that
is NaN makes out and lse NaN; max_logits is the largest of the others, -inf if there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from cute_kernels import numerics
from cute_kernels.formats import HEAD_DIM
from cute_kernels.output.call import QuantizedCall
from cute_kernels.output.reference import fused_inv_rope_fp8_quant
from cute_kernels.sparse_mla import selection
from cute_kernels.sparse_mla.call import DecodeCall, MergeCall, MixedCall, PagedCall, PrefillCall
from cute_kernels.sparse_mla.selection import Selection, pooled_slots, read_pooled, row_chunks, used_columns

ROW_BUDGET = 1 << 14
"""Cache rows held as float64 at a time: 64 MiB, and a few times that while they are decoded."""


class Attention(NamedTuple):
    """float64 results of n query rows: out [n, h, 512], max_logits [n, h], lse [n, h] (natural log, no sink)."""

    out: torch.Tensor
    max_logits: torch.Tensor
    lse: torch.Tensor


def attend(
    q: torch.Tensor,
    selections: Sequence[Selection],
    scale: float,
    sink: torch.Tensor | None,
    factors: torch.Tensor | None = None,
) -> Iterator[tuple[slice, Attention]]:
    """Attention of q [n, h, 512] to the selected rows, as (slice of query rows, their results), a chunk at a time.
    factors: of the heads' logits, [n, h, 1]; or None, which is 1."""
    columns = sum(s.width for s in selections)
    for outer in row_chunks(q.shape[0], columns, selection.SLOT_BUDGET):
        slots = pooled_slots(selections, outer)
        for inner in row_chunks(slots.shape[0], slots.shape[1], ROW_BUDGET):
            rows = slice(outer.start + inner.start, outer.start + inner.stop)
            queries = q[rows].float().double()
            if factors is not None:
                queries *= factors[rows]
            result = _attend_slots(queries, selections, used_columns(slots[inner]), scale)
            yield rows, result._replace(out=apply_sink(result.out, result.lse, sink))


def _attend_slots(q: torch.Tensor, selections: Sequence[Selection], slots: torch.Tensor, scale: float) -> Attention:
    """Attention without sink. More columns than the budget allows are taken in parts and merged."""
    columns = slots.split(ROW_BUDGET, dim=1)
    parts = [attend_rows(q, read_pooled(selections, part), part >= 0, scale) for part in columns]
    if len(parts) == 1:
        return parts[0]
    out, lse = merge_parts(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts]))
    return Attention(out, torch.stack([p.max_logits for p in parts]).amax(dim=0), lse)


def attend_rows(q: torch.Tensor, rows: torch.Tensor, valid: torch.Tensor, scale: float) -> Attention:
    """Attention without sink of q float64 [n, h, 512] to rows float64 [n, columns, 512] where valid [n, columns].

    Rows that are not valid must be zero: their weight is 0, and 0 * NaN would be NaN.
    """
    if rows.shape[1] == 0:
        minus = torch.full(q.shape[:2], -torch.inf, dtype=q.dtype, device=q.device)
        return Attention(torch.zeros_like(q), minus, -minus)
    scores = torch.bmm(q * scale, rows.transpose(1, 2))
    scores.masked_fill_(~valid[:, None, :], -torch.inf)
    top = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(dim=-1)
    empty = ~valid.any(dim=-1, keepdim=True)
    shift = top.masked_fill(empty, 0.0)
    weights = scores.sub_(shift[..., None]).exp_()
    total = weights.sum(dim=-1).masked_fill(empty, 1.0)
    out = torch.bmm(weights, rows).div_(total[..., None])
    return Attention(out, top, (shift + total.log()).masked_fill(empty, torch.inf))


def apply_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Count the sink [h] as one more logit without a value: out [..., h, 512] / (1 + exp(sink - lse [..., h]))."""
    if sink is None:
        return out
    share = torch.sigmoid(lse - sink.double())
    # An empty row has lse +inf: its share is not defined where the sink is +inf, and its out is 0 whatever the sink.
    return out * share.masked_fill(lse == torch.inf, 0.0)[..., None]


def merge_parts(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge float64 outs [n, ..., 512] and lses [n, ...] of disjoint selections; an infinite lse marks an empty one."""
    empty = lses.isinf()
    lse = torch.logsumexp(lses.masked_fill(empty, -torch.inf), dim=0)
    weights = (lses - lse).exp().masked_fill(empty, 0.0)
    out = (outs.masked_fill(empty[..., None], 0.0) * weights[..., None]).sum(dim=0)
    return out, lse.masked_fill(empty.all(dim=0), torch.inf)


def rotate_raw(
    q: torch.Tensor, squares: torch.Tensor, eps: float, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw queries [T, h, 512], rotated, and what the heads' logits are multiplied with, fp32 [T, h, 1]: their norm has
    no weight, so that it is one factor for a whole head."""
    mean = squares.unflatten(1, (q.shape[1], -1)).sum(-1, keepdim=True) / HEAD_DIM
    return numerics.rotate(q.float(), positions, cos_sin_cache).to(q.dtype), torch.rsqrt(mean + eps)


def _store(out: torch.Tensor | None, rows: slice, result: torch.Tensor) -> None:
    if out is not None:
        out[rows] = result.float().to(out.dtype)


def _quantize(o: torch.Tensor, call: DecodeCall | PrefillCall | PagedCall) -> None:
    """Store bf16 results [T, h, 512] as the projection behind attention takes them."""
    assert call.positions is not None
    assert call.cos_sin_cache is not None
    assert call.out_scale is not None
    groups, width = call.out.shape[1:]
    results = call.out, call.out_scale
    heads = width // HEAD_DIM
    fused_inv_rope_fp8_quant(
        QuantizedCall(o, call.positions, call.cos_sin_cache, *results, groups, heads, False, use_pdl=False)
    )


def _queries(q: torch.Tensor, call: DecodeCall | PrefillCall | PagedCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Queries q [T, h, 512] of a call as logits take them, and what those are multiplied with, or None."""
    if call.q_squares is None:
        return q, None
    assert call.positions is not None
    assert call.cos_sin_cache is not None
    return rotate_raw(q, call.q_squares, call.q_norm_eps, call.positions, call.cos_sin_cache)


def sparse_mla_decode(call: DecodeCall) -> None:
    q, lse, tokens = call.q, call.lse, call.q.shape[1]
    o = torch.empty_like(q, memory_format=torch.contiguous_format) if call.is_quantized else call.out
    queries, factors = _queries(q.flatten(0, 1), call)
    selections = selection.decode_selections(call)
    for rows, result in attend(queries, selections, call.softmax_scale, call.attn_sink, factors):
        row = torch.arange(rows.start, rows.stop, device=q.device)
        batch, token = row // tokens, row % tokens
        o[batch, token] = result.out.float().to(o.dtype)
        if lse is not None:
            lse[batch, :, token] = result.lse.float()
    if call.is_quantized:
        _quantize(o.flatten(0, 1), call)


def sparse_mla_prefill(call: PrefillCall) -> None:
    _prefill(call, selection.prefill_selections(call), *_queries(call.q, call))


def sparse_mla_prefill_paged(call: PagedCall) -> None:
    _prefill(call, selection.paged_selections(call), *_queries(call.q, call))


def _prefill(
    call: PrefillCall | PagedCall,
    selections: Sequence[Selection],
    q: torch.Tensor,
    factors: torch.Tensor | None = None,
) -> None:
    o = torch.empty_like(call.q, memory_format=torch.contiguous_format) if call.is_quantized else call.out
    for rows, result in attend(q, selections, call.sm_scale, call.attn_sink, factors):
        _store(o, rows, result.out)
        _store(call.max_logits, rows, result.max_logits)
        _store(call.lse, rows, result.lse)
    if call.is_quantized:
        _quantize(o, call)


def sparse_mla_mixed(call: MixedCall) -> None:
    for rows, result in attend(call.query, selection.mixed_selections(call), call.bmm1_scale, call.sinks):
        _store(call.out, rows, result.out * call.bmm2_scale)
        _store(call.lse, rows, result.lse)


def merge_attention_states(call: MergeCall) -> None:
    for i in range(call.outs.shape[1]):
        merged, total = merge_parts(call.outs[:, i].double(), call.lses[:, i].transpose(-1, -2).double())
        call.out[i] = apply_sink(merged, total, call.attn_sink).float().to(call.out.dtype)
        if call.lse is not None:
            call.lse[i] = total.transpose(-1, -2).float()
