# SPDX-License-Identifier: Apache-2.0
"""What the warp roles of hopper/decode.py share: the kernel's geometry, shared memory and its barriers, and which bytes
of a cache's record a CTA takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx
from cute_kernels.formats import FP8_DS_MLA, MXFP8_FORMATS, NVFP4_FORMATS, V41Format
from cute_kernels.sparse_mla.schedule import MOST_DEALT, TILE

# ---- config

CLUSTER = 2
"""CTAs that share a work tile."""

KEYS = TILE
DIM = 512 // CLUSTER
"""Columns of a CTA."""

SLAB = 64
SLABS = DIM // SLAB
LAST_SLAB = SLABS - 1
"""In CTA 1, the rotary columns."""

ROWS = 64
"""Rows of S, P and O, whatever the heads: what tensor cores take. Fewer heads leave rows of P that are zero and rows of
O that nobody stores; the tensor cores' time for them is there, since dequantization takes longer."""

OWN_HEADS = 8
"""Of every 16 heads: CTA r of the cluster does the softmax of the r-th 8."""

PING_PONG = 2
"""Warpgroups that dequantize, and that do QK and softmax: they take tiles in turn."""

FP8_STAGES, KV_STAGES, P_STAGES = 4, 4, 2
"""32 keys of a tile as the cache has them; tiles of bf16; tiles of P."""

HEADERS = 8
"""At least the tiles that can be on their way from the producer to the softmax."""

FIRST_PV_THREAD, FIRST_DEQUANT_THREAD, FIRST_PRODUCER_THREAD = 256, 384, 640
SOFTMAX_BARRIER, EPILOGUE_BARRIER = 1, 3

SOFTMAX_REGISTERS, PV_REGISTERS, DEQUANT_REGISTERS, PRODUCER_REGISTERS = 72, 176, 64, 32
"""Per thread, in steps of 8; all six warpgroups together have 480, what they are launched with."""


# ---- shared memory

SLAB_BYTES = KEYS * SLAB * 2
SLAB_ROW_BYTES = SLAB * 2
KV_STAGE_BYTES = SLABS * SLAB_BYTES

FP8_KEYS = KEYS // 2
"""Of a piece of a tile, which is a stage of the fp8 ring."""

FP8_PITCH = DIM + SLAB
"""Bytes of a CTA's part of a row, as the cache has it, in CTA 0 and a gap that keeps banks apart; in CTA 1, whose
rotary columns are bf16 already, none."""

FP8_STAGE_BYTES = FP8_KEYS * FP8_PITCH

WARP_KEYS = 16
"""Of a tile, by a producer warp."""

HEADER = 32
"""Bytes of a tile's header: flags and, from HEADS_BIT on, heads of its work tile; the work tile; address of its
queries. Of every 16 keys, which are skipped."""

HEADS_BIT = 8

FIRST, LAST, END, ODD, EXTRA = 1, 2, 4, 8, 16
"""Flags of a tile: it begins a work tile; it ends one; there is no such tile; its work tile is the cluster's second,
fourth ...; where caches are of two formats, its rows are the extra one's."""

CURSOR = 64
"""Bytes of a producer warp's cursor, see Producer."""

FACTOR = 8
"""Bytes of a head's factors: what to multiply O with before a tile, and what behind a work tile's last one."""

TARGET = 16
"""Bytes of a tile's target: flags; of a work tile's last tile, heads that are there, address of their rows of O, or
where codes are stored, the query row and the first head."""

S_PARTIAL_BYTES = ROWS // 2 * KEYS * 4
P_BYTES = ROWS // 2 * KEYS * 2
WORDS_BYTES = 128 * 16
"""Four words of each thread of a warpgroup."""

BARRIERS = 2 * (FP8_STAGES + KV_STAGES + P_STAGES) + PING_PONG + 1 + 4 + 4 + 4


def pv_thread() -> Any:
    """The thread's number in the PV warpgroup, computed anew."""
    return ptx.thread_again() & 127


class Smem(NamedTuple):
    """Addresses in shared memory, 32 bits wide; by default sizes in bytes, see smem_parts.
    The first two are 1024-byte aligned.

    q            [4 slabs][64 heads][64] bf16
    kv           [4 stages][4 slabs][64 keys][64] bf16: K, and V
    p            [2 stages][2][128 threads][8] bf16: P of the other CTA's heads, as the threads hold it
    s_partial    [2 warpgroups][4][128 threads][4] fp32: the other CTA's part of S, as the threads hold it;
                 then, where half of it was, P of this CTA's heads, as in p
    fp8          [4][32 keys][FP8_PITCH] parts of rows, as the caches have them
    scale        [4][32 keys] 4 scale bytes
    header       [8] headers of tiles
    cursor       [4 producer warps] where it is
    factor       [2 stages][2 CTAs][4 warps][8] factors
    target       [2 stages] targets
    row_max      [4 warps][8 heads] running maxima
    row_sum      [128 threads] running sums
    dealt        [16] the cluster's work tiles, see TileScheduler
    """

    q: Any = ROWS * DIM * 2
    kv: Any = KV_STAGES * KV_STAGE_BYTES
    p: Any = P_STAGES * P_BYTES
    s_partial: Any = PING_PONG * S_PARTIAL_BYTES
    fp8: Any = FP8_STAGES * FP8_STAGE_BYTES
    scale: Any = FP8_STAGES * FP8_KEYS * 4
    header: Any = HEADERS * HEADER
    cursor: Any = 4 * CURSOR
    factor: Any = P_STAGES * ROWS * FACTOR
    target: Any = P_STAGES * TARGET
    row_max: Any = ROWS // 2 * 4
    row_sum: Any = 128 * 4
    dealt: Any = (1 + MOST_DEALT) * 4


