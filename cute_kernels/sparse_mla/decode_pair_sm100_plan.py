"""What the warps of Blackwell's decode kernel for more than 64 heads agree on, where it differs from decode_sm100_plan.

A pair of blocks has a work item: block r has heads 64 r to 64 r + 63 of a query row, and of every key columns 256 r to
256 r + 255, which nobody gathers or converts again. A tile of a block is four slabs of decode_sm100_plan.

Products are the pair's: M = 128, half of it of each block. Both blocks' tiles together are the second operand of both.
O += P V: block r has columns 256 r and up of V, 128 of them in a product, whose results are in both blocks' lanes 64 r
to 64 r + 63. S = Q K^T: a block's keys make half of N, and so are multiplied for one half of the lanes. These hold the
columns of Q that the block has of the keys, and get the part of S that comes of these. Both parts are added by threads:
the two warps that share heads exchange halves of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from cute_kernels.dsl import ptx, umma
from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.runtime.work import Work
from cute_kernels.sparse_mla import decode_sm100_plan as single
from cute_kernels.sparse_mla.decode_sm100_plan import (
    HEADING,
    HEADING_READERS,
    HEADS,
    KEY_ROWS,
    KEYS,
    O_BLOCK,
    SLAB,
    SLAB_BYTES,
    Barriers,
    Places,
    Step,
)

BLOCKS = 2
"""That share a work item."""

SIDE = HEAD_DIM // BLOCKS
"""Columns of a block."""

SLABS = SIDE // SLAB
STAGE_BYTES = SLABS * SLAB_BYTES
STAGES = 4

RAWS = 3
"""Tiles whose codes are on their way from memory."""

CODES = SIDE
RAW_BYTES = KEYS * CODES

FIRST_CODE = 192
"""Of the second block's: with those from here on its box ends where a row's codes end. It has no use for the first."""

SLOTS = 8
"""Tiles that the scout may be ahead of the scores."""

Q_COLUMN, S_COLUMN = 256, 384
"""In tensor memory, all of which is taken: O, the lane's half of its head's Q, two buffers of S."""

Q_COLUMNS = SLAB // 2
S_COLUMNS = KEYS
"""Of a buffer: parts of the scores of all keys."""

FORM = {"blocks": BLOCKS}
"""Of products, as ptx.tensor_mma takes it."""

SCORES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", BLOCKS * HEADS, BLOCKS * KEYS)
VALUES_INSTRUCTION = umma.instruction("f16", "bf16", "bf16", BLOCKS * HEADS, SIDE, b_is_mn_major=True)

TRADE_BYTES = 2 * 32 * (KEYS // 2) * 4
"""Of two warps that share heads: what each gives to the other. A slab of each one's queries takes half of it."""


def smem_parts() -> dict[str, int]:
    """As decode_sm100_plan's. No queries stay in shared memory: q is where warps trade."""
    return single.smem_parts() | {
        "v": STAGES * STAGE_BYTES,
        "q": 2 * TRADE_BYTES,
        "raw": RAWS * RAW_BYTES,
        "rows": SLOTS * KEYS * 4,
        "scales": SLOTS * KEYS * FP8_DS_MLA.scale_bytes,
        "heading": SLOTS * HEADING,
    }


RINGS = {"headings": SLOTS, "raws": RAWS, "stages": STAGES}
BARRIERS = single.barriers_of(RINGS)


def smem_bytes() -> int:
    return sum(smem_parts().values()) + BARRIERS * 8


def places(base: Any) -> Places:
    """In shared memory that begins at a 1024-byte aligned address. What is not as decode_sm100_plan has it:

    v     [4 stages][4 slabs][64 keys][64] bf16
    q     [2 pairs of warps][8][64 threads][4] fp32 parts of scores; when an item begins [4 warps][32 heads][64] bf16
    raw   [3][64 keys][256] codes: the second block's from FIRST_CODE on
    """
    return single.in_order(base, smem_parts())


# ---- plain functions of numbers: the kernel traces them, tests evaluate them -----------------------------------------


