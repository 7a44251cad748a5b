"""Score and pick in one op: the best keys of each row, with scores in memory for a few rows at a time only."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.indexer import arguments, chunks, reference
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import OPS, Cost, define_op, nbytes

__all__ = ["score_top_k_decode", "score_top_k_prefill", "score_top_k_workspace_size"]


def score_top_k_workspace_size(
    requests: int, columns: int, k: int, *, next_n: int = 1, most: int = chunks.WORKSPACE_BYTES
) -> int:
    """Bytes of workspace for `score_top_k_prefill` or `score_top_k_decode`: enough for every call with at most so many
    requests, columns and rows of a request.

    requests   B of a decode call, rows M of a prefill
    columns    N or max_seqlen_k of a prefill, max_model_len of a decode call
    k          picks per row, as in the call: no workspace is needed where columns <= k
    next_n     rows of a request, which are scored together; 1 for a prefill
    most       bytes not to exceed, unless a single request needs more: each of its rows takes 4 bytes a column, up to a
               multiple of 256 columns. Where this is less than all scores, they are made in chunks, one after the other

    Picks do not depend on the size.
    """
    return chunks.workspace_bytes(requests, columns, next_n, k, most)


def _check_results(
    c: Checker, rows: int, requests: int, columns: int, next_n: int, out: torch.Tensor, workspace: torch.Tensor | None
) -> None:
    c.tensor("out", out, torch.int32, (None, None))
    c.require(out.shape[0] == rows, "out", f"{rows} rows", f"shape {list(out.shape)}")
    c.require(out.shape[1] > 0, "out", "at least one column", f"shape {list(out.shape)}")
    c.tensor("workspace", workspace, (torch.uint8, torch.float32), (None,), optional=True, contiguous=True)
    have, needed = nbytes(workspace), chunks.least_bytes(requests, columns, next_n, out.shape[1])
    c.require(have >= needed, "workspace", f"at least {needed} bytes (score_top_k_workspace_size)", f"{have} bytes")
    c.require(have % 4 == 0, "workspace", "a multiple of 4 bytes", f"{have} bytes")
    if workspace is not None:
        offset = workspace.storage_offset() * workspace.element_size()
        c.require(offset % 16 == 0, "workspace", "a multiple of 16 as its place in memory", f"{offset}")


def _picked_cost(scored: Cost, heads: int, out: torch.Tensor) -> Cost:
    """Of scores that are written nowhere, and picks that are."""
    scores = scored.flops // (2 * arguments.DIM * heads) if heads else 0
    return Cost(bytes=scored.bytes - 4 * scores + nbytes(out), flops=scored.flops)


def _check_prefill(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    max_seqlen_k: int,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    c = Checker("score_top_k_prefill")
    columns = arguments.check_contiguous(
        c, q, q_scale, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k
    )
    _check_results(c, q.shape[0], q.shape[0], columns, 1, out, workspace)


def _cost_prefill(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    max_seqlen_k: int,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
) -> Cost:
    """Rows of at most k columns need no scores."""
    last = end.long().clamp(max=k.shape[0])
    if max_seqlen_k > 0:
        last = torch.minimum(last, start.long() + max_seqlen_k)
    is_scored = last - start.long().clamp(min=0) > out.shape[1]
    cost = OPS["mqa_logits"].cost
    assert cost is not None
    scored = cost(q, q_scale, k, k_scale, weights, start, end.where(is_scored, start), False, max_seqlen_k, out)
    return _picked_cost(scored, q.shape[1], out)


_prefill = define_op(
    "score_top_k_prefill(Tensor q, Tensor? q_scale, Tensor k, Tensor k_scale, Tensor weights, "
    "Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, SymInt max_seqlen_k, Tensor(a!) out, Tensor(b!)? workspace) "
    "-> ()",
    check=_check_prefill,
    reference=reference.score_top_k_prefill,
    kernel="cute_kernels.indexer.call:SCORE_TOP_K_PREFILL",
    cost=_cost_prefill,
)


def score_top_k_prefill(
    q: Any,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    k: int,
    *,
    max_seqlen_k: int = 0,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The k best keys of each query row: `mqa_logits` and then `top_k_per_row_prefill`, bit for bit, without scores of
    all rows in memory.

    q, kv, weights       as of `mqa_logits`
    cu_seq_len_k_start   int32 [M], first key of each row; a start below 0 leaves out the keys that do not exist
    cu_seq_len_k_end     int32 [M], one past the last key; an end beyond N counts as N, end <= start is an empty row
    k                    picks per row
    max_seqlen_k         > 0: no row sees more keys than this, counted from its start, and a key beyond is not seen; the
                         workspace holds so many more rows of several requests. 0: rows may see all N keys
    out                  int32 [M, k], row-strided; mutated
    workspace            uint8 or fp32, one dimension, contiguous, 16-byte aligned: memory for the scores of as many
                         rows as it has room for, at least one (`score_top_k_workspace_size`); mutated. None: allocated

    Returns int32 [M, k]: keys counted from the row's start, which a row of at most k keys has all, then -1, without any
    scores. Of equal scores the lower key wins, NaN comes after all numbers. Raises ValueError or TypeError on arguments
    that do not fit.
    """
    q, q_scale, keys, k_scale = arguments.split_contiguous("score_top_k_prefill", q, kv)
    rows = q.shape[0]
    if out is None:
        out = _empty_picks("score_top_k_prefill", q, rows, k)
    else:
        _check_width("score_top_k_prefill", out, k)
    if workspace is None:
        Checker("score_top_k_prefill").ints(max_seqlen_k=max_seqlen_k)
        size = chunks.workspace_bytes(
            rows, max_seqlen_k if max_seqlen_k > 0 else keys.shape[0], 1, k, chunks.WORKSPACE_BYTES
        )
        workspace = _empty_workspace(q, size)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    _prefill(q, q_scale, keys, k_scale, weights, *bounds, max_seqlen_k, out, workspace)
    return out


