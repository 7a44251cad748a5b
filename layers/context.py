# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: which rows, pages and partial results the ranks of a group have, and how they are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from .communicator import Communicator, GroupCommunicator

T = TypeVar("T")

KV_FORMS = ("replicated", "sharded")
PREFILL_SPLITS = ("off", "zigzag")
HEAD_FORMS = ("same", "own")
QUERY_FORMS = ("gather", "replicate")
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WINDOWS = ("tail", "all")

BORDER = 128
"""Segments of a request meet at multiples of so many tokens, so that none cuts an entry of ratio 128."""


class Pools:
    """Memory of whole requests' entries in a step whose caches are sharded, shared by the layers of a model: pages in
    the order of tokens. It grows with the longest prefill."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def pages(self, kv_format: Any, blocks: int, rows: int, device: torch.device) -> torch.Tensor:
        """At least so many pages of so many rows, whatever they hold."""
        key = kv_format.id, rows, device
        found = self._of.get(key)
        if found is None or found.shape[0] < blocks:
            found = self._of[key] = kv_format.allocate(blocks, rows, device)
        return found


@dataclass(frozen=True)
class ContextParallel:
    """Ranks that share the context of requests: decode rows are on all of them, prefill rows may be divided.

    group     a Communicator, or what GroupCommunicator takes; None: torch.distributed's default group
    kv        "replicated": every rank holds all entries of a request. "sharded": page P of 256 tokens, with its entries
              and indexer keys, is rank P % N's; the window and the compressors' states are on all ranks. Only for
              fp8_ds_mla caches
    prefill   "off": every rank computes all prefill rows. "zigzag": each has two segments of a request (`plan_prefill`)
    heads     "same": the ranks have the same heads, and whole weights between them. "own": they are neighbours in the
              tensor-parallel group, rank r of the group having the r-th heads of theirs; not with "zigzag"
    q         queries of the other ranks' heads, where these have heads of their own and sharded caches: "gather", from
              them in every step, or "replicate", from the weights of all of their heads, which then lie on every rank.
              Of decode rows: prefill rows have the rank's own heads
    wire      "fp32" or "bf16": of partial results of attention. bf16 halves their bytes, relative error 2.5e-3
    shards    a multiple of the group's size: partial results are those of so many shards of a request, whoever has
              them, so that all sizes that divide it give the same bits. 0: one a rank, the fewest bytes
    swa       window records that ranks send each other in a divided prefill: "tail", the last 128 of a segment, or
              "all", which prefix caches need
    """

    group: Any = None
    kv: str = "replicated"
    prefill: str = "off"
    heads: str = "same"
    q: str = "gather"
    wire: str = "fp32"
    shards: int = 0
    swa: str = "tail"
    pools: Pools = field(default_factory=Pools, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, choices in (
            ("kv", KV_FORMS), ("prefill", PREFILL_SPLITS), ("heads", HEAD_FORMS), ("q", QUERY_FORMS),
            ("wire", tuple(WIRES)), ("swa", WINDOWS),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"ContextParallel: {name}: expected one of {choices}, got {value!r}")
        if self.prefill != "off" and self.heads != "same":
            raise ValueError("ContextParallel: prefill: expected 'off' where ranks have heads of their own")
        if self.q != "gather" and (self.heads, self.kv) != ("own", "sharded"):
            raise ValueError("ContextParallel: q: expected 'gather' but with heads 'own' and kv 'sharded'")
        if self.shards < 0 or self.shards % self.size:
            raise ValueError(
                f"ContextParallel: shards: expected a multiple of the group's {self.size} ranks, got {self.shards}"
            )

    @cached_property
    def communicator(self) -> Communicator:
        """The group's collectives."""
        return self.group if isinstance(self.group, Communicator) else GroupCommunicator(self.group)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.size

    @property
    def is_sharded(self) -> bool:
        """Whether entries lie on one rank each."""
        return self.kv == "sharded"

    @property
    def parts(self) -> int:
        """Partial results of a decode row."""
        return self.shards or self.size

    def split_heads(self, heads: int) -> tuple[int, int]:
        """(heads of partial results, heads of each rank among them) of layers with so many on a rank."""
        if self.heads == "own":
            return self.size * heads, heads
        if heads % self.size:
            raise ValueError(f"ContextParallel: group: expected a size that divides {heads} heads, got {self.size}")
        return heads, heads // self.size

    def together(self, step: Callable[[], T]) -> T:
        """step(), which has collectives: if it raises, the group is aborted, and no rank waits for this one."""
        try:
            return step()
        except BaseException:
            self.communicator.abort()
            raise


