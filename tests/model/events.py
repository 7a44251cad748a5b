# SPDX-License-Identifier: Apache-2.0
"""What the warps of a cluster did to shared and tensor memory and to barriers, in the order in which each did it.

Positions are numbers of bytes: of shared memory as memory.SharedMemory counts them, of tensor memory from TENSOR on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.model.ptx import LANES, Program

ALL = (1 << LANES) - 1
TENSOR = 1 << 22
"""Position of the first block's tensor memory."""

TENSOR_LANES, TENSOR_COLUMNS = 128, 512

BANKS, BANK_BYTES = 32, 4


@dataclass(eq=False)
class Event:
    """Something a warp did.

    kind     "read", "write", "wait", "arrive" ...
    op       number of the instruction
    lanes    bits of the threads that did it
    at       positions of what is accessed, `width` bytes each: of one thread each, if `is_by_lane`
    args     what else there is to say, by kind
    """

    kind: str
    op: int
    lanes: int = ALL
    at: Any = None
    width: int = 0
    is_by_lane: bool = False
    args: tuple[Any, ...] = ()


def tensor_positions(rank: int, lanes: Any, first: int, columns: int) -> Any:
    """Of words of a block's tensor memory: all of these lanes (a slice, or their numbers) and columns."""
    numbers = np.arange(lanes.start, lanes.stop) if isinstance(lanes, slice) else lanes
    words = numbers[:, None] * TENSOR_COLUMNS + np.arange(first, first + columns)
    return TENSOR + (rank * TENSOR_LANES * TENSOR_COLUMNS + words.ravel()) * 4


def bits(lanes: Any) -> int:
    if lanes is None:
        return ALL
    return int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])


