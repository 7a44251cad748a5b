"""Gather indexer keys, and score queries against contiguous or paged keys."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.indexer import arguments, reference
from cute_kernels.indexer.chunks import ROW_ALIGNMENT
from cute_kernels.runtime import validate
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes

__all__ = ["cp_gather_indexer_k_quant_cache", "mqa_logits", "paged_mqa_logits"]


def _empty_logits(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return like.new_empty((rows, formats.round_up(columns, ROW_ALIGNMENT)), dtype=torch.float32)[:, :columns]


def _check_gather(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    kv_format: str,
) -> None:
    c = Checker("cp_gather_indexer_k_quant_cache")
    if arguments.check_cache(c, kv_cache, kv_format):
        c.tensor("dst_k", dst_k, arguments.BYTES, ("total", arguments.DIM // 2))
    else:
        c.tensor("dst_k", dst_k, (torch.uint8, torch.float8_e4m3fn), ("total", arguments.DIM))
    c.tensor("dst_scale", dst_scale, torch.uint8, ("total", 4))
    c.tensor("block_table", block_table, torch.int32, (None, None))
    c.tensor("cu_seq_lens", cu_seq_lens, torch.int32, (None,))
    c.require(
        cu_seq_lens.shape[0] == block_table.shape[0] + 1,
        "cu_seq_lens",
        f"one element more than the {block_table.shape[0]} rows of block_table",
        list(cu_seq_lens.shape),
    )


def _cost_gather(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    kv_format: str,
) -> Cost:
    ends = cu_seq_lens.long()
    rows = int((ends[1:] - ends[:-1]).clamp(min=0).sum())
    return Cost(bytes=2 * min(rows, dst_k.shape[0]) * (dst_k.shape[1] + 4))


def _validate_gather(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    kv_format: str,
) -> None:
    validate.ascending("cp_gather_indexer_k_quant_cache", "cu_seq_lens", cu_seq_lens)


_gather = define_op(
    "cp_gather_indexer_k_quant_cache(Tensor kv_cache, Tensor(a!) dst_k, Tensor(b!) dst_scale, Tensor block_table, "
    "Tensor cu_seq_lens, str kv_format) -> ()",
    check=_check_gather,
    reference=reference.cp_gather_indexer_k_quant_cache,
    kernel="cute_kernels.indexer.gather",
    cost=_cost_gather,
    validate=_validate_gather,
)


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    *,
    kv_format: str = formats.INDEXER_FP8.id,
) -> None:
    """Copy the indexer keys of several requests out of their pages, one request after the other, bytes unchanged.

    Row cu_seq_lens[r] + i of the destination is key i of request r, for i < cu_seq_lens[r + 1] - cu_seq_lens[r].
    Nothing else is written: not the rows past the last request, nor those whose page the block table does not name.

    kv_cache      uint8 [num_blocks, block_size, 132] (MXFP4: 68, wide MXFP4: 132) or [num_blocks, block_size, 1, row]
    dst_k         uint8 or float8_e4m3fn [total, 128]; MXFP4: uint8 or int8 [total, 64]; row-strided; mutated
    dst_scale     uint8 [total, 4], row-strided: the bytes of one fp32 scale, or four ue8m0 bytes; mutated
    block_table   int32 [R, width], row-strided; read only below each request's length
    cu_seq_lens   int32 [R + 1], in keys, not in source tokens
    kv_format     record format id: "indexer_fp8/1", "indexer_mxfp4/1" or "indexer_mxfp4_wide/1"

    Raises ValueError or TypeError on arguments that do not fit.
    """
    pages = arguments.flat_pages("cp_gather_indexer_k_quant_cache", kv_cache)
    _gather(pages, dst_k, dst_scale, block_table, cu_seq_lens, kv_format)


def _check_logits(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    out: torch.Tensor,
) -> None:
    c = Checker("mqa_logits")
    columns = arguments.check_contiguous(
        c, q, q_scale, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k
    )
    c.tensor("out", out, torch.float32, ("M", None))
    c.require(out.shape[1] == columns, "out", f"{columns} columns", f"shape {list(out.shape)}")


def _cost_logits(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    out: torch.Tensor,
) -> Cost:
    first, last = start.long().clamp(min=0), end.long().clamp(max=k.shape[0])
    if max_seqlen_k > 0:
        last = torch.minimum(last, start.long() + max_seqlen_k)
    first, last = first[first < last], last[first < last]
    if first.numel() == 0:
        return Cost(bytes=nbytes(out) if clean_logits else 0)
    scores = int((last - first).sum())
    touched = torch.zeros(k.shape[0] + 1, dtype=torch.int64, device=k.device)
    ones = torch.ones_like(first)
    touched.index_add_(0, first, ones).index_add_(0, last, -ones)
    keys = int((touched.cumsum(0) > 0).sum())
    written = out.numel() if clean_logits else scores
    data = nbytes(q, q_scale, weights, start, end) + keys * (k.shape[1] + 4) + 4 * written
    return Cost(bytes=data, flops=2 * arguments.DIM * q.shape[1] * scores)


_logits = define_op(
    "mqa_logits(Tensor q, Tensor? q_scale, Tensor k, Tensor k_scale, Tensor weights, Tensor cu_seq_len_k_start, "
    "Tensor cu_seq_len_k_end, bool clean_logits, SymInt max_seqlen_k, Tensor(a!) out) -> ()",
    check=_check_logits,
    reference=reference.mqa_logits,
    kernel="cute_kernels.indexer.call:MQA_LOGITS",
    cost=_cost_logits,
)


def mqa_logits(
    q: Any,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    *,
    max_seqlen_k: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score each query row against a range of contiguous keys.

    logits[m, n] = k_scale[n] * sum over h of max(0, <q[m, h], k[n]>) * weights[m, h] for start[m] <= n < end[m], where
    <,> is the dot product of the codes' values; MXFP4 codes are multiplied by their block scales and have no k_scale.
    The call is MXFP4 when q is a pair.

    q                    FP8: float8_e4m3fn [M, HI, 128]; MXFP4: (uint8 or int8 [M, HI, 64], int32 [M, HI])
    kv                   FP8: (float8_e4m3fn [N, 128], fp32 [N]); MXFP4: (uint8 or int8 [N, 64], int32 [N])
    weights              fp32 [M, HI], row-strided; the FP8 form expects the query's scale in it
    cu_seq_len_k_start   int32 [M], first key of each row; a start below 0 leaves out the keys that do not exist
    cu_seq_len_k_end     int32 [M], one past the last key; an end beyond N counts as N, end <= start is an empty row
    clean_logits         True: columns outside a row's range are -inf; False: they are undefined
    max_seqlen_k         > 0: the logits have this many columns, and column j of row m is key start[m] + j
    out                  fp32 [M, N] or [M, max_seqlen_k] to write into, row-strided

    Returns fp32 [M, N] or [M, max_seqlen_k] whose row stride is a multiple of 1024 bytes. A NaN in a key reaches its
    own column only, one in a query or a weight its own row. Raises ValueError or TypeError on arguments that do not
    fit.
    """
    q, q_scale, k, k_scale = arguments.split_contiguous("mqa_logits", q, kv)
    if out is None:
        Checker("mqa_logits").ints(max_seqlen_k=max_seqlen_k)
        out = _empty_logits(q, q.shape[0], max_seqlen_k if max_seqlen_k > 0 else k.shape[0])
    _logits(q, q_scale, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, out)
    return out


