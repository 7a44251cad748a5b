# SPDX-License-Identifier: Apache-2.0
"""Experiments with tensor copies: where the bytes of rows and boxes lie in shared memory, and what is not there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cute_kernels.isa_probes import meaning
from cute_kernels.isa_probes.meaning import TensorMap

ROWS = 192
ROW_BYTES = 576
"""Of the source: rows of a cache, or pages of TILE of them."""

KNOWN_ROWS = 100
KNOWN_PAGES = 2
"""Of them those that the descriptor tells of: what lies behind them must not come."""

TILE = 64
"""Rows of a tile, in groups of 4 where they are gathered."""


@dataclass(frozen=True)
class Transfer:
    """A tile of TILE rows of `columns` elements from byte `first` of a row on, or two boxes of that size.

    width     bytes of an element
    swizzle   bytes, as of dsl.umma.Operand
    column    of gathered rows that begin at `first`: the first that comes
    """

    name: str
    fact: str
    width: int
    columns: int
    first: int = 0
    swizzle: int = 0
    blocks: int = 1
    is_gathered: bool = True
    column: int = 0

    @property
    def line(self) -> int:
        """Bytes of a tile's row."""
        return self.width * self.columns

    @property
    def shared_bytes(self) -> int:
        return TILE * self.line * (1 if self.is_gathered else 2)


TRANSFERS = (
    Transfer("gather_swizzled", "gathered rows, swizzled by the bits of their address", 2, 64, 448, 128),
    Transfer("gather_codes", "gathered codes, swizzled", 1, 128, 128, 128),
    Transfer("gather_dense", "gathered rows one after the other", 4, 112),
    Transfer("gather_part", "some columns of gathered rows, from one in the middle on", 4, 64, column=48),
    Transfer("gather_pair", "rows gathered by both blocks of a pair, counted by the even one", 1, 128, 64, 128, 2),
    Transfer("box_128", "a page's rows as a box, swizzled", 1, 128, 0, 128, is_gathered=False),
    Transfer("box_64", "a page's rows of 64 bytes as a box, swizzled", 1, 64, 64, 64, is_gathered=False),
)

_DECODES = ("sparse_mla.blackwell.decode", "sparse_mla.blackwell.decode_2cta")
_PREFILLS = ("sparse_mla.blackwell.prefill", "sparse_mla.blackwell.prefill_mixed")

USED_BY = {
    "gather_swizzled": (*_DECODES, *_PREFILLS),
    "gather_codes": ("sparse_mla.blackwell.prefill_mixed_fp8",),
    "gather_dense": ("sparse_mla.blackwell.decode", "sparse_mla.blackwell.prefill_paged"),
    "gather_part": ("sparse_mla.blackwell.decode_2cta",),
    "gather_pair": ("sparse_mla.blackwell.decode_2cta",),
    "box_128": ("indexer.blackwell.logits", "output.blackwell.einsum", *_PREFILLS),
    "box_64": ("indexer.blackwell.logits",),
}
"""Transfer -> the kernels that rest on its fact."""

NAMES = {transfer.name: transfer for transfer in TRANSFERS}


def source(transfer: Transfer) -> tuple[Any, Any]:
    """uint8 [ROWS, ROW_BYTES], and int32 numbers: of rows, TILE a block; of boxes, the first row and page of two."""
    random = np.random.default_rng(sum(transfer.name.encode()))
    memory = random.integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)
    if not transfer.is_gathered:
        return memory, np.array([TILE // 2, KNOWN_PAGES - 1, 0, KNOWN_PAGES], np.int32)
    numbers = random.integers(-1, KNOWN_ROWS + 2, transfer.blocks * TILE)
    numbers[[0, 5, 10, 15, 16, 17, 33]] = [-1, KNOWN_ROWS, -(2**31), 2**31 - 1, 7, 7, KNOWN_ROWS - 1]
    return memory, numbers.astype(np.int32)


def expect(transfer: Transfer) -> Any:
    """uint8 [blocks, shared_bytes]: shared memory afterwards."""
    memory, numbers = source(transfer)
    found = np.zeros((transfer.blocks, transfer.shared_bytes), np.uint8)
    memory, columns, width = memory.reshape(-1), transfer.columns, transfer.width
    if transfer.is_gathered:
        known = transfer.column + columns, KNOWN_ROWS
        map_ = TensorMap(transfer.first, known, (ROW_BYTES,), (columns, 1), width, transfer.swizzle)
        for group, four in enumerate(numbers.reshape(-1, 4)):
            block, at = divmod(group * 4, TILE)
            rows = meaning.rows_of(map_, memory, transfer.column, four)
            meaning.place_box(found[block], at * transfer.line, rows, transfer.swizzle)
        return found
    sizes, strides = (columns, TILE, KNOWN_PAGES), (ROW_BYTES, TILE * ROW_BYTES)
    map_ = TensorMap(transfer.first, sizes, strides, (columns, TILE, 1), width, transfer.swizzle)
    for number, (row, page) in enumerate(numbers.reshape(-1, 2)):
        box = meaning.box_of(map_, memory, (0, int(row), int(page)))
        meaning.place_box(found[0], number * TILE * transfer.line, box, transfer.swizzle)
    return found
