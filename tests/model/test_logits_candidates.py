# SPDX-License-Identifier: Apache-2.0
"""Hopper's scores of candidate blocks, run by the model of the GPU, against those of all keys on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import torch

from cute_kernels.formats import INDEX_DIM, INDEXER_FP8
from cute_kernels.indexer import reference
from cute_kernels.indexer.hopper.logits_candidates import CandidateLogitsKey
from cute_kernels.indexer.ops import mqa_logits, paged_mqa_logits
from cute_kernels.indexer.verify_cases import candidates_of
from cute_kernels.isa_probes.meaning import TensorMap
from tests.compile.reports import compile_report
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.logits_calls import QUERY_MAP
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import PARAMETERS, parse

KEY = CandidateLogitsKey("sm_90a", 32)
PREFILL_KEY = CandidateLogitsKey("sm_90a", 32, paged=False)
SHARE = 2.0**-12


def run(lens: torch.Tensor, blocks: int, limit: int, page_rows: int, ctas: int, seed: int, checked: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    requests, next_n = lens.shape
    pages = 40
    pool = INDEXER_FP8.allocate(pages, page_rows, page_stride=INDEXER_FP8.page_stride(page_rows) + 64)
    slots = torch.arange(pages * page_rows)
    keys = (torch.randn(len(slots), INDEX_DIM, generator=g) * 30).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.exp2(torch.randint(-4, 4, (len(slots), 1), generator=g).float())
    INDEXER_FP8.write_fields(pool, page_rows, slots, keys, scale.view(torch.uint8))
    width = -(-limit // page_rows)
    table = torch.randint(-2, pages + 2, (requests, width - 1), generator=g).int()
    if checked:  # what is not there is multiplied, but not written
        table = torch.randint(0, pages, (requests, width), generator=g).int()
    q = (torch.randn(requests, next_n, KEY.heads, INDEX_DIM, generator=g) * 30).to(torch.float8_e4m3fn)
    weights = torch.randn(requests * next_n, KEY.heads, generator=g)
    candidates = candidates_of(g, lens.clamp(max=limit), blocks)

    config, memory, skip = KEY.config, GlobalMemory(), 9
    rows, columns = requests * next_n, 8 * blocks
    at = {"q": q, "pool": pool, "table": table, "weights": weights, "candidates": candidates, "lens": lens}
    place = {name: put(memory, tensor) for name, tensor in at.items()}
    stride = columns + 8
    out = memory.reserve(rows * stride * 4)
    width = config.row_bytes
    query_map = TensorMap(
        place["q"] - GlobalMemory.BASE,
        (width, KEY.heads, next_n, requests),
        (width, KEY.heads * width, next_n * KEY.heads * width),
        (width, KEY.heads, 1, 1),
        1,
        width,
    )
    values: list[Any] = [bytes(128), bytes(12), bytes(1), bytes(1)]
    values += [requests, next_n, *divisor(next_n), *divisor(ctas)]
    values += [0, place["lens"], lens.stride(0) * 4, limit, columns, -1, skip]
    values += [place["pool"] + page_rows * width, pool.stride(0), *divisor(page_rows // 8), pages, limit]
    values += [place["table"], table.stride(0) * 4, table.shape[1]]
    values += [place["pool"], width, place["candidates"], candidates.stride(0) * 4]
    values += [place["weights"], weights.stride(0) * 4, 0, 0, 0, out, stride * 4]
    program = parse(compile_report(KEY).ptx)
    maps = {PARAMETERS + program.parameters[QUERY_MAP].offset: query_map}
    records, make = orders.recorder(program)
    options: dict[str, Any] = {"events": make} if checked else {}
    run_grid(
        program, pack(program, values), memory, blocks=ctas, size=KEY.smem_bytes, seed=seed, tensor_maps=maps, **options
    )
    if checked:
        orders.check(records[0])

    found = torch.from_numpy(memory.get(out, (rows, stride), np.float32).copy())
    start = out - memory.BASE
    written = memory.written[start : start + rows * stride * 4].reshape(rows, stride, 4)[..., 0]
    full = paged_mqa_logits(q, pool, weights, lens, table, None, limit, True)
    lengths = lens.reshape(-1).clamp(min=0, max=limit)
    counts = reference.candidate_keys(lengths, blocks).tolist()
    assert found[:, columns].contiguous().view(torch.int32).tolist() == counts
    for row, count in enumerate(counts):
        entries = torch.arange(count)
        wanted = full[row, candidates[row].long()[entries // 8] * 8 + entries % 8]
        if count <= skip:
            wanted = wanted[:0]
        assert written[row].tolist() == [*[1] * len(wanted), *[0] * (columns - len(wanted)), 1, *[0] * 7]
        got = found[row, : len(wanted)]
        compare(got, wanted)


def compare(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.equal(got.isfinite(), wanted.isfinite())
    seen = wanted.isfinite()
    magnitude = wanted[seen].abs().max() * 50 if seen.any() else 1.0
    assert bool(((got - wanted)[seen].abs() <= SHARE * magnitude).all())


def test_rows_of_several_requests() -> None:
    """Rows that see less than their candidates could hold, little, nothing, more than counts; pages that do not
    exist."""
    lens = torch.tensor([[203, 150], [9, 0], [-3, 1000], [17, 160]], dtype=torch.int32)
    run(lens, 20, 400, 16, 2, 1, False)


@pytest.mark.parametrize("length", [5000, 5003])
def test_a_row_of_many_tiles_in_one_block(length: int) -> None:
    """Candidates and pages are looked up ahead, rings go round; of whole tiles, nothing meets that has to be kept
    apart."""
    run(torch.tensor([[length]], dtype=torch.int32), 304, 6000, 64, 1, 2, length % 8 == 0)


def test_rows_of_a_prefill() -> None:
    """Contiguous keys: rows with starts of their own, some of them below 0 or behind the keys, of which no more than so
    many count; the last candidates stick out of the keys."""
    g = torch.Generator().manual_seed(5)
    rows, keys, blocks, most, skip, ctas = 8, 700, 20, 620, 9, 2
    start = torch.tensor([0, 3, -13, 650, 701, 100, -300, 41], dtype=torch.int32)
    end = torch.tensor([700, 400, 640, 900, 690, 107, 400, 700], dtype=torch.int32)
    width = PREFILL_KEY.config.row_bytes
    codes = (torch.randn(keys, INDEX_DIM, generator=g) * 30).to(torch.float8_e4m3fn)
    wide = torch.zeros(keys, 2 * width, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :width].copy_(codes)
    scale = torch.exp2(torch.randint(-4, 4, (keys,), generator=g).float())
    q = (torch.randn(rows, PREFILL_KEY.heads, INDEX_DIM, generator=g) * 30).to(torch.float8_e4m3fn)
    weights = torch.randn(rows, PREFILL_KEY.heads, generator=g)
    lengths = (end.clamp(max=keys) - start).clamp(min=0, max=most)
    candidates = candidates_of(g, lengths, blocks)
    memory, columns = GlobalMemory(), 8 * blocks
    at = {"q": q, "k": wide, "scale": scale, "weights": weights, "candidates": candidates, "start": start, "end": end}
    place = {name: put(memory, tensor) for name, tensor in at.items()}
    stride = columns + 8
    out = memory.reserve(rows * stride * 4)
    values: list[Any] = [bytes(128), bytes(12), bytes(1), bytes(1), 1, rows, *divisor(rows), *divisor(ctas)]
    values += [place["start"], place["end"], 0, keys, columns, most, skip]
    values += [place["scale"], 0, *divisor(1), 1, keys, 0, 0, 0]
    values += [place["k"], 2 * width, place["candidates"], candidates.stride(0) * 4]
    values += [place["weights"], weights.stride(0) * 4, 0, 0, 0, out, stride * 4]
    shape = (width, PREFILL_KEY.heads, rows, 1)
    strides = (width, PREFILL_KEY.heads * width, rows * PREFILL_KEY.heads * width)
    query_map = TensorMap(place["q"] - GlobalMemory.BASE, shape, strides, (width, PREFILL_KEY.heads, 1, 1), 1, width)
    program = parse(compile_report(PREFILL_KEY).ptx)
    maps = {PARAMETERS + program.parameters[QUERY_MAP].offset: query_map}
    run_grid(program, pack(program, values), memory, blocks=ctas, size=PREFILL_KEY.smem_bytes, seed=1, tensor_maps=maps)
    found = torch.from_numpy(memory.get(out, (rows, stride), np.float32).copy())
    written = memory.written[out - memory.BASE :][: rows * stride * 4].reshape(rows, stride, 4)[..., 0]
    counts = reference.candidate_keys(lengths, blocks).tolist()
    assert found[:, columns].contiguous().view(torch.int32).tolist() == counts
    full = mqa_logits(q, (codes, scale), weights, torch.zeros_like(end), torch.full_like(end, keys))
    for row, count in enumerate(counts):
        entries = torch.arange(count if count > skip else 0)
        key = candidates[row].long()[entries // 8] * 8 + entries % 8 + int(start[row])
        wanted = torch.where((key >= 0) & (key < keys), full[row, key.clamp(0, keys - 1)], -torch.inf)
        assert written[row].tolist() == [*[1] * len(wanted), *[0] * (columns - len(wanted)), 1, *[0] * 7]
        compare(found[row, : len(wanted)], wanted)