def _check_paged(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    clean_logits: bool,
    kv_format: str,
    out: torch.Tensor,
) -> None:
    c = Checker("paged_mqa_logits")
    rows = arguments.check_paged(c, q, q_scale, kv_cache, weights, context_lens, block_tables, max_model_len, kv_format)
    c.tensor("out", out, torch.float32, (None, None))
    c.require(
        out.shape[0] == rows and out.shape[1] == max_model_len,
        "out",
        f"shape [{rows}, {max_model_len}]",
        f"shape {list(out.shape)}",
    )


def _cost_paged(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_model_len: int,
    clean_logits: bool,
    kv_format: str,
    out: torch.Tensor,
) -> Cost:
    lengths = context_lens.clamp(min=0, max=max_model_len).long()
    scores = int(lengths.sum())
    keys = int(lengths.amax(dim=1).sum()) if lengths.numel() else 0
    written = out.numel() if clean_logits else scores
    data = nbytes(q, q_scale, weights, context_lens) + keys * (q.shape[3] + 4) + 4 * written
    return Cost(bytes=data, flops=2 * arguments.DIM * q.shape[2] * scores)


_paged = define_op(
    "paged_mqa_logits(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_tables, SymInt max_model_len, bool clean_logits, str kv_format, Tensor(a!) out) -> ()",
    check=_check_paged,
    reference=reference.paged_mqa_logits,
    kernel="cute_kernels.indexer.call:PAGED_MQA_LOGITS",
    cost=_cost_paged,
)


def paged_mqa_logits(
    q: Any,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
    clean_logits: bool = False,
    *,
    kv_format: str = formats.INDEXER_FP8.id,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score decode rows against the first keys of their requests, read from pages.

    Row b * next_n + j scores keys n < context_lens[b, j] of request b, as `mqa_logits` does. A key whose page the block
    table does not name, or that lies beyond the table, scores -inf.

    q                   FP8: float8_e4m3fn [B, next_n, HI, 128]; MXFP4: (uint8 or int8 [B, next_n, HI, 64],
                        int32 [B, next_n, HI]); next_n >= 1
    kv_cache            uint8 [num_blocks, block_size, row] or [num_blocks, block_size, 1, row], row by the format
    weights             fp32 [B * next_n, HI], row-strided; the FP8 form expects the query's scale in it
    context_lens        int32 [B, next_n]: keys each row sees; <= 0 for none, at most max_model_len count. [B] is
                        accepted for next_n = 1 only: lengths in compressed keys do not advance by one per token
    block_tables        int32 [B, width], row-strided; read only below the lengths
    schedule_metadata   ignored; may be None
    max_model_len       columns of the logits, in keys
    clean_logits        True: columns at and beyond a row's length are -inf; False: they are undefined
    kv_format           record format id: "indexer_fp8/1", "indexer_mxfp4/1" or "indexer_mxfp4_wide/1"
    out                 fp32 [B * next_n, max_model_len] to write into, row-strided

    Returns fp32 [B * next_n, max_model_len] whose row stride is a multiple of 1024 bytes. Raises ValueError or
    TypeError on arguments that do not fit.
    """
    q, q_scale, pages, context_lens = arguments.split_paged("paged_mqa_logits", q, kv_cache, context_lens)
    if out is None:
        c = Checker("paged_mqa_logits")
        c.ints(max_model_len=max_model_len)
        c.require(max_model_len >= 0, "max_model_len", "a number >= 0", max_model_len)
        out = _empty_logits(q, q.shape[0] * q.shape[1], max_model_len)
    _paged(q, q_scale, pages, weights, context_lens, block_tables, max_model_len, clean_logits, kv_format, out)
    return out
