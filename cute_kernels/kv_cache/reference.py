# SPDX-License-Identifier: Apache-2.0
"""What the K-cache ops mean, in plain torch."""

from __future__ import annotations

import torch

from cute_kernels import formats, numerics
from cute_kernels.kv_cache.call import (
    Bf16InsertCall,
    Fp8InsertCall,
    GatherCall,
    InsertCall,
    PackCall,
    QuantInsertCall,
    UnpackCall,
)
from cute_kernels.paging import entries_to_slots


def quantize_and_insert_k_cache(call: InsertCall) -> None:
    fmt = formats.FORMATS[call.kv_format]
    fmt.write(call.k_cache, call.block_size, call.slot_mapping, call.k[: call.slot_mapping.shape[0]])


def dequantize_and_gather_k_cache(call: GatherCall) -> None:
    fmt = formats.FORMATS[call.kv_format]
    capacity = call.k_cache.shape[0] * call.block_size
    lens = call.seq_lens if call.gather_lens is None else torch.minimum(call.gather_lens, call.seq_lens)
    for r, (seq_len, length) in enumerate(zip(call.seq_lens.tolist(), lens.tolist(), strict=True)):
        first = seq_len - length
        length = max(min(length, call.out.shape[1] - call.offset), 0)
        entries = torch.arange(first, first + length, device=call.out.device)
        slots = entries_to_slots(entries, torch.full_like(entries, r), call.block_table, call.block_size)
        here = formats.valid_slots(slots, capacity)
        rows = call.out[r, call.offset : call.offset + length]
        rows[here] = fmt.read(call.k_cache, call.block_size, slots[here])
        rows[~here] = 0


def pack_records(call: PackCall) -> None:
    fmt, block_size = formats.RECORD_FORMATS[call.kv_format], call.cache.shape[1]
    here = formats.valid_slots(call.slots, call.cache.shape[0] * block_size)
    call.out.zero_()
    call.out[here] = torch.cat(fmt.read_fields(call.cache, block_size, call.slots[here]), dim=1)


def unpack_records(call: UnpackCall) -> None:
    fmt, block_size = formats.RECORD_FORMATS[call.kv_format], call.cache.shape[1]
    fields = call.records.split([width for _, width in fmt.fields(1)], dim=1)
    fmt.write_fields(call.cache, block_size, call.slots, *fields)


def qnorm_rope_kv_rope_quant_insert(call: QuantInsertCall) -> None:
    call.q.copy_(_turned_q(call))
    rows = numerics.to_bf16(_turned_kv(call))
    formats.FORMATS[call.kv_format].write(call.k_cache, call.block_size, call.slot_mapping, rows)


def qnorm_rope_kv_rope_full_cache_bf16_insert(call: Bf16InsertCall) -> None:
    call.q.copy_(_turned_q(call))
    rows = _turned_kv(call)
    formats.FORMATS[call.kv_format].write(call.kv_cache, call.block_size, call.slot_mapping, rows)


def qnorm_rope_kv_rope_full_cache_fp8_insert(call: Fp8InsertCall) -> None:
    turned = _turned_q(call)
    call.q_fp8.copy_(numerics.to_e4m3(turned * call.q_scale_inv).view(torch.float8_e4m3fn))
    rows = _turned_kv(call)
    formats.FORMATS[call.kv_format].write(call.kv_cache, call.block_size, call.slot_mapping, rows, call.fp8_kv_scale)


def _turned_q(call: QuantInsertCall | Bf16InsertCall | Fp8InsertCall) -> torch.Tensor:
    """fp32 [N, H, 512]: every head normalized without a weight (or not at all), then rotated."""
    x = numerics.rms_norm(call.q, None, call.eps) if call.apply_q_norm else call.q
    return numerics.rotate(x, call.positions, call.cos_sin_cache)


def _turned_kv(call: QuantInsertCall | Bf16InsertCall | Fp8InsertCall) -> torch.Tensor:
    """fp32 [T', 512]: the rows that slot_mapping covers, rotated; padded rows behind them are not looked at."""
    rows = call.slot_mapping.shape[0]
    return numerics.rotate(call.kv[:rows], call.positions[:rows], call.cos_sin_cache)
