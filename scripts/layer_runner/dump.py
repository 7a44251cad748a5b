# SPDX-License-Identifier: Apache-2.0
"""The arrays of --dump: the first request, in token order, as float32 (indices as int32)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cute_kernels.layers import DeepseekV4MultiHeadLatentAttentionWrapper
from layer_runner.pools import Pools
from layer_runner.requests import Request
from layer_runner.stepping import BatchResult

HEAD_DIM = 512
INDEX_DIM = 128


def _entries(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, pools: Pools, name: str, length: int, width: int
) -> torch.Tensor:
    """Entries of the first request, read back through its block table and dequantized."""
    if name not in pools.by_name():
        return torch.empty(0, width)
    cache, _, _ = pools.by_name()[name]
    slots = pools.slots(name, 0, *pools.live_rows(name, 0, length))
    scale = layer.mla_attn.compressor_scale if name == "compressed cache" else None
    extra = () if scale is None else (scale,)
    return cache.kv_format.read(cache.data, cache.block_size, slots, *extra)


def dump_arrays(
    layer: DeepseekV4MultiHeadLatentAttentionWrapper, pools: Pools, request: Request, result: BatchResult
) -> dict[str, np.ndarray]:
    """Arrays by name; those that a layer kind does not have are there with a dimension of 0."""
    rows = request.length
    tensors = dict(result.captured)
    tensors.setdefault("idx_q", torch.empty(rows, 0, INDEX_DIM))
    topk = tensors.pop("topk", torch.empty(rows, 0, dtype=torch.int32))
    tensors["comp"] = _entries(layer, pools, "compressed cache", rows, HEAD_DIM)
    tensors["idx_k"] = _entries(layer, pools, "indexer cache", rows, INDEX_DIM)
    tensors["out"] = result.outputs[0]
    tensors["hidden_states"] = request.hidden_states
    arrays = {name: value.float().cpu().numpy() for name, value in tensors.items()}
    return {**arrays, "topk": topk.int().cpu().numpy()}


def write_dump(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write exactly `path`; numpy would add a suffix to a name."""
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
