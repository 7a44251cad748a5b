"""Checks that ops of the indexer share: keys, contiguous or in pages, and the queries that are scored against them."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.checks import Checker

DIM = formats.INDEX_DIM
FORMATS = (formats.INDEXER_FP8, formats.INDEXER_MXFP4, formats.INDEXER_MXFP4_WIDE)
BYTES = (torch.uint8, torch.int8)
MOST_PAGE_ROWS = 2**30


def flat_pages(op: str, kv_cache: Any) -> Any:
    """[num_blocks, block_size, 1, row] -> [num_blocks, block_size, row]; any other shape passes through."""
    if isinstance(kv_cache, torch.Tensor) and kv_cache.dim() == 4:
        Checker(op).require(kv_cache.shape[2] == 1, "kv_cache", "one head", f"shape {list(kv_cache.shape)}")
        return kv_cache.squeeze(2)
    return kv_cache


def check_cache(c: Checker, kv_cache: torch.Tensor, kv_format: str) -> bool:
    """Check a paged cache of keys; whether it is MXFP4."""
    fmt = formats.get_format(c, "kv_format", kv_format, *FORMATS)
    fmt.check(c, "kv_cache", kv_cache)
    c.require(kv_cache.shape[1] > 0, "kv_cache", "at least one row per page", f"shape {list(kv_cache.shape)}")
    return kv_format != formats.INDEXER_FP8.id


def check_slots(c: Checker, requests: int, slot_block_table: torch.Tensor | None, slot_rows_per_page: int) -> None:
    """Check what turns entries into slots: a table with a row for every request, and rows of a page."""
    if slot_block_table is None:
        return
    c.tensor("slot_block_table", slot_block_table, torch.int32, (requests, None))
    limits = f"1 to {MOST_PAGE_ROWS} with slot_block_table"
    c.require(0 < slot_rows_per_page <= MOST_PAGE_ROWS, "slot_rows_per_page", limits, slot_rows_per_page)


def split_contiguous(op: str, q: Any, kv: Any) -> tuple[Any, Any, Any, Any]:
    """Codes and scales, or None, of queries, and codes and scales of keys, as the public functions take them."""
    c = Checker(op)
    q_scale = None
    if isinstance(q, (tuple, list)):
        q, q_scale = c.pair("q", q, "codes, scales")
    k, k_scale = c.pair("kv", kv, "codes, scales")
    c.tensor("q", q, (torch.float8_e4m3fn, *BYTES), (None, None, None))
    c.tensor("kv[0]", k, (torch.float8_e4m3fn, *BYTES), (None, None))
    return q, q_scale, k, k_scale


def check_contiguous(
    c: Checker,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    max_seqlen_k: int,
) -> int:
    """Check what is scored against contiguous keys; columns of the scores."""
    if q_scale is None:
        c.tensor("q", q, torch.float8_e4m3fn, ("M", "HI", DIM))
        c.tensor("kv[0]", k, torch.float8_e4m3fn, ("N", DIM))
        c.tensor("kv[1]", k_scale, torch.float32, ("N",))
    else:
        c.tensor("q[0]", q, BYTES, ("M", "HI", DIM // 2))
        c.tensor("q[1]", q_scale, torch.int32, ("M", "HI"))
        c.tensor("kv[0]", k, BYTES, ("N", DIM // 2))
        c.tensor("kv[1]", k_scale, torch.int32, ("N",))
    c.tensor("weights", weights, torch.float32, ("M", "HI"))
    c.tensor("cu_seq_len_k_start", cu_seq_len_k_start, torch.int32, ("M",))
    c.tensor("cu_seq_len_k_end", cu_seq_len_k_end, torch.int32, ("M",))
    c.require(max_seqlen_k >= 0, "max_seqlen_k", "a number >= 0", max_seqlen_k)
    return max_seqlen_k if max_seqlen_k > 0 else k.shape[0]


def split_paged(op: str, q: Any, kv_cache: Any, context_lens: Any) -> tuple[Any, Any, Any, Any]:
    """Codes and scales, or None, of queries, pages without heads, and one length per row, as the public functions take
    them."""
    c = Checker(op)
    q_scale = None
    if isinstance(q, (tuple, list)):
        q, q_scale = c.pair("q", q, "codes, scales")
    c.tensor("q", q, (torch.float8_e4m3fn, *BYTES), (None, None, None, None))
    c.tensor("context_lens", context_lens, torch.int32)
    if context_lens.dim() == 1:
        c.require(
            q.shape[1] == 1,
            "context_lens",
            f"one length per row, shape [B, next_n = {q.shape[1]}]",
            f"shape {list(context_lens.shape)}",
        )
        context_lens = context_lens[:, None]
    return q, q_scale, flat_pages(op, kv_cache), context_lens


def check_paged(
    c: Checker,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    kv_format: str,
) -> int:
    """Check what is scored against keys in pages; number of rows."""
    if check_cache(c, kv_cache, kv_format):
        c.tensor("q[0]", q, BYTES, ("B", "next_n", "HI", DIM // 2))
        c.tensor("q[1]", q_scale, torch.int32, ("B", "next_n", "HI"))
    else:
        c.require(q_scale is None, "q", f"one tensor for {kv_format}", "a pair")
        c.tensor("q", q, torch.float8_e4m3fn, ("B", "next_n", "HI", DIM))
    c.require(q.shape[1] > 0, "q", "next_n >= 1", f"shape {list(q.shape)}")
    rows = q.shape[0] * q.shape[1]
    c.tensor("weights", weights, torch.float32, (None, "HI"))
    c.require(weights.shape[0] == rows, "weights", f"B * next_n = {rows} rows", f"shape {list(weights.shape)}")
    c.tensor("context_lens", context_lens, torch.int32, ("B", "next_n"))
    c.tensor("block_tables", block_tables, torch.int32, ("B", None))
    c.require(max_model_len >= 0, "max_model_len", "a number >= 0", max_model_len)
    return rows
