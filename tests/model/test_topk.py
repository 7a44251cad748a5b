# SPDX-License-Identifier: Apache-2.0
"""The kernel of the picks of a row in the model, against a stable sort: rows that fit a guess and that fool it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer.topk import TopKKey
from cute_kernels.indexer.topk_held import AnyTopKKey, HeldTopKKey
from cute_kernels.indexer.topk_select import groups_for, share_for
from cute_kernels.indexer.topk_whole import WARPS, WholeRowsKey
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

INF, NAN = float("inf"), float("nan")


def chosen(values: list[float], weights: list[float]) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, n: rng.choice(values, n, p=np.array(weights) / sum(weights))


def cluster(rng: np.random.Generator, n: int) -> np.ndarray:
    """All picks are neighbours."""
    x = rng.standard_normal(n)
    x[n // 2 : n // 2 + 900] += 100
    return x


def sampled(rng: np.random.Generator, n: int) -> np.ndarray:
    """The best ones of a row of three tiles of 8 warps are in the first: a guess by it is too high."""
    x = rng.standard_normal(n)
    x[(np.arange(n) // 128) % 3 == 0] += 100
    return x


def unsampled(rng: np.random.Generator, n: int) -> np.ndarray:
    """None of the best ones are in the first tile: a guess by it is too low, and lists overflow."""
    x = rng.standard_normal(n)
    x[(np.arange(n) // 128) % 3 != 0] += 100
    return x


def bits(rng: np.random.Generator, n: int) -> np.ndarray:
    """Every kind of fp32: subnormal, infinite, NaN of either sign."""
    return rng.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)


PATTERNS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "far": lambda rng, n: 1e-3 * rng.standard_normal(n) - 1000,
    "near": lambda rng, n: rng.standard_normal(n) + 20_000,
    "equal": lambda rng, n: np.ones(n),
    "rising": lambda rng, n: np.arange(n),
    "falling": lambda rng, n: -np.arange(n),
    "cluster": cluster,
    "sampled": sampled,
    "unsampled": unsampled,
    "zeros": chosen([0.0, -0.0, 1.0], [10, 10, 1]),
    "infinite": chosen([-INF, INF, 0.5, 2.0], [50, 0.2, 1, 1]),
    "mostly nan": chosen([NAN, 1.0, -INF, -2.0], [100, 1, 1, 1]),
    "all nan": chosen([NAN], [1]),
    "large": chosen([3e38, -3e38, 2e38], [1, 1, 1]),
    "bits": bits,
}


def expected(row: np.ndarray, k: int) -> np.ndarray:
    columns = np.arange(len(row))
    if len(row) > k:
        is_nan = np.isnan(row)
        order = np.lexsort((columns, np.where(is_nan, 0, -row), is_nan))
        columns = np.sort(order[:k])
    return np.concatenate([columns, np.full(k - len(columns), -1)]).astype(np.int32)


def picks(
    key: TopKKey,
    scores: np.ndarray,
    start: int,
    end: int,
    k: int,
    table: np.ndarray | None = None,
    in_any_order: bool = False,
    early_lines: int = 0,
) -> np.ndarray:
    """What the kernel writes of a row; with a table, of pages of 48 rows, slots. in_any_order: what its threads do in
    shared memory has to be in order by the PTX ISA. early_lines: the launch's."""
    program, memory, columns = parse(compile_report(key).ptx), GlobalMemory(1 << 20), len(scores)
    values: list[Any] = [memory.put(scores), 4 * columns, columns, memory.put(np.array([start], np.int32)), 4]
    values += [memory.put(np.array([end], np.int32)), 4, 0, *divisor(1), columns, 0]
    values += [0, 0, 0] if table is None else [memory.put(table), 0, len(table)]
    values += [*divisor(48), (2**31 - 1) // 48 + 1, out := memory.reserve(4 * k), 4 * k, k, share_for(key, k)]
    values += [groups_for(key, k), early_lines]
    records, make = orders.recorder(program)
    events = make if in_any_order else None
    with np.errstate(all="ignore"):
        run_grid(
            program,
            pack(program, values),
            memory,
            blocks=key.cluster,
            cluster=key.cluster,
            size=key.smem_bytes,
            seed=k,
            events=events,
        )
    for record in records:
        orders.check(record)
    found: np.ndarray = memory.get(out, (k,), np.int32)
    return found


KEYS = [
    *(TopKKey("sm_90a", *shape) for shape in ((8, 4, 1, 8), (16, 8, 1, 2), (8, 4, 1, 1))),
    AnyTopKKey("sm_90a", 8, 4, 1, 8),
    HeldTopKKey("sm_90a", 10, 4),
    HeldTopKKey("sm_90a", 5, 8),
    *(HeldTopKKey("sm_90a", *shape, is_spread=True) for shape in ((8, 4), (8, 1))),
]
IDS = [f"{key.entry}-{key.warps}-{key.vectors}" + "-spread" * key.is_spread for key in KEYS]
CASES = ((512, 17_409), (1024, 8195), (100, 3001), (1200, 2049), (300, 1001), (2, 130), (4000, 4093), (2048, 5118))


@pytest.mark.parametrize("key", KEYS, ids=IDS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_picks(key: TopKKey, pattern: str) -> None:
    """Of whole rows and of parts by turns: with half of the patterns a case is one, with half the other."""
    turn = list(PATTERNS).index(pattern)
    for number, (k, columns) in enumerate(CASES[: None if isinstance(key, HeldTopKKey) else -2]):
        if columns > key.capacity:
            continue
        with np.errstate(all="ignore"):
            scores = PATTERNS[pattern](np.random.default_rng(columns), columns).astype(np.float32)
        start, end = (columns // 5 + 1, columns - 2) if (turn + number) % 2 else (0, columns)
        for early_lines in (0, 1) if key.is_spread else (0,):
            got = picks(key, scores, start, end, k, early_lines=early_lines)
            assert np.array_equal(got, expected(scores[start:end], k)), (k, columns, start, early_lines)


def test_fewer_than_k_scores_reach_the_bound() -> None:
    """Of a held row: each thread has one score that is better than any of the others."""
    key, k, column = HeldTopKKey("sm_90a", 8, 4, is_spread=True), 512, np.arange(4096)
    assert k * 2 * key.vectors == len(column), "more would have another bound"
    scores = np.random.default_rng(1).standard_normal(len(column)).astype(np.float32)
    scores[(column % 4 == 1) & (column // 128 % key.vectors == 2)] += 100
    assert np.array_equal(picks(key, scores, 0, len(column), k), expected(scores, k))


@pytest.mark.parametrize(("start", "end"), [(0, 1030), (1, 2048), (3, 2049), (700, 1600), (2000, 4095), (3001, 4096)])
def test_early_rows_that_are_shorter_than_the_columns(start: int, end: int) -> None:
    """Those of few chunks are loaded again, by all warps."""
    key, k = HeldTopKKey("sm_90a", 8, 4, is_spread=True), 512
    scores = np.random.default_rng(end).standard_normal(4096).astype(np.float32)
    got = picks(key, scores, start, end, k, in_any_order=True, early_lines=128)
    assert np.array_equal(got, expected(scores[start:end], k))


@pytest.mark.parametrize(("start", "more"), [(0, 0), (0, 1), (3, 0), (3, 1)])
def test_the_longest_row_that_is_held_and_the_next(start: int, more: int) -> None:
    """Of a kernel for rows of any length; `start` is as far behind a 16-byte boundary."""
    key, k = AnyTopKKey("sm_90a", 8, 4, 1, 8), 512
    columns = key.row.held.config.places + more
    scores = np.random.default_rng(columns).standard_normal(columns).astype(np.float32)
    scores[-1] = INF
    got = picks(key, scores, start, columns, k, in_any_order=True)
    assert np.array_equal(got, expected(scores[start:], k))


@pytest.mark.parametrize(("start", "size"), [(0, 513), (3, 2100), (1, 4095), (1, 4096), (0, 4097)])
def test_rows_that_one_cta_of_a_cluster_holds(start: int, size: int) -> None:
    """And the first that all share; of both kinds of bins."""
    key, k = AnyTopKKey("sm_90a", 4, 4, 2, 2), 512
    assert key.row.held.config.places == 4096
    for pattern in ("normal", "zeros"):
        scores = PATTERNS[pattern](np.random.default_rng(size), start + size).astype(np.float32)
        got = picks(key, scores, start, start + size, k, in_any_order=True)
        assert np.array_equal(got, expected(scores[start:], k)), pattern


@pytest.mark.parametrize("key", KEYS, ids=IDS)
@pytest.mark.parametrize("pattern", ["normal", "equal", "zeros", "mostly nan", "large", "unsampled"])
def test_in_any_order(key: TopKKey, pattern: str) -> None:
    """Guesses that hold and that do not, rows that bins of scores do not part, ties."""
    # of eight vectors more than half are in use
    k, columns = 512, 2 * key.config.tile if key.tiles > 1 else min(2001 if key.vectors < 8 else 3001, key.capacity - 3)
    with np.errstate(all="ignore"):
        scores = PATTERNS[pattern](np.random.default_rng(columns), columns).astype(np.float32)
    table = np.arange(columns // 48 + 1, dtype=np.int32)[::-1].copy()
    assert np.array_equal(picks(key, scores, 1, columns, k, in_any_order=True), expected(scores[1:], k))
    got = picks(key, scores, 0, columns, k, table, in_any_order=True)
    want = expected(scores, k)
    assert np.array_equal(got, table[want // 48] * 48 + want % 48)


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_slots(key: TopKKey) -> None:
    rng = np.random.default_rng(1)
    for k, columns in ((512, 4001), (7, 2000), (900, 1001)):
        if columns > key.capacity:
            continue
        scores = rng.standard_normal(columns).astype(np.float32)
        table = rng.integers(-1, 1 << 20, columns * 3 // 4 // 48, dtype=np.int32)
        got = picks(key, scores, 3, columns, k, table)
        want = expected(scores[3:], k)
        page = np.append(table, -1)[np.minimum(want // 48, len(table))]
        assert np.array_equal(got, np.where((page >= 0) & (want >= 0), page * 48 + want % 48, -1))


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("page_rows", [0, 48])
@pytest.mark.parametrize("chunks", [1, 4])
def test_rows_that_are_picked_whole(chunks: int, page_rows: int, is_aligned: bool) -> None:
    """Lengths of all kinds, columns counted from a row's start or not; nothing beyond k picks of a row is written."""
    key, rng = WholeRowsKey("sm_90a", chunks), np.random.default_rng(chunks)
    program = parse(compile_report(key).ptx)
    for k, columns, shifts in ((512, 512, 0), (601, 601, -1), (130, 99, 0), (3, 3, 0), (1, 1, -1)):
        limit, rows = columns + 40 if shifts else columns, 2 * WARPS + 3
        starts = rng.integers(-5, 40, rows).astype(np.int32)
        ends = rng.integers(-3, limit + 9, rows).astype(np.int32)
        ends[:3] = limit, 2**31 - 1, -(2**31)
        starts[:3] = 0, 1, 7
        stride = -(-k // 4) * 4 + (4 if is_aligned else 5)
        memory = GlobalMemory(1 << 20)
        table = rng.integers(-1, 1 << 20, (rows, max(1, columns * 3 // 4 // 48)), dtype=np.int32)
        parts = -(-k // (128 * chunks))
        values: list[Any] = [columns, memory.put(starts), 4, memory.put(ends), 4, 0, *divisor(1), limit, shifts]
        values += [memory.put(table), table.shape[1] * 4, table.shape[1]] if page_rows else [0, 0, 0]
        values += [*divisor(page_rows or 1), (2**31 - 1) // (page_rows or 1) + 1]
        out = memory.reserve(rows * stride * 4)
        values += [out, stride * 4, rows, k, *divisor(parts)]
        run_grid(program, pack(program, values), memory, blocks=-(-rows // WARPS) * parts, size=0, seed=k)
        found = memory.get(out, (rows, stride), np.int32)
        place = out - memory.BASE
        written = memory.written[place : place + rows * stride * 4].reshape(rows, stride, 4)
        assert (written[:, :k] == 1).all()
        assert not written[:, k:].any()
        for r in range(rows):
            first = int(starts[r]) if shifts else 0
            size = min(int(ends[r]), limit, first + columns) - max(int(starts[r]), 0)
            want = np.where(np.arange(k) < size, np.arange(k), -1).astype(np.int32)
            if page_rows:
                page = np.append(table[r], -1)[np.minimum(want // page_rows, table.shape[1])]
                want = np.where((page >= 0) & (want >= 0), page * page_rows + want % page_rows, -1)
            assert np.array_equal(found[r, :k], want), (k, r)
