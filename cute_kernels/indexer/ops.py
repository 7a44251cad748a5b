"""The indexer: quantized queries, gathered keys, scores and the picks of each row, one after the other or in one op.

A score is logit[m, n] = k_scale[n] * sum over heads h of max(0, <q[m, h], k[n]>) * weights[m, h].
"""

from __future__ import annotations

from cute_kernels.indexer.ops_logits import cp_gather_indexer_k_quant_cache, mqa_logits, paged_mqa_logits
from cute_kernels.indexer.ops_query import fused_indexer_q_rope_quant
from cute_kernels.indexer.ops_score_top_k import (
    score_top_k_decode,
    score_top_k_prefill,
    score_top_k_workspace_size,
)
from cute_kernels.indexer.ops_topk import all_visible_entries, top_k_per_row_decode, top_k_per_row_prefill

__all__ = [
    "all_visible_entries",
    "cp_gather_indexer_k_quant_cache",
    "fused_indexer_q_rope_quant",
    "mqa_logits",
    "paged_mqa_logits",
    "score_top_k_decode",
    "score_top_k_prefill",
    "score_top_k_workspace_size",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
]
