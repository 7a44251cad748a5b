"""What deepseek_v4_fp8_einsum on Blackwell is made of: its tiles, its shared and its tensor memory, and its products.

A tile's products are [128 rows, columns]: rows on the side that has 128 lanes of tensor memory, so that a thread has
results of one row, which it stores side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from cute_kernels.dsl import barriers, umma
from cute_kernels.formats import round_up
from cute_kernels.output.einsum_tiles import CHUNK, WARP
from cute_kernels.runtime.work import Shape, Work

ROWS = 128
"""Of a tile: lanes of tensor memory."""

COLUMNS = (64, 128, 256)
"""Of a tile."""

STAGE_BYTES = 192 * 1024
"""Of the ring of operands."""

MOST_STAGES = 8
SCALE_ROOM = 4
"""fp32 numbers after the scales of a stage's rows, for those of its columns: a multiple of 16 bytes."""

SCALE_COLUMNS = 4
"""Of tensor memory, for the words of 128 rows of an operand."""

WARPGROUPS = 2
"""That add up, each half of the columns."""

HELPERS = 4
"""Warps beside: one copies operands, one scales, one starts products, one does nothing."""


@dataclass(frozen=True)
class BlackwellPlan:
    """Sizes of a kernel: `columns` of a tile; whether scales are words of four (einsum_sm100_packed.py)."""

    columns: int
    packed: bool = False

    def __post_init__(self) -> None:
        if self.columns not in COLUMNS:
            raise ValueError(f"columns: expected one of {COLUMNS}, got {self.columns}")

    @property
    def threads(self) -> int:
        return (4 * WARPGROUPS + HELPERS) * WARP

    @property
    def width(self) -> int:
        """Columns of a warpgroup: they share an fp32 scale."""
        return self.columns // WARPGROUPS

    @property
    def stages(self) -> int:
        return min(MOST_STAGES, STAGE_BYTES // ((ROWS + self.columns) * CHUNK))

    # ---- scales

    @property
    def column_scales(self) -> int:
        """Of a chunk: an fp32 for 128 columns. Of four chunks: blocks of words for 128 columns."""
        return -(-self.columns // CHUNK)

    @property
    def scale_stages(self) -> int:
        """Of the ring of scales: each a chunk's, or words for four chunks."""
        return 4 if self.packed else 8

    @property
    def scales(self) -> int:
        """Numbers or words of a stage of scales."""
        return ROWS + (self.column_scales * CHUNK if self.packed else SCALE_ROOM)

    @property
    def scale_users(self) -> int:
        """Who let go of a stage of scales: tensor cores that copy words, or the warps that add up."""
        return 1 if self.packed else WARPGROUPS * 4

    # ---- tensor memory, in columns: results, then buffers of words

    @property
    def buffers(self) -> int:
        """Of results: those of a chunk, or, where words are multiplied along, of a tile."""
        return 1 if self.packed and self.columns == COLUMNS[-1] else 2

    @property
    def scale_width(self) -> int:
        """Of a buffer of words."""
        return SCALE_COLUMNS * (1 + self.column_scales)

    @property
    def scale_buffers(self) -> int:
        """So many that a buffer's products are done when it is copied to again: when a stage is full, those that read
        the stage before are done, so all but the last `stages` chunks are."""
        return 1 + -(-self.stages // 4)

    @property
    def scales_at(self) -> int:
        return self.buffers * self.columns

    @property
    def tensor_columns(self) -> int:
        """That the kernel asks for: a power of two."""
        used = self.scales_at + (self.scale_buffers * self.scale_width if self.packed else 0)
        return 1 << (used - 1).bit_length()

    @property
    def smem_bytes(self) -> int:
        small = (self.stages + self.scale_stages + self.buffers) * barriers.BYTES_PER_STAGE
        small = round_up(small, 128) + self.scale_stages * self.scales * 4 + 16
        return round_up(small, 1024) + self.stages * (ROWS + self.columns) * CHUNK

    # ---- products

    @property
    def operand(self) -> umma.Operand:
        """Rows of `a` or of `b`, as tensor copies leave them."""
        return umma.k_major(8, CHUNK)

    @property
    def instruction(self) -> int:
        return umma.instruction("f8f6f4", "e4m3", "e4m3", ROWS, self.columns)

    def scaled_instruction(self, part: int) -> int:
        """Of the chunk that byte `part` of its words is for."""
        return umma.scaled_instruction("mxf8f6f4", "e4m3", "e4m3", ROWS, self.columns, part, part)

    @property
    def steps(self) -> tuple[int, ...]:
        """Of a chunk's product: bytes to add to the start of both operands."""
        return tuple(self.operand.step(k) for k in range(0, CHUNK, umma.K_BYTES))


GROUPS, RANK, WIDTH = 8, 1024, 4096
CALLS = (1, 512, 8192)
"""Rows of a call."""

LANES = 128
"""fp32 additions of a multiprocessor in a clock."""


def work() -> tuple[Work, ...]:
    """What perf/roofline.py makes times of."""
    return tuple(_work(columns, packed) for packed in (False, True) for columns in COLUMNS)


def _work(columns: int, packed: bool) -> Work:
    chunks = WIDTH // CHUNK
    scales = chunks * BlackwellPlan(columns, packed).scales * 4 // (4 if packed else 1)
    operands = (ROWS + columns) * WIDTH
    products = 2 * ROWS * columns * WIDTH
    shapes = []
    for rows in CALLS:
        tiles = GROUPS * -(-rows // ROWS) * (RANK // columns)
        moved = GROUPS * (RANK * WIDTH + rows * (WIDTH + WIDTH // CHUNK * 4 + RANK * 2))
        shapes.append(Shape(f"G={GROUPS} T={rows}", tiles, moved))
    return Work(
        op="deepseek_v4_fp8_einsum",
        kernel=f"{columns} columns" + ", packed scales" * packed,
        tile=f"{ROWS} rows, {columns} columns, K = {WIDTH}",
        blocks=1,
        hbm=0,
        mma={"e4m3": products},
        smem={"copies": operands, "operands": operands, "scales": 2 * scales},
        flops=products,
        shapes=tuple(shapes),
        threads={} if packed else {"additions": ROWS * columns * chunks / LANES},
    )
