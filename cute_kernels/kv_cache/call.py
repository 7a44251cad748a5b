# SPDX-License-Identifier: Apache-2.0
"""Calls of the K-cache ops: their arguments by name, in the order of the schemas."""

from __future__ import annotations

from typing import NamedTuple

import torch


class InsertCall(NamedTuple):
    """quantize_and_insert_k_cache."""

    k: torch.Tensor
    k_cache: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    kv_format: str


class GatherCall(NamedTuple):
    """dequantize_and_gather_k_cache."""

    out: torch.Tensor
    k_cache: torch.Tensor
    seq_lens: torch.Tensor
    gather_lens: torch.Tensor | None
    block_table: torch.Tensor
    block_size: int
    offset: int
    kv_format: str


class QuantInsertCall(NamedTuple):
    """fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert."""

    q: torch.Tensor
    kv: torch.Tensor
    k_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    eps: float
    block_size: int
    apply_q_norm: bool
    kv_format: str
    use_pdl: bool


class Bf16InsertCall(NamedTuple):
    """fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_bf16_insert."""

    q: torch.Tensor
    kv: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    eps: float
    block_size: int
    apply_q_norm: bool
    kv_format: str
    use_pdl: bool


class Fp8InsertCall(NamedTuple):
    """fused_deepseek_v4_qnorm_rope_kv_rope_full_cache_fp8_insert."""

    q: torch.Tensor
    kv: torch.Tensor
    q_fp8: torch.Tensor
    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    fp8_kv_scale: torch.Tensor
    q_scale_inv: torch.Tensor
    eps: float
    block_size: int
    apply_q_norm: bool
    kv_format: str
    use_pdl: bool


class PackCall(NamedTuple):
    """pack_records."""

    cache: torch.Tensor
    slots: torch.Tensor
    kv_format: str
    out: torch.Tensor
    use_pdl: bool


class UnpackCall(NamedTuple):
    """unpack_records."""

    records: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    kv_format: str
    use_pdl: bool
