# SPDX-License-Identifier: Apache-2.0
"""fused_q_kv_rmsnorm_quant: the norms of fused_q_kv_rmsnorm, quantized as the oracle does it, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.linear.ops import activation_scale_shape, quantize_fp8_1x128
from cute_kernels.norm.ops import fused_q_kv_rmsnorm, fused_q_kv_rmsnorm_quant
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import bits, check_op, generator, spread

NAME = "fused_q_kv_rmsnorm_quant"
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
POISON = -777.0


def make(tokens: int = 5, width: int = 200, kv_width: int = 64) -> dict[str, Any]:
    """Column slices of one projection, as the layers have them."""
    qr, kv = spread((tokens, width + kv_width), seed=tokens).split([width, kv_width], dim=-1)
    g = generator(1)
    q_weight, kv_weight = torch.randn(width, generator=g).to(BF16), torch.randn(kv_width, generator=g)
    return {"qr": qr, "kv": kv, "q_weight": q_weight, "kv_weight": kv_weight, "eps": 1e-5}


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, POISON).to(dtype)


@pytest.mark.parametrize(("tokens", "width"), [(1, 1024), (3, 1536), (5, 200), (4, 128), (6, 37)])
def test_bytes(tokens: int, width: int) -> None:
    call = make(tokens, width)
    query = empty(tokens, width)
    codes, scale, kv = fused_q_kv_rmsnorm_quant(**call, qr_out=query)
    want_query, want_kv = fused_q_kv_rmsnorm(**call)
    assert torch.equal(bits(query), bits(want_query))
    assert torch.equal(bits(kv), bits(want_kv))

    blocks = -(-width // 128)
    padded = np.zeros((tokens, blocks * 128))
    padded[:, :width] = oracle.to_numpy(want_query)
    want, byte = oracle.quantize_blocks(padded, 128, "e4m3", floor=1e-10)
    assert np.array_equal(bits(codes).numpy(), want[:, :width])
    assert np.array_equal(scale.numpy(), np.exp2(byte.astype(np.float64) - 127))
    assert scale.stride() == (1, activation_scale_shape(tokens, width)[1])
    alone = quantize_fp8_1x128(want_query)
    assert torch.equal(bits(alone[0]), bits(codes))
    assert torch.equal(alone[1], scale)


def test_writes_given_buffers_and_nothing_else() -> None:
    call = make()
    codes, scale, kv = fused_q_kv_rmsnorm_quant(**call)
    wide = {
        "out": empty(7, 210, dtype=E4M3),
        "scale_out": empty(4, 12, dtype=FP32),
        "kv_out": empty(7, 70),
        "qr_out": empty(7, 210),
    }
    where = {"out": (5, 200), "scale_out": (2, 8), "kv_out": (5, 64), "qr_out": (5, 200)}
    inside = {name: (slice(1, 1 + rows), slice(2, 2 + columns)) for name, (rows, columns) in where.items()}
    want = {name: t.clone() for name, t in wide.items()}
    views = {name: t[inside[name]] for name, t in wide.items()}
    got = fused_q_kv_rmsnorm_quant(**call, **views)
    assert got[0] is views["out"]
    assert got[2] is views["kv_out"]
    assert got[1].data_ptr() == views["scale_out"].data_ptr()
    want["out"].view(torch.uint8)[inside["out"]] = codes.view(torch.uint8)
    want["scale_out"][inside["scale_out"]] = torch.nn.functional.pad(scale.t(), (0, 3))
    want["kv_out"][inside["kv_out"]] = kv
    want["qr_out"][inside["qr_out"]] = fused_q_kv_rmsnorm(**call)[0]
    for name, whole in wide.items():
        assert torch.equal(bits(whole), bits(want[name])), name


def test_a_row_does_not_depend_on_its_batch() -> None:
    call = make(6)
    whole = fused_q_kv_rmsnorm_quant(**call)
    call["qr"][2], call["kv"][3] = torch.nan, torch.inf
    spoiled = fused_q_kv_rmsnorm_quant(**call)
    for t in range(6):
        rows = {"qr": call["qr"][t : t + 1], "kv": call["kv"][t : t + 1]}
        for number, (alone, among) in enumerate(
            zip(fused_q_kv_rmsnorm_quant(**{**call, **rows}), spoiled, strict=True)
        ):
            assert torch.equal(bits(alone[0]), bits(among[t]))
            if t not in (2, 3) or (t == 2) == (number == 2):
                assert torch.equal(bits(among[t]), bits(whole[number][t]))
    assert (bits(spoiled[0][2]) == 0x7F).all()
    assert (spoiled[1][2] == 2.0**-42).all()


def test_no_rows() -> None:
    codes, scale, kv = fused_q_kv_rmsnorm_quant(**make(0))
    assert (codes.shape, scale.shape, kv.shape) == ((0, 200), (0, 2), (0, 64))


@pytest.mark.parametrize("has_query", [False, True])
def test_op_and_compile(has_query: bool) -> None:
    call = make()
    outputs = (
        torch.zeros(5, 200, dtype=E4M3),
        torch.zeros(activation_scale_shape(5, 200)),
        torch.zeros(5, 64, dtype=BF16),
        torch.zeros(5, 200, dtype=BF16) if has_query else None,
    )
    check_op(NAME, *call.values(), *outputs, False)

    compiled = torch.compile(fused_q_kv_rmsnorm_quant, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.fx.experimental._config.patch(use_duck_shape=False):
        for tokens in (5, 3):
            dense = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in make(tokens).items()}
            for got, want in zip(compiled(**dense), fused_q_kv_rmsnorm_quant(**dense), strict=True):
                assert torch.equal(bits(got), bits(want))


def test_recorded_cost() -> None:
    call = make()
    with record_calls() as recording:
        fused_q_kv_rmsnorm_quant(**call)
        fused_q_kv_rmsnorm_quant(**call, qr_out=empty(5, 200))
    moved = 5 * (200 + 64) * 2 + 200 * 2 + 64 * 4 + 5 * 200 + 2 * 8 * 4 + 5 * 64 * 2
    assert [entry.cost.bytes for entry in recording.calls] == [moved, moved + 5 * 200 * 2]
    assert [entry.op for entry in recording.calls] == [NAME, NAME]


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"qr": torch.zeros(5, 200)}, TypeError, "qr"),
        ({"qr": empty(200, 5).T}, ValueError, "qr"),
        ({"kv": empty(4, 64)}, ValueError, "kv"),
        ({"q_weight": empty(199)}, ValueError, "q_weight"),
        ({"kv_weight": torch.zeros(64, dtype=torch.float16)}, TypeError, "kv_weight"),
        ({"eps": -1e-6}, ValueError, "eps"),
        ({"out": empty(5, 200)}, TypeError, "out"),
        ({"out": empty(5, 199, dtype=E4M3)}, ValueError, "out"),
        ({"scale_out": empty(2, 5, dtype=FP32)}, ValueError, "scale_out"),
        ({"scale_out": empty(8, 2, dtype=FP32).T}, ValueError, "scale_out"),
        ({"scale_out": empty(2, 8)}, TypeError, "scale_out"),
        ({"kv_out": empty(5, 63)}, ValueError, "kv_out"),
        ({"qr_out": empty(4, 200)}, ValueError, "qr_out"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    with pytest.raises(error, match=rf"{NAME}: {argument}: expected"):
        fused_q_kv_rmsnorm_quant(**{**make(), **change})
