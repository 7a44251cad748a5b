# SPDX-License-Identifier: Apache-2.0
"""Every baseline name has a counterpart, which a table in docs/switching.md names, with the baseline's arguments."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs/switching.md"
SAME = [
    "DeepseekCompressor",
    "CompressorStateCache",
    "DeepseekV4SWACache",
    "DeepseekV4IndexerCache",
    "DeepseekV4Indexer",
    "SparseAttnIndexer",
    "DeepseekV4MultiHeadLatentAttentionWrapper",
    "deepseek_v4_fp8_einsum",
    "deepseek_v4_attention",
    "DeepseekV4MLAAttention",
    "DeepseekV4MLAModules",
    "DeepseekV4FlashInferMLASparseBackend",
    "get_kv_cache_spec",
    "init_layer_buffers",
    "_build_sparse_index_metadata",
    "attn_gemm_parallel_execute",
    "get_padded_num_q_heads",
    "fused_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
    "split_kv_compress_norm_rope_insert_sparse_attn_cutedsl",
    "FlashMLASchedMeta",
    "get_mla_metadata",
    "get_paged_mqa_logits_metadata",
    "DeepseekV4FlashInferMLASparseImpl",
    "save_partial_states",
    "quantize_and_insert_k_cache",
    "dequantize_and_gather_k_cache",
    "fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert",
    "fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert",
    "fused_q_kv_rmsnorm",
    "fused_mtp_input_rmsnorm",
    "mtp_shared_head_rmsnorm",
    "fused_indexer_q_rope_quant",
    "top_k_per_row_prefill",
    "top_k_per_row_decode",
    "cp_gather_indexer_k_quant_cache",
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    "build_flashinfer_mixed_sparse_indices",
    "build_c128a_topk_metadata",
    "get_compressed_slot_mapping",
    "fused_inv_rope_fp8_quant",
]
RENAMED = {
    "forward_mqa": "DeepseekV4MLAAttention.forward",
    "step metadata": "DeepseekV4Metadata",
    "compress_norm_rope_store_triton": "compress_norm_rope_store",
    "compress_norm_rope_store_cutedsl": "compress_norm_rope_store",
    "fp8_mqa_logits": "mqa_logits",
    "fp8_paged_mqa_logits": "paged_mqa_logits",
    "fp8_fp4_paged_mqa_logits": "paged_mqa_logits",
    "decode SWA indices": "compute_decode_swa_indices",
    "flash_mla_with_kvcache": "sparse_mla_decode",
    "flash_mla_sparse_fwd": "sparse_mla_prefill",
    "trtllm_batch_decode_sparse_mla_dsv4": "sparse_mla_mixed",
    "fp8_einsum": "deepseek_v4_fp8_einsum",
    "MTP layer": "DeepseekV4MTPNorms",
}
PREFIXES = ("cute_kernels.",)
MEMBERS = {
    "DeepseekCompressor": "fused_wkv_wgate ape norm_weight forward",
    "DeepseekV4Indexer": "wq_b weights_proj compressor indexer_op softmax_scale forward",
    "SparseAttnIndexer": "topk_tokens compress_ratio topk_indices_buffer forward",
    "DeepseekV4MLAModules": "fused_wqa_wkv q_norm wq_b kv_norm wo_a wo_b attn_sink rotary_emb indexer "
    "indexer_rotary_emb topk_indices_buffer aux_stream_list",
    "DeepseekV4MultiHeadLatentAttentionWrapper": "fused_wqa_wkv wq_b rotary_emb mla_attn compressor indexer "
    "attn_gemm_parallel_execute forward",
    "DeepseekV4MLAAttention": "num_heads scale compress_ratio attn_sink max_model_len forward",
    "DeepseekV4FlashInferMLASparseImpl": "init_layer_buffers bmm1_scale bmm2_scale fp8_kv_scale q_scale_inv "
    "_build_sparse_index_metadata forward",
    "DeepseekV4FlashInferMLASparseBackend": "get_name get_impl_cls get_padded_num_q_heads supported_dtypes "
    "get_supported_kernel_block_sizes get_supported_head_sizes get_kv_cache_spec",
    "CompressorStateCache": "data kv_format block_size",
    "DeepseekV4SWACache": "data kv_format block_size",
    "DeepseekV4IndexerCache": "data kv_format block_size",
    "step metadata": "num_decodes num_prefills num_decode_tokens num_prefill_tokens seq_lens query_start_loc "
    "token_to_req_indices slot_mapping swa_block_table is_valid_token decode_swa_indices decode_swa_lens "
    "prefill_seq_lens prefill_gather_lens c128a_global_decode_topk_indices c128a_decode_topk_lens "
    "c128a_prefill_topk_indices",
}
"""What a baseline class has that engines or its other classes use, under ours as the table names it."""


def table() -> dict[str, list[str]]:
    """Baseline name (a backticked word or a whole cell) -> our dotted paths, of the table under a heading "Names"."""
    if not PAGE.exists():
        return {}
    names: dict[str, list[str]] = {}
    inside = False
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            inside = "names" in line.lower()
        elif inside and line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            ours = [word for word in re.findall(r"`([^`]+)`", cells[1]) if word.startswith(PREFIXES)]
            if ours:
                for name in [*re.findall(r"`([^`]+)`", cells[0]), cells[0]]:
                    names[name] = ours
    return names


def resolve(path: str) -> object:
    """The object a dotted path names: the longest module in it, then attributes."""
    parts = path.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(path)


@pytest.mark.parametrize(("name", "expected"), [*((n, n) for n in SAME), *RENAMED.items()])
def test_the_page_names_the_counterpart(name: str, expected: str) -> None:
    names = table()
    assert names, f"{PAGE} has no table `| baseline name | ours |` under a heading that contains 'Names'"
    found = [ours for baseline, ours in names.items() if baseline == name or baseline.startswith(f"{name} (")]
    assert found, f"the table of names in {PAGE} has no row for `{name}`"
    assert found[0][0].endswith("." + expected), f"{name}: expected a path to {expected}, got {found[0][0]}"
    for path in found[0]:
        assert callable(resolve(path)), path


def test_every_path_of_the_table_exists() -> None:
    for paths in table().values():
        for path in paths:
            resolve(path)


@pytest.mark.parametrize("name", MEMBERS)
def test_members_have_counterparts(name: str) -> None:
    """Attributes of classes, fields of dataclasses, or what an object gets when it is made."""
    ours = resolve(table()[name][0])
    assert isinstance(ours, type)
    made = "\n".join(inspect.getsource(base) for base in ours.__mro__ if base.__module__.startswith("cute_kernels"))
    for member in MEMBERS[name].split():
        is_set = re.search(
            rf"^    {member}: |\bself\.(\w+, self\.)*{member}\b[^=\n]*= |register_buffer\(\"{member}\"", made, re.M
        )
        assert hasattr(ours, member) or is_set, member


SIGNATURES = {
    "compressor.save_partial_states": "kv score ape positions state_cache slot_mapping block_size state_width "
    "compress_ratio pdl_kwargs=None",
    "compressor.compress_norm_rope_store": "state_cache num_actual token_to_req_indices positions slot_mapping "
    "block_table block_size state_width cos_sin_cache kv_cache k_cache_metadata pdl_kwargs head_dim rope_head_dim "
    "compress_ratio overlap use_fp4_cache rms_norm_weight rms_norm_eps quant_block token_stride scale_dim",
    "compressor.get_compressed_slot_mapping": "num_tokens query_start_loc seq_lens block_table block_size "
    "compress_ratio out=None",
    "kv_cache.quantize_and_insert_k_cache": "k k_cache slot_mapping block_size=64 is_ue8m0=True",
    "kv_cache.dequantize_and_gather_k_cache": "out k_cache seq_lens gather_lens block_table block_size offset",
    "kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert": "q kv k_cache slot_mapping positions cos_sin_cache "
    "eps block_size",
    "kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert": "q kv kv_cache slot_mapping positions "
    "cos_sin_cache eps block_size",
    "kv_cache.fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert": "q kv q_fp8 kv_cache slot_mapping positions "
    "cos_sin_cache fp8_kv_scale q_scale_inv eps block_size",
    "norm.fused_q_kv_rmsnorm": "qr kv q_weight kv_weight eps",
    "norm.fused_mtp_input_rmsnorm": "inputs_embeds positions previous_hidden_states enorm_weight hnorm_weight eps "
    "hc_mult",
    "norm.mtp_shared_head_rmsnorm": "hidden_states weight eps",
    "indexer.fused_indexer_q_rope_quant": "positions index_q index_q_cos_sin_cache index_weights "
    "index_weights_softmax_scale index_weights_head_scale use_fp4=False",
    "indexer.mqa_logits": "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits=True",
    "indexer.paged_mqa_logits": "q kv_cache weights context_lens block_tables schedule_metadata max_model_len "
    "clean_logits=False",
    "indexer.cp_gather_indexer_k_quant_cache": "kv_cache dst_k dst_scale block_table cu_seq_lens",
    "indexer.top_k_per_row_prefill": "logits row_starts row_ends out num_rows stride0 stride1 k",
    "indexer.top_k_per_row_decode": "logits next_n seq_lens out num_rows stride0 stride1 k",
    "indices.compute_global_topk_indices_and_lens": "topk_indices token_to_req_indices block_table block_size "
    "is_valid_token",
    "indices.build_c128a_topk_metadata": "positions compress_ratio num_decode_tokens token_to_req_indices block_table "
    "block_size slot_mapping global_decode_buffer decode_lens_buffer prefill_buffer max_compressed_tokens=8192",
    "indices.combine_topk_swa_indices": "topk_indices query_start_loc seq_lens gather_lens window_size compress_ratio "
    "topk M N",
    "indices.build_flashinfer_mixed_sparse_indices": "decode_swa_indices decode_compressed_indices "
    "decode_compressed_topk_lens prefill_topk_indices query_start_loc seq_lens token_to_req_indices swa_block_table "
    "swa_block_size compressed_block_table compressed_block_size window_size compress_ratio topk "
    "decode_compressed_indices_are_local=False decode_is_valid_token=None",
    "sparse_mla.sparse_mla_prefill": "q kv indices sm_scale d_v=512 attn_sink=None topk_length=None",
    "output.fused_inv_rope_fp8_quant": "o positions cos_sin_cache n_groups heads_per_group nope_dim=448 rope_dim=64 "
    "quant_group_size=128 tma_aligned_scales=False",
    "output.deepseek_v4_fp8_einsum": "a a_scale b b_scale out equation recipe",
}


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_are_the_baselines_in_order_with_its_defaults(path: str) -> None:
    """Ours follow as keywords only, and all of them have defaults."""
    package, name = path.split(".")
    parameters = inspect.signature(getattr(importlib.import_module(f"cute_kernels.{package}.ops"), name)).parameters
    positional = [p for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in positional]
    assert shown == SIGNATURES[path].split()
    assert all(p.default is not p.empty for p in parameters.values() if p.kind is p.KEYWORD_ONLY)
