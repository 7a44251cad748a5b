# SPDX-License-Identifier: Apache-2.0
"""Which kernel a GEMM of a layer takes, and how it cuts K.

For few rows how K is cut is a function of the weight's shape alone (and of the multiprocessors of the chip the table
was made for), so that a row's bits do not depend on how many rows there are. For many rows it follows from their
number, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from cute_kernels.formats import HEAD_DIM, INDEX_DIM
from cute_kernels.linear.hopper.gemm import BOX_ROWS, HALF_ROWS, SCALE_BLOCK, SCALED_CHUNKS, GemmKey
from cute_kernels.linear.hopper.gemm_swap_ab import SwapAbKey
from cute_kernels.models import ModelConfig

HOPPER = "sm_90a"
MULTIPROCESSORS = 132
"""Of an H100 or H200."""

CLUSTERS = {1: (132, 264), 2: (66, 132), 3: (39, 79), 4: (30, 62), 6: (17, 39), 8: (15, 30)}
"""CTAs of a cluster -> clusters that run at once on an H200, by cuOccupancyMaxActiveClusters: if a CTA takes a
multiprocessor, and if two share it. One more would wait for a whole round."""

TOKEN_TILES = (8, 16, 32, 64)
"""Tokens of a work tile."""

CHUNK_US = 0.3
"""What 8 KB of a weight, 64 outputs by 128 bytes of K, take a multiprocessor when all of them read at 3.6 TB/s."""
SPLIT_US = 0.5, 0.15
"""What sums of other CTAs cost, once, and for each split."""
ROUND_US = 0.1
"""What the end of a work tile costs that no other work hides."""


@lru_cache(maxsize=1024)
def splits_of(groups: int, outputs: int, chunks: int) -> int:
    """Splits of K for a weight [groups, outputs, chunks of 128 bytes]: those that are through soonest. Grouped weights
    are counted in tiles of 128 outputs, which an e4m3 result needs: every type of result has the same sums."""
    width = 128 if groups > 1 else 64
    tiles = groups * -(-outputs // width)

    def microseconds(splits: int) -> float:
        # where two CTAs share a multiprocessor, the last round may be half of one
        rounds = max(1.0, -(-2 * tiles * splits // MULTIPROCESSORS) / 2)
        sums = SPLIT_US[0] + SPLIT_US[1] * splits if splits > 1 else 0.0
        return rounds * (-(-chunks // splits) * CHUNK_US * width / 64 + ROUND_US) + sums

    return min((s for s in CLUSTERS if s == 1 or chunks // s >= 4), key=microseconds)


def token_tile(rows: int) -> int:
    """Tokens of a work tile: the least that hold all rows, or the most."""
    return next((tokens for tokens in TOKEN_TILES if rows <= tokens), TOKEN_TILES[-1])


@lru_cache(maxsize=4096)
def swap_ab(operands: str, output: str, rows: int, groups: int, outputs: int, chunks: int) -> tuple[SwapAbKey, int]:
    """The kernel for few rows and its number of clusters. chunks: of 128 bytes of K."""
    splits = splits_of(groups, outputs, chunks)
    tokens = token_tile(rows)
    key = SwapAbKey(HOPPER, operands, output, tokens, splits, output == "e4m3" or tokens == TOKEN_TILES[-1])
    tiles = groups * -(-outputs // key.outputs) * -(-rows // tokens)
    return key, min(tiles, CLUSTERS[splits][key.ctas_per_multiprocessor - 1])


MOST_CODE_ROWS, CODE_SPLITS = 64, (8, 6)
"""Of e4m3 results with few columns: only the swapped operands' kernel cuts their K into more than two."""


