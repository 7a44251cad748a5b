# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: which slice of a layer a rank owns, and how partial outputs are summed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(x)
    return x


@dataclass(frozen=True)
class TensorParallel:
    """Rank and size of the tensor-parallel group.

    wq_b, attn_sink, wo_a's groups and wo_b are sliced by rank; everything else is replicated. Each rank's output is a
    partial sum; `reduce` adds them up (default: torch.distributed's all_reduce on the default group) in
    `partial_dtype`.
    """

    rank: int = 0
    size: int = 1
    reduce: Callable[[torch.Tensor], torch.Tensor] = _all_reduce
    partial_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"TensorParallel: rank: expected 0 <= rank < size, got rank {self.rank} of {self.size}")

    def shard(self, count: int, what: str) -> int:
        """This rank's share of `count` things, which must divide evenly."""
        if count % self.size:
            raise ValueError(f"TensorParallel: size: expected a divisor of {what} = {count}, got {self.size}")
        return count // self.size

    def slice(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's contiguous part of `x` along `dim`."""
        share = self.shard(x.shape[dim], f"dimension {dim}")
        return x.narrow(dim, self.rank * share, share)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' partial outputs."""
        return partial if self.size == 1 else self.reduce(partial)
