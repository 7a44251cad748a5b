# SPDX-License-Identifier: Apache-2.0
"""What the K-cache ops do to raw bytes, as Python loops over explicit offsets."""

from __future__ import annotations

import numpy as np
import torch

from tests import helpers, oracle


def page_bytes(cache: torch.Tensor) -> int:
    """Page stride in bytes."""
    return cache.stride(0) * cache.element_size()


def insert_mla(cache: torch.Tensor, block_size: int, slots: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """All bytes behind an fp8_ds_mla cache after bf16 rows were stored at `slots`; the cache itself is not written."""
    raw = helpers.raw_bytes(cache).numpy().copy()
    first = cache.storage_offset() * cache.element_size()
    codes, scales = oracle.quantize_blocks(oracle.to_numpy(rows)[:, :448], 64, "e4m3")
    rope = rows[:, 448:].contiguous().view(torch.uint8).numpy()
    for t, slot in enumerate(slots.tolist()):
        if not 0 <= slot < cache.shape[0] * block_size:
            continue
        page = first + slot // block_size * page_bytes(cache)
        data, scale = page + slot % block_size * 576, page + block_size * 576 + slot % block_size * 8
        raw[data : data + 448] = codes[t]
        raw[data + 448 : data + 576] = rope[t]
        raw[scale : scale + 7] = scales[t]
        raw[scale + 7] = 0
    return torch.from_numpy(raw)


def insert_plain(cache: torch.Tensor, block_size: int, slots: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """All bytes behind a plain cache after encoded rows (uint8 [n, row bytes]) were stored at `slots`."""
    raw = helpers.raw_bytes(cache).numpy().copy()
    width = rows.shape[1]
    for t, slot in enumerate(slots.tolist()):
        if 0 <= slot < cache.shape[0] * block_size:
            start = slot // block_size * page_bytes(cache) + slot % block_size * width
            raw[start : start + width] = rows[t]
    return torch.from_numpy(raw)


def read_mla(cache: torch.Tensor, block_size: int, slot: int) -> np.ndarray:
    """float64 [512] of one record, from the bytes."""
    raw = helpers.raw_bytes(cache).numpy()
    page = cache.storage_offset() + slot // block_size * page_bytes(cache)
    data, scale = page + slot % block_size * 576, page + block_size * 576 + slot % block_size * 8
    nope = oracle.E4M3[raw[data : data + 448]] * np.repeat(np.exp2(raw[scale : scale + 7] - 127.0), 64)
    rope = raw[data + 448 : data + 576].view(np.uint16).astype(np.uint32) << 16
    return np.concatenate([nope, rope.view(np.float32).astype(np.float64)])


def turn(x: np.ndarray, positions: torch.Tensor, table: torch.Tensor) -> np.ndarray:
    """fp32 [n, ..., 512] with the last 64 columns rotated; positions outside the table take its nearest row."""
    out = x.astype(np.float32)
    for i, p in enumerate(positions.tolist()):
        row = table[min(max(p, 0), table.shape[0] - 1)].numpy()
        out[i, ..., 448:] = oracle.rope_f32(out[i, ..., 448:], row[:32], row[32:])
    return out
