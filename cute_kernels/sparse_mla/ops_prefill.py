"""Sparse attention of prefill rows: from a workspace of gathered rows, or straight from both paged caches."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op
from cute_kernels.sparse_mla import arguments, reference
from cute_kernels.sparse_mla.selection import paged_selections, prefill_selections

__all__ = ["sparse_mla_prefill", "sparse_mla_prefill_paged"]


def _check_results(
    c: Checker,
    tokens: str,
    q: torch.Tensor,
    out: torch.Tensor,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
    *quant: torch.Tensor | None,
) -> None:
    if not arguments.check_quantized(c, q, out, *quant):
        c.tensor("out", out, torch.bfloat16, (tokens, "h", formats.HEAD_DIM))
    arguments.check_logs(c, "max_logits", max_logits, (tokens, "h"))
    arguments.check_logs(c, "lse", lse, (tokens, "h"))


def _results(
    op: str,
    q: torch.Tensor,
    out: torch.Tensor | None,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    output_quant: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The given results, new tensors for those that are None and asked for; codes must be given."""
    arguments.check_query(Checker(op), "q", q, (torch.bfloat16,), ("s_q",))
    if out is None:
        if output_quant is not None:
            Checker(op).fail("out", "a tensor with output_quant", "None", TypeError)
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if max_logits is None and return_lse:
        max_logits = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return out, max_logits, lse


def _check_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    max_logits: torch.Tensor | None,
    lse: torch.Tensor | None,
    q_squares: torch.Tensor | None = None,
    q_norm_eps: float = 0.0,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    c = Checker("sparse_mla_prefill")
    arguments.check_query(c, "q", q, (torch.bfloat16,), ("s_q",))
    c.tensor("kv", kv, torch.bfloat16, (None, 1, formats.HEAD_DIM))
    arguments.check_cache(c, "kv", kv, formats.PLAIN_BF16)
    c.tensor("indices", indices, torch.int32, ("s_q", 1, None))
    arguments.check_sink(c, "attn_sink", attn_sink)
    c.tensor("topk_length", topk_length, torch.int32, ("s_q",), optional=True)
    _check_results(c, "s_q", q, out, max_logits, lse, positions, cos_sin_cache, out_scale)
    arguments.check_q_norm(c, q, q_squares, q_norm_eps, positions)


def _cost_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    out: torch.Tensor,
    *_: Any,
) -> Cost:
    return arguments.attention_cost(q, out, prefill_selections(kv, indices, topk_length))


_prefill = define_op(
    "sparse_mla_prefill(Tensor q, Tensor kv, Tensor indices, float sm_scale, Tensor? attn_sink, Tensor? topk_length, "
    "Tensor(a!) out, Tensor(b!)? max_logits, Tensor(c!)? lse, Tensor? q_squares, float q_norm_eps, "
    "Tensor? positions, "
    "Tensor? cos_sin_cache, Tensor(d!)? out_scale) -> ()",
    check=_check_prefill,
    reference=reference.sparse_mla_prefill,
    cost=_cost_prefill,
    kernel="cute_kernels.sparse_mla.prefill",
)


