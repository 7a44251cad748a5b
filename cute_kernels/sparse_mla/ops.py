# SPDX-License-Identifier: Apache-2.0
"""Sparse MLA attention: what users call. Of each op checks, cost, schema, function.

sparse_mla_decode          decode rows, straight from paged caches
sparse_mla_prefill         prefill rows, from a workspace of gathered rows
sparse_mla_prefill_paged   prefill rows, straight from both paged caches
sparse_mla_mixed           rows of two plain caches, named by one table of window and compressed slots
merge_attention_states     partial results, of splits or of ranks
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime import checks
from cute_kernels.runtime.arch import arch_of, multiprocessors
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.key import OpKernel
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.runtime.plans import planned
from cute_kernels.sparse_mla import arguments, converted, gathered, reference, schedule
from cute_kernels.sparse_mla.call import (
    MOST_CONVERTED_BYTES,
    DecodeCall,
    MergeCall,
    MixedCall,
    PagedCall,
    PrefillCall,
)
from cute_kernels.sparse_mla.selection import (
    decode_selections,
    mixed_selections,
    paged_selections,
    prefill_selections,
)

__all__ = [
    "merge_attention_states",
    "sparse_mla_decode",
    "sparse_mla_decode_workspace_size",
    "sparse_mla_mixed",
    "sparse_mla_mixed_workspace_size",
    "sparse_mla_prefill",
    "sparse_mla_prefill_paged",
    "sparse_mla_prefill_paged_form",
    "sparse_mla_prefill_paged_workspace_size",
]

# ---- decode


LONG_ROWS = ("auto", "whole", "halves")


def _check_decode(call: DecodeCall) -> None:
    c = Checker("sparse_mla_decode")
    arguments.check_query(c, "q", call.q, (torch.bfloat16,), ("b", "s_q"))
    fmt = formats.get_format(c, "kv_format", call.kv_format, *arguments.PAGED_FORMATS)
    arguments.check_cache(c, "k_cache", call.k_cache, fmt)
    c.tensor("indices", call.indices, torch.int32, ("b", "s_q", None))
    arguments.check_lengths(c, "topk_length", call.topk_length)
    arguments.check_sink(c, "attn_sink", call.attn_sink)
    fmt = formats.get_format(c, "extra_kv_format", call.extra_kv_format, *arguments.EXTRA_FORMATS)
    table = {"extra_block_table": call.extra_block_table, "extra_length": call.extra_length}
    picked = {"extra_indices": call.extra_indices, "extra_topk_length": call.extra_topk_length}
    if call.extra_k_cache is None:
        arguments.check_absent(c, "without extra_k_cache", **picked, **table)
    else:
        arguments.check_cache(c, "extra_k_cache", call.extra_k_cache, fmt)
        if call.extra_indices is not None:
            arguments.check_absent(c, "with extra_indices", **table)
            c.tensor("extra_indices", call.extra_indices, torch.int32, ("b", "s_q", None))
            arguments.check_lengths(c, "extra_topk_length", call.extra_topk_length)
        else:
            arguments.check_absent(c, "without extra_indices", **picked)
            c.require(call.extra_block_table is not None, "extra_indices", "indices, or extra_block_table", "neither")
            c.tensor("extra_block_table", call.extra_block_table, torch.int32, ("b", None))
            c.tensor("extra_length", call.extra_length, torch.int32, ("b", "s_q"))
    arguments.check_splits(c, call.num_splits, call.split_tokens)
    c.require(0 <= call.constant_lists <= 2, "constant_lists", "0, 1 or 2", call.constant_lists)
    c.require(call.long_rows in LONG_ROWS, "long_rows", f"one of {', '.join(LONG_ROWS)}", repr(call.long_rows))
    if call.long_rows == "halves":
        c.require(call.num_splits == 0, "num_splits", "0 with long_rows 'halves'", call.num_splits)
        c.require(call.split_tokens == 0, "split_tokens", "0 with long_rows 'halves'", call.split_tokens)
    if not arguments.check_quantized(c, call.q, call.out, call.positions, call.cos_sin_cache, call.out_scale):
        c.tensor("out", call.out, (torch.bfloat16, torch.float32), ("b", "s_q", "h", formats.HEAD_DIM))
        arguments.check_partial(c, call.out, call.attn_sink)
    arguments.check_q_norm(c, call.q, call.q_squares, call.q_norm_eps, call.positions)
    arguments.check_logs(c, "lse", call.lse, ("b", "h", "s_q"))
    c.tensor("workspace", call.workspace, (torch.uint8, torch.float32), (None,), optional=True, contiguous=True)
    if call.num_splits or call.split_tokens:
        tiles = call.max_tiles
        needed = schedule.workspace_bytes(call.rows, call.q.shape[2], tiles, call.num_splits, call.split_tokens, sms=0)
        have = nbytes(call.workspace)
        c.require(have >= needed, "workspace", f"at least {needed} bytes (sparse_mla_decode_workspace_size)", have)


def _cost_decode(call: DecodeCall) -> Cost:
    return arguments.attention_cost(call.q, call.out, decode_selections(call))


def _decode_kernel() -> OpKernel[DecodeCall]:
    from cute_kernels.sparse_mla.launch import DECODE

    return DECODE


_decode = define_op(
    "sparse_mla_decode(Tensor q, Tensor k_cache, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "float softmax_scale, str kv_format, Tensor? extra_k_cache, Tensor? extra_indices, Tensor? extra_topk_length, "
    "Tensor? extra_block_table, Tensor? extra_length, str extra_kv_format, SymInt num_splits, SymInt split_tokens, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, int constant_lists, str long_rows, Tensor? q_squares, "
    "float q_norm_eps, Tensor? positions, Tensor? cos_sin_cache, Tensor(d!)? out_scale) -> ()",
    DecodeCall,
    check=_check_decode,
    reference=reference.sparse_mla_decode,
    kernel=_decode_kernel,
    cost=_cost_decode,
)


def sparse_mla_decode_workspace_size(
    b: int,
    s_q: int,
    h: int,
    topk: int,
    extra_columns: int = 0,
    *,
    num_splits: int = 0,
    split_tokens: int = 0,
    device: torch.device | str | None = None,
) -> int:
    """Bytes of workspace for `sparse_mla_decode`: enough for every call with at most so many rows and columns.

    b, s_q, h       of q
    topk            columns of indices
    extra_columns   columns of extra_indices, or those of extra_block_table times the rows of a page; 0: no second list
    num_splits, split_tokens
                    as in the call
    device          where the call runs; default: the current CUDA device. It matters if both of them are 0: a GPU is
                    asked how many multiprocessors it has, and on a CPU rows are not split

    0 where rows are not split. With both 0 the size is bounded whatever the batch: 35 MB on an H200.
    """
    tiles = schedule.num_tiles(topk) + schedule.num_tiles(extra_columns)
    sms = 0 if num_splits or split_tokens else _multiprocessors(device)
    return schedule.workspace_bytes(b * s_q, h, tiles, num_splits, split_tokens, sms)


def _multiprocessors(device: torch.device | str | None) -> int:
    """Of a CUDA device; 0 of a CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    return multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def _allocate_workspace(
    q: torch.Tensor, tiles: int, num_splits: int, split_tokens: int, may_halve: bool
) -> torch.Tensor | None:
    """Workspace for a call, or None if its rows are not split, or ask for splits that `_check_decode` refuses.
    may_halve: whether long ones may be cut in halves"""
    b, s_q, h = q.shape[:3]
    if split_tokens < 0:
        return None
    if num_splits or split_tokens:
        size = schedule.workspace_bytes(b * s_q, h, tiles, num_splits, split_tokens, sms=0)
    else:
        sms = _multiprocessors(q.device)
        size = schedule.split_bytes(b * s_q, h, tiles, sms) if sms else 0
        if may_halve and sms:
            size = max(size, schedule.kept_bytes(b * s_q, h, tiles, sms))
    return torch.empty(size // 4, dtype=torch.float32, device=q.device) if size else None


@planned
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
    return_lse: bool = True,
    workspace: torch.Tensor | None = None,
    constant_lists: int = 0,
    long_rows: str = "auto",
    q_norm: tuple[torch.Tensor, float] | None = None,
    output_quant: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Any]:
    """Attention of each query row to rows of one or two paged caches that it names by slot (or, densely, by page).

    With s_n = softmax_scale * (q . k_n) over the rows n attended to and lse = ln sum_n exp(s_n):
    out = sum_n exp(s_n - lse) k_n / (1 + exp(attn_sink - lse)). K and V are the same 512 values.

    q                  bf16 [b, s_q, h, 512], any strides with a dense last dimension, 1 <= h <= 128
    k_cache            [num_blocks, rows per page, row elements] of kv_format; uint8 with 584 elements for fp8_ds_mla,
                       with 528 for mxfp8_v41 and 288 for nvfp4_v41, bf16 with 512 for plain_bf16; any page stride that
                       holds a page. Kernels need multiples of 16 bytes, Blackwell's own of 576 for fp8_ds_mla, as
                       `formats.FP8_DS_MLA.allocate` makes them
    indices            int32 [b, s_q, topk], topk >= 0: slots of k_cache. A value that is not a row of the cache is
                       skipped, a value that appears twice counts twice
    topk_length        int32 [b] or [b, s_q]: only columns below it count; None: all
    attn_sink          fp32 [h]: a logit without a value; -inf or None has no effect, +inf gives out = 0
    softmax_scale      default 512^-0.5
    kv_format          record format id of k_cache: fp8_ds_mla/1, mxfp8_v41/1 or plain_bf16/1. Kernels take mxfp8_v41/1
                       and nvfp4_v41/1, and their split forms, on sm_90a, beside fp8_ds_mla/1 or each other
    extra_k_cache      a second cache of extra_kv_format, which may be nvfp4_v41/1 too, attended to in the same softmax;
                       its rows are named either by
      extra_indices      int32 [b, s_q, extra_topk], with
      extra_topk_length  int32 [b] or [b, s_q] or None, as above; or by
      extra_block_table  int32 [b, pages] and
      extra_length       int32 [b, s_q]: entries 0 .. extra_length - 1, entry e in row e % (rows per page) of page
                         extra_block_table[b, e // (rows per page)]; pages outside the cache are skipped
    num_splits         how many splits a kernel cuts a row's columns into; 0: chosen from the shapes of the call, and no
                       more than the workspace holds
    split_tokens       columns of a split, a multiple of 64, instead of num_splits: then a row's bits do not depend on
                       the batch around it. 0: not fixed. Neither can change the result by more than rounding
    out                [b, s_q, h, 512], any strides with a dense last dimension; bf16, or fp32 for partial results to
                       be merged (then attn_sink must be None); mutated
    lse                fp32 [b, h, s_q], any strides; mutated
    return_lse         False: lse is written only if it is given, and nothing is allocated for it
    workspace          uint8 or fp32, one dimension, contiguous, 16-byte aligned: scratch memory for splits of rows;
                       `sparse_mla_decode_workspace_size` bytes, or more, if num_splits or split_tokens is given;
                       mutated. None: allocated if rows may be split
    constant_lists     what a kernel may read before the kernel ahead of it on the stream has ended, and others ahead of
                       that one: 0: nothing; 1: lengths, and indices; 2: the extra list or block table, too. The caller
                       says that nothing writes those which may still run then. That holds for lists of a step's
                       metadata, if what writes them lets no other kernel begin before it has ended; not for the picks
                       of a top-k just ahead
    long_rows          "auto": where rows of two lists are not split and are fewer than a kernel takes at a time, those
                       of 768 columns and more are cut in halves, so that multiprocessors without a row can do half of
                       the longest ones; "halves": the same, and an error where no kernel does; "whole": they are not,
                       3% faster if all rows are as long (docs/ops.md has the price). In either way what is summed where
                       follows from a row's own length and from the shapes of the call
    q_norm             (squares fp32 [T, h * 4], eps) with T = b * s_q: the queries are as `fp8_linear_squares` made
                       them, squares the sums that came with them. Their last 64 columns are first rotated by positions
                       and cos_sin_cache of output_quant and rounded to bf16; their norm, one factor for a head, comes
                       behind the products: s_n = softmax_scale * (q . k_n) / sqrt(sum of the head's four / 512 + eps).
                       q itself stays as it is. Only with output_quant; on a GPU for more than 16 heads
    output_quant       (positions int64 [T], cos_sin_cache fp32 [rows, 64], out_scale fp32) with T = b * s_q: the output
                       is stored as `fused_inv_rope_fp8_quant` would make it of the bf16 output, byte for byte.
                       Then out must be given, e4m3 [T, groups, heads of a group * 512] with a dense last dimension, and
                       out_scale is the memory of `output_scale_shape`, padding included; both mutated. Row i * s_q + j
                       is at positions[i * s_q + j]; a position outside the table takes its nearest row. On sm_90a, with
                       caches of fp8_ds_mla/1 or of V4.1's formats

    Returns (out, lse), or (out, None) if nobody asks for lse, the natural logarithm, sink not included. A row that
    attends to nothing has out = 0 and lse = +inf. Rows not attended to are not read into the result, whatever they
    hold. Raises ValueError or TypeError on arguments that do not fit.

    Strides do not change a result by more than rounding, but they can change its bits: on sm_90a, with up to 16 heads
    and num_splits 0 or 1, q and a bf16 out whose rows are all equally far apart (stride(0) == s_q * stride(1), or b or
    s_q is 1) may take another kernel than views with gaps between requests. Whoever compares bits, as of one step run
    twice, gives both calls tensors of the same layout.
    """
    if out is None or lse is None or workspace is None:
        arguments.check_query(Checker("sparse_mla_decode"), "q", q, (torch.bfloat16,), ("b", "s_q"))
    if softmax_scale is None:
        softmax_scale = formats.HEAD_DIM**-0.5
    if out is None:
        if output_quant is not None:
            Checker("sparse_mla_decode").fail("out", "a tensor with output_quant", "None", TypeError)
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    if lse is None and return_lse:
        lse = torch.empty(q.shape[0], q.shape[-2], q.shape[1], dtype=torch.float32, device=q.device)
    if workspace is None:
        Checker("sparse_mla_decode").ints(num_splits=num_splits, split_tokens=split_tokens)
        tiles = arguments.list_tiles(indices, extra_k_cache, extra_indices, extra_block_table)
        may_halve = long_rows != "whole" and extra_k_cache is not None
        workspace = _allocate_workspace(q, tiles, num_splits, split_tokens, may_halve)
    _decode(
        DecodeCall(
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
            workspace,
            constant_lists,
            long_rows,
            *arguments.norm_arguments(q_norm, "sparse_mla_decode"),
            *arguments.quant_tensors(output_quant, "sparse_mla_decode"),
        )
    )
    return out, lse