class Segment(NamedTuple):
    """Tokens start .. end - 1 of a request, given by its number among the step's prefill requests."""

    request: int
    start: int
    end: int


class PrefillPlan:
    """Which prefill rows of a step each rank has.

    segments        of each rank, in the order of its rows
    gather_index    of each rank, int64: the step's prefill rows that it has
    restore_index   int64: where each of the step's prefill rows is among those of all ranks, padded to padded_rows each
    padded_rows     the most rows of a rank
    """

    def __init__(self, segments: Sequence[Sequence[Segment]], query_lens: Sequence[int], seq_lens: Sequence[int]):
        self.segments = tuple(tuple(own) for own in segments)
        first_rows = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(query_lens, dtype=np.int64)])
        none = np.zeros(0, dtype=np.int64)
        self.gather_index: list[npt.NDArray[np.int64]] = []
        for own in self.segments:
            rows = [
                np.arange(s.start, s.end) + first_rows[s.request] - (seq_lens[s.request] - query_lens[s.request])
                for s in own
            ]
            self.gather_index.append(np.concatenate([none, *rows]))
        self.padded_rows = max(len(rows) for rows in self.gather_index)
        self.restore_index = np.zeros(int(first_rows[-1]), dtype=np.int64)
        for rank, index in enumerate(self.gather_index):
            self.restore_index[index] = rank * self.padded_rows + np.arange(len(index))


def plan_prefill(query_lens: Sequence[int], seq_lens: Sequence[int], ranks: int) -> PrefillPlan:
    """Divide the prefill rows of a step, in the same way on every rank.

    query_lens   rows of each request in this step
    seq_lens     its tokens after the step
    ranks        of the context group

    Rank r has the pieces r and 2 N - 1 - r of 2 N equal ones of a request, which cost about the same together. Pieces
    meet at multiples of 128 tokens. Of fewer than 2 N * 128 rows a rank has one piece, and fewer than N * 128 rows are
    all on one rank, the request's number modulo N.
    """
    segments: list[list[Segment]] = [[] for _ in range(ranks)]
    for request, (count, end) in enumerate(zip(query_lens, seq_lens, strict=True)):
        start = end - count
        if count < ranks * BORDER:
            if count:
                segments[request % ranks].append(Segment(request, start, end))
            continue
        pieces = 2 * ranks if count >= 2 * ranks * BORDER else ranks
        borders = [start, *(_border(start + count * i // pieces) for i in range(1, pieces)), end]
        for rank, own in enumerate(segments):
            places = [rank] if pieces == ranks else [rank, pieces - 1 - rank]
            cut = [(borders[place], borders[place + 1]) for place in places]
            if len(cut) == 2 and cut[0][1] == cut[1][0]:  # the middle ones are neighbours
                cut = [(cut[0][0], cut[1][1])]
            own += [Segment(request, first, last) for first, last in cut]
    return PrefillPlan(segments, query_lens, seq_lens)


def _border(position: int) -> int:
    """The nearest multiple of BORDER."""
    return (position + BORDER // 2) // BORDER * BORDER


def undivided_prefill(query_lens: Sequence[int], seq_lens: Sequence[int]) -> PrefillPlan:
    """All prefill rows as they are, the same on every rank."""
    every = [
        Segment(request, end - count, end)
        for request, (count, end) in enumerate(zip(query_lens, seq_lens, strict=True))
        if count
    ]
    return PrefillPlan([every], query_lens, seq_lens)
