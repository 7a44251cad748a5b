"""How the portable decode kernel lays out a block's work: plain Python that the kernel traces and tests evaluate.

A block has eight warps. Of a step's cache rows ("keys"), each warp has 64 of the 512 columns in both products: it sums
its share of Q K^T for all heads, and it holds its columns of O. Those are a scale block of fp8_ds_mla, or its rotated
columns, so that a warp converts what it multiplies, on the way from shared memory to its registers, and nothing is
converted by two warps.

Shared memory, in this order:

    stages    what the cache rows are copied to, by step
      fp8       [keys][448] e4m3, [keys][64] bf16 rotated columns, [keys][8] scale bytes
      plain     [8][keys][64] bf16, by warp
    shares    [8][row groups][keys / 8][32 lanes] two fp32: shares of Q K^T by warp; a row group is 8 heads
    weights   [rows / 16][keys / 16][32 lanes][4] words: P as operand of the second product
    masks     [stages][keys] int32: 0 for a key that does not count
    factors   [2][rows] fp32: by head, what O is multiplied with in this step, and at the end
    flags     [8] int32: by row group, whether one of the former is not 1
    rows      [row groups][32 lanes] two fp32: the maximum of the lane's row, and its part of the sum of the weights
    walks     [8][16] words: where each warp is in the walk over the block's steps

Copies are in chunks of 16 bytes. Chunks of different keys that a warp reads at a time lie in different banks: those of
64 e4m3 columns at chunk ^ (key // 2 % 4), where keys are 448 bytes apart, and those of 64 bf16 columns at
chunk ^ (key % 8).
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.formats import FP8_DS_MLA, NOPE_DIM, PLAIN_BF16, ROPE_DIM
from cute_kernels.runtime.arch import SMEM_BYTES

WARPS = 8
LANES = 32
WARP_COLUMNS = 64
CHUNK = 16
KEY_LANES = 4
"""Lanes that copy a key, in pieces of 64 bytes."""

ROPE_BYTES = 2 * ROPE_DIM
WALK_BYTES = 64
"""Shared memory of a warp's walk."""

ROW_STATE = 8 * LANES
"""The same of a row group."""

FLAG_BYTES = 4 * WARPS
MOST_STAGES = 4
FORMATS = (FP8_DS_MLA.id, PLAIN_BF16.id)
HEADS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
    """Sizes of a block's work. keys is chosen as large as shared memory allows, then the number of stages.

    heads     of an item, one of HEADS
    formats   record format ids of the lists, one or two
    """

    arch: str
    heads: int
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.heads not in HEADS:
            raise ValueError(f"heads: expected one of {HEADS}, got {self.heads}")
        for kv_format in self.formats:
            if kv_format not in FORMATS:
                raise ValueError(f"format: expected one of {FORMATS}, got {kv_format!r}")

    @property
    def rows(self) -> int:
        """Heads of a tile as the tensor cores count them."""
        return max(16, self.heads)

    @property
    def is_plain(self) -> bool:
        """Whether no list is of fp8_ds_mla."""
        return FP8_DS_MLA.id not in self.formats

    @property
    def groups(self) -> int:
        """Row groups: a warp for each does their softmax."""
        return self.rows // 8

    @property
    def shares(self) -> int:
        """Of Q K^T: one of each warp."""
        return WARPS

    @property
    def keys(self) -> int:
        """Of a step; it divides 64, so that no step straddles two tiles of the schedule."""
        return next(keys for keys in (64, 32, 16) if self._bytes(keys, 2) <= SMEM_BYTES[self.arch])

    @property
    def stages(self) -> int:
        fitting = (n for n in range(MOST_STAGES, 1, -1) if self._bytes(self.keys, n) <= SMEM_BYTES[self.arch])
        return next(fitting)

    def _bytes(self, keys: int, stages: int) -> int:
        stage = max(self._stage(kv_format, keys) for kv_format in self.formats)
        shares = WARPS * self.rows * keys * 4
        weights = self.rows * keys * 2
        return (
            stages * (stage + keys * 4)
            + shares
            + weights
            + 2 * self.rows * 4
            + FLAG_BYTES
            + self.groups * ROW_STATE
            + WARPS * WALK_BYTES
        )

    def _stage(self, kv_format: str, keys: int) -> int:
        if kv_format == FP8_DS_MLA.id:
            return keys * (FP8_DS_MLA.data_bytes + FP8_DS_MLA.scale_bytes)
        return keys * PLAIN_BF16.page_bytes(1)

    @property
    def smem_bytes(self) -> int:
        return self._bytes(self.keys, self.stages)

    # ---- places, in bytes; in a stage from its beginning ----

    @property
    def stage_bytes(self) -> int:
        return max(self._stage(kv_format, self.keys) for kv_format in self.formats)

    @property
    def shares_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def share_bytes(self) -> int:
        """Of one warp."""
        return self.rows * self.keys * 4

    @property
    def group_bytes(self) -> int:
        """Of one row group in a warp's share."""
        return self.keys // 8 * LANES * 8

    @property
    def weights_at(self) -> int:
        return self.shares_at + WARPS * self.share_bytes

    @property
    def masks_at(self) -> int:
        return self.weights_at + self.rows * self.keys * 2

    @property
    def factors_at(self) -> int:
        return self.masks_at + self.stages * self.keys * 4

    @property
    def flags_at(self) -> int:
        return self.factors_at + 2 * self.rows * 4

    @property
    def rows_at(self) -> int:
        return self.flags_at + FLAG_BYTES

    @property
    def walks_at(self) -> int:
        return self.rows_at + self.groups * ROW_STATE

    @property
    def rope_at(self) -> int:
        """Rotated columns of an fp8 stage."""
        return self.keys * NOPE_DIM

    @property
    def scales_at(self) -> int:
        return self.rope_at + self.keys * ROPE_BYTES

    @property
    def plain_bytes(self) -> int:
        """Of one warp's columns in a plain stage."""
        return self.keys * 2 * WARP_COLUMNS


def fp8_chunk(key: int, chunk: int) -> int:
    """Place of 16 of a key's e4m3 columns, from the warp's first ones of key 0. Also of a traced key and chunk."""
    return key * NOPE_DIM + (chunk ^ (key >> 1 & 3)) * CHUNK


def wide_chunk(key: int, chunk: int) -> int:
    """The same of 8 bf16 columns."""
    return key * ROPE_BYTES + (chunk ^ (key & 7)) * CHUNK
