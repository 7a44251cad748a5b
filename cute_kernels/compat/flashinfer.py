# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention call for DeepSeek-V4, over this package's kernels.

    from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4
    from cute_kernels.compat.flashinfer import trtllm_batch_decode_sparse_mla_dsv4

The signature is that of FlashInfer 0.7.2; 0.6's is the same without its last arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.compat.arguments import accept_only, as_int32, required
from cute_kernels.runtime.checks import Checker
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_mixed

__all__ = ["trtllm_batch_decode_sparse_mla_dsv4"]

_OP = "trtllm_batch_decode_sparse_mla_dsv4"
_WINDOW = 128


def trtllm_batch_decode_sparse_mla_dsv4(
    query: torch.Tensor,
    swa_kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    sparse_indices: torch.Tensor | None = None,
    compressed_kv_cache: torch.Tensor | None = None,
    sparse_topk_lens: torch.Tensor | None = None,
    seq_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    cum_seq_lens_q: torch.Tensor | None = None,
    max_q_len: int | None = None,
    enable_pdl: bool | None = None,
    swa_topk_lens: torch.Tensor | None = None,
    extra_sparse_indices: torch.Tensor | None = None,
    extra_sparse_topk_lens: torch.Tensor | None = None,
    backend: str = "auto",
    hca_swa_indices: torch.Tensor | None = None,
    hca_compressed_block_tables: torch.Tensor | None = None,
    hca_seq_lens: torch.Tensor | None = None,
    hca_is_causal: bool = True,
    hca_use_persistent: bool = False,
    hca_sparse_indices_format: str | None = None,
    remapped_sparse_indices_buffer: torch.Tensor | None = None,
    sparse_indices_are_storage_offsets: bool | None = None,
    dsv4_inv_rope_cos_sin_cache: torch.Tensor | None = None,
    dsv4_output_scale: torch.Tensor | None = None,
    sparse_topk_lens_offset: int = 0,
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None,
    *,
    kv_cache_format: str = "fp8",
) -> torch.Tensor:
    """Attention of decode or prefill rows to a window cache and a compressed cache.

    There are two forms, on every architecture. Without swa_topk_lens (FlashInfer's "trtllm-gen"): plain caches and one
    table for both, `sparse_mla_mixed`. With swa_topk_lens (FlashInfer's "sparse"): packed 584-byte caches of
    fp8_ds_mla or plain bf16 ones, and a table for each, `sparse_mla_decode`.

    query                bf16 or, with one table, e4m3: [sum_q, H, 512] or [B, q_len, H, 512]. Any H from 1 to 128,
                         without padding
    swa_kv_cache, compressed_kv_cache
                         "HND": [num_pages, 1, rows, width] or [num_pages, rows, width]; "NHD": [num_pages, rows, 1,
                         width]. Both layouts are the same memory and both work. One table: width 512 in the query's
                         dtype; two tables: uint8 of width 584, or bf16 of width
                         512. With one table and 128 columns compressed_kv_cache may be None; any value of it is ignored
                         with two tables if extra_sparse_indices is None
    workspace_buffer, remapped_sparse_indices_buffer, multi_ctas_kv_counter_buffer
                         ignored, may be None: nothing needs scratch memory of the caller. Calls of many e4m3 rows
                         allocate up to 128 MiB by themselves
    sparse_indices       one table: int32 [sum_q, 128 + K], any K, one row for every query row; two tables: int32
                         [sum_q, K] or [sum_q, 1, K]. Values outside the cache are skipped
    sparse_topk_lens     one table: int32 [sum_q], the 128 window columns included
    seq_lens             one table: int32 [B]
    out                  bf16 like query, any strides whose leading dimensions can be merged; else allocated
    bmm1_scale, bmm2_scale
                         Python numbers, no tensors; two tables: bmm2_scale is 1
    sinks                fp32 [H] or None
    cum_seq_lens_q       one table: int32 [B + 1] for query rows [sum_q, H, 512]. For [B, q_len, H, 512] it is None, and
                         is built in each call
    max_q_len, enable_pdl
                         ignored
    swa_topk_lens, extra_sparse_indices, extra_sparse_topk_lens
                         two tables: int32 [sum_q], int32 like sparse_indices, int32 [sum_q]
    backend              "auto" (by the presence of swa_topk_lens), "trtllm-gen" or "sparse"
    sparse_indices_are_storage_offsets
                         one table: True if an index counts rows of memory, padding of pages included; False or None if
                         it counts rows of the cache. It must be given when the pages of a cache are padded
    hca_*, dsv4_*, sparse_topk_lens_offset, kv_cache_format
                         their defaults: neither page tables for the compressed cache, nor a fused output
                         quantization, nor other record formats are supported

    Indices and lengths may be int64 as well.

    Returns out; the log-sum-exp is computed and dropped. A row that attends to nothing is 0. Raises NotImplementedError
    on what is not supported, ValueError or TypeError on arguments that do not fit.
    """
    accept_only(
        _OP,
        None,
        hca_swa_indices=hca_swa_indices,
        hca_compressed_block_tables=hca_compressed_block_tables,
        hca_seq_lens=hca_seq_lens,
        hca_sparse_indices_format=hca_sparse_indices_format,
        dsv4_inv_rope_cos_sin_cache=dsv4_inv_rope_cos_sin_cache,
        dsv4_output_scale=dsv4_output_scale,
    )
    accept_only(_OP, True, hca_is_causal=hca_is_causal)
    accept_only(_OP, False, hca_use_persistent=hca_use_persistent)
    accept_only(_OP, 0, sparse_topk_lens_offset=sparse_topk_lens_offset)
    accept_only(_OP, "fp8", kv_cache_format=kv_cache_format)
    c = Checker(_OP)
    if backend not in ("auto", "trtllm-gen", "sparse"):
        c.fail("backend", "'auto', 'trtllm-gen' or 'sparse'", repr(backend), NotImplementedError)
    scale, out_scale = _number(c, "bmm1_scale", bmm1_scale), _number(c, "bmm2_scale", bmm2_scale)
    indices = required(_OP, "sparse_indices", sparse_indices)
    c.tensor("query", query, (torch.bfloat16, torch.float8_e4m3fn))
    if query.dim() not in (3, 4):
        c.fail("query", "3 or 4 dimensions", f"shape {list(query.shape)}")
    rows = query.flatten(0, 1) if query.dim() == 4 else query
    row_out = None if out is None else _merged(c, out, query)
    pool = _pool(c, "swa_kv_cache", swa_kv_cache, kv_layout)
    if backend == "sparse" or (backend == "auto" and swa_topk_lens is not None):
        accept_only(_OP, None, sparse_indices_are_storage_offsets=sparse_indices_are_storage_offsets)
        accept_only(_OP, 1.0, bmm2_scale=out_scale)
        extra = None
        if extra_sparse_indices is not None:
            extra = _pool(c, "compressed_kv_cache", compressed_kv_cache, kv_layout)
        result, _ = sparse_mla_decode(
            rows[:, None],
            pool,
            _by_row(indices),
            topk_length=required(_OP, "swa_topk_lens", swa_topk_lens),
            attn_sink=sinks,
            softmax_scale=scale,
            kv_format=_packed_or_bf16(pool),
            extra_k_cache=extra,
            extra_indices=None if extra_sparse_indices is None else _by_row(extra_sparse_indices),
            extra_topk_length=as_int32(extra_sparse_topk_lens),
            extra_kv_format=_packed_or_bf16(pool if extra is None else extra),
            out=None if row_out is None else row_out[:, None],
        )
        return result.view(query.shape) if out is None else out
    accept_only(
        _OP,
        None,
        swa_topk_lens=swa_topk_lens,
        extra_sparse_indices=extra_sparse_indices,
        extra_sparse_topk_lens=extra_sparse_topk_lens,
    )
    if query.dim() == 4:
        accept_only(_OP, None, cum_seq_lens_q=cum_seq_lens_q)
        cum_seq_lens_q = torch.arange(query.shape[0] + 1, dtype=torch.int32, device=query.device) * query.shape[1]
    extra = None
    if compressed_kv_cache is not None:
        extra = _pool(c, "compressed_kv_cache", compressed_kv_cache, kv_layout)
        extra = _indexed(c, "compressed_kv_cache", extra, sparse_indices_are_storage_offsets)
    result, _ = sparse_mla_mixed(
        rows,
        _indexed(c, "swa_kv_cache", pool, sparse_indices_are_storage_offsets),
        indices,
        extra,
        required(_OP, "sparse_topk_lens", sparse_topk_lens),
        required(_OP, "seq_lens", seq_lens),
        required(_OP, "cum_seq_lens_q", cum_seq_lens_q),
        scale,
        out_scale,
        sinks,
        window_size=_WINDOW,
        out=row_out,
    )
    return result.view(query.shape) if out is None else out


