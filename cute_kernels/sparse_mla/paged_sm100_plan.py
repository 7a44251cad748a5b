"""What Blackwell's paged prefill kernel has that prefill's has not: see prefill_sm100_plan.

Rows come from fp8_ds_mla caches. Their codes come through a ring of their own, and a front of four warps makes them
bf16, as decode's does; their rotary columns, and an item's queries, are bf16 already and come straight into stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.runtime.work import Work
from cute_kernels.sparse_mla.blackwell.decode import RAW_BYTES, RAWS, STAGES
from cute_kernels.sparse_mla.params import PagedKV
from cute_kernels.sparse_mla.prefill_sm90_plan import KEYS, P_BUFFERS, STAGE_BYTES
from cute_kernels.sparse_mla.prefill_sm100_plan import (
    FRONT_WARPS,
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

SCALES = FP8_DS_MLA.scale_bytes


@dataclass(frozen=True)
class PagedBarriers(Barriers):
    """As Barriers, but for:

    stages    full: the front's warps have stored a tile, and its rotary columns are there; of queries, all are there
    lists     empty: the front's warps have read a tile's list as well, and its scales
    raws      full: all bytes of a tile's codes are there. empty: the front's warps have loaded them
    scales    [4 lists] a tile's scales are there
    """

    raws: Any = None
    scales: Any = None

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> PagedBarriers:
        scales = smem.allocate_array(Int64, LISTS)
        return cls(**cls.parts(smem, STAGES), raws=barriers.Ring.allocate(smem, RAWS), scales=scales)

    def initialize(self) -> None:
        # the front, and a thread that asks for rotary columns or queries
        self.stages.initialize(FRONT_WARPS + 1, 1)
        self.raws.initialize(1, FRONT_WARPS)
        self.lists.initialize(1, 1 + ROWS_WARPS + SCORES_WARPS + FRONT_WARPS)
        for slot in range(LISTS):
            # the lanes that have them copied
            cute.arch.mbarrier_init(self.scales + slot, 32)
        self.initialize_others()


def memory() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; what is not as in Places:

    stages    [2][8 slabs][64 rows][64] bf16
    raw       [2][64 rows][448] e4m3
    scales    [4 lists][64 rows] 8 scale bytes
    """
    raw = {"stages": STAGES * STAGE_BYTES, "raw": RAWS * RAW_BYTES}
    return raw | smem_parts() | raw | {"scales": LISTS * KEYS * SCALES}


MBARRIERS = 2 * (STAGES + RAWS + P_BUFFERS + LISTS + 1) + LISTS + P_BUFFERS + 1

PAGED = Plan("bf16", STAGES, memory(), PagedBarriers, MBARRIERS, has_front=True)


class Sources(NamedTuple):
    """What Hopper's kernel knows; rows from a page of the window's cache to the next, and of the other."""

    named: PagedKV
    window_step: Any
    compressed_step: Any


CONTEXT = 16384


def work() -> tuple[Work, ...]:
    """128 heads are two items."""
    rows = {"codes in and out": 2.0 * RAW_BYTES, "bf16 in": float(STAGE_BYTES)}
    shapes = []
    for heads in (64, 128):
        for name, keys in (("swa", 128), ("c4", 640)):
            moved = CONTEXT * FP8_DS_MLA.row_elements * (1.25 if name == "c4" else 1)
            shapes.append(shape(f"{name} new{QUERY_ROWS} ctx{CONTEXT} h{heads}", heads, keys, moved))
    return (of_tile("sparse_mla_prefill_paged", "64 heads", rows, shapes=tuple(shapes)),)