def sparse_mla_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = formats.HEAD_DIM,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = True,
    q_norm: tuple[torch.Tensor, float] | None = None,
    output_quant: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Any, Any]:
    """Attention of each query row to rows of one buffer that it names by number.

    With s_n = sm_scale * (q . k_n) over the rows n attended to and lse = ln sum_n exp(s_n):
    out = sum_n exp(s_n - lse) k_n / (1 + exp(attn_sink - lse)). K and V are the same 512 values.

    q             bf16 [s_q, h, 512], any strides with a dense last dimension, 1 <= h <= 128
    kv            bf16 [s_kv, 1, 512], rows of any stride; kernels need multiples of 16 bytes
    indices       int32 [s_q, 1, topk], topk >= 0: rows of kv. A value outside 0 .. s_kv - 1 is skipped, a value that
                  appears twice counts twice
    sm_scale      softmax scale
    d_v           must be 512
    attn_sink     fp32 [h]: a logit without a value; -inf or None has no effect, +inf gives out = 0
    topk_length   int32 [s_q]: only columns below it count; None: all
    out           bf16 [s_q, h, 512], any strides with a dense last dimension; mutated
    max_logits    fp32 [s_q, h], any strides; mutated
    lse           fp32 [s_q, h], any strides; mutated
    return_lse    False: max_logits and lse are written only if they are given, and nothing is allocated for them
    output_quant  (positions int64 [s_q], cos_sin_cache fp32 [rows, 64], out_scale fp32): the output is stored as
                  `fused_inv_rope_fp8_quant` would make it of the bf16 output, byte for byte. Then out must be given,
                  e4m3 [s_q, groups, heads of a group * 512] with a dense last dimension, and out_scale is the memory of
                  `output_scale_shape`, padding included; both mutated. A position outside the table takes its nearest
                  row. On sm_90a
    q_norm        (squares fp32 [s_q, h * 4], eps): the queries are as `fp8_linear_squares` made them, squares the sums
                  that came with them. Their last 64 columns are first rotated by positions and cos_sin_cache of
                  output_quant and rounded to bf16; their norm, which is one factor for a head, comes behind the
                  products: s_n = sm_scale * (q . k_n) / sqrt(sum of the head's four / 512 + eps). q itself stays as it
                  is. Only with output_quant. On sm_90a, for more than 16 heads

    Returns (out, max_logits, lse), with None for what nobody asks for: max_logits = max_n s_n; lse is the natural
    logarithm; neither includes the sink. A row that attends to nothing has out = 0, max_logits = -inf and lse = +inf.
    Rows of kv not attended to are not read into the result, whatever they hold. Raises ValueError or TypeError on
    arguments that do not fit.
    """
    if d_v != formats.HEAD_DIM:
        Checker("sparse_mla_prefill").fail("d_v", str(formats.HEAD_DIM), d_v)
    out, max_logits, lse = _results("sparse_mla_prefill", q, out, max_logits, lse, return_lse, output_quant)
    quant = arguments.quant_tensors(output_quant, "sparse_mla_prefill")
    norm = arguments.norm_arguments(q_norm, "sparse_mla_prefill")
    _prefill(q, kv, indices, sm_scale, attn_sink, topk_length, out, max_logits, lse, *norm, *quant)
    return out, max_logits, lse


