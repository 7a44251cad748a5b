"""How the portable kernels of prefill lay out a block's work: plain Python that they trace and tests evaluate.

A block has eight warps. Of a step's rows of kv ("keys") all become bf16 in shared memory, a tile: both K and V. The
warps are head groups times column groups: a warp has 32 heads (16 if there are no more) and 128 columns (64, if one
head group has all heads) in both products, its queries and its columns of O in registers. So a tile is read twice per
head group, and what the column groups sum of Q K^T is added up through shared memory.

Shared memory, in this order:

    stages    what rows are copied to, by step: tiles if all caches are bf16, else raw rows
      tile      [8 slabs][keys][64] bf16; chunk c of 16 bytes of key k lies at c ^ (k % 8)
      raw       [keys][576 or 1088] bytes of a row, [keys][8] scale bytes
    tile      where raw rows become a tile; nothing if stages are tiles
    shares    [head groups][column groups][row groups of a head group][keys / 8][32 lanes] two fp32: shares of Q K^T;
              a row group is 8 heads
    weights   [rows / 16][keys / 16][32 lanes][4] words: P as operand of the second product
    masks     [stages][keys] int32: 0 for a key that does not count, else one more than the number of its cache
    labels    [stages] int32: the item that the stage's keys belong to
    factors   [2][rows] fp32: by head, what O is multiplied with in this step, and at the end
    flags     [8] int32: by row group, whether one of the former is not 1
    rows      [row groups][32 lanes] two fp32: the maximum of the lane's row, and its part of the sum of the weights
    tops      [row groups][32 lanes] fp32: the largest score of the lane's row
    sinks     [128] fp32: by head of a row
    walks     [8] see portable_prefill_walk
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, PLAIN_BF16, PLAIN_FP8
from cute_kernels.runtime.arch import SMEM_BYTES
from cute_kernels.sparse_mla.mma_sync.operands import FLAG_BYTES, LANES, ROW_STATE, WARPS

FORMATS = (PLAIN_BF16.id, FP8_DS_MLA.id, PLAIN_FP8.id)
HEADS = (16, 32, 64)
"""Of an item, by kernel; more heads than the last make two items of a row."""

MAX_HEADS = 2 * HEADS[-1]
"""Of a row."""

SLAB = 64
SLABS = HEAD_DIM // SLAB
SLAB_ROW = 2 * SLAB
KEY_LANES = 8
"""Lanes that copy a key, 128 bytes at a time."""

AT_ONCE = LANES // KEY_LANES
"""Keys that a warp copies at a time."""

LOOK_AHEAD = LANES
"""Items whose columns are counted at a time."""

WALK_BYTES = 16 + LOOK_AHEAD * 16
MOST_STAGES = 4


def item_heads(heads: int) -> int:
    """Heads of an item of a kernel for so many heads in all."""
    return next((count for count in HEADS if heads <= count), HEADS[-1])


def row_bytes(kv_format: str) -> int:
    """What is copied of a row, scales apart."""
    return {PLAIN_BF16.id: 2 * HEAD_DIM, FP8_DS_MLA.id: FP8_DS_MLA.data_bytes, PLAIN_FP8.id: HEAD_DIM}[kv_format]


@dataclass(frozen=True)
class Plan:
    """Sizes of a block's work. keys is chosen as large as shared memory allows, then the number of stages.

    rows      heads of an item, one of HEADS
    formats   record format ids of the caches, one or two
    """

    arch: str
    rows: int
    formats: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rows not in HEADS:
            raise ValueError(f"heads: expected one of {HEADS}, got {self.rows}")
        for kv_format in self.formats:
            if kv_format not in FORMATS:
                raise ValueError(f"format: expected one of {FORMATS}, got {kv_format!r}")

    @property
    def is_direct(self) -> bool:
        """Whether rows are copied to where they are multiplied."""
        return all(kv_format == PLAIN_BF16.id for kv_format in self.formats)

    # ---- what a warp has ----

    @property
    def head_groups(self) -> int:
        return 2 if self.rows == HEADS[-1] else 1

    @property
    def shares(self) -> int:
        """Column groups."""
        return WARPS // self.head_groups

    @property
    def warp_rows(self) -> int:
        return self.rows // self.head_groups

    @property
    def tiles(self) -> int:
        """The same as tensor cores count them."""
        return self.warp_rows // 16

    @property
    def slabs(self) -> int:
        return SLABS // self.shares

    @property
    def groups(self) -> int:
        """Row groups: a warp for each does their softmax."""
        return self.rows // 8

    @property
    def group_flags(self) -> int:
        """Row groups of a head group."""
        return self.warp_rows // 8

    # ---- sizes, in bytes ----

    @property
    def keys(self) -> int:
        """Of a step."""
        return next(keys for keys in (64, 32, 16) if self._bytes(keys, 2) <= SMEM_BYTES[self.arch])

    @property
    def stages(self) -> int:
        fitting = (n for n in range(MOST_STAGES, 1, -1) if self._bytes(self.keys, n) <= SMEM_BYTES[self.arch])
        return next(fitting)

    @property
    def raw_row(self) -> int:
        """From one raw row to the next: an odd number of 64 bytes, so that two rows lie in different banks."""
        return max(row_bytes(kv_format) for kv_format in self.formats) // 128 * 128 + 64

    def _stage(self, keys: int) -> int:
        return keys * (SLABS * SLAB_ROW if self.is_direct else self.raw_row + FP8_DS_MLA.scale_bytes)

    def _bytes(self, keys: int, stages: int) -> int:
        tile = 0 if self.is_direct else keys * SLABS * SLAB_ROW
        shares = WARPS * self.warp_rows * keys * 4
        per_stage = self._stage(keys) + keys * 4
        fixed = 4 * MOST_STAGES + 4 * MAX_HEADS + WARPS * WALK_BYTES
        state = 2 * self.rows * 4 + FLAG_BYTES + self.groups * (ROW_STATE + LANES * 4)
        return stages * per_stage + tile + shares + self.rows * keys * 2 + state + fixed

    @property
    def smem_bytes(self) -> int:
        return self._bytes(self.keys, self.stages)

    @property
    def stage_bytes(self) -> int:
        return self._stage(self.keys)

    @property
    def slab_bytes(self) -> int:
        return self.keys * SLAB_ROW

    @property
    def share_bytes(self) -> int:
        """Of one warp."""
        return self.warp_rows * self.keys * 4

    @property
    def group_bytes(self) -> int:
        """Of one row group in a warp's share."""
        return self.keys // 8 * LANES * 8

    @property
    def operand_bytes(self) -> int:
        """Of P, for 16 heads."""
        return self.keys // 16 * LANES * 16

    # ---- places ----

    @property
    def scales_at(self) -> int:
        """In a stage."""
        return self.keys * self.raw_row

    @property
    def tile_at(self) -> int:
        return self.stages * self.stage_bytes

    @property
    def shares_at(self) -> int:
        return self.tile_at + (0 if self.is_direct else SLABS * self.slab_bytes)

    @property
    def weights_at(self) -> int:
        return self.shares_at + WARPS * self.share_bytes

    @property
    def masks_at(self) -> int:
        return self.weights_at + self.rows * self.keys * 2

    @property
    def labels_at(self) -> int:
        return self.masks_at + self.stages * self.keys * 4

    @property
    def factors_at(self) -> int:
        return self.labels_at + 4 * MOST_STAGES

    @property
    def flags_at(self) -> int:
        return self.factors_at + 2 * self.rows * 4

    @property
    def rows_at(self) -> int:
        return self.flags_at + FLAG_BYTES

    @property
    def tops_at(self) -> int:
        return self.rows_at + self.groups * ROW_STATE

    @property
    def sinks_at(self) -> int:
        return self.tops_at + self.groups * LANES * 4

    @property
    def walks_at(self) -> int:
        return self.sinks_at + MAX_HEADS * 4
