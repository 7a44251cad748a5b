# SPDX-License-Identifier: Apache-2.0
"""Whether ranks divide the rows that the indexer scores: what they save, and what the exchange of picks costs.

The tables are of times on H200s: scores with top-k from perf/results, all_gather between two GPUs in a CUDA graph from
docs/several_gpus.md.
"""

from __future__ import annotations

from bisect import bisect_right

Line = tuple[tuple[float, float], ...]

DECODE_SCORES: dict[str, Line] = {
    "sm_90a": (
        (8192, 7.5), (32768, 9.7), (65536, 11.4), (262144, 20.8), (524288, 26.9), (2097152, 82.4), (8388608, 304.5),
    ),
}  # fmt: skip
"""By architecture: microseconds of score_top_k_decode by requests times keys."""

PREFILL_SCORES: dict[str, Line] = {
    "sm_90a": ((0, 10), (16777216, 276.7), (33554432, 595.7), (67108864, 1167), (268435456, 4793), (1073741824, 20101)),
}
"""By architecture: microseconds of score_top_k_prefill by rows times keys."""

ALL_GATHER: Line = ((4096, 8.5), (262144, 11), (2097152, 28), (16777216, 93), (67108864, 293))
"""Microseconds by bytes gathered, between two GPUs. More ranks were not measured."""

PLACING_US, PLACING_BYTES_PER_US = 3.0, 1.5e6
"""Of putting the gathered picks in the order of rows: estimated, not measured."""


def shards_rows(arch: str, ranks: int, requests: int, prefill_rows: int, keys: int, k: int, next_n: int = 1) -> bool:
    """Whether a step takes less time if each of `ranks` scores its share of `requests` decodes and of `prefill_rows`,
    of at most `keys` keys each, and all gather k picks a row.

    arch     a compile target as in cute_kernels.runtime.arch, or "" on a CPU: nothing was measured there
    next_n   rows of a decode request
    """
    if arch not in DECODE_SCORES or ranks == 1:
        return False
    share, row_share = -(-requests // ranks), -(-prefill_rows // ranks)
    saved = 0.0
    if requests:
        line = DECODE_SCORES[arch]
        saved += value_at(line, requests * keys) - value_at(line, share * keys)
    if prefill_rows:
        line = PREFILL_SCORES[arch]
        saved += value_at(line, prefill_rows * keys) - value_at(line, row_share * keys)
    gathered = 4 * k * ranks * (share * next_n + row_share)
    return saved > value_at(ALL_GATHER, gathered) + PLACING_US + gathered / PLACING_BYTES_PER_US


def value_at(line: Line, x: float) -> float:
    """Between the points of a line, before the first one its value, behind the last one along its last segment."""
    if x <= line[0][0]:
        return line[0][1]
    number = min(bisect_right(line, (x, float("inf"))), len(line) - 1)
    (x0, y0), (x1, y1) = line[number - 1], line[number]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
