# SPDX-License-Identifier: Apache-2.0
"""Calls of the compressor's ops: their arguments by name, in the order of the schemas."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SaveCall(NamedTuple):
    """save_partial_states."""

    kv: torch.Tensor
    score: torch.Tensor
    ape: torch.Tensor
    positions: torch.Tensor
    state_cache: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    compress_ratio: int


class SlotsCall(NamedTuple):
    """get_compressed_slot_mapping."""

    out: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor | None
    num_tokens: int
    block_size: int
    compress_ratio: int


class CompressCall(NamedTuple):
    """compress_norm_rope_store."""

    state_cache: torch.Tensor
    token_to_req_indices: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    cos_sin_cache: torch.Tensor
    kv_cache: torch.Tensor
    kv_slot_mapping: torch.Tensor
    rms_norm_weight: torch.Tensor
    fp8_scale: torch.Tensor | None
    rms_norm_eps: float
    compress_ratio: int
    kv_format: str
    e2m1_rounding: str
    index_hadamard: bool


class FusedCall(NamedTuple):
    """fused_compress_norm_rope_store."""

    kv_score: torch.Tensor
    ape: torch.Tensor
    positions: torch.Tensor
    token_to_req_indices: torch.Tensor
    query_start_loc: torch.Tensor
    state_cache: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    cos_sin_cache: torch.Tensor
    kv_cache: torch.Tensor
    kv_slot_mapping: torch.Tensor
    rms_norm_weight: torch.Tensor
    min_restart: torch.Tensor | None
    fp8_scale: torch.Tensor | None
    rms_norm_eps: float
    compress_ratio: int
    keep_every: int
    kv_format: str
    persist: str
    e2m1_rounding: str
    index_hadamard: bool
    use_pdl: bool
    cyclic_table: bool = False
    raw_scores: bool = False


class LatentCall(NamedTuple):
    """compress_latent."""

    kv_score: torch.Tensor
    positions: torch.Tensor
    token_to_req_indices: torch.Tensor | None
    query_start_loc: torch.Tensor | None
    state_cache: torch.Tensor | None
    slot_mapping: torch.Tensor | None
    norm_weight: torch.Tensor
    eps: float
    compress_ratio: int
    out: torch.Tensor
    use_pdl: bool


class RopeInsertCall(NamedTuple):
    """rope_quant_insert."""

    latent: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    compress_ratio: int
    kv_format: str
    use_pdl: bool


class KeyStoreCall(NamedTuple):
    """k_norm_rope_store."""

    k: torch.Tensor
    norm_weight: torch.Tensor
    eps: float
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    compress_ratio: int
    kv_format: str
    use_pdl: bool
