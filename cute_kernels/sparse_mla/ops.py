"""Sparse MLA attention: the functions users call, by family in the `ops_*` files."""

from __future__ import annotations

from cute_kernels.sparse_mla.ops_decode import sparse_mla_decode, sparse_mla_decode_workspace_size
from cute_kernels.sparse_mla.ops_merge import merge_attention_states
from cute_kernels.sparse_mla.ops_mixed import sparse_mla_mixed
from cute_kernels.sparse_mla.ops_prefill import sparse_mla_prefill, sparse_mla_prefill_paged

__all__ = [
    "merge_attention_states",
    "sparse_mla_decode",
    "sparse_mla_decode_workspace_size",
    "sparse_mla_mixed",
    "sparse_mla_prefill",
    "sparse_mla_prefill_paged",
]
