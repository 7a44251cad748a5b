# SPDX-License-Identifier: Apache-2.0
"""Shared by the GPU tests of the ops that store compressed entries: copies on the GPU, calls, comparison."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.compressor import ops as _registered  # noqa: F401
from cute_kernels.compressor.verify_cases import entry_difference
from cute_kernels.runtime.ops import OPS
from cute_kernels.runtime.record import record_calls
from tests.helpers import raw_bytes

FUSED, COMPRESS = "fused_compress_norm_rope_store", "compress_norm_rope_store"

Arguments = dict[str, Any]


def gpu_copy(value: Any) -> Any:
    """A tensor on the GPU with the same strides and all the bytes around it; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    storage = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device="cuda")
    storage.copy_(raw_bytes(value))
    return torch.empty(0, dtype=value.dtype, device="cuda").set_(
        storage.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    )


def on_gpu(a: Arguments) -> Arguments:
    return {name: gpu_copy(value) for name, value in a.items()}


def run(op: str, a: Arguments) -> None:
    """Call the op with arguments in the schema's order; it must not fall back to the reference on a GPU."""
    with record_calls() as recording:
        OPS[op].overload(*a.values())
    if a["kv_cache"].is_cuda:
        assert [call.implementation for call in recording.calls] == ["kernel"]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(raw_bytes(a).cpu(), raw_bytes(b).cpu())


def assert_entries(kv_format: str, got: torch.Tensor, want: torch.Tensor, slots: torch.Tensor) -> None:
    """As entry_difference, for a pool on the GPU and one on the CPU."""
    assert not (difference := entry_difference(kv_format, gpu_to_cpu(got), want, slots)), difference


def gpu_to_cpu(cache: torch.Tensor) -> torch.Tensor:
    """A pool on the CPU, with its padding."""
    storage = raw_bytes(cache).cpu()
    return torch.empty(0, dtype=cache.dtype).set_(
        storage.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
    )


def check(op: str, a: Arguments) -> Arguments:
    """Run on the GPU and on the CPU and compare all that was written. Returns what the GPU has."""
    gpu = on_gpu(a)
    run(op, gpu)
    run(op, a)
    if op == FUSED:
        assert same_bytes(gpu["state_cache"], a["state_cache"])
    assert_entries(a["kv_format"], gpu["kv_cache"], a["kv_cache"], a["kv_slot_mapping"])
    return gpu
