# SPDX-License-Identifier: Apache-2.0
"""The compressor's kernels of ratio 128 in the model, against the reference: entries whose rows are the step's,
the cache's or both, and rows that are saved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.compressor.ratio128 import C128Key
from cute_kernels.compressor.ratio128_portable import PortableC128Key
from tests.compile.reports import compile_report
from tests.gpu.test_compress_c128 import call, check_entries, inputs, raw_bytes, same_state, saved
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import parse

RANGES = ((120, 129), (127, 128), (3, 20), (254, 257), (0, 128))
"""Positions of each request's tokens. An entry of the last one comes of this step alone."""


@pytest.mark.parametrize(
    ("arch", "op", "window"), [("sm_80", "fused", 0), ("sm_120a", "fused", 1), ("sm_80", "compress", 0)]
)
def test_every_byte(arch: str, op: str, window: int) -> None:
    check(PortableC128Key(arch, "fp8_ds_mla/1", False, op == "fused"), window, 1)


@pytest.mark.parametrize(
    ("cluster", "op", "window", "tokens"), [(2, "fused", 0, 40), (8, "fused", 1, 158), (4, "compress", 0, 79)]
)
def test_every_byte_by_clusters(cluster: int, op: str, window: int, tokens: int) -> None:
    """Of so many CTAs, each for so many tokens."""
    check(C128Key("sm_90a", "fp8_ds_mla/1", False, op == "fused", cluster), window, tokens)


def check(key: C128Key, window: int, tokens: int) -> None:
    fused, op = key.fused, "fused" if key.fused else "compress"
    a = inputs(RANGES)
    if not fused:
        a = saved(a)
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 23)
    state, table, cache, rope = a["state_cache"], a["block_table"], a["kv_cache"], a["cos_sin_cache"]
    count, (pages, page_rows, _), (requests, columns) = len(a["slot_mapping"]), state.shape, table.shape
    at = {name: put(memory, value) for name, value in a.items() if isinstance(value, torch.Tensor)}
    pools = {name: at[name] - a[name].storage_offset() * a[name].element_size() for name in ("state_cache", "kv_cache")}
    for name, base in pools.items():
        memory.writable[base - memory.BASE :][: raw_bytes(a[name]).numel()] = True
    values: list[Any] = [
        at["positions"],
        at["token_to_req_indices"],
        at["slot_mapping"],
        at["kv_slot_mapping"],
        count,
        tokens,
    ]
    values += [at["state_cache"], state.stride(0) * 4, pages, pages * page_rows, *divisor(page_rows)]
    values += [at["block_table"], table.stride(0) * 4, columns * page_rows, requests, *divisor(max(columns, 1))]
    step = at["kv_score"], a["kv_score"].stride(0) * 4, at["ape"], 2048, at["query_start_loc"], 0, window, 0
    values += step if fused else (0,) * 8
    values += [
        at["kv_cache"],
        cache.stride(0),
        cache.shape[1],
        *divisor(cache.shape[1]),
        cache.shape[0] * cache.shape[1],
    ]
    values += [at["rms_norm_weight"], at["cos_sin_cache"], rope.stride(0) * 4, rope.shape[0], 0, a["rms_norm_eps"]]
    records, make = orders.recorder(program)
    cluster = 1 if isinstance(key, PortableC128Key) else key.cluster
    blocks = -(-count // tokens) * cluster
    run_grid(program, pack(program, values), memory, blocks=blocks, cluster=cluster, size=key.smem_bytes, events=make)
    for record in records:
        orders.check(record)

    call(op, a | ({"persist": "window" if window else "all"} if fused else {}))
    got = {name: torch.from_numpy(memory.get(base, raw_bytes(a[name]).shape, np.uint8)) for name, base in pools.items()}
    assert same_state(got["state_cache"], raw_bytes(state), any_nan=False)
    check_entries(got["kv_cache"], raw_bytes(cache), a)
    assert int((got["kv_cache"] != 0xA5).sum()) > 4 * 500, "entries are there"
