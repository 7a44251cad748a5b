# SPDX-License-Identifier: Apache-2.0
"""The signatures are those of the projects they stand for, written out here from the versions named."""

from __future__ import annotations

import importlib
import inspect

import pytest

MODULES = ("flash_mla", "deep_gemm", "flashinfer", "vllm")

# vLLM 0.33.0, vllm/third_party/flashmla/flash_mla_interface.py. FlashMLA itself (April 2026) ends before `out`. Behind
# the star is what SGLang 0.5.23's calls have beside, and memory of the caller.
FLASH_MLA = {
    "FlashMLASchedMeta": "have_initialized=False, config=None, tile_scheduler_metadata=None, num_splits=None",
    "get_mla_metadata": "*args, **kwargs",
    "flash_mla_with_kvcache": (
        "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, "
        "softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, "
        "extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None, out=None, "
        "enable_batch_invariant=False, *, use_legacy=False, descale_q=None, descale_k=None, kv_format=None, lse=None, "
        "workspace=None"
    ),
    "flash_mla_sparse_fwd": (
        "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, out=None, *, max_logits=None, lse=None"
    ),
}

# DeepGEMM 2.6.1, csrc/apis/attention.hpp.
DEEP_GEMM = {
    "fp8_mqa_logits": "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0",
    "fp8_fp4_mqa_logits": (
        "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0, "
        "logits_dtype=torch.float32"
    ),
    "get_paged_mqa_logits_metadata": "context_lens, block_kv, num_sms, indices=None",
    "fp8_paged_mqa_logits": (
        "q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, "
        "indices=None"
    ),
    "fp8_fp4_paged_mqa_logits": (
        "q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False, "
        "logits_dtype=torch.float32, indices=None"
    ),
}

# FlashInfer 0.7.2.post1, flashinfer/mla/_core.py.
FLASHINFER = {
    "trtllm_batch_decode_sparse_mla_dsv4": (
        "query, swa_kv_cache, workspace_buffer, sparse_indices=None, compressed_kv_cache=None, sparse_topk_lens=None, "
        "seq_lens=None, out=None, bmm1_scale=1.0, bmm2_scale=1.0, sinks=None, kv_layout='HND', cum_seq_lens_q=None, "
        "max_q_len=None, enable_pdl=None, swa_topk_lens=None, extra_sparse_indices=None, extra_sparse_topk_lens=None, "
        "backend='auto', hca_swa_indices=None, hca_compressed_block_tables=None, hca_seq_lens=None, "
        "hca_is_causal=True, hca_use_persistent=False, hca_sparse_indices_format=None, "
        "remapped_sparse_indices_buffer=None, sparse_indices_are_storage_offsets=None, "
        "dsv4_inv_rope_cos_sin_cache=None, dsv4_output_scale=None, sparse_topk_lens_offset=0, "
        "multi_ctas_kv_counter_buffer=None, *, kv_cache_format='fp8'"
    ),
}

_STORE = (
    "state_cache, num_actual, token_to_req_indices, positions, slot_mapping, block_table, block_size, state_width, "
    "cos_sin_cache, kv_cache, k_cache_metadata, pdl_kwargs, head_dim, rope_head_dim, compress_ratio, overlap, "
    "use_fp4_cache, rms_norm_weight, rms_norm_eps, quant_block, token_stride, scale_dim"
)
_FULL = "store_full_kv=False, store_full_fp8=False, fp8_scale=None"