# ---- prefill


def _check_results(c: Checker, tokens: str, call: PrefillCall | PagedCall) -> None:
    if not arguments.check_quantized(c, call.q, call.out, call.positions, call.cos_sin_cache, call.out_scale):
        c.tensor("out", call.out, torch.bfloat16, (tokens, "h", formats.HEAD_DIM))
    arguments.check_logs(c, "max_logits", call.max_logits, (tokens, "h"))
    arguments.check_logs(c, "lse", call.lse, (tokens, "h"))


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


def _check_prefill(call: PrefillCall) -> None:
    c = Checker("sparse_mla_prefill")
    arguments.check_query(c, "q", call.q, (torch.bfloat16,), ("s_q",))
    c.tensor("kv", call.kv, torch.bfloat16, (None, 1, formats.HEAD_DIM))
    arguments.check_cache(c, "kv", call.kv, formats.PLAIN_BF16)
    c.tensor("indices", call.indices, torch.int32, ("s_q", 1, None))
    arguments.check_sink(c, "attn_sink", call.attn_sink)
    c.tensor("topk_length", call.topk_length, torch.int32, ("s_q",), optional=True)
    _check_results(c, "s_q", call)
    arguments.check_q_norm(c, call.q, call.q_squares, call.q_norm_eps, call.positions)


