# SPDX-License-Identifier: Apache-2.0
"""The kernels that pack and unpack records in the model: whole tiles and the last one, rows that are vectors and rows
that are not, slots outside the cache."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import round_up
from cute_kernels.kv_cache.pack import PackKey
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import POISON, GlobalMemory
from tests.model.ptx import parse

BLOCKS, BLOCK_SIZE = 3, 7


@pytest.mark.parametrize("is_unpack", [False, True])
@pytest.mark.parametrize(
    ("data", "scales", "vector", "records", "gap"),
    [
        (576, 8, 16, 37, 0),
        (576, 8, 8, 18, 8),
        (128, 4, 16, 131, 0),
        (128, 4, 4, 34, 4),
        (2048, 0, 16, 11, 32),
        (528, 0, 16, 33, 0),
    ],
)
def test_bytes(data: int, scales: int, vector: int, records: int, gap: int, is_unpack: bool) -> None:
    key, capacity = PackKey("sm_90a", data, scales, vector, is_unpack), BLOCKS * BLOCK_SIZE
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 20)
    rng = np.random.default_rng(records)
    slots = rng.integers(-1, capacity + 1, records)
    if is_unpack:  # each once: which record is written last is not told
        slots[~np.isin(np.arange(records), np.unique(slots, return_index=True)[1])] = -(2**62)
    pool = rng.integers(0, 256, (BLOCKS, round_up(BLOCK_SIZE * key.record + 1, 16)), dtype=np.uint8)
    rows = rng.integers(0, 256, (records, key.record + gap), dtype=np.uint8)
    want = np.full_like(pool if is_unpack else rows, POISON)
    for row, slot in enumerate(slots):
        page, place = divmod(slot, BLOCK_SIZE)
        first = BLOCK_SIZE * data + place * scales
        in_page = np.r_[place * data : (place + 1) * data, first : first + scales]
        if 0 <= slot < capacity and is_unpack:
            want[page, in_page] = rows[row, : key.record]
        elif not is_unpack:
            want[row, : key.record] = pool[page, in_page] if 0 <= slot < capacity else 0
    places = [memory.put(rows if is_unpack else pool), memory.reserve(want.size)]
    rows_at, pool_at = places if is_unpack else reversed(places)
    values = [memory.put(slots), rows_at, rows.shape[1], pool_at, pool.shape[1], capacity, BLOCK_SIZE]
    values += [*divisor(BLOCK_SIZE), records]
    done, make = orders.recorder(program)
    blocks = -(-records // key.tile)
    run_grid(program, pack(program, values), memory, blocks=blocks, size=key.smem_bytes, seed=data, events=make)
    for record in done:
        orders.check(record)
    assert np.array_equal(memory.get(places[1], want.shape, np.uint8), want)
