# SPDX-License-Identifier: Apache-2.0
"""Which kernel picks the best columns of rows (topk.py, topk_held.py, topk_whole.py), and how its ops launch it:
top_k_per_row_prefill (PREFILL), top_k_per_row_decode (DECODE) and all_visible_entries (ALL_VISIBLE)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from cute_kernels.indexer import topk_whole
from cute_kernels.indexer.call import AllVisibleCall, TopKDecodeCall, TopKPrefillCall
from cute_kernels.indexer.topk import CLUSTER_ARCHS, GROUPS, TopKKey
from cute_kernels.indexer.topk_held import AnyTopKKey, HeldTopKKey
from cute_kernels.models import ModelConfig, has_indexer
from cute_kernels.runtime.arch import SMEM_BYTES, arch_of
from cute_kernels.runtime.compile import KernelKey
from cute_kernels.runtime.compile import launch as launch_key
from cute_kernels.runtime.key import OpKernel

# ---- choice

MOST_PICKS, MOST_ROWS, MOST_ENTRIES = 4096, 2**28, 2**31 - 1024
"""Of a row, rows of a call, and columns that all_visible_entries writes of a row."""

SPREAD_ROWS, MANY_ROWS = 128, 264
"""Rows up to which each has a multiprocessor of its own, and from which on CTAs share one: what one waits for, others
use. A dependent launch puts CTAs wherever the first multiprocessors become free: 64 rows of 2048 columns behind their
scores took 9.3 us, with one CTA on each multiprocessor 5.2 us, and 11.9 and 6.1 us for 1024 picks."""

HELD = (
    (1024, ((8, 1), (8, 1), (4, 2))),
    (2048, ((16, 1), (8, 2), (4, 4))),
    (4096, ((16, 2), (8, 4), (8, 4))),
    (5120, ((20, 2), (10, 4), (10, 4))),
    (6144, ((12, 4), (12, 4), (8, 8))),
    (8192, ((16, 4), (16, 4), (8, 8))),
)
"""(most columns, (warps, vectors) of up to SPREAD_ROWS rows, of more, and of MANY_ROWS or more) of CTAs that hold a row
and list nothing, the first that fits. On an H100 16 rows of 1024, 2048, 4096 and 5000 columns (k = 512, 1024, 1024,
1024) take 2.2, 2.6, 3.0 and 3.3 us, with 8, 8, 8 and 10 warps of four vectors 2.7, 3.0, 3.3 and 3.6 us; 4096 rows of
1024 and 2048 columns (k = 512, 1024) 18.0 and 25.6 us, with eight warps 25.9 and 34.5 us. On an H200 600, 1000 and 4096
rows of 8192 columns take 10.3, 14.5 and 48.8 us (k = 512) and 11.0, 15.6 and 53.0 us (k = 1024) with eight warps of
eight vectors, with 16 of four 13.2, 19.4, 68.5 and 13.5, 20.1, 71.2, by lists 14.2, 19.2, 62.5 and 16.9, 23.6, 79.0."""

HELD_ELSEWHERE = tuple((most, (few, more, many if many[1] <= 4 else more)) for most, (few, more, many) in HELD)
"""The same where there are no clusters: on sm_80 eight vectors do not find registers."""

HELD_BY_FEW = ((10240, (20, 4)), (12288, (24, 4)), (16384, (32, 4)), (20480, (20, 8)), (24576, (24, 8)))
"""(most columns, (warps, vectors)) of CTAs that hold a longer row, of up to SPREAD_ROWS rows where there are clusters.
On an H200 64 rows of 9000, 12000, 16384 and 20000 columns (k = 1024, 512, 512, 512) take 3.7, 4.2, 5.2 and 5.7 us, by
lists 6.4, 5.6, 5.7 and 7.2 us."""

HELD_BY_TWO = ((12288, (12, 8)), (16384, (16, 8)))
"""The same of more rows, below MANY_ROWS or of more than half of PICKS picks: two CTAs find room on a multiprocessor.
On an H200 200 rows of 12288 and 16384 columns (k = 1024) take 8.0 and 9.3 us, by lists 10.5 and 11.0 us; 1000 rows of
16384 columns 32.1 us (k = 2048), by lists 38.9 us."""

SHAPES = ((16, 8, 1, 1), (16, 8, 1, 8), (32, 8, 1, 8), (16, 8, 1, 16), (32, 4, 1, 32))
"""(warps, vectors of a thread, cluster, tiles) of CTAs that take whole rows: of up to 16384 columns, which their
registers hold, and of up to 131072, 262144 (the second one where there is less shared memory) and 524288, which come in
tiles. Where CHOICES says nothing, the first that fits."""

ANY = 1 << 30
PICKS = 2048
"""More of them, and those between this and half of it, overflow shorter lists, which costs a second pass."""

CHOICES = (
    (ANY, 524288, ANY, (32, 4, 8, 8)),
    (15, 98304, ANY, (16, 4, 8, 8)),
    (15, 65536, ANY, (24, 4, 8, 8)),
    (31, 32768, ANY, (16, 8, 4, 8)),
    (40, 196608, PICKS, (32, 8, 1, 8)),
    (67, 65536, PICKS, (32, 4, 1, 16)),
    (105, 65536, PICKS // 2, (16, 8, 1, 16)),
    (ANY, 131072, ANY, (32, 4, 1, 16)),
    (ANY, 65536, PICKS, (32, 4, 1, 16)),
    (ANY, 65536, ANY, (32, 8, 1, 8)),
    (133, 32768, ANY, (32, 4, 1, 16)),
    (ANY, 32768, PICKS // 2, (16, 8, 1, 16)),
    (133, 16384, ANY, (32, 8, 1, 8)),
    (MANY_ROWS, 24576, PICKS // 2, (16, 8, 1, 16)),
    (MANY_ROWS, 22528, PICKS // 2, (8, 4, 1, 8)),
    (MANY_ROWS, 20480, PICKS // 2, (16, 8, 1, 16)),
    (MANY_ROWS, 18432, PICKS // 2, (8, 4, 1, 8)),
    (MANY_ROWS, 16384, PICKS // 2, (16, 8, 1, 16)),
    (ANY, 16384, PICKS, (8, 4, 1, 8)),
    (ANY, 16384, ANY, (16, 8, 1, 8)),
)
"""(fewer rows than, more columns than, picks up to, shape) where there are clusters, up to the capacity of the shape:
the first that fits. On an H100, k = 1024 where nothing else is said:

    clusters of eight   8 x 70000 10.1 us, 8 x 262144 14.1, by (32, 8, 1, 8) 11.1 and 20.8; 16 x 70000 13.0 and 11.5;
                        on an H200, k = 512, of 16 and 24 warps: 3 x 70000 8.2 and 8.1, of lengths that are spread
                        evenly 10.8 and 8.4 (CTAs hold shorter rows, and little more than they hold is slow); 3 x
                        131072 8.0 and 9.3
    clusters of four    on an H200, k = 512, 16 x 70000 9.9 (11.1), 16 x 131072 11.4 (14.3), 30 x 262144 18.6 (21.4); 3
                        x 33000 6.7, by clusters of eight 7.6, of lengths that are spread evenly 6.7 and 10.9; 14 x
                        49000 7.3 and 7.8; 14 x 70000 9.6 and 8.7; 48 x 262144 33.6, in two rounds (25.1)
    (32, 8, 1, 8)       24 x 262144 22.0, by (32, 4, 1, 16) 23.6; 64 x 262144 35.1 and 33.8; 64 x 70000, k = 4096, 20.1
                        and 26.4; 80 x 20000 9.1 and 9.6
    (16, 8, 1, 16)      80 x 262144 41.6, by (32, 4, 1, 16) 44.9; 132 x 262144 63.3 and 61.2; 200 x 33000 17.7, by (16,
                        8, 1, 8) 18.9; on an H200 192 x 32768 15.5, by (8, 4, 1, 8) 15.3, but 11.4 and 13.1 if one row
                        is long and the others are a sixteenth of it; also where the last of a row's tiles of 4096
                        columns is at most half full: 192 x 22500 13.5, by (8, 4, 1, 8) 14.4 (20000: 12.9 and 12.3)
    (8, 4, 1, 8)        200 x 20000 13.6, by (16, 8, 1, 8) 14.8; k = 4096, 264 rows: 55 and 30"""

MANY = (8, 4, 1, 8)
"""The shape of which four CTAs share a multiprocessor, of MANY_ROWS and more that CTAs do not hold. On an H200 2048
rows of 17408 columns take 58 us (k = 512) and 65 us (k = 1024), with shapes of 16 warps 71 and 80 us."""

EARLY_BYTES = 4 << 20
"""Of scores in a call, up to which rows are asked for before their bounds are known."""

MOST_CHOICES = 1024
"""Kernels that are remembered by rows, width and k."""


def of_shape(arch: str, warps: int, vectors: int, cluster: int = 1, tiles: int = 1) -> TopKKey:
    """The kernel of CTAs of that shape for rows that may be longer than those that a CTA holds."""
    return AnyTopKKey(arch, warps, vectors, cluster, tiles)


def keys_of(arch: str) -> list[TopKKey]:
    """All kernels of an architecture: those for which a CTA is enough, by capacity, then others."""
    has_clusters = arch in CLUSTER_ARCHS
    of_few = [*(few for _, (few, _, _) in HELD), *(shape for _, shape in HELD_BY_FEW)] if has_clusters else []
    of_more = [shape for _, (_, *shapes) in (HELD if has_clusters else HELD_ELSEWHERE) for shape in shapes]
    of_more += [shape for _, shape in HELD_BY_TWO] if has_clusters else []
    held = [HeldTopKKey(arch, *shape, is_spread=True) for shape in of_few]
    held += [HeldTopKKey(arch, *shape) for shape in dict.fromkeys(of_more)]
    chosen = [shape for *_, shape in CHOICES] if has_clusters else []
    whole = SHAPES[1:] if has_clusters else SHAPES  # all rows that the first one takes are held, or by MANY
    keys = [of_shape(arch, *shape) for shape in dict.fromkeys((*whole, MANY, *chosen))]
    fitting = [key for key in (*held, *keys) if key.smem_bytes <= SMEM_BYTES[arch]]
    large, small = (of_shape(arch, *shape) for shape in SHAPES[2:4])
    return [key for key in fitting if key != small or has_clusters or large not in fitting]


def key_for(arch: str, rows: int, width: int, k: int) -> TopKKey:
    """The kernel for so many picks of so many rows of such a width; if none is wide enough, the widest."""
    has_clusters, is_many = arch in CLUSTER_ARCHS, rows >= MANY_ROWS
    is_spread = has_clusters and rows <= SPREAD_ROWS
    for most, shapes in HELD if has_clusters else HELD_ELSEWHERE:
        if width <= most:
            return HeldTopKKey(arch, *shapes[0 if is_spread else 2 if is_many else 1], is_spread=is_spread)
    if has_clusters:
        by_two = HELD_BY_TWO if not is_many or k > PICKS // 2 else ()
        for most, held in HELD_BY_FEW if is_spread else by_two:
            if width <= most:
                return HeldTopKKey(arch, *held, is_spread=is_spread)
        for fewer, more, picks, shape in CHOICES:
            key = of_shape(arch, *shape)
            if rows < fewer and more < width <= key.capacity and k <= picks:
                return key
    many = of_shape(arch, *MANY)
    if is_many and width <= many.capacity:
        return many
    keys = [key for key in keys_of(arch) if not isinstance(key, HeldTopKKey)]
    return next((key for key in keys if width <= key.capacity), max(keys, key=lambda key: key.capacity))


def groups_for(key: TopKKey, k: int) -> int:
    """Maxima of a thread: twice as many of all threads as there are picks leave 1.4 k candidates of a random row."""
    groups = 1
    while groups < GROUPS and groups * 32 * key.warps * key.cluster < 2 * k:
        groups *= 2
    return groups


def share_for(key: TopKKey, k: int) -> int:
    """Of k, a warp's."""
    return -(-k // (key.warps * key.cluster))


@lru_cache(MOST_CHOICES)
def choose(device_index: int, rows: int, width: int, k: int) -> tuple[TopKKey, int, int]:
    """(kernel, a warp's share of k, groups of a thread)"""
    key = key_for(arch_of(device_index), rows, width, k)
    return key, share_for(key, k), groups_for(key, k)


def width_of(logits: torch.Tensor) -> int:
    """Columns of a row, and those before it up to a multiple of 16 bytes, at most."""
    is_aligned = logits.data_ptr() % 16 == 0 and (logits.shape[0] <= 1 or logits.stride(0) % 4 == 0)
    return int(logits.shape[1]) + (0 if is_aligned else 3)


def deployment_keys(config: ModelConfig, tp: int, arch: str) -> list[KernelKey]:
    """Layers with an indexer, with rows of any length."""
    return [*keys_of(arch), *topk_whole.keys_of(arch)] if has_indexer(config) else []


# ---- launch

LOCAL = 0, 0, 0, 1
"""No block table: columns are written as they are."""


def why_not(logits: torch.Tensor, num_rows: int, k: int) -> str:
    """Why `run` cannot take these (checked) arguments; empty if it can."""
    if k > MOST_PICKS:
        return f"k must be at most {MOST_PICKS}, got {k}"
    if num_rows >= MOST_ROWS:
        return f"there must be fewer than {MOST_ROWS} rows, got {num_rows}"
    key = max(keys_of(arch_of(logits.device.index)), key=lambda key: key.capacity)
    if width_of(logits) > key.capacity:
        return f"rows must have at most {key.capacity} columns on {key.arch}, got {logits.shape[1]}"
    return ""


def run(
    logits: torch.Tensor,
    starts: tuple[int, int],
    ends: tuple[int, int, int, int],
    out: torch.Tensor,
    rows: int,
    k: int,
    limit: int | None = None,
    shifts: int = 0,
    slots: tuple[int, int, int, int] = LOCAL,
    use_pdl: bool = True,
) -> None:
    """Launch on the current stream of out's device.

    starts   address of the first start, or 0 if all are 0, and stride in bytes
    ends     address of the first end, strides of requests and of their tokens in bytes, and tokens of a request
    limit    what no end exceeds; None: the columns
    shifts   -1 if a row's first column is that of its start, 0 if it is that of key 0
    slots    address of the block table, stride of its rows in bytes, its columns and rows of a page; LOCAL: none
    """
    if rows == 0:
        return
    device_index, columns = out.device.index, logits.shape[1]
    bounds = starts, ends, (columns if limit is None else limit, shifts), slots
    if columns <= k:
        launch_whole(columns, bounds, out, rows, k, use_pdl)
        return
    # more rows make no difference
    key, *shares = choose(device_index, min(rows, MANY_ROWS), width_of(logits), k)
    launch_key(key, device_index, *arguments(logits, bounds, out, rows, k, *shares), use_pdl)


def arguments(
    logits: torch.Tensor,
    bounds: tuple[tuple[int, ...], ...],
    out: torch.Tensor,
    rows: int,
    k: int,
    share: int,
    groups: int,
) -> tuple[Any, ...]:
    """What the kernel's entry point takes before use_pdl. bounds: starts, ends, (limit, shifts), slots as `run` takes
    them."""
    columns = logits.shape[1]
    scores = logits.data_ptr(), logits.stride(0) * 4, columns
    early_lines = columns // 32 if rows * columns * 4 <= EARLY_BYTES else 0
    numbers = (number for part in bounds for number in part)
    return out, *scores, *numbers, rows, k, share, groups, early_lines


def launch_whole(
    columns: int, bounds: tuple[tuple[int, ...], ...], out: torch.Tensor, rows: int, k: int, use_pdl: bool
) -> None:
    """Rows of at most k columns, whose scores do not matter."""
    device_index = out.device.index
    key = topk_whole.key_for(arch_of(device_index), rows, k)
    numbers = (number for part in bounds for number in part)
    launch_key(key, device_index, out, columns, *numbers, rows, k, use_pdl)


def launch_with(
    key: TopKKey,
    logits: torch.Tensor,
    starts: tuple[int, int],
    ends: tuple[int, int, int, int],
    out: torch.Tensor,
    rows: int,
    k: int,
    slots: tuple[int, int, int, int] = LOCAL,
) -> None:
    """`run` with a kernel of the caller's choice, wide enough for the rows: for tests and benchmarks."""
    shares = share_for(key, k), groups_for(key, k)
    bounds = starts, ends, (logits.shape[1], 0), slots
    launch_key(key, out.device.index, *arguments(logits, bounds, out, rows, k, *shares), True)


# ---- ops


def why_not_prefill(call: TopKPrefillCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return why_not(call.logits, call.num_rows, call.k)


def launch_prefill(call: TopKPrefillCall) -> None:
    """Run the kernel on the current stream of out's device."""
    bounds = prefill_bounds(call.row_starts, call.row_ends)
    run(call.logits, *bounds, call.out, call.num_rows, call.k, use_pdl=call.use_pdl)


def prefill_bounds(
    row_starts: torch.Tensor, row_ends: torch.Tensor
) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Starts and ends as `run` takes them."""
    starts = row_starts.data_ptr(), row_starts.stride(0) * 4
    return starts, (row_ends.data_ptr(), row_ends.stride(0) * 4, 0, 1)


def why_not_decode(call: TopKDecodeCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    return why_not(call.logits, call.num_rows, call.k)


def launch_decode(call: TopKDecodeCall) -> None:
    """Run the kernel on the current stream of out's device."""
    run(
        call.logits,
        *decode_bounds(call.seq_lens),
        call.out,
        call.num_rows,
        call.k,
        slots=slots(call.slot_block_table, call.slot_rows_per_page),
        use_pdl=call.use_pdl,
    )


def decode_bounds(seq_lens: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Starts and ends as `run` takes them."""
    request, token = (4 * stride for stride in seq_lens.stride())
    return (0, 0), (seq_lens.data_ptr(), request, token, seq_lens.shape[1])


def slots(block_table: torch.Tensor | None, rows_per_page: int) -> tuple[int, int, int, int]:
    """The block table as `run` takes it."""
    if block_table is None:
        return LOCAL
    # the address of a table without columns may be 0, which means none; nobody reads from it
    return block_table.data_ptr() or 4, block_table.stride(0) * 4, block_table.shape[1], rows_per_page


def why_not_all_visible(call: AllVisibleCall) -> str:
    """Why no kernel can take a (checked) call; empty if one can."""
    rows, k = call.out.shape
    if rows >= MOST_ROWS:
        return f"there must be fewer than {MOST_ROWS} rows, got {rows}"
    return f"there must be at most {MOST_ENTRIES} columns, got {k}" if k > MOST_ENTRIES else ""


def launch_all_visible(call: AllVisibleCall) -> None:
    """Run the kernel on the current stream of out's device."""
    rows, k = call.out.shape
    if rows == 0:
        return
    bounds = *decode_bounds(call.visible), (k, 0), slots(call.slot_block_table, call.slot_rows_per_page)
    launch_whole(k, bounds, call.out, rows, k, True)


PREFILL = OpKernel(launch_prefill, why_not_prefill, deployment_keys)
DECODE = OpKernel(launch_decode, why_not_decode, deployment_keys)
ALL_VISIBLE = OpKernel(launch_all_visible, why_not_all_visible, deployment_keys)
