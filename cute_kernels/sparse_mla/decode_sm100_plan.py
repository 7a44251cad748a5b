"""What the warps of Blackwell's decode kernel agree on: sizes, the memories of a block, and what lies where in them.

A block has a work item: 64 heads of a query row, or fewer, and a part of its tiles. (Of more heads a pair of blocks has
an item: decode_pair_sm100_plan.py has what differs, under the same names.) A tile is 64 keys. Its 512 columns
are cut into slabs of 64, as on Hopper: a slab is [64 keys, 128 bytes] of bf16 in the layout of the 128-byte swizzle,
16-byte chunk c of row r at chunk c ^ (r % 8). A tile is the second operand of both products: of S = Q K^T with keys as
rows, K-major, and of O += P V with columns as rows, MN-major, from the same bytes.

Products have M = 64 and the weight-stationary form, which fills all 128 lanes of tensor memory: lane h and lane 64 + h
are both head h. The first half of a product's columns is in lanes 0 to 63, the second half in lanes 64 to 127. A first
operand in tensor memory is there twice, in both halves of the lanes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import cutlass.cute as cute
from cutlass import Int64
from cutlass.memory import SmemAllocator

from cute_kernels.dsl import barriers, ptx, umma
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM, NOPE_DIM
from cute_kernels.runtime.work import Shape, Work
from cute_kernels.sparse_mla.schedule import BLOCK_HEADS, TILE

KEYS, SLAB = TILE, 64
SLAB_BYTES = KEYS * SLAB * 2

FIRST, LAST, END = 1, 2, 4
SECOND = 8
"""Marks of a tile. Those of Hopper's; and its rows are of the second cache."""

BLOCKS = 1
"""That share a work item."""

HEADS = BLOCK_HEADS[-1]
"""Of a block: what products take. Rows of heads that nobody has are computed and not stored."""

SLABS = HEAD_DIM // SLAB
LAST_SLAB = SLABS - 1
"""The rotary columns."""

STAGE_BYTES = SLABS * SLAB_BYTES
STAGES = 2

RAWS = 2
"""Tiles whose codes are on their way from memory."""

RAW_BYTES = KEYS * NOPE_DIM

BUFFERS = 2
"""Of S in tensor memory, and of P."""

SLOTS = 4
"""Tiles that the scout may be ahead of the scores."""

ROW_BYTES = FP8_DS_MLA.data_bytes
"""Of a row of the tensors that copies gather from: pages lie multiples of it apart."""

GATHERED = 4
"""Rows of a gathering copy."""

CODES = NOPE_DIM
"""Of a row that a block gathers, in one piece."""

FRONT_WARP, PRODUCTS_WARP, CODES_WARP, ROPE_WARP, WARPS = 4, 8, 9, 10, 12
"""The first of each role. The scores begin, the scout is the last."""

THREADS = WARPS * 32

PAIR_BARRIER, PAIR_THREADS = 1, 64
"""Named barriers of the two warps that share heads, and their threads."""

O_COLUMN, Q_COLUMN, S_COLUMN = 0, 256, 448
"""In tensor memory, all of which is taken: O, slabs 0 to 5 of Q, two buffers of S."""

Q_SLABS = 6
"""Of Q, in tensor memory. There is room for no more: the others are in shared memory."""

S_COLUMNS = KEYS // 2
O_COLUMNS = HEAD_DIM // 2
Q_COLUMNS = SLAB // 2
"""Of a slab: two bf16 in a column."""

FORM = {"weight_stationary": True}
"""Of products, as ptx.tensor_mma takes it."""

SCORES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", HEADS, KEYS)
VALUES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", HEADS, HEAD_DIM // 2, b_is_mn_major=True)

KEY_ROWS = umma.k_major(16)
"""A slab with keys, heads or rows of P as rows; P's summed dimension is keys."""

VALUE_ROWS = umma.mn_major(16, SLAB_BYTES)
"""Slabs with their columns as rows."""


def smem_parts() -> dict[str, int]:
    """Bytes of everything in shared memory but the barriers, in order; the first four are 1024-byte aligned."""
    return {
        "v": STAGES * STAGE_BYTES,
        "q": (SLABS - Q_SLABS) * SLAB_BYTES,
        "p": BUFFERS * SLAB_BYTES,
        "raw": RAWS * RAW_BYTES,
        "rows": SLOTS * KEYS * 4,
        "scales": SLOTS * KEYS * FP8_DS_MLA.scale_bytes,
        "heading": SLOTS * HEADING,
        "exchange": 2 * 4 * 32 * 4,
        "tensor_memory": 16,
    }


