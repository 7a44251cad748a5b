# SPDX-License-Identifier: Apache-2.0
"""How the rows of a call are cut into chunks whose scores fit into a workspace.

A chunk is made of whole requests, `next_n` rows each (of a prefill: single rows). Its scores lie in the workspace as
those of `mqa_logits` do, rows a multiple of 1024 bytes apart, and the next chunk's overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch

from cute_kernels.formats import round_up

ROW_ALIGNMENT = 256
"""Rows of scores are allocated this many fp32 elements, 1024 bytes, apart, or a multiple of it."""

WORKSPACE_BYTES = 1 << 30
"""Of scores at a time, unless a single request has more: those of 4096 rows of 65536 keys. A chunk more costs 20 to 30
us, filling and draining two kernels. On an H100 3000 rows of 70000 keys take 3619 us with 256 MB, 3573 with 512, 3553
in one chunk and 3536 as two ops; 4096 rows of 262144 keys 19.22, 18.96, 18.95 (1024 MB), 18.75 ms (2048) and 18.70."""

ROWS = 4
"""A chunk of more rows has a multiple of these: score kernels take so many at a time."""


CANDIDATE_BLOCK = 8
"""Keys of a candidate block."""

LENGTH_COLUMNS = 4
"""Columns of the workspace behind the scores of a row's candidates, or its blocks' maxima: the first one has, as an
int32, how many of them there are."""

LONG_BLOCKS = 65536
"""Blocks of a row from which on select_candidate_blocks may list those that reach a bound (block_picks.py): then a
row's workspace has marks, too."""

MARKED = 512
"""Columns whose blocks are marked at a time, by two words."""


def candidate_columns(blocks: int) -> int:
    """Of the workspace, for a row of so many candidate blocks."""
    return CANDIDATE_BLOCK * blocks + LENGTH_COLUMNS


def row_bytes(columns: int) -> int:
    """Of the scores of a row."""
    return 4 * round_up(columns, ROW_ALIGNMENT)


def block_maxima_at(columns: int) -> int:
    """First word of the maxima of blocks in a row's workspace; before them, where rows are long, is the row's bound."""
    return 4 if columns > CANDIDATE_BLOCK * (LONG_BLOCKS - 1) else 0


def block_marks_at(columns: int) -> int:
    """First word of the marks of blocks, behind all maxima, where rows are long."""
    return block_maxima_at(columns) + round_up(-(-columns // CANDIDATE_BLOCK), 4)


def block_row_bytes(columns: int) -> int:
    """Workspace of a row of so many scores whose blocks are selected."""
    if not block_maxima_at(columns):
        return row_bytes(-(-columns // CANDIDATE_BLOCK) + LENGTH_COLUMNS)
    return row_bytes(block_marks_at(columns) + round_up(2 * -(-columns // MARKED), 4))


def least_bytes(requests: int, columns: int, next_n: int, k: int) -> int:
    """Workspace that a call cannot do without: no scores are computed where no row can have more than k columns."""
    return next_n * row_bytes(columns) if requests > 0 and columns > k else 0


def workspace_bytes(requests: int, columns: int, next_n: int, k: int, most: int) -> int:
    """For a call in chunks of at most `most` bytes or, if that is not enough, of one request."""
    least = least_bytes(requests, columns, next_n, k)
    return 0 if least == 0 else least * max(1, min(requests, most // least))


@lru_cache(maxsize=1024)
def bounds(requests: int, columns: int, next_n: int, size: int) -> tuple[tuple[int, int], ...]:
    """(first, last) request of every chunk, as even as can be, for a workspace of so many bytes."""
    most = max(1, min(requests, size // (next_n * row_bytes(columns))))
    each = -(-requests // -(-requests // most)) if requests else 1
    if each > ROWS:
        # a chunk costs about as much as ROWS more
        whole = [size for size in (round_up(each, ROWS), most // ROWS * ROWS) if size <= most]
        each = min(*whole, each, key=lambda size: -(-requests // size) * (round_up(size, ROWS) + ROWS))
    return tuple((first, min(first + each, requests)) for first in range(0, requests, each))


Chunk = tuple[int, int, torch.Tensor, bool]
"""(first request, last request, fp32 scores [rows, columns] to write into, whether there is anything to score)"""


def walk(
    workspace: torch.Tensor | None, requests: int, columns: int, next_n: int, out: torch.Tensor, dtype: torch.dtype
) -> Iterator[Chunk]:
    """The chunks of a call. Where no row can have more than k columns there is one chunk without scores, whatever its
    tensor holds."""
    k = out.shape[1]
    if columns <= k:
        if requests:
            yield 0, requests, out.view(dtype)[:, :columns], False
        return
    step = row_bytes(columns) // 4
    size = 0 if workspace is None else workspace.numel() * workspace.element_size()
    for first, last in bounds(requests, columns, next_n, size):
        shape = ((last - first) * next_n, columns)
        assert workspace is not None
        yield first, last, workspace.view(dtype).as_strided(shape, (step, 1)), True
