"""What the sparse attention ops mean, in plain torch.

K and V are the same 512 values of a cache row. A query row attends to the rows its selections name:

    s_n = scale * (q . k_n)        L = ln sum_n exp(s_n)        out = sum_n exp(s_n - L) k_n / (1 + exp(sink - L))

All arithmetic is float64 and rounded once at the end, so neither the order of the columns nor the batch around a row
can be seen in the result. A row that attends to nothing gives out = 0, lse = +inf and max_logits = -inf.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from cute_kernels import numerics
from cute_kernels.formats import HEAD_DIM
from cute_kernels.output.reference import fused_inv_rope_fp8_quant
from cute_kernels.sparse_mla import selection
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
    top = scores.amax(dim=-1)
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


def _quantize(
    o: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor | None, out: torch.Tensor, out_scale: Any
) -> None:
    """Store bf16 results [T, h, 512] as the projection behind attention takes them."""
    assert cos_sin_cache is not None
    groups, width = out.shape[1:]
    per_group = width // HEAD_DIM
    fused_inv_rope_fp8_quant(o, positions, cos_sin_cache, out, out_scale, groups, per_group, False, False)


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    kv_format: str,
    extra_k_cache: torch.Tensor | None,
    extra_indices: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    extra_block_table: torch.Tensor | None,
    extra_length: torch.Tensor | None,
    extra_kv_format: str,
    num_splits: int,
    split_tokens: int,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    q_squares: torch.Tensor | None,
    q_norm_eps: float,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:
    selections = selection.decode_selections(
        q,
        k_cache,
        indices,
        topk_length,
        kv_format,
        extra_k_cache,
        extra_indices,
        extra_topk_length,
        extra_block_table,
        extra_length,
        extra_kv_format,
    )
    o = out if positions is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    queries, factors = q.flatten(0, 1), None
    if q_squares is not None:
        assert positions is not None
        assert cos_sin_cache is not None
        queries, factors = rotate_raw(queries, q_squares, q_norm_eps, positions, cos_sin_cache)
    for rows, result in attend(queries, selections, softmax_scale, attn_sink, factors):
        row = torch.arange(rows.start, rows.stop, device=q.device)
        batch, token = row // q.shape[1], row % q.shape[1]
        o[batch, token] = result.out.float().to(o.dtype)
        if lse is not None:
            lse[batch, :, token] = result.lse.float()
    if positions is not None:
        _quantize(o.flatten(0, 1), positions, cos_sin_cache, out, out_scale)


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
    q_squares: torch.Tensor | None,
    q_norm_eps: float,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:
    selections = selection.prefill_selections(kv, indices, topk_length)
    factors = None
    if q_squares is not None:
        assert positions is not None
        assert cos_sin_cache is not None
        q, factors = rotate_raw(q, q_squares, q_norm_eps, positions, cos_sin_cache)
    o = out if positions is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    for rows, result in attend(q, selections, sm_scale, attn_sink, factors):
        _store(o, rows, result.out)
        _store(max_logits, rows, result.max_logits)
        _store(lse, rows, result.lse)
    if positions is not None:
        _quantize(o, positions, cos_sin_cache, out, out_scale)


def sparse_mla_prefill_paged(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    window_size: int,
    compressed_cache: torch.Tensor | None,
    compressed_block_table: torch.Tensor | None,
    compress_ratio: int,
    topk_indices: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    kv_format: str,
    compressed_kv_format: str,
    num_splits: int,
    split_tokens: int,
    out: torch.Tensor,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    out_scale: torch.Tensor | None,
) -> None:
    selections = selection.paged_selections(
        q,
        swa_cache,
        swa_block_table,
        query_start_loc,
        seq_lens,
        window_size,
        compressed_cache,
        compressed_block_table,
        compress_ratio,
        topk_indices,
        kv_format,
        compressed_kv_format,
    )
    o = out if positions is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    for rows, result in attend(q, selections, sm_scale, attn_sink):
        _store(o, rows, result.out)
        _store(max_logits, rows, result.max_logits)
        _store(lse, rows, result.lse)
    if positions is not None:
        _quantize(o, positions, cos_sin_cache, out, out_scale)


def sparse_mla_mixed(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    compressed_kv_cache: torch.Tensor | None,
    sparse_topk_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    sinks: torch.Tensor | None,
    window_size: int,
    kv_format: str,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    selections = selection.mixed_selections(
        query,
        swa_kv_cache,
        sparse_indices,
        compressed_kv_cache,
        sparse_topk_lens,
        seq_lens,
        cum_seq_lens_q,
        window_size,
        kv_format,
    )
    for rows, result in attend(query, selections, bmm1_scale, sinks):
        _store(out, rows, result.out * bmm2_scale)
        _store(lse, rows, result.lse)


def merge_attention_states(
    outs: torch.Tensor, lses: torch.Tensor, attn_sink: torch.Tensor | None, out: torch.Tensor, lse: torch.Tensor | None
) -> None:
    for i in range(outs.shape[1]):
        merged, total = merge_parts(outs[:, i].double(), lses[:, i].transpose(-1, -2).double())
        out[i] = apply_sink(merged, total, attn_sink).float().to(out.dtype)
        if lse is not None:
            lse[i] = total.transpose(-1, -2).float()