@lru_cache(maxsize=4096)
def swap_ab_codes(rows: int, groups: int, outputs: int, chunks: int) -> tuple[SwapAbKey, int] | None:
    """The kernel for few rows of e4m3 results and its number of clusters, one for each work tile: as many splits as let
    all run at once. None: there are too many rows or work tiles for it to be faster than that for many rows."""
    tiles = groups * -(-outputs // 128)
    splits = next((n for n in CODE_SPLITS if tiles <= CLUSTERS[n][0] and chunks >= 4 * n), None)
    if rows > MOST_CODE_ROWS or splits is None:
        return None
    return SwapAbKey(HOPPER, "e4m3", "e4m3", token_tile(rows), splits, True), tiles


def swap_ab_codes_keys() -> list[SwapAbKey]:
    """Every key of 33 rows and more."""
    return [SwapAbKey(HOPPER, "e4m3", "e4m3", MOST_CODE_ROWS, splits, True) for splits in CODE_SPLITS]


MOST_WHOLE_SWAPPED_ROWS = 32
"""Of few rows whose K is not cut, and whose sums are those of many rows, bit for bit. 17 to 32 rows of 8 groups are 8%
faster so on an H200, of 16 groups 2%, and 3% slower on an H100; more are slower on both."""

LEAST_WHOLE_TILES = 100
"""Of 64 outputs by all of K. Fewer leave multiprocessors idle for too long."""


@lru_cache(maxsize=4096)
def swap_ab_whole(output: str, rows: int, groups: int, outputs: int) -> tuple[SwapAbKey, int] | None:
    """The same with K whole, and so with the order of sums of the kernels for many rows. None: there are too many rows,
    or too few work tiles."""
    tiles = groups * -(-outputs // 64)
    if rows > MOST_WHOLE_SWAPPED_ROWS or tiles < LEAST_WHOLE_TILES:
        return None
    key = SwapAbKey(HOPPER, "e4m3", output, token_tile(rows), 1, False)
    return key, min(tiles * -(-rows // key.tokens), CLUSTERS[1][key.ctas_per_multiprocessor - 1])


def swap_ab_whole_keys(output: str) -> list[SwapAbKey]:
    """Every key of a type of result."""
    return [SwapAbKey(HOPPER, "e4m3", output, n, 1, False) for n in TOKEN_TILES if n <= MOST_WHOLE_SWAPPED_ROWS]


class Tile(NamedTuple):
    """A kernel for many rows, and the microseconds that its work tile takes while all multiprocessors have one, and
    that a call takes besides."""

    key: GemmKey
    chunk_us: float
    tile_us: float
    call_us: float = 0.0


TILES: tuple[Tile, ...] = (
    Tile(GemmKey(HOPPER, rows=64, columns=32, warpgroups=1, stages=16, depth=2, unrolled=8), 0.200, 0.4),
    Tile(
        GemmKey(HOPPER, rows=64, columns=64, warpgroups=1, stages=12, depth=4, unrolled=8, interleaved=True), 0.238, 0.4
    ),
    Tile(GemmKey(HOPPER, rows=64, warpgroups=1, stages=8, depth=2), 0.344, 0.5),
    Tile(GemmKey(HOPPER, rows=128, columns=64, stages=8, depth=2), 0.328, 0.5),
    Tile(GemmKey(HOPPER, rows=128, stages=6, depth=2, unrolled=8, staged=True), 0.440, 0.55),
    Tile(GemmKey(HOPPER, rows=192, warpgroups=3, stages=4, staged=True), 0.660, 0.85),
)
"""Fitted to times on an H200 (the last two: perf/log/data/gemm_flow_1.txt)."""

DIRECT = GemmKey(HOPPER, rows=128, stages=6, depth=2, unrolled=8)
"""Its results do not go out through shared memory: they are out sooner behind the last work tile, but later behind the
others, so it gains where K is long."""

WIDE_TILES: tuple[Tile, ...] = (
    *TILES[:2],
    Tile(TILES[2].key, 0.260, 0.7),
    *TILES[3:],
    Tile(DIRECT, 0.435, 0.85),
    Tile(GemmKey(HOPPER, rows=64, columns=96, warpgroups=1, stages=9, depth=2), 0.250, 0.8),
    Tile(GemmKey(HOPPER, rows=128, columns=96, stages=7, depth=2, unrolled=8, interleaved=True), 0.375, 1.0),
)
"""For more rows than MEDIUM_ROWS: columns that are no multiple of 128 times the multiprocessors may be one of 96.
DIRECT is fitted to the times of TILES (perf/log/data/gemm_direct_1.txt): soonest above K 7680."""

GROUPED_TILES: tuple[Tile, ...] = (
    *TILES[:4],
    Tile(DIRECT, 0.460, 0.23, 0.5),
    TILES[-2]._replace(call_us=1.0),
    TILES[-1],
)
"""For grouped weights, whose K is 4096."""

SPLIT_TILES: tuple[Tile, ...] = (
    Tile(GemmKey(HOPPER, rows=64, columns=64, warpgroups=1, stages=12, depth=4, splits=2, unrolled=8), 0.239, 2.0),
    Tile(GemmKey(HOPPER, rows=64, columns=64, warpgroups=1, stages=12, depth=4, splits=4, unrolled=8), 0.239, 2.7),
    Tile(GemmKey(HOPPER, rows=64, warpgroups=1, stages=7, depth=2, splits=2), 0.307, 2.8),
    Tile(GemmKey(HOPPER, rows=128, stages=4, depth=2, splits=2, unrolled=8, interleaved=True), 0.470, 3.0),
)
"""The same of kernels that cut K, for weights with fewer work tiles than there are multiprocessors."""

MEDIUM_ROWS = 256

MEDIUM_TILES: tuple[Tile, ...] = (
    Tile(TILES[0].key, 0.156, 1.7),
    Tile(TILES[1].key, 0.155, 1.1, 1.8),
    Tile(WIDE_TILES[-2].key, 0.171, 1.4, 1.8),
    Tile(TILES[2].key, 0.214, 1.1, 2.5),
    Tile(TILES[3].key, 0.227, 1.1, 2.5),
    Tile(WIDE_TILES[-1].key, 0.289, 1.7, 1.9),
    Tile(DIRECT, 0.340, 1.5, 3.0),
    Tile(TILES[5].key, 0.729, 0.1, 3.2),
)
"""For more than BOX_ROWS and up to MEDIUM_ROWS rows, fitted to the mean of times back to back and apart on an H200
(perf/log/data/gemm_tiles_2.txt): memory binds there, and results are stored directly."""

MEDIUM_SPLIT_TILES: tuple[Tile, ...] = (
    Tile(SPLIT_TILES[0].key, 0.256, 1.3, 0.5),
    Tile(GemmKey(HOPPER, rows=64, columns=96, warpgroups=1, stages=8, depth=2, splits=2, unrolled=8), 0.300, 1.0, 1.0),
    Tile(SPLIT_TILES[2].key, 0.340, 1.5, 0.5),
    Tile(
        GemmKey(HOPPER, rows=128, columns=64, stages=8, depth=2, splits=2, unrolled=8, interleaved=True),
        0.237,
        1.4,
        2.2,
    ),
    Tile(SPLIT_TILES[3].key, 0.391, 4.9, 0.6),
)
"""The same of kernels that cut K. Not all of them can make codes, yet those of grouped weights have the bytes of the
quantized bf16 result: with these times K is cut alike for both, from BOX_ROWS + 1 rows on."""

ZERO_ROW_US = 0.0025
"""Of a chunk, for every row that a work tile has more than a call of up to BOX_ROWS: bulk tensor copies fill them with
zeros one at a time (perf/log/gemm.md). Where a call has more, boxes are moved back, and next to none is filled."""

HALVED_ROWS = range(HALF_ROWS + 1, 48)
"""Of which work tiles of BOX_ROWS rows come as halves, so that none is filled: 33 rows are up to 20% faster so on an
H200, 40 up to 11%, and from 48 on next to none."""

LEAST_SPLIT_CHUNKS = 8
"""Of 128 columns. With fewer in a split its sums cost more than they save. It keeps queries' products whole, whose bits
are to be the same with and without sums of squares."""

CO_RESIDENT = {
    tile.key: replace(tile.key, stages=stages, depth=depth)
    for tile, stages, depth in ((TILES[0], 8, 2), (TILES[1], 6, 2), (SPLIT_TILES[0], 6, 2), (SPLIT_TILES[1], 6, 2))
}
"""The same work tiles by CTAs of which two share a multiprocessor and its registers, so that the next kernel's begin
beside this one's. Of up to 64 rows: with more, fewer stages bring the operands more slowly than that gains."""

CO_RESIDENT_ROWS = 64

BF16_TILES: tuple[Tile, ...] = (
    Tile(GemmKey(HOPPER, operands="bf16", rows=64, columns=64, warpgroups=1, stages=13, depth=2), 0.124, 0.5, 2.4),
    Tile(GemmKey(HOPPER, operands="bf16", rows=64, columns=64, warpgroups=1, stages=12, depth=2, splits=2), 0.150, 2.2),
    Tile(GemmKey(HOPPER, operands="bf16", rows=64, columns=64, warpgroups=1, stages=12, depth=2, splits=4), 0.120, 3.5),
    Tile(GemmKey(HOPPER, operands="bf16", rows=64, columns=80, warpgroups=1, stages=11, depth=2), 0.135, 0.6, 2.6),
    Tile(GemmKey(HOPPER, operands="bf16", rows=128, columns=80, stages=8, depth=2), 0.247, 0.7, 2.1),
    Tile(GemmKey(HOPPER, operands="bf16", rows=128, columns=96, stages=7, depth=2), 0.293, 0.8, 1.5),
    Tile(GemmKey(HOPPER, operands="bf16", rows=128, stages=6, depth=2), 0.390, 1.0, 1.5),
)
"""Of bf16 operands, whole and with K cut; chunks have 64 columns. Fitted to times of 64 to 512 rows on an H200, means
of dependents back to back and of others apart (perf/log/data/gemm_flow_1.txt)."""

FEWER_STAGES = ((112, 8), (80, 10))
"""(CTAs from which on, stages) of the bf16 kernel that cuts K in two, for more than BOX_ROWS rows; the first that fits.
The more copies are under way, the longer each takes. On an H200, 12, 10 and 8 stages, means of back to back and apart,
K 4096: 64 CTAs 6.7, 7.0, 7.3 us; 96 CTAs 7.4 to 7.7, 7.2 to 7.3, 7.5; 128 CTAs 8.6, 8.6, 8.3; K 7168: 80 CTAs 11.8,
11.3, 10.9 (perf/log/data/gemm_stages_1.txt)."""

SQUARES_TILES = tuple(
    tile._replace(key=replace(tile.key, unrolled=SCALED_CHUNKS, staged=True, squares=True))
    for tile in TILES
    if tile.key.columns == SCALE_BLOCK
)
"""Of kernels that store the sums of their results' squares as well."""


def has_result(key: GemmKey, output: str) -> bool:
    """Whether the kernel can make such a result: a row of e4m3 codes has a scale for 128 columns, by one CTA, and there
    are scales of rows beyond the last; four lanes exchange bf16 numbers of 32 columns."""
    if output == "e4m3":
        return key.columns == SCALE_BLOCK and key.splits <= 2 and not key.halves
    return output == "fp32" or key.columns % 32 == 0


def with_output(key: GemmKey, output: str) -> GemmKey:
    """`key` with another type of result: only bf16 goes out through shared memory, and has the longer mainloops."""
    if output == "bf16":
        return key
    return replace(key, output=output, unrolled=SCALED_CHUNKS, interleaved=False, staged=False)


def count_work_tiles(key: GemmKey, rows: int, groups: int, outputs: int) -> int:
    """Tiles of results; each takes as many CTAs as K has splits."""
    return groups * -(-rows // key.rows) * -(-outputs // key.columns)


def _soonest(
    tiles: Iterable[Tile],
    rows: int,
    groups: int,
    outputs: int,
    chunks: int,
    multiprocessors: int,
    is_shared: bool = False,
    is_halved: bool = False,
) -> tuple[GemmKey, int]:
    """The kernel that is through soonest if every round of work tiles takes its time, and its number of CTAs.

    is_shared   kernels of CO_RESIDENT run as they are there: so more of their clusters run at once
    is_halved   work tiles of BOX_ROWS rows come as halves
    """
    filled = BOX_ROWS if is_halved else rows

    def microseconds(tile: Tile) -> float:
        work_tiles, splits = count_work_tiles(tile.key, rows, groups, outputs), tile.key.splits
        if splits > 1 and (
            work_tiles > CLUSTERS[splits][is_shared and tile.key in CO_RESIDENT] * multiprocessors // MULTIPROCESSORS
            or chunks < splits * LEAST_SPLIT_CHUNKS
        ):
            return math.inf
        rounds = -(-work_tiles * splits // multiprocessors)
        zero_rows = tile.key.rows - filled if rows <= BOX_ROWS else 0
        chunk_us = tile.chunk_us + ZERO_ROW_US * zero_rows
        return rounds * (-(-chunks // splits) * chunk_us + tile.tile_us) + tile.call_us

    key = min(tiles, key=microseconds).key
    work_tiles = count_work_tiles(key, rows, groups, outputs)
    return key, work_tiles * key.splits if key.splits > 1 else min(work_tiles, multiprocessors)


@lru_cache(maxsize=4096)
def many_rows(
    output: str,
    rows: int,
    groups: int,
    outputs: int,
    chunks: int,
    multiprocessors: int = MULTIPROCESSORS,
    may_split: bool = False,
) -> tuple[GemmKey, int]:
    """The kernel for many e4m3 rows and its number of CTAs.

    may_split   K may be cut, differently for different numbers of rows; if not, no choice changes a row's bits
    """
    whole, splits = TILES, SPLIT_TILES
    if rows > BOX_ROWS:
        whole, splits = (MEDIUM_TILES, MEDIUM_SPLIT_TILES) if rows <= MEDIUM_ROWS else (WIDE_TILES, SPLIT_TILES)
    if groups > 1:
        whole = GROUPED_TILES
    tiles = [tile for tile in (whole + splits if may_split else whole) if has_result(tile.key, output)]
    is_shared = rows <= CO_RESIDENT_ROWS and (may_split or groups > 1)
    is_halved = rows in HALVED_ROWS and may_split and groups == 1 and output != "e4m3"
    key, ctas = _soonest(tiles, rows, groups, outputs, chunks, multiprocessors, is_shared, is_halved)
    if is_shared:
        key = CO_RESIDENT.get(key, key)
    return with_output(in_halves(key) if is_halved and key.rows == BOX_ROWS else key, output), ctas


@lru_cache(maxsize=4096)
def many_bf16_rows(
    output: str, rows: int, outputs: int, chunks: int, multiprocessors: int = MULTIPROCESSORS
) -> tuple[GemmKey, int]:
    """The same for bf16 operands. chunks: of 64 columns."""
    is_halved = rows in HALVED_ROWS
    tiles = [tile for tile in BF16_TILES if has_result(tile.key, output)]
    key, ctas = _soonest(tiles, rows, 1, outputs, chunks, multiprocessors, is_halved=is_halved)
    if rows > BOX_ROWS and key == BF16_TILES[1].key:
        key = replace(key, stages=next((stages for least, stages in FEWER_STAGES if ctas >= least), key.stages))
    return with_output(in_halves(key) if is_halved and key.rows == BOX_ROWS else key, output), ctas


@lru_cache(maxsize=4096)
def with_squares(rows: int, outputs: int, chunks: int, multiprocessors: int = MULTIPROCESSORS) -> tuple[GemmKey, int]:
    """As `many_rows`, of the kernels that store sums of squares, too."""
    return _soonest(SQUARES_TILES, rows, 1, outputs, chunks, multiprocessors)


def halved(keys: Iterable[GemmKey]) -> list[GemmKey]:
    """Those of them that rows of HALVED_ROWS take, as they take them."""
    return [in_halves(key) for key in keys if key.rows == BOX_ROWS]


def in_halves(key: GemmKey) -> GemmKey:
    """The same with work tiles in halves. With eight chunks in the mainloop these have been timed only where products
    are interleaved."""
    return replace(key, halves=True, unrolled=key.unrolled if key.interleaved else SCALED_CHUNKS)


def many_rows_keys(output: str, may_split: bool = False) -> list[GemmKey]:
    """Every key of a type of result: a batch may have any size."""
    splits = (*SPLIT_TILES, *MEDIUM_SPLIT_TILES) if may_split else ()
    keys = [*dict.fromkeys(tile.key for tile in (*TILES, *WIDE_TILES, *GROUPED_TILES, *MEDIUM_TILES, *splits))]
    keys += [CO_RESIDENT[key] for key in keys if key in CO_RESIDENT]
    if may_split and output != "e4m3":
        few = dict.fromkeys(CO_RESIDENT.get(tile.key, tile.key) for tile in (*TILES, *SPLIT_TILES))
        keys += halved(few)
    return [with_output(key, output) for key in keys if has_result(key, output)]


def many_bf16_rows_keys(output: str) -> list[GemmKey]:
    """The same for bf16 operands."""
    keys = [tile.key for tile in BF16_TILES if has_result(tile.key, output)]
    fewer = [replace(BF16_TILES[1].key, stages=stages) for _, stages in FEWER_STAGES]
    return [with_output(key, output) for key in (*keys, *fewer, *halved(keys))]


def layer_gemms(config: ModelConfig, tp: int) -> list[tuple[str, str, int, int, int]]:
    """(operands, output, groups, outputs, K) of every GEMM of a model's attention layers on one of `tp` ranks."""
    hidden, rank, head = config.hidden_size, config.q_lora_rank, HEAD_DIM
    heads, groups = config.num_attention_heads // tp, max(config.o_groups // tp, 1)
    per_group = config.num_attention_heads // config.o_groups * head
    index_q = config.index_n_heads * INDEX_DIM
    compressed, indexer = 2 * 2 * head, 2 * 2 * INDEX_DIM
    gemms = [
        ("e4m3", "bf16", 1, rank + head, hidden),
        ("e4m3", "bf16", 1, heads * head, rank),
        ("e4m3", "bf16", 1, index_q, rank),
        ("e4m3", "bf16", 1, heads * head + index_q, rank),
        ("bf16", "fp32", 1, compressed + indexer + config.index_n_heads, hidden),
        ("bf16", "fp32", 1, 2 * head, hidden),
    ]
    gemms += [("e4m3", output, groups, config.o_lora_rank, per_group) for output in ("bf16", "e4m3")]
    outputs = ("bf16",) if tp == 1 else ("bf16", "fp32")
    gemms += [("e4m3", output, 1, hidden, groups * config.o_lora_rank) for output in outputs]
    return gemms


def swap_ab_keys(config: ModelConfig, tp: int, arch: str, operands: str) -> list[SwapAbKey]:
    """The keys for few rows that a model's layers need."""
    if arch != HOPPER:
        return []
    keys: dict[SwapAbKey, None] = {}
    for kind, output, groups, outputs, k in layer_gemms(config, tp):
        if kind == operands:
            chunks = -(-k // (128 if kind == "e4m3" else 64))
            keys.update((swap_ab(kind, output, rows, groups, outputs, chunks)[0], None) for rows in TOKEN_TILES)
    return list(keys)
