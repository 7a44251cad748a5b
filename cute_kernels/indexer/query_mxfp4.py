"""fused_indexer_q_rope_quant_mxfp4 on a GPU. Kernel, choice and call: query.py."""

from __future__ import annotations

from typing import Any

from cute_kernels.indexer import query
from cute_kernels.indexer.query import QueryCall, QueryKey
from cute_kernels.numerics import E2M1_ROUNDINGS


def deployment_keys(config: Any, tp: int, arch: str) -> list[QueryKey]:
    """Layers with an MXFP4 cache of indexer keys: either rounding, with or without a Hadamard transform."""
    if 4 not in config.compress_ratios:
        return []
    forms = [(rounding, transformed) for rounding in E2M1_ROUNDINGS for transformed in (False, True)]
    return [key for form in forms for key in query.keys(arch, *form)]


def supports(*args: Any) -> tuple[bool, str]:
    """Whether `launch` can take these (checked) arguments, and if not, why."""
    return QueryCall(*args).supported()


def launch(*args: Any) -> None:
    """Run the kernel on the current stream of index_q's device. Arguments in the schema's order, checked, supported."""
    QueryCall(*args).launch()
