# SPDX-License-Identifier: Apache-2.0
"""The arguments of the ops that store compressed entries, by name, in the schemas' order."""

from __future__ import annotations

from typing import Any, NamedTuple


class CompressCall(NamedTuple):
    """Of compress_norm_rope_store."""

    state_cache: Any
    token_to_req_indices: Any
    positions: Any
    slot_mapping: Any
    block_table: Any
    cos_sin_cache: Any
    kv_cache: Any
    kv_slot_mapping: Any
    rms_norm_weight: Any
    fp8_scale: Any
    rms_norm_eps: float
    compress_ratio: int
    kv_format: str
    e2m1_rounding: str
    index_hadamard: bool


class FusedCall(NamedTuple):
    """Of fused_compress_norm_rope_store."""

    kv_score: Any
    ape: Any
    positions: Any
    token_to_req_indices: Any
    query_start_loc: Any
    state_cache: Any
    slot_mapping: Any
    block_table: Any
    cos_sin_cache: Any
    kv_cache: Any
    kv_slot_mapping: Any
    rms_norm_weight: Any
    min_restart: Any
    fp8_scale: Any
    rms_norm_eps: float
    compress_ratio: int
    keep_every: int
    kv_format: str
    persist: str
    e2m1_rounding: str
    index_hadamard: bool
    use_pdl: bool