# vLLM 0.33.0, whose functions of earlier versions differ by appended arguments only; where not, the form of spring
# 2026 comes first and 0.33's has the suffix. Custom ops have the argument names of their schemas.
VLLM = {
    # models/deepseek_v4/common/ops/save_partial_states.py
    "save_partial_states": (
        "kv, score, ape, positions, state_cache, slot_mapping, block_size, state_width, compress_ratio, pdl_kwargs=None"
    ),
    # models/deepseek_v4/common/ops/fused_compress_quant_cache.py, models/deepseek_v4/nvidia/ops
    "compress_norm_rope_store_triton": _STORE,
    "compress_norm_rope_store_cutedsl": f"{_STORE}, {_FULL}",
    "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl": (
        "state_cache, token_to_req_indices, positions, slot_mapping, block_table, block_size, rms_norm_weight, "
        "rms_norm_eps, cos_sin_cache, k_cache, kv_slot_mapping, kv_cache_block_size, kv_block_stride, head_size=512, "
        "state_width=1024, rope_head_dim=64, fp8_max=448.0, quant_block=64, token_stride=576, scale_dim=8, "
        f"compress_ratio=4, overlap=True, {_FULL}"
    ),
    "split_kv_compress_norm_rope_insert_sparse_attn_cutedsl": (
        "state_cache, token_to_req_indices, positions, slot_mapping, block_table, block_size, compressed_kv, "
        "rms_norm_weight, rms_norm_eps, cos_sin_cache, k_cache, kv_slot_mapping, kv_cache_block_size, "
        "kv_block_stride, head_size=512, state_width=512, rope_head_dim=64, fp8_max=448.0, quant_block=64, "
        f"token_stride=576, scale_dim=8, compress_ratio=128, overlap=False, {_FULL}"
    ),
    # v1/attention/backends/mla/compressor_utils.py
    "get_compressed_slot_mapping": (
        "num_tokens, query_start_loc, seq_lens, block_table, block_size, compress_ratio, out=None"
    ),
    "get_compressed_slot_mapping_v033": (
        "num_tokens, slot_mapping, query_start_loc, seq_lens, block_table, block_size, compress_ratio, out=None, "
        "dcp_world_size=1, cp_interleave=1"
    ),
    # models/deepseek_v4/common/ops/cache_utils.py
    "quantize_and_insert_k_cache": "k, k_cache, slot_mapping, block_size=64, is_ue8m0=True, use_fnuz=False",
    "dequantize_and_gather_k_cache": (
        "out, k_cache, seq_lens, gather_lens, block_table, block_size, offset, use_fnuz=False"
    ),
    "compute_global_topk_indices_and_lens": (
        "topk_indices, token_to_req_indices, block_table, block_size, is_valid_token"
    ),
    "combine_topk_swa_indices": (
        "topk_indices, query_start_loc, seq_lens, gather_lens, window_size, compress_ratio, topk, M, N, out=None, "
        "left_visible=None, right_visible=None, max_image_tokens=0"
    ),
    "build_flashinfer_mixed_sparse_indices": (
        "decode_swa_indices, decode_compressed_indices, decode_compressed_topk_lens, prefill_topk_indices, "
        "query_start_loc, seq_lens, token_to_req_indices, swa_block_table, swa_block_size, compressed_block_table, "
        "compressed_block_size, window_size, compress_ratio, topk, decode_compressed_indices_are_local=False, "
        "decode_is_valid_token=None, swa_block_span=None, compressed_block_span=None, prefill_left_visible=None, "
        "prefill_right_visible=None, max_image_tokens=0, num_rows=None"
    ),
    # models/deepseek_v4/sparse_mla.py
    "build_c128a_topk_metadata": (
        "positions, compress_ratio, num_decode_tokens, token_to_req_indices, block_table, block_size, slot_mapping, "
        "global_decode_buffer, decode_lens_buffer, prefill_buffer, max_compressed_tokens=8192"
    ),
    # torch.ops._C: the schemas of May 2026, of 0.33, and of 0.33 twice more
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": (
        "q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size"
    ),
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert_v033": (
        "q_in, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, q_head_padded, eps, cache_block_size, "
        "apply_q_norm=True, kv_mxfp8=False, apply_q_rope=True, is_q_interleaved=False"
    ),
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": (
        "q, kv, k_cache, slot_mapping, position_ids, cos_sin_cache, eps, cache_block_size, apply_q_norm=True"
    ),
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": (
        "q, kv, q_fp8, k_cache, slot_mapping, position_ids, cos_sin_cache, fp8_scale, q_fp8_scale_inv, eps, "
        "cache_block_size, apply_q_norm=True"
    ),
    # models/common/ops/fused_qk_rmsnorm.py, models/deepseek_v4/common/ops/fused_mtp_input_rmsnorm.py
    "fused_q_kv_rmsnorm": "qr, kv, q_weight, kv_weight, eps",
    "fused_mtp_input_rmsnorm": (
        "inputs_embeds, positions, previous_hidden_states, enorm_weight, hnorm_weight, eps, hc_mult"
    ),
    "mtp_shared_head_rmsnorm": "hidden_states, weight, eps",
    # models/deepseek_v4/common/ops/fused_indexer_q.py
    "fused_indexer_q_rope_quant": (
        "positions, index_q, index_q_cos_sin_cache, index_weights, index_weights_softmax_scale, "
        "index_weights_head_scale, use_fp4=False, weights_out_dtype=torch.float32"
    ),
    # vllm/utils/deep_gemm.py before it had one call for FP8 and FP4, with DeepGEMM's names and defaults for the first
    "fp8_mqa_logits": "q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0",
    "fp8_paged_mqa_logits": (
        "q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, clean_logits=False"
    ),
    # vllm/utils/deep_gemm.py
    "fp8_fp4_mqa_logits": "q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k",
    "fp8_fp4_paged_mqa_logits": (
        "q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=None"
    ),
    "get_paged_mqa_logits_metadata": "context_lens, block_size, num_sms, indices=None",
    # vllm/_custom_ops.py
    "cp_gather_indexer_k_quant_cache": "kv_cache, dst_k, dst_scale, block_table, cu_seq_lens",
    "top_k_per_row_prefill": (
        "logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens"
    ),
    "top_k_per_row_decode": ("logits, next_n, seq_lens, raw_topk_indices, num_rows, stride0, stride1, topk_tokens"),
    # models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant.py
    "fused_inv_rope_fp8_quant": (
        "o, positions, cos_sin_cache, n_groups, heads_per_group, nope_dim=448, rope_dim=64, quant_group_size=128, "
        "tma_aligned_scales=False, quantize=True"
    ),
    # torch.ops.vllm, spring 2026
    "deepseek_v4_fp8_einsum": "a, a_scale, b, b_scale, out, equation, recipe",
}

SIGNATURES = dict(zip(MODULES, (FLASH_MLA, DEEP_GEMM, FLASHINFER, VLLM), strict=True))
CASES = [(module, name) for module, names in SIGNATURES.items() for name in names]


def written(function: object) -> str:
    """The signature without annotations and brackets."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))[1:-1]


@pytest.mark.parametrize(("module", "name"), CASES, ids=[f"{m}.{n}" for m, n in CASES])
def test_signature(module: str, name: str) -> None:
    function = getattr(importlib.import_module(f"cute_kernels.compat.{module}"), name)
    assert written(function) == SIGNATURES[module][name]
    assert inspect.getdoc(function)


@pytest.mark.parametrize("module", MODULES)
def test_nothing_else_is_exported(module: str) -> None:
    exported = set(importlib.import_module(f"cute_kernels.compat.{module}").__all__)
    assert exported - {"MXFP4_BLOCK_SIZE"} == set(SIGNATURES[module])
