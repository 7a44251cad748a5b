"""How the decode kernel of teams lays out a block's work: plain Python that the kernel traces and tests evaluate.

A block's four warps make teams of as many as there are 8s of heads. A team takes a step of 16 keys at a time, every
so many of an item; each of its warps has as many of the 512 columns in both products, for all heads, and holds as much
of O in registers, so that nothing is loaded or converted by two warps. No step waits for another team. The last warp of
a team has a block of 64 e4m3 columns less than the others, and the rotated columns.

Shared memory, in this order:

    rings     [4 warps][stages] what the warp's columns of a step are copied to:
                [blocks of 64 columns][16 keys][64] e4m3, the last one's rotated columns [16 keys][64] bf16 behind them,
                and at the end [16 keys][8] scale bytes
    partials  [2][4 warps][heads / 8][32 lanes] four fp32: a warp's part of Q K^T, if there are others in its team
    queries   [ranks][blocks][4 products][heads / 8 groups][32 lanes] two words, four of a lane side by side: Q as
              operand b, see teams_products.py
    peaks     [4 warps][heads] words: largest magnitudes of a block of Q, for those who convert the others
    results   [4 warps][heads][width] fp32 and a gap: some of a warp's columns of O, of a team's part of an item
    maxima    [teams][heads] two fp32: maximum and sum of weights
    walks     [4 warps][16] words: where each warp is in the walk over its team's steps
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, NOPE_DIM
from cute_kernels.runtime.arch import SMEM_BYTES

WARPS, LANES = 4, 32
BLOCKS_PER_SM = 2
"""While one block begins or ends an item, the other one multiplies."""

KEYS = 16
"""Of a step: the M side of the product with Q, what is summed in the product with P."""

GROUP = 8
"""Heads that an instruction takes: the N side of both products."""

BLOCK = 64
"""Columns with a scale of their own."""

BLOCK_BYTES = KEYS * BLOCK
ROPE_BYTES = 2 * BLOCK_BYTES
SCALES_BYTES = KEYS * FP8_DS_MLA.scale_bytes
CHUNK = 16
WALK_BYTES = 64
MOST_STAGES = 4
HEADS = (8, 16)
ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""They convert e4m3 to f16, and have the shared memory."""

LEAST_SCALE, SCALES = 112, 16
"""Scale bytes from which on, and how many, the product with P takes in f16: 2^-15 to 1."""

NO_SCALES = LEAST_SCALE * 0x01010101
"""Scale bytes of keys that are not there: any, of those."""

SHIFT = 8
"""O of such blocks is counted in 2^-SHIFT, so that f16 loses less of P times small scales."""

RESERVED = 1024
"""Bytes of shared memory that the system takes from a multiprocessor for each block."""

