# SPDX-License-Identifier: Apache-2.0
"""Rows of e4m3 caches that sparse_mla_mixed converts into a workspace first: how much that takes, and whether it is
faster than converting them for each query row. Plain numbers, no tensors."""

from __future__ import annotations

from functools import lru_cache

from cute_kernels.formats import HEAD_DIM
from cute_kernels.sparse_mla.schedule import head_groups

CONVERTED_ROW_BYTES = HEAD_DIM * 2
"""f16."""

CONVERT_ARCHS = ("sm_90a",)
LEAST_HEADS = 33
"""Where there is a kernel over converted rows. For fewer heads codes are the operand that needs no conversion ahead
(prefill_mixed_swap_ab)."""

ROUND_US, TILE_US, TILE_US_PER_ROW, ROW_BYTES_PER_US = 0.2, 0.3, 4.6e-7, 5e6
"""What is_converted_faster reckons with on an H200: microseconds that the kernel over converted rows loses on a round
of work tiles and gains on a tile of 64 keys, less for each row of the caches, as f16 rows are twice as many bytes to
read; the rate of rows that are converted, in and out (perf/log/prefill_mixed.md)."""

LEAST_ROWS = 4096
"""Of the caches that this was fitted to: fewer are reckoned as so many, as a launch takes its time however few."""


@lru_cache(maxsize=4096)
def is_converted_faster(cache_rows: int, rows: int, heads: int, tiles: int, sms: int) -> bool:
    """Whether rows had better be converted first, by the shapes of a call alone.

    cache_rows   of both caches
    rows         query rows
    tiles        of the longest row that the width of the lists allows
    sms          multiprocessors
    """
    cache_rows = max(cache_rows, LEAST_ROWS)
    gain = tiles * (TILE_US - cache_rows * TILE_US_PER_ROW) - ROUND_US
    rounds = -(-rows * head_groups(heads) // sms)
    return rounds * gain > cache_rows * (CONVERTED_ROW_BYTES + HEAD_DIM) / ROW_BYTES_PER_US
