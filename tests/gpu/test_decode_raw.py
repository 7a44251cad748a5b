# SPDX-License-Identifier: Apache-2.0
"""sparse_mla_decode with q_norm on a Hopper GPU: queries as their projection made them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from cute_kernels.runtime.arch import arch_of
from cute_kernels.runtime.ops import FALLBACK_VARIABLE
from cute_kernels.sparse_mla.ops import sparse_mla_decode
from tests.gpu import decode_cases
from tests.gpu.decode_checks import same_bits
from tests.gpu.test_attention_codes import TABLE, Exact, Outputs, check, positions_of, rotated, sums_of_squares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or arch_of(0) != "sm_90a", reason="the kernel is Hopper's"),
]

EPS = 1e-6


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK_VARIABLE, raising=False)


CALLS = [
    # heads, groups, second, requests, tokens, splits
    (64, 8, "none", 150, 1, {"num_splits": 1}),
    (64, 8, "listed", 70, 2, {"num_splits": 1}),
    (64, 2, "dense", 5, 3, {"num_splits": 1}),
    (128, 16, "listed", 75, 2, {"num_splits": 1}),
    (128, 16, "dense", 2, 1, {"num_splits": 5}),
    (64, 8, "listed", 6, 1, {"num_splits": 3}),
    (64, 8, "none", 3, 1, {"split_tokens": 64}),
    (64, 8, "listed", 3, 1, {}),
    (100, 4, "listed", 40, 2, {"num_splits": 1}),
    (32, 4, "listed", 140, 1, {"num_splits": 1}),
    (17, 1, "dense", 9, 1, {"num_splits": 2}),
]


def make(heads: int, second: str, b: int, s_q: int, splits: dict[str, int]) -> decode_cases.Call:
    call = decode_cases.make(b=b, s_q=s_q, heads=heads, second=second, lengths="bs", extra_topk=1200, **splits)
    call.indices[-1] = -1  # among others, a row that attends to nothing
    if call.extra_indices is not None:
        call.extra_indices[-1] = -1
    return call


def strided(squares: torch.Tensor) -> torch.Tensor:
    """In the midst of NaN, at no address that 16 divides."""
    wide = torch.full((len(squares), squares.shape[1] + 5), math.nan, device="cuda")
    wide[:, 3:-2] = squares
    return wide[:, 3:-2]


@pytest.mark.parametrize(("heads", "groups", "second", "b", "s_q", "splits"), CALLS)
@pytest.mark.parametrize("eps", [0.0, 3.0])
def test_bits_where_nothing_is_rounded(
    heads: int, groups: int, second: str, b: int, s_q: int, splits: dict[str, int], eps: float
) -> None:
    """Byte for byte the codes of queries that are normed and rotated before. NaN stays in its head."""
    call, rows = make(heads, second, b, s_q, splits), b * s_q
    g = torch.Generator("cuda").manual_seed(rows)
    q, squares, table, finished = Exact.make(rows, heads, positions_of(rows), eps, g)
    finished[1, 3, 77] = q[1, 3, 77] = math.nan
    finished[0, 5] = squares[0, 4 * 5 + 2] = math.nan
    plain, lse = decode_cases.run(dataclasses.replace(call, q=finished.unflatten(0, (b, s_q))))
    # as columns of a wider product
    wide = torch.full((rows, heads * 512 + 64), math.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :-64] = q.flatten(1)
    raw = dataclasses.replace(call, q=wide[:, :-64].unflatten(1, (heads, 512)).unflatten(0, (b, s_q)))
    before, sums, got = wide.clone(), strided(squares), torch.full_like(lse, math.nan)

    def attend(**outputs: Any) -> None:
        positions, _, scales = outputs.pop("output_quant")
        quant = positions, table, scales
        decode_cases.run(raw, lse=got, q_norm=(sums, eps), output_quant=quant, **outputs)

    check(rows, heads, plain, attend, groups, times=2, table=table)
    assert same_bits((got,), (lse,))
    assert same_bits((wide,), (before,))


@pytest.mark.parametrize(("heads", "groups", "second", "b", "s_q", "splits"), CALLS)
def test_meaning_in_float64(heads: int, groups: int, second: str, b: int, s_q: int, splits: dict[str, int]) -> None:
    call, rows = make(heads, second, b, s_q, splits), b * s_q
    positions, flat = positions_of(rows), call.q.flatten(0, 1)
    squares = sums_of_squares(flat)
    squares[0] = 7.0  # whatever they are, they are what queries are normed by
    factors = torch.rsqrt(squares.double().unflatten(1, (heads, 4)).sum(-1, keepdim=True) / 512 + EPS)
    turned = rotated(flat, positions)
    turned[..., 448:] = turned[..., 448:].bfloat16().double()
    want, want_lse = dataclasses.replace(call, q=(turned * factors).unflatten(0, (b, s_q))).expected()
    back = rotated(want.flatten(0, 1), positions, way=-1)
    size = back.abs()
    size[..., 448:] = size[..., 448:].unflatten(-1, (32, 2)).norm(dim=-1).repeat_interleave(2, dim=-1) * 1.5
    outputs, lse = Outputs.make(rows, groups, heads // groups), torch.full_like(want_lse, math.nan, dtype=torch.float32)
    quant = positions, TABLE.cuda(), outputs.scales
    decode_cases.run(call, lse=lse, out=outputs.codes, q_norm=(squares, EPS), output_quant=quant)
    scales = outputs.scales.permute(2, 0, 1)[:rows].unflatten(2, (-1, 4)).flatten(1, 2)[..., None]
    got = outputs.codes.double().unflatten(2, (-1, 4, 128)).flatten(1, 2) * scales.double()
    back, size = (x.unflatten(2, (4, 128)) for x in (back, size))
    # a code is off by half of its last place, and a bf16 result by what assert_near allows it
    bound = 2.0**-4 * back.abs() + scales * 2.0**-10 + (2.01 / 128 * size).clamp(min=1.5e-3) * 1.1
    assert bool(((got - back).abs() <= bound).all())
    off = (lse - want_lse).abs()
    # a sum of 512 products in fp32, and the rotation's rounding: a bf16 tie may go either way
    assert bool(((lse == want_lse) | (off <= 2e-4 + 2.0**-13 * want_lse.abs())).all()), off.nan_to_num().max()


def test_bits_alone_and_among_others() -> None:
    call = make(64, "listed", 140, 1, {"num_splits": 1})
    squares, positions = sums_of_squares(call.q.flatten(0, 1)), positions_of(140)

    def codes(rows: slice) -> torch.Tensor:
        some, count = call.take(rows), len(positions[rows])
        outputs = Outputs.make(count, 8, 8)
        quant = positions[rows], TABLE.cuda(), outputs.scales
        decode_cases.run(some, out=outputs.codes, q_norm=(squares[rows], EPS), output_quant=quant)
        return outputs.codes.clone().view(torch.uint8)

    whole = codes(slice(0, 140))
    for rows in (slice(0, 1), slice(3, 9), slice(70, 140)):
        assert torch.equal(codes(rows), whole[rows])


@pytest.mark.parametrize("heads", [8, 16])
def test_few_heads_are_refused(heads: int) -> None:
    call = decode_cases.make(b=3, heads=heads)
    outputs = Outputs.make(3, 1, heads)
    given = {"q_norm": (torch.zeros(3, heads * 4, device="cuda"), EPS), "out": outputs.codes}
    with pytest.raises(RuntimeError, match="q_norm is supported for more than 16 heads, got"):
        sparse_mla_decode(**call.arguments(), **given, output_quant=(positions_of(3), TABLE.cuda(), outputs.scales))
