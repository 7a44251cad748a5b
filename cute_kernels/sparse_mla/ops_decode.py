"""Sparse attention of decode rows, straight from paged caches."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op
from cute_kernels.sparse_mla import arguments, reference
from cute_kernels.sparse_mla.selection import decode_selections

__all__ = ["sparse_mla_decode"]


def _check(
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
    lse: torch.Tensor,
) -> None:
    c = Checker("sparse_mla_decode")
    arguments.check_query(c, "q", q, (torch.bfloat16,), ("b", "s_q"))
    fmt = formats.get_format(c, "kv_format", kv_format, *arguments.PAGED_FORMATS)
    arguments.check_cache(c, "k_cache", k_cache, fmt)
    c.tensor("indices", indices, torch.int32, ("b", "s_q", None))
    arguments.check_lengths(c, "topk_length", topk_length)
    arguments.check_sink(c, "attn_sink", attn_sink)
    fmt = formats.get_format(c, "extra_kv_format", extra_kv_format, *arguments.PAGED_FORMATS)
    table = {"extra_block_table": extra_block_table, "extra_length": extra_length}
    picked = {"extra_indices": extra_indices, "extra_topk_length": extra_topk_length}
    if extra_k_cache is None:
        arguments.check_absent(c, "without extra_k_cache", **picked, **table)
    else:
        arguments.check_cache(c, "extra_k_cache", extra_k_cache, fmt)
        if extra_indices is not None:
            arguments.check_absent(c, "with extra_indices", **table)
            c.tensor("extra_indices", extra_indices, torch.int32, ("b", "s_q", None))
            arguments.check_lengths(c, "extra_topk_length", extra_topk_length)
        else:
            arguments.check_absent(c, "without extra_indices", **picked)
            c.require(extra_block_table is not None, "extra_indices", "indices, or extra_block_table", "neither")
            c.tensor("extra_block_table", extra_block_table, torch.int32, ("b", None))
            c.tensor("extra_length", extra_length, torch.int32, ("b", "s_q"))
    _check_splits(c, num_splits, split_tokens)
    c.tensor("out", out, (torch.bfloat16, torch.float32), ("b", "s_q", "h", formats.HEAD_DIM))
    arguments.check_partial(c, out, attn_sink)
    c.tensor("lse", lse, torch.float32, ("b", "h", "s_q"), contiguous=True)


def _check_splits(c: Checker, num_splits: int, split_tokens: int) -> None:
    c.require(num_splits >= 0, "num_splits", "a number >= 0", num_splits)
    tile = arguments.SPLIT_TILE
    c.require(
        split_tokens >= 0 and split_tokens % tile == 0, "split_tokens", f"0 or a multiple of {tile}", split_tokens
    )
    c.require(num_splits == 0 or split_tokens == 0, "split_tokens", f"0 with num_splits = {num_splits}", split_tokens)


def _cost(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None,
    attn_sink: torch.Tensor | None,
    softmax_scale: float,
    kv_format: str,
    *rest: Any,
) -> Cost:
    *extra, _num_splits, _split_tokens, out, _lse = rest
    return arguments.attention_cost(q, out, decode_selections(q, k_cache, indices, topk_length, kv_format, *extra))


_decode = define_op(
    "sparse_mla_decode(Tensor q, Tensor k_cache, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "float softmax_scale, str kv_format, Tensor? extra_k_cache, Tensor? extra_indices, Tensor? extra_topk_length, "
    "Tensor? extra_block_table, Tensor? extra_length, str extra_kv_format, SymInt num_splits, SymInt split_tokens, "
    "Tensor(a!) out, Tensor(b!) lse) -> ()",
    check=_check,
    reference=reference.sparse_mla_decode,
    cost=_cost,
)


def sparse_mla_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    indices: torch.Tensor,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    kv_format: str = formats.FP8_DS_MLA.id,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    extra_block_table: torch.Tensor | None = None,
    extra_length: torch.Tensor | None = None,
    extra_kv_format: str = formats.FP8_DS_MLA.id,
    num_splits: int = 0,
    split_tokens: int = 0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row to rows of one or two paged caches that it names by slot (or, densely, by page).

    With s_n = softmax_scale * (q . k_n) over the rows n attended to and lse = ln sum_n exp(s_n):
    out = sum_n exp(s_n - lse) k_n / (1 + exp(attn_sink - lse)). K and V are the same 512 values.

    q                  bf16 [b, s_q, h, 512], any strides with a dense last dimension, 1 <= h <= 128
    k_cache            [num_blocks, rows per page, row elements] of kv_format; uint8 with 584 elements for fp8_ds_mla,
                       whose page stride must be a multiple of 576 bytes; bf16 with 512 for plain_bf16, multiple of 16
    indices            int32 [b, s_q, topk], topk >= 0: slots of k_cache. A value that is not a row of the cache is
                       skipped, a value that appears twice counts twice
    topk_length        int32 [b] or [b, s_q]: only columns below it count; None: all
    attn_sink          fp32 [h]: a logit without a value; -inf or None has no effect, +inf gives out = 0
    softmax_scale      default 512^-0.5
    kv_format          record format id of k_cache: fp8_ds_mla/1 or plain_bf16/1
    extra_k_cache      a second cache of extra_kv_format, attended to in the same softmax; its rows are named either by
      extra_indices      int32 [b, s_q, extra_topk], with
      extra_topk_length  int32 [b] or [b, s_q] or None, as above; or by
      extra_block_table  int32 [b, pages] and
      extra_length       int32 [b, s_q]: entries 0 .. extra_length - 1, entry e in row e % (rows per page) of page
                         extra_block_table[b, e // (rows per page)]; pages outside the cache are skipped
    num_splits         how many parts a kernel cuts a row's columns into; 0: chosen from the shapes of the call
    split_tokens       columns in a part, a multiple of 64, instead of num_splits: then a row's bits do not depend on
                       the batch around it. 0: not fixed. Neither can change the result by more than rounding
    out                [b, s_q, h, 512], any strides with a dense last dimension; bf16, or fp32 for partial results to
                       be merged (then attn_sink must be None); mutated
    lse                fp32 [b, h, s_q], contiguous; mutated

    Returns (out, lse); lse is the natural logarithm, sink not included. A row that attends to nothing has out = 0 and
    lse = +inf. Rows not attended to are not read into the result, whatever they hold. Raises ValueError or TypeError on
    arguments that do not fit.
    """
    arguments.check_query(Checker("sparse_mla_decode"), "q", q, (torch.bfloat16,), ("b", "s_q"))
    if softmax_scale is None:
        softmax_scale = formats.HEAD_DIM**-0.5
    if out is None:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[0], q.shape[-2], q.shape[1], dtype=torch.float32, device=q.device)
    _decode(
        q,
        k_cache,
        indices,
        topk_length,
        attn_sink,
        softmax_scale,
        kv_format,
        extra_k_cache,
        extra_indices,
        extra_topk_length,
        extra_block_table,
        extra_length,
        extra_kv_format,
        num_splits,
        split_tokens,
        out,
        lse,
    )
    return out, lse
