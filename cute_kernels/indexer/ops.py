# SPDX-License-Identifier: Apache-2.0
"""The indexer: quantized queries, gathered keys, scores, and the picks of each row."""

from __future__ import annotations

import sys
from typing import Any

import torch

from cute_kernels import formats, numerics
from cute_kernels.indexer import chunks, reference
from cute_kernels.indexer.arguments import (
    BYTES,
    DIM,
    MOST_PAGE_ROWS,
    check_cache,
    check_contiguous,
    check_paged,
    check_slots,
    flat_pages,
    split_contiguous,
    split_paged,
)
from cute_kernels.indexer.call import (
    AllVisibleCall,
    CandidatesDecodeCall,
    CandidatesPrefillCall,
    GatherCall,
    KeysCall,
    LogitsCall,
    MergeKeysCall,
    PagedLogitsCall,
    QueryFp8Call,
    QueryMxfp4Call,
    ScoreTopKDecodeCall,
    ScoreTopKPrefillCall,
    SelectBlocksCall,
    TopKDecodeCall,
    TopKPrefillCall,
)
from cute_kernels.indexer.chunks import ROW_ALIGNMENT
from cute_kernels.runtime import checks
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned

__all__ = [
    "all_visible_entries",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "merge_top_k_keys",
    "mqa_logits",
    "paged_mqa_logits",
    "score_top_k_decode",
    "score_top_k_prefill",
    "score_top_k_workspace_size",
    "select_candidate_blocks",
    "select_candidate_blocks_workspace_size",
    "top_k_keys",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
]


# ---- queries


def _check_query(c: Checker, call: QueryFp8Call | QueryMxfp4Call) -> None:
    c.tensor("positions", call.positions, torch.int64, ("T",))
    c.tensor("index_q", call.index_q, torch.bfloat16, ("T", "HI", DIM))
    c.tensor(
        "index_q_cos_sin_cache", call.index_q_cos_sin_cache, (torch.float32, torch.bfloat16), (None, formats.ROPE_DIM)
    )
    c.require(call.index_q_cos_sin_cache.shape[0] > 0, "index_q_cos_sin_cache", "at least one row", "none")
    c.tensor("index_weights", call.index_weights, (torch.bfloat16, torch.float32), ("T", "HI"))


def _check_query_fp8(call: QueryFp8Call) -> None:
    c = Checker("fused_indexer_q_rope_quant_fp8")
    _check_query(c, call)
    c.tensor("q_quant", call.q_quant, torch.float8_e4m3fn, ("T", "HI", DIM))
    c.tensor("weights_out", call.weights_out, torch.float32, ("T", "HI"))


