# SPDX-License-Identifier: Apache-2.0
"""fp8_gemm_squares on the CPU: its meaning in float64, what it refuses, which kernel a call takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.linear.ops import fp8_linear, fp8_linear_squares
from tests.helpers import bits, check_op

E4M3 = torch.float8_e4m3fn


def call(rows: int, outputs: int, columns: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(rows + outputs)

    def codes(n: int) -> torch.Tensor:
        return (torch.randn(n, columns, generator=g) * 50).to(E4M3)

    return {
        "a": codes(rows),
        "a_scale": torch.exp2(torch.randint(-9, 2, (rows, columns // 128), generator=g).float()),
        "weight": codes(outputs),
        "weight_scale": torch.exp2(torch.randint(-9, 2, (-(-outputs // 128), columns // 128), generator=g).float()),
    }


@pytest.mark.parametrize(("rows", "outputs", "blocks"), [(3, 512, 4), (1, 400, 2), (5, 256, 0), (0, 128, 1)])
def test_meaning(rows: int, outputs: int, blocks: int) -> None:
    given = call(rows, outputs, 256)
    out = torch.full((rows, outputs + 16), torch.nan, dtype=torch.bfloat16)[:, 8:-8]
    sums = torch.full((rows, blocks + 2), torch.nan)
    got, squares = fp8_linear_squares(**given, blocks=blocks, out=out, squares=sums[:, 1 : blocks + 1])
    assert got is out
    assert torch.equal(bits(out.contiguous()), bits(fp8_linear(**given)))
    for t in range(rows):
        for block in range(blocks):
            exact = sum(float(x) ** 2 for x in out[t, block * 128 : (block + 1) * 128])
            assert abs(float(squares[t, block]) - exact) <= 2.0**-22 * exact
    assert bool(sums[:, 0].isnan().all())
    assert bool(sums[:, -1].isnan().all())


def test_results_of_its_own() -> None:
    out, squares = fp8_linear_squares(**call(2, 256, 128), blocks=2)
    assert (out.shape, out.dtype) == ((2, 256), torch.bfloat16)
    assert (squares.shape, squares.dtype) == ((2, 2), torch.float32)


REFUSED = [
    ({"a": torch.zeros(3, 256)}, "a: expected"),
    (
        {
            "a": torch.zeros(3, 192, dtype=torch.float8_e4m3fn),
            "weight": torch.zeros(512, 192, dtype=torch.float8_e4m3fn),
            "a_scale": torch.zeros(3, 1),
            "weight_scale": torch.zeros(4, 1),
        },
        "a: expected K to be a multiple of 128",
    ),
    ({"a_scale": torch.zeros(3, 3)}, "a_scale: expected"),
    ({"weight_scale": torch.zeros(3, 2)}, "weight_scale: expected"),
    ({"blocks": 5}, "squares: expected at most"),
    ({"blocks": -1}, "blocks: expected"),
    ({"squares": torch.zeros(3, 3)}, "squares: expected"),
    ({"squares": torch.zeros(3, 4, dtype=torch.float64)}, "squares: expected"),
    ({"out": torch.zeros(3, 512)}, "out: expected"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_it_refuses(changed: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"fp8_gemm_squares: {words}"):
        fp8_linear_squares(**{**call(3, 512, 256), "blocks": 4, **changed})


def test_as_an_op() -> None:
    given = call(3, 512, 256)
    out, squares = torch.empty(3, 512, dtype=torch.bfloat16), torch.empty(3, 4)
    check_op("fp8_gemm_squares", *given.values(), out, squares, False)


@pytest.mark.parametrize(("rows", "outputs"), [(128, 32768), (2048, 40960), (10**5, 65536 + 128)])
def test_ctas(rows: int, outputs: int) -> None:
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    from cute_kernels.linear import select

    key, ctas = select.with_squares(rows, outputs, 8)
    assert key.squares
    assert ctas == min(-(-rows // key.rows) * -(-outputs // key.columns), select.MULTIPROCESSORS)
