"""fused_indexer_q_rope_quant_fp8 on a GPU. Kernel, choice and call: query.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import query
from cute_kernels.indexer.query import QueryCall, QueryKey


def deployment_keys(config: Any, tp: int, arch: str) -> list[QueryKey]:
    """Layers with an FP8 cache of indexer keys, with or without a Hadamard transform."""
    if 4 not in config.compress_ratios:
        return []
    return [key for transformed in (False, True) for key in query.keys(arch, "", transformed)]


def call_of(
    positions: Any,
    index_q: Any,
    index_q_cos_sin_cache: Any,
    index_weights: Any,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    index_hadamard: bool,
    q_quant: Any,
    weights_out: Any,
    round_weights: bool,
    use_pdl: bool,
) -> QueryCall:
    """Of arguments in the schema's order."""
    inputs = (positions, index_q, index_q_cos_sin_cache, index_weights)
    factors = (index_weights_softmax_scale, index_weights_head_scale)
    return QueryCall(*inputs, *factors, "", index_hadamard, q_quant, None, weights_out, round_weights, use_pdl)


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return call_of(*args).supported()


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of index_q's device. Arguments in the schema's order, checked, supported."""
    call_of(*args).launch()
