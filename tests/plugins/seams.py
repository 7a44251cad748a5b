# SPDX-License-Identifier: Apache-2.0
"""What the plug-ins expect of the engines' sources: signatures, fields and keywords of vLLM 0.33.0 and SGLang 0.5.23.

`python -m tests.plugins.seams vllm FOLDER` holds an unpacked wheel to it, without importing it: a release that moves a
seam is told here. `scripts/test_engines.sh` does so.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

ATTENTION = "vllm/models/deepseek_v4/attention.py"
FLASHMLA = "vllm/models/deepseek_v4/nvidia/flashmla.py"
COMPRESSOR = "vllm/models/deepseek_v4/compressor.py"
INDEXER_OP = "vllm/model_executor/layers/sparse_attn_indexer.py"
BACKEND = "sglang/srt/layers/attention/deepseek_v4_backend.py"
C4_INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
COMPRESSOR_V2 = "sglang/srt/layers/attention/dsv4/compressor_v2.py"

SIGNATURES: dict[str, dict[str, dict[str, str]]] = {
    "vllm": {
        "vllm/models/deepseek_v4/nvidia/model.py": {"_select_dsv4_attn_cls": "vllm_config"},
        "vllm/forward_context.py": {"get_forward_context": ""},
        "vllm/v1/worker/workspace.py": {
            "current_workspace_manager": "",
            "WorkspaceManager.get_simultaneous": "self, *shapes_and_dtypes",
        },
        ATTENTION: {
            "DeepseekV4Attention.__init__": "self, vllm_config, prefix, topk_indices_buffer=None, aux_stream_list=None",
            "DeepseekV4Attention.get_padded_num_q_heads": "cls, num_heads",
            "DeepseekV4Attention._get_indexer_cls": "self, vllm_config",
            "DeepseekV4Attention._split_qkv_and_norm": "self, qr_kv",
            "DeepseekV4Attention._fused_qnorm_rope_kv_insert": "self, q, kv, positions, attn_metadata",
            "DeepseekV4Indexer._get_attn_cls": "self",
            "DeepseekV4Indexer._get_compressor_cls": "self",
            "DeepseekV4Indexer._q_rope_quant": "self, positions, q, rotary_emb, indexer_weights",
        },
        FLASHMLA: {
            "DeepseekV4FlashMLAAttention.__init__": "self, *args, **kwargs",
            "DeepseekV4FlashMLAAttention._o_proj": "self, o, positions",
            "DeepseekV4FlashMLAAttention.forward_mqa": "self, q, kv, positions, output",
            "DeepseekV4FlashMLAAttention._forward_decode": (
                "self, q, kv_cache, swa_metadata, attn_metadata, swa_only, output"
            ),
            "DeepseekV4FlashMLAAttention._forward_prefill": (
                "self, q, positions, compressed_k_cache, swa_k_cache, output, attn_metadata, swa_metadata"
            ),
        },
        COMPRESSOR: {"DeepseekCompressor.forward": "self, kv_score, positions, rotary_emb"},
        INDEXER_OP: {
            "SparseAttnIndexer.forward_native": "self, hidden_states, q_quant, k, weights",
            "SparseAttnIndexer.forward_cuda": "self, hidden_states, q_quant, k, weights",
            "PrefillRowShard.from_metadata": "cls, prefill_metadata, num_decode_tokens",
            "PrefillRowShard.narrow": "self, chunk",
            "PrefillRowShard.exchange_topk": "self, topk_buffer, width",
        },
    },
    "sglang": {
        "sglang/srt/models/deepseek_v4.py": {"MqaAttentionBase._kernel_num_heads": "self, num_tokens"},
        "sglang/kernels/ops/attention/flash_mla_interface.py": {
            "flash_mla_sparse_fwd": (
                "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, *, use_legacy=True"
            ),
        },
        BACKEND: {
            "DeepseekV4AttnBackend._forward_prefill_sparse": (
                "self, q, layer_id, compress_ratio, forward_batch, token_to_kv_pool, core_attn_metadata, attn_sink, "
                "cos_sin_cache=None"
            ),
            "DSV4AttnMetadata.positions": "self",
            "DSV4Metadata.core_metadata": "self",
        },
        C4_INDEXER: {
            "C4IndexerBackendMixin.forward_c4_indexer": (
                "self, x, q_lora, c4_indexer, forward_batch, alt_streams=None, enable_multi_stream=False, "
                "q_lora_ready=None, skip_compressor=False, q_lora_quant=None"
            ),
            "C4IndexerBackendMixin._forward_prepare_multi_stream": (
                "self, x, q_lora, c4_indexer, positions, forward_batch, alt_streams=None, q_lora_ready=None"
            ),
            "C4IndexerBackendMixin._forward_prepare_normal": (
                "self, x, q_lora, c4_indexer, positions, forward_batch, skip_compressor=False, q_lora_quant=None"
            ),
            "C4IndexerBackendMixin._get_nonpaged_indexer_plan": (
                "self, *, c4_indexer, forward_batch, indexer_metadata, page_table, c4_seq_lens, query_rows"
            ),
            "C4IndexerBackendMixin._gather_nonpaged_index_k": "*, c4_indexer, token_to_kv_pool, plan",
        },
        COMPRESSOR_V2: {
            "CompressorBackendMixin._forward_compress_all_in_one": (
                "self, *, kv_score_buffer, kv_score_input, ape, head_dim, norm, freqs_cis_cache, kv_cache, is_indexer, "
                "rotate, compress_ratio, page_size, out_loc, use_fp4_indexer=False, bf16_store=False, "
                "kv_scale_cache=None, rope_cache=None, kv_layout=KVLayout.V4, fp8_2buff=False, kv_cache_rope=None"
            ),
            "CompressorBackendMixin.forward_unified": "self, x, forward_batch, layer_id, compressor",
            "CompressorBackendMixin._get_paged_compress_metadata": "self, compress_ratio",
        },
        "sglang/kernels/ops/attention/dsv4/compress.py": {
            "CompressorDecodePlan.is_decode": "self",
            "CompressorPrefillPlan.is_decode": "self",
        },
        "sglang/srt/layers/attention/dsv4/metadata.py": {"PagedIndexerMetadata.max_compressed_seq_len": "self"},
        "sglang/srt/layers/attention/dsa/dsa_topk_backend.py": {"DSATopKBackend.is_sgl_kernel": "self"},
        "sglang/srt/state_capturer/indexer_topk.py": {"get_global_indexer_capturer": ""},
        "sglang/srt/mem_cache/deepseek_v4_memory_pool.py": {
            "DeepSeekV4TokenToKVPool.get_index_k_with_scale_buffer": "self, layer_id",
        },
    },
}
"""Engine -> file -> function -> its arguments."""

FIELDS: dict[str, dict[str, dict[str, set[str]]]] = {
    "vllm": {
        "vllm/v1/attention/backends/mla/sparse_swa.py": {
            "DeepseekSparseSWAMetadata": {
                "block_table", "slot_mapping", "block_size", "query_start_loc", "query_start_loc_cpu", "is_valid_token",
                "token_to_req_indices", "decode_swa_indices", "decode_swa_lens", "num_decodes", "num_prefills",
                "num_decode_tokens", "num_prefill_tokens", "prefill_seq_lens", "prefill_seq_lens_cpu",
                "prefill_left_visible", "prefill_right_visible",
            },
        },
        "vllm/models/deepseek_v4/sparse_mla.py": {
            "DeepseekV4FlashMLAMetadata": {
                "block_table", "block_size", "slot_mapping", "c128a_global_decode_topk_indices",
                "c128a_decode_topk_lens",
            },
        },
        COMPRESSOR: {
            "CompressorMetadata": {
                "block_table", "slot_mapping", "block_size", "token_to_req_indices", "c128_boundary",
            },
        },
        "vllm/v1/attention/backends/mla/indexer.py": {
            "DeepseekV32IndexerMetadata": {
                "slot_mapping", "num_decode_tokens", "num_prefills", "decode", "prefill",
            },
            "DeepSeekV32IndexerDecodeMetadata": {
                "block_table", "seq_lens", "decode_lens", "requires_padding", "indices", "global_seq_lens",
            },
            "DeepseekV32IndexerPrefillMetadata": {"chunks", "row_shard_sizes"},
            "DeepseekV32IndexerPrefillChunkMetadata": {
                "block_table", "cu_seqlen_ks", "cu_seqlen_ke", "max_seqlen_k", "token_start", "token_end",
                "skip_kv_gather", "local_cu_seq_lens", "local_total_seq_lens", "max_local_total_seq_lens",
            },
        },
    },
    "sglang": {
        BACKEND: {
            "DeepseekV4AttnBackend": {"trtllm_attn", "mega_attn"},
            "DSV4AttnMetadata": {"c4_sparse_page_indices", "c4_sparse_raw_indices"},
            "DSV4Metadata": {"indexer_metadata"},
        },
        "sglang/srt/layers/attention/dsv4/metadata.py": {
            "PagedIndexerMetadata": {"page_table", "compressed_seq_lens", "compressed_page_size"},
            "NonPagedIndexerPlan": {"ks", "max_seqlen_k"},
        },
        "sglang/kernels/ops/attention/dsv4/compress.py": {
            "CompressorDecodePlan": {"compress_ratio", "plan_d"},
            "CompressorPrefillPlan": {"compress_ratio", "plan_c", "plan_w"},
        },
        COMPRESSOR_V2: {"CompressorBackendMixin": {"forward_indexer_compressor", "forward_core_compressor"}},
    },
}  # fmt: skip
"""Engine -> file -> class -> fields that are read here. Tests have metadata of these alone."""

ATTRIBUTES: dict[str, dict[str, dict[str, set[str]]]] = {
    "vllm": {
        ATTENTION: {
            "DeepseekV4Attention": {
                "n_local_heads", "padded_heads", "n_local_groups", "q_lora_rank", "o_lora_rank", "head_dim", "eps",
                "scale", "window_size", "compress_ratio", "attn_sink", "q_norm", "kv_norm", "wo_a", "wo_b",
                "rotary_emb", "topk_indices_buffer", "indexer", "compressor", "swa_cache_layer", "kv_cache",
                "max_num_batched_tokens", "max_model_len",
            },
            "DeepseekV4Indexer": {"use_fp4_kv", "softmax_scale", "n_head", "compressor"},
        },
        FLASHMLA: {"DeepseekV4FlashMLAAttention": {"_einsum_recipe", "_tma_aligned_scales"}},
        COMPRESSOR: {
            "DeepseekCompressor": {
                "compress_ratio", "head_dim", "coff", "k_cache_prefix", "use_fp4_cache", "rms_norm_eps", "ape", "norm",
                "state_cache", "_static_forward_context",
            },
        },
        INDEXER_OP: {
            "SparseAttnIndexer": {
                "k_cache", "topk_tokens", "head_dim", "max_model_len", "max_total_seq_len", "topk_indices_buffer",
                "skip_k_cache_insert", "use_fp4_cache", "candidate_blocks", "dense_mha_metadata_layer_name",
                "dcp_world_size", "use_pcp",
            },
        },
    },
    "sglang": {
        BACKEND: {
            "DeepseekV4AttnBackend": {
                "_flash_mla_with_kvcache", "_swa_interleaved", "is_dsv41", "token_to_kv_pool", "hisparse_coordinator",
                "forward_metadata",
            },
        },
        C4_INDEXER: {
            "C4Indexer": {"layer_id", "index_topk", "use_fp4_indexer"},
            "C4IndexerBackendMixin": {"debug_use_external_c4_sparse_indices", "dsa_topk_backend"},
        },
    },
}  # fmt: skip
"""Engine -> file -> class -> attributes that its __init__ sets."""

KEYWORDS: dict[str, dict[str, dict[str, set[str]]]] = {
    "vllm": {
        FLASHMLA: {
            "self._forward_prefill": {
                "q", "positions", "compressed_k_cache", "swa_k_cache", "output", "attn_metadata", "swa_metadata",
            },
            "self._forward_decode": {"q", "kv_cache", "swa_metadata", "attn_metadata", "swa_only", "output"},
        },
    },
    "sglang": {
        BACKEND: {
            "flash_mla_with_kvcache": {
                "q", "k_cache", "head_dim_v", "block_table", "cache_seqlens", "tile_scheduler_metadata",
                "softmax_scale", "is_fp8_kvcache", "indices", "topk_length", "attn_sink", "extra_k_cache",
                "extra_indices_in_kvcache", "extra_topk_length",
            },
            "flash_mla_sparse_fwd": {"q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"},
        },
        C4_INDEXER: {
            "attn_backend.forward_c4_indexer": {
                "x", "q_lora", "forward_batch", "c4_indexer", "alt_streams", "enable_multi_stream", "q_lora_ready",
                "skip_compressor", "**",
            },
        },
        COMPRESSOR_V2: {
            "self._forward_compress_all_in_one": {
                "kv_score_buffer", "kv_score_input", "ape", "head_dim", "norm", "freqs_cis_cache", "kv_cache",
                "is_indexer", "rotate", "compress_ratio", "page_size", "out_loc", "use_fp4_indexer", "bf16_store",
                "kv_scale_cache", "rope_cache", "kv_layout", "fp8_2buff", "kv_cache_rope",
            },
        },
    },
}  # fmt: skip
"""Engine -> file -> function -> the keywords of each call of it."""


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def find(tree: ast.Module, name: str) -> ast.AST | None:
    """A function or class of a module, "Class.method" of a class."""
    node: ast.AST | None = tree
    for part in name.split("."):
        inside = getattr(node, "body", [])
        node = next((n for n in inside if getattr(n, "name", None) == part), None)
    return node


def arguments(node: ast.AST) -> str:
    """Of a function, with defaults and without types."""
    assert isinstance(node, ast.FunctionDef)
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(node.args)


def fields(node: ast.AST) -> set[str]:
    """Names that a class's body gives a type or a value."""
    found = set()
    for line in getattr(node, "body", []):
        for target in [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", []):
            found |= {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


def attributes(node: ast.AST) -> set[str]:
    """What methods of a class set in self."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and ast.unparse(target.value) == "self"
    }


def calls(tree: ast.Module, name: str) -> list[set[str]]:
    """Keywords of each call of a function, by the name it is called by."""
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]
    return [{keyword.arg or "**" for keyword in call.keywords} for call in found]


def differences(engine: str, folder: Path) -> list[str]:
    """Where an unpacked wheel is not as written above."""
    wrong = []
    for file, functions in SIGNATURES[engine].items():
        for name, expected in functions.items():
            node = find(parse(folder / file), name)
            got = None if node is None else arguments(node)
            if got != expected:
                wrong.append(f"{file}: {name}({expected}): got {got}")
    for table, read in ((FIELDS, fields), (ATTRIBUTES, attributes)):
        for file, classes in table[engine].items():
            for name, expected_names in classes.items():
                node = find(parse(folder / file), name)
                missing = expected_names - (set() if node is None else read(node))
                wrong += [f"{file}: {name}.{field}: not there" for field in sorted(missing)]
    for file, functions_called in KEYWORDS[engine].items():
        for name, expected_names in functions_called.items():
            found = calls(parse(folder / file), name)
            if found != [expected_names]:
                wrong.append(f"{file}: {name}: expected one call with {sorted(expected_names)}, got {found}")
    return wrong


def main() -> None:
    engine, folder = sys.argv[1:]
    wrong = differences(engine, Path(folder))
    print("\n".join(wrong) if wrong else f"{engine}: the seams are where they were")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
