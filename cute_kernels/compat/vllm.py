# SPDX-License-Identifier: Apache-2.0
"""The names of vLLM's DeepSeek-V4 ops, over this package's kernels.

    from vllm.models.deepseek_v4.common.ops import combine_topk_swa_indices, quantize_and_insert_k_cache
    from cute_kernels.compat.vllm import combine_topk_swa_indices, quantize_and_insert_k_cache

Where vLLM calls torch.ops._C.f, torch.ops.vllm.f or vllm._custom_ops.f, import f from here. Arguments that later
versions appended are accepted. Where version 0.33 cannot be called as the versions of spring 2026, its form has the
suffix _v033. Slots, positions, lengths, indices and block tables may be int32 or int64, and slot mappings longer than
the rows they are for: an engine's whole buffer. FlashMLA's calls are in `cute_kernels.compat.flash_mla`, FlashInfer's
in `cute_kernels.compat.flashinfer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cute_kernels import formats
from cute_kernels.compat.arguments import accept_only, as_int32, as_int64, needs_int64, slots_of
from cute_kernels.compat.vllm_compressor import (
    compress_norm_rope_store_cutedsl,
    compress_norm_rope_store_triton,
    fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl,
    get_compressed_slot_mapping,
    get_compressed_slot_mapping_v033,
    save_partial_states,
    split_kv_compress_norm_rope_insert_sparse_attn_cutedsl,
)
from cute_kernels.compat.vllm_indexer import (
    cp_gather_indexer_k_quant_cache,
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    fused_indexer_q_rope_quant,
    get_paged_mqa_logits_metadata,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from cute_kernels.compat.vllm_indices import (
    build_c128a_topk_metadata,
    build_flashinfer_mixed_sparse_indices,
    combine_topk_swa_indices,
    compute_global_topk_indices_and_lens,
)
from cute_kernels.kv_cache import ops as kv_cache
from cute_kernels.norm import ops as norm
from cute_kernels.output import ops as output
from cute_kernels.runtime.checks import Checker

__all__ = [
    "MXFP4_BLOCK_SIZE",
    "build_c128a_topk_metadata",
    "build_flashinfer_mixed_sparse_indices",
    "combine_topk_swa_indices",
    "compress_norm_rope_store_cutedsl",
    "compress_norm_rope_store_triton",
    "compute_global_topk_indices_and_lens",
    "cp_gather_indexer_k_quant_cache",
    "deepseek_v4_fp8_einsum",
    "dequantize_and_gather_k_cache",
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_v033",
    "fused_indexer_q_rope_quant",
    "fused_inv_rope_fp8_quant",
    "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
    "fused_mtp_input_rmsnorm",
    "fused_q_kv_rmsnorm",
    "get_compressed_slot_mapping",
    "get_compressed_slot_mapping_v033",
    "get_paged_mqa_logits_metadata",
    "mtp_shared_head_rmsnorm",
    "quantize_and_insert_k_cache",
    "save_partial_states",
    "split_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
]

MXFP4_BLOCK_SIZE = 32


def quantize_and_insert_k_cache(
    k: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int = 64,
    is_ue8m0: bool = True,
    use_fnuz: bool = False,
) -> None:
    """`kv_cache.ops.quantize_and_insert_k_cache`, the same arguments and bytes.

    Rows of k may be strided. use_fnuz=True raises NotImplementedError, is_ue8m0=False ValueError.
    """
    accept_only("quantize_and_insert_k_cache", False, use_fnuz=use_fnuz)
    kv_cache.quantize_and_insert_k_cache(k, k_cache, slots_of(k, slot_mapping), block_size, is_ue8m0)


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    use_fnuz: bool = False,
) -> None:
    """`kv_cache.ops.dequantize_and_gather_k_cache`, the same arguments and values.

    Rows past the end of out are skipped, those whose page the table does not name are zeros. use_fnuz=True raises
    NotImplementedError.
    """
    accept_only("dequantize_and_gather_k_cache", False, use_fnuz=use_fnuz)
    lens, gathered, table = as_int32(seq_lens), as_int32(gather_lens), as_int32(block_table)
    kv_cache.dequantize_and_gather_k_cache(out, k_cache, lens, gathered, table, block_size, offset)


def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    cache_block_size: int,
) -> None:
    """`kv_cache.ops.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`: q is changed in place.

    A dependent launch, as vLLM's. q and kv may be strided. Attention takes q with its own number of heads: no padding
    has to follow.
    """
    kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q,
        kv,
        k_cache,
        slots_of(kv, slot_mapping),
        as_int64(position_ids),
        cos_sin_cache,
        eps,
        cache_block_size,
        use_pdl=not needs_int64(slot_mapping, position_ids),
    )


def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_v033(
    q_in: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_head_padded: int,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
    kv_mxfp8: bool = False,
    apply_q_rope: bool = True,
    is_q_interleaved: bool = False,
) -> torch.Tensor:
    """fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert as vLLM 0.33 has it: q_in is only read.

    q_head_padded   heads of the result, any number from H on; the added heads are zero. With q_head_padded = H no head
                    is added, and the attention of this package needs none

    Returns bf16 [N, q_head_padded, 512], a copy of q_in that the op then works on; the in-place form saves this copy.
    Raises NotImplementedError on the last three arguments other than their defaults.
    """
    op = "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert"
    accept_only(op, False, kv_mxfp8=kv_mxfp8, is_q_interleaved=is_q_interleaved)
    accept_only(op, True, apply_q_rope=apply_q_rope)
    c = Checker(op)
    c.tensor("q_in", q_in, torch.bfloat16, (None, None, formats.HEAD_DIM))
    heads = q_in.shape[1]
    c.require(q_head_padded >= heads, "q_head_padded", f"at least {heads}, the heads of q_in", q_head_padded)
    q = torch.nn.functional.pad(q_in, (0, 0, 0, q_head_padded - heads))
    kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q[:, :heads],
        kv,
        k_cache,
        slots_of(kv, slot_mapping),
        as_int64(position_ids),
        cos_sin_cache,
        eps,
        cache_block_size,
        apply_q_norm=apply_q_norm,
        use_pdl=not needs_int64(slot_mapping, position_ids),
    )
    return q


def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
) -> None:
    """`kv_cache.ops.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert`: q is changed in place."""
    kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert(
        q,
        kv,
        k_cache,
        slots_of(kv, slot_mapping),
        as_int64(position_ids),
        cos_sin_cache,
        eps,
        cache_block_size,
        apply_q_norm=apply_q_norm,
        use_pdl=not needs_int64(slot_mapping, position_ids),
    )


def fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_fp8: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    position_ids: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    fp8_scale: torch.Tensor,
    q_fp8_scale_inv: torch.Tensor,
    eps: float,
    cache_block_size: int,
    apply_q_norm: bool = True,
) -> None:
    """`kv_cache.ops.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert`: q is only read."""
    kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert(
        q,
        kv,
        q_fp8,
        k_cache,
        slots_of(kv, slot_mapping),
        as_int64(position_ids),
        cos_sin_cache,
        fp8_scale,
        q_fp8_scale_inv,
        eps,
        cache_block_size,
        apply_q_norm=apply_q_norm,
        use_pdl=not needs_int64(slot_mapping, position_ids),
    )


def fused_q_kv_rmsnorm(
    qr: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, kv_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.ops.fused_q_kv_rmsnorm`, the same arguments; both results are allocated. A dependent launch, as vLLM's."""
    return norm.fused_q_kv_rmsnorm(qr, kv, q_weight, kv_weight, eps, use_pdl=True)


