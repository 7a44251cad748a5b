"""What Blackwell's mixed kernels have that prefill's has not, see prefill_sm100_plan: over bf16 caches nothing.

Over e4m3 caches, rows and queries become f16 on their way to tensor cores, as on Hopper: f16 holds every e4m3 number,
so all products are exact, and weights keep 11 bits (products of 8-bit numbers would take them with 4). Codes come
through a ring of their own; a front of four warps makes them stages.

A slab of codes is [64 rows, 128 bytes], too, but of 128 columns: two slabs of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.work import Work
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS, P_BUFFERS, SLAB, SLAB_BYTES, STAGE_BYTES
from cute_kernels.sparse_mla.prefill_sm100_plan import (
    FRONT_WARPS,
    KV_ROWS,
    LISTS,
    QUERY_ROWS,
    ROWS_WARPS,
    SCORES_WARPS,
    Barriers,
    Plan,
    of_tile,
    shape,
    smem_parts,
)

STAGES = 2

RAWS = 2
CODE_SLAB = 2 * SLAB
"""Columns of a slab of codes."""

CODE_SLABS = HEAD_DIM // CODE_SLAB
RAW_BYTES = CODE_SLABS * SLAB_BYTES


@dataclass(frozen=True)
class FrontBarriers(Barriers):
    """As Barriers, but for:

    stages    full: the front's warps have stored a tile, or an item's queries
    lists     empty: the front's warps have read a tile's list as well
    raws      full: all bytes of a tile's codes, or of an item's queries, are there. empty: the front's warps have
              loaded them
    """

    raws: Any = None

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> FrontBarriers:
        return cls(**cls.parts(smem, STAGES), raws=barriers.Ring.allocate(smem, RAWS))

    def initialize(self) -> None:
        self.stages.initialize(FRONT_WARPS, 1)
        self.raws.initialize(ROWS_WARPS, FRONT_WARPS)
        self.lists.initialize(1, 1 + ROWS_WARPS + SCORES_WARPS + FRONT_WARPS)
        self.initialize_others()


def memory() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; what is not as in Places:

    stages    [2][8 slabs][64 rows][64] f16
    raw       [2][4 slabs][64 rows][128] e4m3
    """
    raw = {"stages": STAGES * STAGE_BYTES, "raw": RAWS * RAW_BYTES}
    return raw | smem_parts() | raw


MBARRIERS = 2 * (STAGES + RAWS + P_BUFFERS + LISTS + 1) + P_BUFFERS + 1

FP8 = Plan("f16", STAGES, memory(), FrontBarriers, MBARRIERS, has_front=True)

LANES_ROWS = 8
"""Rows of a load of all lanes: four lanes have half a row of a slab of codes. Of eight lanes that are served together,
four have row r and four row r ^ 5, so that neither loads of 16 codes nor stores of 16 bytes meet in a bank."""


def lane_row(lane: Any) -> Any:
    """Of LANES_ROWS, a lane's."""
    return (lane >> 3) ^ ((lane >> 2 & 1) * 5)


def code_place(row: Any, slab: int, member: Any) -> Any:
    """Byte of the 16 codes that lane `member` of four has of a row in a stage's slab, from the start of their tile."""
    chunk = (slab % 2 * 4 + member) ^ (row & 7)
    return slab // 2 * SLAB_BYTES + row * CODE_SLAB + (chunk << 4)


def stage_place(row: Any, slab: int, member: Any, chunk: int) -> Any:
    """Byte of what the first (0) or last (1) eight of those codes become, from the start of the stage."""
    return slab * SLAB_BYTES + row * (SLAB * 2) + (((2 * member + chunk) ^ (row & 7)) << 4)


OWN_ROWS = KEYS // FRONT_WARPS
"""Of a tile, by a warp of the front."""


def work() -> tuple[Work, ...]:
    """Of both formats; the calls are those of prefill, as perf's are."""
    bf16 = {"rows in": float(STAGE_BYTES)}
    codes = {"codes in and out": 2.0 * RAW_BYTES, "f16 in": float(STAGE_BYTES)}
    found = []
    for name, rows, size in (("bf16", bf16, 2), ("e4m3", codes, 1)):
        kv_bytes = KV_ROWS * HEAD_DIM * size
        shapes = tuple(shape(f"{name} sq{QUERY_ROWS} h64 {keys} keys", 64, keys, kv_bytes) for keys in (640, 1152))
        found.append(of_tile("sparse_mla_mixed", f"{name}, 64 heads", rows, shapes=shapes))
    return tuple(found)
