"""How the decode kernel of teams lays out a block's work: plain Python that the kernel traces and tests evaluate.

A block's eight warps make teams of as many as there are 8s of heads. A team takes a step of 16 or 32 keys at a time,
every so many of an item; each of its warps has as many of the 512 columns in both products, for all heads, and holds as
much of O in registers, so that nothing is loaded or converted by two warps; and the softmax of 8 heads. No step waits
for another team. The last warp of a team has a block of 64 e4m3 columns less than the others, and the rotated columns.

Shared memory, in this order:

    rings     [8 warps][stages] what the warp's columns of a step are copied to:
                [blocks of 64 columns][keys][64] e4m3, the last one's rotated columns [keys][64] bf16 behind them, and
                at the end [keys][8] scale bytes
    queries   [ranks][blocks][heads / 8 groups][2][32 lanes] four words: Q as operand b, see teams_query.py
    peaks     [8 warps][heads] words: largest magnitudes of a block of Q, for those who convert the others
    results   [8 warps][heads][columns / passes] fp32 and a gap: some of a warp's columns of O, of a team's part of an
              item; during its steps, if a team has several warps, what they tell one another: see teams_softmax.py
    maxima    [teams][heads] two fp32: maximum and sum of weights
    walks     [8 warps][16] words: where each warp is in the walk over its team's steps
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, NOPE_DIM
from cute_kernels.runtime.arch import SMEM_BYTES

LANES = 32
PIECE = 16
"""Keys of an instruction: the M side of the product with Q, what is summed in the product with P."""

GROUP = 8
"""Heads that an instruction takes: the N side of both products."""

BLOCK = 64
"""Columns with a scale of their own."""

CHUNK = 16
WALK_BYTES = 64
MOST_STAGES = 4
QUERY_BYTES = GROUP * HEAD_DIM * 2
HEADS = (8, 16, 32)
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
    """Sizes of a block's work. heads: of an item, one of HEADS. warps: of a block."""

    arch: str
    heads: int
    warps: int = 8

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
        return self.warps // self.team

    @property
    def blocks_per_sm(self) -> int:
        return 8 // self.warps

    @property
    def pieces(self) -> int:
        """Of PIECE keys, that a step has. What follows from a step's keys together and from Q takes less time then."""
        return {1: 1, 2: 2, 4: 2}[self.team]

    @property
    def keys(self) -> int:
        """Of a step."""
        return self.pieces * PIECE

    @property
    def width(self) -> int:
        """Columns of a warp that go out at a time, so that shared memory has room for them."""
        return {1: 256, 2: 64, 4: 64}[self.team] * self.warps // 8

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
    def block_bytes(self) -> int:
        return self.keys * BLOCK

    @property
    def rope_at(self) -> int:
        """In a stage: the last warp's rotated columns, the others' last block."""
        return self.codes * self.block_bytes

    @property
    def scales_at(self) -> int:
        return self.rope_at + 2 * self.block_bytes

    @property
    def stage_bytes(self) -> int:
        return self.scales_at + self.keys * FP8_DS_MLA.scale_bytes

    @property
    def stages(self) -> int:
        free = (SMEM_BYTES[self.arch] + RESERVED) // self.blocks_per_sm - RESERVED - self._bytes(0)
        return min(free // (self.warps * self.stage_bytes), MOST_STAGES)

    @property
    def ring_bytes(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def partial_bytes(self) -> int:
        """What a warp has of a step's scores."""
        return self.pieces * self.groups * LANES * 16

    @property
    def exchange_bytes(self) -> int:
        """Of a team: parts of scores by rank, weights, factors, and whether there are any."""
        return (self.team + 1) * self.partial_bytes + self.groups * LANES * 8 + 128 if self.team > 1 else 0

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

    @property
    def results_bytes(self) -> int:
        """Of all warps, or of what else is there."""
        return max(self.warps * self.result_bytes, self.teams * self.exchange_bytes)

    def _bytes(self, stages: int) -> int:
        warp = self.peak_bytes + WALK_BYTES + stages * self.stage_bytes
        return self.warps * warp + self.results_bytes + self.team * self.query_bytes + self.maxima_bytes

    @property
    def smem_bytes(self) -> int:
        return self._bytes(self.stages)

    @property
    def maxima_bytes(self) -> int:
        return self.teams * self.heads * 8

    # ---- places, in bytes ----

    @property
    def queries_at(self) -> int:
        return self.peaks_at - self.team * self.query_bytes

    @property
    def peaks_at(self) -> int:
        return self.results_at - self.warps * self.peak_bytes

    @property
    def results_at(self) -> int:
        return self.maxima_at - self.results_bytes

    @property
    def maxima_at(self) -> int:
        return self.walks_at - self.maxima_bytes

    @property
    def walks_at(self) -> int:
        return self.smem_bytes - self.warps * WALK_BYTES

    # ---- words and registers of a lane: numbers of the first of several ----

    def sums(self, block: int, chunk: int, group: int) -> int:
        """Four sums of O: see first_column."""
        return ((block * 4 + chunk) * self.groups + group) * 4


def rank_of(warp: int, team: int) -> int:
    """Which columns a warp has: as many of the last ones, which take less time, in each quarter of a multiprocessor."""
    return (warp + warp // 4 * (team // 2)) % team


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
