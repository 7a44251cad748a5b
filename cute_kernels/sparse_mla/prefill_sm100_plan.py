"""What the warps of Blackwell's prefill kernel agree on: sizes, shared and tensor memory of a block, its products.

Items, tiles, slabs and the ring of stages are those of prefill_sm90_plan: what begins an item is a stage of its
queries. Of those, HELD columns are copied to tensor memory, and the stage is let go of; the others stay in shared
memory while the item lasts.

Products and tensor memory are those of blackwell/decode.py: lanes h and h + 64 belong to head h, of scores they have 32
keys each, of O the columns that `o_dim` says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers
from cute_kernels.formats import HEAD_DIM
from cute_kernels.runtime.work import Shape, Work
from cute_kernels.sparse_mla.blackwell.decode import GATHERED, O_COLUMNS, Q_COLUMN
from cute_kernels.sparse_mla.prefill_sm90_plan import (
    HELD,
    KEPT,
    KEYS,
    P_BUFFERS,
    P_BYTES,
    ROWS,
    SLAB,
    SLAB_BYTES,
    STAGE_BYTES,
    STAGES,
)

SCORES_WARPS = BACK_WARPS = FRONT_WARPS = 4
BACK, PRODUCTS, LISTS_WARP, ROWS_WARP, ROWS_WARPS, FRONT = 4, 8, 9, 10, 2, 12
"""First warps of the roles, the scores' being 0; how many ask for rows, half of a stage each. Where rows have to be
converted a front does that."""

LISTS = 4
LIST = KEYS * 4 + 16
"""Bytes of a tile's list: where its rows are, -1 for one that is not there; which are there, 32 a word; marks."""

THERE_AT, MARK_AT = KEYS * 4, KEYS * 4 + 8
"""Where in a list those are."""

SECOND = 4
"""Mark of a tile, beside LAST and END: its rows are those of the second source."""

GROUP_BYTES = GATHERED * SLAB * 2
"""Of four rows that one instruction gathers, in a slab."""

LANE = 1 << 16
"""From a lane to the next in an address of tensor memory."""

TILES = ("stages", "raw", "kept", "p")
"""Parts of shared memory with swizzled rows: 1024-byte aligned."""


def smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order."""
    return {
        "stages": STAGES * STAGE_BYTES,
        "kept": ROWS * KEPT * 2,
        "p": P_BUFFERS * P_BYTES,
        "lists": LISTS * LIST,
        "exchange": 2 * ROWS * 4,
        "note": ROWS * 4,
        "label": 8,
    }


class Places(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    stages, kept, p
              as in prefill_sm90_plan
    lists     [4] lists
    exchange  fp32 [2 halves][64 heads]: what threads of the same head tell each other
    note      fp32 [64 heads]: what to multiply an item's O with
    label     marks of the item's last tile
    raw, scales
              what a kernel over rows of another kind converts
    """

    stages: Any
    kept: Any
    p: Any
    lists: Any
    exchange: Any
    note: Any
    label: Any
    raw: Any = None
    scales: Any = None


@dataclass(frozen=True)
class Barriers:
    """mbarriers of a block, and what completes their phases.

    stages    full: all bytes of a tile, or of an item's queries, are there. empty: P V of the tile is done, or the copy
              of the queries
    scores    [2 buffers] Q K^T of a tile is done
    weights   full: the scores' warps have stored a tile's weights; they have loaded its scores. empty: P V is done
    lists     full: a tile's list is written. empty: all who read it have
    total     full: an item's P V is done, and its note is there. empty: the back's warps have loaded O
    kept      Q K^T of an item's last tile is done
    """

    stages: barriers.Ring
    scores: Any
    weights: barriers.Ring
    lists: barriers.Ring
    total: barriers.Ring
    kept: Any

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Barriers:
        return cls(**cls.parts(smem, STAGES))

    @staticmethod
    def parts(smem: SmemAllocator, stages: int) -> dict[str, Any]:
        ring = barriers.Ring.allocate
        return {
            "stages": ring(smem, stages),
            "scores": smem.allocate_array(Int64, P_BUFFERS),
            "weights": ring(smem, P_BUFFERS),
            "lists": ring(smem, LISTS),
            "total": ring(smem, 1),
            "kept": smem.allocate_array(Int64, 1),
        }

    def initialize(self) -> None:
        """By one thread; the block synchronizes afterwards."""
        self.stages.initialize(ROWS_WARPS, 1)
        # the products, and each warp of the others
        self.lists.initialize(1, 1 + ROWS_WARPS + SCORES_WARPS)
        self.initialize_others()

    def initialize_others(self) -> None:
        for buffer in range(P_BUFFERS):
            cute.arch.mbarrier_init(self.scores + buffer, 1)
        self.weights.initialize(SCORES_WARPS, 1)
        self.total.initialize(1 + SCORES_WARPS, BACK_WARPS)
        cute.arch.mbarrier_init(self.kept, 1)
        cute.arch.mbarrier_init_fence()


