"""What the warpgroups of Hopper's prefill kernel for few heads agree on: sizes, shared memory of a block.

A work item is a query row with all its heads, up to 8 or 16. Its keys come in tiles of 64 rows of kv, which are
both K and V. They stand on the tensor cores' long side: S^T = K Q^T and O^T = V^T P, so that heads need no
padding to 64. The 512 columns of a tile, or of an item's queries, are cut into slabs of 64 as in prefill_sm90_plan.

Tiles go through a ring of units, each the same slabs of all 64 rows: a unit is let go of when its part of O^T is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers
from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS, LABEL, LISTS, SLAB, SLABS, WALK

FEW_HEADS = (8, 16)
"""Heads of an item, by kernel. With 32 the ring is shorter, and padding to 64 rows takes 10% less time."""

UNIT_SLABS = 2
UNIT_COLUMNS = UNIT_SLABS * SLAB
UNIT_BYTES = KEYS * UNIT_COLUMNS * 2
PARTS = SLABS // UNIT_SLABS
"""Units of a tile."""

UNITS = 12
"""Of the ring: what shared memory has room for."""

QUERY_BUFFERS = {8: 2, 16: 1}
"""Items whose queries are in shared memory, by heads: two of 16 would leave room for 11 units."""

P_BUFFERS = 2

HEADINGS = 4
"""Those of the tiles in the ring, and of the next one."""

HEADING = 48
"""Bytes of a tile's heading: for each of the warps that ask for rows, which of its keys are there; marks."""

ROWS_WARPS = 8
MARK_AT = ROWS_WARPS * 4
"""Where in a heading marks are."""

EXCHANGE_WORDS = 4
"""Of a head, from each warp that finds weights: its largest logit, the sum of its weights, its largest logit of all."""

SCORES_BARRIER, BACK_BARRIER = 1, 2
"""Named barriers of the warpgroup that finds weights, and of that which sums up results."""

BACK, ROWS_GROUP, GROUPS = 1, 2, 4
"""Numbers of warpgroups, the scores being 0: the back, the first of two that ask for rows; how many there are."""

THREADS = GROUPS * 128

TILES = ("units", "queries", "p")
"""Parts of shared memory that tensor cores read: 1024-byte aligned."""


@dataclass(frozen=True)
class Plan:
    """Sizes for so many heads. quantized: results become codes"""

    heads: int
    quantized: bool = False

    @property
    def query_buffers(self) -> int:
        return QUERY_BUFFERS[self.heads]

    @property
    def query_bytes(self) -> int:
        return self.heads * HEAD_DIM * 2

    @property
    def p_bytes(self) -> int:
        return self.heads * KEYS * 2

    @property
    def note_bytes(self) -> int:
        """Of what to multiply heads with before a tile, and of what behind an item's last one."""
        return self.heads * 4

    def parts(self) -> dict[str, int]:
        """Bytes of everything in shared memory but the barriers, in order."""
        more = {"absmax": 4 * self.heads * PARTS * 4} if self.quantized else {}
        return {
            "units": UNITS * UNIT_BYTES,
            "queries": self.query_buffers * self.query_bytes,
            "p": P_BUFFERS * self.p_bytes,
            "list": LISTS * (KEYS * 4 + ROWS_WARPS * 4),
            "heading": HEADINGS * HEADING,
            "walk": ROWS_WARPS * WALK,
            "factors": P_BUFFERS * self.note_bytes,
            "shares": P_BUFFERS * self.note_bytes,
            "label": P_BUFFERS * LABEL,
            "largest": 4 * self.heads * 4,
            "amounts": 4 * self.heads * 16,
        } | more

    @property
    def smem_bytes(self) -> int:
        return sum(self.parts().values()) + (UNITS + P_BUFFERS) * barriers.BYTES_PER_STAGE


class Places(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    units     [ring][2 slabs][64 rows][64] bf16: keys
    queries   [buffers][8 slabs][heads][64] bf16
    p         [2 buffers][heads][64 keys] bf16: weights
    list      [4] lists: indices of a tile, and its mark for each of the warps that ask for rows
    heading   [4] headings
    walk      [8 warps that ask for rows] where they are
    factors   [2 buffers][heads] fp32: what to multiply O^T with before a tile
    shares    [2 buffers][heads] fp32: and what behind an item's last one
    label     [2 buffers] marks of the tile, whether it has factors
    largest   [4 warps][heads] fp32: of a tile's logits
    amounts   [4 warps][heads] fp32 sum of an item's weights, its largest logit, what the sum is relative to, nothing
    absmax    where codes are stored: [4 warps][heads][4 units] fp32, of what a warp has of a head's results
    """

    units: Any
    queries: Any
    p: Any
    list: Any
    heading: Any
    walk: Any
    factors: Any
    shares: Any
    label: Any
    largest: Any
    amounts: Any
    absmax: Any = None


@dataclass(frozen=True)
class Barriers:
    """mbarriers of a block, and what completes their phases.

    units     full: all rows are there, and the heading. empty: the back's warps are done with them
    weights   full: the scores' warps have stored a tile's weights. empty: the back's warps are done with them
    """

    units: barriers.Ring
    weights: barriers.Ring

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Barriers:
        return cls(*(barriers.Ring.allocate(smem, count) for count in (UNITS, P_BUFFERS)))

    def initialize(self) -> None:
        """By one thread; the block synchronizes afterwards."""
        # every thread that asks for rows, and one of each of its warps for the heading
        self.units.initialize(ROWS_WARPS * 32 + ROWS_WARPS, 4)
        self.weights.initialize(4, 4)
        cute.arch.mbarrier_init_fence()
