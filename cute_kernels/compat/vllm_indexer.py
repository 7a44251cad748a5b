# SPDX-License-Identifier: Apache-2.0
"""vLLM's calls around the indexer; import them from `cute_kernels.compat.vllm`.

Positions, lengths, ranges and block tables may be int32 or int64.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.compat.arguments import accept_only, as_int32, as_int64, indexer_format, key_scales, query_codes
from cute_kernels.compat.deep_gemm import get_paged_mqa_logits_metadata as _metadata
from cute_kernels.indexer import ops
from cute_kernels.runtime.checks import Checker

__all__ = [
    "cp_gather_indexer_k_quant_cache",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fused_indexer_q_rope_quant",
    "get_paged_mqa_logits_metadata",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
]


def fused_indexer_q_rope_quant(
    positions: torch.Tensor,
    index_q: torch.Tensor,
    index_q_cos_sin_cache: torch.Tensor,
    index_weights: torch.Tensor,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    use_fp4: bool = False,
    weights_out_dtype: torch.dtype = torch.float32,
) -> tuple[Any, torch.Tensor]:
    """`indexer.ops.fused_indexer_q_rope_quant`, the same arguments; the results are allocated.

    MXFP4 works on every architecture. Its blocks have an absmax of at least 1e-4 and e2m1 ties go to the lower code,
    where vLLM since May 2026 rounds them to even (the op has `e2m1_rounding`); take queries and keys from one project.
    """
    return ops.fused_indexer_q_rope_quant(
        as_int64(positions),
        index_q,
        index_q_cos_sin_cache,
        index_weights,
        index_weights_softmax_scale,
        index_weights_head_scale,
        use_fp4,
        weights_out_dtype=weights_out_dtype,
    )


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """`indexer.ops.mqa_logits`, FP8 form, by DeepGEMM's names (vLLM's wrapper had cu_seqlen_ks and cu_seqlen_ke).

    The logits are allocated.
    """
    starts, ends = as_int32(cu_seq_len_k_start), as_int32(cu_seq_len_k_end)
    keys = _keys("fp8_mqa_logits", kv)
    return ops.mqa_logits(q, keys, weights, starts, ends, clean_logits, max_seqlen_k=max_seqlen_k)


def _keys(op: str, kv: Any) -> tuple[Any, Any]:
    return key_scales(*Checker(op).pair("kv", kv, "codes, scales"))


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    max_seqlen_k: int,
) -> torch.Tensor:
    """`indexer.ops.mqa_logits` as vllm.utils.deep_gemm of 0.33 has it: column j of a row is key cu_seqlen_ks + j.

    q              FP8: (e4m3 [M, H, 128], None); MXFP4: (int8 or uint8 [M, H, 64], int32 [M, H])
    kv             FP8: (e4m3 or uint8 [N, 128], fp32 [N]); MXFP4: (int8 or uint8 [N, 64], int32 [N]). Scales may be
                   [N, 1], or their bytes uint8 [N, 4], as `cp_gather_indexer_k_quant_cache` writes them
    max_seqlen_k   columns of the result, > 0; those past a row's keys are undefined

    Weights and logits are fp32 on every architecture, where vLLM has bf16 on SM100. The same name took `clean_logits`
    in place of max_seqlen_k before: a bool raises TypeError, `cute_kernels.compat.deep_gemm` has that form. Raises
    NotImplementedError on FP8 codes with scales (MXFP8).
    """
    op = "fp8_fp4_mqa_logits"
    c = Checker(op)
    if isinstance(max_seqlen_k, bool):
        c.fail("max_seqlen_k", "a number of columns", max_seqlen_k, TypeError)
    c.require(max_seqlen_k > 0, "max_seqlen_k", "a positive number", max_seqlen_k)
    codes = query_codes(op, q)
    starts, ends = as_int32(cu_seqlen_ks), as_int32(cu_seqlen_ke)
    return ops.mqa_logits(codes, _keys(op, kv), weights, starts, ends, False, max_seqlen_k=max_seqlen_k)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_size: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """As in `cute_kernels.compat.deep_gemm`: int32 [num_sms + 1, 2], zero.

    vLLM's has num_sms // 2 + 1 rows for next_n = 4 on Hopper.
    """
    return _metadata(context_lens, block_size, num_sms, indices)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
    clean_logits: bool = False,
) -> torch.Tensor:
    """`indexer.ops.paged_mqa_logits`, FP8 form; the logits are allocated, the schedule is ignored.

    context_lens is int32 [B, next_n]. [B] is refused for next_n > 1, because DeepGEMM's rule for it is wrong for
    compressed keys; `cute_kernels.compat.deep_gemm` has that rule.
    """
    lens, tables = as_int32(context_lens), as_int32(block_tables)
    return ops.paged_mqa_logits(q, kv_cache, weights, lens, tables, schedule_metadata, max_model_len, clean_logits)


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`indexer.ops.paged_mqa_logits` as vllm.utils.deep_gemm of 0.33 has it; columns past a row's length are undefined.

    q         FP8: (e4m3 [B, next_n, H, 128], None); MXFP4: (int8 or uint8 [B, next_n, H, 64], int32 [B, next_n, H])
    kv_cache  FP8: rows of 132 bytes with fp32 scales; MXFP4: rows of 68 bytes, or 132 as allocated at first
    indices   None: one row of block_tables for each request. vLLM passes them on SM100 only

    Any next_n, heads, page size and architecture; context_lens as in fp8_paged_mqa_logits. Weights and logits are fp32.
    Earlier versions had `clean_logits` where indices is: `cute_kernels.compat.deep_gemm` has that form. Raises
    NotImplementedError on indices and on FP8 codes with scales (MXFP8).
    """
    op = "fp8_fp4_paged_mqa_logits"
    accept_only(op, None, indices=indices)
    codes = query_codes(op, q)
    return ops.paged_mqa_logits(
        codes,
        kv_cache,
        weights,
        as_int32(context_lens),
        as_int32(block_tables),
        schedule_metadata,
        max_model_len,
        kv_format=indexer_format(kv_cache, isinstance(codes, tuple)),
    )


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
) -> None:
    """`indexer.ops.cp_gather_indexer_k_quant_cache`, the same arguments.

    dst_k of 64 columns means MXFP4, of 128 FP8. Rows whose page the table does not name are left as they are.
    """
    kv_format = indexer_format(kv_cache, dst_k.shape[-1] == formats.INDEX_DIM // 2)
    table, starts = as_int32(block_table), as_int32(cu_seq_lens)
    ops.cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, table, starts, kv_format=kv_format)


def top_k_per_row_prefill(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """`indexer.ops.top_k_per_row_prefill`, the same arguments by the names of vllm._custom_ops.

    The pick is deterministic: of equal scores the lower column wins. Any topk_tokens.
    """
    starts, ends = as_int32(cu_seqlen_ks), as_int32(cu_seqlen_ke)
    ops.top_k_per_row_prefill(logits, starts, ends, raw_topk_indices, num_rows, stride0, stride1, topk_tokens)


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """`indexer.ops.top_k_per_row_decode`, the same arguments by the names of vllm._custom_ops.

    seq_lens is int32 [B, next_n]; [B] is refused for next_n > 1, where vLLM takes seq_len - next_n + j + 1 columns. The
    pick is deterministic: of equal scores the lower column wins. Any topk_tokens.
    """
    lens = as_int32(seq_lens)
    ops.top_k_per_row_decode(logits, next_n, lens, raw_topk_indices, num_rows, stride0, stride1, topk_tokens)
