"""Index tables for the attention ops: which rows of which cache a token attends to."""

from __future__ import annotations

from cute_kernels.indices.ops_combined import build_flashinfer_mixed_sparse_indices, combine_topk_swa_indices
from cute_kernels.indices.ops_slots import (
    build_c128a_topk_metadata,
    compute_decode_swa_indices,
    compute_global_topk_indices_and_lens,
)
from cute_kernels.indices.ops_step import StepLayout, build_step_metadata

__all__ = [
    "StepLayout",
    "build_c128a_topk_metadata",
    "build_flashinfer_mixed_sparse_indices",
    "build_step_metadata",
    "combine_topk_swa_indices",
    "compute_decode_swa_indices",
    "compute_global_topk_indices_and_lens",
]
