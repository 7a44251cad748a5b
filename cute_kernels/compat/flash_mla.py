# SPDX-License-Identifier: Apache-2.0
"""FlashMLA's sparse attention calls for DeepSeek-V4, over this package's kernels.

    from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
    from cute_kernels.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

The signatures are those of the copy that vLLM ships; FlashMLA's own lack the last arguments, `out` and
`enable_batch_invariant`. Behind them, by keyword only, come what SGLang's copy has beside, and memory that an engine
may give. Dense attention and the 576-wide heads of DeepSeek-V3 are not part of this package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels import formats
from cute_kernels.compat.arguments import accept_only, as_int32
from cute_kernels.runtime.checks import Checker
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_prefill

__all__ = ["FlashMLASchedMeta", "flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

_RECORD_BYTES = formats.FP8_DS_MLA.row_elements


@dataclass
class FlashMLASchedMeta:
    """Stands for a decode schedule. It never holds one: work is split from the shapes of each call.

    So one object serves calls of any shapes and lengths, nothing is planned in the first call, and a CUDA graph needs
    no metadata at a fixed address.
    """

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, None]:
    """(a FlashMLASchedMeta, None). Arguments are ignored, as in FlashMLA; the object stays empty."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    *,
    use_legacy: bool = False,
    descale_q: None = None,
    descale_k: None = None,
    kv_format: None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decode attention over fp8_ds_mla caches: `sparse_mla_decode`.

    q                          bf16 [b, s_q, h, 512]. Any h from 1 to 128, without padding; FlashMLA has 64 and 128
    k_cache                    uint8, int8 or e4m3 [num_blocks, rows, 1, 584]; any page stride of 16-byte multiples
    block_table, cache_seqlens
                               ignored, as in FlashMLA's sparse mode
    head_dim_v                 512
    tile_scheduler_metadata    ignored; it need not come from get_mla_metadata nor fit the call
    num_splits                 None
    softmax_scale              default 512^-0.5
    causal, is_fp8_kvcache     False and True
    indices                    int32 or int64 [b, s_q, topk], required. Any topk, where FlashMLA wants multiples of 64.
                               Every value outside the cache is skipped, not only -1
    attn_sink                  fp32 [h] or None
    extra_k_cache, extra_indices_in_kvcache
                               a second cache and its indices, as the first
    topk_length, extra_topk_length
                               int32 or int64 [b] or, beyond FlashMLA, [b, s_q]
    out                        bf16 [b, s_q, h, 512], any strides with a dense last dimension; else allocated
    enable_batch_invariant     True: rows are not split, on every architecture
    use_legacy                 ignored: there is one implementation
    descale_q, descale_k, kv_format
                               None: records carry their own scales, and there is one record format
    lse                        fp32 [b, h, s_q], any strides; else allocated
    workspace                  scratch memory for splits, as `sparse_mla_decode` takes it; else allocated where needed

    Returns (out, lse fp32 [b, h, s_q]). Raises NotImplementedError on modes other than sparse
    attention over 584-byte records, ValueError or TypeError on arguments that do not fit.
    """
    op = "flash_mla_with_kvcache"
    if indices is None:
        Checker(op).fail("indices", "a tensor, only sparse attention is supported", "None", NotImplementedError)
    accept_only(op, formats.HEAD_DIM, head_dim_v=head_dim_v)
    accept_only(op, None, num_splits=num_splits, descale_q=descale_q, descale_k=descale_k, kv_format=kv_format)
    accept_only(op, False, causal=causal)
    accept_only(op, True, is_fp8_kvcache=is_fp8_kvcache)
    return sparse_mla_decode(
        q,
        _records(op, "k_cache", k_cache),
        as_int32(indices),
        topk_length=as_int32(topk_length),
        attn_sink=attn_sink,
        softmax_scale=softmax_scale,
        extra_k_cache=None if extra_k_cache is None else _records(op, "extra_k_cache", extra_k_cache),
        extra_indices=as_int32(extra_indices_in_kvcache),
        extra_topk_length=as_int32(extra_topk_length),
        num_splits=1 if enable_batch_invariant else 0,
        out=out,
        lse=lse,
        workspace=workspace,
    )


def _records(op: str, argument: str, cache: torch.Tensor) -> torch.Tensor:
    """[num_blocks, rows, 1, 584] of any one-byte type as uint8 [num_blocks, rows, 584]."""
    c = Checker(op)
    c.tensor(argument, cache, (torch.uint8, torch.int8, torch.float8_e4m3fn), (None, None, 1, None))
    if cache.shape[3] != _RECORD_BYTES:
        c.fail(argument, f"records of {_RECORD_BYTES} bytes (fp8_ds_mla)", list(cache.shape), NotImplementedError)
    return cache.squeeze(2).view(torch.uint8)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    max_logits: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill attention over one buffer of bf16 rows: `sparse_mla_prefill`.

    q             bf16 [s_q, h, 512]. Any h from 1 to 128, without padding
    kv            bf16 [s_kv, 1, 512]
    indices       int32 or int64 [s_q, 1, topk], any topk, where FlashMLA wants multiples of 64 or 128
    sm_scale      softmax scale
    d_v           512
    attn_sink     fp32 [h] or None
    topk_length   int32 or int64 [s_q] or None. A NaN row named only beyond it reaches no output; FlashMLA warns that it
                  may
    out           bf16 [s_q, h, 512], any strides with a dense last dimension; else allocated
    max_logits, lse
                  fp32 [s_q, h], any strides; else allocated

    Returns (out, max_logits, lse). Raises ValueError or TypeError on arguments that do not fit.
    """
    return sparse_mla_prefill(
        q,
        kv,
        as_int32(indices),
        sm_scale,
        d_v,
        attn_sink,
        as_int32(topk_length),
        out=out,
        max_logits=max_logits,
        lse=lse,
    )