def _cost_prefill(call: PrefillCall) -> Cost:
    return arguments.attention_cost(call.q, call.out, prefill_selections(call))


def _prefill_kernel() -> OpKernel[PrefillCall]:
    from cute_kernels.sparse_mla.launch import PREFILL

    return PREFILL


_prefill = define_op(
    "sparse_mla_prefill(Tensor q, Tensor kv, Tensor indices, float sm_scale, Tensor? attn_sink, Tensor? topk_length, "
    "Tensor(a!) out, Tensor(b!)? max_logits, Tensor(c!)? lse, Tensor? q_squares, float q_norm_eps, "
    "Tensor? positions, "
    "Tensor? cos_sin_cache, Tensor(d!)? out_scale) -> ()",
    PrefillCall,
    check=_check_prefill,
    reference=reference.sparse_mla_prefill,
    cost=_cost_prefill,
    kernel=_prefill_kernel,
)


@planned
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

    Returns (out, max_logits, lse), with None for what nobody asks for: max_logits = max_n s_n, NaN left out; lse is the
    natural logarithm; neither includes the sink. A row that attends to nothing has out = 0, max_logits = -inf and
    lse = +inf. Rows of kv not attended to are not read into the result, whatever they hold. Raises ValueError or
    TypeError on arguments that do not fit.
    """
    if d_v != formats.HEAD_DIM:
        Checker("sparse_mla_prefill").fail("d_v", str(formats.HEAD_DIM), d_v)
    out, max_logits, lse = _results("sparse_mla_prefill", q, out, max_logits, lse, return_lse, output_quant)
    quant = arguments.quant_tensors(output_quant, "sparse_mla_prefill")
    norm = arguments.norm_arguments(q_norm, "sparse_mla_prefill")
    _prefill(PrefillCall(q, kv, indices, sm_scale, attn_sink, topk_length, out, max_logits, lse, *norm, *quant))
    return out, max_logits, lse


# ---- paged prefill

PREFILL_FORMS = ("auto", "gathered", "paged")
"""How it runs: rows gathered first, or read from the pages; as is faster."""


def _check_paged(call: PagedCall) -> None:
    c = Checker("sparse_mla_prefill_paged")
    arguments.check_query(c, "q", call.q, (torch.bfloat16,), ("T",))
    fmt = formats.get_format(c, "kv_format", call.kv_format, *arguments.PAGED_FORMATS)
    arguments.check_cache(c, "swa_cache", call.swa_cache, fmt)
    arguments.check_batch(c, "query_start_loc", call.query_start_loc, call.seq_lens)
    c.tensor("swa_block_table", call.swa_block_table, torch.int32, ("R", None))
    c.require(call.window_size >= 1, "window_size", "a positive number", call.window_size)
    fmt = formats.get_format(c, "compressed_kv_format", call.compressed_kv_format, *arguments.EXTRA_FORMATS)
    if call.compressed_cache is None:
        absent = {"compressed_block_table": call.compressed_block_table, "topk_indices": call.topk_indices}
        arguments.check_absent(c, "without compressed_cache", **absent)
    else:
        arguments.check_cache(c, "compressed_cache", call.compressed_cache, fmt)
        c.tensor("compressed_block_table", call.compressed_block_table, torch.int32, ("R", None))
        c.require(call.compress_ratio >= 1, "compress_ratio", "a positive number", call.compress_ratio)
        c.tensor("topk_indices", call.topk_indices, torch.int32, ("T", None), optional=True)
    arguments.check_sink(c, "attn_sink", call.attn_sink)
    arguments.check_splits(c, call.num_splits, call.split_tokens)
    c.tensor("workspace", call.workspace, (torch.uint8, torch.float32), (None,), optional=True, contiguous=True)
    _check_results(c, "T", call)
    c.require(call.form in PREFILL_FORMS, "form", f"one of {PREFILL_FORMS}", call.form)
    if call.form == "gathered":
        c.require(call.num_splits <= 1, "num_splits", "0 or 1 with form 'gathered'", call.num_splits)
        c.require(call.split_tokens == 0, "split_tokens", "0 with form 'gathered'", call.split_tokens)
        own = formats.FP8_DS_MLA.id
        c.require(call.kv_format == own, "kv_format", f"{own} with form 'gathered'", call.kv_format)
        compressed = call.formats[1]
        c.require(compressed == own, "compressed_kv_format", f"{own} with form 'gathered'", compressed)
        if call.q.device.type == "cuda":
            needed, have = call.gathered_shape.nbytes, nbytes(call.workspace)
            name = "sparse_mla_prefill_paged_workspace_size"
            c.require(have >= needed, "workspace", f"at least {needed} bytes ({name})", have)
    else:
        c.require(call.q_squares is None, "q_norm", "None without form 'gathered'", "a tensor and a number")
    arguments.check_q_norm(c, call.q, call.q_squares, call.q_norm_eps, call.positions)


def _cost_paged(call: PagedCall) -> Cost:
    return arguments.attention_cost(call.q, call.out, paged_selections(call))


def _validate_paged(call: PagedCall) -> None:
    checks.ascending("sparse_mla_prefill_paged", "query_start_loc", call.query_start_loc)


def _prefill_paged_kernel() -> OpKernel[PagedCall]:
    from cute_kernels.sparse_mla.launch import PAGED

    return PAGED


_prefill_paged = define_op(
    "sparse_mla_prefill_paged(Tensor q, Tensor swa_cache, Tensor swa_block_table, Tensor query_start_loc, "
    "Tensor seq_lens, float sm_scale, SymInt window_size, Tensor? compressed_cache, Tensor? compressed_block_table, "
    "SymInt compress_ratio, Tensor? topk_indices, Tensor? attn_sink, str kv_format, str compressed_kv_format, "
    "SymInt num_splits, SymInt split_tokens, Tensor(a!) out, Tensor(b!)? max_logits, Tensor(c!)? lse, "
    "Tensor(d!)? workspace, str form, Tensor? q_squares, float q_norm_eps, Tensor? positions, Tensor? cos_sin_cache, "
    "Tensor(e!)? out_scale) -> ()",
    PagedCall,
    check=_check_paged,
    reference=reference.sparse_mla_prefill_paged,
    cost=_cost_paged,
    kernel=_prefill_paged_kernel,
    validate=_validate_paged,
)


def sparse_mla_prefill_paged_workspace_size(
    rows: int, requests: int, entries: int = 0, columns: int | None = None, *, window_size: int = 128
) -> int:
    """Bytes of workspace for `sparse_mla_prefill_paged`, enough for calls of at most so many rows of requests.

    entries   columns of compressed_block_table times the rows of a page: contexts that are known to be shorter take
              less with a table that is cut
    columns   of topk_indices; None: all entries count
    """
    return gathered.GatheredShape.of(
        rows, requests, window_size, entries, entries if columns is None else columns
    ).nbytes


def sparse_mla_prefill_paged_form(
    rows: int,
    requests: int,
    heads: int,
    entries: int = 0,
    columns: int | None = None,
    *,
    window_size: int = 128,
    may_split: bool = True,
    device: torch.device,
) -> str:
    """The faster form of `sparse_mla_prefill_paged` for a call of that shape: "gathered" or "paged". Where nothing has
    been measured, "gathered".

    may_split   False: num_splits is 1, or there is an output_quant
    device      where the call runs; others but heads as of `sparse_mla_prefill_paged_workspace_size`
    """
    if device.type != "cuda" or arch_of(device.index or 0) not in gathered.AUTO_GATHER_ARCHS:
        return "gathered"
    width = entries if columns is None else min(columns, entries)
    shape = gathered.GatheredShape.of(rows, requests, window_size, entries, width)
    tiles = schedule.num_tiles(width + window_size)
    sms = multiprocessors(device.index or 0)
    return "gathered" if gathered.is_gathered_faster(shape, heads, tiles, sms, may_split) else "paged"


MOST_ALLOCATED = 1 << 27
"""Bytes of workspace that the function users call allocates where the op may as well do without."""


def _allocate_gathered(call: PagedCall) -> torch.Tensor | None:
    """Workspace for a call whose rows are gathered first, or None. Its arguments need not be checked."""
    matrices = [x for x in (*call.caches.values(), *call.tables.values(), call.topk_indices) if x is not None]
    is_whole = (call.compressed_cache is None) == (call.compressed_block_table is None)
    if call.q.device.type != "cuda" or not is_whole:
        return None
    if not all(isinstance(x, torch.Tensor) and x.dim() >= 2 for x in matrices):
        return None
    if not isinstance(call.seq_lens, torch.Tensor) or call.seq_lens.dim() != 1 or call.window_size < 1:
        return None
    if call.num_splits > 1 or call.split_tokens or not call.is_countable:
        return None
    device_index = call.q.get_device()
    if call.gathered_shape.rows >= arguments.MOST_NUMBERS:
        return None
    if not call.is_gathered(arch_of(device_index), multiprocessors(device_index), MOST_ALLOCATED):
        return None
    return torch.empty(call.gathered_shape.nbytes, dtype=torch.uint8, device=call.q.device)


@planned
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
    workspace: torch.Tensor | None = None,
    form: str = "auto",
    q_norm: tuple[torch.Tensor, float] | None = None,
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
    kv_format                record format id of swa_cache: fp8_ds_mla/1, mxfp8_v41/1 (or split) or plain_bf16/1
    compressed_kv_format     record format id of compressed_cache, likewise, or nvfp4_v41/1 (or split). V4.1's own are
                             the portable kernel's, on any GPU; split ones are for a CPU
    num_splits               how many splits a kernel cuts a row's keys into; 0: chosen from the shapes of the call, and
                             1 unless there are few rows. Other numbers than 0 are kept in any batch
    split_tokens             keys of a split, multiple of 64, instead of num_splits: then a row's bits do not depend on
                             the batch around it, nor on how wide lists and tables are. 0: not fixed. Neither can change
                             the result by more than rounding. Hopper's kernel for fp8_ds_mla/1 has up to 8 splits of a
                             row; elsewhere num_splits = 0 is 1, and more are not supported
    out                      bf16 [T, h, 512], any strides with a dense last dimension; mutated
    max_logits, lse          fp32 [T, h], any strides; mutated
    return_lse               as in `sparse_mla_prefill`
    workspace                uint8 or fp32 [any], where rows are gathered (`sparse_mla_prefill_paged_workspace_size`);
                             None: what is needed is allocated, with form "auto" up to 128 MiB
    form                     "gathered": rows of fp8_ds_mla caches are made bf16 first, once for all query rows, and
                             num_splits is 0 or 1; "paged": they are read from the pages; "auto": as is faster by the
                             shapes of the call, if there is room and neither num_splits nor split_tokens is given
    q_norm                   as in `sparse_mla_prefill`, with form "gathered"
    output_quant             as in `sparse_mla_prefill`, with positions of T rows; with fp8_ds_mla caches, and rows that
                             are not cut: num_splits = 0 is 1 then

    Returns (out, max_logits, lse) as `sparse_mla_prefill`. Raises ValueError or TypeError on arguments that do not fit.
    """
    out, max_logits, lse = _results("sparse_mla_prefill_paged", q, out, max_logits, lse, return_lse, output_quant)
    call = PagedCall(
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
        workspace,
        form,
        *arguments.norm_arguments(q_norm, "sparse_mla_prefill_paged"),
        *arguments.quant_tensors(output_quant, "sparse_mla_prefill_paged"),
    )
    if workspace is None:
        workspace = _allocate_gathered(call)
        call = call if workspace is None else call._replace(workspace=workspace)
    _prefill_paged(call)
    return out, max_logits, lse