MBARRIERS = 2 * (STAGES + P_BUFFERS + LISTS + 1) + P_BUFFERS + 1


@dataclass(frozen=True)
class Plan:
    """What is not the same in kernels over rows of another kind.

    dtype      of what tensor cores multiply: "bf16" or "f16"
    stages     of the ring
    memory     as smem_parts(); the names are those of Places
    barriers   type of the barriers
    mbarriers  how many those are
    has_front  there are warps that convert rows
    """

    dtype: str
    stages: int
    memory: dict[str, int]
    barriers: Any = Barriers
    mbarriers: int = MBARRIERS
    has_front: bool = False

    @property
    def threads(self) -> int:
        return (FRONT + (FRONT_WARPS if self.has_front else 0)) * 32

    @property
    def smem_bytes(self) -> int:
        return sum(self.memory.values()) + self.mbarriers * 8


BF16 = Plan("bf16", STAGES, smem_parts())


class QueryCopy(NamedTuple):
    """A copy of 16 bytes of all heads' queries from a stage to tensor memory."""

    column: int
    offset: int


def query_copies() -> Iterator[QueryCopy]:
    for chunk in range(HELD // 8):
        slab, within = divmod(chunk, SLAB // 8)
        yield QueryCopy(Q_COLUMN + chunk * 4, slab * SLAB_BYTES + within * 16)


def group_place(group: int, slab: int) -> int:
    """Byte of a slab's part of four rows in a stage; where in it their chunks lie is the copy's business."""
    return slab * SLAB_BYTES + group * GROUP_BYTES


# ---- what perf/roofline.py makes times of ----------------------------------------------------------------------------

PREFILLS = ((64, 640), (128, 640), (64, 1152), (128, 1152), (64, 2176), (128, 2176), (8, 640))
"""Heads and columns of calls with 4096 query rows over 16384 rows of kv."""

QUERY_ROWS, KV_ROWS = 4096, 16384


def of_tile(op: str, kernel: str, rows: dict[str, float], heads: int = ROWS, shapes: tuple[Shape, ...] = ()) -> Work:
    """Work of a tile.

    rows    bytes through shared memory until the tile is there
    heads   of an item, of the 64 that are computed
    """
    flops = 2 * 2 * KEYS * HEAD_DIM
    smem = {
        "Q K^T": STAGE_BYTES + KEPT * ROWS * 2,
        "P in and out": P_BYTES + HEAD_DIM // O_COLUMNS * P_BYTES,
        "P V": STAGE_BYTES,
    }
    # rows are read over and over: they come from L2, whose rate is not known
    mma = {"bf16": float(flops * ROWS)}
    return Work(op, kernel, f"{KEYS} keys, {ROWS} heads", 1, 0, mma, rows | smem, flops * heads, shapes)


def shape(name: str, heads: int, keys: int, kv_bytes: float) -> Shape:
    """Of a call with QUERY_ROWS rows that attend to so many keys each."""
    tiles = QUERY_ROWS * -(-heads // ROWS) * -(-keys // KEYS)
    return Shape(name, tiles, QUERY_ROWS * heads * HEAD_DIM * 2 * 2 + kv_bytes)


def work() -> tuple[Work, ...]:
    """128 heads are two items. Fewer than 64 take as long as 64."""
    shapes: dict[int, list[Shape]] = {}
    for heads, topk in PREFILLS:
        name = f"sq{QUERY_ROWS} h{heads} topk{topk} skv{KV_ROWS}"
        own = shape(name, heads, topk, KV_ROWS * HEAD_DIM * 2 + QUERY_ROWS * topk * 4)
        shapes.setdefault(min(heads, ROWS), []).append(own)
    rows = {"rows in": float(STAGE_BYTES)}
    return tuple(
        of_tile("sparse_mla_prefill", f"{heads} heads", rows, heads, tuple(own)) for heads, own in shapes.items()
    )