HEADING = 16
"""Bytes of a heading: marks, item, and which of keys 0 to 31 and 32 to 63 are there."""

RINGS = {"headings": SLOTS, "raws": RAWS, "stages": STAGES}


def barriers_of(rings: dict[str, int]) -> int:
    """How many there are with rings of these depths."""
    return 2 * sum(rings.values()) + rings["headings"] + BUFFERS + BUFFERS + 1


BARRIERS = barriers_of(RINGS)


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


class Places(NamedTuple):
    """Addresses in shared memory, 32 bits wide.

    v              [2 stages][8 slabs][64 keys][64] bf16
    q              [2 slabs][64 heads][64] bf16: slabs 6 and 7
    p              [2 buffers][64 heads][64 keys] bf16
    raw            [2][64 keys][448] codes
    rows           [4 slots][64] numbers of rows in the tensor of rows, -1 where there is none
    scales         [4 slots][64] 8 scale bytes, 0 where there is no row
    heading        [4 slots] headings
    exchange       [2][128 threads] maxima and sums
    tensor_memory  where it begins
    """

    v: Any
    q: Any
    p: Any
    raw: Any
    rows: Any
    scales: Any
    heading: Any
    exchange: Any
    tensor_memory: Any


def places(base: Any) -> Places:
    """In shared memory that begins at a 1024-byte aligned address."""
    return in_order(base, smem_parts())


def in_order(base: Any, parts: dict[str, int]) -> Places:
    """Parts of so many bytes, one after the other."""
    found, offset = [], 0
    for size in parts.values():
        found.append(base + offset)
        offset += size
    return Places(*found)


# ---- plain functions of numbers: the kernel traces them, tests evaluate them -----------------------------------------


def chunk_offset(row: Any, chunk: Any) -> Any:
    """Of 16-byte chunk `chunk` of a row, in a slab."""
    return row * (SLAB * 2) + ((chunk ^ (row & 7)) << 4)


def stage_offset(stage: Any, slab: Any, row: Any, chunk: Any) -> Any:
    """Of a chunk of a key, in v."""
    return stage * STAGE_BYTES + slab * SLAB_BYTES + chunk_offset(row, chunk)


def raw_offset(raw: Any, row: Any) -> Any:
    """Of a key's codes, in raw."""
    return raw * RAW_BYTES + row * NOPE_DIM


def rope_offset(stage: Any, row: Any) -> Any:
    """Of a key's rotary columns, in v: where a gathering copy of rows from `row` on, a multiple of 4, begins. It
    swizzles by the address."""
    return stage * STAGE_BYTES + LAST_SLAB * SLAB_BYTES + row * (SLAB * 2)


class Step(NamedTuple):
    """One of the products that S or O of a tile take.

    d      column in tensor memory of the result; of S that of its first buffer
    a      where the first operand begins: a column in tensor memory, or bytes into q or p
    is_resident   whether it is in tensor memory
    b      bytes into a stage where the second one begins
    is_first      of those with the same result
    """

    d: int
    a: int
    is_resident: bool
    b: int
    is_first: bool


def scores_steps() -> Iterator[Step]:
    """S = Q K^T of 64 heads and 64 keys, 16 columns at a time."""
    for slab in range(SLABS):
        for k in range(0, SLAB, 16):
            is_resident = slab < Q_SLABS
            a = Q_COLUMN + slab * Q_COLUMNS + k // 2
            if not is_resident:
                a = (slab - Q_SLABS) * SLAB_BYTES + KEY_ROWS.step(k)
            yield Step(S_COLUMN, a, is_resident, slab * SLAB_BYTES + KEY_ROWS.step(k), slab + k == 0)