# ---- mixed

MIXED_FORMS = ("auto", "converted", "direct")
"""How rows of e4m3 caches become what tensor cores multiply: all of them first, or each for every query row; as is
faster."""


def _check_mixed(call: MixedCall) -> None:
    c = Checker("sparse_mla_mixed")
    fmt = formats.get_format(c, "kv_format", call.kv_format, formats.PLAIN_BF16, formats.PLAIN_FP8)
    arguments.check_query(c, "query", call.query, (fmt.dtype,), ("sum_q",))
    arguments.check_cache(c, "swa_kv_cache", call.swa_kv_cache, fmt)
    c.require(call.window_size >= 1, "window_size", "a positive number", call.window_size)
    c.tensor("sparse_indices", call.sparse_indices, torch.int32, ("sum_q", None))
    width = call.sparse_indices.shape[1]
    if call.compressed_kv_cache is None:
        expected = f"{call.window_size} columns (window_size) without compressed_kv_cache"
        c.require(width == call.window_size, "sparse_indices", expected, list(call.sparse_indices.shape))
    else:
        expected = f"at least {call.window_size} columns (window_size)"
        c.require(width >= call.window_size, "sparse_indices", expected, list(call.sparse_indices.shape))
        arguments.check_cache(c, "compressed_kv_cache", call.compressed_kv_cache, fmt)
    c.tensor("sparse_topk_lens", call.sparse_topk_lens, torch.int32, ("sum_q",))
    arguments.check_batch(c, "cum_seq_lens_q", call.cum_seq_lens_q, call.seq_lens)
    arguments.check_sink(c, "sinks", call.sinks)
    c.tensor("out", call.out, torch.bfloat16, ("sum_q", "h", formats.HEAD_DIM))
    arguments.check_logs(c, "lse", call.lse, ("sum_q", "h"))
    c.tensor("workspace", call.workspace, (torch.uint8, torch.float32), (None,), optional=True, contiguous=True)
    c.require(call.form in MIXED_FORMS, "form", f"one of {MIXED_FORMS}", call.form)
    if call.form == "converted":
        _check_converted(c, call)
        if call.query.device.type == "cuda" and arch_of(call.query.get_device()) in converted.CONVERT_ARCHS:
            needed, have = call.converted_bytes, nbytes(call.workspace)
            expected = f"at least {needed} bytes (sparse_mla_mixed_workspace_size)"
            c.require(have >= needed, "workspace", expected, have)


