"""What the score kernel for MXFP4 on Hopper is made of, as far as it differs from the one for e4m3 codes: its sizes."""

from __future__ import annotations

from cute_kernels.dsl import barriers
from cute_kernels.dsl.convert import E2M1_IN_E4M3
from cute_kernels.formats import INDEX_DIM, round_up
from cute_kernels.indexer.logits_plan import KEYS, Plan

MXFP4_STAGES = 16
"""Of the ring of keys, which are half as large as e4m3 ones, or a few less."""

WARPGROUPS = {1: 3, 2: 3}
"""That decode and multiply, each every third tile, by the rows of a group."""

REGISTERS: dict[int, tuple[int, ...]] = {1: (), 2: (40, 152)}
"""Per thread, of the warps beside and of those that decode and multiply, by the rows of a group, where they have
different ones: then the block has whole warpgroups, and together they have what they were launched with."""

STRIP = 16
"""Keys or query heads that a warp decodes together: its rows of a warpgroup's products."""

DECODED = INDEX_DIM
"""Bytes of a key's or a head's e4m3 codes."""

LARGEST = 6
"""Exponent that the block of a row with the largest scale gets in e4m3."""

RAISED = 2.0**-LARGEST


class Mxfp4Plan(Plan):
    """Sizes of one kernel. Keys are decoded into registers, by the warps that multiply them; a warpgroup decodes the
    queries of its group into shared memory once."""

    @property
    def row_bytes(self) -> int:
        return INDEX_DIM // 2

    @property
    def parts(self) -> int:
        return 1

    @property
    def warpgroups(self) -> int:
        return WARPGROUPS[self.rows]

    @property
    def stages(self) -> int:
        return MXFP4_STAGES // self.warpgroups * self.warpgroups

    @property
    def registers(self) -> tuple[int, ...]:
        return REGISTERS[self.rows]

    @property
    def words(self) -> dict[str, int]:
        """The scales of keys and of query heads are four bytes each; those of heads are replaced by what is not in the
        e4m3 codes. The table has the e4m3 codes."""
        more = {"head_scales": self.buffers * self.scale_rows, "table": round_up(2 * len(E2M1_IN_E4M3) + 1, 4)}
        return {**super().words, **more}

    @property
    def smem_bytes(self) -> int:
        small = (self.stages + self.buffers) * barriers.BYTES_PER_STAGE
        small += sum(round_up(count * 4, 16) for count in self.words.values())
        packed = (self.stages * KEYS + self.buffers * self.columns) * self.row_bytes
        return round_up(small, 1024) + packed + self.warpgroups * self.columns * DECODED