def smem_parts() -> dict[str, int]:
    """Bytes of everything but the barriers, in order."""
    return Smem()._asdict()


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


@dataclass(frozen=True)
class Bars:
    """A CTA's mbarriers: the table at the head of decode.py. s_partial: of each softmax warpgroup; the last three: of
    each warp of it."""

    fp8: barriers.Ring
    kv: barriers.Ring
    p: barriers.Ring
    s_partial: Any
    q: Any
    q_done: Any
    row_max: Any
    row_sum: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Bars:
        rings = (barriers.Ring.allocate(smem, stages) for stages in (FP8_STAGES, KV_STAGES, P_STAGES))
        return cls(*rings, *(smem.allocate_array(Int64, count) for count in (PING_PONG, 1, 4, 4, 4)))

    def initialize(self) -> None:
        """By one thread; the cluster synchronizes afterwards."""
        # of each producer warp that has keys in it one thread, and the copies of scales
        self.fp8.initialize(2 + FP8_KEYS, 4)
        self.kv.initialize(4, 4)
        self.p.initialize(4, 4 * CLUSTER)
        barriers.initialize(self.s_partial, PING_PONG, 1)
        barriers.initialize(self.q, 1, 128)
        for of_warps in (self.q_done, self.row_max, self.row_sum):
            barriers.initialize(of_warps, 4, 1)
        cute.arch.mbarrier_init_fence()


# ---- records


@dataclass(frozen=True)
class RecordPart:
    """A CTA's part of a record; in bytes.

    row          from record to record in a page
    columns      of its columns; in CTA 1 `rotary` more
    scales       from a record to CTA 0's scales; None: they are behind all rows of the page
    scale_row    from a record's scales to the next one's
    scale_bytes  of its scales; 0: they come with the columns
    pitch        from row to row in a stage of the ring, which keeps banks apart
    stage        of such a stage
    is_split     scales are behind all rows of the page, and go behind the row's columns in the stage
    """

    row: int
    columns: int
    rotary: int
    scales: int | None
    scale_row: int
    scale_bytes: int
    pitch: int
    stage: int = FP8_STAGE_BYTES
    is_split: bool = False

    @property
    def is_e2m1(self) -> bool:
        return self.scale_bytes == E2M1_SCALES

    @property
    def is_mxfp8(self) -> bool:
        return self.scale_bytes == MXFP8_SCALES

    def offsets(self, inside: Any, rows: Any, rank: Any) -> tuple[Any, Any]:
        """Where a CTA's columns and scales are of the record of number `inside` in a page of so many rows."""
        row = inside * self.row + rank * self.columns
        scales = rows * self.row if self.scales is None else self.scales
        return row, scales + inside * self.scale_row + rank * self.scale_bytes

    def row_bytes(self, rank: Any) -> Any:
        """Of a CTA's columns."""
        return self.columns + rank * self.rotary if self.rotary else Int32(self.columns)

    def scales_at(self, smem: Any, stage: Any, key: Any) -> Any:
        """Where a key's scales belong: of V4.1's own records behind its columns."""
        if self.scales is None and not self.is_split:
            return smem.scale + (stage * FP8_KEYS + key) * self.scale_bytes
        return smem.fp8 + stage * self.stage + key * self.pitch + self.columns


def part_of(fmt: V41Format, pitch: int) -> RecordPart:
    """A CTA's half of V4.1's own records."""
    columns, scale_bytes = fmt.data_bytes // CLUSTER, fmt.scale_bytes // CLUSTER
    if fmt.is_split:
        return RecordPart(fmt.data_bytes, columns, 0, None, fmt.scale_bytes, scale_bytes, pitch, is_split=True)
    return RecordPart(fmt.row_elements, columns, 0, fmt.data_bytes, fmt.row_elements, scale_bytes, pitch)


MXFP8_SCALES, E2M1_SCALES = 8, 16
"""Bytes of a CTA's scales of a row."""

PARTS = {
    FP8_DS_MLA.id: RecordPart(FP8_DS_MLA.data_bytes, DIM, SLAB, None, FP8_DS_MLA.scale_bytes, 4, FP8_PITCH),
    **{fmt.id: part_of(fmt, FP8_PITCH) for fmt in MXFP8_FORMATS},
    **{fmt.id: part_of(fmt, 160) for fmt in NVFP4_FORMATS},
}
"""By format. Eight rows of 16-byte loads, and of 8-byte ones with NVFP4's pitch, meet in no bank."""
