"""What the score kernel on Blackwell is made of: its sizes, its shared and its tensor memory, and its products.

A tile's products are [128 keys, heads of a group's rows]: keys on the side that has 128 lanes of tensor memory, so that
a thread has all heads of its key, and heads are added up without another thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.dsl import barriers, umma
from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer.logits_plan import QUERIES, Plan
from cute_kernels.runtime.work import Shape, Work

TILE = 128
"""Keys of a tile: lanes of tensor memory."""

PAGE_BOX = 64
"""Keys of pages that a copy brings: pages have a multiple of it."""

STAGE_BYTES = 128 * 1024
"""Of the ring of keys, without scales. A Hopper multiprocessor has use for 48 to 72 KB on their way, and two or three
stages are with those who use them."""

SUMMERS = 2
"""Warpgroups that add up."""

BUFFERS = 2
"""Of a tile's products in tensor memory."""

SCALE_COLUMNS = 4
"""Of tensor memory, for the scales of 128 rows of an operand."""

ALIGNMENT = 128
"""Of everything in shared memory but barriers and operands, which have less and more, in bytes."""

MANY_WEIGHTS = 64
"""Of a thread, beyond which it needs more registers than its share of a multiprocessor's."""


@dataclass(frozen=True)
class BlackwellPlan(Plan):
    """Sizes of one kernel: as Plan, `box` being PAGE_BOX or, of contiguous keys, TILE; and whether codes are MXFP4."""

    mxfp4: bool = False

    @property
    def keys(self) -> int:
        return TILE

    @property
    def row_bytes(self) -> int:
        return INDEX_DIM // 2 if self.mxfp4 else INDEX_DIM

    @property
    def parts(self) -> int:
        """That a tile's rows are added up in, one by each warpgroup. One: then each adds up every second tile."""
        return 2 if self.rows > 2 else 1

    @property
    def held(self) -> int:
        """Rows whose weights a thread has in registers."""
        return -(-self.rows // self.parts)

    def rows_of_part(self, part: int) -> int:
        return min(self.held, self.rows - part * self.held)

    @property
    def warpgroups(self) -> int:
        return SUMMERS

    @property
    def walkers(self) -> int:
        """One for all: what it brings, both warpgroups use."""
        return 1

    @property
    def helpers(self) -> int:
        """Warps beside: one brings keys, one starts products, one puts scales where these take them (of e4m3 codes it
        has nothing to do), one writes -inf."""
        return 4

    @property
    def stages(self) -> int:
        return STAGE_BYTES // (TILE * self.row_bytes)

    @property
    def buffers(self) -> int:
        """For queries."""
        return QUERIES

    @property
    def scale_blocks(self) -> int:
        """Of 128 heads, whose scales come together."""
        return -(-self.columns // TILE)

    @property
    def scale_rows(self) -> int:
        return self.scale_blocks * TILE

    @property
    def words(self) -> dict[str, int]:
        """As of Plan, and the address of the tensor memory. MXFP4: the scales of a tile's keys, and of the heads of 128
        rows, come in their order and are put in that of umma.scale_offset."""
        head_scales = {"head_scales": self.buffers * self.scale_rows} if self.mxfp4 else {}
        return {**super().words, "tensor": 4, **head_scales}

    @property
    def barriers(self) -> int:
        """mbarriers: of three rings, and where scales have been put in order."""
        return 2 * (self.stages + self.buffers + BUFFERS) + (self.stages if self.mxfp4 else 0)

    @property
    def smem_bytes(self) -> int:
        small = self.barriers * barriers.BYTES_PER_STAGE // 2
        small = round_up(small, ALIGNMENT) + sum(round_up(count * 4, ALIGNMENT) for count in self.words.values())
        return round_up(small, 1024) + (self.stages * TILE + self.buffers * self.columns) * self.row_bytes

    # ---- tensor memory, in columns: products of every buffer, scales of keys for each, scales of two groups' queries

    @property
    def key_scales_at(self) -> int:
        return BUFFERS * self.columns

    @property
    def head_scales_at(self) -> int:
        return self.key_scales_at + BUFFERS * SCALE_COLUMNS

    @property
    def used_columns(self) -> int:
        if not self.mxfp4:
            return self.key_scales_at
        return self.head_scales_at + QUERIES * self.scale_blocks * SCALE_COLUMNS

    @property
    def tensor_columns(self) -> int:
        """That the kernel asks for: a power of two."""
        return max(32, 1 << (self.used_columns - 1).bit_length())

    # ---- products

    @property
    def operand(self) -> umma.Operand:
        """Keys or heads, a row of codes each, as tensor copies leave them."""
        return umma.k_major(4, 64) if self.mxfp4 else umma.k_major(8, 128)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Of a tile's product: bytes to add to the start of both operands, and the descriptor of the instruction."""
        bits = self.operand.bits
        firsts = range(0, INDEX_DIM, umma.K_BYTES * 8 // bits)
        return [(self.operand.step(k), self.instruction_at(k)) for k in firsts]

    def instruction_at(self, k: int) -> int:
        if not self.mxfp4:
            return umma.instruction("f8f6f4", "e4m3", "e4m3", TILE, self.columns)
        block = k // 32
        return umma.scaled_instruction("mxf4", "e2m1", "e2m1", TILE, self.columns, block, block)


def most_rows(heads: int, mxfp4: bool) -> int:
    """Of a group: at most 256 columns of products, and of MXFP4 so many that scales have room in tensor memory."""
    return min(4, (192 if mxfp4 else 256) // heads)


def work() -> tuple[Work, ...]:
    """What perf/roofline.py makes times of."""
    decodes = [_work(rows, True, mxfp4) for mxfp4, most in ((False, 4), (True, 3)) for rows in range(1, most + 1)]
    return (*decodes, _work(most_rows(HEADS, False), False, False), _work(most_rows(HEADS, True), False, True))


HEADS = 64
DECODES = (64, 8192), (256, 32768)
"""Requests of a call, and keys of each."""

PREFILLS = (4096, 4096), (4096, 16384), (4096, 65536)
"""Rows of a call, and keys: the last row sees all, the one before that by RATIO one less."""

RATIO = 4

HALF_RATE = 64
"""Maxima of a multiprocessor in a clock, if that is as on Hopper."""


def _work(rows: int, paged: bool, mxfp4: bool) -> Work:
    plan = BlackwellPlan(HEADS, rows, PAGE_BOX if paged else TILE, mxfp4)
    keys, scales, scores = TILE * plan.row_bytes, TILE * 4, TILE * rows * 4
    products = 2 * TILE * plan.columns * INDEX_DIM
    smem = {"copies": keys + scales, "operands": keys + plan.columns * plan.row_bytes, "scales": scales}
    if mxfp4:
        smem["scales"] = 3 * scales
    shapes = []
    name = " mxfp4" * mxfp4
    if paged:
        for requests, length in DECODES:
            tiles = requests * length / TILE
            more = f" next_n={rows}" * (rows > 1)
            shapes.append(Shape(f"b{requests} ctx{length}{more}{name}", tiles, tiles * (keys + scales + scores)))
    else:
        for count, length in PREFILLS:
            pairs = count * (length - (count - 1) / (2 * RATIO))
            moved = pairs * 4 + length * (plan.row_bytes + 4) + count * HEADS * (plan.row_bytes + 4)
            shapes.append(Shape(f"sq{count} sk{length}{name}", pairs / rows / TILE, moved))
    return Work(
        op="paged_mqa_logits" if paged else "mqa_logits",
        kernel=("MXFP4" if mxfp4 else "FP8") + f", {rows} row{'s' * (rows > 1)}",
        tile=f"{TILE} keys, {HEADS} heads of {rows} row{'s' * (rows > 1)}",
        blocks=1,
        hbm=(keys + scales if paged else 0) + scores,
        mma={"e2m1" if mxfp4 else "e4m3": products},
        smem=smem,
        flops=products,
        shapes=tuple(shapes),
        threads={"maxima": TILE * plan.columns / HALF_RATE},
    )
