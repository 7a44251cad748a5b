# SPDX-License-Identifier: Apache-2.0
"""The kernels of fused_inv_rope_fp8_quant in the model: every byte, whichever warps take heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from cute_kernels.output.inv_rope import TOKENS, InvRopeKey
from cute_kernels.output.ops import fused_inv_rope_fp8_quant, output_scale_shape
from tests import oracle
from tests.compile.reports import compile_report
from tests.helpers import raw_bytes, spread
from tests.model import orders
from tests.model.launch import divisor, pack, run_grid
from tests.model.memory import GlobalMemory
from tests.model.problems import put
from tests.model.ptx import parse


@pytest.mark.parametrize(
    ("scales", "heads", "one_token", "late"),
    [
        ("fp32", 1, True, False),
        ("fp32", 1, True, True),
        ("fp32", 1, False, False),
        ("fp32", 2, False, False),
        ("packed", 1, True, False),
        ("none", 1, True, False),
    ],
)
@pytest.mark.parametrize(("tokens", "groups", "per_group"), [(1, 3, 2), (9, 1, 5)])
def test_every_byte(
    scales: str, heads: int, one_token: bool, late: bool, tokens: int, groups: int, per_group: int
) -> None:
    key = InvRopeKey("sm_90a", scales, heads, one_token, late)
    program, memory = parse(compile_report(key).ptx), GlobalMemory(1 << 20)
    is_packed, is_quantized, count = scales == "packed", scales != "none", groups * per_group
    o = spread((tokens, count, 512), seed=tokens)
    positions = torch.arange(tokens) * 37 % 50 - 2
    table = oracle.cos_sin_table(40)
    results = fused_inv_rope_fp8_quant(
        o, positions, table, groups, per_group, tma_aligned_scales=is_packed, quantize=is_quantized
    )
    out, scale = (results[0], results[1]) if is_quantized else (results[0], None)
    row = per_group * 512 * out.element_size()

    place = memory.reserve(tokens * groups * row)
    values = [put(memory, o), count * 1024, 1024, tokens, count, put(memory, positions), 8, put(memory, table), 256]
    values += [len(table), place, row, tokens * row]
    shape = output_scale_shape(tokens, groups, per_group, is_packed) if is_quantized else (0, 0, 0)
    size = int(np.prod(shape)) * 4
    scale_place = memory.reserve(max(size, 4))
    values += [scale_place, shape[1] * shape[2] * 4, shape[2] * 4, shape[2]] if is_quantized else [0, 0, 0, 0]
    head_ctas = -(-count // (heads * (key.warps if one_token else 1)))
    values += [*divisor(per_group), *divisor(head_ctas)]
    token_ctas = -(-tokens // TOKENS) if not one_token else shape[2] if is_quantized else tokens
    records, make = orders.recorder(program)
    # tokens are the second dimension of the grid where CTAs take one: those of the same heads run together here
    rows = token_ctas if one_token else 1
    grid = {"blocks": token_ctas * head_ctas, "cluster": rows, "rows": rows}
    run_grid(program, pack(program, values), memory, **grid, size=key.smem_bytes, seed=1, events=make)
    for record in records:
        orders.check(record)

    got = memory.get(place, (groups, tokens, row), np.uint8)
    want = raw_bytes(out.transpose(0, 1).contiguous()).numpy().reshape(groups, tokens, row)
    np.testing.assert_array_equal(got, want)
    if scale is not None:
        stored = memory.get(scale_place, shape, np.int32)
        dense = scale.permute(1, 2, 0).contiguous().view(torch.int32).numpy()
        np.testing.assert_array_equal(stored[:, :, :tokens], dense)
        assert not stored[:, :, tokens:].any()
