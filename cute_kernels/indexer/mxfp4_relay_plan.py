"""What the MXFP4 score kernel for groups of three and four rows is made of: its sizes and its shared memory."""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_kernels.dsl import barriers
from cute_kernels.dsl.convert import E2M1_IN_E4M3
from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer.logits_plan import KEYS, NOTE, Plan
from cute_kernels.indexer.mxfp4_plan import DECODED, STRIP

RELAY_STAGES = 6
"""Of packed keys, and of decoded ones."""

SHARERS = 2
"""Warps that decode for a warpgroup."""

STRIPS = KEYS // STRIP // SHARERS
"""Of a tile, that each of them decodes."""

BEHIND = RELAY_STAGES // 2 - 1
"""Tiles that the one that brings keys has asked for before it decodes the first: a warpgroup's stages but one."""

REGISTERS = 56, 224
"""Per thread, of the warps beside and of those that multiply. Together no more than what they are launched with."""

FAR = -1
"""Bits of the scale of a far key: a NaN that no scale is."""


class RelayPlan(Plan):
    """Sizes of one kernel. Keys go from packed stages through the warps that decode them to stages as e4m3 ones have; the
    warps that
    decode bring queries, too."""

    @property
    def row_bytes(self) -> int:
        return INDEX_DIM // 2

    @property
    def stages(self) -> int:
        return RELAY_STAGES

    @property
    def helpers(self) -> int:
        """Warps beside."""
        return self.warpgroups * SHARERS

    @property
    def staged(self) -> int:
        """Heads whose packed codes may be on their way."""
        return self.helpers * 2 * STRIP

    @property
    def words(self) -> dict[str, int]:
        """`notes` and `scales` are those of packed stages, `ready_notes` and `ready_scales` those of decoded ones.
        `below` is what the e4m3 codes of a far row's heads lack, a byte for each block; `far` has, from
        each warp that decodes, a bit for each row of a group that has one; `walks` is where
        RelayWalk is; `head_scales` are those of heads on their way."""
        return {
            "notes": self.stages * NOTE,
            "scales": self.stages * KEYS,
            "sums": super().words["sums"],
            "ready_notes": self.stages * NOTE,
            "ready_scales": self.stages * KEYS,
            "weights": self.buffers * self.columns,
            "windows": self.buffers * 2 * self.rows,
            "below": self.buffers * self.columns,
            "far": self.buffers * SHARERS,
            "walks": self.warpgroups * 2,
            "head_scales": self.staged,
            "table": round_up(2 * len(E2M1_IN_E4M3) + 1, 4),
        }

    @property
    def smem_bytes(self) -> int:
        small = (2 * self.stages + self.buffers) * barriers.BYTES_PER_STAGE
        small += sum(round_up(count * 4, 16) for count in self.words.values())
        decoded = (self.stages * KEYS + self.buffers * self.columns) * DECODED
        return round_up(small, 1024) + decoded + (self.stages * KEYS + self.staged) * self.row_bytes


class Places(NamedTuple):
    """Addresses in shared memory, those of `RelayPlan.words` first."""

    notes: Any
    scales: Any
    sums: Any
    ready_notes: Any
    ready_scales: Any
    weights: Any
    windows: Any
    below: Any
    far: Any
    walks: Any
    head_scales: Any
    table: Any
    decoded_keys: Any
    decoded_queries: Any
    keys: Any
    queries: Any

    def ready(self) -> Ready:
        """What the warpgroups that multiply know of it."""
        return Ready(self.ready_notes, self.ready_scales, self.weights, self.windows, self.far)


class Ready(NamedTuple):
    """Addresses as logits_sm90.Places, and of the bits of far rows."""

    notes: Any
    scales: Any
    weights: Any
    windows: Any
    far: Any


