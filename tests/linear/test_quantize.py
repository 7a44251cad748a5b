# SPDX-License-Identifier: Apache-2.0
"""quantize_fp8_1x128 against the numpy oracle, byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.linear.ops import activation_scale_shape, quantize_fp8_1x128
from cute_kernels.runtime.record import record_calls
from tests import oracle
from tests.helpers import bits, check_op, spread

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
POISON = -777.0


def expected(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [T, K], and the memory of the scales fp32 [ceil(K / 128), T rounded up to 4]."""
    rows, columns = x.shape
    blocks, padded_rows = activation_scale_shape(rows, columns)
    padded = np.zeros((rows, blocks * 128))
    padded[:, :columns] = oracle.to_numpy(x)
    codes, byte = oracle.quantize_blocks(padded, 128, "e4m3", floor=1e-10)
    scales = np.zeros((blocks, padded_rows), dtype=np.float32)
    scales[:, :rows] = np.exp2(byte.astype(np.float64) - 127).T
    return codes[:, :columns], scales


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (3, 256), (4, 1024), (5, 200), (9, 8), (2, 37)])
def test_bytes(rows: int, columns: int) -> None:
    wide = spread((rows, columns + 16), seed=columns)
    x = wide[:, 8:-8]
    codes, scale = quantize_fp8_1x128(x)
    want_codes, want_scales = expected(x)
    assert np.array_equal(bits(codes).numpy(), want_codes)
    assert codes.is_contiguous()
    assert scale.shape == (rows, want_scales.shape[0])
    assert scale.stride() == (1, want_scales.shape[1])
    whole = scale.as_strided((want_scales.shape[0], want_scales.shape[1]), (want_scales.shape[1], 1))
    assert np.array_equal(whole.numpy(), want_scales)


def test_nan_infinity_floor_and_signs() -> None:
    x = torch.zeros(6, 256, dtype=BF16)
    x[0, :128] = torch.nan
    x[1, 3], x[1, 4], x[1, 5] = torch.inf, -torch.inf, 1.0
    x[2, 7], x[2, 8] = -torch.nan, 448.0
    x[3, 9] = 1e-11
    x[4, 10], x[4, 11] = -0.0, 450.0
    codes, scale = quantize_fp8_1x128(x)
    raw = codes.view(torch.uint8)
    assert (raw[0, :128] == 0x7F).all()
    assert scale[0].tolist() == [2.0**-42, 2.0**-42]
    assert raw[1, 3:6].tolist() == [0x7E, 0xFE, 0]
    assert scale[1, 0] == 2.0**120  # the largest fp32 number over 448, rounded up
    assert (raw[2, 7], raw[2, 8], scale[2, 0]) == (0x7F, 0x7E, 1.0)
    assert scale[3, 0] == 2.0**-42
    assert (raw[4, 10], scale[4, 0]) == (0x80, 2.0)
    assert not raw[5].any()


def test_writes_given_buffers_and_nothing_else() -> None:
    x = spread((5, 200), seed=1)
    codes, scale = quantize_fp8_1x128(x)
    wide, memory = torch.full((7, 210), POISON).to(E4M3), torch.full((4, 12), POISON)
    wanted, wanted_memory = wide.clone(), memory.clone()
    out, scale_out = wide[1:6, 2:202], memory[1:3, 2:10]
    got, got_scale = quantize_fp8_1x128(x, out=out, scale_out=scale_out)
    assert got is out
    assert torch.equal(got_scale, scale)
    wanted.view(torch.uint8)[1:6, 2:202] = codes.view(torch.uint8)
    wanted_memory[1:3, 2:10] = torch.nn.functional.pad(scale.t(), (0, 3))
    assert torch.equal(bits(wide), bits(wanted))
    assert torch.equal(memory, wanted_memory)


def test_a_row_does_not_depend_on_its_batch() -> None:
    x = spread((9, 256), seed=2)
    codes, scale = quantize_fp8_1x128(x)
    for t in range(9):
        alone, alone_scale = quantize_fp8_1x128(x[t : t + 1])
        assert torch.equal(bits(alone[0]), bits(codes[t]))
        assert torch.equal(alone_scale[0], scale[t])


@pytest.mark.parametrize(("rows", "columns"), [(0, 256), (3, 0)])
def test_empty(rows: int, columns: int) -> None:
    codes, scale = quantize_fp8_1x128(torch.zeros(rows, columns, dtype=BF16))
    assert codes.shape == (rows, columns)
    assert scale.shape == (rows, columns // 128)


def test_op_and_compile() -> None:
    x = spread((5, 200), seed=3)
    check_op("quantize_fp8_1x128", x, torch.zeros(5, 200, dtype=E4M3), torch.zeros(2, 8), False)
    compiled = torch.compile(quantize_fp8_1x128, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True), torch.fx.experimental._config.patch(use_duck_shape=False):
        for rows in (5, 3):
            for got, want in zip(compiled(x[:rows].clone()), quantize_fp8_1x128(x[:rows]), strict=True):
                assert torch.equal(bits(got), bits(want))


def test_recorded_cost() -> None:
    with record_calls() as recording:
        quantize_fp8_1x128(spread((5, 200), seed=4))
    (entry,) = recording.calls
    assert (entry.op, entry.cost.bytes) == ("quantize_fp8_1x128", 5 * 200 * 3 + 2 * 8 * 4)


@pytest.mark.parametrize(
    ("change", "error", "argument"),
    [
        ({"x": torch.zeros(5, 200)}, TypeError, "x"),
        ({"x": torch.zeros(200, 5, dtype=BF16).T}, ValueError, "x"),
        ({"x": torch.zeros(1, 5, 200, dtype=BF16)}, ValueError, "x"),
        ({"out": torch.zeros(5, 200, dtype=BF16)}, TypeError, "out"),
        ({"out": torch.zeros(5, 199).to(E4M3)}, ValueError, "out"),
        ({"scale_out": torch.zeros(2, 5)}, ValueError, "scale_out"),
        ({"scale_out": torch.zeros(8, 2).T}, ValueError, "scale_out"),
        ({"scale_out": torch.zeros(2, 8, dtype=BF16)}, TypeError, "scale_out"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], argument: str) -> None:
    with pytest.raises(error, match=rf"quantize_fp8_1x128: {argument}: expected"):
        quantize_fp8_1x128(**{"x": torch.zeros(5, 200, dtype=BF16), **change})
