# SPDX-License-Identifier: Apache-2.0
"""The fast path of DeepSeek-V4 sparse attention: every hot op as a torch custom op.

Importing this package needs no GPU and compiles nothing.
"""

from cute_kernels.compressor.ops import (
    compress_latent,
    compress_norm_rope_store,
    fused_compress_norm_rope_store,
    get_compressed_slot_mapping,
    k_norm_rope_store,
    rope_quant_insert,
    save_partial_states,
)
from cute_kernels.indexer.ops import (
    all_visible_entries,
    cp_gather_indexer_k_quant_cache,
    fused_indexer_q_rope_quant,
    merge_top_k_keys,
    mqa_logits,
    paged_mqa_logits,
    score_top_k_decode,
    score_top_k_prefill,
    score_top_k_workspace_size,
    select_candidate_blocks,
    select_candidate_blocks_workspace_size,
    top_k_keys,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from cute_kernels.indices.ops import (
    build_c128a_topk_metadata,
    build_flashinfer_mixed_sparse_indices,
    build_step_metadata,
    combine_topk_swa_indices,
    compute_decode_swa_indices,
    compute_global_topk_indices_and_lens,
)
from cute_kernels.insert_compress.ops import fused_qkv_insert_compress, fused_qkv_insert_compress_index
from cute_kernels.kv_cache.ops import (
    dequantize_and_gather_k_cache,
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert,
    fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert,
    pack_records,
    quantize_and_insert_k_cache,
    unpack_records,
)
from cute_kernels.norm.ops import (
    fused_mtp_input_rmsnorm,
    fused_q_kv_rmsnorm,
    fused_q_kv_rmsnorm_quant,
    mtp_shared_head_rmsnorm,
)
from cute_kernels.output.ops import (
    deepseek_v4_fp8_einsum,
    fused_inv_rope_fp8_quant,
    output_scale_shape,
    pack_block_scales,
)
from cute_kernels.runtime.registry import warmup
from cute_kernels.sparse_mla.ops import (
    merge_attention_states,
    sparse_mla_decode,
    sparse_mla_decode_workspace_size,
    sparse_mla_mixed,
    sparse_mla_mixed_workspace_size,
    sparse_mla_prefill,
    sparse_mla_prefill_paged,
    sparse_mla_prefill_paged_form,
    sparse_mla_prefill_paged_workspace_size,
)

__version__ = "0.1.0"

__all__ = [
    "all_visible_entries",
    "build_c128a_topk_metadata",
    "build_flashinfer_mixed_sparse_indices",
    "build_step_metadata",
    "combine_topk_swa_indices",
    "compress_latent",
    "compress_norm_rope_store",
    "compute_decode_swa_indices",
    "compute_global_topk_indices_and_lens",
    "cp_gather_indexer_k_quant_cache",
    "deepseek_v4_fp8_einsum",
    "dequantize_and_gather_k_cache",
    "fused_compress_norm_rope_store",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_indexer_q_rope_quant",
    "fused_inv_rope_fp8_quant",
    "fused_mtp_input_rmsnorm",
    "fused_q_kv_rmsnorm",
    "fused_q_kv_rmsnorm_quant",
    "fused_qkv_insert_compress",
    "fused_qkv_insert_compress_index",
    "get_compressed_slot_mapping",
    "k_norm_rope_store",
    "merge_attention_states",
    "merge_top_k_keys",
    "mqa_logits",
    "mtp_shared_head_rmsnorm",
    "output_scale_shape",
    "pack_block_scales",
    "pack_records",
    "paged_mqa_logits",
    "quantize_and_insert_k_cache",
    "rope_quant_insert",
    "save_partial_states",
    "score_top_k_decode",
    "score_top_k_prefill",
    "score_top_k_workspace_size",
    "select_candidate_blocks",
    "select_candidate_blocks_workspace_size",
    "sparse_mla_decode",
    "sparse_mla_decode_workspace_size",
    "sparse_mla_mixed",
    "sparse_mla_mixed_workspace_size",
    "sparse_mla_prefill",
    "sparse_mla_prefill_paged",
    "sparse_mla_prefill_paged_form",
    "sparse_mla_prefill_paged_workspace_size",
    "top_k_keys",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "unpack_records",
    "warmup",
]
