# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused_q_kv_rmsnorm_quant in the model: results, and what orders them in shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.linear.ops import activation_scale_shape, quantize_fp8_1x128
from cute_kernels.norm.ops import fused_q_kv_rmsnorm
from cute_kernels.norm.q_kv_quant import TOKENS, keys_of
from tests.compile.reports import compile_report
from tests.helpers import bits, generator, spread
from tests.model import orders
from tests.model.launch import pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import parse

EPS = 1e-6
KV_WIDTH = 512


@pytest.mark.parametrize(("arch", "width"), [("sm_90a", 1024), ("sm_90a", 200), ("sm_80", 200)])
@pytest.mark.parametrize("spread_rows", [True, False])
def test_bytes_and_orders(arch: str, width: int, spread_rows: bool) -> None:
    key = keys_of(arch, width, False, KV_WIDTH, False, True)[not spread_rows]
    program = parse(compile_report(key).ptx)
    tokens, row = TOKENS + 1, 2 * (width + KV_WIDTH)
    qr, kv = spread((tokens, width + KV_WIDTH), seed=width).split([width, KV_WIDTH], dim=1)
    weights = [torch.randn(n, generator=generator(n)).bfloat16() for n in (width, KV_WIDTH)]
    blocks, padded = activation_scale_shape(tokens, width)

    memory = GlobalMemory(1 << 20)
    codes, scales, query, kv_out = (
        memory.reserve(size)
        for size in (tokens * width, 4 * blocks * padded, 2 * tokens * width, 2 * tokens * KV_WIDTH)
    )
    values = [put(memory, qr), row, put(memory, weights[0]), codes, width, scales, 4 * padded, padded, query, 2 * width]
    values += [put(memory, kv), row, put(memory, weights[1]), kv_out, 2 * KV_WIDTH, tokens, EPS]
    records, make = orders.recorder(program)
    grid = 2 * tokens if spread_rows else -(-tokens // TOKENS)
    run_grid(program, pack(program, values), memory, blocks=grid, size=key.smem_bytes, seed=1, events=make)
    for record in records:
        orders.check(record)

    want_query, want_kv = fused_q_kv_rmsnorm(qr, kv, *weights, EPS)
    got = torch.from_numpy(memory.get(query, (tokens, 2 * width), np.uint8))
    assert torch.equal(got, bits(want_query))
    assert torch.equal(torch.from_numpy(memory.get(kv_out, (tokens, 2 * KV_WIDTH), np.uint8)), bits(want_kv))
    want_codes, want_scales = quantize_fp8_1x128(want_query)
    assert torch.equal(torch.from_numpy(memory.get(codes, (tokens, width), np.uint8)), bits(want_codes))
    memory_of_scales = torch.from_numpy(memory.get(scales, (blocks, padded), np.float32))
    assert torch.equal(memory_of_scales[:, :tokens].t(), want_scales)
    assert not memory_of_scales[:, tokens:].any()
