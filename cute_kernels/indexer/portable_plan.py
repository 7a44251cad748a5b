"""How the portable score kernel divides its work: plain Python that the kernel traces and tests evaluate.

Rows of a request form groups, and groups have tiles of keys, as in logits_plan.py. The warps of a block form teams, one
warp for every row of a group. A team takes every second (fourth, eighth) tile of the block's share, in steps of STEP
keys: it copies a step's keys to its own ring of stages, and then each of its warps scores its row against all of them.

Shared memory: [teams][stages] of a step's codes, their scales [STEP] of 4 bytes, and a word that says by bit which of
the keys exist; then the counts of tiles. A key's chunks of 16 bytes lie so that what eight lanes read at a time is in
different banks: of 128-byte keys at chunk ^ (4 if the key is odd), of 64-byte keys in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.formats import INDEX_DIM
from cute_kernels.indexer.logits_plan import CHUNKS, KEYS, WARP
from cute_kernels.runtime.arch import SMEM_BYTES

WARPS = 8
"""With 8 warps, each has the registers for a row's queries, 128 per lane of 64 heads."""

STEP = WARP
"""Keys of a step: one for every lane, where scores are stored and pages looked up."""

STEPS = KEYS // STEP
"""Of a tile."""

CHUNK = 16
MOST_STAGES = 6
ROWS = (1, 2, 4)
"""Of a group: warps of a team."""

HEAD_TILE = 16
MOST_HEADS = 64


@dataclass(frozen=True)
class PortablePlan:
    """Sizes of a kernel: `heads` of a query row, a multiple of HEAD_TILE, `rows` of a group, bytes of a key's codes."""

    arch: str
    heads: int
    rows: int
    code_bytes: int

    def __post_init__(self) -> None:
        if self.heads % HEAD_TILE or not 0 < self.heads <= MOST_HEADS:
            raise ValueError(f"heads: expected a multiple of {HEAD_TILE} up to {MOST_HEADS}, got {self.heads}")
        if self.rows not in ROWS:
            raise ValueError(f"rows: expected one of {ROWS}, got {self.rows}")

    @property
    def keys(self) -> int:
        """Of a tile, as shares are counted."""
        return KEYS

    @property
    def tiles(self) -> int:
        """Of heads, as the tensor cores take them."""
        return self.heads // HEAD_TILE

    @property
    def teams(self) -> int:
        return WARPS // self.rows

    @property
    def threads(self) -> int:
        return WARPS * WARP

    @property
    def chunks(self) -> int:
        """Of a key's codes."""
        return self.code_bytes // CHUNK

    @property
    def copies(self) -> int:
        """Chunks of a step that each lane of a team copies."""
        return STEP * self.chunks // (WARP * self.rows)

    @property
    def stages(self) -> int:
        """Of a team's ring: one in use, the others on their way."""
        room = SMEM_BYTES[self.arch] - CHUNKS * 4
        return min(MOST_STAGES, room // (self.teams * self.stage_bytes))

    # ---- places, in bytes ----

    @property
    def scales_at(self) -> int:
        """In a stage."""
        return STEP * self.code_bytes

    @property
    def mask_at(self) -> int:
        """In a stage."""
        return self.scales_at + STEP * 4

    @property
    def stage_bytes(self) -> int:
        return self.mask_at + CHUNK

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def sums_at(self) -> int:
        return self.teams * self.ring_bytes

    @property
    def smem_bytes(self) -> int:
        return self.sums_at + CHUNKS * 4


def chunk_at(key: int, chunk: int, code_bytes: int) -> int:
    """Place of a key's chunk among a step's codes. Also of a traced key and chunk."""
    turned = (chunk ^ ((key & 1) * 4)) if code_bytes == INDEX_DIM else chunk
    return key * code_bytes + turned * CHUNK


def key_of_lane(lane: int) -> int:
    """Which of a step's keys a lane stores the score of. Also of a traced lane."""
    return (lane & 4) * 4 + (lane & 8) + (lane & 3) * 2 + (lane >> 4)
