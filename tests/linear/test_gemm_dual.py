# SPDX-License-Identifier: Apache-2.0
"""fp8_bf16_gemm on the CPU: its meaning in float64, what it refuses, which rows of a layer take it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.linear.ops import bf16_linear, fp8_bf16_linear, fp8_linear
from tests.helpers import bits, check_op

E4M3 = torch.float8_e4m3fn


def call(rows: int, outputs: int, columns: int, x_outputs: int, x_columns: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(rows + outputs)

    def codes(n: int) -> torch.Tensor:
        return (torch.randn(n, columns, generator=g) * 50).to(E4M3)

    return {
        "a": codes(rows),
        "a_scale": torch.exp2(torch.randint(-9, 2, (rows, columns // 128), generator=g).float()),
        "weight": codes(outputs),
        "weight_scale": torch.exp2(torch.randint(-9, 2, (-(-outputs // 128), columns // 128), generator=g).float()),
        "x": torch.randn(rows, x_columns, generator=g).bfloat16(),
        "x_weight": torch.randn(x_outputs, x_columns, generator=g).bfloat16(),
    }


@pytest.mark.parametrize("shape", [(3, 400, 256, 48, 100), (1, 128, 128, 16, 8), (0, 64, 128, 16, 8)], ids=str)
def test_meaning(shape: tuple[int, ...]) -> None:
    given = call(*shape)
    rows, outputs, columns, x_outputs, _ = shape
    out = torch.full((rows, outputs + 16), torch.nan, dtype=torch.bfloat16)[:, 8:-8]
    x_out = torch.full((rows, x_outputs + 8), torch.nan)[:, 4:-4]
    got, x_got = fp8_bf16_linear(**given, out=out, x_out=x_out)
    assert got is out
    assert x_got is x_out
    spread = [given[name].double().repeat_interleave(128, -1) for name in ("a_scale", "weight_scale")]
    a = given["a"].double() * spread[0]
    weight = given["weight"].double() * spread[1].repeat_interleave(128, 0)[:outputs, :columns]
    assert torch.equal(bits(out.contiguous()), bits((a @ weight.t()).float().bfloat16()))
    assert torch.equal(x_out, (given["x"].double() @ given["x_weight"].double().t()).float())


def test_results_of_its_own() -> None:
    given = call(2, 256, 128, 32, 64)
    out, x_out = fp8_bf16_linear(**given)
    operands = [given.pop(name) for name in ("x", "x_weight")]
    assert torch.equal(bits(out), bits(fp8_linear(**given)))
    assert torch.equal(x_out, bf16_linear(*operands, out_dtype=torch.float32))


REFUSED = [
    ({"a": torch.zeros(3, 256)}, "a: expected"),
    ({"a": torch.zeros(3, 0, dtype=E4M3), "weight": torch.zeros(512, 0, dtype=E4M3)}, "a: expected K to be a positive"),
    ({"a_scale": torch.zeros(3, 3)}, "a_scale: expected"),
    ({"weight_scale": torch.zeros(3, 2)}, "weight_scale: expected"),
    ({"out": torch.zeros(3, 512)}, "out: expected"),
    ({"x": torch.zeros(2, 64, dtype=torch.bfloat16)}, "x: expected"),
    ({"x": torch.zeros(3, 64)}, "x: expected"),
    ({"x_weight": torch.zeros(32, 72, dtype=torch.bfloat16)}, "x_weight: expected"),
    ({"x_weight": torch.zeros(0, 64, dtype=torch.bfloat16)}, "x_weight: expected no dimension to be 0"),
    ({"x_out": torch.zeros(3, 32, dtype=torch.bfloat16)}, "x_out: expected"),
]


@pytest.mark.parametrize(("changed", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_it_refuses(changed: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"fp8_bf16_gemm: {words}"):
        fp8_bf16_linear(**{**call(3, 512, 256, 32, 64), **changed})


def test_as_an_op() -> None:
    given = call(3, 512, 256, 32, 64)
    x, x_weight = given.pop("x"), given.pop("x_weight")
    out, x_out = torch.empty(3, 512, dtype=torch.bfloat16), torch.empty(3, 32)
    check_op("fp8_bf16_gemm", *given.values(), out, x, x_weight, x_out, False)