def _check_converted(c: Checker, call: MixedCall) -> None:
    """What form "converted" takes, before anything is allocated for it."""
    own = formats.PLAIN_FP8.id
    c.require(call.kv_format == own, "kv_format", f"{own} with form 'converted'", call.kv_format)
    heads = call.query.shape[1]
    c.require(
        heads >= converted.LEAST_HEADS, "query", f"at least {converted.LEAST_HEADS} heads with form 'converted'", heads
    )
    most = MOST_CONVERTED_BYTES // converted.CONVERTED_ROW_BYTES
    expected = f"caches of at most {most} rows together with form 'converted'"
    name = "swa_kv_cache" if call.compressed_kv_cache is None else "compressed_kv_cache"
    c.require(call.cache_rows <= most, name, expected, call.cache_rows)


def _cost_mixed(call: MixedCall) -> Cost:
    return arguments.attention_cost(call.query, call.out, mixed_selections(call))


def _validate_mixed(call: MixedCall) -> None:
    checks.ascending("sparse_mla_mixed", "cum_seq_lens_q", call.cum_seq_lens_q)


def _mixed_kernel() -> OpKernel[MixedCall]:
    from cute_kernels.sparse_mla.launch import MIXED

    return MIXED


_mixed = define_op(
    "sparse_mla_mixed(Tensor query, Tensor swa_kv_cache, Tensor sparse_indices, Tensor? compressed_kv_cache, "
    "Tensor sparse_topk_lens, Tensor seq_lens, Tensor cum_seq_lens_q, float bmm1_scale, float bmm2_scale, "
    "Tensor? sinks, SymInt window_size, str kv_format, Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, "
    "str form) -> ()",
    MixedCall,
    check=_check_mixed,
    reference=reference.sparse_mla_mixed,
    cost=_cost_mixed,
    kernel=_mixed_kernel,
    validate=_validate_mixed,
)


