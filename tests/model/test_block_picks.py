# SPDX-License-Identifier: Apache-2.0
"""The kernels of select_candidate_blocks for long rows in the model, against a stable sort: rows whose bound is a good
guess, and rows whose list is too short or too long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import block_picks, topk_select
from cute_kernels.indexer.block_picks import LISTED, SAMPLE, STREAMED, WARPS, BlockPicksKey, PickRole
from cute_kernels.indexer.chunks import LONG_BLOCKS, MARKED
from cute_kernels.indexer.topk import TopKKey
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

INF, NAN = float("inf"), float("nan")
LARGEST = np.finfo(np.float32).max


def expected(row: np.ndarray, k: int) -> np.ndarray:
    """The blocks of the scores that a row sees: a stable sort of their maxima."""
    count = -(-len(row) // 8)
    padded = np.concatenate([row, np.full(8 * count - len(row), NAN, np.float32)]).reshape(count, 8)
    # fmax of numpy is at a loss with signalling NaN
    maxima = np.minimum(np.where(np.isnan(padded), -INF, padded).max(1), LARGEST)
    maxima[np.isnan(padded).all(1)] = NAN
    blocks = np.arange(count)
    if count > k:
        maxima[-1] = INF
        is_nan = np.isnan(maxima)
        blocks = np.sort(np.lexsort((blocks, np.where(is_nan, 0, -maxima), is_nan))[:k])
    return np.concatenate([blocks, np.full(k - len(blocks), -1)]).astype(np.int32)


def selected(scores: np.ndarray, lengths: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What the kernels write, and how many blocks of each row are marked."""
    rows, columns = scores.shape
    memory = GlobalMemory(4 << 20)
    maxima, marks = 4, 4 + -(-columns // 32) * 4
    stride = marks + 2 * -(-columns // MARKED) + 4
    stride += -stride % 4
    work = memory.reserve(4 * rows * stride)
    memory.bytes[work - memory.BASE :][: 4 * rows * stride] = 0xFF
    streamed = TopKKey("sm_90a", STREAMED.warps, STREAMED.vectors, STREAMED.cluster, STREAMED.tiles)
    pieces = -(-columns // MARKED)
    values: list[Any] = [memory.put(scores), 4 * columns, columns, memory.put(lengths), 4, 0, *divisor(1)]
    values += [work, 4 * stride, maxima, marks, k, *divisor(pieces), rows * pieces, out := memory.reserve(4 * rows * k)]
    values += [4 * k, *divisor(1), topk_select.groups_for(streamed, k), topk_select.share_for(streamed, k)]
    for key in block_picks.keys_of("sm_90a"):
        program = parse(compile_report(key).ptx)
        ctas = -(-rows * pieces // WARPS) if key.role == "marks" else rows
        records, make = orders.recorder(program)
        with np.errstate(all="ignore"):
            run_grid(program, pack(program, values), memory, blocks=ctas, size=key.smem_bytes or 1024, events=make)
        for record in records:
            orders.check(record)
    words = memory.get(work, (rows, stride), np.uint32)[:, marks : marks + 2 * pieces]
    # marks of pieces behind a row's end are not written
    seen = np.arange(2 * pieces) < 2 * -(-lengths[:, None] // MARKED)
    reached = np.where(seen, [[bin(word).count("1") for word in row] for row in words], 0).sum(1)
    return memory.get(out, (rows, k), np.int32), reached


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n)


def periodic(rng: np.random.Generator, n: int) -> np.ndarray:
    """The sample misses all good blocks: far more reach its bound than a list holds."""
    x = rng.standard_normal(n)
    pairs, blocks = n // 16, np.arange(n) // 8
    sampled = np.zeros(-(-n // 8), bool)
    first = np.arange(SAMPLE // 2) * pairs // (SAMPLE // 2) * 2
    sampled[first] = sampled[first + 1] = True
    return np.where(sampled[blocks], x - 100, x)


def bits(rng: np.random.Generator, n: int) -> np.ndarray:
    """Every kind of fp32: subnormal, infinite, NaN of either sign."""
    return rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)


def mostly_nan(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.where(rng.random(n) < 0.9985, NAN, rng.standard_normal(n))


PATTERNS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": normal,
    "rising": lambda rng, n: np.arange(n),
    "falling": lambda rng, n: -np.arange(n),
    "equal": lambda rng, n: np.ones(n),
    "periodic": periodic,
    "infinite": lambda rng, n: rng.choice([-INF, INF, 0.5, 2.0], n, p=[0.98, 0.001, 0.009, 0.01]),
    "zeros": lambda rng, n: rng.choice([0.0, -0.0, 1.0], n, p=[0.5, 0.49, 0.01]),
    "mostly nan": mostly_nan,
    "bits": bits,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_blocks_of_a_long_row(pattern: str) -> None:
    n = 8 * (14000 if pattern == "periodic" else 9000) - 3
    row = PATTERNS[pattern](np.random.default_rng(len(pattern)), n).astype(np.float32)
    got, reached = selected(row[None], np.array([n], np.int32), 300)
    assert np.array_equal(got[0], expected(row, 300)), np.flatnonzero(got[0] != expected(row, 300))[:5]
    is_listed = pattern in ("normal", "rising", "falling", "bits")
    assert (300 < reached[0] <= LISTED) == is_listed or pattern in ("infinite", "zeros"), reached
    if is_listed:
        assert reached[0] < 1000, reached


def test_rows_of_any_length() -> None:
    """Nothing, less than a block, as many blocks as are wanted and one more, as many as the sample has and one more."""
    lengths = np.array([0, 5, 8 * 40, 8 * 40 + 1, 8 * SAMPLE, 8 * SAMPLE + 1, 8 * SAMPLE + 505, -7, 99999], np.int32)
    columns = 8 * SAMPLE + 512 + 12
    scores = np.random.default_rng(1).standard_normal((len(lengths), columns)).astype(np.float32)
    got, reached = selected(scores, np.clip(lengths, 0, columns), 40)
    for i, length in enumerate(np.clip(lengths, 0, columns)):
        assert np.array_equal(got[i], expected(scores[i, :length], 40)), i
    assert reached[4] == SAMPLE
    assert 40 < reached[5] < 200


def test_what_takes_rows() -> None:
    assert block_picks.takes("sm_90a", 16, 8 * LONG_BLOCKS, 2048)
    assert not block_picks.takes("sm_90a", 15, 8 * LONG_BLOCKS, 2048)
    assert not block_picks.takes("sm_90a", 16, 8 * LONG_BLOCKS - 8, 2048)
    assert not block_picks.takes("sm_90a", 16, 8 * STREAMED.places + 1, 2048)
    assert not block_picks.takes("sm_100a", 16, 8 * LONG_BLOCKS, 2048)
    assert BlockPicksKey("sm_90a", "picks").smem_bytes == PickRole.smem_bytes