GAP = 16
"""Bytes between two rows of results: lanes that store columns of four pairs of heads do not meet in a bank."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a block's work. heads: of an item, one of HEADS."""

    arch: str
    heads: int

    def __post_init__(self) -> None:
        if self.heads not in HEADS:
            raise ValueError(f"heads: expected one of {HEADS}, got {self.heads}")
        if self.arch not in ARCHS:
            raise ValueError(f"arch: expected one of {', '.join(ARCHS)}, got {self.arch!r}")

    @property
    def team(self) -> int:
        """Warps of a team."""
        return self.heads // GROUP

    @property
    def groups(self) -> int:
        """Of heads; as many as a team has warps."""
        return self.heads // GROUP

    @property
    def teams(self) -> int:
        return WARPS // self.team

    @property
    def width(self) -> int:
        """Columns of a warp that go out at a time, so that shared memory has room for them."""
        return {1: 128, 2: 64}[self.team]

    @property
    def shares(self) -> int:
        """Blocks of its columns of Q that a warp converts for its team's others."""
        return self.blocks // self.teams

    @property
    def columns(self) -> int:
        """Of a warp."""
        return HEAD_DIM // self.team

    @property
    def blocks(self) -> int:
        """Of a warp, rotated columns included."""
        return self.columns // BLOCK

    @property
    def codes(self) -> int:
        """Blocks of e4m3 columns of a team's last warp; the others have one more."""
        return self.blocks - 1

    @property
    def rope_at(self) -> int:
        """In a stage: the last warp's rotated columns, the others' last block."""
        return self.codes * BLOCK_BYTES

    @property
    def scales_at(self) -> int:
        return self.rope_at + ROPE_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.scales_at + SCALES_BYTES

    @property
    def stages(self) -> int:
        free = (SMEM_BYTES[self.arch] + RESERVED) // BLOCKS_PER_SM - RESERVED - self._bytes(0)
        return min(free // (WARPS * self.stage_bytes), MOST_STAGES)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def partial_bytes(self) -> int:
        """Of a warp."""
        return self.groups * LANES * 16

    @property
    def resident(self) -> int:
        """Blocks of Q that a warp keeps in registers, for an item; it reads the others in each step. With more, the
        assembler spills."""
        return {1: 0, 2: 2}[self.team]

    @property
    def query_bytes(self) -> int:
        """Of a warp."""
        return self.groups * self.columns * GROUP * 2

    @property
    def peak_bytes(self) -> int:
        """Of a warp."""
        return self.heads * 4

    @property
    def pitch(self) -> int:
        """From head to head of a warp's results."""
        return self.width * 4 + GAP

    @property
    def result_bytes(self) -> int:
        """Of a warp."""
        return self.heads * self.pitch

    def _bytes(self, stages: int) -> int:
        partials = 2 * WARPS * self.partial_bytes if self.team > 1 else 0
        warp = self.peak_bytes + self.result_bytes + WALK_BYTES + stages * self.stage_bytes
        return WARPS * warp + partials + self.team * self.query_bytes + self.maxima_bytes

    @property
    def smem_bytes(self) -> int:
        return self._bytes(self.stages)

    @property
    def maxima_bytes(self) -> int:
        return self.teams * self.heads * 8

    # ---- places, in bytes ----

    @property
    def partials_at(self) -> int:
        return WARPS * self.ring_bytes

    @property
    def queries_at(self) -> int:
        return self.peaks_at - self.team * self.query_bytes

    @property
    def peaks_at(self) -> int:
        return self.results_at - WARPS * self.peak_bytes

    @property
    def results_at(self) -> int:
        return self.maxima_at - WARPS * self.result_bytes

    @property
    def maxima_at(self) -> int:
        return self.walks_at - self.maxima_bytes

    @property
    def walks_at(self) -> int:
        return self.smem_bytes - WARPS * WALK_BYTES

    # ---- words and registers of a lane: numbers of the first of several ----

    def query(self, block: int, product: int, group: int) -> int:
        """Two words of Q: columns 16 c + 4 product .. of a block, if the lane is 4 r + c, and head r of a group."""
        return ((block * 4 + product) * self.groups + group) * 2

    def sums(self, block: int, chunk: int, group: int) -> int:
        """Four sums of O: see first_column."""
        return ((block * 4 + chunk) * self.groups + group) * 4


def code_place(key: int, chunk: int) -> int:
    """Place of 16 of a key's 64 e4m3 columns in a block: of eight keys, and of two, no two chunks share banks."""
    return key * BLOCK + (chunk ^ (key >> 1 & 3)) * CHUNK


def rope_place(key: int, chunk: int) -> int:
    """The same of 8 rotated columns."""
    return key * (2 * BLOCK) + (chunk ^ (key & 7)) * CHUNK


def first_column(is_rope: bool, r: int) -> tuple[int, int]:
    """Columns, of the 16 of a chunk, of the sums that lane 4 r + c has: the first two of the first one, for heads 2 c
    and 2 c + 1 of a group, the others of the second one."""
    return (r, r + 8) if is_rope else (2 * r, 2 * r + 1)


assert NOPE_DIM + BLOCK == HEAD_DIM
