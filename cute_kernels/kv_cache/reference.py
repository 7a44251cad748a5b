# SPDX-License-Identifier: Apache-2.0
"""What the K-cache ops mean, in plain torch."""

from __future__ import annotations

import torch

from cute_kernels import formats, numerics
from cute_kernels.paging import entries_to_slots


def quantize_and_insert_k_cache(
    k: torch.Tensor, k_cache: torch.Tensor, slot_mapping: torch.Tensor, block_size: int, kv_format: str
) -> None:
    fmt = formats.FORMATS[kv_format]
    fmt.write(k_cache, block_size, slot_mapping, k[: slot_mapping.shape[0]])


def dequantize_and_gather_k_cache(
    out: torch.Tensor,
    k_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    gather_lens: torch.Tensor | None,
    block_table: torch.Tensor,
    block_size: int,
    offset: int,
    kv_format: str,
) -> None:
    fmt = formats.FORMATS[kv_format]
    capacity = k_cache.shape[0] * block_size
    lens = seq_lens if gather_lens is None else torch.minimum(gather_lens, seq_lens)
    for r, (seq_len, length) in enumerate(zip(seq_lens.tolist(), lens.tolist(), strict=True)):
        first = seq_len - length
        length = min(length, out.shape[1] - offset)
        if length <= 0:
            continue
        entries = torch.arange(first, first + length, device=out.device)
        slots = entries_to_slots(entries, torch.full_like(entries, r), block_table, block_size)
        here = formats.valid_slots(slots, capacity)
        rows = out[r, offset : offset + length]
        rows[here] = fmt.read(k_cache, block_size, slots[here])
        rows[~here] = 0


def qnorm_rope_kv_rope_quant_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    apply_q_norm: bool,
    kv_format: str,
    use_pdl: bool,
) -> None:
    q.copy_(_turned_q(q, positions, cos_sin_cache, eps, apply_q_norm))
    rows = _turned_kv(kv, slot_mapping, positions, cos_sin_cache).to(torch.bfloat16)
    formats.FORMATS[kv_format].write(k_cache, block_size, slot_mapping, rows)


def qnorm_rope_kv_rope_full_cache_bf16_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    block_size: int,
    apply_q_norm: bool,
    kv_format: str,
    use_pdl: bool,
) -> None:
    q.copy_(_turned_q(q, positions, cos_sin_cache, eps, apply_q_norm))
    rows = _turned_kv(kv, slot_mapping, positions, cos_sin_cache)
    formats.FORMATS[kv_format].write(kv_cache, block_size, slot_mapping, rows)


def qnorm_rope_kv_rope_full_cache_fp8_insert(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_fp8: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    fp8_kv_scale: torch.Tensor,
    q_scale_inv: torch.Tensor,
    eps: float,
    block_size: int,
    apply_q_norm: bool,
    kv_format: str,
    use_pdl: bool,
) -> None:
    turned = _turned_q(q, positions, cos_sin_cache, eps, apply_q_norm)
    q_fp8.copy_(numerics.to_e4m3(turned * q_scale_inv).view(torch.float8_e4m3fn))
    rows = _turned_kv(kv, slot_mapping, positions, cos_sin_cache)
    formats.FORMATS[kv_format].write(kv_cache, block_size, slot_mapping, rows, fp8_kv_scale)


def _turned_q(
    q: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, eps: float, apply_q_norm: bool
) -> torch.Tensor:
    """fp32 [N, H, 512]: every head normalized without a weight (or not at all), then rotated."""
    x = numerics.rms_norm(q, None, eps) if apply_q_norm else q
    return numerics.rotate(x, positions, cos_sin_cache)


def _turned_kv(
    kv: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> torch.Tensor:
    """fp32 [T', 512]: the rows that slot_mapping covers, rotated; padded rows behind them are not looked at."""
    rows = slot_mapping.shape[0]
    return numerics.rotate(kv[:rows], positions[:rows], cos_sin_cache)
