"""Sparse attention of decode rows, straight from paged caches."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.runtime.arch import multiprocessors
from cute_kernels.runtime.checks import Checker
from cute_kernels.runtime.ops import Cost, define_op, nbytes
from cute_kernels.sparse_mla import arguments, reference, schedule
from cute_kernels.sparse_mla.selection import decode_selections

__all__ = ["sparse_mla_decode", "sparse_mla_decode_workspace_size"]


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
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    q_squares: torch.Tensor | None = None,
    q_norm_eps: float = 0.0,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
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
    arguments.check_splits(c, num_splits, split_tokens)
    if not arguments.check_quantized(c, q, out, positions, cos_sin_cache, out_scale):
        c.tensor("out", out, (torch.bfloat16, torch.float32), ("b", "s_q", "h", formats.HEAD_DIM))
        arguments.check_partial(c, out, attn_sink)
    arguments.check_q_norm(c, q, q_squares, q_norm_eps, positions)
    arguments.check_logs(c, "lse", lse, ("b", "h", "s_q"))
    c.tensor("workspace", workspace, (torch.uint8, torch.float32), (None,), optional=True, contiguous=True)
    if num_splits or split_tokens:
        tiles = arguments.list_tiles(indices, extra_k_cache, extra_indices, extra_block_table)
        needed = schedule.workspace_bytes(q.shape[0] * q.shape[1], q.shape[2], tiles, num_splits, split_tokens, 0)
        have = nbytes(workspace)
        c.require(have >= needed, "workspace", f"at least {needed} bytes (sparse_mla_decode_workspace_size)", have)


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
    *extra, _num_splits, _split_tokens, out, _lse, _workspace, _q_squares, _q_norm_eps = rest[:-3]
    return arguments.attention_cost(q, out, decode_selections(q, k_cache, indices, topk_length, kv_format, *extra))


_decode = define_op(
    "sparse_mla_decode(Tensor q, Tensor k_cache, Tensor indices, Tensor? topk_length, Tensor? attn_sink, "
    "float softmax_scale, str kv_format, Tensor? extra_k_cache, Tensor? extra_indices, Tensor? extra_topk_length, "
    "Tensor? extra_block_table, Tensor? extra_length, str extra_kv_format, SymInt num_splits, SymInt split_tokens, "
    "Tensor(a!) out, Tensor(b!)? lse, Tensor(c!)? workspace, Tensor? q_squares, float q_norm_eps, "
    "Tensor? positions, Tensor? cos_sin_cache, Tensor(d!)? out_scale) -> ()",
    check=_check,
    reference=reference.sparse_mla_decode,
    kernel="cute_kernels.sparse_mla.decode",
    cost=_cost,
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


def _allocate_workspace(q: torch.Tensor, tiles: int, num_splits: int, split_tokens: int) -> torch.Tensor | None:
    """Workspace for a call, or None if its rows are not split, or ask for parts that `_check` refuses."""
    b, s_q, h = q.shape[:3]
    if num_splits < 0 or split_tokens < 0:
        return None
    sms = 0
    if not num_splits and not split_tokens:
        sms = _multiprocessors(q.device)
        if schedule.part_limit(b * s_q, schedule.head_blocks(h), tiles, sms) == 1:
            return None
    size = schedule.workspace_bytes(b * s_q, h, tiles, num_splits, split_tokens, sms)
    return torch.empty(size // 4, dtype=torch.float32, device=q.device) if size else None


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
    q_norm: tuple[torch.Tensor, float] | None = None,
    output_quant: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Any]:
    """Attention of each query row to rows of one or two paged caches that it names by slot (or, densely, by page).

    With s_n = softmax_scale * (q . k_n) over the rows n attended to and lse = ln sum_n exp(s_n):
    out = sum_n exp(s_n - lse) k_n / (1 + exp(attn_sink - lse)). K and V are the same 512 values.

    q                  bf16 [b, s_q, h, 512], any strides with a dense last dimension, 1 <= h <= 128
    k_cache            [num_blocks, rows per page, row elements] of kv_format; uint8 with 584 elements for fp8_ds_mla,
                       bf16 with 512 for plain_bf16; any page stride that holds a page. Kernels need multiples of 16
                       bytes, Blackwell's own of 576 for fp8_ds_mla, as `formats.FP8_DS_MLA.allocate` makes them
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
    num_splits         how many parts a kernel cuts a row's columns into; 0: chosen from the shapes of the call, and no
                       more than the workspace holds
    split_tokens       columns in a part, a multiple of 64, instead of num_splits: then a row's bits do not depend on
                       the batch around it. 0: not fixed. Neither can change the result by more than rounding
    out                [b, s_q, h, 512], any strides with a dense last dimension; bf16, or fp32 for partial results to
                       be merged (then attn_sink must be None); mutated
    lse                fp32 [b, h, s_q], any strides; mutated
    return_lse         False: lse is written only if it is given, and nothing is allocated for it
    workspace          uint8 or fp32, one dimension, contiguous, 16-byte aligned: scratch memory for the parts of rows;
                       `sparse_mla_decode_workspace_size` bytes, or more, if num_splits or split_tokens is given;
                       mutated. None: allocated if rows may be split
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
                       fp8_ds_mla caches

    Returns (out, lse), or (out, None) if nobody asks for lse, the natural logarithm, sink not included. A row that
    attends to nothing has out = 0 and lse = +inf. Rows not attended to are not read into the result, whatever they
    hold. Raises ValueError or TypeError on arguments that do not fit.
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
        workspace = _allocate_workspace(q, tiles, num_splits, split_tokens)
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
        workspace,
        *arguments.norm_arguments(q_norm, "sparse_mla_decode"),
        *arguments.quant_tensors(output_quant, "sparse_mla_decode"),
    )
    return out, lse
