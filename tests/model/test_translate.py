# SPDX-License-Identifier: Apache-2.0
"""The kernel of compute_global_topk_indices_and_lens in the model: rows with and without holes, against loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indices.translate import FEW_PICKS, TranslateKey, shape_of_call
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

INT_MAX = 2**31 - 1


def translated(
    key: TranslateKey, picks: np.ndarray, requests: np.ndarray, table: np.ndarray, page_rows: int, valid: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel writes: slots and lengths."""
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 20)
    rows, columns = picks.shape
    split = [page_rows.bit_length() - 1, page_rows] if key.is_shift else list(divisor(page_rows))
    named = (2**31) // page_rows if key.is_shift else INT_MAX // page_rows + 1
    out, lens = memory.reserve(4 * rows * columns), memory.reserve(4 * rows)
    values: list[Any] = [memory.put(picks), 4 * columns, rows, columns, memory.put(requests)]
    values += [memory.put(table), 4 * table.shape[1], *table.shape, *split, named]
    values += [memory.put(valid), out, 4 * columns, rows, columns, lens]
    records, make = orders.recorder(program)
    run_grid(program, pack(program, values), memory, blocks=rows, size=key.smem_bytes, seed=columns, events=make)
    for record in records if key.warps > 1 else ():
        orders.check(record)
    return memory.get(out, (rows, columns), np.int32), memory.get(lens, (rows,), np.int32)


def expected(
    picks: np.ndarray, requests: np.ndarray, table: np.ndarray, page_rows: int, valid: np.ndarray
) -> tuple[list[list[int]], list[int]]:
    rows, lens = [], []
    for row, request, is_valid in zip(picks.tolist(), requests.tolist(), valid.tolist(), strict=True):
        slots = []
        for x in row:
            column = x // page_rows
            if 0 <= request < table.shape[0] and x >= 0 and column < table.shape[1] and table[request, column] >= 0:
                slot = int(table[request, column]) * page_rows + x % page_rows
                slots += [slot] if slot <= INT_MAX else []
        rows.append(slots + [-1] * (len(row) - len(slots)))
        lens.append(len(slots) if is_valid else 0)
    return rows, lens


@pytest.mark.parametrize(
    ("key", "columns", "page_rows"),
    [
        (TranslateKey("sm_90a", 4, True, 4, 1), 1024, 64),
        (TranslateKey("sm_90a", 4, True, 2, 2), 512, 2),
        (TranslateKey("sm_90a", 4, True, 1, 1), 132, 64),
        (TranslateKey("sm_90a", 1, False, 4, 1), 77, 48),
        (TranslateKey("sm_90a", 1, True, 1, 4, True), 33, 1),
        (TranslateKey("sm_90a", 1, False, 2, 1), 1, 5),
        (TranslateKey("sm_90a", 4, True, 2, 1), 1040, 64),
    ],
)
@pytest.mark.parametrize("holes", [0.0, 0.03, 0.6, 1.0])
def test_rows(key: TranslateKey, columns: int, page_rows: int, holes: float) -> None:
    rng = np.random.default_rng(columns)
    picks = rng.integers(0, 30 * page_rows, (5, columns), dtype=np.int32)
    picks[rng.random(picks.shape) < holes] = -1
    picks[1, columns // 2 :] = -1  # as behind top-k: no hole
    picks[2, ::2] = INT_MAX
    table = rng.integers(0, 2**31 // page_rows // 2, (3, 29), dtype=np.int32)
    if holes:
        table[0, 3], table[1, 4:9], table[2, 5] = -1, -(2**31), 2**31 // page_rows if page_rows > 1 else -7
    requests = np.array([0, 1, 2, 1, -1], np.int32)
    valid = np.array([True, True, False, True, True])
    check(key, picks, requests, table, page_rows, valid)


def check(key: TranslateKey, *args: Any) -> None:
    got, want = translated(key, *args), expected(*args)
    assert got[0].tolist() == want[0]
    assert got[1].tolist() == want[1]


@pytest.mark.parametrize("key", [TranslateKey("sm_90a", 4, True, 2, 2), TranslateKey("sm_90a", 1, False, 4, 1)])
def test_one_hole(key: TranslateKey) -> None:
    """Wherever it is; behind the last pick it is none."""
    columns, page_rows = 300, 64
    holes = np.array([0, 1, 130, columns - 2, columns - 1, columns])
    picks = np.tile(np.arange(columns + 1, dtype=np.int32)[::-1], (len(holes), 1))
    picks[np.arange(len(holes)), holes] = -1
    picks = picks[:, :columns].copy()
    table = np.arange(20, 40, dtype=np.int32)[None]
    requests, valid = np.zeros(len(holes), np.int32), np.ones(len(holes), bool)
    check(key, picks, requests, table, page_rows, valid)


@pytest.mark.parametrize(
    ("rows", "columns", "width", "shape"),
    [
        (2047, 512, 4, (4, 1, False)),
        (2048, 512, 4, (2, 2, False)),
        (1023, 1024, 4, (8, 1, False)),
        (1024, 1024, 4, (4, 2, False)),
        (511, 4096, 4, (8, 1, False)),
        (1024, 512, 1, (4, 2, False)),
        (4096, 64, 4, (1, 1, False)),
        (4096, 512, 4, (2, 2, True)),
    ],
)
def test_a_warp_has_one_group_of_few_picks(rows: int, columns: int, width: int, shape: tuple[int, int, bool]) -> None:
    assert shape_of_call(rows, columns, width) == shape
    assert (rows * columns < FEW_PICKS or rows < 512) == (shape[1] == 1) or width == 1
