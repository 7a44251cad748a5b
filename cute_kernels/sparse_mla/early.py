# SPDX-License-Identifier: Apache-2.0
"""What decode's kernels on Hopper do before they wait for the kernel ahead: they ask L2 for what their first work tiles
begin with. Lengths, lists and rows otherwise come one after the other, each all the way from memory.

All of it is read again behind the wait. What the kernel ahead may still write decides here on nothing but which lines
of the cache L2 is asked for.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from cute_kernels.dsl import ptx
from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.params import IndexList, KVCache, TileScheduler

LINE = 128
"""Bytes that L2 is asked for at a time."""


@cute.jit
def prefetch_first(
    scheduler: TileScheduler,
    lists: tuple[IndexList, IndexList],
    caches: tuple[KVCache, KVCache],
    second: cutlass.Constexpr,
    thread: Any,
    takes_part: Any,
) -> None:
    """Of the first work tile, by 128 threads: lengths, the first columns of both lists, and of the first list the rows
    (fp8_ds_mla) of 128 columns, a window's. second: as of TileScheduler.prefetch."""
    work_tile = scheduler.first
    if takes_part and work_tile < scheduler.end:
        scheduler.prefetch(work_tile, lists, caches[1], second, thread % 32, thread < 32)
        batch, token, split_idx, head_group = scheduler.coords(work_tile)
        indices, cache = lists[0], caches[0]
        # head groups of a row share its keys, and the first ones are the first split's
        has_row = (split_idx == 0) & (head_group == 0) & (thread < indices.columns)
        index = ptx.load_global_s32_where(has_row, indices.row(batch, token) + Int64(thread) * 4)
        page, inside = divmod(cutlass.max(index, Int32(0)), cache.rows)
        is_there = (index >= 0) & (page < cache.pages)
        start = cache.base + Int64(page) * cache.page_stride
        row = start + Int64(inside) * FP8_DS_MLA.data_bytes
        for line in range_constexpr(-(-FP8_DS_MLA.data_bytes // LINE)):
            ptx.prefetch_l2(row + line * LINE, is_there)
        scales = start + Int64(cache.rows.divisor) * FP8_DS_MLA.data_bytes
        ptx.prefetch_l2(scales + Int64(inside) * FP8_DS_MLA.scale_bytes, is_there)