def _number(c: Checker, argument: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor):
        expected = "a Python number: reading a tensor would wait for the device"
        c.fail(argument, expected, "a tensor", NotImplementedError)
    return value


def _merged(c: Checker, out: Any, query: torch.Tensor) -> torch.Tensor:
    """`out` of the query's shape as [sum_q, H, 512], over the same memory."""
    c.tensor("out", out, torch.bfloat16, tuple(query.shape))
    if out.dim() == 3:
        return out
    try:
        return out.view(out.shape[0] * out.shape[1], *out.shape[2:])
    except RuntimeError:
        c.fail("out", "leading dimensions that can be merged", f"strides {tuple(out.stride())}")


def _pool(c: Checker, argument: str, cache: Any, kv_layout: str) -> torch.Tensor:
    """A cache in either layout as [num_pages, rows, width]."""
    c.one_of("kv_layout", kv_layout, ("HND", "NHD"))
    c.tensor(argument, cache, (torch.bfloat16, torch.float8_e4m3fn, torch.uint8))
    if cache.dim() == 3:
        return cache
    head = 1 if kv_layout == "HND" else 2
    if cache.dim() != 4 or cache.shape[head] != 1:
        c.fail(argument, f"3 dimensions, or 4 with one head in dimension {head} ({kv_layout})", list(cache.shape))
    return cache.squeeze(head)