def sparse_mla_mixed_workspace_size(swa_rows: int, compressed_rows: int = 0) -> int:
    """Bytes of workspace for `sparse_mla_mixed` over caches with at most so many rows, those of all pages. It has to be
    16-byte aligned on a GPU. Raises ValueError on negative numbers."""
    c = Checker("sparse_mla_mixed_workspace_size")
    for name, rows in (("swa_rows", swa_rows), ("compressed_rows", compressed_rows)):
        c.require(rows >= 0, name, "a number of rows", rows)
    return (swa_rows + compressed_rows) * converted.CONVERTED_ROW_BYTES


def _allocate_converted(call: MixedCall) -> torch.Tensor | None:
    """Workspace for a call whose rows are converted first, or None. Its arguments need not be checked."""
    matrices = [*call.caches.values(), call.sparse_indices]
    if call.query.device.type != "cuda" or not all(isinstance(x, torch.Tensor) and x.dim() >= 2 for x in matrices):
        return None
    if call.form == "converted":
        _check_converted(Checker("sparse_mla_mixed"), call)
    device_index = call.query.get_device()
    arch = arch_of(device_index)
    if arch not in converted.CONVERT_ARCHS or not call.is_converted(
        arch, multiprocessors(device_index), MOST_ALLOCATED
    ):
        return None
    return torch.empty(call.converted_bytes, dtype=torch.uint8, device=call.query.device)