def stage_offset(stage: Any, slab: Any, row: Any, chunk: Any) -> Any:
    """Of a chunk of a key, in v; of the block's slabs."""
    return stage * STAGE_BYTES + slab * SLAB_BYTES + single.chunk_offset(row, chunk)


def raw_offset(raw: Any, row: Any) -> Any:
    """Of what a block gathers of a key's codes, in raw."""
    return raw * RAW_BYTES + row * CODES


def rope_offset(stage: Any, row: Any) -> Any:
    """As decode_sm100_plan's, of the second block."""
    return stage * STAGE_BYTES + (SLABS - 1) * SLAB_BYTES + row * (SLAB * 2)


def first_column(rank: Any) -> Any:
    """Of the codes that a block gathers, in words."""
    return rank * (FIRST_CODE // 4)


def code_offset(rank: Any, slab: Any) -> Any:
    """Of the codes of a block's slab, in a row of raw."""
    return rank * (SIDE - FIRST_CODE) + slab * SLAB


def trade_offset(pair: Any, half: Any, lane: Any) -> Any:
    """Of four scores that a lane gives to the other warp, or gets; the next four are 64 threads on. In q."""
    return pair * TRADE_BYTES + (half * 32 + lane) * 16


def scores_steps() -> Iterator[Step]:
    """Both parts of S of 128 heads and 64 keys, 16 columns of each at a time."""
    for slab in range(SLABS):
        for k in range(0, SLAB, 16):
            a = Q_COLUMN + slab * Q_COLUMNS + k // 2
            yield Step(S_COLUMN, a, True, slab * SLAB_BYTES + KEY_ROWS.step(k), slab + k == 0)


def values_steps() -> Iterator[Step]:
    """O += P V, of 128 columns of each block and 16 keys at a time."""
    return single.values_steps(SLABS)


def o_dim(half: Any, block: Any) -> Any:
    """As decode_sm100_plan's."""
    return half * SIDE + block * O_BLOCK


# ---- barriers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PairBarriers(Barriers):
    """Those that the products' warp waits for are the first block's, and threads of both blocks arrive there: weights,
    queries and full stages. What tensor cores arrive at is every block's own: sums and empty stages. So are the others.

    stages     full: as in one block, of both blocks' tiles; the rotary columns are the second block's
    """

    depths = RINGS
    blocks = BLOCKS

    def initialize(self, readers: int = HEADING_READERS) -> None:
        # in the second block nobody starts products
        super().initialize(readers - ptx.rank_again())

    def arrive(self, barrier: Any) -> None:
        cute.arch.mbarrier_arrive(barrier, 0)

    def wait(self, barrier: Any, phase: Any) -> None:
        ptx.wait_mbarrier_cluster(barrier.toint(), phase)

    def commit(self, barrier: Any) -> None:
        ptx.commit_tensor_multicast(barrier.toint(), (1 << BLOCKS) - 1)


CODES_BYTES = RAW_BYTES
ROPE_BYTES = single.ROPE_BYTES
"""What the barriers of a tile's copies expect."""


# ---- what a tile takes -----------------------------------------------------------------------------------------------


def work() -> tuple[Work, ...]:
    """Of a tile, in one of its two blocks: the first, whose columns are all codes."""
    products = 2 * 2 * HEADS * KEYS * HEAD_DIM
    heads = BLOCKS * HEADS
    return (
        Work(
            op="sparse_mla_decode",
            kernel=f"{heads} heads, pair of blocks",
            tile=f"{KEYS} keys, {heads} heads",
            blocks=BLOCKS,
            hbm=KEYS * FP8_DS_MLA.row_elements / BLOCKS,
            mma={"bf16": products},
            smem={
                "codes in and out": 2 * RAW_BYTES,
                "bf16 in": STAGE_BYTES,
                "Q K^T": STAGE_BYTES,
                "parts of scores": 2 * 2 * TRADE_BYTES,
                "P": 3 * SLAB_BYTES,
                "P V": STAGE_BYTES,
            },
            flops=products,
            shapes=single.shapes(heads),
            # see decode_sm100_plan
            threads={"codes to bf16": 530, "softmax": 340, "all else": 60},
        ),
    )
