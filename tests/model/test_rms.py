# SPDX-License-Identifier: Apache-2.0
"""The kernel of fused_q_kv_rmsnorm in the model: whichever form takes the rows, the reference's bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.norm.ops import fused_q_kv_rmsnorm
from cute_kernels.norm.rms import RmsNormKey
from tests.compile.reports import compile_report
from tests.helpers import bits, generator, spread
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import parse

EPS, TOKENS, KV_WIDTH = 1e-6, 5, 512


@pytest.mark.parametrize(("arch", "width"), [("sm_90a", 1024), ("sm_90a", 1544), ("sm_90a", 24), ("sm_80", 264)])
@pytest.mark.parametrize("is_spread", [True, False])
def test_bits_and_orders(arch: str, width: int, is_spread: bool) -> None:
    key = RmsNormKey(arch, width, False, KV_WIDTH, False, spread=is_spread)
    program = parse(compile_report(key).ptx)
    row = 2 * (width + KV_WIDTH)
    qr, kv = spread((TOKENS, width + KV_WIDTH), seed=width).split([width, KV_WIDTH], dim=1)
    weights = [torch.randn(n, generator=generator(n)).bfloat16() for n in (width, KV_WIDTH)]

    memory = GlobalMemory(1 << 20)
    qr_out, kv_out = memory.reserve(2 * TOKENS * width), memory.reserve(2 * TOKENS * KV_WIDTH)
    values = [put(memory, qr), row, put(memory, weights[0]), qr_out, 2 * width]
    values += [put(memory, kv), row, 0, put(memory, weights[1]), kv_out, 2 * KV_WIDTH, 0]
    values += [0, TOKENS, *divisor(2), EPS]
    records, make = orders.recorder(program)
    grid = 2 * TOKENS if is_spread else 2 * -(-TOKENS // key.warps)
    run_grid(program, pack(program, values), memory, blocks=grid, size=key.smem_bytes, seed=1, events=make)
    for record in records:
        orders.check(record)

    want = fused_q_kv_rmsnorm(qr, kv, *weights, EPS)
    for place, columns, result in zip((qr_out, kv_out), (width, KV_WIDTH), want, strict=True):
        got = torch.from_numpy(memory.get(place, (TOKENS, 2 * columns), np.uint8))
        assert torch.equal(got, bits(result))