@planned
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
    workspace: torch.Tensor | None = None,
    form: str = "auto",
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
    workspace             uint8 or fp32 [any], where rows are converted (`sparse_mla_mixed_workspace_size`); None: what
                          is needed is allocated, with form "auto" up to 128 MiB
    form                  "converted": rows of e4m3 caches are made f16 first, all of them once, with the same bits; for
                          more than 32 heads, of GPUs on Hopper. "direct": each for every query row that has it.
                          "auto": as is faster by shapes alone, the width of sparse_indices included, if there is room

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
    call = MixedCall(
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
        workspace,
        form,
    )
    if workspace is None:
        call = call._replace(workspace=_allocate_converted(call))
    _mixed(call)
    return out, lse


# ---- merge


_MERGED = (torch.bfloat16, torch.float32)


def _check_merge(call: MergeCall) -> None:
    c = Checker("merge_attention_states")
    arguments.check_query(c, "outs", call.outs, _MERGED, ("n", "b", "s_q"))
    c.require(call.outs.shape[0] >= 1, "outs", "at least one part", f"shape {list(call.outs.shape)}")
    c.tensor("lses", call.lses, torch.float32, ("n", "b", "h", "s_q"))
    arguments.check_sink(c, "attn_sink", call.attn_sink)
    c.tensor("out", call.out, _MERGED, ("b", "s_q", "h", formats.HEAD_DIM))
    arguments.check_partial(c, call.out, call.attn_sink)
    arguments.check_logs(c, "lse", call.lse, ("b", "h", "s_q"))


