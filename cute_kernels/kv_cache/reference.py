"""What the K-cache ops mean, in plain torch."""

from __future__ import annotations

import torch

from cute_kernels import formats
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
        length = min(length, out.shape[1] - offset)
        if length <= 0:
            continue
        entries = torch.arange(seq_len - lens[r], seq_len - lens[r] + length, device=out.device)
        slots = entries_to_slots(entries, torch.full_like(entries, r), block_table, block_size)
        here = formats.valid_slots(slots, capacity)
        out[r, offset : offset + length][here] = fmt.read(k_cache, block_size, slots[here])