def _check_decode(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    kv_format: str,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    slot_block_table: torch.Tensor | None,
    slot_rows_per_page: int,
) -> None:
    c = Checker("score_top_k_decode")
    rows = arguments.check_paged(c, q, q_scale, kv_cache, weights, context_lens, block_tables, max_model_len, kv_format)
    _check_results(c, rows, q.shape[0], max_model_len, q.shape[1], out, workspace)
    arguments.check_slots(c, q.shape[0], slot_block_table, slot_rows_per_page)


def _cost_decode(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    kv_format: str,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    slot_block_table: torch.Tensor | None,
    slot_rows_per_page: int,
) -> Cost:
    """Rows of at most k columns need no scores."""
    lengths = context_lens.clamp(max=max_model_len)
    scored_lengths = lengths.where(lengths > out.shape[1], torch.zeros_like(lengths))
    cost = OPS["paged_mqa_logits"].cost
    assert cost is not None
    scored = cost(q, q_scale, kv_cache, weights, scored_lengths, block_tables, max_model_len, False, kv_format, out)
    whole = _picked_cost(scored, q.shape[2], out)
    picks = int(lengths.clamp(0, out.shape[1]).sum())
    return Cost(bytes=whole.bytes + min(nbytes(slot_block_table), 4 * picks), flops=whole.flops)


_decode = define_op(
    "score_top_k_decode(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_tables, SymInt max_model_len, str kv_format, Tensor(a!) out, Tensor(b!)? workspace, "
    "Tensor? slot_block_table, SymInt slot_rows_per_page) -> ()",
    check=_check_decode,
    reference=reference.score_top_k_decode,
    kernel="cute_kernels.indexer.call:SCORE_TOP_K_DECODE",
    cost=_cost_decode,
)


def score_top_k_decode(
    q: Any,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    k: int,
    *,
    kv_format: str = formats.INDEXER_FP8.id,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    slot_block_table: torch.Tensor | None = None,
    slot_rows_per_page: int = 0,
) -> torch.Tensor:
    """The k best keys of each decode row, read from pages: `paged_mqa_logits` and then `top_k_per_row_decode`, bit for
    bit.

    q, kv_cache, weights, context_lens, block_tables, kv_format
                    as of `paged_mqa_logits`
    max_model_len   most keys that count of any row
    k               picks per row
    out             int32 [B * next_n, k], row-strided; mutated
    workspace       uint8 or fp32, one dimension, contiguous, 16-byte aligned: memory for the scores of as many requests
                    as it has room for, at least one (`score_top_k_workspace_size`); mutated. None: allocated
    slot_block_table, slot_rows_per_page
                    int32 [B, width], row-strided, and rows of its pages: write, in place of keys, the slots that the
                    cache of this table has for them, as `top_k_per_row_decode` does

    Returns int32 [B * next_n, k]: keys, which a row of at most k keys has all, then -1, without any scores. A key whose
    page the block table does not name scores -inf and may be picked. Of equal scores the lower key wins, NaN comes
    after all numbers. Raises ValueError or TypeError on arguments that do not fit.
    """
    q, q_scale, pages, context_lens = arguments.split_paged("score_top_k_decode", q, kv_cache, context_lens)
    requests, next_n = q.shape[:2]
    if out is None:
        out = _empty_picks("score_top_k_decode", q, requests * next_n, k)
    else:
        _check_width("score_top_k_decode", out, k)
    if workspace is None:
        Checker("score_top_k_decode").ints(max_model_len=max_model_len)
        size = chunks.workspace_bytes(requests, max_model_len, next_n, k, chunks.WORKSPACE_BYTES)
        workspace = _empty_workspace(q, size)
    slots = slot_block_table, slot_rows_per_page
    _decode(q, q_scale, pages, weights, context_lens, block_tables, max_model_len, kv_format, out, workspace, *slots)
    return out


def _empty_picks(op: str, like: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    c = Checker(op)
    c.ints(k=k)
    c.require(k > 0, "k", "a positive number", k)
    return like.new_empty((rows, k), dtype=torch.int32)


def _check_width(op: str, out: Any, k: int) -> None:
    c = Checker(op)
    c.tensor("out", out, torch.int32, (None, None))
    c.ints(k=k)
    c.require(out.shape[1] == k, "out", f"k = {k} columns", f"shape {list(out.shape)}")


def _empty_workspace(like: torch.Tensor, size: int) -> torch.Tensor | None:
    return like.new_empty((size // 4,), dtype=torch.float32) if size else None
