# SPDX-License-Identifier: Apache-2.0
"""Rows of sparse_mla_prefill_paged that are gathered into a workspace, for prefill's kernel: how much that takes, and
whether it is faster than reading the pages. Plain numbers, no tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from cute_kernels.formats import FP8_DS_MLA, HEAD_DIM
from cute_kernels.sparse_mla.schedule import choose_cluster_splits, head_groups

GATHERED_ROW_BYTES = HEAD_DIM * 2
LIST_COLUMNS = 4
"""Columns of a list are a multiple of that: 16 bytes."""

AUTO_GATHER_ARCHS = ("sm_90a",)
"""Where it is known which is."""


class GatheredShape(NamedTuple):
    """What `sparse_mla.gather_paged` writes of a call: bf16 rows; lists of so many columns, of as many query rows."""

    rows: int
    columns: int
    lists: int

    @classmethod
    def of(cls, rows: int, requests: int, window: int, entries: int, columns: int) -> GatheredShape:
        """rows   query rows, of so many requests
        entries   that a row of the block table has room for
        columns   most of them that a query row attends to
        """
        width = -(-(columns + window) // LIST_COLUMNS) * LIST_COLUMNS
        return cls(rows + requests * (window - 1 + entries), width, rows)

    @property
    def row_bytes(self) -> int:
        return self.rows * GATHERED_ROW_BYTES

    @property
    def list_bytes(self) -> int:
        return self.lists * self.columns * 4

    @property
    def nbytes(self) -> int:
        """Of all of it, with the lists' lengths."""
        return self.row_bytes + self.list_bytes + self.lists * 4


GATHER_US, ROW_BYTES_PER_US, LIST_BYTES_PER_US = 3.5, 4.2e6, 1.4e6
FEW_HEADS, FEW_HEADS_TILE_US, TILE_US = 16, 1.0, 0.55
"""What is_gathered_faster reckons with on an H200: microseconds of gathering beside what it moves; the rates of rows,
in and out, and of lists; what prefill's kernel gains on a tile of 64 keys, of up to so many heads and of more, over
the one that reads the pages (perf/log/prefill_paged.md)."""


@lru_cache(maxsize=4096)
def is_gathered_faster(shape: GatheredShape, heads: int, tiles: int, sms: int, may_split: bool = True) -> bool:
    """Whether rows had better be gathered first, by the shapes of a call alone. Where query rows are few enough to be
    split they had not.

    tiles       of the longest row that the widths of lists and tables allow
    sms         multiprocessors
    may_split   whether the kernel that reads the pages may split rows, which it does not if it stores codes
    """
    if may_split and choose_cluster_splits(shape.lists, heads, tiles, sms) > 1:
        return False
    rounds = -(-shape.lists * head_groups(heads) // sms)
    gain = rounds * tiles * (FEW_HEADS_TILE_US if heads <= FEW_HEADS else TILE_US)
    rows = shape.rows * (GATHERED_ROW_BYTES + FP8_DS_MLA.data_bytes)
    return gain > GATHER_US + rows / ROW_BYTES_PER_US + shape.list_bytes / LIST_BYTES_PER_US
