# SPDX-License-Identifier: Apache-2.0
"""Arguments that ops of the indexer share: how public functions take them, and their checks."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.indexer.call import (
    CandidatesDecodeCall,
    CandidatesPrefillCall,
    LogitsCall,
    PagedLogitsCall,
    ScoreTopKDecodeCall,
    ScoreTopKPrefillCall,
)
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


def check_contiguous(c: Checker, call: LogitsCall | ScoreTopKPrefillCall | CandidatesPrefillCall) -> int:
    """Check what is scored against contiguous keys; columns of the scores."""
    if call.q_scale is None:
        c.tensor("q", call.q, torch.float8_e4m3fn, ("M", "HI", DIM))
        c.tensor("kv[0]", call.k, torch.float8_e4m3fn, ("N", DIM))
        c.tensor("kv[1]", call.k_scale, torch.float32, ("N",))
    else:
        c.tensor("q[0]", call.q, BYTES, ("M", "HI", DIM // 2))
        c.tensor("q[1]", call.q_scale, torch.int32, ("M", "HI"))
        c.tensor("kv[0]", call.k, BYTES, ("N", DIM // 2))
        c.tensor("kv[1]", call.k_scale, torch.int32, ("N",))
    c.tensor("weights", call.weights, torch.float32, ("M", "HI"))
    c.tensor("cu_seq_len_k_start", call.cu_seq_len_k_start, torch.int32, ("M",))
    c.tensor("cu_seq_len_k_end", call.cu_seq_len_k_end, torch.int32, ("M",))
    c.require(call.max_seqlen_k >= 0, "max_seqlen_k", "a number >= 0", call.max_seqlen_k)
    return call.max_seqlen_k if call.max_seqlen_k > 0 else call.k.shape[0]


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


def check_paged(c: Checker, call: PagedLogitsCall | ScoreTopKDecodeCall | CandidatesDecodeCall) -> int:
    """Check what is scored against keys in pages; number of rows."""
    if check_cache(c, call.kv_cache, call.kv_format):
        c.tensor("q[0]", call.q, BYTES, ("B", "next_n", "HI", DIM // 2))
        c.tensor("q[1]", call.q_scale, torch.int32, ("B", "next_n", "HI"))
    else:
        c.require(call.q_scale is None, "q", f"one tensor for {call.kv_format}", "a pair")
        c.tensor("q", call.q, torch.float8_e4m3fn, ("B", "next_n", "HI", DIM))
    c.require(call.q.shape[1] > 0, "q", "next_n >= 1", f"shape {list(call.q.shape)}")
    rows = call.q.shape[0] * call.q.shape[1]
    c.tensor("weights", call.weights, torch.float32, (None, "HI"))
    c.require(
        call.weights.shape[0] == rows, "weights", f"B * next_n = {rows} rows", f"shape {list(call.weights.shape)}"
    )
    c.tensor("context_lens", call.context_lens, torch.int32, ("B", "next_n"))
    c.tensor("block_tables", call.block_tables, torch.int32, ("B", None))
    c.require(call.max_model_len >= 0, "max_model_len", "a number >= 0", call.max_model_len)
    return rows
