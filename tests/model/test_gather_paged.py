# SPDX-License-Identifier: Apache-2.0
"""Rows and lists that sparse_mla_prefill_paged gathers, in the model: every list names, in order, the rows that its
query row attends to, and -1 for those without a page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.sparse_mla.gather_paged import WARPS, GatherPagedKey
from cute_kernels.sparse_mla.gathered import GatheredShape
from tests.compile.reports import compile_report
from tests.kv_cache.test_gather import random_pool
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

WINDOW, RATIO, ORIGIN = 12, 4, 5
QUERY_LENS, SEQ_LENS = (3, 0, 1, 9, 2), (40, 30, 1, 7, 61)
"""A request without rows, one of a single token, and one whose first rows lie before its context."""

TOKENS = sum(QUERY_LENS) + 2
"""Two rows are nobody's."""

PAGES = 6
SWA_ROWS, ROWS = 8, 2
BAD, LARGE = -(2**31), 2**31 - 1
SWA_TABLE = [[2, 4, 0, 1, 5, 3, 2], [0] * 7, [3] * 7, [5, 3, 0, 0, 0, 0, 0], [7, 0, LARGE, 1, BAD, 1, 4]]
TABLE = [[0, 3, 1, -1, 5], [1] * 5, [2] * 5, [4, 0, 9, 9, 9], [5, 2, 6, 0, 1]]
"""Pages that are not there: below 0, from PAGES on, and columns behind the tables': of request 4 the last positions,
and entries from the tenth on."""

ENTRIES = ROWS * len(TABLE[0])
COLUMNS = {"none": 0, "all": ENTRIES, "listed": 8}


def picks(seed: int) -> Any:
    """Of a row's entries, others, and numbers of none."""
    g = np.random.default_rng(seed)
    found = g.integers(-1, 16, (TOKENS, COLUMNS["listed"]), np.int32)
    found[g.random(found.shape) < 0.1] = BAD
    found[g.random(found.shape) < 0.1] = LARGE
    return found


def expected(caches: tuple[torch.Tensor, torch.Tensor], kind: str, listed: Any) -> list[list[Any]]:
    """Of every query row the bits of the rows that it attends to, None where there is no page."""

    def row(cache: torch.Tensor, table: list[int], page_rows: int, number: int) -> Any:
        column, inside = divmod(number, page_rows)
        page = table[column] if column < len(table) else -1
        if not 0 <= page < PAGES:
            return None
        return FP8_DS_MLA.read(cache, page_rows, torch.tensor([page * page_rows + inside]))[0].view(torch.int16).numpy()

    found: list[list[Any]] = []
    for request, (rows, length) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True)):
        for position in range(length - rows, length):
            visible = (position + 1) // RATIO
            entries = list(range(min(visible, COLUMNS[kind])))
            if kind == "listed":
                entries = listed[len(found)][: len(entries)].tolist()
            keys: list[Any] = []
            for entry in entries:
                is_named = 0 <= entry < visible
                keys.append(row(caches[1], TABLE[request], ROWS, entry) if is_named else None)
            first = max(position + 1 - WINDOW, 0)
            keys += [row(caches[0], SWA_TABLE[request], SWA_ROWS, p) for p in range(first, position + 1)]
            found.append(keys)
    return found + [[]] * (TOKENS - len(found))


@pytest.mark.parametrize(("kind", "width"), [("none", 4), ("all", 4), ("listed", 4), ("listed", 1)])
@pytest.mark.parametrize("rows", [2, 4])
def test_lists_name_what_rows_attend_to(kind: str, width: int, rows: int) -> None:
    key = GatherPagedKey("sm_90a", kind, width, rows)
    caches = random_pool(PAGES, SWA_ROWS, extra=64, seed=1), random_pool(PAGES, ROWS, extra=16, seed=2)
    listed = picks(3)
    entries = 0 if kind == "none" else ENTRIES
    shape = GatheredShape.of(TOKENS, len(SEQ_LENS), WINDOW, entries, COLUMNS[kind])
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 20)
    kv, lists, lens = map(memory.reserve, (shape.row_bytes, shape.list_bytes, 4 * TOKENS))

    values: list[Any] = []
    tables = np.array(SWA_TABLE, np.int32), np.array(TABLE, np.int32)
    pools = [(caches[0], tables[0], SWA_ROWS), (caches[1], tables[1], ROWS)]
    for cache, table, page_rows in pools if entries else pools[:1] * 2:
        raw = cache.as_strided((PAGES, cache.stride(0)), (cache.stride(0), 1)).numpy()
        values += [memory.put(raw), cache.stride(0), PAGES, *divisor(page_rows)]
        values += [memory.put(table), 4 * table.shape[1], table.shape[1]]
    values += [WINDOW, memory.put(listed) if kind == "listed" else 0, 4 * listed.shape[1], COLUMNS[kind]]
    starts = ORIGIN + np.cumsum([0, *QUERY_LENS], dtype=np.int32)
    values += [*divisor(RATIO), memory.put(starts.astype(np.int32)), memory.put(np.array(SEQ_LENS, np.int32)), 5]
    segments = -(-shape.columns // key.segment)
    positions = TOKENS + len(SEQ_LENS) * (WINDOW - 1)
    ctas = [-(-TOKENS * segments // WARPS), -(-positions // (WARPS * rows)), -(-5 * entries // (WARPS * rows))]
    values += [kv, 1024, positions, entries, lists, 4 * shape.columns, TOKENS, shape.columns, lens]
    values += [*divisor(segments), *divisor(max(entries, 1)), ctas[0], ctas[0] + ctas[1]]
    run_grid(program, pack(program, values), memory, blocks=sum(ctas), size=0)

    found = memory.get(kv, (shape.rows, 512), np.int16)
    named, counts = memory.get(lists, (TOKENS, shape.columns), np.int32), memory.get(lens, (TOKENS,), np.int32)
    for got, count, want in zip(named, counts, expected(caches, kind, listed), strict=True):
        assert count == len(want)
        for index, row in zip(got[:count], want, strict=True):
            assert (index == -1) == (row is None)
            assert row is None or np.array_equal(found[index], row)
    assert (named[: TOKENS - 2, :1] == -1).any(), "rows without a page"