def _check_query_mxfp4(call: QueryMxfp4Call) -> None:
    c = Checker("fused_indexer_q_rope_quant_mxfp4")
    _check_query(c, call)
    c.one_of("e2m1_rounding", call.e2m1_rounding, numerics.E2M1_ROUNDINGS)
    c.require(call.e2m1_floor >= numerics.E2M1_FLOOR, "e2m1_floor", "a number >= 6 * 2^-126", call.e2m1_floor)
    c.tensor("q_quant", call.q_quant, torch.uint8, ("T", "HI", DIM // 2))
    c.tensor("q_scale", call.q_scale, torch.int32, ("T", "HI"))
    c.tensor("weights_out", call.weights_out, (torch.float32, torch.bfloat16), ("T", "HI"))


def _cost_query(call: QueryFp8Call | QueryMxfp4Call) -> Cost:
    table_rows = call.positions.shape[0] * formats.ROPE_DIM * call.index_q_cos_sin_cache.element_size()
    tensors = call.positions, call.index_q, call.index_weights, call.q_quant, call.q_scale, call.weights_out
    return Cost(bytes=nbytes(*tensors) + table_rows)


def _query_fp8_kernel() -> OpKernel[QueryFp8Call]:
    from cute_kernels.indexer.query import FP8

    return FP8


_query_fp8 = define_op(
    "fused_indexer_q_rope_quant_fp8(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, "
    "Tensor index_weights, float index_weights_softmax_scale, float index_weights_head_scale, bool index_hadamard, "
    "Tensor(a!) q_quant, Tensor(b!) weights_out, bool round_weights, bool use_pdl) -> ()",
    QueryFp8Call,
    check=_check_query_fp8,
    reference=reference.fused_indexer_q_rope_quant_fp8,
    kernel=_query_fp8_kernel,
    cost=_cost_query,
)


def _query_mxfp4_kernel() -> OpKernel[QueryMxfp4Call]:
    from cute_kernels.indexer.query import MXFP4

    return MXFP4


_query_mxfp4 = define_op(
    "fused_indexer_q_rope_quant_mxfp4(Tensor positions, Tensor index_q, Tensor index_q_cos_sin_cache, "
    "Tensor index_weights, float index_weights_softmax_scale, float index_weights_head_scale, str e2m1_rounding, "
    "float e2m1_floor, bool index_hadamard, Tensor(a!) q_quant, Tensor(b!) q_scale, Tensor(c!) weights_out, "
    "bool round_weights, bool use_pdl) -> ()",
    QueryMxfp4Call,
    check=_check_query_mxfp4,
    reference=reference.fused_indexer_q_rope_quant_mxfp4,
    kernel=_query_mxfp4_kernel,
    cost=_cost_query,
)


@planned
def fused_indexer_q_rope_quant(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    use_fp4: bool = False,
    *,
    weights_out_dtype: torch.dtype = torch.float32,
    e2m1_rounding: str = "ties_to_lower",
    e2m1_floor: float = numerics.CACHE_FLOOR,
    index_hadamard: bool = False,
    round_weights: bool = False,
    use_pdl: bool = False,
    out: tuple[Any, torch.Tensor] | None = None,
) -> tuple[Any, torch.Tensor]:
    """Rotate the last 64 columns of indexer queries, quantize each head, and scale the heads' weights.

    The rotation is done in fp32 and rounded to bf16; what follows sees bf16 values only.
    FP8: one scale 2^ceil(log2(max(absmax, 1e-4) / 448)) per head, folded into the weights:
    weights_out = ((w * scale) * softmax_scale) * head_scale, each product rounded to fp32.
    MXFP4: one scale 2^ceil(log2(max(absmax, e2m1_floor) / 6)) per 32 columns, returned;
    weights_out = (w * softmax_scale) * head_scale.
    The absmax ignores NaN; a NaN element becomes code 0x7F (e4m3) or 0 (e2m1).

    positions                     int64 [T]; a position outside the table takes the table's nearest row
    index_q                       bf16 [T, HI, 128], any strides with a dense last dimension
    index_q_cos_sin_cache         fp32 or bf16 [max_pos, 64], cos in columns 0..31, sin in 32..63
    index_weights                 bf16 or fp32 [T, HI], row-strided: columns of a wider projection will do
    index_weights_softmax_scale   factor, usually 128 ** -0.5
    index_weights_head_scale      factor, usually HI ** -0.5
    use_fp4                       MXFP4 instead of FP8
    weights_out_dtype             torch.float32; MXFP4 also torch.bfloat16 (rounded once, at the end)
    e2m1_rounding                 MXFP4 only: "ties_to_lower" or "ties_to_even" (see numerics.to_e2m1)
    e2m1_floor                    MXFP4 only: smallest absmax that a block is scaled for, 6 * 2^-126 or more; V4.1 has
                                  ties to even and 6 * 2^-126
    index_hadamard                Hadamard-transform the rotated bf16 query in fp32 and round to bf16 before quantizing
    round_weights                 round fp32 weights to bf16 first: the bytes that bf16 weights give
    use_pdl                       start while the kernel before on the stream still runs (programmatic dependent
                                  launch), and wait for it before anything is read
    out                           (q_quant, weights_out) to write into, of the shapes and dtypes below, row-strided

    Returns (q_quant, weights_out). FP8: q_quant is float8_e4m3fn [T, HI, 128]. MXFP4: q_quant is (uint8 [T, HI, 64]
    with element 2j in the low nibble of byte j, int32 [T, HI] holding the four ue8m0 bytes, block 0 lowest).
    weights_out is [T, HI]. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("fused_indexer_q_rope_quant")
    c.tensor("index_q", index_q, torch.bfloat16, (None, None, DIM))
    c.flags(use_fp4=use_fp4)
    c.one_of("weights_out_dtype", weights_out_dtype, (torch.float32, torch.bfloat16) if use_fp4 else (torch.float32,))
    if out is None:
        rows, heads = index_q.shape[0], index_q.shape[1]
        q_quant: Any
        if use_fp4:
            packed = index_q.new_empty((rows, heads, DIM // 2), dtype=torch.uint8)
            q_quant = (packed, index_q.new_empty((rows, heads), dtype=torch.int32))
        else:
            q_quant = index_q.new_empty((rows, heads, DIM), dtype=torch.float8_e4m3fn)
        weights_out = index_q.new_empty((rows, heads), dtype=weights_out_dtype)
    else:
        q_quant, weights_out = c.pair("out", out, "q_quant, weights_out")
        if use_fp4:
            q_quant = c.pair("out[0]", q_quant, "packed codes, scales")
        c.tensor("out[1]", weights_out, weights_out_dtype)
    inputs = (positions, index_q, index_q_cos_sin_cache, index_weights)
    factors = (index_weights_softmax_scale, index_weights_head_scale)
    if use_fp4:
        codes, scales = q_quant
        results, codes_of = (codes, scales, weights_out), (e2m1_rounding, e2m1_floor)
        _query_mxfp4(QueryMxfp4Call(*inputs, *factors, *codes_of, index_hadamard, *results, round_weights, use_pdl))
    else:
        _query_fp8(QueryFp8Call(*inputs, *factors, index_hadamard, q_quant, weights_out, round_weights, use_pdl))
    return q_quant, weights_out


# ---- keys gathered


def _check_gather(call: GatherCall) -> None:
    c = Checker("cp_gather_indexer_k_quant_cache")
    if check_cache(c, call.kv_cache, call.kv_format):
        c.tensor("dst_k", call.dst_k, BYTES, ("total", DIM // 2))
    else:
        c.tensor("dst_k", call.dst_k, (torch.uint8, torch.float8_e4m3fn), ("total", DIM))
    c.tensor("dst_scale", call.dst_scale, torch.uint8, ("total", 4))
    c.tensor("block_table", call.block_table, torch.int32, (None, None))
    c.tensor("cu_seq_lens", call.cu_seq_lens, torch.int32, (None,))
    c.require(
        call.cu_seq_lens.shape[0] == call.block_table.shape[0] + 1,
        "cu_seq_lens",
        f"one element more than the {call.block_table.shape[0]} rows of block_table",
        list(call.cu_seq_lens.shape),
    )


def _cost_gather(call: GatherCall) -> Cost:
    ends = call.cu_seq_lens.long()
    rows = int((ends[1:] - ends[:-1]).clamp(min=0).sum())
    return Cost(bytes=2 * min(rows, call.dst_k.shape[0]) * (call.dst_k.shape[1] + 4))


def _validate_gather(call: GatherCall) -> None:
    checks.ascending("cp_gather_indexer_k_quant_cache", "cu_seq_lens", call.cu_seq_lens)


def _gather_kernel() -> OpKernel[GatherCall]:
    from cute_kernels.indexer.gather import KERNEL

    return KERNEL


_gather = define_op(
    "cp_gather_indexer_k_quant_cache(Tensor kv_cache, Tensor(a!) dst_k, Tensor(b!) dst_scale, Tensor block_table, "
    "Tensor cu_seq_lens, str kv_format) -> ()",
    GatherCall,
    check=_check_gather,
    reference=reference.cp_gather_indexer_k_quant_cache,
    kernel=_gather_kernel,
    cost=_cost_gather,
    validate=_validate_gather,
)


@planned
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
    pages = flat_pages("cp_gather_indexer_k_quant_cache", kv_cache)
    _gather(GatherCall(pages, dst_k, dst_scale, block_table, cu_seq_lens, kv_format))


# ---- scores


def _empty_logits(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return like.new_empty((rows, formats.round_up(columns, ROW_ALIGNMENT)), dtype=torch.float32)[:, :columns]


def _check_logits(call: LogitsCall) -> None:
    c = Checker("mqa_logits")
    columns = check_contiguous(c, call)
    c.tensor("out", call.out, torch.float32, ("M", None))
    c.require(call.out.shape[1] == columns, "out", f"{columns} columns", f"shape {list(call.out.shape)}")


def _cost_logits(call: LogitsCall) -> Cost:
    start, end = call.cu_seq_len_k_start, call.cu_seq_len_k_end
    first, last = start.long().clamp(min=0), end.long().clamp(max=call.k.shape[0])
    if call.max_seqlen_k > 0:
        last = torch.minimum(last, start.long() + call.max_seqlen_k)
    first, last = first[first < last], last[first < last]
    if first.numel() == 0:
        return Cost(bytes=nbytes(call.out) if call.clean_logits else 0)
    scores = int((last - first).sum())
    touched = torch.zeros(call.k.shape[0] + 1, dtype=torch.int64, device=call.k.device)
    ones = torch.ones_like(first)
    touched.index_add_(0, first, ones).index_add_(0, last, -ones)
    keys = int((touched.cumsum(0) > 0).sum())
    written = call.out.numel() if call.clean_logits else scores
    data = nbytes(call.q, call.q_scale, call.weights, start, end) + keys * (call.k.shape[1] + 4) + 4 * written
    return Cost(bytes=data, flops=2 * DIM * call.q.shape[1] * scores)


def _logits_kernel() -> OpKernel[LogitsCall]:
    from cute_kernels.indexer.launch import MQA_LOGITS

    return MQA_LOGITS


_logits = define_op(
    "mqa_logits(Tensor q, Tensor? q_scale, Tensor k, Tensor k_scale, Tensor weights, Tensor cu_seq_len_k_start, "
    "Tensor cu_seq_len_k_end, bool clean_logits, SymInt max_seqlen_k, Tensor(a!) out) -> ()",
    LogitsCall,
    check=_check_logits,
    reference=reference.mqa_logits,
    kernel=_logits_kernel,
    cost=_cost_logits,
)


@planned
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
    q, q_scale, k, k_scale = split_contiguous("mqa_logits", q, kv)
    if out is None:
        Checker("mqa_logits").ints(max_seqlen_k=max_seqlen_k)
        out = _empty_logits(q, q.shape[0], max_seqlen_k if max_seqlen_k > 0 else k.shape[0])
    _logits(
        LogitsCall(
            q, q_scale, k, k_scale, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k, out
        )
    )
    return out


def _check_paged(call: PagedLogitsCall) -> None:
    c = Checker("paged_mqa_logits")
    rows = check_paged(c, call)
    c.tensor("out", call.out, torch.float32, (None, None))
    c.require(
        call.out.shape[0] == rows and call.out.shape[1] == call.max_model_len,
        "out",
        f"shape [{rows}, {call.max_model_len}]",
        f"shape {list(call.out.shape)}",
    )


def _cost_paged(call: PagedLogitsCall) -> Cost:
    lengths = call.context_lens.clamp(min=0, max=call.max_model_len).long()
    scores = int(lengths.sum())
    keys = int(lengths.amax(dim=1).sum()) if lengths.numel() else 0
    written = call.out.numel() if call.clean_logits else scores
    data = nbytes(call.q, call.q_scale, call.weights, call.context_lens) + keys * (call.q.shape[3] + 4) + 4 * written
    return Cost(bytes=data, flops=2 * DIM * call.q.shape[2] * scores)


def _paged_kernel() -> OpKernel[PagedLogitsCall]:
    from cute_kernels.indexer.launch import PAGED_MQA_LOGITS

    return PAGED_MQA_LOGITS


_paged = define_op(
    "paged_mqa_logits(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_tables, SymInt max_model_len, bool clean_logits, str kv_format, Tensor(a!) out, "
    "bool use_pdl) -> ()",
    PagedLogitsCall,
    check=_check_paged,
    reference=reference.paged_mqa_logits,
    kernel=_paged_kernel,
    cost=_cost_paged,
)


@planned
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
    use_pdl: bool = False,
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
    use_pdl             on Hopper, start while the kernel before on the stream still runs (programmatic dependent
                        launch), and wait for it before anything is read. That saves a microsecond where the kernel
                        before lets others start, as this project's do, and costs half of one where it does not

    Returns fp32 [B * next_n, max_model_len] whose row stride is a multiple of 1024 bytes. Raises ValueError or
    TypeError on arguments that do not fit.
    """
    q, q_scale, pages, context_lens = split_paged("paged_mqa_logits", q, kv_cache, context_lens)
    if out is None:
        c = Checker("paged_mqa_logits")
        c.ints(max_model_len=max_model_len)
        c.require(max_model_len >= 0, "max_model_len", "a number >= 0", max_model_len)
        out = _empty_logits(q, q.shape[0] * q.shape[1], max_model_len)
    _paged(
        PagedLogitsCall(
            q, q_scale, pages, weights, context_lens, block_tables, max_model_len, clean_logits, kv_format, out, use_pdl
        )
    )
    return out


# ---- picks


def _check_top_k(c: Checker, call: TopKPrefillCall | TopKDecodeCall) -> None:
    logits, out, num_rows, k = call.logits, call.out, call.num_rows, call.k
    c.tensor("logits", logits, torch.float32, (None, None))
    c.tensor("out", out, torch.int32, (None, None))
    c.require(num_rows >= 0, "num_rows", "a number >= 0", num_rows)
    c.require(num_rows <= logits.shape[0], "num_rows", f"at most the {logits.shape[0]} rows of logits", num_rows)
    c.require(num_rows <= out.shape[0], "out", f"at least num_rows = {num_rows} rows", f"shape {list(out.shape)}")
    c.require(k > 0, "k", "a positive number", k)
    c.require(k <= out.shape[1], "out", f"at least k = {k} columns", f"shape {list(out.shape)}")


def _check_top_k_strides(op: str, logits: Any, stride0: int, stride1: int) -> None:
    c = Checker(op)
    c.tensor("logits", logits, torch.float32, (None, None))
    c.ints(stride0=stride0, stride1=stride1)
    for argument, axis, got in (("stride0", 0, stride0), ("stride1", 1, stride1)):
        if logits.shape[axis] > 1:
            c.require(got == logits.stride(axis), argument, f"logits.stride({axis}) = {logits.stride(axis)}", got)


def _cost_top_k(lengths: torch.Tensor, k: int, *bounds: torch.Tensor) -> Cost:
    """Rows of at most k columns need no scores."""
    return Cost(bytes=4 * int(lengths[lengths > k].sum()) + 4 * k * lengths.numel() + nbytes(*bounds))


def _check_top_k_prefill(call: TopKPrefillCall) -> None:
    c = Checker("top_k_per_row_prefill")
    _check_top_k(c, call)
    for argument, value in (("row_starts", call.row_starts), ("row_ends", call.row_ends)):
        c.tensor(argument, value, torch.int32, (None,))
        c.require(
            call.num_rows <= value.shape[0], argument, f"at least num_rows = {call.num_rows} rows", list(value.shape)
        )


def _cost_top_k_prefill(call: TopKPrefillCall) -> Cost:
    starts, ends = call.row_starts[: call.num_rows], call.row_ends[: call.num_rows]
    return _cost_top_k(ends.clamp(max=call.logits.shape[1]).long() - starts.clamp(min=0), call.k, starts, ends)


def _top_k_prefill_kernel() -> OpKernel[TopKPrefillCall]:
    from cute_kernels.indexer.topk_select import PREFILL

    return PREFILL


_top_k_prefill = define_op(
    "top_k_per_row_prefill(Tensor logits, Tensor row_starts, Tensor row_ends, Tensor(a!) out, SymInt num_rows, "
    "SymInt k, bool use_pdl) -> ()",
    TopKPrefillCall,
    check=_check_top_k_prefill,
    reference=reference.top_k_per_row_prefill,
    kernel=_top_k_prefill_kernel,
    cost=_cost_top_k_prefill,
)


@planned
def top_k_per_row_prefill(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    row_ends: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    k: int,
    *,
    use_pdl: bool = True,
) -> None:
    """Pick the k largest scores among columns row_starts[r] .. row_ends[r] - 1 of each row, counted from the start.

    A row of length <= k gets 0, 1, ... length - 1 and then -1, whatever its scores. A longer row gets the k best of its
    columns in unspecified order, but always the same ones: of equal scores (-0 and +0 are equal) the lower column wins,
    -inf is a number, and NaN comes after all numbers, lower columns first.

    logits       fp32 [rows, columns], row-strided; columns outside a row's range may hold anything
    row_starts   int32 [>= num_rows]; a start below 0 counts as 0
    row_ends     int32 [>= num_rows]; an end beyond the columns counts as their number; end <= start: all -1
    out          int32 [>= num_rows, >= k], row-strided; mutated in its first num_rows rows and k columns only
    num_rows     rows to process, at most those of logits
    stride0      logits.stride(0)
    stride1      logits.stride(1), which must be 1
    k            picks per row
    use_pdl      launch as a dependent of the kernel before, which costs where that one lets nothing start early

    Raises ValueError or TypeError on arguments that do not fit.
    """
    _check_top_k_strides("top_k_per_row_prefill", logits, stride0, stride1)
    _top_k_prefill(TopKPrefillCall(logits, row_starts, row_ends, out, num_rows, k, use_pdl))


def _check_top_k_decode(call: TopKDecodeCall) -> None:
    c = Checker("top_k_per_row_decode")
    _check_top_k(c, call)
    c.tensor("seq_lens", call.seq_lens, torch.int32, (None, None))
    c.require(
        call.num_rows <= call.seq_lens.shape[0] * call.seq_lens.shape[1],
        "seq_lens",
        f"at least num_rows = {call.num_rows} lengths",
        f"shape {list(call.seq_lens.shape)}",
    )
    check_slots(c, call.seq_lens.shape[0], call.slot_block_table, call.slot_rows_per_page)


def _cost_top_k_decode(call: TopKDecodeCall) -> Cost:
    """Of the block table at most a page a pick."""
    lengths = call.seq_lens.reshape(-1)[: call.num_rows]
    cost = _cost_top_k(lengths.clamp(max=call.logits.shape[1]), call.k, lengths)
    picks = int(lengths.clamp(0, call.k).sum())
    return Cost(bytes=cost.bytes + min(nbytes(call.slot_block_table), 4 * picks))


def _top_k_decode_kernel() -> OpKernel[TopKDecodeCall]:
    from cute_kernels.indexer.topk_select import DECODE

    return DECODE


_top_k_decode = define_op(
    "top_k_per_row_decode(Tensor logits, Tensor seq_lens, Tensor(a!) out, SymInt num_rows, SymInt k, "
    "Tensor? slot_block_table, SymInt slot_rows_per_page, bool use_pdl) -> ()",
    TopKDecodeCall,
    check=_check_top_k_decode,
    reference=reference.top_k_per_row_decode,
    kernel=_top_k_decode_kernel,
    cost=_cost_top_k_decode,
)


@planned
def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    k: int,
    *,
    slot_block_table: torch.Tensor | None = None,
    slot_rows_per_page: int = 0,
    use_pdl: bool = True,
) -> None:
    """Pick the k largest scores among the first seq_lens columns of each row: `top_k_per_row_prefill` with starts at 0.

    logits               fp32 [rows, columns], row-strided; row b * next_n + j belongs to token j of request b
    next_n               rows per request
    seq_lens             int32 [B, next_n]: columns each row may pick from, <= 0 for none (all -1), at most the columns
                         of logits count. [B] is accepted for next_n = 1 only: lengths do not advance by one per token
    out                  int32 [>= num_rows, >= k], row-strided; mutated in its first num_rows rows and k columns only
    num_rows             rows to process, at most B * next_n
    stride0              logits.stride(0)
    stride1              logits.stride(1), which must be 1
    k                    picks per row
    slot_block_table     int32 [B, width], row-strided: write, in place of each pick x of request b, its slot
                         table[b, x // rows] * rows + x % rows; -1, at the pick's place, where the table has no page
                         >= 0 for it or int32 cannot name the slot. The picks are the same ones, in ascending order.
                         None: picks are written as columns
    slot_rows_per_page   rows of a page, with a table
    use_pdl              launch as a dependent of the kernel before, which costs where that one lets nothing start early

    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("top_k_per_row_decode")
    c.tensor("seq_lens", seq_lens, torch.int32)
    c.ints(next_n=next_n)
    c.require(next_n > 0, "next_n", "a positive number", next_n)
    if seq_lens.dim() == 1 and next_n == 1:
        seq_lens = seq_lens[:, None]
    elif seq_lens.dim() != 2 or seq_lens.shape[1] != next_n:
        c.fail("seq_lens", f"one length per row, shape [B, next_n = {next_n}]", f"shape {list(seq_lens.shape)}")
    _check_top_k_strides("top_k_per_row_decode", logits, stride0, stride1)
    _top_k_decode(TopKDecodeCall(logits, seq_lens, out, num_rows, k, slot_block_table, slot_rows_per_page, use_pdl))


def _check_all_visible(call: AllVisibleCall) -> None:
    c = Checker("all_visible_entries")
    c.tensor("visible", call.visible, torch.int32, (None, None))
    c.tensor("out", call.out, torch.int32, (call.visible.shape[0] * call.visible.shape[1], None))
    check_slots(c, call.visible.shape[0], call.slot_block_table, call.slot_rows_per_page)


def _cost_all_visible(call: AllVisibleCall) -> Cost:
    entries = int(call.visible.clamp(0, call.out.shape[1]).sum())
    return Cost(bytes=nbytes(call.visible, call.out) + min(nbytes(call.slot_block_table), 4 * entries))


def _all_visible_kernel() -> OpKernel[AllVisibleCall]:
    from cute_kernels.indexer.topk_select import ALL_VISIBLE

    return ALL_VISIBLE


_all_visible = define_op(
    "all_visible_entries(Tensor visible, Tensor(a!) out, Tensor? slot_block_table, SymInt slot_rows_per_page) -> ()",
    AllVisibleCall,
    check=_check_all_visible,
    reference=reference.all_visible_entries,
    kernel=_all_visible_kernel,
    cost=_cost_all_visible,
)


@planned
def all_visible_entries(
    visible: torch.Tensor,
    k: int,
    *,
    slot_block_table: torch.Tensor | None = None,
    slot_rows_per_page: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Entries 0 .. visible - 1 of each row, then -1: what picks are where no row can see more than k entries, without
    any scores.

    visible              int32 [B, next_n], any strides, or [B] for one row of each request: entries that row
                         b * next_n + j sees; <= 0: none, more than k: the first k are written
    k                    columns of the result
    slot_block_table     int32 [B, width], row-strided: write slots in place of entries, as `top_k_per_row_decode` does
    slot_rows_per_page   rows of a page, with a table
    out                  int32 [B * next_n, k], row-strided; mutated. None: allocated

    Returns out. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("all_visible_entries")
    c.tensor("visible", visible, torch.int32)
    if visible.dim() == 1:
        visible = visible[:, None]
    c.tensor("visible", visible, torch.int32, (None, None))
    c.ints(k=k)
    c.require(k > 0, "k", "a positive number", k)
    if out is None:
        out = visible.new_empty((visible.shape[0] * visible.shape[1], k))
    else:
        c.tensor("out", out, torch.int32, (None, None))
        c.require(out.shape[1] == k, "out", f"k = {k} columns", f"shape {list(out.shape)}")
    _all_visible(AllVisibleCall(visible, out, slot_block_table, slot_rows_per_page))
    return out


# ---- picks of several ranks


def _check_keys(call: KeysCall) -> None:
    c = Checker("top_k_keys")
    c.tensor("scores", call.scores, torch.float32, ("rows", None))
    c.tensor("picks", call.picks, torch.int32, ("rows", "k"))
    limits = f"1 to {MOST_PAGE_ROWS}"
    c.require(0 < call.entries_per_page <= MOST_PAGE_ROWS, "entries_per_page", limits, call.entries_per_page)
    _check_rank(c, call.ranks, call.rank)
    c.tensor("out", call.out, torch.int64, ("rows", "k"))


def _check_rank(c: Checker, ranks: int, rank: int) -> None:
    c.require(ranks > 0, "ranks", "a positive number", ranks)
    c.require(0 <= rank < ranks, "rank", f"0 to ranks - 1 = {ranks - 1}", rank)


def _cost_keys(call: KeysCall) -> Cost:
    return Cost(bytes=nbytes(call.picks, call.out) + 4 * int((call.picks >= 0).sum()))


def _keys_kernel() -> OpKernel[KeysCall]:
    from cute_kernels.indexer.picked_keys import KERNEL

    return KERNEL


_keys = define_op(
    "top_k_keys(Tensor scores, Tensor picks, SymInt entries_per_page, SymInt ranks, SymInt rank, Tensor(a!) out) -> ()",
    KeysCall,
    check=_check_keys,
    reference=reference.top_k_keys,
    kernel=_keys_kernel,
    cost=_cost_keys,
)


@planned
def top_k_keys(
    scores: torch.Tensor,
    picks: torch.Tensor,
    *,
    entries_per_page: int = 1,
    ranks: int = 1,
    rank: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Keys of a rank's picks, which `merge_top_k_keys` compares with those of other ranks.

    scores             fp32 [rows, columns], row-strided, of the rank's own entries
    picks              int32 [rows, k], row-strided: columns, as `top_k_per_row_decode` writes them. One outside of the
                       scores gives an empty key
    entries_per_page   of the rank's pages: column x is entry (x // entries_per_page * ranks + rank) * entries_per_page
                       + x % entries_per_page of the request. An entry beyond int32 gives an empty key
    ranks, rank        of the context group
    out                int64 [rows, k], row-strided; mutated. None: allocated

    Returns out. Raises ValueError or TypeError on arguments that do not fit.
    """
    if out is None:
        Checker("top_k_keys").tensor("picks", picks, torch.int32, ("rows", "k"))
        out = torch.empty(picks.shape, dtype=torch.int64, device=picks.device)
    _keys(KeysCall(scores, picks, entries_per_page, ranks, rank, out))
    return out


def _check_merge_keys(call: MergeKeysCall) -> None:
    c = Checker("merge_top_k_keys")
    c.tensor("keys", call.keys, torch.int64, (None, None, None))
    parts, rows, k = call.keys.shape
    c.require(parts > 0 and k > 0, "keys", "at least one part and one key", f"shape {list(call.keys.shape)}")
    c.tensor("out", call.out, torch.int32, (rows, k), optional=True)
    if call.block_table is None:
        for name in ("out_slots", "out_lens"):
            c.require(getattr(call, name) is None, name, "None without block_table", "a tensor")
        return
    c.tensor("block_table", call.block_table, torch.int32, (None, None))
    requests = call.block_table.shape[0]
    divides = rows == 0 if requests == 0 else rows % requests == 0
    c.require(divides, "block_table", f"a number of requests that divides {rows} rows", f"{requests}")
    limits = f"1 to {MOST_PAGE_ROWS} with block_table"
    c.require(0 < call.rows_per_page <= MOST_PAGE_ROWS, "rows_per_page", limits, call.rows_per_page)
    _check_rank(c, call.ranks, call.rank)
    c.tensor("out_slots", call.out_slots, torch.int32, (rows, k))
    c.tensor("out_lens", call.out_lens, torch.int32, (rows,))


def _cost_merge_keys(call: MergeKeysCall) -> Cost:
    moved = nbytes(call.keys, call.out, call.out_slots, call.out_lens)
    return Cost(bytes=moved + (0 if call.block_table is None else nbytes(call.out_slots) // call.ranks))


def _merge_keys_kernel() -> OpKernel[MergeKeysCall]:
    from cute_kernels.indexer.merge_keys import KERNEL

    return KERNEL


_merge_keys = define_op(
    "merge_top_k_keys(Tensor keys, Tensor(a!)? out, Tensor? block_table, SymInt rows_per_page, SymInt ranks, "
    "SymInt rank, Tensor(b!)? out_slots, Tensor(c!)? out_lens) -> ()",
    MergeKeysCall,
    check=_check_merge_keys,
    reference=reference.merge_top_k_keys,
    kernel=_merge_keys_kernel,
    cost=_cost_merge_keys,
)


@planned
def merge_top_k_keys(
    keys: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rows_per_page: int = 0,
    ranks: int = 1,
    rank: int = 0,
    out_slots: torch.Tensor | None = None,
    out_lens: torch.Tensor | None = None,
) -> Any:
    """The k best of each row's keys, of all ranks that share a request's entries; or, of these, a rank's own as slots.

    A key is an int64, the larger the better: above, the bits of an fp32 score s as a number that grows with it (s >= 0:
    the bits; s < 0: the bits with all but the sign turned; -0 as +0; NaN: -2^31), below, 2^32 - 1 less the entry. An
    empty place is -2^63. So of equal scores the lower entry wins, and NaN comes after -inf, as in `score_top_k_decode`:
    the k best of all ranks' k best are the k best of all entries.

    keys            int64 [N, rows, k], N parts in any order, a dense last dimension, in any order along it. A key whose
                    entry is not below 2^31 counts as empty
    out             int32 [rows, k], row-strided: the entries, ascending, then -1; mutated. None: allocated if there is
                    no block_table, else nobody asks
    block_table     int32 [B, width], row-strided, B a divisor of rows, row b * (rows / B) + j being request b's: the
                    rank's own pages. Page P of a request is page P // ranks of rank P % ranks
    rows_per_page   entries of a page, with a block_table
    ranks, rank     of the context group
    out_slots       int32 [rows, k], row-strided: slots table[b, column] * rows_per_page + row of the picks that are the
                    rank's own, in the order of their entries, then -1; mutated. Picks without a page >= 0 or whose slot
                    is beyond int32 are left out. None: allocated with a block_table
    out_lens        int32 [rows]: how many slots there are; mutated. None: allocated with a block_table

    Returns out, or with a block_table (out_slots, out_lens). Raises ValueError or TypeError on arguments that do not
    fit.
    """
    Checker("merge_top_k_keys").tensor("keys", keys, torch.int64, (None, None, None))
    shape = tuple(keys.shape[1:])
    if block_table is None:
        out = keys.new_empty(shape, dtype=torch.int32) if out is None else out
    else:
        out_slots = keys.new_empty(shape, dtype=torch.int32) if out_slots is None else out_slots
        out_lens = keys.new_empty(shape[:1], dtype=torch.int32) if out_lens is None else out_lens
    _merge_keys(MergeKeysCall(keys, out, block_table, rows_per_page, ranks, rank, out_slots, out_lens))
    return out if block_table is None else (out_slots, out_lens)


# ---- scores and picks in one


def score_top_k_workspace_size(
    requests: int,
    columns: int,
    k: int,
    *,
    next_n: int = 1,
    most: int = chunks.WORKSPACE_BYTES,
    candidates: int = 0,
) -> int:
    """Bytes of workspace for `score_top_k_prefill` or `score_top_k_decode`: enough for every call with at most so many
    requests, columns and rows of a request.

    requests   B of a decode call, rows M of a prefill
    columns    N or max_seqlen_k of a prefill, max_model_len of a decode call
    k          picks per row, as in the call: no workspace is needed where columns <= k
    next_n     rows of a request, which are scored together; 1 for a prefill
    most       bytes not to exceed, unless a single request needs more: each of its rows takes 4 bytes a column, up to a
               multiple of 256 columns. Where this is less than all scores, they are made in chunks, one after the other
    candidates blocks of a call with candidates, whose rows have their keys in place of the columns; 0: without

    Picks do not depend on the size.
    """
    if candidates > 0:
        columns, k = chunks.candidate_columns(candidates), 0
    return chunks.workspace_bytes(requests, columns, next_n, k, most)


def _check_results(
    c: Checker,
    rows: int,
    requests: int,
    columns: int,
    next_n: int,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    scored: bool = False,
) -> None:
    """scored: whether all rows are, whatever their columns."""
    c.tensor("out", out, torch.int32, (None, None))
    c.require(out.shape[0] == rows, "out", f"{rows} rows", f"shape {list(out.shape)}")
    c.require(out.shape[1] > 0, "out", "at least one column", f"shape {list(out.shape)}")
    c.tensor("workspace", workspace, (torch.uint8, torch.float32), (None,), optional=True, contiguous=True)
    have, needed = nbytes(workspace), chunks.least_bytes(requests, columns, next_n, 0 if scored else out.shape[1])
    c.require(have >= needed, "workspace", f"at least {needed} bytes (score_top_k_workspace_size)", f"{have} bytes")
    c.require(have % 4 == 0, "workspace", "a multiple of 4 bytes", f"{have} bytes")
    if workspace is not None:
        offset = workspace.storage_offset() * workspace.element_size()
        c.require(offset % 16 == 0, "workspace", "a multiple of 16 as its place in memory", f"{offset}")


def _picked_cost(scored: Cost, heads: int, out: torch.Tensor) -> Cost:
    """Of scores that are written nowhere, and picks that are."""
    scores = scored.flops // (2 * DIM * heads) if heads else 0
    return Cost(bytes=scored.bytes - 4 * scores + nbytes(out), flops=scored.flops)


def _check_score_top_k_prefill(call: ScoreTopKPrefillCall) -> None:
    c = Checker("score_top_k_prefill")
    columns = check_contiguous(c, call)
    _check_results(c, call.q.shape[0], call.q.shape[0], columns, 1, call.out, call.workspace)


def _cost_score_top_k_prefill(call: ScoreTopKPrefillCall) -> Cost:
    """Rows of at most k columns need no scores."""
    start, end = call.cu_seq_len_k_start, call.cu_seq_len_k_end
    last = end.long().clamp(max=call.k.shape[0])
    if call.max_seqlen_k > 0:
        last = torch.minimum(last, start.long() + call.max_seqlen_k)
    is_scored = last - start.long().clamp(min=0) > call.out.shape[1]
    scored = _cost_logits(call.scores(call.out)._replace(cu_seq_len_k_end=end.where(is_scored, start)))
    return _picked_cost(scored, call.q.shape[1], call.out)


def _score_top_k_prefill_kernel() -> OpKernel[ScoreTopKPrefillCall]:
    from cute_kernels.indexer.launch import SCORE_TOP_K_PREFILL

    return SCORE_TOP_K_PREFILL


_score_top_k_prefill = define_op(
    "score_top_k_prefill(Tensor q, Tensor? q_scale, Tensor k, Tensor k_scale, Tensor weights, "
    "Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, SymInt max_seqlen_k, Tensor(a!) out, Tensor(b!)? workspace) "
    "-> ()",
    ScoreTopKPrefillCall,
    check=_check_score_top_k_prefill,
    reference=reference.score_top_k_prefill,
    kernel=_score_top_k_prefill_kernel,
    cost=_cost_score_top_k_prefill,
)


@planned
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
    candidates: torch.Tensor | None = None,
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
    candidates           int32 [M, blocks], row-strided: as in `score_top_k_decode`, blocks being counted from the row's
                         start

    Returns int32 [M, k]: keys counted from the row's start, which a row of at most k keys has all, then -1, without any
    scores. Of equal scores the lower key wins, NaN comes after all numbers. Raises ValueError or TypeError on arguments
    that do not fit.
    """
    q, q_scale, keys, k_scale = split_contiguous("score_top_k_prefill", q, kv)
    rows = q.shape[0]
    if out is None:
        out = _empty_picks("score_top_k_prefill", q, rows, k)
    else:
        _check_width("score_top_k_prefill", out, k)
    bounds = cu_seq_len_k_start, cu_seq_len_k_end
    if candidates is not None:
        blocks = _check_candidates(Checker("score_top_k_prefill"), candidates, rows)
        if workspace is None:
            workspace = _scratch(q, score_top_k_workspace_size(rows, 0, k, candidates=blocks))
        restricted = CandidatesPrefillCall(
            q, q_scale, keys, k_scale, weights, *bounds, candidates, max_seqlen_k, out, workspace
        )
        _score_candidates_prefill(restricted)
        return out
    if workspace is None:
        Checker("score_top_k_prefill").ints(max_seqlen_k=max_seqlen_k)
        size = chunks.workspace_bytes(
            rows, max_seqlen_k if max_seqlen_k > 0 else keys.shape[0], 1, k, chunks.WORKSPACE_BYTES
        )
        workspace = _empty_workspace(q, size)
    _score_top_k_prefill(
        ScoreTopKPrefillCall(q, q_scale, keys, k_scale, weights, *bounds, max_seqlen_k, out, workspace)
    )
    return out


def _check_score_top_k_decode(call: ScoreTopKDecodeCall) -> None:
    c = Checker("score_top_k_decode")
    rows = check_paged(c, call)
    _check_results(c, rows, call.q.shape[0], call.max_model_len, call.q.shape[1], call.out, call.workspace)
    check_slots(c, call.q.shape[0], call.slot_block_table, call.slot_rows_per_page)


def _cost_score_top_k_decode(call: ScoreTopKDecodeCall) -> Cost:
    """Rows of at most k columns need no scores."""
    lengths = call.context_lens.clamp(max=call.max_model_len)
    scored_lengths = lengths.where(lengths > call.out.shape[1], torch.zeros_like(lengths))
    scored = _cost_paged(call.scores(call.out)._replace(context_lens=scored_lengths))
    whole = _picked_cost(scored, call.q.shape[2], call.out)
    picks = int(lengths.clamp(0, call.out.shape[1]).sum())
    return Cost(bytes=whole.bytes + min(nbytes(call.slot_block_table), 4 * picks), flops=whole.flops)


def _score_top_k_decode_kernel() -> OpKernel[ScoreTopKDecodeCall]:
    from cute_kernels.indexer.launch import SCORE_TOP_K_DECODE

    return SCORE_TOP_K_DECODE


_score_top_k_decode = define_op(
    "score_top_k_decode(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_tables, SymInt max_model_len, str kv_format, Tensor(a!) out, Tensor(b!)? workspace, "
    "Tensor? slot_block_table, SymInt slot_rows_per_page) -> ()",
    ScoreTopKDecodeCall,
    check=_check_score_top_k_decode,
    reference=reference.score_top_k_decode,
    kernel=_score_top_k_decode_kernel,
    cost=_cost_score_top_k_decode,
)


@planned
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
    candidates: torch.Tensor | None = None,
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
                    cache of this table has for them, as `top_k_per_row_decode` does; not with candidates
    candidates      int32 [B * next_n, blocks], row-strided: what `select_candidate_blocks` selected for rows of these
                    lengths. Only keys of these blocks are read and picked, and the workspace is for their scores
                    (`candidates` of `score_top_k_workspace_size`)

    Returns int32 [B * next_n, k]: keys, which a row of at most k keys has all, then -1, without any scores. A key whose
    page the block table does not name scores -inf and may be picked. Of equal scores the lower key wins, NaN comes
    after all numbers. Raises ValueError or TypeError on arguments that do not fit.
    """
    q, q_scale, pages, context_lens = split_paged("score_top_k_decode", q, kv_cache, context_lens)
    requests, next_n = q.shape[:2]
    if out is None:
        out = _empty_picks("score_top_k_decode", q, requests * next_n, k)
    else:
        _check_width("score_top_k_decode", out, k)
    if candidates is not None:
        name = "score_top_k_decode"
        blocks = _check_candidates(Checker(name), candidates, requests * next_n)
        Checker(name).require(slot_block_table is None, "slot_block_table", "None with candidates", "a tensor")
        if workspace is None:
            workspace = _scratch(q, score_top_k_workspace_size(requests, 0, k, next_n=next_n, candidates=blocks))
        keys = weights, context_lens, block_tables, candidates, max_model_len, kv_format
        _score_candidates_decode(CandidatesDecodeCall(q, q_scale, pages, *keys, out, workspace))
        return out
    if workspace is None:
        Checker("score_top_k_decode").ints(max_model_len=max_model_len)
        size = chunks.workspace_bytes(requests, max_model_len, next_n, k, chunks.WORKSPACE_BYTES)
        workspace = _empty_workspace(q, size)
    slots = slot_block_table, slot_rows_per_page
    _score_top_k_decode(
        ScoreTopKDecodeCall(
            q, q_scale, pages, weights, context_lens, block_tables, max_model_len, kv_format, out, workspace, *slots
        )
    )
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
    return _scratch(like, size) if size else None


def _scratch(like: torch.Tensor, size: int) -> torch.Tensor:
    return like.new_empty((size // 4,), dtype=torch.float32)


# ---- candidate blocks


def _check_candidates(c: Checker, candidates: torch.Tensor, rows: Any) -> int:
    """Columns of the (checked) candidates of so many rows."""
    c.tensor("candidates", candidates, torch.int32, (None, None))
    c.require(candidates.shape[0] == rows, "candidates", f"{rows} rows", f"shape {list(candidates.shape)}")
    c.require(candidates.shape[1] > 0, "candidates", "at least one block", f"shape {list(candidates.shape)}")
    return int(candidates.shape[1])


def _check_score_candidates(
    c: Checker, call: CandidatesDecodeCall | CandidatesPrefillCall, requests: Any, next_n: Any
) -> None:
    blocks = _check_candidates(c, call.candidates, requests * next_n)
    columns = chunks.candidate_columns(blocks)
    _check_results(c, requests * next_n, requests, columns, next_n, call.out, call.workspace, scored=True)


def _candidates_cost(
    call: CandidatesDecodeCall | CandidatesPrefillCall, lengths: torch.Tensor, heads: int, keys: int = sys.maxsize
) -> Cost:
    """Rows whose candidates have at most k keys need no scores. keys: how many there are for all rows together, none of
    which has to be read twice."""
    blocks, k = call.candidates.shape[1], call.out.shape[1]
    counts = reference.candidate_keys(lengths.clamp(min=0).reshape(-1), blocks)
    scored = int(counts[counts > k].sum())
    row = DIM + 4 if call.q_scale is None else DIM // 2 + 4
    data = nbytes(call.q, call.q_scale, call.weights, call.out) + min(scored, keys) * row
    return Cost(bytes=data + scored // chunks.CANDIDATE_BLOCK * 4, flops=2 * DIM * heads * scored)


def _validate_candidates(op: str, candidates: torch.Tensor, lengths: torch.Tensor) -> None:
    """Candidates must be those of rows with these lengths: ascending, the newest block last, then -1."""
    c = Checker(op)
    blocks = candidates.shape[1]
    counts = reference.blocks_of(lengths.clamp(min=0).reshape(-1).long())
    held = counts.clamp(max=blocks)
    place = torch.arange(blocks, device=candidates.device)
    is_last = place == held[:, None] - 1
    next_ = torch.nn.functional.pad(candidates[:, 1:], (0, 1)).long()
    is_right = torch.where(is_last, candidates == counts[:, None] - 1, (candidates < next_) & (candidates >= 0))
    is_right = is_right.where(place < held[:, None], candidates == -1)
    wrong = (~is_right).nonzero()
    if wrong.shape[0]:
        row, column = wrong[0].tolist()
        what = f"blocks of {int(counts[row])} in ascending order, the newest among them, then -1"
        c.fail(f"candidates[{row}, {column}]", what, int(candidates[row, column]))


def _check_score_candidates_decode(call: CandidatesDecodeCall) -> None:
    c = Checker("score_candidates_decode")
    check_paged(c, call)
    _check_score_candidates(c, call, call.q.shape[0], call.q.shape[1])


def _cost_score_candidates_decode(call: CandidatesDecodeCall) -> Cost:
    return _candidates_cost(call, call.context_lens.clamp(max=call.max_model_len), call.q.shape[2])


def _validate_score_candidates_decode(call: CandidatesDecodeCall) -> None:
    lengths = call.context_lens.clamp(max=call.max_model_len)
    _validate_candidates("score_candidates_decode", call.candidates, lengths)


def _score_candidates_decode_kernel() -> OpKernel[CandidatesDecodeCall]:
    from cute_kernels.indexer.candidates import DECODE

    return DECODE


_score_candidates_decode = define_op(
    "score_candidates_decode(Tensor q, Tensor? q_scale, Tensor kv_cache, Tensor weights, Tensor context_lens, "
    "Tensor block_tables, Tensor candidates, SymInt max_model_len, str kv_format, Tensor(a!) out, "
    "Tensor(b!) workspace) -> ()",
    CandidatesDecodeCall,
    check=_check_score_candidates_decode,
    reference=reference.score_candidates_decode,
    kernel=_score_candidates_decode_kernel,
    cost=_cost_score_candidates_decode,
    validate=_validate_score_candidates_decode,
)


def _check_score_candidates_prefill(call: CandidatesPrefillCall) -> None:
    c = Checker("score_candidates_prefill")
    check_contiguous(c, call)
    _check_score_candidates(c, call, call.q.shape[0], 1)


def _candidate_lengths(call: CandidatesPrefillCall) -> torch.Tensor:
    lengths = call.cu_seq_len_k_end.long().clamp(max=call.k.shape[0]) - call.cu_seq_len_k_start.long()
    return lengths.clamp(max=call.max_seqlen_k) if call.max_seqlen_k > 0 else lengths


def _cost_score_candidates_prefill(call: CandidatesPrefillCall) -> Cost:
    return _candidates_cost(call, _candidate_lengths(call), call.q.shape[1], call.k.shape[0])


def _validate_score_candidates_prefill(call: CandidatesPrefillCall) -> None:
    _validate_candidates("score_candidates_prefill", call.candidates, _candidate_lengths(call))


def _score_candidates_prefill_kernel() -> OpKernel[CandidatesPrefillCall]:
    from cute_kernels.indexer.candidates import PREFILL

    return PREFILL


_score_candidates_prefill = define_op(
    "score_candidates_prefill(Tensor q, Tensor? q_scale, Tensor k, Tensor k_scale, Tensor weights, "
    "Tensor cu_seq_len_k_start, Tensor cu_seq_len_k_end, Tensor candidates, SymInt max_seqlen_k, Tensor(a!) out, "
    "Tensor(b!) workspace) -> ()",
    CandidatesPrefillCall,
    check=_check_score_candidates_prefill,
    reference=reference.score_candidates_prefill,
    kernel=_score_candidates_prefill_kernel,
    cost=_cost_score_candidates_prefill,
    validate=_validate_score_candidates_prefill,
)


def select_candidate_blocks_workspace_size(rows: int, columns: int) -> int:
    """Bytes of workspace for `select_candidate_blocks` of so many rows of so many scores, or fewer."""
    return rows * chunks.block_row_bytes(columns)


def _check_select_blocks(call: SelectBlocksCall) -> None:
    c = Checker("select_candidate_blocks")
    c.tensor("logits", call.logits, torch.float32, (None, None))
    rows, columns = call.logits.shape
    c.tensor("seq_lens", call.seq_lens, torch.int32, (None, None))
    lengths = call.seq_lens.shape[0] * call.seq_lens.shape[1]
    c.require(lengths == rows, "seq_lens", f"{rows} lengths", f"shape {list(call.seq_lens.shape)}")
    c.tensor("out", call.out, torch.int32, (rows, None))
    c.require(call.out.shape[1] > 0, "out", "at least one column", f"shape {list(call.out.shape)}")
    c.tensor("workspace", call.workspace, (torch.uint8, torch.float32), (None,), contiguous=True)
    needed = select_candidate_blocks_workspace_size(rows, columns)
    have = nbytes(call.workspace)
    expected = f"at least {needed} bytes (select_candidate_blocks_workspace_size)"
    c.require(have >= needed and have % 4 == 0, "workspace", expected, f"{have} bytes")
    offset = call.workspace.storage_offset() * call.workspace.element_size()
    c.require(offset % 16 == 0, "workspace", "a multiple of 16 as its place in memory", f"{offset}")


def _cost_select_blocks(call: SelectBlocksCall) -> Cost:
    """Rows with no more blocks than are selected need no scores."""
    lengths = call.seq_lens.clamp(min=0, max=call.logits.shape[1]).long()
    scored = lengths[reference.blocks_of(lengths) > call.out.shape[1]]
    return Cost(bytes=4 * int(scored.sum()) + nbytes(call.seq_lens, call.out))


def _select_blocks_kernel() -> OpKernel[SelectBlocksCall]:
    from cute_kernels.indexer.block_maxima import KERNEL

    return KERNEL


_select_blocks = define_op(
    "select_candidate_blocks(Tensor logits, Tensor seq_lens, Tensor(a!) out, Tensor(b!) workspace) -> ()",
    SelectBlocksCall,
    check=_check_select_blocks,
    reference=reference.select_candidate_blocks,
    kernel=_select_blocks_kernel,
    cost=_cost_select_blocks,
)


@planned
def select_candidate_blocks(
    logits: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks: int = 2048,
    *,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """The blocks of eight keys in which later layers of V4.1 look for theirs: of each row those with the best scores.

    Block m of a row has keys 8 m to 8 m + 7, as far as the row sees them, and is as good as the largest of their
    scores; NaN does not count, and infinity as the largest finite number. The newest block, the row's last one, comes
    before all others. Of equally good blocks the lower one wins, and blocks of NaN alone come last.

    logits       fp32 [rows, columns], row-strided: column j is key j of the row
    seq_lens     int32 [B, next_n] with B * next_n = rows, or [rows]: keys that each row sees, <= 0 for none, at most
                 the columns of logits count
    num_blocks   to select
    out          int32 [rows, num_blocks], row-strided; mutated. None: allocated
    workspace    uint8 or fp32, one dimension, contiguous, 16-byte aligned, of
                 `select_candidate_blocks_workspace_size`; mutated. None: allocated

    Returns int32 [rows, num_blocks]: the numbers of the min(num_blocks, ceil(length / 8)) blocks, ascending, then -1.
    Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("select_candidate_blocks")
    c.tensor("logits", logits, torch.float32, (None, None))
    c.tensor("seq_lens", seq_lens, torch.int32)
    rows, columns = logits.shape
    if seq_lens.dim() == 1:
        seq_lens = seq_lens[:, None]
    c.ints(num_blocks=num_blocks)
    c.require(num_blocks > 0, "num_blocks", "a positive number", num_blocks)
    if out is None:
        out = logits.new_empty((rows, num_blocks), dtype=torch.int32)
    else:
        c.tensor("out", out, torch.int32, (None, None))
        c.require(out.shape[1] == num_blocks, "out", f"num_blocks = {num_blocks} columns", f"shape {list(out.shape)}")
    if workspace is None:
        workspace = logits.new_empty((select_candidate_blocks_workspace_size(rows, columns) // 4,))
    _select_blocks(SelectBlocksCall(logits, seq_lens, out, workspace))
    return out
