"""Calls that the kernels of this room are verified with."""

from __future__ import annotations

from cute_kernels.indexer import examples_logits, examples_query, examples_score_top_k, examples_topk

EXAMPLES = {
    **examples_query.EXAMPLES,
    **examples_topk.EXAMPLES,
    **examples_logits.EXAMPLES,
    **examples_score_top_k.EXAMPLES,
}
