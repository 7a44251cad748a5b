"""How a warp holds one fp8_ds_mla row: shared by the kernels that write such rows and those that read them.

A lane has two runs of eight columns, and so 16 bytes of bf16 in each half of a 1024-byte row:

    lane                 0 .. 7     8 .. 15    16 .. 23    24 .. 31
    columns 8 * lane     block 0    block 1    block 2     block 3
    columns 256 + ...    block 4    block 5    block 6     rope

A record is moved in three pieces of eight bytes a lane, because the pages of a pool without padding are only that well
aligned (one row: 584 bytes):

    first     codes of the columns 8 * lane
    second    lanes 0 .. 23: codes of the columns 256 + 8 * lane; lanes 24 .. 31: the first half of each 64 rope bytes
    third     lanes 24 .. 31: the other half of them; a lane below: the eight scale bytes

The rope lanes move half of each run of 64 bytes at a time, so that every piece is made of whole 32-byte sectors: the
memory system handles a sector at a time, and stores that cover a part of one cost it more than their bytes. The lanes
whose number has bit 1 clear, and their neighbours two lanes up, trade eight bytes for that.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from cute_kernels.formats import NOPE_DIM

ROPE_LANE = 24
"""First lane whose second run of columns is rope, which is stored as it is."""

HALF_CODES = 256
"""Bytes from a lane's first run of codes to its second."""

HALF_ROW = 512
"""Bytes from a lane's first run of bf16 columns to its second."""


@cute.jit
def second_offset(lane: Any) -> Any:
    """Where a lane's second piece lies in the record, in bytes."""
    return _rope_offset(lane) if lane >= ROPE_LANE else HALF_CODES + lane * 8


def third_offset(lane: Any) -> Any:
    """Where a rope lane's third piece lies in the record, in bytes."""
    return _rope_offset(lane) + 32


def _rope_offset(lane: Any) -> Any:
    # eights 0 2 1 3 | 8 10 9 11 of the rope's sixteen: for eight lanes, two whole sectors twice
    return NOPE_DIM + (lane - ROPE_LANE) * 16 - (lane & 2) * 12


@cute.jit
def rope_pieces(lane: Any, words: Any) -> Any:
    """From a rope lane's four words to the two of its second piece and the two of its third.

    All lanes of the warp must call; what the others get means nothing.
    """
    is_upper = (lane & 2) != 0
    got_0 = cute.arch.shuffle_sync_bfly(words[0] if is_upper else words[2], 2)
    got_1 = cute.arch.shuffle_sync_bfly(words[1] if is_upper else words[3], 2)
    return (
        got_0 if is_upper else words[0],
        got_1 if is_upper else words[1],
        words[2] if is_upper else got_0,
        words[3] if is_upper else got_1,
    )


@cute.jit
def rope_words(lane: Any, second: Any, third: Any) -> Any:
    """From the two words each of a rope lane's second and third piece to its four words, the inverse of rope_pieces."""
    is_upper = (lane & 2) != 0
    got_0 = cute.arch.shuffle_sync_bfly(second[0] if is_upper else third[0], 2)
    got_1 = cute.arch.shuffle_sync_bfly(second[1] if is_upper else third[1], 2)
    return (
        got_0 if is_upper else second[0],
        got_1 if is_upper else second[1],
        third[0] if is_upper else got_0,
        third[1] if is_upper else got_1,
    )
