"""Sparse attention over two plain caches, named by one table of window and compressed slots."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op
from cute_kernels.sparse_mla import arguments, reference
from cute_kernels.sparse_mla.selection import mixed_selections

__all__ = ["sparse_mla_mixed"]


def _check(
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
    c = Checker("sparse_mla_mixed")
    fmt = formats.get_format(c, "kv_format", kv_format, formats.PLAIN_BF16, formats.PLAIN_FP8)
    arguments.check_query(c, "query", query, (fmt.dtype,), ("sum_q",))
    arguments.check_cache(c, "swa_kv_cache", swa_kv_cache, fmt)
    c.require(window_size >= 1, "window_size", "a positive number", window_size)
    c.tensor("sparse_indices", sparse_indices, torch.int32, ("sum_q", None))
    width = sparse_indices.shape[1]
    if compressed_kv_cache is None:
        expected = f"{window_size} columns (window_size) without compressed_kv_cache"
        c.require(width == window_size, "sparse_indices", expected, list(sparse_indices.shape))
    else:
        expected = f"at least {window_size} columns (window_size)"
        c.require(width >= window_size, "sparse_indices", expected, list(sparse_indices.shape))
        arguments.check_cache(c, "compressed_kv_cache", compressed_kv_cache, fmt)
    c.tensor("sparse_topk_lens", sparse_topk_lens, torch.int32, ("sum_q",))
    arguments.check_batch(c, "cum_seq_lens_q", cum_seq_lens_q, seq_lens)
    arguments.check_sink(c, "sinks", sinks)
    c.tensor("out", out, torch.bfloat16, ("sum_q", "h", formats.HEAD_DIM))
    arguments.check_logs(c, "lse", lse, ("sum_q", "h"))


def _cost(
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
    *_: Any,
) -> Cost:
    selections = mixed_selections(
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
    return arguments.attention_cost(query, out, selections)


def _validate(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    sparse_indices: torch.Tensor,
    compressed_kv_cache: torch.Tensor | None,
    sparse_topk_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    cum_seq_lens_q: torch.Tensor,
    *_: Any,
) -> None:
    validate.ascending("sparse_mla_mixed", "cum_seq_lens_q", cum_seq_lens_q)


_mixed = define_op(
    "sparse_mla_mixed(Tensor query, Tensor swa_kv_cache, Tensor sparse_indices, Tensor? compressed_kv_cache, "
    "Tensor sparse_topk_lens, Tensor seq_lens, Tensor cum_seq_lens_q, float bmm1_scale, float bmm2_scale, "
    "Tensor? sinks, SymInt window_size, str kv_format, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    check=_check,
    reference=reference.sparse_mla_mixed,
    cost=_cost,
    kernel="cute_kernels.sparse_mla.mixed",
    validate=_validate,
)


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
    sinks: torch.Tensor | None = None,
    *,
    window_size: int = 128,
    kv_format: str | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, Any]:
    """Attention of each query row to slots of a window cache and of a compressed cache, both plain.

    Request i owns the rows cum_seq_lens_q[i] .. cum_seq_lens_q[i + 1] - 1, counted from cum_seq_lens_q[0]; the last of
    them is at position seq_lens[i] - 1. A row at position p attends to the first min(window_size, p + 1) columns of its
    table row as slots of swa_kv_cache and to columns window_size .. sparse_topk_lens - 1 as slots of
    compressed_kv_cache. With s_n = bmm1_scale * (q . k_n) over these rows and lse = ln sum_n exp(s_n):
    out = bmm2_scale * sum_n exp(s_n - lse) k_n / (1 + exp(sinks - lse)). K and V are the same 512 values.

    query                 bf16 or e4m3 [sum_q, H, 512], any strides with a dense last dimension, 1 <= H <= 128
    swa_kv_cache          [num_blocks, rows per page, 512] of the query's dtype, any page stride that holds a page;
                          kernels need multiples of 16 bytes
    sparse_indices        int32 [sum_q, window_size + K], row-strided. A value that is not a row of its cache is
                          skipped, a value that appears twice counts twice
    compressed_kv_cache   likewise, with its own page size; None if sparse_indices has no more than window_size columns
    sparse_topk_lens      int32 [sum_q]: window_size + number of compressed columns
    seq_lens              int32 [B]: context of each request, its query rows included
    cum_seq_lens_q        int32 [B + 1]. Rows that no request covers, or whose position is negative, attend to nothing
    bmm1_scale            scale of the scores; for e4m3 the scales of query and cache included
    bmm2_scale            scale of the output; for e4m3 the scale of the cache
    sinks                 fp32 [H]: a logit without a value; -inf or None has no effect, +inf gives out = 0
    window_size           columns that belong to swa_kv_cache
    kv_format             record format id of both caches: plain_bf16/1 or plain_fp8/1; None: by the query's dtype
    out                   bf16 [sum_q, H, 512], any strides with a dense last dimension; mutated
    lse                   fp32 [sum_q, H], any strides; mutated
    return_lse            False: lse is written only if it is given

    Returns (out, lse), or (out, None) if nobody asks for lse, the natural logarithm, sink not included. A row that
    attends to nothing has out = 0 and lse = +inf. Raises ValueError or TypeError on arguments that do not fit.
    """
    dtypes = (formats.PLAIN_BF16.dtype, formats.PLAIN_FP8.dtype)
    arguments.check_query(Checker("sparse_mla_mixed"), "query", query, dtypes, ("sum_q",))
    if kv_format is None:
        kv_format = (formats.PLAIN_FP8 if query.dtype == formats.PLAIN_FP8.dtype else formats.PLAIN_BF16).id
    if out is None:
        out = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
    if lse is None and return_lse:
        lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    _mixed(
        query,
        swa_kv_cache,
        sparse_indices,
        compressed_kv_cache,
        sparse_topk_lens,
        seq_lens,
        cum_seq_lens_q,
        bmm1_scale,
        bmm2_scale,
        sinks,
        window_size,
        kv_format,
        out,
        lse,
    )
    return out, lse