def fused_mtp_input_rmsnorm(
    inputs_embeds: torch.Tensor,
    positions: torch.Tensor,
    previous_hidden_states: torch.Tensor,
    enorm_weight: torch.Tensor,
    hnorm_weight: torch.Tensor,
    eps: float,
    hc_mult: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.ops.fused_mtp_input_rmsnorm`, the same arguments; both results are allocated.

    vLLM 0.33 calls an object, _FUSED_MTP_INPUT_RMSNORM_KERNEL, with these arguments.
    """
    return norm.fused_mtp_input_rmsnorm(
        inputs_embeds, positions, previous_hidden_states, enorm_weight, hnorm_weight, eps, hc_mult
    )


def mtp_shared_head_rmsnorm(hidden_states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`norm.ops.mtp_shared_head_rmsnorm`, the same arguments; the result is allocated.

    vLLM 0.33 calls an object, _MTP_SHARED_HEAD_RMSNORM_KERNEL, with these arguments.
    """
    return norm.mtp_shared_head_rmsnorm(hidden_states, weight, eps)


def fused_inv_rope_fp8_quant(
    o: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    n_groups: int,
    heads_per_group: int,
    nope_dim: int = 448,
    rope_dim: int = 64,
    quant_group_size: int = 128,
    tma_aligned_scales: bool = False,
    quantize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`output.ops.fused_inv_rope_fp8_quant`, the same arguments, layouts and allocated results.

    Both scale layouts work on every architecture. A dependent launch, as vLLM's.
    """
    return output.fused_inv_rope_fp8_quant(
        o,
        as_int64(positions),
        cos_sin_cache,
        n_groups,
        heads_per_group,
        nope_dim,
        rope_dim,
        quant_group_size,
        tma_aligned_scales,
        quantize=quantize,
        use_pdl=True,
    )


def deepseek_v4_fp8_einsum(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    out: torch.Tensor,
    equation: str,
    recipe: Sequence[int],
) -> None:
    """`output.ops.deepseek_v4_fp8_einsum`, the same arguments: "bhr,hdr->bhd" into out, both recipes everywhere.

    b is [G, R, K]. Packed weight scales may have any strides; `output.ops.pack_block_scales` makes them.
    """
    output.deepseek_v4_fp8_einsum(a, a_scale, b, b_scale, out, equation, recipe)