def _check_paged(
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
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> None:
    c = Checker("sparse_mla_prefill_paged")
    arguments.check_query(c, "q", q, (torch.bfloat16,), ("T",))
    fmt = formats.get_format(c, "kv_format", kv_format, *arguments.PAGED_FORMATS)
    arguments.check_cache(c, "swa_cache", swa_cache, fmt)
    arguments.check_batch(c, "query_start_loc", query_start_loc, seq_lens)
    c.tensor("swa_block_table", swa_block_table, torch.int32, ("R", None))
    c.require(window_size >= 1, "window_size", "a positive number", window_size)
    fmt = formats.get_format(c, "compressed_kv_format", compressed_kv_format, *arguments.PAGED_FORMATS)
    if compressed_cache is None:
        arguments.check_absent(
            c, "without compressed_cache", compressed_block_table=compressed_block_table, topk_indices=topk_indices
        )
    else:
        arguments.check_cache(c, "compressed_cache", compressed_cache, fmt)
        c.tensor("compressed_block_table", compressed_block_table, torch.int32, ("R", None))
        c.require(compress_ratio >= 1, "compress_ratio", "a positive number", compress_ratio)
        c.tensor("topk_indices", topk_indices, torch.int32, ("T", None), optional=True)
    arguments.check_sink(c, "attn_sink", attn_sink)
    arguments.check_splits(c, num_splits, split_tokens)
    _check_results(c, "T", q, out, max_logits, lse, positions, cos_sin_cache, out_scale)


def _cost_paged(
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
    *_: Any,
) -> Cost:
    selections = paged_selections(
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
    return arguments.attention_cost(q, out, selections)


def _validate_paged(
    q: torch.Tensor, swa_cache: torch.Tensor, swa_block_table: torch.Tensor, query_start_loc: torch.Tensor, *_: Any
) -> None:
    validate.ascending("sparse_mla_prefill_paged", "query_start_loc", query_start_loc)


_prefill_paged = define_op(
    "sparse_mla_prefill_paged(Tensor q, Tensor swa_cache, Tensor swa_block_table, Tensor query_start_loc, "
    "Tensor seq_lens, float sm_scale, SymInt window_size, Tensor? compressed_cache, Tensor? compressed_block_table, "
    "SymInt compress_ratio, Tensor? topk_indices, Tensor? attn_sink, str kv_format, str compressed_kv_format, "
    "SymInt num_splits, SymInt split_tokens, Tensor(a!) out, Tensor(b!)? max_logits, Tensor(c!)? lse, "
    "Tensor? positions, Tensor? cos_sin_cache, Tensor(d!)? out_scale) -> ()",
    check=_check_paged,
    reference=reference.sparse_mla_prefill_paged,
    cost=_cost_paged,
    kernel="cute_kernels.sparse_mla.paged",
    validate=_validate_paged,
)


def sparse_mla_prefill_paged(
    q: torch.Tensor,
    swa_cache: torch.Tensor,
    swa_block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    *,
    window_size: int = 128,
    compressed_cache: torch.Tensor | None = None,
    compressed_block_table: torch.Tensor | None = None,
    compress_ratio: int = 1,
    topk_indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    kv_format: str = formats.FP8_DS_MLA.id,
    compressed_kv_format: str = formats.FP8_DS_MLA.id,
    num_splits: int = 0,
    split_tokens: int = 0,
    out: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = True,
    output_quant: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Any, Any]:
    """Attention of each query row to its sliding window and to compressed entries, straight from their paged caches.

    The same result as gathering both caches into a workspace and calling `sparse_mla_prefill` on it. Request r owns the
    rows query_start_loc[r] .. query_start_loc[r + 1] - 1, counted from query_start_loc[0]; the last of them is at
    position seq_lens[r] - 1. A row at position p attends to positions max(p - window_size + 1, 0) .. p of its request,
    and to its compressed entries below v = (p + 1) // compress_ratio: those that topk_indices names, or all of them.

    q                        bf16 [T, h, 512], any strides with a dense last dimension, 1 <= h <= 128
    swa_cache                [num_blocks, rows per page, row elements] of kv_format, one row per token; any
                             page stride that holds a page. Kernels need multiples of 16 bytes, Blackwell's own of 576
                             for fp8_ds_mla, as `formats.FP8_DS_MLA.allocate` makes them
    swa_block_table          int32 [R, pages], row-strided: position p lies in row p % bs of page
                             swa_block_table[r, p // bs], bs rows per page; positions without a page of the cache are
                             skipped
    query_start_loc          int32 [R + 1]; may be a slice of a longer array. Rows that no request covers attend to
                             nothing
    seq_lens                 int32 [R]: context of each request, its query rows included
    sm_scale                 softmax scale
    window_size              positions in the window, the row's own included
    compressed_cache         as swa_cache, of compressed_kv_format, one row per entry; None: window only
    compressed_block_table   int32 [R, pages] of the compressed cache
    compress_ratio           tokens per compressed entry; ignored without compressed_cache
    topk_indices             int32 [T, K], K >= 0, entries of the row's own request: column j counts iff j < v and its
                             value is in 0 .. v - 1; a value that appears twice counts twice. None: all of 0 .. v - 1
    attn_sink                fp32 [h]: a logit without a value; -inf or None has no effect, +inf gives out = 0
    kv_format                record format id of swa_cache: fp8_ds_mla/1 or plain_bf16/1
    compressed_kv_format     record format id of compressed_cache, likewise
    num_splits               how many parts a kernel cuts a row's keys into; 0: chosen from the shapes of the call, and
                             1 unless there are few rows. Other numbers than 0 are kept in any batch
    split_tokens             keys in a part, a multiple of 64, instead of num_splits: then a row's bits do not depend on
                             the batch around it, nor on how wide lists and tables are. 0: not fixed. Neither can change
                             the result by more than rounding. Hopper's kernel for fp8_ds_mla/1 has up to 8 parts of a
                             row; elsewhere num_splits = 0 is 1, and more are not supported
    out                      bf16 [T, h, 512], any strides with a dense last dimension; mutated
    max_logits, lse          fp32 [T, h], any strides; mutated
    return_lse               as in `sparse_mla_prefill`
    output_quant             as in `sparse_mla_prefill`, with positions of T rows; with fp8_ds_mla caches, and rows that
                             are not cut: num_splits = 0 is 1 then

    Returns (out, max_logits, lse) as `sparse_mla_prefill`. Raises ValueError or TypeError on arguments that do not fit.
    """
    out, max_logits, lse = _results("sparse_mla_prefill_paged", q, out, max_logits, lse, return_lse, output_quant)
    _prefill_paged(
        q,
        swa_cache,
        swa_block_table,
        query_start_loc,
        seq_lens,
        sm_scale,
        window_size,
        compressed_cache,
        compressed_block_table,
        compress_ratio,
        topk_indices,
        attn_sink,
        kv_format,
        compressed_kv_format,
        num_splits,
        split_tokens,
        out,
        max_logits,
        lse,
        *arguments.quant_tensors(output_quant, "sparse_mla_prefill_paged"),
    )
    return out, max_logits, lse