def _cost_merge(call: MergeCall) -> Cost:
    return Cost(bytes=nbytes(call.outs, call.lses, call.out, call.lse), flops=2 * call.outs.numel())


def _merge_kernel() -> OpKernel[MergeCall]:
    from cute_kernels.sparse_mla.combine import KERNEL

    return KERNEL


_merge = define_op(
    "merge_attention_states(Tensor outs, Tensor lses, Tensor? attn_sink, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    MergeCall,
    check=_check_merge,
    reference=reference.merge_attention_states,
    kernel=_merge_kernel,
    cost=_cost_merge,
)


@planned
def merge_attention_states(
    outs: torch.Tensor,
    lses: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, Any]:
    """Merge attention over disjoint sets of rows, computed without sink, into attention over all of them.

    lse = ln sum_i exp(lses[i]); out = sum_i exp(lses[i] - lse) outs[i] / (1 + exp(attn_sink - lse)). A part whose lse
    is infinite is empty: its out is not looked at.

    outs        fp32 or bf16 [n, b, s_q, h, 512], n >= 1 parts, any strides with a dense last dimension, 1 <= h <= 128
    lses        fp32 [n, b, h, s_q], natural logarithm, sink not included
    attn_sink   fp32 [h]: a logit without a value, applied once; -inf or None has no effect, +inf gives out = 0
    out         [b, s_q, h, 512], any strides with a dense last dimension; bf16, or fp32 for a result that is merged
                again (then attn_sink must be None); mutated
    lse         fp32 [b, h, s_q], any strides; mutated
    return_lse  False: lse is written only if it is given

    Returns (out, lse), or (out, None) if nobody asks for lse; it does not include the sink. Where every part is empty,
    out = 0 and lse = +inf. Raises ValueError or TypeError on arguments that do not fit.
    """
    c = Checker("merge_attention_states")
    arguments.check_query(c, "outs", outs, _MERGED, ("n", "b", "s_q"))
    c.tensor("lses", lses, torch.float32, ("n", "b", "h", "s_q"))
    if out is None:
        out = torch.empty(outs.shape[1:], dtype=torch.bfloat16, device=outs.device)
    if lse is None and return_lse:
        lse = torch.empty(lses.shape[1:], dtype=torch.float32, device=outs.device)
    _merge(MergeCall(outs, lses, attn_sink, out, lse))
    return out, lse