@dataclass(eq=False)
class WarpEvents:
    """The record of a warp, by methods that the instructions call: see `Event`."""

    block: int
    number: int
    events: list[Event] = field(default_factory=list)

    def _add(self, kind: str, op: int, lanes: Any = None, at: Any = None, width: int = 0, *args: Any) -> None:
        is_by_lane = at is not None and kind in ("read", "write", "copy", "store_async")
        self.events.append(Event(kind, op, bits(lanes), at, width, is_by_lane, args))

    def read(self, op: int, lanes: Any, at: Any, width: int) -> None:
        self._add("read", op, lanes, at, width)

    def write(self, op: int, lanes: Any, at: Any, width: int) -> None:
        self._add("write", op, lanes, at, width)

    def sync_warp(self, op: int, lanes: Any) -> None:
        self._add("warp", op, lanes)

    def exchange(self, op: int, lanes: Any) -> None:
        if self.events and self.events[-1].kind not in ("exchange", "product"):
            self._add("exchange", op, lanes)

    def init(self, op: int, lanes: Any, place: int, expected: int) -> None:
        self._add("init", op, lanes, None, 0, place, expected)

    def arrive(self, op: int, lanes: Any, place: int, arrivals: int, announced: int, order: str) -> None:
        self._add("arrive", op, lanes, None, 0, place, arrivals, announced, order)

    def wait(self, op: int, lanes: Any, place: int, parity: int, phase: int, order: str) -> None:
        last, args = self.events[-1] if self.events else None, (place, parity, phase, order)
        if last and (last.kind, last.op, last.args, last.lanes) == ("wait", op, args, bits(lanes)):
            return  # asked again
        self._add("wait", op, lanes, None, 0, *args)

    def fence(self, op: int, lanes: Any, kind: str) -> None:
        self._add("fence", op, lanes, None, 0, kind)

    def barrier_arrive(self, op: int, lanes: Any, identity: int, expected: int, waits: bool) -> None:
        self._add("barrier_arrive", op, lanes, None, 0, (self.block, identity), expected, "cta")

    def barrier_wait(self, op: int, lanes: Any, identity: int) -> None:
        self._add("barrier_wait", op, lanes, None, 0, (self.block, identity))

    def cluster_arrive(self, op: int, lanes: Any, order: str) -> None:
        self._add("barrier_arrive", op, lanes, None, 0, "cluster", 0, order)

    def cluster_wait(self, op: int, lanes: Any) -> None:
        self._add("barrier_wait", op, lanes, None, 0, "cluster")

    # ---- copies

    def copy(self, op: int, lanes: Any, at: Any, width: int) -> None:
        self._add("copy", op, lanes, at, width)

    def copy_commit(self, op: int, lanes: Any) -> None:
        self._add("copy_commit", op, lanes)

    def copy_wait(self, op: int, lanes: Any, newest: int | None) -> None:
        self._add("copy_wait", op, lanes, None, 0, newest)

    def copy_arrive(self, op: int, lanes: Any, place: int, arrivals: int) -> None:
        self._add("copy_arrive", op, lanes, None, 0, place, arrivals)

    def store_async(self, op: int, lanes: Any, at: Any, width: int, places: Any) -> None:
        self._add("store_async", op, lanes, at, width, places)

    def bulk(self, op: int, lane: int, parts: Iterable[tuple[int, int]], place: int) -> None:
        """Parts: position and bytes."""
        at = np.concatenate([np.arange(start, start + size, 16) for start, size in parts])
        self.events.append(Event("bulk", op, 1 << lane, at, 16, False, (place, 16 * len(at))))

    def bulk_read(self, op: int, lane: int, start: int, size: int) -> None:
        self.events.append(Event("bulk_read", op, 1 << lane, np.arange(start, start + size, 16), 16))

    def bulk_commit(self, op: int, lanes: Any) -> None:
        self._add("bulk_commit", op, lanes)

    def bulk_wait(self, op: int, lanes: Any, newest: int) -> None:
        self._add("bulk_wait", op, lanes, None, 0, newest)

    # ---- products

    def product(self, op: int, left: Any, right: Any) -> None:
        """wgmma: offsets in the block's shared memory of each 16 bytes of the operands, None of one in registers."""
        parts = [(side, at + self.block_base) for side, at in (("left", left), ("right", right)) if at is not None]
        self.events.append(Event("product", op, args=(parts,)))

    def product_commit(self, op: int) -> None:
        self._add("product_commit", op)

    def product_wait(self, op: int, newest: int) -> None:
        self._add("product_wait", op, None, None, 0, newest)

    block_base: int = 0

    # ---- tcgen05

    def tensor(self, op: int, lanes: Any, touched: list[tuple[bool, Any, int]], is_copy: bool = False) -> None:
        """A product, or a copy to tensor memory. touched: (is written, positions, bytes of each)."""
        self._add("tensor_copy" if is_copy else "tensor", op, lanes, None, 0, touched)

    def tensor_commit(self, op: int, lanes: Any, places: list[int]) -> None:
        for place in places:
            self._add("tensor_commit", op, lanes, None, 0, place)

    def tensor_load(self, op: int, at: Any) -> None:
        self._add("tensor_load", op, None, at, 4)

    def tensor_store(self, op: int, at: Any) -> None:
        self._add("tensor_store", op, None, at, 4)

    def tensor_wait(self, op: int, what: str) -> None:
        self._add("tensor_wait", op, None, None, 0, what)

    def tensor_use(self, op: int, at: Any, peer: int | None = None) -> None:
        """Begin or end to have tensor memory. peer: the block that has to be running, if a pair begins."""
        self._add("tensor_use", op, None, at, 4, peer)


@dataclass(eq=False)
class Record:
    """Of a cluster of blocks."""

    program: Program
    blocks: int = 1
    span: int = 0
    warps: list[WarpEvents] = field(default_factory=list)

    def of_warp(self, warp: Any) -> WarpEvents:
        self.blocks, self.span = len(warp.cluster.blocks), warp.shared.SPAN
        base = warp.block.rank * warp.shared.SPAN
        self.warps.append(WarpEvents(warp.block.rank, warp.number, block_base=base))
        return self.warps[-1]

    def bank_conflicts(self) -> dict[int, tuple[int, int, int]]:
        """Instruction -> how often warps ran it, all passes over the banks beyond what its bytes need, and the most of
        these at a time."""
        found: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        for warp in self.warps:
            for event in warp.events:
                if event.kind in ("read", "write"):
                    more = extra_passes(event.at, event.width)
                    entry = found[event.op]
                    found[event.op] = [entry[0] + 1, entry[1] + more, max(entry[2], more)]
        return {op: (times, total, most) for op, (times, total, most) in found.items()}


def extra_passes(at: Any, width: int) -> int:
    """Passes over 32 banks that threads with these positions need, beyond those for so many bytes in any case.

    Threads go in groups that can fill all banks once: 32 of 4 bytes, 16 of 8, 8 of 16.
    """
    group = max(1, min(LANES, BANKS * BANK_BYTES // width))
    more = 0
    for first in range(0, len(at), group):
        words = np.unique(at[first : first + group, None] // BANK_BYTES + np.arange(max(1, width // BANK_BYTES)))
        more += int(np.bincount(words % BANKS, minlength=BANKS).max()) - 1
    return more
