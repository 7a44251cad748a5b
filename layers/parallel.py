# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: which slice of a layer a rank owns, how partial outputs are summed, and how ranks agree."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch

from .communicator import Communicator, GroupCommunicator

T = TypeVar("T")

INDEXER_FORMS = ("replicated", "rows", "auto")


@dataclass(frozen=True)
class TensorParallel:
    """Rank and size of the tensor-parallel group.

    wq_b, attn_sink, wo_a's groups and wo_b are sliced by rank; everything else is replicated, and so must be the
    step's metadata, caches' block tables included. Each rank's output is a partial sum; one all_reduce adds them up.

    rank, size      of the group, which they are taken from where they are left out
    reduce          an engine's own sum of partial outputs [T, hidden], in place of the group's all_reduce
    partial_dtype   of the partial outputs; their sum is rounded to bf16. float32 halves the rounding error of bf16 and
                    doubles the bytes. Hopper multiplies wo_b in FP8 for both; the other GPUs' FP8 product stores bf16
                    only, so that there wo_b is dequantized for float32
    group           a Communicator, or what GroupCommunicator takes: a ProcessGroup or a DeviceMesh of one dimension.
                    None: torch.distributed's default group
    indexer         "replicated": every rank scores all rows of a step for the indexer's top-k. "rows": each rank scores
                    its share of them, and the ranks gather the picks. "auto": the faster one by measured times. Same
                    bits, as long as a score depends on its row and key only
    check_steps     before every step the ranks compare its rows, lengths, slots and hidden states, and all raise
                    ValueError where they differ. Waits for the GPU: for finding errors
    """

    rank: int = 0
    size: int = 1
    reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
    partial_dtype: torch.dtype = torch.bfloat16
    group: Any = None
    indexer: str = "replicated"
    check_steps: bool = False

    def __post_init__(self) -> None:
        if self.group is not None and (self.rank, self.size) == (0, 1):
            object.__setattr__(self, "rank", self.communicator.rank)
            object.__setattr__(self, "size", self.communicator.size)
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"TensorParallel: rank: expected 0 <= rank < size, got rank {self.rank} of {self.size}")
        if self.group is not None:
            self._check_group(self.communicator)
        if self.indexer not in INDEXER_FORMS:
            raise ValueError(f"TensorParallel: indexer: expected one of {INDEXER_FORMS}, got {self.indexer!r}")
        if self.partial_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"TensorParallel: partial_dtype: expected bfloat16 or float32, got {self.partial_dtype}")

    @cached_property
    def communicator(self) -> Communicator:
        """The group's collectives; the default group is looked up when they are first needed."""
        if isinstance(self.group, Communicator):
            return self.group
        found = GroupCommunicator(self.group)
        if self.group is None:
            self._check_group(found)
        return found

    def _check_group(self, found: Communicator) -> None:
        if (found.rank, found.size) != (self.rank, self.size):
            raise ValueError(
                f"TensorParallel: group: expected rank {self.rank} of {self.size}, got rank {found.rank} of "
                f"{found.size}"
            )

    def shard(self, count: int, what: str) -> int:
        """This rank's share of `count` things, which must divide evenly."""
        if count % self.size:
            raise ValueError(f"TensorParallel: size: expected a divisor of {what} = {count}, got {self.size}")
        return count // self.size

    def slice(self, x: torch.Tensor, dim: int, ranks: int = 1) -> torch.Tensor:
        """This rank's contiguous part of `x` along `dim`, or that of the `ranks` neighbours it is one of."""
        share = self.shard(x.shape[dim], f"dimension {dim}") * ranks
        return x.narrow(dim, self.rank // ranks * share, share)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' partial outputs, in bf16."""
        if self.size == 1:
            return partial
        if self.reduce is not None:
            return self.reduce(partial).to(torch.bfloat16)
        self.communicator.all_reduce(partial)
        return partial.to(torch.bfloat16)

    @property
    def has_collectives(self) -> bool:
        """Whether ranks exchange anything through the group."""
        return self.size > 1 and (self.reduce is None or self.indexer != "replicated" or self.group is not None)

    def together(self, step: Callable[[], T]) -> T:
        """step(), which may have collectives: if it raises, the group is aborted, and no rank waits for this one."""
        if not self.has_collectives:
            return step()
        try:
            return step()
        except BaseException:
            self.communicator.abort()
            raise


def verify_ranks(communicator: Communicator, what: str, facts: Mapping[str, str]) -> None:
    """Raise the same ValueError on every rank unless all of them hold the same facts: by name, what is so here.

    Waits for the other ranks.
    """
    text = json.dumps(dict(facts), sort_keys=True).encode()
    device = communicator.device
    size = torch.tensor([len(text)], dtype=torch.int64, device=device)
    sizes = torch.empty(communicator.size, 1, dtype=torch.int64, device=device)
    communicator.all_gather(sizes, size)
    lengths = sizes.flatten().tolist()
    padded = np.zeros(max(lengths), dtype=np.uint8)
    padded[: len(text)] = np.frombuffer(text, dtype=np.uint8)
    texts = torch.empty(communicator.size, max(lengths), dtype=torch.uint8, device=device)
    communicator.all_gather(texts, torch.from_numpy(padded).to(device))
    rows = texts.cpu().numpy()
    held = [json.loads(rows[rank, :length].tobytes()) for rank, length in enumerate(lengths)]
    for rank, other in enumerate(held):
        for name in sorted(held[0].keys() | other.keys()):
            mine, theirs = held[0].get(name, "nothing"), other.get(name, "nothing")
            if mine != theirs:
                raise ValueError(
                    f"{what}: {name}: expected the same on all ranks, got {mine} on 0 and {theirs} on {rank}"
                )
