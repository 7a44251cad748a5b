"""The MXFP4 form of fused_indexer_q_rope_quant. The kernel: query.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import query_launch
from cute_kernels.indexer.query import QueryKey
from cute_kernels.numerics import E2M1_ROUNDINGS


def deployment_keys(config: Any, tp: int, arch: str) -> list[QueryKey]:
    """Layers with an MXFP4 cache of indexer keys: either rounding, with or without a Hadamard transform."""
    if 4 not in config.compress_ratios:
        return []
    forms = [(rounding, transformed) for rounding in E2M1_ROUNDINGS for transformed in (False, True)]
    return [key for form in forms for key in query_launch.keys(arch, *form)]


def supports(
    positions: Any,
    index_q: Any,
    index_q_cos_sin_cache: Any,
    index_weights: Any,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    e2m1_rounding: str,
    index_hadamard: bool,
    q_quant: Any,
    q_scale: Any,
    weights_out: Any,
    round_weights: bool,
    use_pdl: bool,
) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return query_launch.is_supported(index_q, index_q_cos_sin_cache, q_quant, 4, is_mxfp4=True)


def launch(
    positions: Any,
    index_q: Any,
    index_q_cos_sin_cache: Any,
    index_weights: Any,
    index_weights_softmax_scale: float,
    index_weights_head_scale: float,
    e2m1_rounding: str,
    index_hadamard: bool,
    q_quant: Any,
    q_scale: Any,
    weights_out: Any,
    round_weights: bool,
    use_pdl: bool,
) -> None:
    """Run the kernel on the current stream of index_q's device. Arguments in the schema's order, checked, supported."""
    inputs = (positions, index_q, index_q_cos_sin_cache, index_weights)
    factors = (index_weights_softmax_scale, index_weights_head_scale)
    query_launch.run(
        *inputs, *factors, e2m1_rounding, index_hadamard, q_quant, q_scale, weights_out, round_weights, use_pdl
    )