def _indexed(c: Checker, argument: str, pool: torch.Tensor, storage_offsets: bool | None) -> torch.Tensor:
    """`pool` such that its slots are the caller's indices; for offsets into the storage, as pages of one row."""
    (formats.PLAIN_FP8 if pool.dtype == formats.PLAIN_FP8.dtype else formats.PLAIN_BF16).check(c, argument, pool)
    pages, rows, width = pool.shape
    if pages <= 1 or pool.stride(0) == rows * width:
        return pool
    if storage_offsets is None:
        c.fail("sparse_indices_are_storage_offsets", f"True or False: the pages of {argument} are padded", "None")
    if not storage_offsets:
        return pool
    if pool.stride(0) % width:
        c.fail(argument, f"a page stride that is a multiple of {width} elements", f"strides {tuple(pool.stride())}")
    return pool.as_strided(((pages - 1) * (pool.stride(0) // width) + rows, 1, width), (width, width, 1))


def _by_row(indices: torch.Tensor) -> torch.Tensor:
    """Indices [sum_q, K], or with more leading dimensions, as [sum_q, 1, K]: every row is a request of one token."""
    return as_int32(indices).flatten(0, -2)[:, None]


def _packed_or_bf16(pool: torch.Tensor) -> str:
    return (formats.FP8_DS_MLA if pool.dtype == torch.uint8 else formats.PLAIN_BF16).id
