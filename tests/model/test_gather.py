# SPDX-License-Identifier: Apache-2.0
"""Kernels of dequantize_and_gather_k_cache in the model, against the reference: rows without a page are zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.formats import FP8_DS_MLA
from cute_kernels.kv_cache import reference
from cute_kernels.kv_cache.call import GatherCall
from cute_kernels.kv_cache.gather import GatherBulkKey, GatherKey
from tests.compile.reports import compile_report
from tests.kv_cache.test_gather import random_pool
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse

ROOM, OFFSET, BLOCK_SIZE = 30, 3, 8
SEQ_LENS = np.array([31, 0, 26, 9, 64], np.int32)
GATHER_LENS = np.array([19, 5, 30, -2, 64], np.int32)
TABLE = np.array([[2, 4, 0, 1], [0, 1, 2, 3], [1, -1, 5, 3], [3, 3, 3, 3], [7, -(2**31), 2, 2**31 - 1]], np.int32)
"""Pages that are not there: -1, beyond the pool of five, and rows behind the table's columns."""


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("kind", "arch"), [(GatherKey, "sm_90a"), (GatherBulkKey, "sm_90a"), (GatherKey, "sm_80")])
def test_every_byte(kind: type[GatherKey] | type[GatherBulkKey], arch: str, gathered: bool) -> None:
    key = kind(arch, gathered=gathered)
    cache = random_pool(5, BLOCK_SIZE, extra=64)
    out = torch.empty(len(SEQ_LENS), OFFSET + ROOM, 512, dtype=torch.bfloat16)
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 20)
    pool = memory.put(cache.as_strided((5, cache.stride(0)), (cache.stride(0), 1)).numpy())
    target = memory.reserve(out.numel() * 2)
    out.view(torch.int16).fill_(-1)  # what memory for results holds
    lens = memory.put(SEQ_LENS)
    values: list[Any] = [target + OFFSET * 1024, (OFFSET + ROOM) * 1024, 1024, ROOM, lens]
    values += [memory.put(GATHER_LENS) if gathered else lens, memory.put(TABLE), 4 * TABLE.shape[1], TABLE.shape[1]]
    values += [pool, cache.stride(0), 5, BLOCK_SIZE, *divisor(BLOCK_SIZE)]
    size = getattr(key, "smem_bytes", 0)
    requests = len(SEQ_LENS)
    run_grid(program, pack(program, values), memory, blocks=2 * requests, cluster=requests, rows=requests, size=size)
    given = torch.from_numpy(GATHER_LENS) if gathered else None
    args = torch.from_numpy(SEQ_LENS), given, torch.from_numpy(TABLE), BLOCK_SIZE, OFFSET, FP8_DS_MLA.id
    reference.dequantize_and_gather_k_cache(GatherCall(out, cache, *args))
    got = memory.get(target, tuple(out.shape), np.int16)
    assert np.array_equal(got, out.view(torch.int16).numpy())
    assert (out == 0).all(dim=-1).sum() > 10, "rows without a page"
