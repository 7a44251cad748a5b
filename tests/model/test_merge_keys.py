# SPDX-License-Identifier: Apache-2.0
"""The kernel that merges keys in the model, against the reference: one round and several, ties, slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.indexer import reference
from cute_kernels.indexer.call import MergeKeysCall
from cute_kernels.indexer.merge_keys import MergeKeysKey
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

PAGE_ROWS, PAGES = 48, 50


def keys_of(kind: str, parts: int, rows: int, k: int) -> torch.Tensor:
    """Different entries of every row; its last part is empty."""
    g = torch.Generator().manual_seed(parts * k)
    shape = (rows, parts * k)
    entries = torch.rand(rows, PAGES * PAGE_ROWS * parts, generator=g).argsort(dim=1)[:, : parts * k]
    scores = torch.randn(shape, generator=g)
    if kind == "equal":
        scores = torch.zeros(shape)
    elif kind == "bits":
        scores = torch.randint(-(2**31), 2**31, shape, generator=g).int().view(torch.float32)
    keys = reference.score_keys(scores, entries).view(rows, parts, k).transpose(0, 1).contiguous()
    keys[-1] = -(2**63)
    if kind == "twice":
        keys[:] = keys[0]
    return keys


@pytest.mark.parametrize(
    ("key", "parts", "k", "kind"),
    [
        (MergeKeysKey("sm_90a", 512, 16, 4, 2), 3, 512, "normal"),
        (MergeKeysKey("sm_90a", 512, 8, 16, 2), 7, 512, "equal"),
        (MergeKeysKey("sm_90a", 512, 8, 8, 1), 5, 77, "bits"),
        (MergeKeysKey("sm_90a", 512, 16, 8, 2), 40, 100, "twice"),
        (MergeKeysKey("sm_90a", 2048, 32, 8, 2), 6, 2000, "bits"),
    ],
)
def test_as_the_reference(key: MergeKeysKey, parts: int, k: int, kind: str) -> None:
    rows, ranks, rank = 2 if k < 512 else 1, 3, 1
    keys = keys_of(kind, parts, rows, k)
    table = torch.randint(-1, 2**31 // PAGE_ROWS, (1, PAGES * parts // ranks), dtype=torch.int32)
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 22)
    out, slots, lens = memory.reserve(4 * rows * k), memory.reserve(4 * rows * k), memory.reserve(4 * rows)
    values = [memory.put(keys.numpy()), 8 * rows * k, 8 * k, parts * k // key.width, *divisor(k // key.width)]
    values += [out, 4 * k, slots, 4 * k, lens, memory.put(table.numpy()), 4 * table.shape[1], table.shape[1]]
    values += [*divisor(rows), *divisor(PAGE_ROWS), (2**31 - 1) // PAGE_ROWS + 1, *divisor(ranks), rank, k]
    records, make = orders.recorder(program)
    run_grid(program, pack(program, values), memory, blocks=rows, size=key.smem_bytes, seed=k, events=make)
    for record in records:
        orders.check(record)

    shape = (rows, k)
    results = [torch.zeros(size, dtype=torch.int32) for size in (shape, shape, (rows,))]
    reference.merge_top_k_keys(MergeKeysCall(keys, results[0], table, PAGE_ROWS, ranks, rank, *results[1:]))
    for address, want in zip((out, slots, lens), results, strict=True):
        assert np.array_equal(memory.get(address, tuple(want.shape), np.int32), want.numpy())
