# SPDX-License-Identifier: Apache-2.0
"""DeepGEMM's calls that score indexer queries, over this package's kernels.

    from deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata
    from cute_kernels.compat.deep_gemm import fp8_mqa_logits, fp8_paged_mqa_logits, get_paged_mqa_logits_metadata

The signatures are those of DeepGEMM 2.6. DeepGEMM 2.8 has no `clean_logits` and takes `max_seqlen_k` in its place;
`cute_kernels.compat.vllm` has that form. Scores are fp32, from fp32 weights; both FP8 and MXFP4 work on every
architecture, for any number of heads and any page size.

Only this module keeps DeepGEMM's old rule for one context length per request: row j of next_n sees the first
context_len - next_n + j + 1 keys. For DeepSeek-V4's compressed keys (ratio 4) and next_n > 1 that rule is wrong,
because the number of visible keys does not grow by one per token: pass one length per row there.

Lengths, ranges and block tables may be int64 as well as int32.
"""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.compat.arguments import accept_only, as_int32, indexer_format, key_scales, query_codes
from cute_kernels.indexer.ops import mqa_logits, paged_mqa_logits
from cute_kernels.runtime.checks import Checker

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_paged_mqa_logits_metadata",
]


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """Scores of FP8 queries against contiguous FP8 keys: `mqa_logits`.

    q                    e4m3 [M, H, 128], any H
    kv                   (e4m3 or uint8 [N, 128], fp32 [N] or [N, 1], or their bytes uint8 [N, 4])
    weights              fp32 [M, H], the query's scale included
    cu_seq_len_k_start   int32 [M]
    cu_seq_len_k_end     int32 [M]
    clean_logits         True: columns outside a row's range are -inf, in both forms; False: undefined
    max_seqlen_k         > 0: column j of row m is key start[m] + j, and there are this many columns

    Returns fp32 [M, N] or [M, max_seqlen_k], allocated, rows a multiple of 1024 bytes apart. Raises ValueError or
    TypeError on arguments that do not fit.
    """
    op = "fp8_mqa_logits"
    return _contiguous(op, q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Scores of FP8 or MXFP4 queries against contiguous keys: `mqa_logits`.

    q              FP8: (e4m3 [M, H, 128], None); MXFP4: (int8 or uint8 [M, H, 64], int32 [M, H])
    kv             FP8: (e4m3 or uint8 [N, 128], fp32 [N]); MXFP4: (int8 or uint8 [N, 64], int32 [N]). Scales may be
                   [N, 1], or their bytes uint8 [N, 4]
    logits_dtype   torch.float32

    The rest is as in fp8_mqa_logits. Raises NotImplementedError on other logits and on FP8 codes with scales.
    """
    op = "fp8_fp4_mqa_logits"
    accept_only(op, torch.float32, logits_dtype=logits_dtype)
    codes = query_codes(op, q)
    return _contiguous(op, codes, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def _contiguous(
    op: str,
    q: Any,
    kv: Any,
    weights: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
) -> torch.Tensor:
    _check_clean(op, clean_logits)
    keys = key_scales(*Checker(op).pair("kv", kv, "codes, scales"))
    return mqa_logits(q, keys, weights, as_int32(start), as_int32(end), clean_logits, max_seqlen_k=max_seqlen_k)


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """A schedule in DeepGEMM's shape, int32 [num_sms + 1, 2], all zero: work is split from the shapes of each call.

    context_lens   int32 or int64 [B] or [B, next_n]; only its device matters
    block_kv       rows per page; ignored
    num_sms        multiprocessors to plan for
    indices        None: rows that name their request are not supported

    The result may be copied into a buffer of a CUDA graph, reused for any lengths, or left out (None) in the calls of
    this module. Raises NotImplementedError, ValueError or TypeError on arguments that do not fit.
    """
    op = "get_paged_mqa_logits_metadata"
    c = Checker(op)
    accept_only(op, None, indices=indices)
    c.tensor("context_lens", context_lens, (torch.int32, torch.int64), dense_last=False)
    c.require(num_sms > 0, "num_sms", "a positive number", num_sms)
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of FP8 decode queries against paged FP8 keys: `paged_mqa_logits`.

    q                 e4m3 [B, next_n, H, 128], any next_n >= 1 and any H
    kv_cache          uint8 [num_blocks, rows, 1, 132]
    weights           fp32 [B * next_n, H], row-strided, the query's scale included
    context_lens      int32 [B, next_n]: keys each row sees. int32 [B]: row j sees the first
                      context_lens - next_n + j + 1 keys, which is wrong for ratio 4 with next_n > 1 (see the module)
    block_table       int32 [B, columns], row-strided
    schedule_meta     ignored; may be None
    max_context_len   columns of the result
    clean_logits      True: columns at and beyond a row's length are -inf, for both forms of context_lens; False:
                      undefined
    indices           None

    Returns fp32 [B * next_n, max_context_len], allocated, rows a multiple of 1024 bytes apart. Raises
    NotImplementedError on indices, ValueError or TypeError on arguments that do not fit.
    """
    op = "fp8_paged_mqa_logits"
    return _paged(op, q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, indices)


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scores of FP8 or MXFP4 decode queries against paged keys: `paged_mqa_logits`.

    q              FP8: (e4m3 [B, next_n, H, 128], None); MXFP4: (int8 or uint8 [B, next_n, H, 64],
                   int32 [B, next_n, H])
    kv_cache       FP8: uint8 [num_blocks, rows, 1, 132]; MXFP4: 68 bytes a row, or 132 with the second half of a page
                   unused
    logits_dtype   torch.float32

    The rest is as in fp8_paged_mqa_logits, the rule for context_lens included. Raises NotImplementedError on other
    logits and on FP8 codes with scales.
    """
    op = "fp8_fp4_paged_mqa_logits"
    accept_only(op, torch.float32, logits_dtype=logits_dtype)
    codes = query_codes(op, q)
    return _paged(op, codes, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, indices)


def _paged(
    op: str,
    q: Any,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool,
    indices: torch.Tensor | None,
) -> torch.Tensor:
    _check_clean(op, clean_logits)
    accept_only(op, None, indices=indices)
    mxfp4 = isinstance(q, tuple)
    codes = q[0] if mxfp4 else q
    c = Checker(op)
    c.tensor("q", codes, (torch.float8_e4m3fn, torch.uint8, torch.int8), (None, None, None, None))
    context_lens = as_int32(context_lens)
    c.tensor("context_lens", context_lens, torch.int32)
    if context_lens.dim() == 1:
        row = torch.arange(1 - codes.shape[1], 1, dtype=torch.int32, device=context_lens.device)
        context_lens = context_lens.clamp(min=0)[:, None] + row
    return paged_mqa_logits(
        q,
        kv_cache,
        weights,
        context_lens,
        as_int32(block_table),
        None,
        max_context_len,
        clean_logits,
        kv_format=indexer_format(kv_cache, mxfp4),
    )


def _check_clean(op: str, clean_logits: object) -> None:
    """DeepGEMM 2.8 has a number where 2.6 has this flag."""
    if not isinstance(clean_logits, bool):
        Checker(op).fail("clean_logits", "a bool", repr(clean_logits), TypeError)