def values_steps(slabs: int = SLABS) -> Iterator[Step]:
    """O += P V, of half of a block's slabs of columns and 16 keys at a time."""
    for half in range(2):
        for k in range(0, KEYS, 16):
            b = half * (slabs // 2) * SLAB_BYTES + VALUE_ROWS.step(k)
            yield Step(O_COLUMN + half * (O_COLUMNS // 2), KEY_ROWS.step(k), False, b, k == 0)


O_BLOCK = 32
"""Columns of O that a thread takes at a time."""


def o_dim(half: Any, block: Any) -> Any:
    """Column of the result that block `block` (0 to 7) of O begins with, in lanes 64 * half to 64 * half + 63."""
    return block // 4 * (HEAD_DIM // 2) + half * (HEAD_DIM // 4) + block % 4 * O_BLOCK


# ---- barriers --------------------------------------------------------------------------------------------------------


HEADING_READERS = WARPS - 1
"""A thread of each warp but the scout."""


@dataclass(frozen=True)
class Barriers:
    """mbarriers, and what completes their phases.

    headings   full: the scout has stored a tile's heading and row numbers. empty: the warps of all other roles are done
               with them, and the front with the scales
    raws       full: all bytes of a tile's codes are there. empty: the front's warps have loaded them
    stages     full: the front's warps have stored a tile, and all bytes of its rotary columns are there. empty: P V of
               it is done, and so S before
    scales     of each slot: all bytes of a tile's scales are there
    sums       of each buffer: S is there, and P V of the tile two before is done
    weights    of each buffer: the scores' warps have loaded S and stored P; at an item's beginning, they have loaded
               O of the item before
    queries    the scores' warps have stored an item's Q
    """

    headings: barriers.Ring
    raws: barriers.Ring
    stages: barriers.Ring
    scales: Any
    sums: Any
    weights: Any
    queries: Any

    depths: ClassVar[dict[str, int]] = RINGS
    blocks: ClassVar[int] = BLOCKS

    @classmethod
    def allocate(cls, smem: SmemAllocator) -> Barriers:
        rings = (barriers.Ring.allocate(smem, stages) for stages in cls.depths.values())
        counts = cls.depths["headings"], BUFFERS, BUFFERS, 1
        return cls(*rings, *(smem.allocate_array(Int64, count) for count in counts))

    def initialize(self, readers: Any = HEADING_READERS) -> None:
        """By one thread; all blocks synchronize afterwards. readers: of headings"""
        warps = 4 * self.blocks
        self.headings.initialize(1, readers)
        self.raws.initialize(1, 4)
        # the front's warps, and one thread that expects rotary columns
        self.stages.initialize(warps + 1, 1)
        rest = (self.scales, self.depths["headings"], 32), (self.sums, BUFFERS, 1)
        for first, count, arrivals in (*rest, (self.weights, BUFFERS, warps), (self.queries, 1, warps)):
            for i in range(count):
                cute.arch.mbarrier_init(first + i, arrivals)
        cute.arch.mbarrier_init_fence()

    def arrive(self, barrier: Any) -> None:
        """At one of those that the products' warp waits for. By a thread."""
        cute.arch.mbarrier_arrive(barrier)

    def wait(self, barrier: Any, phase: Any) -> None:
        """For one of these."""
        ptx.wait_mbarrier(barrier.toint(), phase)

    def commit(self, barrier: Any) -> None:
        """Arrive when the products that this thread has started are done."""
        ptx.commit_tensor(barrier.toint())


CODES_BYTES = KEYS * NOPE_DIM
ROPE_BYTES = KEYS * SLAB * 2
"""What the barriers of a tile's copies expect."""


# ---- what a tile takes -----------------------------------------------------------------------------------------------

ROWS = (64, 256)
"""Of calls that are reckoned up."""


def shapes(heads: int) -> tuple[Shape, ...]:
    """Calls with 128 and 512 columns, and so many heads, all of one item."""
    found = []
    for rows in ROWS:
        moved = rows * ((128 + 512) * FP8_DS_MLA.row_elements + 2 * heads * HEAD_DIM * 2)
        found.append(Shape(f"b{rows} h{heads} 128+512", rows * (128 + 512) // KEYS, moved))
    return tuple(found)


def work() -> tuple[Work, ...]:
    """Of a tile, whatever its heads: 64 of them are computed."""
    products = 2 * 2 * HEADS * KEYS * HEAD_DIM
    return (
        Work(
            op="sparse_mla_decode",
            kernel="64 heads",
            tile=f"{KEYS} keys, {HEADS} heads",
            blocks=1,
            hbm=KEYS * FP8_DS_MLA.row_elements,
            mma={"bf16": products},
            smem={
                "codes in and out": 2 * RAW_BYTES,
                "bf16 in": STAGE_BYTES,
                "Q K^T": STAGE_BYTES + (SLABS - Q_SLABS) * SLAB_BYTES,
                "P": 3 * SLAB_BYTES,
                "P V": STAGE_BYTES,
            },
            flops=products,
            shapes=shapes(HEADS),
            # instructions of a warp of each, which share a scheduler. CUDA 12's assembler moves the bits of codes;
            # that of CUDA 13 converts them in 325
            threads={"codes to bf16": 780, "softmax": 290, "all else": 60},
        ),
    )
