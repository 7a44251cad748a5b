# SPDX-License-Identifier: Apache-2.0
"""What output_quant means on the CPU, what it refuses, and what kernels are handed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.output.ops import fused_inv_rope_fp8_quant, output_scale_shape
from cute_kernels.sparse_mla.ops import sparse_mla_decode, sparse_mla_prefill, sparse_mla_prefill_paged
from tests import oracle
from tests.helpers import bits, check_op
from tests.sparse_mla import model
from tests.sparse_mla.model import FP8, Pool, int32

TABLE = oracle.cos_sin_table(50)


def outputs(tokens: int, groups: int, per_group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in a wider tensor, and scales, poisoned."""
    codes = torch.zeros(tokens, groups, per_group * 512 + 16, dtype=torch.uint8) + 0x55
    scales = torch.full(output_scale_shape(tokens, groups, per_group), torch.nan)
    return codes.view(torch.float8_e4m3fn)[..., :-16], scales


def expect(plain: torch.Tensor, positions: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = outputs(len(plain), groups, plain.shape[1] // groups)
    fused_inv_rope_fp8_quant(plain, positions, TABLE, groups, plain.shape[1] // groups, out=codes, scale_out=scales)
    return codes, scales


def check(plain: torch.Tensor, attend: Any, groups: int) -> None:
    positions = torch.arange(len(plain)) * 7 - 3
    codes, scales = outputs(len(plain), groups, plain.shape[1] // groups)
    attend(out=codes, output_quant=(positions, TABLE, scales))
    want, want_scales = expect(plain, positions, groups)
    assert torch.equal(bits(codes), bits(want))
    assert torch.equal(bits(scales), bits(want_scales))


def decode_arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    pool = Pool(FP8, 3, 72)  # rows that fill pages to the last byte
    for slot in range(24):
        pool.put(slot)
    q = torch.randn(2, 3, 4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    indices = torch.randint(-1, 24, (2, 3, 9), generator=torch.Generator().manual_seed(1)).int()
    indices[1, 2] = -1
    return q, pool.cache, indices


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_decode(groups: int) -> None:
    q, cache, indices = decode_arguments()
    plain, lse = sparse_mla_decode(q, cache, indices)
    check(plain.flatten(0, 1), lambda **more: sparse_mla_decode(q, cache, indices, **more), groups)
    codes, scales = outputs(6, groups, 4 // groups)
    quant = torch.zeros(6, dtype=torch.int64), TABLE, scales
    got, own = sparse_mla_decode(q, cache, indices, out=codes, output_quant=quant)
    assert got is codes
    assert torch.equal(own, lse)
    assert sparse_mla_decode(q, cache, indices, out=codes, output_quant=quant, return_lse=False)[1] is None
    assert not codes[5].float().any(), "a row that attends to nothing"
    assert (scales[..., 5] == 2.0**-42).all()
    assert not scales[..., 6:].any()


def test_prefill() -> None:
    g = torch.Generator().manual_seed(2)
    q, kv = torch.randn(5, 2, 512, generator=g).bfloat16(), torch.randn(30, 1, 512, generator=g).bfloat16()
    indices = torch.randint(-1, 30, (5, 1, 7), generator=g).int()
    plain, _, _ = sparse_mla_prefill(q, kv, indices, 0.05)
    check(plain, lambda **more: sparse_mla_prefill(q, kv, indices, 0.05, **more), 2)
    assert sparse_mla_prefill(q, kv, indices, 0.05, return_lse=False)[1:] == (None, None)


def test_prefill_of_raw_queries() -> None:
    """Their norm is in the logits, and their rotary columns are rounded as they are rotated."""
    g = torch.Generator().manual_seed(3)
    powers = torch.exp2(torch.randint(-9, 9, (5, 4, 1), generator=g).float())
    q = (torch.randn(5, 4, 512, generator=g) * powers).bfloat16()
    kv, indices = torch.randn(30, 1, 512, generator=g).bfloat16(), torch.randint(-1, 30, (5, 1, 7), generator=g).int()
    squares = (torch.rand(5, 4, 4, generator=g) * 300 * powers**2).flatten(1)
    sink, positions = torch.tensor([0.5, -1.0, -torch.inf, 3.0]), torch.tensor([3, 49, 50, -1, 17])
    indices[4], squares[4, 2] = -1, torch.nan
    numbers = oracle.to_numpy(q)
    cos, sin = np.split(TABLE[positions.clamp(0, 49)][:, None].numpy(), 2, axis=-1)
    numbers[..., 448:] = oracle.bf16_round(oracle.rope_f32(numbers[..., 448:], cos, sin))
    roots = np.sqrt(squares.numpy().astype(np.float64).reshape(5, 4, 4).sum(-1, keepdims=True) / 512 + 0.25)
    rows = [[oracle.to_numpy(kv[i, 0]) for i in line if i >= 0] for line in indices[:, 0].tolist()]
    results = [model.attention(x, keys, 0.05, sink.tolist()) for x, keys in zip(numbers / roots, rows, strict=True)]
    out, top, lse = (np.stack(part) for part in zip(*results, strict=True))
    codes, scales = outputs(5, 2, 2)
    quant = positions, TABLE, scales
    before = q.clone()
    given = {"attn_sink": sink, "q_norm": (squares, 0.25), "output_quant": quant}
    got = sparse_mla_prefill(q, kv, indices, 0.05, **given, out=codes)
    model.assert_fp32(got[1], top)
    model.assert_fp32(got[2], lse)
    assert torch.equal(q, before)
    want, want_scales = outputs(5, 2, 2)
    plain = torch.from_numpy(out).float().bfloat16()
    fused_inv_rope_fp8_quant(plain, positions, TABLE, 2, 2, out=want, scale_out=want_scales)
    assert torch.equal(bits(codes), bits(want))
    assert torch.equal(bits(scales), bits(want_scales))


def test_prefill_paged() -> None:
    q, cache, _ = decode_arguments()
    given = {
        "q": q[0],
        "swa_cache": cache,
        "swa_block_table": int32([[0, 2, 1]]),
        "query_start_loc": int32([0, 3]),
        "seq_lens": int32([11]),
        "sm_scale": 0.05,
        "window_size": 6,
    }
    plain, _, _ = sparse_mla_prefill_paged(**given)
    check(plain, lambda **more: sparse_mla_prefill_paged(**given, **more), 1)


def test_opcheck() -> None:
    q, cache, indices = decode_arguments()
    codes, scales = outputs(6, 2, 2)
    rest = [None] * 5
    arguments = (q, cache, indices, None, None, 0.04, FP8, *rest, FP8, 0, 0, codes, None, None, 0, "auto", None, 0.0)
    check_op("sparse_mla_decode", *arguments, torch.zeros(6, dtype=torch.int64), TABLE, scales)


@pytest.mark.parametrize(
    ("changes", "argument", "error"),
    [
        ({"out": None}, "out", TypeError),
        ({"out": torch.zeros(6, 2, 1024, dtype=torch.bfloat16)}, "out", TypeError),
        ({"out": torch.zeros(5, 2, 1024).to(torch.float8_e4m3fn)}, "out", ValueError),
        ({"out": torch.zeros(6, 2, 512).to(torch.float8_e4m3fn)}, "out", ValueError),
        ({"out": torch.zeros(6, 8, 256).to(torch.float8_e4m3fn)}, "out", ValueError),
        ({"positions": torch.zeros(6, dtype=torch.int32)}, "positions", TypeError),
        ({"positions": torch.zeros(5, dtype=torch.int64)}, "positions", ValueError),
        ({"table": TABLE[:0]}, "cos_sin_cache", ValueError),
        ({"table": TABLE.double()}, "cos_sin_cache", TypeError),
        ({"scales": torch.zeros(2, 8, 6)}, "out_scale", ValueError),
        ({"scales": torch.zeros(2, 8, 8, dtype=torch.int32)}, "out_scale", TypeError),
        ({"quant": 3}, "output_quant", TypeError),
        ({"positions": None}, "positions", ValueError),
    ],
)
def test_bad_arguments(changes: dict[str, Any], argument: str, error: type[Exception]) -> None:
    q, cache, indices = decode_arguments()
    codes, scales = outputs(6, 2, 2)
    given = {"out": codes, "positions": torch.zeros(6, dtype=torch.int64), "table": TABLE, "scales": scales} | changes
    quant = given.get("quant", (given["positions"], given["table"], given["scales"]))
    with pytest.raises(error, match=rf"^sparse_mla_decode: {argument}: expected "):
        sparse_mla_decode(q, cache, indices, out=given["out"], output_quant=quant)
