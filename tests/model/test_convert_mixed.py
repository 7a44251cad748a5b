# SPDX-License-Identifier: Apache-2.0
"""Rows of e4m3 caches that sparse_mla_mixed converts, in the model: every code in f16, and nothing behind the rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.sparse_mla.convert_mixed import WARPS, ConvertMixedKey
from tests.compile.reports import compile_report
from tests.model.hopper_problems import in_pairs
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.ptx import parse


def cache(memory: GlobalMemory, pages: int, rows: int, gap: int, seed: int) -> tuple[int, int, torch.Tensor]:
    """Address, page stride and rows of a cache of all codes, NaN among them."""
    g = np.random.default_rng(seed)
    stride = rows * 512 + gap
    raw = g.integers(0, 256, (pages, stride), np.uint8)
    codes = np.ascontiguousarray(raw[:, : rows * 512]).reshape(pages * rows, 512)
    return memory.put(raw), stride, torch.from_numpy(codes).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize(
    ("window", "compressed"), [((3, 53, 16), (5, 2, 1024)), ((1, 1, 0), None), ((0, 64, 0), (2, 64, 0))]
)
def test_every_row_in_f16(rows: int, window: tuple[int, int, int], compressed: tuple[int, int, int] | None) -> None:
    """Of caches of so many pages, rows of a page and bytes between pages."""
    key = ConvertMixedKey("sm_90a", rows)
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 20)
    sizes = [window, window if compressed is None else compressed]
    caches = [cache(memory, *size, seed) for seed, size in enumerate(sizes)]
    given = 1 if compressed is None else 2
    values, ctas = [], []
    targets: list[int] = []
    for (pages, page_rows, _), (base, stride, codes) in zip(sizes, caches, strict=True):
        # what lies behind it cannot be written
        targets.append(memory.reserve(len(codes) * 1024) if len(targets) < given else 0)
        values += [base, stride, pages, *divisor(page_rows), len(codes), targets[-1]]
        ctas.append(-(-len(codes) // (WARPS * rows)))
    values.append(ctas[0])
    run_grid(program, pack(program, values), memory, blocks=sum(ctas[:given]), size=0)

    rows_in = [codes for _, _, codes in caches[:given]]
    rows_out = [memory.get(at, (len(codes), 512), np.float16) for at, codes in zip(targets, rows_in, strict=False)]
    found, want = torch.from_numpy(np.concatenate(rows_out)), in_pairs(torch.cat(rows_in).float().half())
    assert want.isnan().any()
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(0.5), want.nan_to_num(0.5))
